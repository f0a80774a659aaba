//! Which origins behave unlike the others, and are left out for a while.
//!
//! The semantics are Envoy's, and exact: what is counted is an origin's, not a worker's, so that it
//! is out after exactly as many failures as configured, for every worker at once; and no burst of
//! them ejects more origins than allowed. Where Envoy brings an origin back with the next look at
//! its rates, it is back here when its time is over. Detectors are added for what shows on
//! sockets only: slow handshakes, long round trips, segments that are lost, and silence while requests
//! are under way.
//!
//! ```text
//! worker   host.record(outcome, sent, now, rng)   counts; ejects at once     lock-free
//!          let owing = host.owe(); …; owing.answered();
//!          host.is_available(now)           asked by the pick
//! control  cluster.set_hosts(…)             before workers hear of a new origin
//!          cluster.sweep(now, rng)          every Cluster::pace(): rates, silence, returns
//! ```
//!
//! Both `record` and `sweep` give [`Event`]s, which belong into a log. An ejected host should lose
//! its idle sockets: see [`Host::ejections`]. What is done when too few are left is
//! [`super::panic`]'s question.
//!
//! ```
//! # use std::net::SocketAddr;
//! # use std::time::Duration;
//! # use broker::{clock, config::outlier::Outlier, origin::outlier::{Cluster, Outcome}};
//! # let mut rng = <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(1);
//! let settings = Outlier { max_ejection_percent: 50, ..Outlier::default() };
//! let mut now = clock::now();
//! let cluster = Cluster::new(settings, now);
//! let origins = [1, 2].map(|n| SocketAddr::from(([10, 0, 0, n], 80)));
//! cluster.set_hosts(&origins);
//!
//! // In any worker; looked up once.
//! let host = cluster.host(origins[0]).unwrap();
//! let sent = now;
//! for _ in 0..4 {
//!     assert!(host.record(Outcome::Response(500), sent, now, &mut rng).is_empty());
//! }
//! let events = host.record(Outcome::Response(500), sent, now, &mut rng);
//! let line = serde_json::to_string(&events[0].line("web", now, 1_700_000_000_000)).unwrap();
//! assert!(line.contains(r#""detector":"5xx""#));
//! assert!(!host.is_available(now));
//!
//! // In the control thread.
//! now += Duration::from_secs(30);
//! assert_eq!(cluster.sweep(now, &mut rng).len(), 1);
//! assert!(host.is_available(now));
//! ```

mod event;
mod host;
mod shared;
mod streak;
mod sweep;
#[cfg(test)]
mod tests;
mod times;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Acquire;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rand::Rng;
use serde::{Deserialize, Serialize};

pub use event::{Action, Detector, Event, Evidence, Line, Withheld};
pub use host::{Failure, Host, Outcome, Owing};
pub use times::median;

use self::shared::Shared;
use self::sweep::Members;
use crate::config::outlier::Outlier;
use crate::stats::Counter;

/// Silence is looked for so many times within the time that is too long.
const LOOKS_PER_STALL: u32 = 4;
/// Looking costs a few loads for each host; more often than this is of no use.
const PACE_MIN: Duration = Duration::from_millis(10);

/// The origins of one service, for all workers.
#[derive(Debug)]
pub struct Cluster {
    shared: Arc<Shared>,
    /// Locked by the control thread, and when a worker learns of an origin.
    members: Mutex<Members>,
}

impl Cluster {
    /// No hosts yet. The first interval begins now.
    #[must_use]
    pub fn new(config: Outlier, now: Instant) -> Self {
        let members = Members::new(now + config.interval);
        Self { shared: Arc::new(Shared::new(config, now)), members: Mutex::new(members) }
    }

    /// From now on these are the hosts, which is what percentages are of. Those that stay keep what
    /// is known of them; one that comes back begins anew, as the same [`Host`] if a worker still
    /// has it.
    pub fn set_hosts(&self, addresses: &[SocketAddr]) {
        self.lock().set(addresses, &self.shared);
    }

    /// A host; `None` if it is not among those of [`Cluster::set_hosts`].
    #[must_use]
    pub fn host(&self, address: SocketAddr) -> Option<Arc<Host>> {
        self.lock().host(address)
    }

    /// All hosts.
    #[must_use]
    pub fn hosts(&self) -> Vec<Arc<Host>> {
        self.lock().all()
    }

    /// How often to call [`Cluster::sweep`].
    #[must_use]
    pub fn pace(&self) -> Duration {
        let config = &self.shared.config;
        (config.stall.time / LOOKS_PER_STALL).max(PACE_MIN).min(config.interval)
    }

    /// Whether the next [`Cluster::sweep`] ends an interval: what others count should be told to the
    /// hosts before.
    #[must_use]
    pub fn is_due(&self, now: Instant) -> bool {
        self.lock().is_due(now)
    }

    /// What must be looked at from time to time: which ejections are over, who is silent, and, once
    /// in each interval, the rates. Gives all that has happened, in order.
    #[must_use = "these are for the event log"]
    pub fn sweep(&self, now: Instant, rng: &mut impl Rng) -> Vec<Event> {
        self.lock().sweep(&self.shared, now, rng)
    }

    /// Of how many hosts how many are ejected, as of now or the last sweep. Takes no lock.
    #[must_use]
    pub fn ejected_of(&self) -> (usize, usize) {
        let hosts = self.shared.hosts.load(Acquire);
        // The two change one after the other.
        (self.shared.ejected().min(hosts), hosts)
    }

    /// For statistics.
    #[must_use]
    pub fn snapshot(&self, now: Instant) -> Snapshot {
        let members = self.lock();
        let counts = |counters: &[Counter]| -> BTreeMap<String, u64> {
            let all = Detector::ALL.iter().zip(counters);
            all.map(|(detector, count)| (detector.name().to_owned(), count.get())).collect()
        };
        let origins: Vec<_> = members.snapshots(now).collect();
        Snapshot {
            ejected: origins.iter().filter(|o| o.ejected_for_ms.is_some()).count() as u64,
            detected: counts(&self.shared.detected),
            enforced: counts(&self.shared.enforced),
            overflow: self.shared.overflow.get(),
            origins,
        }
    }

    /// Behind the lock is bookkeeping of the sweeps; a panic leaves at worst an interval uncounted.
    fn lock(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is known of a service's origins.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Origins that are ejected now.
    pub ejected: u64,
    /// Outliers noticed so far, by detector.
    pub detected: BTreeMap<String, u64>,
    /// Those of them that were ejected (or demoted).
    pub enforced: BTreeMap<String, u64>,
    /// Those that were not because as many as allowed were ejected already.
    pub overflow: u64,
    /// Each origin, by address.
    pub origins: Vec<HostSnapshot>,
}

/// What is known of one origin.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostSnapshot {
    /// Where it is.
    pub address: SocketAddr,
    /// How long it is still ejected.
    pub ejected_for_ms: Option<u64>,
    /// How often it has been ejected.
    pub ejections: u32,
    /// By how much the base time was multiplied the last time, less what has decayed.
    pub multiplier: u32,
    /// See [`Host::share`].
    pub share: u8,
    /// Percent of successes in the last whole interval; none without requests.
    pub success_rate: Option<f64>,
    /// Requests that wait for their response.
    pub owed: u32,
}
