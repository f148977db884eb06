//! The operator: observe → [`decide`] → apply → status.
//!
//! `decide`, `release` and `status` are pure. `observe` gathers what a decision rests on, `apply` does
//! what it says; both are thin. What may not enter: reports, and anything that reads configuration from
//! elsewhere than the object.

mod apply;
pub mod decide;
mod drivers;
mod events;
mod execute;
pub mod hook;
mod observe;
pub mod queue;
mod recent;
pub mod release;
pub mod status;
pub mod steps;
mod teardown;

use crate::clock;
use crate::kept::{self, Ending};
use crate::metrics::{self, Phases};
use crate::packed::{Packed, Packer};
use crate::server::Server;
use crate::settings::Settings;
use crate::store::{self, Key};
use crate::watch::{Changed, Watch};
use futures::{FutureExt as _, Stream, StreamExt as _};
use kube::{Client, ResourceExt as _};
use queue::{Queue, Turn};
use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use styrmin_renderer::spec::{StyrminDeployment, StyrminDeploymentStatus};
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, warn};

/// Holds an object until its application is gone.
pub const FINALIZER: &str = "styrmin.io/finalizer";
/// A person's confirmation that an object may take its application with it; its value is the UID.
pub const CONFIRM_DELETE: &str = "styrmin.io/confirm-delete";
/// A person's word that a confirmed teardown shall not run the driver's actions; its value is the UID.
pub const FORCE_DELETE: &str = "styrmin.io/force-delete";
/// The object may go and its application stays.
pub const SKIP_TEARDOWN: &str = "styrmin.io/skip-teardown";

/// How many deployments are worked on at a time.
const CONCURRENCY: usize = 16;
/// How long one pass may take: it is a handful of requests.
const PASS_LIMIT: Duration = Duration::from_secs(60);
/// How long telling may take that a pass has not ended.
const TELL_LIMIT: Duration = Duration::from_secs(5);
/// How soon a pass is repeated whose view was older than the object.
const STALE: Duration = Duration::from_millis(200);
/// How often that time is doubled while the view stays old.
const CONFLICTS: u32 = 8;

pub(crate) struct Context {
    client: Client,
    watch: Arc<Watch>,
    server: Arc<Server>,
    settings: decide::Settings,
    timer: Duration,
    retry_delay: Duration,
    events: events::Events,
    executions: execute::Executions,
    drivers: drivers::Drivers,
    /// The ControllerRevisions of what was last applied, by the UID of the object. Nobody else writes it while this agent leads.
    applied: recent::Recent<String, Packed>,
    packer: Packer,
    /// Environments whose copy of the repository's credentials is as it should be.
    credentials: recent::Recent<String, ()>,
    phases: Phases,
    troubles: Troubles,
    /// How often in a row a pass of an object met a newer one.
    conflicts: Mutex<HashMap<Key, u32>>,
    /// Generations of HelmReleases that were written, and that the watch does not show yet.
    written: Mutex<HashMap<Key, i64>>,
}

impl Context {
    /// When to look again after a conflict: at once as a rule, and ever later when what is seen stays old.
    fn conflict(&self, key: &Key) -> Duration {
        let mut known = self.conflicts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = known.entry(key.clone()).or_default();
        *count += 1;
        STALE.saturating_mul(1 << (*count - 1).min(CONFLICTS)).min(self.timer)
    }

    /// It is not there any more.
    fn forget(&self, key: &Key) {
        self.troubles.forget(key);
        self.no_conflict(key);
        self.written.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }

    fn no_conflict(&self, key: &Key) {
        self.conflicts.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

/// Why the last pass of an object ended early, with the UID that it had. The next one says it in the status: written
/// at once it would be taken back and written again without end.
#[derive(Debug, Default)]
struct Troubles {
    known: Mutex<HashMap<Key, (Option<String>, String)>>,
}

impl Troubles {
    fn get(&self, object: &StyrminDeployment) -> Option<String> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let (uid, said) = known.get(&key_of(object))?;
        (*uid == object.metadata.uid).then(|| said.clone())
    }

    /// Notes how a pass ended; `said` is what may be told of its end.
    fn keep(&self, object: &StyrminDeployment, said: Option<String>) {
        let (key, uid) = (key_of(object), object.metadata.uid.clone());
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match said {
            None => drop(known.remove(&key)),
            // Told again in other words (the ports of a connection, the number of a request) it would be written
            // again, and each write is a reason to look again.
            Some(said) if known.get(&key).is_some_and(|(of, known)| *of == uid && words(known).eq(words(&said))) => {}
            Some(said) => drop(known.insert(key, (uid, status::bounded(&said)))),
        }
    }

    /// It is not there any more.
    fn forget(&self, key: &Key) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

fn key_of(object: &StyrminDeployment) -> Key {
    store::key(&object.namespace().unwrap_or_default(), &object.name_any())
}

/// A text without its numbers, hexadecimal ones included.
fn words(text: &str) -> impl Iterator<Item = char> + '_ {
    text.chars().filter(|letter| !letter.is_ascii_hexdigit())
}

/// How far the end of an application has come.
#[must_use]
pub fn ending(status: &StyrminDeploymentStatus) -> Ending {
    match (teardown::begun(status), teardown::before_removal(status)) {
        (false, _) => Ending::Not,
        (true, true) => Ending::Begun,
        (true, false) => Ending::Removes,
    }
}

/// Why a pass failed.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// The API server refused or could not be reached.
    #[error("{what}: {error}")]
    Api {
        /// What was attempted, with the object.
        what: String,
        /// Its answer.
        error: kube::Error,
    },
    /// A request did not return.
    #[error(
        "the API server did not answer all that was asked of it within {} s; look at its load, and at webhooks that do \
         not answer",
        PASS_LIMIT.as_secs()
    )]
    Slow,
}

impl OperatorError {
    fn of(what: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        let what = what.into();
        move |error| Self::Api { what, error }
    }

    /// The object has changed since it was observed.
    fn is_stale(&self) -> bool {
        matches!(self, Self::Api { error: kube::Error::Api(status), .. } if status.code == 409)
    }
}

pub(crate) use observe::covers;

type Result<T> = std::result::Result<T, OperatorError>;

/// Works until `stop`.
pub async fn run(client: Client, watch: Arc<Watch>, server: Arc<Server>, settings: &Settings, stop: CancellationToken) {
    let context = Arc::new(Context {
        events: events::Events::new(client.clone()),
        client,
        executions: execute::Executions::default(),
        drivers: drivers::Drivers::default(),
        // Shorter than the lease lasts. A pass that rests on what another agent has changed meanwhile cannot write
        // the status, which carries the version of the object that was observed.
        applied: recent::Recent::new(Duration::from_secs(settings.lease_duration.into()).mul_f64(0.7)),
        packer: Packer::default(),
        credentials: recent::Recent::new(settings.timer()),
        phases: Phases::default(),
        troubles: Troubles::default(),
        conflicts: Mutex::default(),
        written: Mutex::default(),
        watch: Arc::clone(&watch),
        server,
        settings: settings.decisions(),
        timer: settings.timer(),
        retry_delay: Duration::from_secs(settings.retry_delay.into()),
    });
    let mut queue = Queue::default();
    let mut triggers = std::pin::pin!(triggers(watch));
    let mut passes = JoinSet::new();
    loop {
        let now = Instant::now();
        while passes.len() < CONCURRENCY
            && let Some((key, since)) = queue.take(now)
        {
            metrics::waited(now.duration_since(since));
            let context = Arc::clone(&context);
            passes.spawn(async move {
                let retry = context.retry_delay;
                // A defect of ours with one object: the others go on, and it is tried again.
                let looked = AssertUnwindSafe(look(&key, context)).catch_unwind().await;
                let next = looked.unwrap_or_else(|_| {
                    error!(namespace = &*key.0, object = &*key.1, "a defect of the agent: its pass broke off");
                    Some(retry)
                });
                (key, next)
            });
        }
        metrics::waiting(queue.waiting());
        let due = queue.next_due().filter(|_| passes.len() < CONCURRENCY);
        tokio::select! {
            () = stop.cancelled() => break,
            trigger = triggers.next() => match trigger {
                Some((key, turn)) => queue.add(key, turn, Instant::now()),
                None => break,
            },
            Some(done) = passes.join_next() => if let Ok((key, next)) = done {
                queue.ended(&key, next, Instant::now());
                if next.is_none() {
                    context.forget(&key);
                }
            },
            () = tokio::time::sleep_until(due.unwrap_or(now)), if due.is_some() => {}
        }
    }
    // Passes that run are cut off, as they may be at any moment.
}

/// Which deployments have to be looked at: all of them first, then what changes.
fn triggers(watch: Arc<Watch>) -> impl Stream<Item = (Key, Turn)> + Send + 'static {
    let changes = watch.changes();
    let all = |watch: &Watch| -> Vec<(Key, Turn)> {
        watch.deployments.keys().into_iter().map(|key| (key, Turn::Other)).collect()
    };
    let first = futures::stream::iter(all(&watch));
    let batches = futures::stream::unfold((changes, watch), move |(mut changes, watch)| async move {
        let filter = |meant: &dyn Fn(&kept::Deployment) -> bool| {
            let found = watch.deployments.filter(meant);
            found.into_iter().map(|(key, _)| (key, Turn::Other)).collect()
        };
        let batch = match changes.recv().await {
            Ok(Changed::Deployment(one)) => vec![(one, Turn::First)],
            Ok(Changed::Everything) | Err(RecvError::Lagged(_)) => all(&watch),
            // What is going depends on the inventories of Kustomizations, what waits perhaps on the source.
            Ok(Changed::Flux) => filter(&|kept| kept.going || kept.phase == decide::phase::PREREQUISITES),
            // One that comes to its own network later sees then what there is.
            Ok(Changed::Environment(one)) => {
                let comes_to_it = ["", decide::phase::PREREQUISITES, decide::phase::RELEASE];
                let others = watch.deployments.within(&one.0).into_iter();
                let others = others.filter(|(name, kept)| *name != one.1 && !comes_to_it.contains(&kept.phase));
                let mut batch: Vec<_> = others.map(|(name, _)| ((one.0.clone(), name), Turn::Other)).collect();
                batch.push((one, Turn::First));
                batch
            }
            Ok(Changed::Sources(environment)) => {
                let all = watch.deployments.within(&environment).into_iter();
                all.map(|(name, _)| ((environment.clone(), name), Turn::Other)).collect()
            }
            Ok(Changed::Pods) => Vec::new(),
            Err(RecvError::Closed) => return None,
        };
        Some((futures::stream::iter(batch), (changes, watch)))
    });
    first.chain(batches.flatten())
}

/// One pass; gives after which time the next one is due, if there is an object.
async fn look(key: &Key, context: Arc<Context>) -> Option<Duration> {
    let (namespace, name) = (&*key.0, &*key.1);
    let object = context.watch.deployments.get(namespace, name)?.object()?;
    let began = Instant::now();
    let pass = tokio::time::timeout(PASS_LIMIT, pass(&object, Arc::clone(&context)));
    let result = match pass.await {
        Ok(result) => result,
        Err(_) => {
            let told = tokio::time::timeout(TELL_LIMIT, not_observed(&object, &OperatorError::Slow, &context));
            let said = told.await.unwrap_or_else(|_| OperatorError::Slow.to_string());
            Err((said, OperatorError::Slow))
        }
    };
    let (outcome, next) = match result {
        Ok(next) => ("done", next),
        Err((_, error)) if error.is_stale() => ("conflict", context.conflict(key)),
        Err((said, _)) => {
            let retry = context.retry_delay;
            warn!(object = name, namespace, error = said, retry_in_s = retry.as_secs(), "a pass failed");
            ("failed", retry)
        }
    };
    if outcome != "conflict" {
        context.no_conflict(key);
    }
    metrics::pass(outcome, began.elapsed());
    Some(next)
}

/// Tells what can be told when nothing could be observed; gives that. Of what is only read, no error shows a secret.
async fn not_observed(object: &StyrminDeployment, error: &OperatorError, context: &Context) -> String {
    context.troubles.keep(object, Some(error.to_string()));
    let said = context.troubles.get(object).unwrap_or_default();
    if let Some((status, notes)) = decide::unobserved(object, &said, clock::now(), &context.settings) {
        match apply::write_status(object, object.resource_version(), &status, context).await {
            Ok(_) => apply::publish(object, &notes, context).await,
            Err(other) => debug!(%other, "what could not be observed could not be told"),
        }
    }
    said
}

/// One pass over what was found; gives why it ended early with what may be told of it.
async fn pass(
    object: &StyrminDeployment,
    context: Arc<Context>,
) -> std::result::Result<Duration, (String, OperatorError)> {
    let mut observed = match observe::observe(object, &context).await {
        Ok(observed) => observed,
        Err(error) => return Err((not_observed(object, &error, &context).await, error)),
    };
    observed.trouble = context.troubles.get(object);
    let decision = decide::decide(&observed.view(object), clock::now(), &context.settings);
    let again = decision.again;
    if let Err(error) = apply::carry_out(object, &observed, decision, &context).await {
        let said = observed.masked(&error.to_string());
        if !error.is_stale() {
            context.troubles.keep(object, Some(said.clone()));
        }
        return Err((said, error));
    }
    context.troubles.keep(object, None);
    Ok(match again {
        // What was written comes back as a change of the object; this is for the case that nothing was.
        Some(Duration::ZERO) => STALE,
        Some(again) => again.min(context.timer),
        None => context.timer,
    })
}
