//! One world: requests come, are picked an origin, and end; time is what the next event says.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::incident::{Behaviour, Incident, LASTS};
use super::{Row, Setting, Setup};
use crate::clock;
use crate::config::outlier::Panic;
use crate::origin::outlier::{Action, Cluster, Event, Failure, Host, Outcome, Owing};
use crate::origin::panic::{Eligible, Hosts, decide};
use crate::origin::{Load, pick};

/// Time of a usual request, on average.
const USUAL: Duration = Duration::from_millis(10);
/// How long a client waits.
const PATIENCE: Duration = Duration::from_secs(5);
/// A refusal takes a round trip.
const REFUSAL: Duration = Duration::from_micros(200);

/// Runs one incident.
pub(super) fn run(incident: Incident, origins: usize, setting: Setting, setup: &Setup) -> Row {
    let mut world = World::new(incident, origins, setting, setup);
    world.run();
    world.row(setting)
}

struct World<'a> {
    setup: &'a Setup,
    incident: Incident,
    cluster: Cluster,
    interval: Duration,
    origins: Vec<Origin>,
    /// By the time at which they end.
    under_way: BinaryHeap<Reverse<Request>>,
    began: Instant,
    now: Instant,
    rng: StdRng,
    any_bad: bool,
    seen: Seen,
}

struct Origin {
    host: Arc<Host>,
    active: usize,
    bad: Option<Bad>,
    /// When it was bad for the last time.
    good_since: Option<Instant>,
}

/// An origin is bad.
#[derive(Clone, Copy)]
struct Bad {
    since: Instant,
    ejected: bool,
}

struct Request {
    sent: Instant,
    ends: Instant,
    /// Of two that end at once the first one is first.
    number: u64,
    took: Duration,
    origin: usize,
    outcome: Outcome,
    owing: Option<Owing>,
}

impl PartialEq for Request {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Request {}

impl PartialOrd for Request {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Request {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.ends, self.number).cmp(&(other.ends, other.number))
    }
}

#[derive(Default)]
struct Seen {
    requests: u64,
    while_bad: u64,
    to_bad: u64,
    failed: u64,
    times_us: Vec<u32>,
    turned_bad: u64,
    missed: u64,
    eject: Vec<Duration>,
    false_ejections: u64,
    good_ejected: Duration,
    ejected_max: usize,
    panic: Duration,
}

impl<'a> World<'a> {
    fn new(incident: Incident, count: usize, setting: Setting, setup: &'a Setup) -> Self {
        let now = clock::now();
        let config = setting.config();
        let interval = config.interval;
        let cluster = Cluster::new(config, now);
        let address = |n: usize| {
            let [.., a, b, c] = u32::try_from(n).unwrap_or(u32::MAX).to_be_bytes();
            SocketAddr::from(([10, a, b, c], 80))
        };
        let addresses: Vec<_> = (0..count).map(address).collect();
        cluster.set_hosts(&addresses);
        let hosts = addresses.iter().filter_map(|&address| cluster.host(address));
        Self {
            origins: hosts
                .map(|host| Origin { host, active: 0, bad: None, good_since: None })
                .collect(),
            setup,
            incident,
            cluster,
            interval,
            under_way: BinaryHeap::new(),
            began: now,
            now,
            rng: StdRng::seed_from_u64(setup.seed),
            any_bad: false,
            seen: Seen::default(),
        }
    }

    fn run(&mut self) {
        let end = self.began + LASTS;
        let pause = 1.0 / (self.setup.rate * self.origins.len() as f64);
        let mut next_request = self.began;
        let mut next_look = self.began;
        while self.now < end {
            let next_end = self.under_way.peek().map(|Reverse(request)| request.ends);
            let next = next_request.min(next_look);
            if let Some(ends) = next_end.filter(|&ends| ends <= next) {
                self.now = ends;
                self.end_request();
            } else if next_look <= next_request {
                self.now = next_look;
                self.look();
                next_look += self.cluster.pace();
            } else {
                self.now = next_request;
                self.begin_request();
                // Requests come when they come: the time between two has an exponential distribution.
                let random: f64 = self.rng.random_range(f64::MIN_POSITIVE..1.0);
                next_request += Duration::from_secs_f64(-random.ln() * pause);
            }
        }
    }

    fn eligible(&self) -> Eligible {
        let (ejected, all) = self.cluster.ejected_of();
        decide(Hosts { healthy: all - ejected, degraded: 0, ejected }, Panic::default())
    }

    fn begin_request(&mut self) {
        let panic = self.eligible() == Eligible::All;
        let (origins, now) = (&self.origins, self.now);
        let load = |origin: usize| {
            let Origin { host, active, .. } = &origins[origin];
            let eligible = panic || host.is_available(now);
            Load { active: *active, weight: NonZeroU32::MIN, eligible }
        };
        self.seen.requests += 1;
        self.seen.while_bad += u64::from(self.any_bad);
        let Some(chosen) = pick(origins.len(), load, &mut self.rng) else {
            self.seen.failed += 1;
            return;
        };
        let at = now - self.began;
        let behaviour = self.incident.behaviour(chosen, self.origins.len(), at);
        self.seen.to_bad += u64::from(behaviour != Behaviour::Good);
        let random: f64 = self.rng.random_range(f64::MIN_POSITIVE..1.0);
        let usual = USUAL.mul_f64(-random.ln());
        let fails = |share: f64| {
            let status = if random < share { 500 } else { 200 };
            Outcome::Response(status)
        };
        let noise = self.setup.background;
        let (took, outcome) = match behaviour {
            Behaviour::Good => (usual, fails(noise)),
            Behaviour::Errors(share) => (usual, fails(share.max(noise))),
            Behaviour::Slow(times) => (usual.mul_f64(times), fails(noise)),
            Behaviour::Refuses => (REFUSAL, Outcome::Failed(Failure::Connect)),
            Behaviour::Hangs(until) => (until.saturating_sub(at) + usual, fails(noise)),
        };
        let (took, outcome) = if took > PATIENCE {
            (PATIENCE, Outcome::Failed(Failure::Timeout))
        } else {
            (took, outcome)
        };
        let origin = &mut self.origins[chosen];
        origin.active += 1;
        let owing = (behaviour != Behaviour::Refuses).then(|| origin.host.owe());
        let number = self.seen.requests;
        let request =
            Request { sent: now, ends: now + took, number, took, origin: chosen, outcome, owing };
        self.under_way.push(Reverse(request));
    }

    fn end_request(&mut self) {
        let Some(Reverse(request)) = self.under_way.pop() else { return };
        let Request { sent, origin, outcome, owing, took, .. } = request;
        self.origins[origin].active -= 1;
        let answered = matches!(outcome, Outcome::Response(_));
        if let Some(owing) = owing.filter(|_| answered) {
            owing.answered();
        }
        self.seen.failed += u64::from(outcome != Outcome::Response(200));
        self.seen.times_us.push(took.as_micros().try_into().unwrap_or(u32::MAX));
        let host = &self.origins[origin].host;
        let events = host.record(outcome, sent, self.now, &mut self.rng);
        self.note(&events);
    }

    fn look(&mut self) {
        let at = self.now - self.began;
        let count = self.origins.len();
        for (n, origin) in self.origins.iter_mut().enumerate() {
            let bad = self.incident.behaviour(n, count, at) != Behaviour::Good;
            if bad && origin.bad.is_none() {
                // One that is still out has been noticed in advance.
                let ejected = !origin.host.is_available(self.now);
                origin.bad = Some(Bad { since: self.now, ejected });
                self.seen.turned_bad += u64::from(!ejected);
            } else if !bad && let Some(was) = origin.bad.take() {
                self.seen.missed += u64::from(!was.ejected);
                origin.good_since = Some(self.now);
            }
        }
        self.any_bad = self.origins.iter().any(|origin| origin.bad.is_some());
        let events = self.cluster.sweep(self.now, &mut self.rng);
        self.note(&events);
        let pace = self.cluster.pace();
        let out: Vec<_> =
            self.origins.iter().filter(|origin| !origin.host.is_available(self.now)).collect();
        let good = out.iter().filter(|origin| origin.bad.is_none()).count();
        self.seen.good_ejected += pace.mul_f64(good as f64);
        self.seen.ejected_max = self.seen.ejected_max.max(out.len());
        if self.eligible() == Eligible::All {
            self.seen.panic += pace;
        }
    }

    fn note(&mut self, events: &[Event]) {
        let ejections = events.iter().filter(|e| e.enforced && e.action == Action::Eject);
        for event in ejections {
            let origin = self.origins.iter_mut().find(|o| o.host.address() == event.origin);
            let Some(origin) = origin else { continue };
            // A rate is of a whole interval.
            let was_bad = |since| event.at.saturating_duration_since(since) < self.interval;
            match &mut origin.bad {
                None if origin.good_since.is_some_and(was_bad) => {}
                None => self.seen.false_ejections += 1,
                Some(Bad { ejected: true, .. }) => {}
                Some(bad) => {
                    bad.ejected = true;
                    self.seen.eject.push(event.at.saturating_duration_since(bad.since));
                }
            }
        }
    }

    fn row(mut self, setting: Setting) -> Row {
        let seen = &mut self.seen;
        seen.times_us.sort_unstable();
        let p999 = seen.times_us.get(seen.times_us.len() * 999 / 1000).copied().unwrap_or_default();
        let percent = |part: f64, whole: f64| if whole > 0.0 { part * 100.0 / whole } else { 0.0 };
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let ejections = u32::try_from(seen.eject.len()).unwrap_or(u32::MAX);
        let total: Duration = seen.eject.iter().sum();
        Row {
            incident: self.incident,
            origins: self.origins.len(),
            setting,
            requests: seen.requests,
            eject_ms: total.checked_div(ejections).map(millis),
            turned_bad: seen.turned_bad,
            missed: seen.missed,
            to_bad: seen.to_bad,
            to_bad_percent: percent(seen.to_bad as f64, seen.while_bad as f64),
            failed: seen.failed,
            p999_ms: u64::from(p999 / 1000),
            false_ejections: seen.false_ejections,
            good_ejected_percent: percent(
                seen.good_ejected.as_secs_f64(),
                LASTS.as_secs_f64() * self.origins.len() as f64,
            ),
            ejected_max: seen.ejected_max,
            panic_percent: percent(seen.panic.as_secs_f64(), LASTS.as_secs_f64()),
        }
    }
}
