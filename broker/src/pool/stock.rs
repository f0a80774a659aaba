//! The origin sockets that a pool leaves to the kernel.
//!
//! They still belong to the pool, but whoever comes first may use them: a client's request, which
//! the programs send without the daemon, or a checkout. While one is idle here it is not in the
//! event loop; the programs see its end, and bytes that nobody asked for, and make it dirty.

use std::cell::{Cell, RefCell};
use std::num::NonZeroU32;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use broker_ebpf::phase::{Phase, Word};

use super::connection::Connection;
use super::idle::{Life, expired_by, expiry};
use crate::clock;
use crate::datapath::steering::{self, Lifetime, SteeredOrigin, Steering};
use crate::net::Queue;
use crate::stats::EvictReason;
use crate::sys;

/// Requests that the kernel could have served so recently mean that it gets sockets.
const DEMAND: Duration = Duration::from_secs(10);

/// An exchange that takes longer than this is the daemon's, which watches its client and knows
/// what to do when the origin stalls.
const TAKE_OVER_AFTER: Duration = Duration::from_secs(1);

/// The kernel passes a request on right after it has claimed a socket for it, but its client may be made
/// to wait for the processor in between. A request that has not gone out by then has failed, and its client
/// was told.
const UNSENT_MAX: Duration = Duration::from_secs(1);

/// What a pool needs to leave sockets to the kernel.
#[derive(Clone)]
pub struct Steer {
    /// The shared memory.
    pub steering: Arc<Steering>,
    /// The worker that the pool belongs to.
    pub worker: usize,
    /// The group of the pool's first place; the others follow.
    pub first_group: usize,
    /// How many places there are.
    pub places: usize,
    /// Offer sockets before anybody has asked for them.
    pub always: bool,
}

impl Steer {
    /// Tells the kernel how many places to look at.
    pub(super) fn set_span(&self, span: usize) {
        self.steering.set_span(self.first_group, span.min(self.places));
    }

    /// How many requests have found no idle socket.
    pub(super) fn missed(&self) -> u64 {
        self.steering.missed(self.first_group)
    }
}

/// One origin's sockets that are, or may be, left to the kernel.
pub(super) struct Stock {
    steer: Steer,
    group: usize,
    /// Those left to it, by slot of the group.
    held: RefCell<Vec<Option<Connection>>>,
    /// Slots with a socket, the daemon's own included.
    used: Rc<Cell<u64>>,
    demand: Cell<u64>,
    demanded: Cell<Option<Instant>>,
    /// Slots whose origin had ended at the last sweep.
    ended: Cell<u64>,
}

/// A connection's place in a slot; dropping it frees the slot. The socket must be closed
/// or released before.
pub(super) struct Attached {
    steering: Arc<Steering>,
    slot: usize,
    cookie: u64,
    used: Rc<Cell<u64>>,
    bit: u64,
}

impl Attached {
    /// Whether the origin may wait for more of a request that the kernel sent.
    pub(super) fn is_spent(&self) -> bool {
        self.steering.is_spent(self.slot)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.steering.free(self.slot, self.cookie);
        self.used.set(self.used.get() & !self.bit);
    }
}

/// What has become of a socket that was to be left to the kernel.
pub(super) enum Published {
    /// It is.
    Yes,
    /// All places are taken.
    NoPlace(Connection),
    /// Something has come on it, which may be lost.
    Dirty(Connection),
}

/// What has become of a socket that was left to the kernel.
pub(super) enum Attention {
    /// Nothing that concerns the daemon.
    None,
    /// It came back, clean or not.
    Back(Connection),
    /// An exchange is the daemon's from here on: the request has been sent, nothing of a response
    /// has come to the client.
    TakeOver(Connection, TakenOver),
    /// To be closed. The client has not got its whole response.
    Broken(Connection, u64),
    /// To be closed.
    Dirty(Connection, EvictReason),
}

/// An exchange that the daemon takes over from the kernel.
#[derive(Debug)]
pub struct TakenOver {
    /// Cookie of the client's socket.
    pub client: u64,
    /// The whole request.
    pub request: Vec<u8>,
    /// When it was sent, or a moment earlier.
    pub sent: Instant,
    /// What has come as its response is none.
    pub strayed: bool,
}

impl Stock {
    /// The stock at a place; `None` beyond those that the kernel knows.
    pub(super) fn new(steer: &Steer, place: usize) -> Option<Self> {
        let slots = steer.steering.layout().group_slots();
        (place < steer.places).then(|| Self {
            steer: steer.clone(),
            group: steer.first_group + place,
            held: RefCell::new((0..slots).map(|_| None).collect()),
            used: Rc::default(),
            demand: Cell::new(0),
            demanded: Cell::new(None),
            ended: Cell::new(0),
        })
    }

    /// The number of its group.
    pub(super) fn group(&self) -> usize {
        self.group
    }

    /// The memory that it shares with the kernel.
    pub(super) fn steering(&self) -> &Arc<Steering> {
        &self.steer.steering
    }

    /// Takes what was counted for an origin that has left.
    pub(super) fn take_carried(&self) -> SteeredOrigin {
        self.steer.steering.take_carried(self.group)
    }

    /// Tells the kernel the origin's share, relative to the others'.
    pub(super) fn set_weight(&self, weight: NonZeroU32) {
        self.steer.steering.set_weight(self.group, weight);
    }

    /// Sockets left to the kernel.
    pub(super) fn held(&self) -> usize {
        self.held.borrow().iter().flatten().count()
    }

    /// Those of them that look idle.
    pub(super) fn idle(&self) -> usize {
        self.steer.steering.idle(self.group)
    }

    /// Whether the kernel has requests for sockets.
    pub(super) fn is_wanted(&self, now: Instant) -> bool {
        let recent = |at: Instant| now.saturating_duration_since(at) < DEMAND;
        self.steer.always || self.demanded.get().is_some_and(recent)
    }

    /// Looks whether the kernel has had requests. To be called now and then. Answers whether it has
    /// begun to want sockets since the last time.
    pub(super) fn look_at_demand(&self, now: Instant) -> bool {
        let wanted_before = self.is_wanted(now);
        let demand = self.steer.steering.demand(self.group);
        if self.demand.replace(demand) != demand {
            self.demanded.set(Some(now));
        }
        !wanted_before && self.is_wanted(now)
    }

    /// Tells the kernel how many sockets of this origin are leased or being dialled, and whether
    /// it may begin exchanges there.
    pub(super) fn set_load(&self, relay_active: usize, eligible: bool) {
        self.steer.steering.set_load(self.group, relay_active, eligible);
    }

    /// Has the kernel give every socket back that it has finished with, as long as somebody waits.
    pub(super) fn set_wanted(&self, wanted: bool) {
        self.steer.steering.set_wanted(self.group, wanted);
    }

    /// Leaves a silent socket, idle for so long, to the kernel. Gives it back if there is no place,
    /// or if it is not silent.
    pub(super) fn publish(
        &self,
        mut connection: Connection,
        requests_max: u64,
        idle_for: Duration,
    ) -> Published {
        let life = Lifetime {
            exchanges: connection.life.exchanges,
            uses_left: requests_max.saturating_sub(connection.life.exchanges),
            origin_idle: connection.life.origin_idle,
        };
        let steering = &self.steer.steering;
        match &connection.attached {
            // It has served the daemon's exchanges meanwhile.
            Some(attached) => steering.set_life(attached.slot, &life),
            None => connection.attached = self.attach(&connection, &life),
        }
        let Some(slot) = connection.attached.as_ref().map(|a| a.slot) else {
            return Published::NoPlace(connection);
        };
        // What happens from here on is seen by the programs, and not by the event loop.
        connection.stream.leave_event_loop();
        let word = steering.word(slot);
        if word.phase() != Phase::Relay || !steering.swap(slot, word, Word::OFFERED) {
            return Published::Dirty(connection);
        }
        if connection.stream.peek() != Queue::Empty {
            // Unless a program has made it dirty, which is as good.
            let _ours = steering.swap(slot, Word::OFFERED, Word::new(Phase::Relay, 0));
            return Published::Dirty(connection);
        }
        let mut held = self.held.borrow_mut();
        let place = &mut held[slot % steering.layout().group_slots()];
        *place = Some(connection);
        if steering.publish(slot, idle_for) {
            return Published::Yes;
        }
        place.take().map_or(Published::Yes, Published::Dirty)
    }

    /// Makes a silent socket of the daemon's like any other again. `false` if it was not silent.
    pub(super) fn withdraw(&self, connection: &mut Connection) -> bool {
        let Some(attached) = connection.attached.take() else { return true };
        let steering = &self.steer.steering;
        let slot = attached.slot;
        let word = steering.word(slot);
        connection.stream.leave_event_loop();
        let received = || sys::bytes_received(connection.stream.as_fd()).ok();
        let before = received();
        let offered = word.phase() == Phase::Relay
            && steering.swap(slot, word, Word::OFFERED)
            && connection.stream.peek() == Queue::Empty;
        steering.release(slot);
        // The look takes the socket's lock: programs that still saw the old map have ended. What
        // came just when the socket left, the kernel may have dropped without asking any.
        let silent =
            connection.stream.peek() == Queue::Empty && before.is_some() && received() == before;
        let kept = steering.swap(slot, Word::OFFERED, Word::new(Phase::Relay, 0));
        offered && silent && kept
    }

    fn attach(&self, connection: &Connection, life: &Lifetime) -> Option<Attached> {
        let steering = &self.steer.steering;
        let slots = steering.layout().group_slots();
        let used = self.used.get();
        let free = (!used).trailing_zeros() as usize;
        if free >= slots {
            return None;
        }
        let slot = self.group * slots + free;
        let socket = connection.stream.as_fd();
        let cookie = steering
            .attach(slot, self.steer.worker, socket, life)
            .inspect_err(|error| tracing::debug!(%error, "an origin socket stays the daemon's"))
            .ok()?;
        let bit = 1 << free;
        self.used.set(used | bit);
        let (steering, used) = (Arc::clone(steering), Rc::clone(&self.used));
        Some(Attached { steering, slot, cookie, used, bit })
    }

    /// Takes an idle socket back.
    pub(super) fn take(&self) -> Option<Connection> {
        loop {
            let slot = self.steer.steering.take(self.group)?;
            if let Some(connection) = self.remove(slot) {
                return Some(connection);
            }
        }
    }

    /// Whether no socket has a place here.
    pub(super) fn is_vacant(&self) -> bool {
        self.used.get() == 0
    }

    /// Looks at one slot that an event was about.
    pub(super) fn look_at(&self, slot: usize) -> Attention {
        let steering = &self.steer.steering;
        let word = steering.word(slot);
        let request = match (word.phase(), word.owner()) {
            (Phase::Relay, 1..) => steering.request(slot),
            (Phase::Relay | Phase::Dirty, _) => Vec::new(),
            _ => return Attention::None,
        };
        let noted = steering.noted(slot);
        let ended = noted.is_some_and(|noted| noted.ended);
        // No response has begun, then: the program that sees one clears that. What its client has
        // announced more for, TCP has, and keeps for a while.
        let unsent = noted.filter(|noted| noted.unsent > 0);
        let unsent = unsent.filter(|_| word.phase() == Phase::Relay && word.owner() != 0);
        let unsent = unsent.filter(|noted| !self.push(slot, noted.unsent));
        if unsent.is_some_and(|n| steering::now().saturating_sub(n.started) < UNSENT_MAX) {
            // It may be on its way; the next sweep looks again.
            return Attention::None;
        }
        let Some(mut connection) = self.remove(slot) else { return Attention::None };
        match (word.phase(), word.owner()) {
            (Phase::Relay, 0) => Attention::Back(connection),
            // Its client was told that it could not be sent, or not all of it.
            (Phase::Relay, client) if unsent.is_some() => Attention::Broken(connection, client),
            // The origin waits for more, and is not to blame for that.
            (Phase::Relay, client)
                if noted.is_some_and(|noted| noted.urgent)
                    && connection.stream.peek() == Queue::Empty =>
            {
                Attention::Broken(connection, client)
            }
            (Phase::Relay, client) => {
                // The client is marked as the daemon's, so nothing hangs on the owner any more.
                let _ours = steering.swap(slot, word, Word::new(Phase::Relay, 0));
                // The kernel has counted this one already.
                connection.life.exchanges = connection.life.exchanges.saturating_sub(1);
                let now = clock::now();
                let running = noted.map(|noted| steering::now().saturating_sub(noted.started));
                let sent = running.and_then(|running| now.checked_sub(running)).unwrap_or(now);
                let strayed = noted.is_some_and(|noted| noted.strayed);
                Attention::TakeOver(connection, TakenOver { client, request, sent, strayed })
            }
            (_, 0) if ended => Attention::Dirty(connection, EvictReason::IdleClosed),
            (_, 0) => Attention::Dirty(connection, EvictReason::IdleBytes),
            (_, client) => Attention::Broken(connection, client),
        }
    }

    /// Looks at all slots: takes back what has expired, gives up what has stalled, takes over what is
    /// slow or waits for an origin that is ejected as `silent`, and finds what events have not told.
    pub(super) fn sweep(
        &self,
        idle_ttl: Duration,
        stall: Duration,
        silent: bool,
        now: Instant,
    ) -> Vec<Attention> {
        let steering = &self.steer.steering;
        let slots = steering.layout().group_slots();
        let kernel_now = steering::now();
        let mut all = Vec::new();
        for free in 0..slots {
            let Some(life) = self.life(free) else { continue };
            let slot = self.group * slots + free;
            // The word first: what is noted is then of this exchange, or of a later one.
            let word = steering.word(slot);
            let Some(noted) = steering.noted(slot) else { continue };
            // Bytes that came with the end may not be through yet, but are at the next sweep.
            let (ended, bit) = (self.ended.get(), 1 << free);
            self.ended.set(if noted.ended { ended | bit } else { ended & !bit });
            let cut = noted.ended && ended & bit != 0;
            let running = kernel_now.saturating_sub(noted.started);
            match word.phase() {
                Phase::Idle => {
                    let idle = kernel_now.saturating_sub(noted.idle_since);
                    let life = Life { origin_idle: noted.origin_idle, ..life };
                    let since = now.checked_sub(idle).unwrap_or(now);
                    if now < expiry(&life, since, idle_ttl) {
                        continue;
                    }
                    let reason = expired_by(&life, now);
                    if steering.take_back(slot)
                        && let Some(connection) = self.remove(slot)
                    {
                        all.push(Attention::Dirty(connection, reason));
                    }
                }
                Phase::Head if silent || running > TAKE_OVER_AFTER => {
                    // Before the swap: nothing may be steered past what the daemon will send.
                    steering.set_busy(word.owner());
                    if steering.swap(slot, word, word.with(Phase::Relay)) {
                        all.push(self.look_at(slot));
                    }
                }
                Phase::Body
                    if (cut || running > stall)
                        && steering.swap(slot, word, word.with(Phase::Dirty)) =>
                {
                    all.push(self.look_at(slot));
                }
                Phase::Relay | Phase::Dirty => all.push(self.look_at(slot)),
                _ => {}
            }
        }
        all
    }

    /// Takes back every idle socket.
    pub(super) fn take_all(&self) -> Vec<Connection> {
        std::iter::from_fn(|| self.take()).collect()
    }

    fn life(&self, free: usize) -> Option<Life> {
        self.held.borrow()[free].as_ref().map(|connection| connection.life)
    }

    /// See [`Stream::push`](crate::net::Stream::push).
    fn push(&self, slot: usize, bytes: u32) -> bool {
        let held = self.held.borrow();
        let connection = &held[slot % self.steer.steering.layout().group_slots()];
        connection.as_ref().is_some_and(|connection| connection.stream.push(bytes.into()))
    }

    /// The connection in a slot that is the daemon's now, with what it went through.
    fn remove(&self, slot: usize) -> Option<Connection> {
        let steering = &self.steer.steering;
        let free = slot % steering.layout().group_slots();
        let mut connection = self.held.borrow_mut()[free].take()?;
        if let Some(noted) = steering.noted(slot) {
            connection.life.exchanges = noted.exchanges;
            connection.life.origin_idle = noted.origin_idle;
            let (now, kernel_now) = (clock::now(), steering::now());
            let at = |noted: Duration| now.checked_sub(kernel_now.saturating_sub(noted));
            connection.idle_since = Some(noted.idle_since).and_then(at);
            connection.body_taken = connection.body_taken.max(noted.body.and_then(at));
        }
        Some(connection)
    }
}
