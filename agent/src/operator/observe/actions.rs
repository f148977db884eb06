//! How far the step of a driver's action is that comes next or runs. Reads only.

use super::super::hook::{Execution, GRACE, HookSeen, HookState};
use super::super::steps::{self, Base};
use super::super::{Context, OperatorError, Result, status};
use super::{Secrets, masked};
use crate::{clock, kept};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Api, ListParams, LogParams};
use serde_json::Value;
use styrmin_renderer::driver::Driver;
use styrmin_renderer::driver::format::{Action, Component, Execute, RunJob, Step};
use styrmin_renderer::hooks;
use styrmin_renderer::names::EnvironmentId;
use styrmin_renderer::plan::Plan;
use styrmin_renderer::spec::{StyrminDeployment, StyrminDeploymentStatus};

/// How much of a failed Job's log is read.
const LOG: LogParams = LogParams {
    container: None,
    follow: false,
    limit_bytes: Some(64 << 10),
    pretty: false,
    previous: false,
    since_seconds: None,
    since_time: None,
    tail_lines: Some(10),
    timestamps: false,
};

/// Pods of one component that are named at most.
const PODS: u32 = 10;

/// Where a step is looked for.
pub(super) struct Place<'a> {
    pub(super) context: &'a Context,
    pub(super) object: &'a StyrminDeployment,
    pub(super) status: &'a StyrminDeploymentStatus,
    pub(super) environment: &'a EnvironmentId,
    pub(super) driver: &'a Driver,
    pub(super) secrets: &'a Secrets,
}

/// The step that runs, whatever change it belongs to, when something is known of it.
pub(super) async fn running(
    context: &Context,
    object: &StyrminDeployment,
    status: &StyrminDeploymentStatus,
    secrets: &Secrets,
) -> Result<Option<HookSeen>> {
    let Some((_, key, attempt)) = steps::running_hook(status) else { return Ok(None) };
    let state = known(context, object, secrets, (key, attempt)).await?;
    Ok(state.map(|state| HookSeen { key: key.into(), attempt, state }))
}

/// The step of `plan` that comes next.
pub(super) async fn next(place: &Place<'_>, plan: &Plan, base: Base<'_>) -> Result<Option<HookSeen>> {
    let Ok(Some(current)) = steps::current(place.status, plan, base) else { return Ok(None) };
    let step = &place.status.steps[current.index];
    let Some(key) = step.key.clone() else { return Ok(None) };
    let Some((action, what)) = hooks::step(&place.driver.file.spec, &current.kind) else { return Ok(None) };
    // The others are told from the status and the release.
    if !matches!(what, Step::RunJob(_) | Step::Execute(_)) {
        return Ok(None);
    }
    let attempt = step.attempt;
    let state = match known(place.context, place.object, place.secrets, (&key, attempt)).await? {
        Some(state) => state,
        None => beginning(place, action, what, (&key, attempt)).await?,
    };
    Ok(Some(HookSeen { key, attempt, state }))
}

/// The pods that are still there of components that the step which runs stops, terminating ones included: what comes
/// next shall be alone. Flux calls a release ready that wants no pods, however long theirs take to end.
pub(super) async fn still_there(place: &Place<'_>, plan: &Plan, base: Base<'_>) -> Result<Vec<String>> {
    let Ok(Some(current)) = steps::current(place.status, plan, base) else { return Ok(Vec::new()) };
    let spec = &place.driver.file.spec;
    let Some((_, Step::StopComponents(names))) = hooks::step(spec, &current.kind) else { return Ok(Vec::new()) };
    if !steps::has_begun(place.status, current.index) {
        return Ok(Vec::new());
    }
    let namespace = place.object.spec.deployment_id.object_name();
    let api: Api<Pod> = Api::namespaced(place.context.client.clone(), &namespace);
    let mut found = Vec::new();
    for component in names.iter().filter_map(|name| spec.components.get(name)) {
        let of_it = ListParams::default().labels(&labels_of(component)).limit(PODS);
        let pods = api.list(&of_it).await.map_err(OperatorError::of(format!("listing pods in {namespace}")))?;
        let has_ended = |pod: &Pod| {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            matches!(phase, Some("Succeeded" | "Failed"))
        };
        found.extend(pods.iter().filter(|pod| !has_ended(pod)).map(|pod| pod.name_any()));
    }
    Ok(found)
}

/// The labels of a component's pods, as a selector.
fn labels_of(component: &Component) -> String {
    let labels = component.identifier.label.iter().map(|(label, value)| format!("{label}={value}"));
    labels.collect::<Vec<_>>().join(",")
}

/// What a command or a Job says of itself.
async fn known(
    context: &Context,
    object: &StyrminDeployment,
    secrets: &Secrets,
    (key, attempt): (&str, u32),
) -> Result<Option<HookState>> {
    if let Some(state) = context.executions.get(object, key, attempt) {
        return Ok(Some(state));
    }
    let namespace = object.spec.deployment_id.object_name();
    let name = hooks::job_name(key, attempt);
    let api: Api<Job> = Api::namespaced(context.client.clone(), &namespace);
    let found = api.get_opt(&name).await.map_err(OperatorError::of(format!("reading Job {namespace}/{name}")))?;
    let Some(job) = found else { return Ok(None) };
    let is_earlier = job.metadata.creation_timestamp < object.metadata.creation_timestamp;
    let conditions = job.status.and_then(|status| status.conditions).unwrap_or_default();
    let is = |kind: &str| conditions.iter().find(|condition| condition.type_ == kind && condition.status == "True");
    if is("Complete").is_some() {
        return Ok(Some(HookState::Succeeded));
    }
    let Some(failed) = is("Failed") else {
        // A pod on a node that is lost ends late; nothing newer waits for it without end.
        // By this clock, which is another one than the API server's.
        let steps = object.status.iter().flat_map(|status| &status.steps);
        let of_it = steps.filter(|step| step.key.as_deref() == Some(key) && step.attempt == attempt);
        let began = of_it.filter_map(|step| step.started_at.as_deref()?.parse().ok()).next();
        let began: Timestamp =
            began.unwrap_or_else(|| job.metadata.creation_timestamp.map_or_else(clock::now, |at| at.0));
        let limit = job.spec.and_then(|spec| spec.active_deadline_seconds).unwrap_or_default() + i64::from(GRACE);
        let over = clock::now() > began + SignedDuration::from_secs(limit);
        let late = || HookState::Failed(format!("Job {namespace}/{name} did not end within {limit} s"));
        return Ok(Some(if over { late() } else { HookState::Running }));
    };
    if is_earlier {
        return Ok(Some(HookState::Earlier));
    }
    let why = failed.message.as_deref().or(failed.reason.as_deref()).unwrap_or("it failed");
    let log = masked(&log(context, &namespace, &name).await.unwrap_or_default(), secrets);
    let (why, log) = (masked(why, secrets), status::last_words(&log));
    let separator = if log.is_empty() { "" } else { "\n" };
    Ok(Some(HookState::Failed(format!("Job {namespace}/{name} failed: {why}{separator}{log}"))))
}

/// The last lines that a Job wrote, when they can be read: what it ran on may be gone already.
async fn log(context: &Context, namespace: &str, job: &str) -> Option<String> {
    let api: Api<Pod> = Api::namespaced(context.client.clone(), namespace);
    let of_job = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={job}"));
    let mut pods = api.list_metadata(&of_job).await.ok()?.items;
    pods.sort_by_key(|pod| pod.metadata.creation_timestamp.clone());
    api.logs(&pods.last()?.name_any(), &LOG).await.ok()
}

/// What would begin a step.
async fn beginning(place: &Place<'_>, action: &Action, step: &Step, which: (&str, u32)) -> Result<HookState> {
    match step {
        Step::RunJob(run) => {
            let template = template(place, run).await?;
            let spec = &place.object.spec;
            let job = hooks::job(spec, place.environment, place.driver, action, run, which, template.as_ref());
            Ok(job.map_or_else(HookState::Impossible, HookState::Job))
        }
        Step::Execute(execute) => command(place, execute).await,
        Step::StopComponents(_) | Step::StartComponents(_) | Step::Wait(_) => Ok(HookState::Unknown),
    }
}

/// The pod template of a component's workload, when the chart is installed.
async fn template(place: &Place<'_>, run: &RunJob) -> Result<Option<Value>> {
    let Some(component) = place.driver.file.spec.components.get(&run.component) else { return Ok(None) };
    let found = super::templates(place.context, &place.object.spec).await?.find(|template| {
        component.identifier.is_of(template.metadata.as_ref().and_then(|metadata| metadata.labels.as_ref()))
    });
    Ok(found.and_then(|template| serde_json::to_value(template).ok()))
}

/// A command in a ready pod of a component.
async fn command(place: &Place<'_>, execute: &Execute) -> Result<HookState> {
    let name = &execute.component;
    let Some(component) = place.driver.file.spec.components.get(name) else {
        return Ok(HookState::Impossible(format!("the driver has no component {name}")));
    };
    let Some(container) = execute.container.as_ref().or(component.containers.first()) else {
        return Ok(HookState::Impossible(format!("component {name} names no container to run the command in")));
    };
    let namespace = place.object.spec.deployment_id.object_name();
    let api: Api<Pod> = Api::namespaced(place.context.client.clone(), &namespace);
    let pods = api.list(&ListParams::default().labels(&labels_of(component))).await;
    let mut pods = pods.map_err(OperatorError::of(format!("listing pods in {namespace}")))?.items;
    pods.retain(kept::is_ready);
    pods.sort_by_key(|pod| pod.metadata.name.clone());
    Ok(match pods.first() {
        None => HookState::NotYet(format!("no pod of component {name} is ready")),
        Some(pod) => HookState::Command(Execution {
            key: String::new(),
            attempt: 0,
            namespace,
            pod: pod.name_any(),
            container: container.clone(),
            command: execute.command.clone(),
            timeout_seconds: execute.timeout_seconds,
        }),
    })
}
