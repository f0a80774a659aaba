//! Clients, and the programs that run under the lock of a client's socket.

use broker_ebpf::phase::{Actor, Phase, Word};

use super::explore::Next;
use super::world::{Ask, Bytes, Context, Event, Kind, Mistake, SLOTS, SPOILED, Thread, World};

/// Sockets that are tried before a request goes to the daemon.
const CLAIMS: u8 = 2;

/// Which way requests take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Way {
    #[default]
    Kernel,
    Relay,
}

/// How much of a connection is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Side {
    #[default]
    Open,
    /// Sends no more.
    Half,
    /// Closed, or reset by the daemon.
    Gone,
}

/// A client, the state that the programs keep with its socket, and the program under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Client {
    /// Requests sent.
    sent: u8,
    /// Responses read.
    got: u8,
    /// A part of the next response was read.
    begun: bool,
    side: Side,
    /// What the programs have redirected. The kernel takes its time with this queue, so that the
    /// client may read bytes of the other one first whenever it has any.
    pub(crate) redirected: Vec<Bytes>,
    /// What the daemon has sent.
    pub(crate) relayed: Vec<Bytes>,
    /// How many segments the daemon has ever sent.
    pub(crate) relayed_total: u8,
    /// Requests that have gone to the daemon, and not been read.
    pub(crate) passed: Vec<Ask>,
    passed_total: u8,
    /// What the daemon says that it has sent and received; `None` while it is busy.
    pub(crate) relay: Option<[u8; 2]>,
    /// The slot that served it last.
    slot: Option<usize>,
    /// The same, or the one that it has claimed, for the daemon.
    pub(crate) noted_slot: Option<usize>,
    way: Way,
    run: At,
}

impl Default for Client {
    fn default() -> Self {
        Self {
            sent: 0,
            got: 0,
            begun: false,
            side: Side::Open,
            redirected: Vec::new(),
            relayed: Vec::new(),
            relayed_total: 0,
            passed: Vec::new(),
            passed_total: 0,
            relay: Some([0, 0]),
            slot: None,
            noted_slot: None,
            way: Way::Kernel,
            run: At::Rest,
        }
    }
}

/// The next step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    /// No program runs.
    Rest,
    /// Reads the word of the last slot: has it answered?
    Look,
    LookBusy(Word),
    /// Hands the exchange over.
    HandOver(Word),
    HandOverTell,
    /// Asks whether the daemon has anything to do for it.
    Free,
    Claim(Claim, Step),
    RelayBusy,
    /// The message goes to the daemon.
    Pass,
    /// Close program: reads the word of the last slot.
    Left,
    LeftBusy(Word),
    LeftSwap(Word),
    LeftTell(u64),
}

/// An attempt to send a request to an origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Claim {
    attempt: u8,
    slot: usize,
    /// The socket that was claimed.
    cookie: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    /// Picks a slot.
    Pick,
    ClearBit,
    Swap,
    Write,
    Sent,
    Spoiled,
    Find,
    Check(usize),
    Put(usize),
    Undo,
    UndoTell,
}

impl Client {
    pub(crate) fn is_gone(&self) -> bool {
        self.side == Side::Gone
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.side != Side::Open
    }

    /// Whether its message is on its way to the socket in a slot.
    pub(crate) fn sends_to(&self, to: usize) -> bool {
        matches!(self.run, At::Claim(Claim { slot, .. }, _) if slot == to)
    }

    pub(crate) fn is_waiting(&self) -> bool {
        !self.is_gone() && (self.begun || self.got < self.sent)
    }

    fn gone(&mut self) {
        self.side = Side::Gone;
        self.redirected.clear();
        self.relayed.clear();
        self.passed.clear();
    }

    /// What has been relayed to it, and to the daemon, is all done with.
    fn is_free(&self) -> bool {
        let Some([sent_to, received_from]) = self.relay else { return false };
        self.way == Way::Kernel && sent_to == 0 && received_from == 0
            || self.relayed.is_empty()
                && self.relayed_total == sent_to
                && self.passed_total == received_from
    }
}

impl World {
    pub(crate) fn client_steps(&self, context: &mut Context, index: usize, all: &mut Vec<Next>) {
        let thread = Thread::Client(index);
        let client = &self.clients[index];
        for redirected in [true, false] {
            let queue = if redirected { &client.redirected } else { &client.relayed };
            if queue.is_empty() {
                continue;
            }
            let mut world = self.clone();
            let client = &mut world.clients[index];
            let queue = if redirected { &mut client.redirected } else { &mut client.relayed };
            let bytes = queue.remove(0);
            world.read(index, bytes);
            let what = if redirected { "reads redirected bytes" } else { "reads relayed bytes" };
            all.push(Next::fair(thread, what, world));
        }
        if client.run != At::Rest {
            if let At::Claim(claim, Step::Find) = client.run
                && self.left.lookup_fails > 0
            {
                let mut world = self.clone();
                world.left.lookup_fails -= 1;
                world.clients[index].run = At::Claim(claim, Step::Undo);
                all.push(Next::free(thread, "looks the socket up in vain", world));
            }
            let mut world = self.clone();
            let what = world.client_step(context, index);
            return all.push(Next::fair(thread, what, world));
        }
        let plan = context.scenario.clients[index];
        let waits = !context.scenario.pipelining && client.is_waiting();
        if client.side == Side::Open && usize::from(client.sent) < plan.len() && !waits {
            let mut world = self.clone();
            let client = &mut world.clients[index];
            client.sent += 1;
            client.run = if client.slot.is_some() { At::Look } else { At::Free };
            all.push(Next::free(thread, "sends a request", world));
        }
        if self.left.half_close > 0 && client.side == Side::Open {
            let mut world = self.clone();
            world.left.half_close -= 1;
            world.clients[index].side = Side::Half;
            world.leave(index);
            all.push(Next::free(thread, "ends its side", world));
        }
        if self.left.close > 0 && !client.is_gone() {
            let mut world = self.clone();
            world.left.close -= 1;
            world.clients[index].gone();
            world.leave(index);
            all.push(Next::free(thread, "closes", world));
        }
    }

    /// The daemon resets a client.
    pub(crate) fn reset_client(&mut self, index: usize) {
        if !self.clients[index].is_gone() {
            self.clients[index].gone();
            // A program that runs goes on to its end: it has the lock.
            if self.clients[index].run == At::Rest {
                self.leave(index);
            }
        }
    }

    fn leave(&mut self, index: usize) {
        let client = &mut self.clients[index];
        client.run = if client.slot.is_some() { At::Left } else { At::Rest };
    }

    /// A client reads the next bytes: they must be the next of its responses.
    pub(crate) fn read(&mut self, index: usize, bytes: Bytes) {
        let client = &mut self.clients[index];
        let next = Ask { client: index, number: client.got };
        let owed = client.got < client.sent;
        let right = match bytes {
            Bytes::Whole(ask)
            | Bytes::HeadOnly(ask)
            | Bytes::NotPlain(ask)
            | Bytes::Refusal(ask) => {
                client.got += 1;
                ask == next && !client.begun
            }
            Bytes::First(ask) => ask == next && !std::mem::replace(&mut client.begun, true),
            Bytes::Last(ask) => {
                client.got += 1;
                ask == next && std::mem::replace(&mut client.begun, false)
            }
            Bytes::Goodbye => {
                client.got += 1;
                !client.begun
            }
            Bytes::Junk(_) | Bytes::End => true,
        };
        if !right || !owed && !matches!(bytes, Bytes::Junk(_)) {
            self.fail("a client reads other than the next of its responses");
        }
    }

    fn rest(&mut self, index: usize) {
        self.clients[index].run = At::Rest;
        if self.clients[index].is_gone() {
            self.leave(index);
        }
    }

    /// The application's `send()` fails; it closes.
    fn refuse(&mut self, index: usize) {
        self.clients[index].gone();
        self.leave(index);
    }

    fn client_step(&mut self, context: &mut Context, index: usize) -> &'static str {
        let cookie = index as u64 + 1;
        let client = &self.clients[index];
        let request = (Thread::Client(index), Actor::Request);
        let ask = Ask { client: index, number: client.sent.saturating_sub(1) };
        let kind = context.scenario.clients[index][usize::from(ask.number)];
        let slot = client.slot.unwrap_or(0);
        let (what, next) = match client.run {
            At::Rest => unreachable!("a program runs"),
            At::Look => {
                let word = self.word(slot);
                let next = match word.phase() {
                    _ if word.owner() != cookie => At::Free,
                    Phase::Head => At::LookBusy(word),
                    // The rest of it comes the kernel's way; the daemon waits for that.
                    Phase::Body => At::RelayBusy,
                    // The daemon's, or lost: it may not have been told yet.
                    _ if !context.errs(Mistake::PassesUntold) => At::HandOverTell,
                    _ => {
                        self.clients[index].way = Way::Relay;
                        At::Pass
                    }
                };
                ("looks whether its last exchange is over", next)
            }
            At::LookBusy(word) => {
                self.set_busy(cookie);
                ("marks itself as the daemon's", At::HandOver(word))
            }
            At::HandOver(word) => {
                let swapped = self.swap(context, request, slot, word, word.with(Phase::Relay));
                ("hands its exchange over", if swapped { At::HandOverTell } else { At::Look })
            }
            At::HandOverTell => {
                self.tell(Event(slot, cookie));
                self.clients[index].way = Way::Relay;
                ("tells the daemon", At::Pass)
            }
            At::Free => {
                let free = self.clients[index].is_free();
                self.clients[index].way = if free { Way::Kernel } else { Way::Relay };
                let next = match kind {
                    _ if !free => At::Pass,
                    Kind::Odd => At::RelayBusy,
                    Kind::Get | Kind::Head => self.attempt(index, 0),
                };
                ("looks whether the daemon is done with it", next)
            }
            At::Claim(claim, step) => self.claim(context, index, ask, claim, step),
            At::RelayBusy => {
                self.set_busy(cookie);
                self.clients[index].way = Way::Relay;
                ("marks itself as the daemon's", At::Pass)
            }
            At::Pass => {
                if !self.clients[index].is_gone() {
                    self.clients[index].passed.push(ask);
                    self.clients[index].passed_total += 1;
                }
                ("passes the message to the daemon", At::Rest)
            }
            At::Left => {
                let word = self.word(slot);
                let ours = word.owner() == cookie;
                let next = match word.phase() {
                    Phase::Head if ours => At::LeftBusy(word),
                    _ => At::Rest,
                };
                ("close program: reads the word", next)
            }
            At::LeftBusy(word) => {
                self.set_busy(cookie);
                ("close program: marks the client as the daemon's", At::LeftSwap(word))
            }
            At::LeftSwap(word) => {
                let close = (Thread::Client(index), Actor::Close);
                let swapped = self.swap(context, close, slot, word, word.with(Phase::Relay));
                let next = if swapped { At::LeftTell(cookie) } else { At::Left };
                ("close program: swaps", next)
            }
            At::LeftTell(owner) => {
                self.tell(Event(slot, owner));
                ("close program: tells the daemon", At::Rest)
            }
        };
        match next {
            At::Rest if matches!(self.clients[index].run, At::Left | At::LeftTell(_)) => {
                // A client that has ended its side may still be reset later.
                self.clients[index].run = At::Rest;
            }
            At::Rest => self.rest(index),
            next => self.clients[index].run = next,
        }
        what
    }

    /// The next attempt to send to an origin, or what comes after the last.
    fn attempt(&self, index: usize, attempt: u8) -> At {
        let claim = Claim { attempt, slot: 0, cookie: None };
        match (attempt, self.clients[index].slot) {
            (CLAIMS, _) => At::RelayBusy,
            (0, Some(slot)) => At::Claim(Claim { slot, ..claim }, Step::ClearBit),
            _ => At::Claim(claim, Step::Pick),
        }
    }

    fn claim(
        &mut self,
        context: &mut Context,
        index: usize,
        ask: Ask,
        claim: Claim,
        step: Step,
    ) -> (&'static str, At) {
        let owner = index as u64 + 1;
        let request = (Thread::Client(index), Actor::Request);
        let Claim { slot, .. } = claim;
        let again = self.attempt(index, claim.attempt + 1);
        let claimed = Word::new(Phase::Claimed, owner);
        let sent = claimed.with(Phase::Head);
        match step {
            Step::Pick => {
                let next = match self.idle.trailing_zeros() as usize {
                    SLOTS.. => again,
                    slot => At::Claim(Claim { slot, ..claim }, Step::ClearBit),
                };
                ("looks for an idle bit", next)
            }
            Step::ClearBit => {
                let bit = 1 << slot;
                let was_set = self.idle & bit != 0;
                self.idle &= !bit;
                let next = if was_set { At::Claim(claim, Step::Swap) } else { again };
                ("clears the idle bit", next)
            }
            Step::Swap => {
                let new = if context.errs(Mistake::NoClaim) { sent } else { claimed };
                let swapped = if context.errs(Mistake::BitOnly) {
                    self.slots[slot].word = new;
                    true
                } else {
                    self.swap(context, request, slot, Word::IDLE, new)
                };
                self.active += i8::from(swapped);
                ("claims", if swapped { At::Claim(claim, Step::Write) } else { again })
            }
            Step::Write => {
                self.clients[index].noted_slot = Some(slot);
                let fields = &mut self.slots[slot];
                let kind = context.scenario.clients[index][usize::from(ask.number)];
                fields.head_only = kind == Kind::Head;
                fields.request = Some(ask);
                fields.unsent = true;
                fields.strayed = false;
                fields.uses_left = fields.uses_left.saturating_sub(1);
                let claim = Claim { cookie: fields.cookie, ..claim };
                let step = if context.errs(Mistake::NoClaim) { Step::Find } else { Step::Sent };
                ("writes the slot's fields", At::Claim(claim, step))
            }
            Step::Sent => {
                if self.swap(context, request, slot, claimed, sent) {
                    return ("swaps: the request is sent", At::Claim(claim, Step::Find));
                }
                self.active -= 1;
                let lost = context.errs(Mistake::ForgetsClaimer);
                ("finds its claim lost", if lost { again } else { At::Claim(claim, Step::Spoiled) })
            }
            Step::Spoiled => {
                if !self.swap(context, request, slot, SPOILED, Word::new(Phase::Dirty, 0)) {
                    self.fail("a claimed socket changes under its claimer's hands");
                }
                ("makes the socket dirty", At::Claim(claim, Step::UndoTell))
            }
            Step::Find => {
                let next = match self.slots[slot].socket {
                    None => Step::Undo,
                    Some(socket) if context.errs(Mistake::LookupUnchecked) => Step::Put(socket),
                    Some(socket) => Step::Check(socket),
                };
                ("looks the socket up", At::Claim(claim, next))
            }
            Step::Check(socket) => {
                if self.slots[slot].cookie != claim.cookie {
                    self.refuse(index);
                    return ("finds another socket in the slot", self.clients[index].run);
                }
                ("finds the same socket in the slot", At::Claim(claim, Step::Put(socket)))
            }
            Step::Put(socket) => {
                let client = &mut self.clients[index];
                client.slot = Some(slot);
                client.way = Way::Kernel;
                self.put(context, claim, socket, ask);
                ("sends to the origin", At::Rest)
            }
            Step::Undo => {
                if self.swap(context, request, slot, sent, Word::new(Phase::Dirty, 0)) {
                    return ("takes its request back", At::Claim(claim, Step::UndoTell));
                }
                if context.errs(Mistake::SendsTwice) {
                    return ("tries another socket", again);
                }
                // Somebody else goes on with the request.
                self.refuse(index);
                ("finds its exchange taken over", self.clients[index].run)
            }
            Step::UndoTell => {
                self.tell(Event(slot, 0));
                ("tells the daemon", again)
            }
        }
    }

    fn put(&mut self, context: &Context, claim: Claim, socket: usize, ask: Ask) {
        let word = self.word(claim.slot);
        let handed_over = word.phase() == Phase::Relay && word.owner() != 0;
        let counts =
            word.phase() == Phase::Head || handed_over && !context.errs(Mistake::CountsTooShort);
        if counts && self.slots[claim.slot].cookie == Some(socket) {
            self.slots[claim.slot].unsent = false;
        }
        let broken_off = self.has_broken_off(ask.client);
        let socket = &mut self.sockets[socket];
        if socket.closed && !broken_off {
            self.fail("a request is refused after the daemon has gone on with it");
        } else if !socket.closed && !socket.ended {
            socket.asks.push(ask);
        }
    }
}
