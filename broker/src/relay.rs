//! Moving bytes through the daemon where no boundary is looked for: opaque services, upgraded
//! connections, and whatever could not be read with certainty.

use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::boundary::opaque::Quiet;
use crate::buffers::Buffers;
use crate::clock;
use crate::config::Timeouts;
use crate::net::Stream;
use crate::stats::ServiceMetrics;

/// How a tunnel ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelEnd {
    /// Both sides have ended their stream, and everything was delivered.
    Closed,
    /// The client has ended its stream in a state in which [`Quiet::holds`]; the origin was not
    /// told.
    Quiet,
    /// The client's connection broke, or it stalled.
    ClientBroke,
    /// The origin's connection broke, or it stalled.
    OriginBroke,
}

/// Two connections whose bytes pass unread.
pub struct Tunnel<'a> {
    /// The client's socket.
    pub client: &'a Stream,
    /// The origin's socket.
    pub origin: &'a Stream,
    /// Time limits.
    pub timeouts: &'a Timeouts,
    /// Where buffers come from; they are held only while bytes move.
    pub buffers: &'a Buffers,
    /// Counts the bytes.
    pub metrics: &'a ServiceMetrics,
}

/// Which way bytes flow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

/// What both directions of a tunnel know of each other.
struct Shared<'a> {
    /// When a byte last moved in either direction.
    last_byte: Cell<Instant>,
    client_ended: Cell<bool>,
    origin_ended: Cell<bool>,
    one_ended: Notify,
    quiet: Option<&'a RefCell<Quiet>>,
}

impl Tunnel<'_> {
    /// Moves bytes both ways, `first` of the client's before all others, until both sides have
    /// ended their stream. One side's end is passed on at once (half-close). With `quiet`, that
    /// is kept up to date, and the tunnel ends without telling the origin once it holds.
    pub async fn run(&self, first: &[u8], quiet: Option<&RefCell<Quiet>>) -> TunnelEnd {
        let shared = Shared {
            last_byte: Cell::new(clock::now()),
            client_ended: Cell::new(false),
            origin_ended: Cell::new(false),
            one_ended: Notify::new(),
            quiet,
        };
        let up = async {
            self.count(Direction::Up, first.len(), &shared);
            self.origin
                .send_all(first, self.timeouts.origin_stall)
                .await
                .map_err(|_broken| TunnelEnd::OriginBroke)?;
            self.copy(Direction::Up, &shared).await
        };
        match tokio::try_join!(up, self.copy(Direction::Down, &shared)) {
            Ok(_) => TunnelEnd::Closed,
            Err(end) => end,
        }
    }

    async fn copy(&self, direction: Direction, shared: &Shared<'_>) -> Result<(), TunnelEnd> {
        let (from, to, from_broke, to_broke, stall) = match direction {
            Direction::Up => (
                self.client,
                self.origin,
                TunnelEnd::ClientBroke,
                TunnelEnd::OriginBroke,
                self.timeouts.origin_stall,
            ),
            Direction::Down => (
                self.origin,
                self.client,
                TunnelEnd::OriginBroke,
                TunnelEnd::ClientBroke,
                self.timeouts.client_stall,
            ),
        };
        loop {
            self.readable(from, shared).await.map_err(|_broken| from_broke)?;
            let mut buffer = self.buffers.large();
            let n = match from.try_recv(&mut buffer) {
                Ok(n) => n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => continue,
                Err(_) => return Err(from_broke),
            };
            if n == 0 {
                return self.end(direction, shared);
            }
            self.count(direction, n, shared);
            to.send_all(&buffer[..n], stall).await.map_err(|_broken| to_broke)?;
            shared.last_byte.set(clock::now());
        }
    }

    fn count(&self, direction: Direction, n: usize, shared: &Shared<'_>) {
        shared.last_byte.set(clock::now());
        match direction {
            Direction::Up => self.metrics.request_bytes.add(n as u64),
            Direction::Down => self.metrics.response_bytes.add(n as u64),
        }
        if let Some(quiet) = shared.quiet {
            match direction {
                Direction::Up => quiet.borrow_mut().client_bytes(n),
                Direction::Down => quiet.borrow_mut().origin_bytes(n),
            }
        }
    }

    /// The stream that flows in `direction` has ended.
    fn end(&self, direction: Direction, shared: &Shared<'_>) -> Result<(), TunnelEnd> {
        match direction {
            Direction::Up => {
                shared.client_ended.set(true);
                if let Some(quiet) = shared.quiet {
                    quiet.borrow_mut().client_closed(true);
                    if quiet.borrow().holds() {
                        return Err(TunnelEnd::Quiet);
                    }
                }
                self.origin.shutdown();
            }
            Direction::Down => {
                shared.origin_ended.set(true);
                if let Some(quiet) = shared.quiet {
                    quiet.borrow_mut().origin_closed();
                }
                self.client.shutdown();
            }
        }
        shared.one_ended.notify_waiters();
        Ok(())
    }

    /// Waits for bytes from one side, as long as the tunnel as a whole is not idle for too long.
    async fn readable(&self, from: &Stream, shared: &Shared<'_>) -> io::Result<()> {
        loop {
            let limit = self.idle_limit(shared);
            let left = limit.saturating_sub(clock::now() - shared.last_byte.get());
            tokio::select! {
                biased;
                result = from.readable() => return result,
                // A new limit holds.
                () = shared.one_ended.notified() => {}
                // The other direction may have moved bytes meanwhile.
                () = tokio::time::sleep(left) => {
                    if clock::now() - shared.last_byte.get() >= limit {
                        return Err(ErrorKind::TimedOut.into());
                    }
                }
            }
        }
    }

    /// A side that is left alone must not hold the other's socket for as long as a living tunnel.
    fn idle_limit(&self, shared: &Shared<'_>) -> Duration {
        let timeouts = self.timeouts;
        if shared.origin_ended.get() {
            timeouts.client_stall.min(timeouts.tunnel_idle)
        } else if shared.client_ended.get() {
            timeouts.origin_stall.min(timeouts.tunnel_idle)
        } else {
            timeouts.tunnel_idle
        }
    }
}
