//! That the torture would notice: sessions that talk to somebody who gets it wrong.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use broker::clock;

use super::mode::Mode;
use super::report::{Kind, Report};
use super::script::{Reading, Script, Sending};
use super::session::{Calls, Scratch, Session, Step};
use super::spec::{Asks, End, Framing, How, Id, Method, POISON, Spec, Upload};
use super::wire::Wire;
use super::{Plan, Shared};

const SIZE: u32 = 3000;

fn shared() -> Shared {
    let plan = Plan {
        seed: 1,
        clients: 3,
        exchanges: Some(1),
        duration: None,
        only: Vec::new(),
        calm: false,
        services: vec![super::Service {
            targets: Vec::new(),
            origins: Vec::new(),
            modes: Vec::new(),
        }],
        origins_netns: "/proc/self/ns/net".into(),
        patience: Duration::from_secs(5),
        progress: None,
    };
    Shared::new(&plan, clock::now())
}

fn get(shared: &Shared, client: u16) -> Spec {
    Spec { size: SIZE, framing: Framing::Length, ..Spec::new(shared.ledger.ask(client).unwrap()) }
}

fn response(shared: &Shared, spec: &Spec) -> Vec<u8> {
    let mut bytes = Vec::new();
    Wire::response(shared.key, spec).fill(&mut bytes, usize::MAX);
    bytes
}

/// Lets a client make `requests` of a peer that reads the first head and sends `answer`.
fn talk(shared: Shared, requests: Vec<Spec>, answer: &[u8]) -> Report {
    talk_until(shared, requests, answer, How::Fin)
}

fn talk_until(shared: Shared, requests: Vec<Spec>, answer: &[u8], how: How) -> Report {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    socket.set_read_timeout(Some(shared.patience)).unwrap();
    let (mut peer, _) = listener.accept().unwrap();
    let script = Script {
        mode: Mode::OneShot,
        requests,
        sending: Sending { ahead: true, together: true, ..Sending::default() },
        leaving: None,
        half_close: false,
        // Reads end anywhere.
        reading: Reading { size: 7, peek: Some(2), pause: None, receive_buffer: None },
    };
    thread::scope(|scope| {
        scope.spawn(move || -> io::Result<()> {
            peer.read_exact(&mut [0; 40])?;
            peer.write_all(answer)?;
            if how == How::Rst {
                socket2::SockRef::from(&peer).set_linger(Some(Duration::ZERO))?;
                return Ok(());
            }
            peer.shutdown(std::net::Shutdown::Write)?;
            // Closing with bytes unread would be a reset.
            io::copy(&mut peer, &mut io::sink())?;
            Ok(())
        });
        let now = clock::now();
        let mut session = Session::over(&shared, script, 0, socket.into(), Calls::Block, now);
        let mut scratch = Scratch::new();
        while let Step::Wait { .. } = session.step(clock::now(), &mut scratch) {
            session.readable = true;
        }
    });
    shared.judge.into_report()
}

/// The only failure.
#[track_caller]
fn failure(report: &Report) -> (Kind, &str) {
    let [failure] = &report.failures[..] else { panic!("{report:#?}") };
    (failure.kind, &failure.what)
}

#[test]
fn a_right_response_is_verified() {
    let shared = shared();
    let spec = get(&shared, 1);
    shared.ledger.run(spec.id);
    let answer = response(&shared, &spec);
    let report = talk(shared, vec![spec], &answer);
    assert!(report.is_clean() && report.failures.is_empty(), "{report:#?}");
    assert_eq!((report.exchanges, report.verified_bytes), (1, answer.len() as u64));
}

#[test]
fn bodies_swapped_between_two_clients_are_found() {
    let shared = shared();
    let (mine, other) = (get(&shared, 1), get(&shared, 2));
    shared.ledger.run(mine.id);
    let mut answer = response(&shared, &mine);
    let body = answer.len() - SIZE as usize;
    let others = response(&shared, &other);
    answer.truncate(body);
    answer.extend_from_slice(&others[others.len() - SIZE as usize..]);
    let report = talk(shared, vec![mine], &answer);
    let (kind, what) = failure(&report);
    assert_eq!(kind, Kind::Mismatch);
    assert!(what.contains("another client's response body, 2-0"), "{what}");
    assert_eq!(report.failures[0].offset, Some(body as u64));
    assert_eq!(report.mismatches, 1);
}

#[test]
fn a_response_of_another_client_is_found() {
    let shared = shared();
    let (mine, other) = (get(&shared, 1), get(&shared, 2));
    let answer = response(&shared, &other);
    let report = talk(shared, vec![mine], &answer);
    let (kind, what) = failure(&report);
    assert_eq!(kind, Kind::Mismatch);
    assert!(what.contains("another client's response, 2-0"), "{what}");
}

#[test]
fn a_single_foreign_byte_is_found() {
    let shared = shared();
    let spec = get(&shared, 1);
    let mut answer = response(&shared, &spec);
    let at = answer.len() - 1;
    answer[at] ^= 1;
    let report = talk(shared, vec![spec], &answer);
    assert_eq!(failure(&report).0, Kind::Mismatch);
    assert_eq!(report.failures[0].offset, Some(at as u64));
}

#[test]
fn a_doubled_byte_is_found() {
    let shared = shared();
    let spec = get(&shared, 1);
    let mut answer = response(&shared, &spec);
    let at = answer.len() - 2000;
    answer.insert(at, answer[at]);
    let report = talk(shared, vec![spec], &answer);
    let (kind, what) = failure(&report);
    assert_eq!(kind, Kind::Mismatch);
    assert!(what.contains("this exchange's own response body"), "{what}");
}

#[test]
fn a_missing_byte_is_found() {
    let shared = shared();
    let spec = get(&shared, 1);
    let mut answer = response(&shared, &spec);
    answer.remove(answer.len() - 2000);
    let report = talk(shared, vec![spec], &answer);
    let (kind, what) = failure(&report);
    assert_eq!(kind, Kind::Mismatch);
    assert!(what.contains("this exchange's own response body"), "{what}");
}

#[test]
fn a_missing_end_is_found() {
    for how in [How::Fin, How::Rst] {
        let shared = shared();
        let spec = get(&shared, 1);
        let mut answer = response(&shared, &spec);
        answer.pop();
        let report = talk_until(shared, vec![spec], &answer, how);
        assert_eq!(failure(&report).0, Kind::Lost);
        assert_eq!(report.lost, 1);
    }
}

#[test]
fn bytes_after_the_response_are_found() {
    let shared = shared();
    let spec = Spec { asks: Asks::Close, end: End::Poison, ..get(&shared, 1) };
    shared.ledger.run(spec.id);
    let mut answer = response(&shared, &spec);
    answer.extend_from_slice(POISON);
    let report = talk(shared, vec![spec], &answer);
    let (kind, what) = failure(&report);
    assert_eq!(kind, Kind::Mismatch);
    assert!(what.contains("that an origin sent after somebody's response"), "{what}");
    assert_eq!(report.bytes_after_eof, 1);
}

#[test]
fn a_response_to_the_clients_own_other_request_is_found() {
    let shared = shared();
    let (first, second) = (get(&shared, 1), get(&shared, 1));
    shared.ledger.run(first.id);
    let answer = response(&shared, &second);
    let report = talk(shared, vec![first, second], &answer);
    let (kind, what) = failure(&report);
    assert_eq!(kind, Kind::Mismatch);
    assert!(what.contains("a later request of this client, 1-1"), "{what}");
}

#[test]
fn a_response_that_comes_twice_is_found() {
    let shared = shared();
    let (first, second) = (get(&shared, 1), get(&shared, 1));
    shared.ledger.run(first.id);
    let answer = response(&shared, &first).repeat(2);
    let report = talk(shared, vec![first, second], &answer);
    let (kind, what) = failure(&report);
    assert_eq!(kind, Kind::Duplicated);
    assert!(what.contains("an earlier request, 1-0"), "{what}");
    assert_eq!(report.duplicated, 1);
}

#[test]
fn a_response_without_a_run_is_found() {
    let shared = shared();
    let spec = get(&shared, 1);
    let answer = response(&shared, &spec);
    let report = talk(shared, vec![spec], &answer);
    let (kind, what) = failure(&report);
    assert_eq!(kind, Kind::Mismatch);
    assert!(what.contains("never ran"), "{what}");
}

#[test]
fn silence_is_found() {
    let shared = Shared { patience: Duration::from_millis(50), ..shared() };
    let spec = get(&shared, 1);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    socket.set_read_timeout(Some(shared.patience)).unwrap();
    let script = Script {
        mode: Mode::OneShot,
        requests: vec![spec],
        sending: Sending::default(),
        leaving: None,
        half_close: false,
        reading: Reading { size: 1000, peek: None, pause: None, receive_buffer: None },
    };
    let now = clock::now();
    let mut session = Session::over(&shared, script, 0, socket.into(), Calls::Block, now);
    let mut scratch = Scratch::new();
    while let Step::Wait { .. } = session.step(clock::now(), &mut scratch) {
        session.readable = true;
    }
    drop(session);
    let report = shared.judge.into_report();
    assert_eq!(failure(&report).0, Kind::Stuck);
}

/// What a client thinks of a refusal, or of an end by RST, after so many `runs`.
#[track_caller]
fn refused(spec: impl Fn(Spec) -> Spec, runs: u8, ends: usize) -> Report {
    const REFUSAL: &str = "HTTP/1.1 502 Bad Gateway\r\nx-broker-unavailable: origin_failed\r\n\
                           Content-Length: 2\r\nConnection: close\r\n\r\nno";
    let shared = shared();
    let spec = spec(get(&shared, 1));
    shared.ledger.is_a(spec.id, spec.method);
    for _ in 0..runs {
        shared.ledger.run(spec.id);
    }
    for _ in 0..ends {
        shared.ledger.end(0, clock::now());
    }
    talk(shared, vec![spec], REFUSAL.as_bytes())
}

#[test]
fn a_refusal_needs_a_cause() {
    let get = |spec| spec;
    let post = |spec| Spec {
        method: Method::Post,
        upload: Some(Upload { size: 10, chunked: false }),
        ..spec
    };
    for (report, allowed) in [
        (refused(get, 0, 0), false),
        // It is tried on three sockets.
        (refused(get, 0, 2), false),
        (refused(get, 0, 3), true),
        (refused(get, 1, 3), false),
        (refused(post, 0, 0), false),
        (refused(post, 0, 1), true),
        // It has run: then there is a response.
        (refused(post, 1, 1), false),
        (refused(|spec| Spec { end: End::Before(How::Fin), ..post(spec) }, 1, 0), true),
        (refused(|spec| Spec { end: End::Before(How::Fin), ..spec }, 1, 0), false),
        (refused(|spec| Spec { end: End::Before(How::Fin), ..spec }, 1, 2), true),
        (refused(|spec| Spec { end: End::Mid(How::Rst, 2), ..spec }, 3, 0), true),
    ] {
        assert_eq!(report.client_errors_allowed, u64::from(allowed), "{report:#?}");
        assert_eq!(report.lost, u64::from(!allowed), "{report:#?}");
    }
}

#[test]
fn an_origin_that_dies_must_not_look_like_an_end() {
    for (how, clean) in [(How::Rst, true), (How::Fin, false)] {
        let shared = shared();
        let spec = Spec { end: End::Mid(How::Fin, 300), ..get(&shared, 1) };
        shared.ledger.run(spec.id);
        let answer = response(&shared, &spec);
        let report = talk_until(shared, vec![spec], &answer[..300], how);
        assert_eq!(report.is_clean(), clean, "{report:#?}");
        assert_eq!(report.client_errors_allowed, u64::from(clean));
    }
}

#[test]
fn a_reset_for_a_later_response_is_allowed_only_if_its_origin_died() {
    for (end, clean) in [(End::Mid(How::Rst, 9), true), (End::Keep, false)] {
        let shared = shared();
        let (first, second) = (get(&shared, 1), Spec { end, ..get(&shared, 1) });
        shared.ledger.run(first.id);
        shared.ledger.run(second.id);
        let answer = response(&shared, &first);
        let report = talk_until(shared, vec![first, second], &answer[..300], How::Rst);
        assert_eq!(report.is_clean(), clean, "{report:#?}");
    }
}

#[test]
fn more_than_a_dead_origin_has_sent_is_found() {
    let shared = shared();
    let spec = Spec { end: End::Mid(How::Fin, 300), ..get(&shared, 1) };
    shared.ledger.run(spec.id);
    let answer = response(&shared, &spec);
    let report = talk(shared, vec![spec], &answer);
    assert_eq!(failure(&report).0, Kind::Mismatch);
}

mod origins {
    //! The other side: requests that an origin must not get.

    use std::net::SocketAddr;

    use super::super::origins::Origins;
    use super::*;
    use crate::netns::Netns;

    /// Sends requests to an origin, each on a connection of its own; what the origin reports.
    fn send(shared: Shared, requests: &[Vec<u8>]) -> Report {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut plan = Plan {
            seed: 1,
            clients: 3,
            exchanges: None,
            duration: None,
            only: Vec::new(),
            calm: false,
            services: Vec::new(),
            origins_netns: "/proc/self/ns/net".into(),
            patience: Duration::from_secs(5),
            progress: None,
        };
        plan.services.push(super::super::Service {
            targets: Vec::new(),
            origins: vec![free],
            modes: Vec::new(),
        });
        let netns = Netns::open("own", &plan.origins_netns).unwrap();
        let origins = Origins::listen(&netns, &plan).unwrap();
        thread::scope(|scope| {
            let serving = origins.serve(scope, &shared).unwrap();
            for request in requests {
                exchange(free, request);
            }
            serving.stop().unwrap();
        });
        shared.judge.into_report()
    }

    /// Waits until the origin has had enough.
    fn exchange(to: SocketAddr, request: &[u8]) {
        let mut socket = TcpStream::connect(to).unwrap();
        socket.write_all(request).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        socket.read_to_end(&mut Vec::new()).ok();
    }

    fn request(shared: &Shared, spec: &Spec) -> Vec<u8> {
        let mut bytes = Vec::new();
        Wire::request(shared.key, spec).fill(&mut bytes, usize::MAX);
        bytes
    }

    fn post(shared: &Shared) -> Spec {
        let upload = Some(Upload { size: 5000, chunked: false });
        let spec = Spec { method: Method::Post, upload, ..get(shared, 1) };
        shared.ledger.is_a(spec.id, spec.method);
        spec
    }

    #[test]
    fn a_post_that_runs_once_is_fine_and_twice_is_not() {
        let one = shared();
        let bytes = request(&one, &post(&one));
        let report = send(one, std::slice::from_ref(&bytes));
        assert!(report.failures.is_empty(), "{report:#?}");
        assert_eq!(report.verified_bytes, bytes.len() as u64);

        let two = shared();
        post(&two);
        let report = send(two, &[bytes.clone(), bytes]);
        assert_eq!(failure(&report).0, Kind::Duplicated);
        assert_eq!(report.duplicated, 1);
    }

    #[test]
    fn a_body_of_another_client_is_found() {
        let shared = shared();
        let mine = post(&shared);
        let other = Spec { id: Id { client: 2, seq: 0 }, ..mine };
        let mut bytes = request(&shared, &mine);
        let body = bytes.len() - 5000;
        bytes.truncate(body);
        let others = request(&shared, &other);
        bytes.extend_from_slice(&others[others.len() - 5000..]);
        let report = send(shared, &[bytes]);
        let (kind, what) = failure(&report);
        assert_eq!(kind, Kind::Mismatch);
        assert!(what.contains("another client's request body, 2-0"), "{what}");
    }

    #[test]
    fn a_request_inside_of_anothers_body_is_found() {
        let shared = shared();
        let (mine, other) = (post(&shared), get(&shared, 2));
        let mut bytes = request(&shared, &mine);
        bytes.truncate(bytes.len() - 2000);
        bytes.extend_from_slice(&request(&shared, &other));
        let report = send(shared, &[bytes]);
        let (kind, what) = failure(&report);
        assert_eq!((kind, what), (Kind::Mismatch, "the head of request 2-0"));
    }

    #[test]
    fn a_request_that_nobody_has_sent_is_found() {
        let shared = shared();
        let spec = Spec::new(Id { client: 2, seq: 9 });
        let bytes = request(&shared, &spec);
        let report = send(shared, &[bytes]);
        assert_eq!(failure(&report).0, Kind::Mismatch);
    }

    #[test]
    fn a_changed_head_is_found() {
        let shared = shared();
        let spec = get(&shared, 1);
        let head = String::from_utf8(request(&shared, &spec)).unwrap();
        let report = send(shared, &[head.replace("Host: torture", "Host: tortura").into()]);
        let (kind, what) = failure(&report);
        assert_eq!((kind, what), (Kind::Mismatch, "another request head than was sent"));
    }
}
