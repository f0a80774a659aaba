//! Failures in a row.
//!
//! A response that comes after a failure may be older than it: its request was sent before, and tells
//! nothing of the origin since. Such a success does not end a streak; else an origin that fails from now
//! on would have its failures counted anew for each good response that is still on its way, and clients
//! would see more of them than it may cost. So a streak remembers when it began, as of when its first
//! failure was seen, and is ended only by a request that was sent later.
//!
//! Of exchanges that others carry, that is not known of each. But of those that have ended since, no more
//! than were under way when the streak began can be older than it.

use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Somebody is about to decide what follows from so many failures.
const JUDGING: u64 = 1 << 31;
const FAILURES: u64 = JUDGING - 1;

/// One kind of failures in a row. No lock: whoever begins or ends a streak swaps the whole word, which
/// differs from one streak to the next.
#[derive(Debug, Default)]
pub(super) struct Streak {
    /// How many streaks there were, [`JUDGING`], and the failures of this one.
    word: AtomicU64,
    /// Stamp of when the first failure was seen. Never goes back: of two that begin a streak at once, the
    /// one that loses may write later.
    began: AtomicU64,
    /// Exchanges carried by others that may be older. Too many only delay the end.
    older: AtomicU32,
}

impl Streak {
    /// One more failure, seen at this stamp, while others have so many exchanges under way. Tells how many
    /// there are in a row, if that is a multiple of the limit: of all workers exactly one hears of each,
    /// and must say [`Streak::judged`]. A run that goes on without an ejection is noticed again and again,
    /// as if it were counted from zero.
    pub(super) fn failed(&self, limit: u32, now: u64, under_way: u32) -> Option<u32> {
        let mut word = self.word.load(Acquire);
        loop {
            let failures = word & FAILURES;
            if failures == 0 {
                // Before others can see the streak.
                self.began.fetch_max(now, AcqRel);
                self.older.fetch_max(under_way, AcqRel);
            }
            let failures = (failures + 1).min(FAILURES);
            let noticed = limit > 0 && failures.is_multiple_of(limit.into());
            let streaks = (word >> 32) + u64::from(failures == 1);
            let judging = if noticed { JUDGING } else { word & JUDGING };
            let next = streaks << 32 | judging | failures;
            match self.word.compare_exchange_weak(word, next, AcqRel, Acquire) {
                Ok(_) => return u32::try_from(failures).ok().filter(|_| noticed),
                Err(now) => word = now,
            }
        }
    }

    /// What follows is decided, and can be seen.
    pub(super) fn judged(&self) {
        self.word.fetch_and(!JUDGING, AcqRel);
    }

    /// Whether somebody is about to decide what follows.
    pub(super) fn is_judging(&self) -> bool {
        self.word.load(Acquire) & JUDGING != 0
    }

    /// A request that was sent at this stamp has not failed like that. One load, nearly always.
    pub(super) fn succeeded(&self, sent: u64) {
        self.end_if(|| sent > self.began.load(Acquire));
    }

    /// Others have carried so many exchanges since the last time, and none has failed.
    pub(super) fn carried(&self, n: u32) {
        let older = |older: u32| Some(older.saturating_sub(n));
        let older = self.older.fetch_update(AcqRel, Acquire, older).unwrap_or(0);
        if n > older {
            self.clear();
        }
    }

    /// Whatever there was is forgotten.
    pub(super) fn clear(&self) {
        self.end_if(|| true);
    }

    fn end_if(&self, is_over: impl Fn() -> bool) {
        let end = |word| (word & FAILURES != 0 && is_over()).then_some(word & !FAILURES);
        // Else there is none, or it goes on.
        self.word.fetch_update(AcqRel, Acquire, end).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failures(streak: &Streak) -> u64 {
        streak.word.load(Acquire) & FAILURES
    }

    #[test]
    fn only_a_later_request_ends_a_streak() {
        let streak = Streak::default();
        streak.succeeded(5);
        assert_eq!((streak.failed(3, 10, 0), streak.failed(3, 12, 0)), (None, None));
        for sent in [1, 9, 10] {
            streak.succeeded(sent);
            assert_eq!(failures(&streak), 2, "sent at {sent}");
        }
        streak.succeeded(11);
        assert_eq!(failures(&streak), 0, "later than the first failure, not than the last one");
        assert_eq!(streak.failed(3, 20, 0), None);
        streak.succeeded(11);
        assert_eq!(failures(&streak), 1, "a new streak has a new beginning");
        streak.clear();
        assert_eq!(failures(&streak), 0);
    }

    #[test]
    fn those_under_way_at_the_beginning_may_all_be_older() {
        let streak = Streak::default();
        streak.carried(100);
        assert_eq!(streak.failed(5, 10, 3), None);
        assert_eq!(streak.failed(5, 11, 30), None);
        streak.carried(1);
        streak.carried(2);
        assert_eq!(failures(&streak), 2);
        streak.carried(1);
        assert_eq!(failures(&streak), 0, "the fourth was sent later");
        assert_eq!(streak.failed(5, 10, 2), None);
        streak.carried(3);
        assert_eq!(failures(&streak), 0);
    }

    #[test]
    fn each_multiple_is_noticed_and_judged() {
        let streak = Streak::default();
        let noticed: Vec<_> = (0..6).filter_map(|_| streak.failed(3, 1, 0)).collect();
        assert_eq!((noticed, streak.is_judging()), (vec![3, 6], true));
        assert_eq!((streak.failed(3, 1, 0), streak.is_judging()), (None, true));
        streak.clear();
        assert!(streak.is_judging(), "whoever has noticed says when");
        streak.judged();
        assert!(!streak.is_judging());
        assert_eq!(streak.failed(0, 1, 0), None);
        assert_eq!(streak.failed(1, 1, 0), Some(2));
    }
}
