//! Those who wait for a socket: first come first served, with a dial started for each who has waited
//! for long enough, and what the kernel and other workers have to give up for them.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::budget::{GIVE_WAY_AFTER, PendingPermit, RetryPermit};
use super::origin::Origin;
use super::{Lease, Refusal, Shared};
use crate::clock;
use crate::config::retries::Condition;
use crate::stats::EvictReason;

/// How long an exchange waits for a leased socket to come back before one is dialled for it. Most
/// leases last about this long; dialling at once would open a socket for every ripple of the load.
const DIAL_AFTER: Duration = Duration::from_millis(2);

/// A worker that has connections asks others for theirs only if its exchanges wait so much longer
/// than those of a worker that has none: it may just not have had the processor for a while.
const SHARE_AFTER: Duration = Duration::from_millis(250);

/// Whoever waits.
pub(super) struct Waiter {
    id: u64,
    _pending: PendingPermit,
    since: Instant,
    /// The origin that has just failed its exchange.
    avoid: Option<SocketAddr>,
    /// Held if this is not its first attempt.
    retry: Option<RetryPermit>,
    hand_over: oneshot::Sender<Result<Lease, Refusal>>,
}

/// A place in the queue; dropping it gives it up.
pub(super) struct Place {
    shared: Rc<Shared>,
    id: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiters = self.shared.waiters.borrow_mut();
        waiters.retain(|waiter| waiter.id != self.id);
        self.shared.metrics.waiting.set(waiters.len());
        drop(waiters);
        let now = clock::now();
        self.shared.reserve(now);
        self.shared.want(now);
    }
}

/// What becomes of a waiter.
type HandedOver = oneshot::Receiver<Result<Lease, Refusal>>;

impl Shared {
    pub(super) fn enqueue(
        self: &Rc<Self>,
        avoid: Option<SocketAddr>,
        retry: Option<RetryPermit>,
        now: Instant,
    ) -> Result<(Place, HandedOver), Refusal> {
        let Some(pending) = self.budget.wait() else {
            self.metrics.queue_overflow.inc();
            return Err(Refusal::QueueFull);
        };
        let mut waiters = self.waiters.borrow_mut();
        let id = self.id();
        let (hand_over, handed_over) = oneshot::channel();
        waiters.push_back(Waiter { id, _pending: pending, since: now, avoid, retry, hand_over });
        self.metrics.waiting.set(waiters.len());
        Ok((Place { shared: Rc::clone(self), id }, handed_over))
    }

    /// The origin that has just failed whoever waits the longest.
    pub(super) fn first_avoids(&self) -> Option<SocketAddr> {
        self.waiters.borrow().front()?.avoid
    }

    /// Whether an exchange should wait for another origin, because only the one that has just failed it
    /// has warm sockets. An origin that dies takes its sockets along one by one: those that still look
    /// well would use up all attempts.
    pub(super) fn awaits_another(&self, failed: Option<SocketAddr>, now: Instant) -> bool {
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

    /// Sockets that the kernel has finished with come back to nobody by themselves.
    pub(super) fn serve_from_stock(self: &Rc<Self>, now: Instant) {
        while !self.waiters.borrow().is_empty()
            && self.current().iter().any(|o| o.stock.as_ref().is_some_and(|s| s.idle() > 0))
            && let avoid = self.first_avoids()
            && !self.awaits_another(avoid, now)
            && let Some(lease) = self.take_warm(avoid, now)
        {
            self.hand_over(lease);
        }
    }

    /// Waiters for whom no leased socket has come back in time; all of them if none is leased. For
    /// the others, a look later is arranged.
    pub(super) fn impatient(self: &Rc<Self>, now: Instant) -> usize {
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
                pool.dial_for_waiters(None, clock::now());
            });
        }
        patient_from
    }

    /// Hands a lease to the first waiter that still wants it; without one it goes idle.
    pub(super) fn hand_over(self: &Rc<Self>, mut lease: Lease) {
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

    /// A dial that began then has failed, and with it one attempt of one exchange: of the one that
    /// has waited the longest and is not being tried again already. It goes on waiting, for
    /// whatever comes next, if it may.
    ///
    /// A connection that could not be made is none of an exchange's `retries.attempts`: an origin that
    /// cannot be reached is dialled once in each back-off, however many wait.
    pub(super) fn retry_first_waiter(&self, started: Instant, now: Instant) {
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

    pub(super) fn refuse_waiters(&self, refusal: Refusal) {
        for waiter in self.waiters.take() {
            self.metrics.unreachable.inc();
            waiter.hand_over.send(Err(refusal)).ok();
        }
        self.metrics.waiting.set(0);
    }

    /// Sockets that the kernel has finished with are for those who wait; and if these cannot be helped
    /// by a dial, they come before whoever the kernel would serve next, too.
    pub(super) fn reserve(&self, now: Instant) {
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

    /// Says how many connections the others have to give up for those who wait here.
    pub(super) fn want(self: &Rc<Self>, now: Instant) {
        let waiters = self.waiters.borrow();
        let dialling: usize = self.current().iter().map(|o| o.dialling.get()).sum();
        let mut since = waiters.front().map_or(now, |first| first.since);
        // Whose origins cannot be dialled now is not helped by what others give up.
        let origins = self.current();
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
                pool.dial_for_waiters(None, clock::now());
            });
        }
    }

    /// Others have given up connections, or want some.
    pub(super) fn look_at_budget(self: &Rc<Self>) {
        let now = clock::now();
        self.look_at_ejections(now);
        while self.waiters.borrow().is_empty()
            && self.budget.others_go_first(self.environment.worker, now)
            && let Some((connection, origin)) = self.take_idle()
        {
            if !self.budget.promise(self.environment.worker) {
                self.offer(&origin, connection);
                break;
            }
            origin.close(connection, EvictReason::MadeRoom);
        }
        self.dial_for_waiters(None, now);
    }

    /// Whether a connection that comes back is to be given up for another worker's exchanges.
    pub(super) fn gives_way(&self, now: Instant) -> bool {
        let worker = self.environment.worker;
        let ours = self.waiters.borrow().front().map_or(now, |first| first.since);
        self.budget.others_go_first(worker, ours) && self.budget.promise(worker)
    }
}
