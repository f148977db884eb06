//! A configuration for all deployments of an environment, against a script with one mutation for each of them.

use super::{BENCH_LIMIT, report, round};
use futures::StreamExt as _;
use futures::stream;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use styrmin_client::{Client, FanOutProgress};
use styrmin_tests::git;
use styrmin_tests::postgres::Postgres;
use styrmin_tests::server::{Api as _, Server};

/// Calls of a script at a time.
const PARALLEL: usize = 16;

/// On SQLite and on PostgreSQL: `count` deployments; the time until everything is in the repository, what it costs
/// when nothing is to do, and how long the change of somebody else takes meanwhile.
pub(super) async fn fan_out(count: usize) {
    one("sqlite", count, Server::new(None)).await;
    let postgres = Postgres::start().await;
    one("postgresql", count, Server::new(Some(postgres.database().await))).await;
}

async fn one(database: &str, count: usize, mut server: Server) {
    server.up().await;
    let client = server.client();
    let (cluster, _) = client.cluster(json!({ "name": "c" })).await;
    let environment = client.environment(&cluster, "e").await;
    let (far, _) = client.cluster(json!({ "name": "far" })).await;
    let elsewhere = client.environment(&far, "e").await;
    let (other, _) = client.web(&elsewhere, "other").await;
    let numbers = stream::iter(0..count);
    let all: Vec<String> = numbers
        .map(|number| {
            let (client, environment) = (&client, &environment);
            async move { client.web(environment, &format!("d{number}")).await.0 }
        })
        .buffer_unordered(PARALLEL)
        .collect()
        .await;
    server.drained(BENCH_LIMIT).await;
    let repository = server.hosted(&cluster);
    let commits = git::commits(&repository).await;

    let alone = slowest(&client, &other, "alone", tokio::time::sleep(Duration::from_secs(3))).await;
    let start = Instant::now();
    let whole = async {
        let ended = set(&client, &environment, "A").await;
        // Others' changes go on, so the outbox is never empty.
        styrmin_tests::eventually("it is in the repository", BENCH_LIMIT, async || {
            let found = git::commits(&repository).await;
            if found > commits { Ok(()) } else { Err(found) }
        })
        .await;
        (ended, start.elapsed())
    };
    let ((ended, ours), meanwhile) = slowest_with(&client, &other, "meanwhile", whole).await;
    assert_eq!((ended.changed, ended.refused.len()), (count as u64, 0));
    assert_eq!(git::commits(&repository).await, commits + 1, "one commit");
    let start = Instant::now();
    let ended = set(&client, &environment, "A").await;
    let nothing = start.elapsed();
    assert_eq!((ended.changed, ended.unchanged), (0, count as u64));

    let start = Instant::now();
    let calls = stream::iter(&all).map(|id| client.set_variable(id, "B", "b")).buffer_unordered(PARALLEL);
    calls.for_each(async |done| drop(done.unwrap())).await;
    server.drained(BENCH_LIMIT).await;
    let script = start.elapsed();
    // Equal results: both variables are in every file, and nothing else differs between them.
    let files = git::files(&repository).await;
    let of = |word: &str| {
        let deployments = files.iter().filter(|(path, _)| path.ends_with("styrmindeployment.yaml"));
        deployments.filter(|(_, text)| text.contains(word)).count()
    };
    assert_eq!((of("A: b"), of("B: b")), (count, count), "equal results");
    report(
        "fanout",
        json!({
            "database": database, "deployments": count, "commits": 1,
            "ours_seconds": round(ours.as_secs_f64()), "script_seconds": round(script.as_secs_f64()),
            "ratio": round(ours.as_secs_f64() / script.as_secs_f64()),
            "nothing_to_do_ms": round(nothing.as_secs_f64() * 1000.0),
            "slowest_other_change_ms": round(meanwhile.as_secs_f64() * 1000.0),
            "slowest_other_change_alone_ms": round(alone.as_secs_f64() * 1000.0),
        }),
    );
}

/// Sets a variable of the environment and waits until every deployment was looked at.
async fn set(client: &Client, environment: &str, name: &str) -> FanOutProgress {
    let query =
        "mutation($id: ID!, $config: ConfigPatch!) { updateEnvironment(id: $id, config: $config) { fanOut { id } } }";
    let config: Value = json!({ "set": { "env_vars": { name: "b" } } });
    let found = client.ok(query, json!({ "id": environment, "config": config })).await;
    let id = found["updateEnvironment"]["fanOut"]["id"].as_str().unwrap().to_owned();
    let end = Instant::now() + BENCH_LIMIT;
    loop {
        let found = client.fan_out(&id).await.unwrap();
        if found.is_finished {
            return found;
        }
        assert!(Instant::now() < end, "{found:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The slowest of the changes of one deployment, one after the other, until `work` is done.
async fn slowest_with<T>(client: &Client, id: &str, name: &str, work: impl Future<Output = T>) -> (T, Duration) {
    let mut work = std::pin::pin!(work);
    let (mut slowest, mut number) = (Duration::ZERO, 0);
    loop {
        let start = Instant::now();
        let value = number.to_string();
        let mut change = std::pin::pin!(client.set_variable(id, name, &value));
        tokio::select! {
            done = &mut work => return (done, slowest.max(start.elapsed())),
            changed = &mut change => drop(changed.unwrap()),
        }
        slowest = slowest.max(start.elapsed());
        number += 1;
        tokio::select! {
            done = &mut work => return (done, slowest),
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
        }
    }
}

async fn slowest(client: &Client, id: &str, name: &str, work: impl Future<Output = ()>) -> Duration {
    slowest_with(client, id, name, work).await.1
}
