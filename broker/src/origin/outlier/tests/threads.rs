//! Many workers, real atomics.

use std::sync::Barrier;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::thread;

use super::*;

const WORKERS: usize = 8;

/// Runs `work` in all workers at once and collects their events.
fn at_once(work: impl Fn(usize, &mut StdRng) -> Vec<Event> + Sync) -> Vec<Event> {
    let barrier = Barrier::new(WORKERS);
    thread::scope(|scope| {
        let worker = |n: usize| {
            let (barrier, work) = (&barrier, &work);
            scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(n as u64);
                barrier.wait();
                work(n, &mut rng)
            })
        };
        let workers: Vec<_> = (0..WORKERS).map(worker).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    })
}

#[test]
fn a_host_is_out_after_exactly_so_many_errors_in_total() {
    for failures in 1..=WORKERS {
        for _ in 0..50 {
            let mut config = only_consecutive(10);
            config.consecutive_5xx.failures = 6;
            let fleet = Fleet::new(10, config);
            let events = at_once(|worker, rng| {
                if worker >= failures {
                    return Vec::new();
                }
                fleet.hosts[0].record(Outcome::Response(500), fleet.now, fleet.now, rng)
            });
            assert_eq!(events.len(), usize::from(failures >= 6), "{failures}");
            assert_eq!(fleet.hosts[0].is_available(fleet.now), failures < 6);
        }
    }
}

/// An origin fails from some moment on, while answers of before are still on their way. Whatever the order
/// in which they are counted, not one failure more than configured is taken for the application's own.
#[test]
fn no_failure_more_than_configured_is_passed_on() {
    let mut most = 0;
    for round in 0..200 {
        let fleet = Fleet::new(10, only_consecutive(10));
        let (host, fails) = (&fleet.hosts[0], AtomicU64::new(0));
        let passed_on = AtomicU64::new(0);
        // The same for all: those of two processors may differ by what takes longer here.
        let clock = AtomicU64::new(0);
        let tick = || fleet.now + Duration::from_nanos(clock.fetch_add(1, SeqCst));
        at_once(|worker, rng| {
            let mut events = Vec::new();
            for n in 0..400 {
                if (worker, n) == (0, 100) {
                    fails.store(1, SeqCst);
                }
                let sent = tick();
                if !host.is_available(sent) {
                    continue;
                }
                thread::yield_now();
                let failed = fails.load(SeqCst) == 1;
                if n % 7 == worker {
                    thread::yield_now();
                }
                let outcome = Outcome::Response(if failed { 500 } else { 200 });
                let now = tick();
                let recorded = host.record(outcome, sent, now, rng);
                let ejected = recorded.iter().any(|event| event.enforced);
                let counts = failed && (ejected || !host.is_out(now));
                passed_on.fetch_add(counts.into(), SeqCst);
                events.extend(recorded);
            }
            events
        });
        // One of the first five may be read late, when the fifth has been counted.
        let passed_on = passed_on.into_inner();
        assert!(passed_on <= 5, "round {round}: {passed_on}");
        most = most.max(passed_on);
    }
    assert_eq!(most, 5);
}

#[test]
fn no_burst_ejects_more_than_allowed() {
    for round in 0..100 {
        let fleet = Fleet::new(20, only_consecutive(10));
        let events = at_once(|worker, rng| {
            // All hosts fail for all workers, each beginning elsewhere.
            let hosts = (0..20).map(|n| &fleet.hosts[(n + worker * 3) % 20]);
            let mut events = Vec::new();
            for host in hosts {
                for _ in 0..5 {
                    events.extend(host.record(Outcome::Response(500), fleet.now, fleet.now, rng));
                    let out = fleet.hosts.iter().filter(|host| !host.is_available(fleet.now));
                    assert!(out.count() <= 2);
                }
            }
            events
        });
        let ejected = events.iter().filter(|event| event.enforced).count();
        assert_eq!((ejected, fleet.ejected().len()), (2, 2), "round {round}");
        assert_eq!(fleet.cluster.ejected_of().0, 2);
    }
}

/// Ejections, returns, sweeps and changes of the membership all at once: the numbers add up.
#[test]
fn everything_at_once() {
    let mut config = Outlier {
        max_ejection_percent: 30,
        base_ejection_time: Duration::from_micros(50),
        max_ejection_time: Duration::from_micros(300),
        interval: Duration::from_micros(100),
        ..Outlier::default()
    };
    config.stall.time = Duration::from_micros(200);
    let fleet = Fleet::new(12, config);
    let clock = AtomicU64::new(0);
    let events = at_once(|worker, rng| {
        let mut events = Vec::new();
        for step in 0..20_000usize {
            let now = fleet.begun + Duration::from_nanos(clock.fetch_add(100, Relaxed));
            let host = &fleet.hosts[(step * 7 + worker) % 12];
            match (worker, step % 200) {
                (0, 0) => fleet.cluster.set_hosts(&addresses(8 + step % 5)),
                (0 | 1, 1..20) => events.extend(fleet.cluster.sweep(now, rng)),
                (2, 0) => events.extend(host.health_check_succeeded(now)),
                _ => {
                    let owing = host.owe();
                    let status = if step % 9 == 0 { 200 } else { 503 };
                    events.extend(host.record(Outcome::Response(status), now, now, rng));
                    if step % 2 == 0 {
                        owing.answered();
                    }
                }
            }
        }
        events
    });
    let count = |action, enforced| {
        events.iter().filter(|e| e.action == action && e.enforced == enforced).count()
    };
    assert!(count(Action::Eject, true) > 100, "{} events", events.len());
    assert!(count(Action::Uneject, true) > 100);
    assert!(fleet.hosts.iter().all(|host| host.owed() == 0));
    // All are back in the end, and none is counted as ejected.
    fleet.cluster.set_hosts(&addresses(12));
    let end = fleet.begun + secs(3600);
    drop(fleet.cluster.sweep(end, &mut StdRng::seed_from_u64(1)));
    assert_eq!(fleet.cluster.ejected_of(), (0, 12));
    let total = fleet.cluster.snapshot(end).enforced.values().sum::<u64>();
    assert_eq!(total, count(Action::Eject, true) as u64);
}
