//! What all workers of a service share: how many connections, exchanges, waiting exchanges and
//! retries there may be.
//!
//! Limits are exact: whoever wants to go on takes a permit with one atomic step first, so no number
//! of workers can exceed them together. (Proxies whose workers check a shared number and count
//! later overshoot by what happens in between.) Everything is given back when it is dropped.
//!
//! Pools are the workers' own, so a worker may lack a connection while another has idle ones. It
//! then says how many it wants, and the others close idle ones for it; or, if its exchanges have
//! waited for longer than theirs, the next ones that come back.

mod retries;

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{AcqRel, Acquire, Relaxed},
};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

pub use self::retries::{RetryPermit, Retrying};
use crate::clock;
use crate::config::Limits;
use crate::config::retries::RetryLimit;
use crate::datapath::gate::Gate;
use crate::stats::{Counter, LimitSnapshot};

/// Another worker's exchanges go before ours if they have waited for so much longer: giving way
/// costs a handshake, and where all wait about equally long nobody is better off. A connection that
/// is idle just now is given up for nobody who has waited less.
pub const GIVE_WAY_AFTER: Duration = Duration::from_millis(20);

/// One number that must not exceed a limit.
#[derive(Debug)]
pub struct Limit {
    max: usize,
    used: AtomicUsize,
    /// How often something was refused, or had to wait, because of it.
    pub overflow: Counter,
}

impl Limit {
    fn new(max: usize) -> Self {
        Self { max, used: AtomicUsize::new(0), overflow: Counter::default() }
    }

    /// The limit.
    #[must_use]
    pub fn max(&self) -> usize {
        self.max
    }

    /// How much of it is used.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// Takes one, as long as `spare` more are left then.
    fn take(&self, spare: usize) -> bool {
        let fits = |used: usize| (used + spare < self.max).then_some(used + 1);
        self.used.fetch_update(AcqRel, Relaxed, fits).is_ok()
    }

    fn give_back(&self) {
        self.used.fetch_sub(1, AcqRel);
    }

    /// Whether nothing is left of it.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.used() >= self.max
    }
}

/// So many origins are remembered before it pays to forget some.
const HOSTS_MIN: usize = 64;

/// No exchange waits.
const NOBODY: u64 = u64::MAX;

/// The budget of one service.
#[derive(Debug)]
pub struct Budget {
    /// Connections to origins: being dialled, idle and in use.
    pub connections: Limit,
    /// Exchanges under way.
    pub requests: Limit,
    /// Exchanges waiting for a connection.
    pub pending: Limit,
    /// Exchanges that are being tried again.
    pub retries: Retrying,
    per_origin: Option<usize>,
    /// Whether an origin without any connection may have one over the limit.
    guarantees: bool,
    /// Connections over the limit, to origins that had none.
    pub guaranteed: Counter,
    hosts: Mutex<Hosts>,
    /// Connections that are never opened before somebody asks for one.
    reserve: usize,
    seats: Vec<Seat>,
    /// Where the connect hook looks whether there is any use in connecting.
    gate: Option<Gate>,
    /// Seats that want something.
    hungry: AtomicUsize,
    epoch: Instant,
}

/// What a worker wants of the others.
#[derive(Debug)]
struct Seat {
    /// Connections that it lacks.
    wanted: AtomicUsize,
    /// Since when its first exchange waits for one, in nanoseconds since the epoch;
    /// [`NOBODY`] if none does.
    since: AtomicU64,
    /// Its connections that the kernel uses.
    steered: AtomicUsize,
    call: Notify,
}

/// The connections to one origin, of all workers.
#[derive(Debug)]
pub struct Host {
    connections: Option<Limit>,
    open: AtomicUsize,
    /// It has answered the body of a request as if it were the next request.
    leaves_bodies: AtomicBool,
}

/// The right to have one connection. Dropping it gives it back.
#[derive(Debug)]
pub struct ConnectionPermit {
    budget: Arc<Budget>,
    host: Arc<Host>,
}

/// The right to have one exchange under way. Dropping it gives it back.
#[derive(Debug)]
pub struct RequestPermit(Arc<Budget>);

/// The origins that some worker has a pool for.
#[derive(Debug, Default)]
struct Hosts {
    by_address: HashMap<SocketAddr, Weak<Host>>,
    /// At this size it is time to forget those that nobody has any more.
    full: usize,
}

impl Hosts {
    fn insert(&mut self, origin: SocketAddr, host: &Arc<Host>) {
        if self.by_address.len() >= self.full {
            self.by_address.retain(|_, host| host.strong_count() > 0);
            self.full = (2 * self.by_address.len()).max(HOSTS_MIN);
        }
        self.by_address.insert(origin, Arc::downgrade(host));
    }
}

/// A place in the queue of those that wait. Dropping it gives it back.
#[derive(Debug)]
pub struct PendingPermit(Arc<Budget>);

impl Budget {
    /// The budget of a service that so many workers share.
    #[must_use]
    pub fn new(limits: &Limits, retries: RetryLimit, workers: usize) -> Self {
        Self {
            connections: Limit::new(limits.max_connections),
            requests: Limit::new(limits.max_requests),
            pending: Limit::new(limits.max_pending),
            retries: Retrying::new(retries),
            per_origin: limits.max_connections_per_origin,
            guarantees: limits.one_connection_per_origin,
            guaranteed: Counter::default(),
            hosts: Mutex::default(),
            reserve: limits.max_connections.div_ceil(5).min(limits.max_connections / 2),
            seats: (0..workers).map(|_| Seat::new()).collect(),
            gate: None,
            hungry: AtomicUsize::new(0),
            epoch: clock::now(),
        }
    }

    /// The same with a gate, which is closed while neither a connection nor a place in the queue is
    /// left.
    #[must_use]
    pub fn with_gate(self, gate: Option<Gate>) -> Self {
        Self { gate, ..self }
    }

    /// Its gate.
    #[must_use]
    pub fn gate(&self) -> Option<&Gate> {
        self.gate.as_ref()
    }

    /// Opens or closes the gate. To be called a few times within a heartbeat's age limit: the word that
    /// it is closed does not last.
    pub fn look_at_gate(&self) {
        if let Some(gate) = &self.gate {
            gate.set_closed(self.is_closed());
        }
    }

    /// Whether whoever came now would be refused. (A queue that is full while there are connections left
    /// is a matter of moments.)
    fn is_closed(&self) -> bool {
        self.connections.is_full() && self.pending.is_full()
    }

    /// The shared count of one origin.
    #[must_use]
    pub fn host(&self, origin: SocketAddr) -> Arc<Host> {
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(host) = hosts.by_address.get(&origin).and_then(Weak::upgrade) {
            return host;
        }
        let host = Arc::new(Host {
            connections: self.per_origin.map(Limit::new),
            open: AtomicUsize::new(0),
            leaves_bodies: AtomicBool::new(false),
        });
        hosts.insert(origin, &host);
        host
    }

    /// How many origins are remembered, with those that nobody has any more.
    #[cfg(test)]
    pub(super) fn hosts_known(&self) -> usize {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner).by_address.len()
    }

    /// Whether a connection to this origin could be opened now.
    #[must_use]
    pub fn has_room(&self, host: &Host) -> bool {
        (!self.connections.is_full() || self.guarantees && host.open.load(Acquire) == 0)
            && host.has_room()
    }

    /// Whether a connection could be opened that nobody waits for.
    #[must_use]
    pub fn has_early_room(&self, host: &Host) -> bool {
        self.connections.used() + self.reserve < self.connections.max && host.has_room()
    }

    /// The right to open a connection. `early` means that nobody waits for it yet: it must leave
    /// room for those who will.
    #[must_use]
    pub fn connect(self: &Arc<Self>, host: &Arc<Host>, early: bool) -> Option<ConnectionPermit> {
        let fits = self.connections.take(if early { self.reserve } else { 0 });
        if fits {
            host.open.fetch_add(1, AcqRel);
        } else if self.guarantees && !early && host.take_first() {
            self.connections.used.fetch_add(1, AcqRel);
        } else {
            return None;
        }
        if host.connections.as_ref().is_some_and(|limit| !limit.take(0)) {
            host.open.fetch_sub(1, AcqRel);
            self.connections.give_back();
            return None;
        }
        if !fits {
            self.guaranteed.inc();
        }
        Some(ConnectionPermit { budget: Arc::clone(self), host: Arc::clone(host) })
    }

    /// The right to begin an exchange.
    #[must_use]
    pub fn request(self: &Arc<Self>) -> Option<RequestPermit> {
        if self.requests.take(0) {
            return Some(RequestPermit(Arc::clone(self)));
        }
        self.requests.overflow.inc();
        None
    }

    /// Counts an exchange that is under way already.
    #[must_use]
    pub fn adopt_request(self: &Arc<Self>) -> RequestPermit {
        self.requests.used.fetch_add(1, AcqRel);
        RequestPermit(Arc::clone(self))
    }

    /// The right to wait.
    #[must_use]
    pub fn wait(self: &Arc<Self>) -> Option<PendingPermit> {
        let place = self.pending.take(0);
        self.look_at_gate();
        if place {
            return Some(PendingPermit(Arc::clone(self)));
        }
        self.pending.overflow.inc();
        None
    }

    /// Says how many connections a worker lacks, and since when its first exchange waits for one.
    pub fn want(&self, worker: usize, wanted: usize, since: Instant) {
        let Some(seat) = self.seats.get(worker) else { return };
        seat.since.store(if wanted > 0 { self.nanos(since) } else { NOBODY }, Relaxed);
        let before = seat.wanted.swap(wanted, AcqRel);
        match (before, wanted) {
            (0, 1..) => {
                self.connections.overflow.inc();
                self.hungry.fetch_add(1, AcqRel);
            }
            (1.., 0) => drop(self.hungry.fetch_sub(1, AcqRel)),
            _ => {}
        }
    }

    /// Has the other workers look whether they can give a connection up.
    pub fn plead(&self, worker: usize) {
        for (other, seat) in self.seats.iter().enumerate() {
            if other != worker {
                seat.call.notify_one();
            }
        }
    }

    /// Whether another worker's exchanges have waited for much longer than since `ours`; costs one
    /// load as long as none does.
    #[must_use]
    pub fn others_go_first(&self, worker: usize, ours: Instant) -> bool {
        let ours = self.nanos(ours);
        let ahead = u64::try_from(GIVE_WAY_AFTER.as_nanos()).unwrap_or(u64::MAX);
        self.hungry.load(Acquire) > 0
            && self.others(worker).any(|seat| seat.since.load(Relaxed).saturating_add(ahead) < ours)
    }

    /// Promises one connection to another worker that lacks one. `false` if none does.
    #[must_use]
    pub fn promise(&self, worker: usize) -> bool {
        let one_less = |wanted: usize| wanted.checked_sub(1);
        self.others(worker).any(|seat| {
            let before = seat.wanted.fetch_update(AcqRel, Relaxed, one_less);
            if before == Ok(1) {
                self.hungry.fetch_sub(1, AcqRel);
            }
            before.is_ok()
        })
    }

    /// The limits, by their names in the configuration.
    #[must_use]
    pub fn snapshot(&self) -> BTreeMap<String, LimitSnapshot> {
        let limits = [
            ("max_connections", &self.connections),
            ("max_pending", &self.pending),
            ("max_requests", &self.requests),
        ];
        let snapshot = |limit: &Limit| LimitSnapshot {
            max: limit.max() as u64,
            used: limit.used() as u64,
            overflow: limit.overflow.get(),
        };
        let limits = limits.into_iter().map(|(name, limit)| (name, snapshot(limit)));
        let all = limits.chain([("max_retries", self.retries_snapshot())]);
        all.map(|(name, limit)| (name.to_owned(), limit)).collect()
    }

    /// Has all workers look at their origins anew.
    pub fn call_all(&self) {
        for seat in &self.seats {
            seat.call.notify_one();
        }
    }

    /// Waits until there may be something to do: connections to give up, or to open, or origins
    /// that have been ejected.
    pub async fn called(&self, worker: usize) {
        match self.seats.get(worker) {
            Some(seat) => seat.call.notified().await,
            None => std::future::pending().await,
        }
    }

    fn others(&self, worker: usize) -> impl Iterator<Item = &Seat> {
        let hungry = |seat: &&Seat| seat.wanted.load(Acquire) > 0;
        let other = move |(index, _): &(usize, &Seat)| *index != worker;
        self.seats.iter().enumerate().filter(other).map(|(_, seat)| seat).filter(hungry)
    }

    fn nanos(&self, at: Instant) -> u64 {
        let nanos = at.saturating_duration_since(self.epoch).as_nanos();
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }
}

impl Seat {
    fn new() -> Self {
        Self {
            wanted: AtomicUsize::new(0),
            since: AtomicU64::new(NOBODY),
            steered: AtomicUsize::new(0),
            call: Notify::new(),
        }
    }
}

impl Host {
    /// Counts a connection if there is none.
    fn take_first(&self) -> bool {
        self.open.compare_exchange(0, 1, AcqRel, Relaxed).is_ok()
    }

    /// Whether it is known to take a request's body for the next request.
    #[must_use]
    pub fn leaves_bodies(&self) -> bool {
        self.leaves_bodies.load(Relaxed)
    }

    /// It does that. Answers whether this is news.
    pub fn has_left_body(&self) -> bool {
        !self.leaves_bodies.swap(true, Relaxed)
    }

    /// Whether the origin may have one more.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.connections.as_ref().is_none_or(|limit| !limit.is_full())
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        if let Some(limit) = &self.host.connections {
            limit.give_back();
        }
        self.host.open.fetch_sub(1, AcqRel);
        self.budget.connections.give_back();
        // Should it not want the connection any more, the others find out at their next tick.
        let first = self.budget.seats.iter().min_by_key(|seat| seat.since.load(Relaxed));
        if let Some(seat) = first.filter(|seat| seat.since.load(Relaxed) != NOBODY) {
            seat.call.notify_one();
        }
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        self.0.requests.give_back();
    }
}

impl Drop for PendingPermit {
    fn drop(&mut self) {
        self.0.pending.give_back();
        self.0.look_at_gate();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Refuse;

    fn budget(max_connections: usize, per_origin: Option<usize>, workers: usize) -> Arc<Budget> {
        let limits = Limits {
            max_connections,
            max_connections_per_origin: per_origin,
            one_connection_per_origin: false,
            max_pending: 2,
            max_requests: 2,
            refuse: Refuse::Response,
        };
        Arc::new(Budget::new(&limits, RetryLimit::Fixed(3), workers))
    }

    fn origin(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 80))
    }

    #[test]
    fn never_more_than_the_limit_whoever_asks() {
        let budget = budget(10, Some(4), 8);
        let peak = Arc::new(AtomicUsize::new(0));
        let open = Arc::new(AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for worker in 0..8_u8 {
                let (budget, peak, open) = (Arc::clone(&budget), peak.clone(), open.clone());
                scope.spawn(move || {
                    let host = budget.host(origin(worker % 4));
                    for _ in 0..10_000 {
                        let Some(permit) = budget.connect(&host, false) else { continue };
                        let now = open.fetch_add(1, AcqRel) + 1;
                        peak.fetch_max(now, AcqRel);
                        open.fetch_sub(1, AcqRel);
                        drop(permit);
                    }
                });
            }
        });
        assert!(peak.load(Acquire) <= 10);
        assert_eq!(budget.connections.used(), 0, "everything was given back");
    }

    #[test]
    fn origins_have_a_limit_of_their_own_that_all_workers_share() {
        let budget = budget(10, Some(2), 2);
        let [a, again, b] = [origin(1), origin(1), origin(2)].map(|o| budget.host(o));
        let _held = [budget.connect(&a, false), budget.connect(&again, false)];
        assert!(budget.connect(&a, false).is_none() && !budget.has_room(&a));
        assert!(budget.connect(&b, false).is_some());
        assert_eq!(budget.connections.used(), 2, "what was refused is not counted");
    }

    #[test]
    fn an_origin_without_a_connection_may_get_one_over_the_limit() {
        let limits = Limits {
            max_connections: 1,
            max_connections_per_origin: Some(2),
            one_connection_per_origin: true,
            max_pending: 2,
            max_requests: 2,
            refuse: Refuse::Response,
        };
        let budget = Arc::new(Budget::new(&limits, RetryLimit::Fixed(3), 8));
        let [a, b] = [origin(1), origin(2)].map(|o| budget.host(o));
        let first = budget.connect(&a, false);
        assert!(first.is_some() && !budget.has_room(&a) && budget.has_room(&b));
        assert!(budget.connect(&b, true).is_none(), "only for those who wait");
        let second = budget.connect(&b, false);
        assert!(second.is_some() && budget.connect(&b, false).is_none());
        assert_eq!((budget.connections.used(), budget.guaranteed.get()), (2, 1));
        drop(first);
        assert!(!budget.has_room(&b), "the limit counts all of them");
        drop(second);
        assert_eq!(budget.connections.used(), 0);
        // However many ask.
        let _full = budget.connect(&a, false);
        let (budget, open) = (&budget, AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let host = budget.host(origin(2));
                    for _ in 0..1000 {
                        let Some(permit) = budget.connect(&host, false) else { continue };
                        assert_eq!(open.fetch_add(1, AcqRel), 0);
                        open.fetch_sub(1, AcqRel);
                        drop(permit);
                    }
                });
            }
        });
    }

    #[test]
    fn the_last_ones_are_for_those_who_wait() {
        let budget = budget(10, None, 1);
        let host = budget.host(origin(1));
        let early: Vec<_> = std::iter::from_fn(|| budget.connect(&host, true)).collect();
        assert_eq!(early.len(), 8);
        let rest: Vec<_> = std::iter::from_fn(|| budget.connect(&host, false)).collect();
        assert_eq!(rest.len(), 2);
        // Even the smallest budget has one.
        let one = self::budget(1, None, 1);
        assert!(one.connect(&one.host(origin(1)), true).is_some());
    }

    #[test]
    fn requests_and_waiters_are_counted_when_refused() {
        let budget = budget(1, None, 1);
        let _held = [budget.request(), budget.request()];
        assert!(budget.request().is_none());
        assert_eq!(budget.requests.overflow.get(), 1);
        let waiting = [budget.wait(), budget.wait()];
        assert!(budget.wait().is_none());
        drop(waiting);
        assert!(budget.wait().is_some());
        assert_eq!(budget.pending.overflow.get(), 1);
    }

    #[test]
    fn it_is_closed_while_there_is_neither_a_connection_nor_a_place() {
        let budget = budget(1, None, 1);
        let host = budget.host(origin(1));
        let connection = budget.connect(&host, false);
        assert!(!budget.is_closed(), "who comes can wait");
        let waiting = [budget.wait(), budget.wait()];
        assert!(budget.is_closed());
        drop(connection);
        assert!(!budget.is_closed());
        let _again = budget.connect(&host, false);
        assert!(budget.is_closed());
        drop(waiting);
        assert!(!budget.is_closed());
    }

    #[test]
    fn a_promise_is_made_once() {
        let budget = budget(1, None, 3);
        let now = budget.epoch;
        assert!(!budget.promise(0));
        budget.want(1, 2, now);
        assert!(!budget.promise(1), "nobody promises anything to itself");
        assert!(budget.promise(0) && budget.promise(2));
        assert!(!budget.promise(0), "two were wanted");
        budget.want(1, 0, now);
        assert_eq!(budget.hungry.load(Acquire), 0);
    }

    #[test]
    fn who_has_waited_much_longer_goes_first() {
        let budget = budget(1, None, 2);
        let at = |ms: u64| budget.epoch + Duration::from_millis(ms);
        budget.want(1, 1, at(10));
        assert!(!budget.others_go_first(0, at(20)), "about the same");
        assert!(budget.others_go_first(0, at(40)));
        assert!(!budget.others_go_first(1, at(40)), "nobody gives way to itself");
    }
}
