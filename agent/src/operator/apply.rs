//! Does what a decision says. Server-side apply with our field manager everywhere, and the status only
//! when it changed and the object is still the one that was observed.

use super::decide::{Action, Decision, Note, ObjectKey};
use super::observe::{APPLIED_RELEASE, APPLIED_SPEC, FINISHED_JOBS, Gathered, surplus};
use super::{Context, FINALIZER, OperatorError, Result, execute};
use crate::kept::{self, FIELD_MANAGER};
use crate::store::key;
use crate::{clock, flux, watch};
use k8s_openapi::api::apps::v1::ControllerRevision;
use kube::api::{Api, DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams, Preconditions};
use kube::{Client, Error, ResourceExt as _};
use serde_json::{Value, json};
use std::sync::{Arc, PoisonError};
use styrmin_renderer::canonical;
use styrmin_renderer::layout::MANAGED_BY;
use styrmin_renderer::network;
use styrmin_renderer::objects::CHART_SOURCE;
use styrmin_renderer::spec::{DEPLOYMENT_LABEL, StyrminDeployment, StyrminDeploymentStatus};
use tracing::{info, warn};

/// Owns nothing: it only asks.
const CHECK_MANAGER: &str = "styrmin-operator-check";
/// Owns only the finalizer, so that it can be let go of by itself.
const FINALIZER_MANAGER: &str = "styrmin-operator-finalizer";

pub(super) async fn carry_out(
    object: &StyrminDeployment,
    gathered: &Gathered,
    decision: Decision,
    context: &Arc<Context>,
) -> Result<()> {
    let status = &decision.status;
    // The status is written to the object that was observed: with our finalizer it has another version.
    let mut version = object.resource_version();
    for action in &decision.before {
        match action {
            Action::AddFinalizer => version = finalizer(object, context, true).await?,
            action => act(action, object, status, gathered, context).await?,
        }
    }
    let written = write_status(object, version, status, context).await?;
    if written && decision.before.contains(&Action::RecordApplied) {
        // Every step is over; the same ones are another rollout's.
        context.executions.forget(object);
    }
    let rests_on_it = |action: &Action| {
        matches!(action, Action::Apply(_) | Action::Delete(_) | Action::Resume(_) | Action::Execute(_))
    };
    if !written && decision.after.iter().any(rests_on_it) {
        // What is done follows from the object as it was observed, and no write has shown that it is still so: a watch
        // that begins anew may show it as it was a while ago.
        is_current(object, context).await?;
    }
    // The status says so now, and the next pass has no news of it.
    publish(object, &decision.notes, context).await;
    for action in &decision.after {
        act(action, object, status, gathered, context).await?;
    }
    Ok(())
}

/// Tells whoever watches events.
pub(super) async fn publish(object: &StyrminDeployment, notes: &[Note], context: &Context) {
    for note in notes {
        info!(object = object.name_any(), reason = note.reason, message = note.message);
        if let Err(error) = context.events.publish(object, note).await {
            warn!(%error, "an event could not be written");
        }
    }
}

async fn act(
    action: &Action,
    object: &StyrminDeployment,
    status: &StyrminDeploymentStatus,
    gathered: &Gathered,
    context: &Arc<Context>,
) -> Result<()> {
    match action {
        Action::Apply(wanted) => apply(context, wanted, gathered.has_looked()).await,
        Action::Delete(key) => delete(context, key).await,
        Action::Execute(execution) => {
            execute::begin(context, execution, object, gathered.secret_values());
            Ok(())
        }
        Action::Resume(key) => resume(context, key).await,
        Action::RecordApplied => record_applied(object, status, gathered, context).await,
        Action::AddFinalizer => finalizer(object, context, true).await.map(drop),
        Action::RemoveFinalizer => finalizer(object, context, false).await.map(drop),
        Action::ReapplyFolder => {
            let namespace = object.namespace().unwrap_or_default();
            match flux::applied_by(&context.watch, &namespace, &object.name_any()) {
                Some(found) => flux::nudge(&context.client, &watch::kustomization(), &found)
                    .await
                    .map_err(OperatorError::of("asking Flux to apply the folder again")),
                None => Ok(()),
            }
        }
    }
}

fn api(client: &Client, version: &str, kind: &str, namespace: &str) -> Api<DynamicObject> {
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    let resource = watch::resource(group, version, kind);
    if namespace.is_empty() {
        Api::all_with(client.clone(), &resource)
    } else {
        Api::namespaced_with(client.clone(), namespace, &resource)
    }
}

/// `looked`: the pass has just seen which Services the chart has.
async fn apply(context: &Context, wanted: &Value, looked: bool) -> Result<()> {
    let text = |pointer: &str| wanted.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let (version, kind) = (text("/apiVersion"), text("/kind"));
    let (namespace, name) = (text("/metadata/namespace"), text("/metadata/name"));
    let client = &context.client;
    let is_new = kind == "Service" && !context.watch.services.contains(namespace, name);
    let mut is_free = is_new;
    if is_new && !looked {
        // A chart may have made one of this name a moment ago; then it serves.
        let found = api(client, version, kind, namespace).get_opt(name).await;
        let found = found.map_err(OperatorError::of(format!("reading {kind} {namespace}/{name}")))?;
        is_free = found.is_none();
        if found.is_some_and(|found| !is_ours(&found)) {
            warn!(kind, namespace, name, "somebody else has a Service of this name");
            return Ok(());
        }
    }
    info!(kind, namespace, name, "applying");
    let parameters = PatchParams::apply(FIELD_MANAGER);
    // Where nothing was, a chart's Service that comes first is not taken over: it is a conflict.
    let parameters = if is_free { parameters } else { parameters.force() };
    let api = api(client, version, kind, namespace);
    let what = || OperatorError::of(format!("applying {kind} {namespace}/{name}"));
    let written = match api.patch(name, &parameters, &Patch::Apply(wanted)).await {
        // Ours without the label that it is known by.
        Err(Error::Api(status)) if status.code == 409 && is_free => {
            let found = api.get_opt(name).await.map_err(what())?;
            if !found.is_some_and(|found| is_ours(&found)) {
                return Err(what()(Error::Api(status)));
            }
            api.patch(name, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(wanted)).await
        }
        // Immutable, and somebody has put another one in its place.
        Err(Error::Api(status)) if status.code == 422 && kind == "Secret" => {
            delete(context, &ObjectKey::new(version, kind, namespace, name)).await?;
            api.patch(name, &parameters, &Patch::Apply(wanted)).await
        }
        answer => answer,
    };
    let written = written.map_err(what())?;
    if let (Some(generation), "HelmRelease") = (written.metadata.generation, kind) {
        let mut known = context.written.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert(key(namespace, name), generation);
    }
    let written = serde_json::to_value(written).unwrap_or_default();
    // What other field managers have put beside ours stays when ours is applied, and would be used.
    let patch: Vec<Value> = match kind {
        "HelmRelease" => {
            let surplus = surplus(&written, wanted).into_iter();
            surplus.map(|field| json!({ "op": "remove", "path": format!("/spec/{field}") })).collect()
        }
        "NetworkPolicy" | "Service" if network::shape(kind, &written) == network::shape(kind, wanted) => Vec::new(),
        "NetworkPolicy" => vec![json!({ "op": "add", "path": "/spec", "value": wanted["spec"] })],
        "Service" => {
            let parts = ["externalName", "ports", "selector", "type"].into_iter();
            parts
                .filter_map(|part| {
                    let path = format!("/spec/{part}");
                    match (&wanted["spec"][part], &written["spec"][part]) {
                        (Value::Null, Value::Null) => None,
                        (Value::Null, _) => Some(json!({ "op": "remove", "path": path })),
                        (value, _) => Some(json!({ "op": "add", "path": path, "value": value })),
                    }
                })
                .collect()
        }
        _ => Vec::new(),
    };
    if patch.is_empty() {
        return Ok(());
    }
    let patch = serde_json::from_value(patch.into()).map(Patch::<()>::Json);
    let patch = patch.map_err(|error| what()(Error::SerdeError(error)))?;
    let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
    api.patch(name, &parameters, &patch).await.map_err(what()).map(drop)
}

/// Whether the operator made an object, also when somebody has taken the label away.
pub(super) fn is_ours(found: &DynamicObject) -> bool {
    let label = found.labels().get(MANAGED_BY.0).is_some_and(|by| by == MANAGED_BY.1);
    label || kept::is_ours(&found.metadata)
}

async fn delete(context: &Context, key: &ObjectKey) -> Result<()> {
    let ObjectKey { version, kind, namespace, name, uid } = key;
    match kind.as_str() {
        "Service" => context.watch.services.release(namespace, name),
        "NetworkPolicy" => context.watch.policies.release(namespace, name),
        "Secret" if name == CHART_SOURCE => context.credentials.forget(namespace),
        _ => {}
    }
    // A Job's pods go with it only when that is asked for.
    let mut parameters = DeleteParams::background();
    if let Some(uid) = uid {
        parameters = parameters.preconditions(Preconditions { uid: Some(uid.clone()), ..Preconditions::default() });
    }
    match api(&context.client, version, kind, namespace).delete(name, &parameters).await {
        Err(Error::Api(status)) if status.code == 404 => Ok(()),
        // Another one has its name by now.
        Err(Error::Api(status)) if status.code == 409 && uid.is_some() => Ok(()),
        answer => answer.map(drop).map_err(OperatorError::of(format!("deleting {kind} {namespace}/{name}"))),
    }
}

/// Flux works on a release again that somebody has suspended.
async fn resume(context: &Context, key: &ObjectKey) -> Result<()> {
    let ObjectKey { version, kind, namespace, name, .. } = key;
    let parameters = PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() };
    let patch = Patch::Merge(json!({ "spec": { "suspend": false } }));
    match api(&context.client, version, kind, namespace).patch(name, &parameters, &patch).await {
        Err(Error::Api(status)) if status.code == 404 => Ok(()),
        answer => answer.map(drop).map_err(OperatorError::of(format!("resuming {kind} {namespace}/{name}"))),
    }
}

/// Holds an object, or lets it go; gives its version then.
async fn finalizer(object: &StyrminDeployment, context: &Context, hold: bool) -> Result<Option<String>> {
    let held = object.finalizers().iter().any(|name| name == FINALIZER);
    if held == hold {
        return Ok(object.resource_version());
    }
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    let api: Api<StyrminDeployment> = Api::namespaced(context.client.clone(), &namespace);
    let answer = if hold {
        let patch = json!({ "apiVersion": "styrmin.io/v1alpha1", "kind": "StyrminDeployment",
            "metadata": { "name": name, "uid": object.uid(), "resourceVersion": object.resource_version(),
                "finalizers": [FINALIZER] } });
        api.patch(&name, &PatchParams::apply(FINALIZER_MANAGER).force(), &Patch::Apply(&patch)).await
    } else {
        // Not by server-side apply: after a restore another manager may own it as well.
        let others: Vec<&String> = object.finalizers().iter().filter(|name| *name != FINALIZER).collect();
        let patch = json!({ "metadata": { "uid": object.uid(), "resourceVersion": object.resource_version(), "finalizers": others } });
        api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await
    };
    match answer {
        Err(Error::Api(status)) if status.code == 404 && !hold => Ok(None),
        answer => {
            let held = answer.map_err(OperatorError::of(format!("changing the finalizer of {namespace}/{name}")))?;
            Ok(held.resource_version())
        }
    }
}

/// Fails as stale when the object is another one than was observed, or another version of it. Writes nothing.
async fn is_current(object: &StyrminDeployment, context: &Context) -> Result<()> {
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    let api: Api<StyrminDeployment> = Api::namespaced(context.client.clone(), &namespace);
    let patch = json!({ "apiVersion": "styrmin.io/v1alpha1", "kind": "StyrminDeployment",
        "metadata": { "name": name, "uid": object.uid(), "resourceVersion": object.resource_version() } });
    let answer = api.patch(&name, &PatchParams::apply(CHECK_MANAGER).dry_run(), &Patch::Apply(&patch)).await;
    answer.map(drop).map_err(OperatorError::of(format!("looking whether {namespace}/{name} is as it was")))
}

/// Gives whether there was something to write.
pub(super) async fn write_status(
    object: &StyrminDeployment,
    version: Option<String>,
    status: &StyrminDeploymentStatus,
    context: &Context,
) -> Result<bool> {
    let mut known = object.status.clone().unwrap_or_default();
    // A generation that changed nothing else is not worth a write of its own while an object goes.
    if object.metadata.deletion_timestamp.is_some() {
        known.observed_generation = status.observed_generation;
    }
    if known == *status {
        return Ok(false);
    }
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    let api: Api<StyrminDeployment> = Api::namespaced(context.client.clone(), &namespace);
    let mut value = serde_json::to_value(status).unwrap_or_default();
    without_nulls(&mut value);
    let patch = json!({
        "apiVersion": "styrmin.io/v1alpha1", "kind": "StyrminDeployment",
        // Of the object that was observed, and of no later one.
        "metadata": { "name": name, "uid": object.uid(), "resourceVersion": version },
        "status": value,
    });
    let answer = api.patch_status(&name, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&patch)).await;
    answer.map_err(OperatorError::of(format!("writing the status of {namespace}/{name}")))?;
    let before = object.status.clone().unwrap_or_default();
    context.phases.written(object.uid().as_deref().unwrap_or_default(), &before, status);
    Ok(true)
}

fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(without_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(without_nulls),
        _ => {}
    }
}

/// Keeps the spec outside the status: an object that is deleted and created again finds it.
async fn record_applied(
    object: &StyrminDeployment,
    status: &StyrminDeploymentStatus,
    gathered: &Gathered,
    context: &Context,
) -> Result<()> {
    let namespace = object.namespace().unwrap_or_default();
    let api: Api<ControllerRevision> = Api::namespaced(context.client.clone(), &namespace);
    context.applied.forget(&object.metadata.uid.clone().unwrap_or_default());
    let newest = gathered.revisions.last();
    let same = gathered.applied() == Some(&object.spec) && gathered.applied_release() == gathered.wanted_release();
    if let Some(known) = newest.filter(|_| same) {
        // Recorded already, by a pass that was cut off before it had removed the others.
        return forget_others(&known.name_any(), gathered, &namespace, context).await;
    }
    let newest = newest.map_or(0, |revision| revision.revision);
    let digest = object.spec.digest();
    let name = format!("{}-{}-{}", object.spec.deployment_id.object_name(), newest + 1, canonical::short(&digest));
    let revision = ControllerRevision {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            labels: Some(
                [(DEPLOYMENT_LABEL, object.spec.deployment_id.as_str()), MANAGED_BY]
                    .map(|(key, value)| (key.to_owned(), value.to_owned()))
                    .into(),
            ),
            annotations: Some([("styrmin.io/applied-at".to_owned(), clock::now().to_string())].into()),
            ..ObjectMeta::default()
        },
        data: Some(k8s_openapi::apimachinery::pkg::runtime::RawExtension(json!({
            APPLIED_SPEC: object.spec.to_value(), FINISHED_JOBS: status.finished_jobs,
            APPLIED_RELEASE: gathered.wanted_release(),
        }))),
        revision: newest + 1,
    };
    match api
        .create(&PostParams { field_manager: Some(FIELD_MANAGER.into()), ..PostParams::default() }, &revision)
        .await
    {
        // Not every conflict says that it is there: a quota, for example, has its own.
        Err(Error::Api(status)) if status.reason == "AlreadyExists" => {}
        answer => {
            answer.map_err(OperatorError::of(format!(
                "recording what was applied as ControllerRevision {namespace}/{name}"
            )))?;
        }
    }
    forget_others(&name, gathered, &namespace, context).await
}

/// Removes every record but one.
async fn forget_others(name: &str, gathered: &Gathered, namespace: &str, context: &Context) -> Result<()> {
    for old in gathered.revisions.iter().filter(|old| old.name_any() != name) {
        let key = ObjectKey::new("apps/v1", "ControllerRevision", namespace, &old.name_any());
        delete(context, &key).await?;
    }
    Ok(())
}
