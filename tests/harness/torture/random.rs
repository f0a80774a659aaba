//! Randomness that one number determines.

use std::ops::RangeInclusive;

/// The golden ratio, as `SplitMix64` counts with it.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// `SplitMix64` (Steele, Lea and Flood, 2014): a counter and a mixing function, so that a generator
/// for each client, request and direction costs nothing to make.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

/// The mixing function: a bijection in which every input bit touches every output bit.
pub(super) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The inverse of [`mix`].
pub(super) fn unmix(mut z: u64) -> u64 {
    z = (z ^ (z >> 31) ^ (z >> 62)).wrapping_mul(0x3196_42b2_d24d_8ec3);
    z = (z ^ (z >> 27) ^ (z >> 54)).wrapping_mul(0x96de_1b17_3f11_9089);
    z ^ (z >> 30) ^ (z >> 60)
}

impl Random {
    /// A generator for what `parts` name, under a seed.
    pub(super) fn new(seed: u64, parts: &[u64]) -> Self {
        Self(
            parts
                .iter()
                .fold(mix(seed ^ STEP), |state, part| mix(state.wrapping_add(*part) ^ STEP)),
        )
    }

    /// The next 64 bits.
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number below `n`, which is not 0.
    pub(super) fn below(&mut self, n: u64) -> u64 {
        // The upper half of the product; a bias in the 64th bit is of no concern.
        let product = u128::from(self.next()) * u128::from(n);
        u64::try_from(product >> 64).unwrap_or(0)
    }

    /// A number of the range.
    pub(super) fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    /// A number of the range (which begins above 0) whose *magnitude* is uniform: as many below 100
    /// as between 100 and 10,000.
    pub(super) fn magnitude(&mut self, range: RangeInclusive<u64>) -> u64 {
        let (low, high) = (*range.start(), *range.end());
        let bits = self.within(low.ilog2().into()..=high.ilog2().into());
        let from = 1 << bits;
        self.within(from..=from * 2 - 1).clamp(low, high)
    }

    /// True so many times of a thousand.
    pub(super) fn chance(&mut self, permille: u64) -> bool {
        self.below(1000) < permille
    }

    /// One of them.
    pub(super) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::try_from(self.below(choices.len() as u64)).unwrap_or(0)]
    }

    /// One of them, as often as its weight says.
    pub(super) fn weighted<T: Copy>(&mut self, choices: &[(T, u64)]) -> T {
        let total = choices.iter().map(|(_, weight)| weight).sum();
        let mut draw = self.below(total);
        for (choice, weight) in choices {
            match draw.checked_sub(*weight) {
                Some(rest) => draw = rest,
                None => return *choice,
            }
        }
        choices[0].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixing_can_be_undone() {
        for n in (0..64).map(|bit| 1 << bit).chain([0, 1, u64::MAX, STEP]) {
            assert_eq!(unmix(mix(n)), n);
        }
    }

    #[test]
    fn one_seed_is_one_sequence() {
        let draw = |seed, part| {
            let mut random = Random::new(seed, &[part]);
            [random.next(), random.next()]
        };
        assert_eq!(draw(1, 2), draw(1, 2));
        assert_ne!(draw(1, 2), draw(1, 3));
        assert_ne!(draw(1, 2), draw(2, 2));
    }

    #[test]
    fn draws_keep_to_their_bounds() {
        let mut random = Random::new(1, &[]);
        for _ in 0..10_000 {
            assert!((3..=5).contains(&random.within(3..=5)));
            assert!((1..=100).contains(&random.magnitude(1..=100)));
            assert!(random.weighted(&[(1, 0), (2, 7)]) == 2);
        }
    }
}
