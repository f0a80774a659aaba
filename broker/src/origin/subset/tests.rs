//! What must hold for every algorithm; and what has come out since the first version, and must
//! come out for ever.

use std::collections::{BTreeSet, HashSet};
use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;

const KRONECKER: Algorithm = Algorithm::Kronecker { band: None };
const BANDED: Algorithm = Algorithm::Kronecker { band: Some(Band(100)) };
const ALL: [Algorithm; 4] = [Algorithm::Off, Algorithm::Ring, KRONECKER, BANDED];

pub(super) fn weight(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

fn rules(algorithm: Algorithm) -> Rules {
    Rules { algorithm, zone_max: None }
}

fn identities(n: usize) -> Vec<String> {
    (0..n).map(|i| format!("10.0.{}.{}:8080", i >> 8, i & 255)).collect()
}

fn members(identities: &[String]) -> Vec<Member<'_>> {
    identities.iter().map(|identity| Member::new(identity)).collect()
}

fn coverage_of(subsets: &[Vec<usize>], origins: usize) -> Vec<usize> {
    let mut counts = vec![0; origins];
    for &o in subsets.iter().flatten() {
        counts[o] += 1;
    }
    counts
}

/// A fleet with everything: weights, zones, a drained gateway and a large one.
fn motley(names: &[String]) -> (Vec<Member<'_>>, Fleet) {
    const ZONES: [&str; 4] = ["a", "b", "c", "d"];
    let members = names.iter().enumerate().map(|(i, name)| {
        let member = Member::new(name).with_weight(weight([1, 1, 2, 5][i % 4]));
        if i % 7 == 0 { member } else { member.in_zone(ZONES[i % 3 + i % 2]) }
    });
    let mut fleet = Fleet::uniform(12, 6);
    fleet.sizes.extend([(3, 0), (7, 9)]);
    (members.collect(), fleet)
}

mod pinned {
    use super::*;

    /// One line for each gateway: its subset by names, in order.
    fn shown(rules: Rules, fleet: &Fleet, members: &[Member<'_>]) -> String {
        let mut out = String::new();
        for (g, subset) in Roster::new(members).fleet(rules, fleet).into_iter().enumerate() {
            write!(out, "{g}:").unwrap();
            for o in subset {
                write!(out, " {}", members[o].identity).unwrap();
            }
            out.push('\n');
        }
        out
    }

    fn check(algorithm: Algorithm, golden: &str) {
        let names: Vec<String> = (0..40).map(|i| format!("origin-{i}")).collect();
        let mut out = String::from("12 gateways, 40 origins, 5 each\n");
        out += &shown(rules(algorithm), &Fleet::uniform(12, 5), &members(&names));
        out += "weights, zones with 2 at most, gateway 3 drained, gateway 7 with 9\n";
        let (members_of_all_kinds, fleet) = motley(&names);
        let zone_max = NonZeroUsize::new(2);
        out += &shown(Rules { algorithm, zone_max }, &fleet, &members_of_all_kinds);
        let names = identities(1000);
        let large = shown(rules(algorithm), &Fleet::uniform(500, 20), &members(&names));
        writeln!(out, "500 gateways, 1000 origins, 20 each: {:016x}", hash::well_mixed(&large))
            .unwrap();
        assert!(out == golden, "a fleet would be reshuffled; now:\n{out}");
    }

    #[test]
    fn ring() {
        check(Algorithm::Ring, include_str!("golden/ring.txt"));
    }

    #[test]
    fn kronecker() {
        check(KRONECKER, include_str!("golden/kronecker.txt"));
    }

    #[test]
    fn kronecker_with_a_band() {
        check(BANDED, include_str!("golden/kronecker-band.txt"));
    }
}

/// Algorithms, members by number (with duplicates), gateways, sizes and a quota.
#[derive(Clone, Debug)]
struct Case {
    rules: Rules,
    members: Vec<(u16, u32, u8)>,
    fleet: Fleet,
    index: u32,
}

fn case() -> impl Strategy<Value = Case> {
    let algorithm = (0..ALL.len()).prop_map(|i| ALL[i]);
    let member = (0u16..300, prop_oneof![4 => Just(1u32), 1 => 1u32..50], 0u8..6);
    let members = prop::collection::vec(member, 0..150);
    let fleet = (1u32..30, 0usize..30);
    (algorithm, 0usize..5, members, fleet, any::<prop::sample::Index>()).prop_map(
        |(algorithm, quota, members, (gateways, size), index)| Case {
            rules: Rules { algorithm, zone_max: NonZeroUsize::new(quota) },
            members,
            fleet: Fleet::uniform(gateways, size),
            index: index_of(index.index(gateways as usize)),
        },
    )
}

impl Case {
    fn names(&self) -> Vec<(String, u32, String)> {
        let name = |&(n, weight, zone): &_| (format!("origin-{n}"), weight, format!("zone-{zone}"));
        self.members.iter().map(name).collect()
    }

    /// The subset and the reserve by name.
    fn order(&self, names: &[(String, u32, String)]) -> (Vec<String>, Vec<String>) {
        let members: Vec<Member<'_>> = names
            .iter()
            .map(|(name, weight, zone)| {
                let member = Member::new(name).with_weight(self::weight(*weight));
                // Zone 0 is none.
                if zone == "zone-0" { member } else { member.in_zone(zone) }
            })
            .collect();
        let order = order(self.rules, &self.fleet, self.index, &members);
        let by_name = |positions: &[usize]| positions.iter().map(|&p| names[p].0.clone()).collect();
        (by_name(order.subset()), by_name(order.reserve()))
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn subsets_are_distinct_and_as_large_as_asked_in_any_order(case in case(), seed: u64) {
        let names = case.names();
        let (subset, reserve) = case.order(&names);
        let distinct: HashSet<&String> = names.iter().map(|(name, ..)| name).collect();
        let expected = match case.rules.algorithm {
            Algorithm::Off => distinct.len(),
            _ => case.fleet.size.min(distinct.len()),
        };
        prop_assert_eq!(subset.len(), expected);
        let all: HashSet<&String> = subset.iter().chain(&reserve).collect();
        prop_assert_eq!(all.len(), subset.len() + reserve.len());
        prop_assert_eq!(&all, &distinct);

        let mut shuffled = names;
        shuffled.sort_by_cached_key(|(name, ..)| hash::mix(seed, hash::well_mixed(name)));
        shuffled.reverse();
        prop_assert_eq!(case.order(&shuffled), (subset, reserve));
    }

    /// The daemon's entry and the simulator's come to the same.
    #[test]
    fn one_gateway_and_the_fleet_agree(case in case()) {
        let names = case.names();
        let members: Vec<Member<'_>> =
            names.iter().map(|(name, weight, zone)| Member::new(name).with_weight(self::weight(*weight)).in_zone(zone)).collect();
        let roster = Roster::new(&members);
        let all = roster.fleet(case.rules, &case.fleet);
        let one = roster.order(case.rules, &case.fleet, case.index);
        prop_assert_eq!(one.subset(), &all[case.index as usize]);
    }

    /// An origin that leaves is replaced by one in the subsets that held it; nothing else changes.
    #[test]
    fn a_leaving_origin_changes_one_place(case in case(), leaves: prop::sample::Index) {
        let mut case = case;
        case.rules.zone_max = None;
        if case.rules.algorithm == BANDED {
            case.rules.algorithm = KRONECKER;
        }
        let names = case.names();
        prop_assume!(!names.is_empty());
        let gone = names[leaves.index(names.len())].0.clone();
        let rest: Vec<_> = names.iter().filter(|(name, ..)| *name != gone).cloned().collect();
        let (before, reserve) = case.order(&names);
        let (after, _) = case.order(&rest);
        let mut expected: Vec<String> = before.iter().filter(|name| **name != gone).cloned().collect();
        if expected.len() < before.len() {
            expected.extend(reserve.first().cloned());
        }
        prop_assert_eq!(after, expected);
    }

    /// No zone is over its quota unless there was no other way.
    #[test]
    fn quotas_are_kept_while_they_can_be(case in case()) {
        let Some(max) = case.rules.zone_max else { return Ok(()) };
        prop_assume!(case.rules.algorithm != Algorithm::Off);
        // Of duplicates only one counts, so each name has one zone.
        let zone = |n: u16| format!("zone-{}", n % 5);
        let numbers: BTreeSet<u16> = case.members.iter().map(|member| member.0).collect();
        let names: Vec<_> = numbers.iter().map(|&n| (format!("origin-{n}"), 1, zone(n))).collect();
        let (subset, _) = case.order(&names);
        let held = |zone: &str| {
            let of_zone = |name: &&(String, u32, String)| name.2 == zone && subset.contains(&name.0);
            names.iter().filter(of_zone).count()
        };
        let possible: usize = (0..5)
            .map(|z| {
                let there = numbers.iter().filter(|&n| n % 5 == z).count();
                if z == 0 { there } else { there.min(max.get()) }
            })
            .sum();
        if possible >= subset.len() {
            prop_assert!((1..5).all(|z| held(&zone(z)) <= max.get()));
        }
    }

    #[test]
    fn bands_are_passed_by_one_at_most(
        gateways in 1u32..60, origins in 1usize..150, size in 0usize..40, permille in 0u16..600,
    ) {
        // A gateway may already hold all that still have room: rarely, if it needs few of all.
        let size = size.min(origins / 2);
        let names = identities(origins);
        let roster = Roster::new(&members(&names));
        let band = Band::permille_of(permille).unwrap();
        let fleet = Fleet::uniform(gateways, size);
        let subsets = roster.fleet(rules(Algorithm::Kronecker { band: Some(band) }), &fleet);
        let bounds = band::bounds(&roster.origins, &fleet.sizes(origins), band);
        for (count, bounds) in coverage_of(&subsets, origins).into_iter().zip(bounds) {
            let (min, max) = (bounds.min.saturating_sub(1), bounds.max + 1);
            prop_assert!((min..=max).contains(&(count as u64)), "{count} {bounds:?}");
        }
    }
}

#[test]
fn duplicates_count_as_the_heaviest() {
    let twice = [
        Member::new("a"),
        Member::new("b").with_weight(weight(9)),
        Member::new("b"),
        Member::new("c").in_zone("x"),
        Member::new("b").with_weight(weight(4)),
    ];
    let roster = Roster::new(&twice);
    assert_eq!(roster.len(), 3);
    let b = roster.origins.iter().find(|origin| twice[origin.position].identity == "b").unwrap();
    assert_eq!((b.weight, b.position), (9, 1));
    // Even for a gateway that nobody reckons with.
    for algorithm in ALL {
        let order = order(rules(algorithm), &Fleet::uniform(2, 2), 5, &twice);
        assert!(order.subset().iter().chain(order.reserve()).all(|&p| p != 2 && p != 4));
    }
}

#[test]
fn a_drained_gateway_has_nothing_and_leaves_more_to_the_others() {
    let names = identities(50);
    let members = members(&names);
    let mut fleet = Fleet::uniform(25, 10);
    fleet.sizes.insert(4, 0);
    for algorithm in [Algorithm::Ring, KRONECKER, BANDED] {
        let subsets = Roster::new(&members).fleet(rules(algorithm), &fleet);
        assert_eq!(subsets[4].len(), 0);
        assert!(subsets.iter().enumerate().all(|(g, subset)| g == 4 || subset.len() == 10));
    }
    let covered = sizing::coverage(rules(BANDED), &fleet, &members);
    // 240 slots, 4.8 each.
    assert_eq!((covered.min, covered.max), (4, 6));
}

#[test]
fn weights_are_followed() {
    let names = identities(200);
    let members: Vec<Member<'_>> = names
        .iter()
        .enumerate()
        .map(|(i, name)| Member::new(name).with_weight(weight(1 + u32::from(i < 50))))
        .collect();
    let fleet = Fleet::uniform(250, 20);
    for algorithm in [Algorithm::Ring, KRONECKER, BANDED] {
        let counts = coverage_of(&Roster::new(&members).fleet(rules(algorithm), &fleet), 200);
        // 5,000 slots for a weight of 250: 40 for the heavy ones, 20 for the others.
        let mean = |counts: &[usize]| counts.iter().sum::<usize>() as f64 / counts.len() as f64;
        let (heavy, light) = (mean(&counts[..50]), mean(&counts[50..]));
        assert!(
            (36.0..=42.0).contains(&heavy) && (19.0..=22.0).contains(&light),
            "{algorithm:?} {heavy} {light}"
        );
        if algorithm == BANDED {
            assert!(counts[..50].iter().all(|n| (36..=44).contains(n)), "{counts:?}");
            assert!(counts[50..].iter().all(|n| (18..=22).contains(n)), "{counts:?}");
        }
    }
}

/// A band of 10 % over two long histories, and what it costs.
#[test]
fn bands_are_kept_and_cheap_over_2000_memberships() {
    let histories = std::thread::scope(|scope| {
        let both = [1, 2].map(|seed| scope.spawn(move || history(seed, 1000)));
        both.map(|history| history.join().unwrap())
    });
    for kind in 0..2 {
        let [a, b] = histories.map(|history| history[kind]);
        let factor = (a.0 + b.0) as f64 / (a.1 + b.1) as f64;
        assert!((1.0..=1.5).contains(&factor), "{factor}");
    }
}

/// Connections that were opened, and that had to be, when an origin came and when one left: 1,000
/// origins and 500 gateways, with a random origin leaving and a new one coming in turns.
fn history(seed: u64, steps: u64) -> [(usize, usize); 2] {
    let names = identities(1600);
    let mut present: Vec<usize> = (0..1000).collect();
    let mut absent: Vec<usize> = (1000..1600).collect();
    let subsets_of = |present: &[usize]| -> Vec<Vec<usize>> {
        let members: Vec<Member<'_>> = present.iter().map(|&i| Member::new(&names[i])).collect();
        let subsets = Roster::new(&members).fleet(rules(BANDED), &Fleet::uniform(500, 20));
        let counts = coverage_of(&subsets, members.len());
        assert!(counts.iter().all(|count| (9..=11).contains(count)), "{counts:?}");
        assert!(subsets.iter().all(|subset| subset.len() == 20));
        subsets.into_iter().map(|subset| subset.into_iter().map(|p| present[p]).collect()).collect()
    };
    let mut before = subsets_of(&present);
    let mut moved = [(0, 0); 2];
    for step in 0..steps {
        let leaves = step % 2 == 1;
        let (from, to) =
            if leaves { (&mut present, &mut absent) } else { (&mut absent, &mut present) };
        let random = hash::mix(seed, step) % from.len() as u64;
        let changed = from.swap_remove(usize::try_from(random).unwrap());
        to.push(changed);
        let after = subsets_of(&present);
        let (opened, needed) = &mut moved[usize::from(leaves)];
        let concerned = if leaves { &before } else { &after };
        *needed += concerned.iter().filter(|subset| subset.contains(&changed)).count();
        *opened += before
            .iter()
            .zip(&after)
            .map(|(old, new)| new.iter().filter(|o| !old.contains(o)).count())
            .sum::<usize>();
        before = after;
    }
    moved
}
