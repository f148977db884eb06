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
    /// RUNNING, SUCCEEDED, FAILED, SUPERSEDED or REJECTED.
    pub state: String,
    /// The task's own message.
    pub message: Option<String>,
    /// Name, state and message of every step.
    pub steps: Vec<(String, String, Option<String>)>,
    /// create, update, upgrade or delete.
    pub workflow: String,
    /// State of its deployment, such as RUNNING.
    pub deployment_state: String,
    /// What its deployment should be doing: RUNNING, STOPPED or DELETING.
    pub deployment_lifecycle: String,
    /// Nothing was asked of the deployment since.
    pub is_newest: bool,
}

/// The step that begins when a change is on the branch that Flux follows.
const FLUX_STEP: &str = "Wait for Flux to apply the commit";

/// How a wait for a change ended: see [`Client::wait_until_done`].
#[derive(Debug, Clone, PartialEq)]
pub struct Waited {
    /// The deployment is as it was asked to be.
    pub succeeded: bool,
    /// Why not.
    pub failure_reason: Option<String>,
    /// The time was over first. The change can still finish.
    pub timed_out: bool,
    /// The last look.
    pub task: TaskProgress,
}

/// A changed configuration of a cluster or environment on its way, as last seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FanOutProgress {
    /// Every deployment was looked at.
    pub is_finished: bool,
    /// Deployments that it changes.
    pub changed: u64,
    /// Deployments that it concerns whose newest change is still on its way, whichever that is.
    pub running: u64,
    /// Those whose newest change failed.
    pub failed: u64,
    /// Those whose proposal was closed without a merge, or that were taken out of it.
    pub rejected: u64,
    /// Deployments that had it already.
    pub unchanged: u64,
    /// Deployment and reason: nothing was tried for it.
    pub skipped: Vec<(String, String)>,
    /// Deployment and reason: it could not be changed.
    pub refused: Vec<(String, String)>,
}

impl FanOutProgress {
    /// How it ended; `None`: it has not.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<(), String>> {
        if !self.is_finished || self.running > 0 {
            return None;
        }
        let (refused, failed) = (self.refused.len(), self.failed);
        Some(match (refused, failed) {
            (0, 0) if self.rejected > 0 => Err(format!("{} deployments: it was not merged", self.rejected)),
            (0, 0) => Ok(()),
            _ => Err(format!("{refused} deployments could not be changed, and of {failed} the newest change failed")),
        })
    }
}

impl TaskProgress {
    /// Whether its commit is in the repository, whatever became of it there.
    #[must_use]
    pub fn pushed(&self) -> bool {
        // A change that people review has two steps up to there.
        let flux = self.steps.iter().position(|(name, ..)| name == FLUX_STEP).unwrap_or(1);
        flux.checked_sub(1).and_then(|last| self.steps.get(last)).is_some_and(|(_, state, _)| state == "SUCCEEDED")
    }

    /// Whether it has ended, well or not.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.state != "RUNNING"
    }

    /// What the deployment is when the change has arrived.
    fn expected(&self) -> &'static str {
        match (self.workflow.as_str(), self.deployment_lifecycle.as_str()) {
            ("delete", _) => "DELETED",
            (_, "STOPPED") => "STOPPED",
            _ => "RUNNING",
        }
    }

    /// How the change of task `id` ended; `None`: it has not. The reasons are those of the reference ("Waiting
    /// for a change from a script").
    #[must_use]
    pub fn outcome(&self, id: &str) -> Option<Result<(), String>> {
        match self.state.as_str() {
            "RUNNING" => None,
            "REJECTED" => {
                let why = self.message.as_deref().unwrap_or("its proposal was closed");
                Some(Err(format!("task {id} was not merged: {why}")))
            }
            "SUPERSEDED" => Some(Err(format!("task {id} was superseded by a later task of the deployment"))),
            "SUCCEEDED" => {
                let (is, expected) = (self.deployment_state.as_str(), self.expected());
                // What a later change made of the deployment says nothing about this one.
                if is == expected || !self.is_newest {
                    return Some(Ok(()));
                }
                let final_states = ["RUNNING", "STOPPED", "FAILED", "DELETED"];
                let reason =
                    || format!("deployment status is {}, expected {}", is.to_lowercase(), expected.to_lowercase());
                final_states.contains(&is).then(|| Err(reason()))
            }
            _ => {
                let failed = self.steps.iter().find(|(_, state, _)| state == "FAILED");
                Some(Err(match failed {
                    Some((name, _, why)) => format!("step \"{name}\" failed: {}", why.as_deref().unwrap_or_default()),
                    None => format!("task {id} failed: {}", self.message.as_deref().unwrap_or_default()),
                }))
            }
        }
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
        self.send(json!({ "query": query, "variables": variables }).to_string().into()).await
    }

    /// Sends a request that is JSON already, piece by piece, for what is too large to be held; gives `data`.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub async fn execute_pieces(
        &self,
        pieces: impl Iterator<Item = String> + Send + Sync + 'static,
    ) -> Result<Value, ClientError> {
        let pieces = futures::stream::iter(pieces.map(Ok::<_, std::convert::Infallible>));
        self.send(reqwest::Body::wrap_stream(pieces)).await
    }

    async fn send(&self, body: reqwest::Body) -> Result<Value, ClientError> {
        let failed = |error: reqwest::Error| http_error(&self.address, &error);
        let response = self
            .http
            .post(format!("{}/graphql", self.address))
            .bearer_auth(&self.token)
            .header(reqwest::header::CONTENT_TYPE, "application/json")
            .body(body)
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
        let query = "query($id: ID!) { task(id: $id) { state message workflow steps { name state message } deployment { state lifecycle newestInstance { task { id } } } } }";
        let data = self.execute(query, json!({ "id": id })).await?;
        let task = &data["task"];
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let Some(state) = text(&task["state"]) else {
            return Err(not_found(format!("task \"{id}\": does not exist")));
        };
        let steps = task["steps"].as_array().into_iter().flatten();
        let steps = steps.map(|step| {
            (text(&step["name"]).unwrap_or_default(), text(&step["state"]).unwrap_or_default(), text(&step["message"]))
        });
        let word = |value: &Value| text(value).unwrap_or_default();
        Ok(TaskProgress {
            state,
            message: text(&task["message"]),
            steps: steps.collect(),
            workflow: word(&task["workflow"]),
            deployment_state: word(&task["deployment"]["state"]),
            deployment_lifecycle: word(&task["deployment"]["lifecycle"]),
            is_newest: task["deployment"]["newestInstance"]["task"]["id"] == id,
        })
    }

    /// Reads a fan-out.
    ///
    /// # Errors
    /// As [`Self::execute`], or when there is no such fan-out.
    pub async fn fan_out(&self, id: &str) -> Result<FanOutProgress, ClientError> {
        let query = "query($id: ID!) { fanOut(id: $id) { state changed { total running rejected } deployments { running failed } unchanged skipped { deploymentId reason } failed { deploymentId reason } } }";
        let data = self.execute(query, json!({ "id": id })).await?;
        let found = &data["fanOut"];
        if found.is_null() {
            return Err(not_found(format!("fan-out \"{id}\": does not exist")));
        }
        let count = |value: &Value| value.as_u64().unwrap_or_default();
        let list = |value: &Value| {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let all = value.as_array().into_iter().flatten();
            all.map(|one| (text(&one["deploymentId"]), text(&one["reason"]))).collect()
        };
        Ok(FanOutProgress {
            is_finished: found["state"] == "FINISHED",
            changed: count(&found["changed"]["total"]),
            // What people review is no deployment's newest change yet.
            running: count(&found["deployments"]["running"]).max(count(&found["changed"]["running"])),
            failed: count(&found["deployments"]["failed"]),
            rejected: count(&found["changed"]["rejected"]),
            unchanged: count(&found["unchanged"]),
            skipped: list(&found["skipped"]),
            refused: list(&found["failed"]),
        })
    }

    /// Waits until a fan-out and all its changes have ended; the last look is given back even when `limit` is
    /// over first. `seen` gets every look.
    ///
    /// # Errors
    /// As [`Self::fan_out`].
    pub async fn wait_for_fan_out(
        &self,
        id: &str,
        interval: Duration,
        limit: Duration,
        mut seen: impl FnMut(&FanOutProgress),
    ) -> Result<FanOutProgress, ClientError> {
        let end = tokio::time::Instant::now() + limit;
        loop {
            let found = self.fan_out(id).await?;
            seen(&found);
            if found.outcome().is_some() || tokio::time::Instant::now() + interval > end {
                return Ok(found);
            }
            tokio::time::sleep(interval).await;
        }
    }

    /// Waits until a change has arrived or failed: until its task has ended and then, when it ended well, until
    /// the deployment is running, stopped, failed or deleted. `seen` gets every look.
    ///
    /// # Errors
    /// As [`Self::task`]. A change that failed is no error: look at [`Waited::failure_reason`].
    pub async fn wait_until_done(
        &self,
        id: &str,
        interval: Duration,
        limit: Duration,
        mut seen: impl FnMut(&TaskProgress),
    ) -> Result<Waited, ClientError> {
        let done = |task: &TaskProgress| {
            seen(task);
            task.outcome(id).is_some()
        };
        let task = self.wait_for_task(id, done, interval, limit).await?;
        let (timed_out, failure_reason) = match task.outcome(id) {
            Some(outcome) => (false, outcome.err()),
            None => (true, Some("wait timeout".to_owned())),
        };
        Ok(Waited { succeeded: failure_reason.is_none(), failure_reason, timed_out, task })
    }

    /// Waits until `done` holds of a task, looking every `interval`; the last look is given back
    /// even when `limit` is over first.
    ///
    /// # Errors
    /// As [`Self::task`].
    pub async fn wait_for_task(
        &self,
        id: &str,
        mut done: impl FnMut(&TaskProgress) -> bool,
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

fn not_found(message: String) -> ClientError {
    ClientError::Refused { message, code: Some("NOT_FOUND".into()), extensions: Value::Null, status: 200 }
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

#[cfg(test)]
mod tests {
    use super::TaskProgress;

    /// State of the task, workflow, steps, message; lifecycle and state of the deployment → the outcome.
    #[test]
    fn waiting_ends_as_the_reference_says() {
        let failing = vec![
            ("Install or upgrade the HelmRelease".to_owned(), "FAILED".to_owned(), Some("no such image".to_owned())),
            ("Wait for the deployment to be ready".to_owned(), "PENDING".to_owned(), None),
        ];
        let fine: Vec<(String, String, Option<String>)> = Vec::new();
        for (state, workflow, steps, lifecycle, deployment, expected) in [
            ("RUNNING", "update", &fine, "RUNNING", "RUNNING", None),
            ("SUCCEEDED", "update", &fine, "RUNNING", "DEPLOYING", None),
            ("SUCCEEDED", "update", &fine, "RUNNING", "RUNNING", Some(Ok(()))),
            ("SUCCEEDED", "update", &fine, "STOPPED", "STOPPED", Some(Ok(()))),
            ("SUCCEEDED", "delete", &fine, "DELETING", "DELETING", None),
            ("SUCCEEDED", "delete", &fine, "DELETING", "DELETED", Some(Ok(()))),
            (
                "SUCCEEDED",
                "update",
                &fine,
                "RUNNING",
                "FAILED",
                Some(Err("deployment status is failed, expected running")),
            ),
            (
                "SUCCEEDED",
                "update",
                &fine,
                "RUNNING",
                "STOPPED",
                Some(Err("deployment status is stopped, expected running")),
            ),
            (
                "SUCCEEDED",
                "update",
                &fine,
                "DELETING",
                "DELETED",
                Some(Err("deployment status is deleted, expected running")),
            ),
            (
                "SUPERSEDED",
                "update",
                &fine,
                "RUNNING",
                "RUNNING",
                Some(Err("task t was superseded by a later task of the deployment")),
            ),
            (
                "FAILED",
                "update",
                &failing,
                "RUNNING",
                "FAILED",
                Some(Err("step \"Install or upgrade the HelmRelease\" failed: no such image")),
            ),
            ("FAILED", "update", &fine, "RUNNING", "FAILED", Some(Err("task t failed: why"))),
        ] {
            let task = TaskProgress {
                state: state.into(),
                message: Some("why".into()),
                steps: steps.clone(),
                workflow: workflow.into(),
                deployment_state: deployment.into(),
                deployment_lifecycle: lifecycle.into(),
                is_newest: true,
            };
            let expected = expected.map(|outcome: Result<(), &str>| outcome.map_err(str::to_owned));
            assert_eq!(task.outcome("t"), expected, "{task:?}");
            let older = TaskProgress { is_newest: false, ..task };
            let expected = if state == "SUCCEEDED" { Some(Ok(())) } else { expected };
            assert_eq!(older.outcome("t"), expected, "whatever a later change made of it: {older:?}");
        }
    }
}
