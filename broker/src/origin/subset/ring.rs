//! The ring: gateways spread evenly by the Van der Corput sequence, origins where their hashes
//! fall; a gateway takes the next origins clockwise.

use std::iter;

use super::hash::mix;
use super::{Origin, index_of};

/// Most points of one origin, whatever its weight.
const POINTS_MAX: u64 = 256;

/// Where gateway `index` sits, as a fraction of 2^64: Van der Corput's sequence of base 2, which
/// halves the largest gap again and again. A new gateway moves none of the others.
#[must_use]
pub fn position(index: u32) -> u64 {
    u64::from(index.reverse_bits()) << 32
}

/// The points of a roster's origins, clockwise.
#[derive(Debug)]
pub(super) struct Ring {
    /// Place and index in the roster.
    points: Vec<(u64, u32)>,
    origins: usize,
}

impl Ring {
    pub(super) fn new(origins: &[Origin]) -> Self {
        let mut points: Vec<(u64, u32)> = Vec::with_capacity(origins.len());
        for (o, origin) in origins.iter().enumerate() {
            points.push((origin.hash, index_of(o)));
            let more = 1..origin.weight.min(POINTS_MAX);
            points.extend(more.map(|point| (mix(origin.hash, point), index_of(o))));
        }
        points.sort_unstable();
        Self { points, origins: origins.len() }
    }

    /// All origins for one gateway, clockwise, each where it is met first.
    pub(super) fn walk(&self, gateway: u32) -> impl Iterator<Item = u32> {
        let start = self.points.partition_point(|&(place, _)| place < position(gateway));
        let (before, after) = self.points.split_at(start);
        let mut met = vec![false; self.origins];
        let mut points = after.iter().chain(before);
        iter::from_fn(move || {
            points.find(|(_, o)| !std::mem::replace(&mut met[*o as usize], true)).map(|(_, o)| *o)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gateways_halve_the_gaps() {
        let eighths: Vec<u64> = (0..8).map(|i| position(i) >> 61).collect();
        assert_eq!(eighths, [0, 4, 2, 6, 1, 5, 3, 7]);
    }
}
