//! Whole exchanges, one line per case.

use std::time::Duration;

use super::*;

const GET: &str = "GET / HTTP/1.1\r\n\r\n";
const GET10: &str = "GET / HTTP/1.0\r\n\r\n";
const KEEP10: &str = "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n";
const CLOSE: &str = "GET / HTTP/1.1\r\nConnection: close\r\n\r\n";
const HEAD: &str = "HEAD / HTTP/1.1\r\n\r\n";
const CONNECT: &str = "CONNECT a:1 HTTP/1.1\r\n\r\n";
const UPGRADE: &str = "GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
const EXPECT: &str = "POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n";
const POST: &str = "POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

const CONTINUES: bool = true;
const ENDS: bool = false;

use CloseReason as R;
use Verdict::{Close, Return};

/// Plays a request (head, and body if it is there) and then the response; the first `own` bytes of
/// the latter belong to the exchange. `client` says whether the client's connection goes on.
#[track_caller]
fn check(request: &str, response: &str, own: usize, verdict: Verdict, client: bool) -> Exchange {
    let read = head(request.as_bytes());
    let mut exchange = Exchange::new(&read);
    let body = &request.as_bytes()[read.len..];
    assert_eq!(exchange.request_body(body).take, body.len(), "{request:?}");
    assert!(!exchange.response_started());
    let step = exchange.response(response.as_bytes());
    let case = format!("{request:?} -> {response:?}");
    assert_eq!(step.forward, own, "forwarded, {case}");
    assert_eq!(exchange.verdict(), verdict, "{case}: {exchange:?}");
    assert_eq!(exchange.client_persists(), client, "client, {case}: {exchange:?}");
    assert!(exchange.response_started());
    exchange
}

/// All of the response belongs to the exchange.
#[track_caller]
fn all(request: &str, response: &str, verdict: Verdict, client: bool) -> Exchange {
    check(request, response, response.len(), verdict, client)
}

#[test]
fn plain_responses() {
    all(GET, OK, Return, CONTINUES);
    all(GET, "HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", Return, CONTINUES);
    all(GET, "HTTP/1.1 200 \r\nContent-Length: 0\r\n\r\n", Return, CONTINUES);
    all(GET, "HTTP/1.1 599 \u{e9}\tx\r\nContent-Length: 0\r\n\r\n", Return, CONTINUES);
    all(GET, "HTTP/1.1 404 No\r\nContent-Length: 3\r\nConnection: x\r\n\r\nno!", Return, CONTINUES);
    let exchange = all(&format!("{POST}hello"), OK, Return, CONTINUES);
    assert_eq!(exchange.status(), Some(200));
}

#[test]
fn interim_responses_are_not_the_end() {
    let (c, p, h) = (
        "HTTP/1.1 100 Continue\r\n\r\n",
        "HTTP/1.1 102 P\r\n\r\n",
        "HTTP/1.1 103 H\r\nLink: a\r\n\r\n",
    );
    all(GET, &format!("{c}{OK}"), Return, CONTINUES);
    all(GET, &format!("{h}{h}{p}{c}{c}{OK}"), Return, CONTINUES);
    all(GET, &format!("HTTP/1.1 100 C\r\nContent-Length: 0\r\n\r\n{OK}"), Return, CONTINUES);
    all(GET, c, Close(R::NoBoundary), ENDS);
    // Unknown ones, or with a body that they must not have: forwarded, not trusted.
    all(GET, &format!("HTTP/1.1 104 X\r\n\r\n{OK}"), Close(R::AmbiguousResponse), ENDS);
    let with_body = format!("HTTP/1.1 103 X\r\nContent-Length: 5\r\n\r\n{OK}");
    all(GET, &with_body, Close(R::AmbiguousResponse), ENDS);
    let with_body = format!("HTTP/1.1 100 X\r\nTransfer-Encoding: chunked\r\n\r\n{OK}");
    all(GET, &with_body, Close(R::AmbiguousResponse), ENDS);
    // A long row of them is no reason to give up, nor to remember them.
    let exchange = all(GET, &format!("{}{OK}", h.repeat(10_000)), Return, CONTINUES);
    assert_eq!(exchange.status(), Some(200));
}

#[test]
fn tunnels() {
    let switch = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n";
    for (request, response, reason) in [
        (UPGRADE, format!("{switch}\x01\x02 anything"), R::Tunnel),
        (UPGRADE, format!("HTTP/1.1 103 H\r\n\r\n{switch}"), R::Tunnel),
        (GET, switch.to_owned(), R::Tunnel),
        (CONNECT, "HTTP/1.1 200 OK\r\n\r\n\x16\x03\x01".to_owned(), R::Tunnel),
        (CONNECT, "HTTP/1.1 204 OK\r\nContent-Length: 5\r\n\r\nhello you".to_owned(), R::Tunnel),
    ] {
        let mut exchange = all(request, &response, Close(reason), ENDS);
        let anything = b"HTTP/1.1 200 OK\r\n\0\r\n";
        let tunnel = Progress::Tunnel(reason);
        let step = exchange.response(anything);
        assert_eq!(step, ResponseStep { forward: anything.len(), state: tunnel });
        assert_eq!(
            exchange.request_body(anything),
            BodyStep { take: anything.len(), state: tunnel }
        );
        assert_eq!(exchange.response_eof(), ResponseEnd::Done);
        assert_eq!(exchange.verdict(), Close(reason));
    }
    // Refused ones are ordinary responses.
    all(CONNECT, "HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno", Return, CONTINUES);
    all(UPGRADE, OK, Return, CONTINUES);
    all(UPGRADE, "HTTP/1.1 426 Upgrade\r\nContent-Length: 2\r\n\r\nno", Return, CONTINUES);
}

#[test]
fn bytes_after_the_end_reach_nobody() {
    for (request, response) in [
        (GET, OK),
        (GET, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        (GET, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"),
        (GET, "HTTP/1.1 304 N\r\nContent-Length: 5\r\n\r\n"),
        (HEAD, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"),
    ] {
        for junk in [OK, "\r\n", "x", "\0", "HTTP/1.1 408 Timeout\r\n\r\n"] {
            let bytes = format!("{response}{junk}");
            check(request, &bytes, response.len(), Close(R::Unsolicited), CONTINUES);
            let mut exchange = all(request, response, Return, CONTINUES);
            let step = exchange.response(junk.as_bytes());
            assert_eq!(step, ResponseStep { forward: 0, state: Progress::Done });
            assert_eq!(exchange.verdict(), Close(R::Unsolicited), "{response:?} {junk:?}");
        }
    }
}

#[test]
fn origin_persistence() {
    let closes = Close(R::OriginPersistence);
    for (request, fields, verdict, client) in [
        (GET, "1.1 200 OK\r\nConnection: close", closes, ENDS),
        (GET, "1.1 200 OK\r\nconnection: x , CLOSE", closes, ENDS),
        (GET, "1.1 200 OK\r\nConnection: keep-alive\r\nConnection: close", closes, ENDS),
        (GET, "1.1 200 OK\r\nConnection: (close)", closes, ENDS),
        (GET, "1.0 200 OK", closes, ENDS),
        (GET, "1.0 200 OK\r\nConnection: keep-alive", Return, CONTINUES),
        (GET, "1.0 200 OK\r\nConnection: keep-alive, close", closes, ENDS),
        // The client asks to close: its connection ends, the origin's does not.
        (CLOSE, "1.1 200 OK", Return, ENDS),
        (CLOSE, "1.1 200 OK\r\nConnection: close", closes, ENDS),
        (GET10, "1.1 200 OK\r\nConnection: keep-alive", Return, ENDS),
        (GET10, "1.0 200 OK\r\nConnection: keep-alive", Return, ENDS),
        (GET10, "1.0 200 OK", closes, ENDS),
        // Whether a 1.1 origin keeps the connection of a 1.0 request is known only if it says so.
        (GET10, "1.1 200 OK", closes, ENDS),
        (KEEP10, "1.1 200 OK", closes, ENDS),
        (KEEP10, "1.1 200 OK\r\nConnection: keep-alive", Return, CONTINUES),
        (KEEP10, "1.0 200 OK\r\nConnection: Keep-Alive", Return, CONTINUES),
        // The origin is asked to close, because the request could not be edited.
        ("GET / HTTP/1.1\r\nConnection: close, close\r\n\r\n", "1.1 200 OK", closes, ENDS),
    ] {
        let response = format!("HTTP/{fields}\r\nContent-Length: 2\r\n\r\nok");
        all(request, &response, verdict, client);
    }
}

#[test]
fn the_last_response_announces_the_end() {
    let interim = "HTTP/1.1 103 Early Hints\r\nConnection: keep-alive\r\n\r\n";
    for (request, fields, announced) in [
        (GET, "1.1 200 OK\r\nA: b", "1.1 200 OK\r\nA: b\r\nContent-Length: 2\r\nConnection: close"),
        (
            GET,
            "1.1 200 OK\r\nConnection:  keep-alive \r\nA: b",
            "1.1 200 OK\r\nConnection:  close \r\nA: b\r\nContent-Length: 2",
        ),
        (
            GET,
            "1.1 200 OK\r\nconnection: Keep-Alive, x",
            "1.1 200 OK\r\nconnection: close, x\r\nContent-Length: 2",
        ),
        (
            KEEP10,
            "1.0 200 OK\r\nConnection: keep-alive",
            "1.0 200 OK\r\nConnection: close\r\nContent-Length: 2",
        ),
    ] {
        for before in ["", interim] {
            let response = format!("{before}HTTP/{fields}\r\nContent-Length: 2\r\n\r\nok");
            let mut exchange = all(request, &response, Return, CONTINUES);
            let mut buffer = [response.as_bytes(), &[b'?'; Edit::GROWTH_MAX]].concat();
            let edit = exchange.end_connection().unwrap();
            let len = edit.apply(&mut buffer, response.len());
            let expected = format!("{before}HTTP/{announced}\r\n\r\nok");
            assert_eq!(String::from_utf8_lossy(&buffer[..len]), expected);
            // The client's connection ends, the origin's does not.
            assert_eq!((exchange.verdict(), exchange.client_persists()), (Return, false));
        }
    }
}

#[test]
fn an_end_that_comes_anyway_or_too_late_is_not_announced() {
    for (request, response) in [
        (CLOSE, OK),
        (GET, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"),
        (GET, "HTTP/1.1 200 OK\r\n\r\nok"),
        (KEEP10, OK),
        (UPGRADE, "HTTP/1.1 101 Switching Protocols\r\n\r\n"),
        (CONNECT, "HTTP/1.1 200 OK\r\n\r\n"),
    ] {
        let mut exchange = Exchange::new(&head(request.as_bytes()));
        exchange.response(response.as_bytes());
        assert_eq!(exchange.end_connection(), None, "{request:?} {response:?}");
    }
    // A part of the head, or all of it, is on its way already.
    let late = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n";
    for cut in 1..=late.len() {
        let mut exchange = Exchange::new(&head(GET.as_bytes()));
        exchange.response(&late.as_bytes()[..cut]);
        exchange.response(&[&late.as_bytes()[cut..], b"body"].concat());
        assert_eq!(exchange.end_connection(), None, "{cut}");
        assert!(exchange.client_persists());
    }
}

#[test]
fn responses_without_a_body() {
    for (request, head, verdict, client) in [
        (HEAD, "1.1 200 OK\r\nContent-Length: 500", Return, CONTINUES),
        (HEAD, "1.1 200 OK\r\nTransfer-Encoding: chunked", Return, CONTINUES),
        (HEAD, "1.1 200 OK", Return, CONTINUES),
        (HEAD, "1.0 200 OK\r\nConnection: keep-alive", Return, CONTINUES),
        (HEAD, "1.1 404 No\r\nContent-Length: 500", Return, CONTINUES),
        (GET, "1.1 304 N\r\nContent-Length: 500", Return, CONTINUES),
        (GET, "1.1 304 N\r\nTransfer-Encoding: chunked", Return, CONTINUES),
        (GET, "1.1 304 N", Return, CONTINUES),
        (GET, "1.1 204 N", Return, CONTINUES),
        (GET, "1.1 204 N\r\nContent-Length: 0", Return, CONTINUES),
        // Must not say so: perhaps a body follows after all.
        (GET, "1.1 204 N\r\nContent-Length: 5", Close(R::AmbiguousResponse), ENDS),
        (GET, "1.1 204 N\r\nTransfer-Encoding: chunked", Close(R::AmbiguousResponse), ENDS),
        // A 205 is not one of them, whatever it ought to be.
        (GET, "1.1 205 R\r\nContent-Length: 0", Return, CONTINUES),
    ] {
        all(request, &format!("HTTP/{head}\r\n\r\n"), verdict, client);
    }
}

#[test]
fn body_until_close() {
    for (request, head) in [
        (GET, "HTTP/1.1 200 OK\r\n\r\n"),
        (GET, "HTTP/1.0 200 OK\r\n\r\n"),
        (KEEP10, "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n"),
    ] {
        let mut exchange = all(request, head, Close(R::NoBoundary), ENDS);
        let more = exchange.response(b"HTTP/1.1 200 OK\r\n\r\n");
        assert_eq!(more, ResponseStep { forward: 19, state: Progress::More });
        assert_eq!(exchange.response_eof(), ResponseEnd::Done);
        assert_eq!(exchange.verdict(), Close(R::BodyUntilClose));
        assert!(!exchange.client_persists());
    }
}

#[test]
fn chunked_responses() {
    let start = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let whole = format!("{start}5;a=\"b\"\r\nhello\r\n0;c\r\nX-Trailer: d\r\n\r\n");
    all(GET, &whole, Return, CONTINUES);
    for bad in ["5 \r\nhello", "5\nhello", "5\r\nhello0\r\n", "g\r\n", "0\r\nContent-Length: 1\r\n"]
    {
        all(GET, &format!("{start}{bad}"), Close(R::AmbiguousResponse), ENDS);
    }
    // Chunking must not answer HTTP/1.0; its end is known, its client needs the close.
    let kept =
        "HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    all(KEEP10, kept, Close(R::AmbiguousResponse), ENDS);
}

#[test]
fn ambiguous_responses_become_tunnels() {
    for head in [
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 0x5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: identity, chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: xchunked\r\n\r\n",
        "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 5\r\n\r\n",
        "HTTP/1.1 200 OK\nContent-Length: 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\n\n",
        "HTTP/1.1 200 OK\r\nX: \0\r\n\r\n",
        "HTTP/1.1 204 N\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        "HTTP/1.1 101 S\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 99 X\r\n\r\n",
        "HTTP/1.1 099 X\r\n\r\n",
        "HTTP/1.1 600 X\r\n\r\n",
        "HTTP/1.1 2000 X\r\n\r\n",
        "HTTP/1.1  200 X\r\n\r\n",
        "HTTP/1.1 20x X\r\n\r\n",
        "HTTP/1.2 200 OK\r\n\r\n",
        "HTTP/2 200\r\n\r\n",
        "ICY 200 OK\r\n\r\n",
        "http/1.1 200 OK\r\n\r\n",
        "\r\nHTTP/1.1 200 OK\r\n\r\n",
        " HTTP/1.1 200 OK\r\n\r\n",
        "<html>",
        "220 mail ready\r\n",
        "x",
        "\0",
    ] {
        let bytes = format!("{head}whatever\0 follows\n");
        let mut exchange = all(GET, &bytes, Close(R::AmbiguousResponse), ENDS);
        assert_eq!(exchange.response(b"more").forward, 4);
        assert_eq!(exchange.request_body(b"more").take, 4);
        assert_eq!(exchange.response_eof(), ResponseEnd::Done);
    }
}

#[test]
fn response_heads_are_bounded() {
    let frame = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: \r\n\r\n".len();
    for (len, verdict, client) in [
        (HEAD_BYTES_MAX, Return, CONTINUES),
        (HEAD_BYTES_MAX + 1, Close(R::AmbiguousResponse), ENDS),
    ] {
        let filler = "a".repeat(len - frame);
        let bytes = format!("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX: {filler}\r\n\r\n");
        all(GET, &bytes, verdict, client);
    }
}

/// The final response comes while the request is still being sent.
#[test]
fn early_responses() {
    // Nothing of the body was sent, after an Expect or without.
    for request in [EXPECT, POST, "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel"] {
        all(request, "HTTP/1.1 417 No\r\nContent-Length: 0\r\n\r\n", Close(R::EarlyResponse), ENDS);
    }
    // The request ends between the response's head and its end, or within its head.
    for cut in [1, 20, OK.len() - 1, OK.len()] {
        let mut exchange = Exchange::new(&head(POST.as_bytes()));
        assert_eq!(exchange.request_body(b"hell").state, Progress::More);
        assert_eq!(exchange.response(&OK.as_bytes()[..cut]).forward, cut);
        assert_eq!(exchange.request_body(b"oGET"), BodyStep { take: 1, state: Progress::Done });
        assert_eq!(exchange.response(&OK.as_bytes()[cut..]).state, Progress::Done);
        assert_eq!(exchange.verdict(), Close(R::EarlyResponse), "cut at {cut}");
        assert!(!exchange.client_persists());
    }
    // An interim response before the body is how Expect works.
    let mut exchange = Exchange::new(&head(EXPECT.as_bytes()));
    assert_eq!(exchange.response(b"HTTP/1.1 100 C\r\n\r\n").state, Progress::More);
    assert!(!exchange.final_head_seen());
    assert_eq!(exchange.request_body(b"hello").state, Progress::Done);
    assert_eq!(exchange.response(OK.as_bytes()).state, Progress::Done);
    assert!(exchange.final_head_seen());
    assert_eq!((exchange.verdict(), exchange.client_persists()), (Return, CONTINUES));
}

/// The request turns out to be badly chunked while it is sent: both directions are a tunnel.
#[test]
fn bad_request_body_makes_a_tunnel() {
    let mut exchange =
        Exchange::new(&head(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"));
    let tunnel = Progress::Tunnel(R::AmbiguousRequest);
    assert_eq!(exchange.request_body(b"3\r\nabc\r\n").state, Progress::More);
    assert_eq!(exchange.request_body(b"zzz\r\n"), BodyStep { take: 5, state: tunnel });
    assert_eq!(exchange.response(OK.as_bytes()), ResponseStep { forward: OK.len(), state: tunnel });
    assert_eq!(exchange.verdict(), Close(R::AmbiguousRequest));
}

/// The same, once the response is complete: nothing that follows passes to the client.
#[test]
fn bad_request_body_after_the_response() {
    let mut exchange =
        Exchange::new(&head(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"));
    assert_eq!(exchange.response(OK.as_bytes()).state, Progress::Done);
    assert_eq!(exchange.request_body(b"zzz\r\n"), BodyStep { take: 5, state: Progress::More });
    let step = exchange.response(OK.as_bytes());
    assert_eq!(step, ResponseStep { forward: 0, state: Progress::Done });
    assert_eq!(exchange.verdict(), Close(R::Unsolicited));
    assert!(!exchange.request_done() && !exchange.client_persists());
}

#[test]
fn truncated_responses() {
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n";
    for whole in [OK, chunked] {
        for cut in 0..whole.len() {
            let mut exchange = Exchange::new(&head(GET.as_bytes()));
            assert_eq!(exchange.response(&whole.as_bytes()[..cut]).forward, cut);
            assert_eq!(exchange.verdict(), Close(R::NoBoundary), "cut at {cut}");
            assert_eq!(exchange.response_eof(), ResponseEnd::Truncated, "cut at {cut}");
            assert_eq!(exchange.verdict(), Close(R::Truncated), "cut at {cut}");
            assert!(!exchange.client_persists());
            assert_eq!(exchange.response_started(), cut > 0);
        }
        // A close right after the end: the client has everything, the socket is gone.
        let mut exchange = all(GET, whole, Return, CONTINUES);
        assert_eq!(exchange.response_eof(), ResponseEnd::Done);
        assert_eq!(exchange.verdict(), Close(R::OriginPersistence));
        assert!(exchange.client_persists());
    }
}

#[test]
fn connection_authentication_ties() {
    let tied = Close(R::ConnectionAuth);
    let close = Close(R::OriginPersistence);
    for (request, fields, verdict, client) in [
        (GET, "401 U\r\nWWW-Authenticate: Basic realm=\"a\"", Return, CONTINUES),
        (GET, "401 U\r\nWWW-Authenticate: Negotiate", tied, CONTINUES),
        (GET, "401 U\r\nwww-authenticate: ntlm TlRM", tied, CONTINUES),
        (GET, "401 U\r\nWWW-Authenticate: Basic realm=\"a\", NTLM", tied, CONTINUES),
        (GET, "401 U\r\nWWW-Authenticate: Basic\r\nWWW-Authenticate: Negotiate", tied, CONTINUES),
        (GET, "407 U\r\nProxy-Authenticate: Negotiate", tied, CONTINUES),
        // The last step of a mutual authentication.
        (GET, "200 OK\r\nWWW-Authenticate: Negotiate oYG", tied, CONTINUES),
        // A stronger reason wins: this one is not even for the same client.
        (GET, "401 U\r\nConnection: close\r\nWWW-Authenticate: NTLM", close, ENDS),
        ("GET / HTTP/1.1\r\nAuthorization: NTLM a\r\n\r\n", "200 OK", tied, CONTINUES),
        ("GET / HTTP/1.1\r\nAuthorization: Basic a\r\n\r\n", "200 OK", Return, CONTINUES),
    ] {
        let response = format!("HTTP/1.1 {fields}\r\nContent-Length: 2\r\n\r\nno");
        let exchange = all(request, &response, verdict, client);
        assert_eq!(exchange.ties_to_client(), verdict != Return, "{fields:?}");
    }
}

#[test]
fn doubtful_requests_cost_their_socket_only() {
    let get = "GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello";
    all(get, OK, Close(R::AmbiguousRequest), CONTINUES);
}

#[test]
fn idle_timeout_is_learnt() {
    for (fields, seconds) in [
        ("Keep-Alive: timeout=5", Some(5)),
        ("keep-alive: max=100, Timeout=75", Some(75)),
        ("Keep-Alive: timeout=0", Some(0)),
        ("Keep-Alive: timeout=9\r\nKeep-Alive: timeout=3", Some(3)),
        ("Keep-Alive: timeout=", None),
        ("Keep-Alive: timeout=x", None),
        ("Keep-Alive: timeout=99999999999", None),
        ("Keep-Alive: 5", None),
        ("X: timeout=5", None),
    ] {
        let response = format!("HTTP/1.1 200 OK\r\n{fields}\r\nContent-Length: 0\r\n\r\n");
        let exchange = all(GET, &response, Return, CONTINUES);
        assert_eq!(exchange.origin_idle_timeout(), seconds.map(Duration::from_secs), "{fields:?}");
    }
}
