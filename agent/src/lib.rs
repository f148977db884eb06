//! The Styrmin agent: one process per cluster that leads by a lease, with two rooms.
//!
//! - [`operator`]: observe → [`operator::decide`] (pure) → apply → status. It makes StyrminDeployments
//!   run, and writes nothing else.
//! - [`reporter`]: whole snapshots to the server. It writes nothing in the cluster; [`nudge`] only asks Flux to
//!   look.
//!
//! Both read from [`watch`], the only place that watches the API server; [`flux`] reads and nudges
//! Flux; [`server`] holds what the server's answers said last. The agent only makes outgoing requests,
//! and never takes configuration from the server: Git is the only way in.

pub mod clock;
pub mod crds;
pub mod decryption;
pub mod facts;
pub mod flux;
pub mod kept;
pub mod lease;
pub mod metrics;
pub mod nudge;
pub mod operator;
pub mod packed;
pub mod reporter;
pub mod rows;
pub mod server;
pub mod settings;
pub mod snapshot;
pub mod store;
pub mod watch;

use anyhow::Context as _;
use kube::Client;
use settings::Settings;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

/// Namespace of the agent's lease.
pub const NAMESPACE: &str = "styrmin-system";

/// How long the lists of the first watches may take before the agent says that it waits.
const FIRST_LISTS: Duration = Duration::from_secs(30);

/// Brings the kinds of the chart up to date: ours, and those in the files of `folders`.
///
/// # Errors
/// When the cluster cannot be reached, or objects of a kind are in the way; see [`crds`].
pub async fn apply_kinds(folders: &[std::path::PathBuf]) -> anyhow::Result<()> {
    styrmin_client::choose_tls();
    let client = Client::try_default().await.context("no connection to a cluster is configured")?;
    crds::apply(&client, &crds::wanted(folders).await?).await
}

/// Runs until `stop`, or until another agent leads.
///
/// # Errors
/// When the cluster cannot be reached or another agent took the lease: the process ends, and whoever
/// runs it starts it again.
pub async fn run(settings: Settings, stop: CancellationToken) -> anyhow::Result<()> {
    styrmin_client::choose_tls();
    let config = kube::Config::infer().await.context("no connection to a cluster is configured")?;
    let client = kube::client::ClientBuilder::try_from(config).context("the connection to the cluster")?;
    let client = client.with_layer(&metrics::Counting).build();
    if let Some(address) = settings.metrics_listen {
        let served = metrics::serve(address, stop.clone()).await;
        served.with_context(|| format!("STYRMIN_METRICS_LISTEN={address}"))?;
    }
    let identity = lease::identity(settings.identity.as_deref());
    let lease = lease::acquire(&client, &identity, &settings, &stop).await?;
    let Some(lease) = lease else { return Ok(()) };
    info!(identity, epoch = lease.epoch, "this agent leads");
    let lost = lease.lost.clone();

    let watch = watch::start(&client, Duration::from_secs(settings.relist.into()), &lost);
    let server = Arc::new(server::Server::new(&settings, identity, lease.epoch)?);
    let facts = facts::run(client.clone(), Arc::clone(&watch), Arc::clone(&server), settings.timer(), lost.clone());
    let facts = tokio::spawn(facts);
    tokio::select! {
        () = lost.cancelled() => {}
        () = stop.cancelled() => {}
        () = watch.ready() => {}
        () = async {
            loop {
                tokio::time::sleep(FIRST_LISTS).await;
                error!(missing = watch.missing().join(", "), "still waiting for the first lists");
            }
        } => {}
    }
    let reporter =
        reporter::run(client.clone(), Arc::clone(&watch), Arc::clone(&server), settings.clone(), lost.clone());
    let nudge = nudge::run(client.clone(), Arc::clone(&watch), Arc::clone(&server), lost.clone());
    let decryption = decryption::run(client.clone(), Arc::clone(&server), settings.timer(), lost.clone());
    let operator = operator::run(client, watch, server, &settings, lost.clone());
    let reporter = tokio::spawn(reporter);
    let nudge = tokio::spawn(nudge);
    let decryption = tokio::spawn(decryption);
    tokio::select! {
        () = operator => {}
        () = stop.cancelled() => {}
        () = lost.cancelled() => {}
    }
    let by_us = stop.is_cancelled();
    lost.cancel();
    let _ = tokio::time::timeout(Duration::from_secs(5), reporter).await;
    let _ = tokio::time::timeout(Duration::from_secs(5), nudge).await;
    let _ = tokio::time::timeout(Duration::from_secs(5), decryption).await;
    let _ = tokio::time::timeout(Duration::from_secs(5), facts).await;
    lease.release(by_us).await;
    anyhow::ensure!(by_us, "another agent leads, or the API server could not be reached for the lease's duration");
    Ok(())
}
