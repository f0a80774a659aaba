//! The broker's counts beside the kernel's.

use std::net::SocketAddr;
use std::net::TcpStream;
use std::time::Duration;

use harness::load::{self, Plan};
use harness::origin::nginx;
use harness::{Daemon, Lab, eventually};

use crate::support::{SOON, Service};

#[test]
fn connections_of_others_are_counted_exactly() {
    let lab = Lab::new(2).unwrap();
    let _nginx = nginx::origin(&lab, 0).unwrap();
    // The service is elsewhere and does nothing: counting does not depend on it.
    let service = Service { pool: "prewarm = 0", ..Service::default() };
    let daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
    let before = lab.host_counters();
    let report = load::run(&lab, &Plan::echo(vec![lab.origin(0)], 4, 500)).unwrap();
    assert_eq!(report.error_count(), 0);
    // Nobody listens on the other origin, nor at this port.
    let refusing = [lab.origin(1), SocketAddr::new(lab.origin_ip(0), 81)];
    for address in refusing {
        for _ in 0..3 {
            lab.host.run(|| TcpStream::connect(address)).unwrap_err();
        }
    }
    let ours: Vec<_> = [lab.origin(0), refusing[0], refusing[1]].to_vec();
    let kernel = lab.host_counters().since(&before);
    assert_eq!((kernel.active_opens(), kernel.attempt_fails()), (506, 6));
    eventually(SOON, "the same counts from the kernel programs", || {
        let endpoints = daemon.snapshot().unwrap().endpoints;
        let mine = || endpoints.iter().filter(|e| ours.contains(&e.remote) && !e.broker);
        let attempted: u64 = mine().map(|e| e.attempted).sum();
        let established: u64 = mine().map(|e| e.established).sum();
        (attempted, established) == (506, 500)
    });
}

#[test]
fn the_brokers_own_handshakes_are_told_apart() {
    let lab = Lab::new(1).unwrap();
    let _nginx = nginx::origin(&lab, 0).unwrap();
    let before = lab.origin_counters();
    let service = Service { pool: "prewarm = 3", ..Service::default() };
    let daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
    let passive = lab.origin_counters().since(&before).passive_opens();
    assert_eq!(passive, 3);
    let endpoints = daemon.snapshot().unwrap().endpoints;
    let own: u64 = endpoints
        .iter()
        .filter(|endpoint| endpoint.remote == lab.origin(0) && endpoint.broker)
        .map(|endpoint| endpoint.established)
        .sum();
    assert_eq!(own, 3);
}

#[test]
fn observe_needs_no_configuration() {
    let lab = Lab::new(1).unwrap();
    let _nginx = nginx::origin(&lab, 0).unwrap();
    let observer = harness::Launch::new(harness::daemon::binary().unwrap())
        .args(["observe", "--json", "--for", "3s"])
        .netns(&lab.host)
        .spawn()
        .unwrap();
    let mut observer = observer;
    // Without a sign of readiness, churn until the time is over.
    let mut requests = 0;
    while observer.is_running() {
        requests += load::run(&lab, &Plan::echo(vec![lab.origin(0)], 2, 50)).unwrap().requests;
    }
    assert!(observer.wait(Duration::from_secs(1)).unwrap().success(), "{}", observer.stderr());
    let told = observer.stdout();
    assert!(told.contains(&lab.origin(0).to_string()), "{requests} requests, but: {told}");
}
