//! Many agents that report, against the same agents with whole snapshots.

use super::{report, round};
use futures::stream::{self, StreamExt as _};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, PgPool, SqlitePool};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use styrmin_server::auth;
use styrmin_server::store::TokenKind;
use styrmin_tests::agent::Agent;
use styrmin_tests::postgres::Postgres;
use styrmin_tests::server::{Api as _, Server};

/// Deployments and pods of one agent, and how many of them differ in each of its reports.
const DEPLOYMENTS: usize = 100;
const PODS: usize = 300;
const DEPLOYMENTS_DIFFER: usize = DEPLOYMENTS / 100;
const PODS_DIFFER: usize = PODS / 100;
/// How often an agent reports.
const INTERVAL: Duration = Duration::from_secs(5);
/// How long is measured.
const MEASURED: Duration = Duration::from_secs(60);
/// How many agents report whole snapshots, one round each.
const NAIVE: usize = 100;

/// On SQLite and on PostgreSQL: `agents` report every 5 seconds what differs; CPU of the server in cores, the 99th
/// percentile of a report, bytes of one, also of one in which nothing differs. Then some of them report as the
/// naive agent would, everything every time: CPU and bytes of one report against each other. In the end the
/// database has the same of both.
pub(super) async fn reports(agents: usize) {
    let server = Server::new(None);
    let data = server.folder.path().join("data/styrmin.db");
    one("sqlite", agents, server, |_| Database::Sqlite(format!("sqlite:{}", data.display()))).await;
    let postgres = Postgres::start().await;
    let url = postgres.database().await;
    let server = Server::new(Some(url.clone()));
    one("postgresql", agents, server, |_| Database::Postgres(url)).await;
}

enum Database {
    Sqlite(String),
    Postgres(String),
}

/// An agent with its cluster.
struct One {
    agent: Agent,
    number: usize,
    rounds: usize,
}

fn id(kind: char, number: usize) -> String {
    format!("{kind}{number:011}")
}

fn deployment(cluster: usize, number: usize) -> String {
    id('d', cluster * DEPLOYMENTS + number)
}

/// Clusters with environments and deployments; writes them past the API, which would make repositories, too.
/// Gives the agents' tokens.
async fn fill(database: &Database, agents: usize) -> Vec<String> {
    let mut statements = Vec::new();
    let mut tokens = Vec::new();
    for cluster in 0..agents {
        let (text, hash) = auth::new_token(TokenKind::Agent);
        let (c, e) = (id('c', cluster), id('e', cluster));
        statements.push(format!(
            "INSERT INTO clusters (id, name, config, version, repository, branch, path, created_at) VALUES ('{c}', '{c}', '{{}}', 1, 'bench/{c}', 'main', '', 1)"
        ));
        statements.push(format!(
            "INSERT INTO tokens (id, hash, kind, name, email, cluster_id, created_at) VALUES ('{c}', '{hash}', 'agent', 'a', '', '{c}', 1)"
        ));
        statements.push(format!(
            "INSERT INTO environments (id, cluster_id, name, config, version, allocated, created_at) VALUES ('{e}', '{c}', 'e', '{{}}', 1, {DEPLOYMENTS}, 1)"
        ));
        let mut rows = String::new();
        for number in 0..DEPLOYMENTS {
            let d = deployment(cluster, number);
            let separator = if number == 0 { "" } else { "," };
            let _ = write!(
                rows,
                "{separator}('{d}', '{e}', '{d}', 0, 'web-application', 'x', '1', '{{}}', '{{}}', 'running', 'running', 1, 0, 1)"
            );
        }
        statements.push(format!(
            "INSERT INTO deployments (id, environment_id, name, shard, driver_name, driver_digest, application_version, config, parameters, lifecycle, state, version, last_sequence, created_at) VALUES {rows}"
        ));
        tokens.push(text);
    }
    match database {
        Database::Sqlite(url) => {
            let pool = SqlitePool::connect(url).await.unwrap();
            let mut tx = pool.begin().await.unwrap();
            for statement in statements {
                sqlx::query(AssertSqlSafe(statement)).execute(&mut *tx).await.unwrap();
            }
            tx.commit().await.unwrap();
        }
        Database::Postgres(url) => {
            let pool = PgPool::connect(url).await.unwrap();
            let mut tx = pool.begin().await.unwrap();
            for statement in statements {
                sqlx::query(AssertSqlSafe(statement)).execute(&mut *tx).await.unwrap();
            }
            tx.commit().await.unwrap();
            sqlx::query("ANALYZE").execute(&pool).await.unwrap();
        }
    }
    tokens
}

impl One {
    /// A pod as it is after so many rounds.
    fn pod(&self, number: usize, rounds: usize) -> Value {
        // How often it was one of those that differ.
        let changes = (rounds * PODS_DIFFER + PODS - 1 - number) / PODS;
        let deployment = deployment(self.number, number % DEPLOYMENTS);
        json!({
            "namespace": format!("styrmin-{deployment}"), "name": format!("web-6d4cf56db6-{number:05}"),
            "deploymentId": deployment, "component": "web", "phase": "Running", "ready": true, "restarts": changes,
            "node": "node-1", "containers": [{ "name": "web", "image": "nginx:1.27", "ready": true, "restarts": changes,
                "state": "running" }],
        })
    }

    fn deployment(&self, number: usize, rounds: usize) -> Value {
        let changes = (rounds * DEPLOYMENTS_DIFFER + DEPLOYMENTS - 1 - number) / DEPLOYMENTS;
        let (id, environment) = (deployment(self.number, number), id('e', self.number));
        json!({
            "deploymentId": id, "uid": id, "namespace": format!("styrmin-env-{environment}"),
            "name": format!("styrmin-{id}"), "instanceId": "01900000-0000-7000-8000-000000000000", "phase": "Ready",
            "displayState": "Running", "specDigest": "sha256:0", "observedGeneration": changes, "generation": changes,
            "deleting": false, "driftCorrections": 0, "steps": [],
            "conditions": [{ "type": "Ready", "status": "True", "reason": "Ready", "message": "It runs",
                "lastTransitionTime": "2026-01-01T00:00:00Z" }],
        })
    }

    fn flux(&self) -> Value {
        json!([{ "kind": "Kustomization", "namespace": "flux-system", "name": "styrmin", "ready": "True",
            "revision": "main@sha1:0", "suspended": false }])
    }

    fn all(&self, rounds: usize) -> (Value, Value) {
        let pods: Vec<Value> = (0..PODS).map(|number| self.pod(number, rounds)).collect();
        let deployments: Vec<Value> = (0..DEPLOYMENTS).map(|number| self.deployment(number, rounds)).collect();
        (pods.into(), deployments.into())
    }

    /// Everything, as the naive agent has it each time.
    async fn whole(&mut self, bytes: &AtomicU64) {
        let (pods, deployments) = self.all(self.rounds);
        let digest = |kind: &str| format!("{kind}{:031}", self.rounds);
        let (p, d, f) = (digest("p"), digest("d"), digest("f"));
        let flux = self.flux();
        for (kind, items, digest) in [("pods", pods, p), ("deployments", deployments, d), ("flux", flux, f)] {
            bytes.fetch_add(items.to_string().len() as u64, Ordering::Relaxed);
            self.agent.say(kind, items, Some(&digest), None).await.unwrap();
        }
    }

    /// What differs after one more round.
    async fn differs(&mut self, bytes: &AtomicU64) {
        let before = self.rounds;
        self.rounds += 1;
        let first = (before * PODS_DIFFER) % PODS;
        let pods: Vec<Value> = (first..first + PODS_DIFFER).map(|number| self.pod(number, self.rounds)).collect();
        let first = (before * DEPLOYMENTS_DIFFER) % DEPLOYMENTS;
        let deployments: Vec<Value> =
            (first..first + DEPLOYMENTS_DIFFER).map(|number| self.deployment(number, self.rounds)).collect();
        for (kind, letter, items) in [("pods", "p", json!(pods)), ("deployments", "d", json!(deployments))] {
            let delta = json!({ "base": format!("{letter}{before:031}"), "removed": [] });
            let digest = format!("{letter}{:031}", self.rounds);
            bytes.fetch_add((items.to_string().len() + delta.to_string().len()) as u64, Ordering::Relaxed);
            self.agent.say(kind, items, Some(&digest), Some(delta)).await.unwrap();
        }
    }
}

/// CPU time of a process so far.
fn cpu(process: i32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = text.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    // Linux counts in hundredths of a second for programs.
    Duration::from_millis(ticks * 10)
}

async fn one(name: &str, agents: usize, mut server: Server, database: impl FnOnce(&Server) -> Database) {
    server.up().await;
    let tokens = fill(&database(&server), agents).await;
    let all: Vec<One> = tokens
        .iter()
        .enumerate()
        .map(|(number, token)| One { agent: Agent::new(&server, token, "agent", 1), number, rounds: 0 })
        .collect();
    let (bytes, process) = (AtomicU64::new(0), server.process());
    let all: Vec<One> = stream::iter(all)
        .map(|mut one| async {
            one.whole(&bytes).await;
            one
        })
        .buffer_unordered(8)
        .collect()
        .await;

    let bytes = Arc::new(AtomicU64::new(0));
    let (start, before) = (Instant::now(), cpu(process));
    let running = all.into_iter().map(|mut one| {
        let bytes = Arc::clone(&bytes);
        tokio::spawn(async move {
            // Not all at the same moment.
            tokio::time::sleep(INTERVAL * u32::try_from(one.number).unwrap() / u32::try_from(agents).unwrap()).await;
            let mut interval = tokio::time::interval(INTERVAL);
            let mut times = Vec::new();
            while start.elapsed() < MEASURED {
                interval.tick().await;
                let begin = Instant::now();
                one.differs(&bytes).await;
                times.push(begin.elapsed());
            }
            (one, times)
        })
    });
    let (mut all, mut times) = (Vec::new(), Vec::new());
    for task in running.collect::<Vec<_>>() {
        let (one, its) = task.await.unwrap();
        all.push(one);
        times.extend(its);
    }
    let (elapsed, used) = (start.elapsed(), cpu(process).saturating_sub(before));
    let count = times.len();
    let of_ours = bytes.load(Ordering::Relaxed) / count as u64;
    times.sort_unstable();

    // Nothing differs: the word.
    let word = {
        let one = &mut all[0];
        let digests = ["p", "d", "f"].map(|letter| {
            let rounds = if letter == "f" { 0 } else { one.rounds };
            format!("{letter}{rounds:031}")
        });
        let [p, d, f] = &digests;
        one.agent.unchanged([p, d, f]).await.unwrap();
        one.agent.unchanged_bytes()
    };

    // The same content, told by others as a whole: nothing of it is new.
    let rows = server.metric("styrmin_report_rows_total").await;
    let naive_bytes = AtomicU64::new(0);
    let before = cpu(process);
    let naive = all.len().min(NAIVE);
    for one in all.iter_mut().take(naive) {
        one.whole(&naive_bytes).await;
    }
    let naive_used = cpu(process).saturating_sub(before);
    assert_eq!(server.metric("styrmin_report_rows_total").await, rows, "equal results");
    let query = "query($id: ID!) { podStatuses(clusterId: $id, first: 500) { nodes { name } } }";
    let pods = server.client().ok(query, json!({ "id": id('c', 0) })).await["podStatuses"]["nodes"].clone();
    assert_eq!(pods.as_array().unwrap().len(), PODS);

    let milliseconds = |time: Duration, count: usize| time.as_secs_f64() * 1000.0 / count as f64;
    let (ours, whole) = (milliseconds(used, count), milliseconds(naive_used, naive));
    report(
        "reports",
        json!({
            "database": name, "agents": agents, "reports": count,
            "reports_per_second": round(count as f64 / elapsed.as_secs_f64()),
            "cores": round(used.as_secs_f64() / elapsed.as_secs_f64()), "goal_cores": 1,
            "p50_ms": round(times[count / 2].as_secs_f64() * 1000.0),
            "p99_ms": round(times[count * 99 / 100].as_secs_f64() * 1000.0), "goal_p99_ms": 50,
            "bytes": of_ours, "bytes_unchanged": word, "goal_bytes_unchanged": 256,
            "naive_bytes": naive_bytes.load(Ordering::Relaxed) / naive as u64,
            "cpu_ms": round(ours), "naive_cpu_ms": round(whole), "ratio": round(ours / whole),
        }),
    );
}
