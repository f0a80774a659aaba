//! All the clients: most of them in a few event loops, some in a thread each.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use broker::clock;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::judge::{Outcome, Wrong};
use super::mode::Mode;
use super::random::Random;
use super::report::Kind;
use super::script::{Manners, Script};
use super::session::{Calls, Scratch, Session, Step};
use super::{Plan, Service, Shared};

/// Event loops.
const LOOPS: usize = 2;
/// Most clients with a thread of their own.
const THREADS_MAX: usize = 12;
/// How often sessions are looked at on which nothing happens.
const TICK: Duration = Duration::from_millis(500);
/// Pause of a client that could not connect.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(20);

/// A client: one connection after the other.
struct Client<'a> {
    shared: &'a Shared,
    plan: &'a Plan,
    number: u16,
    random: Random,
    modes: Vec<(Mode, u64)>,
}

/// Runs them all to their end.
pub(super) fn run(shared: &Shared, plan: &Plan) -> Result<()> {
    let modes: Vec<_> = Mode::WEIGHTS
        .into_iter()
        .filter(|(mode, _)| plan.only.is_empty() || plan.only.contains(mode))
        .collect();
    let client = |number| Client {
        shared,
        plan,
        number,
        random: Random::new(plan.seed, &[1, number.into()]),
        modes: modes.clone(),
    };
    let threads = (usize::from(plan.clients) / 8).clamp(1, THREADS_MAX);
    let (mut alone, mut in_loops) = (Vec::new(), vec![Vec::new(); LOOPS]);
    for number in 0..plan.clients {
        let index = usize::from(number);
        if index < threads {
            alone.push(number);
        } else {
            in_loops[index % LOOPS].push(number);
        }
    }
    thread::scope(|scope| -> Result<()> {
        for number in alone {
            thread::Builder::new()
                .name(format!("client-{number}"))
                .spawn_scoped(scope, move || client(number).run_alone())?;
        }
        let mut loops = Vec::new();
        for numbers in in_loops.into_iter().filter(|numbers| !numbers.is_empty()) {
            let clients: Vec<_> = numbers.into_iter().map(client).collect();
            let spawned = thread::Builder::new()
                .name("clients".into())
                .spawn_scoped(scope, move || Loop::new(clients)?.run())?;
            loops.push(spawned);
        }
        for spawned in loops {
            spawned.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(())
    })
}

impl<'a> Client<'a> {
    /// The next connection, unless it is time to stop.
    fn next(&mut self, now: Instant, calls: Calls) -> Option<Result<Session<'a>, ErrorKind>> {
        if self.shared.is_over(now) {
            return None;
        }
        let mode = self.random.weighted(&self.modes);
        let (service, to) = self.destination(mode);
        let manners = if self.plan.calm {
            Manners::Calm
        } else {
            Manners::Odd { uploads: self.plan.services[service].takes_uploads() }
        };
        let ask = || self.shared.ledger.ask(self.number);
        let script = Script::draw(mode, &mut self.random, manners, ask)?;
        let nonblocking = calls != Calls::Block && self.random.chance(600);
        let first = script.requests[0];
        let requests = script.requests.len();
        let session = Session::connect(self.shared, script, service, to, nonblocking, calls, now);
        self.shared.judge.count(|report| report.connections += 1);
        Some(session.map_err(|error| {
            // This machine is out of ports: nobody's fault, and nothing was sent.
            if error.kind() != ErrorKind::AddrNotAvailable {
                let wrong = Wrong::new(Kind::Lost, format!("connect: {error}"));
                self.shared.judge.exchange(mode, &first, Outcome::Failed(wrong));
            }
            self.shared.judge.count(|report| report.cancelled += requests as u64 - 1);
            error.kind()
        }))
    }

    fn destination(&mut self, mode: Mode) -> (usize, SocketAddr) {
        let services = self.plan.services.iter().enumerate();
        let meant: Vec<_> = services
            .filter(|(_, service)| service.modes.is_empty() || service.modes.contains(&mode))
            .collect();
        let place = usize::try_from(self.random.below(meant.len() as u64)).unwrap_or(0);
        let (service, Service { targets, .. }) = meant[place];
        (service, self.random.pick(targets))
    }

    /// In a thread of its own: waits in `recv()`, or in `poll()`.
    fn run_alone(mut self) {
        let mut scratch = Scratch::new();
        loop {
            let calls = self.random.pick(&[Calls::Block, Calls::Block, Calls::OnePerEvent]);
            match self.next(clock::now(), calls) {
                None => return,
                Some(Err(_)) => thread::sleep(PAUSE_AFTER_ERROR),
                Some(Ok(session)) => attend(session, &mut scratch),
            }
        }
    }
}

/// Stays with one session to its end.
fn attend(mut session: Session<'_>, scratch: &mut Scratch) {
    loop {
        let now = clock::now();
        let Step::Wait { read, write, until } = session.step(now, scratch) else { return };
        let left = until.map(|at| at.saturating_duration_since(clock::now()));
        match (session.calls(), read, write, left) {
            (_, false, false, Some(left)) => thread::sleep(left),
            // The next step waits in the call.
            (Calls::Block, true, false, None) => session.readable = true,
            _ => {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::POLLIN, read);
                flags.set(PollFlags::POLLOUT, write);
                let mut fds = [PollFd::new(std::os::fd::AsFd::as_fd(&session), flags)];
                let limit = left.unwrap_or(TICK).min(TICK);
                let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::ZERO);
                // A failure is an interruption.
                poll(&mut fds, limit).ok();
                let happened = fds[0].revents().unwrap_or(PollFlags::empty());
                let broken = happened.intersects(PollFlags::POLLERR | PollFlags::POLLHUP);
                session.readable = happened.contains(PollFlags::POLLIN) || broken && read;
                session.writable = happened.contains(PollFlags::POLLOUT) || broken;
            }
        }
    }
}

/// An event loop with its clients.
struct Loop<'a> {
    epoll: Epoll,
    slots: Vec<Slot<'a>>,
    timers: BinaryHeap<Reverse<(Instant, usize)>>,
    scratch: Scratch,
}

/// A client in a loop.
struct Slot<'a> {
    client: Client<'a>,
    session: Option<Session<'a>>,
    /// What epoll was asked to watch.
    watched: Option<EpollFlags>,
    /// When the loop looks again, whatever happens.
    due: Option<Instant>,
    retired: bool,
}

impl<'a> Loop<'a> {
    fn new(clients: Vec<Client<'a>>) -> Result<Self> {
        let slots = clients.into_iter().map(|client| Slot {
            client,
            session: None,
            watched: None,
            due: None,
            retired: false,
        });
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            slots: slots.collect(),
            timers: BinaryHeap::new(),
            scratch: Scratch::new(),
        })
    }

    fn run(&mut self) -> Result<()> {
        let mut now = clock::now();
        for index in 0..self.slots.len() {
            self.advance(index, now)?;
        }
        let mut events = vec![EpollEvent::empty(); 256];
        let mut next_tick = now + TICK;
        while !self.slots.iter().all(|slot| slot.retired) {
            let until = self.timers.peek().map_or(next_tick, |Reverse((at, _))| next_tick.min(*at));
            let wait = until.saturating_duration_since(now);
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
                if let Some(session) = &mut self.slots[index].session {
                    let happened = event.events();
                    let hung_up =
                        EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR;
                    session.hung_up |= happened.intersects(hung_up);
                    session.readable |= happened.intersects(hung_up | EpollFlags::EPOLLIN);
                    session.writable |= happened.intersects(
                        EpollFlags::EPOLLOUT | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR,
                    );
                    self.advance(index, now)?;
                }
            }
            while let Some(&Reverse((at, index))) = self.timers.peek()
                && now >= at
            {
                self.timers.pop();
                if self.slots[index].due == Some(at) {
                    self.slots[index].due = None;
                    self.advance(index, now)?;
                }
            }
            if now >= next_tick {
                next_tick = now + TICK;
                for index in 0..self.slots.len() {
                    self.advance(index, now)?;
                }
            }
        }
        Ok(())
    }

    /// Goes on with a client until it has to wait.
    fn advance(&mut self, index: usize, now: Instant) -> Result<()> {
        // A few connections at most, so that the others have their turn.
        for _ in 0..4 {
            let slot = &mut self.slots[index];
            if slot.retired {
                return Ok(());
            }
            let Some(session) = &mut slot.session else {
                if slot.due.is_some_and(|at| now < at) {
                    return Ok(());
                }
                let calls = slot.client.random.pick(&[Calls::OnePerEvent, Calls::UntilEmpty]);
                match slot.client.next(now, calls) {
                    None => slot.retired = true,
                    Some(Ok(session)) => slot.session = Some(session),
                    Some(Err(_)) => {
                        self.wake_at(index, now + PAUSE_AFTER_ERROR);
                        return Ok(());
                    }
                }
                continue;
            };
            match session.step(now, &mut self.scratch) {
                Step::Over => {
                    // Closing the only descriptor also takes it out of the epoll set.
                    slot.session = None;
                    slot.watched = None;
                    slot.due = None;
                }
                Step::Wait { read, write, until } => {
                    self.watch(index, read, write)?;
                    if let Some(at) = until {
                        self.wake_at(index, at);
                    }
                    return Ok(());
                }
            }
        }
        self.wake_at(index, now);
        Ok(())
    }

    fn wake_at(&mut self, index: usize, at: Instant) {
        let slot = &mut self.slots[index];
        if slot.due != Some(at) {
            slot.due = Some(at);
            self.timers.push(Reverse((at, index)));
        }
    }

    fn watch(&mut self, index: usize, read: bool, write: bool) -> Result<()> {
        let slot = &mut self.slots[index];
        let Some(session) = &slot.session else { return Ok(()) };
        let wanted = if session.calls() == Calls::UntilEmpty {
            EpollFlags::EPOLLIN
                | EpollFlags::EPOLLOUT
                | EpollFlags::EPOLLRDHUP
                | EpollFlags::EPOLLET
        } else {
            let mut wanted = EpollFlags::empty();
            wanted.set(EpollFlags::EPOLLIN, read);
            wanted.set(EpollFlags::EPOLLOUT, write);
            wanted
        };
        if slot.watched != Some(wanted) {
            let mut event = EpollEvent::new(wanted, index as u64);
            if slot.watched.is_some() {
                self.epoll.modify(session, &mut event)?;
            } else {
                self.epoll.add(session, event)?;
            }
            slot.watched = Some(wanted);
        }
        Ok(())
    }
}
