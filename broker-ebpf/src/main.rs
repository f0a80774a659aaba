//! The kernel programs: one file per kind of hook, thin around `broker_ebpf::flow`.

#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]
#![expect(unsafe_code, reason = "map values and kernel contexts are raw pointers")]
#![expect(unreachable_pub, reason = "the loader finds programs and maps by their symbols")]
#![expect(clippy::cast_possible_truncation, reason = "the target has 64 bits, map indices few")]
#![expect(clippy::needless_pass_by_value, reason = "the hooks' signatures are aya's")]
#![expect(clippy::inline_always, reason = "the verifier follows bounds within a function only")]

mod atomic;
mod connect;
mod connections;
mod context;
mod getpeername;
mod kmem;
mod maps;
mod relayed;
mod request;
mod response;
mod segment;
mod settled;
mod slots;
mod sockops;

/// The kernel lets only GPL-compatible programs call some of the helpers used here.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // Nothing panics: the verifier would refuse the endless loop.
    loop {}
}
