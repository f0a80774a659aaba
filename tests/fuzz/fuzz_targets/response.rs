//! An exchange ends in the same way however its bytes arrive, and where the kernel's scanner says.
//!
//! The input chooses a request, where its body and the response are cut and in which order the
//! parts come; the rest is the response.

#![no_main]

use broker::boundary::http1::*;
use broker::boundary::{CloseReason, Verdict};
use libfuzzer_sys::fuzz_target;

#[path = "../../../broker/src/boundary/http1/tests/check.rs"]
#[allow(dead_code, reason = "each target uses a part of it")]
mod check;

const REQUESTS: [&[u8]; 8] = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"HEAD / HTTP/1.1\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nA: b\r\n\r\n",
];

fuzz_target!(|input: (u8, u8, u8, u8, &[u8])| {
    let (request, body_cut, cut, split, response) = input;
    let request = REQUESTS[usize::from(request) % REQUESTS.len()];
    let RequestStep::Head(head) = RequestReader::default().read(request) else {
        panic!("all of them are plain requests");
    };
    let body = &request[head.len..];
    let (body_start, body_end) = body.split_at(usize::from(body_cut).min(body.len()));
    let (start, end) = response.split_at(usize::from(split).min(response.len()));

    let bytewise: Vec<usize> = (0..response.len()).collect();
    let tell = |cuts: &[usize]| {
        let mut play = check::Play::new(&head);
        play.client(body_start, cuts);
        play.origin(start, cuts);
        let middle = play.told();
        play.client(body_end, cuts);
        play.origin(end, cuts);
        (middle, play.told(), play.eof())
    };
    let whole = tell(&[]);
    assert_eq!(tell(&[usize::from(cut)]), whole);
    assert_eq!(tell(&bytewise), whole);

    if check::plain_request(request).is_some() {
        check::plain_response(request, &head, response, 1 << 16);
    }
});
