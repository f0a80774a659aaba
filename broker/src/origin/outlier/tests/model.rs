//! The same outcomes at the same times, for the real thing and for a model that is as plain as the
//! rules are written.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Record { host: usize, status: u16, times: u8 },
    Wait { ms: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let status = prop_oneof![2 => Just(200u16), 3 => Just(500), 3 => Just(503)];
    prop_oneof![
        4 => (0usize..6, status, 1u8..7)
            .prop_map(|(host, status, times)| Step::Record { host, status, times }),
        1 => prop_oneof![0u64..1000, 1000u64..40_000].prop_map(|ms| Step::Wait { ms }),
    ]
}

/// One host by the rules; times in milliseconds.
#[derive(Clone, Default)]
struct Model {
    errors: u32,
    gateway_failures: u32,
    until: Option<u64>,
    returned: Option<u64>,
    multiplier: u32,
    ejections: u32,
}

struct Rules {
    errors: u32,
    gateway_failures: u32,
    percent: usize,
    always_one: bool,
}

const INTERVAL: u64 = 10_000;
const BASE: u64 = 3000;
const LONGEST: u64 = 10_000;

impl Model {
    fn eject(hosts: &mut [Self], host: usize, rules: &Rules, now: u64) {
        let ejected = hosts.iter().filter(|host| host.until.is_some()).count();
        let within = (ejected + 1) as f64 * 100.0 / hosts.len() as f64 <= rules.percent as f64;
        let host = &mut hosts[host];
        if host.until.is_some() || !(within || rules.always_one && ejected == 0) {
            return;
        }
        host.ejections += 1;
        if u64::from(host.multiplier) * BASE < LONGEST + BASE {
            host.multiplier += 1;
        }
        host.until = Some(now + (u64::from(host.multiplier) * BASE).min(LONGEST));
    }

    fn record(hosts: &mut [Self], host: usize, status: u16, rules: &Rules, now: u64) {
        if status < 500 {
            (hosts[host].errors, hosts[host].gateway_failures) = (0, 0);
            return;
        }
        if status == 503 {
            hosts[host].gateway_failures += 1;
            if hosts[host].gateway_failures == rules.gateway_failures {
                hosts[host].gateway_failures = 0;
                Self::eject(hosts, host, rules, now);
            }
        } else {
            hosts[host].gateway_failures = 0;
        }
        hosts[host].errors += 1;
        if hosts[host].errors == rules.errors {
            hosts[host].errors = 0;
            Self::eject(hosts, host, rules, now);
        }
    }

    fn return_if_due(&mut self, now: u64) {
        if let Some(until) = self.until.filter(|&until| until <= now) {
            (self.until, self.returned) = (None, Some(until));
            (self.errors, self.gateway_failures) = (0, 0);
        }
    }
}

proptest! {
    #[test]
    fn agrees_with_the_rules(
        steps in prop::collection::vec(step(), 1..80),
        errors in 1u32..8, gateway_failures in 1u32..8,
        percent in 0u8..=100, always_one: bool, hosts in 1usize..7,
    ) {
        let rules = Rules { errors, gateway_failures, percent: percent.into(), always_one };
        let mut config = Outlier {
            interval: Duration::from_millis(INTERVAL),
            base_ejection_time: Duration::from_millis(BASE),
            max_ejection_time: Duration::from_millis(LONGEST),
            always_eject_one_host: always_one,
            consecutive_5xx: Consecutive { failures: errors, enforcing: 100 },
            consecutive_gateway_failure: Consecutive { failures: gateway_failures, enforcing: 100 },
            ..only_consecutive(percent)
        };
        config.stall.enforcing = 0;
        let mut fleet = Fleet::new(hosts, config);
        let mut models = vec![Model::default(); hosts];
        let mut now = 0;
        for step in steps {
            match step {
                Step::Record { host, status, times } => for _ in 0..times {
                    let host = host % hosts;
                    drop(fleet.record(host, Outcome::Response(status)));
                    Model::record(&mut models, host, status, &rules, now);
                },
                // Looks come every second, and at the end of each interval.
                Step::Wait { ms } => for _ in 0..ms {
                    now += 1;
                    let look = now % 1000 == 0;
                    fleet.now += Duration::from_millis(1);
                    if look {
                        drop(fleet.cluster.sweep(fleet.now, &mut fleet.rng));
                    }
                    for model in &mut models {
                        // A host without requests is back for the others with the next look.
                        if look { model.return_if_due(now) }
                        let decays = model.until.is_none()
                            && model.returned.is_some_and(|back| now - back >= INTERVAL);
                        if now % INTERVAL == 0 && decays {
                            model.multiplier = model.multiplier.saturating_sub(1);
                        }
                    }
                },
            }
            if let Step::Wait { .. } = step {
                // Requests find out by themselves that a host is back.
                for (host, model) in fleet.hosts.iter().zip(&mut models) {
                    host.uneject_if_due(fleet.now);
                    model.return_if_due(now);
                }
            }
            let (ejected, all) = fleet.cluster.ejected_of();
            prop_assert!(ejected * 100 <= usize::from(percent) * all || always_one && ejected == 1);
            for (host, model) in fleet.hosts.iter().zip(&models) {
                prop_assert_eq!(host.is_available(fleet.now), model.until.is_none());
                prop_assert_eq!(host.ejections(), model.ejections);
                prop_assert_eq!(host.multiplier(), model.multiplier);
            }
        }
    }
}
