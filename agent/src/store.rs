//! What is kept of the objects of one kind, by namespace and name.
//!
//! Filled by [`crate::watch`] only. A list replaces everything at once, when it is complete, so nobody ever
//! reads half of one. What is kept of an object is [`crate::kept`]'s.

use std::collections::{BTreeMap, HashSet};
use std::mem::take;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Namespace (empty for objects of the cluster) and name.
pub type Key = (Box<str>, Box<str>);

/// Most losses that are remembered; those of applications that are gone are not asked for any more.
const LOST_MAX: usize = 10_000;

/// One kind of objects.
#[derive(Debug)]
pub struct Store<T> {
    state: RwLock<State<T>>,
}

#[derive(Debug)]
struct State<T> {
    objects: BTreeMap<Key, T>,
    /// The list that is coming in.
    listed: Option<BTreeMap<Key, T>>,
    losses: Option<Losses>,
}

/// What became of objects whose end matters.
#[derive(Debug, Default)]
struct Losses {
    /// Deleted by us: their end is no loss.
    released: HashSet<Key>,
    /// Deleted by somebody else, and not there again.
    lost: HashSet<Key>,
}

impl Losses {
    fn gone(&mut self, key: Key) {
        if self.lost.len() >= LOST_MAX {
            self.lost.clear();
        }
        if !self.released.remove(&key) {
            self.lost.insert(key);
        }
    }
}

impl<T> State<T> {
    fn gone(&mut self, key: &Key) {
        if let Some(losses) = &mut self.losses {
            losses.gone(key.clone());
        }
    }

    fn there(&mut self, key: &Key) {
        if let Some(losses) = &mut self.losses {
            losses.lost.remove(key);
        }
    }
}

/// A key.
#[must_use]
pub fn key(namespace: &str, name: &str) -> Key {
    (namespace.into(), name.into())
}

impl<T> Default for Store<T> {
    fn default() -> Self {
        Self { state: RwLock::new(State { objects: BTreeMap::new(), listed: None, losses: None }) }
    }
}

impl<T: Clone + PartialEq> Store<T> {
    /// One that remembers which objects somebody else deleted.
    #[must_use]
    pub fn with_losses() -> Self {
        let store = Self::default();
        store.write().losses = Some(Losses::default());
        store
    }

    fn read(&self) -> RwLockReadGuard<'_, State<T>> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State<T>> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A list begins.
    pub fn begin(&self) {
        self.write().listed = Some(BTreeMap::new());
    }

    /// An object of the list that is coming in.
    pub fn list(&self, key: Key, kept: T) {
        if let Some(listed) = &mut self.write().listed {
            listed.insert(key, kept);
        }
    }

    /// The list is complete. Gives what was different before, and what it was.
    pub fn complete(&self) -> Vec<(Key, Option<T>)> {
        let state = &mut *self.write();
        let Some(listed) = state.listed.take() else { return Vec::new() };
        let mut before = std::mem::replace(&mut state.objects, listed);
        let objects = take(&mut state.objects);
        let mut changed = Vec::new();
        for (key, kept) in &objects {
            let known = before.remove(key);
            if known.as_ref() != Some(kept) {
                changed.push((key.clone(), known));
            }
            state.there(key);
        }
        for (key, known) in before {
            state.gone(&key);
            changed.push((key, Some(known)));
        }
        state.objects = objects;
        changed
    }

    /// An object was written. Gives what was known of it.
    pub fn put(&self, key: Key, kept: T) -> Option<T> {
        let state = &mut *self.write();
        state.there(&key);
        state.objects.insert(key, kept)
    }

    /// An object is gone. Gives what was known of it.
    pub fn remove(&self, key: &Key) -> Option<T> {
        let state = &mut *self.write();
        let known = state.objects.remove(key)?;
        state.gone(key);
        Some(known)
    }

    /// We are about to delete an object.
    pub fn release(&self, namespace: &str, name: &str) {
        let state = &mut *self.write();
        let key = key(namespace, name);
        if state.objects.contains_key(&key)
            && let Some(losses) = &mut state.losses
        {
            losses.released.insert(key);
        }
    }

    /// Whether somebody else deleted an object, since this process watches.
    #[must_use]
    pub fn is_lost(&self, namespace: &str, name: &str) -> bool {
        self.read().losses.as_ref().is_some_and(|losses| losses.lost.contains(&key(namespace, name)))
    }

    /// What is kept of an object.
    #[must_use]
    pub fn get(&self, namespace: &str, name: &str) -> Option<T> {
        self.read().objects.get(&key(namespace, name)).cloned()
    }

    /// Whether an object is there.
    #[must_use]
    pub fn contains(&self, namespace: &str, name: &str) -> bool {
        self.read().objects.contains_key(&key(namespace, name))
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.read().objects.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The objects in a namespace, by name.
    #[must_use]
    pub fn within(&self, namespace: &str) -> Vec<(Box<str>, T)> {
        self.beginning(namespace, "")
    }

    /// The objects in a namespace whose names begin so, by name.
    #[must_use]
    pub fn beginning(&self, namespace: &str, prefix: &str) -> Vec<(Box<str>, T)> {
        let state = self.read();
        let all = state.objects.range(key(namespace, prefix)..);
        let all = all.take_while(|((of, name), _)| **of == *namespace && name.starts_with(prefix));
        all.map(|((_, name), kept)| (name.clone(), kept.clone())).collect()
    }

    /// The objects that are meant, in order.
    #[must_use]
    pub fn filter(&self, meant: impl Fn(&Key, &T) -> bool) -> Vec<(Key, T)> {
        let state = self.read();
        let all = state.objects.iter().filter(|(key, kept)| meant(key, kept));
        all.map(|(key, kept)| (key.clone(), kept.clone())).collect()
    }

    /// All of them, in order.
    #[must_use]
    pub fn all(&self) -> Vec<(Key, T)> {
        self.filter(|_, _| true)
    }

    /// The names of all of them, in order.
    #[must_use]
    pub fn keys(&self) -> Vec<Key> {
        self.read().objects.keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_replaces_everything_when_it_is_complete() {
        let store = Store::with_losses();
        for (namespace, name) in [("a", "one"), ("a", "two"), ("a", "three"), ("ab", "one")] {
            store.put(key(namespace, name), "x");
        }
        store.begin();
        store.list(key("a", "two"), "z");
        store.list(key("a", "three"), "x");
        assert_eq!(store.within("a").len(), 3, "not half of a list");
        assert_eq!(store.get("a", "two"), Some("x"));
        let changed = store.complete();
        let expected = [(("a", "two"), Some("x")), (("a", "one"), Some("x")), (("ab", "one"), Some("x"))];
        assert_eq!(changed, expected.map(|((namespace, name), known)| (key(namespace, name), known)));
        assert_eq!(store.within("a"), [("three".into(), "x"), ("two".into(), "z")]);
        assert!(store.is_lost("a", "one") && store.is_lost("ab", "one") && !store.is_lost("a", "two"));
    }

    #[test]
    fn what_we_delete_is_no_loss() {
        let store = Store::with_losses();
        store.put(key("a", "one"), "x");
        store.release("a", "one");
        assert_eq!(store.remove(&key("a", "one")), Some("x"));
        assert!(!store.is_lost("a", "one"));
        store.put(key("a", "one"), "x");
        store.remove(&key("a", "one"));
        assert!(store.is_lost("a", "one"), "this time somebody else did");
        store.put(key("a", "one"), "x");
        assert!(!store.is_lost("a", "one"));
    }
}
