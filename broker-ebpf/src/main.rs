#![no_std]
#![no_main]
#![expect(unsafe_code, reason = "map values and kernel contexts are raw pointers")]
#![expect(unreachable_pub, reason = "the loader finds programs and maps by their symbols")]
#![expect(missing_docs, reason = "a binary has no documentation of its own")]

use aya_ebpf::macros::sock_ops;
use aya_ebpf::programs::SockOpsContext;

#[sock_ops]
pub fn broker_sock_ops(_ctx: SockOpsContext) -> u32 {
    1
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
