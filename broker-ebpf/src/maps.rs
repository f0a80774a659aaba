//! Every map with its capacity, and the constants that the loader sets.

use core::ptr;

use aya_ebpf::Global;
use aya_ebpf::bindings::{BPF_SK_STORAGE_GET_F_CREATE, bpf_sock};
use aya_ebpf::btf_maps::{
    Array, ArrayOfMaps, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf, SkStorage, SockHash,
    SockMap,
};
use aya_ebpf::helpers::generated::{bpf_map_delete_elem, bpf_sk_storage_get};
use aya_ebpf::macros::btf_map;
use broker_ebpf::abi::{
    Address, BUSY, CONNECTIONS_MAX, Client, ConnectionPlace, Dialled, ENDPOINTS_MAX, EVENTS_BYTES,
    EndpointCounters, EndpointKey, Event, EventKind, Gate, Group, HEAD_BYTES_MAX, Listeners,
    ORIGINAL_DESTINATIONS_MAX, Offsets, Outcomes, PATHS_MAX, Pair, Path, REQUEST_BYTES_MAX, Route,
    SERVICE_SLOTS, SERVICES_MAX, STEERED_CLIENTS_MAX, Service, Slot, SocketState, TALLY_COUNT,
    TARGETS_MAX, Tally, Target, UNKNOWN_OFFSET, WHO_COUNT, WHY_COUNT, WORKERS_MAX,
};
use broker_ebpf::scan::{RequestScan, ResponseScan};

use crate::atomic;

#[btf_map(name = "broker_sockets")]
static SOCKETS: SkStorage<SocketState> = SkStorage::new();

#[btf_map(name = "broker_endpoint")]
pub static ENDPOINTS: LruHashMap<EndpointKey, EndpointCounters, ENDPOINTS_MAX> = LruHashMap::new();

/// See [`connections`](crate::connections).
#[btf_map(name = "broker_conns")]
pub static CONNECTIONS: Array<ConnectionPlace, CONNECTIONS_MAX> = Array::new();

/// An endpoint's first counters, which are too large for the stack.
#[btf_map(name = "broker_scratch")]
pub static SCRATCH: PerCpuArray<EndpointCounters, 1> = PerCpuArray::new();

#[btf_map(name = "broker_totals")]
pub static TOTALS: PerCpuArray<Outcomes, WHO_COUNT> = PerCpuArray::new();

#[btf_map(name = "broker_paths")]
pub static PATHS: LruHashMap<Address, Path, PATHS_MAX> = LruHashMap::new();

/// A path's first values, which are too large for the stack. Nothing is ever written to it.
#[btf_map(name = "broker_no_path")]
pub static NO_PATH: PerCpuArray<Path, 1> = PerCpuArray::new();

#[btf_map(name = "broker_tallies")]
static TALLIES: Array<u64, TALLY_COUNT, BPF_F_MMAPABLE> = Array::new();

#[btf_map(name = "broker_targets")]
pub static TARGETS: LpmTrie<Target, u32, TARGETS_MAX> = LpmTrie::new();

#[btf_map(name = "broker_services")]
pub static SERVICES: Array<Service, SERVICE_SLOTS> = Array::new();

#[btf_map(name = "broker_gates")]
pub static GATES: Array<Gate, SERVICES_MAX, BPF_F_MMAPABLE> = Array::new();

#[btf_map(name = "broker_listener")]
pub static LISTENERS: Array<Listeners, { SERVICE_SLOTS * WORKERS_MAX }> = Array::new();

#[btf_map(name = "broker_beats")]
pub static HEARTBEATS: Array<u64, WORKERS_MAX> = Array::new();

#[btf_map(name = "broker_orig_dst")]
pub static ORIGINAL_DESTINATIONS: LruHashMap<Pair, Dialled, ORIGINAL_DESTINATIONS_MAX> =
    LruHashMap::new();

/// Which way a client's requests take.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The kernel's, where a request is plain and an origin socket is free.
    Kernel = 0,
    /// The daemon's, until it has nothing more to do for this client.
    Relay = 1,
}

/// What is kept with a client that may be steered.
///
/// The scan lies here and not on the stack, where the verifier would follow its every state.
#[repr(C)]
pub struct Steered {
    pub cookie: u64,
    /// Index of its route.
    pub route: u32,
    /// The slot that served it last.
    pub slot: u32,
    /// The TCP sequence number of the first byte that it sends over the network.
    pub first_seq: u32,
    /// A [`Way`].
    pub way: u8,
    /// 1 if a slot has served it.
    pub served: u8,
    /// Requests since it was last seen to have read all that was redirected to it.
    pub unseen: u8,
    pub scan: RequestScan,
}

/// Room for the head of a response.
#[repr(C)]
pub struct Head {
    pub bytes: [u8; HEAD_BYTES_MAX],
    pub scan: ResponseScan,
}

#[btf_map(name = "broker_steered")]
static STEERED: SkStorage<Steered> = SkStorage::new();

#[btf_map(name = "broker_clients")]
pub static CLIENT_SOCKETS: SockHash<u64, STEERED_CLIENTS_MAX> = SockHash::new();

#[btf_map(name = "broker_client")]
pub static CLIENTS: HashMap<u64, Client, STEERED_CLIENTS_MAX, BPF_F_NO_PREALLOC> = HashMap::new();

/// The daemon's ends of connections of clients that may be steered, by the client's cookie.
#[btf_map(name = "broker_ends")]
static RELAYING_SOCKETS: SockHash<u64, STEERED_CLIENTS_MAX> = SockHash::new();

/// The cookie of the client at the other end.
#[btf_map(name = "broker_end_of")]
static CLIENT_OF: SkStorage<u64> = SkStorage::new();

// The loader sets the capacity of the maps by slot and by group.

#[btf_map(name = "broker_origins")]
pub static ORIGIN_SOCKETS: SockMap<1> = SockMap::new();

#[btf_map(name = "broker_slot_of")]
pub static ORIGIN_SLOTS: HashMap<u64, u32, 1> = HashMap::new();

#[btf_map(name = "broker_slots")]
pub static SLOTS: Array<Slot, 1, BPF_F_MMAPABLE> = Array::new();

#[btf_map(name = "broker_requests")]
pub static REQUESTS: Array<[u8; REQUEST_BYTES_MAX], 1, BPF_F_MMAPABLE> = Array::new();

#[btf_map(name = "broker_heads")]
pub static HEADS: Array<Head, 1> = Array::new();

#[btf_map(name = "broker_groups")]
pub static GROUPS: Array<Group, 1, BPF_F_MMAPABLE> = Array::new();

#[btf_map(name = "broker_routes")]
pub static ROUTES: Array<Route, { SERVICE_SLOTS * WORKERS_MAX }> = Array::new();

#[btf_map(name = "broker_events")]
static EVENTS: ArrayOfMaps<RingBuf<Event, EVENTS_BYTES>, WORKERS_MAX> = ArrayOfMaps::new();

#[btf_map(name = "broker_why")]
static WHY: Array<u64, { SERVICES_MAX * WHY_COUNT }, BPF_F_MMAPABLE> = Array::new();

const BPF_F_NO_PREALLOC: usize = 1;
const BPF_F_MMAPABLE: usize = 1 << 10;

#[unsafe(no_mangle)]
pub static CONNECTIONS_MASK: Global<u32> = Global::new(0);

#[unsafe(no_mangle)]
pub static GROUP_SLOTS: Global<u32> = Global::new(0);

#[unsafe(no_mangle)]
pub static OFFSETS: Global<Offsets> = Global::new(Offsets::UNKNOWN);

#[unsafe(no_mangle)]
pub static SK_ERR_OFFSET: Global<u32> = Global::new(UNKNOWN_OFFSET);

#[unsafe(no_mangle)]
pub static NETNS_COOKIE: Global<u64> = Global::new(0);

#[unsafe(no_mangle)]
pub static CAN_SET_RETVAL: Global<u32> = Global::new(0);

#[unsafe(no_mangle)]
pub static WORKERS: Global<u32> = Global::new(0);

#[unsafe(no_mangle)]
pub static HEARTBEAT_AGE_MAX_NS: Global<u64> = Global::new(0);

/// Counts an event.
#[inline(always)]
pub fn tally(event: Tally) {
    if let Some(counter) = TALLIES.get_ptr_mut(event as u32) {
        // SAFETY: a value of the map.
        unsafe { atomic::add(counter, 1) };
    }
}

/// Counts a reason against steering.
#[inline(always)]
pub fn tally_why(service: u32, reason: u8) {
    let index = service * WHY_COUNT as u32 + u32::from(reason) % WHY_COUNT as u32;
    if let Some(counter) = WHY.get_ptr_mut(index) {
        // SAFETY: a value of the map.
        unsafe { atomic::add(counter, 1) };
    }
}

/// From now on what this client sends and receives is the daemon's.
#[inline(always)]
pub fn set_busy(client: u64) {
    if let Some(client) = CLIENTS.get_ptr_mut(client) {
        // SAFETY: a value of the map; an aligned word is written whole.
        unsafe { (&raw mut (*client).relayed[0]).write_volatile(BUSY) };
    }
}

/// Takes a client's socket out of the programs' reach.
#[inline(always)]
pub fn leave_map(client: u64) {
    let map = ptr::from_ref(&CLIENT_SOCKETS).cast_mut().cast();
    // SAFETY: the map and a key of its type. The socket may have left before.
    let _absent = unsafe { bpf_map_delete_elem(map, (&raw const client).cast()) };
}

/// Notes which slot serves a client.
#[inline(always)]
pub fn set_slot(client: u64, slot: u32) {
    if let Some(client) = CLIENTS.get_ptr_mut(client) {
        // SAFETY: a value of the map; an aligned word is written whole.
        unsafe { (&raw mut (*client).slot).write_volatile(slot) };
    }
}

/// Tells a worker. It looks for itself now and then, so that a lost event only costs time.
#[inline(always)]
pub fn tell(worker: u32, kind: EventKind, slot: u32, client: u64) {
    let event = Event { client, slot, kind: kind as u32 };
    if EVENTS.get(worker).is_none_or(|queue| queue.output(event, 0).is_err()) {
        tally(Tally::EventLost);
    }
}

/// What is kept with a socket of the broker's own, or an intercepted one.
#[inline(always)]
pub fn socket_state<'a>(sk: *mut bpf_sock) -> Option<&'a mut SocketState> {
    storage(&SOCKETS, sk, 0)
}

/// The state kept with a socket; all zero if there was none. `None` if the socket may not take
/// any more memory.
#[inline(always)]
pub fn socket_state_or_new<'a>(sk: *mut bpf_sock) -> Option<&'a mut SocketState> {
    storage(&SOCKETS, sk, BPF_SK_STORAGE_GET_F_CREATE.into())
}

/// What is kept with a client that may be steered, if it is one.
#[inline(always)]
pub fn steered<'a>(sk: *mut bpf_sock) -> Option<&'a mut Steered> {
    storage(&STEERED, sk, 0)
}

/// The client at the other end of a connection that the daemon has with one that may be steered.
#[inline(always)]
pub fn client_of(sk: *mut bpf_sock) -> Option<u64> {
    storage(&CLIENT_OF, sk, 0).copied()
}

/// The same; all zero if it was none.
#[inline(always)]
pub fn steered_or_new<'a>(sk: *mut bpf_sock) -> Option<&'a mut Steered> {
    storage(&STEERED, sk, BPF_SK_STORAGE_GET_F_CREATE.into())
}

#[inline(always)]
fn storage<'a, T>(map: &SkStorage<T>, sk: *mut bpf_sock, flags: u64) -> Option<&'a mut T> {
    if sk.is_null() {
        return None;
    }
    let map = ptr::from_ref(map).cast_mut().cast();
    // SAFETY: the helper takes a socket that is not null, which the kernel handed to the
    // program; what it returns lives as long as the socket. The hooks that ask for it run under
    // the socket's lock, so there is no other reference.
    unsafe { bpf_sk_storage_get(map, sk.cast(), ptr::null_mut(), flags).cast::<T>().as_mut() }
}
