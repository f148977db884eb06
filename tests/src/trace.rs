//! Recorded behaviour of helm-controller (`tests/flux-traces`), and replaying it against a control
//! plane.

use crate::eventually;
use crate::plane::{FLUX, HELM_CONTROLLER, Plane, is_ready};
use futures::StreamExt as _;
use kube::api::{WatchEvent, WatchParams};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinHandle;

const HELM_RELEASE: (&str, &str) = ("helm.toolkit.fluxcd.io/v2", "HelmRelease");
const SOURCE: &str = "source.toolkit.fluxcd.io/v1";
/// How much longer than when it was recorded something may take.
const SLACK: Duration = Duration::from_secs(60);
/// How often what was watched is compared.
const LOOK: Duration = Duration::from_millis(50);
/// After this time without news a release that is at rest is asked for its next pass.
const QUIET: Duration = Duration::from_secs(2);

/// The folder of the traces.
#[must_use]
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("flux-traces")
}

/// The names of all traces.
#[must_use]
pub fn names() -> Vec<String> {
    let files = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = files.filter_map(|name| name.strip_suffix(".jsonl").map(str::to_owned)).collect();
    names.sort();
    names
}

/// What the Git repository of the recorded releases has: their chart, in `charts/hello`.
#[must_use]
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// What of a HelmRelease has to be the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    generation: i64,
    observed: i64,
    attempted: Option<i64>,
    /// `Type=Status/Reason@generation`.
    conditions: Vec<String>,
    /// All failures, those of installs, those of upgrades.
    failures: [i64; 3],
    /// `version:status`.
    history: Vec<String>,
    gone: bool,
}

impl State {
    /// Reads it.
    #[must_use]
    pub fn of(object: &Value, gone: bool) -> Self {
        let status = &object["status"];
        let number = |value: &Value| value.as_i64().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let all = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let condition = |of: &Value| {
            let generation = number(&of["observedGeneration"]);
            format!("{}={}/{}@{generation}", text(&of["type"]), text(&of["status"]), text(&of["reason"]))
        };
        Self {
            generation: number(&object["metadata"]["generation"]),
            observed: number(&status["observedGeneration"]),
            attempted: status["lastAttemptedGeneration"].as_i64(),
            conditions: all(&status["conditions"]).iter().map(condition).collect(),
            failures: ["failures", "installFailures", "upgradeFailures"].map(|name| number(&status[name])),
            history: all(&status["history"])
                .iter()
                .map(|entry| format!("{}:{}", number(&entry["version"]), text(&entry["status"])))
                .collect(),
            gone,
        }
    }
}

impl State {
    /// Nothing happens before somebody asks or the interval has passed.
    fn at_rest(&self) -> bool {
        !self.gone && self.observed == self.generation && !self.begins_a_pass()
    }

    fn begins_a_pass(&self) -> bool {
        self.conditions.iter().any(|one| one.starts_with("Reconciling="))
    }
}

/// What was done, and what was seen until the next thing was done.
#[derive(Debug)]
struct Part {
    note: String,
    /// Seconds until the last line of this part.
    seconds: u64,
    states: Vec<State>,
    events: Vec<String>,
}

/// A recorded scenario.
#[derive(Debug)]
pub struct Trace {
    name: String,
    parts: Vec<Part>,
    /// The spec of each generation, the first first.
    specs: Vec<Value>,
}

impl Trace {
    /// Reads `tests/flux-traces/<name>.jsonl`.
    ///
    /// # Panics
    /// When the file is not as its README says.
    #[must_use]
    pub fn read(name: &str) -> Self {
        let text = std::fs::read_to_string(folder().join(format!("{name}.jsonl"))).unwrap();
        let mut trace = Self { name: name.to_owned(), parts: Vec::new(), specs: Vec::new() };
        let mut began = 0;
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            let at = seconds(line["at"].as_str().unwrap());
            if let Some(note) = line["note"].as_str() {
                began = at;
                trace.parts.push(Part { note: note.into(), seconds: 0, states: Vec::new(), events: Vec::new() });
                continue;
            }
            let part = trace.parts.last_mut().unwrap();
            part.seconds = at - began;
            if let Some(reason) = line.pointer("/event/reason") {
                part.events.push(reason.as_str().unwrap().to_owned());
                continue;
            }
            let object = &line["helmRelease"];
            part.states.push(State::of(object, line["watch"] == "DELETED"));
            let generation = object["metadata"]["generation"].as_u64().unwrap();
            if trace.specs.len() < usize::try_from(generation).unwrap() {
                trace.specs.push(object["spec"].clone());
            }
        }
        trace.settle_before_changes();
        trace
    }

    /// A note may have been written before the last lines of what it followed: what still shows the
    /// earlier generation belongs to the part before a change.
    fn settle_before_changes(&mut self) {
        for number in 1..self.parts.len() {
            let before = self.parts[..number].iter().flat_map(|part| &part.states).map(|state| state.generation).max();
            let Some(first) = self.parts[number].states.iter().position(|state| Some(state.generation) > before) else {
                continue;
            };
            let earlier: Vec<State> = self.parts[number].states.drain(..first).collect();
            self.parts[number - 1].states.extend(earlier);
        }
    }

    /// Whether it kills the helm-controller, so that no other trace may share its control plane.
    #[must_use]
    pub fn kills(&self) -> bool {
        self.parts.iter().any(|part| part.note.contains("SIGKILL"))
    }

    /// Does to the cluster what was done when it was recorded, each thing as soon as what came before
    /// it has been seen.
    ///
    /// # Errors
    /// What was seen instead of what was recorded.
    ///
    /// # Panics
    /// When the control plane does not work.
    pub async fn replay(&self, plane: &Plane, charts: &str) -> Result<(), String> {
        let stage = Stage::set(self, plane, charts).await;
        let watched = Watched::start(plane, &self.name).await;
        let (mut states, mut events) = (Vec::new(), Vec::new());
        for (number, part) in self.parts.iter().enumerate() {
            let helper = stage.act(number, part).await;
            part.states.iter().for_each(|state| push(&mut states, state.clone()));
            part.events.iter().for_each(|reason| push(&mut events, reason.clone()));
            let limit = Duration::from_secs(part.seconds * 2) + SLACK;
            let compared = watched.reaches(&states, &events, limit, &stage).await;
            if let Some(helper) = helper {
                helper.abort();
            }
            compared.map_err(|difference| format!("{}, after “{}”: {difference}", self.name, part.note))?;
        }
        Ok(())
    }
}

fn seconds(at: &str) -> u64 {
    let mut parts = at[11..19].split(':').map(|part| part.parse::<u64>().unwrap());
    parts.by_ref().fold(0, |sum, part| sum * 60 + part)
}

/// Equal neighbours count once.
fn push<T: PartialEq>(all: &mut Vec<T>, one: T) {
    if all.last() != Some(&one) {
        all.push(one);
    }
}

/// What is watched.
struct Watched {
    states: Arc<Mutex<Vec<State>>>,
    events: Arc<Mutex<Vec<String>>>,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Watched {
    async fn start(plane: &Plane, name: &str) -> Self {
        let (states, events) = (Arc::<Mutex<Vec<State>>>::default(), Arc::<Mutex<Vec<String>>>::default());
        let watch = async |version: &str, kind: &str, params: WatchParams| {
            let api = plane.api(version, kind, name);
            let from = api.list(&Default::default()).await.unwrap().metadata.resource_version.unwrap();
            (api, from, params.timeout(290))
        };
        let (api, from, params) = watch(HELM_RELEASE.0, HELM_RELEASE.1, WatchParams::default()).await;
        let sink = Arc::clone(&states);
        let first = tokio::spawn(async move {
            let mut stream = api.watch(&params, &from).await.unwrap().boxed();
            while let Some(event) = stream.next().await {
                let (object, gone) = match event {
                    Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => (object, false),
                    Ok(WatchEvent::Deleted(object)) => (object, true),
                    _ => continue,
                };
                push(&mut sink.lock().unwrap(), State::of(&serde_json::to_value(object).unwrap(), gone));
            }
        });
        let (api, from, params) = watch("v1", "Event", WatchParams::default()).await;
        let sink = Arc::clone(&events);
        let second = tokio::spawn(async move {
            let mut stream = api.watch(&params, &from).await.unwrap().boxed();
            while let Some(event) = stream.next().await {
                let Ok(WatchEvent::Added(event) | WatchEvent::Modified(event)) = event else { continue };
                if event.data["involvedObject"]["kind"] == HELM_RELEASE.1 {
                    push(&mut sink.lock().unwrap(), event.data["reason"].as_str().unwrap_or_default().to_owned());
                }
            }
        });
        Self { states, events, tasks: [first, second] }
    }

    /// Waits until everything expected was seen, and nothing else before it.
    async fn reaches(
        &self,
        states: &[State],
        events: &[String],
        limit: Duration,
        stage: &Stage<'_>,
    ) -> Result<(), String> {
        let end = tokio::time::Instant::now() + limit;
        let mut news = (0, tokio::time::Instant::now());
        loop {
            let seen = self.states.lock().unwrap().last().cloned();
            stage.chart_may_be_ready(seen.as_ref()).await;
            let done = {
                let (seen_states, seen_events) = (self.states.lock().unwrap(), self.events.lock().unwrap());
                prefix("state", states, &seen_states)? & prefix("event", events, &seen_events)?
            };
            if done {
                return Ok(());
            }
            let (count, at_rest) = {
                let seen = self.states.lock().unwrap();
                let begins = states.get(seen.len()).is_some_and(State::begins_a_pass);
                (seen.len(), begins && seen.last().is_some_and(State::at_rest))
            };
            if count != news.0 {
                news = (count, tokio::time::Instant::now());
            } else if at_rest && news.1.elapsed() > QUIET {
                stage.next_pass().await;
                news.1 = tokio::time::Instant::now();
            }
            if tokio::time::Instant::now() > end {
                let (seen_states, seen_events) = (self.states.lock().unwrap(), self.events.lock().unwrap());
                let next = states.get(seen_states.len());
                let next_event = events.get(seen_events.len());
                return Err(format!(
                    "not within {limit:?}: still missing {next:#?} and event {next_event:?}; last seen {:#?} and events {:?}",
                    seen_states.last(),
                    *seen_events
                ));
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Whether all of `wanted` was seen. What comes after it belongs to what follows.
fn prefix<T: PartialEq + std::fmt::Debug>(what: &str, wanted: &[T], seen: &[T]) -> Result<bool, String> {
    for (number, (wanted, seen)) in wanted.iter().zip(seen).enumerate() {
        if wanted != seen {
            return Err(format!("{what} {number} differs: recorded {wanted:#?}, seen {seen:#?}"));
        }
    }
    Ok(seen.len() >= wanted.len())
}

/// The surroundings of one release.
struct Stage<'a> {
    trace: &'a Trace,
    plane: &'a Plane,
    /// Whether the chart has to wait until the release was seen waiting for it.
    late_chart: std::sync::atomic::AtomicBool,
}

impl<'a> Stage<'a> {
    async fn set(trace: &'a Trace, plane: &'a Plane, charts: &str) -> Self {
        let name = trace.name.as_str();
        plane.namespace(name).await;
        let spec = &trace.specs[0];
        let own_chart = spec["chartRef"]["name"].as_str();
        let waits = |state: &State| state.conditions.iter().any(|condition| condition.contains("/SourceNotReady@"));
        let late = own_chart.is_some() && trace.parts[0].states.iter().any(waits);
        let (namespace, repository) = if own_chart.is_some() { (name, "charts") } else { (FLUX, "c1") };
        plane
            .apply(&json!({ "apiVersion": SOURCE, "kind": "GitRepository",
                "metadata": { "namespace": namespace, "name": repository },
                "spec": { "url": charts, "interval": "1h", "ref": { "branch": "main" } } }))
            .await;
        plane.until(&[SOURCE, "GitRepository", namespace, repository], SLACK, is_ready).await;
        if let Some(chart) = own_chart {
            plane.namespace(&format!("{name}-app")).await;
            plane
                .apply(&json!({ "apiVersion": SOURCE, "kind": "HelmChart", "metadata": { "namespace": name, "name": chart },
                    "spec": { "chart": "./charts/hello", "interval": "1h", "suspend": late, "sourceRef": { "kind": "GitRepository", "name": repository } } }))
                .await;
            if !late {
                plane.until(&[SOURCE, "HelmChart", name, chart], SLACK, is_ready).await;
            }
        }
        Self { trace, plane, late_chart: late.into() }
    }

    /// Lets a late chart become ready once the release was seen waiting for it.
    async fn chart_may_be_ready(&self, seen: Option<&State>) {
        use std::sync::atomic::Ordering::Relaxed;
        let waits = |state: &State| state.conditions.iter().any(|condition| condition.contains("/SourceNotReady@"));
        if self.late_chart.load(Relaxed) && seen.is_some_and(waits) {
            self.late_chart.store(false, Relaxed);
            let name = self.trace.name.as_str();
            let chart = self.trace.specs[0]["chartRef"]["name"].as_str().unwrap();
            self.plane
                .apply(&json!({ "apiVersion": SOURCE, "kind": "HelmChart", "metadata": { "namespace": name, "name": chart },
                    "spec": { "chart": "./charts/hello", "interval": "1h", "suspend": false, "sourceRef": { "kind": "GitRepository", "name": "charts" } } }))
                .await;
        }
    }

    /// The object of the recording, with the spec that makes `generation`.
    async fn apply(&self, generation: usize) {
        let name = self.trace.name.as_str();
        let mut spec = self.trace.specs[generation - 1].clone();
        for reference in spec["valuesFrom"].as_array().into_iter().flatten() {
            // The recording's Secrets are named by their content, which it does not have.
            if !self.trace.parts[0].note.contains("does not exist yet") {
                self.secret(reference["name"].as_str().unwrap()).await;
            }
        }
        // The next pass is asked for when it is wanted: on a busy machine an interval of 30 s could pass
        // between two things that were done right after each other.
        spec["interval"] = json!("10m");
        self.plane
            .apply(&json!({ "apiVersion": HELM_RELEASE.0, "kind": HELM_RELEASE.1, "metadata": { "namespace": name, "name": name }, "spec": spec }))
            .await;
    }

    /// Asks for a pass, as the interval would.
    async fn next_pass(&self) {
        let name = self.trace.name.as_str();
        let now = rand::random::<u64>().to_string();
        let patch = json!({ "metadata": { "annotations": { "reconcile.fluxcd.io/requestedAt": now } } });
        let api = self.plane.api(HELM_RELEASE.0, HELM_RELEASE.1, name);
        let _ = api.patch(name, &Default::default(), &kube::api::Patch::Merge(patch)).await;
    }

    async fn secret(&self, secret: &str) {
        let values = match secret.rsplit('-').next() {
            Some("655cf9d0f8") => json!({ "replicas": 1 }),
            Some("933349da84") => json!({ "replicas": 2 }),
            Some("a56f55c780") => json!({ "replicas": 1, "fault": "image-pull" }),
            other => panic!("no values known for {other:?}"),
        };
        self.plane
            .apply(&json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "namespace": self.trace.name, "name": secret },
                "stringData": { "values.yaml": values.to_string() } }))
            .await;
    }

    /// Does what the note says. A task that it returns goes on until the part was seen.
    async fn act(&self, number: usize, part: &Part) -> Option<JoinHandle<()>> {
        let (plane, name) = (self.plane, self.trace.name.as_str());
        let app = format!("{name}-app");
        let note = part.note.as_str();
        let before =
            self.trace.parts[..number].iter().flat_map(|part| &part.states).map(|state| state.generation).max();
        let after = part.states.iter().map(|state| state.generation).max();
        if note.contains("SIGKILL") {
            // It has to die while Helm works: after the release was stored as pending.
            let pending = format!("sh.helm.release.v1.{name}.v2");
            plane.until(&["v1", "Secret", name, &pending], SLACK, |found| found.is_some()).await;
            tokio::time::sleep(Duration::from_secs(2)).await;
            plane.program(HELM_CONTROLLER).kill().await;
            tokio::time::sleep(Duration::from_secs(3)).await;
            plane.program(HELM_CONTROLLER).restart().await;
        } else if note.contains("delete it") {
            plane.delete(&[HELM_RELEASE.0, HELM_RELEASE.1, name, name]).await;
        } else if note.contains("edits the ConfigMap") {
            plane
                .kubectl(&[
                    "-n",
                    name,
                    "patch",
                    "configmap",
                    name,
                    "--type=merge",
                    "-p",
                    r#"{"data":{"greeting":"bye"}}"#,
                ])
                .await;
            plane.kubectl(&["-n", name, "scale", "deployment", name, "--replicas=3"]).await;
        } else if note.contains("greeting is now") {
            let greeting = |found: Option<&Value>| found.is_some_and(|found| found["data"]["greeting"] == "hello");
            plane.until(&["v1", "ConfigMap", name, name], SLACK, greeting).await;
            let replicas = |found: Option<&Value>| found.is_some_and(|found| found["spec"]["replicas"] == 1);
            plane.until(&["apps/v1", "Deployment", name, name], SLACK, replicas).await;
        } else if note.contains("deletes the target namespace") {
            plane.delete(&["v1", "Namespace", "", &app]).await;
            plane.until(&["v1", "Namespace", "", &app], SLACK, |found| found.is_none()).await;
        } else if note.contains("is created again") {
            plane.namespace(&app).await;
        } else if note.contains("deletes the namespace that holds") {
            plane.delete(&["v1", "Namespace", "", name]).await;
        } else if note.contains("it arrives") {
            self.secret(self.trace.specs[0]["valuesFrom"][0]["name"].as_str().unwrap()).await;
        } else if note.contains("fault is cleared") {
            return Some(self.clear_faults());
        } else if note.contains("in the target namespace now: []") {
            plane.until(&["apps/v1", "Deployment", &app, &app], SLACK, |found| found.is_none()).await;
        } else if note.contains("deployments there now") {
            plane.until(&["apps/v1", "Deployment", &app, &app], SLACK, |found| found.is_some()).await;
        } else {
            let generation = after.unwrap_or_else(|| panic!("{name}: nobody knows how to do “{note}”"));
            assert!(before.is_none_or(|before| generation == before + 1), "{name}: “{note}” has to change the spec");
            self.apply(usize::try_from(generation).unwrap()).await;
        }
        None
    }

    /// Lets every pod that comes run, whatever its label says.
    fn clear_faults(&self) -> JoinHandle<()> {
        let pods = self.plane.api("v1", "Pod", &self.trace.name);
        tokio::spawn(async move {
            let patch = kube::api::Patch::Merge(json!({ "metadata": { "labels": { "fault": null } } }));
            loop {
                let faulty = kube::api::ListParams::default().labels("fault");
                for pod in pods.list(&faulty).await.map(|list| list.items).unwrap_or_default() {
                    let _ =
                        pods.patch(pod.metadata.name.as_deref().unwrap_or_default(), &Default::default(), &patch).await;
                }
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
        })
    }
}

/// Waits until the helm-controller answers, so that no scenario begins while it still starts.
pub async fn controllers_answer(plane: &Plane) {
    let name = "warm-up";
    plane.namespace(name).await;
    plane
        .apply(&json!({ "apiVersion": HELM_RELEASE.0, "kind": HELM_RELEASE.1, "metadata": { "namespace": name, "name": name },
            "spec": { "interval": "1h", "chartRef": { "kind": "HelmChart", "name": "none" } } }))
        .await;
    eventually("helm-controller answers", Duration::from_secs(90), async || {
        let found = plane.get(&[HELM_RELEASE.0, HELM_RELEASE.1, name, name]).await;
        let began = |found: &Value| found["metadata"]["finalizers"].is_array();
        if found.as_ref().is_some_and(began) { Ok(()) } else { Err(plane.program(HELM_CONTROLLER).log_tail()) }
    })
    .await;
}
