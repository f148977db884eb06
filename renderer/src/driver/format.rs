//! The shape of `driver.styrmin.yml`. Unknown fields are errors, so that a slip is seen.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// The whole file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct DriverFile {
    /// `styrmin.io/v1`.
    pub api_version: String,
    /// `ApplicationDriver`.
    pub kind: String,
    /// The driver's name.
    pub metadata: Metadata,
    /// Everything else.
    pub spec: DriverSpec,
}

/// Identifies the driver.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metadata {
    /// DNS label of at most 40 characters.
    pub name: String,
}

/// What the driver can do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriverSpec {
    /// Semantic version of the driver.
    pub version: String,
    /// Range of application versions, for example `>=0.1, <1.0`.
    pub supported_versions: String,
    /// Application version when nobody names one.
    #[serde(default)]
    pub default_version: Option<String>,
    /// For people.
    #[serde(default)]
    pub info: Info,
    /// Where the chart comes from.
    pub helm: Helm,
    /// Parts of the application, by name.
    #[serde(default)]
    pub components: BTreeMap<String, Component>,
    /// Endpoints.
    #[serde(default)]
    pub services: Vec<Service>,
    /// What people can set.
    #[serde(default)]
    pub parameters: Vec<Parameter>,
    /// Work around a rollout.
    #[serde(default)]
    pub actions: Vec<Action>,
    /// Variables that people may want to set.
    #[serde(default)]
    pub env_vars: Vec<EnvVar>,
    /// Permitted overrides of command and args.
    #[serde(default)]
    pub container_overrides: Vec<ContainerOverride>,
}

/// For people.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Info {
    /// One sentence.
    pub description: String,
    /// Names.
    pub authors: Vec<String>,
    /// SPDX expression.
    pub license: Option<String>,
    /// Further reading.
    pub links: Vec<Link>,
}

/// A link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Its text.
    pub link: String,
    /// Its address.
    pub url: String,
}

/// Charts of the driver.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Helm {
    /// The application's chart.
    pub main: Chart,
}

/// One chart.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chart {
    /// A folder of the driver, `oci://…`, or the URL of an HTTP repository.
    pub location: String,
    /// Name of the chart in an HTTP repository.
    #[serde(default)]
    pub chart: Option<String>,
    /// Exact version of the chart.
    pub version: String,
}

/// A part of the application that can be started, stopped and scaled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Component {
    /// How its pods are found.
    pub identifier: Identifier,
    /// Default number of pods; absent for what cannot be scaled.
    #[serde(default)]
    pub replicas: Option<u32>,
    /// Containers that overrides may name; the first is the main one.
    #[serde(default)]
    pub containers: Vec<String>,
}

/// A label selector.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identifier {
    /// All of these labels.
    pub label: BTreeMap<String, String>,
}

impl Identifier {
    /// Whether pods with these labels are the component's.
    #[must_use]
    pub fn is_of(&self, labels: Option<&BTreeMap<String, String>>) -> bool {
        self.label.iter().all(|(key, value)| labels.and_then(|labels| labels.get(key)) == Some(value))
    }
}

/// An endpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// DNS label; part of the hostname.
    pub name: String,
    /// Protocol.
    pub kind: ServiceKind,
    /// Who can reach it.
    pub scope: Scope,
    /// Port of the Service.
    pub port: u16,
    /// Component that answers.
    pub component: String,
}

/// Protocol of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServiceKind {
    /// HTTP.
    Http,
    /// Any other TCP protocol.
    Tcp,
}

/// Who can reach a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// The environment only.
    Internal,
    /// The world, by a hostname.
    External,
}

/// What people can set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parameter {
    /// `[a-z][a-z0-9_]*`.
    pub name: String,
    /// For people.
    pub label: String,
    /// For people.
    #[serde(default)]
    pub description: String,
    /// Type.
    pub kind: ParameterKind,
    /// Value when nobody sets one; absent means required, `null` is a value.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub default: Option<Value>,
    /// Choices of an enum.
    #[serde(default)]
    pub values: Vec<Value>,
    /// JSON Schema, checked in addition to the kind.
    #[serde(default)]
    pub schema: Option<Value>,
    /// Encrypted, never shown.
    #[serde(default)]
    pub secret: bool,
}

/// Type of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are JSON's")]
pub enum ParameterKind {
    String,
    Integer,
    Number,
    Boolean,
    Enum,
    Array,
    Object,
}

/// Ordered work at one point of a rollout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Action {
    /// DNS label.
    pub name: String,
    /// On which occasion.
    pub hook: Hook,
    /// At which point of it.
    pub mode: Mode,
    /// For people.
    #[serde(default)]
    pub description: String,
    /// In this order.
    pub steps: Vec<Step>,
}

/// Occasion of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hook {
    /// First creation.
    Setup,
    /// New application or driver version.
    Upgrade,
    /// Before a teardown.
    BeforeDelete,
    /// On request.
    Job,
    /// Part of a backup.
    Backup,
    /// Part of a restore.
    Restore,
}

/// Point of an action within a rollout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Before the HelmRelease is written.
    Pre,
    /// After Flux is Ready.
    Core,
    /// After the services.
    Post,
}

/// One step of an action.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Runs a Job with the component's image unless another is named.
    RunJob(RunJob),
    /// Runs a command in a running container.
    Execute(Execute),
    /// Scales components to zero.
    StopComponents(Vec<String>),
    /// Scales components back.
    StartComponents(Vec<String>),
    /// Waits a while.
    Wait(Wait),
}

/// A Job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunJob {
    /// Whose pod template it borrows.
    pub component: String,
    /// Image other than the component's.
    #[serde(default)]
    pub image: Option<String>,
    /// Command.
    pub command: Vec<String>,
    /// Arguments.
    #[serde(default)]
    pub args: Vec<String>,
    /// Limit in seconds.
    #[serde(default = "default_step_timeout")]
    pub timeout_seconds: u32,
}

/// A command in a running container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Execute {
    /// Whose pod.
    pub component: String,
    /// Which container; the main one when absent.
    #[serde(default)]
    pub container: Option<String>,
    /// Command.
    pub command: Vec<String>,
    /// Limit in seconds.
    #[serde(default = "default_step_timeout")]
    pub timeout_seconds: u32,
}

/// A pause.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wait {
    /// Its length.
    pub seconds: u32,
}

/// A variable that people may want to set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnvVar {
    /// Its name.
    pub name: String,
    /// For people.
    #[serde(default)]
    pub description: String,
    /// Where it is set.
    pub level: EnvVarLevel,
    /// For which components.
    #[serde(default)]
    pub components: Vec<String>,
}

/// Where a variable is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnvVarLevel {
    /// On single components.
    Component,
    /// On the deployment.
    Deployment,
}

/// Permits overriding command or args of a container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerOverride {
    /// The component.
    pub component: String,
    /// The container.
    pub container: String,
    /// Whether its command may be overridden.
    #[serde(default)]
    pub command: bool,
    /// Whether its args may be overridden.
    #[serde(default)]
    pub args: bool,
    /// For people.
    #[serde(default)]
    pub description: String,
}

fn default_step_timeout() -> u32 {
    300
}

/// Tells `default: null` from no default.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}
