//! What must hold for any schedule, and what is known without simulating.

use std::collections::BTreeSet;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

const TRAFFIC: Traffic = Traffic {
    arrivals: Arrivals::Poisson,
    rate: 20.0,
    duration: Duration::from_secs(200),
    service: Service::Exponential,
    service_time: Duration::from_millis(100),
    seed: 7,
};

/// One pool to one origin, with no limit that anything comes near.
const RULES: Rules = Rules {
    workers: 1,
    spread: Spread::Random,
    origins: 1,
    prewarm: 0,
    limits: Limits { max_idle: 1_000, idle_ttl: Duration::from_hours(10), max_requests: u64::MAX },
    max_lifetime: Duration::from_hours(100),
    origin_idle: None,
};

fn setup() -> Setup {
    Setup {
        traffic: TRAFFIC,
        origins: 3,
        workers: vec![1, 4],
        spreads: vec![Spread::Random, Spread::RoundRobin],
        max_idle: 64,
        idle_ttl: Duration::from_secs(10),
        max_lifetime: Duration::from_mins(10),
        max_requests: 10_000,
        origin_idle: None,
    }
}

fn with_idle_ttl(idle_ttl: Duration) -> Rules {
    Rules { limits: Limits { idle_ttl, ..RULES.limits }, ..RULES }
}

/// Requests that take no time, a second apart.
fn one_a_second() -> Schedule {
    Schedule::new(&Traffic {
        arrivals: Arrivals::Regular,
        rate: 1.0,
        service: Service::Fixed,
        service_time: Duration::ZERO,
        ..TRAFFIC
    })
}

#[test]
fn nothing_is_lost_under_any_limits() {
    let tight = Limits { max_idle: 2, idle_ttl: SECOND, max_requests: 20 };
    let mut reasons = BTreeSet::new();
    for seed in 0..10 {
        let schedule = Schedule::new(&Traffic { seed, ..TRAFFIC });
        for workers in [1, 3] {
            for prewarm in [0, 2] {
                let rules = Rules {
                    workers,
                    prewarm,
                    origins: 4,
                    limits: tight,
                    max_lifetime: SECOND * 7,
                    // Some sockets meet this first, and some idle_ttl.
                    origin_idle: (seed % 2 == 0).then_some(Duration::from_millis(800)),
                    ..RULES
                };
                let outcome = run(&schedule, rules);
                assert_eq!(outcome.requests, schedule.requests.len() as u64);
                let closed: u64 = outcome.evicted.values().sum();
                assert_eq!(outcome.created, closed + outcome.open_at_end as u64, "{outcome:?}");
                let first = outcome.requests - outcome.reused;
                assert!(outcome.waited <= first && first <= outcome.created, "{outcome:?}");
                assert!(outcome.open_mean <= outcome.open_peak as f64);
                assert!(outcome.idle_mean <= outcome.open_mean);
                reasons.extend(outcome.evicted.into_keys());
            }
        }
    }
    let all = ["idle_closed", "idle_overflow", "idle_ttl", "lifetime", "requests"];
    assert!(reasons.into_iter().eq(all));
}

#[test]
fn of_one_origin_each_request_creates_or_reuses() {
    for idle_ttl in [SECOND / 10, SECOND, SECOND * 100] {
        let outcome = run(&Schedule::new(&TRAFFIC), with_idle_ttl(idle_ttl));
        assert_eq!(outcome.requests, outcome.created + outcome.reused, "{outcome:?}");
        assert_eq!(outcome.waited, outcome.created);
    }
}

#[test]
fn without_a_pool_each_request_creates_one() {
    for (workers, origins) in [(1, 1), (4, 5)] {
        let rules = Rules { workers, origins, ..RULES }.at_most(0);
        let outcome = run(&Schedule::new(&TRAFFIC), rules);
        assert_eq!((outcome.created, outcome.reused), (outcome.requests, 0));
        assert_eq!(outcome.saved, 0);
    }
}

#[test]
fn gaps_below_idle_ttl_reuse_all_but_the_first_and_others_none() {
    let schedule = one_a_second();
    let of = |idle_ttl| {
        let outcome = run(&schedule, with_idle_ttl(idle_ttl));
        (outcome.created, outcome.reused)
    };
    assert_eq!(of(SECOND + Duration::from_millis(1)), (1, 199));
    assert_eq!(of(SECOND), (200, 0), "a socket expires when its time has come, not after");
    assert_eq!(of(SECOND / 2), (200, 0));
    let origin = run(&schedule, Rules { origin_idle: Some(SECOND / 2), ..RULES });
    assert_eq!((origin.created, origin.evicted["idle_closed"]), (200, 200));
}

#[test]
fn random_gaps_are_reused_as_often_as_they_are_shorter() {
    let long = SECOND * 10_000_000;
    for row in [SECOND, long].into_iter().flat_map(|gap| gaps(gap, 3)) {
        let expected = 1.0 - (-1.0 / row.gap_to_idle_ttl).exp();
        let reused = row.poisson.reused as f64 / row.poisson.requests as f64;
        assert!((reused - expected).abs() < 0.03, "{}: {reused}", row.gap_to_idle_ttl);
        let all = row.regular.requests - 1;
        assert_eq!(row.regular.reused, if row.gap_to_idle_ttl < 1.0 { all } else { 0 });
    }
}

/// While nothing expires, a pool opens as many as were ever under way at once; parts of the load
/// have their peaks at different times.
#[test]
fn one_pool_opens_no_more_than_one_for_each_worker() {
    for seed in 0..20 {
        let schedule = Schedule::new(&Traffic { seed, ..TRAFFIC });
        let shared = run(&schedule, RULES).created;
        for spread in [Spread::Random, Spread::RoundRobin] {
            for workers in [2, 3, 8] {
                let split = run(&schedule, Rules { workers, spread, ..RULES }).created;
                assert!(shared <= split, "{seed} {spread:?} {workers}: {shared} > {split}");
            }
        }
    }
}

/// Where sockets do expire, that is no law: of two in one pool the newest is used and the other one
/// ages, while in two pools each is used in its turn.
#[test]
fn one_pool_may_let_a_socket_go_that_two_would_keep() {
    let request = |ms, lot| schedule::Request {
        at: Duration::from_millis(ms),
        takes: Duration::from_millis(1),
        lot,
    };
    let requests = [(0, 0), (0, 1), (500, 0), (900, 1), (1300, 0), (1300, 1)]
        .map(|(ms, lot)| request(ms, lot));
    let schedule = Schedule { requests: requests.to_vec(), ends: SECOND * 2, seed: 0 };
    let rules = with_idle_ttl(SECOND);
    assert_eq!(run(&schedule, rules).created, 3);
    assert_eq!(run(&schedule, Rules { workers: 2, ..rules }).created, 2);
}

#[test]
fn as_many_are_open_as_are_under_way() {
    // 80 at once, with a standard deviation of 9 (M/M/∞).
    let traffic = Traffic { rate: 200.0, service_time: SECOND * 2 / 5, ..TRAFFIC };
    let outcome = run(&Schedule::new(&traffic), RULES.at_most(0));
    assert!((78.0..82.0).contains(&outcome.open_mean), "{outcome:?}");
    assert!((95..130).contains(&outcome.open_peak), "{outcome:?}");
    assert!(outcome.idle_mean.abs() < 0.01);
    // A pool holds what was under way at most.
    let pooled = run(&Schedule::new(&traffic), RULES);
    assert_eq!(pooled.created, outcome.open_peak as u64);
    assert_eq!(pooled.open_peak, outcome.open_peak);
}

#[test]
fn as_many_early_sockets_as_one_exchange_could_find_are_opened_again() {
    let schedule = Schedule { requests: Vec::new(), ends: SECOND * 95, seed: 0 };
    let rules = Rules { workers: 2, origins: 3, prewarm: 2, ..with_idle_ttl(SECOND * 10) };
    let outcome = run(&schedule, rules);
    // Two for each worker and origin at first, then two for each worker.
    assert_eq!((outcome.created, outcome.open_at_end), (12 + 4 * 9, 4));
    assert_eq!((outcome.evicted["idle_ttl"], outcome.saved), (12 + 4 * 8, -48));
    let outcome = run(&one_a_second(), Rules { prewarm: 1, ..RULES });
    assert_eq!((outcome.created, outcome.waited, outcome.reused), (1, 0, 199));
}

#[test]
fn early_sockets_that_nobody_needs_cost_little_more_than_none() {
    // Each worker asks each origin once in a quarter of a minute, and the origins wait 5 s.
    let traffic = Traffic { rate: 10.0, duration: SECOND * 180, ..TRAFFIC };
    let created = |prewarm| {
        let origin_idle = Some(SECOND * 5);
        let rules = Rules { workers: 8, origins: 20, prewarm, origin_idle, ..RULES };
        run(&Schedule::new(&traffic), rules).created
    };
    let (none, two) = (created(0), created(2));
    assert!(two < none + none / 2, "{two} handshakes instead of {none}");
}

#[test]
fn the_same_seed_gives_the_same_report() {
    let json = |seed| {
        let traffic = Traffic { seed, ..TRAFFIC };
        serde_json::to_string(&simulate(&Setup { traffic, ..setup() })).unwrap()
    };
    assert_eq!(json(1), json(1));
    assert_ne!(json(1), json(2));
}

#[test]
fn advice_follows_from_what_was_seen() {
    let report = simulate(&setup());
    // Twelve lists, 20 requests per second: 0.6 s.
    assert_eq!((report.workers, report.gap), (4, Duration::from_millis(600)));
    let Advice { max_idle, idle_ttl, idle_ttl_needed, prewarm, .. } = report.advice;
    assert_eq!((idle_ttl, idle_ttl_needed), (SECOND * 10, SECOND * 3));
    assert!((1..=8).contains(&max_idle) && prewarm <= max_idle, "{:?}", report.advice);
    assert!(report.advice.outcome.reuses(report.pooling[1].outcome.reused));
    let short = simulate(&Setup { idle_ttl: SECOND, ..setup() });
    assert_eq!(short.advice.idle_ttl, SECOND * 3);
    let hasty = simulate(&Setup { origin_idle: Some(SECOND * 2), ..setup() });
    assert_eq!(hasty.advice.idle_ttl, SECOND);
    let once = simulate(&Setup { max_requests: 1, ..setup() });
    assert!(once.advice.prewarm <= once.advice.max_idle);
}

#[test]
fn fewest_idle_sockets_that_reuse_as_much() {
    let setup = setup();
    let schedule = Schedule::new(&setup.traffic);
    let all = shared(&schedule, &setup);
    let target = all[0].outcome.reused;
    assert_eq!(all.len(), 3, "one pool is shown once");
    for row in all {
        let rules = Rules { spread: row.spread, ..setup.rules(row.workers) };
        let Some(max_idle) = row.max_idle_for_as_much else { continue };
        assert!(run(&schedule, rules.at_most(max_idle)).reuses(target));
        assert!(!run(&schedule, rules.at_most(max_idle - 1)).reuses(target));
    }
}
