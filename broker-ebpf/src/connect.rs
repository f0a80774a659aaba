//! Sends connections to brokered destinations to the broker, before TCP begins.
//!
//! When in doubt the connection is left alone: the client then reaches its destination as if
//! there were no broker. The hook allows the `connect()`, unless the service's gate is closed.

use aya_ebpf::bindings::{bpf_sock, bpf_sock_addr};
use aya_ebpf::btf_maps::lpm_trie::Key;
use aya_ebpf::helpers::generated::{
    bpf_get_current_ancestor_cgroup_id, bpf_get_netns_cookie, bpf_get_prandom_u32,
    bpf_get_smp_processor_id, bpf_ktime_get_ns, bpf_set_retval,
};
use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::programs::SockAddrContext;
use aya_log_ebpf::warn;
use broker_ebpf::abi::{
    Address, Interception, SERVICE_CGROUPS_MAX, Service, Steer, Steering, TARGET_BITS, Tally,
    WORKERS_MAX, Who,
};
use broker_ebpf::flow;

use crate::atomic;
use crate::context::{load_u32, store_u32};
use crate::kmem;
use crate::maps::{
    CAN_SET_RETVAL, GATES, HEARTBEAT_AGE_MAX_NS, HEARTBEATS, LISTENERS, NETNS_COOKIE, ROUTES,
    SERVICES, TARGETS, WORKERS, socket_state, socket_state_or_new, steered, tally,
};

const SOCK_STREAM: u32 = 1;
const IPPROTO_TCP: u32 = 6;

#[cgroup_sock_addr(connect4)]
pub fn broker_connect4(ctx: SockAddrContext) -> i32 {
    match connect(&ctx, read_v4(ctx.sock_addr)) {
        Fate::LeftAlone => {}
        Fate::Rewritten(listener) => write_v4(ctx.sock_addr, &listener),
        Fate::Refused => return refuse(),
    }
    1
}

#[cgroup_sock_addr(connect6)]
pub fn broker_connect6(ctx: SockAddrContext) -> i32 {
    match connect(&ctx, read_v6(ctx.sock_addr)) {
        Fate::LeftAlone => {}
        Fate::Rewritten(listener) => write_v6(ctx.sock_addr, &listener),
        Fate::Refused => return refuse(),
    }
    1
}

/// What becomes of a `connect()`.
enum Fate {
    /// It goes where the client wants.
    LeftAlone,
    /// It goes to this listener instead.
    Rewritten(Address),
    /// It fails.
    Refused,
}

#[inline(always)]
fn connect(ctx: &SockAddrContext, dialled: Address) -> Fate {
    let Some((slot, service)) = brokered(ctx, &dialled) else { return Fate::LeftAlone };
    let Some(taken) = way_in(ctx, slot, service, &dialled) else {
        return Fate::LeftAlone;
    };
    if is_closed(service) {
        return Fate::Refused;
    }
    match rewrite(ctx, service, dialled, taken) {
        Some(listener) => Fate::Rewritten(listener),
        None => Fate::LeftAlone,
    }
}

/// Fails the `connect()`: before Linux 5.18 with EPERM, whatever the program wants.
#[inline(always)]
fn refuse() -> i32 {
    if CAN_SET_RETVAL.load() != 0 {
        // SAFETY: takes a number, and is known to be there.
        unsafe { bpf_set_retval(-flow::ECONNREFUSED) };
    }
    0
}

/// Whether the service takes no connections now. Counts the one that it does not take.
#[inline(always)]
fn is_closed(service: &Service) -> bool {
    let Some(index) = service.gate.checked_sub(1) else { return false };
    let Some(gate) = GATES.get_ptr_mut(index) else { return false };
    // SAFETY: takes nothing and reads a clock.
    let now = unsafe { bpf_ktime_get_ns() };
    // SAFETY: a value of the map; an aligned word is read whole.
    let closed_ns = unsafe { (&raw const (*gate).closed_ns).read_volatile() };
    if !flow::is_fresh(closed_ns, now, HEARTBEAT_AGE_MAX_NS.load()) {
        return false;
    }
    // SAFETY: a value of the map.
    unsafe { atomic::add(&raw mut (*gate).refused, 1) };
    true
}

/// The service that is to take the connection, if there is one, with its slot.
#[inline(always)]
fn brokered(ctx: &SockAddrContext, dialled: &Address) -> Option<(u32, &'static Service)> {
    // Cheapest first: nearly all calls end at one of the first two.
    let addr = ctx.sock_addr;
    if load_u32!(addr: bpf_sock_addr, type_) != SOCK_STREAM
        || load_u32!(addr: bpf_sock_addr, protocol) != IPPROTO_TCP
    {
        return None;
    }
    let slot = *TARGETS.get(&Key::new(TARGET_BITS, flow::target(dialled)))?;
    // Nobody could dial it in the client's place.
    if flow::is_link_local(&dialled.ip) {
        return None;
    }
    let service = SERVICES.get(slot)?;
    if socket_state(sk(addr)).is_some_and(|state| state.who == Who::Broker as u8) {
        return None;
    }
    // Before the service's own cgroups: who is named as of high priority is served.
    if let Some(high) = high(service) {
        return Some(high);
    }
    if !has_cgroup(service) {
        tally(Tally::OtherCgroup);
        return None;
    }
    Some((slot, service))
}

/// The service that takes the calling process's connections in this one's place, with its slot.
#[inline(always)]
fn high(service: &Service) -> Option<(u32, &'static Service)> {
    let slot = service.high.checked_sub(1)?;
    let high = SERVICES.get(slot)?;
    if high.restricted == 0 || !has_cgroup(high) {
        return None;
    }
    Some((slot, high))
}

/// How a client is taken.
struct Taken {
    listener: Address,
    route: u32,
    steered: bool,
}

/// The way to a worker that is alive and that the client can reach.
#[inline(always)]
fn way_in(ctx: &SockAddrContext, slot: u32, service: &Service, dialled: &Address) -> Option<Taken> {
    let addr = ctx.sock_addr;
    let sk = sk(addr);
    let Some(worker) = live_worker() else {
        tally(Tally::StaleHeartbeat);
        return None;
    };
    let route = slot * WORKERS_MAX as u32 + worker;
    let listeners = LISTENERS.get(route)?;
    // SAFETY: the context that the kernel handed to the program.
    let cookie = unsafe { bpf_get_netns_cookie(addr.cast()) };
    let same_netns = cookie == NETNS_COOKIE.load();
    let steered = service.steer != Steer::Relay as u32
        && steered(sk).is_none()
        && flow::is_steered(service.steer, kmem::file_flags(sk))
        && (service.steer == Steer::Kernel as u32 || pays(route));
    let set = if steered { &listeners.steered } else { &listeners.relayed };
    let Some(listener) = flow::listener(set, same_netns, dialled) else {
        tally(if same_netns { Tally::NoListener } else { Tally::OtherNetns });
        return None;
    };
    if same_netns && load_u32!(sk: bpf_sock, bound_dev_if) != 0 {
        tally(Tally::BoundToDevice);
        return None;
    }
    Some(Taken { listener, route, steered })
}

/// Notes what becomes of the client. Answers where it is to be sent.
#[inline(always)]
fn rewrite(
    ctx: &SockAddrContext,
    service: &Service,
    dialled: Address,
    taken: Taken,
) -> Option<Address> {
    let Taken { listener, route, steered } = taken;
    let Some(state) = socket_state_or_new(sk(ctx.sock_addr)) else {
        warn!(ctx, "a connection is not intercepted: its socket has no memory left for options");
        return None;
    };
    state.dialled = dialled;
    state.listener = listener;
    state.interception = Interception::Rewritten as u8;
    state.keep_destination = u8::from(service.keep_destination != 0);
    state.steering = if steered { Steering::Chosen } else { Steering::None } as u8;
    state.route = route;
    tally(Tally::Rewritten);
    Some(listener)
}

/// Whether steering has been of use to the clients of a route lately.
#[inline(always)]
fn pays(route: u32) -> bool {
    let Some(route) = ROUTES.get_ptr(route) else { return false };
    // SAFETY: a value of the map; aligned words are read whole. The other takes nothing.
    unsafe {
        flow::pays(
            (&raw const (*route).recently_enrolled).read_volatile(),
            (&raw const (*route).recently_steered).read_volatile(),
            bpf_get_prandom_u32(),
        )
    }
}

/// Whether the calling process belongs to a cgroup of the service, or need not.
#[inline(always)]
fn has_cgroup(service: &Service) -> bool {
    const { assert!(SERVICE_CGROUPS_MAX.is_power_of_two()) };
    if service.restricted == 0 {
        return true;
    }
    let count = service.cgroup_count as usize;
    for i in 0..count.min(SERVICE_CGROUPS_MAX) {
        // Else the compiler compares pointers, of which the verifier learns nothing.
        let place = atomic::masked::<{ SERVICE_CGROUPS_MAX - 1 }>(i);
        let Some(cgroup) = service.cgroups.get(place) else { break };
        // SAFETY: takes a number; an unknown level answers 0, which is no cgroup's id.
        if unsafe { bpf_get_current_ancestor_cgroup_id(cgroup.level.cast_signed()) } == cgroup.id {
            return true;
        }
    }
    false
}

/// The worker of this CPU, or the next one that is alive.
#[inline(always)]
fn live_worker() -> Option<u32> {
    let workers = WORKERS.load();
    if workers == 0 {
        return None;
    }
    // SAFETY: takes nothing and reads a clock.
    let now = unsafe { bpf_ktime_get_ns() };
    let age_max = HEARTBEAT_AGE_MAX_NS.load();
    // SAFETY: takes nothing and answers a number.
    let mut worker = unsafe { bpf_get_smp_processor_id() } % workers;
    for _ in 0..workers.min(WORKERS_MAX as u32) {
        let beat = HEARTBEATS.get_ptr(worker)?;
        // SAFETY: a value of the map; the daemon writes it while programs read.
        if flow::is_fresh(unsafe { beat.read_volatile() }, now, age_max) {
            return Some(worker);
        }
        worker = if worker + 1 < workers { worker + 1 } else { 0 };
    }
    None
}

/// The client's socket.
#[inline(always)]
pub fn sk(addr: *mut bpf_sock_addr) -> *mut bpf_sock {
    // SAFETY: the context that the kernel handed to the program.
    unsafe { (*addr).__bindgen_anon_1.sk }
}

/// The IPv4 address and port that the hook is called for.
#[inline(always)]
pub fn read_v4(addr: *mut bpf_sock_addr) -> Address {
    Address {
        ip: flow::v4_mapped(load_u32!(addr: bpf_sock_addr, user_ip4)),
        port: flow::user_port(load_u32!(addr: bpf_sock_addr, user_port)),
        zero: 0,
    }
}

/// Replaces them.
#[inline(always)]
pub fn write_v4(addr: *mut bpf_sock_addr, address: &Address) {
    store_u32!(addr: bpf_sock_addr, user_ip4 = address.ip[3]);
    store_u32!(addr: bpf_sock_addr, user_port = address.port.into());
}

/// The IPv6 address and port that the hook is called for.
#[inline(always)]
pub fn read_v6(addr: *mut bpf_sock_addr) -> Address {
    Address {
        ip: [
            load_u32!(addr: bpf_sock_addr, user_ip6, 0),
            load_u32!(addr: bpf_sock_addr, user_ip6, 1),
            load_u32!(addr: bpf_sock_addr, user_ip6, 2),
            load_u32!(addr: bpf_sock_addr, user_ip6, 3),
        ],
        port: flow::user_port(load_u32!(addr: bpf_sock_addr, user_port)),
        zero: 0,
    }
}

/// Replaces them.
#[inline(always)]
pub fn write_v6(addr: *mut bpf_sock_addr, address: &Address) {
    store_u32!(addr: bpf_sock_addr, user_ip6[0] = address.ip[0]);
    store_u32!(addr: bpf_sock_addr, user_ip6[1] = address.ip[1]);
    store_u32!(addr: bpf_sock_addr, user_ip6[2] = address.ip[2]);
    store_u32!(addr: bpf_sock_addr, user_ip6[3] = address.ip[3]);
    store_u32!(addr: bpf_sock_addr, user_port = address.port.into());
}
