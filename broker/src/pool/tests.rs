//! The pool over real loopback sockets: what it dials, hands out, takes back and lets go.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::task::LocalSet;

use super::budget::{Budget, Limit};
use super::{Common, Environment, Lease, Pool, Refusal, Use};
use crate::boundary::{CloseReason, Verdict};
use crate::config::retries::{Condition, Retries, RetryLimit};
use crate::config::{Limits, PoolConfig, Refuse};
use crate::datapath::Inert;
use crate::origin::Chosen;
use crate::stats::{EvictReason, OriginMetrics, ServiceMetrics, ServiceRecords};

/// Long enough for anything that happens on loopback.
const PATIENCE: Duration = Duration::from_secs(10);

fn settings() -> PoolConfig {
    PoolConfig {
        prewarm_rate: 1_000_000,
        prewarm: 0,
        max_idle: 8,
        idle_ttl: Duration::from_secs(30),
        max_lifetime: Duration::from_mins(10),
        max_requests: 1000,
        queue_timeout: PATIENCE,
        connect_timeout: PATIENCE,
        max_dials: 8,
        backoff_base: Duration::from_millis(1),
        backoff_max: Duration::from_millis(5),
        keepalive: None,
    }
}

fn limits() -> Limits {
    Limits {
        max_connections: 500,
        max_connections_per_origin: None,
        one_connection_per_origin: false,
        max_pending: 500,
        max_requests: 500,
        refuse: Refuse::Response,
    }
}

/// A pool with its origins' listeners, which accept only when told to.
struct Rig {
    pool: Rc<Pool>,
    listeners: Vec<TcpListener>,
    origins: Vec<Arc<OriginMetrics>>,
    service: Arc<ServiceMetrics>,
}

impl Rig {
    fn new(origins: usize, usage: Use, settings: PoolConfig) -> Self {
        let listeners: Vec<_> =
            (0..origins).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses = listeners.iter().map(|l| l.local_addr().unwrap());
        Self::with_addresses(&addresses.collect::<Vec<_>>(), listeners, usage, settings)
    }

    /// One origin, and limits.
    fn limited(settings: PoolConfig, limits: &Limits) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let budget = Arc::new(Budget::new(limits, Retries::default().limit, 1));
        Self::share(&budget, 0, &[address], vec![listener], Use::Reused, settings)
    }

    fn with_addresses(
        addresses: &[SocketAddr],
        listeners: Vec<TcpListener>,
        usage: Use,
        settings: PoolConfig,
    ) -> Self {
        let budget = Arc::new(Budget::new(&limits(), Retries::default().limit, 1));
        Self::share(&budget, 0, addresses, listeners, usage, settings)
    }

    /// One worker's pool of a service.
    fn share(
        budget: &Arc<Budget>,
        worker: usize,
        addresses: &[SocketAddr],
        listeners: Vec<TcpListener>,
        usage: Use,
        settings: PoolConfig,
    ) -> Self {
        let retries = Retries::default();
        Self::retrying(budget, retries, worker, addresses, listeners, usage, settings)
    }

    fn retrying(
        budget: &Arc<Budget>,
        retries: Retries,
        worker: usize,
        addresses: &[SocketAddr],
        listeners: Vec<TcpListener>,
        usage: Use,
        settings: PoolConfig,
    ) -> Self {
        let records = Arc::<ServiceRecords>::default();
        let service = Arc::clone(&records.metrics);
        let origins: Vec<_> = addresses.iter().map(|&address| records.origin(address)).collect();
        let chosen: Vec<_> = addresses.iter().map(|&address| Chosen::at(address)).collect();
        let pool = Pool::new(
            settings,
            usage,
            Common { budget: Arc::clone(budget), retries, watch: None },
            records,
            Environment {
                datapath: Arc::new(Inert),
                listening: Arc::default(),
                rng: Rc::new(RefCell::new(StdRng::seed_from_u64(1))),
                worker,
            },
            None,
        );
        pool.set_origins(&chosen);
        Self { pool: Rc::new(pool), listeners, origins, service }
    }

    fn accept(&self) -> TcpStream {
        self.listeners[0].accept().unwrap().0
    }

    async fn lease(&self) -> Lease {
        let mut lease = self.pool.checkout(None, None).await.unwrap();
        lease.stream();
        lease
    }

    fn created(&self) -> u64 {
        self.origins.iter().map(|o| o.created.get()).sum()
    }

    fn evicted(&self, reason: EvictReason) -> u64 {
        self.origins.iter().map(|o| o.evicted[reason.index()].get()).sum()
    }

    /// Every slot is free: nothing is leaked, and nothing was given back twice.
    async fn assert_empty(&self) {
        for origin in self.pool.shared.origins.borrow().all() {
            assert_eq!((origin.open.get(), origin.dialling.get(), origin.slow.get()), (0, 0, 0));
        }
        assert!(self.pool.shared.waiters.borrow().is_empty());
        let budget = &self.pool.shared.budget;
        // A connection that made room for another waits for the origin's end of it.
        eventually(|| budget.connections.used() == 0).await;
        assert_eq!([&budget.requests, &budget.pending].map(Limit::used), [0; 2]);
    }
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async {
        tokio::time::timeout(PATIENCE, test).await.expect("the test hangs");
    });
}

async fn eventually(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn one_socket_serves_exchange_after_exchange() {
    run(async {
        let rig = Rig::new(1, Use::Reused, settings());
        for _ in 0..100 {
            rig.lease().await.settle(Verdict::Return, None);
        }
        let origin = &rig.origins[0];
        assert_eq!(
            (origin.created.get(), origin.reused.get(), origin.returned.get()),
            (1, 99, 100)
        );
        assert_eq!((origin.idle.get(), origin.active.get()), (1, 0));
    });
}

#[test]
fn without_idle_sockets_every_exchange_dials() {
    run(async {
        let rig = Rig::new(1, Use::Reused, PoolConfig { max_idle: 0, ..settings() });
        for _ in 0..100 {
            rig.lease().await.settle(Verdict::Return, None);
        }
        assert_eq!((rig.created(), rig.origins[0].reused.get()), (100, 0));
        assert_eq!(rig.evicted(EvictReason::IdleOverflow), 100);
        rig.assert_empty().await;
    });
}

#[test]
fn prewarming_opens_what_is_asked_for_and_no_more() {
    run(async {
        let rig = Rig::new(3, Use::Reused, PoolConfig { prewarm: 2, ..settings() });
        while !rig.pool.is_warm() {
            rig.pool.tick();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(rig.created(), 6);
        let leases = [rig.lease().await, rig.lease().await, rig.lease().await];
        rig.pool.tick();
        drop(leases);
        assert_eq!(rig.created(), 6, "leased sockets count as kept");
    });
}

/// What an origin does with an idle connection.
type Act = fn(TcpStream);

#[test]
fn an_idle_socket_goes_at_once_when_the_origin_ends_resets_or_speaks() {
    run(async {
        let rig = Rig::new(1, Use::Reused, settings());
        let cases: [(Act, EvictReason); 3] = [
            (drop, EvictReason::IdleClosed),
            (
                |socket| socket2::SockRef::from(&socket).set_linger(Some(Duration::ZERO)).unwrap(),
                EvictReason::IdleClosed,
            ),
            (
                |mut socket| {
                    socket.write_all(b"\r\n").unwrap();
                    std::mem::forget(socket);
                },
                EvictReason::IdleBytes,
            ),
        ];
        for (n, (act, reason)) in cases.into_iter().enumerate() {
            rig.lease().await.settle(Verdict::Return, None);
            let accepted = rig.accept();
            let before = rig.evicted(reason);
            act(accepted);
            eventually(|| rig.evicted(reason) == before + 1).await;
            assert_eq!(rig.created(), n as u64 + 1);
            rig.assert_empty().await;
        }
    });
}

#[test]
fn an_exchange_rather_waits_than_goes_on_where_it_failed() {
    run(async {
        let rig = Rig::new(2, Use::Reused, PoolConfig { prewarm: 2, ..settings() });
        while !rig.pool.is_warm() {
            rig.pool.tick();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let [failed, other] = [0, 1].map(|i| rig.listeners[i].local_addr().unwrap());
        let mut leases = Vec::new();
        // First the warm ones of the other, then one that is dialled there.
        for _ in 0..3 {
            let lease = rig.pool.checkout(Some(failed), None).await.unwrap();
            assert_eq!(lease.address(), other);
            leases.push(lease);
        }
        assert_eq!((rig.origins[0].idle.get(), rig.origins[1].created.get()), (2, 3));
        drop(leases);
        rig.pool.set_origins(&[Chosen::at(failed)]);
        let lease = rig.pool.checkout(Some(failed), None).await.unwrap();
        assert_eq!((lease.address(), lease.is_reused()), (failed, false));
        assert_eq!(rig.origins[0].created.get(), 2, "it was warm");
    });
}

#[test]
fn a_checkout_looks_before_the_event_loop_does() {
    run(async {
        let rig = Rig::new(1, Use::Reused, settings());
        rig.lease().await.settle(Verdict::Return, None);
        let mut first = rig.accept();
        first.write_all(b"HTTP/1.1 408 Request Timeout\r\n\r\n").unwrap();
        // No await between the write and the checkout: the idle watch had no chance to run.
        let lease = rig.lease().await;
        assert_eq!((rig.created(), rig.evicted(EvictReason::IdleBytes)), (2, 1));
        lease.settle(Verdict::Return, None);
    });
}

#[test]
fn the_greeting_of_an_opaque_origin_stays_for_its_client() {
    run(async {
        let rig = Rig::new(1, Use::Once, PoolConfig { prewarm: 1, ..settings() });
        rig.pool.tick();
        eventually(|| rig.pool.is_warm()).await;
        let mut origin = rig.accept();
        origin.write_all(b"hello").unwrap();
        tokio::task::yield_now().await;
        let mut lease = rig.lease().await;
        let mut greeting = [0; 16];
        let n = lease.stream().recv(&mut greeting).await.unwrap();
        assert_eq!((&greeting[..n], rig.created()), (&b"hello"[..], 1));
    });
}

#[test]
fn a_returned_socket_serves_the_longest_waiting() {
    run(async {
        let rig = Rig::limited(settings(), &Limits { max_connections: 1, ..limits() });
        let lease = rig.lease().await;
        let order = Rc::new(RefCell::new(Vec::new()));
        let tasks: Vec<_> = (0..3)
            .map(|n| {
                let (pool, order) = (Rc::clone(&rig.pool), Rc::clone(&order));
                tokio::task::spawn_local(async move {
                    let mut lease = pool.checkout(None, None).await.unwrap();
                    lease.stream();
                    order.borrow_mut().push(n);
                    lease.settle(Verdict::Return, None);
                })
            })
            .collect();
        eventually(|| rig.service.waiting.get() == 3).await;
        lease.settle(Verdict::Return, None);
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(*order.borrow(), [0, 1, 2]);
        assert_eq!((rig.created(), rig.service.waiting.get()), (1, 0));
    });
}

#[test]
fn a_closed_socket_makes_room_for_a_dial() {
    run(async {
        let rig = Rig::limited(settings(), &Limits { max_connections: 1, ..limits() });
        let lease = rig.lease().await;
        let pool = Rc::clone(&rig.pool);
        let waiting = tokio::task::spawn_local(async move { pool.checkout(None, None).await });
        eventually(|| rig.service.waiting.get() == 1).await;
        lease.settle(Verdict::Close(CloseReason::BodyUntilClose), None);
        drop(waiting.await.unwrap().unwrap());
        assert_eq!(rig.created(), 2);
    });
}

#[test]
fn a_full_queue_and_a_long_wait_are_refused() {
    run(async {
        let settings = PoolConfig { queue_timeout: Duration::from_millis(20), ..settings() };
        let limits = Limits { max_connections: 1, max_pending: 1, ..limits() };
        let rig = Rig::limited(settings, &limits);
        let lease = rig.lease().await;
        let (first, second) =
            tokio::join!(rig.pool.checkout(None, None), rig.pool.checkout(None, None));
        assert_eq!(first.err(), Some(Refusal::QueueTimeout));
        assert_eq!(second.err(), Some(Refusal::QueueFull));
        let metrics = &rig.service;
        assert_eq!((metrics.queue_timed_out.get(), metrics.queue_overflow.get()), (1, 1));
        lease.settle(Verdict::Close(CloseReason::ClientGone), None);
        rig.assert_empty().await;
    });
}

#[test]
fn concurrent_dials_stay_within_their_cap_in_a_cold_burst() {
    run(async {
        let rig = Rig::new(1, Use::Reused, PoolConfig { max_dials: 3, ..settings() });
        let peak = Rc::new(RefCell::new(0));
        let tasks: Vec<_> = (0..200)
            .map(|_| {
                let (pool, peak) = (Rc::clone(&rig.pool), Rc::clone(&peak));
                tokio::task::spawn_local(async move {
                    let checkout = pool.checkout(None, None);
                    let dialling = pool.shared.current()[0].dialling.get();
                    let mut lease = checkout.await.unwrap();
                    let now = pool.shared.current()[0].dialling.get();
                    let most = &mut *peak.borrow_mut();
                    *most = (*most).max(dialling).max(now);
                    lease.stream();
                    lease.settle(Verdict::Return, None);
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert!((1..=3).contains(&*peak.borrow()), "{}", peak.borrow());
    });
}

#[test]
fn an_exchange_cancelled_at_any_point_frees_its_slot_once() {
    run(async {
        let rig = Rig::limited(settings(), &Limits { max_connections: 1, ..limits() });
        // While dialling and queued: polled once, then dropped.
        for _ in 0..10 {
            let checkout = std::pin::pin!(rig.pool.checkout(None, None));
            tokio::time::timeout(Duration::ZERO, checkout).await.ok();
        }
        eventually(|| !rig.pool.is_busy()).await;
        assert_eq!(rig.created(), 1, "the dial that nobody waits for any more is kept warm");
        // Handed a lease that it never looked at: the socket is as good as new.
        drop(rig.pool.checkout(None, None).await.unwrap());
        assert_eq!((rig.created(), rig.origins[0].idle.get()), (1, 1));
        // In the middle of an exchange: the socket is closed.
        drop(rig.lease().await);
        assert_eq!(rig.evicted(EvictReason::Exchange(CloseReason::ClientGone)), 1);
        rig.assert_empty().await;
    });
}

#[test]
fn a_lease_handed_to_someone_who_left_goes_to_the_next() {
    run(async {
        let rig = Rig::limited(settings(), &Limits { max_connections: 1, ..limits() });
        let lease = rig.lease().await;
        let pool = Rc::clone(&rig.pool);
        let leaves =
            tokio::task::spawn_local(async move { pool.checkout(None, None).await.map(drop) });
        let pool = Rc::clone(&rig.pool);
        let stays =
            tokio::task::spawn_local(async move { pool.checkout(None, None).await.map(drop) });
        eventually(|| rig.service.waiting.get() == 2).await;
        // The socket is handed to the first, which is cancelled before it can run again.
        lease.settle(Verdict::Return, None);
        leaves.abort();
        stays.await.unwrap().unwrap();
        assert_eq!((rig.created(), rig.origins[0].idle.get()), (1, 1));
    });
}

#[test]
fn a_dead_origin_costs_nobody_an_error_while_another_lives() {
    run(async {
        let live = TcpListener::bind("127.0.0.1:0").unwrap();
        let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let addresses = vec![dead, live.local_addr().unwrap()];
        let rig = Rig::with_addresses(&addresses, vec![live], Use::Reused, settings());
        // Until the dead one was tried several times.
        while rig.origins[0].dial_refused.get() < 5 {
            rig.pool.tick();
            rig.lease().await.settle(Verdict::Return, None);
            tokio::task::yield_now().await;
        }
        assert_eq!(rig.service.unreachable.get(), 0);
    });
}

#[test]
fn without_any_origin_the_refusal_is_prompt_and_dials_are_spaced() {
    run(async {
        let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let slow = Duration::from_millis(50);
        let limits = PoolConfig { backoff_base: slow, backoff_max: slow, ..settings() };
        let rig = Rig::with_addresses(&[dead], vec![], Use::Reused, limits);
        let all = (0..20).map(|_| {
            let pool = Rc::clone(&rig.pool);
            tokio::task::spawn_local(async move { pool.checkout(None, None).await.err() })
        });
        for refused in all.collect::<Vec<_>>() {
            assert_eq!(refused.await.unwrap(), Some(Refusal::Unreachable));
        }
        let dials = rig.origins[0].dial_refused.get();
        assert!(dials <= settings().max_dials as u64, "one burst, not one dial each: {dials}");
        // During the back-off nobody dials; afterwards one probe serves all who came meanwhile.
        let pool = Rc::clone(&rig.pool);
        let waiting =
            tokio::task::spawn_local(async move { pool.checkout(None, None).await.err() });
        eventually(|| {
            rig.pool.tick();
            waiting.is_finished()
        })
        .await;
        assert_eq!(rig.origins[0].dial_refused.get(), dials + 1);
        rig.assert_empty().await;
    });
}

#[test]
fn a_drained_pool_keeps_nothing() {
    run(async {
        let rig = Rig::new(1, Use::Reused, PoolConfig { prewarm: 2, ..settings() });
        rig.pool.tick();
        eventually(|| rig.pool.is_warm()).await;
        let lease = rig.lease().await;
        rig.pool.drain();
        assert_eq!(rig.evicted(EvictReason::Drain), 1);
        // An exchange that is still under way may get a new socket.
        let late = rig.lease().await;
        lease.settle(Verdict::Return, None);
        late.settle(Verdict::Return, None);
        rig.pool.tick();
        assert_eq!(rig.evicted(EvictReason::Drain), 3);
        rig.assert_empty().await;
    });
}

#[test]
fn a_lease_carries_bytes_both_ways() {
    run(async {
        let rig = Rig::new(1, Use::Reused, settings());
        let mut lease = rig.lease().await;
        let mut origin = rig.accept();
        lease.stream().send_all(b"question", PATIENCE).await.unwrap();
        let mut question = [0; 8];
        origin.read_exact(&mut question).unwrap();
        origin.write_all(b"answer").unwrap();
        let mut answer = [0; 16];
        let n = lease.stream().recv(&mut answer).await.unwrap();
        assert_eq!((&question, &answer[..n]), (b"question", &b"answer"[..]));
    });
}

#[test]
fn a_hundred_thousand_origins_are_taken_up_and_let_go() {
    run(async {
        let rig = Rig::new(1, Use::Reused, settings());
        let many = 100_000;
        let all = |port| {
            let first = Ipv4Addr::LOCALHOST.to_bits();
            let address = move |n| SocketAddr::new(Ipv4Addr::from_bits(first + n).into(), port);
            (0..many).map(move |n| Chosen::at(address(n))).collect::<Vec<_>>()
        };
        let places = || rig.pool.shared.origins.borrow().all().len();
        // Not in a time that grows with the square of their number: this would be no test then.
        for port in 80..85 {
            rig.pool.set_origins(&all(port));
            rig.pool.tick();
            assert_eq!(places(), many as usize);
        }
        assert!(rig.pool.shared.budget.hosts_known() <= 2 * many as usize);
        rig.pool.set_origins(&all(80)[..10]);
        rig.pool.tick();
        assert_eq!(places(), 10);
    });
}

#[test]
fn origins_come_and_go_under_leases() {
    run(async {
        let rig = Rig::new(2, Use::Reused, PoolConfig { prewarm: 1, ..settings() });
        let [a, b] = [0, 1].map(|i| Chosen::at(rig.listeners[i].local_addr().unwrap()));
        rig.pool.tick();
        eventually(|| rig.pool.is_warm()).await;
        let leases = [rig.lease().await, rig.lease().await];
        let [on_a, on_b] = if leases[0].address() == a.address {
            leases
        } else {
            let [first, second] = leases;
            [second, first]
        };

        // The one that leaves finishes what it has begun, and no more.
        rig.pool.set_origins(&[b]);
        assert!(!on_a.may_begin() && on_b.may_begin());
        on_a.settle(Verdict::Return, None);
        on_b.settle(Verdict::Return, None);
        assert_eq!(rig.evicted(EvictReason::OriginRemoved), 1);
        for _ in 0..20 {
            let lease = rig.lease().await;
            assert_eq!(lease.address(), b.address);
            lease.settle(Verdict::Return, None);
        }
        assert_eq!(rig.created(), 2, "the one that stays has kept its socket");

        // An idle socket of one that leaves goes at once; one that comes is warmed.
        rig.pool.set_origins(&[a]);
        assert_eq!(rig.evicted(EvictReason::OriginRemoved), 2);
        rig.pool.tick();
        eventually(|| rig.pool.is_warm()).await;
        let lease = rig.lease().await;
        assert_eq!(lease.address(), a.address);
        lease.settle(Verdict::Return, None);
        rig.pool.drain();
        rig.assert_empty().await;
    });
}

#[test]
fn one_that_comes_back_while_it_leaves_keeps_its_sockets() {
    run(async {
        let rig = Rig::new(1, Use::Reused, settings());
        let a = Chosen::at(rig.listeners[0].local_addr().unwrap());
        let lease = rig.lease().await;
        rig.pool.set_origins(&[]);
        assert_eq!(rig.pool.checkout(None, None).await.err(), Some(Refusal::NoOrigins));
        rig.pool.set_origins(&[a]);
        lease.settle(Verdict::Return, None);
        rig.lease().await.settle(Verdict::Return, None);
        assert_eq!(rig.created(), 1);
    });
}

#[test]
fn whoever_waits_is_told_when_the_last_origin_leaves() {
    run(async {
        let rig = Rig::limited(settings(), &Limits { max_connections: 1, ..limits() });
        let lease = rig.lease().await;
        let pool = Rc::clone(&rig.pool);
        let waiting =
            tokio::task::spawn_local(async move { pool.checkout(None, None).await.err() });
        eventually(|| rig.service.waiting.get() == 1).await;
        rig.pool.set_origins(&[]);
        assert_eq!(waiting.await.unwrap(), Some(Refusal::NoOrigins));
        drop(lease);
        rig.assert_empty().await;
    });
}

#[test]
fn newcomers_are_warmed_at_a_bounded_rate() {
    run(async {
        // One socket per second and more than the test takes for the second one.
        let limits = PoolConfig { prewarm: 1, prewarm_rate: 1, ..settings() };
        let rig = Rig::new(20, Use::Reused, limits);
        let all: Vec<_> =
            rig.listeners.iter().map(|l| Chosen::at(l.local_addr().unwrap())).collect();
        rig.pool.set_origins(&all[..1]);
        rig.pool.tick();
        eventually(|| rig.pool.is_warm()).await;
        let created =
            || rig.pool.shared.current().iter().map(|o| o.metrics.created.get()).sum::<u64>();
        assert_eq!(created(), 1, "at the start, at once");
        rig.pool.set_origins(&all);
        eventually(|| {
            rig.pool.tick();
            created() == 2
        })
        .await;
        for _ in 0..50 {
            rig.pool.tick();
            tokio::task::yield_now().await;
        }
        assert!(created() < 10, "{} at once", created());
    });
}

#[test]
fn weights_share_the_leases() {
    run(async {
        let rig = Rig::new(2, Use::Reused, settings());
        let mut origins = [0, 1].map(|i| Chosen::at(rig.listeners[i].local_addr().unwrap()));
        origins[1].weight = std::num::NonZeroU32::new(3).unwrap();
        rig.pool.set_origins(&origins);
        let mut leases = Vec::new();
        for _ in 0..40 {
            leases.push(rig.lease().await);
        }
        let heavy = leases.iter().filter(|l| l.address() == origins[1].address).count();
        assert!((25..=35).contains(&heavy), "{heavy} of 40, not about 30");
    });
}

/// Pools of two workers of one service with one origin.
fn two_workers(limits: &Limits) -> [Rig; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let budget = Arc::new(Budget::new(limits, Retries::default().limit, 2));
    let rig = |worker, listeners| {
        Rig::share(&budget, worker, &[address], listeners, Use::Reused, settings())
    };
    [rig(0, vec![listener]), rig(1, Vec::new())]
}

#[test]
fn an_idle_connection_of_another_worker_makes_room() {
    run(async {
        let [rich, other] = two_workers(&Limits { max_connections: 1, ..limits() });
        rich.lease().await.settle(Verdict::Return, None);
        let lease = other.lease().await;
        assert_eq!(rich.evicted(EvictReason::MadeRoom), 1);
        lease.settle(Verdict::Return, None);
        rich.lease().await.settle(Verdict::Return, None);
        assert_eq!(other.evicted(EvictReason::MadeRoom), 1);
    });
}

#[test]
fn a_connection_that_comes_back_goes_to_whoever_waits_longest_on_any_worker() {
    run(async {
        let [rich, other] = two_workers(&Limits { max_connections: 1, ..limits() });
        let lease = rich.lease().await;
        let first = {
            let pool = Rc::clone(&other.pool);
            tokio::task::spawn_local(async move { pool.checkout(None, None).await })
        };
        eventually(|| other.service.waiting.get() == 1).await;
        tokio::time::sleep(Duration::from_millis(30)).await;
        let second = {
            let pool = Rc::clone(&rich.pool);
            tokio::task::spawn_local(async move { pool.checkout(None, None).await })
        };
        eventually(|| rich.service.waiting.get() == 1).await;
        lease.settle(Verdict::Return, None);
        let lease = first.await.unwrap().unwrap();
        assert!(!second.is_finished(), "it came later");
        lease.settle(Verdict::Return, None);
        second.await.unwrap().unwrap();
    });
}

#[test]
fn exchanges_have_a_limit_of_their_own() {
    run(async {
        let rig = Rig::limited(settings(), &Limits { max_requests: 1, ..limits() });
        let lease = rig.lease().await;
        assert_eq!(rig.pool.checkout(None, None).await.err(), Some(Refusal::TooManyRequests));
        lease.settle(Verdict::Return, None);
        rig.lease().await.settle(Verdict::Return, None);
        rig.pool.drain();
        rig.assert_empty().await;
    });
}

#[test]
fn warming_leaves_the_last_connections_to_those_who_wait() {
    run(async {
        let settings = PoolConfig { prewarm: 20, ..settings() };
        let rig = Rig::limited(settings, &Limits { max_connections: 10, ..limits() });
        rig.pool.tick();
        eventually(|| rig.origins[0].idle.get() == 8).await;
        rig.pool.tick();
        assert_eq!(rig.created(), 8);
        let leases = [rig.lease().await, rig.lease().await];
        drop(leases);
    });
}

/// A pool with a live origin, whose only connection is leased, and one that refuses connections.
async fn in_trouble(retries: Retries) -> (Arc<Budget>, Rig, Lease) {
    let live = TcpListener::bind("127.0.0.1:0").unwrap();
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let address = live.local_addr().unwrap();
    let limits = Limits { max_connections_per_origin: Some(1), ..limits() };
    let budget = Arc::new(Budget::new(&limits, retries.limit, 1));
    let rig = Rig::retrying(&budget, retries, 0, &[address], vec![live], Use::Reused, settings());
    let lease = rig.lease().await;
    rig.pool.set_origins(&[Chosen::at(address), Chosen::at(dead)]);
    (budget, rig, lease)
}

type Waiting = tokio::task::JoinHandle<Result<Lease, Refusal>>;

fn wait(rig: &Rig) -> Waiting {
    let pool = Rc::clone(&rig.pool);
    tokio::task::spawn_local(async move { pool.checkout(None, None).await })
}

#[test]
fn a_retry_that_waits_for_a_back_off_counts_until_it_is_over() {
    run(async {
        let retries = Retries { limit: RetryLimit::Fixed(1), ..Retries::default() };
        let (budget, rig, lease) = in_trouble(retries).await;
        let first = wait(&rig);
        eventually(|| budget.retries.used() == 1).await;
        assert_eq!(rig.service.retries.get(), 1);
        // It waits, and nobody else may try again meanwhile.
        let second = wait(&rig);
        eventually(|| {
            rig.pool.tick();
            second.is_finished()
        })
        .await;
        assert_eq!(second.await.unwrap().err(), Some(Refusal::TooManyRetries));
        assert_eq!((rig.service.retry_overflow.get(), rig.service.waiting.get()), (1, 1));
        assert!(!first.is_finished() && budget.retries.used() == 1);
        lease.settle(Verdict::Return, None);
        let mut lease = first.await.unwrap().unwrap();
        assert_eq!(budget.retries.used(), 1, "its response has not begun");
        drop(lease.take_retry());
        assert_eq!(budget.retries.used(), 0);
        // When all is quiet again, another one may.
        let third = wait(&rig);
        eventually(|| {
            rig.pool.tick();
            budget.retries.used() == 1
        })
        .await;
        third.abort();
        eventually(|| budget.retries.used() == 0).await;
        lease.settle(Verdict::Return, None);
    });
}

#[test]
fn in_a_mass_failure_the_minimum_is_tried_again() {
    run(async {
        let limit = RetryLimit::Budget { percent: 20.0, min_concurrency: 3 };
        let (budget, rig, lease) = in_trouble(Retries { limit, ..Retries::default() }).await;
        let all: Vec<_> = (0..10).map(|_| wait(&rig)).collect();
        eventually(|| {
            rig.pool.tick();
            all.iter().filter(|waiting| waiting.is_finished()).count() == 7
        })
        .await;
        assert_eq!((budget.retries.used(), rig.service.retry_overflow.get()), (3, 7));
        lease.settle(Verdict::Return, None);
        let mut served = 0;
        for waiting in all {
            match waiting.await.unwrap() {
                Ok(lease) => {
                    served += 1;
                    lease.settle(Verdict::Return, None);
                }
                Err(refusal) => assert_eq!(refusal, Refusal::TooManyRetries),
            }
        }
        assert_eq!((served, budget.retries.used()), (3, 0));
    });
}

#[test]
fn without_retries_a_failed_dial_is_its_exchange_s_failure() {
    run(async {
        let on = [Condition::Refused].into_iter().collect();
        let (budget, rig, lease) = in_trouble(Retries { on, ..Retries::default() }).await;
        assert_eq!(wait(&rig).await.unwrap().err(), Some(Refusal::Unreachable));
        assert_eq!((rig.service.retries.get(), budget.retries.used()), (0, 0));
        lease.settle(Verdict::Return, None);
    });
}
