//! One origin's sockets, and which origins a pool has.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::Common;
use super::backoff::Backoff;
use super::budget::Host;
use super::connection::Connection;
use super::idle::{IdleList, Limits};
use super::ready::Ready;
use super::stock::{Steer, Stock};
use crate::boundary::CloseReason;
use crate::clock;
use crate::config::PoolConfig;
use crate::origin::{Chosen, outlier};
use crate::stats::{EvictReason, OriginMetrics, ServiceRecords};

const HUNDRED: NonZeroU32 = NonZeroU32::new(100).unwrap();

/// What comes unasked later than this after a request with a body has to do with something else, such as
/// an idle connection that the origin ends with a 408.
const BODY_ANSWERED_WITHIN: Duration = Duration::from_secs(1);

/// One origin of a pool.
pub(super) struct Origin {
    /// Its number within the pool, for as long as it has sockets there.
    pub(super) place: usize,
    pub(super) address: SocketAddr,
    pub(super) weight: Cell<NonZeroU32>,
    pub(super) metrics: Arc<OriginMetrics>,
    pub(super) idle: RefCell<IdleList<Connection>>,
    /// How many idle ones there should be.
    pub(super) ready: Cell<Ready>,
    /// Sockets that are left to the kernel, if any can be.
    pub(super) stock: Option<Stock>,
    /// The kernel must leave idle sockets to those who wait.
    pub(super) reserved: Cell<bool>,
    /// It gets no new exchanges; those that are under way are finished.
    leaving: Cell<bool>,
    /// Idle and leased sockets, and those left to the kernel.
    pub(super) open: Cell<usize>,
    /// Handshakes under way; `slow` of them for longer than `SLOW_DIAL`.
    pub(super) dialling: Cell<usize>,
    pub(super) slow: Cell<usize>,
    pub(super) backoff: RefCell<Backoff>,
    /// Connections of all workers to it.
    pub(super) host: Arc<Host>,
    /// What is known of how it behaves, if anybody looks.
    pub(super) watched: Option<Arc<outlier::Host>>,
    /// How often it had been ejected when that was last looked at.
    ejections: Cell<u32>,
    /// Whether the kernel may begin exchanges there, as far as ejections go.
    available: Cell<bool>,
    /// Tells those who wait for a response that it has been ejected for being silent.
    pub(super) silenced: Notify,
}

impl Origin {
    /// Sockets with an exchange under way, in the kernel or in the daemon.
    pub(super) fn active(&self) -> usize {
        let stock = self.stock.as_ref().map_or(0, Stock::idle);
        (self.open.get() - self.idle.borrow().len()).saturating_sub(stock)
    }

    pub(super) fn has_idle(&self) -> bool {
        !self.idle.borrow().is_empty() || self.stock.as_ref().is_some_and(|s| s.idle() > 0)
    }

    pub(super) fn add_dialling(&self, n: isize) {
        self.dialling.set(self.dialling.get().saturating_add_signed(n));
        self.metrics.dialling.set(self.dialling.get());
    }

    pub(super) fn publish(&self) {
        let idle = self.idle.borrow().len();
        let (shared, held) = self.stock.as_ref().map_or((0, 0), |s| (s.idle(), s.held()));
        self.metrics.idle.set(idle + shared);
        self.metrics.active.set(self.active());
        if let Some(stock) = &self.stock {
            let leased = (self.open.get() - idle).saturating_sub(held);
            let eligible = !self.reserved.get() && !self.leaving.get() && self.available.get();
            stock.set_load(leased + self.dialling.get(), eligible);
        }
    }

    /// Somebody has to wait for a handshake.
    pub(super) fn missed(&self) {
        let mut ready = self.ready.get();
        ready.missed();
        self.ready.set(ready);
    }

    pub(super) fn sweep(&self, now: Instant) {
        loop {
            let expired = self.idle.borrow_mut().take_expired(now);
            let Some((connection, reason)) = expired else { return };
            self.close(connection, reason);
        }
    }

    pub(super) fn close(&self, connection: Connection, reason: EvictReason) {
        self.suspect(&connection, reason);
        let idle_since = connection.idle_since;
        // Whoever gets its place could otherwise come to the origin before the end of this one. What is
        // cut off must not look like an end, though, and at the end of the daemon nobody comes.
        let stream = &connection.stream;
        if reason == EvictReason::Drain || stream.aborts_on_close() || stream.peer_ended() {
            drop(connection);
        } else {
            tokio::task::spawn_local(connection.drain());
        }
        self.open.set(self.open.get() - 1);
        if matches!(reason, EvictReason::IdleClosed | EvictReason::IdleTtl)
            && let Some(since) = idle_since
        {
            let mut ready = self.ready.get();
            ready.ended_idle(clock::now().duration_since(since), self.open.get());
            self.ready.set(ready);
        }
        self.metrics.evict(reason);
        self.publish();
    }

    /// A response that comes unasked soon after a request with a body may be the answer to that body: there are
    /// origins that do not read it and take it for the next request, such as a handler that forgets to.
    /// Whoever asked next could get what the body's author wants.
    fn suspect(&self, connection: &Connection, reason: EvictReason) {
        let soon =
            |taken: Instant| clock::now().saturating_duration_since(taken) < BODY_ANSWERED_WITHIN;
        let unasked = match reason {
            // What comes to a slot is dropped by the program that sees it.
            EvictReason::IdleBytes => {
                connection.attached.is_some() || connection.stream.begins_with(b"HTTP/")
            }
            // It came with, or for, the answer to the next request.
            EvictReason::Exchange(CloseReason::Unsolicited) => true,
            _ => false,
        };
        if unasked && connection.body_taken.is_some_and(soon) && self.host.has_left_body() {
            tracing::warn!(
                origin = %self.address,
                "the origin seems to answer a request's body as if it were a request: from now on its \
                 connections are closed after requests that have one"
            );
        }
    }

    /// Whether what comes on a connection may be the answer to a body that somebody else has sent.
    pub(super) fn distrusts(&self, connection: &Connection) -> bool {
        connection.body_taken.is_some() && self.host.leaves_bodies()
    }

    pub(super) fn count_failed_dial(&self, error: &io::Error) {
        match error.kind() {
            io::ErrorKind::ConnectionRefused => &self.metrics.dial_refused,
            io::ErrorKind::TimedOut => &self.metrics.dial_timed_out,
            _ => &self.metrics.dial_failed,
        }
        .inc();
    }

    /// Takes an idle connection, of the kernel's if there is no other.
    pub(super) fn take_idle(&self) -> Option<Connection> {
        let idle = self.idle.borrow_mut().take_oldest();
        idle.or_else(|| self.stock.as_ref()?.take())
    }

    /// Whether it gets no new exchanges.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.get()
    }

    /// Closes the idle sockets, the kernel's too.
    pub(super) fn close_idle(&self, reason: EvictReason) {
        let idle = self.idle.borrow_mut().remove_if(|_| true);
        let stock = self.stock.as_ref().map(Stock::take_all).unwrap_or_default();
        for connection in idle.into_iter().chain(stock) {
            self.close(connection, reason);
        }
    }

    /// Whether it may get exchanges, as far as ejections go.
    pub(super) fn is_available(&self, now: Instant) -> bool {
        self.watched.as_ref().is_none_or(|host| host.is_available(now))
    }

    /// Whether it has been ejected because it owes responses and gives none.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        self.watched.as_ref().is_some_and(|host| host.is_silent(now))
    }

    /// Its weight; less while it is slower than the others.
    pub(super) fn share(&self) -> NonZeroU32 {
        let weight = self.weight.get();
        let Some(share) = self.watched.as_ref().map(|host| host.share()).filter(|&s| s < 100)
        else {
            return weight.saturating_mul(HUNDRED);
        };
        NonZeroU32::new(weight.get().saturating_mul(share.into())).unwrap_or(NonZeroU32::MIN)
    }

    /// Follows an ejection, or the end of one.
    pub(super) fn look_at_ejection(&self, now: Instant, panic: bool) {
        let Some(host) = &self.watched else { return };
        if self.ejections.replace(host.ejections()) != host.ejections() {
            self.close_idle(EvictReason::Ejected);
            if host.is_silent(now) {
                self.silenced.notify_waiters();
            }
        }
        let available = panic || host.is_available(now);
        if self.available.replace(available) != available {
            self.publish();
        }
    }

    fn set_leaving(&self, leaving: bool) {
        self.leaving.set(leaving);
        self.publish();
    }

    fn set_weight(&self, weight: NonZeroU32) {
        self.weight.set(weight);
        if let Some(stock) = &self.stock {
            stock.set_weight(weight);
        }
    }
}

/// The origins of a pool: those that get exchanges, and those that are leaving.
pub(super) struct Origins {
    /// By place. A place is free again once its origin has no sockets left.
    places: Vec<Option<Rc<Origin>>>,
    current: Rc<[Rc<Origin>]>,
    limits: Limits,
    prewarm: usize,
    backoff: Backoff,
    common: Common,
    records: Arc<ServiceRecords>,
    steer: Option<Steer>,
}

impl Origins {
    pub(super) fn new(
        config: &PoolConfig,
        common: &Common,
        records: Arc<ServiceRecords>,
        steer: Option<Steer>,
    ) -> Self {
        Self {
            places: Vec::new(),
            current: Rc::default(),
            limits: Limits {
                max_idle: config.max_idle,
                idle_ttl: config.idle_ttl,
                max_requests: config.max_requests,
            },
            prewarm: config.prewarm,
            backoff: Backoff::new(config.backoff_base, config.backoff_max),
            common: common.clone(),
            records,
            steer,
        }
    }

    /// Those that get exchanges.
    pub(super) fn current(&self) -> Rc<[Rc<Origin>]> {
        Rc::clone(&self.current)
    }

    /// Those that are leaving as well.
    pub(super) fn all(&self) -> Vec<Rc<Origin>> {
        self.places.iter().flatten().cloned().collect()
    }

    /// The origin at a place.
    pub(super) fn at(&self, place: usize) -> Option<Rc<Origin>> {
        self.places.get(place)?.clone()
    }

    /// Puts these in the place of the current ones; gives back those that leave.
    pub(super) fn replace(&mut self, origins: &[Chosen]) -> Vec<Rc<Origin>> {
        self.forget_those_that_left();
        let mut by_address: std::collections::HashMap<_, _> =
            self.all().into_iter().map(|origin| (origin.address, origin)).collect();
        let mut current = Vec::with_capacity(origins.len());
        let mut vacant = 0;
        for chosen in origins {
            let origin = by_address.remove(&chosen.address).unwrap_or_else(|| {
                let origin = self.add(chosen.address, vacant);
                vacant = origin.place + 1;
                origin
            });
            origin.set_weight(chosen.weight);
            origin.set_leaving(false);
            current.push(origin);
        }
        self.current = current.into();
        self.tell_span();
        let left: Vec<_> = by_address.into_values().collect();
        for origin in &left {
            origin.set_leaving(true);
        }
        left
    }

    /// Adds an origin at the first vacant place, which is not before `from`.
    fn add(&mut self, address: SocketAddr, from: usize) -> Rc<Origin> {
        let vacant = self.places.iter().skip(from).position(Option::is_none);
        let place = vacant.map_or(self.places.len(), |vacant| from + vacant);
        if place == self.places.len() {
            self.places.push(None);
        }
        let metrics = self.records.origin(address);
        let stock = self.steer.as_ref().and_then(|steer| Stock::new(steer, place));
        // Another origin may have been in this place.
        if let Some(stock) = &stock {
            stock.set_wanted(false);
        }
        metrics.set_group(stock.as_ref().map(Stock::group));
        let watched = self.common.watch.as_ref().and_then(|watch| watch.host(address));
        if let (Some(watch), Some(stock)) = (&self.common.watch, &stock) {
            watch.carries(address, stock.steering(), stock.group());
        }
        let origin = Rc::new(Origin {
            place,
            address,
            weight: Cell::new(NonZeroU32::MIN),
            metrics,
            idle: RefCell::new(IdleList::new(self.limits)),
            ready: Cell::new(Ready::new(self.prewarm)),
            stock,
            reserved: Cell::new(false),
            leaving: Cell::new(false),
            open: Cell::new(0),
            dialling: Cell::new(0),
            slow: Cell::new(0),
            backoff: RefCell::new(self.backoff.clone()),
            host: self.common.budget.host(address),
            ejections: Cell::new(watched.as_ref().map_or(0, |host| host.ejections())),
            watched,
            available: Cell::new(true),
            silenced: Notify::new(),
        });
        self.places[place] = Some(Rc::clone(&origin));
        origin
    }

    /// Forgets those that are leaving and have no sockets left.
    pub(super) fn forget_those_that_left(&mut self) {
        for place in &mut self.places {
            let gone = |o: &mut Rc<Origin>| {
                o.leaving.get()
                    && o.open.get() == 0
                    && o.dialling.get() == 0
                    // Connections that are being ended have their places there until then.
                    && o.stock.as_ref().is_none_or(Stock::is_vacant)
            };
            let Some(origin) = place.take_if(gone) else { continue };
            if let Some(stock) = &origin.stock {
                if let Some(watch) = &self.common.watch {
                    watch.carries_no_more(origin.address, stock.group());
                }
                self.records.moving(|| {
                    origin.metrics.set_group(None);
                    self.records.keep_carried(&origin.metrics, &stock.take_carried());
                });
            }
            self.records.forget(origin.address);
        }
        while self.places.last().is_some_and(Option::is_none) {
            self.places.pop();
        }
        self.tell_span();
    }

    /// How many requests the kernel had no idle socket for.
    pub(super) fn missed(&self) -> u64 {
        self.steer.as_ref().map_or(0, Steer::missed)
    }

    /// The kernel looks at no places behind the last one that is taken.
    fn tell_span(&self) {
        if let Some(steer) = &self.steer {
            steer.set_span(self.places.len());
        }
    }
}
