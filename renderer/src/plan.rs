//! The plan: workflow and ordered steps that lead from one spec to another.
//!
//! The server makes it for the preview and for the task's predicted steps, the operator for what
//! it does; both with this function, from what was last applied.

use crate::driver::format::{Action, Hook, Mode};
use crate::spec::{Lifecycle, StyrminDeploymentSpec};

/// The step of [`StepKind::Prerequisites`].
pub const PREREQUISITES: &str = "Create network policies and secrets";
/// The step of [`StepKind::HelmRelease`].
pub const HELM_RELEASE: &str = "Install or upgrade the HelmRelease";
/// The step of [`StepKind::Services`].
pub const SERVICES: &str = "Create services and middlewares";
/// The step of [`StepKind::Ready`].
pub const READY: &str = "Wait for the deployment to be ready";
/// The step of [`StepKind::Teardown`].
pub const TEARDOWN: &str = "Remove the deployment's resources and namespace";

/// Name of a step that every driver has; `None` for a driver's own.
#[must_use]
pub fn step_name(kind: &StepKind) -> Option<&'static str> {
    match kind {
        StepKind::Prerequisites => Some(PREREQUISITES),
        StepKind::HelmRelease => Some(HELM_RELEASE),
        StepKind::Services => Some(SERVICES),
        StepKind::Ready => Some(READY),
        StepKind::Teardown => Some(TEARDOWN),
        StepKind::Hook { .. } => None,
    }
}

/// What kind of change it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Workflow {
    /// Nothing to do.
    None,
    /// A new deployment.
    Create,
    /// Another configuration.
    Update,
    /// Another application or driver version.
    Upgrade,
    /// The end.
    Delete,
}

impl Workflow {
    /// Its name in the API and in commit messages.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Create => "create",
            Self::Update => "update",
            Self::Upgrade => "upgrade",
            Self::Delete => "delete",
        }
    }
}

/// Phase of the operator that a step belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepKind {
    /// Network policies and secrets.
    Prerequisites,
    /// The HelmRelease.
    HelmRelease,
    /// Services and aliases.
    Services,
    /// Readiness.
    Ready,
    /// One step of a driver's action.
    Hook {
        /// Name of the action.
        action: String,
        /// Its occasion.
        hook: Hook,
        /// Its point within the rollout.
        mode: Mode,
        /// Position among the action's steps, 0-based.
        index: usize,
        /// The requested run, for a job.
        run: Option<String>,
    },
    /// Teardown.
    Teardown,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanStep {
    /// For people; the reference's names where it has them.
    pub name: String,
    /// What it is.
    pub kind: StepKind,
}

/// Workflow and steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Kind of change.
    pub workflow: Workflow,
    /// In this order.
    pub steps: Vec<PlanStep>,
}

/// Plans the way from what was last applied (`None`: nothing) to `to` (`None`: the end).
/// `actions` are those of the driver of `to`, or of `from` when it is the end.
#[must_use]
pub fn plan(from: Option<&StyrminDeploymentSpec>, to: Option<&StyrminDeploymentSpec>, actions: &[Action]) -> Plan {
    let to = to.filter(|spec| spec.lifecycle != Lifecycle::Deleting);
    steps(workflow(from, to), from, to, actions)
}

/// The same when something was applied, but nobody knows what: the data is live, so nothing is set up, and what
/// another version may need is done.
#[must_use]
pub fn plan_from_unknown(to: Option<&StyrminDeploymentSpec>, actions: &[Action]) -> Plan {
    let to = to.filter(|spec| spec.lifecycle != Lifecycle::Deleting);
    let workflow = if to.is_some() { Workflow::Upgrade } else { Workflow::Delete };
    steps(workflow, None, to, actions)
}

/// Back to what was last applied, after a change of which nobody knows how far it came: the release and the services
/// are as they were again, and no action is run.
#[must_use]
pub fn plan_back() -> Plan {
    Plan { workflow: Workflow::None, ..steps(Workflow::Update, None, None, &[]) }
}

fn workflow(from: Option<&StyrminDeploymentSpec>, to: Option<&StyrminDeploymentSpec>) -> Workflow {
    match (from, to) {
        (_, None) => Workflow::Delete,
        (None, Some(_)) => Workflow::Create,
        (Some(from), Some(to)) if from.same_content(to) => Workflow::None,
        (Some(from), Some(to)) if from.driver != to.driver || from.application_version != to.application_version => {
            Workflow::Upgrade
        }
        _ => Workflow::Update,
    }
}

fn steps(
    workflow: Workflow,
    from: Option<&StyrminDeploymentSpec>,
    to: Option<&StyrminDeploymentSpec>,
    actions: &[Action],
) -> Plan {
    let step = |name: &str, kind: StepKind| PlanStep { name: name.to_owned(), kind };
    if workflow == Workflow::None {
        return Plan { workflow, steps: Vec::new() };
    }
    if workflow == Workflow::Delete {
        let mut steps = Vec::new();
        for mode in [Mode::Pre, Mode::Core, Mode::Post] {
            steps.extend(hooks(actions, Hook::BeforeDelete, mode));
        }
        steps.push(step(TEARDOWN, StepKind::Teardown));
        return Plan { workflow, steps };
    }
    let hook = match workflow {
        Workflow::Create => Some(Hook::Setup),
        Workflow::Upgrade => Some(Hook::Upgrade),
        _ => None,
    };
    let at = |mode: Mode| -> Vec<PlanStep> {
        let mut steps: Vec<PlanStep> = hook.into_iter().flat_map(|hook| hooks(actions, hook, mode)).collect();
        steps.extend(jobs(from, to, actions, mode));
        steps
    };
    let mut steps = vec![step(PREREQUISITES, StepKind::Prerequisites)];
    steps.extend(at(Mode::Pre));
    steps.push(step(HELM_RELEASE, StepKind::HelmRelease));
    steps.extend(at(Mode::Core));
    steps.push(step(SERVICES, StepKind::Services));
    steps.extend(at(Mode::Post));
    steps.push(step(READY, StepKind::Ready));
    Plan { workflow, steps }
}

fn hooks(actions: &[Action], hook: Hook, mode: Mode) -> Vec<PlanStep> {
    actions
        .iter()
        .filter(|action| action.hook == hook && action.mode == mode)
        .flat_map(|action| action_steps(action, None))
        .collect()
}

/// Steps of the job runs that `from` did not have.
fn jobs(
    from: Option<&StyrminDeploymentSpec>,
    to: Option<&StyrminDeploymentSpec>,
    actions: &[Action],
    mode: Mode,
) -> Vec<PlanStep> {
    let done = from.map(|spec| spec.jobs.as_slice()).unwrap_or_default();
    to.into_iter()
        .flat_map(|spec| &spec.jobs)
        .filter(|run| !done.iter().any(|finished| finished.id == run.id))
        .flat_map(|run| {
            actions
                .iter()
                .filter(|action| action.hook == Hook::Job && action.mode == mode && action.name == run.action)
                .flat_map(|action| action_steps(action, Some(run.id.clone())))
        })
        .collect()
}

fn action_steps(action: &Action, run: Option<String>) -> Vec<PlanStep> {
    (0..action.steps.len())
        .map(|index| PlanStep {
            name: if action.steps.len() == 1 {
                format!("Run {}", action.name)
            } else {
                format!("Run {} ({} of {})", action.name, index + 1, action.steps.len())
            },
            kind: StepKind::Hook {
                action: action.name.clone(),
                hook: action.hook,
                mode: action.mode,
                index,
                run: run.clone(),
            },
        })
        .collect()
}
