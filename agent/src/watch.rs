//! The only place that watches the API server: one watch per kind, each into a store.
//!
//! What is kept of an object is [`crate::kept`]'s. Every change of it goes out as a [`Changed`] to whoever
//! listens; an event that changes nothing of what is kept tells nobody.

use crate::NAMESPACE;
use crate::kept::{self, ActionJob, Application, Deployment, Deployments, Id, Written};
use crate::metrics;
use crate::operator::ending;
use crate::packed::Packer;
use crate::rows;
use crate::store::{Key, Store, key};
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, Secret};
use kube::api::{Api, DynamicObject, PartialObjectMeta};
use kube::core::{DeserializeGuard, GroupVersionKind, Resource};
use kube::discovery::ApiResource;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, ResourceExt as _};
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use styrmin_renderer::hooks::HOOK_LABEL;
use styrmin_renderer::layout::{FLUX_NAMESPACE, MANAGED_BY};
use styrmin_renderer::spec::{DEPLOYMENT_LABEL, StyrminDeployment};
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Length of the name of a deployment's object, with which names of its others begin.
const OBJECT_NAME: usize = "styrmin-".len() + 12;
/// Changes that a slow listener may miss before it has to look at everything.
const BACKLOG: usize = 4096;
/// By how much of the time between two lists each kind comes later than the one before.
const SPREAD: f64 = 0.02;
/// Objects in one answer to a list: a whole page is in memory at once, with everything that is not kept.
const PAGE: u32 = 100;

/// What changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// Something of one deployment.
    Deployment(Key),
    /// Which services there are in an environment: a deployment came, went, or has another driver.
    Environment(Key),
    /// A driver's definition: many may wait for it.
    Everything,
    /// Chart sources in the namespace of an environment.
    Sources(Box<str>),
    /// Pods of a namespace.
    Pods,
    /// Flux's own objects.
    Flux,
}

/// The stores.
pub struct Watch {
    /// StyrminDeployments.
    pub deployments: Arc<Store<Deployment>>,
    /// HelmReleases of ours.
    pub releases: Arc<Store<kept::Flux>>,
    /// Chart sources of ours, by kind: HelmChart, HelmRepository, OCIRepository.
    sources: Vec<(&'static str, Arc<Store<kept::Flux>>)>,
    /// GitRepositories of ours; that of the cluster is in `flux-system`.
    pub git_repositories: Arc<Store<kept::Flux>>,
    /// Kustomizations in `flux-system`.
    pub kustomizations: Arc<Store<kept::Flux>>,
    /// Secrets that we or Flux made for deployments, without their data.
    pub secrets: Arc<Store<kept::Secret>>,
    /// Network policies that the operator wrote.
    pub policies: Arc<Store<Written>>,
    /// Services and service aliases that the operator wrote.
    pub services: Arc<Store<Written>>,
    /// Jobs of drivers' actions.
    pub jobs: Arc<Store<ActionJob>>,
    /// Application namespaces.
    pub namespaces: Arc<Store<Application>>,
    /// Which ControllerRevisions hold what was applied.
    records: Arc<Store<()>>,
    /// Drivers' definitions.
    pub drivers: Arc<Store<Arc<ConfigMap>>>,
    /// The pods in namespaces whose names begin as applications' do.
    pub pods: Arc<Store<kept::Pod>>,
    changes: broadcast::Sender<Changed>,
    ready: Vec<(&'static str, Arc<AtomicBool>)>,
}

/// The resource of a kind.
#[must_use]
pub fn resource(group: &str, version: &str, kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind))
}

/// HelmReleases.
#[must_use]
pub fn helm_release() -> ApiResource {
    resource("helm.toolkit.fluxcd.io", "v2", "HelmRelease")
}

/// Sources of Flux.
#[must_use]
pub fn source(kind: &str) -> ApiResource {
    resource("source.toolkit.fluxcd.io", "v1", kind)
}

/// Network policies.
#[must_use]
pub fn network_policy() -> ApiResource {
    resource("networking.k8s.io", "v1", "NetworkPolicy")
}

/// Services.
#[must_use]
pub fn service() -> ApiResource {
    resource("", "v1", "Service")
}

/// Kustomizations.
#[must_use]
pub fn kustomization() -> ApiResource {
    resource("kustomize.toolkit.fluxcd.io", "v1", "Kustomization")
}

struct Starter<'a> {
    client: &'a Client,
    relist: Duration,
    stop: CancellationToken,
    changes: broadcast::Sender<Changed>,
    ready: Vec<(&'static str, Arc<AtomicBool>)>,
}

impl Starter<'_> {
    /// Everything about the objects of a kind. Listed anew now and then: a watch that loses an event says
    /// nothing of it, and what is not in a store is not looked at.
    fn events<K>(
        &self,
        api: Api<K>,
        config: watcher::Config,
    ) -> impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + use<K>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
        K::DynamicType: Clone,
    {
        // Not all kinds at the same moment: what is listed is not watched meanwhile.
        let relist = self.relist.mul_f64(1.0 + SPREAD * f64::from(u32::try_from(self.ready.len()).unwrap_or_default()));
        futures::stream::repeat_with(move || {
            watcher(api.clone(), config.clone()).default_backoff().take_until(tokio::time::sleep(relist))
        })
        .flatten()
    }

    /// Follows a stream of watch events into a store. `keep` says what is kept of an object, if anything;
    /// `changed` what it means that it is other than before, or gone.
    fn follow<K, T>(
        &mut self,
        name: &'static str,
        store: Arc<Store<T>>,
        stream: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + 'static,
        keep: impl Fn(K) -> Option<T> + Send + Sync + 'static,
        changed: impl Fn(&Key, Option<&T>, Option<&T>) -> Option<Changed> + Send + Sync + 'static,
    ) -> Arc<Store<T>>
    where
        K: Resource + Send + Sync + 'static,
        T: Clone + PartialEq + Send + Sync + 'static,
    {
        let done = Arc::new(AtomicBool::new(false));
        self.ready.push((name, Arc::clone(&done)));
        let (changes, stop, reader) = (self.changes.clone(), self.stop.clone(), Arc::clone(&store));
        tokio::spawn(async move {
            let tell = |key: &Key, before: Option<&T>, now: Option<&T>| {
                if before != now
                    && let Some(changed) = changed(key, before, now)
                {
                    let _ = changes.send(changed);
                }
            };
            let place = |object: &K| {
                let meta = object.meta();
                key(meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
            };
            let mut stream = std::pin::pin!(stream);
            loop {
                let event = tokio::select! {
                    () = stop.cancelled() => return,
                    event = stream.next() => event,
                };
                match event {
                    None => return,
                    Some(Err(error)) => {
                        metrics::watch_interrupted(name);
                        warn!(watch = name, %error, "a watch was interrupted; it begins anew");
                    }
                    Some(Ok(watcher::Event::Init)) => store.begin(),
                    Some(Ok(watcher::Event::InitDone)) => {
                        for (key, before) in store.complete() {
                            tell(&key, Some(&before), None);
                        }
                        done.store(true, Ordering::Release);
                    }
                    Some(Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object))) => {
                        let key = place(&object);
                        if let Some(kept) = keep(object) {
                            let before = store.put(key.clone(), kept.clone());
                            tell(&key, before.as_ref(), Some(&kept));
                        }
                    }
                    Some(Ok(watcher::Event::Delete(object))) => {
                        let key = place(&object);
                        let before = store.remove(&key);
                        tell(&key, before.as_ref(), None);
                    }
                }
            }
        });
        reader
    }

    /// Follows policies or Services that the operator wrote.
    fn written(&mut self, kind: &'static str, resource: &ApiResource, labels: &str) -> Arc<Store<Written>> {
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), resource);
        let stream = self.events(api, config(labels));
        let keep = move |object| Some(Written::keep(kind, &serde_json::to_value(object).unwrap_or_default()));
        let held = |written: &Written| Some(written.environment);
        self.follow(kind, Arc::new(Store::with_losses()), stream, keep, in_application(held))
    }

    /// Follows a kind of Flux.
    fn flux(
        &mut self,
        kind: &'static str,
        resource: &ApiResource,
        namespace: Option<&str>,
        labels: &str,
        changed: impl Fn(&Key) -> Changed + Send + Sync + 'static,
    ) -> Arc<Store<kept::Flux>> {
        let api: Api<DynamicObject> = match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, resource),
            None => Api::all_with(self.client.clone(), resource),
        };
        let stream = self.events(api, config(labels)).modify(trim);
        let packer = Packer::default();
        let keep = move |object| Some(kept::Flux::keep(&packer, &object));
        self.follow(kind, Arc::default(), stream, keep, move |key, _, _| Some(changed(key)))
    }
}

fn config(labels: &str) -> watcher::Config {
    watcher::Config::default().labels(labels).page_size(PAGE)
}

/// What nobody reads.
fn trim<K: Resource>(object: &mut K) {
    object.meta_mut().managed_fields = None;
}

/// What `kubectl apply` leaves.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The StyrminDeployment in whose application's namespace an object lies. `environment` is the id of its
/// environment, if it says so.
fn in_application<T>(
    environment: impl Fn(&T) -> Option<Id>,
) -> impl Fn(&Key, Option<&T>, Option<&T>) -> Option<Changed> {
    move |(namespace, _), before, now| {
        let environment = environment(now.or(before)?)?;
        Some(Changed::Deployment(key(&format!("styrmin-env-{}", environment.as_str()), namespace)))
    }
}

/// Objects that cannot be read disturb nobody: what was known of one stays, and its reader is told in the
/// log.
fn decodable(
    event: watcher::Event<DeserializeGuard<StyrminDeployment>>,
    store: &Store<Deployment>,
) -> Option<watcher::Event<StyrminDeployment>> {
    let read = |guard: DeserializeGuard<StyrminDeployment>| match guard.0 {
        Ok(object) => Some(object),
        Err(invalid) => {
            let (namespace, name) = (&invalid.metadata.namespace, &invalid.metadata.name);
            // A list has named it: it is not gone.
            store.named(namespace.as_deref().unwrap_or_default(), name.as_deref().unwrap_or_default());
            warn!(
                namespace,
                name,
                error = invalid.error,
                "a StyrminDeployment cannot be read; nothing is done about it"
            );
            None
        }
    };
    Some(match event {
        watcher::Event::Apply(object) => watcher::Event::Apply(read(object)?),
        watcher::Event::InitApply(object) => watcher::Event::InitApply(read(object)?),
        watcher::Event::Delete(object) => {
            let metadata = object.meta();
            let place = |name: &Option<String>| name.clone().unwrap_or_default();
            let (namespace, name) = (place(&metadata.namespace), place(&metadata.name));
            let read = read(object);
            if read.is_none() {
                // It is gone, whatever it was.
                store.remove(&key(&namespace, &name));
            }
            watcher::Event::Delete(read?)
        }
        watcher::Event::Init => watcher::Event::Init,
        watcher::Event::InitDone => watcher::Event::InitDone,
    })
}

/// What a change of a StyrminDeployment means: for its environment only when its services may be others.
fn of_deployment(key: &Key, before: Option<&Deployment>, now: Option<&Deployment>) -> Option<Changed> {
    let reference = key.clone();
    let offers = |one: &Deployment| (one.uid, one.driver.digest.clone(), one.going);
    let same = before.map(offers) == now.map(offers);
    Some(if same { Changed::Deployment(reference) } else { Changed::Environment(reference) })
}

/// Starts every watch; they end with `stop`. Everything is listed anew after each `relist`.
#[must_use]
pub fn start(client: &Client, relist: Duration, stop: &CancellationToken) -> Arc<Watch> {
    let mut starter =
        Starter { client, relist, stop: stop.clone(), changes: broadcast::channel(BACKLOG).0, ready: Vec::new() };
    let ours = format!("{}={}", MANAGED_BY.0, MANAGED_BY.1);

    let api: Api<DeserializeGuard<StyrminDeployment>> = Api::all(client.clone());
    let store = Arc::<Store<Deployment>>::default();
    let known = Arc::clone(&store);
    let stream = starter
        .events(api, watcher::Config::default().page_size(PAGE))
        .try_filter_map(move |event| std::future::ready(Ok(decodable(event, &known))))
        .modify(|object| {
            trim(object);
            object.annotations_mut().remove(LAST_APPLIED);
        });
    let keeper = Deployments::default();
    let keep = move |object| Some(keeper.keep(&object, ending));
    let deployments = starter.follow("StyrminDeployment", store, stream, keep, of_deployment);

    let beside = |(namespace, name): &Key| Changed::Deployment(key(namespace, name));
    let releases = starter.flux("HelmRelease", &helm_release(), None, &ours, beside);
    let in_environment = |(namespace, _): &Key| Changed::Sources(namespace.clone());
    let sources = ["HelmChart", "HelmRepository", "OCIRepository"]
        .map(|kind| (kind, starter.flux(kind, &source(kind), None, &ours, in_environment)))
        .into();
    let of_repository = move |key: &Key| if &*key.0 == FLUX_NAMESPACE { Changed::Flux } else { in_environment(key) };
    let git_repositories = starter.flux("GitRepository", &source("GitRepository"), None, &ours, of_repository);
    let kustomizations = starter.flux("Kustomization", &kustomization(), Some(FLUX_NAMESPACE), "", |_| Changed::Flux);

    let api: Api<PartialObjectMeta<Secret>> = Api::all(client.clone());
    // Charts' own Secrets carry the deployment's label too.
    let stream = starter.events(api, config(&format!("{ours},{DEPLOYMENT_LABEL}")));
    let of_secret = |(namespace, _): &Key, before: Option<&kept::Secret>, now: Option<&kept::Secret>| {
        let owner = &now.or(before)?.owner;
        Some(Changed::Deployment(key(namespace, &format!("styrmin-{}", owner.as_str()))))
    };
    let secrets =
        starter.follow("Secret", Arc::default(), stream, |object| Some(kept::Secret::keep(&object)), of_secret);
    let policies = starter.written("NetworkPolicy", &network_policy(), &ours);
    let services = starter.written("Service", &service(), &ours);
    let api: Api<PartialObjectMeta<Job>> = Api::all(client.clone());
    let stream = starter.events(api, config(&format!("{ours},{HOOK_LABEL}")));
    let keep = |object| Some(ActionJob::keep(&object));
    let of_job = in_application(|job: &ActionJob| Some(job.environment));
    let jobs = starter.follow("Job", Arc::default(), stream, keep, of_job);
    let api: Api<PartialObjectMeta<Namespace>> = Api::all(client.clone());
    let stream = starter.events(api, config(DEPLOYMENT_LABEL));
    // The namespace's labels name the environment too, and so where the object lies.
    let of_namespace = |(_, name): &Key, before: Option<&Application>, now: Option<&Application>| {
        let of = |application: &Application| application.environment;
        let environment = now.and_then(of).or(before.and_then(of))?;
        Some(Changed::Deployment(key(&format!("styrmin-env-{}", environment.as_str()), name)))
    };
    let keep = |object| Some(Application::keep(&object));
    let namespaces = starter.follow("Namespace", Arc::default(), stream, keep, of_namespace);
    let api: Api<PartialObjectMeta<ControllerRevision>> = Api::all(client.clone());
    let stream = starter.events(api, config(&format!("{ours},{DEPLOYMENT_LABEL}")));
    let of_record = |(namespace, name): &Key, _: Option<&()>, now: Option<&()>| {
        let owner = name.get(..OBJECT_NAME).filter(|_| now.is_none())?;
        Some(Changed::Deployment(key(namespace, owner)))
    };
    let records = starter.follow("ControllerRevision", Arc::default(), stream, |_| Some(()), of_record);
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let stream = starter.events(api, config("styrmin.io/driver")).modify(trim);
    let drivers = starter.follow(
        "ConfigMap",
        Arc::default(),
        stream,
        |object| Some(Arc::new(object)),
        |_, _, _| Some(Changed::Everything),
    );
    let api: Api<Pod> = Api::all(client.clone());
    let stream = starter.events(api, watcher::Config::default().page_size(PAGE));
    let packer = Packer::default();
    let keep = move |pod: Pod| {
        let ours = pod.metadata.namespace.as_deref().is_some_and(|namespace| namespace.starts_with("styrmin-"));
        ours.then(|| kept::Pod::keep(&packer, &pod, &rows::pod(&pod)))
    };
    let pods = starter.follow("Pod", Arc::default(), stream, keep, |_, _, _| Some(Changed::Pods));

    Arc::new(Watch {
        deployments,
        releases,
        sources,
        git_repositories,
        kustomizations,
        secrets,
        policies,
        services,
        jobs,
        namespaces,
        records,
        drivers,
        pods,
        changes: starter.changes,
        ready: starter.ready,
    })
}

impl Watch {
    /// Waits until every first list is complete.
    pub async fn ready(&self) {
        while !self.missing().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The kinds whose first list is not complete.
    #[must_use]
    pub fn missing(&self) -> Vec<&'static str> {
        self.ready.iter().filter(|(_, ready)| !ready.load(Ordering::Acquire)).map(|(name, _)| *name).collect()
    }

    /// Changes from now on.
    #[must_use]
    pub fn changes(&self) -> broadcast::Receiver<Changed> {
        self.changes.subscribe()
    }

    /// Tells the listeners of something that no watch sees.
    pub fn tell(&self, changed: Changed) {
        let _ = self.changes.send(changed);
    }

    /// Whether a ControllerRevision holds what was applied of a deployment.
    #[must_use]
    pub fn has_record(&self, namespace: &str, name: &str) -> bool {
        !self.records.beginning(namespace, &format!("{name}-")).is_empty()
    }

    /// A source in an environment.
    #[must_use]
    pub fn source(&self, kind: &str, namespace: &str, name: &str) -> Option<DynamicObject> {
        let store = match kind {
            "GitRepository" => &self.git_repositories,
            _ => &self.sources.iter().find(|(known, _)| *known == kind)?.1,
        };
        store.get(namespace, name)?.object()
    }
}
