//! What a configuration names and this host does not have, now and for whoever looks. Nothing of it makes
//! the configuration wrong: all of it may come later.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};

use crate::config::discovery::Source;
use crate::config::gateway::{Gateway, Index};
use crate::config::{Config, Service};
use crate::datapath::kernel;
use crate::net::Listening;
use crate::{chain, fleet, grpc, membership};

/// What the daemon would miss.
pub(super) fn missing(config: &Config) -> Vec<String> {
    let mut all = Vec::new();
    if let Gateway::Configured { index: index @ Index::File(_), count, .. } = &config.gateway
        && let Err(error) = fleet::identity(index, *count)
    {
        let error = chain(error.as_ref());
        all.push(format!("gateway.index: {error}; the gateway has none until it is there"));
    }
    let etcd = match &config.gateway {
        Gateway::Claimed(etcd) => Some(etcd),
        Gateway::Configured { registry, .. } => registry.as_ref(),
    };
    for (endpoint, tls) in
        etcd.iter().flat_map(|etcd| etcd.endpoints.iter().map(|e| (e, &etcd.tls)))
    {
        if let Err(error) = grpc::endpoint(endpoint, tls) {
            all.push(format!("gateway.etcd: {endpoint}: {error}"));
        }
    }
    if let Some(ip) = config.intercept_from_netns.filter(|ip| !is_of_this_host(*ip)) {
        all.push(format!("intercept_from_netns: {}", not_of_this_host(ip)));
    }
    let listening = Listening::configured(config);
    for service in &config.services {
        let mut warn = |text: String| all.push(format!("service {:?}: {text}", service.name));
        for address in service.listen.iter().filter(|address| !is_of_this_host(address.ip())) {
            warn(format!("listen: {}", not_of_this_host(address.ip())));
        }
        let own = |origin: &&SocketAddr| listening.takes(**origin);
        if let Some(origin) = service.origins.iter().find(own) {
            warn(format!(
                "origins: {origin} is an address of this host, on which the broker listens; it would \
                 loop, and is never connected to"
            ));
        }
        if let Some(error) = source(service) {
            warn(format!("discovery: {error}; clients are refused until there is a list"));
        }
    }
    all.extend(cgroups(config));
    all
}

/// What only the network knows.
pub(super) fn unknown(config: &Config) -> Vec<String> {
    let mut all = Vec::new();
    match &config.gateway {
        Gateway::Claimed(_) | Gateway::Configured { registry: Some(_), .. } => {
            all.push("gateway.etcd".to_owned());
        }
        Gateway::Configured { registry: None, .. } => {}
    }
    for service in config.services.iter().filter(|service| service.high_of.is_none()) {
        let source = service.discovery.as_ref().map(|discovery| discovery.source.name());
        let source = source.filter(|name| *name != "file");
        all.extend(source.map(|name| format!("discovery.{name} of service {:?}", service.name)));
    }
    all
}

/// Why a service's source could say nothing now.
fn source(service: &Service) -> Option<String> {
    let discovery = service.discovery.as_ref().filter(|_| service.high_of.is_none())?;
    match &discovery.source {
        Source::File(file) => match membership::file::load(&file.path) {
            Ok(list) if list.is_empty() => Some(format!("{}: is empty", file.path.display())),
            Ok(_) => None,
            Err(error) => Some(error),
        },
        Source::Kubernetes(service) => membership::kubernetes::cluster_is_known(service).err(),
        Source::Eds(eds) => {
            let error = grpc::endpoint(&eds.server, &eds.tls).err()?;
            Some(format!("{}: {error}", eds.server))
        }
        Source::Dns(_) => None,
    }
}

/// Any other error says nothing of the address.
fn is_of_this_host(ip: IpAddr) -> bool {
    let bound = TcpListener::bind(SocketAddr::new(ip, 0));
    bound.map_or_else(|error| error.kind() != ErrorKind::AddrNotAvailable, |_| true)
}

fn not_of_this_host(ip: IpAddr) -> String {
    format!("{ip} is no address of this host now; `broker run` ends without it")
}

/// Cgroups that are not there, or are none. Nothing is said where no cgroup v2 is mounted: the daemon is
/// to run somewhere else then.
fn cgroups(config: &Config) -> Vec<String> {
    let Ok(mount) = kernel::mount_point() else { return Vec::new() };
    let (mut seen, mut all) = (HashSet::new(), Vec::new());
    for service in config.services.iter().filter(|service| service.intercepts()) {
        for path in service.cgroups.iter().filter(|path| seen.insert(*path)) {
            let what = match kernel::cgroup_id(&mount, path) {
                Ok(Some(_)) => continue,
                Ok(None) => "is not there now; nobody in it is intercepted until it is".to_owned(),
                Err(error) => format!("is none: {}", chain(&error)),
            };
            let path = path.to_string_lossy();
            all.push(format!("service {:?}: cgroups: {path:?} {what}", service.name));
        }
    }
    all
}
