//! Which terms of `start + n * step` (mod 2^64) fall into an interval, without trying them all.
//!
//! A fleet of 10,000 gateways and as many origins has 10^8 scores, of which only the few best of
//! each gateway matter. The terms of a rotation come back to an interval after one of three counts
//! of steps, `a`, `b` or `a + b` (N. B. Slater, "Gaps and steps for the sequence nθ mod 1", 1967),
//! and those are found by Euclid's algorithm; so the cost is that of the terms found.

/// The terms in `0..=last`, in the order of `n`, for `n` below `count`.
#[derive(Clone, Debug)]
pub(super) struct Hits {
    last: u64,
    count: u64,
    /// The next hit: after `n` steps, at `x`. None if `n` has reached `count`.
    n: u64,
    x: u64,
    /// The fewest steps that lead forwards within the interval, and how far; then backwards.
    forth: (u64, u64),
    back: (u64, u64),
}

impl Hits {
    /// The terms of `start + n * step` that are `last` at most. The step must not be 0.
    pub(super) fn new(start: u64, step: u64, last: u64, count: u32) -> Self {
        debug_assert!(step != 0, "a rotation moves");
        let count = u64::from(count);
        let (mut n, mut x) = (0, start);
        let (mut a, mut up) = (1, step);
        let (mut b, mut down) = (1, step.wrapping_neg());
        // The first return to 0..up+down is: forth below `down`, else back. At first that is the
        // rotation itself. Each turn takes the longer move's length as the new, shorter interval
        // and goes on to the first term in it.
        while (up > last || down > last) && (a < count || b < count) {
            if x >= up.max(down) {
                x -= down;
                n += b;
            }
            if up > down {
                up -= down;
                a += b;
            } else {
                down -= up;
                b += a;
            }
        }
        if x > last && x >= down {
            x -= down;
            n += b;
        }
        // Whatever is still outside comes back after `count` only.
        let n = if x > last { count } else { n };
        Self { last, count, n, x, forth: (a, up), back: (b, down) }
    }
}

impl Iterator for Hits {
    type Item = (u32, u64);

    /// The next `n` and its term.
    fn next(&mut self) -> Option<(u32, u64)> {
        if self.n >= self.count {
            return None;
        }
        let hit = (u32::try_from(self.n).ok()?, self.x);
        let ((a, up), (b, down)) = (self.forth, self.back);
        if up <= self.last && self.x <= self.last - up {
            (self.n, self.x) = (self.n + a, self.x + up);
        } else if self.x >= down {
            (self.n, self.x) = (self.n + b, self.x - down);
        } else {
            (self.n, self.x) = (self.n + a + b, self.x.wrapping_add(up).wrapping_sub(down));
        }
        Some(hit)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::kronecker::multiplier;
    use super::*;

    proptest! {
        #[test]
        fn as_if_all_were_tried(start: u64, seed: u64, shift in 0u32..64, last: u64, count in 0u32..2000) {
            let step = multiplier(seed);
            let last = last >> shift;
            let all = (0..count)
                .map(|n| (n, start.wrapping_add(u64::from(n).wrapping_mul(step))))
                .filter(|&(_, x)| x <= last);
            let hits = Hits::new(start, step, last, count);
            prop_assert_eq!(hits.collect::<Vec<_>>(), all.collect::<Vec<_>>());
        }
    }

    #[test]
    fn the_whole_circle_and_a_single_point() {
        let step = multiplier(7);
        assert_eq!(Hits::new(5, step, u64::MAX, 100).count(), 100);
        assert_eq!(Hits::new(0, step, 0, 1000).collect::<Vec<_>>(), [(0, 0)]);
        let start = step.wrapping_mul(77).wrapping_neg();
        assert_eq!(Hits::new(start, step, 0, 1000).collect::<Vec<_>>(), [(77, 0)]);
    }
}
