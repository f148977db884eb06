//! Rows of proposals: changes that people review before they count.

use super::{
    Cluster, Deployment, Environment, FanOutLevel, Instance, Lead, Lifecycle, Millis, Person, Result, Sealed, Target,
    Task,
};
use async_graphql::{InputObject, SimpleObject};
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use styrmin_renderer::config::{Object, Patch};
use styrmin_renderer::spec::JobRun;

text_enum! {
    /// How a change comes to the branch that Flux follows.
    Delivery {
        /// Committed at once.
        Direct = "direct",
        /// As a request that people review and merge.
        PullRequest = "pullRequest",
    }
}

text_enum! {
    /// How a request is merged.
    MergeMethod {
        /// With a merge commit.
        Merge = "merge",
        /// As one commit.
        Squash = "squash",
        /// Its commits on top of the branch.
        Rebase = "rebase",
    }
}

text_enum! {
    /// Kind of a forge.
    ForgeKind {
        /// Gitea or Forgejo.
        Gitea = "gitea",
        /// GitHub, or GitHub Enterprise.
        Github = "github",
        /// GitLab.
        Gitlab = "gitlab",
    }
}

text_enum! {
    /// Where a proposal is.
    ProposalState {
        /// Its deployments are still looked at.
        Preparing = "preparing",
        /// In review.
        Open = "open",
        /// Merged.
        Merged = "merged",
        /// Closed without a merge, or nothing was left of it.
        Closed = "closed",
    }
}

text_enum! {
    /// Where one deployment's part of a proposal is.
    ItemState {
        /// In review.
        Open = "open",
        /// Merged.
        Merged = "merged",
        /// It will not be.
        Dropped = "dropped",
    }
}

/// How changes come to the branch that Flux follows, as far as one level says; what it does not say comes from the
/// level above. In a change, what is not set stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, SimpleObject, InputObject)]
#[graphql(name = "DeliveryRules", input_name = "DeliveryInput")]
#[serde(default, rename_all = "camelCase")]
pub struct DeliveryRules {
    /// Direct when no level says anything.
    pub mode: Option<Delivery>,
    /// Branch that requests are for; the one that Flux follows when no level says another.
    pub target_branch: Option<String>,
    /// People who shall review.
    pub reviewers: Option<Vec<String>>,
    /// Labels of requests.
    pub labels: Option<Vec<String>>,
    /// Requests begin as drafts.
    pub draft: Option<bool>,
    /// How Styrmin merges.
    pub merge_method: Option<MergeMethod>,
    /// Styrmin merges as soon as the forge says that it may.
    pub auto_merge: Option<bool>,
    /// Approvals that a merge by Styrmin needs; 1 when no level says another number.
    pub approvals: Option<u32>,
}

impl DeliveryRules {
    /// These, and what they leave open from `below`.
    #[must_use]
    pub fn over(self, below: Self) -> Self {
        Self {
            mode: self.mode.or(below.mode),
            target_branch: self.target_branch.or(below.target_branch),
            reviewers: self.reviewers.or(below.reviewers),
            labels: self.labels.or(below.labels),
            draft: self.draft.or(below.draft),
            merge_method: self.merge_method.or(below.merge_method),
            auto_merge: self.auto_merge.or(below.auto_merge),
            approvals: self.approvals.or(below.approvals),
        }
    }

    /// Whether a change goes through a review.
    #[must_use]
    pub fn is_review(&self) -> bool {
        self.mode == Some(Delivery::PullRequest)
    }
}

/// The forge of a cluster's repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgeAddress {
    /// Its kind.
    pub kind: ForgeKind,
    /// Base of its API.
    pub url: String,
    /// The repository on it: `owner/name`.
    pub project: String,
}

/// One wish of somebody, as it is kept until it is merged. Secret values are sealed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProposedEdit {
    /// Merged into the deployment's configuration.
    pub set: Object,
    /// Removed from it.
    pub remove: Vec<String>,
    /// Parameters, the secret ones excepted.
    pub parameters: Object,
    /// Parameters that are given back.
    pub remove_parameters: Vec<String>,
    /// Secret parameters.
    pub secrets: BTreeMap<String, Sealed>,
    /// Another driver version.
    pub driver: Option<ProposedDriver>,
    /// Another lifecycle.
    pub lifecycle: Option<Lifecycle>,
    /// Runs of jobs.
    pub jobs: Vec<JobRun>,
    /// Back to this instance.
    pub restore: Option<String>,
    /// Another attempt of the same content.
    pub again: bool,
    /// The end.
    pub delete: bool,
    /// Who wants it.
    pub author: Option<Person>,
}

/// A driver version that somebody chose.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProposedDriver {
    /// By content.
    pub digest: String,
    /// Version of the application.
    pub application_version: String,
    /// Version that the person insists on.
    pub pin: Option<String>,
}

/// A change of a cluster's or environment's configuration that waits for its merge.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProposedPatch {
    /// Merged into the configuration.
    pub set: Object,
    /// Removed from it.
    pub remove: Vec<String>,
}

impl From<&Patch> for ProposedPatch {
    fn from(patch: &Patch) -> Self {
        Self { set: patch.set.clone(), remove: patch.remove.clone() }
    }
}

impl From<&ProposedPatch> for Patch {
    fn from(patch: &ProposedPatch) -> Self {
        Self { set: patch.set.clone(), remove: patch.remove.clone() }
    }
}

/// Changes that are reviewed together. A patch, not a state: the deployments' rows hold what is merged.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Proposal {
    /// UUID.
    pub id: String,
    /// The cluster.
    pub cluster_id: String,
    /// The repository.
    pub repository: String,
    /// The branch that Flux follows.
    pub branch: String,
    /// The branch that holds the changes.
    pub head_branch: String,
    /// What it is about, in a line.
    pub title: String,
    /// Whose configuration it changes, when it is not about one deployment.
    pub level: Option<String>,
    /// Id of that cluster or environment.
    pub subject_id: Option<String>,
    /// How that configuration changes, in order.
    #[sqlx(json)]
    pub patches: Vec<ProposedPatch>,
    /// The fan-out that looks for its deployments.
    pub fan_out_id: Option<String>,
    /// Rules that it was made by.
    #[sqlx(json)]
    pub delivery: DeliveryRules,
    /// Where it is.
    #[sqlx(try_from = "String")]
    pub state: ProposalState,
    /// The newest commit of its branch that is known with all it holds.
    pub head: Option<String>,
    /// Number of the request on the forge.
    pub number: Option<i64>,
    /// Its page.
    pub url: Option<String>,
    /// Where it is and why it waits, for people.
    pub message: Option<String>,
    /// Digest of the description that the forge has.
    pub described: Option<String>,
    /// The newest comment that was seen.
    pub comment_id: i64,
    /// What came of it was said on the forge.
    pub told: bool,
    /// Counts changes of the row.
    pub version: i64,
    /// Who began it.
    pub author_name: String,
    /// Who began it.
    pub author_email: String,
    /// When.
    pub created_at: Millis,
    /// When it was merged or closed.
    pub ended_at: Option<Millis>,
}

impl Proposal {
    /// Who began it.
    #[must_use]
    pub fn author(&self) -> Person {
        Person { name: self.author_name.clone(), email: self.author_email.clone() }
    }

    /// The repository and the branch that Flux follows.
    #[must_use]
    pub fn target(&self) -> Target {
        Target { repository: self.repository.clone(), branch: self.branch.clone() }
    }

    /// The branch that the request is for.
    #[must_use]
    pub fn base_branch(&self) -> &str {
        self.delivery.target_branch.as_deref().unwrap_or(&self.branch)
    }

    /// Whose configuration it changes.
    #[must_use]
    pub fn subject(&self) -> Option<(FanOutLevel, &str)> {
        let level = FanOutLevel::try_from(self.level.clone()?).ok()?;
        Some((level, self.subject_id.as_deref()?))
    }
}

/// One deployment's part of a proposal.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct ProposalItem {
    /// The proposal.
    pub proposal_id: String,
    /// The deployment.
    pub deployment_id: String,
    /// What people want, in order; empty in a fan-out: what the new configuration leads to.
    #[sqlx(json)]
    pub edits: Vec<ProposedEdit>,
    /// The instance that it comes to.
    pub instance_id: String,
    /// Its task.
    pub task_id: String,
    /// The deployment's newest instance that it was computed from.
    pub base_instance_id: Option<String>,
    /// The instance that the branch holds.
    pub pushed_instance_id: Option<String>,
    /// Where it is.
    #[sqlx(try_from = "String")]
    pub state: ItemState,
}

/// A part of a proposal as its branch held it.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct PushedItem {
    /// The part, as it is now.
    #[sqlx(flatten)]
    pub item: ProposalItem,
    /// The instance that the branch held.
    pub held_instance_id: String,
    /// How many of its edits that one has.
    pub held_edits: i64,
    /// How many of the proposal's patches it has.
    pub held_patches: i64,
}

/// An item as it shall be, with its new instance.
#[derive(Debug, Clone)]
pub struct ProposedChange {
    /// Version of the cluster that it was computed from.
    pub cluster: (String, i64),
    /// Version of the environment that it was computed from.
    pub environment: (String, i64),
    /// The deployment's row as it was read, but for its last sequence. `version` 0: a new one.
    pub deployment: Deployment,
    /// The new instance with its task.
    pub instance: (Instance, Task),
    /// The item.
    pub item: ProposalItem,
    /// The task of the instance whose place it takes, as it is now.
    pub superseded: Vec<Task>,
}

/// A part of a proposal is merged: what the branch that Flux follows holds.
#[derive(Debug, Clone)]
pub struct MergedItem {
    /// The proposal.
    pub proposal_id: String,
    /// The deployment.
    pub deployment_id: String,
    /// The instance that the branch has, when it became the deployment's newest as it is.
    pub instance_id: Option<String>,
    /// The commit that brought it.
    pub revision: String,
    /// Tasks that it moves, as they are now.
    pub tasks: Vec<Task>,
    /// What was asked after the branch was made stays in review.
    pub rest: Option<Rest>,
    /// Who reads: stored only while that one leads.
    pub lead: Option<Lead>,
}

/// What of a deployment's proposal was asked after the branch was made that is merged now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rest {
    /// How many edits are merged: those after them are left.
    pub edits: usize,
    /// The branch that it goes on under.
    pub branch: String,
    /// Id of the proposal that stands for what is merged, with the request.
    pub merged_id: String,
}

/// How a proposal ends, or a part of it.
#[derive(Debug, Clone)]
pub struct ProposalEnd {
    /// The row as it shall be; `version` as read.
    pub proposal: Proposal,
    /// It goes on under another branch and request, with what is left.
    pub anew: bool,
    /// Tasks of the items that will not be merged, as they are now.
    pub tasks: Vec<Task>,
}

/// A status of a commit that the forge shall know.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct StatusDue {
    /// The commit.
    pub commit_id: String,
    /// The deployment.
    pub deployment_id: String,
    /// Its task.
    pub task_id: String,
    /// The cluster.
    pub cluster_id: String,
    /// What the forge was told last.
    pub told: Option<String>,
    /// Times it was tried in vain.
    pub attempts: i64,
    /// Name of the environment.
    pub environment: String,
    /// Name of the deployment.
    pub deployment: String,
    /// State of the task.
    pub task_state: String,
    /// What the task says.
    pub message: Option<String>,
}

/// Which proposals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProposalScope<'a> {
    /// All.
    All,
    /// Of one cluster.
    Cluster(&'a str),
    /// With one deployment.
    Deployment(&'a str),
}

/// The store of proposals.
#[async_trait]
pub trait ReviewStore: Send + Sync {
    /// One proposal.
    async fn proposal(&self, id: &str) -> Result<Option<Proposal>>;
    /// Proposals, newest first, older than an id; with `open` those that are not ended.
    async fn proposals(
        &self,
        scope: ProposalScope<'_>,
        open: bool,
        before: Option<&str>,
        limit: i64,
    ) -> Result<Vec<Proposal>>;
    /// Proposals that are in review, and ended ones whose outcome the forge was not told yet.
    async fn attended_proposals(&self) -> Result<Vec<Proposal>>;
    /// The open proposal of one deployment's own.
    async fn own_proposal(&self, deployment: &str) -> Result<Option<Proposal>>;
    /// The open proposal for the configuration of a cluster or environment.
    async fn proposal_for(&self, level: FanOutLevel, subject: &str) -> Result<Option<Proposal>>;
    /// All items of a proposal, by deployment.
    async fn proposal_items(&self, proposal: &str) -> Result<Vec<ProposalItem>>;
    /// The item that held this instance on its branch, if its proposal is open.
    async fn item_of_instance(&self, instance: &str) -> Result<Option<PushedItem>>;
    /// The open item whose branch ends a deployment.
    async fn item_that_ends(&self, deployment: &str) -> Result<Option<PushedItem>>;
    /// The proposal of a task.
    async fn proposal_of_task(&self, task: &str) -> Result<Option<Proposal>>;
    /// Stores a proposal, new or as it was read, with new instances of its items. Rows that moved, or a proposal that
    /// ended meanwhile: [`super::StoreError::Conflict`].
    async fn propose(
        &self,
        proposal: &Proposal,
        changes: &[ProposedChange],
        fan_out: Option<&super::FanOut>,
    ) -> Result<()>;
    /// Stores what is known of the branch and the request; nothing else of the row. With `pushed` the branch holds
    /// these items as they are. By who leads.
    async fn attend(&self, proposal: &Proposal, pushed: Option<&[ProposalItem]>, lead: &Lead) -> Result<()>;
    /// Writes where a proposal is onto it and onto its tasks' first unfinished steps.
    async fn explain_proposal(&self, id: &str, message: &str) -> Result<()>;
    /// Adds to the timelines.
    async fn observe(&self, rows: &[super::Observation]) -> Result<()>;
    /// Stores tasks as they are now.
    async fn move_tasks(&self, tasks: &[Task]) -> Result<()>;
    /// The configuration that a proposal changes is merged: the row of the cluster or environment (`version` as read)
    /// gets it, the proposal is merged, and a fan-out looks at what else it concerns. What was asked after the branch
    /// was made stays in review, as a proposal with a fan-out of its own.
    async fn merge_level(
        &self,
        proposal: &Proposal,
        cluster: Option<&Cluster>,
        environment: Option<&Environment>,
        fan_out: &super::FanOut,
        rest: Option<(&Proposal, &super::FanOut)>,
        lead: Option<&Lead>,
    ) -> Result<()>;
    /// Ends parts of a proposal, and the proposal when its row says so: a deployment that was never merged is gone.
    async fn end_proposal(&self, end: &ProposalEnd) -> Result<()>;
    /// A commit of a proposal whose tasks' outcome its forge shall know: deployment and task.
    async fn expect_statuses(&self, cluster: &str, commit: &str, tasks: &[(String, String)]) -> Result<()>;
    /// Statuses that the forges do not know yet, of one cluster.
    async fn statuses_due(&self, cluster: &str, limit: i64) -> Result<Vec<StatusDue>>;
    /// Clusters with statuses that are not final yet.
    async fn clusters_with_statuses(&self) -> Result<Vec<String>>;
    /// The forge knows a status now (`told`), or could not be told.
    async fn status_told(&self, row: &StatusDue, told: Option<&str>, is_final: bool) -> Result<()>;
}
