use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use hyper::Method;

use super::super::tests::{Answer, Server, deaf, http, settings, tcp};
use super::*;
use crate::datapath::{Dialled, Inert, InterceptedService, KernelCounters};

/// Longer than an origin needs that answers, or shorter than one that does not.
const SHORT: Duration = Duration::from_millis(50);

fn prober(kind: Kind) -> Prober {
    Prober::new(&settings(kind), Arc::new(Inert))
}

fn hasty(kind: Kind) -> Prober {
    Prober::new(&HealthCheck { timeout: SHORT, ..settings(kind) }, Arc::new(Inert))
}

async fn ask_once(http: Http, answer: Answer) -> (Outcome, bool) {
    let server = Server::start(answer).await;
    let (outcome, kept) = prober(Kind::Http(http)).check(server.address, None).await;
    (outcome, kept.is_some())
}

fn answer(head: &str) -> Answer {
    Answer::Send(head.replace('\n', "\r\n").into_bytes())
}

fn reason(outcome: Outcome) -> String {
    match outcome {
        Outcome::Broken(reason) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_request_says_what_the_settings_say() {
    let server = Server::start(Answer::ok()).await;
    let check = prober(Kind::Http(http())).check(server.address, None);
    assert_eq!(check.await.0, Outcome::Passed);
    let expected =
        "GET /healthz?deep=1 HTTP/1.1\r\nhost: web\r\nuser-agent: broker-health-check\r\n\r\n";
    assert_eq!(server.requests(), [expected]);

    let head = Http { method: Method::HEAD, reuse_connection: false, ..http() };
    server.answers(answer("HTTP/1.1 200 OK\ncontent-length: 99\n\n"));
    let (outcome, kept) = prober(Kind::Http(head)).check(server.address, None).await;
    assert_eq!((outcome, kept.is_some()), (Outcome::Passed, false));
    let request = server.requests().pop().expect("a request");
    assert!(request.starts_with("HEAD /healthz?deep=1 HTTP/1.1\r\n"), "{request}");
    assert!(request.contains("\r\nconnection: close\r\n"), "{request}");
}

#[tokio::test]
async fn statuses() {
    let http = Http {
        expected_statuses: vec![200..=299, 404..=404],
        retriable_statuses: vec![500..=599],
        ..http()
    };
    for (status, expected) in [
        (200, Outcome::Passed),
        (299, Outcome::Passed),
        (404, Outcome::Passed),
        (300, Outcome::Status { status: 300, retriable: false }),
        (403, Outcome::Status { status: 403, retriable: false }),
        (503, Outcome::Status { status: 503, retriable: true }),
    ] {
        let found = answer(&format!("HTTP/1.1 {status} x\ncontent-length: 0\n\n"));
        assert_eq!(ask_once(http.clone(), found).await, (expected, true));
    }
    let interim = "HTTP/1.1 103 Early Hints\n\nHTTP/1.1 204 No Content\n\n";
    assert_eq!(ask_once(http, answer(interim)).await, (Outcome::Passed, true));
}

#[tokio::test]
async fn an_origin_may_say_that_it_is_degraded() {
    let degraded = |status| {
        answer(&format!("HTTP/1.1 {status} x\ncontent-length: 0\nX-Envoy-Degraded: 1\n\n"))
    };
    assert_eq!(ask_once(http(), degraded(200)).await.0, Outcome::Degraded);
    let failed = Outcome::Status { status: 500, retriable: false };
    assert_eq!(ask_once(http(), degraded(500)).await.0, failed);
}

#[tokio::test]
async fn connections_are_kept_where_they_can_be() {
    let server = Server::start(Answer::ok()).await;
    let mut kept = None;
    let mut accepted = Vec::new();
    let close = answer("HTTP/1.1 200 OK\nconnection: close\ncontent-length: 0\n\n");
    for answer in [Answer::ok(), Answer::ok(), close, Answer::ok()] {
        server.answers(answer);
        let (outcome, left) = prober(Kind::Http(http())).check(server.address, kept).await;
        assert_eq!(outcome, Outcome::Passed);
        accepted.push(server.accepted());
        kept = left;
    }
    assert_eq!(accepted, [1, 1, 1, 2]);

    let closing = Http { reuse_connection: false, ..http() };
    for _ in 0..2 {
        let check = prober(Kind::Http(closing.clone())).check(server.address, None);
        assert!(matches!(check.await, (Outcome::Passed, None)));
    }
    assert_eq!(server.accepted(), 4);
}

/// The origin closes its side just when the next request comes.
#[tokio::test]
async fn the_end_of_a_kept_connection_is_no_failure() {
    let server = Server::start(Answer::ok()).await;
    for end in ["", "HTTP/1.1 20"] {
        server.answers_first_and_then(Answer::ok(), Answer::End(end.into()));
        let prober = prober(Kind::Http(http()));
        let before = server.accepted();
        let (_, kept) = prober.check(server.address, None).await;
        assert!(kept.is_some());
        let (outcome, _) = prober.check(server.address, kept).await;
        assert_eq!((outcome, server.accepted() - before), (Outcome::Passed, 2));
    }
}

#[tokio::test]
async fn answers_that_do_not_come_in_time() {
    let head: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n";
    for silence in [
        Answer::Send(Vec::new()),
        Answer::Send(head.to_vec()),
        Answer::Drip(b"HTTP/1.1 200 OK\r\nx: ", b'x', SHORT / 10),
        Answer::Drip(head, b'x', SHORT / 10),
        Answer::Drip(b"", b'H', SHORT * 1000),
    ] {
        let server = Server::start(silence).await;
        let check = hasty(Kind::Http(http())).check(server.address, None);
        assert!(matches!(check.await, (Outcome::TimedOut, None)));
    }
}

#[tokio::test]
async fn answers_that_are_none() {
    for (answer, expected) in [
        (Answer::End(Vec::new()), "connection closed before message completed"),
        (
            Answer::End(b"HTTP/1.1 200 OK\r\n".to_vec()),
            "connection closed before message completed",
        ),
        (
            Answer::End(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab".to_vec()),
            "end of file before message length reached",
        ),
        (Answer::Send(b"SSH-2.0-x\r\n\r\n".to_vec()), "invalid HTTP version parsed"),
        (
            Answer::Drip(b"HTTP/1.1 200 OK\r\nx: ", b'x', Duration::ZERO),
            "message head is too large",
        ),
    ] {
        let (outcome, kept) = ask_once(http(), answer).await;
        assert_eq!((reason(outcome).as_str(), kept), (expected, false));
    }
}

#[tokio::test]
async fn a_body_without_end_costs_its_connection_only() {
    let endless = b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n";
    let answer = Answer::Drip(endless, b'x', Duration::ZERO);
    assert_eq!(ask_once(http(), answer).await, (Outcome::Passed, false));
}

#[tokio::test]
async fn connecting() {
    let server = Server::start(Answer::ok()).await;
    assert!(matches!(prober(tcp()).check(server.address, None).await, (Outcome::Passed, None)));
    let (_port, address) = deaf();
    for kind in [tcp(), Kind::Http(http())] {
        let (outcome, _) = prober(kind).check(address, None).await;
        assert_eq!(reason(outcome), "Connection refused (os error 111)");
    }
}

/// An origin that has stopped accepting: its queue is full, and SYNs are dropped.
#[tokio::test]
async fn a_handshake_that_does_not_end() {
    let (port, address) = deaf();
    port.listen(0).expect("a listener");
    let mut queued = Vec::new();
    while let Ok(stream) = tokio::time::timeout(SHORT, TcpStream::connect(address)).await {
        queued.push(stream.expect("a connection"));
    }
    assert_eq!(hasty(tcp()).check(address, None).await.0, Outcome::TimedOut);
}

/// A kernel that marks sockets, or fails to.
#[derive(Default)]
struct Marks {
    made: AtomicUsize,
    fails: bool,
}

impl Datapath for Marks {
    fn own(&self, _socket: BorrowedFd<'_>) -> io::Result<()> {
        self.made.fetch_add(1, Relaxed);
        if self.fails { Err(io::Error::other("no mark")) } else { Ok(()) }
    }

    fn heartbeat(&self, _worker: usize) -> io::Result<()> {
        Ok(())
    }

    fn intercept(&self, _services: &[InterceptedService]) -> anyhow::Result<()> {
        Ok(())
    }

    fn original_destination(
        &self,
        _client: SocketAddr,
        _listener: SocketAddr,
    ) -> io::Result<Option<Dialled>> {
        Ok(None)
    }

    fn counters(&self) -> anyhow::Result<KernelCounters> {
        Ok(KernelCounters::default())
    }
}

#[tokio::test]
async fn no_socket_may_be_intercepted() {
    let server = Server::start(Answer::ok()).await;
    for kind in [tcp(), Kind::Http(http())] {
        let marks = Arc::new(Marks::default());
        let prober = Prober::new(&settings(kind.clone()), Arc::<Marks>::clone(&marks));
        assert_eq!(prober.check(server.address, None).await.0, Outcome::Passed);
        assert_eq!(marks.made.load(Relaxed), 1);

        let before = server.accepted();
        let marks = Arc::new(Marks { fails: true, ..Marks::default() });
        let (outcome, _) = Prober::new(&settings(kind), marks).check(server.address, None).await;
        assert_eq!(outcome, Outcome::NotMade("no mark".to_owned()));
        assert_eq!(server.accepted(), before);
    }
}

#[test]
fn what_this_host_lacks_says_nothing_of_an_origin() {
    let ours = |errno: Errno| is_ours(&io::Error::from_raw_os_error(errno as i32));
    assert!(ours(Errno::EMFILE) && ours(Errno::EADDRNOTAVAIL));
    assert!(!ours(Errno::ECONNREFUSED) && !ours(Errno::EHOSTUNREACH));
}
