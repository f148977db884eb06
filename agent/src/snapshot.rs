//! What of a snapshot goes over the wire: all of it, what differs from the last one, or nothing. Pure.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use styrmin_renderer::canonical;

/// Kind, namespace and name.
type Key = (Box<str>, Box<str>, Box<str>);

/// A whole snapshot of one kind of object.
#[derive(Debug)]
pub struct Snapshot {
    digest: String,
    rows: BTreeMap<Key, (u64, Value)>,
}

/// What the server has of it: a hash for each object.
#[derive(Debug)]
pub struct Sent {
    digest: String,
    rows: BTreeMap<Key, u64>,
}

/// What to send.
#[derive(Debug, PartialEq)]
pub struct Message {
    /// Objects.
    pub items: Vec<Value>,
    /// Digest of the whole snapshot.
    pub digest: String,
    /// What the items differ from, as the API takes it; `None`: they are all there are.
    pub delta: Option<Value>,
}

impl Snapshot {
    /// From the rows of a report. `kind` is that of rows that do not say theirs.
    #[must_use]
    pub fn new(kind: &str, rows: Vec<Value>) -> Self {
        let mut parts = Vec::with_capacity(rows.len());
        let mut found = BTreeMap::new();
        for row in rows {
            let text = |name: &str, other: &str| row[name].as_str().unwrap_or(other).into();
            let key: Key = (text("kind", kind), text("namespace", ""), text("name", ""));
            let content = canonical::to_string(&row);
            let mut hasher = DefaultHasher::new();
            content.hash(&mut hasher);
            parts.push((key.clone(), canonical::digest_bytes(content.as_bytes())));
            found.insert(key, (hasher.finish(), row));
        }
        parts.sort_unstable();
        let parts = parts.iter().flat_map(|((kind, namespace, name), digest)| [&**kind, namespace, name, digest]);
        Self { digest: canonical::digest_parts(parts), rows: found }
    }

    /// What to send when the server has `sent` of it; `None`: it has all.
    #[must_use]
    pub fn message(&self, sent: Option<&Sent>) -> Option<Message> {
        let all = || self.rows.values().map(|(_, row)| row.clone()).collect();
        let digest = self.digest.clone();
        let Some(sent) = sent else { return Some(Message { items: all(), digest, delta: None }) };
        if sent.digest == self.digest {
            return None;
        }
        let differs = |(key, (hash, _)): &(&Key, &(u64, Value))| sent.rows.get(*key) != Some(hash);
        let items: Vec<Value> = self.rows.iter().filter(differs).map(|(_, (_, row))| row.clone()).collect();
        let gone = sent.rows.keys().filter(|key| !self.rows.contains_key(*key));
        let removed: Vec<Value> =
            gone.map(|(kind, namespace, name)| json!({ "kind": kind, "namespace": namespace, "name": name })).collect();
        let delta = json!({ "base": sent.digest, "removed": removed });
        Some(Message { items, digest, delta: Some(delta) })
    }

    /// The server has it now.
    #[must_use]
    pub fn sent(self) -> Sent {
        Sent { digest: self.digest, rows: self.rows.into_iter().map(|(key, (hash, _))| (key, hash)).collect() }
    }
}

impl Sent {
    /// Digest of the whole snapshot.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, ready: bool) -> Value {
        json!({ "namespace": "n", "name": name, "ready": ready })
    }

    #[test]
    fn only_what_differs_is_sent() {
        let first = Snapshot::new("Pod", vec![pod("a", true), pod("b", true), pod("c", true)]);
        let message = first.message(None).unwrap();
        assert_eq!((message.items.len(), &message.delta), (3, &None));
        let sent = first.sent();
        // In whatever order they come.
        let same = Snapshot::new("Pod", vec![pod("c", true), pod("a", true), pod("b", true)]);
        assert_eq!(same.message(Some(&sent)), None);
        let now = Snapshot::new("Pod", vec![pod("a", true), pod("b", false), pod("d", true)]);
        let message = now.message(Some(&sent)).unwrap();
        assert_eq!(message.items, [pod("b", false), pod("d", true)]);
        let removed = json!([{ "kind": "Pod", "namespace": "n", "name": "c" }]);
        assert_eq!(message.delta, Some(json!({ "base": sent.digest(), "removed": removed })));
        assert_ne!(message.digest, sent.digest());
        assert_eq!(now.sent().digest(), message.digest);
    }

    #[test]
    fn a_row_names_its_kind_where_several_share_a_snapshot() {
        let of = |kind: &str| json!({ "kind": kind, "namespace": "n", "name": "x" });
        let both = Snapshot::new("", vec![of("GitRepository"), of("Kustomization")]);
        let sent = both.sent();
        let one = Snapshot::new("", vec![of("Kustomization")]);
        let removed = one.message(Some(&sent)).unwrap().delta.unwrap()["removed"].clone();
        assert_eq!(removed, json!([{ "kind": "GitRepository", "namespace": "n", "name": "x" }]));
    }
}
