//! Forgets what is older than people want to keep: tasks with their instances, fan-outs, observations. What runs,
//! what is wanted, and the newest instances of each deployment stay, however old they are.

use crate::clock::Clock;
use crate::store::{Millis, Store};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

/// Instances of each deployment that stay, so that people can go back.
const KEPT: i64 = 20;
/// Rows of one transaction.
const CHUNK: i64 = 200;
/// How often it looks.
const LOOK: Duration = Duration::from_secs(3600);
/// Between two transactions, so that changes come in between.
const PAUSE: Duration = Duration::from_millis(100);

/// Works until `stop`; `days` is how long history is kept.
pub async fn run(store: Arc<dyn Store>, clock: Arc<dyn Clock>, days: u32, stop: CancellationToken) {
    let lasting = Millis::from(days) * 24 * 3600 * 1000;
    loop {
        let forgetting = async {
            let (mut total, before) = (0, clock.now() - lasting);
            loop {
                let found = store.forget(before, KEPT, CHUNK).await?;
                total += found;
                if found < usize::try_from(CHUNK).unwrap_or(usize::MAX) {
                    return Ok::<_, crate::store::StoreError>(total);
                }
                tokio::time::sleep(PAUSE).await;
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            done = forgetting => match done {
                Ok(0) => {}
                Ok(count) => info!(count, days, "old history is forgotten"),
                Err(error) => error!(%error, "old history cannot be forgotten"),
            },
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}
