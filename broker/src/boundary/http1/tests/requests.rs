//! Request heads and request bodies, one line per case.

use super::super::Framing::{Chunked, Length, None as NoBody};
use super::*;

const AMBIGUOUS: RequestStep = RequestStep::Tunnel(CloseReason::AmbiguousRequest);

/// Reads field lines under a POST.
fn post(fields: &str) -> RequestStep {
    RequestReader::default().read(format!("POST / HTTP/1.1\r\n{fields}\r\n").as_bytes())
}

#[test]
fn plain_framing() {
    for (fields, framing) in [
        ("", NoBody),
        ("Host: a\r\nX-Empty:\r\nX-Tab:\ta\tb\r\nX-Utf8: \u{e9}\r\n", NoBody),
        ("Content-Length: 0\r\n", Length(0)),
        ("Content-Length: 5\r\n", Length(5)),
        ("content-length:5\r\n", Length(5)),
        ("CONTENT-LENGTH:   5  \r\n", Length(5)),
        ("Content-Length: 9223372036854775807\r\n", Length(i64::MAX as u64)),
        ("Transfer-Encoding: chunked\r\n", Chunked),
        ("transfer-encoding:CHUNKED\r\n", Chunked),
        ("TE: trailers\r\nConnection: TE\r\n", NoBody),
        ("X-Content-Length: 5\r\n", NoBody),
    ] {
        match post(fields) {
            RequestStep::Head(head) => assert_eq!(head.framing, framing, "{fields:?}"),
            other => panic!("{other:?} for {fields:?}"),
        }
    }
}

#[test]
fn fields_with_more_than_one_reading() {
    for fields in [
        // Both framings.
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
        // Several lengths, equal or not.
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 5\r\nContent-Length: 5\r\n",
        "Content-Length: 5, 5\r\n",
        "Content-Length: 5,\r\n",
        // Not a plain number.
        "Content-Length: +5\r\n",
        "Content-Length: -5\r\n",
        "Content-Length: 0x5\r\n",
        "Content-Length: 5.0\r\n",
        "Content-Length: 5 5\r\n",
        "Content-Length: \"5\"\r\n",
        "Content-Length: 05\r\n",
        "Content-Length: 00\r\n",
        "Content-Length:\r\n",
        "Content-Length: \r\n",
        "Content-Length: \u{ff15}\r\n",
        // Overflow of signed and unsigned 64 bits, and of anything.
        "Content-Length: 9223372036854775808\r\n",
        "Content-Length: 18446744073709551621\r\n",
        "Content-Length: 99999999999999999999999999\r\n",
        // White space that some readers strip and some keep.
        "Content-Length:\t5\r\n",
        "Content-Length: 5\t\r\n",
        "Content-Length: \u{b}5\r\n",
        "Content-Length: \u{a0}5\r\n",
        "Content-Length : 5\r\n",
        "Content-Length\t: 5\r\n",
        " Content-Length: 5\r\n",
        "X: a\r\n Content-Length: 5\r\n",
        "Transfer-Encoding:\u{b}chunked\r\n",
        "Transfer-Encoding:\tchunked\r\n",
        "Transfer-Encoding: chunked\t\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Transfer-Encoding\u{a0}: chunked\r\n",
        // Codings other than chunked alone.
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: identity, chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: chunked;q=1\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: chunkedx\r\n",
        "Transfer-Encoding: 'chunked'\r\n",
        "Transfer-Encoding: ,chunked\r\n",
        "Transfer-Encoding:\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        // Names that become framing names, or framing that an intermediary would take away.
        "Content_Length: 5\r\n",
        "Transfer_Encoding: chunked\r\n",
        "transfer_encoding: chunked\r\n",
        "Connection: close, Content-Length\r\n",
        "Connection: Transfer-Encoding\r\n",
        // Folded lines.
        "X: a\r\n b\r\n",
        "X: a\r\n\tb\r\n",
        "Transfer-Encoding:\r\n chunked\r\n",
        " X: a\r\n",
        // Bare LF, bare CR, NUL and other controls.
        "X: a\nContent-Length: 5\r\n",
        "X: a\n\r\n",
        "X: a\n\n",
        "X: a\rb\r\n",
        "X: a\r\r\n",
        "X: a\r\rContent-Length: 5\r\n",
        "X: a\0b\r\n",
        "X\0: a\r\n",
        "X: \u{1b}[0m\r\n",
        "X: \u{7f}\r\n",
        // No proper name.
        ": a\r\n",
        "X : a\r\n",
        "X\r\n",
        "X Y: a\r\n",
        "X(Y): a\r\n",
        "\u{e9}: a\r\n",
    ] {
        assert_eq!(post(fields), AMBIGUOUS, "{fields:?}");
    }
}

#[test]
fn request_lines() {
    for (line, method) in [
        ("GET / HTTP/1.1", Method::Get),
        ("HEAD /a?b=c#d HTTP/1.1", Method::Head),
        ("OPTIONS * HTTP/1.1", Method::Options),
        ("TRACE / HTTP/1.1", Method::Trace),
        ("PUT /%00 HTTP/1.1", Method::Put),
        ("DELETE http://a/b HTTP/1.1", Method::Delete),
        ("POST / HTTP/1.0", Method::Post),
        ("CONNECT a:443 HTTP/1.1", Method::Connect),
        ("PATCH / HTTP/1.1", Method::Other),
        ("M-SEARCH * HTTP/1.1", Method::Other),
        ("UPDATEREDIRECTREF / HTTP/1.1", Method::Other),
    ] {
        assert_eq!(head(format!("{line}\r\n\r\n").as_bytes()).method, method, "{line}");
    }
    for line in [
        // Another version, or none.
        "GET / HTTP/1.2",
        "GET / HTTP/0.9",
        "GET / HTTP/2.0",
        "GET / HTTP/11",
        "GET / HTTP/1.10",
        "GET / http/1.1",
        "GET /",
        "PRI * HTTP/2.0",
        // White space that readers disagree on.
        "GET  / HTTP/1.1",
        "GET / HTTP/1.1 ",
        " GET / HTTP/1.1",
        "GET /a b HTTP/1.1",
        "GET\t/\tHTTP/1.1",
        "GET /\u{85} HTTP/1.1",
        "GET  HTTP/1.1",
        "GET /\u{1} HTTP/1.1",
        // Methods that are no tokens, or that a careless origin reads as another.
        "get / HTTP/1.1",
        "Head / HTTP/1.1",
        "GE(T / HTTP/1.1",
        "A2345678901234567890123456789012X / HTTP/1.1",
        "",
    ] {
        let bytes = format!("{line}\r\n\r\n");
        assert_eq!(RequestReader::default().read(bytes.as_bytes()), AMBIGUOUS, "{line:?}");
    }
    for bytes in [
        "\r\nGET / HTTP/1.1\r\n\r\n",
        "\nGET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\n\r\n",
        "GET / HTTP/1.1\r\n\n",
        "GET / HTTP/1.1\rX: a\r\n\r\n",
        "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
        "CONNECT a:1 HTTP/1.1\r\nContent-Length: 5\r\n\r\n",
        "CONNECT a:1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ] {
        assert_eq!(RequestReader::default().read(bytes.as_bytes()), AMBIGUOUS, "{bytes:?}");
    }
}

/// A client of another protocol waits for an answer: it must not be held until a line end comes.
#[test]
fn other_protocols_are_known_early() {
    for (bytes, expected) in [
        (&b"\x16\x03\x01\x02\x00"[..], AMBIGUOUS),
        (b"\0", AMBIGUOUS),
        (b"*1\r\n", AMBIGUOUS),
        (b"PRI * HTTP/2.0\r\n", AMBIGUOUS),
        (b"EHLO me\r\n", AMBIGUOUS),
        (b"\r", AMBIGUOUS),
        (b"\r\n", AMBIGUOUS),
        (b" ", AMBIGUOUS),
        (b"stats", AMBIGUOUS),
        (b"{\"", AMBIGUOUS),
        (b"A2345678901234567890123456789012", RequestStep::Incomplete),
        (b"A2345678901234567890123456789012X", AMBIGUOUS),
        (b"", RequestStep::Incomplete),
        (b"GET", RequestStep::Incomplete),
        (b"GET /\x01", AMBIGUOUS),
        (b"GET / HTTP/1.1\r", RequestStep::Incomplete),
        (b"GET / HTTP/1.1\r\nX: \0", AMBIGUOUS),
        (b"GET / HTTP/1.1\r\n\r", RequestStep::Incomplete),
        (b"GET / HTTP/1.1\r\n\rX", AMBIGUOUS),
    ] {
        assert_eq!(RequestReader::default().read(bytes), expected, "{:?}", bytes.escape_ascii());
    }
}

#[test]
fn head_size_is_bounded() {
    let with_len = |len: usize| {
        let frame = "GET / HTTP/1.1\r\nX: \r\n\r\n".len();
        format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "a".repeat(len - frame))
    };
    assert_eq!(head(with_len(HEAD_BYTES_MAX).as_bytes()).len, HEAD_BYTES_MAX);
    assert_eq!(RequestReader::default().read(with_len(HEAD_BYTES_MAX + 1).as_bytes()), AMBIGUOUS);
    let endless = vec![b'A'; HEAD_BYTES_MAX];
    let mut bytes = b"GET /".to_vec();
    bytes.extend(&endless);
    assert_eq!(RequestReader::default().read(&bytes[..HEAD_BYTES_MAX]), RequestStep::Incomplete);
    assert_eq!(RequestReader::default().read(&bytes[..=HEAD_BYTES_MAX]), AMBIGUOUS);
}

/// What a client asks of its connection, and the head that the origin gets instead.
#[test]
fn persistence_and_its_edit() {
    for (version, fields, persists, origin_persists, sent) in [
        ("1.1", "", true, true, ""),
        ("1.1", "Connection: keep-alive\r\n", true, true, "Connection: keep-alive\r\n"),
        ("1.1", "Connection: Upgrade\r\n", true, true, "Connection: Upgrade\r\n"),
        ("1.1", "Connection: close\r\n", false, true, "Connection: keep-alive\r\n"),
        ("1.1", "connection:CLOSE\r\n", false, true, "connection:keep-alive\r\n"),
        ("1.1", "Connection: \t close \r\n", false, true, "Connection: \t keep-alive \r\n"),
        ("1.1", "Connection: TE, close\r\n", false, true, "Connection: TE, keep-alive\r\n"),
        ("1.1", "Connection: close ,TE\r\n", false, true, "Connection: keep-alive ,TE\r\n"),
        (
            "1.1",
            "A: b\r\nConnection: TE\r\nC: d\r\nConnection: close\r\nE: f\r\n",
            false,
            true,
            "A: b\r\nConnection: TE\r\nC: d\r\nConnection: keep-alive\r\nE: f\r\n",
        ),
        ("1.0", "", false, true, "Connection: keep-alive\r\n"),
        ("1.0", "Host: a\r\n", false, true, "Host: a\r\nConnection: keep-alive\r\n"),
        ("1.0", "Connection: close\r\n", false, true, "Connection: keep-alive\r\n"),
        ("1.0", "Connection: Keep-Alive\r\n", true, true, "Connection: Keep-Alive\r\n"),
        // Not a matter of one place: the origin may close.
        ("1.1", "Connection: close, close\r\n", false, false, "Connection: close, close\r\n"),
        (
            "1.1",
            "Connection: close, keep-alive\r\n",
            false,
            false,
            "Connection: close, keep-alive\r\n",
        ),
        (
            "1.1",
            "Connection: close\r\nConnection: close\r\n",
            false,
            false,
            "Connection: close\r\nConnection: close\r\n",
        ),
        ("1.1", "Connection: \"close\"\r\n", false, false, "Connection: \"close\"\r\n"),
        ("1.1", "Connection: close; a\r\n", false, false, "Connection: close; a\r\n"),
        ("1.0", "Connection: TE\r\n", false, false, "Connection: TE\r\n"),
        ("1.0", "Connection:\r\n", false, false, "Connection:\r\n"),
        // Looks like it, but is not.
        ("1.1", "Connection: closed\r\n", true, true, "Connection: closed\r\n"),
        ("1.1", "X-Connection: close\r\n", true, true, "X-Connection: close\r\n"),
    ] {
        let bytes = format!("GET / HTTP/{version}\r\n{fields}\r\n");
        let read = head(bytes.as_bytes());
        assert_eq!(read.client_persists, persists, "client, {version} {fields:?}");
        assert_eq!(read.origin_persists, origin_persists, "origin, {version} {fields:?}");
        let expected = format!("GET / HTTP/{version}\r\n{sent}\r\n");
        let sent = String::from_utf8(edited(bytes.as_bytes(), &read)).unwrap();
        assert_eq!(sent, expected, "{version} {fields:?}");
        // The edited head reads as persistent, and as the same request otherwise.
        let again = head(sent.as_bytes());
        assert_eq!(again.client_persists, origin_persists, "edited, {version} {fields:?}");
        assert_eq!((again.framing, again.method), (read.framing, read.method));
    }
}

#[test]
fn doubts_and_credentials() {
    for (bytes, doubtful, connection_auth) in [
        ("POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n", false, false),
        ("DELETE / HTTP/1.1\r\nContent-Length: 5\r\n\r\n", true, false),
        ("GET / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", false, false),
        ("GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\n", true, false),
        ("HEAD / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", true, false),
        ("POST / HTTP/1.1\r\nExpect: 100-Continue\r\n\r\n", false, false),
        ("POST / HTTP/1.1\r\nExpect: x 100-continue\r\n\r\n", true, false),
        ("GET / HTTP/1.1\r\nAuthorization: Basic TlRMTQ==\r\n\r\n", false, false),
        ("GET / HTTP/1.1\r\nAuthorization: Bearer ntlm\r\n\r\n", false, false),
        ("GET / HTTP/1.1\r\nAuthorization: NTLM TlRMTVNTUAAB\r\n\r\n", false, true),
        ("GET / HTTP/1.1\r\nauthorization: negotiate YII=\r\n\r\n", false, true),
        ("GET / HTTP/1.1\r\nProxy-Authorization: ntlm a\r\n\r\n", false, true),
    ] {
        let read = head(bytes.as_bytes());
        assert_eq!((read.doubtful, read.connection_auth), (doubtful, connection_auth), "{bytes:?}");
    }
}

#[test]
fn repeatable_methods() {
    let idempotent = [Method::Get, Method::Head, Method::Options, Method::Trace, Method::Put];
    assert!(idempotent.into_iter().chain([Method::Delete]).all(Method::is_idempotent));
    assert!(![Method::Post, Method::Connect, Method::Other].into_iter().any(Method::is_idempotent));
}

/// Chunked bodies, each followed by the next request of the same client.
#[test]
fn chunked_bodies() {
    let next = "GET / HTTP/1.1\r\n\r\n";
    for (body, whole) in [
        ("0\r\n\r\n", true),
        ("000\r\n\r\n", true),
        ("5\r\nhello\r\n0\r\n\r\n", true),
        ("5\r\nh\r\nlo\r\n0\r\n\r\n", true),
        ("a\r\n0123456789\r\n0A\r\n0123456789\r\n0\r\n\r\n", true),
        // Extensions by the book.
        ("1;a\r\nx\r\n0;b=c\r\n\r\n", true),
        ("1;a=\"b;\\\"\tc\";d=e\r\nx\r\n0\r\n\r\n", true),
        ("1 ; a = b\r\nx\r\n0\r\n\r\n", true),
        // Trailers.
        ("0\r\nA: b\r\nC:\r\n\r\n", true),
        // Bad sizes.
        ("\r\n\r\n", false),
        ("x\r\n\r\n", false),
        ("-1\r\n\r\n", false),
        ("+1\r\nx\r\n0\r\n\r\n", false),
        ("0x1\r\nx\r\n0\r\n\r\n", false),
        ("1_\r\nx\r\n0\r\n\r\n", false),
        (" 1\r\nx\r\n0\r\n\r\n", false),
        ("1 \r\nx\r\n0\r\n\r\n", false),
        ("1,2\r\nx\r\n0\r\n\r\n", false),
        ("100000000\r\nx\r\n0\r\n\r\n", false),
        ("10000000000000001\r\nx\r\n0\r\n\r\n", false),
        ("00000000000000001\r\nx\r\n0\r\n\r\n", false),
        // Extensions that readers skip by different rules.
        ("1;\r\nx\r\n0\r\n\r\n", false),
        ("1;a\nx\r\n0\r\n\r\n", false),
        ("1;a\rb\r\nx\r\n0\r\n\r\n", false),
        ("1;a=\"b\r\nx\r\n0\r\n\r\n", false),
        ("1;a=\"b\\\r\nx\r\n0\r\n\r\n", false),
        ("1;a=\r\nx\r\n0\r\n\r\n", false),
        ("1;a b\r\nx\r\n0\r\n\r\n", false),
        ("1;a \r\nx\r\n0\r\n\r\n", false),
        ("1;a\0\r\nx\r\n0\r\n\r\n", false),
        // Bare LF, or data that is longer or shorter than its size.
        ("1\nx\r\n0\r\n\r\n", false),
        ("1\r\nx\n0\r\n\r\n", false),
        ("1\r\nxy\r\n0\r\n\r\n", false),
        ("2\r\nx\r\n0\r\n\r\n", false),
        ("1\r\nx0\r\n\r\n", false),
        ("1\r\nx\rx0\r\n\r\n", false),
        // Trailers that are no fields, or that frame the message again.
        ("0\r\nA\r\n\r\n", false),
        ("0\r\n A: b\r\n\r\n", false),
        ("0\r\nA: b\n\r\n", false),
        ("0\r\n\n", false),
        ("0\r\nContent-Length: 5\r\n\r\n", false),
        ("0\r\nTransfer_Encoding: chunked\r\n\r\n", false),
    ] {
        let mut exchange =
            Exchange::new(&head(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"));
        let bytes = format!("{body}{next}");
        let expected = if whole {
            BodyStep { take: body.len(), state: Progress::Done }
        } else {
            let state = Progress::Tunnel(CloseReason::AmbiguousRequest);
            BodyStep { take: bytes.len(), state }
        };
        assert_eq!(exchange.request_body(bytes.as_bytes()), expected, "{body:?}");
        assert_eq!(exchange.request_done(), whole, "{body:?}");
    }
}

#[test]
fn chunk_lines_and_trailers_are_bounded() {
    for (body, bad) in [
        (format!("1;{}", "a".repeat(1022)), false),
        (format!("1;{}", "a".repeat(1023)), true),
        (format!("0\r\n{}", "A: b\r\n".repeat(HEAD_BYTES_MAX / 6)), false),
        (format!("0\r\n{}", "A: b\r\n".repeat(HEAD_BYTES_MAX / 6 + 1)), true),
    ] {
        let mut exchange =
            Exchange::new(&head(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"));
        let state = exchange.request_body(body.as_bytes()).state;
        assert_eq!(state != Progress::More, bad, "{} bytes", body.len());
    }
}
