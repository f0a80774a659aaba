//! The log of what an operator asks about after an incident: who was ejected and why, which limit
//! was reached, how the membership changed. One JSON object per line.
//!
//! Events are rare, but may come from a worker that must not wait for a disk: a thread of its own
//! writes them, and what it cannot keep up with is counted and dropped.

use std::collections::VecDeque;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use nix::libc::{ENXIO, O_NOCTTY, O_NONBLOCK};
use serde::Serialize;

use crate::clock;
use crate::seldom::Seldom;
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
    /// Lines that could not be written, or not as a whole.
    pub lost: Arc<Counter>,
    told: Arc<Seldom>,
}

/// Where lines go, each of them whole or with an end of its own.
#[derive(Debug)]
struct Out {
    file: File,
    /// Where the file was opened, if it was.
    path: Option<PathBuf>,
    /// Whether a line was begun and not ended.
    torn: bool,
}

impl Out {
    fn stdout() -> io::Result<Self> {
        let file = io::stdout().as_fd().try_clone_to_owned()?.into();
        Ok(Self { file, path: None, torn: false })
    }

    fn file(path: &Path) -> io::Result<Self> {
        // A pipe may have no reader, or one that does not read: neither is waited for.
        let flags = O_NONBLOCK | O_NOCTTY;
        let open = OpenOptions::new().append(true).create(true).custom_flags(flags).open(path);
        let file = open.map_err(|error| match error.raw_os_error() {
            // "No such device or address" would not be understood.
            Some(ENXIO) => io::Error::other("is a pipe that nobody reads, or a socket"),
            _ => error,
        })?;
        Ok(Self { file, path: Some(path.to_owned()), torn: false })
    }

    fn write(&mut self, line: &str) -> io::Result<()> {
        self.reopen_if_replaced()?;
        let begin = if self.torn { "\n" } else { "" };
        let text = format!("{begin}{line}\n");
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                // A full disk takes a part of a line.
                Ok(written) => {
                    self.torn = rest[written - 1] != b'\n';
                    rest = &rest[written..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Follows the path when the file was renamed or removed, as by logrotate.
    fn reopen_if_replaced(&mut self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let identity = |file: &Metadata| (file.dev(), file.ino());
        let ours = identity(&self.file.metadata()?);
        if std::fs::metadata(path).is_ok_and(|there| identity(&there) == ours) {
            return Ok(());
        }
        *self = Self::file(path)?;
        Ok(())
    }
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
        let mut out = match target {
            Target::Memory => return Ok(Self::default()),
            Target::Stdout => Out::stdout()?,
            Target::File(path) => {
                Out::file(path).with_context(|| format!("event_log: {}", path.display()))?
            }
        };
        let (writer, lines) = sync_channel::<String>(QUEUE_MAX);
        let log = Self { writer: Some(writer), ..Self::default() };
        let (lost, told) = (Arc::clone(&log.lost), Arc::clone(&log.told));
        std::thread::Builder::new().name("events".into()).spawn(move || {
            // Ends when the log is dropped.
            for line in lines {
                if let Err(error) = out.write(&line) {
                    lost.inc();
                    if told.say(clock::now()).is_some() {
                        tracing::warn!(%error, lost = lost.get(), "writing the event log");
                    }
                }
            }
        })?;
        Ok(log)
    }

    /// Adds an event.
    pub fn write(&self, event: &impl Serialize) {
        let Ok(line) = serde_json::to_string(event) else {
            self.lost.inc();
            return;
        };
        if let Some(writer) = &self.writer
            && let Err(error) = writer.try_send(line.clone())
        {
            self.lost.inc();
            if self.told.say(clock::now()).is_some() {
                tracing::warn!(%error, lost = self.lost.get(), "the event log cannot keep up");
            }
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

    #[test]
    fn a_torn_line_ends_before_the_next_one() {
        let (mut reader, writer) = io::pipe().unwrap();
        let flags = nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_SETFL(flags)).unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        let mut out = Out { file, path: None, torn: false };
        // More than a pipe takes.
        let long = "a".repeat(1 << 20);
        out.write(&long).unwrap_err();
        out.write("lost").unwrap_err();
        let mut part = vec![0; long.len()];
        let size = io::Read::read(&mut reader, &mut part).unwrap();
        assert!(size > 0 && part[..size].iter().all(|&byte| byte == b'a'));
        out.write("1").unwrap();
        out.write("2").unwrap();
        drop(out);
        let mut rest = String::new();
        io::Read::read_to_string(&mut reader, &mut rest).unwrap();
        assert_eq!(rest, "\n1\n2\n");
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = EventLog::open(&Target::File(path.clone())).unwrap_err();
        assert!(
            crate::chain(error.as_ref())
                .ends_with("fifo: is a pipe that nobody reads, or a socket")
        );

        let file = directory.path().join("file");
        let mut out = Out::file(&file).unwrap();
        std::fs::rename(&path, &file).unwrap();
        out.write("lost").unwrap_err();

        let reader = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(&file).unwrap();
        out.write("1").unwrap();
        let full = out.write(&"a".repeat(1 << 20)).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        assert!(io::read_to_string(io::Read::take(reader, 3)).unwrap().starts_with("1\na"));
    }

    #[test]
    fn what_a_full_disk_does_not_take_is_lost_and_counted() {
        let log = EventLog::open(&Target::File("/dev/full".into())).unwrap();
        log.write(&1);
        while log.lost.get() == 0 {
            std::thread::yield_now();
        }
        assert_eq!(log.recent(), "1\n");
    }

    #[test]
    fn what_a_slow_disk_does_not_take_is_told_now_and_then() {
        let (writer, _lines) = sync_channel(1);
        let log = EventLog { writer: Some(writer), ..EventLog::default() };
        let (mut reader, said) = io::pipe().unwrap();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(Mutex::new(said));
        tracing::subscriber::with_default(subscriber.finish(), || {
            for n in 0..10 {
                log.write(&n);
            }
        });
        assert_eq!(log.lost.get(), 9);
        let mut said = String::new();
        io::Read::read_to_string(&mut reader, &mut said).unwrap();
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("cannot keep up error=sending on a full channel lost=1"), "{said}");
    }

    #[test]
    fn a_rotated_file_is_left_for_a_new_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("events.jsonl");
        let rotated = directory.path().join("events.jsonl.1");
        let mut out = Out::file(&path).unwrap();
        out.write("1").unwrap();
        std::fs::rename(&path, &rotated).unwrap();
        out.write("2").unwrap();
        std::fs::remove_file(&path).unwrap();
        out.write("3").unwrap();
        out.write("4").unwrap();
        assert_eq!(std::fs::read_to_string(&rotated).unwrap(), "1\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "3\n4\n");
    }
}
