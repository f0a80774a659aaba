//! What subsets of origins would do, worked out before anybody depends on them; in [`outliers`],
//! what outlier detection would; and in [`churn`], what idle pools save.
//!
//! The daemon's own algorithms run here, for a whole fleet and through changes of its membership,
//! beside others that are in use. `broker sim` shows the result.

pub mod churn;
mod contender;
mod measure;
pub mod outliers;
mod sizes;
mod world;

use std::num::NonZeroUsize;
use std::time::Duration;

use serde::Serialize;

pub use self::contender::Family;
pub use self::measure::{Moved, Moves, Overlap};
pub use self::sizes::{Around, Racks, Sizes};
pub use self::world::{DEFAULT_NAMES, Names};

use self::contender::{Contender, Gateways};
use self::measure::Samples;
use self::world::World;
use crate::clock;
use crate::origin::subset::sizing::Coverage;
use crate::origin::subset::{self, Band, Fleet, Rules, ring};

/// Layout version of [`Report`] as JSON.
pub const REPORT_VERSION: u32 = 1;

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Setup {
    /// How many gateways; at least 1.
    pub gateways: u32,
    /// How many origins; at least 1.
    pub origins: usize,
    /// Origins of each gateway, from 1 to all.
    pub subset: usize,
    /// What to compare.
    pub families: Vec<Family>,
    /// Bands of Kronecker rendezvous.
    pub bands: Vec<Band>,
    /// How the origins are called.
    pub names: Names,
    /// How many leave, from the first one on, where the reference algorithms are compared.
    pub remove: usize,
    /// Zones of neighbours in the list.
    pub zones: usize,
    /// Quota of the daemon's algorithms.
    pub zone_max: Option<NonZeroUsize>,
}

/// All that a simulation finds.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`REPORT_VERSION`].
    pub version: u32,
    /// Gateways of the fleet.
    pub gateways: u32,
    /// Origins of the fleet.
    pub origins: usize,
    /// Origins of each gateway.
    pub subset: usize,
    /// What the first origin is called.
    pub first_name: String,
    /// Zones that the origins are in.
    pub zones: usize,
    /// Most origins of one zone in a subset of the daemon's algorithms.
    pub zone_max: Option<NonZeroUsize>,
    /// The three figures that people quote.
    pub reference: Reference,
    /// What the contenders are worth.
    pub contenders: Vec<Measured>,
    /// The daemon's ring, for a picture.
    #[serde(skip)]
    pub circle: Circle,
}

/// Connection math, coverage and what a leaving origin changes, with the published ring: 32-bit
/// FNV-1a. With the names that are the default, these are known to the digit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reference {
    /// Connections if every gateway has one to every origin.
    pub connections_all: u64,
    /// Connections with subsets.
    pub connections_subsets: u64,
    /// Gateways of each origin on the ring.
    pub coverage: Coverage,
    /// How many leave, the first ones of the list.
    pub leaving: usize,
    /// Gateways with another subset then, on the ring.
    pub ring_changed: usize,
    /// Gateways with another subset then, with a slice of the list.
    pub hash_mod_changed: usize,
}

/// One contender's figures.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    /// What it is called, with its band.
    pub name: String,
    /// Whether the daemon can do this.
    pub in_daemon: bool,
    /// Gateways of each origin.
    pub coverage: Coverage,
    /// How many origins have 0, 1, 2, … gateways.
    pub histogram: Vec<usize>,
    /// Connections that changes of the membership open.
    pub moves: Moves,
    /// The most origins that a gateway loses when one zone dies.
    pub zone_loss: usize,
    /// Origins that two gateways have in common.
    pub overlap: Overlap,
    /// Time to work out the whole fleet once, in microseconds.
    pub fleet_us: u64,
    /// Time to work out one gateway's subset, where the daemon can do it.
    pub own_us: Option<u64>,
}

/// Where gateways and origins are on the ring, as fractions of a turn.
#[derive(Clone, Debug, Default)]
pub struct Circle {
    /// Gateways.
    pub gateways: Vec<f64>,
    /// Origins, each with how many gateways it has.
    pub origins: Vec<(f64, usize)>,
}

/// Simulates.
#[must_use]
pub fn simulate(setup: &Setup) -> Report {
    let samples = samples(setup);
    let world = World::new(&setup.names, setup.origins, samples.newcomers(), setup.zones);
    let contenders = Contender::of(&setup.families, &setup.bands);
    Report {
        version: REPORT_VERSION,
        gateways: setup.gateways,
        origins: setup.origins,
        subset: setup.subset,
        first_name: world.names[0].clone(),
        zones: setup.zones,
        zone_max: setup.zone_max,
        reference: reference(setup, &world),
        contenders: contenders.iter().map(|&c| measured(c, setup, &world, samples)).collect(),
        circle: circle(setup, &world),
    }
}

/// As many samples as take a second or two.
fn samples(setup: &Setup) -> Samples {
    const PAIRS: u64 = 20_000_000;
    let pairs = u64::from(setup.gateways) * setup.origins as u64;
    let budget = usize::try_from(PAIRS / pairs.max(1)).unwrap_or(usize::MAX);
    Samples {
        single: budget.clamp(2, 40),
        rolling: (budget / 2).clamp(1, 20),
        many: (budget / 8).clamp(1, 5),
        gateways: 3,
    }
}

fn reference(setup: &Setup, world: &World) -> Reference {
    let gateways = Gateways { count: setup.gateways, subset: setup.subset, zone_max: None };
    let all: Vec<usize> = (0..setup.origins).collect();
    let left = &all[setup.remove..];
    let states = |family| {
        let contender = Contender { family, band: None };
        [&all[..], left].map(|present| contender.assign(world, present, gateways))
    };
    let [ring, ring_after] = states(Family::RingFnv32);
    let [hash_mod, hash_mod_after] = states(Family::HashMod);
    let counts = measure::counts(&ring, setup.origins);
    Reference {
        connections_all: u64::from(setup.gateways) * setup.origins as u64,
        connections_subsets: u64::from(setup.gateways) * setup.subset as u64,
        coverage: Coverage::of(&counts),
        leaving: setup.remove,
        ring_changed: measure::gateways_changed(&ring, &ring_after),
        hash_mod_changed: measure::gateways_changed(&hash_mod, &hash_mod_after),
    }
}

fn measured(contender: Contender, setup: &Setup, world: &World, samples: Samples) -> Measured {
    let Setup { gateways: count, subset, origins, zone_max, .. } = *setup;
    let gateways = Gateways { count, subset, zone_max };
    let present: Vec<usize> = (0..origins).collect();
    let begun = clock::now();
    let subsets = contender.assign(world, &present, gateways);
    let fleet_us = micros(clock::now() - begun);
    let counts = measure::counts(&subsets, origins);
    let coverage = Coverage::of(&counts);
    Measured {
        name: contender.to_string(),
        in_daemon: contender.algorithm().is_some(),
        histogram: measure::histogram(&counts, &coverage),
        coverage,
        moves: measure::moves(contender, world, origins, gateways, samples),
        zone_loss: measure::worst_zone_loss(&subsets, world),
        overlap: measure::overlap(&subsets, origins),
        fleet_us,
        own_us: contender.algorithm().map(|algorithm| {
            let members = world.members(&present);
            let rules = Rules { algorithm, zone_max };
            let begun = clock::now();
            let order = subset::order(rules, &Fleet::uniform(count, subset), 0, &members);
            std::hint::black_box(order);
            micros(clock::now() - begun)
        }),
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn circle(setup: &Setup, world: &World) -> Circle {
    const TURN: f64 = 18_446_744_073_709_551_616.0;
    let gateways = Gateways { count: setup.gateways, subset: setup.subset, zone_max: None };
    let all: Vec<usize> = (0..setup.origins).collect();
    let ring = Contender { family: Family::Ring, band: None };
    let counts = measure::counts(&ring.assign(world, &all, gateways), setup.origins);
    let place = |o: usize| world.hashes[o] as f64 / TURN;
    Circle {
        gateways: (0..setup.gateways).map(|g| ring::position(g) as f64 / TURN).collect(),
        origins: all.iter().map(|&o| (place(o), counts[o])).collect(),
    }
}
