//! When requests come, how long each is under way, and which worker it comes to.

use std::time::Duration;

use clap::ValueEnum;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

/// How requests follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Arrivals {
    /// Independent of each other, as those of many clients are.
    Poisson,
    /// At equal distances.
    Regular,
}

/// How the times vary that requests are under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Service {
    /// Exponentially: many short ones, a few long ones.
    Exponential,
    /// Not at all.
    Fixed,
}

/// Which worker a request comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Spread {
    /// Any: clients are on all CPUs, and their connections go to the worker of their CPU.
    Random,
    /// One after the other.
    RoundRobin,
}

/// A load.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Traffic {
    /// How requests follow each other.
    pub arrivals: Arrivals,
    /// Requests per second, on average; more than 0.
    pub rate: f64,
    /// For how long they come.
    #[serde(rename = "duration_us", serialize_with = "super::as_micros")]
    pub duration: Duration,
    /// How the times vary that they are under way.
    pub service: Service,
    /// How long they are under way, on average.
    #[serde(rename = "service_time_us", serialize_with = "super::as_micros")]
    pub service_time: Duration,
    /// What the random numbers start from.
    pub seed: u64,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    /// When it comes.
    pub(super) at: Duration,
    /// How long it is under way.
    pub(super) takes: Duration,
    /// A random number that decides about its worker.
    pub(super) lot: u64,
}

/// The requests of a load, in their order. All pools that are compared get the same ones.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    pub(super) requests: Vec<Request>,
    /// When the picture is taken.
    pub(super) ends: Duration,
    /// What other random numbers start from.
    pub(super) seed: u64,
}

impl Schedule {
    pub(super) fn new(traffic: &Traffic) -> Self {
        let mut rng = StdRng::seed_from_u64(traffic.seed);
        let mean = Duration::from_secs_f64(1.0 / traffic.rate);
        let mut requests = Vec::new();
        // Regular requests start at once, so that each but the first has the same gap before it.
        let mut at = match traffic.arrivals {
            Arrivals::Poisson => exponential(mean, &mut rng),
            Arrivals::Regular => Duration::ZERO,
        };
        while at < traffic.duration {
            let takes = match traffic.service {
                Service::Exponential => exponential(traffic.service_time, &mut rng),
                Service::Fixed => traffic.service_time,
            };
            requests.push(Request { at, takes, lot: rng.random() });
            at += match traffic.arrivals {
                Arrivals::Poisson => exponential(mean, &mut rng),
                Arrivals::Regular => mean,
            };
        }
        Self { requests, ends: traffic.duration, seed: traffic.seed }
    }
}

impl Spread {
    /// The worker of a request, of so many.
    pub(super) fn worker(self, number: usize, request: &Request, workers: usize) -> usize {
        match self {
            Self::RoundRobin => number % workers,
            // The remainder is less than `workers`, which is a usize.
            Self::Random => usize::try_from(request.lot % workers as u64).unwrap_or(0),
        }
    }
}

fn exponential(mean: Duration, rng: &mut StdRng) -> Duration {
    // From (0, 1]: the logarithm of 0 would take for ever.
    let chance = 1.0 - rng.random::<f64>();
    mean.mul_f64(-chance.ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRAFFIC: Traffic = Traffic {
        arrivals: Arrivals::Poisson,
        rate: 100.0,
        duration: Duration::from_secs(100),
        service: Service::Exponential,
        service_time: Duration::from_millis(20),
        seed: 1,
    };

    #[test]
    fn rates_and_times_are_those_asked_for() {
        let random = Schedule::new(&TRAFFIC).requests;
        assert!((9_600..10_400).contains(&random.len()), "{}", random.len());
        let takes: f64 = random.iter().map(|r| r.takes.as_secs_f64()).sum();
        assert!((0.019..0.021).contains(&(takes / random.len() as f64)));
        let regular = Traffic { arrivals: Arrivals::Regular, service: Service::Fixed, ..TRAFFIC };
        let regular = Schedule::new(&regular).requests;
        assert_eq!(regular.len(), 10_000);
        assert_eq!(regular[7].at, Duration::from_millis(70));
        assert!(regular.iter().all(|r| r.takes == TRAFFIC.service_time));
    }

    #[test]
    fn workers_get_equal_shares() {
        let schedule = Schedule::new(&TRAFFIC);
        for spread in [Spread::Random, Spread::RoundRobin] {
            let mut shares = [0_usize; 4];
            for (number, request) in schedule.requests.iter().enumerate() {
                shares[spread.worker(number, request, 4)] += 1;
            }
            let fair = schedule.requests.len() / 4;
            assert!(shares.iter().all(|s| s.abs_diff(fair) < fair / 10), "{shares:?}");
        }
    }
}
