//! What a configuration comes to, defaults included, in the words of the file: for the log, where it is
//! the first that an incident asks for.
//!
//! The settings are taken apart to the last one, so that none can be forgotten here.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use toml::Value;

use super::discovery::{Discovery, Dns, Eds, EdsApi, Families, Kubernetes, OnEmpty};
use super::discovery::{Port, Records, Source};
use super::gateway::{Etcd, Gateway, Index, Login};
use super::health::{HealthCheck, Http, Initial, Kind};
use super::outlier::{
    FailurePercentage, Latency, Outlier, Panic, RetransmissionPercentage, SlowAction, Stall,
    SuccessRate,
};
use super::retries::{Condition, Retries, RetryLimit};
use super::subset::Subset;
use super::tls::{Identity, Tls};
use super::{
    Affinity, Config, Keepalive, Limits, OpaqueReuse, PoolConfig, Protocol, Refuse, Route, Service,
    Steer, Timeouts,
};
use crate::events::Target;
use crate::origin::subset::{Algorithm, Rules};

/// Keys and values as TOML has them; shown in one line.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings(Vec<(String, Value)>);

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (key, value)) in self.0.iter().enumerate() {
            let space = if i == 0 { "" } else { " " };
            write!(f, "{space}{key}={value}")?;
        }
        Ok(())
    }
}

impl Settings {
    fn set(&mut self, key: impl Into<String>, value: impl Into<Value>) {
        self.0.push((key.into(), value.into()));
    }

    fn number(&mut self, key: impl Into<String>, number: impl TryInto<i64>) {
        self.set(key, number.try_into().unwrap_or(i64::MAX));
    }

    fn time(&mut self, key: impl Into<String>, time: Duration) {
        let text = match (time.as_secs(), time.subsec_nanos()) {
            (seconds, 0) => format!("{seconds}s"),
            (0, nanos) if nanos % 1_000_000 == 0 => format!("{}ms", time.subsec_millis()),
            _ => humantime::format_duration(time).to_string(),
        };
        self.set(key, text);
    }

    fn path(&mut self, key: impl Into<String>, path: &Path) {
        self.set(key, path.to_string_lossy().into_owned());
    }

    fn list<T: ToString>(&mut self, key: &str, list: impl IntoIterator<Item = T>) {
        self.set(key, list.into_iter().map(|item| item.to_string()).collect::<Vec<_>>());
    }
}

/// The daemon's own settings.
#[must_use]
pub fn daemon(config: &Config) -> Settings {
    let Config {
        workers,
        admin_socket,
        intercept_from_netns,
        heartbeat_age_max,
        drain_timeout,
        event_log,
        gateway,
        services: _,
    } = config;
    let mut all = Settings::default();
    all.number("workers", workers.get());
    all.path("admin_socket", admin_socket);
    if let Some(address) = intercept_from_netns {
        all.set("intercept_from_netns", address.to_string());
    }
    all.time("heartbeat_age_max", *heartbeat_age_max);
    all.time("drain_timeout", *drain_timeout);
    match event_log {
        Target::Memory => {}
        Target::Stdout => all.set("event_log", "stdout"),
        Target::File(path) => all.path("event_log", path),
    }
    self::gateway(&mut all, gateway);
    all
}

fn gateway(all: &mut Settings, gateway: &Gateway) {
    let etcd = match gateway {
        Gateway::Claimed(etcd) => Some(etcd),
        Gateway::Configured { index, count, registry } => {
            match index {
                Index::Number(number) => all.number("gateway.index", *number),
                Index::Hostname => all.set("gateway.index", "hostname"),
                Index::File(path) => all.path("gateway.index.file", path),
                Index::Env(variable) => all.set("gateway.index.env", variable.as_str()),
            }
            all.number("gateway.count", count.get());
            registry.as_ref()
        }
    };
    let Some(Etcd { endpoints, tls, login, prefix, ttl, name }) = etcd else { return };
    all.list("gateway.etcd.endpoints", endpoints);
    all.set("gateway.etcd.prefix", prefix.as_str());
    all.time("gateway.etcd.ttl", *ttl);
    if let Some(name) = name {
        all.set("gateway.etcd.name", name.as_str());
    }
    if let Some(Login { user, password_file }) = login {
        all.set("gateway.etcd.user", user.as_str());
        all.path("gateway.etcd.password_file", password_file);
    }
    self::tls(all, "gateway.etcd.tls", tls);
}

fn tls(all: &mut Settings, at: &str, tls: &Tls) {
    let Tls { ca, identity, server_name } = tls;
    if let Some(ca) = ca {
        all.path(format!("{at}.ca"), ca);
    }
    if let Some(Identity { certificate, key }) = identity {
        all.path(format!("{at}.certificate"), certificate);
        all.path(format!("{at}.key"), key);
    }
    if let Some(name) = server_name {
        all.set(format!("{at}.server_name"), name.as_str());
    }
}

/// A service's settings. Clients of high priority have theirs as a service of their own.
#[must_use]
pub fn service(service: &Service) -> Settings {
    let Service {
        name,
        high_of: _,
        listen,
        intercept,
        intercept_members,
        cgroups,
        by_cgroup: _,
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
    } = service;
    let mut all = Settings::default();
    all.set("name", name.as_str());
    all.list("listen", listen);
    let members = intercept_members.then(|| "origins".to_owned());
    all.list("intercept", intercept.iter().map(ToString::to_string).chain(members));
    if !cgroups.is_empty() {
        all.list("cgroups", cgroups.iter().map(|path| path.to_string_lossy()));
    }
    self::protocol(&mut all, *protocol);
    self::route(&mut all, *route);
    let steer = match steer {
        Steer::Auto => "auto",
        Steer::Kernel => "kernel",
        Steer::Relay => "relay",
    };
    all.set("steer", steer);
    match discovery {
        None => all.list("origins", origins),
        Some(discovery) => self::discovery(&mut all, discovery),
    }
    if let Some(subset) = subset {
        self::subset(&mut all, *subset);
    }
    if let Some(health_check) = health_check {
        self::health_check(&mut all, health_check);
    }
    self::pool(&mut all, pool);
    self::limits(&mut all, limits, matches!(protocol, Protocol::Http1 { .. }));
    self::retries(&mut all, *retries, matches!(protocol, Protocol::Http1 { .. }));
    self::timeouts(&mut all, *timeouts);
    if let Some(outlier) = outlier {
        self::outlier(&mut all, outlier);
    }
    let Panic { threshold, fail_on_panic } = *panic;
    all.number("panic.threshold", threshold);
    all.set("panic.fail_on_panic", fail_on_panic);
    all
}

fn protocol(all: &mut Settings, protocol: Protocol) {
    match protocol {
        Protocol::Http1 { affinity } => {
            all.set("protocol", "http1");
            let affinity = match affinity {
                Affinity::Exchange => "exchange",
                Affinity::Connection => "connection",
            };
            all.set("affinity", affinity);
        }
        Protocol::Opaque { reuse } => {
            all.set("protocol", "opaque");
            match reuse {
                OpaqueReuse::Never => all.set("reuse", "never"),
                OpaqueReuse::Quiet { settle } => {
                    all.set("reuse", "quiet");
                    all.time("settle_time", settle);
                }
            }
        }
    }
}

fn route(all: &mut Settings, route: Route) {
    match route {
        Route::Balance => all.set("route", "balance"),
        Route::Dialled { origins_max, origin_idle } => {
            all.set("route", "dialled");
            all.number("origins_max", origins_max.get());
            all.time("origin_idle", origin_idle);
        }
    }
}

fn discovery(all: &mut Settings, discovery: &Discovery) {
    let Discovery { source, debounce, debounce_max, on_empty } = discovery;
    match source {
        Source::File(file) => all.path("discovery.file.path", &file.path),
        Source::Dns(dns) => self::dns(all, dns),
        Source::Kubernetes(service) => kubernetes(all, service),
        Source::Eds(eds) => self::eds(all, eds),
    }
    all.time("discovery.debounce", *debounce);
    all.time("discovery.debounce_max", *debounce_max);
    let on_empty = match on_empty {
        OnEmpty::Keep => "keep",
        OnEmpty::Drop => "drop",
    };
    all.set("discovery.on_empty", on_empty);
}

fn dns(all: &mut Settings, dns: &Dns) {
    let Dns { name, records, resolvers, refresh_min, refresh_max } = dns;
    all.set("discovery.dns.name", name.as_str());
    let record = match records {
        Records::Srv => "srv",
        Records::Addresses { port, families } => {
            all.number("discovery.dns.port", *port);
            match families {
                Families::Both => "address",
                Families::V4 => "a",
                Families::V6 => "aaaa",
            }
        }
    };
    all.set("discovery.dns.record", record);
    all.list("discovery.dns.resolvers", resolvers);
    all.time("discovery.dns.refresh_min", *refresh_min);
    all.time("discovery.dns.refresh_max", *refresh_max);
}

fn kubernetes(all: &mut Settings, cluster: &Kubernetes) {
    let Kubernetes { service, namespace, port, kubeconfig, zone, context } = cluster;
    all.set("discovery.kubernetes.service", service.as_str());
    match port {
        Port::Named(name) => all.set("discovery.kubernetes.port", name.as_str()),
        Port::Number(number) => all.number("discovery.kubernetes.port", *number),
    }
    if let Some(path) = kubeconfig {
        all.path("discovery.kubernetes.kubeconfig", path);
    }
    let rest = [("namespace", namespace), ("zone", zone), ("context", context)];
    for (key, value) in rest {
        if let Some(value) = value {
            all.set(format!("discovery.kubernetes.{key}"), value.as_str());
        }
    }
}

fn eds(all: &mut Settings, eds: &Eds) {
    let Eds { server, tls, cluster, node_id, node_cluster, aggregated, api, initial_fetch_timeout } =
        eds;
    all.set("discovery.eds.server", server.as_str());
    all.set("discovery.eds.node_id", node_id.as_str());
    all.set("discovery.eds.node_cluster", node_cluster.as_str());
    all.set("discovery.eds.cluster", cluster.as_str());
    all.set("discovery.eds.ads", *aggregated);
    let api = match api {
        EdsApi::Whole => "sotw",
        EdsApi::Delta => "delta",
    };
    all.set("discovery.eds.api", api);
    all.time("discovery.eds.initial_fetch_timeout", *initial_fetch_timeout);
    self::tls(all, "discovery.eds.tls", tls);
}

fn subset(all: &mut Settings, subset: Subset) {
    let Subset { rules: Rules { algorithm, zone_max }, size, min_healthy } = subset;
    let (algorithm, band) = match algorithm {
        Algorithm::Off => ("off", None),
        Algorithm::Ring => ("ring", None),
        Algorithm::Kronecker { band } => ("kronecker", band),
    };
    all.set("subset.algorithm", algorithm);
    all.number("subset.size", size);
    if let Some(band) = band {
        all.set("subset.band", band.to_string());
    }
    if let Some(zone_max) = zone_max {
        all.number("subset.zone_max", zone_max.get());
    }
    all.number("subset.min_healthy", min_healthy);
}

fn health_check(all: &mut Settings, health_check: &HealthCheck) {
    let HealthCheck {
        kind,
        interval,
        interval_jitter_percent,
        unhealthy_interval,
        timeout,
        unhealthy_threshold,
        healthy_threshold,
        initial,
    } = health_check;
    match kind {
        Kind::Tcp => all.set("health_check.type", "tcp"),
        Kind::Http(http) => {
            let Http {
                method,
                path,
                host,
                expected_statuses,
                retriable_statuses,
                reuse_connection,
            } = http;
            let status = |range: &RangeInclusive<u16>| match (range.start(), range.end()) {
                (first, last) if first == last => first.to_string(),
                (first, last) => format!("{first}-{last}"),
            };
            all.set("health_check.type", "http");
            all.set("health_check.method", method.as_str());
            all.set("health_check.path", path.as_str());
            all.set("health_check.host", String::from_utf8_lossy(host.as_bytes()).into_owned());
            all.list("health_check.expected_statuses", expected_statuses.iter().map(status));
            all.list("health_check.retriable_statuses", retriable_statuses.iter().map(status));
            all.set("health_check.reuse_connection", *reuse_connection);
        }
    }
    all.time("health_check.interval", *interval);
    all.number("health_check.interval_jitter_percent", *interval_jitter_percent);
    all.time("health_check.unhealthy_interval", *unhealthy_interval);
    all.time("health_check.timeout", *timeout);
    all.number("health_check.unhealthy_threshold", unhealthy_threshold.get());
    all.number("health_check.healthy_threshold", healthy_threshold.get());
    let initial = match initial {
        Initial::Healthy => "healthy",
        Initial::Unhealthy => "unhealthy",
    };
    all.set("health_check.initial", initial);
}

fn pool(all: &mut Settings, pool: &PoolConfig) {
    let PoolConfig {
        prewarm,
        max_idle,
        idle_ttl,
        max_lifetime,
        max_requests,
        queue_timeout,
        prewarm_rate,
        connect_timeout,
        max_dials,
        backoff_base,
        backoff_max,
        keepalive,
    } = pool;
    all.number("pool.prewarm", *prewarm);
    all.number("pool.prewarm_rate", *prewarm_rate);
    all.number("pool.max_idle", *max_idle);
    all.time("pool.idle_ttl", *idle_ttl);
    all.time("pool.max_lifetime", *max_lifetime);
    all.number("pool.max_requests", *max_requests);
    all.time("pool.queue_timeout", *queue_timeout);
    all.time("pool.connect_timeout", *connect_timeout);
    all.number("pool.max_dials", *max_dials);
    all.time("pool.backoff_base", *backoff_base);
    all.time("pool.backoff_max", *backoff_max);
    match keepalive {
        None => all.set("pool.keepalive", false),
        Some(Keepalive { idle, interval, count }) => {
            all.time("pool.keepalive.idle", *idle);
            all.time("pool.keepalive.interval", *interval);
            all.number("pool.keepalive.count", *count);
        }
    }
}

fn limits(all: &mut Settings, limits: &Limits, exchanges: bool) {
    let Limits {
        max_connections,
        max_connections_per_origin,
        one_connection_per_origin,
        max_pending,
        max_requests,
        refuse,
    } = limits;
    all.number("limits.max_connections", *max_connections);
    if let Some(max) = max_connections_per_origin {
        all.number("limits.max_connections_per_origin", *max);
    }
    all.set("limits.one_connection_per_origin", *one_connection_per_origin);
    all.number("limits.max_pending", *max_pending);
    if exchanges {
        all.number("limits.max_requests", *max_requests);
    }
    let refuse = match refuse {
        Refuse::Response => "response",
        Refuse::Connect => "connect",
    };
    all.set("limits.refuse", refuse);
}

fn retries(all: &mut Settings, retries: Retries, exchanges: bool) {
    let Retries { on, limit, attempts } = retries;
    let on = Condition::ALL.iter().filter(|(_, condition)| on.contains(*condition));
    all.list("retries.retry_on", on.map(|(name, _)| name));
    if exchanges {
        all.number("retries.attempts", attempts);
    }
    match limit {
        RetryLimit::Fixed(max) => all.number("retries.max_retries", max),
        RetryLimit::Budget { percent, min_concurrency } => {
            all.set("retries.budget_percent", percent);
            all.number("retries.min_concurrency", min_concurrency);
        }
    }
}

fn timeouts(all: &mut Settings, timeouts: Timeouts) {
    let Timeouts { client_idle, client_stall, origin_stall, tunnel_idle } = timeouts;
    all.time("timeouts.client_idle", client_idle);
    all.time("timeouts.client_stall", client_stall);
    all.time("timeouts.origin_stall", origin_stall);
    all.time("timeouts.tunnel_idle", tunnel_idle);
}

fn outlier(all: &mut Settings, outlier: &Outlier) {
    let Outlier {
        interval,
        base_ejection_time,
        max_ejection_time,
        max_ejection_time_jitter,
        max_ejection_percent,
        always_eject_one_host,
        successful_active_health_check_uneject_host,
        split_external_local_origin_errors: split,
        consecutive_5xx,
        consecutive_gateway_failure,
        consecutive_local_origin_failure,
        success_rate,
        failure_percentage,
        handshake_latency,
        rtt_latency,
        retransmission_percentage,
        stall,
    } = outlier;
    all.time("outlier.interval", *interval);
    all.time("outlier.base_ejection_time", *base_ejection_time);
    all.time("outlier.max_ejection_time", *max_ejection_time);
    all.time("outlier.max_ejection_time_jitter", *max_ejection_time_jitter);
    all.number("outlier.max_ejection_percent", *max_ejection_percent);
    all.set("outlier.always_eject_one_host", *always_eject_one_host);
    all.set(
        "outlier.successful_active_health_check_uneject_host",
        *successful_active_health_check_uneject_host,
    );
    all.set("outlier.split_external_local_origin_errors", *split);
    let local = split.then_some(("local_origin_failure", consecutive_local_origin_failure));
    let consecutive = [("5xx", consecutive_5xx), ("gateway_failure", consecutive_gateway_failure)];
    for (name, consecutive) in consecutive.into_iter().chain(local) {
        all.number(format!("outlier.consecutive_{name}"), consecutive.failures);
        all.number(format!("outlier.enforcing_consecutive_{name}"), consecutive.enforcing);
    }
    let SuccessRate {
        minimum_hosts,
        request_volume,
        stdev_factor,
        enforcing,
        enforcing_local_origin,
    } = *success_rate;
    all.number("outlier.success_rate_minimum_hosts", minimum_hosts);
    all.number("outlier.success_rate_request_volume", request_volume);
    all.number("outlier.success_rate_stdev_factor", stdev_factor);
    all.number("outlier.enforcing_success_rate", enforcing);
    if *split {
        all.number("outlier.enforcing_local_origin_success_rate", enforcing_local_origin);
    }
    let FailurePercentage {
        threshold,
        minimum_hosts,
        request_volume,
        enforcing,
        enforcing_local_origin,
    } = *failure_percentage;
    all.number("outlier.failure_percentage_threshold", threshold);
    all.number("outlier.failure_percentage_minimum_hosts", minimum_hosts);
    all.number("outlier.failure_percentage_request_volume", request_volume);
    all.number("outlier.enforcing_failure_percentage", enforcing);
    if *split {
        all.number("outlier.enforcing_failure_percentage_local_origin", enforcing_local_origin);
    }
    let Stall { time, volume, enforcing } = *stall;
    all.time("outlier.stall_time", time);
    all.number("outlier.stall_request_volume", volume);
    all.number("outlier.enforcing_stall", enforcing);
    for (name, latency) in [("handshake", handshake_latency), ("rtt", rtt_latency)] {
        let Latency { factor, minimum, minimum_hosts, volume, action, enforcing } = *latency;
        let action = match action {
            SlowAction::Eject => "eject",
            SlowAction::Weight => "weight",
        };
        all.number(format!("outlier.{name}_latency_factor"), factor);
        all.time(format!("outlier.{name}_latency_minimum"), minimum);
        all.number(format!("outlier.{name}_latency_minimum_hosts"), minimum_hosts);
        all.number(format!("outlier.{name}_latency_volume"), volume);
        all.set(format!("outlier.{name}_latency_action"), action);
        all.number(format!("outlier.enforcing_{name}_latency"), enforcing);
    }
    let RetransmissionPercentage { threshold, minimum_hosts, segment_volume, enforcing } =
        *retransmission_percentage;
    all.number("outlier.retransmission_percentage_threshold", threshold);
    all.number("outlier.retransmission_percentage_minimum_hosts", minimum_hosts);
    all.number("outlier.retransmission_percentage_segment_volume", segment_volume);
    all.number("outlier.enforcing_retransmission_percentage", enforcing);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::parse;

    fn parsed(text: &str) -> Config {
        parse(text, "f").unwrap_or_else(|e| panic!("{e}\n{text}"))
    }

    /// The file that has these settings.
    fn written(config: &Config) -> String {
        let lines = |settings: Settings| -> String {
            let lines = settings.0.iter().map(|(key, value)| format!("{key} = {value}\n"));
            lines.collect::<Vec<_>>().concat()
        };
        let services =
            config.services.iter().map(|s| format!("[[service]]\n{}", lines(service(s))));
        lines(daemon(config)) + &services.collect::<String>()
    }

    /// What is shown of a configuration, and nothing else, makes the same one.
    #[track_caller]
    fn says_all(text: &str) {
        let config = parsed(text);
        let again = parsed(&written(&config));
        let [again, config] = [again, config].map(|config| format!("{config:#?}"));
        let mut lines = again.lines().zip(config.lines());
        assert_eq!(lines.find(|(again, line)| again != line), None, "{again}");
        assert_eq!(again, config);
    }

    #[test]
    fn the_defaults() {
        let text = "[[service]]\nname = \"web\"\nlisten = [\"127.0.0.1:80\"]\nprotocol = \"http1\"\n\
                    origins = [\"10.0.0.1:80\", \"[fd00::1]:80\"]\n";
        says_all(text);
        let shown = service(&parsed(text).services[0]).to_string();
        let start = "name=\"web\" listen=[\"127.0.0.1:80\"] intercept=[] protocol=\"http1\" \
                     affinity=\"exchange\" route=\"balance\" steer=\"relay\" \
                     origins=[\"10.0.0.1:80\", \"[fd00::1]:80\"] pool.prewarm=2 ";
        assert!(shown.starts_with(start), "{shown}");
        assert!(shown.contains(" pool.idle_ttl=\"30s\" ") && !shown.contains('\n'), "{shown}");
    }

    #[test]
    fn the_example() {
        let example = include_str!("../../../deploy/broker.toml");
        says_all(example);
    }

    #[test]
    fn what_is_not_the_default() {
        says_all(
            r#"
            workers = 3
            admin_socket = "/tmp/a b.sock"
            intercept_from_netns = "10.1.0.1"
            heartbeat_age_max = "1500ms"
            drain_timeout = "0s"
            event_log = "stdout"
            gateway.index.file = "/etc/index"
            gateway.count = 9
            gateway.etcd = { endpoints = ["https://a:1", "https://b:2"], prefix = "/f", ttl = "3s", name = "g", tls.server_name = "etcd.test" }
            [[service]]
            name = "files"
            intercept = ["10.9.0.10:80", "10.0.0.0/8:80", "origins"]
            cgroups = ["/a", "/b c"]
            protocol = "http1"
            steer = "kernel"
            discovery = { file.path = "/etc/\"o\".json", debounce = "1ms", debounce_max = "1h", on_empty = "drop" }
            subset = { size = 10, band = "12.5%", zone_max = 2, min_healthy = 3 }
            pool = { prewarm = 1, prewarm_rate = 2, max_idle = 3, idle_ttl = "4s", max_lifetime = "5s", max_requests = 6, queue_timeout = "7s", connect_timeout = "8s", max_dials = 9, backoff_base = "10us", backoff_max = "11s", keepalive = { idle = "12s", interval = "13s", count = 14 } }
            limits = { max_connections = 1, max_connections_per_origin = 2, one_connection_per_origin = true, max_pending = 3, max_requests = 4, refuse = "connect" }
            retries = { retry_on = ["gateway-error"], attempts = 1, max_retries = 2 }
            timeouts = { client_idle = "1s", client_stall = "2s", origin_stall = "3s", tunnel_idle = "4s" }
            panic = { threshold = 1, fail_on_panic = true }
            [service.health_check]
            type = "http"
            path = "/?a=b"
            host = "h"
            method = "HEAD"
            expected_statuses = ["204", "300-399"]
            retriable_statuses = ["500"]
            reuse_connection = false
            interval = "1s"
            interval_jitter_percent = 0
            unhealthy_interval = "2s"
            timeout = "300ms"
            unhealthy_threshold = 4
            healthy_threshold = 5
            initial = "unhealthy"
            [service.outlier]
            split_external_local_origin_errors = true
            consecutive_local_origin_failure = 1
            enforcing_consecutive_local_origin_failure = 2
            enforcing_local_origin_success_rate = 3
            enforcing_failure_percentage_local_origin = 4
            rtt_latency_action = "weight"
            [[service]]
            name = "names"
            listen = ["[::1]:1"]
            protocol = "opaque"
            reuse = "quiet"
            settle_time = "5ms"
            discovery.dns = { name = "a.test", record = "aaaa", port = 80, resolvers = ["10.0.0.1:53"], refresh_min = "2s", refresh_max = "3s" }
            subset = { size = 1, algorithm = "ring" }
            health_check.type = "tcp"
            pool.keepalive = false
            [[service]]
            name = "records"
            listen = ["[::1]:2"]
            protocol = "http1"
            affinity = "connection"
            discovery.dns = { name = "a.test", record = "srv" }
            [[service]]
            name = "cluster"
            listen = ["[::1]:3"]
            protocol = "http1"
            discovery.kubernetes = { service = "s", namespace = "n", port = "http", kubeconfig = "/k", context = "c", zone = "z" }
            [[service]]
            name = "plane"
            listen = ["[::1]:4"]
            protocol = "http1"
            discovery.eds = { server = "https://p:1", node_id = "i", node_cluster = "c", cluster = "x", ads = false, api = "delta", initial_fetch_timeout = "1s", tls.server_name = "n" }
            [[service]]
            name = "dialled"
            intercept = ["[fd00::/64]:80"]
            protocol = "http1"
            route = "dialled"
            origins_max = 5
            origin_idle = "7s"
            "#,
        );
        let claimed = "gateway.etcd = { endpoints = [\"http://a:1\"], prefix = \"/f\" }\n\
                       [[service]]\nname = \"w\"\nlisten = [\"127.0.0.1:80\"]\nprotocol = \"http1\"\n\
                       origins = [\"10.0.0.1:80\"]\n";
        says_all(claimed);
        says_all(&claimed.replacen(
            "gateway.etcd = ",
            "gateway.count = 3\ngateway.index = \"hostname\"\ngateway.etcd = ",
            1,
        ));
        says_all(&claimed.replacen(
            "gateway.etcd = ",
            "gateway.count = 3\ngateway.index.env = \"V\"\ngateway.etcd = ",
            1,
        ));
    }

    #[test]
    fn high_priority_is_a_service_of_its_own() {
        let config = parsed(
            "[[service]]\nname = \"web\"\nlisten = [\"127.0.0.1:80\"]\nprotocol = \"http1\"\n\
             origins = [\"10.0.0.1:80\"]\nhigh = { listen = [\"127.0.0.1:81\"] }\n\
             limits.high.max_connections = 7\n",
        );
        let shown = service(&config.services[1]).to_string();
        assert!(shown.starts_with("name=\"web.high\" listen=[\"127.0.0.1:81\"] "), "{shown}");
        assert!(shown.contains(" limits.max_connections=7 "), "{shown}");
    }
}
