//! Moving bytes through the daemon where no boundary is looked for: opaque services, upgraded
//! connections, and whatever could not be read with certainty.

use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::boundary::opaque::Quiet;
use crate::buffers::Buffers;
use crate::clock;
use crate::config::Timeouts;
use crate::net::{Queue, Stream};
use crate::stats::ServiceMetrics;

/// How a tunnel ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TunnelEnd {
    /// Both sides have ended their stream, and everything was delivered.
    Closed,
    /// The client has ended its stream, [`Quiet::holds`], and the origin has been silent for the
    /// settle time. It was not told.
    Quiet,
    /// [`Tunnel::ends_when_silent_for`] has passed.
    Silent,
    /// What the origin sent is not for this client, see [`Tunnel::expected`], which has got none of it.
    Unexpected,
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
    /// Is kept up to date, and ends the tunnel once it holds and the origin has been silent for
    /// that long.
    pub quiet: Option<(&'a RefCell<Quiet>, Duration)>,
    /// Ends the tunnel in order, where nobody else would.
    pub ends_when_silent_for: Option<Duration>,
    /// If the origin's socket has served others before, how what comes on it must begin: it may be left of
    /// an exchange of theirs. It is if it comes before the origin has any of this client's bytes.
    pub expected: Option<&'static [u8]>,
}

/// Which way bytes flow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

/// What both directions of a tunnel know of each other.
struct Shared {
    /// Bytes that the origin was sent before this tunnel's.
    origin_sent_before: u64,
    /// When a byte last moved in either direction.
    last_byte: Cell<Instant>,
    client_ended: Cell<bool>,
    origin_ended: Cell<bool>,
    one_ended: Notify,
    /// Bytes of the origin are on their way to the client.
    delivering: Cell<bool>,
}

impl Tunnel<'_> {
    /// Moves bytes both ways, `first` of the client's before all others, until both sides have
    /// ended their stream. One side's end is passed on at once (half-close).
    pub async fn run(&self, first: &[u8]) -> TunnelEnd {
        self.client.reset_if_killed();
        self.origin.reset_if_killed();
        let shared = Shared {
            origin_sent_before: self.origin.sent(),
            last_byte: Cell::new(clock::now()),
            client_ended: Cell::new(false),
            origin_ended: Cell::new(false),
            one_ended: Notify::new(),
            delivering: Cell::new(false),
        };
        let up = async {
            self.count(Direction::Up, first.len(), &shared);
            self.origin
                .send_all(first, self.timeouts.origin_stall)
                .await
                .map_err(|_broken| TunnelEnd::OriginBroke)?;
            self.copy(Direction::Up, &shared).await
        };
        let both = async { tokio::try_join!(up, self.copy(Direction::Down, &shared)) };
        tokio::select! {
            biased;
            result = both => result.err().unwrap_or(TunnelEnd::Closed),
            // Also after it has ended its side, when nobody reads from it any more.
            () = self.client.reset() => TunnelEnd::ClientBroke,
        }
    }

    async fn copy(&self, direction: Direction, shared: &Shared) -> Result<(), TunnelEnd> {
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
        let mut expected = self.expected.filter(|_| direction == Direction::Down);
        // How much of that has come. It is not passed on before all of it has.
        let mut held = 0;
        loop {
            self.readable(from, from_broke, shared).await?;
            let mut buffer = self.buffers.large();
            let n = match from.try_recv(&mut buffer[held..]) {
                Ok(n) => n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => continue,
                Err(_) => return Err(from_broke),
            };
            if n == 0 && held > 0 {
                return Err(TunnelEnd::Unexpected);
            }
            if n == 0 {
                return self.end(direction, shared).await;
            }
            self.count(direction, n, shared);
            let n = held + n;
            if let Some(begins) = expected {
                let asked = self.origin.sent() - shared.origin_sent_before;
                buffer[..held].copy_from_slice(&begins[..held]);
                let begun = n.min(begins.len());
                if buffer[..begun] != begins[..begun] || !self.origin.has_reached_peer(asked) {
                    return Err(TunnelEnd::Unexpected);
                }
                if begun < begins.len() {
                    held = begun;
                    continue;
                }
                (expected, held) = (None, 0);
            }
            if direction == Direction::Down {
                shared.delivering.set(true);
            }
            to.send_all(&buffer[..n], stall).await.map_err(|_broken| to_broke)?;
            if direction == Direction::Down {
                shared.delivering.set(false);
            }
            shared.last_byte.set(clock::now());
        }
    }

    fn count(&self, direction: Direction, n: usize, shared: &Shared) {
        shared.last_byte.set(clock::now());
        match direction {
            Direction::Up => self.metrics.request_bytes.add(n as u64),
            Direction::Down => self.metrics.response_bytes.add(n as u64),
        }
        if let Some((quiet, _)) = self.quiet {
            match direction {
                Direction::Up => quiet.borrow_mut().client_bytes(n),
                Direction::Down => quiet.borrow_mut().origin_bytes(n),
            }
        }
    }

    /// The stream that flows in `direction` has ended.
    async fn end(&self, direction: Direction, shared: &Shared) -> Result<(), TunnelEnd> {
        match direction {
            Direction::Up => {
                shared.client_ended.set(true);
                if let Some((quiet, settle)) = self.quiet {
                    quiet.borrow_mut().client_closed(true);
                    // A client that has only ended its side may still wait for the rest of a
                    // long answer: silence, not its end, tells that all has come.
                    while quiet.borrow().holds() {
                        let last_byte = shared.last_byte.get();
                        tokio::time::sleep(settle).await;
                        let silent = shared.last_byte.get() == last_byte
                            && !shared.delivering.get()
                            && self.origin.peek() == Queue::Empty;
                        if silent {
                            return Err(TunnelEnd::Quiet);
                        }
                    }
                }
                self.origin.shutdown();
            }
            Direction::Down => {
                shared.origin_ended.set(true);
                if let Some((quiet, _)) = self.quiet {
                    quiet.borrow_mut().origin_closed();
                }
                self.client.shutdown();
            }
        }
        shared.one_ended.notify_waiters();
        Ok(())
    }

    /// Waits for bytes from one side, as long as the tunnel as a whole is not idle for too long.
    async fn readable(
        &self,
        from: &Stream,
        from_broke: TunnelEnd,
        shared: &Shared,
    ) -> Result<(), TunnelEnd> {
        loop {
            let limit = self.idle_limit(shared);
            let left = limit.saturating_sub(clock::now() - shared.last_byte.get());
            tokio::select! {
                biased;
                result = from.readable() => return result.map_err(|_broken| from_broke),
                // A new limit holds.
                () = shared.one_ended.notified() => {}
                // The other direction may have moved bytes meanwhile.
                () = tokio::time::sleep(left) => {
                    if clock::now() - shared.last_byte.get() >= limit {
                        let silent = self.ends_when_silent_for.is_some();
                        return Err(if silent { TunnelEnd::Silent } else { from_broke });
                    }
                }
            }
        }
    }

    /// A side that is left alone must not hold the other's socket for as long as a living tunnel.
    fn idle_limit(&self, shared: &Shared) -> Duration {
        let timeouts = self.timeouts;
        if let Some(silence) = self.ends_when_silent_for {
            silence.min(timeouts.tunnel_idle)
        } else if shared.origin_ended.get() {
            timeouts.client_stall.min(timeouts.tunnel_idle)
        } else if shared.client_ended.get() {
            timeouts.origin_stall.min(timeouts.tunnel_idle)
        } else {
            timeouts.tunnel_idle
        }
    }
}
