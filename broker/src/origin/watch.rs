//! What the workers and the control thread tell of origins, and what follows from it at once.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use broker_ebpf::abi::Path;
use rand::Rng;

use super::outlier::{Action, Cluster, Event, Host, Outcome, Snapshot};
use super::panic::{self, Eligible, Hosts};
use crate::clock;
use crate::config::outlier::{Outlier, Panic};
use crate::datapath::Datapath;
use crate::datapath::steering::Steering;
use crate::events::EventLog;

/// Outlier detection of one service, for all workers.
pub struct Watch {
    service: String,
    cluster: Cluster,
    panic: Panic,
    log: Arc<EventLog>,
    /// What the kernel carries to each origin.
    kernel: Mutex<HashMap<SocketAddr, Vec<Carries>>>,
    /// What each host has heard of the way to it.
    paths: Mutex<HashMap<SocketAddr, Path>>,
}

/// What the kernel carries to an origin for one worker.
struct Carries {
    steering: Arc<Steering>,
    group: usize,
    /// Exchanges completed, and under way, that the host has heard of.
    told: (u64, u64),
}

/// What came of counting an outcome.
#[derive(Clone, Copy, Debug)]
pub struct Recorded {
    /// Whether anything changed for anybody, which is rare.
    pub changed: bool,
    /// Whether the origin is ejected for what came before this.
    pub late: bool,
}

impl Watch {
    /// Nobody is watched yet.
    #[must_use]
    pub fn new(service: String, outlier: Outlier, panic: Panic, log: Arc<EventLog>) -> Self {
        let cluster = Cluster::new(outlier, clock::now());
        let (kernel, paths) = Default::default();
        Self { service, cluster, panic, log, kernel, paths }
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

    /// The kernel counts in this group what it carries to an origin for one worker.
    pub fn carries(&self, origin: SocketAddr, steering: &Arc<Steering>, group: usize) {
        let steering = Arc::clone(steering);
        let told = steering.progress(group);
        self.lock().entry(origin).or_default().push(Carries { steering, group, told });
    }

    /// It no longer does.
    pub fn carries_no_more(&self, origin: SocketAddr, group: usize) {
        let mut kernel = self.lock();
        if let Some(carried) = kernel.get_mut(&origin) {
            carried.retain(|carries| carries.group != group);
            if carried.is_empty() {
                kernel.remove(&origin);
            }
        }
    }

    /// Tells a host what the kernel has carried to it meanwhile, for all workers.
    pub fn hear_kernel(&self, host: &Host) {
        let mut kernel = self.lock();
        let Some(all) = kernel.get_mut(&host.address()) else { return };
        let (mut carried, mut under_way) = (0, 0);
        for carries in all {
            let (completed, active) = carries.steering.progress(carries.group);
            let (before, was_active) = std::mem::replace(&mut carries.told, (completed, active));
            carried += u32::try_from(completed.wrapping_sub(before)).unwrap_or(0);
            under_way += u32::try_from(active).unwrap_or(0);
            let change = active.cast_signed().wrapping_sub(was_active.cast_signed());
            host.add_owed(i32::try_from(change).unwrap_or(0));
        }
        // Under the lock: what is under way belongs to what was carried before.
        host.record_carried(carried, under_way);
    }

    /// Counts an outcome of a request that was sent then.
    pub fn record(
        &self,
        host: &Host,
        outcome: Outcome,
        sent: Instant,
        now: Instant,
        rng: &mut impl Rng,
    ) -> Recorded {
        // Failures in a row are such only if the kernel has carried nothing in between. A streak that
        // begins must know what was under way no earlier than its first failure was read.
        let failed = !matches!(outcome, Outcome::Response(..500) | Outcome::Accepted);
        if failed {
            self.hear_kernel(host);
        }
        let events = host.record(outcome, sent, now, rng);
        let ejected = events.iter().any(|event| event.enforced && event.action == Action::Eject);
        let changed = self.tell(&events);
        Recorded { changed, late: failed && !ejected && host.is_out(now) }
    }

    /// Tells hosts what connections to them have seen of the way, where that is about to be judged.
    pub fn hear_paths(&self, now: Instant, datapath: &dyn Datapath) {
        if !self.cluster.is_due(now) {
            return;
        }
        let mut told = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        let hosts = self.cluster.hosts();
        told.retain(|origin, _| hosts.iter().any(|host| host.address() == *origin));
        for host in hosts {
            let path = datapath.path(host.address()).unwrap_or(Path::UNUSED);
            // What came before it was watched is nobody's fault.
            let Some(before) = told.insert(host.address(), path) else { continue };
            // It may have been forgotten in the meantime.
            let before = if path.segments < before.segments { Path::UNUSED } else { before };
            let rtts = std::array::from_fn(|i| path.rtt_us[i].saturating_sub(before.rtt_us[i]));
            let again = path.retransmitted.saturating_sub(before.retransmitted);
            host.record_path(path.segments - before.segments, again, &rtts);
        }
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

    /// Behind the lock are counts of counts: a panic elsewhere leaves nothing that would be worse
    /// than none.
    fn lock(&self) -> MutexGuard<'_, HashMap<SocketAddr, Vec<Carries>>> {
        self.kernel.lock().unwrap_or_else(PoisonError::into_inner)
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
