//! Power-of-two histograms: the same buckets in the daemon and in the kernel programs.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Buckets of a histogram; the last one also holds everything beyond it.
pub const BUCKETS: usize = 32;

/// Counts values in buckets of 2^i <= value < 2^(i+1); bucket 0 also holds 0.
#[derive(Debug, Default)]
pub struct Histogram([AtomicU64; BUCKETS]);

impl Histogram {
    /// Counts one value.
    pub fn record(&self, value: u64) {
        self.0[bucket(value)].fetch_add(1, Relaxed);
    }

    /// The counts.
    #[must_use]
    pub fn counts(&self) -> Vec<u64> {
        self.0.iter().map(|b| b.load(Relaxed)).collect()
    }
}

/// The bucket of a value.
#[must_use]
pub fn bucket(value: u64) -> usize {
    (value.max(1).ilog2() as usize).min(BUCKETS - 1)
}

/// Upper edge of the bucket in which the quantile `q` (0..=1) of all counted values lies; 0 if
/// nothing was counted.
#[must_use]
pub fn quantile(counts: &[u64], q: f64) -> u64 {
    let total: u64 = counts.iter().sum();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "q is a fraction, so the rank lies within 0..=total"
    )]
    let rank = ((total as f64) * q).ceil() as u64;
    let mut seen = 0;
    for (i, n) in counts.iter().enumerate() {
        seen += n;
        if seen >= rank.max(1) {
            return 1 << (i + 1);
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_powers_of_two() {
        assert_eq!([0, 1, 2, 3, 4, u64::MAX].map(bucket), [0, 0, 1, 1, 2, BUCKETS - 1]);
    }

    #[test]
    fn quantiles_name_the_upper_edge() {
        let histogram = Histogram::default();
        assert_eq!(quantile(&histogram.counts(), 0.5), 0);
        for value in [100, 100, 100, 5000] {
            histogram.record(value);
        }
        assert_eq!(quantile(&histogram.counts(), 0.5), 128);
        assert_eq!(quantile(&histogram.counts(), 0.99), 8192);
    }
}
