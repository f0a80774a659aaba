//! One line per case.

use super::WhyNot::{
    Body, Chunked, Close, Fields, Informational, Large, Method, NoLength, Odd, Partial, Pipelined,
    SplitHead, TooLong,
};
use super::*;

#[track_caller]
fn request(bytes: &str) -> Result<PlainRequest, WhyNot> {
    let whole = scan_request(bytes.as_bytes());
    // No message is plain before its end.
    for len in 0..bytes.len() {
        assert!(scan_request(&bytes.as_bytes()[..len]).is_err(), "{len} of {bytes:?}");
    }
    whole
}

/// The response to a GET.
fn response(bytes: &str) -> Result<PlainResponse, WhyNot> {
    scan_response(bytes.as_bytes(), false, 1 << 20)
}

/// What a GET with these fields is.
fn get(fields: &str) -> Result<(), WhyNot> {
    request(&format!("GET / HTTP/1.1\r\n{fields}\r\n")).map(drop)
}

/// What a response with these fields is.
fn ok(fields: &str) -> Result<(), WhyNot> {
    response(&format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n{fields}\r\n")).map(drop)
}

#[test]
fn reasons_are_numbered_in_order_and_named_apart() {
    for (number, why) in WhyNot::ALL.into_iter().enumerate() {
        assert_eq!(why as usize, number);
        assert_eq!(WhyNot::ALL.iter().filter(|w| w.name() == why.name()).count(), 1);
    }
}

#[test]
fn scanners_fit_a_programs_stack() {
    assert!(size_of::<RequestScan>() <= 64, "{}", size_of::<RequestScan>());
    assert!(size_of::<ResponseScan>() <= 64, "{}", size_of::<ResponseScan>());
}

#[test]
fn plain_requests() {
    for (bytes, head_len, head_only, idempotent) in [
        ("GET / HTTP/1.1\r\n\r\n", 18, false, true),
        ("HEAD /a?b=c&d HTTP/1.1\r\nHost: a\r\n\r\n", 35, true, true),
        ("OPTIONS * HTTP/1.1\r\n\r\n", 22, false, true),
        ("DELETE http://a/ HTTP/1.1\r\n\r\n", 29, false, true),
        ("PUT / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 37, false, true),
        ("POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 38, false, false),
        ("POST / HTTP/1.1\r\ncontent-length:4\r\n\r\n\r\n\r\n", 37, false, false),
    ] {
        assert_eq!(
            request(bytes),
            Ok(PlainRequest { head_len, head_only, idempotent }),
            "{bytes:?}"
        );
    }
}

#[test]
fn request_lines() {
    for (line, why) in [
        ("PATCH / HTTP/1.1", Method),
        ("TRACE / HTTP/1.1", Method),
        ("CONNECT a:1 HTTP/1.1", Method),
        ("GETT / HTTP/1.1", Method),
        ("AGET / HTTP/1.1", Method),
        ("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAGET / HTTP/1.1", Method),
        ("GET / HTTP/1.0", Close),
        ("PATCH / HTTP/1.0", Close),
        ("get / HTTP/1.1", Odd),
        ("Get / HTTP/1.1", Odd),
        ("G(T / HTTP/1.1", Odd),
        (" GET / HTTP/1.1", Odd),
        (" / HTTP/1.1", Odd),
        ("GET  / HTTP/1.1", Odd),
        ("GET  HTTP/1.1", Odd),
        ("GET /  HTTP/1.1", Odd),
        ("GET / HTTP/1.1 ", Odd),
        ("GET / a HTTP/1.1", Odd),
        ("GET\t/ HTTP/1.1", Odd),
        ("GET /\t HTTP/1.1", Odd),
        ("GET /\u{e9} HTTP/1.1", Odd),
        ("GET /\x7f HTTP/1.1", Odd),
        ("GET /\0 HTTP/1.1", Odd),
        ("GET / HTTP/1.2", Odd),
        ("GET / HTTP/2.0", Odd),
        ("GET / http/1.1", Odd),
        ("GET / HTTP/1.10", Odd),
        ("GET / XHTTP/1.1", Odd),
        ("GET / \0\0HTTP/1.1", Odd),
        ("GET / 0123456789abcdef01234567HTTP/1.1", Odd),
        ("GET /", Odd),
        ("GET", Odd),
        ("", Odd),
        ("\r\nGET / HTTP/1.1", Odd),
        ("\x16\x03\x01", Odd),
    ] {
        assert_eq!(request(&format!("{line}\r\n\r\n")), Err(why), "{line:?}");
    }
}

#[test]
fn lines() {
    for (bytes, why) in [
        // Line ends.
        ("GET / HTTP/1.1\n\r\n", Odd),
        ("GET / HTTP/1.1\r\r\n\r\n", Odd),
        ("GET / HTTP/1.1\rHost: a\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\n\n", Odd),
        ("GET / HTTP/1.1\r\n\rX", Odd),
        ("GET / HTTP/1.1\r\nA: b\n\r\n", Odd),
        ("GET / HTTP/1.1\r\nA: b\rc\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\nA: b\r\r\n\r\n", Odd),
        // Names.
        ("GET / HTTP/1.1\r\n: b\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\nA : b\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\n A: b\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\nA: b\r\n\tc: d\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\nA\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\nA(: b\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\nA\0: b\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\n\u{e9}: b\r\n\r\n", Odd),
        // Control bytes in values.
        ("GET / HTTP/1.1\r\nA: \0\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\nA: \x0b\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\nA: \x7f\r\n\r\n", Odd),
        // Ends.
        ("", Partial),
        ("GET", Partial),
        ("GET / HTTP/1.1\r\n\r", Partial),
        ("GET / HTTP/1.1\r\nA: b\r\n", Partial),
        ("GET / HTTP/1.1\r\n\r\n\r\n", Pipelined),
        ("GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n", Pipelined),
        ("POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\nhe", Pipelined),
        ("POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n", Partial),
        ("POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhell", Partial),
    ] {
        assert_eq!(scan_request(bytes.as_bytes()), Err(why), "{bytes:?}");
    }
    assert_eq!(get("A:\r\nB: \t\u{e9} \"\u{80}\r\n!#$%&'*+-.^_`|~:::\r\n"), Ok(()));
    assert_eq!(response("HTTP/1.1 200\nContent-Length: 0\n\n"), Err(Odd));
}

#[test]
fn heads_are_bounded() {
    let field = |len: usize| format!("A: {}\r\n", "b".repeat(len - 5));
    let rest = "GET / HTTP/1.1\r\n\r\n".len();
    let max = HEAD_BYTES_MAX as usize;
    let scan = |len| {
        scan_request(format!("GET / HTTP/1.1\r\n{}\r\n", field(len - rest)).as_bytes()).map(drop)
    };
    assert_eq!(scan(max), Ok(()));
    assert_eq!(scan(max + 1), Err(TooLong));
    assert_eq!(scan_request("A".repeat(max + 1).as_bytes()), Err(TooLong));
    assert_eq!(scan_request("A".repeat(max).as_bytes()), Err(Partial));
}

#[test]
fn request_bodies() {
    for (bytes, why) in [
        ("POST / HTTP/1.1\r\n\r\n", Body),
        ("PUT / HTTP/1.1\r\n\r\n", Body),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", Body),
        ("POST / HTTP/1.1\r\nContent-Length: 0\r\nTransfer-Encoding:\r\n\r\n", Body),
        ("GET / HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\n", Body),
        ("GET / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", Body),
        ("HEAD / HTTP/1.1\r\nContent-Length: 1\r\n\r\nx", Body),
        ("OPTIONS / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", Body),
        ("DELETE / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", Body),
        ("POST / HTTP/1.1\r\nX-Content-Length: 0\r\n\r\n", Body),
        ("POST / HTTP/1.1\r\nContent-Lengt: 0\r\n\r\n", Body),
        // Names that would be lengths elsewhere.
        ("POST / HTTP/1.1\r\nContent_Length: 0\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\ncontent_length: 0\r\n\r\n", Odd),
        ("GET / HTTP/1.1\r\ntransfer_encoding: chunked\r\n\r\n", Odd),
    ] {
        assert_eq!(request(bytes), Err(why), "{bytes:?}");
    }
}

#[test]
fn content_lengths() {
    let value = |value: &str| {
        let bytes = format!("POST / HTTP/1.1\r\nContent-Length:{value}\r\n\r\nhello");
        scan_request(bytes.as_bytes()).map(drop)
    };
    assert_eq!([value("5"), value(" 5"), value("   5  ")], [Ok(()); 3]);
    for odd in [
        "",
        " ",
        "x",
        "05",
        "005",
        "00",
        "+5",
        "-5",
        "5,5",
        "5, 5",
        "5 5",
        "\t5",
        "5\t",
        " \t5",
        "0x5",
        "5.0",
        "5;",
        "\"5\"",
        "5\u{e9}",
        "1e0",
        "5_",
        "1000000000000000000000005",
        "18446744073709551621",
    ] {
        assert_eq!(value(odd), Err(Odd), "{odd:?}");
    }
    assert_eq!(value("0"), Err(Pipelined));
    assert_eq!(value("4"), Err(Pipelined));
    assert_eq!(value("6"), Err(Partial));
    // 2^32 and 2^64 more than 5.
    assert_eq!(value("4294967301"), Err(Partial));
    assert_eq!(value("999999999999999999"), Err(Partial));
    // Twice.
    assert_eq!(value("5\r\nContent-Length: 5"), Err(Odd));
    assert_eq!(value("5\r\ncontent-length: 6"), Err(Odd));
    assert_eq!(value("5\r\nCONTENT_LENGTH: 5"), Err(Odd));
}

#[test]
fn connection_options() {
    for plain in ["keep-alive", "Keep-Alive", "KEEP-ALIVE  ", "\t keep-alive\t"] {
        assert_eq!(get(&format!("Connection:{plain}\r\n")), Ok(()), "{plain:?}");
        assert_eq!(ok(&format!("CONNECTION:{plain}\r\n")), Ok(()), "{plain:?}");
    }
    for (value, why) in [
        ("close", Close),
        (" Close ", Close),
        ("TE, close", Close),
        ("close,TE", Close),
        ("keep-alive\r\nConnection: close", Close),
        ("keep-alive, close", Close),
        (" ,close", Close),
        ("", Fields),
        (" ", Fields),
        (",", Fields),
        ("keep-alive,", Fields),
        (",keep-alive", Fields),
        ("keep-alive, keep-alive", Fields),
        ("keep-alive\r\nConnection: TE", Fields),
        ("Upgrade", Fields),
        ("TE", Fields),
        ("Content-Length", Fields),
        ("keep-alive x", Fields),
        ("keep -alive", Fields),
        ("keep_alive", Fields),
        ("keep-alivex", Fields),
        ("xkeep-alive", Fields),
        ("\u{e9}keep-alive", Fields),
        ("01234567890123456789keep-alive", Fields),
        ("clo se", Fields),
        ("closed", Fields),
        ("\"close\"", Fields),
    ] {
        assert_eq!(get(&format!("Connection:{value}\r\n")), Err(why), "{value:?}");
        assert_eq!(ok(&format!("connection:{value}\r\n")), Err(why), "{value:?}");
    }
    assert_eq!(get("Connection: keep-alive\r\nConnection: keep-alive\r\n"), Ok(()));
    assert_eq!(get("X-Connection: close\r\nonnection: close\r\n"), Ok(()));
    assert_eq!(get("Connection_: close\r\n"), Ok(()));
    // The commonest reason is told before vaguer ones, but not of what cannot be read.
    for rest in ["Expect: x\r\n", "Transfer-Encoding: chunked\r\n", "Content-Length: 7\r\n"] {
        assert_eq!(get(&format!("Connection: close\r\n{rest}")), Err(Close), "{rest:?}");
        assert_eq!(get(&format!("{rest}Connection: close\r\n")), Err(Close), "{rest:?}");
    }
    assert_eq!(get("Connection: close\r\nA\r\n"), Err(Odd));
}

#[test]
fn fields_that_are_never_plain() {
    for field in ["Expect: 100-continue", "eXpect:", "Upgrade: websocket", "UPGRADE: h2c"] {
        assert_eq!(get(&format!("{field}\r\n")), Err(Fields), "{field:?}");
        assert_eq!(ok(&format!("{field}\r\n")), Err(Fields), "{field:?}");
    }
    for field in ["X-Expect: 1", "Expected: 1", "Upgrade-Insecure-Requests: 1", "TE: trailers"] {
        assert_eq!(get(&format!("{field}\r\n")), Ok(()), "{field:?}");
    }
}

#[test]
fn credentials_and_challenges() {
    for (value, authorization, challenge) in [
        ("Basic dXNlcjpwYXNz==", Ok(()), Ok(())),
        ("bearer abc.def-ghi", Ok(()), Ok(())),
        (" \tBEARER\tabc", Ok(()), Ok(())),
        ("Basic", Ok(()), Ok(())),
        ("Basic realm=\"a, b\", charset=\"UTF-8\"", Ok(()), Ok(())),
        ("Digest realm=\"a\"", Err(Fields), Ok(())),
        ("Basic realm=\"a\", Digest b=c", Ok(()), Ok(())),
        ("NTLM", Err(Fields), Err(Fields)),
        ("ntlm TlRMTVNTUAAB", Err(Fields), Err(Fields)),
        ("Negotiate YII=", Err(Fields), Err(Fields)),
        ("Kerberos x", Err(Fields), Err(Fields)),
        ("AWS4-HMAC-SHA256 a=b", Err(Fields), Err(Fields)),
        ("", Err(Fields), Err(Fields)),
        ("Basicx a", Err(Fields), Err(Fields)),
        ("xBasic a", Err(Fields), Err(Fields)),
        ("abcdefghijklmnopqrstuvwxBasic a", Err(Fields), Err(Fields)),
        ("\"Basic\"", Err(Fields), Err(Fields)),
        (",Basic", Err(Fields), Err(Fields)),
        // Another challenge in the list; as a parameter it costs a detour.
        ("Basic realm=\"a\", Negotiate", Err(Fields), Err(Fields)),
        ("Basic,NTLM", Err(Fields), Err(Fields)),
        ("Basic realm=\"ntlm\"", Err(Fields), Err(Fields)),
        ("Basic realm=\"ntlmx\"", Ok(()), Ok(())),
    ] {
        for name in ["Authorization", "proxy-authorization"] {
            let field = format!("{name}:{value}\r\n");
            assert_eq!((get(&field), ok(&field)), (authorization, authorization), "{field:?}");
        }
        for name in ["WWW-Authenticate", "Proxy-Authenticate"] {
            let field = format!("{name}:{value}\r\n");
            assert_eq!((get(&field), ok(&field)), (challenge, challenge), "{field:?}");
        }
    }
}

#[test]
fn plain_responses() {
    for (bytes, total, status) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 40, 200),
        // The body need not be there, and what follows it is not looked at.
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", 40, 200),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok\0\n", 40, 200),
        ("HTTP/1.1 404\r\nContent-Length: 0\r\n\r\n", 35, 404),
        ("HTTP/1.1 404 \r\nContent-Length: 0\r\n\r\n", 36, 404),
        ("HTTP/1.1 599 \u{e9}\t x\r\nContent-Length: 0\r\n\r\n", 41, 599),
        ("HTTP/1.1 204 No Content\r\n\r\n", 27, 204),
        ("HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", 46, 204),
        ("HTTP/1.1 304 Not Modified\r\n\r\n", 29, 304),
        ("HTTP/1.1 304 N\r\nContent-Length: 999999999999\r\n\r\n", 48, 304),
    ] {
        let expected = PlainResponse { total, status, origin_idle_s: 0 };
        assert_eq!(response(bytes), Ok(expected), "{bytes:?}");
    }
    let head = "HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n";
    let expected = PlainResponse { total: 49, status: 200, origin_idle_s: 0 };
    assert_eq!(scan_response(head.as_bytes(), true, 100), Ok(expected));
    let head = "HTTP/1.1 200 OK\r\n\r\n";
    let expected = PlainResponse { total: 19, status: 200, origin_idle_s: 0 };
    assert_eq!(scan_response(head.as_bytes(), true, 100), Ok(expected));
}

#[test]
fn responses_that_are_not_plain() {
    for (bytes, why) in [
        ("", SplitHead),
        ("HTTP/1.1 2", SplitHead),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r", SplitHead),
        ("HTTP/1.1 200 OK\r\n\r\n", NoLength),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", Chunked),
        ("HTTP/1.1 304 N\r\nTransfer-Encoding: chunked\r\n\r\n", Chunked),
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nTransfer-Encoding: x\r\n\r\n", Chunked),
        ("HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", Close),
        ("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n", Close),
        ("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", Close),
        ("HTTP/1.1 100 Continue\r\n\r\n", Informational),
        ("HTTP/1.1 101 Switching Protocols\r\nUpgrade: a\r\n\r\n", Informational),
        ("HTTP/1.1 199\r\nContent-Length: 0\r\n\r\n", Informational),
        ("HTTP/1.1 204 N\r\nContent-Length: 1\r\n\r\n", Odd),
        ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", Odd),
        ("HTTP/1.1 304 N\r\nContent-Length: 01\r\n\r\n", Odd),
        ("HTTP/1.1 200 OK\r\nContent_Length: 1\r\n\r\n", Odd),
        ("HTTP/1.1 200 OK\r\nContent-Length: 4294967296\r\n\r\n", Large),
        ("HTTP/1.1 200 OK\r\nContent-Length: 999999999999999999\r\n\r\n", Large),
    ] {
        assert_eq!(response(bytes), Err(why), "{bytes:?}");
    }
    let bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n";
    assert!(scan_response(bytes, false, 40).is_ok());
    assert_eq!(scan_response(bytes, false, 39), Err(Large));
}

#[test]
fn status_lines() {
    for line in [
        "",
        "HTTP/1.1",
        "HTTP/1.1 ",
        "HTTP/1.1 2",
        "HTTP/1.1 20",
        "HTTP/1.1 2000",
        "HTTP/1.1 099",
        "HTTP/1.1 0200",
        "HTTP/1.1 600",
        "HTTP/1.1 999",
        "HTTP/1.1  200",
        "HTTP/1.1 200\tOK",
        "HTTP/1.1 200-OK",
        "HTTP/1.1 2x0",
        "HTTP/1.1 +20",
        "HTTP/1.1\t200",
        "HTTP/1.2 200",
        "HTTP/2 200",
        "http/1.1 200",
        "HTTP/1.1200",
        " HTTP/1.1 200",
        "\r\nHTTP/1.1 200",
        "xHTTP/1.1 200",
        "\0HTTP/1.1 200",
        "HTTP/1.1 200 \0",
        "HTTP/1.1 200 \x7f",
        "ICY 200 OK",
    ] {
        let bytes = format!("{line}\r\nContent-Length: 0\r\n\r\n");
        assert_eq!(response(&bytes), Err(Odd), "{line:?}");
    }
}

#[test]
fn idle_timeouts() {
    let idle = |fields: &str| {
        response(&format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n{fields}\r\n"))
            .map(|response| response.origin_idle_s)
    };
    for (value, seconds) in [
        ("timeout=5", 5),
        (" timeout=5 ", 5),
        ("\tTimeout=65, max=100", 65),
        ("timeout=5,max=1", 5),
        ("timeout=5 , a, b", 5),
        ("timeout=007", 7),
        ("timeout=5,", 5),
        ("timeout=999999999", 999_999_999),
    ] {
        assert_eq!(idle(&format!("Keep-Alive:{value}\r\n")), Ok(seconds), "{value:?}");
    }
    for value in [
        "",
        "5",
        "timeout",
        "timeout=",
        "timeout=,",
        "timeout=0",
        "timeout=-5",
        "timeout=+5",
        "timeout= 5",
        "timeout =5",
        "timeout=5s",
        "timeout=5 5",
        "timeout=5;max=1",
        "timeout=\"5\"",
        "max=100, timeout=5",
        "max=100",
        "xtimeout=5",
        "timeout=5, timeout=3",
        "timeout=5,Timeout=3",
        "timeout=5\r\nKeep-Alive: timeout=5",
        "timeout=5\r\nKeep-Alive: max=3",
        "timeout=4294967301",
        "timeout=18446744073709551621",
        "\"timeout=5\"",
    ] {
        assert_eq!(idle(&format!("Keep-Alive:{value}\r\n")), Err(Fields), "{value:?}");
    }
    assert_eq!(idle(""), Ok(0));
    assert_eq!(idle("Keep_Alive: timeout=5\r\n"), Err(Odd));
    // A request's says nothing.
    assert_eq!(get("Keep-Alive: 115\r\n"), Ok(()));
}

/// What a scanner says does not change after it said that it is over.
#[test]
fn over_means_over() {
    for bytes in ["GET / HTTP/1.1\r\n\r\n", "get / HTTP/1.1\r\n\r\n"] {
        let mut scan = RequestScan::default();
        for byte in bytes.bytes() {
            scan.push(byte);
        }
        let before = scan.finish(18);
        assert!(scan.is_over());
        for &byte in b"GET / HTTP/1.1\r\nA: b\r\n\r\n" {
            scan.push(byte);
        }
        assert_eq!(scan.finish(18), before);
    }
}
