//! Sockets that nobody uses: how they are handed out, and where they go when they come back.

use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::origin::Origin;
use super::stock::{Attached, Attention, Published};
use super::{Lease, Shared, Steered, Use};
use crate::boundary::CloseReason;
use crate::clock;
use crate::net::Queue;
use crate::stats::EvictReason;

impl Shared {
    /// A warm socket of the best origin that has one, known to be clean.
    pub(super) fn take_warm(
        self: &Rc<Self>,
        avoid: Option<SocketAddr>,
        now: Instant,
    ) -> Option<Lease> {
        loop {
            let mut picked = self.pick(avoid, now, |o| o.has_idle() || self.is_cold(o, now))?;
            if !picked.has_idle() {
                // An origin without any socket gets one in the background, so that it takes part
                // again; nobody waits for that while another origin is warm.
                self.dial(&picked, true);
                picked = self.pick(avoid, now, Origin::has_idle)?;
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

    /// An idle watch may not have run yet in this turn of the event loop: look for ourselves.
    fn lease_if_clean(
        self: &Rc<Self>,
        origin: &Rc<Origin>,
        connection: Connection,
    ) -> Option<Lease> {
        let reason = if origin.distrusts(&connection) {
            Some(EvictReason::Exchange(CloseReason::UnreadBody))
        } else {
            self.dirt(connection.stream.peek())
        };
        match reason {
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

    /// Gives a clean, unleased socket to whoever waits the longest, or to the idle list.
    pub(super) fn offer(self: &Rc<Self>, origin: &Rc<Origin>, connection: Connection) {
        let now = clock::now();
        let admitted = if origin.is_leaving() {
            Err(EvictReason::OriginRemoved)
        } else if connection.attached.as_ref().is_some_and(Attached::is_spent) {
            Err(EvictReason::Exchange(CloseReason::IncompleteRequest))
        } else if origin.distrusts(&connection) {
            Err(EvictReason::Exchange(CloseReason::UnreadBody))
        } else {
            origin.idle.borrow().admits(&connection.life, now)
        };
        if let Err(reason) = admitted {
            origin.close(connection, reason);
            return self.dial_for_waiters(None, now);
        }
        if self.gives_way(now) {
            return origin.close(connection, EvictReason::MadeRoom);
        }
        if !self.waiters.borrow().is_empty() {
            match self.lease_if_clean(origin, connection) {
                Some(lease) => self.hand_over(lease),
                None => self.dial_for_waiters(None, now),
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
    pub(super) fn leave_idle_to_kernel(&self, origin: &Origin, now: Instant) {
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
        // The kernel would neither know of the one nor see the other.
        let may_be_steered = !connection.rewritten && !origin.host.leaves_bodies();
        let wanted = may_be_steered && stock.is_wanted(now);
        let back = if wanted && stock.held() < self.config.max_idle {
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
            // What came may be gone: the programs drop it.
            let reason = self.dirt(connection.stream.peek()).unwrap_or(EvictReason::IdleBytes);
            origin.close(connection, reason);
        }
        origin.publish();
        None
    }

    /// Deals with a socket that the kernel is done with.
    pub(super) fn attend(
        self: &Rc<Self>,
        origin: &Rc<Origin>,
        attention: Attention,
    ) -> Option<Steered> {
        match attention {
            Attention::None => None,
            Attention::Back(connection) => {
                self.offer(origin, connection);
                None
            }
            Attention::TakeOver(connection, exchange) => {
                let (pool, origin) = (Rc::clone(self), Rc::clone(origin));
                let lease = Lease::taken_over(pool, origin, connection, exchange.sent);
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

    /// Something happened on idle sockets.
    pub(super) fn look_at_idle(&self) {
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
