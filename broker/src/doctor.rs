//! `broker doctor`: what this host can do for the broker, tried out one by one.
//!
//! The programs are loaded, attached and used as the daemon does it, for connections of its own on
//! the loopback interface. Nothing is intercepted and nothing is left: the kernel drops all of it
//! with the process at the latest.

mod host;

use std::time::Duration;

use serde::Serialize;

use crate::chain;
use crate::datapath::kernel::{self, InterceptOptions, Kernel, Known, probe, selftest};

/// Version of the JSON that `broker doctor --json` prints.
pub const DIAGNOSIS_VERSION: u32 = 1;

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// [`DIAGNOSIS_VERSION`].
    pub version: u32,
    /// The broker's own version.
    pub broker_version: String,
    /// Whether everything works.
    pub healthy: bool,
    /// Whether clients can be steered in the kernel.
    pub steering: bool,
    /// In the order in which they depend on each other.
    pub checks: Vec<Check>,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What it is about.
    pub part: Part,
    /// A stable name.
    pub name: &'static str,
    /// How it is.
    pub outcome: Outcome,
    /// What was found, or what is wrong.
    pub found: String,
    /// What needs it.
    pub needed_for: &'static str,
    /// How long it took to try it out, in microseconds.
    pub took_us: Option<u64>,
}

/// What a check is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// How the host is set up.
    Host,
    /// What its kernel has.
    Kernel,
    /// Whether it takes the programs.
    Programs,
    /// Whether redirected bytes arrive as they should.
    Steering,
}

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// As it should be.
    Ok,
    /// It works, but somebody might notice.
    Remark,
    /// Something does not work.
    Failed,
    /// It could not be tried.
    NotTried,
}

impl Diagnosis {
    fn new(checks: Vec<Check>) -> Self {
        let is_well = |check: &Check| matches!(check.outcome, Outcome::Ok | Outcome::Remark);
        let mut steps = checks.iter().filter(|check| check.part == Part::Steering).peekable();
        Self {
            version: DIAGNOSIS_VERSION,
            broker_version: env!("CARGO_PKG_VERSION").to_owned(),
            healthy: checks.iter().all(is_well),
            steering: steps.peek().is_some() && steps.all(is_well),
            checks,
        }
    }
}

/// Looks at everything.
#[must_use]
pub fn examine() -> Diagnosis {
    let mut checks = host::checks();
    let privileged =
        checks.iter().all(|check| check.name != host::PRIVILEGES || check.outcome == Outcome::Ok);
    checks.push(type_information(&Known::look_up().losses()));
    if privileged {
        checks.extend(probe::features().into_iter().map(feature));
        checks.extend(programs());
        checks.extend(steering());
    } else {
        // One reason is enough, and the kernel gives the same for everything.
        checks.push(
            check(Part::Kernel, "features", "everything").with(Outcome::NotTried, UNPRIVILEGED),
        );
        checks.push(
            check(Part::Programs, "loading", "everything").with(Outcome::NotTried, UNPRIVILEGED),
        );
        checks.extend(selftest::untried().into_iter().map(step));
    }
    Diagnosis::new(checks)
}

const UNPRIVILEGED: &str = "it takes more privileges";

fn type_information(losses: &[&str]) -> Check {
    let check = check(Part::Kernel, "type information", "errors, nonblocking clients, order");
    if losses.is_empty() {
        check.is("complete")
    } else {
        let losses = losses.join("; ");
        check.failed(format!("/sys/kernel/btf/vmlinux does not tell all offsets: {losses}"))
    }
}

fn feature(feature: probe::Feature) -> Check {
    let check = check(Part::Kernel, feature.name, feature.needed_for);
    match feature.found {
        Ok(true) => check.is("present"),
        Ok(false) => check.failed("this kernel does not have it"),
        Err(error) => check.failed(error),
    }
}

fn programs() -> Vec<Check> {
    match probe::programs() {
        Ok(programs) => programs
            .into_iter()
            .map(|program| {
                let check = check(Part::Programs, program.name, program.needed_for);
                match program.loaded {
                    Ok(()) => check.is("loads"),
                    Err(error) => check.failed(error),
                }
            })
            .collect(),
        Err(error) => {
            let error = chain(&error);
            vec![check(Part::Programs, "maps", "counting, interception, steering").failed(error)]
        }
    }
}

/// Attaches the programs and has them tried out.
fn steering() -> Vec<Check> {
    let attached = check(Part::Programs, "attached", "counting, interception, steering");
    let intercept = Some(InterceptOptions::trial());
    let loaded = Kernel::load(&kernel::Options { intercept, ..kernel::Options::default() });
    let (attached, steps) = match &loaded {
        Ok(kernel) => match kernel.not_steering() {
            Some(reason) if !has_failed(kernel.self_test()) => {
                (attached.failed(reason), kernel.self_test().to_vec())
            }
            _ => (attached.is("to the root cgroup"), kernel.self_test().to_vec()),
        },
        Err(error) => {
            let mut text = error.to_string();
            let mut cause = std::error::Error::source(error);
            while let Some(error) = cause {
                text = format!("{text}: {error}");
                cause = error.source();
            }
            (attached.failed(text), selftest::untried())
        }
    };
    std::iter::once(attached).chain(steps.into_iter().map(step)).collect()
}

fn has_failed(steps: &[selftest::Step]) -> bool {
    steps.iter().any(|step| matches!(step.outcome, selftest::Outcome::Failed(_)))
}

fn step(step: selftest::Step) -> Check {
    let mut check = check(Part::Steering, step.name, step.shows);
    check.took_us = Some(micros(step.took));
    match step.outcome {
        selftest::Outcome::Passed => check.is("passed"),
        selftest::Outcome::Remark(remark) => check.remark(remark),
        selftest::Outcome::Failed(reason) => check.failed(reason),
        selftest::Outcome::NotTried => {
            check.took_us = None;
            check.with(Outcome::NotTried, "something before it has failed")
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// A check that nothing is known about yet.
fn check(part: Part, name: &'static str, needed_for: &'static str) -> Check {
    let found = String::new();
    Check { part, name, outcome: Outcome::NotTried, found, needed_for, took_us: None }
}

impl Check {
    fn with(self, outcome: Outcome, found: impl Into<String>) -> Self {
        Self { outcome, found: found.into(), ..self }
    }

    fn is(self, found: impl Into<String>) -> Self {
        self.with(Outcome::Ok, found)
    }

    fn remark(self, found: impl Into<String>) -> Self {
        self.with(Outcome::Remark, found)
    }

    fn failed(self, found: impl Into<String>) -> Self {
        self.with(Outcome::Failed, found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_or_was_not_tried_is_not_healthy() {
        let checks = |outcome| {
            let other = check(Part::Host, "other", "").is("");
            let step = check(Part::Steering, "step", "").with(outcome, "");
            let diagnosis = Diagnosis::new(vec![other, step]);
            (diagnosis.healthy, diagnosis.steering)
        };
        assert_eq!(checks(Outcome::Ok), (true, true));
        assert_eq!(checks(Outcome::Remark), (true, true));
        assert_eq!(checks(Outcome::Failed), (false, false));
        assert_eq!(checks(Outcome::NotTried), (false, false));
        let host = |outcome| {
            let step = check(Part::Steering, "step", "").is("");
            let diagnosis =
                Diagnosis::new(vec![check(Part::Host, "host", "").with(outcome, ""), step]);
            (diagnosis.healthy, diagnosis.steering)
        };
        assert_eq!(host(Outcome::Failed), (false, true));
        assert!(!Diagnosis::new(Vec::new()).steering);
    }

    #[test]
    fn steps_keep_their_reasons() {
        let seen = |outcome| {
            let took = Duration::from_micros(7);
            let step = step(selftest::Step { name: "peek", shows: "it", took, outcome });
            (step.outcome, step.found, step.took_us)
        };
        let because = || "because".to_owned();
        assert_eq!(seen(selftest::Outcome::Passed), (Outcome::Ok, "passed".to_owned(), Some(7)));
        assert_eq!(
            seen(selftest::Outcome::Failed(because())),
            (Outcome::Failed, because(), Some(7))
        );
        assert_eq!(
            seen(selftest::Outcome::Remark(because())),
            (Outcome::Remark, because(), Some(7))
        );
        assert_eq!(seen(selftest::Outcome::NotTried).2, None);
    }

    #[test]
    fn missing_offsets_name_what_is_lost() {
        let found = type_information(&["this", "that"]);
        assert_eq!(found.outcome, Outcome::Failed);
        assert!(found.found.ends_with("this; that"), "{}", found.found);
        assert_eq!(type_information(&[]).outcome, Outcome::Ok);
    }
}
