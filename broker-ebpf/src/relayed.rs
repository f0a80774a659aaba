//! Puts what the daemon sends to a client into the same queue as what is redirected to it.
//!
//! A client's socket that is in a map has two queues: one for what is redirected, and TCP's own. An
//! application does not see that, until it asks how much there is to be read: `ioctl(FIONREAD)`
//! counts the first one only, and programs believe it. nginx waits for more when it answers 0. So
//! what the daemon sends to such a client does not pass through TCP. What is sent so has no
//! back-pressure; the daemon takes a client out of the maps before it sends it anything long.

use aya_ebpf::bindings::BPF_F_INGRESS;
use aya_ebpf::macros::sk_msg;
use aya_ebpf::programs::SkMsgContext;

use crate::maps::{CLIENT_SOCKETS, client_of};

const SK_PASS: u32 = 1;

#[sk_msg]
pub fn broker_relayed(ctx: SkMsgContext) -> u32 {
    // SAFETY: the context that the kernel handed to the program.
    let sk = unsafe { (*ctx.msg).__bindgen_anon_3.sk };
    if let Some(client) = client_of(sk) {
        // A client that is not in the map any more gets it as anybody else.
        let _left = CLIENT_SOCKETS.redirect_msg(&ctx, client, BPF_F_INGRESS.into());
    }
    SK_PASS
}
