//! A whole control plane of its own for one test: etcd, API server, controller-manager, scheduler,
//! Flux's source- and kustomize-controller, a helm-controller, and simulated nodes and pods.
//!
//! The programs come from `tests/control-plane/build`. Each runs on ports of its own on loopback,
//! reaches the API server through a gate that can be cut, writes a log that outlives the run, and
//! ends with this process, however that ends. What may not enter: anything about Styrmin itself.

mod certificates;
mod gate;
mod ports;
mod program;
mod proxy;

pub use certificates::Certificates;
pub use gate::Gate;
pub use ports::Port;
pub use program::{Program, Recipe};
pub use proxy::{Call, Class, Proxy};

use crate::{eventually, tools};
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::GroupVersionKind;
use kube::discovery::ApiResource;
use kube::{Client, Config};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

const ETCD: &str = "etcd";
const API_SERVER: &str = "kube-apiserver";
const CONTROLLER_MANAGER: &str = "kube-controller-manager";
const SCHEDULER: &str = "kube-scheduler";
/// Simulates nodes and pods.
pub const KWOK: &str = "kwok";
/// Flux's source-controller.
pub const SOURCE_CONTROLLER: &str = "source-controller";
/// Flux's kustomize-controller.
pub const KUSTOMIZE_CONTROLLER: &str = "kustomize-controller";
/// The stand-in, or what `STYRMIN_TEST_HELM_CONTROLLER` names.
pub const HELM_CONTROLLER: &str = "helm-controller";
/// The namespace of Flux.
pub const FLUX: &str = "flux-system";

const STAGES: &str = include_str!("stages.yaml");
/// Memory is not what runs short on a machine of tests: Go's collector took two fifths of the API server's start.
const GO: [(&str, &str); 2] = [("GOGC", "1000"), ("GOMEMLIMIT", "1GiB")];
/// How long the API server may take to answer.
const START_LIMIT: Duration = Duration::from_secs(90);
/// Logs of so many runs are kept.
const KEPT_LOGS: usize = 200;
/// Who writes what tests apply.
const FIELD_MANAGER: &str = "styrmin-tests";

/// What a control plane has besides etcd and the API server.
#[derive(Debug, Clone)]
pub struct Options {
    /// Controllers, scheduler, Flux and simulated nodes; without, objects just lie there.
    pub controllers: bool,
    /// More arguments for the helm-controller.
    pub helm_controller: Vec<String>,
    /// Use the stand-in whatever `STYRMIN_TEST_HELM_CONTROLLER` says.
    pub stand_in: bool,
    /// Where the files lie, if not in a new temporary folder.
    pub folder: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self { controllers: true, helm_controller: Vec::new(), stand_in: false, folder: None }
    }
}

/// A running control plane; ends with the value.
pub struct Plane {
    folder: PathBuf,
    logs: PathBuf,
    kubeconfig: PathBuf,
    client: Client,
    certificates: Certificates,
    api: Port,
    token: String,
    programs: BTreeMap<&'static str, Program>,
    gates: BTreeMap<&'static str, Gate>,
    ports: Vec<Port>,
    _temporary: Option<TempDir>,
}

/// The helm-controller that tests run: the program that `STYRMIN_TEST_HELM_CONTROLLER` names, or the
/// stand-in of this tree.
#[must_use]
pub fn helm_controller() -> PathBuf {
    match std::env::var_os("STYRMIN_TEST_HELM_CONTROLLER") {
        Some(path) if !path.is_empty() => path.into(),
        _ => tools::tool(HELM_CONTROLLER),
    }
}

/// A new folder for the logs of one run, below `target`. The oldest ones go.
fn new_logs() -> PathBuf {
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from);
    let all = target.join("control-plane-logs");
    std::fs::create_dir_all(&all).unwrap();
    let mut known: Vec<PathBuf> =
        std::fs::read_dir(&all).unwrap().filter_map(Result::ok).map(|entry| entry.path()).collect();
    known.sort();
    for old in known.iter().rev().skip(KEPT_LOGS) {
        let _ = std::fs::remove_dir_all(old);
    }
    #[expect(clippy::disallowed_methods, reason = "names a folder, decides nothing")]
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis();
    let test = std::thread::current().name().unwrap_or("main").replace("::", "-");
    let path = all.join(format!("{now}-{}-{}-{test}", std::process::id(), RUNS.fetch_add(1, Ordering::Relaxed)));
    std::fs::create_dir_all(&path).unwrap();
    path
}

impl Plane {
    /// Starts one with everything.
    pub async fn start() -> Self {
        Self::start_with(Options::default()).await
    }

    /// Starts one.
    ///
    /// # Panics
    /// When a program is missing or does not come up; the message has the end of its log.
    pub async fn start_with(options: Options) -> Self {
        styrmin_client::choose_tls();
        let (folder, temporary) = match &options.folder {
            Some(folder) => (folder.clone(), None),
            None => {
                let temporary = tempfile::Builder::new().prefix("styrmin-plane-").tempdir().unwrap();
                (temporary.path().to_owned(), Some(temporary))
            }
        };
        std::fs::create_dir_all(&folder).unwrap();
        let logs = new_logs();
        let certificates = Certificates::write(&folder);
        let token = format!("{:032x}", rand::random::<u128>());
        std::fs::write(folder.join("tokens.csv"), format!("{token},admin,admin,system:masters\n")).unwrap();
        let api = Port::claim();
        let kubeconfig = write_kubeconfig(&folder, "admin", api.number(), &token, &certificates);
        let client = client_of(&kubeconfig).await;
        let mut plane = Self {
            folder,
            logs,
            kubeconfig,
            client,
            certificates,
            api,
            token,
            programs: BTreeMap::new(),
            gates: BTreeMap::new(),
            ports: Vec::new(),
            _temporary: temporary,
        };
        plane.storage();
        plane.answers().await;
        plane.crds().await;
        if options.controllers {
            plane.controllers(&options).await;
        }
        plane
    }

    fn claim(&mut self) -> u16 {
        let port = Port::claim();
        let number = port.number();
        self.ports.push(port);
        number
    }

    fn run(&mut self, name: &'static str, program: PathBuf, arguments: Vec<String>, environment: &[(&str, &str)]) {
        let recipe = Recipe {
            name: name.into(),
            program,
            arguments,
            environment: GO.iter().chain(environment).map(|(key, value)| ((*key).into(), (*value).into())).collect(),
            folder: self.folder.clone(),
        };
        self.programs.insert(name, Program::start(recipe, &self.logs));
    }

    /// etcd and the API server.
    fn storage(&mut self) {
        let (etcd, peer) = (self.claim(), self.claim());
        self.run(ETCD, tools::tool(ETCD), etcd_arguments(&self.folder, etcd, peer), &[]);
        let arguments = api_server_arguments(&self.folder, &self.certificates, etcd, self.api.number());
        self.run(API_SERVER, tools::tool(API_SERVER), arguments, &[]);
    }

    /// A kubeconfig for one program, which reaches the API server through a gate of its own.
    async fn gated(&mut self, name: &'static str) -> String {
        let gate = Gate::open(self.api.number()).await;
        let path = write_kubeconfig(&self.folder, name, gate.number(), &self.token, &self.certificates);
        self.gates.insert(name, gate);
        path.to_string_lossy().into_owned()
    }

    async fn controllers(&mut self, options: &Options) {
        let kubeconfig = self.gated(CONTROLLER_MANAGER).await;
        let mut arguments = texts(&[
            "--leader-elect=false",
            "--secure-port=0",
            // There are no clouds and no disks; stages.yaml binds volumes.
            "--controllers=*,-node-ipam-controller,-service-lb-controller,-node-route-controller,-persistentvolume-binder-controller",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=20s",
        ]);
        arguments.push(format!("--kubeconfig={kubeconfig}"));
        arguments.push(file("service-account-private-key-file", &self.certificates.accounts_key));
        arguments.push(file("root-ca-file", &self.certificates.authority));
        self.run(CONTROLLER_MANAGER, tools::tool(CONTROLLER_MANAGER), arguments, &[]);

        let kubeconfig = self.gated(SCHEDULER).await;
        let path = self.folder.join("scheduler.yaml");
        std::fs::write(&path, scheduler_configuration(&kubeconfig)).unwrap();
        let arguments = vec![file("config", &path), "--secure-port=0".into()];
        self.run(SCHEDULER, tools::tool(SCHEDULER), arguments, &[]);

        let kubeconfig = self.gated(KWOK).await;
        let kubelet = self.claim();
        let path = self.folder.join("kwok.yaml");
        std::fs::write(&path, kwok_configuration(&self.folder)).unwrap();
        let arguments = vec![
            format!("--kubeconfig={kubeconfig}"),
            "--manage-all-nodes=true".into(),
            "--node-ip=127.0.0.1".into(),
            format!("--node-port={kubelet}"),
            format!("--server-address=127.0.0.1:{kubelet}"),
            file("tls-cert-file", &self.certificates.server),
            file("tls-private-key-file", &self.certificates.server_key),
            // Renewed every quarter; the controller-manager misses a node after 20 s.
            "--node-lease-duration-seconds=20".into(),
            file("config", &path),
        ];
        self.run(KWOK, tools::tool(KWOK), arguments, &[]);
        self.apply(&json!({ "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": "node-1", "labels": { "kubernetes.io/hostname": "node-1" } } }))
            .await;

        self.namespace(FLUX).await;
        let storage = self.folder.join("artifacts");
        std::fs::create_dir_all(&storage).unwrap();
        let artifacts = self.claim();
        let arguments = vec![
            "--requeue-dependency=1s".into(),
            "--concurrent=8".into(),
            file("storage-path", &storage),
            format!("--storage-addr=127.0.0.1:{artifacts}"),
            format!("--storage-adv-addr=127.0.0.1:{artifacts}"),
        ];
        self.flux(SOURCE_CONTROLLER, tools::tool(SOURCE_CONTROLLER), arguments).await;
        let arguments = texts(&["--requeue-dependency=1s", "--concurrent=8"]);
        self.flux(KUSTOMIZE_CONTROLLER, tools::tool(KUSTOMIZE_CONTROLLER), arguments).await;
        let program = if options.stand_in { tools::tool(HELM_CONTROLLER) } else { helm_controller() };
        let mut arguments = texts(&["--requeue-dependency=2s", "--concurrent=64"]);
        arguments.extend(options.helm_controller.iter().cloned());
        self.flux(HELM_CONTROLLER, program, arguments).await;
    }

    /// One of Flux's controllers, with what they have in common.
    async fn flux(&mut self, name: &'static str, program: PathBuf, mut arguments: Vec<String>) {
        let kubeconfig = self.gated(name).await;
        arguments.extend(texts(&["--enable-leader-election=false", "--events-addr=", "--log-level=info"]));
        arguments.push(format!("--metrics-addr=127.0.0.1:{}", self.claim()));
        arguments.push(format!("--health-addr=127.0.0.1:{}", self.claim()));
        let mut environment = vec![("KUBECONFIG", kubeconfig.as_str()), ("RUNTIME_NAMESPACE", FLUX)];
        if name == SOURCE_CONTROLLER {
            // It may serve artifacts on loopback. The others would take the value for its host.
            environment.push(("SOURCE_CONTROLLER_LOCALHOST", "1"));
        }
        self.run(name, program, arguments, &environment);
    }

    /// Waits until the API server is ready.
    async fn answers(&self) {
        let program = &self.programs[API_SERVER];
        let limit = tokio::time::Instant::now() + START_LIMIT;
        loop {
            let request = http::Request::get("/readyz").body(Vec::new()).unwrap();
            if self.client.request_text(request).await.is_ok() {
                return;
            }
            let dead = program.id().await.is_none();
            if dead || tokio::time::Instant::now() > limit {
                panic!("{API_SERVER} {}:\n{}", if dead { "ended" } else { "does not answer" }, program.log_tail());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Installs Flux's kinds.
    async fn crds(&self) {
        let file = tools::folder().join("flux-crds.jsonl");
        let text = tokio::fs::read_to_string(&file).await;
        let text = text.unwrap_or_else(|_| panic!("{} is missing; run tests/control-plane/build", file.display()));
        let documents: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        for document in &documents {
            self.apply(document).await;
        }
        for document in &documents {
            let name = document["metadata"]["name"].as_str().unwrap();
            self.until(
                &["apiextensions.k8s.io/v1", "CustomResourceDefinition", "", name],
                Duration::from_secs(30),
                |found| found.is_some_and(|found| condition(found, "Established", "True").is_some()),
            )
            .await;
        }
    }

    /// A client that may do everything.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// A kubeconfig that may do everything.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// A kubeconfig for the bearer of a token.
    #[must_use]
    pub fn kubeconfig_of(&self, name: &str, token: &str) -> PathBuf {
        write_kubeconfig(&self.folder, name, self.api.number(), token, &self.certificates)
    }

    /// Opens a proxy in front of the API server, for an agent whose calls a test disturbs.
    pub async fn proxy(&self) -> Proxy {
        Proxy::open(self.api.number(), &self.certificates.authority).await
    }

    /// The folder of this run.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder of its logs, which stays.
    #[must_use]
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// One of the programs.
    ///
    /// # Panics
    /// When this run does not have it.
    #[must_use]
    pub fn program(&self, name: &str) -> &Program {
        self.programs.get(name).unwrap_or_else(|| panic!("no {name} in this run"))
    }

    /// The way of one program to the API server.
    ///
    /// # Panics
    /// When this run does not have it.
    #[must_use]
    pub fn gate(&self, name: &str) -> &Gate {
        self.gates.get(name).unwrap_or_else(|| panic!("no {name} in this run"))
    }

    /// The process ids of everything that runs.
    pub async fn processes(&self) -> Vec<u32> {
        let mut found = Vec::new();
        for program in self.programs.values() {
            found.extend(program.id().await);
        }
        found
    }

    /// Ends everything. Dropping the value does the same without waiting for it.
    pub async fn stop(self) {
        // Nothing of it is needed any more, so nobody is asked to end in an orderly way.
        for program in self.programs.values().rev() {
            program.kill().await;
        }
    }

    /// The objects of one kind.
    #[must_use]
    pub fn api(&self, version: &str, kind: &str, namespace: &str) -> Api<DynamicObject> {
        let (group, version) = version.split_once('/').unwrap_or(("", version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        if namespace.is_empty() {
            Api::all_with(self.client(), &resource)
        } else {
            Api::namespaced_with(self.client(), namespace, &resource)
        }
    }

    /// Applies an object, as `kubectl apply --server-side --force-conflicts` does.
    ///
    /// # Panics
    /// When the API server refuses.
    pub async fn apply(&self, object: &Value) {
        let [_, kind, namespace, name] = place(object);
        self.try_apply(object).await.unwrap_or_else(|error| panic!("{kind} {namespace}/{name}: {error}"));
    }

    /// The same when it may be refused.
    ///
    /// # Errors
    /// When the API server refuses.
    pub async fn try_apply(&self, object: &Value) -> kube::Result<()> {
        let [version, kind, namespace, name] = place(object);
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        self.api(version, kind, namespace).patch(name, &parameters, &Patch::Apply(object)).await.map(drop)
    }

    /// Creates an object.
    ///
    /// # Panics
    /// When the API server refuses.
    pub async fn create(&self, object: &Value) {
        let [version, kind, namespace, name] = place(object);
        self.api(version, kind, namespace)
            .create(&PostParams::default(), &serde_json::from_value(object.clone()).unwrap())
            .await
            .unwrap_or_else(|error| panic!("{kind} {namespace}/{name}: {error}"));
    }

    /// Creates a namespace.
    pub async fn namespace(&self, name: &str) {
        self.create(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } })).await;
    }

    /// Deletes an object without waiting for it to go.
    ///
    /// # Panics
    /// When the API server refuses.
    pub async fn delete(&self, [version, kind, namespace, name]: &[&str; 4]) {
        self.api(version, kind, namespace)
            .delete(name, &Default::default())
            .await
            .unwrap_or_else(|error| panic!("{kind} {namespace}/{name}: {error}"));
    }

    /// An object as it is now, given as version, kind, namespace and name.
    pub async fn get(&self, [version, kind, namespace, name]: &[&str; 4]) -> Option<Value> {
        let found = self.api(version, kind, namespace).get_opt(name).await.ok()??;
        serde_json::to_value(found).ok()
    }

    /// Waits until an object is as wanted (`None`: it is not there), and gives it.
    ///
    /// # Panics
    /// On the time limit, with what was seen instead and where the logs are.
    pub async fn until(
        &self,
        object: &[&str; 4],
        limit: Duration,
        wanted: impl Fn(Option<&Value>) -> bool,
    ) -> Option<Value> {
        let [_, kind, namespace, name] = object;
        eventually(&format!("{kind} {namespace}/{name} (logs: {})", self.logs.display()), limit, async || {
            let found = self.get(object).await;
            if wanted(found.as_ref()) { Ok(found) } else { Err(found.map(brief)) }
        })
        .await
    }

    /// Runs kubectl with full rights; gives what it prints.
    ///
    /// # Panics
    /// When it fails.
    pub async fn kubectl(&self, arguments: &[&str]) -> String {
        let mut command = tokio::process::Command::new(tools::tool("kubectl"));
        command.arg("--kubeconfig").arg(&self.kubeconfig).args(arguments);
        String::from_utf8(tools::run(&mut command, b"").await).unwrap()
    }

    /// Runs kubectl with full rights, and gives what it says when it fails.
    ///
    /// # Panics
    /// When it succeeds.
    pub async fn kubectl_fails(&self, arguments: &[&str]) -> String {
        match self.try_kubectl(arguments).await {
            Ok(said) => panic!("kubectl {arguments:?}: {said}"),
            Err(said) => said,
        }
    }

    /// Runs kubectl with full rights.
    ///
    /// # Errors
    /// What it says when it fails.
    pub async fn try_kubectl(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = tokio::process::Command::new(tools::tool("kubectl"));
        let output = command.arg("--kubeconfig").arg(&self.kubeconfig).args(arguments).output().await.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }
}

/// What of an object helps to see why a wait failed.
fn brief(mut object: Value) -> Value {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields");
    }
    object
}

/// A condition of an object that has the given status.
#[must_use]
pub fn condition<'a>(object: &'a Value, kind: &str, status: &str) -> Option<&'a Value> {
    let conditions = object["status"]["conditions"].as_array()?;
    conditions.iter().find(|condition| condition["type"] == kind && condition["status"] == status)
}

/// Whether a Flux object is ready, for the generation that it has now.
#[must_use]
pub fn is_ready(object: Option<&Value>) -> bool {
    object.is_some_and(|object| {
        object["status"]["observedGeneration"] == object["metadata"]["generation"]
            && condition(object, "Ready", "True").is_some()
    })
}

fn place(object: &Value) -> [&str; 4] {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    [text("/apiVersion"), text("/kind"), text("/metadata/namespace"), text("/metadata/name")]
}

async fn client_of(kubeconfig: &Path) -> Client {
    let config = Kubeconfig::read_from(kubeconfig).unwrap();
    Client::try_from(Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap()).unwrap()
}

fn write_kubeconfig(folder: &Path, name: &str, port: u16, token: &str, certificates: &Certificates) -> PathBuf {
    let path = folder.join(format!("{name}.kubeconfig"));
    let content = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{ "name": "test", "cluster": { "server": format!("https://127.0.0.1:{port}"), "certificate-authority": certificates.authority } }],
        "users": [{ "name": "test", "user": { "token": token } }],
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
    });
    std::fs::write(&path, content.to_string()).unwrap();
    path
}

fn etcd_arguments(folder: &Path, client: u16, peer: u16) -> Vec<String> {
    let (client, peer) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
    vec![
        "--name=etcd".into(),
        format!("--data-dir={}", folder.join("etcd").display()),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=etcd={peer}"),
        "--unsafe-no-fsync".into(),
        "--log-level=warn".into(),
    ]
}

fn api_server_arguments(folder: &Path, certificates: &Certificates, etcd: u16, port: u16) -> Vec<String> {
    vec![
        format!("--etcd-servers=http://127.0.0.1:{etcd}"),
        "--bind-address=127.0.0.1".into(),
        format!("--secure-port={port}"),
        file("tls-cert-file", &certificates.server),
        file("tls-private-key-file", &certificates.server_key),
        file("client-ca-file", &certificates.authority),
        file("token-auth-file", &folder.join("tokens.csv")),
        "--authorization-mode=RBAC".into(),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        file("service-account-key-file", &certificates.accounts_public),
        file("service-account-signing-key-file", &certificates.accounts_key),
        "--service-cluster-ip-range=10.64.0.0/16".into(),
        "--endpoint-reconciler-type=none".into(),
        "--kubelet-preferred-address-types=InternalIP".into(),
        "--allow-privileged=true".into(),
        "--max-requests-inflight=2000".into(),
        "--max-mutating-requests-inflight=1000".into(),
        "--profiling=false".into(),
    ]
}

fn scheduler_configuration(kubeconfig: &str) -> String {
    let without = ["VolumeBinding", "VolumeZone", "VolumeRestrictions", "NodeVolumeLimits"];
    let without: Vec<Value> = without.iter().map(|name| json!({ "name": name })).collect();
    json!({
        "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
        "clientConnection": { "kubeconfig": kubeconfig, "qps": 500, "burst": 1000 },
        "leaderElection": { "leaderElect": false },
        "profiles": [{ "schedulerName": "default-scheduler", "plugins": { "multiPoint": { "disabled": without } } }],
    })
    .to_string()
}

fn texts(parts: &[&str]) -> Vec<String> {
    parts.iter().map(|part| (*part).to_owned()).collect()
}

/// `--flag=path`.
fn file(flag: &str, path: &Path) -> String {
    format!("--{flag}={}", path.display())
}

/// The stages, and logs and exec of containers: every container has the same log; a command that is
/// executed in one runs on this machine.
fn kwok_configuration(folder: &Path) -> String {
    let log = folder.join("container.log");
    let lines = ["started", "ready"].map(|line| format!("2026-01-01T00:00:00.000000000Z stdout F {line}\n"));
    std::fs::write(&log, lines.concat()).unwrap();
    let logs = json!({ "apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "ClusterLogs", "metadata": { "name": "all" },
        "spec": { "logs": [{ "logsFile": log }] } });
    let exec = json!({ "apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "ClusterExec", "metadata": { "name": "all" },
        "spec": { "execs": [{ "local": { "envs": [{ "name": "SIMULATED", "value": "1" }] } }] } });
    format!("{STAGES}---\n{logs}\n---\n{exec}\n")
}
