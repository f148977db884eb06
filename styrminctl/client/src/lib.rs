//! A small client of Styrmin's GraphQL API, for the command line, tests and other programs.
//!
//! It sends a query and gives back `data`, or the first error with its code. It knows nothing of
//! what a query means, so it works with every server of this API.

use serde_json::{Value, json};
use std::sync::Once;
use std::time::Duration;

/// Most bytes of an answer.
const ANSWER_MAX: usize = 64 << 20;

/// Chooses the TLS implementation of the process, unless it has one.
pub fn choose_tls() {
    static ONCE: Once = Once::new();
    // Fails only when the program has chosen one itself, which is as good.
    ONCE.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
}

/// Why a call gave no data.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server could not be reached or broke off.
    #[error("{address}: {cause}")]
    Http {
        /// Address of the server.
        address: String,
        /// The whole chain of causes.
        cause: String,
    },
    /// The server answered, but not with data.
    #[error("{message}")]
    Refused {
        /// For people.
        message: String,
        /// For programs: INVALID, NOT_FOUND, CONFLICT, …
        code: Option<String>,
        /// Everything that came with the error.
        extensions: Value,
        /// HTTP status.
        status: u16,
    },
}

/// A connection to one server, as one caller.
#[derive(Clone)]
pub struct Client {
    address: String,
    token: String,
    http: reqwest::Client,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("address", &self.address).finish_non_exhaustive()
    }
}

/// A task's progress, as [`Client::task`] reads it.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskProgress {
    /// RUNNING, SUCCEEDED, FAILED or SUPERSEDED.
    pub state: String,
    /// The task's own message.
    pub message: Option<String>,
    /// Name, state and message of every step.
    pub steps: Vec<(String, String, Option<String>)>,
}

impl TaskProgress {
    /// Whether its commit is in the repository (or it ended without).
    #[must_use]
    pub fn pushed(&self) -> bool {
        self.ended() || self.steps.first().is_some_and(|(_, state, _)| state == "SUCCEEDED")
    }

    /// Whether it has ended, well or not.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.state != "RUNNING"
    }
}

impl Client {
    /// A client of the server at `address` (`http://host:port`).
    ///
    /// # Errors
    /// When the machine's TLS certificates cannot be read.
    pub fn new(address: &str, token: &str) -> Result<Self, ClientError> {
        choose_tls();
        let address = address.trim_end_matches('/').to_owned();
        let http = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(10))
            .timeout(Duration::from_secs(120))
            .build()
            .map_err(|error| http_error(&address, &error))?;
        Ok(Self { address, token: token.to_owned(), http })
    }

    /// Sends a query or mutation; gives `data`.
    ///
    /// # Errors
    /// When the server cannot be reached, or says no.
    pub async fn execute(&self, query: &str, variables: Value) -> Result<Value, ClientError> {
        let failed = |error: reqwest::Error| http_error(&self.address, &error);
        let response = self
            .http
            .post(format!("{}/graphql", self.address))
            .bearer_auth(&self.token)
            .json(&json!({ "query": query, "variables": variables }))
            .send()
            .await
            .map_err(failed)?;
        let status = response.status().as_u16();
        if response.content_length().is_some_and(|length| length > ANSWER_MAX as u64) {
            return Err(ClientError::Http { address: self.address.clone(), cause: "the answer is too long".into() });
        }
        let body = response.bytes().await.map_err(failed)?;
        let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
        if let Some(error) = answer["errors"].get(0) {
            return Err(ClientError::Refused {
                message: error["message"].as_str().unwrap_or("the server gave no reason").to_owned(),
                code: error["extensions"]["code"].as_str().map(str::to_owned),
                extensions: error["extensions"].clone(),
                status,
            });
        }
        if !answer["data"].is_object() {
            let cause = format!("answered with status {status} and no data; is it a Styrmin server?");
            return Err(ClientError::Http { address: self.address.clone(), cause });
        }
        Ok(answer["data"].clone())
    }

    /// Reads a task.
    ///
    /// # Errors
    /// As [`Self::execute`], or when there is no such task.
    pub async fn task(&self, id: &str) -> Result<TaskProgress, ClientError> {
        let query = "query($id: ID!) { task(id: $id) { state message steps { name state message } } }";
        let data = self.execute(query, json!({ "id": id })).await?;
        let task = &data["task"];
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let Some(state) = text(&task["state"]) else {
            return Err(ClientError::Refused {
                message: format!("task \"{id}\": does not exist"),
                code: Some("NOT_FOUND".into()),
                extensions: Value::Null,
                status: 200,
            });
        };
        let steps = task["steps"].as_array().into_iter().flatten();
        let steps = steps.map(|step| {
            (text(&step["name"]).unwrap_or_default(), text(&step["state"]).unwrap_or_default(), text(&step["message"]))
        });
        Ok(TaskProgress { state, message: text(&task["message"]), steps: steps.collect() })
    }

    /// Waits until `done` holds of a task, looking every `interval`; the last look is given back
    /// even when `limit` is over first.
    ///
    /// # Errors
    /// As [`Self::task`].
    pub async fn wait_for_task(
        &self,
        id: &str,
        done: impl Fn(&TaskProgress) -> bool,
        interval: Duration,
        limit: Duration,
    ) -> Result<TaskProgress, ClientError> {
        let end = tokio::time::Instant::now() + limit;
        loop {
            let task = self.task(id).await?;
            if done(&task) || tokio::time::Instant::now() + interval > end {
                return Ok(task);
            }
            tokio::time::sleep(interval).await;
        }
    }
}

fn http_error(address: &str, error: &reqwest::Error) -> ClientError {
    let mut cause = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        cause.push_str(&format!(": {inner}"));
        source = inner.source();
    }
    ClientError::Http { address: address.to_owned(), cause }
}
