//! What differs between two instances, value by value.

use crate::config::{escape, field};
use crate::spec::StyrminDeploymentSpec;
use serde_json::Value;

/// One value that differs.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// JSON pointer into the spec, for example `/context/parameters/image`.
    pub pointer: String,
    /// The same as people write it: `context.parameters.image`.
    pub field: String,
    /// `None`: it was not there. A secret shows as its reference.
    pub old: Option<Value>,
    /// `None`: it is no longer there.
    pub new: Option<Value>,
}

/// The changes from `old` (`None`: nothing) to `new`, sorted by pointer. The instance's own id is
/// not a change.
#[must_use]
pub fn specs(old: Option<&StyrminDeploymentSpec>, new: &StyrminDeploymentSpec) -> Vec<Change> {
    let strip = |spec: &StyrminDeploymentSpec| {
        let mut value = spec.to_value();
        if let Some(object) = value.as_object_mut() {
            object.remove("instanceId");
        }
        value
    };
    values(&old.map_or(Value::Object(serde_json::Map::new()), strip), &strip(new))
}

/// The changes between two trees. Mappings are compared key by key, lists as a whole.
#[must_use]
pub fn values(old: &Value, new: &Value) -> Vec<Change> {
    let mut changes = Vec::new();
    compare(Some(old), Some(new), String::new(), &mut changes);
    changes
}

/// Longest value in words.
const VALUE_MAX: usize = 80;

/// What differs between two specs for people, a line each: what somebody sets, not what follows from it.
#[must_use]
pub fn words(old: &StyrminDeploymentSpec, new: &StyrminDeploymentSpec) -> Vec<String> {
    let mut lines: Vec<String> = specs(Some(old), new).iter().filter_map(line).collect();
    lines.dedup();
    lines
}

fn line(change: &Change) -> Option<String> {
    let field = match change.field.strip_prefix("context.") {
        Some(rest) if rest.starts_with("parameters.") => rest,
        Some(rest) => rest.strip_prefix("instance.").filter(|rest| rest.starts_with("config"))?,
        None if change.field == "driver.digest" => return None,
        None => &change.field,
    };
    let is_secret = |value: &Value| crate::context::SecretRef::read(value).is_some();
    if change.pointer.contains("/secretRef/") || [&change.old, &change.new].into_iter().flatten().any(is_secret) {
        let name = field.split(".secretRef").next().unwrap_or(field);
        // Its name and key do not change; of the fingerprint nobody learns anything.
        return Some(format!("{name}: another secret"));
    }
    Some(match (&change.old, &change.new) {
        (Some(old), Some(new)) => format!("{field}: {} → {}", short(old), short(new)),
        (None, Some(new)) => format!("{field}: {}, was not set", short(new)),
        (Some(old), None) => format!("{field}: not set any more, was {}", short(old)),
        (None, None) => return None,
    })
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(VALUE_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn compare(old: Option<&Value>, new: Option<&Value>, pointer: String, out: &mut Vec<Change>) {
    if old == new {
        return;
    }
    let empty = serde_json::Map::new();
    let maps = match (old, new) {
        (Some(Value::Object(a)), Some(Value::Object(b))) => Some((a, b)),
        // A mapping that comes or goes is shown leaf by leaf, unless it is empty or a secret's.
        (None, Some(b)) if crate::context::SecretRef::read(b).is_some() => None,
        (Some(a), None) if crate::context::SecretRef::read(a).is_some() => None,
        (None, Some(Value::Object(b))) if !b.is_empty() => Some((&empty, b)),
        (Some(Value::Object(a)), None) if !a.is_empty() => Some((a, &empty)),
        _ => None,
    };
    let Some((a, b)) = maps else {
        out.push(Change {
            field: field("", &pointer).trim_start_matches('.').to_owned(),
            pointer,
            old: old.cloned(),
            new: new.cloned(),
        });
        return;
    };
    let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    for key in keys {
        compare(a.get(key), b.get(key), format!("{pointer}/{}", escape(key)), out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn words_tell_what_somebody_set_and_no_secret() {
        let spec = |context: Value, version: &str| -> StyrminDeploymentSpec {
            serde_json::from_value(json!({
                "deploymentId": "d23456789012", "instanceId": version, "lifecycle": "running",
                "driver": { "name": "web", "version": "1.0.0", "digest": version }, "applicationVersion": version,
                "context": context,
            }))
            .unwrap()
        };
        let secret =
            |fingerprint: &str| json!({ "secretRef": { "name": "n", "key": "k", "fingerprint": fingerprint } });
        let old = json!({
            "instance": { "config": { "env_vars": { "A": "1", "B": "2" } } },
            "parameters": { "image": "nginx", "password": secret("f1"), "token": secret("t1") },
            "components": { "web": { "env_vars": { "A": "1" } } },
        });
        let new = json!({
            "instance": { "config": { "env_vars": { "A": "x".repeat(100), "C": null } } },
            "parameters": { "image": "nginx", "password": secret("f2") },
            "components": { "web": { "env_vars": { "A": "3" } } },
        });
        let lines = words(&spec(old.clone(), "1"), &spec(new, "2"));
        assert_eq!(
            lines,
            [
                "applicationVersion: \"1\" → \"2\"".to_owned(),
                format!("config.env_vars.A: \"1\" → \"{}…", "x".repeat(79)),
                "config.env_vars.B: not set any more, was \"2\"".to_owned(),
                "config.env_vars.C: null, was not set".to_owned(),
                "parameters.password: another secret".to_owned(),
                "parameters.token: another secret".to_owned(),
            ]
        );
        assert_eq!(words(&spec(old.clone(), "1"), &spec(old, "1")), Vec::<String>::new());
    }

    #[test]
    fn every_leaf_that_differs_is_listed_once() {
        let old = json!({"a": {"b": 1, "c": [1, 2], "gone": {"x": 1}}, "same": 1});
        let new = json!({"a": {"b": null, "c": [1], "x/y": {}}, "same": 1});
        let changes: Vec<(String, Option<Value>, Option<Value>)> =
            values(&old, &new).into_iter().map(|c| (c.field, c.old, c.new)).collect();
        assert_eq!(
            changes,
            [
                ("a.b".into(), Some(json!(1)), Some(Value::Null)),
                ("a.c".into(), Some(json!([1, 2])), Some(json!([1]))),
                ("a.gone.x".into(), Some(json!(1)), None),
                ("a.x/y".into(), None, Some(json!({}))),
            ]
        );
        assert_eq!(values(&old, &old), []);
    }
}
