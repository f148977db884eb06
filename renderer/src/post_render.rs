//! What Styrmin changes in whatever a chart renders, as post-renderers of a HelmRelease.
//!
//! Flux applies them to the chart's hooks too. Styrmin's labels are not among them: they are the
//! HelmRelease's common metadata. A patch whose target matches nothing does nothing, so charts need not
//! have what is patched; only a container that an override names must be there (see [`not_found`]).

use crate::driver::Driver;
use crate::spec::{Lifecycle, StyrminDeploymentSpec};
use crate::yaml;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Kinds that have a number of pods.
const SCALED: &str = "Deployment|StatefulSet";
/// Kinds whose pod template is at `spec.template`.
const TEMPLATED: &str = "Deployment|StatefulSet|DaemonSet|ReplicaSet|Job";
/// Annotation of an Ingress that names its class.
const INGRESS_CLASS: &str = "kubernetes.io/ingress.class";
/// What a dedicated ingress controller serves.
const DEDICATED_CLASS: &str = "traefik";
/// Code of an override whose container the chart lacks.
pub const CONTAINER_NOT_FOUND: &str = "COMPONENT_CONTAINER_NOT_FOUND";

/// Name in the patches that stop a component: kustomize ignores it, and they are known by it.
const STOPPED: &str = "stopped-for-now";

/// The post-renderers. `stopped` are components without pods for now, whatever the configuration says.
#[must_use]
pub fn post_renderers(spec: &StyrminDeploymentSpec, driver: &Driver, stopped: &BTreeSet<String>) -> Value {
    let config = &spec.context["instance"]["config"];
    let mut patches = scheduling(&config["scheduling"]);
    for (name, component) in &driver.file.spec.components {
        let values = &spec.context["components"][name];
        let selector = selector(&component.identifier.label);
        if let Some(container) = component.containers.first() {
            patches.extend(overrides(values, container, &selector));
        }
        if !values["replicas"].is_null() {
            patches.push(merge(SCALED, Some(&selector), &json!({ "spec": { "replicas": values["replicas"] } })));
        }
    }
    if spec.lifecycle == Lifecycle::Stopped {
        patches.push(merge(SCALED, None, &json!({ "spec": { "replicas": 0 } })));
        patches.push(merge("CronJob", None, &json!({ "spec": { "suspend": true } })));
    }
    patches.extend(ingress_class(config));
    let own = (!patches.is_empty()).then(|| json!({ "kustomize": { "patches": patches } }));
    own.into_iter().chain(stops(driver, stopped)).collect()
}

/// The same post-renderers with other components stopped.
#[must_use]
pub fn restopped(found: &Value, driver: &Driver, stopped: &BTreeSet<String>) -> Value {
    let marker = format!("name: {STOPPED}");
    let is_stop = |one: &&Value| one.to_string().contains(&marker);
    let others = found.as_array().into_iter().flatten().filter(|one| !is_stop(one)).cloned();
    others.chain(stops(driver, stopped)).collect()
}

/// The last post-renderer: components that have no pods for now.
fn stops(driver: &Driver, stopped: &BTreeSet<String>) -> Option<Value> {
    let none = json!({ "metadata": { "name": STOPPED }, "spec": { "replicas": 0 } });
    let components = driver.file.spec.components.iter().filter(|(name, _)| stopped.contains(*name));
    let patches: Vec<Value> =
        components.map(|(_, component)| merge(SCALED, Some(&selector(&component.identifier.label)), &none)).collect();
    (!patches.is_empty()).then(|| json!({ "kustomize": { "patches": patches } }))
}

/// Components whose override names a container that the chart does not render, when that is what a
/// message of Flux says; as the message for people.
#[must_use]
pub fn not_found(message: &str, spec: &StyrminDeploymentSpec, driver: &Driver) -> Option<String> {
    if !(message.contains("/spec/template/spec/containers/0/name") && message.contains("test")) {
        return None;
    }
    let overridden = driver.file.spec.components.iter().filter_map(|(name, component)| {
        let container = component.containers.first()?;
        let is = !overrides(&spec.context["components"][name], container, "").is_empty();
        is.then(|| format!("container \"{container}\" of component \"{name}\""))
    });
    let overridden: Vec<String> = overridden.collect();
    (!overridden.is_empty()).then(|| {
        format!(
            "{CONTAINER_NOT_FOUND}: the chart does not render {} as the first container of its pods; remove the \
             override, or use a driver version that names the container as the chart does",
            overridden.join(" or ")
        )
    })
}

fn selector(labels: &std::collections::BTreeMap<String, String>) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

/// A strategic merge. Kustomize takes kind and name from the target, but wants them in the patch as well.
fn merge(kinds: &str, labels: Option<&str>, change: &Value) -> Value {
    let mut whole = json!({ "apiVersion": "v1", "kind": "Any", "metadata": { "name": "any" } });
    for (key, value) in change.as_object().into_iter().flatten() {
        match (&mut whole[key], value) {
            (Value::Object(known), Value::Object(more)) => known.extend(more.clone()),
            (place, value) => *place = value.clone(),
        }
    }
    patch(kinds, labels, &whole)
}

fn patch(kinds: &str, labels: Option<&str>, content: &Value) -> Value {
    let mut target = json!({ "kind": kinds });
    if let Some(labels) = labels {
        target["labelSelector"] = labels.into();
    }
    // Only strings of the context, which was checked for what YAML cannot carry.
    json!({ "patch": yaml::to_string(content).unwrap_or_default(), "target": target })
}

fn scheduling(settings: &Value) -> Vec<Value> {
    let keys = [
        ("nodeSelector", "node_selector"),
        ("tolerations", "tolerations"),
        ("affinity", "affinity"),
        ("priorityClassName", "priority_class_name"),
    ];
    let pod: Map<String, Value> = keys
        .into_iter()
        .filter(|(_, key)| !settings[*key].is_null())
        .map(|(field, key)| (field.to_owned(), settings[key].clone()))
        .collect();
    if pod.is_empty() {
        return Vec::new();
    }
    let template = json!({ "template": { "spec": pod } });
    vec![
        merge(TEMPLATED, None, &json!({ "spec": template })),
        merge("CronJob", None, &json!({ "spec": { "jobTemplate": { "spec": template } } })),
        merge("Pod", None, &json!({ "spec": pod })),
    ]
}

/// Overrides of a component's main container. A merge would add a container that the chart lacks, so it
/// is tested for first: then the release fails, and says so.
fn overrides(values: &Value, container: &str, labels: &str) -> Vec<Value> {
    let mut changed = Map::new();
    for field in ["image", "command", "args"] {
        if !values[field].is_null() {
            changed.insert(field.into(), values[field].clone());
        }
    }
    if let Some(resources) = values["resources"].as_object() {
        let mut resources = resources.clone();
        resources.insert("$patch".into(), "replace".into());
        changed.insert("resources".into(), Value::Object(resources));
    }
    let variables: Vec<Value> = values["env_vars"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, value)| match value {
            // Also a variable that the chart sets goes.
            Value::Null => json!({ "name": name, "$patch": "delete" }),
            value => json!({ "name": name, "value": value }),
        })
        .collect();
    if !variables.is_empty() {
        changed.insert("env".into(), Value::Array(variables));
    }
    if changed.is_empty() {
        return Vec::new();
    }
    let test = json!([{ "op": "test", "path": "/spec/template/spec/containers/0/name", "value": container }]);
    changed.insert("name".into(), container.into());
    let change = json!({ "spec": { "template": { "spec": { "containers": [changed] } } } });
    vec![patch(SCALED, Some(labels), &test), merge(SCALED, Some(labels), &change)]
}

/// Components that a deployment overrides, and of which the chart renders nothing: `pods` are the labels of the pods
/// of its Deployments and StatefulSets. What environment and cluster set for all components asks for none.
#[must_use]
pub fn missing_components(
    spec: &StyrminDeploymentSpec,
    driver: &Driver,
    pods: &[BTreeMap<String, String>],
) -> Vec<String> {
    let own = &spec.context["instance"]["config"]["components"];
    let is_rendered =
        |component: &crate::driver::format::Component| pods.iter().any(|pod| component.identifier.is_of(Some(pod)));
    let overridden = driver.file.spec.components.iter().filter(|(name, component)| {
        let container = component.containers.first().map_or("", String::as_str);
        !overrides(&own[name.as_str()], container, "").is_empty()
    });
    overridden.filter(|(_, component)| !is_rendered(component)).map(|(name, _)| name.clone()).collect()
}

/// What is said of them; `None` when there are none.
#[must_use]
pub fn missing(components: &[String]) -> Option<String> {
    let (first, more) = components.split_first()?;
    let all = components.join(", ");
    let one = if more.is_empty() { "component" } else { "components" };
    Some(format!(
        "{CONTAINER_NOT_FOUND}: the chart renders nothing of {one} {all}, so what is set there changes nothing; take it \
         back (--remove /components/{first}), or have the chart render the component"
    ))
}

/// The class of every Ingress, by the three rules of the reference.
fn ingress_class(config: &Value) -> Option<Value> {
    let (class, annotation) = if config["dedicated_ingress"].is_object() {
        (Value::Null, DEDICATED_CLASS)
    } else {
        let class = config["ingress_class"].as_str().filter(|class| !class.is_empty())?;
        (class.into(), class)
    };
    let change = json!({
        "metadata": { "annotations": { INGRESS_CLASS: annotation } },
        "spec": { "ingressClassName": class },
    });
    let mut patch = merge("Ingress", None, &change);
    patch["target"]["group"] = "networking.k8s.io".into();
    Some(patch)
}
