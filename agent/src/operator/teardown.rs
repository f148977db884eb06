//! The end of a deployment: the object is going, or says that it should. Pure.
//!
//! The application goes only with a reason. Then the driver's actions come first, the release and what
//! it was made of next, the namespace last. An action that fails holds the teardown, and is tried again
//! with growing pauses, until it succeeds or somebody says `force`.

use super::decide::{
    self, AT_ONCE, Action, Decision, DriverSeen, Observed, Settings, driver_missing, note, phase, warning,
};
use super::hook::{self, Progress};
use super::{release, status, steps};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use std::time::Duration;
use styrmin_renderer::plan::{self, Plan, PlanStep, StepKind, Workflow};
use styrmin_renderer::spec::{Condition, StyrminDeploymentStatus};

/// Longest pause before another attempt of an action, in seconds.
const LONGEST_PAUSE: u32 = 600;

pub(super) fn decide(
    observed: &Observed<'_>,
    mut status: StyrminDeploymentStatus,
    now: Timestamp,
    settings: &Settings,
) -> Decision {
    let metadata = &observed.object.metadata;
    let generation = metadata.generation;
    let going = metadata.deletion_timestamp.is_some();
    let held = metadata.finalizers.iter().flatten().any(|name| name == super::FINALIZER);
    if going && !held {
        // Somebody else's finalizer holds it; ours has done its work, or never came to it.
        return Decision { status, ..Decision::default() };
    }
    let latched = status.latched.clone().unwrap_or_default();
    let means_this = |said: &Option<String>| said.is_some() && *said == metadata.uid;
    if going && means_this(&latched.skip_teardown) && !begun(&status) {
        let notes = vec![note("TeardownSkipped", format!("{} is set: the application stays", super::SKIP_TEARDOWN))];
        return Decision { status, after: vec![Action::RemoveFinalizer], notes, ..Decision::default() };
    }
    if going && observed.restored && status.phase.as_deref() != Some(phase::DELETED) && !begun(&status) {
        if let Some(step) = hook::unfinished(observed, &mut status, now) {
            // The object that comes in its place would not find a command that runs.
            status.message = Some(format!("The file is in Git again; it waits until the step \"{step}\" has ended"));
            return Decision { status, again: Some(Duration::from_secs(5)), ..Decision::default() };
        }
        let notes = vec![note("Restored", "The file is in Git again; the application was not touched".into())];
        let after = vec![Action::RemoveFinalizer, Action::ReapplyFolder];
        return Decision { status, after, notes, ..Decision::default() };
    }
    let by_annotation =
        means_this(&latched.confirm_delete).then(|| format!("confirmed by the annotation {}", super::CONFIRM_DELETE));
    let confirmed = observed.confirmed.map(str::to_owned).or(by_annotation);
    let Some(reason) = confirmed.or_else(|| begun(&status).then(String::new)) else {
        return not_confirmed(observed, status, now);
    };
    if !begun(&status) {
        if let Some(step) = hook::unfinished(observed, &mut status, now) {
            status.message = Some(format!("The teardown waits until the step \"{step}\" has ended"));
            return Decision { status, again: Some(Duration::from_secs(5)), ..Decision::default() };
        }
        // Noted before anything is removed: a teardown that has begun goes on, whatever is said later.
        status.phase = Some(phase::DELETING.into());
        status.display_state = Some(status::DELETING.into());
        status.message = Some(format!("Removing the application: {reason}"));
        status::set(&mut status, "Ready", "False", "Deleting", &reason, generation, now);
        status.steps = Vec::new();
        let notes = vec![note("TeardownStarted", reason)];
        return Decision { status, notes, again: AT_ONCE, ..Decision::default() };
    }
    let forced = means_this(&latched.force_delete);
    let Some(plan) = plan_of(observed, &status, forced) else {
        let message = format!(
            "{}; its actions come before a teardown (the annotation {} skips them)",
            driver_missing(observed),
            super::FORCE_DELETE
        );
        status.message = Some(message);
        return Decision { status, again: Some(Duration::from_secs(5)), ..Decision::default() };
    };
    if status.steps.is_empty() {
        steps::begin(&mut status, &plan, observed.base(), now);
    }
    if forced {
        steps::skip_hooks(&mut status, now);
    }
    actions(observed, &plan, status, now, settings)
}

/// The driver's actions, then the teardown itself.
fn actions(
    observed: &Observed<'_>,
    plan: &Plan,
    mut status: StyrminDeploymentStatus,
    now: Timestamp,
    settings: &Settings,
) -> Decision {
    let changed: Vec<Action> = observed.differing.iter().cloned().map(Action::Apply).collect();
    // What it says counts only when it is as an action wants it.
    let found = observed.release.filter(|_| changed.is_empty() && observed.going.is_empty());
    let verdict = found.map(|found| release::judge(found, None, settings.release.retries));
    loop {
        let current = match steps::current(&status, plan, observed.base()) {
            Ok(Some(current)) => current,
            Ok(None) => return remove(observed, status, None, now),
            // What was applied is gone already, and with it the base of the keys: only the rest is left.
            Err(_) if observed.applied.is_none() => {
                steps::skip_hooks(&mut status, now);
                continue;
            }
            // The plan is another one than when the steps were noted.
            Err(_) => {
                steps::begin(&mut status, plan, observed.base(), now);
                return Decision { status, again: AT_ONCE, ..Decision::default() };
            }
        };
        let (DriverSeen::Here(driver), StepKind::Hook { .. }) = (observed.driver, &current.kind) else {
            steps::run(&mut status, current.index, now);
            return remove(observed, status, Some(current.index), now);
        };
        if steps::has_failed(&status, current.index) {
            let attempt = status.steps[current.index].attempt;
            let pause = settings.retry_delay.saturating_mul(1 << (attempt - 1).min(10)).min(LONGEST_PAUSE);
            let due = steps::ended(&status, current.index).unwrap_or(now) + SignedDuration::from_secs(pause.into());
            if now < due {
                let left = Duration::try_from(due.duration_since(now)).unwrap_or_default();
                return Decision { status, again: Some(left + Duration::from_millis(50)), ..Decision::default() };
            }
            let message = format!("Attempt {attempt} failed");
            steps::again(&mut status, current.index, &message, now);
            return Decision { status, again: AT_ONCE, ..Decision::default() };
        }
        match hook::step(observed, &mut status, &current, driver, verdict.as_ref(), now, settings) {
            Progress::Done => {}
            Progress::Stay(stay) => {
                refused(&mut status, observed.trouble);
                let mut after = changed;
                after.extend(stay.after);
                return Decision { status, after, again: stay.again, ..Decision::default() };
            }
            Progress::Failed(why) => {
                steps::fail(&mut status, current.index, &why, now);
                status.display_state = Some(status::ERROR.into());
                status.message = Some(format!("An action before the teardown failed, and is tried again: {why}"));
                let notes = vec![warning("HookFailed", why)];
                return Decision { status, notes, again: AT_ONCE, ..Decision::default() };
            }
        }
    }
}

/// Begins what is said of an action that the API server refuses.
const REFUSED: &str = "An action before the teardown is refused";

/// Says what is refused while an action is waited for, until it is not.
fn refused(status: &mut StyrminDeploymentStatus, trouble: Option<&str>) {
    if let Some(trouble) = trouble {
        status.message = Some(format!("{REFUSED}: {trouble}"));
        status.display_state = Some(status::ERROR.into());
    } else if status.message.as_ref().is_some_and(|message| message.starts_with(REFUSED)) {
        status.message = None;
        status.display_state = Some(status::DELETING.into());
    }
}

/// Removes what is left, one object after the other.
fn remove(
    observed: &Observed<'_>,
    mut status: StyrminDeploymentStatus,
    index: Option<usize>,
    now: Timestamp,
) -> Decision {
    let going = observed.object.metadata.deletion_timestamp.is_some();
    // The record of it goes with the rest.
    status.applied_digest = None;
    if let Some(next) = observed.leftovers.first() {
        let why = observed.release.filter(|_| next.object.kind == "HelmRelease").and_then(release::uninstall_failed);
        let why = why.as_deref().or(observed.trouble);
        let told = why.map_or_else(String::new, |why| format!(": {why}"));
        let message = format!("Waiting for {} to go{told}", next.name);
        let display = if why.is_some() { status::ERROR } else { status::DELETING };
        status.display_state = Some(display.into());
        status.message = Some(message.clone());
        if let Some(index) = index {
            steps::explain(&mut status, index, &message);
        }
        let is_suspended = |found: &&Value| next.object.kind == "HelmRelease" && found["spec"]["suspend"] == true;
        let after = match next.going {
            true => Vec::new(),
            // Flux would let it go without uninstalling anything: what the chart has outside the namespace would stay.
            false if observed.release.filter(is_suspended).is_some() => vec![Action::Resume(next.object.clone())],
            false => vec![Action::Delete(next.object.clone())],
        };
        // Watches show the end of most things; what takes long is asked for less and less often.
        let began = status.steps.iter().filter_map(|step| step.started_at.as_deref()?.parse().ok()).max();
        let taken = began.map_or(0, |began: Timestamp| now.duration_since(began).as_secs());
        let again = Duration::from_secs(u64::try_from(taken / 8).unwrap_or_default().clamp(2, 30));
        return Decision { status, after, again: Some(again), ..Decision::default() };
    }
    status.phase = Some(phase::DELETED.into());
    status.display_state = Some(status::DELETED.into());
    status.message = None;
    steps::succeed_all(&mut status, now);
    let mut after = Vec::new();
    if going {
        after.push(Action::RemoveFinalizer);
    }
    if going && observed.restored {
        // The file came back while this ran: Flux says "applied" of an object that is gone now.
        after.push(Action::ReapplyFolder);
    }
    Decision { status, after, ..Decision::default() }
}

/// The application keeps running as it was last acted on: what an action has stopped is started again, and what
/// somebody changes is put back.
fn not_confirmed(observed: &Observed<'_>, mut status: StyrminDeploymentStatus, now: Timestamp) -> Decision {
    let generation = observed.object.metadata.generation;
    let acted_on = status.spec_digest.as_deref() == Some(observed.object.spec.digest().as_str());
    let mut notes = Vec::new();
    let (after, again) = if !acted_on {
        (Vec::new(), None)
    } else if hook::unfinished(observed, &mut status, now).is_some() {
        (Vec::new(), Some(Duration::from_secs(5)))
    } else if !status.stopped_components.is_empty() {
        status.stopped_components.clear();
        (Vec::new(), AT_ONCE)
    } else {
        let renewed = observed.wanted.is_ok_and(|wanted| decide::is_renewed(&status, wanted));
        if status.applied_digest == status.spec_digest && observed.recorded && !renewed {
            decide::put_back(observed, &mut status, &mut notes, now);
        }
        (decide::puts_back(observed), None)
    };
    let message = "The file left Git, and nobody asked for a deletion: the application keeps running until the \
                   deletion is confirmed or the file is put back";
    let news = !has(&status, "NotConfirmed");
    status.phase = Some(phase::DELETING.into());
    status.message =
        Some(observed.trouble.map_or_else(|| message.to_owned(), |trouble| format!("{message}; {trouble}")));
    status::set(&mut status, "Ready", "Unknown", "NotConfirmed", message, generation, now);
    if news {
        notes.push(warning("NotConfirmed", message.to_owned()));
    }
    Decision { status, notes, after, again, ..Decision::default() }
}

/// The plan of the end; `None` while the driver, which knows the actions, is not there. What was never
/// applied with success has nothing that an action could save.
fn plan_of(observed: &Observed<'_>, status: &StyrminDeploymentStatus, forced: bool) -> Option<Plan> {
    let only = || Plan {
        workflow: Workflow::Delete,
        steps: vec![PlanStep { name: plan::TEARDOWN.into(), kind: StepKind::Teardown }],
    };
    let was_applied = observed.object.status.as_ref().is_some_and(|status| status.applied_digest.is_some());
    match observed.driver {
        _ if observed.applied.is_none() && !was_applied => Some(only()),
        // What is left to do needs no driver any more.
        _ if !before_removal(status) => Some(only()),
        DriverSeen::Here(driver) => Some(plan::plan(observed.applied, None, &driver.file.spec.actions)),
        _ => forced.then(only),
    }
}

fn has(status: &StyrminDeploymentStatus, reason: &str) -> bool {
    status.conditions.iter().any(|condition: &Condition| condition.r#type == "Ready" && condition.reason == reason)
}

/// A teardown has begun.
pub(super) fn begun(status: &StyrminDeploymentStatus) -> bool {
    has(status, "Deleting")
}

/// An end has begun, was waited for or is over.
pub(super) fn left(status: &StyrminDeploymentStatus) -> bool {
    [Some(phase::DELETING), Some(phase::DELETED)].contains(&status.phase.as_deref()) || begun(status)
}

/// Whether actions are still to be run before a teardown removes anything.
pub(super) fn before_removal(status: &StyrminDeploymentStatus) -> bool {
    status.steps.is_empty() || steps::hook_is_left(status)
}
