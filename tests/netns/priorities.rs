//! Clients of high priority have connections of their own, whatever the others do.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use std::time::Duration;

use broker::stats::ServiceSnapshot;
use harness::load::{self, Mode, Plan};
use harness::origin::scripted::{Peer, Scripted};
use harness::process::Finished;
use harness::{Cgroup, Client, Daemon, Lab, Launch, Netns, eventually};

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
                    peer.answer_with_id(&request, "200 OK")?;
                }
            }
            Ok(())
        };
        Scripted::start(&lab.origins, address, script).unwrap()
    };
    (lab.all_origins().into_iter().map(start).collect(), go)
}

fn daemon(lab: &Lab, way: &str, rest: &str) -> Daemon {
    let high_listen = SocketAddr::new(lab.host_ip(), 8081);
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

/// Eight clients of the default priority, where it has two connections and two places in the queue.
fn flood(lab: &Lab, to: SocketAddr, origins: &[Scripted], daemon: &Daemon) -> Vec<Client> {
    let mut flood = Vec::new();
    for n in 1..=8 {
        let mut client = Client::connect(&lab.host, to).unwrap();
        client.send("GET /slow HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        flood.push(client);
        eventually(SOON, "two are served, two wait, and the others are refused", || {
            let served: usize = origins.iter().map(|o| o.received_count("/slow")).sum();
            let service = service(daemon, "web");
            served == n.min(2)
                && service.waiting == n.clamp(2, 4) as u64 - 2
                && service.queue_overflow == n.saturating_sub(4) as u64
        });
    }
    flood
}

#[test]
fn a_flood_of_others_takes_nothing_from_high_priority() {
    for way in ["relay", "kernel"] {
        let lab = Lab::new(2).unwrap();
        let (origins, go) = origins(&lab);
        let limits = "[service.limits]\nmax_connections = 2\nmax_pending = 2\n\
                      [service.limits.high]\nmax_connections = 4\n";
        let daemon = daemon(&lab, way, limits);
        let mut flood = flood(&lab, listen(&lab), &origins, &daemon);
        let high_listen = SocketAddr::new(lab.host_ip(), 8081);
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

/// A daemon that intercepts connections to the origins, those of the clients' cgroup as of high
/// priority.
fn by_cgroup(lab: &Lab, top: &str, keys: &str, limits: &str) -> Daemon {
    let config = format!(
        "workers = 2\n{top}\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\n{keys}\n\
         intercept = [\"origins\", \"{}\"]\nhigh = {{ cgroups = [{:?}] }}\norigins = {}\n{limits}",
        v6(lab),
        lab.clients_cgroup.path(),
        addresses(&lab.all_origins())
    );
    Daemon::start(lab, &config).unwrap()
}

fn v6(lab: &Lab) -> SocketAddr {
    SocketAddr::new(lab.origin_ip6(1), 80)
}

/// What a process in a cgroup gets.
fn curl(netns: &Netns, cgroup: &Cgroup, address: SocketAddr, target: &str) -> Finished {
    let url = format!("http://{address}{target}");
    let launch = Launch::new("curl").args(["-sS", "-w", " %{http_code}", "--max-time", "10", &url]);
    launch.netns(netns).cgroup(cgroup).output(SOON).unwrap()
}

#[test]
fn a_cgroup_is_enough_to_be_of_high_priority() {
    for way in ["relay", "auto", "kernel"] {
        let lab = Lab::new(2).unwrap();
        let (origins, go) = origins(&lab);
        let limits = "[service.limits]\nmax_connections = 2\nmax_pending = 2\n\
                      [service.limits.high]\nmax_connections = 4\n";
        let daemon = by_cgroup(&lab, "", &format!("steer = {way:?}"), limits);
        let mut flood = flood(&lab, lab.origin(0), &origins, &daemon);
        let mut asked = 0;
        eventually(SOON, "they are served, each in its way", || {
            let mode = Mode::OneShotClientCloses;
            let plan = Plan { mode, ..Plan::echo(lab.all_origins(), 2, 200) };
            let report = load::run(&lab, &plan).unwrap();
            let came_to = (report.requests, report.error_count(), report.crosstalk);
            assert_eq!(came_to, (200, 0, 0), "{way}: {report:?}");
            asked += 200;
            way == "relay" || service(&daemon, "web.high").steered > 0
        });
        let high = service(&daemon, "web.high");
        assert_eq!((high.exchanges, high.queue_overflow), (asked, 0));
        let limit = |name| service(&daemon, name).limits["max_connections"];
        assert_eq!((limit("web").max, limit("web").used), (2, 2));
        assert!(limit("web.high").max == 4 && limit("web.high").used <= 4);
        let web = service(&daemon, "web");
        assert_eq!(web.clients, 8, "{way}: {web:?}\n{}", daemon.log());
        go.store(true, Release);
        let statuses = flood.iter_mut().map(|client| client.response().unwrap().status);
        assert_eq!(statuses.filter(|status| *status == 200).count(), 4);
    }
}

#[test]
fn high_priority_comes_before_the_cgroups_of_the_service() {
    let lab = Lab::new(2).unwrap();
    let (_origins, _go) = origins(&lab);
    let container = lab.container().unwrap();
    let deeper = lab.clients_cgroup.child("deeper").unwrap();
    let top = format!("intercept_from_netns = \"{}\"", container.host);
    let own = format!("cgroups = [{:?}]", lab.proxy_cgroup.path());
    let daemon = by_cgroup(&lab, &top, &own, "");
    let exchanges = || ["web", "web.high"].map(|name| service(&daemon, name).exchanges);
    let mut expected = [0, 0];
    for (cgroup, place) in [(&lab.proxy_cgroup, 0), (&lab.clients_cgroup, 1), (&deeper, 1)] {
        for (netns, address) in
            [(&lab.host, lab.origin(0)), (&lab.host, v6(&lab)), (&container.netns, lab.origin(1))]
        {
            let finished = curl(netns, cgroup, address, "/");
            assert!(finished.stdout.ends_with(" 200"), "{finished:?}");
            expected[place] += 1;
            assert_eq!(exchanges(), expected, "{address} by {}", cgroup.path());
        }
    }
    // This very process is in neither.
    Client::get_once(&lab.host, lab.origin(0), "/").unwrap();
    assert_eq!((exchanges(), daemon.snapshot().unwrap().datapath.left_other_cgroup), (expected, 1));
}

#[test]
fn each_priority_is_refused_for_itself() {
    let lab = Lab::new(2).unwrap();
    let (origins, go) = origins(&lab);
    let one = "max_connections = 1\nmax_pending = 1\nrefuse = \"connect\"\n";
    let limits = format!("[service.limits]\n{one}[service.limits.high]\n{one}");
    let daemon = by_cgroup(&lab, "heartbeat_age_max = \"500ms\"", "steer = \"relay\"", &limits);
    let served = || -> usize { origins.iter().map(|o| o.received_count("/slow")).sum() };
    let slow = || {
        let mut client = Client::connect(&lab.host, lab.origin(0)).unwrap();
        client.send("GET /slow HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        client
    };
    let _served = slow();
    eventually(SOON, "one is served", || served() == 1);
    let _waiting = slow();
    eventually(SOON, "one waits", || service(&daemon, "web").waiting == 1);
    eventually(SOON, "the others are refused", || {
        Client::connect(&lab.host, lab.origin(0)).is_err()
    });
    let finished = curl(&lab.host, &lab.clients_cgroup, lab.origin(0), "/");
    assert!(finished.stdout.ends_with(" 200"), "{finished:?}");
    let url = format!("http://{}/slow", lab.origin(0));
    let of_high = || lab.client("curl").args(["-sS", "--max-time", "60", &url]).spawn().unwrap();
    let first = of_high();
    eventually(SOON, "one of high priority is served", || served() == 2);
    let mut full = [first, of_high()];
    eventually(SOON, "one of high priority waits", || service(&daemon, "web.high").waiting == 1);
    eventually(SOON, "further ones are refused", || {
        let finished = curl(&lab.host, &lab.clients_cgroup, lab.origin(0), "/");
        finished.stderr.contains("onnect") && !finished.status.success()
    });
    let refused = ["web", "web.high"].map(|name| service(&daemon, name).connects_refused);
    assert!(refused.iter().all(|n| *n > 0), "{refused:?}");
    go.store(true, Release);
    assert!(full.iter_mut().all(|curl| curl.wait(SOON).unwrap().success()));
}
