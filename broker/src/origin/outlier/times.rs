//! How long things take, finely enough to compare medians.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use broker_ebpf::abi::FINE_BUCKETS;
use broker_ebpf::flow::{fine_bucket, fine_edge};

/// Times of an interval, in microseconds.
#[derive(Debug)]
pub(super) struct Times([AtomicU32; FINE_BUCKETS]);

impl Default for Times {
    fn default() -> Self {
        Self([const { AtomicU32::new(0) }; FINE_BUCKETS])
    }
}

impl Times {
    pub(super) fn record(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.0[fine_bucket(us)].fetch_add(1, Relaxed);
    }

    /// Adds what another histogram has counted.
    pub(super) fn add(&self, counts: &[u64; FINE_BUCKETS]) {
        for (sum, &count) in self.0.iter().zip(counts).filter(|(_, count)| **count > 0) {
            sum.fetch_add(u32::try_from(count).unwrap_or(u32::MAX), Relaxed);
        }
    }

    /// How many there were since the last call, and their median in microseconds (the upper edge of
    /// its bucket).
    pub(super) fn take(&self) -> (u32, u64) {
        let counts = self.0.each_ref().map(|count| count.swap(0, Relaxed).into());
        let (total, median) = median(&counts);
        (u32::try_from(total).unwrap_or(u32::MAX), median)
    }
}

/// How many times a histogram holds, and their median; 0 without any.
#[must_use]
pub fn median(counts: &[u64; FINE_BUCKETS]) -> (u64, u64) {
    let total = counts.iter().sum();
    let mut seen = 0;
    let median = counts.iter().position(|count| {
        seen += count;
        seen * 2 >= total
    });
    (total, median.map_or(0, |bucket| if total == 0 { 0 } else { fine_edge(bucket) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_of_one_interval() {
        let times = Times::default();
        assert_eq!(times.take(), (0, 0));
        for ms in [1, 1, 1, 500, 600] {
            times.record(Duration::from_millis(ms));
        }
        assert_eq!(times.take(), (5, 1024));
        assert_eq!(times.take(), (0, 0));
        let mut counts = [0; FINE_BUCKETS];
        (counts[fine_bucket(70)], counts[fine_bucket(1000)]) = (1, 2);
        times.add(&counts);
        assert_eq!((median(&counts), times.take()), ((3, 1024), (3, 1024)));
    }
}
