//! What the server is told beside the reports: looked at by a timer, and with growing pauses while the word does not
//! arrive. What is told, and when it is news, does not belong here.

use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tracing::debug;

/// How soon after a start it is looked at, and after a word that did not arrive.
const SOON: Duration = Duration::from_secs(5);
/// Longest pause after a word that did not arrive: an older server never takes it.
const AGAIN_MAX: Duration = Duration::from_secs(600);
/// How long one look may take, with its word.
const LIMIT: Duration = Duration::from_secs(30);

/// Something that the server is told.
pub(crate) trait Told {
    /// What it is, for the log.
    const WHAT: &'static str;

    /// Looks at it, and tells it when it is news.
    fn look(&mut self) -> impl Future<Output = anyhow::Result<()>> + Send;
}

/// Looks by `timer` until `stop`.
pub(crate) async fn by_timer<T: Told>(mut told: T, timer: Duration, stop: CancellationToken) {
    let (mut pause, mut again) = (SOON, SOON);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        let problem = match tokio::time::timeout(LIMIT, told.look()).await {
            Ok(Ok(())) => {
                (pause, again) = (timer, SOON);
                continue;
            }
            Ok(Err(error)) => format!("{error:#}"),
            Err(_) => format!("not within {} s", LIMIT.as_secs()),
        };
        // Reports say loudly when the server is away.
        debug!(problem, what = T::WHAT, "the server could not be told");
        pause = again;
        again = (again * 2).min(AGAIN_MAX);
    }
}
