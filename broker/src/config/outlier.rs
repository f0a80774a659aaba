//! When an origin is taken out because it behaves unlike the others; names and defaults are
//! Envoy's where Envoy has the setting.

use std::time::Duration;

/// Settings of [`crate::origin::outlier`]. Percentages are 0..=100.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outlier {
    /// Time between looks at the rates. Whoever is taken out at once does not wait for it.
    pub interval: Duration,
    /// An origin's first ejection; each further one in a row lasts that much longer.
    pub base_ejection_time: Duration,
    /// No ejection is longer, but for the jitter.
    pub max_ejection_time: Duration,
    /// A random time up to this one is added to each ejection.
    pub max_ejection_time_jitter: Duration,
    /// Most origins ejected at once, in percent; the one that would be next included.
    pub max_ejection_percent: u8,
    /// One may be ejected even if that is more than [`Outlier::max_ejection_percent`].
    pub always_eject_one_host: bool,
    /// An active health check that succeeds ends an ejection.
    pub successful_active_health_check_uneject_host: bool,
    /// Failures of the broker's own making (cannot connect, reset, timed out) are counted apart
    /// from what origins answer.
    pub split_external_local_origin_errors: bool,
    /// Errors in a row: 5xx, and local failures unless they are split off.
    pub consecutive_5xx: Consecutive,
    /// Gateway failures in a row: 502, 503, 504, and local failures unless they are split off.
    pub consecutive_gateway_failure: Consecutive,
    /// Local failures in a row; only if they are split off.
    pub consecutive_local_origin_failure: Consecutive,
    /// Success rates far below the mean.
    pub success_rate: SuccessRate,
    /// Too many failures, whatever the others do.
    pub failure_percentage: FailurePercentage,
    /// Handshakes that take much longer than the others'.
    pub handshake_latency: Latency,
    /// Round trips that take much longer than the others'.
    pub rtt_latency: Latency,
    /// Segments that have to be sent again.
    pub retransmission_percentage: RetransmissionPercentage,
    /// Silence while requests are under way and the others answer.
    pub stall: Stall,
}

/// A number of failures in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Consecutive {
    /// So many; 0 turns the detector off.
    pub failures: u32,
    /// Chance that an ejection is carried out, in percent.
    pub enforcing: u8,
}

/// Settings of `success_rate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SuccessRate {
    /// Origins with enough requests that there must be.
    pub minimum_hosts: u32,
    /// Requests within an interval that are enough.
    pub request_volume: u32,
    /// Standard deviations below the mean that are too far, in thousandths.
    pub stdev_factor: u32,
    /// Chance that an ejection is carried out, in percent.
    pub enforcing: u8,
    /// The same for local failures, if they are split off.
    pub enforcing_local_origin: u8,
}

/// Settings of `failure_percentage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailurePercentage {
    /// Failures that are too many, in percent of the requests.
    pub threshold: u8,
    /// Origins with enough requests that there must be.
    pub minimum_hosts: u32,
    /// Requests within an interval that are enough.
    pub request_volume: u32,
    /// Chance that an ejection is carried out, in percent.
    pub enforcing: u8,
    /// The same for local failures, if they are split off.
    pub enforcing_local_origin: u8,
}

/// Settings of `handshake_latency` and `rtt_latency`. Envoy has nothing like them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latency {
    /// Too slow is a median of so many times the median of the others' medians, in thousandths;
    pub factor: u32,
    /// and slower than that by so much, because a factor of very little is very little.
    pub minimum: Duration,
    /// Origins with enough of them that there must be.
    pub minimum_hosts: u32,
    /// Handshakes, or round trips that were noted, within an interval that are enough.
    pub volume: u32,
    /// What happens to a slow origin.
    pub action: SlowAction,
    /// Chance that it happens, in percent.
    pub enforcing: u8,
}

/// What happens to a slow origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SlowAction {
    /// It is ejected.
    #[default]
    Eject,
    /// It gets a smaller share of the exchanges until it is quick again.
    Weight,
}

/// Settings of `retransmission_percentage`. Envoy has nothing like it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetransmissionPercentage {
    /// Segments sent again that are too many, in percent of all that carry data; they must be twice as
    /// many as with an average peer, or it is this gateway's own network that loses them.
    pub threshold: u8,
    /// Origins with enough segments that there must be.
    pub minimum_hosts: u32,
    /// Segments within an interval that are enough.
    pub segment_volume: u32,
    /// Chance that an ejection is carried out, in percent.
    pub enforcing: u8,
}

/// Settings of `stall`. Envoy has nothing like it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// Silence that is too long.
    pub time: Duration,
    /// Answers of an average peer meanwhile that make the silence mean something.
    pub volume: u32,
    /// Chance that an ejection is carried out, in percent.
    pub enforcing: u8,
}

impl Default for Outlier {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(10),
            base_ejection_time: Duration::from_secs(30),
            max_ejection_time: Duration::from_mins(5),
            max_ejection_time_jitter: Duration::ZERO,
            max_ejection_percent: 10,
            always_eject_one_host: false,
            successful_active_health_check_uneject_host: true,
            split_external_local_origin_errors: false,
            consecutive_5xx: Consecutive { failures: 5, enforcing: 100 },
            consecutive_gateway_failure: Consecutive { failures: 5, enforcing: 0 },
            consecutive_local_origin_failure: Consecutive { failures: 5, enforcing: 100 },
            success_rate: SuccessRate {
                minimum_hosts: 5,
                request_volume: 100,
                stdev_factor: 1900,
                enforcing: 100,
                enforcing_local_origin: 100,
            },
            failure_percentage: FailurePercentage {
                threshold: 85,
                minimum_hosts: 5,
                request_volume: 50,
                enforcing: 0,
                enforcing_local_origin: 0,
            },
            handshake_latency: Latency {
                factor: 3000,
                minimum: Duration::from_millis(5),
                minimum_hosts: 5,
                volume: 5,
                action: SlowAction::Eject,
                enforcing: 0,
            },
            rtt_latency: Latency {
                factor: 3000,
                minimum: Duration::from_millis(5),
                minimum_hosts: 5,
                volume: 20,
                action: SlowAction::Eject,
                enforcing: 0,
            },
            retransmission_percentage: RetransmissionPercentage {
                threshold: 5,
                minimum_hosts: 5,
                segment_volume: 200,
                enforcing: 0,
            },
            stall: Stall { time: Duration::from_secs(1), volume: 10, enforcing: 100 },
        }
    }
}

/// What happens when too few origins are left; see [`crate::origin::panic`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panic {
    /// With fewer origins available than this, in percent, it is no longer believed that the
    /// others are bad. 0: it always is.
    pub threshold: u8,
    /// In a panic clients are refused; otherwise all origins are used.
    pub fail_on_panic: bool,
}

impl Default for Panic {
    fn default() -> Self {
        Self { threshold: 50, fail_on_panic: false }
    }
}
