//! The versioned [`Snapshot`]: what leaves the daemon, and how it is put together.
//!
//! Plain data with public fields, because three readers share it: the admin socket's JSON, the
//! Prometheus text, and `broker stats`, which may be of another build than the daemon.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use broker_ebpf::abi::Path;
use serde::{Deserialize, Serialize};

use super::histogram::quantile;
use super::{Counter, EvictReason, OriginMetrics};
use crate::datapath::steering::SteeredOrigin;
use crate::datapath::{ConnectionCounters, Endpoint, KernelCounters};
use crate::fleet;
use crate::origin::outlier;

/// Version of the snapshot's layout; grows whenever a field changes its meaning or goes away.
pub const SNAPSHOT_VERSION: u32 = 1;

/// Most endpoints in a snapshot; the kernel remembers many more.
pub const ENDPOINTS_MAX: usize = 64;

/// What the daemon tells about itself at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`SNAPSHOT_VERSION`].
    pub version: u32,
    /// The daemon's own version.
    pub broker_version: String,
    /// When the snapshot was taken, milliseconds of Unix time.
    pub taken_unix_ms: u64,
    /// Time since the daemon started.
    pub uptime_ms: u64,
    /// Event loops.
    pub workers: usize,
    /// Lines of the event log that could not be written.
    #[serde(default)]
    pub events_lost: u64,
    /// Which gateway of its fleet this daemon is.
    #[serde(default)]
    pub gateway: Option<GatewaySnapshot>,
    /// Whether the kernel programs are loaded, and if not, why.
    pub datapath: DatapathSnapshot,
    /// In the order of the configuration.
    pub services: Vec<ServiceSnapshot>,
    /// Remote endpoints as the kernel counted them, for every process of the host: the
    /// [`ENDPOINTS_MAX`] with the most handshakes, most first.
    pub endpoints: Vec<EndpointSnapshot>,
    /// TCP counters of the daemon's network namespace.
    pub host: HostCounters,
}

/// Which gateway of its fleet a daemon is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GatewaySnapshot {
    /// Its index; `None` until it is known.
    pub index: Option<u32>,
    /// How many positions the fleet has.
    pub gateways: u32,
    /// Where the index comes from: `number`, `hostname`, `file`, `env` or `etcd`.
    pub source: String,
    /// What is wrong with that now.
    pub error: Option<String>,
    /// Who else has this index, as long as that is so.
    pub conflict: Option<String>,
    /// How often another gateway was found to have this one's index.
    pub conflicts: u64,
}

impl From<&fleet::Status> for GatewaySnapshot {
    fn from(status: &fleet::Status) -> Self {
        Self {
            index: status.identity.map(|identity| identity.index),
            gateways: status.identity.map_or(0, |identity| identity.gateways),
            source: status.source.to_owned(),
            error: status.error(),
            conflict: status.conflict.clone(),
            conflicts: status.conflicts,
        }
    }
}

/// State of the kernel programs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DatapathSnapshot {
    /// `kernel`, or `none`.
    pub mode: String,
    /// Why there are no kernel programs.
    pub reason: Option<String>,
    /// Whether clients can be steered in the kernel.
    #[serde(default)]
    pub steering: bool,
    /// Why not, if something in the configuration asks for it.
    #[serde(default)]
    pub steering_reason: Option<String>,
    /// Rare events of steering, by name; zero counts are left out.
    #[serde(default)]
    pub steering_events: BTreeMap<String, u64>,
    /// `connect()` calls sent to the broker.
    pub rewritten: u64,
    /// Left alone: no worker with a fresh heartbeat.
    pub left_stale_heartbeat: u64,
    /// Left alone: another network namespace.
    pub left_other_netns: u64,
    /// Left alone: not one of the service's cgroups.
    pub left_other_cgroup: u64,
    /// Endpoints pushed out of the bounded kernel map.
    pub endpoints_evicted: u64,
    /// Connections of which only the attempt was counted: the map of those under way was full.
    #[serde(default)]
    pub connections_not_followed: u64,
    /// Connections by other processes of this host: attempted, established.
    pub others_attempted: u64,
    /// See `others_attempted`.
    pub others_established: u64,
    /// The broker's own.
    pub broker_attempted: u64,
    /// See `broker_attempted`.
    pub broker_established: u64,
}

/// One limit of a service, all workers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitSnapshot {
    /// The limit.
    pub max: u64,
    /// How much of it is used.
    pub used: u64,
    /// How often it was in somebody's way.
    pub overflow: u64,
}

/// Who the origins of a service are, and who says so.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MembershipSnapshot {
    /// `static`, or the kind of its source.
    pub source: String,
    /// The source's own name for its last good list.
    pub version: String,
    /// Good lists so far.
    pub accepted: u64,
    /// Lists that could not be used.
    pub refused: u64,
    /// What is wrong with the source now.
    pub error: Option<String>,
    /// What the list has beside the members of the priority level in use, by reason: members of other
    /// levels, those that are about to leave, and what could not be used.
    #[serde(default)]
    pub left_out: BTreeMap<String, u64>,
    /// How often the origins in use have changed.
    pub changes: u64,
    /// Members of the priority level in use.
    pub members: u64,
    /// Those of them that are healthy, as the source says.
    pub healthy: u64,
    /// Those of them that this gateway uses.
    pub used: u64,
    /// How many of them are in the subset of this gateway; `None` if it uses all.
    #[serde(default)]
    pub subset: Option<u64>,
    /// Where on the ring this gateway's arc begins, in 0..1; `None` without a ring.
    #[serde(default)]
    pub ring_position: Option<f64>,
    /// Where it ends: at the last origin of the subset.
    #[serde(default)]
    pub ring_end: Option<f64>,
    /// Most idle sockets that there can be: workers times origins used times `pool.max_idle`.
    #[serde(default)]
    pub idle_max: u64,
    /// How many of them only because others are not healthy.
    pub widened: u64,
    /// The priority level in use.
    pub priority: u32,
    /// What health checks have found, by origin.
    #[serde(default)]
    pub checks: BTreeMap<String, HealthSnapshot>,
}

/// What the health checks of one origin have shown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthSnapshot {
    /// `unknown`, `healthy`, `degraded` or `unhealthy`.
    pub state: String,
    /// For how long.
    pub state_ms: u64,
    /// Whether the last check passed.
    pub passing: bool,
    /// Checks in a row that ended like the last one: passed or failed.
    pub consecutive: u32,
    /// Checks that have ended.
    pub checks: u64,
    /// Those of them that failed.
    pub failures: u64,
    /// Why the last check failed, or could not be made.
    pub last_error: Option<String>,
}

/// One service, summed over the workers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServiceSnapshot {
    /// Its name.
    pub name: String,
    /// `http1` or `opaque`.
    pub protocol: String,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    pub clients: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    pub accept_failed: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    pub clients_open: u64,
    /// Exchanges by the daemon, see [`ServiceMetrics`](super::ServiceMetrics), and by the kernel.
    pub exchanges: u64,
    /// Those of them that the kernel carried.
    #[serde(default)]
    pub steered: u64,
    /// Requests and responses that it left to the daemon, by
    /// [`WhyNot::name`](broker_ebpf::scan::WhyNot::name); zero counts are left out.
    #[serde(default)]
    pub not_steered: BTreeMap<String, u64>,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    pub request_bytes: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    pub response_bytes: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    pub waiting: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    pub queue_overflow: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    pub queue_timed_out: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    #[serde(default)]
    pub request_overflow: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    #[serde(default)]
    pub retry_overflow: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    #[serde(default)]
    pub retries: u64,
    /// Connections over the limit, to origins that had none.
    #[serde(default)]
    pub connections_guaranteed: u64,
    /// Intercepted connections that the kernel refused because neither a connection nor a place in the
    /// queue was left.
    #[serde(default)]
    pub connects_refused: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    pub unreachable: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    pub origin_failed: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    pub clients_gone: u64,
    /// See [`ServiceMetrics`](super::ServiceMetrics).
    pub destination_unknown: u64,
    /// Its limits, by their names in the configuration.
    #[serde(default)]
    pub limits: BTreeMap<String, LimitSnapshot>,
    /// The cgroups that its interception is restricted to, and whether they are there.
    #[serde(default)]
    pub cgroups: BTreeMap<String, bool>,
    /// What outlier detection has found, if it is on.
    #[serde(default)]
    pub outliers: Option<outlier::Snapshot>,
    /// Who the origins are, and who says so.
    #[serde(default)]
    pub membership: Option<MembershipSnapshot>,
    /// In the order of the configuration, then discovered ones by address.
    pub origins: Vec<OriginSnapshot>,
    /// Sums over discovered origins that have been forgotten since, so that the service's totals
    /// never go back.
    pub forgotten: OriginTotals,
}

/// One origin of one service, summed over the workers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OriginSnapshot {
    /// Its address.
    pub address: SocketAddr,
    /// See [`OriginMetrics`].
    pub created: u64,
    /// See [`OriginMetrics`].
    pub reused: u64,
    /// See [`OriginMetrics`].
    pub returned: u64,
    /// By [`EvictReason::name`]; zero counts are left out.
    pub evicted: BTreeMap<String, u64>,
    /// See [`OriginMetrics`].
    pub idle: u64,
    /// See [`OriginMetrics`].
    pub active: u64,
    /// See [`OriginMetrics`].
    pub dialling: u64,
    /// Median handshake time (upper edge of its power-of-two bucket).
    pub handshake_p50_us: u64,
    /// 99th percentile of the handshake time (upper edge of its bucket).
    pub handshake_p99_us: u64,
    /// See [`OriginMetrics`].
    pub dial_refused: u64,
    /// See [`OriginMetrics`].
    pub dial_timed_out: u64,
    /// See [`OriginMetrics`].
    pub dial_failed: u64,
    /// See [`OriginMetrics`].
    pub retried: u64,
    /// See [`OriginMetrics`].
    #[serde(default)]
    pub responses_5xx: u64,
    /// What the kernel carried; part of the numbers above.
    #[serde(default)]
    pub steered: SteeredSnapshot,
    /// What the broker's connections to it, those of other services as well, have seen of the way.
    #[serde(default)]
    pub path: Option<PathSnapshot>,
}

/// The way to an origin, as the kernel's TCP sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathSnapshot {
    /// Segments with data sent.
    pub segments: u64,
    /// Segments sent again.
    pub retransmitted: u64,
    /// The smoothed round-trip time of a connection that was used lately.
    pub srtt_us: u64,
    /// The median of all smoothed round-trip times that were noted (upper edge of its bucket).
    pub rtt_p50_us: u64,
}

impl From<&Path> for PathSnapshot {
    fn from(path: &Path) -> Self {
        Self {
            segments: path.segments,
            retransmitted: path.retransmitted,
            srtt_us: path.srtt_us,
            rtt_p50_us: outlier::median(&path.rtt_us).1,
        }
    }
}

/// The exchanges with one origin that the kernel carried.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SteeredSnapshot {
    /// Completed.
    pub exchanges: u64,
    /// Taken over by the daemon at the first bytes of their response.
    pub taken_over: u64,
    /// Segments that came for clients which had left.
    pub clients_gone: u64,
    /// Responses by class of their status (`2xx`); zero counts are left out.
    pub status: BTreeMap<String, u64>,
    /// Median time from request to first response byte (upper edge of its bucket).
    pub latency_p50_us: u64,
    /// 99th percentile of it (upper edge of its bucket).
    pub latency_p99_us: u64,
}

impl SteeredSnapshot {
    fn new(origin: &SteeredOrigin) -> Self {
        Self {
            exchanges: origin.completed,
            taken_over: origin.taken_over,
            clients_gone: origin.clients_gone,
            status: by_class(&origin.status),
            latency_p50_us: quantile(&origin.latency_us, 0.5),
            latency_p99_us: quantile(&origin.latency_us, 0.99),
        }
    }
}

/// TCP counters of a network namespace, from `/proc/net/{snmp,netstat,sockstat}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCounters {
    /// Connections opened from here.
    pub active_opens: u64,
    /// Connections accepted here.
    pub passive_opens: u64,
    /// Failed handshakes, both directions.
    pub attempt_fails: u64,
    /// Established connections that were reset.
    pub estab_resets: u64,
    /// Sockets in TIME_WAIT now.
    pub time_wait: u64,
    /// Connections dropped because an accept queue was full.
    pub listen_overflows: u64,
}

/// The growing numbers of one origin, or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OriginTotals {
    /// See [`OriginMetrics`].
    pub created: u64,
    /// See [`OriginMetrics`].
    pub reused: u64,
    /// See [`OriginMetrics`].
    pub returned: u64,
    /// By [`EvictReason::name`]; zero counts are left out.
    pub evicted: BTreeMap<String, u64>,
    /// See [`OriginMetrics`].
    pub dial_refused: u64,
    /// See [`OriginMetrics`].
    pub dial_timed_out: u64,
    /// See [`OriginMetrics`].
    pub dial_failed: u64,
    /// See [`OriginMetrics`].
    pub retried: u64,
    /// See [`OriginMetrics`].
    pub responses_5xx: u64,
    /// Responses that the kernel carried, by class of their status; see [`SteeredSnapshot::status`].
    #[serde(default)]
    pub steered_status: BTreeMap<String, u64>,
}

impl OriginTotals {
    /// Adds what one worker has counted.
    pub fn add(&mut self, metrics: &OriginMetrics) {
        self.created += metrics.created.get();
        self.reused += metrics.reused.get();
        self.returned += metrics.returned.get();
        for (reason, count) in EvictReason::ALL.iter().zip(&metrics.evicted) {
            if count.get() > 0 {
                *self.evicted.entry(reason.name().to_owned()).or_default() += count.get();
            }
        }
        self.dial_refused += metrics.dial_refused.get();
        self.dial_timed_out += metrics.dial_timed_out.get();
        self.dial_failed += metrics.dial_failed.get();
        self.retried += metrics.retried.get();
        self.responses_5xx += metrics.responses_5xx.get();
        let steered = metrics.steered_status.each_ref().map(Counter::get);
        add_named(&mut self.steered_status, &by_class(&steered));
    }

    /// Adds other totals.
    pub fn merge(&mut self, other: &Self) {
        self.created += other.created;
        self.reused += other.reused;
        self.returned += other.returned;
        add_named(&mut self.evicted, &other.evicted);
        self.dial_refused += other.dial_refused;
        self.dial_timed_out += other.dial_timed_out;
        self.dial_failed += other.dial_failed;
        self.retried += other.retried;
        self.responses_5xx += other.responses_5xx;
        add_named(&mut self.steered_status, &other.steered_status);
    }
}

fn add_named(to: &mut BTreeMap<String, u64>, more: &BTreeMap<String, u64>) {
    for (name, count) in more {
        *to.entry(name.clone()).or_default() += count;
    }
}

/// Counts by the first digit of a status, by name; zero counts are left out.
fn by_class(status: &[u64]) -> BTreeMap<String, u64> {
    let classes = status.iter().enumerate().filter(|(_, n)| **n > 0);
    classes.map(|(class, n)| (format!("{class}xx"), *n)).collect()
}

impl OriginSnapshot {
    /// One origin, summed over what each worker counts for it, and what others have counted `before`.
    #[must_use]
    pub fn sum<'a>(
        address: SocketAddr,
        before: Option<&OriginTotals>,
        workers: impl IntoIterator<Item = &'a OriginMetrics>,
    ) -> Self {
        let mut totals = before.cloned().unwrap_or_default();
        let [mut idle, mut active, mut dialling] = [0; 3];
        let mut handshake_us = Vec::new();
        for metrics in workers {
            totals.add(metrics);
            idle += metrics.idle.get();
            active += metrics.active.get();
            dialling += metrics.dialling.get();
            let counts = metrics.handshake_us.counts();
            handshake_us.resize(counts.len(), 0);
            handshake_us.iter_mut().zip(counts).for_each(|(sum, n)| *sum += n);
        }
        Self {
            address,
            created: totals.created,
            reused: totals.reused,
            returned: totals.returned,
            evicted: totals.evicted,
            idle,
            active,
            dialling,
            handshake_p50_us: quantile(&handshake_us, 0.5),
            handshake_p99_us: quantile(&handshake_us, 0.99),
            dial_refused: totals.dial_refused,
            dial_timed_out: totals.dial_timed_out,
            dial_failed: totals.dial_failed,
            retried: totals.retried,
            responses_5xx: totals.responses_5xx,
            steered: SteeredSnapshot {
                status: totals.steered_status,
                ..SteeredSnapshot::default()
            },
            path: None,
        }
    }

    /// Adds what the kernel carried for it.
    pub(super) fn add_steered(&mut self, carried: &SteeredOrigin) {
        self.reused += carried.reused;
        self.returned += carried.completed;
        let before = std::mem::replace(&mut self.steered, SteeredSnapshot::new(carried)).status;
        add_named(&mut self.steered.status, &before);
    }

    /// The growing numbers.
    #[must_use]
    pub fn totals(&self) -> OriginTotals {
        OriginTotals {
            created: self.created,
            reused: self.reused,
            returned: self.returned,
            evicted: self.evicted.clone(),
            dial_refused: self.dial_refused,
            dial_timed_out: self.dial_timed_out,
            dial_failed: self.dial_failed,
            retried: self.retried,
            responses_5xx: self.responses_5xx,
            steered_status: self.steered.status.clone(),
        }
    }
}

impl ServiceSnapshot {
    /// Adds what the kernel carried for one of its origins.
    pub(super) fn add_steered(&mut self, origin: &SteeredOrigin) {
        self.exchanges += origin.completed;
        self.steered += origin.completed;
        self.request_bytes += origin.request_bytes;
        self.response_bytes += origin.response_bytes;
    }

    /// The growing numbers of all origins, forgotten ones too.
    #[must_use]
    pub fn totals(&self) -> OriginTotals {
        let mut totals = self.forgotten.clone();
        self.origins.iter().for_each(|origin| totals.merge(&origin.totals()));
        totals
    }
}

/// One remote endpoint of active connections, as the kernel programs counted it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointSnapshot {
    /// The remote address.
    pub remote: SocketAddr,
    /// Whether these are the broker's own connections.
    pub broker: bool,
    /// See [`ConnectionCounters`].
    pub attempted: u64,
    /// See [`ConnectionCounters`].
    pub established: u64,
    /// See [`ConnectionCounters`].
    pub refused: u64,
    /// See [`ConnectionCounters`].
    pub timed_out: u64,
    /// See [`ConnectionCounters`].
    pub failed_other: u64,
    /// See [`ConnectionCounters`].
    pub abandoned: u64,
    /// See [`ConnectionCounters`].
    pub closed: u64,
    /// See [`ConnectionCounters`].
    pub reset: u64,
    /// See [`ConnectionCounters`].
    pub open: u64,
    /// See [`ConnectionCounters`].
    pub open_peak: u64,
    /// Mean handshake time.
    pub handshake_mean_us: u64,
    /// 99th percentile of the handshake time (upper edge of its bucket).
    pub handshake_p99_us: u64,
    /// Median of the time that connections stayed open (upper edge of its bucket).
    pub lifetime_p50_ms: u64,
}

impl From<&Endpoint> for EndpointSnapshot {
    fn from(endpoint: &Endpoint) -> Self {
        let c: &ConnectionCounters = &endpoint.counters;
        Self {
            remote: endpoint.remote,
            broker: endpoint.broker,
            attempted: c.outcomes.attempted,
            established: c.outcomes.established,
            refused: c.outcomes.refused,
            timed_out: c.outcomes.timed_out,
            failed_other: c.outcomes.failed_other,
            abandoned: c.outcomes.abandoned,
            closed: c.outcomes.closed,
            reset: c.outcomes.reset,
            open: c.open,
            open_peak: c.open_peak,
            handshake_mean_us: c.handshake_us_sum.checked_div(c.outcomes.established).unwrap_or(0),
            handshake_p99_us: quantile(&c.handshake_us, 0.99),
            lifetime_p50_ms: quantile(&c.lifetime_ms, 0.5),
        }
    }
}

/// What a snapshot says about the process itself.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// Milliseconds of Unix time.
    pub now_unix_ms: u64,
    /// Milliseconds since the daemon started.
    pub uptime_ms: u64,
    /// Event loops.
    pub workers: usize,
}

impl Snapshot {
    /// Reads a snapshot, as the admin socket serves it or `broker stats --save` writes it.
    pub fn from_json(json: &[u8]) -> Result<Self, SnapshotError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }

        // First the version alone: the rest of another layout would only give a riddle.
        let Versioned { version } = serde_json::from_slice(json).map_err(SnapshotError::Json)?;
        if version != SNAPSHOT_VERSION {
            return Err(SnapshotError::Version(version));
        }
        serde_json::from_slice(json).map_err(SnapshotError::Json)
    }

    /// Puts a snapshot together. The services come from [`super::Registry::services`]; without
    /// kernel programs, `kernel` says why there are none.
    #[must_use]
    pub fn assemble(
        process: Process,
        services: Vec<ServiceSnapshot>,
        kernel: Result<&KernelCounters, &str>,
        host: HostCounters,
    ) -> Self {
        let nothing = KernelCounters::default();
        let (mode, reason, counters) = match kernel {
            Ok(counters) => ("kernel", None, counters),
            Err(reason) => ("none", Some(reason.to_owned()), &nothing),
        };
        let mut endpoints: Vec<&Endpoint> = counters.endpoints.iter().collect();
        // The address breaks ties, so that a watched table keeps still.
        endpoints.sort_by_key(|e| (Reverse(e.counters.outcomes.established), e.remote, e.broker));
        endpoints.truncate(ENDPOINTS_MAX);
        Self {
            version: SNAPSHOT_VERSION,
            broker_version: env!("CARGO_PKG_VERSION").to_owned(),
            taken_unix_ms: process.now_unix_ms,
            uptime_ms: process.uptime_ms,
            workers: process.workers,
            events_lost: 0,
            gateway: None,
            datapath: DatapathSnapshot {
                mode: mode.to_owned(),
                reason,
                steering: counters.steering.on,
                steering_reason: counters.steering.off_because.clone(),
                steering_events: counters.steering.by_name(),
                rewritten: counters.intercept.rewritten,
                left_stale_heartbeat: counters.intercept.stale_heartbeat,
                left_other_netns: counters.intercept.other_netns,
                left_other_cgroup: counters.intercept.other_cgroup,
                endpoints_evicted: counters.endpoints_evicted,
                connections_not_followed: counters.not_followed,
                others_attempted: counters.totals_others.attempted,
                others_established: counters.totals_others.established,
                broker_attempted: counters.totals_broker.attempted,
                broker_established: counters.totals_broker.established,
            },
            services,
            endpoints: endpoints.into_iter().map(EndpointSnapshot::from).collect(),
            host,
        }
    }
}

/// Why a text is not a snapshot.
#[derive(Debug)]
pub enum SnapshotError {
    /// Not JSON, or not of a snapshot's shape.
    Json(serde_json::Error),
    /// A layout that this build does not know.
    Version(u32),
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(_) => write!(f, "not a snapshot"),
            Self::Version(version) => write!(
                f,
                "a snapshot of layout version {version}, and this build reads version \
                 {SNAPSHOT_VERSION}: use the `broker` that wrote it"
            ),
        }
    }
}

impl std::error::Error for SnapshotError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Json(error) => Some(error),
            Self::Version(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::Outcomes;

    #[test]
    fn the_busiest_endpoints_are_kept() {
        let endpoints = (1..=100u16)
            .map(|port| Endpoint {
                remote: SocketAddr::from(([10, 0, 0, 1], port)),
                broker: false,
                counters: ConnectionCounters {
                    outcomes: Outcomes { established: u64::from(port), ..Outcomes::default() },
                    handshake_us_sum: 10 * u64::from(port),
                    ..ConnectionCounters::default()
                },
            })
            .collect();
        let kernel = KernelCounters { endpoints, ..Default::default() };
        let process = Process { now_unix_ms: 1, uptime_ms: 2, workers: 3 };
        let snapshot =
            Snapshot::assemble(process, Vec::new(), Ok(&kernel), HostCounters::default());
        assert_eq!(snapshot.endpoints.len(), ENDPOINTS_MAX);
        assert_eq!(snapshot.endpoints[0].established, 100);
        assert_eq!(snapshot.endpoints[0].handshake_mean_us, 10);
        assert_eq!(snapshot.datapath.mode, "kernel");
        let json = serde_json::to_string(&snapshot).unwrap();
        let back: Snapshot = serde_json::from_str(&json).unwrap();
        assert_eq!(back.endpoints, snapshot.endpoints);
    }

    #[test]
    fn unknown_layouts_are_named() {
        let error = Snapshot::from_json(b"{\"version\":7}").unwrap_err().to_string();
        assert!(error.contains("version 7"), "{error}");
        assert!(matches!(Snapshot::from_json(b"{\"version\":1}"), Err(SnapshotError::Json(_))));
        assert!(matches!(Snapshot::from_json(b"hello"), Err(SnapshotError::Json(_))));
    }

    #[test]
    fn origins_sum_over_workers() {
        let [a, b] = [OriginMetrics::default(), OriginMetrics::default()];
        a.created.add(2);
        b.created.add(3);
        b.evict(EvictReason::IdleTtl);
        a.handshake_us.record(100);
        let sum = OriginSnapshot::sum(SocketAddr::from(([10, 0, 0, 1], 80)), None, [&a, &b]);
        assert_eq!((sum.created, sum.handshake_p50_us), (5, 128));
        assert_eq!(sum.evicted, BTreeMap::from([("idle_ttl".to_owned(), 1)]));
    }
}
