//! The origin sockets of one worker and one service: warm, leased, or being dialled.
//!
//! A checkout takes a warm socket if there is one anywhere. Otherwise it queues, first come first
//! served, and a dial is started for it; whichever comes first, a returned socket or the dialled
//! one, serves it. So a burst costs no more handshakes than it needs, and a failing origin costs
//! nobody a wait while another one has a warm socket.
//!
//! Everything here belongs to one worker: no locks, and no worker touches another's pool.

pub mod backoff;
pub mod budget;
pub mod idle;
pub mod ready;

mod connection;
mod lease;
mod origin;
mod stock;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::RngExt;
use rand::rngs::StdRng;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

pub use lease::{Conduct, Lease};
pub use stock::{Steer, TakenOver};

use self::budget::{Budget, GIVE_WAY_AFTER, PendingPermit, RetryPermit};
use self::connection::{Connection, IdleEvents};
use self::idle::Life;
use self::origin::{Origin, Origins};
use self::stock::{Attention, Published};
use crate::boundary::{CloseReason, Verdict};
use crate::clock;
use crate::config::PoolConfig;
use crate::config::retries::{Condition, Retries};
use crate::datapath::Datapath;
use crate::net::{self, Queue};
use crate::origin::outlier::{self, Outcome};
use crate::origin::panic::Eligible;
use crate::origin::watch::Watch;
use crate::origin::{Chosen, Load, pick};
use crate::stats::{EvictReason, ServiceMetrics, ServiceRecords};

/// A dial that takes longer than this no longer counts as help on its way: another one is started
/// elsewhere for whoever waits (as happy eyeballs do, RFC 8305 §5).
const SLOW_DIAL: Duration = Duration::from_millis(250);

/// How long an exchange waits for a leased socket to come back before one is dialled for it. Most
/// leases last about this long; dialling at once would open a socket for every ripple of the load.
const DIAL_AFTER: Duration = Duration::from_millis(2);

/// So many requests that the kernel had no socket for, between two ticks, are worth another socket.
const MISSES: u64 = 4;

/// A worker that has connections asks others for theirs only if its exchanges wait so much longer
/// than those of a worker that has none: it may just not have had the processor for a while.
const SHARE_AFTER: Duration = Duration::from_millis(250);

/// Why a checkout gave no socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// `max_pending` exchanges wait already.
    QueueFull,
    /// `max_requests` exchanges are under way already.
    TooManyRequests,
    /// It would have to be tried again, and as many as allowed are being tried again already.
    TooManyRetries,
    /// No socket became free within `queue_timeout`.
    QueueTimeout,
    /// No origin accepted a connection.
    Unreachable,
    /// The service has no origins.
    NoOrigins,
    /// So many origins are ejected that nobody is to be served.
    Ejected,
}

/// How a pool treats its sockets; follows from the service's protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// A socket serves many exchanges and must be silent in between.
    Reused,
    /// A socket serves one client and then closes. Early bytes are the origin's greeting to that
    /// client.
    Once,
}

/// What all pools of a worker have in common.
#[derive(Clone)]
pub struct Environment {
    /// Told of each origin socket before it connects.
    pub datapath: Arc<dyn Datapath>,
    /// The worker's own generator.
    pub rng: Rc<RefCell<StdRng>>,
    /// The worker.
    pub worker: usize,
}

/// What all workers of a service have in common.
#[derive(Clone)]
pub struct Common {
    /// What the service may have.
    pub budget: Arc<Budget>,
    /// When a request is tried on another socket.
    pub retries: Retries,
    /// Who is looked after, if anybody is.
    pub watch: Option<Arc<Watch>>,
}

/// A pool; dropping it closes its idle sockets.
pub struct Pool {
    shared: Rc<Shared>,
    watcher: AbortHandle,
}

struct Shared {
    config: PoolConfig,
    usage: Use,
    environment: Environment,
    budget: Arc<Budget>,
    retries: Retries,
    watch: Option<Arc<Watch>>,
    metrics: Arc<ServiceMetrics>,
    origins: RefCell<Origins>,
    pace: Cell<Pace>,
    /// Requests that the kernel had no idle socket for, at the last tick.
    missed: Cell<u64>,
    waiters: RefCell<VecDeque<Waiter>>,
    next_id: Cell<u64>,
    events: Arc<IdleEvents>,
    /// Why no socket may stay idle any more.
    closing: Cell<Option<EvictReason>>,
    /// A task is about to look after patient waiters.
    look_arranged: Cell<bool>,
    /// Other workers are about to be asked for connections.
    plea_arranged: Cell<bool>,
    /// The kernel must leave idle sockets to those who wait.
    reserved: Cell<bool>,
    /// The kernel is to give sockets back to those who wait.
    waits: Cell<bool>,
}

struct Waiter {
    id: u64,
    _pending: PendingPermit,
    since: Instant,
    /// The origin that has just failed its exchange.
    avoid: Option<SocketAddr>,
    /// Held if this is not its first attempt.
    retry: Option<RetryPermit>,
    hand_over: oneshot::Sender<Result<Lease, Refusal>>,
}

impl Pool {
    /// A pool without origins yet; with `steer`, the kernel may use its sockets as well. Must be
    /// called where local tasks can be spawned.
    #[must_use]
    pub fn new(
        config: PoolConfig,
        usage: Use,
        common: Common,
        records: Arc<ServiceRecords>,
        environment: Environment,
        steer: Option<Steer>,
    ) -> Self {
        let shared = Rc::new(Shared {
            metrics: Arc::clone(&records.metrics),
            origins: RefCell::new(Origins::new(&config, &common, records, steer)),
            budget: common.budget,
            retries: common.retries,
            watch: common.watch,
            config,
            usage,
            environment,
            pace: Cell::new(Pace::Free),
            missed: Cell::new(0),
            waiters: RefCell::default(),
            next_id: Cell::new(0),
            events: Arc::default(),
            closing: Cell::new(None),
            look_arranged: Cell::new(false),
            plea_arranged: Cell::new(false),
            reserved: Cell::new(false),
            waits: Cell::new(false),
        });
        let pool = Rc::clone(&shared);
        let watcher = tokio::task::spawn_local(async move {
            loop {
                tokio::select! {
                    () = pool.events.wait() => pool.look_at_idle(),
                    () = pool.budget.called(pool.environment.worker) => pool.look_at_budget(),
                }
            }
        });
        Self { shared, watcher: watcher.abort_handle() }
    }

    /// From now on exchanges go to these origins. Those that stay keep their sockets; those that
    /// leave lose their idle ones now and the others as their exchanges end; newcomers are warmed
    /// at [`PoolConfig::prewarm_rate`].
    pub fn set_origins(&self, origins: &[Chosen]) {
        let shared = &self.shared;
        let left = shared.origins.borrow_mut().replace(origins);
        for origin in left {
            origin.close_idle(EvictReason::OriginRemoved);
        }
        let reserved = shared.reserved.get();
        shared.current().iter().for_each(|origin| origin.reserved.set(reserved));
        shared.reserve();
        shared.dial_for_waiters(None);
        if origins.is_empty() {
            shared.refuse_waiters(Refusal::NoOrigins);
        }
    }

    /// Leases a socket: a warm one, or after waiting. `avoid` names an origin that just failed
    /// this exchange; its warm sockets are used only if there is no other to wait for. An exchange
    /// that is tried again brings its permit, which the lease then has.
    ///
    /// Dropping the future gives up the place in the queue.
    pub async fn checkout(
        &self,
        avoid: Option<SocketAddr>,
        retry: Option<RetryPermit>,
    ) -> Result<Lease, Refusal> {
        let mut lease = self.socket(avoid, retry).await?;
        if self.shared.usage == Use::Reused && !lease.count_request(&self.shared.budget) {
            self.shared.metrics.request_overflow.inc();
            return Err(Refusal::TooManyRequests);
        }
        Ok(lease)
    }

    /// The right to try an exchange again, if as many as allowed are not being tried again already.
    #[must_use]
    pub fn retry(&self) -> Option<RetryPermit> {
        self.shared.budget.retry()
    }

    async fn socket(
        &self,
        avoid: Option<SocketAddr>,
        mut retry: Option<RetryPermit>,
    ) -> Result<Lease, Refusal> {
        let shared = &self.shared;
        if shared.current().is_empty() {
            shared.metrics.unreachable.inc();
            return Err(Refusal::NoOrigins);
        }
        if shared.serves_nobody() {
            shared.metrics.unreachable.inc();
            return Err(Refusal::Ejected);
        }
        let now = clock::now();
        if shared.waiters.borrow().is_empty()
            && !shared.awaits_another(avoid, now)
            && let Some(mut lease) = shared.take_warm(avoid, now)
        {
            lease.set_retry(retry);
            return Ok(lease);
        }
        loop {
            // Boxed: the rare wait must not make every session's task larger.
            let mut lease = Box::pin(self.queue(avoid, retry.take())).await?;
            // Since the socket was handed over, other tasks have run, and bytes may have come.
            if shared.usage == Use::Once || lease.may_begin() {
                return Ok(lease);
            }
            retry = lease.take_retry();
            lease.settle(Verdict::Close(CloseReason::Unsolicited), None);
        }
    }

    async fn queue(
        &self,
        avoid: Option<SocketAddr>,
        retry: Option<RetryPermit>,
    ) -> Result<Lease, Refusal> {
        let shared = &self.shared;
        let (place, handed_over) = shared.enqueue(avoid, retry)?;
        shared.dial_for_waiters(avoid);
        shared.reserve();
        let result = tokio::time::timeout(shared.config.queue_timeout, handed_over).await;
        drop(place);
        match result {
            Ok(Ok(result)) => result,
            // The pool was closed.
            Ok(Err(_)) => Err(Refusal::Unreachable),
            Err(_elapsed) => {
                shared.metrics.queue_timed_out.inc();
                Err(Refusal::QueueTimeout)
            }
        }
    }

    /// Housekeeping, to be called a few times a second: lets expired sockets go, keeps the warm
    /// ones warm, and dials again for whoever still waits once a back-off has ended.
    pub fn tick(&self) {
        let shared = &self.shared;
        let now = clock::now();
        shared.origins.borrow_mut().forget_those_that_left();
        for origin in &*shared.current() {
            origin.sweep(now);
        }
        shared.hear_kernel();
        shared.tell_steered();
        shared.budget.look_at_gate();
        shared.look_at_ejections(now);
        if shared.closing.get().is_none() {
            shared.prewarm(now);
            shared.feed_kernel(now);
        }
        shared.dial_for_waiters(None);
    }

    /// Looks at a slot that the kernel programs have said something about; `place` is that of its
    /// origin.
    #[must_use]
    pub fn look_at_slot(&self, place: usize, slot: usize) -> Option<Steered> {
        let origin = self.shared.origins.borrow().at(place)?;
        let attention = origin.stock.as_ref()?.look_at(slot);
        self.shared.attend(&origin, attention)
    }

    /// Looks at all sockets that are left to the kernel, for what no event has told. To be called
    /// a few times a second; exchanges may last as long as `stall`.
    #[must_use]
    pub fn look_at_stock(&self, stall: Duration) -> Vec<Steered> {
        let now = clock::now();
        let idle_ttl = self.shared.config.idle_ttl;
        let mut steered = Vec::new();
        // Those that are leaving, too: the kernel may still be in the middle of their exchanges.
        let all = self.shared.origins.borrow().all();
        for origin in all {
            let Some(stock) = &origin.stock else { continue };
            if stock.look_at_demand(now) {
                self.shared.leave_idle_to_kernel(&origin, now);
            }
            for attention in stock.sweep(idle_ttl, stall, origin.is_silent(now), now) {
                steered.extend(self.shared.attend(&origin, attention));
            }
            let removed = origin.is_leaving().then_some(EvictReason::OriginRemoved);
            if let Some(reason) = self.shared.closing.get().or(removed) {
                for connection in stock.take_all() {
                    origin.close(connection, reason);
                }
            }
            origin.publish();
        }
        steered
    }

    /// Whether no socket is missing that [`PoolConfig::prewarm`] asks for and that could still
    /// come: each origin is either warm or known to be failing.
    #[must_use]
    pub fn is_warm(&self) -> bool {
        let warm = self.shared.current().iter().all(|origin| {
            let missing = origin.is_available(clock::now())
                && self.shared.missing(origin) > 0
                && self.shared.budget.has_early_room(&origin.host);
            !missing && origin.dialling.get() == 0 || origin.backoff.borrow().is_failing()
        });
        if warm {
            self.shared.pace.set(self.shared.pace.get().limited(clock::now()));
        }
        warm
    }

    /// Whether sockets are leased, being dialled, or waited for.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        !self.shared.waiters.borrow().is_empty()
            || self
                .shared
                .origins
                .borrow()
                .all()
                .iter()
                .any(|o| o.active() > 0 || o.dialling.get() > 0)
    }

    /// From now on no socket stays idle: those that are go now, the others as they are settled.
    /// Whoever still has an exchange under way may dial.
    pub fn drain(&self) {
        self.close(EvictReason::Drain);
    }

    fn close(&self, reason: EvictReason) {
        self.shared.closing.set(Some(reason));
        self.shared.reserve();
        let all = self.shared.origins.borrow().all();
        for origin in all {
            origin.close_idle(reason);
        }
    }
}

/// What a pool tells of exchanges that the kernel carried.
#[allow(clippy::large_enum_variant, reason = "moved once, and most of them are of the large kind")]
pub enum Steered {
    /// The daemon goes on with this one.
    TakeOver(Lease, TakenOver),
    /// This client does not get its whole response.
    Broken {
        /// Cookie of its socket.
        client: u64,
    },
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.watcher.abort();
        self.close(self.shared.closing.get().unwrap_or(EvictReason::OriginRemoved));
        self.shared.waiters.borrow_mut().clear();
        self.shared.want();
    }
}

/// A place in the queue; dropping it gives it up.
struct Place {
    shared: Rc<Shared>,
    id: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiters = self.shared.waiters.borrow_mut();
        waiters.retain(|waiter| waiter.id != self.id);
        self.shared.metrics.waiting.set(waiters.len());
        drop(waiters);
        self.shared.reserve();
        self.shared.want();
    }
}

type HandedOver = oneshot::Receiver<Result<Lease, Refusal>>;

impl Shared {
    fn id(&self) -> u64 {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        id
    }

    fn enqueue(
        self: &Rc<Self>,
        avoid: Option<SocketAddr>,
        retry: Option<RetryPermit>,
    ) -> Result<(Place, HandedOver), Refusal> {
        let Some(pending) = self.budget.wait() else {
            self.metrics.queue_overflow.inc();
            return Err(Refusal::QueueFull);
        };
        let mut waiters = self.waiters.borrow_mut();
        let id = self.id();
        let (hand_over, handed_over) = oneshot::channel();
        let since = clock::now();
        waiters.push_back(Waiter { id, _pending: pending, since, avoid, retry, hand_over });
        self.metrics.waiting.set(waiters.len());
        Ok((Place { shared: Rc::clone(self), id }, handed_over))
    }

    /// A warm socket of the best origin that has one, known to be clean.
    fn take_warm(self: &Rc<Self>, avoid: Option<SocketAddr>, now: Instant) -> Option<Lease> {
        loop {
            let mut picked = self.pick(avoid, |o| o.has_idle() || self.is_cold(o, now))?;
            if !picked.has_idle() {
                // An origin without any socket gets one in the background, so that it takes part
                // again; nobody waits for that while another origin is warm.
                self.dial(&picked, true);
                picked = self.pick(avoid, Origin::has_idle)?;
            }
            let taken = picked.idle.borrow_mut().take(now).map(|(connection, _)| connection);
            match taken.or_else(|| picked.stock.as_ref()?.take()) {
                Some(connection) => {
                    if let Some(lease) = self.lease_if_clean(&picked, connection) {
                        return Some(lease);
                    }
                }
                // Everything idle there has expired; without this the loop would not end.
                None => picked.sweep(now),
            }
        }
    }

    /// Whether an exchange should wait for another origin, because only the one that has just failed it
    /// has warm sockets. An origin that dies takes its sockets along one by one: those that still look
    /// well would use up all attempts.
    fn awaits_another(&self, failed: Option<SocketAddr>, now: Instant) -> bool {
        let Some(failed) = failed else { return false };
        let (origins, panic) = (self.current(), self.panics());
        let may_serve = |o: &Origin| {
            let reached = !o.backoff.borrow().is_failing();
            o.has_idle() || reached && (o.dialling.get() > 0 || o.host.has_room())
        };
        let mut others = origins
            .iter()
            .filter(|o| o.address != failed && (panic || o.is_available(now)) && may_serve(o))
            .peekable();
        others.peek().is_some() && !others.any(|o| o.has_idle())
    }

    /// An idle watch may not have run yet in this turn of the event loop: look for ourselves.
    fn lease_if_clean(
        self: &Rc<Self>,
        origin: &Rc<Origin>,
        connection: Connection,
    ) -> Option<Lease> {
        match self.dirt(connection.stream.peek()) {
            None => Some(Lease::new(Rc::clone(self), Rc::clone(origin), connection)),
            Some(reason) => {
                origin.close(connection, reason);
                None
            }
        }
    }

    /// Why a socket in that state may not be handed out.
    fn dirt(&self, queue: Queue) -> Option<EvictReason> {
        match queue {
            Queue::Empty => None,
            Queue::Bytes if self.usage == Use::Once => None,
            Queue::Bytes => Some(EvictReason::IdleBytes),
            Queue::Ended | Queue::Failed => Some(EvictReason::IdleClosed),
        }
    }

    /// Two random choices among the origins for which `eligible` holds.
    fn pick(
        &self,
        avoid: Option<SocketAddr>,
        eligible: impl Fn(&Origin) -> bool,
    ) -> Option<Rc<Origin>> {
        let origins = self.current();
        let rng = &mut *self.environment.rng.borrow_mut();
        let (now, panic) = (clock::now(), self.panics());
        let mut among = |avoid: Option<SocketAddr>| {
            let report = |index: usize| {
                let origin = &*origins[index];
                let wanted = Some(origin.address) != avoid && eligible(origin);
                let eligible = wanted && (panic || origin.is_available(now));
                let active = origin.active() + origin.dialling.get();
                Load { active, weight: origin.share(), eligible }
            };
            pick(origins.len(), report, rng)
        };
        let index = among(avoid).or_else(|| avoid.and_then(|_| among(None)))?;
        Some(Rc::clone(&origins[index]))
    }

    /// Whether ejections are disregarded.
    fn panics(&self) -> bool {
        self.watch.as_ref().is_some_and(|watch| watch.eligible() == Eligible::All)
    }

    /// Whether ejections leave nobody to ask.
    fn serves_nobody(&self) -> bool {
        self.watch.as_ref().is_some_and(|watch| watch.eligible() == Eligible::Nobody)
    }

    /// Counts what came of an exchange with an origin, or of an attempt at one.
    fn record(&self, origin: &Origin, outcome: Outcome) {
        let (Some(watch), Some(host)) = (&self.watch, &origin.watched) else { return };
        let now = clock::now();
        if watch.record(host, outcome, now, &mut *self.environment.rng.borrow_mut()) {
            self.look_at_ejections(now);
            self.budget.call_all();
        }
    }

    /// What the kernel carries counts as well.
    fn hear_kernel(&self) {
        let Some(watch) = &self.watch else { return };
        for host in self.current().iter().filter_map(|origin| origin.watched.as_ref()) {
            watch.hear_kernel(host);
        }
    }

    /// What the kernel carries is a part of the load, too.
    fn tell_steered(&self) {
        let used = |origin: &Rc<Origin>| {
            origin.stock.as_ref().map_or(0, |stock| stock.held().saturating_sub(stock.idle()))
        };
        let used = self.current().iter().map(used).sum();
        self.budget.steers(self.environment.worker, used);
    }

    /// Origins that have been ejected lose their idle sockets, and the kernel's exchanges.
    fn look_at_ejections(&self, now: Instant) {
        let panic = self.panics();
        for origin in &*self.current() {
            origin.look_at_ejection(now, panic);
        }
        if self.serves_nobody() {
            self.refuse_waiters(Refusal::Ejected);
        }
    }

    /// The origins that get exchanges.
    fn current(&self) -> Rc<[Rc<Origin>]> {
        self.origins.borrow().current()
    }

    fn may_dial(&self, origin: &Origin, now: Instant) -> bool {
        let backoff = origin.backoff.borrow();
        // One probe at a time for an origin that last failed.
        let dials_max = if backoff.is_failing() { 1 } else { self.config.max_dials };
        backoff.permits(now) && origin.dialling.get() < dials_max
    }

    fn can_dial(&self, origin: &Origin, now: Instant) -> bool {
        self.may_dial(origin, now) && self.budget.has_room(&origin.host)
    }

    fn is_cold(&self, origin: &Origin, now: Instant) -> bool {
        origin.open.get() == 0 && origin.dialling.get() == 0 && self.can_dial(origin, now)
    }

    /// Starts a dial for each waiter that has no hope yet.
    fn dial_for_waiters(self: &Rc<Self>, avoid: Option<SocketAddr>) {
        let now = clock::now();
        self.serve_from_stock(now);
        let avoid = avoid.or_else(|| self.first_avoids());
        while self.fresh_dials() < self.impatient(now) {
            let room = self.pick(avoid, |o| self.can_dial(o, now));
            let Some(origin) = room.or_else(|| self.pick(avoid, |o| self.may_dial(o, now))) else {
                break;
            };
            if !self.dial(&origin, false) && !self.make_room() {
                break;
            }
        }
        self.want();
    }

    /// The origin that has just failed whoever waits the longest.
    fn first_avoids(&self) -> Option<SocketAddr> {
        self.waiters.borrow().front()?.avoid
    }

    /// Dials that may still help soon.
    fn fresh_dials(&self) -> usize {
        self.current().iter().map(|o| o.dialling.get() - o.slow.get()).sum()
    }

    /// Closes an idle connection that those who wait cannot use, so that another can be opened.
    fn make_room(&self) -> bool {
        let Some((connection, origin)) = self.take_idle() else { return false };
        origin.close(connection, EvictReason::MadeRoom);
        true
    }

    /// Takes an idle connection whose end makes room for another one.
    fn take_idle(&self) -> Option<(Connection, Rc<Origin>)> {
        let any = self.budget.connections.is_full();
        let origins = self.current();
        let mut in_the_way = origins.iter().filter(|origin| any || !origin.host.has_room());
        in_the_way.find_map(|origin| Some((origin.take_idle()?, Rc::clone(origin))))
    }

    /// Says how many connections the others have to give up for those who wait here.
    fn want(self: &Rc<Self>) {
        let waiters = self.waiters.borrow();
        let dialling: usize = self.current().iter().map(|o| o.dialling.get()).sum();
        let mut since = waiters.front().map_or_else(clock::now, |first| first.since);
        // Whose origins cannot be dialled now is not helped by what others give up.
        let (now, origins) = (clock::now(), self.current());
        let helped = origins.iter().any(|o| self.may_dial(o, now))
            && !origins.iter().any(|o| self.can_dial(o, now));
        let wanted = if helped { waiters.len().saturating_sub(dialling) } else { 0 };
        if origins.iter().any(|origin| origin.open.get() > 0) {
            since += SHARE_AFTER;
        }
        self.budget.want(self.environment.worker, wanted, since);
        if wanted > 0 && !self.plea_arranged.replace(true) {
            let pool = Rc::downgrade(self);
            let due = (since + GIVE_WAY_AFTER).max(now + DIAL_AFTER);
            tokio::task::spawn_local(async move {
                tokio::time::sleep_until(due.into()).await;
                let Some(pool) = pool.upgrade() else { return };
                pool.plea_arranged.set(false);
                pool.budget.plead(pool.environment.worker);
                pool.dial_for_waiters(None);
            });
        }
    }

    /// Others have given up connections, or want some.
    fn look_at_budget(self: &Rc<Self>) {
        self.look_at_ejections(clock::now());
        while self.waiters.borrow().is_empty()
            && self.budget.others_go_first(self.environment.worker, clock::now())
            && let Some((connection, origin)) = self.take_idle()
        {
            if !self.budget.promise(self.environment.worker) {
                self.offer(&origin, connection);
                break;
            }
            origin.close(connection, EvictReason::MadeRoom);
        }
        self.dial_for_waiters(None);
    }

    /// Whether a connection that comes back is to be given up for another worker's exchanges.
    fn gives_way(&self) -> bool {
        let worker = self.environment.worker;
        let ours = self.waiters.borrow().front().map_or_else(clock::now, |first| first.since);
        self.budget.others_go_first(worker, ours) && self.budget.promise(worker)
    }

    /// Sockets that the kernel has finished with are for those who wait; and if these cannot be helped
    /// by a dial, they come before whoever the kernel would serve next, too.
    fn reserve(&self) {
        let now = clock::now();
        let origins = self.current();
        let waits = !self.waiters.borrow().is_empty();
        if self.waits.replace(waits) != waits {
            for stock in origins.iter().filter_map(|origin| origin.stock.as_ref()) {
                stock.set_wanted(waits);
            }
        }
        let reserved = self.closing.get().is_some()
            || waits && !origins.iter().any(|o| o.dialling.get() > 0 || self.can_dial(o, now));
        if self.reserved.replace(reserved) != reserved {
            for origin in &*origins {
                origin.reserved.set(reserved);
                origin.publish();
            }
        }
    }

    /// Sockets that the kernel has finished with come back to nobody by themselves.
    fn serve_from_stock(self: &Rc<Self>, now: Instant) {
        while !self.waiters.borrow().is_empty()
            && self.current().iter().any(|o| o.stock.as_ref().is_some_and(|s| s.idle() > 0))
            && !self.awaits_another(self.first_avoids(), now)
            && let Some(lease) = self.take_warm(self.first_avoids(), now)
        {
            self.hand_over(lease);
        }
    }

    /// Waiters for whom no leased socket has come back in time; all of them if none is leased. For
    /// the others, a look later is arranged.
    fn impatient(self: &Rc<Self>, now: Instant) -> usize {
        let waiters = self.waiters.borrow();
        let origins = self.current();
        if !origins.iter().any(|o| o.active() > 0) {
            return waiters.len();
        }
        // They stand in the order of their arrival.
        let patient_from = waiters.partition_point(|waiter| now >= waiter.since + DIAL_AFTER);
        let shares = origins.iter().any(|o| o.stock.as_ref().is_some_and(|s| s.held() > 0));
        let next = waiters.get(patient_from).map(|next| next.since + DIAL_AFTER);
        if let Some(due) =
            next.or_else(|| (shares && !waiters.is_empty()).then(|| now + DIAL_AFTER))
            && !self.look_arranged.replace(true)
        {
            let pool = Rc::downgrade(self);
            tokio::task::spawn_local(async move {
                tokio::time::sleep_until(due.into()).await;
                let Some(pool) = pool.upgrade() else { return };
                pool.look_arranged.set(false);
                pool.dial_for_waiters(None);
            });
        }
        patient_from
    }

    fn missing(&self, origin: &Origin) -> usize {
        let have = match self.usage {
            Use::Reused => origin.open.get(),
            Use::Once => origin.idle.borrow().len(),
        };
        origin.ready.get().wanted().saturating_sub(have + origin.dialling.get())
    }

    fn prewarm(self: &Rc<Self>, now: Instant) {
        let mut pace = self.pace.get();
        for origin in &*self.current() {
            for _ in 0..self.missing(origin) {
                if !self.may_dial(origin, now)
                    || !origin.is_available(now)
                    || !pace.permits(self.config.prewarm_rate, now)
                    || !self.dial(origin, true)
                {
                    break;
                }
            }
        }
        // However little there is to do, the next exchange should find a warm socket somewhere.
        let ready =
            || self.current().iter().map(|o| o.open.get() + o.dialling.get()).sum::<usize>();
        while ready() < self.config.prewarm
            && let Some(origin) = self.pick(None, |o| self.can_dial(o, now) && o.is_available(now))
            && pace.permits(self.config.prewarm_rate, now)
            && self.dial(&origin, true)
        {}
        self.pace.set(pace);
    }

    /// The kernel keeps asking for more sockets than there are. Its requests come to the daemon then,
    /// which costs about as much as a handshake, and rarely waits long enough to dial. One socket more
    /// at a time follows the load, and does not answer a single burst with as many handshakes.
    fn feed_kernel(self: &Rc<Self>, now: Instant) {
        let missed = self.origins.borrow().missed();
        let mut pace = self.pace.get();
        if missed.wrapping_sub(self.missed.replace(missed)) >= MISSES
            && let Some(origin) = self.pick(None, |o| {
                o.open.get() + o.dialling.get() < self.config.max_idle && self.can_dial(o, now)
            })
            && pace.permits(self.config.prewarm_rate, now)
        {
            self.dial(&origin, true);
            self.pace.set(pace);
        }
    }

    /// Starts a dial. `early` means that nobody waits for it. `false` if the limits of connections
    /// are reached.
    fn dial(self: &Rc<Self>, origin: &Rc<Origin>, early: bool) -> bool {
        let Some(permit) = self.budget.connect(&origin.host, early) else { return false };
        if !early {
            origin.missed();
        }
        let (shared, origin) = (Rc::clone(self), Rc::clone(origin));
        origin.add_dialling(1);
        tokio::task::spawn_local(async move {
            let started = clock::now();
            let config = &shared.config;
            let mut dial = std::pin::pin!(net::dial(
                origin.address,
                config.keepalive,
                config.connect_timeout,
                &*shared.environment.datapath,
            ));
            let result = if let Ok(result) = tokio::time::timeout(SLOW_DIAL, &mut dial).await {
                result
            } else {
                origin.slow.set(origin.slow.get() + 1);
                shared.dial_for_waiters(Some(origin.address));
                let result = dial.await;
                origin.slow.set(origin.slow.get() - 1);
                result
            };
            origin.add_dialling(-1);
            match result {
                Ok(stream) => {
                    let now = clock::now();
                    let handshake = now.saturating_duration_since(started);
                    if let Some(host) = &origin.watched {
                        host.record_handshake(handshake);
                    }
                    if shared.usage == Use::Once {
                        shared.record(&origin, Outcome::Accepted);
                    }
                    origin.metrics.created.inc();
                    origin
                        .metrics
                        .handshake_us
                        .record(handshake.as_micros().try_into().unwrap_or(u64::MAX));
                    origin.backoff.borrow_mut().succeed();
                    origin.metrics.failing.set(0);
                    origin.open.set(origin.open.get() + 1);
                    // Sockets opened together must not end together.
                    let spread = shared.environment.rng.borrow_mut().random_range(0.9..=1.0);
                    let ends = now + config.max_lifetime.mul_f64(spread);
                    let life = Life { ends, exchanges: 0, origin_idle: None };
                    let place = (origin.place, shared.id());
                    let connection = Connection::new(stream, permit, place, life, &shared.events);
                    shared.offer(&origin, connection);
                }
                Err(error) => {
                    drop(permit);
                    shared.dial_failed(&origin, &error, started);
                }
            }
        });
        true
    }

    fn dial_failed(self: &Rc<Self>, origin: &Rc<Origin>, error: &io::Error, started: Instant) {
        tracing::debug!(origin = %origin.address, %error, "dial failed");
        origin.count_failed_dial(error);
        self.record(origin, Outcome::Failed(outlier::Failure::Connect));
        let now = clock::now();
        origin.metrics.failing.set(1);
        origin.backoff.borrow_mut().fail(now, &mut *self.environment.rng.borrow_mut());
        if self.fresh_dials() < self.impatient(now) {
            // Somebody has lost the dial that was for it.
            self.retry_first_waiter(started, now);
        }
        // Whoever waited for this dial: first any warm socket, then another origin.
        while !self.waiters.borrow().is_empty()
            && let Some(lease) = self.take_warm(Some(origin.address), now)
        {
            self.hand_over(lease);
        }
        self.dial_for_waiters(Some(origin.address));
        let hope = self.current().iter().any(|o| o.dialling.get() > 0 || o.active() > 0);
        if !hope {
            // Every origin has had its chance. The next clients may try again after the back-off.
            self.refuse_waiters(Refusal::Unreachable);
        }
    }

    /// A dial that began then has failed, and with it one attempt of one exchange: of the one that
    /// has waited the longest and is not being tried again already. It goes on waiting, for
    /// whatever comes next, if it may.
    ///
    /// A connection that could not be made is none of an exchange's [`Retries::attempts`]: an origin
    /// that cannot be reached is dialled once in each back-off, however many wait.
    fn retry_first_waiter(&self, started: Instant, now: Instant) {
        let others = |o: &Rc<Origin>| {
            o.has_idle() || o.dialling.get() > 0 || o.active() > 0 || self.may_dial(o, now)
        };
        if !self.current().iter().any(others) {
            // There is nothing to try.
            return;
        }
        let retries = self.retries.on.contains(Condition::ConnectFailure);
        let mut waiters = self.waiters.borrow_mut();
        let concerned = |w: &Waiter| w.since <= started && (!retries || w.retry.is_none());
        let Some(place) = waiters.iter().position(concerned) else { return };
        let refusal = if !retries {
            self.metrics.unreachable.inc();
            Refusal::Unreachable
        } else if let Some(permit) = self.budget.retry() {
            waiters[place].retry = Some(permit);
            self.metrics.retries.inc();
            return;
        } else {
            self.metrics.retry_overflow.inc();
            Refusal::TooManyRetries
        };
        let waiter = waiters.remove(place);
        self.metrics.waiting.set(waiters.len());
        drop(waiters);
        if let Some(waiter) = waiter {
            // Else it has given up just now.
            waiter.hand_over.send(Err(refusal)).ok();
        }
    }

    fn refuse_waiters(&self, refusal: Refusal) {
        for waiter in self.waiters.take() {
            self.metrics.unreachable.inc();
            waiter.hand_over.send(Err(refusal)).ok();
        }
        self.metrics.waiting.set(0);
    }

    /// Gives a clean, unleased socket to whoever waits the longest, or to the idle list.
    fn offer(self: &Rc<Self>, origin: &Rc<Origin>, connection: Connection) {
        let now = clock::now();
        let admitted = if origin.is_leaving() {
            Err(EvictReason::OriginRemoved)
        } else {
            origin.idle.borrow().admits(&connection.life, now)
        };
        if let Err(reason) = admitted {
            origin.close(connection, reason);
            return self.dial_for_waiters(None);
        }
        if self.gives_way() {
            return origin.close(connection, EvictReason::MadeRoom);
        }
        if !self.waiters.borrow().is_empty() {
            match self.lease_if_clean(origin, connection) {
                Some(lease) => self.hand_over(lease),
                None => self.dial_for_waiters(None),
            }
            return;
        }
        if let Some(reason) = self.closing.get() {
            return origin.close(connection, reason);
        }
        if origin.stock.as_ref().is_some_and(|stock| stock.look_at_demand(now)) {
            self.leave_idle_to_kernel(origin, now);
        }
        self.let_idle(origin, connection, now, now);
    }

    /// Leaves a socket that is idle since then to the kernel, or keeps it in the idle list.
    fn let_idle(&self, origin: &Origin, mut connection: Connection, since: Instant, now: Instant) {
        connection.idle_since = Some(since);
        let idle_for = now.saturating_duration_since(since);
        let Some(connection) = self.leave_to_kernel(origin, connection, idle_for, now) else {
            return;
        };
        // Watched from here on: an end, a reset or any byte wakes the pool.
        if let Some(reason) = self.dirt(connection.watch()) {
            return origin.close(connection, reason);
        }
        let life = connection.life;
        let put = origin.idle.borrow_mut().put(connection, life, since);
        if let Err((connection, reason)) = put {
            origin.close(connection, reason);
        }
        origin.publish();
    }

    /// The kernel has begun to want sockets: those in the idle list are of no use to it.
    fn leave_idle_to_kernel(&self, origin: &Origin, now: Instant) {
        let idle = origin.idle.borrow_mut().take_all();
        for (connection, since) in idle {
            self.let_idle(origin, connection, since, now);
        }
    }

    /// Leaves a socket to the kernel if that wants it; gives it back otherwise.
    fn leave_to_kernel(
        &self,
        origin: &Origin,
        connection: Connection,
        idle_for: Duration,
        now: Instant,
    ) -> Option<Connection> {
        let Some(stock) = &origin.stock else { return Some(connection) };
        let back = if stock.is_wanted(now) && stock.held() < self.config.max_idle {
            stock.publish(connection, self.config.max_requests, idle_for)
        } else {
            Published::NoPlace(connection)
        };
        let dirty = match back {
            Published::Yes => None,
            Published::NoPlace(mut connection) => {
                if stock.withdraw(&mut connection) {
                    return Some(connection);
                }
                Some(connection)
            }
            Published::Dirty(connection) => Some(connection),
        };
        if let Some(connection) = dirty {
            origin.close(connection, EvictReason::IdleBytes);
        }
        origin.publish();
        None
    }

    /// Deals with a socket that the kernel is done with.
    fn attend(self: &Rc<Self>, origin: &Rc<Origin>, attention: Attention) -> Option<Steered> {
        match attention {
            Attention::None => None,
            Attention::Back(connection) => {
                self.offer(origin, connection);
                None
            }
            Attention::TakeOver(connection, exchange) => {
                let lease = Lease::taken_over(Rc::clone(self), Rc::clone(origin), connection);
                Some(Steered::TakeOver(lease, exchange))
            }
            Attention::Broken(connection, client) => {
                origin.close(connection, EvictReason::Exchange(CloseReason::Truncated));
                Some(Steered::Broken { client })
            }
            Attention::Dirty(connection, reason) => {
                origin.close(connection, reason);
                None
            }
        }
    }

    /// Hands a lease to the first waiter that still wants it; without one it goes idle.
    fn hand_over(self: &Rc<Self>, mut lease: Lease) {
        loop {
            let waiter = self.waiters.borrow_mut().pop_front();
            let Some(waiter) = waiter else { break };
            lease.set_retry(waiter.retry);
            match waiter.hand_over.send(Ok(lease)) {
                Ok(()) => break,
                Err(Ok(unwanted)) => lease = unwanted,
                Err(Err(_)) => unreachable!("a lease was sent"),
            }
            lease.set_retry(None);
        }
        self.metrics.waiting.set(self.waiters.borrow().len());
    }

    /// Something happened on idle sockets.
    fn look_at_idle(&self) {
        for (place, id) in self.events.take() {
            let origin = self.origins.borrow().at(place);
            let Some(origin) = origin else { continue };
            let mut reason = None;
            let evicted = origin.idle.borrow_mut().remove_if(|connection| {
                if connection.id == id {
                    reason = self.dirt(connection.watch());
                }
                connection.id == id && reason.is_some()
            });
            for connection in evicted {
                origin.close(connection, reason.unwrap_or(EvictReason::IdleClosed));
            }
        }
    }
}

/// How fast sockets are opened that nobody waits for.
#[derive(Clone, Copy, Debug)]
enum Pace {
    /// At once: nobody is served before the pool is warm.
    Free,
    /// [`PoolConfig::prewarm_rate`]; up to one second's worth is saved up.
    Limited {
        /// When one more may be opened.
        next: Instant,
    },
}

impl Pace {
    fn limited(self, now: Instant) -> Self {
        match self {
            Self::Free => Self::Limited { next: now },
            limited @ Self::Limited { .. } => limited,
        }
    }

    fn permits(&mut self, rate: u32, now: Instant) -> bool {
        let Self::Limited { next } = self else { return true };
        if *next > now {
            return false;
        }
        let saved_up = now.checked_sub(Duration::from_secs(1)).unwrap_or(now);
        *next = (*next).max(saved_up) + Duration::from_secs(1) / rate;
        true
    }
}
