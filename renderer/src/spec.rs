//! `StyrminDeployment`: the one custom resource type, its schema and its YAML.

#![expect(clippy::duplicated_attributes, reason = "each printer column has a type of its own")]

use crate::names::{DeploymentId, EnvironmentId};
use crate::{canonical, layout, yaml};
use kube::CustomResource;
use kube::core::CustomResourceExt;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Annotation with the sequence of the instance that the object holds.
pub const SEQUENCE_ANNOTATION: &str = "styrmin.io/instance-sequence";
/// Annotation that keeps kustomize-controller from replacing `${…}` in our values.
pub const NO_SUBSTITUTE: (&str, &str) = ("kustomize.toolkit.fluxcd.io/substitute", "disabled");
/// Label with the deployment's id.
pub const DEPLOYMENT_LABEL: &str = "styrmin.io/deployment-id";
/// Label with the environment's id, on Styrmin's own objects.
pub const ENVIRONMENT_LABEL: &str = "styrmin.io/environment-id";

/// What should run.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "styrmin.io",
    version = "v1alpha1",
    kind = "StyrminDeployment",
    plural = "styrmindeployments",
    shortname = "sdep",
    category = "styrmin",
    namespaced,
    status = "StyrminDeploymentStatus",
    derive = "PartialEq",
    printcolumn(name = "Application", type_ = "string", json_path = ".spec.driver.name"),
    printcolumn(name = "Version", type_ = "string", json_path = ".spec.applicationVersion"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.displayState"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct StyrminDeploymentSpec {
    /// Id of the deployment.
    pub deployment_id: DeploymentId,
    /// Id of the instance (a UUID).
    pub instance_id: String,
    /// What the deployment should be doing.
    pub lifecycle: Lifecycle,
    /// The driver version.
    pub driver: DriverRef,
    /// Version of the application.
    pub application_version: String,
    /// Every resolved value.
    #[schemars(schema_with = "context_schema")]
    pub context: Value,
    /// Requested runs of jobs, each run once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub jobs: Vec<JobRun>,
}

/// Target of the lifecycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Lifecycle {
    /// Runs.
    Running,
    /// Kept, without pods.
    Stopped,
    /// A removal; the server never writes it.
    Deleting,
}

/// A driver version, by content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DriverRef {
    /// Name of the driver.
    pub name: String,
    /// Version of the driver.
    pub version: String,
    /// Digest of its files; the driver's ConfigMap is named by it.
    pub digest: String,
}

/// A requested run of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct JobRun {
    /// Tells runs apart.
    pub id: String,
    /// Name of the driver's action.
    pub action: String,
}

/// What the operator says.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct StyrminDeploymentStatus {
    /// Where the rollout is.
    pub phase: Option<String>,
    /// In one word, for people.
    pub display_state: Option<String>,
    /// In a sentence, for people.
    pub message: Option<String>,
    /// Instance that the operator last acted on.
    pub instance_id: Option<String>,
    /// Digest of the spec that the operator last acted on.
    pub spec_digest: Option<String>,
    /// When the HelmRelease of this rollout was written (RFC 3339).
    pub rollout_started_at: Option<String>,
    /// Since when Flux is asked to try again what it has given up on (RFC 3339), until it is ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub release_reset_at: Option<String>,
    /// What the HelmRelease was rendered to when it became ready: tells a change of ours from an edit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rendered_release: Option<RenderedRelease>,
    /// Digest of the spec that was last applied with success. What it was is in a ControllerRevision; this says
    /// that there has to be one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub applied_digest: Option<String>,
    /// Generation that the operator last acted on.
    pub observed_generation: Option<i64>,
    /// Standard conditions.
    pub conditions: Vec<Condition>,
    /// Steps of the plan.
    pub steps: Vec<StepStatus>,
    /// Steps of actions that changes have begun which were never applied, and that are not among `steps`: one that
    /// failed is another attempt when a later plan has it again.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub earlier_steps: Vec<StepStatus>,
    /// How often drift was put back.
    pub drift_corrections: Option<u32>,
    /// How the declared services are reached, as the chart's own Services showed it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub endpoints: Vec<Endpoint>,
    /// Names of the chart's own Services in the application's namespace: no alias may take one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub chart_services: Vec<String>,
    /// Components that a step of a driver's action stopped, until another starts them or the rollout ends.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stopped_components: Vec<String>,
    /// Requested runs of jobs that have ended, well or not: none is run twice.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub finished_jobs: Vec<String>,
    /// Those of `finished_jobs` that did not end well.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failed_jobs: Vec<String>,
    /// What was said once and stays said, because Flux removes annotations that are not in Git.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latched: Option<Latched>,
}

/// Digests of a HelmRelease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RenderedRelease {
    /// Of where its values are, which are named by their content.
    pub values: String,
    /// Of the rest.
    pub rest: String,
}

/// How a declared service is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Endpoint {
    /// Name of the service.
    pub name: String,
    /// Its declared port.
    pub port: u16,
    /// Port of the pods: a number or a name.
    pub target_port: String,
    /// Components whose pods answer.
    pub components: Vec<String>,
    /// The chart has a Service of this name.
    #[serde(default)]
    pub from_chart: bool,
}

/// Annotations that the operator has seen. Each names the UID of the object that it means.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Latched {
    /// `styrmin.io/confirm-delete`: the application may go with the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confirm_delete: Option<String>,
    /// `styrmin.io/force-delete`: it may go without its hooks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub force_delete: Option<String>,
    /// `styrmin.io/skip-teardown`: the object may go, and the application stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skip_teardown: Option<String>,
}

/// A standard condition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Ready, HelmReleaseReady or HelmReleaseRemediated.
    pub r#type: String,
    /// True, False or Unknown.
    pub status: String,
    /// One word.
    pub reason: String,
    /// A sentence.
    pub message: String,
    /// When `status` last changed (RFC 3339).
    pub last_transition_time: String,
    /// Generation that it speaks of.
    #[serde(default)]
    pub observed_generation: Option<i64>,
}

/// One step of the plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StepStatus {
    /// Its name.
    pub name: String,
    /// Pending, Running, Succeeded, Failed or Skipped.
    pub state: String,
    /// 1 for the first.
    pub attempt: u32,
    /// For a step of a driver's action: what tells it from every other one. A step that ended well under
    /// this key is not run again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// For a step of a run that somebody asked for: its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// RFC 3339.
    #[serde(default)]
    pub started_at: Option<String>,
    /// RFC 3339.
    #[serde(default)]
    pub ended_at: Option<String>,
    /// For people.
    #[serde(default)]
    pub message: Option<String>,
}

/// The context is one value for server-side apply: whoever applies it owns all of it, keys that
/// vanish are removed, and managedFields stays small.
fn context_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "description": "Every resolved value.",
        "x-kubernetes-map-type": "atomic",
        "x-kubernetes-preserve-unknown-fields": true,
    })
}

impl StyrminDeploymentSpec {
    /// Digest of the spec as the API server gives it back.
    #[must_use]
    pub fn digest(&self) -> String {
        canonical::digest(&self.to_value())
    }

    /// Digest of what it asks for: of everything but the instance's own id and requested runs of jobs.
    #[must_use]
    pub fn content_digest(&self) -> String {
        let mut value = self.to_value();
        if let Some(fields) = value.as_object_mut() {
            fields.retain(|name, _| name != "instanceId" && name != "jobs");
        }
        canonical::digest(&value)
    }

    /// A deployment of Styrmin's own.
    #[must_use]
    pub fn is_internal(&self) -> bool {
        self.context["deployment"]["internal"] == true
    }

    /// As JSON.
    #[must_use]
    pub fn to_value(&self) -> Value {
        // The type has only string keys and finite numbers, so this cannot fail.
        serde_json::to_value(self).unwrap_or_default()
    }

    /// Whether two specs ask for the same: everything but the instance's own id.
    #[must_use]
    pub fn same_content(&self, other: &Self) -> bool {
        let Self { deployment_id, instance_id: _, lifecycle, driver, application_version, context, jobs } = self;
        *deployment_id == other.deployment_id
            && *lifecycle == other.lifecycle
            && *driver == other.driver
            && *application_version == other.application_version
            && *jobs == other.jobs
            && *context == other.context
    }
}

/// The StyrminDeployment as it is committed.
#[must_use]
pub fn object(spec: &StyrminDeploymentSpec, environment: &EnvironmentId, sequence: u64) -> Value {
    json!({
        "apiVersion": "styrmin.io/v1alpha1",
        "kind": "StyrminDeployment",
        "metadata": {
            "annotations": {
                SEQUENCE_ANNOTATION: sequence.to_string(),
                NO_SUBSTITUTE.0: NO_SUBSTITUTE.1,
            },
            "labels": {
                DEPLOYMENT_LABEL: spec.deployment_id,
                ENVIRONMENT_LABEL: environment,
                layout::MANAGED_BY.0: layout::MANAGED_BY.1,
            },
            "name": spec.deployment_id.object_name(),
            "namespace": environment.namespace(),
        },
        "spec": spec.to_value(),
    })
}

/// What a committed StyrminDeployment file says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// The instance.
    pub instance_id: String,
    /// Its sequence; 0 when the annotation is missing or no number.
    pub sequence: u64,
}

/// Reads a committed StyrminDeployment file.
///
/// # Errors
/// When it is not one.
pub fn read_committed(text: &str) -> Result<Committed, yaml::YamlError> {
    let value: Value = yaml::from_str(text)?;
    let wrong = |message: &str| yaml::YamlError { line: 1, message: message.to_owned() };
    if value["kind"] != "StyrminDeployment" {
        return Err(wrong("is not a StyrminDeployment"));
    }
    let instance_id = value["spec"]["instanceId"].as_str().ok_or_else(|| wrong("spec.instanceId is missing"))?;
    let sequence = value["metadata"]["annotations"][SEQUENCE_ANNOTATION]
        .as_str()
        .and_then(|text| text.parse().ok())
        .unwrap_or_default();
    Ok(Committed { instance_id: instance_id.to_owned(), sequence })
}

/// The CustomResourceDefinition.
#[must_use]
pub fn crd() -> Value {
    // Generated from the types above: no map with keys other than strings, so this cannot fail.
    serde_json::to_value(StyrminDeployment::crd()).unwrap_or_default()
}
