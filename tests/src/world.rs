//! Everything at once: a server with its hosted repository, a control plane with Flux that follows it,
//! and an agent under exactly the rights that it needs.

use crate::gitea::ADMIN;
use crate::plane::{FLUX, Gate, Options, Plane, Port, Program, Recipe};
use crate::reviews::{Reviewed, quick};
use crate::server::{Api as _, Server, copy, drivers, program};
use crate::{charts, eventually, git};
use age::secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
use styrmin_client::Client;
use styrmin_renderer::{objects, spec, yaml};

/// How long one change may take on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The whole of it; ends with the value.
pub struct World {
    /// The server.
    pub server: Server,
    /// The control plane.
    pub plane: Plane,
    /// The agent.
    pub agent: Program,
    /// Where the agent serves its metrics.
    pub metrics: Port,
    /// Id of the cluster.
    pub cluster: String,
    /// Id of an environment in it.
    pub environment: String,
    /// Token of the cluster's agent.
    pub token: String,
    /// Between the agent and the server.
    pub link: Gate,
}

/// The objects of a file with several YAML documents.
#[must_use]
pub fn documents(text: &str) -> Vec<Value> {
    let parts = text.split("---\n").filter(|part| !part.trim().is_empty());
    parts.map(|part| yaml::from_str(part).unwrap()).filter(|object: &Value| !object.is_null()).collect()
}

/// Installs our kind, and exactly the rights that the agent needs.
pub async fn install_agent(plane: &Plane) {
    plane.apply(&spec::crd()).await;
    plane.apply(&objects::system_namespace()).await;
    // Its pod would be another agent.
    for object in charts::agent(false).await.iter().filter(|object| object["kind"] != "Deployment") {
        plane.apply(object).await;
    }
}

/// A token of the agent's account.
pub async fn account(plane: &Plane) -> String {
    let arguments = ["-n", "styrmin-system", "create", "token", "styrmin-agent", "--duration=24h"];
    plane.kubectl(&arguments).await.trim().to_owned()
}

impl World {
    /// Starts everything, up to an environment that Flux has applied.
    pub async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    /// The same with more drivers: `prepare` gets the server's folder of them.
    pub async fn start_with(prepare: impl FnOnce(&Path)) -> Self {
        Self::start_as(prepare, json!({})).await
    }

    /// The same with more in the input of the cluster.
    pub async fn start_as(prepare: impl FnOnce(&Path), more: Value) -> Self {
        Self::begin(prepare, more, None).await
    }

    /// The same with the repository on a forge, and these rules of delivery.
    pub async fn start_reviewed(forge: &Reviewed, prepare: impl FnOnce(&Path), rules: Value) -> Self {
        Self::begin(prepare, json!({ "git": forge.git(), "delivery": rules }), Some(forge)).await
    }

    async fn begin(prepare: impl FnOnce(&Path), more: Value, forge: Option<&Reviewed>) -> Self {
        let mut server = Server::new(None);
        if forge.is_some() {
            quick(&mut server);
        }
        prepare(&server.folder.path().join("drivers"));
        let (plane, ()) = tokio::join!(Plane::start_with(Options::default()), server.up());
        let key = age::x25519::Identity::generate();
        let client = server.client();
        let mut input = json!({ "name": "c", "config": { "fqdn_suffix": "apps.example.com" }, "ageRecipient": key.to_public().to_string() });
        input.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
        let (cluster, token) = client.cluster(input).await;
        let environment = client.environment(&cluster, "e").await;
        server.drained(LIMIT).await;

        install_agent(&plane).await;
        let secret = |name: &str, data: Value| json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "namespace": FLUX, "name": name }, "stringData": data });
        let (user, password) = forge.map_or(("agent", token.as_str()), |forge| (ADMIN, forge.gitea.token()));
        plane.apply(&secret("styrmin-git", json!({ "username": user, "password": password }))).await;
        plane.apply(&secret("styrmin-age", json!({ "age.agekey": key.to_string().expose_secret() }))).await;
        let files = match forge {
            Some(forge) => forge.files("main").await,
            None => git::files(&server.hosted(&cluster)).await,
        };
        for object in documents(&files["flux/styrmin.yaml"]) {
            plane.apply(&object).await;
        }
        let account = account(&plane).await;
        let metrics = Port::claim();
        let link = Gate::open(server.port()).await;
        let mut recipe = recipe(&plane, &server, "agent", &account, &token);
        let through = format!("http://127.0.0.1:{}", link.number());
        recipe.environment.push(("STYRMIN_SERVER_ADDRESS".into(), through));
        recipe.environment.push(("STYRMIN_METRICS_LISTEN".into(), metrics.address()));
        let agent = Program::start(recipe, plane.logs());
        let world = Self { server, plane, agent, metrics, cluster, environment, token, link };
        let namespace = format!("styrmin-env-{}", world.environment);
        world.plane.until(&["v1", "Namespace", "", &namespace], LIMIT, |found| found.is_some()).await;
        world
    }

    /// A second agent with the same token.
    pub async fn second_agent(&self) -> Program {
        let account = account(&self.plane).await;
        Program::start(recipe(&self.plane, &self.server, "agent-2", &account, &self.token), self.plane.logs())
    }

    /// A client as the administrator.
    #[must_use]
    pub fn client(&self) -> Client {
        self.server.client()
    }

    /// The hosted repository.
    #[must_use]
    pub fn repository(&self) -> PathBuf {
        self.server.hosted(&self.cluster)
    }

    /// A deployment's StyrminDeployment, as version, kind, namespace and name.
    #[must_use]
    pub fn object(&self, deployment: &str) -> (String, String) {
        (format!("styrmin-env-{}", self.environment), format!("styrmin-{deployment}"))
    }

    /// What people see of a deployment: state, tasks with steps, pods.
    pub async fn deployment(&self, id: &str) -> Value {
        let query = "query($id: ID!) { deployment(id: $id) { id name state activeInstance { id } newestInstance { id } \
            status { phase displayState message instanceId deleting conditions { type status reason message } } \
            pods { nodes { name ready containers { name reason } } } \
            tasks { nodes { id state message steps { name state attempt message startedAt endedAt } } } } }";
        self.client().ok(query, json!({ "id": id })).await["deployment"].clone()
    }

    /// Waits until people see a deployment in this state.
    pub async fn until_state(&self, id: &str, state: &str) -> Value {
        let what = format!("deployment {id} is {state} (logs: {})", self.plane.logs().display());
        eventually(&what, LIMIT, async || {
            let found = self.deployment(id).await;
            if found["state"] == state { Ok(found) } else { Err(found) }
        })
        .await
    }

    /// Waits until a task has ended; gives it.
    pub async fn until_ended(&self, task: &str) -> Value {
        let query = "query($id: ID!) { task(id: $id) { id state message steps { name state attempt message startedAt endedAt } } }";
        let what = format!("task {task} ends (logs: {})", self.plane.logs().display());
        eventually(&what, LIMIT, async || {
            let found = self.client().ok(query, json!({ "id": task })).await["task"].clone();
            if found["state"] == "RUNNING" { Err(found) } else { Ok(found) }
        })
        .await
    }

    /// A clone of the repository, as a person has it.
    async fn clone(&self) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let repository = self.repository();
        git::git(folder.path(), &["clone", "--quiet", "-b", "main", repository.to_str().unwrap(), "work"]).await;
        let work = folder.path().join("work");
        (folder, work)
    }

    /// The commit that the branch has.
    pub async fn head(&self) -> String {
        git::git(&self.repository(), &["rev-parse", "main"]).await.trim().to_owned()
    }

    /// Reverts the last commit as a person would, and has Flux look.
    pub async fn revert(&self) {
        let (_folder, work) = self.clone().await;
        git::git(&work, &["revert", "--no-edit", "HEAD"]).await;
        git::git(&work, &["push", "--quiet", "origin", "HEAD:main"]).await;
        self.fetch().await;
    }

    /// Chooses what the server does about what people change in the repository.
    pub async fn rules(&self, policy: &str) {
        let query = "mutation($id: ID!, $policy: EditPolicy!) { updateCluster(id: $id, edits: { policy: $policy }) { cluster { id } } }";
        self.client().ok(query, json!({ "id": self.cluster, "policy": policy })).await;
    }

    /// Has Flux fetch the repository now.
    pub async fn fetch(&self) {
        let asked = format!("reconcile.fluxcd.io/requestedAt={}", rand::random::<u64>());
        self.plane.kubectl(&["-n", FLUX, "annotate", "--overwrite", "gitrepository", "styrmin", &asked]).await;
    }

    /// Updates a deployment by the input of the API; gives the task's id.
    pub async fn update(&self, deployment: &str, input: Value) -> String {
        let query = "mutation($id: ID!, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, input: $input) { task { id } } }";
        let data = self.client().ok(query, json!({ "id": deployment, "input": input })).await;
        data["updateDeployment"]["task"]["id"].as_str().unwrap_or_else(|| panic!("no task: {data}")).to_owned()
    }
}

/// Actions of a driver on most occasions; its job fails.
pub const ACTING: &str = "  actions:
  - {name: prepare, hook: setup, mode: pre, steps: [{wait: {seconds: 1}}]}
  - {name: migrate, hook: upgrade, mode: pre, steps: [{stop_components: [web]}, {wait: {seconds: 1}}, {start_components: [web]}]}
  - {name: announce, hook: upgrade, mode: post, steps: [{wait: {seconds: 1}}]}
  - {name: check, hook: job, mode: core, steps: [{execute: {component: web, command: [sh, -c, 'exit 3']}}]}
";

/// Another driver with everything that `original` has; gives its folder.
pub fn driver_like(folder: &Path, original: &str, name: &str) -> PathBuf {
    let target = folder.join(name);
    copy(&drivers().join(original), &target);
    let file = target.join("driver.styrmin.yml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(file, text.replacen(&format!("name: {original}"), &format!("name: {name}"), 1)).unwrap();
    target
}

/// A driver of its own for a test, made from the web application: its name, its service's, and what follows
/// in its file.
pub fn driver(folder: &Path, name: &str, service: &str, container: &str, actions: &str) {
    let target = driver_like(folder, "web-application", name);
    let file = target.join("driver.styrmin.yml");
    let text = std::fs::read_to_string(&file).unwrap();
    let text = text.replacen("{name: web,", &format!("{{name: {service},"), 1).replacen(
        "containers: [web]",
        &format!("containers: [{container}]"),
        1,
    );
    let text = text.replacen("container: web,", &format!("container: {container},"), 1);
    std::fs::write(file, format!("{text}\n{actions}")).unwrap();
    let values = target.join("values.styrmin.yml");
    let text = std::fs::read_to_string(&values).unwrap();
    std::fs::write(values, text.replace("services.web.", &format!("services.{service}."))).unwrap();
}

fn recipe(plane: &Plane, server: &Server, name: &str, account: &str, token: &str) -> Recipe {
    agent(
        name,
        plane.folder(),
        &plane.kubeconfig_of(name, account),
        &[
            ("STYRMIN_SERVER_ADDRESS", &server.address()),
            ("STYRMIN_AGENT_TOKEN", token),
            ("STYRMIN_REPORT_INTERVAL", "1"),
            ("STYRMIN_OPERATOR_HELM_RELEASE_TIMEOUT", "30"),
            ("STYRMIN_OPERATOR_DEPLOYMENT_READY_TIMEOUT", "20"),
            ("STYRMIN_OPERATOR_RETRY_DELAY", "1"),
            ("STYRMIN_OPERATOR_TIMER", "5"),
            ("STYRMIN_LEASE_DURATION", "5"),
            ("STYRMIN_LOG", "info"),
        ],
    )
}

/// How an agent is started that reaches the cluster by a kubeconfig.
#[must_use]
pub fn agent(name: &str, folder: &Path, kubeconfig: &Path, settings: &[(&str, &str)]) -> Recipe {
    let kubeconfig = ("KUBECONFIG".to_owned(), kubeconfig.to_string_lossy().into_owned());
    let settings = settings.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    Recipe {
        name: name.to_owned(),
        program: program("styrmin-agent"),
        arguments: Vec::new(),
        environment: settings.chain([kubeconfig]).collect(),
        folder: folder.to_owned(),
    }
}
