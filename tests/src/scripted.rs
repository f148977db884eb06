//! Stand-ins for controllers that always do the same, at once: a helm-controller, the controller of Jobs and
//! the one that empties namespaces.
//!
//! Tests that run a scenario many times need only what the operator sees of these controllers. The real
//! one for namespaces waits five seconds before it begins.

use futures::{StreamExt as _, TryStreamExt as _};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::discovery::ApiResource;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use styrmin_renderer::hooks::HOOK_LABEL;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long a piece of work takes: long enough that a test sees who did not wait for it.
const WORK: Duration = Duration::from_millis(150);
/// Flux's finalizer.
const FINALIZER: &str = "finalizers.fluxcd.io";

/// Namespace and action of each Job of a driver that was run, in order.
type Runs = Arc<Mutex<Vec<(String, String)>>>;

/// Controllers that run; they end with the value.
pub struct Scripted {
    working: watch::Sender<bool>,
    runs: Runs,
    tasks: [JoinHandle<()>; 3],
}

impl Scripted {
    /// Starts them. The client may do everything.
    #[must_use]
    pub fn start(client: &Client) -> Self {
        let working = watch::channel(true).0;
        let gate = working.subscribe();
        let release = async move |client, object| release(client, object, gate.clone()).await;
        let releases = each(client.clone(), ("helm.toolkit.fluxcd.io", "v2", "HelmRelease"), release);
        let namespaces = each(client.clone(), ("", "v1", "Namespace"), namespace);
        let runs = Runs::default();
        let known = Arc::clone(&runs);
        let job = async move |client, object| job(client, object, &known).await;
        let jobs = each(client.clone(), ("batch", "v1", "Job"), job);
        Self { working, runs, tasks: [tokio::spawn(releases), tokio::spawn(namespaces), tokio::spawn(jobs)] }
    }

    /// The actions whose Jobs were run in a namespace, in order.
    #[must_use]
    pub fn runs(&self, namespace: &str) -> Vec<String> {
        let runs = self.runs.lock().unwrap_or_else(PoisonError::into_inner);
        runs.iter().filter(|(of, _)| of == namespace).map(|(_, action)| action.clone()).collect()
    }

    /// Lets the helm-controller work, or not.
    pub fn work(&self, working: bool) {
        self.working.send_replace(working);
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

fn resource((group, version, kind): (&str, &str, &str)) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind))
}

/// Does something about each object that comes or changes. What does not succeed is done with the next
/// event: somebody else was faster, or it is gone.
async fn each(
    client: Client,
    kind: (&str, &str, &str),
    work: impl AsyncFn(Client, DynamicObject) -> kube::Result<()> + Send,
) {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource(kind));
    let events = watcher(api, watcher::Config::default()).default_backoff().applied_objects();
    let mut events = std::pin::pin!(events.map_err(drop));
    while let Some(event) = events.next().await {
        if let Ok(object) = event {
            let _ = work(client.clone(), object).await;
        }
    }
}

/// Every generation of a HelmRelease is installed as asked.
async fn release(client: Client, object: DynamicObject, mut gate: watch::Receiver<bool>) -> kube::Result<()> {
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    let kind = resource(("helm.toolkit.fluxcd.io", "v2", "HelmRelease"));
    let api: Api<DynamicObject> = Api::namespaced_with(client, &namespace, &kind);
    let parameters = PatchParams::default();
    let others: Vec<&String> = object.finalizers().iter().filter(|known| *known != FINALIZER).collect();
    let held = others.len() < object.finalizers().len();
    if object.metadata.deletion_timestamp.is_some() {
        if held {
            tokio::time::sleep(WORK).await;
            let _ = gate.wait_for(|working| *working).await;
            let patch = json!({ "metadata": { "finalizers": others } });
            api.patch(&name, &parameters, &Patch::Merge(&patch)).await?;
        }
        return Ok(());
    }
    if !held {
        let all: Vec<&str> = others.into_iter().map(String::as_str).chain([FINALIZER]).collect();
        api.patch(&name, &parameters, &Patch::Merge(&json!({ "metadata": { "finalizers": all } }))).await?;
    }
    let generation = object.metadata.generation;
    if object.data["status"]["lastAttemptedGeneration"].as_i64() == generation {
        return Ok(());
    }
    tokio::time::sleep(WORK).await;
    let _ = gate.wait_for(|working| *working).await;
    let reason = if generation == Some(1) { "InstallSucceeded" } else { "UpgradeSucceeded" };
    let ready = json!({ "type": "Ready", "status": "True", "reason": reason, "message": "Helm succeeded",
        "observedGeneration": generation, "lastTransitionTime": "2026-01-01T00:00:00Z" });
    // In one write, so that nothing follows the event that says Ready.
    let status =
        json!({ "observedGeneration": generation, "lastAttemptedGeneration": generation, "conditions": [ready] });
    api.patch_status(&name, &parameters, &Patch::Merge(&json!({ "status": status }))).await?;
    Ok(())
}

/// Every Job succeeds.
async fn job(client: Client, object: DynamicObject, runs: &Runs) -> kube::Result<()> {
    let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
    if object.data["status"]["succeeded"] == 1 || object.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    tokio::time::sleep(WORK).await;
    let at = object.metadata.creation_timestamp.map(|at| at.0.to_string());
    let is = |kind: &str| json!({ "type": kind, "status": "True", "lastProbeTime": at, "lastTransitionTime": at });
    let status = json!({ "status": { "startTime": at, "completionTime": at, "succeeded": 1, "ready": 0,
        "conditions": [is("SuccessCriteriaMet"), is("Complete")] } });
    let api: Api<DynamicObject> = Api::namespaced_with(client, &namespace, &resource(("batch", "v1", "Job")));
    api.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await?;
    let action = object.metadata.labels.unwrap_or_default().remove(HOOK_LABEL).unwrap_or_default();
    runs.lock().unwrap_or_else(PoisonError::into_inner).push((namespace, action));
    Ok(())
}

/// A namespace that is going is emptied, and then let go.
async fn namespace(client: Client, object: DynamicObject) -> kube::Result<()> {
    if object.metadata.deletion_timestamp.is_none() {
        return Ok(());
    }
    let name = object.name_any();
    tokio::time::sleep(WORK).await;
    for kind in [
        ("", "v1", "Service"),
        ("networking.k8s.io", "v1", "NetworkPolicy"),
        ("", "v1", "Secret"),
        ("batch", "v1", "Job"),
    ] {
        let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &name, &resource(kind));
        // In the background: otherwise a Job waits for a controller that does not run here.
        api.delete_collection(&DeleteParams::background(), &ListParams::default()).await?;
    }
    // Whoever else holds it holds it still.
    let held: &[String] = object.metadata.finalizers.as_deref().unwrap_or_default();
    let body = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name, "finalizers": held },
        "spec": { "finalizers": [] } });
    let request = http::Request::put(format!("/api/v1/namespaces/{name}/finalize"))
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(body.to_string().into_bytes())
        .map_err(kube::Error::HttpError)?;
    client.request::<Value>(request).await.map(drop)
}
