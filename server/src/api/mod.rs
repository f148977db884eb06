//! What the world can call: GraphQL, Git over HTTP, health and metrics.
//!
//! A thin layer over plain functions: it finds out who calls, bounds what comes in, translates
//! errors, and decides nothing. No call without a token, health excepted.

mod error;
mod git_http;
pub mod graphql;
mod objects;

use crate::auth::{self, AuthError, Caller};
use crate::changes::Changes;
use crate::clock::Clock;
use crate::doctor::Doctor;
use crate::drivers::Drivers;
use crate::metrics;
use crate::proposals;
use crate::reports::Reports;
use crate::repository::{Host, Signer, Wake};
use crate::store::{Notice, Store, Target};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use serde_json::json;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tower_http::catch_panic::CatchPanicLayer;
use tracing::{error, info};

/// Most bytes of a GraphQL request: room for the largest context, written as parameters.
pub const BODY_MAX: usize = 4 << 20;
/// Most bytes of an agent's: room for a snapshot of the largest cluster.
pub const REPORT_BODY_MAX: usize = 32 << 20;
/// How many requests larger than [`BODY_MAX`] are worked on at a time: each takes much memory.
const LARGE_REQUESTS: usize = 4;
/// Most bytes of a webhook, and the longest time for one.
const WEBHOOK_MAX: usize = 4 << 20;
const WEBHOOK_LIMIT: Duration = Duration::from_secs(10);
/// Longest time for a GraphQL request.
const REQUEST_LIMIT: Duration = Duration::from_secs(90);

/// What the handlers need.
#[derive(Clone)]
pub struct Api {
    /// Everything that is remembered.
    pub store: Arc<dyn Store>,
    /// Makes changes.
    pub changes: Arc<Changes>,
    /// Takes the agents' reports.
    pub reports: Arc<Reports>,
    /// Known drivers.
    pub drivers: Arc<Drivers>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Hosted repositories.
    pub host: Host,
    /// Told when somebody pushed to one.
    pub wake: Wake,
    /// Signs commits.
    pub signer: Arc<Signer>,
    /// URL of this server, as people reach it.
    pub public_url: String,
    /// Looks at the links to a cluster.
    pub doctor: Doctor,
}

/// All routes.
pub fn router(api: Api) -> Router {
    let schema = graphql::schema(api.clone());
    Router::new()
        .route("/graphql", post(graphql_request))
        .route("/git/{repository}/{*rest}", any(git_http::serve))
        .route("/webhooks/{cluster}", post(webhook))
        .route("/proposals/{id}", get(show_proposal))
        .route("/metrics", get(show_metrics))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .fallback(|| async { problem(StatusCode::NOT_FOUND, "there is nothing here; the API is at /graphql") })
        .layer(CatchPanicLayer::new())
        .layer(middleware::from_fn(observe))
        .with_state(Arc::new(AppState { api, schema, large: Semaphore::new(LARGE_REQUESTS) }))
}

pub(crate) struct AppState {
    pub(crate) api: Api,
    schema: graphql::Schema,
    large: Semaphore,
}

/// An error outside GraphQL, as JSON in GraphQL's shape.
fn problem(status: StatusCode, message: &str) -> Response {
    let body = json!({ "errors": [{ "message": message }] }).to_string();
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Lets in who has a token.
pub(crate) async fn caller(api: &Api, headers: &HeaderMap) -> Result<Caller, Box<Response>> {
    auth::authenticate(api.store.as_ref(), headers).await.map_err(|error| {
        let status = match error {
            AuthError::Missing | AuthError::Unknown => StatusCode::UNAUTHORIZED,
            AuthError::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        if status == StatusCode::SERVICE_UNAVAILABLE {
            error!(%error, "tokens cannot be checked");
        }
        let mut response = problem(status, &error.to_string());
        let challenge = HeaderValue::from_static("Basic realm=\"styrmin\", charset=\"UTF-8\"");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
        Box::new(response)
    })
}

async fn graphql_request(State(state): State<Arc<AppState>>, request: Request) -> Response {
    let caller = match caller(&state.api, request.headers()).await {
        Ok(caller) => caller,
        Err(response) => return *response,
    };
    let most = if matches!(caller, Caller::Agent { .. }) { REPORT_BODY_MAX } else { BODY_MAX };
    let body = axum::body::to_bytes(request.into_body(), most);
    let Ok(Ok(bytes)) = tokio::time::timeout(REQUEST_LIMIT, body).await else {
        return problem(
            StatusCode::PAYLOAD_TOO_LARGE,
            &format!("the request is larger than {most} bytes, or broke off; send less at once"),
        );
    };
    let _turn = if bytes.len() > BODY_MAX {
        match tokio::time::timeout(REQUEST_LIMIT, state.large.acquire()).await {
            Ok(Ok(turn)) => Some(turn),
            _ => return problem(StatusCode::SERVICE_UNAVAILABLE, "too many large requests at once; try again"),
        }
    } else {
        None
    };
    let query = match read_query(bytes).await {
        Ok(query) => query,
        Err(error) => {
            return problem(StatusCode::BAD_REQUEST, &format!("the request is not a GraphQL request as JSON: {error}"));
        }
    };
    match tokio::time::timeout(REQUEST_LIMIT, state.schema.execute(query.data(caller))).await {
        Ok(mut response) => match serde_json::to_string({
            error::explain_limits(&mut response);
            &response
        }) {
            Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
            Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        },
        Err(_) => problem(StatusCode::GATEWAY_TIMEOUT, "the request took too long; ask for less at once"),
    }
}

/// Reads a request; a large one on a thread for such work.
async fn read_query(bytes: Bytes) -> Result<async_graphql::Request, String> {
    let is_small = bytes.len() <= 64 << 10;
    let read = move || serde_json::from_slice(&bytes).map_err(|error| error.to_string());
    if is_small {
        return read();
    }
    tokio::task::spawn_blocking(read).await.map_err(|error| error.to_string())?
}

async fn ready(State(state): State<Arc<AppState>>) -> Response {
    match tokio::time::timeout(Duration::from_secs(5), state.api.store.ping()).await {
        Ok(Ok(())) => "ok".into_response(),
        Ok(Err(error)) => {
            error!(%error, "not ready");
            problem(StatusCode::SERVICE_UNAVAILABLE, "the database does not answer")
        }
        Err(_) => problem(StatusCode::SERVICE_UNAVAILABLE, "the database does not answer in time"),
    }
}

async fn show_metrics(State(state): State<Arc<AppState>>, headers: HeaderMap) -> Response {
    match caller(&state.api, &headers).await {
        Ok(Caller::Administrator(_)) => {}
        Ok(Caller::Agent { .. }) => return problem(StatusCode::FORBIDDEN, "an agent's token does not open metrics"),
        Err(response) => return *response,
    }
    metrics_text(state.api.store.as_ref()).await
}

/// Serves `/metrics` without a token at an address of its own, which a network policy can guard, until `stop`.
///
/// # Errors
/// When the address cannot be listened on.
pub async fn serve_metrics(address: SocketAddr, store: Arc<dyn Store>, stop: CancellationToken) -> std::io::Result<()> {
    let show = async |State(store): State<Arc<dyn Store>>| metrics_text(store.as_ref()).await;
    let router = Router::new().route("/metrics", get(show)).with_state(store);
    let listener = TcpListener::bind(address).await?;
    info!(%address, "metrics");
    tokio::spawn(async move {
        let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await;
        if let Err(error) = served {
            error!(%error, "metrics are not served any more");
        }
    });
    Ok(())
}

async fn metrics_text(store: &dyn Store) -> Response {
    let waiting = store.outbox_size().await.unwrap_or(-1);
    match metrics::text(waiting) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}

/// What reviewers read of a proposal, whole: a forge may take less.
async fn show_proposal(State(state): State<Arc<AppState>>, Path(id): Path<String>, headers: HeaderMap) -> Response {
    match caller(&state.api, &headers).await {
        Ok(Caller::Administrator(_)) => {}
        Ok(Caller::Agent { .. }) => return problem(StatusCode::FORBIDDEN, "an agent's token does not open proposals"),
        Err(response) => return *response,
    }
    let Api { changes, public_url, .. } = &state.api;
    let text = async {
        match changes.scene(&id).await? {
            Some(scene) => Ok(Some(proposals::text(changes, &scene, public_url, usize::MAX).await?)),
            None => Ok::<_, crate::changes::ChangeError>(None),
        }
    };
    match tokio::time::timeout(REQUEST_LIMIT, text).await {
        Ok(Ok(Some(text))) => {
            let body = format!("# {}\n\n{}", text.title, text.body);
            ([(header::CONTENT_TYPE, "text/markdown; charset=utf-8")], body).into_response()
        }
        Ok(Ok(None)) => problem(StatusCode::NOT_FOUND, "there is no such proposal"),
        Ok(Err(error)) => {
            error!(%error, "a proposal cannot be shown");
            problem(StatusCode::SERVICE_UNAVAILABLE, "the proposal cannot be shown now; try again")
        }
        Err(_) => problem(StatusCode::GATEWAY_TIMEOUT, "it took too long; try again"),
    }
}

/// A forge says that something happened: a reason to look, when it is the forge.
async fn webhook(State(state): State<Arc<AppState>>, Path(cluster): Path<String>, request: Request) -> Response {
    let refused = || problem(StatusCode::FORBIDDEN, "the signature is not that of this cluster's forge");
    let (parts, body) = request.into_parts();
    let found = match state.api.store.cluster(&cluster).await {
        Ok(Some(found)) => found,
        Ok(None) => return refused(),
        Err(error) => {
            error!(%error, "a webhook cannot be checked");
            return problem(StatusCode::SERVICE_UNAVAILABLE, "the database does not answer");
        }
    };
    let secret = state.api.changes.way_in(&found).ok().and_then(|(_, _, secret)| secret).unwrap_or_default();
    let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
    // Nobody else's bodies are read.
    let Some(kind) = found.forge.as_ref().map(|forge| forge.kind).filter(|_| !secret.is_empty()) else {
        return refused();
    };
    if !proposals::webhook::is_signed(kind, header) {
        return refused();
    }
    let body = async {
        let _turn = state.large.acquire().await.ok()?;
        axum::body::to_bytes(body, WEBHOOK_MAX).await.ok()
    };
    let Ok(Some(bytes)) = tokio::time::timeout(WEBHOOK_LIMIT, body).await else {
        return problem(StatusCode::PAYLOAD_TOO_LARGE, "it is too large, or broke off");
    };
    if !proposals::webhook::is_genuine(kind, &secret, &bytes, header) {
        return refused();
    }
    let target = Target { repository: found.repository, branch: found.branch };
    state.api.wake.look(&target);
    state.api.wake.review(&target);
    // Another replica may be the one that works.
    if let Err(error) = state.api.store.tell(&Notice::Look(target)).await {
        error!(%error, "other servers are not told of a webhook");
    }
    StatusCode::NO_CONTENT.into_response()
}

/// Counts and logs every request, without its content.
async fn observe(request: Request<Body>, next: Next) -> Response {
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let started = tokio::time::Instant::now();
    let response = next.run(request).await;
    let status = response.status().as_u16();
    metrics::request(status);
    if !matches!(path.as_str(), "/healthz" | "/readyz") {
        info!(%method, path, status, duration_ms = started.elapsed().as_millis() as u64, "request");
    }
    response
}
