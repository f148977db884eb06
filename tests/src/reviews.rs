//! A cluster whose repository is on a Gitea, with people who review.

use crate::eventually;
use crate::gitea::{ADMIN, Gitea};
use crate::people::Person;
use crate::plane::Port;
use crate::server::{Api as _, Server};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use styrmin_client::Client;
use tokio::task::JoinHandle;

/// How long something may take on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Name of the repository.
pub const REPOSITORY: &str = "cluster";

/// A forge with a repository, and the people there.
pub struct Reviewed {
    /// The forge.
    pub gitea: Gitea,
    /// URL of the repository.
    pub url: String,
    /// Token of Rita, who reviews.
    pub rita: String,
}

impl Reviewed {
    /// Starts it.
    pub async fn start() -> Self {
        let gitea = Gitea::start().await;
        let url = gitea.repository(REPOSITORY).await;
        let rita = gitea.person("rita", REPOSITORY).await;
        Self { gitea, url, rita }
    }

    /// What `createCluster` needs as `git`.
    #[must_use]
    pub fn git(&self) -> Value {
        let forge = json!({ "kind": "GITEA", "webhookSecret": SECRET });
        json!({ "url": self.url, "username": ADMIN, "password": self.gitea.token(), "forge": forge })
    }

    /// Asks the forge about the repository, as the administrator.
    pub async fn api(&self, method: &str, path: &str, body: &Value) -> Value {
        self.gitea.api(method, &format!("repos/{ADMIN}/{REPOSITORY}{path}"), body).await
    }

    /// The same as Rita.
    ///
    /// # Errors
    /// With what the forge says.
    pub async fn as_rita(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        self.gitea.api_as(&self.rita, method, &format!("repos/{ADMIN}/{REPOSITORY}{path}"), body).await
    }

    /// All pull requests, oldest first.
    pub async fn pulls(&self) -> Vec<Value> {
        let mut found = self.api("GET", "/pulls?state=all", &json!(null)).await.as_array().cloned().unwrap();
        found.sort_by_key(|pull| pull["number"].as_i64());
        found
    }

    /// Waits for a pull request that fulfils something.
    pub async fn pull(&self, what: &str, number: i64, good: impl Fn(&Value) -> bool) -> Value {
        eventually(what, LIMIT, async || {
            let found = self.api("GET", &format!("/pulls/{number}"), &json!(null)).await;
            if good(&found) { Ok(found) } else { Err(found) }
        })
        .await
    }

    /// Rita approves.
    pub async fn approve(&self, number: i64) {
        let body = json!({ "event": "APPROVED", "body": "good" });
        self.as_rita("POST", &format!("/pulls/{number}/reviews"), &body).await.unwrap();
    }

    /// Rita merges, as soon as the forge has looked at it.
    pub async fn merge(&self, number: i64, how: &str) {
        eventually("the forge merges", LIMIT, async || {
            self.as_rita("POST", &format!("/pulls/{number}/merge"), &json!({ "do": how })).await.map(drop)
        })
        .await;
    }

    /// Statuses of a commit, newest of each context: context → (state, description).
    pub async fn statuses(&self, commit: &str) -> BTreeMap<String, (String, String)> {
        let found = self.api("GET", &format!("/commits/{commit}/status"), &json!(null)).await;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let rows = found["statuses"].as_array().cloned().unwrap_or_default();
        rows.iter().map(|row| (text(&row["context"]), (text(&row["status"]), text(&row["description"])))).collect()
    }

    /// The files of a branch.
    pub async fn files(&self, branch: &str) -> BTreeMap<String, String> {
        let person = self.clone_of(branch).await;
        std::fs::remove_dir_all(person.work().join(".git")).unwrap();
        crate::server::text_files(person.work())
    }

    /// A clone with a branch checked out; Rita pushes what Pat commits.
    pub async fn clone_of(&self, branch: &str) -> Person {
        let url = self.url.replacen("http://", &format!("http://rita:{}@", self.rita), 1);
        let person = Person::of(&url).await;
        person.git(&["checkout", "--quiet", branch]).await;
        person
    }

    /// The commit of a branch.
    pub async fn tip(&self, branch: &str) -> String {
        let found = self.api("GET", &format!("/branches/{branch}"), &json!(null)).await;
        found["commit"]["id"].as_str().unwrap().to_owned()
    }
}

/// What the forge signs webhooks with.
pub const SECRET: &str = "0123456789abcdef0123";

/// Proposals as people see them: on the server, and on the forge.
pub struct Reviews {
    /// The forge.
    pub forge: Reviewed,
    /// A client as the administrator.
    pub client: Client,
}

/// A server with such a cluster, and an environment in it.
pub struct Scene {
    /// Its proposals.
    pub reviews: Reviews,
    /// The server.
    pub server: Server,
    /// The cluster.
    pub cluster: String,
    /// The environment.
    pub environment: String,
}

impl std::ops::Deref for Scene {
    type Target = Reviews;

    fn deref(&self) -> &Reviews {
        &self.reviews
    }
}

impl Scene {
    /// Starts all of it, with these rules of delivery.
    pub async fn start(rules: Value) -> Self {
        let forge = Reviewed::start().await;
        let git = forge.git();
        Self::of(forge, git, rules).await
    }

    /// The same with something else as the way to the repository.
    pub async fn of(forge: Reviewed, git: Value, rules: Value) -> Self {
        let mut server = Server::new(None);
        quick(&mut server);
        Self::on(forge, server, git, rules).await
    }

    /// The same on a server that was prepared.
    pub async fn on(forge: Reviewed, mut server: Server, git: Value, rules: Value) -> Self {
        server.up().await;
        let client = server.client();
        let (cluster, _) = client.cluster(json!({ "name": "c", "git": git, "delivery": rules })).await;
        let environment = client.environment(&cluster, "e").await;
        server.drained(LIMIT).await;
        Self { reviews: Reviews { forge, client }, server, cluster, environment }
    }

    /// Adds a deployment at once; gives it when its file is there.
    pub async fn direct(&self, name: &str) -> String {
        let input = json!({ "environment": self.environment, "name": name, "driver": "web-application", "applicationVersion": "1.27", "parameters": { "image": "nginx" } });
        let query = "mutation($input: CreateDeploymentInput!) { createDeployment(input: $input, delivery: DIRECT) { deployment { id } } }";
        let created = self.client.ok(query, json!({ "input": input })).await;
        self.server.drained(LIMIT).await;
        created["createDeployment"]["deployment"]["id"].as_str().unwrap().to_owned()
    }
}

impl Reviews {
    /// Sets a variable by the rules; gives task and proposal.
    pub async fn set(&self, deployment: &str, name: &str, value: &str) -> (String, String) {
        self.update(deployment, json!({ "config": { "set": { "env_vars": { name: value } } } })).await
    }

    /// Updates a deployment by the rules; gives task and proposal.
    pub async fn update(&self, deployment: &str, input: Value) -> (String, String) {
        let query = "mutation($id: ID!, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, input: $input) { task { id } proposal { id } } }";
        let data = self.client.ok(query, json!({ "id": deployment, "input": input })).await;
        ids(&data["updateDeployment"])
    }

    /// What people see of a proposal.
    pub async fn proposal(&self, id: &str) -> Value {
        let query = "query($id: ID!) { proposal(id: $id) { id state title message number url head headBranch description items { state deployment { id } task { id } } } }";
        self.client.ok(query, json!({ "id": id })).await["proposal"].clone()
    }

    /// Waits until a proposal fulfils something.
    pub async fn until(&self, what: &str, id: &str, good: impl Fn(&Value) -> bool) -> Value {
        eventually(what, LIMIT, async || {
            let found = self.proposal(id).await;
            if good(&found) { Ok(found) } else { Err(found) }
        })
        .await
    }

    /// Waits until its request is open; gives the number.
    pub async fn number(&self, id: &str) -> i64 {
        let said =
            |found: &Value| found["message"].as_str().is_some_and(|message| message.starts_with("In review: pull"));
        self.until("the request is open", id, said).await["number"].as_i64().unwrap()
    }

    /// Waits until a proposal is in this state.
    pub async fn until_state(&self, id: &str, state: &str) -> Value {
        self.until(&format!("proposal {id} is {state}"), id, |found| found["state"] == state).await
    }

    /// What people see of a task.
    pub async fn task(&self, id: &str) -> Value {
        let query = "query($id: ID!) { task(id: $id) { id state message sequence steps { name state message } } }";
        self.client.ok(query, json!({ "id": id })).await["task"].clone()
    }

    /// Waits until a task fulfils something.
    pub async fn until_task(&self, what: &str, id: &str, good: impl Fn(&Value) -> bool) -> Value {
        eventually(what, LIMIT, async || {
            let found = self.task(id).await;
            if good(&found) { Ok(found) } else { Err(found) }
        })
        .await
    }

    /// A deployment's configuration, state and newest instance.
    pub async fn deployment(&self, id: &str) -> Value {
        let query = "query($id: ID!) { deployment(id: $id) { id config state lifecycle newestInstance { id sequence } proposals(open: true) { nodes { id } } } }";
        self.client.ok(query, json!({ "id": id })).await["deployment"].clone()
    }

    /// The document of a deployment on a branch, as YAML.
    pub async fn document(&self, branch: &str, deployment: &str) -> Option<Value> {
        let files = self.forge.files(branch).await;
        let end = format!("/{deployment}/styrmindeployment.yaml");
        let text = files.iter().find(|(path, _)| path.ends_with(&end)).map(|(_, text)| text.clone())?;
        Some(styrmin_renderer::yaml::from_str(&text).unwrap())
    }
}

/// How a forge behaves for one call.
#[derive(Debug, Clone)]
pub enum Whim {
    /// It refuses, with a status, headers and a body.
    Refuse(u16, Vec<(&'static str, String)>, Value),
    /// It does what is asked, and the answer is lost.
    Lose,
}

/// A call to a forge: method and path.
pub type Call = (String, String);

struct Gate {
    target: String,
    whims: Mutex<Vec<(&'static str, &'static str, Whim)>>,
    calls: Mutex<Vec<(Call, Instant)>>,
}

/// Stands before a forge's API, with whims for its next calls.
pub struct ForgeGate {
    gate: Arc<Gate>,
    port: Port,
    serving: JoinHandle<()>,
}

impl Drop for ForgeGate {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl ForgeGate {
    /// Starts it.
    pub async fn before(forge: &Reviewed) -> Self {
        let port = Port::claim();
        let target = forge.gitea.url();
        let gate = Arc::new(Gate { target, whims: Mutex::default(), calls: Mutex::default() });
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", port.number())).await.unwrap();
        let app = axum::Router::new().fallback(pass).with_state(Arc::clone(&gate));
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { gate, port, serving }
    }

    /// Its address.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.port.address())
    }

    /// The next call of this method to a path that ends like this meets a whim.
    pub fn next(&self, method: &'static str, end: &'static str, whim: Whim) {
        self.gate.whims.lock().unwrap().push((method, end, whim));
    }

    /// All calls, and when.
    #[must_use]
    pub fn calls(&self) -> Vec<(Call, Instant)> {
        self.gate.calls.lock().unwrap().clone()
    }

    /// Whims that no call has met yet.
    #[must_use]
    pub fn left(&self) -> usize {
        self.gate.whims.lock().unwrap().len()
    }
}

async fn pass(State(gate): State<Arc<Gate>>, request: Request) -> Response {
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let query = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
    gate.calls.lock().unwrap().push(((method.to_string(), path.clone()), Instant::now()));
    let whim = {
        let mut whims = gate.whims.lock().unwrap();
        let index = whims.iter().position(|(wanted, end, _)| method == *wanted && path.ends_with(end));
        index.map(|index| whims.remove(index).2)
    };
    if let Some(Whim::Refuse(status, headers, body)) = &whim {
        let mut response = (StatusCode::from_u16(*status).unwrap(), body.to_string()).into_response();
        for (name, value) in headers {
            response.headers_mut().insert(*name, value.parse().unwrap());
        }
        return response;
    }
    let token = request.headers().get("authorization").cloned();
    let body = axum::body::to_bytes(request.into_body(), 8 << 20).await.unwrap();
    let mut onward = crate::http().request(method, format!("{}{query}", gate.target)).body(body);
    onward = onward.header("content-type", "application/json");
    if let Some(token) = token {
        onward = onward.header("authorization", token);
    }
    let answer = onward.send().await.unwrap();
    let status = answer.status();
    let body = answer.bytes().await.unwrap();
    if whim.is_some() {
        return (StatusCode::BAD_GATEWAY, "{}").into_response();
    }
    (status, body).into_response()
}

/// Settings by which a server notices everything within a second or two.
pub fn quick(server: &mut Server) {
    server.set("STYRMIN_FORGE_POLL", Some("1"));
    server.set("STYRMIN_GIT_POLL", Some("1"));
}

fn ids(payload: &Value) -> (String, String) {
    let id = |value: &Value| value["id"].as_str().unwrap_or_else(|| panic!("nothing in review: {payload}")).to_owned();
    (id(&payload["task"]), id(&payload["proposal"]))
}
