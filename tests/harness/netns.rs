//! Network namespaces that vanish with their last user.
//!
//! They have no name under `/run/netns`: a bind mount would outlive a killed test, whereas a
//! namespace held by an open descriptor cannot. To look inside one, use
//! `nsenter --net=/proc/PID/fd/N` with the path that [`Netns::path`] tells.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sched::{CloneFlags, setns, unshare};

use crate::process::Launch;

/// A network namespace of our own. Clones share it; it goes away with the last of them, once no
/// process and no socket is left inside.
#[derive(Clone, Debug)]
pub struct Netns {
    name: &'static str,
    handle: Arc<File>,
}

impl Netns {
    /// Makes an empty namespace in which only the loopback interface is up.
    pub fn new(name: &'static str) -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "network namespaces need root");
        // Only the thread moves; whatever it has made stays reachable through the descriptor.
        let handle = thread::scope(|scope| {
            let maker = scope.spawn(|| -> Result<File> {
                unshare(CloneFlags::CLONE_NEWNET).context("unshare(CLONE_NEWNET)")?;
                Ok(File::open("/proc/thread-self/ns/net")?)
            });
            maker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
        .with_context(|| format!("network namespace {name:?}"))?;
        let netns = Self { name, handle: Arc::new(handle) };
        netns.ip(&["link set lo up"])?;
        Ok(netns)
    }

    /// A namespace that somebody else holds, by the [path](Self::path) that they tell.
    pub fn open(name: &'static str, path: &Path) -> Result<Self> {
        let handle = File::open(path).with_context(|| format!("{}", path.display()))?;
        Ok(Self { name, handle: Arc::new(handle) })
    }

    /// Its name in messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// A path to the namespace, for as long as this process lives.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.handle.as_raw_fd()).into()
    }

    /// Runs `f` inside, on a thread of its own. Sockets that it makes belong to the namespace for
    /// good, wherever they are used later.
    ///
    /// # Panics
    /// If the namespace cannot be entered, or `f` panics.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                setns(self.handle.as_fd(), CloneFlags::CLONE_NEWNET)
                    .unwrap_or_else(|e| panic!("cannot enter namespace {:?}: {e}", self.name));
                f()
            });
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Runs `ip(8)` commands inside, in one go.
    pub fn ip(&self, commands: &[&str]) -> Result<()> {
        let mut script = tempfile::NamedTempFile::new()?;
        std::io::Write::write_all(&mut script, (commands.join("\n") + "\n").as_bytes())?;
        Launch::new("ip")
            .arg("-batch")
            .arg(script.path())
            .netns(self)
            .output(Duration::from_secs(20))?
            .success()
            .with_context(|| format!("ip in namespace {:?}: {commands:?}", self.name))?;
        Ok(())
    }

    /// Sets a value under `/proc/sys/net`, e.g. `ipv4.ip_forward`.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/net/{}", key.replace('.', "/"));
        self.run(|| fs::write(&path, value)).with_context(|| format!("{path} = {value}"))
    }

    /// Connects two namespaces: `ours` here, `theirs` there, each with its addresses.
    pub fn veth(&self, ours: &Interface<'_>, other: &Self, theirs: &Interface<'_>) -> Result<()> {
        let link = format!(
            "link add {} type veth peer name {} netns {}",
            ours.name,
            theirs.name,
            other.path().display()
        );
        self.ip(&[&link])?;
        self.configure(ours)?;
        other.configure(theirs)
    }

    fn configure(&self, interface: &Interface<'_>) -> Result<()> {
        let mut commands = vec![format!("link set {} up", interface.name)];
        for address in interface.addresses {
            // Duplicate address detection would keep IPv6 addresses unusable for a second.
            let nodad = if address.contains(':') { " nodad" } else { "" };
            commands.push(format!("addr add {address} dev {}{nodad}", interface.name));
        }
        self.ip(&commands.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

/// One end of a veth pair.
#[derive(Clone, Copy, Debug)]
pub struct Interface<'a> {
    /// Its name, at most 15 bytes.
    pub name: &'a str,
    /// Addresses with prefix length.
    pub addresses: &'a [String],
}
