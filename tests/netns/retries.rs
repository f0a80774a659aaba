//! Requests that are tried again: which, how often, and how many at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Release,
};
use std::time::Duration;

use harness::load::{self, Plan};
use harness::origin::nginx;
use harness::origin::scripted::{Peer, Scripted};
use harness::{Client, Daemon, Lab, eventually};

use crate::support::{SOON, Service, Setup, addresses, listen, way_in};

#[test]
fn a_killed_origin_costs_no_idempotent_request_of_32_clients() {
    for way in ["relay", "kernel"] {
        for count in [4, 8] {
            let lab = Lab::new(count).unwrap();
            let mut origins: Vec<_> = (0..count).map(|i| nginx::origin(&lab, i).unwrap()).collect();
            let (target, clients) = way_in(&lab, way);
            let config = format!(
                "workers = 2\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\n{clients}\n\
                 origins = {}\n",
                addresses(&lab.all_origins())
            );
            let daemon = Daemon::start(&lab, &config).unwrap();
            let running = load::start(&lab, &Plan::steady(vec![target], 32)).unwrap();
            let exchanges = || daemon.service().unwrap().exchanges;
            eventually(SOON, "the load runs", || exchanges() > 300);
            origins[1].kill().unwrap();
            let before = exchanges();
            eventually(SOON, "the others serve", || exchanges() > before + 3000);
            let report = running.stop().unwrap();
            let service = daemon.service().unwrap();
            assert_eq!(
                (report.error_count(), report.crosstalk, service.retry_overflow),
                (0, 0, 0),
                "{way}, {count} origins: {:?}\n{}",
                report.errors,
                daemon.log()
            );
            assert_eq!(service.limits["max_retries"].used, 0, "all have ended");
        }
    }
}

/// All that an origin had under way needs a retry in the same moment: more than Envoy's budget of
/// 20 % and 3 would allow.
#[test]
fn a_quarter_of_32_requests_is_tried_again_at_once() {
    let lab = Lab::new(4).unwrap();
    let answer = Arc::new(AtomicBool::new(false));
    let origin = |i| {
        let answer = Arc::clone(&answer);
        let script = move |peer: &mut Peer| -> io::Result<()> {
            while peer.request()?.is_some() {
                while !answer.load(Acquire) {
                    std::thread::sleep(Duration::from_millis(2));
                }
                peer.respond("done")?;
            }
            Ok(())
        };
        Scripted::start(&lab.origins, lab.origin(i), script).unwrap()
    };
    let mut origins: Vec<_> = (0..4).map(origin).collect();
    let service = Service { pool: "prewarm = 2", ..Service::default() };
    let daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
    let mut clients = Vec::new();
    for n in 1..=32 {
        let mut client = Client::connect(&lab.host, listen(&lab)).unwrap();
        client.send("GET / HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        clients.push(client);
        eventually(SOON, "it is at an origin", || {
            origins.iter().map(|origin| origin.received_count("GET")).sum::<usize>() == n
        });
    }
    let counts = origins.iter().map(|origin| origin.received_count("GET"));
    let busiest = counts.clone().enumerate().max_by_key(|(_, count)| *count);
    let (busiest, lost) = busiest.unwrap();
    assert!(lost >= 8);
    drop(origins.remove(busiest));
    eventually(SOON, "all are at an origin again", || {
        origins.iter().map(|origin| origin.received_count("GET")).sum::<usize>() == 32
    });
    let service = daemon.service().unwrap();
    let limit = service.limits["max_retries"];
    assert!(service.retries >= lost as u64 && limit.used >= lost as u64, "{lost}: {limit:?}");
    answer.store(true, Release);
    for mut client in clients {
        assert_eq!(client.response().unwrap().status, 200);
    }
    assert_eq!(daemon.service().unwrap().limits["max_retries"].used, 0);
}

/// An origin that dies takes its sockets along one by one, and those that still look well must not use
/// up a request's attempts, even if nothing else is warm.
#[test]
fn a_request_that_failed_waits_for_another_origin() {
    let lab = Lab::new(2).unwrap();
    let held = Arc::new(AtomicUsize::new(0));
    let release = [(), ()].map(|()| Arc::new(AtomicBool::new(false)));
    let origin = |i: u8| {
        let (held, release) = (Arc::clone(&held), Arc::clone(&release[usize::from(i)]));
        let script = move |peer: &mut Peer| -> io::Result<()> {
            while let Some(request) = peer.request()? {
                if request.target() == "/hold" {
                    held.fetch_add(1, AcqRel);
                    while !release.load(Acquire) {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                } else if i == 0 {
                    return peer.reset();
                }
                peer.respond("done")?;
            }
            Ok(())
        };
        Scripted::start(&lab.origins, lab.origin(i), script).unwrap()
    };
    let [dying, busy] = [0, 1].map(origin);
    let service = Service { workers: 1, pool: "prewarm = 0", ..Service::default() };
    let daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
    let client = || Client::connect(&lab.host, listen(&lab)).unwrap();
    let mut clients = Vec::new();
    // Which of them gets a request is left to chance.
    while [&dying, &busy].iter().any(|origin| origin.received_count("GET") <= 3) {
        assert!(clients.len() < 100, "one of them gets nearly all");
        let mut client = client();
        client.send("GET /hold HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        clients.push(client);
        eventually(SOON, "it is at an origin", || held.load(Acquire) == clients.len());
    }
    let idle = || daemon.service().unwrap().origins.iter().map(|o| o.idle).sum::<u64>();
    release[0].store(true, Release);
    eventually(SOON, "one has warm sockets", || idle() == dying.received_count("GET") as u64);
    assert_eq!(client().get("/").unwrap().status, 200);
    assert_eq!([&dying, &busy].map(|origin| origin.received_count("GET / ")), [1, 1]);
    assert_eq!(daemon.service().unwrap().retries, 1);
    release[1].store(true, Release);
    for mut client in clients {
        assert_eq!(client.response().unwrap().status, 200);
    }
}

/// What the origin of `breaking` does with requests.
mod phase {
    /// Waits with the request, and ends the connection when another phase begins.
    pub(super) const BREAK: usize = 0;
    /// Waits with the request until the next phase.
    pub(super) const HOLD: usize = 1;
    /// Answers.
    pub(super) const ANSWER: usize = 2;
}

/// What an origin is told by phases, and how many requests have begun to follow them.
#[derive(Default)]
struct Phases {
    now: AtomicUsize,
    held: AtomicUsize,
}

impl Phases {
    fn set(&self, phase: usize) {
        self.now.store(phase, Release);
    }

    fn held(&self) -> usize {
        self.held.load(Acquire)
    }
}

fn breaking(service: &Service<'_>) -> (Setup, Arc<Phases>) {
    let phases = Arc::<Phases>::default();
    let told = Arc::clone(&phases);
    let setup = service.start(move |peer| {
        while peer.request()?.is_some() {
            let began = told.now.load(Acquire);
            told.held.fetch_add(1, AcqRel);
            while told.now.load(Acquire) == began && began != phase::ANSWER {
                std::thread::sleep(Duration::from_millis(2));
            }
            if began == phase::BREAK {
                return Ok(());
            }
            peer.respond("done")?;
        }
        Ok(())
    });
    (setup, phases)
}

#[test]
fn no_more_are_tried_again_at_once_than_allowed() {
    let service = Service { retries: "max_retries = 1", ..Service::default() };
    let (setup, phases) = breaking(&service);
    for round in 1..=2 {
        phases.set(phase::BREAK);
        let held = phases.held();
        let mut clients: Vec<_> = (0..4).map(|_| setup.client()).collect();
        for (i, client) in clients.iter_mut().enumerate() {
            let method = if i == 3 { "POST" } else { "GET" };
            let request =
                format!("{method} /{round} HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n");
            let request =
                if i == 3 { request } else { request.replace("Content-Length: 0\r\n", "") };
            client.send(request).unwrap();
        }
        let received = |what: &str| setup.origin.received_count(&format!("{what} /{round} "));
        eventually(SOON, "all are at the origin", || phases.held() == held + 4);
        phases.set(phase::HOLD);
        eventually(SOON, "one is tried again", || phases.held() == held + 5);
        let limit = || setup.daemon.service().unwrap().limits["max_retries"];
        assert_eq!((limit().used, limit().max), (1, 1));
        eventually(SOON, "two are not", || {
            setup.daemon.service().unwrap().retry_overflow == 2 * round
        });
        phases.set(phase::ANSWER);
        let mut statuses = [0; 3];
        for client in &mut clients[..3] {
            let response = client.response().unwrap();
            let refused = response.head.contains("x-broker-overloaded: max_retries");
            assert_eq!(refused, response.status == 503, "{}", response.head);
            statuses[usize::from(refused)] += 1;
        }
        assert_eq!(statuses, [1, 2, 0]);
        let post = clients[3].response().unwrap();
        assert_eq!(post.status, 502, "{}", post.head);
        assert_eq!((received("GET"), received("POST")), (4, 1), "a POST runs once");
        eventually(SOON, "it is over", || limit().used == 0);
        assert_eq!(limit().overflow, 2 * round);
        assert_eq!(setup.daemon.service().unwrap().retries, round);
    }
}

#[test]
fn what_is_not_asked_for_is_not_tried_again() {
    for retries in ["retry_on = [\"connect-failure\", \"refused\"]", "attempts = 1"] {
        let (setup, phases) = breaking(&Service { retries, ..Service::default() });
        let mut client = setup.client();
        client.send("GET / HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        eventually(SOON, "it is at the origin", || phases.held() == 1);
        phases.set(phase::ANSWER);
        let response = client.response().unwrap();
        assert_eq!(response.status, 502, "{retries}: {}", response.head);
        let service = setup.daemon.service().unwrap();
        assert_eq!((service.retries, service.retry_overflow, service.origin_failed), (0, 0, 1));
        assert_eq!(setup.origin.received_count("GET"), 1);
    }
}

#[test]
fn gateway_errors_are_tried_elsewhere_if_asked_for() {
    let lab = Lab::new(2).unwrap();
    let answer = |status: &'static str| {
        move |peer: &mut Peer| {
            while peer.request()?.is_some() {
                peer.send(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n"))?;
            }
            Ok(())
        }
    };
    let bad =
        Scripted::start(&lab.origins, lab.origin(0), answer("503 Service Unavailable")).unwrap();
    let _good = Scripted::start(&lab.origins, lab.origin(1), answer("200 OK")).unwrap();
    let ask = |method: &str| {
        let mut client = Client::connect(&lab.host, listen(&lab)).unwrap();
        client
            .send(format!("{method} / HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n"))
            .unwrap();
        client.response().unwrap().status
    };
    let prewarmed = "prewarm = 1";
    {
        let retries = "retry_on = [\"gateway-error\"]";
        let service = Service { pool: prewarmed, retries, ..Service::default() };
        let daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
        while bad.received_count("PUT") < 5 {
            assert_eq!(ask("PUT"), 200);
        }
        assert_eq!(daemon.service().unwrap().retries, 5);
        eventually(SOON, "a POST is answered by the bad one", || ask("POST") == 503);
        assert_eq!(daemon.service().unwrap().retries, 5, "it runs once");
    }
    let service = Service { pool: prewarmed, ..Service::default() };
    let daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
    eventually(SOON, "it is passed on", || ask("PUT") == 503);
    assert_eq!(daemon.service().unwrap().retries, 0);
}

#[test]
fn a_connection_that_fails_is_tried_again_unless_told_otherwise() {
    for (retries, served) in [("", true), ("retry_on = [\"refused\"]", false)] {
        let lab = Lab::new(2).unwrap();
        let _live = Scripted::http(&lab.origins, lab.origin(1)).unwrap();
        // Nothing is kept, so that each exchange needs a connection.
        let pool = "prewarm = 0\nmax_idle = 0\nbackoff_base = \"1ms\"\nbackoff_max = \"1ms\"";
        let service = Service { pool, retries, ..Service::default() };
        let daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
        let mut refused = 0;
        eventually(SOON, "some connections fail", || {
            let response = Client::get_once(&lab.host, listen(&lab), "/").unwrap();
            if response.status != 200 {
                assert!(response.head.contains("x-broker-unavailable: unreachable"));
                refused += 1;
            }
            daemon.service().unwrap().totals().dial_refused >= 5
        });
        let service = daemon.service().unwrap();
        assert_eq!((service.retries > 0, refused > 0), (served, !served), "{retries}");
        assert_eq!(service.limits["max_retries"].used, 0);
    }
}
