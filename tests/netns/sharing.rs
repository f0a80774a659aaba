//! Many clients on few sockets, with the kernel counting the sockets.

use std::time::Duration;

use harness::load::{self, Mode, Plan};
use harness::origin::nginx;
use harness::{Daemon, Lab, eventually};

use crate::support::{SOON, Service, listen};

/// Two for each worker and origin.
const PREWARMED: Service<'_> = Service { pool: "prewarm = 2", limits: "", ..SIXTEEN };

/// Sixteen sockets, whoever comes.
const SIXTEEN: Service<'_> = Service {
    daemon: "",
    keys: "protocol = \"http1\"",
    pool: "prewarm = 2\nmax_idle = 2\nqueue_timeout = \"10s\"",
    limits: "max_connections = 16\nmax_pending = 4096",
    retries: "",
    timeouts: "",
    workers: 2,
};

/// A lab with nginx origins and a two-worker daemon in front of them.
macro_rules! nginx_lab {
    ($origins:expr, $service:expr, $lab:ident, $servers:ident, $daemon:ident) => {
        let $lab = Lab::new($origins).unwrap();
        let $servers: Vec<_> = (0..$origins).map(|i| nginx::origin(&$lab, i).unwrap()).collect();
        let service: Service<'_> = $service;
        #[allow(unused_mut, reason = "some tests ask for the process, which needs it")]
        let mut $daemon = Daemon::start(&$lab, &service.render(&$lab)).unwrap();
    };
}

#[test]
fn the_first_request_needs_no_handshake() {
    nginx_lab!(4, PREWARMED, lab, _servers, daemon);
    let (before, created) = (lab.origin_counters(), daemon.totals().unwrap().created);
    let plan = Plan::echo(vec![listen(&lab)], 1, 1);
    let report = load::run(&lab, &plan).unwrap();
    assert_eq!((report.requests, report.error_count()), (1, 0));
    assert_eq!(lab.origin_counters().since(&before).passive_opens(), 0);
    assert_eq!(daemon.totals().unwrap().created, created);
}

#[test]
fn warm_sockets_are_ready_when_the_daemon_says_so() {
    let prewarmed = Service { pool: "prewarm = 3", ..PREWARMED };
    nginx_lab!(2, prewarmed, lab, _servers, daemon);
    // Two workers, two origins, three each.
    assert_eq!(daemon.totals().unwrap().idle, 12);
    eventually(SOON, "the origins see them", || lab.origin_counters().established() == 12);
}

#[test]
fn many_keep_alive_clients_share_sixteen_sockets() {
    nginx_lab!(4, SIXTEEN, lab, _servers, daemon);
    let before = lab.origin_counters();
    let plan = Plan { mode: Mode::KeepAlive, ..Plan::echo(vec![listen(&lab)], 256, 10_000) };
    let report = load::run(&lab, &plan).unwrap();
    assert_eq!(
        (report.requests, report.error_count(), report.crosstalk),
        (10_000, 0, 0),
        "{:?}\n{}",
        report.errors,
        daemon.log()
    );
    let after = lab.origin_counters();
    let opened = after.since(&before).passive_opens();
    // Two workers share the sixteen: one that has not had the processor for a while may be given some.
    assert!(opened <= 32, "sockets were not kept: {opened} more");
    assert!(after.established() <= 16, "{} sockets", after.established());
    let process = daemon.process();
    // Its own memory: how much of the program's text is resident says nothing of its clients.
    let memory = process.heap().unwrap();
    assert!(memory < 30 << 20, "{memory} bytes of memory");
}

#[test]
fn one_shot_clients_cost_no_more_than_the_pool() {
    nginx_lab!(4, SIXTEEN, lab, _servers, daemon);
    let before = lab.origin_counters();
    let plan = Plan::echo(vec![listen(&lab)], 1, 20_000);
    let report = load::run(&lab, &plan).unwrap();
    assert_eq!((report.requests, report.error_count(), report.crosstalk), (20_000, 0, 0));
    let after = lab.origin_counters().since(&before);
    assert!(after.passive_opens() <= 2, "{} handshakes", after.passive_opens());
    assert!(after.time_wait() <= 2, "{} in TIME_WAIT", after.time_wait());
    // All but the first exchange of each socket.
    let totals = daemon.totals().unwrap();
    assert!(totals.reused >= 20_000 - totals.created, "{totals:?}");
}

#[test]
fn large_bodies_arrive_whole_for_many_clients() {
    nginx_lab!(2, SIXTEEN, lab, _servers, daemon);
    for (path, length) in nginx::FILES {
        for mode in [Mode::OneShot, Mode::OneShotClientCloses, Mode::KeepAlive] {
            let plan = Plan {
                mode,
                path: path.into(),
                body: Some(length),
                ..Plan::echo(vec![listen(&lab)], 32, 300)
            };
            let report = load::run(&lab, &plan).unwrap();
            assert_eq!(
                (report.requests, report.error_count()),
                (300, 0),
                "{path} {mode:?}: {:?}\n{}",
                report.errors,
                daemon.log()
            );
        }
    }
}

#[test]
fn a_cold_burst_keeps_to_the_cap_on_dials() {
    let pool = "prewarm = 0\nmax_dials = 3";
    let setup =
        Service { pool, limits: "max_connections = 64", ..Service::default() }.start(|peer| {
            while let Some(request) = peer.request()? {
                // The clients that came later must not find this socket free.
                std::thread::sleep(Duration::from_millis(50));
                peer.respond(format!("{} {}", peer.index(), request.target()))?;
            }
            Ok(())
        });
    let mut clients: Vec<_> = (0..100).map(|_| setup.client()).collect();
    for client in &mut clients {
        client.send("GET /x HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    }
    for client in &mut clients {
        assert!(client.response().unwrap().text().ends_with(" /x"));
    }
    assert!(setup.origin.accepted() <= 64, "{} sockets", setup.origin.accepted());
}

#[test]
fn real_clients_work_unchanged() {
    let prewarmed = Service { pool: "prewarm = 1", ..PREWARMED };
    nginx_lab!(2, prewarmed, lab, _servers, daemon);
    let url = format!("http://{}", listen(&lab));
    let limit = Duration::from_mins(1);
    let run = |program: &str, arguments: &[&str], path: &str| {
        lab.client(program)
            .args(arguments)
            .arg(format!("{url}{path}"))
            .output(limit)
            .unwrap()
            .success()
            .unwrap()
    };
    let body = run("curl", &["-sS", "--http1.0"], "/128");
    assert_eq!(body.len(), 128);
    let body = run("curl", &["-sS", "--compressed", "-H", "Expect: x"], "/64k");
    assert_eq!(body.len(), 64 << 10);
    let twice = format!("{url}/128");
    assert_eq!(run("curl", &["-sS", &twice], "/128").len(), 256);

    let report = run("ab", &["-q", "-n", "2000", "-c", "16"], "/128");
    assert!(report.contains("Failed requests:        0"), "{report}");
    assert!(!report.contains("Non-2xx"), "{report}");
    let report = run("ab", &["-q", "-k", "-n", "2000", "-c", "16"], "/128");
    assert!(report.contains("Failed requests:        0"), "{report}");
    assert!(report.contains("Keep-Alive requests:    2000"), "{report}");
    let report = run("wrk", &["-t1", "-c32", "-d1s"], "/64k");
    assert!(!report.contains("Socket errors") && !report.contains("Non-2xx"), "{report}");

    let script = "import sys, urllib.request as u\n\
                  print(sum(len(u.urlopen(sys.argv[1]).read()) for _ in range(20)))";
    assert_eq!(run("python3", &["-c", script], "/128").trim(), "2560");
    drop(daemon);
}
