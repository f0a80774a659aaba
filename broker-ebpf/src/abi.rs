//! What the kernel programs and the daemon share: names, keys and values.
//!
//! Every type is `repr(C)`, has no implicit padding (the kernel compares and copies keys as
//! bytes) and its size is asserted, so that a change on one side cannot pass unnoticed.

use core::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Most workers a daemon can have.
pub const WORKERS_MAX: usize = 64;

/// Most cgroups a service can be restricted to.
pub const SERVICE_CGROUPS_MAX: usize = 8;

/// Most intercepted services.
pub const SERVICES_MAX: usize = 128;

/// Places for services: twice as many, so that a new set is complete before the old one goes.
pub const SERVICE_SLOTS: usize = 2 * SERVICES_MAX;

/// Most intercepted destinations, those of a new and an old set together.
pub const TARGETS_MAX: usize = 8192;

/// Remote endpoints that are counted one by one, unless the loader says otherwise.
pub const ENDPOINTS_MAX: usize = 16384;

/// Places for active connections that are followed, unless the loader says otherwise.
pub const CONNECTIONS_MAX: usize = 1 << 17;

/// Origins to which the ways are watched, for as long as they are the ones used last.
pub const PATHS_MAX: usize = 4096;

/// Intercepted connections whose original destination is kept for the workers.
pub const ORIGINAL_DESTINATIONS_MAX: usize = 65536;

/// Origin sockets of one worker and origin that the programs can use; one bit each in
/// [`Group::idle`].
pub const GROUP_SLOTS_MAX: usize = 64;

/// Clients whose connections may be steered at a time.
pub const STEERED_CLIENTS_MAX: usize = 65536;

/// Longest request that is steered.
pub const REQUEST_BYTES_MAX: usize = 2048;

/// Longest response head that the programs read.
pub const HEAD_BYTES_MAX: usize = 1024;

/// Longest response, head and body, that is steered: redirected bytes know no back-pressure.
pub const RESPONSE_BYTES_MAX: u32 = 64 * 1024;

/// Bytes of a worker's queue of events.
pub const EVENTS_BYTES: usize = 128 * 1024;

/// Places in a row of [`name::WHY`], see [`crate::scan::WhyNot`].
pub const WHY_COUNT: usize = 32;

/// Buckets of a histogram, see [`crate::flow::bucket`].
pub const BUCKETS: usize = 32;

/// Buckets of a finer one, see [`crate::flow::fine_bucket`].
pub const FINE_BUCKETS: usize = 128;

/// `bpf_sock_ops` programs and maps as `bpftool` shows them. The kernel keeps 15 characters.
pub mod name {
    /// Program: counts connections.
    pub const SOCK_OPS: &str = "broker_sockops";
    /// Programs: send connections to the broker.
    pub const CONNECT: [&str; 2] = ["broker_connect4", "broker_connect6"];
    /// Programs: answer with the address that the client dialled.
    pub const GETPEERNAME: [&str; 2] = ["broker_getpeer4", "broker_getpeer6"];

    /// Map: [`SocketState`](super::SocketState) of the broker's own sockets and intercepted ones.
    pub const SOCKETS: &str = "broker_sockets";
    /// Map: [`EndpointKey`](super::EndpointKey) to [`EndpointCounters`](super::EndpointCounters).
    pub const ENDPOINTS: &str = "broker_endpoint";
    /// Map: [`ConnectionPlace`](super::ConnectionPlace)s.
    pub const CONNECTIONS: &str = "broker_conns";
    /// Map: [`Outcomes`](super::Outcomes) of all connections, by CPU and [`Who`](super::Who).
    pub const TOTALS: &str = "broker_totals";
    /// Map: [`Path`](super::Path) by the origin's [`Address`](super::Address).
    pub const PATHS: &str = "broker_paths";
    /// Map: events by [`Tally`](super::Tally).
    pub const TALLIES: &str = "broker_tallies";
    /// Map: prefixes of [`Target`](super::Target) to the slot of their service.
    pub const TARGETS: &str = "broker_targets";
    /// Map: [`Service`](super::Service) by slot.
    pub const SERVICES: &str = "broker_services";
    /// Map: [`Gate`](super::Gate)s of the services that have one.
    pub const GATES: &str = "broker_gates";
    /// Map: [`Listeners`](super::Listeners) by `slot * WORKERS_MAX + worker`.
    pub const LISTENERS: &str = "broker_listener";
    /// Map: last sign of life of each worker, nanoseconds of `CLOCK_MONOTONIC`.
    pub const HEARTBEATS: &str = "broker_beats";
    /// Map: [`Pair`](super::Pair) to what was [`Dialled`](super::Dialled).
    pub const ORIGINAL_DESTINATIONS: &str = "broker_orig_dst";

    /// Program: sends a client's request to an origin.
    pub const REQUEST: &str = "broker_request";
    /// Program: sends an origin's response to its client.
    pub const RESPONSE: &str = "broker_response";
    /// Program: tells whether a client has read all that was redirected to it.
    pub const SETTLED: &str = "broker_settled";
    /// Program: puts what the daemon sends to a client among what is redirected to it.
    pub const RELAYED: &str = "broker_relayed";
    /// Map: sockets of the clients that may be steered, by cookie.
    pub const CLIENT_SOCKETS: &str = "broker_clients";
    /// Map: the daemon's ends of their connections, by the client's cookie.
    pub const RELAYING_SOCKETS: &str = "broker_ends";
    /// Map: the client at the other end of such a connection.
    pub const CLIENT_OF: &str = "broker_end_of";
    /// Map: what the programs keep with a client that may be steered.
    pub const STEERED: &str = "broker_steered";
    /// Map: [`Client`](super::Client) by cookie.
    pub const CLIENTS: &str = "broker_client";
    /// Map: origin sockets that the programs can use, by slot.
    pub const ORIGIN_SOCKETS: &str = "broker_origins";
    /// Map: slot of an origin socket, by cookie.
    pub const ORIGIN_SLOTS: &str = "broker_slot_of";
    /// Map: [`Slot`](super::Slot) by slot.
    pub const SLOTS: &str = "broker_slots";
    /// Map: request under way, by slot.
    pub const REQUESTS: &str = "broker_requests";
    /// Map: room for the head of a response, by slot.
    pub const HEADS: &str = "broker_heads";
    /// Map: [`Group`](super::Group) by group.
    pub const GROUPS: &str = "broker_groups";
    /// Map: [`Route`](super::Route) by `slot of the service * WORKERS_MAX + worker`.
    pub const ROUTES: &str = "broker_routes";
    /// Map: queue of [`Event`](super::Event)s by worker.
    pub const EVENTS: &str = "broker_events";
    /// Map: why requests and responses were not steered, by `service * WHY_COUNT + reason`.
    pub const WHY: &str = "broker_why";
}

/// Constants that the loader sets.
pub mod global {
    /// `u32`: offset of `sk_err` in the kernel's `struct sock`, or
    /// [`UNKNOWN_OFFSET`](super::UNKNOWN_OFFSET).
    pub const SK_ERR_OFFSET: &str = "SK_ERR_OFFSET";
    /// `u64`: cookie of the daemon's network namespace.
    pub const NETNS_COOKIE: &str = "NETNS_COOKIE";
    /// `u32`: how many workers there are.
    pub const WORKERS: &str = "WORKERS";
    /// `u64`: a heartbeat older than this does not count, in nanoseconds.
    pub const HEARTBEAT_AGE_MAX_NS: &str = "HEARTBEAT_AGE_MAX_NS";
    /// `u32`: 1 if programs can choose the error of a refused `connect()` (Linux 5.18).
    pub const CAN_SET_RETVAL: &str = "CAN_SET_RETVAL";
    /// `u32`: places in [`CONNECTIONS`](super::name::CONNECTIONS), a power of two, less one.
    pub const CONNECTIONS_MASK: &str = "CONNECTIONS_MASK";
    /// `u32`: places for origin sockets in each group; 0 means that nothing is steered.
    pub const GROUP_SLOTS: &str = "GROUP_SLOTS";
    /// [`Offsets`](super::Offsets): where the kernel keeps what steering must know.
    pub const OFFSETS: &str = "OFFSETS";
}

/// Stands for an offset that the kernel's type information does not tell.
pub const UNKNOWN_OFFSET: u32 = u32::MAX;

/// An IP address and TCP port; IPv4 as IPv4-mapped IPv6. All in network byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Address {
    /// The IPv6 address, as the kernel hands it to programs.
    pub ip: [u32; 4],
    /// The port.
    pub port: u16,
    /// Padding, always 0.
    pub zero: u16,
}

const _: () = assert!(size_of::<Address>() == 20);

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        let octets = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        Self { ip: words(octets), port: address.port().to_be(), zero: 0 }
    }
}

impl From<Address> for SocketAddr {
    fn from(address: Address) -> Self {
        let mut octets = [0; 16];
        for (four, word) in octets.as_chunks_mut::<4>().0.iter_mut().zip(address.ip) {
            *four = word.to_ne_bytes();
        }
        Self::new(Ipv6Addr::from(octets).to_canonical(), u16::from_be(address.port))
    }
}

/// The four words of an IPv6 address, each in network byte order.
#[must_use]
pub const fn words(octets: [u8; 16]) -> [u32; 4] {
    let (words, _) = octets.as_chunks::<4>();
    [
        u32::from_ne_bytes(words[0]),
        u32::from_ne_bytes(words[1]),
        u32::from_ne_bytes(words[2]),
        u32::from_ne_bytes(words[3]),
    ]
}

/// Whose connections these are.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// Everybody but the broker.
    Others = 0,
    /// The broker's own connections to origins.
    Broker = 1,
}

/// How many parties [`Who`] tells apart.
pub const WHO_COUNT: usize = 2;

/// Where an actively opened connection stands, as far as the counters care.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// SYN sent.
    Connecting = 0,
    /// Established.
    Open = 1,
    /// No longer established, not yet gone.
    Leaving = 2,
}

/// An actively opened connection that is followed.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Whom it is counted for.
    pub endpoint: EndpointKey,
    /// When the phase began, in nanoseconds of `CLOCK_MONOTONIC`.
    pub since_ns: u64,
    /// [`EndpointCounters::created_ns`] of the entry that counted the attempt; 0 if none did.
    pub entry_ns: u64,
    /// A [`Phase`].
    pub phase: u32,
    /// 1 if the socket has a [`SocketState`].
    pub has_state: u32,
}

const _: () = assert!(size_of::<Connection>() == 48);

/// A place for a [`Connection`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionPlace {
    /// Its connection.
    pub connection: Connection,
    /// The cookie of the socket that has it; 0 if none does.
    pub cookie: u64,
}

const _: () = assert!(size_of::<ConnectionPlace>() == 56);

/// Where an intercepted connection stands.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interception {
    /// Not intercepted.
    None = 0,
    /// The destination was rewritten, but TCP has not begun yet.
    Rewritten = 1,
    /// TCP connects, or has connected, to the broker.
    Connected = 2,
}

/// What is kept with a socket of the broker's own, or an intercepted one, for as long as it lives.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketState {
    /// What the client dialled, if intercepted.
    pub dialled: Address,
    /// Where it was sent instead, if intercepted.
    pub listener: Address,
    /// A [`Who`].
    pub who: u8,
    /// An [`Interception`].
    pub interception: u8,
    /// 1 if the destination must be, or is, among the original destinations.
    pub keep_destination: u8,
    /// A [`Steering`].
    pub steering: u8,
    /// Index of the client's [`Route`], if it may be steered.
    pub route: u32,
    /// Segments with data sent that its [`Path`] has heard of; only of the broker's own.
    pub segments: u32,
    /// Those of them that were sent again.
    pub retransmitted: u32,
    /// The sequence number after all that TCP had been given when a segment was last sent; only of
    /// the broker's own.
    pub written: u32,
}

const _: () = assert!(size_of::<SocketState>() == 60);

/// Whether a client may be steered.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steering {
    /// No.
    None = 0,
    /// It was sent to a listener for steered clients, and is not established yet.
    Chosen = 1,
    /// It is known to the programs that steer.
    Enrolled = 2,
}

/// Which clients of a service are steered.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Steer {
    /// None.
    #[default]
    Relay = 0,
    /// Those with a nonblocking socket.
    Auto = 1,
    /// All.
    Kernel = 2,
}

/// Where the kernel keeps what steering must know, in bytes;
/// [`UNKNOWN_OFFSET`] if its type information does not tell.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "structure and member")]
pub struct Offsets {
    pub sock_socket: u32,
    pub socket_file: u32,
    pub file_flags: u32,
    pub sock_user_data: u32,
    pub sock_shutdown: u32,
    pub psock_ingress_skb: u32,
    pub psock_ingress_msg: u32,
    pub skb_head_qlen: u32,
    pub tcp_rcv_nxt: u32,
    pub tcp_copied_seq: u32,
    pub tcp_write_seq: u32,
    pub tcp_bytes_received: u32,
    pub skb_cb: u32,
    pub skb_cb_seq: u32,
    pub skb_cb_ack_seq: u32,
    pub skb_cb_flags: u32,
    pub tcp_snd_up: u32,
}

impl Offsets {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self {
        sock_socket: UNKNOWN_OFFSET,
        socket_file: UNKNOWN_OFFSET,
        file_flags: UNKNOWN_OFFSET,
        sock_user_data: UNKNOWN_OFFSET,
        sock_shutdown: UNKNOWN_OFFSET,
        psock_ingress_skb: UNKNOWN_OFFSET,
        psock_ingress_msg: UNKNOWN_OFFSET,
        skb_head_qlen: UNKNOWN_OFFSET,
        tcp_rcv_nxt: UNKNOWN_OFFSET,
        tcp_copied_seq: UNKNOWN_OFFSET,
        tcp_write_seq: UNKNOWN_OFFSET,
        tcp_bytes_received: UNKNOWN_OFFSET,
        skb_cb: UNKNOWN_OFFSET,
        skb_cb_seq: UNKNOWN_OFFSET,
        skb_cb_ack_seq: UNKNOWN_OFFSET,
        skb_cb_flags: UNKNOWN_OFFSET,
        tcp_snd_up: UNKNOWN_OFFSET,
    };
}

/// A client that may be steered, for the daemon.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Client {
    /// Both ends of its connection.
    pub pair: Pair,
    /// What it dialled.
    pub dialled: Address,
    /// The slot that served it last; [`NO_SLOT`] if none did.
    pub slot: u32,
    /// How many bytes the daemon has sent it and received from it, once all of both are done
    /// with. [`BUSY`] while a request of this client is the daemon's.
    pub relayed: [u64; 2],
    /// Where the kernel keeps its socket.
    pub sk: u64,
}

/// See [`Client::relayed`].
pub const BUSY: u64 = u64::MAX;

/// See [`Client::slot`].
pub const NO_SLOT: u32 = u32::MAX;

const _: () = assert!(size_of::<Client>() == 88);

/// Whether a client has read all that was redirected to it.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// The kernel's type information does not tell where to look.
    Unknown = 0,
    /// No.
    No = 1,
    /// Yes.
    Yes = 2,
    /// The client is gone.
    Gone = 3,
}

/// An origin socket that the programs can use.
///
/// What is not the word belongs to whoever the word says: the claiming program writes it before
/// the request goes out, the response's program after that, the daemon while the socket is its.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// A [`crate::phase::Word`].
    pub word: u64,
    /// The origin socket's cookie.
    pub cookie: u64,
    /// When the request was sent, in nanoseconds of `CLOCK_MONOTONIC`.
    pub started_ns: u64,
    /// When the socket became idle.
    pub idle_since_ns: u64,
    /// When the last request with a body was sent that the programs have sent on it; 0 if none was.
    pub body_ns: u64,
    /// Until the response begins: bytes of the request that TCP has not got yet. Then those of the
    /// response still to come.
    pub remaining: u32,
    /// Exchanges begun in the socket's life.
    pub exchanges: u32,
    /// How many more the socket may serve.
    pub uses_left: u32,
    /// How long the origin keeps idle connections, in seconds; 0 if it has not said.
    pub origin_idle_s: u32,
    /// Bytes of the request, which are in [`name::REQUESTS`]; 0 if they could not be kept.
    pub request_len: u32,
    /// The worker that the socket belongs to.
    pub worker: u32,
    /// 1 if the response has no body whatever its head says.
    pub head_only: u8,
    /// 1 if the origin has ended its side.
    pub ended: u8,
    /// 1 if `next_seq` is known.
    pub in_step: u8,
    /// A [`Stray`].
    pub stray: u8,
    /// The sequence number of the next byte from the origin.
    pub next_seq: u32,
}

const _: () = assert!(size_of::<Slot>() == 72);

/// Bytes that may meet an exchange that they are not of. A socket that has some serves no other.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stray {
    /// There are none.
    None = 0,
    /// The origin may wait for more of a request: TCP has not taken all of it, or the origin has answered a
    /// part.
    Request = 1,
    /// What has come as a response is none: the origin sent it before it had any of the request.
    Response = 2,
    /// The client has sent urgent data, which the origin does not read as a part of the request: it waits
    /// for as much more.
    Urgent = 3,
}

/// The origin sockets of one worker towards one origin.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Slots that are, or just were, idle: a hint, the words decide.
    pub idle: u64,
    /// Exchanges under way in the kernel.
    pub active: u64,
    /// Sockets that the daemon uses or dials.
    pub relay_active: u64,
    /// 1 if the origin may get new exchanges.
    pub eligible: u64,
    /// 1 if the daemon's exchanges wait for a socket: those that become free are theirs.
    pub wanted: u64,
    /// The origin's share of the exchanges, relative to the others'; at least 1.
    pub weight: u64,
    /// In the first group of a [`Route`]: how many of its groups may have an origin. Those behind
    /// are not looked at.
    pub span: u64,
    /// In the first group of a [`Route`]: requests that found no idle socket in any of its groups.
    pub missed: u64,
    /// Position of the service in the configuration.
    pub service: u64,
    /// Exchanges completed in the kernel.
    pub completed: u64,
    /// Exchanges begun on a socket that had served another before.
    pub reused: u64,
    /// Exchanges that the daemon took over at the first bytes of their response.
    pub taken_over: u64,
    /// Clients that left before their response was complete.
    pub clients_gone: u64,
    /// Bytes of requests and responses.
    pub request_bytes: u64,
    /// The same for responses.
    pub response_bytes: u64,
    /// Responses by the first digit of their status.
    pub status: [u64; 8],
    /// Sum of the times from request to first response byte.
    pub latency_us_sum: u64,
    /// The same as a histogram.
    pub latency_us: [u64; BUCKETS],
}

const _: () = assert!(size_of::<Group>() == 8 * (24 + BUCKETS));

/// Where the programs find origin sockets for the clients of one service and worker.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// The first origin's group; the others follow.
    pub first_group: u32,
    /// How many origins it has room for; 0 if nothing is steered. How many there are is in
    /// [`Group::span`].
    pub origins: u32,
    /// Position of the service in the configuration.
    pub service: u32,
    /// The worker.
    pub worker: u32,
    /// A [`Steer`].
    pub steer: u32,
    /// Padding, always 0.
    pub zero: u32,
    /// Clients put among those that may be steered.
    pub enrolled: u64,
    /// The same, lately; see [`crate::flow::pays`].
    pub recently_enrolled: u64,
    /// Requests of theirs that were steered, lately.
    pub recently_steered: u64,
}

const _: () = assert!(size_of::<Route>() == 48);

/// The worker is told to accept each time so many connections have come: they must not fill the
/// listener's queue.
pub const ACCEPT_EVERY: u64 = 256;

/// What a worker must look at.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// The client's socket, if one is concerned.
    pub client: u64,
    /// The slot, if one is concerned.
    pub slot: u32,
    /// An [`EventKind`].
    pub kind: u32,
}

const _: () = assert!(size_of::<Event>() == 16);

impl Event {
    /// Reads one as it lies in a queue; `None` if it is cut off.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (client, rest) = bytes.split_first_chunk()?;
        let (slot, rest) = rest.split_first_chunk()?;
        let (kind, _) = rest.split_first_chunk()?;
        Some(Self {
            client: u64::from_ne_bytes(*client),
            slot: u32::from_ne_bytes(*slot),
            kind: u32::from_ne_bytes(*kind),
        })
    }
}

/// The kinds of [`Event`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The slot's word has become the daemon's business.
    Slot = 0,
    /// The client's requests come to the daemon from now on.
    Client = 1,
    /// Many connections wait to be accepted.
    Accept = 2,
    /// As `Client`, and its socket is better taken out of the map: it has become a blocking one.
    Blocking = 3,
}

/// Key of the counters of one remote endpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct EndpointKey {
    /// The remote end.
    pub remote: Address,
    /// A [`Who`].
    pub who: u32,
}

const _: () = assert!(size_of::<EndpointKey>() == 24);

/// What is counted of actively opened connections; `broker::datapath::Outcomes` explains them.
#[repr(usize)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "explained once, where they are read")]
pub enum Outcome {
    Attempted = 0,
    Established = 1,
    Refused = 2,
    TimedOut = 3,
    FailedOther = 4,
    Abandoned = 5,
    Closed = 6,
    Reset = 7,
}

/// How many outcomes [`Outcome`] names.
pub const OUTCOME_COUNT: usize = 8;

/// How often each [`Outcome`] was seen.
pub type Outcomes = [u64; OUTCOME_COUNT];

/// Counters of actively opened connections; `broker::datapath::ConnectionCounters` explains them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "explained once, where they are read")]
pub struct Counters {
    pub outcomes: Outcomes,
    pub open: u64,
    pub open_peak: u64,
    pub handshake_us_sum: u64,
    pub handshake_us: [u64; BUCKETS],
    pub lifetime_ms: [u64; BUCKETS],
}

const _: () = assert!(size_of::<Counters>() == 8 * (OUTCOME_COUNT + 3 + 2 * BUCKETS));

/// The counters of one remote endpoint.
///
/// All outcomes of a connection are counted where its attempt was: if that entry was evicted,
/// they show in the totals only. So the counters of an entry always agree with each other, and
/// none goes below zero.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EndpointCounters {
    /// When the entry was made; tells it from earlier entries of the same endpoint.
    pub created_ns: u64,
    /// The counts.
    pub counters: Counters,
}

const _: () = assert!(size_of::<EndpointCounters>() == 8 + size_of::<Counters>());

/// The way to an origin, as TCP sees it on the broker's own connections once they are established.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// Segments with data sent.
    pub segments: u64,
    /// Segments sent again.
    pub retransmitted: u64,
    /// The smoothed round-trip time that was noted last.
    pub srtt_us: u64,
    /// All that were noted, as a finer histogram.
    pub rtt_us: [u64; FINE_BUCKETS],
}

impl Path {
    /// Nothing was sent.
    pub const UNUSED: Self =
        Self { segments: 0, retransmitted: 0, srtt_us: 0, rtt_us: [0; FINE_BUCKETS] };
}

const _: () = assert!(size_of::<Path>() == 8 * (3 + FINE_BUCKETS));

/// Of so many segments with data, one has its round-trip time noted.
pub const SEGMENTS_PER_RTT: u32 = 4;

/// Single events that are counted.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tally {
    /// An endpoint got an entry of its own.
    EndpointAdded = 0,
    /// A connection was sent to the broker.
    Rewritten = 1,
    /// Left alone: no worker with a fresh heartbeat.
    StaleHeartbeat = 2,
    /// Left alone: a client in another network namespace, and no listener that it can reach.
    OtherNetns = 3,
    /// Left alone: the client's cgroup is not among the service's.
    OtherCgroup = 4,
    /// Left alone: the worker has no listener of this address family.
    NoListener = 5,
    /// Left alone: the client's socket is bound to a device, so it cannot reach the loopback.
    BoundToDevice = 6,
    /// A client was put among those that may be steered.
    Enrolled = 7,
    /// A client could not be: the map is full.
    NotEnrolled = 8,
    /// An event found its queue full; the worker notices by itself, but later.
    EventLost = 9,
    /// Bytes came on an idle origin socket.
    Unsolicited = 10,
    /// More bytes came than the response had.
    Surplus = 11,
    /// A segment came again with more behind it; what had come before was cut off.
    Repeated = 12,
    /// A segment could not be placed among the others, and was dropped with all after it.
    OutOfStep = 13,
    /// A connection is not followed beyond its attempt: there is no place for it.
    NotFollowed = 14,
}

/// How many events [`Tally`] names.
pub const TALLY_COUNT: usize = 15;

/// A destination, as matched against the intercepted prefixes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// The port, in network byte order.
    pub port: [u8; 2],
    /// 4 or 6: `::/0` does not contain the IPv4-mapped addresses here.
    pub family: u8,
    /// Padding, always 0.
    pub zero: u8,
    /// The IPv6 or IPv4-mapped address.
    pub ip: [u32; 4],
}

const _: () = assert!(size_of::<Target>() == 20);

/// Bits of a [`Target`] before its address.
pub const TARGET_BITS_BEFORE_IP: u32 = 32;

/// All bits of a [`Target`].
pub const TARGET_BITS: u32 = TARGET_BITS_BEFORE_IP + 128;

/// A cgroup that a service is restricted to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cgroup {
    /// Inode number of the directory.
    pub id: u64,
    /// Depth below the root.
    pub level: u32,
    /// Padding, always 0.
    pub zero: u32,
}

const _: () = assert!(size_of::<Cgroup>() == 16);

/// An intercepted service.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// If it is restricted, only processes below one of the first `cgroup_count`.
    pub cgroups: [Cgroup; SERVICE_CGROUPS_MAX],
    /// How many there are; a service may be restricted to cgroups of which none is there.
    pub cgroup_count: u32,
    /// 1 if the workers will ask for the original destinations.
    pub keep_destination: u32,
    /// A [`Steer`].
    pub steer: u32,
    /// Place of its [`Gate`], plus one; 0 if it has none.
    pub gate: u32,
    /// Slot of the service that takes the clients of its own cgroups instead, plus one; 0 if there is
    /// none.
    pub high: u32,
    /// 0 means every process.
    pub restricted: u32,
}

const _: () = assert!(size_of::<Service>() == 16 * SERVICE_CGROUPS_MAX + 24);

/// Whether a service takes connections.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gate {
    /// When it was last said to be closed, in nanoseconds of `CLOCK_MONOTONIC`; 0 if it is open. Counts
    /// for as long as a heartbeat does.
    pub closed_ns: u64,
    /// Connections refused.
    pub refused: u64,
}

const _: () = assert!(size_of::<Gate>() == 16);

/// Where one worker takes the connections of one service.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Listeners {
    /// Connections that the daemon serves at once.
    pub relayed: ListenerSet,
    /// Connections that it leaves in the queue because the kernel may serve them.
    pub steered: ListenerSet,
}

const _: () = assert!(size_of::<Listeners>() == 48);

/// Listeners by who can reach them. Ports in network byte order, 0 if there is no such listener.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListenerSet {
    /// Port on 127.0.0.1.
    pub loopback_v4: u16,
    /// Port on `[::1]`.
    pub loopback_v6: u16,
    /// For clients in other network namespaces.
    pub netns: Address,
}

const _: () = assert!(size_of::<ListenerSet>() == 24);

/// Both ends of an intercepted connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pair {
    /// The client's end.
    pub client: Address,
    /// The broker's listener.
    pub listener: Address,
}

const _: () = assert!(size_of::<Pair>() == 40);

/// Where a connection was to go, and whose it is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialled {
    /// What the client dialled.
    pub address: Address,
    /// Padding, always 0.
    pub zero: u32,
    /// Cookie of the client's socket.
    pub client: u64,
}

const _: () = assert!(size_of::<Dialled>() == 32);

#[cfg(feature = "user")]
mod user {
    #![expect(unsafe_code, reason = "aya::Pod is an unsafe trait")]

    use super::{
        Address, Cgroup, Client, Dialled, EndpointCounters, EndpointKey, Event, Group, Listeners,
        Offsets, Pair, Path, Route, Service, Slot, SocketState, Target,
    };

    macro_rules! pod {
        ($($type:ty),+) => {
            // SAFETY: integers and arrays of integers only, `repr(C)` without padding (sizes are
            // asserted above), so every bit pattern is valid and every byte is initialised.
            $(unsafe impl aya::Pod for $type {})+
        };
    }
    pod!(
        Address,
        Cgroup,
        Client,
        Dialled,
        EndpointCounters,
        EndpointKey,
        Event,
        Group,
        Listeners,
        Offsets,
        Pair,
        Path,
        Route,
        Service,
        Slot,
        SocketState,
        Target
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_round_trip_and_ipv4_is_canonical() {
        for (text, canonical) in [
            ("10.1.2.3:80", "10.1.2.3:80"),
            ("[::ffff:10.1.2.3]:80", "10.1.2.3:80"),
            ("[2001:db8::1]:65535", "[2001:db8::1]:65535"),
            ("0.0.0.0:0", "0.0.0.0:0"),
            ("[::]:0", "[::]:0"),
        ] {
            let address: SocketAddr = text.parse().unwrap();
            let canonical: SocketAddr = canonical.parse().unwrap();
            assert_eq!(SocketAddr::from(Address::from(address)), canonical, "{text}");
        }
    }

    #[test]
    fn addresses_lie_in_network_byte_order() {
        let address = Address::from("1.2.3.4:258".parse::<SocketAddr>().unwrap());
        assert_eq!(address.ip[2].to_ne_bytes(), [0, 0, 0xff, 0xff]);
        assert_eq!(address.ip[3].to_ne_bytes(), [1, 2, 3, 4]);
        assert_eq!(address.port.to_ne_bytes(), [1, 2]);
    }

    #[test]
    fn events_are_read_as_they_lie_in_memory() {
        let mut bytes = 7_u64.to_ne_bytes().to_vec();
        bytes.extend(5_u32.to_ne_bytes());
        bytes.extend((EventKind::Blocking as u32).to_ne_bytes());
        let event = Event { client: 7, slot: 5, kind: EventKind::Blocking as u32 };
        assert_eq!(Event::from_bytes(&bytes), Some(event));
        assert_eq!(Event::from_bytes(&bytes[..15]), None);
    }

    #[test]
    fn the_kernel_keeps_names_whole() {
        let names = [
            &[name::SOCK_OPS, name::SOCKETS, name::ENDPOINTS, name::TOTALS, name::TALLIES][..],
            &[name::CONNECTIONS],
            &[name::TARGETS, name::SERVICES, name::LISTENERS, name::HEARTBEATS],
            &[name::ORIGINAL_DESTINATIONS, name::REQUEST, name::RESPONSE, name::CLIENT_SOCKETS],
            &[name::SETTLED, name::CLIENTS, name::ORIGIN_SOCKETS, name::ORIGIN_SLOTS, name::SLOTS],
            &[name::REQUESTS, name::HEADS, name::GROUPS, name::ROUTES, name::EVENTS, name::WHY],
            &[name::RELAYED, name::RELAYING_SOCKETS, name::CLIENT_OF, name::STEERED, name::PATHS],
            &name::CONNECT,
            &name::GETPEERNAME,
        ];
        for name in names.concat() {
            assert!(name.len() <= 15, "{name}");
        }
    }
}
