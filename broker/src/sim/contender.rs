//! Ways to choose subsets: those of the daemon, and what else is in use, to compare with.
//!
//! The others live here because the daemon has no use for them. Each is written from its
//! publication, with the same hashes and the same work for all.

use std::fmt;
use std::num::NonZeroUsize;

use clap::ValueEnum;

use super::world::World;
use crate::origin::subset::hash::mix;
use crate::origin::subset::{Algorithm, Band, Fleet, Roster, Rules, ring};

/// A family of algorithms, as the command line knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Family {
    /// The daemon's ring.
    Ring,
    /// The ring of the published figures: 32-bit FNV-1a.
    RingFnv32,
    /// A slice of the list that starts where Van der Corput says.
    HashMod,
    /// A random draw for each gateway.
    Random,
    /// Deterministic subsetting of Google's SRE book: a shuffle for each round of gateways.
    Sre,
    /// Deterministic aperture of Twitter's Finagle.
    Aperture,
    /// Rendezvous hashing (highest random weight).
    Hrw,
    /// Consistent hashing: a ring with 100 points for each origin, gateways hashed.
    ConsistentHash,
    /// Google's Maglev table, from a hashed place on.
    Maglev,
    /// The ring with bounded loads: origins get 1.1 times their share at most.
    BoundedRing,
    /// The daemon's Kronecker rendezvous, without and with each `--band`.
    Kronecker,
}

/// One way to choose subsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Contender {
    pub(super) family: Family,
    pub(super) band: Option<Band>,
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.family.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))?;
        self.band.map_or(Ok(()), |band| write!(f, " ±{band}"))
    }
}

/// The fleet that chooses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gateways {
    pub(super) count: u32,
    pub(super) subset: usize,
    pub(super) zone_max: Option<NonZeroUsize>,
}

impl Contender {
    /// All that are asked for.
    pub(super) fn of(families: &[Family], bands: &[Band]) -> Vec<Self> {
        let mut contenders = Vec::new();
        for &family in families {
            contenders.push(Self { family, band: None });
            if family == Family::Kronecker {
                contenders.extend(bands.iter().map(|&band| Self { family, band: Some(band) }));
            }
        }
        contenders
    }

    /// What the daemon calls this, if it can do it.
    pub(super) fn algorithm(self) -> Option<Algorithm> {
        match self.family {
            Family::Ring => Some(Algorithm::Ring),
            Family::Kronecker => Some(Algorithm::Kronecker { band: self.band }),
            _ => None,
        }
    }

    /// The subset of each gateway. `present` are the origins in the order in which they are listed.
    pub(super) fn assign(
        self,
        world: &World,
        present: &[usize],
        gateways: Gateways,
    ) -> Vec<Vec<usize>> {
        let Gateways { count, subset, zone_max } = gateways;
        let k = subset.min(present.len());
        let by_subset_module = |roster: &Roster, algorithm| {
            let rules = Rules { algorithm, zone_max };
            let mut subsets = roster.fleet(rules, &Fleet::uniform(count, k));
            subsets.iter_mut().flatten().for_each(|position| *position = present[*position]);
            subsets
        };
        let each = |choose: &dyn Fn(u32) -> Vec<usize>| (0..count).map(choose).collect();
        match self.family {
            Family::Ring => by_subset_module(&world.roster(present), Algorithm::Ring),
            Family::RingFnv32 => {
                by_subset_module(&world.reference_roster(present), Algorithm::Ring)
            }
            Family::Kronecker => {
                by_subset_module(&world.roster(present), Algorithm::Kronecker { band: self.band })
            }
            Family::HashMod => each(&|g| hash_mod(present, g, k)),
            Family::Random => each(&|g| random(present, g, k)),
            Family::Sre => sre(present, count, k),
            Family::Aperture => each(&|g| aperture(present, g, count, k)),
            Family::Hrw => each(&|g| hrw(world, present, g, k)),
            Family::ConsistentHash => {
                let ring = points(world, present, 100);
                each(&|g| {
                    let start = ring.partition_point(|&(place, _)| place < gateway_hash(g));
                    distinct(ring[start..].iter().chain(&ring[..start]).map(|&(_, o)| o), k)
                })
            }
            Family::Maglev => {
                let table = maglev(world, present);
                each(&|g| {
                    let start = below(gateway_hash(g), table.len());
                    distinct(table[start..].iter().chain(&table[..start]).copied(), k)
                })
            }
            Family::BoundedRing => bounded_ring(world, present, count, k),
        }
    }
}

fn gateway_hash(gateway: u32) -> u64 {
    mix(0x6A7E, gateway.into())
}

/// A fraction of 2^64 as one of `n`.
fn below(fraction: u64, n: usize) -> usize {
    let scaled = (u128::from(fraction) * n as u128) >> 64;
    usize::try_from(scaled).unwrap_or_else(|_| unreachable!("less than n"))
}

/// The first `k` different ones.
fn distinct(origins: impl Iterator<Item = usize>, k: usize) -> Vec<usize> {
    let mut chosen = Vec::with_capacity(k);
    for o in origins {
        if chosen.len() == k {
            break;
        }
        if !chosen.contains(&o) {
            chosen.push(o);
        }
    }
    chosen
}

fn hash_mod(present: &[usize], gateway: u32, k: usize) -> Vec<usize> {
    let start = below(ring::position(gateway), present.len());
    (start..start + k).map(|i| present[i % present.len()]).collect()
}

/// The first `k` of a Fisher-Yates shuffle.
fn random(present: &[usize], gateway: u32, k: usize) -> Vec<usize> {
    let mut list = present.to_vec();
    for i in 0..k {
        let other = i + below(mix(gateway_hash(gateway), i as u64), list.len() - i);
        list.swap(i, other);
    }
    list.truncate(k);
    list
}

/// Site Reliability Engineering, chapter 20: "A Subset Selection Algorithm: Deterministic
/// Subsetting".
fn sre(present: &[usize], gateways: u32, k: usize) -> Vec<Vec<usize>> {
    let subsets = present.len() / k.max(1);
    let (mut round, mut list) = (None, Vec::new());
    (0..gateways as usize)
        .map(|g| {
            let this = g / subsets.max(1);
            if round != Some(this) {
                round = Some(this);
                list = present.to_vec();
                for i in (1..list.len()).rev() {
                    list.swap(i, below(mix(mix(0x5E, this as u64), i as u64), i + 1));
                }
            }
            let start = g % subsets.max(1) * k;
            list[start..start + k].to_vec()
        })
        .collect()
}

/// Gateways and origins share a circle evenly, and a gateway covers a whole number of gateways'
/// arcs, enough for `k` origins: <https://twitter.github.io/finagle/guide/ApertureLoadBalancers.html>.
fn aperture(present: &[usize], gateway: u32, gateways: u32, k: usize) -> Vec<usize> {
    let (g, gateways, origins) = (gateway as usize, gateways as usize, present.len());
    let arcs = (k * gateways).div_ceil(origins).min(gateways);
    let first = g * origins / gateways;
    let end = ((g + arcs) * origins).div_ceil(gateways).min(first + origins);
    (first..end).map(|i| present[i % origins]).collect()
}

fn hrw(world: &World, present: &[usize], gateway: u32, k: usize) -> Vec<usize> {
    let mut scores: Vec<(u64, usize)> =
        present.iter().map(|&o| (mix(world.hashes[o], gateway_hash(gateway)), o)).collect();
    if k < scores.len() {
        scores.select_nth_unstable(k);
    }
    scores[..k].iter().map(|&(_, o)| o).collect()
}

/// A ring of origins with some points each, clockwise.
fn points(world: &World, present: &[usize], points: u64) -> Vec<(u64, usize)> {
    let mut ring: Vec<(u64, usize)> = present
        .iter()
        .flat_map(|&o| (0..points).map(move |point| (mix(world.hashes[o], point), o)))
        .collect();
    ring.sort_unstable();
    ring
}

/// Maglev's lookup table (Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load
/// Balancer", 2016).
fn maglev(world: &World, present: &[usize]) -> Vec<usize> {
    const SIZES: [usize; 3] = [65_537, 655_373, 15_485_863];
    const FREE: usize = usize::MAX;
    let size = SIZES.into_iter().find(|&size| size > 50 * present.len()).unwrap_or(SIZES[2]);
    // Each origin tries the places of a permutation of its own in turn.
    let mut tries: Vec<(usize, usize)> = present
        .iter()
        .map(|&o| {
            let hash = world.hashes[o];
            (below(mix(hash, 1), size), 1 + below(mix(hash, 2), size - 1))
        })
        .collect();
    let mut table = vec![FREE; size];
    let mut free = size;
    while free > 0 {
        for (&o, (place, skip)) in present.iter().zip(&mut tries) {
            while table[*place] != FREE {
                *place = (*place + *skip) % size;
            }
            table[*place] = o;
            free -= 1;
            if free == 0 {
                break;
            }
        }
    }
    table
}

/// Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016), gateways in the
/// order of their indices.
fn bounded_ring(world: &World, present: &[usize], gateways: u32, k: usize) -> Vec<Vec<usize>> {
    let mut ring: Vec<(u64, usize)> = present.iter().map(|&o| (world.hashes[o], o)).collect();
    ring.sort_unstable();
    // Rounded to the nearest where the paper rounds up: around a share of 10.0, one more gateway would
    // lift all bounds from 11 to 12 and so reshuffle the fleet. Elsewhere, this happens at 11.5.
    let (slots, origins) = (gateways as usize * k, present.len());
    let cap = ((11 * slots + 5 * origins) / (10 * origins)).max(slots.div_ceil(origins));
    let mut load = vec![0; world.names.len()];
    (0..gateways)
        .map(|g| {
            let start = ring.partition_point(|&(place, _)| place < ring::position(g));
            let clockwise = || ring[start..].iter().chain(&ring[..start]).map(|&(_, o)| o);
            let mut chosen = distinct(clockwise().filter(|&o| load[o] < cap), k);
            // Everything is full but what it has already.
            if chosen.len() < k {
                chosen = distinct(chosen.iter().copied().chain(clockwise()), k);
            }
            for &o in &chosen {
                load[o] += 1;
            }
            chosen
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::world::{DEFAULT_NAMES, Names};
    use super::*;

    #[test]
    fn each_contender_gives_distinct_origins_that_are_there() {
        let world = World::new(&Names::parse(DEFAULT_NAMES).unwrap(), 60, 0, 6);
        let band = "10%".parse().unwrap();
        for (first, count, subset) in [(0, 30, 5), (7, 1, 1), (0, 50, 60), (59, 3, 9)] {
            let present: Vec<usize> = (first..60).collect();
            let gateways = Gateways { count, subset, zone_max: None };
            for contender in Contender::of(Family::value_variants(), &[band]) {
                let subsets = contender.assign(&world, &present, gateways);
                assert_eq!(subsets.len(), count as usize, "{contender}");
                for chosen in subsets {
                    let distinct: HashSet<usize> = chosen.iter().copied().collect();
                    assert_eq!(distinct.len(), chosen.len(), "{contender}");
                    assert!(distinct.iter().all(|o| present.contains(o)), "{contender}");
                    let k = subset.min(present.len());
                    let right = chosen.len() == k
                        || contender.family == Family::Aperture && chosen.len() > k;
                    assert!(right, "{contender}: {} of {k}", chosen.len());
                }
            }
        }
    }
}
