//! How the origins of a service are checked, whether clients use them or not. The names are those
//! of Envoy (`config.core.v3.HealthCheck`).

use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::time::Duration;

use hyper::Method;
use hyper::header::HeaderValue;
use hyper::http::uri::PathAndQuery;

/// How the origins of a service are checked.
#[derive(Clone, Debug)]
pub struct HealthCheck {
    /// What is tried.
    pub kind: Kind,
    /// From the end of one check of an origin to the next one.
    pub interval: Duration,
    /// A random part of so many percent of the interval is added to it.
    pub interval_jitter_percent: u32,
    /// The interval of origins that are unhealthy.
    pub unhealthy_interval: Duration,
    /// How long a check may take, connecting included. At most [`HealthCheck::interval`].
    pub timeout: Duration,
    /// Failures in a row that make an origin unhealthy.
    pub unhealthy_threshold: NonZeroU32,
    /// Successes in a row that make an unhealthy origin healthy.
    pub healthy_threshold: NonZeroU32,
    /// What an origin counts as until its first check has ended.
    pub initial: Initial,
}

/// What is tried.
#[derive(Clone, Debug)]
pub enum Kind {
    /// To connect. Each check takes a connection of its own.
    Tcp,
    /// To have a request answered.
    Http(Http),
}

/// The request, and which answers are good.
#[derive(Clone, Debug)]
pub struct Http {
    /// GET or HEAD.
    pub method: Method,
    /// What is asked for.
    pub path: PathAndQuery,
    /// Whom it is asked of.
    pub host: HeaderValue,
    /// Statuses of a healthy origin.
    pub expected_statuses: Vec<RangeInclusive<u16>>,
    /// Other statuses that count towards the threshold. All that are in neither list make the
    /// origin unhealthy at once.
    pub retriable_statuses: Vec<RangeInclusive<u16>>,
    /// Whether the connection is kept for the next check.
    pub reuse_connection: bool,
}

/// What an origin counts as until its first check has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Initial {
    /// Healthy. Clients that come while the daemon starts are served instead of refused; an origin
    /// that is down is found by its first check, and until then by those who fail to connect.
    #[default]
    Healthy,
    /// Unhealthy, as in Envoy, which lets nobody connect until the first checks have ended.
    Unhealthy,
}
