//! Properties: what is decided depends on the bytes, not on how they are cut.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::check::{Part, Play, requests};
use super::*;

/// A message with what is known of it.
#[derive(Clone, Debug)]
struct Message {
    bytes: Vec<u8>,
    head_len: usize,
}

fn fields() -> impl Strategy<Value = String> {
    let field = select(vec![
        "Host: a\r\n",
        "X:\r\n",
        "Cookie: a=b; c=\"d\"\r\n",
        "Accept: */*\r\n",
        "X-Length: 7\r\n",
        "Connection: TE\r\n",
        "Connection: keep-alive\r\n",
        "Keep-Alive: timeout=7\r\n",
    ]);
    vec(field, 0..4).prop_map(|fields| fields.concat())
}

/// Framing fields and a body to match.
fn content() -> impl Strategy<Value = (String, Vec<u8>)> {
    let chunk = (vec(any::<u8>(), 1..40), select(vec!["", ";a", ";a=b", " ;a=\"\\\";\""]));
    let trailers = select(vec!["", "X-Sum: 1\r\n", "A: b\r\nC:\r\n"]);
    prop_oneof![
        Just(("Content-Length: 0\r\n".to_owned(), Vec::new())),
        vec(any::<u8>(), 0..60).prop_map(|b| (format!("Content-Length: {}\r\n", b.len()), b)),
        (vec(chunk, 0..4), trailers).prop_map(|(chunks, trailers)| {
            let mut body = Vec::new();
            for (data, extension) in chunks {
                body.extend(format!("{:x}{extension}\r\n", data.len()).bytes());
                body.extend(data);
                body.extend(b"\r\n");
            }
            body.extend(format!("0\r\n{trailers}\r\n").bytes());
            ("Transfer-Encoding: chunked\r\n".to_owned(), body)
        }),
    ]
}

fn message(first_line: &str, fields: &str, framing: &str, body: Vec<u8>) -> Message {
    let mut bytes = format!("{first_line}{fields}{framing}\r\n").into_bytes();
    let head_len = bytes.len();
    bytes.extend(body);
    Message { bytes, head_len }
}

fn request() -> impl Strategy<Value = Message> {
    let method = select(vec!["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH"]);
    let content = prop_oneof![Just((String::new(), Vec::new())), content()];
    (method, fields(), content).prop_map(|(method, fields, (framing, body))| {
        message(&format!("{method} /a?b HTTP/1.1\r\n"), &fields, &framing, body)
    })
}

/// Responses to a GET, reusable ones.
fn response() -> impl Strategy<Value = Message> {
    let interim =
        select(vec!["", "HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 103 H\r\nA: b\r\n\r\n"]);
    let status = select(vec!["200 OK", "404 Not Found", "500", "302 "]);
    (interim, status, fields(), content()).prop_map(|(interim, status, fields, (framing, body))| {
        message(&format!("{interim}HTTP/1.1 {status}\r\n"), &fields, &framing, body)
    })
}

/// Small damage of the kinds that desynchronise.
#[derive(Clone, Debug)]
pub(super) enum Damage {
    Set(u8),
    Insert(&'static [u8]),
    Remove(usize),
    Repeat(usize),
}

pub(super) fn damage() -> impl Strategy<Value = Vec<(Index, Damage)>> {
    let byte = select(b"\r\n\0\t :;,0159afx\x0b\x7f\x80".to_vec());
    let piece = select(vec![
        &b"\r\n"[..],
        b"\n",
        b"\r\n ",
        b"Content-Length: 5\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Connection: close\r\n",
        b"0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
        b"GET / HTTP/1.1\r\n\r\n",
    ]);
    let one = prop_oneof![
        byte.prop_map(Damage::Set),
        piece.prop_map(Damage::Insert),
        (1..4_usize).prop_map(Damage::Remove),
        (1..40_usize).prop_map(Damage::Repeat),
    ];
    vec((any::<Index>(), one), 0..4)
}

pub(super) fn damaged(mut bytes: Vec<u8>, damage: &[(Index, Damage)]) -> Vec<u8> {
    for (index, damage) in damage {
        let at = index.index(bytes.len() + 1);
        match damage {
            Damage::Set(b) if at < bytes.len() => bytes[at] = *b,
            Damage::Set(b) => bytes.push(*b),
            Damage::Insert(piece) => drop(bytes.splice(at..at, piece.iter().copied())),
            Damage::Remove(n) => drop(bytes.drain(at..(at + n).min(bytes.len()))),
            Damage::Repeat(n) => {
                let again = bytes[at..(at + n).min(bytes.len())].to_vec();
                drop(bytes.splice(at..at, again));
            }
        }
    }
    bytes
}

fn stream(messages: impl Strategy<Value = Message>) -> impl Strategy<Value = Vec<u8>> {
    let broken = (vec(messages, 1..4), damage()).prop_map(|(messages, damage)| {
        damaged(messages.into_iter().flat_map(|m| m.bytes).collect(), &damage)
    });
    prop_oneof![8 => broken, 1 => vec(any::<u8>(), 0..200)]
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![vec(0..400_usize, 0..8), Just((0..2000).collect())]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Pipelined requests are cut where they were joined.
    #[test]
    fn pipelines_are_cut_at_the_joints(messages in vec(request(), 1..12), cuts in cuts()) {
        let stream: Vec<u8> = messages.iter().flat_map(|m| m.bytes.clone()).collect();
        let mut expected = Vec::new();
        let mut at = 0;
        for message in &messages {
            expected.push((at, at + message.head_len, at + message.bytes.len()));
            at += message.bytes.len();
        }
        let found: Vec<_> = requests(&stream, &cuts)
            .chunks(2)
            .map(|pair| match pair {
                [Part::Head { at, head }, Part::End { at: end }] => (*at, at + head.len, *end),
                other => panic!("{other:?}"),
            })
            .collect();
        prop_assert_eq!(found, expected);
    }

    /// At every point of a client's stream the same was found, however it got there.
    #[test]
    fn requests_do_not_depend_on_cuts(stream in stream(request()), cuts in cuts()) {
        for end in cuts.iter().copied().filter(|&cut| cut < stream.len()).chain([stream.len()]) {
            prop_assert_eq!(requests(&stream[..end], &cuts), requests(&stream[..end], &[]));
        }
    }

    /// A head that is accepted here reads the same in a general parser.
    #[test]
    fn accepted_heads_are_plain(stream in stream(request())) {
        if let RequestStep::Head(head) = RequestReader::default().read(&stream) {
            let mut fields = [httparse::EMPTY_HEADER; 64];
            let mut other = httparse::Request::new(&mut fields);
            prop_assert_eq!(other.parse(&stream), Ok(httparse::Status::Complete(head.len)));
            let values = |name: &str| -> Vec<String> {
                let named = other.headers.iter().filter(|f| f.name.eq_ignore_ascii_case(name));
                named.map(|f| String::from_utf8_lossy(f.value).to_ascii_lowercase()).collect()
            };
            let framing = match (&values("content-length")[..], &values("transfer-encoding")[..]) {
                ([], []) => Framing::None,
                ([length], []) => Framing::Length(length.parse().unwrap()),
                ([], [coding]) if coding == "chunked" => Framing::Chunked,
                other => panic!("{other:?}"),
            };
            prop_assert_eq!(head.framing, framing);
        }
    }

    /// A good response is forwarded whole and leaves the socket clean; nothing after it passes.
    #[test]
    fn good_responses_end_where_they_end(
        message in response(), after in vec(any::<u8>(), 1..20), cuts in cuts(),
    ) {
        let read = head(b"GET / HTTP/1.1\r\n\r\n");
        let mut play = Play::new(&read);
        play.origin(&message.bytes, &cuts);
        let told = play.told();
        prop_assert_eq!(told.verdict, Verdict::Return);
        prop_assert_eq!(told.forwarded, message.bytes.len());
        prop_assert!(told.client_persists);
        play.origin(&after, &cuts);
        let told = play.told();
        prop_assert_eq!(told.verdict, Verdict::Close(CloseReason::Unsolicited));
        prop_assert_eq!(told.forwarded, message.bytes.len());
    }

    /// A prefix of a good response never counts as its end.
    #[test]
    fn incomplete_responses_never_return(message in response(), cut in any::<Index>()) {
        let cut = cut.index(message.bytes.len());
        let mut play = Play::new(&head(b"GET / HTTP/1.1\r\n\r\n"));
        play.origin(&message.bytes[..cut], &[]);
        prop_assert_eq!(play.told().verdict, Verdict::Close(CloseReason::NoBoundary));
        let (end, told) = play.eof();
        prop_assert_eq!(end, ResponseEnd::Truncated);
        prop_assert_eq!(told.verdict, Verdict::Close(CloseReason::Truncated));
    }

    /// The same events, with their bytes cut differently, tell the same after each event.
    #[test]
    fn exchanges_do_not_depend_on_cuts(
        first in request(),
        body_at in any::<Index>(),
        response in stream(response()),
        response_at in any::<Index>(),
        damage in damage(),
        cuts in cuts(),
    ) {
        let read = head(&first.bytes);
        let body = damaged(first.bytes[read.len..].to_vec(), &damage);
        let (body_start, body_end) = body.split_at(body_at.index(body.len() + 1));
        let (start, end) = response.split_at(response_at.index(response.len() + 1));
        let (mut whole, mut pieces) = (Play::new(&read), Play::new(&read));
        for (i, bytes) in [body_start, start, body_end, end].into_iter().enumerate() {
            if i % 2 == 0 {
                whole.client(bytes, &[]);
                pieces.client(bytes, &cuts);
            } else {
                whole.origin(bytes, &[]);
                pieces.origin(bytes, &cuts);
            }
            prop_assert_eq!(whole.told(), pieces.told());
        }
        prop_assert_eq!(whole.eof(), pieces.eof());
    }
}
