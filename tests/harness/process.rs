//! Child processes that are always ended, and by process id only.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cgroup::Cgroup;
use crate::netns::Netns;
use crate::sys;
use crate::wait::within;

/// A program about to be started.
#[derive(Debug)]
pub struct Launch {
    name: String,
    command: Command,
    netns: Option<Netns>,
    cgroup: Option<Result<File, String>>,
    death_signal: Signal,
}

impl Launch {
    /// `program` is looked up in `PATH`, as it is for a shell.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        let mut command = Command::new(&program);
        // Servers live in sbin, which is not in everybody's PATH.
        let mut path = std::env::var_os("PATH").unwrap_or_default();
        path.push(":/usr/local/sbin:/usr/sbin:/sbin");
        command.env("PATH", path).stdin(Stdio::null());
        Self {
            name: program.as_ref().to_string_lossy().into_owned(),
            command,
            netns: None,
            cgroup: None,
            death_signal: Signal::SIGKILL,
        }
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, key: &str, value: impl Into<OsString>) -> Self {
        self.command.env(key, value.into());
        self
    }

    /// Runs it in a network namespace. Mounts stay as they are, so `/sys/fs/cgroup` is visible.
    #[must_use]
    pub fn netns(mut self, netns: &Netns) -> Self {
        self.netns = Some(netns.clone());
        self
    }

    /// Runs it in a cgroup.
    #[must_use]
    pub fn cgroup(mut self, cgroup: &Cgroup) -> Self {
        self.cgroup = Some(cgroup.procs().map_err(|e| format!("{e:#}")));
        self
    }

    /// The signal it gets if this process dies first: `SIGKILL` unless told otherwise. Programs
    /// with children of their own need a gentler one, to take those along.
    #[must_use]
    pub fn death_signal(mut self, signal: Signal) -> Self {
        self.death_signal = signal;
        self
    }

    /// Starts it.
    pub fn spawn(mut self) -> Result<Process> {
        let stdout = tempfile::tempfile()?;
        let stderr = tempfile::tempfile()?;
        self.command.stdout(stdout.try_clone()?).stderr(stderr.try_clone()?);
        let cgroup = self.cgroup.transpose().map_err(anyhow::Error::msg)?;
        let (netns, death_signal) = (self.netns, self.death_signal);
        sys::before_exec(&mut self.command, move || {
            nix::sys::prctl::set_pdeathsig(death_signal)?;
            if let Some(procs) = &cgroup {
                nix::unistd::write(procs, b"0")?;
            }
            if let Some(netns) = &netns {
                setns(netns.as_fd(), CloneFlags::CLONE_NEWNET)?;
            }
            Ok(())
        });
        let child = sys::spawn_from_lasting_thread(self.command).with_context(|| {
            format!("cannot start {:?}; is it installed? (`cargo xtask setup`)", self.name)
        })?;
        Ok(Process { name: self.name, child, stdout, stderr })
    }

    /// Runs it to its end, which must come within `limit`.
    pub fn output(self, limit: Duration) -> Result<Finished> {
        let mut process = self.spawn()?;
        let status = process.wait(limit)?;
        Ok(Finished {
            name: process.name.clone(),
            status,
            stdout: process.stdout(),
            stderr: process.stderr(),
        })
    }
}

/// What a program that has ended leaves.
#[derive(Clone, Debug)]
pub struct Finished {
    name: String,
    /// How it ended.
    pub status: ExitStatus,
    /// All of its standard output.
    pub stdout: String,
    /// All of its standard error.
    pub stderr: String,
}

impl Finished {
    /// Its standard output, if it has succeeded.
    pub fn success(self) -> Result<String> {
        if !self.status.success() {
            bail!("{}: {}\n{}{}", self.name, self.status, self.stdout, self.stderr);
        }
        Ok(self.stdout)
    }
}

/// A running child. Dropping it ends it: `SIGTERM`, and `SIGKILL` if that does not help.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    stdout: File,
    stderr: File,
}

impl Process {
    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.pid().cast_signed());
        kill(pid, signal).with_context(|| format!("{signal} to {}", self.name))
    }

    /// Whether it has not ended yet.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for its end.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let mut status = None;
        within(limit, || {
            status = self.child.try_wait().ok().flatten();
            status.is_some()
        });
        status.with_context(|| {
            format!("{} has not ended within {limit:?}\n{}", self.name, self.stderr())
        })
    }

    /// Ends it without any chance to tidy up, and waits until it is gone.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// What it has written to standard output so far.
    #[must_use]
    pub fn stdout(&self) -> String {
        text(&self.stdout)
    }

    /// What it has written to standard error so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        text(&self.stderr)
    }

    /// Processor time (user and system) of the process and of its children that have ended.
    pub fn cpu_time(&self) -> Result<Duration> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid()))?;
        // The second field is the program's name in parentheses and may hold anything.
        let (_, rest) = stat.rsplit_once(") ").context("odd /proc/PID/stat")?;
        let ticks: u64 =
            rest.split(' ').skip(11).take(4).map(|field| field.parse::<u64>().unwrap_or(0)).sum();
        // USER_HZ is 100 on every architecture that matters here.
        Ok(Duration::from_millis(ticks * 10))
    }

    /// Resident memory, bytes: all of it, the program's text too.
    pub fn rss(&self) -> Result<u64> {
        self.status_bytes("VmRSS:")
    }

    /// The most resident memory so far, bytes.
    pub fn rss_peak(&self) -> Result<u64> {
        self.status_bytes("VmHWM:")
    }

    /// Resident memory of the program's own making, bytes: without the text, whose size is the
    /// build's (a debug build has five times as much).
    pub fn heap(&self) -> Result<u64> {
        self.status_bytes("RssAnon:")
    }

    fn status_bytes(&self, field: &str) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let kb = status
            .lines()
            .find_map(|line| line.strip_prefix(field))
            .and_then(|value| value.trim().strip_suffix(" kB"))
            .with_context(|| format!("no {field} the process has ended"))?;
        Ok(kb.trim().parse::<u64>()? * 1024)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.is_running() {
            return;
        }
        // Errors mean that it ended by itself just now.
        self.signal(Signal::SIGTERM).ok();
        self.signal(Signal::SIGCONT).ok();
        if !within(Duration::from_secs(3), || !self.is_running()) {
            self.kill().ok();
        }
    }
}

fn text(file: &File) -> String {
    let length = file.metadata().map_or(0, |m| m.len());
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    let read = file.read_at(&mut bytes, 0).unwrap_or(0);
    bytes.truncate(read);
    String::from_utf8_lossy(&bytes).into_owned()
}
