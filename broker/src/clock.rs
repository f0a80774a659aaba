//! The one place that reads the monotonic clock.
//!
//! Policies get `now` handed in, so that tests can pause or invent it; whoever drives them asks
//! here. Under `tokio`'s paused test clock this follows the paused time.

use std::time::Instant;

/// The current instant.
#[must_use]
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
