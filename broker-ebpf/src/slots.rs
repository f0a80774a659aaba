//! What all programs do with origin sockets: look at a word, swap it, keep count.

use broker_ebpf::abi::{EventKind, GROUP_SLOTS_MAX, Group, Slot, Stray};
use broker_ebpf::phase::{Phase, Word};

use crate::atomic;
use crate::maps::{GROUP_SLOTS, GROUPS, SLOTS, set_busy, tell};

/// A word changes at most this often while one event is being looked at: an exchange has few
/// phases, and each of them only one direction.
pub const TRIES: usize = 6;

/// An origin socket of the kernel's.
#[derive(Clone, Copy)]
pub struct Place {
    pub index: u32,
    pub slot: *mut Slot,
}

/// Reads and writes a slot's fields, each whole. Whose they are when, [`Slot`] says.
macro_rules! fields {
    ($($get:ident $set:ident: $type:ty;)*) => {
        impl Place {
            $(
                #[inline(always)]
                pub fn $get(self) -> $type {
                    // SAFETY: a value of the map; aligned words are read whole.
                    unsafe { (&raw const (*self.slot).$get).read_volatile() }
                }

                #[inline(always)]
                pub fn $set(self, value: $type) {
                    // SAFETY: a value of the map; aligned words are written whole.
                    unsafe { (&raw mut (*self.slot).$get).write_volatile(value) }
                }
            )*
        }
    };
}

fields! {
    started_ns set_started_ns: u64;
    remaining set_remaining: u32;
    exchanges set_exchanges: u32;
    uses_left set_uses_left: u32;
    request_len set_request_len: u32;
    next_seq set_next_seq: u32;
    head_only set_head_only: u8;
    ended set_ended: u8;
    in_step set_in_step: u8;
    stray set_stray: u8;
}

impl Place {
    #[inline(always)]
    pub fn at(index: u32) -> Option<Self> {
        Some(Self { index, slot: SLOTS.get_ptr_mut(index)? })
    }

    #[inline(always)]
    pub fn word(self) -> Word {
        // SAFETY: a value of the map; aligned words are read whole.
        Word(unsafe { (&raw const (*self.slot).word).read_volatile() })
    }

    #[inline(always)]
    pub fn swap(self, old: Word, new: Word) -> bool {
        // SAFETY: a value of the map.
        unsafe { atomic::swap(&raw mut (*self.slot).word, old.0, new.0) }
    }

    /// Which socket is here.
    #[inline(always)]
    pub fn cookie(self) -> u64 {
        // SAFETY: a value of the map; aligned words are read whole.
        unsafe { (&raw const (*self.slot).cookie).read_volatile() }
    }

    /// Makes the daemon look at the word.
    #[inline(always)]
    pub fn tell(self, client: u64) {
        // SAFETY: a value of the map, written once before the socket is used.
        let worker = unsafe { (&raw const (*self.slot).worker).read_volatile() };
        tell(worker, EventKind::Slot, self.index, client);
    }

    /// The counters of its origin.
    #[inline(always)]
    pub fn group(self) -> Option<*mut Group> {
        GROUPS.get_ptr_mut(self.index.checked_div(GROUP_SLOTS.load())?)
    }

    /// The kernel's part in an exchange is over.
    #[inline(always)]
    pub fn leave(self) {
        if let Some(group) = self.group() {
            // SAFETY: a value of the map.
            unsafe { atomic::add(&raw mut (*group).active, 1_u64.wrapping_neg()) };
        }
    }

    /// Swaps, ends the kernel's part and tells the daemon.
    #[inline(always)]
    pub fn give_up(self, old: Word, new: Word) -> bool {
        if new.owner() != 0 {
            // Before the swap: no request may be steered past the response that the daemon sends.
            set_busy(new.owner());
        }
        let swapped = self.swap(old, new);
        if swapped {
            if old.phase().is_steered() {
                self.leave();
            }
            self.tell(new.owner());
        }
        swapped
    }

    /// Tells everybody that the socket is idle.
    #[inline(always)]
    pub fn set_idle(self) {
        let slots = GROUP_SLOTS.load();
        if slots != 0
            && let Some(group) = self.group()
        {
            let bit = u64::from(self.index % slots) % GROUP_SLOTS_MAX as u64;
            // SAFETY: a value of the map.
            unsafe { atomic::or(&raw mut (*group).idle, 1 << bit) };
        }
    }
}

/// A client has ended its side, or is gone.
#[inline(always)]
pub fn client_left(slot: u32, client: u64) {
    let Some(place) = Place::at(slot) else { return };
    for _ in 0..TRIES {
        let word = place.word();
        // Of a body there is a short rest: it is counted, and dropped if nobody listens.
        if word != Word::new(Phase::Head, client) {
            return;
        }
        // Whether it still listens is for the daemon to see.
        if place.give_up(word, word.with(Phase::Relay)) {
            return;
        }
    }
}

/// A segment is about to be sent to an origin, whose TCP has got so many bytes since the last one.
#[inline(always)]
pub fn sends(slot: u32, cookie: u64, more: u32, urgent: bool) {
    let Some(place) = Place::at(slot) else { return };
    if place.cookie() != cookie {
        return;
    }
    if urgent {
        place.set_stray(Stray::Urgent as u8);
    }
    let word = place.word();
    // Or the exchange was handed over before its message was.
    if word.phase() == Phase::Head || word.phase() == Phase::Relay && word.owner() != 0 {
        // Nobody else writes to it now: the response's program runs under the same socket's lock.
        place.set_remaining(place.remaining().saturating_sub(more));
    }
}

/// An origin has ended its side (`gone`: the whole connection).
#[inline(always)]
pub fn origin_left(slot: u32, cookie: u64, gone: bool) {
    let Some(place) = Place::at(slot) else { return };
    if place.cookie() != cookie {
        return;
    }
    place.set_ended(1);
    for _ in 0..TRIES {
        let word = place.word();
        let next = match word.phase() {
            _ if word == Word::SPOILED => return,
            Phase::Claimed => Word::SPOILED,
            Phase::Offered | Phase::Idle => Word::new(Phase::Dirty, 0),
            // Bytes may have come with the end: the program that sees them decides.
            _ if !gone => return,
            Phase::Head => word.with(Phase::Relay),
            Phase::Body => word.with(Phase::Dirty),
            Phase::Free | Phase::Relay | Phase::Dirty => return,
        };
        // A claim that fails now counts itself out, and tells the daemon.
        let swapped = if word.phase() == Phase::Claimed {
            place.swap(word, next)
        } else {
            place.give_up(word, next)
        };
        if swapped {
            return;
        }
    }
}
