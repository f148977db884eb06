//! A Styrmin server of its own for one test: the real program, killed and started at will.

use crate::plane::Port;
use crate::{child, eventually, http};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use styrmin_client::{Client, ClientError};
use tempfile::TempDir;
use tokio::process::Child;

/// A server and its folder.
pub struct Server {
    /// Everything of this server lies below it.
    pub folder: TempDir,
    port: Port,
    database: Option<String>,
    environment: BTreeMap<String, String>,
    child: Option<Child>,
}

/// The program `name` of this build.
///
/// # Panics
/// When it was not built: `cargo build --workspace` does that.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    let mut folder = std::env::current_exe().unwrap();
    folder.pop();
    if folder.ends_with("deps") {
        folder.pop();
    }
    let path = folder.join(name);
    assert!(path.is_file(), "{} is missing; run cargo build --workspace first", path.display());
    path
}

/// The drivers of this source tree.
#[must_use]
pub fn drivers() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../drivers")
}

/// Every file below a folder, by its path in it.
#[must_use]
pub fn text_files(folder: &Path) -> BTreeMap<String, String> {
    fn read(folder: &Path, base: &Path, files: &mut BTreeMap<String, String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                read(&path, base, files);
            } else {
                let name = path.strip_prefix(base).unwrap().to_string_lossy().into_owned();
                files.insert(name, std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    let mut files = BTreeMap::new();
    read(folder, folder, &mut files);
    files
}

/// Runs the command line; gives whether it succeeded, and what it printed and said.
pub async fn ctl(server: &Server, arguments: &[&str]) -> (bool, String, String) {
    let mut command = tokio::process::Command::new(program("styrminctl"));
    command.env("STYRMIN_SERVER_ADDRESS", server.address()).env("STYRMIN_TOKEN", server.token());
    let output = command.args(arguments).kill_on_drop(true).output().await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

/// Copies a folder with everything in it.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

impl Server {
    /// A server that is not running yet, with SQLite unless `database` says otherwise.
    #[must_use]
    pub fn new(database: Option<String>) -> Self {
        let folder = tempfile::Builder::new().prefix("styrmin-test-").tempdir().unwrap();
        copy(&drivers(), &folder.path().join("drivers"));
        let environment = [("STYRMIN_GIT_TIMEOUT", "10"), ("STYRMIN_GIT_RETRY_MAX", "1"), ("STYRMIN_LOG", "info")];
        let environment = environment.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        Self { folder, port: Port::claim(), database, environment, child: None }
    }

    /// A running server on SQLite.
    pub async fn start() -> Self {
        let mut server = Self::new(None);
        server.up().await;
        server
    }

    /// Sets an environment variable for the next start; `None` removes it.
    pub fn set(&mut self, name: &str, value: Option<&str>) {
        match value {
            Some(value) => self.environment.insert(name.to_owned(), value.to_owned()),
            None => self.environment.remove(name),
        };
    }

    /// Starts the program without waiting for it.
    pub fn launch(&mut self) {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.log_file()).unwrap();
        let mut command = child(program("styrmin-server").to_str().unwrap());
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("RUST_BACKTRACE", "1")
            .env("STYRMIN_LISTEN", self.port.address())
            .env("STYRMIN_DATA", self.folder.path().join("data"))
            .env("STYRMIN_DRIVERS", self.folder.path().join("drivers"))
            .env("STYRMIN_ADMIN_NAME", "Ann Example")
            .env("STYRMIN_ADMIN_EMAIL", "ann@example.com")
            .envs(&self.environment);
        if let Some(url) = &self.database {
            command.env("STYRMIN_DATABASE_URL", url);
        }
        self.child = Some(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap());
    }

    /// Starts the program and waits until it is ready.
    pub async fn up(&mut self) {
        self.launch();
        let (http, end) = (http(), Instant::now() + Duration::from_secs(30));
        loop {
            let seen = match http.get(format!("{}/readyz", self.address())).send().await {
                Ok(answer) if answer.status() == 200 => return,
                Ok(answer) => answer.status().to_string(),
                Err(error) => error.to_string(),
            };
            assert!(Instant::now() < end && self.runs(), "the server is not ready: {seen}; log: {}", tail(&self.log()));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Ends the program at once.
    pub async fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill().await;
        }
    }

    /// Waits until the program has ended by itself.
    pub async fn ended(&mut self) -> std::process::ExitStatus {
        let mut child = self.child.take().unwrap();
        tokio::time::timeout(Duration::from_secs(40), child.wait()).await.expect("the server ends").unwrap()
    }

    /// Whether the program still runs.
    pub fn runs(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_none())
    }

    /// Id of the process.
    #[must_use]
    pub fn process(&self) -> i32 {
        self.child.as_ref().and_then(Child::id).unwrap().try_into().unwrap()
    }

    fn log_file(&self) -> PathBuf {
        self.folder.path().join("server.log")
    }

    /// What it logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// The port that it listens on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> String {
        format!("http://{}", self.port.address())
    }

    /// The first administrator's token.
    #[must_use]
    pub fn token(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("data/admin-token")).unwrap().trim().to_owned()
    }

    /// A client as the first administrator.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::new(&self.address(), &self.token()).unwrap()
    }

    /// The hosted repository of a cluster.
    #[must_use]
    pub fn hosted(&self, cluster: &str) -> PathBuf {
        self.folder.path().join(format!("data/git/{cluster}.git"))
    }

    /// A counter of its metrics.
    pub async fn metric(&self, name: &str) -> u64 {
        let answer = http().get(format!("{}/metrics", self.address())).bearer_auth(self.token());
        let text = answer.send().await.unwrap().text().await.unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("0");
        line.trim().parse().unwrap()
    }

    /// Waits until nothing waits for a repository any more.
    pub async fn drained(&self, limit: Duration) {
        let http = http();
        eventually("the outbox is empty", limit, async || {
            let answer = http.get(format!("{}/metrics", self.address())).bearer_auth(self.token()).send().await;
            let text = match answer {
                Ok(answer) => answer.text().await.unwrap_or_default(),
                Err(error) => error.to_string(),
            };
            let waiting = text.lines().find_map(|line| line.strip_prefix("styrmin_outbox_waiting "));
            if waiting == Some("0") { Ok(()) } else { Err((waiting.map(str::to_owned), tail(&self.log()))) }
        })
        .await;
    }
}

/// The last lines of a log.
fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}

/// What tests ask of the API, in their own words.
#[expect(async_fn_in_trait, reason = "used in this crate only")]
pub trait Api {
    /// Sends a query that must succeed.
    async fn ok(&self, query: &str, variables: Value) -> Value;
    /// Adds a cluster; gives its id and its agent's token.
    async fn cluster(&self, input: Value) -> (String, String);
    /// Adds an environment; gives its id.
    async fn environment(&self, cluster: &str, name: &str) -> String;
    /// Adds a deployment of the web application; gives its id and its task's.
    async fn web(&self, environment: &str, name: &str) -> (String, String);
    /// Adds a deployment.
    async fn create(&self, input: Value) -> Result<(String, String), ClientError>;
    /// Sets an environment variable of a deployment; gives the task's id when there is one.
    async fn set_variable(&self, deployment: &str, name: &str, value: &str) -> Result<Option<String>, ClientError>;
    /// Asks for a change by a mutation on `$id`, such as `startDeployment(id: $id)`; gives the task's id when
    /// there is one.
    async fn ask(&self, id: &str, mutation: &str) -> Result<Option<String>, ClientError>;
    /// Removes a deployment; gives the task's id.
    async fn delete(&self, deployment: &str) -> Result<Option<String>, ClientError>;
}

const PAYLOAD: &str = "{ deployment { id } task { id } }";

impl Api for Client {
    async fn ok(&self, query: &str, variables: Value) -> Value {
        self.execute(query, variables).await.unwrap_or_else(|error| panic!("{query}: {error}"))
    }

    async fn cluster(&self, input: Value) -> (String, String) {
        let query =
            "mutation($input: CreateClusterInput!) { createCluster(input: $input) { agentToken cluster { id } } }";
        let data = self.ok(query, json!({ "input": input })).await;
        let created = &data["createCluster"];
        (text(&created["cluster"]["id"]), text(&created["agentToken"]))
    }

    async fn environment(&self, cluster: &str, name: &str) -> String {
        let query =
            "mutation($cluster: ID!, $name: String!) { createEnvironment(cluster: $cluster, name: $name) { id } }";
        text(&self.ok(query, json!({ "cluster": cluster, "name": name })).await["createEnvironment"]["id"])
    }

    async fn web(&self, environment: &str, name: &str) -> (String, String) {
        let input = json!({ "environment": environment, "name": name, "driver": "web-application", "applicationVersion": "1.27", "parameters": { "image": "nginx" } });
        self.create(input).await.unwrap_or_else(|error| panic!("create {name}: {error}"))
    }

    async fn create(&self, input: Value) -> Result<(String, String), ClientError> {
        let query = format!("mutation($input: CreateDeploymentInput!) {{ createDeployment(input: $input) {PAYLOAD} }}");
        let data = self.execute(&query, json!({ "input": input })).await?;
        let created = &data["createDeployment"];
        Ok((text(&created["deployment"]["id"]), text(&created["task"]["id"])))
    }

    async fn set_variable(&self, deployment: &str, name: &str, value: &str) -> Result<Option<String>, ClientError> {
        let query = format!(
            "mutation($id: ID!, $input: UpdateDeploymentInput!) {{ updateDeployment(id: $id, input: $input) {PAYLOAD} }}"
        );
        let input = json!({ "config": { "set": { "env_vars": { name: value } } } });
        let data = self.execute(&query, json!({ "id": deployment, "input": input })).await?;
        Ok(data["updateDeployment"]["task"]["id"].as_str().map(str::to_owned))
    }

    async fn delete(&self, deployment: &str) -> Result<Option<String>, ClientError> {
        self.ask(deployment, "deleteDeployment(id: $id)").await
    }

    async fn ask(&self, id: &str, mutation: &str) -> Result<Option<String>, ClientError> {
        let query = format!("mutation($id: ID!) {{ changed: {mutation} {PAYLOAD} }}");
        let data = self.execute(&query, json!({ "id": id })).await?;
        Ok(data["changed"]["task"]["id"].as_str().map(str::to_owned))
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}")).to_owned()
}
