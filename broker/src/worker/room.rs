//! Whether a worker has room for clients, and what becomes of those it has none for.
//!
//! Descriptors are the process's. Without any, accepting fails, and so does dialling: who waits is served
//! when others have left. Clients that the kernel sends here need not wait, as there is another way for
//! them: those to come are left alone, and those in the queue already are reset.

use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use crate::clock;
use crate::datapath::Datapath;
use crate::net::Stream;
use crate::seldom::Seldom;

/// A shortage that is over by then is nobody's concern.
const SHORT_MAX: Duration = Duration::from_millis(100);

/// So many descriptors must be free again before anybody is sent here: with one alone, the next client
/// would be the last.
const FREE_MIN: usize = 8;

/// The room that a worker has.
pub(super) struct Room {
    worker: usize,
    datapath: Arc<dyn Datapath>,
    /// Since when there has been none.
    short: Cell<Option<Instant>>,
    /// Kept for those who are turned away: without a descriptor nobody can be taken from a queue, not even
    /// to be reset. `None` while somebody else has got it.
    reserve: RefCell<Option<Socket>>,
    failures: Seldom,
    closed: Seldom,
    /// Whether the log says that clients are left alone.
    told: Cell<bool>,
}

impl Room {
    pub(super) fn new(worker: usize, datapath: Arc<dyn Datapath>) -> io::Result<Self> {
        Ok(Self {
            worker,
            datapath,
            short: Cell::default(),
            reserve: RefCell::new(Some(socket()?)),
            failures: Seldom::default(),
            closed: Seldom::default(),
            told: Cell::default(),
        })
    }

    /// Looks whether there is room, and tells the kernel: a heartbeat, or that nobody is to come.
    pub(super) fn tick(&self) -> io::Result<()> {
        if self.reserve.borrow().is_none() {
            self.reserve.replace(socket().ok());
        }
        // All workers notice by themselves, whichever of them needs a descriptor first.
        let wanted = if self.short.get().is_some() { FREE_MIN } else { 1 };
        let free: io::Result<Vec<_>> = (0..wanted).map(|_| socket()).collect();
        match free {
            Ok(_) if self.reserve.borrow().is_some() => self.short.set(None),
            _ => self.note_shortage(),
        }
        self.tell()
    }

    /// Takes note of a failure to accept. The kernel is told at once if it goes on.
    pub(super) fn accept_failed(&self, service: &str, error: &io::Error) {
        if let Some(failures) = self.failures.say(clock::now()) {
            tracing::warn!(service, %error, failures, "accept failed; pausing");
        }
        self.note_shortage();
        if self.is_closed() {
            // The next tick tells it again.
            self.tell().ok();
        }
    }

    /// Whether clients that have another way are to take it.
    pub(super) fn is_closed(&self) -> bool {
        let short = |since| clock::now().saturating_duration_since(since) >= SHORT_MAX;
        self.short.get().is_some_and(short)
    }

    /// Takes clients from a queue with the reserve, one by one, and has each of them end as `turn_away`
    /// says. Answers how many there were.
    pub(super) fn empty(
        &self,
        mut accept: impl FnMut() -> io::Result<Stream>,
        turn_away: impl Fn(Stream),
    ) -> u64 {
        let mut clients = 0;
        self.reserve.take();
        loop {
            match accept() {
                Ok(client) => {
                    turn_away(client);
                    clients += 1;
                }
                Err(e) if is_passing(&e) => {}
                // Nobody is left, or another thread has got the descriptor.
                Err(_) => break,
            }
        }
        self.reserve.replace(socket().ok());
        clients
    }

    fn note_shortage(&self) {
        if self.short.get().is_none() {
            self.short.set(Some(clock::now()));
        }
    }

    fn tell(&self) -> io::Result<()> {
        let closed = self.is_closed();
        if closed && !self.told.get() && self.closed.say(clock::now()).is_some() {
            tracing::warn!(
                worker = self.worker,
                "out of descriptors or memory: clients that would be intercepted go directly"
            );
            self.told.set(true);
        } else if !closed && self.told.take() {
            tracing::info!(worker = self.worker, "there is room for intercepted clients again");
        }
        if closed {
            self.datapath.leave_alone(self.worker)
        } else {
            self.datapath.heartbeat(self.worker)
        }
    }
}

/// Whether an error is only the one client's, which gave up while it was queued.
pub(super) fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted)
}

/// What a client's connection needs: a descriptor, and the kernel's memory.
fn socket() -> io::Result<Socket> {
    Socket::new(Domain::IPV4, Type::STREAM.cloexec(), None)
}
