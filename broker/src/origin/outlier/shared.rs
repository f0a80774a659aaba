//! What all hosts of a service have in common: the settings, and how many are ejected.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::time::{Duration, Instant};

use rand::{Rng, RngExt};

use super::event::Detector;
use crate::config::outlier::Outlier;
use crate::stats::Counter;

/// A host that is not ejected.
pub(super) const IN_SERVICE: u64 = 0;
/// A host that is no longer part of the service.
pub(super) const GONE: u64 = 1;
/// A host that somebody is about to eject or to bring back.
pub(super) const CLAIMED: u64 = u64::MAX;
/// The first stamp.
const FIRST: u64 = GONE + 1;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: Outlier,
    epoch: Instant,
    pub(super) hosts: AtomicUsize,
    /// Reserved before a host is ejected and released after it is back, so never less than are.
    ejected: AtomicUsize,
    /// By [`Detector::index`].
    pub(super) detected: [Counter; Detector::ALL.len()],
    pub(super) enforced: [Counter; Detector::ALL.len()],
    /// Ejections that there was no room for.
    pub(super) overflow: Counter,
}

impl Shared {
    pub(super) fn new(config: Outlier, epoch: Instant) -> Self {
        Self {
            config,
            epoch,
            hosts: AtomicUsize::new(0),
            ejected: AtomicUsize::new(0),
            detected: Default::default(),
            enforced: Default::default(),
            overflow: Counter::default(),
        }
    }

    /// An instant as a number that fits an atomic: nanoseconds, good for centuries.
    pub(super) fn stamp(&self, at: Instant) -> u64 {
        let nanos = at.saturating_duration_since(self.epoch).as_nanos();
        u64::try_from(nanos).unwrap_or(u64::MAX).saturating_add(FIRST).min(CLAIMED - 1)
    }

    /// What a stamp stands for.
    pub(super) fn instant(&self, stamp: u64) -> Instant {
        self.epoch + Duration::from_nanos(stamp.saturating_sub(FIRST))
    }

    pub(super) fn ejected(&self) -> usize {
        self.ejected.load(Acquire)
    }

    pub(super) fn has_room(&self) -> bool {
        self.allows_one_more_than(self.ejected())
    }

    /// Takes up room for an ejection, unless others were faster.
    pub(super) fn reserve(&self) -> bool {
        let one_more = |n| self.allows_one_more_than(n).then_some(n + 1);
        self.ejected.fetch_update(AcqRel, Acquire, one_more).is_ok()
    }

    pub(super) fn release(&self) {
        self.ejected.fetch_sub(1, Release);
    }

    /// The one that would be next counts, too: with 10 hosts and 10 percent, one may be ejected.
    fn allows_one_more_than(&self, ejected: usize) -> bool {
        let percent = usize::from(self.config.max_ejection_percent);
        let within = (ejected + 1) * 100 <= percent * self.hosts.load(Acquire);
        within || (self.config.always_eject_one_host && ejected == 0)
    }

    /// Whether what a detector found is to be acted on.
    pub(super) fn enforces(&self, detector: Detector, rng: &mut impl Rng) -> bool {
        let config = &self.config;
        let percent = match detector {
            Detector::Consecutive5xx => config.consecutive_5xx.enforcing,
            Detector::GatewayFailure => config.consecutive_gateway_failure.enforcing,
            Detector::LocalOriginFailure => config.consecutive_local_origin_failure.enforcing,
            Detector::SuccessRate => config.success_rate.enforcing,
            Detector::SuccessRateLocalOrigin => config.success_rate.enforcing_local_origin,
            Detector::FailurePercentage => config.failure_percentage.enforcing,
            Detector::FailurePercentageLocalOrigin => {
                config.failure_percentage.enforcing_local_origin
            }
            Detector::HandshakeLatency => config.handshake_latency.enforcing,
            Detector::RttLatency => config.rtt_latency.enforcing,
            Detector::RetransmissionPercentage => config.retransmission_percentage.enforcing,
            Detector::Stall => config.stall.enforcing,
        };
        rng.random_range(0..100) < percent
    }
}
