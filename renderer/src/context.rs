//! The context: every resolved value of one deployment, as one tree.
//!
//! It is what values expressions read, what travels in the StyrminDeployment, and what two
//! instances are compared by. It therefore holds only what decides the outcome: the merged
//! configuration, not the levels it came from. A secret parameter is
//! `{secretRef: {name, key, fingerprint}}`, never its text.

use crate::config::{self, Config, Level, Object, Resolved};
use crate::driver::Driver;
use crate::driver::format::Scope;
use crate::names::{self, ClusterId, DeploymentId, EnvironmentId};
use crate::{Problems, canonical, yaml};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Names at the top of the context.
pub const ROOTS: [&str; 8] =
    ["app", "cluster", "components", "deployment", "environment", "instance", "parameters", "services"];

/// Most bytes of a context as compact JSON: with the rest of the object and what Kubernetes adds
/// it stays below what etcd takes.
pub const SIZE_MAX: usize = 768 << 10;

/// Id and name of a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Named<Id> {
    /// Its id.
    pub id: Id,
    /// Its name.
    pub name: String,
}

/// Where a secret value lies in the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecretRef {
    /// Secret in the environment's namespace.
    pub name: String,
    /// Key in it.
    pub key: String,
    /// Keyed hash of the value: tells that it changed, and nothing else. Of a Secret that is not ours, how it comes
    /// to be there: [`EXISTING`] or [`EXTERNAL`].
    pub fingerprint: String,
}

/// A Secret that somebody keeps in the environment's namespace.
pub const EXISTING: &str = "existingSecret";
/// A Secret there that an ExternalSecret of the same name fills.
pub const EXTERNAL: &str = "externalSecret";

/// A secret parameter that names a Secret of somebody else's: `{existingSecret: {name, key}}` or
/// `{externalSecret: {name, key}}`. `None`: it is a value.
///
/// # Errors
/// What is wrong with the reference.
pub fn outside_secret(value: &Value) -> Option<Result<SecretRef, String>> {
    let object = value.as_object().filter(|object| object.len() == 1)?;
    let (kind, place) = object.iter().next().filter(|(kind, _)| [EXISTING, EXTERNAL].contains(&kind.as_str()))?;
    let text = |field: &str| place[field].as_str().unwrap_or_default().to_owned();
    let (name, key) = (text("name"), text("key"));
    let is_key = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    let fields = place.as_object().map_or(0, Map::len);
    Some(if fields != 2 || names::dns_name(&name).is_err() {
        Err(format!("{kind} is {{name, key}}: the name of a Secret in the environment's namespace, and a key in it"))
    } else if name.starts_with("styrmin-") {
        Err(format!("{kind}: \"{name}\" is one of Styrmin's own; name another Secret"))
    } else if key.is_empty() || key.len() > 253 || !key.chars().all(is_key) {
        Err(format!("{kind}: \"{key}\" is no key of a Secret: letters, digits, '-', '_' and '.'"))
    } else {
        Ok(SecretRef { name, key, fingerprint: kind.clone() })
    })
}

impl SecretRef {
    /// It names a Secret of somebody else's.
    #[must_use]
    pub fn is_outside(&self) -> bool {
        [EXISTING, EXTERNAL].contains(&self.fingerprint.as_str())
    }

    /// Reads `{secretRef: {…}}`.
    #[must_use]
    pub fn read(value: &Value) -> Option<Self> {
        let object = value.as_object().filter(|object| object.len() == 1)?;
        serde_json::from_value(object.get("secretRef")?.clone()).ok()
    }

    /// As it stands in a context.
    #[must_use]
    pub fn to_value(&self) -> Value {
        json!({ "secretRef": { "name": self.name, "key": self.key, "fingerprint": self.fingerprint } })
    }
}

/// Everything that a context is resolved from.
#[derive(Debug)]
pub struct Inputs<'a> {
    /// The cluster.
    pub cluster: Named<ClusterId>,
    /// The environment.
    pub environment: Named<EnvironmentId>,
    /// The deployment.
    pub deployment: Named<DeploymentId>,
    /// The driver version.
    pub driver: &'a Driver,
    /// The application's version.
    pub application_version: &'a str,
    /// Configuration of the cluster.
    pub cluster_config: &'a Object,
    /// Configuration of the environment.
    pub environment_config: &'a Object,
    /// Configuration of the deployment.
    pub deployment_config: &'a Object,
    /// Parameters that people set, the secret ones excepted.
    pub parameters: &'a Object,
    /// Fingerprints of the secret parameters that people set.
    pub secret_fingerprints: &'a BTreeMap<String, String>,
}

/// A resolved context.
#[derive(Debug, Clone, PartialEq)]
pub struct Resolution {
    /// The tree.
    pub context: Value,
    /// JSON pointer below `/config` and `/parameters` → where the value came from.
    pub origins: BTreeMap<String, Level>,
}

/// Resolves the context and checks everything that can be checked before the commit.
///
/// # Errors
/// Everything that is wrong with parameters, configuration, names and sizes.
pub fn resolve(inputs: &Inputs<'_>) -> Result<Resolution, Problems> {
    let object = format!("deployment \"{}\"", inputs.deployment.name);
    let mut problems = Problems::default();
    let spec = &inputs.driver.file.spec;

    let merged = merged_config(inputs);
    let typed: Config = serde_json::from_value(Value::Object(merged.value.clone())).map_err(|error| {
        let mut problems = Problems::default();
        problems.push(&object, "config", error.to_string());
        problems
    })?;
    let (parameters, parameter_origins) = resolve_parameters(inputs, &object, &mut problems);
    let components = resolve_components(inputs, &typed, &object, &mut problems);
    let services = resolve_services(inputs, &typed, &object, &mut problems);

    for (field, text) in [("application_version", inputs.application_version), ("driver", inputs.driver.name())] {
        if let Err(message) = names::label_value(text) {
            problems.push(&object, field, message);
        }
    }
    let release = inputs.deployment.id.object_name();
    let context = json!({
        "app": { "name": inputs.driver.name(), "version": inputs.application_version },
        "cluster": { "id": inputs.cluster.id, "name": inputs.cluster.name },
        "components": components,
        "deployment": { "id": inputs.deployment.id, "name": inputs.deployment.name },
        "environment": { "id": inputs.environment.id, "name": inputs.environment.name },
        "instance": { "config": merged.value, "namespace": release, "release_name": release },
        "parameters": parameters,
        "services": services,
    });
    check_characters(&context, &object, "", &mut problems);
    let size = canonical::to_string(&context).len();
    if size > SIZE_MAX {
        let (field, largest) = largest(&context, spec.parameters.len());
        problems.push(
            &object,
            field,
            format!(
                "the resolved context has {size} bytes, at most {SIZE_MAX} are possible; this field alone has {largest}"
            ),
        );
    }
    problems.into_result()?;
    let mut origins: BTreeMap<String, Level> =
        merged.origins.into_iter().map(|(pointer, level)| (format!("/config{pointer}"), level)).collect();
    origins.extend(parameter_origins);
    Ok(Resolution { context, origins })
}

/// The levels of a deployment's configuration as one.
fn merged_config(inputs: &Inputs<'_>) -> Resolved {
    let styrmin = config::styrmin_defaults();
    let scalable: Object = inputs
        .driver
        .file
        .spec
        .components
        .iter()
        .filter_map(|(name, component)| {
            component.replicas.map(|replicas| (name.clone(), json!({ "replicas": replicas })))
        })
        .collect();
    let mut driver = Object::new();
    if !scalable.is_empty() {
        driver.insert("components".into(), Value::Object(scalable));
    }
    config::resolve([
        (Level::Styrmin, &styrmin),
        (Level::Driver, &driver),
        (Level::Cluster, inputs.cluster_config),
        (Level::Environment, inputs.environment_config),
        (Level::Deployment, inputs.deployment_config),
    ])
}

fn resolve_parameters(inputs: &Inputs<'_>, object: &str, problems: &mut Problems) -> (Object, BTreeMap<String, Level>) {
    let declared = &inputs.driver.file.spec.parameters;
    let (mut values, mut origins) = (Object::new(), BTreeMap::new());
    for parameter in declared {
        let name = &parameter.name;
        let field = format!("parameters.{name}");
        let pointer = format!("/parameters/{name}");
        if parameter.secret {
            if let Some(outside) = inputs.parameters.get(name).and_then(outside_secret) {
                match outside {
                    Ok(reference) => drop(values.insert(name.clone(), reference.to_value())),
                    Err(message) => problems.push(object, field, message),
                }
                origins.insert(pointer, Level::Deployment);
                continue;
            }
            if let Some(fingerprint) = inputs.secret_fingerprints.get(name) {
                let reference = SecretRef {
                    name: inputs.deployment.id.secret_name(),
                    key: name.clone(),
                    fingerprint: fingerprint.clone(),
                };
                values.insert(name.clone(), reference.to_value());
                origins.insert(pointer, Level::Deployment);
                continue;
            }
        } else if let Some(value) = inputs.parameters.get(name) {
            if let Err(message) = parameter.check(value) {
                problems.push(object, field, message);
            }
            values.insert(name.clone(), value.clone());
            origins.insert(pointer, Level::Deployment);
            continue;
        }
        match &parameter.default {
            Some(default) => {
                values.insert(name.clone(), default.clone());
                origins.insert(pointer, Level::Driver);
            }
            None => problems.push(
                object,
                field,
                format!("is required by driver {} {}; give it a value", inputs.driver.name(), inputs.driver.version),
            ),
        }
    }
    let known: Vec<&str> = declared.iter().map(|parameter| parameter.name.as_str()).collect();
    for name in inputs.parameters.keys().chain(inputs.secret_fingerprints.keys()) {
        if !known.contains(&name.as_str()) {
            problems.push(
                object,
                format!("parameters.{name}"),
                format!(
                    "driver {} {} has no such parameter; it has {}",
                    inputs.driver.name(),
                    inputs.driver.version,
                    if known.is_empty() { "none".to_owned() } else { known.join(", ") }
                ),
            );
        }
    }
    (values, origins)
}

fn resolve_components(inputs: &Inputs<'_>, config: &Config, object: &str, problems: &mut Problems) -> Object {
    let spec = &inputs.driver.file.spec;
    let settings = config.components.clone().unwrap_or_default();
    for name in settings.keys().filter(|name| !spec.components.contains_key(*name)) {
        let known: Vec<&str> = spec.components.keys().map(String::as_str).collect();
        problems.push(
            object,
            format!("config.components.{name}"),
            format!("driver {} has no such component; it has {}", inputs.driver.name(), known.join(", ")),
        );
    }
    let mut components = Object::new();
    for (name, declared) in &spec.components {
        let own = settings.get(name).cloned().flatten().unwrap_or_default();
        let field = format!("config.components.{name}");
        if declared.replicas.is_none() && own.replicas.is_some() {
            problems.push(object, format!("{field}.replicas"), "this component cannot be scaled");
        }
        let permits = |which: fn(&crate::driver::format::ContainerOverride) -> bool| {
            spec.container_overrides.iter().any(|permitted| {
                permitted.component == *name
                    && Some(&permitted.container) == declared.containers.first()
                    && which(permitted)
            })
        };
        for (key, set, permitted) in [
            ("command", own.command.is_some(), permits(|o| o.command)),
            ("args", own.args.is_some(), permits(|o| o.args)),
        ] {
            if set && !permitted {
                problems.push(
                    object,
                    format!("{field}.{key}"),
                    format!("driver {} does not permit overriding it", inputs.driver.name()),
                );
            }
        }
        let mut env_vars: BTreeMap<String, Value> = BTreeMap::new();
        for (variable, value) in config.env_vars.iter().flatten().chain(own.env_vars.iter().flatten()) {
            env_vars.insert(variable.clone(), json!(value));
        }
        components.insert(
            name.clone(),
            json!({
                "args": own.args,
                "command": own.command,
                "env_vars": env_vars,
                "image": own.image,
                "labels": declared.identifier.label,
                "replicas": if own.stopped == Some(true) { Some(0) } else { own.replicas.or(declared.replicas) },
                "resources": own.resources,
            }),
        );
    }
    components
}

fn resolve_services(inputs: &Inputs<'_>, config: &Config, object: &str, problems: &mut Problems) -> Object {
    let mut services = Object::new();
    for service in &inputs.driver.file.spec.services {
        let mut host = |label: String| -> Value {
            let Some(suffix) = config.fqdn_suffix.as_deref() else { return Value::Null };
            if service.scope != Scope::External {
                return Value::Null;
            }
            let name = format!("{label}.{suffix}");
            let checked = names::dns_label(&label, names::LABEL_MAX).and_then(|()| names::dns_name(&name));
            if let Err(message) = checked {
                problems.push(
                    object,
                    format!("services.{}", service.name),
                    format!("its hostname is not possible: {message}"),
                );
            }
            Value::from(name)
        };
        let primary = host(format!("{}-{}", service.name, inputs.deployment.id));
        let readable = host(format!("{}-{}-{}", service.name, inputs.deployment.name, inputs.environment.name));
        services.insert(
            service.name.clone(),
            json!({
                "component": service.component,
                "human_readable_fqdn": readable,
                "kind": service.kind,
                "name": service.name,
                "port": service.port,
                "primary_fqdn": primary,
                "scope": service.scope,
            }),
        );
    }
    services
}

/// Refuses characters that would break what brings the file into the cluster.
fn check_characters(value: &Value, object: &str, field: &str, problems: &mut Problems) {
    let check = |field: &str, text: &str, problems: &mut Problems| {
        if let Some(found) = yaml::uncarriable(text) {
            let name = format!("U+{:04X}", u32::from(found));
            problems.push(object, field, format!("contains the character {name}, which Flux cannot carry; remove it"));
        }
    };
    match value {
        Value::String(text) => check(field, text, problems),
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                check_characters(item, object, &format!("{field}[{index}]"), problems);
            }
        }
        Value::Object(map) => {
            for (key, child) in map {
                let field = if field.is_empty() { key.clone() } else { format!("{field}.{key}") };
                check(&field, key, problems);
                if key == yaml::MERGE_KEY {
                    problems.push(
                        object,
                        &field,
                        "has a key \"<<\", which Flux takes for a YAML merge; choose another",
                    );
                }
                check_characters(child, object, &field, problems);
            }
        }
        _ => {}
    }
}

/// The field that takes most of a context, and its bytes.
fn largest(context: &Value, parameters: usize) -> (String, usize) {
    let mut found = ("context".to_owned(), 0);
    let mut consider = |field: String, value: &Value| {
        let size = canonical::to_string(value).len();
        if size > found.1 {
            found = (field, size);
        }
    };
    for (name, value) in context["parameters"].as_object().into_iter().flatten().take(parameters) {
        consider(format!("parameters.{name}"), value);
    }
    for (name, value) in context["instance"]["config"].as_object().into_iter().flatten() {
        consider(format!("config.{name}"), value);
    }
    found
}

/// Replaces every secret reference by what `reveal` gives for it: the plain text in the operator,
/// a placeholder in a preview.
pub fn reveal(context: &Value, reveal: &dyn Fn(&SecretRef) -> String) -> Value {
    if let Some(reference) = SecretRef::read(context) {
        return Value::String(reveal(&reference));
    }
    match context {
        Value::Object(map) => {
            Value::Object(map.iter().map(|(key, value)| (key.clone(), self::reveal(value, reveal))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(|item| self::reveal(item, reveal)).collect()),
        other => other.clone(),
    }
}
