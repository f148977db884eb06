//! A Git server that can be told to misbehave: smart HTTP in front of a real bare repository.

use crate::plane::Port;
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::task::JoinHandle;

/// Answers nothing at all.
pub const HANG: u16 = 1;
/// Takes the push, then breaks off without an answer.
pub const LOSE_ANSWER: u16 = 2;
/// Lets everybody read, and nobody write.
pub const READ_ONLY: u16 = 3;

/// The server. While `down`, its port is closed.
pub struct Remote {
    /// The bare repository.
    pub repository: PathBuf,
    port: Port,
    state: Arc<Behaviour>,
    serving: Mutex<Option<JoinHandle<()>>>,
}

struct Behaviour {
    repository: PathBuf,
    status: AtomicU16,
    requests: AtomicUsize,
    password: String,
}

impl Remote {
    /// Serves `repository` to everybody.
    pub async fn open(repository: &Path) -> Self {
        Self::start(repository, "").await
    }

    /// Serves `repository` to whoever has `password`.
    pub async fn start(repository: &Path, password: &str) -> Self {
        let port = Port::claim();
        let state = Arc::new(Behaviour {
            repository: repository.to_owned(),
            status: AtomicU16::new(200),
            requests: AtomicUsize::new(0),
            password: password.to_owned(),
        });
        let remote = Self { repository: repository.to_owned(), port, state, serving: Mutex::new(None) };
        remote.up().await;
        remote
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}/r.git", self.port.address())
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> std::net::SocketAddr {
        self.port.address().parse().unwrap()
    }

    /// Opens the port.
    pub async fn up(&self) {
        let listener = TcpListener::bind(self.port.address()).await.unwrap();
        let app = Router::new().fallback(answer).with_state(Arc::clone(&self.state));
        let serving = tokio::spawn(async move {
            axum::serve(listener, app).await.unwrap();
        });
        *self.serving.lock().unwrap() = Some(serving);
    }

    /// Closes the port.
    pub async fn down(&self) {
        let serving = self.serving.lock().unwrap().take();
        if let Some(serving) = serving {
            serving.abort();
            let _ = serving.await;
        }
    }

    /// Answers every request with this status, or 200 for good service, or [`HANG`],
    /// [`LOSE_ANSWER`], [`READ_ONLY`].
    pub fn behave(&self, status: u16) {
        self.state.status.store(status, Ordering::SeqCst);
    }

    /// Number of requests so far.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.state.requests.load(Ordering::SeqCst)
    }
}

async fn answer(State(state): State<Arc<Behaviour>>, request: Request) -> Response {
    state.requests.fetch_add(1, Ordering::SeqCst);
    let status = state.status.load(Ordering::SeqCst);
    match status {
        HANG => {
            tokio::time::sleep(Duration::from_secs(120)).await;
        }
        READ_ONLY if request.uri().to_string().contains("git-receive-pack") => {
            return (StatusCode::FORBIDDEN, "you may not write").into_response();
        }
        200 | LOSE_ANSWER | READ_ONLY => {}
        other => {
            return (StatusCode::from_u16(other).unwrap(), "no").into_response();
        }
    }
    let expected =
        format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!("git:{}", state.password)));
    let given = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    if !state.password.is_empty() && given != Some(&expected) {
        return (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Basic realm=\"test\"")], "who are you?")
            .into_response();
    }
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().trim_start_matches("/r.git").to_owned();
    let pushes = path == "/git-receive-pack";
    let text = |headers: &HeaderMap, name: header::HeaderName| {
        headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    };
    let mut child = Command::new("git")
        .args(["-c", "http.receivepack=true", "-c", "safe.directory=*", "http-backend"])
        .env("GIT_PROJECT_ROOT", &state.repository)
        .env("GIT_HTTP_EXPORT_ALL", "1")
        .env("PATH_INFO", path)
        .env("REQUEST_METHOD", parts.method.as_str())
        .env("QUERY_STRING", parts.uri.query().unwrap_or_default())
        .env("CONTENT_TYPE", text(&parts.headers, header::CONTENT_TYPE))
        .env("HTTP_CONTENT_ENCODING", text(&parts.headers, header::CONTENT_ENCODING))
        .env("REMOTE_USER", "git")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let body = to_bytes(body, 1 << 30).await.unwrap_or_default();
    let mut input = child.stdin.take().unwrap();
    let feed = tokio::spawn(async move {
        let _ = input.write_all(&body).await;
    });
    let output = child.wait_with_output().await.unwrap();
    let _ = feed.await;
    if status == LOSE_ANSWER && pushes {
        // The push has been taken; the connection breaks before anybody hears of it.
        return Response::new(Body::from_stream(futures::stream::once(async {
            Err::<axum::body::Bytes, _>(std::io::Error::other("lost"))
        })));
    }
    let split = output.stdout.windows(4).position(|window| window == b"\r\n\r\n").map_or(0, |at| at + 4);
    let (head, rest) = output.stdout.split_at(split);
    let mut response = Response::new(Body::from(rest.to_vec()));
    for line in String::from_utf8_lossy(head).lines() {
        match line.split_once(": ") {
            Some(("Status", value)) => {
                *response.status_mut() = value[..3].parse().unwrap();
            }
            Some((name, value)) => {
                response.headers_mut().insert(header::HeaderName::try_from(name).unwrap(), value.parse().unwrap());
            }
            None => {}
        }
    }
    response
}
