//! Bytes on an origin's socket that are of nobody's exchange, or of somebody else's.

use std::io;
use std::thread;
use std::time::Duration;

use harness::detour::Detour;
use harness::origin::scripted::{Peer, Scripted};
use harness::{Client, Daemon, Lab, eventually};

use crate::support::{SOON, Setup, addresses, way_in};

/// Has an idle socket answer `junk`, in pieces, to requests that new clients send.
#[track_caller]
fn check_stale_socket(junk: &'static [&'static str]) {
    for (request, status) in [
        ("GET /mine HTTP/1.1\r\nHost: test\r\n\r\n", 200),
        ("POST /mine HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\nhi", 502),
        ("GET /mine HTTP/1.1\r\nHost: test\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", 200),
        // What cannot be read with certainty passes unread, but not before that.
        ("GET /mine HTTP/1.1\r\nHost: test\r\nX: a\r\n folded\r\n\r\n", 502),
        (
            "POST /mine HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\n\
             Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            502,
        ),
    ] {
        let setup = Setup::http(move |peer| {
            while let Some(request) = peer.request()? {
                if peer.index() > 0 || request.target() == "/probe" {
                    peer.respond(format!("{} {}", peer.index(), request.target()))?;
                    continue;
                }
                for piece in junk {
                    peer.send(piece)?;
                    // Each in a segment of its own.
                    thread::sleep(Duration::from_millis(20));
                }
                return peer.wait_closed();
            }
            Ok(())
        });
        assert_eq!(setup.serving(), 0);
        setup.idle(1);
        let mut client = setup.client();
        client.send(request).unwrap();
        let response = client.response().unwrap_or_else(|e| panic!("after {junk:?}: {e:#}"));
        assert_eq!(response.status, status, "after {junk:?}: {}", response.head);
        assert!(!response.text().contains(&junk.concat()), "{}", response.text());
        let totals = setup.settled();
        // Whatever may have been executed is not repeated.
        assert_eq!(totals.retried, u64::from(status == 200));
        assert_eq!(setup.origin.received_count("/mine"), if status == 200 { 2 } else { 1 });
    }
}

#[test]
fn what_is_no_response_on_a_reused_socket_reaches_nobody() {
    check_stale_socket(&["somebody else's secret"]);
    check_stale_socket(&["H", "ow to reach somebody else"]);
    check_stale_socket(&["okHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]);
    check_stale_socket(&["HTTP", " is somebody else's secret"]);
    check_stale_socket(&["\0\0\0\0\0\0\0\0"]);
}

/// Has an origin say `stray` on an idle socket, with the request of the next client on its way there.
/// Answers what that client gets, from the same origin by another connection if at all.
#[track_caller]
fn crossing(
    way: &str,
    keys: &str,
    script: fn(&mut Peer) -> io::Result<()>,
    ask: &Ask<'_>,
) -> String {
    let lab = Lab::new(1).unwrap();
    let detour = Detour::new(&lab, 0).unwrap();
    let origin = Scripted::start(&lab.origins, lab.origin(0), script).unwrap();
    let (target, clients) = way_in(&lab, way);
    let config = format!(
        "workers = 1\n[[service]]\nname = \"web\"\n{clients}\norigins = {}\n{keys}\n\
         [service.pool]\nprewarm = 1\n",
        addresses(&lab.all_origins())
    );
    let daemon = Daemon::start(&lab, &config).unwrap();
    let idle = || daemon.totals().is_ok_and(|totals| totals.active == 0 && totals.idle == 1);
    eventually(SOON, "there is a warm socket", idle);
    let mut first = Client::connect(&lab.host, target).unwrap();
    first.send(ask.first).unwrap();
    first.take(ask.answer_len).unwrap();
    drop(first);
    eventually(SOON, "its socket has come back", idle);
    assert_eq!(origin.accepted(), 1, "{way}");

    detour.lose_every(1);
    let mut client = Client::connect(&lab.host, target).unwrap();
    client.send(ask.second).unwrap();
    let asked = || daemon.totals().is_ok_and(|totals| totals.active == 1);
    eventually(SOON, "its request is on its way", asked);
    origin.connection(0).send(ask.stray).unwrap();
    eventually(SOON, "the socket is given up", || daemon.totals().is_ok_and(|t| t.evicted == 1));
    detour.lose_every(0);
    let got = client.to_end().unwrap_or_else(|e| format!("{e:#}").into_bytes());
    assert_eq!(daemon.totals().unwrap().active, 0, "{way}");
    String::from_utf8_lossy(&got).into_owned()
}

/// What two clients of [`crossing`] send, and its origin.
struct Ask<'a> {
    first: &'a str,
    answer_len: usize,
    second: &'a str,
    stray: &'a str,
}

#[test]
fn a_response_that_crosses_its_request_is_somebody_elses() {
    const STRAY: &str = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret";
    const FIRST: &str = "GET /first HTTP/1.1\r\nHost: test\r\n\r\n";
    let answer_len = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n0 /first".len();
    for way in ["relay", "kernel"] {
        for (second, expected) in [
            // It may run twice, and does: the origin gets what was lost, too.
            ("GET /mine HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n", "1 /mine"),
            ("GET /mine HTTP/1.1\r\nHost: test\r\n\r\n", "1 /mine"),
            ("POST /mine HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\nhi", " 502 "),
            // Longer than what is at hand of it.
            ("PUT /mine HTTP/1.1\r\nHost: test\r\nContent-Length: 9\r\n\r\nhi", " 502 "),
            // It passes unread.
            ("GET /mine HTTP/1.1\r\nHost: test\r\nX: a\r\n folded\r\n\r\n", " 502 "),
        ] {
            let ask = Ask { first: FIRST, answer_len, second, stray: STRAY };
            let keys = "protocol = \"http1\"\n[service.timeouts]\nclient_idle = \"1s\"";
            let got = crossing(way, keys, Peer::serve, &ask);
            assert!(
                !got.contains("secret") && got.contains(expected),
                "{way}, {second:?}: {got:?}"
            );
        }
    }
}

/// The origin ends its idle sockets one after the other, each when a request has just been sent there.
#[test]
fn idle_sockets_that_end_as_they_are_used_cost_no_attempt() {
    const SOCKETS: usize = 6;
    for way in ["relay", "kernel"] {
        let lab = Lab::new(1).unwrap();
        let detour = Detour::new(&lab, 0).unwrap();
        let origin = Scripted::http(&lab.origins, lab.origin(0)).unwrap();
        let (target, clients) = way_in(&lab, way);
        let config = format!(
            "workers = 1\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\n{clients}\norigins = {}\n\
             [service.pool]\nprewarm = {SOCKETS}\n",
            addresses(&lab.all_origins())
        );
        let daemon = Daemon::start(&lab, &config).unwrap();
        let totals = || daemon.totals().unwrap();
        // Each has served: a new one has no past.
        let mut warm: Vec<_> =
            (0..SOCKETS).map(|_| Client::connect(&lab.host, target).unwrap()).collect();
        detour.delay(Duration::from_millis(50));
        for client in &mut warm {
            client.send("GET /warm HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        }
        for client in &mut warm {
            client.response().unwrap();
        }
        eventually(SOON, "they are idle", || totals().active == 0 && totals().idle >= 4);
        detour.delay(Duration::ZERO);
        detour.lose_every(1);
        let mut client = Client::connect(&lab.host, target).unwrap();
        client.send("GET /mine HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        eventually(SOON, "its request is on its way", || totals().active == 1);
        for used in 0..origin.accepted() {
            let connection =
                origin.connection(if way == "relay" { origin.accepted() - 1 - used } else { used });
            let before = totals().evicted;
            connection.end().unwrap();
            eventually(SOON, "it is noticed", || totals().evicted > before);
        }
        detour.lose_every(0);
        let response = client.response().unwrap();
        assert!(
            response.status == 200 && response.text().ends_with(" /mine"),
            "{way}: {response:?}"
        );
        // More often than a request is tried otherwise; the daemon's next socket is any of them.
        let least = if way == "kernel" { 4 } else { 1 };
        assert!(totals().retried >= least, "{way}: {:?}", totals());
    }
}

#[test]
fn what_crosses_an_opaque_request_is_somebody_elses() {
    let keys = "protocol = \"opaque\"\nreuse = \"quiet\"\nsettle_time = \"20ms\"";
    let ask = Ask { first: "first\n", answer_len: 6, second: "second\n", stray: "secret" };
    let got = crossing("relay", keys, Peer::echo, &ask);
    assert!(got.contains("reset"), "{got:?}");
}
