//! Sends a client's request to an origin, inside the client's `send()`.
//!
//! A message that is one complete, plain request claims an idle origin socket and goes out there.
//! Everything else takes the way of any TCP connection, to the daemon's listener. Two ways have no
//! common order, so a client comes back from there only when the daemon has answered everything and
//! the client has read it.

use core::ffi::c_void;

use aya_ebpf::bindings::{bpf_sock, sk_msg_md};
use aya_ebpf::helpers::generated::{
    bpf_get_prandom_u32, bpf_ktime_get_ns, bpf_loop, bpf_probe_read_kernel,
};
use aya_ebpf::macros::sk_msg;
use aya_ebpf::programs::SkMsgContext;
use broker_ebpf::abi::{BUSY, Client, EventKind, GROUP_SLOTS_MAX, REQUEST_BYTES_MAX, Route, Steer};
use broker_ebpf::flow;
use broker_ebpf::phase::{Phase, Word};
use broker_ebpf::scan::{PlainRequest, RequestScan, WhyNot};

use crate::atomic;
use crate::kmem;
use crate::maps::{
    CLIENTS, GROUP_SLOTS, GROUPS, ORIGIN_SOCKETS, REQUESTS, ROUTES, Steered, Way, set_busy,
    set_slot, steered, tally_why, tell,
};
use crate::slots::{Place, TRIES};

const SK_DROP: u32 = 0;
const SK_PASS: u32 = 1;

/// Sockets that are tried before a request goes to the daemon.
const CLAIMS: usize = 4;

/// Requests of a client after which it is seen to that it has read what it got: so many responses
/// may lie unread.
const UNSEEN_MAX: u8 = 16;

/// Origins that are looked at from each of the two random starts.
const LOOKS: u32 = 32;

#[sk_msg]
pub fn broker_request(ctx: SkMsgContext) -> u32 {
    // SAFETY: the context that the kernel handed to the program.
    let sk = unsafe { (*ctx.msg).__bindgen_anon_3.sk };
    let Some(state) = steered(sk) else { return SK_PASS };
    let Some(route) = ROUTES.get(state.route) else { return SK_PASS };
    if state.served != 0
        && let Some(verdict) = unanswered(route, state)
    {
        return verdict;
    }
    let was_free = state.way == Way::Kernel as u8;
    if !is_free(sk, route, state) {
        if was_free {
            // Somebody wanted to hand an exchange over that ended just then: nobody has told.
            tell(route.worker, EventKind::Client, 0, state.cookie);
        }
        return SK_PASS;
    }
    request(&ctx, sk, route, state)
}

/// Whether the daemon has nothing to do for the client: it has answered all that came its way, and
/// the client has read all of that. Otherwise a response that the kernel sends could overtake one
/// of the daemon's.
#[inline(always)]
fn is_free(sk: *mut bpf_sock, route: &Route, state: &mut Steered) -> bool {
    let Some(client) = CLIENTS.get_ptr(state.cookie) else { return false };
    // SAFETY: a value of the map; aligned words are read whole, and the daemon replaces the whole
    // value.
    let [sent_to, received_from] = unsafe { (&raw const (*client).relayed).read_volatile() };
    // Of an exchange before, nothing can have gone another way than this program has sent it. Before
    // the first, something may: what a client sends with its SYN (TCP Fast Open, RFC 7413), or hands to
    // TCP before the handshake is complete, no program sees.
    let all_here = state.way == Way::Kernel as u8
        && sent_to == 0
        && received_from == 0
        && (state.served != 0 || kmem::write_seq(sk).is_some_and(|seq| seq == state.first_seq));
    let free = sent_to != BUSY
        && (all_here
            || kmem::has_exchanged(sk, received_from as u32, state.first_seq, sent_to)
                == Some(true))
        && reads_along(client, route, state);
    state.way = if free { Way::Kernel } else { Way::Relay } as u8;
    free
}

/// Whether the client reads what is redirected to it: that knows no back-pressure, and the kernel's
/// memory is everybody's. Looked at now and then only, as nearly all do.
#[inline(always)]
fn reads_along(client: *const Client, route: &Route, state: &mut Steered) -> bool {
    if state.unseen < UNSEEN_MAX {
        state.unseen += 1;
        return true;
    }
    // SAFETY: a value of the map; the word is written once, before it can be found.
    let read = kmem::has_read_redirected(unsafe { (*client).sk }) == Some(true);
    if read {
        state.unseen = 0;
    } else {
        tally_why(route.service, WhyNot::Unread as u8);
    }
    read
}

/// The client sends while the response to its last request is not complete.
#[inline(always)]
fn unanswered(route: &Route, state: &mut Steered) -> Option<u32> {
    let place = Place::at(state.slot)?;
    for _ in 0..TRIES {
        let word = place.word();
        if word.owner() != state.cookie {
            return None;
        }
        match word.phase() {
            // Nothing of the response has come: the daemon takes both.
            Phase::Head => {
                if place.give_up(word, word.with(Phase::Relay)) {
                    state.way = Way::Relay as u8;
                    tally_why(route.service, WhyNot::Pipelined as u8);
                    return Some(SK_PASS);
                }
            }
            // The rest of it comes the kernel's way; the daemon waits for that.
            Phase::Body => {
                tally_why(route.service, WhyNot::Pipelined as u8);
                return Some(relay(route, state, EventKind::Client));
            }
            // The daemon's, or lost: whatever comes now is for the daemon to see, and after that.
            // Whoever has swapped the word may not have told it yet.
            _ => {
                place.tell(state.cookie);
                state.way = Way::Relay as u8;
                return Some(SK_PASS);
            }
        }
    }
    None
}

/// The client is owed nothing and sends something.
#[inline(always)]
fn request(ctx: &SkMsgContext, sk: *mut bpf_sock, route: &Route, state: &mut Steered) -> u32 {
    if state.served == 0
        && route.steer == Steer::Auto as u32
        && !flow::is_steered(route.steer, kmem::file_flags(sk))
    {
        tally_why(route.service, WhyNot::Blocking as u8);
        return relay(route, state, EventKind::Blocking);
    }
    match scan(ctx.msg, &mut state.scan) {
        Ok(plain) => match send(ctx, route, state, &plain) {
            Sent::Yes => return SK_PASS,
            Sent::Lost => return SK_DROP,
            Sent::No => {
                tally_why(route.service, WhyNot::NoIdle as u8);
                if let Some(group) = GROUPS.get_ptr_mut(route.first_group) {
                    // SAFETY: a value of the map.
                    unsafe { atomic::add(&raw mut (*group).missed, 1) };
                }
            }
        },
        Err(why) => tally_why(route.service, why as u8),
    }
    relay(route, state, EventKind::Client)
}

/// The message, and what follows it, is the daemon's.
#[inline(always)]
fn relay(route: &Route, state: &mut Steered, kind: EventKind) -> u32 {
    set_busy(state.cookie);
    state.way = Way::Relay as u8;
    tell(route.worker, kind, 0, state.cookie);
    SK_PASS
}

/// What has become of a message.
enum Sent {
    Yes,
    /// There was no socket for it.
    No,
    /// The daemon has taken it over before its socket was found: it must not go another way, too.
    Lost,
}

/// Sends the message to an idle origin socket, if there is one.
#[inline(always)]
fn send(ctx: &SkMsgContext, route: &Route, state: &mut Steered, plain: &PlainRequest) -> Sent {
    for attempt in 0..CLAIMS {
        let last = (attempt == 0 && state.served != 0).then_some(state.slot);
        let Some(place) = claim(route, last, state.cookie) else { continue };
        let claimed = Word::new(Phase::Claimed, state.cookie);
        set_slot(state.cookie, place.index);
        let len = write_request(ctx, place, plain);
        let cookie = place.cookie();
        let sent = claimed.with(Phase::Head);
        // Bytes that nobody asked for may have come in between.
        if !place.swap(claimed, sent) {
            place.leave();
            // The slot was this program's until now.
            if place.swap(Word::SPOILED, Word::new(Phase::Dirty, 0)) {
                place.tell(0);
            }
            continue;
        }
        // Last, because it cannot be taken back.
        if ORIGIN_SOCKETS.redirect_msg(ctx, place.index, 0) != i64::from(SK_PASS) {
            if place.give_up(sent, Word::new(Phase::Dirty, 0)) {
                continue;
            }
            return Sent::Lost;
        }
        // From the swap on the daemon may have taken over, closed, and put another socket here.
        if place.cookie() != cookie {
            return Sent::Lost;
        }
        state.slot = place.index;
        state.served = 1;
        if let Some(route) = ROUTES.get_ptr_mut(state.route) {
            // SAFETY: a value of the map.
            unsafe { atomic::add(&raw mut (*route).recently_steered, 1) };
        }
        state.way = Way::Kernel as u8;
        if let Some(group) = place.group() {
            // SAFETY: a value of the map.
            unsafe { atomic::add(&raw mut (*group).request_bytes, len.into()) };
        }
        return Sent::Yes;
    }
    Sent::No
}

/// Notes what the response's program, and the daemon should it take over, must know.
#[inline(always)]
fn write_request(ctx: &SkMsgContext, place: Place, plain: &PlainRequest) -> u32 {
    // SAFETY: the context that the kernel handed to the program.
    let (data, size) = unsafe { ((*ctx.msg).__bindgen_anon_1.data, (*ctx.msg).size) };
    let exchanges = place.exchanges();
    if exchanges > 0
        && let Some(group) = place.group()
    {
        // SAFETY: a value of the map.
        unsafe { atomic::add(&raw mut (*group).reused, 1) };
    }
    // SAFETY: takes nothing and answers a number.
    let now = unsafe { bpf_ktime_get_ns() };
    place.set_started_ns(now);
    if size > plain.head_len {
        // SAFETY: a value of the map, which belongs to this program until the word is swapped.
        unsafe { (*place.slot).body_ns = now };
    }
    place.set_remaining(size);
    place.set_exchanges(exchanges.wrapping_add(1));
    place.set_uses_left(place.uses_left().saturating_sub(1));
    place.set_head_only(plain.head_only.into());
    place.set_request_len(0);
    if let Some(copy) = REQUESTS.get_ptr_mut(place.index) {
        let len = atomic::masked::<{ 2 * REQUEST_BYTES_MAX - 1 }>(size as usize);
        // The scan has seen that it fits.
        if len > 0 && len <= REQUEST_BYTES_MAX {
            // SAFETY: at most the value's length is written; the helper checks where it reads.
            let failed =
                unsafe { bpf_probe_read_kernel(copy.cast(), len as u32, data.cast_const().cast()) };
            if failed == 0 {
                place.set_request_len(len as u32);
            }
        }
    }
    size
}

/// Claims an idle origin socket: the one that served the client last, if that is idle, or one of
/// the better of two origins.
#[inline(always)]
fn claim(route: &Route, last: Option<u32>, client: u64) -> Option<Place> {
    let slots = GROUP_SLOTS.load();
    if slots == 0 {
        return None;
    }
    let index = if let Some(last) = last {
        last
    } else {
        let group = pick(route)?;
        // SAFETY: a value of the map; aligned words are read whole.
        let idle = unsafe { (&raw const (*GROUPS.get_ptr(group)?).idle).read_volatile() };
        if idle == 0 {
            return None;
        }
        group * slots + idle.trailing_zeros()
    };
    let place = Place::at(index)?;
    let group = place.group()?;
    // Whoever clears the bit has the first try.
    let bit = 1_u64 << (u64::from(index % slots) % GROUP_SLOTS_MAX as u64);
    // SAFETY: a value of the map.
    let idle = unsafe {
        if (&raw const (*group).eligible).read_volatile() == 0 {
            return None;
        }
        atomic::fetch_and(&raw mut (*group).idle, !bit)
    };
    if idle & bit == 0 {
        return None;
    }
    if !place.swap(Word::IDLE, Word::new(Phase::Claimed, client)) {
        return None;
    }
    // SAFETY: a value of the map.
    unsafe { atomic::add(&raw mut (*group).active, 1) };
    Some(place)
}

/// Two random choices among the origins that have an idle socket, as the daemon's picker makes
/// them: the one with fewer exchanges under way.
#[inline(always)]
fn pick(route: &Route) -> Option<u32> {
    let (first, first_load) = draw(route)?;
    let (second, second_load) = draw(route)?;
    Some(if second_load < first_load { second } else { first })
}

/// The first origin with an idle socket at or after a random start, and its load.
#[inline(always)]
fn draw(route: &Route) -> Option<(u32, u64)> {
    let first = route.first_group;
    // SAFETY: a value of the map; aligned words are read whole.
    let span = unsafe { (&raw const (*GROUPS.get_ptr(first)?).span).read_volatile() };
    let origins = if span < u64::from(route.origins) { span as u32 } else { route.origins };
    if origins == 0 {
        return None;
    }
    // SAFETY: takes nothing and answers a number.
    let start = unsafe { bpf_get_prandom_u32() } % origins;
    let mut draw = Draw { first, origins, start, group: 0, load: NOT_FOUND };
    let looks = if origins < LOOKS { origins } else { LOOKS };
    // A loop of the kernel's: the verifier would unroll one of ours.
    // SAFETY: the callback gets the context that it expects, which outlives the call.
    unsafe {
        bpf_loop(looks, (look as *const c_void).cast_mut(), (&raw mut draw).cast(), 0);
    }
    (draw.load != NOT_FOUND).then_some((draw.group, draw.load))
}

const NOT_FOUND: u64 = u64::MAX;

/// Loads are compared with so many bits behind the point.
const LOAD_BITS: u32 = 16;

/// What the looks of a draw share.
struct Draw {
    first: u32,
    origins: u32,
    start: u32,
    group: u32,
    load: u64,
}

/// Looks at one origin; 1 ends the loop.
#[inline(never)]
extern "C" fn look(index: u64, context: *mut c_void) -> i64 {
    // SAFETY: `draw` hands this context to the loop.
    let draw = unsafe { &mut *context.cast::<Draw>() };
    let mut origin = draw.start + index as u32;
    if origin >= draw.origins {
        origin -= draw.origins;
    }
    let group = draw.first + origin;
    let Some(shared) = GROUPS.get_ptr(group) else { return 1 };
    // SAFETY: a value of the map; aligned words are read whole.
    let (eligible, idle, active, relay_active, weight) = unsafe {
        (
            (&raw const (*shared).eligible).read_volatile(),
            (&raw const (*shared).idle).read_volatile(),
            (&raw const (*shared).active).read_volatile(),
            (&raw const (*shared).relay_active).read_volatile(),
            (&raw const (*shared).weight).read_volatile(),
        )
    };
    if eligible == 0 || idle == 0 {
        return 0;
    }
    draw.group = group;
    // With this one it would have so many; more weight bears more.
    let load = (active.wrapping_add(relay_active) & u64::from(u32::MAX)) + 1;
    draw.load = (load << LOAD_BITS).checked_div(weight).unwrap_or_default();
    1
}

/// What the steps of a scan share.
struct Scan {
    data: *const u8,
    end: *const u8,
    state: *mut RequestScan,
}

/// Bytes that one step reads: much of what a step costs is the call.
const STEP: u32 = 8;

/// Reads the message.
#[inline(always)]
fn scan(msg: *mut sk_msg_md, state: &mut RequestScan) -> Result<PlainRequest, WhyNot> {
    // SAFETY: the context that the kernel handed to the program.
    let (data, end, size) = unsafe {
        (
            (*msg).__bindgen_anon_1.data.cast_const().cast::<u8>(),
            (*msg).__bindgen_anon_2.data_end.cast_const().cast::<u8>(),
            (*msg).size,
        )
    };
    if size > REQUEST_BYTES_MAX as u32 {
        return Err(WhyNot::TooLong);
    }
    // Several pieces: only the first can be seen.
    if (end as usize).wrapping_sub(data as usize) != size as usize {
        return Err(WhyNot::Partial);
    }
    *state = RequestScan::default();
    let mut scan = Scan { data, end, state };
    let steps = size.div_ceil(STEP);
    // SAFETY: the callback gets the context that it expects, which outlives the call.
    unsafe {
        bpf_loop(steps, (step as *const c_void).cast_mut(), (&raw mut scan).cast(), 0);
    }
    state.finish(size)
}

/// Reads a few bytes; 1 ends the loop.
#[inline(never)]
extern "C" fn step(index: u64, context: *mut c_void) -> i64 {
    // SAFETY: `scan` hands this context to the loop.
    let scan = unsafe { &*context.cast::<Scan>() };
    // SAFETY: a value of the map, which this call of the program alone uses.
    let state = unsafe { &mut *scan.state };
    let first = index * u64::from(STEP);
    for i in 0..u64::from(STEP) {
        let offset = atomic::masked::<{ 2 * REQUEST_BYTES_MAX - 1 }>((first + i) as usize);
        let at = scan.data.wrapping_add(offset);
        if at.wrapping_add(1) > scan.end {
            return 1;
        }
        // SAFETY: before the end, as just checked.
        state.push(unsafe { *at });
    }
    i64::from(state.is_over())
}
