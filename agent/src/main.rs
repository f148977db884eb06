//! The program `styrmin-agent`.

use clap::Parser as _;
use clap::error::ErrorKind;
use styrmin_agent::settings::{self, Command, Program};
use tokio_util::sync::CancellationToken;
use tracing::info;
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let Program { settings, command } = Program::parse();
    let filter = EnvFilter::try_from_env("STYRMIN_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if settings.as_ref().is_some_and(|settings| settings.log_json) {
        log.json().init();
    } else {
        log.init();
    }
    let stop = CancellationToken::new();
    tokio::spawn(stop_on_signal(stop.clone()));
    match (command, settings) {
        (Some(Command::ApplyCrds { folder }), _) => tokio::select! {
            () = stop.cancelled() => anyhow::bail!("asked to stop before the kinds were up to date; run it again"),
            done = styrmin_agent::apply_kinds(&folder) => done,
        },
        (None, Some(settings)) => styrmin_agent::run(settings, stop).await,
        (None, None) => settings::command()
            .error(ErrorKind::MissingRequiredArgument, "no server address: set STYRMIN_SERVER_ADDRESS")
            .exit(),
    }
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
