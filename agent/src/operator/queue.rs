//! Which deployments are to be looked at, and when. Pure: times come in.
//!
//! Of each it is known once: it waits for its turn, or for a time, or is being looked at. Two passes of one never
//! run at a time; what comes meanwhile is another pass after it. (kube's controller does the same, with four
//! copies of every name and a store of objects beside it.)

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use tokio::time::Instant;

/// What waits, what comes later, and what is being worked on.
#[derive(Debug)]
pub struct Queue<K> {
    known: BTreeMap<Arc<K>, State>,
    /// In this order.
    ready: VecDeque<Arc<K>>,
    later: BTreeSet<(Instant, Arc<K>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Waits for its turn since then.
    Ready(Instant),
    /// Is due then.
    Later(Instant),
    /// A pass runs; another one is due then.
    Runs(Option<Instant>),
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Self { known: BTreeMap::new(), ready: VecDeque::new(), later: BTreeSet::new() }
    }
}

impl<K: Ord> Queue<K> {
    /// One is to be looked at.
    pub fn add(&mut self, key: K, now: Instant) {
        let known = self.known.get_key_value(&key).map(|(known, _)| Arc::clone(known));
        let key = known.unwrap_or_else(|| Arc::new(key));
        match self.known.get_mut(&key) {
            Some(State::Ready(_)) => return,
            Some(State::Runs(again)) => {
                *again = Some(now);
                return;
            }
            Some(State::Later(at)) => {
                let at = *at;
                self.later.remove(&(at, Arc::clone(&key)));
            }
            None => {}
        }
        self.known.insert(Arc::clone(&key), State::Ready(now));
        self.ready.push_back(key);
    }

    /// When the next one is due that nothing else brings.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        self.later.first().map(|(at, _)| *at)
    }

    /// Those that wait for their turn.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.ready.len()
    }

    /// The next one whose turn it is, and since when it has waited. Its pass begins.
    pub fn take(&mut self, now: Instant) -> Option<(Arc<K>, Instant)> {
        while let Some((at, key)) = self.later.pop_first() {
            if at > now {
                self.later.insert((at, key));
                break;
            }
            self.known.insert(Arc::clone(&key), State::Ready(at));
            self.ready.push_back(key);
        }
        let key = self.ready.pop_front()?;
        let state = self.known.insert(Arc::clone(&key), State::Runs(None));
        let since = if let Some(State::Ready(since)) = state { since } else { now };
        Some((key, since))
    }

    /// A pass has ended; another one is due at `next`, unless it is asked for earlier. `None`: it is gone.
    pub fn ended(&mut self, key: &Arc<K>, next: Option<Instant>) {
        let asked = if let Some(State::Runs(again)) = self.known.get(key) { *again } else { None };
        if let Some(since) = asked {
            self.known.insert(Arc::clone(key), State::Ready(since));
            self.ready.push_back(Arc::clone(key));
        } else if let Some(at) = next {
            self.known.insert(Arc::clone(key), State::Later(at));
            self.later.insert((at, Arc::clone(key)));
        } else {
            self.known.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    fn taken(queue: &mut Queue<&'static str>, now: Instant) -> Vec<&'static str> {
        std::iter::from_fn(|| queue.take(now)).map(|(key, _)| *key).collect()
    }

    #[test]
    fn each_has_one_turn_and_none_runs_twice_at_a_time() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for key in ["a", "b", "a"] {
            queue.add(key, now);
        }
        assert_eq!(queue.waiting(), 2);
        let (a, since) = queue.take(now + SECOND).unwrap();
        assert_eq!((*a, since), ("a", now));
        // Asked for while it runs: once more, and not before it has ended.
        queue.add("a", now);
        queue.add("a", now);
        assert_eq!(taken(&mut queue, now), ["b"]);
        queue.ended(&a, Some(now + 60 * SECOND));
        assert_eq!(taken(&mut queue, now), ["a"]);
        assert_eq!(queue.next_due(), None);
    }

    #[test]
    fn what_is_due_later_comes_then_or_when_it_is_asked_for() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for key in ["a", "b", "gone"] {
            queue.add(key, now);
        }
        for (key, next) in [("a", Some(now + 2 * SECOND)), ("b", Some(now + SECOND)), ("gone", None)] {
            assert_eq!(*queue.take(now).unwrap().0, key);
            queue.ended(&Arc::new(key), next);
        }
        assert_eq!((queue.known.len(), queue.next_due()), (2, Some(now + SECOND)));
        assert_eq!(taken(&mut queue, now), [""; 0]);
        queue.add("a", now);
        assert_eq!(taken(&mut queue, now), ["a"]);
        assert_eq!(taken(&mut queue, now + SECOND), ["b"]);
        queue.ended(&Arc::new("a"), None);
        queue.ended(&Arc::new("b"), None);
        assert!(queue.known.is_empty() && queue.later.is_empty() && queue.ready.is_empty());
    }
}
