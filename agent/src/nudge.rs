//! Has Flux fetch what the server pushed, as soon as it was pushed: the server holds a question of the agent until
//! there is a commit that the agent does not know. Without it (a proxy that cuts such requests, an older server)
//! the answer to the next report says the same, a few seconds later.
//!
//! It writes nothing but the request that Flux looks now.

use crate::flux;
use crate::server::Server;
use crate::watch::{self, Watch};
use kube::{Client, ResourceExt as _};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

/// How often Flux is asked again to fetch a revision that it does not have.
const AGAIN: Duration = Duration::from_secs(60);
/// How long one request of Flux may take.
const NUDGE_LIMIT: Duration = Duration::from_secs(10);
/// How long the server may hold the question; it answers after 25 s.
const LIMIT: Duration = Duration::from_secs(60);
/// Pauses after a question that failed.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Runs until `stop`.
pub async fn run(client: Client, watch: Arc<Watch>, server: Arc<Server>, stop: CancellationToken) {
    let nudging = Nudge { client, watch, asked: HashMap::new() }.run(&server);
    tokio::select! {
        () = stop.cancelled() => {}
        () = listen(&server) => {}
        () = nudging => {}
    }
}

/// Asks the server for the next commit, again and again.
async fn listen(server: &Server) {
    let mut pause = PAUSE_FIRST;
    loop {
        match tokio::time::timeout(LIMIT, server.next_revision()).await {
            Ok(Ok(())) => pause = PAUSE_FIRST,
            failed => {
                // Reports say loudly when the server is away.
                debug!(?failed, retry_in_s = pause.as_secs(), "no word of the next commit");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }
}

struct Nudge {
    client: Client,
    watch: Arc<Watch>,
    /// The revision that Flux was asked to fetch last, by source, and when.
    asked: HashMap<String, (String, Instant)>,
}

impl Nudge {
    /// Looks after every answer of the server; reports are answered every few seconds.
    async fn run(mut self, server: &Server) {
        let mut answers = server.answers();
        while answers.changed().await.is_ok() {
            let newest = answers.borrow_and_update().newest_revision.clone();
            if let Some(newest) = newest {
                self.nudge(&newest).await;
            }
        }
    }

    /// Asks Flux to fetch for every source of ours that does not have the newest commit that we pushed.
    async fn nudge(&mut self, newest: &str) {
        let resource = watch::source("GitRepository");
        for (_, kept) in self.watch.git_repositories.all() {
            let Some(object) = kept.object() else { continue };
            let has = flux::fetched(&object).map(flux::commit) == Some(newest);
            let name = format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any());
            let asked = |(revision, at): &(String, Instant)| *revision == newest && at.elapsed() < AGAIN;
            if has || self.asked.get(&name).is_some_and(asked) {
                continue;
            }
            info!(source = name, revision = newest, "asking Flux to fetch");
            match tokio::time::timeout(NUDGE_LIMIT, flux::nudge(&self.client, &resource, &object)).await {
                Ok(Ok(())) => drop(self.asked.insert(name, (newest.to_owned(), Instant::now()))),
                Ok(Err(error)) => warn!(%error, source = name, "Flux could not be asked to fetch"),
                Err(_) => warn!(source = name, "the API server did not say whether Flux was asked to fetch"),
            }
        }
    }
}
