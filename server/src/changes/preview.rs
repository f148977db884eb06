//! What a change would lead to, for whoever thinks of it: the same computation as the change itself, compared
//! with what the newest instance says. No I/O.

use super::compute::{self, Computation, Computed};
use super::{ChangeError, Result};
use crate::store::{Instance, InstanceState, Lifecycle};
use anyhow::anyhow;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use styrmin_renderer::config::Level;
use styrmin_renderer::diff;
use styrmin_renderer::driver::Driver;
use styrmin_renderer::driver::format::Mode;
use styrmin_renderer::names::EnvironmentId;
use styrmin_renderer::objects::{self, ReleaseSettings};
use styrmin_renderer::plan::{self, StepKind};
use styrmin_renderer::{network, spec, yaml};

/// What a change would lead to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Preview {
    /// create, update, upgrade or delete; `None`: nothing changes for the cluster.
    pub workflow: Option<String>,
    /// Names of the task's steps, in order.
    pub steps: Vec<String>,
    /// Values that differ from the newest instance, and where each new one is set.
    pub values: Vec<(diff::Change, Option<Level>)>,
    /// `styrmindeployment.yaml` as a unified diff. Ids of instances are left out.
    pub document: String,
    /// Kubernetes objects that differ. Those of the chart itself are Helm's.
    pub objects: Vec<ObjectChange>,
    /// What somebody should know before.
    pub warnings: Vec<String>,
}

/// A Kubernetes object that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectChange {
    /// Its kind.
    pub kind: String,
    /// Its namespace; empty for an object of the cluster.
    pub namespace: String,
    /// Its name. Names that follow the content are without that part.
    pub name: String,
    /// It would be new.
    pub added: bool,
    /// It would be gone.
    pub removed: bool,
    /// Its YAML as a unified diff.
    pub diff: String,
}

/// How long the search for the shortest difference of two texts may take; then it is a longer one.
const DIFF_LIMIT: Duration = Duration::from_secs(1);

/// The change of a text as a unified diff; empty when nothing differs. Work for a thread.
#[must_use]
pub fn unified(name: &str, before: &str, after: &str) -> String {
    let header = (format!("a/{name}"), format!("b/{name}"));
    let diff = similar::TextDiff::configure().timeout(DIFF_LIMIT).diff_lines(before, after);
    diff.unified_diff().header(&header.0, &header.1).to_string()
}

pub(super) fn preview(computation: &Computation) -> Result<Preview> {
    let Computation { rows, edits, .. } = computation;
    // Only an end goes without one.
    let driver = super::request::driver_of(rows, edits).ok();
    let Computed { change, .. } = compute::run(computation)?;
    let mut preview = Preview::default();
    let environment: EnvironmentId = super::parse_id("environment", &rows.environment.id)?;
    let before = rows.newest.as_ref().filter(|newest| newest.document.is_some());
    let Some((instance, task)) = &change.instance else {
        return Ok(preview);
    };
    if let Some(newest) = &rows.newest
        && matches!(newest.state, InstanceState::Pending | InstanceState::Committed)
    {
        preview.warnings.push(format!("task {} is on its way; it will end superseded", newest.task_id));
    }
    let after = Some(instance).filter(|instance| instance.document.is_some());
    preview.workflow = Some(instance.workflow.clone());
    preview.steps = task.steps.iter().map(|step| step.name.clone()).collect();
    preview.values = match (before, after) {
        (_, Some(after)) => diff::specs(before.map(|before| &before.spec), &after.spec),
        (_, None) => Vec::new(),
    }
    .into_iter()
    .map(|one| {
        let pointer = one.pointer.strip_prefix("/context").unwrap_or_default();
        let configured = pointer.strip_prefix("/instance").filter(|rest| rest.starts_with("/config/"));
        let origin = instance.origins.get(configured.unwrap_or(pointer)).copied();
        (one, origin)
    })
    .collect();
    preview.document = unified("styrmindeployment.yaml", &text(before, &environment)?, &text(after, &environment)?);
    let objects = |instance: Option<&Instance>, driver: Option<&Arc<Driver>>| match (instance, driver) {
        (Some(instance), Some(driver)) => rendered(instance, driver, &environment),
        _ => Ok(Objects::new()),
    };
    if before.is_some() && rows.driver.is_none() {
        preview
            .warnings
            .push("what runs was made by a driver that this release cannot use: its objects are left out".into());
    }
    preview.objects = compare(&objects(before, rows.driver.as_ref())?, &objects(after, driver.as_ref())?)?;
    preview.warnings.extend(warnings(rows, edits, instance, driver.as_deref()));
    Ok(preview)
}

/// What is committed, without what differs in any case.
fn text(instance: Option<&Instance>, environment: &EnvironmentId) -> Result<String> {
    let Some(instance) = instance else { return Ok(String::new()) };
    let mut object = spec::object(&instance.spec, environment, 0);
    if let Some(spec) = object["spec"].as_object_mut() {
        spec.remove("instanceId");
    }
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("annotations");
    }
    yaml(&object)
}

fn yaml(object: &Value) -> Result<String> {
    yaml::to_string(object).map_err(|error| ChangeError::Internal(anyhow!("a preview: {error}")))
}

type Objects = BTreeMap<(String, String, String), Value>;

/// What the operator will make of an instance, as far as it can be known without the cluster. A secret shows as
/// its fingerprint.
fn rendered(instance: &Instance, driver: &Arc<Driver>, environment: &EnvironmentId) -> Result<Objects> {
    let spec = &instance.spec;
    let internal = |what: &str, error: String| ChangeError::Internal(anyhow!("a preview of {what}: {error}"));
    let values = objects::helm_values(spec, driver, &|reference| reference.fingerprint.clone());
    let values = values.map_err(|error| internal("the values", error.to_string()))?;
    let mut secret = objects::values_secret(spec, environment, &values)
        .map_err(|error| internal("the values", error.to_string()))?;
    // Its name follows its content.
    let stable = format!("{}-values", spec.deployment_id.object_name());
    secret["metadata"]["name"] = stable.into();
    let release =
        objects::helm_release(spec, environment, driver, &secret, ReleaseSettings::default(), &BTreeSet::new());
    let endpoints = network::declared(&driver.file.spec);
    let mut all = vec![objects::application_namespace(spec, environment), secret, release];
    all.extend(network::policies(spec, environment, &driver.file.spec, &endpoints));
    all.extend(network::services(spec, environment, &driver.file.spec, &endpoints));
    let part =
        |object: &Value, pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    Ok(all
        .into_iter()
        .map(|object| {
            let key = (part(&object, "/kind"), part(&object, "/metadata/namespace"), part(&object, "/metadata/name"));
            (key, object)
        })
        .collect())
}

fn compare(old: &Objects, new: &Objects) -> Result<Vec<ObjectChange>> {
    let keys: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let mut changes = Vec::new();
    for key in keys {
        let (before, after) = (old.get(key), new.get(key));
        if before == after {
            continue;
        }
        let text = |object: Option<&Value>| object.map_or_else(|| Ok(String::new()), yaml);
        let (kind, namespace, name) = key.clone();
        let place: Vec<&str> =
            [&kind, &namespace, &name].into_iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
        let diff = unified(&place.join("/"), &text(before)?, &text(after)?);
        let (added, removed) = (before.is_none(), after.is_none());
        changes.push(ObjectChange { kind, namespace, name, added, removed, diff });
    }
    Ok(changes)
}

fn warnings(
    rows: &compute::Rows,
    edits: &[compute::Edit],
    instance: &Instance,
    driver: Option<&Driver>,
) -> Vec<String> {
    let mut warnings = Vec::new();
    let is_delete = edits.iter().any(|edit| edit.delete);
    if is_delete {
        warnings.push("the application and its namespace are removed, with everything in it".to_owned());
    }
    if let (Some(driver), Some(known)) = (driver, &rows.driver)
        && driver.version < known.version
    {
        warnings.push(format!("driver {} goes back from {} to {}", driver.name(), known.version, driver.version));
    }
    if edits.iter().any(|edit| edit.restore.is_some()) {
        warnings.push(
            "what cluster and environment have set since then comes back with the next change or fan-out".to_owned(),
        );
    }
    let stays = rows.deployment.lifecycle == Lifecycle::Stopped && instance.spec.lifecycle == spec::Lifecycle::Stopped;
    if stays && !is_delete {
        warnings.push("the deployment is stopped, and stays so".to_owned());
    }
    let next = instance.document.is_some().then_some(&instance.spec);
    let actions = driver.map(|driver| driver.file.spec.actions.as_slice()).unwrap_or_default();
    let plan = plan::plan(rows.active.as_ref().map(|active| &active.spec), next, actions);
    for step in plan.steps {
        if let StepKind::Hook { action, mode: Mode::Pre, index: 0, run: None, .. } = step.kind {
            warnings.push(format!("\"{action}\" runs before anything else; when it fails, the release is not touched"));
        }
    }
    warnings
}
