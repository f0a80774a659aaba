//! Limits hold to the last one, whoever asks at the same time, and nobody who may wait is refused.

use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Acquire, Release},
};
use std::time::Duration;

use harness::load::{self, Mode, Plan};
use harness::origin::census::Census;
use harness::{Client, Daemon, Lab, eventually};

use crate::support::{SOON, Service, addresses, listen, way_in};

/// 200 clients at once, at a limit of 10.
fn bursts(way: &str, workers: usize, count: u8, prewarm: usize) {
    let lab = Lab::new(count).unwrap();
    let census = Census::start(&lab).unwrap();
    let (target, clients) = way_in(&lab, way);
    let config = format!(
        "workers = {workers}\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\n{clients}\n\
         origins = {}\n[service.pool]\nprewarm = {prewarm}\nqueue_timeout = \"30s\"\n\
         [service.limits]\nmax_connections = 10\n",
        addresses(&lab.all_origins())
    );
    let daemon = Daemon::start(&lab, &config).unwrap();
    for round in 0..5 {
        let plan = Plan { mode: Mode::OneShot, ..Plan::echo(vec![target], 200, 200) };
        let report = load::run(&lab, &plan).unwrap();
        let peak = census.take_peak();
        let what = format!("{way}, {workers} workers, {count} origins, {prewarm} warm, {round}");
        assert!(peak <= 10, "{what}: {peak} connections");
        assert_eq!((report.requests, report.error_count()), (200, 0), "{what}: {report:?}");
    }
    let limit = daemon.service().unwrap().limits["max_connections"];
    assert!(limit.used <= 10 && limit.max == 10, "{limit:?}");
}

#[test]
fn no_burst_opens_one_connection_too_many_and_all_are_served() {
    for way in ["relay", "kernel"] {
        for (workers, count) in [(1, 1), (2, 8), (8, 1), (8, 8)] {
            for prewarm in [0, 2] {
                bursts(way, workers, count, prewarm);
            }
        }
    }
}

#[test]
fn each_origin_has_a_limit_that_all_workers_share() {
    let lab = Lab::new(2).unwrap();
    let census = Census::start(&lab).unwrap();
    let service =
        Service { workers: 4, limits: "max_connections_per_origin = 3", ..Service::default() };
    let _daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
    let report = load::run(&lab, &Plan::echo(vec![listen(&lab)], 100, 500)).unwrap();
    assert_eq!((report.requests, report.error_count()), (500, 0), "{report:?}");
    assert!(census.take_peak() <= 6);
}

#[test]
fn each_origin_may_have_one_connection_over_the_limit_if_asked_for() {
    for (limits, over) in [("", false), ("one_connection_per_origin = true", true)] {
        let lab = Lab::new(4).unwrap();
        let census = Census::start(&lab).unwrap();
        let limits = format!("max_connections = 1\n{limits}");
        let service = Service { workers: 2, limits: &limits, ..Service::default() };
        let daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
        let report = load::run(&lab, &Plan::echo(vec![listen(&lab)], 100, 500)).unwrap();
        assert_eq!((report.requests, report.error_count()), (500, 0), "{report:?}");
        let peak = census.take_peak();
        assert_eq!(daemon.service().unwrap().connections_guaranteed > 0, over);
        assert!(if over { (2..=4).contains(&peak) } else { peak == 1 }, "{over}: {peak}");
    }
}

#[test]
fn too_many_exchanges_are_refused_by_name() {
    let service = Service { limits: "max_requests = 2", ..Service::default() };
    let go = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&go);
    let setup = service.start(move |peer| {
        while let Some(request) = peer.request()? {
            while request.target() == "/slow" && !told.load(Acquire) {
                std::thread::sleep(Duration::from_millis(5));
            }
            peer.respond("done")?;
        }
        Ok(())
    });
    let mut slow: Vec<Client> = (0..2).map(|_| setup.client()).collect();
    for client in &mut slow {
        client.send("GET /slow HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    }
    let used = || setup.daemon.service().unwrap().limits["max_requests"].used;
    eventually(SOON, "both are under way", || used() == 2);
    let refused = setup.client().get("/third").unwrap();
    assert_eq!(refused.status, 503);
    assert!(refused.head.contains("x-broker-overloaded: max_requests"), "{}", refused.head);
    assert_eq!(setup.daemon.service().unwrap().request_overflow, 1);
    go.store(true, Release);
    eventually(SOON, "they are answered", || used() == 0);
    assert_eq!(setup.client().get("/fourth").unwrap().status, 200);
}
