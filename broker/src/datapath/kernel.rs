//! The real kernel programs, loaded with aya.
//!
//! Everything lives as long as the [`Kernel`] and not longer, also if the daemon is killed:
//! programs are attached with links, and nothing is pinned.

mod btf;
mod cgroup;
mod counters;
mod services;

use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use aya::maps::{Array, HashMap, Map, MapData, MapError, SkStorage};
use aya::programs::{CgroupAttachMode, CgroupSockAddr, Program, ProgramError, SockOps};
use aya::{Ebpf, EbpfError, EbpfLoader};
use aya_log::EbpfLogger;
use broker_ebpf::abi::{
    Address, ENDPOINTS_MAX, Pair, SocketState, UNKNOWN_OFFSET, WORKERS_MAX, Who, global, name,
};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use nix::time::{ClockId, clock_gettime};

pub use self::cgroup::{cgroup_id, mount_point};
use self::counters::CounterMaps;
use self::services::ServiceMaps;
use super::{Datapath, InterceptedService, KernelCounters};
use crate::sys::{self, ProgramsLog};

/// The programs, built by `build.rs`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/broker-programs"));

/// What to load.
#[derive(Clone, Debug)]
pub struct Options {
    /// Intercept connections; `None` only counts them.
    pub intercept: Option<InterceptOptions>,
    /// Remote endpoints that are counted one by one.
    pub endpoints_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { intercept: None, endpoints_max: ENDPOINTS_MAX }
    }
}

/// What the connect hook needs to know from the start.
#[derive(Clone, Copy, Debug)]
pub struct InterceptOptions {
    /// How many workers there are, at most [`WORKERS_MAX`].
    pub workers: usize,
    /// A worker whose last heartbeat is older than this gets no more connections.
    pub heartbeat_age_max: Duration,
}

/// Why the programs could not be loaded.
#[derive(Debug)]
pub enum LoadError {
    /// The daemon was built without them.
    NoPrograms,
    /// `/proc/self/mountinfo` could not be read.
    MountInfo(io::Error),
    /// No cgroup v2 is mounted.
    NoCgroup2,
    /// A cgroup directory could not be opened.
    Cgroup {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The kernel does not let this process load programs.
    NotPermitted(Box<dyn Error + Send + Sync>),
    /// The network namespace could not be told.
    Netns(io::Error),
    /// The kernel refused a map or a program.
    Refused {
        /// Which one.
        what: String,
        /// What it said.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl std::fmt::Display for LoadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoPrograms => f.write_str(
                "this broker was built without its kernel programs (AYA_BUILD_SKIP=1): it can \
                 neither count nor intercept connections",
            ),
            Self::MountInfo(_) => f.write_str("cannot look for cgroup v2 in /proc/self/mountinfo"),
            Self::NoCgroup2 => f.write_str(
                "no cgroup v2 is mounted, which kernel programs are attached to: \
                 mount -t cgroup2 none /sys/fs/cgroup/unified, or boot with \
                 systemd.unified_cgroup_hierarchy=1 (`ip netns exec` hides it, `nsenter --net` \
                 does not)",
            ),
            Self::Cgroup { path, .. } => write!(f, "cannot open the cgroup {}", path.display()),
            Self::NotPermitted(_) => f.write_str(
                "the kernel does not let this process load programs: it needs CAP_BPF, \
                 CAP_NET_ADMIN and CAP_PERFMON (or root), outside of user namespaces",
            ),
            Self::Netns(_) => f.write_str(
                "cannot tell this network namespace from others (SO_NETNS_COOKIE, Linux 5.14)",
            ),
            Self::Refused { what, .. } => write!(f, "the kernel refuses {what}"),
        }
    }
}

impl Error for LoadError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::NoPrograms | Self::NoCgroup2 => None,
            Self::MountInfo(source) | Self::Netns(source) | Self::Cgroup { source, .. } => {
                Some(source)
            }
            Self::NotPermitted(source) | Self::Refused { source, .. } => Some(source.as_ref()),
        }
    }
}

impl LoadError {
    fn refused(what: impl Into<String>, error: impl Error + Send + Sync + 'static) -> Self {
        if is_not_permitted(&error) {
            Self::NotPermitted(error.into())
        } else {
            Self::Refused { what: what.into(), source: error.into() }
        }
    }
}

fn is_not_permitted(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.downcast_ref::<io::Error>().is_some_and(|e| e.raw_os_error() == Some(1)) {
            return true;
        }
        next = error.source();
    }
    false
}

/// The loaded and attached programs.
///
/// [`Datapath::intercept`] and [`Datapath::own`] take a lock, but only for the length of a few
/// system calls.
pub struct Kernel {
    sockets: Mutex<SkStorage<MapData, SocketState>>,
    heartbeats: Mutex<Array<MapData, u64>>,
    services: Mutex<ServiceMaps>,
    original_destinations: HashMap<MapData, Pair, Address>,
    counters: CounterMaps,
    workers: usize,
    log: Option<KernelLog>,
    /// Detaches the programs when dropped.
    _programs: Ebpf,
}

impl Kernel {
    /// Loads the programs and attaches them to the root of the cgroup v2 tree.
    pub fn load(options: &Options) -> Result<Self, LoadError> {
        if OBJECT.is_empty() {
            return Err(LoadError::NoPrograms);
        }
        let path = mount_point()?;
        let root =
            File::open(&path).map_err(|source| LoadError::Cgroup { path: path.clone(), source })?;
        // Kernels before 5.11 charge maps to this limit.
        if let Err(e) = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY) {
            tracing::debug!(error = %e, "cannot lift the limit of locked memory");
        }

        let offset =
            fs::read(btf::VMLINUX).ok().and_then(|btf| btf::member_offset(&btf, "sock", "sk_err"));
        let Some(offset) = offset else {
            tracing::warn!(
                "{} does not tell where the kernel keeps a socket's error: failed connections \
                 are counted without their cause",
                btf::VMLINUX
            );
            return Self::attach(options, &root, UNKNOWN_OFFSET);
        };
        match Self::attach(options, &root, offset) {
            Err(LoadError::Refused { what, source }) => {
                // A kernel in lockdown lets no program read its memory.
                let kernel = Self::attach(options, &root, UNKNOWN_OFFSET)?;
                tracing::warn!(
                    error = %source,
                    "the kernel refuses {what} if it reads sockets' errors: failed connections \
                     are counted without their cause"
                );
                Ok(kernel)
            }
            result => result,
        }
    }

    fn attach(options: &Options, root: &File, sk_err_offset: u32) -> Result<Self, LoadError> {
        let intercept = options.intercept.as_ref();
        let workers = intercept.map_or(0, |i| i.workers.min(WORKERS_MAX));
        let age_max = intercept.map_or(Duration::ZERO, |i| i.heartbeat_age_max);
        let age_max_ns = u64::try_from(age_max.as_nanos()).unwrap_or(u64::MAX);
        let netns_cookie = UdpSocket::bind("127.0.0.1:0")
            .and_then(|socket| sys::netns_cookie(socket.as_fd()))
            .or_else(|e| if intercept.is_none() { Ok(0) } else { Err(LoadError::Netns(e)) })?;

        let workers_value = map_index(workers);
        let mut loader = EbpfLoader::new();
        loader
            .override_global(global::SK_ERR_OFFSET, &sk_err_offset, true)
            .override_global(global::NETNS_COOKIE, &netns_cookie, true)
            .override_global(global::WORKERS, &workers_value, true)
            .override_global(global::HEARTBEAT_AGE_MAX_NS, &age_max_ns, true)
            .map_max_entries(name::ENDPOINTS, map_index(options.endpoints_max));
        if intercept.is_none() {
            // It is there, but nothing writes to it.
            loader.map_max_entries(name::ORIGINAL_DESTINATIONS, 1);
        }
        let mut programs =
            loader.load(OBJECT).map_err(|e| LoadError::refused("the programs' maps", e))?;

        let log = KernelLog::of(&mut programs);
        attach_sock_ops(&mut programs, root)
            .map_err(|e| LoadError::refused(format!("the program {}", name::SOCK_OPS), e))?;
        if intercept.is_some() {
            // The answers first: no client may see where it was sent.
            for hook in name::GETPEERNAME.iter().chain(&name::CONNECT) {
                attach_sock_addr(&mut programs, hook, root)
                    .map_err(|e| LoadError::refused(format!("the program {hook}"), e))?;
            }
        }

        let services = ServiceMaps::new(
            take(&mut programs, name::TARGETS)?,
            take(&mut programs, name::SERVICES)?,
            take(&mut programs, name::LISTENERS)?,
            workers,
        );
        Ok(Self {
            sockets: Mutex::new(take(&mut programs, name::SOCKETS)?),
            heartbeats: Mutex::new(take(&mut programs, name::HEARTBEATS)?),
            services: Mutex::new(services),
            original_destinations: take(&mut programs, name::ORIGINAL_DESTINATIONS)?,
            counters: CounterMaps {
                endpoints: take(&mut programs, name::ENDPOINTS)?,
                endpoints_max: options.endpoints_max,
                totals: take(&mut programs, name::TOTALS)?,
                tallies: take(&mut programs, name::TALLIES)?,
            },
            workers,
            log,
            _programs: programs,
        })
    }

    /// What the programs log; `None` if it cannot be read, or was taken before.
    pub fn take_log(&mut self) -> Option<KernelLog> {
        self.log.take()
    }
}

fn attach_sock_ops(programs: &mut Ebpf, root: &File) -> Result<(), ProgramError> {
    let program: &mut SockOps = program(programs, name::SOCK_OPS)?.try_into()?;
    program.load()?;
    // Links are multi by nature: other programs on the cgroup stay.
    program.attach(root, CgroupAttachMode::Single)?;
    Ok(())
}

fn attach_sock_addr(programs: &mut Ebpf, hook: &str, root: &File) -> Result<(), ProgramError> {
    let program: &mut CgroupSockAddr = program(programs, hook)?.try_into()?;
    program.load()?;
    program.attach(root, CgroupAttachMode::Single)?;
    Ok(())
}

fn program<'a>(programs: &'a mut Ebpf, name: &str) -> Result<&'a mut Program, ProgramError> {
    programs.program_mut(name).ok_or(ProgramError::NotLoaded)
}

fn take<M: TryFrom<Map, Error = MapError>>(
    programs: &mut Ebpf,
    name: &str,
) -> Result<M, LoadError> {
    programs
        .take_map(name)
        .ok_or_else(|| MapError::InvalidName { name: name.to_owned() })
        .and_then(M::try_from)
        .map_err(|e| LoadError::refused(format!("the map {name}"), EbpfError::from(e)))
}

impl Datapath for Kernel {
    fn own(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let state = SocketState { who: Who::Broker as u8, ..SocketState::default() };
        lock(&self.sockets).insert(&socket, state, 0).map_err(io_error)
    }

    fn heartbeat(&self, worker: usize) -> io::Result<()> {
        if worker >= self.workers {
            return Ok(());
        }
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC)?;
        let now = u64::try_from(Duration::from(now).as_nanos()).unwrap_or(u64::MAX);
        lock(&self.heartbeats).set(map_index(worker), now, 0).map_err(io_error)
    }

    fn intercept(&self, services: &[InterceptedService]) -> anyhow::Result<()> {
        anyhow::ensure!(
            services.is_empty() || self.workers > 0,
            "the programs were loaded to count only"
        );
        lock(&self.services).replace(services).context("replacing the intercepted services")
    }

    fn original_destination(
        &self,
        client: SocketAddr,
        listener: SocketAddr,
    ) -> io::Result<Option<SocketAddr>> {
        let pair = Pair { client: client.into(), listener: listener.into() };
        match self.original_destinations.get(&pair, 0) {
            Ok(destination) => Ok(Some(destination.into())),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(e) => Err(io_error(e)),
        }
    }

    fn counters(&self) -> anyhow::Result<KernelCounters> {
        self.counters.read()
    }
}

/// A panic elsewhere leaves the maps as good as they were.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Far too large numbers become an index that no map has.
fn map_index(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn io_error(error: MapError) -> io::Error {
    match error {
        MapError::SyscallError(e) => e.io_error,
        error => io::Error::other(error),
    }
}

/// The rare events that the programs log.
pub struct KernelLog(ProgramsLog);

impl KernelLog {
    /// Programs that cannot log work just as well.
    fn of(programs: &mut Ebpf) -> Option<Self> {
        EbpfLogger::init(programs)
            .inspect_err(|e| tracing::warn!(error = %e, "the programs' log cannot be read"))
            .ok()
            .map(Self)
    }

    /// Passes what the programs log on to the daemon's log, until dropped.
    pub async fn forward(self) -> io::Result<()> {
        let mut log = sys::watch_log(self.0)?;
        loop {
            let mut ready = log.readable_mut().await?;
            ready.get_inner_mut().flush();
            ready.clear_ready();
        }
    }
}
