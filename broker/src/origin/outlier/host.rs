//! One origin, as all workers see it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use broker_ebpf::abi::FINE_BUCKETS;
use rand::{Rng, RngExt};

use super::event::{Action, Detector, Event, Evidence, Withheld};
use super::shared::{CLAIMED, GONE, IN_SERVICE, Shared};
use super::streak::Streak;
use super::times::Times;

/// How an exchange with an origin, or an attempt at one, has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The head of a response came, with this status.
    Response(u16),
    /// A connection was accepted, in a service whose answers say nothing of success.
    Accepted,
    /// It was not the origin that said so, but there was no response.
    Failed(Failure),
}

/// A failure that the broker has seen itself; Envoy calls it locally originated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection: refused, unreachable, or not in time.
    Connect,
    /// The connection ended before the response did.
    Reset,
    /// No response in time.
    Timeout,
}

impl Failure {
    /// What Envoy counts it as, unless local failures are split off.
    fn status(self) -> u16 {
        match self {
            Self::Connect | Self::Reset => 503,
            Self::Timeout => 504,
        }
    }
}

/// One origin. Workers keep an `Arc` from when the origin is added until it is dropped.
#[derive(Debug)]
pub struct Host {
    address: SocketAddr,
    shared: Arc<Shared>,
    /// [`IN_SERVICE`], [`GONE`], [`CLAIMED`], or the stamp until which it is ejected.
    state: AtomicU64,
    /// So far.
    ejections: AtomicU32,
    /// Whether it is ejected because it was silent.
    silent: AtomicBool,
    multiplier: AtomicU32,
    /// Stamp of the end of the last ejection; 0 if there was none.
    returned: AtomicU64,
    /// See [`Host::share`].
    share: AtomicU8,
    /// The index of the detector that has made it less.
    demoted_by: AtomicU8,
    /// A bit for each detector that has reported without effect in this interval.
    reported: AtomicU32,
    counts: Counts,
    pub(super) handshakes: Times,
    pub(super) rtts: Times,
    /// Segments sent to it, and how many of them again.
    segments: [AtomicU64; 2],
}

/// What each exchange changes. Apart from what each pick reads: a pick would otherwise wait for
/// the cache line that another worker has just written.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Counts {
    /// All outcomes, or what origins answered if local failures are split off.
    outcomes: Tally,
    /// Local failures and their absence, if they are split off.
    local: Tally,
    consecutive_5xx: Streak,
    consecutive_gateway_failure: Streak,
    consecutive_local_origin_failure: Streak,
    /// Exchanges that others have under way, as of when they last told.
    carrying: AtomicU32,
    owed: AtomicU32,
    answers: AtomicU64,
}

/// Outcomes of an interval: all in the upper half, successes in the lower one, so that one
/// addition counts both and nobody sees them disagree.
#[derive(Debug, Default)]
struct Tally(AtomicU64);

/// What a [`Tally`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    pub(super) total: u32,
    successes: u32,
}

impl Tally {
    fn add(&self, n: u32, success: bool) {
        let successes = if success { n } else { 0 };
        self.0.fetch_add(u64::from(n) << 32 | u64::from(successes), Relaxed);
    }

    #[expect(clippy::cast_possible_truncation, reason = "two halves")]
    fn take(&self) -> Rate {
        let both = self.0.swap(0, Relaxed);
        Rate { total: (both >> 32) as u32, successes: both as u32 }
    }
}

impl Rate {
    /// In percent; `None` without any.
    pub(super) fn success(self) -> Option<f64> {
        (self.total > 0).then(|| f64::from(self.successes) * 100.0 / f64::from(self.total))
    }
}

impl Host {
    pub(super) fn new(address: SocketAddr, shared: Arc<Shared>) -> Self {
        Self {
            address,
            shared,
            state: AtomicU64::new(IN_SERVICE),
            ejections: AtomicU32::new(0),
            silent: AtomicBool::new(false),
            multiplier: AtomicU32::new(0),
            returned: AtomicU64::new(0),
            share: AtomicU8::new(100),
            demoted_by: AtomicU8::new(0),
            reported: AtomicU32::new(0),
            counts: Counts::default(),
            handshakes: Times::default(),
            rtts: Times::default(),
            segments: Default::default(),
        }
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether it may be picked; its time being over is enough. One load.
    #[must_use]
    pub fn is_available(&self, now: Instant) -> bool {
        let state = self.state.load(Acquire);
        state <= GONE || state <= self.shared.stamp(now)
    }

    /// Whether it is out because it owes responses and gives none: there is no point in waiting for
    /// those.
    #[must_use]
    pub fn is_silent(&self, now: Instant) -> bool {
        !self.is_available(now) && self.silent.load(Relaxed)
    }

    /// How often it has been ejected. A worker that sees this grow closes its idle sockets there:
    /// an origin that is cured may sit behind another path.
    #[must_use]
    pub fn ejections(&self) -> u32 {
        self.ejections.load(Relaxed)
    }

    /// The share of exchanges that it should get, in percent of what its weight says.
    #[must_use]
    pub fn share(&self) -> u8 {
        self.share.load(Relaxed)
    }

    /// Whether what it has just answered is one failure too many: it is ejected, or somebody is about to
    /// decide that.
    #[must_use]
    pub fn is_out(&self, now: Instant) -> bool {
        let counts = &self.counts;
        // In this order: what was decided can be seen before it is said that it was.
        [&counts.consecutive_5xx, &counts.consecutive_gateway_failure]
            .iter()
            .any(|s| s.is_judging())
            || !self.is_available(now)
    }

    /// Counts an outcome, whoever saw it, of a request (or an attempt to connect) that was sent then. If
    /// it is the one too many, the origin is ejected here and now: no worker picks it after this. Takes no
    /// lock; the answer is nearly always empty (and then costs nothing), and otherwise belongs into the
    /// event log.
    #[must_use = "these are for the event log"]
    pub fn record(
        &self,
        outcome: Outcome,
        sent: Instant,
        now: Instant,
        rng: &mut impl Rng,
    ) -> Vec<Event> {
        let mut events = Vec::new();
        // Before counting, because it is back with nothing counted against it.
        events.extend(self.uneject_if_due(now));
        let split = self.shared.config.split_external_local_origin_errors;
        let sent = self.shared.stamp(sent);
        match outcome {
            Outcome::Response(status) => {
                self.count(status, Some(status), sent, now, rng, &mut events);
                if split {
                    self.local_success(sent);
                }
            }
            Outcome::Accepted if split => self.local_success(sent),
            Outcome::Accepted => self.success(sent),
            Outcome::Failed(_) if split => self.local_failure(now, rng, &mut events),
            Outcome::Failed(failure) => {
                self.count(failure.status(), None, sent, now, rng, &mut events);
            }
        }
        events
    }

    /// Counts `n` exchanges that others have carried out, all with responses below 500; so many more are
    /// under way with them, which must not be less than there were when `n` was known.
    pub fn record_carried(&self, n: u32, under_way: u32) {
        let counts = &self.counts;
        if n > 0 {
            counts.outcomes.add(n, true);
            counts.consecutive_5xx.carried(n);
            counts.consecutive_gateway_failure.carried(n);
            if self.shared.config.split_external_local_origin_errors {
                counts.local.add(n, true);
                counts.consecutive_local_origin_failure.carried(n);
            }
            counts.answers.fetch_add(u64::from(n), Relaxed);
        }
        // Only now: a streak that begins with this number has yet to hear of all that follow, and of no
        // others.
        counts.carrying.store(under_way, Release);
    }

    /// How long a handshake took.
    pub fn record_handshake(&self, took: Duration) {
        self.handshakes.record(took);
    }

    /// What connections to it have seen of the way meanwhile: how many segments were sent, how many of
    /// them again, and round trips by [`broker_ebpf::flow::fine_bucket`] of their microseconds.
    pub fn record_path(&self, sent: u64, again: u64, rtts: &[u64; FINE_BUCKETS]) {
        self.segments[0].fetch_add(sent, Relaxed);
        self.segments[1].fetch_add(again, Relaxed);
        self.rtts.add(rtts);
    }

    /// A request has been sent. Keep what this gives until the response begins.
    #[must_use = "dropping it says that nobody waits for the response any more"]
    pub fn owe(self: &Arc<Self>) -> Owing {
        self.add_owed(1);
        Owing(Arc::clone(self))
    }

    /// Others have sent so many more requests than they have got responses.
    pub fn add_owed(&self, change: i32) {
        self.counts.owed.fetch_add(change.cast_unsigned(), Relaxed);
    }

    /// An active health check has succeeded, which ends an ejection unless that is turned off.
    pub fn health_check_succeeded(&self, now: Instant) -> Option<Event> {
        let ends = self.shared.config.successful_active_health_check_uneject_host;
        let state = self.state.load(Acquire);
        (ends && state > GONE).then(|| self.uneject(state, now)).flatten()
    }

    pub(super) fn is_in_service(&self) -> bool {
        self.state.load(Acquire) == IN_SERVICE
    }

    /// How long it is still ejected; `None` if it is not.
    pub(super) fn ejected_for(&self, now: Instant) -> Option<Duration> {
        let state = self.state.load(Acquire);
        let until = (state > GONE).then(|| self.shared.instant(state))?;
        Some(until.saturating_duration_since(now))
    }

    pub(super) fn multiplier(&self) -> u32 {
        self.multiplier.load(Relaxed)
    }

    pub(super) fn owed(&self) -> u32 {
        self.counts.owed.load(Relaxed)
    }

    pub(super) fn answers(&self) -> u64 {
        self.counts.answers.load(Relaxed)
    }

    /// What was counted since the last call: all, and local failures that are split off.
    pub(super) fn take_rates(&self) -> [Rate; 2] {
        [self.counts.outcomes.take(), self.counts.local.take()]
    }

    /// Segments sent since the last call, and how many of them again.
    pub(super) fn take_segments(&self) -> [u64; 2] {
        self.segments.each_ref().map(|count| count.swap(0, Relaxed))
    }

    fn success(&self, sent: u64) {
        self.counts.outcomes.add(1, true);
        self.counts.consecutive_5xx.succeeded(sent);
        self.counts.consecutive_gateway_failure.succeeded(sent);
    }

    fn local_success(&self, sent: u64) {
        self.counts.local.add(1, true);
        self.counts.consecutive_local_origin_failure.succeeded(sent);
    }

    /// `shown` is the status for the event.
    fn count(
        &self,
        status: u16,
        shown: Option<u16>,
        sent: u64,
        now: Instant,
        rng: &mut impl Rng,
        events: &mut Vec<Event>,
    ) {
        if !(500..600).contains(&status) {
            return self.success(sent);
        }
        self.counts.outcomes.add(1, false);
        let config = &self.shared.config;
        let (errors, limit) = (&self.counts.consecutive_5xx, config.consecutive_5xx.failures);
        let gateway = &self.counts.consecutive_gateway_failure;
        // In Envoy's order: of two that notice the same failure, the second one may find that
        // there is nothing left to do.
        if matches!(status, 502..=504) {
            let limit = config.consecutive_gateway_failure.failures;
            self.failed(gateway, limit, Detector::GatewayFailure, shown, now, rng, events);
        } else {
            gateway.succeeded(sent);
        }
        self.failed(errors, limit, Detector::Consecutive5xx, shown, now, rng, events);
    }

    fn local_failure(&self, now: Instant, rng: &mut impl Rng, events: &mut Vec<Event>) {
        self.counts.local.add(1, false);
        let limit = self.shared.config.consecutive_local_origin_failure.failures;
        let streak = &self.counts.consecutive_local_origin_failure;
        self.failed(streak, limit, Detector::LocalOriginFailure, None, now, rng, events);
    }

    #[expect(clippy::too_many_arguments, reason = "what is counted, and whatever an event needs")]
    fn failed(
        &self,
        streak: &Streak,
        limit: u32,
        detector: Detector,
        status: Option<u16>,
        now: Instant,
        rng: &mut impl Rng,
        events: &mut Vec<Event>,
    ) {
        let carrying = self.counts.carrying.load(Acquire);
        if let Some(failures) = streak.failed(limit, self.shared.stamp(now), carrying) {
            let evidence = Evidence::Consecutive { failures, status };
            events.extend(self.eject(detector, evidence, now, rng));
            streak.judged();
        }
    }

    /// A detector thinks that this is an outlier. Nothing happens if it is out already.
    pub(super) fn eject(
        &self,
        detector: Detector,
        evidence: Evidence,
        now: Instant,
        rng: &mut impl Rng,
    ) -> Option<Event> {
        if !self.is_in_service() {
            return None;
        }
        let shared = &*self.shared;
        shared.detected[detector.index()].inc();
        // Looked at first, as Envoy does: nothing is left to chance where there is no room.
        let withheld = if !shared.has_room() {
            Withheld::MaxEjectionPercent
        } else if !shared.enforces(detector, rng) {
            Withheld::Enforcing
        } else if !shared.reserve() {
            Withheld::MaxEjectionPercent
        } else {
            return self.eject_reserved(detector, evidence, now, rng);
        };
        if withheld == Withheld::MaxEjectionPercent {
            shared.overflow.inc();
        }
        let event = Event {
            enforced: false,
            withheld: Some(withheld),
            ..self.event(Action::Eject, Some(detector), Some(evidence), now)
        };
        self.is_news(detector).then_some(event)
    }

    fn eject_reserved(
        &self,
        detector: Detector,
        evidence: Evidence,
        now: Instant,
        rng: &mut impl Rng,
    ) -> Option<Event> {
        let shared = &*self.shared;
        if self.state.compare_exchange(IN_SERVICE, CLAIMED, AcqRel, Relaxed).is_err() {
            // Another detector, in another worker, was faster.
            shared.release();
            return None;
        }
        // Claimed: nobody else changes these now, but for a decay.
        let time = |multiplier| shared.config.base_ejection_time.saturating_mul(multiplier);
        let longest = shared.config.max_ejection_time;
        let grow = |n| (time(n) < longest + shared.config.base_ejection_time).then_some(n + 1);
        let multiplier = match self.multiplier.fetch_update(Relaxed, Relaxed, grow) {
            Ok(before) => before + 1,
            Err(most) => most,
        };
        self.ejections.fetch_add(1, Relaxed);
        self.silent.store(detector == Detector::Stall, Relaxed);
        let jitter = match shared.config.max_ejection_time_jitter {
            Duration::ZERO => Duration::ZERO,
            most => rng.random_range(Duration::ZERO..=most),
        };
        let until = shared.stamp(now + time(multiplier).min(longest) + jitter);
        // If this fails, it has left the service, and whoever took it out has released it.
        self.state.compare_exchange(CLAIMED, until, AcqRel, Relaxed).ok()?;
        shared.enforced[detector.index()].inc();
        let event = self.event(Action::Eject, Some(detector), Some(evidence), now);
        Some(Event { until: Some(shared.instant(until)), ..event })
    }

    /// Ends an ejection whose time is over.
    pub(super) fn uneject_if_due(&self, now: Instant) -> Option<Event> {
        let until = self.state.load(Acquire);
        if until <= GONE || until == CLAIMED || until > self.shared.stamp(now) {
            return None;
        }
        // Whoever notices, this is when it was back.
        self.uneject(until, self.shared.instant(until))
    }

    fn uneject(&self, until: u64, at: Instant) -> Option<Event> {
        if until == CLAIMED {
            return None;
        }
        self.state.compare_exchange(until, CLAIMED, AcqRel, Relaxed).ok()?;
        // It must not be out again after very few failures.
        self.forgive();
        self.returned.store(self.shared.stamp(at), Relaxed);
        self.state.compare_exchange(CLAIMED, IN_SERVICE, AcqRel, Relaxed).ok()?;
        self.shared.release();
        Some(self.event(Action::Uneject, None, None, at))
    }

    fn forgive(&self) {
        self.silent.store(false, Relaxed);
        self.counts.consecutive_5xx.clear();
        self.counts.consecutive_gateway_failure.clear();
        self.counts.consecutive_local_origin_failure.clear();
    }

    /// Once in each interval: detectors that had no effect may report again, and an origin that has
    /// been back for an interval has its next ejection shortened.
    pub(super) fn end_interval(&self, now: Instant) {
        self.reported.store(0, Relaxed);
        let returned = self.returned.load(Relaxed);
        if returned == 0 || !self.is_in_service() {
            return;
        }
        if now.saturating_duration_since(self.shared.instant(returned))
            >= self.shared.config.interval
        {
            let less = |n: u32| n.checked_sub(1);
            self.multiplier.fetch_update(Relaxed, Relaxed, less).ok();
        }
    }

    /// Gives it another share; `None` if it has that one already. It gets the whole one from the
    /// detector that took it only.
    pub(super) fn set_share(
        &self,
        share: u8,
        detector: Detector,
        evidence: Evidence,
        now: Instant,
    ) -> Option<Event> {
        let by = u8::try_from(detector.index()).unwrap_or(u8::MAX);
        if share < 100 {
            self.demoted_by.store(by, Relaxed);
        } else if self.demoted_by.load(Relaxed) != by {
            return None;
        }
        let before = self.share.swap(share, Relaxed);
        let action = if share < 100 { Action::Demote } else { Action::Restore };
        (before != share).then(|| self.event(action, Some(detector), Some(evidence), now))
    }

    /// Reports a slow origin that keeps its share.
    pub(super) fn would_demote(
        &self,
        detector: Detector,
        evidence: Evidence,
        now: Instant,
    ) -> Option<Event> {
        let event = Event {
            enforced: false,
            withheld: Some(Withheld::Enforcing),
            ..self.event(Action::Demote, Some(detector), Some(evidence), now)
        };
        self.is_news(detector).then_some(event)
    }

    /// It is no longer part of the service. Those who still have it may go on counting.
    pub(super) fn leave(&self) {
        if self.state.swap(GONE, AcqRel) > GONE {
            self.shared.release();
        }
    }

    /// It is part of the service again, as a new one. Requests that are under way stay.
    pub(super) fn come_back(&self) {
        self.forgive();
        self.take_rates();
        self.handshakes.take();
        self.rtts.take();
        self.take_segments();
        self.multiplier.store(0, Relaxed);
        self.returned.store(0, Relaxed);
        self.share.store(100, Relaxed);
        self.state.store(IN_SERVICE, Release);
    }

    /// Whether this detector has not reported in vain in this interval: a failing origin that may
    /// not be ejected would fill the log.
    fn is_news(&self, detector: Detector) -> bool {
        let bit = 1 << detector.index();
        self.reported.fetch_or(bit, Relaxed) & bit == 0
    }

    fn event(
        &self,
        action: Action,
        detector: Option<Detector>,
        evidence: Option<Evidence>,
        at: Instant,
    ) -> Event {
        Event {
            at,
            origin: self.address,
            action,
            enforced: true,
            withheld: None,
            detector,
            evidence,
            ejections: self.ejections(),
            multiplier: self.multiplier(),
            until: None,
        }
    }
}

/// A request that waits for its response.
#[derive(Debug)]
pub struct Owing(Arc<Host>);

impl Owing {
    /// The response has begun.
    pub fn answered(self) {
        self.0.counts.answers.fetch_add(1, Relaxed);
    }
}

impl Drop for Owing {
    fn drop(&mut self) {
        self.0.add_owed(-1);
    }
}
