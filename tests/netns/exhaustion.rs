//! The host runs out of descriptors, or of ports: the daemon waits, counts, and recovers; who is intercepted
//! need not wait.

use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

use broker::clock;
use harness::cgroup::ThreadLimit;
use harness::origin::scripted::{Peer, Scripted};
use harness::{Client, Daemon, Lab, Launch, eventually};
use nix::sys::signal::Signal;

use crate::support::{SOON, Service, Setup, addresses, listen};

/// Changes the daemon's limit of descriptors while it runs.
fn limit_descriptors(daemon: &mut Daemon, limit: u64) {
    let pid = daemon.process().pid().to_string();
    let prlimit = Launch::new("prlimit").args(["--pid", &pid]);
    let done = prlimit.arg(format!("--nofile={limit}:")).output(SOON);
    done.unwrap().success().unwrap();
}

/// The numbers of the daemon's descriptors. The limit is one of these numbers.
fn descriptors(daemon: &mut Daemon) -> BTreeSet<u64> {
    let pid = daemon.process().pid();
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().parse().unwrap()).collect()
}

#[test]
fn without_descriptors_clients_wait_and_nothing_spins() {
    let mut setup = Service { pool: "prewarm = 0", ..Service::default() }.start(Peer::serve);
    setup.get("/before");
    let limit = descriptors(&mut setup.daemon).len() as u64 + 10;
    limit_descriptors(&mut setup.daemon, limit);
    // They say something, so that they are not kept in the kernel's queue.
    let mut clients: Vec<Client> = (0..40).map(|_| setup.client()).collect();
    for client in &mut clients {
        client.send("GET /w").unwrap();
    }
    eventually(SOON, "all are taken", || {
        let taken = descriptors(&mut setup.daemon);
        (0..limit).all(|number| taken.contains(&number))
    });
    let before = setup.daemon.process().cpu_time().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let spent = setup.daemon.process().cpu_time().unwrap().saturating_sub(before);
    assert!(spent < Duration::from_millis(500), "{spent:?} of one second");

    // Those who were accepted leave, and those who waited have their turn.
    let last = clients.split_off(clients.len() - 5);
    drop(clients);
    for mut client in last {
        client.send("aiting HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        assert!(client.response().unwrap().text().ends_with(" /waiting"));
    }
    limit_descriptors(&mut setup.daemon, limit + 100);
    setup.get("/after");
    let tries = setup.daemon.service().unwrap().accept_failed;
    assert!((1..200).contains(&tries), "{tries} tries");
}

#[test]
fn without_descriptors_intercepted_clients_go_directly() {
    for steer in ["relay", "kernel"] {
        let lab = Lab::new(1).unwrap();
        let origin = Scripted::http(&lab.origins, lab.origin(0)).unwrap();
        // Long enough for the kernel to send clients here while the daemon stands still.
        let config = format!(
            "workers = 2\nheartbeat_age_max = \"30s\"\n[[service]]\nname = \"web\"\n\
             protocol = \"http1\"\nsteer = {steer:?}\nlisten = [\"{}\"]\n\
             intercept = [\"origins\"]\norigins = {}\n[service.pool]\nprewarm = 0\n",
            listen(&lab),
            addresses(&lab.all_origins())
        );
        let mut daemon = Daemon::start(&lab, &config).unwrap();
        let client = || Client::connect(&lab.host, lab.origin(0)).unwrap();
        let goes_directly = || {
            let mut client = client();
            client.get("/").is_ok() && origin.knows(client.local().unwrap())
        };
        assert!(!goes_directly());

        daemon.process().signal(Signal::SIGSTOP).unwrap();
        let limit = descriptors(&mut daemon).len() as u64 + 20;
        limit_descriptors(&mut daemon, limit);
        let mut hogs: Vec<_> =
            (0..60).map(|_| Client::connect(&lab.host, listen(&lab)).unwrap()).collect();
        for hog in &mut hogs {
            hog.send("GET /w").unwrap();
        }
        let mut queued: Vec<_> = (0..5).map(|_| client()).collect();
        for client in &mut queued {
            client.send("GET /queued HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        }
        daemon.process().signal(Signal::SIGCONT).unwrap();
        let start = clock::now();
        for client in &mut queued {
            // Served or reset.
            client.response().ok();
        }
        eventually(SOON, "clients go directly", goes_directly);
        let took = clock::now() - start;
        assert!(took < SOON, "{took:?} with {steer:?}");
        assert!((0..20).all(|_| goes_directly()), "with {steer:?}");
        let lines = daemon.log().matches("accept failed").count();
        assert!((1..10).contains(&lines), "{}", daemon.log());

        // There is room again.
        drop((hogs, queued));
        eventually(SOON, "clients are intercepted", || !goes_directly());
        assert!(daemon.service().unwrap().accept_failed > 0);
        assert!(daemon.snapshot().unwrap().datapath.left_stale_heartbeat > 20);
        assert!(daemon.log().contains("there is room for intercepted clients again"));
        daemon.stop().unwrap();
    }
}

#[test]
fn without_ports_those_that_are_open_serve_and_more_come_later() {
    let service = Service {
        pool: "prewarm = 8\nbackoff_base = \"50ms\"\nbackoff_max = \"200ms\"",
        ..Service::default()
    };
    let lab = Lab::new(1).unwrap();
    let _origin = Scripted::http(&lab.origins, lab.origin(0)).unwrap();
    lab.host.sysctl("ipv4.ip_local_port_range", "40000 40003").unwrap();
    let daemon = Daemon::spawn(&lab, &service.render(&lab)).unwrap();
    let origin = || daemon.service().map(|service| service.origins[0].clone());
    eventually(SOON, "all ports are used, and more are tried", || {
        origin().is_ok_and(|o| o.idle == 4 && o.dial_failed > 2)
    });
    let before = origin().unwrap().dial_failed;
    std::thread::sleep(Duration::from_secs(1));
    let tries = origin().unwrap().dial_failed - before;
    assert!(tries <= 100, "{tries} dials in a second");

    lab.host.sysctl("ipv4.ip_local_port_range", "40000 41001").unwrap();
    eventually(SOON, "the others are opened", || origin().is_ok_and(|o| o.idle == 8));
    let response = Client::get_once(&lab.host, listen(&lab), "/after").unwrap();
    assert!(response.text().ends_with(" /after"));
}

#[test]
fn without_a_thread_there_are_no_statistics_for_a_while() {
    let mut setup = Setup::http(Peer::serve);
    let limit = ThreadLimit::of(setup.daemon.process()).unwrap();
    limit.no_more().unwrap();
    for _ in 0..2 {
        assert!(setup.daemon.snapshot().is_err());
    }
    assert!(setup.daemon.request("GET", "/v1/health").is_ok(), "the others answer");
    assert_eq!(setup.client().get("/").unwrap().status, 200);
    limit.lift().unwrap();
    setup.daemon.snapshot().unwrap();
    setup.daemon.stop().unwrap();
    drop(limit);
}
