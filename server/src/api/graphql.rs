//! The GraphQL schema: queries read the store, mutations call `changes`.

use super::Api;
use super::error::{change as refused, coded, report as not_accepted, store as failed};
use super::objects::{
    Cluster, Deployment, Driver, DriverProblem, Edit, Environment, FanOut, Instance, InstanceDiff, Page, PageInfo,
    Preview, Proposal, Task, TimelineEntry,
};
use crate::auth::{self, Caller};
use crate::changes::{
    self, Changed, CreateCluster, CreateDeployment, Decision, EditRules, ForgeInput, GitInput, Request, UpdateCluster,
    UpdateDeployment, Wish,
};
use crate::reports::{self, DeploymentStatus, FluxStatus, Items, PodStatus, Said};
use crate::repository::Access;
use crate::store::{
    After, AfterStatus, AgentFacts, Confirmations, Delivery, DeliveryRules, EditPolicy, EditScope, ForgeKind, Person,
    ProposalScope, ProposalState, Snapshot, StatusRow, StatusScope, TaskScope,
};
use async_graphql::{
    Context, EmptySubscription, Enum, ID, InputObject, Json, MaybeUndefined, Object, OneofObject, OutputType, Result,
    SimpleObject,
};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use styrmin_renderer::config::{self, Patch};
use styrmin_renderer::diff;

/// The schema.
pub type Schema = async_graphql::Schema<Query, Mutation, EmptySubscription>;

/// Most objects of a page, and how many when nobody says.
const PAGE_MAX: i32 = 500;
const PAGE: i32 = 50;
const DEPTH_MAX: usize = 12;
const COMPLEXITY_MAX: usize = 100_000;
const RECURSION_MAX: usize = 24;
const DIRECTIVES_MAX: usize = 16;

/// Builds the schema with its limits.
pub fn schema(api: Api) -> Schema {
    builder().data(api).finish()
}

/// The schema as text, for the committed file.
#[must_use]
pub fn sdl() -> String {
    builder().finish().sdl()
}

fn builder() -> async_graphql::SchemaBuilder<Query, Mutation, EmptySubscription> {
    async_graphql::Schema::build(Query, Mutation, EmptySubscription)
        .limit_depth(DEPTH_MAX)
        .limit_complexity(COMPLEXITY_MAX)
        .limit_recursive_depth(RECURSION_MAX)
        .limit_directives(DIRECTIVES_MAX)
}

fn api<'a>(ctx: &Context<'a>) -> Result<&'a Api> {
    ctx.data::<Api>()
}

/// Only people make changes and read everything.
fn administrator<'a>(ctx: &Context<'a>) -> Result<&'a Person> {
    match ctx.data::<Caller>()? {
        Caller::Administrator(person) => Ok(person),
        Caller::Agent { .. } => {
            Err(coded("an agent's token speaks for its cluster only; use an administrator's token", "FORBIDDEN"))
        }
    }
}

/// Only agents report, each for its own cluster.
fn agent_cluster<'a>(ctx: &Context<'a>) -> Result<&'a str> {
    match ctx.data::<Caller>()? {
        Caller::Agent { cluster } => Ok(cluster),
        Caller::Administrator(_) => Err(coded(
            "report: token: belongs to a person; use the token of the cluster's agent, which createCluster gives",
            "FORBIDDEN",
        )),
    }
}

/// One more than a page, to know whether there is a next one.
fn limit(first: Option<i32>) -> Result<usize> {
    match first.unwrap_or(PAGE) {
        first @ 1..=PAGE_MAX => Ok(first as usize),
        other => Err(coded(format!("first: {other} is not between 1 and {PAGE_MAX}"), "INVALID")),
    }
}

fn decode(cursor: Option<String>) -> Result<Option<String>> {
    cursor
        .map(|cursor| {
            URL_SAFE_NO_PAD
                .decode(&cursor)
                .ok()
                .and_then(|bytes| String::from_utf8(bytes).ok())
                .ok_or_else(|| coded(format!("after: \"{cursor}\" is not a cursor of this API"), "INVALID"))
        })
        .transpose()
}

fn name_cursor(cursor: Option<String>) -> Result<After> {
    Ok(decode(cursor)?.map(|text| match text.split_once('\n') {
        Some((name, id)) => (name.to_owned(), id.to_owned()),
        None => (text, String::new()),
    }))
}

fn page<Row, T: OutputType>(
    mut rows: Vec<Row>,
    limit: usize,
    cursor: impl Fn(&Row) -> String,
    object: impl Fn(Row) -> T,
) -> Page<T> {
    let has_next_page = rows.len() > limit;
    rows.truncate(limit);
    let end_cursor = rows.last().map(|row| URL_SAFE_NO_PAD.encode(cursor(row)));
    Page { nodes: rows.into_iter().map(object).collect(), page_info: PageInfo { has_next_page, end_cursor } }
}

fn wanted(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX - 1) + 1
}

pub(super) async fn environments(
    ctx: &Context<'_>,
    cluster: Option<&str>,
    first: Option<i32>,
    after: Option<String>,
) -> Result<Page<Environment>> {
    let limit = limit(first)?;
    let rows = api(ctx)?.store.environments(cluster, name_cursor(after)?, wanted(limit)).await.map_err(failed)?;
    Ok(page(rows, limit, |row| format!("{}\n{}", row.name, row.id), Environment))
}

pub(super) async fn deployments(
    ctx: &Context<'_>,
    cluster: Option<&str>,
    environment: Option<&str>,
    first: Option<i32>,
    after: Option<String>,
) -> Result<Page<Deployment>> {
    let limit = limit(first)?;
    let after = name_cursor(after)?;
    let rows = api(ctx)?.store.deployments(cluster, environment, after, wanted(limit)).await.map_err(failed)?;
    Ok(page(rows, limit, |row| format!("{}\n{}", row.name, row.id), Deployment))
}

pub(super) async fn instances(
    ctx: &Context<'_>,
    deployment: &str,
    first: Option<i32>,
    after: Option<String>,
) -> Result<Page<Instance>> {
    let limit = limit(first)?;
    let before = decode(after)?
        .map(|text| text.parse::<i64>().map_err(|_| coded("after: is not a cursor of this list", "INVALID")))
        .transpose()?;
    let rows = api(ctx)?.store.instances(deployment, before, wanted(limit)).await.map_err(failed)?;
    Ok(page(rows, limit, |row| row.sequence.to_string(), Instance))
}

pub(super) async fn fan_outs(
    ctx: &Context<'_>,
    subject: &str,
    first: Option<i32>,
    after: Option<String>,
) -> Result<Page<FanOut>> {
    let limit = limit(first)?;
    let before = decode(after)?;
    let rows = api(ctx)?.store.fan_outs(subject, before.as_deref(), wanted(limit)).await.map_err(failed)?;
    Ok(page(rows, limit, |row| row.id.clone(), FanOut))
}

pub(super) async fn edits(
    ctx: &Context<'_>,
    scope: EditScope<'_>,
    first: Option<i32>,
    after: Option<String>,
) -> Result<Page<Edit>> {
    let limit = limit(first)?;
    let before = decode(after)?;
    let rows = api(ctx)?.store.edits(scope, before.as_deref(), wanted(limit)).await.map_err(failed)?;
    Ok(page(rows, limit, |row| row.id.clone(), Edit))
}

pub(super) async fn proposals(
    ctx: &Context<'_>,
    scope: ProposalScope<'_>,
    open: bool,
    first: Option<i32>,
    after: Option<String>,
) -> Result<Page<Proposal>> {
    let limit = limit(first)?;
    let before = decode(after)?;
    let rows = api(ctx)?.store.proposals(scope, open, before.as_deref(), wanted(limit)).await.map_err(failed)?;
    Ok(page(rows, limit, |row| row.id.clone(), Proposal))
}

pub(super) async fn tasks(
    ctx: &Context<'_>,
    scope: TaskScope<'_>,
    first: Option<i32>,
    after: Option<String>,
) -> Result<Page<Task>> {
    let limit = limit(first)?;
    let before = decode(after)?;
    let rows = api(ctx)?.store.tasks(scope, before.as_deref(), wanted(limit)).await.map_err(failed)?;
    Ok(page(rows, limit, |row| row.id.clone(), Task))
}

pub(super) async fn timeline(
    ctx: &Context<'_>,
    deployment: &str,
    first: Option<i32>,
    after: Option<String>,
) -> Result<Page<TimelineEntry>> {
    let limit = limit(first)?;
    let place = |text: String| {
        let (at, key) = text.split_once('\n')?;
        Some((at.parse().ok()?, key.to_owned()))
    };
    let before = decode(after)?
        .map(|text| place(text).ok_or_else(|| coded("after: is not a cursor of this list", "INVALID")))
        .transpose()?;
    let rows = api(ctx)?.store.timeline(deployment, before, wanted(limit)).await.map_err(failed)?;
    Ok(page(rows, limit, |row| format!("{}\n{}", row.at, row.key), TimelineEntry))
}

fn status_cursor(cursor: Option<String>) -> Result<AfterStatus> {
    let Some(text) = decode(cursor)? else { return Ok(None) };
    let mut parts = text.splitn(4, '\n').map(str::to_owned);
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(cluster), Some(kind), Some(namespace), Some(name)) => Ok(Some([cluster, kind, namespace, name])),
        _ => Err(coded("after: is not a cursor of this list", "INVALID")),
    }
}

pub(super) async fn statuses<T: OutputType>(
    ctx: &Context<'_>,
    snapshot: Snapshot,
    scope: StatusScope<'_>,
    first: Option<i32>,
    after: Option<String>,
    read: impl Fn(&StatusRow) -> Option<T>,
) -> Result<Page<T>> {
    let limit = limit(first)?;
    let rows = api(ctx)?.store.statuses(snapshot, scope, status_cursor(after)?, wanted(limit)).await.map_err(failed)?;
    let cursor = |row: &StatusRow| format!("{}\n{}\n{}\n{}", row.cluster_id, row.kind, row.namespace, row.name);
    let Page { nodes, page_info } = page(rows, limit, cursor, |row| read(&row));
    Ok(Page { nodes: nodes.into_iter().flatten().collect(), page_info })
}

fn scope<'a>(cluster: Option<&'a ID>, deployment: Option<&'a ID>) -> Result<StatusScope<'a>> {
    match (cluster, deployment) {
        (None, None) => Ok(StatusScope::All),
        (Some(id), None) => Ok(StatusScope::Cluster(id)),
        (None, Some(id)) => Ok(StatusScope::Deployment(id)),
        (Some(_), Some(_)) => Err(coded("clusterId, deploymentId: name one of them, not both", "INVALID")),
    }
}

/// Who the token belongs to.
#[derive(SimpleObject)]
struct Viewer {
    /// administrator or agent.
    kind: &'static str,
    /// Name of the person.
    name: Option<String>,
    /// Email of the person.
    email: Option<String>,
    /// Id of the agent's cluster.
    cluster: Option<ID>,
}

/// Reads.
pub struct Query;

#[Object]
impl Query {
    /// Who the token belongs to.
    async fn viewer(&self, ctx: &Context<'_>) -> Result<Viewer> {
        Ok(match ctx.data::<Caller>()? {
            Caller::Administrator(person) => Viewer {
                kind: "administrator",
                name: Some(person.name.clone()),
                email: Some(person.email.clone()),
                cluster: None,
            },
            Caller::Agent { cluster } => {
                Viewer { kind: "agent", name: None, email: None, cluster: Some(ID(cluster.clone())) }
            }
        })
    }

    /// For agents: the newest commit of this server in the cluster's repository. At once when it is not
    /// `after`; otherwise as soon as there is another one, or after 25 s.
    async fn newest_revision(&self, ctx: &Context<'_>, after: Option<String>) -> Result<Option<String>> {
        let cluster = agent_cluster(ctx)?;
        api(ctx)?.reports.newest_revision(cluster, after.as_deref()).await.map_err(not_accepted)
    }

    /// Clusters by name.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn clusters(&self, ctx: &Context<'_>, first: Option<i32>, after: Option<String>) -> Result<Page<Cluster>> {
        administrator(ctx)?;
        let limit = limit(first)?;
        let rows = api(ctx)?.store.clusters(name_cursor(after)?, wanted(limit)).await.map_err(failed)?;
        Ok(page(rows, limit, |row| format!("{}\n{}", row.name, row.id), Cluster))
    }

    /// One cluster by id or name.
    async fn cluster(&self, ctx: &Context<'_>, id: ID) -> Result<Option<Cluster>> {
        administrator(ctx)?;
        Ok(api(ctx)?.store.cluster(&id).await.map_err(failed)?.map(Cluster))
    }

    /// Environments by name.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn environments(
        &self,
        ctx: &Context<'_>,
        cluster: Option<ID>,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<Environment>> {
        administrator(ctx)?;
        environments(ctx, cluster.as_ref().map(|id| id.as_str()), first, after).await
    }

    /// One environment.
    async fn environment(&self, ctx: &Context<'_>, id: ID) -> Result<Option<Environment>> {
        administrator(ctx)?;
        Ok(api(ctx)?.store.environment(&id).await.map_err(failed)?.map(Environment))
    }

    /// Deployments by name.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn deployments(
        &self,
        ctx: &Context<'_>,
        cluster: Option<ID>,
        environment: Option<ID>,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<Deployment>> {
        administrator(ctx)?;
        let (cluster, environment) =
            (cluster.as_ref().map(|id| id.as_str()), environment.as_ref().map(|id| id.as_str()));
        deployments(ctx, cluster, environment, first, after).await
    }

    /// One deployment.
    async fn deployment(&self, ctx: &Context<'_>, id: ID) -> Result<Option<Deployment>> {
        administrator(ctx)?;
        Ok(api(ctx)?.store.deployment(&id).await.map_err(failed)?.map(Deployment))
    }

    /// One instance.
    async fn instance(&self, ctx: &Context<'_>, id: ID) -> Result<Option<Instance>> {
        administrator(ctx)?;
        Ok(api(ctx)?.store.instance(&id).await.map_err(failed)?.map(Instance))
    }

    /// What differs between two instances; without `from`, everything is new.
    async fn instance_diff(&self, ctx: &Context<'_>, from: Option<ID>, to: ID) -> Result<InstanceDiff> {
        administrator(ctx)?;
        let read = async |id: &ID| {
            let found = api(ctx)?.store.instance(id).await.map_err(failed)?;
            found.ok_or_else(|| coded(format!("instance \"{}\": does not exist", id.as_str()), "NOT_FOUND"))
        };
        let new = read(&to).await?;
        let old = match &from {
            Some(id) => Some(read(id).await?),
            None => None,
        };
        let compared = changes::on_a_thread(move || {
            let values = diff::specs(old.as_ref().map(|old| &old.spec), &new.spec);
            let before = old.and_then(|old| old.document).unwrap_or_default();
            let after = new.document.unwrap_or_default();
            Ok((values, changes::unified("styrmindeployment.yaml", &before, &after)))
        });
        let (values, document) = compared.await.map_err(refused)?;
        Ok(InstanceDiff { changes: values.into_iter().map(Into::into).collect(), document })
    }

    /// What a change would lead to. Nothing is stored.
    #[graphql(complexity = "1000 + child_complexity")]
    async fn preview_change(&self, ctx: &Context<'_>, change: ChangeInput) -> Result<Preview> {
        let author = administrator(ctx)?;
        let wish = change.wish(ctx).await?;
        Ok(api(ctx)?.changes.preview(&wish, author).await.map_err(refused)?.into())
    }

    /// Newest first, of one deployment or all.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn tasks(
        &self,
        ctx: &Context<'_>,
        deployment: Option<ID>,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<Task>> {
        administrator(ctx)?;
        let scope = deployment.as_ref().map_or(TaskScope::All, |id| TaskScope::Deployment(id));
        tasks(ctx, scope, first, after).await
    }

    /// One changed configuration on its way.
    async fn fan_out(&self, ctx: &Context<'_>, id: ID) -> Result<Option<FanOut>> {
        administrator(ctx)?;
        Ok(api(ctx)?.store.fan_out(&id).await.map_err(failed)?.map(FanOut))
    }

    /// The public key that this server signs commits with, as a line of `authorized_keys`.
    async fn signing_key(&self, ctx: &Context<'_>) -> Result<String> {
        administrator(ctx)?;
        Ok(api(ctx)?.signer.public_key())
    }

    /// One edit of a cluster's repository.
    async fn edit(&self, ctx: &Context<'_>, id: ID) -> Result<Option<Edit>> {
        administrator(ctx)?;
        Ok(api(ctx)?.store.edit(&id).await.map_err(failed)?.map(Edit))
    }

    /// One proposal.
    async fn proposal(&self, ctx: &Context<'_>, id: ID) -> Result<Option<Proposal>> {
        administrator(ctx)?;
        Ok(api(ctx)?.store.proposal(&id).await.map_err(failed)?.map(Proposal))
    }

    /// Proposals, newest first, of one cluster or all; with `open` only those that wait for a merge.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn proposals(
        &self,
        ctx: &Context<'_>,
        cluster: Option<ID>,
        #[graphql(default)] open: bool,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<Proposal>> {
        administrator(ctx)?;
        let scope = cluster.as_ref().map_or(ProposalScope::All, |id| ProposalScope::Cluster(id));
        proposals(ctx, scope, open, first, after).await
    }

    /// One task.
    async fn task(&self, ctx: &Context<'_>, id: ID) -> Result<Option<Task>> {
        administrator(ctx)?;
        Ok(api(ctx)?.store.task(&id).await.map_err(failed)?.map(Task))
    }

    /// Pods as last reported, of one deployment, one cluster or all.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn pod_statuses(
        &self,
        ctx: &Context<'_>,
        deployment_id: Option<ID>,
        cluster_id: Option<ID>,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<PodStatus>> {
        administrator(ctx)?;
        let scope = scope(cluster_id.as_ref(), deployment_id.as_ref())?;
        statuses(ctx, Snapshot::Pods, scope, first, after, PodStatus::from_row).await
    }

    /// StyrminDeployments as last reported, of one deployment, one cluster or all.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn deployment_statuses(
        &self,
        ctx: &Context<'_>,
        deployment_id: Option<ID>,
        cluster_id: Option<ID>,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<DeploymentStatus>> {
        administrator(ctx)?;
        let scope = scope(cluster_id.as_ref(), deployment_id.as_ref())?;
        statuses(ctx, Snapshot::Deployments, scope, first, after, DeploymentStatus::from_row).await
    }

    /// Flux's GitRepositories and Kustomizations of a cluster, as last reported.
    #[graphql(complexity = "first.unwrap_or(50) as usize * child_complexity")]
    async fn flux_statuses(
        &self,
        ctx: &Context<'_>,
        cluster_id: ID,
        first: Option<i32>,
        after: Option<String>,
    ) -> Result<Page<FluxStatus>> {
        administrator(ctx)?;
        statuses(ctx, Snapshot::Flux, StatusScope::Cluster(&cluster_id), first, after, FluxStatus::from_row).await
    }

    /// Loaded drivers by name.
    async fn drivers(&self, ctx: &Context<'_>) -> Result<Vec<Driver>> {
        administrator(ctx)?;
        let catalog = api(ctx)?.drivers.catalog();
        Ok(catalog.versions.iter().map(|(name, found)| Driver { name: name.clone(), found: found.clone() }).collect())
    }

    /// Folders that could not be loaded, and why.
    async fn driver_problems(&self, ctx: &Context<'_>) -> Result<Vec<DriverProblem>> {
        administrator(ctx)?;
        let catalog = api(ctx)?.drivers.catalog();
        let problems = catalog.problems.iter();
        Ok(problems
            .map(|(folder, messages)| DriverProblem { folder: folder.clone(), messages: messages.clone() })
            .collect())
    }
}

/// Where a cluster's repository is.
#[derive(InputObject)]
struct GitRepositoryInput {
    /// Any Git URL, without credentials.
    url: String,
    /// Branch that Flux follows; main when absent.
    branch: Option<String>,
    /// Folder of the cluster in the repository; the root when absent.
    path: Option<String>,
    #[graphql(flatten)]
    access: GitAccessInput,
    /// The forge that it is on, for pull requests and commit statuses.
    forge: Option<RepositoryForgeInput>,
}

/// The forge of a repository. In a change, what is not set stays as it is.
#[derive(InputObject, Default)]
struct RepositoryForgeInput {
    /// Its kind.
    kind: Option<ForgeKind>,
    /// Base of its API; from the repository's URL when absent.
    url: Option<String>,
    /// Token for its API; the repository's password when absent. Stored encrypted and never shown.
    token: Option<String>,
    /// With it the forge signs what it sends to `/webhooks/<cluster>`.
    webhook_secret: Option<String>,
}

impl From<RepositoryForgeInput> for ForgeInput {
    fn from(input: RepositoryForgeInput) -> Self {
        let RepositoryForgeInput { kind, url, token, webhook_secret } = input;
        Self { kind, url, token, webhook_secret }
    }
}

/// What opens a repository. In a change, what is not set stays as it is.
#[derive(InputObject, Default)]
struct GitAccessInput {
    /// User for HTTPS.
    username: Option<String>,
    /// Password or token for HTTPS. This and the keys below are stored encrypted and never shown.
    password: Option<String>,
    /// Private key for SSH, as OpenSSH or PEM, without a passphrase.
    ssh_key: Option<String>,
    /// Lines of `known_hosts`: the only hosts that SSH trusts.
    known_hosts: Option<String>,
    /// Certificates of authorities that HTTPS trusts, as PEM.
    ca: Option<String>,
    /// URL of a proxy for HTTPS.
    proxy: Option<String>,
}

impl From<GitAccessInput> for Access {
    fn from(input: GitAccessInput) -> Self {
        let GitAccessInput { username, password, ssh_key, known_hosts, ca, proxy } = input;
        Self { username, password, ssh_key, known_hosts, ca, proxy }
    }
}

/// A new cluster.
#[derive(InputObject)]
struct CreateClusterInput {
    /// Unique name, a DNS label.
    name: String,
    /// Configuration of this level.
    config: Option<Json<config::Object>>,
    /// Its repository; hosted by this server when absent.
    git: Option<GitRepositoryInput>,
    /// age recipient that secrets are encrypted for.
    age_recipient: Option<String>,
    /// Several of them, while a key is replaced.
    age_recipients: Option<Vec<String>>,
    /// What is done about what people change in its repository.
    edits: Option<EditRulesInput>,
    /// Has Flux accept only commits that are signed with this server's key or a trusted one.
    verification: Option<VerificationInput>,
    /// How changes come to the branch that Flux follows.
    delivery: Option<DeliveryRules>,
}

/// One recipient, several, or as it is.
fn recipients(one: Option<String>, several: Option<Vec<String>>) -> Option<Vec<String>> {
    match (one, several) {
        (None, several) => several,
        (Some(one), several) => Some(std::iter::once(one).chain(several.unwrap_or_default()).collect()),
    }
}

/// Whose commits Flux accepts.
#[derive(InputObject)]
struct VerificationInput {
    /// Public keys of people and of the forge, as lines of `authorized_keys` or armored OpenPGP keys. This
    /// server's own is always among them.
    #[graphql(default)]
    trusted_keys: Vec<String>,
}

/// What is done about what people change in a cluster's repository.
#[derive(InputObject, Default)]
struct EditRulesInput {
    /// ADOPT for a new cluster.
    policy: Option<EditPolicy>,
    /// How many removals at once are taken over without asking; 0 for a new cluster: each waits until somebody
    /// confirms it.
    removal_threshold: Option<u32>,
}

impl From<Option<EditRulesInput>> for EditRules {
    fn from(input: Option<EditRulesInput>) -> Self {
        let EditRulesInput { policy, removal_threshold } = input.unwrap_or_default();
        Self { policy, removal_threshold }
    }
}

/// What somebody decides about an edit.
#[derive(Enum, Clone, Copy, PartialEq, Eq)]
enum EditDecision {
    /// It becomes a change of the deployment; a removal is confirmed.
    Adopt,
    /// It is put back.
    Restore,
}

/// A change of one level's configuration.
#[derive(InputObject, Default)]
struct ConfigPatch {
    /// Merged into the level: mappings key by key, everything else replaced; null is a value.
    set: Option<Json<config::Object>>,
    /// JSON pointers of keys to remove, so that the next level counts: `/env_vars/LOG_LEVEL`.
    remove: Option<Vec<String>>,
}

impl From<Option<ConfigPatch>> for Wrapped {
    fn from(patch: Option<ConfigPatch>) -> Self {
        let patch = patch.unwrap_or_default();
        Self(Patch { set: patch.set.map(|set| set.0).unwrap_or_default(), remove: patch.remove.unwrap_or_default() })
    }
}

/// [`Patch`], from the API's input.
struct Wrapped(Patch);

/// A new deployment.
#[derive(InputObject)]
struct CreateDeploymentInput {
    /// Its environment.
    environment: ID,
    /// Unique name in the environment, a DNS label.
    name: String,
    /// Name of the driver.
    driver: String,
    /// Driver version to insist on; the newest that supports the application version when absent.
    driver_version: Option<String>,
    /// Version of the application; the driver's default when absent.
    application_version: Option<String>,
    /// Configuration of this level.
    config: Option<Json<config::Object>>,
    /// Parameters, the secret ones included.
    parameters: Option<Json<config::Object>>,
}

/// A change of a deployment.
#[derive(InputObject)]
struct UpdateDeploymentInput {
    /// Changes of the configuration.
    config: Option<ConfigPatch>,
    /// Parameters to set, each as a whole, the secret ones included.
    parameters: Option<Json<config::Object>>,
    /// Parameters to give back to the driver's default.
    remove_parameters: Option<Vec<String>>,
    /// Version of the application, choosing the driver version again when it is another one.
    application_version: Option<String>,
    /// Driver version to insist on from now on; null: on none any more.
    driver_version: MaybeUndefined<String>,
}

impl From<CreateDeploymentInput> for CreateDeployment {
    fn from(input: CreateDeploymentInput) -> Self {
        Self {
            environment: input.environment.0,
            name: input.name,
            driver: input.driver,
            driver_version: input.driver_version,
            application_version: input.application_version,
            config: input.config.map(|config| config.0).unwrap_or_default(),
            parameters: input.parameters.map(|parameters| parameters.0).unwrap_or_default(),
        }
    }
}

impl From<UpdateDeploymentInput> for UpdateDeployment {
    fn from(input: UpdateDeploymentInput) -> Self {
        Self {
            config: Wrapped::from(input.config).0,
            parameters: input.parameters.map(|parameters| parameters.0).unwrap_or_default(),
            remove_parameters: input.remove_parameters.unwrap_or_default(),
            application_version: input.application_version,
            driver_version: match input.driver_version {
                MaybeUndefined::Undefined => None,
                MaybeUndefined::Null => Some(None),
                MaybeUndefined::Value(version) => Some(Some(version)),
            },
        }
    }
}

/// A change that somebody thinks of: the mutation of the same name, with its arguments.
#[derive(OneofObject)]
enum ChangeInput {
    /// A new deployment.
    CreateDeployment(CreateDeploymentInput),
    /// Another configuration.
    UpdateDeployment(UpdateInput),
    /// Another version.
    UpgradeDeployment(UpgradeInput),
    /// Another number of pods.
    ScaleDeployment(ScaleInput),
    /// Components without pods.
    StopComponents(ComponentsInput),
    /// Components with pods again.
    StartComponents(ComponentsInput),
    /// No pods: id of the deployment.
    StopDeployment(ID),
    /// Pods again: id of the deployment.
    StartDeployment(ID),
    /// A run of a job.
    RunJob(RunJobInput),
    /// Another attempt: id of the task.
    RetryTask(ID),
    /// Back to an earlier instance.
    RollbackDeployment(RollbackInput),
    /// The end: id of the deployment.
    DeleteDeployment(ID),
}

/// `updateDeployment`.
#[derive(InputObject)]
struct UpdateInput {
    /// The deployment.
    id: ID,
    /// What changes.
    input: UpdateDeploymentInput,
}

/// `upgradeDeployment`.
#[derive(InputObject)]
struct UpgradeInput {
    /// The deployment.
    id: ID,
    /// Version of the application.
    application_version: Option<String>,
    /// Driver version to insist on.
    driver_version: Option<String>,
}

/// `scaleDeployment`.
#[derive(InputObject)]
struct ScaleInput {
    /// The deployment.
    id: ID,
    /// Name of the component.
    component: String,
    /// Number of pods.
    replicas: u32,
}

/// `stopComponents` and `startComponents`.
#[derive(InputObject)]
struct ComponentsInput {
    /// The deployment.
    id: ID,
    /// Names of the components.
    components: Vec<String>,
}

/// `runJob`.
#[derive(InputObject)]
struct RunJobInput {
    /// The deployment.
    id: ID,
    /// Name of the job.
    action: String,
}

/// `rollbackDeployment`.
#[derive(InputObject)]
struct RollbackInput {
    /// The deployment.
    id: ID,
    /// The instance.
    to_instance: ID,
}

impl ChangeInput {
    async fn wish(self, ctx: &Context<'_>) -> Result<Wish> {
        let (id, request) = match self {
            Self::CreateDeployment(input) => return Ok(Wish::Create(input.into())),
            Self::UpdateDeployment(of) => (of.id, Request::Update(of.input.into())),
            Self::UpgradeDeployment(of) => {
                let UpgradeInput { id, application_version, driver_version } = of;
                (id, Request::Upgrade { application_version, driver_version })
            }
            Self::ScaleDeployment(of) => (of.id, Request::Scale { component: of.component, replicas: of.replicas }),
            Self::StopComponents(of) => (of.id, Request::StopComponents(of.components)),
            Self::StartComponents(of) => (of.id, Request::StartComponents(of.components)),
            Self::StopDeployment(id) => (id, Request::Stop),
            Self::StartDeployment(id) => (id, Request::Start),
            Self::RunJob(of) => (of.id, Request::RunJob { action: of.action }),
            Self::RetryTask(task) => {
                let id = api(ctx)?.changes.deployment_of(&task).await.map_err(refused)?;
                (ID(id), Request::Retry { task: task.0 })
            }
            Self::RollbackDeployment(of) => (of.id, Request::Rollback { instance: of.to_instance.0 }),
            Self::DeleteDeployment(id) => (id, Request::Delete),
        };
        Ok(Wish::Change { deployment: id.0, request })
    }
}

/// A new cluster and its agent's token.
#[derive(SimpleObject)]
struct CreateClusterPayload {
    /// The cluster.
    cluster: Cluster,
    /// Token of its agent, shown this once.
    agent_token: String,
    /// What will stop something sooner or later.
    warnings: Vec<String>,
}

/// A cluster's configuration and its way.
#[derive(SimpleObject)]
struct UpdateClusterPayload {
    /// The cluster as it is now.
    cluster: Cluster,
    /// Follow it to see the configuration arrive.
    fan_out: FanOut,
}

/// An environment's configuration and its way.
#[derive(SimpleObject)]
struct UpdateEnvironmentPayload {
    /// The environment as it is now.
    environment: Environment,
    /// Follow it to see the configuration arrive.
    fan_out: FanOut,
}

/// What a change led to.
#[derive(SimpleObject)]
struct ChangePayload {
    /// The deployment as it is now.
    deployment: Deployment,
    /// Follow it to see the change arrive; null when nothing changes for the cluster.
    task: Option<Task>,
    /// Where people review it; null: it goes out at once.
    proposal: Option<Proposal>,
}

impl From<Changed> for ChangePayload {
    fn from(changed: Changed) -> Self {
        let Changed { deployment, task, proposal } = changed;
        Self { deployment: Deployment(deployment), task: task.map(Task), proposal: proposal.map(Proposal) }
    }
}

/// What the agent shall know after a report.
#[derive(SimpleObject)]
struct ReportAnswer {
    /// The newest commit of this server in the cluster's repository: Flux shall have it, or fetch.
    newest_revision: Option<String>,
    /// StyrminDeployments that are being deleted because somebody asked for it.
    confirmed_deletions: Vec<ConfirmedDeletion>,
}

/// A StyrminDeployment that may be torn down.
#[derive(SimpleObject)]
struct ConfirmedDeletion {
    /// Id of the deployment.
    deployment_id: String,
    /// UID of the object: one that is made anew under the same name is another.
    uid: String,
}

impl From<Confirmations> for ReportAnswer {
    fn from(found: Confirmations) -> Self {
        let deletions = found.deletions.into_iter();
        Self {
            newest_revision: found.newest_revision,
            confirmed_deletions: deletions
                .map(|(deployment_id, uid)| ConfirmedDeletion { deployment_id, uid })
                .collect(),
        }
    }
}

/// What an agent says of itself.
#[derive(InputObject)]
struct FactsInput {
    /// Its version.
    version: String,
    /// Whether the kind StyrminDeployment in the cluster is the one that it knows: CURRENT, OTHER or MISSING.
    kind: String,
    /// Kinds whose objects it could not list yet.
    waits_for: Vec<String>,
    /// Its time (RFC 3339).
    sent_at: String,
    /// UID of the cluster's kube-system namespace.
    cluster_uid: String,
}

/// A new token.
#[derive(SimpleObject)]
struct CreateTokenPayload {
    /// Shown this once.
    token: String,
}

async fn report(ctx: &Context<'_>, agent: reports::Agent, said: Said) -> Result<ReportAnswer> {
    let cluster = agent_cluster(ctx)?;
    Ok(api(ctx)?.reports.accept(cluster, agent, said).await.map_err(not_accepted)?.into())
}

async fn request(
    ctx: &Context<'_>,
    id: &ID,
    request: Request,
    base: Option<ID>,
    delivery: Option<Delivery>,
) -> Result<ChangePayload> {
    let author = administrator(ctx)?;
    let base = base.as_ref().map(|id| id.as_str());
    Ok(api(ctx)?.changes.change(id, &request, base, delivery, author).await.map_err(refused)?.into())
}

/// Changes.
pub struct Mutation;

#[Object]
impl Mutation {
    /// Adds a token for another person.
    async fn create_administrator_token(
        &self,
        ctx: &Context<'_>,
        name: String,
        email: String,
    ) -> Result<CreateTokenPayload> {
        administrator(ctx)?;
        auth::check_person(&name, &email)
            .map_err(|(field, message)| coded(format!("administrator token: {field}: {message}"), "INVALID"))?;
        let api = api(ctx)?;
        let person = Person { name, email };
        let token =
            auth::create_administrator(api.store.as_ref(), api.clock.as_ref(), &person).await.map_err(failed)?;
        Ok(CreateTokenPayload { token })
    }

    /// Gives a cluster's agent another token, shown this once. The tokens that it had do not count any more.
    async fn replace_agent_token(&self, ctx: &Context<'_>, cluster: ID) -> Result<CreateTokenPayload> {
        administrator(ctx)?;
        let api = api(ctx)?;
        let found = api.store.cluster(&cluster).await.map_err(failed)?;
        let found = found.ok_or_else(|| coded(format!("cluster \"{}\" does not exist", *cluster), "NOT_FOUND"))?;
        let token = auth::replace_agent_token(api.store.as_ref(), api.clock.as_ref(), &found).await.map_err(failed)?;
        Ok(CreateTokenPayload { token })
    }

    /// Has Flux install or upgrade a cluster's agent: commits this server's chart of it, and a HelmRelease with these
    /// values (those of the last time when absent), to the cluster's repository.
    async fn release_agent(
        &self,
        ctx: &Context<'_>,
        cluster: ID,
        values: Option<Json<config::Object>>,
    ) -> Result<Cluster> {
        let author = administrator(ctx)?;
        let values = values.map(|values| values.0);
        api(ctx)?.changes.release_agent(&cluster, values, author).await.map(Cluster).map_err(refused)
    }

    /// Adds a cluster.
    async fn create_cluster(&self, ctx: &Context<'_>, input: CreateClusterInput) -> Result<CreateClusterPayload> {
        let author = administrator(ctx)?;
        let mut forge = None;
        let git = input.git.map(|git| {
            forge = git.forge.map(ForgeInput::from);
            GitInput { url: git.url, branch: git.branch, path: git.path, access: git.access.into() }
        });
        let input = CreateCluster {
            name: input.name,
            config: input.config.map(|config| config.0).unwrap_or_default(),
            git,
            age_recipients: recipients(input.age_recipient, input.age_recipients).unwrap_or_default(),
            edits: input.edits.into(),
            trusted_keys: input.verification.map(|verification| verification.trusted_keys),
            delivery: input.delivery.unwrap_or_default(),
            forge,
        };
        let (cluster, agent_token) = api(ctx)?.changes.create_cluster(input, author).await.map_err(refused)?;
        let warnings = changes::cluster_warnings(&cluster);
        Ok(CreateClusterPayload { cluster: Cluster(cluster), agent_token, warnings })
    }

    /// Changes a cluster's configuration and takes it to every deployment that it changes. The same once more
    /// tries again those that could not be changed.
    #[expect(clippy::too_many_arguments, reason = "each is an argument of the mutation")]
    async fn update_cluster(
        &self,
        ctx: &Context<'_>,
        id: ID,
        config: Option<ConfigPatch>,
        age_recipient: Option<String>,
        age_recipients: Option<Vec<String>>,
        edits: Option<EditRulesInput>,
        git: Option<GitAccessInput>,
        forge: Option<RepositoryForgeInput>,
        rules: Option<DeliveryRules>,
        delivery: Option<Delivery>,
    ) -> Result<UpdateClusterPayload> {
        let author = administrator(ctx)?;
        let patch = Wrapped::from(config).0;
        let age_recipients = recipients(age_recipient, age_recipients);
        let update = UpdateCluster {
            age_recipients,
            edits: edits.into(),
            access: git.map(Access::from),
            delivery: rules.unwrap_or_default(),
            forge: forge.map(ForgeInput::from),
            asked: delivery,
        };
        let updated = api(ctx)?.changes.update_cluster(&id, &patch, update, author).await;
        let (cluster, fan_out) = updated.map_err(refused)?;
        Ok(UpdateClusterPayload { cluster: Cluster(cluster), fan_out: FanOut(fan_out) })
    }

    /// Adds an environment to a cluster.
    async fn create_environment(
        &self,
        ctx: &Context<'_>,
        cluster: ID,
        name: String,
        config: Option<Json<config::Object>>,
        rules: Option<DeliveryRules>,
    ) -> Result<Environment> {
        let author = administrator(ctx)?;
        let config = config.map(|config| config.0).unwrap_or_default();
        let changes = &api(ctx)?.changes;
        let created = changes.create_environment(&cluster, &name, config, rules.unwrap_or_default(), author).await;
        Ok(Environment(created.map_err(refused)?))
    }

    /// Changes an environment's configuration and takes it to every deployment that it changes. The same once
    /// more tries again those that could not be changed.
    async fn update_environment(
        &self,
        ctx: &Context<'_>,
        id: ID,
        config: Option<ConfigPatch>,
        rules: Option<DeliveryRules>,
        delivery: Option<Delivery>,
    ) -> Result<UpdateEnvironmentPayload> {
        let author = administrator(ctx)?;
        let patch = Wrapped::from(config).0;
        let updated =
            api(ctx)?.changes.update_environment(&id, &patch, &rules.unwrap_or_default(), delivery, author).await;
        let (environment, fan_out) = updated.map_err(refused)?;
        Ok(UpdateEnvironmentPayload { environment: Environment(environment), fan_out: FanOut(fan_out) })
    }

    /// Adds a deployment.
    async fn create_deployment(
        &self,
        ctx: &Context<'_>,
        input: CreateDeploymentInput,
        delivery: Option<Delivery>,
    ) -> Result<ChangePayload> {
        let author = administrator(ctx)?;
        Ok(api(ctx)?.changes.create_deployment(input.into(), delivery, author).await.map_err(refused)?.into())
    }

    /// Changes a deployment's configuration and parameters. With `baseInstanceId` only when that is
    /// still its newest instance.
    async fn update_deployment(
        &self,
        ctx: &Context<'_>,
        id: ID,
        input: UpdateDeploymentInput,
        base_instance_id: Option<ID>,
        delivery: Option<Delivery>,
    ) -> Result<ChangePayload> {
        request(ctx, &id, Request::Update(input.into()), base_instance_id, delivery).await
    }

    /// Moves a deployment to an application version, choosing the driver version again.
    async fn upgrade_deployment(
        &self,
        ctx: &Context<'_>,
        id: ID,
        application_version: Option<String>,
        driver_version: Option<String>,
        base_instance_id: Option<ID>,
        delivery: Option<Delivery>,
    ) -> Result<ChangePayload> {
        request(ctx, &id, Request::Upgrade { application_version, driver_version }, base_instance_id, delivery).await
    }

    /// Gives a component another number of pods. A stopped one starts.
    async fn scale_deployment(
        &self,
        ctx: &Context<'_>,
        id: ID,
        component: String,
        replicas: u32,
        base_instance_id: Option<ID>,
        delivery: Option<Delivery>,
    ) -> Result<ChangePayload> {
        request(ctx, &id, Request::Scale { component, replicas }, base_instance_id, delivery).await
    }

    /// Takes the pods of components away. How many they have is not forgotten.
    async fn stop_components(
        &self,
        ctx: &Context<'_>,
        id: ID,
        components: Vec<String>,
        base_instance_id: Option<ID>,
        delivery: Option<Delivery>,
    ) -> Result<ChangePayload> {
        request(ctx, &id, Request::StopComponents(components), base_instance_id, delivery).await
    }

    /// Gives components their pods back.
    async fn start_components(
        &self,
        ctx: &Context<'_>,
        id: ID,
        components: Vec<String>,
        base_instance_id: Option<ID>,
        delivery: Option<Delivery>,
    ) -> Result<ChangePayload> {
        request(ctx, &id, Request::StartComponents(components), base_instance_id, delivery).await
    }

    /// Takes all pods of a deployment away; its data stays.
    async fn stop_deployment(
        &self,
        ctx: &Context<'_>,
        id: ID,
        base_instance_id: Option<ID>,
        delivery: Option<Delivery>,
    ) -> Result<ChangePayload> {
        request(ctx, &id, Request::Stop, base_instance_id, delivery).await
    }

    /// Runs a stopped deployment again.
    async fn start_deployment(
        &self,
        ctx: &Context<'_>,
        id: ID,
        base_instance_id: Option<ID>,
        delivery: Option<Delivery>,
    ) -> Result<ChangePayload> {
        request(ctx, &id, Request::Start, base_instance_id, delivery).await
    }

    /// Runs a job of the driver once.
    async fn run_job(
        &self,
        ctx: &Context<'_>,
        id: ID,
        action: String,
        base_instance_id: Option<ID>,
        delivery: Option<Delivery>,
    ) -> Result<ChangePayload> {
        request(ctx, &id, Request::RunJob { action }, base_instance_id, delivery).await
    }

    /// Tries the newest task of a deployment again, after it failed.
    async fn retry_task(&self, ctx: &Context<'_>, task: ID, delivery: Option<Delivery>) -> Result<ChangePayload> {
        administrator(ctx)?;
        let id = api(ctx)?.changes.deployment_of(&task).await.map_err(refused)?;
        request(ctx, &ID(id), Request::Retry { task: task.0 }, None, delivery).await
    }

    /// Goes back to an earlier instance: its configuration, parameters, secrets, driver and version. What
    /// cluster and environment have set since then comes back with the next change or fan-out.
    async fn rollback_deployment(
        &self,
        ctx: &Context<'_>,
        id: ID,
        to_instance: ID,
        base_instance_id: Option<ID>,
        delivery: Option<Delivery>,
    ) -> Result<ChangePayload> {
        request(ctx, &id, Request::Rollback { instance: to_instance.0 }, base_instance_id, delivery).await
    }

    /// Removes a deployment.
    async fn delete_deployment(
        &self,
        ctx: &Context<'_>,
        id: ID,
        base_instance_id: Option<ID>,
        delivery: Option<Delivery>,
    ) -> Result<ChangePayload> {
        request(ctx, &id, Request::Delete, base_instance_id, delivery).await
    }

    /// Decides about an edit of a repository that is held, or about a removal that waits.
    async fn decide_edit(&self, ctx: &Context<'_>, id: ID, decision: EditDecision) -> Result<Edit> {
        let person = administrator(ctx)?;
        let decision = match decision {
            EditDecision::Adopt => Decision::Adopt,
            EditDecision::Restore => Decision::Restore,
        };
        Ok(Edit(api(ctx)?.changes.decide_edit(&id, decision, person).await.map_err(refused)?))
    }

    /// Takes a proposal back: it is closed without a merge, on the forge too.
    async fn close_proposal(&self, ctx: &Context<'_>, id: ID) -> Result<Proposal> {
        let person = administrator(ctx)?;
        let message = format!("{} closed it", person.name);
        let ended = api(ctx)?.changes.end_proposal(&id, ProposalState::Closed, &message).await;
        Ok(Proposal(ended.map_err(refused)?))
    }

    /// For agents: all pods of the cluster, or with `delta` those that are new or differ. What is in neither is
    /// gone.
    async fn report_pod_statuses(
        &self,
        ctx: &Context<'_>,
        agent: reports::Agent,
        pods: Vec<PodStatus>,
        digest: Option<String>,
        delta: Option<reports::Delta>,
    ) -> Result<ReportAnswer> {
        report(ctx, agent, Said { items: Items::Pods(pods), digest, delta }).await
    }

    /// For agents: all StyrminDeployments of the cluster, or with `delta` those that are new or differ. What is
    /// in neither is gone.
    async fn report_deployment_statuses(
        &self,
        ctx: &Context<'_>,
        agent: reports::Agent,
        deployments: Vec<DeploymentStatus>,
        digest: Option<String>,
        delta: Option<reports::Delta>,
    ) -> Result<ReportAnswer> {
        report(ctx, agent, Said { items: Items::Deployments(deployments), digest, delta }).await
    }

    /// For agents: all GitRepositories and Kustomizations of the cluster, or with `delta` those that are new or
    /// differ. What is in neither is gone.
    async fn report_flux_statuses(
        &self,
        ctx: &Context<'_>,
        agent: reports::Agent,
        statuses: Vec<FluxStatus>,
        digest: Option<String>,
        delta: Option<reports::Delta>,
    ) -> Result<ReportAnswer> {
        report(ctx, agent, Said { items: Items::Flux(statuses), digest, delta }).await
    }

    /// For agents: for which age recipients Flux can decrypt in the cluster.
    async fn report_recipients(
        &self,
        ctx: &Context<'_>,
        identity: String,
        epoch: i64,
        recipients: Vec<String>,
    ) -> Result<bool> {
        let cluster = agent_cluster(ctx)?;
        api(ctx)?.reports.recipients(cluster, &identity, epoch, recipients).await.map_err(not_accepted)?;
        Ok(true)
    }

    /// For agents: what the agent is, and what no snapshot shows. `sentAt` is its clock.
    async fn report_facts(&self, ctx: &Context<'_>, epoch: i64, facts: FactsInput) -> Result<bool> {
        let cluster = agent_cluster(ctx)?;
        let FactsInput { version, kind, waits_for, sent_at, cluster_uid } = facts;
        let facts = AgentFacts { version, kind, waits_for };
        api(ctx)?.reports.facts(cluster, (epoch, &cluster_uid), facts, &sent_at).await.map_err(not_accepted)?;
        Ok(true)
    }

    /// For agents: nothing differs from what this process reported last. `digest` is that of all of it.
    async fn report_unchanged(
        &self,
        ctx: &Context<'_>,
        epoch: i64,
        sequence: i64,
        digest: String,
    ) -> Result<ReportAnswer> {
        let cluster = agent_cluster(ctx)?;
        let accepted = api(ctx)?.reports.accept_unchanged(cluster, epoch, sequence, &digest).await;
        Ok(accepted.map_err(not_accepted)?.into())
    }
}
