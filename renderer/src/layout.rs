//! Where each file lies in the repository of a cluster, and how our objects are marked.
//!
//! One folder per deployment and no shared list of files, so two changes never touch the same
//! file; folders fan out, so a commit costs the same however many deployments there are.

use crate::canonical;
use crate::names::{DeploymentId, EnvironmentId};

/// Label on everything that we write.
pub const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "styrmin");
/// Namespace of Styrmin's own objects in a cluster.
pub const SYSTEM_NAMESPACE: &str = "styrmin-system";
/// Namespace of Flux.
pub const FLUX_NAMESPACE: &str = "flux-system";
/// Folders of a cluster with everything that we write but texts for people.
pub const FOLDERS: [&str; 3] = ["charts", "cluster", "environments"];
/// File of a deployment.
pub const DEPLOYMENT_FILE: &str = "styrmindeployment.yaml";
/// Encrypted secrets of a deployment.
pub const SECRETS_FILE: &str = "secrets.sops.yaml";
/// Most deployments of one shard.
pub const SHARD_SIZE: u32 = 250;

/// Name of a shard from its number.
#[must_use]
pub fn shard_name(number: u32) -> String {
    format!("s{number}")
}

/// Whether a folder below `environments` can have this name: an environment's, a shard's or a deployment's.
#[must_use]
pub fn is_folder(name: &str) -> bool {
    let is_shard = name.strip_prefix('s').is_some_and(|number| number.parse::<u32>().is_ok());
    is_shard || name.parse::<DeploymentId>().is_ok()
}

/// Folder of a deployment.
#[must_use]
pub fn deployment_folder(environment: &EnvironmentId, shard: u32, deployment: &DeploymentId) -> String {
    format!("{}/{deployment}", shard_folder(environment, shard))
}

/// Folder of a shard: what one Kustomization applies.
#[must_use]
pub fn shard_folder(environment: &EnvironmentId, shard: u32) -> String {
    format!("environments/{environment}/{}", shard_name(shard))
}

/// The object that keeps a shard's folder from ever being empty.
#[must_use]
pub fn shard_keep(environment: &EnvironmentId, shard: u32) -> String {
    format!("{}/keep.yaml", shard_folder(environment, shard))
}

/// Namespace and Kustomizations of an environment.
#[must_use]
pub fn environment_file(environment: &EnvironmentId) -> String {
    format!("cluster/environments/{environment}.yaml")
}

/// Name that a driver's objects share: `<driver>-<12 digits of its digest>`.
#[must_use]
pub fn driver_name(driver: &str, digest: &str) -> String {
    format!("{driver}-{}", canonical::short(digest))
}

/// The driver's ConfigMap.
#[must_use]
pub fn driver_file(driver: &str, digest: &str) -> String {
    format!("cluster/drivers/{}.yaml", driver_name(driver, digest))
}

/// Folder of a chart that a driver brings.
#[must_use]
pub fn chart_folder(driver: &str, digest: &str) -> String {
    format!("charts/{}", driver_name(driver, digest))
}

/// `path` below the cluster's `prefix` in the repository (empty: the repository's root).
#[must_use]
pub fn below(prefix: &str, path: &str) -> String {
    if prefix.is_empty() { path.to_owned() } else { format!("{prefix}/{path}") }
}
