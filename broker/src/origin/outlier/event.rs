//! What has happened to an origin, and why.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde::Serialize;

/// Something that an operator wants to know of. The line of a log comes from [`Event::line`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// When.
    #[serde(skip)]
    pub at: Instant,
    /// To whom.
    pub origin: SocketAddr,
    /// What.
    pub action: Action,
    /// Whether it was done. An ejection may only be reported: see [`Event::withheld`].
    pub enforced: bool,
    /// Why it was not done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub withheld: Option<Withheld>,
    /// Who noticed. None when an ejection is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detector: Option<Detector>,
    /// The numbers that led to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evidence: Option<Evidence>,
    /// How often the origin has been ejected so far, this time included.
    pub ejections: u32,
    /// By how much the base time is multiplied: grows with ejections, decays while all is well.
    pub multiplier: u32,
    /// Until when it is ejected.
    #[serde(skip)]
    pub until: Option<Instant>,
}

/// What happens to an origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// It gets no exchanges for some time.
    Eject,
    /// It is back: its time is over, or a health check has succeeded.
    Uneject,
    /// It gets fewer exchanges.
    Demote,
    /// It gets its full share again.
    Restore,
}

/// Why nothing was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Withheld {
    /// The detector's enforcing percentage.
    Enforcing,
    /// As many as allowed are ejected already.
    MaxEjectionPercent,
}

/// Who notices outliers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub enum Detector {
    /// Errors in a row.
    #[serde(rename = "5xx")]
    Consecutive5xx,
    /// Gateway failures in a row.
    #[serde(rename = "gateway_failure")]
    GatewayFailure,
    /// Local failures in a row.
    #[serde(rename = "local_origin_failure")]
    LocalOriginFailure,
    /// A success rate below the others'.
    #[serde(rename = "success_rate")]
    SuccessRate,
    /// The same, of local failures.
    #[serde(rename = "success_rate_local_origin")]
    SuccessRateLocalOrigin,
    /// Too many failures.
    #[serde(rename = "failure_percentage")]
    FailurePercentage,
    /// The same, of local failures.
    #[serde(rename = "failure_percentage_local_origin")]
    FailurePercentageLocalOrigin,
    /// Slow handshakes.
    #[serde(rename = "handshake_latency")]
    HandshakeLatency,
    /// Long round trips.
    #[serde(rename = "rtt_latency")]
    RttLatency,
    /// Segments that have to be sent again.
    #[serde(rename = "retransmission_percentage")]
    RetransmissionPercentage,
    /// Silence.
    #[serde(rename = "stall")]
    Stall,
}

impl Detector {
    /// All, in the order of [`Detector::index`].
    pub const ALL: [Self; 11] = [
        Self::Consecutive5xx,
        Self::GatewayFailure,
        Self::LocalOriginFailure,
        Self::SuccessRate,
        Self::SuccessRateLocalOrigin,
        Self::FailurePercentage,
        Self::FailurePercentageLocalOrigin,
        Self::HandshakeLatency,
        Self::RttLatency,
        Self::RetransmissionPercentage,
        Self::Stall,
    ];

    /// The name in events and statistics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Consecutive5xx => "5xx",
            Self::GatewayFailure => "gateway_failure",
            Self::LocalOriginFailure => "local_origin_failure",
            Self::SuccessRate => "success_rate",
            Self::SuccessRateLocalOrigin => "success_rate_local_origin",
            Self::FailurePercentage => "failure_percentage",
            Self::FailurePercentageLocalOrigin => "failure_percentage_local_origin",
            Self::HandshakeLatency => "handshake_latency",
            Self::RttLatency => "rtt_latency",
            Self::RetransmissionPercentage => "retransmission_percentage",
            Self::Stall => "stall",
        }
    }

    /// Its place in [`Detector::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}

/// The numbers behind an event.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Evidence {
    /// Failures in a row.
    Consecutive {
        /// How many.
        failures: u32,
        /// The status of the last one; none if it was a local failure.
        #[serde(skip_serializing_if = "Option::is_none")]
        status: Option<u16>,
    },
    /// A rate of the last interval, in percent.
    SuccessRate {
        /// The origin's.
        success_rate: f64,
        /// The mean of all with enough requests.
        mean: f64,
        /// Their standard deviation.
        stdev: f64,
        /// What is below this is an outlier.
        threshold: f64,
        /// Requests of the origin.
        requests: u32,
    },
    /// Failures of the last interval.
    FailurePercentage {
        /// In percent.
        failure_percentage: f64,
        /// What reaches this is an outlier.
        threshold: u8,
        /// Requests of the origin.
        requests: u32,
    },
    /// Handshakes of the last interval.
    HandshakeLatency {
        /// The origin's median, in microseconds.
        p50_us: u64,
        /// The median of its peers' medians.
        peers_p50_us: u64,
        /// Handshakes of the origin.
        handshakes: u32,
    },
    /// Round trips of the last interval.
    RttLatency {
        /// The origin's median, in microseconds.
        p50_us: u64,
        /// The median of its peers' medians.
        peers_p50_us: u64,
        /// Round trips of the origin that were noted.
        rtts: u32,
    },
    /// Segments of the last interval.
    RetransmissionPercentage {
        /// Sent again, in percent.
        retransmission_percentage: f64,
        /// The median of its peers.
        peers_percentage: f64,
        /// What reaches this is an outlier.
        threshold: u8,
        /// Segments sent to the origin.
        segments: u64,
    },
    /// No answers.
    Stall {
        /// Requests that are under way.
        owed: u32,
        /// For how long there was no answer to any, in milliseconds.
        silent_ms: u64,
        /// Answers of its peers meanwhile.
        peers_answers: u64,
    },
}

/// An event as a log has it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Line<'a> {
    /// Milliseconds since 1970.
    pub time_unix_ms: u64,
    /// Whose origin.
    pub service: &'a str,
    /// What happened.
    #[serde(flatten)]
    pub event: &'a Event,
    /// End of the ejection, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until_unix_ms: Option<u64>,
}

impl Event {
    /// The event with times that people can read: `now` is the same instant on both clocks.
    #[must_use]
    pub fn line<'a>(&'a self, service: &'a str, now: Instant, now_unix_ms: u64) -> Line<'a> {
        let millis = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        let unix = |at: Instant| {
            (now_unix_ms + millis(at.saturating_duration_since(now)))
                .saturating_sub(millis(now.saturating_duration_since(at)))
        };
        Line {
            time_unix_ms: unix(self.at),
            service,
            event: self,
            until_unix_ms: self.until.map(unix),
        }
    }
}
