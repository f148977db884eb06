//! Repositories that are down, refuse, hang, are full or locked: changes are accepted, tasks say
//! why they wait, everything drains afterwards, and no other cluster waits.

use serde_json::json;
use std::path::Path;
use std::time::Duration;
use styrmin_client::Client;
use styrmin_tests::remote::{HANG, LOSE_ANSWER, Remote};
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::{eventually, git};

const PASSWORD: &str = "open-sesame-4711";

/// A server with one cluster behind a remote that can misbehave, and one that is well.
struct Scene {
    server: Server,
    client: Client,
    remote: Remote,
    /// A deployment behind the remote.
    bad: String,
    /// A deployment of the other cluster.
    good: String,
}

impl Scene {
    async fn start() -> Self {
        let server = Server::start().await;
        let repository = git::bare(server.folder.path()).await;
        Self::on(server, &repository).await
    }

    async fn on(mut server: Server, repository: &Path) -> Self {
        server.set("STYRMIN_GIT_TIMEOUT", Some("2"));
        server.kill().await;
        server.up().await;
        let client = server.client();
        let remote = Remote::start(repository, PASSWORD).await;
        let git = json!({ "url": remote.url(), "username": "git", "password": PASSWORD });
        let (cluster, _) = client.cluster(json!({ "name": "bad", "git": git })).await;
        let bad = client.environment(&cluster, "e").await;
        let (cluster, _) = client.cluster(json!({ "name": "good" })).await;
        let good = client.environment(&cluster, "e").await;
        let (bad, _) = client.web(&bad, "shop").await;
        let (good, _) = client.web(&good, "shop").await;
        server.drained(Duration::from_secs(30)).await;
        Self { server, client, remote, bad, good }
    }

    /// Changes both while the fault is there; gives the task that waits. The good one must not.
    async fn change(&self, name: &str) -> String {
        let task = self.client.set_variable(&self.bad, name, "1").await.unwrap().unwrap();
        let other = self.client.set_variable(&self.good, name, "1").await.unwrap().unwrap();
        let done = self
            .client
            .wait_for_task(&other, |task| task.pushed(), Duration::from_millis(50), Duration::from_secs(8))
            .await
            .unwrap();
        assert!(done.pushed(), "{name}: the good cluster waits: {done:?}");
        task
    }

    /// The task says why it waits.
    async fn says(&self, task: &str, expected: &str) {
        eventually(expected, Duration::from_secs(20), async || {
            let seen = self.client.task(task).await.unwrap();
            let (_, state, message) = &seen.steps[0];
            let message = message.clone().unwrap_or_default();
            assert!(!message.contains(PASSWORD));
            let good =
                state == "RUNNING" && message.starts_with("Waiting for the repository: ") && message.contains(expected);
            if good { Ok(()) } else { Err(seen) }
        })
        .await;
    }

    /// The fault is over: everything arrives, once.
    async fn drains(&self, name: &str) {
        self.server.drained(Duration::from_secs(30)).await;
        let files = git::files(&self.remote.repository).await;
        let (_, text) =
            files.iter().find(|(path, _)| path.ends_with(&format!("{}/styrmindeployment.yaml", self.bad))).unwrap();
        assert!(text.contains(&format!("{name}: ")), "{name} is missing in {text}");
        let mut instances: Vec<String> =
            git::named(&self.remote.repository).await.into_iter().map(|named| named.instance).collect();
        let all = instances.len();
        instances.sort();
        instances.dedup();
        assert_eq!(instances.len(), all, "{name}: an instance is named twice");
        assert!(!self.server.log().contains(PASSWORD));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_remote_that_answers_badly_or_hangs_delays_only_its_own_cluster() {
    let scene = Scene::start().await;
    let cases = [(401, "Authentication failed"), (403, "403"), (500, "500"), (HANG, "did not answer within 2 s")];
    for (behaviour, message) in cases {
        let name = format!("B{behaviour}");
        scene.remote.behave(behaviour);
        let task = scene.change(&name).await;
        scene.says(&task, message).await;
        scene.remote.behave(200);
        scene.drains(&name).await;
    }
    // The push is taken, but nobody hears of it.
    scene.remote.behave(LOSE_ANSWER);
    let task = scene.client.set_variable(&scene.bad, "LOST", "1").await.unwrap().unwrap();
    let done = scene
        .client
        .wait_for_task(&task, |task| task.pushed(), Duration::from_millis(50), Duration::from_secs(10))
        .await
        .unwrap();
    assert!(done.pushed(), "a lost answer is no lost push: {done:?}");
    scene.remote.behave(200);
    scene.drains("LOST").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_remote_that_is_down_for_a_minute_gets_everything_afterwards() {
    let scene = Scene::start().await;
    let before = git::commits(&scene.remote.repository).await;
    scene.remote.down().await;
    let task = scene.change("FIRST").await;
    scene.says(&task, "Failed to connect").await;
    for second in 0..60 {
        scene.client.set_variable(&scene.bad, "LAST", &second.to_string()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    scene.remote.up().await;
    scene.drains("LAST").await;
    assert_eq!(git::commits(&scene.remote.repository).await, before + 1, "what waited together goes together");
    let first = scene.client.task(&task).await.unwrap();
    assert_eq!(first.state, "SUPERSEDED");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hook_that_refuses_is_quoted_and_a_stale_lock_is_survived() {
    let scene = Scene::start().await;
    git::hook(&scene.remote.repository, "pre-receive", "echo 'closed for the audit' >&2; exit 1");
    let task = scene.change("HOOK").await;
    scene.says(&task, "closed for the audit").await;
    std::fs::remove_file(scene.remote.repository.join("hooks/pre-receive")).unwrap();
    scene.drains("HOOK").await;

    let lock = scene.remote.repository.join("refs/heads/main.lock");
    std::fs::write(&lock, "").unwrap();
    let task = scene.change("LOCK").await;
    scene.says(&task, "lock").await;
    std::fs::remove_file(&lock).unwrap();
    scene.drains("LOCK").await;

    // Locks that a killed process left in our own copy.
    let mut scene = scene;
    scene.server.kill().await;
    for mirror in std::fs::read_dir(scene.server.folder.path().join("data/mirrors")).unwrap() {
        let mirror = mirror.unwrap().path();
        std::fs::create_dir_all(mirror.join("refs/styrmin")).unwrap();
        for lock in ["refs/styrmin/tip.lock", "packed-refs.lock", "HEAD.lock"] {
            std::fs::write(mirror.join(lock), "").unwrap();
        }
    }
    scene.server.up().await;
    scene.change("OWN").await;
    scene.drains("OWN").await;

    // A copy that is damaged is fetched anew.
    scene.server.kill().await;
    for mirror in std::fs::read_dir(scene.server.folder.path().join("data/mirrors")).unwrap() {
        std::fs::remove_file(mirror.unwrap().path().join("HEAD")).unwrap();
    }
    scene.server.up().await;
    scene.change("DAMAGED").await;
    scene.drains("DAMAGED").await;
}

/// A deployment that comes and goes while nothing can be pushed stays away, also when the commit of
/// what waits beside it fails first.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_deleted_before_its_first_commit_never_comes_back() {
    let scene = Scene::start().await;
    let query = "query($id: ID!) { deployment(id: $id) { environment { id } } }";
    let data = scene.client.ok(query, json!({ "id": scene.bad })).await;
    let environment = data["deployment"]["environment"]["id"].as_str().unwrap().to_owned();
    scene.remote.behave(500);
    let task = scene.change("BESIDE").await;
    scene.says(&task, "500").await;
    // Now the writer waits: both reach it in one round.
    let (gone, created) = scene.client.web(&environment, "gone").await;
    let removed = scene.client.delete(&gone).await.unwrap().unwrap();
    git::hook(&scene.remote.repository, "pre-receive", "echo 'not now' >&2; exit 1");
    scene.remote.behave(200);
    scene.says(&task, "not now").await;
    std::fs::remove_file(scene.remote.repository.join("hooks/pre-receive")).unwrap();
    scene.drains("BESIDE").await;
    let files = git::files(&scene.remote.repository).await;
    assert!(!files.keys().any(|path| path.contains(&gone)), "{gone} came back");
    assert_eq!(scene.client.task(&created).await.unwrap().state, "SUPERSEDED");
    assert_eq!(scene.client.task(&removed).await.unwrap().steps[0].1, "SUCCEEDED");
}

/// A small file system of its own; unmounted with the value.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    async fn mount(path: std::path::PathBuf) -> Self {
        std::fs::create_dir_all(&path).unwrap();
        let mut command = tokio::process::Command::new("mount");
        command.args(["-t", "tmpfs", "-o", "size=3m", "tmpfs"]).arg(&path);
        styrmin_tests::tools::run(&mut command, b"").await;
        Self(path)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        #[expect(clippy::disallowed_methods, reason = "a drop cannot wait for tokio")]
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_waited_for() {
    let server = Server::start().await;
    let disk = SmallDisk::mount(server.folder.path().join("small")).await;
    let repository = git::bare(&disk.0).await;
    let scene = Scene::on(server, &repository).await;
    let filler = disk.0.join("filler");
    let mut bytes = 4 << 20;
    while bytes > 0 {
        // As much as fits: then there is room for nothing.
        let mut content = std::fs::read(&filler).unwrap_or_default();
        content.resize(content.len() + bytes, 0);
        if std::fs::write(&filler, &content).is_err() {
            bytes /= 2;
        }
    }
    let task = scene.change("FULL").await;
    scene.says(&task, "failed").await;
    std::fs::remove_file(&filler).unwrap();
    scene.drains("FULL").await;
    drop(disk);
}
