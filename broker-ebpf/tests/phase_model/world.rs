//! What programs, daemon, clients and origins share, and the rules that hold in it.

use std::collections::BTreeSet;

use broker_ebpf::phase::{Actor, Phase, Word, allowed};

use super::client::Client;
use super::daemon::Daemon;
use super::origin::Socket;

/// Places for origin sockets.
pub(crate) const SLOTS: usize = 2;

/// Claimed, but something has come on it since.
pub(crate) const SPOILED: Word = Word::SPOILED;

/// A client's request: who sends it, and its number among that client's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Ask {
    pub(crate) client: usize,
    pub(crate) number: u8,
}

/// What a request is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// Plain.
    Get,
    /// Plain, and its response has no body whatever its head says.
    Head,
    /// For the daemon to read.
    Odd,
}

/// What an origin sends at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Segment {
    pub(crate) bytes: Bytes,
    /// Bytes that belong to nothing follow in the same segment.
    pub(crate) surplus: bool,
}

/// See [`Segment`]. Which exchange bytes belong to is for the checks only: no program reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Bytes {
    /// A plain response.
    Whole(Ask),
    /// The head of one, and not all of its body.
    First(Ask),
    /// The rest.
    Last(Ask),
    /// A response to a `HEAD`.
    HeadOnly(Ask),
    /// A response that is not plain.
    NotPlain(Ask),
    /// No response at all, sent after this one.
    Junk(Option<Ask>),
    /// A response that nobody asked for, as some origins send one before they close an idle
    /// connection. After a request has been sent nobody can tell it from a response.
    Goodbye,
    /// The end of the origin's side.
    End,
    /// The daemon's own answer.
    Refusal(Ask),
}

/// A word and what goes with it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::struct_excessive_bools, reason = "facts that the programs note one by one")]
pub(crate) struct Slot {
    pub(crate) word: Word,
    /// The entry in the map of sockets, which may go before the slot is free.
    pub(crate) socket: Option<usize>,
    /// The socket that was put here last.
    pub(crate) cookie: Option<usize>,
    pub(crate) head_only: bool,
    pub(crate) request: Option<Ask>,
    pub(crate) uses_left: u8,
    pub(crate) ended: bool,
    /// TCP has not got the request.
    pub(crate) unsent: bool,
    /// What came as a response was sent before that.
    pub(crate) strayed: bool,
}

/// What the daemon is told: to look at a slot. The owner at the time is told too, but only
/// [`Mistake::TrustsEvents`] makes anything of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Event(pub(crate) usize, pub(crate) u64);

/// How often something that need not happen may happen in a scenario.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Budget {
    /// Segments that belong to nothing.
    pub(crate) junk: u8,
    /// Bytes that belong to nothing at the end of a response's segment.
    pub(crate) surplus: u8,
    /// See [`Bytes::Goodbye`].
    pub(crate) goodbye: u8,
    /// Origins that end their side, in a segment of its own.
    pub(crate) end: u8,
    /// Origins that end their side with the last segment of a response.
    pub(crate) end_with_data: u8,
    /// Origins that reset a connection.
    pub(crate) reset: u8,
    /// Clients that close.
    pub(crate) close: u8,
    /// Clients that end their sending side.
    pub(crate) half_close: u8,
    /// Looks of the daemon's at one slot without being told: exchanges are slow, sockets expired.
    pub(crate) sweeps: u8,
    /// Lookups in the map of sockets that fail.
    pub(crate) lookup_fails: u8,
    /// Segments that could not be cut.
    pub(crate) cut_fails: u8,
    /// Events that are lost.
    pub(crate) lost: u8,
}

/// A small world to explore.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent of each other")]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// Each client's requests.
    pub(crate) clients: &'static [&'static [Kind]],
    /// Clients may send before they have their response.
    pub(crate) pipelining: bool,
    /// Responses come in up to two segments.
    pub(crate) split: bool,
    /// Responses may be other than plain.
    pub(crate) not_plain: bool,
    /// Slots in use.
    pub(crate) slots: usize,
    /// Connections to origins that may be opened.
    pub(crate) sockets: usize,
    /// How many requests one of them may serve.
    pub(crate) uses: u8,
    /// An exchange with a started response may have stalled, a request not have been sent for too
    /// long, and an idle socket have expired, when the daemon looks.
    pub(crate) impatient: bool,
    pub(crate) budget: Budget,
    pub(crate) mistakes: &'static [Mistake],
}

/// Ways to get the protocol wrong. The explorer must find each of them out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// Owner and phase are two fields, changed one after the other.
    OwnerApart,
    /// The daemon does what an event says without looking at the word.
    TrustsEvents,
    /// Bytes are redirected to the owner that the slot has by then.
    OwnerReadAnew,
    /// A socket is said to be idle before it is.
    BitFirst,
    /// Who clears the bit has the socket.
    BitOnly,
    /// A socket is claimed as if the request were sent already.
    NoClaim,
    /// The daemon gets a claimed socket back, and may put another one in its place, while the
    /// claiming program still writes to the slot.
    ForgetsClaimer,
    /// A message goes to the socket that is found in the slot, whichever that is by then.
    LookupUnchecked,
    /// A request whose socket is gone is sent elsewhere, although the daemon may have it by then.
    SendsTwice,
    /// A response is taken for one to a request that the origin cannot have.
    AnswersUnsent,
    /// What TCP gets is not counted once the exchange is handed over.
    CountsTooShort,
    /// The daemon goes on with an exchange whose request may still be refused.
    TakesUnsent,
    /// The daemon sends to a client that has not read all that was redirected to it.
    Overtakes,
    /// The daemon does so after it has looked at the phase only: an exchange that was cut off is
    /// not under way any more, but its client does not know yet.
    LooksAtPhase,
    /// A message is passed to the daemon before that was told of the exchange before.
    PassesUntold,
    /// A response is cut off as soon as its origin has ended, although its rest came with the end.
    CutsAtOnce,
    /// A client sends on between the swap that ends its exchange and the arrival of the last bytes
    /// that are redirected to it. Only one that does not wait for responses can. Programs cannot
    /// close this window: elsewhere the two are one step for such clients.
    Window,
}

/// What the explorer learns on the way.
pub(crate) struct Context<'a> {
    pub(crate) scenario: &'a Scenario,
    /// Transitions made: by whom, from, to, and whether nobody owns the result.
    pub(crate) made: BTreeSet<(u8, Phase, Phase, bool)>,
}

impl Context<'_> {
    pub(crate) fn errs(&self, mistake: Mistake) -> bool {
        self.scenario.mistakes.contains(&mistake)
    }
}

/// Everything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) slots: [Slot; SLOTS],
    pub(crate) idle: u8,
    pub(crate) active: i8,
    pub(crate) sockets: Vec<Socket>,
    pub(crate) clients: Vec<Client>,
    pub(crate) daemon: Daemon,
    pub(crate) events: BTreeSet<Event>,
    pub(crate) left: Budget,
    /// Owners that are still to be written, with [`Mistake::OwnerApart`].
    pub(crate) late_owners: Vec<(Thread, usize, u64)>,
    /// The rule that was broken.
    pub(crate) broken: Option<&'static str>,
}

/// Who acts: what one of these does is a sequence, everything else interleaves.
///
/// All that programs do for one client's socket, or for one origin's, happens under that socket's
/// lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Thread {
    Client(usize),
    Socket(usize),
    Daemon,
}

/// The client with this cookie; `None` for nobody's.
pub(crate) fn client_of(owner: u64) -> Option<usize> {
    usize::try_from(owner).ok()?.checked_sub(1)
}

impl World {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let slot = Slot {
            word: Word::FREE,
            socket: None,
            cookie: None,
            head_only: false,
            request: None,
            uses_left: 0,
            ended: false,
            unsent: false,
            strayed: false,
        };
        let mut daemon = Daemon::new(scenario.clients.len());
        daemon.held[0] = Some(0);
        let idle = Slot {
            word: Word::IDLE,
            socket: Some(0),
            cookie: Some(0),
            uses_left: scenario.uses,
            ..slot.clone()
        };
        Self {
            slots: [idle, slot],
            idle: 1,
            active: 0,
            sockets: vec![Socket::new(Some(0))],
            clients: scenario.clients.iter().map(|_| Client::default()).collect(),
            daemon,
            events: BTreeSet::new(),
            left: scenario.budget.clone(),
            late_owners: Vec::new(),
            broken: None,
        }
    }

    pub(crate) fn fail(&mut self, rule: &'static str) {
        self.broken.get_or_insert(rule);
    }

    pub(crate) fn word(&self, slot: usize) -> Word {
        self.slots[slot].word
    }

    /// Compares and swaps.
    pub(crate) fn swap(
        &mut self,
        context: &mut Context,
        (thread, actor): (Thread, Actor),
        slot: usize,
        old: Word,
        new: Word,
    ) -> bool {
        let found = self.word(slot);
        if context.errs(Mistake::OwnerApart) {
            if found.phase() != old.phase() {
                return false;
            }
            self.slots[slot].word = found.with(new.phase());
            if old.owner() != new.owner() {
                self.late_owners.push((thread, slot, new.owner()));
            }
        } else {
            if found != old {
                return false;
            }
            self.store(context, actor, slot, new);
        }
        // A claim that fails counts itself out.
        let counted = old.phase().is_steered() && old.phase() != Phase::Claimed;
        self.active -= i8::from(counted && !new.phase().is_steered());
        true
    }

    /// Changes a word that nobody else may change now.
    pub(crate) fn store(&mut self, context: &mut Context, actor: Actor, slot: usize, new: Word) {
        let old = self.word(slot);
        self.slots[slot].word = new;
        let made = (actor as u8, old.phase(), new.phase(), new.owner() == 0);
        // Mistakes are to be found by what they do.
        if !allowed(actor, old, new) && context.scenario.mistakes.is_empty() {
            self.fail("a transition that is not allowed");
        }
        context.made.insert(made);
    }

    /// Tells the daemon. It looks for itself now and then, so an event may be lost.
    pub(crate) fn tell(&mut self, event: Event) {
        self.events.insert(event);
    }

    /// From now on what this client sends and receives is the daemon's.
    pub(crate) fn set_busy(&mut self, owner: u64) {
        if let Some(client) = client_of(owner) {
            self.clients[client].relay = None;
        }
    }

    /// Bytes come to a client.
    pub(crate) fn deliver(&mut self, context: &Context, to: usize, bytes: Bytes, redirected: bool) {
        let client = &mut self.clients[to];
        if client.is_gone() {
            return;
        }
        client.relayed_total += u8::from(!redirected);
        self.check_delivery(to, bytes);
        let client = &mut self.clients[to];
        if !context.scenario.pipelining {
            // It sends nothing before it has read this: when it does makes no difference.
            self.read(to, bytes);
        } else if redirected {
            client.redirected.push(bytes);
        } else {
            client.relayed.push(bytes);
        }
    }

    /// Whether such bytes may reach a client at all; [`World::read`] checks when.
    fn check_delivery(&mut self, to: usize, bytes: Bytes) {
        match bytes {
            Bytes::Whole(ask)
            | Bytes::First(ask)
            | Bytes::Last(ask)
            | Bytes::HeadOnly(ask)
            | Bytes::NotPlain(ask)
            | Bytes::Refusal(ask)
                if ask.client != to =>
            {
                self.fail("a client gets another client's response");
            }
            // What its own exchange on its own socket has left behind harms nobody else.
            Bytes::Junk(Some(ask)) if ask.client == to => {}
            Bytes::Junk(_) => self.fail("a client gets bytes that it did not ask for"),
            _ => {}
        }
    }

    /// What must hold in every state.
    pub(crate) fn check(&mut self) {
        for slot in 0..SLOTS {
            let word = self.word(slot);
            let kernel = word.phase().is_steered() || word == Word::IDLE;
            if kernel && self.daemon.held[slot].is_none() {
                self.fail("a socket is in use twice: the kernel's and the daemon's");
            }
        }
    }

    /// What must hold once nothing is under way.
    pub(crate) fn check_quiescent(&mut self) {
        for index in 0..self.sockets.len() {
            let socket = &self.sockets[index];
            if socket.closed {
                continue;
            }
            let slot = (0..SLOTS).find(|&s| self.slots[s].cookie == Some(index));
            let slot = slot.filter(|&s| self.word(s) != Word::FREE);
            let Some(slot) = slot else { return self.fail("a socket is lost") };
            match self.word(slot).phase() {
                Phase::Idle if self.idle & 1 << slot == 0 => {
                    self.fail("an idle socket is lost: its bit is clear");
                }
                Phase::Idle if self.daemon.held[slot] != Some(index) => {
                    self.fail("an idle socket is lost: the daemon does not know it");
                }
                Phase::Idle => {}
                Phase::Relay | Phase::Head | Phase::Body => {
                    self.fail("an exchange waits for what never comes");
                }
                Phase::Free | Phase::Offered | Phase::Claimed | Phase::Dirty => {
                    self.fail("a socket is lost");
                }
            }
        }
        if self.active != 0 {
            self.fail("exchanges are counted that are not under way");
        }
        if self.clients.iter().any(Client::is_waiting) {
            self.fail("a client waits for what never comes");
        }
    }
}
