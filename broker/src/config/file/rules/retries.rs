//! Rules of `[service.retries]`.

use super::super::raw;
use super::check::Checker;
use super::quoted;
use crate::config::Protocol;
use crate::config::retries::{Condition, Conditions, Retries, RetryLimit};

/// More sockets for one request than any fleet can lose while it waits.
const ATTEMPTS_MAX: usize = 16;
/// More retries than a process can have sockets.
const RETRIES_MAX: usize = 1 << 20;

pub(super) fn retries(check: &mut Checker, raw: &raw::Retries, protocol: Protocol) -> Retries {
    let default = Retries::default();
    let opaque = matches!(protocol, Protocol::Opaque { .. });
    if opaque {
        let rule =
            "belongs to protocol = \"http1\": an opaque client's bytes are sent on one socket only";
        check.absent("retries.attempts", raw.attempts, rule);
    }
    let usual = if opaque { [Condition::ConnectFailure].into_iter().collect() } else { default.on };
    Retries {
        on: raw.retry_on.as_ref().map_or(usual, |words| conditions(check, words, opaque)),
        limit: limit(check, raw, default.limit),
        attempts: check.number(
            "retries.attempts",
            raw.attempts,
            default.attempts,
            1..=ATTEMPTS_MAX,
        ),
    }
}

fn conditions(check: &mut Checker, words: &[String], opaque: bool) -> Conditions {
    let mut all = Vec::new();
    for word in words {
        let known = Condition::ALL.iter().find(|(name, _)| name == word).map(|(_, c)| *c);
        let rule = match known {
            None => {
                let names: Vec<_> = Condition::ALL.iter().map(|(name, _)| quoted(name)).collect();
                format!("must be {}", names.join(" or "))
            }
            Some(condition) if all.contains(&condition) => "is given twice".to_owned(),
            Some(condition) if opaque && condition != Condition::ConnectFailure => {
                "belongs to protocol = \"http1\"; opaque bytes cannot be sent twice".to_owned()
            }
            Some(condition) => {
                all.push(condition);
                continue;
            }
        };
        check.broken("retries.retry_on", quoted(word), rule);
    }
    all.into_iter().collect()
}

fn limit(check: &mut Checker, raw: &raw::Retries, default: RetryLimit) -> RetryLimit {
    let RetryLimit::Budget { percent, min_concurrency } = default else { return default };
    let key = "retries.min_concurrency";
    let min_concurrency = check.number(key, raw.min_concurrency, min_concurrency, 1..=RETRIES_MAX);
    let percent = check.number("retries.budget_percent", raw.budget_percent, percent, 0.0..=100.0);
    let Some(max) = raw.max_retries else {
        return RetryLimit::Budget { percent, min_concurrency };
    };
    let rule = "cannot be given together with `max_retries`, which is a fixed number";
    check.absent("retries.budget_percent", raw.budget_percent, rule);
    check.absent("retries.min_concurrency", raw.min_concurrency, rule);
    RetryLimit::Fixed(check.number("retries.max_retries", Some(max), 3, 1..=RETRIES_MAX))
}
