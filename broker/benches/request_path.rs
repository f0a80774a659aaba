//! What it costs a request that the daemon relays to be looked at: limits, ejections, the pick, and what
//! is counted in the end. Nothing here enters the kernel.
//!
//! `all_checks` is the sum of one request on a warm socket, in the order and as often as a worker does it,
//! with the four looks at the clock that it takes for them. `all_checks_worst` has a connection dialled for it, and is tried
//! again once. One thread: what many workers at once add is the price of a shared cache line.

use std::hint::black_box;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use broker::config::outlier::{Outlier, Panic};
use broker::config::retries::RetryLimit;
use broker::config::{Limits, Refuse};
use broker::events::{EventLog, Target};
use broker::origin::outlier::{Host, Outcome};
use broker::origin::panic::Eligible;
use broker::origin::watch::Watch;
use broker::origin::{Load, pick};
use broker::pool::budget::{self, Budget};
use criterion::{Criterion, criterion_group, criterion_main};
use rand::SeedableRng;
use rand::rngs::StdRng;

const WORKERS: usize = 2;
const WORKER: usize = 0;
const HUNDRED: NonZeroU32 = NonZeroU32::new(100).unwrap();

/// A service in order, as one of its workers sees it.
struct Service {
    watch: Watch,
    budget: Arc<Budget>,
    origins: Vec<Origin>,
    rng: StdRng,
}

struct Origin {
    address: SocketAddr,
    watched: Arc<Host>,
    host: Arc<budget::Host>,
    active: usize,
    idle: usize,
}

impl Service {
    fn new(origins: u8) -> Self {
        let limits = Limits {
            max_connections: 1024,
            max_connections_per_origin: Some(100),
            one_connection_per_origin: false,
            max_pending: 1024,
            max_requests: 1024,
            refuse: Refuse::Response,
        };
        let retries = RetryLimit::Budget { percent: 50.0, min_concurrency: 32 };
        let budget = Arc::new(Budget::new(&limits, retries, WORKERS));
        let log = Arc::new(EventLog::open(&Target::Memory).expect("memory can be opened"));
        let watch = Watch::new("web".to_owned(), Outlier::default(), Panic::default(), log);
        let addresses: Vec<_> =
            (0..origins).map(|n| SocketAddr::from(([10, 0, 0, n], 80))).collect();
        watch.cluster().set_hosts(&addresses);
        let origin = |address| Origin {
            address,
            watched: watch.host(address).expect("it has just been set"),
            host: budget.host(address),
            active: 3,
            idle: 2,
        };
        let origins = addresses.into_iter().map(origin).collect();
        Self { watch, budget, origins, rng: StdRng::seed_from_u64(1) }
    }

    /// Power of two choices among those that are not ejected and have a warm socket.
    fn pick(&mut self, avoid: Option<SocketAddr>, now: Instant) -> Option<usize> {
        let panic = self.watch.eligible() == Eligible::All;
        let origins = &self.origins;
        let load = |index: usize| {
            let origin = &origins[index];
            let wanted = Some(origin.address) != avoid && origin.idle > 0;
            let share = NonZeroU32::new(origin.watched.share().into()).unwrap_or(HUNDRED);
            let eligible = wanted && (panic || origin.watched.is_available(now));
            Load { active: origin.active, weight: share, eligible }
        };
        pick(origins.len(), load, &mut self.rng)
    }

    fn answered(&mut self, origin: usize, sent: Instant) -> bool {
        let host = &self.origins[origin].watched;
        let outcome = Outcome::Response(black_box(200));
        self.watch.record(host, outcome, sent, now(), &mut self.rng).late
    }

    /// A request that finds a warm socket and is answered.
    fn request(&mut self) -> bool {
        if self.watch.eligible() == Eligible::Nobody {
            return false;
        }
        let Some(origin) = self.pick(None, now()) else { return false };
        let Some(_permit) = self.budget.request() else { return false };
        let sent = now();
        self.origins[origin].watched.owe().answered();
        let late = self.answered(origin, sent);
        // When the socket comes back.
        !late && !self.budget.others_go_first(WORKER, now())
    }

    /// The same for one that needs a place in the queue, a new connection, and a second attempt.
    fn unlucky_request(&mut self) -> bool {
        let Some(first) = self.pick(None, now()) else { return false };
        let Some(_waiting) = self.budget.wait() else { return false };
        let origin = &self.origins[first];
        let Some(_connection) = self.budget.connect(&origin.host, false) else { return false };
        let address = origin.address;
        drop(origin.watched.owe());
        let Some(_retry) = self.budget.retry() else { return false };
        black_box(self.pick(Some(address), now()));
        self.request()
    }
}

/// The clock as the daemon reads it.
#[expect(clippy::disallowed_methods, reason = "`broker::clock` is one that tests can pause here")]
fn now() -> Instant {
    Instant::now()
}

fn limits(c: &mut Criterion) {
    let service = Service::new(1);
    let (budget, host) = (&service.budget, &service.origins[0].host);
    c.bench_function("limits/request", |b| b.iter(|| budget.request()));
    c.bench_function("limits/connect", |b| b.iter(|| budget.connect(host, false)));
    c.bench_function("limits/retry", |b| b.iter(|| budget.retry()));
    c.bench_function("limits/wait", |b| b.iter(|| budget.wait()));
}

fn outlier(c: &mut Criterion) {
    let mut service = Service::new(8);
    let at = now();
    c.bench_function("clock", |b| b.iter(now));
    c.bench_function("outlier/record", |b| b.iter(|| service.answered(0, at)));
    c.bench_function("outlier/owe", |b| b.iter(|| service.origins[0].watched.owe().answered()));
    let available = || service.origins[0].watched.is_available(black_box(at));
    c.bench_function("outlier/is_available", |b| b.iter(available));
    c.bench_function("outlier/panic", |b| b.iter(|| service.watch.eligible()));
}

fn checks(c: &mut Criterion) {
    for origins in [1, 8, 64] {
        let mut service = Service::new(origins);
        assert!(service.request() && service.unlucky_request());
        let at = now();
        let mut bench = |name: &str, run: &mut dyn FnMut(&mut Service) -> bool| {
            c.bench_function(&format!("{name}/{origins}"), |b| {
                b.iter(|| run(&mut service));
            });
        };
        bench("pick", &mut |service| service.pick(None, at).is_some());
        bench("all_checks", &mut Service::request);
        bench("all_checks_worst", &mut Service::unlucky_request);
    }
}

criterion_group!(benches, limits, outlier, checks);
criterion_main!(benches);
