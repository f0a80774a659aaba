//! Origins, and the programs that run under the lock of an origin's socket.

use broker_ebpf::phase::{Actor, Phase, Word};

use super::explore::Next;
use super::world::{
    Ask, Bytes, Context, Event, Kind, Mistake, SPOILED, Segment, Thread, World, client_of,
};

/// A connection to an origin: the origin itself, the daemon's queue, and the program under way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Socket {
    /// Requests that the origin has got and not answered.
    pub(crate) asks: Vec<Ask>,
    /// The response of which a part was sent.
    begun: Option<Ask>,
    /// The last response that was completed.
    answered: Option<Ask>,
    /// It has said goodbye: it answers nothing more, and ends.
    leaving: bool,
    /// The origin has ended its side, or the connection.
    pub(crate) ended: bool,
    /// What was passed on to the daemon.
    pub(crate) queue: Vec<Segment>,
    /// The daemon has closed it.
    pub(crate) closed: bool,
    pub(crate) slot: Option<usize>,
    /// The programs' run. Closing and looking wait for its end: it holds the socket's lock.
    pub(crate) run: Option<Run>,
}

/// A run of the programs on an origin's socket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Run {
    /// What the response program sees; `None` after a reset.
    segment: Option<Segment>,
    at: At,
}

impl Socket {
    pub(crate) fn new(slot: Option<usize>) -> Self {
        Self { slot, ..Self::default() }
    }
}

impl Run {
    /// Whether it is about to complete a response to this client.
    pub(crate) fn completes(&self, client: u64) -> bool {
        let segment = self.segment.map(|segment| segment.bytes);
        matches!(segment, Some(Bytes::Last(ask)) if Some(ask.client) == client_of(client))
    }
}

/// The next step of a run. A [`Word`] here is the one that was read, maybe long ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    /// Close program: notes the end and reads the word.
    Ended,
    /// Close program: marks the client as the daemon's.
    LeaveBusy(Word),
    /// Close program: swaps.
    Leave(Word),
    /// Reads the word.
    Read,
    /// Does what the phase asks for.
    Act(Word),
    /// Hands the exchange over, or gives it up.
    GiveUp {
        old: Word,
        new: Word,
        then: Then,
    },
    /// The swap after the bit, with [`Mistake::BitFirst`].
    Finish(Word),
    SetIdle(Word),
    Tell(u64, Then),
    Redirect(Word),
}

/// What becomes of the segment in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Then {
    Drop,
    Pass,
    Redirect(Word),
    /// The close program is through; the response program is next, if there is a segment.
    Go,
}

impl World {
    /// What an origin may do, and what the programs do then.
    pub(crate) fn socket_steps(&self, context: &mut Context, index: usize, all: &mut Vec<Next>) {
        let socket = &self.sockets[index];
        if socket.run.is_some() {
            let mut world = self.clone();
            let what = world.run_step(context, index);
            return all.push(Next::fair(Thread::Socket(index), what, world));
        }
        if socket.closed || socket.ended {
            return;
        }
        self.origin_steps(context, index, all);
    }

    /// An origin sends: that is one step with the program's beginning, as it may send late.
    fn origin_steps(&self, context: &Context, index: usize, all: &mut Vec<Next>) {
        let (socket, left, scenario) = (&self.sockets[index], &self.left, context.scenario);
        let mut send = |what, fair: bool, change: &dyn Fn(&mut World) -> Run| {
            let mut world = self.clone();
            let run = change(&mut world);
            world.sockets[index].run = Some(run);
            all.push(Next { thread: Thread::Socket(index), what, fair, world });
        };
        let read = |bytes| Run { segment: Some(Segment { bytes, surplus: false }), at: At::Read };
        if !socket.leaving
            && let Some(ask) = socket.begun.or(socket.asks.first().copied())
        {
            let kind = scenario.clients[ask.client][usize::from(ask.number)];
            let mut answers = Vec::new();
            match kind {
                _ if socket.begun.is_some() => answers.push(("the rest", Bytes::Last(ask))),
                Kind::Head => answers.push(("a head", Bytes::HeadOnly(ask))),
                Kind::Get | Kind::Odd => {
                    answers.push(("a whole response", Bytes::Whole(ask)));
                    if scenario.split {
                        answers.push(("the beginning of a response", Bytes::First(ask)));
                    }
                    if scenario.not_plain {
                        answers.push(("a response that is not plain", Bytes::NotPlain(ask)));
                    }
                }
            }
            for (what, bytes) in answers {
                let answer = |world: &mut World| {
                    let socket = &mut world.sockets[index];
                    if let Bytes::First(_) = bytes {
                        socket.begun = Some(ask);
                        socket.asks.remove(0);
                    } else {
                        if socket.begun.take().is_none() {
                            socket.asks.remove(0);
                        }
                        socket.answered = Some(ask);
                    }
                    read(bytes)
                };
                send(what, true, &answer);
                if left.surplus > 0 && !matches!(bytes, Bytes::First(_)) {
                    send("a response and some more", false, &|world| {
                        world.left.surplus -= 1;
                        let run = answer(world);
                        let segment = run.segment.map(|s| Segment { surplus: true, ..s });
                        Run { segment, ..run }
                    });
                }
                if left.end_with_data > 0 {
                    send("a segment of a response with its end", false, &|world| {
                        world.left.end_with_data -= 1;
                        let run = answer(world);
                        world.sockets[index].ended = true;
                        Run { at: At::Ended, ..run }
                    });
                }
            }
        }
        if left.junk > 0 && socket.begun.is_none() && !socket.leaving {
            send("junk", false, &|world| {
                world.left.junk -= 1;
                read(Bytes::Junk(world.sockets[index].answered))
            });
        }
        if left.goodbye > 0 && socket.begun.is_none() && !socket.leaving {
            send("goodbye", false, &|world| {
                world.left.goodbye -= 1;
                world.sockets[index].leaving = true;
                read(Bytes::Goodbye)
            });
        }
        if left.end > 0 || socket.leaving {
            send("its end", socket.leaving, &|world| {
                world.left.end -= u8::from(!world.sockets[index].leaving);
                world.sockets[index].ended = true;
                Run { at: At::Ended, ..read(Bytes::End) }
            });
        }
        if left.reset > 0 {
            send("a reset", false, &|world| {
                world.left.reset -= 1;
                world.sockets[index].ended = true;
                Run { segment: None, at: At::Ended }
            });
        }
    }

    fn run_step(&mut self, context: &mut Context, index: usize) -> &'static str {
        let Some(run) = self.sockets[index].run.clone() else { unreachable!("a run is under way") };
        let Some(slot) = self.sockets[index].slot else {
            // Not the programs' business (any more).
            return self.verdict(context, index, Then::Pass);
        };
        let respond = (Thread::Socket(index), Actor::Response);
        match run.at {
            At::Ended => {
                self.slots[slot].ended = true;
                let word = self.word(slot);
                match word.phase() {
                    _ if word == SPOILED => return self.verdict(context, index, Then::Go),
                    Phase::Offered | Phase::Idle | Phase::Claimed => {
                        self.go(index, At::Leave(word));
                    }
                    // Bytes may have come with the end: the program that sees them decides.
                    _ if run.segment.is_some() => self.go(index, At::Read),
                    Phase::Head | Phase::Body => {
                        self.go(index, At::LeaveBusy(word));
                    }
                    Phase::Free | Phase::Relay | Phase::Dirty => {
                        return self.verdict(context, index, Then::Go);
                    }
                }
                "notes the end, reads the word"
            }
            At::LeaveBusy(word) => {
                self.set_busy(word.owner());
                self.go(index, At::Leave(word));
                "marks the client as the daemon's"
            }
            At::Leave(word) => {
                let new = match word.phase() {
                    Phase::Head => word.with(Phase::Relay),
                    Phase::Body => word.with(Phase::Dirty),
                    _ => spoiled(context, word),
                };
                let close = (Thread::Socket(index), Actor::Close);
                if !self.swap(context, close, slot, word, new) {
                    self.go(index, At::Ended);
                } else if new == SPOILED {
                    return self.verdict(context, index, Then::Go);
                } else {
                    self.go(index, At::Tell(new.owner(), Then::Go));
                }
                "swaps the word because of the end"
            }
            At::Read => {
                self.go(index, At::Act(self.word(slot)));
                "reads the word"
            }
            At::Act(word) => self.act(context, index, slot, word),
            At::GiveUp { old, new, then } => {
                let swapped = self.swap(context, respond, slot, old, new);
                self.go(index, if swapped { At::Tell(new.owner(), then) } else { At::Read });
                "gives the exchange up"
            }
            At::Finish(word) => {
                self.finish(context, index, slot, word);
                "swaps after the bit"
            }
            At::SetIdle(word) => {
                self.idle |= 1 << slot;
                self.go(index, At::Redirect(word));
                "sets the idle bit"
            }
            At::Tell(owner, then) => {
                self.tell(Event(slot, owner));
                self.verdict(context, index, then);
                "tells the daemon"
            }
            At::Redirect(word) => self.verdict(context, index, Then::Redirect(word)),
        }
    }

    /// The response program, after it has read the word.
    fn act(
        &mut self,
        context: &mut Context,
        index: usize,
        slot: usize,
        word: Word,
    ) -> &'static str {
        let Some(Run { segment: Some(segment), .. }) = self.sockets[index].run else {
            unreachable!("a reset is no segment")
        };
        let respond = (Thread::Socket(index), Actor::Response);
        match word.phase() {
            Phase::Free | Phase::Relay => self.verdict(context, index, Then::Pass),
            Phase::Dirty => self.verdict(context, index, Then::Drop),
            _ if word == SPOILED => self.verdict(context, index, Then::Drop),
            Phase::Offered | Phase::Idle | Phase::Claimed => {
                let new = spoiled(context, word);
                if !self.swap(context, respond, slot, word, new) {
                    self.go(index, At::Read);
                } else if new == SPOILED {
                    return self.verdict(context, index, Then::Drop);
                } else {
                    self.go(index, At::Tell(0, Then::Drop));
                }
                "nobody has asked: makes it dirty"
            }
            Phase::Head => {
                let strayed = self.slots[slot].unsent && !context.errs(Mistake::AnswersUnsent);
                self.slots[slot].strayed |= strayed && segment.bytes != Bytes::End;
                let complete = match (segment.bytes, self.slots[slot].head_only) {
                    (_, _) if segment.surplus || strayed => None,
                    // A head without a body is all of it, or so the program takes it.
                    (Bytes::Whole(_) | Bytes::Goodbye, false)
                    | (Bytes::HeadOnly(_) | Bytes::First(_), true) => Some(true),
                    (Bytes::First(_) | Bytes::HeadOnly(_), false) => Some(false),
                    _ => None,
                };
                match complete {
                    Some(true) if context.errs(Mistake::BitFirst) => {
                        self.idle |= 1 << slot;
                        self.go(index, At::Finish(word));
                        "sets the idle bit first"
                    }
                    Some(true) => {
                        self.finish(context, index, slot, word);
                        "the response is complete: swaps"
                    }
                    Some(false) => {
                        let new = word.with(Phase::Body);
                        let swapped = self.swap(context, respond, slot, word, new);
                        self.go(index, if swapped { At::Redirect(word) } else { At::Read });
                        "the response has begun: swaps"
                    }
                    None => {
                        self.set_busy(word.owner());
                        let new = word.with(Phase::Relay);
                        self.go(index, At::GiveUp { old: word, new, then: Then::Pass });
                        "not plain: marks the client as the daemon's"
                    }
                }
            }
            Phase::Body if segment.bytes == Bytes::End => self.give_up(index, word),
            Phase::Body if segment.surplus => {
                if self.left.cut_fails > 0 {
                    self.left.cut_fails -= 1;
                    return self.give_up(index, word);
                }
                let new = Word::new(Phase::Dirty, 0);
                self.go(index, At::GiveUp { old: word, new, then: Then::Redirect(word) });
                "cuts off what is too much"
            }
            Phase::Body if context.errs(Mistake::BitFirst) => {
                self.idle |= 1 << slot;
                self.go(index, At::Finish(word));
                "sets the idle bit first"
            }
            Phase::Body => {
                self.finish(context, index, slot, word);
                "the rest of the response: swaps"
            }
        }
    }

    fn give_up(&mut self, index: usize, word: Word) -> &'static str {
        self.set_busy(word.owner());
        let new = word.with(Phase::Dirty);
        self.go(index, At::GiveUp { old: word, new, then: Then::Drop });
        "cut off: marks the client as the daemon's"
    }

    fn finish(&mut self, context: &mut Context, index: usize, slot: usize, word: Word) {
        let reusable = self.slots[slot].uses_left > 0 && !self.slots[slot].ended;
        let new = if reusable { Word::IDLE } else { Word::new(Phase::Relay, 0) };
        let respond = (Thread::Socket(index), Actor::Response);
        if !self.swap(context, respond, slot, word, new) {
            return self.go(index, At::Read);
        }
        if !context.errs(Mistake::Window) && context.scenario.pipelining {
            self.redirect(context, index, word);
        }
        self.go(
            index,
            match reusable {
                true if context.errs(Mistake::BitFirst) => At::Redirect(word),
                true => At::SetIdle(word),
                false => At::Tell(0, Then::Redirect(word)),
            },
        );
    }

    fn go(&mut self, index: usize, at: At) {
        if let Some(run) = &mut self.sockets[index].run {
            run.at = at;
        }
    }

    /// Ends a run, or the close program's part of it.
    fn verdict(&mut self, context: &mut Context, index: usize, then: Then) -> &'static str {
        let socket = &mut self.sockets[index];
        let Some(segment) = socket.run.as_ref().and_then(|run| run.segment) else {
            // Reset: the kernel takes it out of the map after the program has run.
            socket.run = None;
            for slot in &mut self.slots {
                slot.socket = slot.socket.filter(|&socket| socket != index);
            }
            return "is gone";
        };
        match then {
            Then::Go => {
                self.go(index, At::Read);
                "the end is noted"
            }
            Then::Drop => {
                socket.run = None;
                "drops the bytes"
            }
            Then::Pass => {
                socket.run = None;
                socket.queue.push(segment);
                "leaves the bytes to the daemon"
            }
            Then::Redirect(word) => {
                self.redirect(context, index, word);
                self.sockets[index].run = None;
                "redirects the bytes"
            }
        }
    }

    fn redirect(&mut self, context: &Context, index: usize, word: Word) {
        let Some(Run { segment: Some(segment), .. }) = &mut self.sockets[index].run else { return };
        let bytes = segment.bytes;
        // Done already, see `finish`.
        if bytes == Bytes::End {
            return;
        }
        segment.bytes = Bytes::End;
        let owner = match self.sockets[index].slot {
            Some(slot) if context.errs(Mistake::OwnerReadAnew) => self.word(slot).owner(),
            _ => word.owner(),
        };
        if let Some(client) = client_of(owner) {
            self.deliver(context, client, bytes, true);
        }
    }
}

/// A socket on which something came that nobody has asked for is dirty. If it is claimed, that is
/// for the claiming program to say: until then it may write to the slot.
fn spoiled(context: &Context, word: Word) -> Word {
    let claimed = word.phase() == Phase::Claimed && !context.errs(Mistake::ForgetsClaimer);
    if claimed { SPOILED } else { Word::new(Phase::Dirty, 0) }
}
