//! `refuse = "connect"`: clients that could only be refused are refused before they are connected.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::time::Duration;

use harness::origin::scripted::{Peer, Scripted};
use harness::{Client, Daemon, Lab, eventually};
use nix::sys::signal::Signal;

use crate::support::{SOON, addresses};

/// A daemon with room for one exchange and one that waits, both taken.
struct Full {
    daemon: Daemon,
    clients: [Client; 2],
    origin: Scripted,
    go: Arc<AtomicBool>,
    lab: Lab,
}

fn full(steer: &str) -> Full {
    let lab = Lab::new(1).unwrap();
    let go = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&go);
    let origin = Scripted::start(&lab.origins, lab.origin(0), move |peer: &mut Peer| {
        while peer.request()?.is_some() {
            while !told.load(Acquire) {
                std::thread::sleep(Duration::from_millis(2));
            }
            peer.respond("done")?;
        }
        Ok(())
    })
    .unwrap();
    let config = format!(
        "workers = 2\nheartbeat_age_max = \"500ms\"\n[[service]]\nname = \"web\"\n\
         protocol = \"http1\"\nsteer = {steer:?}\nintercept = [\"origins\"]\norigins = {}\n\
         [service.pool]\nprewarm = 1\nqueue_timeout = \"60s\"\n[service.limits]\n\
         max_connections = 1\nmax_pending = 1\nrefuse = \"connect\"\n",
        addresses(&lab.all_origins())
    );
    let daemon = Daemon::start(&lab, &config).unwrap();
    let mut first = Client::connect(&lab.host, lab.origin(0)).unwrap();
    first.send("GET / HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    eventually(SOON, "one is served", || origin.received_count("GET") == 1);
    let mut second = Client::connect(&lab.host, lab.origin(0)).unwrap();
    second.send("GET / HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    eventually(SOON, "one waits", || daemon.service().unwrap().waiting == 1);
    Full { daemon, clients: [first, second], origin, go, lab }
}

impl Full {
    /// How another client's `connect()` ends.
    fn connect(&self) -> io::Result<Client> {
        Client::connect(&self.lab.host, self.lab.origin(0))
            .map_err(|error| error.downcast().unwrap_or_else(|error| panic!("{error:#}")))
    }

    /// Whether another client reaches the origin without the daemon.
    fn is_open_wide(&self) -> bool {
        self.connect().is_ok_and(|client| {
            let local = client.local().unwrap();
            harness::wait::within(Duration::from_millis(200), || self.origin.knows(local))
        })
    }
}

#[test]
fn a_full_service_refuses_at_connect_and_opens_again() {
    for steer in ["relay", "kernel"] {
        let mut full = full(steer);
        let (before, accepted) = (full.daemon.service().unwrap(), full.origin.accepted());
        for n in 1..=3 {
            let error = full.connect().expect_err("nothing is left");
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{error}");
            let service = full.daemon.service().unwrap();
            assert_eq!(service.connects_refused, n);
            assert_eq!((service.clients, service.queue_overflow), (before.clients, 0));
        }
        assert_eq!(full.origin.accepted(), accepted, "nobody went past the broker");
        full.go.store(true, Release);
        for client in &mut full.clients {
            assert_eq!(client.response().unwrap().status, 200);
        }
        let mut third = full.connect().expect("there is room again");
        assert_eq!(third.get("/").unwrap().status, 200, "{steer}");
        assert_eq!(full.daemon.service().unwrap().connects_refused, 3);
    }
}

#[test]
fn it_stays_closed_for_as_long_as_it_is_full() {
    let full = full("relay");
    // For longer than what was said once would count.
    for _ in 0..150 {
        assert!(full.connect().is_err());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn without_a_live_daemon_it_is_open() {
    for kill in [false, true] {
        let mut full = full("relay");
        assert!(full.connect().is_err());
        if kill {
            full.daemon.process().kill().unwrap();
            assert!(full.is_open_wide(), "the programs are gone with it");
        } else {
            full.daemon.process().signal(Signal::SIGSTOP).unwrap();
            eventually(SOON, "what it said counts no more", || full.is_open_wide());
            full.daemon.process().signal(Signal::SIGCONT).unwrap();
            eventually(SOON, "it says so again", || full.connect().is_err());
        }
    }
}
