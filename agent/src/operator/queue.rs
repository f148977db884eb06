//! Which deployments are to be looked at, and when. Pure: times come in.
//!
//! Of each it is known once: it waits for its turn, or for a time, or is being looked at. Two passes of one never
//! run at a time; what comes meanwhile is another pass after it. What has begun, and what somebody changed, comes
//! before what is only looked at again or for the first time: of ten thousand that come at once some are ready soon,
//! and a change of one does not wait for all of them. (kube's controller knows one order, and keeps four copies of
//! every name and a store of objects beside it.)

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Of so many turns one is of the others, however many come first.
const SHARE: usize = 4;
/// A pass that is due within this time goes on with something.
const SOON: Duration = Duration::from_secs(10);

/// What waits, what comes later, and what is being worked on.
#[derive(Debug)]
pub struct Queue<K> {
    known: BTreeMap<Arc<K>, State>,
    /// In this order, before the others. One that has moved up is still among the others, and left out there.
    first: VecDeque<Arc<K>>,
    others: VecDeque<Arc<K>>,
    later: BTreeSet<(Instant, Arc<K>)>,
    waiting: usize,
    /// Turns of the first ones since one of the others had its turn.
    in_a_row: usize,
}

/// How much something presses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Turn {
    /// Something of it has changed, or it is in the middle of something.
    First,
    /// It is only looked at.
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Waits for its turn since then.
    Ready(Turn, Instant),
    /// Is due then.
    Later(Turn, Instant),
    /// A pass runs; another one is due then.
    Runs(Option<(Turn, Instant)>),
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        let (first, others) = (VecDeque::new(), VecDeque::new());
        Self { known: BTreeMap::new(), first, others, later: BTreeSet::new(), waiting: 0, in_a_row: 0 }
    }
}

impl<K: Ord> Queue<K> {
    /// One is to be looked at.
    pub fn add(&mut self, key: K, turn: Turn, now: Instant) {
        let known = self.known.get_key_value(&key).map(|(known, _)| Arc::clone(known));
        let key = known.unwrap_or_else(|| Arc::new(key));
        match self.known.get_mut(&key) {
            Some(State::Ready(is, since)) => {
                if turn < *is {
                    let since = *since;
                    self.waiting -= 1;
                    self.ready(key, turn, since);
                }
                return;
            }
            Some(State::Runs(again)) => {
                *again = Some(again.map_or((turn, now), |(is, since)| (is.min(turn), since)));
                return;
            }
            Some(State::Later(_, at)) => {
                let at = *at;
                self.later.remove(&(at, Arc::clone(&key)));
            }
            None => {}
        }
        self.ready(key, turn, now);
    }

    fn ready(&mut self, key: Arc<K>, turn: Turn, since: Instant) {
        self.known.insert(Arc::clone(&key), State::Ready(turn, since));
        self.waiting += 1;
        match turn {
            Turn::First => self.first.push_back(key),
            Turn::Other => self.others.push_back(key),
        }
    }

    /// When the next one is due that nothing else brings.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        self.later.first().map(|(at, _)| *at)
    }

    /// Those that wait for their turn.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// The next one whose turn it is, and since when it has waited. Its pass begins.
    pub fn take(&mut self, now: Instant) -> Option<(Arc<K>, Instant)> {
        while let Some((at, key)) = self.later.pop_first() {
            if at > now {
                self.later.insert((at, key));
                break;
            }
            let turn = if let Some(State::Later(turn, _)) = self.known.get(&key) { *turn } else { Turn::Other };
            self.ready(key, turn, at);
        }
        loop {
            let others = if self.in_a_row < SHARE - 1 { None } else { self.others.pop_front() };
            let (key, of) = match others.map(|key| (key, Turn::Other)) {
                Some(other) => other,
                None => match self.first.pop_front() {
                    Some(key) => (key, Turn::First),
                    None => (self.others.pop_front()?, Turn::Other),
                },
            };
            // One that has moved up had its turn already, or will have it there.
            if let Some(State::Ready(turn, since)) = self.known.get(&key).copied()
                && turn == of
            {
                self.in_a_row = if of == Turn::First { self.in_a_row + 1 } else { 0 };
                self.known.insert(Arc::clone(&key), State::Runs(None));
                self.waiting -= 1;
                return Some((key, since));
            }
        }
    }

    /// A pass has ended; another one is due after `next`, unless it is asked for earlier. `None`: it is gone.
    pub fn ended(&mut self, key: &Arc<K>, next: Option<Duration>, now: Instant) {
        let asked = if let Some(State::Runs(again)) = self.known.get(key) { *again } else { None };
        if let Some((turn, since)) = asked {
            self.ready(Arc::clone(key), turn, since);
        } else if let Some(next) = next {
            let (turn, at) = (if next < SOON { Turn::First } else { Turn::Other }, now + next);
            self.known.insert(Arc::clone(key), State::Later(turn, at));
            self.later.insert((at, Arc::clone(key)));
        } else {
            self.known.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn taken(queue: &mut Queue<&'static str>, now: Instant) -> Vec<&'static str> {
        std::iter::from_fn(|| queue.take(now)).map(|(key, _)| *key).collect()
    }

    #[test]
    fn each_has_one_turn_and_none_runs_twice_at_a_time() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for key in ["a", "b", "a"] {
            queue.add(key, Turn::First, now);
        }
        assert_eq!(queue.waiting(), 2);
        let (a, since) = queue.take(now + SECOND).unwrap();
        assert_eq!((*a, since), ("a", now));
        // Asked for while it runs: once more, and not before it has ended.
        queue.add("a", Turn::Other, now);
        queue.add("a", Turn::First, now);
        assert_eq!(taken(&mut queue, now), ["b"]);
        queue.ended(&a, Some(60 * SECOND), now);
        assert_eq!(queue.waiting(), 1);
        assert_eq!(taken(&mut queue, now), ["a"]);
        assert_eq!((queue.next_due(), queue.waiting()), (None, 0));
    }

    #[test]
    fn what_comes_first_leaves_a_turn_to_the_others() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for key in ["x", "y"] {
            queue.add(key, Turn::Other, now);
        }
        for key in ["a", "b", "c", "d", "e"] {
            queue.add(key, Turn::First, now);
        }
        // One that has moved up is no other any more.
        queue.add("x", Turn::First, now);
        assert_eq!(taken(&mut queue, now), ["a", "b", "c", "y", "d", "e", "x"]);
    }

    #[test]
    fn what_is_due_later_comes_then_or_when_it_is_asked_for() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for key in ["a", "b", "gone"] {
            queue.add(key, Turn::First, now);
        }
        for (key, next) in [("a", Some(2 * SECOND)), ("b", Some(SECOND)), ("gone", None)] {
            assert_eq!(*queue.take(now).unwrap().0, key);
            queue.ended(&Arc::new(key), next, now);
        }
        assert_eq!((queue.known.len(), queue.next_due()), (2, Some(now + SECOND)));
        assert_eq!(taken(&mut queue, now), [""; 0]);
        queue.add("a", Turn::First, now);
        assert_eq!(taken(&mut queue, now), ["a"]);
        assert_eq!(taken(&mut queue, now + SECOND), ["b"]);
        queue.ended(&Arc::new("a"), None, now);
        queue.ended(&Arc::new("b"), None, now);
        assert!(queue.known.is_empty() && queue.later.is_empty() && queue.first.is_empty() && queue.others.is_empty());
    }

    #[test]
    fn what_has_begun_or_changed_comes_before_what_is_only_looked_at() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for key in ["a", "b", "c", "d"] {
            queue.add(key, Turn::Other, now);
        }
        let (a, _) = queue.take(now).unwrap();
        queue.ended(&a, Some(SECOND / 5), now);
        queue.add("d", Turn::First, now);
        queue.add("d", Turn::First, now);
        assert_eq!(queue.waiting(), 3);
        assert_eq!(*queue.take(now + SECOND).unwrap().0, "d");
        assert_eq!(*queue.take(now + SECOND).unwrap().0, "a", "it goes on");
        // The timer is no reason to come first.
        queue.ended(&a, Some(60 * SECOND), now);
        assert_eq!(taken(&mut queue, now + 100 * SECOND), ["b", "c", "a"]);
        assert_eq!(queue.waiting(), 0);
    }
}
