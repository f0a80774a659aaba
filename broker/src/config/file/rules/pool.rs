//! Rules of `[service.pool]` and `[service.timeouts]`.

use std::time::Duration;

use super::super::raw;
use super::check::Checker;
use super::quoted;
use crate::config::{Keepalive, Limits, PoolConfig, Protocol, Refuse, Route, Timeouts};

const PREWARM: usize = 2;
/// More handshakes than any worker can make.
const PREWARM_RATE_MAX: u32 = 1_000_000;
/// More sockets than a process can have.
const SOCKETS_MAX: usize = 1 << 20;
/// The kernel's own limits, in whole seconds: `MAX_TCP_KEEPIDLE`, `MAX_TCP_KEEPINTVL`,
/// `MAX_TCP_KEEPCNT`.
const KEEPALIVE_SECS_MAX: u64 = 32_767;
const KEEPALIVE_COUNT_MAX: u32 = 127;

const DEFAULT_KEEPALIVE: Keepalive =
    Keepalive { idle: Duration::from_secs(30), interval: Duration::from_secs(10), count: 3 };

pub(super) fn pool(
    check: &mut Checker,
    raw: raw::Pool,
    limits: &Limits,
    protocol: Protocol,
    route: Route,
) -> PoolConfig {
    let max_idle = check.number("pool.max_idle", raw.max_idle, 64, 0..=SOCKETS_MAX);
    let max_connections = limits.max_connections;
    // A pool that only hands out fresh sockets keeps none of those that come back.
    let opaque = matches!(protocol, Protocol::Opaque { .. });
    let prewarm_max = if opaque { max_connections } else { max_connections.min(max_idle) };
    let prewarm_wanted = if route == Route::Balance { PREWARM } else { 0 };
    let prewarm = raw.prewarm.unwrap_or(prewarm_wanted.min(prewarm_max));
    if prewarm > max_connections {
        let rule = format!("must not be larger than limits.max_connections ({max_connections})");
        check.broken("pool.prewarm", prewarm, rule);
    }
    if prewarm > max_idle && !opaque {
        let rule = format!("must not be larger than pool.max_idle ({max_idle})");
        check.broken("pool.prewarm", prewarm, rule);
    }
    let backoff_base =
        check.duration("pool.backoff_base", raw.backoff_base.as_deref(), Duration::from_millis(50));
    // Raising the base alone is no mistake.
    let backoff_max_default = Duration::from_secs(1).max(backoff_base);
    let backoff_max =
        check.duration("pool.backoff_max", raw.backoff_max.as_deref(), backoff_max_default);
    if backoff_base > backoff_max {
        check.broken(
            "pool.backoff_base",
            quoted(raw.backoff_base.as_deref().unwrap_or("50ms")),
            format!(
                "must not be longer than pool.backoff_max ({})",
                humantime::format_duration(backoff_max)
            ),
        );
    }
    PoolConfig {
        prewarm,
        max_idle,
        idle_ttl: check.duration("pool.idle_ttl", raw.idle_ttl.as_deref(), Duration::from_secs(30)),
        max_lifetime: check.duration(
            "pool.max_lifetime",
            raw.max_lifetime.as_deref(),
            Duration::from_mins(10),
        ),
        max_requests: check.number("pool.max_requests", raw.max_requests, 10_000, 1..=u64::MAX),
        queue_timeout: check.duration(
            "pool.queue_timeout",
            raw.queue_timeout.as_deref(),
            Duration::from_secs(5),
        ),
        prewarm_rate: check.number(
            "pool.prewarm_rate",
            raw.prewarm_rate,
            100,
            1..=PREWARM_RATE_MAX,
        ),
        connect_timeout: check.duration(
            "pool.connect_timeout",
            raw.connect_timeout.as_deref(),
            Duration::from_secs(2),
        ),
        max_dials: check.number("pool.max_dials", raw.max_dials, 8, 1..=SOCKETS_MAX),
        backoff_base,
        backoff_max,
        keepalive: keepalive(check, raw.keepalive),
    }
}

/// `table` is the one that the keys are in.
pub(super) fn limits(
    check: &mut Checker,
    table: &str,
    raw: &raw::Limits,
    protocol: Protocol,
    intercepts: bool,
) -> Limits {
    let key = |key: &str| format!("{table}.{key}");
    if matches!(protocol, Protocol::Opaque { .. }) {
        let rule = "belongs to protocol = \"http1\"; opaque connections have no exchanges to count";
        check.absent(&key("max_requests"), raw.max_requests, rule);
    }
    let mut number = |name: &str, value: Option<usize>, default: usize, min: usize| {
        check.number(&key(name), value, default, min..=SOCKETS_MAX)
    };
    let max_connections = number("max_connections", raw.max_connections, 1024, 1);
    let max_connections_per_origin = raw
        .max_connections_per_origin
        .map(|max| number("max_connections_per_origin", Some(max), max_connections, 1));
    Limits {
        max_connections,
        max_connections_per_origin,
        one_connection_per_origin: raw.one_connection_per_origin.unwrap_or(false),
        max_pending: number("max_pending", raw.max_pending, 1024, 0),
        max_requests: number("max_requests", raw.max_requests, 1024, 1),
        refuse: refuse(check, &key("refuse"), raw, intercepts),
    }
}

fn refuse(check: &mut Checker, key: &str, raw: &raw::Limits, intercepts: bool) -> Refuse {
    let choices = [("response", Refuse::Response), ("connect", Refuse::Connect)];
    let refuse = check.choice(key, raw.refuse.as_deref(), &choices, Some(Refuse::default()));
    let refuse = refuse.unwrap_or_default();
    if refuse == Refuse::Connect && !intercepts {
        let rule =
            "belongs to `intercept`: other clients are connected before the broker sees them";
        check.broken(key, quoted("connect"), rule);
    }
    if refuse == Refuse::Connect && raw.max_pending == Some(0) {
        let rule = "needs max_pending of at least 1: who waits shows that nothing is left";
        check.broken(key, quoted("connect"), rule);
    }
    refuse
}

fn keepalive(check: &mut Checker, raw: Option<raw::Keepalive>) -> Option<Keepalive> {
    let table = match raw {
        Some(raw::Keepalive::Off) => return None,
        Some(raw::Keepalive::On(table)) => table,
        None => return Some(DEFAULT_KEEPALIVE),
    };
    let mut seconds = |key: &str, text: Option<raw::Time>, default: Duration| {
        let d = check.duration(key, text.as_deref(), default);
        if d.subsec_nanos() != 0 || d.as_secs() > KEEPALIVE_SECS_MAX {
            let rule = format!("must be whole seconds, at most {KEEPALIVE_SECS_MAX}");
            check.broken(key, quoted(text.as_deref().unwrap_or_default()), rule);
        }
        d
    };
    Some(Keepalive {
        idle: seconds("pool.keepalive.idle", table.idle, DEFAULT_KEEPALIVE.idle),
        interval: seconds("pool.keepalive.interval", table.interval, DEFAULT_KEEPALIVE.interval),
        count: check.number(
            "pool.keepalive.count",
            table.count,
            DEFAULT_KEEPALIVE.count,
            1..=KEEPALIVE_COUNT_MAX,
        ),
    })
}

pub(super) fn timeouts(check: &mut Checker, raw: &raw::Timeouts) -> Timeouts {
    Timeouts {
        client_idle: check.duration(
            "timeouts.client_idle",
            raw.client_idle.as_deref(),
            Duration::from_secs(75),
        ),
        client_stall: check.duration(
            "timeouts.client_stall",
            raw.client_stall.as_deref(),
            Duration::from_secs(30),
        ),
        origin_stall: check.duration(
            "timeouts.origin_stall",
            raw.origin_stall.as_deref(),
            Duration::from_mins(5),
        ),
        tunnel_idle: check.duration(
            "timeouts.tunnel_idle",
            raw.tunnel_idle.as_deref(),
            Duration::from_hours(1),
        ),
    }
}
