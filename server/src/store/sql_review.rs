//! The statements about proposals; compiled for each database like `sql.rs`, whose part it is.

use super::{
    Db, SqlStore, Tx, again, check_fan_out, check_lead, check_version, for_share, insert_fan_out, insert_instance,
    insert_task, one, record_observations, taken, update_task,
};
use crate::store::{
    Change, Cluster, Environment, FanOut, FanOutLevel, Lead, MergedItem, Notice, Observation, Proposal, ProposalEnd,
    ProposalItem, ProposalScope, ProposedChange, ProposedEdit, Pushed, PushedItem, Rest, Result, ReviewStore,
    StatusDue, StoreError, Task, TaskState,
};
use async_trait::async_trait;
use sqlx::types::Json;

/// Most attempts to tell a forge one status: a commit that it does not know any more is nothing to wait for.
const ATTEMPTS_MAX: i64 = 60;

async fn insert_proposal(tx: &mut Tx, row: &Proposal) -> Result<()> {
    sqlx::query(
        "INSERT INTO proposals (id, cluster_id, repository, branch, head_branch, title, level, subject_id, patches, fan_out_id, delivery, state, head, number, url, message, described, comment_id, told, version, author_name, author_email, created_at, ended_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, 1, $20, $21, $22, $23)",
    )
    .bind(&row.id)
    .bind(&row.cluster_id)
    .bind(&row.repository)
    .bind(&row.branch)
    .bind(&row.head_branch)
    .bind(&row.title)
    .bind(&row.level)
    .bind(&row.subject_id)
    .bind(Json(&row.patches))
    .bind(&row.fan_out_id)
    .bind(Json(&row.delivery))
    .bind(row.state.as_str())
    .bind(&row.head)
    .bind(row.number)
    .bind(&row.url)
    .bind(&row.message)
    .bind(&row.described)
    .bind(row.comment_id)
    .bind(row.told)
    .bind(&row.author_name)
    .bind(&row.author_email)
    .bind(row.created_at)
    .bind(row.ended_at)
    .execute(&mut **tx)
    .await
    // Somebody else began one for the same configuration.
    .map_err(|error| match taken(error) {
        StoreError::Exists => StoreError::Conflict,
        other => other,
    })?;
    Ok(())
}

/// What people decide about a proposal; not what is known of its branch and request.
async fn update_proposal(tx: &mut Tx, row: &Proposal) -> Result<()> {
    let done = sqlx::query(
        "UPDATE proposals SET title = $3, patches = $4, fan_out_id = $5, state = $6, message = $7, ended_at = $8, version = version + 1 WHERE id = $1 AND version = $2",
    )
    .bind(&row.id)
    .bind(row.version)
    .bind(&row.title)
    .bind(Json(&row.patches))
    .bind(&row.fan_out_id)
    .bind(row.state.as_str())
    .bind(&row.message)
    .bind(row.ended_at)
    .execute(&mut **tx)
    .await?;
    one(done.rows_affected())
}

async fn propose_one(tx: &mut Tx, proposal: &Proposal, change: &ProposedChange) -> Result<()> {
    let (cluster, environment, row) = (&change.cluster, &change.environment, &change.deployment);
    check_version(tx, for_share!("SELECT version FROM clusters WHERE id = $1"), &cluster.0, cluster.1).await?;
    if row.version == 0 {
        let done = sqlx::query("UPDATE environments SET version = version WHERE id = $1 AND version = $2")
            .bind(&environment.0)
            .bind(environment.1)
            .execute(&mut **tx)
            .await?;
        one(done.rows_affected())?;
        // Only its name and place are taken: what it shall be is in the proposal.
        let fresh = Change {
            cluster: cluster.clone(),
            environment: environment.clone(),
            deployment: row.clone(),
            set_secrets: Vec::new(),
            remove_secrets: Vec::new(),
            instance: None,
            target: proposal.target(),
            fan_out: None,
            edit: None,
            merged: None,
            author: proposal.author(),
            now: row.created_at,
        };
        super::insert_deployment(tx, &fresh).await?;
    } else {
        check_version(tx, for_share!("SELECT version FROM environments WHERE id = $1"), &environment.0, environment.1)
            .await?;
        let done = sqlx::query(
            "UPDATE deployments SET last_sequence = $3, version = version + 1 WHERE id = $1 AND version = $2",
        )
        .bind(&row.id)
        .bind(row.version)
        .bind(row.last_sequence)
        .execute(&mut **tx)
        .await?;
        one(done.rows_affected())?;
    }
    let (instance, task) = &change.instance;
    insert_instance(tx, instance).await?;
    insert_task(tx, task).await?;
    for old in &change.superseded {
        sqlx::query("UPDATE instances SET state = 'superseded' WHERE id = $1 AND state = 'proposed'")
            .bind(&old.instance_id)
            .execute(&mut **tx)
            .await?;
        update_task(tx, old).await?;
    }
    let item = &change.item;
    sqlx::query(
        "INSERT INTO proposal_items (proposal_id, deployment_id, edits, instance_id, task_id, base_instance_id, pushed_instance_id, state, own) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (proposal_id, deployment_id) DO UPDATE SET edits = excluded.edits, instance_id = excluded.instance_id, task_id = excluded.task_id, base_instance_id = excluded.base_instance_id, state = excluded.state",
    )
    .bind(&item.proposal_id)
    .bind(&item.deployment_id)
    .bind(Json(&item.edits))
    .bind(&item.instance_id)
    .bind(&item.task_id)
    .bind(&item.base_instance_id)
    .bind(&item.pushed_instance_id)
    .bind(item.state.as_str())
    .bind(proposal.level.is_none())
    .execute(&mut **tx)
    .await
    .map_err(|error| match taken(error) {
        StoreError::Exists => StoreError::Conflict,
        other => other,
    })?;
    Ok(())
}

/// What follows for a proposal from a change that takes over a part of it.
pub(super) async fn merge(tx: &mut Tx, merged: &MergedItem, change: &Change) -> Result<()> {
    if let Some(lead) = &merged.lead {
        check_lead(tx, lead).await?;
    }
    // What took the place of the reviewed instance, because something else came in between, is the item's outcome.
    let (instance, task) = match &change.instance {
        Some((instance, task)) if merged.rest.is_none() => (Some(&instance.id), Some(&task.id)),
        _ => (None, None),
    };
    let state = if merged.rest.is_some() { "open" } else { "merged" };
    let done = sqlx::query(
        "UPDATE proposal_items SET state = $3, instance_id = COALESCE($4, instance_id), task_id = COALESCE($5, task_id) WHERE proposal_id = $1 AND deployment_id = $2 AND state = 'open'",
    )
    .bind(&merged.proposal_id)
    .bind(&merged.deployment_id)
    .bind(state)
    .bind(instance)
    .bind(task)
    .execute(&mut **tx)
    .await?;
    // Somebody closed it at the same moment: what the branch holds is looked at again.
    one(done.rows_affected())?;
    if let Some(rest) = &merged.rest {
        keep_rest(tx, merged, rest, change).await?;
    }
    if let Some(instance) = &merged.instance_id {
        sqlx::query("UPDATE instances SET state = 'committed', revision = $2 WHERE id = $1 AND state = 'proposed'")
            .bind(instance)
            .bind(&merged.revision)
            .execute(&mut **tx)
            .await?;
    }
    for task in &merged.tasks {
        if merged.instance_id.as_ref() != Some(&task.instance_id) && task.state == TaskState::Superseded {
            sqlx::query("UPDATE instances SET state = 'superseded' WHERE id = $1 AND state IN ('proposed', 'pending')")
                .bind(&task.instance_id)
                .execute(&mut **tx)
                .await?;
        }
        update_task(tx, task).await?;
    }
    let own = merged.tasks.iter().find(|task| merged.instance_id.as_ref() == Some(&task.instance_id));
    if let Some(task) = change.instance.as_ref().map(|(_, task)| task).or(own) {
        expect(tx, &change.cluster.0, &merged.revision, &task.deployment_id, &task.id).await?;
    }
    // All of it is merged: nothing is left to review.
    sqlx::query(
        "UPDATE proposals SET state = 'merged', message = NULL, ended_at = $2, version = version + 1 WHERE id = $1 AND state = 'open' AND NOT EXISTS (SELECT 1 FROM proposal_items i WHERE i.proposal_id = proposals.id AND i.state = 'open')",
    )
    .bind(&merged.proposal_id)
    .bind(change.now)
    .execute(&mut **tx)
    .await?;
    Ok(())
}

/// What is merged of a deployment's proposal goes to a proposal that stands for it, with the request; the rest begins
/// anew.
async fn keep_rest(tx: &mut Tx, merged: &MergedItem, rest: &Rest, change: &Change) -> Result<()> {
    let (proposal, deployment) = (&merged.proposal_id, &merged.deployment_id);
    sqlx::query(
        "INSERT INTO proposals (id, cluster_id, repository, branch, head_branch, title, level, subject_id, patches, fan_out_id, delivery, state, head, number, url, message, described, comment_id, told, version, author_name, author_email, created_at, ended_at) SELECT CAST($2 AS TEXT), cluster_id, repository, branch, head_branch, title, level, subject_id, patches, fan_out_id, delivery, 'merged', head, number, url, NULL, described, comment_id, told, 1, author_name, author_email, created_at, $3 FROM proposals WHERE id = $1",
    )
    .bind(proposal)
    .bind(&rest.merged_id)
    .bind(change.now)
    .execute(&mut **tx)
    .await?;
    let known: Json<Vec<ProposedEdit>> =
        sqlx::query_scalar("SELECT edits FROM proposal_items WHERE proposal_id = $1 AND deployment_id = $2")
            .bind(proposal)
            .bind(deployment)
            .fetch_one(&mut **tx)
            .await?;
    let mut edits = known.0;
    let left = edits.split_off(rest.edits.min(edits.len()));
    if let Some((instance, task)) = &change.instance {
        sqlx::query(
            "INSERT INTO proposal_items (proposal_id, deployment_id, edits, instance_id, task_id, base_instance_id, pushed_instance_id, state, own) SELECT CAST($3 AS TEXT), deployment_id, $4, CAST($5 AS TEXT), CAST($6 AS TEXT), base_instance_id, pushed_instance_id, 'merged', own FROM proposal_items WHERE proposal_id = $1 AND deployment_id = $2",
        )
        .bind(proposal)
        .bind(deployment)
        .bind(&rest.merged_id)
        .bind(Json(&edits))
        .bind(&instance.id)
        .bind(&task.id)
        .execute(&mut **tx)
        .await?;
    }
    sqlx::query(
        "UPDATE proposal_items SET edits = $3, pushed_instance_id = NULL WHERE proposal_id = $1 AND deployment_id = $2",
    )
    .bind(proposal)
    .bind(deployment)
    .bind(Json(&left))
    .execute(&mut **tx)
    .await?;
    begin_anew(tx, proposal, &rest.branch).await
}

/// The request was merged, and something is left to review: under another branch, as another request.
async fn begin_anew(tx: &mut Tx, proposal: &str, branch: &str) -> Result<()> {
    sqlx::query(
        "UPDATE proposals SET head_branch = $2, head = NULL, number = NULL, url = NULL, described = NULL, comment_id = 0, version = version + 1 WHERE id = $1",
    )
    .bind(proposal)
    .bind(branch)
    .execute(&mut **tx)
    .await?;
    // What they count of the edits counts no more.
    sqlx::query("DELETE FROM proposal_pushes WHERE proposal_id = $1").bind(proposal).execute(&mut **tx).await?;
    Ok(())
}

async fn attend(tx: &mut Tx, row: &Proposal, pushed: Option<&[ProposalItem]>) -> Result<()> {
    let done = sqlx::query(
        "UPDATE proposals SET head = $2, number = $3, url = $4, described = $5, comment_id = $6, told = $7 WHERE id = $1 AND head_branch = $8",
    )
    .bind(&row.id)
    .bind(&row.head)
    .bind(row.number)
    .bind(&row.url)
    .bind(&row.described)
    .bind(row.comment_id)
    .bind(row.told)
    .bind(&row.head_branch)
    .execute(&mut **tx)
    .await?;
    // It went on under another branch meanwhile.
    one(done.rows_affected())?;
    let count = |len: usize| i64::try_from(len).unwrap_or(i64::MAX);
    for item in pushed.unwrap_or_default() {
        sqlx::query("UPDATE proposal_items SET pushed_instance_id = $3 WHERE proposal_id = $1 AND deployment_id = $2")
            .bind(&row.id)
            .bind(&item.deployment_id)
            .bind(&item.instance_id)
            .execute(&mut **tx)
            .await?;
        sqlx::query(
            "INSERT INTO proposal_pushes (instance_id, proposal_id, deployment_id, edits, patches) VALUES ($1, $2, $3, $4, $5) ON CONFLICT (instance_id) DO NOTHING",
        )
        .bind(&item.instance_id)
        .bind(&row.id)
        .bind(&item.deployment_id)
        .bind(count(item.edits.len()))
        .bind(count(row.patches.len()))
        .execute(&mut **tx)
        .await?;
        // In the same transaction, so that every commit of ours has a final status some day.
        if let Some(commit) = &row.head {
            expect(tx, &row.cluster_id, commit, &item.deployment_id, &item.task_id).await?;
        }
    }
    Ok(())
}

async fn end(tx: &mut Tx, end: &ProposalEnd) -> Result<()> {
    update_proposal(tx, &end.proposal).await?;
    if end.anew {
        begin_anew(tx, &end.proposal.id, &end.proposal.head_branch).await?;
    }
    for task in &end.tasks {
        for query in [
            "UPDATE instances SET state = 'rejected' WHERE state = 'proposed' AND id = (SELECT instance_id FROM proposal_items WHERE proposal_id = $1 AND task_id = $2)",
            // Its only wish was this one.
            "UPDATE deployments SET lifecycle = 'deleting', state = 'deleted', version = version + 1 WHERE newest_instance_id IS NULL AND id = (SELECT deployment_id FROM proposal_items WHERE proposal_id = $1 AND task_id = $2)",
            "UPDATE proposal_items SET state = 'dropped' WHERE proposal_id = $1 AND task_id = $2 AND state = 'open'",
        ] {
            sqlx::query(query).bind(&end.proposal.id).bind(&task.id).execute(&mut **tx).await?;
        }
        update_task(tx, task).await?;
    }
    Ok(())
}

/// A forge shall know what a commit comes to, when the cluster has one.
async fn expect(tx: &mut Tx, cluster: &str, commit: &str, deployment: &str, task: &str) -> Result<()> {
    sqlx::query(
        "INSERT INTO commit_statuses (commit_id, deployment_id, task_id, cluster_id, told, attempts, is_final) SELECT CAST($2 AS TEXT), CAST($3 AS TEXT), CAST($4 AS TEXT), id, NULL, 0, $5 FROM clusters WHERE id = $1 AND forge IS NOT NULL ON CONFLICT (commit_id, deployment_id) DO NOTHING",
    )
    .bind(cluster)
    .bind(commit)
    .bind(deployment)
    .bind(task)
    .bind(false)
    .execute(&mut **tx)
    .await?;
    Ok(())
}

/// The same for a commit that was pushed to the branch that Flux follows.
pub(super) async fn expect_of(tx: &mut Tx, pushed: &Pushed) -> Result<()> {
    let Some(commit) = &pushed.batch else { return Ok(()) };
    let forges: i64 =
        sqlx::query_scalar("SELECT COUNT(*) FROM clusters WHERE repository = $1 AND branch = $2 AND forge IS NOT NULL")
            .bind(&pushed.target.repository)
            .bind(&pushed.target.branch)
            .fetch_one(&mut **tx)
            .await?;
    if forges == 0 {
        return Ok(());
    }
    for instance in &pushed.rows.instances {
        sqlx::query(
            "INSERT INTO commit_statuses (commit_id, deployment_id, task_id, cluster_id, told, attempts, is_final) SELECT CAST($2 AS TEXT), i.deployment_id, i.task_id, c.id, NULL, 0, $3 FROM instances i JOIN deployments d ON d.id = i.deployment_id JOIN environments e ON e.id = d.environment_id JOIN clusters c ON c.id = e.cluster_id WHERE i.id = $1 AND c.forge IS NOT NULL ON CONFLICT (commit_id, deployment_id) DO NOTHING",
        )
        .bind(instance)
        .bind(commit)
        .bind(false)
        .execute(&mut **tx)
        .await?;
    }
    Ok(())
}

#[async_trait]
impl ReviewStore for SqlStore {
    async fn proposal(&self, id: &str) -> Result<Option<Proposal>> {
        Ok(sqlx::query_as("SELECT * FROM proposals WHERE id = $1").bind(id).fetch_optional(&self.reader).await?)
    }

    async fn proposals(
        &self,
        scope: ProposalScope<'_>,
        open: bool,
        before: Option<&str>,
        limit: i64,
    ) -> Result<Vec<Proposal>> {
        let (query, of) = match scope {
            ProposalScope::All => (
                "SELECT * FROM proposals WHERE $1 = '' AND id < $2 AND ($3 = 0 OR ended_at IS NULL) ORDER BY id DESC LIMIT $4",
                "",
            ),
            ProposalScope::Cluster(id) => (
                "SELECT * FROM proposals WHERE cluster_id = $1 AND id < $2 AND ($3 = 0 OR ended_at IS NULL) ORDER BY id DESC LIMIT $4",
                id,
            ),
            ProposalScope::Deployment(id) => (
                "SELECT p.* FROM proposal_items i JOIN proposals p ON p.id = i.proposal_id WHERE i.deployment_id = $1 AND p.id < $2 AND ($3 = 0 OR (p.ended_at IS NULL AND i.state = 'open')) ORDER BY p.id DESC LIMIT $4",
                id,
            ),
        };
        let found = sqlx::query_as(query).bind(of).bind(before.unwrap_or("g")).bind(i64::from(open)).bind(limit);
        Ok(found.fetch_all(&self.reader).await?)
    }

    async fn attended_proposals(&self) -> Result<Vec<Proposal>> {
        Ok(sqlx::query_as(
            "SELECT * FROM proposals WHERE state <> 'preparing' AND (state = 'open' OR NOT told) ORDER BY id",
        )
        .fetch_all(&self.reader)
        .await?)
    }

    async fn own_proposal(&self, deployment: &str) -> Result<Option<Proposal>> {
        Ok(sqlx::query_as(
            "SELECT p.* FROM proposal_items i JOIN proposals p ON p.id = i.proposal_id WHERE i.deployment_id = $1 AND i.state = 'open' AND i.own AND p.state = 'open'",
        )
        .bind(deployment)
        .fetch_optional(&self.reader)
        .await?)
    }

    async fn proposal_for(&self, level: FanOutLevel, subject: &str) -> Result<Option<Proposal>> {
        Ok(sqlx::query_as(
            "SELECT * FROM proposals WHERE level = $1 AND subject_id = $2 AND state IN ('preparing', 'open')",
        )
        .bind(level.as_str())
        .bind(subject)
        .fetch_optional(&self.reader)
        .await?)
    }

    async fn proposal_items(&self, proposal: &str) -> Result<Vec<ProposalItem>> {
        Ok(sqlx::query_as("SELECT * FROM proposal_items WHERE proposal_id = $1 ORDER BY deployment_id")
            .bind(proposal)
            .fetch_all(&self.reader)
            .await?)
    }

    async fn item_of_instance(&self, instance: &str) -> Result<Option<PushedItem>> {
        Ok(sqlx::query_as(
            "SELECT i.*, h.instance_id AS held_instance_id, h.edits AS held_edits, h.patches AS held_patches FROM proposal_pushes h JOIN proposal_items i ON i.proposal_id = h.proposal_id AND i.deployment_id = h.deployment_id JOIN proposals p ON p.id = h.proposal_id WHERE h.instance_id = $1 AND i.state = 'open' AND p.state <> 'closed'",
        )
        .bind(instance)
        .fetch_optional(&self.reader)
        .await?)
    }

    async fn item_that_ends(&self, deployment: &str) -> Result<Option<PushedItem>> {
        Ok(sqlx::query_as(
            "SELECT p.*, h.instance_id AS held_instance_id, h.edits AS held_edits, h.patches AS held_patches FROM proposal_items p JOIN proposal_pushes h ON h.instance_id = p.pushed_instance_id JOIN instances i ON i.id = h.instance_id WHERE p.deployment_id = $1 AND p.state = 'open' AND i.document IS NULL",
        )
        .bind(deployment)
        .fetch_optional(&self.reader)
        .await?)
    }

    async fn proposal_of_task(&self, task: &str) -> Result<Option<Proposal>> {
        Ok(sqlx::query_as(
            "SELECT p.* FROM proposal_items i JOIN proposals p ON p.id = i.proposal_id WHERE i.task_id = $1 LIMIT 1",
        )
        .bind(task)
        .fetch_optional(&self.reader)
        .await?)
    }

    async fn propose(&self, proposal: &Proposal, changes: &[ProposedChange], fan_out: Option<&FanOut>) -> Result<()> {
        let _turn = self.turn().await?;
        let mut tx = self.begin().await?;
        if proposal.version == 0 {
            insert_proposal(&mut tx, proposal).await?;
        } else {
            update_proposal(&mut tx, proposal).await?;
        }
        match fan_out {
            // One that is under way finds the deployments; a new one begins.
            Some(fan_out) if changes.is_empty() => insert_fan_out(&mut tx, fan_out).await?,
            Some(fan_out) => check_fan_out(&mut tx, Some(&fan_out.id)).await?,
            None => {}
        }
        for change in changes {
            propose_one(&mut tx, proposal, change).await.map_err(again)?;
        }
        super::super::tell(&mut tx, &Notice::Waits(proposal.target())).await?;
        Ok(tx.commit().await?)
    }

    async fn attend(&self, row: &Proposal, pushed: Option<&[ProposalItem]>, lead: &Lead) -> Result<()> {
        let mut tx = self.begin().await?;
        check_lead(&mut tx, lead).await?;
        attend(&mut tx, row, pushed).await.map_err(again)?;
        Ok(tx.commit().await?)
    }

    async fn explain_proposal(&self, id: &str, message: &str) -> Result<()> {
        let mut tx = self.begin().await?;
        for query in [
            "UPDATE proposals SET message = $2 WHERE id = $1 AND ended_at IS NULL",
            "UPDATE task_steps SET message = $2 WHERE state = 'running' AND task_id IN (SELECT task_id FROM proposal_items WHERE proposal_id = $1 AND state = 'open')",
        ] {
            sqlx::query(query).bind(id).bind(message).execute(&mut *tx).await?;
        }
        Ok(tx.commit().await?)
    }

    async fn observe(&self, rows: &[Observation]) -> Result<()> {
        let mut tx = self.begin().await?;
        record_observations(&mut tx, rows).await?;
        Ok(tx.commit().await?)
    }

    async fn move_tasks(&self, tasks: &[Task]) -> Result<()> {
        let mut tx = self.begin().await?;
        for task in tasks {
            update_task(&mut tx, task).await.map_err(again)?;
        }
        Ok(tx.commit().await?)
    }

    async fn merge_level(
        &self,
        proposal: &Proposal,
        cluster: Option<&Cluster>,
        environment: Option<&Environment>,
        fan_out: &FanOut,
        rest: Option<(&Proposal, &FanOut)>,
        lead: Option<&Lead>,
    ) -> Result<()> {
        let mut tx = self.begin().await?;
        if let Some(lead) = lead {
            check_lead(&mut tx, lead).await?;
        }
        let rows = [
            (
                "UPDATE clusters SET config = $3, version = version + 1 WHERE id = $1 AND version = $2",
                cluster.map(|row| (&row.id, row.version, &row.config)),
            ),
            (
                "UPDATE environments SET config = $3, version = version + 1 WHERE id = $1 AND version = $2",
                environment.map(|row| (&row.id, row.version, &row.config)),
            ),
        ];
        for (query, row) in rows {
            let Some((id, version, config)) = row else { continue };
            let done = sqlx::query(query).bind(id).bind(version).bind(Json(config)).execute(&mut *tx).await?;
            one(done.rows_affected())?;
        }
        update_proposal(&mut tx, proposal).await.map_err(again)?;
        insert_fan_out(&mut tx, fan_out).await?;
        if let Some((rest, looks)) = rest {
            insert_proposal(&mut tx, rest).await?;
            insert_fan_out(&mut tx, looks).await?;
        }
        Ok(tx.commit().await?)
    }

    async fn end_proposal(&self, ending: &ProposalEnd) -> Result<()> {
        let mut tx = self.begin().await?;
        end(&mut tx, ending).await.map_err(again)?;
        super::super::tell(&mut tx, &Notice::Waits(ending.proposal.target())).await?;
        Ok(tx.commit().await?)
    }

    async fn expect_statuses(&self, cluster: &str, commit: &str, tasks: &[(String, String)]) -> Result<()> {
        let mut tx = self.begin().await?;
        for (deployment, task) in tasks {
            expect(&mut tx, cluster, commit, deployment, task).await?;
        }
        Ok(tx.commit().await?)
    }

    async fn statuses_due(&self, cluster: &str, limit: i64) -> Result<Vec<StatusDue>> {
        Ok(sqlx::query_as(
            "SELECT s.commit_id, s.deployment_id, s.task_id, s.cluster_id, s.told, s.attempts, e.name AS environment, d.name AS deployment, t.state AS task_state, t.message AS message FROM commit_statuses s JOIN tasks t ON t.id = s.task_id JOIN deployments d ON d.id = s.deployment_id JOIN environments e ON e.id = d.environment_id WHERE s.cluster_id = $1 AND NOT s.is_final AND (s.told IS NULL OR s.told <> t.state) AND NOT EXISTS (SELECT 1 FROM instances i WHERE i.id = t.instance_id AND i.state = 'proposed') ORDER BY s.attempts LIMIT $2",
        )
        .bind(cluster)
        .bind(limit)
        .fetch_all(&self.reader)
        .await?)
    }

    async fn clusters_with_statuses(&self) -> Result<Vec<String>> {
        Ok(sqlx::query_scalar("SELECT DISTINCT cluster_id FROM commit_statuses WHERE NOT is_final")
            .fetch_all(&self.reader)
            .await?)
    }

    async fn status_told(&self, row: &StatusDue, told: Option<&str>, is_final: bool) -> Result<()> {
        let done = is_final || (told.is_none() && row.attempts + 1 >= ATTEMPTS_MAX);
        sqlx::query::<Db>(
            "UPDATE commit_statuses SET told = COALESCE($3, told), is_final = $4, attempts = CASE WHEN $3 IS NULL THEN attempts + 1 ELSE 0 END WHERE commit_id = $1 AND deployment_id = $2",
        )
        .bind(&row.commit_id)
        .bind(&row.deployment_id)
        .bind(told)
        .bind(done)
        .execute(&self.writer)
        .await?;
        Ok(())
    }
}
