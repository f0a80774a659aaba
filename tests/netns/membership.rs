//! Origins that come and go while clients are served: no client notices, and no handshake is wasted.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use broker::clock;
use harness::load::{self, Plan, Report, Running};
use harness::origin::nginx;
use harness::origin::scripted::{Peer, Scripted};
use harness::process::Process;
use harness::{Client, Counters, Daemon, Lab, eventually};

use crate::support::{SOON, addresses, listen};

/// A daemon whose origins are in a file.
struct Fleet {
    daemon: Daemon,
    file: PathBuf,
    _origins: Vec<Process>,
    /// The origins' counters before the daemon started.
    before: Counters,
    lab: Lab,
}

/// How clients come to the daemon.
#[derive(Clone, Copy, Debug)]
enum Way {
    Relay,
    Kernel,
}

impl Fleet {
    /// `count` origins, of which the first `listed` are in the file at the start.
    fn start(way: Way, count: u8, listed: usize, keys: &str) -> Self {
        let lab = Lab::new(count).unwrap();
        let origins = (0..count).map(|i| nginx::origin(&lab, i).unwrap()).collect();
        let before = lab.origin_counters();
        let file = lab.directory().join("origins.json");
        write(&file, &lab.all_origins()[..listed]);
        let daemon = Daemon::start(&lab, &config(&lab, way, &file, keys)).unwrap();
        Self { daemon, file, _origins: origins, before, lab }
    }

    /// Puts another list in the file, and waits until the daemon uses it.
    fn set(&self, origins: &[SocketAddr]) {
        let before = self.changes();
        write(&self.file, origins);
        eventually(SOON, "the list is used", || {
            let membership = self.daemon.service().unwrap().membership.unwrap();
            membership.used == origins.len() as u64 && membership.changes > before
        });
    }

    fn changes(&self) -> u64 {
        self.daemon.service().unwrap().membership.unwrap().changes
    }

    /// Where clients go.
    fn targets(&self, way: Way) -> Vec<SocketAddr> {
        vec![match way {
            Way::Relay => listen(&self.lab),
            Way::Kernel => self.lab.vip(),
        }]
    }

    /// Handshakes that the daemon has cost the origins, as the kernel counts them.
    fn handshakes(&self) -> i64 {
        self.lab.origin_counters().since(&self.before).passive_opens()
    }
}

fn config(lab: &Lab, way: Way, file: &Path, keys: &str) -> String {
    let clients = match way {
        Way::Relay => format!("listen = [\"{}\"]", listen(lab)),
        Way::Kernel => format!("intercept = [\"{}\"]\nsteer = \"kernel\"", lab.vip()),
    };
    format!(
        "workers = 2\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\n{clients}\n\
         [service.discovery]\n{keys}\n[service.discovery.file]\npath = \"{}\"\n\
         [service.pool]\nprewarm = 2\n",
        file.display()
    )
}

/// Replaces the list as configuration tools do: another reader never sees half of it.
fn write(file: &Path, origins: &[SocketAddr]) {
    let next = file.with_extension("next");
    fs::write(&next, addresses(origins)).unwrap();
    fs::rename(&next, file).unwrap();
}

#[track_caller]
fn assert_clean(report: &Report) {
    assert_eq!((report.error_count(), report.crosstalk), (0, 0), "{report:?}");
    assert!(report.requests > 0);
}

fn load(fleet: &Fleet, way: Way) -> Running {
    load::start(&fleet.lab, &Plan::steady(fleet.targets(way), 8)).unwrap()
}

#[test]
fn clients_notice_nothing_of_origins_that_come_and_go() {
    for way in [Way::Relay, Way::Kernel] {
        let fleet = Fleet::start(way, 4, 3, "debounce = \"20ms\"");
        let all = fleet.lab.all_origins();
        let running = load(&fleet, way);
        let until = clock::now() + Duration::from_secs(3);
        // Each origin leaves and comes back, several times.
        for round in (0..4).cycle() {
            let mut now = all.clone();
            now.remove(round);
            fleet.set(&now);
            if clock::now() >= until {
                break;
            }
        }
        let report = running.stop().unwrap();
        assert_clean(&report);
        let service = fleet.daemon.service().unwrap();
        if matches!(way, Way::Kernel) {
            assert!(service.steered > 0, "{:?}", service.not_steered);
        }
        let totals = service.totals();
        assert!(totals.evicted.contains_key("origin_removed"), "{totals:?}");
        // Also what the kernel has carried to origins that have left since.
        eventually(SOON, "all exchanges are counted", || {
            fleet.daemon.service().unwrap().exchanges == report.requests
        });
    }
}

#[test]
fn those_that_stay_keep_their_sockets() {
    let fleet = Fleet::start(Way::Relay, 3, 3, "debounce = \"20ms\"");
    let all = fleet.lab.all_origins();
    let warm = fleet.handshakes();
    assert_eq!(warm, 2 * 2 * 3, "workers x prewarm x origins");
    fleet.set(&all[..2]);
    eventually(SOON, "the one that left has no socket", || {
        fleet.lab.origin_counters().established() == 2 * 2 * 2
    });
    assert_eq!(fleet.handshakes(), warm, "nobody was dialled because somebody left");
    fleet.set(&all);
    eventually(SOON, "the one that came back is warm", || {
        fleet.lab.origin_counters().established() == warm
    });
    assert_eq!(fleet.handshakes(), warm + 2 * 2);
}

/// Handshakes that one origin costs which leaves and comes back, and those of one that does so every
/// 10 ms for 5 s, while clients are served.
fn flap(way: Way, keys: &str) -> (i64, i64) {
    let fleet = Fleet::start(way, 4, 4, keys);
    let all = fleet.lab.all_origins();
    let start = fleet.handshakes();
    fleet.set(&all[..3]);
    fleet.set(&all);
    eventually(SOON, "all are warm again", || {
        fleet.lab.origin_counters().established() >= 2 * 2 * 4
    });
    let single = fleet.handshakes() - start;
    assert_eq!(single, 2 * 2, "prewarm for each worker");

    let running = load(&fleet, way);
    // What the load itself wants.
    eventually(SOON, "the load runs", || fleet.daemon.service().unwrap().exchanges > 1000);
    let start = fleet.handshakes();
    let until = clock::now() + Duration::from_secs(5);
    for round in 0.. {
        if clock::now() >= until {
            break;
        }
        write(&fleet.file, &all[..3 + round % 2]);
        std::thread::sleep(Duration::from_millis(10));
    }
    let flapping = fleet.handshakes() - start;
    assert_clean(&running.stop().unwrap());
    (single, flapping)
}

#[test]
fn a_flapping_list_is_not_churn() {
    for way in [Way::Relay, Way::Kernel] {
        let (single, flapping) = flap(way, "");
        assert!(flapping <= 2 * single, "{flapping} handshakes, {single} for one change");
    }
}

/// What gathering changes is for; clients notice nothing of the churn either.
#[test]
fn following_each_change_at_once_is_churn() {
    let (single, flapping) = flap(Way::Relay, "debounce = \"0s\"\ndebounce_max = \"0s\"");
    assert!(flapping > 10 * single, "{flapping} handshakes, {single} for one change");
}

#[test]
fn a_list_that_cannot_be_used_changes_nothing() {
    let fleet = Fleet::start(Way::Relay, 1, 1, "debounce = \"20ms\"");
    fs::write(&fleet.file, "[\"10.0.0.1\"]").unwrap();
    eventually(SOON, "the list is refused", || {
        let membership = fleet.daemon.service().unwrap().membership.unwrap();
        // It may have been read half written, too.
        membership.refused >= 1 && membership.error.is_some_and(|e| e.contains("ADDRESS:PORT"))
    });
    assert_eq!(get(&fleet).status, 200);
    // An empty one is more likely a mistake than the truth.
    write(&fleet.file, &[]);
    eventually(SOON, "the list is read", || {
        fleet.daemon.service().unwrap().membership.unwrap().error.is_none()
    });
    assert_eq!(get(&fleet).status, 200);
    let told = "the list is empty and not used";
    eventually(SOON, "it is told", || fleet.daemon.log().contains(told));
    let events = fleet.daemon.request("GET", "/v1/events").unwrap();
    assert!(events.contains(told), "{events}");
}

#[test]
fn an_empty_list_means_what_the_operator_says() {
    let fleet = Fleet::start(Way::Relay, 1, 1, "debounce = \"20ms\"\non_empty = \"drop\"");
    fleet.set(&[]);
    let refused = get(&fleet);
    assert_eq!(refused.status, 503);
    assert!(refused.head.contains("x-broker-unavailable: no_origins"), "{}", refused.head);
    fleet.set(&fleet.lab.all_origins());
    assert_eq!(get(&fleet).status, 200);
}

#[test]
fn whoever_dials_a_member_is_intercepted_while_it_is_one() {
    let lab = Lab::new(3).unwrap();
    let _origins: Vec<_> = (0..3).map(|i| nginx::origin(&lab, i).unwrap()).collect();
    let all = lab.all_origins();
    let file = lab.directory().join("origins.json");
    // Not there yet: clients go where they want.
    let keys = "debounce = \"20ms\"\non_empty = \"drop\"";
    let config = config(&lab, Way::Kernel, &file, keys)
        .replace(&format!("\"{}\"", lab.vip()), "\"origins\"");
    let daemon = Daemon::start(&lab, &config).unwrap();
    let rewritten = || daemon.snapshot().unwrap().datapath.rewritten;
    // Who is intercepted when they dial each of the origins.
    let intercepted = || {
        let taken = |&origin: &SocketAddr| {
            let before = rewritten();
            let response = Client::get_once(&lab.host, origin, "/echo?x").unwrap();
            assert_eq!(response.status, 200, "{}", response.head);
            rewritten() > before
        };
        all.iter().map(taken).collect::<Vec<_>>()
    };
    let becomes = |listed: &[SocketAddr]| {
        write(&file, listed);
        let expected: Vec<_> = all.iter().map(|origin| listed.contains(origin)).collect();
        eventually(SOON, "members, and nobody else, are intercepted", || intercepted() == expected);
    };
    assert_eq!(intercepted(), [false; 3]);

    // Nobody notices the first list, nor those that follow.
    let running = load::start(&lab, &Plan::steady(all.clone(), 8)).unwrap();
    let until = clock::now() + Duration::from_secs(3);
    for round in (0..3).cycle() {
        let list = [&all[..], &all[1..], &all[..1]][round];
        let before = daemon.service().unwrap().membership.unwrap().changes;
        write(&file, list);
        eventually(SOON, "the list is used", || {
            daemon.service().unwrap().membership.unwrap().changes > before
        });
        if clock::now() >= until {
            break;
        }
    }
    assert_clean(&running.stop().unwrap());
    becomes(&all[..2]);
    becomes(&[all[0], all[2]]);
    becomes(&[]);
    becomes(&all);
}

#[test]
fn clients_are_refused_until_there_is_a_list() {
    let lab = Lab::new(1).unwrap();
    let _origin = Scripted::start(&lab.origins, lab.origin(0), Peer::serve).unwrap();
    let file = lab.directory().join("late.json");
    let daemon = Daemon::start(&lab, &config(&lab, Way::Relay, &file, "")).unwrap();
    let ask = || Client::get_once(&lab.host, listen(&lab), "/").unwrap();
    assert_eq!(ask().status, 503);
    write(&file, &lab.all_origins());
    eventually(SOON, "the late list is used", || ask().status == 200);
    assert!(daemon.log().contains("no list of origins"), "{}", daemon.log());
}

/// A service whose list comes late, and then one whose origins are known.
fn late_and_known(lab: &Lab, late: SocketAddr, file: &Path) -> String {
    format!(
        "workers = 2\n[[service]]\nname = \"late\"\nprotocol = \"http1\"\nlisten = [\"{late}\"]\n\
         [service.discovery.file]\npath = \"{}\"\n\
         [[service]]\nname = \"known\"\nprotocol = \"http1\"\nlisten = [\"{}\"]\n\
         intercept = [\"origins\"]\norigins = {}\n",
        file.display(),
        listen(lab),
        addresses(&lab.all_origins())
    )
}

#[test]
fn nobody_waits_for_the_list_of_another_service() {
    let lab = Lab::new(1).unwrap();
    let _origin = Scripted::http(&lab.origins, lab.origin(0)).unwrap();
    let (late, file) = (SocketAddr::new(lab.host_ip(), 8081), lab.directory().join("late.json"));
    let daemon = Daemon::spawn(&lab, &late_and_known(&lab, late, &file)).unwrap();
    let ask = |at| Client::get_once(&lab.host, at, "/").map(|response| response.status).ok();
    eventually(SOON, "the service that has its list serves", || ask(listen(&lab)) == Some(200));
    eventually(SOON, "and intercepts", || {
        assert_eq!(ask(lab.origin(0)), Some(200));
        daemon.snapshot().is_ok_and(|snapshot| snapshot.datapath.rewritten > 0)
    });
    let service = daemon.service().unwrap();
    let error = service.membership.and_then(|membership| membership.error).unwrap_or_default();
    assert!(error.contains("late.json: No such file"), "{error}");
    assert!(daemon.request("GET", "/v1/health").is_err(), "it is not ready, as one service is not");

    // Who comes meanwhile is served as soon as there is a list.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| ask(late));
        eventually(SOON, "the log tells", || daemon.log().contains("waiting for the first list"));
        write(&file, &lab.all_origins());
        assert_eq!(waiting.join().unwrap(), Some(200));
    });
    assert!(!daemon.log().contains("clients are refused"), "{}", daemon.log());
    eventually(SOON, "all is ready", || daemon.request("GET", "/v1/health").is_ok());
    daemon.stop().unwrap();
}

#[test]
fn a_daemon_that_waits_for_a_list_stops_at_once() {
    let lab = Lab::new(1).unwrap();
    let late = SocketAddr::new(lab.host_ip(), 8081);
    let config = late_and_known(&lab, late, &lab.directory().join("late.json"));
    let daemon = Daemon::spawn(&lab, &config).unwrap();
    eventually(SOON, "the admin socket answers", || daemon.snapshot().is_ok());
    let began = clock::now();
    daemon.stop().unwrap();
    let took = clock::now() - began;
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[track_caller]
fn get(fleet: &Fleet) -> harness::client::Response {
    Client::get_once(&fleet.lab.host, listen(&fleet.lab), "/echo?x").unwrap()
}

#[test]
fn a_list_that_cannot_be_had_or_used_stops_nothing_and_is_told() {
    let lab = Lab::new(1).unwrap();
    let (pipe, empty) = (lab.directory().join("pipe"), lab.directory().join("empty.json"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    write(&empty, &[]);
    for (file, expected) in [(pipe, "no regular file"), (empty, "the list is empty")] {
        let daemon = Daemon::start(&lab, &config(&lab, Way::Relay, &file, "")).unwrap();
        let membership = daemon.service().unwrap().membership.unwrap();
        let error = membership.error.unwrap();
        assert!(error.contains(expected) && membership.members == 0, "{error}");
        daemon.stop().unwrap();
    }
}
