//! Every map with its capacity, and the constants that the loader sets.

use core::ptr;

use aya_ebpf::Global;
use aya_ebpf::bindings::{BPF_SK_STORAGE_GET_F_CREATE, bpf_sock};
use aya_ebpf::btf_maps::{Array, LpmTrie, LruHashMap, PerCpuArray, SkStorage};
use aya_ebpf::helpers::generated::bpf_sk_storage_get;
use aya_ebpf::macros::btf_map;
use broker_ebpf::abi::{
    Address, Counters, ENDPOINTS_MAX, EndpointCounters, EndpointKey, Listeners,
    ORIGINAL_DESTINATIONS_MAX, Pair, SERVICE_SLOTS, Service, SocketState, TALLY_COUNT, TARGETS_MAX,
    Tally, Target, UNKNOWN_OFFSET, WHO_COUNT, WORKERS_MAX,
};

use crate::atomic;

#[btf_map(name = "broker_sockets")]
static SOCKETS: SkStorage<SocketState> = SkStorage::new();

#[btf_map(name = "broker_endpoint")]
pub static ENDPOINTS: LruHashMap<EndpointKey, EndpointCounters, ENDPOINTS_MAX> = LruHashMap::new();

/// An endpoint's first counters, which are too large for the stack.
#[btf_map(name = "broker_scratch")]
pub static SCRATCH: PerCpuArray<EndpointCounters, 1> = PerCpuArray::new();

#[btf_map(name = "broker_totals")]
pub static TOTALS: Array<Counters, WHO_COUNT> = Array::new();

#[btf_map(name = "broker_tallies")]
static TALLIES: Array<u64, TALLY_COUNT> = Array::new();

#[btf_map(name = "broker_targets")]
pub static TARGETS: LpmTrie<Target, u32, TARGETS_MAX> = LpmTrie::new();

#[btf_map(name = "broker_services")]
pub static SERVICES: Array<Service, SERVICE_SLOTS> = Array::new();

#[btf_map(name = "broker_listener")]
pub static LISTENERS: Array<Listeners, { SERVICE_SLOTS * WORKERS_MAX }> = Array::new();

#[btf_map(name = "broker_beats")]
pub static HEARTBEATS: Array<u64, WORKERS_MAX> = Array::new();

#[btf_map(name = "broker_orig_dst")]
pub static ORIGINAL_DESTINATIONS: LruHashMap<Pair, Address, ORIGINAL_DESTINATIONS_MAX> =
    LruHashMap::new();

#[unsafe(no_mangle)]
pub static SK_ERR_OFFSET: Global<u32> = Global::new(UNKNOWN_OFFSET);

#[unsafe(no_mangle)]
pub static NETNS_COOKIE: Global<u64> = Global::new(0);

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

/// The state kept with a socket, if there is any.
#[inline(always)]
pub fn socket_state<'a>(sk: *mut bpf_sock) -> Option<&'a mut SocketState> {
    storage(sk, 0)
}

/// The state kept with a socket; all zero if there was none. `None` if the socket may not take
/// any more memory.
#[inline(always)]
pub fn socket_state_or_new<'a>(sk: *mut bpf_sock) -> Option<&'a mut SocketState> {
    storage(sk, BPF_SK_STORAGE_GET_F_CREATE.into())
}

#[inline(always)]
fn storage<'a>(sk: *mut bpf_sock, flags: u64) -> Option<&'a mut SocketState> {
    if sk.is_null() {
        return None;
    }
    let map = ptr::from_ref(&SOCKETS).cast_mut().cast();
    // SAFETY: the helper takes a socket that is not null, which the kernel handed to the
    // program; what it returns lives as long as the socket. The hooks that ask for it run under
    // the socket's lock, so there is no other reference.
    unsafe {
        bpf_sk_storage_get(map, sk.cast(), ptr::null_mut(), flags).cast::<SocketState>().as_mut()
    }
}
