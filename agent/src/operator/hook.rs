//! One step of a driver's action: started, waited for, ended. Pure.
//!
//! A Job says by itself how it ended, also after a restart. A command that ran in a container when the
//! agent died left no word: it is run again, and the attempt says so; drivers' commands have to bear that.

use super::decide::{AT_ONCE, Action, Observed, Settings};
use super::release::Verdict;
use super::steps::{self, Current};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use std::time::Duration;
use styrmin_renderer::driver::{Driver, format::Step};
use styrmin_renderer::hooks;
use styrmin_renderer::spec::StyrminDeploymentStatus;

/// How much longer than its own limit a step is waited for.
pub(super) const GRACE: u32 = 30;

/// A command in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Execution {
    /// Key of the step.
    pub key: String,
    /// Its attempt.
    pub attempt: u32,
    /// Namespace of the pod.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The container in it.
    pub container: String,
    /// What is run.
    pub command: Vec<String>,
    /// For how long, in seconds.
    pub timeout_seconds: u32,
}

/// What is there of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct HookSeen {
    /// Key of the step.
    pub key: String,
    /// Its attempt.
    pub attempt: u32,
    /// How far it is.
    pub state: HookState,
}

/// How far a step is.
#[derive(Debug, Clone, PartialEq)]
pub enum HookState {
    /// A Job that would begin it.
    Job(Value),
    /// A command that would begin it: everything but key and attempt.
    Command(Execution),
    /// It cannot begin yet.
    NotYet(String),
    /// It never can.
    Impossible(String),
    /// Nothing is known of it.
    Unknown,
    /// It runs.
    Running,
    /// It ended well.
    Succeeded,
    /// It ended otherwise.
    Failed(String),
    /// It ended otherwise for an object of this name that was there before.
    Earlier,
}

/// What comes of a step in one pass.
pub(super) enum Progress {
    /// It has ended well.
    Done,
    /// It is waited for.
    Stay(Stay),
    /// It failed.
    Failed(String),
}

/// What is done while a step is waited for.
#[derive(Default)]
pub(super) struct Stay {
    pub(super) after: Vec<Action>,
    pub(super) again: Option<Duration>,
}

fn stay(seconds: u64) -> Progress {
    Progress::Stay(Stay { after: Vec::new(), again: Some(Duration::from_secs(seconds)) })
}

fn at_once() -> Progress {
    Progress::Stay(Stay { after: Vec::new(), again: AT_ONCE })
}

/// Takes the step on. `release` is what the HelmRelease says, when one is wanted.
pub(super) fn step(
    observed: &Observed<'_>,
    status: &mut StyrminDeploymentStatus,
    current: &Current,
    driver: &Driver,
    release: Option<&Verdict>,
    now: Timestamp,
    settings: &Settings,
) -> Progress {
    let Some((_, step)) = hooks::step(&driver.file.spec, &current.kind) else {
        return Progress::Failed("the driver has no such action any more".into());
    };
    let index = current.index;
    let progress = match step {
        Step::Wait(wait) => {
            steps::run(status, index, now);
            left(status, index, wait.seconds, now).map_or(Progress::Done, |left| {
                Progress::Stay(Stay { after: Vec::new(), again: Some(left + Duration::from_millis(50)) })
            })
        }
        Step::StopComponents(names) => scale(observed, status, index, (names, true), release, now, settings),
        Step::StartComponents(names) => scale(observed, status, index, (names, false), release, now, settings),
        Step::RunJob(run) => ended(observed, status, index, run.timeout_seconds, now),
        Step::Execute(execute) => ended(observed, status, index, execute.timeout_seconds, now),
    };
    if matches!(progress, Progress::Done) {
        steps::succeed(status, index, now);
    }
    progress
}

/// What is left of a time since a step began; `None`: nothing.
fn left(status: &StyrminDeploymentStatus, index: usize, seconds: u32, now: Timestamp) -> Option<Duration> {
    let due = steps::began(status, index)? + SignedDuration::from_secs(seconds.into());
    let left = due.duration_since(now);
    left.is_positive().then(|| Duration::try_from(left).unwrap_or_default())
}

/// Components without pods, or with their pods again: through the release, since Flux would put back
/// anything else. The limit is what Flux takes until it gives up, when each attempt and each rollback takes as long
/// as it may.
fn scale(
    observed: &Observed<'_>,
    status: &mut StyrminDeploymentStatus,
    index: usize,
    (names, stop): (&[String], bool),
    release: Option<&Verdict>,
    now: Timestamp,
    settings: &Settings,
) -> Progress {
    if !steps::has_begun(status, index) {
        steps::run(status, index, now);
        status.stopped_components.retain(|name| !names.contains(name));
        if stop {
            status.stopped_components.extend(names.iter().cloned());
            status.stopped_components.sort();
        }
        return at_once();
    }
    let differs = observed.differing.iter().any(|object| object["kind"] == "HelmRelease");
    if observed.release.is_none() && !differs {
        // Nothing is installed: nothing to stop.
        return Progress::Done;
    }
    let remain = if stop { observed.still_there } else { &[] };
    match release {
        Some(Verdict::Ready) if remain.is_empty() => Progress::Done,
        Some(Verdict::Failed { message, .. } | Verdict::Error { message, .. }) => Progress::Failed(message.clone()),
        seen => {
            let what = if stop { "stopped" } else { "started" };
            let says = match seen {
                Some(Verdict::Progressing(seen)) => seen.complaint().map(str::to_owned),
                Some(_) => Some(format!("still there: pod {}", remain.join(", "))),
                None => None,
            };
            let says = says.map_or_else(String::new, |says| format!(": {says}"));
            let attempts = settings.release.retries.saturating_add(1);
            let limit =
                settings.release.timeout_seconds.saturating_mul(2).saturating_mul(attempts).saturating_add(GRACE);
            let names = names.join(", ");
            if left(status, index, limit, now).is_none() {
                return Progress::Failed(format!("{names} could not be {what} within {limit} s{says}"));
            }
            steps::explain(status, index, &format!("Waiting for {names} to be {what}{says}"));
            stay(5)
        }
    }
}

/// A Job or a command.
fn ended(
    observed: &Observed<'_>,
    status: &mut StyrminDeploymentStatus,
    index: usize,
    limit: u32,
    now: Timestamp,
) -> Progress {
    let (key, attempt) = (status.steps[index].key.clone(), status.steps[index].attempt);
    let seen = observed.hook.filter(|seen| Some(&seen.key) == key.as_ref() && seen.attempt == attempt);
    // The step before it ended in this very pass.
    let Some(seen) = seen else { return at_once() };
    let begin = |action: Action| Progress::Stay(Stay { after: vec![action], again: Some(Duration::from_secs(5)) });
    match &seen.state {
        HookState::Job(job) => {
            steps::run(status, index, now);
            let name = job["metadata"]["name"].as_str().unwrap_or_default();
            if let Some(trouble) = observed.trouble.filter(|trouble| trouble.contains(name)) {
                // It could not be made.
                steps::explain(status, index, trouble);
                if left(status, index, limit, now).is_none() {
                    return Progress::Failed(trouble.to_owned());
                }
            }
            begin(Action::Apply(job.clone()))
        }
        HookState::Earlier => {
            steps::again(status, index, "The Job of an earlier object of this name failed", now);
            at_once()
        }
        HookState::Command(command) => {
            if steps::has_begun(status, index) {
                let message = format!("The agent was restarted while attempt {attempt} ran");
                steps::again(status, index, &message, now);
            }
            steps::run(status, index, now);
            let attempt = status.steps[index].attempt;
            begin(Action::Execute(Execution { key: seen.key.clone(), attempt, ..command.clone() }))
        }
        HookState::NotYet(why) => {
            steps::postpone(status, index, why, now);
            match left(status, index, limit, now) {
                Some(_) => stay(5),
                None => Progress::Failed(why.clone()),
            }
        }
        HookState::Impossible(why) | HookState::Failed(why) => Progress::Failed(why.clone()),
        HookState::Succeeded => Progress::Done,
        HookState::Running | HookState::Unknown => match left(status, index, limit + GRACE, now) {
            Some(left) => Progress::Stay(Stay { after: Vec::new(), again: Some(left.min(Duration::from_secs(30))) }),
            None => Progress::Failed(format!("it did not end within {limit} s")),
        },
    }
}

/// The step of an action that still runs while something newer has arrived, by its name. How one has ended
/// is noted.
pub(super) fn unfinished(
    observed: &Observed<'_>,
    status: &mut StyrminDeploymentStatus,
    now: Timestamp,
) -> Option<String> {
    let (index, key, attempt) = steps::running_hook(status)?;
    let seen = observed.hook.filter(|seen| seen.key == key && seen.attempt == attempt)?;
    match &seen.state {
        HookState::Running => return Some(status.steps[index].name.clone()),
        HookState::Succeeded => steps::succeed(status, index, now),
        HookState::Failed(why) => steps::fail(status, index, why, now),
        _ => return None,
    }
    steps::note_run(status, index);
    None
}
