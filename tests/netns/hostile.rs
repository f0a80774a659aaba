//! Clients, origins and operators that do what nobody should, at the worst moment.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use harness::client::PATIENCE;
use harness::origin::scripted::{Peer, Scripted};
use harness::{Client, Daemon, Lab, eventually};
use nix::libc::O_NONBLOCK;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::support::{SOON, Service, Setup, listen};

const SHORT_QUEUE: &str = "prewarm = 0\nqueue_timeout = \"2s\"";
const ONE_SOCKET: &str = "max_connections = 1";
const SHORT_STALL: &str = "client_stall = \"300ms\"";
const UPGRADE: &str =
    "GET /tunnel HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n";
const SWITCHING: &str =
    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n";

/// What the test tells a script, once: the script waits for it.
struct Cue(Mutex<mpsc::Receiver<()>>);

impl Cue {
    fn new() -> (mpsc::Sender<()>, Self) {
        let (give, wait) = mpsc::channel();
        (give, Self(Mutex::new(wait)))
    }

    /// Until it is given, or the test is over.
    fn wait(&self) {
        self.0.lock().unwrap().recv_timeout(PATIENCE * 2).ok();
    }
}

/// Bytes that tell their own position.
fn numbered(from: usize, length: usize) -> Vec<u8> {
    (from..from + length).map(|i| (i / 8).to_le_bytes()[i % 8]).collect()
}

/// Sends numbered bytes until nobody takes any more, and tells how many.
fn fill(client: &Client) -> usize {
    client.stream().set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut sent = 0;
    loop {
        match client.stream().write(&numbered(sent, 64 << 10)) {
            Ok(n) => sent += n,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
            Err(e) => panic!("after {sent} bytes: {e}"),
        }
        assert!(sent < 256 << 20, "the windows never fill");
    }
    client.stream().set_write_timeout(Some(PATIENCE)).unwrap();
    sent
}

/// Expects the connection to end by a reset, after whatever is left to read.
#[track_caller]
fn assert_reset(client: &mut Client) {
    let end = client.to_end().expect_err("an end in good order");
    let kind = end.downcast_ref::<io::Error>().map(io::Error::kind);
    assert_eq!(kind, Some(ErrorKind::ConnectionReset), "{end:#}");
}

#[test]
fn late_bytes_of_a_client_do_not_cost_it_its_response() {
    let post = "POST /late HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: 2\r\n\r\n\
                hi";
    for (late, length) in [("\r\n", 10), ("\r\njunk", 10), (post, 10), (post, 300_000)] {
        let (go, cue) = Cue::new();
        let setup = Setup::http(move |peer| {
            while peer.request()?.is_some() {
                cue.wait();
                peer.respond("x".repeat(length))?;
            }
            Ok(())
        });
        let mut client = setup.client();
        client.send(post).unwrap();
        eventually(SOON, "the request is at the origin", || {
            setup.origin.received_count("POST") == 1
        });
        client.send(late).unwrap();
        go.send(()).unwrap();
        let response = client.response().unwrap();
        assert_eq!(response.body.len(), length, "after {late:?}");
        let rest = client.to_end().expect("an end in good order");
        assert!(rest.is_empty(), "{:?} after {late:?}", String::from_utf8_lossy(&rest));
        assert_eq!(setup.origin.received_count("POST"), 1, "the client had asked for the end");
    }
}

/// Sends a request with a body that the origin takes for the next request, and expects the socket
/// to be closed.
#[track_caller]
fn check_unread_body(headers: &str, response: &'static str) {
    const HIDDEN: &str = "GET /hidden HTTP/1.1\r\nHost: test\r\n\r\n";
    let setup = Setup::http(move |peer| {
        let mut is_poisoned = false;
        while let Some(head) = peer.head()? {
            if head.contains("/case") {
                peer.send(response)?;
                // Read as a request whose answer is ready when the next one comes.
                peer.take(HIDDEN.len())?;
                is_poisoned = true;
            } else if is_poisoned {
                peer.respond("the answer to /hidden")?;
            } else {
                peer.respond(format!("{} /probe", peer.index()))?;
            }
        }
        Ok(())
    });
    let mut client = setup.client();
    client
        .send(format!("{headers}Host: test\r\nContent-Length: {}\r\n\r\n{HIDDEN}", HIDDEN.len()))
        .unwrap();
    client.response().unwrap();
    drop(client);
    setup.settled();
    assert_eq!(setup.serving(), 1, "after {headers:?}");
}

#[test]
fn a_body_sent_against_a_refused_expectation_is_not_the_next_request() {
    for response in [
        "HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\nno",
    ] {
        check_unread_body("POST /case HTTP/1.1\r\nExpect: 100-continue\r\n", response);
    }
}

#[test]
fn a_body_that_an_origin_may_ignore_is_not_the_next_request() {
    for method in ["GET", "DELETE"] {
        check_unread_body(
            &format!("{method} /case HTTP/1.1\r\n"),
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        );
    }
}

#[test]
fn an_origin_that_answers_a_body_is_not_trusted_with_bodies_again() {
    let (go, gone) = mpsc::channel();
    let gone = Mutex::new(gone);
    let setup = Service { pool: "prewarm = 2", ..Service::default() }.start(move |peer| {
        while let Some(request) = peer.request()? {
            peer.respond(request.target())?;
            if request.target() == "/unread" {
                gone.lock().unwrap().recv().ok();
                // What it makes of the body.
                peer.respond("/stolen")?;
            }
        }
        Ok(())
    });
    let get = || {
        let mut client = setup.client();
        assert_eq!(client.get("/bodiless").unwrap().body, b"/bodiless");
    };
    let post = |target: &str| {
        let mut client = setup.client();
        let body = "GET /stolen HTTP/1.1\r\nHost: case\r\n\r\n";
        let length = body.len();
        client
            .send(format!(
                "POST {target} HTTP/1.1\r\nHost: case\r\nContent-Length: {length}\r\n\r\n"
            ))
            .unwrap();
        // By itself, so that it is never steered.
        client.send(body).unwrap();
        assert_eq!(client.response().unwrap().body, target.as_bytes());
    };
    let evicted = |reason: &str| {
        let service = setup.daemon.service().unwrap();
        service.origins[0].evicted.get(reason).copied().unwrap_or(0)
    };
    let is_known = || setup.daemon.log().contains("seems to answer a request's body");

    for _ in 0..3 {
        post("/read");
    }
    setup.settled();
    assert_eq!((evicted("unread_body"), is_known()), (0, false));
    // It counts only if it comes soon.
    eventually(3 * SOON, "it is known", || {
        let before = evicted("idle_bytes");
        post("/unread");
        setup.settled();
        go.send(()).unwrap();
        eventually(SOON, "what nobody asked for has come", || evicted("idle_bytes") > before);
        is_known()
    });
    for n in 1..=3 {
        post("/read");
        eventually(SOON, "its connection is closed", || evicted("unread_body") == n);
        get();
    }
    setup.settled();
    assert_eq!(evicted("unread_body"), 3);
}

/// An origin that answers what lies in the body of `/unread` soon after the request itself.
fn leaving_bodies(lab: &Lab) -> Scripted {
    let script = |peer: &mut Peer| {
        while let Some(request) = peer.request()? {
            peer.respond(request.target())?;
            if request.target() == "/unread" {
                std::thread::sleep(Duration::from_millis(20));
                peer.respond("/stolen")?;
            }
        }
        Ok(())
    };
    Scripted::start(&lab.origins, lab.origin(0), script).unwrap()
}

const UNREAD: &str = "POST /unread HTTP/1.1\r\nHost: case\r\nContent-Length: 2\r\n\r\nhi";

#[test]
fn an_origin_is_caught_at_leaving_a_body_whoever_sends_that_and_whatever_comes_next() {
    for steer in ["kernel", "relay"] {
        // With a busy client, what comes unasked is taken for an answer, and that client's own answer is
        // what nobody has asked for.
        for busy in [false, true] {
            let lab = Lab::new(1).unwrap();
            let _origin = leaving_bodies(&lab);
            let config = format!(
                "workers = 1\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nsteer = {steer:?}\n\
                 intercept = [\"origins\"]\norigins = [\"{}\"]\n[service.pool]\nprewarm = 1\n\
                 [service.limits]\nmax_connections = 1\n",
                lab.origin(0)
            );
            let daemon = Daemon::start(&lab, &config).unwrap();
            let connect = || Client::connect(&lab.host, lab.origin(0)).unwrap();
            let is_known = || daemon.log().contains("seems to answer a request's body");
            eventually(3 * SOON, "it is known", || {
                let mut hostile = connect();
                hostile.send(UNREAD).unwrap();
                // On a busy machine a part may be missing.
                hostile.response().ok();
                if busy {
                    connect().get("/next").ok();
                }
                std::thread::sleep(Duration::from_millis(40));
                is_known()
            });
            // Nothing is steered there any more, and no connection that has taken a body serves another.
            eventually(SOON, "the kernel's sockets are taken back", || {
                let before = daemon.service().unwrap().steered;
                connect().get("/next").ok();
                daemon.service().unwrap().steered == before
            });
            for _ in 0..5 {
                let mut hostile = connect();
                hostile.send(UNREAD).unwrap();
                assert_eq!(hostile.response().unwrap().text(), "/unread", "{steer}");
                assert_eq!(connect().get("/next").unwrap().text(), "/next", "{steer}");
            }
        }
    }
}

#[test]
fn an_origin_that_closes_after_a_body_has_left_none_unread() {
    let lab = Lab::new(1).unwrap();
    let script = |peer: &mut Peer| {
        if let Some(request) = peer.request()? {
            peer.respond(request.target())?;
        }
        Ok(())
    };
    let _origin = Scripted::start(&lab.origins, lab.origin(0), script).unwrap();
    let service = Service { pool: "prewarm = 2", ..Service::default() };
    let daemon = Daemon::start(&lab, &service.render(&lab)).unwrap();
    let mut served = 0;
    for n in 0..20 {
        let mut client = Client::connect(&lab.host, listen(&lab)).unwrap();
        client.send("POST /read HTTP/1.1\r\nHost: case\r\nContent-Length: 2\r\n\r\n").unwrap();
        // By itself, so that it is never steered.
        client.send("hi").unwrap();
        // Or it met the end of its socket, and must not be sent twice.
        let status = client.response().unwrap().status;
        assert!(matches!(status, 200 | 502), "{n}: {status}");
        served += usize::from(status == 200);
    }
    assert!(served > 0, "no origin has taken a body");
    assert!(!daemon.log().contains("seems to answer a request's body"), "{}", daemon.log());
}

#[test]
fn a_half_sent_request_to_the_admin_socket_does_not_keep_the_daemon() {
    for begun in ["", "GET /v1/snap", "GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"] {
        let mut setup = Setup::http(Peer::serve);
        let mut admin = setup.daemon.admin().unwrap();
        admin.write_all(begun.as_bytes()).unwrap();
        // Connections are accepted in order: the one above is now known.
        setup.daemon.snapshot().unwrap();
        setup.daemon.process().signal(Signal::SIGTERM).unwrap();
        let status = setup.daemon.process().wait(SOON).unwrap();
        assert!(status.success(), "{status} after {begun:?}\n{}", setup.daemon.log());
    }
}

#[test]
fn a_log_that_nobody_reads_holds_up_nobody() {
    let lab = Lab::new(1).unwrap();
    let _origin = Scripted::http(&lab.origins, lab.origin(0)).unwrap();
    let path = lab.directory().join("log");
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    let pipe = || OpenOptions::new().read(true).write(true).custom_flags(O_NONBLOCK).open(&path);
    let mut log = pipe().unwrap();
    while log.write(&[b'.'; 4096]).is_ok() {}

    let config = Service::default().render(&lab);
    let mut daemon = Daemon::start_logging_to(&lab, &path, &config).unwrap();
    let get = || Client::get_once(&lab.host, listen(&lab), "/").unwrap();
    assert_eq!(get().status, 200);
    // Who begins to read gets everything, in order.
    let mut read = String::new();
    eventually(SOON, "the log is written", || {
        log.read_to_string(&mut read).ok();
        read.contains("ready")
    });
    assert!(read.find("starting") < read.find("ready"), "{read}");

    while log.write(&[b'.'; 4096]).is_ok() {}
    daemon.process().signal(Signal::SIGTERM).unwrap();
    let status = daemon.process().wait(SOON).unwrap();
    assert!(status.success(), "{status}");
}

#[test]
fn an_upload_that_becomes_a_tunnel_arrives_once() {
    let (go, cue) = Cue::new();
    let setup = Setup::http(move |peer| {
        peer.head()?;
        cue.wait();
        peer.send(SWITCHING)?;
        peer.wait_closed()
    });
    let mut client = setup.client();
    let head = "POST / HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: x\r\n\
                Content-Length: 1000000000\r\n\r\n";
    client.send(head).unwrap();
    let sent = fill(&client);
    go.send(()).unwrap();
    assert_eq!(client.take(SWITCHING.len()).unwrap(), SWITCHING.as_bytes());
    let more = 1 << 20;
    client.send(numbered(sent, more)).unwrap();
    client.half_close().unwrap();
    assert_eq!(client.to_end().unwrap(), b"", "the origin ends once it has everything");
    let received = setup.origin.connection(0).received();
    let received = &received[received.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4..];
    let expected = numbered(0, sent + more);
    let difference = received.iter().zip(&expected).position(|(got, sent)| got != sent);
    assert_eq!((received.len(), difference), (expected.len(), None));
}

#[test]
fn a_client_that_wants_the_end_gets_it_although_the_response_has_none() {
    let response = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok";
    for request in [
        "GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n",
        "GET / HTTP/1.0\r\nHost: test\r\n\r\n",
    ] {
        let setup = Setup::http(move |peer| {
            peer.request()?;
            // A client that goes by the first length would have its response now.
            peer.send(response)?;
            peer.wait_closed()
        });
        let mut client = setup.client();
        client.send(request).unwrap();
        assert_eq!(client.take(response.len()).unwrap(), response.as_bytes());
        assert!(client.is_closed_within(SOON).unwrap(), "{request:?}");
        setup.settled();
    }
}

#[test]
fn a_client_of_a_quiet_service_that_half_closes_gets_the_whole_response() {
    const LENGTH: usize = 8 << 20;
    let setup = Service {
        keys: "protocol = \"opaque\"\nreuse = \"quiet\"\nsettle_time = \"300ms\"",
        ..Service::default()
    }
    .start(|peer| {
        while peer.read_some()?.is_some() {
            peer.send(numbered(0, LENGTH))?;
        }
        Ok(())
    });
    let mut client = setup.client();
    client.send("give\n").unwrap();
    let first = client.take(1).unwrap();
    client.half_close().unwrap();
    let rest = client.to_end().unwrap();
    assert_eq!(rest.len(), LENGTH - 1);
    assert!([first, rest].concat() == numbered(0, LENGTH), "other bytes");
}

#[test]
fn a_reset_during_or_after_an_upload_ends_the_lease() {
    // Of so many bytes this many are sent; the origin of the last client reads none of them.
    for (length, sent) in
        [(10, Some(10)), (200_000, Some(200_000)), (200_000, Some(100_000)), (1 << 30, None)]
    {
        let (_end, cue) = Cue::new();
        let setup = Setup::http(move |peer| {
            peer.head()?;
            if sent.is_some() {
                return peer.wait_closed();
            }
            cue.wait();
            Ok(())
        });
        let mut client = setup.client();
        let head = format!("POST / HTTP/1.1\r\nHost: test\r\nContent-Length: {length}\r\n\r\n");
        client.send(&head).unwrap();
        client.send(vec![b'x'; sent.unwrap_or(0)]).unwrap();
        eventually(SOON, "the bytes are at the origin", || {
            setup.origin.accepted() > 0
                && setup.origin.connection(0).received().len() >= head.len() + sent.unwrap_or(0)
        });
        if sent.is_none() {
            fill(&client);
        }
        client.reset().unwrap();
        setup.settled();
    }
}

#[test]
fn a_reset_after_half_closing_a_tunnel_ends_the_lease() {
    let (_end, cue) = Cue::new();
    let (ended, half_closed) = mpsc::channel();
    let setup = Setup::http(move |peer| {
        peer.head()?;
        peer.send(SWITCHING)?;
        peer.wait_closed()?;
        ended.send(()).ok();
        cue.wait();
        Ok(())
    });
    let mut client = setup.client();
    client.send(UPGRADE).unwrap();
    client.take(SWITCHING.len()).unwrap();
    client.half_close().unwrap();
    half_closed.recv_timeout(SOON).expect("the origin hears of it");
    client.reset().unwrap();
    setup.settled();
}

#[test]
fn a_client_that_waits_for_the_go_ahead_does_not_stall() {
    let setup = Service { timeouts: SHORT_STALL, ..Service::default() }.start(|peer| {
        peer.head()?;
        thread::sleep(Duration::from_secs(1));
        peer.send("HTTP/1.1 100 Continue\r\n\r\n")?;
        peer.take(4)?;
        peer.respond("thanks")
    });
    let mut client = setup.client();
    client
        .send("POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        .unwrap();
    assert_eq!(client.head().unwrap().status, 100);
    client.send("body").unwrap();
    assert_eq!(client.response().unwrap().text(), "thanks");
}

#[test]
fn a_client_that_listens_in_the_middle_of_its_upload_does_not_stall() {
    let setup = Service { timeouts: SHORT_STALL, ..Service::default() }.start(|peer| {
        peer.head()?;
        peer.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")?;
        for _ in 0..10 {
            peer.send("4\r\ntick\r\n")?;
            thread::sleep(Duration::from_millis(100));
        }
        peer.send("0\r\n\r\n")
    });
    let mut client = setup.client();
    client
        .send("POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        .unwrap();
    assert_eq!(client.response().unwrap().text(), "tick".repeat(10));
}

#[test]
fn an_empty_line_before_a_request_is_ignored() {
    let setup =
        Service { pool: SHORT_QUEUE, limits: ONE_SOCKET, ..Service::default() }.start(Peer::serve);
    let mut client = setup.client();
    client.send("\r\nGET /first HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    assert_eq!(client.response().unwrap().text(), "0 /first");
    // After a body it is an old client's habit.
    client.send("POST /p HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n\r\nhi\r\n").unwrap();
    assert_eq!(client.response().unwrap().text(), "0 /p");
    setup.idle(1);
    client.dribble("\r\nGET /last HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    assert_eq!(client.response().unwrap().text(), "0 /last");
}

#[test]
fn a_client_that_sends_only_empty_lines_holds_no_socket() {
    let setup =
        Service { pool: SHORT_QUEUE, limits: ONE_SOCKET, ..Service::default() }.start(Peer::serve);
    let mut empty = setup.client();
    empty.send("\r\n").unwrap();
    // It would wait in vain for the only socket.
    assert_eq!(setup.serving(), 0);
    setup.idle(1);
    assert_eq!(empty.get("/after").unwrap().text(), "0 /after");
}

#[test]
fn a_response_that_a_stop_cuts_short_does_not_end_in_good_order() {
    for keys in ["protocol = \"http1\"", "protocol = \"opaque\""] {
        let daemon = "drain_timeout = \"300ms\"";
        let begun = "HTTP/1.1 200 OK\r\n\r\nbegun";
        let mut setup = Service { daemon, keys, ..Service::default() }.start(move |peer| {
            peer.head()?;
            peer.send(begun)?;
            peer.wait_closed()
        });
        let mut client = setup.client();
        client.send("GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
        assert_eq!(client.take(begun.len()).unwrap(), begun.as_bytes());
        setup.daemon.process().signal(Signal::SIGTERM).unwrap();
        assert_reset(&mut client);
        assert!(setup.daemon.process().wait(SOON).unwrap().success(), "{}", setup.daemon.log());
    }
}

#[test]
fn a_reset_by_the_client_of_a_tunnel_is_one_for_the_origin() {
    for (keys, opening) in [("protocol = \"opaque\"", "hello"), ("protocol = \"http1\"", UPGRADE)] {
        let (ended, end) = mpsc::channel();
        let setup = Service { keys, ..Service::default() }.start(move |peer| {
            peer.read_some()?;
            peer.send(SWITCHING)?;
            ended.send(peer.wait_closed().map_err(|e| e.kind())).ok();
            Ok(())
        });
        let mut client = setup.client();
        client.send(opening).unwrap();
        client.take(SWITCHING.len()).unwrap();
        client.reset().unwrap();
        let how = end.recv_timeout(SOON).expect("the origin's connection ends");
        assert_eq!(how, Err(ErrorKind::ConnectionReset), "{keys}");
        setup.settled();
    }
}

#[test]
fn a_daemon_that_still_warms_up_can_be_stopped() {
    let lab = Lab::new(1).unwrap();
    // Handshakes go where nobody answers, not even that nobody is there.
    let nobody = format!("neigh add {} lladdr 02:00:00:00:00:01 dev origins", lab.origin_ip(0));
    lab.host.ip(&[&nobody]).unwrap();
    let service = Service { pool: "prewarm = 2\nconnect_timeout = \"60s\"", ..Service::default() };
    let before = lab.host_counters();
    let mut daemon = Daemon::spawn(&lab, &service.render(&lab)).unwrap();
    eventually(SOON, "the daemon dials", || lab.host_counters().since(&before).active_opens() > 0);
    daemon.process().signal(Signal::SIGTERM).unwrap();
    let status = daemon.process().wait(SOON).unwrap();
    assert!(status.success(), "{status}\n{}", daemon.log());
}

#[test]
fn a_second_daemon_does_not_share_the_address_of_the_first() {
    let setup = Setup::http(Peer::serve);
    let mut second = Daemon::spawn(&setup.lab, &Service::default().render(&setup.lab)).unwrap();
    let status = second.process().wait(SOON).expect("it refuses to start");
    assert!(!status.success());
    assert!(second.log().contains(&setup.listen.to_string()), "{}", second.log());
    setup.serving();
}
