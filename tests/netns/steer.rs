//! What the kernel carries by itself, and what it must leave to the daemon.

use std::net::SocketAddr;
use std::time::Duration;

use harness::load::{self, Mode, Plan};
use harness::origin::nginx;
use harness::origin::scripted::{Peer, Scripted};
use harness::{Client, Daemon, Lab, eventually, within};
use socket2::SockRef;

use crate::support::{SOON, addresses};

/// A daemon that intercepts connections to the lab's origins.
fn daemon(lab: &Lab, steer: &str) -> Daemon {
    let config = format!(
        "workers = 1\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nsteer = {steer:?}\n\
         intercept = [\"origins\"]\norigins = {}\n[service.pool]\nprewarm = 8\n",
        addresses(&lab.all_origins())
    );
    Daemon::start(lab, &config).unwrap()
}

fn enrolled(daemon: &Daemon) -> u64 {
    let events = daemon.snapshot().unwrap().datapath.steering_events;
    events.get("clients_enrolled").copied().unwrap_or(0)
}

/// Runs nonblocking clients; all must get their own responses.
#[track_caller]
fn load(lab: &Lab, mode: Mode, requests: u64) {
    let plan = Plan { mode, ..Plan::echo(lab.all_origins(), 8, requests) };
    let report = load::run(lab, &plan).unwrap();
    assert_eq!((report.requests, report.error_count(), report.crosstalk), (requests, 0, 0));
}

/// An origin that takes so long for each response.
fn slow_origin(lab: &Lab, takes: Duration) -> Scripted {
    let script = move |peer: &mut Peer| {
        while let Some(request) = peer.request()? {
            std::thread::sleep(takes);
            peer.answer_with_id(&request, "200 OK")?;
        }
        Ok(())
    };
    Scripted::start(&lab.origins, lab.origin(0), script).unwrap()
}

#[test]
fn plain_requests_of_nonblocking_clients_are_steered() {
    for steer in ["auto", "kernel"] {
        let lab = Lab::new(1).unwrap();
        let _origin = nginx::origin(&lab, 0).unwrap();
        let daemon = daemon(&lab, steer);
        load(&lab, Mode::KeepAlive, 2000);
        load(&lab, Mode::OneShotClientCloses, 2000);
        let service = daemon.service().unwrap();
        assert_eq!(service.exchanges, 4000);
        assert!(service.steered >= 3000, "{steer}: {} {:?}", service.steered, service.not_steered);
        let origin = &service.origins[0];
        assert_eq!(origin.steered.status["2xx"], service.steered);
        assert!(origin.created <= 16, "{}", origin.created);
    }
}

#[test]
fn a_steady_load_gets_as_many_sockets_as_it_uses_at_once() {
    let lab = Lab::new(1).unwrap();
    // Quick enough for a request that waits in the daemon to be served before it is dialled for.
    let _origin = slow_origin(&lab, Duration::from_millis(1));
    let config = format!(
        "workers = 1\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nsteer = \"kernel\"\n\
         intercept = [\"origins\"]\norigins = {}\n",
        addresses(&lab.all_origins())
    );
    let daemon = Daemon::start(&lab, &config).unwrap();
    let missed = || daemon.service().unwrap().not_steered.get("no_idle").copied().unwrap_or(0);
    let mut before = missed();
    harness::eventually(SOON, "nearly all are steered", || {
        load(&lab, Mode::KeepAlive, 1000);
        let now = missed();
        now - std::mem::replace(&mut before, now) < 10
    });
    let origin = &daemon.service().unwrap().origins[0];
    assert!((8..=20).contains(&origin.created), "{}", origin.created);
}

#[test]
fn blocking_clients_are_relayed_unless_all_are_to_be_steered() {
    // This client connects with a time limit, that is without blocking, and blocks from then on, as
    // PHP's do: it is enrolled, and let go when it sends.
    for (steer, steered, enrols) in [("auto", 0, 1), ("kernel", 20, 1), ("relay", 0, 0)] {
        let lab = Lab::new(1).unwrap();
        let _origin = Scripted::start(&lab.origins, lab.origin(0), Peer::serve).unwrap();
        let daemon = daemon(&lab, steer);
        let mut client = Client::connect(&lab.host, lab.origin(0)).unwrap();
        for _ in 0..20 {
            client.get("/").unwrap();
        }
        let service = daemon.service().unwrap();
        assert_eq!((service.exchanges, service.steered), (20, steered), "{steer}");
        assert_eq!(enrolled(&daemon), enrols, "{steer}");
        assert_eq!(service.not_steered.get("blocking").copied(), (steer == "auto").then_some(1));
    }
}

#[test]
fn a_service_whose_clients_say_close_is_only_sampled() {
    let lab = Lab::new(1).unwrap();
    let _origin = nginx::origin(&lab, 0).unwrap();
    let daemon = daemon(&lab, "auto");
    load(&lab, Mode::OneShot, 2000);
    let sampled = enrolled(&daemon);
    assert!((64..600).contains(&sampled), "{sampled}");
    // The others were relayed from the start: the kernel never saw what they sent.
    assert_eq!(daemon.service().unwrap().not_steered["close"], sampled);
}

#[test]
fn nobody_else_is_ever_in_a_map() {
    let lab = Lab::new(2).unwrap();
    let _origins = [0, 1].map(|i| nginx::origin(&lab, i).unwrap());
    let config = format!(
        "[[service]]\nname = \"web\"\nprotocol = \"http1\"\nsteer = \"kernel\"\n\
         intercept = [\"origins\"]\norigins = [\"{}\"]\n",
        lab.origin(0)
    );
    let daemon = Daemon::start(&lab, &config).unwrap();
    let plan = Plan::echo(vec![lab.origin(1)], 4, 200);
    assert_eq!(load::run(&lab, &plan).unwrap().requests, 200);
    assert_eq!(enrolled(&daemon), 0);
}

#[test]
fn when_the_daemon_is_killed_a_steered_client_gets_an_error_and_does_not_hang() {
    let lab = Lab::new(1).unwrap();
    let origin = Scripted::start(&lab.origins, lab.origin(0), |peer: &mut Peer| {
        if peer.head()?.is_none() {
            return Ok(());
        }
        peer.wait_closed()
    })
    .unwrap();
    let mut daemon = daemon(&lab, "kernel");
    let mut client = Client::connect(&lab.host, lab.origin(0)).unwrap();
    client.send("GET /pending HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    harness::eventually(SOON, "the request is there", || origin.received_count("/pending") == 1);
    daemon.process().kill().unwrap();
    assert!(client.is_closed_within(SOON).unwrap());
}

#[test]
fn an_origin_that_dies_in_mid_response_ends_its_client_and_no_other() {
    let lab = Lab::new(1).unwrap();
    let _origin = Scripted::start(&lab.origins, lab.origin(0), |peer: &mut Peer| {
        let Some(head) = peer.head()? else { return Ok(()) };
        if head.contains("/cut") {
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")?;
            return Ok(());
        }
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole")
    })
    .unwrap();
    let daemon = daemon(&lab, "kernel");
    let mut other = Client::connect(&lab.host, lab.origin(0)).unwrap();
    let mut cut = Client::connect(&lab.host, lab.origin(0)).unwrap();
    cut.send("GET /cut HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    assert!(cut.response().is_err(), "half a response is no response");
    assert_eq!(other.get("/").unwrap().text(), "whole");
    assert_eq!(daemon.service().unwrap().origin_failed, 1);
}

#[test]
fn what_is_left_of_an_exchange_of_the_daemon_reaches_no_steered_client() {
    let lab = Lab::new(1).unwrap();
    let origin = Scripted::start(&lab.origins, lab.origin(0), |peer: &mut Peer| {
        let mut before = None;
        while let Some(request) = peer.request()? {
            // Comes while the next request is on its way already.
            if let Some(before) = before.replace(request.target().to_owned()) {
                peer.send(format!("LEFT OF {before}\r\n"))?;
            }
            peer.respond(request.target())?;
        }
        Ok(())
    })
    .unwrap();
    let config = format!(
        "workers = 1\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nsteer = \"kernel\"\n\
         intercept = [\"origins\"]\norigins = {}\n[service.pool]\nprewarm = 1\n",
        addresses(&lab.all_origins())
    );
    let daemon = Daemon::start(&lab, &config).unwrap();
    let mut relayed = Client::connect(&lab.host, lab.origin(0)).unwrap();
    relayed.send("GET /relayed HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
    assert_eq!(relayed.response().unwrap().text(), "/relayed");
    let mut steered = Client::connect(&lab.host, lab.origin(0)).unwrap();
    assert_eq!(steered.get("/steered").unwrap().text(), "/steered");
    // It was sent behind the first one, on the socket that both the kernel and the daemon had had.
    assert_eq!(origin.connection(0).received_text().matches("GET ").count(), 2);
    let service = daemon.service().unwrap();
    assert_eq!((service.retries, service.not_steered["odd"]), (1, 1));
}

/// Sends all of a message with its last byte as urgent data.
fn send_urgent(client: &Client, message: &str) {
    let socket = SockRef::from(client.stream());
    assert_eq!(socket.send_out_of_band(message.as_bytes()).unwrap(), message.len());
}

#[test]
fn what_an_origin_never_reads_of_a_request_is_not_taken_from_the_next() {
    for (what, head) in [("plain", "Content-Length: 7"), ("chunked", "Transfer-Encoding: chunked")]
    {
        let lab = Lab::new(1).unwrap();
        let chunked = what == "chunked";
        // Answers as soon as it has the head, as many do.
        let origin = Scripted::start(&lab.origins, lab.origin(0), move |peer: &mut Peer| {
            while let Some(request) = peer.head()? {
                let body = if chunked { "7\r\nanswer\n\r\n0\r\n\r\n" } else { "answer\n" };
                peer.send(format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n{body}"))?;
                if request.starts_with("POST") {
                    peer.take(5)?;
                }
            }
            Ok(())
        })
        .unwrap();
        let daemon = daemon(&lab, "kernel");
        for n in 0..10 {
            let mut hostile = Client::connect(&lab.host, lab.origin(0)).unwrap();
            send_urgent(
                &hostile,
                "POST /hostile HTTP/1.1\r\nHost: test\r\nContent-Length: 5\r\n\r\nABCDE",
            );
            assert_eq!(hostile.response().unwrap().text(), "answer\n", "{what}");
            let mut next = Client::connect(&lab.host, lab.origin(0)).unwrap();
            assert_eq!(next.get(&format!("/next{n}")).unwrap().text(), "answer\n", "{what}");
        }
        assert_eq!(origin.received_count("\r\n\r\nABCDG"), 0, "{what}");
        assert_eq!(origin.received_count("GET /next"), 10, "{what}");
        let service = daemon.service().unwrap();
        assert_eq!(service.origins[0].evicted.get("incomplete_request"), Some(&10), "{what}");
        // None of this was for want of trying.
        let taken_over = service.not_steered.get("chunked").copied().unwrap_or(0);
        assert!(service.steered >= 10 || taken_over >= 10, "{what}: {service:?}");
    }
}

#[test]
fn an_origin_that_waits_for_the_rest_of_an_urgent_request_is_not_waited_for() {
    let lab = Lab::new(1).unwrap();
    // Reads requests to their end.
    let _origin = Scripted::http(&lab.origins, lab.origin(0)).unwrap();
    let daemon = daemon(&lab, "kernel");
    for _ in 0..10 {
        let hostile = Client::connect(&lab.host, lab.origin(0)).unwrap();
        send_urgent(&hostile, "GET /hostile HTTP/1.1\r\nHost: test\r\n\r\n");
    }
    // Some have left, one waits.
    let mut hostile = Client::connect(&lab.host, lab.origin(0)).unwrap();
    send_urgent(&hostile, "GET /hostile HTTP/1.1\r\nHost: test\r\n\r\n");
    hostile.response().expect_err("half a request is answered");
    let active = || daemon.service().unwrap().origins[0].active;
    eventually(SOON, "their sockets are given up", || active() == 0);
    assert!(daemon.service().unwrap().steered == 0, "half a request was answered");
    let mut next = Client::connect(&lab.host, lab.origin(0)).unwrap();
    assert_eq!(next.get("/next").unwrap().status, 200);
}

#[test]
fn urgent_data_of_an_origin_is_no_part_of_a_response() {
    let lab = Lab::new(1).unwrap();
    let _origin = Scripted::start(&lab.origins, lab.origin(0), |peer: &mut Peer| {
        if peer.request()?.is_some() {
            peer.send("HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nbody")?;
            let socket = peer.stream()?;
            std::thread::sleep(Duration::from_millis(50));
            SockRef::from(&socket).send_out_of_band(b"!")?;
            std::thread::sleep(Duration::from_millis(50));
            peer.send("more")?;
            peer.wait_closed()?;
        }
        Ok(())
    })
    .unwrap();
    let daemon = daemon(&lab, "kernel");
    let mut client = Client::connect(&lab.host, lab.origin(0)).unwrap();
    client.get("/").expect_err("a response that cannot be told from urgent data");
    let origin = &daemon.service().unwrap().origins[0];
    assert_eq!(origin.evicted.get("truncated"), Some(&1), "{:?}", origin.evicted);
}

#[test]
fn a_socket_that_connects_anew_gets_nothing_of_the_connection_before() {
    let lab = Lab::new(2).unwrap();
    let origin = |index| {
        let answer = move |peer: &mut Peer| {
            while let Some(request) = peer.request()? {
                let body = format!("{index}{}", request.target());
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
                let (now, later) = body.split_at(3);
                peer.send(head + now)?;
                if request.target() == "/late" {
                    std::thread::sleep(Duration::from_millis(300));
                }
                peer.send(later)?;
            }
            Ok(())
        };
        Scripted::start(&lab.origins, lab.origin(index), answer).unwrap()
    };
    let _origins = [origin(0), origin(1)];
    let elsewhere = SocketAddr::new(lab.origin_ip(1), 81);
    let _elsewhere = Scripted::http(&lab.origins, elsewhere).unwrap();
    let config = format!(
        "workers = 1\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nsteer = \"kernel\"\n\
         intercept = [\"origins\"]\norigins = [\"{}\"]\n[service.pool]\nprewarm = 4\n\
         [[service]]\nname = \"other\"\nprotocol = \"http1\"\nsteer = \"kernel\"\n\
         intercept = [\"origins\"]\norigins = [\"{}\"]\n[service.pool]\nprewarm = 4\n",
        lab.origin(0),
        lab.origin(1)
    );
    let daemon = Daemon::start(&lab, &config).unwrap();
    for target in ["/whole", "/late"] {
        for (second, expected) in
            [(lab.origin(0), "0/second"), (lab.origin(1), "1/second"), (elsewhere, " /second")]
        {
            let mut client = Client::connect(&lab.host, lab.origin(0)).unwrap();
            let before = daemon.service().unwrap().steered;
            client.send(format!("GET {target} HTTP/1.1\r\nHost: test\r\n\r\n")).unwrap();
            // All of the response, or its first part, lies unread in the kernel.
            let came = || target == "/late" || daemon.service().unwrap().steered > before;
            eventually(SOON, "it was steered", came);
            client.stream().peek(&mut [0]).unwrap();
            client.reconnect(&lab.host, second).unwrap();
            let response = client.get("/second").unwrap();
            assert!(response.text().ends_with(expected), "{target}, {second}: {response:?}");
            assert!(
                client.is_silent_for(Duration::from_millis(500)).unwrap(),
                "{target}, {second}"
            );
        }
    }
}

#[test]
fn the_kernel_holds_little_for_a_client_that_does_not_read() {
    const REQUESTS: usize = 60;
    let lab = Lab::new(1).unwrap();
    let body = numbered(40_000);
    let sent = body.clone();
    let origin = Scripted::start(&lab.origins, lab.origin(0), move |peer: &mut Peer| {
        while peer.request()?.is_some() {
            peer.respond(&sent)?;
        }
        Ok(())
    })
    .unwrap();
    let daemon = daemon(&lab, "kernel");
    let mut client = Client::connect(&lab.host, lab.origin(0)).unwrap();
    for n in 1..=REQUESTS {
        client.send("GET /many HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        // As if it had read the response: the next request is not sent before it.
        let answered = || daemon.service().unwrap().exchanges >= n as u64;
        if !within(Duration::from_secs(1), answered) {
            break;
        }
    }
    let service = daemon.service().unwrap();
    assert!(service.not_steered["unread"] >= 1, "{:?}", service.not_steered);
    assert!(service.steered <= 20, "{} responses lie in the kernel", service.steered);
    let asked = origin.received_count("GET /many");
    assert!(asked < REQUESTS, "the origin has sent it all");
    for _ in 0..asked {
        assert_eq!(client.response().unwrap().text(), body);
    }
    assert_eq!(client.get("/after").unwrap().text(), body);
}

/// A body in which every place is different.
fn numbered(len: usize) -> String {
    (0..len / 8).flat_map(|n| format!("{n:08}").into_bytes()).map(char::from).collect()
}

/// An origin whose TCP sends the last bytes of the first half of each response again, with the
/// second half behind them, as it does when it was not acknowledged in time.
fn repeating(lab: &Lab) -> Scripted {
    const AGAIN_MAX: u16 = 1000;
    let netns = lab.origins.clone();
    let script = move |peer: &mut Peer| {
        while let Some(request) = peer.request()? {
            let body = numbered(request.target()[1..].parse().map_err(std::io::Error::other)?);
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
            let response = head + &body;
            let half = response.len() / 2;
            peer.send(&response[..half])?;
            let again = u16::try_from(half).map_or(AGAIN_MAX, |half| half.min(AGAIN_MAX));
            peer.rewind(&netns, again)?;
            peer.send(&response[half - usize::from(again)..])?;
        }
        Ok(())
    };
    Scripted::start(&lab.origins, lab.origin(0), script).unwrap()
}

#[test]
fn bytes_that_an_origin_sends_twice_reach_the_client_once() {
    for steer in ["kernel", "relay"] {
        let lab = Lab::new(1).unwrap();
        let _origin = repeating(&lab);
        let daemon = daemon(&lab, steer);
        // Of the first the head comes in two pieces, and the last two are more than the kernel
        // carries.
        for len in [16, 800, 24_000, 60_000, 160_000, 280_000] {
            let mut client = Client::connect(&lab.host, lab.origin(0)).unwrap();
            let response = client.get(&format!("/{len}")).unwrap();
            assert!(response.text() == numbered(len), "{steer}: {len} bytes are not as sent");
        }
        let snapshot = daemon.snapshot().unwrap();
        let (service, events) = (daemon.service().unwrap(), snapshot.datapath.steering_events);
        let repeated = events.get("repeated_segments").copied().unwrap_or(0);
        assert_eq!(events.get("segments_out_of_step"), None);
        match steer {
            "kernel" => assert_eq!((service.steered, repeated), (3, 6)),
            _ => assert_eq!((service.steered, repeated), (0, 0)),
        }
    }
}

/// Requests that reach TCP before any program can see them (Fast Open), or that TCP keeps because more was
/// announced; the next ones follow before they are answered, or the end of the client's side does.
const UNUSUAL_SENDS: &str = r#"
import re, select, socket, sys, time
MSG_FASTOPEN, TCP_FASTOPEN_NO_COOKIE = 0x20000000, 34
address = (sys.argv[1], int(sys.argv[2]))
def get(path):
    return b"GET " + path + b" HTTP/1.1\r\nHost: test\r\n\r\n"
def read(s, n):
    s.settimeout(8)
    got, paths = b"", []
    while len(paths) < n:
        piece = s.recv(10000)
        assert piece, (got, "ended")
        got += piece
        paths = re.findall(rb"\d (/\w\d)", got)
    return paths
def fast_open(gap, no_cookie):
    s = socket.socket()
    s.setblocking(not no_cookie)
    if no_cookie:
        s.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN_NO_COOKIE, 1)
    s.sendto(get(b"/f1"), MSG_FASTOPEN, address)
    s.setblocking(False)
    select.select([], [s], [], 8)
    time.sleep(gap)
    s.send(get(b"/f2"))
    return read(s, 2)
def connected():
    s = socket.socket()
    s.setblocking(False)
    s.connect_ex(address)
    select.select([], [s], [], 8)
    return s
def more(gap):
    s = connected()
    s.send(get(b"/m0"))
    assert read(s, 1) == [b"/m0"]
    s.send(get(b"/m1"), socket.MSG_MORE)
    time.sleep(gap)
    s.send(get(b"/m2"))
    return read(s, 2)
def more_then_end(gap):
    s = connected()
    s.send(get(b"/e1"), socket.MSG_MORE)
    time.sleep(gap)
    s.shutdown(socket.SHUT_WR)
    return read(s, 1)
for gap in (0, 0.001, 0.01, 0.03, 0.1):
    for no_cookie in (True, False):
        assert fast_open(gap, no_cookie) == [b"/f1", b"/f2"], ("fast open", gap, no_cookie)
    assert more(gap) == [b"/m1", b"/m2"], ("more", gap)
    assert more_then_end(gap) == [b"/e1"], ("more, then the end", gap)
print("in order")
"#;

#[test]
fn responses_stay_in_order_whatever_way_their_requests_go() {
    for steer in ["auto", "kernel", "relay"] {
        let lab = Lab::new(1).unwrap();
        let _origin = Scripted::http(&lab.origins, lab.origin(0)).unwrap();
        let daemon = daemon(&lab, steer);
        let (ip, port) = (lab.origin(0).ip().to_string(), lab.origin(0).port().to_string());
        let client = lab.client("python3").args(["-c", UNUSUAL_SENDS, &ip, &port]);
        let said = client.output(Duration::from_mins(1)).unwrap().success();
        let said = said.unwrap_or_else(|e| panic!("{steer}: {e:#}"));
        assert_eq!(said.trim(), "in order", "{steer}");
        let service = daemon.service().unwrap();
        assert_eq!(service.exchanges, 5 * (2 * 2 + 3 + 1), "{steer}");
    }
}

/// What a socket in the kernel's map would answer differently: `recv()` interrupted by a signal every
/// millisecond, `MSG_WAITALL`, `splice()`, and the rest after half-closing.
const BLOCKING: &str = r#"
import os, signal, socket, sys
def ask(path):
    s = socket.socket()
    s.connect((sys.argv[1], int(sys.argv[2])))
    s.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: test\r\n\r\n")
    return s
def head(s):
    got = b""
    while not got.endswith(b"\r\n\r\n"):
        got += s.recv(1)
    return int(got.lower().split(b"content-length:")[1].split()[0])
for path, size in ((b"/128", 128), (b"/64k", 65536)):
    s = ask(path)
    assert head(s) == size
    assert len(s.recv(size, socket.MSG_WAITALL)) == size
    s = ask(path)
    assert head(s) == size
    r, w = os.pipe()
    left = size
    while left:
        n = os.splice(s.fileno(), w, left)
        assert n > 0
        left -= len(os.read(r, n))
    s = ask(path)
    s.shutdown(socket.SHUT_WR)
    assert head(s) == size
    got = b""
    while piece := s.recv(10000):
        got += piece
    assert len(got) == size
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for _ in range(200):
    s = ask(b"/64k")
    left = head(s)
    while left:
        piece = s.recv(3000)
        assert piece
        left -= len(piece)
signal.setitimer(signal.ITIMER_REAL, 0)
print("as ever")
"#;

#[test]
fn blocking_clients_notice_nothing_under_auto() {
    let lab = Lab::new(1).unwrap();
    let _origin = nginx::origin(&lab, 0).unwrap();
    let daemon = daemon(&lab, "auto");
    let (ip, port) = (lab.origin(0).ip().to_string(), lab.origin(0).port().to_string());
    let client = lab.client("python3").args(["-c", BLOCKING, &ip, &port]);
    let said = client.output(Duration::from_mins(1)).unwrap().success().unwrap();
    assert_eq!(said.trim(), "as ever");
    let service = daemon.service().unwrap();
    assert_eq!((service.exchanges, service.steered, enrolled(&daemon)), (206, 0, 0));
}

/// The daemon must not close a connection on which there is something to be read: that resets it, and can
/// take the end of the response along.
#[test]
fn what_comes_behind_the_last_request_does_not_reset_a_steered_client() {
    let lab = Lab::new(1).unwrap();
    let origin = slow_origin(&lab, Duration::from_millis(500));
    let daemon = daemon(&lab, "kernel");
    let mut client = Client::connect(&lab.host, lab.origin(0)).unwrap();
    client.send("GET /last HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
    eventually(SOON, "the request is at the origin", || origin.received_count("GET /last") == 1);
    client.send("GET /more HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    assert_eq!(client.response().unwrap().status, 200);
    assert_eq!(client.to_end().unwrap(), b"", "{}", daemon.log());
    assert_eq!(enrolled(&daemon), 1);
}
