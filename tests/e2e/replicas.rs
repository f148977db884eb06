//! Several servers on one PostgreSQL: all serve, one writes, another takes over, and what the one before does late
//! changes nothing.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;
use styrmin_tests::agent::Agent;
use styrmin_tests::postgres::Postgres;
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::{eventually, git};

const LIMIT: Duration = Duration::from_secs(60);

struct Replicas {
    one: Server,
    two: Server,
    repository: PathBuf,
    environment: String,
    token: String,
    _postgres: Postgres,
}

/// A server that shares database, keys and administrator with the others.
fn replica(url: &str, keys: &Path) -> Server {
    let mut server = Server::new(Some(url.to_owned()));
    server.set("STYRMIN_SECRET_KEY", Some("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="));
    server.set("STYRMIN_SIGNING_KEY", Some(keys.join("signing.key").to_str().unwrap()));
    server
}

impl Replicas {
    async fn start() -> Self {
        let postgres = Postgres::start().await;
        let url = postgres.database().await;
        let keys = tempfile::tempdir().unwrap().keep();
        let mut one = replica(&url, &keys);
        one.up().await;
        let repository = git::bare(one.folder.path()).await;
        let mut two = replica(&url, &keys);
        two.up().await;
        let client = one.client();
        let (cluster, token) = client.cluster(json!({ "name": "c", "git": { "url": repository } })).await;
        let environment = client.environment(&cluster, "e").await;
        one.drained(LIMIT).await;
        Self { one, two, repository, environment, token, _postgres: postgres }
    }

    /// Of the second server, with the administrator of both.
    fn second(&self) -> styrmin_client::Client {
        styrmin_client::Client::new(&self.two.address(), &self.one.token()).unwrap()
    }

    fn writes(server: &Server) -> usize {
        server.log().matches("this server writes to the repositories").count()
    }

    async fn drained(&self) {
        eventually("nothing waits", LIMIT, async || {
            let answer =
                styrmin_tests::http().get(format!("{}/metrics", self.two.address())).bearer_auth(self.one.token());
            let text = answer.send().await.unwrap().text().await.unwrap();
            let waiting = text.lines().find_map(|line| line.strip_prefix("styrmin_outbox_waiting ")).map(str::to_owned);
            if waiting.as_deref() == Some("0") { Ok(()) } else { Err((waiting, self.two.log())) }
        })
        .await;
    }

    /// Every instance is named once, and the newest of each deployment is in the repository.
    async fn history_is_clean(&self, deployments: &[String]) {
        let named = git::named(&self.repository).await;
        let instances: HashSet<&String> = named.iter().map(|one| &one.instance).collect();
        assert_eq!(instances.len(), named.len(), "an instance is named twice");
        let files = git::files(&self.repository).await;
        for id in deployments {
            let query = "query($id: ID!) { deployment(id: $id) { newestInstance { id document } } }";
            let found = self.second().ok(query, json!({ "id": id })).await["deployment"]["newestInstance"].clone();
            assert!(instances.iter().any(|named| **named == found["id"]), "{id} is not in the history");
            let end = format!("{id}/styrmindeployment.yaml");
            let text = files.iter().find(|(path, _)| path.ends_with(&end)).map(|(_, text)| text.as_str());
            assert_eq!(text, found["document"].as_str());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_writes_and_the_other_takes_over_in_the_middle_of_a_push() {
    let mut all = Replicas::start().await;
    assert_eq!((Replicas::writes(&all.one), Replicas::writes(&all.two)), (1, 0));
    let (second, environment) = (all.second(), all.environment.clone());
    // What the second accepts, the first writes at once; who asks the second hears of it at once.
    let agent = Agent::new(&all.two, &all.token, "agent-1", 1);
    let known = agent.client.ok("{ newestRevision }", json!({})).await["newestRevision"].clone();
    let asked = tokio::spawn({
        let client = agent.client.clone();
        async move { client.ok("query($a: String) { newestRevision(after: $a) }", json!({ "a": known })).await }
    });
    let (front, _) = second.web(&environment, "front").await;
    tokio::time::timeout(Duration::from_secs(5), asked).await.expect("word of the push").unwrap();
    all.drained().await;
    // Killed while the repository takes its push, which goes on without it.
    let mark = all.repository.join("took");
    git::hook(&all.repository, "pre-receive", &format!("touch {}; sleep 2", mark.display()));
    second.set_variable(&front, "A", "1").await.unwrap();
    eventually("a push is under way", LIMIT, async || mark.exists().then_some(()).ok_or("not yet")).await;
    all.one.kill().await;
    std::fs::remove_file(all.repository.join("hooks/pre-receive")).unwrap();
    let (back, _) = second.web(&environment, "back").await;
    second.set_variable(&front, "A", "2").await.unwrap();
    all.drained().await;
    assert_eq!(Replicas::writes(&all.two), 1);
    all.history_is_clean(&[front, back]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_stood_still_writes_nothing_any_more() {
    let all = Replicas::start().await;
    let (second, environment) = (all.second(), all.environment.clone());
    let (front, _) = second.web(&environment, "front").await;
    all.drained().await;
    let process = Pid::from_raw(all.one.process()).unwrap();
    // It stops with a commit in its hands, another goes on, and it wakes up.
    let mark = all.repository.join("took");
    git::hook(&all.repository, "pre-receive", &format!("touch {}; sleep 1", mark.display()));
    second.set_variable(&front, "A", "1").await.unwrap();
    eventually("a push is under way", LIMIT, async || mark.exists().then_some(()).ok_or("not yet")).await;
    kill_process(process, Signal::STOP).unwrap();
    second.set_variable(&front, "A", "2").await.unwrap();
    let (back, _) = second.web(&environment, "back").await;
    all.drained().await;
    assert_eq!(Replicas::writes(&all.two), 1);
    kill_process(process, Signal::CONT).unwrap();
    second.set_variable(&front, "A", "3").await.unwrap();
    eventually("it says that it does not write any more", LIMIT, async || {
        let log = all.one.log();
        if log.contains("another server writes to the repositories now") { Ok(()) } else { Err(log) }
    })
    .await;
    all.drained().await;
    all.history_is_clean(&[front, back]).await;
    assert_eq!((Replicas::writes(&all.one), Replicas::writes(&all.two)), (1, 1));
}
