//! The daemon: one worker, whose jobs do not interleave with each other but with all else.

use broker_ebpf::phase::{Actor, Phase, Word};

use super::explore::Next;
use super::origin::Socket;
use super::world::{Ask, Bytes, Context, Event, Mistake, SLOTS, Segment, Thread, World, client_of};

/// Sockets one request is tried on.
const ATTEMPTS: u8 = 2;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Daemon {
    /// Sockets left to the kernel, by slot.
    pub(crate) held: [Option<usize>; SLOTS],
    /// Slots whose request was on its way when it looked.
    looks_again: [bool; SLOTS],
    sessions: Vec<Session>,
    /// What it does before anything else; the last is next.
    pub(crate) jobs: Vec<Job>,
}

/// A client, as the daemon serves it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Session {
    inbox: Option<Ask>,
    received: u8,
    taken_over: Vec<Exchange>,
    broken: bool,
    exchange: Option<Exchange>,
    /// What it has for the client, and whether that is the end of a response.
    outbox: Option<(Bytes, bool)>,
    /// The client has read all that was redirected, and nothing more will be.
    clear: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Exchange {
    ask: Ask,
    socket: usize,
    begun: bool,
    attempts: u8,
}

/// One atomic step of the daemon's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Job {
    /// Puts a new socket into a slot, as the daemon's.
    Attach(usize),
    /// Relay to offered.
    Offer(usize),
    /// Is it silent?
    PeekOffered(usize),
    /// Offered to the daemon's again.
    Unoffer(usize),
    /// Offered to idle.
    Publish(usize),
    SetIdle(usize),
    /// Hears an event.
    Hear(Event),
    LookAt(usize),
    /// Drops the owner of a socket whose exchange is taken over.
    Unown {
        slot: usize,
        word: Word,
        socket: usize,
        ask: Option<Ask>,
    },
    /// Looks at a slot untold; whether the origin has ended was read after the word.
    Sweep(usize),
    SweepNoted(usize, Word),
    SweepBusy(usize, Word),
    SweepSwap(usize, Word, Phase),
    /// Takes an expired socket back.
    ExpireBit(usize),
    ExpireSwap(usize),
    /// Serves a client that has asked for something, or for whom the kernel did.
    Serve(usize),
    /// Looks for an idle socket for a request.
    Pick(Ask, u8),
    TakeBit(Ask, u8, usize),
    TakeSwap(Ask, u8, usize),
    Peek(Ask, u8, usize),
    /// Sends a request on a leased socket.
    Send(Ask, u8, usize),
    /// Is the client's last exchange with the kernel over?
    AskWord(usize),
    /// Has it read all that was redirected?
    AskQueue(usize),
    Relay(usize),
    SetFree(usize),
    Close(usize),
    /// Closes a socket that is still its owner's.
    CloseBroken {
        slot: usize,
        socket: usize,
    },
    Free {
        slot: usize,
    },
    Reset(usize),
}

impl Daemon {
    pub(crate) fn new(clients: usize) -> Self {
        Self {
            held: [None; SLOTS],
            looks_again: [false; SLOTS],
            sessions: vec![Session::default(); clients],
            jobs: Vec::new(),
        }
    }
}

impl World {
    #[expect(clippy::too_many_lines, reason = "one block for each thing that it may begin")]
    pub(crate) fn daemon_steps(&self, context: &mut Context, all: &mut Vec<Next>) {
        let fair = |what, world| Next::fair(Thread::Daemon, what, world);
        let free = |what, world| Next::free(Thread::Daemon, what, world);
        if self.left.lost > 0 {
            for event in &self.events {
                let mut world = self.clone();
                world.events.remove(event);
                world.left.lost -= 1;
                all.push(free("does not get an event", world));
            }
        }
        if let Some(&job) = self.daemon.jobs.last() {
            // Looking at a socket's queue and closing it take its lock.
            let waits = match job {
                Job::PeekOffered(socket)
                | Job::Peek(_, _, socket)
                | Job::Close(socket)
                | Job::CloseBroken { socket, .. } => self.sockets[socket].run.is_some(),
                _ => false,
            };
            if !waits {
                let mut world = self.clone();
                world.daemon.jobs.pop();
                let what = world.job(context, job);
                all.push(fair(what, world));
            }
            return;
        }
        let mut begin = |what, is_fair: bool, jobs: &[Job], change: &dyn Fn(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            world.daemon.jobs.extend_from_slice(jobs);
            all.push(if is_fair { fair(what, world) } else { free(what, world) });
        };
        for &event in &self.events {
            begin("hears an event", true, &[Job::Hear(event)], &|world| {
                world.events.remove(&event);
            });
        }
        for (index, session) in self.daemon.sessions.iter().enumerate() {
            if session.outbox.is_some() {
                // Asked in vain it asks again, which changes nothing.
                let settled = self.has_ended(context, index) && self.has_read(index);
                if self.clients[index].is_gone() || session.broken && !session.clear {
                    begin("gives up on a client", true, &[Job::Reset(index)], &|world| {
                        world.daemon.sessions[index].outbox = None;
                        if let Some(exchange) = world.daemon.sessions[index].exchange.take() {
                            world.daemon.jobs.push(Job::Close(exchange.socket));
                        }
                    });
                } else if session.clear {
                    begin("goes on sending", true, &[Job::Relay(index)], &|_| {});
                } else if settled || context.errs(Mistake::Overtakes) {
                    begin("has something for a client", true, &[Job::AskWord(index)], &|_| {});
                }
            } else if let Some(exchange) = session.exchange {
                let socket = &self.sockets[exchange.socket];
                let reset = socket.ended && socket.run.is_none();
                if !socket.queue.is_empty() || reset {
                    begin("receives from an origin", true, &[], &|world| {
                        world.receive(index, exchange);
                    });
                }
            } else if session.broken && !self.clients[index].is_gone() {
                begin("has to break off with a client", true, &[Job::Reset(index)], &|_| {});
            } else if !session.taken_over.is_empty() || session.inbox.is_some() {
                begin("goes on with a client", true, &[Job::Serve(index)], &|_| {});
            } else if let Some(&ask) = self.clients[index].passed.first() {
                // What the programs have said is earlier than what comes on the connection.
                begin("receives a request", true, &[], &|world| {
                    world.clients[index].passed.remove(0);
                    let session = &mut world.daemon.sessions[index];
                    session.inbox = Some(ask);
                    session.received += 1;
                    let events = std::mem::take(&mut world.events);
                    world.daemon.jobs.push(Job::Serve(index));
                    world.daemon.jobs.extend(events.into_iter().map(Job::Hear));
                });
            }
        }
        for slot in 0..SLOTS {
            if self.daemon.held[slot].is_none() {
                continue;
            }
            if self.left.sweeps > 0 {
                begin("looks at a slot untold", false, &[Job::Sweep(slot)], &|world| {
                    world.left.sweeps -= 1;
                });
            }
            // What it finds sooner or later, whatever was lost.
            let phase = self.word(slot).phase();
            let told = (0..3).any(|owner| self.events.contains(&Event(slot, owner)));
            let cut = phase == Phase::Body && self.slots[slot].ended;
            let again = self.daemon.looks_again[slot] && !self.is_being_sent(slot);
            let lost = context.scenario.budget.lost > 0;
            if self.sockets.iter().all(|socket| socket.run.is_none())
                && (cut || again || lost && !told && matches!(phase, Phase::Relay | Phase::Dirty))
            {
                begin("looks at a slot in time", true, &[Job::Sweep(slot)], &|_| {});
            }
        }
        let room = (0..context.scenario.slots).any(|slot| self.word(slot) == Word::FREE);
        if room && self.sockets.len() < context.scenario.sockets {
            begin("opens another connection", false, &[], &|world| {
                world.daemon.jobs.push(Job::Attach(world.sockets.len()));
                world.sockets.push(Socket::default());
            });
        }
    }

    #[expect(clippy::too_many_lines, reason = "one arm for each step")]
    fn job(&mut self, context: &mut Context, job: Job) -> &'static str {
        let daemon = (Thread::Daemon, Actor::Daemon);
        let relay = Word::new(Phase::Relay, 0);
        match job {
            Job::Attach(socket) => {
                let free = (0..context.scenario.slots).find(|&s| self.word(s) == Word::FREE);
                let Some(slot) = free else {
                    self.sockets[socket].closed = true;
                    return "finds no slot: closes the socket";
                };
                self.store(context, Actor::Daemon, slot, relay);
                let fields = &mut self.slots[slot];
                fields.socket = Some(socket);
                fields.cookie = Some(socket);
                fields.ended = self.sockets[socket].ended;
                fields.uses_left = context.scenario.uses;
                self.sockets[socket].slot = Some(slot);
                self.push(Job::Offer(socket));
                "puts a socket into a slot"
            }
            Job::Offer(socket) => {
                let Some(slot) = self.sockets[socket].slot else { unreachable!("attached") };
                let spent = self.slots[slot].uses_left == 0;
                let offered = !spent && self.swap(context, daemon, slot, relay, Word::OFFERED);
                self.push(if offered { Job::PeekOffered(socket) } else { Job::Close(socket) });
                "offers a socket"
            }
            Job::PeekOffered(socket) => {
                let silent = self.is_silent(socket);
                self.push(if silent { Job::Publish(socket) } else { Job::Unoffer(socket) });
                "looks whether the offered socket is silent"
            }
            Job::Unoffer(socket) => {
                let Some(slot) = self.sockets[socket].slot else { unreachable!("attached") };
                // A program may have made it dirty meanwhile, which is as good.
                let _ours = self.swap(context, daemon, slot, Word::OFFERED, relay);
                self.push(Job::Close(socket));
                "takes its offer back"
            }
            Job::Publish(socket) => {
                let Some(slot) = self.sockets[socket].slot else { unreachable!("attached") };
                self.daemon.held[slot] = Some(socket);
                if self.swap(context, daemon, slot, Word::OFFERED, Word::IDLE) {
                    self.push(Job::SetIdle(slot));
                } else {
                    self.daemon.held[slot] = None;
                    self.push(Job::Close(socket));
                }
                "leaves the socket to the kernel"
            }
            Job::SetIdle(slot) => {
                self.idle |= 1 << slot;
                "sets the idle bit"
            }
            Job::Hear(Event(slot, owner)) if context.errs(Mistake::TrustsEvents) => {
                let Some(socket) = self.daemon.held[slot].take() else { return "does nothing" };
                let ask = self.slots[slot].request;
                let phase = if owner == 0 { Phase::Dirty } else { Phase::Relay };
                let word = Word::new(phase, owner);
                self.push(match owner {
                    0 => Job::Close(socket),
                    _ => Job::Unown { slot, word, socket, ask },
                });
                "does what the event says"
            }
            Job::Hear(Event(slot, _)) | Job::LookAt(slot) => {
                self.look_at(context, slot);
                "looks at the word"
            }
            Job::Unown { slot, word, socket, ask } => {
                if !self.swap(context, daemon, slot, word, relay)
                    && !context.errs(Mistake::TrustsEvents)
                {
                    self.fail("the daemon's socket changes under its hands");
                }
                match ask.zip(client_of(word.owner())) {
                    Some((ask, client)) if !self.clients[client].is_gone() => {
                        if ask.client != client {
                            self.fail("the daemon takes over another client's request");
                        }
                        if self.slots[slot].strayed {
                            // As if the origin had ended: another one is asked.
                            self.sockets[socket].queue.clear();
                            self.sockets[socket].ended = true;
                        }
                        let exchange = Exchange { ask, socket, begun: false, attempts: 1 };
                        self.daemon.sessions[client].taken_over.push(exchange);
                    }
                    _ => self.push(Job::Close(socket)),
                }
                "takes an exchange over"
            }
            Job::Sweep(slot) => {
                self.push(Job::SweepNoted(slot, self.word(slot)));
                "reads the word"
            }
            Job::SweepNoted(slot, word) => {
                let ended = self.slots[slot].ended;
                let impatient = context.scenario.impatient;
                match word.phase() {
                    Phase::Idle if impatient => self.push(Job::ExpireBit(slot)),
                    Phase::Head => self.push(Job::SweepBusy(slot, word)),
                    Phase::Body => {
                        let socket = self.daemon.held[slot];
                        let runs = socket.is_some_and(|s| self.sockets[s].run.is_some());
                        // Only if it is still so at the next look.
                        let cut = ended && (!runs || context.errs(Mistake::CutsAtOnce));
                        if cut || impatient {
                            self.push(Job::SweepSwap(slot, word, Phase::Dirty));
                        }
                    }
                    Phase::Relay | Phase::Dirty => self.push(Job::LookAt(slot)),
                    _ => {}
                }
                "reads what is noted of the slot"
            }
            Job::SweepBusy(slot, word) => {
                self.set_busy(word.owner());
                self.push(Job::SweepSwap(slot, word, Phase::Relay));
                "the exchange is slow: marks the client as its own"
            }
            Job::SweepSwap(slot, word, phase) => {
                if self.swap(context, daemon, slot, word, word.with(phase)) {
                    let runs = |socket: usize| {
                        self.sockets[socket].run.as_ref().is_some_and(|r| r.completes(word.owner()))
                    };
                    let completes = self.daemon.held[slot].is_some_and(runs);
                    if phase == Phase::Dirty && !context.scenario.impatient && completes {
                        self.fail("a response that is there is cut off");
                    }
                    self.push(Job::LookAt(slot));
                }
                "takes the exchange over, or gives it up"
            }
            Job::ExpireBit(slot) => {
                self.idle &= !(1 << slot);
                self.push(Job::ExpireSwap(slot));
                "clears the bit of an expired socket"
            }
            Job::ExpireSwap(slot) => {
                if self.swap(context, daemon, slot, Word::IDLE, relay)
                    && let Some(socket) = self.daemon.held[slot].take()
                {
                    self.push(Job::Close(socket));
                }
                "takes an expired socket back"
            }
            Job::Serve(client) => self.serve(client),
            Job::Pick(ask, attempts) => {
                match self.idle.trailing_zeros() as usize {
                    SLOTS.. if self.sockets.len() < context.scenario.sockets => {
                        let socket = self.sockets.len();
                        self.sockets.push(Socket::default());
                        self.push(Job::Send(ask, attempts, socket));
                    }
                    SLOTS.. => {
                        self.done(ask.client, Bytes::Refusal(ask));
                    }
                    slot => self.push(Job::TakeBit(ask, attempts, slot)),
                }
                "looks for an idle socket"
            }
            Job::TakeBit(ask, attempts, slot) => {
                self.idle &= !(1 << slot);
                self.push(Job::TakeSwap(ask, attempts, slot));
                "clears the bit"
            }
            Job::TakeSwap(ask, attempts, slot) => {
                let taken = self.swap(context, daemon, slot, Word::IDLE, relay);
                match self.daemon.held[slot] {
                    Some(socket) if taken => {
                        self.daemon.held[slot] = None;
                        self.push(Job::Peek(ask, attempts, socket));
                    }
                    _ => self.push(Job::Pick(ask, attempts)),
                }
                "takes the socket back"
            }
            Job::Peek(ask, attempts, socket) => {
                if self.is_silent(socket) {
                    self.push(Job::Send(ask, attempts, socket));
                } else {
                    self.push(Job::Pick(ask, attempts));
                    self.push(Job::Close(socket));
                }
                "looks whether the socket is silent"
            }
            Job::Send(ask, attempts, socket) => {
                if !self.sockets[socket].ended {
                    self.sockets[socket].asks.push(ask);
                }
                let exchange = Exchange { ask, socket, begun: false, attempts };
                self.daemon.sessions[ask.client].exchange = Some(exchange);
                "sends a request"
            }
            Job::AskWord(client) => {
                if self.has_ended(context, client) {
                    self.push(Job::AskQueue(client));
                }
                "looks whether the kernel is done with the client"
            }
            Job::AskQueue(client) => {
                if self.has_read(client) || context.errs(Mistake::Overtakes) {
                    self.daemon.sessions[client].clear = true;
                    self.push(Job::Relay(client));
                }
                "looks whether the client has read all"
            }
            Job::Relay(client) => {
                if let Some((bytes, last)) = self.daemon.sessions[client].outbox.take() {
                    self.deliver(context, client, bytes, false);
                    if last {
                        self.push(Job::SetFree(client));
                    }
                }
                "relays to a client"
            }
            Job::SetFree(client) => {
                let session = &mut self.daemon.sessions[client];
                session.clear &= session.inbox.is_some();
                if session.inbox.is_none() && !self.clients[client].is_gone() {
                    let received = session.received;
                    let client = &mut self.clients[client];
                    client.relay = Some([client.relayed_total, received]);
                }
                "leaves a client to the kernel again"
            }
            Job::CloseBroken { slot, socket } => {
                let owner = self.word(slot).owner();
                self.close(socket);
                if let Some(client) = client_of(owner) {
                    self.daemon.sessions[client].broken = true;
                }
                "closes a socket whose client lacks a part of its response"
            }
            Job::Close(socket) => {
                self.close(socket);
                "closes a socket"
            }
            Job::Free { slot } => {
                self.store(context, Actor::Daemon, slot, Word::FREE);
                "frees a slot"
            }
            Job::Reset(client) => {
                let session = &mut self.daemon.sessions[client];
                session.broken = true;
                session.inbox = None;
                for exchange in std::mem::take(&mut session.taken_over) {
                    self.push(Job::Close(exchange.socket));
                }
                self.reset_client(client);
                "resets a client"
            }
        }
    }

    /// Whether a client is to be reset, or was.
    pub(crate) fn has_broken_off(&self, client: usize) -> bool {
        self.daemon.sessions[client].broken
    }

    /// Whether the request of an exchange that was handed over has not been sent.
    fn is_unsent(&self, slot: usize) -> bool {
        let word = self.word(slot);
        word.phase() == Phase::Relay && word.owner() != 0 && self.slots[slot].unsent
    }

    /// Whether it still may be. The daemon only knows that this does not take long, or should not.
    fn is_being_sent(&self, slot: usize) -> bool {
        self.clients.iter().any(|client| client.sends_to(slot))
    }

    fn look_at(&mut self, context: &Context, slot: usize) {
        let word = self.word(slot);
        if !matches!(word.phase(), Phase::Relay | Phase::Dirty) {
            return;
        }
        let unsent = self.is_unsent(slot) && !context.errs(Mistake::TakesUnsent);
        let patient = !context.scenario.impatient;
        if unsent && self.is_being_sent(slot) && patient {
            self.daemon.looks_again[slot] = true;
            return;
        }
        self.daemon.looks_again[slot] = false;
        if unsent
            && patient
            && client_of(word.owner()).is_some_and(|client| !self.clients[client].is_gone())
        {
            self.fail("a client whose request was sent is broken off");
        }
        let Some(socket) = self.daemon.held[slot].take() else { return };
        let ask = self.slots[slot].request;
        self.push(match (word.phase(), word.owner()) {
            (Phase::Relay, 0) => Job::Offer(socket),
            (Phase::Relay, _) if unsent => Job::CloseBroken { slot, socket },
            (Phase::Relay, _) => Job::Unown { slot, word, socket, ask },
            (_, 0) => Job::Close(socket),
            _ => Job::CloseBroken { slot, socket },
        });
    }

    /// A session's next exchange: first what the programs have handed over.
    fn serve(&mut self, client: usize) -> &'static str {
        let gone = self.clients[client].is_gone();
        let session = &mut self.daemon.sessions[client];
        if session.exchange.is_some() {
            return "is busy with the client";
        }
        if !session.taken_over.is_empty() {
            let exchange = session.taken_over.remove(0);
            if gone {
                self.push(Job::Close(exchange.socket));
            } else {
                session.exchange = Some(exchange);
            }
            return "goes on with an exchange";
        }
        if let Some(ask) = session.inbox.take()
            && !gone
            && !session.broken
        {
            self.push(Job::Pick(ask, 1));
        }
        "serves a request"
    }

    /// The next bytes of an exchange, or the end of its origin.
    fn receive(&mut self, client: usize, exchange: Exchange) {
        let socket = &mut self.sockets[exchange.socket];
        let segment = if socket.queue.is_empty() {
            Segment { bytes: Bytes::End, surplus: false }
        } else {
            socket.queue.remove(0)
        };
        let ended = socket.ended;
        let session = &mut self.daemon.sessions[client];
        match segment.bytes {
            Bytes::First(_) if !exchange.begun => {
                session.exchange = Some(Exchange { begun: true, ..exchange });
                session.outbox = Some((segment.bytes, false));
            }
            Bytes::End | Bytes::Junk(_) | Bytes::Last(_) if !exchange.begun => {
                session.exchange = None;
                if exchange.attempts < ATTEMPTS {
                    self.push(Job::Pick(exchange.ask, exchange.attempts + 1));
                } else {
                    self.done(client, Bytes::Refusal(exchange.ask));
                }
                self.push(Job::Close(exchange.socket));
            }
            Bytes::End | Bytes::Junk(_) => {
                session.exchange = None;
                session.broken = true;
                self.push(Job::Close(exchange.socket));
            }
            _ => {
                session.exchange = None;
                self.done(client, segment.bytes);
                let clean = !segment.surplus && !ended && !self.clients[client].has_ended();
                // The lease ends before the client has its last bytes.
                self.push(if clean && self.sockets[exchange.socket].slot.is_some() {
                    Job::Offer(exchange.socket)
                } else if clean {
                    Job::Attach(exchange.socket)
                } else {
                    Job::Close(exchange.socket)
                });
            }
        }
    }

    fn done(&mut self, client: usize, bytes: Bytes) {
        self.daemon.sessions[client].outbox = Some((bytes, true));
    }

    /// Whether nothing more comes to a client the kernel's way.
    fn has_ended(&self, context: &Context, client: usize) -> bool {
        let word = self.clients[client].noted_slot.map(|slot| self.word(slot));
        let last = word.filter(|word| client_of(word.owner()) == Some(client));
        let under_way =
            |word: Word| word.phase().is_steered() || !context.errs(Mistake::LooksAtPhase);
        !last.is_some_and(under_way) || context.errs(Mistake::Overtakes)
    }

    fn has_read(&self, client: usize) -> bool {
        self.clients[client].redirected.is_empty()
    }

    fn close(&mut self, socket: usize) {
        let closed = &mut self.sockets[socket];
        closed.closed = true;
        closed.queue.clear();
        closed.asks.clear();
        if let Some(slot) = closed.slot.take() {
            self.slots[slot].socket = None;
            self.push(Job::Free { slot });
        }
    }

    fn is_silent(&self, socket: usize) -> bool {
        let socket = &self.sockets[socket];
        socket.queue.is_empty() && !socket.ended
    }

    fn push(&mut self, job: Job) {
        self.daemon.jobs.push(job);
    }
}
