//! Messages that would fill the log if each were written.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long one message stands for those that follow.
const QUIET: Duration = Duration::from_secs(5);

/// Says the same thing now and then only.
#[derive(Debug, Default)]
pub(crate) struct Seldom(Mutex<Said>);

#[derive(Debug, Default)]
struct Said {
    last: Option<Instant>,
    /// How often it was to be said since then.
    times: u64,
}

impl Seldom {
    /// How often it was to be said since it was said last, if it is to be said now.
    pub(crate) fn say(&self, now: Instant) -> Option<u64> {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        said.times += 1;
        if said.last.is_some_and(|last| now.saturating_duration_since(last) < QUIET) {
            return None;
        }
        said.last = Some(now);
        Some(std::mem::take(&mut said.times))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    #[test]
    fn what_happens_often_is_said_now_and_then() {
        let (seldom, start) = (Seldom::default(), clock::now());
        assert_eq!(seldom.say(start), Some(1), "the first at once");
        for i in 1..100 {
            assert_eq!(seldom.say(start + QUIET / 100 * i), None);
        }
        assert_eq!(seldom.say(start + QUIET), Some(100));
        assert_eq!(seldom.say(start + QUIET), None);
    }
}
