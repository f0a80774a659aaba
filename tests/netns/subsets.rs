//! A fleet of gateways that share origins: each keeps to its own few, and changes move what the
//! simulator says, no more.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use broker::origin::subset::{Algorithm, Fleet, Member, Rules, order};
use harness::lab::Container;
use harness::load::{self, Plan, Running};
use harness::origin::nginx;
use harness::process::Process;
use harness::{Daemon, Lab, eventually};

use crate::support::{SOON, addresses};

const GATEWAYS: u32 = 4;
const ORIGINS: u8 = 8;
const SIZE: usize = 3;
const WORKERS: usize = 2;
const PREWARM: usize = 2;

/// Gateways in namespaces of their own, whose origins are in one file.
struct Gateways {
    daemons: Vec<(Daemon, Container)>,
    _origins: Vec<Process>,
    lab: Lab,
}

impl Gateways {
    fn start(subset: &str) -> Self {
        let lab = Lab::new(ORIGINS).unwrap();
        let origins = (0..ORIGINS).map(|i| nginx::origin(&lab, i).unwrap()).collect();
        write(&file(&lab), &lab.all_origins());
        let daemons = (0..GATEWAYS).map(|index| {
            let container = lab.container().unwrap();
            let config = format!(
                "workers = {WORKERS}\n[gateway]\nindex = {index}\ncount = {GATEWAYS}\n\
                 [[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"{}:8080\"]\n\
                 [service.subset]\nsize = {SIZE}\n{subset}\n\
                 [service.discovery]\ndebounce = \"50ms\"\n[service.discovery.file]\n\
                 path = \"{}\"\n[service.pool]\nprewarm = {PREWARM}\n",
                container.ip,
                file(&lab).display(),
            );
            (Daemon::start_in(&lab, &container.netns, &config).unwrap(), container)
        });
        Self { daemons: daemons.collect(), _origins: origins, lab }
    }

    /// The origins that each gateway uses.
    fn used(&self) -> Vec<BTreeSet<SocketAddr>> {
        let used = |(daemon, _): &(Daemon, Container)| {
            let origins = daemon.service().unwrap().origins;
            origins.iter().map(|origin| origin.address).collect()
        };
        self.daemons.iter().map(used).collect()
    }

    /// Load on all gateways at once.
    fn load(&self) -> Running {
        let targets = self.daemons.iter().map(|(_, c)| SocketAddr::new(c.ip, 8080)).collect();
        load::start(&self.lab, &Plan::steady(targets, 8)).unwrap()
    }
}

fn file(lab: &Lab) -> std::path::PathBuf {
    lab.directory().join("origins.json")
}

fn write(file: &Path, origins: &[SocketAddr]) {
    let next = file.with_extension("next");
    fs::write(&next, addresses(origins)).unwrap();
    fs::rename(&next, file).unwrap();
}

/// The same as `broker sim` works out.
fn predicted(rules: Rules, origins: &[SocketAddr]) -> Vec<BTreeSet<SocketAddr>> {
    let names: Vec<_> = origins.iter().map(ToString::to_string).collect();
    let members: Vec<_> = names.iter().map(|name| Member::new(name)).collect();
    let fleet = Fleet::uniform(GATEWAYS, SIZE);
    let subset = |index| {
        let order = order(rules, &fleet, index, &members);
        order.subset().iter().map(|&at| origins[at]).collect()
    };
    (0..GATEWAYS).map(subset).collect()
}

fn a_removal_moves_what_was_predicted(subset: &str, algorithm: Algorithm) {
    let fleet = Gateways::start(subset);
    let rules = Rules { algorithm, zone_max: None };
    let all = fleet.lab.all_origins();
    let before = predicted(rules, &all);
    assert_eq!(fleet.used(), before);
    let covered: BTreeSet<_> = before.iter().flatten().collect();
    // Chance may leave one out, unless a band forbids it.
    if subset.contains("band") {
        assert_eq!(covered.len(), usize::from(ORIGINS), "all origins are covered: {before:?}");
    }
    // Sockets: each worker's own, towards each origin of the subset, and no others.
    let sockets = GATEWAYS as usize * SIZE * WORKERS * PREWARM;
    let established = || usize::try_from(fleet.lab.origin_counters().established()).unwrap();
    eventually(SOON, "all are warm", || established() == sockets);

    // One at a time, so that no gateway needs more than its warm sockets.
    let running = fleet.load();
    eventually(SOON, "the load runs", || {
        fleet.daemons.iter().all(|(daemon, _)| daemon.service().unwrap().exchanges > 50)
    });
    let removed = *before[0].iter().next().unwrap();
    let rest: Vec<_> = all.iter().copied().filter(|&origin| origin != removed).collect();
    let after = predicted(rules, &rest);
    let moved: usize = before.iter().zip(&after).map(|(b, a)| a.difference(b).count()).sum();
    assert!(moved > 0 && moved < GATEWAYS as usize * SIZE / 2, "{moved}");
    let created = || {
        let created = |(daemon, _): &(Daemon, Container)| daemon.totals().unwrap().created;
        fleet.daemons.iter().map(created).collect::<Vec<_>>()
    };
    let (counted, counters) = (created(), fleet.lab.origin_counters());
    write(&file(&fleet.lab), &rest);
    eventually(SOON, "the change has arrived", || fleet.used() == after);
    let report = running.stop().unwrap();
    assert_eq!((report.error_count(), report.crosstalk), (0, 0), "{report:?}");
    eventually(SOON, "all are warm again", || established() == sockets);

    // What the load itself wanted in between comes on top for whoever was affected.
    let handshakes = fleet.lab.origin_counters().since(&counters).passive_opens();
    let expected = i64::try_from(moved * WORKERS * PREWARM).unwrap();
    assert!(
        (expected..=expected + 8).contains(&handshakes),
        "{handshakes} handshakes, {expected} predicted"
    );
    for (gateway, (now, then)) in created().iter().zip(&counted).enumerate() {
        let affected = before[gateway] != after[gateway];
        assert!(affected || now <= &(then + 2), "gateway {gateway} was not affected");
    }
}

#[test]
fn kronecker_subsets_move_what_the_simulator_says() {
    a_removal_moves_what_was_predicted("", Algorithm::Kronecker { band: None });
}

#[test]
fn subsets_in_a_band_move_what_the_simulator_says() {
    let band = "10%".parse().ok();
    a_removal_moves_what_was_predicted("band = \"10%\"", Algorithm::Kronecker { band });
}

#[test]
fn a_subset_is_widened_while_too_few_of_it_can_be_reached() {
    let lab = Lab::new(4).unwrap();
    let mut origins: Vec<_> = (0..4).map(|i| Some(nginx::origin(&lab, i).unwrap())).collect();
    let config = format!(
        "workers = 1\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"{}\"]\n\
         origins = {}\n[service.subset]\nsize = 2\nmin_healthy = 2\n",
        crate::support::listen(&lab),
        addresses(&lab.all_origins())
    );
    let daemon = Daemon::start(&lab, &config).unwrap();
    let membership = || daemon.service().unwrap().membership.unwrap();
    assert_eq!((membership().used, membership().widened), (2, 0));
    let first = daemon.service().unwrap().origins[0].address;
    let index = lab.all_origins().iter().position(|&origin| origin == first).unwrap();
    // Dropped: killed.
    origins[index] = None;
    eventually(SOON, "another one takes its place", || {
        (membership().used, membership().widened) == (3, 1)
    });
    let report = load::run(&lab, &Plan::echo(vec![crate::support::listen(&lab)], 4, 200)).unwrap();
    assert_eq!(report.error_count(), 0, "{report:?}");
    origins[index] = Some(nginx::origin(&lab, u8::try_from(index).unwrap()).unwrap());
    eventually(SOON, "it is back", || (membership().used, membership().widened) == (2, 0));
}
