//! A client's stream is cut into the same requests however it arrives, and the kernel's scanner
//! agrees.
//!
//! The first three bytes choose where it is cut; the rest is the stream.

#![no_main]

use broker::boundary::http1::*;
use broker::boundary::{CloseReason, Verdict};
use libfuzzer_sys::fuzz_target;

#[path = "../../../broker/src/boundary/http1/tests/check.rs"]
#[allow(dead_code, reason = "each target uses a part of it")]
mod check;

fuzz_target!(|input: (u8, u8, u8, &[u8])| {
    let (a, b, c, stream) = input;
    let cuts = [a, b, c].map(usize::from);
    let whole = check::requests(stream, &[]);
    assert_eq!(check::requests(stream, &cuts), whole);
    let bytewise: Vec<usize> = (0..stream.len()).collect();
    assert_eq!(check::requests(stream, &bytewise), whole);

    check::plain_request(stream);
});
