//! Keeps the bytes of a stream apart that come twice.
//!
//! TCP sends a segment again if its acknowledgement is late, and by then there may be more behind
//! it. It is queued as it is: whoever reads from the socket starts at the right byte. The kernel's
//! way to these programs (`tcp_read_skb`) does not: they see the first part twice.

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::helpers::generated::bpf_skb_adjust_room;
use broker_ebpf::abi::Tally;
use broker_ebpf::flow;

use crate::kmem;
use crate::maps::tally;

/// What is new in a segment.
pub struct New {
    /// How many bytes. They begin at the segment's front now.
    pub len: u32,
    /// The sequence number of the byte after them.
    pub next_seq: u32,
}

/// Cuts off what has come before; `next_seq` is the number of the next byte, if that is `known` from
/// the segment before. (Of an `Option` the verifier would say that it was not written.)
///
/// `None` if it cannot be told which bytes these are: then they are for nobody, and nor is anything
/// after them, which this answers as long as the caller's number stays the same.
#[inline(always)]
pub fn new_bytes(skb: *mut __sk_buff, known: bool, next_seq: u32) -> Option<New> {
    // SAFETY: the context that the kernel handed to the program.
    let (len, sk) = unsafe { ((*skb).len, (*skb).__bindgen_anon_2.sk) };
    let found = (|| {
        // At first, nothing has come that was not read.
        let next_seq = if known { next_seq } else { kmem::copied_seq(sk)? };
        let before = flow::came_before(next_seq, kmem::segment_seq(skb)?, len)?;
        if before > 0 {
            tally(Tally::Repeated);
            cut_off(skb, before)?;
        }
        let len = len - before;
        Some(New { len, next_seq: next_seq.wrapping_add(len) })
    })();
    if found.is_none() {
        tally(Tally::OutOfStep);
    }
    found
}

/// Takes bytes off the front of a segment.
#[inline(always)]
fn cut_off(skb: *mut __sk_buff, bytes: u32) -> Option<()> {
    /// More cannot be taken off at once.
    const MOST: u32 = 0xfff;
    /// As often as a segment without jumbograms can take.
    const TIMES: u32 = 0x1_0000_u32.div_ceil(MOST);
    let mut left = bytes;
    for _ in 0..TIMES {
        if left == 0 {
            break;
        }
        let now = if left < MOST { left } else { MOST };
        // SAFETY: the context that the kernel handed to the program.
        if unsafe { bpf_skb_adjust_room(skb, -now.cast_signed(), 0, 0) } != 0 {
            return None;
        }
        left -= now;
    }
    (left == 0).then_some(())
}
