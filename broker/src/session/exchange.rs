//! One http1 exchange: lease, request, response, boundary.

mod attempt;
mod retry;

use std::cell::Cell;
use std::net::SocketAddr;
use std::time::Duration;

use self::attempt::{Attempt, Begun, Judge, RESPONSE_BEGINS, Request};
use self::retry::{Again, Failed};
use super::refusal::Failure;
use super::steered::Steered;
use super::{Context, NoLease, checkout};
use crate::boundary::http1::{Exchange, Method, RequestHead, RequestReader, RequestStep};
use crate::boundary::{CloseReason, Verdict};
use crate::buffers::Inbox;
use crate::config::Affinity;
use crate::config::retries::Condition;
use crate::net::Stream;
use crate::pool::budget::RetryPermit;
use crate::pool::{Lease, Pool, Refusal, TakenOver};
use crate::relay::{Tunnel, TunnelEnd};

/// How long a tunnel may be silent that nobody will end: its client has asked for the end, the
/// origin was asked to go on, and where the response ends is not certain.
const SILENCE: Duration = Duration::from_secs(1);

/// What happens to the client's connection now.
pub(super) enum After {
    /// It carries the next request.
    NextRequest,
    /// It ends, with nothing left unread.
    Close,
    /// It ends, but the client may still be sending.
    Linger,
    /// It ends with a RST, because what the client has is not a complete response.
    Abort,
}

/// An origin socket that stays with the client between exchanges.
#[derive(Default)]
pub(super) struct Kept {
    lease: Option<Lease>,
    /// Authentication has tied it to this client: nobody else may ever have it.
    tied: bool,
}

impl Kept {
    /// Whether the client needs no socket of its own.
    pub(super) fn is_empty(&self) -> bool {
        self.lease.is_none() && !self.tied
    }

    /// The client's connection is over.
    pub(super) fn end(self) {
        if let Some(lease) = self.lease {
            let verdict = if self.tied {
                Verdict::Close(CloseReason::ConnectionAuth)
            } else {
                Verdict::Return
            };
            lease.settle(verdict, None);
        }
    }
}

/// The parts of a session that its exchanges work with.
#[derive(Clone, Copy)]
pub(super) struct Exchanging<'a> {
    pub(super) context: &'a Context,
    pub(super) pool: &'a Pool,
    pub(super) client: &'a Stream,
    pub(super) affinity: Affinity,
    /// Set if the kernel serves the client, too.
    pub(super) steered: Option<&'a Steered>,
}

impl Exchanging<'_> {
    /// Goes on with an exchange that the kernel has begun: the request is sent, and nothing of the
    /// response has come to the client.
    pub(super) async fn take_over(
        self,
        lease: Lease,
        exchange: &TakenOver,
        kept: &mut Kept,
    ) -> After {
        let mut inbox = Inbox::new(&self.context.buffers);
        inbox.fill(&exchange.request);
        let begun = if exchange.strayed { Begun::Strayed } else { Begun::Sent };
        match RequestReader::default().read(inbox.bytes()) {
            RequestStep::Head(head) => {
                self.go_on(&mut inbox, &head, kept, Some((lease, begun))).await
            }
            // Cannot be: the kernel sends only what this reader reads.
            RequestStep::Incomplete | RequestStep::Tunnel(_) => {
                lease.settle(Verdict::Close(CloseReason::AmbiguousRequest), None);
                After::Abort
            }
        }
    }

    /// Runs the exchange whose request is at the start of the inbox.
    pub(super) async fn run(self, inbox: &mut Inbox, head: &RequestHead, kept: &mut Kept) -> After {
        self.go_on(inbox, head, kept, None).await
    }

    /// Runs an exchange that the kernel may have begun.
    async fn go_on(
        self,
        inbox: &mut Inbox,
        head: &RequestHead,
        kept: &mut Kept,
        mut begun: Option<(Lease, Begun)>,
    ) -> After {
        let mut failed_at: Option<SocketAddr> = None;
        let retry = Cell::new(None);
        let mut retries_left = self.context.retries.attempts - 1;
        loop {
            let lease = match begun.take() {
                Some(begun) => Ok(begun),
                None => self.lease(kept, failed_at, &retry).await.map(|lease| (lease, Begun::No)),
            };
            let (mut lease, begun) = match lease {
                Ok(lease) => lease,
                Err(NoLease::ClientGone) => return After::Close,
                Err(NoLease::Refused(refusal)) => {
                    return self.fail(Failure::Refused(refusal), head).await;
                }
            };
            let mut exchange = Exchange::new(head);
            let mut buffer = self.context.buffers.large();
            let request_len = head.len + exchange.request_body(&inbox.bytes()[head.len..]).take;
            let whole = exchange.request_done();
            let request = Request { len: request_len, head, begun };
            let conduct = lease.conduct();
            let reused = lease.is_reused();
            let repeatable = retry::Request {
                held: whole && !kept.tied,
                idempotent: head.method.is_idempotent(),
                retries_left,
            };
            let may_repeat = repeatable.may_run_elsewhere();
            let judge = Judge { conduct: &conduct, may_repeat, retry: &retry, watch_client: true };
            let attempt =
                self.attempt(inbox, &request, &mut exchange, &mut lease, &mut buffer, judge).await;
            match attempt {
                Attempt::Complete { tail, uploaded } => {
                    if head.framing.has_body() {
                        lease.has_taken_body();
                    }
                    let tail = &buffer[..tail];
                    return self.complete(lease, kept, &exchange, uploaded, tail).await;
                }
                Attempt::Tunnel { tail } => {
                    let tail = &buffer[..tail];
                    // The origin does not know that the client asked for the end.
                    let silence = head.edit.as_ref().map(|_| SILENCE);
                    return Box::pin(self.upgraded(lease, inbox, &exchange, tail, silence)).await;
                }
                Attempt::ClientGone => {
                    self.context.metrics.clients_gone.inc();
                    lease.settle(Verdict::Close(CloseReason::ClientGone), None);
                    return After::Abort;
                }
                Attempt::Elsewhere => {
                    let reason = if exchange.response_started() {
                        CloseReason::Truncated
                    } else {
                        CloseReason::Timeout
                    };
                    retries_left -= 1;
                    failed_at = Some(self.repeat(lease, reason));
                }
                Attempt::OriginFailed { failure, seen } => {
                    let started = exchange.response_started();
                    judge.failed(failure, reused && !started);
                    let reason = failure.close_reason(started);
                    let failed = Failed { failure, seen, started, reused };
                    let told = match retry::again(&self.context.retries, repeatable, failed) {
                        Again::Freely => None,
                        Again::WithPermit if self.may_retry(&retry) => {
                            retries_left -= 1;
                            None
                        }
                        Again::WithPermit => {
                            self.context.metrics.retry_overflow.inc();
                            Some(Failure::Refused(Refusal::TooManyRetries))
                        }
                        Again::Never => {
                            self.context.metrics.origin_failed.inc();
                            Some(failure)
                        }
                    };
                    if let Some(failure) = told {
                        lease.settle(Verdict::Close(reason), None);
                        return if started { After::Abort } else { self.fail(failure, head).await };
                    }
                    failed_at = Some(self.repeat(lease, reason));
                }
            }
        }
    }

    /// Gives a socket up on which a request has failed that is sent once more. Answers which origin that was.
    fn repeat(self, lease: Lease, reason: CloseReason) -> SocketAddr {
        lease.count_repeat();
        self.context.metrics.retries.inc();
        let failed_at = lease.address();
        lease.settle(Verdict::Close(reason), None);
        failed_at
    }

    /// Whether the request may be tried again, as far as the others that are go. It has its permit
    /// then.
    fn may_retry(self, retry: &Cell<Option<RetryPermit>>) -> bool {
        let permit = retry.take().or_else(|| self.pool.retry());
        let permitted = permit.is_some();
        retry.set(permit);
        permitted
    }

    fn retries_on(self, condition: Condition) -> bool {
        self.context.retries.on.contains(condition)
    }

    /// The socket that the client kept, or one from the pool.
    async fn lease(
        self,
        kept: &mut Kept,
        failed_at: Option<SocketAddr>,
        retry: &Cell<Option<RetryPermit>>,
    ) -> Result<Lease, NoLease> {
        if let Some(lease) = kept.lease.take() {
            // A tied socket must not be replaced silently: the client believes that it is
            // authenticated. On a dead one, the exchange fails by itself.
            if kept.tied || lease.may_begin() {
                return Ok(lease);
            }
            lease.settle(Verdict::Close(CloseReason::OriginError), None);
        }
        let permit = retry.take();
        let mut lease = checkout(self.context, self.pool, self.client, failed_at, permit).await?;
        retry.set(lease.take_retry());
        Ok(lease)
    }

    /// Sends to the client; `left` is how much of it, and what follows, is to come.
    async fn send(self, bytes: &[u8], left: Option<u64>) -> std::io::Result<()> {
        self.clear_way(left).await?;
        self.client.send_all(bytes, self.context.timeouts.client_stall).await
    }

    /// Sends the last bytes before the client's connection is ended.
    async fn send_last(self, bytes: &[u8]) -> std::io::Result<()> {
        self.clear_way(Some(bytes.len() as u64)).await?;
        self.client.send_last(bytes, self.context.timeouts.client_stall).await
    }

    /// Nothing that is sent from here on overtakes what the kernel has sent.
    async fn clear_way(self, left: Option<u64>) -> std::io::Result<()> {
        let stall = self.context.timeouts.client_stall;
        match self.steered {
            None => Ok(()),
            // Boxed: the commoner clients' tasks must not be larger for these.
            Some(steered) => Box::pin(steered.clear_way(self.client, left, stall)).await,
        }
    }

    /// The response is complete. The lease ends before the client has read the rest: a slow reader
    /// holds its own buffer, not an origin socket.
    async fn complete(
        self,
        mut lease: Lease,
        kept: &mut Kept,
        exchange: &Exchange,
        uploaded: bool,
        tail: &[u8],
    ) -> After {
        self.context.metrics.exchanges.inc();
        kept.tied |= exchange.ties_to_client();
        let verdict = match exchange.verdict() {
            Verdict::Return if !uploaded => Verdict::Close(CloseReason::EarlyResponse),
            // A client that was seen to leave, or to end its side, during the exchange: whatever
            // that meant to it, the socket is not worth the doubt.
            Verdict::Return if self.client.peer_ended() => Verdict::Close(CloseReason::ClientGone),
            Verdict::Return if kept.tied => Verdict::Close(CloseReason::ConnectionAuth),
            verdict => verdict,
        };
        let persists = uploaded && exchange.client_persists();
        match verdict {
            Verdict::Close(CloseReason::ConnectionAuth) if persists => {
                kept.lease = Some(lease);
            }
            Verdict::Return if persists && self.affinity == Affinity::Connection => {
                lease.exchange_ended();
                kept.lease = Some(lease);
            }
            verdict => lease.settle(verdict, exchange.origin_idle_timeout()),
        }
        let sent = if persists {
            self.send(tail, Some(tail.len() as u64)).await
        } else {
            self.send_last(tail).await
        };
        if sent.is_err() {
            self.context.metrics.clients_gone.inc();
            After::Abort
        } else if persists {
            After::NextRequest
        } else if uploaded && !exchange.client_asked_to_persist() {
            After::Close
        } else {
            // More of this request, or the next one, may be on its way: closing would answer it
            // with a reset, which can overtake the end of this response.
            After::Linger
        }
    }

    /// The connection is a tunnel from here on: upgraded, or no longer readable with certainty.
    async fn upgraded(
        self,
        mut lease: Lease,
        inbox: &mut Inbox,
        exchange: &Exchange,
        tail: &[u8],
        ends_when_silent_for: Option<Duration>,
    ) -> After {
        self.context.metrics.exchanges.inc();
        // Before the client has anything that could be taken for all there is.
        self.client.reset_if_killed();
        if self.send(tail, None).await.is_err() {
            self.context.metrics.clients_gone.inc();
            lease.settle(Verdict::Close(CloseReason::ClientGone), None);
            return After::Abort;
        }
        let end = self.pass(inbox, &mut lease, ends_when_silent_for, None).await;
        lease.settle(exchange.verdict(), None);
        end
    }

    /// Passes everything through, beginning with the inbox, on a socket that is closed afterwards.
    pub(super) async fn tunnel(
        self,
        inbox: &mut Inbox,
        reason: CloseReason,
        kept: &mut Kept,
    ) -> After {
        let mut lease = match self.lease(kept, None, &Cell::default()).await {
            Ok(lease) => lease,
            Err(NoLease::ClientGone) => return After::Close,
            Err(NoLease::Refused(refusal)) => {
                return self.refuse(Failure::Refused(refusal), false).await;
            }
        };
        self.context.metrics.exchanges.inc();
        if self.clear_way(None).await.is_err() {
            lease.settle(Verdict::Close(CloseReason::ClientGone), None);
            return After::Abort;
        }
        // Whatever it is, it is no reason to hold a socket for as long as a tunnel may be idle.
        let silence = self.context.timeouts.client_stall;
        // There is no telling whether what comes answers this request. What cannot be a response, or not to
        // this one, does not, and is left of somebody else's exchange if there was one.
        let expected = lease.is_reused().then_some(RESPONSE_BEGINS);
        let end = self.pass(inbox, &mut lease, Some(silence), expected).await;
        lease.settle(Verdict::Close(reason), None);
        end
    }

    async fn pass(
        self,
        inbox: &mut Inbox,
        lease: &mut Lease,
        ends_when_silent_for: Option<Duration>,
        expected: Option<&'static [u8]>,
    ) -> After {
        let tunnel = Tunnel {
            client: self.client,
            origin: lease.stream(),
            timeouts: &self.context.timeouts,
            buffers: &self.context.buffers,
            metrics: &self.context.metrics,
            quiet: None,
            ends_when_silent_for,
            expected,
        };
        let end = tunnel.run(inbox.bytes()).await;
        inbox.consume(inbox.bytes().len());
        match end {
            TunnelEnd::Closed | TunnelEnd::Quiet | TunnelEnd::Silent => After::Close,
            TunnelEnd::ClientBroke => {
                lease.stream().abort_on_close(true);
                self.context.metrics.clients_gone.inc();
                After::Abort
            }
            TunnelEnd::OriginBroke => {
                self.context.metrics.origin_failed.inc();
                After::Abort
            }
            TunnelEnd::Unexpected => {
                self.context.metrics.origin_failed.inc();
                self.refuse(Failure::NoResponse, false).await
            }
        }
    }

    async fn fail(self, failure: Failure, head: &RequestHead) -> After {
        self.refuse(failure, head.method == Method::Head).await
    }

    async fn refuse(self, failure: Failure, head: bool) -> After {
        tracing::debug!(?failure, "exchange failed");
        let response = failure.response(head);
        match self.send(response.as_bytes(), Some(response.len() as u64)).await {
            // The request is still unread, in part or in full.
            Ok(()) => After::Linger,
            Err(_) => After::Abort,
        }
    }
}
