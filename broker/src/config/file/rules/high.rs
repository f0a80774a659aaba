//! Rules of `high = { … }` and `[service.limits.high]`.
//!
//! Clients of high priority become a service of their own, with the origins of the first: pools,
//! limits and statistics are each service's own, so that nothing has to be shared with a flood of
//! others.

use super::super::{address, raw};
use super::check::Checker;
use super::{Named, STEER, addresses, cgroups, intercept, obstacle, pool, quoted_list};
use crate::config::{PoolConfig, Route, Service, Steer};

pub(super) fn high(
    check: &mut Checker,
    position: usize,
    service: &Service,
    clients: Option<raw::High>,
    limits: Option<Box<raw::Limits>>,
    steer: Option<&str>,
) -> Option<Service> {
    let Some(clients) = clients else {
        if limits.is_some() {
            check.broken("limits.high", "", "belongs to `high`, which says whom it is for");
        }
        return None;
    };
    if service.route != Route::Balance {
        check.broken("high", "", "belongs to route = \"balance\"");
    }
    let names_addresses = !clients.listen.is_empty() || !clients.intercept.is_empty();
    if !names_addresses && clients.cgroups.is_none() {
        let rule = "needs `listen`, `intercept` or `cgroups`, or nobody is of high priority";
        check.broken("high", "", rule);
    }
    let named = clients.cgroups.as_deref();
    let own = cgroups(check, "high.cgroups", named, "for those of the service");
    let named = named.filter(|named| !named.is_empty() && clients.intercept.is_empty());
    if let Some(named) = named.filter(|_| !service.intercepts()) {
        let rule = "is about connections that are intercepted, and there is neither `intercept` nor \
                    `high.intercept`";
        check.broken("high.cgroups", quoted_list(named), rule);
    }
    let by_cgroup = named.is_some() && service.intercepts();
    let raw = limits.unwrap_or_default();
    if raw.high.is_some() {
        check.broken("limits.high.high", "", "there are two priorities only");
    }
    let (protocol, intercepts) = (service.protocol, by_cgroup || !clients.intercept.is_empty());
    let limits = pool::limits(check, "limits.high", &raw, protocol, intercepts);
    let steerable = obstacle(protocol, service.route, intercepts).is_none();
    let wanted = STEER.iter().find(|(word, _)| Some(*word) == steer).map(|(_, steer)| *steer);
    let origins = match service.discovery {
        Some(_) => Named::OthersLive,
        None => Named::Here(&service.origins),
    };
    let intercept = if by_cgroup {
        service.intercept.clone()
    } else {
        intercept(check, "high.intercept", &clients.intercept, origins)
    };
    Some(Service {
        name: format!("{}.high", service.name),
        high_of: Some(position),
        listen: addresses(check, "high.listen", &clients.listen, address::listen),
        intercept,
        intercept_members: by_cgroup && service.intercept_members,
        by_cgroup,
        cgroups: if own.is_empty() { service.cgroups.clone() } else { own },
        steer: if steerable { wanted.unwrap_or_default() } else { Steer::Relay },
        pool: PoolConfig {
            prewarm: service.pool.prewarm.min(limits.max_connections),
            ..service.pool.clone()
        },
        limits,
        ..service.clone()
    })
}
