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
mod dial;
mod lease;
mod origin;
mod queue;
mod stock;
#[cfg(test)]
mod tests;
mod warm;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use tokio::task::AbortHandle;

pub use lease::{Conduct, Lease};
pub use stock::{Steer, TakenOver};

use self::budget::{Budget, RetryPermit};
use self::connection::IdleEvents;
use self::dial::Pace;
use self::origin::{Origin, Origins};
use self::queue::Waiter;
use crate::boundary::{CloseReason, Verdict};
use crate::clock;
use crate::config::PoolConfig;
use crate::config::retries::Retries;
use crate::datapath::Datapath;
use crate::net::Listening;
use crate::origin::outlier::Outcome;
use crate::origin::panic::Eligible;
use crate::origin::watch::{Recorded, Watch};
use crate::origin::{Chosen, Load, pick};
use crate::stats::{EvictReason, ServiceMetrics, ServiceRecords};

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
    /// What no origin may lead to.
    pub listening: Arc<Listening>,
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
    /// How many sockets the next tick opens for the kernel, if it still has too few.
    feed: Cell<usize>,
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
            feed: Cell::new(1),
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
        let now = clock::now();
        shared.reserve(now);
        shared.dial_for_waiters(None, now);
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
        let mut now = clock::now();
        if shared.waiters.borrow().is_empty()
            && !shared.awaits_another(avoid, now)
            && let Some(mut lease) = shared.take_warm(avoid, now)
        {
            lease.set_retry(retry);
            return Ok(lease);
        }
        loop {
            // Boxed: the rare wait must not make every session's task larger.
            let mut lease = Box::pin(self.queue(avoid, retry.take(), now)).await?;
            // Since the socket was handed over, other tasks have run, and bytes may have come.
            if shared.usage == Use::Once || lease.may_begin() {
                return Ok(lease);
            }
            retry = lease.take_retry();
            let reason =
                if lease.has_bytes() { CloseReason::Unsolicited } else { CloseReason::OriginError };
            lease.settle(Verdict::Close(reason), None);
            now = clock::now();
        }
    }

    async fn queue(
        &self,
        avoid: Option<SocketAddr>,
        retry: Option<RetryPermit>,
        now: Instant,
    ) -> Result<Lease, Refusal> {
        let shared = &self.shared;
        let (place, handed_over) = shared.enqueue(avoid, retry, now)?;
        shared.dial_for_waiters(avoid, now);
        shared.reserve(now);
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
        shared.dial_for_waiters(None, now);
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
            let unread = EvictReason::Exchange(CloseReason::UnreadBody);
            let unread = origin.host.leaves_bodies().then_some(unread);
            if let Some(reason) = self.shared.closing.get().or(removed).or(unread) {
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
        self.shared.reserve(clock::now());
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
        self.shared.want(clock::now());
    }
}

impl Shared {
    fn id(&self) -> u64 {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        id
    }

    /// Two random choices among the origins for which `eligible` holds.
    fn pick(
        &self,
        avoid: Option<SocketAddr>,
        now: Instant,
        eligible: impl Fn(&Origin) -> bool,
    ) -> Option<Rc<Origin>> {
        let origins = self.current();
        let rng = &mut *self.environment.rng.borrow_mut();
        let panic = self.panics();
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

    /// Counts what came of an exchange with an origin, or of an attempt at one, that was begun then.
    /// Answers whether the origin is ejected for what came before.
    fn record(&self, origin: &Origin, outcome: Outcome, sent: Instant) -> bool {
        let (Some(watch), Some(host)) = (&self.watch, &origin.watched) else { return false };
        let (now, rng) = (clock::now(), &mut *self.environment.rng.borrow_mut());
        let Recorded { changed, late } = watch.record(host, outcome, sent, now, rng);
        if changed {
            self.look_at_ejections(now);
            self.budget.call_all();
        }
        late
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
}
