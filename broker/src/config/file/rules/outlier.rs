//! Rules of `[service.outlier]` and `[service.panic]`.

use std::time::Duration;

use super::super::raw;
use super::check::Checker;
use super::quoted;
use crate::config::Route;
use crate::config::outlier::{
    Consecutive, FailurePercentage, Latency, Outlier, Panic, RetransmissionPercentage, SlowAction,
    Stall, SuccessRate,
};

/// Counters of an interval must not overflow at a million requests per second.
const INTERVAL_MAX: Duration = Duration::from_hours(1);
/// Silence is looked for some times within it, and each look has to be worth something.
const STALL_MIN: Duration = Duration::from_millis(50);
/// No detector needs more hosts or requests to be sure.
const VOLUME_MAX: u32 = 1_000_000;

pub(super) fn outlier(check: &mut Checker, raw: &raw::Outlier, route: Route) -> Outlier {
    if route != Route::Balance {
        let rule = "belongs to route = \"balance\": there is no other origin than the dialled one";
        check.broken("outlier", "", rule);
    }
    let default = Outlier::default();
    let split = raw.split_external_local_origin_errors.unwrap_or(false);
    if !split {
        let rule = "belongs to split_external_local_origin_errors = true";
        let mut absent = |key: &str, value: Option<u32>| check.absent(key, value, rule);
        absent("outlier.consecutive_local_origin_failure", raw.consecutive_local_origin_failure);
        let enforcing = [
            (
                "outlier.enforcing_consecutive_local_origin_failure",
                raw.enforcing_consecutive_local_origin_failure,
            ),
            (
                "outlier.enforcing_local_origin_success_rate",
                raw.enforcing_local_origin_success_rate,
            ),
            (
                "outlier.enforcing_failure_percentage_local_origin",
                raw.enforcing_failure_percentage_local_origin,
            ),
        ];
        for (key, value) in enforcing {
            absent(key, value.map(u32::from));
        }
    }
    let (base_ejection_time, max_ejection_time) = ejection_times(check, raw, &default);
    Outlier {
        interval: interval(check, raw, default.interval),
        base_ejection_time,
        max_ejection_time,
        max_ejection_time_jitter: check.duration_from(
            "outlier.max_ejection_time_jitter",
            raw.max_ejection_time_jitter.as_deref(),
            default.max_ejection_time_jitter,
            Duration::ZERO,
        ),
        max_ejection_percent: percent(
            check,
            "max_ejection_percent",
            raw.max_ejection_percent,
            default.max_ejection_percent,
        ),
        always_eject_one_host: raw.always_eject_one_host.unwrap_or(default.always_eject_one_host),
        successful_active_health_check_uneject_host: raw
            .successful_active_health_check_uneject_host
            .unwrap_or(default.successful_active_health_check_uneject_host),
        split_external_local_origin_errors: split,
        consecutive_5xx: Consecutive {
            failures: raw.consecutive_5xx.unwrap_or(default.consecutive_5xx.failures),
            enforcing: percent(
                check,
                "enforcing_consecutive_5xx",
                raw.enforcing_consecutive_5xx,
                default.consecutive_5xx.enforcing,
            ),
        },
        consecutive_gateway_failure: Consecutive {
            failures: raw
                .consecutive_gateway_failure
                .unwrap_or(default.consecutive_gateway_failure.failures),
            enforcing: percent(
                check,
                "enforcing_consecutive_gateway_failure",
                raw.enforcing_consecutive_gateway_failure,
                default.consecutive_gateway_failure.enforcing,
            ),
        },
        consecutive_local_origin_failure: Consecutive {
            failures: raw
                .consecutive_local_origin_failure
                .unwrap_or(default.consecutive_local_origin_failure.failures),
            enforcing: percent(
                check,
                "enforcing_consecutive_local_origin_failure",
                raw.enforcing_consecutive_local_origin_failure,
                default.consecutive_local_origin_failure.enforcing,
            ),
        },
        success_rate: success_rate(check, raw, default.success_rate),
        failure_percentage: failure_percentage(check, raw, default.failure_percentage),
        handshake_latency: handshake_latency(check, raw, default.handshake_latency),
        rtt_latency: rtt_latency(check, raw, default.rtt_latency),
        retransmission_percentage: retransmission_percentage(
            check,
            raw,
            default.retransmission_percentage,
        ),
        stall: stall(check, raw, default.stall),
    }
}

pub(super) fn panic(check: &mut Checker, raw: &raw::Panic) -> Panic {
    let default = Panic::default();
    Panic {
        threshold: check.number("panic.threshold", raw.threshold, default.threshold, 0..=100),
        fail_on_panic: raw.fail_on_panic.unwrap_or(default.fail_on_panic),
    }
}

fn percent(check: &mut Checker, key: &str, value: Option<u8>, default: u8) -> u8 {
    check.number(&format!("outlier.{key}"), value, default, 0..=100)
}

fn volume(check: &mut Checker, key: &str, value: Option<u32>, default: u32) -> u32 {
    check.number(&format!("outlier.{key}"), value, default, 1..=VOLUME_MAX)
}

fn interval(check: &mut Checker, raw: &raw::Outlier, default: Duration) -> Duration {
    let interval = check.duration("outlier.interval", raw.interval.as_deref(), default);
    if interval > INTERVAL_MAX {
        let text = quoted(raw.interval.as_deref().unwrap_or_default());
        check.broken("outlier.interval", text, "must be at most 1h");
    }
    interval
}

fn ejection_times(
    check: &mut Checker,
    raw: &raw::Outlier,
    default: &Outlier,
) -> (Duration, Duration) {
    let base = check.duration(
        "outlier.base_ejection_time",
        raw.base_ejection_time.as_deref(),
        default.base_ejection_time,
    );
    let max = check.duration(
        "outlier.max_ejection_time",
        raw.max_ejection_time.as_deref(),
        // Raising the base alone is no mistake.
        default.max_ejection_time.max(base),
    );
    if base > max {
        let text = raw.base_ejection_time.as_deref().unwrap_or("30s");
        let rule = format!(
            "must not be longer than outlier.max_ejection_time ({})",
            humantime::format_duration(max)
        );
        check.broken("outlier.base_ejection_time", quoted(text), rule);
    }
    (base, max)
}

fn success_rate(check: &mut Checker, raw: &raw::Outlier, default: SuccessRate) -> SuccessRate {
    SuccessRate {
        minimum_hosts: volume(
            check,
            "success_rate_minimum_hosts",
            raw.success_rate_minimum_hosts,
            default.minimum_hosts,
        ),
        request_volume: volume(
            check,
            "success_rate_request_volume",
            raw.success_rate_request_volume,
            default.request_volume,
        ),
        stdev_factor: check.number(
            "outlier.success_rate_stdev_factor",
            raw.success_rate_stdev_factor,
            default.stdev_factor,
            0..=u32::MAX,
        ),
        enforcing: percent(
            check,
            "enforcing_success_rate",
            raw.enforcing_success_rate,
            default.enforcing,
        ),
        enforcing_local_origin: percent(
            check,
            "enforcing_local_origin_success_rate",
            raw.enforcing_local_origin_success_rate,
            default.enforcing_local_origin,
        ),
    }
}

fn failure_percentage(
    check: &mut Checker,
    raw: &raw::Outlier,
    default: FailurePercentage,
) -> FailurePercentage {
    FailurePercentage {
        threshold: check.number(
            "outlier.failure_percentage_threshold",
            raw.failure_percentage_threshold,
            default.threshold,
            1..=100,
        ),
        minimum_hosts: volume(
            check,
            "failure_percentage_minimum_hosts",
            raw.failure_percentage_minimum_hosts,
            default.minimum_hosts,
        ),
        request_volume: volume(
            check,
            "failure_percentage_request_volume",
            raw.failure_percentage_request_volume,
            default.request_volume,
        ),
        enforcing: percent(
            check,
            "enforcing_failure_percentage",
            raw.enforcing_failure_percentage,
            default.enforcing,
        ),
        enforcing_local_origin: percent(
            check,
            "enforcing_failure_percentage_local_origin",
            raw.enforcing_failure_percentage_local_origin,
            default.enforcing_local_origin,
        ),
    }
}

/// `[service.outlier]` has the same settings for handshakes and for round trips.
struct RawLatency<'a> {
    name: &'static str,
    factor: Option<u32>,
    minimum: Option<&'a str>,
    minimum_hosts: Option<u32>,
    volume: Option<u32>,
    action: Option<&'a str>,
    enforcing: Option<u8>,
}

fn handshake_latency(check: &mut Checker, raw: &raw::Outlier, default: Latency) -> Latency {
    let raw = RawLatency {
        name: "handshake_latency",
        factor: raw.handshake_latency_factor,
        minimum: raw.handshake_latency_minimum.as_deref(),
        minimum_hosts: raw.handshake_latency_minimum_hosts,
        volume: raw.handshake_latency_volume,
        action: raw.handshake_latency_action.as_deref(),
        enforcing: raw.enforcing_handshake_latency,
    };
    latency(check, &raw, default)
}

fn rtt_latency(check: &mut Checker, raw: &raw::Outlier, default: Latency) -> Latency {
    let raw = RawLatency {
        name: "rtt_latency",
        factor: raw.rtt_latency_factor,
        minimum: raw.rtt_latency_minimum.as_deref(),
        minimum_hosts: raw.rtt_latency_minimum_hosts,
        volume: raw.rtt_latency_volume,
        action: raw.rtt_latency_action.as_deref(),
        enforcing: raw.enforcing_rtt_latency,
    };
    latency(check, &raw, default)
}

fn latency(check: &mut Checker, raw: &RawLatency<'_>, default: Latency) -> Latency {
    let name = raw.name;
    let action = check.choice(
        &format!("outlier.{name}_action"),
        raw.action,
        &[("eject", SlowAction::Eject), ("weight", SlowAction::Weight)],
        Some(default.action),
    );
    Latency {
        // Medians are known to a quarter.
        factor: check.number(
            &format!("outlier.{name}_factor"),
            raw.factor,
            default.factor,
            1500..=1_000_000,
        ),
        minimum: check.duration_from(
            &format!("outlier.{name}_minimum"),
            raw.minimum,
            default.minimum,
            Duration::ZERO,
        ),
        minimum_hosts: check.number(
            &format!("outlier.{name}_minimum_hosts"),
            raw.minimum_hosts,
            default.minimum_hosts,
            // Of two, nobody can tell which is the odd one.
            3..=VOLUME_MAX,
        ),
        volume: volume(check, &format!("{name}_volume"), raw.volume, default.volume),
        action: action.unwrap_or_default(),
        enforcing: percent(check, &format!("enforcing_{name}"), raw.enforcing, default.enforcing),
    }
}

fn retransmission_percentage(
    check: &mut Checker,
    raw: &raw::Outlier,
    default: RetransmissionPercentage,
) -> RetransmissionPercentage {
    RetransmissionPercentage {
        threshold: check.number(
            "outlier.retransmission_percentage_threshold",
            raw.retransmission_percentage_threshold,
            default.threshold,
            1..=100,
        ),
        minimum_hosts: check.number(
            "outlier.retransmission_percentage_minimum_hosts",
            raw.retransmission_percentage_minimum_hosts,
            default.minimum_hosts,
            3..=VOLUME_MAX,
        ),
        segment_volume: volume(
            check,
            "retransmission_percentage_segment_volume",
            raw.retransmission_percentage_segment_volume,
            default.segment_volume,
        ),
        enforcing: percent(
            check,
            "enforcing_retransmission_percentage",
            raw.enforcing_retransmission_percentage,
            default.enforcing,
        ),
    }
}

fn stall(check: &mut Checker, raw: &raw::Outlier, default: Stall) -> Stall {
    Stall {
        time: check.duration_from(
            "outlier.stall_time",
            raw.stall_time.as_deref(),
            default.time,
            STALL_MIN,
        ),
        volume: volume(check, "stall_request_volume", raw.stall_request_volume, default.volume),
        enforcing: percent(check, "enforcing_stall", raw.enforcing_stall, default.enforcing),
    }
}
