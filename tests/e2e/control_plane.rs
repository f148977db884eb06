//! The control plane of the tests: what it simulates, and that nothing of it is left behind.

use futures::FutureExt as _;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::TcpListener;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::time::Duration;
use styrmin_tests::gitea::Gitea;
use styrmin_tests::plane::{FLUX, HELM_CONTROLLER, KUSTOMIZE_CONTROLLER, KWOK, Options, Plane, condition, is_ready};
use styrmin_tests::remote::Remote;
use styrmin_tests::server::program;
use styrmin_tests::{child, eventually, git};
use tokio::io::{AsyncBufReadExt as _, BufReader};

const SOON: Duration = Duration::from_secs(60);

/// The processes whose command line or environment names a folder, which each program of a run does.
fn processes_of(folder: &Path) -> Vec<String> {
    let needle = folder.to_string_lossy().into_owned();
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()))
        .filter_map(|entry| {
            let read = |name: &str| std::fs::read(entry.path().join(name)).unwrap_or_default();
            let text = String::from_utf8_lossy(&[read("cmdline"), read("environ")].concat()).into_owned();
            text.contains(&needle).then_some(text)
        })
        .collect()
}

/// The ports on which processes listen.
fn listening(processes: &[u32]) -> BTreeSet<u16> {
    let sockets: BTreeSet<String> = processes
        .iter()
        .flat_map(|id| std::fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().filter_map(Result::ok))
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .filter_map(|path| Some(path.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|fields| fields.get(3) == Some(&"0A") && fields.get(9).is_some_and(|inode| sockets.contains(*inode)))
        .filter_map(|fields| u16::from_str_radix(fields[1].rsplit(':').next()?, 16).ok())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn starts_and_stops_20_times_without_a_trace() {
    for _ in 0..20 {
        let plane = Plane::start().await;
        let folder = plane.folder().to_owned();
        let processes = plane.processes().await;
        assert_eq!(processes.len(), 8, "all programs run");
        let ports = eventually("every program listens or waits", SOON, async || {
            let ports = listening(&plane.processes().await);
            if ports.len() >= 5 { Ok(ports) } else { Err(ports) }
        })
        .await;
        assert!(processes_of(&folder).len() >= processes.len(), "the check sees processes");
        plane.stop().await;
        assert_eq!(processes_of(&folder), Vec::<String>::new());
        assert!(!folder.exists());
        for port in ports {
            TcpListener::bind(("127.0.0.1", port)).unwrap_or_else(|error| panic!("port {port}: {error}"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_with_its_process_however_that_ends() {
    let mut command = child(&program("control-plane").to_string_lossy());
    let mut runner = command.args(["--bare"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(runner.stdout.take().unwrap()).read_line(&mut line).await.unwrap();
    let started: Value = serde_json::from_str(&line).unwrap();
    let folder = Path::new(started["folder"].as_str().unwrap()).to_owned();
    assert!(processes_of(&folder).len() >= 2);
    runner.kill().await.unwrap();
    eventually("the programs are gone", Duration::from_secs(10), async || {
        let left = processes_of(&folder);
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    // A killed process cannot remove its folder.
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_at_once_know_nothing_of_each_other() {
    let bare = || Plane::start_with(Options { controllers: false, ..Options::default() });
    let (one, two) = tokio::join!(bare(), bare());
    one.namespace("only-here").await;
    assert!(two.get(&["v1", "Namespace", "", "only-here"]).await.is_none());
}

fn pod(name: &str, labels: Value, image: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "namespace": "default", "name": name, "labels": labels },
        "spec": { "containers": [{ "name": "main", "image": image }] } })
}

fn job(name: &str, labels: Value) -> Value {
    json!({ "apiVersion": "batch/v1", "kind": "Job", "metadata": { "namespace": "default", "name": name },
        "spec": { "backoffLimit": 0, "template": { "metadata": { "labels": labels },
            "spec": { "restartPolicy": "Never", "containers": [{ "name": "main", "image": "x:1" }] } } } })
}

fn waits_because(found: Option<&Value>, reason: &str) -> bool {
    found.is_some_and(|found| found["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == reason)
}

fn runs(found: Option<&Value>) -> bool {
    found.is_some_and(|found| condition(found, "Ready", "True").is_some())
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_jobs_volumes_and_nodes_are_simulated() {
    let plane = Plane::start().await;
    plane.until(&["v1", "ServiceAccount", "default", "default"], SOON, |found| found.is_some()).await;
    for object in [
        pod("runs", json!({}), "x:1"),
        pod("no-image", json!({ "fault": "image-pull" }), "x:1"),
        pod("no-image-by-tag", json!({}), "registry/x:image-pull"),
        pod("crashes", json!({ "fault": "crash" }), "x:1"),
        pod("eats", json!({ "fault": "oom" }), "x:1"),
        job("ends", json!({})),
        job("fails", json!({ "exit": "1" })),
        json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "namespace": "default", "name": "disk" },
            "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } }),
    ] {
        plane.create(&object).await;
    }
    let pod = |name: &'static str| ["v1", "Pod", "default", name];
    plane.until(&pod("runs"), SOON, runs).await;
    plane.until(&pod("no-image"), SOON, |found| waits_because(found, "ImagePullBackOff")).await;
    plane.until(&pod("no-image-by-tag"), SOON, |found| waits_because(found, "ImagePullBackOff")).await;
    plane.until(&pod("crashes"), SOON, |found| waits_because(found, "CrashLoopBackOff")).await;
    let eats = plane.until(&pod("eats"), SOON, |found| waits_because(found, "CrashLoopBackOff")).await.unwrap();
    assert_eq!(eats["status"]["containerStatuses"][0]["lastState"]["terminated"]["reason"], "OOMKilled");
    let job = |name: &'static str| ["batch/v1", "Job", "default", name];
    let is = |kind: &'static str| {
        move |found: Option<&Value>| found.is_some_and(|found| condition(found, kind, "True").is_some())
    };
    plane.until(&job("ends"), SOON, is("Complete")).await;
    plane.until(&job("fails"), SOON, is("Failed")).await;
    let bound = |found: Option<&Value>| found.is_some_and(|found| found["status"]["phase"] == "Bound");
    plane.until(&["v1", "PersistentVolumeClaim", "default", "disk"], SOON, bound).await;

    plane.kubectl(&["label", "pod", "no-image", "fault-", "--overwrite"]).await;
    plane.until(&pod("no-image"), SOON, runs).await;
    assert_eq!(plane.kubectl(&["logs", "runs"]).await, "started\nready\n");
    assert_eq!(plane.kubectl(&["exec", "runs", "--", "sh", "-c", "echo $SIMULATED"]).await, "1\n");
    plane.delete(&pod("runs")).await;
    plane.until(&pod("runs"), SOON, |found| found.is_none()).await;

    plane.kubectl(&["label", "node", "node-1", "fault=gone"]).await;
    let node = ["v1", "Node", "", "node-1"];
    plane.until(&node, SOON, |found| !runs(found)).await;
    plane.kubectl(&["label", "node", "node-1", "fault-"]).await;
    plane.until(&node, SOON, runs).await;

    plane.program(KWOK).kill().await;
    plane.until(&node, SOON, |found| found.is_some_and(|found| condition(found, "Ready", "Unknown").is_some())).await;
    plane.until(&pod("no-image"), SOON, |found| found.is_some() && !runs(found)).await;
    plane.program(KWOK).restart().await;
    plane.until(&node, SOON, runs).await;
    plane.until(&pod("no-image"), SOON, runs).await;
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_are_killed_frozen_cut_off_and_come_back() {
    let plane = Plane::start().await;
    plane.until(&["v1", "ServiceAccount", "default", "default"], SOON, |found| found.is_some()).await;
    let stays = async |name: &'static str| {
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(!runs(plane.get(&["v1", "Pod", "default", name]).await.as_ref()), "{name} runs without kwok");
    };
    plane.create(&pod("first", json!({}), "x:1")).await;
    plane.until(&["v1", "Pod", "default", "first"], SOON, runs).await;

    plane.program(KWOK).kill().await;
    assert_eq!(plane.program(KWOK).id().await, None);
    plane.create(&pod("killed", json!({}), "x:1")).await;
    stays("killed").await;
    plane.program(KWOK).restart().await;
    plane.until(&["v1", "Pod", "default", "killed"], SOON, runs).await;

    plane.gate(KWOK).cut();
    plane.create(&pod("cut", json!({}), "x:1")).await;
    stays("cut").await;
    plane.gate(KWOK).mend();
    plane.until(&["v1", "Pod", "default", "cut"], SOON, runs).await;

    plane.program(KWOK).freeze().await;
    plane.create(&pod("frozen", json!({}), "x:1")).await;
    stays("frozen").await;
    plane.program(KWOK).thaw().await;
    plane.until(&["v1", "Pod", "default", "frozen"], SOON, runs).await;
    assert!(plane.program(HELM_CONTROLLER).log().starts_with(plane.logs()));
    let logs = plane.logs().to_owned();
    plane.stop().await;
    assert!(logs.join("kube-apiserver.log").is_file(), "logs stay");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_fails_says_what_was_seen() {
    let plane = Plane::start_with(Options { controllers: false, ..Options::default() }).await;
    plane.namespace("seen").await;
    let logs = plane.logs().display().to_string();
    let object = ["v1", "Namespace", "", "seen"];
    let waits = plane.until(&object, Duration::from_secs(1), |found| found.is_none());
    let message = AssertUnwindSafe(waits).catch_unwind().await.unwrap_err().downcast::<String>().unwrap();
    for part in ["Namespace /seen", "not within 1s", "kubernetes.io/metadata.name", &logs] {
        assert!(message.contains(part), "{part} is missing: {message}");
    }
}

/// The way of a change through Flux, without Styrmin.
#[tokio::test(flavor = "multi_thread")]
async fn flux_brings_in_what_git_has() {
    let folder = tempfile::tempdir().unwrap();
    let repository = git::bare(folder.path()).await;
    let work = folder.path().join("seed");
    std::fs::write(
        work.join("map.yaml"),
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: from-git, namespace: default}\ndata: {a: b}\n",
    )
    .unwrap();
    git::git(&work, &["add", "-A"]).await;
    git::git(&work, &["commit", "--quiet", "-m", "Map"]).await;
    git::git(&work, &["push", "--quiet", "origin", "HEAD:main"]).await;
    let remote = Remote::open(&repository).await;
    let plane = Plane::start().await;
    plane
        .apply(&json!({ "apiVersion": "source.toolkit.fluxcd.io/v1", "kind": "GitRepository", "metadata": { "namespace": FLUX, "name": "r" },
            "spec": { "url": remote.url(), "interval": "1h", "ref": { "branch": "main" } } }))
        .await;
    plane
        .apply(&json!({ "apiVersion": "kustomize.toolkit.fluxcd.io/v1", "kind": "Kustomization", "metadata": { "namespace": FLUX, "name": "r" },
            "spec": { "sourceRef": { "kind": "GitRepository", "name": "r" }, "path": "./", "prune": true, "interval": "1h" } }))
        .await;
    plane.until(&["kustomize.toolkit.fluxcd.io/v1", "Kustomization", FLUX, "r"], SOON, is_ready).await;
    let map = plane.get(&["v1", "ConfigMap", "default", "from-git"]).await.unwrap();
    assert_eq!(map["data"]["a"], "b");
    assert!(plane.program(KUSTOMIZE_CONTROLLER).id().await.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn gitea_has_repositories_and_pull_requests() {
    let gitea = Gitea::start().await;
    let url = gitea.repository("r").await;
    let with_token = url.replacen("http://", &format!("http://x:{}@", gitea.token()), 1);
    let folder = tempfile::tempdir().unwrap();
    git::git(folder.path(), &["clone", "--quiet", &with_token, "work"]).await;
    let work = folder.path().join("work");
    git::git(&work, &["switch", "--quiet", "-c", "change"]).await;
    std::fs::write(work.join("new.txt"), "new\n").unwrap();
    git::git(&work, &["add", "-A"]).await;
    git::git(&work, &["commit", "--quiet", "-m", "Change"]).await;
    git::git(&work, &["push", "--quiet", "origin", "change"]).await;
    let pull = gitea
        .api("POST", "repos/styrmin/r/pulls", &json!({ "head": "change", "base": "main", "title": "Change" }))
        .await;
    let number = pull["number"].as_i64().unwrap();
    eventually("it can be merged", SOON, async || {
        let pull = gitea.api("GET", &format!("repos/styrmin/r/pulls/{number}"), &Value::Null).await;
        if pull["mergeable"] == true { Ok(()) } else { Err(pull["mergeable"].clone()) }
    })
    .await;
    gitea.api("POST", &format!("repos/styrmin/r/pulls/{number}/merge"), &json!({ "Do": "merge" })).await;
    git::git(&work, &["fetch", "--quiet", "origin", "main"]).await;
    assert!(git::git(&work, &["ls-tree", "--name-only", "FETCH_HEAD"]).await.contains("new.txt"));
}

/// Runs a copy of the build of one small program; gives what it said.
async fn builds(folder: &Path, cache: &Path) -> String {
    let output = tokio::process::Command::new(folder.join("build"))
        .arg("yamlcheck")
        .env("STYRMIN_TEST_CACHE", cache)
        .output()
        .await
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    said
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_are_built_once_also_by_two_at_once_and_anew_when_their_module_changes() {
    let place = tempfile::tempdir().unwrap();
    let (folder, cache) = (place.path().join("control-plane"), place.path().join("cache"));
    styrmin_tests::server::copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("control-plane"), &folder);
    let (one, other) = tokio::join!(builds(&folder, &cache), builds(&folder, &cache));
    let program = cache.join("yamlcheck");
    let made = || std::fs::metadata(&program).unwrap().modified().unwrap();
    let first = made();
    let built = |said: &str| said.matches("yamlcheck: built in").count();
    assert_eq!(built(&one) + built(&other), 1, "one builds, and says so: {one} {other}");
    assert_eq!(built(&builds(&folder, &cache).await), 0, "nothing changed");
    assert_eq!(made(), first);
    let module = folder.join("yamlcheck/go.mod");
    let text = std::fs::read_to_string(&module).unwrap();
    std::fs::write(&module, format!("{text}\n// changed\n")).unwrap();
    assert_eq!(built(&builds(&folder, &cache).await), 1, "its module changed");
    assert!(made() > first);
}
