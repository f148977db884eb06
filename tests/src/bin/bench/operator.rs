//! The operator with many deployments in one control plane, without Flux: the bench itself says that
//! every HelmRelease is ready. What is measured stands at [`operator`].

use super::{BENCH_LIMIT, id, one_instance, report, round};
use axum::Router;
use axum::body::Body;
use futures::StreamExt as _;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use styrmin_renderer::driver::Driver;
use styrmin_renderer::{names, objects, yaml};
use styrmin_tests::plane::{Options, Plane, Port, Program};
use styrmin_tests::{eventually, http, server, world};

/// Deployments in one environment.
const PER_ENVIRONMENT: usize = 50;
/// Longer than the timer, so that every timer has run once.
const SETTLED: Duration = Duration::from_secs(75);
/// How long the calls of an idle agent are counted.
const IDLE: Duration = Duration::from_secs(60);

/// 1,000 and 10,000 StyrminDeployments: rollouts started per second from the agent's start on; its memory
/// once all are ready; what it asks of the API server in a minute in which nothing happens, the lease
/// aside; what it writes after a restart.
pub(crate) async fn operator(counts: &[usize]) {
    for count in counts {
        measure(*count).await;
    }
}

async fn measure(count: usize) {
    let plane = Plane::start_with(Options { controllers: false, ..Options::default() }).await;
    world::install_agent(&plane).await;
    let driver = Driver::from_files(server::text_files(&server::drivers().join("web-application"))).unwrap();
    plane.apply(&objects::driver_config_map(&driver)).await;
    let repository = objects::Repository {
        url: "http://127.0.0.1:9/prod.git".into(),
        branch: "main".into(),
        prefix: String::new(),
        secret: None,
    };
    plane.namespace("flux-system").await;
    for object in objects::flux_root(&repository) {
        plane.apply(&object).await;
    }
    let environments: Vec<names::EnvironmentId> =
        (0..count.div_ceil(PER_ENVIRONMENT)).map(|number| id(1_000_000 + number).parse().unwrap()).collect();
    for environment in &environments {
        plane.apply(&objects::environment_namespace(environment, "e")).await;
    }
    let texts: Vec<String> =
        (0..count).map(|number| one_instance(&driver, &environments[number / PER_ENVIRONMENT], number)).collect();
    futures::stream::iter(&texts)
        .for_each_concurrent(32, async |text| plane.apply(&yaml::from_str::<Value>(text).unwrap()).await)
        .await;
    let says_ready = tokio::spawn(ready(plane.client()));

    let server = listens().await;
    let metrics = Port::claim();
    let account = world::account(&plane).await;
    let recipe = world::agent(
        "agent",
        plane.folder(),
        &plane.kubeconfig_of("agent", &account),
        &[
            ("STYRMIN_SERVER_ADDRESS", &server),
            ("STYRMIN_AGENT_TOKEN", "none"),
            ("STYRMIN_METRICS_LISTEN", &metrics.address()),
            ("STYRMIN_LOG", "warn"),
        ],
    );
    let began = Instant::now();
    let agent = Program::start(recipe, plane.logs());
    let ready = async |wanted: usize| {
        eventually("every deployment is ready", BENCH_LIMIT * 3, async || {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let done = sum(&scrape(&metrics).await, "styrmin_agent_rollouts_total", &["outcome=\"ready\""]);
            if done >= wanted as f64 { Ok(()) } else { Err(done) }
        })
        .await;
    };
    ready(count).await;
    let took = began.elapsed().as_secs_f64();
    tokio::time::sleep(SETTLED).await;
    let before = calls(&scrape(&metrics).await);
    tokio::time::sleep(IDLE).await;
    let idle = since(&before, &calls(&scrape(&metrics).await));
    let memory = memory(agent.id().await.unwrap());

    agent.kill().await;
    agent.restart().await;
    eventually("every deployment was looked at", BENCH_LIMIT, async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let passes = sum(&scrape(&metrics).await, "styrmin_agent_passes_total", &[]);
        if passes >= count as f64 { Ok(()) } else { Err(passes) }
    })
    .await;
    tokio::time::sleep(SETTLED).await;
    let mut writes = calls(&scrape(&metrics).await);
    writes.retain(|call, _| ["create", "patch", "update", "delete"].iter().any(|verb| call.starts_with(verb)));
    says_ready.abort();
    report(
        "operator",
        json!({
            "deployments": count, "rollouts_per_second": round(count as f64 / took),
            "memory_mib": round(memory.0), "memory_peak_mib": round(memory.1), "memory_goal_mib": 64,
            "idle_calls_per_minute": idle, "idle_goal": 0, "writes_after_restart": writes, "writes_goal": 0,
        }),
    );
}

/// A server that takes every report and has nothing to say. Gives its address.
async fn listens() -> String {
    let answer = async |body: Body| {
        let mut body = body.into_data_stream();
        let mut first = Vec::new();
        while let Some(Ok(part)) = body.next().await {
            if first.is_empty() {
                first.extend_from_slice(&part[..part.len().min(100)]);
            }
        }
        if String::from_utf8_lossy(&first).contains("newestRevision(after") {
            // A server answers that when there is news.
            tokio::time::sleep(Duration::from_secs(25)).await;
        }
        let said = json!({ "newestRevision": null, "confirmedDeletions": [] });
        axum::Json(json!({ "data": { "report": said, "newestRevision": null, "reportRecipients": true } }))
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await.unwrap() });
    address
}

/// Says of every HelmRelease that Flux has done what it asks for.
async fn ready(client: Client) {
    let kind = kube::discovery::ApiResource::from_gvk(&kube::core::GroupVersionKind::gvk(
        "helm.toolkit.fluxcd.io",
        "v2",
        "HelmRelease",
    ));
    let all: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
    let events = watcher(all, watcher::Config::default()).default_backoff().applied_objects();
    events
        .for_each_concurrent(16, async |event| {
            let Ok(object) = event else { return };
            let generation = object.metadata.generation;
            if object.data["status"]["lastAttemptedGeneration"].as_i64() == generation {
                return;
            }
            let api: Api<DynamicObject> =
                Api::namespaced_with(client.clone(), &object.namespace().unwrap_or_default(), &kind);
            let ready = json!({ "type": "Ready", "status": "True", "reason": "InstallSucceeded", "message": "Helm install succeeded",
                "observedGeneration": generation, "lastTransitionTime": "2026-01-01T00:00:00Z" });
            let status = json!({ "status": { "observedGeneration": generation, "lastAttemptedGeneration": generation, "conditions": [ready] } });
            let written = api.patch_status(&object.name_any(), &PatchParams::default(), &Patch::Merge(&status)).await;
            written.unwrap();
        })
        .await;
}

/// The lines of `/metrics`, as name with labels and value.
pub(crate) async fn scrape(port: &Port) -> BTreeMap<String, f64> {
    let answer = http().get(format!("http://{}/metrics", port.address())).send().await;
    let Ok(answer) = answer else { return BTreeMap::new() };
    let text = answer.text().await.unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.rsplit_once(' '))
        .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
        .collect()
}

fn sum(metrics: &BTreeMap<String, f64>, name: &str, labels: &[&str]) -> f64 {
    let is = |line: &str| line.starts_with(name) && labels.iter().all(|label| line.contains(label));
    metrics.iter().filter(|(line, _)| is(line)).map(|(_, value)| value).sum()
}

/// Calls by verb and resource, the lease aside.
pub(crate) fn calls(metrics: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let mut calls = BTreeMap::new();
    for (line, value) in metrics.iter().filter(|(line, _)| line.starts_with("styrmin_agent_api_calls_total")) {
        let label = |name: &str| {
            let (_, rest) = line.split_once(&format!("{name}=\""))?;
            Some(rest.split_once('"')?.0.to_owned())
        };
        let call = format!("{} {}", label("verb").unwrap_or_default(), label("resource").unwrap_or_default());
        if !call.ends_with(" leases") {
            *calls.entry(call).or_default() += value;
        }
    }
    calls
}

pub(crate) fn since(before: &BTreeMap<String, f64>, after: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let more = after.iter().map(|(call, value)| (call.clone(), value - before.get(call).unwrap_or(&0.0)));
    more.filter(|(_, value)| *value > 0.0).collect()
}

/// Memory of a process in MiB, now and at its peak.
fn memory(process: u32) -> (f64, f64) {
    let text = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let of = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
    };
    (of("VmRSS:"), of("VmHWM:"))
}
