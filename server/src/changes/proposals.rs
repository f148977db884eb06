//! Changes that people review before they count: kept as patches beside the rows, and taken over when they are merged.
//!
//! ```text
//! mutation ──► propose: rows + patch ──► instance `proposed`, task, item ──► proposals (branch, request on the forge)
//!                  ▲                                                              │
//!                  └── refresh: the rows moved, or somebody committed to the branch ◄──┤
//!                                                                                 ▼
//! rows = patch applied ◄── take_merges: the instance's file is on the branch that Flux follows (repository::reader)
//! ```
//!
//! A proposal is a patch, not a state: a deployment's row holds what is merged, so a direct change goes out without
//! what is in review, and the proposal is computed again on it. However a request was merged, the instance in the
//! file says so. What must never enter: forges, Git objects, texts for a forge.

use super::compute::{self, Computation, Computed, Edit, Rows};
use super::edits::{express, verdict};
use super::{ATTEMPTS, Changed, Changes, QUEUE_LIMIT, Result, check_lifecycle, invalid, on_a_thread, preview};
use crate::changes::ChangeError;
use crate::faults;
use crate::metrics;
use crate::repository::{CommitEntry, Content, capitalised};
use crate::store::{
    Change, Cluster, Delivery, DeliveryRules, Deployment, DeploymentState, Environment, FanOut, FanOutLevel, Instance,
    ItemState, Lead, Lifecycle, MergedItem, Person, Proposal, ProposalEnd, ProposalItem, ProposalState, ProposedChange,
    ProposedDriver, ProposedEdit, ProposedPatch, Rest, Sealed, Secret, StoreError, Target, Task, TaskState,
};
use crate::tasks::machine::{self, Event};
use anyhow::anyhow;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use std::collections::BTreeMap;
use styrmin_renderer::config::{self, Level, Object, Patch};
use styrmin_renderer::names::EnvironmentId;
use styrmin_renderer::spec::JobRun;

/// Most wishes of one proposal.
const EDITS_MAX: usize = 100;
/// Items that are computed and stored together.
const CHUNK: usize = 50;
/// Where the branches of proposals are.
pub const BRANCHES: &str = "styrmin/";
/// What ends a proposal of which nothing is left.
const NOTHING_LEFT: &str = "what it asks for is so already: nothing is left to review";
/// What ends the part of a deployment that goes.
const BEING_DELETED: &str = "the deployment is being deleted";

fn holds_all() -> String {
    format!("its proposal holds {EDITS_MAX} changes already; merge or close it first")
}

/// A proposal with all that belongs to it.
#[derive(Debug, Clone)]
pub struct Scene {
    /// The proposal.
    pub proposal: Proposal,
    /// Its cluster.
    pub cluster: Cluster,
    /// Its parts that are in review.
    pub parts: Vec<Part>,
}

/// One deployment's part of a proposal.
#[derive(Debug, Clone)]
pub struct Part {
    /// The item.
    pub item: ProposalItem,
    /// The deployment, as it is merged.
    pub deployment: Deployment,
    /// Its environment.
    pub environment: Environment,
    /// The instance that the proposal comes to.
    pub instance: Instance,
    /// Folder of its files in the repository.
    pub folder: String,
}

/// What somebody committed to the branch of a proposal.
#[derive(Debug, Clone)]
pub struct BranchEdit {
    /// The deployment.
    pub deployment: String,
    /// What its document holds there.
    pub document: Content,
    /// It is as on the branch that the request is for: somebody took it out.
    pub left_out: bool,
    /// The commit.
    pub commit: CommitEntry,
}

/// What became of a look at a proposal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refreshed {
    /// Some of its instances are others now, or it ended.
    pub changed: bool,
    /// What of people's commits cannot be taken over, for them.
    pub refused: Vec<String>,
    /// Deployments that could not be computed, and why.
    pub failed: Vec<String>,
}

/// The instance of a proposal that the branch of Flux holds now.
pub(super) struct Merge {
    pub(super) item: ProposalItem,
    pub(super) instance: Instance,
    /// How many of the item's edits, and of the proposal's patches, it has.
    counts: (usize, usize),
    /// What the file holds; `None`: it is gone, as it shall be.
    pub(super) document: Option<String>,
    pub(super) commit: CommitEntry,
}

impl Changes {
    /// Whether a change of a deployment in this environment goes through a review, and by which rules.
    pub(super) async fn rules(&self, environment: &str, asked: Option<Delivery>) -> Result<Option<DeliveryRules>> {
        let environment = self.environment(environment).await?;
        let cluster = self.cluster(&environment.cluster_id).await?;
        Ok(rules_of(&cluster, Some(&environment), asked))
    }

    /// By which rules a change of one deployment is reviewed; `None`: it goes out at once.
    pub(super) async fn review_of(&self, deployment: &str, asked: Option<Delivery>) -> Result<Option<DeliveryRules>> {
        let not_found = || ChangeError::NotFound { kind: "deployment", id: deployment.to_owned() };
        let row = self.store.deployment(deployment).await?.ok_or_else(not_found)?;
        let rules = self.rules(&row.environment_id, asked).await?;
        if rules.is_none() && row.newest_instance_id.is_none() {
            let object = format!("deployment \"{}\"", row.name);
            let message = "is only proposed so far; merge or close its proposal first, or change that";
            return Err(invalid(object, "delivery", message));
        }
        Ok(rules)
    }

    /// Proposes a new deployment.
    pub(super) async fn propose_new(
        &self,
        rows: Rows,
        edit: Edit,
        rules: DeliveryRules,
        author: &Person,
    ) -> Result<Changed> {
        self.propose_edit(rows, None, Vec::new(), edit, rules, author).await
    }

    /// What of a deployment is in review in a proposal of its own, when its changes are reviewed: the edits, and the
    /// instance whose place another one would take.
    pub(super) async fn in_review(&self, rows: &Rows) -> Result<(Vec<Edit>, Option<Option<Box<Instance>>>)> {
        let id = &rows.deployment.id;
        if rules_of(&rows.cluster, Some(&rows.environment), None).is_none() {
            return Ok((Vec::new(), None));
        }
        let (own, edits) = self.own_part(id).await?;
        let item = own.as_ref().map(|(_, item)| item);
        Ok((edits, Some(self.instance_of(item).await?.map(Box::new))))
    }

    /// The proposal of a deployment's own with its part, and the edits that it holds.
    async fn own_part(&self, id: &str) -> Result<(Option<(Proposal, ProposalItem)>, Vec<Edit>)> {
        let Some(own) = self.store.own_proposal(id).await? else { return Ok((None, Vec::new())) };
        let item = self.open_items(&own.id).await?.into_iter().find(|item| item.deployment_id == id);
        let Some(item) = item else { return Ok((None, Vec::new())) };
        let edits = self.opened(&item.edits, id).await?;
        Ok((Some((own, item)), edits))
    }

    /// Proposes what `decide` says of what the deployment's own proposal leads to.
    pub(super) async fn propose(
        &self,
        id: &str,
        base: Option<&str>,
        rules: &DeliveryRules,
        author: &Person,
        decide: impl Fn(&Rows) -> Result<Edit>,
    ) -> Result<Changed> {
        let Ok(_turn) = tokio::time::timeout(QUEUE_LIMIT, self.locks.lock(id)).await else {
            return Err(ChangeError::Busy);
        };
        for _ in 0..ATTEMPTS {
            let rows = self.rows(id).await?;
            self.check_base(&rows, base).await?;
            let (known, edits) = self.own_part(id).await?;
            let seen = compute::applied(&rows, &edits, &self.key)?;
            let edit = decide(&seen)?;
            check_lifecycle(&seen, &edit)?;
            if edit.is_done(&seen) {
                let proposal = known.map(|(proposal, _)| proposal);
                return Ok(Changed { deployment: rows.deployment, task: None, proposal });
            }
            if edit.delete && rows.deployment.newest_instance_id.is_none() {
                // It was never merged: who ends it takes the proposal back.
                if let Some((proposal, _)) = known {
                    self.end_proposal(&proposal.id, ProposalState::Closed, &format!("{} took it back", author.name))
                        .await?;
                }
                let deployment = self.store.deployment(id).await?.unwrap_or(rows.deployment);
                return Ok(Changed { deployment, task: None, proposal: None });
            }
            match self.propose_edit(rows, known, edits, edit, rules.clone(), author).await {
                Err(ChangeError::Store(StoreError::Conflict)) => metrics::change_conflicts().inc(),
                other => return other,
            };
        }
        Err(ChangeError::Busy)
    }

    async fn propose_edit(
        &self,
        rows: Rows,
        known: Option<(Proposal, ProposalItem)>,
        mut edits: Vec<Edit>,
        edit: Edit,
        rules: DeliveryRules,
        author: &Person,
    ) -> Result<Changed> {
        let object = format!("deployment \"{}\"", rows.deployment.name);
        if edits.len() >= EDITS_MAX {
            return Err(invalid(object, "proposal", holds_all()));
        }
        let previous = self.instance_of(known.as_ref().map(|(_, item)| item)).await?;
        edits.push(edit.clone());
        let deployment = rows.deployment.clone();
        let base = rows.newest.as_ref().map(|newest| newest.id.clone());
        let computation =
            Computation { review: Some(previous.clone().map(Box::new)), ..self.computation(rows, edits, author) };
        let Computed { change, last, .. } = on_a_thread(move || compute::run(&computation)).await?;
        let Some((instance, task)) = change.instance else {
            // What is merged says it already.
            if let Some((proposal, item)) = known {
                // As it was read: what somebody added meanwhile is not closed with it.
                self.end_as_read(proposal, &[item], ProposalState::Closed, NOTHING_LEFT).await?;
            }
            return Ok(Changed { deployment, task: None, proposal: None });
        };
        let jobs = &edit.jobs;
        if let (Some((proposal, _)), Some(previous)) = (&known, &previous)
            && is_same(previous, &instance, jobs)
        {
            return Ok(Changed { deployment, task: None, proposal: Some(proposal.clone()) });
        }
        let mut stored = known.as_ref().map(|(_, item)| item.edits.clone()).unwrap_or_default();
        stored.push(proposed(&edit, last, author));
        let subject = format!("{} {}", instance.spec.driver.name, instance.spec.application_version);
        let proposal = match known.as_ref() {
            Some((proposal, _)) => proposal.clone(),
            None => {
                let title = format!("{} deployment {} ({subject})", capitalised(&instance.workflow), deployment.name);
                self.new_proposal(&change.cluster.0, &deployment.name, title, rules, author).await?
            }
        };
        let workflow = task.workflow.clone();
        let answer = task.clone();
        let id = deployment.id.clone();
        let change = Change { instance: Some((instance, task)), ..change };
        let item = known.as_ref().map(|(_, item)| item);
        let part = self.part_of(&proposal, (deployment.clone(), base), change, stored, item).await?;
        let Some(change) = part else { return Ok(Changed { deployment, task: None, proposal: None }) };
        self.store.propose(&proposal, &[change], None).await?;
        metrics::changes(&workflow).inc();
        self.wake.review(&proposal.target());
        let deployment = self.store.deployment(&id).await?.unwrap_or(deployment);
        let proposal = self.store.proposal(&proposal.id).await?;
        Ok(Changed { deployment, task: Some(answer), proposal })
    }

    async fn new_proposal(
        &self,
        cluster: &str,
        name: &str,
        title: String,
        delivery: DeliveryRules,
        author: &Person,
    ) -> Result<Proposal> {
        let cluster = self.cluster(cluster).await?;
        Ok(Proposal {
            id: uuid::Uuid::now_v7().to_string(),
            cluster_id: cluster.id,
            repository: cluster.repository,
            branch: cluster.branch,
            head_branch: branch_of(name),
            title,
            level: None,
            subject_id: None,
            patches: Vec::new(),
            fan_out_id: None,
            delivery,
            state: ProposalState::Open,
            head: None,
            number: None,
            url: None,
            message: None,
            described: None,
            comment_id: 0,
            told: false,
            version: 0,
            author_name: author.name.clone(),
            author_email: author.email.clone(),
            created_at: self.clock.now(),
            ended_at: None,
        })
    }

    /// Proposes another configuration of a cluster or environment: begins a proposal, or adds to the open one, and
    /// the fan-out that finds its deployments.
    pub(super) async fn propose_level(
        &self,
        level: FanOutLevel,
        (subject, name, cluster): (&str, &str, &str),
        patch: &Patch,
        rules: DeliveryRules,
        author: &Person,
    ) -> Result<(Proposal, FanOut)> {
        let mut fan_out = self.new_fan_out(level, subject, cluster, author);
        let proposal = match self.store.proposal_for(level, subject).await? {
            Some(known) => {
                let object = format!("{} \"{name}\"", level.as_str());
                if known.patches.len() >= EDITS_MAX {
                    let message = format!("its proposal holds {EDITS_MAX} changes already; merge or close it first");
                    return Err(invalid(object, "proposal", message));
                }
                if known.state == ProposalState::Preparing {
                    return Err(ChangeError::Busy);
                }
                known
            }
            None => {
                let title = format!("Change the configuration of {} {name}", level.as_str());
                let proposal = self.new_proposal(cluster, name, title, rules, author).await?;
                Proposal { level: Some(level.as_str().to_owned()), subject_id: Some(subject.to_owned()), ..proposal }
            }
        };
        let mut patches = proposal.patches.clone();
        patches.push(ProposedPatch::from(patch));
        let (id, state) = (fan_out.id.clone(), ProposalState::Preparing);
        let proposal = Proposal { patches, state, fan_out_id: Some(id), ..proposal };
        // What would not be good is refused now.
        let mut row = self.cluster(cluster).await?;
        let mut environment = match level {
            FanOutLevel::Environment => Some(self.environment(subject).await?),
            FanOutLevel::Cluster => None,
        };
        apply_patches(&proposal, &mut row, environment.as_mut())?;
        fan_out.proposal_id = Some(proposal.id.clone());
        self.store.propose(&proposal, &[], Some(&fan_out)).await?;
        self.fan_outs.notify_one();
        Ok((proposal, fan_out))
    }

    /// The open items of a proposal.
    async fn open_items(&self, proposal: &str) -> Result<Vec<ProposalItem>> {
        let mut items = self.store.proposal_items(proposal).await?;
        items.retain(|item| item.state == ItemState::Open);
        Ok(items)
    }

    async fn instance_of(&self, item: Option<&ProposalItem>) -> Result<Option<Instance>> {
        match item {
            Some(item) => Ok(self.store.instance(&item.instance_id).await?),
            None => Ok(None),
        }
    }

    /// The task of an item's instance, as it is when another one takes its place.
    async fn superseded(&self, item: Option<&ProposalItem>, by: i64) -> Result<Vec<Task>> {
        let Some(item) = item else { return Ok(Vec::new()) };
        let Some(mut task) = self.store.task(&item.task_id).await? else { return Ok(Vec::new()) };
        let moved = machine::apply(&mut task, &Event::Superseded { by }, self.clock.now());
        Ok(if moved { vec![task] } else { Vec::new() })
    }

    /// What was kept, as edits again.
    async fn opened(&self, edits: &[ProposedEdit], deployment: &str) -> Result<Vec<Edit>> {
        let mut opened = Vec::with_capacity(edits.len());
        for edit in edits {
            let restore = match &edit.restore {
                Some(id) => {
                    let found = self.store.instance(id).await?;
                    Some(found.ok_or_else(|| ChangeError::NotFound { kind: "instance", id: id.clone() })?)
                }
                None => None,
            };
            let catalog = self.drivers.catalog();
            let usable = |digest: &str| {
                catalog.by_digest.get(digest).cloned().ok_or_else(|| {
                    let message = format!(
                        "version {digest} of its driver cannot be used by this release; close the proposal and ask again"
                    );
                    invalid(format!("deployment \"{deployment}\""), "driver", message)
                })
            };
            let driver = edit.driver.as_ref().map(|driver| {
                Ok::<_, ChangeError>((usable(&driver.digest)?, driver.application_version.clone(), driver.pin.clone()))
            });
            let restore = restore.map(|old| {
                let driver = usable(&old.spec.driver.digest)?;
                Ok::<_, ChangeError>((Box::new(old), driver))
            });
            let sealed = edit.secrets.iter().map(|(name, sealed)| {
                let ciphertext = STANDARD.decode(&sealed.ciphertext);
                let ciphertext = ciphertext.map_err(|error| anyhow!("secret {name} of a proposal: {error}"))?;
                let (name, fingerprint) = (name.clone(), sealed.fingerprint.clone());
                Ok::<_, ChangeError>(Secret { deployment_id: deployment.to_owned(), name, ciphertext, fingerprint })
            });
            opened.push(Edit {
                config: Patch { set: edit.set.clone(), remove: edit.remove.clone() },
                parameters: edit.parameters.clone(),
                remove_parameters: edit.remove_parameters.clone(),
                sealed: sealed.collect::<Result<_>>()?,
                driver: driver.transpose()?,
                lifecycle: edit.lifecycle,
                jobs: edit.jobs.clone(),
                restore: restore.transpose()?,
                again: edit.again,
                delete: edit.delete,
                ..Edit::default()
            });
        }
        Ok(opened)
    }

    /// Rows of a deployment with the configuration that a proposal changes.
    async fn proposed_rows(&self, proposal: &Proposal, deployment: &str) -> Result<Rows> {
        let mut rows = self.rows(deployment).await?;
        apply_patches(proposal, &mut rows.cluster, Some(&mut rows.environment))?;
        Ok(rows)
    }

    /// A proposal with its parts; `None`: there is no such.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn scene(&self, id: &str) -> Result<Option<Scene>> {
        let Some(proposal) = self.store.proposal(id).await? else { return Ok(None) };
        let cluster = self.cluster(&proposal.cluster_id).await?;
        let mut environments: BTreeMap<String, Environment> = BTreeMap::new();
        let mut parts = Vec::new();
        for item in self.open_items(id).await? {
            let Some(deployment) = self.store.deployment(&item.deployment_id).await? else { continue };
            let Some(instance) = self.store.instance(&item.instance_id).await? else { continue };
            if !environments.contains_key(&deployment.environment_id) {
                let row = self.environment(&deployment.environment_id).await?;
                environments.insert(row.id.clone(), row);
            }
            let Some(environment) = environments.get(&deployment.environment_id).cloned() else { continue };
            let Some(folder) = super::edits::folder(&cluster, &deployment) else { continue };
            parts.push(Part { item, deployment, environment, instance, folder });
        }
        Ok(Some(Scene { proposal, cluster, parts }))
    }

    /// What a part of a proposal changes, for people.
    ///
    /// # Errors
    /// When it cannot be computed any more.
    pub async fn preview_part(&self, proposal: &Proposal, part: &Part) -> Result<preview::Preview> {
        let rows = self.proposed_rows(proposal, &part.deployment.id).await?;
        let edits = self.edits_of_item(&part.item).await?;
        let previous = Some(Some(Box::new(part.instance.clone())));
        let computation = Computation { review: previous, ..self.computation(rows, edits, &proposal.author()) };
        on_a_thread(move || preview::preview(&computation)).await
    }

    /// An item's wishes. One of a fan-out has none of its own: what is computed anew says it.
    async fn edits_of_item(&self, item: &ProposalItem) -> Result<Vec<Edit>> {
        let mut edits = self.opened(&item.edits, &item.deployment_id).await?;
        if edits.is_empty() {
            edits.push(Edit::default());
        }
        Ok(edits)
    }

    /// Computes a proposal again: with what people committed to its branch, and on the rows as they are now. With
    /// `anew` every part that the branch holds gets a new instance, since it goes onto another commit.
    ///
    /// # Errors
    /// When the database fails, or rows keep moving.
    pub async fn refresh(&self, scene: &Scene, commits: &[BranchEdit], anew: bool) -> Result<Refreshed> {
        let mut refreshed = Refreshed::default();
        for chunk in scene.parts.chunks(CHUNK) {
            let Some(proposal) = self.store.proposal(&scene.proposal.id).await? else { return Ok(refreshed) };
            if proposal.state != ProposalState::Open {
                return Ok(Refreshed { changed: true, ..refreshed });
            }
            // Read after the proposal: whatever comes later moves its version.
            let items = self.open_items(&proposal.id).await?;
            let (mut changes, mut dropped, mut dissolved) = (Vec::new(), Vec::new(), false);
            for part in chunk {
                let is_as_seen = |item: &&ProposalItem| {
                    item.deployment_id == part.item.deployment_id && item.instance_id == part.item.instance_id
                };
                if !items.iter().any(|item| is_as_seen(&item)) {
                    // Somebody changed it since the scene was read.
                    return Err(StoreError::Conflict.into());
                }
                let said = commits.iter().find(|commit| commit.deployment == part.deployment.id);
                let said = match said {
                    Some(said) if self.is_ours(part, said).await? => None,
                    said => said,
                };
                if let Some(said) = said.filter(|said| said.left_out) {
                    let (commit, by) = (short_id(&said.commit.id), &said.commit.name);
                    let message = format!("{by} took it out of the request with commit {commit}");
                    dropped.extend(self.rejected(&part.item, &message).await?);
                    continue;
                }
                let folded = said.and_then(|said| self.fold(part, said, &mut refreshed.refused));
                let is_pushed = part.item.pushed_instance_id.as_ref() == Some(&part.item.instance_id);
                // Not again and again while a push fails.
                let fresh = folded.is_some() || (is_pushed && (anew || said.is_some()));
                match self.again(&proposal, part, folded, fresh).await {
                    Ok(Again::Same) => {}
                    Ok(Again::Other(change)) => changes.push(*change),
                    Ok(Again::Nothing(why)) => {
                        dissolved |= why == NOTHING_LEFT;
                        dropped.extend(self.rejected(&part.item, why).await?);
                    }
                    Err(error @ (ChangeError::Invalid(_) | ChangeError::NotFound { .. })) => {
                        refreshed.failed.push(error.to_string());
                    }
                    Err(error) => return Err(error),
                }
            }
            let mut version = proposal.version;
            if !changes.is_empty() {
                self.store.propose(&proposal, &changes, None).await?;
                refreshed.changed = true;
                version += 1;
            }
            if !dropped.is_empty() {
                let left = items.len() > dropped.len();
                if !left && dissolved && proposal.level.is_some() {
                    // Every deployment has it already: the configuration itself shall count, too.
                    let end =
                        ProposalEnd { proposal: Proposal { version, ..proposal.clone() }, anew: false, tasks: dropped };
                    self.store.end_proposal(&end).await?;
                    self.merge_level(&proposal.id, usize::MAX, None).await?;
                    return Ok(Refreshed { changed: true, ..refreshed });
                }
                let ended = (!left).then(|| self.clock.now());
                let state = if left { ProposalState::Open } else { ProposalState::Closed };
                let why = dropped.last().and_then(|task| task.message.clone());
                let message = if left { proposal.message.clone() } else { why };
                let proposal = Proposal { state, message, ended_at: ended, version, ..proposal };
                self.store.end_proposal(&ProposalEnd { proposal, anew: false, tasks: dropped }).await?;
                refreshed.changed = true;
            }
        }
        Ok(refreshed)
    }

    /// Whether the branch holds what we wrote there for one of the deployment's instances: a push of ours whose record
    /// was lost is nobody's edit.
    async fn is_ours(&self, part: &Part, said: &BranchEdit) -> Result<bool> {
        if said.left_out {
            return Ok(false);
        }
        let Some(text) = said.document.text() else { return Ok(false) };
        let Some(named) = verdict::named(text) else { return Ok(false) };
        let recorded = match &part.item.pushed_instance_id {
            Some(id) => self.store.instance(id).await?.map_or(0, |recorded| recorded.sequence),
            None => 0,
        };
        let found = self.store.instance(&named).await?;
        // Later than what is recorded: an older one is what somebody went back to.
        Ok(found.is_some_and(|found| {
            found.deployment_id == said.deployment
                && found.document.as_deref() == Some(text)
                && found.sequence > recorded
        }))
    }

    /// One part, computed on the rows as they are now.
    async fn again(
        &self,
        proposal: &Proposal,
        part: &Part,
        folded: Option<(Edit, Person)>,
        fresh: bool,
    ) -> Result<Again> {
        let rows = self.proposed_rows(proposal, &part.deployment.id).await?;
        if rows.deployment.lifecycle == Lifecycle::Deleting {
            return Ok(Again::Nothing(BEING_DELETED));
        }
        let mut edits = self.edits_of_item(&part.item).await?;
        let mut stored = part.item.edits.clone();
        if let Some((edit, _)) = &folded {
            if stored.len() >= EDITS_MAX {
                return Err(invalid(format!("deployment \"{}\"", part.deployment.name), "proposal", holds_all()));
            }
            edits.push(edit.clone());
        }
        let author = folded.as_ref().map_or_else(
            || Person { name: part.instance.author_name.clone(), email: part.instance.author_email.clone() },
            |(_, author)| author.clone(),
        );
        let jobs: Vec<JobRun> = edits.iter().flat_map(|edit| edit.jobs.clone()).collect();
        let deployment = rows.deployment.clone();
        let base = rows.newest.as_ref().map(|newest| newest.id.clone());
        let review = Some(Some(Box::new(part.instance.clone())));
        let computation = Computation { review, ..self.computation(rows, edits, &author) };
        let Computed { change, last, .. } = on_a_thread(move || compute::run(&computation)).await?;
        let Some((instance, task)) = change.instance else { return Ok(Again::Nothing(NOTHING_LEFT)) };
        let is_pushed = part.item.pushed_instance_id.as_ref() == Some(&part.item.instance_id);
        // A number below that of its base would look like a step back.
        let moved = !is_pushed && base != part.item.base_instance_id;
        if !fresh && !moved && is_same(&part.instance, &instance, &jobs) {
            return Ok(Again::Same);
        }
        if let Some((edit, author)) = &folded {
            stored.push(proposed(edit, last, author));
        }
        let task = Task { fan_out_id: proposal.fan_out_id.clone(), ..task };
        let change = Change { instance: Some((instance, task)), ..change };
        let part = self.part_of(proposal, (deployment, base), change, stored, Some(&part.item)).await?;
        Ok(part.map_or(Again::Nothing(NOTHING_LEFT), |part| Again::Other(Box::new(part))))
    }

    /// A deployment's part of a proposal, as it shall be stored with the instance of `change`; `known` is the part
    /// whose place it takes.
    async fn part_of(
        &self,
        proposal: &Proposal,
        (deployment, base): (Deployment, Option<String>),
        change: Change,
        edits: Vec<ProposedEdit>,
        known: Option<&ProposalItem>,
    ) -> Result<Option<ProposedChange>> {
        let Some((instance, task)) = change.instance else { return Ok(None) };
        let superseded = self.superseded(known, instance.sequence).await?;
        let item = ProposalItem {
            proposal_id: proposal.id.clone(),
            deployment_id: deployment.id.clone(),
            edits,
            instance_id: instance.id.clone(),
            task_id: task.id.clone(),
            base_instance_id: base,
            pushed_instance_id: known.and_then(|known| known.pushed_instance_id.clone()),
            state: ItemState::Open,
        };
        Ok(Some(ProposedChange {
            cluster: change.cluster,
            environment: change.environment,
            deployment: Deployment { last_sequence: instance.sequence, ..deployment },
            instance: (instance, task),
            item,
            superseded,
        }))
    }

    /// What somebody committed to a part's file, as an edit of its deployment; what cannot be one is told.
    fn fold(&self, part: &Part, said: &BranchEdit, refused: &mut Vec<String>) -> Option<(Edit, Person)> {
        let name = &part.deployment.name;
        let mut put_back = |reason: String| {
            refused.push(format!("{name}: commit {} by {}: {reason}", short_id(&said.commit.id), said.commit.name));
        };
        let environment: EnvironmentId = part.environment.id.parse().ok()?;
        let files = verdict::Files { document: Some(&said.document), ..verdict::Files::default() };
        match verdict::verdict(&environment, &part.instance, None, files) {
            verdict::Verdict::Ours => None,
            verdict::Verdict::Changed { found, beside } => {
                let driver = &part.deployment.driver_name;
                let mut expressed = express::express(&part.instance, &found, driver, &self.drivers.catalog());
                if beside {
                    expressed.refused.push("metadata (it follows from the deployment)".to_owned());
                }
                if !expressed.refused.is_empty() {
                    put_back(expressed.message());
                }
                let author = Person { name: said.commit.name.clone(), email: said.commit.email.clone() };
                (!expressed.taken.is_empty()).then_some((expressed.edit, author))
            }
            verdict::Verdict::Removed => {
                put_back(
                    "its file is gone; ask for the end of the deployment instead, or close the request".to_owned(),
                );
                None
            }
            verdict::Verdict::Broken(problem) => {
                put_back(problem);
                None
            }
            _ => {
                put_back("it says nothing that a deployment's configuration can say".to_owned());
                None
            }
        }
    }

    /// The task of an item that will not be merged.
    async fn rejected(&self, item: &ProposalItem, message: &str) -> Result<Option<Task>> {
        let Some(mut task) = self.store.task(&item.task_id).await? else { return Ok(None) };
        machine::apply(&mut task, &Event::Rejected { message }, self.clock.now());
        Ok(Some(task))
    }

    /// Ends a proposal; what of it is not merged never will be. One that has ended stays as it is.
    ///
    /// # Errors
    /// When it does not exist, or its rows keep moving.
    pub async fn end_proposal(&self, id: &str, state: ProposalState, message: &str) -> Result<Proposal> {
        for _ in 0..ATTEMPTS {
            let not_found = || ChangeError::NotFound { kind: "proposal", id: id.to_owned() };
            let proposal = self.store.proposal(id).await?.ok_or_else(not_found)?;
            let items = self.open_items(id).await?;
            if proposal.ended_at.is_some() && items.is_empty() {
                return Ok(proposal);
            }
            match self.end_as_read(proposal, &items, state, message).await {
                Err(ChangeError::Store(StoreError::Conflict)) => {}
                other => {
                    other?;
                    return self.store.proposal(id).await?.ok_or_else(not_found);
                }
            }
        }
        Err(ChangeError::Busy)
    }

    /// Ends a proposal whose open items are these; one that moved is a conflict.
    async fn end_as_read(
        &self,
        proposal: Proposal,
        items: &[ProposalItem],
        state: ProposalState,
        message: &str,
    ) -> Result<()> {
        let state = if proposal.state == ProposalState::Merged { ProposalState::Merged } else { state };
        let mut tasks = Vec::new();
        for item in items {
            tasks.extend(self.rejected(item, message).await?);
        }
        let target = proposal.target();
        let ended_at = Some(proposal.ended_at.unwrap_or_else(|| self.clock.now()));
        let proposal = Proposal { state, message: Some(message.to_owned()), ended_at, ..proposal };
        self.store.end_proposal(&ProposalEnd { proposal, anew: false, tasks }).await?;
        self.wake.review(&target);
        self.fan_outs.notify_one();
        Ok(())
    }

    /// What a merge left of a proposal: what was asked after the branch was made goes on in another request, the rest
    /// was left out.
    ///
    /// # Errors
    /// When the database fails, or rows keep moving.
    pub async fn end_merged(&self, id: &str) -> Result<()> {
        // Nothing of it may have been recognised: the configuration was reviewed all the same, as the branch had it.
        let mut patches = 0;
        for item in self.open_items(id).await? {
            let Some(pushed) = &item.pushed_instance_id else { continue };
            let held = self.store.item_of_instance(pushed).await?;
            patches = patches.max(held.map_or(0, |held| usize::try_from(held.held_patches).unwrap_or_default()));
        }
        if patches > 0 {
            self.merge_level(id, patches, None).await?;
        }
        for _ in 0..ATTEMPTS {
            let Some(proposal) = self.store.proposal(id).await? else { return Ok(()) };
            let items = self.open_items(id).await?;
            if proposal.ended_at.is_some() && items.is_empty() {
                return Ok(());
            }
            let (waits, left_out): (Vec<ProposalItem>, Vec<ProposalItem>) = items.into_iter().partition(|item| {
                proposal.level.is_none() && item.pushed_instance_id.as_ref() != Some(&item.instance_id)
            });
            let ended = if waits.is_empty() {
                self.end_as_read(proposal, &left_out, ProposalState::Merged, "the merge left it out").await
            } else {
                let name = proposal.head_branch.strip_prefix(BRANCHES).unwrap_or_default();
                let name = name.rsplit_once('-').map_or(name, |(name, _)| name);
                let proposal = Proposal { head_branch: branch_of(name), ..proposal.clone() };
                let end = ProposalEnd { proposal, anew: true, tasks: Vec::new() };
                self.store.end_proposal(&end).await.map_err(ChangeError::from)
            };
            match ended {
                Err(ChangeError::Store(StoreError::Conflict)) => {}
                other => return other,
            }
        }
        Err(ChangeError::Busy)
    }

    /// The part of a proposal that a file on the branch of Flux brings, if it does.
    pub(super) async fn merge_of(
        &self,
        deployment: &str,
        document: &Content,
        commit: &CommitEntry,
    ) -> Result<Option<Merge>> {
        let held = match document {
            Content::Text(text) => match verdict::named(text) {
                Some(named) => self.store.item_of_instance(&named).await?,
                None => None,
            },
            Content::Absent => self.store.item_that_ends(deployment).await?,
            Content::Other => None,
        };
        let Some(held) = held.filter(|held| held.item.deployment_id == deployment) else { return Ok(None) };
        // What the branch held when it was merged, which may not be what is asked by now.
        let Some(instance) = self.store.instance(&held.held_instance_id).await? else { return Ok(None) };
        let count = |count: i64| usize::try_from(count).unwrap_or_default();
        let counts = (count(held.held_edits), count(held.held_patches));
        let document = document.text().map(str::to_owned);
        Ok(Some(Merge { item: held.item, instance, counts, document, commit: commit.clone() }))
    }

    /// Takes over what was merged; gives the deployments for which that was done, with what their secrets file shall
    /// hold. Whatever dies in between, the same reading is taken again.
    pub(super) async fn take_merges(
        &self,
        target: &Target,
        merges: Vec<Merge>,
        lead: Option<&Lead>,
    ) -> Result<BTreeMap<String, Option<String>>> {
        let mut proposals: BTreeMap<String, Vec<Merge>> = BTreeMap::new();
        for merge in merges {
            proposals.entry(merge.item.proposal_id.clone()).or_default().push(merge);
        }
        let mut taken = BTreeMap::new();
        for (id, merges) in proposals {
            let patches = merges.iter().map(|merge| merge.counts.1).max().unwrap_or_default();
            match self.merge_level(&id, patches, lead).await {
                // One that does not fit any more must not keep all others from being seen: its files are edits then.
                Err(error @ (ChangeError::Invalid(_) | ChangeError::NotFound { .. } | ChangeError::Internal(_))) => {
                    tracing::error!(
                        proposal = id,
                        error = error.to_string(),
                        "a merged configuration cannot be taken over"
                    );
                    continue;
                }
                other => other?,
            }
            faults::point("review-level");
            for merge in merges {
                let deployment = merge.item.deployment_id.clone();
                let mut attempts = 0;
                let done = loop {
                    attempts += 1;
                    match self.take_merge(&id, &merge, target, lead).await {
                        Err(ChangeError::Store(StoreError::Conflict)) if attempts < ATTEMPTS => {}
                        other => break other,
                    }
                };
                faults::point("review-part");
                match done {
                    Ok(true) => {
                        tracing::info!(
                            proposal = id,
                            deployment,
                            commit = merge.commit.id,
                            "a part of a proposal was merged"
                        );
                        taken.insert(deployment, merge.instance.secrets_file);
                    }
                    Ok(false) => {}
                    // One that cannot be taken over must not keep all others from being seen: it is an edit then.
                    Err(
                        error @ (ChangeError::Invalid(_) | ChangeError::NotFound { .. } | ChangeError::Internal(_)),
                    ) => {
                        tracing::error!(
                            proposal = id,
                            deployment,
                            error = error.to_string(),
                            "what was merged cannot be taken over"
                        );
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        self.wake.review(target);
        self.fan_outs.notify_one();
        Ok(taken)
    }

    /// The configuration that a proposal changes counts from its merge on, as far as its branch had it: so many of its
    /// patches. What was asked since stays in review by itself. What else it concerns is looked at once all of its
    /// parts are taken over.
    pub(super) async fn merge_level(&self, id: &str, count: usize, lead: Option<&Lead>) -> Result<()> {
        for _ in 0..ATTEMPTS {
            let Some(proposal) = self.store.proposal(id).await? else { return Ok(()) };
            let Some((level, subject)) = proposal.subject() else { return Ok(()) };
            if !matches!(proposal.state, ProposalState::Preparing | ProposalState::Open) {
                return Ok(());
            }
            let (patches, left) = proposal.patches.split_at(count.min(proposal.patches.len()));
            let (patches, left) = (patches.to_vec(), left.to_vec());
            let merging = Proposal { patches, ..proposal.clone() };
            let mut cluster = self.cluster(&proposal.cluster_id).await?;
            let mut environment = match level {
                FanOutLevel::Environment => Some(self.environment(subject).await?),
                FanOutLevel::Cluster => None,
            };
            apply_patches(&merging, &mut cluster, environment.as_mut())?;
            let mut fan_out = self.new_fan_out(level, subject, &cluster.id, &proposal.author());
            fan_out.proposal_id = Some(proposal.id.clone());
            let mut rest = None;
            if !left.is_empty() {
                let name = environment.as_ref().map_or(&cluster.name, |row| &row.name);
                let next = self
                    .new_proposal(
                        &cluster.id,
                        name,
                        proposal.title.clone(),
                        proposal.delivery.clone(),
                        &proposal.author(),
                    )
                    .await?;
                let mut looks = self.new_fan_out(level, subject, &cluster.id, &proposal.author());
                looks.proposal_id = Some(next.id.clone());
                let next = Proposal {
                    level: proposal.level.clone(),
                    subject_id: proposal.subject_id.clone(),
                    patches: left,
                    state: ProposalState::Preparing,
                    fan_out_id: Some(looks.id.clone()),
                    ..next
                };
                rest = Some((next, looks));
            }
            let cluster = Some(&cluster).filter(|_| level == FanOutLevel::Cluster);
            let ended_at = Some(self.clock.now());
            let merged = Proposal { state: ProposalState::Merged, message: None, ended_at, ..merging };
            let rest = rest.as_ref().map(|(next, looks)| (next, looks));
            match self.store.merge_level(&merged, cluster, environment.as_ref(), &fan_out, rest, lead).await {
                Err(StoreError::Conflict) => {}
                other => return Ok(other?),
            }
        }
        Err(ChangeError::Busy)
    }

    /// Takes over one part; `false`: its file holds something that is no instance of ours, and is an edit.
    async fn take_merge(&self, proposal: &str, merge: &Merge, target: &Target, lead: Option<&Lead>) -> Result<bool> {
        let Some(proposal) = self.store.proposal(proposal).await? else { return Ok(false) };
        let Merge { item, instance, document, commit, .. } = merge;
        let rows = self.proposed_rows(&proposal, &item.deployment_id).await?;
        if rows.deployment.lifecycle == Lifecycle::Deleting {
            return Ok(false);
        }
        // The branch may have been merged before the newest wish came to it: that one stays in review.
        let is_current = instance.id == item.instance_id;
        let count = if is_current { item.edits.len() } else { merge.counts.0.min(item.edits.len()) };
        let said = ProposalItem { edits: item.edits.iter().take(count).cloned().collect(), ..item.clone() };
        let mut edits = self.edits_of_item(&said).await?;
        let rest = (proposal.level.is_none() && count < item.edits.len()).then(|| Rest {
            edits: count,
            branch: branch_of(&rows.deployment.name),
            merged_id: uuid::Uuid::now_v7().to_string(),
        });
        let mut author = Person { name: instance.author_name.clone(), email: instance.author_email.clone() };
        // What was merged counts, also what somebody committed on top just before.
        let environment: EnvironmentId = super::parse_id("environment", &rows.environment.id)?;
        let content = document.clone().map_or(Content::Absent, Content::Text);
        let files = verdict::Files { document: Some(&content), ..verdict::Files::default() };
        let mut exact = is_current;
        let own = edits.len();
        match verdict::verdict(&environment, instance, None, files) {
            verdict::Verdict::Ours => {}
            verdict::Verdict::Changed { found, beside } => {
                let driver = &rows.deployment.driver_name;
                let expressed = express::express(instance, &found, driver, &self.drivers.catalog());
                exact &= expressed.taken.is_empty() && expressed.refused.is_empty() && !beside;
                if !expressed.taken.is_empty() {
                    edits.push(expressed.edit);
                    author = Person { name: commit.name.clone(), email: commit.email.clone() };
                }
            }
            _ => return Ok(false),
        }
        let now = self.clock.now();
        let merged = |instance_id: Option<String>, tasks: Vec<Task>| MergedItem {
            proposal_id: proposal.id.clone(),
            deployment_id: item.deployment_id.clone(),
            instance_id,
            revision: commit.id.clone(),
            tasks,
            rest: rest.clone(),
            lead: lead.cloned(),
        };
        let last_sequence = rows.deployment.last_sequence;
        if exact && rows.deployment.newest_instance_id == item.base_instance_id {
            let jobs: Vec<JobRun> = edits.iter().flat_map(|edit| edit.jobs.clone()).collect();
            let review = Some(Some(Box::new(instance.clone())));
            let computation = Computation { review, ..self.computation(rows.clone(), edits.clone(), &author) };
            let Computed { mut change, .. } = on_a_thread(move || compute::run(&computation)).await?;
            if change.instance.as_ref().is_some_and(|(found, _)| is_same(instance, found, &jobs)) {
                let mut tasks = Vec::new();
                let by = instance.sequence;
                for mut older in self.store.running_tasks(&item.deployment_id, by).await? {
                    if machine::apply(&mut older, &Event::Superseded { by }, now) {
                        tasks.push(older);
                    }
                }
                let Some(mut task) = self.store.task(&item.task_id).await? else { return Ok(false) };
                machine::apply(&mut task, &Event::Pushed { revision: &commit.id, branch: &target.branch }, now);
                tasks.push(task);
                change.instance = None;
                change.deployment.last_sequence = last_sequence;
                change.deployment.newest_instance_id = Some(instance.id.clone());
                if instance.document.is_some() {
                    change.deployment.state = DeploymentState::Deploying;
                }
                change.merged = Some(merged(Some(instance.id.clone()), tasks));
                self.store.change(&change).await?;
                return Ok(true);
            }
        }
        // Something else came in between: both count, in an instance of their own on top of the merge.
        let again = rows.clone();
        let computation = self.computation(rows.clone(), edits.clone(), &author);
        let computed = match on_a_thread(move || compute::run(&computation)).await {
            // What somebody committed on top is not good: what was reviewed counts, and takes its place.
            Err(ChangeError::Invalid(_)) if edits.len() > own => {
                edits.truncate(own);
                let computation = self.computation(rows, edits, &author);
                on_a_thread(move || compute::run(&computation)).await
            }
            other => other,
        };
        let mut change = computed?.change;
        let is_there = |newest: &Instance| newest.document == *document;
        if change.instance.is_none() && !again.newest.as_ref().is_some_and(is_there) {
            // What counts is the same, and the file says it under another instance's name.
            let computation = self.computation(again, vec![Edit { again: true, ..Edit::default() }], &author);
            change = on_a_thread(move || compute::run(&computation)).await?.change;
        }
        let by = change.instance.as_ref().map_or(last_sequence, |(instance, _)| instance.sequence);
        let superseded = if rest.is_some() { Vec::new() } else { self.superseded(Some(item), by).await? };
        change.merged = Some(merged(None, superseded));
        self.store.change(&change).await?;
        self.wake(target).await;
        Ok(true)
    }

    /// Computes the part of a proposal for some deployments that it concerns; for its fan-out.
    pub(super) async fn propose_chunk(
        &self,
        fan_out: &FanOut,
        proposal: &str,
        deployments: &[String],
    ) -> Result<Vec<(String, std::result::Result<bool, String>)>> {
        for _ in 0..ATTEMPTS {
            let Some(proposal) = self.store.proposal(proposal).await? else { return Ok(Vec::new()) };
            if proposal.state != ProposalState::Preparing {
                // Somebody closed it.
                return Ok(Vec::new());
            }
            let items = self.store.proposal_items(&proposal.id).await?;
            let (mut outcome, mut changes) = (Vec::new(), Vec::new());
            for id in deployments {
                let item = items.iter().find(|item| item.deployment_id == *id && item.state == ItemState::Open);
                match self.propose_one(&proposal, fan_out, id, item).await {
                    Ok(Some(change)) => {
                        changes.push(change);
                        outcome.push((id.clone(), Ok(true)));
                    }
                    Ok(None) => outcome.push((id.clone(), Ok(false))),
                    Err(error) => outcome.push((id.clone(), Err(super::fan_out::of_one(error)?))),
                }
            }
            if changes.is_empty() {
                return Ok(outcome);
            }
            match self.store.propose(&proposal, &changes, Some(fan_out)).await {
                Err(StoreError::Conflict) => {}
                other => {
                    other?;
                    return Ok(outcome);
                }
            }
        }
        Err(ChangeError::Busy)
    }

    async fn propose_one(
        &self,
        proposal: &Proposal,
        fan_out: &FanOut,
        id: &str,
        item: Option<&ProposalItem>,
    ) -> Result<Option<ProposedChange>> {
        let rows = self.proposed_rows(proposal, id).await?;
        let previous = self.instance_of(item).await?;
        let deployment = rows.deployment.clone();
        let base = rows.newest.as_ref().map(|newest| newest.id.clone());
        let edits = match item {
            Some(item) => self.edits_of_item(item).await?,
            None => vec![Edit::default()],
        };
        let review = Some(previous.clone().map(Box::new));
        let computation = Computation { review, ..self.computation(rows, edits, &proposal.author()) };
        let Computed { change, .. } = on_a_thread(move || compute::run(&computation)).await?;
        let Some((instance, task)) = change.instance else { return Ok(None) };
        if previous.is_some_and(|previous| is_same(&previous, &instance, &[])) {
            return Ok(None);
        }
        let task = Task { fan_out_id: Some(fan_out.id.clone()), ..task };
        let change = Change { instance: Some((instance, task)), ..change };
        let edits = item.map(|item| item.edits.clone()).unwrap_or_default();
        self.part_of(proposal, (deployment, base), change, edits, item).await
    }

    /// Every deployment was looked at: people can review the proposal. With nothing to review its configuration
    /// counts at once, unless that is because nothing of it can be computed.
    pub(super) async fn finish_proposing(&self, id: &str, failed: &[(String, String)]) -> Result<()> {
        for _ in 0..ATTEMPTS {
            let Some(proposal) = self.store.proposal(id).await? else { return Ok(()) };
            let items = self.open_items(id).await?;
            if let (true, Some((_, why))) = (items.is_empty(), failed.first()) {
                let message = format!("no deployment can be changed by it: {why}");
                self.end_proposal(id, ProposalState::Closed, &message).await?;
                return Ok(());
            }
            if proposal.state == ProposalState::Preparing {
                let ready = Proposal { state: ProposalState::Open, ..proposal };
                match self.store.propose(&ready, &[], None).await {
                    Err(StoreError::Conflict) => continue,
                    other => other?,
                }
                self.wake.review(&ready.target());
            }
            return self.merge_if_nothing(id).await;
        }
        Err(ChangeError::Busy)
    }

    /// A changed configuration that changes nothing in the repository counts at once: there is nothing to review.
    ///
    /// # Errors
    /// When the database fails, or rows keep moving.
    pub async fn merge_if_nothing(&self, id: &str) -> Result<()> {
        let Some(proposal) = self.store.proposal(id).await? else { return Ok(()) };
        if proposal.state == ProposalState::Open && proposal.level.is_some() && self.open_items(id).await?.is_empty() {
            self.merge_level(id, usize::MAX, None).await?;
            self.fan_outs.notify_one();
        }
        Ok(())
    }

    /// Tells the tasks of a proposal where people review it.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn told_where(&self, scene: &Scene, message: &str) -> Result<()> {
        let mut moved = Vec::new();
        for part in &scene.parts {
            let Some(mut task) = self.store.task(&part.item.task_id).await? else { continue };
            if machine::apply(&mut task, &Event::Proposed { message }, self.clock.now()) {
                moved.push(task);
            }
        }
        match self.store.move_tasks(&moved).await {
            // Another instance took the place of one: the next look tells that.
            Err(StoreError::Conflict) => Ok(()),
            other => Ok(other?),
        }
    }

    /// How the tasks of a proposal ended, by deployment; `None` while one is on its way.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn outcome(&self, proposal: &str) -> Result<Option<Vec<(String, Task)>>> {
        let mut outcome = Vec::new();
        for item in self.store.proposal_items(proposal).await? {
            let Some(task) = self.store.task(&item.task_id).await? else { continue };
            // What took the place of a merged one, because something else came in between, is its outcome.
            if task.state == TaskState::Running {
                return Ok(None);
            }
            let name = self.store.deployment(&item.deployment_id).await?.map_or(item.deployment_id, |row| row.name);
            outcome.push((name, task));
        }
        Ok(Some(outcome))
    }

    /// Which values of a proposal's configuration deployments set themselves, so that it does not change them: a line
    /// for each, and the count of those that are left out beyond `most`.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn overridden(&self, proposal: &Proposal, most: usize) -> Result<(Vec<String>, usize)> {
        let Some((level, subject)) = proposal.subject() else { return Ok((Vec::new(), 0)) };
        let mut pointers = Vec::new();
        for patch in &proposal.patches {
            pointers.extend(config::leaves(&patch.set));
            pointers.extend(patch.remove.iter().cloned());
        }
        let author = proposal.author();
        let probe = self.new_fan_out(level, subject, &proposal.cluster_id, &author);
        let mut environments: BTreeMap<String, Environment> = BTreeMap::new();
        let (mut lines, mut more) = (Vec::new(), 0);
        for known in self.store.concerned(&probe).await? {
            let row = &known.deployment;
            if row.lifecycle == Lifecycle::Deleting {
                continue;
            }
            if !environments.contains_key(&row.environment_id) {
                environments.insert(row.environment_id.clone(), self.environment(&row.environment_id).await?);
            }
            let environment = environments.get(&row.environment_id);
            let mut levels: Vec<(&str, &Object)> = vec![("deployment", &row.config)];
            if let Some(environment) = environment.filter(|_| level == FanOutLevel::Cluster) {
                levels.push(("environment", &environment.config));
            }
            for pointer in &pointers {
                let set = levels.iter().find_map(|(name, config)| Some((name, config::at(config, pointer)?)));
                let Some((name, value)) = set else { continue };
                if lines.len() >= most {
                    more += 1;
                    continue;
                }
                let field = pointer.trim_start_matches('/').replace('/', ".");
                let place = environment.map_or("", |environment| environment.name.as_str());
                lines.push(format!("{place}/{} keeps {field}: {value} (set on the {name})", row.name));
            }
        }
        Ok((lines, more))
    }
}

/// What a look at one part came to.
enum Again {
    Same,
    Other(Box<ProposedChange>),
    Nothing(&'static str),
}

/// By which rules changes are reviewed; `None`: they are not.
pub(super) fn rules_of(
    cluster: &Cluster,
    environment: Option<&Environment>,
    asked: Option<Delivery>,
) -> Option<DeliveryRules> {
    let own = environment.map(|environment| environment.delivery.clone()).unwrap_or_default();
    let rules = DeliveryRules { mode: asked, ..DeliveryRules::default() }.over(own).over(cluster.delivery.clone());
    rules.is_review().then_some(rules)
}

/// The configuration of cluster or environment as a proposal has it, unless it is merged.
pub(super) fn apply_patches(
    proposal: &Proposal,
    cluster: &mut Cluster,
    environment: Option<&mut Environment>,
) -> Result<()> {
    let Some((level, subject)) = proposal.subject() else { return Ok(()) };
    if !matches!(proposal.state, ProposalState::Preparing | ProposalState::Open) {
        return Ok(());
    }
    let (object, level, config) = match (level, environment) {
        (FanOutLevel::Cluster, _) => (format!("cluster \"{}\"", cluster.name), Level::Cluster, &mut cluster.config),
        (FanOutLevel::Environment, Some(row)) if row.id == subject => {
            (format!("environment \"{}\"", row.name), Level::Environment, &mut row.config)
        }
        _ => return Ok(()),
    };
    for patch in &proposal.patches {
        *config = Patch::from(patch).apply(&object, config)?;
    }
    Ok(config::check(&object, level, config)?)
}

/// Whether an instance computed anew asks for what a known one does. Runs of jobs that ended meanwhile are no
/// difference; those that are asked for are.
fn is_same(known: &Instance, found: &Instance, jobs: &[JobRun]) -> bool {
    known.document.is_some() == found.document.is_some()
        && known.secrets_stamp == found.secrets_stamp
        && known.spec.content_digest() == found.spec.content_digest()
        && jobs.iter().all(|job| known.spec.jobs.contains(job))
}

/// An edit as it is kept.
fn proposed(edit: &Edit, said: compute::Said, author: &Person) -> ProposedEdit {
    let secrets = said.sealed.iter().map(|row| {
        let sealed = Sealed { ciphertext: STANDARD.encode(&row.ciphertext), fingerprint: row.fingerprint.clone() };
        (row.name.clone(), sealed)
    });
    ProposedEdit {
        set: edit.config.set.clone(),
        remove: edit.config.remove.clone(),
        parameters: said.plain,
        remove_parameters: edit.remove_parameters.clone(),
        secrets: secrets.collect(),
        driver: edit.driver.as_ref().map(|(driver, version, pin)| ProposedDriver {
            digest: driver.digest.clone(),
            application_version: version.clone(),
            pin: pin.clone(),
        }),
        lifecycle: edit.lifecycle,
        jobs: edit.jobs.clone(),
        restore: edit.restore.as_ref().map(|(old, _)| old.id.clone()),
        again: edit.again,
        delete: edit.delete,
        author: Some(author.clone()),
    }
}

/// A branch for the changes of something.
fn branch_of(name: &str) -> String {
    format!("{BRANCHES}{name}-{}", super::id())
}

/// The first characters of a commit id.
pub(crate) fn short_id(commit: &str) -> &str {
    commit.get(..10).unwrap_or(commit)
}
