//! Messages that would fill the log if each were written.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::clock;

/// How long one message stands for those that follow.
const EVERY: Duration = Duration::from_secs(10);

/// Whether it is time to say something again.
#[derive(Debug, Default)]
pub(crate) struct Seldom(Mutex<Option<Instant>>);

impl Seldom {
    /// Once in ten seconds.
    pub(crate) fn is_time(&self) -> bool {
        let now = clock::now();
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_time = last.is_none_or(|last| now.saturating_duration_since(last) >= EVERY);
        if is_time {
            *last = Some(now);
        }
        is_time
    }
}
