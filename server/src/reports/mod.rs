//! What agents say: the only writer of observed state.
//!
//! Every report means a whole snapshot of one kind of object of one cluster. On the wire it may be the
//! difference from the last one, named by digest, or only the word that nothing differs; when that digest is
//! not what is stored, the agent is asked for the whole. It is accepted when it
//! comes from the agent that holds the lease (epoch, then sequence, both only ever higher) in the
//! cluster that the token is bound to; then rows that are not in it vanish, tasks move by
//! [`crate::tasks::machine`], and deployments follow their tasks. Anything else changes nothing.
//!
//! **Compute outside, commit inside**, as `changes` does: one short transaction verifies the last
//! report, tasks and newest instances that this one was computed from. What is the same as before is
//! not written. What must never enter: desired state, Git, clusters.

mod explain;
mod status;

pub use status::{Condition, ContainerStatus, DeploymentStatus, FluxStatus, PodStatus, StatusStep};

use crate::clock::Clock;
use crate::metrics;
use crate::repository::{Pushes, Wake};
use crate::store::{
    AgentFacts, ClusterFacts, Confirmations, DeploymentOutcome, DeploymentPlace, DeploymentState, InstanceOutcome,
    LastReport, Lifecycle, Millis, Notice, Observation, Report, RunningTask, Snapshot, StatusKey, StatusRow,
    StatusScope, Store, StoreError, Target, Task, TaskState,
};
use crate::tasks::machine::{self, Event, Observed, Wanted};
use sha2::{Digest as _, Sha256};
use status::Object;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use styrmin_renderer::canonical::{digest_parts, hex};
use styrmin_renderer::layout::FLUX_NAMESPACE;
use styrmin_renderer::names::EnvironmentId;
use styrmin_renderer::objects::FLUX_SOURCE;
use styrmin_renderer::plan::Workflow;
use styrmin_renderer::{objects, spec};
use tracing::{info, warn};

/// Most pods of one report.
pub const PODS_MAX: usize = 40_000;
/// Most StyrminDeployments of one report.
pub const DEPLOYMENTS_MAX: usize = 15_000;
/// Most objects of Flux of one report.
pub const FLUX_MAX: usize = 15_000;
/// After this many milliseconds without a report people are told that there is none.
pub const SILENCE: Millis = 60_000;
/// How long after the push of a removal, in milliseconds, the absence of an object that nobody saw
/// vanish proves nothing.
const SETTLE: Millis = 10_000;
/// How long an agent that waits for a push waits for the answer.
const HELD: Duration = Duration::from_secs(25);
/// How often a report is computed again when something moved meanwhile.
const ATTEMPTS: u32 = 20;
/// Most bytes of an agent's identity and of a cluster's UID.
const IDENTITY_MAX: usize = 253;
/// Instances whose digest is kept in memory.
const WANTED_MAX: usize = 10_000;
/// Most keys of one cluster.
const KEYS_MAX: usize = 100;
/// Most bytes of a digest.
const DIGEST_MAX: usize = 128;
/// Objects that are looked at one by one rather than all of their kind.
const FEW: usize = 50;
/// Pods of one deployment that are looked at for the reason of a failure.
const PODS_READ: i64 = 500;

/// Which agent process reports, and its how many-th report it is.
#[derive(Debug, Clone, PartialEq, Eq, async_graphql::InputObject)]
#[graphql(name = "AgentInput")]
pub struct Agent {
    /// Unique for each process.
    pub identity: String,
    /// Transition count of the agents' lease.
    pub epoch: i64,
    /// Counts the reports of this process, of every kind together.
    pub sequence: i64,
    /// UID of the cluster's kube-system namespace.
    pub cluster_uid: String,
}

/// A whole snapshot of one kind.
#[derive(Debug, Clone)]
pub enum Items {
    /// Pods.
    Pods(Vec<PodStatus>),
    /// StyrminDeployments.
    Deployments(Vec<DeploymentStatus>),
    /// Flux's GitRepositories and Kustomizations.
    Flux(Vec<FluxStatus>),
}

/// What a report that does not hold a whole snapshot differs from.
#[derive(Debug, Clone, PartialEq, Eq, async_graphql::InputObject)]
#[graphql(name = "DeltaInput")]
pub struct Delta {
    /// The agent's digest of the last snapshot of this kind: the objects of the report are new or differ from
    /// it.
    pub base: String,
    /// Objects of that snapshot that are gone.
    pub removed: Vec<ObjectKey>,
}

/// Which object.
#[derive(Debug, Clone, PartialEq, Eq, async_graphql::InputObject)]
#[graphql(name = "ObjectKeyInput")]
pub struct ObjectKey {
    /// Its kind.
    pub kind: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// One report.
#[derive(Debug, Clone)]
pub struct Said {
    /// All objects, or those that differ.
    pub items: Items,
    /// The agent's digest of the whole snapshot; without it the server makes one.
    pub digest: Option<String>,
    /// `None`: the items are all there are.
    pub delta: Option<Delta>,
}

/// Why a report was not accepted. Nothing of it is stored.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// Another agent reported later, or this one did.
    #[error(
        "agent \"{identity}\": epoch and sequence: ({epoch}, {sequence}) do not follow ({}, {}), the last report of this cluster, by agent \"{}\"; only one agent may report: the one that holds the lease, with a higher epoch than the one before it and a higher sequence for each report",
        .last.epoch, .last.sequence, .last.identity
    )]
    Stale {
        /// Who reported.
        identity: String,
        /// Its epoch.
        epoch: i64,
        /// Its sequence.
        sequence: i64,
        /// The last report that was accepted.
        last: Box<LastReport>,
    },
    /// The token is used in another cluster.
    #[error(
        "agent: clusterUid: this token belongs to the cluster with UID {bound}, not to the one with UID {uid}; create a cluster for that one and use the token of its agent"
    )]
    ForeignCluster {
        /// UID of the cluster that the token is bound to.
        bound: String,
        /// UID in the report.
        uid: String,
    },
    /// A field is not good.
    #[error("{object}: {field}: {message}")]
    Invalid {
        /// agent or report.
        object: &'static str,
        /// The field.
        field: &'static str,
        /// What is wrong and what to do.
        message: String,
    },
    /// It differs from a snapshot that is not the last one here.
    #[error("report: base, digest: the last snapshot here is another one; send all objects")]
    WholeNeeded,
    /// Too many changes at once.
    #[error("report: too many changes of the same rows at this moment; send it again with a higher sequence")]
    Busy,
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Something that must not happen.
    #[error(transparent)]
    Internal(#[from] anyhow::Error),
}

type Result<T> = std::result::Result<T, ReportError>;

/// Digest of an instance's spec and the display state that fulfils it.
type Goal = (String, &'static str);

/// Takes reports.
pub struct Reports {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    /// Instances never change, so what they want is read once while their rollout is under way.
    goals: Mutex<HashMap<String, Arc<Goal>>>,
    pushes: Pushes,
    wake: Wake,
}

/// A snapshot, bounded and digested.
struct Prepared {
    snapshot: Snapshot,
    digest: String,
    /// The digest that it differs from; `None`: it is whole.
    base: Option<String>,
    /// What is gone from that.
    removed: HashSet<StatusKey>,
    /// It says of the StyrminDeployments, too, that they are as before.
    word: bool,
    /// Without a time; of objects with the same key the last one.
    rows: BTreeMap<StatusKey, StatusRow>,
    /// By deployment and namespace.
    deployments: HashMap<(String, String), DeploymentStatus>,
    flux: Vec<FluxStatus>,
}

/// What follows from a report.
#[derive(Default)]
struct Moves {
    deployments: BTreeMap<String, Vec<DeploymentOutcome>>,
    tasks: Vec<Task>,
}

impl Reports {
    /// Puts the room together.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, clock: Arc<dyn Clock>, pushes: Pushes, wake: Wake) -> Self {
        Self { store, clock, goals: Mutex::default(), pushes, wake }
    }

    /// The newest commit that is known in the repository of `cluster`: at once when it is not `after`,
    /// otherwise when there is another one, or after 25 s.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn newest_revision(&self, cluster: &str, after: Option<&str>) -> Result<Option<String>> {
        // From before the first look: nothing is missed between the two.
        let mut pushes = self.pushes.listen();
        let Some(row) = self.store.cluster(cluster).await? else { return Ok(None) };
        let target = Target { repository: row.repository, branch: row.branch };
        let end = tokio::time::Instant::now() + HELD;
        loop {
            let newest = self.store.head(&target).await?.map(|(head, _)| head);
            let left = end.saturating_duration_since(tokio::time::Instant::now());
            if newest.as_deref() != after || !pushes.pushed(&target, left).await {
                return Ok(newest);
            }
        }
    }

    /// Takes the word of the agent that leads in `cluster` of what Flux can decrypt there.
    ///
    /// # Errors
    /// When another process reported last, or too many are named.
    pub async fn recipients(&self, cluster: &str, identity: &str, epoch: i64, recipients: Vec<String>) -> Result<()> {
        let last = self.store.last_report(cluster).await?.ok_or(ReportError::WholeNeeded)?;
        if last.identity != identity || last.epoch != epoch {
            let (identity, sequence) = (identity.to_owned(), last.sequence);
            return Err(ReportError::Stale { identity, epoch, sequence, last: Box::new(last) });
        }
        let is_one = |text: &String| text.starts_with("age1") && text.len() <= DIGEST_MAX;
        if recipients.len() > KEYS_MAX || !recipients.iter().all(is_one) {
            let message = format!("are not age recipients, or more than {KEYS_MAX}");
            return Err(ReportError::Invalid { object: "report", field: "recipients", message });
        }
        Ok(self.store.set_recipients(cluster, &recipients, self.clock.now()).await?)
    }

    /// Takes what the agent of `cluster` says of itself; `sent_at` is its clock. One of an earlier epoch is not
    /// heard; none has to have reported before, since this may say why none can.
    ///
    /// # Errors
    /// When it is malformed, or the database fails.
    pub async fn facts(
        &self,
        cluster: &str,
        (epoch, uid): (i64, &str),
        facts: AgentFacts,
        sent_at: &str,
    ) -> Result<()> {
        // One of another cluster speaks of another cluster.
        if let Some(last) = self.store.last_report(cluster).await?.filter(|last| last.cluster_uid != uid) {
            return Err(ReportError::ForeignCluster { bound: last.cluster_uid, uid: uid.to_owned() });
        }
        let invalid = |field, message: String| Err(ReportError::Invalid { object: "facts", field, message });
        let Ok(sent) = sent_at.parse::<jiff::Timestamp>() else {
            return invalid("sentAt", format!("\"{}\" is no time", sent_at.escape_debug()));
        };
        if facts.version.len() > DIGEST_MAX || facts.kind.len() > DIGEST_MAX {
            return invalid("version", format!("or kind is longer than {DIGEST_MAX} bytes"));
        }
        if facts.waits_for.len() > KEYS_MAX || facts.waits_for.iter().any(|kind| kind.len() > DIGEST_MAX) {
            return invalid("waitsFor", format!("has more than {KEYS_MAX} kinds, or too long ones"));
        }
        let said_at = self.clock.now();
        let skew_ms = sent.as_millisecond().saturating_sub(said_at);
        let said = ClusterFacts { cluster_id: cluster.to_owned(), epoch, facts, skew_ms, said_at };
        Ok(self.store.set_facts(&said).await?)
    }

    /// Takes a report of the agent of `cluster`.
    ///
    /// # Errors
    /// When it is stale, of another cluster or too large; nothing of it is stored then.
    pub async fn accept(&self, cluster: &str, agent: Agent, said: Said) -> Result<Confirmations> {
        counted(self.try_accept(cluster, agent, said).await)
    }

    async fn try_accept(&self, cluster: &str, agent: Agent, said: Said) -> Result<Confirmations> {
        check_agent(&agent)?;
        check_size(&said)?;
        // Before the work, so that an agent that lost costs little.
        let last = self.store.last_report(cluster).await?;
        check_turn(&agent, last.as_ref())?;
        let owner = cluster.to_owned();
        let prepared = if said.is_small() {
            prepare(&owner, said)?
        } else {
            let prepared = tokio::task::spawn_blocking(move || prepare(&owner, said)).await;
            prepared.map_err(|error| anyhow::anyhow!("the report could not be read: {error}"))??
        };
        self.record(cluster, &agent, &prepared, last).await
    }

    /// Takes the word of the agent of `cluster` that nothing differs from what it reported last; `digest` is that
    /// of [`everything`].
    ///
    /// # Errors
    /// When it is stale, or not what is stored here.
    pub async fn accept_unchanged(
        &self,
        cluster: &str,
        epoch: i64,
        sequence: i64,
        digest: &str,
    ) -> Result<Confirmations> {
        counted(self.try_accept_unchanged(cluster, epoch, sequence, digest).await)
    }

    async fn try_accept_unchanged(
        &self,
        cluster: &str,
        epoch: i64,
        sequence: i64,
        digest: &str,
    ) -> Result<Confirmations> {
        let Some(last) = self.store.last_report(cluster).await? else { return Err(ReportError::WholeNeeded) };
        if everything(&last).as_deref() != Some(digest) {
            return Err(ReportError::WholeNeeded);
        }
        // The digest says who speaks, too.
        let (identity, cluster_uid) = (last.identity.clone(), last.cluster_uid.clone());
        let agent = Agent { identity, epoch, sequence, cluster_uid };
        check_turn(&agent, Some(&last))?;
        let flux = last.flux_digest.clone().unwrap_or_default();
        let prepared = Prepared {
            snapshot: Snapshot::Flux,
            digest: flux.clone(),
            base: Some(flux),
            removed: HashSet::new(),
            word: true,
            rows: BTreeMap::new(),
            deployments: HashMap::new(),
            flux: Vec::new(),
        };
        self.record(cluster, &agent, &prepared, Some(last)).await
    }

    async fn record(
        &self,
        cluster: &str,
        agent: &Agent,
        prepared: &Prepared,
        mut last: Option<LastReport>,
    ) -> Result<Confirmations> {
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                last = self.store.last_report(cluster).await?;
                check_turn(agent, last.as_ref())?;
            }
            if prepared.base.is_some()
                && prepared.base.as_ref() != last.as_ref().and_then(|last| digest(last, prepared.snapshot))
            {
                return Err(ReportError::WholeNeeded);
            }
            let report = self.compute(cluster, agent, last.take(), prepared).await?;
            match self.store.record_report(&report).await {
                Err(StoreError::Conflict) => continue,
                other => other?,
            }
            metrics::report_rows(report.set.len() + report.remove.len());
            let answer = self.store.confirmations(cluster).await?;
            if news_of_people(&report, answer.newest_revision.as_deref())
                && let Some(row) = self.store.cluster(cluster).await?
            {
                let target = Target { repository: row.repository, branch: row.branch };
                self.wake.look(&target);
                // Losing it costs time only.
                if let Err(error) = self.store.tell(&Notice::Look(target)).await {
                    warn!(%error, "other servers are not told that somebody pushed");
                }
            }
            return Ok(answer);
        }
        Err(ReportError::Busy)
    }

    async fn compute(
        &self,
        cluster: &str,
        agent: &Agent,
        last: Option<LastReport>,
        prepared: &Prepared,
    ) -> Result<Report> {
        let now = self.clock.now();
        let mut report = Report {
            last: last.as_ref().map(|last| (last.epoch, last.sequence)),
            row: next_row(cluster, agent, last.as_ref(), prepared, now),
            snapshot: prepared.snapshot,
            set: Vec::new(),
            remove: Vec::new(),
            deployments: Vec::new(),
            tasks: Vec::new(),
            observations: Vec::new(),
        };
        let mut moves = Moves::default();
        let running = match prepared.snapshot {
            Snapshot::Pods => Vec::new(),
            Snapshot::Deployments | Snapshot::Flux => self.store.running_in(cluster).await?,
        };
        if last.as_ref().and_then(|last| digest(last, prepared.snapshot)) != Some(&prepared.digest) {
            let places = match prepared.snapshot {
                Snapshot::Flux => HashMap::new(),
                Snapshot::Pods | Snapshot::Deployments => self.places(cluster, prepared).await?,
            };
            let stored = match prepared.base {
                None => self.store.status_digests(cluster, prepared.snapshot).await?,
                // What the agent names differs; of what is stored only that goes which it says is gone.
                Some(_) => prepared.removed.iter().map(|key| (key.clone(), String::new())).collect(),
            };
            compare(&mut report, prepared, &places, stored, now);
            report.observations = self.observe(cluster, prepared, &report.set, now).await?;
            let busy: HashSet<&str> = running.iter().map(|running| running.task.deployment_id.as_str()).collect();
            for row in report.set.iter().filter(|_| prepared.snapshot == Snapshot::Deployments) {
                let status = row.deployment_id.as_ref().and_then(|id| prepared.deployment(id, &row.namespace));
                let place = row.deployment_id.as_ref().and_then(|id| places.get(id));
                if let (Some(status), Some(place)) = (status, place)
                    && !busy.contains(place.id.as_str())
                {
                    self.after_the_task(&mut moves, place, status).await?;
                }
            }
        }
        // An object may carry an instance before the server has recorded its push, and agents do not
        // repeat at once what did not change: what they said before counts at the next report too.
        let is_told_elsewhere = prepared.snapshot == Snapshot::Flux || prepared.base.is_some();
        let stored = if is_told_elsewhere && running.iter().any(|running| machine::is_pushed(&running.task)) {
            self.stored_statuses(cluster).await?
        } else {
            HashMap::new()
        };
        let mut waiting = Waiting { statuses: Vec::new(), newest: None, names: HashMap::new() };
        if prepared.snapshot == Snapshot::Flux && running.iter().any(|running| machine::waits_for_flux(&running.task)) {
            waiting.newest = self.store.confirmations(cluster).await?.newest_revision;
            waiting.statuses = self.flux_statuses(cluster, prepared).await?;
        }
        let vanished: HashSet<(&str, &str)> =
            report.remove.iter().map(|(_, namespace, name)| (namespace.as_str(), name.as_str())).collect();
        for running in running {
            // What a report says about a task whose commit is not recorded yet counts later.
            if !machine::is_pushed(&running.task) {
                continue;
            }
            let mut task = running.task.clone();
            let place = (task.deployment_id.clone(), environment_namespace(&running.environment_id));
            let status = match prepared.snapshot {
                Snapshot::Deployments => prepared.deployments.get(&place).or_else(|| {
                    let key = ("StyrminDeployment".to_owned(), place.1.clone(), object_name(&place.0));
                    stored.get(&place).filter(|_| !prepared.removed.contains(&key))
                }),
                _ => stored.get(&place),
            };
            let is_gone = (prepared.snapshot == Snapshot::Deployments || prepared.word)
                && status.is_none()
                && (vanished.contains(&(place.1.as_str(), &object_name(&place.0))) || pushed_long_ago(&task, now));
            let goal = self.goal_of(&task, status).await?;
            let mut moved = self.follow(&mut task, status, is_gone, goal.as_deref(), now).await?;
            if prepared.snapshot == Snapshot::Flux {
                moved |= waiting.explain(&mut task, &running, now);
            }
            moves.add(&running, task, moved, goal.as_deref());
        }
        report.deployments = moves.deployments.into_values().flatten().collect();
        report.tasks = moves.tasks;
        Ok(report)
    }

    /// What changed objects show that is worth an entry of the timeline.
    async fn observe(
        &self,
        cluster: &str,
        prepared: &Prepared,
        set: &[StatusRow],
        now: Millis,
    ) -> Result<Vec<Observation>> {
        if prepared.snapshot != Snapshot::Deployments || set.is_empty() {
            return Ok(Vec::new());
        }
        let mut before = Vec::new();
        if set.len() <= FEW {
            for id in set.iter().filter_map(|row| row.deployment_id.as_deref()) {
                before.extend(self.store.statuses(prepared.snapshot, StatusScope::Deployment(id), None, 2).await?);
            }
        } else {
            let most = i64::try_from(DEPLOYMENTS_MAX).unwrap_or(i64::MAX);
            before = self.store.statuses(prepared.snapshot, StatusScope::Cluster(cluster), None, most).await?;
        }
        let before: HashMap<(String, String), DeploymentStatus> = before
            .iter()
            .filter_map(DeploymentStatus::from_row)
            .map(|status| ((status.deployment_id.clone(), status.namespace.clone()), status))
            .collect();
        let mut found = Vec::new();
        for row in set {
            let key = (row.deployment_id.clone().unwrap_or_default(), row.namespace.clone());
            let Some(status) = prepared.deployments.get(&key) else { continue };
            let shown = explain::shown(before.get(&key), status);
            found.extend(shown.into_iter().map(|(kind, title, message)| Observation {
                id: uuid::Uuid::now_v7().to_string(),
                deployment_id: key.0.clone(),
                at: now,
                kind,
                title,
                message,
            }));
        }
        Ok(found)
    }

    /// Flux's objects as they are with this report.
    async fn flux_statuses(&self, cluster: &str, prepared: &Prepared) -> Result<Vec<FluxStatus>> {
        let mut statuses = prepared.flux.clone();
        if prepared.base.is_none() {
            return Ok(statuses);
        }
        let most = i64::try_from(FLUX_MAX).unwrap_or(i64::MAX);
        let rows = self.store.statuses(Snapshot::Flux, StatusScope::Cluster(cluster), None, most).await?;
        let is_as_before = |row: &&StatusRow| {
            let key = (row.kind.clone(), row.namespace.clone(), row.name.clone());
            !prepared.rows.contains_key(&key) && !prepared.removed.contains(&key)
        };
        statuses.extend(rows.iter().filter(is_as_before).filter_map(FluxStatus::from_row));
        Ok(statuses)
    }

    /// The deployments of the cluster that a report can be about.
    async fn places(&self, cluster: &str, prepared: &Prepared) -> Result<HashMap<String, DeploymentPlace>> {
        let named: BTreeSet<&str> = prepared.rows.values().filter_map(|row| row.deployment_id.as_deref()).collect();
        let found = if named.len() <= FEW {
            let mut found = Vec::with_capacity(named.len());
            for id in named {
                found.extend(self.store.deployment_place(cluster, id).await?);
            }
            found
        } else {
            self.store.deployment_places(cluster).await?
        };
        Ok(found.into_iter().map(|place| (place.id.clone(), place)).collect())
    }

    /// StyrminDeployments of running tasks as last reported.
    async fn stored_statuses(&self, cluster: &str) -> Result<HashMap<(String, String), DeploymentStatus>> {
        let rows = self.store.running_statuses(cluster).await?;
        let found = rows.iter().filter_map(DeploymentStatus::from_row);
        Ok(found.map(|status| ((status.deployment_id.clone(), status.namespace.clone()), status)).collect())
    }

    /// What the task's instance wants, when the answer may end the task.
    async fn goal_of(&self, task: &Task, status: Option<&DeploymentStatus>) -> Result<Option<Arc<Goal>>> {
        let is_ready = status.is_some_and(|status| {
            status.phase.as_deref() == Some(machine::READY) && status.instance_id.as_ref() == Some(&task.instance_id)
        });
        if is_ready { self.goal(&task.instance_id).await } else { Ok(None) }
    }

    /// Moves a running task by what is reported about its deployment; `is_gone`: by its absence.
    async fn follow(
        &self,
        task: &mut Task,
        status: Option<&DeploymentStatus>,
        is_gone: bool,
        goal: Option<&Goal>,
        now: Millis,
    ) -> Result<bool> {
        if task.workflow == Workflow::Delete.as_str() {
            return Ok(match status {
                None => is_gone && machine::apply(task, &Event::Gone, now),
                Some(status) if status.deleting => {
                    let steps = status.observed_steps();
                    machine::apply(task, &Event::Removal(&observed(status, &steps, &[], None)), now)
                }
                // Flux has not removed it yet.
                Some(_) => false,
            });
        }
        // Without the instance the operator has not seen the change; an object that goes although
        // nobody asked for it says nothing about the change either.
        let is_about = |status: &&DeploymentStatus| status.instance_id.as_ref() == Some(&task.instance_id);
        let Some(status) = status.filter(is_about).filter(|status| !status.deleting) else { return Ok(false) };
        let steps = status.observed_steps();
        let is_error = observed(status, &steps, &[], None).is_error();
        let pods = if is_error { self.bad_pods(&task.deployment_id).await? } else { Vec::new() };
        Ok(machine::apply(task, &Event::Rollout(&observed(status, &steps, &pods, goal)), now))
    }

    /// A deployment without a running task follows what its newest instance does: one that ran and
    /// failed, and one that runs again.
    async fn after_the_task(
        &self,
        moves: &mut Moves,
        place: &DeploymentPlace,
        status: &DeploymentStatus,
    ) -> Result<()> {
        let Some(newest) = place.newest_instance_id.as_ref().filter(|id| status.instance_id.as_ref() == Some(*id))
        else {
            return Ok(());
        };
        if place.lifecycle == Lifecycle::Deleting || status.deleting {
            return Ok(());
        }
        let steps = status.observed_steps();
        let phase = status.phase.as_deref().unwrap_or_default();
        let (state, recovers) = match place.state {
            DeploymentState::Running | DeploymentState::Stopped if phase == machine::FAILED => {
                (DeploymentState::Failed, false)
            }
            DeploymentState::Failed if phase == machine::READY => {
                let Some(goal) = self.goal(newest).await? else { return Ok(()) };
                if !observed(status, &steps, &[], Some(&goal)).is_done() {
                    return Ok(());
                }
                (done_state(&goal), true)
            }
            _ => return Ok(()),
        };
        // A task that failed is revived by a new instance only.
        let Some(instance) = self.store.instance(newest).await? else { return Ok(()) };
        let task = self.store.task(&instance.task_id).await?;
        if task.is_none_or(|task| task.state != TaskState::Succeeded) {
            return Ok(());
        }
        let outcome = if recovers {
            InstanceOutcome::Active { id: instance.id, sequence: instance.sequence }
        } else {
            InstanceOutcome::Failed { id: instance.id }
        };
        moves.deployments.entry(place.id.clone()).or_default().push(DeploymentOutcome {
            deployment_id: place.id.clone(),
            newest_instance_id: place.newest_instance_id.clone(),
            state: Some(state),
            instance: Some(outcome),
        });
        Ok(())
    }

    /// What an instance wants; `None` when there is no such instance.
    async fn goal(&self, instance: &str) -> Result<Option<Arc<Goal>>> {
        if let Some(known) = self.goals.lock().unwrap_or_else(PoisonError::into_inner).get(instance) {
            return Ok(Some(Arc::clone(known)));
        }
        let Some(found) = self.store.instance(instance).await? else { return Ok(None) };
        let display_state = match found.spec.lifecycle {
            spec::Lifecycle::Stopped => "Stopped",
            spec::Lifecycle::Running | spec::Lifecycle::Deleting => "Running",
        };
        let goal = Arc::new((found.spec.digest(), display_state));
        let mut goals = self.goals.lock().unwrap_or_else(PoisonError::into_inner);
        if goals.len() >= WANTED_MAX {
            goals.clear();
        }
        goals.insert(found.id, Arc::clone(&goal));
        Ok(Some(goal))
    }

    /// Lines about the deployment's pods, as last reported, that explain a failure.
    async fn bad_pods(&self, deployment: &str) -> Result<Vec<String>> {
        let rows = self.store.statuses(Snapshot::Pods, StatusScope::Deployment(deployment), None, PODS_READ).await?;
        let pods: Vec<PodStatus> = rows.iter().filter_map(read).collect();
        Ok(explain::pods(&pods))
    }
}

impl Prepared {
    /// A StyrminDeployment by deployment and namespace.
    fn deployment(&self, id: &str, namespace: &str) -> Option<&DeploymentStatus> {
        self.deployments.get(&(id.to_owned(), namespace.to_owned()))
    }
}

impl Moves {
    /// What a task's move makes of its deployment.
    fn add(&mut self, running: &RunningTask, task: Task, moved: bool, goal: Option<&Goal>) {
        let is_newest = running.newest_instance_id.as_ref() == Some(&task.instance_id);
        let is_delete = task.workflow == Workflow::Delete.as_str();
        let (state, instance) = match task.state {
            // Reports say nothing about what is in review.
            TaskState::Rejected => (None, None),
            TaskState::Running | TaskState::Superseded if is_delete => (None, None),
            TaskState::Running | TaskState::Superseded => (Some(DeploymentState::Deploying), None),
            TaskState::Succeeded if is_delete => (Some(DeploymentState::Deleted), Some(InstanceOutcome::Gone)),
            TaskState::Succeeded => (
                goal.map(done_state),
                Some(InstanceOutcome::Active { id: task.instance_id.clone(), sequence: task.sequence }),
            ),
            TaskState::Failed => {
                (Some(DeploymentState::Failed), Some(InstanceOutcome::Failed { id: task.instance_id.clone() }))
            }
        };
        // A report never takes a deployment out of its deletion, nor a newer change's word.
        let may_set = is_newest && (is_delete || running.lifecycle != Lifecycle::Deleting);
        let state = state.filter(|state| may_set && *state != running.deployment_state);
        if state.is_some() || instance.is_some() {
            self.deployments.entry(task.deployment_id.clone()).or_default().push(DeploymentOutcome {
                deployment_id: task.deployment_id.clone(),
                newest_instance_id: running.newest_instance_id.clone(),
                state,
                instance,
            });
        }
        if moved {
            self.tasks.push(task);
        }
    }
}

/// State of a deployment that does what its instance asks for.
fn done_state(goal: &Goal) -> DeploymentState {
    if goal.1 == "Stopped" { DeploymentState::Stopped } else { DeploymentState::Running }
}

fn observed<'a>(
    status: &'a DeploymentStatus,
    steps: &'a [machine::ObservedStep<'a>],
    pods: &'a [String],
    goal: Option<&'a Goal>,
) -> Observed<'a> {
    Observed {
        phase: status.phase.as_deref().unwrap_or_default(),
        display_state: status.display_state.as_deref().unwrap_or_default(),
        message: status.message.as_deref().unwrap_or_default(),
        steps,
        release_ready_at: status.true_since("HelmReleaseReady"),
        ready_at: status.true_since("Ready"),
        spec_digest: status.spec_digest.as_deref().unwrap_or_default(),
        wanted: goal.map(|(spec_digest, display_state)| Wanted { spec_digest, display_state }),
        pods,
    }
}

/// Name of a deployment's object.
fn object_name(deployment: &str) -> String {
    format!("styrmin-{deployment}")
}

/// Whether a snapshot without the object is surely later than the task's push: one that was made
/// before it may not have had what Flux applied in that moment.
fn pushed_long_ago(task: &Task, now: Millis) -> bool {
    machine::pushed_at(task).is_some_and(|pushed| now - pushed > SETTLE)
}

/// Why tasks wait for Flux.
struct Waiting {
    statuses: Vec<FluxStatus>,
    newest: Option<String>,
    /// Kustomizations by environment and shard.
    names: HashMap<(String, i64), Option<String>>,
}

impl Waiting {
    /// Tells a task whose commit is not in the cluster yet what hinders it.
    fn explain(&mut self, task: &mut Task, running: &RunningTask, now: Millis) -> bool {
        if !machine::waits_for_flux(task) {
            return false;
        }
        let shard = (running.environment_id.clone(), running.shard);
        let name =
            self.names.entry(shard).or_insert_with_key(|(environment, shard)| kustomization(environment, *shard));
        let Some(name) = name else { return false };
        let message = explain::flux(&self.statuses, name, running.revision.as_deref(), self.newest.as_deref());
        machine::apply(task, &Event::FluxWaits { message: &message }, now)
    }
}

/// Name of the Kustomization of a shard.
fn kustomization(environment: &str, shard: i64) -> Option<String> {
    let environment: EnvironmentId = environment.parse().ok()?;
    let object = objects::shard_kustomization(&environment, u32::try_from(shard).ok()?, "");
    object["metadata"]["name"].as_str().map(str::to_owned)
}

fn environment_namespace(environment: &str) -> String {
    environment.parse::<EnvironmentId>().map(|id| id.namespace()).unwrap_or_default()
}

fn check_agent(agent: &Agent) -> Result<()> {
    let invalid =
        |field, message: &str| Err(ReportError::Invalid { object: "agent", field, message: message.to_owned() });
    let bad = |text: &str| text.is_empty() || text.len() > IDENTITY_MAX || text.chars().any(char::is_control);
    if bad(&agent.identity) {
        return invalid("identity", "must be a name of this process, 253 bytes at most");
    }
    if bad(&agent.cluster_uid) {
        return invalid("clusterUid", "must be the UID of the namespace kube-system");
    }
    if agent.epoch < 0 || agent.sequence < 0 {
        return invalid("epoch, sequence", "must not be negative");
    }
    Ok(())
}

impl Said {
    /// Reading it takes no longer than handing it to a thread.
    fn is_small(&self) -> bool {
        self.items.len() <= FEW && self.delta.is_some()
    }
}

impl Items {
    fn len(&self) -> usize {
        match self {
            Self::Pods(items) => items.len(),
            Self::Deployments(items) => items.len(),
            Self::Flux(items) => items.len(),
        }
    }
}

/// Counts how reports end.
fn counted(result: Result<Confirmations>) -> Result<Confirmations> {
    metrics::report(match &result {
        Ok(_) => "accepted",
        Err(ReportError::Stale { .. }) => "stale",
        Err(ReportError::ForeignCluster { .. }) => "foreign",
        Err(ReportError::WholeNeeded) => "whole_needed",
        Err(_) => "failed",
    });
    result
}

/// Digest of all that an agent reported, and of who it is; `None` while a kind is missing. The agent makes the
/// same of what it sent.
#[must_use]
pub fn everything(last: &LastReport) -> Option<String> {
    let (pods, deployments, flux) =
        (last.pods_digest.as_ref()?, last.deployments_digest.as_ref()?, last.flux_digest.as_ref()?);
    Some(digest_parts([last.identity.as_str(), &last.cluster_uid, pods, deployments, flux]))
}

fn check_size(said: &Said) -> Result<()> {
    let (field, most) = match said.items {
        Items::Pods(_) => ("pods", PODS_MAX),
        Items::Deployments(_) => ("deployments", DEPLOYMENTS_MAX),
        Items::Flux(_) => ("statuses", FLUX_MAX),
    };
    let digests = said.digest.iter().chain(said.delta.iter().map(|delta| &delta.base));
    if said.delta.is_some() && said.digest.is_none() || digests.into_iter().any(|digest| digest.len() > DIGEST_MAX) {
        let message = format!("a delta needs one, and none may be longer than {DIGEST_MAX} bytes");
        return Err(ReportError::Invalid { object: "report", field: "digest", message });
    }
    let removed = said.delta.as_ref().map_or(0, |delta| delta.removed.len());
    let found = said.items.len().max(removed);
    if found > most {
        let message = format!("{found} are more than the {most} that a cluster may have; use several clusters");
        return Err(ReportError::Invalid { object: "report", field, message });
    }
    Ok(())
}

/// Whether it is this agent's turn: the right cluster, and later than everything before.
fn check_turn(agent: &Agent, last: Option<&LastReport>) -> Result<()> {
    let Some(last) = last else { return Ok(()) };
    if last.cluster_uid != agent.cluster_uid {
        return Err(ReportError::ForeignCluster { bound: last.cluster_uid.clone(), uid: agent.cluster_uid.clone() });
    }
    let follows = (agent.epoch, agent.sequence) > (last.epoch, last.sequence)
        && (agent.epoch != last.epoch || agent.identity == last.identity);
    if follows {
        return Ok(());
    }
    Err(ReportError::Stale {
        identity: agent.identity.clone(),
        epoch: agent.epoch,
        sequence: agent.sequence,
        last: Box::new(last.clone()),
    })
}

fn digest(last: &LastReport, snapshot: Snapshot) -> Option<&String> {
    match snapshot {
        Snapshot::Pods => last.pods_digest.as_ref(),
        Snapshot::Deployments => last.deployments_digest.as_ref(),
        Snapshot::Flux => last.flux_digest.as_ref(),
    }
}

fn next_row(cluster: &str, agent: &Agent, last: Option<&LastReport>, prepared: &Prepared, now: Millis) -> LastReport {
    let mut row = LastReport {
        cluster_id: cluster.to_owned(),
        cluster_uid: agent.cluster_uid.clone(),
        identity: agent.identity.clone(),
        epoch: agent.epoch,
        sequence: agent.sequence,
        reported_at: now,
        pods_at: last.and_then(|last| last.pods_at),
        pods_digest: last.and_then(|last| last.pods_digest.clone()),
        deployments_at: last.and_then(|last| last.deployments_at),
        deployments_digest: last.and_then(|last| last.deployments_digest.clone()),
        flux_at: last.and_then(|last| last.flux_at),
        flux_digest: last.and_then(|last| last.flux_digest.clone()),
    };
    let digest = Some(prepared.digest.clone());
    match prepared.snapshot {
        Snapshot::Pods => (row.pods_at, row.pods_digest) = (Some(now), digest),
        Snapshot::Deployments => (row.deployments_at, row.deployments_digest) = (Some(now), digest),
        Snapshot::Flux => (row.flux_at, row.flux_digest) = (Some(now), digest),
    }
    row
}

/// Bounds and digests a snapshot. Takes long for a large one.
fn prepare(cluster: &str, said: Said) -> Result<Prepared> {
    let mut deployments = HashMap::new();
    let mut flux = Vec::new();
    let mut left_out: Vec<StatusKey> = Vec::new();
    let (snapshot, rows) = match said.items {
        Items::Pods(mut items) => (Snapshot::Pods, rows(cluster, Snapshot::Pods, &mut items)?),
        Items::Deployments(mut items) => {
            // The server writes no other name: what bears one is somebody's copy.
            let (ours, copies): (Vec<_>, Vec<_>) =
                items.into_iter().partition(|item| item.name == object_name(&item.deployment_id));
            (items, left_out) = (ours, copies.iter().map(Object::key).collect());
            let rows = rows(cluster, Snapshot::Deployments, &mut items)?;
            deployments
                .extend(items.into_iter().map(|item| ((item.deployment_id.clone(), item.namespace.clone()), item)));
            (Snapshot::Deployments, rows)
        }
        Items::Flux(mut items) => {
            let rows = rows(cluster, Snapshot::Flux, &mut items)?;
            flux = items;
            (Snapshot::Flux, rows)
        }
    };
    let digest = said.digest.unwrap_or_else(|| digest_of(&rows));
    let (base, removed) = said.delta.map_or((None, Vec::new()), |delta| (Some(delta.base), delta.removed));
    let removed = removed.into_iter().map(|key| (key.kind, key.namespace, key.name));
    // What is no row of ours now may have been one before.
    left_out.retain(|_| base.is_some());
    let removed = removed.chain(left_out).filter(|key| !rows.contains_key(key)).collect();
    Ok(Prepared { snapshot, digest, base, removed, word: false, rows, deployments, flux })
}

/// Digest of a snapshot whose agent gave none.
fn digest_of(rows: &BTreeMap<StatusKey, StatusRow>) -> String {
    let mut hash = Sha256::new();
    for ((kind, namespace, name), row) in rows {
        for part in [kind, namespace, name, &row.digest] {
            hash.update(part.as_bytes());
            hash.update([0]);
        }
    }
    format!("sha256:{}", hex(&hash.finalize()))
}

fn rows(cluster: &str, snapshot: Snapshot, items: &mut [impl Object]) -> Result<BTreeMap<StatusKey, StatusRow>> {
    let mut rows = BTreeMap::new();
    for item in items {
        item.tidy();
        let row = item.row(cluster, snapshot).map_err(anyhow::Error::from)?;
        rows.insert(item.key(), row);
    }
    Ok(rows)
}

/// What differs from what is stored. Objects of deployments that are not this cluster's, or that
/// are not at their place, are left out, as if they had not been reported.
fn compare(
    report: &mut Report,
    prepared: &Prepared,
    places: &HashMap<String, DeploymentPlace>,
    stored: Vec<(StatusKey, String)>,
    now: Millis,
) {
    let ours = |row: &StatusRow| match (&row.deployment_id, prepared.snapshot) {
        (None, _) => true,
        (Some(id), Snapshot::Deployments) => {
            places.get(id).is_some_and(|place| row.namespace == environment_namespace(&place.environment_id))
        }
        (Some(id), _) => places.contains_key(id),
    };
    let mut stored: HashMap<StatusKey, String> = stored.into_iter().collect();
    let mut ignored = 0_usize;
    for (key, row) in &prepared.rows {
        if !ours(row) {
            ignored += 1;
            if prepared.base.is_some() {
                stored.insert(key.clone(), String::new());
            }
            continue;
        }
        if stored.remove(key).as_ref() != Some(&row.digest) {
            report.set.push(StatusRow { updated_at: now, ..row.clone() });
        }
    }
    report.remove = stored.into_keys().collect();
    report.remove.sort_unstable();
    let cluster = &report.row.cluster_id;
    if ignored > 0 {
        metrics::report_ignored(ignored);
        warn!(cluster, ignored, "a report names deployments that are not at their place in this cluster");
    }
    if report.last.is_none() {
        info!(cluster, uid = report.row.cluster_uid, "the first report binds the cluster's token");
    }
}

/// A stored row as it was reported; `None` when a later release stored what this one cannot read.
fn read<T: serde::de::DeserializeOwned>(row: &StatusRow) -> Option<T> {
    serde_json::from_str(&row.content).map_err(|error| warn!(%error, row.name, "a stored status cannot be read")).ok()
}

macro_rules! from_row {
    ($($name:ident),+) => {$(
        impl $name {
            /// From its stored row; `None` when a later release stored what this one cannot read.
            #[must_use]
            pub fn from_row(row: &StatusRow) -> Option<Self> {
                read::<Self>(row).map(|found| Self { updated_at: row.updated_at, ..found })
            }
        }
    )+};
}

from_row!(PodStatus, DeploymentStatus);

impl FluxStatus {
    /// From its stored row; `None` when a later release stored what this one cannot read.
    #[must_use]
    pub fn from_row(row: &StatusRow) -> Option<Self> {
        read::<Self>(row).map(|found| Self { updated_at: row.updated_at, cluster_id: row.cluster_id.clone(), ..found })
    }
}

/// Ids of the deployments whose changes wait for this object of Flux, which is not ready or suspended; `running` are
/// the running tasks of its cluster.
#[must_use]
pub fn held_up(status: &FluxStatus, running: &[RunningTask]) -> Vec<String> {
    if explain::hindered(status).is_none() || status.namespace != FLUX_NAMESPACE {
        return Vec::new();
    }
    // The source and the root bring everything, the others a shard each.
    let brings = |running: &&RunningTask| {
        status.name == FLUX_SOURCE
            || kustomization(&running.environment_id, running.shard).as_ref() == Some(&status.name)
    };
    let waits = running.iter().filter(|running| machine::waits_for_flux(&running.task)).filter(brings);
    let ids: BTreeSet<&String> = waits.map(|running| &running.task.deployment_id).collect();
    ids.into_iter().cloned().collect()
}

/// What a running step says when the agent is silent: the time of the last report, or of the step's
/// begin when there was none, once that is longer ago than [`SILENCE`].
#[must_use]
pub fn silence(last: Option<Millis>, started: Option<Millis>, now: Millis) -> Option<Millis> {
    last.or(started).filter(|since| now - since > SILENCE)
}

/// Whether a report says that somebody may have committed something: Flux has a commit that is not known here.
fn news_of_people(report: &Report, newest: Option<&str>) -> bool {
    let fetched = |row: &StatusRow| {
        let status = (row.kind == "GitRepository" && row.name == FLUX_SOURCE).then(|| FluxStatus::from_row(row))??;
        status.revision?.rsplit_once(':').map(|(_, commit)| commit.to_owned())
    };
    report.snapshot == Snapshot::Flux
        && report.set.iter().filter_map(fetched).any(|commit| Some(commit.as_str()) != newest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(identity: &str, epoch: i64, sequence: i64) -> Agent {
        Agent { identity: identity.into(), epoch, sequence, cluster_uid: "uid".into() }
    }

    fn said(items: Items) -> Said {
        Said { items, digest: None, delta: None }
    }

    fn last(identity: &str, epoch: i64, sequence: i64) -> LastReport {
        let prepared = prepare("c", said(Items::Flux(Vec::new()))).unwrap();
        next_row("c", &agent(identity, epoch, sequence), None, &prepared, 1)
    }

    #[test]
    fn of_two_agents_the_later_epoch_wins_and_the_other_stays_out() {
        for (reporter, accepted) in [
            (agent("a", 3, 8), true),
            (agent("a", 3, 7), false),
            (agent("a", 3, 1), false),
            (agent("b", 3, 8), false),
            (agent("b", 4, 0), true),
            (agent("b", 2, 900), false),
        ] {
            let result = check_turn(&reporter, Some(&last("a", 3, 7)));
            assert_eq!(result.is_ok(), accepted, "{reporter:?}: {result:?}");
        }
        assert!(check_turn(&agent("a", 0, 0), None).is_ok());
        let other = Agent { cluster_uid: "other".into(), ..agent("a", 9, 9) };
        let error = check_turn(&other, Some(&last("a", 3, 7))).unwrap_err();
        assert!(error.to_string().contains("this token belongs to the cluster with UID uid"), "{error}");
    }

    #[test]
    fn what_no_agent_says_is_refused() {
        for bad in [
            agent("", 1, 1),
            agent(&"x".repeat(300), 1, 1),
            agent("a\n", 1, 1),
            agent("a", -1, 1),
            agent("a", 1, -1),
            Agent { cluster_uid: String::new(), ..agent("a", 1, 1) },
        ] {
            assert!(check_agent(&bad).is_err(), "{bad:?}");
        }
        let pods = vec![PodStatus::default(); PODS_MAX + 1];
        let error = check_size(&said(Items::Pods(pods))).unwrap_err().to_string();
        assert!(error.contains("report: pods: 40001"), "{error}");
    }

    #[test]
    fn only_what_differs_is_written_and_what_is_foreign_is_left_out() {
        let pod = |name: &str, deployment: Option<&str>, ready: bool| PodStatus {
            namespace: "n".into(),
            name: name.into(),
            deployment_id: deployment.map(str::to_owned),
            ready,
            ..PodStatus::default()
        };
        let place = DeploymentPlace {
            id: "abcdefghijkl".into(),
            environment_id: "bbcdefghijkl".into(),
            lifecycle: Lifecycle::Running,
            state: DeploymentState::Running,
            newest_instance_id: None,
        };
        let places = HashMap::from([(place.id.clone(), place)]);
        let before = prepare(
            "c",
            said(Items::Pods(vec![pod("same", None, true), pod("other", None, true), pod("gone", None, true)])),
        )
        .unwrap();
        let stored = before.rows.iter().map(|(key, row)| (key.clone(), row.digest.clone())).collect();
        let items = vec![
            pod("same", None, true),
            pod("other", None, false),
            pod("new", Some("abcdefghijkl"), true),
            pod("foreign", Some("zzzzzzzzzzzz"), true),
        ];
        let now = prepare("c", said(Items::Pods(items))).unwrap();
        assert_ne!(before.digest, now.digest);
        let mut report = Report {
            last: None,
            row: last("a", 1, 1),
            snapshot: Snapshot::Pods,
            set: Vec::new(),
            remove: Vec::new(),
            deployments: Vec::new(),
            tasks: Vec::new(),
            observations: Vec::new(),
        };
        compare(&mut report, &now, &places, stored, 7);
        let names: Vec<&str> = report.set.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, ["new", "other"]);
        assert!(report.set.iter().all(|row| row.updated_at == 7));
        assert_eq!(report.remove, [("Pod".to_owned(), "n".to_owned(), "gone".to_owned())]);
    }

    #[test]
    fn an_object_under_another_name_or_namespace_is_somebodys_copy() {
        let status = |name: &str, namespace: &str| DeploymentStatus {
            deployment_id: "abcdefghijkl".into(),
            name: name.into(),
            namespace: namespace.into(),
            ..DeploymentStatus::default()
        };
        let items = vec![
            status("styrmin-abcdefghijkl", "styrmin-env-bbcdefghijkl"),
            status("copy", "styrmin-env-bbcdefghijkl"),
            status("styrmin-abcdefghijkl", "elsewhere"),
        ];
        let prepared = prepare("c", said(Items::Deployments(items))).unwrap();
        assert_eq!(prepared.rows.len(), 2);
        assert!(prepared.deployment("abcdefghijkl", &environment_namespace("bbcdefghijkl")).is_some());
    }

    #[test]
    fn absence_right_after_a_push_proves_nothing() {
        let step = |ended_at| crate::store::Step {
            task_id: "t".into(),
            position: 0,
            name: machine::REMOVE_STEP.into(),
            state: crate::store::StepState::Succeeded,
            attempt: 1,
            message: None,
            started_at: Some(1),
            ended_at,
        };
        let task = |ended_at| Task {
            id: "t".into(),
            deployment_id: "d".into(),
            instance_id: "i".into(),
            sequence: 1,
            workflow: "delete".into(),
            state: TaskState::Running,
            message: None,
            author_name: "Ann".into(),
            author_email: "ann@example.com".into(),
            version: 1,
            created_at: 1,
            ended_at: None,
            fan_out_id: None,
            steps: vec![step(ended_at)],
        };
        assert!(!pushed_long_ago(&task(None), 99_000));
        assert!(!pushed_long_ago(&task(Some(1_000)), 11_000));
        assert!(pushed_long_ago(&task(Some(1_000)), 11_001));
    }

    #[test]
    fn silence_is_noticed_after_a_minute() {
        assert_eq!(silence(Some(1_000), Some(0), 61_000), None);
        assert_eq!(silence(Some(1_000), Some(0), 61_001), Some(1_000));
        assert_eq!(silence(None, Some(5), 60_006), Some(5));
        assert_eq!(silence(None, None, 99_000_000), None);
    }

    #[test]
    fn a_shards_kustomization_has_the_name_that_the_renderer_gives_it() {
        assert_eq!(kustomization("bbcdefghijkl", 2).as_deref(), Some("styrmin-bbcdefghijkl-s2"));
        assert_eq!(kustomization("no id", 0), None);
    }
}
