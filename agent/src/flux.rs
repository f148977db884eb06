//! Reads Flux's own objects, and asks Flux to look now. It never changes what Flux does.

use crate::clock;
use crate::watch::{self, Watch};
use kube::Client;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::ResourceExt as _;
use kube::discovery::ApiResource;
use serde_json::{Value, json};
use styrmin_renderer::layout::FLUX_NAMESPACE;
use styrmin_renderer::objects::{FLUX_SOURCE, Repository};

/// Annotation that asks Flux to look now.
pub const REQUESTED_AT: &str = "reconcile.fluxcd.io/requestedAt";
/// Who writes it.
const FIELD_MANAGER: &str = "styrmin-agent-nudge";

/// The cluster's repository, as the GitRepository and the root Kustomization say it is; `None` until
/// both are there.
#[must_use]
pub fn repository(watch: &Watch) -> Option<Repository> {
    let source = watch.git_repositories.get(FLUX_NAMESPACE, FLUX_SOURCE)?.object()?;
    let root = watch.kustomizations.get(FLUX_NAMESPACE, FLUX_SOURCE)?.object()?;
    let path = root.data["spec"]["path"].as_str()?.trim_start_matches("./").trim_matches('/');
    let prefix = path.strip_suffix("cluster")?.trim_end_matches('/');
    Some(Repository {
        url: source.data["spec"]["url"].as_str()?.to_owned(),
        branch: source.data.pointer("/spec/ref/branch")?.as_str()?.to_owned(),
        prefix: prefix.to_owned(),
        secret: source.data.pointer("/spec/secretRef/name").and_then(Value::as_str).map(str::to_owned),
    })
}

/// The Kustomization whose inventory has a StyrminDeployment.
#[must_use]
pub fn applied_by(watch: &Watch, namespace: &str, name: &str) -> Option<DynamicObject> {
    let all = watch.kustomizations.within(FLUX_NAMESPACE);
    all.iter().filter_map(|(_, kept)| kept.object()).find(|found| lists(found, namespace, name))
}

/// Whether Flux applies the file of an object that is going: it was put back, or moved to where another
/// Kustomization applies it.
///
/// Asked of the API server itself. A Kustomization that is about to prune an object still has it in its
/// inventory, so it counts only when it has applied the very revision that its source has now.
///
/// # Errors
/// When the API server cannot be asked.
pub async fn applies_again(client: &Client, watch: &Watch, namespace: &str, name: &str) -> kube::Result<bool> {
    let Some(candidate) = applied_by(watch, namespace, name) else { return Ok(false) };
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), FLUX_NAMESPACE, &watch::kustomization());
    let Some(found) = api.get_opt(&candidate.name_any()).await? else { return Ok(false) };
    let text =
        |object: &DynamicObject, pointer: &str| object.data.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
    let source = text(&found, "/spec/sourceRef/name").unwrap_or_default();
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), FLUX_NAMESPACE, &watch::source("GitRepository"));
    let Some(source) = api.get_opt(&source).await? else { return Ok(false) };
    let ready = found.data.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
    let ready = ready.into_iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
    let applied = text(&found, "/status/lastAppliedRevision");
    Ok(ready
        && applied.is_some()
        && applied == text(&source, "/status/artifact/revision")
        && lists(&found, namespace, name))
}

fn lists(kustomization: &DynamicObject, namespace: &str, name: &str) -> bool {
    let id = format!("{namespace}_{name}_styrmin.io_StyrminDeployment");
    let entries = kustomization.data.pointer("/status/inventory/entries").and_then(Value::as_array);
    entries.into_iter().flatten().any(|entry| entry["id"] == id.as_str())
}

/// The commit that a GitRepository has.
#[must_use]
pub fn fetched(repository: &DynamicObject) -> Option<&str> {
    repository.data.pointer("/status/artifact/revision")?.as_str()
}

/// The commit in a revision of Flux (`main@sha1:<commit>`).
#[must_use]
pub fn commit(revision: &str) -> &str {
    revision.rsplit_once(':').map_or(revision, |(_, commit)| commit)
}

/// Asks Flux to look at an object now.
///
/// # Errors
/// When the API server refuses.
pub async fn nudge(client: &Client, resource: &ApiResource, object: &DynamicObject) -> kube::Result<()> {
    let namespace = object.namespace().unwrap_or_default();
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, resource);
    let patch = json!({
        "apiVersion": resource.api_version, "kind": resource.kind,
        "metadata": { "annotations": { REQUESTED_AT: clock::now().to_string() } },
    });
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    api.patch(&object.name_any(), &parameters, &Patch::Apply(&patch)).await.map(drop)
}
