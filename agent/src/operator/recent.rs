//! What was read a moment ago, so that the passes of one rollout do not ask for it again and again.
//!
//! Only for what nobody but this agent writes, or what may be seen a little late. Entries expire; those
//! that have are removed when others come.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// So many entries are kept before expired ones are looked for.
const SWEEP: usize = 64;
/// Most entries; the oldest go first, whatever they are worth.
const MOST: usize = 256;

/// Values that expire.
#[derive(Debug)]
pub(super) struct Recent<K, V> {
    lasting: Duration,
    known: Mutex<HashMap<K, (Instant, V)>>,
}

impl<K: Eq + Hash, V: Clone> Recent<K, V> {
    /// Entries count for this long after they were read.
    pub(super) fn new(lasting: Duration) -> Self {
        Self { lasting, known: Mutex::default() }
    }

    /// What was read, unless too long ago.
    pub(super) fn get(&self, key: &K) -> Option<V> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(key).filter(|(at, _)| at.elapsed() < self.lasting).map(|(_, value)| value.clone())
    }

    /// Keeps what was read; `at` is from before it was asked for.
    pub(super) fn put(&self, key: K, at: Instant, value: V) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= SWEEP {
            known.retain(|_, (at, _)| at.elapsed() < self.lasting);
        }
        if known.len() >= MOST {
            let mut times: Vec<Instant> = known.values().map(|(at, _)| *at).collect();
            // Half at a time, so that not every entry that comes costs a walk.
            let (_, middle, _) = times.select_nth_unstable(MOST / 2);
            let middle = *middle;
            known.retain(|_, (at, _)| *at > middle);
        }
        known.insert(key, (at, value));
    }

    /// It is about to change.
    pub(super) fn forget(&self, key: &K) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_expire_and_go() {
        const LASTING: Duration = Duration::from_secs(60);
        let (now, old) = (Instant::now(), Instant::now().checked_sub(LASTING).unwrap());
        let recent = Recent::new(LASTING);
        for number in 0..SWEEP {
            recent.put(number, if number < 2 { now } else { old }, "value");
        }
        assert_eq!(recent.get(&0), Some("value"));
        recent.forget(&0);
        assert_eq!(recent.get(&0), None);
        assert_eq!(recent.get(&2), None, "too old to be believed");
        recent.put(SWEEP, now, "value");
        recent.put(SWEEP + 1, now, "value");
        assert_eq!(recent.known.lock().unwrap().len(), 3, "nothing that expired is kept");
        for number in 0..10_000 {
            recent.put(number, now + Duration::from_nanos(number as u64), "value");
        }
        assert!(recent.known.lock().unwrap().len() <= MOST);
        assert_eq!(recent.get(&9_999), Some("value"), "the newest stay");
    }
}
