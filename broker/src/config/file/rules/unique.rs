//! Rules between services: names, listeners, targets, loops.

use std::collections::HashMap;
use std::net::SocketAddr;

use broker_ebpf::abi;
use ipnet::IpNet;

use super::super::raw;
use super::check::Checker;
use super::quoted;
use crate::config::{Service, covers};

/// The kernel's table holds an old and a new set at the same time while one replaces the other.
const TARGETS_MAX: usize = abi::TARGETS_MAX / 2;

/// What the kernel programs have room for. Checked while no service is entered.
pub(super) fn kernel_limits(check: &mut Checker, services: &[raw::Service]) {
    let by_cgroup =
        |s: &raw::Service, high: &raw::High| !s.intercept.is_empty() && high.cgroups.is_some();
    let high = |s: &raw::Service| {
        s.high.as_ref().is_some_and(|high| !high.intercept.is_empty() || by_cgroup(s, high))
    };
    let intercepted: usize =
        services.iter().map(|s| usize::from(!s.intercept.is_empty()) + usize::from(high(s))).sum();
    if intercepted > abi::SERVICES_MAX {
        let rule = format!("at most {} can intercept", abi::SERVICES_MAX);
        check.broken("service", format!("({intercepted} with `intercept`)"), rule);
    }
    let targets: usize = services
        .iter()
        .flat_map(|s| {
            let high = s.high.iter().flat_map(|high| &high.intercept);
            let all = s.intercept.iter().chain(high);
            all.map(|t| if t == "origins" { s.origins.len() } else { 1 })
        })
        .sum();
    if targets > TARGETS_MAX {
        let rule = format!("at most {TARGETS_MAX} destinations, over all services");
        check.broken("intercept", format!("({targets} destinations)"), rule);
    }
}

pub(super) fn across_services(check: &mut Checker, services: &[Service]) {
    // Hashed, because an operator's generator may well write thousands of them.
    let mut names = HashMap::new();
    let mut targets: HashMap<(IpNet, u16), usize> = HashMap::new();
    let mut listeners: HashMap<u16, Vec<(usize, SocketAddr)>> = HashMap::new();
    for (i, service) in services.iter().enumerate() {
        check.enter_service(i, &service.name);
        if let Some(first) = names.insert(&service.name, i) {
            let rule = match services[first].high_of {
                Some(of) => {
                    format!("is what the `high` of service {:?} is called", services[of].name)
                }
                None => format!("is also the name of service #{}", first + 1),
            };
            check.broken("name", quoted(&service.name), rule);
        }
        // Who is told by the cgroup alone dials what another service intercepts.
        for target in service.intercept.iter().filter(|_| !service.by_cgroup) {
            let first = *targets.entry((target.net, target.port)).or_insert(i);
            if first != i {
                let rule = format!("is intercepted by service {:?} already", services[first].name);
                check.broken("intercept", quoted(&target.to_string()), rule);
            }
        }
        for &listen in &service.listen {
            let same_port = listeners.entry(listen.port()).or_default();
            if let Some((first, other)) = same_port.iter().find(|(_, o)| clash(*o, listen)) {
                let of = &services[*first].name;
                let rule = if *other == listen {
                    format!("service {of:?} listens there already")
                } else {
                    format!(
                        "clashes with \"{other}\" of service {of:?}: 0.0.0.0 takes every IPv4 \
                         address, and [::] every address"
                    )
                };
                check.broken("listen", quoted(&listen.to_string()), rule);
            }
            same_port.push((i, listen));
        }
    }
    for (i, service) in services.iter().enumerate() {
        check.enter_service(i, &service.name);
        for &origin in &service.origins {
            let own = listeners.get(&origin.port()).and_then(|same_port| {
                same_port.iter().find(|(_, listen)| reaches(origin, *listen))
            });
            if let Some((of, listen)) = own {
                let rule =
                    format!("would loop: service {:?} listens on \"{listen}\"", services[*of].name);
                check.broken("origins", quoted(&origin.to_string()), rule);
            }
        }
    }
}

/// Whether two listeners of the same port would both be offered the same connection.
fn clash(a: SocketAddr, b: SocketAddr) -> bool {
    a.ip() == b.ip() || covers(a.ip(), b.ip()) || covers(b.ip(), a.ip())
}

/// Whether a connection to `origin` surely ends at our listener. A wildcard listener also has the
/// host's other addresses, but those are not known here: `broker check` warns of them, and the daemon
/// does not dial them.
fn reaches(origin: SocketAddr, listen: SocketAddr) -> bool {
    origin.ip() == listen.ip() || (origin.ip().is_loopback() && covers(listen.ip(), origin.ip()))
}
