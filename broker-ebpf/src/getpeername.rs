//! Answers `getpeername()` of an intercepted connection with the address that was dialled:
//! clients compare it, log it and reconnect to it.

use aya_ebpf::bindings::bpf_sock_addr;
use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::programs::SockAddrContext;
use broker_ebpf::abi::{Address, Interception};

use crate::connect::{read_v4, read_v6, sk, write_v4, write_v6};
use crate::maps::socket_state;

#[cgroup_sock_addr(getpeername4)]
pub fn broker_getpeer4(ctx: SockAddrContext) -> i32 {
    if let Some(dialled) = dialled(ctx.sock_addr, read_v4(ctx.sock_addr)) {
        write_v4(ctx.sock_addr, &dialled);
    }
    1
}

#[cgroup_sock_addr(getpeername6)]
pub fn broker_getpeer6(ctx: SockAddrContext) -> i32 {
    if let Some(dialled) = dialled(ctx.sock_addr, read_v6(ctx.sock_addr)) {
        write_v6(ctx.sock_addr, &dialled);
    }
    1
}

#[inline(always)]
fn dialled(addr: *mut bpf_sock_addr, peer: Address) -> Option<Address> {
    let state = socket_state(sk(addr))?;
    let intercepted = state.interception == Interception::Connected as u8;
    (intercepted && state.listener == peer).then_some(state.dialled)
}
