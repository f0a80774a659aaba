//! The seam between the daemon and the kernel.
//!
//! [`Datapath`] is all the daemon knows of its kernel programs; [`kernel`] loads the real ones,
//! [`Inert`] stands in where there are none (a host that only listens, and tests).

pub mod gate;
pub mod kernel;
pub mod steering;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use broker_ebpf::abi::Path;

use self::gate::Gate;
use self::steering::{Carried, Steering};
use crate::config::{Intercept, Steer};

/// What the kernel needs to know to send one service's clients to the broker.
#[derive(Clone, Debug)]
pub struct InterceptedService {
    /// Position of the service in the configuration.
    pub service: u32,
    /// The destinations to rewrite (`"origins"` already resolved to addresses).
    pub targets: Vec<Intercept>,
    /// cgroup v2 ids whose processes are intercepted, and nobody if it is empty; `None` means every
    /// process.
    pub cgroups: Option<Vec<CgroupId>>,
    /// [`InterceptedService::service`] of one that takes the processes of its own cgroups, to which it
    /// must be restricted, in this one's place.
    pub high: Option<u32>,
    /// Whether workers will ask for the [`Datapath::original_destination`] of each client.
    pub keep_destination: bool,
    /// Which clients are steered.
    pub steer: Steer,
    /// Place of its gate, if it may refuse connections.
    pub gate: Option<usize>,
    /// The listeners of each worker, in worker order.
    pub listeners: Vec<WorkerListeners>,
}

/// A cgroup v2 directory as kernel programs see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupId {
    /// Inode number of the directory.
    pub id: u64,
    /// Depth below the root; the root is 0.
    pub level: u32,
}

/// Where one worker takes the intercepted connections of one service.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkerListeners {
    /// Those that it serves at once.
    pub relayed: ListenerSet,
    /// Those that the kernel may serve.
    pub steered: ListenerSet,
}

/// Listeners by who can reach them.
#[derive(Clone, Copy, Debug, Default)]
pub struct ListenerSet {
    /// Port of the listener on 127.0.0.1.
    pub loopback_v4: u16,
    /// Port of the listener on `[::1]`; 0 where IPv6 is not available.
    pub loopback_v6: u16,
    /// Listener for clients in other network namespaces, if any.
    pub netns: Option<SocketAddr>,
}

/// What the kernel has noted of an intercepted connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dialled {
    /// What the client dialled.
    pub address: SocketAddr,
    /// Cookie of the client's socket.
    pub client: u64,
}

/// Kernel services the daemon relies on.
pub trait Datapath: Send + Sync {
    /// Marks a socket as the broker's own, before it connects: it is counted as such and never
    /// intercepted.
    fn own(&self, socket: BorrowedFd<'_>) -> io::Result<()>;

    /// Tells the kernel that this worker is alive. Must be called several times within the
    /// heartbeat's age limit.
    fn heartbeat(&self, worker: usize) -> io::Result<()>;

    /// Has the kernel send nobody to this worker until its next heartbeat.
    fn leave_alone(&self, _worker: usize) -> io::Result<()> {
        Ok(())
    }

    /// Makes `services` the intercepted ones from now on.
    fn intercept(&self, services: &[InterceptedService]) -> anyhow::Result<()>;

    /// What a client dialled before it was sent to `listener`, if the kernel program has noted it;
    /// it does so for as long as the client's socket lives. `client` is the peer address of the accepted socket.
    fn original_destination(
        &self,
        client: SocketAddr,
        listener: SocketAddr,
    ) -> io::Result<Option<Dialled>>;

    /// A gate that no service has yet; `None` if there is none left, or nothing to refuse.
    fn new_gate(&self) -> Option<Gate> {
        None
    }

    /// What steers clients in the kernel, if anything can be.
    fn steering(&self) -> Option<&Arc<Steering>> {
        None
    }

    /// What the broker's own connections to an origin have seen of the way, if anything.
    fn path(&self, _origin: SocketAddr) -> Option<Path> {
        None
    }

    /// What the kernel has counted so far.
    fn counters(&self) -> anyhow::Result<KernelCounters>;
}

/// What the programs have counted since they were loaded.
#[derive(Clone, Debug, Default)]
pub struct KernelCounters {
    /// Per remote endpoint and party; bounded, see `endpoints_evicted`.
    pub endpoints: Vec<Endpoint>,
    /// Endpoints that were pushed out of the bounded map by newer ones.
    pub endpoints_evicted: u64,
    /// Sums over all connections by everybody else, exact even if endpoints were evicted.
    pub totals_others: Outcomes,
    /// The same for the broker's own connections.
    pub totals_broker: Outcomes,
    /// Connections of which only the attempt was counted, and only in the totals: the map of those
    /// under way was full.
    pub not_followed: u64,
    /// Outcomes of the connect hook.
    pub intercept: InterceptCounters,
    /// What was steered.
    pub carried: Carried,
    /// Rare events of steering.
    pub steering: SteeringCounters,
}

/// The counters of one remote endpoint.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// The remote address.
    pub remote: SocketAddr,
    /// Whether these are the broker's own connections.
    pub broker: bool,
    /// The counts.
    pub counters: ConnectionCounters,
}

/// What became of active (outgoing) TCP connections, counted by the `sock_ops` program.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcomes {
    /// SYNs begun: agrees with `ActiveOpens`.
    pub attempted: u64,
    /// Handshakes completed.
    pub established: u64,
    /// Handshakes refused by a RST.
    pub refused: u64,
    /// Handshakes never answered.
    pub timed_out: u64,
    /// Handshakes that failed otherwise (unreachable and the like).
    pub failed_other: u64,
    /// Sockets closed by their application before the handshake ended. The kernel does *not*
    /// count these as `AttemptFails`.
    pub abandoned: u64,
    /// Established connections that have left the ESTABLISHED state.
    pub closed: u64,
    /// Of those, ended by a RST or a time-out while neither end had closed.
    pub reset: u64,
}

/// Active (outgoing) TCP connections to one endpoint.
#[derive(Clone, Debug, Default)]
pub struct ConnectionCounters {
    /// What became of them.
    pub outcomes: Outcomes,
    /// Open right now.
    pub open: u64,
    /// Most that were ever open at once.
    pub open_peak: u64,
    /// Handshake times: bucket `i` counts those of 2^i <= us < 2^(i+1); the first also holds 0.
    pub handshake_us: Vec<u64>,
    /// Times from established until leaving that state, the same buckets in milliseconds.
    pub lifetime_ms: Vec<u64>,
    /// Sum of all handshake times.
    pub handshake_us_sum: u64,
}

/// What became of `connect()` calls to intercepted destinations.
#[derive(Clone, Copy, Debug, Default)]
pub struct InterceptCounters {
    /// Sent to the broker.
    pub rewritten: u64,
    /// Left alone: no worker with a fresh heartbeat.
    pub stale_heartbeat: u64,
    /// Left alone: the client is in another network namespace and no reachable address is set.
    pub other_netns: u64,
    /// Left alone: the client's cgroup is not among the service's.
    pub other_cgroup: u64,
    /// Left alone: the worker has no listener of the destination's address family.
    pub no_listener: u64,
    /// Left alone: the client's socket is bound to a device, so it cannot reach the loopback.
    pub bound_to_device: u64,
}

/// State and rare events of steering.
#[derive(Clone, Debug, Default)]
pub struct SteeringCounters {
    /// Whether clients can be steered.
    pub on: bool,
    /// Why not, if something in the configuration asks for it.
    pub off_because: Option<String>,
    /// Clients that could be steered.
    pub enrolled: u64,
    /// Clients that could not be, because the map was full.
    pub not_enrolled: u64,
    /// Events that found their queue full; the worker noticed by itself, but later.
    pub events_lost: u64,
    /// Bytes on idle origin sockets.
    pub unsolicited: u64,
    /// Responses with more bytes than they had said.
    pub surplus: u64,
    /// Segments that came again with more behind them.
    pub repeated: u64,
    /// Segments that could not be placed among the others, and were dropped.
    pub out_of_step: u64,
}

impl SteeringCounters {
    /// The counts that are not zero.
    #[must_use]
    pub fn by_name(&self) -> BTreeMap<String, u64> {
        let all = [
            ("clients_enrolled", self.enrolled),
            ("clients_not_enrolled", self.not_enrolled),
            ("events_lost", self.events_lost),
            ("unsolicited", self.unsolicited),
            ("surplus", self.surplus),
            ("repeated_segments", self.repeated),
            ("segments_out_of_step", self.out_of_step),
        ];
        all.into_iter().filter(|(_, n)| *n > 0).map(|(name, n)| (name.to_owned(), n)).collect()
    }
}

/// No kernel programs: counts nothing, intercepts nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inert;

impl Datapath for Inert {
    fn own(&self, _socket: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn heartbeat(&self, _worker: usize) -> io::Result<()> {
        Ok(())
    }

    fn intercept(&self, services: &[InterceptedService]) -> anyhow::Result<()> {
        anyhow::ensure!(services.is_empty(), "interception needs the kernel programs");
        Ok(())
    }

    fn original_destination(
        &self,
        _client: SocketAddr,
        _listener: SocketAddr,
    ) -> io::Result<Option<Dialled>> {
        Ok(None)
    }

    fn counters(&self) -> anyhow::Result<KernelCounters> {
        Ok(KernelCounters::default())
    }
}
