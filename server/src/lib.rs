//! The Styrmin server.
//!
//! The rooms, each with a module comment that says what may enter: [`changes`] (mutations →
//! instance + task; the only writer of desired state), [`reports`] (what agents say; the only writer
//! of observed state), [`tasks`] (the pure state machine),
//! [`repository`] (the only writer of Git), [`proposals`] (reviews on forges), [`drivers`] (load, watch), [`secrets`], [`store`]
//! (traits and their two implementations), [`api`] (GraphQL, HTTP, Git), [`auth`].
//! `docs/architecture.md` walks one change through them.

pub mod admin;
pub mod api;
pub mod auth;
pub mod changes;
pub mod clock;
pub mod doctor;
pub mod drivers;
pub mod faults;
pub mod metrics;
pub mod proposals;
pub mod reports;
pub mod repository;
pub mod retention;
pub mod secrets;
pub mod settings;
pub mod store;
pub mod tasks;
mod tls;

use anyhow::Context as _;
use api::Api;
use clock::{Clock, SystemClock};
use repository::{Host, Pushes, Wake, Writers};
use secrets::ServerKey;
use settings::Settings;
use std::future::IntoFuture as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// How long a stopping server lets requests and writers finish.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// Runs the server until `stop`, then lets what is under way finish. `listening` is told the
/// address.
///
/// # Errors
/// When a setting is wrong or something that it needs cannot be opened.
pub async fn serve(
    settings: Settings,
    stop: CancellationToken,
    listening: impl FnOnce(SocketAddr) + Send,
) -> anyhow::Result<()> {
    settings.check()?;
    let data = settings.data.display().to_string();
    tokio::fs::create_dir_all(settings.data.join("mirrors")).await.with_context(|| format!("data folder {data}"))?;
    tokio::fs::create_dir_all(settings.data.join("git")).await.with_context(|| format!("data folder {data}"))?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let key = match &settings.secret_key {
        Some(text) => ServerKey::parse(text).context("setting --secret-key")?,
        None => {
            let path = settings.data.join("server.key");
            tokio::task::spawn_blocking(move || ServerKey::from_file(&path)).await??
        }
    };
    let key = Arc::new(key);
    let path = settings.signing_key.clone().unwrap_or_else(|| settings.data.join("signing.key"));
    let signer = tokio::task::spawn_blocking(move || repository::Signer::from_file(&path)).await?;
    let signer = Arc::new(signer.context("setting --signing-key")?);
    let store = store::open(&settings.database()).await.context("setting --database-url")?;
    let token_file = settings.admin_token_file.clone().unwrap_or_else(|| settings.data.join("admin-token"));
    let given = settings.admin_token_file.is_some();
    auth::first_administrator(store.as_ref(), clock.as_ref(), &settings.administrator(), &token_file, given).await?;
    let drivers = drivers::Drivers::load(Arc::clone(&store), Arc::clone(&clock), settings.drivers.clone()).await?;
    let listener = TcpListener::bind(settings.listen)
        .await
        .with_context(|| format!("setting --listen: {} cannot be used", settings.listen))?;
    let address = listener.local_addr()?;

    let wake = Wake::default();
    let pushes = Pushes::new(stop.clone());
    let host = Host::new(std::path::absolute(settings.data.join("git"))?);
    let changes = Arc::new(changes::Changes::new(
        Arc::clone(&store),
        Arc::clone(&drivers),
        Arc::clone(&key),
        Arc::clone(&clock),
        wake.clone(),
    ));
    let proposals = Arc::new(proposals::Proposals {
        store: Arc::clone(&store),
        changes: Arc::clone(&changes),
        drivers: Arc::clone(&drivers),
        signer: Arc::clone(&signer),
        clock: Arc::clone(&clock),
        host: host.clone(),
        wake: wake.clone(),
        settings: settings.writers(address),
        poll: std::time::Duration::from_secs(settings.forge_poll),
        quiet: std::sync::Mutex::default(),
    });
    let writers = Arc::new(Writers {
        store: Arc::clone(&store),
        drivers: Arc::clone(&drivers),
        key,
        signer: Arc::clone(&signer),
        clock: Arc::clone(&clock),
        host: host.clone(),
        wake: wake.clone(),
        pushes: pushes.clone(),
        people: Arc::<changes::Changes>::clone(&changes),
        beside: proposals,
        settings: settings.writers(address),
    });
    let forgetting = match settings.retention_days {
        0 => None,
        days => Some(tokio::spawn(retention::run(Arc::clone(&store), Arc::clone(&clock), days, stop.clone()))),
    };
    let watching = tokio::spawn(Arc::clone(&drivers).watch(stop.clone()));
    let writing = tokio::spawn(writers.run(stop.clone()));
    let fanning_out = tokio::spawn(Arc::clone(&changes).run_fan_outs(stop.clone()));
    let reports = Arc::new(reports::Reports::new(Arc::clone(&store), Arc::clone(&clock), pushes, wake.clone()));
    let public_url = settings.writers(address).public_url.trim_end_matches('/').to_owned();
    let doctor = doctor::Doctor {
        store: Arc::clone(&store),
        changes: Arc::clone(&changes),
        host: host.clone(),
        clock: Arc::clone(&clock),
        folder: settings.data.join("mirrors/probe.git"),
        limit: Duration::from_secs(settings.git_timeout),
    };
    let api = Api { store, changes, reports, drivers, clock, host, wake, signer, public_url, doctor };
    if let Some(address) = settings.metrics_listen {
        let served = api::serve_metrics(address, Arc::clone(&api.store), stop.clone()).await;
        served.with_context(|| format!("setting --metrics-listen: {address} cannot be used"))?;
    }
    let app = api::router(api);
    info!(%address, "listening");
    listening(address);
    let serving = axum::serve(listener, app).with_graceful_shutdown(stop.clone().cancelled_owned());
    let serving = tokio::spawn(serving.into_future());
    stop.cancelled().await;
    info!("stopping");
    let finish = async {
        if let Some(forgetting) = forgetting {
            let _ = forgetting.await;
        }
        let _ = tokio::join!(serving, writing, fanning_out, watching);
    };
    if tokio::time::timeout(STOP_LIMIT, finish).await.is_err() {
        warn!("not everything finished in time; it goes on at the next start");
    }
    Ok(())
}
