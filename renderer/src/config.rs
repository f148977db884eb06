//! Configuration levels: what each may hold, how a change patches one, how they merge, and where
//! each resolved value came from.
//!
//! Keys are those of the original system (`fqdn_suffix`, `ingress_class`, …). Precedence:
//! deployment > environment > cluster > driver > Styrmin's own default. Mappings merge key by key,
//! lists and scalars are replaced as a whole, and so is `dedicated_ingress` (an environment that
//! sets it keeps its own value). `null` is a value: it wins over lower levels. To fall back to the
//! next level, a key is removed.

use crate::Problems;
use crate::names;
use jsonschema::ValidationError;
use jsonschema::error::ValidationErrorKind;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;

/// A JSON object.
pub type Object = Map<String, Value>;

/// Where a value was set, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Styrmin's own default.
    Styrmin,
    /// The driver's default.
    Driver,
    /// The cluster's configuration.
    Cluster,
    /// The environment's configuration.
    Environment,
    /// The deployment's own configuration.
    Deployment,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Styrmin => "Styrmin's default",
            Self::Driver => "driver default",
            Self::Cluster => "cluster",
            Self::Environment => "environment",
            Self::Deployment => "deployment",
        })
    }
}

/// Everything a level can set. An absent key is not set; `null` is set to nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Suffix of generated hostnames, for example `apps.example.com`.
    pub fqdn_suffix: Option<String>,
    /// Class of every Ingress; an empty string leaves the chart's own class alone.
    pub ingress_class: Option<String>,
    /// Any object, even an empty one, gives the environment an ingress controller of its own.
    pub dedicated_ingress: Option<Object>,
    /// CIDRs that may reach the environment's ingress.
    pub ip_whitelist: Option<Vec<String>>,
    /// Ids of load balancers, handed to the environment's ingress controller.
    pub load_balancer_ids: Option<Vec<String>>,
    /// Storage for what asks for nothing special.
    pub standard_storage: Option<StandardStorage>,
    /// Where pods may run.
    pub scheduling: Option<Scheduling>,
    /// Environment variables of every component.
    pub env_vars: Option<BTreeMap<String, Option<String>>>,
    /// Settings of single components, by the component's name.
    pub components: Option<BTreeMap<String, Option<Component>>>,
}

/// Storage classes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StandardStorage {
    /// Name of the StorageClass.
    pub storage_class: Option<String>,
}

/// Pod scheduling, in the terms of a pod's spec.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Scheduling {
    /// Labels a node must have.
    pub node_selector: Option<BTreeMap<String, Option<String>>>,
    /// Kubernetes tolerations.
    pub tolerations: Option<Vec<Value>>,
    /// Kubernetes affinity.
    pub affinity: Option<Object>,
    /// Name of a PriorityClass.
    pub priority_class_name: Option<String>,
}

/// Settings of one component.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Component {
    /// Number of pods.
    #[schemars(range(max = 1000))]
    pub replicas: Option<u32>,
    /// No pods, whatever `replicas` says; that stays known for the start.
    pub stopped: Option<bool>,
    /// Environment variables, in addition to those of all components.
    pub env_vars: Option<BTreeMap<String, Option<String>>>,
    /// Image override of the component's main container.
    pub image: Option<String>,
    /// Command override of the component's main container; the driver must permit it.
    pub command: Option<Vec<String>>,
    /// Arguments override of the component's main container; the driver must permit it.
    pub args: Option<Vec<String>>,
    /// Kubernetes resource requirements.
    pub resources: Option<Object>,
}

/// JSON Schema of [`Config`].
#[must_use]
pub fn schema() -> Value {
    schemars::schema_for!(Config).to_value()
}

static VALIDATOR: LazyLock<Result<jsonschema::Validator, String>> =
    LazyLock::new(|| jsonschema::validator_for(&schema()).map_err(|error| error.to_string()));

/// Checks what somebody wants a level to hold. `object` names the row in the problems.
///
/// # Errors
/// Every problem, with its field below `config`.
pub fn check(object: &str, level: Level, config: &Object) -> Result<(), Problems> {
    let mut problems = Problems::default();
    let value = Value::Object(config.clone());
    match &*VALIDATOR {
        Ok(validator) => {
            for error in validator.iter_errors(&value) {
                refused(object, &error, &mut problems);
            }
        }
        Err(error) => problems.push("Styrmin", "config schema", error.clone()),
    }
    if !problems.0.is_empty() {
        return Err(problems);
    }
    let typed: Config = match serde_json::from_value(value) {
        Ok(typed) => typed,
        Err(error) => {
            problems.push(object, "config", error.to_string());
            return Err(problems);
        }
    };
    let mut rule = |field: String, result: Result<(), String>| {
        if let Err(message) = result {
            problems.push(object, field, message);
        }
    };
    if let Some(suffix) = &typed.fqdn_suffix {
        rule("config.fqdn_suffix".into(), names::dns_name(suffix));
    }
    if let Some(class) = typed.ingress_class.as_deref().filter(|class| !class.is_empty()) {
        rule("config.ingress_class".into(), names::dns_name(class));
    }
    for (index, cidr) in typed.ip_whitelist.iter().flatten().enumerate() {
        rule(format!("config.ip_whitelist[{index}]"), check_cidr(cidr));
    }
    for name in typed.env_vars.iter().flatten().map(|(name, _)| name) {
        rule(format!("config.env_vars.{name}"), names::env_var(name));
    }
    for (component, settings) in typed.components.iter().flatten() {
        let prefix = format!("config.components.{component}");
        rule(prefix.clone(), names::dns_label(component, names::LABEL_MAX));
        for name in settings.iter().flat_map(|s| s.env_vars.iter().flatten()).map(|(name, _)| name) {
            rule(format!("{prefix}.env_vars.{name}"), names::env_var(name));
        }
    }
    if level != Level::Deployment && config.contains_key("components") {
        problems.push(object, "config.components", "components belong to one application; set them on the deployment");
    }
    problems.into_result()
}

/// What is wrong with a value. Of something that may be null, what is wrong with it when it is not: that it is
/// "not valid under any schema" would help nobody.
fn refused(object: &str, error: &ValidationError<'_>, problems: &mut Problems) {
    if let ValidationErrorKind::AnyOf { context } = error.kind() {
        let is_null = |branch: &&Vec<ValidationError<'_>>| {
            let here = |inner: &ValidationError<'_>| inner.instance_path() == error.instance_path();
            branch.iter().any(|inner| matches!(inner.kind(), ValidationErrorKind::Type { .. }) && here(inner))
        };
        let inner: Vec<&ValidationError<'_>> = context.iter().filter(|branch| !is_null(branch)).flatten().collect();
        if !inner.is_empty() {
            inner.into_iter().for_each(|error| refused(object, error, problems));
            return;
        }
    }
    let field = field("config", error.instance_path().as_str());
    problems.push(object, field, schema_message(&error.to_string()));
}

fn check_cidr(text: &str) -> Result<(), String> {
    let valid = text.split_once('/').is_some_and(|(address, bits)| {
        let most = match address.parse::<std::net::IpAddr>() {
            Ok(std::net::IpAddr::V4(_)) => 32,
            Ok(std::net::IpAddr::V6(_)) => 128,
            Err(_) => return false,
        };
        bits.parse::<u8>().is_ok_and(|bits| bits <= most)
    });
    if valid { Ok(()) } else { Err(format!("\"{text}\" is not a CIDR such as 10.0.0.0/8")) }
}

/// `config` and a JSON pointer as people write it: `config.ip_whitelist[0]`.
#[must_use]
pub fn field(root: &str, pointer: &str) -> String {
    let mut text = root.to_owned();
    for token in tokens(pointer) {
        if token.bytes().all(|byte| byte.is_ascii_digit()) && !token.is_empty() {
            text.push_str(&format!("[{token}]"));
        } else {
            text.push('.');
            text.push_str(&token);
        }
    }
    text
}

/// A JSON Schema error in words that need no schema at hand.
pub(crate) fn schema_message(text: &str) -> String {
    match text.strip_prefix("Additional properties are not allowed (") {
        Some(rest) => {
            let names = rest.split(" w").next().unwrap_or(rest);
            format!("{names} is not a setting; look at the configuration keys for the right name")
        }
        None => text.to_owned(),
    }
}

/// The unescaped tokens of a JSON pointer (RFC 6901).
pub fn tokens(pointer: &str) -> impl Iterator<Item = String> + '_ {
    pointer.split('/').skip(1).map(|token| token.replace("~1", "/").replace("~0", "~"))
}

/// Escapes one token of a JSON pointer.
#[must_use]
pub fn escape(token: &str) -> String {
    token.replace('~', "~0").replace('/', "~1")
}

/// JSON pointers of all values of `object` that are no mappings, empty ones excepted.
#[must_use]
pub fn leaves(object: &Object) -> Vec<String> {
    fn walk(object: &Object, prefix: &str, found: &mut Vec<String>) {
        for (key, value) in object {
            let pointer = format!("{prefix}/{}", escape(key));
            match value {
                Value::Object(inner) if !inner.is_empty() => walk(inner, &pointer, found),
                _ => found.push(pointer),
            }
        }
    }
    let mut found = Vec::new();
    walk(object, "", &mut found);
    found
}

/// The value at a JSON pointer.
#[must_use]
pub fn at<'a>(object: &'a Object, pointer: &str) -> Option<&'a Value> {
    let mut tokens = tokens(pointer);
    let first = object.get(&tokens.next()?)?;
    tokens.try_fold(first, |value, token| value.get(&token))
}

/// What a person changes on one level.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Patch {
    /// Merged into the level: mappings key by key, everything else replaced; `null` is a value.
    pub set: Object,
    /// JSON pointers of keys to remove, so that the next level's value counts again. Removing what
    /// is not there is no error: the wish is fulfilled.
    pub remove: Vec<String>,
}

/// Longest JSON pointer and deepest mapping that a patch may name.
const DEPTH_MAX: usize = 32;

impl Patch {
    /// Applies the patch to `level`: removals first, so that one patch can replace a mapping.
    ///
    /// # Errors
    /// When a pointer is not one; `level` is then unchanged.
    pub fn apply(&self, object: &str, level: &Object) -> Result<Object, Problems> {
        let mut problems = Problems::default();
        for pointer in &self.remove {
            if !pointer.starts_with('/') || pointer.len() < 2 || tokens(pointer).count() > DEPTH_MAX {
                problems.push(
                    object,
                    "remove",
                    format!("\"{pointer}\" is not a JSON pointer to a key, such as /env_vars/LOG_LEVEL"),
                );
            }
        }
        problems.into_result()?;
        let mut result = level.clone();
        for pointer in &self.remove {
            let path: Vec<String> = tokens(pointer).collect();
            remove(&mut result, &path);
        }
        merge(&mut result, &self.set);
        Ok(result)
    }
}

fn remove(object: &mut Object, path: &[String]) {
    match path {
        [] => {}
        [last] => {
            object.remove(last);
        }
        [first, rest @ ..] => {
            if let Some(Value::Object(inner)) = object.get_mut(first) {
                remove(inner, rest);
                // An emptied mapping says nothing more, except where emptiness is a setting.
                if inner.is_empty() && !ATOMIC.contains(&first.as_str()) {
                    object.remove(first);
                }
            }
        }
    }
}

fn merge(target: &mut Object, patch: &Object) {
    for (key, value) in patch {
        match (target.get_mut(key), value) {
            (Some(Value::Object(inner)), Value::Object(changes)) => merge(inner, changes),
            _ => {
                target.insert(key.clone(), value.clone());
            }
        }
    }
}

/// Top-level keys whose value is taken from one level as a whole.
const ATOMIC: [&str; 1] = ["dedicated_ingress"];

/// All levels as one, and where each value came from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Resolved {
    /// The merged tree.
    pub value: Object,
    /// JSON pointer of every leaf → the level that set it. Empty mappings and lists are leaves.
    pub origins: BTreeMap<String, Level>,
}

/// Merges `levels`, given weakest first.
#[must_use]
pub fn resolve<'a>(levels: impl IntoIterator<Item = (Level, &'a Object)>) -> Resolved {
    let mut resolved = Resolved::default();
    for (level, object) in levels {
        lay(&mut resolved.value, &mut resolved.origins, object, level, "");
    }
    resolved
}

fn lay(target: &mut Object, origins: &mut BTreeMap<String, Level>, source: &Object, level: Level, prefix: &str) {
    for (key, value) in source {
        let pointer = format!("{prefix}/{}", escape(key));
        let whole = prefix.is_empty() && ATOMIC.contains(&key.as_str());
        if whole && value.is_null() {
            // Whoever does not set it takes what the level below says, and cannot turn it off.
            continue;
        }
        match (target.get_mut(key), value) {
            (Some(Value::Object(inner)), Value::Object(changes)) if !whole => {
                if inner.is_empty() || !changes.is_empty() {
                    origins.remove(&pointer);
                }
                if changes.is_empty() {
                    if inner.is_empty() {
                        origins.insert(pointer, level);
                    }
                } else {
                    lay(inner, origins, changes, level, &pointer);
                }
            }
            (existing, _) => {
                // Only what stood there can have left origins; looking for them costs all of them.
                if existing.is_some() {
                    let below = format!("{pointer}/");
                    origins.retain(|at, _| *at != pointer && !at.starts_with(&below));
                }
                target.insert(key.clone(), value.clone());
                mark(origins, value, level, pointer);
            }
        }
    }
}

fn mark(origins: &mut BTreeMap<String, Level>, value: &Value, level: Level, pointer: String) {
    match value {
        Value::Object(inner) if !inner.is_empty() => {
            for (key, child) in inner {
                mark(origins, child, level, format!("{pointer}/{}", escape(key)));
            }
        }
        _ => {
            origins.insert(pointer, level);
        }
    }
}

/// Styrmin's own defaults, the weakest level.
#[must_use]
pub fn styrmin_defaults() -> Object {
    match json!({ "ingress_class": "traefik" }) {
        Value::Object(object) => object,
        _ => Object::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> Object {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn the_most_specific_level_wins_and_is_named() {
        let cluster =
            object(json!({"fqdn_suffix": "a.io", "env_vars": {"A": "1", "B": "1"}, "dedicated_ingress": {"x": 1}}));
        let environment =
            object(json!({"env_vars": {"B": "2"}, "ip_whitelist": ["10.0.0.0/8"], "dedicated_ingress": {"y": 2}}));
        let deployment = object(json!({"fqdn_suffix": null, "ip_whitelist": []}));
        let defaults = styrmin_defaults();
        let resolved = resolve([
            (Level::Styrmin, &defaults),
            (Level::Cluster, &cluster),
            (Level::Environment, &environment),
            (Level::Deployment, &deployment),
        ]);
        assert_eq!(
            Value::Object(resolved.value),
            json!({"ingress_class": "traefik", "fqdn_suffix": null, "env_vars": {"A": "1", "B": "2"}, "ip_whitelist": [], "dedicated_ingress": {"y": 2}})
        );
        let expected = BTreeMap::from([
            ("/ingress_class".to_owned(), Level::Styrmin),
            ("/fqdn_suffix".to_owned(), Level::Deployment),
            ("/env_vars/A".to_owned(), Level::Cluster),
            ("/env_vars/B".to_owned(), Level::Environment),
            ("/ip_whitelist".to_owned(), Level::Deployment),
            ("/dedicated_ingress/y".to_owned(), Level::Environment),
        ]);
        assert_eq!(resolved.origins, expected);
    }

    #[test]
    fn a_dedicated_ingress_is_not_turned_off_by_whoever_does_not_set_it() {
        let cluster = object(json!({"dedicated_ingress": {}, "fqdn_suffix": "a.io"}));
        let none = object(json!({"dedicated_ingress": null, "fqdn_suffix": null}));
        let resolved = resolve([(Level::Cluster, &cluster), (Level::Environment, &none), (Level::Deployment, &none)]);
        assert_eq!(Value::Object(resolved.value), json!({"dedicated_ingress": {}, "fqdn_suffix": null}));
        assert_eq!(resolved.origins["/dedicated_ingress"], Level::Cluster);
    }

    #[test]
    fn a_patch_sets_nulls_and_removes_keys() {
        let level = object(json!({"env_vars": {"A": "1", "B": "2"}, "fqdn_suffix": "a.io"}));
        let patch = Patch {
            set: object(json!({"env_vars": {"C": "3"}, "fqdn_suffix": null})),
            remove: vec!["/env_vars/A".into(), "/ip_whitelist".into()],
        };
        assert_eq!(
            Value::Object(patch.apply("x", &level).unwrap()),
            json!({"env_vars": {"B": "2", "C": "3"}, "fqdn_suffix": null})
        );
        let all = Patch { remove: vec!["/env_vars/A".into(), "/env_vars/B".into()], ..Patch::default() };
        assert_eq!(Value::Object(all.apply("x", &level).unwrap()), json!({"fqdn_suffix": "a.io"}));
        let wrong = Patch { remove: vec!["env_vars".into()], ..Patch::default() };
        assert!(wrong.apply("deployment \"x\"", &level).unwrap_err().to_string().contains("JSON pointer"));
    }

    #[test]
    fn what_a_level_cannot_hold_is_refused_with_its_field() {
        let cases = [
            (json!({"fqdn_sufix": "a"}), "config: 'fqdn_sufix' is not a setting"),
            (json!({"fqdn_suffix": "A b"}), "config.fqdn_suffix: "),
            (json!({"fqdn_suffix": 3}), "config.fqdn_suffix: 3 is not of types"),
            (json!({"ip_whitelist": ["10.0.0.0/33"]}), "config.ip_whitelist[0]: "),
            (json!({"env_vars": {"1A": "x"}}), "config.env_vars.1A: "),
            (json!({"env_vars": {"A": 1}}), "config.env_vars.A: "),
            (json!({"components": {}}), "config.components: "),
            (json!({"components": {"web": {"replicas": 5000}}}), "config.components.web.replicas: 5000 is greater"),
            (json!({"components": {"web": {"replica": 1}}}), "config.components.web: 'replica' is not a setting"),
            (json!({"components": {"web": {"stopped": "x"}}}), "config.components.web.stopped: "),
            (json!({"components": {"web": 5}}), "config.components.web: 5 is not"),
        ];
        for (config, expected) in cases {
            let error = check("cluster \"c\"", Level::Cluster, &object(config.clone())).unwrap_err().to_string();
            assert!(error.starts_with("cluster \"c\": ") && error.contains(expected), "{config}: {error}");
        }
        let good =
            object(json!({"fqdn_suffix": null, "env_vars": {"A": null}, "components": {"web": {"replicas": 2}}}));
        assert_eq!(check("deployment \"d\"", Level::Deployment, &good), Ok(()));
    }
}
