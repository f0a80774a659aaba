//! Clients of high priority have connections of their own, whatever the others do.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::time::Duration;

use broker::stats::ServiceSnapshot;
use harness::origin::scripted::{Peer, Scripted};
use harness::{Client, Daemon, Lab, eventually};

use crate::support::{SOON, addresses, listen};

/// Origins that hold requests for `/slow`, and fail those for `/bad`.
fn origins(lab: &Lab) -> (Vec<Scripted>, Arc<AtomicBool>) {
    let go = Arc::new(AtomicBool::new(false));
    let start = |address| {
        let go = Arc::clone(&go);
        let script = move |peer: &mut Peer| -> io::Result<()> {
            while let Some(request) = peer.request()? {
                while request.target() == "/slow" && !go.load(Acquire) {
                    std::thread::sleep(Duration::from_millis(2));
                }
                if request.target() == "/bad" {
                    peer.send("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")?;
                } else {
                    peer.respond("done")?;
                }
            }
            Ok(())
        };
        Scripted::start(&lab.origins, address, script).unwrap()
    };
    (lab.all_origins().into_iter().map(start).collect(), go)
}

fn daemon(lab: &Lab, way: &str, rest: &str) -> Daemon {
    let high_listen = std::net::SocketAddr::new(lab.host_ip(), 8081);
    let config = format!(
        "workers = 2\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nsteer = {way:?}\n\
         listen = [\"{}\"]\nhigh = {{ listen = [\"{high_listen}\"], intercept = [\"{}\"] }}\n\
         origins = {}\n{rest}",
        listen(lab),
        lab.vip(),
        addresses(&lab.all_origins())
    );
    Daemon::start(lab, &config).unwrap()
}

fn service(daemon: &Daemon, name: &str) -> ServiceSnapshot {
    let services = daemon.snapshot().unwrap().services;
    services.into_iter().find(|service| service.name == name).unwrap()
}

#[test]
fn a_flood_of_others_takes_nothing_from_high_priority() {
    for way in ["relay", "kernel"] {
        let lab = Lab::new(2).unwrap();
        let (origins, go) = origins(&lab);
        let limits = "[service.limits]\nmax_connections = 2\nmax_pending = 2\n\
                      [service.limits.high]\nmax_connections = 4\n";
        let daemon = daemon(&lab, way, limits);
        let mut flood = Vec::new();
        for n in 1..=8 {
            let mut client = Client::connect(&lab.host, listen(&lab)).unwrap();
            client.send("GET /slow HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
            flood.push(client);
            eventually(SOON, "two are served, two wait, and the others are refused", || {
                let served: usize = origins.iter().map(|o| o.received_count("/slow")).sum();
                let service = service(&daemon, "web");
                served == n.min(2)
                    && service.waiting == n.clamp(2, 4) as u64 - 2
                    && service.queue_overflow == n.saturating_sub(4) as u64
            });
        }
        let high_listen = std::net::SocketAddr::new(lab.host_ip(), 8081);
        for address in [high_listen, lab.vip(), lab.vip(), high_listen] {
            let response = Client::get_once(&lab.host, address, "/").unwrap();
            assert_eq!(response.status, 200, "{way}, {address}: {}", response.head);
        }
        let high = service(&daemon, "web.high");
        assert_eq!((high.exchanges, high.queue_overflow, high.waiting), (4, 0, 0));
        assert_eq!(high.steered > 0, way == "kernel", "{:?}", high.not_steered);
        let limit = |name| service(&daemon, name).limits["max_connections"];
        assert_eq!((limit("web").max, limit("web").used), (2, 2));
        assert_eq!(limit("web.high").max, 4);
        go.store(true, Release);
        let statuses = flood.iter_mut().map(|client| client.response().unwrap().status);
        assert_eq!(statuses.filter(|status| *status == 200).count(), 4);
    }
}

#[test]
fn what_is_known_of_an_origin_is_known_to_both() {
    let lab = Lab::new(2).unwrap();
    let (origins, _go) = origins(&lab);
    let outlier = "[service.outlier]\nmax_ejection_percent = 50\nconsecutive_5xx = 3\n";
    let daemon = daemon(&lab, "relay", outlier);
    let ejected = |name| service(&daemon, name).outliers.unwrap().ejected;
    eventually(SOON, "one is ejected for what it does to some", || {
        let mut client = Client::connect(&lab.host, listen(&lab)).unwrap();
        client.send("POST /bad HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n").unwrap();
        client.response().unwrap();
        ejected("web") == 1
    });
    assert_eq!(ejected("web.high"), 1);
    let count = |i: usize| origins[i].received_count("GET");
    for _ in 0..10 {
        let response = Client::get_once(&lab.host, lab.vip(), "/").unwrap();
        assert_eq!(response.status, 200);
    }
    assert_eq!(count(0).min(count(1)), 0, "{} {}", count(0), count(1));
    assert_eq!(count(0) + count(1), 10);
}
