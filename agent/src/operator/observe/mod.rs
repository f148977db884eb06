//! Gathers what a decision rests on. Reads only.
//!
//! [`network`] looks at policies, Services and aliases, [`actions`] at the step of a driver's action.

mod actions;
mod network;

use super::decide::{DriverSeen, Leftover, Network, ObjectKey, Observed, Wanted, judged, phase, planned, rolls};
use super::drivers::Found;
use super::hook::HookSeen;
use super::release::{self, FailureEvent, Verdict};
use super::steps::{self, Base};
use super::{Context, OperatorError, Result, teardown};
use crate::flux;
use crate::kept::{self, Ending};
use crate::store;
use crate::watch::{self, Watch};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{Event, Namespace, PodTemplateSpec, Secret, Service};
use kube::ResourceExt as _;
use kube::api::{Api, DynamicObject, ListParams, ObjectMeta, PartialObjectMeta};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::PoisonError;
use styrmin_renderer::context::{self, SecretRef};
use styrmin_renderer::driver::Driver;
use styrmin_renderer::names::EnvironmentId;
use styrmin_renderer::network::ALIAS_LABEL;
use styrmin_renderer::objects::{self, CHART_SOURCE};
use styrmin_renderer::spec::{
    DEPLOYMENT_LABEL, Lifecycle, StyrminDeployment, StyrminDeploymentSpec, StyrminDeploymentStatus,
};
use styrmin_renderer::{layout, plan, post_render, yaml};
use tokio::time::Instant;

/// Keys in a ControllerRevision: the spec, the HelmRelease that it led to, and the runs of jobs that had ended.
pub(super) const APPLIED_SPEC: &str = "spec";
pub(super) const APPLIED_RELEASE: &str = "release";
pub(super) const FINISHED_JOBS: &str = "finishedJobs";

/// Objects in one answer to a list.
const PAGE: u32 = 500;

/// What was gathered, owned.
pub(super) struct Gathered {
    driver: Found,
    waiting: Option<(&'static str, String)>,
    copy: Option<String>,
    wanted: std::result::Result<Wanted, String>,
    differing: Vec<Value>,
    additions: Vec<Value>,
    going: Vec<String>,
    unwanted: Vec<ObjectKey>,
    in_the_way: Option<ObjectKey>,
    collisions: Vec<String>,
    network: Option<Network>,
    release: Option<Value>,
    failure: Option<FailureEvent>,
    applied: Option<StyrminDeploymentSpec>,
    /// Its HelmRelease.
    applied_release: Option<Value>,
    finished_jobs: Vec<String>,
    /// A revision holds what was applied.
    recorded: bool,
    pub(super) revisions: Vec<ControllerRevision>,
    hook: Option<HookSeen>,
    still_there: Vec<String>,
    internal_ready: bool,
    confirmed: Option<String>,
    restored: bool,
    leftovers: Vec<Leftover>,
    stale: Vec<ObjectKey>,
    secrets: Secrets,
    /// Why the last pass ended early.
    pub(super) trouble: Option<String>,
}

impl Gathered {
    pub(super) fn view<'a>(&'a self, object: &'a StyrminDeployment) -> Observed<'a> {
        Observed {
            object,
            driver: match &self.driver {
                Ok(driver) => DriverSeen::Here(driver),
                Err(None) => DriverSeen::Missing,
                Err(Some(why)) => DriverSeen::Broken(why),
            },
            waiting: self.waiting.clone(),
            copy: self.copy.clone(),
            wanted: self.wanted.as_ref().map_err(String::as_str),
            differing: &self.differing,
            additions: &self.additions,
            going: &self.going,
            unwanted: &self.unwanted,
            in_the_way: self.in_the_way.as_ref(),
            collisions: &self.collisions,
            network: self.network.as_ref(),
            release: self.release.as_ref(),
            failure: self.failure.as_ref(),
            applied: self.applied.as_ref(),
            revision: self.revision(),
            recorded: self.recorded,
            finished_jobs: &self.finished_jobs,
            hook: self.hook.as_ref(),
            still_there: &self.still_there,
            internal_ready: self.internal_ready,
            confirmed: self.confirmed.as_deref(),
            restored: self.restored,
            leftovers: &self.leftovers,
            stale: &self.stale,
            trouble: self.trouble.as_deref(),
        }
    }

    /// Values that may not be seen in what a command says.
    pub(super) fn secret_values(&self) -> Vec<String> {
        self.secrets.values().cloned().collect()
    }

    /// A text without the values of secrets.
    pub(super) fn masked(&self, text: &str) -> String {
        masked(text, &self.secrets)
    }

    /// The chart's Services were looked at in this pass.
    pub(super) fn has_looked(&self) -> bool {
        self.network.is_some()
    }

    /// What was last applied with success.
    pub(super) fn applied(&self) -> Option<&StyrminDeploymentSpec> {
        self.applied.as_ref()
    }

    /// The HelmRelease of what was last applied.
    pub(super) fn applied_release(&self) -> Option<&Value> {
        self.applied_release.as_ref()
    }

    /// The HelmRelease that should be there.
    pub(super) fn wanted_release(&self) -> Option<&Value> {
        self.wanted.as_ref().ok().map(|wanted| &wanted.release)
    }

    fn revision(&self) -> Option<&str> {
        self.revisions.last()?.metadata.name.as_deref()
    }

    /// Reads what was last applied with success, which no store holds: an older view of it would run actions
    /// of the setup again.
    async fn read_applied(&mut self, context: &Context, object: &StyrminDeployment) -> Result<()> {
        let uid = object.metadata.uid.clone().unwrap_or_default();
        let going = object.metadata.deletion_timestamp.is_some();
        let known = context.applied.get(&uid).filter(|_| !going);
        self.revisions = match known.and_then(|known| known.unpack()) {
            Some(known) => known,
            None => {
                let at = Instant::now();
                let found = revisions(context, &object.namespace().unwrap_or_default(), &object.spec).await?;
                context.applied.put(uid, at, context.packer.pack(&found));
                found
            }
        };
        let data = self.revisions.last().and_then(|revision| revision.data.as_ref()).map(|data| &data.0);
        let read = |key: &str| data.and_then(|data| data.get(key)).cloned();
        self.applied = read(APPLIED_SPEC).and_then(|spec| serde_json::from_value(spec).ok());
        self.applied_release = read(APPLIED_RELEASE).filter(Value::is_object);
        self.recorded = self.applied.is_some();
        if self.applied.is_none() {
            // The digest tells what it was, when that is what the object says still.
            let digest = object.status.as_ref().and_then(|status| status.applied_digest.as_deref());
            self.applied = digest.filter(|digest| *digest == object.spec.digest()).map(|_| object.spec.clone());
        }
        self.finished_jobs =
            read(FINISHED_JOBS).and_then(|finished| serde_json::from_value(finished).ok()).unwrap_or_default();
        Ok(())
    }
}

/// Gathers everything about one object.
pub(super) async fn observe(object: &StyrminDeployment, context: &Context) -> Result<Gathered> {
    let watch = &context.watch;
    let namespace = object.namespace().unwrap_or_default();
    let spec = &object.spec;
    let mut gathered = Gathered {
        driver: context.drivers.get(watch, &spec.driver),
        waiting: None,
        copy: copy(object, watch),
        wanted: Ok(Wanted::default()),
        differing: Vec::new(),
        additions: Vec::new(),
        going: Vec::new(),
        unwanted: Vec::new(),
        in_the_way: None,
        collisions: Vec::new(),
        network: None,
        release: None,
        failure: None,
        applied: None,
        applied_release: None,
        finished_jobs: Vec::new(),
        recorded: true,
        revisions: Vec::new(),
        hook: None,
        still_there: Vec::new(),
        internal_ready: spec.is_internal() && has_ready_pod(watch, spec),
        confirmed: confirmed(object, context),
        restored: false,
        leftovers: Vec::new(),
        stale: Vec::new(),
        secrets: Secrets::new(),
        trouble: None,
    };
    if gathered.copy.is_some() {
        return Ok(gathered);
    }
    let default = StyrminDeploymentStatus::default();
    let status = object.status.as_ref().unwrap_or(&default);
    let going = object.metadata.deletion_timestamp.is_some();
    let leaves = going || spec.lifecycle == Lifecycle::Deleting;
    let settled =
        status.phase.as_deref() == Some(phase::READY) && status.observed_generation == object.metadata.generation;
    // A record that nobody sees is looked for.
    let is_record = || watch.has_record(&namespace, &object.name_any());
    if going || !settled || !is_record() {
        gathered.read_applied(context, object).await?;
    }
    let secrets = secrets(context, &namespace, spec).await?;
    gathered.secrets = secrets.as_ref().cloned().unwrap_or_default();
    let acted = status.spec_digest.as_deref() == Some(spec.digest().as_str()) && !teardown::begun(status);
    if (!acted || going) && !teardown::begun(status) && steps::running_hook(status).is_some() {
        // It may have got what the Secrets said before, or what Flux has removed with the object.
        let mut secrets = gathered.secrets.clone();
        secrets.extend(texts_of_values(context, &namespace, spec).await?);
        gathered.hook = actions::running(context, object, status, &secrets).await?;
    }
    if going {
        let again = flux::applies_again(&context.client, watch, &namespace, &object.name_any()).await;
        gathered.restored = again.map_err(OperatorError::of("asking what Flux applies"))?;
    }
    // Judged and compared is one and the same HelmRelease: read twice, the first could be the old one
    // that is ready and the second the new one that is as wanted.
    gathered.release = watch.releases.get(&namespace, &object.name_any()).and_then(|kept| kept.value());
    if leaves && teardown::begun(status) {
        return ending(object, status, gathered, context).await;
    }
    let Ok(driver) = gathered.driver.clone() else { return Ok(gathered) };
    let repository = flux::repository(watch);
    if let Err(missing) = secrets {
        gathered.waiting = Some(("SecretsMissing", missing));
    } else if driver.chart_folder().is_some() && repository.is_none() {
        let message = "Waiting for GitRepository and Kustomization flux-system/styrmin: they name the chart's source";
        gathered.waiting = Some(("SourceMissing", message.to_owned()));
    }
    if gathered.waiting.is_some() {
        // What is there is kept as it is all the same.
        if !acted || status.phase.as_deref() == Some(phase::PREREQUISITES) {
            return Ok(gathered);
        }
        if gathered.revisions.is_empty() {
            gathered.read_applied(context, object).await?;
        }
    }
    let environment = match environment(&namespace) {
        Ok(environment) => environment,
        Err(why) => {
            gathered.wanted = Err(why);
            return Ok(gathered);
        }
    };
    if let Some(release) = gathered.release.as_ref().filter(|release| needs_events(release)) {
        gathered.failure = newest_failure(context, &namespace, release).await?;
    }
    gathered.say_it_ours(spec, Some(&driver));
    if acted && !settled && !leaves && gathered.waiting.is_none() {
        let plan = planned(object, gathered.applied.as_ref(), &driver);
        let base = Base::of(gathered.revision(), Some(status), &driver.digest);
        let secrets = &gathered.secrets;
        let place = actions::Place { context, object, status, environment: &environment, driver: &driver, secrets };
        let (hook, still_there) =
            (actions::next(&place, &plan, base).await?, actions::still_there(&place, &plan, base).await?);
        (gathered.hook, gathered.still_there) = (hook, still_there);
    }
    if acted && network::is_due(status, &driver) {
        gathered.network = Some(network::look(context, object, &driver).await?);
    }
    gathered.in_the_way = in_the_way(&gathered, watch, spec);
    let repository = repository.as_ref();
    let place = Place { context, object, status, environment: &environment, driver: &driver, repository };
    gathered.arrange(&place).await?;
    // The end of the release and what follows from it are one pass.
    let comes = || steps::comes_to_services(status) && gathered.release_is_ready(&place);
    // What was looked at before, and a Service is missing all the same: the chart may have made it since.
    let misses = || network::has_looked(status) && gathered.misses_a_service(watch);
    if acted && gathered.network.is_none() && (comes() || misses()) {
        gathered.network = Some(network::look(context, object, &driver).await?);
        gathered.arrange(&place).await?;
    }
    Ok(gathered)
}

/// Of what everything that should be there follows.
struct Place<'a> {
    context: &'a Context,
    object: &'a StyrminDeployment,
    status: &'a StyrminDeploymentStatus,
    environment: &'a EnvironmentId,
    driver: &'a Driver,
    /// The cluster's.
    repository: Option<&'a objects::Repository>,
}

impl Gathered {
    /// What should be there, and how that differs from what is.
    async fn arrange(&mut self, place: &Place<'_>) -> Result<()> {
        let &Place { context, object, status, environment, driver, .. } = place;
        let (namespace, spec) = (object.namespace().unwrap_or_default(), &object.spec);
        let (seen, way) = (self.network.as_ref(), self.in_the_way.as_ref());
        let network = network::wanted(context, object, status, environment, driver, seen, way);
        self.unwanted = network.unwanted;
        self.collisions = network.collisions;
        let both = (network.policies, network.services);
        self.wanted = wanted(place, both, self);
        if let Ok(wanted) = &self.wanted {
            let seen = compare(&context.watch, wanted, self.current_release(context, object));
            if self.waiting.is_none() {
                self.stale = stale(&context.watch, &namespace, spec, status, wanted);
            }
            (self.differing, self.additions, self.going) = (seen.differing, seen.additions, seen.going);
            if let Some((copy, is_edited)) = credentials(place, &namespace, wanted).await? {
                let place = if is_edited { &mut self.differing } else { &mut self.additions };
                place.insert(0, copy);
            }
        }
        Ok(())
    }

    /// The HelmRelease as it is; `Err` while the watch shows one from before what was written last.
    fn current_release(
        &self,
        context: &Context,
        object: &StyrminDeployment,
    ) -> std::result::Result<Option<&Value>, ()> {
        let key = store::key(&object.namespace().unwrap_or_default(), &object.name_any());
        let mut written = context.written.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(generation) = written.get(&key) else { return Ok(self.release.as_ref()) };
        let shown = self.release.as_ref().map(|release| release["metadata"]["generation"].as_i64().unwrap_or_default());
        if shown.is_some_and(|shown| shown < *generation) {
            return Err(());
        }
        written.remove(&key);
        Ok(self.release.as_ref())
    }

    /// Secrets are known also when Flux has removed their Secret together with the object: what was made of it is
    /// still there.
    async fn keep_secrets(&mut self, context: &Context, namespace: &str, spec: &StyrminDeploymentSpec) -> Result<()> {
        if self.secrets.is_empty() && !references(spec).is_empty() {
            self.secrets = texts_of_values(context, namespace, spec).await?;
        }
        Ok(())
    }

    /// A Service of ours is to be made.
    fn misses_a_service(&self, watch: &Watch) -> bool {
        let text = |object: &Value, pointer: &str| {
            object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned()
        };
        let is_missing = |object: &&Value| {
            object["kind"] == "Service"
                && !watch.services.contains(&text(object, "/metadata/namespace"), &text(object, "/metadata/name"))
        };
        self.differing.iter().chain(&self.additions).any(|object| is_missing(&object))
    }

    /// Flux has done what is wanted of it now.
    fn release_is_ready(&self, place: &Place<'_>) -> bool {
        self.wanted.as_ref().is_ok_and(|wanted| !wanted.held)
            && judged(&self.view(place.object), &place.context.settings) == Some(Verdict::Ready)
    }
}

/// What the end of a deployment rests on.
async fn ending(
    object: &StyrminDeployment,
    status: &StyrminDeploymentStatus,
    mut gathered: Gathered,
    context: &Context,
) -> Result<Gathered> {
    let namespace = object.namespace().unwrap_or_default();
    let spec = &object.spec;
    if gathered.revisions.is_empty() {
        gathered.read_applied(context, object).await?;
    }
    if gathered.release.as_ref().and_then(release::uninstall_failed).is_some() {
        gathered.keep_secrets(context, &namespace, spec).await?;
        gathered.say_it_ours(spec, None);
    }
    gathered.leftovers = leftovers(context, &namespace, &object.name_any(), spec, &gathered.revisions).await?;
    let was_applied = gathered.applied.is_some() || status.applied_digest.is_some();
    if !teardown::before_removal(status) || !was_applied {
        return Ok(gathered);
    }
    // The actions of what runs, not of what was to come.
    let applied = gathered.applied.as_ref().map_or(&spec.driver, |applied| &applied.driver);
    gathered.driver = context.drivers.get(&context.watch, applied);
    let (Ok(driver), Ok(environment)) = (gathered.driver.clone(), environment(&namespace)) else { return Ok(gathered) };
    gathered.keep_secrets(context, &namespace, spec).await?;
    gathered.say_it_ours(spec, Some(&driver));
    let plan = plan::plan(gathered.applied.as_ref(), None, &driver.file.spec.actions);
    let base = Base::of(gathered.revision(), Some(status), &driver.digest);
    let secrets = &gathered.secrets;
    let place = actions::Place { context, object, status, environment: &environment, driver: &driver, secrets };
    let (hook, still_there) =
        (actions::next(&place, &plan, base).await?, actions::still_there(&place, &plan, base).await?);
    (gathered.hook, gathered.still_there) = (hook, still_there);
    // An action may stop components: through the release, as it is.
    gathered.applied_release = None;
    let held = held_release(&gathered, context, spec, status);
    let wanted = Wanted { release: held, held: true, ..Wanted::default() };
    let seen = compare(&context.watch, &wanted, gathered.current_release(context, object));
    (gathered.differing, gathered.going) = (seen.differing, seen.going);
    Ok(gathered)
}

fn has_ready_pod(watch: &Watch, spec: &StyrminDeploymentSpec) -> bool {
    let namespace = spec.deployment_id.object_name();
    watch.pods.within(&namespace).iter().any(|(_, pod)| pod.ready)
}

/// The pod templates of an application's Deployments and StatefulSets: no store holds what charts make.
async fn templates(
    context: &Context,
    spec: &StyrminDeploymentSpec,
) -> Result<impl Iterator<Item = PodTemplateSpec> + use<>> {
    let namespace = spec.deployment_id.object_name();
    let what = || OperatorError::of(format!("looking for the pods' templates in {namespace}"));
    let client = || context.client.clone();
    let all = ListParams::default();
    let deployments = Api::<Deployment>::namespaced(client(), &namespace).list(&all).await.map_err(what())?;
    let sets = Api::<StatefulSet>::namespaced(client(), &namespace).list(&all).await.map_err(what())?;
    let deployments = deployments.items.into_iter().filter_map(|one| Some(one.spec?.template));
    Ok(deployments.chain(sets.items.into_iter().filter_map(|one| Some(one.spec?.template))))
}

fn environment(namespace: &str) -> std::result::Result<EnvironmentId, String> {
    let id = namespace.strip_prefix("styrmin-env-").and_then(|id| id.parse().ok());
    id.ok_or_else(|| format!("Namespace {namespace} is not the namespace of an environment (styrmin-env-<id>)"))
}

/// A Service of ours that Helm cannot make because it is there.
fn in_the_way(gathered: &Gathered, watch: &Watch, spec: &StyrminDeploymentSpec) -> Option<ObjectKey> {
    let namespace = spec.deployment_id.object_name();
    let of_release = gathered.release.as_ref().and_then(|release| release.pointer("/status/conditions"));
    let conditions = of_release.and_then(Value::as_array).into_iter().flatten();
    let messages = conditions.filter_map(|condition| condition["message"].as_str());
    let messages = messages.chain(gathered.failure.as_ref().map(|failure| failure.message.as_str()));
    messages.filter_map(|message| service_in_the_way(message, &namespace)).find_map(|name| {
        let kept = watch.services.get(&namespace, &name).filter(|kept| !kept.going)?;
        Some(network::key("v1", "Service", &namespace, &name, &kept))
    })
}

/// The Service that Helm says it cannot take over.
fn service_in_the_way(message: &str, namespace: &str) -> Option<String> {
    let (before, _) = message.split_once(&format!("\" in namespace \"{namespace}\" exists and cannot be imported"))?;
    Some(before.rsplit_once("Service \"")?.1.to_owned())
}

impl Gathered {
    /// Messages of Flux, without the values of secrets (Helm quotes values in some errors), and with the
    /// name that people know for an override whose container is not there.
    fn say_it_ours(&mut self, spec: &StyrminDeploymentSpec, driver: Option<&Driver>) {
        let Self { release, failure, secrets, .. } = self;
        let not_found = |message: &str| post_render::not_found(message, spec, driver?);
        if let Some(failure) = failure {
            if let Some(message) = not_found(&failure.message) {
                failure.reason = post_render::CONTAINER_NOT_FOUND.into();
                failure.message = message;
            }
            failure.message = masked(&failure.message, secrets);
        }
        let conditions = release.as_mut().and_then(|release| release.pointer_mut("/status/conditions"));
        for condition in conditions.and_then(Value::as_array_mut).into_iter().flatten() {
            let message = condition["message"].as_str().unwrap_or_default();
            let message = not_found(message).unwrap_or_else(|| masked(message, secrets));
            condition["message"] = message.into();
        }
    }
}

/// A text without the values of secrets. Those of up to three characters stay: they are no secrets, and
/// masking them would leave no text.
fn masked(text: &str, secrets: &Secrets) -> String {
    masked_by(text, secrets.values())
}

/// The same for values that are known one by one.
pub(super) fn masked_by<'a>(text: &str, secrets: impl IntoIterator<Item = &'a String>) -> String {
    let mut values: Vec<String> = secrets.into_iter().flat_map(|value| shapes(value)).collect();
    values.retain(|value| value.len() > 3);
    values.sort_by_key(|value| std::cmp::Reverse(value.len()));
    values.into_iter().fold(text.to_owned(), |text, value| text.replace(value.as_str(), "***"))
}

/// Least length of a line that is a secret by itself, in bytes.
const LINE_MIN: usize = 8;

/// A value as others write it: as it is, with escapes as in quotes, in base64, and each of its lines.
fn shapes(value: &str) -> Vec<String> {
    let mut shapes = vec![value.to_owned(), STANDARD.encode(value)];
    let escaped = serde_json::to_string(value).unwrap_or_default();
    shapes.push(escaped.trim_matches('"').to_owned());
    if value.contains('\n') {
        shapes.extend(value.lines().map(str::trim).filter(|line| line.len() >= LINE_MIN).map(str::to_owned));
    }
    shapes
}

/// Why an object is not the one that its application belongs to: a copy of it under another name or in
/// another environment.
fn copy(object: &StyrminDeployment, watch: &Watch) -> Option<String> {
    let (name, namespace) = (object.name_any(), object.namespace().unwrap_or_default());
    let expected = object.spec.deployment_id.object_name();
    if name != expected {
        return Some(format!(
            "StyrminDeployment {namespace}/{name} names deployment {}, whose object is {expected}: it is a copy, and does nothing",
            object.spec.deployment_id
        ));
    }
    let environment = watch.namespaces.get("", &expected)?.environment?;
    let own = format!("styrmin-env-{}", environment.as_str());
    // Only when there is another one: a label is easily edited.
    let is_there = watch.deployments.contains(&own, &name) || watch.releases.contains(&own, &name);
    (own != namespace && is_there).then(|| format!("The application of StyrminDeployment {namespace}/{name} belongs to the one in {own}: this is a copy, and does nothing"))
}

fn confirmed(object: &StyrminDeployment, context: &Context) -> Option<String> {
    // What a person says in an annotation, the decision itself reads and keeps.
    let uid = object.metadata.uid.as_deref()?;
    let answer = context.server.answer();
    let meant = answer.confirmed_deletions.get(object.spec.deployment_id.as_str())?;
    (meant == uid).then(|| "the deletion was requested".to_owned())
}

fn secret_refs(value: &Value, found: &mut Vec<SecretRef>) {
    if let Some(reference) = SecretRef::read(value) {
        found.push(reference);
        return;
    }
    match value {
        Value::Object(map) => map.values().for_each(|value| secret_refs(value, found)),
        Value::Array(items) => items.iter().for_each(|value| secret_refs(value, found)),
        _ => {}
    }
}

/// The secrets that a spec names.
fn references(spec: &StyrminDeploymentSpec) -> Vec<SecretRef> {
    let mut found = Vec::new();
    secret_refs(&spec.context, &mut found);
    found
}

type Secrets = BTreeMap<(String, String), String>;

/// The values of all secrets that a spec names, or what is missing. The context names each by a
/// fingerprint: an older Secret that is still there does not count.
async fn secrets(
    context: &Context,
    namespace: &str,
    spec: &StyrminDeploymentSpec,
) -> Result<std::result::Result<Secrets, String>> {
    let references = references(spec);
    let mut found = Secrets::new();
    for reference in references.iter().filter(|reference| !reference.is_outside()) {
        let known = context.watch.secrets.get(namespace, &reference.name);
        let fingerprint = known.as_ref().and_then(|known| known.fingerprint(&reference.key));
        if fingerprint != Some(reference.fingerprint.as_str()) {
            let state = match (&known, fingerprint) {
                (None, _) => "is not there",
                (Some(_), None) => "lacks it",
                (Some(_), Some(_)) => "has an older one",
            };
            return Ok(Err(format!(
                "Waiting for key {} of Secret {namespace}/{}, which {state}: Flux decrypts it from the repository",
                reference.key, reference.name
            )));
        }
    }
    let names: BTreeSet<&String> = references.iter().map(|reference| &reference.name).collect();
    for name in names {
        let api: Api<Secret> = Api::namespaced(context.client.clone(), namespace);
        let secret =
            api.get_opt(name).await.map_err(OperatorError::of(format!("reading Secret {namespace}/{name}")))?;
        let data = secret.and_then(|secret| secret.data).unwrap_or_default();
        // Of a Secret of somebody else's only what was named.
        let is_named =
            |key: &str| references.iter().any(|one| one.name == *name && (!one.is_outside() || one.key == key));
        for (key, value) in data.into_iter().filter(|(key, _)| is_named(key)) {
            let Ok(text) = String::from_utf8(value.0) else {
                return Ok(Err(format!("Key {key} of Secret {namespace}/{name} is no text")));
            };
            found.insert((name.clone(), key), text);
        }
    }
    let missing = references.iter().find(|one| !found.contains_key(&(one.name.clone(), one.key.clone())));
    Ok(match missing {
        Some(one) => Err(format!(
            "Waiting for key {} of Secret {namespace}/{}{}",
            one.key,
            one.name,
            match one.fingerprint.as_str() {
                context::EXISTING => ", which the deployment names: somebody has to make it there",
                context::EXTERNAL => ", which the ExternalSecret of this name has to fill",
                _ => "",
            }
        )),
        None => Ok(found),
    })
}

/// Everything that should be there.
fn wanted(
    place: &Place<'_>,
    (policies, services): (Vec<Value>, Vec<Value>),
    gathered: &Gathered,
) -> std::result::Result<Wanted, String> {
    let &Place { context, object, status, environment, driver, .. } = place;
    let spec = &object.spec;
    if gathered.waiting.is_some() {
        return Ok(kept_as_it_is(place, (policies, services), gathered));
    }
    // Only charts that lie in the repository need it, and those were waited for.
    let repository = place.repository.cloned().unwrap_or(objects::Repository {
        url: String::new(),
        branch: String::new(),
        prefix: String::new(),
        secret: None,
    });
    let reveal =
        |one: &SecretRef| gathered.secrets.get(&(one.name.clone(), one.key.clone())).cloned().unwrap_or_default();
    let values = objects::helm_values(spec, driver, &reveal).map_err(|error| error.to_string())?;
    let values = objects::values_secret(spec, environment, &values).map_err(|error| error.to_string())?;
    let held = !steps::release_allowed(status);
    let release = if held {
        held_release(gathered, context, spec, status)
    } else {
        let stopped: BTreeSet<String> = status.stopped_components.iter().cloned().collect();
        let mut release = objects::helm_release(spec, environment, driver, &values, context.settings.release, &stopped);
        let handled = |at: &&str| gathered.release.as_ref().is_some_and(|found| release::was_reset(found, at));
        if let Some(at) = status.release_reset_at.as_deref().filter(|at| !handled(at)) {
            for name in release::RESET {
                release["metadata"]["annotations"][name] = at.into();
            }
        }
        release
    };
    let mut prerequisites = vec![objects::application_namespace(spec, environment)];
    prerequisites.extend(policies);
    prerequisites.extend(objects::chart_source(driver, environment, &repository));
    prerequisites.push(values);
    Ok(Wanted { prerequisites, release, held, services })
}

/// What should be there of a deployment while something is missing that it is rendered from. Its values are in a Secret
/// that is there; of one at rest a release that is not there is made again as it was applied.
fn kept_as_it_is(place: &Place<'_>, (policies, services): (Vec<Value>, Vec<Value>), gathered: &Gathered) -> Wanted {
    let &Place { object, status, environment, driver, .. } = place;
    let mut prerequisites = vec![objects::application_namespace(&object.spec, environment)];
    prerequisites.extend(policies);
    prerequisites
        .extend(place.repository.iter().flat_map(|repository| objects::chart_source(driver, environment, repository)));
    let is_missing = gathered.release.is_none() && !rolls(status);
    let release = gathered.applied_release.clone().filter(|_| is_missing).unwrap_or_default();
    Wanted { prerequisites, release, held: true, services }
}

/// The HelmRelease as it was before this change, but for the components that an action stopped; null when
/// there is none, or when the driver that it was made with is not there any more. When Flux has given up on what is
/// there, that is the one that was last applied: Flux has gone back to it already, and no action could start the
/// components of the other.
fn held_release(
    gathered: &Gathered,
    context: &Context,
    spec: &StyrminDeploymentSpec,
    status: &StyrminDeploymentStatus,
) -> Value {
    // With its record gone, what runs was made with the driver of the newest spec, as far as anybody knows.
    let unknown = status.applied_digest.as_ref().map(|_| &spec.driver);
    let applied = gathered.applied.as_ref().map(|applied| &applied.driver).or(unknown);
    let (Some(release), Some(applied)) = (&gathered.release, applied) else { return Value::Null };
    let Ok(driver) = context.drivers.get(&context.watch, applied) else { return Value::Null };
    let stopped: BTreeSet<String> = status.stopped_components.iter().cloned().collect();
    let verdict = release::judge(release, gathered.failure.as_ref(), context.settings.release.retries);
    let gave_up = matches!(verdict, Verdict::Failed { .. } | Verdict::Error { .. });
    let before = gathered.applied_release.as_ref().filter(|_| gave_up).unwrap_or(release);
    objects::held_release(before, &driver, &stopped)
}

/// Every text of the values that Helm was given: whatever of them is secret is among them.
async fn texts_of_values(context: &Context, namespace: &str, spec: &StyrminDeploymentSpec) -> Result<Secrets> {
    fn texts(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::String(text) => found.push(text.clone()),
            Value::Array(items) => items.iter().for_each(|value| texts(value, found)),
            Value::Object(map) => map.values().for_each(|value| texts(value, found)),
            _ => {}
        }
    }
    let api: Api<Secret> = Api::namespaced(context.client.clone(), namespace);
    let of_it = ListParams::default().labels(&format!("{DEPLOYMENT_LABEL}={}", spec.deployment_id));
    let found = api.list(&of_it).await.map_err(OperatorError::of(format!("listing Secrets in {namespace}")))?;
    let files = found.items.into_iter().filter_map(|secret| secret.data?.remove(objects::VALUES_KEY));
    let mut all = Vec::new();
    for file in files {
        if let Ok(values) =
            String::from_utf8(file.0).map_err(drop).and_then(|text| yaml::from_str::<Value>(&text).map_err(drop))
        {
            texts(&values, &mut all);
        }
    }
    Ok(all.into_iter().enumerate().map(|(number, text)| (("values".to_owned(), number.to_string()), text)).collect())
}

/// How what is there differs from what is wanted.
#[derive(Default)]
struct Seen {
    /// Missing or different, in the order of their application.
    differing: Vec<Value>,
    /// Aliases that were never there.
    additions: Vec<Value>,
    /// Names of those that are on their way out.
    going: Vec<String>,
}

fn compare(watch: &Watch, wanted: &Wanted, release: std::result::Result<Option<&Value>, ()>) -> Seen {
    let mut seen = Seen::default();
    let is_going = |namespace: &str| watch.namespaces.get("", namespace).is_some_and(|found| found.going);
    let release_wanted = Some(&wanted.release).filter(|release| !release.is_null());
    for object in wanted.prerequisites.iter().chain(release_wanted).chain(&wanted.services) {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let (kind, namespace, name) = (text("/kind"), text("/metadata/namespace"), text("/metadata/name"));
        // Whether it is on its way out, and whether it is as wanted.
        let found: Option<(bool, bool)> = match kind {
            "Namespace" => {
                let found = watch.namespaces.get("", name);
                found.map(|found| (found.going, found.has_labels_of(object)))
            }
            // Named by its content, and immutable: only somebody else's in its place has another one.
            "Secret" => watch.secrets.get(namespace, name).map(|found| (found.going, found.ours)),
            "NetworkPolicy" | "Service" => {
                let store = if kind == "Service" { &watch.services } else { &watch.policies };
                store.get(namespace, name).map(|kept| (kept.going, kept.is_as(kind, object)))
            }
            // Seen soon.
            "HelmRelease" if release.is_err() => Some((true, false)),
            "HelmRelease" => {
                let release = release.unwrap_or_default();
                let is = |found: &Value| covers(found, object) && surplus(found, object).is_empty();
                release.map(|found| (!found["metadata"]["deletionTimestamp"].is_null(), is(found)))
            }
            kind => watch.source(kind, namespace, name).map(|found| {
                let value = serde_json::to_value(&found).unwrap_or_default();
                (found.metadata.deletion_timestamp.is_some(), covers(&value, object))
            }),
        };
        let is_alias = object["metadata"]["labels"][ALIAS_LABEL.0] == ALIAS_LABEL.1;
        match found {
            Some((true, _)) => seen.going.push(format!("{kind} {name}")),
            // Nothing can be made in a namespace that goes, and what is in it goes with it.
            _ if is_going(namespace) => seen.going.push(format!("{kind} {name}")),
            Some((false, true)) => {}
            None if is_alias && !watch.services.is_lost(namespace, name) => seen.additions.push(object.clone()),
            _ => seen.differing.push(object.clone()),
        }
    }
    seen
}

/// Values and Jobs of earlier instances, which nothing names any more.
fn stale(
    watch: &Watch,
    namespace: &str,
    spec: &StyrminDeploymentSpec,
    status: &StyrminDeploymentStatus,
    wanted: &Wanted,
) -> Vec<ObjectKey> {
    let prefix = format!("{}-values-", spec.deployment_id.object_name());
    let current = wanted.release.pointer("/spec/valuesFrom/0/name").and_then(Value::as_str);
    let secrets = watch.secrets.beginning(namespace, &prefix).into_iter().map(|(name, _)| name);
    let secrets = secrets.filter(|name| Some(&**name) != current);
    let application = spec.deployment_id.object_name();
    let is_known = |job: &kept::ActionJob| status.steps.iter().any(|step| step.key.as_deref() == Some(&job.step));
    let jobs = watch.jobs.within(&application).into_iter().filter(|(_, job)| !is_known(job));
    let secrets = secrets.map(|name| ObjectKey::new("v1", "Secret", namespace, &name));
    secrets.chain(jobs.map(|(name, _)| ObjectKey::new("batch/v1", "Job", &application, &name))).collect()
}

/// Whether an object has everything that is wanted of it. What else it has, others put there.
pub(crate) fn covers(found: &Value, wanted: &Value) -> bool {
    match (found, wanted) {
        (Value::Object(found), Value::Object(wanted)) => {
            wanted.iter().all(|(key, wanted)| found.get(key).map_or(wanted.is_null(), |found| covers(found, wanted)))
        }
        (Value::Array(found), Value::Array(wanted)) => {
            found.len() == wanted.len() && found.iter().zip(wanted).all(|(found, wanted)| covers(found, wanted))
        }
        (found, wanted) => found == wanted,
    }
}

/// Fields of a HelmRelease that say what is brought where, and are not ours.
const OF_OTHERS: [&str; 3] = ["chart", "kubeConfig", "values"];

/// Fields that others have put into the spec of a HelmRelease, and that would bring something else into the cluster.
/// To suspend one is everybody's right, and what a webhook adds to all of them is its own.
pub(super) fn surplus(found: &Value, wanted: &Value) -> Vec<&'static str> {
    let is_there = |object: &Value, name: &str| !object["spec"][name].is_null();
    OF_OTHERS.into_iter().filter(|name| is_there(found, name) && !is_there(wanted, name)).collect()
}

/// Annotation of a copy: the version of what it is a copy of.
const COPIED_FROM: &str = "styrmin.io/copied-from";

/// The credentials of a chart source that come with the cluster's repository, as a copy in the
/// environment: no reference crosses a namespace. Gives the copy when it is to be written, and whether somebody has
/// changed or removed it, and not what it is a copy of.
async fn credentials(place: &Place<'_>, namespace: &str, wanted: &Wanted) -> Result<Option<(Value, bool)>> {
    let context = place.context;
    let uses = |object: &&Value| object["kind"] == "GitRepository" && object["metadata"]["name"] == CHART_SOURCE;
    let Some(source) = wanted.prerequisites.iter().find(uses) else { return Ok(None) };
    let Some(copy) = source.pointer("/spec/secretRef/name").and_then(Value::as_str) else { return Ok(None) };
    let Some(secret) = place.repository.and_then(|repository| repository.secret.as_ref()) else {
        return Ok(None);
    };
    let read = async |namespace: &str, name: &str| {
        let api: Api<Secret> = Api::namespaced(context.client.clone(), namespace);
        api.get_opt(name).await.map_err(OperatorError::of(format!("reading Secret {namespace}/{name}")))
    };
    if context.credentials.get(&namespace.to_owned()).is_some() {
        return Ok(None);
    }
    let at = Instant::now();
    let Some(original) = read(layout::FLUX_NAMESPACE, secret).await? else { return Ok(None) };
    let there = read(namespace, copy).await?;
    if there.as_ref().is_some_and(|there| there.data == original.data) {
        context.credentials.put(namespace.to_owned(), at, ());
        return Ok(None);
    }
    let version = original.resource_version().unwrap_or_default();
    let is_edited = match &there {
        Some(there) => there.annotations().get(COPIED_FROM) == Some(&version),
        // Its source is written after it.
        None => context
            .watch
            .source("GitRepository", namespace, CHART_SOURCE)
            .is_some_and(|found| found.data.pointer("/spec/secretRef/name").and_then(Value::as_str) == Some(copy)),
    };
    let labels = json!({ layout::MANAGED_BY.0: layout::MANAGED_BY.1 });
    let annotations = json!({ COPIED_FROM: version });
    let copy = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": { "namespace": namespace, "name": copy, "labels": labels, "annotations": annotations },
        "data": original.data, "type": original.type_,
    });
    Ok(Some((copy, is_edited)))
}

/// Only a release that Flux calls ready although something failed needs its events.
fn needs_events(release: &Value) -> bool {
    let status = &release["status"];
    let ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
    status["failures"].as_i64().unwrap_or_default() > 0
        && status["conditions"].as_array().is_some_and(|conditions| conditions.iter().any(ready))
}

/// The newest event about a failure of just this release: one of its name may have been there before.
async fn newest_failure(context: &Context, namespace: &str, release: &Value) -> Result<Option<FailureEvent>> {
    let api: Api<Event> = Api::namespaced(context.client.clone(), namespace);
    let part = |name: &str| release["metadata"][name].as_str().unwrap_or_default();
    let (name, uid) = (part("name"), part("uid"));
    let about = format!("involvedObject.kind=HelmRelease,involvedObject.name={name},involvedObject.uid={uid}");
    let events = api.list(&ListParams::default().fields(&about)).await;
    let events = events.map_err(OperatorError::of(format!("listing events of HelmRelease {namespace}/{name}")))?;
    let read = |event: &Event| FailureEvent::read(&serde_json::to_value(event).ok()?);
    Ok(events.items.iter().filter_map(read).max_by_key(|event| event.at))
}

/// What was applied with success, the newest last.
async fn revisions(
    context: &Context,
    namespace: &str,
    spec: &StyrminDeploymentSpec,
) -> Result<Vec<ControllerRevision>> {
    let api: Api<ControllerRevision> = Api::namespaced(context.client.clone(), namespace);
    let ours = ListParams::default().labels(&format!("{DEPLOYMENT_LABEL}={}", spec.deployment_id));
    let found = api.list(&ours).await;
    let mut found = found.map_err(OperatorError::of(format!("listing ControllerRevisions in {namespace}")))?.items;
    found.sort_by_key(|revision| revision.revision);
    Ok(found)
}

/// What a teardown still has to remove: the release, then what it was made of, the namespace last. Asked
/// of the API server itself: what a store does not show yet would be left behind.
async fn leftovers(
    context: &Context,
    namespace: &str,
    name: &str,
    spec: &StyrminDeploymentSpec,
    revisions: &[ControllerRevision],
) -> Result<Vec<Leftover>> {
    let what = || OperatorError::of(format!("looking for what is left of {namespace}/{name}"));
    let client = &context.client;
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &watch::helm_release());
    let release = api.get_opt(name).await.map_err(what())?;
    let of_it = ListParams::default().labels(&format!("{DEPLOYMENT_LABEL}={}", spec.deployment_id));
    let api: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let secrets = api.list_metadata(&of_it).await.map_err(what())?;
    let aliases = format!("{DEPLOYMENT_LABEL}={},{}={}", spec.deployment_id, ALIAS_LABEL.0, ALIAS_LABEL.1);
    let api: Api<Service> = Api::all(client.clone());
    let aliases = api.list_metadata(&ListParams::default().labels(&aliases)).await.map_err(what())?;
    let mut found: Vec<Leftover> =
        release.iter().map(|one| leftover("helm.toolkit.fluxcd.io/v2", "HelmRelease", &one.metadata)).collect();
    found.extend(secrets.iter().map(|one| leftover("v1", "Secret", &one.metadata)));
    found.extend(aliases.iter().map(|one| leftover("v1", "Service", &one.metadata)));
    found.extend(revisions.iter().map(|one| leftover("apps/v1", "ControllerRevision", &one.metadata)));
    if found.is_empty() {
        // They go after the rest, and are looked for then.
        found = sources_left(context, namespace, name).await.map_err(what())?;
    }
    let api: Api<Namespace> = Api::all(client.clone());
    let application = api.get_opt(name).await.map_err(what())?;
    found.extend(application.iter().map(|one| leftover("v1", "Namespace", &one.metadata)));
    Ok(found)
}

/// The sources of charts, and the copied credentials, that nobody else in the environment has a use for. Of those that
/// end at the same moment none has: each removes what is left, so that none leaves it to the other. Whether there is
/// anybody whom the store does not show is asked of the API server.
async fn sources_left(context: &Context, namespace: &str, name: &str) -> kube::Result<Vec<Leftover>> {
    let known: HashMap<_, _> = context.watch.deployments.within(namespace).into_iter().collect();
    if known.iter().any(|(other, kept)| **other != *name && kept.ending != Ending::Removes) {
        return Ok(Vec::new());
    }
    let client = &context.client;
    let api: Api<StyrminDeployment> = Api::namespaced(client.clone(), namespace);
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let found = api.list_metadata(&page).await?;
        let is_known = |other: &PartialObjectMeta<StyrminDeployment>| {
            known.get(&*other.name_any()).is_some_and(|kept| kept.has_uid(other.metadata.uid.as_deref()))
        };
        if found.iter().any(|other| other.name_any() != name && !is_known(other)) {
            return Ok(Vec::new());
        }
        match found.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => break,
        }
    }
    let ours = ListParams::default().labels(&format!("{}={}", layout::MANAGED_BY.0, layout::MANAGED_BY.1));
    let mut found = Vec::new();
    for kind in ["HelmChart", "HelmRepository", "OCIRepository", "GitRepository"] {
        let resource = watch::source(kind);
        let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource);
        let sources = api.list_metadata(&ours).await?;
        found.extend(sources.iter().map(|one| leftover(&resource.api_version, kind, &one.metadata)));
    }
    let api: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let copies = api.list_metadata(&ours.fields(&format!("metadata.name={CHART_SOURCE}"))).await?;
    found.extend(copies.iter().map(|one| leftover("v1", "Secret", &one.metadata)));
    Ok(found)
}

fn leftover(version: &str, kind: &str, metadata: &ObjectMeta) -> Leftover {
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    let (namespace, name) = (part(&metadata.namespace), part(&metadata.name));
    let place = if namespace.is_empty() { String::new() } else { format!("{namespace}/") };
    Leftover {
        name: format!("{kind} {place}{name}"),
        object: ObjectKey::new(version, kind, &namespace, &name),
        going: metadata.deletion_timestamp.is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::{covers, masked_by, service_in_the_way, surplus};
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde_json::json;

    #[test]
    fn helm_names_the_service_that_is_in_its_way() {
        let said = |kind: &str| {
            format!(
                "Helm install failed for release styrmin-a/styrmin-a with chart web@1.0.0: unable to continue with \
                 install: {kind} \"shop\" in namespace \"styrmin-a\" exists and cannot be imported into the current \
                 release: invalid ownership metadata; annotation validation error: missing key \
                 \"meta.helm.sh/release-name\": must be set to \"styrmin-a\""
            )
        };
        assert_eq!(service_in_the_way(&said("Service"), "styrmin-a").as_deref(), Some("shop"));
        for (kind, namespace) in [("ConfigMap", "styrmin-a"), ("Service", "styrmin-b")] {
            assert_eq!(service_in_the_way(&said(kind), namespace), None);
        }
    }

    #[test]
    fn a_secret_is_masked_however_it_is_written() {
        let secret = "-----BEGIN KEY-----\nMIIEvQIBADANBg\\\"kq\n-----END KEY-----\n".to_owned();
        let quoted = serde_json::to_string(&secret).unwrap();
        let line = secret.lines().nth(1).unwrap();
        for text in [secret.clone(), quoted, STANDARD.encode(&secret), format!("at line 2: {line}: no key")] {
            let masked = masked_by(&format!("got {text} here"), [&secret]);
            assert!(masked.contains("***") && !masked.contains("MIIE"), "{masked}");
        }
        assert_eq!(masked_by("yes or no", [&"yes".to_owned()]), "yes or no", "that is no secret");
    }

    #[test]
    fn what_others_put_into_a_release_is_seen_but_for_its_suspension() {
        let wanted = json!({ "spec": { "chartRef": {}, "timeout": "1s" } });
        let found = json!({ "spec": { "chartRef": {}, "suspend": true, "timeout": "2s", "values": {}, "test": null } });
        assert_eq!(surplus(&found, &wanted), ["values"]);
    }

    #[test]
    fn what_others_added_is_no_difference() {
        let found = json!({ "spec": { "a": 1, "b": [{ "c": 1, "default": 2 }], "more": true }, "status": {} });
        assert!(covers(&found, &json!({ "spec": { "a": 1, "b": [{ "c": 1 }], "absent": null } })));
        assert!(!covers(&found, &json!({ "spec": { "a": 2 } })));
        assert!(!covers(&found, &json!({ "spec": { "b": [] } })));
        assert!(!covers(&found, &json!({ "spec": { "other": 1 } })));
    }
}
