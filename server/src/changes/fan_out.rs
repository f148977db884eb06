//! A changed configuration of a cluster or environment on its way to every deployment that takes values from it.
//!
//! Accepted together with the configuration, in one transaction, so none is lost; worked on beside the requests,
//! one after the other in each cluster, as much as is left after a restart. All deployments are read with a
//! constant number of statements and compared by digest. What differs is computed like any other change and
//! stored in chunks, so that nobody waits for longer than one of them; a deployment that somebody changes
//! meanwhile is computed again by itself. What waits for the repository is held back until the fan-out has
//! ended, so that all of it is one commit. One that was cut off begins anew: what it has done compares as done.

use super::compute::{self, Computation, Computed, Edit, Fingerprints};
use super::{Changes, Result, on_a_thread};
use crate::changes::ChangeError;
use crate::drivers::Catalog;
use crate::store::{
    Change, Cluster, Concerned, DeploymentState, Environment, FanOut, FanOutLevel, FanOutState, ItemState, Lifecycle,
    Person, ProposalItem, ProposalState, StoreError, Target, Untouched,
};
use crate::{faults, metrics};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

/// Changes of one transaction: some tens of milliseconds.
const CHUNK: usize = 50;
/// Clusters whose fan-outs are worked on at a time.
const AT_ONCE: usize = 4;
/// How often they are looked for although nobody told of one.
const LOOK: Duration = Duration::from_secs(30);
/// Pause after one that the database refused.
const PAUSE: Duration = Duration::from_secs(5);

const BEING_DELETED: &str = "it is being deleted";

/// What is read once for a whole fan-out.
struct Scene {
    cluster: Cluster,
    environments: BTreeMap<String, Environment>,
    secrets: HashMap<String, Fingerprints>,
    catalog: Arc<Catalog>,
    /// The proposal that gets what it finds.
    review: Option<String>,
    /// Deployments that people took out of a proposal for this configuration.
    left_out: HashSet<String>,
}

impl Changes {
    pub(super) fn new_fan_out(&self, level: FanOutLevel, subject: &str, cluster: &str, author: &Person) -> FanOut {
        FanOut {
            id: uuid::Uuid::now_v7().to_string(),
            level,
            subject_id: subject.to_owned(),
            cluster_id: cluster.to_owned(),
            state: FanOutState::Running,
            untouched: Untouched::default(),
            author_name: author.name.clone(),
            author_email: author.email.clone(),
            created_at: self.clock.now(),
            ended_at: None,
            proposal_id: None,
        }
    }

    /// Works on fan-outs until `stop`.
    pub async fn run_fan_outs(self: Arc<Self>, stop: CancellationToken) {
        let mut busy: HashSet<String> = HashSet::new();
        let mut work: JoinSet<String> = JoinSet::new();
        loop {
            match self.store.running_fan_outs().await {
                Ok(waiting) => {
                    for fan_out in waiting {
                        if busy.len() >= AT_ONCE || !busy.insert(fan_out.cluster_id.clone()) {
                            continue;
                        }
                        let (changes, stop) = (Arc::clone(&self), stop.clone());
                        work.spawn(async move {
                            let cluster = fan_out.cluster_id.clone();
                            tokio::select! {
                                // The next start goes on with it.
                                () = stop.cancelled() => {}
                                () = changes.work_on(fan_out) => {}
                            }
                            cluster
                        });
                    }
                }
                Err(error) => error!(%error, "fan-outs cannot be read"),
            }
            tokio::select! {
                () = stop.cancelled() => break,
                () = self.fan_outs.notified() => {}
                () = tokio::time::sleep(LOOK) => {}
                Some(ended) = work.join_next() => match ended {
                    Ok(cluster) => drop(busy.remove(&cluster)),
                    Err(panic) => {
                        error!(%panic, "a fan-out was cut off");
                        // Which cluster is not known: none is busy once all have ended.
                        while let Some(ended) = work.join_next().await {
                            drop(ended);
                        }
                        busy.clear();
                    }
                },
            }
        }
        while work.join_next().await.is_some() {}
    }

    async fn work_on(&self, fan_out: FanOut) {
        let started = self.clock.now();
        match self.fan_out(&fan_out).await {
            Ok(untouched) => info!(
                fan_out = fan_out.id,
                unchanged = untouched.unchanged.len(),
                skipped = untouched.skipped.len(),
                failed = untouched.failed.len(),
                duration_ms = self.clock.now() - started,
                "a configuration has reached its deployments"
            ),
            Err(error) => {
                let error = anyhow::Error::from(error);
                error!(error = format!("{error:#}"), fan_out = fan_out.id, "a fan-out waits");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    async fn fan_out(&self, fan_out: &FanOut) -> Result<Untouched> {
        let mut scene = match (self.whole(fan_out).await, &fan_out.proposal_id) {
            // What was good when it was asked for does not fit any more.
            (Err(error @ ChangeError::Invalid(_)), Some(proposal)) => {
                self.end_proposal(proposal, ProposalState::Closed, &error.to_string()).await?;
                self.whole(fan_out).await?
            }
            (scene, _) => scene?,
        };
        let review = scene.review.take();
        let mut concerned = self.store.concerned(fan_out).await?;
        // Of an attempt that was cut off.
        let done: HashSet<String> = self.store.fan_out_deployments(&fan_out.id).await?.into_iter().collect();
        concerned.retain(|known| !done.contains(&known.deployment.id));
        // Handed to the thread and given back.
        let (scene, mut untouched, due) = on_a_thread(move || {
            let mut untouched = Untouched::default();
            let mut due = Vec::new();
            for known in concerned {
                match scene.look(&known) {
                    Look::Due => due.push(known),
                    Look::Current => untouched.unchanged.push(known.deployment.id),
                    Look::Skip(why) => untouched.skipped.push((known.deployment.id, why.to_owned())),
                    Look::Fails(why) => untouched.failed.push((known.deployment.id, why)),
                }
            }
            Ok((scene, untouched, due))
        })
        .await?;
        let mut writes = !done.is_empty() && review.is_none();
        for chunk in due.chunks(CHUNK) {
            writes |= match &review {
                Some(proposal) => self.review_chunk(fan_out, proposal, chunk, &mut untouched).await?,
                None => self.fan_out_chunk(fan_out, &scene, chunk, &mut untouched).await?,
            };
            faults::point(faults::FAN_OUT);
            faults::pause(faults::FAN_OUT).await;
        }
        if let Some(proposal) = &review {
            self.finish_proposing(proposal, &untouched.failed).await?;
        }
        self.store.finish_fan_out(&fan_out.id, &untouched, self.clock.now()).await?;
        if writes {
            let Cluster { repository, branch, .. } = &scene.cluster;
            self.wake(&Target { repository: repository.clone(), branch: branch.clone() }).await;
        }
        Ok(untouched)
    }

    async fn whole(&self, fan_out: &FanOut) -> Result<Scene> {
        let mut cluster = self.cluster(&fan_out.cluster_id).await?;
        let proposal = match &fan_out.proposal_id {
            Some(id) => self.store.proposal(id).await?,
            None => None,
        };
        let mut environments = BTreeMap::new();
        match fan_out.level {
            FanOutLevel::Environment => {
                let found = self.environment(&fan_out.subject_id).await?;
                environments.insert(found.id.clone(), found);
            }
            FanOutLevel::Cluster => {
                let mut after = None;
                loop {
                    let page = self.store.environments(Some(&cluster.id), after, 500).await?;
                    after = page.last().filter(|_| page.len() == 500).map(|last| (last.name.clone(), last.id.clone()));
                    environments.extend(page.into_iter().map(|found| (found.id.clone(), found)));
                    if after.is_none() {
                        break;
                    }
                }
            }
        }
        if let Some(proposal) = &proposal {
            let subject = environments.get_mut(&fan_out.subject_id);
            super::proposals::apply_patches(proposal, &mut cluster, subject)?;
        }
        let mut secrets: HashMap<String, Fingerprints> = HashMap::new();
        for (deployment, name, fingerprint) in self.store.concerned_secrets(fan_out).await? {
            secrets.entry(deployment).or_default().insert(name, fingerprint);
        }
        let mut left_out = HashSet::new();
        let review = match proposal {
            Some(proposal) if proposal.state == ProposalState::Merged => {
                let items = self.store.proposal_items(&proposal.id).await?;
                let is_left_out = |item: &ProposalItem| {
                    item.state == ItemState::Dropped && item.pushed_instance_id.as_ref() == Some(&item.instance_id)
                };
                let dropped = items.into_iter().filter(is_left_out);
                left_out.extend(dropped.map(|item| item.deployment_id));
                None
            }
            other => other.map(|proposal| proposal.id),
        };
        Ok(Scene { cluster, environments, secrets, catalog: self.drivers.catalog(), review, left_out })
    }

    /// Proposes the changes of some deployments: nothing is written before somebody merges them.
    async fn review_chunk(
        &self,
        fan_out: &FanOut,
        proposal: &str,
        chunk: &[Concerned],
        untouched: &mut Untouched,
    ) -> Result<bool> {
        let ids: Vec<String> = chunk.iter().map(|known| known.deployment.id.clone()).collect();
        for (id, outcome) in self.propose_chunk(fan_out, proposal, &ids).await? {
            match outcome {
                Ok(true) => {}
                Ok(false) => untouched.unchanged.push(id),
                Err(why) => untouched.failed.push((id, why)),
            }
        }
        Ok(false)
    }

    /// Computes and stores the changes of some deployments; whether there are any.
    async fn fan_out_chunk(
        &self,
        fan_out: &FanOut,
        scene: &Scene,
        chunk: &[Concerned],
        untouched: &mut Untouched,
    ) -> Result<bool> {
        let author = Person { name: fan_out.author_name.clone(), email: fan_out.author_email.clone() };
        let edit = Edit { fan_out: Some(fan_out.id.clone()), ..Edit::default() };
        let mut computations: Vec<(String, Computation)> = Vec::with_capacity(chunk.len());
        for known in chunk {
            let Some(environment) = scene.environments.get(&known.deployment.environment_id) else { continue };
            let id = known.deployment.id.clone();
            match self.rows_of(known.deployment.clone(), environment.clone(), scene.cluster.clone()).await {
                Ok(rows) => computations.push((id, self.computation(rows, vec![edit.clone()], &author))),
                Err(error) => untouched.failed.push((id, of_one(error)?)),
            }
        }
        let computed = on_a_thread(move || {
            Ok(computations.into_iter().map(|(id, one)| (id, alone(|| compute::run(&one)))).collect::<Vec<_>>())
        });
        let mut changes: Vec<Change> = Vec::new();
        for (id, one) in computed.await? {
            match one {
                Ok(Computed { is_nothing: true, .. }) => untouched.unchanged.push(id),
                Ok(Computed { change, .. }) => changes.push(change),
                Err(error) => untouched.failed.push((id, of_one(error)?)),
            }
        }
        let mut writes = false;
        if changes.is_empty() {
            return Ok(writes);
        }
        for (change, is_stored) in changes.iter().zip(self.store.change_all(&changes).await?) {
            if is_stored {
                let workflow = change.instance.as_ref().map(|(_, task)| task.workflow.as_str());
                metrics::changes(workflow.unwrap_or_default()).inc();
                writes = true;
                continue;
            }
            // Somebody was faster: what the deployment says now counts, by itself.
            metrics::change_conflicts().inc();
            let id = &change.deployment.id;
            match self.edit(id, None, &author, |_| Ok(edit.clone())).await {
                Ok(changed) if changed.task.is_some() => writes = true,
                Ok(_) => untouched.unchanged.push(id.clone()),
                Err(error) => {
                    let why = of_one(error)?;
                    let now = self.store.deployment(id).await?;
                    match now.filter(|now| now.lifecycle != Lifecycle::Deleting) {
                        Some(_) => untouched.failed.push((id.clone(), why)),
                        None => untouched.skipped.push((id.clone(), BEING_DELETED.to_owned())),
                    }
                }
            }
        }
        Ok(writes)
    }
}

/// What a configuration means for a deployment.
enum Look {
    Current,
    Due,
    Skip(&'static str),
    Fails(String),
}

impl Scene {
    fn look(&self, known: &Concerned) -> Look {
        let row = &known.deployment;
        if row.lifecycle == Lifecycle::Deleting {
            return Look::Skip(BEING_DELETED);
        }
        if row.state == DeploymentState::Restoring {
            return Look::Skip("a restore is running");
        }
        if self.left_out.contains(&row.id) {
            return Look::Skip("it was taken out of the request for this configuration");
        }
        if row.newest_instance_id.is_none() {
            return Look::Skip("it is only proposed so far; its proposal takes the configuration that counts then");
        }
        let Some(environment) = self.environments.get(&row.environment_id) else {
            return Look::Skip("its environment was made meanwhile, with this configuration");
        };
        let Some(driver) = self.catalog.by_digest.get(&row.driver_digest) else { return Look::Due };
        let none = Fingerprints::new();
        let fingerprints = self.secrets.get(&row.id).unwrap_or(&none);
        match alone(|| compute::is_current(&self.cluster, environment, known, driver, fingerprints)) {
            Ok(true) => Look::Current,
            Ok(false) => Look::Due,
            Err(ChangeError::Internal(cause)) => Look::Fails(inside(&cause)),
            Err(error) => Look::Fails(error.to_string()),
        }
    }
}

/// Why one deployment could not be changed. What concerns all of them is handed on.
pub(super) fn of_one(error: ChangeError) -> Result<String> {
    match error {
        ChangeError::Store(StoreError::Conflict | StoreError::Exists) => Ok(error.to_string()),
        // A row that cannot be read is one deployment's.
        ChangeError::Store(StoreError::Database(sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_))) => {
            Ok(inside(&error.into()))
        }
        ChangeError::Store(_) => Err(error),
        ChangeError::Internal(cause) => Ok(inside(&cause)),
        other => Ok(other.to_string()),
    }
}

/// What is said of a fault of ours.
fn inside(cause: &anyhow::Error) -> String {
    error!(error = format!("{cause:#}"), "a deployment of a fan-out could not be changed");
    "something went wrong inside; the server's log says what".to_owned()
}

/// A fault of ours that shows with one deployment must not keep a configuration from all the others.
fn alone<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    done.unwrap_or_else(|_| Err(ChangeError::Internal(anyhow::anyhow!("a panic; it is further up in the log"))))
}
