//! Rules of `[service.health_check]`.

use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::time::Duration;

use hyper::Method;
use hyper::header::HeaderValue;
use hyper::http::uri::PathAndQuery;

use super::super::raw;
use super::check::Checker;
use super::{quoted, quoted_list};
use crate::config::Route;
use crate::config::health::{HealthCheck, Http, Initial, Kind};

/// An origin that every gateway of a fleet checks more often than this has reason to complain.
const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// Final responses only (RFC 9110 section 15).
const STATUSES: RangeInclusive<u16> = 200..=599;

/// The table that says how origins are checked; `None` without a kind, or if what it asks for
/// cannot be said.
pub(super) fn health_check(
    check: &mut Checker,
    raw: &raw::HealthCheck,
    service: &str,
    route: Route,
) -> Option<HealthCheck> {
    if route != Route::Balance {
        let rule = "belongs to route = \"balance\"; a dialled origin has no other in its place";
        check.broken("health_check", "", rule);
    }
    let kinds = &[("tcp", false), ("http", true)];
    let kind = match check.choice("health_check.type", raw.kind.as_deref(), kinds, None) {
        Some(true) => http(check, raw, service).map(Kind::Http),
        Some(false) => {
            no_http(check, raw);
            Some(Kind::Tcp)
        }
        None => None,
    };
    let interval = check.duration_from(
        "health_check.interval",
        raw.interval.as_deref(),
        Duration::from_secs(5),
        INTERVAL_MIN,
    );
    // Lowering the interval alone is no mistake.
    let timeout = check.duration(
        "health_check.timeout",
        raw.timeout.as_deref(),
        Duration::from_secs(1).min(interval),
    );
    if timeout > interval {
        let rule = format!(
            "must not be longer than health_check.interval ({})",
            humantime::format_duration(interval)
        );
        let value = quoted(raw.timeout.as_deref().unwrap_or_default());
        check.broken("health_check.timeout", value, rule);
    }
    let unhealthy_interval = check.duration_from(
        "health_check.unhealthy_interval",
        raw.unhealthy_interval.as_deref(),
        interval,
        INTERVAL_MIN,
    );
    let mut threshold = |key: &str, value: Option<u32>, default: u32| {
        let value = check.number(key, value, default, 1..=u32::MAX);
        NonZeroU32::new(value).unwrap_or(NonZeroU32::MIN)
    };
    let unhealthy_threshold =
        threshold("health_check.unhealthy_threshold", raw.unhealthy_threshold, 3);
    let healthy_threshold = threshold("health_check.healthy_threshold", raw.healthy_threshold, 2);
    let interval_jitter_percent = check.number(
        "health_check.interval_jitter_percent",
        raw.interval_jitter_percent,
        10,
        0..=100,
    );
    let initial = check.choice(
        "health_check.initial",
        raw.initial.as_deref(),
        &[("healthy", Initial::Healthy), ("unhealthy", Initial::Unhealthy)],
        Some(Initial::default()),
    );
    Some(HealthCheck {
        kind: kind?,
        interval,
        interval_jitter_percent,
        unhealthy_interval,
        timeout,
        unhealthy_threshold,
        healthy_threshold,
        initial: initial?,
    })
}

fn http(check: &mut Checker, raw: &raw::HealthCheck, service: &str) -> Option<Http> {
    let head = check.choice(
        "health_check.method",
        raw.method.as_deref(),
        &[("GET", false), ("HEAD", true)],
        Some(false),
    );
    let path = raw.path.as_deref().unwrap_or_default();
    let plain = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
    let usable = path.starts_with('/') && plain(path) && !path.contains('#');
    let parsed_path = path.parse::<PathAndQuery>().ok().filter(|_| usable);
    if parsed_path.is_none() {
        let (value, needs) = match &raw.path {
            Some(path) => (quoted(path), "must be"),
            None => (String::new(), "is needed:"),
        };
        let rule = format!("{needs} a path such as \"/healthz\", as it stands in a request");
        check.broken("health_check.path", value, rule);
    }
    // A service's name that is no header value is a problem of its own.
    let host = raw.host.as_deref().unwrap_or(service);
    let parsed_host = HeaderValue::from_str(host).ok().filter(|_| plain(host));
    if let Some(text) = raw.host.as_deref().filter(|_| parsed_host.is_none()) {
        let rule = "must be a host as in a request, such as \"www.example.com\"";
        check.broken("health_check.host", quoted(text), rule);
    }
    let expected = raw.expected_statuses.as_deref();
    if expected.is_some_and(<[String]>::is_empty) {
        let rule = "must not be empty: no answer would ever do";
        check.broken("health_check.expected_statuses", "[]", rule);
    }
    let expected_statuses = match expected {
        None => vec![200..=200],
        Some(texts) => statuses(check, "health_check.expected_statuses", texts),
    };
    let retriable = raw.retriable_statuses.as_deref().unwrap_or_default();
    let retriable_statuses = statuses(check, "health_check.retriable_statuses", retriable);
    Some(Http {
        method: if head? { Method::HEAD } else { Method::GET },
        path: parsed_path?,
        host: parsed_host?,
        expected_statuses,
        retriable_statuses,
        reuse_connection: raw.reuse_connection.unwrap_or(true),
    })
}

fn no_http(check: &mut Checker, raw: &raw::HealthCheck) {
    let list = |texts: &Option<Vec<String>>| texts.as_deref().map(quoted_list);
    for (key, value) in [
        ("health_check.path", raw.path.as_deref().map(quoted)),
        ("health_check.host", raw.host.as_deref().map(quoted)),
        ("health_check.method", raw.method.as_deref().map(quoted)),
        ("health_check.expected_statuses", list(&raw.expected_statuses)),
        ("health_check.retriable_statuses", list(&raw.retriable_statuses)),
        ("health_check.reuse_connection", raw.reuse_connection.map(|on| on.to_string())),
    ] {
        check.absent(key, value, "belongs to type = \"http\"");
    }
}

/// Statuses and ranges of them, both ends included (Envoy's exclude the upper one).
fn statuses(check: &mut Checker, key: &str, texts: &[String]) -> Vec<RangeInclusive<u16>> {
    let mut all = Vec::new();
    for text in texts {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let status = |text: &str| text.parse().ok().filter(|n| STATUSES.contains(n));
        match (status(first), status(last)) {
            (Some(first), Some(last)) if first <= last => all.push(first..=last),
            _ => {
                let rule = format!(
                    "must be a status or a range of them, such as \"204\" or \"200-299\", within {}-{}",
                    STATUSES.start(),
                    STATUSES.end()
                );
                check.broken(key, quoted(text), rule);
            }
        }
    }
    all
}
