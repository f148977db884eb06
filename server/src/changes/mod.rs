//! Mutations → instance + task. The only writer of desired state.
//!
//! **Compute outside, commit inside.** A change reads the rows with their versions, resolves the
//! context, selects the driver version, renders and checks everything; then one short transaction
//! verifies the versions and stores patch, instance, task and outbox row together. A version that
//! moved means: compute again. So two people's changes at the same time both count, and nothing is
//! ever half stored. What must never enter: Git, clusters, HTTP.
//!
//! [`Changes`] has one method per mutation; `compute` holds what they share and does no I/O. `fan_out` takes a
//! changed configuration to the deployments; `edits` takes over what people change in the repository.

mod compute;
mod edits;
mod error;
mod fan_out;
mod locks;
mod preview;
mod proposals;
mod request;

pub use edits::Decision;
pub use error::{BaseMoved, ChangeError};
pub use preview::{ObjectChange, Preview, unified};
pub(crate) use proposals::short_id;
pub use proposals::{BRANCHES, BranchEdit, Part, Refreshed, Scene};
pub use request::{CreateDeployment, Request, UpdateDeployment, Wish};

use crate::clock::{Clock, timestamp};
use crate::drivers::{Drivers, SelectError};
use crate::reports::DeploymentStatus;
use crate::repository::{self, Access, Location, Wake};
use crate::secrets::{Plain, ServerKey, credentials_place, sops};
use crate::store::{
    AgentRelease, Cluster, Delivery, DeliveryRules, Deployment, DeploymentState, EditPolicy, Environment, FanOut,
    FanOutLevel, ForgeAddress, ForgeKind, Lifecycle, Notice, Person, Proposal, Snapshot, StatusScope, Store,
    StoreError, Target, Task,
};
use crate::{auth, metrics};
use compute::{Computation, Edit, Rows, Runs};
use locks::Locks;
use request::Named;
use serde_json::Value;
use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use styrmin_renderer::config::{self, Level, Object, Patch};
use styrmin_renderer::{Problem, Problems};
use styrmin_renderer::{context, names};
use tokio::sync::Notify;

/// How often a change is computed again when its rows moved. Changes of one server queue up, so
/// only those of other replicas can make it necessary.
const ATTEMPTS: u32 = 20;
/// How long a change waits for the ones before it on the same deployment.
const QUEUE_LIMIT: Duration = Duration::from_secs(75);

/// Where a cluster's repository is.
#[derive(Debug, Clone)]
pub struct GitInput {
    /// Any Git URL; without credentials.
    pub url: String,
    /// Branch that Flux follows.
    pub branch: Option<String>,
    /// Folder of the cluster in the repository.
    pub path: Option<String>,
    /// What opens it.
    pub access: Access,
}

/// A new cluster.
#[derive(Debug, Clone)]
pub struct CreateCluster {
    /// Unique name.
    pub name: String,
    /// Configuration.
    pub config: Object,
    /// Its repository; `None`: hosted by this server.
    pub git: Option<GitInput>,
    /// age recipients for secrets.
    pub age_recipients: Vec<String>,
    /// What is done about people's edits.
    pub edits: EditRules,
    /// Public keys of others whose commits Flux shall accept beside ours; `None`: it accepts every commit.
    pub trusted_keys: Option<Vec<String>>,
    /// How changes are delivered.
    pub delivery: DeliveryRules,
    /// The forge of its repository.
    pub forge: Option<ForgeInput>,
}

impl std::fmt::Debug for ForgeInput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ForgeInput").field("kind", &self.kind).field("url", &self.url).finish_non_exhaustive()
    }
}

/// The forge of a repository, as a person gives it; in a change, what is not set stays.
#[derive(Clone, Default)]
pub struct ForgeInput {
    /// Its kind.
    pub kind: Option<ForgeKind>,
    /// Base of its API; from the repository's URL when absent.
    pub url: Option<String>,
    /// Token for its API; the repository's password when absent.
    pub token: Option<String>,
    /// With it the forge signs what it sends to the webhook.
    pub webhook_secret: Option<String>,
}

/// A change of a cluster besides its configuration; `None`: as it is.
#[derive(Debug, Clone, Default)]
pub struct UpdateCluster {
    /// age recipients for secrets.
    pub age_recipients: Option<Vec<String>>,
    /// What is done about people's edits.
    pub edits: EditRules,
    /// What opens its repository; fields that are not set stay.
    pub access: Option<Access>,
    /// How changes are delivered; what is not set stays.
    pub delivery: DeliveryRules,
    /// The forge of its repository; what is not set stays.
    pub forge: Option<ForgeInput>,
    /// How this change of the configuration is delivered.
    pub asked: Option<Delivery>,
}

/// What is done about what people change in a cluster's repository; `None`: as it is, or by default.
#[derive(Debug, Clone, Copy, Default)]
pub struct EditRules {
    /// `adopt` by default.
    pub policy: Option<EditPolicy>,
    /// How many removals at once are taken over without asking; 0 by default.
    pub removal_threshold: Option<u32>,
}

/// What a change led to.
#[derive(Debug, Clone)]
pub struct Changed {
    /// The row as stored.
    pub deployment: Deployment,
    /// Its task; `None`: nothing changes for the cluster.
    pub task: Option<Task>,
    /// The proposal that it waits in.
    pub proposal: Option<Proposal>,
}

/// Makes changes.
pub struct Changes {
    store: Arc<dyn Store>,
    drivers: Arc<Drivers>,
    key: Arc<ServerKey>,
    clock: Arc<dyn Clock>,
    wake: Wake,
    locks: Locks,
    /// A fan-out has begun.
    fan_outs: Notify,
}

type Result<T> = std::result::Result<T, ChangeError>;

fn id() -> String {
    names::id_from_random(rand::random())
}

fn invalid(object: impl Into<String>, field: impl Into<String>, message: impl Into<String>) -> ChangeError {
    Problems::from(Problem::new(object, field, message)).into()
}

fn check_name(kind: &str, name: &str) -> Result<()> {
    names::dns_label(name, names::LABEL_MAX).map_err(|message| invalid(format!("{kind} \"{name}\""), "name", message))
}

fn parse_id<T: FromStr<Err = String>>(kind: &'static str, text: &str) -> Result<T> {
    text.parse().map_err(|_| ChangeError::NotFound { kind, id: text.to_owned() })
}

impl Changes {
    /// Puts the room together.
    #[must_use]
    pub fn new(
        store: Arc<dyn Store>,
        drivers: Arc<Drivers>,
        key: Arc<ServerKey>,
        clock: Arc<dyn Clock>,
        wake: Wake,
    ) -> Self {
        Self { store, drivers, key, clock, wake, locks: Locks::default(), fan_outs: Notify::new() }
    }

    /// Something that was kept back may be written now: a new row of the outbox tells by itself.
    async fn wake(&self, target: &Target) {
        self.wake.target(target);
        self.tell(&Notice::Waits(target.clone())).await;
    }

    /// Losing a notice costs time only.
    async fn tell(&self, notice: &Notice) {
        if let Err(error) = self.store.tell(notice).await {
            tracing::warn!(%error, "other servers are not told");
        }
    }

    /// Adds a cluster; gives it back with its agent's token, which is shown this once.
    ///
    /// # Errors
    /// When the input is not good or the name or place is taken.
    pub async fn create_cluster(&self, input: CreateCluster, author: &Person) -> Result<(Cluster, String)> {
        let object = format!("cluster \"{}\"", input.name);
        check_name("cluster", &input.name)?;
        config::check(&object, Level::Cluster, &input.config)?;
        check_recipients(&object, &input.age_recipients)?;
        for (index, key) in input.trusted_keys.iter().flatten().enumerate() {
            let field = format!("verification.trusted_keys[{index}]");
            repository::key_suffix(key).map_err(|message| invalid(&object, field, message))?;
        }
        let id = id();
        let now = self.clock.now();
        check_delivery(&object, &input.delivery)?;
        let (location, credentials) = match &input.git {
            None => (Location::embedded(&id), None),
            Some(git) => {
                let location = Location::parse(&git.url, git.branch.as_deref(), git.path.as_deref())
                    .map_err(|problem| invalid(&object, problem.field, problem.message))?;
                (location, self.seal_access(&object, &id, &git.url, &git.access)?)
            }
        };
        self.check_place(&object, &location).await?;
        let (forge, forge_secrets) = match &input.forge {
            Some(forge) => {
                let access = input.git.as_ref().map(|git| git.access.clone()).unwrap_or_default();
                let url = input.git.as_ref().map(|git| git.url.as_str());
                let known = (None, ForgeSecrets::default());
                self.forge_of(&object, &id, url, &access, forge, known)?
            }
            None => (None, None),
        };
        let cluster = Cluster {
            id: id.clone(),
            name: input.name.clone(),
            config: input.config,
            version: 1,
            git_url: input.git.map(|git| git.url),
            repository: location.repository,
            branch: location.branch,
            path: location.path,
            credentials,
            age_recipients: input.age_recipients,
            edit_policy: input.edits.policy.unwrap_or(EditPolicy::Adopt),
            removal_threshold: input.edits.removal_threshold.unwrap_or_default().into(),
            trusted_keys: input.trusted_keys,
            delivery: input.delivery,
            forge,
            forge_secrets,
            created_at: now,
        };
        let (text, agent) = auth::agent_token(&cluster.id, &cluster.name, now);
        match self.store.insert_cluster(&cluster, &agent, author).await {
            Err(StoreError::Exists) => {
                return Err(invalid(
                    object,
                    "name",
                    "is taken, or its repository, branch and path are; choose another",
                ));
            }
            other => other?,
        }
        self.wake.target(&Target { repository: cluster.repository.clone(), branch: cluster.branch.clone() });
        Ok((cluster, text))
    }

    /// Asks for the release of a cluster's agent in its repository, with the chart of this server; `values` are the
    /// chart's, or those of the last time.
    ///
    /// # Errors
    /// When there is no such cluster, or no values at all.
    pub async fn release_agent(&self, id: &str, values: Option<config::Object>, author: &Person) -> Result<Cluster> {
        let cluster = self.cluster(id).await?;
        let object = format!("agent of cluster \"{}\"", cluster.name);
        let known = self.store.agent_release(&cluster.id).await?;
        let has_flux = |values: &config::Object| values.get("flux").is_some_and(|flux| flux["enabled"] == true);
        let had_flux = known.as_ref().is_some_and(|known| has_flux(&known.values));
        let Some(values) = values.or(known.map(|known| known.values)) else {
            return Err(invalid(&object, "values", "are not known: give those of the chart, server.address at least"));
        };
        let address = values.get("server").and_then(|server| server["address"].as_str()).unwrap_or_default();
        if !address.starts_with("http://") && !address.starts_with("https://") {
            return Err(invalid(
                &object,
                "values.server.address",
                "has to be the URL of this server, as pods of the cluster reach it",
            ));
        }
        if has_flux(&values) && values["flux"]["crds"] != false {
            let message = "has to be false with flux.enabled: the chart in the repository lacks Flux's kinds; apply them yourself when Flux's version changes";
            return Err(invalid(&object, "values.flux.crds", message));
        }
        if had_flux && !has_flux(&values) {
            let message = "may not become false: Helm would remove Flux, and nothing would bring anything into the cluster any more";
            return Err(invalid(&object, "values.flux.enabled", message));
        }
        let text = serde_json::to_string(&values).unwrap_or_default();
        if text.len() > VALUES_MAX {
            return Err(invalid(
                &object,
                "values",
                format!("have {} bytes; at most {VALUES_MAX} are possible", text.len()),
            ));
        }
        let release = AgentRelease {
            cluster_id: cluster.id.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            values,
            released_at: self.clock.now(),
        };
        let target = Target { repository: cluster.repository.clone(), branch: cluster.branch.clone() };
        self.store.set_agent_release(&release, &target, author).await?;
        self.wake.target(&target);
        Ok(cluster)
    }

    fn seal_access(&self, object: &str, id: &str, url: &str, access: &Access) -> Result<Option<Vec<u8>>> {
        access.check(url).map_err(|(field, message)| invalid(object, field, message))?;
        if access.is_open() {
            return Ok(None);
        }
        Ok(Some(self.key.seal(&credentials_place(id), &Plain::new(access.to_text()))?))
    }

    /// What opens the repository of a cluster from now on, where `newer` says something; the next look at the
    /// repository uses it.
    fn replace_access(&self, object: &str, row: &Cluster, newer: &Access) -> Result<Option<Vec<u8>>> {
        let Some(url) = &row.git_url else {
            return Err(invalid(object, "git", "its repository is this server's own, which needs no credentials"));
        };
        let known = self.access_of(row)?;
        self.seal_access(object, &row.id, url, &known.replaced_by(newer.clone()))
    }

    /// No cluster's folder may lie inside another's: each writes its own files only.
    async fn check_place(&self, object: &str, location: &Location) -> Result<()> {
        let mut after = None;
        loop {
            let page = self.store.clusters(after, 500).await?;
            for other in &page {
                if other.repository == location.repository
                    && other.branch == location.branch
                    && repository::overlap(&other.path, &location.path)
                {
                    return Err(invalid(
                        object,
                        "git.path",
                        format!(
                            "\"{}\" overlaps with the folder \"{}\" of cluster \"{}\" in the same repository and branch; choose another path",
                            location.path, other.path, other.name
                        ),
                    ));
                }
            }
            let Some(last) = page.last().filter(|_| page.len() == 500) else { return Ok(()) };
            after = Some((last.name.clone(), last.id.clone()));
        }
    }

    /// Changes a cluster's configuration and, when given, its age recipient, and begins to take that to its
    /// deployments. The same once more tries again what could not be done.
    ///
    /// # Errors
    /// When it does not exist or the input is not good.
    pub async fn update_cluster(
        &self,
        id: &str,
        patch: &Patch,
        update: UpdateCluster,
        author: &Person,
    ) -> Result<(Cluster, FanOut)> {
        let UpdateCluster { age_recipients, edits, mut access, delivery, mut forge, asked } = update;
        for _ in 0..ATTEMPTS {
            let mut row = self.cluster(id).await?;
            let known = row.clone();
            let object = format!("cluster \"{}\"", row.name);
            check_delivery(&object, &delivery)?;
            check_recipients(&object, age_recipients.as_deref().unwrap_or_default())?;
            let config = patch.apply(&object, &row.config)?;
            config::check(&object, Level::Cluster, &config)?;
            // Only the configuration is reviewed: what opens a repository, and how it is worked with, counts at once.
            let review = proposals::rules_of(&row, None, asked).filter(|_| *patch != Patch::default());
            if review.is_none() {
                row.config = config;
            }
            row.delivery = delivery.clone().over(row.delivery);
            row.age_recipients = age_recipients.clone().unwrap_or(row.age_recipients);
            if let Some(access) = &access {
                row.credentials = self.replace_access(&object, &row, access)?;
            }
            row.edit_policy = edits.policy.unwrap_or(row.edit_policy);
            row.removal_threshold = edits.removal_threshold.map_or(row.removal_threshold, i64::from);
            if let Some(forge) = &forge {
                (row.forge, row.forge_secrets) = self.replace_forge(&object, &row, forge)?;
            }
            if let Some(rules) = review.clone().filter(|_| row == known) {
                let subject = (row.id.as_str(), row.name.as_str(), row.id.as_str());
                match self.propose_level(FanOutLevel::Cluster, subject, patch, rules, author).await {
                    Err(ChangeError::Store(StoreError::Conflict)) => continue,
                    proposed => return Ok((row.clone(), proposed?.1)),
                }
            }
            let fan_out = self.new_fan_out(FanOutLevel::Cluster, &row.id, &row.id, author);
            match self.store.update_cluster(&row, &fan_out).await {
                Err(StoreError::Conflict) => {}
                other => {
                    other?;
                    self.fan_outs.notify_one();
                    let target = Target { repository: row.repository.clone(), branch: row.branch.clone() };
                    self.wake.look(&target);
                    self.tell(&Notice::Look(target)).await;
                    let row = Cluster { version: row.version + 1, ..row };
                    if review.is_none() {
                        return Ok((row, fan_out));
                    }
                    // The rest counts; the next turn proposes the configuration.
                    (access, forge) = (None, None);
                }
            }
        }
        Err(ChangeError::Busy)
    }

    /// Adds an environment.
    ///
    /// # Errors
    /// When the cluster does not exist, the input is not good or the name is taken.
    pub async fn create_environment(
        &self,
        cluster: &str,
        name: &str,
        config: Object,
        delivery: DeliveryRules,
        author: &Person,
    ) -> Result<Environment> {
        let cluster = self.cluster(cluster).await?;
        let object = format!("environment \"{name}\"");
        check_name("environment", name)?;
        config::check(&object, Level::Environment, &config)?;
        check_delivery(&object, &delivery)?;
        let row = Environment {
            id: id(),
            cluster_id: cluster.id.clone(),
            name: name.to_owned(),
            config,
            version: 1,
            allocated: 0,
            delivery,
            created_at: self.clock.now(),
        };
        let target = Target { repository: cluster.repository, branch: cluster.branch };
        match self.store.insert_environment(&row, &target, author).await {
            Err(StoreError::Exists) => {
                return Err(invalid(
                    object,
                    "name",
                    format!("is taken in cluster \"{}\"; choose another", cluster.name),
                ));
            }
            other => other?,
        }
        self.wake.target(&target);
        Ok(row)
    }

    /// Changes an environment's configuration and begins to take it to its deployments. The same once more tries
    /// again what could not be done.
    ///
    /// # Errors
    /// When it does not exist or the input is not good.
    pub async fn update_environment(
        &self,
        id: &str,
        patch: &Patch,
        delivery: &DeliveryRules,
        asked: Option<Delivery>,
        author: &Person,
    ) -> Result<(Environment, FanOut)> {
        for _ in 0..ATTEMPTS {
            let mut row = self.environment(id).await?;
            let object = format!("environment \"{}\"", row.name);
            check_delivery(&object, delivery)?;
            let config = patch.apply(&object, &row.config)?;
            config::check(&object, Level::Environment, &config)?;
            let cluster = self.cluster(&row.cluster_id).await?;
            let review = proposals::rules_of(&cluster, Some(&row), asked).filter(|_| *patch != Patch::default());
            let own = delivery.clone().over(row.delivery.clone());
            if let Some(rules) = &review
                && own == row.delivery
            {
                let subject = (row.id.as_str(), row.name.as_str(), row.cluster_id.as_str());
                match self.propose_level(FanOutLevel::Environment, subject, patch, rules.clone(), author).await {
                    Err(ChangeError::Store(StoreError::Conflict)) => continue,
                    proposed => return Ok((row.clone(), proposed?.1)),
                }
            }
            row.delivery = own;
            if review.is_none() {
                row.config = config;
            }
            let fan_out = self.new_fan_out(FanOutLevel::Environment, &row.id, &row.cluster_id, author);
            match self.store.update_environment(&row, &fan_out).await {
                Err(StoreError::Conflict) => {}
                other => {
                    other?;
                    self.fan_outs.notify_one();
                    let row = Environment { version: row.version + 1, ..row };
                    if review.is_none() {
                        return Ok((row, fan_out));
                    }
                    // The rules count; the next turn proposes the configuration.
                }
            }
        }
        Err(ChangeError::Busy)
    }

    /// Adds a deployment.
    ///
    /// # Errors
    /// When the environment or driver does not exist, the input is not good or the name is taken.
    pub async fn create_deployment(
        &self,
        input: CreateDeployment,
        asked: Option<Delivery>,
        author: &Person,
    ) -> Result<Changed> {
        let id = id();
        for _ in 0..ATTEMPTS {
            let rows = self.new_rows(&input, &id).await?;
            let review = self.rules(&input.environment, asked).await?;
            let created = match review {
                Some(rules) => self.propose_new(rows, input.edit(), rules, author).await,
                None => self.store_change(rows, input.edit(), author).await,
            };
            match created {
                Err(ChangeError::Store(StoreError::Conflict)) => {}
                Err(ChangeError::Store(StoreError::Exists)) => {
                    let object = format!("deployment \"{}\"", input.name);
                    return Err(invalid(object, "name", "is taken in this environment; choose another"));
                }
                other => return other,
            }
        }
        Err(ChangeError::Busy)
    }

    /// The rows of a deployment that is not there yet.
    async fn new_rows(&self, input: &CreateDeployment, id: &str) -> Result<Rows> {
        let object = format!("deployment \"{}\"", input.name);
        check_name("deployment", &input.name)?;
        let (driver, application_version) = self
            .drivers
            .catalog()
            .select(&input.driver, input.application_version.as_deref(), input.driver_version.as_deref())
            .map_err(|SelectError { field, message }| invalid(&object, field, message))?;
        let deployment = Deployment {
            id: id.to_owned(),
            environment_id: input.environment.clone(),
            name: input.name.clone(),
            shard: 0,
            driver_name: driver.name().to_owned(),
            driver_digest: driver.digest.clone(),
            driver_pin: input.driver_version.clone(),
            application_version,
            config: Object::new(),
            parameters: Object::new(),
            lifecycle: Lifecycle::Running,
            state: DeploymentState::Pending,
            version: 0,
            last_sequence: 0,
            newest_instance_id: None,
            active_instance_id: None,
            created_at: self.clock.now(),
        };
        let environment = self.environment(&input.environment).await?;
        let cluster = self.cluster(&environment.cluster_id).await?;
        let decrypts = self.store.recipients(&cluster.id).await?;
        Ok(Rows {
            decrypts,
            cluster,
            environment,
            deployment,
            driver: Some(driver),
            newest: None,
            active: None,
            secrets: Vec::new(),
            runs: Runs::default(),
        })
    }

    /// What a change would lead to. Nothing is stored.
    ///
    /// # Errors
    /// As the change itself.
    pub async fn preview(&self, wish: &Wish, author: &Person) -> Result<Preview> {
        let (rows, edit) = match wish {
            Wish::Create(input) => (self.new_rows(input, &id()).await?, input.edit()),
            Wish::Change { deployment, request } => {
                let named = self.named(request).await?;
                let rows = self.rows(deployment).await?;
                // What is in review already, if this goes there too.
                let (mut edits, review) = self.in_review(&rows).await?;
                let seen = compute::applied(&rows, &edits, &self.key)?;
                let edit = request.edit(&seen, &named, &self.drivers.catalog())?;
                check_lifecycle(&seen, &edit)?;
                if edit.is_done(&seen) {
                    return Ok(Preview::default());
                }
                edits.push(edit);
                let computation = Computation { review, ..self.computation(rows, edits, author) };
                return on_a_thread(move || preview::preview(&computation)).await;
            }
        };
        let computation = self.computation(rows, vec![edit], author);
        on_a_thread(move || preview::preview(&computation)).await
    }

    /// Does what somebody asks of a deployment. Asking again for what is, or is on its way, is nothing.
    ///
    /// # Errors
    /// When it does not exist, is being deleted, the request is not good, or `base` is not its newest instance.
    pub async fn change(
        &self,
        id: &str,
        request: &Request,
        base: Option<&str>,
        asked: Option<Delivery>,
        author: &Person,
    ) -> Result<Changed> {
        let named = self.named(request).await?;
        if let Some(rules) = self.review_of(id, asked).await? {
            let decide = |rows: &Rows| request.edit(rows, &named, &self.drivers.catalog());
            return self.propose(id, base, &rules, author, decide).await;
        }
        self.edit(id, base, author, |rows| request.edit(rows, &named, &self.drivers.catalog())).await
    }

    /// What a request names besides the deployment.
    async fn named(&self, request: &Request) -> Result<Named> {
        let mut named = Named::default();
        if let Some(id) = request.task() {
            named.task = self.store.task(id).await?;
        }
        if let Some(id) = request.instance() {
            named.instance = self.store.instance(id).await?;
        }
        Ok(named)
    }

    /// The deployment of a task.
    ///
    /// # Errors
    /// When there is no such task.
    pub async fn deployment_of(&self, task: &str) -> Result<String> {
        let found = self.store.task(task).await?;
        found.map(|task| task.deployment_id).ok_or_else(|| ChangeError::NotFound { kind: "task", id: task.to_owned() })
    }

    /// Reads, lets `decide` say what to change, computes and stores; again while rows move.
    async fn edit(
        &self,
        id: &str,
        base: Option<&str>,
        author: &Person,
        decide: impl Fn(&Rows) -> Result<Edit>,
    ) -> Result<Changed> {
        let Ok(_turn) = tokio::time::timeout(QUEUE_LIMIT, self.locks.lock(id)).await else {
            return Err(ChangeError::Busy);
        };
        for _ in 0..ATTEMPTS {
            let rows = self.rows(id).await?;
            self.check_base(&rows, base).await?;
            let edit = decide(&rows)?;
            check_lifecycle(&rows, &edit)?;
            if edit.is_done(&rows) {
                return Ok(Changed { deployment: rows.deployment, task: None, proposal: None });
            }
            match self.store_change(rows, edit, author).await {
                Err(ChangeError::Store(StoreError::Conflict)) => metrics::change_conflicts().inc(),
                other => return other,
            };
        }
        Err(ChangeError::Busy)
    }

    /// Computes on a thread for such work, stores, wakes the writer.
    async fn store_change(&self, rows: Rows, edit: Edit, author: &Person) -> Result<Changed> {
        let computation = self.computation(rows, vec![edit], author);
        let change = on_a_thread(move || compute::run(&computation)).await?;
        let deployment =
            if change.is_nothing { change.change.deployment } else { self.store.change(&change.change).await? };
        let task = change.change.instance.map(|(_, task)| task);
        if let Some(task) = &task {
            crate::faults::point("after-transaction");
            metrics::changes(&task.workflow).inc();
            // It is accepted: that nobody is told why it waits is no reason to say otherwise.
            if let Err(error) = self.explain_if_held(&deployment.id).await {
                tracing::error!(%error, deployment = deployment.id, "a change cannot be told whether it waits");
            }
            self.wake.target(&change.change.target);
        }
        Ok(Changed { deployment, task, proposal: None })
    }

    fn computation(&self, rows: Rows, edits: Vec<Edit>, author: &Person) -> Computation {
        Computation {
            rows,
            edits,
            review: None,
            author: author.clone(),
            key: Arc::clone(&self.key),
            now: self.clock.now(),
            timestamp: timestamp(self.clock.now()),
        }
    }

    async fn rows(&self, id: &str) -> Result<Rows> {
        let not_found = || ChangeError::NotFound { kind: "deployment", id: id.to_owned() };
        let deployment = self.store.deployment(id).await?.ok_or_else(not_found)?;
        let environment = self.environment(&deployment.environment_id).await?;
        let cluster = self.cluster(&environment.cluster_id).await?;
        self.rows_of(deployment, environment, cluster).await
    }

    /// What else belongs to a deployment.
    async fn rows_of(&self, deployment: Deployment, environment: Environment, cluster: Cluster) -> Result<Rows> {
        let newest = match &deployment.newest_instance_id {
            Some(id) => self.store.instance(id).await?,
            None => None,
        };
        let active = match &deployment.active_instance_id {
            Some(id) => self.store.instance(id).await?,
            None => None,
        };
        let driver = self.drivers.catalog().by_digest.get(&deployment.driver_digest).cloned();
        let runs = self.runs(&deployment).await?;
        let secrets = self.store.secrets(&deployment.id).await?;
        let decrypts = self.store.recipients(&cluster.id).await?;
        Ok(Rows { decrypts, cluster, environment, deployment, driver, newest, active, secrets, runs })
    }

    /// What the agent last said about requested runs of jobs.
    async fn runs(&self, deployment: &Deployment) -> Result<Runs> {
        let rows = self.store.statuses(Snapshot::Deployments, StatusScope::Deployment(&deployment.id), None, 2).await?;
        let mut runs = Runs::default();
        for status in rows.iter().filter_map(DeploymentStatus::from_row) {
            runs.ended.extend(status.finished_jobs);
            runs.failed.extend(status.failed_jobs);
        }
        Ok(runs)
    }

    /// Whether the deployment still is as the caller looked at it.
    async fn check_base(&self, rows: &Rows, base: Option<&str>) -> Result<()> {
        match base {
            Some(base) if rows.deployment.newest_instance_id.as_deref() != Some(base) => {
                Err(self.base_moved(rows, base).await?)
            }
            _ => Ok(()),
        }
    }

    async fn base_moved(&self, rows: &Rows, base: &str) -> Result<ChangeError> {
        let known = self.store.instance(base).await?.filter(|known| known.deployment_id == rows.deployment.id);
        let Some(known) = known else {
            return Err(invalid(
                format!("deployment \"{}\"", rows.deployment.name),
                "base_instance_id",
                format!("\"{base}\" is not an instance of it; name its newestInstance, or none"),
            ));
        };
        Ok(ChangeError::BaseMoved(Box::new(BaseMoved::new(&rows.deployment, &known, rows.newest.as_ref()))))
    }

    async fn cluster(&self, id: &str) -> Result<Cluster> {
        let found = self.store.cluster(id).await?;
        found.ok_or_else(|| ChangeError::NotFound { kind: "cluster", id: id.to_owned() })
    }

    async fn environment(&self, id: &str) -> Result<Environment> {
        let _: names::EnvironmentId = parse_id("environment", id)?;
        let found = self.store.environment(id).await?;
        found.ok_or_else(|| ChangeError::NotFound { kind: "environment", id: id.to_owned() })
    }
}

/// What opens a forge; sealed at rest.
#[derive(Clone, Default, serde::Serialize, serde::Deserialize)]
#[serde(default)]
struct ForgeSecrets {
    token: Option<String>,
    webhook: Option<String>,
}

impl Changes {
    /// The forge of a repository, as it shall be known.
    fn forge_of(
        &self,
        object: &str,
        id: &str,
        git_url: Option<&str>,
        access: &Access,
        input: &ForgeInput,
        (known, secrets): (Option<ForgeAddress>, ForgeSecrets),
    ) -> Result<(Option<ForgeAddress>, Option<Vec<u8>>)> {
        let wrong = |field: &str, message: &str| Err(invalid(object, field, message));
        let Some(git_url) = git_url else {
            return wrong("git.forge", "its repository is this server's own, which has no forge");
        };
        let Some(kind) = input.kind.or(known.as_ref().map(|known| known.kind)) else {
            return wrong("git.forge.kind", "is missing; GITEA, GITHUB and GITLAB are known");
        };
        let Some((web, project)) = repository::web_address(git_url) else {
            return wrong("git.url", "is no address on a forge; https://host/owner/name is one");
        };
        let default = match kind {
            ForgeKind::Github if web == "https://github.com" => "https://api.github.com".to_owned(),
            ForgeKind::Github => format!("{web}/api/v3"),
            ForgeKind::Gitlab => format!("{web}/api/v4"),
            ForgeKind::Gitea => web,
        };
        let known = known.filter(|known| known.kind == kind).map(|known| known.url);
        let url = input.url.clone().or(known).unwrap_or(default);
        let parsed = url::Url::parse(&url).ok().filter(|_| url.len() <= 2048);
        let is_plain = |url: &url::Url| {
            let nobody = url.username().is_empty() && url.password().is_none();
            matches!(url.scheme(), "http" | "https") && nobody && url.query().is_none() && url.fragment().is_none()
        };
        if !parsed.as_ref().is_some_and(is_plain) {
            return wrong(
                "git.forge.url",
                "is no HTTP URL without credentials, query and fragment; the token is git.forge.token",
            );
        }
        let token = input.token.clone().or(secrets.token).or_else(|| access.password.clone());
        if token.is_none() {
            return wrong("git.forge.token", "is missing, and the repository has no password that could serve");
        }
        let secrets = ForgeSecrets {
            // What opens the repository is not kept twice.
            token: token.filter(|token| Some(token) != access.password.as_ref()),
            webhook: input.webhook_secret.clone().or(secrets.webhook),
        };
        if secrets.webhook.as_ref().is_some_and(|secret| secret.len() < WEBHOOK_SECRET_MIN) {
            return wrong("git.forge.webhook_secret", "is too short; use 16 random characters or more");
        }
        let text = serde_json::to_string(&secrets).map_err(|error| anyhow::anyhow!("the forge's secrets: {error}"))?;
        let sealed = self.key.seal(&crate::secrets::forge_place(id), &Plain::new(text))?;
        Ok((Some(ForgeAddress { kind, url, project }), Some(sealed)))
    }

    fn replace_forge(
        &self,
        object: &str,
        row: &Cluster,
        input: &ForgeInput,
    ) -> Result<(Option<ForgeAddress>, Option<Vec<u8>>)> {
        let (access, secrets) = (self.access_of(row)?, self.forge_secrets(row)?);
        self.forge_of(object, &row.id, row.git_url.as_deref(), &access, input, (row.forge.clone(), secrets))
    }

    fn forge_secrets(&self, row: &Cluster) -> Result<ForgeSecrets> {
        let Some(sealed) = &row.forge_secrets else { return Ok(ForgeSecrets::default()) };
        let plain = self.key.open(&crate::secrets::forge_place(&row.id), sealed)?;
        Ok(serde_json::from_str(plain.expose()).unwrap_or_default())
    }

    fn access_of(&self, row: &Cluster) -> Result<Access> {
        let place = credentials_place(&row.id);
        let known = row.credentials.as_ref().map(|sealed| self.key.open(&place, sealed)).transpose()?;
        Ok(known.map(|plain| Access::from_text(plain.expose())).unwrap_or_default())
    }

    /// What opens a cluster's repository and its forge: the way in, the token of the API, the webhook's secret.
    ///
    /// # Errors
    /// When it was sealed with another key.
    pub fn way_in(&self, row: &Cluster) -> Result<(Access, Option<String>, Option<String>)> {
        let (access, secrets) = (self.access_of(row)?, self.forge_secrets(row)?);
        let token = secrets.token.or_else(|| access.password.clone());
        Ok((access, token, secrets.webhook))
    }
}

/// Most bytes of the values of an agent's chart.
const VALUES_MAX: usize = 64 << 10;
/// Shortest secret of a webhook.
const WEBHOOK_SECRET_MIN: usize = 16;
/// Most reviewers or labels.
const NAMES_MAX: usize = 20;
/// Most bytes of one of them.
const NAME_MAX: usize = 255;

fn check_delivery(object: &str, rules: &DeliveryRules) -> Result<()> {
    for (field, names) in [("delivery.reviewers", &rules.reviewers), ("delivery.labels", &rules.labels)] {
        let names = names.as_deref().unwrap_or_default();
        if names.len() > NAMES_MAX {
            return Err(invalid(object, field, too_many(names.len(), NAMES_MAX)));
        }
        if let Some(at) = names.iter().position(|name| name.is_empty() || name.len() > NAME_MAX) {
            let message = format!("has {} bytes; 1 to {NAME_MAX} are possible", names[at].len());
            return Err(invalid(object, format!("{field}[{at}]"), message));
        }
    }
    if let Some(branch) = &rules.target_branch {
        repository::check_branch(branch).map_err(|message| invalid(object, "delivery.target_branch", message))?;
    }
    Ok(())
}

/// What people should know of a new cluster before something stops.
#[must_use]
pub fn cluster_warnings(cluster: &Cluster) -> Vec<String> {
    let mut warnings = Vec::new();
    if cluster.trusted_keys.as_ref().is_some_and(Vec::is_empty) {
        warnings.push(format!(
            "cluster \"{}\": verification.trustedKeys: is empty, and Flux looks at the newest commit of the branch only: one of a person, or of a forge that merges, stops everything until Styrmin commits again; add their public keys",
            cluster.name
        ));
    }
    warnings
}

/// Resolving and rendering is work for a thread of its own.
pub(crate) async fn on_a_thread<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|panic| ChangeError::Internal(anyhow::anyhow!("the change could not be computed: {panic}")))?
}

/// What is being deleted can only be deleted.
fn check_lifecycle(rows: &Rows, edit: &Edit) -> Result<()> {
    if rows.deployment.lifecycle != Lifecycle::Deleting || edit.delete || edit.revive {
        return Ok(());
    }
    Err(invalid(
        format!("deployment \"{}\"", rows.deployment.name),
        "lifecycle",
        "is being deleted and cannot be changed any more; create another one",
    ))
}

fn too_many(found: usize, most: usize) -> String {
    format!("has {found} entries; at most {most} are possible, so name fewer")
}

/// Most recipients of one cluster.
const RECIPIENTS_MAX: usize = 20;

fn check_recipients(object: &str, recipients: &[String]) -> Result<()> {
    if recipients.len() > RECIPIENTS_MAX {
        return Err(invalid(object, "age_recipients", too_many(recipients.len(), RECIPIENTS_MAX)));
    }
    for (index, text) in recipients.iter().enumerate() {
        let field = format!("age_recipients[{index}]");
        sops::parse_recipient(text).map_err(|error| invalid(object, field, error.to_string()))?;
    }
    Ok(())
}

fn is_secret(driver: Option<&styrmin_renderer::driver::Driver>, parameter: &str) -> bool {
    driver.and_then(|driver| driver.parameter(parameter)).is_some_and(|parameter| parameter.secret)
}

/// Parameters of a mutation, by whether the driver declares them secret.
fn split_secrets(
    driver: Option<&styrmin_renderer::driver::Driver>,
    parameters: &Object,
) -> (Object, BTreeMap<String, Value>) {
    let (mut plain, mut secret) = (Object::new(), BTreeMap::new());
    for (name, value) in parameters {
        // Where a Secret lies is none.
        if is_secret(driver, name) && context::outside_secret(value).is_none() {
            secret.insert(name.clone(), value.clone());
        } else {
            plain.insert(name.clone(), value.clone());
        }
    }
    (plain, secret)
}
