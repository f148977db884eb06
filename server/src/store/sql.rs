//! The statements, once for both databases: compiled in `sqlite` and in `postgres`, which say what
//! `Db` is. Only SQL that both read alike may stand here.

use super::{BEGIN, Db, for_share};
use crate::store::{
    After, Batch, BatchRows, Change, Cluster, Deployment, DriverVersion, Environment, Instance, InstancePlace,
    InstanceToWrite, OutboxKind, OutboxRow, Person, Pushed, Result, Secret, Step, Store, StoreError, Target, Task,
    Token, TokenKind,
};
use async_trait::async_trait;
use sqlx::types::Json;
use sqlx::{Pool, Row as _, Transaction};
use std::collections::HashMap;
use std::time::Duration;
use tokio::sync::Semaphore;

/// A store on one kind of database.
pub(in crate::store) struct SqlStore {
    pub(super) writer: Pool<Db>,
    pub(super) reader: Pool<Db>,
    /// How many changes may hold or wait for a writer connection at a time. Fewer than there are
    /// connections, or one: what the repository writers record must not queue behind every caller,
    /// or the remote's branch moves on before each push.
    pub(super) changes: Semaphore,
}

type Tx = Transaction<'static, Db>;

/// How long a change waits for its turn, as the pools do for a connection.
const TURN_LIMIT: Duration = Duration::from_secs(60);

/// How long a push that we gave up may still arrive, in milliseconds: commits older than this are
/// no longer looked for, so that a repository that refuses for days does not fill the table.
const LATE_PUSH_LIMIT: i64 = 3_600_000;

/// A unique constraint says [`StoreError::Exists`]; everything else is the database's.
fn taken(error: sqlx::Error) -> StoreError {
    match &error {
        sqlx::Error::Database(inner) if inner.is_unique_violation() => StoreError::Exists,
        _ => error.into(),
    }
}

/// One row must have been touched, otherwise its version moved.
fn one(rows: u64) -> Result<()> {
    if rows == 1 { Ok(()) } else { Err(StoreError::Conflict) }
}

impl SqlStore {
    async fn begin(&self) -> Result<Tx> {
        Ok(self.writer.begin_with(BEGIN).await?)
    }

    async fn with_steps(&self, mut tasks: Vec<Task>) -> Result<Vec<Task>> {
        for task in &mut tasks {
            task.steps = sqlx::query_as::<_, Step>("SELECT * FROM task_steps WHERE task_id = $1 ORDER BY position")
                .bind(&task.id)
                .fetch_all(&self.reader)
                .await?;
        }
        Ok(tasks)
    }
}

async fn insert_token(tx: &mut Tx, token: &Token) -> Result<()> {
    sqlx::query(
        "INSERT INTO tokens (id, hash, kind, name, email, cluster_id, created_at, revoked_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
    )
    .bind(&token.id)
    .bind(&token.hash)
    .bind(token.kind.as_str())
    .bind(&token.name)
    .bind(&token.email)
    .bind(&token.cluster_id)
    .bind(token.created_at)
    .bind(token.revoked_at)
    .execute(&mut **tx)
    .await
    .map_err(taken)?;
    Ok(())
}

async fn insert_outbox(
    tx: &mut Tx,
    target: &Target,
    kind: OutboxKind,
    subject: &str,
    author: &Person,
    now: i64,
) -> Result<()> {
    sqlx::query(
        "INSERT INTO outbox (repository, branch, kind, subject_id, author_name, author_email, created_at) VALUES ($1, $2, $3, $4, $5, $6, $7)",
    )
    .bind(&target.repository)
    .bind(&target.branch)
    .bind(kind.as_str())
    .bind(subject)
    .bind(&author.name)
    .bind(&author.email)
    .bind(now)
    .execute(&mut **tx)
    .await?;
    Ok(())
}

async fn check_version(tx: &mut Tx, query: &'static str, id: &str, version: i64) -> Result<()> {
    let found: Option<i64> = sqlx::query_scalar(query).bind(id).fetch_optional(&mut **tx).await?;
    if found == Some(version) { Ok(()) } else { Err(StoreError::Conflict) }
}

async fn insert_deployment(tx: &mut Tx, change: &Change) -> Result<Deployment> {
    let mut row = change.deployment.clone();
    let allocated: i64 =
        sqlx::query_scalar("UPDATE environments SET allocated = allocated + 1 WHERE id = $1 RETURNING allocated")
            .bind(&row.environment_id)
            .fetch_one(&mut **tx)
            .await?;
    let size = i64::from(styrmin_renderer::layout::SHARD_SIZE);
    row.shard = (allocated - 1) / size;
    if row.shard > 0 && (allocated - 1) % size == 0 {
        // The first of a new shard: its Kustomization must be there before it.
        insert_outbox(tx, &change.target, OutboxKind::Environment, &row.environment_id, &change.author, change.now)
            .await?;
    }
    row.version = 1;
    sqlx::query(
        "INSERT INTO deployments (id, environment_id, name, shard, driver_name, driver_digest, driver_pin, application_version, config, parameters, lifecycle, state, version, last_sequence, newest_instance_id, active_instance_id, created_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)",
    )
    .bind(&row.id)
    .bind(&row.environment_id)
    .bind(&row.name)
    .bind(row.shard)
    .bind(&row.driver_name)
    .bind(&row.driver_digest)
    .bind(&row.driver_pin)
    .bind(&row.application_version)
    .bind(Json(&row.config))
    .bind(Json(&row.parameters))
    .bind(row.lifecycle.as_str())
    .bind(row.state.as_str())
    .bind(row.version)
    .bind(row.last_sequence)
    .bind(&row.newest_instance_id)
    .bind(&row.active_instance_id)
    .bind(row.created_at)
    .execute(&mut **tx)
    .await
    .map_err(taken)?;
    Ok(row)
}

async fn update_deployment(tx: &mut Tx, change: &Change) -> Result<Deployment> {
    let row = &change.deployment;
    let done = sqlx::query(
        "UPDATE deployments SET driver_name = $3, driver_digest = $4, driver_pin = $5, application_version = $6, config = $7, parameters = $8, lifecycle = $9, state = $10, last_sequence = $11, newest_instance_id = $12, version = version + 1 WHERE id = $1 AND version = $2",
    )
    .bind(&row.id)
    .bind(row.version)
    .bind(&row.driver_name)
    .bind(&row.driver_digest)
    .bind(&row.driver_pin)
    .bind(&row.application_version)
    .bind(Json(&row.config))
    .bind(Json(&row.parameters))
    .bind(row.lifecycle.as_str())
    .bind(row.state.as_str())
    .bind(row.last_sequence)
    .bind(&row.newest_instance_id)
    .execute(&mut **tx)
    .await
    .map_err(taken)?;
    one(done.rows_affected())?;
    Ok(Deployment { version: row.version + 1, ..row.clone() })
}

async fn insert_instance(tx: &mut Tx, row: &Instance) -> Result<()> {
    sqlx::query(
        "INSERT INTO instances (id, deployment_id, sequence, workflow, spec, origins, document, secrets_file, secrets_stamp, state, revision, task_id, author_name, author_email, created_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)",
    )
    .bind(&row.id)
    .bind(&row.deployment_id)
    .bind(row.sequence)
    .bind(&row.workflow)
    .bind(Json(&row.spec))
    .bind(Json(&row.origins))
    .bind(&row.document)
    .bind(&row.secrets_file)
    .bind(&row.secrets_stamp)
    .bind(row.state.as_str())
    .bind(&row.revision)
    .bind(&row.task_id)
    .bind(&row.author_name)
    .bind(&row.author_email)
    .bind(row.created_at)
    .execute(&mut **tx)
    .await
    // Another change took this sequence.
    .map_err(|error| match taken(error) {
        StoreError::Exists => StoreError::Conflict,
        other => other,
    })?;
    Ok(())
}

async fn insert_task(tx: &mut Tx, row: &Task) -> Result<()> {
    sqlx::query(
        "INSERT INTO tasks (id, deployment_id, instance_id, sequence, workflow, state, message, author_name, author_email, version, created_at, ended_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
    )
    .bind(&row.id)
    .bind(&row.deployment_id)
    .bind(&row.instance_id)
    .bind(row.sequence)
    .bind(&row.workflow)
    .bind(row.state.as_str())
    .bind(&row.message)
    .bind(&row.author_name)
    .bind(&row.author_email)
    .bind(row.version)
    .bind(row.created_at)
    .bind(row.ended_at)
    .execute(&mut **tx)
    .await?;
    for step in &row.steps {
        sqlx::query(
            "INSERT INTO task_steps (task_id, position, name, state, attempt, message, started_at, ended_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        )
        .bind(&row.id)
        .bind(step.position)
        .bind(&step.name)
        .bind(step.state.as_str())
        .bind(step.attempt)
        .bind(&step.message)
        .bind(step.started_at)
        .bind(step.ended_at)
        .execute(&mut **tx)
        .await?;
    }
    Ok(())
}

async fn update_task(tx: &mut Tx, row: &Task) -> Result<()> {
    let done = sqlx::query(
        "UPDATE tasks SET state = $3, message = $4, ended_at = $5, version = version + 1 WHERE id = $1 AND version = $2",
    )
    .bind(&row.id)
    .bind(row.version)
    .bind(row.state.as_str())
    .bind(&row.message)
    .bind(row.ended_at)
    .execute(&mut **tx)
    .await?;
    one(done.rows_affected())?;
    for step in &row.steps {
        sqlx::query(
            "UPDATE task_steps SET state = $3, attempt = $4, message = $5, started_at = $6, ended_at = $7 WHERE task_id = $1 AND position = $2",
        )
        .bind(&row.id)
        .bind(step.position)
        .bind(step.state.as_str())
        .bind(step.attempt)
        .bind(&step.message)
        .bind(step.started_at)
        .bind(step.ended_at)
        .execute(&mut **tx)
        .await?;
    }
    Ok(())
}

#[async_trait]
impl Store for SqlStore {
    async fn ping(&self) -> Result<()> {
        sqlx::query("SELECT 1").execute(&self.reader).await?;
        Ok(())
    }

    async fn token(&self, hash: &str) -> Result<Option<Token>> {
        Ok(sqlx::query_as("SELECT * FROM tokens WHERE hash = $1 AND revoked_at IS NULL")
            .bind(hash)
            .fetch_optional(&self.reader)
            .await?)
    }

    async fn insert_token(&self, token: &Token) -> Result<()> {
        let mut tx = self.begin().await?;
        insert_token(&mut tx, token).await?;
        Ok(tx.commit().await?)
    }

    async fn has_administrator(&self) -> Result<bool> {
        let count: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM tokens WHERE kind = $1")
            .bind(TokenKind::Administrator.as_str())
            .fetch_one(&self.reader)
            .await?;
        Ok(count > 0)
    }

    async fn insert_cluster(&self, cluster: &Cluster, agent: &Token, author: &Person) -> Result<()> {
        let mut tx = self.begin().await?;
        sqlx::query(
            "INSERT INTO clusters (id, name, config, version, git_url, repository, branch, path, credentials, age_recipient, created_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
        )
        .bind(&cluster.id)
        .bind(&cluster.name)
        .bind(Json(&cluster.config))
        .bind(cluster.version)
        .bind(&cluster.git_url)
        .bind(&cluster.repository)
        .bind(&cluster.branch)
        .bind(&cluster.path)
        .bind(&cluster.credentials)
        .bind(&cluster.age_recipient)
        .bind(cluster.created_at)
        .execute(&mut *tx)
        .await
        .map_err(taken)?;
        insert_token(&mut tx, agent).await?;
        let target = Target { repository: cluster.repository.clone(), branch: cluster.branch.clone() };
        insert_outbox(&mut tx, &target, OutboxKind::Cluster, &cluster.id, author, cluster.created_at).await?;
        Ok(tx.commit().await?)
    }

    async fn update_cluster(&self, cluster: &Cluster) -> Result<()> {
        let done = sqlx::query(
            "UPDATE clusters SET config = $3, age_recipient = $4, version = version + 1 WHERE id = $1 AND version = $2",
        )
        .bind(&cluster.id)
        .bind(cluster.version)
        .bind(Json(&cluster.config))
        .bind(&cluster.age_recipient)
        .execute(&self.writer)
        .await?;
        one(done.rows_affected())
    }

    async fn cluster(&self, id_or_name: &str) -> Result<Option<Cluster>> {
        Ok(sqlx::query_as(
            "SELECT * FROM clusters WHERE id = $1 OR name = $1 ORDER BY (CASE WHEN id = $1 THEN 0 ELSE 1 END) LIMIT 1",
        )
        .bind(id_or_name)
        .fetch_optional(&self.reader)
        .await?)
    }

    async fn clusters_in(&self, target: &Target) -> Result<Vec<Cluster>> {
        Ok(sqlx::query_as("SELECT * FROM clusters WHERE repository = $1 AND branch = $2 ORDER BY created_at, id")
            .bind(&target.repository)
            .bind(&target.branch)
            .fetch_all(&self.reader)
            .await?)
    }

    async fn clusters(&self, after: After, limit: i64) -> Result<Vec<Cluster>> {
        let (name, id) = after.unwrap_or_default();
        Ok(sqlx::query_as("SELECT * FROM clusters WHERE (name, id) > ($1, $2) ORDER BY name, id LIMIT $3")
            .bind(name)
            .bind(id)
            .bind(limit)
            .fetch_all(&self.reader)
            .await?)
    }

    async fn insert_environment(&self, environment: &Environment, target: &Target, author: &Person) -> Result<()> {
        let mut tx = self.begin().await?;
        sqlx::query(
            "INSERT INTO environments (id, cluster_id, name, config, version, allocated, created_at) VALUES ($1, $2, $3, $4, $5, $6, $7)",
        )
        .bind(&environment.id)
        .bind(&environment.cluster_id)
        .bind(&environment.name)
        .bind(Json(&environment.config))
        .bind(environment.version)
        .bind(environment.allocated)
        .bind(environment.created_at)
        .execute(&mut *tx)
        .await
        .map_err(taken)?;
        insert_outbox(&mut tx, target, OutboxKind::Environment, &environment.id, author, environment.created_at)
            .await?;
        Ok(tx.commit().await?)
    }

    async fn update_environment(&self, environment: &Environment) -> Result<()> {
        let done =
            sqlx::query("UPDATE environments SET config = $3, version = version + 1 WHERE id = $1 AND version = $2")
                .bind(&environment.id)
                .bind(environment.version)
                .bind(Json(&environment.config))
                .execute(&self.writer)
                .await?;
        one(done.rows_affected())
    }

    async fn environment(&self, id: &str) -> Result<Option<Environment>> {
        Ok(sqlx::query_as("SELECT * FROM environments WHERE id = $1").bind(id).fetch_optional(&self.reader).await?)
    }

    async fn environments(&self, cluster: Option<&str>, after: After, limit: i64) -> Result<Vec<Environment>> {
        let (name, id) = after.unwrap_or_default();
        Ok(sqlx::query_as(
            "SELECT * FROM environments WHERE (CAST($1 AS TEXT) IS NULL OR cluster_id = $1) AND (name, id) > ($2, $3) ORDER BY name, id LIMIT $4",
        )
        .bind(cluster)
        .bind(name)
        .bind(id)
        .bind(limit)
        .fetch_all(&self.reader)
        .await?)
    }

    async fn change(&self, change: &Change) -> Result<Deployment> {
        let turn = tokio::time::timeout(TURN_LIMIT, self.changes.acquire()).await;
        let Ok(Ok(_turn)) = turn else { return Err(sqlx::Error::PoolTimedOut.into()) };
        let mut tx = self.begin().await?;
        let (cluster, environment) = (&change.cluster, &change.environment);
        check_version(&mut tx, for_share!("SELECT version FROM clusters WHERE id = $1"), &cluster.0, cluster.1).await?;
        if change.deployment.version == 0 {
            // The row is updated below: a shared lock first would let two creations wait for each other.
            let done = sqlx::query("UPDATE environments SET version = version WHERE id = $1 AND version = $2")
                .bind(&environment.0)
                .bind(environment.1)
                .execute(&mut *tx)
                .await?;
            one(done.rows_affected())?;
        } else {
            check_version(
                &mut tx,
                for_share!("SELECT version FROM environments WHERE id = $1"),
                &environment.0,
                environment.1,
            )
            .await?;
        }
        let row = if change.deployment.version == 0 {
            insert_deployment(&mut tx, change).await?
        } else {
            update_deployment(&mut tx, change).await?
        };
        for name in &change.remove_secrets {
            sqlx::query("DELETE FROM secrets WHERE deployment_id = $1 AND name = $2")
                .bind(&row.id)
                .bind(name)
                .execute(&mut *tx)
                .await?;
        }
        for secret in &change.set_secrets {
            sqlx::query(
                "INSERT INTO secrets (deployment_id, name, ciphertext, fingerprint) VALUES ($1, $2, $3, $4) ON CONFLICT (deployment_id, name) DO UPDATE SET ciphertext = excluded.ciphertext, fingerprint = excluded.fingerprint",
            )
            .bind(&row.id)
            .bind(&secret.name)
            .bind(&secret.ciphertext)
            .bind(&secret.fingerprint)
            .execute(&mut *tx)
            .await?;
        }
        if let Some((instance, task)) = &change.instance {
            insert_instance(&mut tx, instance).await?;
            insert_task(&mut tx, task).await?;
            insert_outbox(&mut tx, &change.target, OutboxKind::Instance, &instance.id, &change.author, change.now)
                .await?;
        }
        tx.commit().await?;
        Ok(row)
    }

    async fn deployment(&self, id: &str) -> Result<Option<Deployment>> {
        Ok(sqlx::query_as("SELECT * FROM deployments WHERE id = $1").bind(id).fetch_optional(&self.reader).await?)
    }

    async fn deployments(
        &self,
        cluster: Option<&str>,
        environment: Option<&str>,
        after: After,
        limit: i64,
    ) -> Result<Vec<Deployment>> {
        let (name, id) = after.unwrap_or_default();
        Ok(sqlx::query_as(
            "SELECT d.* FROM deployments d JOIN environments e ON e.id = d.environment_id WHERE (CAST($1 AS TEXT) IS NULL OR e.cluster_id = $1) AND (CAST($2 AS TEXT) IS NULL OR d.environment_id = $2) AND (d.name, d.id) > ($3, $4) ORDER BY d.name, d.id LIMIT $5",
        )
        .bind(cluster)
        .bind(environment)
        .bind(name)
        .bind(id)
        .bind(limit)
        .fetch_all(&self.reader)
        .await?)
    }

    async fn secrets(&self, deployment: &str) -> Result<Vec<Secret>> {
        Ok(sqlx::query_as("SELECT * FROM secrets WHERE deployment_id = $1 ORDER BY name")
            .bind(deployment)
            .fetch_all(&self.reader)
            .await?)
    }

    async fn instance(&self, id: &str) -> Result<Option<Instance>> {
        Ok(sqlx::query_as("SELECT * FROM instances WHERE id = $1").bind(id).fetch_optional(&self.reader).await?)
    }

    async fn instances(&self, deployment: &str, before: Option<i64>, limit: i64) -> Result<Vec<Instance>> {
        Ok(sqlx::query_as(
            "SELECT * FROM instances WHERE deployment_id = $1 AND sequence < $2 ORDER BY sequence DESC LIMIT $3",
        )
        .bind(deployment)
        .bind(before.unwrap_or(i64::MAX))
        .bind(limit)
        .fetch_all(&self.reader)
        .await?)
    }

    async fn task(&self, id: &str) -> Result<Option<Task>> {
        let found: Vec<Task> =
            sqlx::query_as("SELECT * FROM tasks WHERE id = $1").bind(id).fetch_all(&self.reader).await?;
        Ok(self.with_steps(found).await?.pop())
    }

    async fn tasks(&self, deployment: Option<&str>, before: Option<&str>, limit: i64) -> Result<Vec<Task>> {
        let found = sqlx::query_as(
            "SELECT * FROM tasks WHERE (CAST($1 AS TEXT) IS NULL OR deployment_id = $1) AND (CAST($2 AS TEXT) IS NULL OR id < $2) ORDER BY id DESC LIMIT $3",
        )
        .bind(deployment)
        .bind(before)
        .bind(limit)
        .fetch_all(&self.reader)
        .await?;
        self.with_steps(found).await
    }

    async fn targets(&self) -> Result<Vec<Target>> {
        Ok(sqlx::query_as(
            "SELECT repository, branch FROM outbox UNION SELECT repository, branch FROM batches WHERE state = 'prepared'",
        )
        .fetch_all(&self.reader)
        .await?)
    }

    async fn outbox(&self, target: &Target, limit: i64) -> Result<Vec<OutboxRow>> {
        Ok(sqlx::query_as("SELECT * FROM outbox WHERE repository = $1 AND branch = $2 ORDER BY id LIMIT $3")
            .bind(&target.repository)
            .bind(&target.branch)
            .bind(limit)
            .fetch_all(&self.reader)
            .await?)
    }

    async fn outbox_size(&self) -> Result<i64> {
        Ok(sqlx::query("SELECT COUNT(*) FROM outbox").fetch_one(&self.reader).await?.try_get(0)?)
    }

    async fn waiting_instances(&self, target: &Target, limit: i64) -> Result<Vec<InstancePlace>> {
        Ok(sqlx::query_as(
            "SELECT i.id AS id, i.deployment_id AS deployment_id, i.sequence AS sequence, d.last_sequence AS last_sequence FROM (SELECT id, kind, subject_id FROM outbox WHERE repository = $1 AND branch = $2 ORDER BY id LIMIT $3) o JOIN instances i ON i.id = o.subject_id JOIN deployments d ON d.id = i.deployment_id WHERE o.kind = 'instance'",
        )
        .bind(&target.repository)
        .bind(&target.branch)
        .bind(limit)
        .fetch_all(&self.reader)
        .await?)
    }

    async fn instance_places(&self, ids: &[String]) -> Result<Vec<InstancePlace>> {
        let mut found = Vec::with_capacity(ids.len());
        let mut connection = self.reader.acquire().await?;
        for id in ids {
            found.extend(
                sqlx::query_as::<_, InstancePlace>(
                    "SELECT i.id AS id, i.deployment_id AS deployment_id, i.sequence AS sequence, d.last_sequence AS last_sequence FROM instances i JOIN deployments d ON d.id = i.deployment_id WHERE i.id = $1",
                )
                .bind(id)
                .fetch_optional(&mut *connection)
                .await?,
            );
        }
        Ok(found)
    }

    async fn instances_to_write(&self, ids: &[String]) -> Result<Vec<InstanceToWrite>> {
        let mut found = Vec::with_capacity(ids.len());
        let mut connection = self.reader.acquire().await?;
        for id in ids {
            found.extend(
                sqlx::query_as::<_, InstanceToWrite>(
                    "SELECT i.*, e.id AS environment_id, e.cluster_id AS cluster_id, d.shard AS shard, d.name AS deployment_name, d.last_sequence AS last_sequence, EXISTS (SELECT 1 FROM instances o WHERE o.deployment_id = d.id AND o.state NOT IN ('pending', 'superseded')) AS written FROM instances i JOIN deployments d ON d.id = i.deployment_id JOIN environments e ON e.id = d.environment_id WHERE i.id = $1",
                )
                .bind(id)
                .fetch_optional(&mut *connection)
                .await?,
            );
        }
        Ok(found)
    }

    async fn running_tasks(&self, deployment: &str, up_to: i64) -> Result<Vec<Task>> {
        let found = sqlx::query_as(
            "SELECT * FROM tasks WHERE deployment_id = $1 AND state = 'running' AND sequence <= $2 ORDER BY sequence",
        )
        .bind(deployment)
        .bind(up_to)
        .fetch_all(&self.reader)
        .await?;
        self.with_steps(found).await
    }

    async fn explain_waiting(&self, instances: &[String], message: &str) -> Result<()> {
        let mut tx = self.begin().await?;
        for instance in instances {
            sqlx::query(
                "UPDATE task_steps SET message = $2 WHERE state = 'running' AND task_id IN (SELECT task_id FROM instances WHERE id = $1 AND state = 'pending')",
            )
            .bind(instance)
            .bind(message)
            .execute(&mut *tx)
            .await?;
        }
        Ok(tx.commit().await?)
    }

    async fn prepare_batch(&self, batch: &Batch) -> Result<()> {
        let mut tx = self.begin().await?;
        sqlx::query(
            "DELETE FROM batches WHERE repository = $1 AND branch = $2 AND state = 'abandoned' AND created_at < $3",
        )
        .bind(&batch.repository)
        .bind(&batch.branch)
        .bind(batch.created_at - LATE_PUSH_LIMIT)
        .execute(&mut *tx)
        .await?;
        sqlx::query(
            "INSERT INTO batches (commit_id, repository, branch, base, rows, state, created_at) VALUES ($1, $2, $3, $4, $5, $6, $7)",
        )
        .bind(&batch.commit_id)
        .bind(&batch.repository)
        .bind(&batch.branch)
        .bind(&batch.base)
        .bind(Json(&batch.rows))
        .bind(batch.state.as_str())
        .bind(batch.created_at)
        .execute(&mut *tx)
        .await
        .map_err(taken)?;
        Ok(tx.commit().await?)
    }

    async fn open_batches(&self, target: &Target) -> Result<Vec<Batch>> {
        Ok(sqlx::query_as(
            "SELECT * FROM batches WHERE repository = $1 AND branch = $2 AND state IN ('prepared', 'abandoned') ORDER BY created_at",
        )
        .bind(&target.repository)
        .bind(&target.branch)
        .fetch_all(&self.reader)
        .await?)
    }

    async fn abandon_batch(&self, batch: &Batch) -> Result<()> {
        // A tip that moves quickly abandons many commits of thousands of rows each.
        let rows = BatchRows { instances: batch.rows.instances.clone(), ..BatchRows::default() };
        sqlx::query("UPDATE batches SET state = 'abandoned', rows = $2 WHERE commit_id = $1 AND state = 'prepared'")
            .bind(&batch.commit_id)
            .bind(Json(rows))
            .execute(&self.writer)
            .await?;
        Ok(())
    }

    async fn finish_batch(&self, pushed: &Pushed) -> Result<()> {
        let mut tx = self.begin().await?;
        if let Some(commit) = &pushed.batch {
            // Abandoned commits of ours cannot turn up after this one: they were made on a tip that
            // is history now, and nothing of ours is ever forced.
            sqlx::query(
                "DELETE FROM batches WHERE repository = $1 AND branch = $2 AND (commit_id = $3 OR state = 'abandoned')",
            )
            .bind(&pushed.target.repository)
            .bind(&pushed.target.branch)
            .bind(commit)
            .execute(&mut *tx)
            .await?;
        }
        for id in &pushed.rows.outbox {
            sqlx::query("DELETE FROM outbox WHERE id = $1").bind(id).execute(&mut *tx).await?;
        }
        for id in &pushed.rows.instances {
            sqlx::query("UPDATE instances SET state = 'committed', revision = $2 WHERE id = $1 AND state = 'pending'")
                .bind(id)
                .bind(&pushed.revision)
                .execute(&mut *tx)
                .await?;
            sqlx::query(
                "UPDATE deployments SET state = 'deploying' WHERE newest_instance_id = $1 AND state = 'pending'",
            )
            .bind(id)
            .execute(&mut *tx)
            .await?;
        }
        for id in &pushed.rows.superseded {
            sqlx::query("UPDATE instances SET state = 'superseded' WHERE id = $1 AND state = 'pending'")
                .bind(id)
                .execute(&mut *tx)
                .await?;
        }
        for task in &pushed.tasks {
            update_task(&mut tx, task).await?;
        }
        Ok(tx.commit().await?)
    }

    async fn insert_driver(&self, driver: &DriverVersion) -> Result<()> {
        let mut tx = self.begin().await?;
        let known: HashMap<String, String> = sqlx::query("SELECT version, digest FROM driver_versions WHERE name = $1")
            .bind(&driver.name)
            .fetch_all(&mut *tx)
            .await?
            .into_iter()
            .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
            .collect::<std::result::Result<_, sqlx::Error>>()?;
        match known.get(&driver.version) {
            Some(digest) if *digest == driver.digest => return Ok(()),
            Some(_) => return Err(StoreError::Exists),
            None => {}
        }
        sqlx::query(
            "INSERT INTO driver_versions (digest, name, version, files, loaded_at) VALUES ($1, $2, $3, $4, $5)",
        )
        .bind(&driver.digest)
        .bind(&driver.name)
        .bind(&driver.version)
        .bind(Json(&driver.files))
        .bind(driver.loaded_at)
        .execute(&mut *tx)
        .await
        .map_err(taken)?;
        Ok(tx.commit().await?)
    }

    async fn drivers(&self) -> Result<Vec<DriverVersion>> {
        Ok(sqlx::query_as("SELECT * FROM driver_versions ORDER BY loaded_at, version").fetch_all(&self.reader).await?)
    }
}
