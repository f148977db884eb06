//! Conditions of a StyrminDeployment. Pure; one is changed only when its content does, so an unchanged
//! status is never written.

use super::release::{Copied, Seen};
use jiff::Timestamp;
use styrmin_renderer::post_render::CONTAINER_NOT_FOUND;
use styrmin_renderer::spec::{Condition, StyrminDeploymentStatus};

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

/// Most bytes of a message: the status has to stay small.
const MESSAGE_MAX: usize = 2048;

/// A message that is not too long.
#[must_use]
pub fn bounded(message: &str) -> String {
    if message.len() <= MESSAGE_MAX {
        return message.to_owned();
    }
    format!("{}…", &message[..message.floor_char_boundary(MESSAGE_MAX)])
}

/// Most bytes of what a Job or a command said.
const SAID_MAX: usize = 1024;

/// The end of what a Job or a command said. Secrets have to be masked before: half of one is none that
/// could be found.
#[must_use]
pub fn last_words(said: &str) -> &str {
    let said = said.trim();
    &said[said.ceil_char_boundary(said.len().saturating_sub(SAID_MAX))..]
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

/// A rollout goes on, or begins: `kinds` of conditions are not known yet.
pub fn on_its_way(status: &mut StyrminDeploymentStatus, kinds: &[&str], generation: Option<i64>, now: Timestamp) {
    status.display_state = Some(DEPLOYING.into());
    for kind in kinds {
        set(status, kind, "Unknown", "Progressing", ON_ITS_WAY, generation, now);
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

/// Notes what is put back, by its names; `true` when one of them was not noted already.
pub fn put_back(
    status: &mut StyrminDeploymentStatus,
    names: &[String],
    message: &str,
    generation: Option<i64>,
    now: Timestamp,
) -> bool {
    let all = |known: &Condition| {
        known.message == bounded(message) || names.iter().all(|name| known.message.contains(name.as_str()))
    };
    if status.conditions.iter().any(|known| known.r#type == DRIFTED && all(known)) {
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
        let since = Some(&copied.since).filter(|since| !since.is_empty());
        // What Flux says of each of its own steps is not worth a write each.
        let works = copied.status == "Unknown" && copied.reason == "Progressing";
        let message = if works { ON_ITS_WAY } else { &copied.message };
        set_since(status, kind, &copied.status, &copied.reason, message, generation, now.to_string());
        // Of a step of its own neither.
        if let (Some(since), false) = (since, works)
            && let Some(known) = status.conditions.iter_mut().find(|known| known.r#type == kind)
        {
            known.last_transition_time.clone_from(since);
        }
    };
    if let Some(ready) = &seen.ready {
        one("HelmReleaseReady", ready);
    }
    match &seen.remediated {
        Some(remediated) => one("HelmReleaseRemediated", remediated),
        None => status.conditions.retain(|condition| condition.r#type != "HelmReleaseRemediated"),
    }
}

/// What conditions say of a rollout that neither ended nor failed.
const ON_ITS_WAY: &str = "The rollout is on its way";

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

/// Notes the overrides that nothing of the chart takes; `true` when that is news.
pub fn missing_components(
    status: &mut StyrminDeploymentStatus,
    message: Option<&str>,
    generation: Option<i64>,
    now: Timestamp,
) -> bool {
    const KIND: &str = "OverridesMissed";
    let Some(message) = message else {
        status.conditions.retain(|condition| condition.r#type != KIND);
        return false;
    };
    let known = status.conditions.iter().any(|known| known.r#type == KIND && known.message == bounded(message));
    set(status, KIND, "True", CONTAINER_NOT_FOUND, message, generation, now);
    !known
}

/// Notes the aliases that the chart's own Services kept away; `true` when that is news.
pub fn collisions(
    status: &mut StyrminDeploymentStatus,
    found: &[String],
    generation: Option<i64>,
    now: Timestamp,
) -> bool {
    const KIND: &str = "AliasCollision";
    if found.is_empty() {
        status.conditions.retain(|condition| condition.r#type != KIND);
        return false;
    }
    let message = found.join("; ");
    let known = status.conditions.iter().any(|known| known.r#type == KIND && known.message == bounded(&message));
    set(status, KIND, "True", "NameTaken", &message, generation, now);
    !known
}
