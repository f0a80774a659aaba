//! A checked-out origin socket.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::budget::{Budget, RequestPermit, RetryPermit};
use super::connection::Connection;
use super::origin::Origin;
use crate::boundary::{CloseReason, Verdict};
use crate::clock;
use crate::net::{Queue, Stream};
use crate::origin::outlier::{self, Outcome, Owing};
use crate::stats::EvictReason;

/// An origin socket that serves one exchange, or one client.
///
/// It must be [settled](Lease::settle). Dropped instead, the socket is closed, unless nothing was
/// ever done with it.
pub struct Lease {
    pool: Rc<Shared>,
    origin: Rc<Origin>,
    /// `None` once settled.
    connection: Option<Connection>,
    touched: bool,
    request: Option<RequestPermit>,
    /// Set if the exchange is being tried again.
    retry: Option<RetryPermit>,
    /// When the request was sent, if it was before there was a lease.
    sent: Option<Instant>,
}

impl Lease {
    pub(super) fn new(pool: Rc<Shared>, origin: Rc<Origin>, connection: Connection) -> Self {
        origin.publish();
        let connection = Some(connection);
        Self { pool, origin, connection, touched: false, request: None, retry: None, sent: None }
    }

    /// A lease in the middle of an exchange that the kernel has begun.
    pub(super) fn taken_over(
        pool: Rc<Shared>,
        origin: Rc<Origin>,
        connection: Connection,
        sent: Instant,
    ) -> Self {
        origin.publish();
        let request = Some(pool.budget.adopt_request());
        let (connection, sent) = (Some(connection), Some(sent));
        Self { pool, origin, connection, touched: true, request, retry: None, sent }
    }

    /// Counts the exchange that it is for. `false` if there are too many.
    pub(super) fn count_request(&mut self, budget: &Arc<Budget>) -> bool {
        self.request = budget.request();
        self.request.is_some()
    }

    pub(super) fn set_retry(&mut self, retry: Option<RetryPermit>) {
        self.retry = retry;
    }

    /// The permit of an exchange that is being tried again. Dropping it says that this is over.
    #[must_use]
    pub fn take_retry(&mut self) -> Option<RetryPermit> {
        self.retry.take()
    }

    /// Where to tell what comes of the exchange. To be asked for before its request is sent.
    #[must_use]
    pub fn conduct(&mut self) -> Conduct {
        let sent = self.sent.take().unwrap_or_else(clock::now);
        Conduct { pool: Rc::clone(&self.pool), origin: Rc::clone(&self.origin), sent }
    }

    /// The socket, for use: from now on only [`Lease::settle`] can bring it back to the pool.
    ///
    /// # Panics
    /// Never: only `settle` and `drop` take the socket out.
    pub fn stream(&mut self) -> &Stream {
        let connection = self.connection.as_ref().expect("not settled yet");
        if !self.touched {
            self.touched = true;
            if connection.life.exchanges > 0 {
                self.origin.metrics.reused.inc();
            }
        }
        &connection.stream
    }

    /// The origin's address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.origin.address
    }

    /// Whether it has served an exchange before this one.
    #[must_use]
    pub fn is_reused(&self) -> bool {
        self.connection.as_ref().is_some_and(|c| c.life.exchanges > 0)
    }

    /// Whether a new exchange may begin on a socket that stayed with its client, or waited for it,
    /// in between.
    #[must_use]
    pub fn may_begin(&self) -> bool {
        !self.origin.is_leaving() && self.is_silent()
    }

    /// Whether nothing has come on the socket.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.connection.as_ref().is_some_and(|c| c.stream.peek() == Queue::Empty)
    }

    /// Whether bytes have come on the socket, and not only its end.
    pub(super) fn has_bytes(&self) -> bool {
        self.connection.as_ref().is_some_and(|c| c.stream.peek() == Queue::Bytes)
    }

    /// Counts an exchange that ended at a clean boundary while the socket stays leased.
    pub fn exchange_ended(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.life.exchanges += 1;
        }
    }

    /// The origin has taken a request that has a body. What it sends unasked from here on may tell what it
    /// has made of that.
    pub fn has_taken_body(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.body_taken = Some(clock::now());
        }
    }

    /// Counts an exchange that failed here before the response began and is repeated elsewhere.
    pub fn count_repeat(&self) {
        self.origin.metrics.retried.inc();
    }

    /// Ends the lease. `origin_idle` is what the origin said about how long it keeps idle
    /// connections.
    pub fn settle(mut self, verdict: Verdict, origin_idle: Option<Duration>) {
        let Some(mut connection) = self.connection.take() else { return };
        self.request = None;
        match verdict {
            Verdict::Return => {
                connection.life.exchanges += 1;
                if origin_idle.is_some() {
                    connection.life.origin_idle = origin_idle;
                }
                self.origin.metrics.returned.inc();
                self.pool.offer(&self.origin, connection);
            }
            Verdict::Close(reason) => self.close(connection, reason),
        }
    }

    fn close(&self, connection: Connection, reason: CloseReason) {
        self.origin.close(connection, EvictReason::Exchange(reason));
        // There is room for another socket now.
        self.pool.dial_for_waiters(None, clock::now());
    }
}

/// Where a session tells what came of an exchange with an origin.
pub struct Conduct {
    pool: Rc<Shared>,
    origin: Rc<Origin>,
    /// No later than the request.
    sent: Instant,
}

impl Conduct {
    /// A request has been sent. Keep this until the response begins.
    #[must_use]
    pub fn owe(&self) -> Option<Owing> {
        Some(self.origin.watched.as_ref()?.owe())
    }

    /// The head of a response has come. Answers whether the origin is ejected for those before, and this
    /// is one more reason for it: whoever can had better ask another one.
    #[must_use]
    pub fn responded(&self, status: u16) -> bool {
        if status >= 500 {
            self.origin.metrics.responses_5xx.inc();
        }
        let late = self.pool.record(&self.origin, Outcome::Response(status), self.sent);
        status >= 500 && late && !self.pool.panics()
    }

    /// There was no response.
    pub fn failed(&self, failure: outlier::Failure) {
        self.pool.record(&self.origin, Outcome::Failed(failure), self.sent);
    }

    /// Waits until the origin is ejected because it owes responses and gives none, while another one
    /// could be asked: for as long as it takes, which may be for ever.
    pub async fn silenced(&self) {
        loop {
            // Before the look, so that nothing is missed.
            let told = self.origin.silenced.notified();
            if self.origin.is_silent(clock::now()) && !self.pool.panics() && self.has_others() {
                return;
            }
            told.await;
        }
    }

    /// Whether another origin could be asked.
    #[must_use]
    pub fn has_others(&self) -> bool {
        let (now, address) = (clock::now(), self.origin.address);
        self.pool.current().iter().any(|o| o.address != address && o.is_available(now))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        if self.touched {
            self.close(connection, CloseReason::ClientGone);
        } else {
            self.pool.offer(&self.origin, connection);
        }
    }
}
