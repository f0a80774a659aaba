//! Answers the daemon's question whether a client has read all that was redirected to it. The
//! daemon runs the program itself; it is attached nowhere.

use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use broker_ebpf::abi::Settled;

use crate::kmem;
use crate::maps::CLIENTS;

#[classifier]
pub fn broker_settled(ctx: TcContext) -> i32 {
    let answer = match ctx.load::<u64>(0) {
        Ok(client) => settled(client),
        Err(_) => Settled::Unknown,
    };
    answer as i32
}

#[inline(always)]
fn settled(client: u64) -> Settled {
    let Some(client) = CLIENTS.get_ptr(client) else { return Settled::Gone };
    // SAFETY: a value of the map, written when the client was enrolled.
    let sk = unsafe { (&raw const (*client).sk).read_volatile() };
    match kmem::has_read_redirected(sk) {
        Some(true) => Settled::Yes,
        Some(false) => Settled::No,
        None => Settled::Unknown,
    }
}
