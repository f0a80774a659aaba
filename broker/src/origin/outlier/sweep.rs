//! What is looked at from time to time, by one thread.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Release;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rand::Rng;

use super::HostSnapshot;
use super::event::{Detector, Event, Evidence};
use super::host::Host;
use super::shared::Shared;
use super::times::Times;
use crate::config::outlier::{Latency, Outlier, SlowAction};

/// What a slow origin gets of its share, in percent: enough to see when it is quick again.
const SLOW_SHARE: u8 = 25;

/// The hosts of a service, and what sweeps remember from one to the next.
#[derive(Debug)]
pub(super) struct Members {
    by_address: BTreeMap<SocketAddr, Member>,
    /// Those that have left, while workers have them.
    left: BTreeMap<SocketAddr, Weak<Host>>,
    interval_ends: Instant,
    /// Answers of all hosts that any sweep has seen.
    answers: u64,
}

#[derive(Debug)]
struct Member {
    host: Arc<Host>,
    success_rate: Option<f64>,
    /// Its answers, as the last sweep saw them.
    answers: u64,
    silence: Option<Silence>,
}

/// An origin has requests under way and has not answered any.
#[derive(Clone, Copy, Debug)]
struct Silence {
    since: Instant,
    /// [`Members::answers`] at that time.
    answers: u64,
}

impl Member {
    fn new(host: Arc<Host>) -> Self {
        Self { answers: host.answers(), host, success_rate: None, silence: None }
    }
}

impl Members {
    pub(super) fn new(interval_ends: Instant) -> Self {
        Self { by_address: BTreeMap::new(), left: BTreeMap::new(), interval_ends, answers: 0 }
    }

    pub(super) fn set(&mut self, addresses: &[SocketAddr], shared: &Arc<Shared>) {
        let mut before = std::mem::take(&mut self.by_address);
        for &address in addresses {
            let member = before.remove(&address).unwrap_or_else(|| self.add(address, shared));
            self.by_address.insert(address, member);
        }
        shared.hosts.store(self.by_address.len(), Release);
        self.left.retain(|_, host| host.strong_count() > 0);
        for (address, Member { host, .. }) in before {
            host.leave();
            self.left.insert(address, Arc::downgrade(&host));
        }
    }

    fn add(&mut self, address: SocketAddr, shared: &Arc<Shared>) -> Member {
        match self.left.remove(&address).and_then(|host| host.upgrade()) {
            Some(host) => {
                host.come_back();
                Member::new(host)
            }
            None => Member::new(Arc::new(Host::new(address, Arc::clone(shared)))),
        }
    }

    pub(super) fn host(&self, address: SocketAddr) -> Option<Arc<Host>> {
        self.by_address.get(&address).map(|member| Arc::clone(&member.host))
    }

    pub(super) fn all(&self) -> Vec<Arc<Host>> {
        self.by_address.values().map(|member| Arc::clone(&member.host)).collect()
    }

    pub(super) fn hosts(&self) -> impl Iterator<Item = &Host> {
        self.by_address.values().map(|member| &*member.host)
    }

    pub(super) fn snapshots(&self, now: Instant) -> impl Iterator<Item = HostSnapshot> {
        self.by_address.values().map(move |Member { host, success_rate, .. }| HostSnapshot {
            address: host.address(),
            ejected_for_ms: host.ejected_for(now).map(millis),
            ejections: host.ejections(),
            multiplier: host.multiplier(),
            share: host.share(),
            success_rate: *success_rate,
            owed: host.owed(),
        })
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        now >= self.interval_ends
    }

    pub(super) fn sweep(
        &mut self,
        shared: &Shared,
        now: Instant,
        rng: &mut impl Rng,
    ) -> Vec<Event> {
        let mut events: Vec<Event> =
            self.hosts().filter_map(|host| host.uneject_if_due(now)).collect();
        self.silences(shared, now, rng, &mut events);
        if !self.is_due(now) {
            return events;
        }
        self.interval_ends = now + shared.config.interval;
        self.rates(shared, now, rng, &mut events);
        self.latencies(&HANDSHAKES, shared, now, rng, &mut events);
        self.latencies(&ROUND_TRIPS, shared, now, rng, &mut events);
        self.retransmissions(shared, now, rng, &mut events);
        self.hosts().for_each(|host| host.end_interval(now));
        events
    }

    /// A host is hung if it owes responses, has given none for some time, and would have given
    /// some if it were like its peers. A long request is not enough: others on the same host are
    /// answered.
    fn silences(
        &mut self,
        shared: &Shared,
        now: Instant,
        rng: &mut impl Rng,
        events: &mut Vec<Event>,
    ) {
        let stall = shared.config.stall;
        let members = || self.by_address.values();
        let fleet: u64 = members().map(|m| m.host.answers().wrapping_sub(m.answers)).sum();
        self.answers += fleet;
        let in_service = members().filter(|m| m.host.is_in_service()).count();
        for member in self.by_address.values_mut() {
            let (host, answers) = (&member.host, member.host.answers());
            let answered = std::mem::replace(&mut member.answers, answers) != answers;
            let owed = host.owed();
            if answered || owed == 0 || !host.is_in_service() {
                member.silence = None;
            }
            if owed == 0 || !host.is_in_service() {
                continue;
            }
            let Silence { since, answers } =
                *member.silence.get_or_insert(Silence { since: now, answers: self.answers });
            let silent = now.saturating_duration_since(since);
            let peers_answers = self.answers - answers;
            let volume = u64::from(stall.volume).saturating_mul(in_service as u64 - 1);
            if silent < stall.time || in_service == 1 || peers_answers < volume {
                continue;
            }
            member.silence = None;
            let evidence = Evidence::Stall { owed, silent_ms: millis(silent), peers_answers };
            events.extend(host.eject(Detector::Stall, evidence, now, rng));
        }
    }

    fn rates(
        &mut self,
        shared: &Shared,
        now: Instant,
        rng: &mut impl Rng,
        events: &mut Vec<Event>,
    ) {
        let mut all = [Vec::new(), Vec::new()];
        for member in self.by_address.values_mut() {
            let rates = member.host.take_rates();
            member.success_rate = rates[0].success();
            for (all, rate) in all.iter_mut().zip(rates) {
                if let Some(success) = rate.success().filter(|_| member.host.is_in_service()) {
                    all.push(Rated {
                        host: Arc::clone(&member.host),
                        success,
                        requests: rate.total,
                    });
                }
            }
        }
        let detectors = [
            (Detector::SuccessRate, Detector::FailurePercentage),
            (Detector::SuccessRateLocalOrigin, Detector::FailurePercentageLocalOrigin),
        ];
        for (mut rated, (by_rate, by_percentage)) in all.into_iter().zip(detectors) {
            // Where not all can be ejected, the worst are.
            rated.sort_by(|a, b| a.success.total_cmp(&b.success));
            for (host, evidence) in success_rate(&rated, shared) {
                events.extend(host.eject(by_rate, evidence, now, rng));
            }
            for (host, evidence) in failure_percentage(&rated, shared) {
                events.extend(host.eject(by_percentage, evidence, now, rng));
            }
        }
    }

    fn latencies(
        &self,
        what: &Latencies,
        shared: &Shared,
        now: Instant,
        rng: &mut impl Rng,
        events: &mut Vec<Event>,
    ) {
        let (config, detector) = ((what.config)(&shared.config), what.detector);
        let mut medians: Vec<_> = self
            .hosts()
            .map(|host| (host, (what.times)(host).take()))
            .filter(|(host, (times, _))| host.is_in_service() && *times >= config.volume)
            .map(|(host, (times, p50_us))| (p50_us, times, host))
            .collect();
        medians.sort_by_key(|(p50_us, ..)| *p50_us);
        if !is_enough(medians.len(), config.minimum_hosts) {
            return;
        }
        let minimum_us = micros(config.minimum);
        // The slowest first, as where rates are judged.
        for (place, &(p50_us, times, host)) in medians.iter().enumerate().rev() {
            let peers_p50_us = medians[peers_median(medians.len(), place)].0;
            let evidence = (what.evidence)(p50_us, peers_p50_us, times);
            let far = u128::from(p50_us) * 1000
                >= u128::from(peers_p50_us) * u128::from(config.factor)
                && p50_us.saturating_sub(peers_p50_us) >= minimum_us;
            events.extend(match (far, config.action) {
                (true, SlowAction::Eject) => host.eject(detector, evidence, now, rng),
                (true, SlowAction::Weight) => demote(host, detector, evidence, shared, now, rng),
                (false, _) => host.set_share(100, detector, evidence, now),
            });
        }
    }

    /// Segments get lost between here and there, or on this gateway's own network: then with its peers,
    /// too.
    fn retransmissions(
        &self,
        shared: &Shared,
        now: Instant,
        rng: &mut impl Rng,
        events: &mut Vec<Event>,
    ) {
        let config = shared.config.retransmission_percentage;
        let mut by_share: Vec<_> = self
            .hosts()
            .map(|host| (host, host.take_segments()))
            .filter(|(host, [sent, _])| {
                host.is_in_service() && *sent >= u64::from(config.segment_volume)
            })
            .map(|(host, [sent, again])| (again as f64 * 100.0 / sent as f64, sent, host))
            .collect();
        by_share.sort_by(|a, b| a.0.total_cmp(&b.0));
        if !is_enough(by_share.len(), config.minimum_hosts) {
            return;
        }
        let detector = Detector::RetransmissionPercentage;
        for (place, &(share, segments, host)) in by_share.iter().enumerate().rev() {
            let peers_percentage = by_share[peers_median(by_share.len(), place)].0;
            if share < f64::from(config.threshold) || share < 2.0 * peers_percentage {
                continue;
            }
            let evidence = Evidence::RetransmissionPercentage {
                retransmission_percentage: share,
                peers_percentage,
                threshold: config.threshold,
                segments,
            };
            events.extend(host.eject(detector, evidence, now, rng));
        }
    }
}

/// Times by which slow origins are told.
struct Latencies {
    detector: Detector,
    config: fn(&Outlier) -> Latency,
    times: fn(&Host) -> &Times,
    /// Of an origin's median, its peers', and how many times it is of.
    evidence: fn(u64, u64, u32) -> Evidence,
}

const HANDSHAKES: Latencies = Latencies {
    detector: Detector::HandshakeLatency,
    config: |config| config.handshake_latency,
    times: |host| &host.handshakes,
    evidence: |p50_us, peers_p50_us, handshakes| Evidence::HandshakeLatency {
        p50_us,
        peers_p50_us,
        handshakes,
    },
};

const ROUND_TRIPS: Latencies = Latencies {
    detector: Detector::RttLatency,
    config: |config| config.rtt_latency,
    times: |host| &host.rtts,
    evidence: |p50_us, peers_p50_us, rtts| Evidence::RttLatency { p50_us, peers_p50_us, rtts },
};

/// Whether so many hosts can be compared.
fn is_enough(hosts: usize, minimum: u32) -> bool {
    hosts >= (minimum as usize).max(2)
}

/// Where the lower median of the others is, in order without the one at `place`.
fn peers_median(hosts: usize, place: usize) -> usize {
    let middle = (hosts - 2) / 2;
    middle + usize::from(middle >= place)
}

fn demote(
    host: &Host,
    detector: Detector,
    evidence: Evidence,
    shared: &Shared,
    now: Instant,
    rng: &mut impl Rng,
) -> Option<Event> {
    if host.share() < 100 {
        return None;
    }
    shared.detected[detector.index()].inc();
    if !shared.enforces(detector, rng) {
        return host.would_demote(detector, evidence, now);
    }
    shared.enforced[detector.index()].inc();
    host.set_share(SLOW_SHARE, detector, evidence, now)
}

/// A host with requests in the last interval.
struct Rated {
    host: Arc<Host>,
    success: f64,
    requests: u32,
}

/// Those whose success rate is too far below the mean.
fn success_rate<'a>(rated: &'a [Rated], shared: &Shared) -> Vec<(&'a Host, Evidence)> {
    let config = shared.config.success_rate;
    let enough: Vec<_> = rated.iter().filter(|r| r.requests >= config.request_volume).collect();
    if enough.is_empty() || enough.len() < config.minimum_hosts as usize {
        return Vec::new();
    }
    let Spread { mean, stdev } = Spread::of(&enough);
    let threshold = mean - stdev * f64::from(config.stdev_factor) / 1000.0;
    let outliers = enough.into_iter().filter(|rated| rated.success < threshold);
    outliers
        .map(|&Rated { ref host, success: success_rate, requests }| {
            (&**host, Evidence::SuccessRate { success_rate, mean, stdev, threshold, requests })
        })
        .collect()
}

/// Those with too many failures.
fn failure_percentage<'a>(rated: &'a [Rated], shared: &Shared) -> Vec<(&'a Host, Evidence)> {
    let config = shared.config.failure_percentage;
    let enough: Vec<_> = rated.iter().filter(|r| r.requests >= config.request_volume).collect();
    if enough.len() < config.minimum_hosts as usize {
        return Vec::new();
    }
    let threshold = config.threshold;
    enough
        .into_iter()
        .map(|rated| (rated, 100.0 - rated.success))
        .filter(|(_, failure_percentage)| *failure_percentage >= f64::from(threshold))
        .map(|(&Rated { ref host, requests, .. }, failure_percentage)| {
            (&**host, Evidence::FailurePercentage { failure_percentage, threshold, requests })
        })
        .collect()
}

/// How far success rates lie apart; of all of them, not of a sample.
struct Spread {
    mean: f64,
    stdev: f64,
}

impl Spread {
    fn of(hosts: &[&Rated]) -> Self {
        let n = hosts.len() as f64;
        let mean = hosts.iter().map(|host| host.success).sum::<f64>() / n;
        let variance = hosts.iter().map(|host| (host.success - mean).powi(2)).sum::<f64>() / n;
        Self { mean, stdev: variance.sqrt() }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
