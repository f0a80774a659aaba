//! What is allowed, but probably not meant.

use std::net::SocketAddr;

use ipnet::IpNet;

use crate::config::{Affinity, Config, OpaqueReuse, Protocol, Route, Service};

/// Advice about a valid configuration, for `broker check` and the log.
#[must_use]
pub fn warnings(config: &Config) -> Vec<String> {
    let mut all = Vec::new();
    for service in &config.services {
        let mut warn = |text: &str| all.push(format!("service {:?}: {text}", service.name));
        about_pool(service, &mut warn);
        about_outliers(service, &mut warn);
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

fn about_outliers(service: &Service, warn: &mut impl FnMut(&str)) {
    let Some(outlier) = &service.outlier else { return };
    let percent = usize::from(outlier.max_ejection_percent);
    let origins = service.origins.len();
    if origins > 0 && percent * origins < 100 && !outlier.always_eject_one_host {
        warn(&format!(
            "outlier.max_ejection_percent = {percent}: of {origins} origins none is ever ejected, unless always_eject_one_host is set"
        ));
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
