//! What goes wrong, with whom, and when.

use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;

/// How long a world lasts.
pub(super) const LASTS: Duration = Duration::from_mins(2);
/// When something goes wrong, and for how long.
pub(super) const BEGINS: Duration = Duration::from_secs(15);
const TAKES: Duration = Duration::from_mins(1);
/// A hang that ends by itself.
const HANGS: Duration = Duration::from_secs(10);
/// Each origin of a deploy is gone for so long.
const RESTARTS: Duration = Duration::from_secs(3);
/// As long as an interval of the rates, by default.
const FLAPS: Duration = Duration::from_secs(10);

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Incident {
    /// Nothing: there is the usual noise.
    Nothing,
    /// One origin answers 500 to everybody for a minute.
    OneBad,
    /// One origin answers 500 to a fifth of the requests for a minute.
    GreyErrors,
    /// One origin takes 50 times as long for a minute.
    GreySlow,
    /// One origin answers nobody for 10 s.
    Hang,
    /// One origin answers 500 in every other interval.
    Flapping,
    /// One origin after the other refuses connections for 3 s.
    RollingDeploy,
    /// All origins answer 500 for a minute.
    AllBad,
}

/// How an origin is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Behaviour {
    Good,
    /// So many of its answers are errors, from 0 to 1.
    Errors(f64),
    /// It takes so many times as long.
    Slow(f64),
    Refuses,
    /// It answers at this time, everything at once.
    Hangs(Duration),
}

impl Incident {
    /// How many origins it is tried with unless something else is asked for.
    pub(super) fn usual_origins(self) -> &'static [usize] {
        match self {
            Self::OneBad => &[5, 20, 1000],
            _ => &[20],
        }
    }

    /// How an origin of `count` is at a time.
    pub(super) fn behaviour(self, origin: usize, count: usize, at: Duration) -> Behaviour {
        let during = |begins, ends| (begins..ends).contains(&at);
        let first = |behaviour| {
            let bad = origin == 0 && during(BEGINS, BEGINS + TAKES);
            if bad { behaviour } else { Behaviour::Good }
        };
        match self {
            Self::OneBad => first(Behaviour::Errors(1.0)),
            Self::GreyErrors => first(Behaviour::Errors(0.2)),
            Self::GreySlow => first(Behaviour::Slow(50.0)),
            Self::Hang if origin == 0 && during(BEGINS, BEGINS + HANGS) => {
                Behaviour::Hangs(BEGINS + HANGS)
            }
            Self::Flapping if origin == 0 && at >= BEGINS && in_even_interval(at) => {
                Behaviour::Errors(1.0)
            }
            Self::RollingDeploy => {
                // All in turn within the minute, some at once if there are many.
                let begins = BEGINS + TAKES.mul_f64(origin as f64 / count as f64);
                let gone = during(begins, begins + RESTARTS);
                if gone { Behaviour::Refuses } else { Behaviour::Good }
            }
            Self::AllBad if during(BEGINS, BEGINS + TAKES) => Behaviour::Errors(1.0),
            Self::Nothing | Self::Hang | Self::Flapping | Self::AllBad => Behaviour::Good,
        }
    }
}

fn in_even_interval(at: Duration) -> bool {
    (at.as_secs() / FLAPS.as_secs()).is_multiple_of(2)
}
