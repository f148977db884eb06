//! The operator: observe → [`decide`] → apply → status.
//!
//! `decide`, `release` and `status` are pure. `observe` gathers what a decision rests on, `apply` does
//! what it says; both are thin. What may not enter: reports, and anything that reads configuration from
//! elsewhere than the object.

mod apply;
pub mod decide;
mod drivers;
mod execute;
pub mod hook;
mod observe;
pub mod release;
pub mod status;
pub mod steps;
mod teardown;

use crate::clock;
use crate::metrics::{self, Phases, Queue};
use crate::server::Server;
use crate::settings::Settings;
use crate::watch::{Changed, Watch};
use futures::{Stream, StreamExt as _};
use kube::runtime::controller::{Action, Config, Controller};
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::reflector::ObjectRef;
use kube::{Client, ResourceExt as _};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use styrmin_renderer::spec::StyrminDeployment;
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

/// Holds an object until its application is gone.
pub const FINALIZER: &str = "styrmin.io/finalizer";
/// A person's confirmation that an object may take its application with it; its value is the UID.
pub const CONFIRM_DELETE: &str = "styrmin.io/confirm-delete";
/// A person's word that a confirmed teardown shall not run the driver's actions; its value is the UID.
pub const FORCE_DELETE: &str = "styrmin.io/force-delete";
/// The object may go and its application stays.
pub const SKIP_TEARDOWN: &str = "styrmin.io/skip-teardown";

/// How many deployments are worked on at a time.
const CONCURRENCY: u16 = 16;
/// How long one pass may take: it is a handful of requests.
const PASS_LIMIT: Duration = Duration::from_secs(60);
/// How soon a pass is repeated whose view was older than the object.
const STALE: Duration = Duration::from_millis(200);

pub(crate) struct Context {
    client: Client,
    watch: Arc<Watch>,
    server: Arc<Server>,
    settings: decide::Settings,
    timer: Duration,
    retry_delay: Duration,
    /// Kept, so that the same event again is counted and not written anew.
    recorder: Recorder,
    executions: execute::Executions,
    drivers: drivers::Drivers,
    queue: Arc<Queue<ObjectRef<StyrminDeployment>>>,
    phases: Phases,
    troubles: Troubles,
}

/// Why the last pass of an object ended early, by UID. The next one says it in the status: written at once it
/// would be taken back and written again without end.
#[derive(Debug, Default)]
struct Troubles {
    known: Mutex<HashMap<String, String>>,
}

impl Troubles {
    fn get(&self, object: &StyrminDeployment) -> Option<String> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(object.metadata.uid.as_deref()?).cloned()
    }

    fn keep(&self, object: &StyrminDeployment, error: Option<&OperatorError>, observed: &observe::Gathered) {
        let Some(uid) = object.metadata.uid.clone() else { return };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match error {
            None => drop(known.remove(&uid)),
            Some(error) if error.is_stale() => {}
            Some(error) => drop(known.insert(uid, observed.masked(&error.to_string()))),
        }
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
    #[error("the API server did not answer within {} s", PASS_LIMIT.as_secs())]
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

type Result<T> = std::result::Result<T, OperatorError>;

/// Works until `stop`.
pub async fn run(client: Client, watch: Arc<Watch>, server: Arc<Server>, settings: &Settings, stop: CancellationToken) {
    let reporter = Reporter { controller: "styrmin-operator".into(), instance: None };
    let queue = Arc::new(Queue::default());
    let context = Arc::new(Context {
        recorder: Recorder::new(client.clone(), reporter),
        client,
        executions: execute::Executions::default(),
        drivers: drivers::Drivers::default(),
        queue: Arc::clone(&queue),
        phases: Phases::default(),
        troubles: Troubles::default(),
        watch: Arc::clone(&watch),
        server,
        settings: settings.decisions(),
        timer: settings.timer(),
        retry_delay: Duration::from_secs(settings.retry_delay.into()),
    });
    // The watch is shared with the reporter; every trigger comes from it.
    let controller = Controller::for_stream(futures::stream::pending(), watch.deployments.clone())
        .with_config(Config::default().concurrency(CONCURRENCY))
        .reconcile_on(triggers(Arc::clone(&watch)).inspect(move |one| {
            queue.add(one.clone(), watch.deployments.len());
        }))
        .graceful_shutdown_on(stop.cancelled_owned());
    let passes = controller.run(reconcile, error_policy, context);
    passes
        .for_each(|pass| async move {
            if let Err(error) = pass {
                debug!(%error, "a pass ended");
            }
        })
        .await;
}

fn everything(watch: &Watch) -> Vec<ObjectRef<StyrminDeployment>> {
    watch.deployments.state().iter().map(|object| ObjectRef::from_obj(object.as_ref())).collect()
}

/// Which deployments have to be looked at: all of them first, then what changes.
fn triggers(watch: Arc<Watch>) -> impl Stream<Item = ObjectRef<StyrminDeployment>> + Send + 'static {
    let changes = watch.changes();
    let first = futures::stream::iter(everything(&watch));
    let batches = futures::stream::unfold((changes, watch), |(mut changes, watch)| async move {
        let batch = match changes.recv().await {
            Ok(Changed::Deployment(one)) => vec![one],
            Ok(Changed::Everything) | Err(RecvError::Lagged(_)) => everything(&watch),
            // What is going depends on the inventories of Kustomizations, what waits perhaps on the source.
            Ok(Changed::Flux) => watch
                .deployments
                .state_filter(|object| {
                    let phase = object.status.as_ref().and_then(|status| status.phase.as_deref());
                    object.metadata.deletion_timestamp.is_some() || phase == Some(decide::phase::PREREQUISITES)
                })
                .iter()
                .map(|object| ObjectRef::from_obj(object.as_ref()))
                .collect(),
            Ok(Changed::Environment(namespace)) => watch
                .deployments
                .state_filter(|object| object.metadata.namespace.as_deref() == Some(&namespace))
                .iter()
                .map(|object| ObjectRef::from_obj(object.as_ref()))
                .collect(),
            Ok(Changed::Pods) => Vec::new(),
            Err(RecvError::Closed) => return None,
        };
        Some((futures::stream::iter(batch), (changes, watch)))
    });
    first.chain(batches.flatten())
}

async fn reconcile(object: Arc<StyrminDeployment>, context: Arc<Context>) -> Result<Action> {
    context.queue.take(&ObjectRef::from_obj(object.as_ref()));
    let began = tokio::time::Instant::now();
    let result = tokio::time::timeout(PASS_LIMIT, pass(object, context)).await.unwrap_or(Err(OperatorError::Slow));
    let name = match &result {
        Ok(_) => "done",
        Err(error) if error.is_stale() => "conflict",
        Err(_) => "failed",
    };
    metrics::pass(name, began.elapsed());
    result
}

async fn pass(object: Arc<StyrminDeployment>, context: Arc<Context>) -> Result<Action> {
    let mut observed = observe::observe(&object, &context).await?;
    observed.trouble = context.troubles.get(&object);
    let decision = decide::decide(&observed.view(&object), clock::now(), &context.settings);
    let again = decision.again;
    let done = apply::carry_out(&object, &observed, decision, &context).await;
    context.troubles.keep(&object, done.as_ref().err(), &observed);
    done?;
    Ok(match again {
        // What was written comes back as a change of the object; this is for the case that nothing was.
        Some(Duration::ZERO) => Action::requeue(STALE),
        Some(again) => Action::requeue(again.min(context.timer)),
        None => Action::requeue(context.timer),
    })
}

#[expect(clippy::needless_pass_by_value, reason = "the signature that the controller asks for")]
fn error_policy(object: Arc<StyrminDeployment>, error: &OperatorError, context: Arc<Context>) -> Action {
    if error.is_stale() {
        return Action::requeue(STALE);
    }
    let retry = context.retry_delay;
    warn!(object = object.name_any(), namespace = object.namespace(), %error, retry_in_s = retry.as_secs(), "a pass failed");
    Action::requeue(retry)
}
