//! Every metric of the daemon, and the versioned [`Snapshot`] that leaves it.
//!
//! Each worker writes counters of its own (no cache line is shared on the request path); the
//! control thread sums them up when somebody asks.

pub mod histogram;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

pub use histogram::Histogram;

use crate::boundary::CloseReason;

/// Version of the snapshot's layout; grows whenever a field changes its meaning or goes away.
pub const SNAPSHOT_VERSION: u32 = 1;

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds one.
    pub fn inc(&self) {
        self.add(1);
    }

    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// The current value.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicI64);

impl Gauge {
    /// Sets the value.
    pub fn set(&self, n: usize) {
        self.0.store(i64::try_from(n).unwrap_or(i64::MAX), Relaxed);
    }

    /// Adds one until the guard is dropped.
    pub fn enter(self: &std::sync::Arc<Self>) -> GaugeGuard {
        self.0.fetch_add(1, Relaxed);
        GaugeGuard(std::sync::Arc::clone(self))
    }

    /// The current value; a moment's negative race reads as 0.
    pub fn get(&self) -> u64 {
        u64::try_from(self.0.load(Relaxed)).unwrap_or(0)
    }
}

/// Keeps a [`Gauge`] raised by one.
#[derive(Debug)]
pub struct GaugeGuard(std::sync::Arc<Gauge>);

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Relaxed);
    }
}

/// Why a pool let go of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EvictReason {
    /// The origin ended or reset the idle connection.
    IdleClosed,
    /// Bytes arrived on the idle connection.
    IdleBytes,
    /// Idle for longer than `idle_ttl` (or the origin's own `Keep-Alive: timeout`).
    IdleTtl,
    /// Older than `max_lifetime`.
    Lifetime,
    /// Served `max_requests` exchanges.
    Requests,
    /// More idle sockets than `max_idle`.
    IdleOverflow,
    /// The origin left the service, or was forgotten.
    OriginRemoved,
    /// The daemon is stopping.
    Drain,
    /// The exchange ended in a way that forbids reuse.
    Exchange(CloseReason),
}

impl EvictReason {
    /// Every reason, in the order of [`EvictReason::index`].
    pub const ALL: [Self; 21] = [
        Self::IdleClosed,
        Self::IdleBytes,
        Self::IdleTtl,
        Self::Lifetime,
        Self::Requests,
        Self::IdleOverflow,
        Self::OriginRemoved,
        Self::Drain,
        Self::Exchange(CloseReason::OriginPersistence),
        Self::Exchange(CloseReason::BodyUntilClose),
        Self::Exchange(CloseReason::Tunnel),
        Self::Exchange(CloseReason::AmbiguousRequest),
        Self::Exchange(CloseReason::AmbiguousResponse),
        Self::Exchange(CloseReason::EarlyResponse),
        Self::Exchange(CloseReason::Truncated),
        Self::Exchange(CloseReason::Unsolicited),
        Self::Exchange(CloseReason::ClientGone),
        Self::Exchange(CloseReason::ConnectionAuth),
        Self::Exchange(CloseReason::NoBoundary),
        Self::Exchange(CloseReason::OriginError),
        Self::Exchange(CloseReason::Timeout),
    ];

    /// The name used in snapshots.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::IdleClosed => "idle_closed",
            Self::IdleBytes => "idle_bytes",
            Self::IdleTtl => "idle_ttl",
            Self::Lifetime => "lifetime",
            Self::Requests => "requests",
            Self::IdleOverflow => "idle_overflow",
            Self::OriginRemoved => "origin_removed",
            Self::Drain => "drain",
            Self::Exchange(reason) => match reason {
                CloseReason::OriginPersistence => "origin_persistence",
                CloseReason::BodyUntilClose => "body_until_close",
                CloseReason::Tunnel => "tunnel",
                CloseReason::AmbiguousRequest => "ambiguous_request",
                CloseReason::AmbiguousResponse => "ambiguous_response",
                CloseReason::EarlyResponse => "early_response",
                CloseReason::Truncated => "truncated",
                CloseReason::Unsolicited => "unsolicited",
                CloseReason::ClientGone => "client_gone",
                CloseReason::ConnectionAuth => "connection_auth",
                CloseReason::NoBoundary => "no_boundary",
                CloseReason::OriginError => "origin_error",
                CloseReason::Timeout => "timeout",
            },
        }
    }

    /// Position in [`EvictReason::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        Self::ALL.iter().position(|&r| r == self).unwrap_or(0)
    }
}

/// The counters of one origin in one worker.
#[derive(Debug, Default)]
pub struct OriginMetrics {
    /// Connections dialled successfully.
    pub created: Counter,
    /// Exchanges (or opaque connections) served by a socket that was idle before.
    pub reused: Counter,
    /// Leases that went back to the pool.
    pub returned: Counter,
    /// Sockets let go, by [`EvictReason::index`].
    pub evicted: [Counter; EvictReason::ALL.len()],
    /// Idle sockets.
    pub idle: Gauge,
    /// Leased sockets.
    pub active: Gauge,
    /// Handshakes under way.
    pub dialling: Gauge,
    /// Handshake times, microseconds.
    pub handshake_us: Histogram,
    /// Dials that were refused.
    pub dial_refused: Counter,
    /// Dials that reached `connect_timeout` or the kernel's own limit.
    pub dial_timed_out: Counter,
    /// Dials that failed otherwise.
    pub dial_failed: Counter,
    /// Reused sockets that failed before the first response byte, and whose request went to
    /// another socket.
    pub retried: Counter,
}

impl OriginMetrics {
    /// Counts a socket that was let go.
    pub fn evict(&self, reason: EvictReason) {
        self.evicted[reason.index()].inc();
    }
}

/// The counters of one service in one worker.
#[derive(Debug, Default)]
pub struct ServiceMetrics {
    /// Client connections accepted.
    pub clients: Counter,
    /// Client connections open.
    pub clients_open: std::sync::Arc<Gauge>,
    /// Exchanges finished (opaque: connections).
    pub exchanges: Counter,
    /// Bytes forwarded from clients to origins.
    pub request_bytes: Counter,
    /// Bytes forwarded from origins to clients.
    pub response_bytes: Counter,
    /// Exchanges waiting for a socket.
    pub waiting: Gauge,
    /// Exchanges refused because too many were waiting already.
    pub queue_overflow: Counter,
    /// Exchanges refused after `queue_timeout`.
    pub queue_timed_out: Counter,
    /// Exchanges refused because no origin could be reached.
    pub unreachable: Counter,
    /// Exchanges that the origin failed after they had been sent and could not be repeated.
    pub origin_failed: Counter,
    /// Clients that left, or were dropped for stalling, in the middle of an exchange.
    pub clients_gone: Counter,
    /// Intercepted connections without a record of what the client dialled; closed.
    pub destination_unknown: Counter,
}

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
    /// Whether the kernel programs are loaded, and if not, why.
    pub datapath: DatapathSnapshot,
    /// In the order of the configuration.
    pub services: Vec<ServiceSnapshot>,
    /// TCP counters of the daemon's network namespace.
    pub host: HostCounters,
}

/// State of the kernel programs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DatapathSnapshot {
    /// `kernel`, or `none`.
    pub mode: String,
    /// Why there are no kernel programs.
    pub reason: Option<String>,
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
    /// Connections by other processes of this host: attempted, established.
    pub others_attempted: u64,
    /// See `others_attempted`.
    pub others_established: u64,
    /// The broker's own.
    pub broker_attempted: u64,
    /// See `broker_attempted`.
    pub broker_established: u64,
}

/// One service, summed over the workers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServiceSnapshot {
    /// Its name.
    pub name: String,
    /// `http1` or `opaque`.
    pub protocol: String,
    /// See [`ServiceMetrics`].
    pub clients: u64,
    /// See [`ServiceMetrics`].
    pub clients_open: u64,
    /// See [`ServiceMetrics`].
    pub exchanges: u64,
    /// See [`ServiceMetrics`].
    pub request_bytes: u64,
    /// See [`ServiceMetrics`].
    pub response_bytes: u64,
    /// See [`ServiceMetrics`].
    pub waiting: u64,
    /// See [`ServiceMetrics`].
    pub queue_overflow: u64,
    /// See [`ServiceMetrics`].
    pub queue_timed_out: u64,
    /// See [`ServiceMetrics`].
    pub unreachable: u64,
    /// See [`ServiceMetrics`].
    pub origin_failed: u64,
    /// See [`ServiceMetrics`].
    pub clients_gone: u64,
    /// See [`ServiceMetrics`].
    pub destination_unknown: u64,
    /// In the order of the configuration (discovered ones by address).
    pub origins: Vec<OriginSnapshot>,
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
