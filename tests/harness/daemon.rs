//! The daemon under test, as an operator runs it: a binary, a TOML file, an admin socket.

use std::env;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use broker::stats::{OriginSnapshot, ServiceSnapshot, Snapshot};
use nix::sys::signal::Signal;

use crate::cgroup::Cgroup;
use crate::lab::Lab;
use crate::netns::Netns;
use crate::process::{Launch, Process};
use crate::wait::within;

/// How long a start and a stop may take.
const PATIENCE: Duration = Duration::from_secs(15);

/// What a daemon is started with.
struct Files {
    directory: PathBuf,
    config: PathBuf,
    admin: PathBuf,
}

impl Files {
    fn write(lab: &Lab, config: &str) -> Result<Self> {
        let directory =
            tempfile::Builder::new().prefix("broker-").tempdir_in(lab.directory())?.keep();
        let (file, admin) = (directory.join("broker.toml"), directory.join("admin.sock"));
        fs::write(&file, format!("admin_socket = \"{}\"\n{config}", admin.display()))?;
        Ok(Self { directory, config: file, admin })
    }

    /// `launch` is what to put before the arguments.
    fn spawn(self, launch: Launch, netns: &Netns, cgroup: &Cgroup) -> Result<Daemon> {
        let launch = launch.arg("run").arg("--config").arg(self.config);
        let process = launch.netns(netns).cgroup(cgroup).spawn()?;
        Ok(Daemon { process, admin: self.admin })
    }
}

/// A running `broker run`. Dropping it ends it.
#[derive(Debug)]
pub struct Daemon {
    process: Process,
    admin: PathBuf,
}

impl Daemon {
    /// Starts the daemon in the lab's host namespace and waits until it is ready. `config` is the
    /// configuration file but for the admin socket.
    pub fn start(lab: &Lab, config: &str) -> Result<Self> {
        Self::start_as(lab, &lab.proxy_cgroup, config)
    }

    /// The same, logging to a pipe or a file that is there.
    pub fn start_logging_to(lab: &Lab, log: &Path, config: &str) -> Result<Self> {
        const SCRIPT: &str = "exec \"$@\" 2>\"$0\"";
        let launch = Launch::new("sh").args(["-c", SCRIPT]).arg(log).arg(binary()?);
        let files = Files::write(lab, config)?;
        files.spawn(launch, &lab.host, &lab.proxy_cgroup)?.ready(config)
    }

    /// The same in another namespace.
    pub fn start_in(lab: &Lab, netns: &Netns, config: &str) -> Result<Self> {
        Self::spawn_as(lab, netns, &lab.proxy_cgroup, config)?.ready(config)
    }

    /// The same in a cgroup of the caller's.
    pub fn start_as(lab: &Lab, cgroup: &Cgroup, config: &str) -> Result<Self> {
        Self::spawn_as(lab, &lab.host, cgroup, config)?.ready(config)
    }

    /// The same with a cgroup of the caller's for the root of all, as a container has it.
    pub fn start_below(lab: &Lab, cgroup: &Cgroup, config: &str) -> Result<Self> {
        // The namespaces, and the mount, end with the process.
        const SCRIPT: &str = "mount -t cgroup2 none \"$0\" && exec \"$@\"";
        let files = Files::write(lab, config)?;
        let mount = files.directory.join("cgroup");
        fs::create_dir(&mount)?;
        let launch = Launch::new("unshare")
            .args(["--cgroup", "--mount", "sh", "-c", SCRIPT])
            .arg(mount)
            .arg(binary()?);
        files.spawn(launch, &lab.host, cgroup)?.ready(config)
    }

    fn ready(mut self, config: &str) -> Result<Self> {
        let mut answer = Ok(String::new());
        within(PATIENCE, || {
            answer = self.request("GET", "/v1/health");
            answer.is_ok() || !self.process.is_running()
        });
        answer.with_context(|| {
            format!("the daemon is not ready\n{}\n{config}", self.process.stderr())
        })?;
        Ok(self)
    }

    /// Starts the daemon without waiting for anything: it may never become ready.
    pub fn spawn(lab: &Lab, config: &str) -> Result<Self> {
        Self::spawn_as(lab, &lab.host, &lab.proxy_cgroup, config)
    }

    fn spawn_as(lab: &Lab, netns: &Netns, cgroup: &Cgroup, config: &str) -> Result<Self> {
        Files::write(lab, config)?.spawn(Launch::new(binary()?), netns, cgroup)
    }

    /// A connection to its admin socket, for whatever is not a request.
    pub fn admin(&self) -> io::Result<UnixStream> {
        UnixStream::connect(&self.admin)
    }

    /// Where its admin socket is, for the commands that ask it.
    #[must_use]
    pub fn admin_socket(&self) -> &Path {
        &self.admin
    }

    /// The process, for signals, memory and processor time.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// What it has logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        self.process.stderr()
    }

    /// Its statistics.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let body = self.request("GET", "/v1/snapshot")?;
        serde_json::from_str(&body).with_context(|| format!("snapshot: {body}"))
    }

    /// The statistics of its only (or first) service.
    pub fn service(&self) -> Result<ServiceSnapshot> {
        self.snapshot()?.services.into_iter().next().context("no service")
    }

    /// The statistics of all origins of the first service, summed up.
    pub fn totals(&self) -> Result<Totals> {
        Ok(Totals::of(&self.service()?.origins))
    }

    /// Asks it to finish what is under way and stop.
    pub fn drain(&self) -> Result<()> {
        self.request("POST", "/v1/drain").map(drop)
    }

    /// Ends it by `SIGTERM`; it must succeed in that.
    pub fn stop(mut self) -> Result<()> {
        self.process.signal(Signal::SIGTERM)?;
        let status = self.process.wait(PATIENCE)?;
        ensure!(status.success(), "the daemon ended with {status}\n{}", self.log());
        Ok(())
    }

    /// A request to the admin socket; the body of its response.
    pub fn request(&self, method: &str, path: &str) -> Result<String> {
        let mut socket = self.admin()?;
        socket.set_read_timeout(Some(PATIENCE))?;
        write!(
            socket,
            "{method} {path} HTTP/1.1\r\nHost: broker\r\nContent-Length: 0\r\n\
             Connection: close\r\n\r\n"
        )?;
        let mut response = String::new();
        socket.read_to_string(&mut response)?;
        let (head, body) = response.split_once("\r\n\r\n").context("no response")?;
        let status = head.split(' ').nth(1).unwrap_or("");
        if !status.starts_with('2') {
            bail!("{method} {path}: {head}\n{body}");
        }
        Ok(body.to_owned())
    }
}

/// The pool counters of one service, over all of its origins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Sockets dialled.
    pub created: u64,
    /// Exchanges on sockets that were idle before.
    pub reused: u64,
    /// Leases that went back to the pool.
    pub returned: u64,
    /// Sockets let go, for any reason.
    pub evicted: u64,
    /// Idle sockets.
    pub idle: u64,
    /// Leased sockets.
    pub active: u64,
    /// Requests repeated on another socket.
    pub retried: u64,
}

impl Totals {
    /// Sums up.
    #[must_use]
    pub fn of(origins: &[OriginSnapshot]) -> Self {
        let sum = |field: fn(&OriginSnapshot) -> u64| origins.iter().map(field).sum();
        Self {
            created: sum(|o| o.created),
            reused: sum(|o| o.reused),
            returned: sum(|o| o.returned),
            evicted: sum(|o| o.evicted.values().sum()),
            idle: sum(|o| o.idle),
            active: sum(|o| o.active),
            retried: sum(|o| o.retried),
        }
    }
}

/// The daemon's binary: `BROKER_BIN`, or the one that cargo has put next to this program.
pub fn binary() -> Result<PathBuf> {
    match env::var_os("BROKER_BIN") {
        Some(path) => Ok(path.into()),
        None => sibling("broker"),
    }
}

/// A binary that cargo has put next to this program (tests are one folder further down).
pub(crate) fn sibling(name: &str) -> Result<PathBuf> {
    let exe = env::current_exe()?;
    exe.ancestors()
        .skip(1)
        .take(2)
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
        .with_context(|| {
            format!(
                "no {name:?} near {}; build it with `cargo build --workspace` (with --release if \
                 this is a release build)",
                exe.display()
            )
        })
}
