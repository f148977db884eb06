//! Named points at which a test kills the server, between the transaction and the recorded push.
//!
//! Only debug builds have them: `STYRMIN_FAULT=after-push` (or `after-push:3`, the third time).

/// The points, in the order of a change's way.
pub const POINTS: [&str; 7] =
    ["after-transaction", "after-fetch", "after-splice", "after-prepare", "after-push", "after-reread", "after-record"];

/// Between what others committed being recorded and the branch being read up to there.
pub const READING: &str = "after-reading";
/// On the way of a proposal: its branch is pushed, that is recorded, its request is opened, that is recorded, the
/// configuration that it changes counts, a part of it is taken over.
pub const REVIEW: [&str; 6] =
    ["review-pushed", "review-recorded", "review-opened", "review-told", "review-level", "review-part"];
/// Between two transactions of a fan-out.
pub const FAN_OUT: &str = "after-fan-out-chunk";

/// Ends the process like a power failure when a test asked for it here.
pub fn point(name: &str) {
    #[cfg(debug_assertions)]
    armed::point(name);
    #[cfg(not(debug_assertions))]
    let _ = name;
}

/// Waits when a test asked for it here, so that something comes in between: `STYRMIN_PAUSE=NAME:MILLISECONDS`.
pub async fn pause(name: &str) {
    #[cfg(debug_assertions)]
    if let Some(wanted) = armed::pause(name) {
        tokio::time::sleep(wanted).await;
    }
    #[cfg(not(debug_assertions))]
    let _ = name;
}

#[cfg(debug_assertions)]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    static FAULT: OnceLock<Option<(String, u32)>> = OnceLock::new();
    static PASSES: AtomicU32 = AtomicU32::new(0);

    pub(super) fn pause(name: &str) -> Option<std::time::Duration> {
        let text = std::env::var("STYRMIN_PAUSE").ok()?;
        let (point, time) = text.split_once(':')?;
        (point == name).then(|| time.parse().ok().map(std::time::Duration::from_millis))?
    }

    pub(super) fn point(name: &str) {
        let fault = FAULT.get_or_init(|| {
            let text = std::env::var("STYRMIN_FAULT").ok()?;
            let (point, pass) = text.split_once(':').unwrap_or((&text, "1"));
            Some((point.to_owned(), pass.parse().unwrap_or(1)))
        });
        if let Some((point, pass)) = fault
            && point == name
            && PASSES.fetch_add(1, Ordering::Relaxed) + 1 == *pass
        {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    }
}
