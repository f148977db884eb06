//! An HTTP proxy between an agent and the API server, which a test makes lose, refuse and repeat.
//!
//! Plain HTTP comes in, with the agent's token; HTTPS goes out. Every call is recorded. Nothing happens to
//! a call until a fault is armed, and each fault happens once. Leases and events are left alone: a fault of
//! theirs says nothing about the operator. Connections that are upgraded (exec) do not pass.

use super::ports::Port;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::serve::ListenerExt as _;
use http::{Method, StatusCode, header};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// Parts of a query that differ between two calls for the same.
const VOLATILE: [&str; 7] = [
    "resourceVersion",
    "resourceVersionMatch",
    "timeoutSeconds",
    "allowWatchBookmarks",
    "sendInitialEvents",
    "limit",
    "continue",
];
/// Headers that belong to one connection. A compressed answer has no lines.
const OF_CONNECTION: [header::HeaderName; 6] = [
    header::HOST,
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
    header::ACCEPT_ENCODING,
    header::UPGRADE,
];
/// How long the first watch after a stale list takes to begin: what it brings would hide the list.
const BEHIND: Duration = Duration::from_millis(500);

/// What a call does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Reads one object.
    Get,
    /// Reads many.
    List,
    /// Follows many.
    Watch,
    /// Changes something.
    Write,
}

/// A call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Its method.
    pub method: Method,
    /// Its path.
    pub path: String,
    /// Its query without what differs between two calls for the same.
    pub query: String,
    /// What it does.
    pub class: Class,
}

impl Call {
    fn of(request: &Request) -> Self {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let whole = request.uri().query().unwrap_or_default();
        let stays = |part: &&str| !part.is_empty() && !VOLATILE.contains(&part.split('=').next().unwrap_or_default());
        let query: Vec<&str> = whole.split('&').filter(stays).collect();
        let watches = query.iter().any(|part| ["watch=1", "watch=true"].contains(part));
        let class = match () {
            () if method != Method::GET => Class::Write,
            () if watches => Class::Watch,
            () if names_one(&path) => Class::Get,
            () => Class::List,
        };
        Self { method, path, query: query.join("&"), class }
    }

    /// What two calls for the same have in common.
    #[must_use]
    pub fn key(&self) -> String {
        format!("{} {}?{}", self.method, self.path, self.query)
    }

    /// It is about a lease or an event.
    fn is_aside(&self) -> bool {
        self.path.contains("/coordination.k8s.io/") || self.path.ends_with("/events") || self.path.contains("/events/")
    }

    /// A write that counts.
    fn counts(&self) -> bool {
        self.class == Class::Write && !self.is_aside()
    }
}

/// Whether a path names one object, and not a collection of them.
fn names_one(path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let below = match parts.as_slice() {
        ["api", _, below @ ..] | ["apis", _, _, below @ ..] => below,
        _ => return true,
    };
    match below {
        ["namespaces", _, _, rest @ ..] => !rest.is_empty(),
        below => below.len() > 1,
    }
}

/// Waits for a write.
struct AtWrite {
    /// Writes until it.
    left: usize,
    /// Its answer waits for this; without, it is lost.
    until: Option<oneshot::Receiver<()>>,
    tell: oneshot::Sender<Call>,
}

/// Keeps a write back.
struct Late {
    path: String,
    /// Writes until it.
    left: usize,
    /// It goes on with this.
    until: oneshot::Receiver<()>,
    tell: oneshot::Sender<Call>,
}

type Wanted = Box<dyn Fn(&Value) -> bool + Send>;

#[derive(Default)]
struct Faults {
    at_write: Option<AtWrite>,
    late: Option<Late>,
    /// Nothing gets through any more.
    silent: bool,
    /// Everything is refused.
    away: bool,
    /// The status, the keys of the calls that are let through next, and those that got it.
    refusal: Option<(StatusCode, BTreeSet<String>, Vec<String>)>,
    /// The answer of the next list of a path.
    stale: Option<(String, String, oneshot::Sender<()>)>,
    /// The path whose next watch comes late.
    behind: Option<String>,
    lost_event: Option<(Wanted, oneshot::Sender<Value>)>,
    calls: Vec<Call>,
}

struct Inner {
    client: reqwest::Client,
    target: String,
    faults: Mutex<Faults>,
    broken: watch::Sender<u64>,
}

impl Inner {
    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The proxy; ends with the value.
pub struct Proxy {
    port: Port,
    inner: Arc<Inner>,
    serving: JoinHandle<()>,
}

impl Proxy {
    /// Opens a proxy in front of the API server on a port on loopback.
    pub(super) async fn open(target: u16, authority: &Path) -> Self {
        let authority = reqwest::Certificate::from_pem(&std::fs::read(authority).unwrap()).unwrap();
        let inner = Arc::new(Inner {
            client: reqwest::Client::builder().tls_certs_only([authority]).no_proxy().build().unwrap(),
            target: format!("https://127.0.0.1:{target}"),
            faults: Mutex::default(),
            broken: watch::channel(0).0,
        });
        let port = Port::claim();
        let listener = TcpListener::bind(("127.0.0.1", port.number())).await.unwrap().tap_io(|stream| {
            let _ = stream.set_nodelay(true);
        });
        let router = axum::Router::new().fallback(answer).with_state(Arc::clone(&inner));
        let serving = tokio::spawn(async move {
            let _ = axum::serve(listener, router).await;
        });
        Self { port, inner, serving }
    }

    /// A kubeconfig for the bearer of a token, who goes this way.
    #[must_use]
    pub fn kubeconfig(&self, folder: &Path, name: &str, token: &str) -> PathBuf {
        let path = folder.join(format!("{name}.kubeconfig"));
        let content = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{ "name": "test", "cluster": { "server": format!("http://{}", self.port.address()) } }],
            "users": [{ "name": "test", "user": { "token": token } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
        });
        std::fs::write(&path, content.to_string()).unwrap();
        path
    }

    /// Loses the answer of the n-th write from now on. The API server has applied it when this is told;
    /// from then on nothing gets through until [`Self::resume`], so that the agent can be killed right there.
    #[must_use]
    pub fn after_write(&self, n: usize) -> oneshot::Receiver<Call> {
        self.at_write(n, None)
    }

    /// Tells when the API server has applied the n-th write from now on. The answer waits for the sender:
    /// what happens until then, the agent does not expect.
    #[must_use]
    pub fn hold_write(&self, n: usize) -> (oneshot::Receiver<Call>, oneshot::Sender<()>) {
        let (answer, until) = oneshot::channel();
        (self.at_write(n, Some(until)), answer)
    }

    /// Keeps the n-th write on a path from the API server until the sender says so; tells when it has come.
    #[must_use]
    pub fn late_write(&self, n: usize, path: &str) -> (oneshot::Receiver<Call>, oneshot::Sender<()>) {
        let ((tell, told), (go, until)) = (oneshot::channel(), oneshot::channel());
        self.inner.faults().late = Some(Late { path: path.to_owned(), left: n, until, tell });
        (told, go)
    }

    fn at_write(&self, n: usize, until: Option<oneshot::Receiver<()>>) -> oneshot::Receiver<Call> {
        assert!(n > 0, "writes are counted from 1");
        let (tell, told) = oneshot::channel();
        self.inner.faults().at_write = Some(AtWrite { left: n, until, tell });
        told
    }

    /// Lets calls through again. Those that came in between are never answered.
    pub fn resume(&self) {
        self.inner.faults().silent = false;
    }

    /// From now on refuses everything and ends all watches, or lets calls through again.
    pub fn away(&self, away: bool) {
        self.inner.faults().away = away;
        if away {
            self.break_watches();
        }
    }

    /// Answers every call with `status` when it is made for the first time from now on, and every write each time that
    /// it is made until it is made again.
    pub fn fail_each(&self, status: StatusCode) {
        self.inner.faults().refusal = Some((status, BTreeSet::new(), Vec::new()));
    }

    /// The calls that were answered by [`Self::fail_each`].
    #[must_use]
    pub fn failed(&self) -> Vec<String> {
        self.inner.faults().refusal.iter().flat_map(|(.., refused)| refused.iter().cloned()).collect()
    }

    /// Answers the next list of a path with an older one, and keeps the watch that follows back a while.
    #[must_use]
    pub fn stale_list(&self, path: &str, list: String) -> oneshot::Receiver<()> {
        let (tell, told) = oneshot::channel();
        self.inner.faults().stale = Some((path.to_owned(), list, tell));
        told
    }

    /// Swallows the next event of a watch that is as wanted; gives it when that has happened.
    #[must_use]
    pub fn drop_event(&self, wanted: impl Fn(&Value) -> bool + Send + 'static) -> oneshot::Receiver<Value> {
        let (tell, told) = oneshot::channel();
        self.inner.faults().lost_event = Some((Box::new(wanted), tell));
        told
    }

    /// Ends all watches as expired, so that everything is listed anew.
    pub fn break_watches(&self) {
        self.inner.broken.send_modify(|count| *count += 1);
    }

    /// Takes back whatever is armed and has not happened.
    pub fn disarm(&self) {
        let faults = &mut *self.inner.faults();
        let calls = std::mem::take(&mut faults.calls);
        *faults = Faults { calls, ..Faults::default() };
    }

    /// Every call until now that reached the API server.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.inner.faults().calls.clone()
    }

    /// The writes among them that count.
    #[must_use]
    pub fn writes(&self) -> Vec<Call> {
        self.inner.faults().calls.iter().filter(|call| call.counts()).cloned().collect()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.serving.abort();
        self.break_watches();
    }
}

/// What the API server says when it refuses.
fn refusal(status: StatusCode) -> Value {
    let reason = match status {
        StatusCode::CONFLICT => "Conflict",
        StatusCode::GONE => "Expired",
        StatusCode::TOO_MANY_REQUESTS => "TooManyRequests",
        _ => "InternalError",
    };
    json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "refused by a test", "reason": reason, "code": status.as_u16() })
}

fn json_answer(status: StatusCode, body: impl Into<Body>) -> Response {
    let mut answer = Response::builder().status(status).header(header::CONTENT_TYPE, "application/json");
    if status == StatusCode::TOO_MANY_REQUESTS {
        answer = answer.header(header::RETRY_AFTER, "1");
    }
    answer.body(body.into()).unwrap()
}

/// What happens to a call.
enum Fate {
    Silence,
    Answer(Response),
    Pass { late: bool, last_words: Option<AtWrite>, kept: Option<Late> },
}

fn fate(inner: &Inner, call: &Call) -> Fate {
    let faults = &mut *inner.faults();
    if faults.silent {
        return Fate::Silence;
    }
    if faults.away {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        return Fate::Answer(json_answer(status, refusal(status).to_string()));
    }
    if let Some((status, calls, refused)) = faults.refusal.as_mut().filter(|_| !call.is_aside()) {
        if calls.insert(call.key()) {
            refused.push(call.key());
            return Fate::Answer(json_answer(*status, refusal(*status).to_string()));
        }
        if call.class == Class::Write {
            calls.remove(&call.key());
        }
    }
    faults.calls.push(call.clone());
    if call.class == Class::List
        && let Some((path, list, tell)) = faults.stale.take_if(|(path, ..)| *path == call.path)
    {
        faults.behind = Some(path);
        let _ = tell.send(());
        return Fate::Answer(json_answer(StatusCode::OK, list));
    }
    let late = call.class == Class::Watch && faults.behind.take_if(|path| *path == call.path).is_some();
    let last_words = faults.at_write.as_mut().filter(|_| call.counts()).is_some_and(|wait| {
        wait.left -= 1;
        wait.left == 0
    });
    let kept = faults.late.as_mut().filter(|wait| call.class == Class::Write && wait.path == call.path);
    let kept = kept.is_some_and(|wait| {
        wait.left -= 1;
        wait.left == 0
    });
    let (last_words, kept) = (faults.at_write.take_if(|_| last_words), faults.late.take_if(|_| kept));
    Fate::Pass { late, last_words, kept }
}

async fn answer(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    let call = Call::of(&request);
    let last_words = match fate(&inner, &call) {
        // It goes when the agent closes the connection.
        Fate::Silence => return std::future::pending().await,
        Fate::Answer(answer) => return answer,
        Fate::Pass { late, last_words, kept } => {
            if late {
                tokio::time::sleep(BEHIND).await;
            }
            if let Some(Late { until, tell, .. }) = kept {
                let _ = tell.send(call.clone());
                let _ = until.await;
            }
            last_words
        }
    };
    let passed = pass(&inner, &call, request).await;
    if let Some(AtWrite { until, tell, .. }) = last_words {
        inner.faults().silent = until.is_none();
        let _ = tell.send(call);
        match until {
            None => return std::future::pending().await,
            Some(until) => {
                let _ = until.await;
            }
        }
    }
    passed.unwrap_or_else(|error| json_answer(StatusCode::BAD_GATEWAY, error.to_string()))
}

async fn pass(inner: &Arc<Inner>, call: &Call, request: Request) -> Result<Response, reqwest::Error> {
    let (parts, body) = request.into_parts();
    let place = parts.uri.path_and_query().map_or("/", |place| place.as_str());
    let mut headers = parts.headers;
    for name in OF_CONNECTION {
        headers.remove(name);
    }
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default();
    let outer = inner.client.request(parts.method, format!("{}{place}", inner.target)).headers(headers).body(body);
    let found = outer.send().await?;
    let status = found.status();
    let mut headers = found.headers().clone();
    for name in OF_CONNECTION {
        headers.remove(name);
    }
    let body = if call.class == Class::Watch && status.is_success() {
        Body::from_stream(events(Arc::clone(inner), found))
    } else {
        Body::from(found.bytes().await?)
    };
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    *answer.headers_mut() = headers;
    Ok(answer)
}

/// The events of a watch, line by line.
fn events(
    inner: Arc<Inner>,
    answer: reqwest::Response,
) -> impl futures::Stream<Item = Result<Vec<u8>, reqwest::Error>> {
    let broken = inner.broken.subscribe();
    futures::stream::unfold(Some((answer, Vec::new(), broken)), move |state| {
        let inner = Arc::clone(&inner);
        async move {
            let (mut answer, mut buffer, mut broken) = state?;
            loop {
                if let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
                    let rest = buffer.split_off(end + 1);
                    let line = std::mem::replace(&mut buffer, rest);
                    if !swallowed(&inner, &line) {
                        return Some((Ok(line), Some((answer, buffer, broken))));
                    }
                    continue;
                }
                tokio::select! {
                    _ = broken.changed() => {
                        let expired = json!({ "type": "ERROR", "object": refusal(StatusCode::GONE) });
                        return Some((Ok(format!("{expired}\n").into_bytes()), None));
                    }
                    chunk = answer.chunk() => match chunk {
                        Ok(Some(more)) => buffer.extend_from_slice(&more),
                        Ok(None) => return None,
                        Err(error) => return Some((Err(error), None)),
                    },
                }
            }
        }
    })
}

/// Whether an event shall not arrive.
fn swallowed(inner: &Inner, line: &[u8]) -> bool {
    let faults = &mut *inner.faults();
    let Some((wanted, _)) = &faults.lost_event else { return false };
    let Ok(event) = serde_json::from_slice::<Value>(line) else { return false };
    if !wanted(&event) {
        return false;
    }
    if let Some((_, tell)) = faults.lost_event.take() {
        let _ = tell.send(event);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_told_apart() {
        for (method, place, class) in [
            ("GET", "/api/v1/namespaces/a", Class::Get),
            ("GET", "/api/v1/namespaces", Class::List),
            ("GET", "/api/v1/namespaces/a/pods?limit=5", Class::List),
            ("GET", "/api/v1/namespaces/a/pods/b/log", Class::Get),
            ("GET", "/apis/apps/v1/deployments?timeoutSeconds=290&watch=true", Class::Watch),
            ("PATCH", "/apis/apps/v1/namespaces/a/deployments/b", Class::Write),
        ] {
            let request = Request::builder().method(method).uri(place).body(Body::empty()).unwrap();
            assert_eq!(Call::of(&request).class, class, "{method} {place}");
        }
        let key = |place: &str| Call::of(&Request::get(place).body(Body::empty()).unwrap()).key();
        assert_eq!(key("/api/v1/pods?resourceVersion=7&labelSelector=a"), key("/api/v1/pods?labelSelector=a&limit=5"));
        assert_ne!(key("/api/v1/pods?watch=true"), key("/api/v1/pods"));
    }
}
