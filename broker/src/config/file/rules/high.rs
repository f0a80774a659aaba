//! Rules of `high = { … }` and `[service.limits.high]`.
//!
//! Clients of high priority become a service of their own, with the origins of the first: pools,
//! limits and statistics are each service's own, so that nothing has to be shared with a flood of
//! others.

use super::super::{address, raw};
use super::check::Checker;
use super::{STEER, addresses, cgroups, intercept, obstacle, pool, quoted_list};
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
    if clients.listen.is_empty() && clients.intercept.is_empty() {
        check.broken("high", "", "needs `listen` or `intercept`, or nobody is of high priority");
    }
    if clients.intercept.is_empty() && !clients.cgroups.is_empty() {
        let rule = "restricts `high.intercept`, and there is none";
        check.broken("high.cgroups", quoted_list(&clients.cgroups), rule);
    }
    let raw = limits.unwrap_or_default();
    if raw.high.is_some() {
        check.broken("limits.high.high", "", "there are two priorities only");
    }
    let (protocol, intercepts) = (service.protocol, !clients.intercept.is_empty());
    let limits = pool::limits(check, "limits.high", &raw, protocol, intercepts);
    let own = cgroups(check, "high.cgroups", &clients.cgroups);
    let steerable = obstacle(protocol, service.route, intercepts).is_none();
    let wanted = STEER.iter().find(|(word, _)| Some(*word) == steer).map(|(_, steer)| *steer);
    let no_origins = service.origins.is_empty();
    Some(Service {
        name: format!("{}.high", service.name),
        high_of: Some(position),
        listen: addresses(check, "high.listen", &clients.listen, address::listen),
        intercept: intercept(
            check,
            "high.intercept",
            &clients.intercept,
            &service.origins,
            no_origins,
        ),
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
