//! One client connection, from `connect()` to its end.
//!
//! A session never waits: it says what for, and its driver (an event loop, or a thread that blocks
//! in `poll()` or in `recv()` itself) calls it again. It knows every byte that may come and judges
//! each exchange once its end is known.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::time::{Duration, Instant};

use nix::sys::socket::{MsgFlags, recv, send};
use socket2::{Domain, Protocol, Socket, Type};

use super::Shared;
use super::judge::{Outcome, Wrong};
use super::report::Kind;
use super::script::{Leaving, Script, When};
use super::spec::{CONTINUE, End, How, Spec};
use super::wire::{Difference, Wire};

/// Bytes that are made at a time.
const PIECE: usize = 64 << 10;
/// Longest refusal of the broker that is read.
const REFUSAL_MAX: usize = 4096;
/// Where in a response a refusal of the broker differs from what the origin sends: both begin with
/// `HTTP/1.1 `.
const STATUS_AT: u64 = 9;
/// Sockets on which the broker tries an idempotent request.
const ATTEMPTS: usize = 3;

/// How a session's system calls wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Calls {
    /// In the call itself.
    Block,
    /// Not at all, and there is one read for each event (level-triggered).
    OnePerEvent,
    /// Not at all, and reads go on until there is nothing left (edge-triggered).
    UntilEmpty,
}

/// What to do with a session now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Call it again when one of these holds.
    Wait { read: bool, write: bool, until: Option<Instant> },
    /// It is over.
    Over,
}

/// What happens once so many bytes of `out` are sent.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// The next byte goes into another write, after a pause.
    Pause(Duration),
    /// The client waits for a 100.
    Continue,
}

/// How the other side ended the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    InOrder,
    Reset,
}

/// A client connection.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, not a state")]
pub(super) struct Session<'a> {
    shared: &'a Shared,
    script: Script,
    service: usize,
    socket: Socket,
    calls: Calls,
    nonblocking: bool,
    connected: bool,
    /// What the driver knows of the socket.
    pub(super) readable: bool,
    /// Whether a connection has come about; afterwards sending itself tells.
    pub(super) writable: bool,
    /// The end of the connection is among what is to be read.
    pub(super) hung_up: bool,

    out: Vec<u8>,
    out_at: usize,
    stops: VecDeque<(usize, Stop)>,
    /// Requests of which bytes were made.
    begun: usize,
    upload: Option<Wire>,
    sent: u64,
    send_after: Option<Instant>,
    awaits_continue: bool,
    sends_over: bool,
    send_failed: Option<ErrorKind>,
    /// It was told of a reset, which was none of this connection's.
    met_reset: bool,

    /// Responses that are complete.
    answered: usize,
    response: Option<Wire>,
    received: u64,
    /// An answer of the broker itself.
    refusal: Option<Vec<u8>>,
    /// There is nothing to come but the end of the connection.
    expects_end: bool,
    /// The end of the connection is the end of a response.
    end_completes: bool,
    read_after: Option<Instant>,
    leave_at: Option<Instant>,

    exchange_began: Instant,
    moved_at: Instant,
    over: bool,
}

/// A thread's buffers.
#[derive(Debug)]
pub(super) struct Scratch {
    bytes: Vec<u8>,
    peeked: Vec<u8>,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self { bytes: vec![0; PIECE], peeked: vec![0; PIECE] }
    }
}

impl<'a> Session<'a> {
    /// Connects, waiting for it unless `nonblocking`.
    pub(super) fn connect(
        shared: &'a Shared,
        script: Script,
        service: usize,
        to: SocketAddr,
        nonblocking: bool,
        calls: Calls,
        now: Instant,
    ) -> io::Result<Self> {
        let kind = Type::STREAM.cloexec();
        let kind = if nonblocking { kind.nonblocking() } else { kind };
        let socket = Socket::new(Domain::for_address(to), kind, Some(Protocol::TCP))?;
        if let Some(size) = script.reading.receive_buffer {
            socket.set_recv_buffer_size(size)?;
        }
        socket.set_tcp_nodelay(script.requests[0].id.seq.is_multiple_of(2))?;
        if calls == Calls::Block {
            socket.set_read_timeout(Some(shared.patience))?;
            socket.set_write_timeout(Some(shared.patience))?;
        }
        let connected = match socket.connect(&to.into()) {
            Ok(()) => true,
            Err(e) if e.raw_os_error() == Some(nix::libc::EINPROGRESS) => false,
            Err(e) => return Err(e),
        };
        if connected && socket.peer_addr()?.as_socket() != Some(to) {
            shared.judge.fail(
                "client",
                script.mode.name(),
                &script.requests[0],
                Wrong::new(Kind::Mismatch, "getpeername() does not tell what was dialled"),
            );
        }
        let mut session = Self::over(shared, script, service, socket, calls, now);
        (session.nonblocking, session.connected) = (nonblocking, connected);
        Ok(session)
    }

    /// On a socket that is connected already.
    pub(super) fn over(
        shared: &'a Shared,
        script: Script,
        service: usize,
        socket: Socket,
        calls: Calls,
        now: Instant,
    ) -> Self {
        for spec in &script.requests {
            shared.ledger.is_a(spec.id, spec.method);
        }
        Self {
            shared,
            script,
            service,
            socket,
            calls,
            nonblocking: false,
            connected: true,
            readable: false,
            writable: false,
            hung_up: false,
            out: Vec::new(),
            out_at: 0,
            stops: VecDeque::new(),
            begun: 0,
            upload: None,
            sent: 0,
            send_after: None,
            awaits_continue: false,
            sends_over: false,
            send_failed: None,
            met_reset: false,
            answered: 0,
            response: None,
            received: 0,
            refusal: None,
            expects_end: false,
            end_completes: false,
            read_after: None,
            leave_at: None,
            exchange_began: now,
            moved_at: now,
            over: false,
        }
    }

    pub(super) fn calls(&self) -> Calls {
        self.calls
    }

    /// Does what can be done.
    pub(super) fn step(&mut self, now: Instant, scratch: &mut Scratch) -> Step {
        // Where calls block, nobody comes back in time to look again.
        if self.calls == Calls::Block && self.is_stuck(now) {
            self.be_stuck();
        }
        if !self.connected && self.writable {
            match self.socket.take_error() {
                Ok(None) => self.connected = true,
                Ok(Some(e)) | Err(e) => self.fail_to_connect(&e),
            }
        }
        if self.connected {
            // Both, as long as either has moved.
            while !self.over && (self.send(now) | self.receive(now, scratch)) {}
        }
        if !self.over && self.leave_at.is_some_and(|at| now >= at) {
            self.leave();
        }
        if !self.over && self.is_stuck(now) {
            self.be_stuck();
        }
        if self.over { Step::Over } else { self.wait(now) }
    }

    fn wait(&self, now: Instant) -> Step {
        if !self.connected {
            return Step::Wait { read: false, write: true, until: None };
        }
        let reads = self.leave_at.is_none() && self.read_after.is_none_or(|at| now >= at);
        let writes = !self.sends_over
            && !self.awaits_continue
            && self.send_after.is_none_or(|at| now >= at)
            && self.out_at < self.out.len();
        let until = [self.send_after, self.read_after, self.leave_at];
        let until = until.into_iter().flatten().filter(|&at| at > now).min();
        Step::Wait { read: reads, write: writes, until }
    }

    // ── sending ──────────────────────────────────────────────────────────────────────────────────

    /// Whether anything moved.
    fn send(&mut self, now: Instant) -> bool {
        if self.sends_over || self.send_after.is_some_and(|at| now < at) {
            return false;
        }
        self.send_after = None;
        if self.awaits_continue {
            let seen = self.response.as_ref().map_or(0, Wire::position);
            if seen < CONTINUE.len() as u64 {
                return false;
            }
            self.awaits_continue = false;
        }
        if self.out_at == self.out.len() && !self.refill() {
            return false;
        }
        let left = match self.script.leaving {
            Some(Leaving { when: When::Sent(limit, pause), .. }) => {
                let left = limit - self.sent;
                if left == 0 {
                    self.sends_over = true;
                    self.leave_at = Some(now + pause);
                    return true;
                }
                usize::try_from(left).unwrap_or(usize::MAX)
            }
            _ => usize::MAX,
        };
        let stop = self.stops.front().map_or(self.out.len(), |&(at, _)| at);
        let end = stop.min(self.out_at.saturating_add(left));
        match self.try_send(end) {
            Ok(n) => {
                self.moved_at = now;
                self.out_at += n;
                self.sent += n as u64;
                if self.out_at == stop
                    && let Some((_, stop)) = self.stops.pop_front()
                {
                    match stop {
                        Stop::Pause(pause) if pause.is_zero() => {}
                        Stop::Pause(pause) => self.send_after = Some(now + pause),
                        Stop::Continue => self.awaits_continue = true,
                    }
                }
                true
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => false,
            Err(e) => {
                // What was received before is still to be read, and tells more.
                (self.send_failed, self.sends_over) = (Some(e.kind()), true);
                // A connection that is reset has no peer any more.
                self.met_reset =
                    e.kind() == ErrorKind::ConnectionReset && self.socket.peer_addr().is_ok();
                true
            }
        }
    }

    fn try_send(&self, end: usize) -> io::Result<usize> {
        let wait =
            if self.calls == Calls::Block { MsgFlags::empty() } else { MsgFlags::MSG_DONTWAIT };
        let bytes = &self.out[self.out_at..end];
        retry(|| Ok(send(self.socket.as_raw_fd(), bytes, wait | MsgFlags::MSG_NOSIGNAL)?))
    }

    /// Makes more bytes, if it is time for them.
    fn refill(&mut self) -> bool {
        self.out.clear();
        self.out_at = 0;
        self.stops.clear();
        if let Some(upload) = &mut self.upload {
            upload.fill(&mut self.out, PIECE);
            if upload.is_done() {
                self.upload = None;
            }
            return true;
        }
        let sending = self.script.sending;
        while self.begun < self.script.requests.len()
            && (sending.ahead || self.begun == self.answered)
        {
            self.begin();
            if !(sending.ahead && sending.together) || self.upload.is_some() {
                break;
            }
        }
        if let Some((piece, pause)) = sending.pieces {
            self.stops.clear();
            let ends = (1..).map(|n| n * piece).take_while(|&at| at < self.out.len());
            self.stops.extend(ends.map(|at| (at, Stop::Pause(pause))));
        }
        if self.out.is_empty() && self.script.half_close && self.begun > self.answered {
            self.sends_over = true;
            // Where that fails, the connection is broken, and reading will tell.
            self.socket.shutdown(Shutdown::Write).ok();
        }
        !self.out.is_empty()
    }

    /// Puts the next request's first bytes into `out`.
    fn begin(&mut self) {
        let spec = self.script.requests[self.begun];
        let from = self.out.len();
        let mut wire = Wire::request(self.shared.key, &spec);
        wire.fill(&mut self.out, PIECE);
        if spec.upload.is_some() {
            let head = from + spec.request_head(self.shared.key).len();
            if spec.expects {
                self.stops.push_back((head, Stop::Continue));
            } else if let Some(pause) = self.script.sending.body_apart {
                self.stops.push_back((head, Stop::Pause(pause)));
            }
        }
        self.upload = (!wire.is_done()).then_some(wire);
        self.begun += 1;
    }

    // ── receiving ────────────────────────────────────────────────────────────────────────────────

    /// Whether anything moved.
    fn receive(&mut self, now: Instant, scratch: &mut Scratch) -> bool {
        if self.over
            || !self.readable
            || self.leave_at.is_some()
            || self.read_after.is_some_and(|at| now < at)
        {
            return false;
        }
        self.read_after = None;
        let reading = self.script.reading;
        let size = reading.size.min(scratch.bytes.len());
        let mut looked = 0;
        let peeked = match reading.peek.map(|n| n.min(size)) {
            Some(n) => self.try_receive(&mut scratch.peeked[..n], MsgFlags::MSG_PEEK),
            None => Ok(0),
        };
        // A look that has failed has consumed the error: reading would not report it any more.
        let result = peeked.and_then(|n| {
            looked = n;
            self.try_receive(&mut scratch.bytes[..size], MsgFlags::empty())
        });
        if self.calls != Calls::UntilEmpty {
            self.readable = false;
        }
        match result {
            Ok(n) => {
                self.moved_at = now;
                let bytes = &scratch.bytes[..n];
                if bytes.get(..looked) != Some(&scratch.peeked[..looked]) {
                    self.mismatch(Wrong::new(Kind::Mismatch, "MSG_PEEK showed other bytes"));
                    return true;
                }
                if n == 0 {
                    self.ended(Ended::InOrder);
                    return true;
                }
                // A short read has emptied the queue; what comes later is another event.
                if n < size && !self.hung_up {
                    self.readable = false;
                }
                self.read_after = reading.pause.map(|pause| now + pause);
                self.take(bytes, now);
                true
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                self.readable = false;
                false
            }
            Err(_) => {
                self.moved_at = now;
                self.ended(Ended::Reset);
                true
            }
        }
    }

    fn try_receive(&self, buffer: &mut [u8], flags: MsgFlags) -> io::Result<usize> {
        // After a level-triggered event even a blocking read returns at once, and does so here.
        let wait = if self.calls == Calls::UntilEmpty && !self.nonblocking {
            MsgFlags::MSG_DONTWAIT
        } else {
            MsgFlags::empty()
        };
        retry(|| Ok(recv(self.socket.as_raw_fd(), buffer, flags | wait)?))
    }

    fn take(&mut self, mut bytes: &[u8], now: Instant) {
        while !bytes.is_empty() && !self.over {
            if let Some(refusal) = &mut self.refusal {
                refusal.extend_from_slice(bytes);
                return self.look_at_refusal(now);
            }
            if self.expects_end || self.answered >= self.begun {
                return self.surplus(bytes);
            }
            let spec = self.script.requests[self.answered];
            let response =
                self.response.get_or_insert_with(|| Wire::response(self.shared.key, &spec));
            let (n, difference) = match response.check(bytes) {
                Ok(n) => (n, None),
                Err(difference) => (difference.at, Some(difference)),
            };
            let (position, done) = (response.position(), response.is_done());
            self.received += n as u64;
            self.shared.judge.verified(n as u64);
            bytes = &bytes[n..];
            match difference {
                Some(difference) if position == STATUS_AT && bytes[0] == b'5' => {
                    drop(difference);
                    self.refusal = Some(b"HTTP/1.1 ".to_vec());
                    continue;
                }
                Some(difference) => return self.differ(&spec, difference, bytes),
                None => {}
            }
            if let End::Mid(_, at) = spec.end
                // Up to there it may still turn out to be a refusal.
                && position > u64::from(at).max(STATUS_AT)
            {
                let what = "more of the response than its origin has sent";
                return self.mismatch(Wrong::new(Kind::Mismatch, what));
            }
            if let Some(Leaving { when: When::Received(limit), .. }) = self.script.leaving
                && self.received >= limit
            {
                return self.leave();
            }
            if done {
                self.complete(&spec, now);
            }
        }
    }

    /// The response is complete.
    fn complete(&mut self, spec: &Spec, now: Instant) {
        self.response = None;
        self.received = 0;
        self.exchange_began = now;
        if spec.ends_by_close() {
            (self.expects_end, self.end_completes) = (true, true);
            // An origin that answered early still waits for the rest of the request.
            self.sends_over = !spec.early;
            return;
        }
        self.judge_one(if self.send_failed.is_none() {
            Outcome::Verified
        } else {
            Outcome::Allowed("a send met an origin's reset; the request was answered all the same")
        });
        if self.send_failed.is_some() {
            // As any client does whose call has failed.
            self.over = true;
        } else if spec.early {
            // How far the request had come decides whether the connection carries on.
            self.over = true;
        } else if !spec.persists() {
            (self.expects_end, self.sends_over) = (true, true);
            if !self.script.half_close {
                // Closing first or reading to the end is the client's choice; half do this, half
                // that, by the number of the request.
                self.over = spec.id.seq % 8 == 7;
            }
        } else if self.answered < self.script.requests.len() {
            let think = self.script.sending.think;
            if !think.is_zero() {
                self.send_after = Some(now + think);
            }
            return;
        } else if self.script.half_close {
            self.expects_end = true;
        } else {
            self.over = true;
        }
        if self.over {
            self.cancel_rest();
        }
    }

    /// The other side has ended the connection.
    fn ended(&mut self, how: Ended) {
        // A send that was told of a reset has kept it from the read. EPIPE says that an orderly end
        // came before the reset.
        let how = match self.send_failed {
            None | Some(ErrorKind::BrokenPipe) => how,
            Some(_) => Ended::Reset,
        };
        if self.expects_end {
            match (how, self.end_completes) {
                (Ended::InOrder, true) => self.judge_one(Outcome::Verified),
                (Ended::InOrder, false) => {}
                (Ended::Reset, true) => {
                    let what = "a reset where an orderly end completes the response";
                    self.judge_one(Outcome::Failed(Wrong::new(Kind::Lost, what)));
                }
                (Ended::Reset, false) => {
                    let what = "a reset where the connection had to end in order";
                    self.note(Wrong::new(Kind::EofMissing, what));
                }
            }
        } else if self.answered < self.script.requests.len() {
            let outcome = self.interrupted(how);
            self.judge_one(outcome);
        } else {
            self.note(Wrong::new(Kind::Lost, "the connection ended unasked"));
        }
        self.cancel_rest();
        self.over = true;
    }

    /// What to think of an end in the middle of an exchange.
    fn interrupted(&self, how: Ended) -> Outcome {
        let spec = &self.script.requests[self.answered];
        let position = self.response.as_ref().map_or(0, Wire::position);
        let runs = self.shared.ledger.runs(spec.id);
        match (how, spec.end) {
            (Ended::Reset, End::Mid(_, at)) if position <= at.into() && runs > 0 => {
                Outcome::Allowed("the origin died in the middle of the response")
            }
            // The broker works ahead of a slow reader, and a reset discards what was not sent yet.
            (Ended::Reset, _) if self.died_behind() => {
                Outcome::Allowed("a reset for a later response took the end of this one")
            }
            // The kernel sent it to an origin's socket that was just being reset. The call has said so;
            // the broker does not know how much of it was sent, and ends the connection.
            (Ended::Reset, _) if position == 0 && runs == 0 && self.met_reset => {
                Outcome::Allowed("a send met an origin's reset")
            }
            // The broker's refusal is lost if the client does not stop sending.
            (Ended::Reset, _)
                if position == 0
                    && (self.upload.is_some() || self.send_failed.is_some())
                    && !spec.method.is_idempotent()
                    && self.may_have_met_an_end(spec) =>
            {
                Outcome::Allowed("a POST met a closed idle socket while it was being sent")
            }
            _ => {
                let how = match how {
                    Ended::InOrder => "an orderly end",
                    Ended::Reset => "a reset",
                };
                let of =
                    if self.refusal.is_some() { "the broker's refusal" } else { "the response" };
                let mut what = format!("{how} after {position} bytes of {of}; it ran {runs} times");
                if let Some(error) = self.send_failed {
                    write!(what, "; sending it failed: {error}").ok();
                }
                for next in &self.script.requests[self.answered + 1..] {
                    let runs = self.shared.ledger.runs(next.id);
                    write!(what, "; {} behind it ran {runs} times", next.request_line()).ok();
                }
                Outcome::Failed(Wrong::new(Kind::Lost, what))
            }
        }
    }

    /// Whether the origin of a pipelined request behind this one has died in its response.
    fn died_behind(&self) -> bool {
        self.script.requests[self.answered + 1..]
            .iter()
            .any(|next| matches!(next.end, End::Mid(..)) && self.shared.ledger.runs(next.id) > 0)
    }

    fn look_at_refusal(&mut self, now: Instant) {
        let Some(refusal) = &self.refusal else { return };
        let text = String::from_utf8_lossy(refusal).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            if refusal.len() > REFUSAL_MAX {
                self.surplus(text.as_bytes());
            }
            return;
        };
        let spec = self.script.requests[self.answered];
        let field =
            |name: &str| head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        let length = match spec.method {
            super::spec::Method::Head => 0,
            _ => field("Content-Length").and_then(|length| length.parse().ok()).unwrap_or(0),
        };
        if body.len() < length {
            return;
        }
        let reason = field("x-broker-unavailable").or(field("x-broker-overloaded"));
        let outcome = self.refused(&spec, reason.unwrap_or(head));
        self.judge_one(outcome);
        self.refusal = None;
        self.response = None;
        self.exchange_began = now;
        (self.expects_end, self.sends_over) = (true, true);
        if body.len() > length {
            self.surplus(&body.as_bytes()[length..]);
        }
    }

    /// What to think of an answer that is the broker's own.
    fn refused(&self, spec: &Spec, reason: &str) -> Outcome {
        let runs = self.shared.ledger.runs(spec.id);
        if matches!(reason, "origin_failed" | "no_response") {
            match spec.end {
                End::Mid(..) if runs > 0 => {
                    return Outcome::Allowed("the origin died in the middle of the response");
                }
                End::Before(_) if runs == 1 && !spec.method.is_idempotent() => {
                    return Outcome::Allowed("the origin died instead of a response to a POST");
                }
                _ if self.may_have_met_an_end(spec) => {
                    return Outcome::Allowed(if spec.method.is_idempotent() {
                        "a request met closed idle sockets only"
                    } else {
                        "a POST met a closed idle socket"
                    });
                }
                _ => {}
            }
        }
        let what = format!("refused: {reason}; it ran {runs} times");
        Outcome::Failed(Wrong::new(Kind::Lost, what))
    }

    /// Whether the request can have failed because all sockets on which it was tried were ended by
    /// their origin at that moment.
    fn may_have_met_an_end(&self, spec: &Spec) -> bool {
        let runs = self.shared.ledger.runs(spec.id).into();
        let ends = self.shared.ledger.ends_since(self.service, self.exchange_began);
        if spec.method.is_idempotent() {
            // Where it ran, the origin died on purpose.
            let died = if matches!(spec.end, End::Before(_)) { runs } else { 0 };
            died == runs && ends + died >= ATTEMPTS
        } else {
            runs == 0 && ends > 0
        }
    }

    // ── judging ──────────────────────────────────────────────────────────────────────────────────

    /// Judges the exchange whose turn it is.
    fn judge_one(&mut self, outcome: Outcome) {
        let spec = &self.script.requests[self.answered];
        let outcome = match outcome {
            Outcome::Verified => self.verified(spec),
            outcome => outcome,
        };
        self.shared.judge.exchange(self.script.mode, spec, outcome);
        self.answered += 1;
    }

    /// A complete response proves that the request ran.
    fn verified(&self, spec: &Spec) -> Outcome {
        let runs = self.shared.ledger.runs(spec.id);
        if runs > 1 && spec.method.is_idempotent() {
            self.shared.judge.count(|report| report.repeated += 1);
        }
        match spec.end {
            _ if runs == 0 => {
                Outcome::Failed(Wrong::new(Kind::Mismatch, "a response, but it never ran"))
            }
            End::Before(_) if runs == 1 => Outcome::Failed(Wrong::new(
                Kind::Mismatch,
                "a response, but its origin has died instead of sending it",
            )),
            _ => Outcome::Verified,
        }
    }

    fn cancel_rest(&mut self) {
        while let Some(spec) = self.script.requests.get(self.answered) {
            self.shared.judge.exchange(self.script.mode, spec, Outcome::Cancelled);
            self.answered += 1;
        }
    }

    /// Something is wrong after the exchange that came last.
    fn note(&self, wrong: Wrong) {
        let last = self.answered.saturating_sub(1).min(self.script.requests.len() - 1);
        let spec = &self.script.requests[last];
        self.shared.judge.fail("client", self.script.mode.name(), spec, wrong);
    }

    fn differ(&mut self, spec: &Spec, difference: Difference, got: &[u8]) {
        let mut before = spec.response_head(self.shared.key);
        before.truncate(usize::try_from(difference.position).unwrap_or(usize::MAX));
        let got = self.and_more(got);
        let wrong = Wrong::difference(self.shared.key, spec.id, difference, &before, &got);
        self.mismatch(wrong);
    }

    fn surplus(&mut self, bytes: &[u8]) {
        let last = self.answered.saturating_sub(1).min(self.script.requests.len() - 1);
        let id = self.script.requests[last].id;
        let got = self.and_more(bytes);
        self.shared.judge.count(|report| report.bytes_after_eof += u64::from(self.expects_end));
        let wrong = Wrong::surplus(self.shared.key, id, "bytes after the response", &got);
        if self.end_completes {
            return self.mismatch(wrong);
        }
        self.note(wrong);
        self.cancel_rest();
        self.over = true;
    }

    /// The exchange has failed, and nothing more can be said of the connection.
    fn mismatch(&mut self, wrong: Wrong) {
        if self.answered < self.script.requests.len() {
            self.judge_one(Outcome::Failed(wrong));
        } else {
            self.note(wrong);
        }
        self.cancel_rest();
        self.over = true;
    }

    /// Bytes that are wrong, with those that follow at once: more of them tell more.
    fn and_more(&self, bytes: &[u8]) -> Vec<u8> {
        let mut all = bytes.to_vec();
        let mut more = [0; 1024];
        while all.len() < 4096
            && let Ok(n @ 1..) = recv(self.socket.as_raw_fd(), &mut more, MsgFlags::MSG_DONTWAIT)
        {
            all.extend_from_slice(&more[..n]);
        }
        all
    }

    fn leave(&mut self) {
        if let Some(Leaving { how: How::Rst, .. }) = self.script.leaving {
            // Without it closing is a FIN.
            self.socket.set_linger(Some(Duration::ZERO)).ok();
        }
        if self.answered < self.script.requests.len() {
            self.judge_one(Outcome::Abandoned);
        }
        self.cancel_rest();
        self.over = true;
    }

    fn is_stuck(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.moved_at) >= self.shared.patience
    }

    fn be_stuck(&mut self) {
        let what = format!(
            "nothing has moved; {} of {} requests begun, {} answered, at byte {} of the response, \
             {} bytes unsent, the send failed: {:?}, the end expected: {}",
            self.begun,
            self.script.requests.len(),
            self.answered,
            self.response.as_ref().map_or(0, Wire::position),
            self.out.len() - self.out_at,
            self.send_failed,
            self.expects_end
        );
        self.mismatch(Wrong::new(Kind::Stuck, what));
    }

    fn fail_to_connect(&mut self, error: &io::Error) {
        self.mismatch(Wrong::new(Kind::Lost, format!("connect: {error}")));
    }
}

impl AsFd for Session<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
