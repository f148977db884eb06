//! Reviews: what is proposed, as a branch in the cluster's repository and a request on its forge.
//!
//! ```text
//! changes (proposals, instances) ──► branch (ours: may be forced, with a lease) ──► request: text, reviewers, labels
//!          ▲                              │ people commit: folded in                    │ merged, closed, comments
//!          └──────────────────────────────┴─────────────────────────────────────────────┘
//! tasks ──► commit statuses, one comment with the outcome
//! ```
//!
//! Works while this process leads, beside the writers, with a copy of each repository of its own: a forge that answers
//! slowly never keeps a direct change waiting. Everything is looked at again and again, and each look does what is
//! missing: so a crash, a lost answer or a webhook that never came costs time only. Whether something is merged says
//! the file on the branch that Flux follows (`changes::edits`), not the forge. What must never enter: what a change
//! means (`changes`); writes to the branch that Flux follows.

mod branch;
mod describe;
pub mod forge;
pub mod webhook;

use crate::changes::{BRANCHES, ChangeError, Changes, Scene, short_id};
use crate::clock::Clock;
use crate::drivers::Drivers;
use crate::faults;
use crate::repository::{Access, Beside, Host, Mirror, Signer, Wake, WriterSettings};
use crate::store::{
    Cluster, ItemState, Lead, Observation, Proposal, ProposalItem, ProposalState, StatusDue, Store, StoreError, Target,
    Task, TaskState, TimelineKind,
};
use anyhow::Context as _;
use async_trait::async_trait;
use forge::{CommitStatus, Connection, Forge, ForgeError, MergeRequest, NewRequest, RequestState, StatusState};
use futures::StreamExt as _;
use git2::Oid;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, error, info, info_span, warn};

pub use describe::{Text, text};

/// Repositories whose proposals are looked at at a time.
const AT_ONCE: usize = 4;
/// How often the outcome of tasks is told to the forges.
const TELL: Duration = Duration::from_secs(2);
/// Pause after a forge that could not be told.
const PAUSE: Duration = Duration::from_secs(60);
/// Statuses that are told in one go.
const STATUSES: i64 = 200;
/// Longest comment of ours.
const COMMENT_MAX: usize = 20_000;
/// Longest comment of somebody that a timeline shows.
const SAID_MAX: usize = 500;

/// All proposals of this server.
pub struct Proposals {
    /// What is known.
    pub store: Arc<dyn Store>,
    /// Computes them, and ends them.
    pub changes: Arc<Changes>,
    /// Driver versions by digest.
    pub drivers: Arc<Drivers>,
    /// Signs commits.
    pub signer: Arc<Signer>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Repositories of this server.
    pub host: Host,
    /// Notices.
    pub wake: Wake,
    /// Settings of the writers: copies, limits, who commits.
    pub settings: WriterSettings,
    /// How often proposals are looked at although nobody told of something.
    pub poll: Duration,
    /// Until when forges want no calls, by the address of their API.
    pub quiet: Mutex<HashMap<String, Instant>>,
}

/// Why a proposal waits.
#[derive(Debug, thiserror::Error)]
enum Waits {
    #[error(transparent)]
    Forge(#[from] ForgeError),
    #[error(transparent)]
    Git(#[from] crate::repository::GitError),
    #[error("{0}")]
    People(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Change(#[from] ChangeError),
    #[error("{0:#}")]
    Other(#[from] anyhow::Error),
}

impl From<git2::Error> for Waits {
    fn from(error: git2::Error) -> Self {
        Self::Other(anyhow::Error::from(error).context("the copy of the repository"))
    }
}

type Result<T> = std::result::Result<T, Waits>;

/// One repository as it is now.
struct Place {
    mirror: Mirror,
    forge: Option<Box<dyn Forge>>,
    /// Address of its API; empty without one.
    forge_url: String,
    /// Tips of the branches that requests are for.
    bases: BTreeMap<String, Oid>,
    /// Tips of the branches of proposals.
    heads: BTreeMap<String, Oid>,
}

#[async_trait]
impl Beside for Proposals {
    async fn run(self: Arc<Self>, lead: Lead, stop: CancellationToken) {
        let telling = tokio::spawn(Arc::clone(&self).tell(stop.clone()));
        let mut copies: HashMap<String, Mirror> = HashMap::new();
        // Which repositories to look at; `None`: all.
        let mut only: Option<BTreeSet<Target>> = None;
        let mut last = Instant::now();
        loop {
            match self.store.attended_proposals().await {
                Ok(found) => {
                    let mut clusters: BTreeMap<String, Vec<Proposal>> = BTreeMap::new();
                    for proposal in found {
                        clusters.entry(proposal.cluster_id.clone()).or_default().push(proposal);
                    }
                    copies.retain(|cluster, _| clusters.contains_key(cluster));
                    let is_asked =
                        |proposal: &Proposal| only.as_ref().is_none_or(|only| only.contains(&proposal.target()));
                    let work: Vec<_> = clusters
                        .into_iter()
                        .filter(|(_, proposals)| proposals.first().is_some_and(is_asked))
                        .map(|(cluster, proposals)| {
                            let span = info_span!("proposals", cluster);
                            let (this, copy, lead) = (Arc::clone(&self), copies.get(&cluster).cloned(), lead.clone());
                            async move {
                                let copy = this.look(&cluster, proposals, copy, &lead).await;
                                (cluster, copy)
                            }
                            .instrument(span)
                        })
                        .collect();
                    let mut done = futures::stream::iter(work).buffer_unordered(AT_ONCE);
                    loop {
                        tokio::select! {
                            // Each step can be cut off.
                            () = stop.cancelled() => break,
                            next = done.next() => match next {
                                Some((cluster, Some(copy))) => drop(copies.insert(cluster, copy)),
                                Some((cluster, None)) => drop(copies.remove(&cluster)),
                                None => break,
                            },
                        }
                    }
                }
                Err(error) => error!(%error, "proposals cannot be read"),
            }
            if only.is_none() {
                last = Instant::now();
            }
            only = tokio::select! {
                () = stop.cancelled() => break,
                targets = self.wake.reviews() => Some(targets),
                () = tokio::time::sleep_until(last + self.poll) => None,
            };
        }
        let _ = telling.await;
    }
}

impl Proposals {
    /// Looks at the proposals of one cluster; gives the copy of its repository back.
    async fn look(&self, cluster: &str, proposals: Vec<Proposal>, copy: Option<Mirror>, lead: &Lead) -> Option<Mirror> {
        // Those that requests are for, and the one that Flux follows.
        let branches = |proposal: &Proposal| [proposal.base_branch().to_owned(), proposal.branch.clone()];
        let bases = proposals.iter().flat_map(branches).collect();
        let place = match self.place(cluster, copy, bases).await {
            Ok(place) => place,
            Err(error) => {
                for proposal in &proposals {
                    self.explain(proposal, &error).await;
                }
                return None;
            }
        };
        for proposal in &proposals {
            if let Err(error) = self.leftovers(&place, proposal).await {
                self.explain(proposal, &error).await;
                continue;
            }
            // Whoever shares the forge waits with who was told to.
            if self.is_quiet(&place.forge_url) {
                continue;
            }
            if let Err(error) = self.attend(&place, proposal, lead).await {
                if let Waits::Store(StoreError::Fenced) = error {
                    return None;
                }
                if let Waits::Forge(ForgeError::Limited { wait, .. }) = &error {
                    self.keep_quiet(&place.forge_url, *wait);
                }
                self.explain(proposal, &error).await;
            }
        }
        Some(place.mirror)
    }

    fn is_quiet(&self, forge: &str) -> bool {
        let quiet = self.quiet.lock().unwrap_or_else(PoisonError::into_inner);
        quiet.get(forge).is_some_and(|until| *until > Instant::now())
    }

    fn keep_quiet(&self, forge: &str, wait: Duration) {
        let mut quiet = self.quiet.lock().unwrap_or_else(PoisonError::into_inner);
        quiet.insert(forge.to_owned(), Instant::now() + wait);
    }

    /// Says on a proposal and its tasks why it waits.
    async fn explain(&self, proposal: &Proposal, error: &Waits) {
        let message = match error {
            Waits::People(message) => message.clone(),
            // Somebody changed the same rows: it is looked at again.
            Waits::Store(StoreError::Conflict)
            | Waits::Change(ChangeError::Busy | ChangeError::Store(StoreError::Conflict)) => {
                self.wake.review(&proposal.target());
                return;
            }
            other => {
                warn!(proposal = proposal.id, error = other.to_string(), "a proposal waits");
                format!("Waiting: {other}; trying again")
            }
        };
        if proposal.state == ProposalState::Open {
            self.say(proposal, &message).await;
        }
    }

    async fn say(&self, proposal: &Proposal, message: &str) {
        if proposal.message.as_deref() == Some(message) {
            return;
        }
        if let Err(error) = self.store.explain_proposal(&proposal.id, message).await {
            error!(%error, "a proposal cannot be told why it waits");
        }
    }

    /// The repository and forge of a cluster, as they are now.
    async fn place(&self, cluster: &str, copy: Option<Mirror>, bases: BTreeSet<String>) -> Result<Place> {
        let cluster = self.store.cluster(cluster).await?.context("its cluster is gone")?;
        let (access, token, _) = self.changes.way_in(&cluster)?;
        let forge = connect(&cluster, &access, token.as_deref())?;
        let remote = self.host.remote(&cluster, access).await?;
        let mirror = match copy {
            Some(mut mirror) => {
                mirror.set_remote(remote);
                mirror
            }
            None => {
                let path = self.settings.mirrors.join(format!("{}-review.git", cluster.id));
                let (branch, limit) = (cluster.branch.clone(), self.settings.git_limit);
                let opened = spawn_blocking(move || Mirror::open(path, remote, branch, limit));
                opened.await.context("the copy could not be opened")??
            }
        };
        let (bases, heads) = mirror.fetch_branches(&bases, BRANCHES).await?;
        let forge_url = cluster.forge.map(|forge| forge.url).unwrap_or_default();
        Ok(Place { mirror, forge, forge_url, bases, heads })
    }

    /// Does for one proposal what is missing.
    async fn attend(&self, place: &Place, proposal: &Proposal, lead: &Lead) -> Result<()> {
        if proposal.ended_at.is_some() {
            return self.after(place, proposal, lead).await;
        }
        let Some(mut scene) = self.changes.scene(&proposal.id).await? else { return Ok(()) };
        if scene.proposal.ended_at.is_some() {
            return Ok(());
        }
        if scene.proposal.level.is_some() && scene.parts.is_empty() {
            return Ok(self.changes.merge_if_nothing(&proposal.id).await?);
        }
        let base = *place
            .bases
            .get(proposal.base_branch())
            .ok_or_else(|| Waits::People(format!("Waiting: the branch \"{}\" is not there", proposal.base_branch())))?;
        let head = place.heads.get(&proposal.head_branch).copied();
        let request = self.request(place, &scene.proposal).await?;
        if let Some(request) = &request
            && self.has_ended(place, &scene, request, base).await?
        {
            return Ok(());
        }
        // What others committed is taken over first: what is computed below is based on it.
        if proposal.base_branch() == proposal.branch && !self.is_read(place, &scene.proposal, base).await? {
            self.wake.look(&proposal.target());
            return Ok(());
        }
        // The forge may close the request later (Gitea), or leave it open (GitLab); `after` sees to it.
        if head.is_none() && scene.proposal.head.is_some() {
            let pushed = scene.proposal.head.as_deref();
            let is_there = branch::contains(&place.mirror, base, pushed).await?
                || branch::is_merged(&place.mirror, &scene, base).await?;
            if is_there && proposal.base_branch() == proposal.branch {
                // All that was recognised is taken over.
                return Ok(self.changes.end_merged(&proposal.id).await?);
            }
            if is_there {
                let (into, flux) = (proposal.base_branch(), &proposal.branch);
                return Err(Waits::People(format!("It was merged into {into}; it counts when it comes to {flux}")));
            }
            let message = "its branch was deleted without a merge";
            info!(proposal = proposal.id, message, "rejected");
            self.observe(&scene, "Closed", message).await?;
            self.changes.end_proposal(&proposal.id, ProposalState::Closed, message).await?;
            return Ok(());
        }
        let look = branch::look(&place.mirror, &scene, base, head).await?;
        let anew = look.conflicts;
        let refreshed = self.changes.refresh(&scene, &look.commits, anew).await?;
        if refreshed.changed {
            match self.changes.scene(&proposal.id).await? {
                Some(next) if next.proposal.ended_at.is_none() => scene = next,
                _ => return Ok(()),
            }
        }
        if !refreshed.failed.is_empty() {
            // As it is it would take back what was changed since.
            let why = [refreshed.failed, refreshed.refused].concat().join("; ");
            return Err(Waits::People(format!("Waiting: {why}")));
        }
        self.push(place, &mut scene, (base, head, anew), lead).await?;
        let mut notes: Vec<String> = refreshed.refused.iter().map(|text| format!("not taken over: {text}")).collect();
        if anew && !look.others.is_empty() {
            notes.push(format!(
                "the branch was built anew on {}, without what others committed to {}",
                proposal.base_branch(),
                look.others.join(", ")
            ));
        }
        if let (Some(forge), Some(request), false) = (&place.forge, &request, notes.is_empty()) {
            forge.comment(request.number, &limited(&format!("- {}", notes.join("\n- ")), COMMENT_MAX)).await?;
        }
        let Some(forge) = &place.forge else {
            let at = scene.proposal.head_branch.clone();
            let message = format!("In review: merge the branch {at} into {}", proposal.base_branch());
            self.changes.told_where(&scene, &format!("Branch {at}")).await?;
            self.say(&scene.proposal, &message).await;
            return Ok(());
        };
        let request = self.open(forge.as_ref(), &mut scene, request, lead).await?;
        self.describe(forge.as_ref(), &mut scene, lead).await?;
        self.hear(forge.as_ref(), &mut scene, &request, lead).await?;
        let waits = self.merge_if_it_may(forge.as_ref(), &scene, &request).await?;
        let message = format!("In review: pull request #{} ({}){waits}", request.number, request.url);
        self.say(&scene.proposal, &message).await;
        Ok(())
    }

    /// Whether everything up to this commit was read from the branch that Flux follows.
    async fn is_read(&self, place: &Place, proposal: &Proposal, tip: Oid) -> Result<bool> {
        let head = self.store.head(&proposal.target()).await?;
        match head.and_then(|(head, _)| Oid::from_str(&head).ok()) {
            Some(head) => Ok(head == tip || branch::is_later(&place.mirror, head, tip).await?),
            None => Ok(false),
        }
    }

    /// What a merge left of a proposal ends, whatever the forge does: other fan-outs wait for it.
    async fn leftovers(&self, place: &Place, proposal: &Proposal) -> Result<()> {
        if proposal.state != ProposalState::Merged {
            return Ok(());
        }
        let items = self.store.proposal_items(&proposal.id).await?;
        // The branch was fetched after the proposal was read: with this tip read, all that was merged is taken.
        if items.iter().any(|item| item.state == ItemState::Open)
            && let Some(base) = place.bases.get(&proposal.branch)
            && self.is_read(place, proposal, *base).await?
        {
            self.changes.end_merged(&proposal.id).await?;
        }
        Ok(())
    }

    /// The request, as the forge shows it; `None`: it was not opened yet.
    async fn request(&self, place: &Place, proposal: &Proposal) -> Result<Option<MergeRequest>> {
        let Some(forge) = &place.forge else { return Ok(None) };
        match proposal.number {
            Some(number) => Ok(Some(forge.get(number).await?)),
            None => Ok(None),
        }
    }

    /// What follows from a request that was merged or closed.
    async fn has_ended(&self, place: &Place, scene: &Scene, request: &MergeRequest, base: Oid) -> Result<bool> {
        let proposal = &scene.proposal;
        let by = request.by.as_ref().map(|by| format!(" by {by}")).unwrap_or_default();
        match request.state {
            RequestState::Open => Ok(false),
            RequestState::Closed => {
                // Somebody may have brought the commits to the branch without the forge.
                if branch::is_merged(&place.mirror, scene, base).await? {
                    if proposal.base_branch() == proposal.branch && self.is_read(place, proposal, base).await? {
                        self.changes.end_merged(&proposal.id).await?;
                    } else {
                        self.wake.look(&proposal.target());
                    }
                    return Ok(true);
                }
                let message = format!("pull request #{} was closed{by} without a merge", request.number);
                info!(proposal = proposal.id, message, "rejected");
                self.observe(scene, "Closed", &message).await?;
                self.changes.end_proposal(&proposal.id, ProposalState::Closed, &message).await?;
                Ok(true)
            }
            RequestState::Merged => {
                if request.base != proposal.branch {
                    let message = format!(
                        "Pull request #{} was merged{by} into {}; it counts when it comes to {}",
                        request.number, request.base, proposal.branch
                    );
                    self.say(proposal, &message).await;
                    return Ok(true);
                }
                let contains = branch::contains(&place.mirror, base, request.merge_commit.as_deref()).await?;
                if contains && self.is_read(place, proposal, base).await? {
                    // All that was recognised is taken over.
                    self.changes.end_merged(&proposal.id).await?;
                } else {
                    self.say(proposal, &format!("Pull request #{} was merged{by}", request.number)).await;
                    self.wake.look(&proposal.target());
                }
                Ok(true)
            }
        }
    }

    /// Brings the branch to what the proposal says.
    async fn push(
        &self,
        place: &Place,
        scene: &mut Scene,
        (base, head, anew): (Oid, Option<Oid>, bool),
        lead: &Lead,
    ) -> Result<()> {
        let due = |scene: &Scene| {
            scene.parts.iter().any(|part| part.item.pushed_instance_id.as_ref() != Some(&part.item.instance_id))
        };
        if !anew && !due(scene) && head.is_some() {
            if scene.proposal.head != head.map(|head| head.to_string()) {
                // Others' commits that change nothing of ours, such as a merge of the base.
                scene.proposal.head = head.map(|head| head.to_string());
                self.store.attend(&scene.proposal, None, lead).await?;
            }
            return Ok(());
        }
        let onto = head.filter(|_| !anew).unwrap_or(base);
        let catalog = self.catalog(scene).await?;
        let commit = branch::commit(self, &place.mirror, scene, onto, catalog).await?;
        if let Some(commit) = commit {
            place.mirror.push_branch(commit, &scene.proposal.head_branch, head).await?;
            faults::point("review-pushed");
            info!(proposal = scene.proposal.id, commit = commit.to_string(), "pushed for review");
            self.observe(
                scene,
                "Proposed",
                &format!("Commit {} on {}", short_id(&commit.to_string()), scene.proposal.head_branch),
            )
            .await?;
        }
        // Without a commit an earlier push had all of it, and its answer was lost.
        scene.proposal.head = commit.or(head).map(|head| head.to_string());
        let pushed: Vec<ProposalItem> = scene.parts.iter().map(|part| part.item.clone()).collect();
        self.store.attend(&scene.proposal, Some(&pushed), lead).await?;
        faults::point("review-recorded");
        for part in &mut scene.parts {
            part.item.pushed_instance_id = Some(part.item.instance_id.clone());
        }
        Ok(())
    }

    async fn catalog(&self, scene: &Scene) -> Result<Arc<crate::drivers::Catalog>> {
        let catalog = self.drivers.catalog();
        let knows = |part: &crate::changes::Part| catalog.by_digest.contains_key(&part.instance.spec.driver.digest);
        if scene.parts.iter().all(knows) {
            return Ok(catalog);
        }
        // Another replica loaded it.
        self.drivers.reload().await?;
        Ok(self.drivers.catalog())
    }

    /// Opens the request, once: one of this branch is the one.
    async fn open(
        &self,
        forge: &dyn Forge,
        scene: &mut Scene,
        request: Option<MergeRequest>,
        lead: &Lead,
    ) -> Result<MergeRequest> {
        if let Some(request) = request {
            if scene.proposal.described.is_none() {
                // Opened, and then something went wrong.
                self.dress(forge, scene, request.number).await?;
            }
            self.changes.told_where(scene, &format!("Pull request #{}: {}", request.number, request.url)).await?;
            return Ok(request);
        }
        let proposal = &scene.proposal;
        let request = match forge.find(&proposal.head_branch).await? {
            Some(found) => found,
            None => {
                let text = self.text(scene, forge.text_max()).await?;
                let rules = &proposal.delivery;
                let new = NewRequest {
                    head: proposal.head_branch.clone(),
                    base: proposal.base_branch().to_owned(),
                    title: text.title.clone(),
                    body: text.body.clone(),
                    draft: rules.draft.unwrap_or_default(),
                };
                let opened = forge.open(&new).await?;
                faults::point("review-opened");
                info!(proposal = proposal.id, number = opened.number, url = opened.url, "opened");
                opened
            }
        };
        scene.proposal.number = Some(request.number);
        scene.proposal.url = Some(request.url.clone());
        self.store.attend(&scene.proposal, None, lead).await?;
        faults::point("review-told");
        self.dress(forge, scene, request.number).await?;
        let message = format!("Pull request #{}: {}", request.number, request.url);
        self.observe(scene, "In review", &message).await?;
        self.changes.told_where(scene, &message).await?;
        Ok(request)
    }

    /// Asks for reviewers and labels; what the forge does not know is told. It can be done again.
    async fn dress(&self, forge: &dyn Forge, scene: &Scene, number: i64) -> Result<()> {
        let rules = &scene.proposal.delivery;
        let (reviewers, labels) = (rules.reviewers.as_deref(), rules.labels.as_deref());
        let notes = forge.dress(number, reviewers.unwrap_or_default(), labels.unwrap_or_default()).await?;
        if !notes.is_empty() {
            self.observe(scene, "Opened in part", &notes.join("; ")).await?;
        }
        Ok(())
    }

    /// Title and description.
    ///
    /// # Errors
    /// When the database fails.
    async fn text(&self, scene: &Scene, most: usize) -> Result<Text> {
        let public = self.settings.public_url.trim_end_matches('/');
        Ok(describe::text(&self.changes, scene, public, most).await?)
    }

    /// Keeps the description what the change is.
    async fn describe(&self, forge: &dyn Forge, scene: &mut Scene, lead: &Lead) -> Result<()> {
        let Some(number) = scene.proposal.number else { return Ok(()) };
        let text = self.text(scene, forge.text_max()).await?;
        let digest = text.digest();
        if scene.proposal.described.as_ref() == Some(&digest) {
            return Ok(());
        }
        forge.describe(number, &text.title, &text.body).await?;
        scene.proposal.described = Some(digest);
        Ok(self.store.attend(&scene.proposal, None, lead).await?)
    }

    /// Takes what people say below the request into the timelines.
    async fn hear(&self, forge: &dyn Forge, scene: &mut Scene, request: &MergeRequest, lead: &Lead) -> Result<()> {
        let comments = forge.comments(request.number, scene.proposal.comment_id).await?;
        let Some(last) = comments.last().map(|comment| comment.id) else { return Ok(()) };
        for comment in &comments {
            let said = limited(&comment.text, SAID_MAX);
            self.observe(scene, "Comment", &format!("{}: {said}", comment.author)).await?;
        }
        scene.proposal.comment_id = last;
        Ok(self.store.attend(&scene.proposal, None, lead).await?)
    }

    async fn observe(&self, scene: &Scene, title: &str, message: &str) -> Result<()> {
        let row = |part: &crate::changes::Part| Observation {
            id: uuid::Uuid::now_v7().to_string(),
            deployment_id: part.deployment.id.clone(),
            at: self.clock.now(),
            kind: TimelineKind::Review,
            title: title.to_owned(),
            message: Some(message.to_owned()),
        };
        Ok(self.store.observe(&scene.parts.iter().map(row).collect::<Vec<_>>()).await?)
    }

    /// Merges when Styrmin shall and the forge says that it may; otherwise says what it waits for.
    async fn merge_if_it_may(&self, forge: &dyn Forge, scene: &Scene, request: &MergeRequest) -> Result<String> {
        let rules = &scene.proposal.delivery;
        if !rules.auto_merge.unwrap_or_default() {
            return Ok(String::new());
        }
        if scene.proposal.head.as_deref() != Some(&request.head) {
            return Ok("; the forge does not show its newest commit yet".to_owned());
        }
        if let Err(why) = forge.readiness(request, rules.approvals.unwrap_or(1)).await? {
            return Ok(format!("; {why}"));
        }
        match forge.merge(request, rules.merge_method).await {
            Ok(()) => {
                info!(proposal = scene.proposal.id, number = request.number, "merged");
                self.wake.look(&scene.proposal.target());
                Ok("; merged".to_owned())
            }
            // Its base moved, or a rule of the branch is not met: the next look tries again.
            Err(ForgeError::NotYet(why)) => Ok(format!("; {why}")),
            Err(error) => Err(error.into()),
        }
    }

    /// What is left to do for a proposal that has ended.
    async fn after(&self, place: &Place, proposal: &Proposal, lead: &Lead) -> Result<()> {
        let items = self.store.proposal_items(&proposal.id).await?;
        if items.iter().any(|item| item.state == ItemState::Open) {
            return Ok(());
        }
        // At once, so that nobody reviews it any more; what came of it is said when it is known.
        let request = match (&place.forge, self.request(place, proposal).await?) {
            // One whose answer was lost is not known by its number.
            (Some(forge), None) if proposal.head.is_some() => forge.find(&proposal.head_branch).await?,
            (_, request) => request,
        };
        if let (Some(forge), Some(request)) = (&place.forge, &request) {
            if request.state == RequestState::Open {
                forge.close(request.number).await?;
            }
            if let Some(commit) = &request.merge_commit {
                let merged = items.iter().filter(|item| item.state == ItemState::Merged);
                let tasks: Vec<_> = merged.map(|item| (item.deployment_id.clone(), item.task_id.clone())).collect();
                self.store.expect_statuses(&proposal.cluster_id, commit, &tasks).await?;
            }
        }
        let known = proposal.head.as_ref().and_then(|head| Oid::from_str(head).ok());
        if let Some(head) = place.heads.get(&proposal.head_branch)
            && known == Some(*head)
        {
            // Its work is done. Whoever committed there since keeps it.
            if let Err(error) = place.mirror.delete_branch(&proposal.head_branch, *head).await {
                warn!(proposal = proposal.id, %error, "its branch stays");
            }
        }
        let Some(outcome) = self.changes.outcome(&proposal.id).await? else { return Ok(()) };
        if let (Some(forge), Some(request)) = (&place.forge, &request) {
            forge.comment(request.number, &outcome_text(proposal, &outcome)).await?;
        }
        let told = Proposal { told: true, ..proposal.clone() };
        Ok(self.store.attend(&told, None, lead).await?)
    }

    /// Tells the forges what commits came to, until `stop`.
    async fn tell(self: Arc<Self>, stop: CancellationToken) {
        let mut paused: HashMap<String, Instant> = HashMap::new();
        loop {
            match self.store.clusters_with_statuses().await {
                Ok(clusters) => {
                    paused.retain(|_, until| *until > Instant::now());
                    let due: Vec<String> =
                        clusters.into_iter().filter(|cluster| !paused.contains_key(cluster)).collect();
                    for cluster in due {
                        tokio::select! {
                            () = stop.cancelled() => return,
                            told = self.tell_cluster(&cluster) => {
                                if let Err(error) = told {
                                    // Its reviews go on: that the one is refused says nothing about the other.
                                    paused.insert(cluster.clone(), Instant::now() + PAUSE);
                                    warn!(cluster, error = error.to_string(), "commit statuses wait");
                                }
                            }
                        }
                    }
                }
                Err(error) => error!(%error, "commit statuses cannot be read"),
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(TELL) => {}
            }
        }
    }

    async fn tell_cluster(&self, cluster: &str) -> Result<()> {
        let due = self.store.statuses_due(cluster, STATUSES).await?;
        if due.is_empty() {
            return Ok(());
        }
        let row = self.store.cluster(cluster).await?.context("its cluster is gone")?;
        let (access, token, _) = self.changes.way_in(&row)?;
        let Some(forge) = connect(&row, &access, token.as_deref())? else { return Ok(()) };
        let forge_url = row.forge.as_ref().map(|forge| forge.url.clone()).unwrap_or_default();
        if self.is_quiet(&forge_url) {
            return Ok(());
        }
        let (mut told, mut refused) = (0, None);
        for status in due {
            if self.is_quiet(&forge_url) {
                return Ok(());
            }
            let said = commit_status(&row, &status, self.settings.public_url.trim_end_matches('/'));
            let is_final = said.state != StatusState::Pending;
            match forge.status(&status.commit_id, &said).await {
                Ok(()) => {
                    told += 1;
                    self.store.status_told(&status, Some(&status.task_state), is_final).await?;
                }
                Err(ForgeError::Limited { wait, message }) => {
                    self.keep_quiet(&forge_url, wait);
                    return Err(ForgeError::Limited { wait, message }.into());
                }
                // What is wrong with this commit alone: it is not there any more, for example.
                Err(error @ (ForgeError::NotFound(_) | ForgeError::Refused { status: 400 | 409 | 422, .. })) => {
                    warn!(commit = status.commit_id, %error, "the forge does not take a commit status");
                    self.store.status_told(&status, None, false).await?;
                    refused = Some(error);
                }
                // A token that has run out, a repository that was renamed: it is told when that is mended.
                Err(error) => return Err(error.into()),
            }
        }
        match refused {
            // When nothing is taken, it is rather the token than each commit.
            Some(error) if told == 0 => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// The forge of a cluster, if it has one.
fn connect(cluster: &Cluster, access: &Access, token: Option<&str>) -> Result<Option<Box<dyn Forge>>> {
    use crate::store::ForgeKind;
    let Some(address) = &cluster.forge else { return Ok(None) };
    let token = token.unwrap_or_default();
    let header = match address.kind {
        ForgeKind::Gitea => ("authorization", format!("token {token}")),
        ForgeKind::Github => ("authorization", format!("Bearer {token}")),
        ForgeKind::Gitlab => ("private-token", token.to_owned()),
    };
    let connection = Connection::new(&address.url, &address.project, (header.0, &header.1), access);
    Ok(Some(forge::forge(address.kind, connection.map_err(anyhow::Error::msg)?)))
}

/// What a commit came to, as far as one deployment is concerned.
fn commit_status(cluster: &Cluster, row: &StatusDue, public: &str) -> CommitStatus {
    let (state, description) = match TaskState::try_from(row.task_state.clone()) {
        Ok(TaskState::Running) | Err(_) => (StatusState::Pending, "on its way to the cluster".to_owned()),
        Ok(TaskState::Succeeded) => (StatusState::Success, "runs".to_owned()),
        Ok(TaskState::Failed) => (StatusState::Failure, row.message.clone().unwrap_or_else(|| "failed".to_owned())),
        Ok(TaskState::Superseded) => {
            (StatusState::Error, row.message.clone().unwrap_or_else(|| "superseded".to_owned()))
        }
        Ok(TaskState::Rejected) => (StatusState::Error, row.message.clone().unwrap_or_else(|| "not merged".to_owned())),
    };
    CommitStatus {
        state,
        context: format!("styrmin/{}/{}/{}", cluster.name, row.environment, row.deployment),
        description,
        url: format!("{public}/#/tasks/{}", row.task_id),
    }
}

/// What came of a proposal, for those who reviewed it.
fn outcome_text(proposal: &Proposal, outcome: &[(String, Task)]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (_, task) in outcome {
        *counts.entry(task.state.as_str()).or_default() += 1;
    }
    let counted: Vec<String> = counts.iter().map(|(state, count)| format!("{count} {state}")).collect();
    let mut text = match (proposal.state, counted.is_empty()) {
        (ProposalState::Merged, true) => "Done.".to_owned(),
        (ProposalState::Merged, false) => format!("Rolled out: {}.", counted.join(", ")),
        _ => format!("Not merged: {}.", proposal.message.as_deref().unwrap_or("it was closed")),
    };
    if proposal.state == ProposalState::Merged {
        text.push('\n');
        for (name, task) in outcome {
            let state = if task.state == TaskState::Succeeded { "runs" } else { task.state.as_str() };
            let why = task.message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
            text.push_str(&format!("\n- **{name}** {state}{why}"));
        }
    }
    limited(&text, COMMENT_MAX)
}

/// A text that is no longer than `most` characters.
fn limited(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
