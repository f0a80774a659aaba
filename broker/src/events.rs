//! The log of what an operator asks about after an incident: who was ejected and why, which limit
//! was reached, how the membership changed. One JSON object per line.
//!
//! Events are rare, but may come from a worker that must not wait for a disk: a thread of its own
//! writes them, and what it cannot keep up with is counted and dropped.

use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};

use anyhow::Context as _;
use serde::Serialize;

use crate::stats::Counter;

/// How many of the last lines are kept for whoever asks the admin socket.
const RECENT_MAX: usize = 1000;

/// How many lines may wait for the thread that writes them.
const QUEUE_MAX: usize = 1024;

/// Where events are written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Target {
    /// Nowhere; the last ones can be asked for.
    #[default]
    Memory,
    /// The daemon's standard output.
    Stdout,
    /// A file that is appended to.
    File(PathBuf),
}

/// The log.
#[derive(Debug, Default)]
pub struct EventLog {
    writer: Option<SyncSender<String>>,
    recent: Mutex<VecDeque<String>>,
    /// Lines that could not be written.
    pub lost: Counter,
}

/// What happened to a service as a whole.
#[derive(Clone, Debug, Serialize)]
pub struct ServiceEvent<'a> {
    /// Milliseconds since 1970.
    pub time_unix_ms: u64,
    /// Whose.
    pub service: &'a str,
    /// What happened.
    #[serde(flatten)]
    pub what: What<'a>,
}

/// What happened.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum What<'a> {
    /// The origins in use have changed.
    Membership {
        /// How many are used.
        origins: usize,
        /// How many members there are.
        members: usize,
        /// Those of them that are healthy.
        healthy: usize,
        /// How many are used only because others are not healthy.
        widened: usize,
        /// What its source calls this list.
        version: &'a str,
    },
    /// A source's list could not be used, or it cannot be reached; or that is over.
    Source {
        /// What is wrong; `None` when it is over.
        error: Option<&'a str>,
    },
    /// A limit is reached: what comes next waits or is refused.
    LimitReached {
        /// Its name in the configuration.
        limit: &'a str,
        /// Its value.
        max: u64,
    },
    /// There is room again.
    LimitLeft {
        /// Its name in the configuration.
        limit: &'a str,
        /// Its value.
        max: u64,
        /// How often it was in the way meanwhile.
        overflows: u64,
    },
    /// So many origins are ejected that nobody believes it any more: all are used again.
    Panic {
        /// Whether it begins or ends.
        on: bool,
        /// Origins that are ejected.
        ejected: usize,
        /// All origins.
        origins: usize,
    },
}

impl EventLog {
    /// Opens the target.
    pub fn open(target: &Target) -> anyhow::Result<Self> {
        let mut out: Box<dyn Write + Send> = match target {
            Target::Memory => return Ok(Self::default()),
            Target::Stdout => Box::new(io::stdout()),
            Target::File(path) => {
                let file = OpenOptions::new().append(true).create(true).open(path);
                Box::new(file.with_context(|| format!("event_log: {}", path.display()))?)
            }
        };
        let (writer, lines) = sync_channel::<String>(QUEUE_MAX);
        std::thread::Builder::new().name("events".into()).spawn(move || {
            // Ends when the log is dropped.
            for line in lines {
                if let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush()) {
                    tracing::warn!(%error, "writing the event log");
                }
            }
        })?;
        Ok(Self { writer: Some(writer), ..Self::default() })
    }

    /// Adds an event.
    pub fn write(&self, event: &impl Serialize) {
        let Ok(line) = serde_json::to_string(event) else {
            self.lost.inc();
            return;
        };
        if let Some(writer) = &self.writer
            && writer.try_send(line.clone()).is_err()
        {
            self.lost.inc();
        }
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if recent.len() == RECENT_MAX {
            recent.pop_front();
        }
        recent.push_back(line);
    }

    /// The last events, one per line, oldest first.
    #[must_use]
    pub fn recent(&self) -> String {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.iter().flat_map(|line| [line, "\n"]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_written_and_the_last_ones_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("events.jsonl");
        let log = EventLog::open(&Target::File(path.clone())).unwrap();
        for n in 0..=RECENT_MAX as u64 {
            let what = What::LimitReached { limit: "max_pending", max: n };
            log.write(&ServiceEvent { time_unix_ms: n, service: "web", what });
            // Otherwise this is faster than the disk.
            while std::fs::read_to_string(&path).unwrap().lines().count() as u64 <= n {
                std::thread::yield_now();
            }
        }
        let first = std::fs::read_to_string(&path).unwrap();
        assert_eq!(
            first.lines().next().unwrap(),
            r#"{"time_unix_ms":0,"service":"web","action":"limit_reached","limit":"max_pending","max":0}"#
        );
        let recent = log.recent();
        assert_eq!(recent.lines().count(), RECENT_MAX);
        assert!(recent.starts_with(r#"{"time_unix_ms":1,"#));
        assert_eq!(log.lost.get(), 0);
    }
}
