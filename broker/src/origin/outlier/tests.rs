//! Envoy's rules to the digit, and what many workers at once must not break.

mod model;
mod threads;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use broker_ebpf::abi::FINE_BUCKETS;
use broker_ebpf::flow::fine_bucket;
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::*;
use crate::clock;
use crate::config::outlier::{Consecutive, SlowAction};

fn address(n: usize) -> SocketAddr {
    let [.., high, low] = u32::try_from(n).unwrap().to_be_bytes();
    SocketAddr::from(([10, 0, high, low], 80))
}

fn addresses(n: usize) -> Vec<SocketAddr> {
    (0..n).map(address).collect()
}

/// A service in virtual time.
struct Fleet {
    cluster: Cluster,
    hosts: Vec<Arc<Host>>,
    begun: Instant,
    now: Instant,
    rng: StdRng,
}

impl Fleet {
    fn new(hosts: usize, config: Outlier) -> Self {
        let now = clock::now();
        let cluster = Cluster::new(config, now);
        let addresses = addresses(hosts);
        cluster.set_hosts(&addresses);
        let hosts = addresses.iter().map(|&address| cluster.host(address).unwrap()).collect();
        Self { cluster, hosts, begun: now, now, rng: StdRng::seed_from_u64(1) }
    }

    /// Of a request that was sent after all that has happened before.
    fn record(&mut self, host: usize, outcome: Outcome) -> Vec<Event> {
        let sent = self.now + Duration::from_nanos(1);
        self.hosts[host].record(outcome, sent, self.now, &mut self.rng)
    }

    fn fail(&mut self, host: usize, times: usize) -> Vec<Event> {
        (0..times).flat_map(|_| self.record(host, Outcome::Response(500))).collect()
    }

    /// The bad ones as far apart as they can be.
    fn requests(&mut self, host: usize, good: usize, bad: usize) {
        let total = good + bad;
        for n in 0..total {
            let failed = (n + 1) * bad / total > n * bad / total;
            let status = if failed { 500 } else { 200 };
            drop(self.record(host, Outcome::Response(status)));
        }
    }

    fn wait(&mut self, time: Duration) -> Vec<Event> {
        let end = self.now + time;
        let mut events = Vec::new();
        while self.now < end {
            self.now = (self.now + self.cluster.pace()).min(end);
            events.extend(self.cluster.sweep(self.now, &mut self.rng));
        }
        events
    }

    fn ejected(&self) -> Vec<usize> {
        let out = |host: &usize| !self.hosts[*host].is_available(self.now);
        (0..self.hosts.len()).filter(out).collect()
    }

    fn multiplier(&self, host: usize) -> u32 {
        self.hosts[host].multiplier()
    }
}

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// Without the detectors of rates.
fn only_consecutive(max_ejection_percent: u8) -> Outlier {
    let mut config = Outlier { max_ejection_percent, ..Outlier::default() };
    config.success_rate.enforcing = 0;
    config
}

fn detectors(events: &[Event]) -> Vec<(&'static str, bool)> {
    events.iter().map(|e| (e.detector.map_or("", Detector::name), e.enforced)).collect()
}

#[test]
fn the_fifth_error_in_a_row_ejects_at_once() {
    let mut fleet = Fleet::new(10, only_consecutive(10));
    assert!(fleet.fail(3, 4).is_empty());
    drop(fleet.record(3, Outcome::Response(404)));
    assert!(fleet.fail(3, 4).is_empty(), "a client's mistake is an origin's success");
    let events = fleet.fail(3, 1);
    assert_eq!(detectors(&events), [("5xx", true)]);
    assert_eq!(events[0].evidence, Some(Evidence::Consecutive { failures: 5, status: Some(500) }));
    assert_eq!(fleet.ejected(), [3]);
    assert!(fleet.fail(3, 20).is_empty(), "those that were under way change nothing");
    assert_eq!(fleet.cluster.snapshot(fleet.now).detected["5xx"], 1);
}

#[test]
fn a_success_that_is_older_than_the_first_failure_changes_nothing() {
    let mut fleet = Fleet::new(10, only_consecutive(10));
    let old = fleet.now;
    fleet.now += secs(1);
    for _ in 0..4 {
        assert!(fleet.fail(3, 1).is_empty());
        fleet.now += secs(1);
        let host = &fleet.hosts[3];
        assert!(host.record(Outcome::Response(200), old, fleet.now, &mut fleet.rng).is_empty());
        // Not all that others have carried can be older than it.
        host.record_carried(0, 2);
    }
    assert_eq!(detectors(&fleet.fail(3, 1)), [("5xx", true)]);
    assert!(fleet.hosts[3].is_out(fleet.now) && !fleet.hosts[4].is_out(fleet.now));

    fleet.hosts[4].record_carried(10, 2);
    assert!(fleet.fail(4, 4).is_empty());
    fleet.hosts[4].record_carried(2, 7);
    assert_eq!(fleet.fail(4, 1)[0].withheld, Some(Withheld::MaxEjectionPercent), "five in a row");
    fleet.hosts[4].record_carried(1, 7);
    assert!(fleet.fail(4, 4).is_empty(), "the third was sent later than the first failure");
}

#[test]
fn gateway_failures_are_looked_at_first() {
    let mut fleet = Fleet::new(10, only_consecutive(10));
    let five = |fleet: &mut Fleet, status| -> Vec<Event> {
        (0..5).flat_map(|_| fleet.record(0, Outcome::Response(status))).collect()
    };
    let events = five(&mut fleet, 503);
    assert_eq!(detectors(&events), [("gateway_failure", false), ("5xx", true)]);
    let mut config = only_consecutive(10);
    config.consecutive_gateway_failure.enforcing = 100;
    let mut fleet = Fleet::new(10, config);
    let events = five(&mut fleet, 504);
    assert_eq!(detectors(&events), [("gateway_failure", true)]);
    // Another error ends a run of gateway failures, but not of errors.
    let mut config = only_consecutive(10);
    config.consecutive_gateway_failure = Consecutive { failures: 2, enforcing: 100 };
    let mut fleet = Fleet::new(10, config);
    let mixed: Vec<_> = [502, 500, 502, 501]
        .into_iter()
        .flat_map(|status| fleet.record(0, Outcome::Response(status)))
        .collect();
    assert!(mixed.is_empty());
    assert_eq!(detectors(&fleet.fail(0, 1)), [("5xx", true)]);
}

#[test]
fn local_failures_are_gateway_failures_unless_they_are_split_off() {
    let mut config = only_consecutive(100);
    config.consecutive_gateway_failure = Consecutive { failures: 3, enforcing: 100 };
    for failure in [Failure::Connect, Failure::Reset, Failure::Timeout] {
        let mut fleet = Fleet::new(1, config.clone());
        let events: Vec<_> =
            (0..3).flat_map(|_| fleet.record(0, Outcome::Failed(failure))).collect();
        assert_eq!(detectors(&events), [("gateway_failure", true)]);
        let evidence = Evidence::Consecutive { failures: 3, status: None };
        assert_eq!(events[0].evidence, Some(evidence));
    }
    config.split_external_local_origin_errors = true;
    let mut fleet = Fleet::new(1, config);
    let failures = |fleet: &mut Fleet, n| -> Vec<Event> {
        let failed = Outcome::Failed(Failure::Connect);
        (0..n).flat_map(|_| fleet.record(0, failed)).collect()
    };
    assert!(failures(&mut fleet, 4).is_empty());
    assert!(fleet.fail(0, 4).is_empty(), "a response, whatever it says, is no local failure");
    assert!(failures(&mut fleet, 4).is_empty());
    assert!(fleet.record(0, Outcome::Accepted).is_empty());
    assert_eq!(detectors(&failures(&mut fleet, 5)), [("local_origin_failure", true)]);
}

#[test]
fn zero_turns_a_detector_off() {
    let mut config = only_consecutive(100);
    config.consecutive_5xx.failures = 0;
    assert!(Fleet::new(1, config).fail(0, 100).is_empty());
}

#[test]
fn the_percentage_holds_after_the_ejection() {
    for (hosts, percent, always_one, expected) in [
        (2, 10, false, 0),
        (3, 10, false, 0),
        (2, 10, true, 1),
        (3, 10, true, 1),
        (3, 50, false, 1),
        (3, 66, false, 1),
        (3, 67, false, 2),
        (9, 10, false, 0),
        (10, 10, false, 1),
        (8, 12, false, 0),
        (8, 13, false, 1),
        (19, 10, false, 1),
        (20, 10, false, 2),
        (4, 100, false, 4),
        (4, 0, false, 0),
        (4, 0, true, 1),
    ] {
        let config = Outlier { always_eject_one_host: always_one, ..only_consecutive(percent) };
        let mut fleet = Fleet::new(hosts, config);
        (0..hosts).for_each(|host| drop(fleet.fail(host, 10)));
        assert_eq!(fleet.ejected().len(), expected, "{hosts} hosts, {percent} %, {always_one}");
        let snapshot = fleet.cluster.snapshot(fleet.now);
        assert_eq!(snapshot.ejected, expected as u64);
        // Ten errors in a row are noticed twice where the first time had no effect.
        assert_eq!(snapshot.overflow, 2 * (hosts - expected) as u64);
        assert_eq!(snapshot.enforced["5xx"], expected as u64);
        assert_eq!(fleet.cluster.ejected_of(), (expected, hosts));
    }
}

#[test]
fn ejections_grow_up_to_the_cap_and_decay() {
    let mut fleet = Fleet::new(10, only_consecutive(10));
    let mut lasted = Vec::new();
    for _ in 0..12 {
        let until = fleet.fail(0, 5).pop().unwrap().until.unwrap();
        lasted.push((until - fleet.now).as_secs());
        fleet.now += (until - fleet.now).mul_f64(0.999);
        assert_eq!(fleet.ejected(), [0]);
        fleet.now = until;
        assert_eq!(fleet.ejected().len(), 0, "back when its time is over, look or not");
    }
    assert_eq!(lasted, [30, 60, 90, 120, 150, 180, 210, 240, 270, 300, 300, 300]);
    assert_eq!(fleet.multiplier(0), 11, "Envoy's counts one beyond the cap");
    assert_eq!(fleet.hosts[0].ejections(), 12);
    let returned = fleet.cluster.sweep(fleet.now, &mut fleet.rng);
    assert_eq!((returned[0].action, returned[0].at), (Action::Uneject, fleet.now));
    // An interval ended with that look.
    let multipliers: Vec<u32> = (0..13)
        .map(|_| {
            drop(fleet.wait(secs(10)));
            fleet.multiplier(0)
        })
        .collect();
    assert_eq!(multipliers, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0]);
    let event = fleet.fail(0, 5).remove(0);
    assert_eq!((event.until.unwrap() - event.at, event.multiplier), (secs(30), 1));
    assert_eq!(event.ejections, 13);
}

#[test]
fn an_ejection_decays_after_a_whole_interval_of_health() {
    let mut fleet = Fleet::new(10, only_consecutive(10));
    drop(fleet.wait(secs(5)));
    drop(fleet.fail(0, 5));
    // Back at 35 s; the looks at 40 s and 50 s find it back for 5 s and for 15 s.
    drop(fleet.wait(secs(35)));
    assert_eq!(fleet.multiplier(0), 1);
    drop(fleet.wait(secs(10)));
    assert_eq!(fleet.multiplier(0), 0);
    drop(fleet.fail(0, 5));
    drop(fleet.wait(secs(30)));
    // Out again at once, for longer; nothing decays while it is out.
    let again = fleet.fail(0, 5).remove(0);
    assert_eq!((again.multiplier, again.until.unwrap() - again.at), (2, secs(60)));
    drop(fleet.wait(secs(59)));
    assert_eq!(fleet.multiplier(0), 2);
}

#[test]
fn after_its_return_nothing_is_held_against_it() {
    let mut fleet = Fleet::new(10, only_consecutive(10));
    drop(fleet.fail(0, 5 + 4));
    fleet.now += secs(30);
    assert_eq!(detectors(&fleet.fail(0, 4)), [("", true)], "the return");
    assert_eq!(detectors(&fleet.fail(0, 1)), [("5xx", true)]);
}

#[test]
fn jitter_is_added_on_top() {
    let config = Outlier { max_ejection_time_jitter: secs(7), ..only_consecutive(100) };
    let mut fleet = Fleet::new(200, config);
    let mut lasted = Vec::new();
    for host in 0..200 {
        let event = fleet.fail(host, 5).remove(0);
        lasted.push(event.until.unwrap() - event.at);
    }
    let (least, most) = (lasted.iter().min().unwrap(), lasted.iter().max().unwrap());
    assert!(*least >= secs(30) && *least < secs(31), "{least:?}");
    assert!(*most <= secs(37) && *most > secs(36), "{most:?}");
}

#[test]
fn enforcing_is_a_chance() {
    let mut config = only_consecutive(100);
    config.consecutive_5xx.enforcing = 30;
    let mut fleet = Fleet::new(1000, config);
    (0..1000).for_each(|host| drop(fleet.fail(host, 5)));
    let ejected = fleet.ejected().len();
    assert!((250..350).contains(&ejected), "{ejected}");
}

#[test]
fn without_effect_each_interval_reports_once() {
    let mut config = only_consecutive(100);
    config.consecutive_5xx.enforcing = 0;
    config.stall.enforcing = 0;
    let mut fleet = Fleet::new(10, config);
    let events = fleet.fail(0, 50);
    assert_eq!(detectors(&events), [("5xx", false)]);
    assert_eq!(events[0].withheld, Some(Withheld::Enforcing));
    assert!(fleet.ejected().is_empty());
    let snapshot = fleet.cluster.snapshot(fleet.now);
    assert_eq!((snapshot.detected["5xx"], snapshot.enforced["5xx"], snapshot.overflow), (10, 0, 0));
    assert!(fleet.wait(secs(10)).iter().all(|event| !event.enforced));
    let events = fleet.fail(0, 50);
    assert_eq!(detectors(&events), [("5xx", false)]);
    assert_eq!(events[0].evidence, Some(Evidence::Consecutive { failures: 55, status: Some(500) }));
}

#[test]
fn success_rates_below_mean_minus_1_9_stdev() {
    // The example in Envoy's own code: rates 50, 100, 100, 100, 100.
    let mut fleet = Fleet::new(5, Outlier { max_ejection_percent: 20, ..Outlier::default() });
    (1..5).for_each(|host| fleet.requests(host, 100, 0));
    fleet.requests(0, 50, 50);
    let events = fleet.wait(secs(10));
    assert_eq!(detectors(&events), [("success_rate", true)]);
    let evidence = Evidence::SuccessRate {
        success_rate: 50.0,
        mean: 90.0,
        stdev: 20.0,
        threshold: 52.0,
        requests: 100,
    };
    assert_eq!(events[0].evidence, Some(evidence));
    assert_eq!(events[0].until, Some(fleet.begun + secs(40)));
    assert_eq!(fleet.ejected(), [0]);
    let snapshot = fleet.cluster.snapshot(fleet.now);
    assert_eq!(snapshot.origins[0].success_rate, Some(50.0));
    assert_eq!(snapshot.origins[0].ejected_for_ms, Some(30_000));

    // One that is on the threshold is inside: with a factor of 2, it is 50.
    let mut config = Outlier { max_ejection_percent: 20, ..Outlier::default() };
    config.success_rate.stdev_factor = 2000;
    let mut fleet = Fleet::new(5, config);
    (1..5).for_each(|host| fleet.requests(host, 100, 0));
    fleet.requests(0, 50, 50);
    assert!(fleet.wait(secs(10)).is_empty());
}

#[test]
fn rates_need_hosts_and_requests() {
    let run = |hosts, requests: usize| {
        let config = Outlier { max_ejection_percent: 50, ..Outlier::default() };
        let mut fleet = Fleet::new(hosts, config);
        (1..hosts).for_each(|host| fleet.requests(host, requests, 0));
        fleet.requests(0, requests / 2, requests - requests / 2);
        detectors(&fleet.wait(secs(10))).len()
    };
    assert_eq!([run(5, 100), run(4, 100), run(5, 99)], [1, 0, 0]);
    // All the same: nobody is an outlier.
    let mut fleet = Fleet::new(7, Outlier { max_ejection_percent: 100, ..Outlier::default() });
    (0..7).for_each(|host| fleet.requests(host, 70, 37));
    assert!(fleet.wait(secs(10)).is_empty());
    // What was counted is gone with the interval.
    (1..7).for_each(|host| fleet.requests(host, 100, 0));
    fleet.requests(0, 20, 40);
    assert!(fleet.wait(secs(10)).is_empty());
    fleet.requests(0, 20, 40);
    assert!(fleet.wait(secs(10)).is_empty());
}

#[test]
fn failure_percentages_reach_the_threshold() {
    let mut config = only_consecutive(100);
    config.consecutive_5xx.failures = 0;
    config.failure_percentage.enforcing = 100;
    let mut fleet = Fleet::new(6, config.clone());
    for (host, bad) in [84, 85, 100, 0, 0, 0].into_iter().enumerate() {
        fleet.requests(host, 100 - bad, bad);
    }
    let events = fleet.wait(secs(10));
    let enforced: Vec<_> = events.iter().filter(|event| event.enforced).collect();
    assert_eq!(enforced.len(), 2);
    assert_eq!(fleet.ejected(), [1, 2]);
    assert_eq!(enforced[0].origin, address(2), "the worst first");
    let evidence =
        Evidence::FailurePercentage { failure_percentage: 85.0, threshold: 85, requests: 100 };
    assert_eq!(enforced[1].evidence, Some(evidence));

    // Where one may go, it is the worst.
    config.max_ejection_percent = 20;
    let mut fleet = Fleet::new(6, config);
    for (host, bad) in [90, 95, 100, 0, 0, 0].into_iter().enumerate() {
        fleet.requests(host, 100 - bad, bad);
    }
    drop(fleet.wait(secs(10)));
    assert_eq!(fleet.ejected(), [2]);
}

#[test]
fn local_rates_are_judged_apart() {
    let mut config = only_consecutive(100);
    config.split_external_local_origin_errors = true;
    config.success_rate.enforcing_local_origin = 100;
    config.consecutive_local_origin_failure.failures = 0;
    let mut fleet = Fleet::new(6, config);
    for host in 0..6 {
        fleet.requests(host, 100, 0);
    }
    for _ in 0..100 {
        assert!(fleet.record(0, Outcome::Failed(Failure::Reset)).is_empty());
    }
    let events = fleet.wait(secs(10));
    assert_eq!(
        detectors(&events),
        [("success_rate_local_origin", true)],
        "what origins answer is as good as before"
    );
}

/// A host that is bad in every other interval, and judged at the end of each.
#[test]
fn flapping_at_the_intervals_frequency() {
    let config =
        Outlier { max_ejection_percent: 20, base_ejection_time: secs(10), ..Outlier::default() };
    let mut fleet = Fleet::new(5, config);
    let mut multipliers = Vec::new();
    for _ in 0..20 {
        for host in 0..5 {
            if fleet.hosts[host].is_available(fleet.now) {
                let bad = if host == 0 { 50 } else { 0 };
                fleet.requests(host, 100 - bad, bad);
            }
        }
        drop(fleet.wait(secs(10)));
        multipliers.push(fleet.multiplier(0));
    }
    // Out at 10 s for 10 s; back at 20 s, bad, out at 30 s for 20 s, and so on: never back for a
    // whole interval without being bad, so nothing decays.
    assert_eq!(multipliers[..6], [1, 1, 2, 2, 2, 3]);
    assert!(multipliers.is_sorted(), "{multipliers:?}");
}

#[test]
fn a_hung_host_is_noticed_while_its_peers_answer() {
    let mut fleet = Fleet::new(8, only_consecutive(13));
    let tick = Duration::from_millis(10);
    let mut owing = Vec::new();
    let mut noticed = None;
    // 100 requests per second and host; host 5 stops answering after half a second.
    for step in 0..300u32 {
        for host in 0..8 {
            let request = fleet.hosts[host].owe();
            if host == 5 && step >= 50 { owing.push(request) } else { request.answered() }
        }
        fleet.now += tick;
        if step % 25 == 0
            && let Some(event) = fleet.cluster.sweep(fleet.now, &mut fleet.rng).pop()
        {
            noticed.get_or_insert((fleet.now - fleet.begun, event));
        }
    }
    let (at, event) = noticed.unwrap();
    // The last answer came at 500 ms.
    assert!(at >= Duration::from_millis(1500), "{at:?}");
    assert!(at <= Duration::from_millis(1510) + 2 * fleet.cluster.pace(), "{at:?}");
    assert_eq!((event.detector, event.origin), (Some(Detector::Stall), address(5)));
    let Some(Evidence::Stall { owed, silent_ms, peers_answers }) = event.evidence else {
        panic!("{event:?}")
    };
    assert!(owed >= 100 && silent_ms >= 1000 && peers_answers >= 700, "{event:?}");
    assert_eq!(fleet.ejected(), [5]);
    assert_eq!(fleet.hosts[5].owed() as usize, owing.len());
    assert!(fleet.hosts[5].is_silent(fleet.now));
    drop(owing);
    assert_eq!(fleet.hosts[5].owed(), 0);
    // Back, and out again for another reason.
    fleet.now += secs(30);
    assert!(!fleet.hosts[5].is_silent(fleet.now));
    for _ in 0..5 {
        let answer = fleet.record(5, Outcome::Response(500));
        drop(answer);
    }
    assert_eq!(fleet.ejected(), [5]);
    assert!(!fleet.hosts[5].is_silent(fleet.now));
}

#[test]
fn silence_alone_is_no_stall() {
    let answered = |fleet: &mut Fleet, hosts: std::ops::Range<usize>, n| {
        for host in hosts {
            (0..n).for_each(|_| fleet.hosts[host].owe().answered());
        }
    };
    // Nothing is under way.
    let mut fleet = Fleet::new(8, only_consecutive(50));
    for _ in 0..10 {
        answered(&mut fleet, 1..8, 100);
        assert!(fleet.wait(secs(1)).is_empty());
    }
    // A long request, and others that are answered.
    let long = fleet.hosts[0].owe();
    for _ in 0..20 {
        answered(&mut fleet, 0..8, 10);
        assert!(fleet.wait(Duration::from_millis(500)).is_empty());
    }
    drop(long);
    // Everybody is silent.
    let all: Vec<_> = (0..8).map(|host| fleet.hosts[host].owe()).collect();
    assert!(fleet.wait(secs(10)).is_empty());
    drop(all);
    // Peers answer, but so few requests that a host may well have none.
    let one = fleet.hosts[0].owe();
    drop(fleet.wait(fleet.cluster.pace()));
    answered(&mut fleet, 1..8, 9);
    assert!(fleet.wait(secs(5)).is_empty());
    answered(&mut fleet, 1..8, 1);
    assert_eq!(detectors(&fleet.wait(secs(1))), [("stall", true)], "70 answers for 7 peers");
    drop(one);
    // A single host has no peers.
    let mut fleet = Fleet::new(1, only_consecutive(100));
    let _one = fleet.hosts[0].owe();
    assert!(fleet.wait(secs(10)).is_empty());
}

#[test]
fn clients_that_give_up_do_not_hide_a_hang() {
    let mut fleet = Fleet::new(4, only_consecutive(25));
    let mut events = Vec::new();
    let mut request = fleet.hosts[0].owe();
    for _ in 0..10 {
        for host in 1..4 {
            (0..10).for_each(|_| fleet.hosts[host].owe().answered());
        }
        events.extend(fleet.wait(Duration::from_millis(250)));
        request = fleet.hosts[0].owe();
    }
    drop(request);
    assert_eq!(detectors(&events), [("stall", true)]);
}

#[test]
fn slow_handshakes() {
    let handshakes = |fleet: &Fleet, slow: Duration| {
        for host in &fleet.hosts {
            let took = if host.address() == address(2) { slow } else { Duration::from_millis(1) };
            (0..5).for_each(|_| host.record_handshake(took));
        }
    };
    let mut config = only_consecutive(20);
    let mut fleet = Fleet::new(5, config.clone());
    handshakes(&fleet, Duration::from_millis(40));
    let events = fleet.wait(secs(10));
    assert_eq!(detectors(&events), [("handshake_latency", false)], "only reported by default");

    config.handshake_latency.enforcing = 100;
    let mut fleet = Fleet::new(5, config.clone());
    handshakes(&fleet, Duration::from_millis(5));
    assert!(fleet.wait(secs(10)).is_empty(), "five times as long, but not by 5 ms");
    handshakes(&fleet, Duration::from_millis(40));
    let events = fleet.wait(secs(10));
    assert_eq!(detectors(&events), [("handshake_latency", true)]);
    let evidence = Evidence::HandshakeLatency { p50_us: 40_960, peers_p50_us: 1024, handshakes: 5 };
    assert_eq!(events[0].evidence, Some(evidence));
    assert_eq!(fleet.ejected(), [2]);

    config.handshake_latency.action = SlowAction::Weight;
    let mut fleet = Fleet::new(5, config);
    handshakes(&fleet, Duration::from_millis(40));
    let events = fleet.wait(secs(10));
    assert_eq!((events.len(), events[0].action), (1, Action::Demote));
    assert_eq!((fleet.ejected().len(), fleet.hosts[2].share()), (0, 25));
    handshakes(&fleet, Duration::from_millis(40));
    assert!(fleet.wait(secs(10)).is_empty(), "it is known");
    handshakes(&fleet, Duration::from_millis(1));
    let events = fleet.wait(secs(10));
    assert_eq!((events[0].action, fleet.hosts[2].share()), (Action::Restore, 100));
}

#[test]
fn long_round_trips() {
    let round_trips = |fleet: &Fleet, slow_us| {
        for host in &fleet.hosts {
            let us = if host.address() == address(2) { slow_us } else { 1000 };
            let mut rtts = [0; FINE_BUCKETS];
            rtts[fine_bucket(us)] = 20;
            host.record_path(0, 0, &rtts);
        }
    };
    let mut config = only_consecutive(20);
    let mut fleet = Fleet::new(5, config.clone());
    round_trips(&fleet, 40_000);
    assert_eq!(detectors(&fleet.wait(secs(10))), [("rtt_latency", false)]);

    config.rtt_latency.enforcing = 100;
    let mut fleet = Fleet::new(5, config.clone());
    round_trips(&fleet, 5000);
    assert!(fleet.wait(secs(10)).is_empty(), "five times as long, but not by 5 ms");
    round_trips(&fleet, 40_000);
    let events = fleet.wait(secs(10));
    assert_eq!(detectors(&events), [("rtt_latency", true)]);
    let evidence = Evidence::RttLatency { p50_us: 40_960, peers_p50_us: 1024, rtts: 20 };
    assert_eq!(events[0].evidence, Some(evidence));

    // What one detector takes, the other does not give back.
    config.rtt_latency.action = SlowAction::Weight;
    let mut fleet = Fleet::new(5, config);
    for (slow_us, action, share) in
        [(40_000, Some(Action::Demote), 25), (40_000, None, 25), (1000, Some(Action::Restore), 100)]
    {
        round_trips(&fleet, slow_us);
        for host in &fleet.hosts {
            (0..5).for_each(|_| host.record_handshake(Duration::from_millis(1)));
        }
        let actions: Vec<_> = fleet.wait(secs(10)).iter().map(|e| e.action).collect();
        assert_eq!(actions, action.into_iter().collect::<Vec<_>>());
        assert_eq!(fleet.hosts[2].share(), share);
    }
}

#[test]
fn segments_sent_again() {
    let segments = |fleet: &Fleet, of_all, of_one| {
        for host in &fleet.hosts {
            let again = if host.address() == address(2) { of_one } else { of_all };
            host.record_path(200, again, &[0; FINE_BUCKETS]);
        }
    };
    let mut config = only_consecutive(20);
    let mut fleet = Fleet::new(5, config.clone());
    segments(&fleet, 0, 10);
    assert_eq!(detectors(&fleet.wait(secs(10))), [("retransmission_percentage", false)]);

    config.retransmission_percentage.enforcing = 100;
    let mut fleet = Fleet::new(5, config.clone());
    segments(&fleet, 0, 9);
    assert!(fleet.wait(secs(10)).is_empty(), "4.5 %");
    segments(&fleet, 8, 15);
    assert!(fleet.wait(secs(10)).is_empty(), "the network is bad for all");
    let few = [0; FINE_BUCKETS];
    fleet.hosts[2].record_path(199, 199, &few);
    assert!(fleet.wait(secs(10)).is_empty(), "too few");
    segments(&fleet, 1, 10);
    let events = fleet.wait(secs(10));
    assert_eq!(detectors(&events), [("retransmission_percentage", true)]);
    let evidence = Evidence::RetransmissionPercentage {
        retransmission_percentage: 5.0,
        peers_percentage: 0.5,
        threshold: 5,
        segments: 200,
    };
    assert_eq!((events[0].evidence, fleet.ejected()), (Some(evidence), vec![2]));
    let mut fleet = Fleet::new(4, config);
    segments(&fleet, 0, 100);
    assert!(fleet.wait(secs(10)).is_empty(), "too few to compare");
}

#[test]
fn a_health_check_ends_an_ejection() {
    let mut fleet = Fleet::new(10, only_consecutive(10));
    assert_eq!(fleet.hosts[0].health_check_succeeded(fleet.now), None);
    drop(fleet.fail(0, 5 + 4));
    fleet.now += secs(1);
    let event = fleet.hosts[0].health_check_succeeded(fleet.now).unwrap();
    assert_eq!((event.action, event.at), (Action::Uneject, fleet.now));
    assert!(fleet.ejected().is_empty());
    assert!(fleet.fail(0, 4).is_empty(), "nothing is held against it");
    assert_eq!(fleet.fail(0, 1)[0].multiplier, 2);

    let config =
        Outlier { successful_active_health_check_uneject_host: false, ..only_consecutive(10) };
    let mut fleet = Fleet::new(10, config);
    drop(fleet.fail(0, 5));
    assert_eq!(fleet.hosts[0].health_check_succeeded(fleet.now), None);
    assert_eq!(fleet.ejected(), [0]);
}

#[test]
fn hosts_come_and_go() {
    let mut fleet = Fleet::new(10, only_consecutive(10));
    drop(fleet.fail(0, 5));
    drop(fleet.fail(1, 4));
    // Host 0 leaves: its place is free. Host 1 stays with what is known of it.
    fleet.cluster.set_hosts(&addresses(11)[1..]);
    assert_eq!(fleet.cluster.ejected_of(), (0, 10));
    assert!(fleet.cluster.host(address(0)).is_none());
    assert!(fleet.fail(0, 20).is_empty(), "whoever still has it may go on");
    assert!(fleet.hosts[0].is_available(fleet.now));
    assert_eq!(detectors(&fleet.fail(1, 1)), [("5xx", true)]);
    assert_eq!(fleet.cluster.ejected_of(), (1, 10));
    // Host 0 is back as the same host, and as a new one; host 1 is still ejected.
    fleet.cluster.set_hosts(&addresses(10));
    assert!(Arc::ptr_eq(&fleet.hosts[0], &fleet.cluster.host(address(0)).unwrap()));
    assert_eq!(fleet.ejected(), [1]);
    let withheld = fleet.fail(0, 5);
    assert_eq!(withheld[0].withheld, Some(Withheld::MaxEjectionPercent));
    fleet.now += secs(30);
    drop(fleet.cluster.sweep(fleet.now, &mut fleet.rng));
    assert_eq!(detectors(&fleet.fail(0, 5)), [("5xx", true)]);
    // A host that nobody has kept is really new.
    fleet.hosts.clear();
    fleet.cluster.set_hosts(&addresses(10)[1..]);
    fleet.cluster.set_hosts(&addresses(10));
    assert!(fleet.cluster.host(address(0)).unwrap().is_available(fleet.now));
    assert_eq!(fleet.cluster.ejected_of(), (0, 10));
}

#[test]
fn what_the_kernel_carried_counts() {
    let mut fleet = Fleet::new(5, Outlier { max_ejection_percent: 20, ..Outlier::default() });
    drop(fleet.fail(0, 4));
    fleet.hosts[0].record_carried(0, 0);
    fleet.hosts[0].record_carried(3, 0);
    assert!(fleet.fail(0, 4).is_empty(), "it ended the run");
    (1..5).for_each(|host| fleet.hosts[host].record_carried(100, 0));
    fleet.requests(0, 19, 70);
    let events = fleet.wait(secs(10));
    let Some(Evidence::SuccessRate { success_rate, requests, .. }) = events[0].evidence else {
        panic!("{events:?}")
    };
    assert_eq!((success_rate, requests), (22.0, 100));
    fleet.hosts[1].add_owed(3);
    fleet.hosts[1].add_owed(-3);
    assert_eq!(fleet.cluster.snapshot(fleet.now).origins[1].owed, 0);
}

#[test]
fn lines_of_the_log() {
    let mut fleet = Fleet::new(2, Outlier { always_eject_one_host: true, ..only_consecutive(10) });
    fleet.now += Duration::from_millis(500);
    let ejected = fleet.fail(0, 5).remove(0);
    let line = |event: &Event, now| {
        serde_json::to_string(&event.line("web", now, 1_700_000_000_000)).unwrap()
    };
    assert_eq!(
        line(&ejected, fleet.now),
        "{\"time_unix_ms\":1700000000000,\"service\":\"web\",\"origin\":\"10.0.0.0:80\",\
         \"action\":\"eject\",\"enforced\":true,\"detector\":\"5xx\",\
         \"evidence\":{\"failures\":5,\"status\":500},\"ejections\":1,\"multiplier\":1,\
         \"until_unix_ms\":1700000030000}"
    );
    let withheld = fleet.fail(1, 5).remove(0);
    assert!(
        line(&withheld, fleet.now)
            .contains("\"enforced\":false,\"withheld\":\"max_ejection_percent\"")
    );
    let returned = fleet.wait(secs(31)).remove(0);
    // Half a second after it was back by its time.
    assert_eq!(
        line(&returned, fleet.begun + secs(31)),
        "{\"time_unix_ms\":1699999999500,\"service\":\"web\",\"origin\":\"10.0.0.0:80\",\
         \"action\":\"uneject\",\"enforced\":true,\"ejections\":1,\"multiplier\":1}"
    );
    for detector in Detector::ALL {
        assert_eq!(Detector::ALL[detector.index()], detector);
        assert_eq!(serde_json::to_value(detector).unwrap(), detector.name());
    }
}
