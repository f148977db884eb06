//! The steps of a rollout or teardown: which there are, which comes next, how each ends. Pure.
//!
//! `status.steps` follows the plan that was made when a spec was first acted on. A step of a driver's
//! action carries a key; one that ended well under its key stays so in every later plan.

use super::decide::phase;
use super::status::bounded;
use jiff::{SignedDuration, Timestamp};
use styrmin_renderer::driver::format::Mode;
use styrmin_renderer::hooks;
use styrmin_renderer::plan::{self, Plan, StepKind};
use styrmin_renderer::spec::{StepStatus, StyrminDeploymentStatus};

const PENDING: &str = "Pending";
const RUNS: &str = "Running";
const SUCCEEDED: &str = "Succeeded";
const FAILED: &str = "Failed";
const SKIPPED: &str = "Skipped";

/// Most steps that are remembered of earlier plans; the newest are first.
const EARLIER: usize = 32;

/// What the keys of a plan's steps follow from.
#[derive(Debug, Clone, Copy)]
pub struct Base<'a> {
    /// Name of the revision that was last applied.
    pub revision: Option<&'a str>,
    /// Digest of the driver whose actions are run.
    pub driver: &'a str,
}

impl<'a> Base<'a> {
    /// After `revision`; with its record gone, after what the status says was applied: two rollouts from something
    /// unknown are two, when something was applied between them.
    #[must_use]
    pub fn of(revision: Option<&'a str>, status: Option<&'a StyrminDeploymentStatus>, driver: &'a str) -> Self {
        Self { revision: revision.or(status.and_then(|status| status.applied_digest.as_deref())), driver }
    }
}

fn step(name: &str, key: Option<String>) -> StepStatus {
    StepStatus {
        name: name.to_owned(),
        state: PENDING.into(),
        attempt: 1,
        key,
        run: None,
        started_at: None,
        ended_at: None,
        message: None,
    }
}

/// The steps of a plan. Those that ended before under the same key stay as they are; one that failed gets another
/// attempt, also when plans without it came in between; requested runs that have ended are not run again.
pub fn begin(status: &mut StyrminDeploymentStatus, plan: &Plan, base: Base<'_>, now: Timestamp) {
    let mut before = std::mem::take(&mut status.steps);
    // Those of a rollout that came to its end are history.
    let was_applied = before.iter().all(ended_well);
    let present = before.len();
    before.extend(std::mem::take(&mut status.earlier_steps));
    let fresh = |one: &plan::PlanStep| StepStatus {
        run: run_of(&one.kind).cloned(),
        ..step(&one.name, hooks::key(base.revision, base.driver, &one.kind))
    };
    let wanted =
        plan.steps.iter().filter(|one| run_of(&one.kind).is_none_or(|run| !status.finished_jobs.contains(run)));
    status.steps = wanted
        .map(fresh)
        .map(|mut new| {
            let known = before.iter().position(|known| known.key.is_some() && known.key == new.key);
            match known.map(|at| (&before[at], at < present)) {
                Some((known, _)) if known.state == FAILED => new.attempt = known.attempt + 1,
                // The plan in between has undone what it stopped. A Job or a command says itself that it has ended.
                Some((known, false)) => new.attempt = known.attempt,
                Some((known, true)) => new = StepStatus { run: new.run, ..known.clone() },
                None => {}
            }
            new
        })
        .collect();
    let is_kept = |known: &StepStatus| {
        known.key.is_some() && known.state != PENDING && !status.steps.iter().any(|step| step.key == known.key)
    };
    if !was_applied {
        before.retain(is_kept);
        before.truncate(EARLIER);
        status.earlier_steps = before;
    }
    if let Some(first) = status.steps.iter_mut().find(|step| !ended_well(step))
        && first.key.is_none()
    {
        start(first, now);
    }
}

/// The run that somebody asked for and that a step belongs to.
fn run_of(kind: &StepKind) -> Option<&String> {
    if let StepKind::Hook { run, .. } = kind { run.as_ref() } else { None }
}

/// Notes that a run that somebody asked for has ended with one of its steps: well with the last one, or not. None is
/// begun twice, however it ends.
pub fn note_run(status: &mut StyrminDeploymentStatus, index: usize) {
    let Some(step) = status.steps.get(index) else { return };
    let (Some(run), failed) = (step.run.clone(), step.state == FAILED) else { return };
    let is_left = |step: &StepStatus| step.run.as_ref() == Some(&run) && !ended_well(step);
    if failed || !status.steps.iter().any(is_left) {
        status.finished_jobs.push(run.clone());
        status.failed_jobs.extend(failed.then_some(run));
    }
}

/// What is known of the steps while the driver, which decides them, is not there.
fn waiting(now: Timestamp) -> Vec<StepStatus> {
    let mut only = step(plan::PREREQUISITES, None);
    start(&mut only, now);
    vec![only]
}

fn ended_well(step: &StepStatus) -> bool {
    step.state == SUCCEEDED || step.state == SKIPPED
}

fn start(step: &mut StepStatus, now: Timestamp) {
    if step.state == PENDING {
        step.state = RUNS.into();
        step.started_at.get_or_insert_with(|| now.to_string());
    }
}

/// The step that comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Current {
    /// Its place in `status.steps`.
    pub index: usize,
    /// What it is.
    pub kind: StepKind,
}

/// The first step that has not ended well; `Err`: it is of another plan than this one.
///
/// # Errors
/// When no step of the plan has its key.
pub fn current(status: &StyrminDeploymentStatus, plan: &Plan, base: Base<'_>) -> Result<Option<Current>, String> {
    let Some(index) = status.steps.iter().position(|step| !ended_well(step)) else { return Ok(None) };
    let sought = &status.steps[index];
    let is = |known: &&plan::PlanStep| {
        known.name == sought.name && hooks::key(base.revision, base.driver, &known.kind) == sought.key
    };
    match plan.steps.iter().find(is) {
        Some(found) => Ok(Some(Current { index, kind: found.kind.clone() })),
        None => Err(sought.name.clone()),
    }
}

/// The step of an action that runs, by its key and attempt.
#[must_use]
pub fn running_hook(status: &StyrminDeploymentStatus) -> Option<(usize, &str, u32)> {
    let index = status.steps.iter().position(|step| step.state == RUNS && step.key.is_some())?;
    let step = &status.steps[index];
    Some((index, step.key.as_deref()?, step.attempt))
}

/// Whether nothing that has to come before the HelmRelease is left to do.
#[must_use]
pub fn release_allowed(status: &StyrminDeploymentStatus) -> bool {
    let before = status.steps.iter().take_while(|step| step.name != plan::HELM_RELEASE);
    let mut before = before.filter(|step| step.key.is_some());
    !status.steps.iter().any(|step| step.name == plan::HELM_RELEASE) || before.all(ended_well)
}

/// Whether the release is what is worked on, and services come after it with nothing in between.
#[must_use]
pub fn comes_to_services(status: &StyrminDeploymentStatus) -> bool {
    let mut open = status.steps.iter().skip_while(|step| ended_well(step));
    open.next().is_some_and(|step| step.name == plan::HELM_RELEASE)
        && open.next().is_some_and(|step| step.name == plan::SERVICES)
}

/// Services are made, from what was seen of the chart's.
#[must_use]
pub fn services_begun(status: &StyrminDeploymentStatus) -> bool {
    status.steps.iter().any(|step| step.name == plan::SERVICES && step.state == RUNS)
}

/// The phase that a step belongs to.
#[must_use]
pub fn phase_of(kind: &StepKind) -> &'static str {
    match kind {
        StepKind::Prerequisites | StepKind::Hook { mode: Mode::Pre, .. } => phase::PREREQUISITES,
        StepKind::HelmRelease | StepKind::Hook { mode: Mode::Core, .. } => phase::RELEASE,
        StepKind::Services | StepKind::Ready | StepKind::Hook { mode: Mode::Post, .. } => phase::SERVICES,
        StepKind::Teardown => phase::DELETING,
    }
}

fn at(status: &mut StyrminDeploymentStatus, index: usize) -> Option<&mut StepStatus> {
    status.steps.get_mut(index)
}

/// A step has begun.
#[must_use]
pub fn has_begun(status: &StyrminDeploymentStatus, index: usize) -> bool {
    status.steps.get(index).is_some_and(|step| step.state == RUNS)
}

/// A step has failed.
#[must_use]
pub fn has_failed(status: &StyrminDeploymentStatus, index: usize) -> bool {
    status.steps.get(index).is_some_and(|step| step.state == FAILED)
}

/// When a step began, or began to wait for its beginning.
#[must_use]
pub fn began(status: &StyrminDeploymentStatus, index: usize) -> Option<Timestamp> {
    status.steps.get(index)?.started_at.as_deref()?.parse().ok()
}

/// When a step ended.
#[must_use]
pub fn ended(status: &StyrminDeploymentStatus, index: usize) -> Option<Timestamp> {
    status.steps.get(index)?.ended_at.as_deref()?.parse().ok()
}

/// How long steps of actions have taken since `since`.
#[must_use]
pub fn time_of_hooks(status: &StyrminDeploymentStatus, since: Timestamp, now: Timestamp) -> SignedDuration {
    let of_hook = |step: &StepStatus| {
        let began = step.started_at.as_deref()?.parse::<Timestamp>().ok().filter(|began| *began >= since)?;
        let ended = step.ended_at.as_deref().and_then(|at| at.parse().ok()).unwrap_or(now);
        Some(ended.duration_since(began))
    };
    status.steps.iter().filter(|step| step.key.is_some()).filter_map(of_hook).sum()
}

/// A step runs, unless it has begun before.
pub fn run(status: &mut StyrminDeploymentStatus, index: usize, now: Timestamp) {
    if let Some(step) = at(status, index) {
        start(step, now);
    }
}

/// A step cannot begin yet; its limit counts from now on.
pub fn postpone(status: &mut StyrminDeploymentStatus, index: usize, why: &str, now: Timestamp) {
    if let Some(step) = at(status, index) {
        step.started_at.get_or_insert_with(|| now.to_string());
        step.message = Some(bounded(why));
    }
}

/// A step ended well.
pub fn succeed(status: &mut StyrminDeploymentStatus, index: usize, now: Timestamp) {
    if let Some(step) = at(status, index) {
        end_well(step, now);
    }
}

/// Every step ended well.
pub fn succeed_all(status: &mut StyrminDeploymentStatus, now: Timestamp) {
    for step in &mut status.steps {
        end_well(step, now);
    }
}

fn end_well(step: &mut StepStatus, now: Timestamp) {
    if !ended_well(step) {
        step.started_at.get_or_insert_with(|| now.to_string());
        step.state = SUCCEEDED.into();
        step.ended_at = Some(now.to_string());
        step.message = None;
    }
}

/// Somebody said that the steps of actions are not to be run.
pub fn skip_hooks(status: &mut StyrminDeploymentStatus, now: Timestamp) {
    for step in status.steps.iter_mut().filter(|step| step.key.is_some() && !ended_well(step)) {
        step.started_at.get_or_insert_with(|| now.to_string());
        step.state = SKIPPED.into();
        step.ended_at = Some(now.to_string());
    }
}

/// Says why a running step waits.
pub fn explain(status: &mut StyrminDeploymentStatus, index: usize, why: &str) {
    if let Some(step) = at(status, index).filter(|step| step.state == RUNS) {
        step.message = Some(bounded(why));
    }
}

/// A step failed.
pub fn fail(status: &mut StyrminDeploymentStatus, index: usize, why: &str, now: Timestamp) {
    if let Some(step) = at(status, index) {
        step.message = Some(bounded(why));
        if step.state != FAILED {
            step.started_at.get_or_insert_with(|| now.to_string());
            step.state = FAILED.into();
            step.ended_at = Some(now.to_string());
        }
    }
}

/// A step that ended well is to be run again: something else has undone it.
pub fn forget(status: &mut StyrminDeploymentStatus, kind: &StepKind, base: Base<'_>) {
    let key = hooks::key(base.revision, base.driver, kind);
    for step in status.steps.iter_mut().filter(|step| step.key == key && step.state == SUCCEEDED) {
        let (attempt, run) = (step.attempt + 1, step.run.clone());
        *step = StepStatus { attempt, run, ..self::step(&step.name, step.key.clone()) };
    }
}

/// A change that waits to be begun is noted. Steps of actions stay known until there is a plan.
pub fn wait_anew(status: &mut StyrminDeploymentStatus, now: Timestamp) {
    let fresh = waiting(now);
    if status.steps.iter().all(|step| step.key.is_none()) {
        status.steps = fresh;
    } else {
        status.steps.retain(|step| step.name != plan::PREREQUISITES);
        status.steps.splice(0..0, fresh);
    }
}

/// When a change was noted.
#[must_use]
pub fn noted(status: &StyrminDeploymentStatus) -> Option<Timestamp> {
    let index = status.steps.iter().position(|step| step.name == plan::PREREQUISITES)?;
    began(status, index)
}

/// The first step that has not ended well is one of an action.
#[must_use]
pub fn comes_to_a_hook(status: &StyrminDeploymentStatus) -> bool {
    status.steps.iter().find(|step| !ended_well(step)).is_some_and(|step| step.key.is_some())
}

/// A step of an action has not ended well.
#[must_use]
pub fn hook_is_left(status: &StyrminDeploymentStatus) -> bool {
    status.steps.iter().any(|step| step.key.is_some() && !ended_well(step))
}

/// A step of an action has failed.
#[must_use]
pub fn hook_has_failed(status: &StyrminDeploymentStatus) -> bool {
    status.steps.iter().any(|step| step.key.is_some() && step.state == FAILED)
}

/// The first step that has not ended well failed.
pub fn fail_first(status: &mut StyrminDeploymentStatus, why: &str, now: Timestamp) {
    if let Some(index) = status.steps.iter().position(|step| !ended_well(step)) {
        fail(status, index, why, now);
    }
}

/// Another attempt of a step begins.
pub fn again(status: &mut StyrminDeploymentStatus, index: usize, why: &str, now: Timestamp) {
    if let Some(step) = at(status, index) {
        *step = StepStatus {
            attempt: step.attempt + 1,
            state: RUNS.into(),
            started_at: Some(now.to_string()),
            ended_at: None,
            message: Some(bounded(why)),
            ..step.clone()
        };
    }
}
