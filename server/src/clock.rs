//! The clock, the only place that reads it, so that tests can set it.

use crate::store::Millis;

/// Tells the time.
pub trait Clock: Send + Sync + std::fmt::Debug {
    /// Milliseconds since the Unix epoch.
    fn now(&self) -> Millis;
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Millis {
        #[expect(clippy::disallowed_methods, reason = "this is the place that reads it")]
        let now = jiff::Timestamp::now();
        now.as_millisecond()
    }
}

/// As a timestamp; a time out of range is the epoch.
#[must_use]
pub fn timestamp(millis: Millis) -> jiff::Timestamp {
    jiff::Timestamp::from_millisecond(millis).unwrap_or(jiff::Timestamp::UNIX_EPOCH)
}
