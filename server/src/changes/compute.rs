//! What a change leads to, computed from rows that were read before. No I/O: the same rows and
//! edit give the same change, apart from ids, nonces and the time it is handed.

use super::request::driver_of;
use super::{ChangeError, Result, invalid, is_secret, parse_id, split_secrets};
use crate::secrets::{Plain, ServerKey, parameter_place, sops};
use crate::store::{
    Change, Cluster, Concerned, Deployment, DeploymentState, Environment, GitEdit, Instance, InstanceState, Lifecycle,
    Millis, Person, Sealed, Secret, Sources, Target, Task, TaskState,
};
use crate::tasks::machine;
use anyhow::anyhow;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use styrmin_renderer::config::{self, Level, Object, Patch};
use styrmin_renderer::context::{self, Inputs, Named};
use styrmin_renderer::driver::Driver;
use styrmin_renderer::names::{DeploymentId, EnvironmentId};
use styrmin_renderer::plan::{self, Workflow};
use styrmin_renderer::spec::{self, DriverRef, JobRun, StyrminDeploymentSpec};
use styrmin_renderer::{Problems, canonical, checkout, layout, objects, yaml};

/// The rows that a change is computed from.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    pub(super) cluster: Cluster,
    pub(super) environment: Environment,
    pub(super) deployment: Deployment,
    /// `None`: this release cannot use it. What does not need it, like the end, is possible all the same.
    pub(super) driver: Option<Arc<Driver>>,
    pub(super) newest: Option<Instance>,
    pub(super) active: Option<Instance>,
    pub(super) secrets: Vec<Secret>,
    pub(super) runs: Runs,
    /// For which recipients the cluster can decrypt; `None`: it never said.
    pub(super) decrypts: Option<Vec<String>>,
}

/// Requested runs of jobs that have ended, as the agent last said. It says it late, so a run that is not among
/// them may have ended all the same; the operator runs none twice.
#[derive(Debug, Clone, Default)]
pub(super) struct Runs {
    /// Well or not.
    pub(super) ended: Vec<String>,
    /// Those that did not end well.
    pub(super) failed: Vec<String>,
}

impl Rows {
    /// The driver that it has.
    pub(super) fn driver(&self) -> Result<&Arc<Driver>> {
        self.driver.as_ref().ok_or_else(|| {
            let Deployment { name, driver_name, driver_digest, .. } = &self.deployment;
            let message = format!(
                "version {driver_digest} of driver \"{driver_name}\" cannot be used by this release; upgrade the deployment to another version, or roll it back"
            );
            invalid(format!("deployment \"{name}\""), "driver", message)
        })
    }

    /// The runs of jobs of the newest instance that are not known to have ended.
    pub(super) fn open_runs(&self) -> impl Iterator<Item = &JobRun> {
        let active = self.active.as_ref().map(|active| active.spec.jobs.as_slice()).unwrap_or_default();
        let newest = self.newest.as_ref().map(|newest| newest.spec.jobs.as_slice()).unwrap_or_default();
        newest.iter().filter(|run| !active.contains(run) && !self.runs.ended.contains(&run.id))
    }
}

/// What somebody wants to be different.
#[derive(Debug, Clone, Default)]
pub(super) struct Edit {
    pub(super) config: Patch,
    pub(super) parameters: Object,
    pub(super) remove_parameters: Vec<String>,
    /// Driver, application version, pinned driver version.
    pub(super) driver: Option<(Arc<Driver>, String, Option<String>)>,
    pub(super) lifecycle: Option<Lifecycle>,
    /// Jobs of the driver to run once.
    pub(super) jobs: Vec<JobRun>,
    /// Secret parameters that are sealed already.
    pub(super) sealed: Vec<Secret>,
    /// Another instance even when nothing differs.
    pub(super) again: bool,
    /// An earlier instance whose content comes back, with its driver.
    pub(super) restore: Option<(Box<Instance>, Arc<Driver>)>,
    pub(super) delete: bool,
    /// Brings a removed deployment back; with `restore`.
    pub(super) revive: bool,
    /// The fan-out that asks for it.
    pub(super) fan_out: Option<String>,
    /// The edit of the repository that it takes over.
    pub(super) found: Option<Box<GitEdit>>,
}

impl Edit {
    /// Nothing is left to do: it is being deleted already.
    pub(super) fn is_done(&self, rows: &Rows) -> bool {
        self.delete && rows.deployment.lifecycle == Lifecycle::Deleting
    }

    /// The driver that it brings.
    pub(super) fn brings(&self) -> Option<&Arc<Driver>> {
        let driver = self.driver.as_ref().map(|(driver, ..)| driver);
        driver.or(self.restore.as_ref().map(|(_, driver)| driver))
    }
}

pub(super) struct Computation {
    pub(super) rows: Rows,
    /// In order, each on what the ones before lead to.
    pub(super) edits: Vec<Edit>,
    /// The instance of a proposal whose place this one takes; a proposal is asked for.
    pub(super) review: Option<Option<Box<Instance>>>,
    pub(super) author: Person,
    pub(super) key: Arc<ServerKey>,
    pub(super) now: Millis,
    pub(super) timestamp: jiff::Timestamp,
}

/// A change, and whether it leaves everything as it is.
pub(super) struct Computed {
    pub(super) change: Change,
    pub(super) is_nothing: bool,
    /// Parameters of the last edit.
    pub(super) last: Said,
}

/// Parameters of an edit, the secret ones apart.
#[derive(Debug, Default)]
pub(super) struct Said {
    pub(super) plain: Object,
    /// Those that differ from what was known.
    pub(super) sealed: Vec<Secret>,
}

/// Rows of a deployment with some edits applied.
struct State {
    deployment: Deployment,
    driver: Option<Arc<Driver>>,
    secrets: BTreeMap<String, Secret>,
}

impl State {
    fn of(rows: &Rows) -> Self {
        Self {
            deployment: rows.deployment.clone(),
            // Until an edit brings another one: those before it are about this.
            driver: rows.driver.clone(),
            secrets: rows.secrets.iter().map(|row| (row.name.clone(), row.clone())).collect(),
        }
    }

    /// Applies one edit; gives its parameters.
    fn apply(&mut self, object: &str, edit: &Edit, key: &ServerKey) -> Result<Said> {
        let deployment = &mut self.deployment;
        if let Some(driver) = edit.brings() {
            deployment.driver_digest.clone_from(&driver.digest);
            self.driver = Some(Arc::clone(driver));
        }
        if let Some((_, version, pin)) = &edit.driver {
            deployment.driver_pin.clone_from(pin);
            deployment.application_version.clone_from(version);
        }
        if let Some(lifecycle) = edit.lifecycle {
            deployment.lifecycle = lifecycle;
        }
        if let Some((old, _)) = &edit.restore {
            let sources = old.sources.clone().unwrap_or_default();
            self.secrets =
                open_sources(&sources, &deployment.id)?.into_iter().map(|row| (row.name.clone(), row)).collect();
            deployment.application_version.clone_from(&old.spec.application_version);
            deployment.lifecycle = match old.spec.lifecycle {
                spec::Lifecycle::Stopped => Lifecycle::Stopped,
                _ => Lifecycle::Running,
            };
            (deployment.config, deployment.parameters, deployment.driver_pin) =
                (sources.config, sources.parameters, sources.driver_pin);
        }
        deployment.config = edit.config.apply(object, &deployment.config)?;
        config::check(object, Level::Deployment, &deployment.config)?;

        let driver = self.driver.as_deref();
        let (plain, secret) = split_secrets(driver, &edit.parameters);
        for name in &edit.remove_parameters {
            deployment.parameters.remove(name);
            self.secrets.remove(name);
        }
        // A value takes the place of a reference, and the other way round.
        for name in plain.keys().filter(|name| is_secret(driver, name)) {
            self.secrets.remove(name);
        }
        deployment.parameters.retain(|name, _| !secret.contains_key(name));
        deployment.parameters.extend(plain.clone());
        let mut sealed = seal(object, &deployment.id, driver, &secret, &self.secrets, key)?;
        for row in &edit.sealed {
            deployment.parameters.remove(&row.name);
            if self.secrets.get(&row.name).is_none_or(|known| known.fingerprint != row.fingerprint) {
                sealed.push(row.clone());
            }
        }
        self.secrets.extend(sealed.iter().map(|row| (row.name.clone(), row.clone())));
        if edit.delete {
            deployment.lifecycle = Lifecycle::Deleting;
            deployment.state = DeploymentState::Deleting;
        }
        Ok(Said { plain, sealed })
    }
}

/// The rows as some edits leave them.
pub(super) fn applied(rows: &Rows, edits: &[Edit], key: &ServerKey) -> Result<Rows> {
    let object = format!("deployment \"{}\"", rows.deployment.name);
    let mut state = State::of(rows);
    for edit in edits {
        state.apply(&object, edit, key)?;
    }
    let State { deployment, driver, secrets } = state;
    Ok(Rows { deployment, driver, secrets: secrets.into_values().collect(), ..rows.clone() })
}

pub(super) fn run(computation: &Computation) -> Result<Computed> {
    let Computation { rows, edits, author, key, now, timestamp, review } = computation;
    let (now, timestamp) = (*now, *timestamp);
    let object = format!("deployment \"{}\"", rows.deployment.name);
    let deletes = edits.iter().any(|edit| edit.delete);
    let driver = match driver_of(rows, edits) {
        Err(_) if deletes => None,
        driver => Some(driver?),
    };
    let mut state = State::of(rows);
    let mut said = Said::default();
    for edit in edits {
        said = state.apply(&object, edit, key)?;
    }
    if let Some(driver) = &driver {
        state.deployment.driver_digest.clone_from(&driver.digest);
    }
    let State { deployment, secrets, .. } = state;
    let set_secrets = secrets.values().filter(|row| !rows.secrets.contains(row)).cloned().collect();
    let gone = rows.secrets.iter().filter(|row| !secrets.contains_key(&row.name));
    let remove_secrets = gone.map(|row| row.name.clone()).collect();
    let last = edits.last();
    let fan_out = last.and_then(|edit| edit.fan_out.clone());
    let target = Target { repository: rows.cluster.repository.clone(), branch: rows.cluster.branch.clone() };
    let mut change = Change {
        cluster: (rows.cluster.id.clone(), rows.cluster.version),
        environment: (rows.environment.id.clone(), rows.environment.version),
        deployment,
        set_secrets,
        remove_secrets,
        instance: None,
        target,
        fan_out: fan_out.clone(),
        edit: last.and_then(|edit| edit.found.as_deref().cloned()),
        merged: None,
        author: author.clone(),
        now,
    };

    let draft = match &driver {
        Some(driver) if !deletes => draft(computation, &change.deployment, driver, &secrets, timestamp)?,
        // The end is possible whatever the configuration says now.
        _ => rows.newest.as_ref().map(|newest| Draft {
            spec: newest.spec.clone(),
            origins: newest.origins.clone(),
            secrets_file: None,
            secrets_stamp: None,
            workflow: Workflow::Delete,
        }),
    };
    if let Some(draft) = draft {
        let sources = sources(&change.deployment, &secrets);
        let ids = (uuid::Uuid::now_v7().to_string(), uuid::Uuid::now_v7().to_string());
        let ways = (driver.as_deref(), review.is_some());
        let (instance, task) = complete(draft, rows, &mut change.deployment, ways, author, now, ids)?;
        let task = Task { fan_out_id: fan_out, ..task };
        change.instance = Some((Instance { sources: Some(sources), ..instance }, task));
    }
    let is_nothing = change.instance.is_none()
        && change.deployment == rows.deployment
        && change.set_secrets.is_empty()
        && change.remove_secrets.is_empty();
    Ok(Computed { change, is_nothing, last: said })
}

/// An instance without its ids and place.
struct Draft {
    spec: StyrminDeploymentSpec,
    origins: BTreeMap<String, Level>,
    secrets_file: Option<String>,
    secrets_stamp: Option<String>,
    workflow: Workflow,
}

/// What a rollback to this instance will need.
fn sources(deployment: &Deployment, secrets: &BTreeMap<String, Secret>) -> Sources {
    let sealed = |row: &Secret| {
        let sealed = Sealed { ciphertext: STANDARD.encode(&row.ciphertext), fingerprint: row.fingerprint.clone() };
        (row.name.clone(), sealed)
    };
    Sources {
        config: deployment.config.clone(),
        parameters: deployment.parameters.clone(),
        driver_pin: deployment.driver_pin.clone(),
        secrets: secrets.values().map(sealed).collect(),
    }
}

fn open_sources(sources: &Sources, deployment: &str) -> Result<Vec<Secret>> {
    let open = |(name, sealed): (&String, &Sealed)| {
        let ciphertext = STANDARD.decode(&sealed.ciphertext).map_err(|error| {
            ChangeError::Internal(anyhow!("secret {name} of an instance of deployment {deployment}: {error}"))
        })?;
        Ok(Secret {
            deployment_id: deployment.to_owned(),
            name: name.clone(),
            ciphertext,
            fingerprint: sealed.fingerprint.clone(),
        })
    };
    sources.secrets.iter().map(open).collect()
}

/// Encrypts the secret parameters that change. A value that is the same as before is left alone.
fn seal(
    object: &str,
    deployment: &str,
    driver: Option<&Driver>,
    values: &BTreeMap<String, Value>,
    known: &BTreeMap<String, Secret>,
    key: &ServerKey,
) -> Result<Vec<Secret>> {
    let mut problems = Problems::default();
    let mut sealed = Vec::new();
    for (name, value) in values {
        let Some(parameter) = driver.and_then(|driver| driver.parameter(name)) else { continue };
        let field = format!("parameters.{name}");
        if let Err(message) = parameter.check(value) {
            problems.push(object, field, message);
            continue;
        }
        let plain = Plain::new(value.as_str().unwrap_or_default().to_owned());
        let place = parameter_place(deployment, name);
        let fingerprint = key.fingerprint(&place, &plain);
        if known.get(name).is_some_and(|known| known.fingerprint == fingerprint) {
            continue;
        }
        let ciphertext = key.seal(&place, &plain)?;
        sealed.push(Secret { deployment_id: deployment.to_owned(), name: name.clone(), ciphertext, fingerprint });
    }
    problems.into_result()?;
    Ok(sealed)
}

/// The next instance; `None` when it would be what runs or is on its way already.
fn draft(
    computation: &Computation,
    deployment: &Deployment,
    driver: &Driver,
    secrets: &BTreeMap<String, Secret>,
    timestamp: jiff::Timestamp,
) -> Result<Option<Draft>> {
    let Computation { rows, edits, key, review, .. } = computation;
    let again = edits.iter().any(|edit| edit.again);
    let object = format!("deployment \"{}\"", deployment.name);
    let deployment_id: DeploymentId = parse_id("deployment", &deployment.id)?;
    let environment_id: EnvironmentId = parse_id("environment", &rows.environment.id)?;
    let fingerprints: Fingerprints = secrets.values().map(|row| (row.name.clone(), row.fingerprint.clone())).collect();
    // A rollback takes what cluster and environment said then, too; another attempt is one of the same content.
    // With something else on top, what is said now counts.
    let alone = (edits.len() == 1).then(|| &edits[0]);
    let restored = alone.and_then(|edit| edit.restore.as_ref()).map(|(old, _)| &**old);
    let kept = restored.or(rows.newest.as_ref().filter(|_| alone.is_some_and(|edit| edit.again)));
    let (context, origins) = match kept {
        Some(kept) => (kept.spec.context.clone(), kept.origins.clone()),
        None => {
            let found = resolve(&rows.cluster, &rows.environment, deployment, driver, &fingerprints)?;
            (found.context, found.origins)
        }
    };
    let newest = rows.newest.as_ref();
    let known = newest.map(|newest| newest.spec.jobs.as_slice()).unwrap_or_default();
    let asked: Vec<JobRun> = edits.iter().flat_map(|edit| edit.jobs.clone()).collect();
    let mut spec = spec_of(deployment, deployment_id.clone(), driver, context, [known, &asked].concat());
    let on_its_way = newest.filter(|newest| is_on_its_way(newest.state) && newest.document.is_some());
    let stamp = secrets_stamp(&rows.cluster, &fingerprints);
    if !again && on_its_way.is_some_and(|newest| newest.spec.same_content(&spec) && newest.secrets_stamp == stamp) {
        return Ok(None);
    }
    // What has run is done. Only now: that alone makes no change.
    let mut jobs: Vec<JobRun> = rows.open_runs().cloned().collect();
    if again {
        // A run ends once, however it ends: another attempt is another run. So is one that is not known to have
        // ended, since it may have.
        let failed = known.iter().filter(|run| rows.runs.failed.contains(&run.id));
        jobs = failed.chain(&jobs).map(|run| new_run(&run.action)).collect();
    }
    spec.jobs = jobs.into_iter().chain(asked).collect();
    // The operator will do this with the secrets in clear; here it proves that the values render.
    objects::helm_values(&spec, driver, &|reference| reference.fingerprint.clone()).map_err(|error| {
        invalid(
            &object,
            "values",
            format!(
                "driver {} {} cannot render its values with this configuration: {error}",
                driver.name(),
                driver.version
            ),
        )
    })?;
    let before = if again || edits.iter().any(|edit| edit.revive) { rows.active.as_ref() } else { newest };
    let workflow = plan::plan(before.map(|before| &before.spec), Some(&spec), &driver.file.spec.actions).workflow;
    // Equal content that failed before, or only another recipient: still a change of the deployment.
    let workflow = if workflow == Workflow::None { Workflow::Update } else { workflow };
    let secrets_file = match &stamp {
        None => None,
        Some(stamp) => {
            let known = newest.into_iter().chain(review.iter().flatten().map(|instance| &**instance));
            let same = known.filter(|known| known.secrets_stamp.as_ref() == Some(stamp));
            Some(match same.into_iter().find_map(|known| known.secrets_file.clone()) {
                Some(file) => file,
                None => encrypt(&object, rows, &deployment_id, &environment_id, secrets, key, timestamp)?,
            })
        }
    };
    Ok(Some(Draft { spec, origins, secrets_file, secrets_stamp: stamp, workflow }))
}

/// Name and fingerprint of each secret parameter.
pub(super) type Fingerprints = BTreeMap<String, String>;

/// Whether a deployment has, or is about to have, what cluster, environment and itself say now: whether
/// [`run`] would find nothing to do. Without reading its newest instance.
pub(super) fn is_current(
    cluster: &Cluster,
    environment: &Environment,
    known: &Concerned,
    driver: &Driver,
    fingerprints: &Fingerprints,
) -> Result<bool> {
    let deployment = &known.deployment;
    let id = parse_id("deployment", &deployment.id)?;
    let context = resolve(cluster, environment, deployment, driver, fingerprints)?.context;
    let state = known.newest_state.clone().map(InstanceState::try_from).and_then(std::result::Result::ok);
    Ok(state.is_some_and(is_on_its_way)
        && known.secrets_stamp == secrets_stamp(cluster, fingerprints)
        && known.content_digest == Some(spec_of(deployment, id, driver, context, Vec::new()).content_digest()))
}

fn resolve(
    cluster: &Cluster,
    environment: &Environment,
    deployment: &Deployment,
    driver: &Driver,
    fingerprints: &Fingerprints,
) -> Result<context::Resolution> {
    Ok(context::resolve(&Inputs {
        cluster: Named { id: parse_id("cluster", &cluster.id)?, name: cluster.name.clone() },
        environment: Named { id: parse_id("environment", &environment.id)?, name: environment.name.clone() },
        deployment: Named { id: parse_id("deployment", &deployment.id)?, name: deployment.name.clone() },
        driver,
        application_version: &deployment.application_version,
        cluster_config: &cluster.config,
        environment_config: &environment.config,
        deployment_config: &deployment.config,
        parameters: &deployment.parameters,
        secret_fingerprints: fingerprints,
    })?)
}

/// What a deployment asks for, without an instance.
fn spec_of(
    deployment: &Deployment,
    id: DeploymentId,
    driver: &Driver,
    context: Value,
    jobs: Vec<JobRun>,
) -> StyrminDeploymentSpec {
    StyrminDeploymentSpec {
        deployment_id: id,
        instance_id: String::new(),
        lifecycle: match deployment.lifecycle {
            Lifecycle::Stopped => spec::Lifecycle::Stopped,
            _ => spec::Lifecycle::Running,
        },
        driver: DriverRef {
            name: driver.name().to_owned(),
            version: driver.version.to_string(),
            digest: driver.digest.clone(),
        },
        application_version: deployment.application_version.clone(),
        context,
        jobs,
    }
}

fn is_on_its_way(state: InstanceState) -> bool {
    matches!(state, InstanceState::Pending | InstanceState::Committed | InstanceState::Active)
}

fn recipients(cluster: &Cluster) -> Vec<String> {
    let mut recipients = cluster.age_recipients.clone();
    recipients.sort();
    recipients.dedup();
    recipients
}

/// What a secrets file is made from; `None`: there are no secrets.
fn secrets_stamp(cluster: &Cluster, fingerprints: &Fingerprints) -> Option<String> {
    (!fingerprints.is_empty())
        .then(|| canonical::digest(&json!({ "fingerprints": fingerprints, "recipients": recipients(cluster) })))
}

pub(super) fn new_run(action: &str) -> JobRun {
    JobRun { id: uuid::Uuid::now_v7().to_string(), action: action.to_owned() }
}

fn encrypt(
    object: &str,
    rows: &Rows,
    deployment: &DeploymentId,
    environment: &EnvironmentId,
    secrets: &BTreeMap<String, Secret>,
    key: &ServerKey,
    timestamp: jiff::Timestamp,
) -> Result<String> {
    let recipients = recipients(&rows.cluster);
    if recipients.is_empty() {
        return Err(invalid(
            object,
            format!("parameters.{}", secrets.keys().next().map_or("", String::as_str)),
            format!(
                "is a secret, and cluster \"{}\" has no age recipient to encrypt it for; set one with updateCluster (ageRecipients)",
                rows.cluster.name
            ),
        ));
    }
    if let Some(decrypts) = &rows.decrypts
        && !recipients.iter().any(|recipient| decrypts.contains(recipient))
    {
        let has = if decrypts.is_empty() {
            "no key at all".to_owned()
        } else {
            format!("the key of {}", decrypts.join(", "))
        };
        return Err(invalid(
            object,
            format!("parameters.{}", secrets.keys().next().map_or("", String::as_str)),
            format!(
                "could not be decrypted in cluster \"{}\": Flux has {has} there, and secrets are encrypted for {}; set ageRecipients with updateCluster, or give Flux the other key",
                rows.cluster.name,
                recipients.join(", ")
            ),
        ));
    }
    let mut values = BTreeMap::new();
    for (name, row) in secrets {
        let plain = key.open(&parameter_place(deployment.as_str(), name), &row.ciphertext)?;
        values.insert(name.clone(), (plain, row.fingerprint.clone()));
    }
    let file = sops::SecretFile {
        name: &deployment.secret_name(),
        namespace: &environment.namespace(),
        labels: json!({
            spec::DEPLOYMENT_LABEL: deployment,
            spec::ENVIRONMENT_LABEL: environment,
            layout::MANAGED_BY.0: layout::MANAGED_BY.1,
        }),
        values: &values,
    };
    Ok(sops::encrypt(&file, &recipients, timestamp)?)
}

/// Gives a draft its ids, its place in the sequence, its bytes and its task.
fn complete(
    draft: Draft,
    rows: &Rows,
    deployment: &mut Deployment,
    (driver, review): (Option<&Driver>, bool),
    author: &Person,
    now: Millis,
    (instance_id, task_id): (String, String),
) -> Result<(Instance, Task)> {
    let sequence = deployment.last_sequence + 1;
    let environment: EnvironmentId = parse_id("environment", &rows.environment.id)?;
    let mut spec = draft.spec;
    spec.instance_id.clone_from(&instance_id);
    let document = match draft.workflow {
        Workflow::Delete => None,
        _ => {
            let number = u64::try_from(sequence).map_err(|error| anyhow!("sequence {sequence}: {error}"))?;
            let object = spec::object(&spec, &environment, number);
            // One that the API server refuses would block its whole shard.
            if let Some((pointer, message)) = checkout::schema_problems(&object).into_iter().next() {
                return Err(invalid(format!("deployment \"{}\"", deployment.name), pointer, message));
            }
            let text = yaml::to_string(&object)
                .map_err(|error| ChangeError::Internal(anyhow!("deployment \"{}\": {error}", deployment.name)))?;
            Some(text)
        }
    };
    let next = document.is_some().then_some(&spec);
    let actions = driver.map(|driver| driver.file.spec.actions.as_slice()).unwrap_or_default();
    let plan = plan::plan(rows.active.as_ref().map(|active| &active.spec), next, actions);
    let task = Task {
        id: task_id.clone(),
        deployment_id: deployment.id.clone(),
        instance_id: instance_id.clone(),
        sequence,
        workflow: draft.workflow.as_str().to_owned(),
        state: TaskState::Running,
        message: None,
        author_name: author.name.clone(),
        author_email: author.email.clone(),
        version: 1,
        created_at: now,
        ended_at: None,
        fan_out_id: None,
        steps: machine::predict(&task_id, &plan, review, now),
    };
    let instance = Instance {
        id: instance_id.clone(),
        deployment_id: deployment.id.clone(),
        sequence,
        workflow: draft.workflow.as_str().to_owned(),
        spec,
        origins: draft.origins,
        document,
        secrets_file: draft.secrets_file,
        secrets_stamp: draft.secrets_stamp,
        sources: None,
        state: if review { InstanceState::Proposed } else { InstanceState::Pending },
        revision: None,
        task_id,
        author_name: author.name.clone(),
        author_email: author.email.clone(),
        created_at: now,
    };
    deployment.last_sequence = sequence;
    deployment.newest_instance_id = Some(instance_id);
    if draft.workflow != Workflow::Delete {
        deployment.state = DeploymentState::Pending;
    }
    Ok((instance, task))
}
