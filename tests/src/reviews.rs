//! A cluster whose repository is on a Gitea, with people who review.

use crate::eventually;
use crate::gitea::{ADMIN, Gitea};
use crate::people::Person;
use crate::server::{Api as _, Server};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use styrmin_client::Client;

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

/// Settings by which a server notices everything within a second or two.
pub fn quick(server: &mut Server) {
    server.set("STYRMIN_FORGE_POLL", Some("1"));
    server.set("STYRMIN_GIT_POLL", Some("1"));
}

fn ids(payload: &Value) -> (String, String) {
    let id = |value: &Value| value["id"].as_str().unwrap_or_else(|| panic!("nothing in review: {payload}")).to_owned();
    (id(&payload["task"]), id(&payload["proposal"]))
}
