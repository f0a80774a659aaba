//! `[service.outlier]` and `[service.panic]`.

use super::*;
use crate::config::outlier::SlowAction;

#[test]
fn settings_and_mistakes() {
    assert_eq!(parsed(MINIMAL).services[0].outlier, None, "nobody is ejected unasked");
    let table = |keys: &str| format!("{MINIMAL}[service.outlier]\n{keys}");
    assert_eq!(parsed(&table("")).services[0].outlier, Some(Outlier::default()));
    let config = parsed(&table(
        "interval = \"5s\"\nconsecutive_5xx = 3\nenforcing_consecutive_gateway_failure = 100\n\
         max_ejection_percent = 50\nbase_ejection_time = \"10m\"\nstall_time = \"200ms\"\n\
         success_rate_stdev_factor = 1500\nsplit_external_local_origin_errors = true\n\
         consecutive_local_origin_failure = 7\nhandshake_latency_action = \"weight\"\n\
         rtt_latency_minimum = \"2ms\"\nenforcing_retransmission_percentage = 50\n\
         [service.panic]\nthreshold = 0\nfail_on_panic = true",
    ));
    let service = &config.services[0];
    let outlier = service.outlier.as_ref().unwrap();
    assert_eq!(outlier.interval, Duration::from_secs(5));
    assert_eq!(outlier.consecutive_5xx.failures, 3);
    assert_eq!(outlier.consecutive_gateway_failure.enforcing, 100);
    assert_eq!(outlier.consecutive_local_origin_failure.failures, 7);
    assert_eq!(outlier.max_ejection_time, Duration::from_mins(10), "as long as the base");
    assert_eq!(outlier.success_rate.stdev_factor, 1500);
    assert_eq!(outlier.handshake_latency.action, SlowAction::Weight);
    assert_eq!(outlier.rtt_latency.minimum, Duration::from_millis(2));
    assert_eq!(outlier.rtt_latency.action, SlowAction::Eject, "each has its own");
    assert_eq!(outlier.retransmission_percentage.enforcing, 50);
    assert_eq!(service.panic, Panic { threshold: 0, fail_on_panic: true });

    check(
        &table(
            "interval = \"2h\"\nbase_ejection_time = \"9m\"\nmax_ejection_time = \"8m\"\n\
             max_ejection_percent = 101\nenforcing_success_rate = 200\n\
             failure_percentage_threshold = 0\nsuccess_rate_minimum_hosts = 0\n\
             handshake_latency_factor = 1000\nhandshake_latency_minimum_hosts = 2\n\
             handshake_latency_action = \"ignore\"\nrtt_latency_volume = 0\n\
             retransmission_percentage_threshold = 0\nstall_time = \"1ms\"\n\
             consecutive_local_origin_failure = 5\nenforcing_local_origin_success_rate = 0\n\
             [service.panic]\nthreshold = 101",
        ),
        &[
            "service \"web\": outlier.consecutive_local_origin_failure = 5: belongs to split_external_local_origin_errors = true",
            "service \"web\": outlier.enforcing_local_origin_success_rate = 0: belongs to split_external_local_origin_errors = true",
            "service \"web\": outlier.base_ejection_time = \"9m\": must not be longer than outlier.max_ejection_time (8m)",
            "service \"web\": outlier.interval = \"2h\": must be at most 1h",
            "service \"web\": outlier.max_ejection_percent = 101: must be 0..=100",
            "service \"web\": outlier.success_rate_minimum_hosts = 0: must be 1..=1000000",
            "service \"web\": outlier.enforcing_success_rate = 200: must be 0..=100",
            "service \"web\": outlier.failure_percentage_threshold = 0: must be 1..=100",
            "service \"web\": outlier.handshake_latency_action = \"ignore\": must be \"eject\" or \"weight\"",
            "service \"web\": outlier.handshake_latency_factor = 1000: must be 1500..=1000000",
            "service \"web\": outlier.handshake_latency_minimum_hosts = 2: must be 3..=1000000",
            "service \"web\": outlier.rtt_latency_volume = 0: must be 1..=1000000",
            "service \"web\": outlier.retransmission_percentage_threshold = 0: must be 1..=100",
            "service \"web\": outlier.stall_time = \"1ms\": must be at least 50ms",
            "service \"web\": panic.threshold = 101: must be 0..=100",
        ],
    );
    check(
        &intercepting("[\"origins\"]", "route = \"dialled\"\n[service.outlier]"),
        &[
            "service \"i\": outlier: belongs to route = \"balance\": there is no other origin than the dialled one",
        ],
    );
    let error = parse(&table("consecutive_5XX = 5"), "f").unwrap_err().to_string();
    assert!(error.contains("unknown key `consecutive_5XX`"), "{error}");
    assert_eq!(
        warnings(&parsed(&table("stall_time = \"10m\"\nmax_ejection_percent = 60\n"))),
        [
            "service \"web\": outlier.max_ejection_percent = 60: of 1 origin none is ever ejected, unless always_eject_one_host is set",
            "service \"web\": outlier.max_ejection_percent = 60: ejections can leave fewer than panic.threshold (50 %), and then have no effect",
            "service \"web\": outlier.stall_time is not shorter than timeouts.origin_stall, which comes first",
        ]
    );
}
