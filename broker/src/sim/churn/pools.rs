//! The pools of all workers under a schedule, in virtual time.
//!
//! What decides here is what decides in the daemon: [`IdleList`], [`Ready`] and [`pick`]. What is left out is
//! what has no part in how many sockets there are: bytes, failures, limits of connections.
//! Handshakes take no time, and a request that finds no idle socket is dialled for at once; the
//! daemon first waits for a moment whether one comes back, so it opens a little less. Sockets are
//! opened early at once, not at `prewarm_rate`.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap};
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

use super::schedule::{Schedule, Spread};
use crate::clock;
use crate::origin::{Load, pick};
use crate::pool::idle::{IdleList, Life, Limits, expiry};
use crate::pool::ready::Ready;
use crate::stats::EvictReason;
use crate::worker::TICK;

/// How the pools are configured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// Each has a pool of its own; at least 1.
    pub(super) workers: usize,
    pub(super) spread: Spread,
    /// At least 1.
    pub(super) origins: usize,
    /// Sockets that each worker keeps open to each origin.
    pub(super) prewarm: usize,
    /// Those of each worker's list for each origin.
    pub(super) limits: Limits,
    pub(super) max_lifetime: Duration,
    /// An origin closes what is idle for this long.
    pub(super) origin_idle: Option<Duration>,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Requests that came.
    pub requests: u64,
    /// Connections opened, each with a handshake that the origin sees.
    pub created: u64,
    /// Requests on a connection that had served another one before.
    pub reused: u64,
    /// Requests that had to wait for a handshake. The others, of those that were not `reused`, came
    /// first on a connection that was opened before.
    pub waited: u64,
    /// Connections closed, by the daemon's names for the reasons.
    pub evicted: BTreeMap<&'static str, u64>,
    /// Handshakes fewer than one for each request; negative if there were more.
    pub saved: i64,
    /// Most connections open at once, all workers together.
    pub open_peak: usize,
    /// Connections open on average.
    pub open_mean: f64,
    /// Connections idle on average.
    pub idle_mean: f64,
    /// Connections open at the end.
    pub open_at_end: usize,
}

/// A socket, as it was when it became idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Socket {
    id: u64,
    exchanges: u64,
}

/// One worker's sockets to one origin.
struct Place {
    idle: IdleList<Socket>,
    ready: Ready,
    open: usize,
    active: usize,
    /// The last tick at which a look is arranged.
    looked_at: Duration,
}

impl Place {
    fn has_idle(&self) -> bool {
        !self.idle.is_empty()
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// An exchange ends.
    Settle { place: usize, id: u64, life: Life },
    /// An origin has waited long enough, if the socket has been idle all that time.
    OriginCloses { place: usize, socket: Socket },
    /// The worker's housekeeping.
    Look { place: usize },
}

/// An event and its place in the order of time. Of events at one time the one that was arranged
/// first goes first.
struct Due {
    at: Duration,
    number: u64,
    event: Event,
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Due {}

struct Pools {
    rules: Rules,
    start: Instant,
    /// Since the start.
    now: Duration,
    ends: Duration,
    rng: StdRng,
    /// One for each worker and origin, those of a worker together.
    places: Vec<Place>,
    due: BinaryHeap<Reverse<Due>>,
    arranged: u64,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    requests: u64,
    created: u64,
    reused: u64,
    waited: u64,
    evicted: [u64; EvictReason::ALL.len()],
    open: usize,
    active: usize,
    open_peak: usize,
    /// Connections times seconds.
    open_seconds: f64,
    active_seconds: f64,
}

/// Runs pools under a schedule.
pub(super) fn run(schedule: &Schedule, rules: Rules) -> Outcome {
    let place = || Place {
        idle: IdleList::new(rules.limits),
        ready: Ready::new(rules.prewarm),
        open: 0,
        active: 0,
        looked_at: Duration::ZERO,
    };
    let mut pools = Pools {
        rules,
        // Nothing depends on it: all that follows is relative.
        start: clock::now(),
        now: Duration::ZERO,
        ends: schedule.ends,
        rng: StdRng::seed_from_u64(schedule.seed),
        places: (0..rules.workers * rules.origins).map(|_| place()).collect(),
        due: BinaryHeap::new(),
        arranged: 0,
        counts: Counts::default(),
    };
    for place in 0..pools.places.len() {
        pools.prewarm(place);
    }
    for (number, request) in schedule.requests.iter().enumerate() {
        pools.run_until(request.at);
        let worker = rules.spread.worker(number, request, rules.workers);
        pools.request(worker, request.takes);
    }
    pools.run_until(schedule.ends);
    pools.counts.outcome(schedule.ends)
}

impl Pools {
    fn instant(&self) -> Instant {
        self.start + self.now
    }

    fn run_until(&mut self, until: Duration) {
        while self.due.peek().is_some_and(|Reverse(due)| due.at <= until)
            && let Some(Reverse(due)) = self.due.pop()
        {
            self.advance(due.at);
            match due.event {
                Event::Settle { place, id, life } => {
                    self.places[place].active -= 1;
                    self.counts.active -= 1;
                    self.put(place, id, life);
                }
                Event::OriginCloses { place, socket } => {
                    let idle = &mut self.places[place].idle;
                    for _ in idle.remove_if(|&s| s == socket) {
                        self.close(place, EvictReason::IdleClosed);
                        self.ended_idle(place, self.rules.origin_idle.unwrap_or_default());
                    }
                }
                Event::Look { place } => {
                    self.sweep(place);
                    self.prewarm(place);
                }
            }
        }
        self.advance(until);
    }

    fn advance(&mut self, to: Duration) {
        let counts = &mut self.counts;
        let seconds = to.saturating_sub(self.now).as_secs_f64();
        counts.open_seconds += counts.open as f64 * seconds;
        counts.active_seconds += counts.active as f64 * seconds;
        self.now = to;
    }

    fn arrange(&mut self, at: Duration, event: Event) {
        // What comes later is in no picture.
        if at <= self.ends {
            self.due.push(Reverse(Due { at, number: self.arranged, event }));
            self.arranged += 1;
        }
    }

    /// Arranges a look at the first tick from `due` on.
    fn look_at(&mut self, place: usize, due: Duration) {
        let past = (due.as_nanos() % TICK.as_nanos()).try_into().map_or(TICK, Duration::from_nanos);
        let tick = if past.is_zero() { due } else { due + TICK.saturating_sub(past) };
        if std::mem::replace(&mut self.places[place].looked_at, tick) != tick {
            self.arrange(tick, Event::Look { place });
        }
    }

    /// A request of a client of that worker.
    fn request(&mut self, worker: usize, takes: Duration) {
        self.counts.requests += 1;
        let mut early = Vec::new();
        let warm = self.take_warm(worker, &mut early);
        let (place, id, mut life) = warm.unwrap_or_else(|| {
            self.counts.waited += 1;
            // What is being dialled anyway helps who waits.
            let dialled = early.pop().or_else(|| self.pick(worker, |_, _| true));
            let place = dialled.unwrap_or(worker * self.rules.origins);
            self.places[place].ready.missed();
            let (id, life) = self.dial(place);
            (place, id, life)
        });
        for place in early {
            let (id, life) = self.dial(place);
            self.put(place, id, life);
        }
        if life.exchanges > 0 {
            self.counts.reused += 1;
        }
        life.exchanges += 1;
        self.places[place].active += 1;
        self.counts.active += 1;
        self.arrange(self.now.saturating_add(takes), Event::Settle { place, id, life });
    }

    /// A warm socket of the best origin that has one. An origin without any socket gets one
    /// `early`, so that it takes part again.
    fn take_warm(&mut self, worker: usize, early: &mut Vec<usize>) -> Option<(usize, u64, Life)> {
        loop {
            let mut picked = self.pick(worker, |number, place| {
                place.has_idle() || place.open == 0 && !early.contains(&number)
            })?;
            if !self.places[picked].has_idle() {
                early.push(picked);
                picked = self.pick(worker, |_, place| place.has_idle())?;
            }
            let now = self.instant();
            match self.places[picked].idle.take(now) {
                Some((socket, life)) => return Some((picked, socket.id, life)),
                None => self.sweep(picked),
            }
        }
    }

    fn pick(&mut self, worker: usize, eligible: impl Fn(usize, &Place) -> bool) -> Option<usize> {
        let (first, origins) = (worker * self.rules.origins, self.rules.origins);
        let load = |origin: usize| {
            let place = &self.places[first + origin];
            let eligible = eligible(first + origin, place);
            Load { active: place.active, weight: NonZeroU32::MIN, eligible }
        };
        pick(origins, load, &mut self.rng).map(|origin| first + origin)
    }

    fn dial(&mut self, place: usize) -> (u64, Life) {
        let id = self.counts.created;
        self.counts.created += 1;
        self.places[place].open += 1;
        self.counts.open += 1;
        self.counts.open_peak = self.counts.open_peak.max(self.counts.open);
        let spread = self.rng.random_range(0.9..=1.0);
        let ends = self.instant() + self.rules.max_lifetime.mul_f64(spread);
        (id, Life { ends, exchanges: 0, origin_idle: None })
    }

    fn put(&mut self, place: usize, id: u64, life: Life) {
        let (now, instant) = (self.now, self.instant());
        let socket = Socket { id, exchanges: life.exchanges };
        if let Err((_, reason)) = self.places[place].idle.put(socket, life, instant) {
            return self.close(place, reason);
        }
        let expires = expiry(&life, instant, self.rules.limits.idle_ttl);
        self.look_at(place, expires.saturating_duration_since(self.start));
        if let Some(idle) = self.rules.origin_idle {
            self.arrange(now.saturating_add(idle), Event::OriginCloses { place, socket });
        }
    }

    fn sweep(&mut self, place: usize) {
        let now = self.instant();
        while let Some((_, reason)) = self.places[place].idle.take_expired(now) {
            self.close(place, reason);
            self.ended_idle(place, self.rules.limits.idle_ttl);
        }
    }

    fn ended_idle(&mut self, place: usize, idle_for: Duration) {
        let Place { ready, open, .. } = &mut self.places[place];
        ready.ended_idle(idle_for, *open);
    }

    fn close(&mut self, place: usize, reason: EvictReason) {
        self.counts.evicted[reason.index()] += 1;
        self.counts.open -= 1;
        self.places[place].open -= 1;
        if self.rules.prewarm > 0 {
            // Strictly later, as a look that closes must not arrange itself again.
            self.look_at(place, self.now + Duration::from_nanos(1));
        }
    }

    fn prewarm(&mut self, place: usize) {
        while self.places[place].open < self.places[place].ready.wanted() {
            let (id, life) = self.dial(place);
            self.put(place, id, life);
        }
        let worker = place / self.rules.origins;
        let places = worker * self.rules.origins..(worker + 1) * self.rules.origins;
        let open =
            |pools: &Self| pools.places[places.clone()].iter().map(|p| p.open).sum::<usize>();
        while open(self) < self.rules.prewarm
            && let Some(place) = self.pick(worker, |_, _| true)
        {
            let (id, life) = self.dial(place);
            self.put(place, id, life);
        }
    }
}

impl Counts {
    fn outcome(&self, duration: Duration) -> Outcome {
        let seconds = duration.as_secs_f64();
        let evicted = EvictReason::ALL.into_iter().zip(self.evicted).filter(|&(_, n)| n > 0);
        let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        Outcome {
            requests: self.requests,
            created: self.created,
            reused: self.reused,
            waited: self.waited,
            evicted: evicted.map(|(reason, n)| (reason.name(), n)).collect(),
            saved: signed(self.requests) - signed(self.created),
            open_peak: self.open_peak,
            open_mean: self.open_seconds / seconds,
            idle_mean: (self.open_seconds - self.active_seconds) / seconds,
            open_at_end: self.open,
        }
    }
}
