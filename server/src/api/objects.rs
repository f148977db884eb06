//! GraphQL objects over the rows. What a row refers to is read when it is asked for.

use super::error::{change as refused, inner, store as failed};
use super::{Api, graphql};
use crate::changes;
use crate::clock::timestamp;
use crate::doctor::Check;
use crate::proposals;
use crate::reports::{self, DeploymentStatus, FluxStatus, PodStatus};
use crate::repository;
use crate::store::{
    self, DeliveryRules, DeploymentState, EditKind, EditPolicy, EditScope, EditState, FanOutLevel, FanOutState,
    ForgeKind, InstanceState, ItemState, LastReport, Lifecycle, Millis, ProposalScope, ProposalState, Snapshot,
    StatusScope, StepState, TaskScope, TaskState, TimelineKind,
};
use crate::tasks::machine;
use async_graphql::{ComplexObject, Context, Enum, ID, Json, Object, OutputType, Result, SimpleObject};
use serde_json::Value;
use std::sync::Arc;
use styrmin_renderer::config::{self, Level};
use styrmin_renderer::{diff, driver};

/// RFC 3339, in UTC.
pub(super) fn time(millis: Millis) -> String {
    timestamp(millis).to_string()
}

/// Where a list goes on.
#[derive(SimpleObject)]
pub(super) struct PageInfo {
    /// Whether there is more.
    pub(super) has_next_page: bool,
    /// Hand it back as `after` for the next page.
    pub(super) end_cursor: Option<String>,
}

/// Most deployments that an object of Flux names.
const HELD_UP_MAX: usize = 100;

/// One page of a list.
#[derive(SimpleObject)]
#[graphql(concrete(name = "ClusterPage", params(Cluster)))]
#[graphql(concrete(name = "EnvironmentPage", params(Environment)))]
#[graphql(concrete(name = "DeploymentPage", params(Deployment)))]
#[graphql(concrete(name = "InstancePage", params(Instance)))]
#[graphql(concrete(name = "TaskPage", params(Task)))]
#[graphql(concrete(name = "FanOutPage", params(FanOut)))]
#[graphql(concrete(name = "TimelinePage", params(TimelineEntry)))]
#[graphql(concrete(name = "EditPage", params(Edit)))]
#[graphql(concrete(name = "ProposalPage", params(Proposal)))]
#[graphql(concrete(name = "PodStatusPage", params(PodStatus)))]
#[graphql(concrete(name = "DeploymentStatusPage", params(DeploymentStatus)))]
#[graphql(concrete(name = "FluxStatusPage", params(FluxStatus)))]
pub(super) struct Page<T: OutputType> {
    /// The objects.
    pub(super) nodes: Vec<T>,
    /// Where it goes on.
    pub(super) page_info: PageInfo,
}

/// A Kubernetes cluster and its repository.
pub(super) struct Cluster(pub(super) store::Cluster);

#[Object]
impl Cluster {
    async fn id(&self) -> ID {
        ID(self.0.id.clone())
    }
    async fn name(&self) -> &str {
        &self.0.name
    }
    /// Configuration of this level.
    async fn config(&self) -> Json<&config::Object> {
        Json(&self.0.config)
    }
    /// URL of its repository; null: hosted by this server at `/git/<name>.git`.
    async fn git_url(&self) -> Option<&str> {
        self.0.git_url.as_deref()
    }
    async fn branch(&self) -> &str {
        &self.0.branch
    }
    /// Its folder in the repository.
    async fn path(&self) -> &str {
        &self.0.path
    }
    /// age recipient that secrets are encrypted for.
    async fn age_recipient(&self) -> Option<&str> {
        self.0.age_recipients.first().map(String::as_str)
    }
    /// All of them.
    async fn age_recipients(&self) -> &[String] {
        &self.0.age_recipients
    }
    /// For which age recipients Flux can decrypt there, as the agent says; null: it never did.
    async fn decrypts(&self, ctx: &Context<'_>) -> Result<Option<Vec<String>>> {
        ctx.data::<Api>()?.store.recipients(&self.0.id).await.map_err(failed)
    }
    /// What is done about what people change in its repository.
    async fn edit_policy(&self) -> EditPolicy {
        self.0.edit_policy
    }
    /// How many removals at once are taken over without asking.
    async fn removal_threshold(&self) -> i64 {
        self.0.removal_threshold
    }
    /// How changes come to the branch that Flux follows.
    async fn delivery(&self) -> &DeliveryRules {
        &self.0.delivery
    }
    /// The forge of its repository.
    async fn forge(&self) -> Option<RepositoryForge> {
        let forge = self.0.forge.as_ref()?;
        Some(RepositoryForge { kind: forge.kind, url: forge.url.clone(), project: forge.project.clone() })
    }
    /// Changes of it that people review, newest first; with `open` only those that wait for a merge.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn proposals(
        &self,
        ctx: &Context<'_>,
        #[graphql(default)] open: bool,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<Proposal>> {
        graphql::proposals(ctx, ProposalScope::Cluster(&self.0.id), open, first, after).await
    }
    /// What people changed in its repository, newest first; with `open` only what waits for a decision.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn edits(
        &self,
        ctx: &Context<'_>,
        #[graphql(default)] open: bool,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<Edit>> {
        let scope = if open { EditScope::Open(&self.0.id) } else { EditScope::Cluster(&self.0.id) };
        graphql::edits(ctx, scope, first, after).await
    }
    async fn created_at(&self) -> String {
        time(self.0.created_at)
    }
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn environments(
        &self,
        ctx: &Context<'_>,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<Environment>> {
        graphql::environments(ctx, Some(&self.0.id), first, after).await
    }
    /// Its changed configurations on their way to the deployments, newest first.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn fan_outs(&self, ctx: &Context<'_>, first: Option<i32>, after: Option<String>) -> Result<Page<FanOut>> {
        graphql::fan_outs(ctx, &self.0.id, first, after).await
    }
    /// Every link between this server and the cluster, in the order in which a change passes them, with what to do
    /// about one that is broken. Looks at the repository.
    #[graphql(complexity = "10_000 + child_complexity")]
    async fn checks(&self, ctx: &Context<'_>) -> Result<Vec<Check>> {
        ctx.data::<Api>()?.doctor.examine(&self.0).await.map_err(inner)
    }
    /// The release of its agent that its repository carries; null: none.
    async fn agent_release(&self, ctx: &Context<'_>) -> Result<Option<AgentRelease>> {
        let found = ctx.data::<Api>()?.store.agent_release(&self.0.id).await.map_err(failed)?;
        Ok(found.map(AgentRelease::from))
    }
    /// What Flux needs once to follow its repository, as YAML: `flux/styrmin.yaml` as Styrmin makes it.
    async fn flux_manifest(&self, ctx: &Context<'_>) -> Result<String> {
        let api = ctx.data::<Api>()?;
        repository::flux_files(&self.0, &api.public_url, &api.signer.public_key()).map_err(inner)
    }
    /// Its agent, as it last reported; null: it never did.
    async fn agent(&self, ctx: &Context<'_>) -> Result<Option<Agent>> {
        Ok(ctx.data::<Api>()?.store.last_report(&self.0.id).await.map_err(failed)?.map(Agent::from))
    }
    /// Flux's GitRepositories and Kustomizations, by kind, namespace and name.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn flux_statuses(
        &self,
        ctx: &Context<'_>,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<FluxStatus>> {
        let scope = StatusScope::Cluster(&self.0.id);
        graphql::statuses(ctx, Snapshot::Flux, scope, first, after, FluxStatus::from_row).await
    }
}

/// The agent's release in a cluster's repository.
#[derive(SimpleObject)]
pub(super) struct AgentRelease {
    /// Version of the agent and of its chart.
    version: String,
    /// Values of the chart.
    values: Json<config::Object>,
    /// When it was asked for.
    released_at: String,
}

impl From<store::AgentRelease> for AgentRelease {
    fn from(row: store::AgentRelease) -> Self {
        Self { version: row.version, values: Json(row.values), released_at: time(row.released_at) }
    }
}

/// The agent of a cluster.
#[derive(SimpleObject)]
pub(super) struct Agent {
    /// The process that reported last.
    pub(super) identity: String,
    /// Its epoch: of two agents the one with the higher counts.
    pub(super) epoch: i64,
    /// Its how many-th report it was.
    pub(super) sequence: i64,
    /// UID of the cluster's kube-system namespace, which the agent's token is bound to.
    pub(super) cluster_uid: String,
    /// When it last reported anything.
    pub(super) last_report_at: String,
}

impl From<LastReport> for Agent {
    fn from(last: LastReport) -> Self {
        Self {
            identity: last.identity,
            epoch: last.epoch,
            sequence: last.sequence,
            cluster_uid: last.cluster_uid,
            last_report_at: time(last.reported_at),
        }
    }
}

#[ComplexObject]
impl PodStatus {
    /// When it started.
    async fn started_at(&self) -> Option<String> {
        self.started_at.map(time)
    }
    /// When the agent last reported something new about it.
    async fn updated_at(&self) -> String {
        time(self.updated_at)
    }
}

#[ComplexObject]
impl DeploymentStatus {
    /// When the agent last reported something new about it.
    async fn updated_at(&self) -> String {
        time(self.updated_at)
    }
}

#[ComplexObject]
impl FluxStatus {
    /// Deployments whose changes wait because this object is not ready or suspended: the first hundred.
    #[graphql(complexity = "100 * child_complexity")]
    async fn held_up(&self, ctx: &Context<'_>) -> Result<Vec<Deployment>> {
        let store = &ctx.data::<Api>()?.store;
        let running = store.running_in(&self.cluster_id).await.map_err(failed)?;
        let mut found = Vec::new();
        for id in reports::held_up(self, &running).iter().take(HELD_UP_MAX) {
            found.extend(store.deployment(id).await.map_err(failed)?.map(Deployment));
        }
        Ok(found)
    }
    /// When the agent last reported something new about it.
    async fn updated_at(&self) -> String {
        time(self.updated_at)
    }
}

/// A group of deployments in one cluster.
pub(super) struct Environment(pub(super) store::Environment);

#[Object]
impl Environment {
    async fn id(&self) -> ID {
        ID(self.0.id.clone())
    }
    async fn name(&self) -> &str {
        &self.0.name
    }
    /// Configuration of this level.
    async fn config(&self) -> Json<&config::Object> {
        Json(&self.0.config)
    }
    async fn cluster(&self, ctx: &Context<'_>) -> Result<Option<Cluster>> {
        Ok(ctx.data::<Api>()?.store.cluster(&self.0.cluster_id).await.map_err(failed)?.map(Cluster))
    }
    /// How changes come to the branch that Flux follows, where it differs from the cluster.
    async fn delivery(&self) -> &DeliveryRules {
        &self.0.delivery
    }
    async fn created_at(&self) -> String {
        time(self.0.created_at)
    }
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn deployments(
        &self,
        ctx: &Context<'_>,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<Deployment>> {
        graphql::deployments(ctx, None, Some(&self.0.id), first, after).await
    }
    /// Its changed configurations on their way to the deployments, newest first.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn fan_outs(&self, ctx: &Context<'_>, first: Option<i32>, after: Option<String>) -> Result<Page<FanOut>> {
        graphql::fan_outs(ctx, &self.0.id, first, after).await
    }
}

/// The forge of a repository.
#[derive(SimpleObject)]
pub(super) struct RepositoryForge {
    /// Its kind.
    kind: ForgeKind,
    /// Base of its API.
    url: String,
    /// The repository on it.
    project: String,
}

/// Changes that people review before they count.
pub(super) struct Proposal(pub(super) store::Proposal);

#[Object]
impl Proposal {
    async fn id(&self) -> ID {
        ID(self.0.id.clone())
    }
    async fn title(&self) -> &str {
        &self.0.title
    }
    async fn state(&self) -> ProposalState {
        self.0.state
    }
    /// Where it is and why it waits.
    async fn message(&self) -> Option<&str> {
        self.0.message.as_deref()
    }
    /// The branch that holds the changes.
    async fn head_branch(&self) -> &str {
        &self.0.head_branch
    }
    /// The branch that the request is for.
    async fn base_branch(&self) -> &str {
        self.0.base_branch()
    }
    /// The newest commit of its branch.
    async fn head(&self) -> Option<&str> {
        self.0.head.as_deref()
    }
    /// Number of the request on the forge; null: it is not opened yet, or there is no forge.
    async fn number(&self) -> Option<i64> {
        self.0.number
    }
    /// Page of the request on the forge.
    async fn url(&self) -> Option<&str> {
        self.0.url.as_deref()
    }
    /// What reviewers read, whole, as Markdown; null: it has ended.
    #[graphql(complexity = "2000")]
    async fn description(&self, ctx: &Context<'_>) -> Result<Option<String>> {
        let api = ctx.data::<Api>()?;
        let Some(scene) = api.changes.scene(&self.0.id).await.map_err(refused)? else { return Ok(None) };
        if scene.proposal.ended_at.is_some() {
            return Ok(None);
        }
        let text = proposals::text(&api.changes, &scene, &api.public_url, usize::MAX).await.map_err(refused)?;
        Ok(Some(text.body))
    }
    async fn author(&self) -> Author {
        Author { name: self.0.author_name.clone(), email: self.0.author_email.clone() }
    }
    async fn created_at(&self) -> String {
        time(self.0.created_at)
    }
    /// When it was merged or closed.
    async fn ended_at(&self) -> Option<String> {
        self.0.ended_at.map(time)
    }
    async fn cluster(&self, ctx: &Context<'_>) -> Result<Option<Cluster>> {
        Ok(ctx.data::<Api>()?.store.cluster(&self.0.cluster_id).await.map_err(failed)?.map(Cluster))
    }
    /// What it changes of each deployment.
    #[graphql(complexity = "100 * child_complexity")]
    async fn items(&self, ctx: &Context<'_>) -> Result<Vec<ProposalItem>> {
        let items = ctx.data::<Api>()?.store.proposal_items(&self.0.id).await.map_err(failed)?;
        Ok(items.into_iter().map(ProposalItem).collect())
    }
}

/// One deployment's part of a proposal.
pub(super) struct ProposalItem(store::ProposalItem);

#[Object]
impl ProposalItem {
    async fn state(&self) -> ItemState {
        self.0.state
    }
    async fn deployment(&self, ctx: &Context<'_>) -> Result<Option<Deployment>> {
        Ok(ctx.data::<Api>()?.store.deployment(&self.0.deployment_id).await.map_err(failed)?.map(Deployment))
    }
    /// What it comes to.
    async fn instance(&self, ctx: &Context<'_>) -> Result<Option<Instance>> {
        Ok(ctx.data::<Api>()?.store.instance(&self.0.instance_id).await.map_err(failed)?.map(Instance))
    }
    async fn task(&self, ctx: &Context<'_>) -> Result<Option<Task>> {
        Ok(ctx.data::<Api>()?.store.task(&self.0.task_id).await.map_err(failed)?.map(Task))
    }
}

/// What somebody changed in a cluster's repository, and what became of it.
pub(super) struct Edit(pub(super) store::GitEdit);

#[Object]
impl Edit {
    async fn id(&self) -> ID {
        ID(self.0.id.clone())
    }
    async fn kind(&self) -> EditKind {
        self.0.kind
    }
    /// What became of it.
    async fn state(&self) -> EditState {
        self.0.state
    }
    /// What it means and what follows, for people.
    async fn message(&self) -> Option<&str> {
        self.0.message.as_deref()
    }
    /// The file, in the repository; empty for the branch as a whole.
    async fn path(&self) -> &str {
        &self.0.path
    }
    /// The commit that made it.
    async fn commit(&self) -> &str {
        &self.0.commit_id
    }
    /// That commit's author.
    async fn author(&self) -> Author {
        Author { name: self.0.author_name.clone(), email: self.0.author_email.clone() }
    }
    async fn cluster(&self, ctx: &Context<'_>) -> Result<Option<Cluster>> {
        Ok(ctx.data::<Api>()?.store.cluster(&self.0.cluster_id).await.map_err(failed)?.map(Cluster))
    }
    /// The deployment whose file it is.
    async fn deployment(&self, ctx: &Context<'_>) -> Result<Option<Deployment>> {
        let Some(id) = &self.0.deployment_id else { return Ok(None) };
        Ok(ctx.data::<Api>()?.store.deployment(id).await.map_err(failed)?.map(Deployment))
    }
    /// The task that took it over.
    async fn task(&self, ctx: &Context<'_>) -> Result<Option<Task>> {
        let Some(id) = &self.0.task_id else { return Ok(None) };
        Ok(ctx.data::<Api>()?.store.task(id).await.map_err(failed)?.map(Task))
    }
    /// When it was found.
    async fn created_at(&self) -> String {
        time(self.0.created_at)
    }
    /// When it was clear what becomes of it.
    async fn decided_at(&self) -> Option<String> {
        self.0.decided_at.map(time)
    }
}

/// A changed configuration on its way to every deployment that takes values from it.
pub(super) struct FanOut(pub(super) store::FanOut);

#[Object]
impl FanOut {
    async fn id(&self) -> ID {
        ID(self.0.id.clone())
    }
    /// Whose configuration changed.
    async fn level(&self) -> FanOutLevel {
        self.0.level
    }
    /// Id of that cluster or environment.
    async fn subject_id(&self) -> ID {
        ID(self.0.subject_id.clone())
    }
    async fn state(&self) -> FanOutState {
        self.0.state
    }
    async fn author(&self) -> Author {
        Author { name: self.0.author_name.clone(), email: self.0.author_email.clone() }
    }
    async fn created_at(&self) -> String {
        time(self.0.created_at)
    }
    /// When every deployment had been looked at.
    async fn ended_at(&self) -> Option<String> {
        self.0.ended_at.map(time)
    }
    /// Where people review it; null: it goes out at once.
    async fn proposal(&self, ctx: &Context<'_>) -> Result<Option<Proposal>> {
        let Some(id) = &self.0.proposal_id else { return Ok(None) };
        Ok(ctx.data::<Api>()?.store.proposal(id).await.map_err(failed)?.map(Proposal))
    }
    /// The deployments that it changes, by how far their tasks are.
    async fn changed(&self, ctx: &Context<'_>) -> Result<TaskCounts> {
        let found = ctx.data::<Api>()?.store.fan_out_progress(&self.0.id).await.map_err(failed)?;
        Ok(by_state(&found))
    }
    /// All deployments that it concerns, those being deleted excepted, by the state of their newest tasks: whether
    /// they run with what is said now, whichever change brought it.
    async fn deployments(&self, ctx: &Context<'_>) -> Result<TaskCounts> {
        let found = ctx.data::<Api>()?.store.newest_tasks(&self.0).await.map_err(failed)?;
        Ok(by_state(&found))
    }
    /// Tasks of the deployments that it changes, newest first.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn tasks(&self, ctx: &Context<'_>, first: Option<i32>, after: Option<String>) -> Result<Page<Task>> {
        graphql::tasks(ctx, TaskScope::FanOut(&self.0.id), first, after).await
    }
    /// Number of deployments that have what is said now already. Empty like the lists below while it runs.
    async fn unchanged(&self) -> usize {
        self.0.untouched.unchanged.len()
    }
    /// Ids of those.
    #[graphql(complexity = 1000)]
    async fn unchanged_ids(&self) -> Vec<ID> {
        self.0.untouched.unchanged.iter().cloned().map(ID).collect()
    }
    /// Deployments that it was not tried for, and why.
    #[graphql(complexity = 1000)]
    async fn skipped(&self) -> Vec<LeftAlone> {
        left_alone(&self.0.untouched.skipped)
    }
    /// Deployments that could not be changed, and why. The same configuration once more tries them again.
    #[graphql(complexity = 1000)]
    async fn failed(&self) -> Vec<LeftAlone> {
        left_alone(&self.0.untouched.failed)
    }
}

fn by_state(found: &[(String, i64)]) -> TaskCounts {
    let of = |state: TaskState| found.iter().find(|(known, _)| known == state.as_str()).map_or(0, |(_, count)| *count);
    TaskCounts {
        total: found.iter().map(|(_, count)| count).sum(),
        running: of(TaskState::Running),
        succeeded: of(TaskState::Succeeded),
        failed: of(TaskState::Failed),
        superseded: of(TaskState::Superseded),
        rejected: of(TaskState::Rejected),
    }
}

/// Tasks by their state.
#[derive(SimpleObject)]
struct TaskCounts {
    /// All.
    total: i64,
    /// On their way.
    running: i64,
    /// Done.
    succeeded: i64,
    /// Given up.
    failed: i64,
    /// A newer change took their place.
    superseded: i64,
    /// Their proposal was closed without a merge.
    rejected: i64,
}

/// A deployment that a fan-out left as it is.
#[derive(SimpleObject)]
struct LeftAlone {
    /// The deployment.
    deployment_id: ID,
    /// Why.
    reason: String,
}

fn left_alone(found: &[(String, String)]) -> Vec<LeftAlone> {
    found.iter().map(|(id, reason)| LeftAlone { deployment_id: ID(id.clone()), reason: reason.clone() }).collect()
}

/// Where a value was set.
#[derive(Enum, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// Styrmin's own default.
    Styrmin,
    /// The driver's default.
    Driver,
    /// The cluster.
    Cluster,
    /// The environment.
    Environment,
    /// The deployment.
    Deployment,
}

impl From<Level> for Origin {
    fn from(level: Level) -> Self {
        match level {
            Level::Styrmin => Self::Styrmin,
            Level::Driver => Self::Driver,
            Level::Cluster => Self::Cluster,
            Level::Environment => Self::Environment,
            Level::Deployment => Self::Deployment,
        }
    }
}

/// A resolved value and where it came from. A secret shows as its reference.
#[derive(SimpleObject)]
pub(super) struct ResolvedValue {
    /// `config.env_vars.LOG_LEVEL`, `parameters.image`.
    pub(super) field: String,
    /// The same as a JSON pointer.
    pub(super) pointer: String,
    /// The value.
    pub(super) value: Json<Value>,
    /// Which level set it.
    pub(super) origin: Origin,
}

/// What people edit: desired state.
pub(super) struct Deployment(pub(super) store::Deployment);

#[Object]
impl Deployment {
    async fn id(&self) -> ID {
        ID(self.0.id.clone())
    }
    /// Changes of it that people review, newest first; with `open` only those that wait for a merge.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn proposals(
        &self,
        ctx: &Context<'_>,
        #[graphql(default)] open: bool,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<Proposal>> {
        graphql::proposals(ctx, ProposalScope::Deployment(&self.0.id), open, first, after).await
    }
    async fn name(&self) -> &str {
        &self.0.name
    }
    async fn environment(&self, ctx: &Context<'_>) -> Result<Option<Environment>> {
        Ok(ctx.data::<Api>()?.store.environment(&self.0.environment_id).await.map_err(failed)?.map(Environment))
    }
    async fn driver(&self) -> &str {
        &self.0.driver_name
    }
    /// The driver version that it uses.
    async fn driver_version(&self, ctx: &Context<'_>) -> Result<Option<DriverVersion>> {
        let catalog = ctx.data::<Api>()?.drivers.catalog();
        Ok(catalog.by_digest.get(&self.0.driver_digest).cloned().map(DriverVersion))
    }
    /// The driver version that somebody insists on.
    async fn pinned_driver_version(&self) -> Option<&str> {
        self.0.driver_pin.as_deref()
    }
    async fn application_version(&self) -> &str {
        &self.0.application_version
    }
    /// Configuration of this level.
    async fn config(&self) -> Json<&config::Object> {
        Json(&self.0.config)
    }
    /// Parameters that somebody set, the secret ones excepted.
    async fn parameters(&self) -> Json<&config::Object> {
        Json(&self.0.parameters)
    }
    async fn lifecycle(&self) -> Lifecycle {
        self.0.lifecycle
    }
    /// Where its newest change is.
    async fn state(&self) -> DeploymentState {
        self.0.state
    }
    async fn created_at(&self) -> String {
        time(self.0.created_at)
    }
    async fn newest_instance(&self, ctx: &Context<'_>) -> Result<Option<Instance>> {
        instance(ctx, self.0.newest_instance_id.as_deref()).await
    }
    /// The instance that runs.
    async fn active_instance(&self, ctx: &Context<'_>) -> Result<Option<Instance>> {
        instance(ctx, self.0.active_instance_id.as_deref()).await
    }
    /// Every resolved value of the newest instance, with where it came from.
    async fn values(&self, ctx: &Context<'_>) -> Result<Vec<ResolvedValue>> {
        Ok(instance(ctx, self.0.newest_instance_id.as_deref()).await?.map(|found| found.resolved()).unwrap_or_default())
    }
    /// Newest first.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn instances(&self, ctx: &Context<'_>, first: Option<i32>, after: Option<String>) -> Result<Page<Instance>> {
        graphql::instances(ctx, &self.0.id, first, after).await
    }
    /// Newest first.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn tasks(&self, ctx: &Context<'_>, first: Option<i32>, after: Option<String>) -> Result<Page<Task>> {
        graphql::tasks(ctx, TaskScope::Deployment(&self.0.id), first, after).await
    }
    /// What people changed of its files in the repository, newest first. One that is held or waits is a warning
    /// beside the state.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn edits(&self, ctx: &Context<'_>, first: Option<i32>, after: Option<String>) -> Result<Page<Edit>> {
        graphql::edits(ctx, EditScope::Deployment(&self.0.id), first, after).await
    }
    /// What happened to it, newest first: changes and how they ended, commits, phases, corrections of drift,
    /// people's edits.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn timeline(
        &self,
        ctx: &Context<'_>,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<TimelineEntry>> {
        graphql::timeline(ctx, &self.0.id, first, after).await
    }
    /// Its pods as last reported, by namespace and name.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn pods(&self, ctx: &Context<'_>, first: Option<i32>, after: Option<String>) -> Result<Page<PodStatus>> {
        let scope = StatusScope::Deployment(&self.0.id);
        graphql::statuses(ctx, Snapshot::Pods, scope, first, after, PodStatus::from_row).await
    }
    /// Its StyrminDeployment as last reported; null: the cluster has none.
    async fn status(&self, ctx: &Context<'_>) -> Result<Option<DeploymentStatus>> {
        let scope = StatusScope::Deployment(&self.0.id);
        let found = ctx.data::<Api>()?.store.statuses(Snapshot::Deployments, scope, None, 1).await.map_err(failed)?;
        Ok(found.first().and_then(DeploymentStatus::from_row))
    }
}

async fn instance(ctx: &Context<'_>, id: Option<&str>) -> Result<Option<Instance>> {
    let Some(id) = id else { return Ok(None) };
    Ok(ctx.data::<Api>()?.store.instance(id).await.map_err(failed)?.map(Instance))
}

/// An immutable snapshot of the resolved configuration.
pub(super) struct Instance(pub(super) store::Instance);

impl Instance {
    fn resolved(&self) -> Vec<ResolvedValue> {
        let context = &self.0.spec.context;
        self.0
            .origins
            .iter()
            .filter_map(|(pointer, level)| {
                let place = match pointer.strip_prefix("/config") {
                    Some(rest) => format!("/instance/config{rest}"),
                    None => pointer.clone(),
                };
                Some(ResolvedValue {
                    field: config::field("", pointer).trim_start_matches('.').to_owned(),
                    pointer: pointer.clone(),
                    value: Json(context.pointer(&place)?.clone()),
                    origin: (*level).into(),
                })
            })
            .collect()
    }
}

#[Object]
impl Instance {
    async fn id(&self) -> ID {
        ID(self.0.id.clone())
    }
    async fn sequence(&self) -> i64 {
        self.0.sequence
    }
    /// What kind of change made it: create, update, upgrade or delete.
    async fn workflow(&self) -> &str {
        &self.0.workflow
    }
    async fn state(&self) -> InstanceState {
        self.0.state
    }
    async fn application_version(&self) -> &str {
        &self.0.spec.application_version
    }
    async fn driver_version(&self) -> &str {
        &self.0.spec.driver.version
    }
    /// Digest of the spec, as the operator reports it.
    async fn spec_digest(&self) -> String {
        self.0.spec.digest()
    }
    /// Commit that brought it to the repository.
    async fn revision(&self) -> Option<&str> {
        self.0.revision.as_deref()
    }
    /// The StyrminDeployment as committed; null for a deletion.
    async fn document(&self) -> Option<&str> {
        self.0.document.as_deref()
    }
    /// Every resolved value, with where it came from.
    async fn values(&self) -> Vec<ResolvedValue> {
        self.resolved()
    }
    async fn author(&self) -> Author {
        Author { name: self.0.author_name.clone(), email: self.0.author_email.clone() }
    }
    async fn created_at(&self) -> String {
        time(self.0.created_at)
    }
    async fn task(&self, ctx: &Context<'_>) -> Result<Option<Task>> {
        Ok(ctx.data::<Api>()?.store.task(&self.0.task_id).await.map_err(failed)?.map(Task))
    }
    async fn deployment(&self, ctx: &Context<'_>) -> Result<Option<Deployment>> {
        Ok(ctx.data::<Api>()?.store.deployment(&self.0.deployment_id).await.map_err(failed)?.map(Deployment))
    }
}

/// A person.
#[derive(SimpleObject)]
pub(super) struct Author {
    /// Name.
    pub(super) name: String,
    /// Email.
    pub(super) email: String,
}

/// One value that differs between two instances.
#[derive(SimpleObject)]
pub(super) struct ValueChange {
    /// `context.parameters.image`.
    pub(super) field: String,
    /// The same as a JSON pointer into the spec.
    pub(super) pointer: String,
    /// Null when it was not there; look at `added`.
    pub(super) old: Option<Json<Value>>,
    /// Null when it is no longer there; look at `removed`.
    pub(super) new: Option<Json<Value>>,
    /// It was not there before.
    pub(super) added: bool,
    /// It is no longer there.
    pub(super) removed: bool,
}

impl From<diff::Change> for ValueChange {
    fn from(change: diff::Change) -> Self {
        Self {
            added: change.old.is_none(),
            removed: change.new.is_none(),
            field: change.field,
            pointer: change.pointer,
            old: change.old.map(Json),
            new: change.new.map(Json),
        }
    }
}

/// What differs between two instances.
#[derive(SimpleObject)]
pub(super) struct InstanceDiff {
    /// Value by value.
    pub(super) changes: Vec<ValueChange>,
    /// The committed files as a unified diff.
    pub(super) document: String,
}

/// What a change would lead to.
#[derive(SimpleObject)]
pub(super) struct Preview {
    /// create, update, upgrade or delete; null when nothing changes for the cluster.
    workflow: Option<String>,
    /// Names of the task's steps, in order.
    steps: Vec<String>,
    /// Value by value, against the newest instance.
    changes: Vec<PreviewedValue>,
    /// `styrmindeployment.yaml` as a unified diff, without the instance's id.
    document: String,
    /// Kubernetes objects that differ. Those of the chart itself are Helm's.
    objects: Vec<PreviewedObject>,
    /// What somebody should know before.
    warnings: Vec<String>,
}

/// A value that would differ.
#[derive(SimpleObject)]
struct PreviewedValue {
    /// Before and after.
    #[graphql(flatten)]
    value: ValueChange,
    /// Where the new value is set; null for what follows from others.
    origin: Option<Origin>,
}

/// A Kubernetes object that would differ.
#[derive(SimpleObject)]
struct PreviewedObject {
    /// Its kind.
    kind: String,
    /// Its namespace; null for an object of the cluster.
    namespace: Option<String>,
    /// Its name. Names that follow the content are without that part.
    name: String,
    /// It would be new.
    added: bool,
    /// It would be gone.
    removed: bool,
    /// Its change as a unified diff.
    diff: String,
}

impl From<changes::Preview> for Preview {
    fn from(found: changes::Preview) -> Self {
        let value = |(change, level): (diff::Change, Option<Level>)| PreviewedValue {
            value: change.into(),
            origin: level.map(Into::into),
        };
        let object = |object: changes::ObjectChange| PreviewedObject {
            kind: object.kind,
            namespace: Some(object.namespace).filter(|namespace| !namespace.is_empty()),
            name: object.name,
            added: object.added,
            removed: object.removed,
            diff: object.diff,
        };
        Self {
            document: found.document,
            workflow: found.workflow,
            steps: found.steps,
            changes: found.values.into_iter().map(value).collect(),
            objects: found.objects.into_iter().map(object).collect(),
            warnings: found.warnings,
        }
    }
}

/// One change on its way.
pub(super) struct Task(pub(super) store::Task);

#[Object]
impl Task {
    async fn id(&self) -> ID {
        ID(self.0.id.clone())
    }
    /// Where people review it, or did.
    async fn proposal(&self, ctx: &Context<'_>) -> Result<Option<Proposal>> {
        Ok(ctx.data::<Api>()?.store.proposal_of_task(&self.0.id).await.map_err(failed)?.map(Proposal))
    }
    async fn workflow(&self) -> &str {
        &self.0.workflow
    }
    /// Its result so far.
    async fn state(&self) -> TaskState {
        self.0.state
    }
    async fn message(&self) -> Option<&str> {
        self.0.message.as_deref()
    }
    async fn sequence(&self) -> i64 {
        self.0.sequence
    }
    async fn steps(&self, ctx: &Context<'_>) -> Result<Vec<Step>> {
        let mut steps: Vec<Step> = self.0.steps.iter().cloned().map(Step::from).collect();
        // From the wait for Flux on they move by what the agent reports.
        let flux = self.0.steps.iter().position(|step| step.name == machine::FLUX_STEP).unwrap_or(1);
        let mut running = self.0.steps.iter().zip(&mut steps).skip(flux);
        if self.0.state == TaskState::Running
            && let Some((row, step)) = running.find(|(row, _)| row.state == StepState::Running)
        {
            let api = ctx.data::<Api>()?;
            let last = api.store.last_report_of(&self.0.deployment_id).await.map_err(failed)?;
            let last = last.map(|last| last.reported_at);
            if let Some(since) = reports::silence(last, row.started_at, api.clock.now()) {
                let notice = format!("No report from the agent since {}", time(since));
                step.message = Some(match step.message.take() {
                    Some(message) => format!("{notice}; before: {message}"),
                    None => notice,
                });
            }
        }
        Ok(steps)
    }
    async fn author(&self) -> Author {
        Author { name: self.0.author_name.clone(), email: self.0.author_email.clone() }
    }
    async fn created_at(&self) -> String {
        time(self.0.created_at)
    }
    async fn ended_at(&self) -> Option<String> {
        self.0.ended_at.map(time)
    }
    /// How long it took, in milliseconds.
    async fn duration_ms(&self) -> Option<i64> {
        self.0.ended_at.map(|ended| ended - self.0.created_at)
    }
    /// The fan-out that it is part of; null: it was asked for by itself.
    async fn fan_out(&self, ctx: &Context<'_>) -> Result<Option<FanOut>> {
        let Some(id) = &self.0.fan_out_id else { return Ok(None) };
        Ok(ctx.data::<Api>()?.store.fan_out(id).await.map_err(failed)?.map(FanOut))
    }
    async fn instance(&self, ctx: &Context<'_>) -> Result<Option<Instance>> {
        instance(ctx, Some(&self.0.instance_id)).await
    }
    async fn deployment(&self, ctx: &Context<'_>) -> Result<Option<Deployment>> {
        Ok(ctx.data::<Api>()?.store.deployment(&self.0.deployment_id).await.map_err(failed)?.map(Deployment))
    }
}

/// Something that happened to a deployment.
pub(super) struct TimelineEntry(pub(super) store::TimelineEntry);

#[Object]
impl TimelineEntry {
    async fn at(&self) -> String {
        time(self.0.at)
    }
    /// What happened.
    async fn kind(&self) -> TimelineKind {
        self.0.kind
    }
    /// In a word: the workflow, the commit, the task's state, the phase.
    async fn title(&self) -> &str {
        &self.0.title
    }
    /// In a sentence.
    async fn message(&self) -> Option<&str> {
        self.0.message.as_deref()
    }
    /// The task that it is about; null for what the operator did by itself.
    async fn task(&self, ctx: &Context<'_>) -> Result<Option<Task>> {
        let Some(id) = &self.0.task_id else { return Ok(None) };
        Ok(ctx.data::<Api>()?.store.task(id).await.map_err(failed)?.map(Task))
    }
}

/// One step of a task.
#[derive(SimpleObject)]
pub(super) struct Step {
    /// For people.
    pub(super) name: String,
    /// State.
    pub(super) state: StepState,
    /// 1 for the first.
    pub(super) attempt: i64,
    /// For people; why it waits or failed.
    pub(super) message: Option<String>,
    /// When it began.
    pub(super) started_at: Option<String>,
    /// When it ended.
    pub(super) ended_at: Option<String>,
    /// How long it took, in milliseconds.
    pub(super) duration_ms: Option<i64>,
}

impl From<store::Step> for Step {
    fn from(step: store::Step) -> Self {
        Self {
            duration_ms: step.started_at.zip(step.ended_at).map(|(start, end)| end - start),
            name: step.name,
            state: step.state,
            attempt: step.attempt,
            message: step.message,
            started_at: step.started_at.map(time),
            ended_at: step.ended_at.map(time),
        }
    }
}

/// A driver and its versions.
#[derive(SimpleObject)]
#[graphql(complex)]
pub(super) struct Driver {
    /// Its name.
    pub(super) name: String,
    #[graphql(skip)]
    pub(super) found: Vec<Arc<driver::Driver>>,
}

#[ComplexObject]
impl Driver {
    /// Oldest loaded first.
    async fn versions(&self) -> Vec<DriverVersion> {
        self.found.iter().cloned().map(DriverVersion).collect()
    }
}

/// One version of a driver.
pub(super) struct DriverVersion(pub(super) Arc<driver::Driver>);

#[Object]
impl DriverVersion {
    async fn name(&self) -> &str {
        self.0.name()
    }
    async fn version(&self) -> String {
        self.0.version.to_string()
    }
    /// Digest of its files.
    async fn digest(&self) -> &str {
        &self.0.digest
    }
    async fn description(&self) -> &str {
        &self.0.file.spec.info.description
    }
    async fn supported_versions(&self) -> &str {
        &self.0.file.spec.supported_versions
    }
    async fn default_version(&self) -> Option<&str> {
        self.0.file.spec.default_version.as_deref()
    }
    /// Names of its components.
    async fn components(&self) -> Vec<&str> {
        self.0.file.spec.components.keys().map(String::as_str).collect()
    }
    async fn parameters(&self) -> Vec<Parameter> {
        self.0
            .file
            .spec
            .parameters
            .iter()
            .map(|parameter| Parameter {
                name: parameter.name.clone(),
                label: parameter.label.clone(),
                description: parameter.description.clone(),
                kind: Json(parameter.kind),
                required: parameter.default.is_none(),
                default: parameter.default.clone().map(Json),
                values: parameter.values.iter().cloned().map(Json).collect(),
                schema: parameter.schema.clone().map(Json),
                secret: parameter.secret,
            })
            .collect()
    }
}

/// What people can set.
#[derive(SimpleObject)]
pub(super) struct Parameter {
    /// Its name.
    pub(super) name: String,
    /// For people.
    pub(super) label: String,
    /// For people.
    pub(super) description: String,
    /// string, integer, number, boolean, enum, array or object.
    pub(super) kind: Json<driver::format::ParameterKind>,
    /// It has no default.
    pub(super) required: bool,
    /// Value when nobody sets one.
    pub(super) default: Option<Json<Value>>,
    /// Choices of an enum.
    pub(super) values: Vec<Json<Value>>,
    /// JSON Schema in addition to the kind.
    pub(super) schema: Option<Json<Value>>,
    /// Encrypted, never shown.
    pub(super) secret: bool,
}

/// A folder that could not be loaded.
#[derive(SimpleObject)]
pub(super) struct DriverProblem {
    /// Below the drivers folder.
    pub(super) folder: String,
    /// File, line, field and what to do.
    pub(super) messages: Vec<String>,
}
