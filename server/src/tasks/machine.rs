//! The task state machine: a task, an event and a time give the task as it is then.
//!
//! Pure: no I/O, no clock, no store. A task that has ended never moves again, and an event that is
//! told twice moves it once, whatever the time is.

use crate::store::{Millis, Step, StepState, Task, TaskState};
use styrmin_renderer::plan::{self, Plan, Workflow};

/// First step of a change.
pub const WRITE_STEP: &str = "Write the StyrminDeployment resource";
/// First step of a removal.
pub const REMOVE_STEP: &str = "Remove the StyrminDeployment resource";
/// First step of a change that people review.
pub const REQUEST_STEP: &str = "Open the pull request";
/// Second step of such a change.
pub const REVIEW_STEP: &str = "Wait for the review and the merge";
/// The step after the commit: proved by the object in the cluster.
pub const FLUX_STEP: &str = "Wait for Flux to apply the commit";
/// The operator's step of phase CreatingPrerequisites.
pub const PREREQUISITES_STEP: &str = plan::PREREQUISITES;
/// The operator's step of phase CreatingHelmRelease.
pub const HELM_STEP: &str = plan::HELM_RELEASE;
/// The operator's step of phase CreatingServices.
pub const SERVICES_STEP: &str = plan::SERVICES;
/// The operator's step that ends with phase Ready.
pub const READY_STEP: &str = plan::READY;
/// The operator's step of a removal.
pub const TEARDOWN_STEP: &str = plan::TEARDOWN;

/// Phase of an object whose rollout is done.
pub const READY: &str = "Ready";
/// Phase of an object that the operator has given up on.
pub const FAILED: &str = "Failed";
/// Phase of an object whose teardown is done.
const DELETED: &str = "Deleted";
/// Display state of an object with an error that may pass.
const ERROR: &str = "Error";
/// What a step fails with when nobody said why.
const NO_REASON: &str = "the operator gave no reason; look at the StyrminDeployment and at the agent's log";

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event<'a> {
    /// The instance's commit is on the branch that Flux follows.
    Pushed {
        /// The commit.
        revision: &'a str,
        /// The branch.
        branch: &'a str,
    },
    /// The repository holds what the instance asks for without a commit, for example a deletion
    /// that came before the first commit.
    NothingToWrite,
    /// People can review it.
    Proposed {
        /// Where.
        message: &'a str,
    },
    /// Its proposal was closed without a merge.
    Rejected {
        /// By whom, and why.
        message: &'a str,
    },
    /// A newer instance takes its place.
    Superseded {
        /// Sequence of the newer one.
        by: i64,
    },
    /// Flux has not applied the commit yet, as far as is known for this reason.
    FluxWaits {
        /// For people.
        message: &'a str,
    },
    /// The object in the cluster carries the task's instance.
    Rollout(&'a Observed<'a>),
    /// The object in the cluster is being deleted, as the task wishes.
    Removal(&'a Observed<'a>),
    /// The object is in the cluster no more, as the task wishes.
    Gone,
}

/// What the operator says about an object. Absent texts are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed<'a> {
    /// Where the rollout is.
    pub phase: &'a str,
    /// In one word.
    pub display_state: &'a str,
    /// In a sentence.
    pub message: &'a str,
    /// The steps of the operator's plan; empty: only the phase says where it is.
    pub steps: &'a [ObservedStep<'a>],
    /// When the HelmRelease became ready.
    pub release_ready_at: Option<Millis>,
    /// When the object became ready.
    pub ready_at: Option<Millis>,
    /// Digest of the spec that the operator acts on.
    pub spec_digest: &'a str,
    /// What the instance asks for; needed in phase [`READY`] only.
    pub wanted: Option<Wanted<'a>>,
    /// Lines about containers that explain a failure.
    pub pods: &'a [String],
}

/// What an instance asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// Digest of its spec.
    pub spec_digest: &'a str,
    /// Display state of an object that does what it asks for: Running or Stopped.
    pub display_state: &'a str,
}

/// A step as the operator reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedStep<'a> {
    /// Its name.
    pub name: &'a str,
    /// State.
    pub state: StepState,
    /// 1 for the first.
    pub attempt: i64,
    /// When it began.
    pub started_at: Option<Millis>,
    /// When it ended.
    pub ended_at: Option<Millis>,
    /// For people; may be empty.
    pub message: &'a str,
}

impl Observed<'_> {
    /// Whether the operator says that something is wrong.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.phase == FAILED || self.display_state == ERROR
    }

    /// Whether the cluster does what the instance asks for, with exactly its content.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.phase == READY
            && self.wanted.is_some_and(|w| w.display_state == self.display_state && w.spec_digest == self.spec_digest)
    }
}

/// How many steps the server knows more about than the operator: up to the wait for Flux.
fn own_steps(task: &Task) -> usize {
    task.steps.iter().position(|step| step.name == FLUX_STEP).map_or(2, |index| index + 1)
}

/// The step that waits for Flux.
fn flux_step(task: &mut Task) -> Option<&mut Step> {
    task.steps.iter_mut().find(|step| step.name == FLUX_STEP)
}

/// The steps that a plan predicts, the first of them begun. With `review` people decide about it first.
#[must_use]
pub fn predict(task: &str, plan: &Plan, review: bool, now: Millis) -> Vec<Step> {
    let first: &[&str] = match plan.workflow {
        _ if review => &[REQUEST_STEP, REVIEW_STEP],
        Workflow::Delete => &[REMOVE_STEP],
        _ => &[WRITE_STEP],
    };
    let names = first.iter().copied().chain([FLUX_STEP]).chain(plan.steps.iter().map(|step| step.name.as_str()));
    (0..)
        .zip(names)
        .map(|(position, name)| Step {
            task_id: task.to_owned(),
            position,
            name: name.to_owned(),
            state: if position == 0 { StepState::Running } else { StepState::Pending },
            attempt: 1,
            message: None,
            started_at: (position == 0).then_some(now),
            ended_at: None,
        })
        .collect()
}

/// The step that ends when the instance's commit is in the repository.
fn last_before_flux(task: &Task) -> Option<&Step> {
    own_steps(task).checked_sub(2).and_then(|index| task.steps.get(index))
}

/// Whether the instance's commit is in the repository, so that reports mean something for the task.
#[must_use]
pub fn is_pushed(task: &Task) -> bool {
    last_before_flux(task).is_some_and(|step| step.state == StepState::Succeeded)
}

/// When it came there.
#[must_use]
pub fn pushed_at(task: &Task) -> Option<Millis> {
    last_before_flux(task).and_then(|step| step.ended_at)
}

/// Whether the task still waits for Flux.
#[must_use]
pub fn waits_for_flux(task: &Task) -> bool {
    task.steps.iter().any(|step| step.name == FLUX_STEP && step.state == StepState::Running)
}

/// Moves `task`; `true` when something changed.
pub fn apply(task: &mut Task, event: &Event<'_>, now: Millis) -> bool {
    if task.state != TaskState::Running {
        return false;
    }
    match event {
        Event::Pushed { .. } | Event::NothingToWrite => {
            if is_pushed(task) {
                return false;
            }
            let before = own_steps(task) - 1;
            for step in task.steps.iter_mut().take(before) {
                succeed(step, now);
            }
            if let Some(last) = before.checked_sub(1).and_then(|index| task.steps.get_mut(index)) {
                last.message = Some(match event {
                    Event::Pushed { revision, branch } => {
                        format!("Commit {} on {branch}", revision.get(..10).unwrap_or(revision))
                    }
                    _ => "The repository needs no change".to_owned(),
                });
            }
            if let Some(next) = task.steps.get_mut(before).filter(|step| step.state == StepState::Pending) {
                next.state = StepState::Running;
                next.started_at = Some(now);
            }
            true
        }
        Event::Proposed { message } => changed(task, |task| {
            let [first, second, ..] = &mut task.steps[..] else { return };
            if first.name != REQUEST_STEP {
                return;
            }
            if first.state == StepState::Running {
                succeed(first, now);
                second.state = StepState::Running;
                second.started_at = Some(now);
            }
            first.message = Some((*message).to_owned());
        }),
        Event::Rejected { message } => {
            skip_unfinished(task, now);
            end(task, TaskState::Rejected, Some((*message).to_owned()), now);
            true
        }
        Event::Superseded { by } => {
            skip_unfinished(task, now);
            end(task, TaskState::Superseded, Some(format!("Superseded by change {by} of the deployment")), now);
            true
        }
        // What a report says about a task whose commit is not recorded yet is said again later.
        _ if !is_pushed(task) => false,
        Event::FluxWaits { message } => {
            let waits = waits_for_flux(task);
            let step = flux_step(task).filter(|step| waits && step.message.as_deref() != Some(message));
            step.map(|step| step.message = Some((*message).to_owned())).is_some()
        }
        Event::Rollout(seen) => changed(task, |task| rollout(task, seen, now)),
        Event::Removal(seen) => changed(task, |task| removal(task, seen, now)),
        Event::Gone => {
            for step in &mut task.steps {
                succeed(step, now);
            }
            end(task, TaskState::Succeeded, None, now);
            true
        }
    }
}

fn skip_unfinished(task: &mut Task, now: Millis) {
    for step in &mut task.steps {
        match step.state {
            StepState::Running => {
                step.state = StepState::Skipped;
                step.ended_at = Some(now);
            }
            StepState::Pending => step.state = StepState::Skipped,
            _ => {}
        }
    }
}

fn changed(task: &mut Task, change: impl FnOnce(&mut Task)) -> bool {
    let before = task.clone();
    change(task);
    *task != before
}

fn end(task: &mut Task, state: TaskState, message: Option<String>, now: Millis) {
    task.state = state;
    task.message = message;
    task.ended_at = Some(now);
}

fn rollout(task: &mut Task, seen: &Observed<'_>, now: Millis) {
    flux_has_applied(task, now);
    if seen.steps.is_empty() {
        follow_phase(task, seen, now);
    } else {
        follow_steps(task, seen, now);
    }
    let failed = if seen.is_error() { fail_first(task, seen, now) } else { None };
    if seen.phase == FAILED {
        for step in task.steps.iter_mut().filter(|step| matches!(step.state, StepState::Pending | StepState::Running)) {
            step.state = StepState::Skipped;
        }
        let reason = failed.unwrap_or_else(|| given(seen.message));
        end(task, TaskState::Failed, Some(reason), now);
    } else if seen.is_done() {
        for step in &mut task.steps {
            succeed(step, now);
        }
        end(task, TaskState::Succeeded, None, now);
    } else {
        task.message = other_content(seen);
    }
}

/// Why a rollout that is ready does not end the task.
fn other_content(seen: &Observed<'_>) -> Option<String> {
    let wanted = seen.wanted.filter(|wanted| seen.phase == READY && wanted.spec_digest != seen.spec_digest)?;
    Some(format!(
        "The StyrminDeployment in the cluster has another spec ({}) than this change ({}): somebody edited it; let Flux put it back, or make another change",
        if seen.spec_digest.is_empty() { "no digest" } else { seen.spec_digest },
        wanted.spec_digest
    ))
}

fn removal(task: &mut Task, seen: &Observed<'_>, now: Millis) {
    flux_has_applied(task, now);
    // An object that is deleted in the middle of a rollout still shows the steps of that.
    if seen.steps.iter().any(|step| step.name == TEARDOWN_STEP) {
        follow_steps(task, seen, now);
        if seen.is_error() {
            fail_first(task, seen, now);
        }
        return;
    }
    let Some(step) = task.steps.iter_mut().find(|step| step.name == TEARDOWN_STEP) else { return };
    if seen.phase == DELETED {
        succeed(step, now);
    } else if seen.is_error() {
        // The operator goes on trying: the task does not end.
        fail(step, seen, now);
    } else {
        run(step, now);
        step.message = Some(seen.message.to_owned()).filter(|message| !message.is_empty());
    }
}

fn flux_has_applied(task: &mut Task, now: Millis) {
    if let Some(step) = flux_step(task) {
        succeed(step, now);
    }
}

/// Ends a step well. One that has is left as it is.
fn succeed(step: &mut Step, at: Millis) {
    if matches!(step.state, StepState::Succeeded | StepState::Skipped) {
        return;
    }
    step.state = StepState::Succeeded;
    step.message = None;
    let started = *step.started_at.get_or_insert(at);
    step.ended_at = Some(at.max(started));
}

/// Lets a step run; one that failed runs as a new attempt.
fn run(step: &mut Step, now: Millis) {
    match step.state {
        StepState::Pending => {
            step.state = StepState::Running;
            step.started_at = Some(now);
        }
        StepState::Failed => {
            step.state = StepState::Running;
            step.attempt += 1;
            step.message = None;
            step.started_at = Some(now);
            step.ended_at = None;
        }
        _ => {}
    }
}

fn given(message: &str) -> String {
    if message.is_empty() { NO_REASON.to_owned() } else { message.to_owned() }
}

/// Fails a step with the operator's words and, where pods can be the cause, with theirs.
fn fail(step: &mut Step, seen: &Observed<'_>, now: Millis) {
    let reason = given(seen.message);
    let pods: &[String] = if matches!(step.name.as_str(), HELM_STEP | READY_STEP) { seen.pods } else { &[] };
    // Pods that a rollback removed meanwhile were the reason all the same.
    let kept = pods.is_empty() && step.message.as_ref().is_some_and(|known| known.starts_with(&reason));
    if step.state != StepState::Failed {
        step.state = StepState::Failed;
        step.started_at.get_or_insert(now);
        step.ended_at = Some(now);
        step.message = None;
    }
    if !kept || step.message.is_none() {
        step.message = Some(std::iter::once(&reason).chain(pods).map(String::as_str).collect::<Vec<_>>().join("; "));
    }
}

/// Fails the first unfinished step of the operator's; says which and why.
fn fail_first(task: &mut Task, seen: &Observed<'_>, now: Millis) -> Option<String> {
    let unfinished = |step: &&mut Step| !matches!(step.state, StepState::Succeeded | StepState::Skipped);
    let own = own_steps(task);
    let step = task.steps.iter_mut().skip(own).find(unfinished)?;
    if step.state != StepState::Failed || seen.steps.is_empty() {
        fail(step, seen, now);
    }
    Some(format!("step \"{}\" failed: {}", step.name, step.message.as_deref().unwrap_or(NO_REASON)))
}

/// Moves the predicted steps by the phase alone.
fn follow_phase(task: &mut Task, seen: &Observed<'_>, now: Millis) {
    let name = match seen.phase {
        "CreatingPrerequisites" => PREREQUISITES_STEP,
        "CreatingHelmRelease" => HELM_STEP,
        "CreatingServices" => SERVICES_STEP,
        READY => READY_STEP,
        _ => return,
    };
    let Some(current) = task.steps.iter().position(|step| step.name == name) else { return };
    let ended = |step: &Step| {
        let told = match step.name.as_str() {
            HELM_STEP => seen.release_ready_at,
            READY_STEP => seen.ready_at,
            _ => None,
        };
        told.map_or(now, |at| at.min(now))
    };
    let is_error = seen.is_error();
    let own = own_steps(task);
    for (index, step) in task.steps.iter_mut().enumerate().take(current + 1).skip(own) {
        if index < current || (seen.phase == READY && !is_error) {
            succeed(step, ended(step));
        } else if !is_error {
            run(step, now);
        }
    }
}

/// The operator's steps take the place of the predicted ones.
fn follow_steps(task: &mut Task, seen: &Observed<'_>, now: Millis) {
    let own = own_steps(task).min(task.steps.len());
    let known = task.steps.split_off(own);
    let is_error = seen.is_error();
    // Told again while the error stands: the step that failed has not begun anew.
    let failing = seen.steps.iter().position(|step| !matches!(step.state, StepState::Succeeded | StepState::Skipped));
    for (index, step) in seen.steps.iter().enumerate() {
        let same = |known: &&Step| known.name == step.name;
        let before = known.get(index).filter(same).or_else(|| known.iter().find(same));
        let is_failing = is_error && failing == Some(index);
        let mut next = follow_step(before, step, is_failing, now);
        next.task_id.clone_from(&task.id);
        next.position = i64::try_from(own + index).unwrap_or(i64::MAX);
        if next.state == StepState::Failed {
            // The object's reason is about this step; of others only their own is known.
            let object = is_failing && !seen.message.is_empty();
            let message = if object || step.message.is_empty() { seen.message } else { step.message };
            fail(&mut next, &Observed { message, ..seen.clone() }, now);
        }
        task.steps.push(next);
    }
}

/// One reported step, after what was known about it.
fn follow_step(before: Option<&Step>, step: &ObservedStep<'_>, failing: bool, now: Millis) -> Step {
    let was = before.map(|before| before.state);
    let again = was == Some(StepState::Failed) && step.state == StepState::Running && !failing;
    let attempt = step.attempt.max(1).max(before.map_or(1, |before| before.attempt) + i64::from(again));
    // The server counts an attempt that the operator does not when an error came and went.
    let reported = step.attempt.max(1) >= attempt;
    let still_failed = was == Some(StepState::Failed) && failing && before.is_some_and(|b| b.attempt == attempt);
    let state = if still_failed { StepState::Failed } else { step.state };
    let begun = before.filter(|before| before.attempt == attempt && before.state != StepState::Pending);
    let started_at = match state {
        StepState::Pending => None,
        _ => step
            .started_at
            .filter(|_| reported)
            .or(begun.and_then(|before| before.started_at))
            .or((state != StepState::Skipped).then_some(now)),
    };
    let ended_at = match state {
        StepState::Pending | StepState::Running => None,
        _ => step
            .ended_at
            .or(begun.filter(|before| before.state == state).and_then(|before| before.ended_at))
            .or((state != StepState::Skipped).then_some(now)),
    };
    let message = match state {
        StepState::Failed => begun.filter(|b| b.state == StepState::Failed).and_then(|b| b.message.clone()),
        _ => Some(step.message.to_owned()).filter(|message| !message.is_empty()),
    };
    Step {
        task_id: String::new(),
        position: 0,
        name: step.name.to_owned(),
        state,
        attempt,
        message,
        started_at,
        ended_at: ended_at.map(|ended| started_at.map_or(ended, |started| ended.max(started))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use StepState::{Failed, Pending, Running, Skipped, Succeeded};
    use styrmin_renderer::plan::{PlanStep, StepKind};

    const DIGEST: &str = "sha256:1";
    const RUNS: Option<Wanted<'_>> = Some(Wanted { spec_digest: DIGEST, display_state: "Running" });
    const OPERATOR: [&str; 4] = [PREREQUISITES_STEP, HELM_STEP, SERVICES_STEP, READY_STEP];

    fn planned(workflow: Workflow, names: &[&str]) -> Task {
        let steps = names.iter().map(|name| PlanStep { name: (*name).into(), kind: StepKind::HelmRelease });
        let plan = Plan { workflow, steps: steps.collect() };
        Task {
            id: "t".into(),
            deployment_id: "d".into(),
            instance_id: "i".into(),
            sequence: 1,
            workflow: workflow.as_str().into(),
            state: TaskState::Running,
            message: None,
            author_name: "Ann".into(),
            author_email: "ann@example.com".into(),
            version: 1,
            created_at: 1,
            ended_at: None,
            fan_out_id: None,
            steps: predict("t", &plan, false, 1),
        }
    }

    fn task() -> Task {
        planned(Workflow::Create, &["Install"])
    }

    const PUSHED: Event<'_> = Event::Pushed { revision: "0123456789abcdef", branch: "main" };

    /// A change whose commit was pushed at 5.
    fn pushed() -> Task {
        let mut task = planned(Workflow::Create, &OPERATOR);
        assert!(apply(&mut task, &PUSHED, 5));
        task
    }

    /// A removal whose commit was pushed at 5.
    fn removing() -> Task {
        let mut task = planned(Workflow::Delete, &[TEARDOWN_STEP]);
        assert!(apply(&mut task, &PUSHED, 5));
        task
    }

    fn seen<'a>(phase: &'a str, display_state: &'a str, message: &'a str) -> Observed<'a> {
        let wanted = if phase == READY { RUNS } else { None };
        Observed { phase, display_state, message, spec_digest: DIGEST, wanted, ..Observed::default() }
    }

    fn step(name: &str, state: StepState, attempt: i64) -> ObservedStep<'_> {
        ObservedStep { name, state, attempt, started_at: None, ended_at: None, message: "" }
    }

    fn states(task: &Task) -> Vec<StepState> {
        task.steps.iter().map(|step| step.state).collect()
    }

    /// Tells `task` of `seen`, then again later: what is told twice moves once.
    fn report(task: &mut Task, seen: &Observed<'_>, now: Millis) -> bool {
        let moved = apply(task, &Event::Rollout(seen), now);
        let before = task.clone();
        assert!(!apply(task, &Event::Rollout(seen), now + 1000), "told twice: {before:?}\nbecame {task:?}");
        moved
    }

    #[test]
    fn a_push_ends_the_first_step_and_begins_the_second() {
        let mut task = task();
        assert_eq!(states(&task), [Running, Pending, Pending]);
        assert!(apply(&mut task, &PUSHED, 5));
        assert_eq!(states(&task), [Succeeded, Running, Pending]);
        assert_eq!((task.steps[0].ended_at, task.steps[1].started_at), (Some(5), Some(5)));
        assert_eq!(task.steps[0].message.as_deref(), Some("Commit 0123456789 on main"));
        assert!(!apply(&mut task, &PUSHED, 6), "told twice, moved once");
    }

    #[test]
    fn a_reviewed_task_waits_for_its_merge_and_goes_on_like_any_other() {
        let names = OPERATOR.iter().map(|name| PlanStep { name: (*name).into(), kind: StepKind::HelmRelease });
        let plan = Plan { workflow: Workflow::Update, steps: names.collect() };
        let mut task = Task { steps: predict("t", &plan, true, 1), ..planned(Workflow::Update, &OPERATOR) };
        let names: Vec<&str> = task.steps.iter().take(3).map(|step| step.name.as_str()).collect();
        assert_eq!(names, [REQUEST_STEP, REVIEW_STEP, FLUX_STEP]);
        // Nothing that a report says is about it yet.
        let seen = Observed {
            phase: READY,
            wanted: RUNS,
            spec_digest: DIGEST,
            display_state: "Running",
            ..Observed::default()
        };
        assert!(!apply(&mut task, &Event::Rollout(&seen), 2) && !is_pushed(&task));
        assert!(apply(&mut task, &Event::Proposed { message: "#7" }, 3));
        assert!(!apply(&mut task, &Event::Proposed { message: "#7" }, 4), "told twice");
        assert_eq!((task.steps[0].state, task.steps[1].state, task.steps[1].started_at), (Succeeded, Running, Some(3)));
        assert!(!is_pushed(&task) && !waits_for_flux(&task));
        let rejected = {
            let mut task = task.clone();
            assert!(apply(&mut task, &Event::Rejected { message: "closed" }, 5));
            assert!(!apply(&mut task, &Event::Pushed { revision: "c", branch: "main" }, 6), "it has ended");
            task
        };
        assert_eq!((rejected.state, rejected.message.as_deref()), (TaskState::Rejected, Some("closed")));
        assert!(rejected.steps.iter().skip(1).all(|step| step.state == Skipped));
        assert!(apply(&mut task, &Event::Pushed { revision: "0123456789abcdef", branch: "main" }, 5));
        assert_eq!(task.steps[1].message.as_deref(), Some("Commit 0123456789 on main"));
        assert_eq!((pushed_at(&task), is_pushed(&task), waits_for_flux(&task)), (Some(5), true, true));
        assert!(apply(&mut task, &Event::Rollout(&seen), 6));
        assert_eq!(task.state, TaskState::Succeeded);
        assert!(task.steps.iter().all(|step| step.state == Succeeded));
    }

    #[test]
    fn a_superseded_task_ends_and_never_moves_again() {
        let mut task = task();
        apply(&mut task, &PUSHED, 5);
        assert!(apply(&mut task, &Event::Superseded { by: 3 }, 7));
        assert_eq!((task.state, task.ended_at), (TaskState::Superseded, Some(7)));
        assert_eq!(states(&task), [Succeeded, Skipped, Skipped]);
        let before = task.clone();
        let ready = seen(READY, "Running", "");
        for event in [PUSHED, Event::Superseded { by: 4 }, Event::Rollout(&ready), Event::Removal(&ready), Event::Gone]
        {
            assert!(!apply(&mut task, &event, 8), "{event:?}");
        }
        assert_eq!(task, before);
    }

    #[test]
    fn reports_mean_nothing_before_the_push_is_recorded() {
        let mut task = planned(Workflow::Create, &OPERATOR);
        let before = task.clone();
        let ready = seen(READY, "Running", "");
        for event in [Event::Rollout(&ready), Event::Gone, Event::FluxWaits { message: "why" }] {
            assert!(!apply(&mut task, &event, 8), "{event:?}");
        }
        assert_eq!(task, before);
    }

    #[test]
    fn flux_explains_the_waiting_until_the_object_carries_the_instance() {
        let mut task = pushed();
        assert!(apply(&mut task, &Event::FluxWaits { message: "why" }, 6));
        assert!(!apply(&mut task, &Event::FluxWaits { message: "why" }, 7));
        assert_eq!(task.steps[1].message.as_deref(), Some("why"));
        assert!(report(&mut task, &seen("", "", ""), 8));
        assert_eq!((task.steps[1].state, task.steps[1].ended_at, &task.steps[1].message), (Succeeded, Some(8), &None));
        assert!(!apply(&mut task, &Event::FluxWaits { message: "late" }, 9));
    }

    #[test]
    fn without_reported_steps_the_phase_says_which_step_runs() {
        for (phase, expected) in [
            ("", [Pending, Pending, Pending, Pending]),
            ("CreatingPrerequisites", [Running, Pending, Pending, Pending]),
            ("CreatingHelmRelease", [Succeeded, Running, Pending, Pending]),
            ("CreatingServices", [Succeeded, Succeeded, Running, Pending]),
            (READY, [Succeeded, Succeeded, Succeeded, Succeeded]),
            ("Deleting", [Pending, Pending, Pending, Pending]),
            ("Odd", [Pending, Pending, Pending, Pending]),
        ] {
            let mut task = pushed();
            report(&mut task, &seen(phase, "Progressing", ""), 9);
            assert_eq!(states(&task)[2..], expected, "{phase}");
            assert_eq!(task.state, TaskState::Running, "{phase}");
        }
    }

    #[test]
    fn a_step_ends_when_its_condition_became_true() {
        let mut task = pushed();
        report(&mut task, &seen("CreatingHelmRelease", "", ""), 10);
        let ready = Observed { release_ready_at: Some(15), ready_at: Some(99), ..seen(READY, "Running", "") };
        report(&mut task, &ready, 20);
        let ended: Vec<_> = task.steps[2..].iter().map(|step| step.ended_at).collect();
        assert_eq!(ended, [Some(10), Some(15), Some(20), Some(20)], "never in the future");
        assert!(task.steps.iter().all(|step| step.started_at <= step.ended_at));
    }

    #[test]
    fn a_task_succeeds_only_when_exactly_its_content_does_what_it_asks_for() {
        let stops = Some(Wanted { spec_digest: DIGEST, display_state: "Stopped" });
        let edited = Some(Wanted { spec_digest: "sha256:2", display_state: "Running" });
        for (name, seen, ends) in [
            ("running", seen(READY, "Running", ""), true),
            ("stopped as wished", Observed { wanted: stops, ..seen(READY, "Stopped", "") }, true),
            ("runs, but shall be stopped", Observed { wanted: stops, ..seen(READY, "Running", "") }, false),
            ("stopped, but shall run", seen(READY, "Stopped", ""), false),
            ("edited", Observed { wanted: edited, ..seen(READY, "Running", "") }, false),
            ("unknown instance", Observed { wanted: None, ..seen(READY, "Running", "") }, false),
            ("other phase", Observed { wanted: RUNS, ..seen("CreatingServices", "Running", "") }, false),
            ("error", seen(READY, "Error", "broken"), false),
            ("no digest", Observed { spec_digest: "", ..seen(READY, "Running", "") }, false),
        ] {
            let mut task = pushed();
            report(&mut task, &seen, 9);
            let state = if ends { TaskState::Succeeded } else { TaskState::Running };
            assert_eq!((task.state, task.ended_at), (state, ends.then_some(9)), "{name}");
            if ends {
                assert!(states(&task).iter().all(|state| *state == Succeeded), "{name}");
            }
            assert_eq!(task.message.is_some(), matches!(name, "edited" | "no digest"), "{name}: {:?}", task.message);
        }
    }

    #[test]
    fn an_error_fails_the_first_unfinished_step_with_pods_where_they_can_be_the_cause() {
        let pods = ["pod web-1: container web: ImagePullBackOff (no such image)".to_owned()];
        for (phase, index, message) in [
            ("CreatingPrerequisites", 2, "broken"),
            ("CreatingHelmRelease", 3, "broken; pod web-1: container web: ImagePullBackOff (no such image)"),
            ("CreatingServices", 4, "broken"),
            (READY, 5, "broken; pod web-1: container web: ImagePullBackOff (no such image)"),
        ] {
            let mut task = pushed();
            report(&mut task, &Observed { pods: &pods, ..seen(phase, "Error", "broken") }, 9);
            assert_eq!(
                (task.steps[index].state, task.steps[index].message.as_deref()),
                (Failed, Some(message)),
                "{phase}"
            );
            assert_eq!(task.state, TaskState::Running, "{phase}: the error may pass");
            // The rollback removes the pods: they were the reason all the same.
            assert!(!report(&mut task, &seen(phase, "Error", "broken"), 30), "{phase}");
            assert!(report(&mut task, &seen(phase, "Error", "worse"), 40), "{phase}");
            assert_eq!(task.steps[index].message.as_deref(), Some("worse"), "{phase}");
        }
        let mut task = pushed();
        report(&mut task, &seen("CreatingHelmRelease", "Error", ""), 9);
        assert_eq!(task.steps[3].message.as_deref(), Some(NO_REASON));
    }

    #[test]
    fn a_failed_step_runs_again_as_a_new_attempt_or_succeeds_with_a_later_phase() {
        let mut task = pushed();
        report(&mut task, &seen("CreatingHelmRelease", "Error", "slow"), 10);
        report(&mut task, &seen("CreatingHelmRelease", "Progressing", ""), 20);
        let step = &task.steps[3];
        assert_eq!((step.state, step.attempt, step.started_at, step.ended_at), (Running, 2, Some(20), None));
        assert_eq!(step.message, None);
        report(&mut task, &seen("CreatingHelmRelease", "Error", "slow"), 30);
        assert_eq!((task.steps[3].state, task.steps[3].attempt), (Failed, 2));
        report(&mut task, &seen("CreatingServices", "Progressing", ""), 40);
        assert_eq!(states(&task)[2..], [Succeeded, Succeeded, Running, Pending]);
        assert_eq!((task.steps[3].attempt, &task.steps[3].message), (2, &None));
        report(&mut task, &seen(READY, "Running", ""), 50);
        assert_eq!(task.state, TaskState::Succeeded);
    }

    #[test]
    fn phase_failed_ends_the_task_for_good() {
        let mut task = pushed();
        report(&mut task, &seen("CreatingHelmRelease", "Progressing", ""), 10);
        let pods = ["pod web-1: container web: CrashLoopBackOff".to_owned()];
        report(&mut task, &Observed { pods: &pods, ..seen(FAILED, "Error", "no more retries") }, 20);
        assert_eq!(states(&task)[2..], [Succeeded, Failed, Skipped, Skipped]);
        assert_eq!((task.state, task.ended_at), (TaskState::Failed, Some(20)));
        assert_eq!(
            task.message.as_deref(),
            Some(
                "step \"Install or upgrade the HelmRelease\" failed: no more retries; pod web-1: container web: CrashLoopBackOff"
            )
        );
        assert!(!report(&mut task, &seen(READY, "Running", ""), 30), "a new instance revives it, nothing else");
    }

    #[test]
    fn reported_steps_take_the_place_of_the_predicted_ones() {
        let mut task = pushed();
        let steps = [
            ObservedStep { started_at: Some(6), ended_at: Some(7), ..step(PREREQUISITES_STEP, Succeeded, 1) },
            ObservedStep { started_at: Some(7), message: "Job web-1 runs", ..step("Run migrate", Running, 2) },
            step(HELM_STEP, Pending, 1),
            step(READY_STEP, Pending, 1),
        ];
        report(&mut task, &Observed { steps: &steps, ..seen("CreatingPrerequisites", "Progressing", "") }, 9);
        let names: Vec<_> = task.steps.iter().map(|step| (step.position, step.name.as_str(), step.state)).collect();
        assert_eq!(
            names,
            [
                (0, WRITE_STEP, Succeeded),
                (1, FLUX_STEP, Succeeded),
                (2, PREREQUISITES_STEP, Succeeded),
                (3, "Run migrate", Running),
                (4, HELM_STEP, Pending),
                (5, READY_STEP, Pending),
            ]
        );
        assert!(task.steps.iter().all(|step| step.task_id == "t"));
        assert_eq!((task.steps[2].started_at, task.steps[2].ended_at), (Some(6), Some(7)));
        let hook = &task.steps[3];
        assert_eq!((hook.attempt, hook.started_at, hook.message.as_deref()), (2, Some(7), Some("Job web-1 runs")));
        // Times that the operator does not tell are when the report came, and stay.
        let steps = [step(PREREQUISITES_STEP, Succeeded, 1), step(HELM_STEP, Running, 1)];
        report(&mut task, &Observed { steps: &steps, ..seen("CreatingHelmRelease", "Progressing", "") }, 12);
        assert_eq!(task.steps.len(), 4, "there are no others");
        assert_eq!((task.steps[2].started_at, task.steps[2].ended_at), (Some(6), Some(7)));
        assert_eq!(task.steps[3].started_at, Some(12));
    }

    #[test]
    fn an_error_beside_reported_steps_fails_one_and_its_passing_is_a_new_attempt() {
        let helm =
            |state| [step(PREREQUISITES_STEP, Succeeded, 1), step(HELM_STEP, state, 1), step(READY_STEP, Pending, 1)];
        let pods = ["pod web-1: container web: ErrImagePull".to_owned()];
        let (running, failed, done) = (helm(Running), helm(Failed), helm(Succeeded));
        let on = |steps, display| Observed { steps, ..seen("CreatingHelmRelease", display, "too slow") };
        let mut task = pushed();
        report(&mut task, &on(&running, "Progressing"), 10);
        report(&mut task, &Observed { pods: &pods, ..on(&running, "Error") }, 20);
        let step = &task.steps[3];
        assert_eq!((step.state, step.attempt, step.started_at, step.ended_at), (Failed, 1, Some(10), Some(20)));
        assert_eq!(step.message.as_deref(), Some("too slow; pod web-1: container web: ErrImagePull"));
        assert!(!report(&mut task, &on(&running, "Error"), 25), "its pods went, the reason stays");
        report(&mut task, &on(&running, "Progressing"), 30);
        let step = &task.steps[3];
        assert_eq!((step.state, step.attempt, step.started_at, step.ended_at), (Running, 2, Some(30), None));
        report(&mut task, &on(&failed, "Error"), 40);
        assert_eq!((task.steps[3].state, task.steps[3].attempt, task.steps[3].ended_at), (Failed, 2, Some(40)));
        report(&mut task, &on(&done, "Progressing"), 50);
        assert_eq!((task.steps[3].state, task.steps[3].attempt), (Succeeded, 2));
        assert_eq!(task.state, TaskState::Running);
        report(&mut task, &Observed { steps: &done, ..seen(READY, "Running", "") }, 60);
        assert_eq!((task.state, states(&task)[4]), (TaskState::Succeeded, Succeeded));
    }

    #[test]
    fn a_step_that_the_operator_failed_shows_its_own_reason_unless_the_object_has_one() {
        for (display, object, expected) in
            [("Progressing", "", "own"), ("Error", "the object's", "the object's"), ("Error", "", "own")]
        {
            let steps = [ObservedStep { message: "own", ..step(PREREQUISITES_STEP, Failed, 3) }];
            let mut task = pushed();
            report(&mut task, &Observed { steps: &steps, ..seen("CreatingPrerequisites", display, object) }, 9);
            let step = &task.steps[2];
            assert_eq!((step.state, step.attempt, step.message.as_deref()), (Failed, 3, Some(expected)));
        }
    }

    #[test]
    fn a_removal_runs_with_the_objects_words_and_ends_when_the_object_is_gone() {
        let tell = |task: &mut Task, seen: &Observed<'_>, now| {
            apply(task, &Event::Removal(seen), now);
            assert!(!apply(task, &Event::Removal(seen), now + 1), "told twice, moved once");
        };
        let mut task = removing();
        tell(&mut task, &seen("Deleting", "Deleting", "uninstalling"), 10);
        assert_eq!(states(&task), [Succeeded, Succeeded, Running]);
        assert_eq!((task.steps[2].started_at, task.steps[2].message.as_deref()), (Some(10), Some("uninstalling")));
        tell(&mut task, &seen("Deleting", "Error", "the hook failed"), 20);
        assert_eq!((task.steps[2].state, task.steps[2].message.as_deref()), (Failed, Some("the hook failed")));
        tell(&mut task, &seen("Deleting", "Deleting", "again"), 30);
        assert_eq!((task.steps[2].state, task.steps[2].attempt), (Running, 2));
        tell(&mut task, &seen(FAILED, "Error", "gave up"), 40);
        assert_eq!(task.state, TaskState::Running, "the end goes on");
        tell(&mut task, &seen(DELETED, "", ""), 50);
        assert_eq!((states(&task)[2], task.state), (Succeeded, TaskState::Running), "the object is still there");
        assert!(apply(&mut task, &Event::Gone, 60));
        assert_eq!((task.state, task.ended_at), (TaskState::Succeeded, Some(60)));

        let mut task = removing();
        assert!(apply(&mut task, &Event::Gone, 10), "faster than any report");
        assert_eq!(states(&task), [Succeeded, Succeeded, Succeeded]);

        // The steps of an unfinished rollout are not those of the removal.
        let mut task = removing();
        let old = [step(HELM_STEP, Running, 1)];
        tell(&mut task, &Observed { steps: &old, ..seen("Deleting", "", "") }, 10);
        assert_eq!(task.steps[2].name, TEARDOWN_STEP);
        let new = [step("Run dump", Succeeded, 1), step(TEARDOWN_STEP, Running, 1)];
        tell(&mut task, &Observed { steps: &new, ..seen("Deleting", "", "") }, 20);
        assert_eq!((task.steps.len(), task.steps[2].name.as_str()), (4, "Run dump"));
    }
}
