//! Origins that die, refuse or never answer.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use broker::clock;
use harness::load::{self, Mode, Plan};
use harness::origin::nginx;
use harness::origin::scripted::Scripted;
use harness::{Client, Daemon, Lab, eventually};

use crate::support::{SOON, Service, listen};

#[test]
fn a_killed_origin_among_four_costs_no_idempotent_request() {
    for mode in [Mode::OneShot, Mode::KeepAlive] {
        let lab = Lab::new(4).unwrap();
        let mut servers: Vec<_> = (0..4).map(|i| nginx::origin(&lab, i).unwrap()).collect();
        let service = Service { pool: "prewarm = 2", workers: 2, ..Service::default() };
        let daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
        let plan = Plan { mode, ..Plan::steady(vec![listen(&lab)], 16) };
        let running = load::start(&lab, &plan).unwrap();
        let exchanges = || daemon.service().unwrap().exchanges;
        eventually(SOON, "the load runs", || exchanges() > 300);
        servers[1].kill().unwrap();
        let before = exchanges();
        eventually(SOON, "the others serve", || exchanges() > before + 3000);
        let report = running.stop().unwrap();
        assert_eq!(
            (report.error_count(), report.crosstalk),
            (0, 0),
            "{:?}\n{}",
            report.errors,
            daemon.log()
        );
    }
}

#[test]
fn an_origin_that_comes_back_is_used_again() {
    let lab = Lab::new(2).unwrap();
    let _first = Scripted::http(&lab.origins, lab.origin(0)).unwrap();
    let service = Service { pool: "prewarm = 1\nbackoff_max = \"200ms\"", ..Service::default() };
    let _daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
    for _ in 0..5 {
        assert_eq!(Client::get_once(&lab.host, listen(&lab), "/").unwrap().status, 200);
    }
    let second = Scripted::http(&lab.origins, lab.origin(1)).unwrap();
    eventually(SOON, "the second origin gets requests", || {
        Client::get_once(&lab.host, listen(&lab), "/").unwrap();
        second.received_count("GET") > 0
    });
}

#[test]
fn without_any_origin_the_client_gets_a_clean_error() {
    // Refused (nobody listens) and unreachable (nobody has the address).
    for unreachable in [false, true] {
        let lab = Lab::new(1).unwrap();
        let service = Service {
            pool: "prewarm = 0\nconnect_timeout = \"300ms\"\nqueue_timeout = \"1s\"",
            ..Service::default()
        };
        let mut config = service.render(&lab);
        if unreachable {
            config = config.replace(&lab.origin(0).to_string(), &lab.vip().to_string());
        }
        let daemon = Daemon::start(&lab, &config).unwrap();
        for keep_alive in [true, false] {
            let mut client = Client::connect(&lab.host, listen(&lab)).unwrap();
            let close = if keep_alive { "" } else { "Connection: close\r\n" };
            client.send(format!("GET / HTTP/1.1\r\nHost: test\r\n{close}\r\n")).unwrap();
            let response = client.response().unwrap();
            assert!((502..=504).contains(&response.status), "{}", response.head);
        }
        assert!(daemon.service().unwrap().unreachable >= 2);
    }
}

#[test]
fn without_any_origin_an_opaque_client_is_turned_away_at_once() {
    let lab = Lab::new(1).unwrap();
    let service = Service {
        keys: "protocol = \"opaque\"",
        pool: "prewarm = 0\nqueue_timeout = \"1s\"",
        ..Service::default()
    };
    let _daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
    // It may be turned away before it knows that it is connected.
    if let Ok(mut client) = Client::connect(&lab.host, listen(&lab)) {
        client.send("hello\n").ok();
        assert!(client.is_closed_within(SOON).unwrap());
    }
}

#[test]
fn an_origin_that_never_answers_is_given_up() {
    let setup =
        Service { timeouts: "origin_stall = \"300ms\"", ..Service::default() }.start(|peer| {
            while let Some(request) = peer.request()? {
                if request.target() == "/silent" {
                    return peer.wait_closed();
                }
                if request.target() == "/half" {
                    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf of it")?;
                    return peer.wait_closed();
                }
                peer.respond(format!("{} {}", peer.index(), request.target()))?;
            }
            Ok(())
        });
    let mut client = setup.client();
    let response = client.get("/silent").unwrap();
    assert_eq!(response.status, 504, "{}", response.head);
    let mut client = setup.client();
    assert!(client.get("/half").is_err(), "a truncated body must not look complete");
    setup.settled();
    assert_eq!(setup.serving(), 2);
}

#[test]
fn a_response_cut_short_reaches_the_client_as_cut_short() {
    let setup = Service::default().start(|peer| {
        while let Some(request) = peer.request()? {
            match request.target() {
                "/close" => return peer.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut"),
                "/reset" => {
                    peer.send("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut")?;
                    return peer.reset();
                }
                "/chunk" => {
                    return peer
                        .send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\ncut\r\n");
                }
                target => {
                    let body = format!("{} {target}", peer.index());
                    peer.respond(body)?;
                }
            }
        }
        Ok(())
    });
    for (turn, target) in ["/close", "/reset", "/chunk"].into_iter().enumerate() {
        let mut client = setup.client();
        assert!(client.get(target).is_err(), "{target}");
        setup.settled();
        // Each took a connection along; the probe's own is reused by the next turn.
        assert_eq!(setup.serving(), turn + 1);
    }
}

#[test]
fn what_is_cut_short_because_the_daemon_is_killed_does_not_look_complete() {
    let get = "GET /part HTTP/1.1\r\nHost: test\r\n";
    for (protocol, request, answer) in [
        ("http1", format!("{get}\r\n"), "HTTP/1.1 200 OK\r\n\r\npart"),
        ("http1", format!("{get}\r\n"), "HTTP/1.0 200 OK\r\n\r\npart"),
        (
            "http1",
            format!("{get}Connection: upgrade\r\nUpgrade: test\r\n\r\n"),
            "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: test\r\n\r\npart",
        ),
        ("http1", format!("{get} folded\r\n\r\n"), "HTTP/1.1 200 OK\r\n\r\npart"),
        ("opaque", "part of a request".to_owned(), "part"),
    ] {
        let keys = format!("protocol = {protocol:?}\n");
        let (told, ends) = std::sync::mpsc::channel();
        let mut setup = Service { keys: &keys, ..Service::default() }.start(move |peer| {
            if peer.read_some()?.is_some() {
                peer.send(answer)?;
                told.send(peer.wait_closed().is_err()).ok();
            }
            Ok(())
        });
        let mut client = setup.client();
        client.send(&request).unwrap();
        client.take_until(b"part").unwrap();
        setup.daemon.process().kill().unwrap();
        let end = client.to_end().map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        assert!(end.is_err(), "{request:?}, {answer:?}: {end:?}");
        // Where the request's end shows, too, the origin may see any end.
        let reset = ends.recv_timeout(SOON).unwrap();
        assert!(reset || protocol == "http1", "a request that may be cut looks complete");
    }
}

#[test]
fn a_full_queue_refuses_and_says_so() {
    let setup = Service {
        pool: "prewarm = 0\nqueue_timeout = \"300ms\"",
        limits: "max_connections = 1\nmax_pending = 1",
        ..Service::default()
    }
    .start(|peer| {
        while peer.request()?.is_some() {
            peer.wait_closed()?;
        }
        Ok(())
    });
    let mut clients: Vec<_> = (0..4).map(|_| setup.client()).collect();
    for (i, client) in clients.iter_mut().enumerate() {
        client.send("GET / HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        if i == 0 {
            // It has the only socket before the others ask for one.
            eventually(SOON, "the first request is at the origin", || {
                setup.origin.received_count("GET") == 1
            });
        }
    }
    eventually(SOON, "one waits too long, two are refused at once", || {
        let service = setup.daemon.service().unwrap();
        (service.queue_timed_out, service.queue_overflow) == (1, 2)
    });
    let refused = clients
        .iter_mut()
        .map(|client| !client.is_silent_for(Duration::from_millis(100)).unwrap())
        .filter(|&refused| refused)
        .count();
    assert_eq!(refused, 3);
}

/// Whoever uses its connection again and again is told with a response that it ends, so that no request
/// is sent on a connection that is about to be closed.
#[test]
fn a_stop_costs_busy_clients_no_request() {
    let setup = Service { pool: "prewarm = 2", ..Service::default() }.start(|peer| {
        while let Some(request) = peer.request()? {
            peer.respond(request.target())?;
        }
        Ok(())
    });
    let done = AtomicUsize::new(0);
    let told = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..8_u32)
            .map(|number| {
                let (setup, done) = (&setup, &done);
                scope.spawn(move || {
                    let mut client = setup.client();
                    for turn in 0_usize.. {
                        let target = format!("/{number}/{turn}");
                        let request = format!(
                            "POST {target} HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\nhi"
                        );
                        client.send(request).unwrap();
                        let response = client.response().unwrap();
                        assert_eq!(response.text(), target);
                        if response.header("connection") == Some("close") {
                            return client.is_closed_within(SOON).unwrap();
                        }
                        done.fetch_add(1, Relaxed);
                        // Some are between two requests when the stop comes.
                        std::thread::sleep(Duration::from_millis(10 * u64::from(number % 3)));
                    }
                    unreachable!("it goes on until it is told")
                })
            })
            .collect();
        eventually(SOON, "all are busy", || done.load(Relaxed) > 100);
        setup.daemon.drain().unwrap();
        clients.into_iter().all(|client| client.join().unwrap())
    });
    assert!(told, "a connection was left open");
    let mut daemon = setup.daemon;
    let status = daemon.process().wait(SOON).unwrap();
    assert!(status.success(), "{status}\n{}", daemon.log());
}

/// A listener hands a client over with its first bytes only, so the daemon does not know of one who has
/// just connected.
#[test]
fn clients_that_have_just_connected_when_a_stop_comes_are_served() {
    let in_time = || {
        let setup = Service { pool: "prewarm = 2", ..Service::default() }.start(|peer| {
            while peer.request()?.is_some() {
                peer.respond("served")?;
            }
            Ok(())
        });
        let mut clients: Vec<_> = (0..8).map(|_| setup.client()).collect();
        let begun = clock::now();
        setup.daemon.drain().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let sent = clients
            .iter_mut()
            .all(|client| client.send("GET / HTTP/1.1\r\nHost: test\r\n\r\n").is_ok());
        if begun.elapsed() > Duration::from_millis(150) {
            // This machine was busy with something else: they had 200 ms.
            return false;
        }
        assert!(sent);
        for client in &mut clients {
            assert_eq!(client.response().unwrap().text(), "served");
            assert!(client.is_closed_within(SOON).unwrap());
        }
        let mut daemon = setup.daemon;
        let status = daemon.process().wait(SOON).unwrap();
        assert!(status.success(), "{status}\n{}", daemon.log());
        true
    };
    eventually(5 * SOON, "a moment to be in time", in_time);
}

#[test]
fn draining_lets_exchanges_finish() {
    let setup = Service::default().start(|peer| {
        while let Some(request) = peer.request()? {
            std::thread::sleep(Duration::from_millis(300));
            peer.respond(format!("{} {}", peer.index(), request.target()))?;
        }
        Ok(())
    });
    let mut client = setup.client();
    client.send("GET /last HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    eventually(SOON, "the request is at the origin", || {
        setup.origin.received_count("GET /last") == 1
    });
    setup.daemon.drain().unwrap();
    assert_eq!(client.response().unwrap().text(), "0 /last");
    let mut daemon = setup.daemon;
    let status = daemon.process().wait(SOON).unwrap();
    assert!(status.success(), "{status}\n{}", daemon.log());
}
