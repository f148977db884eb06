//! Every way into a repository, and other credentials without a restart.

use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use styrmin_client::Client;
use styrmin_tests::remote::Remote;
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::ways::{Proxy, Sshd, Tls, keygen};
use styrmin_tests::{eventually, git};

const LIMIT: Duration = Duration::from_secs(30);

struct Scene {
    server: Server,
    client: Client,
    repository: std::path::PathBuf,
}

impl Scene {
    async fn start() -> Self {
        let server = Server::start().await;
        let repository = git::bare(server.folder.path()).await;
        Self { client: server.client(), repository, server }
    }

    fn folder(&self) -> &Path {
        self.server.folder.path()
    }

    async fn cluster(&self, git: Value) -> String {
        self.client.cluster(json!({ "name": "c", "git": git })).await.0
    }

    async fn update(&self, cluster: &str, git: Value) -> Result<Value, styrmin_client::ClientError> {
        let query =
            "mutation($id: ID!, $git: GitAccessInput!) { updateCluster(id: $id, git: $git) { cluster { id } } }";
        self.client.execute(query, json!({ "id": cluster, "git": git })).await
    }

    /// Adds a deployment; gives its task.
    async fn deployment(&self, cluster: &str, name: &str) -> String {
        let environment = self.client.environment(cluster, name).await;
        self.client.web(&environment, name).await.1
    }

    /// Waits until a task says why it waits.
    async fn says(&self, task: &str, expected: &str) {
        let query = "query($id: ID!) { task(id: $id) { steps { message } } }";
        eventually(expected, LIMIT, async || {
            let step = self.client.ok(query, json!({ "id": task })).await["task"]["steps"][0].clone();
            if step["message"].as_str().is_some_and(|said| said.contains(expected)) { Ok(()) } else { Err(step) }
        })
        .await;
    }

    async fn arrived(&self) {
        self.server.drained(LIMIT).await;
        assert!(git::files(&self.repository).await.keys().any(|path| path.ends_with("/styrmindeployment.yaml")));
    }

    /// No credential shows anywhere, and none is left in a file.
    async fn tells_nothing(&self, secrets: &[&str]) {
        let metrics = styrmin_tests::http().get(format!("{}/metrics", self.server.address()));
        let metrics = metrics.bearer_auth(self.server.token()).send().await.unwrap().text().await.unwrap();
        let log = git::git(&self.repository, &["log", "-p", "main"]).await;
        let query = "{ clusters { nodes { id name gitUrl branch path config } } tasks(first: 100) { nodes { message steps { message } } } }";
        let api = self.client.ok(query, json!({})).await.to_string();
        for text in [self.server.log(), metrics, log, api] {
            for secret in secrets {
                assert!(!text.contains(secret));
            }
        }
        for entry in walkdir(&self.folder().join("data/mirrors")) {
            assert!(!entry.contains("access-"), "{entry}");
        }
    }
}

fn walkdir(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        found.push(entry.path().display().to_string());
        if entry.path().is_dir() {
            found.extend(walkdir(&entry.path()));
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn over_ssh_with_a_key_and_known_hosts() {
    let scene = Scene::start().await;
    let (old, old_public) = keygen(scene.folder(), "old").await;
    let (new, new_public) = keygen(scene.folder(), "new").await;
    let sshd = Sshd::start(scene.folder(), &old_public).await;
    let url = sshd.url(&scene.repository);
    // Without the hosts nobody is trusted.
    let refused = scene.client.execute(
        "mutation($input: CreateClusterInput!) { createCluster(input: $input) { agentToken } }",
        json!({ "input": { "name": "c", "git": { "url": url, "sshKey": old } } }),
    );
    assert!(refused.await.unwrap_err().to_string().contains("git.known_hosts: is missing"));
    let cluster = scene.cluster(json!({ "url": url, "sshKey": old, "knownHosts": sshd.known_hosts() })).await;
    scene.deployment(&cluster, "one").await;
    scene.arrived().await;
    // The key is replaced on both sides, one after the other.
    sshd.authorize(&new_public);
    let task = scene.deployment(&cluster, "two").await;
    scene.says(&task, "Permission denied").await;
    scene.update(&cluster, json!({ "sshKey": new })).await.unwrap();
    scene.server.drained(LIMIT).await;
    // A host with another key is not talked to.
    let (known, (_, other)) = (sshd.known_hosts(), keygen(scene.folder(), "other").await);
    let wrong = format!("{} {other}", known.split(' ').next().unwrap());
    scene.update(&cluster, json!({ "knownHosts": wrong })).await.unwrap();
    let task = scene.deployment(&cluster, "three").await;
    scene.says(&task, "Host key verification failed").await;
    scene.update(&cluster, json!({ "knownHosts": sshd.known_hosts() })).await.unwrap();
    scene.server.drained(LIMIT).await;
    let inner = |key: &str| key.lines().nth(2).unwrap().to_owned();
    scene.tells_nothing(&[&inner(&old), &inner(&new)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn over_https_with_an_authority_of_ones_own_a_proxy_and_a_new_token() {
    let scene = Scene::start().await;
    let remote = Remote::start(&scene.repository, "first-token").await;
    let tls = Tls::in_front_of(scene.folder(), remote.address()).await;
    let url = format!("https://localhost:{}/r.git", tls.port());
    let cluster = scene.cluster(json!({ "url": url, "username": "git", "password": "first-token" })).await;
    let task = scene.deployment(&cluster, "one").await;
    scene.says(&task, "certificate").await;
    let refused = scene.update(&cluster, json!({ "ca": "nonsense" })).await.unwrap_err().to_string();
    assert!(refused.contains("git.ca: holds no certificate"), "{refused}");
    scene.update(&cluster, json!({ "ca": tls.authority })).await.unwrap();
    scene.arrived().await;
    // Another token.
    let second = Remote::start(&scene.repository, "second-token").await;
    remote.down().await;
    let tls = Tls::in_front_of(&scene.folder().join("data"), second.address()).await;
    let proxy = Proxy::to(tls.port()).await;
    scene.update(&cluster, json!({ "ca": tls.authority, "proxy": proxy.url() })).await.unwrap();
    let task = scene.deployment(&cluster, "two").await;
    scene.says(&task, "are the Git credentials of the cluster right?").await;
    assert!(proxy.used() > 0, "the proxy is the only way");
    scene.update(&cluster, json!({ "password": "second-token" })).await.unwrap();
    scene.server.drained(LIMIT).await;
    scene.tells_nothing(&["first-token", "second-token"]).await;
    // A repository of this server has nothing to open.
    let (own, _) = scene.client.cluster(json!({ "name": "own" })).await;
    let refused = scene.update(&own, json!({ "password": "x" })).await.unwrap_err().to_string();
    assert!(refused.contains("this server's own"), "{refused}");
}
