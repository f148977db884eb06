//! Commands in containers, for the steps of actions. Each runs beside the passes, within its own limit; how
//! it ended is kept here until the step that asked for it has it in the status.

use super::hook::{Execution, HookState};
use super::observe::masked_by;
use super::status::last_words;
use super::{Context, OperatorError, key_of};
use crate::watch::Changed;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, AttachParams};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use styrmin_renderer::spec::StyrminDeployment;
use tokio::io::AsyncReadExt as _;
use tokio::time::Instant;
use tracing::info;

/// Most bytes of a command's output that are kept, from its end: much more than is told, so that a secret is
/// masked as a whole before it is cut.
const OUTPUT_MAX: usize = 64 << 10;
/// Most bytes that are read at a time.
const CHUNK: usize = 8192;
/// So many results are kept; when there are more, those go that have long been noted.
const KEPT: usize = 4096;
/// By then a result is in the status.
const NOTED_BY_THEN: Duration = Duration::from_secs(3600);

/// UID of the object, key of a step and its attempt. The keys of a first rollout are the same for every deployment
/// of a driver, and for one that was made again.
type Which = (String, String, u32);

/// What runs and what has ended.
#[derive(Debug, Default)]
pub(crate) struct Executions {
    /// With the time from which on they are as they are.
    known: Mutex<HashMap<Which, (HookState, Instant)>>,
}

impl Executions {
    /// How far a command is; `None`: this process never began it.
    pub(super) fn get(&self, object: &StyrminDeployment, key: &str, attempt: u32) -> Option<HookState> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&which(object, key, attempt)).map(|(state, _)| state.clone())
    }

    /// What was asked for until now is over: what comes is other steps, or the same ones once more.
    pub(super) fn forget(&self, object: &StyrminDeployment) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(uid, ..), _| Some(uid) != object.metadata.uid.as_ref());
    }

    fn put(&self, which: Which, state: HookState) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= KEPT {
            known.retain(|_, (state, since)| *state == HookState::Running || since.elapsed() < NOTED_BY_THEN);
        }
        known.insert(which, (state, Instant::now()));
    }
}

fn which(object: &StyrminDeployment, key: &str, attempt: u32) -> Which {
    (object.metadata.uid.clone().unwrap_or_default(), key.to_owned(), attempt)
}

/// Begins a command. `secrets` are texts that may not be seen in what it says.
pub(super) fn begin(context: &Arc<Context>, execution: &Execution, object: &StyrminDeployment, secrets: Vec<String>) {
    let Execution { key, attempt, namespace, pod, .. } = execution;
    if context.executions.get(object, key, *attempt).is_some() {
        return;
    }
    let which = which(object, key, *attempt);
    let of = key_of(object);
    info!(namespace, pod, key, attempt, "running a command");
    context.executions.put(which.clone(), HookState::Running);
    let (context, execution) = (Arc::clone(context), execution.clone());
    tokio::spawn(async move {
        let limit = Duration::from_secs(execution.timeout_seconds.into());
        let state = match tokio::time::timeout(limit, run(&context, &execution)).await {
            Ok(Ok(())) => HookState::Succeeded,
            Ok(Err((why, said))) => {
                let [why, said] = [why, said].map(|text| masked_by(&text, &secrets));
                let said = last_words(&said);
                HookState::Failed(if said.is_empty() { why } else { format!("{why}\n{said}") })
            }
            Err(_) => HookState::Failed(format!(
                "the command in container {} of pod {} did not end within {} s",
                execution.container, execution.pod, execution.timeout_seconds
            )),
        };
        context.executions.put(which, state);
        context.watch.tell(Changed::Deployment(of));
    });
}

/// Runs a command; otherwise why it failed, and what it said.
async fn run(context: &Context, execution: &Execution) -> Result<(), (String, String)> {
    let Execution { namespace, pod, container, command, .. } = execution;
    let api: Api<Pod> = Api::namespaced(context.client.clone(), namespace);
    let parameters = AttachParams::default().container(container).stdin(false).stdout(true).stderr(true);
    let what = format!("running a command in container {container} of pod {namespace}/{pod}");
    let mut process = api
        .exec(pod, command.iter().map(String::as_str), &parameters)
        .await
        .map_err(|error| (OperatorError::of(what)(error).to_string(), String::new()))?;
    let (stdout, stderr, status) = (process.stdout(), process.stderr(), process.take_status());
    let both = async { tokio::join!(tail(stdout), tail(stderr)) };
    let ended = async {
        match status {
            Some(status) => status.await,
            None => None,
        }
    };
    let ((stdout, stderr), status) = tokio::join!(both, ended);
    let failed = match status {
        Some(status) if status.status.as_deref() == Some("Success") => return Ok(()),
        Some(status) => status.message.unwrap_or_default(),
        None => "the connection ended before the command did".to_owned(),
    };
    let output = if stderr.trim().is_empty() { stdout } else { stderr };
    Err((format!("the command in container {container} of pod {pod} failed: {failed}"), output))
}

/// The end of what a stream says.
async fn tail(stream: Option<impl tokio::io::AsyncRead + Unpin>) -> String {
    let Some(mut stream) = stream else { return String::new() };
    let (mut kept, mut chunk) = (Vec::new(), vec![0; CHUNK]);
    while let Ok(read @ 1..) = stream.read(&mut chunk).await {
        kept.extend_from_slice(&chunk[..read]);
        let surplus = kept.len().saturating_sub(OUTPUT_MAX);
        kept.drain(..surplus);
    }
    String::from_utf8_lossy(&kept).into_owned()
}
