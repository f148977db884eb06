//! Network policies, services and service aliases of a deployment, by the rules of the reference
//! ("How Styrmin assigns an application URL" to "Service aliases").
//!
//! Every object is written with the defaults of the API server filled in, so that [`shape`] gives the
//! same for what is wanted and for what is there.

use crate::canonical;
use crate::driver::{DriverSpec, format::Scope};
use crate::layout::MANAGED_BY;
use crate::names::{DeploymentId, EnvironmentId};
use crate::spec::{DEPLOYMENT_LABEL, ENVIRONMENT_LABEL, Endpoint, StyrminDeploymentSpec};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Label of the namespaces of applications, in the reference's spelling.
pub const APPLICATION_LABEL: &str = "styrmin/environment_id";
/// Label of a service alias.
pub const ALIAS_LABEL: (&str, &str) = ("styrmin.io/service-alias", "true");

/// The declared services before the chart's own are known: each answers on its declared port.
#[must_use]
pub fn declared(driver: &DriverSpec) -> Vec<Endpoint> {
    endpoints(driver, &[], &[])
}

/// How each declared service is reached, given the chart's Services and the labels of its pods (those of
/// the templates of its workloads).
///
/// A Service of the chart that serves the declared port of the component knows the pod's port, which may
/// be another one or a name, and may choose pods of more components.
#[must_use]
pub fn endpoints(driver: &DriverSpec, services: &[Value], pods: &[BTreeMap<String, String>]) -> Vec<Endpoint> {
    let name = |service: &Value| service["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let mut found = Vec::new();
    for declared in &driver.services {
        let Some(component) = driver.components.get(&declared.component) else { continue };
        let labels = &component.identifier.label;
        let serving = services.iter().filter_map(|service| {
            let port = service["spec"]["ports"].as_array()?.iter().find(|port| port["port"] == declared.port)?;
            let selector = text_map(&service["spec"]["selector"]);
            (!selector.is_empty() && chooses(&selector, labels, pods)).then_some((service, selector, port))
        });
        let mut serving: Vec<_> = serving.collect();
        serving.sort_by_key(|(service, ..)| (name(service) != declared.name, name(service)));
        let (target_port, components) = match serving.first() {
            None => (declared.port.to_string(), vec![declared.component.clone()]),
            Some((_, selector, port)) => {
                let target = match &port["targetPort"] {
                    Value::String(name) => name.clone(),
                    Value::Number(number) => number.to_string(),
                    _ => declared.port.to_string(),
                };
                let others = driver.components.iter().filter(|(name, other)| {
                    **name == declared.component || chooses(selector, &other.identifier.label, pods)
                });
                (target, others.map(|(name, _)| name.clone()).collect())
            }
        };
        found.push(Endpoint {
            name: declared.name.clone(),
            port: declared.port,
            target_port,
            components,
            from_chart: services.iter().any(|service| name(service) == declared.name),
        });
    }
    found
}

/// Whether a Service's selector chooses pods of a component.
fn chooses(
    selector: &BTreeMap<String, String>,
    component: &BTreeMap<String, String>,
    pods: &[BTreeMap<String, String>],
) -> bool {
    let has = |pod: &BTreeMap<String, String>, wanted: &BTreeMap<String, String>| {
        wanted.iter().all(|(key, value)| pod.get(key) == Some(value))
    };
    pods.iter().any(|pod| has(pod, selector) && has(pod, component))
}

fn text_map(value: &Value) -> BTreeMap<String, String> {
    let entries = value.as_object().into_iter().flatten();
    entries.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
}

fn labels(deployment: &DeploymentId, environment: &EnvironmentId) -> Value {
    json!({ DEPLOYMENT_LABEL: deployment, ENVIRONMENT_LABEL: environment, MANAGED_BY.0: MANAGED_BY.1 })
}

/// The network policies. They take effect where the cluster's network enforces them.
#[must_use]
pub fn policies(
    spec: &StyrminDeploymentSpec,
    environment: &EnvironmentId,
    driver: &DriverSpec,
    endpoints: &[Endpoint],
) -> Vec<Value> {
    let policy = |name: &str, content: Value| {
        json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {
                "labels": labels(&spec.deployment_id, environment),
                "name": name,
                "namespace": spec.deployment_id.object_name(),
            },
            "spec": content,
        })
    };
    let of_environment = json!({ "namespaceSelector": { "matchLabels": { APPLICATION_LABEL: environment } } });
    // Ingress controllers, monitoring, DNS: whatever is no application of another environment.
    let no_application = json!({ "namespaceSelector": { "matchExpressions": [{ "key": APPLICATION_LABEL, "operator": "DoesNotExist" }] } });
    let everywhere = ["0.0.0.0/0", "::/0"].map(|cidr| json!({ "ipBlock": { "cidr": cidr } }));
    let mut to: Vec<Value> = vec![of_environment.clone(), no_application.clone()];
    to.extend(everywhere);
    let mut policies = vec![
        policy(
            "allow-egress-to-environment",
            json!({ "egress": [{ "to": to }], "podSelector": {}, "policyTypes": ["Egress"] }),
        ),
        policy(
            "allow-within-namespace",
            json!({ "ingress": [{ "from": [{ "podSelector": {} }] }], "podSelector": {}, "policyTypes": ["Ingress"] }),
        ),
    ];
    for (name, component) in &driver.components {
        let selector = json!({ "matchLabels": component.identifier.label });
        let ports = |only: Option<Scope>| -> Vec<Value> {
            let serves = |endpoint: &&Endpoint| {
                let declared = driver.services.iter().find(|service| service.name == endpoint.name);
                endpoint.components.contains(name)
                    && declared.is_some_and(|declared| only.is_none_or(|scope| declared.scope == scope))
            };
            let targets: BTreeSet<&str> =
                endpoints.iter().filter(serves).map(|endpoint| endpoint.target_port.as_str()).collect();
            targets.into_iter().map(|target| json!({ "port": port(target), "protocol": "TCP" })).collect()
        };
        let mut admit = |policy_name: String, from: &Value, ports: Vec<Value>| {
            if !ports.is_empty() {
                let content = json!({
                    "ingress": [{ "from": [from], "ports": ports }], "podSelector": selector, "policyTypes": ["Ingress"],
                });
                policies.push(policy(&policy_name, content));
            }
        };
        admit(format!("allow-environment-to-{name}"), &of_environment, ports(None));
        admit(format!("allow-ingress-to-{name}"), &no_application, ports(Some(Scope::External)));
    }
    policies
}

/// A port as Kubernetes writes it: a number or a name.
fn port(text: &str) -> Value {
    text.parse::<u16>().map_or_else(|_| Value::from(text), Value::from)
}

/// The Services in the application's namespace that its declared services are found by. Where the chart
/// has one of that name, it serves.
#[must_use]
pub fn services(
    spec: &StyrminDeploymentSpec,
    environment: &EnvironmentId,
    driver: &DriverSpec,
    endpoints: &[Endpoint],
) -> Vec<Value> {
    let own = endpoints.iter().filter(|endpoint| !endpoint.from_chart).filter_map(|endpoint| {
        let declared = driver.services.iter().find(|service| service.name == endpoint.name)?;
        let component = driver.components.get(&declared.component)?;
        Some(json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "labels": labels(&spec.deployment_id, environment),
                "name": endpoint.name,
                "namespace": spec.deployment_id.object_name(),
            },
            "spec": {
                "ports": [{ "port": endpoint.port, "protocol": "TCP", "targetPort": port(&endpoint.target_port) }],
                "selector": component.identifier.label,
                "type": "ClusterIP",
            },
        }))
    });
    own.collect()
}

/// The alias by which the applications in `holder`'s namespace find a service of `owner`.
#[must_use]
pub fn alias(owner: &DeploymentId, service: &str, holder: &DeploymentId, environment: &EnvironmentId) -> Value {
    let mut labels = labels(owner, environment);
    labels[ALIAS_LABEL.0] = ALIAS_LABEL.1.into();
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "labels": labels, "name": service, "namespace": holder.object_name() },
        "spec": {
            "externalName": format!("{service}.{}.svc.cluster.local", owner.object_name()),
            "type": "ExternalName",
        },
    })
}

/// What of a policy or Service is ours to keep as it is, as a digest. What others add (a cluster IP, more
/// labels) does not count. The kind is named, since the API server leaves it out of the items of a list.
#[must_use]
pub fn shape(kind: &str, object: &Value) -> String {
    let labels: BTreeMap<&str, &Value> = [DEPLOYMENT_LABEL, ENVIRONMENT_LABEL, MANAGED_BY.0, ALIAS_LABEL.0]
        .into_iter()
        .map(|key| (key, &object["metadata"]["labels"][key]))
        .collect();
    let spec = &object["spec"];
    let content = if kind == "Service" {
        let ports: Vec<Value> = spec["ports"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|port| json!([port["port"], port["protocol"], port["targetPort"]]))
            .collect();
        json!({ "externalName": spec["externalName"], "ports": ports, "selector": spec["selector"], "type": spec["type"] })
    } else {
        spec.clone()
    };
    canonical::digest(&json!({ "content": content, "kind": kind, "labels": labels }))
}
