//! Tells the server what no snapshot shows: which agent this is, its clock, whether the cluster has the kind that it
//! knows, and what it cannot list. It begins before the first lists are complete, since it may say why they never are.

use crate::crds::definitions;
use crate::operator::covers;
use crate::server::{Facts, Server};
use crate::watch::Watch;
use k8s_openapi::api::core::v1::Namespace;
use kube::Client;
use kube::api::Api;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use styrmin_renderer::{canonical, spec};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

/// How soon after a start it is told: by then the first lists are complete, if they can be.
const SOON: Duration = Duration::from_secs(5);
/// How often it is told again although it is the same: clocks drift.
const AGAIN: Duration = Duration::from_secs(300);
/// Longest pause after a word that did not arrive: an older server never takes it.
const AGAIN_MAX: Duration = Duration::from_secs(600);
/// The cluster has our kind as this agent knows it.
const CURRENT: &str = "CURRENT";
/// How long one look may take.
const LIMIT: Duration = Duration::from_secs(30);

/// Looks by `timer` until `stop`.
pub async fn run(client: Client, watch: Arc<Watch>, server: Arc<Server>, timer: Duration, stop: CancellationToken) {
    let mut told: Option<(Facts, Instant)> = None;
    let (mut pause, mut again) = (SOON, SOON);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        pause = timer;
        let look = tokio::time::timeout(LIMIT, async {
            let waits_for = watch.missing().into_iter().map(str::to_owned).collect();
            // One that is as it should be is not asked for by every timer.
            let known = told.as_ref().filter(|(known, at)| known.kind == CURRENT && at.elapsed() < AGAIN);
            let kind = match known {
                Some((known, _)) => known.kind.clone(),
                None => kind(&client).await?.to_owned(),
            };
            let cluster_uid = match &told {
                Some((known, _)) => known.cluster_uid.clone(),
                None => {
                    Api::<Namespace>::all(client.clone()).get("kube-system").await?.metadata.uid.unwrap_or_default()
                }
            };
            let found = Facts { version: env!("CARGO_PKG_VERSION").into(), kind, waits_for, cluster_uid };
            let is_news = |(known, at): &(Facts, Instant)| *known != found || at.elapsed() >= AGAIN;
            if told.as_ref().is_none_or(is_news) {
                server.facts(&found).await?;
                told = Some((found, Instant::now()));
            }
            anyhow::Ok(())
        });
        let problem = match look.await {
            Ok(Ok(())) => {
                again = SOON;
                continue;
            }
            Ok(Err(error)) => format!("{error:#}"),
            Err(_) => format!("not within {} s", LIMIT.as_secs()),
        };
        // Reports say loudly when the server is away.
        debug!(problem, "the server could not be told what this agent is");
        pause = again;
        again = (again * 2).min(AGAIN_MAX);
    }
}

/// Whether the cluster has our kind as this agent knows it.
async fn kind(client: &Client) -> kube::Result<&'static str> {
    let wanted = spec::crd();
    let found = definitions(client).get_opt(wanted["metadata"]["name"].as_str().unwrap_or_default()).await?;
    Ok(match found {
        None => "MISSING",
        // Numbers as the API server writes them.
        Some(found) if covers(&plain(&found.data["spec"]), &plain(&wanted["spec"])) => CURRENT,
        Some(_) => "OTHER",
    })
}

/// With numbers as everybody writes them: 0 is 0.0.
fn plain(value: &Value) -> Value {
    serde_json::from_str(&canonical::to_string(value)).unwrap_or_default()
}
