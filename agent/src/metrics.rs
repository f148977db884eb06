//! What `/metrics` shows. Process-wide; labels have few values.

use crate::operator::decide::phase;
use axum::Router;
use axum::http::{Request, Response, StatusCode};
use axum::routing::get;
use futures::future::BoxFuture;
use kube::client::Body;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};
use styrmin_renderer::spec::StyrminDeploymentStatus;
use tokio_util::sync::CancellationToken;
use tower::{Layer, Service};
use tracing::{error, info};

type Labels<const N: usize> = [(&'static str, String); N];

/// Bounds in seconds of what takes milliseconds.
const QUICK: [f64; 10] = [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0];
/// Bounds in seconds of what takes as long as a rollout.
const SLOW: [f64; 10] = [0.5, 1.0, 2.0, 5.0, 15.0, 30.0, 60.0, 150.0, 300.0, 900.0];

type SlowFamily = Family<Labels<1>, Histogram, fn() -> Histogram>;

struct Metrics {
    registry: Registry,
    calls: Family<Labels<3>, Counter>,
    rollouts: Family<Labels<1>, Counter>,
    phases: SlowFamily,
    passes: Family<Labels<1>, Counter>,
    pass_time: Histogram,
    waiting: Gauge,
    waited: Histogram,
    drift: Counter,
    watches: Family<Labels<1>, Counter>,
}

static METRICS: LazyLock<Metrics> = LazyLock::new(|| {
    let mut registry = Registry::with_prefix("styrmin_agent");
    let metrics = Metrics {
        registry: Registry::default(),
        calls: Family::default(),
        rollouts: Family::default(),
        phases: Family::new_with_constructor(|| Histogram::new(SLOW)),
        passes: Family::default(),
        pass_time: Histogram::new(QUICK),
        waiting: Gauge::default(),
        waited: Histogram::new(QUICK),
        drift: Counter::default(),
        watches: Family::default(),
    };
    registry.register("api_calls", "Calls of the API server by verb, resource and status", metrics.calls.clone());
    registry.register("rollouts", "Rollouts and teardowns by outcome", metrics.rollouts.clone());
    registry.register("phase_seconds", "How long rollouts were in a phase", metrics.phases.clone());
    registry.register("passes", "Passes by result", metrics.passes.clone());
    registry.register("pass_seconds", "How long passes took", metrics.pass_time.clone());
    registry.register("queue", "Deployments that wait for a pass", metrics.waiting.clone());
    registry.register("queue_seconds", "How long deployments waited for a pass", metrics.waited.clone());
    registry.register("drift_corrections", "Times that drift was put back", metrics.drift.clone());
    let about = "Times that a watch ended with an error, by kind: what is known of one that goes on so is old";
    registry.register("watch_errors", about, metrics.watches.clone());
    Metrics { registry, ..metrics }
});

/// The watch of a kind ended with an error.
pub(crate) fn watch_interrupted(kind: &str) {
    METRICS.watches.get_or_create(&[("kind", kind.to_owned())]).inc();
}

/// So many deployments wait for a pass.
pub(crate) fn waiting(deployments: usize) {
    METRICS.waiting.set(deployments.try_into().unwrap_or(i64::MAX));
}

/// One had waited for so long when its pass began.
pub(crate) fn waited(time: Duration) {
    METRICS.waited.observe(time.as_secs_f64());
}

/// A pass has ended.
pub(crate) fn pass(result: &str, took: Duration) {
    METRICS.passes.get_or_create(&[("result", result.to_owned())]).inc();
    METRICS.pass_time.observe(took.as_secs_f64());
}

/// Since when each object is in its phase, by UID.
#[derive(Debug, Default)]
pub(crate) struct Phases {
    since: Mutex<HashMap<String, Instant>>,
}

impl Phases {
    /// A status was written.
    pub(crate) fn written(&self, uid: &str, before: &StyrminDeploymentStatus, after: &StyrminDeploymentStatus) {
        let corrected = |status: &StyrminDeploymentStatus| u64::from(status.drift_corrections.unwrap_or_default());
        METRICS.drift.inc_by(corrected(after).saturating_sub(corrected(before)));
        let (was, is) = (before.phase.as_deref(), after.phase.as_deref());
        let ends = [Some(phase::READY), Some(phase::FAILED), Some(phase::DELETED)];
        let count = |outcome: &str| {
            METRICS.rollouts.get_or_create(&[("outcome", outcome.to_owned())]).inc();
        };
        if before.instance_id.is_some() && before.instance_id != after.instance_id && !ends.contains(&was) {
            count("superseded");
        }
        if was == is {
            return;
        }
        match is {
            Some(phase::READY) => count("ready"),
            Some(phase::FAILED) => count("failed"),
            Some(phase::DELETED) => count("deleted"),
            _ => {}
        }
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        let began = if ends.contains(&is) { since.remove(uid) } else { since.insert(uid.to_owned(), Instant::now()) };
        // A phase that began before this process did has no known beginning.
        if let (Some(began), Some(was)) = (began, was) {
            METRICS.phases.get_or_create(&[("phase", was.to_owned())]).observe(began.elapsed().as_secs_f64());
        }
    }
}

/// Counts the calls of a client.
#[derive(Debug, Clone, Copy)]
pub struct Counting;

/// See [`Counting`].
#[derive(Debug, Clone)]
pub struct Counted<S>(S);

impl<S> Layer<S> for Counting {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted(inner)
    }
}

impl<S, B> Service<Request<Body>> for Counted<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    B: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut std::task::Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (verb, resource) = what(request.method().as_str(), request.uri().path(), request.uri().query());
        let answer = self.0.call(request);
        Box::pin(async move {
            let answer = answer.await;
            let code = answer.as_ref().map_or_else(|_| "none".to_owned(), |answer| answer.status().as_str().to_owned());
            METRICS.calls.get_or_create(&[("verb", verb.to_owned()), ("resource", resource), ("code", code)]).inc();
            answer
        })
    }
}

/// Verb and resource of a call, as Kubernetes' rights name them.
fn what(method: &str, path: &str, query: Option<&str>) -> (&'static str, String) {
    let mut parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    parts.drain(..parts.len().min(if parts.first() == Some(&"api") { 2 } else { 3 }));
    if parts.first() == Some(&"namespaces") && parts.len() > 2 {
        parts.drain(..2);
    }
    let resource = match parts[..] {
        [resource, _, part, ..] => format!("{resource}/{part}"),
        [resource, ..] => resource.to_owned(),
        [] => String::new(),
    };
    let verb = match method {
        "GET" if query.is_some_and(|query| query.contains("watch=")) => "watch",
        "GET" if parts.len() == 1 => "list",
        "GET" => "get",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        _ => "delete",
    };
    (verb, resource)
}

/// Serves `/metrics` and `/healthz` until `stop`.
///
/// # Errors
/// When the address cannot be listened on.
pub async fn serve(address: SocketAddr, stop: CancellationToken) -> std::io::Result<()> {
    let router = Router::new().route("/healthz", get(async || "ok")).route(
        "/metrics",
        get(async || {
            let mut text = String::new();
            encode(&mut text, &METRICS.registry).map(|()| text).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
        }),
    );
    let listener = tokio::net::TcpListener::bind(address).await?;
    info!(%address, "metrics");
    tokio::spawn(async move {
        let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await;
        if let Err(error) = served {
            error!(%error, "metrics are not served any more");
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{METRICS, Phases, pass, waited, waiting, what};
    use prometheus_client::encoding::text::encode;
    use std::time::Duration;
    use styrmin_renderer::spec::StyrminDeploymentStatus;

    /// The value of a line of `/metrics`.
    fn value(line: &str) -> f64 {
        let mut text = String::new();
        encode(&mut text, &METRICS.registry).unwrap();
        let found = text.lines().find_map(|known| known.strip_prefix(line)?.trim().parse().ok());
        found.unwrap_or_default()
    }

    #[test]
    fn rollouts_are_counted_by_their_outcome_and_phases_by_how_long_they_took() {
        let phases = Phases::default();
        let status = |instance: &str, phase: &str, corrections: u32| StyrminDeploymentStatus {
            instance_id: Some(instance.into()),
            phase: Some(phase.into()),
            drift_corrections: Some(corrections),
            ..StyrminDeploymentStatus::default()
        };
        let way = [
            ("one", "CreatingPrerequisites", 0),
            ("one", "CreatingHelmRelease", 0),
            ("one", "Ready", 0),
            ("one", "Ready", 2),
            ("two", "CreatingHelmRelease", 2),
            ("two", "Failed", 2),
            ("three", "CreatingHelmRelease", 2),
            ("four", "CreatingHelmRelease", 2),
            ("four", "Deleting", 2),
            ("four", "Deleted", 2),
        ];
        let mut before = StyrminDeploymentStatus::default();
        for (instance, phase, corrections) in way {
            let after = status(instance, phase, corrections);
            phases.written("uid", &before, &after);
            before = after;
        }
        for outcome in ["ready", "failed", "superseded", "deleted"] {
            let line = format!("styrmin_agent_rollouts_total{{outcome=\"{outcome}\"}}");
            assert_eq!(value(&line), 1.0, "{outcome}");
        }
        for (phase, times) in [("CreatingPrerequisites", 1.0), ("CreatingHelmRelease", 3.0), ("Deleting", 1.0)] {
            let line = format!("styrmin_agent_phase_seconds_count{{phase=\"{phase}\"}}");
            assert_eq!(value(&line), times, "{phase}");
        }
        assert_eq!(value("styrmin_agent_drift_corrections_total"), 2.0);
        assert!(phases.since.lock().unwrap().is_empty(), "what has ended is forgotten");
    }

    #[test]
    fn passes_and_the_queue_are_counted() {
        pass("tested", Duration::from_millis(20));
        waiting(7);
        waited(Duration::from_millis(2));
        assert_eq!(value("styrmin_agent_passes_total{result=\"tested\"}"), 1.0);
        assert_eq!((value("styrmin_agent_queue"), value("styrmin_agent_queue_seconds_count")), (7.0, 1.0));
        assert_eq!(value("styrmin_agent_pass_seconds_bucket{le=\"0.05\"}"), 1.0);
    }

    #[test]
    fn calls_are_named_as_rights_are() {
        for (method, path, query, verb, resource) in [
            ("GET", "/api/v1/pods", Some("watch=true"), "watch", "pods"),
            ("GET", "/api/v1/pods", Some("limit=500"), "list", "pods"),
            ("GET", "/api/v1/namespaces", None, "list", "namespaces"),
            ("GET", "/api/v1/namespaces/a", None, "get", "namespaces"),
            ("GET", "/api/v1/namespaces/a/pods/b/log", None, "get", "pods/log"),
            (
                "PATCH",
                "/apis/styrmin.io/v1alpha1/namespaces/a/styrmindeployments/b/status",
                None,
                "patch",
                "styrmindeployments/status",
            ),
            (
                "POST",
                "/apis/apps/v1/namespaces/a/controllerrevisions",
                Some("fieldManager=x"),
                "create",
                "controllerrevisions",
            ),
            ("DELETE", "/api/v1/namespaces/a", None, "delete", "namespaces"),
            ("GET", "/version", None, "get", ""),
        ] {
            assert_eq!(what(method, path, query), (verb, resource.to_owned()), "{method} {path}");
        }
    }
}
