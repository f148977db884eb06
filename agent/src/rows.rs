//! What a report says of an object: one row of it. Pure.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};
use styrmin_renderer::spec::StyrminDeployment;

/// Longest message of a pod or object, in characters.
const MESSAGE_MAX: usize = 1000;

fn short(text: &str) -> String {
    text.chars().take(MESSAGE_MAX).collect()
}

/// A pod, without its deployment.
#[must_use]
pub fn pod(pod: &Pod) -> Value {
    let status = pod.status.clone().unwrap_or_default();
    let containers: Vec<ContainerStatus> = status
        .init_container_statuses
        .into_iter()
        .flatten()
        .chain(status.container_statuses.into_iter().flatten())
        .collect();
    let ready = says_ready(pod);
    let phase =
        if pod.metadata.deletion_timestamp.is_some() { "Terminating".into() } else { status.phase.unwrap_or_default() };
    json!({
        "namespace": pod.namespace(),
        "name": pod.name_any(),
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

/// Whether a pod's condition says that it is ready.
#[must_use]
pub fn says_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
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

/// A StyrminDeployment.
#[must_use]
pub fn deployment(object: &StyrminDeployment) -> Value {
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
        "finishedJobs": status.finished_jobs,
        "failedJobs": status.failed_jobs,
    })
}

/// A GitRepository or Kustomization.
#[must_use]
pub fn flux_status(kind: &str, object: &DynamicObject) -> Value {
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
