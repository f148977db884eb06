//! The embedded Git host: smart HTTP at `/git/<cluster>.git`, answered by `git http-backend`.
//!
//! A cluster's agent may read its own repository; administrators may read and push. Only the three
//! requests of the smart protocol are let through.

use super::{AppState, caller, problem};
use crate::auth::Caller;
use crate::repository::Wake;
use crate::store::Target;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use rustix::process::{Pid, Signal, kill_process_group};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_util::io::ReaderStream;
use tracing::{error, warn};

/// Most bytes of a push.
const PUSH_MAX: usize = 512 << 20;
/// Longest time of one request, as a whole.
const LIMIT: Duration = Duration::from_secs(600);
/// Longest wait for one of the backends.
const QUEUE_LIMIT: Duration = Duration::from_secs(30);
/// Most backends at once.
static BACKENDS: Semaphore = Semaphore::const_new(32);
/// Most lines of the backend's headers.
const HEADERS_MAX: usize = 64;

pub(super) async fn serve(
    State(state): State<Arc<AppState>>,
    Path((repository, rest)): Path<(String, String)>,
    request: Request,
) -> Response {
    let (request, body) = request.into_parts();
    let caller = match caller(&state.api, &request.headers).await {
        Ok(caller) => caller,
        Err(response) => return *response,
    };
    let query = request.uri.query().unwrap_or_default().to_owned();
    let pushes = match (&request.method, rest.as_str(), query.as_str()) {
        (&Method::GET, "info/refs", "service=git-upload-pack") | (&Method::POST, "git-upload-pack", "") => false,
        (&Method::GET, "info/refs", "service=git-receive-pack") | (&Method::POST, "git-receive-pack", "") => true,
        _ => return problem(StatusCode::NOT_FOUND, "only Git's smart HTTP protocol is served here"),
    };
    let name = repository.strip_suffix(".git").unwrap_or(&repository);
    let cluster = match state.api.store.cluster(name).await {
        Ok(found) => found.filter(|cluster| cluster.git_url.is_none()),
        Err(error) => {
            error!(%error, "a repository cannot be looked up");
            return problem(StatusCode::SERVICE_UNAVAILABLE, "the database does not answer");
        }
    };
    // A foreign agent learns nothing of what exists.
    if let Caller::Agent { cluster: own } = &caller
        && (pushes || cluster.as_ref().is_none_or(|cluster| cluster.id != *own))
    {
        return problem(
            StatusCode::FORBIDDEN,
            "an agent's token reads the repository of its own cluster, and nothing else",
        );
    }
    let Some(cluster) = cluster else {
        return problem(StatusCode::NOT_FOUND, &format!("this server hosts no repository of a cluster \"{name}\""));
    };
    let host = state.api.host.clone();
    let id = cluster.id.clone();
    let ensured = tokio::task::spawn_blocking(move || host.ensure(&id).map(|_| ())).await;
    if !matches!(ensured, Ok(Ok(()))) {
        error!(cluster = cluster.name, "the hosted repository cannot be opened");
        return problem(StatusCode::INTERNAL_SERVER_ERROR, "the repository cannot be opened");
    }

    let Ok(Ok(permit)) = tokio::time::timeout(QUEUE_LIMIT, BACKENDS.acquire()).await else {
        return problem(StatusCode::SERVICE_UNAVAILABLE, "too many Git requests at this moment; try again");
    };
    let mut command = state.api.host.backend(&cluster.id, &rest);
    let text = |name: HeaderName| request.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    command
        .env("REQUEST_METHOD", request.method.as_str())
        .env("QUERY_STRING", &query)
        .env("CONTENT_TYPE", text(header::CONTENT_TYPE))
        .env("HTTP_CONTENT_ENCODING", text(header::CONTENT_ENCODING))
        .env("GIT_PROTOCOL", text(HeaderName::from_static("git-protocol")))
        .env("REMOTE_USER", if pushes { "administrator" } else { "reader" })
        .stdin(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            error!(%error, "git http-backend cannot be started");
            return problem(StatusCode::INTERNAL_SERVER_ERROR, "the git program cannot be started");
        }
    };
    if let Some(input) = child.stdin.take() {
        tokio::spawn(feed(body, input));
    }
    let output = child.stdout.take();
    let target = Target { repository: cluster.repository.clone(), branch: cluster.branch.clone() };
    let pushed = (pushes && request.method == Method::POST).then(|| (state.api.wake.clone(), target));
    tokio::spawn(reap(child, permit, pushed));
    match tokio::time::timeout(LIMIT, answer(output)).await {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => {
            warn!(%error, cluster = cluster.name, "git http-backend failed");
            problem(StatusCode::BAD_GATEWAY, "the git program did not answer")
        }
        Err(_) => problem(StatusCode::GATEWAY_TIMEOUT, "the git program did not answer in time"),
    }
}

/// Hands the request's body to the backend. A body that is too large or breaks off ends its input,
/// and the backend refuses the torn pack.
async fn feed(body: Body, mut input: ChildStdin) {
    let mut chunks = body.into_data_stream();
    let mut total = 0;
    let copy = async {
        while let Some(Ok(chunk)) = chunks.next().await {
            total += chunk.len();
            if total > PUSH_MAX || input.write_all(&chunk).await.is_err() {
                break;
            }
        }
    };
    let _ = tokio::time::timeout(LIMIT, copy).await;
}

/// Waits for the backend and ends it, with its children, when it takes too long. A client that
/// goes away closes the backend's output, which ends it too. After a push the writer looks at what came.
async fn reap(mut child: Child, permit: SemaphorePermit<'static>, pushed: Option<(Wake, Target)>) {
    let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if tokio::time::timeout(LIMIT, child.wait()).await.is_err()
        && let Some(group) = group
    {
        let _ = kill_process_group(group, Signal::KILL);
    }
    if let Some((wake, target)) = pushed {
        wake.look(&target);
    }
    drop(permit);
}

/// The backend's answer: CGI headers, then the body as it comes.
async fn answer(output: Option<ChildStdout>) -> std::io::Result<Response> {
    let missing = || std::io::Error::other("no output");
    let mut output = BufReader::new(output.ok_or_else(missing)?);
    let mut status = StatusCode::OK;
    let mut headers = Vec::new();
    for _ in 0..HEADERS_MAX {
        let mut line = String::new();
        if output.read_line(&mut line).await? == 0 {
            return Err(std::io::Error::other("its output ended within the headers"));
        }
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        let Some((name, value)) = line.split_once(": ") else { continue };
        if name.eq_ignore_ascii_case("status") {
            let code = value.split(' ').next().and_then(|code| code.parse().ok());
            status = code.and_then(|code| StatusCode::from_u16(code).ok()).unwrap_or(StatusCode::BAD_GATEWAY);
        } else if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            headers.push((name, value));
        }
    }
    let mut response = (status, Body::from_stream(ReaderStream::new(output))).into_response();
    response.headers_mut().extend(headers);
    Ok(response)
}
