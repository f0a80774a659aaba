//! What happens to an origin, for a while.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use harness::origin::nginx;
use harness::{Lab, Process};
use nix::sys::signal::Signal;
use serde::Serialize;

use super::ORIGINS;

/// What happens to one origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(super) enum Fault {
    /// Nothing.
    None,
    /// It answers 500.
    #[serde(rename = "answers_500")]
    #[value(name = "answers_500")]
    Answers500,
    /// Its process is killed; later it is started again.
    Killed,
    /// Its process is stopped: connections are taken, and nothing answers.
    Stopped,
}

impl Fault {
    pub(super) const ALL: [Self; 4] = [Self::None, Self::Answers500, Self::Killed, Self::Stopped];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Answers500 => "answers_500",
            Self::Killed => "killed",
            Self::Stopped => "stopped",
        }
    }

    pub(super) fn lasts(self) -> Duration {
        Duration::from_secs(if self == Self::Answers500 { 3 } else { 2 })
    }
}

/// nginx origins, of which the first can fail.
#[derive(Debug)]
pub(super) struct Origins<'a> {
    lab: &'a Lab,
    sick: Process,
    _well: Vec<Process>,
    /// While this file exists the first one answers 500.
    switch: PathBuf,
}

impl<'a> Origins<'a> {
    pub(super) fn start(lab: &'a Lab) -> Result<Self> {
        let switch = lab.directory().join("answers-500");
        let sick = sick(lab, &switch)?;
        let well = (1..ORIGINS).map(|i| nginx::origin(lab, i)).collect::<Result<_>>()?;
        Ok(Self { lab, sick, _well: well, switch })
    }

    /// The fault begins.
    pub(super) fn strike(&mut self, fault: Fault) -> Result<()> {
        match fault {
            Fault::None => Ok(()),
            Fault::Answers500 => Ok(fs::write(&self.switch, "")?),
            Fault::Killed => self.sick.kill(),
            Fault::Stopped => self.sick.signal(Signal::SIGSTOP),
        }
    }

    /// It ends.
    pub(super) fn heal(&mut self, fault: Fault) -> Result<()> {
        match fault {
            Fault::None => {}
            Fault::Answers500 => fs::remove_file(&self.switch)?,
            Fault::Killed => self.sick = sick(self.lab, &self.switch)?,
            Fault::Stopped => self.sick.signal(Signal::SIGCONT)?,
        }
        Ok(())
    }
}

fn sick(lab: &Lab, switch: &std::path::Path) -> Result<Process> {
    // With a text of its own nginx keeps the connection, as applications do that answer 500.
    let directives =
        format!("if (-f {}) {{ return 500 \"$http_x_request_id\\n\"; }}", switch.display());
    nginx::origin_at(lab, &[lab.origin(0)], &directives)
}
