//! What an agent and a server of two versions say to each other: recorded with one build, replayed with the next.

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// One request of an agent and the server's answer.
#[derive(Debug, Clone)]
pub struct Exchange {
    /// The GraphQL request.
    pub request: Value,
    /// The answer.
    pub response: Value,
}

impl Exchange {
    /// The field that is asked for: `reportPodStatuses`.
    #[must_use]
    pub fn field(&self) -> String {
        field(&self.request)
    }
}

/// The field that a request asks for.
#[must_use]
pub fn field(request: &Value) -> String {
    let query = request["query"].as_str().unwrap_or_default();
    let body = query.split_once('{').map_or("", |(_, body)| body).trim_start();
    let body = body.strip_prefix("report:").unwrap_or(body).trim_start();
    body.chars().take_while(|c| c.is_alphanumeric()).collect()
}

/// The file of a recording: `agent-before` is what the agent of the build before said, `server-before` what the server
/// of the build before answered to the agent of its next build.
#[must_use]
pub fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("traffic").join(format!("{name}.jsonl"))
}

/// A recording.
#[must_use]
pub fn recorded(name: &str) -> Vec<Exchange> {
    let text = std::fs::read_to_string(file(name)).unwrap();
    let line = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        Exchange { request: value["request"].take(), response: value["response"].take() }
    };
    text.lines().map(line).collect()
}

type Said = Arc<Mutex<Vec<Exchange>>>;

/// A server that hands everything on to another and notes it, or answers by itself.
pub struct Tap {
    /// Where it listens.
    pub address: String,
    said: Said,
}

impl Tap {
    /// Answers by a function of the request and of how often its field was asked for before.
    pub async fn open<F>(answer: F) -> Self
    where
        F: AsyncTap,
    {
        let said = Said::default();
        let state = Arc::new((answer, Arc::clone(&said)));
        let handle = async |State(state): State<Arc<(F, Said)>>, headers: HeaderMap, body: Bytes| {
            let request: Value = serde_json::from_slice(&body).unwrap_or_default();
            let token = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
            let before = {
                let said = state.1.lock().unwrap_or_else(PoisonError::into_inner);
                said.iter().filter(|one| one.field() == field(&request)).count()
            };
            let response = state.0.answer(&request, token, before).await;
            let exchange = Exchange { request, response: response.clone() };
            state.1.lock().unwrap_or_else(PoisonError::into_inner).push(exchange);
            (StatusCode::OK, axum::Json(response))
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let router = Router::new().fallback(handle).with_state(state);
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, said }
    }

    /// What was said so far.
    #[must_use]
    pub fn exchanges(&self) -> Vec<Exchange> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// How a [`Tap`] answers.
pub trait AsyncTap: Send + Sync + 'static {
    /// Answers a request that came with `token`; `before` of the same field came earlier.
    fn answer(&self, request: &Value, token: &str, before: usize) -> impl Future<Output = Value> + Send;
}

/// Hands on to a server.
pub struct Through {
    /// Its address.
    pub server: String,
}

impl AsyncTap for Through {
    async fn answer(&self, request: &Value, token: &str, _: usize) -> Value {
        let sent = crate::http().post(format!("{}/graphql", self.server)).header(header::AUTHORIZATION, token);
        match sent.json(request).send().await {
            Ok(answer) => answer.json().await.unwrap_or_default(),
            Err(error) => json!({ "errors": [{ "message": error.to_string() }] }),
        }
    }
}
