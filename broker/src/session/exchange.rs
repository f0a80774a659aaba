//! One http1 exchange: lease, request, response, boundary.

use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use super::refusal::Failure;
use super::steered::Steered;
use super::{Context, NoLease, checkout};
use crate::boundary::http1::{
    Edit, Exchange, Method, Progress, RequestHead, RequestReader, RequestStep, ResponseEnd,
};
use crate::boundary::{CloseReason, Verdict};
use crate::buffers::{Buffer, Inbox};
use crate::config::Affinity;
use crate::config::retries::Condition;
use crate::net::Stream;
use crate::origin::outlier;
use crate::pool::budget::RetryPermit;
use crate::pool::{Conduct, Lease, Pool, Refusal};
use crate::relay::{Tunnel, TunnelEnd};

/// How long to wait for an origin before looking whether the client is still there. Nearly every
/// response comes sooner, and costs no registration of the client's socket.
const WATCH_CLIENT_AFTER: Duration = Duration::from_millis(20);

/// Pause until a request at a silent origin is tried again, if too many others just are.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(100);

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

/// A request at the start of an inbox.
struct Request<'a> {
    /// How much of it is there.
    len: usize,
    head: &'a RequestHead,
    /// It has been sent already.
    sent: bool,
}

/// What an attempt needs to judge its origin by.
#[derive(Clone, Copy)]
struct Judge<'a> {
    conduct: &'a Conduct,
    /// The request may run elsewhere instead, as long as nothing of this response is forwarded.
    may_repeat: bool,
    /// Held from when it is decided that the request is tried again until its response begins.
    retry: &'a Cell<Option<RetryPermit>>,
    /// Whether to notice that the client leaves.
    watch_client: bool,
}

impl Judge<'_> {
    /// Counts a failure. That a socket was closed while it was idle says nothing of its origin.
    fn failed(&self, failure: Failure, was_idle: bool) {
        match failure {
            Failure::OriginFailed if was_idle => {}
            Failure::OriginFailed | Failure::NoResponse => {
                self.conduct.failed(outlier::Failure::Reset);
            }
            Failure::OriginStalled => self.conduct.failed(outlier::Failure::Timeout),
            Failure::Refused(_) => {}
        }
    }
}

/// How one attempt on one socket went.
enum Attempt {
    /// The response is complete; its last part is still in the buffer. Without `uploaded`, the
    /// origin may still lack a part of the request.
    Complete { tail: usize, uploaded: bool },
    /// From here on bytes pass unread; the first of them are still in the buffer.
    Tunnel { tail: usize },
    /// Nothing of a response was passed on: the request, which has its permit, is tried at another
    /// origin instead.
    Elsewhere,
    /// The origin failed. With `unseen`, it cannot have seen any of the request.
    OriginFailed { failure: Failure, unseen: bool },
    /// The client went away or stalled.
    ClientGone,
}

impl Exchanging<'_> {
    /// Goes on with an exchange that the kernel has begun: the request is sent, and nothing of the
    /// response has come to the client.
    pub(super) async fn take_over(self, lease: Lease, request: &[u8], kept: &mut Kept) -> After {
        let mut inbox = Inbox::new(&self.context.buffers);
        inbox.fill(request);
        match RequestReader::default().read(inbox.bytes()) {
            RequestStep::Head(head) => self.run(&mut inbox, &head, kept, Some(lease)).await,
            // Cannot be: the kernel sends only what this reader reads.
            RequestStep::Incomplete | RequestStep::Tunnel(_) => {
                lease.settle(Verdict::Close(CloseReason::AmbiguousRequest), None);
                After::Abort
            }
        }
    }

    /// Runs the exchange whose request is at the start of the inbox; with `begun`, it was sent
    /// there already.
    pub(super) async fn run(
        self,
        inbox: &mut Inbox,
        head: &RequestHead,
        kept: &mut Kept,
        mut begun: Option<Lease>,
    ) -> After {
        let mut failed_at: Option<SocketAddr> = None;
        let retry = Cell::new(None);
        for attempts_left in (0..self.context.retries.attempts).rev() {
            let sent = begun.is_some();
            let lease = match begun.take() {
                Some(lease) => Ok(lease),
                None => self.lease(kept, failed_at, &retry).await,
            };
            let mut lease = match lease {
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
            let request = Request { len: request_len, head, sent };
            let conduct = lease.conduct();
            let reused = lease.is_reused();
            let may_repeat =
                whole && head.method.is_idempotent() && attempts_left > 0 && !kept.tied;
            let judge = Judge { conduct: &conduct, may_repeat, retry: &retry, watch_client: true };
            let attempt =
                self.attempt(inbox, &request, &mut exchange, &mut lease, &mut buffer, &judge).await;
            match attempt {
                Attempt::Complete { tail, uploaded } => {
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
                    self.count_repeat(&lease);
                    failed_at = Some(lease.address());
                    let reason = if exchange.response_started() {
                        CloseReason::Truncated
                    } else {
                        CloseReason::Timeout
                    };
                    lease.settle(Verdict::Close(reason), None);
                }
                Attempt::OriginFailed { failure, unseen } => {
                    let started = exchange.response_started();
                    // Repeating needs the whole request still in hand, an origin that has not
                    // answered any of it, and a request that may run twice or did not run.
                    let wanted = !started
                        && whole
                        && matches!(failure, Failure::OriginFailed | Failure::NoResponse)
                        && (unseen && self.retries_on(Condition::Refused)
                            || head.method.is_idempotent()
                                && self.retries_on(Condition::ResetBeforeResponse))
                        && attempts_left > 0
                        && !kept.tied;
                    // A socket that was kept open, and was dead, is the pool's own fault. Leaving it
                    // costs the origin nothing, as it has seen nothing; and there is one dead socket
                    // less each time, so it is no storm either. It needs no permit.
                    let repeat = wanted && (unseen && reused || self.may_retry(&retry));
                    judge.failed(failure, reused && !started);
                    if repeat {
                        self.count_repeat(&lease);
                        failed_at = Some(lease.address());
                    }
                    let reason = match failure {
                        Failure::OriginStalled => CloseReason::Timeout,
                        Failure::NoResponse => CloseReason::Unsolicited,
                        _ if started => CloseReason::Truncated,
                        _ => CloseReason::OriginError,
                    };
                    lease.settle(Verdict::Close(reason), None);
                    if wanted && !repeat {
                        self.context.metrics.retry_overflow.inc();
                        return self.fail(Failure::Refused(Refusal::TooManyRetries), head).await;
                    }
                    if !repeat {
                        self.context.metrics.origin_failed.inc();
                        return if started { After::Abort } else { self.fail(failure, head).await };
                    }
                }
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Whether the request may be tried again, as far as the others that are go. It has its permit
    /// then.
    fn may_retry(self, retry: &Cell<Option<RetryPermit>>) -> bool {
        let permit = retry.take().or_else(|| self.pool.retry());
        let permitted = permit.is_some();
        retry.set(permit);
        permitted
    }

    fn count_repeat(self, lease: &Lease) {
        lease.count_repeat();
        self.context.metrics.retries.inc();
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

    /// Sends the request and receives the response, but for its last part.
    async fn attempt(
        self,
        inbox: &mut Inbox,
        request: &Request<'_>,
        exchange: &mut Exchange,
        lease: &mut Lease,
        buffer: &mut Buffer,
        judge: &Judge<'_>,
    ) -> Attempt {
        let reused = lease.is_reused();
        let origin = lease.stream();
        let stall = self.context.timeouts.origin_stall;
        let request_len = request.len;
        if !request.sent {
            let bytes = &inbox.bytes()[..request_len];
            if let Err(sent) = send_request(origin, bytes, request.head, buffer, stall).await {
                return Attempt::OriginFailed { failure: Failure::OriginFailed, unseen: sent == 0 };
            }
            self.context.metrics.request_bytes.add(request_len as u64);
        }
        // Shared by both directions where they run at once.
        let exchange = RefCell::new(exchange);
        if exchange.borrow().request_done() {
            let attempt = self.respond(&exchange, origin, reused, buffer, judge).await;
            if !matches!(attempt, Attempt::OriginFailed { .. } | Attempt::Elsewhere) {
                inbox.consume(request_len);
            }
            return attempt;
        }
        // The rest of the body is not held: there is no repeating from here on.
        inbox.consume(request_len);
        Box::pin(self.attempt_streaming(inbox, &exchange, origin, reused, buffer, judge)).await
    }

    /// Forwards the rest of the request body while the response may already be coming.
    async fn attempt_streaming(
        self,
        inbox: &mut Inbox,
        exchange: &RefCell<&mut Exchange>,
        origin: &Stream,
        reused: bool,
        buffer: &mut Buffer,
        judge: &Judge<'_>,
    ) -> Attempt {
        let judge = Judge { may_repeat: false, watch_client: false, ..*judge };
        let mut respond = std::pin::pin!(self.respond(exchange, origin, reused, buffer, &judge));
        let (attempt, all) = tokio::select! {
            biased;
            attempt = &mut respond => (attempt, false),
            upload = self.upload(inbox, exchange, origin) => match upload {
                Upload::ClientGone => (Attempt::ClientGone, false),
                Upload::Done | Upload::Refused => {
                    let attempt = tokio::select! {
                        biased;
                        attempt = respond => attempt,
                        () = self.client.reset() => Attempt::ClientGone,
                    };
                    (attempt, matches!(upload, Upload::Done))
                }
            },
            () = self.client.reset() => (Attempt::ClientGone, false),
        };
        match attempt {
            Attempt::Complete { tail, .. } => Attempt::Complete { tail, uploaded: all },
            other => other,
        }
    }

    /// Forwards the rest of the request body as it comes.
    async fn upload(
        self,
        inbox: &mut Inbox,
        exchange: &RefCell<&mut Exchange>,
        origin: &Stream,
    ) -> Upload {
        let timeouts = &self.context.timeouts;
        loop {
            let received =
                tokio::time::timeout(timeouts.client_stall, self.client.recv(inbox.room())).await;
            match received {
                Ok(Ok(n @ 1..)) => inbox.filled(n),
                // The client owes nothing while the origin owes a 100, or while it gets an answer.
                Err(_elapsed)
                    if exchange.borrow().awaits_continue()
                        || exchange.borrow().response_started() =>
                {
                    continue;
                }
                _ => return Upload::ClientGone,
            }
            let step = exchange.borrow_mut().request_body(inbox.bytes());
            let mut left = step.take;
            while left > 0 {
                // Forgotten piece by piece: if this is cancelled, what is left was not sent.
                let Ok(n) = origin.send(&inbox.bytes()[..left], timeouts.origin_stall).await else {
                    return Upload::Refused;
                };
                inbox.consume(n);
                left -= n;
                self.context.metrics.request_bytes.add(n as u64);
            }
            // Chunks that cannot be read still go to the origin; it will say what it thinks of
            // them, and its socket is not used again.
            if step.state == Progress::Done {
                return Upload::Done;
            }
        }
    }

    /// Receives the response and forwards all of it but the last part.
    async fn respond(
        self,
        exchange: &RefCell<&mut Exchange>,
        origin: &Stream,
        reused: bool,
        buffer: &mut Buffer,
        judge: &Judge<'_>,
    ) -> Attempt {
        // Until the response begins, or this is given up.
        let mut owing = judge.conduct.owe();
        let (mut judged, mut forwarded) = (false, false);
        let failed = |failure| Attempt::OriginFailed { failure, unseen: false };
        // Bytes at the buffer's front that are too few to be judged.
        let mut held = 0;
        loop {
            if exchange.borrow().response_started() {
                origin.quick_ack();
            }
            let begun = forwarded || held > 0;
            let received = match self.receive(origin, &mut buffer[held..], judge, begun).await {
                Ok(received) => received,
                Err(GivenUp::ClientGone) => return Attempt::ClientGone,
                Err(GivenUp::Silenced) => return Attempt::Elsewhere,
            };
            let step = match received {
                Ok(0) => {
                    return match exchange.borrow_mut().response_eof() {
                        ResponseEnd::Done => Attempt::Complete { tail: 0, uploaded: true },
                        ResponseEnd::Truncated => failed(Failure::OriginFailed),
                    };
                }
                // Bytes that somebody else's exchange has left behind must reach nobody. Only what
                // cannot be a response shows itself as such; on a new socket there is no such past.
                Ok(n) if reused && !exchange.borrow().response_started() => {
                    held += n;
                    if !may_begin_response(&buffer[..held]) {
                        return failed(Failure::NoResponse);
                    }
                    if held < RESPONSE_BEGINS.len() {
                        continue;
                    }
                    exchange.borrow_mut().response(&buffer[..std::mem::take(&mut held)])
                }
                Ok(n) => exchange.borrow_mut().response(&buffer[..n]),
                Err(e) if e.kind() == ErrorKind::TimedOut => return failed(Failure::OriginStalled),
                Err(_) => return failed(Failure::OriginFailed),
            };
            if let Some(owing) = owing.take() {
                owing.answered();
            }
            if !judged
                && let Some(status) = exchange.borrow().status()
                && !std::mem::replace(&mut judged, true)
                && self.is_better_elsewhere(judge, status)
                && judge.may_repeat
                && !forwarded
                && judge.conduct.has_others()
                // Without a permit the client gets this response: better than one of ours.
                && self.may_retry(judge.retry)
            {
                return Attempt::Elsewhere;
            }
            forwarded = true;
            // There will be no other attempt.
            drop(judge.retry.take());
            self.context.metrics.response_bytes.add(step.forward as u64);
            match step.state {
                Progress::Done => {
                    return Attempt::Complete { tail: step.forward, uploaded: true };
                }
                Progress::Tunnel(_) => return Attempt::Tunnel { tail: step.forward },
                Progress::More => {
                    let left = exchange.borrow().response_left();
                    let left = left.map(|left| left.saturating_add(step.forward as u64));
                    if self.send(&buffer[..step.forward], left).await.is_err() {
                        return Attempt::ClientGone;
                    }
                }
            }
        }
    }

    /// Counts a response's status. Answers whether another origin had better be asked.
    fn is_better_elsewhere(self, judge: &Judge<'_>, status: u16) -> bool {
        let ejected = judge.conduct.responded(status);
        ejected && self.retries_on(Condition::Ejected)
            || matches!(status, 502..=504) && self.retries_on(Condition::GatewayError)
    }

    fn retries_on(self, condition: Condition) -> bool {
        self.context.retries.on.contains(condition)
    }

    /// Waits until the origin is ejected for its silence, and the request may be tried elsewhere.
    async fn silenced(self, judge: &Judge<'_>) {
        loop {
            judge.conduct.silenced().await;
            if self.may_retry(judge.retry) {
                return;
            }
            // Others are being tried again, which does not take long elsewhere.
            tokio::time::sleep(ASK_AGAIN_AFTER).await;
        }
    }

    /// Receives from the origin; notices after a while if the client leaves meanwhile, or if the
    /// origin is ejected for its silence and another one can be asked instead.
    async fn receive(
        self,
        origin: &Stream,
        buffer: &mut [u8],
        judge: &Judge<'_>,
        begun: bool,
    ) -> Result<std::io::Result<usize>, GivenUp> {
        let mut receive = std::pin::pin!(origin.recv(buffer));
        if let Ok(received) = tokio::time::timeout(WATCH_CLIENT_AFTER, &mut receive).await {
            return Ok(received);
        }
        let silenced_counts = judge.may_repeat && !begun && self.retries_on(Condition::Ejected);
        let slow = async {
            tokio::select! {
                biased;
                received = receive => Ok(received),
                () = self.client.reset(), if judge.watch_client => Err(GivenUp::ClientGone),
                () = self.silenced(judge), if silenced_counts => Err(GivenUp::Silenced),
                () = tokio::time::sleep(self.context.timeouts.origin_stall) => {
                    Ok(Err(ErrorKind::TimedOut.into()))
                }
            }
        };
        Box::pin(slow).await
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
        if self.send(tail, None).await.is_err() {
            self.context.metrics.clients_gone.inc();
            lease.settle(Verdict::Close(CloseReason::ClientGone), None);
            return After::Abort;
        }
        let end = self.pass(inbox, &mut lease, ends_when_silent_for, &[]).await;
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
        // There is no telling whether what comes answers this request. What cannot be a response does
        // not, and is left of somebody else's exchange if there was one.
        let expected = if lease.is_reused() { RESPONSE_BEGINS } else { &[] };
        let end = self.pass(inbox, &mut lease, Some(silence), expected).await;
        lease.settle(Verdict::Close(reason), None);
        end
    }

    async fn pass(
        self,
        inbox: &mut Inbox,
        lease: &mut Lease,
        ends_when_silent_for: Option<Duration>,
        expected: &'static [u8],
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

/// Why a response is not waited for any longer.
enum GivenUp {
    /// The client went away or stalled.
    ClientGone,
    /// The origin has been ejected because it is silent.
    Silenced,
}

/// How forwarding a request body ended.
enum Upload {
    /// The origin's socket has taken all of it.
    Done,
    /// The origin takes no more of it, and may have said why: its response decides.
    Refused,
    ClientGone,
}

/// Sends the head, with its edit, and what is held of the body. On failure, says how many bytes
/// the origin's socket had taken.
async fn send_request(
    origin: &Stream,
    request: &[u8],
    head: &RequestHead,
    scratch: &mut [u8],
    stall: Duration,
) -> Result<(), usize> {
    let mut sent = 0;
    let (first, second) = match &head.edit {
        None => (request, &[][..]),
        // A copy of what is nearly always a few hundred bytes is cheaper than writev(2).
        Some(edit) => edited(request, edit, scratch),
    };
    for mut left in [first, second] {
        while !left.is_empty() {
            let n = origin.send(left, stall).await.map_err(|_broken| sent)?;
            left = &left[n..];
            sent += n;
        }
    }
    Ok(())
}

/// The request with its edit: what of it fits into `scratch`, which is more than any head, and the
/// rest.
fn edited<'a>(request: &'a [u8], edit: &Edit, scratch: &'a mut [u8]) -> (&'a [u8], &'a [u8]) {
    let (before, after) = (&request[..edit.at.start], &request[edit.at.end..]);
    let mut end = 0;
    for piece in [before, edit.with] {
        scratch[end..end + piece.len()].copy_from_slice(piece);
        end += piece.len();
    }
    let (fits, rest) = after.split_at(after.len().min(scratch.len() - end));
    scratch[end..end + fits.len()].copy_from_slice(fits);
    (&scratch[..end + fits.len()], rest)
}

/// How every status line begins (RFC 9112 section 4).
const RESPONSE_BEGINS: &[u8] = b"HTTP/1.";

/// Whether these first bytes can be those of a status line.
fn may_begin_response(bytes: &[u8]) -> bool {
    let n = bytes.len().min(RESPONSE_BEGINS.len());
    bytes[..n] == RESPONSE_BEGINS[..n]
}
