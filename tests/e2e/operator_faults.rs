//! The operator's fault table: one scenario, which has to end the same way whatever is lost on its way.
//!
//! The agent is the real program under its real rights; it reaches the API server through a proxy that
//! loses answers, refuses calls, lists what is old and swallows events. Flux is scripted.

use futures::FutureExt as _;
use http::StatusCode;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::time::{Duration, Instant};
use styrmin_renderer::config::Object;
use styrmin_renderer::context::{self, Inputs, Named};
use styrmin_renderer::driver::Driver;
use styrmin_renderer::names::{DeploymentId, EnvironmentId, id_from_random};
use styrmin_renderer::spec::{self, DriverRef, Lifecycle, StyrminDeploymentSpec};
use styrmin_renderer::{canonical, objects};
use styrmin_tests::plane::{Call, Class, Options, Plane, Port, Program, Proxy, Recipe, is_ready};
use styrmin_tests::scripted::Scripted;
use styrmin_tests::{eventually, world};
use tokio::sync::oneshot;

/// How long one stage may take, whatever happens in it.
const LIMIT: Duration = Duration::from_secs(60);
/// So long after its last write an agent that is not disturbed has nothing more to do: longer than its timer.
const QUIET: Duration = Duration::from_millis(1500);
/// Nor has it when everything is listed anew.
const REST: Duration = Duration::from_secs(6);
/// How long what is old is all that the agent sees.
const BEHIND: Duration = Duration::from_millis(400);
/// How long an agent leads without a word, in seconds.
const LEASE: u64 = 3;
/// No scenario has so many writes in a stage.
const MANY: usize = 60;
const RELEASES: &str = "/apis/helm.toolkit.fluxcd.io/v2/helmreleases";
const DEPLOYMENTS: &str = "/apis/styrmin.io/v1alpha1/styrmindeployments";
const SERVICES: &str = "/api/v1/services";
const POLICIES: &str = "/apis/networking.k8s.io/v1/networkpolicies";
const DRIVER: &str = "apiVersion: styrmin.io/v1
kind: ApplicationDriver
metadata: {name: tested}
spec:
  version: 1.0.0
  supported_versions: '*'
  helm: {main: {location: 'https://charts.example.com', chart: web, version: 1.0.0}}
  components:
    web: {identifier: {label: {app: web}}, replicas: 2, containers: [web]}
  services:
  - {name: web, kind: http, scope: external, port: 80, component: web}
  actions:
  - {name: prepare, hook: setup, mode: pre, steps: [{run_job: {component: web, image: 'tool:1', command: [prepare]}}]}
  - name: migrate
    hook: upgrade
    mode: pre
    steps:
    - stop_components: [web]
    - run_job: {component: web, image: 'tool:1', command: [migrate]}
    - start_components: [web]
  - {name: announce, hook: upgrade, mode: post, steps: [{run_job: {component: web, image: 'tool:1', command: [announce]}}]}
  - {name: part, hook: before_delete, mode: pre, steps: [{run_job: {component: web, image: 'tool:1', command: [part]}}]}
";
/// The actions that have run their Job at the end of each stage, in this order and once each.
const RUNS: [&[&str]; 3] =
    [&["prepare"], &["prepare", "migrate", "announce"], &["prepare", "migrate", "announce", "part"]];
const VALUES: &str = "env: ${{ env_list(components.web.env_vars) }}\n";

/// Calls of a scenario that fail once, at least.
const CALLS: usize = 50;

/// Events whose loss is tried: what they say, in which stage, and how to tell them.
const LOST: [(&str, Stage, Tell); 11] = [
    ("the creation of a network policy", Stage::Create, |event| {
        is_of(event, "NetworkPolicy") && event["type"] == "ADDED"
    }),
    ("the creation of a Service", Stage::Create, |event| is_of(event, "Service") && event["type"] == "ADDED"),
    ("the creation of the application's namespace", Stage::Create, |event| {
        is_metadata_of(event, "styrmin-") && event["type"] == "ADDED"
    }),
    ("the creation of the new values", Stage::Update, |event| {
        event["object"]["metadata"]["name"].as_str().is_some_and(|name| name.contains("-values-"))
            && event["type"] == "ADDED"
    }),
    ("the creation of the object", Stage::Create, |event| {
        is_of(event, "StyrminDeployment") && event["type"] == "ADDED"
    }),
    ("the change of the object", Stage::Update, |event| {
        is_of(event, "StyrminDeployment") && event["object"]["spec"]["instanceId"] == "instance-2"
    }),
    ("the end of the object", Stage::Delete, |event| {
        is_of(event, "StyrminDeployment") && !event["object"]["metadata"]["deletionTimestamp"].is_null()
    }),
    ("the status of the object", Stage::Create, |event| {
        is_of(event, "StyrminDeployment") && event["object"]["status"]["phase"] == "CreatingHelmRelease"
    }),
    ("the first readiness of the HelmRelease", Stage::Create, is_ready_release),
    ("the readiness of the changed HelmRelease", Stage::Update, is_ready_release),
    ("the end of the HelmRelease", Stage::Delete, |event| is_of(event, "HelmRelease") && event["type"] == "DELETED"),
];

type Tell = fn(&Value) -> bool;

fn is_of(event: &Value, kind: &str) -> bool {
    event["object"]["kind"] == kind
}

/// Only the metadata of objects without a namespace is watched that are Namespaces.
fn is_metadata_of(event: &Value, prefix: &str) -> bool {
    let metadata = &event["object"]["metadata"];
    metadata["namespace"].is_null() && metadata["name"].as_str().is_some_and(|name| name.starts_with(prefix))
}

fn is_ready_release(event: &Value) -> bool {
    is_of(event, "HelmRelease") && is_ready(Some(&event["object"]))
}

/// What happens to a deployment, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Create,
    Update,
    Delete,
}

const STAGES: [Stage; 3] = [Stage::Create, Stage::Update, Stage::Delete];

/// A control plane with an agent behind a proxy.
struct Place {
    plane: Plane,
    proxy: Proxy,
    agent: Program,
    driver: Driver,
    scripted: Scripted,
    /// Nothing that is put back may be of its own making.
    counts_drift: bool,
    _nobody: Port,
}

impl Place {
    async fn start() -> Self {
        Self::start_with(DRIVER, "1").await
    }

    /// With this driver, and an agent that looks by itself after so many seconds, and five times as many.
    async fn start_with(driver: &str, timer: &str) -> Self {
        let plane = Plane::start_with(Options { controllers: false, ..Options::default() }).await;
        world::install_agent(&plane).await;
        let files = [("driver.styrmin.yml", driver), ("values.styrmin.yml", VALUES)];
        let files: BTreeMap<String, String> = files.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
        let driver = Driver::from_files(files).unwrap();
        plane.apply(&objects::driver_config_map(&driver)).await;
        let scripted = Scripted::start(&plane.client());
        let proxy = plane.proxy().await;
        let account = world::account(&plane).await;
        let nobody = Port::claim();
        let kubeconfig = proxy.kubeconfig(plane.folder(), "agent", &account);
        let agent = Program::start(recipe(plane.folder(), &kubeconfig, &nobody, timer), plane.logs());
        Self { plane, proxy, agent, driver, scripted, counts_drift: true, _nobody: nobody }
    }

    /// Ends the agent at once, and starts another one that leads at once.
    async fn restart(&self) {
        self.agent.kill().await;
        self.proxy.resume();
        let leases = self.plane.api("coordination.k8s.io/v1", "Lease", "styrmin-system");
        let _ = leases.delete("styrmin-agent", &DeleteParams::default()).await;
        self.agent.restart().await;
    }

    /// Starts the agent anew whenever it has ended, as a kubelet does.
    async fn keep_alive(&self) {
        loop {
            if self.agent.id().await.is_none() {
                self.restart().await;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// A new deployment in an environment of its own, so that no other one changes what it gets.
    async fn run(&self) -> Run<'_> {
        let environment = id_from_random(rand::random()).parse().unwrap();
        self.plane.apply(&objects::environment_namespace(&environment, "e")).await;
        self.run_in(environment)
    }

    /// A new deployment in an environment.
    fn run_in(&self, environment: EnvironmentId) -> Run<'_> {
        let deployment: DeploymentId = id_from_random(rand::random()).parse().unwrap();
        let specs = ["1", "2"].map(|level| spec_of(&self.driver, &environment, &deployment, level));
        Run { place: self, environment, deployment, specs, uid: None }
    }

    /// Goes through the scenario without a fault; gives what each stage ends in.
    async fn undisturbed(&self) -> [Value; 3] {
        let mut run = self.run().await;
        let mut found = Vec::new();
        for stage in STAGES {
            run.begin(stage).await;
            run.reached(stage).await;
            self.quiet(if stage == Stage::Update { REST } else { QUIET }).await;
            found.push(run.snapshot().await);
        }
        found.try_into().unwrap()
    }

    /// What the agent would get if it listed a path now.
    async fn list(&self, path: &str) -> String {
        let of_path = |call: &&Call| call.class == Class::List && call.path == path;
        let calls = self.proxy.calls();
        let asked = calls.iter().rfind(of_path).unwrap_or_else(|| panic!("the agent never listed {path}"));
        let request = http::Request::get(format!("{path}?{}", asked.query)).body(Vec::new()).unwrap();
        self.plane.client().request_text(request).await.unwrap()
    }

    /// Waits until nothing was written for so long.
    async fn quiet(&self, time: Duration) {
        let mut seen = self.proxy.writes().len();
        eventually("the agent is done", LIMIT, async || {
            tokio::time::sleep(time).await;
            let now = self.proxy.writes().len();
            let same = std::mem::replace(&mut seen, now) == now;
            if same { Ok(()) } else { Err(self.proxy.writes().pop()) }
        })
        .await;
    }
}

fn recipe(folder: &Path, kubeconfig: &Path, server: &Port, timer: &str) -> Recipe {
    let relist = (timer.parse::<u32>().unwrap() * 5).to_string();
    let settings = [
        ("STYRMIN_SERVER_ADDRESS", format!("http://{}", server.address())),
        ("STYRMIN_AGENT_TOKEN", "nobody".to_owned()),
        ("STYRMIN_REPORT_INTERVAL", "300".to_owned()),
        ("STYRMIN_OPERATOR_TIMER", timer.to_owned()),
        ("STYRMIN_OPERATOR_RETRY_DELAY", "1".to_owned()),
        ("STYRMIN_OPERATOR_RELIST", relist),
        ("STYRMIN_LEASE_DURATION", LEASE.to_string()),
        ("STYRMIN_LOG", "info".to_owned()),
    ];
    world::agent("agent", folder, kubeconfig, &settings.each_ref().map(|(key, value)| (*key, value.as_str())))
}

fn spec_of(
    driver: &Driver,
    environment: &EnvironmentId,
    deployment: &DeploymentId,
    level: &str,
) -> StyrminDeploymentSpec {
    let config = json!({ "env_vars": { "LEVEL": level } });
    let resolution = context::resolve(&Inputs {
        cluster: Named { id: "clusterclust".parse().unwrap(), name: "c".into() },
        environment: Named { id: environment.clone(), name: "e".into() },
        deployment: Named { id: deployment.clone(), name: "front".into() },
        driver,
        application_version: level,
        cluster_config: &Object::new(),
        environment_config: &Object::new(),
        deployment_config: config.as_object().unwrap(),
        parameters: &Object::new(),
        secret_fingerprints: &BTreeMap::new(),
    })
    .unwrap();
    StyrminDeploymentSpec {
        deployment_id: deployment.clone(),
        instance_id: format!("instance-{level}"),
        lifecycle: Lifecycle::Running,
        driver: DriverRef {
            name: driver.name().into(),
            version: driver.version.to_string(),
            digest: driver.digest.clone(),
        },
        application_version: level.into(),
        context: resolution.context,
        jobs: Vec::new(),
    }
}

/// One deployment on its way through the scenario.
struct Run<'a> {
    place: &'a Place,
    environment: EnvironmentId,
    deployment: DeploymentId,
    specs: [StyrminDeploymentSpec; 2],
    uid: Option<String>,
}

impl Run<'_> {
    fn name(&self) -> String {
        self.deployment.object_name()
    }

    /// Does what people do at the beginning of a stage.
    async fn begin(&mut self, stage: Stage) {
        let plane = &self.place.plane;
        let (namespace, name) = (self.environment.namespace(), self.name());
        let api = plane.api("styrmin.io/v1alpha1", "StyrminDeployment", &namespace);
        match stage {
            Stage::Create => {
                plane.apply(&spec::object(&self.specs[0], &self.environment, 1)).await;
                self.uid = api.get(&name).await.unwrap().metadata.uid;
            }
            Stage::Update => plane.apply(&spec::object(&self.specs[1], &self.environment, 2)).await,
            Stage::Delete => {
                self.confirm().await;
                self.delete().await;
            }
        }
    }

    async fn confirm(&self) {
        let api = self.place.plane.api("styrmin.io/v1alpha1", "StyrminDeployment", &self.environment.namespace());
        let confirmed = json!({ "metadata": { "annotations": { "styrmin.io/confirm-delete": self.uid } } });
        api.patch(&self.name(), &PatchParams::default(), &Patch::Merge(&confirmed)).await.unwrap();
    }

    async fn delete(&self) {
        let api = self.place.plane.api("styrmin.io/v1alpha1", "StyrminDeployment", &self.environment.namespace());
        api.delete(&self.name(), &DeleteParams::default()).await.unwrap();
    }

    /// Waits until the operator says that nobody has confirmed the deletion.
    async fn is_held(&self) {
        let (namespace, name) = (self.environment.namespace(), self.name());
        let object = ["styrmin.io/v1alpha1", "StyrminDeployment", &namespace, &name];
        let says = |found: &Value| {
            let conditions = found["status"]["conditions"].as_array();
            conditions.is_some_and(|all| all.iter().any(|one| one["reason"] == "NotConfirmed"))
        };
        let held = self.place.plane.until(&object, LIMIT, |found| found.is_some_and(says)).await.unwrap();
        assert_eq!(held["metadata"]["finalizers"], json!(["styrmin.io/finalizer"]), "{held:#}");
    }

    /// Waits until the operator says that a stage is over.
    async fn reached(&self, stage: Stage) {
        let (namespace, name) = (self.environment.namespace(), self.name());
        let object = ["styrmin.io/v1alpha1", "StyrminDeployment", &namespace, &name];
        let instance = if stage == Stage::Create { "instance-1" } else { "instance-2" };
        let plane = &self.place.plane;
        let says_ready =
            |found: &Value| found["status"]["phase"] == "Ready" && found["status"]["instanceId"] == instance;
        plane
            .until(&object, LIMIT, |found| match stage {
                Stage::Delete => found.is_none(),
                _ => found.is_some_and(says_ready),
            })
            .await;
        let runs = self.place.scripted.runs(&name);
        assert_eq!(runs, RUNS[stage as usize], "no action is lost, and none that ended runs again");
        if stage == Stage::Delete {
            assert_eq!(plane.get(&["v1", "Namespace", "", &name]).await, None, "the object goes last");
        } else {
            let release = plane.get(&["helm.toolkit.fluxcd.io/v2", "HelmRelease", &namespace, &name]).await;
            assert!(is_ready(release.as_ref()), "Ready was said too early: {release:?}");
        }
    }

    /// Waits until the object has gone, and finds nothing that it has left.
    async fn is_gone(&self) {
        let (namespace, name) = (self.environment.namespace(), self.name());
        let object = ["styrmin.io/v1alpha1", "StyrminDeployment", &namespace, &name];
        self.place.plane.until(&object, LIMIT, |found| found.is_none()).await;
        eventually("nothing of it is left", LIMIT, async || {
            let found = self.snapshot().await;
            let left: Vec<String> = found.as_object().unwrap().keys().cloned().collect();
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await;
    }

    /// Waits until everything is as it is without a fault.
    async fn settles(&self, stage: Stage, wanted: &Value) {
        self.reached(stage).await;
        let what = format!("{stage:?} ends as it does undisturbed (logs: {})", self.place.plane.logs().display());
        eventually(&what, LIMIT, async || {
            let found = self.snapshot().await;
            let mut differences = Vec::new();
            compare("", wanted, &found, &mut differences);
            if differences.is_empty() { Ok(()) } else { Err(differences) }
        })
        .await;
    }

    /// Everything that the operator answers for, without what differs between two runs.
    async fn snapshot(&self) -> Value {
        let plane = &self.place.plane;
        let (environment, application) = (self.environment.namespace(), self.name());
        let mut found = Map::new();
        for (version, kind, namespace) in [
            ("styrmin.io/v1alpha1", "StyrminDeployment", &environment),
            ("helm.toolkit.fluxcd.io/v2", "HelmRelease", &environment),
            ("source.toolkit.fluxcd.io/v1", "HelmChart", &environment),
            ("source.toolkit.fluxcd.io/v1", "HelmRepository", &environment),
            ("source.toolkit.fluxcd.io/v1", "OCIRepository", &environment),
            ("v1", "Secret", &environment),
            ("apps/v1", "ControllerRevision", &environment),
            ("networking.k8s.io/v1", "NetworkPolicy", &application),
            ("v1", "Service", &application),
            ("v1", "Secret", &application),
            ("batch/v1", "Job", &application),
        ] {
            for object in plane.api(version, kind, namespace).list(&ListParams::default()).await.unwrap() {
                let object = serde_json::to_value(object).unwrap();
                let mut place = format!("{kind} {namespace}/{}", object["metadata"]["name"].as_str().unwrap());
                if let Some(action) = object["metadata"]["labels"]["styrmin.io/hook"].as_str() {
                    // It is named by a hash over the ids of this run; what counts is the attempt.
                    place = format!("{kind} {action} {}", place.rsplit_once('-').unwrap().1);
                }
                let mut essence = essence(kind, &object);
                if let Some(status) = essence["status"].as_object_mut().filter(|_| !self.place.counts_drift) {
                    status.remove("driftCorrections");
                }
                found.insert(place, essence);
            }
        }
        if let Some(object) = plane.get(&["v1", "Namespace", "", &application]).await {
            found.insert(format!("Namespace {application}"), json!({ "labels": object["metadata"]["labels"] }));
        }
        let mut text = Value::Object(found).to_string();
        let digests = self.specs.each_ref().map(StyrminDeploymentSpec::digest);
        for (name, placeholder) in [
            (self.deployment.as_str(), "DEPLOYMENT"),
            (self.environment.as_str(), "ENVIRONMENT"),
            (self.uid.as_deref().unwrap(), "UID"),
            (&digests[0], "DIGEST-1"),
            (&digests[1], "DIGEST-2"),
            (canonical::short(&digests[0]), "SHORT-1"),
            (canonical::short(&digests[1]), "SHORT-2"),
        ] {
            text = text.replace(name, placeholder);
        }
        serde_json::from_str(&text).unwrap()
    }
}

/// What of an object does not depend on when and how often something was done.
fn essence(kind: &str, object: &Value) -> Value {
    let mut kept = Map::new();
    for part in ["spec", "data", "type", "revision", "immutable"] {
        kept.insert(part.to_owned(), object[part].clone());
    }
    if kind == "Job" {
        // The API server selects its pods by its UID.
        kept.insert("spec".to_owned(), object["spec"]["template"]["spec"].clone());
    }
    kept.insert("labels".to_owned(), object["metadata"]["labels"].clone());
    kept.insert("going".to_owned(), (!object["metadata"]["deletionTimestamp"].is_null()).into());
    if let Some(spec) = kept["spec"].as_object().filter(|_| kind == "Service") {
        let mut spec = spec.clone();
        spec.retain(|name, _| !name.starts_with("clusterIP"));
        kept.insert("spec".to_owned(), spec.into());
    }
    if kind == "StyrminDeployment" {
        let mut status = object["status"].clone();
        without(&mut status);
        kept.insert("finalizers".to_owned(), object["metadata"]["finalizers"].clone());
        kept.insert("status".to_owned(), status);
    }
    kept.into()
}

/// Takes times and counts from a status.
fn without(value: &mut Value) {
    const VOLATILE: [&str; 7] = [
        "lastTransitionTime",
        "startedAt",
        "endedAt",
        "rolloutStartedAt",
        "attempt",
        "key",
        // Digests of what names the ids of this run.
        "renderedRelease",
    ];
    match value {
        Value::Object(map) => {
            map.retain(|name, _| !VOLATILE.contains(&name.as_str()));
            map.values_mut().for_each(without);
        }
        Value::Array(items) => items.iter_mut().for_each(without),
        _ => {}
    }
}

/// Where two values differ.
fn compare(place: &str, wanted: &Value, found: &Value, differences: &mut Vec<String>) {
    match (wanted, found) {
        (Value::Object(one), Value::Object(other)) => {
            let names: std::collections::BTreeSet<&String> = one.keys().chain(other.keys()).collect();
            for name in names {
                let (one, other) = (one.get(name).unwrap_or(&Value::Null), other.get(name).unwrap_or(&Value::Null));
                compare(&format!("{place} › {name}"), one, other, differences);
            }
        }
        (Value::Array(one), Value::Array(other)) if one.len() == other.len() => {
            for (index, (one, other)) in one.iter().zip(other).enumerate() {
                compare(&format!("{place} › {index}"), one, other, differences);
            }
        }
        _ if wanted == found => {}
        _ => differences.push(format!("{place}: {found} instead of {wanted}")),
    }
}

/// Whether something was told by now; waits a moment for it.
async fn told<T>(receiver: &mut oneshot::Receiver<T>) -> Option<T> {
    tokio::time::timeout(Duration::from_millis(300), receiver).await.ok()?.ok()
}

/// Says where in a table a run failed.
async fn at<T>(what: &str, run: impl Future<Output = T>) -> T {
    match AssertUnwindSafe(run).catch_unwind().await {
        Ok(done) => done,
        Err(why) => {
            let why = why.downcast_ref::<String>().map_or("?", String::as_str);
            panic!("{what}: {why}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_after_every_single_write() {
    let place = Place::start().await;
    let before = Instant::now();
    let wanted = place.undisturbed().await;
    let undisturbed = place.proxy.writes().len();
    eprintln!("undisturbed: {undisturbed} writes, {:?}", before.elapsed());
    let mut killed = Vec::new();
    for n in 1..MANY {
        let mut run = place.run().await;
        let mut struck = false;
        for (stage, wanted) in STAGES.into_iter().zip(&wanted) {
            let what = format!("killed after write {n} of {stage:?}");
            let begun = Instant::now();
            let before = place.proxy.writes().len();
            let mut lost = place.proxy.after_write(n);
            run.begin(stage).await;
            let call = tokio::select! {
                call = &mut lost => call.ok(),
                () = at(&what, run.settles(stage, wanted)) => told(&mut lost).await,
            };
            if let Some(call) = call {
                place.restart().await;
                at(&format!("{what} ({})", call.key()), run.settles(stage, wanted)).await;
                let writes = place.proxy.writes().len() - before;
                eprintln!("{what}: {} {writes} {:?}", call.key(), begun.elapsed());
                assert!(writes < 3 * undisturbed, "{what}: {writes} writes");
                killed.push((stage, call));
                struck = true;
            }
            place.proxy.disarm();
        }
        if !struck {
            break;
        }
    }
    eprintln!("{} kills, {:?}", killed.len(), before.elapsed());
    assert!(killed.len() + 3 >= undisturbed, "{} kills, {undisturbed} writes undisturbed", killed.len());
    place.plane.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_fails_once() {
    let place = Place::start().await;
    let wanted = place.undisturbed().await;
    for status in [409, 429, 500, 410] {
        let begun = Instant::now();
        let mut run = place.run().await;
        place.proxy.fail_each(StatusCode::from_u16(status).unwrap());
        // Its first lists and watches are calls too.
        place.restart().await;
        for (stage, wanted) in STAGES.into_iter().zip(&wanted) {
            run.begin(stage).await;
            at(&format!("{stage:?} while every call gets {status} once"), run.settles(stage, wanted)).await;
        }
        let failed = place.proxy.failed();
        eprintln!("{status}: {} calls failed, {:?}", failed.len(), begun.elapsed());
        assert!(failed.len() > CALLS, "{status}: only {failed:#?}");
        place.proxy.disarm();
    }
    place.plane.stop().await;
}

/// For a moment, which may cost it the lease, or longer than that lasts: then the agent ends, and is started anew.
#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_is_away() {
    let place = Place::start().await;
    let wanted = place.undisturbed().await;
    for (writes, away) in [(1, 1), (4, 1), (2, 5)] {
        let mut run = place.run().await;
        for (stage, wanted) in STAGES.into_iter().zip(&wanted) {
            let what = format!("away for {away} s at write {writes} of {stage:?}");
            let (written, answer) = place.proxy.hold_write(writes);
            run.begin(stage).await;
            tokio::time::timeout(LIMIT, written).await.unwrap().unwrap();
            place.proxy.away(true);
            let _ = answer.send(());
            tokio::time::sleep(Duration::from_secs(away)).await;
            place.proxy.away(false);
            assert!(away <= LEASE || place.agent.id().await.is_none(), "it has not lost its lease");
            tokio::select! {
                () = at(&what, run.settles(stage, wanted)) => {}
                () = place.keep_alive() => {}
            }
        }
    }
    place.plane.stop().await;
}

/// By what the watches tell alone: its timer comes after everything has to be over.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_waits_for_the_timer() {
    let place = Place::start_with(DRIVER, "600").await;
    place.undisturbed().await;
    let mut one = place.run().await;
    one.begin(Stage::Create).await;
    one.reached(Stage::Create).await;
    // What is put back.
    for (version, kind) in [("networking.k8s.io/v1", "NetworkPolicy"), ("v1", "Service")] {
        let api = place.plane.api(version, kind, &one.name());
        let name = api.list(&ListParams::default()).await.unwrap().items[0].metadata.name.clone().unwrap();
        api.delete(&name, &DeleteParams::default()).await.unwrap();
        place.plane.until(&[version, kind, &one.name(), &name], LIMIT, |found| found.is_some()).await;
    }
    place.plane.stop().await;
}

/// Flux keeps charts of a registry in a source of another kind.
#[tokio::test(flavor = "multi_thread")]
async fn a_chart_of_a_registry() {
    let driver = DRIVER.replace(
        "{location: 'https://charts.example.com', chart: web, version: 1.0.0}",
        "{location: 'oci://charts.example.com/web', version: 1.0.0}",
    );
    let place = Place::start_with(&driver, "1").await;
    let [created, _, gone] = place.undisturbed().await;
    let sources = |found: &Value| found.as_object().unwrap().keys().filter(|name| name.starts_with("OCI")).count();
    assert_eq!((sources(&created), sources(&gone)), (1, 0));
    place.plane.stop().await;
}

/// Somebody deletes it after every write of a create and of an update. Confirmed at once, or later: until then it is
/// held; then the teardown runs once, and nothing is left.
#[tokio::test(flavor = "multi_thread")]
async fn deleted_at_every_moment() {
    let place = Place::start().await;
    let wanted = place.undisturbed().await;
    let mut deleted = 0;
    for (stage, confirmed, step) in
        [(Stage::Create, true, 1), (Stage::Update, true, 1), (Stage::Create, false, 3), (Stage::Update, false, 3)]
    {
        for n in (1..MANY).step_by(step) {
            let mut run = place.run().await;
            if stage == Stage::Update {
                run.begin(Stage::Create).await;
                at("before the update", run.settles(Stage::Create, &wanted[0])).await;
            }
            let what = format!("deleted after write {n} of {stage:?}, confirmed at once: {confirmed}");
            let (mut written, answer) = place.proxy.hold_write(n);
            run.begin(stage).await;
            let struck = tokio::select! {
                struck = &mut written => struck.is_ok(),
                () = at(&what, run.settles(stage, &wanted[stage as usize])) => told(&mut written).await.is_some(),
            };
            place.proxy.disarm();
            if !struck {
                break;
            }
            if confirmed {
                run.begin(Stage::Delete).await;
            } else {
                run.delete().await;
            }
            let _ = answer.send(());
            if !confirmed {
                at(&what, run.is_held()).await;
                run.confirm().await;
            }
            at(&what, run.is_gone()).await;
            let mut runs = place.scripted.runs(&run.name());
            let all = runs.len();
            runs.sort();
            runs.dedup();
            assert_eq!(runs.len(), all, "{what}: an action ran twice");
            // What was applied is parted from; what never was has nothing to part from.
            let parted = runs.iter().any(|action| action == "part");
            assert!(stage == Stage::Create || parted, "{what}: {runs:?}");
            deleted += 1;
        }
    }
    eprintln!("{deleted} deletions");
    assert!(deleted > 20, "only {deleted}");
    place.plane.stop().await;
}

/// Each has looked whether it is the last one while the other was there still.
#[tokio::test(flavor = "multi_thread")]
async fn two_that_leave_an_environment_at_once_leave_nothing_there() {
    let place = Place::start().await;
    for _ in 0..3 {
        let mut one = place.run().await;
        let mut other = place.run_in(one.environment.clone());
        for run in [&mut one, &mut other] {
            run.begin(Stage::Create).await;
            run.reached(Stage::Create).await;
            run.confirm().await;
        }
        let source = ["source.toolkit.fluxcd.io/v1", "HelmRepository", &one.environment.namespace()];
        let sources = place.plane.api(source[0], source[1], source[2]);
        assert!(!sources.list(&ListParams::default()).await.unwrap().items.is_empty());
        // Both come to their namespaces, which go last, and at the same moment.
        let namespaces = place.plane.api("v1", "Namespace", "");
        let hold = async |name: String, finalizers: Value| {
            let held = json!({ "metadata": { "finalizers": finalizers } });
            namespaces.patch(&name, &PatchParams::default(), &Patch::Merge(&held)).await.unwrap();
        };
        let both = async |finalizers: Value| {
            tokio::join!(hold(one.name(), finalizers.clone()), hold(other.name(), finalizers));
        };
        both(json!(["tests.example.com/held"])).await;
        tokio::join!(one.delete(), other.delete());
        for run in [&one, &other] {
            let namespace = ["v1", "Namespace", "", &run.name()];
            let is_going =
                |found: Option<&Value>| found.is_some_and(|found| !found["metadata"]["deletionTimestamp"].is_null());
            place.plane.until(&namespace, LIMIT, is_going).await;
        }
        // The one lets its object go when the other one, which has seen it there, is gone. (Its first attempt does not
        // count: it has noted its end since it looked.)
        let environment = one.environment.namespace();
        let objects = format!("/apis/styrmin.io/v1alpha1/namespaces/{environment}/styrmindeployments");
        let (comes, go) = place.proxy.late_write(2, &format!("{objects}/{}", one.name()));
        both(json!([])).await;
        tokio::time::timeout(LIMIT, comes).await.unwrap().unwrap();
        let object = ["styrmin.io/v1alpha1", "StyrminDeployment", &environment, &other.name()];
        place.plane.until(&object, LIMIT, |found| found.is_none()).await;
        go.send(()).unwrap();
        tokio::join!(one.is_gone(), other.is_gone());
    }
    // Who stays keeps them.
    let mut stays = place.run().await;
    let mut goes = place.run_in(stays.environment.clone());
    for run in [&mut stays, &mut goes] {
        run.begin(Stage::Create).await;
        run.reached(Stage::Create).await;
    }
    let before = stays.snapshot().await;
    let sources = |found: &Value| {
        let names = found.as_object().unwrap().keys().filter(|name| name.starts_with("Helm"));
        names.filter(|name| !name.contains(goes.deployment.as_str())).cloned().collect::<Vec<_>>()
    };
    goes.confirm().await;
    goes.delete().await;
    let object = ["styrmin.io/v1alpha1", "StyrminDeployment", &goes.environment.namespace(), &goes.name()];
    place.plane.until(&object, LIMIT, |found| found.is_none()).await;
    assert_eq!(sources(&stays.snapshot().await), sources(&before));
    place.plane.stop().await;
}

/// One old list at every second write of every stage, or at some of them: as of the stage's beginning, when nothing of it had
/// happened yet.
#[tokio::test(flavor = "multi_thread")]
async fn one_stale_list() {
    let mut place = Place::start().await;
    // What an old list does not show is taken for removed.
    place.counts_drift = false;
    let wanted = place.undisturbed().await;
    for (path, step, least) in [(RELEASES, 2, 10), (DEPLOYMENTS, 2, 10), (SERVICES, 6, 4), (POLICIES, 6, 4)] {
        let (begun, mut served) = (Instant::now(), 0);
        for n in (1..MANY).step_by(step) {
            let mut run = place.run().await;
            let before = served;
            for (stage, wanted) in STAGES.into_iter().zip(&wanted) {
                let what = format!("{path} listed as before {stage:?} at its write {n}");
                let old = place.list(path).await;
                let (mut written, answer) = place.proxy.hold_write(n);
                run.begin(stage).await;
                let reached = tokio::select! {
                    reached = &mut written => reached.is_ok(),
                    () = at(&what, run.settles(stage, wanted)) => told(&mut written).await.is_some(),
                };
                if reached {
                    // The agent goes on when it sees what is old, and for a while nobody shows it more.
                    place.scripted.work(false);
                    let listed = place.proxy.stale_list(path, old);
                    place.proxy.break_watches();
                    tokio::time::timeout(LIMIT, listed).await.unwrap().unwrap();
                    let _ = answer.send(());
                    let later = async {
                        tokio::time::sleep(BEHIND).await;
                        place.scripted.work(true);
                    };
                    tokio::join!(at(&what, run.settles(stage, wanted)), later);
                    served += 1;
                }
                place.proxy.disarm();
            }
            if served == before {
                break;
            }
        }
        eprintln!("{path}: {served} stale lists, {:?}", begun.elapsed());
        assert!(served > least, "{path}: only {served} stale lists");
    }
    place.plane.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_lost_event() {
    let place = Place::start().await;
    let wanted = place.undisturbed().await;
    for (what, stage, lost) in LOST {
        let begun = Instant::now();
        let mut run = place.run().await;
        for (now, wanted) in STAGES.into_iter().zip(&wanted) {
            let mut swallowed = (now == stage).then(|| place.proxy.drop_event(lost));
            run.begin(now).await;
            at(&format!("without {what} in {stage:?}"), run.settles(now, wanted)).await;
            if let Some(swallowed) = &mut swallowed {
                let event = told(swallowed).await;
                assert!(event.is_some(), "{what} was not seen in {stage:?}");
            }
        }
        eprintln!("without {what} in {stage:?}: {:?}", begun.elapsed());
    }
    place.plane.stop().await;
}
