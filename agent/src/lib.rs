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
mod telling;
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

/// The API server ends a watch after 290 s; one, or a list, that says nothing for longer has lost its connection.
const WATCH_SILENCE: Duration = Duration::from_secs(300);
/// How long the rooms may take to end, all together.
const ROOMS_END: Duration = Duration::from_secs(5);
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
    let connected = |config| -> anyhow::Result<Client> {
        let client = kube::client::ClientBuilder::try_from(config).context("the connection to the cluster")?;
        Ok(client.with_layer(&metrics::Counting).build())
    };
    let mut for_watches = config.clone();
    for_watches.read_timeout = Some(WATCH_SILENCE);
    let client = connected(config)?;
    // Of its own: a command in a container may be silent for long, a list or a watch may not.
    let watching = connected(for_watches)?;
    if let Some(address) = settings.metrics_listen {
        let served = metrics::serve(address, stop.clone()).await;
        served.with_context(|| format!("STYRMIN_METRICS_LISTEN={address}"))?;
    }
    let identity = lease::identity(settings.identity.as_deref());
    let lease = lease::acquire(&client, &identity, &settings, &stop).await?;
    let Some(lease) = lease else { return Ok(()) };
    info!(identity, epoch = lease.epoch, "this agent leads");
    let lost = lease.lost.clone();

    let watch = watch::start(&watching, Duration::from_secs(settings.relist.into()), &lost);
    let server = Arc::new(server::Server::new(&settings, identity, lease.epoch)?);
    let facts = facts::run(client.clone(), Arc::clone(&watch), Arc::clone(&server), settings.timer(), lost.clone());
    let facts = tokio::spawn(facts);
    tokio::select! {
        biased;
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
    if lost.is_cancelled() || stop.is_cancelled() {
        // Half of a first list is nothing to act on, nor to tell.
        return end(lease, lost, stop.is_cancelled(), vec![facts]).await;
    }
    let reporter =
        reporter::run(client.clone(), Arc::clone(&watch), Arc::clone(&server), settings.clone(), lost.clone());
    let nudge = nudge::run(client.clone(), Arc::clone(&watch), Arc::clone(&server), lost.clone());
    let decryption = decryption::run(client.clone(), Arc::clone(&server), settings.timer(), lost.clone());
    let operator = operator::run(client, watch, server, &settings, lost.clone());
    let rooms = vec![tokio::spawn(reporter), tokio::spawn(nudge), tokio::spawn(decryption), facts];
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = lost.cancelled() => {}
        () = operator => {}
    }
    end(lease, lost, stop.is_cancelled(), rooms).await
}

/// Ends every room, then gives the lease back when the end is `by_us`.
async fn end(
    lease: lease::Lease,
    lost: CancellationToken,
    by_us: bool,
    rooms: Vec<tokio::task::JoinHandle<()>>,
) -> anyhow::Result<()> {
    lost.cancel();
    let aborts: Vec<_> = rooms.iter().map(tokio::task::JoinHandle::abort_handle).collect();
    if tokio::time::timeout(ROOMS_END, futures::future::join_all(rooms)).await.is_err() {
        aborts.iter().for_each(tokio::task::AbortHandle::abort);
    }
    lease.release(by_us).await;
    anyhow::ensure!(by_us, "another agent leads, or the API server could not be reached for the lease's duration");
    Ok(())
}
