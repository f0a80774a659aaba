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

/// Intercepted connections whose original destination is kept for the workers.
pub const ORIGINAL_DESTINATIONS_MAX: usize = 65536;

/// Buckets of a histogram, see [`crate::flow::bucket`].
pub const BUCKETS: usize = 32;

/// `bpf_sock_ops` programs and maps as `bpftool` shows them. The kernel keeps 15 characters.
pub mod name {
    /// Program: counts connections.
    pub const SOCK_OPS: &str = "broker_sockops";
    /// Programs: send connections to the broker.
    pub const CONNECT: [&str; 2] = ["broker_connect4", "broker_connect6"];
    /// Programs: answer with the address that the client dialled.
    pub const GETPEERNAME: [&str; 2] = ["broker_getpeer4", "broker_getpeer6"];

    /// Map: [`SocketState`](super::SocketState) of each socket the programs have met.
    pub const SOCKETS: &str = "broker_sockets";
    /// Map: [`EndpointKey`](super::EndpointKey) to [`EndpointCounters`](super::EndpointCounters).
    pub const ENDPOINTS: &str = "broker_endpoint";
    /// Map: [`Counters`](super::Counters) of all connections, by [`Who`](super::Who).
    pub const TOTALS: &str = "broker_totals";
    /// Map: events by [`Tally`](super::Tally).
    pub const TALLIES: &str = "broker_tallies";
    /// Map: prefixes of [`Target`](super::Target) to the slot of their service.
    pub const TARGETS: &str = "broker_targets";
    /// Map: [`Service`](super::Service) by slot.
    pub const SERVICES: &str = "broker_services";
    /// Map: [`Listeners`](super::Listeners) by `slot * WORKERS_MAX + worker`.
    pub const LISTENERS: &str = "broker_listener";
    /// Map: last sign of life of each worker, nanoseconds of `CLOCK_MONOTONIC`.
    pub const HEARTBEATS: &str = "broker_beats";
    /// Map: [`Pair`](super::Pair) to the [`Address`](super::Address) that was dialled.
    pub const ORIGINAL_DESTINATIONS: &str = "broker_orig_dst";
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
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// No connection (any more).
    None = 0,
    /// SYN sent.
    Connecting = 1,
    /// Established.
    Open = 2,
    /// No longer established, not yet gone.
    Leaving = 3,
}

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

/// What the programs keep with a socket, for as long as it lives.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketState {
    /// When the phase began, in nanoseconds of `CLOCK_MONOTONIC`.
    pub since_ns: u64,
    /// [`EndpointCounters::created_ns`] of the entry that counted the attempt; 0 if none did.
    pub entry_ns: u64,
    /// The remote end as TCP sees it.
    pub remote: Address,
    /// What the client dialled, if intercepted.
    pub dialled: Address,
    /// Where it was sent instead, if intercepted.
    pub listener: Address,
    /// A [`Who`].
    pub who: u8,
    /// A [`Phase`].
    pub phase: u8,
    /// An [`Interception`].
    pub interception: u8,
    /// 1 if the destination must be, or is, among the original destinations.
    pub keep_destination: u8,
}

const _: () = assert!(size_of::<SocketState>() == 80);

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

/// Counters of actively opened connections; `broker::datapath::ConnectionCounters` explains them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "explained once, where they are read")]
pub struct Counters {
    pub attempted: u64,
    pub established: u64,
    pub refused: u64,
    pub timed_out: u64,
    pub failed_other: u64,
    pub abandoned: u64,
    pub closed: u64,
    pub reset: u64,
    pub open: u64,
    pub open_peak: u64,
    pub handshake_us_sum: u64,
    pub handshake_us: [u64; BUCKETS],
    pub lifetime_ms: [u64; BUCKETS],
}

const _: () = assert!(size_of::<Counters>() == 8 * (11 + 2 * BUCKETS));

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
}

/// How many events [`Tally`] names.
pub const TALLY_COUNT: usize = 7;

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
    /// Only processes below one of the first `cgroup_count`.
    pub cgroups: [Cgroup; SERVICE_CGROUPS_MAX],
    /// 0 means every process.
    pub cgroup_count: u32,
    /// 1 if the workers will ask for the original destinations.
    pub keep_destination: u32,
}

const _: () = assert!(size_of::<Service>() == 16 * SERVICE_CGROUPS_MAX + 8);

/// Where one worker takes the connections of one service. Ports in network byte order, 0 if
/// there is no such listener.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Listeners {
    /// Port on 127.0.0.1.
    pub loopback_v4: u16,
    /// Port on `[::1]`.
    pub loopback_v6: u16,
    /// For clients in other network namespaces.
    pub netns: Address,
}

const _: () = assert!(size_of::<Listeners>() == 24);

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

#[cfg(feature = "user")]
mod user {
    #![expect(unsafe_code, reason = "aya::Pod is an unsafe trait")]

    use super::{
        Address, Cgroup, Counters, EndpointCounters, EndpointKey, Listeners, Pair, Service,
        SocketState, Target,
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
        Counters,
        EndpointCounters,
        EndpointKey,
        Listeners,
        Pair,
        Service,
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
    fn the_kernel_keeps_names_whole() {
        let names = [
            &[name::SOCK_OPS, name::SOCKETS, name::ENDPOINTS, name::TOTALS, name::TALLIES][..],
            &[name::TARGETS, name::SERVICES, name::LISTENERS, name::HEARTBEATS],
            &[name::ORIGINAL_DESTINATIONS],
            &name::CONNECT,
            &name::GETPEERNAME,
        ];
        for name in names.concat() {
            assert!(name.len() <= 15, "{name}");
        }
    }
}
