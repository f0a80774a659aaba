//! The origins: event loops that do to each request what it asks for.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use broker::clock;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{MsgFlags, SockFlag, accept4, recv, send};
use socket2::{Domain, Protocol, Socket, Type};

use super::judge::Wrong;
use super::ledger::Run;
use super::random::Random;
use super::report::Kind;
use super::spec::{CONTINUE, End, How, Id, JUNK, POISON, Spec};
use super::wire::Wire;
use super::{Plan, Shared};
use crate::netns::Netns;

/// Event loops.
const LOOPS: usize = 2;
/// Bytes that are read or made at a time.
const PIECE: usize = 64 << 10;
/// Longest request head.
const HEAD_MAX: usize = 16 << 10;
/// How often a loop looks whether it is to stop.
const TICK: Duration = Duration::from_millis(50);
/// Pause between the pieces of a split head.
const SPLIT_PAUSE: Duration = Duration::from_millis(1);

/// Listening origins.
#[derive(Debug)]
pub(super) struct Origins {
    listeners: Vec<Listener>,
}

#[derive(Debug)]
struct Listener {
    service: usize,
    socket: Socket,
}

/// Origins at work.
pub(super) struct Serving<'scope> {
    stop: Arc<AtomicBool>,
    threads: Vec<ScopedJoinHandle<'scope, Result<()>>>,
}

impl Serving<'_> {
    /// Ends them and all their connections.
    pub(super) fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Origins {
    /// Listens at all addresses of the plan.
    pub(super) fn listen(netns: &Netns, plan: &Plan) -> Result<Self> {
        let listen = |address: SocketAddr| -> io::Result<Socket> {
            let kind = Type::STREAM.nonblocking().cloexec();
            let socket = Socket::new(Domain::for_address(address), kind, Some(Protocol::TCP))?;
            socket.set_reuse_address(true)?;
            // Accepted sockets inherit it.
            socket.set_tcp_nodelay(true)?;
            socket.bind(&address.into())?;
            socket.listen(4096)?;
            Ok(socket)
        };
        let listeners = netns.run(|| {
            let all = plan.services.iter().enumerate();
            let all =
                all.flat_map(|(index, service)| service.origins.iter().map(move |&o| (index, o)));
            all.map(|(service, address)| {
                let socket = listen(address).with_context(|| format!("origin at {address}"))?;
                Ok(Listener { service, socket })
            })
            .collect::<Result<_>>()
        })?;
        Ok(Self { listeners })
    }

    /// Serves in threads of `scope`.
    pub(super) fn serve<'scope, 'env>(
        self,
        scope: &'scope Scope<'scope, 'env>,
        shared: &'env Shared,
    ) -> Result<Serving<'scope>> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut by_loop: Vec<Vec<Listener>> = (0..LOOPS).map(|_| Vec::new()).collect();
        for (index, listener) in self.listeners.into_iter().enumerate() {
            by_loop[index % LOOPS].push(listener);
        }
        let threads = by_loop.into_iter().map(|listeners| {
            let stop = Arc::clone(&stop);
            let thread = thread::Builder::new().name("origins".into());
            Ok(thread.spawn_scoped(scope, move || Loop::new(shared, listeners)?.run(&stop))?)
        });
        let threads = threads.collect::<Result<_>>()?;
        Ok(Serving { stop, threads })
    }
}

struct Loop<'a> {
    shared: &'a Shared,
    epoll: Epoll,
    listeners: Vec<Listener>,
    /// At the positions after the listeners' in what epoll tells.
    connections: Vec<Option<Connection<'a>>>,
    free: Vec<usize>,
    timers: BinaryHeap<Reverse<(Instant, usize)>>,
    buffer: Vec<u8>,
}

impl<'a> Loop<'a> {
    fn new(shared: &'a Shared, listeners: Vec<Listener>) -> Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for (index, listener) in listeners.iter().enumerate() {
            epoll.add(&listener.socket, EpollEvent::new(EpollFlags::EPOLLIN, index as u64))?;
        }
        Ok(Self {
            shared,
            epoll,
            listeners,
            connections: Vec::new(),
            free: Vec::new(),
            timers: BinaryHeap::new(),
            buffer: vec![0; PIECE],
        })
    }

    fn run(&mut self, stop: &AtomicBool) -> Result<()> {
        let mut now = clock::now();
        let mut events = vec![EpollEvent::empty(); 256];
        while !stop.load(Ordering::Relaxed) {
            let wait = self
                .timers
                .peek()
                .map_or(TICK, |Reverse((at, _))| at.saturating_duration_since(now).min(TICK));
            // Rounded up: a timer must be due when the wait is over.
            let wait = wait.as_micros().div_ceil(1000);
            let timeout = EpollTimeout::try_from(wait).unwrap_or(EpollTimeout::ZERO);
            let n = match self.epoll.wait(&mut events, timeout) {
                Err(nix::Error::EINTR) => 0,
                result => result?,
            };
            now = clock::now();
            for event in &events[..n] {
                let index = usize::try_from(event.data())?;
                if index < self.listeners.len() {
                    self.accept(index, now)?;
                    continue;
                }
                let index = index - self.listeners.len();
                if let Some(connection) = &mut self.connections[index] {
                    let ended =
                        EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR;
                    connection.hung_up |= event.events().intersects(ended);
                    connection.readable |= event.events().intersects(ended | EpollFlags::EPOLLIN);
                    self.advance(index, now);
                }
            }
            while let Some(&Reverse((at, index))) = self.timers.peek()
                && now >= at
            {
                self.timers.pop();
                if self.connections[index].as_ref().is_some_and(|c| c.due == Some(at)) {
                    self.advance(index, now);
                }
            }
        }
        Ok(())
    }

    fn accept(&mut self, index: usize, now: Instant) -> Result<()> {
        loop {
            let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
            let listener = &self.listeners[index];
            let socket = match accept4(&listener.socket, flags) {
                Ok(socket) => socket,
                Err(nix::Error::EAGAIN) => return Ok(()),
                Err(nix::Error::ECONNABORTED | nix::Error::EINTR) => continue,
                Err(e) => return Err(e).context("accept"),
            };
            let connection = Connection::new(self.shared, listener.service, socket.into());
            let at = self.free.pop().unwrap_or_else(|| {
                self.connections.push(None);
                self.connections.len() - 1
            });
            let events = EpollFlags::EPOLLIN
                | EpollFlags::EPOLLOUT
                | EpollFlags::EPOLLRDHUP
                | EpollFlags::EPOLLET;
            let key = (self.listeners.len() + at) as u64;
            self.epoll.add(&connection.socket, EpollEvent::new(events, key))?;
            self.connections[at] = Some(connection);
            self.advance(at, now);
        }
    }

    fn advance(&mut self, index: usize, now: Instant) {
        let Some(connection) = &mut self.connections[index] else { return };
        let due = connection.due.take();
        if connection.advance(now, &mut self.buffer) {
            if let Some(at) = connection.due
                && connection.due != due
            {
                self.timers.push(Reverse((at, index)));
            }
        } else {
            // Closing the only descriptor also takes it out of the epoll set.
            self.connections[index] = None;
            self.free.push(index);
        }
    }
}

/// A connection of the broker's.
struct Connection<'a> {
    shared: &'a Shared,
    service: usize,
    socket: Socket,
    readable: bool,
    hung_up: bool,
    /// When to be called again, whatever happens.
    due: Option<Instant>,
    /// The beginning of a request head.
    head: Vec<u8>,
    exchange: Option<Exchange>,
    /// Ends then if there is no request before.
    idle_end: Option<(Instant, How)>,
    /// The next request gets junk.
    stray: bool,
}

/// A request whose head has come, and its response.
struct Exchange {
    spec: Spec,
    run: u8,
    /// What is to come of the request.
    upload: Option<Wire>,
    response: Wire,
    out: Vec<u8>,
    out_at: usize,
    /// Where in the response pauses are.
    cuts: VecDeque<u64>,
    /// The response goes on then.
    resume_at: Option<Instant>,
    /// What comes in the same segment as the end of the response.
    extra: &'static [u8],
    /// The origin was asked to close.
    asked_to_close: bool,
}

/// The connection is over.
struct Over;

impl<'a> Connection<'a> {
    fn new(shared: &'a Shared, service: usize, socket: Socket) -> Self {
        Self {
            shared,
            service,
            socket,
            // What is here already needs no event.
            readable: true,
            hung_up: false,
            due: None,
            head: Vec::new(),
            exchange: None,
            idle_end: None,
            stray: false,
        }
    }

    /// Does what can be done; whether there will be more to do.
    fn advance(&mut self, now: Instant, buffer: &mut [u8]) -> bool {
        // An idle connection ends although a request may be waiting on it: that is the point.
        if let Some((at, how)) = self.idle_end
            && now >= at
        {
            self.shared.ledger.end(self.service, now);
            return self.die::<()>(how).is_ok();
        }
        loop {
            match self.receive(now, buffer).and_then(|read| Ok(read | self.answer(now)?)) {
                Ok(true) => {}
                Ok(false) => return true,
                Err(Over) => return false,
            }
        }
    }

    /// Whether anything was read.
    fn receive(&mut self, now: Instant, buffer: &mut [u8]) -> Result<bool, Over> {
        if !self.readable {
            return Ok(false);
        }
        match retry(|| Ok(recv(self.socket.as_raw_fd(), buffer, MsgFlags::empty())?)) {
            Ok(0) => Err(Over),
            Ok(n) => {
                if n < buffer.len() && !self.hung_up {
                    self.readable = false;
                }
                self.take(&buffer[..n], now)?;
                Ok(true)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(false)
            }
            Err(_) => Err(Over),
        }
    }

    fn take(&mut self, mut bytes: &[u8], now: Instant) -> Result<(), Over> {
        while !bytes.is_empty() {
            // The rest of a request that was answered early may have the next one behind it.
            if let Some(exchange) = &self.exchange
                && exchange.is_complete()
            {
                let spec = exchange.spec;
                self.end(&spec, now)?;
            }
            let Some(exchange) = &mut self.exchange else {
                bytes = self.take_head(bytes, now)?;
                continue;
            };
            let (key, id) = (self.shared.key, exchange.spec.id);
            let Some(upload) = &mut exchange.upload else {
                let what = "bytes before the response to the request before was complete";
                return self.fail(Wrong::surplus(key, id, what, bytes));
            };
            match upload.check(bytes) {
                Ok(n) => {
                    self.shared.judge.verified(n as u64);
                    bytes = &bytes[n..];
                    if upload.is_done() {
                        exchange.upload = None;
                    }
                }
                Err(difference) => {
                    let got = &bytes[difference.at..];
                    let wrong = Wrong::difference(key, id, difference.clone(), b"", got);
                    return self.fail(wrong);
                }
            }
        }
        Ok(())
    }

    /// Takes what belongs to the head of the next request; gives back the rest.
    fn take_head<'b>(&mut self, bytes: &'b [u8], now: Instant) -> Result<&'b [u8], Over> {
        self.idle_end = None;
        if self.stray {
            self.shared.ledger.end(self.service, now);
            // To a client of the broker that has gone meanwhile, perhaps.
            send(self.socket.as_raw_fd(), JUNK, MsgFlags::MSG_NOSIGNAL).ok();
            return Err(Over);
        }
        let before = self.head.len();
        self.head.extend_from_slice(bytes);
        let from = before.saturating_sub(3);
        let Some(end) = self.head[from..].windows(4).position(|window| window == b"\r\n\r\n")
        else {
            if self.head.len() > HEAD_MAX {
                return self.fail_unread("a request head without an end");
            }
            return Ok(b"");
        };
        let end = from + end + 4;
        let rest = &bytes[end - before..];
        self.head.truncate(end);
        self.begin(now)?;
        self.head.clear();
        Ok(rest)
    }

    /// A request head is complete.
    fn begin(&mut self, now: Instant) -> Result<(), Over> {
        let line = self.head.split(|&byte| byte == b'\r').next().unwrap_or(b"");
        let Some(spec) = std::str::from_utf8(line).ok().and_then(Spec::read) else {
            return self.fail_unread("not a request of ours");
        };
        let key = self.shared.key;
        let verbatim = spec.request_head(key);
        if self.head != verbatim && self.head != spec.forwarded_head(key) {
            let at = super::body::differs(&self.head, &verbatim).err().unwrap_or(0);
            let mut wrong = Wrong::new(Kind::Mismatch, "another request head than was sent");
            wrong.offset = Some(at as u64);
            wrong.expected = verbatim[at.min(verbatim.len())..].to_vec();
            wrong.got = self.head[at.min(self.head.len())..].to_vec();
            return self.fail_at(&spec, wrong);
        }
        self.shared.judge.verified(self.head.len() as u64);
        let run = match self.shared.ledger.run(spec.id) {
            Run::Nth(run) => run,
            Run::Forbidden => {
                let wrong = Wrong::new(Kind::Duplicated, "a POST has come a second time");
                return self.fail_at(&spec, wrong);
            }
            Run::Unknown => {
                let wrong = Wrong::new(Kind::Mismatch, "a request that nobody has sent");
                return self.fail_at(&spec, wrong);
            }
        };
        let asked_to_close = self.head == verbatim && spec.forwarded_head(key) != verbatim;
        self.exchange = Some(Exchange::new(self.shared, spec, run, asked_to_close, now));
        Ok(())
    }

    /// Sends as much of the response as it is time for; whether that was anything.
    fn answer(&mut self, now: Instant) -> Result<bool, Over> {
        self.due = self.idle_end.map(|(at, _)| at);
        let Some(exchange) = &mut self.exchange else { return Ok(false) };
        let spec = exchange.spec;
        if spec.end.is_before(exchange.run) && exchange.upload.is_none() {
            let End::Before(how) = spec.end else { return Err(Over) };
            return self.die(how);
        }
        if exchange.out_at == exchange.out.len() {
            if let End::Mid(how, at) = spec.end
                && exchange.response.position() == u64::from(at)
            {
                return self.die(how);
            }
            if exchange.is_complete() {
                return self.end(&spec, now);
            }
            if exchange.response.is_done() {
                return Ok(false);
            }
            if let Some(at) = exchange.may_go_on(now) {
                self.due = Some(at);
                return Ok(false);
            }
            if !exchange.refill() {
                return Ok(false);
            }
        }
        let bytes = &exchange.out[exchange.out_at..];
        match retry(|| Ok(send(self.socket.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL)?)) {
            Ok(n) => {
                exchange.out_at += n;
                if exchange.out_at == exchange.out.len()
                    && exchange.cuts.front() == Some(&exchange.response.position())
                {
                    exchange.cuts.pop_front();
                    exchange.resume_at = Some(now + SPLIT_PAUSE);
                }
                Ok(true)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(_) => Err(Over),
        }
    }

    /// Request and response are complete.
    fn end(&mut self, spec: &Spec, now: Instant) -> Result<bool, Over> {
        let asked_to_close = self.exchange.take().is_some_and(|e| e.asked_to_close);
        if spec.ends_by_close() || asked_to_close {
            return Err(Over);
        }
        match spec.end {
            End::Announced => Err(Over),
            End::Quiet => {
                self.shared.ledger.end(self.service, now);
                Err(Over)
            }
            End::Stray => {
                self.stray = true;
                Ok(true)
            }
            End::Idle(how, ms) => {
                let at = now + Duration::from_millis(ms.into());
                self.idle_end = Some((at, how));
                self.due = Some(at);
                // Bytes that are here already come first.
                Ok(self.readable)
            }
            _ => Ok(true),
        }
    }

    fn die<T>(&self, how: How) -> Result<T, Over> {
        if how == How::Rst {
            // Without it closing is a FIN, or whatever the queues make of it.
            self.socket.set_linger(Some(Duration::ZERO)).ok();
        }
        Err(Over)
    }

    fn fail<T>(&self, wrong: Wrong) -> Result<T, Over> {
        match &self.exchange {
            Some(exchange) => self.fail_at(&exchange.spec, wrong),
            None => Err(Over),
        }
    }

    fn fail_at<T>(&self, spec: &Spec, wrong: Wrong) -> Result<T, Over> {
        self.shared.judge.fail("origin", "", spec, wrong);
        Err(Over)
    }

    fn fail_unread<T>(&self, what: &str) -> Result<T, Over> {
        let nobody = Id { client: u16::MAX, seq: u32::MAX };
        let wrong = Wrong::surplus(self.shared.key, nobody, what, &self.head);
        self.fail_at(&Spec::new(nobody), wrong)
    }
}

impl Exchange {
    fn new(shared: &Shared, spec: Spec, run: u8, asked_to_close: bool, now: Instant) -> Self {
        let mut random =
            Random::new(0, &[2, spec.id.client.into(), spec.id.seq.into(), run.into()]);
        let mut cuts: Vec<u64> = Vec::new();
        if spec.expects {
            cuts.push(CONTINUE.len() as u64);
        }
        if spec.split {
            let head = spec.response_head(shared.key).len() as u64;
            cuts.extend((0..random.within(1..=3)).map(|_| random.within(1..=head)));
            cuts.sort_unstable();
            cuts.dedup();
        }
        let delay = (spec.delay_ms > 0).then(|| Duration::from_millis(spec.delay_ms.into()));
        Self {
            spec,
            run,
            upload: Wire::upload(shared.key, &spec).filter(|upload| !upload.is_done()),
            response: Wire::response(shared.key, &spec),
            out: Vec::new(),
            out_at: 0,
            cuts: cuts.into(),
            resume_at: delay.map(|delay| now + delay),
            extra: match spec.end {
                End::Poison => POISON,
                End::Junk => JUNK,
                _ => b"",
            },
            asked_to_close,
        }
    }

    /// Whether all of the request has come and all of the response has gone.
    fn is_complete(&self) -> bool {
        self.upload.is_none() && self.response.is_done() && self.out_at == self.out.len()
    }

    /// When the response goes on, if not now.
    fn may_go_on(&mut self, now: Instant) -> Option<Instant> {
        let at = self.resume_at?;
        if now >= at {
            self.resume_at = None;
            return None;
        }
        Some(at)
    }

    /// Makes more of the response, if the request has come so far.
    fn refill(&mut self) -> bool {
        let position = self.response.position();
        let continues = self.spec.expects && position < CONTINUE.len() as u64;
        if self.upload.is_some() && !self.spec.early && !continues {
            return false;
        }
        let mut limit = PIECE as u64;
        if let Some(cut) = self.cuts.front() {
            limit = limit.min(cut - position);
        }
        if let End::Mid(_, at) = self.spec.end {
            limit = limit.min(u64::from(at) - position);
        }
        self.out.clear();
        self.out_at = 0;
        self.response.fill(&mut self.out, usize::try_from(limit).unwrap_or(PIECE));
        if self.response.is_done() {
            self.out.extend_from_slice(std::mem::take(&mut self.extra));
        }
        true
    }
}

impl End {
    /// Whether the origin dies instead of the response.
    fn is_before(self, run: u8) -> bool {
        matches!(self, Self::Before(_)) && run == 1
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
