//! Which origins a gateway keeps sockets to, if not to all of them.
//!
//! G gateways that pool to each of M origins hold G × M sockets. With subsets of k it is G × k, and
//! three things decide whether that is any good: that each origin gets its share of gateways
//! (*coverage*), that a change of the membership moves few sockets, and that gateways do not all
//! lose the same origins at once (*overlap*). `broker sim` measures them.
//!
//! Every gateway works its subset out alone, from its index and the membership, without history
//! and without asking anybody. So whatever decides here must come out the same on all gateways, in
//! any order of the membership and in any version of the broker: there is no randomness and no
//! floating point, and the results are pinned by golden files.
//!
//! | algorithm | coverage (G = 500, M = 1000, k = 20) | an origin leaves |
//! |---|---|---|
//! | [`Algorithm::Ring`] | 3..19 | moves what it held; neighbours share most of their subset |
//! | [`Algorithm::Kronecker`] | 5..14 | moves what it held |
//! | … with a band of 10 % | 9..11 | moves 1.4 × what it held, on average |

mod band;
pub mod hash;
mod kronecker;
pub mod ring;
mod rotation;
pub mod sizing;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::str::FromStr;

use self::kronecker::{Edge, Kronecker};
use self::ring::Ring;

/// An origin as its gateways know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member<'a> {
    /// What it is called, the same on all gateways.
    pub identity: &'a str,
    /// How much it should serve compared to the others.
    pub weight: NonZeroU32,
    /// What it shares a fate with, such as a rack or a zone.
    pub zone: Option<&'a str>,
}

impl<'a> Member<'a> {
    /// An origin of weight 1 in no zone.
    #[must_use]
    pub fn new(identity: &'a str) -> Self {
        Self { identity, weight: NonZeroU32::MIN, zone: None }
    }

    /// The same with a weight.
    #[must_use]
    pub fn with_weight(self, weight: NonZeroU32) -> Self {
        Self { weight, ..self }
    }

    /// The same in a zone.
    #[must_use]
    pub fn in_zone(self, zone: &'a str) -> Self {
        Self { zone: Some(zone), ..self }
    }
}

/// The gateways that share the origins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fleet {
    /// How many there are, with indices from 0. Only bands depend on it; a gateway with an index
    /// beyond chooses as without a band, and nobody reckons with it.
    pub gateways: u32,
    /// Origins in the subset of each.
    pub size: usize,
    /// Gateways with another size, by index: 0 if drained.
    pub sizes: BTreeMap<u32, usize>,
}

impl Fleet {
    /// Gateways with subsets of one size.
    #[must_use]
    pub fn uniform(gateways: u32, size: usize) -> Self {
        Self { gateways, size, sizes: BTreeMap::new() }
    }

    /// Size of the subset of one gateway.
    #[must_use]
    pub fn size_of(&self, index: u32) -> usize {
        self.sizes.get(&index).copied().unwrap_or(self.size)
    }

    /// Sizes of all subsets where there are `origins`.
    fn sizes(&self, origins: usize) -> Vec<usize> {
        (0..self.gateways).map(|index| self.size_of(index).min(origins)).collect()
    }
}

/// How subsets are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// By which algorithm.
    pub algorithm: Algorithm,
    /// Most origins of one zone in a subset. Where that leaves too few, those beyond it fill up,
    /// last: a subset that is too small helps nobody.
    pub zone_max: Option<NonZeroUsize>,
}

/// What ranks the origins for a gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// Nothing: every gateway has all origins.
    #[default]
    Off,
    /// The next ones clockwise on a ring of hashes. Known from elsewhere and easy to picture. An
    /// origin of weight w has w points, at most 256.
    Ring,
    /// Those that rank this gateway best in their own sequences.
    Kronecker {
        /// Keeps every origin's gateways near its share. All gateways must know the same number of
        /// gateways then, and their sizes.
        band: Option<Band>,
    },
}

/// How far from its share the number of an origin's gateways may be.
///
/// Shares go by weight, but an origin cannot have more than all gateways. Bounds are rounded so that
/// there is a whole number to each side of the share: a band of 10 % around 10 is 9..=11, and so is
/// one of 0 %. Where a gateway already has all origins that still have room, it takes one that has
/// none, rather than being short: by one in small fleets with hardly more room than slots, by more if
/// subsets are most of all origins, weights differ widely or zones leave nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band(u16);

impl Band {
    /// A band of so many thousandths of the share to each side; at most 1000.
    #[must_use]
    pub fn permille_of(permille: u16) -> Option<Self> {
        (permille <= 1000).then_some(Self(permille))
    }

    /// Thousandths of the share.
    #[must_use]
    pub fn permille(self) -> u16 {
        self.0
    }
}

impl fmt::Display for Band {
    /// As `10%` or `2.5%`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 % 10 {
            0 => write!(f, "{}%", self.0 / 10),
            tenth => write!(f, "{}.{tenth}%", self.0 / 10),
        }
    }
}

impl FromStr for Band {
    type Err = &'static str;

    /// Reads what [`fmt::Display`] writes; the sign may be left out.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const RULE: &str = "must be 0% to 100%, in steps of 0.1%";
        let number = text.trim().trim_end_matches('%').trim_end();
        let (whole, tenth) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
        if !digits(whole) || !digits(tenth) || tenth.len() > 1 {
            return Err(RULE);
        }
        format!("{whole}{tenth}").parse().ok().and_then(Self::permille_of).ok_or(RULE)
    }
}

/// All origins in the order in which one gateway wants them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    positions: Vec<usize>,
    subset: usize,
    arc: Option<[u64; 2]>,
}

impl Order {
    /// All of them: positions in the list of members, those of the subset first.
    #[must_use]
    pub fn all(&self) -> &[usize] {
        &self.positions
    }

    /// The subset, best first.
    #[must_use]
    pub fn subset(&self) -> &[usize] {
        &self.positions[..self.subset]
    }

    /// From where to where on the ring the subset lies, clockwise, as fractions of 2^64; `None` without a
    /// ring.
    #[must_use]
    pub fn arc(&self) -> Option<[u64; 2]> {
        self.arc
    }

    /// The others, in the order in which they should join when too few of the subset are healthy.
    /// The quota of zones does not count for them.
    #[must_use]
    pub fn reserve(&self) -> &[usize] {
        &self.positions[self.subset..]
    }
}

/// The subset of one gateway: `fleet.size_of(index)` distinct origins, or all if there are fewer.
///
/// The order of `members` does not matter. Of several with one identity the heaviest counts.
#[must_use]
pub fn order(rules: Rules, fleet: &Fleet, index: u32, members: &[Member<'_>]) -> Order {
    Roster::new(members).order(rules, fleet, index)
}

/// A membership made ready: distinct, in an order of its own, hashed.
#[derive(Clone, Debug)]
pub struct Roster {
    /// Ordered by hash, then identity.
    origins: Vec<Origin>,
}

/// An origin as the algorithms know it; they call it by its index in the roster.
#[derive(Clone, Copy, Debug)]
struct Origin {
    hash: u64,
    /// Not 0.
    weight: u64,
    zone: Option<u32>,
    /// Place in the list of members.
    position: usize,
}

impl Roster {
    /// Makes a membership ready.
    ///
    /// # Panics
    ///
    /// Beyond 2^32 - 1 members.
    #[must_use]
    pub fn new(members: &[Member<'_>]) -> Self {
        Self::placed_by(members, hash::well_mixed)
    }

    /// A roster whose origins are placed by another hash than the daemon's. For reference figures.
    ///
    /// # Panics
    ///
    /// Beyond 2^32 - 1 members.
    #[must_use]
    pub fn placed_by(members: &[Member<'_>], hash: impl Fn(&str) -> u64) -> Self {
        assert!(u32::try_from(members.len()).is_ok(), "more than 2^32 - 1 members");
        let mut hashed: Vec<(u64, usize)> =
            members.iter().enumerate().map(|(i, member)| (hash(member.identity), i)).collect();
        hashed.sort_unstable_by_key(|&(hash, i)| {
            let Member { identity, weight, zone } = members[i];
            (hash, identity, Reverse(weight), zone, i)
        });
        hashed.dedup_by_key(|(_, i)| members[*i].identity);
        let mut zones: HashMap<&str, u32> = HashMap::new();
        let origins = hashed
            .into_iter()
            .map(|(hash, position)| {
                let Member { weight, zone, .. } = members[position];
                let next = index_of(zones.len());
                let zone = zone.map(|name| *zones.entry(name).or_insert(next));
                Origin { hash, weight: u64::from(weight.get()), zone, position }
            })
            .collect();
        Self { origins }
    }

    /// Number of distinct origins.
    #[must_use]
    pub fn len(&self) -> usize {
        self.origins.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.origins.is_empty()
    }

    /// The subset of one gateway; see [`order`].
    #[must_use]
    pub fn order(&self, rules: Rules, fleet: &Fleet, index: u32) -> Order {
        let size = fleet.size_of(index).min(self.len());
        let mut arc = None;
        let (first, ranked): (Vec<u32>, Vec<u32>) = match rules.algorithm {
            Algorithm::Off => {
                let all: Vec<u32> = (0..index_of(self.len())).collect();
                (all.clone(), all)
            }
            Algorithm::Ring => {
                let ring = Ring::new(&self.origins);
                let ranked: Vec<u32> = ring.walk(index).collect();
                let first = self.choose(ranked.iter().copied(), size, rules.zone_max);
                arc = ring.end(index, &first).map(|end| [ring::position(index), end]);
                (first, ranked)
            }
            Algorithm::Kronecker { band } => {
                let kronecker = Kronecker::new(&self.origins);
                let ranked: Vec<u32> = names(&kronecker.ranked(index));
                let first = match band.filter(|_| index < fleet.gateways) {
                    None => self.choose(ranked.iter().copied(), size, rules.zone_max),
                    Some(band) => {
                        let sizes = fleet.sizes(self.len());
                        let all = band::assign(&kronecker, &sizes, band, rules.zone_max);
                        names(&all[index as usize])
                    }
                };
                (first, ranked)
            }
        };
        let mut chosen = vec![false; self.len()];
        for &o in &first {
            chosen[o as usize] = true;
        }
        let rest = ranked.into_iter().filter(|&o| !chosen[o as usize]);
        let positions = first.iter().copied().chain(rest).map(|o| self.position(o)).collect();
        Order { positions, subset: first.len(), arc }
    }

    /// The subsets of all gateways, by index: positions in the list of members, best first.
    #[must_use]
    pub fn fleet(&self, rules: Rules, fleet: &Fleet) -> Vec<Vec<usize>> {
        let sizes = fleet.sizes(self.len());
        let by_gateway = |subset: Vec<u32>| subset.into_iter().map(|o| self.position(o)).collect();
        match rules.algorithm {
            Algorithm::Off => {
                let all: Vec<usize> = self.origins.iter().map(|origin| origin.position).collect();
                vec![all; sizes.len()]
            }
            Algorithm::Ring => {
                let ring = Ring::new(&self.origins);
                (0..)
                    .zip(sizes)
                    .map(|(g, size)| by_gateway(self.choose(ring.walk(g), size, rules.zone_max)))
                    .collect()
            }
            Algorithm::Kronecker { band } => {
                let kronecker = Kronecker::new(&self.origins);
                let all = match band {
                    None => band::natural(&kronecker, &sizes, rules.zone_max),
                    Some(band) => band::assign(&kronecker, &sizes, band, rules.zone_max),
                };
                all.iter().map(|edges| by_gateway(names(edges))).collect()
            }
        }
    }

    fn choose(
        &self,
        ranked: impl IntoIterator<Item = u32>,
        size: usize,
        zone_max: Option<NonZeroUsize>,
    ) -> Vec<u32> {
        choose(ranked, size, |o| self.origins[o as usize].zone, zone_max).0
    }

    fn position(&self, origin: u32) -> usize {
        self.origins[origin as usize].position
    }
}

fn names(edges: &[Edge]) -> Vec<u32> {
    edges.iter().map(|edge| edge.origin).collect()
}

/// An index in a roster or a fleet as the algorithms store it.
fn index_of(i: usize) -> u32 {
    u32::try_from(i).unwrap_or_else(|_| unreachable!("a roster has fewer than 2^32 origins"))
}

/// The first `size` of `ranked` whose zones are not full, then those beyond the quota; and whether
/// there were enough without them.
fn choose<T: Copy>(
    ranked: impl IntoIterator<Item = T>,
    size: usize,
    zone: impl Fn(T) -> Option<u32>,
    zone_max: Option<NonZeroUsize>,
) -> (Vec<T>, bool) {
    let mut taken: Vec<usize> = Vec::new();
    let mut chosen = Vec::with_capacity(size);
    let mut beyond = Vec::new();
    for candidate in ranked {
        if chosen.len() == size {
            break;
        }
        if let (Some(max), Some(zone)) = (zone_max, zone(candidate)) {
            let zone = zone as usize;
            taken.resize(taken.len().max(zone + 1), 0);
            if taken[zone] == max.get() {
                beyond.push(candidate);
                continue;
            }
            taken[zone] += 1;
        }
        chosen.push(candidate);
    }
    let missing = size - chosen.len();
    chosen.extend(beyond.into_iter().take(missing));
    (chosen, missing == 0)
}
