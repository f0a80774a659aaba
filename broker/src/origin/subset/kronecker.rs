//! Kronecker rendezvous: each origin ranks the gateways by a low-discrepancy sequence of its own,
//! and a gateway takes the origins that rank it best.
//!
//! Rendezvous hashing draws the score of each pair at random, so an origin gets a binomial number
//! of gateways. Here the scores of one origin are `hash + g * alpha` modulo 1 with a badly
//! approximable `alpha`: any threshold is passed by nearly the same number of gateways. What stays
//! is what rendezvous hashing is good for: nobody needs to know the other gateways, and an origin
//! that comes or goes changes one place in the subsets that hold it, and nothing else.

use super::hash::mix;
use super::rotation::Hits;
use super::{Origin, index_of};

/// A gateway and an origin with the key of the pair; ordered as candidates are considered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Edge {
    /// Lower is better.
    pub(super) key: u64,
    /// Index in the roster, which is ordered by hash: ties go by hash.
    pub(super) origin: u32,
    pub(super) gateway: u32,
}

/// The origins of a roster with their multipliers.
#[derive(Debug)]
pub(super) struct Kronecker<'a> {
    origins: &'a [Origin],
    alphas: Vec<u64>,
}

impl<'a> Kronecker<'a> {
    pub(super) fn new(origins: &'a [Origin]) -> Self {
        let alphas = origins.iter().map(|origin| multiplier(origin.hash)).collect();
        Self { origins, alphas }
    }

    pub(super) fn origins(&self) -> &'a [Origin] {
        self.origins
    }

    /// All origins for one gateway, best first.
    pub(super) fn ranked(&self, gateway: u32) -> Vec<Edge> {
        let g = u64::from(gateway);
        let mut edges: Vec<Edge> = (0..self.origins.len())
            .map(|o| {
                let score = self.origins[o].hash.wrapping_add(g.wrapping_mul(self.alphas[o]));
                Edge { key: score / self.origins[o].weight, origin: index_of(o), gateway }
            })
            .collect();
        edges.sort_unstable();
        edges
    }

    /// The edges of one origin whose keys lie in a window, by gateway.
    pub(super) fn edges(
        &self,
        origin: usize,
        window: Window,
        gateways: u32,
    ) -> impl Iterator<Item = Edge> + use<> {
        let Origin { hash, weight, .. } = self.origins[origin];
        let alpha = self.alphas[origin];
        // Scores whose quotient by the weight is in the window; none if all of them are too large.
        let first = window.first.checked_mul(weight);
        let last = window.last.saturating_mul(weight).saturating_add(weight - 1);
        first.into_iter().flat_map(move |first| {
            Hits::new(hash.wrapping_sub(first), alpha, last - first, gateways).map(
                move |(gateway, offset)| Edge {
                    key: (first + offset) / weight,
                    origin: index_of(origin),
                    gateway,
                },
            )
        })
    }
}

/// A multiplier for an origin's sequence: a fraction of 2^64 that no fraction with a small
/// denominator comes near to, because its continued fraction begins with six digits of 1 to 3 and
/// goes on with ones.
pub(super) fn multiplier(hash: u64) -> u64 {
    const DIGITS: u32 = 6;
    // Beyond this, the next digits would not change the first 2^32 terms by much.
    const DENOMINATOR_MIN: u64 = 1 << 40;
    let mut random = mix(hash, 0xA1FA);
    let (mut p0, mut q0, mut p1, mut q1) = (1, 0, 0, 1);
    let mut digits = 0;
    while q1 < DENOMINATOR_MIN {
        let digit = if digits < DIGITS { 1 + random % 3 } else { 1 };
        random /= 3;
        digits += 1;
        (p0, q0, p1, q1) = (p1, q1, digit * p1 + p0, digit * q1 + q0);
    }
    let fraction = (u128::from(p1) << 64) / u128::from(q1);
    u64::try_from(fraction).unwrap_or_else(|_| unreachable!("p1 < q1 from the third digit on"))
}

/// A range of keys, both ends included.
///
/// Edges are wanted in the order of their keys, but how many is known only when enough have been
/// found; so they are looked for in one window after the other, each as large as all before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    first: u64,
    last: u64,
}

impl Window {
    /// The window from 0 in which a gateway finds about `edges` origins of `origins`.
    pub(super) fn of(edges: usize, origins: &[Origin]) -> Self {
        let weights: u128 = origins.iter().map(|origin| u128::from(origin.weight)).sum();
        let last = ((edges as u128) << 64) / weights.max(1);
        Self { first: 0, last: u64::try_from(last).unwrap_or(u64::MAX) }
    }

    pub(super) fn next(self) -> Option<Self> {
        let first = self.last.checked_add(1)?;
        Some(Self { first, last: self.last.saturating_mul(2).saturating_add(1) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::weight;
    use super::super::{Member, Roster};
    use super::*;

    #[test]
    fn multipliers_are_far_from_small_fractions() {
        for hash in 0..2000 {
            let alpha = multiplier(hash);
            for n in 1..300u64 {
                let term = n.wrapping_mul(alpha);
                let distance = term.min(term.wrapping_neg());
                // A digit of 3 bounds n * distance from below by about 1 / 5.
                assert!(u128::from(n) * u128::from(distance) > 1 << 61, "{hash} {n}");
            }
        }
    }

    #[test]
    fn windows_together_hold_each_edge_once() {
        let names: Vec<String> = (0..40).map(|i| format!("origin-{i}")).collect();
        let members: Vec<Member<'_>> = names
            .iter()
            .zip([1, 2, 7, 1, u32::MAX].into_iter().cycle())
            .map(|(name, w)| Member::new(name).with_weight(weight(w)))
            .collect();
        let roster = Roster::new(&members);
        let fleet = Kronecker::new(&roster.origins);
        let mut expected: Vec<Edge> = (0..50).flat_map(|g| fleet.ranked(g)).collect();
        let mut found = Vec::new();
        let mut window = Some(Window::of(3, &roster.origins));
        while let Some(now) = window {
            found.extend((0..40).flat_map(|o| fleet.edges(o, now, 50)));
            window = now.next();
        }
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected);
    }
}
