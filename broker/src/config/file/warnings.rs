//! What is allowed, but probably not meant.

use std::net::SocketAddr;

use ipnet::IpNet;

use crate::config::retries::{Condition, RetryLimit};
use crate::config::{Affinity, Config, Intercept, OpaqueReuse, Protocol, Route, Service};
use crate::report::plural;

/// Advice about a valid configuration, for `broker check` and the log.
#[must_use]
pub fn warnings(config: &Config) -> Vec<String> {
    let mut all = Vec::new();
    for service in &config.services {
        let mut warn = |text: &str| all.push(format!("service {:?}: {text}", service.name));
        about_limits(service, config.workers.get(), &mut warn);
        if service.high_of.is_some() {
            // The rest was said of the service itself.
            continue;
        }
        about_pool(service, &mut warn);
        about_retries(service, &mut warn);
        about_outliers(service, &mut warn);
        about_origins(service, config, &mut warn);
        if matches!(service.route, Route::Dialled { .. }) {
            for origin in service.origins.iter().filter(|o| !intercepted(service, **o)) {
                warn(&format!(
                    "origins: {origin} is not among the intercepted addresses, so nobody is ever routed to it"
                ));
            }
        }
        let others = service.intercept.iter().any(|i| i.net.prefix_len() == 0);
        if others && service.cgroups.is_empty() {
            warn(
                "intercept: takes the connections of every process of this host to every address with that port",
            );
        }
    }
    all
}

/// Origins that are another service's virtual addresses. Nobody intercepts the broker's own connections,
/// so these come to whoever listens there, which is nobody more often than not.
fn about_origins(service: &Service, config: &Config, warn: &mut impl FnMut(&str)) {
    let is_virtual = |other: &Service, origin: SocketAddr| {
        let exactly = |i: &Intercept| i.port == origin.port() && i.net == IpNet::from(origin.ip());
        other.intercept.iter().any(exactly) && !other.origins.contains(&origin)
    };
    for &origin in &service.origins {
        let other = config.services.iter().find(|other| is_virtual(other, origin));
        if let Some(other) = other {
            warn(&format!(
                "origins: {origin} is what service {:?} intercepts, but not for the broker itself, which needs a server there",
                other.name
            ));
        }
    }
}

fn about_pool(service: &Service, warn: &mut impl FnMut(&str)) {
    let pool = &service.pool;
    let reuses = match service.protocol {
        Protocol::Http1 { .. } => true,
        Protocol::Opaque { reuse } => reuse != OpaqueReuse::Never,
    };
    if reuses && pool.max_idle == 0 {
        warn("pool.max_idle = 0: nothing is ever reused; every exchange costs a handshake");
    }
    if reuses && pool.max_requests == 1 {
        warn("pool.max_requests = 1: nothing is ever reused; every exchange costs a handshake");
    }
    if pool.prewarm == 0 && service.route == Route::Balance {
        warn(
            "pool.prewarm = 0: the first exchange of each worker and origin waits for a handshake",
        );
    }
    if pool.idle_ttl > pool.max_lifetime {
        warn("pool.idle_ttl is longer than pool.max_lifetime, which always comes first");
    }
    if pool.queue_timeout < pool.connect_timeout {
        warn(
            "pool.queue_timeout is shorter than pool.connect_timeout: exchanges are refused while their socket is still being dialled",
        );
    }
    if service.protocol == (Protocol::Http1 { affinity: Affinity::Connection }) {
        warn(
            "affinity = \"connection\": each keep-alive client holds an origin socket while it is idle",
        );
    }
}

/// Sockets that are opened early and the limits that they meet.
fn about_limits(service: &Service, workers: usize, warn: &mut impl FnMut(&str)) {
    let (limits, prewarm) = (&service.limits, service.pool.prewarm);
    if let Some(max) = limits.max_connections_per_origin.filter(|max| workers * prewarm > *max) {
        warn(&format!(
            "limits.max_connections_per_origin = {max}: less than what {} with pool.prewarm = {prewarm} would open early",
            plural(workers as u64, "worker")
        ));
    }
    let Some(origins) = origins_used(service) else { return };
    if workers * prewarm * origins > limits.max_connections {
        warn(&format!(
            "limits.max_connections = {}: less than what {} with pool.prewarm = {prewarm} would open early to {}",
            limits.max_connections,
            plural(workers as u64, "worker"),
            plural(origins as u64, "origin")
        ));
    }
}

/// How many origins this gateway uses, if that is known.
fn origins_used(service: &Service) -> Option<usize> {
    let listed = service.discovery.is_none().then_some(service.origins.len());
    match (service.subset.map(|subset| subset.size), listed) {
        (Some(size), Some(all)) => Some(size.min(all)),
        (size, all) => size.or(all),
    }
}

fn about_retries(service: &Service, warn: &mut impl FnMut(&str)) {
    let retries = &service.retries;
    if retries.attempts == 1 && Condition::ALL.iter().any(|(_, c)| retries.on.contains(*c)) {
        let limit = match retries.limit {
            RetryLimit::Fixed(max) => format!("max_retries = {max}"),
            RetryLimit::Budget { percent, min_concurrency } => {
                format!("the budget ({percent} %, at least {min_concurrency})")
            }
        };
        let connects = retries.on.contains(Condition::ConnectFailure);
        let what = if connects { "is for connections that fail only" } else { "has no effect" };
        warn(&format!("retries.attempts = 1: no request is sent twice, and {limit} {what}"));
    }
}

fn about_outliers(service: &Service, warn: &mut impl FnMut(&str)) {
    let Some(outlier) = &service.outlier else { return };
    let percent = usize::from(outlier.max_ejection_percent);
    let origins = service.origins.len();
    if origins > 0 && percent * origins < 100 && !outlier.always_eject_one_host {
        warn(&format!(
            "outlier.max_ejection_percent = {percent}: of {} none is ever ejected, unless always_eject_one_host is set",
            plural(origins as u64, "origin")
        ));
    }
    if let (Some(subset), Some(used)) = (service.subset, origins_used(service)) {
        let spare = used.saturating_sub(subset.min_healthy);
        if percent * used > spare * 100 {
            warn(&format!(
                "outlier.max_ejection_percent = {percent}: of the subset's {} only {spare} can be lost before fewer than subset.min_healthy ({}) are left",
                plural(used as u64, "origin"),
                subset.min_healthy
            ));
        }
    }
    let threshold = usize::from(service.panic.threshold);
    if 100 - percent < threshold {
        warn(&format!(
            "outlier.max_ejection_percent = {percent}: ejections can leave fewer than panic.threshold ({threshold} %), and then have no effect"
        ));
    }
    if outlier.stall.time >= service.timeouts.origin_stall {
        warn("outlier.stall_time is not shorter than timeouts.origin_stall, which comes first");
    }
}

fn intercepted(service: &Service, origin: SocketAddr) -> bool {
    service
        .intercept
        .iter()
        .any(|i| i.port == origin.port() && i.net.contains(&IpNet::from(origin.ip())))
}
