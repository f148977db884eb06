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
//! Before it plans, it reads what others committed below our folders since it last looked ([`Reading`]) and hands that
//! to `changes` ([`People`]): it finds what differs, and decides nothing about it.
//!
//! Whether a push worked is decided by reading the remote's history, never by the push's answer.
//! What must never enter: what a change means (that is `changes`), a work tree, a forced push.

mod access;
mod git;
mod host;
mod location;
mod message;
mod mirror;
mod probe;
mod reader;
mod sign;
mod splice;
mod template;
mod writer;

pub use access::Access;
pub use git::{GitError, Remote};
pub use host::Host;
pub use location::{Location, LocationProblem, check_branch, overlap, web_address};
pub(crate) use message::capitalised;
pub use message::{Entry, Message};
pub use mirror::Mirror;
pub use probe::{Probe, probe};
pub use reader::{Content, Entry as CommitEntry, Finding, Reading};
pub use sign::{Signer, key_suffix};
pub use splice::{Edit, Edits, Signature, Stamp, commit, splice};
pub use template::{environment as environment_files, flux as flux_files};
pub use writer::{WriterSettings, Writers, deployment_files, driver_files};

use crate::store::{Cluster, Lead, Target};
use async_trait::async_trait;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, broadcast};
use tokio_util::sync::CancellationToken;

/// Is told what others committed. It records all of it, or fails: then it is read again.
#[async_trait]
pub trait People: Send + Sync {
    /// Files in the folders of these clusters differ from when the branch was read before.
    async fn found(
        &self,
        target: &Target,
        clusters: &HashMap<String, Cluster>,
        reading: &Reading,
    ) -> anyhow::Result<()>;
    /// Whether something that waited for somebody does not any more.
    async fn has_an_answer(&self, target: &Target) -> anyhow::Result<bool>;
    /// Does what follows from that. The branch was read just before.
    async fn take_answers(&self, target: &Target) -> anyhow::Result<()>;
}

/// Works on branches that are ours alone, beside the writers.
#[async_trait]
pub trait Beside: Send + Sync {
    /// Works until `stop`, under this lead.
    async fn run(self: Arc<Self>, lead: Lead, stop: CancellationToken);
}

/// Tells the writers that something waits. Losing a notice costs time only: they also look by
/// themselves.
#[derive(Debug, Clone, Default)]
pub struct Wake {
    /// With whether somebody may have pushed.
    targets: Arc<Mutex<BTreeMap<Target, bool>>>,
    notify: Arc<Notify>,
    /// Repositories whose proposals somebody shall look at.
    reviews: Arc<Mutex<BTreeSet<Target>>>,
    review: Arc<Notify>,
}

impl Wake {
    /// Something happened to the proposals of this repository, or to what they are based on.
    pub fn review(&self, target: &Target) {
        self.reviews.lock().unwrap_or_else(PoisonError::into_inner).insert(target.clone());
        self.review.notify_one();
    }

    /// Waits for such notices and takes them all.
    pub async fn reviews(&self) -> BTreeSet<Target> {
        self.review.notified().await;
        std::mem::take(&mut self.reviews.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Something waits for this repository.
    pub fn target(&self, target: &Target) {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner).entry(target.clone()).or_default();
        self.notify.notify_one();
    }

    /// Somebody may have pushed to this repository.
    pub fn look(&self, target: &Target) {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner).insert(target.clone(), true);
        self.notify.notify_one();
    }

    /// Waits for notices and takes them all.
    async fn take(&self) -> BTreeMap<Target, bool> {
        self.notify.notified().await;
        std::mem::take(&mut self.targets.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Tells those who wait for it that something was pushed. Losing a notice costs time only.
#[derive(Debug, Clone)]
pub struct Pushes {
    sender: broadcast::Sender<Target>,
    stop: CancellationToken,
}

impl Pushes {
    /// Until `stop` nobody waits in vain.
    #[must_use]
    pub fn new(stop: CancellationToken) -> Self {
        Self { sender: broadcast::channel(PUSHES_KEPT).0, stop }
    }

    /// Something was pushed here.
    pub fn tell(&self, target: &Target) {
        // An error says that nobody waits.
        let _ = self.sender.send(target.clone());
    }

    /// From now on.
    #[must_use]
    pub fn listen(&self) -> Listener {
        Listener { receiver: self.sender.subscribe(), stop: self.stop.clone() }
    }
}

/// Notices that slow listeners may be behind; then they look by themselves.
const PUSHES_KEPT: usize = 256;

/// Hears of pushes.
#[derive(Debug)]
pub struct Listener {
    receiver: broadcast::Receiver<Target>,
    stop: CancellationToken,
}

impl Listener {
    /// Waits for a push to `target`; `false`: there was none within `limit`, or the server stops.
    pub async fn pushed(&mut self, target: &Target, limit: Duration) -> bool {
        let heard = async {
            loop {
                match self.receiver.recv().await {
                    Ok(other) if other != *target => {}
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => return true,
                    Err(broadcast::error::RecvError::Closed) => return false,
                }
            }
        };
        tokio::select! {
            () = self.stop.cancelled() => false,
            heard = tokio::time::timeout(limit, heard) => heard.unwrap_or(false),
        }
    }
}
