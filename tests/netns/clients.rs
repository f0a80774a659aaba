//! Clients that leave early, stall, send in odd ways, or want their connection closed.

use std::io::Write as _;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use harness::origin::scripted::Peer;
use harness::wait::within;
use harness::{Client, eventually};

use crate::support::{SOON, Service, Setup};

const SILENCE: Duration = Duration::from_millis(100);

/// Answers `/slow` once told to; the client has left by then.
fn slow() -> (mpsc::SyncSender<()>, Setup) {
    let (gone, wait) = mpsc::sync_channel::<()>(1);
    let wait = Mutex::new(wait);
    let setup = Setup::http(move |peer| {
        while let Some(request) = peer.request()? {
            if request.target() == "/slow" {
                wait.lock().unwrap().recv_timeout(SOON).ok();
            }
            peer.respond(format!("{} {}", peer.index(), request.target())).ok();
        }
        Ok(())
    });
    (gone, setup)
}

fn ask_slowly(setup: &Setup) -> Client {
    let mut client = setup.client();
    client.send("GET /slow HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    eventually(SOON, "the request is at the origin", || {
        setup.origin.received_count("GET /slow") == 1
    });
    client
}

#[test]
fn a_client_that_resets_before_the_reply_takes_the_socket_with_it() {
    let (gone, setup) = slow();
    ask_slowly(&setup).reset().unwrap();
    setup.settled();
    gone.send(()).unwrap();
    assert_eq!(setup.serving(), 1, "the reply reaches nobody");
    assert_eq!(setup.daemon.service().unwrap().clients_gone, 1);
}

#[test]
fn a_client_that_leaves_before_the_reply_does_not_leave_it_to_the_next() {
    // Leaving in good order looks like half-closing: the reply is awaited on its behalf.
    let (gone, setup) = slow();
    drop(ask_slowly(&setup));
    assert_eq!(setup.serving(), 1, "its socket is not free");
    gone.send(()).unwrap();
    setup.settled();
    setup.serving();
    setup.serving();
}

#[test]
fn a_client_that_leaves_in_the_middle_of_a_body_does_no_harm() {
    let setup = Setup::http(|peer| {
        while let Some(request) = peer.request()? {
            if request.target() == "/large" {
                peer.respond(vec![b'x'; 8 << 20]).ok();
            } else {
                peer.respond(format!("{} {}", peer.index(), request.target()))?;
            }
        }
        Ok(())
    });
    let mut client = setup.client();
    client.send("GET /large HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    client.head().unwrap();
    client.take(100_000).unwrap();
    client.reset().unwrap();
    setup.settled();
    setup.serving();
}

#[test]
fn a_client_that_never_reads_does_not_keep_its_lease() {
    let setup = Service {
        timeouts: "client_stall = \"300ms\"",
        pool: "prewarm = 0\nqueue_timeout = \"5s\"",
        limits: "max_connections = 1",
        ..Service::default()
    }
    .start(|peer| {
        while let Some(request) = peer.request()? {
            if request.target() == "/large" {
                peer.respond(vec![b'x'; 64 << 20])?;
            } else {
                peer.respond(format!("{} {}", peer.index(), request.target()))?;
            }
        }
        Ok(())
    });
    let mut stalled = setup.client();
    stalled.send("GET /large HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    eventually(SOON, "the request is at the origin", || {
        setup.origin.received_count("GET /large") == 1
    });
    // There is one connection only: this waits until the stalled client has lost it.
    assert_eq!(setup.serving(), 1);
    assert_eq!(setup.daemon.service().unwrap().clients_gone, 1);
    let heap = setup_heap(setup);
    assert!(heap < 30 << 20, "the daemon holds {heap} bytes for a client that does not read");
    drop(stalled);
}

#[test]
fn a_client_that_reads_slowly_is_not_taken_for_one_that_stalls() {
    let timeouts = "client_stall = \"2s\"";
    let setup = Service { timeouts, ..Service::default() }.start(|peer| {
        peer.request()?;
        peer.respond(vec![b'x'; 8 << 20])
    });
    let mut client = setup.client();
    client.send("GET /large HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    client.head().unwrap();
    // Far less in that time than makes a full send buffer writable again.
    for _ in 0..80 {
        client.take(4 << 10).unwrap();
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn setup_heap(mut setup: Setup) -> u64 {
    setup.daemon.process().heap().unwrap()
}

#[test]
fn a_client_that_reads_a_complete_response_and_stays_holds_no_lease() {
    let setup = Setup::http(Peer::serve);
    let mut client = setup.client();
    client.get("/a").unwrap();
    setup.idle(1);
    assert_eq!(setup.serving(), 0);
    assert_eq!(client.get("/b").unwrap().text(), "0 /b");
}

#[test]
fn closing_is_the_clients_wish_not_the_origins() {
    let setup = Setup::http(Peer::serve);
    for request in [
        "GET /a HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n",
        "GET /a HTTP/1.1\r\nHost: test\r\nconnection:Close\r\n\r\n",
        "GET /a HTTP/1.1\r\nConnection: foo, close\r\nHost: test\r\n\r\n",
        "GET /a HTTP/1.0\r\nHost: test\r\n\r\n",
    ] {
        let mut client = setup.client();
        client.send(request).unwrap();
        assert_eq!(client.response().unwrap().text(), "0 /a", "{request:?}");
        assert!(client.is_closed_within(SOON).unwrap(), "{request:?}");
        setup.idle(1);
    }
    assert_eq!(setup.origin.accepted(), 1);
    let received = setup.origin.connection(0).received_text().to_ascii_lowercase();
    assert!(!received.contains("close"), "the origin would close after: {received}");
}

#[test]
fn an_http_1_0_client_that_asks_for_keep_alive_gets_its_answers() {
    let setup = Setup::http(Peer::serve);
    let mut client = setup.client();
    client.send("GET /a HTTP/1.0\r\nHost: test\r\nConnection: keep-alive\r\n\r\n").unwrap();
    assert_eq!(client.response().unwrap().text(), "0 /a");
    setup.idle(1);
    assert_eq!(setup.serving(), 0);
}

/// An origin that answers a POST as soon as it has its head, and keeps the connection.
fn refuses_bodies(response: &'static str) -> Setup {
    Setup::http(move |peer| {
        while let Some(head) = peer.head()? {
            if head.starts_with("POST") {
                peer.send(response)?;
            } else {
                peer.respond(format!("{} /probe", peer.index()))?;
            }
        }
        Ok(())
    })
}

#[test]
fn a_request_behind_the_last_response_is_not_answered_by_a_reset() {
    let setup = Setup::http(|peer| {
        peer.request()?;
        peer.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi")
    });
    let mut client = setup.client();
    client.send("GET /last HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    assert_eq!(client.response().unwrap().text(), "hi");
    assert!(client.is_closed_within(SOON).unwrap());
    // A client that sends ahead learns of the end only now. A reset might overtake the response.
    client.send("GET /ahead HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    client.half_close().unwrap();
    eventually(SOON, "the session is over", || {
        setup.daemon.service().is_ok_and(|service| service.clients_open == 0)
    });
    assert_eq!(client.stream().take_error().unwrap().map(|e| e.to_string()), None);
    assert_eq!(setup.origin.received_count("/ahead"), 0);
}

#[test]
fn an_early_response_is_forwarded_and_the_socket_closed() {
    let setup = refuses_bodies("HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno");
    let mut client = setup.client();
    client
        .send("POST /upload HTTP/1.1\r\nHost: test\r\nContent-Length: 1000000\r\n\r\npartial")
        .unwrap();
    assert_eq!(client.response().unwrap().status, 413);
    // The rest of the body must not be taken for a request by anybody.
    client.send("GET /probe HTTP/1.1\r\nHost: test\r\n\r\n").ok();
    drop(client);
    setup.settled();
    assert_eq!(setup.serving(), 1);
}

#[test]
fn a_refused_expectation_closes_the_socket() {
    let setup = refuses_bodies("HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n");
    let mut client = setup.client();
    client
        .send("POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        .unwrap();
    assert_eq!(client.response().unwrap().status, 417);
    drop(client);
    setup.settled();
    assert_eq!(setup.serving(), 1);
}

#[test]
fn an_accepted_expectation_is_an_ordinary_exchange() {
    let setup = Setup::http(|peer| {
        while let Some(head) = peer.head()? {
            if head.contains("Expect") {
                peer.send("HTTP/1.1 100 Continue\r\n\r\n")?;
                peer.take(4)?;
            }
            peer.respond(format!("{} /probe", peer.index()))?;
        }
        Ok(())
    });
    let mut client = setup.client();
    client
        .send("POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        .unwrap();
    assert_eq!(client.head().unwrap().status, 100);
    client.send("body").unwrap();
    assert_eq!(client.response().unwrap().text(), "0 /probe");
    setup.idle(1);
    assert_eq!(setup.serving(), 0);
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let setup = Setup::http(Peer::serve);
    let mut client = setup.client();
    let all: Vec<_> = (0..5).map(|i| format!("GET /{i} HTTP/1.1\r\nHost: test\r\n\r\n")).collect();
    client.send(all.concat()).unwrap();
    for i in 0..5 {
        let text = client.response().unwrap().text();
        assert!(text.ends_with(&format!(" /{i}")), "{text}");
    }
}

#[test]
fn a_dribbled_request_works() {
    let setup = Setup::http(Peer::serve);
    let mut client = setup.client();
    client.dribble("GET /slowly HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    assert_eq!(client.response().unwrap().text(), "0 /slowly");
    client.dribble("POST /p HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
    client.dribble("3;x=y\r\nabc\r\n0\r\n\r\n").unwrap();
    assert_eq!(client.response().unwrap().text(), "0 /p");
    setup.idle(1);
}

#[test]
fn an_endless_head_does_not_fill_the_memory() {
    let mut setup = Setup::http(Peer::wait_closed);
    let mut client = setup.client();
    client.send("GET / HTTP/1.1\r\nHost: test\r\nX: ").unwrap();
    client.stream().set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    // Ends by refusal, by back-pressure, or when an opaque tunnel has taken it all.
    let block = vec![b'x'; 1 << 20];
    for _ in 0..64 {
        if client.stream().write_all(&block).is_err() {
            break;
        }
    }
    let heap = setup.daemon.process().heap().unwrap();
    assert!(heap < 40 << 20, "{heap} bytes");
}

#[test]
fn a_client_that_half_closes_gets_its_whole_response() {
    let setup = Setup::http(|peer| {
        while let Some(request) = peer.request()? {
            let body = format!("{} {}", peer.index(), request.target());
            peer.respond(format!(
                "{body}{}",
                if request.target() == "/large" { "x".repeat(1 << 20) } else { String::new() }
            ))?;
        }
        Ok(())
    });
    let mut client = setup.client();
    client.send("GET /large HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    client.half_close().unwrap();
    let response = client.response().unwrap();
    assert_eq!(response.body.len(), (1 << 20) + "0 /large".len());
    assert!(client.is_closed_within(SOON).unwrap());
    setup.settled();
    setup.serving();
}

#[test]
fn a_reset_by_the_client_ends_the_origin_side_promptly() {
    let (ended, end) = mpsc::channel();
    let setup = Setup::http(move |peer| {
        peer.request()?;
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nbegun")?;
        peer.wait_closed().ok();
        ended.send(()).ok();
        Ok(())
    });
    let mut client = setup.client();
    client.send("GET / HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    client.head().unwrap();
    client.reset().unwrap();
    end.recv_timeout(Duration::from_secs(2)).expect("the origin's connection has ended");
    setup.settled();
}

#[test]
fn an_idle_client_is_closed_in_time() {
    let setup =
        Service { timeouts: "client_idle = \"300ms\"", ..Service::default() }.start(Peer::serve);
    let mut silent = setup.client();
    let mut served = setup.client();
    served.get("/a").unwrap();
    for client in [&mut silent, &mut served] {
        assert!(client.is_closed_within(SOON).unwrap());
    }
}

#[test]
fn cancelled_clients_leave_no_slot_taken() {
    let setup = Service { limits: "max_connections = 2\nmax_pending = 64", ..Service::default() }
        .start(|peer| {
            while let Some(request) = peer.request()? {
                std::thread::sleep(Duration::from_millis(5));
                peer.respond(format!("{} {}", peer.index(), request.target()))?;
            }
            Ok(())
        });
    // Leave at every stage: before, while and after connecting to the origin, waiting, sending,
    // receiving. Where exactly is left to chance, many times over.
    for turn in 0..300_u64 {
        let mut client = setup.client();
        client.send("GET /cancelled HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        if turn % 3 > 0 {
            std::thread::sleep(Duration::from_micros(turn * 37 % 9000));
        }
        if turn % 2 == 0 { client.reset().unwrap() } else { drop(client) }
    }
    let totals = setup.settled();
    assert!(totals.idle <= 2, "{totals:?}");
    eventually(SOON, "nobody waits", || setup.daemon.service().unwrap().waiting == 0);
    // Both slots are usable again, at the same time.
    let mut both = [setup.client(), setup.client()];
    for client in &mut both {
        client.send("GET /x HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    }
    for client in &mut both {
        assert!(client.response().unwrap().text().ends_with(" /x"));
    }
    let totals = setup.settled();
    assert_eq!(totals.created, totals.idle + totals.evicted, "{totals:?}");
}

#[test]
fn a_connection_that_says_nothing_costs_the_origin_nothing() {
    let setup = Setup::http(Peer::serve);
    let mut clients: Vec<Client> = (0..10).map(|_| setup.client()).collect();
    assert!(clients[0].is_silent_for(SILENCE).unwrap());
    drop(clients);
    assert!(within(SOON, || setup.daemon.service().unwrap().clients_open == 0));
    assert_eq!(setup.origin.accepted(), 0);
}
