//! Control groups: who is intercepted, what each party's processor time was, and a way to end
//! whole process trees.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::leftovers;
use crate::process::Process;
use crate::wait::within;

/// A cgroup v2 directory of our own. Dropping it kills what is inside and removes it.
#[derive(Debug)]
pub struct Cgroup {
    directory: PathBuf,
    /// Relative to the cgroup2 mount, with a leading slash.
    path: String,
}

impl Cgroup {
    /// Makes a directory with a unique name below the cgroup2 mount. The first call of a process
    /// also removes what killed runs have left.
    pub fn new() -> Result<Self> {
        static SWEEP: Once = Once::new();
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mount = mount_point()?;
        SWEEP.call_once(|| leftovers::sweep(&mount, remove));
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self::make(&mount, format!("/{}{number}", leftovers::prefix()))
    }

    /// Makes a directory inside this one. Drop it first.
    pub fn child(&self, name: &str) -> Result<Self> {
        Self::make(&mount_point()?, format!("{}/{name}", self.path))
    }

    fn make(mount: &Path, path: String) -> Result<Self> {
        let directory = mount.join(&path[1..]);
        fs::create_dir(&directory).with_context(|| format!("mkdir {}", directory.display()))?;
        Ok(Self { directory, path })
    }

    /// The path as the broker's configuration wants it: relative to the cgroup2 mount.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The same as a directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A descriptor to which a process writes `0` to move in.
    pub(crate) fn procs(&self) -> Result<File> {
        let path = self.directory.join("cgroup.procs");
        OpenOptions::new()
            .write(true)
            .open(&path)
            .with_context(|| format!("open {}", path.display()))
    }

    /// Processor time used inside so far, also by processes that have ended.
    pub fn cpu_time(&self) -> Result<Duration> {
        let text = fs::read_to_string(self.directory.join("cpu.stat"))?;
        let us = text
            .lines()
            .find_map(|line| line.strip_prefix("usage_usec "))
            .context("cpu.stat has no usage_usec")?;
        Ok(Duration::from_micros(us.trim().parse()?))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        remove(&self.directory);
    }
}

/// How many threads a process may have. Drop it after the process.
#[derive(Debug)]
pub struct ThreadLimit(PathBuf);

impl ThreadLimit {
    /// No limit yet, for a running process.
    pub fn of(process: &Process) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mount = pids_mount()?;
        leftovers::sweep(&mount, remove);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let limit = Self(mount.join(format!("{}pids{number}", leftovers::prefix())));
        fs::create_dir(&limit.0).with_context(|| format!("mkdir {}", limit.0.display()))?;
        fs::write(limit.0.join("cgroup.procs"), process.pid().to_string())?;
        Ok(limit)
    }

    /// From now on it gets none beyond those that it has.
    pub fn no_more(&self) -> Result<()> {
        Ok(fs::write(self.0.join("pids.max"), "1")?)
    }

    /// Lifts the limit.
    pub fn lift(&self) -> Result<()> {
        Ok(fs::write(self.0.join("pids.max"), "max")?)
    }
}

impl Drop for ThreadLimit {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

/// Where the controller for that is: in a hierarchy of its own, or in cgroup2.
fn pids_mount() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let own = mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let is_own = right.next()? == "cgroup" && right.nth(1)?.split(',').any(|o| o == "pids");
        is_own.then(|| left.split(' ').nth(4))?
    });
    if let Some(own) = own {
        return Ok(own.into());
    }
    let mount = mount_point()?;
    fs::write(mount.join("cgroup.subtree_control"), "+pids").context("no pids controller")?;
    Ok(mount)
}

/// Where cgroup2 is mounted; not everywhere at `/sys/fs/cgroup`.
pub fn mount_point() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    mounts
        .lines()
        .find_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            (right.split(' ').next()? == "cgroup2").then(|| left.split(' ').nth(4))?
        })
        .map(PathBuf::from)
        .context("no cgroup2 file system is mounted (see /proc/self/mountinfo)")
}

/// Kills everything below `directory` and removes it.
fn remove(directory: &Path) {
    // Best effort: a group that cannot be removed now is swept by a later run.
    fs::write(directory.join("cgroup.kill"), "1").ok();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove(&entry.path());
        }
    }
    // Killed processes leave the group when they are reaped, not at once.
    within(Duration::from_secs(2), || fs::remove_dir(directory).is_ok() || !directory.exists());
}
