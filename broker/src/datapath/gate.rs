//! Whether a service takes connections, as its workers tell the connect hook.
//!
//! A closed gate is a time, not a flag: it has to be said again and again, and is forgotten with the
//! heartbeat if nobody says so any more. (If the daemon ends, so do the programs.)

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use broker_ebpf::abi;
use nix::time::{ClockId, clock_gettime};

use crate::sys::Mapped;

/// One gate in memory, laid out as [`abi::Gate`].
pub(super) type Words = [AtomicU64; 2];

const _: () = assert!(size_of::<Words>() == size_of::<abi::Gate>());

const CLOSED_NS: usize = 0;
const REFUSED: usize = 1;

/// The gate of one service.
#[derive(Clone)]
pub struct Gate {
    gates: Arc<Mapped<Words>>,
    index: usize,
}

impl Gate {
    /// The gate at a place of the map; `None` beyond its end.
    pub(super) fn new(gates: Arc<Mapped<Words>>, index: usize) -> Option<Self> {
        gates.get(index)?;
        Some(Self { gates, index })
    }

    /// Its place in the map.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Closes the gate, for as long as a heartbeat is good for, or opens it.
    pub fn set_closed(&self, closed: bool) {
        let Some(words) = self.gates.get(self.index) else { return };
        if closed {
            // Without a clock it stays open.
            words[CLOSED_NS].store(monotonic_ns().unwrap_or(0), Relaxed);
        } else if words[CLOSED_NS].load(Relaxed) != 0 {
            words[CLOSED_NS].store(0, Relaxed);
        }
    }

    /// How many connections were refused at it.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.gates.get(self.index).map_or(0, |words| words[REFUSED].load(Relaxed))
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Gate").field(&self.index).finish()
    }
}

/// The clock that programs read.
pub(super) fn monotonic_ns() -> io::Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)?;
    Ok(u64::try_from(Duration::from(now).as_nanos()).unwrap_or(u64::MAX))
}
