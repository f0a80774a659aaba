//! What idle pools save: the daemon's own idle lists under a schedule of requests, in virtual time.
//!
//! Each table changes one thing and keeps the rest, requests included. Sockets are opened early
//! (`prewarm`) only where that is what changes.

mod pools;
mod schedule;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Serialize, Serializer};

pub use self::pools::Outcome;
pub use self::schedule::{Arrivals, Service, Spread, Traffic};

use self::pools::{Rules, run};
use self::schedule::Schedule;
use crate::pool::idle::Limits;
use crate::worker::TICK;

/// Layout version of [`Report`] as JSON.
pub const REPORT_VERSION: u32 = 1;

/// Pools reuse as much as others if not more than this share of all requests is missing.
const AS_MUCH: f64 = 0.01;

/// Gaps between requests, as multiples of `idle_ttl`.
const GAPS: [f64; 11] = [0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 5.0, 10.0];

/// Requests with such gaps.
const GAP_REQUESTS: u32 = 4_000;

/// `prewarm` to try.
const PREWARMS: [usize; 5] = [0, 1, 2, 4, 8];

/// What is simulated.
#[derive(Clone, Debug, Serialize)]
pub struct Setup {
    /// The requests.
    pub traffic: Traffic,
    /// Origins that they go to; at least 1.
    pub origins: usize,
    /// How many workers to try; not empty, each at least 1.
    pub workers: Vec<usize>,
    /// Ways in which clients come to workers; not empty.
    pub spreads: Vec<Spread>,
    /// Most idle sockets of a worker to an origin.
    pub max_idle: usize,
    /// Longest time idle.
    #[serde(rename = "idle_ttl_us", serialize_with = "as_micros")]
    pub idle_ttl: Duration,
    /// A socket older than this is not used again.
    #[serde(rename = "max_lifetime_us", serialize_with = "as_micros")]
    pub max_lifetime: Duration,
    /// Most exchanges of one socket; at least 1.
    pub max_requests: u64,
    /// Origins close what is idle for this long.
    #[serde(rename = "origin_idle_us", serialize_with = "as_micros_if_any")]
    pub origin_idle: Option<Duration>,
}

/// All that a simulation finds.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`REPORT_VERSION`].
    pub version: u32,
    /// What was simulated.
    pub setup: Setup,
    /// Workers of all tables but the one that compares them: the most.
    pub workers: usize,
    /// Mean time between requests of one worker to one origin.
    #[serde(rename = "gap_us", serialize_with = "as_micros")]
    pub gap: Duration,
    /// Without and with pools.
    pub pooling: Vec<Pooled>,
    /// `idle_ttl` against the time between requests.
    pub idle_ttl: Vec<Gap>,
    /// One pool, and a pool for each worker.
    pub shared: Vec<Shared>,
    /// Limits of idle sockets.
    pub max_idle: Vec<Pooled>,
    /// Sockets that are opened early.
    pub prewarm: Vec<Prewarmed>,
    /// What follows for the configuration.
    pub advice: Advice,
}

/// With that many idle sockets at most.
#[derive(Clone, Debug, Serialize)]
pub struct Pooled {
    /// For each worker and origin; 0 is no pool.
    pub max_idle: usize,
    /// What came of it.
    pub outcome: Outcome,
}

/// Requests one after the other, of one worker to one origin, that take no time.
#[derive(Clone, Debug, Serialize)]
pub struct Gap {
    /// The mean time between them, divided by `idle_ttl`.
    pub gap_to_idle_ttl: f64,
    /// The `idle_ttl` that this is, with the gap of the whole load.
    #[serde(rename = "idle_ttl_us", serialize_with = "as_micros")]
    pub idle_ttl: Duration,
    /// With equal gaps.
    pub regular: Outcome,
    /// With random ones.
    pub poisson: Outcome,
}

/// A pool for each worker.
#[derive(Clone, Debug, Serialize)]
pub struct Shared {
    /// How many; 1 is one pool for all clients.
    pub workers: usize,
    /// How clients come to them.
    pub spread: Spread,
    /// What came of it.
    pub outcome: Outcome,
    /// The fewest idle sockets, for each worker and origin, with which they reuse as much as one
    /// pool for all does; none if `max_idle` is not enough.
    pub max_idle_for_as_much: Option<usize>,
}

/// With sockets that are opened early.
#[derive(Clone, Debug, Serialize)]
pub struct Prewarmed {
    /// For each worker and origin.
    pub prewarm: usize,
    /// What came of it.
    pub outcome: Outcome,
}

/// What follows for the configuration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// One that is never reached: too few idle sockets cost handshakes, and a limit that is too
    /// high costs nothing, because a surplus expires.
    pub max_idle: usize,
    /// What was simulated, if that is long enough and shorter than the origins' own.
    #[serde(rename = "idle_ttl_us", serialize_with = "as_micros")]
    pub idle_ttl: Duration,
    /// Several times the gap between requests. Longer than `idle_ttl` if the origins close first.
    #[serde(rename = "idle_ttl_needed_us", serialize_with = "as_micros")]
    pub idle_ttl_needed: Duration,
    /// The largest one that spares at least one wait for each handshake that it costs.
    pub prewarm: usize,
    /// What comes of all that.
    pub outcome: Outcome,
}

/// Simulates.
#[must_use]
pub fn simulate(setup: &Setup) -> Report {
    let schedule = Schedule::new(&setup.traffic);
    let workers = setup.workers.iter().copied().max().unwrap_or(1);
    let rules = setup.rules(workers);
    let lists = u32::try_from(workers * setup.origins).unwrap_or(u32::MAX);
    let gap = Duration::from_secs_f64(f64::from(lists) / setup.traffic.rate);
    let max_idle = max_idle(&schedule, rules);
    let pooled = |max_idle| Pooled { max_idle, outcome: run(&schedule, rules.at_most(max_idle)) };
    Report {
        version: REPORT_VERSION,
        workers,
        gap,
        pooling: vec![pooled(0), pooled(setup.max_idle)],
        idle_ttl: gaps(gap, setup.traffic.seed),
        shared: shared(&schedule, setup),
        advice: Advice::of(&schedule, rules, gap, &max_idle),
        max_idle,
        // The configuration refuses a max_idle that is smaller.
        prewarm: prewarm(&schedule, |prewarm| Rules {
            prewarm,
            ..rules.at_most(setup.max_idle.max(prewarm))
        }),
        setup: setup.clone(),
    }
}

impl Setup {
    fn rules(&self, workers: usize) -> Rules {
        Rules {
            workers,
            spread: self.spreads[0],
            origins: self.origins,
            prewarm: 0,
            limits: Limits {
                max_idle: self.max_idle,
                idle_ttl: self.idle_ttl,
                max_requests: self.max_requests,
            },
            max_lifetime: self.max_lifetime,
            origin_idle: self.origin_idle,
        }
    }
}

impl Rules {
    fn at_most(self, max_idle: usize) -> Self {
        Self { limits: Limits { max_idle, ..self.limits }, ..self }
    }
}

/// Reuse of one list by the gap between its requests, with no other limit than `idle_ttl`.
fn gaps(gap: Duration, seed: u64) -> Vec<Gap> {
    let schedule = |arrivals| {
        Schedule::new(&Traffic {
            arrivals,
            rate: 1.0 / gap.as_secs_f64(),
            duration: gap * GAP_REQUESTS,
            service: Service::Fixed,
            service_time: Duration::ZERO,
            seed,
        })
    };
    let (regular, poisson) = (schedule(Arrivals::Regular), schedule(Arrivals::Poisson));
    let at = |gap_to_idle_ttl| {
        let idle_ttl = gap.div_f64(gap_to_idle_ttl);
        let rules = Rules {
            workers: 1,
            spread: Spread::Random,
            origins: 1,
            prewarm: 0,
            limits: Limits { max_idle: 1, idle_ttl, max_requests: u64::MAX },
            // Longer than all of it.
            max_lifetime: gap * (2 * GAP_REQUESTS),
            origin_idle: None,
        };
        let [regular, poisson] = [&regular, &poisson].map(|schedule| run(schedule, rules));
        Gap { gap_to_idle_ttl, idle_ttl, regular, poisson }
    };
    GAPS.into_iter().map(at).collect()
}

fn shared(schedule: &Schedule, setup: &Setup) -> Vec<Shared> {
    let target = run(schedule, setup.rules(1)).reused;
    let mut all = Vec::new();
    for &workers in &setup.workers {
        for &spread in &setup.spreads {
            let rules = Rules { spread, ..setup.rules(workers) };
            let outcome = run(schedule, rules);
            let enough = |outcome: &Outcome| outcome.reuses(target);
            let max_idle_for_as_much = enough(&outcome).then(|| {
                // More idle sockets reuse more, or hardly less.
                let (mut too_few, mut enough_of_them) = (0, setup.max_idle);
                while enough_of_them - too_few > 1 {
                    let middle = usize::midpoint(too_few, enough_of_them);
                    if enough(&run(schedule, rules.at_most(middle))) {
                        enough_of_them = middle;
                    } else {
                        too_few = middle;
                    }
                }
                enough_of_them
            });
            all.push(Shared { workers, spread, outcome, max_idle_for_as_much });
            if workers == 1 {
                // There is only one way to come to it.
                break;
            }
        }
    }
    all
}

/// Powers of two, until none of them is ever too small.
fn max_idle(schedule: &Schedule, rules: Rules) -> Vec<Pooled> {
    let mut all = Vec::new();
    for max_idle in std::iter::once(0).chain((0..).map(|n| 1 << n)) {
        let outcome = run(schedule, rules.at_most(max_idle));
        let bound = outcome.evicted.contains_key("idle_overflow");
        all.push(Pooled { max_idle, outcome });
        if !bound {
            break;
        }
    }
    all
}

/// Sockets opened early, under the rules that go with them. Those that would be opened again too
/// often for a simulation are left out.
fn prewarm(schedule: &Schedule, with: impl Fn(usize) -> Rules) -> Vec<Prewarmed> {
    const OPENED_MAX: u128 = 1_000_000;
    let feasible = |&prewarm: &usize| {
        let rules = with(prewarm);
        let idle = rules.limits.idle_ttl.min(rules.origin_idle.unwrap_or(Duration::MAX));
        let life = idle.min(rules.max_lifetime).max(TICK);
        let lives = schedule.ends.as_nanos() / life.as_nanos();
        let places = rules.workers * rules.origins;
        (places * prewarm) as u128 * (1 + lives) <= OPENED_MAX
    };
    let at = |prewarm| Prewarmed { prewarm, outcome: run(schedule, with(prewarm)) };
    PREWARMS.into_iter().filter(feasible).map(at).collect()
}

impl Outcome {
    /// Whether as many are reused as there, or hardly fewer.
    pub(crate) fn reuses(&self, as_there: u64) -> bool {
        self.reused as f64 >= as_there as f64 - AS_MUCH * self.requests as f64
    }
}

impl Advice {
    fn of(schedule: &Schedule, rules: Rules, gap: Duration, max_idle: &[Pooled]) -> Self {
        /// Of random gaps, all but one in 150 are shorter than this many times the mean.
        const GAPS_LONG: u32 = 5;
        let gaps = gap * GAPS_LONG;
        let needed = Duration::from_secs(gaps.as_secs() + u64::from(gaps.subsec_nanos() > 0));
        // Some earlier, so that no request meets the origin's FIN on its way.
        let undercut =
            |idle: Duration| idle.saturating_sub(Duration::from_secs(1)).max(idle.mul_f64(0.5));
        let longest = rules.origin_idle.map_or(Duration::MAX, undercut);
        let idle_ttl = rules.limits.idle_ttl.max(needed).min(longest);
        let enough = max_idle.last().map_or(rules.limits.max_idle, |row| row.max_idle);
        let with = |prewarm: usize| {
            let limits = Limits { max_idle: enough.max(prewarm), idle_ttl, ..rules.limits };
            Rules { prewarm, limits, ..rules }
        };
        let mut all = prewarm(schedule, with);
        let (created, waited) = (all[0].outcome.created, all[0].outcome.waited);
        let worth_it = |row: &Prewarmed| {
            let spared = waited.saturating_sub(row.outcome.waited);
            row.outcome.created.saturating_sub(created) <= spared
        };
        let last = all.iter().rposition(worth_it).unwrap_or(0);
        let Prewarmed { prewarm, outcome } = all.swap_remove(last);
        let max_idle = enough.max(prewarm);
        Self { max_idle, idle_ttl, idle_ttl_needed: needed, prewarm, outcome }
    }
}

fn as_micros<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(super::micros(*time))
}

#[expect(clippy::ref_option, reason = "serde hands it over like this")]
fn as_micros_if_any<S: Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    time.map(super::micros).serialize(serializer)
}
