//! How many retries all workers of a service may have at once.
//!
//! A retry is more load for origins that may be in trouble because of load. Each holds a permit from
//! the moment that it is decided, while it waits for a back-off to end or for a connection, until
//! its response begins or it has failed.

use std::sync::Arc;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{AcqRel, Relaxed},
};

use super::Budget;
use crate::config::retries::RetryLimit;
use crate::stats::{Counter, LimitSnapshot};

/// The retries of a service.
#[derive(Debug)]
pub struct Retrying {
    limit: RetryLimit,
    used: AtomicUsize,
    /// How often one was not allowed.
    pub overflow: Counter,
}

/// The right to try a request again. Dropping it gives it back.
#[derive(Debug)]
pub struct RetryPermit(Arc<Budget>);

impl Retrying {
    pub(super) fn new(limit: RetryLimit) -> Self {
        Self { limit, used: AtomicUsize::new(0), overflow: Counter::default() }
    }

    /// How many there are.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }
}

impl Budget {
    /// The right to try a request again.
    #[must_use]
    pub fn retry(self: &Arc<Self>) -> Option<RetryPermit> {
        let max = self.retries_max();
        let fits = |used: usize| (used < max).then_some(used + 1);
        if self.retries.used.fetch_update(AcqRel, Relaxed, fits).is_ok() {
            return Some(RetryPermit(Arc::clone(self)));
        }
        self.retries.overflow.inc();
        None
    }

    /// How many retries there may be now.
    fn retries_max(&self) -> usize {
        let steered: usize = self.seats.iter().map(|seat| seat.steered.load(Relaxed)).sum();
        self.retries.limit.allows(self.requests.used() + self.pending.used() + steered)
    }

    /// Says how many of a worker's connections the kernel is using. What was said last counts: when
    /// an origin fails, its exchanges come back to the worker all at once, and are a part of the
    /// load that there was a moment ago.
    pub fn steers(&self, worker: usize, connections: usize) {
        if let Some(seat) = self.seats.get(worker) {
            seat.steered.store(connections, Relaxed);
        }
    }

    pub(super) fn retries_snapshot(&self) -> LimitSnapshot {
        LimitSnapshot {
            max: self.retries_max() as u64,
            used: self.retries.used() as u64,
            overflow: self.retries.overflow.get(),
        }
    }
}

impl Drop for RetryPermit {
    fn drop(&mut self) {
        self.0.retries.used.fetch_sub(1, AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Limits, Refuse};

    fn budget(limit: RetryLimit) -> Arc<Budget> {
        let limits = Limits {
            max_connections: 1000,
            max_connections_per_origin: None,
            one_connection_per_origin: false,
            max_pending: 1000,
            max_requests: 1000,
            refuse: Refuse::Response,
        };
        Arc::new(Budget::new(&limits, limit, 2))
    }

    fn all(budget: &Arc<Budget>) -> Vec<RetryPermit> {
        std::iter::from_fn(|| budget.retry()).collect()
    }

    #[test]
    fn retries_are_a_part_of_all_that_is_under_way() {
        let budget = budget(RetryLimit::Budget { percent: 20.0, min_concurrency: 3 });
        assert_eq!(all(&budget).len(), 3, "the minimum, when all is quiet");
        let requests: Vec<_> = (0..10).filter_map(|_| budget.request()).collect();
        let waiting: Vec<_> = (0..20).filter_map(|_| budget.wait()).collect();
        budget.steers(1, 20);
        assert_eq!(all(&budget).len(), 10, "a fifth of 10 exchanges, 20 that wait and 20 steered");
        drop((requests, waiting));
        budget.steers(1, 0);
        assert_eq!(all(&budget).len(), 3);
    }

    #[test]
    fn what_is_given_back_can_be_had_again() {
        let budget = budget(RetryLimit::Fixed(2));
        let held = all(&budget);
        assert_eq!((held.len(), budget.retries.overflow.get()), (2, 1));
        drop(held);
        assert_eq!(budget.retries.used(), 0);
        assert_eq!(all(&budget).len(), 2);
    }

    #[test]
    fn never_more_than_the_limit_whoever_asks() {
        let budget = budget(RetryLimit::Fixed(5));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        let permit = budget.retry();
                        assert!(budget.retries.used() <= 5);
                        drop(permit);
                    }
                });
            }
        });
        assert_eq!(budget.retries.used(), 0);
    }
}
