//! One attempt at an exchange, on one origin socket.

use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::time::Duration;

use super::{Exchanging, Failure};
use crate::boundary::http1::{Edit, Exchange, Progress, RequestHead, ResponseEnd};
use crate::buffers::{Buffer, Inbox};
use crate::config::retries::Condition;
use crate::net::Stream;
use crate::origin::outlier;
use crate::pool::budget::RetryPermit;
use crate::pool::{Conduct, Lease};

/// Pause until a request at a silent origin is tried again, if too many others just are.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// A request at the start of an inbox.
pub(super) struct Request<'a> {
    /// How much of it is there.
    pub(super) len: usize,
    pub(super) head: &'a RequestHead,
    pub(super) begun: Begun,
}

/// How far the kernel has come with an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begun {
    /// It has not begun it.
    No,
    /// It has sent the request.
    Sent,
    /// It has sent the request, and what came then cannot be a response to it.
    Strayed,
}

/// What an attempt needs to judge its origin by.
#[derive(Clone, Copy)]
pub(super) struct Judge<'a> {
    pub(super) conduct: &'a Conduct,
    /// The request may run elsewhere instead, as long as nothing of this response is forwarded.
    pub(super) may_repeat: bool,
    /// Held from when it is decided that the request is tried again until its response begins.
    pub(super) retry: &'a Cell<Option<RetryPermit>>,
    /// Whether to notice that the client leaves.
    pub(super) watch_client: bool,
}

impl Judge<'_> {
    /// Counts a failure. That a socket was closed while it was idle says nothing of its origin.
    pub(super) fn failed(&self, failure: Failure, was_idle: bool) {
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
pub(super) enum Attempt {
    /// The response is complete; its last part is still in the buffer. Without `uploaded`, the
    /// origin may still lack a part of the request.
    Complete { tail: usize, uploaded: bool },
    /// From here on bytes pass unread; the first of them are still in the buffer.
    Tunnel { tail: usize },
    /// Nothing of a response was passed on: the request, which has its permit, is tried at another
    /// origin instead.
    Elsewhere,
    /// The origin failed.
    OriginFailed { failure: Failure, seen: Seen },
    /// The client went away or stalled.
    ClientGone,
}

/// What an origin that failed may have seen of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Anything.
    Maybe,
    /// Nothing, as far as its TCP has told: it has ended an idle connection, which crossed the request.
    Hardly,
    /// Nothing: it was not sent.
    Nothing,
}

impl Exchanging<'_> {
    /// Sends the request and receives the response, but for its last part.
    pub(super) async fn attempt(
        self,
        inbox: &mut Inbox,
        request: &Request<'_>,
        exchange: &mut Exchange,
        lease: &mut Lease,
        buffer: &mut Buffer,
        judge: Judge<'_>,
    ) -> Attempt {
        let reused = lease.is_reused();
        let origin = lease.stream();
        let request_len = request.len;
        let sent_before = origin.sent();
        let mut sent_by_kernel = 0;
        match request.begun {
            Begun::No => {
                let bytes = &inbox.bytes()[..request_len];
                let stall = self.context.timeouts.origin_stall;
                if let Err(sent) = send_request(origin, bytes, request.head, buffer, stall).await {
                    let seen = if sent == 0 { Seen::Nothing } else { Seen::Maybe };
                    return Attempt::OriginFailed { failure: Failure::OriginFailed, seen };
                }
                self.context.metrics.request_bytes.add(request_len as u64);
            }
            Begun::Sent => sent_by_kernel = request_len as u64,
            Begun::Strayed => return failed(Failure::NoResponse),
        }
        let whole = exchange.request_done();
        let attempting = Attempting {
            session: self,
            origin,
            reused,
            sent_before,
            sent_by_kernel,
            exchange: RefCell::new(exchange),
            judge: if whole {
                judge
            } else {
                Judge { may_repeat: false, watch_client: false, ..judge }
            },
        };
        if whole {
            let attempt = attempting.respond(buffer).await;
            if !matches!(attempt, Attempt::OriginFailed { .. } | Attempt::Elsewhere) {
                inbox.consume(request_len);
            }
            return attempt;
        }
        // The rest of the body is not held: there is no repeating from here on.
        inbox.consume(request_len);
        Box::pin(attempting.stream(inbox, buffer)).await
    }
}

/// An attempt whose request has been sent, or its first part.
struct Attempting<'a> {
    session: Exchanging<'a>,
    origin: &'a Stream,
    /// It has served others, who may have left something behind.
    reused: bool,
    /// What was sent on the socket before this request, and what of this the daemon has not sent.
    sent_before: u64,
    sent_by_kernel: u64,
    /// Shared by both directions where they run at once.
    exchange: RefCell<&'a mut Exchange>,
    judge: Judge<'a>,
}

impl Attempting<'_> {
    /// Forwards the rest of the request body while the response may already be coming.
    async fn stream(&self, inbox: &mut Inbox, buffer: &mut Buffer) -> Attempt {
        let client = self.session.client;
        let mut respond = std::pin::pin!(self.respond(buffer));
        let (attempt, all) = tokio::select! {
            biased;
            attempt = &mut respond => (attempt, false),
            upload = self.upload(inbox) => match upload {
                Upload::ClientGone => (Attempt::ClientGone, false),
                Upload::Done | Upload::Refused => {
                    let attempt = tokio::select! {
                        biased;
                        attempt = respond => attempt,
                        () = client.reset() => Attempt::ClientGone,
                    };
                    (attempt, matches!(upload, Upload::Done))
                }
            },
            () = client.reset() => (Attempt::ClientGone, false),
        };
        match attempt {
            Attempt::Complete { tail, .. } => Attempt::Complete { tail, uploaded: all },
            other => other,
        }
    }

    /// Forwards the rest of the request body as it comes.
    async fn upload(&self, inbox: &mut Inbox) -> Upload {
        let Self { origin, exchange, session: Exchanging { context, client, .. }, .. } = self;
        let timeouts = &context.timeouts;
        loop {
            let received =
                tokio::time::timeout(timeouts.client_stall, client.recv(inbox.room())).await;
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
                context.metrics.request_bytes.add(n as u64);
            }
            // Chunks that cannot be read still go to the origin; it will say what it thinks of
            // them, and its socket is not used again.
            if step.state == Progress::Done {
                return Upload::Done;
            }
        }
    }

    /// Receives the response and forwards all of it but the last part.
    async fn respond(&self, buffer: &mut Buffer) -> Attempt {
        let Self { session, origin, exchange, judge, .. } = self;
        // Until the response begins, or this is given up.
        let mut owing = judge.conduct.owe();
        let (mut judged, mut forwarded) = (false, false);
        // Bytes at the buffer's front that are too few to be judged.
        let mut held = 0;
        loop {
            if exchange.borrow().response_started() {
                origin.quick_ack();
            }
            let begun = forwarded || held > 0;
            let received = match self.receive(&mut buffer[held..], begun).await {
                Ok(received) => received,
                Err(GivenUp::ClientGone) => return Attempt::ClientGone,
                Err(GivenUp::Silenced) => return Attempt::Elsewhere,
            };
            let step = match received {
                Ok(0) if held == 0 && self.is_crossed() => {
                    let failure = Failure::OriginFailed;
                    return Attempt::OriginFailed { failure, seen: Seen::Hardly };
                }
                Ok(0) => {
                    return match exchange.borrow_mut().response_eof() {
                        ResponseEnd::Done => Attempt::Complete { tail: 0, uploaded: true },
                        ResponseEnd::Truncated => failed(Failure::OriginFailed),
                    };
                }
                // Bytes that somebody else's exchange has left behind must reach nobody. Only what
                // cannot be a response shows itself as such, or cannot be one to this request; on a
                // new socket there is no such past.
                Ok(n) if self.reused && !exchange.borrow().response_started() => {
                    held += n;
                    if !may_begin_response(&buffer[..held]) || self.is_crossed() {
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
                && self.is_better_elsewhere(status)
                && judge.may_repeat
                && !forwarded
                && judge.conduct.has_others()
                // Without a permit the client gets this response: better than one of ours.
                && session.may_retry(judge.retry)
            {
                return Attempt::Elsewhere;
            }
            forwarded = true;
            // There will be no other attempt.
            drop(judge.retry.take());
            let forward = self.announce_end(buffer, step.forward);
            session.context.metrics.response_bytes.add(forward as u64);
            match step.state {
                Progress::Done => return Attempt::Complete { tail: forward, uploaded: true },
                Progress::Tunnel(_) => return Attempt::Tunnel { tail: forward },
                Progress::More => {
                    if exchange.borrow().ends_with_connection() {
                        session.client.reset_if_killed();
                    }
                    let left = exchange.borrow().response_left();
                    let left = left.map(|left| left.saturating_add(forward as u64));
                    if session.send(&buffer[..forward], left).await.is_err() {
                        return Attempt::ClientGone;
                    }
                }
            }
        }
    }

    /// While the daemon is stopping, the response tells the client that its connection ends, so that it
    /// sends no other request on it. Answers how many bytes go to the client then.
    fn announce_end(&self, buffer: &mut [u8], forward: usize) -> usize {
        let room = buffer.len() - forward >= Edit::GROWTH_MAX;
        if !room || !self.session.context.stop.is_raised() {
            return forward;
        }
        let announcement = self.exchange.borrow_mut().end_connection();
        announcement.map_or(forward, |edit| edit.apply(buffer, forward))
    }

    /// Counts a response's status. Answers whether another origin had better be asked.
    fn is_better_elsewhere(&self, status: u16) -> bool {
        let ejected = self.judge.conduct.responded(status);
        ejected && self.session.retries_on(Condition::Ejected)
            || matches!(status, 502..=504) && self.session.retries_on(Condition::GatewayError)
    }

    /// Waits until the origin is ejected for its silence, and the request may be tried elsewhere.
    async fn silenced(&self) {
        loop {
            self.judge.conduct.silenced().await;
            if self.session.may_retry(self.judge.retry) {
                return;
            }
            // Others are being tried again, which does not take long elsewhere.
            tokio::time::sleep(ASK_AGAIN_AFTER).await;
        }
    }

    /// Receives from the origin; notices after a while if the client leaves meanwhile, or if the
    /// origin is ejected for its silence and another one can be asked instead.
    async fn receive(
        &self,
        buffer: &mut [u8],
        begun: bool,
    ) -> Result<std::io::Result<usize>, GivenUp> {
        let Self { session: Exchanging { context, client, .. }, judge, .. } = self;
        let mut receive = std::pin::pin!(self.origin.recv(buffer));
        if let Some(received) = context.ticks.outrun(&mut receive).await {
            return Ok(received);
        }
        let silenced_counts =
            judge.may_repeat && !begun && self.session.retries_on(Condition::Ejected);
        let slow = async {
            tokio::select! {
                biased;
                received = receive => Ok(received),
                () = client.reset(), if judge.watch_client => Err(GivenUp::ClientGone),
                () = self.silenced(), if silenced_counts => Err(GivenUp::Silenced),
                () = tokio::time::sleep(context.timeouts.origin_stall) => {
                    Ok(Err(ErrorKind::TimedOut.into()))
                }
            }
        };
        Box::pin(slow).await
    }

    /// Whether what has come on a socket with a past was sent before the origin had any of the request.
    fn is_crossed(&self) -> bool {
        let sent = self.origin.sent() - self.sent_before + self.sent_by_kernel;
        self.reused
            && !self.exchange.borrow().response_started()
            && !self.origin.has_reached_peer(sent)
    }
}

/// Some of the request may have been seen.
fn failed(failure: Failure) -> Attempt {
    Attempt::OriginFailed { failure, seen: Seen::Maybe }
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
pub(super) const RESPONSE_BEGINS: &[u8] = b"HTTP/1.";

/// Whether these first bytes can be those of a status line.
fn may_begin_response(bytes: &[u8]) -> bool {
    let n = bytes.len().min(RESPONSE_BEGINS.len());
    bytes[..n] == RESPONSE_BEGINS[..n]
}
