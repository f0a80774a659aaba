//! The kernel's scanner and this reader agree on every message that the scanner calls plain.

use std::collections::HashSet;
use std::fmt::Debug;

use broker_ebpf::scan::{WhyNot, scan_request, scan_response};
use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::check::{plain_request, plain_response};
use super::splits::{damage, damaged};
use super::*;

const GET: &[u8] = b"GET / HTTP/1.1\r\n\r\n";
const HEAD: &[u8] = b"HEAD / HTTP/1.1\r\n\r\n";
const POST: &[u8] = b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello";
const LIMIT: u32 = 4096;

/// What clients send: curl, wrk, Go, Python's requests and aiohttp, Node's http and fetch, Java,
/// nginx and HAProxy to their upstreams, a browser.
const REQUESTS: [&str; 12] = [
    "GET / HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nUser-Agent: curl/8.14.1\r\nAccept: */*\r\n\r\n",
    "POST /v1 HTTP/1.1\r\nHost: a\r\nUser-Agent: curl/8.14.1\r\nAccept: */*\r\n\
     Content-Length: 7\r\nContent-Type: application/x-www-form-urlencoded\r\n\r\na=b&c=d",
    "GET /index.html HTTP/1.1\r\nHost: 10.0.0.1:80\r\n\r\n",
    "GET /x HTTP/1.1\r\nHost: a:80\r\nUser-Agent: Go-http-client/1.1\r\n\
     Accept-Encoding: gzip\r\n\r\n",
    "PUT /k HTTP/1.1\r\nHost: a\r\nUser-Agent: Go-http-client/1.1\r\nContent-Length: 2\r\n\
     Content-Type: application/json\r\nAccept-Encoding: gzip\r\n\r\n{}",
    "GET / HTTP/1.1\r\nHost: a\r\nUser-Agent: python-requests/2.32.3\r\n\
     Accept-Encoding: gzip, deflate\r\nAccept: */*\r\nConnection: keep-alive\r\n\
     Authorization: Basic dXNlcjpwYXNz\r\n\r\n",
    "POST / HTTP/1.1\r\nHost: a\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n\
     User-Agent: Python/3.13 aiohttp/3.12.15\r\nContent-Length: 8\r\n\
     Content-Type: application/json\r\n\r\n{\"a\": 1}",
    "GET /a?b=c HTTP/1.1\r\nAccept: application/json, text/plain, */*\r\n\
     Authorization: Bearer eyJhbGciOiJIUzI1NiJ9.e30.abc_-\r\nUser-Agent: axios/1.7.7\r\n\
     Accept-Encoding: gzip, compress, deflate, br\r\nHost: a:3000\r\n\
     Connection: keep-alive\r\n\r\n",
    "DELETE /1 HTTP/1.1\r\nhost: a\r\nconnection: keep-alive\r\naccept: */*\r\n\
     accept-language: *\r\nsec-fetch-mode: cors\r\nuser-agent: node\r\n\
     accept-encoding: gzip, deflate\r\n\r\n",
    "GET / HTTP/1.1\r\nUser-Agent: Java/21.0.4\r\nHost: a\r\n\
     Accept: text/html, image/gif, image/jpeg, */*; q=0.2\r\nConnection: keep-alive\r\n\r\n",
    "GET / HTTP/1.1\r\nX-Real-IP: 10.0.0.9\r\nX-Forwarded-For: 10.0.0.9\r\nHost: backend\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\nCache-Control: max-age=0\r\n\
     Upgrade-Insecure-Requests: 1\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64)\r\n\
     Accept: text/html,application/xhtml+xml;q=0.9,*/*;q=0.8\r\nSec-Fetch-Site: none\r\n\
     Accept-Encoding: gzip, deflate\r\nAccept-Language: en\r\nCookie: a=b; c=\"d\"\r\n\
     If-None-Match: W/\"5\"\r\n\r\n",
];

/// What servers answer, with the seconds of their `Keep-Alive`: nginx, HAProxy, Apache, gunicorn,
/// Node, Go, uvicorn, Tomcat.
const RESPONSES: [(&str, u32); 12] = [
    (
        "HTTP/1.1 200 OK\r\nServer: nginx/1.26.3\r\nDate: Mon, 30 Nov 2026 00:00:00 GMT\r\n\
         Content-Type: text/html\r\nContent-Length: 3\r\n\
         Last-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\nConnection: keep-alive\r\n\
         ETag: \"67a-3\"\r\nAccept-Ranges: bytes\r\n\r\nok\n",
        0,
    ),
    (
        "HTTP/1.1 304 Not Modified\r\nServer: nginx/1.26.3\r\n\
         Date: Mon, 30 Nov 2026 00:00:00 GMT\r\nConnection: keep-alive\r\n\
         ETag: \"67a-3\"\r\n\r\n",
        0,
    ),
    (
        "HTTP/1.1 200 OK\r\nServer: nginx\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\
         Connection: keep-alive\r\nKeep-Alive: timeout=20\r\n\r\nok",
        20,
    ),
    ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: text/plain\r\n\r\nok", 0),
    (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 107\r\ncache-control: no-cache\r\n\
         content-type: text/html\r\n\r\n<html><body><h1>503 Service Unavailable</h1>\nNo server is \
         available to handle this request.\n</body></html>\n",
        0,
    ),
    (
        "HTTP/1.1 200 OK\r\nDate: Mon, 30 Nov 2026 00:00:00 GMT\r\n\
         Server: Apache/2.4.65 (Debian)\r\nETag: \"2-63\"\r\nAccept-Ranges: bytes\r\n\
         Content-Length: 2\r\nKeep-Alive: timeout=5, max=100\r\nConnection: Keep-Alive\r\n\
         Content-Type: text/html\r\n\r\nok",
        5,
    ),
    (
        "HTTP/1.1 401 Unauthorized\r\nServer: Apache\r\nWWW-Authenticate: Basic realm=\"a b\"\r\n\
         Content-Length: 2\r\nKeep-Alive: timeout=5, max=99\r\nConnection: Keep-Alive\r\n\r\nno",
        5,
    ),
    (
        "HTTP/1.1 200 OK\r\nServer: gunicorn\r\nDate: Mon, 30 Nov 2026 00:00:00 GMT\r\n\
         Connection: keep-alive\r\nContent-Type: text/html; charset=utf-8\r\n\
         Content-Length: 2\r\n\r\nok",
        0,
    ),
    (
        "HTTP/1.1 200 OK\r\nX-Powered-By: Express\r\n\
         Content-Type: application/json; charset=utf-8\r\nContent-Length: 2\r\n\
         ETag: W/\"2-a\"\r\nDate: Mon, 30 Nov 2026 00:00:00 GMT\r\nConnection: keep-alive\r\n\
         Keep-Alive: timeout=5\r\n\r\n{}",
        5,
    ),
    (
        "HTTP/1.1 404 Not Found\r\nContent-Type: text/plain; charset=utf-8\r\n\
         X-Content-Type-Options: nosniff\r\nDate: Mon, 30 Nov 2026 00:00:00 GMT\r\n\
         Content-Length: 19\r\n\r\n404 page not found\n",
        0,
    ),
    (
        "HTTP/1.1 204 No Content\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n\r\n",
        0,
    ),
    (
        "HTTP/1.1 200 \r\nContent-Type: text/plain;charset=UTF-8\r\nContent-Length: 2\r\n\
         Date: Mon, 30 Nov 2026 00:00:00 GMT\r\nKeep-Alive: timeout=60\r\n\
         Connection: keep-alive\r\n\r\nok",
        60,
    ),
];

fn head_of(request: &[u8]) -> RequestHead {
    plain_request(request).expect("it is plain")
}

#[test]
fn common_messages_are_plain() {
    for request in REQUESTS {
        assert_eq!(scan_request(request.as_bytes()).err(), None, "{request:?}");
        plain_request(request.as_bytes());
    }
    for (response, idle_s) in RESPONSES {
        let plain = scan_response(response.as_bytes(), false, LIMIT);
        let told = plain.map(|plain| (plain.total as usize, plain.origin_idle_s));
        assert_eq!(told, Ok((response.len(), idle_s)), "{response:?}");
        plain_response(GET, &head_of(GET), response.as_bytes(), LIMIT);
    }
}

/// Nor are common ones that are not plain called odd.
#[test]
fn common_reasons_are_told() {
    for (request, why) in [
        // ab, and nginx to its upstreams unless told otherwise.
        (
            "GET / HTTP/1.0\r\nHost: a\r\nUser-Agent: ApacheBench/2.3\r\nAccept: */*\r\n\r\n",
            "close",
        ),
        ("GET / HTTP/1.0\r\nHost: backend\r\nConnection: close\r\n\r\n", "close"),
        // urllib, PHP.
        (
            "GET / HTTP/1.1\r\nAccept-Encoding: identity\r\nHost: a\r\nConnection: close\r\n\r\n",
            "close",
        ),
        // Java's newer client offers HTTP/2.
        (
            "GET / HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: a\r\n\
             HTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\nUser-Agent: Java-http-client/21\r\n\r\n",
            "fields",
        ),
        // curl with a body of more than 1 MiB.
        (
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2000000\r\nExpect: 100-continue\r\n\r\n",
            "fields",
        ),
        // Python's requests sends head and body apart.
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n", "partial"),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", "body"),
        ("PATCH / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", "method"),
    ] {
        let told = scan_request(request.as_bytes()).map_err(WhyNot::name);
        assert_eq!(told.err(), Some(why), "{request:?}");
    }
}

/// Names that mean something, or nearly, with values that they have, or nearly.
const MEANINGS: [(&[&str], &[&str]); 5] = [
    (
        &[
            "Content-Length",
            "Content_Length",
            "Content-Length ",
            "Content-Lengthx",
            "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxContent-Length",
            "Content\u{80}Length",
        ],
        &[
            "0",
            "5",
            "05",
            "5 ",
            "5\t",
            "+5",
            "5, 5",
            "4294967301",
            "9223372036854775807",
            "9223372036854775808",
        ],
    ),
    (&["Transfer-Encoding", "Transfer_Encoding"], &["chunked", "identity", "gzip, chunked"]),
    (
        &["Connection", "Connection_", "Upgrade", "Expect"],
        &[
            "close",
            "keep-alive",
            "Keep-Alive ",
            "keep-alive, close",
            "keep-alive x",
            "upgrade",
            "content-length",
            "100-continue",
        ],
    ),
    (
        &["Keep-Alive", "Keep_Alive"],
        &[
            "timeout=5",
            "timeout=5\t, max=100",
            "timeout=5, timeout=3",
            "timeout=5, TIMEOUT=7",
            "max=3, timeout=5",
            "timeout=+5",
            "timeout= 5",
            "timeout=5 s",
            "timeout=4294967295",
            "timeout=4294967301",
            "timeout=0",
        ],
    ),
    (
        &["Authorization", "Proxy-Authorization", "WWW-Authenticate", "Proxy-Authenticate"],
        &[
            "Basic dXNlcg==",
            "Bearer a",
            "NTLM",
            "Negotiate YII=",
            "Digest realm=\"a\"",
            "Basic realm=\"a\", NTLM",
            "\tBasic,negotiate",
            "Basic\tntlm",
        ],
    ),
];

/// A field with a meaning, in any case; sometimes with the value of another one.
fn meaning() -> impl Strategy<Value = String> {
    let name = select(MEANINGS.to_vec()).prop_flat_map(|(names, values)| {
        let others = select(MEANINGS.to_vec()).prop_flat_map(|(_, values)| select(values.to_vec()));
        let value = prop_oneof![6 => select(values.to_vec()), 1 => others, 1 => Just("")];
        (select(names.to_vec()), value)
    });
    let colon = prop_oneof![6 => Just(": "), 1 => select(vec![":", " : ", ":\t", ":\r\n "])];
    (name, colon, 0..4_u8).prop_map(|((name, value), colon, case)| {
        let line = format!("{name}{colon}{value}\r\n");
        match case {
            0 => line.to_ascii_lowercase(),
            1 => line.to_ascii_uppercase(),
            _ => line,
        }
    })
}

fn field() -> impl Strategy<Value = String> {
    let common = select(vec![
        "Host: a\r\n",
        "Accept: */*\r\n",
        "X:\r\n",
        "X-Length: \u{e9}\t7\r\n",
        "Connection: keep-alive\r\n",
        "Keep-Alive: timeout=7, max=3\r\n",
        "Authorization: Bearer abc\r\n",
    ]);
    prop_oneof![5 => common.prop_map(str::to_owned), 1 => meaning()]
}

/// A message, whole or a little damaged.
fn message(first_line: impl Strategy<Value = String>) -> impl Strategy<Value = Vec<u8>> {
    let line_end = prop_oneof![30 => Just("\r\n"), 1 => Just("\n"), 1 => Just("\r\r\n")];
    // How far the length is off, if there is one.
    let length = weighted(0.8, prop_oneof![6 => Just(0), 1 => select(vec![-1, 1, 5000])]);
    let damage = prop_oneof![2 => Just(Vec::new()), 1 => damage()];
    let body = prop_oneof![2 => Just(Vec::new()), 1 => vec(any::<u8>(), 0..40)];
    (first_line, vec(field(), 0..4), length, vec(field(), 0..3), line_end, body, damage).prop_map(
        |(first_line, before, length, after, line_end, body, damage)| {
            let mut bytes = format!("{first_line}\r\n{}", before.concat()).into_bytes();
            let len = i64::try_from(body.len()).unwrap();
            if let Some(off) = length {
                bytes.extend(format!("Content-Length: {}\r\n", len + off).bytes());
            }
            bytes.extend(format!("{}{line_end}", after.concat()).bytes());
            bytes.extend(body);
            damaged(bytes, &damage)
        },
    )
}

fn request() -> impl Strategy<Value = Vec<u8>> {
    let method = prop_oneof![
        8 => select(vec!["POST", "PUT"]),
        4 => select(vec!["GET", "HEAD", "DELETE", "OPTIONS"]),
        1 => select(vec!["PATCH", "TRACE", "CONNECT", "get", "GE T", ""]),
    ];
    let odd =
        vec![" / HTTP/1.0", " / HTTP/1.2", "  HTTP/1.1", " /\u{e9} HTTP/1.1", " / a HTTP/1.1"];
    let rest = prop_oneof![12 => Just(" /a?b HTTP/1.1"), 1 => select(odd)];
    // A GET with a length is never plain: these get a message without one.
    let bodiless = (
        select(vec!["GET", "HEAD", "DELETE", "OPTIONS"]),
        vec(field(), 0..5),
        prop_oneof![2 => Just(Vec::new()), 1 => damage()],
    )
        .prop_map(|(method, fields, damage)| {
            let bytes = format!("{method} / HTTP/1.1\r\n{}\r\n", fields.concat()).into_bytes();
            damaged(bytes, &damage)
        });
    prop_oneof![
        2 => message((method, rest).prop_map(|(method, rest)| format!("{method}{rest}"))),
        1 => bodiless,
    ]
}

fn response() -> impl Strategy<Value = Vec<u8>> {
    let status = prop_oneof![
        8 => select(vec!["200 OK", "404", "302 ", "500 \u{e9}\t", "204 No", "304 Not Modified"]),
        1 => select(vec!["100 Continue", "101 S", "199", "600", "099", "2000", "20", "200\t"]),
    ];
    let version = prop_oneof![
        20 => Just("HTTP/1.1 "),
        1 => select(vec!["HTTP/1.0 ", "HTTP/1.1", "http/1.1 ", "HTTP/1.10 "]),
    ];
    message((version, status).prop_map(|(version, status)| format!("{version}{status}")))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn on_requests(message in request()) {
        plain_request(&message);
    }

    #[test]
    fn on_responses(start in response(), cut in weighted(0.2, any::<Index>())) {
        let start = &start[..cut.map_or(start.len(), |cut| cut.index(start.len() + 1))];
        for request in [GET, HEAD, POST] {
            plain_response(request, &head_of(request), start, LIMIT);
        }
    }
}

/// Every byte of common messages, replaced by, preceded by and left out for every other one.
#[test]
fn on_every_single_change() {
    let requests = [3, 5, 7].map(|i| REQUESTS[i]);
    let responses = [2, 6].map(|i| RESPONSES[i].0);
    let get = head_of(GET);
    let each = |bytes: &str, check: &dyn Fn(&[u8])| {
        let bytes = bytes.as_bytes();
        for at in 0..bytes.len() {
            check(&[&bytes[..at], &bytes[at + 1..]].concat());
            for byte in 0..=u8::MAX {
                check(&[&bytes[..at], &[byte], &bytes[at + 1..]].concat());
                check(&[&bytes[..at], &[byte], &bytes[at..]].concat());
            }
        }
    };
    for request in requests {
        each(request, &|message| _ = plain_request(message));
    }
    for response in responses {
        each(response, &|start| _ = plain_response(GET, &get, start, LIMIT));
    }
}

/// The properties above are about something: many of the messages are plain, and the others are
/// not for every reason there is.
#[test]
fn the_generated_messages_are_worth_it() {
    const SAMPLES: usize = 2000;
    fn sample<T: Debug>(strategy: impl Strategy<Value = T>) -> Vec<T> {
        let mut runner = TestRunner::deterministic();
        (0..SAMPLES).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
    }
    let requests: Vec<_> = sample(request()).iter().map(|m| scan_request(m).map(drop)).collect();
    let responses: Vec<_> =
        sample(response()).iter().map(|m| scan_response(m, false, LIMIT).map(drop)).collect();
    for (kind, results) in [("requests", &requests), ("responses", &responses)] {
        let plain = results.iter().filter(|result| result.is_ok()).count();
        assert!((SAMPLES / 5..SAMPLES / 5 * 4).contains(&plain), "{plain} {kind} are plain");
    }
    let told: HashSet<_> = requests.into_iter().chain(responses).filter_map(Result::err).collect();
    // All but `TooLong`, and those that are no property of a message, or not of its framing.
    assert_eq!(told.len(), WhyNot::ALL.len() - 6, "{told:?}");
}
