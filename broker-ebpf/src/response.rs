//! Sends an origin's response to its client, and finds its end.
//!
//! The program sees every segment that an origin sends on a socket that it may use. The first one
//! of a response decides: if the head is plain and the whole response is short, the bytes go into
//! the client's receive queue and are counted, and the socket is idle again after the last one.
//! Otherwise the daemon goes on, with TCP's own back-pressure: redirected bytes have none.
//!
//! It runs under the socket's lock, in softirqs and in processes alike, so nothing of it may live
//! in memory of the CPU: each slot has its own room for a head.

use core::ffi::c_void;

use aya_ebpf::bindings::{__sk_buff, BPF_F_INGRESS};
use aya_ebpf::helpers::generated::{
    bpf_get_socket_cookie, bpf_ktime_get_ns, bpf_loop, bpf_skb_change_tail, bpf_skb_load_bytes,
};
use aya_ebpf::macros::stream_verdict;
use aya_ebpf::programs::SkBuffContext;
use broker_ebpf::abi::{BUCKETS, Group, HEAD_BYTES_MAX, RESPONSE_BYTES_MAX, Stray, Tally};
use broker_ebpf::flow;
use broker_ebpf::phase::{Phase, Word};
use broker_ebpf::scan::{PlainResponse, ResponseScan, WhyNot};

use crate::atomic;
use crate::kmem;
use crate::maps::{CLIENT_SOCKETS, HEADS, Head, ORIGIN_SLOTS, tally, tally_why};
use crate::segment;
use crate::slots::{Place, TRIES};

const SK_DROP: u32 = 0;
const SK_PASS: u32 = 1;

#[stream_verdict]
pub fn broker_response(ctx: SkBuffContext) -> u32 {
    let skb = ctx.skb.skb;
    // SAFETY: the context that the kernel handed to the program.
    let cookie = unsafe { bpf_get_socket_cookie(skb.cast()) };
    // SAFETY: a value of the map, copied at once.
    let Some(slot) = (unsafe { ORIGIN_SLOTS.get(cookie) }) else { return SK_PASS };
    let Some(place) = Place::at(*slot) else { return SK_PASS };
    let Some(len) = new_bytes(skb, place) else { return out_of_step(place) };
    // Not one of the response's bytes, but redirected it would be.
    let urgent = kmem::is_urgent(skb);
    for _ in 0..TRIES {
        let word = place.word();
        let verdict = match word.phase() {
            Phase::Free | Phase::Relay => Some(SK_PASS),
            Phase::Dirty => Some(SK_DROP),
            _ if word == Word::SPOILED => Some(SK_DROP),
            Phase::Offered | Phase::Idle | Phase::Claimed => unsolicited(place, word, len),
            Phase::Head if len == 0 || urgent => to_daemon(place, word),
            Phase::Head => first(&ctx, place, word, len),
            Phase::Body if urgent => cut_off(place, word),
            Phase::Body => next(&ctx, place, word, len),
        };
        if let Some(verdict) = verdict {
            return verdict;
        }
    }
    // Cannot be: each phase is left in one direction only.
    SK_DROP
}

/// How many of the segment's bytes are new; the others are cut off. `None` if that cannot be told.
#[inline(always)]
fn new_bytes(skb: *mut __sk_buff, place: Place) -> Option<u32> {
    let new = segment::new_bytes(skb, place.in_step() != 0, place.next_seq())?;
    place.set_next_seq(new.next_seq);
    place.set_in_step(1);
    Some(new.len)
}

/// Nobody can tell which bytes these are, nor any that follow: nobody gets them.
#[inline(always)]
fn out_of_step(place: Place) -> u32 {
    for _ in 0..TRIES {
        let word = place.word();
        let done = match word.phase() {
            // Whoever reads from it waits for bytes that do not come, until its time is over.
            Phase::Free | Phase::Relay | Phase::Dirty => true,
            _ if word == Word::SPOILED => true,
            Phase::Offered | Phase::Idle | Phase::Claimed => unsolicited(place, word, 1).is_some(),
            Phase::Head => place.give_up(word, word.with(Phase::Relay)),
            Phase::Body => place.give_up(word, word.with(Phase::Dirty)),
        };
        if done {
            break;
        }
    }
    SK_DROP
}

/// Bytes, or an end, that no exchange accounts for.
#[inline(always)]
fn unsolicited(place: Place, word: Word, len: u32) -> Option<u32> {
    let claimed = word.phase() == Phase::Claimed;
    let next = if claimed { Word::SPOILED } else { Word::new(Phase::Dirty, 0) };
    if !place.swap(word, next) {
        return None;
    }
    if len > 0 {
        tally(Tally::Unsolicited);
    }
    // The claim that fails now counts itself out, and tells the daemon.
    if !claimed {
        place.tell(0);
    }
    Some(SK_DROP)
}

/// The daemon goes on.
#[inline(always)]
fn to_daemon(place: Place, word: Word) -> Option<u32> {
    place.give_up(word, word.with(Phase::Relay)).then_some(SK_PASS)
}

/// The first bytes of a response.
#[inline(always)]
fn first(ctx: &SkBuffContext, place: Place, word: Word, len: u32) -> Option<u32> {
    let Some(stray) = stray(ctx.skb.skb, place) else { return to_daemon(place, word) };
    if stray != Stray::None as u8 {
        place.set_stray(stray);
        place.set_remaining(0);
    }
    if stray == Stray::Response as u8 {
        tally(Tally::Unsolicited);
        return to_daemon(place, word);
    }
    let plain = match scan(ctx.skb.skb, place, len, place.head_only() != 0) {
        // Bytes after the end: the daemon knows how to give the client its own only.
        Ok(plain) if plain.total < len => Err(WhyNot::Surplus),
        result => result,
    };
    let plain = match plain {
        Ok(plain) => plain,
        Err(why) => {
            let verdict = to_daemon(place, word);
            if verdict.is_some()
                && let Some(group) = place.group()
            {
                // SAFETY: a value of the map.
                unsafe { atomic::add(&raw mut (*group).taken_over, 1) };
                tally_why(service(group), why as u8);
            }
            return verdict;
        }
    };
    // While it is this exchange's.
    let started_ns = place.started_ns();
    // SAFETY: a value of the map, which belongs to this program while a response comes.
    unsafe { (*place.slot).origin_idle_s = plain.origin_idle_s };
    if plain.total == len {
        if !finish(place, word) {
            return None;
        }
        count_first(place, &plain, len, started_ns);
        return Some(redirect(ctx, place, word.owner()));
    }
    if !place.swap(word, word.with(Phase::Body)) {
        return None;
    }
    // Not before: whoever takes the exchange over would take it for what is left of the request.
    place.set_remaining(plain.total - len);
    count_first(place, &plain, len, started_ns);
    Some(redirect(ctx, place, word.owner()))
}

/// Whether a response's first segment can be one, by what the origin's TCP had of the request when it
/// sent this: an origin answers nothing that it has not got. A [`Stray`], as the compiler makes of an
/// `Option` of one what the verifier does not accept.
#[inline(always)]
fn stray(skb: *mut __sk_buff, place: Place) -> Option<u8> {
    // SAFETY: the context that the kernel handed to the program.
    let sk = unsafe { (*skb).__bindgen_anon_2.sk };
    let on_its_way = kmem::write_seq(sk)?.wrapping_sub(kmem::segment_ack_seq(skb)?);
    Some(flow::stray(place.request_len(), place.remaining(), on_its_way) as u8)
}

/// The rest of a response will not come.
#[inline(always)]
fn cut_off(place: Place, word: Word) -> Option<u32> {
    place.give_up(word, word.with(Phase::Dirty)).then_some(SK_DROP)
}

/// More of a plain response.
#[inline(always)]
fn next(ctx: &SkBuffContext, place: Place, word: Word, len: u32) -> Option<u32> {
    let remaining = place.remaining();
    if len == 0 {
        return cut_off(place, word);
    }
    if len > remaining {
        // The client gets what is its own, and nobody the rest.
        // SAFETY: the context that the kernel handed to the program.
        let cut = unsafe { bpf_skb_change_tail(ctx.skb.skb, remaining, 0) } == 0;
        let owner = if cut { 0 } else { word.owner() };
        if !place.give_up(word, Word::new(Phase::Dirty, owner)) {
            return None;
        }
        tally(Tally::Surplus);
        if !cut {
            return Some(SK_DROP);
        }
        count_bytes(place, remaining);
        return Some(redirect(ctx, place, word.owner()));
    }
    if len == remaining {
        if !finish(place, word) {
            return None;
        }
        count_bytes(place, len);
        return Some(redirect(ctx, place, word.owner()));
    }
    place.set_remaining(remaining - len);
    count_bytes(place, len);
    Some(redirect(ctx, place, word.owner()))
}

/// The response is complete.
#[inline(always)]
fn finish(place: Place, word: Word) -> bool {
    place.set_remaining(0);
    // SAFETY: a value of the map, which belongs to this program until the word is swapped.
    unsafe { (*place.slot).idle_since_ns = bpf_ktime_get_ns() };
    let reusable =
        place.uses_left() > 0 && place.ended() == 0 && place.stray() == Stray::None as u8;
    let group = place.group();
    // SAFETY: a value of the map; aligned words are read whole.
    let wanted =
        group.is_some_and(|group| unsafe { (&raw const (*group).wanted).read_volatile() } != 0);
    let stays = reusable && !wanted;
    let next = if stays { Word::IDLE } else { Word::new(Phase::Relay, 0) };
    if !place.swap(word, next) {
        return false;
    }
    if let Some(group) = group {
        // Before it leaves: whoever looks must see it in one of the two.
        // SAFETY: a value of the map.
        unsafe { atomic::add(&raw mut (*group).completed, 1) };
    }
    place.leave();
    if stays {
        place.set_idle();
    } else {
        place.tell(0);
    }
    true
}

#[inline(always)]
fn redirect(ctx: &SkBuffContext, place: Place, client: u64) -> u32 {
    if CLIENT_SOCKETS.redirect_skb(ctx, client, BPF_F_INGRESS.into()) == i64::from(SK_PASS) {
        return SK_PASS;
    }
    if let Some(group) = place.group() {
        // It has left. The rest is counted, and reaches nobody.
        // SAFETY: a value of the map.
        unsafe { atomic::add(&raw mut (*group).clients_gone, 1) };
    }
    SK_DROP
}

/// `started_ns` was read while the socket was this exchange's.
#[inline(always)]
fn count_first(place: Place, plain: &PlainResponse, len: u32, started_ns: u64) {
    let Some(group) = place.group() else { return };
    // SAFETY: values of the map.
    unsafe {
        let us = bpf_ktime_get_ns().saturating_sub(started_ns) / 1000;
        let bucket = atomic::masked::<{ BUCKETS - 1 }>(flow::bucket(us));
        atomic::add((&raw mut (*group).latency_us).cast::<u64>().add(bucket), 1);
        atomic::add(&raw mut (*group).latency_us_sum, us);
        let class = atomic::masked::<7>((plain.status / 100) as usize);
        atomic::add((&raw mut (*group).status).cast::<u64>().add(class), 1);
        atomic::add(&raw mut (*group).response_bytes, len.into());
    }
}

#[inline(always)]
fn count_bytes(place: Place, len: u32) {
    if let Some(group) = place.group() {
        // SAFETY: a value of the map.
        unsafe { atomic::add(&raw mut (*group).response_bytes, len.into()) };
    }
}

#[inline(always)]
fn service(group: *mut Group) -> u32 {
    // SAFETY: a value of the map, written once before it is used.
    unsafe { (&raw const (*group).service).read_volatile() as u32 }
}

/// What the steps of a scan share.
struct Scan {
    head: *mut Head,
    len: u32,
}

/// Bytes that one step reads: much of what a step costs is the call.
const STEP: u32 = 4;

/// Reads the head that the segment begins with.
#[inline(always)]
fn scan(
    skb: *mut __sk_buff,
    place: Place,
    len: u32,
    head_only: bool,
) -> Result<PlainResponse, WhyNot> {
    let Some(head) = HEADS.get_ptr_mut(place.index) else { return Err(WhyNot::Odd) };
    let len = if len > HEAD_BYTES_MAX as u32 { HEAD_BYTES_MAX as u32 } else { len };
    let len = atomic::masked::<{ 2 * HEAD_BYTES_MAX - 1 }>(len as usize);
    if len == 0 || len > HEAD_BYTES_MAX {
        return Err(WhyNot::SplitHead);
    }
    // SAFETY: at most the value's length is written.
    if unsafe { bpf_skb_load_bytes(skb.cast(), 0, (&raw mut (*head).bytes).cast(), len as u32) }
        != 0
    {
        return Err(WhyNot::Odd);
    }
    // SAFETY: a value of the map, which this call of the program alone uses.
    let state = unsafe { &mut (*head).scan };
    *state = ResponseScan::default();
    let mut scan = Scan { head, len: len as u32 };
    let steps = (len as u32).div_ceil(STEP);
    // SAFETY: the callback gets the context that it expects, which outlives the call.
    unsafe {
        bpf_loop(steps, (step as *const c_void).cast_mut(), (&raw mut scan).cast(), 0);
    }
    match state.finish(head_only, RESPONSE_BYTES_MAX) {
        Ok(plain) if plain.status >= 500 => Err(WhyNot::Failed),
        scanned => scanned,
    }
}

/// Reads a few bytes; 1 ends the loop.
#[inline(never)]
extern "C" fn step(index: u64, context: *mut c_void) -> i64 {
    const { assert!(HEAD_BYTES_MAX.is_power_of_two()) };
    // SAFETY: `scan` hands this context to the loop.
    let (head, len) = unsafe {
        let scan = &*context.cast::<Scan>();
        (&mut *scan.head, scan.len)
    };
    let first = index * u64::from(STEP);
    for i in 0..u64::from(STEP) {
        if first + i >= u64::from(len) {
            return 1;
        }
        let at = atomic::masked::<{ HEAD_BYTES_MAX - 1 }>((first + i) as usize);
        // SAFETY: within the array.
        head.scan.push(unsafe { *(&raw const head.bytes).cast::<u8>().add(at) });
    }
    i64::from(head.scan.is_over())
}
