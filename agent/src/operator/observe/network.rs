//! The application's network: what is there of it, and what should be. Reads only.
//!
//! The pass of a deployment writes everything in its own application's namespace, the aliases to other
//! deployments' services included: only it knows which names its chart takes. So one writer decides about
//! each namespace, and a deployment that comes or goes has the others of its environment looked at.

use super::super::apply::is_ours;
use super::super::decide::{Network, ObjectKey, phase};
use super::super::{Context, OperatorError, Result, steps};
use crate::kept::{self, Ending};
use crate::watch;
use kube::api::{Api, DynamicObject, ListParams};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use styrmin_renderer::driver::Driver;
use styrmin_renderer::layout::MANAGED_BY;
use styrmin_renderer::names::{DeploymentId, EnvironmentId};
use styrmin_renderer::network;
use styrmin_renderer::post_render;
use styrmin_renderer::spec::{DriverRef, Endpoint, StyrminDeployment, StyrminDeploymentStatus};

/// What should be there, and what should not.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    pub(super) policies: Vec<Value>,
    /// Services and aliases.
    pub(super) services: Vec<Value>,
    pub(super) unwanted: Vec<ObjectKey>,
    pub(super) collisions: Vec<String>,
}

/// Whether the chart's Services have to be looked at: before those of the deployment are made, and when a status
/// was lost, or is of an earlier agent.
pub(super) fn is_due(status: &StyrminDeploymentStatus, driver: &Driver) -> bool {
    let here = status.phase.as_deref();
    let unknown = status.endpoints.is_empty() && !driver.file.spec.services.is_empty();
    (here == Some(phase::SERVICES) && !steps::services_begun(status)) || (here == Some(phase::READY) && unknown)
}

/// The Services that are missing now were free names when somebody looked.
pub(super) fn has_looked(status: &StyrminDeploymentStatus) -> bool {
    match status.phase.as_deref() {
        Some(phase::SERVICES) => steps::services_begun(status),
        here => here == Some(phase::READY),
    }
}

/// The chart's Services. They are asked of the API server, since no watch holds what charts make.
pub(super) async fn look(context: &Context, object: &StyrminDeployment, driver: &Driver) -> Result<Network> {
    let namespace = object.spec.deployment_id.object_name();
    let what = OperatorError::of(format!("looking for the Services of the chart in {namespace}"));
    // Ours are known.
    let of_chart = ListParams::default().labels(&format!("{}!={}", MANAGED_BY.0, MANAGED_BY.1));
    let api: Api<DynamicObject> = Api::namespaced_with(context.client.clone(), &namespace, &watch::service());
    let services = api.list(&of_chart).await.map_err(what)?;
    let of_chart = services.iter().filter(|found| !is_ours(found));
    let services: Vec<Value> = of_chart.filter_map(|found| serde_json::to_value(found).ok()).collect();
    let templates = super::templates(context, &object.spec).await?;
    let pods: Vec<BTreeMap<String, String>> = templates.filter_map(|template| template.metadata?.labels).collect();
    let names = services.iter().filter_map(|found| found["metadata"]["name"].as_str().map(str::to_owned));
    Ok(Network {
        endpoints: network::endpoints(&driver.file.spec, &services, &pods),
        chart_services: names.collect(),
        missing_components: post_render::missing_components(&object.spec, driver, &pods),
    })
}

/// How the declared services are reached: as was last seen, and as declared for those never seen.
fn endpoints(driver: &Driver, status: &StyrminDeploymentStatus, seen: Option<&Network>) -> Vec<Endpoint> {
    let known = seen.map_or(&status.endpoints, |seen| &seen.endpoints);
    let mut declared = network::declared(&driver.file.spec);
    for endpoint in &mut declared {
        if let Some(known) = known.iter().find(|known| known.name == endpoint.name && known.port == endpoint.port) {
            endpoint.clone_from(known);
        }
    }
    declared
}

/// What should be there. `in_the_way` is a Service of ours that Helm wants to make.
pub(super) fn wanted(
    context: &Context,
    object: &StyrminDeployment,
    status: &StyrminDeploymentStatus,
    environment: &EnvironmentId,
    driver: &Driver,
    seen: Option<&Network>,
    in_the_way: Option<&ObjectKey>,
) -> Wanted {
    let watch = &context.watch;
    let spec = &object.spec;
    let mut endpoints = endpoints(driver, status, seen);
    let here = status.phase.as_deref();
    let after_release = seen.is_some() || [Some(phase::SERVICES), Some(phase::READY)].contains(&here);
    let mut admitted = endpoints.clone();
    if !after_release && !status.endpoints.is_empty() {
        // What runs is reached as before until the release has replaced it.
        admitted.extend(status.endpoints.iter().filter(|known| !endpoints.contains(known)).cloned());
        endpoints.clone_from(&status.endpoints);
    }
    let mut found =
        Wanted { policies: network::policies(spec, environment, &driver.file.spec, &admitted), ..Wanted::default() };
    let known = seen.is_some() || here == Some(phase::READY) || !status.endpoints.is_empty();
    let mut taken: BTreeSet<&str> =
        seen.map_or(&status.chart_services, |seen| &seen.chart_services).iter().map(String::as_str).collect();
    taken.extend(in_the_way.map(|way| way.name.as_str()));
    if known {
        let own = network::services(spec, environment, &driver.file.spec, &endpoints);
        let is_free = |service: &Value| !taken.contains(service["metadata"]["name"].as_str().unwrap_or_default());
        found.services = own.into_iter().filter(is_free).collect();
        aliases(context, object, environment, driver, &taken, &mut found);
    }
    if after_release {
        let namespace = spec.deployment_id.object_name();
        let is_wanted = |objects: &[Value], name: &str| objects.iter().any(|one| one["metadata"]["name"] == name);
        for (name, kept) in watch.policies.within(&namespace) {
            if !kept.going && !is_wanted(&found.policies, &name) {
                found.unwanted.push(key("networking.k8s.io/v1", "NetworkPolicy", &namespace, &name, &kept));
            }
        }
        for (name, kept) in watch.services.within(&namespace) {
            let goes = !kept.alias || is_stale(context, object, &kept);
            if known && !kept.going && goes && !is_wanted(&found.services, &name) {
                found.unwanted.push(key("v1", "Service", &namespace, &name, &kept));
            }
        }
    }
    found
}

/// Exactly this object: one of the same name that the chart has made meanwhile is not meant.
pub(super) fn key(version: &str, kind: &str, namespace: &str, name: &str, kept: &kept::Written) -> ObjectKey {
    ObjectKey { uid: kept.uid.map(|uid| uid.to_string()), ..ObjectKey::new(version, kind, namespace, name) }
}

/// The other deployments of the environment, the oldest first. One whose application is being removed offers
/// nothing any more; while nobody has confirmed it, it runs.
fn siblings(context: &Context, object: &StyrminDeployment) -> Vec<(Box<str>, kept::Deployment)> {
    let all = context.watch.deployments.within(object.metadata.namespace.as_deref().unwrap_or_default());
    let own = object.metadata.name.as_deref().unwrap_or_default();
    let mut siblings: Vec<_> =
        all.into_iter().filter(|(name, kept)| **name != *own && kept.named && kept.ending == Ending::Not).collect();
    siblings.sort_by(|(name, kept), (other, known)| (kept.created, name).cmp(&(known.created, other)));
    siblings
}

/// The aliases to the services of the others. An alias in use never leads elsewhere because somebody deploys
/// one more, or because its owner's object is away for a moment; a new one goes to the oldest that offers the
/// name.
fn aliases(
    context: &Context,
    object: &StyrminDeployment,
    environment: &EnvironmentId,
    driver: &Driver,
    taken: &BTreeSet<&str>,
    found: &mut Wanted,
) {
    let spec = &object.spec;
    let namespace = spec.deployment_id.object_name();
    let declared = |name: &str| driver.file.spec.services.iter().any(|service| service.name == name);
    let mut offers: BTreeMap<String, Vec<(DeploymentId, Arc<DriverRef>)>> = BTreeMap::new();
    for (sibling, kept) in siblings(context, object) {
        let Some(id) = sibling.strip_prefix("styrmin-").and_then(|id| id.parse::<DeploymentId>().ok()) else {
            continue;
        };
        let Ok(other) = context.drivers.get(&context.watch, &kept.driver) else { continue };
        for service in &other.file.spec.services {
            offers.entry(service.name.clone()).or_default().push((id.clone(), Arc::clone(&kept.driver)));
        }
    }
    for (name, owners) in offers {
        let collision = if declared(&name) {
            // Two of the same driver: everybody expects the short name to mean one's own.
            let same = owners.iter().all(|(_, driver)| driver.name == spec.driver.name);
            (!same).then(|| format!("the service \"{name}\" of others has no alias: it is the name of an own one"))
        } else if taken.contains(name.as_str()) {
            Some(format!("the service \"{name}\" of others has no alias: the chart has a Service of this name"))
        } else {
            let kept = context.watch.services.get(&namespace, &name).filter(|kept| kept.alias);
            let keeps = |(id, _): &&(DeploymentId, Arc<DriverRef>)| {
                kept.as_ref().is_some_and(|kept| kept.owner.as_str() == id.as_str())
            };
            let owner = owners.iter().find(keeps);
            if owner.is_none() && kept.as_ref().is_some_and(|kept| !is_stale(context, object, kept)) {
                // It leads to one that is away for a while.
                continue;
            }
            let Some((id, _)) = owner.or(owners.first()) else { continue };
            found.services.push(network::alias(id, &name, &spec.deployment_id, environment));
            (owners.len() > 1).then(|| format!("several deployments offer \"{name}\": its alias leads to {id}"))
        };
        found.collisions.extend(collision);
    }
}

/// Whether an alias that nothing wants leads nowhere, and not only to what cannot be seen right now: the
/// object of a deployment may be away for a while, and its application runs.
fn is_stale(context: &Context, object: &StyrminDeployment, kept: &kept::Written) -> bool {
    let owner = format!("styrmin-{}", kept.owner.as_str());
    let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
    match context.watch.deployments.get(namespace, &owner) {
        None => !context.watch.namespaces.contains("", &owner),
        Some(sibling) if sibling.ending != Ending::Not => true,
        // Its services are known, and this is none of them, or another one has its name now.
        Some(sibling) => context.drivers.get(&context.watch, &sibling.driver).is_ok(),
    }
}
