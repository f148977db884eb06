//! What is kept of the network policies and Services that the operator wrote: whose they are, and a digest
//! of what of them is ours. Whole objects of ten thousand deployments would fill the memory.
//!
//! Filled by [`crate::watch`] only. A list replaces everything at once, when it is complete.

use serde_json::Value;
use std::collections::{BTreeMap, HashSet};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use styrmin_renderer::network::{self, ALIAS_LABEL};
use styrmin_renderer::spec::DEPLOYMENT_LABEL;

/// What is kept of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// Id of the deployment that it belongs to; an alias belongs to the one that it leads to.
    pub owner: Box<str>,
    /// It is a service alias.
    pub alias: bool,
    /// [`network::shape`] of it.
    pub shape: Box<str>,
    /// Its UID.
    pub uid: Box<str>,
    /// It is on its way out.
    pub going: bool,
}

/// Most losses that are remembered; those of applications that are gone are not asked for any more.
const LOST_MAX: usize = 10_000;

impl Kept {
    /// What is kept of an object of a kind.
    #[must_use]
    pub fn of(kind: &str, object: &Value) -> Self {
        let labels = &object["metadata"]["labels"];
        Self {
            owner: labels[DEPLOYMENT_LABEL].as_str().unwrap_or_default().into(),
            alias: labels[ALIAS_LABEL.0] == ALIAS_LABEL.1,
            shape: network::shape(kind, object).into(),
            uid: object["metadata"]["uid"].as_str().unwrap_or_default().into(),
            going: !object["metadata"]["deletionTimestamp"].is_null(),
        }
    }
}

/// Namespace and name.
type Key = (Box<str>, Box<str>);

/// One kind of objects.
#[derive(Debug, Default)]
pub struct Store {
    state: RwLock<State>,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<Key, Kept>,
    /// The list that is coming in.
    listed: Option<BTreeMap<Key, Kept>>,
    /// Deleted by us: their end is no loss.
    released: HashSet<Key>,
    /// Deleted by somebody else, and not there again.
    lost: HashSet<Key>,
}

impl State {
    fn gone(&mut self, key: Key) {
        if self.lost.len() >= LOST_MAX {
            self.lost.clear();
        }
        if !self.released.remove(&key) {
            self.lost.insert(key);
        }
    }
}

fn key(namespace: &str, name: &str) -> Key {
    (namespace.into(), name.into())
}

impl Store {
    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A list begins.
    pub fn begin(&self) {
        self.write().listed = Some(BTreeMap::new());
    }

    /// An object of the list that is coming in, or one that was written.
    pub fn put(&self, namespace: &str, name: &str, kept: Kept) {
        let state = &mut *self.write();
        let key = key(namespace, name);
        if let Some(listed) = &mut state.listed {
            listed.insert(key, kept);
        } else {
            state.lost.remove(&key);
            state.objects.insert(key, kept);
        }
    }

    /// The list is complete.
    pub fn complete(&self) {
        let state = &mut *self.write();
        let Some(listed) = state.listed.take() else { return };
        let before = std::mem::replace(&mut state.objects, listed);
        for (key, _) in before {
            if !state.objects.contains_key(&key) {
                state.gone(key);
            }
        }
        let State { objects, lost, .. } = state;
        lost.retain(|key| !objects.contains_key(key));
    }

    /// An object is gone.
    pub fn remove(&self, namespace: &str, name: &str) {
        let state = &mut *self.write();
        let key = key(namespace, name);
        if state.objects.remove(&key).is_some() {
            state.gone(key);
        }
    }

    /// We are about to delete an object.
    pub fn release(&self, namespace: &str, name: &str) {
        let state = &mut *self.write();
        let key = key(namespace, name);
        if state.objects.contains_key(&key) {
            state.released.insert(key);
        }
    }

    /// An object.
    #[must_use]
    pub fn get(&self, namespace: &str, name: &str) -> Option<Kept> {
        self.read().objects.get(&key(namespace, name)).cloned()
    }

    /// Whether somebody else deleted an object, since this process watches.
    #[must_use]
    pub fn is_lost(&self, namespace: &str, name: &str) -> bool {
        self.read().lost.contains(&key(namespace, name))
    }

    /// The objects in a namespace, by name.
    #[must_use]
    pub fn within(&self, namespace: &str) -> Vec<(String, Kept)> {
        let first = key(namespace, "");
        let state = self.read();
        let all = state.objects.range(first..).take_while(|((of, _), _)| **of == *namespace);
        all.map(|((_, name), kept)| (name.to_string(), kept.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(owner: &str) -> Kept {
        Kept { owner: owner.into(), alias: false, shape: "s".into(), uid: "u".into(), going: false }
    }

    #[test]
    fn a_list_replaces_everything_when_it_is_complete() {
        let store = Store::default();
        store.put("a", "one", kept("x"));
        store.put("a", "two", kept("x"));
        store.put("ab", "one", kept("y"));
        store.begin();
        store.put("a", "two", kept("z"));
        assert_eq!(store.within("a").len(), 2, "not half of a list");
        assert_eq!(store.get("a", "two"), Some(kept("x")));
        store.complete();
        assert_eq!(store.within("a"), [("two".to_owned(), kept("z"))]);
        assert!(store.is_lost("a", "one") && store.is_lost("ab", "one") && !store.is_lost("a", "two"));
    }

    #[test]
    fn what_we_delete_is_no_loss() {
        let store = Store::default();
        store.put("a", "one", kept("x"));
        store.release("a", "one");
        store.remove("a", "one");
        assert!(!store.is_lost("a", "one"));
        store.put("a", "one", kept("x"));
        store.remove("a", "one");
        assert!(store.is_lost("a", "one"), "this time somebody else did");
        store.put("a", "one", kept("x"));
        assert!(!store.is_lost("a", "one"));
    }
}
