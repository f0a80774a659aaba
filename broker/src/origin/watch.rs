//! What the workers and the control thread tell of origins, and what follows from it at once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rand::Rng;

use super::outlier::{Cluster, Event, Host, Outcome, Snapshot};
use super::panic::{self, Eligible, Hosts};
use crate::clock;
use crate::config::outlier::{Outlier, Panic};
use crate::events::EventLog;

/// Outlier detection of one service, for all workers.
#[derive(Debug)]
pub struct Watch {
    service: String,
    cluster: Cluster,
    panic: Panic,
    log: Arc<EventLog>,
}

impl Watch {
    /// Nobody is watched yet.
    #[must_use]
    pub fn new(service: String, outlier: Outlier, panic: Panic, log: Arc<EventLog>) -> Self {
        Self { service, cluster: Cluster::new(outlier, clock::now()), panic, log }
    }

    /// The cluster, for the control thread.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// An origin; to be looked up once.
    #[must_use]
    pub fn host(&self, origin: SocketAddr) -> Option<Arc<Host>> {
        self.cluster.host(origin)
    }

    /// Counts an outcome. Answers whether anything changed for anybody, which is rare.
    pub fn record(&self, host: &Host, outcome: Outcome, now: Instant, rng: &mut impl Rng) -> bool {
        self.tell(&host.record(outcome, now, rng))
    }

    /// Looks for what only time tells. Answers whether anything changed.
    pub fn sweep(&self, now: Instant, rng: &mut impl Rng) -> bool {
        self.tell(&self.cluster.sweep(now, rng))
    }

    /// Writes events into the log. Answers whether there were any.
    pub fn tell(&self, events: &[Event]) -> bool {
        for event in events {
            self.log.write(&event.line(&self.service, clock::now(), unix_ms()));
        }
        !events.is_empty()
    }

    /// Who gets exchanges.
    #[must_use]
    pub fn eligible(&self) -> Eligible {
        let (ejected, all) = self.cluster.ejected_of();
        // Degraded members are left out before, as long as there are better ones.
        panic::decide(Hosts { healthy: all - ejected, degraded: 0, ejected }, self.panic)
    }

    /// Of how many origins how many are ejected.
    #[must_use]
    pub fn ejected_of(&self) -> (usize, usize) {
        self.cluster.ejected_of()
    }

    /// For statistics.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.cluster.snapshot(clock::now())
    }
}

/// Milliseconds since 1970.
#[must_use]
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
