//! What is kept of the objects of one kind, by namespace and name.
//!
//! Filled by [`crate::watch`] only, which says when the first list is complete: nobody reads half of one. A later
//! list goes into what is there, object by object, and takes away at its end what it did not name; two of everything
//! would be too much. What is kept of an object is [`crate::kept`]'s.

use std::collections::{BTreeMap, HashSet, btree_map};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Namespace (empty for objects of the cluster) and name.
pub type Key = (Box<str>, Box<str>);

/// Most losses that are remembered; those of applications that are gone are not asked for any more.
const LOST_MAX: usize = 10_000;

/// Up to so many objects of one namespace take exactly the space that they need.
const FEW: usize = 16;

/// Things by namespace and name, in this order. Each namespace is named once, and its things lie side by side:
/// most hold a handful, and trees of all of them would be half empty.
#[derive(Debug, Clone)]
pub struct Objects<T> {
    namespaces: BTreeMap<Box<str>, Vec<Entry<T>>>,
    len: usize,
}

#[derive(Debug, Clone)]
struct Entry<T> {
    name: Box<str>,
    object: T,
    /// The list that is coming in has named it, or an event since its beginning.
    seen: bool,
}

impl<T> Default for Objects<T> {
    fn default() -> Self {
        Self { namespaces: BTreeMap::new(), len: 0 }
    }
}

impl<T> Objects<T> {
    fn within(&self, namespace: &str) -> &[Entry<T>] {
        self.namespaces.get(namespace).map_or(&[], Vec::as_slice)
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, namespace: &str, name: &str) -> Option<&T> {
        let within = self.within(namespace);
        let at = within.binary_search_by(|entry| (*entry.name).cmp(name)).ok()?;
        Some(&within[at].object)
    }

    /// Puts one there; gives what was there before.
    pub fn insert(&mut self, (namespace, name): Key, object: T) -> Option<T> {
        let within = self.namespaces.entry(namespace).or_default();
        match within.binary_search_by(|entry| entry.name.cmp(&name)) {
            Ok(at) => {
                within[at].seen = true;
                Some(std::mem::replace(&mut within[at].object, object))
            }
            Err(at) => {
                if within.len() < FEW {
                    within.reserve_exact(1);
                }
                within.insert(at, Entry { name, object, seen: true });
                self.len += 1;
                None
            }
        }
    }

    /// Takes one away.
    pub fn remove(&mut self, namespace: &str, name: &str) -> Option<T> {
        let btree_map::Entry::Occupied(mut found) = self.namespaces.entry(namespace.into()) else { return None };
        let within = found.get_mut();
        let at = within.binary_search_by(|entry| (*entry.name).cmp(name)).ok()?;
        let Entry { object, .. } = within.remove(at);
        self.len -= 1;
        if within.is_empty() {
            found.remove();
        }
        Some(object)
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str, &T)> {
        self.namespaces
            .iter()
            .flat_map(|(namespace, within)| within.iter().map(move |entry| (&**namespace, &*entry.name, &entry.object)))
    }

    /// A list begins: nothing was named by it.
    fn begin(&mut self) {
        for entry in self.namespaces.values_mut().flatten() {
            entry.seen = false;
        }
    }

    fn named(&mut self, namespace: &str, name: &str) {
        if let Some(within) = self.namespaces.get_mut(namespace)
            && let Ok(at) = within.binary_search_by(|entry| (*entry.name).cmp(name))
        {
            within[at].seen = true;
        }
    }

    /// A list has ended: gives what it did not name, which is taken away.
    fn end(&mut self) -> Vec<(Key, T)> {
        let mut gone = Vec::new();
        self.namespaces.retain(|namespace, within| {
            let unseen = within.extract_if(.., |entry| !entry.seen);
            gone.extend(unseen.map(|entry| ((namespace.clone(), entry.name), entry.object)));
            within.shrink_to_fit();
            !within.is_empty()
        });
        self.len -= gone.len();
        gone
    }
}

/// One kind of objects.
#[derive(Debug)]
pub struct Store<T> {
    state: RwLock<State<T>>,
}

#[derive(Debug)]
struct State<T> {
    objects: Objects<T>,
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
        Self { state: RwLock::new(State { objects: Objects::default(), losses: None }) }
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
        self.write().objects.begin();
    }

    /// The list that is coming in names an object that cannot be read: what is known of it stays.
    pub fn named(&self, namespace: &str, name: &str) {
        self.write().objects.named(namespace, name);
    }

    /// The list is complete. Gives what it did not name: that is gone.
    pub fn complete(&self) -> Vec<(Key, T)> {
        let state = &mut *self.write();
        let gone = state.objects.end();
        for (key, _) in &gone {
            state.gone(key);
        }
        gone
    }

    /// An object was written, or is named by a list. Gives what was known of it.
    pub fn put(&self, key: Key, kept: T) -> Option<T> {
        let state = &mut *self.write();
        state.there(&key);
        state.objects.insert(key, kept)
    }

    /// An object is gone. Gives what was known of it.
    pub fn remove(&self, key: &Key) -> Option<T> {
        let state = &mut *self.write();
        let known = state.objects.remove(&key.0, &key.1)?;
        state.gone(key);
        Some(known)
    }

    /// We are about to delete an object.
    pub fn release(&self, namespace: &str, name: &str) {
        let state = &mut *self.write();
        if state.objects.get(namespace, name).is_some()
            && let Some(losses) = &mut state.losses
        {
            losses.released.insert(key(namespace, name));
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
        self.read().objects.get(namespace, name).cloned()
    }

    /// Whether an object is there.
    #[must_use]
    pub fn contains(&self, namespace: &str, name: &str) -> bool {
        self.read().objects.get(namespace, name).is_some()
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
        let within = state.objects.within(namespace);
        let from = within.partition_point(|entry| *entry.name < *prefix);
        let found = within[from..].iter().take_while(|entry| entry.name.starts_with(prefix));
        found.map(|entry| (entry.name.clone(), entry.object.clone())).collect()
    }

    /// The objects that are meant, in order.
    #[must_use]
    pub fn filter(&self, meant: impl Fn(&T) -> bool) -> Vec<(Key, T)> {
        let state = self.read();
        let all = state.objects.iter().filter(|(_, _, kept)| meant(kept));
        all.map(|(namespace, name, kept)| (key(namespace, name), kept.clone())).collect()
    }

    /// All of them, in order.
    #[must_use]
    pub fn all(&self) -> Vec<(Key, T)> {
        self.filter(|_| true)
    }

    /// The names of all of them, in order.
    #[must_use]
    pub fn keys(&self) -> Vec<Key> {
        self.read().objects.iter().map(|(namespace, name, _)| key(namespace, name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_list_does_not_name_is_gone_at_its_end() {
        let store = Store::with_losses();
        for (namespace, name) in [("a", "one"), ("a", "two"), ("a", "three"), ("ab", "one")] {
            store.put(key(namespace, name), "x");
        }
        store.begin();
        assert_eq!(store.put(key("a", "two"), "z"), Some("x"));
        assert_eq!(store.put(key("a", "three"), "x"), Some("x"));
        assert_eq!(store.within("a").len(), 3, "nothing goes before its end");
        // A list that breaks off is begun anew, and what was written meanwhile is there.
        store.begin();
        store.put(key("a", "two"), "z");
        store.put(key("b", "new"), "y");
        store.named("a", "three");
        store.named("a", "nobody");
        assert_eq!(store.complete(), [(key("a", "one"), "x"), (key("ab", "one"), "x")]);
        assert_eq!((store.len(), store.within("a")), (3, vec![("three".into(), "x"), ("two".into(), "z")]));
        assert!(store.is_lost("a", "one") && store.is_lost("ab", "one") && !store.is_lost("a", "two"));
        assert_eq!(store.complete(), [], "and once only");
    }

    #[test]
    fn objects_are_in_order_and_found_within_their_namespace() {
        let mut objects = Objects::default();
        let names = ["d", "a", "c", "b", "ab"];
        for namespace in ["n", "m"] {
            for name in names {
                assert_eq!(objects.insert(key(namespace, name), 1), None);
            }
        }
        assert_eq!(objects.insert(key("n", "a"), 2), Some(1));
        let found: Vec<_> =
            objects.iter().map(|(namespace, name, number)| format!("{namespace}{name}{number}")).collect();
        assert_eq!(found, ["ma1", "mab1", "mb1", "mc1", "md1", "na2", "nab1", "nb1", "nc1", "nd1"]);
        assert_eq!((objects.get("n", "ab"), objects.get("n", "x"), objects.get("x", "a")), (Some(&1), None, None));
        for name in names {
            assert_eq!(objects.remove("m", name), Some(1));
            assert_eq!(objects.remove("m", name), None);
        }
        assert_eq!((objects.len(), objects.namespaces.len()), (5, 1));
        let store = Store::default();
        for name in ["a-1", "a-2", "a", "b", "a-"] {
            store.put(key("n", name), ());
        }
        let found: Vec<_> = store.beginning("n", "a-").into_iter().map(|(name, ())| name).collect();
        assert_eq!(found, ["a-", "a-1", "a-2"].map(Box::from));
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
