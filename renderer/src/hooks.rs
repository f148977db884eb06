//! The steps of a driver's actions as Kubernetes sees them.
//!
//! A step is told from every other one by its [`key`]: it follows from what was last applied, so a step
//! that finished stays finished for newer instances that are planned from the same revision. A Job of a
//! step is named by key and attempt, and so is found again after a restart.

use crate::canonical;
use crate::driver::format::{Action, RunJob};
use crate::driver::{Driver, DriverSpec, format::Step};
use crate::layout::MANAGED_BY;
use crate::names::EnvironmentId;
use crate::plan::StepKind;
use crate::spec::{DEPLOYMENT_LABEL, ENVIRONMENT_LABEL, StyrminDeploymentSpec};
use serde_json::{Value, json};

/// Label of a Job of a hook, and of its pods: the action's name.
pub const HOOK_LABEL: &str = "styrmin.io/hook";
/// Annotation of such a Job: the key of its step.
pub const KEY_ANNOTATION: &str = "styrmin.io/step-key";
/// What a borrowed pod template keeps of its container: how it runs, not how it serves.
const KEPT_OF_CONTAINER: [&str; 8] =
    ["env", "envFrom", "image", "imagePullPolicy", "resources", "securityContext", "volumeMounts", "workingDir"];
/// What it keeps of its pod.
const KEPT_OF_POD: [&str; 9] = [
    "affinity",
    "automountServiceAccountToken",
    "imagePullSecrets",
    "nodeSelector",
    "priorityClassName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
    "volumes",
];

/// What tells a step of an action from every other one. `base` names the revision that was last applied.
#[must_use]
pub fn key(base: Option<&str>, driver_digest: &str, kind: &StepKind) -> Option<String> {
    let StepKind::Hook { action, hook, mode, index, run } = kind else { return None };
    let what = json!({
        "action": action, "base": base, "driver": driver_digest, "hook": hook, "index": index, "mode": mode, "run": run,
    });
    Some(canonical::short(&canonical::digest(&what)).to_owned())
}

/// Name of the Job of an attempt.
#[must_use]
pub fn job_name(key: &str, attempt: u32) -> String {
    format!("styrmin-hook-{key}-{attempt}")
}

/// The action and the step that a kind of step names.
#[must_use]
pub fn step<'a>(driver: &'a DriverSpec, kind: &StepKind) -> Option<(&'a Action, &'a Step)> {
    let StepKind::Hook { action, hook, index, .. } = kind else { return None };
    let action = driver.actions.iter().find(|known| known.name == *action && known.hook == *hook)?;
    Some((action, action.steps.get(*index)?))
}

/// Whether a step stops or starts components.
#[must_use]
pub fn scales(driver: &DriverSpec, kind: &StepKind) -> bool {
    matches!(step(driver, kind), Some((_, Step::StopComponents(_) | Step::StartComponents(_))))
}

/// The Job of a `run_job` step. `template` is the pod template of the component's workload, when there is
/// one.
///
/// # Errors
/// When neither the step, the configuration nor a workload names an image.
pub fn job(
    spec: &StyrminDeploymentSpec,
    environment: &EnvironmentId,
    driver: &Driver,
    action: &Action,
    run: &RunJob,
    (key, attempt): (&str, u32),
    template: Option<&Value>,
) -> Result<Value, String> {
    let component = driver.file.spec.components.get(&run.component);
    let main = component.and_then(|component| component.containers.first()).map_or("job", String::as_str);
    let containers = template.and_then(|template| template["spec"]["containers"].as_array());
    let borrowed = containers.and_then(|all| all.iter().find(|one| one["name"] == main).or_else(|| all.first()));
    let mut container = json!({ "name": main });
    for field in KEPT_OF_CONTAINER {
        if let Some(value) = borrowed.and_then(|borrowed| borrowed.get(field)) {
            container[field] = value.clone();
        }
    }
    if let Some(image) = &run.image {
        container["image"] = image.as_str().into();
    } else if let Some(image) = spec.context["components"][&run.component]["image"].as_str() {
        container["image"] = image.into();
    }
    if container["image"].is_null() {
        return Err(format!(
            "Action {} of driver {} runs a job of component {} before the chart is installed, so there is no image \
             to run: name one in the step (run_job.image)",
            action.name,
            driver.name(),
            run.component
        ));
    }
    container["command"] = json!(run.command);
    container["args"] = json!(run.args);
    let mut pod = json!({ "containers": [container], "restartPolicy": "Never" });
    for field in KEPT_OF_POD {
        if let Some(value) = template.and_then(|template| template["spec"].get(field)) {
            pod[field] = value.clone();
        }
    }
    let labels = json!({
        DEPLOYMENT_LABEL: spec.deployment_id,
        ENVIRONMENT_LABEL: environment,
        HOOK_LABEL: action.name,
        MANAGED_BY.0: MANAGED_BY.1,
    });
    Ok(json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "annotations": { KEY_ANNOTATION: key },
            "labels": labels,
            "name": job_name(key, attempt),
            "namespace": spec.deployment_id.object_name(),
        },
        "spec": {
            "activeDeadlineSeconds": run.timeout_seconds,
            // An attempt is ours to make: Kubernetes tries once.
            "backoffLimit": 0,
            "template": { "metadata": { "labels": labels }, "spec": pod },
        },
    }))
}
