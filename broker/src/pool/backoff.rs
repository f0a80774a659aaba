//! How long an origin is left in peace after a failed dial.

use std::time::{Duration, Instant};

use rand::{Rng, RngExt};

/// Exponential back-off with full jitter above the half: the n-th failure in a row pauses for
/// between half and all of `base * 2^(n-1)`, at most `max`.
#[derive(Clone, Debug)]
pub struct Backoff {
    base: Duration,
    max: Duration,
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    /// No failure yet.
    #[must_use]
    pub fn new(base: Duration, max: Duration) -> Self {
        Self { base, max, failures: 0, until: None }
    }

    /// Counts a failure and starts the pause, whose length it returns.
    pub fn fail(&mut self, now: Instant, rng: &mut impl Rng) -> Duration {
        let pause = self.base.saturating_mul(1 << self.failures.min(20)).min(self.max);
        self.failures = self.failures.saturating_add(1);
        // Without jitter, the workers of a whole fleet would come back at the same instant.
        let pause = pause.mul_f64(rng.random_range(0.5..=1.0));
        self.until = Some(now + pause);
        pause
    }

    /// A success ends everything.
    pub fn succeed(&mut self) {
        self.failures = 0;
        self.until = None;
    }

    /// Whether a dial may start now.
    #[must_use]
    pub fn permits(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now >= until)
    }

    /// Whether the last dial failed: the next one is a probe.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        self.failures > 0
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn pauses_double_up_to_the_cap_and_end_with_a_success() {
        let (base, max) = (Duration::from_millis(100), Duration::from_millis(500));
        let mut rng = StdRng::seed_from_u64(7);
        let mut backoff = Backoff::new(base, max);
        let now = crate::clock::now();
        assert!(backoff.permits(now));
        for full in [100, 200, 400, 500, 500].map(Duration::from_millis) {
            backoff.fail(now, &mut rng);
            assert!(!backoff.permits(now + full.mul_f64(0.49)));
            assert!(backoff.permits(now + full));
            assert!(backoff.is_failing());
        }
        backoff.succeed();
        assert!(backoff.permits(now) && !backoff.is_failing());
    }
}
