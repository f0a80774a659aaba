//! What a way to choose subsets is worth: coverage, what changes cost, what fails together.

use serde::Serialize;

use super::contender::{Contender, Gateways};
use super::world::World;
use crate::origin::subset::hash::mix;
use crate::origin::subset::sizing::Coverage;

/// Subsets of gateways, by number of the origin.
type Subsets = [Vec<usize>];

/// How a membership changes; samples of each are random, and the same for all contenders.
#[derive(Clone, Copy, Debug)]
pub(super) struct Samples {
    /// Single origins that leave, and as many that come.
    pub(super) single: usize,
    /// Steps of a rolling replacement.
    pub(super) rolling: usize,
    /// Times that 5 % leave at once.
    pub(super) many: usize,
    /// Gateways that are added, one after the other.
    pub(super) gateways: u32,
}

impl Samples {
    /// Newcomers that the world must have.
    pub(super) fn newcomers(self) -> usize {
        self.single.max(self.rolling)
    }
}

/// Connections that a kind of change opened, and how many of them it could not do without: those
/// that replace lost ones, lead to new origins, or belong to new gateways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Moved {
    /// Opened.
    pub opened: usize,
    /// Needed.
    pub needed: usize,
    /// The first divided by the second; 0 where nothing was needed.
    pub factor: f64,
}

impl Moved {
    fn add(&mut self, opened: usize, needed: usize) {
        self.opened += opened;
        self.needed += needed;
        self.factor = self.opened as f64 / self.needed.max(1) as f64;
    }
}

/// What changes cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Moves {
    /// One origin leaves.
    pub remove_one: Moved,
    /// One origin comes.
    pub add_one: Moved,
    /// One in twenty leaves, all at once.
    pub remove_many: Moved,
    /// One after the other leaves and is replaced under another name.
    pub rolling: Moved,
    /// One more gateway.
    pub add_gateway: Moved,
}

/// A membership that changes, and the subsets that result.
struct History<'a> {
    contender: Contender,
    world: &'a World,
    gateways: Gateways,
    present: Vec<usize>,
    subsets: Vec<Vec<usize>>,
}

impl<'a> History<'a> {
    fn start(
        contender: Contender,
        world: &'a World,
        present: &[usize],
        gateways: Gateways,
    ) -> Self {
        let subsets = contender.assign(world, present, gateways);
        Self { contender, world, gateways, present: present.to_vec(), subsets }
    }

    /// What the change to another membership costs; afterwards that is the present one.
    fn go_to(&mut self, present: Vec<usize>, moved: &mut Moved) {
        let after = self.contender.assign(self.world, &present, self.gateways);
        let mut here = vec![0u8; self.world.names.len()];
        for (membership, side) in [(&self.present, 1), (&present, 2)] {
            for &o in membership {
                here[o] |= side;
            }
        }
        let count = |subsets: &Subsets, side| {
            subsets.iter().flatten().filter(|&&o| here[o] == side).count()
        };
        let needed = count(&self.subsets, 1) + count(&after, 2);
        moved.add(opened(&self.subsets, &after, here.len()), needed);
        (self.present, self.subsets) = (present, after);
    }
}

/// Connections in `after` that are not in `before`.
fn opened(before: &Subsets, after: &Subsets, origins: usize) -> usize {
    let mut holder = vec![usize::MAX; origins];
    let mut opened = 0;
    for (g, subset) in after.iter().enumerate() {
        before.get(g).into_iter().flatten().for_each(|&o| holder[o] = g);
        opened += subset.iter().filter(|&&o| holder[o] != g).count();
    }
    opened
}

/// Gateways whose subset is another one.
pub(super) fn gateways_changed(before: &Subsets, after: &Subsets) -> usize {
    let sorted = |subset: &[usize]| {
        let mut subset = subset.to_vec();
        subset.sort_unstable();
        subset
    };
    before.iter().zip(after).filter(|(a, b)| sorted(a) != sorted(b)).count()
}

/// Measures what changes cost, from a fleet with the origins `0..origins` on.
pub(super) fn moves(
    contender: Contender,
    world: &World,
    origins: usize,
    gateways: Gateways,
    samples: Samples,
) -> Moves {
    let all: Vec<usize> = (0..origins).collect();
    let first = History::start(contender, world, &all, gateways);
    let start = || History { present: all.clone(), subsets: first.subsets.clone(), ..first };
    // Random numbers below `n`, by purpose.
    let draw = |purpose: u64, i: usize, n: usize| {
        let random = mix(purpose, i as u64) % n.max(1) as u64;
        usize::try_from(random).unwrap_or_default()
    };
    let mut moves = Moves::default();
    // The last one must stay.
    let singles = if origins > 1 { samples.single } else { 0 };
    for i in 0..singles {
        let mut left = all.clone();
        left.remove(draw(1, i, origins));
        start().go_to(left, &mut moves.remove_one);
    }
    for i in 0..samples.single {
        let mut more = all.clone();
        more.insert(draw(2, i, origins + 1), origins + i);
        start().go_to(more, &mut moves.add_one);
    }
    for i in 0..samples.many {
        let mut left = all.clone();
        for j in 0..origins / 20 {
            left.remove(draw(3, i * origins + j, left.len()));
        }
        start().go_to(left, &mut moves.remove_many);
    }
    let mut history = start();
    for i in 0..samples.rolling.min(singles) {
        let mut present = history.present.clone();
        let place = draw(4, i, present.len());
        present.remove(place);
        history.go_to(present.clone(), &mut moves.rolling);
        present.insert(place, origins + i);
        history.go_to(present, &mut moves.rolling);
    }
    let mut subsets = first.subsets.clone();
    for more in 1..=samples.gateways {
        let gateways = Gateways { count: gateways.count + more, ..gateways };
        let after = contender.assign(world, &all, gateways);
        let needed = after.last().map_or(0, Vec::len);
        moves.add_gateway.add(opened(&subsets, &after, world.names.len()), needed);
        subsets = after;
    }
    moves
}

/// Gateways of each origin.
pub(super) fn counts(subsets: &Subsets, origins: usize) -> Vec<usize> {
    let mut counts = vec![0; origins];
    for &o in subsets.iter().flatten() {
        counts[o] += 1;
    }
    counts
}

/// How many origins have 0, 1, 2, … gateways, up to the most.
pub(super) fn histogram(counts: &[usize], coverage: &Coverage) -> Vec<usize> {
    let mut histogram = vec![0; coverage.max + 1];
    for &count in counts {
        histogram[count] += 1;
    }
    histogram
}

/// The most origins that a gateway loses when one zone dies, whichever that is.
pub(super) fn worst_zone_loss(subsets: &Subsets, world: &World) -> usize {
    let mut worst = 0;
    for subset in subsets {
        let mut lost = vec![0; world.zones()];
        for &o in subset {
            lost[world.zone_of(o)] += 1;
        }
        worst = worst.max(lost.into_iter().max().unwrap_or(0));
    }
    worst
}

/// Origins that two gateways have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Overlap {
    /// On average.
    pub mean: f64,
    /// At most.
    pub max: usize,
}

/// The overlap of all pairs of gateways; in a large fleet, of some gateways.
pub(super) fn overlap(subsets: &Subsets, origins: usize) -> Overlap {
    const GATEWAYS_MAX: usize = 1000;
    let step = subsets.len().div_ceil(GATEWAYS_MAX).max(1);
    let sets: Vec<Vec<u64>> = subsets
        .iter()
        .step_by(step)
        .map(|subset| {
            let mut bits = vec![0; origins.div_ceil(64)];
            for &o in subset {
                bits[o / 64] |= 1 << (o % 64);
            }
            bits
        })
        .collect();
    let (mut sum, mut max, mut pairs) = (0, 0, 0);
    for (i, a) in sets.iter().enumerate() {
        for b in &sets[..i] {
            let common: usize = a.iter().zip(b).map(|(a, b)| (a & b).count_ones() as usize).sum();
            sum += common;
            max = max.max(common);
            pairs += 1;
        }
    }
    Overlap { mean: sum as f64 / f64::from(pairs.max(1)), max }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_states_have_in_common() {
        let before = [vec![0, 1], vec![2, 3]];
        let after = [vec![1, 0], vec![3, 4], vec![5, 6]];
        assert_eq!(gateways_changed(&before, &after), 1);
        assert_eq!(opened(&before, &after, 7), 3);
        assert_eq!(
            overlap(&[vec![0, 1], vec![1, 2], vec![1, 0]], 3),
            Overlap { mean: 4.0 / 3.0, max: 2 }
        );
    }
}
