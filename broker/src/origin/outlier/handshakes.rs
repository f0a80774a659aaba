//! How long handshakes take, finely enough to compare medians.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// Buckets for each doubling: an edge is 13 to 25 % above the one before.
const STEPS: u32 = 4;
/// Up to two minutes in microseconds; longer ones are in the last bucket.
const BUCKETS: usize = 27 * STEPS as usize;

/// Handshakes of an interval.
#[derive(Debug)]
pub(super) struct Handshakes([AtomicU32; BUCKETS]);

impl Default for Handshakes {
    fn default() -> Self {
        Self([const { AtomicU32::new(0) }; BUCKETS])
    }
}

impl Handshakes {
    pub(super) fn record(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.0[bucket(us)].fetch_add(1, Relaxed);
    }

    /// How many there were since the last call, and their median in microseconds (the upper edge of
    /// its bucket).
    pub(super) fn take(&self) -> (u32, u64) {
        let counts = self.0.each_ref().map(|count| count.swap(0, Relaxed));
        let total: u32 = counts.iter().sum();
        let mut seen = 0;
        let median = counts.iter().position(|count| {
            seen += count;
            seen * 2 >= total
        });
        (total, median.map_or(0, |bucket| if total == 0 { 0 } else { upper_edge(bucket) }))
    }
}

fn bucket(us: u64) -> usize {
    let us = us.max(1);
    let octave = us.ilog2();
    // The two bits below the highest one.
    let step = (us << 2 >> octave) & u64::from(STEPS - 1);
    let bucket = octave as usize * STEPS as usize + usize::try_from(step).unwrap_or(0);
    bucket.min(BUCKETS - 1)
}

/// The first value beyond a bucket.
fn upper_edge(bucket: usize) -> u64 {
    let steps = STEPS as usize;
    let (octave, step) = (bucket / steps, bucket % steps);
    ((steps + step + 1) as u64) << octave >> 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_lie_below_their_edge_and_not_far() {
        for us in (1..100_000).chain([1 << 20, (1 << 26) + 1]) {
            let edge = upper_edge(bucket(us));
            assert!(edge > us || us < 4, "{us} {edge}");
            assert!(edge as f64 <= us as f64 * 1.25 + 1.0, "{us} {edge}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn medians_are_of_one_interval() {
        let handshakes = Handshakes::default();
        assert_eq!(handshakes.take(), (0, 0));
        for ms in [1, 1, 1, 500, 600] {
            handshakes.record(Duration::from_millis(ms));
        }
        assert_eq!(handshakes.take(), (5, 1024));
        assert_eq!(handshakes.take(), (0, 0));
    }
}
