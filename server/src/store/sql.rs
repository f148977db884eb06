//! The statements, once for both databases: compiled in `sqlite` and in `postgres`, which say what
//! `Db` is. Only SQL that both read alike may stand here.

use super::{BEGIN, Db, SHARED, for_key_share, for_share, now_ms};
use crate::store::{
    After, AfterStatus, AgentRelease, Batch, BatchRows, Change, Cluster, ClusterFacts, Concerned, Confirmations,
    Deployment, DeploymentOutcome, DeploymentPlace, DriverVersion, EditScope, EditState, Environment, FanOut,
    FanOutLevel, GitEdit, Instance, InstanceOutcome, InstancePlace, InstanceToWrite, LastReport, Lifecycle, Millis,
    Observation, OutboxKind, OutboxRow, Person, Pushed, Report, Result, RunningTask, Secret, Snapshot, StatusKey,
    StatusRow, StatusScope, Step, Store, StoreError, Target, Task, TaskScope, TimelineEntry, Token, TokenKind,
    Untouched,
};
use crate::store::{Lead, Notice, TEARDOWN};
use async_trait::async_trait;
use sqlx::types::Json;
use sqlx::{Pool, QueryBuilder, Row as _, Transaction};
use std::collections::HashMap;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};

#[path = "sql_review.rs"]
mod review;

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

    /// The turn of a change.
    async fn turn(&self) -> Result<SemaphorePermit<'_>> {
        match tokio::time::timeout(TURN_LIMIT, self.changes.acquire()).await {
            Ok(Ok(turn)) => Ok(turn),
            _ => Err(sqlx::Error::PoolTimedOut.into()),
        }
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
    (kind, subject): (OutboxKind, &str),
    fan_out: Option<&String>,
    author: &Person,
    now: i64,
) -> Result<()> {
    sqlx::query(
        "INSERT INTO outbox (repository, branch, kind, subject_id, author_name, author_email, created_at, fan_out_id, edit_id) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, (SELECT MIN(x.id) FROM instances i JOIN edits x ON x.deployment_id = i.deployment_id WHERE i.id = $4 AND x.state = 'held'))",
    )
    .bind(&target.repository)
    .bind(&target.branch)
    .bind(kind.as_str())
    .bind(subject)
    .bind(&author.name)
    .bind(&author.email)
    .bind(now)
    .bind(fan_out)
    .execute(&mut **tx)
    .await?;
    super::tell(tx, &Notice::Waits(target.clone())).await
}

/// What an older lead says counts no more.
async fn check_lead(tx: &mut Tx, lead: &Lead) -> Result<()> {
    let found: Option<i64> =
        sqlx::query_scalar(for_key_share!("SELECT epoch FROM leads WHERE id = 1 AND holder = $1 AND epoch = $2"))
            .bind(&lead.holder)
            .bind(lead.epoch)
            .fetch_optional(&mut **tx)
            .await?;
    if found.is_some() { Ok(()) } else { Err(StoreError::Fenced) }
}

async fn insert_fan_out(tx: &mut Tx, row: &FanOut) -> Result<()> {
    sqlx::query(
        "INSERT INTO fan_outs (id, level, subject_id, cluster_id, state, untouched, author_name, author_email, created_at, ended_at, proposal_id) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
    )
    .bind(&row.id)
    .bind(row.level.as_str())
    .bind(&row.subject_id)
    .bind(&row.cluster_id)
    .bind(row.state.as_str())
    .bind(Json(&row.untouched))
    .bind(&row.author_name)
    .bind(&row.author_email)
    .bind(row.created_at)
    .bind(row.ended_at)
    .bind(&row.proposal_id)
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
        let row = (OutboxKind::Environment, row.environment_id.as_str());
        insert_outbox(tx, &change.target, row, None, &change.author, change.now).await?;
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
    // Pushes and reports move the state without counting up the version: only a change that has
    // something to say about it writes it.
    let is_newest = change.merged.as_ref().is_some_and(|merged| merged.instance_id.is_some());
    let says = change.instance.is_some() || is_newest || row.lifecycle == Lifecycle::Deleting;
    let state = says.then(|| row.state.as_str());
    let done = sqlx::query(
        "UPDATE deployments SET driver_name = $3, driver_digest = $4, driver_pin = $5, application_version = $6, config = $7, parameters = $8, lifecycle = $9, state = COALESCE(CAST($10 AS TEXT), state), last_sequence = $11, newest_instance_id = $12, version = version + 1 WHERE id = $1 AND version = $2",
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
    .bind(state)
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
        "INSERT INTO instances (id, deployment_id, sequence, workflow, spec, origins, document, secrets_file, secrets_stamp, state, revision, task_id, author_name, author_email, created_at, sources, content_digest) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)",
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
    .bind(row.sources.as_ref().map(Json))
    .bind(row.spec.content_digest())
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
        "INSERT INTO tasks (id, deployment_id, instance_id, sequence, workflow, state, message, author_name, author_email, version, created_at, ended_at, fan_out_id) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
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
    .bind(&row.fan_out_id)
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
    // The operator's steps take the place of the predicted ones, and may be others.
    for step in &row.steps {
        sqlx::query(
            "INSERT INTO task_steps (task_id, position, name, state, attempt, message, started_at, ended_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (task_id, position) DO UPDATE SET name = excluded.name, state = excluded.state, attempt = excluded.attempt, message = excluded.message, started_at = excluded.started_at, ended_at = excluded.ended_at",
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
    sqlx::query("DELETE FROM task_steps WHERE task_id = $1 AND position >= $2")
        .bind(&row.id)
        .bind(i64::try_from(row.steps.len()).unwrap_or(i64::MAX))
        .execute(&mut **tx)
        .await?;
    Ok(())
}

/// Of two transactions that wait for each other the database ends one: it begins again.
fn again(error: StoreError) -> StoreError {
    match &error {
        StoreError::Database(sqlx::Error::Database(inner))
            if matches!(inner.code().as_deref(), Some("40001" | "40P01")) =>
        {
            StoreError::Conflict
        }
        _ => error,
    }
}

async fn record_last_report(tx: &mut Tx, report: &Report) -> Result<()> {
    let row = &report.row;
    let query = match report.last {
        Some(_) => {
            "UPDATE reports SET cluster_uid = $2, identity = $3, epoch = $4, sequence = $5, reported_at = $6, pods_at = $7, pods_digest = $8, deployments_at = $9, deployments_digest = $10, flux_at = $11, flux_digest = $12 WHERE cluster_id = $1 AND epoch = $13 AND sequence = $14"
        }
        None => {
            "INSERT INTO reports (cluster_id, cluster_uid, identity, epoch, sequence, reported_at, pods_at, pods_digest, deployments_at, deployments_digest, flux_at, flux_digest) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) ON CONFLICT (cluster_id) DO NOTHING"
        }
    };
    let mut query = sqlx::query(query)
        .bind(&row.cluster_id)
        .bind(&row.cluster_uid)
        .bind(&row.identity)
        .bind(row.epoch)
        .bind(row.sequence)
        .bind(row.reported_at)
        .bind(row.pods_at)
        .bind(&row.pods_digest)
        .bind(row.deployments_at)
        .bind(&row.deployments_digest)
        .bind(row.flux_at)
        .bind(&row.flux_digest);
    if let Some((epoch, sequence)) = report.last {
        query = query.bind(epoch).bind(sequence);
    }
    one(query.execute(&mut **tx).await?.rows_affected())
}

/// Rows of one statement: databases bound the number of its values.
const STATUS_CHUNK: usize = 200;

async fn record_statuses(tx: &mut Tx, report: &Report) -> Result<()> {
    for (kind, namespace, name) in &report.remove {
        sqlx::query(
            "DELETE FROM statuses WHERE cluster_id = $1 AND snapshot = $2 AND kind = $3 AND namespace = $4 AND name = $5",
        )
        .bind(&report.row.cluster_id)
        .bind(report.snapshot.as_str())
        .bind(kind)
        .bind(namespace)
        .bind(name)
        .execute(&mut **tx)
        .await?;
    }
    for chunk in report.set.chunks(STATUS_CHUNK) {
        let mut query = QueryBuilder::<Db>::new(
            "INSERT INTO statuses (cluster_id, snapshot, kind, namespace, name, deployment_id, uid, deleting, digest, content, updated_at) ",
        );
        query.push_values(chunk, |mut values, row| {
            values
                .push_bind(&row.cluster_id)
                .push_bind(row.snapshot.as_str())
                .push_bind(&row.kind)
                .push_bind(&row.namespace)
                .push_bind(&row.name)
                .push_bind(&row.deployment_id)
                .push_bind(&row.uid)
                .push_bind(row.deleting)
                .push_bind(&row.digest)
                .push_bind(&row.content)
                .push_bind(row.updated_at);
        });
        query.push(
            " ON CONFLICT (cluster_id, snapshot, kind, namespace, name) DO UPDATE SET deployment_id = excluded.deployment_id, uid = excluded.uid, deleting = excluded.deleting, digest = excluded.digest, content = excluded.content, updated_at = excluded.updated_at",
        );
        // Its text differs with the number of rows: not worth remembering.
        query.build().persistent(false).execute(&mut **tx).await?;
    }
    Ok(())
}

/// In the order in which a push touches the same tables, so that the two do not wait for each other.
async fn record_outcome(tx: &mut Tx, outcome: &DeploymentOutcome) -> Result<()> {
    let deployment = &outcome.deployment_id;
    let mut active: Option<Option<&String>> = None;
    match &outcome.instance {
        None => {}
        Some(InstanceOutcome::Active { id, sequence }) => {
            sqlx::query(
                "UPDATE instances SET state = CASE WHEN state = 'active' THEN 'retired' ELSE 'superseded' END WHERE deployment_id = $1 AND sequence < $2 AND state IN ('active', 'committed')",
            )
            .bind(deployment)
            .bind(sequence)
            .execute(&mut **tx)
            .await?;
            sqlx::query("UPDATE instances SET state = 'active' WHERE id = $1").bind(id).execute(&mut **tx).await?;
            active = Some(Some(id));
        }
        Some(InstanceOutcome::Failed { id }) => {
            sqlx::query("UPDATE instances SET state = 'failed' WHERE id = $1").bind(id).execute(&mut **tx).await?;
        }
        Some(InstanceOutcome::Gone) => {
            sqlx::query("UPDATE instances SET state = 'retired' WHERE deployment_id = $1 AND state = 'active'")
                .bind(deployment)
                .execute(&mut **tx)
                .await?;
            active = Some(None);
        }
    }
    if let Some(active) = active {
        sqlx::query("UPDATE deployments SET active_instance_id = $2 WHERE id = $1")
            .bind(deployment)
            .bind(active)
            .execute(&mut **tx)
            .await?;
    }
    if let Some(state) = outcome.state {
        let done = sqlx::query("UPDATE deployments SET state = $3 WHERE id = $1 AND newest_instance_id = $2")
            .bind(deployment)
            .bind(&outcome.newest_instance_id)
            .bind(state.as_str())
            .execute(&mut **tx)
            .await?;
        one(done.rows_affected())?;
    }
    Ok(())
}

async fn record_all(tx: &mut Tx, report: &Report) -> Result<()> {
    record_last_report(tx, report).await?;
    record_statuses(tx, report).await?;
    for outcome in &report.deployments {
        record_outcome(tx, outcome).await?;
    }
    for task in &report.tasks {
        update_task(tx, task).await?;
    }
    record_observations(tx, &report.observations).await
}

async fn record_observations(tx: &mut Tx, rows: &[Observation]) -> Result<()> {
    for chunk in rows.chunks(STATUS_CHUNK) {
        let mut query =
            QueryBuilder::<Db>::new("INSERT INTO observations (id, deployment_id, at, kind, title, message) ");
        query.push_values(chunk, |mut values, row| {
            values
                .push_bind(&row.id)
                .push_bind(&row.deployment_id)
                .push_bind(row.at)
                .push_bind(row.kind.as_str())
                .push_bind(&row.title)
                .push_bind(&row.message);
        });
        query.build().persistent(false).execute(&mut **tx).await?;
    }
    Ok(())
}

/// Stores an edit as it is now. Earlier open ones of the same file end: what they found is not there any more.
async fn record_edit(tx: &mut Tx, row: &GitEdit) -> Result<()> {
    if let Some(lead) = &row.lead {
        check_lead(tx, lead).await?;
    }
    sqlx::query(
        "UPDATE edits SET state = 'superseded', decided_at = $3 WHERE cluster_id = $1 AND path = $2 AND id <> $4 AND state IN ('held', 'waiting', 'restoring')",
    )
    .bind(&row.cluster_id)
    .bind(&row.path)
    .bind(row.created_at)
    .bind(&row.id)
    .execute(&mut **tx)
    .await?;
    let done = sqlx::query(
        "INSERT INTO edits (id, cluster_id, deployment_id, path, kind, state, commit_id, author_name, author_email, reading, content, message, task_id, created_at, decided_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15) ON CONFLICT (id) DO UPDATE SET state = excluded.state, message = excluded.message, task_id = excluded.task_id, decided_at = excluded.decided_at WHERE edits.state IN ('held', 'waiting')",
    )
    .bind(&row.id)
    .bind(&row.cluster_id)
    .bind(&row.deployment_id)
    .bind(&row.path)
    .bind(row.kind.as_str())
    .bind(row.state.as_str())
    .bind(&row.commit_id)
    .bind(&row.author_name)
    .bind(&row.author_email)
    .bind(&row.reading)
    .bind(&row.content)
    .bind(&row.message)
    .bind(&row.task_id)
    .bind(row.created_at)
    .bind(row.decided_at)
    .execute(&mut **tx)
    .await?;
    // Somebody else decided meanwhile, or a newer one took its place.
    one(done.rows_affected())
}

/// Waiting changes of a deployment are kept back while an edit of it is held, and no longer. The row of the
/// deployment is taken first, as every change does: none slips through between.
async fn hold_back(tx: &mut Tx, deployment: &str) -> Result<()> {
    sqlx::query("UPDATE deployments SET version = version WHERE id = $1").bind(deployment).execute(&mut **tx).await?;
    sqlx::query(
        "UPDATE outbox SET edit_id = (SELECT MIN(id) FROM edits WHERE deployment_id = $1 AND state = 'held') WHERE kind = 'instance' AND subject_id IN (SELECT id FROM instances WHERE deployment_id = $1 AND state = 'pending')",
    )
    .bind(deployment)
    .execute(&mut **tx)
    .await?;
    Ok(())
}

/// Rows of a fan-out are held back until it ends: none may come after that.
async fn check_fan_out(tx: &mut Tx, fan_out: Option<&String>) -> Result<()> {
    let Some(id) = fan_out else { return Ok(()) };
    let done = sqlx::query("UPDATE fan_outs SET state = state WHERE id = $1 AND state = 'running'")
        .bind(id)
        .execute(&mut **tx)
        .await?;
    one(done.rows_affected())
}

async fn store_change(tx: &mut Tx, change: &Change) -> Result<Deployment> {
    let (cluster, environment) = (&change.cluster, &change.environment);
    check_version(tx, for_share!("SELECT version FROM clusters WHERE id = $1"), &cluster.0, cluster.1).await?;
    if change.deployment.version == 0 {
        // The row is updated below: a shared lock first would let two creations wait for each other.
        let done = sqlx::query("UPDATE environments SET version = version WHERE id = $1 AND version = $2")
            .bind(&environment.0)
            .bind(environment.1)
            .execute(&mut **tx)
            .await?;
        one(done.rows_affected())?;
    } else {
        check_version(tx, for_share!("SELECT version FROM environments WHERE id = $1"), &environment.0, environment.1)
            .await?;
    }
    let row = if change.deployment.version == 0 {
        insert_deployment(tx, change).await?
    } else {
        update_deployment(tx, change).await?
    };
    for name in &change.remove_secrets {
        sqlx::query("DELETE FROM secrets WHERE deployment_id = $1 AND name = $2")
            .bind(&row.id)
            .bind(name)
            .execute(&mut **tx)
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
        .execute(&mut **tx)
        .await?;
    }
    if let Some((instance, task)) = &change.instance {
        insert_instance(tx, instance).await?;
        insert_task(tx, task).await?;
        if let Some(edit) = &change.edit {
            record_edit(tx, &GitEdit { task_id: Some(task.id.clone()), ..edit.clone() }).await?;
            hold_back(tx, &row.id).await?;
        }
        let outbox = (OutboxKind::Instance, instance.id.as_str());
        insert_outbox(tx, &change.target, outbox, change.fan_out.as_ref(), &change.author, change.now).await?;
    }
    if let Some(merged) = &change.merged {
        review::merge(tx, merged, change).await?;
    }
    Ok(row)
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

    async fn replace_agent_token(&self, token: &Token) -> Result<()> {
        let mut tx = self.begin().await?;
        sqlx::query("UPDATE tokens SET revoked_at = $2 WHERE cluster_id = $1 AND revoked_at IS NULL")
            .bind(&token.cluster_id)
            .bind(token.created_at)
            .execute(&mut *tx)
            .await?;
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
            "INSERT INTO clusters (id, name, config, version, git_url, repository, branch, path, credentials, age_recipients, created_at, edit_policy, removal_threshold, trusted_keys, delivery, forge, forge_secrets) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)",
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
        .bind(Json(&cluster.age_recipients))
        .bind(cluster.created_at)
        .bind(cluster.edit_policy.as_str())
        .bind(cluster.removal_threshold)
        .bind(cluster.trusted_keys.as_ref().map(Json))
        .bind(Json(&cluster.delivery))
        .bind(cluster.forge.as_ref().map(Json))
        .bind(&cluster.forge_secrets)
        .execute(&mut *tx)
        .await
        .map_err(taken)?;
        insert_token(&mut tx, agent).await?;
        let target = Target { repository: cluster.repository.clone(), branch: cluster.branch.clone() };
        let row = (OutboxKind::Cluster, cluster.id.as_str());
        insert_outbox(&mut tx, &target, row, None, author, cluster.created_at).await?;
        Ok(tx.commit().await?)
    }

    async fn update_cluster(&self, cluster: &Cluster, fan_out: &FanOut) -> Result<()> {
        let mut tx = self.begin().await?;
        let done = sqlx::query(
            "UPDATE clusters SET config = $3, age_recipients = $4, edit_policy = $5, removal_threshold = $6, credentials = $7, delivery = $8, forge = $9, forge_secrets = $10, version = version + 1 WHERE id = $1 AND version = $2",
        )
        .bind(&cluster.id)
        .bind(cluster.version)
        .bind(Json(&cluster.config))
        .bind(Json(&cluster.age_recipients))
        .bind(cluster.edit_policy.as_str())
        .bind(cluster.removal_threshold)
        .bind(&cluster.credentials)
        .bind(Json(&cluster.delivery))
        .bind(cluster.forge.as_ref().map(Json))
        .bind(&cluster.forge_secrets)
        .execute(&mut *tx)
        .await?;
        one(done.rows_affected())?;
        insert_fan_out(&mut tx, fan_out).await?;
        Ok(tx.commit().await?)
    }

    async fn cluster(&self, id_or_name: &str) -> Result<Option<Cluster>> {
        Ok(sqlx::query_as(
            "SELECT * FROM clusters WHERE id = $1 OR name = $1 ORDER BY (CASE WHEN id = $1 THEN 0 ELSE 1 END) LIMIT 1",
        )
        .bind(id_or_name)
        .fetch_optional(&self.reader)
        .await?)
    }

    async fn recipients(&self, cluster: &str) -> Result<Option<Vec<String>>> {
        let found: Option<Json<Vec<String>>> =
            sqlx::query_scalar("SELECT recipients FROM cluster_keys WHERE cluster_id = $1")
                .bind(cluster)
                .fetch_optional(&self.reader)
                .await?;
        Ok(found.map(|found| found.0))
    }

    async fn set_recipients(&self, cluster: &str, recipients: &[String], now: Millis) -> Result<()> {
        sqlx::query(
            "INSERT INTO cluster_keys (cluster_id, recipients, reported_at) VALUES ($1, $2, $3) ON CONFLICT (cluster_id) DO UPDATE SET recipients = excluded.recipients, reported_at = excluded.reported_at",
        )
        .bind(cluster)
        .bind(Json(recipients))
        .bind(now)
        .execute(&self.writer)
        .await?;
        Ok(())
    }

    async fn facts(&self, cluster: &str) -> Result<Option<ClusterFacts>> {
        Ok(sqlx::query_as("SELECT * FROM cluster_facts WHERE cluster_id = $1")
            .bind(cluster)
            .fetch_optional(&self.reader)
            .await?)
    }

    async fn set_facts(&self, said: &ClusterFacts) -> Result<()> {
        sqlx::query(
            "INSERT INTO cluster_facts (cluster_id, epoch, facts, skew_ms, said_at) VALUES ($1, $2, $3, $4, $5) ON CONFLICT (cluster_id) DO UPDATE SET epoch = excluded.epoch, facts = excluded.facts, skew_ms = excluded.skew_ms, said_at = excluded.said_at WHERE cluster_facts.epoch <= excluded.epoch",
        )
        .bind(&said.cluster_id)
        .bind(said.epoch)
        .bind(Json(&said.facts))
        .bind(said.skew_ms)
        .bind(said.said_at)
        .execute(&self.writer)
        .await?;
        Ok(())
    }

    async fn agent_release(&self, cluster: &str) -> Result<Option<AgentRelease>> {
        Ok(sqlx::query_as("SELECT * FROM agent_releases WHERE cluster_id = $1")
            .bind(cluster)
            .fetch_optional(&self.reader)
            .await?)
    }

    async fn set_agent_release(&self, release: &AgentRelease, target: &Target, author: &Person) -> Result<()> {
        let mut tx = self.begin().await?;
        sqlx::query(
            "INSERT INTO agent_releases (cluster_id, version, \"values\", released_at) VALUES ($1, $2, $3, $4) ON CONFLICT (cluster_id) DO UPDATE SET version = excluded.version, \"values\" = excluded.\"values\", released_at = excluded.released_at",
        )
        .bind(&release.cluster_id)
        .bind(&release.version)
        .bind(Json(&release.values))
        .bind(release.released_at)
        .execute(&mut *tx)
        .await?;
        let row = (OutboxKind::Agent, release.cluster_id.as_str());
        insert_outbox(&mut tx, target, row, None, author, release.released_at).await?;
        Ok(tx.commit().await?)
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
            "INSERT INTO environments (id, cluster_id, name, config, version, allocated, created_at, delivery) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        )
        .bind(&environment.id)
        .bind(&environment.cluster_id)
        .bind(&environment.name)
        .bind(Json(&environment.config))
        .bind(environment.version)
        .bind(environment.allocated)
        .bind(environment.created_at)
        .bind(Json(&environment.delivery))
        .execute(&mut *tx)
        .await
        .map_err(taken)?;
        let row = (OutboxKind::Environment, environment.id.as_str());
        insert_outbox(&mut tx, target, row, None, author, environment.created_at).await?;
        Ok(tx.commit().await?)
    }

    async fn update_environment(&self, environment: &Environment, fan_out: &FanOut) -> Result<()> {
        let mut tx = self.begin().await?;
        let done = sqlx::query(
            "UPDATE environments SET config = $3, delivery = $4, version = version + 1 WHERE id = $1 AND version = $2",
        )
        .bind(&environment.id)
        .bind(environment.version)
        .bind(Json(&environment.config))
        .bind(Json(&environment.delivery))
        .execute(&mut *tx)
        .await?;
        one(done.rows_affected())?;
        insert_fan_out(&mut tx, fan_out).await?;
        Ok(tx.commit().await?)
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
        let _turn = self.turn().await?;
        let mut tx = self.begin().await?;
        check_fan_out(&mut tx, change.fan_out.as_ref()).await?;
        let row = store_change(&mut tx, change).await.map_err(again)?;
        tx.commit().await?;
        Ok(row)
    }

    async fn change_all(&self, changes: &[Change]) -> Result<Vec<bool>> {
        let _turn = self.turn().await?;
        let mut tx = self.begin().await?;
        check_fan_out(&mut tx, changes.first().and_then(|change| change.fan_out.as_ref())).await?;
        let mut stored = Vec::with_capacity(changes.len());
        for change in changes {
            // Its versions are verified before anything of it is written.
            match store_change(&mut tx, change).await {
                Ok(_) => stored.push(true),
                Err(StoreError::Conflict) => stored.push(false),
                Err(other) => return Err(again(other)),
            }
        }
        tx.commit().await?;
        Ok(stored)
    }

    async fn running_fan_outs(&self) -> Result<Vec<FanOut>> {
        Ok(sqlx::query_as("SELECT f.* FROM fan_outs f WHERE f.state = 'running' AND NOT EXISTS (SELECT 1 FROM proposals p JOIN proposal_items i ON i.proposal_id = p.id WHERE p.cluster_id = f.cluster_id AND p.state = 'merged' AND i.state = 'open') ORDER BY f.id").fetch_all(&self.reader).await?)
    }

    async fn fan_out(&self, id: &str) -> Result<Option<FanOut>> {
        Ok(sqlx::query_as("SELECT * FROM fan_outs WHERE id = $1").bind(id).fetch_optional(&self.reader).await?)
    }

    async fn fan_outs(&self, subject: &str, before: Option<&str>, limit: i64) -> Result<Vec<FanOut>> {
        Ok(sqlx::query_as("SELECT * FROM fan_outs WHERE subject_id = $1 AND id < $2 ORDER BY id DESC LIMIT $3")
            .bind(subject)
            .bind(before.unwrap_or("g"))
            .bind(limit)
            .fetch_all(&self.reader)
            .await?)
    }

    async fn concerned(&self, fan_out: &FanOut) -> Result<Vec<Concerned>> {
        let query = match fan_out.level {
            FanOutLevel::Cluster => {
                "SELECT d.*, i.state AS newest_state, i.content_digest AS content_digest, i.secrets_stamp AS secrets_stamp FROM environments e JOIN deployments d ON d.environment_id = e.id LEFT JOIN instances i ON i.id = d.newest_instance_id WHERE e.cluster_id = $1 AND d.state <> 'deleted' ORDER BY d.id"
            }
            FanOutLevel::Environment => {
                "SELECT d.*, i.state AS newest_state, i.content_digest AS content_digest, i.secrets_stamp AS secrets_stamp FROM deployments d LEFT JOIN instances i ON i.id = d.newest_instance_id WHERE d.environment_id = $1 AND d.state <> 'deleted' ORDER BY d.id"
            }
        };
        Ok(sqlx::query_as(query).bind(&fan_out.subject_id).fetch_all(&self.reader).await?)
    }

    async fn concerned_secrets(&self, fan_out: &FanOut) -> Result<Vec<(String, String, String)>> {
        let query = match fan_out.level {
            FanOutLevel::Cluster => {
                "SELECT s.deployment_id, s.name, s.fingerprint FROM environments e JOIN deployments d ON d.environment_id = e.id JOIN secrets s ON s.deployment_id = d.id WHERE e.cluster_id = $1 AND d.state <> 'deleted'"
            }
            FanOutLevel::Environment => {
                "SELECT s.deployment_id, s.name, s.fingerprint FROM deployments d JOIN secrets s ON s.deployment_id = d.id WHERE d.environment_id = $1 AND d.state <> 'deleted'"
            }
        };
        Ok(sqlx::query_as(query).bind(&fan_out.subject_id).fetch_all(&self.reader).await?)
    }

    async fn fan_out_deployments(&self, id: &str) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar("SELECT DISTINCT deployment_id FROM tasks WHERE fan_out_id = $1")
            .bind(id)
            .fetch_all(&self.reader)
            .await?)
    }

    async fn newest_tasks(&self, fan_out: &FanOut) -> Result<Vec<(String, i64)>> {
        let query = match fan_out.level {
            FanOutLevel::Cluster => {
                "SELECT t.state, COUNT(*) FROM environments e JOIN deployments d ON d.environment_id = e.id JOIN instances i ON i.id = d.newest_instance_id JOIN tasks t ON t.id = i.task_id WHERE e.cluster_id = $1 AND d.lifecycle <> 'deleting' GROUP BY t.state"
            }
            FanOutLevel::Environment => {
                "SELECT t.state, COUNT(*) FROM deployments d JOIN instances i ON i.id = d.newest_instance_id JOIN tasks t ON t.id = i.task_id WHERE d.environment_id = $1 AND d.lifecycle <> 'deleting' GROUP BY t.state"
            }
        };
        Ok(sqlx::query_as(query).bind(&fan_out.subject_id).fetch_all(&self.reader).await?)
    }

    async fn fan_out_progress(&self, id: &str) -> Result<Vec<(String, i64)>> {
        Ok(sqlx::query_as("SELECT state, COUNT(*) FROM tasks WHERE fan_out_id = $1 GROUP BY state")
            .bind(id)
            .fetch_all(&self.reader)
            .await?)
    }

    async fn finish_fan_out(&self, id: &str, untouched: &Untouched, now: Millis) -> Result<()> {
        let mut tx = self.begin().await?;
        // What somebody changed or removed meanwhile is in the repository already, or on its way there: written
        // now, the older instance would bring a removed deployment back.
        for query in [
            "UPDATE instances SET state = 'superseded' WHERE state = 'pending' AND id IN (SELECT i.id FROM outbox o JOIN instances i ON i.id = o.subject_id JOIN deployments d ON d.id = i.deployment_id WHERE o.fan_out_id = $1 AND i.id <> COALESCE(d.newest_instance_id, ''))",
            "DELETE FROM outbox WHERE fan_out_id = $1 AND subject_id IN (SELECT i.id FROM outbox o JOIN instances i ON i.id = o.subject_id WHERE o.fan_out_id = $1 AND i.state = 'superseded')",
            "UPDATE outbox SET fan_out_id = NULL WHERE fan_out_id = $1",
        ] {
            sqlx::query(query).bind(id).execute(&mut *tx).await?;
        }
        sqlx::query(
            "UPDATE fan_outs SET state = 'finished', untouched = $2, ended_at = $3 WHERE id = $1 AND state = 'running'",
        )
        .bind(id)
        .bind(Json(untouched))
        .bind(now)
        .execute(&mut *tx)
        .await?;
        Ok(tx.commit().await?)
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

    async fn tasks(&self, scope: TaskScope<'_>, before: Option<&str>, limit: i64) -> Result<Vec<Task>> {
        let query = match scope {
            TaskScope::All => "SELECT * FROM tasks WHERE $1 = '' AND id < $2 ORDER BY id DESC LIMIT $3",
            TaskScope::Deployment(_) => {
                "SELECT * FROM tasks WHERE deployment_id = $1 AND id < $2 ORDER BY id DESC LIMIT $3"
            }
            TaskScope::FanOut(_) => "SELECT * FROM tasks WHERE fan_out_id = $1 AND id < $2 ORDER BY id DESC LIMIT $3",
        };
        let of = match scope {
            TaskScope::All => "",
            TaskScope::Deployment(id) | TaskScope::FanOut(id) => id,
        };
        // Ids are of hexadecimal digits: all are below.
        let found = sqlx::query_as(query).bind(of).bind(before.unwrap_or("g")).bind(limit);
        let found = found.fetch_all(&self.reader).await?;
        self.with_steps(found).await
    }

    async fn timeline(
        &self,
        deployment: &str,
        before: Option<(Millis, String)>,
        limit: i64,
    ) -> Result<Vec<TimelineEntry>> {
        let (at, key) = before.unwrap_or((i64::MAX, String::new()));
        Ok(sqlx::query_as(
            "SELECT * FROM (SELECT t.created_at AS at, '1/' || t.id AS key, 'asked' AS kind, t.workflow AS title, CAST(NULL AS TEXT) AS message, t.id AS task_id FROM tasks t WHERE t.deployment_id = $1 UNION ALL SELECT s.ended_at, '2/' || t.id, 'committed', COALESCE(i.revision, ''), s.message, t.id FROM tasks t JOIN task_steps s ON s.task_id = t.id JOIN instances i ON i.id = t.instance_id WHERE t.deployment_id = $1 AND ((s.position = 0 AND s.name <> 'Open the pull request') OR s.name = 'Wait for the review and the merge') AND s.state = 'succeeded' AND s.ended_at IS NOT NULL UNION ALL SELECT t.ended_at, '4/' || t.id, 'ended', t.state, t.message, t.id FROM tasks t WHERE t.deployment_id = $1 AND t.ended_at IS NOT NULL UNION ALL SELECT o.at, '3/' || o.id, o.kind, o.title, o.message, CAST(NULL AS TEXT) FROM observations o WHERE o.deployment_id = $1 UNION ALL SELECT x.created_at, '0/' || x.id, 'edited', x.kind, 'Commit ' || x.commit_id || ' by ' || x.author_name || ' <' || x.author_email || '>, ' || x.state || COALESCE(': ' || x.message, ''), x.task_id FROM edits x WHERE x.deployment_id = $1) entries WHERE at < $2 OR (at = $2 AND key < $3) ORDER BY at DESC, key DESC LIMIT $4",
        )
        .bind(deployment)
        .bind(at)
        .bind(key)
        .bind(limit)
        .fetch_all(&self.reader)
        .await?)
    }

    async fn forget(&self, before: Millis, keep: i64, limit: i64) -> Result<usize> {
        let mut tx = self.begin().await?;
        let old: Vec<(String, String)> = sqlx::query_as(
            "SELECT t.id, t.instance_id FROM tasks t JOIN deployments d ON d.id = t.deployment_id WHERE t.ended_at < $1 AND t.sequence <= d.last_sequence - $2 AND t.instance_id <> COALESCE(d.newest_instance_id, '') AND t.instance_id <> COALESCE(d.active_instance_id, '') AND NOT EXISTS (SELECT 1 FROM proposal_items p WHERE p.task_id = t.id AND p.state = 'open') LIMIT $3",
        )
        .bind(before)
        .bind(keep)
        .bind(limit)
        .fetch_all(&mut *tx)
        .await?;
        for (task, instance) in &old {
            sqlx::query("DELETE FROM task_steps WHERE task_id = $1").bind(task).execute(&mut *tx).await?;
            sqlx::query("DELETE FROM tasks WHERE id = $1").bind(task).execute(&mut *tx).await?;
            sqlx::query("DELETE FROM instances WHERE id = $1").bind(instance).execute(&mut *tx).await?;
        }
        let mut most = old.len();
        for query in [
            "DELETE FROM commit_statuses WHERE is_final AND NOT EXISTS (SELECT 1 FROM tasks t WHERE t.id = commit_statuses.task_id) AND $1 > 0 AND $2 > 0",
            "DELETE FROM proposal_pushes WHERE proposal_id IN (SELECT id FROM proposals WHERE ended_at < $1 AND told LIMIT $2)",
            "DELETE FROM proposal_items WHERE proposal_id IN (SELECT id FROM proposals WHERE ended_at < $1 AND told LIMIT $2)",
            "DELETE FROM proposals WHERE id IN (SELECT id FROM proposals WHERE ended_at < $1 AND told LIMIT $2) AND NOT EXISTS (SELECT 1 FROM proposal_items p WHERE p.proposal_id = proposals.id)",
            "DELETE FROM observations WHERE id IN (SELECT id FROM observations WHERE at < $1 LIMIT $2)",
            "DELETE FROM fan_outs WHERE id IN (SELECT id FROM fan_outs WHERE ended_at < $1 LIMIT $2)",
            "DELETE FROM edits WHERE id IN (SELECT id FROM edits WHERE created_at < $1 AND state NOT IN ('held', 'waiting', 'restoring') LIMIT $2)",
        ] {
            let done = sqlx::query(query).bind(before).bind(limit).execute(&mut *tx).await?;
            most = most.max(usize::try_from(done.rows_affected()).unwrap_or(usize::MAX));
        }
        tx.commit().await?;
        Ok(most)
    }

    async fn targets(&self) -> Result<Vec<Target>> {
        Ok(sqlx::query_as(
            "SELECT repository, branch FROM clusters UNION SELECT repository, branch FROM outbox UNION SELECT repository, branch FROM batches",
        )
        .fetch_all(&self.reader)
        .await?)
    }

    async fn head(&self, target: &Target) -> Result<Option<(String, i64)>> {
        Ok(sqlx::query_as("SELECT commit_id, reads FROM heads WHERE repository = $1 AND branch = $2")
            .bind(&target.repository)
            .bind(&target.branch)
            .fetch_optional(&self.reader)
            .await?)
    }

    async fn set_head(&self, target: &Target, commit: &str, lead: &Lead) -> Result<()> {
        let mut tx = self.begin().await?;
        check_lead(&mut tx, lead).await?;
        sqlx::query(
            "INSERT INTO heads (repository, branch, commit_id, reads) VALUES ($1, $2, $3, 0) ON CONFLICT (repository, branch) DO UPDATE SET commit_id = excluded.commit_id, reads = heads.reads + 1",
        )
        .bind(&target.repository)
        .bind(&target.branch)
        .bind(commit)
        .execute(&mut *tx)
        .await?;
        super::tell(&mut tx, &Notice::Moved(target.clone())).await?;
        Ok(tx.commit().await?)
    }

    async fn committed_instance(&self, deployment: &str) -> Result<Option<Instance>> {
        Ok(sqlx::query_as(
            "SELECT * FROM instances WHERE deployment_id = $1 AND revision IS NOT NULL ORDER BY sequence DESC LIMIT 1",
        )
        .bind(deployment)
        .fetch_optional(&self.reader)
        .await?)
    }

    async fn record_edits(&self, edits: &[GitEdit], target: &Target, author: &Person) -> Result<()> {
        let mut tx = self.begin().await?;
        for edit in edits {
            record_edit(&mut tx, edit).await.map_err(again)?;
            if edit.state == EditState::Restoring {
                let row = (OutboxKind::Restore, edit.id.as_str());
                insert_outbox(&mut tx, target, row, None, author, edit.created_at).await?;
            }
            if let Some(deployment) = &edit.deployment_id {
                hold_back(&mut tx, deployment).await.map_err(again)?;
            }
        }
        Ok(tx.commit().await?)
    }

    async fn close_edits(&self, cluster: &str, paths: &[String], now: Millis, lead: Option<&Lead>) -> Result<()> {
        let mut tx = self.begin().await?;
        if let Some(lead) = lead {
            check_lead(&mut tx, lead).await?;
        }
        for path in paths {
            let closed: Vec<Option<String>> = sqlx::query_scalar(
                "UPDATE edits SET state = 'superseded', decided_at = $3 WHERE cluster_id = $1 AND path = $2 AND state IN ('held', 'waiting', 'restoring') RETURNING deployment_id",
            )
            .bind(cluster)
            .bind(path)
            .bind(now)
            .fetch_all(&mut *tx)
            .await?;
            for deployment in closed.iter().flatten() {
                hold_back(&mut tx, deployment).await?;
            }
        }
        Ok(tx.commit().await?)
    }

    async fn edit(&self, id: &str) -> Result<Option<GitEdit>> {
        Ok(sqlx::query_as("SELECT * FROM edits WHERE id = $1").bind(id).fetch_optional(&self.reader).await?)
    }

    async fn edits(&self, scope: EditScope<'_>, before: Option<&str>, limit: i64) -> Result<Vec<GitEdit>> {
        let (query, of) = match scope {
            EditScope::Cluster(id) => {
                ("SELECT * FROM edits WHERE cluster_id = $1 AND id < $2 ORDER BY id DESC LIMIT $3", id)
            }
            EditScope::Deployment(id) => {
                ("SELECT * FROM edits WHERE deployment_id = $1 AND id < $2 ORDER BY id DESC LIMIT $3", id)
            }
            EditScope::Open(id) => (
                "SELECT * FROM edits WHERE cluster_id = $1 AND state IN ('held', 'waiting') AND id < $2 ORDER BY id DESC LIMIT $3",
                id,
            ),
        };
        let found = sqlx::query_as(query).bind(of).bind(before.unwrap_or("g")).bind(limit);
        Ok(found.fetch_all(&self.reader).await?)
    }

    async fn edits_of(&self, cluster: &str, reading: &str) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar("SELECT path FROM edits WHERE cluster_id = $1 AND reading = $2")
            .bind(cluster)
            .bind(reading)
            .fetch_all(&self.reader)
            .await?)
    }

    async fn held_edit(&self, deployment: &str) -> Result<Option<GitEdit>> {
        Ok(sqlx::query_as("SELECT * FROM edits WHERE deployment_id = $1 AND state = 'held' ORDER BY id DESC LIMIT 1")
            .bind(deployment)
            .fetch_optional(&self.reader)
            .await?)
    }

    async fn adopted_edit(&self, cluster: &str, path: &str) -> Result<Option<GitEdit>> {
        Ok(sqlx::query_as(
            "SELECT x.* FROM edits x JOIN tasks t ON t.id = x.task_id JOIN instances i ON i.id = t.instance_id WHERE x.cluster_id = $1 AND x.path = $2 AND x.state = 'adopted' AND i.state = 'pending' ORDER BY x.id DESC LIMIT 1",
        )
        .bind(cluster)
        .bind(path)
        .fetch_optional(&self.reader)
        .await?)
    }

    async fn confirmed_removals(&self, target: &Target) -> Result<Vec<GitEdit>> {
        Ok(sqlx::query_as(
            "SELECT x.* FROM clusters c JOIN edits x ON x.cluster_id = c.id JOIN reports r ON r.cluster_id = c.id WHERE c.repository = $1 AND c.branch = $2 AND x.state IN ('waiting', 'held') AND x.kind IN ('removed', 'emptied') AND EXISTS (SELECT 1 FROM observations o WHERE o.deployment_id = x.deployment_id AND o.title = $3 AND o.at >= (SELECT MAX(t.created_at) FROM tasks t WHERE t.deployment_id = x.deployment_id) AND r.deployments_at > o.at) AND NOT EXISTS (SELECT 1 FROM statuses s WHERE s.deployment_id = x.deployment_id AND s.snapshot = 'deployments')",
        )
        .bind(&target.repository)
        .bind(&target.branch)
        .bind(TEARDOWN)
        .fetch_all(&self.reader)
        .await?)
    }

    async fn outbox(&self, target: &Target, limit: i64) -> Result<Vec<OutboxRow>> {
        Ok(sqlx::query_as(
            "SELECT * FROM outbox WHERE repository = $1 AND branch = $2 AND fan_out_id IS NULL AND edit_id IS NULL ORDER BY id LIMIT $3",
        )
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
            "SELECT i.id AS id, i.deployment_id AS deployment_id, i.sequence AS sequence, d.last_sequence AS last_sequence FROM (SELECT id, kind, subject_id FROM outbox WHERE repository = $1 AND branch = $2 AND fan_out_id IS NULL AND edit_id IS NULL ORDER BY id LIMIT $3) o JOIN instances i ON i.id = o.subject_id JOIN deployments d ON d.id = i.deployment_id WHERE o.kind = 'instance'",
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
                    "SELECT i.*, e.id AS environment_id, e.cluster_id AS cluster_id, d.shard AS shard, d.name AS deployment_name, d.last_sequence AS last_sequence, EXISTS (SELECT 1 FROM instances o WHERE o.deployment_id = d.id AND o.state NOT IN ('pending', 'superseded', 'proposed', 'rejected')) AS written FROM instances i JOIN deployments d ON d.id = i.deployment_id JOIN environments e ON e.id = d.environment_id WHERE i.id = $1",
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
            "SELECT t.* FROM tasks t JOIN instances i ON i.id = t.instance_id WHERE t.deployment_id = $1 AND t.state = 'running' AND t.sequence <= $2 AND i.state <> 'proposed' ORDER BY t.sequence",
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

    async fn lead(&self, holder: &str, limit: Millis) -> Result<Option<Lead>> {
        // Of an embedded database there is one process: the one before is gone.
        let free = if SHARED { "leads.until < " } else { "leads.until IS NOT NULL OR 0 < " };
        let query = format!(
            "INSERT INTO leads (id, holder, epoch, until) VALUES (1, $1, 1, {now} + $2) ON CONFLICT (id) DO UPDATE SET epoch = CASE WHEN leads.holder = excluded.holder THEN leads.epoch ELSE leads.epoch + 1 END, holder = excluded.holder, until = {now} + $2 WHERE leads.holder = excluded.holder OR {free} {now} RETURNING epoch",
            now = now_ms!()
        );
        let epoch: Option<i64> = sqlx::query_scalar(sqlx::AssertSqlSafe(query))
            .bind(holder)
            .bind(limit)
            .fetch_optional(&self.writer)
            .await?;
        Ok(epoch.map(|epoch| Lead { holder: holder.to_owned(), epoch }))
    }

    async fn resign(&self, lead: &Lead) -> Result<()> {
        sqlx::query("UPDATE leads SET until = 0 WHERE id = 1 AND holder = $1 AND epoch = $2")
            .bind(&lead.holder)
            .bind(lead.epoch)
            .execute(&self.writer)
            .await?;
        Ok(())
    }

    async fn tell(&self, notice: &Notice) -> Result<()> {
        if !SHARED {
            return Ok(());
        }
        let mut tx = self.begin().await?;
        super::tell(&mut tx, notice).await?;
        Ok(tx.commit().await?)
    }

    async fn hear(&self, tell: mpsc::Sender<Notice>) {
        super::hear(&self.reader, tell).await;
    }

    async fn prepare_batch(&self, batch: &Batch, lead: &Lead) -> Result<()> {
        let mut tx = self.begin().await?;
        check_lead(&mut tx, lead).await?;
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

    async fn abandon_batch(&self, batch: &Batch, lead: &Lead) -> Result<()> {
        let mut tx = self.begin().await?;
        check_lead(&mut tx, lead).await?;
        // A tip that moves quickly abandons many commits of thousands of rows each.
        let rows = BatchRows { instances: batch.rows.instances.clone(), ..BatchRows::default() };
        sqlx::query("UPDATE batches SET state = 'abandoned', rows = $2 WHERE commit_id = $1 AND state = 'prepared'")
            .bind(&batch.commit_id)
            .bind(Json(rows))
            .execute(&mut *tx)
            .await?;
        Ok(tx.commit().await?)
    }

    async fn finish_batch(&self, pushed: &Pushed) -> Result<()> {
        let mut tx = self.begin().await?;
        check_lead(&mut tx, &pushed.lead).await?;
        if let Some(commit) = &pushed.batch {
            // An older commit that is found later does not take the place of a newer one.
            sqlx::query(
                "INSERT INTO revisions (repository, branch, revision, created_at) SELECT repository, branch, commit_id, created_at FROM batches WHERE commit_id = $1 ON CONFLICT (repository, branch) DO UPDATE SET revision = excluded.revision, created_at = excluded.created_at WHERE excluded.created_at >= revisions.created_at",
            )
            .bind(commit)
            .execute(&mut *tx)
            .await?;
            // All that lies between the commit and what it was made on is ours.
            sqlx::query(
                "INSERT INTO heads (repository, branch, commit_id, reads) SELECT repository, branch, commit_id, 0 FROM batches WHERE commit_id = $1 AND base IS NULL ON CONFLICT (repository, branch) DO NOTHING",
            )
            .bind(commit)
            .execute(&mut *tx)
            .await?;
            sqlx::query(
                "UPDATE heads SET commit_id = $3, reads = reads + 1 WHERE repository = $1 AND branch = $2 AND commit_id = (SELECT base FROM batches WHERE commit_id = $3)",
            )
            .bind(&pushed.target.repository)
            .bind(&pushed.target.branch)
            .bind(commit)
            .execute(&mut *tx)
            .await?;
            super::tell(&mut tx, &Notice::Moved(pushed.target.clone())).await?;
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
        for id in &pushed.rows.restored {
            sqlx::query("UPDATE edits SET state = 'restored' WHERE id = $1 AND state = 'restoring'")
                .bind(id)
                .execute(&mut *tx)
                .await?;
        }
        review::expect_of(&mut tx, pushed).await?;
        for task in &pushed.tasks {
            // Its files are as we write them: a removal that waits for a word is over.
            sqlx::query("UPDATE edits SET state = 'superseded' WHERE deployment_id = $1 AND state = 'waiting'")
                .bind(&task.deployment_id)
                .execute(&mut *tx)
                .await?;
            update_task(&mut tx, task).await?;
        }
        Ok(tx.commit().await?)
    }

    async fn last_report(&self, cluster: &str) -> Result<Option<LastReport>> {
        Ok(sqlx::query_as("SELECT * FROM reports WHERE cluster_id = $1")
            .bind(cluster)
            .fetch_optional(&self.reader)
            .await?)
    }

    async fn last_report_of(&self, deployment: &str) -> Result<Option<LastReport>> {
        Ok(sqlx::query_as(
            "SELECT r.* FROM deployments d JOIN environments e ON e.id = d.environment_id JOIN reports r ON r.cluster_id = e.cluster_id WHERE d.id = $1",
        )
        .bind(deployment)
        .fetch_optional(&self.reader)
        .await?)
    }

    async fn running_in(&self, cluster: &str) -> Result<Vec<RunningTask>> {
        // CROSS JOIN and no order: SQLite begins with the few running tasks, not with every
        // deployment or every task.
        let mut found: Vec<RunningTask> = sqlx::query_as(
            "SELECT t.*, d.environment_id AS environment_id, d.shard AS shard, d.lifecycle AS lifecycle, d.state AS deployment_state, d.newest_instance_id AS newest_instance_id, i.revision AS revision FROM tasks t CROSS JOIN deployments d CROSS JOIN environments e CROSS JOIN instances i WHERE t.state = 'running' AND d.id = t.deployment_id AND e.id = d.environment_id AND e.cluster_id = $1 AND i.id = t.instance_id AND i.state <> 'proposed'",
        )
        .bind(cluster)
        .fetch_all(&self.reader)
        .await?;
        if found.is_empty() {
            return Ok(found);
        }
        let steps: Vec<Step> = sqlx::query_as(
            "SELECT s.* FROM tasks t CROSS JOIN deployments d CROSS JOIN environments e CROSS JOIN task_steps s WHERE t.state = 'running' AND d.id = t.deployment_id AND e.id = d.environment_id AND e.cluster_id = $1 AND s.task_id = t.id ORDER BY s.task_id, s.position",
        )
        .bind(cluster)
        .fetch_all(&self.reader)
        .await?;
        let mut by_task: HashMap<String, Vec<Step>> = HashMap::new();
        for step in steps {
            by_task.entry(step.task_id.clone()).or_default().push(step);
        }
        for running in &mut found {
            running.task.steps = by_task.remove(&running.task.id).unwrap_or_default();
        }
        found.sort_unstable_by(|a, b| {
            (&a.task.deployment_id, a.task.sequence).cmp(&(&b.task.deployment_id, b.task.sequence))
        });
        // A task that moved between the two statements has the steps of its next version; its
        // version tells when it is written.
        Ok(found)
    }

    async fn running_statuses(&self, cluster: &str) -> Result<Vec<StatusRow>> {
        Ok(sqlx::query_as(
            "SELECT s.* FROM tasks t CROSS JOIN statuses s WHERE t.state = 'running' AND s.deployment_id = t.deployment_id AND s.snapshot = 'deployments' AND s.cluster_id = $1",
        )
        .bind(cluster)
        .fetch_all(&self.reader)
        .await?)
    }

    async fn deployment_place(&self, cluster: &str, id: &str) -> Result<Option<DeploymentPlace>> {
        Ok(sqlx::query_as(
            "SELECT d.id AS id, d.environment_id AS environment_id, d.lifecycle AS lifecycle, d.state AS state, d.newest_instance_id AS newest_instance_id FROM deployments d JOIN environments e ON e.id = d.environment_id WHERE d.id = $2 AND e.cluster_id = $1",
        )
        .bind(cluster)
        .bind(id)
        .fetch_optional(&self.reader)
        .await?)
    }

    async fn deployment_places(&self, cluster: &str) -> Result<Vec<DeploymentPlace>> {
        Ok(sqlx::query_as(
            "SELECT d.id AS id, d.environment_id AS environment_id, d.lifecycle AS lifecycle, d.state AS state, d.newest_instance_id AS newest_instance_id FROM deployments d JOIN environments e ON e.id = d.environment_id WHERE e.cluster_id = $1",
        )
        .bind(cluster)
        .fetch_all(&self.reader)
        .await?)
    }

    async fn status_digests(&self, cluster: &str, snapshot: Snapshot) -> Result<Vec<(StatusKey, String)>> {
        let rows: Vec<(String, String, String, String)> = sqlx::query_as(
            "SELECT kind, namespace, name, digest FROM statuses WHERE cluster_id = $1 AND snapshot = $2",
        )
        .bind(cluster)
        .bind(snapshot.as_str())
        .fetch_all(&self.reader)
        .await?;
        Ok(rows.into_iter().map(|(kind, namespace, name, digest)| ((kind, namespace, name), digest)).collect())
    }

    async fn statuses(
        &self,
        snapshot: Snapshot,
        scope: StatusScope<'_>,
        after: AfterStatus,
        limit: i64,
    ) -> Result<Vec<StatusRow>> {
        let [cluster, kind, namespace, name] = after.unwrap_or_default();
        let query = match scope {
            StatusScope::All => sqlx::query_as(
                "SELECT * FROM statuses WHERE snapshot = $1 AND (cluster_id, kind, namespace, name) > ($2, $3, $4, $5) ORDER BY cluster_id, kind, namespace, name LIMIT $6",
            )
            .bind(snapshot.as_str())
            .bind(cluster),
            StatusScope::Cluster(id) => sqlx::query_as(
                "SELECT * FROM statuses WHERE snapshot = $1 AND cluster_id = $2 AND (kind, namespace, name) > ($3, $4, $5) ORDER BY kind, namespace, name LIMIT $6",
            )
            .bind(snapshot.as_str())
            .bind(id.to_owned()),
            // A deployment is in one cluster only.
            StatusScope::Deployment(id) => sqlx::query_as(
                "SELECT * FROM statuses WHERE snapshot = $1 AND deployment_id = $2 AND (kind, namespace, name) > ($3, $4, $5) ORDER BY kind, namespace, name LIMIT $6",
            )
            .bind(snapshot.as_str())
            .bind(id.to_owned()),
        };
        Ok(query.bind(kind).bind(namespace).bind(name).bind(limit).fetch_all(&self.reader).await?)
    }

    async fn record_report(&self, report: &Report) -> Result<()> {
        let mut tx = self.begin().await?;
        record_all(&mut tx, report).await.map_err(again)?;
        tx.commit().await.map_err(|error| again(error.into()))
    }

    async fn confirmations(&self, cluster: &str) -> Result<Confirmations> {
        let newest_revision: Option<Option<String>> = sqlx::query_scalar(
            "SELECT COALESCE(h.commit_id, r.revision) FROM clusters c LEFT JOIN revisions r ON r.repository = c.repository AND r.branch = c.branch LEFT JOIN heads h ON h.repository = c.repository AND h.branch = c.branch WHERE c.id = $1",
        )
        .bind(cluster)
        .fetch_optional(&self.reader)
        .await?;
        let newest_revision = newest_revision.flatten();
        let deletions = sqlx::query_as(
            "SELECT s.deployment_id, s.uid FROM statuses s JOIN deployments d ON d.id = s.deployment_id WHERE s.cluster_id = $1 AND s.snapshot = 'deployments' AND s.deleting AND d.lifecycle = 'deleting' ORDER BY s.deployment_id",
        )
        .bind(cluster)
        .fetch_all(&self.reader)
        .await?;
        Ok(Confirmations { newest_revision, deletions })
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
