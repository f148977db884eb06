//! The harness of the end-to-end tests and benchmarks: real servers, real Git, real databases.
//!
//! Everything runs below a temporary folder, on loopback, and ends with the test process, however
//! that ends: children carry a parent-death signal. What may not enter: anything that the product
//! needs.

pub mod agent;
pub mod charts;
pub mod git;
pub mod gitea;
pub mod people;
pub mod plane;
pub mod postgres;
pub mod remote;
pub mod reviews;
pub mod scripted;
pub mod server;
pub mod tools;
pub mod trace;
pub mod traffic;
pub mod ways;
pub mod world;

use std::time::{Duration, Instant};

/// An HTTP client for what is not GraphQL.
#[must_use]
pub fn http() -> reqwest::Client {
    styrmin_client::choose_tls();
    reqwest::Client::builder().timeout(Duration::from_secs(60)).build().unwrap()
}

/// A child process that dies with this one.
#[must_use]
pub fn child(program: &str) -> tokio::process::Command {
    let mut command = tokio::process::Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--", program]).kill_on_drop(true);
    command
}

/// Between two looks: what looks is a program or a query, and fifty may look at once.
const PAUSE: Duration = Duration::from_millis(200);

/// Waits until `look` gives something; on the time limit, panics with what was seen instead.
pub async fn eventually<T, S: std::fmt::Debug>(
    what: &str,
    limit: Duration,
    mut look: impl AsyncFnMut() -> Result<T, S>,
) -> T {
    let end = Instant::now() + limit;
    loop {
        match look().await {
            Ok(found) => return found,
            Err(seen) if Instant::now() > end => panic!("{what}: not within {limit:?}; seen instead: {seen:?}"),
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}
