//! The task state machine: a task, an event and a time give the task as it is then.
//!
//! Pure: no I/O, no clock, no store. A task that has ended never moves again.

use crate::store::{Millis, Step, StepState, Task, TaskState};
use styrmin_renderer::plan::{Plan, Workflow};

/// First step of a change.
pub const WRITE_STEP: &str = "Write the StyrminDeployment resource";
/// First step of a removal.
pub const REMOVE_STEP: &str = "Remove the StyrminDeployment resource";
/// Second step: proved by the object in the cluster.
pub const FLUX_STEP: &str = "Wait for Flux to apply the commit";

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
    /// A newer instance takes its place.
    Superseded {
        /// Sequence of the newer one.
        by: i64,
    },
}

/// The steps that a plan predicts, the first of them begun.
#[must_use]
pub fn predict(task: &str, plan: &Plan, now: Millis) -> Vec<Step> {
    let first = if plan.workflow == Workflow::Delete { REMOVE_STEP } else { WRITE_STEP };
    let names = [first, FLUX_STEP].into_iter().chain(plan.steps.iter().map(|step| step.name.as_str()));
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

/// Moves `task`; `true` when something changed.
pub fn apply(task: &mut Task, event: &Event<'_>, now: Millis) -> bool {
    if task.state != TaskState::Running {
        return false;
    }
    match event {
        Event::Pushed { .. } | Event::NothingToWrite => {
            let Some(first) = task.steps.first_mut().filter(|step| step.state == StepState::Running) else {
                return false;
            };
            first.state = StepState::Succeeded;
            first.message = Some(match event {
                Event::Pushed { revision, branch } => {
                    format!("Commit {} on {branch}", revision.get(..10).unwrap_or(revision))
                }
                _ => "The repository needs no change".to_owned(),
            });
            first.ended_at = Some(now);
            if let Some(next) = task.steps.get_mut(1).filter(|step| step.state == StepState::Pending) {
                next.state = StepState::Running;
                next.started_at = Some(now);
            }
        }
        Event::Superseded { by } => {
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
            task.state = TaskState::Superseded;
            task.message = Some(format!("Superseded by change {by} of the deployment"));
            task.ended_at = Some(now);
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use styrmin_renderer::plan::{PlanStep, StepKind};

    fn task() -> Task {
        let plan = Plan {
            workflow: Workflow::Create,
            steps: vec![PlanStep { name: "Install".into(), kind: StepKind::HelmRelease }],
        };
        Task {
            id: "t".into(),
            deployment_id: "d".into(),
            instance_id: "i".into(),
            sequence: 1,
            workflow: "create".into(),
            state: TaskState::Running,
            message: None,
            author_name: "Ann".into(),
            author_email: "ann@example.com".into(),
            version: 1,
            created_at: 1,
            ended_at: None,
            steps: predict("t", &plan, 1),
        }
    }

    fn states(task: &Task) -> Vec<StepState> {
        task.steps.iter().map(|step| step.state).collect()
    }

    #[test]
    fn a_push_ends_the_first_step_and_begins_the_second() {
        use StepState::{Pending, Running, Succeeded};
        let mut task = task();
        assert_eq!(states(&task), [Running, Pending, Pending]);
        let pushed = Event::Pushed { revision: "0123456789abcdef", branch: "main" };
        assert!(apply(&mut task, &pushed, 5));
        assert_eq!(states(&task), [Succeeded, Running, Pending]);
        assert_eq!((task.steps[0].ended_at, task.steps[1].started_at), (Some(5), Some(5)));
        assert_eq!(task.steps[0].message.as_deref(), Some("Commit 0123456789 on main"));
        assert!(!apply(&mut task, &pushed, 6), "told twice, moved once");
    }

    #[test]
    fn a_superseded_task_ends_and_never_moves_again() {
        use StepState::{Skipped, Succeeded};
        let mut task = task();
        let pushed = Event::Pushed { revision: "0123456789abcdef", branch: "main" };
        apply(&mut task, &pushed, 5);
        assert!(apply(&mut task, &Event::Superseded { by: 3 }, 7));
        assert_eq!((task.state, task.ended_at), (TaskState::Superseded, Some(7)));
        assert_eq!(states(&task), [Succeeded, Skipped, Skipped]);
        let before = task.clone();
        assert!(!apply(&mut task, &pushed, 8) && !apply(&mut task, &Event::Superseded { by: 4 }, 8));
        assert_eq!(task, before);
    }
}
