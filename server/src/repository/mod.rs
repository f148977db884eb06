//! The repository writer: the only writer of files in the clusters' repositories.
//!
//! One task per repository and branch, however the URL is spelled. It takes all waiting outbox
//! rows together, splices the changed files into the tip's tree (bare repository, no checkout, no
//! index), makes one commit and pushes it:
//!
//! ```text
//! outbox rows ──► fetch the tip ──► splice ──► record batch, base and commit id (one transaction)
//!      ▲                ▲                            │
//!      │                └──── tip moved ◄── push ◄───┘
//!      │                                     │
//!      └── rows leave, tasks move (one transaction) ◄── the commit is in the remote's history
//! ```
//!
//! Whether a push worked is decided by reading the remote's history, never by the push's answer.
//! What must never enter: what a change means (that is `changes`), a work tree, a forced push.

mod git;
mod host;
mod location;
mod message;
mod mirror;
mod splice;
mod template;
mod writer;

pub use git::{GitError, Remote};
pub use host::Host;
pub use location::{Location, LocationProblem, overlap};
pub use message::{Entry, Message};
pub use mirror::Mirror;
pub use splice::{Edit, Edits, Signature, commit, splice};
pub use writer::{WriterSettings, Writers};

use crate::store::Target;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Notify;

/// Tells the writers that something waits. Losing a notice costs time only: they also look by
/// themselves.
#[derive(Debug, Clone, Default)]
pub struct Wake {
    targets: Arc<Mutex<HashSet<Target>>>,
    notify: Arc<Notify>,
}

impl Wake {
    /// Something waits for this repository.
    pub fn target(&self, target: &Target) {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner).insert(target.clone());
        self.notify.notify_one();
    }

    /// Waits for notices and takes them all.
    async fn take(&self) -> HashSet<Target> {
        self.notify.notified().await;
        std::mem::take(&mut self.targets.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
