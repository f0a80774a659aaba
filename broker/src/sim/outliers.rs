//! What outlier detection would do to a fleet in trouble, in virtual time: the daemon's own policy
//! and pick, with made-up origins and clients.

mod incident;
mod run;

use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;

pub use self::incident::Incident;

use crate::config::outlier::{Outlier, Stall};

/// Layout version of [`Report`] as JSON.
pub const REPORT_VERSION: u32 = 1;

/// What is simulated.
#[derive(Clone, Debug)]
pub struct Setup {
    /// What goes wrong.
    pub incidents: Vec<Incident>,
    /// How many origins there are; what an incident is usually tried with if empty.
    pub origins: Vec<usize>,
    /// What to compare.
    pub settings: Vec<Setting>,
    /// Requests per second for each origin.
    pub rate: f64,
    /// Share of requests that fail at any origin, from 0 to 1: there are always some.
    pub background: f64,
    /// Of everything that is random.
    pub seed: u64,
}

/// Settings to compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Setting {
    /// Envoy's defaults.
    Envoy,
    /// Quick to judge.
    Tight,
    /// What suits a fleet behind this broker.
    Broker,
}

impl Setting {
    /// What stands in the configuration.
    #[must_use]
    pub fn config(self) -> Outlier {
        let mut config = Outlier::default();
        match self {
            // Which has no eyes for silence.
            Self::Envoy => config.stall.enforcing = 0,
            Self::Tight => {
                config.interval = Duration::from_secs(1);
                config.base_ejection_time = Duration::from_secs(5);
                config.max_ejection_percent = 50;
                config.consecutive_5xx.failures = 2;
                config.success_rate.request_volume = 10;
                config.stall =
                    Stall { time: Duration::from_millis(100), volume: 1, enforcing: 100 };
            }
            Self::Broker => {
                config.base_ejection_time = Duration::from_secs(10);
                config.max_ejection_percent = 30;
                config.always_eject_one_host = true;
                // Where all are alike, chance alone puts some below the mean minus 1.9 standard
                // deviations. A flat limit finds those that clients notice.
                config.success_rate.enforcing = 0;
                config.failure_percentage.threshold = 10;
                config.failure_percentage.enforcing = 100;
            }
        }
        config
    }

    /// In a few words.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::Envoy => "Envoy's defaults",
            Self::Tight => {
                "consecutive_5xx = 2, interval = \"1s\", base_ejection_time = \"5s\", \
                 max_ejection_percent = 50, success_rate_request_volume = 10, \
                 stall_time = \"100ms\", stall_request_volume = 1"
            }
            Self::Broker => {
                "base_ejection_time = \"10s\", max_ejection_percent = 30, \
                 always_eject_one_host = true, enforcing_success_rate = 0, \
                 failure_percentage_threshold = 10, enforcing_failure_percentage = 100"
            }
        }
    }
}

/// All that a simulation finds.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// [`REPORT_VERSION`].
    pub version: u32,
    /// Requests per second for each origin.
    pub rate: f64,
    /// Share of requests that fail at any origin.
    pub background: f64,
    /// Of everything that was random.
    pub seed: u64,
    /// One for each incident, fleet and setting.
    pub rows: Vec<Row>,
}

/// What a setting does in one incident.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// What went wrong.
    pub incident: Incident,
    /// Origins of the fleet.
    pub origins: usize,
    /// What was set.
    pub setting: Setting,
    /// Requests in all.
    pub requests: u64,
    /// Time from when an origin turned bad until it was ejected, in milliseconds: the mean over all
    /// times that this happened. None if it never did.
    pub eject_ms: Option<u64>,
    /// Times that an origin turned bad, and those at which it was good again before it was ejected.
    pub turned_bad: u64,
    /// See [`Row::turned_bad`].
    pub missed: u64,
    /// Requests that went to an origin while it was bad.
    pub to_bad: u64,
    /// The same in percent of all requests while any origin was bad.
    pub to_bad_percent: f64,
    /// Requests that failed, or took longer than a client waits.
    pub failed: u64,
    /// The 99.9th percentile of the time that requests took, in milliseconds.
    pub p999_ms: u64,
    /// Ejections of origins that were good, and had been for an interval.
    pub false_ejections: u64,
    /// Time that good origins spent ejected, in percent of the time of all.
    pub good_ejected_percent: f64,
    /// Most origins that were ejected at once.
    pub ejected_max: usize,
    /// Time in a panic, in percent.
    pub panic_percent: f64,
}

/// Simulates.
#[must_use]
pub fn simulate(setup: &Setup) -> Report {
    let mut rows = Vec::new();
    for &incident in &setup.incidents {
        let usual = incident.usual_origins();
        let origins = if setup.origins.is_empty() { usual } else { &setup.origins };
        for &origins in origins {
            for &setting in &setup.settings {
                rows.push(run::run(incident, origins, setting, setup));
            }
        }
    }
    let Setup { rate, background, seed, .. } = *setup;
    Report { version: REPORT_VERSION, rate, background, seed, rows }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(incident: Incident, origins: usize, setting: Setting, background: f64) -> Row {
        let setup = Setup {
            incidents: vec![incident],
            origins: vec![origins],
            settings: vec![setting],
            rate: 20.0,
            background,
            seed: 1,
        };
        simulate(&setup).rows.remove(0)
    }

    #[test]
    fn one_bad_host_is_out_after_its_fifth_answer() {
        let envoy = row(Incident::OneBad, 20, Setting::Envoy, 0.0);
        assert_eq!((envoy.turned_bad, envoy.missed, envoy.false_ejections), (1, 0, 0));
        assert!(envoy.eject_ms.unwrap() < 2000, "{envoy:?}");
        // Five, and those that were under way; once more when it is back after 30 s.
        assert!((10..20).contains(&envoy.to_bad), "{envoy:?}");
        assert_eq!(envoy.failed, envoy.to_bad);
        assert_eq!(envoy, row(Incident::OneBad, 20, Setting::Envoy, 0.0), "the same seed");
        // Of five hosts, Envoy's defaults eject none.
        let five = row(Incident::OneBad, 5, Setting::Envoy, 0.0);
        assert_eq!((five.eject_ms, five.ejected_max, five.missed), (None, 0, 1));
        assert!(five.to_bad_percent > 15.0, "{five:?}");
        let five = row(Incident::OneBad, 5, Setting::Broker, 0.0);
        assert_eq!((five.eject_ms.is_some(), five.ejected_max), (true, 1));
        assert!(five.to_bad_percent < 2.0, "{five:?}");
    }

    #[test]
    fn hung_hosts_are_found_by_their_silence() {
        let envoy = row(Incident::Hang, 20, Setting::Envoy, 0.0);
        let broker = row(Incident::Hang, 20, Setting::Broker, 0.0);
        let ms = broker.eject_ms.unwrap();
        assert!((1000..1800).contains(&ms), "{broker:?}");
        assert!(broker.to_bad < envoy.to_bad && broker.failed < envoy.failed, "{envoy:?}");
        assert_eq!(broker.false_ejections, 0, "{broker:?}");
    }

    #[test]
    fn grey_failures() {
        let errors = row(Incident::GreyErrors, 20, Setting::Broker, 0.002);
        assert!(errors.eject_ms.unwrap() <= 20_000, "a whole interval of it: {errors:?}");
        assert_eq!(errors.false_ejections, 0, "{errors:?}");
        let slow = row(Incident::GreySlow, 20, Setting::Broker, 0.002);
        assert!(slow.to_bad_percent < 2.0, "two choices avoid it: {slow:?}");
        assert_eq!(slow.false_ejections, 0, "{slow:?}");
    }

    #[test]
    fn chance_alone_ejects_by_success_rate() {
        let [envoy, tight, broker] = [Setting::Envoy, Setting::Tight, Setting::Broker]
            .map(|setting| row(Incident::Nothing, 20, setting, 0.002));
        assert!(envoy.false_ejections > 0 && tight.false_ejections > envoy.false_ejections);
        assert_eq!(broker.false_ejections, 0);
        assert_eq!(envoy.ejected_max, 2, "10 % of 20");
    }

    #[test]
    fn when_all_are_bad_few_are_ejected() {
        for (setting, most) in [(Setting::Envoy, 2), (Setting::Tight, 10), (Setting::Broker, 6)] {
            let row = row(Incident::AllBad, 20, setting, 0.0);
            assert_eq!((row.ejected_max, row.panic_percent), (most, 0.0), "half are left: {row:?}");
        }
    }

    #[test]
    fn deploys_and_flapping() {
        let deploy = row(Incident::RollingDeploy, 20, Setting::Broker, 0.0);
        assert_eq!((deploy.turned_bad, deploy.false_ejections), (20, 0), "{deploy:?}");
        let flapping = row(Incident::Flapping, 20, Setting::Broker, 0.0);
        assert!(flapping.turned_bad >= 2 && flapping.missed == 0, "{flapping:?}");
        assert_eq!(flapping.false_ejections, 0, "{flapping:?}");
    }
}
