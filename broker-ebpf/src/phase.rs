//! The word that says whose an origin socket is.
//!
//! An origin socket that the kernel programs may use has one 64-bit word, `owner << 8 | phase`,
//! which programs and daemon change by compare-and-swap only. The owner is the cookie of the
//! client's socket, 0 if there is none. With owner and phase in one word, nobody can act on a
//! phase that belongs to another client: the swap fails.
//!
//! [`Actor`] and [`allowed`] are the state machine; `ARCHITECTURE.md` explains it, and an
//! exhaustive search over all interleavings checks it.

#![expect(clippy::inline_always, reason = "the verifier follows bounds within a function only")]

/// Where an origin socket stands.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// No socket.
    Free = 0,
    /// The daemon is about to offer it, and looks a last time whether it is silent. Bytes make it
    /// dirty.
    Offered = 1,
    /// Whoever comes first may have it. Bytes make it dirty.
    Idle = 2,
    /// A client has it, but its request is not sent yet. Bytes take its owner away: then it is for
    /// the claiming program, which may still write to the slot, to make it dirty.
    Claimed = 3,
    /// The request is sent. The first bytes decide whether the kernel or the daemon goes on.
    Head = 4,
    /// The response is plain; its bytes go to the owner and are counted.
    Body = 5,
    /// The daemon's. Bytes go to its own queue.
    Relay = 6,
    /// To be closed by the daemon. Bytes are dropped. An owner has not got its whole response.
    Dirty = 7,
}

impl Phase {
    /// The phase with this number; unknown ones are dirty.
    #[must_use]
    #[inline(always)]
    pub const fn from_u8(number: u8) -> Self {
        match number {
            0 => Self::Free,
            1 => Self::Offered,
            2 => Self::Idle,
            3 => Self::Claimed,
            4 => Self::Head,
            5 => Self::Body,
            6 => Self::Relay,
            _ => Self::Dirty,
        }
    }

    /// Whether an exchange that the kernel carries is under way.
    #[must_use]
    #[inline(always)]
    pub const fn is_steered(self) -> bool {
        matches!(self, Self::Claimed | Self::Head | Self::Body)
    }
}

/// A phase and its owner.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Word(pub u64);

impl Word {
    /// No socket.
    pub const FREE: Self = Self::new(Phase::Free, 0);
    /// Offered.
    pub const OFFERED: Self = Self::new(Phase::Offered, 0);
    /// Idle.
    pub const IDLE: Self = Self::new(Phase::Idle, 0);
    /// Claimed, but something that nobody asked for has come since.
    pub const SPOILED: Self = Self::new(Phase::Claimed, 0);

    /// Puts a word together. Socket cookies are counted up from 1 and do not reach 56 bits.
    #[must_use]
    #[inline(always)]
    pub const fn new(phase: Phase, owner: u64) -> Self {
        Self(owner << 8 | phase as u64)
    }

    /// The phase.
    #[must_use]
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the lowest byte is meant")]
    pub const fn phase(self) -> Phase {
        Phase::from_u8(self.0 as u8)
    }

    /// The owner's socket cookie; 0 if nobody's.
    #[must_use]
    #[inline(always)]
    pub const fn owner(self) -> u64 {
        self.0 >> 8
    }

    /// The same owner in another phase.
    #[must_use]
    #[inline(always)]
    pub const fn with(self, phase: Phase) -> Self {
        Self::new(phase, self.owner())
    }
}

/// Who may change a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Actor {
    /// The daemon's worker that the socket belongs to.
    Daemon,
    /// The program in a client's `send()`.
    Request,
    /// The program that sees what the origin sends.
    Response,
    /// The program that sees sockets change their TCP state.
    Close,
}

/// Whether an actor may make a transition. This is the whole state machine.
#[must_use]
#[expect(clippy::match_same_arms, reason = "a table, one line for each kind of transition")]
pub const fn allowed(actor: Actor, from: Word, to: Word) -> bool {
    use Phase::{Body, Claimed, Dirty, Free, Head, Idle, Offered, Relay};
    let same_owner = from.owner() == to.owner();
    let ownerless = to.owner() == 0;
    match actor {
        Actor::Daemon => match (from.phase(), to.phase()) {
            (Free | Idle, Relay) | (Relay, Offered) | (Offered, Idle) => ownerless,
            // Closed.
            (Relay | Dirty, Free) => ownerless,
            // Leased, settled, and found unclean.
            (Relay | Offered, Relay) => ownerless,
            // Takes a slow exchange over; gives a stalled one up.
            (Head, Relay) | (Body, Dirty) => same_owner,
            _ => false,
        },
        Actor::Request => match (from.phase(), to.phase()) {
            (Idle, Claimed) => from.owner() == 0 && !ownerless,
            (Claimed, Head) | (Head, Relay) => same_owner,
            // Its message could not be sent after all.
            (Claimed | Head, Dirty) => ownerless,
            _ => false,
        },
        Actor::Response => match (from.phase(), to.phase()) {
            (Offered | Idle, Dirty) | (Claimed, Claimed) => ownerless,
            (Head, Body) => same_owner,
            // Complete.
            (Head | Body, Idle) => ownerless,
            // Not plain, or complete on a socket that may serve no other.
            (Head, Relay) => same_owner || ownerless,
            (Body, Relay) => ownerless,
            // Cut off, or complete with bytes too many.
            (Body, Dirty) => same_owner || ownerless,
            _ => false,
        },
        Actor::Close => match (from.phase(), to.phase()) {
            (Offered | Idle, Dirty) | (Claimed, Claimed) => ownerless,
            (Head, Relay) | (Body, Dirty) => same_owner,
            _ => false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_keeps_both_parts() {
        for number in 0..=7 {
            let phase = Phase::from_u8(number);
            assert_eq!(phase as u8, number);
            let word = Word::new(phase, 0x1234_5678_9abc);
            assert_eq!((word.phase(), word.owner()), (phase, 0x1234_5678_9abc));
            assert_eq!(word.with(Phase::Dirty).owner(), word.owner());
        }
        assert_eq!(Phase::from_u8(200), Phase::Dirty);
    }

    #[test]
    fn no_transition_gives_a_socket_to_another_client() {
        let actors = [Actor::Daemon, Actor::Request, Actor::Response, Actor::Close];
        let words = (0..=7).flat_map(|n| [0, 1, 2].map(|o| Word::new(Phase::from_u8(n), o)));
        for (actor, from, to) in actors
            .into_iter()
            .flat_map(|a| words.clone().map(move |f| (a, f)))
            .flat_map(|(a, f)| words.clone().map(move |t| (a, f, t)))
        {
            let changes_hands = from.owner() != 0 && to.owner() != 0 && from.owner() != to.owner();
            assert!(!(changes_hands && allowed(actor, from, to)), "{actor:?} {from:?} {to:?}");
            let from_nobody = from.owner() == 0 && to.owner() != 0;
            let claim = actor == Actor::Request && from.phase() == Phase::Idle;
            assert!(
                !allowed(actor, from, to) || !from_nobody || claim,
                "{actor:?} {from:?} {to:?}"
            );
        }
    }
}
