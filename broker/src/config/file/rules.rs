//! From the mirror to a [`Config`]: every rule, each broken one collected.
//!
//! A value that breaks a rule is replaced by its default and the walk goes on; the result is
//! thrown away in that case, so the stand-in never gets anywhere.

mod check;
mod discovery;
mod gateway;
mod health;
mod high;
mod outlier;
mod pool;
mod retries;
mod subset;
mod tls;
mod unique;

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use broker_ebpf::abi;

use self::check::Checker;
use super::{Problem, address, raw};
use crate::config::{
    ADMIN_SOCKET, Affinity, Config, Intercept, OpaqueReuse, PoolConfig, Protocol, Route, Service,
    Steer,
};
use crate::events::Target;

/// `sockaddr_un` has room for 108 bytes, the last one being NUL.
const SOCKET_PATH_LEN_MAX: usize = 107;
/// Names become labels of metrics and columns of tables.
const NAME_LEN_MAX: usize = 64;
/// A worker beats several times within the limit, and an event loop may be busy for some
/// milliseconds; less would make interception flap.
const HEARTBEAT_AGE_MIN: Duration = Duration::from_millis(100);

pub(super) fn validate(file: raw::File) -> Result<Config, Vec<Problem>> {
    let mut check = Checker::default();
    let workers =
        check.number("workers", file.workers, default_workers().get(), 1..=abi::WORKERS_MAX);
    let admin_socket = file.admin_socket.unwrap_or_else(|| ADMIN_SOCKET.into());
    if !admin_socket.is_absolute() || admin_socket.as_os_str().len() > SOCKET_PATH_LEN_MAX {
        check.broken(
            "admin_socket",
            quoted(&admin_socket.to_string_lossy()),
            format!("must be an absolute path of at most {SOCKET_PATH_LEN_MAX} bytes"),
        );
    }
    let intercept_from_netns = file.intercept_from_netns.and_then(|text| netns(&mut check, &text));
    let heartbeat_age_max = check.duration_from(
        "heartbeat_age_max",
        file.heartbeat_age_max.as_deref(),
        Duration::from_secs(1),
        HEARTBEAT_AGE_MIN,
    );
    let drain_timeout = check.duration_from(
        "drain_timeout",
        file.drain_timeout.as_deref(),
        Duration::from_secs(30),
        Duration::ZERO,
    );
    let gateway = file.gateway.map(|raw| gateway::gateway(&mut check, raw)).unwrap_or_default();
    let event_log = event_log(&mut check, file.event_log.as_deref());
    if file.service.is_empty() {
        check.broken("service", "", "at least one [[service]] is needed");
    }
    unique::kernel_limits(&mut check, &file.service);
    let (mut services, mut high) = (Vec::new(), Vec::new());
    for (i, mut raw) in file.service.into_iter().enumerate() {
        check.enter_service(i, &raw.name);
        let (clients, limits) = (raw.high.clone(), raw.limits.high.take());
        let steer = raw.steer.clone();
        let service = service(&mut check, raw);
        high.extend(high::high(&mut check, i, &service, clients, limits, steer.as_deref()));
        services.push(service);
    }
    services.extend(high);
    unique::across_services(&mut check, &services);
    check.finish(Config {
        workers: NonZeroUsize::new(workers).unwrap_or(NonZeroUsize::MIN),
        admin_socket,
        intercept_from_netns,
        heartbeat_age_max,
        drain_timeout,
        event_log,
        gateway,
        services,
    })
}

fn event_log(check: &mut Checker, text: Option<&str>) -> Target {
    match text {
        None => Target::Memory,
        Some("stdout") => Target::Stdout,
        Some(path) if Path::new(path).is_absolute() => Target::File(path.into()),
        Some(other) => {
            check.broken("event_log", quoted(other), "must be \"stdout\" or an absolute path");
            Target::Memory
        }
    }
}

fn default_workers() -> NonZeroUsize {
    let available = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    available.min(NonZeroUsize::new(abi::WORKERS_MAX).unwrap_or(NonZeroUsize::MIN))
}

fn netns(check: &mut Checker, text: &str) -> Option<IpAddr> {
    let rule = match text.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
        Err(_) => "must be an IP address of this host, without a port",
        Ok(ip) if ip.is_loopback() => {
            "must not be a loopback address: other network namespaces have a loopback of their own"
        }
        Ok(ip) if ip.is_unspecified() || ip.is_multicast() => {
            "must be one address that clients in other network namespaces can reach"
        }
        Ok(ip) => return Some(ip),
    };
    check.broken("intercept_from_netns", quoted(text), rule);
    None
}

fn service(check: &mut Checker, raw: raw::Service) -> Service {
    name(check, &raw.name);
    let listen = addresses(check, "listen", &raw.listen, address::listen);
    let origins = addresses(check, "origins", &raw.origins, address::configured_origin);
    let protocol = protocol(check, &raw);
    let route = route(check, &raw);
    let steer = steer(check, &raw, protocol, route);
    let live = raw.discovery.is_some() && route == Route::Balance;
    let named = if live { Named::Live } else { Named::Here(&origins) };
    let intercept = intercept(check, "intercept", &raw.intercept, named);
    let intercept_members = live && raw.intercept.iter().any(|text| text == ORIGINS);
    let named = raw.cgroups.as_deref();
    let cgroups = cgroups(check, "cgroups", named, "to intercept every process");
    if raw.listen.is_empty() && raw.intercept.is_empty() {
        check.broken(
            "listen",
            "",
            "a service needs `listen` or `intercept`, or clients never meet it",
        );
    }
    if let Some(named) = named.filter(|named| !named.is_empty() && raw.intercept.is_empty()) {
        check.broken("cgroups", quoted_list(named), "restricts `intercept`, and there is none");
    }
    let limits = pool::limits(check, "limits", &raw.limits, protocol, !raw.intercept.is_empty());
    let pool: PoolConfig = pool::pool(check, raw.pool, &limits, protocol, route);
    let retries = retries::retries(check, &raw.retries, protocol);
    let timeouts = pool::timeouts(check, &raw.timeouts);
    let subset = raw.subset.as_ref().and_then(|raw| subset::subset(check, raw));
    if subset.is_some() && route != Route::Balance {
        check.broken("subset", "", "belongs to route = \"balance\"");
    }
    let discovery = raw.discovery.and_then(|table| discovery::discovery(check, &raw.name, table));
    let outlier = raw.outlier.map(|raw| outlier::outlier(check, &raw, route));
    let panic = outlier::panic(check, &raw.panic);
    let health_check =
        raw.health_check.and_then(|table| health::health_check(check, &table, &raw.name, route));
    Service {
        name: raw.name,
        high_of: None,
        listen,
        intercept,
        intercept_members,
        cgroups,
        by_cgroup: false,
        protocol,
        route,
        steer,
        origins,
        discovery,
        subset,
        health_check,
        pool,
        limits,
        retries,
        timeouts,
        outlier,
        panic,
    }
}

fn name(check: &mut Checker, name: &str) {
    let usable = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > NAME_LEN_MAX || !name.chars().all(usable) {
        check.broken(
            "name",
            quoted(name),
            format!("must be 1..={NAME_LEN_MAX} of A-Z a-z 0-9 - _ ."),
        );
    }
}

/// Parses a list, refusing what is given twice.
fn addresses(
    check: &mut Checker,
    key: &str,
    texts: &[String],
    parse: fn(&str) -> Result<SocketAddr, String>,
) -> Vec<SocketAddr> {
    let mut all = Vec::new();
    for text in texts {
        match parse(text) {
            Ok(address) if all.contains(&address) => {
                check.broken(key, quoted(text), "is given twice");
            }
            Ok(address) => all.push(address),
            Err(rule) => check.broken(key, quoted(text), rule),
        }
    }
    all
}

fn protocol(check: &mut Checker, raw: &raw::Service) -> Protocol {
    let opaque = check.choice(
        "protocol",
        raw.protocol.as_deref(),
        &[("http1", false), ("opaque", true)],
        None,
    );
    let affinity = check.choice(
        "affinity",
        raw.affinity.as_deref(),
        &[("exchange", Affinity::Exchange), ("connection", Affinity::Connection)],
        Some(Affinity::default()),
    );
    let quiet = check.choice(
        "reuse",
        raw.reuse.as_deref(),
        &[("never", false), ("quiet", true)],
        Some(false),
    );
    let settle =
        check.duration("settle_time", raw.settle_time.as_deref(), Duration::from_millis(20));
    if opaque == Some(false) {
        check.absent(
            "reuse",
            raw.reuse.as_deref().map(quoted),
            "belongs to protocol = \"opaque\"; http1 knows by itself when a socket is clean",
        );
    }
    if opaque == Some(true) {
        check.absent(
            "affinity",
            raw.affinity.as_deref().map(quoted),
            "belongs to protocol = \"http1\"; opaque always keeps one socket for each client",
        );
    }
    if quiet == Some(false) || opaque == Some(false) {
        check.absent(
            "settle_time",
            raw.settle_time.as_deref().map(quoted),
            "belongs to protocol = \"opaque\" with reuse = \"quiet\"",
        );
    }
    match (opaque, quiet) {
        (Some(true), Some(true)) => Protocol::Opaque { reuse: OpaqueReuse::Quiet { settle } },
        (Some(true), _) => Protocol::Opaque { reuse: OpaqueReuse::Never },
        _ => Protocol::Http1 { affinity: affinity.unwrap_or_default() },
    }
}

fn route(check: &mut Checker, raw: &raw::Service) -> Route {
    let dialled = check.choice(
        "route",
        raw.route.as_deref(),
        &[("balance", false), ("dialled", true)],
        Some(false),
    );
    let origins_max = check.number("origins_max", raw.origins_max, 1024, 1..=65_536);
    let origin_idle =
        check.duration("origin_idle", raw.origin_idle.as_deref(), Duration::from_mins(5));
    if dialled == Some(false) {
        let rule = "belongs to route = \"dialled\"";
        check.absent("origins_max", raw.origins_max, rule);
        check.absent("origin_idle", raw.origin_idle.as_deref().map(quoted), rule);
        if raw.origins.is_empty() && raw.discovery.is_none() {
            check.broken("origins", "", "route = \"balance\" needs at least one, or `discovery`");
        }
        if raw.discovery.is_some() {
            let origins = (!raw.origins.is_empty()).then(|| quoted_list(&raw.origins));
            check.absent("origins", origins, "cannot be given together with `discovery`");
        }
    }
    if dialled != Some(true) {
        return Route::Balance;
    }
    if raw.discovery.is_some() {
        let rule =
            "belongs to route = \"balance\"; dialled origins are discovered by being dialled";
        check.broken("discovery", "", rule);
    }
    if !raw.listen.is_empty() {
        check.broken("listen", quoted_list(&raw.listen), "route = \"dialled\" goes where the client dialled, and that would be this very listener; use `intercept`");
    }
    if raw.intercept.is_empty() {
        check.broken("intercept", "", "route = \"dialled\" needs it: only intercepted connections have an address that the client dialled");
    }
    Route::Dialled {
        origins_max: NonZeroUsize::new(origins_max).unwrap_or(NonZeroUsize::MIN),
        origin_idle,
    }
}

fn steer(check: &mut Checker, raw: &raw::Service, protocol: Protocol, route: Route) -> Steer {
    let steer = check.choice("steer", raw.steer.as_deref(), &STEER, Some(Steer::default()));
    let Some(obstacle) = obstacle(protocol, route, !raw.intercept.is_empty()) else {
        return steer.unwrap_or_default();
    };
    // Those of high priority may be intercepted.
    let high = raw.high.as_ref().is_some_and(|high| !high.intercept.is_empty());
    if steer == Some(Steer::Kernel) && !high {
        check.broken("steer", quoted("kernel"), obstacle);
    }
    Steer::Relay
}

const STEER: [(&str, Steer); 3] =
    [("auto", Steer::Auto), ("kernel", Steer::Kernel), ("relay", Steer::Relay)];

/// Why clients cannot be steered, if so.
fn obstacle(protocol: Protocol, route: Route, intercepts: bool) -> Option<&'static str> {
    if !matches!(protocol, Protocol::Http1 { .. }) {
        Some("only protocol = \"http1\" can be steered")
    } else if protocol != (Protocol::Http1 { affinity: Affinity::Exchange }) {
        Some("affinity = \"connection\" is not kept by steering")
    } else if route != Route::Balance {
        Some("only route = \"balance\" can be steered")
    } else if !intercepts {
        Some("only connections that are intercepted can be steered")
    } else {
        None
    }
}

/// The word that stands for all origins.
const ORIGINS: &str = "origins";

/// What the word stands for.
#[derive(Clone, Copy)]
enum Named<'a> {
    /// These.
    Here(&'a [SocketAddr]),
    /// Those of a list that is followed.
    Live,
    /// Those of a list that another service follows for itself.
    OthersLive,
}

fn intercept(
    check: &mut Checker,
    key: &str,
    texts: &[String],
    origins: Named<'_>,
) -> Vec<Intercept> {
    let mut all = Vec::new();
    for text in texts.iter().filter(|t| *t != ORIGINS) {
        match address::intercept(text) {
            Ok(target) if all.contains(&target) => {
                check.broken(key, quoted(text), "is given twice");
            }
            Ok(target) => all.push(target),
            Err(rule) => check.broken(key, quoted(text), rule),
        }
    }
    if texts.iter().all(|t| t != ORIGINS) {
        return all;
    }
    let rule = match origins {
        Named::Live => return all,
        Named::OthersLive => {
            "stands for the addresses in `origins`; those that are discovered can be intercepted by the \
             service itself, and `cgroups` tell who is of high priority there"
        }
        Named::Here([]) => "stands for the addresses in `origins`, and there are none",
        Named::Here(origins) => {
            for target in origins.iter().copied().map(Intercept::at) {
                if !all.contains(&target) {
                    all.push(target);
                }
            }
            return all;
        }
    };
    check.broken(key, quoted(ORIGINS), rule);
    all
}

/// `default` says what it is good for to leave the key out.
fn cgroups(
    check: &mut Checker,
    key: &str,
    texts: Option<&[String]>,
    default: &str,
) -> Vec<PathBuf> {
    let Some(texts) = texts else { return Vec::new() };
    if texts.is_empty() {
        // Some would mean nobody, others everybody.
        let rule = format!("must name at least one; leave the key out {default}");
        check.broken(key, quoted_list(texts), rule);
    }
    if texts.len() > abi::SERVICE_CGROUPS_MAX {
        check.broken(
            key,
            quoted_list(texts),
            format!("at most {} paths", abi::SERVICE_CGROUPS_MAX),
        );
    }
    let mut all = Vec::new();
    for text in texts {
        let path = Path::new(text);
        let plain = |c: Component<'_>| matches!(c, Component::RootDir | Component::Normal(_));
        let rule = if !path.is_absolute() || !path.components().all(plain) {
            "must be an absolute path without `..`"
        } else if path.starts_with("/sys/fs/cgroup") {
            "starts at the cgroup2 mount, as in /proc/PID/cgroup: /system.slice/php.service"
        } else if all.iter().any(|p| p == path) {
            "is given twice"
        } else {
            all.push(path.to_owned());
            continue;
        };
        check.broken(key, quoted(text), rule);
    }
    all
}

/// A path that a daemon can be told.
fn absolute(check: &mut Checker, key: &str, path: PathBuf) -> Option<PathBuf> {
    if path.is_absolute() {
        return Some(path);
    }
    let rule = "must be an absolute path: the daemon's working directory is nobody's";
    check.broken(key, quoted(&path.to_string_lossy()), rule);
    None
}

fn quoted(text: &str) -> String {
    format!("{text:?}")
}

fn quoted_list(texts: &[String]) -> String {
    format!("{texts:?}")
}
