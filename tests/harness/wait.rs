//! Waiting for conditions instead of sleeping.

use std::thread;
use std::time::Duration;

use broker::clock;

/// Waits until `condition` holds.
///
/// # Panics
/// If it does not within `limit`; the message says `what` was waited for.
#[track_caller]
pub fn eventually(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    assert!(within(limit, &mut condition), "not within {limit:?}: {what}");
}

/// Whether `condition` comes to hold within `limit`.
pub fn within(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = clock::now() + limit;
    let mut pause = Duration::from_micros(200);
    loop {
        if condition() {
            return true;
        }
        if clock::now() >= end {
            return false;
        }
        thread::sleep(pause);
        // Short at first so that quick things are noticed quickly, then easy on the processor.
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}
