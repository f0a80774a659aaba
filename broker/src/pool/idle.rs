//! The idle list: which socket to use next, and which to let go.
//!
//! Last in, first out. The newest socket is the one least likely to have been closed by the
//! origin meanwhile, and the surplus of a past peak ages undisturbed at the other end until it
//! expires; first in, first out would keep every socket of the peak alive forever.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::stats::EvictReason;

/// What an idle list needs to know of a socket.
#[derive(Clone, Copy, Debug)]
pub struct Life {
    /// After this instant the socket is not used again (`max_lifetime`).
    pub ends: Instant,
    /// Exchanges served so far.
    pub exchanges: u64,
    /// How long the origin said that it keeps idle connections (`Keep-Alive: timeout`).
    pub origin_idle: Option<Duration>,
}

/// The limits of an idle list.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most idle sockets.
    pub max_idle: usize,
    /// Longest time idle.
    pub idle_ttl: Duration,
    /// Most exchanges of one socket.
    pub max_requests: u64,
}

/// An origin that closes after `timeout` seconds is not waited for that long: the socket goes this
/// much earlier, so that a request does not meet the origin's FIN on its way.
const ORIGIN_IDLE_MARGIN: Duration = Duration::from_secs(1);

struct Entry<S> {
    socket: S,
    life: Life,
    since: Instant,
    expires: Instant,
}

/// The idle sockets of one worker towards one origin.
pub struct IdleList<S> {
    limits: Limits,
    entries: VecDeque<Entry<S>>,
}

impl<S> IdleList<S> {
    /// An empty list.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { limits, entries: VecDeque::new() }
    }

    /// Idle sockets, expired ones included until they are swept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a socket may be used again at all.
    pub fn admits(&self, life: &Life, now: Instant) -> Result<(), EvictReason> {
        if now >= life.ends {
            Err(EvictReason::Lifetime)
        } else if life.exchanges >= self.limits.max_requests {
            Err(EvictReason::Requests)
        } else if life.origin_idle.is_some_and(|idle| idle <= ORIGIN_IDLE_MARGIN) {
            Err(EvictReason::IdleTtl)
        } else {
            Ok(())
        }
    }

    /// Adds a socket that is idle since then; hands it back with the reason if it may not stay.
    pub fn put(&mut self, socket: S, life: Life, since: Instant) -> Result<(), (S, EvictReason)> {
        if let Err(reason) = self.admits(&life, since) {
            return Err((socket, reason));
        }
        if self.entries.len() >= self.limits.max_idle {
            return Err((socket, EvictReason::IdleOverflow));
        }
        let expires = expiry(&life, since, self.limits.idle_ttl);
        self.entries.push_back(Entry { socket, life, since, expires });
        Ok(())
    }

    /// Takes every socket, oldest first, and since when it is idle.
    pub fn take_all(&mut self) -> Vec<(S, Instant)> {
        self.entries.drain(..).map(|entry| (entry.socket, entry.since)).collect()
    }

    /// Takes the newest socket that has not expired.
    pub fn take(&mut self, now: Instant) -> Option<(S, Life)> {
        // An expired entry is left to the sweep, which counts it.
        let newest = self.entries.iter().rposition(|e| now < e.expires)?;
        self.entries.remove(newest).map(|e| (e.socket, e.life))
    }

    /// Takes the socket that has been idle for the longest, expired or not.
    pub fn take_oldest(&mut self) -> Option<S> {
        self.entries.pop_front().map(|e| e.socket)
    }

    /// Takes out every socket for which `unwanted` is true.
    pub fn remove_if(&mut self, mut unwanted: impl FnMut(&S) -> bool) -> Vec<S> {
        let mut removed = Vec::new();
        for entry in std::mem::take(&mut self.entries) {
            if unwanted(&entry.socket) {
                removed.push(entry.socket);
            } else {
                self.entries.push_back(entry);
            }
        }
        removed
    }

    /// Takes out an expired socket, if there is one.
    pub fn take_expired(&mut self, now: Instant) -> Option<(S, EvictReason)> {
        let expired = self.entries.iter().position(|e| now >= e.expires)?;
        let entry = self.entries.remove(expired)?;
        Some((entry.socket, expired_by(&entry.life, now)))
    }
}

/// When a socket that is idle since `since` expires.
pub(crate) fn expiry(life: &Life, since: Instant, idle_ttl: Duration) -> Instant {
    let ttl = match life.origin_idle {
        Some(idle) => idle_ttl.min(idle.saturating_sub(ORIGIN_IDLE_MARGIN)),
        None => idle_ttl,
    };
    life.ends.min(since + ttl)
}

/// By which limit an expired socket has expired.
pub(super) fn expired_by(life: &Life, now: Instant) -> EvictReason {
    if now >= life.ends { EvictReason::Lifetime } else { EvictReason::IdleTtl }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { max_idle: 8, idle_ttl: Duration::from_secs(30), max_requests: u64::MAX };

    fn start() -> Instant {
        crate::clock::now()
    }

    fn life(start: Instant) -> Life {
        Life { ends: start + Duration::from_mins(10), exchanges: 0, origin_idle: None }
    }

    /// `n` exchanges one after the other, `gap` apart: how many sockets had to be created, and how
    /// often one was reused.
    fn cycles(limits: Limits, n: usize, gap: Duration) -> (usize, usize) {
        let mut list = IdleList::new(limits);
        let mut now = start();
        let life = life(now);
        let (mut created, mut reused) = (0, 0);
        for _ in 0..n {
            while list.take_expired(now).is_some() {}
            if list.take(now).is_some() {
                reused += 1;
            } else {
                created += 1;
            }
            list.put((), life, now).ok();
            now += gap;
        }
        (created, reused)
    }

    #[test]
    fn without_idle_sockets_every_exchange_dials() {
        let limits = Limits { max_idle: 0, ..LIMITS };
        assert_eq!(cycles(limits, 100, Duration::ZERO), (100, 0));
    }

    #[test]
    fn with_idle_sockets_one_dial_serves_all() {
        assert_eq!(cycles(LIMITS, 100, Duration::ZERO), (1, 99));
    }

    #[test]
    fn an_idle_ttl_below_the_request_gap_re_creates_churn() {
        let limits = Limits { idle_ttl: Duration::from_secs(1), ..LIMITS };
        assert_eq!(cycles(limits, 100, Duration::from_millis(900)), (1, 99));
        assert_eq!(cycles(limits, 100, Duration::from_millis(1100)), (100, 0));
    }

    #[test]
    fn two_workers_dial_one_each_and_reuse_their_own() {
        let mut workers = [IdleList::new(LIMITS), IdleList::new(LIMITS)];
        let now = start();
        let (mut created, mut reused) = ([0, 0], [0, 0]);
        for exchange in 0..100 {
            let worker = exchange % 2;
            match workers[worker].take(now) {
                Some((owner, _)) => {
                    assert_eq!(owner, worker, "a worker never sees another's socket");
                    reused[worker] += 1;
                }
                None => created[worker] += 1,
            }
            workers[worker].put(worker, life(now), now).unwrap();
        }
        assert_eq!((created, reused), ([1, 1], [49, 49]));
    }

    #[test]
    fn the_newest_is_used_first() {
        let now = start();
        let mut list = IdleList::new(LIMITS);
        for socket in 0..3 {
            list.put(socket, life(now), now).unwrap();
        }
        assert_eq!(list.take(now).map(|(s, _)| s), Some(2));
    }

    #[test]
    fn limits_evict_with_their_reason() {
        let now = start();
        let mut list = IdleList::new(Limits { max_idle: 1, max_requests: 5, ..LIMITS });
        let fresh = life(now);
        let reason = |r: Result<(), ((), EvictReason)>| r.unwrap_err().1;
        assert_eq!(reason(list.put((), Life { ends: now, ..fresh }, now)), EvictReason::Lifetime);
        assert_eq!(
            reason(list.put((), Life { exchanges: 5, ..fresh }, now)),
            EvictReason::Requests
        );
        list.put((), fresh, now).unwrap();
        assert_eq!(reason(list.put((), fresh, now)), EvictReason::IdleOverflow);
        assert!(list.take_expired(now).is_none());
        let later = now + LIMITS.idle_ttl;
        assert!(list.take(later).is_none(), "an expired socket is never handed out");
        assert_eq!(list.take_expired(later).unwrap().1, EvictReason::IdleTtl);
    }

    #[test]
    fn the_origins_own_timeout_is_undercut() {
        let now = start();
        let mut list = IdleList::new(LIMITS);
        let five = Life { origin_idle: Some(Duration::from_secs(5)), ..life(now) };
        list.put((), five, now).unwrap();
        assert!(list.take_expired(now + Duration::from_millis(3900)).is_none());
        assert!(list.take_expired(now + Duration::from_secs(4)).is_some());
        let one = Life { origin_idle: Some(Duration::from_secs(1)), ..life(now) };
        assert!(list.put((), one, now).is_err(), "too short to be of use");
    }
}
