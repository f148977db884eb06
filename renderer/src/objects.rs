//! The Kubernetes objects of a cluster, an environment, a driver and a deployment.
//!
//! Every function is pure and gives an object as it is applied; the golden files in
//! `renderer/tests/golden` show each of them.

use crate::context::{self, SecretRef};
use crate::driver::{DRIVER_FILE, Driver, VALUES_FILE};
use crate::layout::{self, FLUX_NAMESPACE, MANAGED_BY, SYSTEM_NAMESPACE};
use crate::names::EnvironmentId;
use crate::spec::{DEPLOYMENT_LABEL, ENVIRONMENT_LABEL, RenderedRelease, StyrminDeploymentSpec};
use crate::values::{self, ValuesError};
use crate::{canonical, post_render, yaml};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Keeps kustomize-controller from deleting an object that left Git.
const NEVER_PRUNE: (&str, &str) = ("kustomize.toolkit.fluxcd.io/prune", "disabled");
/// Label of what only the operator may delete, or a person who says so on the object: see
/// `helm/agent/templates/protection.yaml`.
const PROTECTED: (&str, &str) = ("styrmin.io/protected", "true");
/// Secret with the cluster's age key, in [`FLUX_NAMESPACE`].
pub const AGE_SECRET: &str = "styrmin-age";
/// GitRepository of the cluster's repository in [`FLUX_NAMESPACE`], and the prefix of the
/// Kustomizations that use it.
pub const FLUX_SOURCE: &str = "styrmin";
/// GitRepository of an environment that brings the drivers' charts.
pub const CHART_SOURCE: &str = "styrmin-charts";
/// Key of the values in a values Secret.
pub const VALUES_KEY: &str = "values.yaml";

/// Where a cluster's files are, as Flux sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    /// URL that Flux fetches from.
    pub url: String,
    /// Branch that Flux follows.
    pub branch: String,
    /// The cluster's folder in it; empty for the root.
    pub prefix: String,
    /// Secret in [`FLUX_NAMESPACE`] with the credentials.
    pub secret: Option<String>,
}

/// Settings of the operator that reach a HelmRelease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReleaseSettings {
    /// `STYRMIN_OPERATOR_HELM_RELEASE_TIMEOUT`, in seconds.
    pub timeout_seconds: u32,
    /// Retries of an install or upgrade.
    pub retries: u32,
    /// How often Flux looks for drift, in seconds.
    pub interval_seconds: u32,
}

impl Default for ReleaseSettings {
    fn default() -> Self {
        Self { timeout_seconds: 300, retries: 3, interval_seconds: 60 }
    }
}

fn labels(environment: &EnvironmentId) -> Value {
    json!({ ENVIRONMENT_LABEL: environment, MANAGED_BY.0: MANAGED_BY.1 })
}

fn deployment_labels(spec: &StyrminDeploymentSpec, environment: &EnvironmentId) -> Value {
    json!({
        DEPLOYMENT_LABEL: spec.deployment_id,
        ENVIRONMENT_LABEL: environment,
        MANAGED_BY.0: MANAGED_BY.1,
    })
}

/// Label of application namespaces only, as the reference spells it.
const APPLICATION_LABEL: &str = "styrmin/environment_id";
/// Labels of an application's namespace that are ours to keep.
pub const NAMESPACE_LABELS: [&str; 4] = [DEPLOYMENT_LABEL, ENVIRONMENT_LABEL, MANAGED_BY.0, APPLICATION_LABEL];

/// Namespace of Styrmin's own objects. It always stays, so the root path is never empty.
#[must_use]
pub fn system_namespace() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "annotations": { NEVER_PRUNE.0: NEVER_PRUNE.1 },
            // The agent's pods keep to the strictest profile, and nothing else has to run here.
            "labels": { MANAGED_BY.0: MANAGED_BY.1, "pod-security.kubernetes.io/enforce": "restricted" },
            "name": SYSTEM_NAMESPACE,
        },
    })
}

/// GitRepository and root Kustomization, applied once by hand or by a bootstrap.
#[must_use]
pub fn flux_root(repository: &Repository) -> [Value; 2] {
    let mut source = json!({
        "apiVersion": "source.toolkit.fluxcd.io/v1",
        "kind": "GitRepository",
        "metadata": {
            "labels": { MANAGED_BY.0: MANAGED_BY.1 },
            "name": FLUX_SOURCE,
            "namespace": FLUX_NAMESPACE,
        },
        "spec": {
            "interval": "1m",
            "ref": { "branch": repository.branch },
            "timeout": "60s",
            "url": repository.url,
        },
    });
    if let Some(secret) = &repository.secret {
        source["spec"]["secretRef"] = json!({ "name": secret });
    }
    [source, kustomization(FLUX_SOURCE, &layout::below(&repository.prefix, "cluster"), false)]
}

/// Has Flux accept only commits that are signed with one of `keys` (name in the Secret, public key).
pub fn verify(root: &mut Vec<Value>, namespace: &str, secret: &str, keys: Vec<(String, String)>) {
    for source in root.iter_mut().filter(|object| object["kind"] == "GitRepository") {
        source["spec"]["verify"] = json!({ "mode": "HEAD", "secretRef": { "name": secret } });
    }
    let data: Map<String, Value> = keys.into_iter().map(|(name, key)| (name, key.into())).collect();
    root.push(json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": { "labels": { MANAGED_BY.0: MANAGED_BY.1 }, "name": secret, "namespace": namespace },
        // Public keys are no secret; Flux reads them from one.
        "stringData": data,
    }));
}

fn kustomization(name: &str, path: &str, encrypted: bool) -> Value {
    let mut object = json!({
        "apiVersion": "kustomize.toolkit.fluxcd.io/v1",
        "kind": "Kustomization",
        "metadata": {
            "labels": { MANAGED_BY.0: MANAGED_BY.1 },
            "name": name,
            "namespace": FLUX_NAMESPACE,
        },
        "spec": {
            // Whatever happens to this object, what it applied stays: nothing is torn down by a slip.
            "deletionPolicy": "Orphan",
            "interval": "10m",
            "path": format!("./{path}"),
            "prune": true,
            "retryInterval": "10s",
            "sourceRef": { "kind": "GitRepository", "name": FLUX_SOURCE },
            "timeout": "30s",
            "wait": false,
        },
    });
    if encrypted {
        object["spec"]["decryption"] = json!({ "provider": "sops", "secretRef": { "name": AGE_SECRET } });
    }
    object
}

/// The lasting namespace of an environment. It lacks `styrmin/environment_id`, which marks
/// application namespaces only.
#[must_use]
pub fn environment_namespace(environment: &EnvironmentId, name: &str) -> Value {
    let mut labels = labels(environment);
    labels[PROTECTED.0] = PROTECTED.1.into();
    json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "annotations": { NEVER_PRUNE.0: NEVER_PRUNE.1, "styrmin.io/environment-name": name },
            "labels": labels,
            "name": environment.namespace(),
        },
    })
}

/// The namespace that an application lives in; the operator creates, labels and deletes it.
#[must_use]
pub fn application_namespace(spec: &StyrminDeploymentSpec, environment: &EnvironmentId) -> Value {
    let mut object = json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "labels": deployment_labels(spec, environment),
            "name": spec.deployment_id.object_name(),
        },
    });
    object["metadata"]["labels"][APPLICATION_LABEL] = json!(environment);
    object
}

/// The Kustomization that applies one shard of an environment.
#[must_use]
pub fn shard_kustomization(environment: &EnvironmentId, shard: u32, prefix: &str) -> Value {
    let mut object = kustomization(
        &format!("{FLUX_SOURCE}-{environment}-{}", layout::shard_name(shard)),
        &layout::below(prefix, &layout::shard_folder(environment, shard)),
        true,
    );
    object["metadata"]["labels"] = labels(environment);
    object
}

/// The object that keeps a shard's path from ever being empty.
#[must_use]
pub fn shard_keep(environment: &EnvironmentId, shard: u32) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "labels": labels(environment),
            "name": format!("styrmin-keep-{}", layout::shard_name(shard)),
            "namespace": environment.namespace(),
        },
        "data": { "why": "Flux refuses a path without objects; this one is always there." },
    })
}

/// The driver's definition, immutable and named by its content.
#[must_use]
pub fn driver_config_map(driver: &Driver) -> Value {
    let mut data = serde_json::Map::new();
    for name in [DRIVER_FILE, VALUES_FILE] {
        if let Some(text) = driver.files.get(name) {
            data.insert(name.to_owned(), Value::from(text.as_str()));
        }
    }
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "annotations": {
                "kustomize.toolkit.fluxcd.io/substitute": "disabled",
                CONTENT_ANNOTATION: travelling_digest(driver),
                "styrmin.io/driver-digest": driver.digest,
            },
            "labels": {
                MANAGED_BY.0: MANAGED_BY.1,
                "styrmin.io/driver": driver.name(),
                "styrmin.io/driver-version": label_version(&driver.version),
            },
            "name": format!("styrmin-driver-{}", layout::driver_name(driver.name(), &driver.digest)),
            "namespace": SYSTEM_NAMESPACE,
        },
        "data": data,
        "immutable": true,
    })
}

/// Annotation with the digest of all that travels of a driver: its definition and its chart.
pub const CONTENT_ANNOTATION: &str = "styrmin.io/content-digest";

fn travelling_digest(driver: &Driver) -> String {
    let folder = driver.chart_folder().unwrap_or_default();
    let definition =
        [DRIVER_FILE, VALUES_FILE].into_iter().filter_map(|name| Some((name.to_owned(), driver.files.get(name)?)));
    let chart = driver.chart_files().filter_map(|(path, _)| {
        let path = format!("{folder}/{path}");
        driver.files.get(&path).map(|text| (path.clone(), text))
    });
    content_digest(definition.chain(chart).map(|(path, text)| (path, text.as_str())))
}

/// Digest of files by their path in the driver's folder, in whatever order.
pub fn content_digest<'a>(files: impl Iterator<Item = (String, &'a str)>) -> String {
    let files: std::collections::BTreeMap<String, &str> = files.collect();
    canonical::digest(&json!(files))
}

/// A semantic version as a label value: `+` is not allowed there.
fn label_version(version: &semver::Version) -> String {
    let text = version.to_string().replace('+', "_");
    text.chars().take(63).collect::<String>().trim_end_matches(['-', '_', '.']).to_owned()
}

/// The charts in the repository, as a source.
fn charts(repository: &Repository, metadata: Value, secret: Option<&str>) -> Value {
    let mut source = json!({
        "apiVersion": "source.toolkit.fluxcd.io/v1",
        "kind": "GitRepository",
        "metadata": metadata,
        "spec": {
            "interval": "1m",
            "ref": { "branch": repository.branch },
            "sparseCheckout": [layout::below(&repository.prefix, "charts")],
            "timeout": "60s",
            "url": repository.url,
        },
    });
    if let Some(secret) = secret {
        source["spec"]["secretRef"] = json!({ "name": secret });
    }
    source
}

/// What Flux upgrades the agent with: its chart in the repository, and its release, which takes over the one that
/// was installed by hand. Neither goes with its file: the agent would go too.
#[must_use]
pub fn agent_release(repository: &Repository, chart: &str, values: &Map<String, Value>) -> Vec<Value> {
    const NAME: &str = "styrmin-agent";
    let metadata = |name: &str| {
        json!({
            "annotations": { NEVER_PRUNE.0: NEVER_PRUNE.1 },
            "labels": { MANAGED_BY.0: MANAGED_BY.1 },
            "name": name,
            "namespace": layout::SYSTEM_NAMESPACE,
        })
    };
    let source = charts(repository, metadata(CHART_SOURCE), repository.secret.as_deref());
    let release = json!({
        "apiVersion": "helm.toolkit.fluxcd.io/v2",
        "kind": "HelmRelease",
        "metadata": metadata(NAME),
        "spec": {
            "chart": {
                "spec": {
                    "chart": format!("./{}", layout::below(&repository.prefix, chart)),
                    "interval": "1m",
                    "sourceRef": { "kind": "GitRepository", "name": CHART_SOURCE },
                },
            },
            "interval": "10m",
            // Its Job applies the kinds.
            "install": { "crds": "Skip", "remediation": { "retries": 3 } },
            "releaseName": NAME,
            "timeout": "5m",
            "upgrade": { "crds": "Skip", "remediation": { "retries": 3 } },
            "values": values,
        },
    });
    vec![source, release]
}

/// The objects that bring a driver's chart into an environment: one per driver digest, shared by
/// every deployment that uses it. The last one is what `chartRef` names.
#[must_use]
pub fn chart_source(driver: &Driver, environment: &EnvironmentId, repository: &Repository) -> Vec<Value> {
    let chart = &driver.file.spec.helm.main;
    let name = layout::driver_name(driver.name(), &driver.digest);
    let metadata =
        |name: &str| json!({ "labels": labels(environment), "name": name, "namespace": environment.namespace() });
    let helm_chart = |chart_name: &str, source_kind: &str, source: &str| {
        json!({
            "apiVersion": "source.toolkit.fluxcd.io/v1",
            "kind": "HelmChart",
            "metadata": metadata(&name),
            "spec": {
                "chart": chart_name,
                "interval": "10m",
                // The path or version names the content; other commits must not rewrite charts.
                "reconcileStrategy": "ChartVersion",
                "sourceRef": { "kind": source_kind, "name": source },
                "version": chart.version,
            },
        })
    };
    if driver.chart_folder().is_some() {
        // The operator copies the credentials: no reference crosses a namespace.
        let secret = repository.secret.as_ref().map(|_| CHART_SOURCE);
        let source = charts(repository, metadata(CHART_SOURCE), secret);
        let folder = layout::chart_folder(driver.name(), &driver.digest);
        let path = format!("./{}", layout::below(&repository.prefix, &folder));
        let mut chart = helm_chart(&path, "GitRepository", CHART_SOURCE);
        if let Some(spec) = chart["spec"].as_object_mut() {
            // Git sources take the version from Chart.yaml.
            spec.remove("version");
        }
        return vec![source, chart];
    }
    if chart.location.starts_with("oci://") {
        return vec![json!({
            "apiVersion": "source.toolkit.fluxcd.io/v1",
            "kind": "OCIRepository",
            "metadata": metadata(&name),
            "spec": {
                "interval": "10m",
                "layerSelector": {
                    "mediaType": "application/vnd.cncf.helm.chart.content.v1.tar+gzip",
                    "operation": "copy",
                },
                "ref": { "tag": chart.version },
                "url": chart.location,
            },
        })];
    }
    let source = json!({
        "apiVersion": "source.toolkit.fluxcd.io/v1",
        "kind": "HelmRepository",
        "metadata": metadata(&name),
        "spec": { "interval": "10m", "url": chart.location },
    });
    let chart_name = chart.chart.as_deref().unwrap_or_default();
    vec![source, helm_chart(chart_name, "HelmRepository", &name)]
}

/// The chart's values: the driver's tree over the context, with secrets as `reveal` gives them.
///
/// # Errors
/// The expression that fails, without any value.
pub fn helm_values(
    spec: &StyrminDeploymentSpec,
    driver: &Driver,
    reveal: &dyn Fn(&SecretRef) -> String,
) -> Result<Value, ValuesError> {
    values::render(&driver.values, &context::reveal(&spec.context, reveal))
}

/// The Secret that carries the values to Helm, unchanged: a HelmRelease's own `values` would lose
/// nulls. Its name follows its content, so new values roll out and old ones stay for a rollback.
///
/// # Errors
/// When the values cannot be written as YAML.
pub fn values_secret(
    spec: &StyrminDeploymentSpec,
    environment: &EnvironmentId,
    values: &Value,
) -> Result<Value, yaml::YamlError> {
    let text = yaml::to_string(values)?;
    let digest = canonical::digest_bytes(text.as_bytes());
    Ok(json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "labels": deployment_labels(spec, environment),
            "name": format!("{}-values-{}", spec.deployment_id.object_name(), canonical::short(&digest)),
            "namespace": environment.namespace(),
        },
        "immutable": true,
        "stringData": { VALUES_KEY: text },
        "type": "Opaque",
    }))
}

/// The HelmRelease. `values` is [`values_secret`]'s object, `stopped` the components that have no pods for
/// now.
#[must_use]
pub fn helm_release(
    spec: &StyrminDeploymentSpec,
    environment: &EnvironmentId,
    driver: &Driver,
    values: &Value,
    settings: ReleaseSettings,
    stopped: &BTreeSet<String>,
) -> Value {
    let name = spec.deployment_id.object_name();
    let mut labels = deployment_labels(spec, environment);
    labels[PROTECTED.0] = PROTECTED.1.into();
    let chart_kind =
        if driver.file.spec.helm.main.location.starts_with("oci://") { "OCIRepository" } else { "HelmChart" };
    json!({
        "apiVersion": "helm.toolkit.fluxcd.io/v2",
        "kind": "HelmRelease",
        "metadata": {
            "labels": labels,
            "name": name,
            "namespace": environment.namespace(),
        },
        "spec": {
            "commonMetadata": { "labels": { DEPLOYMENT_LABEL: spec.deployment_id, ENVIRONMENT_LABEL: environment } },
            "chartRef": { "kind": chart_kind, "name": layout::driver_name(driver.name(), &driver.digest) },
            "driftDetection": { "mode": "enabled" },
            "install": { "remediation": { "retries": settings.retries } },
            "interval": format!("{}s", settings.interval_seconds),
            "postRenderers": post_render::post_renderers(spec, driver, stopped),
            "releaseName": name,
            "storageNamespace": name,
            "targetNamespace": name,
            "timeout": format!("{}s", settings.timeout_seconds),
            "upgrade": { "remediation": { "retries": settings.retries, "strategy": "rollback" } },
            "valuesFrom": [
                { "kind": "Secret", "name": values["metadata"]["name"], "valuesKey": VALUES_KEY },
            ],
        },
    })
}

/// What a HelmRelease is, in digests.
#[must_use]
pub fn rendered(release: &Value) -> RenderedRelease {
    let mut rest = release["spec"].clone();
    let values = rest.as_object_mut().and_then(|spec| spec.remove("valuesFrom")).unwrap_or_default();
    let digest = |part: &Value| canonical::short(&canonical::digest(part)).to_owned();
    RenderedRelease { values: digest(&values), rest: digest(&rest) }
}

/// What [`helm_release`] writes into a HelmRelease's spec.
const RELEASE_FIELDS: [&str; 12] = [
    "chartRef",
    "commonMetadata",
    "driftDetection",
    "install",
    "interval",
    "postRenderers",
    "releaseName",
    "storageNamespace",
    "targetNamespace",
    "timeout",
    "upgrade",
    "valuesFrom",
];

/// A HelmRelease as it is found, for as long as a newer spec has to wait: only the components that have no
/// pods for now are others. `driver` is the one of what runs.
#[must_use]
pub fn held_release(found: &Value, driver: &Driver, stopped: &BTreeSet<String>) -> Value {
    let mut held = json!({
        "apiVersion": "helm.toolkit.fluxcd.io/v2",
        "kind": "HelmRelease",
        "metadata": {
            "labels": {},
            "name": found["metadata"]["name"],
            "namespace": found["metadata"]["namespace"],
        },
        "spec": {},
    });
    for label in [DEPLOYMENT_LABEL, ENVIRONMENT_LABEL, MANAGED_BY.0, PROTECTED.0] {
        if let Some(value) = found["metadata"]["labels"].get(label) {
            held["metadata"]["labels"][label] = value.clone();
        }
    }
    for field in RELEASE_FIELDS {
        if let Some(value) = found["spec"].get(field) {
            held["spec"][field] = value.clone();
        }
    }
    held["spec"]["postRenderers"] = post_render::restopped(&found["spec"]["postRenderers"], driver, stopped);
    held
}

/// Several objects as one YAML file.
///
/// # Errors
/// When one cannot be written.
pub fn documents<'a>(objects: impl IntoIterator<Item = &'a Value>) -> Result<String, yaml::YamlError> {
    let texts = objects.into_iter().map(yaml::to_string).collect::<Result<Vec<_>, _>>()?;
    Ok(texts.join("---\n"))
}
