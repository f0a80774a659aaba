//! The ring: gateways spread evenly by the Van der Corput sequence, origins where their hashes
//! fall; a gateway takes the next origins clockwise.

use std::collections::HashSet;
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
        self.met(gateway).map(|(_, origin)| origin)
    }

    /// Where the last of these is met: the end of the gateway's arc, if they are its subset.
    pub(super) fn end(&self, gateway: u32, subset: &[u32]) -> Option<u64> {
        let mut missing: HashSet<_> = subset.iter().copied().collect();
        let mut met = self.met(gateway).filter(|(_, origin)| missing.remove(origin));
        met.nth(subset.len().checked_sub(1)?).map(|(place, _)| place)
    }

    /// All origins with the places where a gateway first meets them.
    fn met(&self, gateway: u32) -> impl Iterator<Item = (u64, u32)> {
        let start = self.points.partition_point(|&(place, _)| place < position(gateway));
        let (before, after) = self.points.split_at(start);
        let mut met = vec![false; self.origins];
        let mut points = after.iter().chain(before).copied();
        iter::from_fn(move || points.find(|(_, o)| !std::mem::replace(&mut met[*o as usize], true)))
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

    #[test]
    fn an_arc_ends_at_the_last_origin_of_the_subset() {
        let origin =
            |eighth: u64| Origin { hash: eighth << 61, weight: 1, zone: None, position: 0 };
        let ring = Ring::new(&[1, 3, 4, 6].map(origin));
        // Gateway 1 is at one half; its next ones are at 4, 6, and, beyond the end, 1.
        assert_eq!(ring.walk(1).collect::<Vec<_>>(), [2, 3, 0, 1]);
        assert_eq!(
            [&[2][..], &[3, 2], &[2, 3, 0]].map(|s| ring.end(1, s).unwrap() >> 61),
            [4, 6, 1]
        );
        assert_eq!(ring.end(1, &[]), None);
    }
}
