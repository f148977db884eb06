//! Changes of a StyrminDeployment's status. Pure; a condition or step is changed only when its content
//! does, so an unchanged status is never written.

use super::decide::{Observed, phase};
use super::release::{Copied, Seen};
use jiff::Timestamp;
use styrmin_renderer::driver::Driver;
use styrmin_renderer::plan::{self, Plan, StepKind};
use styrmin_renderer::spec::{Condition, StepStatus, StyrminDeploymentStatus};

/// A rollout is under way.
pub const DEPLOYING: &str = "Deploying";
/// It runs.
pub const RUNNING: &str = "Running";
/// It is kept without pods.
pub const STOPPED: &str = "Stopped";
/// Somebody has to look.
pub const ERROR: &str = "Error";
/// It is being torn down.
pub const DELETING: &str = "Deleting";
/// It is gone.
pub const DELETED: &str = "Deleted";

const PENDING: &str = "Pending";
const RUNS: &str = "Running";
const SUCCEEDED: &str = "Succeeded";
const FAILED: &str = "Failed";

/// Most bytes of a message: the status has to stay small.
const MESSAGE_MAX: usize = 2048;

fn bounded(message: &str) -> String {
    if message.len() <= MESSAGE_MAX {
        return message.to_owned();
    }
    let mut end = MESSAGE_MAX;
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &message[..end])
}

/// Sets a condition. Its transition time moves only with its status.
pub fn set(
    status: &mut StyrminDeploymentStatus,
    kind: &str,
    value: &str,
    reason: &str,
    message: &str,
    generation: Option<i64>,
    now: Timestamp,
) {
    set_since(status, kind, value, reason, message, generation, now.to_string());
}

fn set_since(
    status: &mut StyrminDeploymentStatus,
    kind: &str,
    value: &str,
    reason: &str,
    message: &str,
    generation: Option<i64>,
    since: String,
) {
    let known = status.conditions.iter_mut().find(|condition| condition.r#type == kind);
    let last_transition_time = match &known {
        Some(known) if known.status == value => known.last_transition_time.clone(),
        _ => since,
    };
    let condition = Condition {
        r#type: kind.into(),
        status: value.into(),
        reason: reason.into(),
        message: bounded(message),
        last_transition_time,
        observed_generation: generation,
    };
    match known {
        Some(known) => *known = condition,
        None => status.conditions.push(condition),
    }
}

/// Gives every condition whose status is what it was the time that it had.
pub fn keep_times(status: &mut StyrminDeploymentStatus, before: &StyrminDeploymentStatus) {
    for condition in &mut status.conditions {
        let same = |known: &&Condition| known.r#type == condition.r#type && known.status == condition.status;
        if let Some(known) = before.conditions.iter().find(same)
            // What is copied from Flux brings its own time.
            && !condition.r#type.starts_with("HelmRelease")
        {
            condition.last_transition_time.clone_from(&known.last_transition_time);
        }
    }
}

const DRIFTED: &str = "Drifted";

/// Notes what is put back; `true` when it was not noted already.
pub fn put_back(status: &mut StyrminDeploymentStatus, message: &str, generation: Option<i64>, now: Timestamp) -> bool {
    let noted = |known: &Condition| known.r#type == DRIFTED && known.message == message;
    if status.conditions.iter().any(noted) {
        return false;
    }
    set(status, DRIFTED, "True", "DriftCorrected", message, generation, now);
    true
}

/// Everything is as it should be.
pub fn nothing_to_put_back(status: &mut StyrminDeploymentStatus) {
    status.conditions.retain(|condition| condition.r#type != DRIFTED);
}

/// Copies what Flux says.
pub fn copy(status: &mut StyrminDeploymentStatus, seen: &Seen, generation: Option<i64>, now: Timestamp) {
    let mut one = |kind: &str, copied: &Copied| {
        let since = if copied.since.is_empty() { now.to_string() } else { copied.since.clone() };
        set_since(status, kind, &copied.status, &copied.reason, &copied.message, generation, since);
    };
    if let Some(ready) = &seen.ready {
        one("HelmReleaseReady", ready);
    }
    match &seen.remediated {
        Some(remediated) => one("HelmReleaseRemediated", remediated),
        None => status.conditions.retain(|condition| condition.r#type != "HelmReleaseRemediated"),
    }
}

/// Notes drift that Flux puts back; `true` when this one was not noted before.
pub fn drifted(status: &mut StyrminDeploymentStatus, found: &Copied, generation: Option<i64>) -> bool {
    const KIND: &str = "HelmReleaseDrifted";
    let known = status.conditions.iter().any(|known| known.r#type == KIND && known.last_transition_time == found.since);
    if !known {
        status.conditions.retain(|condition| condition.r#type != KIND);
        set_since(status, KIND, "True", &found.reason, &found.message, generation, found.since.clone());
    }
    !known
}

/// The steps of a plan, the first begun.
#[must_use]
pub fn steps(plan: &Plan, now: Timestamp) -> Vec<StepStatus> {
    let begin = |(index, step): (usize, &plan::PlanStep)| StepStatus {
        name: step.name.clone(),
        state: if index == 0 { RUNS } else { PENDING }.into(),
        attempt: 1,
        started_at: (index == 0).then(|| now.to_string()),
        ended_at: None,
        message: None,
    };
    plan.steps.iter().enumerate().map(begin).collect()
}

/// What is known of the steps while the driver, which decides them, is not there.
#[must_use]
pub fn waiting_steps(now: Timestamp) -> Vec<StepStatus> {
    vec![StepStatus { name: plan::PREREQUISITES.into(), ..teardown_steps(now).remove(0) }]
}

/// The steps of a teardown.
#[must_use]
pub fn teardown_steps(now: Timestamp) -> Vec<StepStatus> {
    vec![StepStatus {
        name: plan::TEARDOWN.into(),
        state: RUNS.into(),
        attempt: 1,
        started_at: Some(now.to_string()),
        ended_at: None,
        message: None,
    }]
}

fn find<'a>(status: &'a mut StyrminDeploymentStatus, kind: &StepKind) -> Option<&'a mut StepStatus> {
    let name = plan::step_name(kind)?;
    status.steps.iter_mut().find(|step| step.name == name)
}

/// A step runs, unless it has begun before.
pub fn run(status: &mut StyrminDeploymentStatus, kind: &StepKind, now: Timestamp) {
    if let Some(step) = find(status, kind).filter(|step| step.state == PENDING) {
        step.state = RUNS.into();
        step.started_at = Some(now.to_string());
    }
}

/// A step ended well.
pub fn finish(status: &mut StyrminDeploymentStatus, kind: &StepKind, now: Timestamp) {
    if let Some(step) = find(status, kind) {
        succeed(step, now);
    }
}

/// Every step ended well.
pub fn finish_all(status: &mut StyrminDeploymentStatus, now: Timestamp) {
    for step in &mut status.steps {
        succeed(step, now);
    }
}

fn succeed(step: &mut StepStatus, now: Timestamp) {
    if step.state != SUCCEEDED {
        step.started_at.get_or_insert_with(|| now.to_string());
        step.state = SUCCEEDED.into();
        step.ended_at = Some(now.to_string());
        step.message = None;
    }
}

/// Says why a running step waits.
pub fn explain(status: &mut StyrminDeploymentStatus, kind: &StepKind, why: &str) {
    if let Some(step) = find(status, kind).filter(|step| step.state == RUNS) {
        step.message = Some(bounded(why));
    }
}

/// The first step that has not ended well failed.
pub fn fail_first(status: &mut StyrminDeploymentStatus, why: &str, now: Timestamp) {
    let Some(step) = status.steps.iter_mut().find(|step| step.state != SUCCEEDED) else { return };
    step.message = Some(bounded(why));
    if step.state != FAILED {
        step.started_at.get_or_insert_with(|| now.to_string());
        step.state = FAILED.into();
        step.ended_at = Some(now.to_string());
    }
}

/// Names the first action of the driver that this rollout would have to run.
#[must_use]
pub fn unfinished_hook(status: &StyrminDeploymentStatus, driver: &Driver, observed: &Observed<'_>) -> Option<String> {
    if status.phase.as_deref() == Some(phase::READY) {
        return None;
    }
    let plan = plan::plan(observed.applied, Some(&observed.object.spec), &driver.file.spec);
    plan.steps.iter().find_map(|step| match &step.kind {
        StepKind::Hook { action, .. } => Some(format!(
            "Driver {} asks to run action {action}, which this agent cannot do yet: use a driver version without \
             actions for this change, or a newer agent",
            driver.name()
        )),
        _ => None,
    })
}
