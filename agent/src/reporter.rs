//! The reporter: whole snapshots of the cluster's state to the server. It writes nothing in the cluster
//! but the request that Flux looks now.
//!
//! A snapshot is made from stores that are replaced as a whole, after every first list was complete: it
//! is never built from half of one. It goes out every few seconds, or soon after something changed;
//! what did not change is sent again only now and then, so a quiet cluster costs one small report.

use crate::flux;
use crate::server::{self, Server};
use crate::settings::Settings;
use crate::watch::{self, Changed, Watch};
use k8s_openapi::api::core::v1::{ContainerStatus, Namespace, Pod};
use kube::api::{Api, DynamicObject};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use styrmin_renderer::canonical;
use styrmin_renderer::layout::FLUX_NAMESPACE;
use styrmin_renderer::spec::{DEPLOYMENT_LABEL, StyrminDeployment};
use tokio::sync::broadcast;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// How soon a change is reported: several that come together go in one report.
const SOON: Duration = Duration::from_millis(500);
/// How often what did not change is sent again.
const WHOLE: Duration = Duration::from_secs(60);
/// How long one round of reports may take.
const REPORT_LIMIT: Duration = Duration::from_secs(180);
/// Longest pause after reports that failed.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Longest message of a pod or object, in characters.
const MESSAGE_MAX: usize = 1000;

const PODS: &str = "mutation($agent: AgentInput!, $items: [PodStatusInput!]!) { report: reportPodStatuses(agent: $agent, pods: $items) { newestRevision confirmedDeletions { deploymentId uid } } }";
const DEPLOYMENTS: &str = "mutation($agent: AgentInput!, $items: [DeploymentStatusInput!]!) { report: reportDeploymentStatuses(agent: $agent, deployments: $items) { newestRevision confirmedDeletions { deploymentId uid } } }";
const FLUX: &str = "mutation($agent: AgentInput!, $items: [FluxStatusInput!]!) { report: reportFluxStatuses(agent: $agent, statuses: $items) { newestRevision confirmedDeletions { deploymentId uid } } }";

/// Reports until `stop`.
pub async fn run(client: Client, watch: Arc<Watch>, server: Arc<Server>, settings: Settings, stop: CancellationToken) {
    let mut reporter = Reporter { client, watch, server, cluster: None, sent: HashMap::new(), nudged: HashMap::new() };
    let interval = Duration::from_secs(settings.report_interval.into());
    let mut changes = reporter.watch.changes();
    let mut pause = Duration::ZERO;
    loop {
        let next = tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval.max(pause)) => None,
            change = changed(&mut changes), if pause.is_zero() => Some(change),
        };
        if next.is_some() {
            tokio::time::sleep(SOON).await;
            while changes.try_recv().is_ok() {}
        }
        let report = tokio::time::timeout(REPORT_LIMIT, reporter.report()).await;
        pause = match report.unwrap_or_else(|_| Err(anyhow::anyhow!("not within {} s", REPORT_LIMIT.as_secs()))) {
            Ok(()) => Duration::ZERO,
            Err(error) if server::is_stale(&error) => {
                warn!(error = format!("{error:#}"), "the server hears another agent; this one ends");
                stop.cancel();
                return;
            }
            Err(error) => {
                let pause = (pause * 2).clamp(Duration::from_secs(1), PAUSE_MAX);
                warn!(error = format!("{error:#}"), retry_in_s = pause.as_secs(), "a report failed");
                reporter.sent.clear();
                pause
            }
        };
    }
}

/// A change that a report shows.
async fn changed(changes: &mut broadcast::Receiver<Changed>) {
    while let Err(broadcast::error::RecvError::Closed) = changes.recv().await {
        std::future::pending::<()>().await;
    }
}

struct Reporter {
    client: Client,
    watch: Arc<Watch>,
    server: Arc<Server>,
    /// UID of the kube-system namespace.
    cluster: Option<String>,
    /// Digest of what was sent last of each kind, and when.
    sent: HashMap<&'static str, (String, Instant)>,
    /// The revision that Flux was asked to fetch last, by source, and when.
    nudged: HashMap<String, (String, Instant)>,
}

impl Reporter {
    async fn report(&mut self) -> anyhow::Result<()> {
        let cluster = match &self.cluster {
            Some(cluster) => cluster.clone(),
            None => {
                let api: Api<Namespace> = Api::all(self.client.clone());
                let uid = api.get("kube-system").await?.metadata.uid.unwrap_or_default();
                self.cluster = Some(uid.clone());
                uid
            }
        };
        let (mut confirmations, mut failure) = (false, None);
        // Pods first: a failed step names the pods that the server knows.
        for (mutation, items, always) in [
            (PODS, pods(&self.watch), false),
            (DEPLOYMENTS, deployments(&self.watch), false),
            (FLUX, flux_statuses(&self.watch), true),
        ] {
            let digest = canonical::digest(&Value::Array(items.clone()));
            let known = self.sent.get(mutation);
            let unchanged = known.is_some_and(|(sent, at)| *sent == digest && at.elapsed() < WHOLE);
            if unchanged && !always {
                continue;
            }
            // One kind that cannot be sent must not silence the others.
            match self.server.report(mutation, &cluster, items).await {
                Ok(changed) => {
                    confirmations |= changed;
                    self.sent.insert(mutation, (digest, Instant::now()));
                }
                Err(error) if server::is_stale(&error) => return Err(error),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if confirmations {
            // A confirmed deletion is a reason to look again.
            self.watch.tell(Changed::Everything);
        }
        self.nudge().await;
        failure.map_or(Ok(()), Err)
    }

    /// Asks Flux to fetch for every source of ours that does not have the newest commit that we pushed.
    async fn nudge(&mut self) {
        let Some(newest) = self.server.answer().newest_revision.clone() else { return };
        let resource = watch::source("GitRepository");
        for object in self.watch.git_repositories.state() {
            let has = flux::fetched(&object).map(flux::commit) == Some(newest.as_str());
            let name = format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any());
            let asked = |(revision, at): &(String, Instant)| *revision == newest && at.elapsed() < WHOLE;
            if has || self.nudged.get(&name).is_some_and(asked) {
                continue;
            }
            info!(source = name, revision = newest, "asking Flux to fetch");
            if let Err(error) = flux::nudge(&self.client, &resource, &object).await {
                warn!(%error, source = name, "Flux could not be asked to fetch");
            }
            self.nudged.insert(name, (newest.clone(), Instant::now()));
        }
    }
}

fn short(text: &str) -> String {
    text.chars().take(MESSAGE_MAX).collect()
}

/// The pods of applications.
fn pods(watch: &Watch) -> Vec<Value> {
    let applications: HashMap<String, String> = watch
        .namespaces
        .state()
        .iter()
        .filter_map(|namespace| Some((namespace.name_any(), namespace.labels().get(DEPLOYMENT_LABEL)?.clone())))
        .collect();
    let mut found: Vec<(String, Value)> = watch
        .pods
        .state()
        .iter()
        .filter_map(|pod| {
            let deployment = applications.get(pod.metadata.namespace.as_deref()?)?;
            Some((format!("{}/{}", pod.namespace()?, pod.name_any()), self::pod(pod, deployment)))
        })
        .collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found.into_iter().map(|(_, pod)| pod).collect()
}

fn pod(pod: &Pod, deployment: &str) -> Value {
    let status = pod.status.clone().unwrap_or_default();
    let containers: Vec<ContainerStatus> = status
        .init_container_statuses
        .into_iter()
        .flatten()
        .chain(status.container_statuses.into_iter().flatten())
        .collect();
    let ready =
        status.conditions.iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let phase =
        if pod.metadata.deletion_timestamp.is_some() { "Terminating".into() } else { status.phase.unwrap_or_default() };
    json!({
        "namespace": pod.namespace(),
        "name": pod.name_any(),
        "deploymentId": deployment,
        "component": pod.labels().get("app.kubernetes.io/component"),
        "phase": phase,
        "ready": ready,
        "restarts": containers.iter().map(|container| container.restart_count).sum::<i32>(),
        "reason": status.reason,
        "message": status.message.as_deref().map(short),
        "node": pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
        "containers": containers.iter().map(container).collect::<Vec<_>>(),
    })
}

fn container(container: &ContainerStatus) -> Value {
    let state = container.state.clone().unwrap_or_default();
    let last = container.last_state.clone().unwrap_or_default().terminated;
    let (name, reason, message, code) = if let Some(waiting) = state.waiting {
        ("waiting", waiting.reason, waiting.message, last.as_ref().map(|last| last.exit_code))
    } else if let Some(ended) = state.terminated {
        ("terminated", ended.reason, ended.message, Some(ended.exit_code))
    } else {
        ("running", None, None, None)
    };
    // Why it ended last says more than that it is started again.
    let reason = match (reason, last) {
        (Some(reason), Some(last)) if reason == "CrashLoopBackOff" && last.reason.as_deref() == Some("OOMKilled") => {
            last.reason
        }
        (reason, _) => reason,
    };
    json!({
        "name": container.name,
        "image": container.image,
        "ready": container.ready,
        "restarts": container.restart_count,
        "state": name,
        "reason": reason,
        "message": message.as_deref().map(short),
        "exitCode": code,
    })
}

fn deployments(watch: &Watch) -> Vec<Value> {
    let mut found: Vec<Arc<StyrminDeployment>> = watch.deployments.state();
    found.sort_by_key(|object| (object.namespace(), object.name_any()));
    found.iter().map(|object| deployment(object)).collect()
}

fn deployment(object: &StyrminDeployment) -> Value {
    let status = object.status.clone().unwrap_or_default();
    // An object that no operator has come to yet says itself what it is about.
    let instance = status.instance_id.clone().unwrap_or_else(|| object.spec.instance_id.clone());
    let conditions: Vec<Value> = status
        .conditions
        .iter()
        .map(|condition| {
            json!({ "type": condition.r#type, "status": condition.status, "reason": condition.reason,
                "message": short(&condition.message), "lastTransitionTime": condition.last_transition_time })
        })
        .collect();
    let steps: Vec<Value> = status
        .steps
        .iter()
        .map(|step| {
            json!({ "name": step.name, "state": step.state, "attempt": step.attempt, "startedAt": step.started_at,
                "endedAt": step.ended_at, "message": step.message.as_deref().map(short) })
        })
        .collect();
    json!({
        "deploymentId": object.spec.deployment_id,
        "uid": object.uid(),
        "namespace": object.namespace(),
        "name": object.name_any(),
        "instanceId": instance,
        "phase": status.phase,
        "displayState": status.display_state,
        "message": status.message.as_deref().map(short),
        "specDigest": status.spec_digest,
        "observedGeneration": status.observed_generation,
        "generation": object.metadata.generation,
        "deleting": object.metadata.deletion_timestamp.is_some(),
        "driftCorrections": status.drift_corrections,
        "conditions": conditions,
        "steps": steps,
    })
}

fn flux_statuses(watch: &Watch) -> Vec<Value> {
    let git =
        watch.git_repositories.state_filter(|object| object.metadata.namespace.as_deref() == Some(FLUX_NAMESPACE));
    let mut found: Vec<Value> = git.iter().map(|object| flux_status("GitRepository", object)).collect();
    found.extend(watch.kustomizations.state().iter().map(|object| flux_status("Kustomization", object)));
    found.sort_by_key(|one| format!("{}/{}", one["kind"], one["name"]));
    found
}

fn flux_status(kind: &str, object: &DynamicObject) -> Value {
    let status = &object.data["status"];
    let ready = status["conditions"].as_array().into_iter().flatten().find(|condition| condition["type"] == "Ready");
    let of = |name: &str| ready.and_then(|ready| ready[name].as_str());
    let revision = status.pointer("/artifact/revision").or(status.get("lastAppliedRevision"));
    json!({
        "kind": kind,
        "namespace": object.namespace(),
        "name": object.name_any(),
        "ready": of("status").unwrap_or("Unknown"),
        "reason": of("reason"),
        "message": of("message").map(short),
        "revision": revision.and_then(Value::as_str),
        "attemptedRevision": status["lastAttemptedRevision"].as_str(),
        "suspended": object.data["spec"]["suspend"].as_bool().unwrap_or_default(),
    })
}
