//! The only place of the agent that reads the clock. Decisions get the time as an argument.

use jiff::Timestamp;

/// The time now.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the one place where the agent reads the clock")]
pub fn now() -> Timestamp {
    Timestamp::now()
}
