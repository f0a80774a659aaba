//! What happens to sockets while nobody uses them, and to requests that meet a dead one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use harness::origin::scripted::{Peer, Scripted};
use harness::{Client, Daemon, Lab, eventually};

use crate::support::{SOON, Service, Setup};

/// Serves; after the answer to `/then/WHAT` the origin does WHAT to its idle connection.
fn misbehave(peer: &mut Peer) -> std::io::Result<()> {
    while let Some(request) = peer.request()? {
        peer.respond(format!("{} {}", peer.index(), request.target()))?;
        let Some(what) = request.target().strip_prefix("/then/") else { continue };
        // Long enough for the response to be over, so that the socket is idle.
        thread::sleep(Duration::from_millis(20));
        match what {
            "junk" => peer.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")?,
            "newline" => peer.send("\r\n")?,
            "reset" => peer.reset()?,
            "half-close" => {
                peer.half_close()?;
                peer.wait_closed()?;
            }
            _ => return Ok(()),
        }
    }
    Ok(())
}

#[test]
fn an_idle_socket_that_stirs_is_evicted_at_once() {
    for (what, reason) in [
        ("junk", "idle_bytes"),
        ("newline", "idle_bytes"),
        ("close", "idle_closed"),
        ("half-close", "idle_closed"),
        ("reset", "idle_closed"),
    ] {
        let setup = Setup::http(misbehave);
        assert_eq!(setup.get(&format!("/then/{what}")), format!("0 /then/{what}"));
        // Noticed by itself, not by the next client.
        eventually(SOON, "the socket was evicted", || {
            let service = setup.daemon.service().unwrap();
            service.origins[0].evicted.get(reason) == Some(&1)
        });
        assert_eq!(setup.serving(), 1, "{what}");
        assert_eq!(setup.daemon.totals().unwrap().retried, 0);
    }
}

#[test]
fn the_origins_own_timeout_is_learnt() {
    let setup = Setup::http(|peer| {
        while let Some(request) = peer.request()? {
            let body = format!("{} {}", peer.index(), request.target());
            peer.send(format!(
                "HTTP/1.1 200 OK\r\nKeep-Alive: timeout=1\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            ))?;
        }
        Ok(())
    });
    setup.get("/");
    let before = broker::clock::now();
    eventually(SOON, "the socket was given up", || {
        setup.daemon.service().unwrap().origins[0].evicted.get("idle_ttl") == Some(&1)
    });
    assert!(before.elapsed() <= Duration::from_millis(1050), "{:?}", before.elapsed());
}

#[test]
fn idle_sockets_have_a_time_to_live_and_warm_ones_are_replaced() {
    let setup = Service { pool: "prewarm = 1\nidle_ttl = \"200ms\"", ..Service::default() }
        .start(Peer::serve);
    setup.idle(1);
    eventually(SOON, "the warm socket was replaced twice", || setup.origin.accepted() >= 3);
    setup.serving();
}

#[test]
fn sockets_retire_by_number_of_requests_and_by_age() {
    let setup =
        Service { pool: "prewarm = 0\nmax_requests = 2", ..Service::default() }.start(Peer::serve);
    let served: Vec<_> = (0..6).map(|_| setup.serving()).collect();
    assert_eq!(served, [0, 0, 1, 1, 2, 2]);

    let setup = Service { pool: "prewarm = 0\nmax_lifetime = \"300ms\"", ..Service::default() }
        .start(Peer::serve);
    assert_eq!(setup.serving(), 0);
    eventually(SOON, "an old socket is not used again", || setup.serving() == 1);
}

#[test]
fn without_idle_sockets_there_is_no_reuse() {
    let setup =
        Service { pool: "prewarm = 0\nmax_idle = 0", ..Service::default() }.start(Peer::serve);
    let served: Vec<_> = (0..5).map(|_| setup.serving()).collect();
    assert_eq!(served, [0, 1, 2, 3, 4]);
}

/// An origin whose connections die, in a way of the test's choice, upon the second request on
/// each: from the broker's view a reused socket that fails before the first byte.
fn dies_on_reuse(how: &'static str) -> impl Fn(&mut Peer) -> std::io::Result<()> {
    move |peer| {
        let Some(request) = peer.request()? else { return Ok(()) };
        peer.respond(format!("{} {}", peer.index(), request.target()))?;
        if how == "before" {
            // Reset as the next request arrives, so that even its write may fail.
            thread::sleep(Duration::from_millis(1));
            return peer.reset();
        }
        if peer.request()?.is_some() && how == "reset" {
            return peer.reset();
        }
        Ok(())
    }
}

#[test]
fn a_get_on_a_dead_socket_is_repeated() {
    for how in ["close", "reset", "before"] {
        let setup = Service { pool: "prewarm = 0\nmax_idle = 1", ..Service::default() }
            .start(dies_on_reuse(how));
        for turn in 0..10 {
            assert!(setup.get("/probe").ends_with(" /probe"), "{how}, turn {turn}");
        }
    }
}

#[test]
fn a_post_on_a_dead_socket_fails_cleanly_and_runs_once() {
    let setup = Setup::http(dies_on_reuse("close"));
    for turn in 0..10 {
        setup.settled();
        setup.get("/warm");
        setup.settled();
        let marker = format!("/post-{turn}");
        let mut client = setup.client();
        client
            .send(format!("POST {marker} HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\nhi"))
            .unwrap();
        let response = client.response().unwrap();
        assert!(matches!(response.status, 200 | 502 | 503), "{}", response.head);
        assert_eq!(setup.origin.received_count(&marker), 1, "{}", response.head);
    }
}

#[test]
fn an_origin_timeout_shorter_than_ours_costs_no_request() {
    // Unannounced, so that it cannot be learnt, and short, so that requests keep meeting it.
    const TIMEOUT: Duration = Duration::from_millis(15);
    let executed = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&executed);
    let setup = Setup::http(move |peer| {
        // Clones of the stream share the time-out.
        peer.set_read_timeout(TIMEOUT)?;
        while let Some(request) = peer.request()? {
            if request.head.starts_with("POST") {
                count.fetch_add(1, Ordering::Relaxed);
            }
            peer.respond(format!("{} {}", peer.index(), request.target()))?;
        }
        Ok(())
    });
    let (mut succeeded, mut failed) = (0, 0);
    // Ten seconds by default; ask for more to look for what is rarer.
    let turns = std::env::var("IDLE_TIMEOUT_TRIES").map_or(600, |n| n.parse().unwrap());
    for turn in 0..turns {
        // Around the critical moment, from 13 to 17 ms.
        thread::sleep(Duration::from_micros(13_000 + turn * 619 % 4000));
        if turn % 2 == 0 {
            assert!(setup.get("/probe").ends_with(" /probe"));
            continue;
        }
        let mut client = setup.client();
        client.send("POST /p HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\nhi").unwrap();
        match client.response().unwrap().status {
            200 => succeeded += 1,
            _ => failed += 1,
        }
    }
    let posts = usize::try_from(turns / 2).unwrap();
    assert_eq!(succeeded + failed, posts);
    let executed = executed.load(Ordering::Relaxed);
    // A failed one may or may not have run; none ran twice.
    assert!((succeeded..=posts).contains(&executed), "{succeeded} succeeded, {executed} ran");
    eprintln!("{posts} POSTs: {succeeded} succeeded, {executed} ran");
}

#[test]
fn a_restart_of_the_origin_costs_one_redial_per_request() {
    let lab = Lab::new(1).unwrap();
    let address = lab.origin(0);
    let mut origin = Scripted::http(&lab.origins, address).unwrap();
    let service = Service { pool: "prewarm = 0\nmax_idle = 64", ..Service::default() };
    let daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
    let listen = crate::support::listen(&lab);
    let mut clients: Vec<_> =
        (0..20).map(|_| Client::connect(&lab.host, listen).unwrap()).collect();
    let mut round = |target: &str| {
        for client in &mut clients {
            client.send(format!("GET {target} HTTP/1.1\r\nHost: test\r\n\r\n")).unwrap();
        }
        for client in &mut clients {
            let response = client.response().unwrap();
            assert_eq!(response.status, 200, "{}", response.head);
            assert!(response.text().ends_with(target));
        }
    };
    round("/before");
    drop(origin);
    origin = Scripted::http(&lab.origins, address).unwrap();
    round("/after");
    assert!(origin.accepted() <= 20, "{} dials for 20 requests", origin.accepted());
    let totals = daemon.totals().unwrap();
    assert!(totals.created <= 40, "{totals:?}");
}
