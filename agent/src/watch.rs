//! The only place that watches the API server: one watch per kind, each into a store.
//!
//! A store is replaced as a whole when a list is complete, so nobody ever reads half of one. Objects
//! are trimmed before they are kept. Every change goes out as a [`Changed`] to whoever listens.

use crate::NAMESPACE;
use crate::kept::{self, Kept};
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, Secret};
use kube::api::{Api, DynamicObject, PartialObjectMeta};
use kube::core::{DeserializeGuard, GroupVersionKind, Resource};
use kube::discovery::ApiResource;
use kube::runtime::reflector::{self, ObjectRef, Store, store::Writer};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, ResourceExt as _};
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use styrmin_renderer::hooks::HOOK_LABEL;
use styrmin_renderer::layout::{FLUX_NAMESPACE, MANAGED_BY};
use styrmin_renderer::spec::{DEPLOYMENT_LABEL, ENVIRONMENT_LABEL, StyrminDeployment};
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Changes that a slow listener may miss before it has to look at everything.
const BACKLOG: usize = 4096;

/// What changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// Something of one deployment, named by its namespace and the name of its StyrminDeployment.
    Deployment(ObjectRef<StyrminDeployment>),
    /// Which services there are in an environment, named by its namespace: a deployment came, went, or has
    /// another driver.
    Environment(String),
    /// A driver's definition or a source: many may wait for it.
    Everything,
    /// Pods of a namespace.
    Pods,
    /// Flux's own objects.
    Flux,
}

/// The stores.
pub struct Watch {
    /// StyrminDeployments.
    pub deployments: Store<StyrminDeployment>,
    /// HelmReleases of ours.
    pub releases: Store<DynamicObject>,
    /// Chart sources of ours, by kind: HelmChart, HelmRepository, OCIRepository.
    pub sources: Vec<(ApiResource, Store<DynamicObject>)>,
    /// GitRepositories of ours; that of the cluster is in `flux-system`.
    pub git_repositories: Store<DynamicObject>,
    /// Kustomizations in `flux-system`.
    pub kustomizations: Store<DynamicObject>,
    /// Metadata of Secrets that we or Flux made for deployments.
    pub secrets: Store<PartialObjectMeta<Secret>>,
    /// Network policies that the operator wrote.
    pub policies: Arc<kept::Store>,
    /// Services and service aliases that the operator wrote.
    pub services: Arc<kept::Store>,
    /// Metadata of Jobs of drivers' actions.
    pub jobs: Store<PartialObjectMeta<Job>>,
    /// Application namespaces.
    pub namespaces: Store<PartialObjectMeta<Namespace>>,
    /// Drivers' definitions.
    pub drivers: Store<ConfigMap>,
    /// All pods, trimmed.
    pub pods: Store<Pod>,
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
        let relist = self.relist;
        futures::stream::repeat_with(move || {
            watcher(api.clone(), config.clone()).default_backoff().take_until(tokio::time::sleep(relist))
        })
        .flatten()
    }

    /// Follows a stream of watch events into a store.
    fn follow<K>(
        &mut self,
        name: &'static str,
        writer: Writer<K>,
        stream: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + 'static,
        changed: impl Fn(&K) -> Option<Changed> + Send + Sync + 'static,
    ) -> Store<K>
    where
        K: Resource + Clone + Debug + Send + Sync + 'static,
        K::DynamicType: Eq + Hash + Clone + Send + Sync,
    {
        let store = writer.as_reader();
        let done = Arc::new(AtomicBool::new(false));
        self.ready.push((name, Arc::clone(&done)));
        let (changes, stop, reader) = (self.changes.clone(), self.stop.clone(), store.clone());
        tokio::spawn(async move {
            let listed = changes.clone();
            let objects = stream.reflect(writer);
            // Whoever looked while a list came in saw the store from before it.
            let objects = objects.inspect_ok(move |event| {
                if matches!(event, watcher::Event::InitDone) {
                    let _ = listed.send(Changed::Everything);
                }
            });
            let mut objects = std::pin::pin!(objects.touched_objects());
            let first = async {
                if reader.wait_until_ready().await.is_ok() {
                    done.store(true, Ordering::Release);
                }
                std::future::pending::<()>().await;
            };
            let follow = async {
                while let Some(object) = objects.next().await {
                    match object {
                        Ok(object) => {
                            if let Some(changed) = changed(&object) {
                                let _ = changes.send(changed);
                            }
                        }
                        Err(error) => warn!(watch = name, %error, "a watch was interrupted; it begins anew"),
                    }
                }
            };
            tokio::select! {
                () = stop.cancelled() => {}
                () = first => {}
                () = follow => {}
            }
        });
        store
    }

    /// Follows a kind of which only little is kept.
    fn keep(&mut self, kind: &'static str, resource: &ApiResource, labels: &str) -> Arc<kept::Store> {
        let store = Arc::new(kept::Store::default());
        let done = Arc::new(AtomicBool::new(false));
        self.ready.push((kind, Arc::clone(&done)));
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), resource);
        let stream = self.events(api, watcher::Config::default().labels(labels));
        let (changes, stop, reader) = (self.changes.clone(), self.stop.clone(), Arc::clone(&store));
        tokio::spawn(async move {
            let mut stream = std::pin::pin!(stream);
            let place = |object: &DynamicObject| (object.namespace().unwrap_or_default(), object.name_any());
            loop {
                let event = tokio::select! {
                    () = stop.cancelled() => return,
                    event = stream.next() => event,
                };
                let changed = match event {
                    None => return,
                    Some(Err(error)) => {
                        warn!(watch = kind, %error, "a watch was interrupted; it begins anew");
                        None
                    }
                    Some(Ok(watcher::Event::Init)) => {
                        store.begin();
                        None
                    }
                    Some(Ok(watcher::Event::InitDone)) => {
                        store.complete();
                        done.store(true, Ordering::Release);
                        Some(Changed::Everything)
                    }
                    Some(Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object))) => {
                        let (namespace, name) = place(&object);
                        let value = serde_json::to_value(&object).unwrap_or_default();
                        store.put(&namespace, &name, Kept::of(kind, &value));
                        holder(&object)
                    }
                    Some(Ok(watcher::Event::Delete(object))) => {
                        let (namespace, name) = place(&object);
                        store.remove(&namespace, &name);
                        holder(&object)
                    }
                };
                if let Some(changed) = changed {
                    let _ = changes.send(changed);
                }
            }
        });
        reader
    }

    fn dynamic(
        &mut self,
        name: &'static str,
        resource: &ApiResource,
        namespace: Option<&str>,
        labels: &str,
        changed: impl Fn(&DynamicObject) -> Option<Changed> + Send + Sync + 'static,
    ) -> Store<DynamicObject> {
        let api: Api<DynamicObject> = match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, resource),
            None => Api::all_with(self.client.clone(), resource),
        };
        let stream = self.events(api, watcher::Config::default().labels(labels)).modify(trim);
        self.follow(name, Writer::new(resource.clone()), stream, changed)
    }
}

/// What nobody reads.
fn trim<K: Resource>(object: &mut K) {
    object.meta_mut().managed_fields = None;
}

/// What `kubectl apply` leaves.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The StyrminDeployment that an object of ours belongs to, when it lies in the environment's namespace.
fn beside<K: Resource>(object: &K) -> Option<Changed> {
    let deployment = object.labels().get(DEPLOYMENT_LABEL)?;
    let reference = ObjectRef::new(&format!("styrmin-{deployment}")).within(&object.namespace()?);
    Some(Changed::Deployment(reference))
}

/// The StyrminDeployment in whose application's namespace an object of ours lies.
fn holder<K: Resource>(object: &K) -> Option<Changed> {
    let environment = object.labels().get(ENVIRONMENT_LABEL)?;
    let reference = ObjectRef::new(&object.namespace()?).within(&format!("styrmin-env-{environment}"));
    Some(Changed::Deployment(reference))
}

/// Objects that cannot be read disturb nobody: what was known of one stays, and its reader is told in the
/// log.
fn decodable(event: watcher::Event<DeserializeGuard<StyrminDeployment>>) -> Option<watcher::Event<StyrminDeployment>> {
    let read = |guard: DeserializeGuard<StyrminDeployment>| match guard.0 {
        Ok(object) => Some(object),
        Err(invalid) => {
            let (namespace, name) = (&invalid.metadata.namespace, &invalid.metadata.name);
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
        watcher::Event::Delete(object) => watcher::Event::Delete(read(object)?),
        watcher::Event::Init => watcher::Event::Init,
        watcher::Event::InitDone => watcher::Event::InitDone,
    })
}

/// What a change of a StyrminDeployment means: for its environment only when its services may be others.
fn of_deployment(reader: Store<StyrminDeployment>) -> impl Fn(&StyrminDeployment) -> Option<Changed> + Send + Sync {
    type Known = HashMap<(Option<String>, Option<String>), (Option<String>, String, bool)>;
    let known: Mutex<Known> = Mutex::default();
    move |object| {
        let reference = ObjectRef::from_obj(object);
        let key = (object.metadata.namespace.clone(), object.metadata.name.clone());
        let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
        let same = if reader.get(&reference).is_some() {
            let going = object.metadata.deletion_timestamp.is_some();
            let now = (object.metadata.uid.clone(), object.spec.driver.digest.clone(), going);
            known.insert(key, now.clone()).is_some_and(|before| before == now)
        } else {
            known.remove(&key);
            false
        };
        Some(if same { Changed::Deployment(reference) } else { Changed::Environment(object.namespace()?) })
    }
}

/// Starts every watch; they end with `stop`. Everything is listed anew after each `relist`.
#[must_use]
pub fn start(client: &Client, relist: Duration, stop: &CancellationToken) -> Arc<Watch> {
    let mut starter =
        Starter { client, relist, stop: stop.clone(), changes: broadcast::channel(BACKLOG).0, ready: Vec::new() };
    let ours = format!("{}={}", MANAGED_BY.0, MANAGED_BY.1);
    let config = |labels: &str| watcher::Config::default().labels(labels);

    let api: Api<DeserializeGuard<StyrminDeployment>> = Api::all(client.clone());
    let stream = starter
        .events(api, watcher::Config::default())
        .try_filter_map(|event| std::future::ready(Ok(decodable(event))))
        .modify(|object| {
            trim(object);
            object.annotations_mut().remove(LAST_APPLIED);
        });
    let writer = reflector::store::Writer::default();
    let changed = of_deployment(writer.as_reader());
    let deployments = starter.follow("StyrminDeployment", writer, stream, changed);
    let releases = starter.dynamic("HelmRelease", &helm_release(), None, &ours, beside);
    let sources =
        [("HelmChart", "HelmChart"), ("HelmRepository", "HelmRepository"), ("OCIRepository", "OCIRepository")]
            .map(|(name, kind)| {
                let resource = source(kind);
                let store = starter.dynamic(name, &resource, None, &ours, |_| Some(Changed::Everything));
                (resource, store)
            })
            .into();
    let git_repositories =
        starter.dynamic("GitRepository", &source("GitRepository"), None, &ours, |_| Some(Changed::Flux));
    let kustomizations =
        starter.dynamic("Kustomization", &kustomization(), Some(FLUX_NAMESPACE), "", |_| Some(Changed::Flux));

    let api: Api<PartialObjectMeta<Secret>> = Api::all(client.clone());
    // Charts' own Secrets carry the deployment's label too.
    let stream = starter.events(api, config(&format!("{ours},{DEPLOYMENT_LABEL}"))).modify(trim);
    let secrets = starter.follow("Secret", Writer::default(), stream, beside);
    let policies = starter.keep("NetworkPolicy", &network_policy(), &ours);
    let services = starter.keep("Service", &service(), &ours);
    let api: Api<PartialObjectMeta<Job>> = Api::all(client.clone());
    let stream = starter.events(api, config(&format!("{ours},{HOOK_LABEL}"))).modify(trim);
    let jobs = starter.follow("Job", Writer::default(), stream, holder);
    let api: Api<PartialObjectMeta<Namespace>> = Api::all(client.clone());
    let stream = starter.events(api, config(DEPLOYMENT_LABEL)).modify(trim);
    // The namespace's labels name the environment too, and so where the object lies.
    let namespaces =
        starter.follow("Namespace", Writer::default(), stream, |namespace: &PartialObjectMeta<Namespace>| {
            let environment = namespace.labels().get(ENVIRONMENT_LABEL)?;
            let reference = ObjectRef::new(&namespace.name_any()).within(&format!("styrmin-env-{environment}"));
            Some(Changed::Deployment(reference))
        });
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let stream = starter.events(api, config("styrmin.io/driver")).modify(trim);
    let drivers = starter.follow("ConfigMap", Writer::default(), stream, |_| Some(Changed::Everything));
    let api: Api<Pod> = Api::all(client.clone());
    let stream = starter.events(api, watcher::Config::default()).modify(trim_pod);
    let pods = starter.follow("Pod", Writer::default(), stream, |_| Some(Changed::Pods));

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
        drivers,
        pods,
        changes: starter.changes,
        ready: starter.ready,
    })
}

/// Keeps of a pod what a report has.
fn trim_pod(pod: &mut Pod) {
    trim(pod);
    pod.metadata.annotations = None;
    if let Some(spec) = &mut pod.spec {
        let node = spec.node_name.take();
        *spec = k8s_openapi::api::core::v1::PodSpec { node_name: node, ..Default::default() };
    }
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

    /// A source in an environment.
    #[must_use]
    pub fn source(&self, kind: &str, namespace: &str, name: &str) -> Option<Arc<DynamicObject>> {
        let store = match kind {
            "GitRepository" => &self.git_repositories,
            _ => &self.sources.iter().find(|(resource, _)| resource.kind == kind)?.1,
        };
        named(store, source(kind), namespace, name)
    }
}

/// An object of a store, which holds objects of this resource.
#[must_use]
pub fn named(
    store: &Store<DynamicObject>,
    resource: ApiResource,
    namespace: &str,
    name: &str,
) -> Option<Arc<DynamicObject>> {
    store.get(&ObjectRef::new_with(name, resource).within(namespace))
}
