//! Tells the server what no snapshot shows: which agent this is, its clock, whether the cluster has the kind that it
//! knows, and what it cannot list. It begins before the first lists are complete, since it may say why they never are.

use crate::crds::definitions;
use crate::operator::covers;
use crate::server::{Facts, Server};
use crate::telling::{self, Told};
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

/// How often it is told again although it is the same: clocks drift.
const AGAIN: Duration = Duration::from_secs(300);
/// The cluster has our kind as this agent knows it.
const CURRENT: &str = "CURRENT";

/// Looks by `timer` until `stop`.
pub async fn run(client: Client, watch: Arc<Watch>, server: Arc<Server>, timer: Duration, stop: CancellationToken) {
    telling::by_timer(Agent { client, watch, server, told: None }, timer, stop).await;
}

struct Agent {
    client: Client,
    watch: Arc<Watch>,
    server: Arc<Server>,
    /// What was told last, and when.
    told: Option<(Facts, Instant)>,
}

impl Told for Agent {
    const WHAT: &'static str = "what this agent is";

    async fn look(&mut self) -> anyhow::Result<()> {
        let waits_for = self.watch.missing().into_iter().map(str::to_owned).collect();
        // One that is as it should be is not asked for by every timer.
        let known = self.told.as_ref().filter(|(known, at)| known.kind == CURRENT && at.elapsed() < AGAIN);
        let kind = match known {
            Some((known, _)) => known.kind.clone(),
            None => kind(&self.client).await?.to_owned(),
        };
        let cluster_uid = match &self.told {
            Some((known, _)) => known.cluster_uid.clone(),
            None => {
                let api: Api<Namespace> = Api::all(self.client.clone());
                api.get("kube-system").await?.metadata.uid.unwrap_or_default()
            }
        };
        let found = Facts { version: env!("CARGO_PKG_VERSION").into(), kind, waits_for, cluster_uid };
        let is_news = |(known, at): &(Facts, Instant)| *known != found || at.elapsed() >= AGAIN;
        if self.told.as_ref().is_none_or(is_news) {
            self.server.facts(&found).await?;
            self.told = Some((found, Instant::now()));
        }
        Ok(())
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
