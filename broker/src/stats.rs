//! Every metric of the daemon, and the versioned [`Snapshot`] that leaves it.
//!
//! Each worker writes counters of its own (no cache line is shared on the request path); the
//! control thread sums them up when somebody asks.

mod delta;
pub mod histogram;
pub mod host;
mod registry;
mod snapshot;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub use histogram::Histogram;
pub use registry::{Registry, ServiceRecords};
pub use snapshot::{
    DatapathSnapshot, ENDPOINTS_MAX, EndpointSnapshot, GatewaySnapshot, HealthSnapshot,
    HostCounters, LimitSnapshot, MembershipSnapshot, OriginSnapshot, OriginTotals, PathSnapshot,
    Process, SNAPSHOT_VERSION, ServiceSnapshot, Snapshot, SnapshotError, SteeredSnapshot,
};

use crate::boundary::CloseReason;

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
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Sets the value.
    pub fn set(&self, n: usize) {
        self.0.store(n as u64, Relaxed);
    }

    /// The current value.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
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
    /// Idle, while the limit of connections kept another from being opened.
    MadeRoom,
    /// The origin was ejected: when it is back it may sit behind another path.
    Ejected,
    /// The origin left the service, or was forgotten.
    OriginRemoved,
    /// The daemon is stopping.
    Drain,
    /// The exchange ended in a way that forbids reuse.
    Exchange(CloseReason),
}

impl EvictReason {
    /// Every reason, in the order of [`EvictReason::index`].
    pub const ALL: [Self; 25] = [
        Self::IdleClosed,
        Self::IdleBytes,
        Self::IdleTtl,
        Self::Lifetime,
        Self::Requests,
        Self::IdleOverflow,
        Self::MadeRoom,
        Self::Ejected,
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
        Self::Exchange(CloseReason::UnreadBody),
        Self::Exchange(CloseReason::ClientGone),
        Self::Exchange(CloseReason::ConnectionAuth),
        Self::Exchange(CloseReason::NoBoundary),
        Self::Exchange(CloseReason::IncompleteRequest),
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
            Self::MadeRoom => "made_room",
            Self::Ejected => "ejected",
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
                CloseReason::UnreadBody => "unread_body",
                CloseReason::ClientGone => "client_gone",
                CloseReason::ConnectionAuth => "connection_auth",
                CloseReason::NoBoundary => "no_boundary",
                CloseReason::IncompleteRequest => "incomplete_request",
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
    /// The group in which the kernel counts for it, plus one; 0 if there is none.
    group: Gauge,
    /// Connections dialled successfully.
    pub created: Counter,
    /// Exchanges (or opaque connections) served by a socket that had served another one before;
    /// the first one on a pre-warmed socket is not among them.
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
    /// 1 while the last dial has failed.
    pub failing: Gauge,
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
    /// Responses with a status of 500 or above, whether they were passed on or not.
    pub responses_5xx: Counter,
    /// Responses that the kernel carried in groups that it no longer counts in, by the first digit of
    /// their status.
    pub steered_status: [Counter; 8],
}

impl OriginMetrics {
    /// Says in which group the kernel counts for this origin.
    pub fn set_group(&self, group: Option<usize>) {
        self.group.set(group.map_or(0, |group| group + 1));
    }

    /// The group in which the kernel counts for it.
    #[must_use]
    pub fn group(&self) -> Option<usize> {
        usize::try_from(self.group.get()).ok()?.checked_sub(1)
    }

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
    /// Failures to accept one: out of descriptors, memory and the like; and intercepted ones that were reset
    /// because of that.
    pub accept_failed: Counter,
    /// Client connections open.
    pub clients_open: Gauge,
    /// Exchanges finished (opaque: connections).
    pub exchanges: Counter,
    /// Those of them that the kernel carried to origins that have left; for others the kernel itself
    /// keeps count.
    pub steered: Counter,
    /// Bytes forwarded from clients to origins.
    pub request_bytes: Counter,
    /// Bytes forwarded from origins to clients.
    pub response_bytes: Counter,
    /// Exchanges waiting for a socket.
    pub waiting: Gauge,
    /// Exchanges refused because too many were waiting already.
    pub queue_overflow: Counter,
    /// Exchanges refused because too many were under way already.
    pub request_overflow: Counter,
    /// Exchanges that failed because too many were being tried again already.
    pub retry_overflow: Counter,
    /// Further attempts at exchanges: at another connection, or on another socket.
    pub retries: Counter,
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
