//! Where a response ends, and whether its socket serves the next client.

use std::io;

use harness::origin::scripted::Peer;

use crate::support::Setup;

/// What must become of the origin socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Socket {
    Reused,
    Closed,
    /// Both are right; what matters is that the next client is in step.
    Either,
}

use Socket::{Closed, Either, Reused};

/// How the origin sends its response.
#[derive(Clone, Copy)]
enum Manner {
    AtOnce,
    ByteByByte,
    ThenClose,
}

use Manner::{AtOnce, ByteByByte, ThenClose};

/// Sends `request`, has the origin answer `response`, and expects the client to get exactly
/// `expected` and the socket to be treated as told.
#[track_caller]
fn check_exactly(
    request: &str,
    response: &'static str,
    expected: &str,
    manner: Manner,
    socket: Socket,
) {
    let setup = Setup::http(move |peer| script(peer, response, manner));
    let mut client = setup.client();
    client.send(request).unwrap();
    let got = client.take(expected.len()).unwrap();
    assert_eq!(String::from_utf8_lossy(&got), expected);
    let rest = client.is_silent_for(std::time::Duration::from_millis(50)).unwrap()
        || client.to_end().is_ok_and(|rest| rest.is_empty());
    assert!(rest, "the client got more than {expected:?}");
    drop(client);
    setup.settled();
    let serving = setup.serving();
    match socket {
        Reused => assert_eq!(serving, 0, "after {response:?}"),
        Closed => assert_eq!(serving, 1, "after {response:?}"),
        Either => {}
    }
    assert_eq!(setup.serving(), serving, "the socket of a plain exchange is reused");
}

fn script(peer: &mut Peer, response: &str, manner: Manner) -> io::Result<()> {
    while let Some(request) = peer.request()? {
        if request.target() == "/probe" {
            peer.respond(format!("{} /probe", peer.index()))?;
            continue;
        }
        match manner {
            AtOnce => peer.send(response)?,
            ByteByByte => peer.dribble(response)?,
            ThenClose => {
                peer.send(response)?;
                return Ok(());
            }
        }
    }
    Ok(())
}

/// The same for a GET whose response is passed on as it is.
#[track_caller]
fn check(response: &'static str, socket: Socket) {
    check_exactly(GET, response, response, AtOnce, socket);
}

const GET: &str = "GET /case HTTP/1.1\r\nHost: test\r\n\r\n";
const HEAD: &str = "HEAD /case HTTP/1.1\r\nHost: test\r\n\r\n";

#[test]
fn plain_responses_leave_the_socket_clean() {
    check("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", Reused);
    check("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Reused);
    check_exactly(
        GET,
        "HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno",
        "HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno",
        ByteByByte,
        Reused,
    );
}

#[test]
fn interim_responses_are_not_the_end() {
    check(
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\n\
         Link: </a>\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\n\
         Content-Length: 2\r\n\r\nok",
        Reused,
    );
}

#[test]
fn an_origin_that_says_close_is_not_reused() {
    let close = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok";
    check(close, Closed);
    check_exactly(GET, close, close, ThenClose, Closed);
    check("HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", Closed);
}

#[test]
fn responses_without_a_body_are_followed_in_step() {
    for response in [
        "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    ] {
        check_exactly(HEAD, response, response, AtOnce, Reused);
    }
    check("HTTP/1.1 204 No Content\r\n\r\n", Reused);
    check("HTTP/1.1 304 Not Modified\r\nContent-Length: 1000\r\n\r\n", Reused);
    // These lengths should not be there at all.
    check("HTTP/1.1 204 No Content\r\nContent-Length: 1000\r\n\r\n", Either);
    check("HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n", Either);
    check("HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n", Either);
}

#[test]
fn a_body_that_ends_with_the_connection_is_delivered_in_full() {
    let response = "HTTP/1.1 200 OK\r\n\r\nall of this, to the end";
    check_exactly(GET, response, response, ThenClose, Closed);
}

#[test]
fn chunked_bodies_pass_unchanged() {
    let response = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n\
                    5;ext=\"a b\";x\r\nhello\r\nA\r\n0123456789\r\n0\r\nX: 1\r\n\r\n";
    check(response, Reused);
    check_exactly(GET, response, response, ByteByByte, Reused);
}

#[test]
fn bytes_after_the_end_reach_nobody() {
    let own = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    for response in [
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokJUNK",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\
         \r\nevil",
    ] {
        check_exactly(GET, response, own, AtOnce, Closed);
    }
}

#[test]
fn responses_with_two_readings_are_not_reused() {
    for headers in [
        "Content-Length: 2\r\nTransfer-Encoding: chunked",
        "Content-Length: 2\r\nContent-Length: 3",
        "Content-Length: +2",
        "Content-Length: 2, 2, 3",
        "Content-Length: 0x2",
        "Content-Length: 99999999999999999999999",
        "Content-Length: -1",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: identity, chunked",
        "Transfer-Encoding: chunked, gzip",
        "Content-Length : 2",
        "X: a\r\n folded\r\nContent-Length: 2",
        "X: a\nContent-Length: 2",
        "X: a\0b\r\nContent-Length: 2",
    ] {
        let response: &'static str = format!("HTTP/1.1 200 OK\r\n{headers}\r\n\r\nok").leak();
        check_exactly(GET, response, response, ThenClose, Closed);
    }
    for body in ["g\r\nok\r\n0\r\n\r\n", "2 \nok\r\n0\r\n\r\n", "-2\r\nok\r\n", "2\r\nokX\r\n"] {
        let response: &'static str =
            format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{body}").leak();
        check_exactly(GET, response, response, ThenClose, Closed);
    }
}

#[test]
fn requests_with_two_readings_never_share_a_socket() {
    // The hidden request is what an attacker would have the origin read as another client's.
    let hidden = "GET /hidden HTTP/1.1\r\nHost: test\r\n\r\n";
    for headers in [
        "Content-Length: 0\r\nTransfer-Encoding: chunked",
        "Content-Length: 0\r\nContent-Length: 37",
        "Content-Length: +0",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding : chunked",
        "X: a\r\n folded",
        "X: a\nContent-Length: 37",
        "X: a\0",
    ] {
        let setup = Setup::http(|peer| {
            // Whatever comes, an origin that reads it in some way answers once and goes on.
            while let Some(head) = peer.head()? {
                let target = head.split(' ').nth(1).unwrap_or("").to_owned();
                peer.respond(format!("{} {target}", peer.index()))?;
            }
            Ok(())
        });
        let mut evil = setup.client();
        evil.send(format!("POST /case HTTP/1.1\r\nHost: test\r\n{headers}\r\n\r\n{hidden}"))
            .unwrap();
        // The victim comes while the attacker's connection is open, and after it.
        let during = setup.get("/victim");
        drop(evil);
        setup.settled();
        let after = setup.get("/victim");
        for text in [during, after] {
            assert!(text.ends_with(" /victim"), "{text:?} after {headers:?}");
            let index = text.split(' ').next().unwrap().parse().unwrap();
            let received = setup.origin.connection(index).received_text();
            assert!(!received.contains("/case"), "shared a socket after {headers:?}");
        }
    }
}

#[test]
fn errors_with_bodies_are_ordinary_responses() {
    check("HTTP/1.1 426 Upgrade Required\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nno", Reused);
    check(
        "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm=\"x\"\r\n\
         Content-Length: 2\r\n\r\nno",
        Reused,
    );
}

#[test]
fn authentication_of_a_connection_ties_the_socket_to_its_client() {
    for scheme in ["NTLM", "Negotiate", "negotiate oRQwEqADCgEA", "Basic realm=\"x\", NTLM"] {
        let challenge: &'static str = format!(
            "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: {scheme}\r\n\
             Content-Length: 2\r\n\r\nno"
        )
        .leak();
        check(challenge, Closed);
    }
    // The client itself goes on with the same socket, for as long as it lives.
    let setup = Setup::http(|peer| {
        script(
            peer,
            "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: NTLM\r\nContent-Length: 0\r\n\r\n",
            AtOnce,
        )
    });
    let mut client = setup.client();
    assert_eq!(client.get("/case").unwrap().status, 401);
    assert_eq!(setup.serving(), 1, "another client is served by another socket");
    assert_eq!(client.get("/probe").unwrap().text(), "0 /probe");
}
