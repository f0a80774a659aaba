//! What the checks of one origin add up to. Pure: results and the time in, states out.

use std::fmt;
use std::time::{Duration, Instant};

use rand::{Rng, RngExt};

use crate::config::health::{HealthCheck, Initial};
use crate::membership::Health;
use crate::stats::HealthSnapshot;

/// What is known of an origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its first check has not ended.
    Unknown,
    /// It passes.
    Healthy,
    /// It passes, but asks to be left to others (Envoy's `x-envoy-degraded`).
    Degraded,
    /// It fails.
    Unhealthy,
}

impl State {
    /// Its name in statistics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Unhealthy => "unhealthy",
        }
    }

    /// What it means for the choice of origins.
    #[must_use]
    pub fn health(self, initial: Initial) -> Health {
        match (self, initial) {
            (Self::Healthy, _) | (Self::Unknown, Initial::Healthy) => Health::Healthy,
            (Self::Degraded, _) => Health::Degraded,
            (Self::Unhealthy, _) | (Self::Unknown, Initial::Unhealthy) => Health::Unhealthy,
        }
    }
}

/// How a check ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As it should.
    Passed,
    /// As it should, but the origin asks to be left to others.
    Degraded,
    /// No connection, or none that lasted until the answer was complete.
    Broken(String),
    /// Not in time.
    TimedOut,
    /// With an answer that is not expected.
    Status {
        /// Its status.
        status: u16,
        /// Whether it only counts towards the threshold.
        retriable: bool,
    },
    /// It could not be made, for a reason of this host's. Says nothing of the origin.
    NotMade(String),
}

impl Outcome {
    /// Whether it needs no other failures beside it: the origin could answer, and has said no.
    fn is_final(&self) -> bool {
        matches!(self, Self::Status { retriable: false, .. })
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passed"),
            Self::Degraded => f.write_str("passed, degraded"),
            Self::Broken(reason) => f.write_str(reason),
            Self::TimedOut => f.write_str("timed out"),
            Self::Status { status, .. } => write!(f, "status {status}"),
            Self::NotMade(reason) => write!(f, "not checked: {reason}"),
        }
    }
}

/// What the checks of an origin have shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// What is known.
    pub state: State,
    /// Since when.
    pub since: Instant,
    /// Whether the last check passed.
    pub passing: bool,
    /// Checks in a row that ended like the last one: passed or failed.
    pub consecutive: u32,
    /// Checks that have ended.
    pub checks: u64,
    /// Those of them that failed.
    pub failures: u64,
    /// When one passed last. One that has passed since its ejection brings an origin back, if
    /// `successful_active_health_check_uneject_host` is set.
    pub passed_at: Option<Instant>,
    /// Why the last check failed, or could not be made.
    pub last_error: Option<String>,
}

impl Checked {
    fn new(now: Instant) -> Self {
        Self {
            state: State::Unknown,
            since: now,
            passing: false,
            consecutive: 0,
            checks: 0,
            failures: 0,
            passed_at: None,
            last_error: None,
        }
    }

    /// The same for the statistics.
    #[must_use]
    pub fn snapshot(&self, now: Instant) -> HealthSnapshot {
        let since = now.saturating_duration_since(self.since);
        HealthSnapshot {
            state: self.state.name().to_owned(),
            state_ms: since.as_millis().try_into().unwrap_or(u64::MAX),
            passing: self.passing,
            consecutive: self.consecutive,
            checks: self.checks,
            failures: self.failures,
            last_error: self.last_error.clone(),
        }
    }
}

/// A change of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// What it was.
    pub from: State,
    /// What it is now.
    pub to: State,
}

/// When states change, and when checks are made.
#[derive(Clone, Copy, Debug)]
struct Policy {
    unhealthy_threshold: u32,
    healthy_threshold: u32,
    interval: Duration,
    unhealthy_interval: Duration,
    /// Of the interval; 0 to 1.
    jitter: f64,
}

/// The state machine of one origin, with Envoy's rules (`HealthCheckerImplBase`):
///
/// - the first check decides by itself;
/// - `unhealthy_threshold` failures in a row make an origin unhealthy, and a status that is neither
///   expected nor retriable does so at once;
/// - `healthy_threshold` successes in a row make it healthy again;
/// - whether it is degraded is what its last success said.
#[derive(Clone, Debug)]
pub struct Machine {
    policy: Policy,
    checked: Checked,
}

impl Machine {
    /// An origin that was never checked.
    #[must_use]
    pub fn new(settings: &HealthCheck, now: Instant) -> Self {
        let policy = Policy {
            unhealthy_threshold: settings.unhealthy_threshold.get(),
            healthy_threshold: settings.healthy_threshold.get(),
            interval: settings.interval,
            unhealthy_interval: settings.unhealthy_interval,
            jitter: f64::from(settings.interval_jitter_percent) / 100.0,
        };
        Self { policy, checked: Checked::new(now) }
    }

    /// What is known so far.
    #[must_use]
    pub fn checked(&self) -> &Checked {
        &self.checked
    }

    /// A check has ended.
    pub fn on_result(&mut self, outcome: &Outcome, now: Instant) -> Option<Transition> {
        let checked = &mut self.checked;
        let passed = match outcome {
            Outcome::NotMade(_) => {
                checked.last_error = Some(outcome.to_string());
                return None;
            }
            Outcome::Passed | Outcome::Degraded => true,
            Outcome::Broken(_) | Outcome::TimedOut | Outcome::Status { .. } => false,
        };
        checked.checks += 1;
        let before = if checked.passing == passed { checked.consecutive } else { 0 };
        checked.consecutive = before.saturating_add(1);
        checked.passing = passed;
        if passed {
            checked.passed_at = Some(now);
            checked.last_error = None;
        } else {
            checked.failures += 1;
            checked.last_error = Some(outcome.to_string());
        }

        let threshold = match checked.state {
            State::Unhealthy if passed => self.policy.healthy_threshold,
            State::Healthy | State::Degraded if !passed && !outcome.is_final() => {
                self.policy.unhealthy_threshold
            }
            _ => 1,
        };
        if checked.consecutive < threshold {
            return None;
        }
        let from = checked.state;
        checked.state = match outcome {
            Outcome::Passed => State::Healthy,
            Outcome::Degraded => State::Degraded,
            _ => State::Unhealthy,
        };
        if from == checked.state {
            return None;
        }
        checked.since = now;
        Some(Transition { from, to: checked.state })
    }

    /// When the next check is due if the last one has ended `now`.
    ///
    /// An origin is in its slow interval while it is unhealthy, as Envoy's documentation has it
    /// (its code goes by the last result), so that a failure is confirmed or refuted soon. After
    /// the first check comes a random part of an interval: origins that appear together are checked
    /// together once, and spread over the interval from then on.
    pub fn next_check(&self, now: Instant, rng: &mut impl Rng) -> Instant {
        let Policy { interval, unhealthy_interval, jitter, .. } = self.policy;
        let unhealthy = self.checked.state == State::Unhealthy;
        let interval = if unhealthy { unhealthy_interval } else { interval };
        let first = self.checked.checks <= 1;
        let part = if first { rng.random_range(0.0..=1.0) } else { 1.0 };
        now + interval.mul_f64(part + jitter * rng.random_range(0.0..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::super::tests::{settings, tcp};
    use super::*;
    use crate::clock;

    fn machine(healthy: u32, unhealthy: u32) -> Machine {
        let threshold = |n| NonZeroU32::new(n).expect("a threshold");
        let settings = HealthCheck {
            healthy_threshold: threshold(healthy),
            unhealthy_threshold: threshold(unhealthy),
            ..settings(tcp())
        };
        Machine::new(&settings, clock::now())
    }

    /// The states after each of some checks.
    fn states(healthy: u32, unhealthy: u32, outcomes: &[Outcome]) -> Vec<State> {
        let mut machine = machine(healthy, unhealthy);
        let state = |outcome| {
            machine.on_result(outcome, clock::now());
            machine.checked().state
        };
        outcomes.iter().map(state).collect()
    }

    fn broken() -> Outcome {
        Outcome::Broken("refused".to_owned())
    }

    fn status(retriable: bool) -> Outcome {
        Outcome::Status { status: 503, retriable }
    }

    use Outcome::{Passed, TimedOut};
    use State::{Degraded, Healthy, Unhealthy, Unknown};

    #[test]
    fn the_first_check_decides() {
        assert_eq!(states(2, 3, &[Passed]), [Healthy]);
        assert_eq!(states(2, 3, &[Outcome::Degraded]), [Degraded]);
        for failure in [broken(), TimedOut, status(true), status(false)] {
            assert_eq!(states(2, 3, &[failure]), [Unhealthy]);
        }
        assert_eq!(states(2, 3, &[broken(), Passed, Passed]), [Unhealthy, Unhealthy, Healthy]);
    }

    #[test]
    fn failures_add_up_in_a_row_only() {
        assert_eq!(
            states(2, 3, &[Passed, broken(), TimedOut, Passed, broken(), status(true), TimedOut]),
            [Healthy, Healthy, Healthy, Healthy, Healthy, Healthy, Unhealthy]
        );
        assert_eq!(
            states(3, 1, &[Passed, TimedOut, Passed, Passed, TimedOut, Passed, Passed, Passed]),
            [Healthy, Unhealthy, Unhealthy, Unhealthy, Unhealthy, Unhealthy, Unhealthy, Healthy]
        );
    }

    #[test]
    fn an_unexpected_answer_needs_no_second_one() {
        assert_eq!(states(2, 3, &[Passed, status(false)]), [Healthy, Unhealthy]);
        assert_eq!(states(2, 3, &[Passed, status(true)]), [Healthy, Healthy]);
    }

    #[test]
    fn degraded_is_what_the_last_success_said() {
        assert_eq!(
            states(2, 2, &[Passed, Outcome::Degraded, TimedOut, Passed]),
            [Healthy, Degraded, Degraded, Healthy]
        );
        assert_eq!(
            states(2, 1, &[TimedOut, Passed, Outcome::Degraded]),
            [Unhealthy, Unhealthy, Degraded],
            "a degraded success counts as one"
        );
    }

    #[test]
    fn a_check_that_was_not_made_counts_for_nothing() {
        let now = clock::now();
        let mut machine = machine(2, 2);
        machine.on_result(&Outcome::NotMade("no descriptors".to_owned()), now);
        assert_eq!((machine.checked().state, machine.checked().checks), (Unknown, 0));
        machine.on_result(&Passed, now);
        machine.on_result(&broken(), now);
        machine.on_result(&Outcome::NotMade("no descriptors".to_owned()), now);
        let error = machine.checked().last_error.as_deref();
        assert_eq!(error, Some("not checked: no descriptors"));
        let transition = machine.on_result(&broken(), now);
        assert_eq!(transition, Some(Transition { from: Healthy, to: Unhealthy }));
    }

    #[test]
    fn everything_is_noted() {
        let start = clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut machine = machine(2, 2);
        machine.on_result(&Passed, at(1));
        machine.on_result(&Passed, at(2));
        machine.on_result(&TimedOut, at(3));
        let expected = Checked {
            state: Healthy,
            since: at(1),
            passing: false,
            consecutive: 1,
            checks: 3,
            failures: 1,
            passed_at: Some(at(2)),
            last_error: Some("timed out".to_owned()),
        };
        assert_eq!(machine.checked(), &expected);
        let snapshot = machine.checked().snapshot(at(5));
        assert_eq!((snapshot.state.as_str(), snapshot.state_ms), ("healthy", 4000));
    }

    #[test]
    fn intervals() {
        let seconds = Duration::from_secs;
        let settings = HealthCheck {
            interval: seconds(10),
            unhealthy_interval: seconds(100),
            interval_jitter_percent: 20,
            unhealthy_threshold: NonZeroU32::new(2).expect("a threshold"),
            ..settings(tcp())
        };
        let now = clock::now();
        let mut rng = StdRng::seed_from_u64(5);
        let mut machine = Machine::new(&settings, now);
        // The shortest and the longest of many.
        let mut range = |machine: &Machine| {
            let all = (0..1000).map(|_| machine.next_check(now, &mut rng) - now);
            all.fold((Duration::MAX, Duration::ZERO), |(min, max), d| (min.min(d), max.max(d)))
        };
        let mut check = |machine: &Machine, min: u32, max: u32| {
            let (shortest, longest) = range(machine);
            let within = seconds(min.into())..=seconds(max.into());
            assert!(
                within.contains(&shortest) && within.contains(&longest),
                "{shortest:?} {longest:?}"
            );
            let part = (longest.as_secs_f64() - shortest.as_secs_f64()) / f64::from(max - min);
            assert!(part > 0.8, "{shortest:?} {longest:?}");
        };
        machine.on_result(&Passed, now);
        check(&machine, 0, 12);
        machine.on_result(&Passed, now);
        check(&machine, 10, 12);
        machine.on_result(&broken(), now);
        check(&machine, 10, 12);
        machine.on_result(&broken(), now);
        check(&machine, 100, 120);
        machine.on_result(&Passed, now);
        check(&machine, 100, 120);
    }

    fn any_outcome() -> impl Strategy<Value = Outcome> {
        prop_oneof![
            4 => Just(Passed),
            1 => Just(Outcome::Degraded),
            2 => Just(broken()),
            2 => Just(TimedOut),
            1 => Just(status(true)),
            1 => Just(status(false)),
            1 => Just(Outcome::NotMade("no descriptors".to_owned())),
        ]
    }

    /// The rules once more, told by looking back over all checks instead of counting along.
    fn looking_back(healthy: u32, unhealthy: u32, outcomes: &[Outcome]) -> State {
        let mut state = Unknown;
        let made: Vec<_> = outcomes.iter().filter(|o| !matches!(o, Outcome::NotMade(_))).collect();
        for end in 1..=made.len() {
            let last = made[end - 1];
            let passed = |o: &Outcome| matches!(o, Passed | Outcome::Degraded);
            let row = made[..end].iter().rev().take_while(|o| passed(o) == passed(last)).count();
            let enough = |threshold: u32| row >= threshold as usize || state == Unknown;
            state = match (last, state == Unhealthy) {
                (Passed, false) => Healthy,
                (Outcome::Degraded, false) => Degraded,
                (Passed, true) if enough(healthy) => Healthy,
                (Outcome::Degraded, true) if enough(healthy) => Degraded,
                (Outcome::Status { retriable: false, .. }, _) => Unhealthy,
                (Passed | Outcome::Degraded, true) => state,
                _ if enough(unhealthy) => Unhealthy,
                _ => state,
            };
        }
        state
    }

    proptest! {
        #[test]
        fn thresholds(
            healthy in 1..5_u32,
            unhealthy in 1..5_u32,
            outcomes in prop::collection::vec(any_outcome(), 0..40),
        ) {
            let mut machine = machine(healthy, unhealthy);
            let mut now = clock::now();
            for (i, outcome) in outcomes.iter().enumerate() {
                now += Duration::from_secs(1);
                let before = machine.checked().clone();
                let transition = machine.on_result(outcome, now);
                let after = machine.checked();
                let expected = looking_back(healthy, unhealthy, &outcomes[..=i]);
                prop_assert_eq!(after.state, expected);
                let change = Transition { from: before.state, to: after.state };
                prop_assert_eq!(transition, (change.from != change.to).then_some(change));
                let since = if transition.is_some() { now } else { before.since };
                prop_assert_eq!(after.since, since);
                prop_assert!(after.failures <= after.checks);
            }
        }
    }
}
