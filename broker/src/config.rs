//! The validated configuration: whatever is reachable from a [`Config`] obeys the rules.
//!
//! [`mod@file`] is its serde mirror: it parses TOML, applies defaults and names key, value and rule
//! when something is wrong. Nothing else in the daemon looks at raw configuration.

pub mod discovery;
pub mod effective;
pub mod file;
pub mod gateway;
pub mod health;
pub mod outlier;
pub mod retries;
pub mod subset;
pub mod tls;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

use crate::events::Target;

/// Where the daemon answers, unless told otherwise.
pub const ADMIN_SOCKET: &str = "/run/broker/admin.sock";

/// Everything the daemon needs to run.
#[derive(Clone, Debug)]
pub struct Config {
    /// Event loops, each with its own pools. Default: the CPUs this process may use, at most
    /// [`broker_ebpf::abi::WORKERS_MAX`].
    pub workers: NonZeroUsize,
    /// Unix socket that serves the statistics snapshot.
    pub admin_socket: PathBuf,
    /// Host address that clients in other network namespaces can reach; without it they are left
    /// alone (and counted).
    pub intercept_from_netns: Option<IpAddr>,
    /// A worker whose last heartbeat is older than this gets no more intercepted connections.
    pub heartbeat_age_max: Duration,
    /// How long leases may finish after a stop was asked for.
    pub drain_timeout: Duration,
    /// Where events are written.
    pub event_log: Target,
    /// Which gateway of its fleet this daemon is.
    pub gateway: gateway::Gateway,
    /// The brokered services, in the order of the file, then their high priorities. Names are unique.
    pub services: Vec<Service>,
}

/// One brokered service: what clients dial, and where it goes.
#[derive(Clone, Debug)]
pub struct Service {
    /// Unique name, as shown in statistics.
    pub name: String,
    /// Position of the service whose clients of high priority these are: it has the same origins, of
    /// which it knows the same, and connections, limits and retries of its own.
    pub high_of: Option<usize>,
    /// Addresses with a listener of this service's own.
    pub listen: Vec<SocketAddr>,
    /// Destinations whose `connect()` is rewritten to the broker, on this host.
    pub intercept: Vec<Intercept>,
    /// Whether the addresses of the members that [`Service::discovery`] finds are such destinations,
    /// too, for as long as they are members.
    pub intercept_members: bool,
    /// Only processes under these cgroup v2 directories are intercepted; empty means all. At most
    /// [`broker_ebpf::abi::SERVICE_CGROUPS_MAX`], relative to the cgroup2 mount (`/system.slice/x`).
    pub cgroups: Vec<PathBuf>,
    /// Whether [`Service::cgroups`] alone make a client one of high priority: it dials what
    /// [`Service::high_of`] intercepts, which is [`Service::intercept`] here, too.
    pub by_cgroup: bool,
    /// The contract for reuse.
    pub protocol: Protocol,
    /// Which origin a connection goes to.
    pub route: Route,
    /// Which clients are steered in the kernel. Only intercepted http1 clients of a balanced
    /// service without affinity are; for others this is [`Steer::Relay`].
    pub steer: Steer,
    /// Static origins; empty only for [`Route::Dialled`] and with [`Service::discovery`]. No
    /// duplicates.
    pub origins: Vec<SocketAddr>,
    /// Where members come from, if they are not [`Service::origins`]; only for
    /// [`Route::Balance`].
    pub discovery: Option<discovery::Discovery>,
    /// Which of the members this gateway uses; `None` for all. Only for [`Route::Balance`].
    pub subset: Option<subset::Subset>,
    /// How origins are checked, if they are; only for [`Route::Balance`].
    pub health_check: Option<health::HealthCheck>,
    /// Pool settings, per worker and origin.
    pub pool: PoolConfig,
    /// What there may be of everything, of all workers together.
    pub limits: Limits,
    /// When a request is tried on another socket.
    pub retries: retries::Retries,
    /// Time limits of clients and exchanges.
    pub timeouts: Timeouts,
    /// When an origin is left out for a while; `None`: never. Only for [`Route::Balance`].
    pub outlier: Option<outlier::Outlier>,
    /// What happens when too few origins are left.
    pub panic: outlier::Panic,
}

impl Service {
    /// Whether the kernel sends it clients that dial something else.
    #[must_use]
    pub fn intercepts(&self) -> bool {
        !self.intercept.is_empty() || self.intercept_members
    }
}

/// A destination of clients that the kernel sends to the broker instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Intercept {
    /// The addresses; a single address is a full-length prefix. An IPv4 prefix also matches the
    /// IPv4-mapped IPv6 destinations in it.
    pub net: IpNet,
    /// The TCP port.
    pub port: u16,
}

impl Intercept {
    /// This one address.
    #[must_use]
    pub fn at(address: SocketAddr) -> Self {
        Self { net: IpNet::from(address.ip()), port: address.port() }
    }
}

impl fmt::Display for Intercept {
    /// As the configuration file writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let port = self.port;
        let single = self.net.prefix_len() == self.net.max_prefix_len();
        match self.net {
            IpNet::V4(net) if single => write!(f, "{}:{port}", net.addr()),
            IpNet::V6(net) if single => write!(f, "[{}]:{port}", net.addr()),
            IpNet::V4(net) => write!(f, "{net}:{port}"),
            IpNet::V6(net) => write!(f, "[{net}]:{port}"),
        }
    }
}

/// What the bytes of a service mean, and so when an origin socket may be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.x: sockets are reused between exchanges.
    Http1 {
        /// Whether a keep-alive client keeps one origin socket for all its exchanges.
        affinity: Affinity,
    },
    /// Unknown bytes: one (pre-warmed) origin socket for each client connection.
    Opaque {
        /// Whether a socket may serve another client afterwards.
        reuse: OpaqueReuse,
    },
}

/// How long a keep-alive http1 client holds its origin socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Affinity {
    /// Until the exchange ends: many idle clients share few sockets.
    #[default]
    Exchange,
    /// Until the client's connection ends.
    Connection,
}

/// Whether an opaque socket may be reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OpaqueReuse {
    /// Never.
    #[default]
    Never,
    /// The operator promises a simple request/response protocol: reuse if the last bytes flowed
    /// from origin to client, the client closed cleanly, both queues are empty and the socket
    /// stays silent for `settle`.
    Quiet {
        /// How long the socket must stay silent.
        settle: Duration,
    },
}

/// Which clients of a service the kernel serves by itself where it can.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Steer {
    /// Those whose socket is nonblocking when they connect and send.
    #[default]
    Auto,
    /// All. A blocking client must expect `EAGAIN` when a signal interrupts it.
    Kernel,
    /// None: the daemon relays all bytes.
    Relay,
}

/// Which origin a client's connection goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The best origin of the service.
    Balance,
    /// The very address that the client dialled, only pooled. Origins are discovered as they are
    /// dialled.
    Dialled {
        /// Most origins remembered per worker; the longest idle one is forgotten first.
        origins_max: NonZeroUsize,
        /// An origin not dialled for this long is forgotten and its idle sockets are closed.
        origin_idle: Duration,
    },
}

/// Pool settings; each holds for one worker and one origin.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Sockets opened before any request needs them. What ends idle is replaced unless nobody has
    /// needed it for a while ([`crate::pool::ready`]).
    pub prewarm: usize,
    /// Most idle sockets; 0 disables reuse.
    pub max_idle: usize,
    /// An idle socket older than this is closed.
    pub idle_ttl: Duration,
    /// A socket older than this is not used again.
    pub max_lifetime: Duration,
    /// A socket that served this many exchanges is not used again.
    pub max_requests: u64,
    /// Longest wait for a socket.
    pub queue_timeout: Duration,
    /// Sockets per second that are opened for origins that have come later, until each has
    /// [`PoolConfig::prewarm`]; per worker and service.
    pub prewarm_rate: u32,
    /// Longest TCP handshake with an origin.
    pub connect_timeout: Duration,
    /// Most handshakes under way at once.
    pub max_dials: usize,
    /// First pause after a failed dial; doubles with each further failure, with jitter.
    pub backoff_base: Duration,
    /// Longest pause after failed dials. While no origin is reachable, clients wait that long at
    /// most for the next try.
    pub backoff_max: Duration,
    /// TCP keepalive of origin sockets; `None` turns it off.
    pub keepalive: Option<Keepalive>,
}

/// How much of everything a service may have, all workers together. The names, and most defaults,
/// are those of Envoy's circuit breakers (`config.cluster.v3.CircuitBreakers`).
#[derive(Clone, Debug)]
pub struct Limits {
    /// Most connections to origins: being dialled, idle and in use. Further exchanges wait.
    pub max_connections: usize,
    /// The same for each origin; `None` for no limit of its own.
    pub max_connections_per_origin: Option<usize>,
    /// An origin that has no connection may get one even then, if an exchange waits for one.
    pub one_connection_per_origin: bool,
    /// Most exchanges (opaque: clients) waiting for a connection; more are refused.
    pub max_pending: usize,
    /// Most exchanges under way; more are refused. Only http1 has exchanges.
    pub max_requests: usize,
    /// How clients hear that neither a connection nor a place in the queue is left.
    pub refuse: Refuse,
}

/// How clients are refused when there are as many connections and waiting exchanges as allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Refuse {
    /// By a response; opaque clients by a reset.
    #[default]
    Response,
    /// Intercepted ones earlier: their `connect()` fails.
    Connect,
}

/// Whether a listener on `wide` is one on all addresses of the kind of `narrow`.
pub(crate) fn covers(wide: IpAddr, narrow: IpAddr) -> bool {
    wide.is_unspecified() && (wide.is_ipv6() || narrow.is_ipv4())
}

/// TCP keepalive, see `tcp(7)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Idle time before the first probe.
    pub idle: Duration,
    /// Time between probes.
    pub interval: Duration,
    /// Unanswered probes until the socket is given up.
    pub count: u32,
}

/// Time limits towards clients and within exchanges.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// A client connection with no exchange under way for this long is closed.
    pub client_idle: Duration,
    /// A client that neither sends the rest of its request nor takes its response for this long
    /// is dropped, and the lease with it.
    pub client_stall: Duration,
    /// An origin that owes response bytes for this long is given up.
    pub origin_stall: Duration,
    /// A tunnel (opaque, upgraded) with no bytes in either direction for this long is closed.
    pub tunnel_idle: Duration,
}
