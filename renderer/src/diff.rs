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
