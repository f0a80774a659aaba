//! The values that the daemon and the programs both change.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

use broker_ebpf::abi::{self, BUCKETS};

use super::Lifetime;
use crate::sys::Shared;

/// [`abi::Slot`], as several parties see it at a time.
#[repr(C)]
pub(super) struct Slot {
    pub(super) word: AtomicU64,
    pub(super) cookie: AtomicU64,
    pub(super) started_ns: AtomicU64,
    pub(super) idle_since_ns: AtomicU64,
    pub(super) body_ns: AtomicU64,
    pub(super) remaining: AtomicU32,
    pub(super) exchanges: AtomicU32,
    pub(super) uses_left: AtomicU32,
    pub(super) origin_idle_s: AtomicU32,
    pub(super) request_len: AtomicU32,
    pub(super) worker: AtomicU32,
    pub(super) head_only: AtomicU8,
    pub(super) ended: AtomicU8,
    pub(super) in_step: AtomicU8,
    pub(super) stray: AtomicU8,
    pub(super) next_seq: AtomicU32,
}

const _: () = assert!(size_of::<Slot>() == size_of::<abi::Slot>());

#[expect(unsafe_code, reason = "a statement about its fields")]
// SAFETY: atomics only.
unsafe impl Shared for Slot {}

/// [`abi::Group`], as several parties see it at a time.
#[repr(C)]
pub(super) struct Group {
    pub(super) idle: AtomicU64,
    pub(super) active: AtomicU64,
    pub(super) relay_active: AtomicU64,
    pub(super) eligible: AtomicU64,
    pub(super) wanted: AtomicU64,
    pub(super) weight: AtomicU64,
    pub(super) span: AtomicU64,
    pub(super) missed: AtomicU64,
    pub(super) service: AtomicU64,
    pub(super) completed: AtomicU64,
    pub(super) reused: AtomicU64,
    pub(super) taken_over: AtomicU64,
    pub(super) clients_gone: AtomicU64,
    pub(super) request_bytes: AtomicU64,
    pub(super) response_bytes: AtomicU64,
    pub(super) status: [AtomicU64; 8],
    pub(super) latency_us_sum: AtomicU64,
    pub(super) latency_us: [AtomicU64; BUCKETS],
}

const _: () = assert!(size_of::<Group>() == size_of::<abi::Group>());

#[expect(unsafe_code, reason = "a statement about its fields")]
// SAFETY: atomics only.
unsafe impl Shared for Group {}

/// What the kernel carried for one origin of a worker.
#[derive(Clone, Debug, Default)]
pub struct SteeredOrigin {
    /// Exchanges completed.
    pub completed: u64,
    /// Exchanges begun on a socket that had served another before.
    pub reused: u64,
    /// Exchanges that the daemon took over at the first bytes of their response.
    pub taken_over: u64,
    /// Segments for clients that had left.
    pub clients_gone: u64,
    /// Bytes of requests.
    pub request_bytes: u64,
    /// Bytes of responses.
    pub response_bytes: u64,
    /// Responses by the first digit of their status.
    pub status: [u64; 8],
    /// Times from request to first response byte, in buckets of microseconds.
    pub latency_us: Vec<u64>,
}

impl SteeredOrigin {
    /// Both together.
    #[must_use]
    pub fn plus(mut self, other: &Self) -> Self {
        self.completed += other.completed;
        self.reused += other.reused;
        self.taken_over += other.taken_over;
        self.clients_gone += other.clients_gone;
        self.request_bytes += other.request_bytes;
        self.response_bytes += other.response_bytes;
        self.status.iter_mut().zip(&other.status).for_each(|(sum, n)| *sum += n);
        self.latency_us.resize(BUCKETS, 0);
        self.latency_us.iter_mut().zip(&other.latency_us).for_each(|(sum, n)| *sum += n);
        self
    }
}

impl Slot {
    /// Notes what its socket has been through.
    pub(super) fn set_life(&self, life: &Lifetime) {
        let saturated = |number| u32::try_from(number).unwrap_or(u32::MAX);
        self.exchanges.store(saturated(life.exchanges), Relaxed);
        self.uses_left.store(saturated(life.uses_left), Relaxed);
        let idle_s = life.origin_idle.map_or(0, |idle| idle.as_secs());
        self.origin_idle_s.store(saturated(idle_s), Relaxed);
    }
}

impl Group {
    /// Sets what is counted to zero.
    pub(super) fn forget(&self) {
        let counters = [
            &self.completed,
            &self.reused,
            &self.taken_over,
            &self.clients_gone,
            &self.request_bytes,
            &self.response_bytes,
            &self.latency_us_sum,
        ];
        for counter in counters.into_iter().chain(&self.status).chain(&self.latency_us) {
            counter.store(0, Relaxed);
        }
    }

    pub(super) fn carried(&self) -> SteeredOrigin {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        SteeredOrigin {
            completed: get(&self.completed),
            reused: get(&self.reused),
            taken_over: get(&self.taken_over),
            clients_gone: get(&self.clients_gone),
            request_bytes: get(&self.request_bytes),
            response_bytes: get(&self.response_bytes),
            status: std::array::from_fn(|i| get(&self.status[i])),
            latency_us: self.latency_us.iter().map(get).collect(),
        }
    }
}
