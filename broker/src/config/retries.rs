//! When a request is tried on another socket: `[service.retries]`.

use std::fmt;

/// What failures lead to a retry, and how many retries there may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Retries {
    /// After which failures.
    pub on: Conditions,
    /// How many at once, all workers together.
    pub limit: RetryLimit,
    /// Most sockets that one request is sent on. At least 1, which is no retry.
    pub attempts: usize,
}

/// A failure after which a request can be tried again. A request that is not idempotent is only
/// tried again if nothing of it can have been seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The connection that the request waits for could not be made.
    ConnectFailure,
    /// The socket takes nothing of the request: the origin had closed it.
    Refused,
    /// The connection ends, or brings something that is no response, before the response begins.
    ResetBeforeResponse,
    /// The origin answers 502, 503 or 504, and there is another one.
    GatewayError,
    /// The origin answers 500 or above, or nothing, and is ejected for that or was meanwhile; and there
    /// is another one.
    Ejected,
}

impl Condition {
    /// Every condition, by its name in the configuration.
    pub const ALL: [(&'static str, Self); 5] = [
        ("connect-failure", Self::ConnectFailure),
        ("refused", Self::Refused),
        ("reset-before-response", Self::ResetBeforeResponse),
        ("gateway-error", Self::GatewayError),
        ("ejected", Self::Ejected),
    ];
}

/// A set of conditions.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Conditions([bool; Condition::ALL.len()]);

impl fmt::Debug for Conditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = Condition::ALL.iter().filter(|(_, condition)| self.contains(*condition));
        f.debug_set().entries(named.map(|(name, _)| name)).finish()
    }
}

impl Conditions {
    /// Whether it is one of them.
    #[must_use]
    pub fn contains(self, condition: Condition) -> bool {
        self.0[condition as usize]
    }
}

impl FromIterator<Condition> for Conditions {
    fn from_iter<I: IntoIterator<Item = Condition>>(conditions: I) -> Self {
        let mut set = Self::default();
        conditions.into_iter().for_each(|condition| set.0[condition as usize] = true);
        set
    }
}

/// How many retries there may be at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RetryLimit {
    /// So many (Envoy's `max_retries`).
    Fixed(usize),
    /// A part of what is under way (Envoy's `retry_budget`).
    Budget {
        /// Of the exchanges that are under way or wait, in percent, 0..=100.
        percent: f64,
        /// So many in any case; at least 1.
        min_concurrency: usize,
    },
}

impl RetryLimit {
    /// How many there may be while so many exchanges are under way or wait.
    #[must_use]
    pub fn allows(self, exchanges: usize) -> usize {
        match self {
            Self::Fixed(max) => max,
            Self::Budget { percent, min_concurrency } => {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "at most `exchanges`, and never negative"
                )]
                let part = (exchanges as f64 * percent / 100.0) as usize;
                part.max(min_concurrency)
            }
        }
    }
}

impl Default for Retries {
    /// Whatever is safe is repeated, and the loss of half of the origins at once, with all that was
    /// under way there, is still repeated in full. Envoy's 20 % and 3 would not do: when one of four
    /// origins is killed, a quarter of the requests under way need a retry in the same moment, and
    /// the sockets that the pool itself had kept open are what fails.
    fn default() -> Self {
        use Condition::{ConnectFailure, Ejected, Refused, ResetBeforeResponse};
        Self {
            on: [ConnectFailure, Refused, ResetBeforeResponse, Ejected].into_iter().collect(),
            limit: RetryLimit::Budget { percent: 50.0, min_concurrency: 32 },
            attempts: 3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_a_part_of_the_load_and_never_less_than_its_minimum() {
        let budget = RetryLimit::Budget { percent: 20.0, min_concurrency: 3 };
        for (exchanges, allowed) in [(0, 3), (1, 3), (15, 3), (19, 3), (20, 4), (1000, 200)] {
            assert_eq!(budget.allows(exchanges), allowed, "{exchanges}");
        }
        assert_eq!(RetryLimit::Fixed(7).allows(1000), 7);
    }

    #[test]
    fn names_and_positions_agree() {
        for (position, (name, condition)) in Condition::ALL.into_iter().enumerate() {
            assert_eq!(position, condition as usize, "{name}");
            let only: Conditions = [condition].into_iter().collect();
            assert!(Condition::ALL.iter().all(|(_, c)| only.contains(*c) == (*c == condition)));
        }
    }
}
