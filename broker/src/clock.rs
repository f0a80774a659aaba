//! The one place that reads the monotonic clock.
//!
//! Policies get `now` handed in, so that tests can pause or invent it; whoever drives them asks
//! here. Under `tokio`'s paused test clock this follows the paused time.

use std::time::{Duration, Instant};

use nix::time::ClockId;

/// The current instant.
#[must_use]
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Processor time that this thread has used so far.
#[must_use]
pub fn spent() -> Duration {
    // There is no Linux without this clock.
    ClockId::CLOCK_THREAD_CPUTIME_ID.now().map_or(Duration::ZERO, Duration::from)
}
