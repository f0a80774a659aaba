//! The event loop of the load generator.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use broker::clock;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::connection::{CROSSTALK, Connection, Step, kind};
use super::{Mode, Plan, Report};

/// How often time-outs are looked for and progress is told.
const TICK: Duration = Duration::from_millis(100);
/// Pause of a client whose request has failed, lest a dead server make us spin.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(20);
/// What epoll says when SIGTERM has come; the other events are indices of clients.
const ENOUGH: u64 = u64::MAX;

/// Carries out a plan in this process, in which SIGTERM is no longer its end but that of the plan.
pub fn generate(plan: &Plan) -> Result<Report> {
    ensure!(!plan.targets.is_empty(), "no targets");
    let enough = SigSet::from(Signal::SIGTERM);
    enough.thread_block()?;
    let enough = SignalFd::with_flags(&enough, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let progress = plan.progress.as_ref().map(File::create).transpose()?;
    let started = clock::now();
    let mut engine = Engine {
        plan,
        epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
        slots: (0..plan.clients).map(|_| Slot::default()).collect(),
        buffer: vec![0; 256 << 10],
        // Ids of different runs differ too.
        next_id: u64::from(std::process::id()) << 40 | u64::from(started.elapsed().subsec_nanos()),
        issued: 0,
        finished: 0,
        stop_at: plan.duration.map(|duration| started + duration),
        latencies_us: Vec::new(),
        answered_at: None,
        report: Report::default(),
    };
    engine.epoll.add(&enough, EpollEvent::new(EpollFlags::EPOLLIN, ENOUGH))?;
    engine.run(&enough, progress.as_ref())?;
    engine.report.elapsed = started.elapsed();
    engine.summarise();
    Ok(engine.report)
}

struct Engine<'a> {
    plan: &'a Plan,
    epoll: Epoll,
    slots: Vec<Slot>,
    buffer: Vec<u8>,
    next_id: u64,
    /// Requests begun.
    issued: u64,
    /// Requests that came to an end, good or bad.
    finished: u64,
    stop_at: Option<Instant>,
    latencies_us: Vec<u32>,
    /// The last time that a request was answered as it should be.
    answered_at: Option<Instant>,
    report: Report,
}

/// One client.
#[derive(Debug, Default)]
struct Slot {
    connection: Option<Connection>,
    /// What epoll was asked to watch.
    watched: Option<EpollFlags>,
    /// The response was counted; only the end of the connection is awaited.
    counted: bool,
    /// When a client that pauses goes on.
    resume_at: Option<Instant>,
    /// There is nothing more for it to do.
    retired: bool,
}

impl Engine<'_> {
    fn run(&mut self, enough: &SignalFd, progress: Option<&File>) -> Result<()> {
        let mut now = clock::now();
        for index in 0..self.slots.len() {
            self.begin(index, now);
        }
        let mut events = vec![EpollEvent::empty(); 512];
        let mut next_tick = now + TICK;
        while self.slots.iter().any(|slot| !slot.retired) {
            let wait = next_tick.saturating_duration_since(clock::now());
            let timeout = EpollTimeout::try_from(wait.as_millis()).unwrap_or(EpollTimeout::ZERO);
            let n = match self.epoll.wait(&mut events, timeout) {
                Ok(n) => n,
                Err(nix::errno::Errno::EINTR) => 0,
                Err(e) => return Err(e).context("epoll_wait"),
            };
            now = clock::now();
            for event in &events[..n] {
                if event.data() == ENOUGH {
                    enough.read_signal()?;
                    self.stop_at = Some(now);
                } else {
                    self.advance(usize::try_from(event.data())?);
                }
            }
            now = clock::now();
            if now >= next_tick {
                next_tick = now + TICK;
                self.tick(now);
                if let Some(file) = progress {
                    file.write_all_at(format!("{:<20}", self.finished).as_bytes(), 0)?;
                }
            }
        }
        Ok(())
    }

    /// Whether another request is to be begun.
    fn more(&self, now: Instant) -> bool {
        self.plan.requests.is_none_or(|all| self.issued < all)
            && self.stop_at.is_none_or(|end| now < end)
    }

    /// Begins the next request of a client.
    fn begin(&mut self, index: usize, now: Instant) {
        if !self.more(now) {
            self.close(index);
            self.slots[index].retired = true;
            return;
        }
        let target = usize::try_from(self.issued).unwrap_or(0) % self.plan.targets.len();
        self.issued += 1;
        self.next_id += 1;
        if self.slots[index].connection.is_none() {
            match Connection::open(self.plan.targets[target], self.plan.mode, now) {
                Ok(connection) => self.slots[index].connection = Some(connection),
                Err(e) => return self.fail(index, kind(&e, "connect"), now),
            }
        }
        let slot = &mut self.slots[index];
        slot.counted = false;
        if let Some(connection) = &mut slot.connection {
            connection.ask(self.next_id, &self.plan.path, self.plan.body, now);
        }
        self.advance(index);
    }

    /// Lets a client go on.
    fn advance(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        let Some(connection) = &mut slot.connection else { return };
        match connection.advance(&mut self.buffer) {
            Step::WaitRead => self.watch(index, EpollFlags::EPOLLIN),
            Step::WaitWrite => self.watch(index, EpollFlags::EPOLLOUT),
            Step::Answered => {
                self.count(index);
                self.watch(index, EpollFlags::EPOLLIN);
            }
            Step::Done => {
                self.count(index);
                if self.plan.mode != Mode::KeepAlive {
                    self.close(index);
                }
                self.begin(index, clock::now());
            }
            Step::Failed(why) => self.fail(index, why, clock::now()),
        }
    }

    fn watch(&mut self, index: usize, flags: EpollFlags) {
        let slot = &mut self.slots[index];
        let Some(connection) = &slot.connection else { return };
        if slot.watched == Some(flags) {
            return;
        }
        let mut event = EpollEvent::new(flags, index as u64);
        let outcome = if slot.watched.is_none() {
            self.epoll.add(&connection.socket, event)
        } else {
            self.epoll.modify(&connection.socket, &mut event)
        };
        slot.watched = Some(flags);
        if outcome.is_err() {
            self.fail(index, "epoll", clock::now());
        }
    }

    /// Counts a complete response, once.
    fn count(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        if std::mem::replace(&mut slot.counted, true) {
            return;
        }
        let Some(connection) = &slot.connection else { return };
        let now = clock::now();
        let took = now.saturating_duration_since(connection.started);
        self.latencies_us.push(u32::try_from(took.as_micros()).unwrap_or(u32::MAX));
        self.pause_ends(now);
        self.answered_at = Some(now);
        self.finished += 1;
        self.report.requests += 1;
    }

    /// Takes note of the time that has passed without an answer. Clients that have nothing more to
    /// ask make no pause.
    fn pause_ends(&mut self, now: Instant) {
        let end = self.stop_at.map_or(now, |stop| now.min(stop));
        if let Some(last) = self.answered_at {
            let pause = end.saturating_duration_since(last);
            self.report.pause_max = self.report.pause_max.max(pause);
        }
    }

    /// Counts a failed request; its client goes on after a pause.
    fn fail(&mut self, index: usize, why: &'static str, now: Instant) {
        // A server that resets the connection after a complete response has done no harm to the
        // request; bytes beyond the response are another matter.
        let after = std::mem::replace(&mut self.slots[index].counted, true);
        if why == CROSSTALK {
            self.report.crosstalk += 1;
        }
        if !after || why == "bytes after the response" {
            *self.report.errors.entry(why.to_owned()).or_default() += 1;
            self.finished += u64::from(!after);
        }
        self.close(index);
        self.slots[index].resume_at = Some(now + PAUSE_AFTER_ERROR);
    }

    fn close(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        // Closing the only descriptor also takes it out of the epoll set.
        slot.connection = None;
        slot.watched = None;
    }

    /// Time-outs, and clients that have paused.
    fn tick(&mut self, now: Instant) {
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            if slot.resume_at.is_some_and(|at| now >= at) {
                slot.resume_at = None;
                self.begin(index, now);
            } else if let Some(connection) = &slot.connection
                && now.saturating_duration_since(connection.started) > self.plan.timeout
            {
                let why = if slot.counted { "not closed in time" } else { "timed out" };
                self.fail(index, why, now);
            }
        }
    }

    fn summarise(&mut self) {
        self.pause_ends(clock::now());
        self.latencies_us.sort_unstable();
        let at = |per_mille: usize| {
            let index = (self.latencies_us.len() * per_mille / 1000)
                .min(self.latencies_us.len().saturating_sub(1));
            self.latencies_us.get(index).copied().map_or(0, u64::from)
        };
        (self.report.p50_us, self.report.p99_us) = (at(500), at(990));
        self.report.p999_us = at(999);
        self.report.max_us = self.latencies_us.last().copied().map_or(0, u64::from);
    }
}
