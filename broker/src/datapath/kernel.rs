//! The real kernel programs, loaded with aya.
//!
//! Everything lives as long as the [`Kernel`] and not longer, also if the daemon is killed:
//! programs are attached with links, and nothing is pinned.

mod btf;
mod cgroup;
mod counters;
pub mod probe;
pub mod selftest;
mod services;

use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use aya::maps::{Array, HashMap, Map, MapData, MapError, SkStorage, SockHash, SockMap};
use aya::programs::{
    CgroupAttachMode, CgroupSockAddr, Program, ProgramError, SchedClassifier, SkMsg, SkSkb, SockOps,
};
use aya::{Ebpf, EbpfError, EbpfLoader};
use aya_log::EbpfLogger;
use broker_ebpf::abi::{
    self, CONNECTIONS_MAX, ENDPOINTS_MAX, Offsets, Pair, Path, SERVICES_MAX, SocketState,
    UNKNOWN_OFFSET, WORKERS_MAX, Who, global, name,
};
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};

pub use self::cgroup::{cgroup_id, mount_point};
use self::counters::{CounterMaps, OwnTest};
use self::selftest::Step;
use self::services::ServiceMaps;
use super::gate::{self, Gate};
use super::steering::{Layout, Steering};
use super::{Datapath, Dialled, InterceptedService, KernelCounters};
use crate::chain;
use crate::sys::{self, Mapped, ProgramsLog};

/// The programs, built by `build.rs`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/broker-programs"));

/// What to load.
#[derive(Clone, Debug)]
pub struct Options {
    /// Intercept connections; `None` only counts them.
    pub intercept: Option<InterceptOptions>,
    /// Remote endpoints that are counted one by one.
    pub endpoints_max: usize,
    /// Places for active connections that are followed from the attempt to the end; rounded up to a
    /// power of two.
    pub connections_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { intercept: None, endpoints_max: ENDPOINTS_MAX, connections_max: CONNECTIONS_MAX }
    }
}

/// What the connect hook needs to know from the start.
#[derive(Clone, Debug)]
pub struct InterceptOptions {
    /// How many workers there are, at most [`WORKERS_MAX`].
    pub workers: usize,
    /// A worker whose last heartbeat is older than this gets no more connections.
    pub heartbeat_age_max: Duration,
    /// Steer clients in the kernel.
    pub steer: Option<Layout>,
}

impl InterceptOptions {
    /// Nothing to intercept, and steering to be tried out.
    #[must_use]
    pub fn trial() -> Self {
        let heartbeat_age_max = Duration::ZERO;
        Self { workers: 1, heartbeat_age_max, steer: Some(Layout::trial()) }
    }
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
    gates: Arc<Mapped<gate::Words>>,
    gates_taken: AtomicUsize,
    original_destinations: HashMap<MapData, Pair, abi::Dialled>,
    counters: CounterMaps,
    steering: Result<Arc<Steering>, String>,
    self_test: Vec<Step>,
    workers: usize,
    log: Option<KernelLog>,
    /// Detaches the programs when dropped.
    _programs: Arc<Mutex<Ebpf>>,
}

/// Whether another daemon intercepts connections on this host, as far as this process may know
/// (`CAP_SYS_ADMIN`).
#[must_use]
pub fn has_neighbour() -> bool {
    let ours =
        |program: aya::programs::ProgramInfo| program.name_as_str() == Some(name::CONNECT[0]);
    aya::programs::loaded_programs().filter_map(Result::ok).any(ours)
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
        let known = Known::look_up();
        if known.sk_err == UNKNOWN_OFFSET {
            tracing::warn!(
                "{} does not tell where the kernel keeps a socket's error: failed connections \
                 are counted without their cause",
                btf::VMLINUX
            );
        }
        match Self::attach(options, &root, &known) {
            Err(LoadError::Refused { what, source }) if known != Known::NOTHING => {
                // A kernel in lockdown lets no program read its memory.
                let kernel = Self::attach(options, &root, &Known::NOTHING)?;
                tracing::warn!(
                    error = %source,
                    "the kernel refuses {what} if it reads kernel memory: failed connections are \
                     counted without their cause"
                );
                Ok(kernel)
            }
            result => result,
        }
    }

    fn attach(options: &Options, root: &File, known: &Known) -> Result<Self, LoadError> {
        let mut programs = open(options, known)?;
        let intercept = options.intercept.as_ref();
        let workers = intercept.map_or(0, |i| i.workers.min(WORKERS_MAX));
        let layout = intercept.and_then(|i| i.steer.as_ref());
        let log = KernelLog::of(&mut programs);
        attach_sock_ops(&mut programs, root)
            .map_err(|e| LoadError::refused(format!("the program {}", name::SOCK_OPS), e))?;
        let steering = match layout {
            None => Err("no service can be steered".to_owned()),
            Some(layout) => steering(&mut programs, layout, known),
        };
        if intercept.is_some() {
            // The answers first: no client may see where it was sent.
            for hook in name::GETPEERNAME.iter().chain(&name::CONNECT) {
                attach_sock_addr(&mut programs, hook, root)
                    .map_err(|e| LoadError::refused(format!("the program {hook}"), e))?;
            }
        }

        let mut sockets = take(&mut programs, name::SOCKETS)?;
        let mut routes = take(&mut programs, name::ROUTES)?;
        let targets = take(&mut programs, name::TARGETS)?;
        let services = take(&mut programs, name::SERVICES)?;
        let listeners = take(&mut programs, name::LISTENERS)?;
        let heartbeats = Mutex::new(take(&mut programs, name::HEARTBEATS)?);
        let gates = gates(&programs)?;
        let original_destinations = take(&mut programs, name::ORIGINAL_DESTINATIONS)?;
        let mut counters = CounterMaps {
            endpoints: take(&mut programs, name::ENDPOINTS)?,
            paths: take(&mut programs, name::PATHS)?,
            endpoints_max: options.endpoints_max,
            totals: take(&mut programs, name::TOTALS)?,
            tallies: take(&mut programs, name::TALLIES)?,
            own_test: OwnTest::default(),
        };
        let programs = Arc::new(Mutex::new(programs));

        let mut self_test = selftest::untried();
        let steering = steering.and_then(|steering| {
            steering.run_with(&programs);
            let (steps, dialled) =
                selftest::run(&steering, &mut sockets, &mut routes, known.offsets);
            self_test = steps;
            log_self_test(&self_test);
            if let Err(error) = counters.leave_out(&dialled) {
                let error = chain(error.as_ref());
                tracing::warn!(error, "the self-test's connections are counted as any others");
            }
            selftest::verdict(&self_test).map(|()| steering)
        });
        if let (Some(_), Err(reason)) = (layout, &steering) {
            tracing::warn!(reason, "nothing is steered");
        }
        let layout = steering.as_ref().ok().map(|steering| steering.layout().clone());
        let steer = (layout, selftest::auto_is_safe(&self_test));
        let services = ServiceMaps::new(targets, services, listeners, routes, workers, steer);
        Ok(Self {
            sockets: Mutex::new(sockets),
            heartbeats,
            services: Mutex::new(services),
            gates: Arc::new(gates),
            gates_taken: AtomicUsize::new(0),
            original_destinations,
            counters,
            steering,
            self_test,
            workers,
            log,
            _programs: programs,
        })
    }

    /// Why nothing is steered, if so.
    #[must_use]
    pub fn not_steering(&self) -> Option<&str> {
        self.steering.as_ref().err().map(String::as_str)
    }

    /// 0 is none.
    fn set_heartbeat(&self, worker: usize, ns: u64) -> io::Result<()> {
        if worker >= self.workers {
            return Ok(());
        }
        lock(&self.heartbeats).set(map_index(worker), ns, 0).map_err(io_error)
    }

    /// What came of trying steering out.
    #[must_use]
    pub fn self_test(&self) -> &[Step] {
        &self.self_test
    }

    /// What the programs log; `None` if it cannot be read, or was taken before.
    pub fn take_log(&mut self) -> Option<KernelLog> {
        self.log.take()
    }
}

/// Makes the maps and gets the programs ready to be loaded.
fn open(options: &Options, known: &Known) -> Result<Ebpf, LoadError> {
    if OBJECT.is_empty() {
        return Err(LoadError::NoPrograms);
    }
    // Kernels before 5.11 charge maps to this limit.
    if let Err(e) = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY) {
        tracing::debug!(error = %e, "cannot lift the limit of locked memory");
    }
    let intercept = options.intercept.as_ref();
    let workers = intercept.map_or(0, |i| map_index(i.workers.min(WORKERS_MAX)));
    let age_max = intercept.map_or(Duration::ZERO, |i| i.heartbeat_age_max);
    let age_max_ns = u64::try_from(age_max.as_nanos()).unwrap_or(u64::MAX);
    let netns_cookie = UdpSocket::bind("127.0.0.1:0")
        .and_then(|socket| sys::netns_cookie(socket.as_fd()))
        .or_else(|e| if intercept.is_none() { Ok(0) } else { Err(LoadError::Netns(e)) })?;
    let layout = intercept.and_then(|i| i.steer.as_ref());
    let group_slots = layout.map_or(0, |layout| map_index(layout.group_slots()));

    let can_set_retval = u32::from(intercept.is_some() && probe::can_set_retval().unwrap_or(false));

    let connections = map_index(options.connections_max).next_power_of_two();
    let connections_mask = connections - 1;

    let mut loader = EbpfLoader::new();
    loader
        .override_global(global::SK_ERR_OFFSET, &known.sk_err, true)
        .override_global(global::OFFSETS, &known.offsets, true)
        .override_global(global::NETNS_COOKIE, &netns_cookie, true)
        .override_global(global::CAN_SET_RETVAL, &can_set_retval, true)
        .override_global(global::WORKERS, &workers, true)
        .override_global(global::HEARTBEAT_AGE_MAX_NS, &age_max_ns, true)
        .override_global(global::GROUP_SLOTS, &group_slots, true)
        .override_global(global::CONNECTIONS_MASK, &connections_mask, true)
        .map_max_entries(name::CONNECTIONS, connections)
        .map_max_entries(name::ENDPOINTS, map_index(options.endpoints_max));
    if let Some(layout) = layout {
        let by_slot =
            [name::ORIGIN_SOCKETS, name::ORIGIN_SLOTS, name::SLOTS, name::REQUESTS, name::HEADS];
        for map in by_slot {
            loader.map_max_entries(map, map_index(layout.slots()));
        }
        loader.map_max_entries(name::GROUPS, map_index(layout.groups()));
    } else {
        loader.map_max_entries(name::CLIENT_SOCKETS, 1).map_max_entries(name::CLIENTS, 1);
    }
    if intercept.is_none() {
        // It is there, but nothing writes to it.
        loader.map_max_entries(name::ORIGINAL_DESTINATIONS, 1);
    }
    loader.load(OBJECT).map_err(|e| LoadError::refused("the programs' maps", e))
}

/// What the operator should know of a self-test that did not just pass.
fn log_self_test(steps: &[Step]) {
    let took: Duration = steps.iter().map(|step| step.took).sum();
    tracing::debug!(?took, "tried steering out");
    let remarks: Vec<_> = steps.iter().filter_map(Step::remark).collect();
    if !remarks.is_empty() {
        tracing::warn!(remarks = remarks.join("; "), "steering works, but clients may notice it");
    }
}

fn attach_sock_ops(programs: &mut Ebpf, root: &File) -> Result<(), ProgramError> {
    let program: &mut SockOps = program(programs, name::SOCK_OPS)?.try_into()?;
    program.load()?;
    // Links are multi by nature: other programs on the cgroup stay.
    program.attach(root, CgroupAttachMode::Single)?;
    Ok(())
}

/// Loads the programs that steer and attaches them to their maps.
fn steering(programs: &mut Ebpf, layout: &Layout, known: &Known) -> Result<Arc<Steering>, String> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |e: &dyn Error| format!("{what}: {}", shortened(e))
    };
    let fd = |programs: &Ebpf, name: &str| match programs.map(name) {
        Some(map @ Map::SockHash(_)) => {
            SockHash::<_, u64>::try_from(map).and_then(|m| Ok(m.fd().try_clone()?))
        }
        Some(map) => SockMap::try_from(map).and_then(|m| Ok(m.fd().try_clone()?)),
        None => Err(MapError::InvalidName { name: name.to_owned() }),
    };
    let clients = fd(programs, name::CLIENT_SOCKETS).map_err(|e| failed("its maps")(&e))?;
    let relaying = fd(programs, name::RELAYING_SOCKETS).map_err(|e| failed("its maps")(&e))?;
    let origins = fd(programs, name::ORIGIN_SOCKETS).map_err(|e| failed("its maps")(&e))?;
    let request = program(programs, name::REQUEST)
        .and_then(<&mut SkMsg>::try_from)
        .and_then(|p| p.load().and_then(|()| p.attach(&clients)).map(drop));
    request.map_err(|e| failed(name::REQUEST)(&e))?;
    let response = program(programs, name::RESPONSE)
        .and_then(<&mut SkSkb>::try_from)
        .and_then(|p| p.load().and_then(|()| p.attach(&origins)).map(drop));
    response.map_err(|e| failed(name::RESPONSE)(&e))?;
    let relayed = program(programs, name::RELAYED)
        .and_then(<&mut SkMsg>::try_from)
        .and_then(|p| p.load().and_then(|()| p.attach(&relaying)).map(drop));
    relayed.map_err(|e| failed(name::RELAYED)(&e))?;
    let settled = program(programs, name::SETTLED)
        .and_then(<&mut SchedClassifier>::try_from)
        .and_then(SchedClassifier::load);
    settled.map_err(|e| failed(name::SETTLED)(&e))?;
    if !known.is_enough_to_steer() {
        return Err(format!(
            "{} does not tell where redirected bytes, sequence numbers and urgent data are kept",
            btf::VMLINUX
        ));
    }
    Steering::new(layout.clone(), programs).map(Arc::new).map_err(|e| failed("its maps")(&e))
}

/// An error and its causes in one line. What the verifier has to say may be very long, and its
/// last words matter.
fn shortened(error: &dyn Error) -> String {
    const START: usize = 200;
    const END: usize = 800;
    let mut text = chain(error);
    if text.len() > START + END {
        let (start, end) =
            (text.floor_char_boundary(START), text.ceil_char_boundary(text.len() - END));
        text = format!("{} … {}", &text[..start], &text[end..]);
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Where the kernel keeps what the programs want to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// The error of a socket.
    sk_err: u32,
    /// What steering must know.
    offsets: Offsets,
}

impl Known {
    const NOTHING: Self = Self { sk_err: UNKNOWN_OFFSET, offsets: Offsets::UNKNOWN };

    /// Asks the kernel's type information.
    #[must_use]
    pub fn look_up() -> Self {
        let btf = fs::read(btf::VMLINUX).unwrap_or_default();
        let offset = |structure: &str, member: &str| {
            btf::member_offset(&btf, structure, member).unwrap_or(UNKNOWN_OFFSET)
        };
        Self {
            sk_err: offset("sock", "sk_err"),
            offsets: Offsets {
                sock_socket: offset("sock", "sk_socket"),
                socket_file: offset("socket", "file"),
                file_flags: offset("file", "f_flags"),
                sock_user_data: offset("sock", "sk_user_data"),
                sock_shutdown: offset("sock", "sk_shutdown"),
                psock_ingress_skb: offset("sk_psock", "ingress_skb"),
                psock_ingress_msg: offset("sk_psock", "ingress_msg"),
                skb_head_qlen: offset("sk_buff_head", "qlen"),
                tcp_rcv_nxt: offset("tcp_sock", "rcv_nxt"),
                tcp_copied_seq: offset("tcp_sock", "copied_seq"),
                tcp_write_seq: offset("tcp_sock", "write_seq"),
                tcp_bytes_received: offset("tcp_sock", "bytes_received"),
                skb_cb: offset("sk_buff", "cb"),
                skb_cb_seq: offset("tcp_skb_cb", "seq"),
                skb_cb_ack_seq: offset("tcp_skb_cb", "ack_seq"),
                skb_cb_flags: offset("tcp_skb_cb", "tcp_flags"),
                tcp_snd_up: offset("tcp_sock", "snd_up"),
            },
        }
    }

    /// Whether it can be told what a client has not read yet, or else the daemon could overtake it;
    /// what an origin sends twice, or else a client would get it twice; what it sends without having
    /// been asked; and which data is urgent, or else an origin would not get all that it must, and a
    /// client more.
    fn is_enough_to_steer(&self) -> bool {
        let Offsets {
            sock_user_data,
            psock_ingress_skb,
            psock_ingress_msg,
            skb_head_qlen,
            tcp_copied_seq,
            tcp_write_seq,
            skb_cb,
            skb_cb_seq,
            skb_cb_ack_seq,
            skb_cb_flags,
            tcp_snd_up,
            ..
        } = self.offsets;
        let unread = [sock_user_data, psock_ingress_skb, psock_ingress_msg, skb_head_qlen];
        let twice = [tcp_copied_seq, skb_cb, skb_cb_seq];
        let unasked = [tcp_write_seq, skb_cb_ack_seq];
        let urgent = [tcp_snd_up, skb_cb_flags];
        !unread
            .iter()
            .chain(&twice)
            .chain(&unasked)
            .chain(&urgent)
            .any(|&offset| offset == UNKNOWN_OFFSET)
    }

    /// What goes without because something is not known.
    #[must_use]
    pub fn losses(&self) -> Vec<&'static str> {
        let Offsets {
            sock_socket,
            socket_file,
            file_flags,
            tcp_rcv_nxt,
            tcp_copied_seq,
            tcp_write_seq,
            tcp_bytes_received,
            sock_shutdown,
            ..
        } = self.offsets;
        let knows = |offsets: &[u32]| !offsets.contains(&UNKNOWN_OFFSET);
        let needs = [
            (knows(&[self.sk_err]), "failed connections are counted without their cause"),
            (self.is_enough_to_steer(), "nothing is steered"),
            (knows(&[sock_socket, socket_file, file_flags]), "`steer = \"auto\"` steers nobody"),
            (
                knows(&[tcp_rcv_nxt, tcp_copied_seq, tcp_write_seq, tcp_bytes_received]),
                "a client stays with the daemon once that has served it",
            ),
            (
                knows(&[sock_shutdown]),
                "a steered client that half-closes waits a while for the end",
            ),
        ];
        needs.into_iter().filter(|(known, _)| !known).map(|(_, loss)| loss).collect()
    }
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

/// The memory of the services' gates.
fn gates(programs: &Ebpf) -> Result<Mapped<gate::Words>, LoadError> {
    let refused = |e| LoadError::refused(format!("the map {}", name::GATES), e);
    let Some(Map::Array(map)) = programs.map(name::GATES) else {
        return Err(refused(MapError::InvalidName { name: name::GATES.to_owned() }));
    };
    Mapped::new(map.fd().as_fd(), SERVICES_MAX).map_err(|e| refused(MapError::IoError(e)))
}

impl Datapath for Kernel {
    fn own(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let state = SocketState { who: Who::Broker as u8, ..SocketState::default() };
        lock(&self.sockets).insert(&socket, state, 0).map_err(io_error)
    }

    fn heartbeat(&self, worker: usize) -> io::Result<()> {
        self.set_heartbeat(worker, gate::monotonic_ns()?)
    }

    fn leave_alone(&self, worker: usize) -> io::Result<()> {
        self.set_heartbeat(worker, 0)
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
    ) -> io::Result<Option<Dialled>> {
        let pair = Pair { client: client.into(), listener: listener.into() };
        match self.original_destinations.get(&pair, 0) {
            Ok(found) => Ok(Some(Dialled { address: found.address.into(), client: found.client })),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(e) => Err(io_error(e)),
        }
    }

    fn new_gate(&self) -> Option<Gate> {
        Gate::new(Arc::clone(&self.gates), self.gates_taken.fetch_add(1, Relaxed))
    }

    fn steering(&self) -> Option<&Arc<Steering>> {
        self.steering.as_ref().ok()
    }

    fn path(&self, origin: SocketAddr) -> Option<Path> {
        self.counters.path(origin)
    }

    fn counters(&self) -> anyhow::Result<KernelCounters> {
        let mut counters = self.counters.read()?;
        match &self.steering {
            Ok(steering) => {
                counters.carried = steering.carried();
                counters.steering.on = true;
            }
            Err(reason) => counters.steering.off_because = Some(reason.clone()),
        }
        Ok(counters)
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
