//! What of a snapshot goes over the wire: all of it, what differs from the last one, or nothing. Pure.
//!
//! Of ten thousand objects few change between two rounds: only of those is a row of the report made.

use crate::store::Objects;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher as _};
use styrmin_renderer::canonical;

/// Kind, namespace and name.
pub type Key = (&'static str, Box<str>, Box<str>);

/// Makes the row of an object; `None`: there is none.
pub type Row = Box<dyn Fn() -> Option<Value> + Send + Sync>;

/// An object that a report can tell of.
pub struct Source {
    /// Which one.
    pub key: Key,
    /// Differs whenever the object does.
    pub mark: u64,
    /// Its row.
    pub row: Row,
}

/// What the server has of a snapshot.
#[derive(Debug)]
pub struct Sent {
    digest: String,
    /// By kind.
    rows: BTreeMap<&'static str, Objects<Mark>>,
}

#[derive(Debug, Clone, Copy)]
struct Mark {
    source: u64,
    row: u64,
}

/// What to send.
pub struct Message {
    /// Objects. Each is made when it is sent: the texts of thousands of them are more than all that is kept.
    pub items: Vec<Row>,
    /// Digest of the whole snapshot.
    pub digest: String,
    /// What the items differ from, as the API takes it; `None`: they are all there are.
    pub delta: Option<Value>,
}

impl Message {
    /// The items as the text of a JSON array, piece by piece.
    pub fn text(self) -> impl Iterator<Item = String> + Send + Sync {
        let rows = self.items.into_iter().filter_map(|row| row());
        let rows = rows.enumerate().map(|(number, row)| {
            let separator = if number == 0 { "" } else { "," };
            format!("{separator}{}", canonical::to_string(&row))
        });
        std::iter::once("[".to_owned()).chain(rows).chain(std::iter::once("]".to_owned()))
    }
}

/// A mark of something.
#[must_use]
pub fn mark(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// What to send of a snapshot when the server has `sent` of the last one, and what it has then. `None`: it has
/// all.
#[must_use]
pub fn message(sources: impl IntoIterator<Item = Source>, sent: Option<&Sent>) -> (Option<Message>, Sent) {
    let mut rows: BTreeMap<&'static str, Objects<Mark>> = BTreeMap::new();
    let mut items = Vec::new();
    for Source { key, mark: source, row } in sources {
        let (kind, namespace, name) = key;
        let known = sent.and_then(|sent| sent.rows.get(kind)?.get(&namespace, &name));
        if let Some(known) = known.filter(|known| known.source == source) {
            rows.entry(kind).or_default().insert((namespace, name), *known);
            continue;
        }
        let Some(made) = row() else { continue };
        let text = canonical::to_string(&made);
        let new = Mark { source, row: mark(&text) };
        // An object may change in what no report tells of.
        if known.is_none_or(|known| known.row != new.row) {
            items.push(row);
        }
        rows.entry(kind).or_default().insert((namespace, name), new);
    }
    let all =
        rows.iter().flat_map(|(kind, of)| of.iter().map(|(namespace, name, mark)| (*kind, namespace, name, mark)));
    let digest = canonical::digest_parts(all.flat_map(|(kind, namespace, name, mark)| {
        [Cow::from(kind), Cow::from(namespace), Cow::from(name), Cow::from(format!("{:016x}", mark.row))]
    }));
    let now = Sent { digest: digest.clone(), rows };
    let Some(sent) = sent else { return (Some(Message { items, digest, delta: None }), now) };
    if sent.digest == now.digest {
        return (None, now);
    }
    let is_there = |kind: &str, namespace: &str, name: &str| {
        now.rows.get(kind).is_some_and(|of| of.get(namespace, name).is_some())
    };
    let removed: Vec<Value> = sent
        .rows
        .iter()
        .flat_map(|(kind, of)| of.iter().map(move |(namespace, name, _)| (kind, namespace, name)))
        .filter(|(kind, namespace, name)| !is_there(kind, namespace, name))
        .map(|(kind, namespace, name)| json!({ "kind": kind, "namespace": namespace, "name": name }))
        .collect();
    let delta = json!({ "base": sent.digest, "removed": removed });
    (Some(Message { items, digest, delta: Some(delta) }), now)
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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn pod(name: &str, ready: bool, version: u64) -> (&str, bool, u64) {
        (name, ready, version)
    }

    fn row(name: &str, ready: bool) -> Value {
        json!({ "namespace": "n", "name": name, "ready": ready })
    }

    fn items(message: &Message) -> Vec<Value> {
        message.items.iter().map(|row| row().unwrap()).collect()
    }

    fn sources(pods: &[(&str, bool, u64)]) -> Vec<Source> {
        let source = |(name, ready, version): &(&str, bool, u64)| {
            let (name, ready) = ((*name).to_owned(), *ready);
            Source {
                key: ("Pod", "n".into(), name.as_str().into()),
                mark: mark((&name, ready, version)),
                row: Box::new(move || Some(row(&name, ready))),
            }
        };
        pods.iter().map(source).collect()
    }

    #[test]
    fn only_what_differs_is_sent() {
        let three = [pod("a", true, 1), pod("b", true, 1), pod("c", true, 1)];
        let (message_of_all, sent) = message(sources(&three), None);
        let message_of_all = message_of_all.unwrap();
        assert_eq!(items(&message_of_all), [row("a", true), row("b", true), row("c", true)]);
        assert_eq!(message_of_all.delta, None);
        assert_eq!(message_of_all.digest, sent.digest());
        // In whatever order they come, and whatever changed that no report tells of.
        let same = [pod("c", true, 1), pod("a", true, 2), pod("b", true, 1)];
        let (nothing, sent) = message(sources(&same), Some(&sent));
        assert!(nothing.is_none());
        let now = [pod("a", true, 2), pod("b", false, 1), pod("d", true, 1)];
        let (differs, next) = message(sources(&now), Some(&sent));
        let differs = differs.unwrap();
        assert_eq!(items(&differs), [row("b", false), row("d", true)]);
        let removed = json!([{ "kind": "Pod", "namespace": "n", "name": "c" }]);
        assert_eq!(differs.delta, Some(json!({ "base": sent.digest(), "removed": removed })));
        assert_ne!(differs.digest, sent.digest());
        assert_eq!(next.digest(), differs.digest);
        let text: String = differs.text().collect();
        assert_eq!(text, format!("[{},{}]", row("b", false), row("d", true)));
    }

    #[test]
    fn rows_are_made_of_what_changed_only() {
        let made = Arc::new(AtomicUsize::new(0));
        let source = |name: &str, version: u64| {
            let made = Arc::clone(&made);
            Source {
                key: ("Pod", "n".into(), name.into()),
                mark: version,
                row: Box::new(move || {
                    made.fetch_add(1, Ordering::Relaxed);
                    Some(row("x", true))
                }),
            }
        };
        let (_, sent) = message(vec![source("a", 1), source("b", 1)], None);
        assert_eq!(made.swap(0, Ordering::Relaxed), 2);
        let (_, sent) = message(vec![source("a", 1), source("b", 2)], Some(&sent));
        assert_eq!(made.swap(0, Ordering::Relaxed), 1);
        let _ = message(vec![source("a", 1), source("b", 2)], Some(&sent));
        assert_eq!(made.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_kind_tells_objects_of_one_name_apart_and_one_without_a_row_is_not_there() {
        let of = |kind: &'static str, has: bool| Source {
            key: (kind, "n".into(), "x".into()),
            mark: 1,
            row: Box::new(move || has.then(|| json!({ "kind": kind }))),
        };
        let (_, sent) = message(vec![of("GitRepository", true), of("Kustomization", true), of("Pod", false)], None);
        let (differs, _) = message(vec![of("Kustomization", true)], Some(&sent));
        let removed = differs.unwrap().delta.unwrap()["removed"].clone();
        assert_eq!(removed, json!([{ "kind": "GitRepository", "namespace": "n", "name": "x" }]));
    }
}
