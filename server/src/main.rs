//! The program `styrmin-server`.

use clap::Parser as _;
use styrmin_server::admin;
use styrmin_server::clock::SystemClock;
use styrmin_server::settings::{Command, Program};
use tokio_util::sync::CancellationToken;
use tracing::info;
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let Program { settings, command } = Program::parse();
    let filter = EnvFilter::try_from_env("STYRMIN_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if settings.log_json {
        log.json().init();
    } else {
        log.init();
    }
    match command {
        None => {}
        Some(Command::Keys { to }) => {
            let folder = to.clone();
            let made = tokio::task::spawn_blocking(move || admin::keys(&folder)).await??;
            info!(folder = %to.display(), made = made.join(", "), "the keys are there; keep a copy of them");
            return Ok(());
        }
        Some(Command::Backup { to }) => {
            admin::backup(&settings, &to, &SystemClock).await?;
            info!(folder = %to.display(), "the copy is whole");
            return Ok(());
        }
    }
    let stop = CancellationToken::new();
    tokio::spawn(stop_on_signal(stop.clone()));
    styrmin_server::serve(settings, stop, |_| {}).await
}

async fn stop_on_signal(stop: CancellationToken) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        return;
    };
    tokio::select! {
        _ = term.recv() => info!("asked to stop"),
        _ = int.recv() => info!("interrupted"),
    }
    stop.cancel();
}
