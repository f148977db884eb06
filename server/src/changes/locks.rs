//! Changes of one deployment queue up within this server, so that they need not compute twice.
//! Correctness does not rest on it: the store verifies versions.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::OwnedMutexGuard;

type Lock = Arc<tokio::sync::Mutex<()>>;

/// A fair lock for each id in use.
#[derive(Default)]
pub(super) struct Locks(Mutex<HashMap<String, Lock>>);

impl Locks {
    /// Waits for its turn; first come, first served.
    pub(super) async fn lock(&self, id: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // Those that nobody holds or waits for are forgotten, so the map stays small.
            if locks.len() > 1024 {
                locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            }
            Arc::clone(locks.entry(id.to_owned()).or_default())
        };
        lock.lock_owned().await
    }
}
