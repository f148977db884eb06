//! The helm-controller of the tests behaves as the real one was recorded to (`tests/flux-traces`).

use futures::future::join_all;
use std::path::Path;
use styrmin_tests::git;
use styrmin_tests::plane::{Options, Plane};
use styrmin_tests::remote::Remote;
use styrmin_tests::server::copy;
use styrmin_tests::trace::{self, Trace};
use tempfile::TempDir;

/// A Git server that has the chart of the traces.
async fn charts() -> (TempDir, Remote) {
    let folder = tempfile::tempdir().unwrap();
    let repository = git::bare(folder.path()).await;
    copy(&trace::fixtures(), &folder.path().join("seed"));
    push(&folder.path().join("seed")).await;
    let remote = Remote::open(&repository).await;
    (folder, remote)
}

async fn push(work: &Path) {
    git::git(work, &["add", "-A"]).await;
    git::git(work, &["commit", "--quiet", "-m", "Charts"]).await;
    git::git(work, &["push", "--quiet", "origin", "HEAD:main"]).await;
}

async fn replay(traces: &[Trace], mut options: Options) -> Vec<String> {
    // A chart that becomes ready brings the release back at once; a timer beside it would add a pass.
    options.helm_controller.push("--requeue-dependency=10m".into());
    let (_folder, remote) = charts().await;
    let plane = Plane::start_with(options).await;
    trace::controllers_answer(&plane).await;
    let url = remote.url();
    let results = join_all(traces.iter().map(|trace| trace.replay(&plane, &url))).await;
    plane.stop().await;
    results.into_iter().filter_map(Result::err).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_scenario() {
    let all: Vec<Trace> = trace::names().iter().map(|name| Trace::read(name)).collect();
    assert!(all.len() >= 18, "traces are missing");
    let (alone, together): (Vec<Trace>, Vec<Trace>) = all.into_iter().partition(Trace::kills);
    assert_eq!(alone.len(), 1);
    let (first, second) = tokio::join!(replay(&together, Options::default()), replay(&alone, Options::default()));
    let differences: Vec<String> = first.into_iter().chain(second).collect();
    assert!(differences.is_empty(), "{}", differences.join("\n\n"));
}

/// Without this, a comparison that sees nothing would look like conformance.
#[tokio::test(flavor = "multi_thread")]
async fn a_broken_stand_in_is_noticed() {
    for (fault, scenario, shows) in
        [("no-remediation", "job-fails", "Remediated"), ("no-counters", "job-fails", "failures")]
    {
        let options =
            Options { stand_in: true, helm_controller: vec![format!("--misbehave={fault}")], ..Options::default() };
        let differences = replay(&[Trace::read(scenario)], options).await;
        assert_eq!(differences.len(), 1, "{fault} was not noticed");
        assert!(differences[0].contains("recorded") && differences[0].contains(shows), "{fault}: {}", differences[0]);
    }
}
