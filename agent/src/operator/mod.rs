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
mod recent;
pub mod release;
pub mod status;
pub mod steps;
mod teardown;

use crate::clock;
use crate::kept;
use crate::metrics::{self, Phases, Queue};
use crate::server::Server;
use crate::settings::Settings;
use crate::watch::{Changed, DeploymentRef, Watch};
use futures::{Stream, StreamExt as _};
use k8s_openapi::api::apps::v1::ControllerRevision;
use kube::api::{ObjectMeta, PartialObjectMeta, PartialObjectMetaExt as _};
use kube::runtime::controller::{Action, Config, Controller};
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::reflector::{self, ObjectRef};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use styrmin_renderer::spec::{StyrminDeployment, StyrminDeploymentStatus};
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
    /// What was last applied, by the UID of the object. Nobody else writes it while this agent leads.
    applied: recent::Recent<String, Vec<ControllerRevision>>,
    /// Environments whose copy of the repository's credentials is as it should be.
    credentials: recent::Recent<String, ()>,
    queue: Arc<Queue<DeploymentRef>>,
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

/// The teardown of an application has begun.
#[must_use]
pub fn is_leaving(status: &StyrminDeploymentStatus) -> bool {
    teardown::begun(status)
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
        // Shorter than the lease lasts. A pass that rests on what another agent has changed meanwhile cannot write
        // the status, which carries the version of the object that was observed.
        applied: recent::Recent::new(Duration::from_secs(settings.lease_duration.into()).mul_f64(0.7)),
        credentials: recent::Recent::new(settings.timer()),
        queue: Arc::clone(&queue),
        phases: Phases::default(),
        troubles: Troubles::default(),
        watch: Arc::clone(&watch),
        server,
        settings: settings.decisions(),
        timer: settings.timer(),
        retry_delay: Duration::from_secs(settings.retry_delay.into()),
    });
    // The controller asks a store of its own which objects there are: one of names, filled by the triggers.
    let (names, mut writer) = reflector::store();
    writer.apply_watcher_event(&watcher::Event::Init);
    writer.apply_watcher_event(&watcher::Event::InitDone);
    let controller = Controller::for_stream(futures::stream::pending(), names)
        .with_config(Config::default().concurrency(CONCURRENCY))
        .reconcile_on(triggers(Arc::clone(&watch)).inspect(move |one| {
            let there = watch.deployments.contains(one.namespace.as_deref().unwrap_or_default(), &one.name);
            let named = named(one);
            writer.apply_watcher_event(&if there {
                watcher::Event::Apply(named)
            } else {
                watcher::Event::Delete(named)
            });
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

/// Names an object.
fn reference(object: &StyrminDeployment) -> DeploymentRef {
    ObjectRef::new(&object.name_any()).within(&object.namespace().unwrap_or_default())
}

fn named(reference: &DeploymentRef) -> PartialObjectMeta<StyrminDeployment> {
    let (name, namespace) = (Some(reference.name.clone()), reference.namespace.clone());
    let metadata = ObjectMeta { name, namespace, ..ObjectMeta::default() };
    PartialObjectMeta { types: None, ..metadata.into_response_partial() }
}

/// Which deployments have to be looked at: all of them first, then what changes.
fn triggers(watch: Arc<Watch>) -> impl Stream<Item = DeploymentRef> + Send + 'static {
    fn of(keys: impl IntoIterator<Item = crate::store::Key>) -> Vec<DeploymentRef> {
        keys.into_iter().map(|(namespace, name)| ObjectRef::new(&name).within(&namespace)).collect()
    }
    let changes = watch.changes();
    let first = futures::stream::iter(of(watch.deployments.keys()));
    let batches = futures::stream::unfold((changes, watch), |(mut changes, watch)| async move {
        let filter = |meant: &dyn Fn(&kept::Deployment) -> bool| {
            let found = watch.deployments.filter(|_, kept| meant(kept));
            of(found.into_iter().map(|(key, _)| key))
        };
        let batch = match changes.recv().await {
            Ok(Changed::Deployment(one)) => vec![one],
            Ok(Changed::Everything) | Err(RecvError::Lagged(_)) => of(watch.deployments.keys()),
            // What is going depends on the inventories of Kustomizations, what waits perhaps on the source.
            Ok(Changed::Flux) => filter(&|kept| kept.going || *kept.phase == *decide::phase::PREREQUISITES),
            // One that comes to its own network later sees then what there is.
            Ok(Changed::Environment(one)) => {
                let others = watch.deployments.within(one.namespace.as_deref().unwrap_or_default());
                let comes_to_it = ["", decide::phase::PREREQUISITES, decide::phase::RELEASE];
                let others = others
                    .into_iter()
                    .filter(|(name, kept)| **name != *one.name && !comes_to_it.contains(&&*kept.phase));
                let namespace = one.namespace.clone().unwrap_or_default();
                let mut batch = of(others.map(|(name, _)| (namespace.as_str().into(), name)));
                batch.push(one);
                batch
            }
            Ok(Changed::Pods) => Vec::new(),
            Err(RecvError::Closed) => return None,
        };
        Some((futures::stream::iter(batch), (changes, watch)))
    });
    first.chain(batches.flatten())
}

async fn reconcile(named: Arc<PartialObjectMeta<StyrminDeployment>>, context: Arc<Context>) -> Result<Action> {
    context.queue.take(&ObjectRef::from_obj(named.as_ref()));
    let (namespace, name) = (named.namespace().unwrap_or_default(), named.name_any());
    let kept = context.watch.deployments.get(&namespace, &name);
    let Some(object) = kept.and_then(|kept| kept.object()) else { return Ok(Action::await_change()) };
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

async fn pass(object: StyrminDeployment, context: Arc<Context>) -> Result<Action> {
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
fn error_policy(
    object: Arc<PartialObjectMeta<StyrminDeployment>>,
    error: &OperatorError,
    context: Arc<Context>,
) -> Action {
    if error.is_stale() {
        return Action::requeue(STALE);
    }
    let retry = context.retry_delay;
    warn!(object = object.name_any(), namespace = object.namespace(), %error, retry_in_s = retry.as_secs(), "a pass failed");
    Action::requeue(retry)
}
