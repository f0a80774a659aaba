//! Pools of `route = "dialled"`: one for each address that clients dial, made when it is first
//! dialled and forgotten when it no longer is.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fnv::FnvBuildHasher;

use crate::origin::Chosen;
use crate::pool::Pool;
use crate::stats::ServiceRecords;

/// Makes a pool for the given origins.
type NewPool = Box<dyn Fn(&[Chosen]) -> Rc<Pool>>;

pub(super) struct Dialled {
    origins_max: NonZeroUsize,
    origin_idle: Duration,
    new_pool: NewPool,
    records: Arc<ServiceRecords>,
    pools: RefCell<HashMap<SocketAddr, Entry, FnvBuildHasher>>,
}

struct Entry {
    pool: Rc<Pool>,
    last_dialled: Cell<Instant>,
}

impl Dialled {
    pub(super) fn new(
        origins_max: NonZeroUsize,
        origin_idle: Duration,
        new_pool: NewPool,
        records: Arc<ServiceRecords>,
    ) -> Self {
        Self { origins_max, origin_idle, new_pool, records, pools: RefCell::default() }
    }

    /// The pool of an address.
    pub(super) fn pool(&self, origin: SocketAddr, now: Instant) -> Rc<Pool> {
        if let Some(entry) = self.pools.borrow().get(&origin) {
            entry.last_dialled.set(now);
            return Rc::clone(&entry.pool);
        }
        if self.pools.borrow().len() >= self.origins_max.get() {
            self.forget_longest_idle();
        }
        let pool = (self.new_pool)(&[Chosen::at(origin)]);
        let entry = Entry { pool: Rc::clone(&pool), last_dialled: Cell::new(now) };
        self.pools.borrow_mut().insert(origin, entry);
        pool
    }

    /// Those who are served by the forgotten pool keep it until they are done.
    fn forget_longest_idle(&self) {
        let oldest =
            self.pools.borrow().iter().min_by_key(|(_, e)| e.last_dialled.get()).map(|(&o, _)| o);
        if let Some(origin) = oldest {
            self.forget(origin);
        }
    }

    fn forget(&self, origin: SocketAddr) {
        self.pools.borrow_mut().remove(&origin);
        self.records.forget(origin);
    }

    pub(super) fn tick(&self, now: Instant) {
        let mut idle = Vec::new();
        for (&origin, entry) in &*self.pools.borrow() {
            let since = now.saturating_duration_since(entry.last_dialled.get());
            if since >= self.origin_idle && !entry.pool.is_busy() {
                idle.push(origin);
            } else {
                entry.pool.tick();
            }
        }
        for origin in idle {
            self.forget(origin);
        }
    }

    pub(super) fn drain(&self) {
        for entry in self.pools.borrow().values() {
            entry.pool.drain();
        }
    }
}
