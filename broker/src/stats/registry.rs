//! Where workers leave their metrics for whoever takes a snapshot.
//!
//! A worker keeps `Arc`s to its own metrics and counts without a lock. The locks in here are taken
//! when an origin appears or disappears, and when somebody asks for a snapshot; never for an
//! exchange.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::snapshot::{OriginSnapshot, OriginTotals, ServiceSnapshot};
use super::{OriginMetrics, ServiceMetrics};
use crate::config::{Config, Protocol};
use crate::datapath::steering::{Carried, SteeredOrigin};

/// The metrics of all services and workers.
#[derive(Debug)]
pub struct Registry {
    services: Vec<Registered>,
    moves: Arc<Moves>,
}

/// How often something is read anew because counts were moved meanwhile. Lists change a few times a second
/// at most, and a look takes milliseconds.
const LOOKS_MAX: usize = 10;

/// Moves of counts from one place to another: who looks in between finds them in neither, or in both.
#[derive(Debug, Default)]
struct Moves {
    begun: AtomicU64,
    ended: AtomicU64,
}

#[derive(Debug)]
struct Registered {
    name: String,
    /// Whose origins it has.
    high_of: Option<usize>,
    protocol: &'static str,
    /// The configured origins; they are listed first, in this order, and even if nobody has
    /// touched them yet.
    origins: Vec<SocketAddr>,
    workers: Mutex<Vec<Arc<ServiceRecords>>>,
    left: Arc<Mutex<Left>>,
}

/// The metrics of one service in one worker.
#[derive(Debug, Default)]
pub struct ServiceRecords {
    /// The service's own.
    pub metrics: Arc<ServiceMetrics>,
    origins: Mutex<Origins>,
    left: Arc<Mutex<Left>>,
    moves: Arc<Moves>,
}

#[derive(Debug, Default)]
struct Origins {
    live: BTreeMap<SocketAddr, Arc<OriginMetrics>>,
    /// Forgotten, but sockets that are still open hold on to them and may count.
    leaving: Vec<(SocketAddr, Arc<OriginMetrics>)>,
}

/// What was counted by workers that have forgotten an origin; of one service.
///
/// Each worker does so at its own time. As long as any of them counts on, the origin keeps what it had:
/// else its numbers would go back, step by step.
#[derive(Debug, Default)]
struct Left {
    /// Origins that somebody still counts for.
    origins: HashMap<SocketAddr, Leaving>,
    /// The sum over the others.
    forgotten: OriginTotals,
}

#[derive(Debug, Default)]
struct Leaving {
    /// How many metrics there are.
    counting: usize,
    /// What those that are gone had counted.
    counted: OriginTotals,
}

impl Left {
    fn forget(&mut self, address: SocketAddr, metrics: &OriginMetrics) {
        let Some(leaving) = self.origins.get_mut(&address) else { return };
        leaving.counted.add(metrics);
        leaving.counting -= 1;
        if leaving.counting == 0
            && let Some(last) = self.origins.remove(&address)
        {
            self.forgotten.merge(&last.counted);
        }
    }
}

impl ServiceRecords {
    /// The metrics of an origin, made when it appears for the first time. Keep the `Arc`.
    #[must_use]
    pub fn origin(&self, address: SocketAddr) -> Arc<OriginMetrics> {
        let mut origins = lock(&self.origins);
        let metrics = origins.live.entry(address).or_insert_with(|| {
            lock(&self.left).origins.entry(address).or_default().counting += 1;
            Arc::default()
        });
        Arc::clone(metrics)
    }

    /// Moves counts from one place to another.
    pub fn moving(&self, counts: impl FnOnce()) {
        self.moves.begun.fetch_add(1, SeqCst);
        counts();
        self.moves.ended.fetch_add(1, SeqCst);
    }

    /// Keeps what the kernel has carried to an origin that leaves. Part of a [move](Self::moving).
    pub fn keep_carried(&self, origin: &OriginMetrics, carried: &SteeredOrigin) {
        origin.reused.add(carried.reused);
        origin.returned.add(carried.completed);
        for (kept, carried) in origin.steered_status.iter().zip(carried.status) {
            kept.add(carried);
        }
        self.metrics.exchanges.add(carried.completed);
        self.metrics.steered.add(carried.completed);
        self.metrics.request_bytes.add(carried.request_bytes);
        self.metrics.response_bytes.add(carried.response_bytes);
    }

    /// Takes an origin out of the list; what it counted stays in the service's totals.
    pub fn forget(&self, address: SocketAddr) {
        let mut origins = lock(&self.origins);
        if let Some(metrics) = origins.live.remove(&address) {
            origins.leaving.push((address, metrics));
        }
        origins.settle(&self.left);
    }
}

impl Origins {
    /// Folds those that nobody can count on any more.
    fn settle(&mut self, left: &Mutex<Left>) {
        self.leaving.retain(|(address, metrics)| {
            let held = Arc::strong_count(metrics) > 1;
            if !held {
                lock(left).forget(*address, metrics);
            }
            held
        });
    }
}

impl Registry {
    /// A registry for the services of a configuration.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let services = config.services.iter().map(|service| Registered {
            name: service.name.clone(),
            high_of: service.high_of,
            protocol: match service.protocol {
                Protocol::Http1 { .. } => "http1",
                Protocol::Opaque { .. } => "opaque",
            },
            // Of a subset only those that are used are shown.
            origins: match service.subset {
                None => service.origins.clone(),
                Some(_) => Vec::new(),
            },
            workers: Mutex::default(),
            left: Arc::default(),
        });
        Self { services: services.collect(), moves: Arc::default() }
    }

    /// Metrics for one worker's part of a service; each worker calls this once per service.
    ///
    /// # Panics
    /// If `service` is not a position in the configuration.
    #[must_use]
    pub fn register(&self, service: usize) -> Arc<ServiceRecords> {
        let left = Arc::clone(&self.services[service].left);
        let moves = Arc::clone(&self.moves);
        let records = Arc::new(ServiceRecords { left, moves, ..ServiceRecords::default() });
        lock(&self.services[service].workers).push(Arc::clone(&records));
        records
    }

    /// The origins of a service that no worker can connect to, for clients of any priority.
    ///
    /// # Panics
    /// If `service` is not a position in the configuration.
    #[must_use]
    pub fn failing(&self, service: usize) -> HashSet<SocketAddr> {
        let mut works: HashMap<SocketAddr, bool> = HashMap::new();
        let high = self.services.iter().filter(|high| high.high_of == Some(service));
        let services = std::iter::once(&self.services[service]).chain(high);
        for worker in services.flat_map(|service| lock(&service.workers).clone()) {
            for (address, metrics) in &lock(&worker.origins).live {
                *works.entry(*address).or_default() |= metrics.failing.get() == 0;
            }
        }
        works.into_iter().filter(|(_, works)| !works).map(|(address, _)| address).collect()
    }

    /// What `read` finds while no counts are moved, as far as that can be had: counters that are read at
    /// different moments must not go back.
    pub fn undisturbed<T>(&self, read: impl Fn() -> T) -> T {
        let mut looks = 1;
        loop {
            let ended = self.moves.ended.load(SeqCst);
            let found = read();
            if self.moves.begun.load(SeqCst) == ended || looks == LOOKS_MAX {
                return found;
            }
            looks += 1;
        }
    }

    /// All services, each summed over the workers, with what the kernel carried for them.
    #[must_use]
    pub fn services(&self, carried: &Carried) -> Vec<ServiceSnapshot> {
        let snapshot = |(position, service): (usize, &Registered)| {
            let mut snapshot = service.snapshot(&carried.groups);
            let not_steered = carried.not_steered.get(position).into_iter().flatten();
            snapshot.not_steered = not_steered.map(|(why, n)| ((*why).to_owned(), *n)).collect();
            snapshot
        };
        self.services.iter().enumerate().map(snapshot).collect()
    }
}

impl Registered {
    fn snapshot(&self, carried: &[SteeredOrigin]) -> ServiceSnapshot {
        let workers = lock(&self.workers).clone();
        let mut by_address: BTreeMap<SocketAddr, Vec<Arc<OriginMetrics>>> = BTreeMap::new();
        for worker in &workers {
            let mut origins = lock(&worker.origins);
            origins.settle(&self.left);
            let leaving = origins.leaving.iter().map(|(address, metrics)| (address, metrics));
            for (address, metrics) in origins.live.iter().chain(leaving) {
                by_address.entry(*address).or_default().push(Arc::clone(metrics));
            }
        }
        // Nothing that was seen above is forgotten meanwhile: it is held here.
        let left = lock(&self.left);
        let sum = |address: SocketAddr, metrics: Vec<Arc<OriginMetrics>>| {
            let before = left.origins.get(&address).map(|leaving| &leaving.counted);
            let mut origin = OriginSnapshot::sum(address, before, metrics.iter().map(Arc::as_ref));
            let groups = metrics.iter().filter_map(|m| carried.get(m.group()?));
            let carried = groups.fold(SteeredOrigin::default(), SteeredOrigin::plus);
            origin.add_steered(&carried);
            (origin, carried)
        };
        let mut origins: Vec<_> = self
            .origins
            .iter()
            .map(|address| sum(*address, by_address.remove(address).unwrap_or_default()))
            .collect();
        origins.extend(by_address.into_iter().map(|(address, metrics)| sum(address, metrics)));
        let total =
            |count: fn(&ServiceMetrics) -> u64| workers.iter().map(|w| count(&w.metrics)).sum();
        let mut service = ServiceSnapshot {
            name: self.name.clone(),
            protocol: self.protocol.to_owned(),
            clients: total(|m| m.clients.get()),
            accept_failed: total(|m| m.accept_failed.get()),
            clients_open: total(|m| m.clients_open.get()),
            exchanges: total(|m| m.exchanges.get()),
            steered: total(|m| m.steered.get()),
            not_steered: BTreeMap::new(),
            request_bytes: total(|m| m.request_bytes.get()),
            response_bytes: total(|m| m.response_bytes.get()),
            waiting: total(|m| m.waiting.get()),
            queue_overflow: total(|m| m.queue_overflow.get()),
            request_overflow: total(|m| m.request_overflow.get()),
            retry_overflow: total(|m| m.retry_overflow.get()),
            retries: total(|m| m.retries.get()),
            connections_guaranteed: 0,
            connects_refused: 0,
            queue_timed_out: total(|m| m.queue_timed_out.get()),
            unreachable: total(|m| m.unreachable.get()),
            origin_failed: total(|m| m.origin_failed.get()),
            clients_gone: total(|m| m.clients_gone.get()),
            destination_unknown: total(|m| m.destination_unknown.get()),
            limits: BTreeMap::new(),
            cgroups: BTreeMap::new(),
            outliers: None,
            membership: None,
            origins: Vec::new(),
            forgotten: left.forgotten.clone(),
        };
        for (origin, carried) in origins {
            service.add_steered(&carried);
            service.origins.push(origin);
        }
        service
    }
}

/// The values behind these locks are counters and lists of them: a panic elsewhere leaves nothing
/// half-done that would make them worse than no statistics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::config::file::parse;
    use crate::stats::EvictReason;

    fn registry() -> Registry {
        let config = parse(
            "[[service]]\nname = \"s\"\nprotocol = \"http1\"\nroute = \"dialled\"\n\
             intercept = [\"10.0.0.0/8:80\"]\norigins = [\"10.0.0.9:80\", \"10.0.0.5:80\"]",
            "f",
        );
        Registry::new(&config.unwrap_or_else(|e| panic!("{e}")))
    }

    fn address(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 80))
    }

    #[test]
    fn workers_are_summed_and_configured_origins_come_first() {
        let registry = registry();
        let [a, b] = [registry.register(0), registry.register(0)];
        a.metrics.clients.add(2);
        b.metrics.clients.inc();
        a.origin(address(1)).created.inc();
        b.origin(address(1)).created.inc();
        b.origin(address(5)).reused.inc();
        let service = &registry.services(&Carried::default())[0];
        assert_eq!(service.clients, 3);
        let shown: Vec<_> = service.origins.iter().map(|o| (o.address, o.created)).collect();
        assert_eq!(shown, [(address(9), 0), (address(5), 0), (address(1), 2)]);
        assert_eq!(service.totals().reused, 1);
    }

    #[test]
    fn what_is_read_while_counts_are_moved_is_read_anew() {
        let registry = registry();
        let worker = registry.register(0);
        let looks = Cell::new(0);
        let look = |moves: usize| {
            looks.set(0);
            registry.undisturbed(|| {
                looks.set(looks.get() + 1);
                if looks.get() <= moves {
                    worker.moving(|| {});
                }
                looks.get()
            })
        };
        assert_eq!([look(0), look(1), look(3)], [1, 2, 4]);
        // Whatever others do, somebody who asks gets an answer.
        assert_eq!(look(usize::MAX), LOOKS_MAX);
        worker.moving(|| assert_eq!(look(0), LOOKS_MAX));
    }

    #[test]
    fn totals_survive_forgotten_origins() {
        let registry = registry();
        let worker = registry.register(0);
        let lease = worker.origin(address(1));
        lease.created.add(7);
        worker.forget(address(1));
        let service = &registry.services(&Carried::default())[0];
        assert_eq!((service.origins.len(), service.totals().created), (3, 7), "still held");
        lease.evict(EvictReason::OriginRemoved);
        drop(lease);
        let service = &registry.services(&Carried::default())[0];
        assert_eq!((service.origins.len(), service.forgotten.created), (2, 7));
        assert_eq!(service.totals().evicted["origin_removed"], 1);
        worker.origin(address(1)).created.inc();
        assert_eq!(registry.services(&Carried::default())[0].totals().created, 8);
    }

    #[test]
    fn an_origin_keeps_its_counts_until_the_last_worker_has_forgotten_it() {
        let registry = registry();
        let workers = [registry.register(0), registry.register(0), registry.register(0)];
        for worker in &workers {
            worker.origin(address(1)).reused.add(24);
            // What the kernel has carried in a group that it has given up.
            let carried =
                SteeredOrigin { reused: 1, status: [0, 0, 1, 0, 0, 0, 0, 0], ..Default::default() };
            worker.keep_carried(&worker.origin(address(1)), &carried);
        }
        let shown = || {
            let service = registry.services(&Carried::default()).remove(0);
            let origin = service.origins.iter().find(|o| o.address == address(1));
            (origin.map(|o| o.reused), service.forgotten.reused)
        };
        assert_eq!(shown(), (Some(75), 0));
        workers[0].forget(address(1));
        assert_eq!(shown(), (Some(75), 0));
        workers[1].forget(address(1));
        // It comes back to one of them before all have forgotten it.
        workers[0].origin(address(1)).reused.inc();
        workers[2].forget(address(1));
        assert_eq!(shown(), (Some(76), 0));
        workers[0].forget(address(1));
        assert_eq!(shown(), (None, 76));
        let totals = registry.services(&Carried::default())[0].totals();
        assert_eq!(totals.steered_status["2xx"], 3);
    }
}
