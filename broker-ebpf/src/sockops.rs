//! Counts the connections that processes of this host open.
//!
//! The hook runs for every TCP socket of the host; only actively opened ones are followed, and
//! what each of them costs is what every connection of the host pays. The flags that ask for more calls are added to those that
//! are set: another program on the cgroup may have set its own. Calls for round-trip times and
//! retransmissions are asked for on the broker's own sockets only.

use aya_ebpf::bindings::{
    BPF_NOEXIST, BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_HDR_OPT_LEN_CB,
    BPF_SOCK_OPS_RETRANS_CB, BPF_SOCK_OPS_RETRANS_CB_FLAG, BPF_SOCK_OPS_RTT_CB,
    BPF_SOCK_OPS_RTT_CB_FLAG, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
    BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG, bpf_sock, bpf_sock_ops,
};
use aya_ebpf::helpers::generated::{bpf_get_socket_cookie, bpf_ktime_get_ns};
use aya_ebpf::macros::sock_ops;
use aya_ebpf::programs::SockOpsContext;
use aya_log_ebpf::warn;
use broker_ebpf::abi::{
    ACCEPT_EVERY, Address, BUCKETS, Client, Connection, Counters, Dialled, EndpointCounters,
    EndpointKey, EventKind, FINE_BUCKETS, Interception, NO_SLOT, OUTCOME_COUNT, Outcome, Pair,
    Path, Phase, Route, SEGMENTS_PER_RTT, SocketState, Steering, Tally, WORKERS_MAX, Who,
};
use broker_ebpf::flow::{self, Step};

use crate::atomic;
use crate::connections;
use crate::context::{load_pointer, load_u32};
use crate::kmem::{self, sk_err};
use crate::maps::{
    CLIENT_SOCKETS, CLIENTS, ENDPOINTS, GROUP_SLOTS, NO_PATH, ORIGIN_SLOTS, ORIGINAL_DESTINATIONS,
    PATHS, ROUTES, SCRATCH, TOTALS, Way, leave_map, socket_state, steered, steered_or_new, tally,
    tell,
};
use crate::slots;

const AF_INET6: u32 = 10;

#[sock_ops]
pub fn broker_sockops(ctx: SockOpsContext) -> u32 {
    let ops = ctx.ops;
    match load_u32!(ops: bpf_sock_ops, op) {
        BPF_SOCK_OPS_TCP_CONNECT_CB => attempted(&ctx),
        BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB => confirm(&ctx),
        BPF_SOCK_OPS_STATE_CB => state_changed(&ctx),
        BPF_SOCK_OPS_RTT_CB => timed(ctx.ops),
        BPF_SOCK_OPS_RETRANS_CB => sent_again(ctx.ops),
        BPF_SOCK_OPS_HDR_OPT_LEN_CB => sends(ctx.ops),
        _ => {}
    }
    1
}

/// A SYN is about to be sent.
#[inline(always)]
fn attempted(ctx: &SockOpsContext) {
    let remote = remote(ctx.ops);
    let own = socket_state(sk(ctx.ops));
    let who = own.as_ref().map_or(Who::Others as u8, |state| state.who);
    if follow(ctx.ops, EndpointKey { remote, who: who.into() }, own.is_some()) {
        request_calls(ctx, BPF_SOCK_OPS_STATE_CB_FLAG);
    }
    let Some(state) = own else { return };
    forget_steered(ctx.ops);
    if state.interception != Interception::None as u8 {
        let now = flow::interception_at_connect(state.interception, &state.listener, &remote);
        state.interception = now as u8;
        if now == Interception::Connected && state.keep_destination != 0 {
            let pair = Pair { client: local(ctx.ops), listener: state.listener };
            let dialled = Dialled { address: state.dialled, zero: 0, client: cookie(ctx.ops) };
            if ORIGINAL_DESTINATIONS.insert(pair, dialled, 0).is_err() {
                warn!(ctx, "an original destination is lost: the map is full");
            }
        }
    }
}

/// A socket that was disconnected (`AF_UNSPEC`, connect(2)) and connects anew is still in the map, with
/// all that was redirected to it and not read: that belongs to the connection before. Its cookie is the
/// same, so the connect hook lets no such socket be steered again.
#[inline(always)]
fn forget_steered(ops: *mut bpf_sock_ops) {
    if steered(sk(ops)).is_some() {
        leave_map(cookie(ops));
    }
}

/// Counts an attempt. Whether its connection will be followed.
#[inline(always)]
fn follow(ops: *mut bpf_sock_ops, endpoint: EndpointKey, has_state: bool) -> bool {
    add_to_totals(endpoint.who, Outcome::Attempted);
    let connection = Connection {
        endpoint,
        since_ns: now_ns(),
        entry_ns: 0,
        phase: Phase::Connecting as u32,
        has_state: has_state.into(),
    };
    let Some(connection) = connections::follow(cookie(ops), connection) else {
        tally(Tally::NotFollowed);
        return false;
    };
    if let Some(entry) = entry(&endpoint, connection.since_ns) {
        // SAFETY: a value of the map.
        unsafe {
            add_outcome((&raw mut (*entry).counters.outcomes).cast(), Outcome::Attempted);
            connection.entry_ns = (&raw const (*entry).created_ns).read_volatile();
        }
    }
    true
}

/// The handshake is complete. Says nothing new unless another program has taken our flag away
/// in the meantime.
#[inline(always)]
fn confirm(ctx: &SockOpsContext) {
    let ops = ctx.ops;
    if let Some(state) = socket_state(sk(ops)) {
        if state.steering == Steering::Chosen as u8 {
            enrol(ctx, state);
        }
        if state.who == Who::Broker as u8 {
            // A lost SYN shows in the handshake's time.
            state.segments = load_u32!(ops: bpf_sock_ops, data_segs_out);
            state.retransmitted = load_u32!(ops: bpf_sock_ops, total_retrans);
            state.written = kmem::write_seq(sk(ops)).unwrap_or(0);
            let mut calls = BPF_SOCK_OPS_RTT_CB_FLAG | BPF_SOCK_OPS_RETRANS_CB_FLAG;
            if GROUP_SLOTS.load() != 0 {
                calls |= BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
            }
            request_calls(ctx, calls);
        }
    }
    if load_u32!(ops: bpf_sock_ops, bpf_sock_ops_cb_flags) & BPF_SOCK_OPS_STATE_CB_FLAG != 0 {
        return;
    }
    let Some(connection) = connections::followed(cookie(ops)) else { return };
    if connection.phase == Phase::Connecting as u32 {
        established(connection);
    }
    request_calls(ctx, BPF_SOCK_OPS_STATE_CB_FLAG);
}

/// A round trip has been timed. Most are passed over: what is smoothed changes slowly.
#[inline(always)]
fn timed(ops: *mut bpf_sock_ops) {
    let Some(state) = own_and_open(ops) else { return };
    let segments = load_u32!(ops: bpf_sock_ops, data_segs_out);
    if segments.wrapping_sub(state.segments) < SEGMENTS_PER_RTT {
        return;
    }
    let Some(path) = path(ops) else { return };
    // The kernel keeps eighths.
    let srtt_us = u64::from(load_u32!(ops: bpf_sock_ops, srtt_us) >> 3);
    const { assert!(FINE_BUCKETS.is_power_of_two()) };
    let bucket = atomic::masked::<{ FINE_BUCKETS - 1 }>(flow::fine_bucket(srtt_us));
    // SAFETY: a value of the map, and within the histogram.
    unsafe {
        (&raw mut (*path).srtt_us).write_volatile(srtt_us);
        atomic::add((&raw mut (*path).rtt_us).cast::<u64>().add(bucket), 1);
    }
    note_segments(ops, state, path);
}

/// A segment has been sent again.
#[inline(always)]
fn sent_again(ops: *mut bpf_sock_ops) {
    let Some(state) = own_and_open(ops) else { return };
    let Some(path) = path(ops) else { return };
    note_segments(ops, state, path);
}

/// The kernel asks for options of a segment that it is about to send. There are none; but this is where
/// it shows what has become of a message that was redirected, before the origin can have answered.
/// TCP may not have taken it, or not all of it, and it keeps the flags of the client's `send()`: with
/// `MSG_OOB`, the segment is not after the urgent byte.
#[inline(always)]
fn sends(ops: *mut bpf_sock_ops) {
    // It asks for the room that they would take, too, without a segment.
    if load_u32!(ops: bpf_sock_ops, skb_len) == 0 {
        return;
    }
    // Also if the origin has ended its side meanwhile.
    let Some(state) = own(ops) else { return };
    let Some(written) = kmem::write_seq(sk(ops)) else { return };
    let Some(urgent_until) = kmem::urgent_until(sk(ops)) else { return };
    let urgent = urgent_until != load_u32!(ops: bpf_sock_ops, snd_una);
    let more = written.wrapping_sub(state.written);
    state.written = written;
    let cookie = cookie(ops);
    // SAFETY: a value of the map, copied at once.
    if let Some(slot) = unsafe { ORIGIN_SLOTS.get(cookie) } {
        slots::sends(*slot, cookie, more, urgent);
    }
}

/// What is kept with an established connection of the broker's own.
#[inline(always)]
fn own_and_open<'a>(ops: *mut bpf_sock_ops) -> Option<&'a mut SocketState> {
    own(ops).filter(|_| load_u32!(ops: bpf_sock_ops, state) == flow::TCP_ESTABLISHED)
}

/// What is kept with a socket of the broker's own; another program may have asked for calls on behalf
/// of others.
#[inline(always)]
fn own<'a>(ops: *mut bpf_sock_ops) -> Option<&'a mut SocketState> {
    socket_state(sk(ops)).filter(|state| state.who == Who::Broker as u8)
}

/// Adds to a path what the connection has sent since the last time.
#[inline(always)]
fn note_segments(ops: *mut bpf_sock_ops, state: &mut SocketState, path: *mut Path) {
    let segments = load_u32!(ops: bpf_sock_ops, data_segs_out);
    let retransmitted = load_u32!(ops: bpf_sock_ops, total_retrans);
    let more = segments.wrapping_sub(state.segments);
    let again = retransmitted.wrapping_sub(state.retransmitted);
    state.segments = segments;
    state.retransmitted = retransmitted;
    // SAFETY: a value of the map.
    unsafe {
        atomic::add(&raw mut (*path).segments, more.into());
        if again != 0 {
            atomic::add(&raw mut (*path).retransmitted, again.into());
        }
    }
}

/// Finds or makes the entry of the way to the socket's remote end.
#[inline(always)]
fn path(ops: *mut bpf_sock_ops) -> Option<*mut Path> {
    let origin = remote(ops);
    if let Some(path) = PATHS.get_ptr_mut(origin) {
        return Some(path);
    }
    let nothing = NO_PATH.get_ptr(0)?;
    // SAFETY: initialised, and nothing ever writes to it.
    let nothing = unsafe { &*nothing };
    // Another CPU may be faster; then that entry is used.
    let _exists = PATHS.insert(origin, nothing, BPF_NOEXIST.into());
    PATHS.get_ptr_mut(origin)
}

#[inline(always)]
fn state_changed(ctx: &SockOpsContext) {
    let ops = ctx.ops;
    let tcp_state = load_u32!(ops: bpf_sock_ops, __bindgen_anon_1.args, 1);
    // Sockets without one were accepted, or are older than this program, or found no place.
    let connection = connections::followed(cookie(ops));
    // Most have none, and the connection knows it.
    let own = match &connection {
        Some(connection) if connection.has_state == 0 => None,
        _ => socket_state(sk(ops)),
    };
    if let Some(state) = own.as_ref() {
        if state.who == Who::Broker as u8 {
            origin_changed(ops, tcp_state);
        } else if state.steering == Steering::Enrolled as u8 {
            client_changed(sk(ops), tcp_state);
        }
    }
    if let Some(connection) = connection {
        match flow::step(connection.phase, tcp_state) {
            Step::Nothing => {}
            Step::Established => established(connection),
            Step::Failed => _ = count(connection, flow::failure(sk_err(sk(ops)))),
            Step::Left => left(ops, connection),
            Step::LeftAndGone => {
                left(ops, connection);
                if flow::was_reset(sk_err(sk(ops))) {
                    let _evicted = count(connection, Outcome::Reset);
                }
            }
        }
        if tcp_state == flow::TCP_CLOSE {
            connections::forget(connection);
        }
    }
    if let Some(state) = own
        && tcp_state == flow::TCP_CLOSE
    {
        gone(ctx, state);
    }
}

#[inline(always)]
fn established(connection: &mut Connection) {
    let now = now_ns();
    let us = now.saturating_sub(connection.since_ns) / 1000;
    connection.since_ns = now;
    connection.phase = Phase::Open as u32;
    let Some(counters) = count(connection, Outcome::Established) else { return };
    let bucket = flow::bucket(us);
    // SAFETY: a value of a map.
    unsafe {
        let open = atomic::fetch_add(&raw mut (*counters).open, 1) + 1;
        atomic::raise(&raw mut (*counters).open_peak, open);
        atomic::add(&raw mut (*counters).handshake_us_sum, us);
        record(&raw mut (*counters).handshake_us, bucket);
    }
}

/// The connection is no longer established.
#[inline(always)]
fn left(ops: *mut bpf_sock_ops, connection: &mut Connection) {
    if connection.endpoint.who == Who::Broker as u32 {
        // Whatever it comes to from here, these were sent. The kernel tells of a change of state
        // before it makes it.
        sent_again(ops);
    }
    let ms = now_ns().saturating_sub(connection.since_ns) / 1_000_000;
    connection.phase = Phase::Leaving as u32;
    let Some(counters) = count(connection, Outcome::Closed) else { return };
    let bucket = flow::bucket(ms);
    // SAFETY: a value of a map.
    unsafe {
        atomic::add(&raw mut (*counters).open, 1_u64.wrapping_neg());
        record(&raw mut (*counters).lifetime_ms, bucket);
    }
}

/// Nothing is left of the connection; the socket may begin another one.
#[inline(always)]
fn gone(ctx: &SockOpsContext, state: &mut SocketState) {
    if state.interception == Interception::Connected as u8 && state.keep_destination != 0 {
        let pair = Pair { client: local(ctx.ops), listener: state.listener };
        // It may have been evicted.
        let _absent = ORIGINAL_DESTINATIONS.remove(pair);
    }
    state.interception = Interception::None as u8;
    state.steering = Steering::None as u8;
}

/// Puts a client among those that may be steered.
#[inline(always)]
fn enrol(ctx: &SockOpsContext, state: &mut SocketState) {
    // The application has connected this socket elsewhere in the end.
    if state.interception != Interception::Connected as u8 {
        state.steering = Steering::None as u8;
        return;
    }
    let ops = ctx.ops;
    let sk = sk(ops);
    let worker = state.route % WORKERS_MAX as u32;
    let cookie = cookie(ops);
    let Some(steered) = steered_or_new(sk) else {
        state.steering = Steering::None as u8;
        tally(Tally::NotEnrolled);
        return tell(worker, EventKind::Client, 0, cookie);
    };
    state.steering = Steering::Enrolled as u8;
    steered.cookie = cookie;
    steered.route = state.route;
    steered.first_seq = kmem::write_seq(sk).unwrap_or(0);
    steered.served = 0;
    steered.way = Way::Kernel as u8;
    let client = Client {
        pair: Pair { client: local(ops), listener: state.listener },
        dialled: state.dialled,
        slot: NO_SLOT,
        relayed: [0; 2],
        sk: kmem::kept_at(sk).unwrap_or(0),
    };
    let mut key = cookie;
    // A request that went with the SYN is the daemon's already.
    let begun = load_u32!(ops: bpf_sock_ops, data_segs_out) != 0;
    // SAFETY: the context that the kernel handed to the program.
    let enrolled = CLIENTS.insert(cookie, client, 0).is_ok()
        && !begun
        && CLIENT_SOCKETS.update(&mut key, unsafe { &mut *ops }, BPF_NOEXIST.into()).is_ok();
    if !enrolled {
        steered.way = Way::Relay as u8;
        tally(Tally::NotEnrolled);
        return tell(worker, EventKind::Client, 0, cookie);
    }
    tally(Tally::Enrolled);
    let Some(route) = ROUTES.get_ptr_mut(state.route) else { return };
    // SAFETY: a value of the map.
    let before = unsafe {
        note_enrolled(route);
        atomic::fetch_add(&raw mut (*route).enrolled, 1)
    };
    if before % ACCEPT_EVERY == ACCEPT_EVERY - 1 {
        tell(worker, EventKind::Accept, 0, 0);
    }
}

/// Counts a client among the recent ones. Two at the same time may be counted as one, which
/// matters to nobody.
///
/// # Safety
///
/// `route` must be a map value.
#[inline(always)]
unsafe fn note_enrolled(route: *mut Route) {
    // SAFETY: the caller vouches for the pointer; aligned words are read and written whole.
    unsafe {
        let enrolled = &raw mut (*route).recently_enrolled;
        let count = enrolled.read_volatile() + 1;
        if count < flow::RECENT_MAX {
            enrolled.write_volatile(count);
        } else {
            enrolled.write_volatile(count / 2);
            let steered = &raw mut (*route).recently_steered;
            steered.write_volatile(steered.read_volatile() / 2);
        }
    }
}

/// A client's connection has changed its state.
#[inline(always)]
fn client_changed(sk: *mut bpf_sock, tcp_state: u32) {
    let Some(steered) = steered(sk) else { return };
    // Established is the one state in which the client may still send.
    if tcp_state != flow::TCP_ESTABLISHED && steered.served != 0 {
        slots::client_left(steered.slot, steered.cookie);
    }
    // It waits for our end, and nothing else would tell the daemon soon.
    if tcp_state == flow::TCP_FIN_WAIT1 && kmem::is_half_closed(sk) == Some(true) {
        tell(steered.route % WORKERS_MAX as u32, EventKind::Client, 0, steered.cookie);
    }
    if tcp_state == flow::TCP_CLOSE {
        let _absent = CLIENTS.remove(steered.cookie);
    }
}

/// A connection of the broker to an origin has changed its state.
#[inline(always)]
fn origin_changed(ops: *mut bpf_sock_ops, tcp_state: u32) {
    if tcp_state == flow::TCP_ESTABLISHED {
        return;
    }
    let cookie = cookie(ops);
    // SAFETY: a value of the map, copied at once.
    let Some(slot) = (unsafe { ORIGIN_SLOTS.get(cookie) }) else { return };
    slots::origin_left(*slot, cookie, tcp_state == flow::TCP_CLOSE);
}

/// Adds one to a bucket of a histogram.
///
/// # Safety
///
/// `histogram` must lie within a map value.
#[inline(always)]
unsafe fn record(histogram: *mut [u64; BUCKETS], bucket: usize) {
    const { assert!(BUCKETS.is_power_of_two()) };
    let bucket = atomic::masked::<{ BUCKETS - 1 }>(bucket);
    // SAFETY: within the histogram, for which the caller vouches.
    unsafe { atomic::add(histogram.cast::<u64>().add(bucket), 1) };
}

/// Finds or makes the entry of an endpoint.
#[inline(always)]
fn entry(endpoint: &EndpointKey, now_ns: u64) -> Option<*mut EndpointCounters> {
    if let Some(found) = ENDPOINTS.get_ptr_mut(endpoint) {
        return Some(found);
    }
    let first = SCRATCH.get_ptr_mut(0)?;
    // SAFETY: this CPU's value. Should an interrupt bring the program here a second time, the
    // entry gets that later time, which tells it from earlier entries just as well.
    unsafe { (&raw mut (*first).created_ns).write_volatile(now_ns) };
    // SAFETY: initialised; nothing but the time is ever written to it.
    let first = unsafe { &*first };
    if ENDPOINTS.insert(endpoint, first, BPF_NOEXIST.into()).is_ok() {
        tally(Tally::EndpointAdded);
    }
    // Another CPU may have been faster; then it is that one's entry.
    ENDPOINTS.get_ptr_mut(endpoint)
}

/// Counts something for the party and, unless it was evicted since the attempt, the endpoint;
/// answers with its counters then.
#[inline(always)]
fn count(connection: &Connection, outcome: Outcome) -> Option<*mut Counters> {
    add_to_totals(connection.endpoint.who, outcome);
    let entry = ENDPOINTS.get_ptr_mut(connection.endpoint)?;
    // SAFETY: a value of the map.
    unsafe {
        if (&raw const (*entry).created_ns).read_volatile() != connection.entry_ns {
            return None;
        }
        let counters = &raw mut (*entry).counters;
        add_outcome((&raw mut (*counters).outcomes).cast(), outcome);
        Some(counters)
    }
}

#[inline(always)]
fn add_to_totals(who: u32, outcome: Outcome) {
    if let Some(totals) = TOTALS.get_ptr_mut(who) {
        // SAFETY: a value of the map.
        unsafe { add_outcome(totals.cast(), outcome) };
    }
}

/// # Safety
///
/// `outcomes` must be an `Outcomes` within a map value.
#[inline(always)]
unsafe fn add_outcome(outcomes: *mut u64, outcome: Outcome) {
    const { assert!(OUTCOME_COUNT.is_power_of_two()) };
    let place = atomic::masked::<{ OUTCOME_COUNT - 1 }>(outcome as usize);
    // SAFETY: within the outcomes, for which the caller vouches.
    unsafe { atomic::add(outcomes.add(place), 1) };
}

#[inline(always)]
fn cookie(ops: *mut bpf_sock_ops) -> u64 {
    // SAFETY: the context that the kernel handed to the program.
    unsafe { bpf_get_socket_cookie(ops.cast()) }
}

/// Asks the kernel for more calls for this socket.
#[inline(always)]
fn request_calls(ctx: &SockOpsContext, flags: u32) {
    let ops = ctx.ops;
    let flags = load_u32!(ops: bpf_sock_ops, bpf_sock_ops_cb_flags) | flags;
    if ctx.set_cb_flags(flags.cast_signed()).is_err() {
        warn!(ctx, "a connection is not followed: the kernel refuses the flag");
    }
}

#[inline(always)]
fn sk(ops: *mut bpf_sock_ops) -> *mut bpf_sock {
    load_pointer!(ops: bpf_sock_ops, __bindgen_anon_2.sk)
}

#[inline(always)]
fn remote(ops: *mut bpf_sock_ops) -> Address {
    let ip = if load_u32!(ops: bpf_sock_ops, family) == AF_INET6 {
        [
            load_u32!(ops: bpf_sock_ops, remote_ip6, 0),
            load_u32!(ops: bpf_sock_ops, remote_ip6, 1),
            load_u32!(ops: bpf_sock_ops, remote_ip6, 2),
            load_u32!(ops: bpf_sock_ops, remote_ip6, 3),
        ]
    } else {
        flow::v4_mapped(load_u32!(ops: bpf_sock_ops, remote_ip4))
    };
    Address { ip, port: flow::remote_port(load_u32!(ops: bpf_sock_ops, remote_port)), zero: 0 }
}

#[inline(always)]
fn local(ops: *mut bpf_sock_ops) -> Address {
    let ip = if load_u32!(ops: bpf_sock_ops, family) == AF_INET6 {
        [
            load_u32!(ops: bpf_sock_ops, local_ip6, 0),
            load_u32!(ops: bpf_sock_ops, local_ip6, 1),
            load_u32!(ops: bpf_sock_ops, local_ip6, 2),
            load_u32!(ops: bpf_sock_ops, local_ip6, 3),
        ]
    } else {
        flow::v4_mapped(load_u32!(ops: bpf_sock_ops, local_ip4))
    };
    Address { ip, port: flow::local_port(load_u32!(ops: bpf_sock_ops, local_port)), zero: 0 }
}

#[inline(always)]
fn now_ns() -> u64 {
    // SAFETY: takes nothing and reads a clock.
    unsafe { bpf_ktime_get_ns() }
}
