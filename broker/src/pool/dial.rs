//! When connections are opened: for those who wait, to be ready for the next, and for the kernel.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rand::RngExt;

use super::connection::Connection;
use super::idle::Life;
use super::origin::Origin;
use super::{Refusal, Shared, Use};
use crate::clock;
use crate::net;
use crate::origin::outlier::{self, Outcome};
use crate::stats::EvictReason;

/// A dial that takes longer than this no longer counts as help on its way: another one is started
/// elsewhere for whoever waits (as happy eyeballs do, RFC 8305 §5).
const SLOW_DIAL: Duration = Duration::from_millis(250);

/// So many requests that the kernel had no socket for, between two ticks, are worth another socket.
const MISSES: u64 = 4;

/// Most sockets that are opened for them in one tick.
const FEED_MAX: usize = 8;

impl Shared {
    pub(super) fn may_dial(&self, origin: &Origin, now: Instant) -> bool {
        let backoff = origin.backoff.borrow();
        // One probe at a time for an origin that last failed.
        let dials_max = if backoff.is_failing() { 1 } else { self.config.max_dials };
        backoff.permits(now) && origin.dialling.get() < dials_max
    }

    pub(super) fn can_dial(&self, origin: &Origin, now: Instant) -> bool {
        self.may_dial(origin, now) && self.budget.has_room(&origin.host)
    }

    pub(super) fn is_cold(&self, origin: &Origin, now: Instant) -> bool {
        origin.open.get() == 0 && origin.dialling.get() == 0 && self.can_dial(origin, now)
    }

    /// Dials that may still help soon.
    fn fresh_dials(&self) -> usize {
        self.current().iter().map(|o| o.dialling.get() - o.slow.get()).sum()
    }

    pub(super) fn missing(&self, origin: &Origin) -> usize {
        let have = match self.usage {
            Use::Reused => origin.open.get(),
            Use::Once => origin.idle.borrow().len(),
        };
        origin.ready.get().wanted().saturating_sub(have + origin.dialling.get())
    }

    /// Starts a dial for each waiter that has no hope yet.
    pub(super) fn dial_for_waiters(self: &Rc<Self>, avoid: Option<SocketAddr>, now: Instant) {
        self.serve_from_stock(now);
        let avoid = avoid.or_else(|| self.first_avoids());
        while self.fresh_dials() < self.impatient(now) {
            let room = self.pick(avoid, now, |o| self.can_dial(o, now));
            let Some(origin) = room.or_else(|| self.pick(avoid, now, |o| self.may_dial(o, now)))
            else {
                break;
            };
            if !self.dial(&origin, false) && !self.make_room() {
                break;
            }
        }
        self.want(now);
    }

    /// Closes an idle connection that those who wait cannot use, so that another can be opened.
    fn make_room(&self) -> bool {
        let Some((connection, origin)) = self.take_idle() else { return false };
        origin.close(connection, EvictReason::MadeRoom);
        true
    }

    /// Takes an idle connection whose end makes room for another one.
    pub(super) fn take_idle(&self) -> Option<(Connection, Rc<Origin>)> {
        let any = self.budget.connections.is_full();
        let origins = self.current();
        let mut in_the_way = origins.iter().filter(|origin| any || !origin.host.has_room());
        in_the_way.find_map(|origin| Some((origin.take_idle()?, Rc::clone(origin))))
    }

    pub(super) fn prewarm(self: &Rc<Self>, now: Instant) {
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
            && let Some(origin) =
                self.pick(None, now, |o| self.can_dial(o, now) && o.is_available(now))
            && pace.permits(self.config.prewarm_rate, now)
            && self.dial(&origin, true)
        {}
        self.pace.set(pace);
    }

    /// The kernel keeps asking for more sockets than there are. Its requests come to the daemon then,
    /// which costs about as much as a handshake, and rarely waits long enough to dial. A single burst
    /// is not answered with as many handshakes, but while it goes on, twice as many sockets are opened
    /// each time.
    pub(super) fn feed_kernel(self: &Rc<Self>, now: Instant) {
        let missed = self.origins.borrow().missed();
        if missed.wrapping_sub(self.missed.replace(missed)) < MISSES {
            return self.feed.set(1);
        }
        let mut pace = self.pace.get();
        for _ in 0..self.feed.get() {
            let origin = self.pick(None, now, |o| {
                o.open.get() + o.dialling.get() < self.config.max_idle && self.can_dial(o, now)
            });
            let Some(origin) = origin else { break };
            if !pace.permits(self.config.prewarm_rate, now) || !self.dial(&origin, true) {
                break;
            }
        }
        self.pace.set(pace);
        self.feed.set(FEED_MAX.min(2 * self.feed.get()));
    }

    /// Starts a dial. `early` means that nobody waits for it. `false` if the limits of connections
    /// are reached.
    pub(super) fn dial(self: &Rc<Self>, origin: &Rc<Origin>, early: bool) -> bool {
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
                &shared.environment.listening,
            ));
            let result = if let Ok(result) = tokio::time::timeout(SLOW_DIAL, &mut dial).await {
                result
            } else {
                origin.slow.set(origin.slow.get() + 1);
                shared.dial_for_waiters(Some(origin.address), clock::now());
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
                        shared.record(&origin, Outcome::Accepted, started);
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
                    let place = (&*origin, shared.id());
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
        self.record(origin, Outcome::Failed(outlier::Failure::Connect), started);
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
        self.dial_for_waiters(Some(origin.address), now);
        let hope = self.current().iter().any(|o| o.dialling.get() > 0 || o.active() > 0);
        if !hope {
            // Every origin has had its chance. The next clients may try again after the back-off.
            self.refuse_waiters(Refusal::Unreachable);
        }
    }
}

/// How fast sockets are opened that nobody waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pace {
    /// At once: nobody is served before the pool is warm.
    Free,
    /// [`crate::config::PoolConfig::prewarm_rate`]; up to one second's worth is saved up.
    Limited {
        /// When one more may be opened.
        next: Instant,
    },
}

impl Pace {
    pub(super) fn limited(self, now: Instant) -> Self {
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
