//! Kronecker rendezvous for a whole fleet, with a bound on how many gateways each origin gets.
//!
//! A subset of its own choosing leaves an origin with some gateways more or less than its share.
//! With a band every gateway works out the same small corrections for the whole fleet, and applies
//! those that concern it. Since all of them must come to the same result, whatever the machine,
//! there are only integers here.

use std::cmp::Reverse;
use std::num::NonZeroUsize;

use super::kronecker::{Edge, Kronecker, Window};
use super::{Band, Origin, choose, index_of};

/// The subsets that each gateway chooses alone: `sizes[g]` origins, best first.
pub(super) fn natural(
    fleet: &Kronecker<'_>,
    sizes: &[usize],
    zone_max: Option<NonZeroUsize>,
) -> Vec<Vec<Edge>> {
    let zone = |edge: Edge| fleet.origins()[edge.origin as usize].zone;
    (0..)
        .zip(sizes.iter().zip(nearest(fleet, sizes, zone_max)))
        .map(|(g, (&size, near))| {
            let (subset, in_quota) = choose(near, size, zone, zone_max);
            if in_quota { subset } else { choose(fleet.ranked(g), size, zone, zone_max).0 }
        })
        .collect()
}

/// For each gateway about as many of its best edges as it needs, in order. None where looking at
/// all edges is no more work.
fn nearest(
    fleet: &Kronecker<'_>,
    sizes: &[usize],
    zone_max: Option<NonZeroUsize>,
) -> Vec<Vec<Edge>> {
    let mut near: Vec<Vec<Edge>> = vec![Vec::new(); sizes.len()];
    let Some(enough) = enough(sizes, zone_max).filter(|&n| n < fleet.origins().len() / 4) else {
        return near;
    };
    let window = Window::of(enough, fleet.origins());
    for o in 0..fleet.origins().len() {
        for edge in fleet.edges(o, window, index_of(sizes.len())) {
            let g = edge.gateway as usize;
            if sizes[g] > 0 {
                near[g].push(edge);
            }
        }
    }
    for edges in &mut near {
        edges.sort_unstable();
    }
    near
}

/// How many edges per gateway to look for first: so many that few gateways find less than they
/// need, four standard deviations of what random scores would give; more where a quota will pass
/// some over.
fn enough(sizes: &[usize], zone_max: Option<NonZeroUsize>) -> Option<usize> {
    let most = sizes.iter().copied().max().filter(|&most| most > 0)?;
    let enough = most + 4 * most.isqrt() + 4;
    Some(if zone_max.is_some() { 2 * enough } else { enough })
}

/// The subsets of all gateways, each ordered best first. Gateway `g` gets `sizes[g]` origins, which
/// must not be more than there are.
pub(super) fn assign(
    fleet: &Kronecker<'_>,
    sizes: &[usize],
    band: Band,
    zone_max: Option<NonZeroUsize>,
) -> Vec<Vec<Edge>> {
    let bounds = bounds(fleet.origins(), sizes, band);
    let mut plan = Plan::keep_below(&bounds, fleet, sizes, zone_max);
    let first = Window::of(
        enough(sizes, zone_max).unwrap_or(1).min(fleet.origins().len()),
        fleet.origins(),
    );
    // A quota or extreme weights can leave a gateway without any origin that it may take. Being
    // short is worse than being uneven, and being uneven worse than a full zone.
    for (below_cap, in_quota) in [(true, true), (false, true), (false, false)] {
        plan.fill(first, below_cap, in_quota);
    }
    plan.lift(first);
    plan.held
}

/// How many gateways an origin may have at least and at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) min: u64,
    pub(super) max: u64,
}

/// The bounds of each origin: its share of all slots by weight, and the band around it.
///
/// A share is rounded by 3/4 and the bounds are at least the integers next to it, so that a band
/// can always be kept. An origin cannot have more than all gateways: what is beyond that is shared
/// by the others.
pub(super) fn bounds(origins: &[Origin], sizes: &[usize], band: Band) -> Vec<Bounds> {
    let gateways = sizes.iter().filter(|&&size| size > 0).count() as i128;
    let mut slots: i128 = sizes.iter().map(|&size| size as i128).sum();
    let mut weights: i128 = origins.iter().map(|origin| i128::from(origin.weight)).sum();
    let mut heaviest: Vec<i128> = origins.iter().map(|origin| origin.weight.into()).collect();
    heaviest.sort_unstable_by_key(|&weight| Reverse(weight));
    for weight in heaviest {
        if weight * slots <= gateways * weights {
            break;
        }
        slots -= gateways;
        weights -= weight;
    }
    // The share of weight w is w * slots / weights; bounds are quotients with 4000 * weights.
    let weights = weights.max(1);
    let permille = i128::from(band.permille());
    origins
        .iter()
        .map(|origin| {
            let share = (i128::from(origin.weight) * slots).min(gateways * weights);
            let (floor, ceil) = (share.div_euclid(weights), -(-share).div_euclid(weights));
            let above = (4 * (1000 + permille) * share + 3000 * weights).div_euclid(4000 * weights);
            let below =
                -(3000 * weights - 4 * (1000 - permille) * share).div_euclid(4000 * weights);
            let bound = |n: i128| u64::try_from(n.max(0)).unwrap_or(u64::MAX);
            Bounds { min: bound(below.min(ceil - 1)), max: bound(above.max(floor + 1)) }
        })
        .collect()
}

/// The subsets on their way into the band.
struct Plan<'a> {
    fleet: &'a Kronecker<'a>,
    bounds: &'a [Bounds],
    zone_max: Option<NonZeroUsize>,
    /// What each gateway has, best first between the steps.
    held: Vec<Vec<Edge>>,
    /// How many more each gateway needs.
    missing: Vec<usize>,
    /// How many gateways have each origin.
    load: Vec<u64>,
}

impl<'a> Plan<'a> {
    /// First step: gateways take what they would choose alone, as long as it is not full.
    fn keep_below(
        bounds: &'a [Bounds],
        fleet: &'a Kronecker<'a>,
        sizes: &[usize],
        zone_max: Option<NonZeroUsize>,
    ) -> Self {
        let mut load = vec![0; bounds.len()];
        let mut held = natural(fleet, sizes, zone_max);
        let mut missing = Vec::with_capacity(sizes.len());
        for edges in &mut held {
            let wanted = edges.len();
            edges.retain(|edge| {
                let o = edge.origin as usize;
                let keep = load[o] < bounds[o].max;
                load[o] += u64::from(keep);
                keep
            });
            missing.push(wanted - edges.len());
            // What was beyond the quota came last.
            edges.sort_unstable();
        }
        Self { fleet, bounds, zone_max, held, missing, load }
    }

    /// Second step: slots that are missing take the best edges of origins that have room.
    fn fill(&mut self, first: Window, below_cap: bool, in_quota: bool) {
        let mut open: usize = self.missing.iter().sum();
        if open == 0 {
            return;
        }
        // What is held is looked up in here, since each edge comes up once.
        let before: Vec<usize> = self.held.iter().map(Vec::len).collect();
        let mut window = Some(first);
        while let Some(now) = window.filter(|_| open > 0) {
            let has_room = |plan: &Self, o: usize| !below_cap || plan.load[o] < plan.bounds[o].max;
            let edges = self.edges(now, |plan, o| has_room(plan, o), |plan, g| plan.missing[g] > 0);
            for edge in edges {
                let (g, o) = (edge.gateway as usize, edge.origin as usize);
                let full = in_quota && self.zone_is_full(g, o);
                let held = self.held[g][..before[g]].binary_search(&edge).is_ok();
                if self.missing[g] == 0 || !has_room(self, o) || full || held {
                    continue;
                }
                self.held[g].push(edge);
                self.load[o] += 1;
                self.missing[g] -= 1;
                open -= 1;
            }
            window = now.next();
        }
        for edges in &mut self.held {
            edges.sort_unstable();
        }
    }

    /// Third step: origins with too few gateways take the place of those that are worst ranked
    /// where they are, and can spare one.
    fn lift(&mut self, first: Window) {
        let before = self.load.clone();
        let mut window = Some(first);
        while let Some(now) = window {
            if self.load.iter().zip(self.bounds).all(|(&load, bounds)| load >= bounds.min) {
                break;
            }
            let low = |plan: &Self, o: usize| plan.load[o] < plan.bounds[o].min;
            for edge in self.edges(now, low, |plan, g| !plan.held[g].is_empty()) {
                let (g, o) = (edge.gateway as usize, edge.origin as usize);
                let Err(place) = self.held[g].binary_search(&edge) else { continue };
                if !low(self, o) {
                    continue;
                }
                // In a full zone, only one of the same zone can give way.
                let zone = self.fleet.origins()[o].zone.filter(|_| self.zone_is_full(g, o));
                let spare = self.held[g].iter().rposition(|held| {
                    let z = held.origin as usize;
                    let min = self.bounds[z].min;
                    (zone.is_none() || self.fleet.origins()[z].zone == zone)
                        && self.load[z] > min
                        && before[z] > min
                });
                let Some(spare) = spare else { continue };
                let gone = self.held[g].remove(spare);
                self.held[g].insert(place - usize::from(spare < place), edge);
                self.load[gone.origin as usize] -= 1;
                self.load[o] += 1;
            }
            window = now.next();
        }
    }

    /// The edges in a window between certain origins and certain gateways, in order.
    fn edges(
        &self,
        window: Window,
        origin: impl Fn(&Self, usize) -> bool,
        gateway: impl Fn(&Self, usize) -> bool,
    ) -> Vec<Edge> {
        let gateways = index_of(self.held.len());
        let mut edges: Vec<Edge> = (0..self.load.len())
            .filter(|&o| origin(self, o))
            .flat_map(|o| self.fleet.edges(o, window, gateways))
            .filter(|edge| gateway(self, edge.gateway as usize))
            .collect();
        edges.sort_unstable();
        edges
    }

    /// Whether gateway `g` has as many of the zone of origin `o` as it may.
    fn zone_is_full(&self, g: usize, o: usize) -> bool {
        let origins = self.fleet.origins();
        let (Some(max), Some(zone)) = (self.zone_max, origins[o].zone) else { return false };
        let of_zone = |held: &&Edge| origins[held.origin as usize].zone == Some(zone);
        self.held[g].iter().filter(of_zone).count() >= max.get()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::weight;
    use super::super::{Member, Roster};
    use super::*;

    fn of(weights: &[u32], sizes: &[usize], permille: u16) -> Vec<(u64, u64)> {
        let names: Vec<String> = (0..weights.len()).map(|i| i.to_string()).collect();
        let members: Vec<Member<'_>> = names
            .iter()
            .zip(weights)
            .map(|(name, &w)| Member::new(name).with_weight(weight(w)))
            .collect();
        let origins = Roster::new(&members).origins;
        let mut bounds: Vec<_> = bounds(&origins, sizes, Band::permille_of(permille).unwrap())
            .into_iter()
            .map(|bounds| (bounds.min, bounds.max))
            .collect();
        bounds.sort_unstable();
        bounds
    }

    #[test]
    fn bands_are_rounded_so_that_they_can_be_kept() {
        // A share of 10: 9 - 0.75 and 11 + 0.75.
        assert_eq!(of(&[1; 100], &[20; 50], 100)[0], (9, 11));
        assert_eq!(of(&[1; 100], &[20; 50], 200)[0], (8, 12));
        // Without any band there is still one on each side.
        assert_eq!(of(&[1; 100], &[20; 50], 0)[0], (9, 11));
        // 10.01 gateways: 11.011 + 0.75 is less than 12.
        assert_eq!(of(&[1; 999], &[20; 500], 100)[0], (9, 11));
        // A share below one.
        assert_eq!(of(&[1; 100], &[1; 50], 100)[0], (0, 1));
    }

    #[test]
    fn shares_go_by_weight_up_to_all_gateways() {
        assert_eq!(of(&[1, 1, 2], &[1; 40], 0), [(9, 11), (9, 11), (19, 21)]);
        // The heavy one would be due 36 of 40 slots; with all 20 gateways, 20 are left for two.
        assert_eq!(of(&[1, 1, 18], &[2; 20], 0), [(9, 11), (9, 11), (19, 21)]);
        // Drained gateways count for nothing.
        assert_eq!(of(&[1, 1], &[1, 0, 1, 0], 0), [(0, 2), (0, 2)]);
    }
}
