//! Gathers what a decision rests on. Reads only.

use super::decide::{DriverSeen, Leftover, ObjectKey, Observed, Wanted, phase};
use super::release::FailureEvent;
use super::{CONFIRM_DELETE, Context, OperatorError, Result};
use crate::watch::{self, Watch};
use crate::{NAMESPACE, flux};
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::{Event, Namespace, Secret};
use kube::api::{Api, DynamicObject, ListParams};
use kube::runtime::reflector::ObjectRef;
use kube::{Resource as _, ResourceExt as _};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use styrmin_renderer::context::SecretRef;
use styrmin_renderer::driver::Driver;
use styrmin_renderer::layout;
use styrmin_renderer::names::EnvironmentId;
use styrmin_renderer::objects::{self, CHART_SOURCE};
use styrmin_renderer::spec::{DEPLOYMENT_LABEL, ENVIRONMENT_LABEL, StyrminDeployment, StyrminDeploymentSpec};

/// Annotation prefix of the fingerprints of a decrypted Secret.
const FINGERPRINT_PREFIX: &str = "fingerprint.styrmin.io/";
/// Key of the spec in a ControllerRevision.
pub(super) const APPLIED_SPEC: &str = "spec";

/// What was gathered, owned.
pub(super) struct Gathered {
    driver: std::result::Result<Driver, Option<String>>,
    waiting: Option<(&'static str, String)>,
    copy: Option<String>,
    wanted: std::result::Result<Wanted, String>,
    differing: Vec<Value>,
    going: Vec<String>,
    release: Option<Value>,
    failure: Option<FailureEvent>,
    applied: Option<StyrminDeploymentSpec>,
    pub(super) revisions: Vec<ControllerRevision>,
    confirmed: Option<String>,
    restored: bool,
    leftovers: Vec<Leftover>,
    stale: Vec<ObjectKey>,
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
            going: &self.going,
            release: self.release.as_ref(),
            failure: self.failure.as_ref(),
            applied: self.applied.as_ref(),
            confirmed: self.confirmed.as_deref(),
            restored: self.restored,
            leftovers: &self.leftovers,
            stale: &self.stale,
        }
    }
}

/// Gathers everything about one object.
pub(super) async fn observe(object: &StyrminDeployment, context: &Context) -> Result<Gathered> {
    let watch = &context.watch;
    let namespace = object.namespace().unwrap_or_default();
    let name = object.name_any();
    let spec = &object.spec;
    let mut gathered = Gathered {
        driver: driver(watch, spec),
        waiting: None,
        copy: copy(object, watch),
        wanted: Ok(Wanted::default()),
        differing: Vec::new(),
        going: Vec::new(),
        release: None,
        failure: None,
        applied: None,
        revisions: Vec::new(),
        confirmed: confirmed(object, context),
        restored: false,
        leftovers: Vec::new(),
        stale: Vec::new(),
    };
    if gathered.copy.is_some() {
        return Ok(gathered);
    }
    let status = object.status.clone().unwrap_or_default();
    let going = object.metadata.deletion_timestamp.is_some();
    let settled =
        status.phase.as_deref() == Some(phase::READY) && status.observed_generation == object.metadata.generation;
    if going || !settled {
        gathered.revisions = revisions(context, &namespace, spec).await?;
        gathered.applied = gathered.revisions.last().and_then(applied);
    }
    if going {
        let again = flux::applies_again(&context.client, watch, &namespace, &name).await;
        gathered.restored = again.map_err(OperatorError::of("asking what Flux applies"))?;
    }
    if going || spec.lifecycle == styrmin_renderer::spec::Lifecycle::Deleting {
        gathered.leftovers = leftovers(context, &namespace, &name, spec, &gathered.revisions).await?;
        return Ok(gathered);
    }
    let Ok(driver) = &gathered.driver else { return Ok(gathered) };
    let secrets = match secrets(context, &namespace, spec).await? {
        Ok(secrets) => secrets,
        Err(missing) => {
            gathered.waiting = Some(("SecretsMissing", missing));
            return Ok(gathered);
        }
    };
    if driver.chart_folder().is_some() && flux::repository(watch).is_none() {
        let message = "Waiting for GitRepository and Kustomization flux-system/styrmin: they name the chart's source";
        gathered.waiting = Some(("SourceMissing", message.to_owned()));
        return Ok(gathered);
    }
    gathered.wanted = wanted(watch, &namespace, spec, driver, &secrets, context);
    if let Ok(wanted) = &gathered.wanted {
        // Judged and compared is one and the same HelmRelease: read twice, the first could be the old one
        // that is ready and the second the new one that is as wanted.
        let release = watch::named(&watch.releases, &namespace, &name);
        gathered.release = release.and_then(|found| serde_json::to_value(&*found).ok());
        (gathered.differing, gathered.going) = differing(watch, wanted, gathered.release.as_ref());
        gathered.stale = stale(watch, &namespace, spec, wanted);
        let copies = credentials(context, &namespace, wanted).await?;
        gathered.differing.splice(0..0, copies);
    }
    if needs_events(gathered.release.as_ref()) {
        gathered.failure = newest_failure(context, &namespace, &name).await?;
    }
    // Helm quotes values in some errors.
    if let Some(failure) = &mut gathered.failure {
        failure.message = masked(&failure.message, &secrets);
    }
    if let Some(conditions) = gathered.release.as_mut().and_then(|release| release.pointer_mut("/status/conditions")) {
        for condition in conditions.as_array_mut().into_iter().flatten() {
            let message = condition["message"].as_str().unwrap_or_default();
            condition["message"] = masked(message, &secrets).into();
        }
    }
    Ok(gathered)
}

/// A text without the values of secrets. Those of up to three characters stay: they are no secrets, and
/// masking them would leave no text.
fn masked(text: &str, secrets: &Secrets) -> String {
    let mut values: Vec<&String> = secrets.values().filter(|value| value.len() > 3).collect();
    values.sort_by_key(|value| std::cmp::Reverse(value.len()));
    values.into_iter().fold(text.to_owned(), |text, value| text.replace(value.as_str(), "***"))
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
    let application = watch.namespaces.get(&ObjectRef::new(&expected))?;
    let environment = application.labels().get(ENVIRONMENT_LABEL)?;
    let own = format!("styrmin-env-{environment}");
    (own != namespace).then(|| format!("The application of StyrminDeployment {namespace}/{name} belongs to the one in {own}: this is a copy, and does nothing"))
}

/// The definition of the driver that a spec names: its error, or nothing when it is not there.
fn driver(watch: &Watch, spec: &StyrminDeploymentSpec) -> std::result::Result<Driver, Option<String>> {
    let name = format!("styrmin-driver-{}", layout::driver_name(&spec.driver.name, &spec.driver.digest));
    let found = watch.drivers.get(&ObjectRef::new(&name).within(NAMESPACE)).ok_or(None)?;
    let files: BTreeMap<String, String> = found.data.clone().unwrap_or_default();
    Driver::from_definition(files, &spec.driver.digest).map_err(|problems| {
        let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
        Some(problems.join("; "))
    })
}

fn confirmed(object: &StyrminDeployment, context: &Context) -> Option<String> {
    let uid = object.metadata.uid.as_deref()?;
    if object.annotations().get(CONFIRM_DELETE).is_some_and(|confirmed| confirmed == uid) {
        return Some(format!("confirmed by the annotation {CONFIRM_DELETE}"));
    }
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

type Secrets = BTreeMap<(String, String), String>;

/// The values of all secrets that a spec names, or what is missing. The context names each by a
/// fingerprint: an older Secret that is still there does not count.
async fn secrets(
    context: &Context,
    namespace: &str,
    spec: &StyrminDeploymentSpec,
) -> Result<std::result::Result<Secrets, String>> {
    let mut references = Vec::new();
    secret_refs(&spec.context, &mut references);
    let mut found = Secrets::new();
    for reference in &references {
        let known = context.watch.secrets.get(&ObjectRef::new(&reference.name).within(namespace));
        let fingerprint = known
            .as_ref()
            .and_then(|known| known.annotations().get(&format!("{FINGERPRINT_PREFIX}{}", reference.key)).cloned());
        if fingerprint.as_deref() != Some(reference.fingerprint.as_str()) {
            let state = match (known, fingerprint) {
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
    let names: std::collections::BTreeSet<&String> = references.iter().map(|reference| &reference.name).collect();
    for name in names {
        let api: Api<Secret> = Api::namespaced(context.client.clone(), namespace);
        let secret =
            api.get_opt(name).await.map_err(OperatorError::of(format!("reading Secret {namespace}/{name}")))?;
        let data = secret.and_then(|secret| secret.data).unwrap_or_default();
        for (key, value) in data {
            let Ok(text) = String::from_utf8(value.0) else {
                return Ok(Err(format!("Key {key} of Secret {namespace}/{name} is no text")));
            };
            found.insert((name.clone(), key), text);
        }
    }
    let missing = references.iter().find(|one| !found.contains_key(&(one.name.clone(), one.key.clone())));
    Ok(match missing {
        Some(one) => Err(format!("Waiting for key {} of Secret {namespace}/{}", one.key, one.name)),
        None => Ok(found),
    })
}

fn wanted(
    watch: &Watch,
    namespace: &str,
    spec: &StyrminDeploymentSpec,
    driver: &Driver,
    secrets: &Secrets,
    context: &Context,
) -> std::result::Result<Wanted, String> {
    let environment: EnvironmentId = namespace
        .strip_prefix("styrmin-env-")
        .and_then(|id| id.parse().ok())
        .ok_or_else(|| format!("Namespace {namespace} is not the namespace of an environment (styrmin-env-<id>)"))?;
    // Only charts that lie in the repository need it, and those were waited for.
    let repository = flux::repository(watch).unwrap_or(objects::Repository {
        url: String::new(),
        branch: String::new(),
        prefix: String::new(),
        secret: None,
    });
    let reveal = |one: &SecretRef| secrets.get(&(one.name.clone(), one.key.clone())).cloned().unwrap_or_default();
    let values = objects::helm_values(spec, driver, &reveal).map_err(|error| error.to_string())?;
    let values = objects::values_secret(spec, &environment, &values).map_err(|error| error.to_string())?;
    let release = objects::helm_release(spec, &environment, driver, &values, context.settings.release);
    let mut prerequisites = vec![objects::application_namespace(spec, &environment)];
    prerequisites.extend(objects::chart_source(driver, &environment, &repository));
    prerequisites.push(values);
    Ok(Wanted { prerequisites, release })
}

/// The objects that are missing or differ from what is wanted, in the order of their application, and the
/// names of those that are on their way out.
fn differing(watch: &Watch, wanted: &Wanted, release: Option<&Value>) -> (Vec<Value>, Vec<String>) {
    let (mut differing, mut going) = (Vec::new(), Vec::new());
    for object in wanted.prerequisites.iter().chain([&wanted.release]) {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let (kind, namespace, name) = (text("/kind"), text("/metadata/namespace"), text("/metadata/name"));
        let found = match kind {
            "Namespace" => watch.namespaces.get(&ObjectRef::new(name)).map(|found| {
                json!({ "metadata": { "labels": found.labels(), "deletionTimestamp": found.metadata.deletion_timestamp } })
            }),
            // Named by its content, and immutable.
            "Secret" => watch.secrets.get(&ObjectRef::new(name).within(namespace)).map(|_| object.clone()),
            "HelmRelease" => release.cloned(),
            kind => watch.source(kind, namespace, name).and_then(|found| serde_json::to_value(&*found).ok()),
        };
        match found {
            Some(found) if !found["metadata"]["deletionTimestamp"].is_null() => going.push(format!("{kind} {name}")),
            Some(found) if kind == "Namespace" => {
                if !covers(&found["metadata"]["labels"], &object["metadata"]["labels"]) {
                    differing.push(object.clone());
                }
            }
            Some(found) if covers(&found, object) => {}
            _ => differing.push(object.clone()),
        }
    }
    (differing, going)
}

/// Values of earlier instances, which nothing names any more.
fn stale(watch: &Watch, namespace: &str, spec: &StyrminDeploymentSpec, wanted: &Wanted) -> Vec<ObjectKey> {
    let prefix = format!("{}-values-", spec.deployment_id.object_name());
    let current = wanted.release.pointer("/spec/valuesFrom/0/name").and_then(Value::as_str);
    let old = watch.secrets.state_filter(|secret| {
        let name = secret.metadata.name.as_deref().unwrap_or_default();
        secret.metadata.namespace.as_deref() == Some(namespace) && name.starts_with(&prefix) && Some(name) != current
    });
    let key =
        |name: String| ObjectKey { version: "v1".into(), kind: "Secret".into(), namespace: namespace.into(), name };
    old.iter().map(|secret| key(secret.name_any())).collect()
}

/// Whether an object has everything that is wanted of it. What else it has, others put there.
pub(super) fn covers(found: &Value, wanted: &Value) -> bool {
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

/// The credentials of a chart source that come with the cluster's repository, as a copy in the
/// environment: no reference crosses a namespace.
async fn credentials(context: &Context, namespace: &str, wanted: &Wanted) -> Result<Vec<Value>> {
    let uses = |object: &&Value| object["kind"] == "GitRepository" && object["metadata"]["name"] == CHART_SOURCE;
    let Some(source) = wanted.prerequisites.iter().find(uses) else { return Ok(Vec::new()) };
    let Some(copy) = source.pointer("/spec/secretRef/name").and_then(Value::as_str) else { return Ok(Vec::new()) };
    let Some(secret) = flux::repository(&context.watch).and_then(|repository| repository.secret) else {
        return Ok(Vec::new());
    };
    let read = async |namespace: &str, name: &str| {
        let api: Api<Secret> = Api::namespaced(context.client.clone(), namespace);
        api.get_opt(name).await.map_err(OperatorError::of(format!("reading Secret {namespace}/{name}")))
    };
    let Some(original) = read(layout::FLUX_NAMESPACE, &secret).await? else { return Ok(Vec::new()) };
    let there = read(namespace, copy).await?;
    if there.is_some_and(|there| there.data == original.data) {
        return Ok(Vec::new());
    }
    Ok(vec![json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": { "namespace": namespace, "name": copy, "labels": { layout::MANAGED_BY.0: layout::MANAGED_BY.1 } },
        "data": original.data, "type": original.type_,
    })])
}

/// Only a release that Flux calls ready although something failed needs its events.
fn needs_events(release: Option<&Value>) -> bool {
    let Some(status) = release.map(|release| &release["status"]) else { return false };
    let ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
    status["failures"].as_i64().unwrap_or_default() > 0
        && status["conditions"].as_array().is_some_and(|conditions| conditions.iter().any(ready))
}

async fn newest_failure(context: &Context, namespace: &str, name: &str) -> Result<Option<FailureEvent>> {
    let api: Api<Event> = Api::namespaced(context.client.clone(), namespace);
    let about = format!("involvedObject.kind=HelmRelease,involvedObject.name={name}");
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

fn applied(revision: &ControllerRevision) -> Option<StyrminDeploymentSpec> {
    serde_json::from_value(revision.data.as_ref()?.0.get(APPLIED_SPEC)?.clone()).ok()
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
    let mut found = Vec::new();
    let mut add = |version: &str, kind: &str, namespace: &str, name: &str, going: bool| {
        let place = if namespace.is_empty() { String::new() } else { format!("{namespace}/") };
        found.push(Leftover {
            name: format!("{kind} {place}{name}"),
            object: ObjectKey {
                version: version.into(),
                kind: kind.into(),
                namespace: namespace.into(),
                name: name.into(),
            },
            going,
        });
    };
    let what = || OperatorError::of(format!("looking for what is left of {namespace}/{name}"));
    let client = context.client.clone();
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &watch::helm_release());
    if let Some(release) = api.get_opt(name).await.map_err(what())? {
        add("helm.toolkit.fluxcd.io/v2", "HelmRelease", namespace, name, release.metadata.deletion_timestamp.is_some());
    }
    let of_it = ListParams::default().labels(&format!("{DEPLOYMENT_LABEL}={}", spec.deployment_id));
    let api: Api<Secret> = Api::namespaced(client.clone(), namespace);
    for secret in api.list_metadata(&of_it).await.map_err(what())? {
        add("v1", "Secret", namespace, &secret.name_any(), secret.meta().deletion_timestamp.is_some());
    }
    for revision in revisions {
        add("apps/v1", "ControllerRevision", namespace, &revision.name_any(), false);
    }
    let api: Api<Namespace> = Api::all(client);
    if let Some(application) = api.get_opt(name).await.map_err(what())? {
        add("v1", "Namespace", "", name, application.metadata.deletion_timestamp.is_some());
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::covers;
    use serde_json::json;

    #[test]
    fn what_others_added_is_no_difference() {
        let found = json!({ "spec": { "a": 1, "b": [{ "c": 1, "default": 2 }], "more": true }, "status": {} });
        assert!(covers(&found, &json!({ "spec": { "a": 1, "b": [{ "c": 1 }], "absent": null } })));
        assert!(!covers(&found, &json!({ "spec": { "a": 2 } })));
        assert!(!covers(&found, &json!({ "spec": { "b": [] } })));
        assert!(!covers(&found, &json!({ "spec": { "other": 1 } })));
    }
}
