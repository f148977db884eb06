//! A control plane to look at and to try things on: `cargo run -p styrmin-tests --bin control-plane`.
//!
//! It prints the path of its kubeconfig and the folder of its logs as one JSON line once everything
//! runs, and ends with Ctrl-C or SIGTERM.

use age::secrecy::ExposeSecret as _;
use clap::Parser;
use serde_json::json;
use std::path::PathBuf;
use styrmin_tests::plane::{Options, Plane};
use tokio::signal::unix::{SignalKind, signal};

#[derive(Debug, Parser)]
struct Cli {
    /// Keeps its files here instead of in a temporary folder.
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Only etcd and the API server.
    #[arg(long)]
    bare: bool,
    /// Prints a new age key and its recipient instead.
    #[arg(long)]
    age_key: bool,
}

#[tokio::main]
async fn main() {
    let cli = Cli::parse();
    if cli.age_key {
        let key = age::x25519::Identity::generate();
        println!("{}", json!({ "key": key.to_string().expose_secret(), "recipient": key.to_public().to_string() }));
        return;
    }
    let plane = Plane::start_with(Options { controllers: !cli.bare, folder: cli.folder, ..Options::default() }).await;
    println!(
        "{}",
        json!({ "kubeconfig": plane.kubeconfig(), "logs": plane.logs(), "folder": plane.folder(), "processes": plane.processes().await })
    );
    let mut terminated = signal(SignalKind::terminate()).unwrap();
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminated.recv() => {}
    }
    plane.stop().await;
}
