//! The serde mirror of the file: its shape, the documentation of its keys, and their defaults.
//!
//! Values whose text has rules of its own (addresses, durations, words) stay strings here, so that
//! [`super::rules`] can name the service they belong to and go on to the next one.

use std::fmt;
use std::ops::Deref;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Unexpected, Visitor, value::MapAccessDeserializer};

/// A duration as it is written; [`super::rules`] knows what it has to obey.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Time(String);

impl Deref for Time {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

// By hand, because 30 is no text, and what is missing is its unit.
impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Time;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a duration such as \"20ms\", \"30s\" or \"5m\"")
            }

            fn visit_str<E>(self, text: &str) -> Result<Time, E> {
                Ok(Time(text.to_owned()))
            }
        }

        deserializer.deserialize_str(Text)
    }
}

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    /// Event loops. Default: the CPUs this process may use, because a worker is one busy thread.
    pub workers: Option<usize>,
    /// Default [`crate::config::ADMIN_SOCKET`]: what the systemd unit's `RuntimeDirectory` makes.
    pub admin_socket: Option<PathBuf>,
    /// Default: clients in other network namespaces are left alone.
    pub intercept_from_netns: Option<String>,
    /// Default 1 s: longer than any healthy stall of an event loop, short enough that clients of a
    /// hung daemon reach their origins directly before people notice.
    pub heartbeat_age_max: Option<Time>,
    /// Default 30 s: long enough for slow answers; the unit's `TimeoutStopSec` is set above it.
    pub drain_timeout: Option<Time>,
    /// Default: the only gateway.
    pub gateway: Option<Gateway>,
    /// `stdout`, or an absolute path. Default: the last events can be asked for, and none is
    /// written.
    pub event_log: Option<String>,
    /// At least one.
    #[serde(default)]
    pub service: Vec<Service>,
}

/// `[gateway]`: which one of its fleet this is.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Gateway {
    /// Default: claimed in `etcd`.
    pub index: Option<Index>,
    /// With `index` only: it goes with whoever hands indices out.
    pub count: Option<u32>,
    pub etcd: Option<Etcd>,
}

/// `index = 7`, `index = "hostname"` or a table.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Index {
    Number(u64),
    Word(String),
    Table(IndexTable),
}

/// The table form: one of its keys.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct IndexTable {
    pub file: Option<PathBuf>,
    pub env: Option<String>,
}

/// `[gateway.etcd]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Etcd {
    pub endpoints: Vec<String>,
    /// No default: two fleets that share one by accident would take each other's indices.
    pub prefix: String,
    /// Default 10 s: survives a restart of etcd's leader, and a vanished gateway's place is free
    /// soon.
    pub ttl: Option<Time>,
    /// Default: the host's name and machine id.
    pub name: Option<String>,
    pub tls: Option<Tls>,
    /// Default: nobody logs in.
    pub user: Option<String>,
    /// Not the password itself: configuration files are read by many.
    pub password_file: Option<PathBuf>,
}

/// `[gateway.etcd.tls]` and `[service.discovery.eds.tls]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tls {
    /// Default: the authorities that the system trusts.
    pub ca: Option<PathBuf>,
    /// Default: the client says nothing of who it is.
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
    /// Default: the host in the server's URL.
    pub server_name: Option<String>,
}

/// One `[[service]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Service {
    pub name: String,
    #[serde(default)]
    pub listen: Vec<String>,
    #[serde(default)]
    pub intercept: Vec<String>,
    /// Default: processes of every cgroup.
    pub cgroups: Option<Vec<String>>,
    /// No default: it is the operator's promise about the bytes, and reuse rests on it.
    pub protocol: Option<String>,
    /// http1 only. Default `exchange`: many idle keep-alive clients then share few sockets.
    pub affinity: Option<String>,
    /// opaque only. Default `never`: nothing in unknown bytes says where an exchange ends.
    pub reuse: Option<String>,
    /// `reuse = "quiet"` only. Default 20 ms: late bytes of an answer come within a round trip.
    pub settle_time: Option<Time>,
    /// Default `balance`.
    pub route: Option<String>,
    /// dialled only. Default 1024: bounds the memory that a scan of a whole network can take.
    pub origins_max: Option<usize>,
    /// dialled only. Default 5 min: outlives the pauses between runs of cron jobs every minute.
    pub origin_idle: Option<Time>,
    /// Intercepted http1 with `route = "balance"` only. Default `auto`: nonblocking clients notice
    /// nothing of it.
    pub steer: Option<String>,
    /// Default: all clients have the same priority.
    pub high: Option<High>,
    #[serde(default)]
    pub origins: Vec<String>,
    /// Default: the members are `origins`, and do not change.
    pub discovery: Option<Discovery>,
    /// Default: all members are used.
    pub subset: Option<Subset>,
    /// Default: origins are not checked; those that cannot be connected to are found by trying.
    pub health_check: Option<HealthCheck>,
    #[serde(default)]
    pub pool: Pool,
    #[serde(default)]
    pub limits: Limits,
    #[serde(default)]
    pub retries: Retries,
    #[serde(default)]
    pub timeouts: Timeouts,
    /// Default: no origin is ever left out for what it does.
    pub outlier: Option<Outlier>,
    #[serde(default)]
    pub panic: Panic,
}

/// `high = { … }`: clients that connections are kept for. Who they are is said as for the service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct High {
    #[serde(default)]
    pub listen: Vec<String>,
    #[serde(default)]
    pub intercept: Vec<String>,
    /// Default: those of the service. Without `intercept`: who is of high priority where the service
    /// intercepts.
    pub cgroups: Option<Vec<String>>,
}

/// `[service.discovery]`: where members come from; one of the sources must be there.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Discovery {
    /// Default 200 ms: a deployment that replaces many members at once is one change.
    pub debounce: Option<Time>,
    /// Default 2 s: a list that never comes to rest is still followed.
    pub debounce_max: Option<Time>,
    /// Default `keep`: an empty list is more often a mistake than the truth.
    pub on_empty: Option<String>,
    pub file: Option<DiscoveryFile>,
    pub dns: Option<DiscoveryDns>,
    pub kubernetes: Option<DiscoveryKubernetes>,
    pub eds: Option<DiscoveryEds>,
}

/// `[service.discovery.file]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DiscoveryFile {
    pub path: PathBuf,
}

/// `[service.discovery.dns]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DiscoveryDns {
    pub name: String,
    /// Default `address`: all addresses, of both families.
    pub record: Option<String>,
    /// Addresses only, and needed for them.
    pub port: Option<u32>,
    /// Default: those of `/etc/resolv.conf`.
    #[serde(default)]
    pub resolvers: Vec<String>,
    /// Default 1 s: servers that balance by DNS say 0 and mean "often".
    pub refresh_min: Option<Time>,
    /// Default 60 s: a TTL of a day is not meant to hide a new origin for a day.
    pub refresh_max: Option<Time>,
}

/// `[service.discovery.kubernetes]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DiscoveryKubernetes {
    pub service: String,
    /// Default: the namespace of the pod or of the context.
    pub namespace: Option<String>,
    /// No default: a second port that is added later must not make the first one ambiguous.
    pub port: PortOrName,
    /// Default: as `kubectl` does it, then the service account of the pod.
    pub kubeconfig: Option<PathBuf>,
    /// Default: the current one of the kubeconfig.
    pub context: Option<String>,
    /// Default: hints of endpoints are not read.
    pub zone: Option<String>,
}

/// `port = 8080` or `port = "http"`.
#[derive(Debug)]
pub(super) enum PortOrName {
    Number(i64),
    Name(String),
}

// By hand for the same reason as `Keepalive` below.
impl<'de> Deserialize<'de> for PortOrName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberOrName;

        impl Visitor<'_> for NumberOrName {
            type Value = PortOrName;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the number or the name of a port")
            }

            fn visit_i64<E>(self, number: i64) -> Result<PortOrName, E> {
                Ok(PortOrName::Number(number))
            }

            fn visit_str<E>(self, name: &str) -> Result<PortOrName, E> {
                Ok(PortOrName::Name(name.to_owned()))
            }
        }

        deserializer.deserialize_any(NumberOrName)
    }
}

/// `[service.discovery.eds]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DiscoveryEds {
    pub server: String,
    pub tls: Option<Tls>,
    /// Default: the service's name.
    pub cluster: Option<String>,
    /// No default: control planes answer nodes that they know.
    pub node_id: String,
    /// Default `broker`.
    pub node_cluster: Option<String>,
    /// Default true: what most control planes serve.
    pub ads: Option<bool>,
    /// Default `sotw`: every control plane speaks it.
    pub api: Option<String>,
    /// Default 15 s: Envoy's.
    pub initial_fetch_timeout: Option<Time>,
}

/// `[service.subset]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Subset {
    /// Default `kronecker`: as stable as a ring, with half its spread.
    pub algorithm: Option<String>,
    /// No default: it depends on what has to be survived.
    pub size: Option<usize>,
    /// `kronecker` only. Default: none; each gateway then needs to know nothing of the others.
    pub band: Option<String>,
    /// Default: a zone may have the whole subset.
    pub zone_max: Option<usize>,
    /// Default half of `size`: what is left would otherwise have to bear twice its share.
    pub min_healthy: Option<usize>,
}

/// `[service.health_check]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HealthCheck {
    /// No default: what proves that an origin is healthy is for the operator to say.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// http only. No default: many origins answer `/` with work.
    pub path: Option<String>,
    /// http only. Default: the name of the service, as Envoy sends that of its cluster.
    pub host: Option<String>,
    /// http only. Default `GET`.
    pub method: Option<String>,
    /// http only. Default `["200"]`, as in Envoy.
    pub expected_statuses: Option<Vec<String>>,
    /// http only. Default: none; as in Envoy, another status is an answer and needs no second one.
    pub retriable_statuses: Option<Vec<String>>,
    /// http only. Default `true`: a check in five seconds should not cost a handshake.
    pub reuse_connection: Option<bool>,
    /// Default 5 s: three failures show within 15 s, and a fleet of 100 gateways costs an origin
    /// 20 requests a second.
    pub interval: Option<Time>,
    /// Default 10: gateways that were started together drift apart.
    pub interval_jitter_percent: Option<u32>,
    /// Default: `interval`.
    pub unhealthy_interval: Option<Time>,
    /// Default 1 s, at most `interval`: a path that is asked this often should be quick.
    pub timeout: Option<Time>,
    /// Default 3: two lost packets in a row happen.
    pub unhealthy_threshold: Option<u32>,
    /// Default 2: one success may be luck.
    pub healthy_threshold: Option<u32>,
    /// Default `healthy`: clients that come while the daemon starts would be refused otherwise.
    pub initial: Option<String>,
}

/// `[service.pool]`: per worker and origin.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Pool {
    /// Default 2 (but at most `max_idle` and `max_connections`): the first request finds a warm
    /// socket and so does one beside it. Where an origin closes connections that nobody has used,
    /// those are opened again only once somebody has had to wait, except for so many in all. 0 for
    /// `route = "dialled"`: an address that somebody dialled once has not asked for more connections
    /// than that.
    pub prewarm: Option<usize>,
    /// Default 100 per second: a fleet that is replaced at once is warm again within seconds, and
    /// its handshakes stay far below what any origin's accept queue bears.
    pub prewarm_rate: Option<u32>,
    /// Default 64: above the concurrency that most workers see per origin, and small beside an
    /// origin's usual limit of connections.
    pub max_idle: Option<usize>,
    /// Default 30 s: undercuts the keep-alive timeouts that servers commonly have (60 s, 75 s);
    /// shorter ones are learnt when the origin announces them.
    pub idle_ttl: Option<Time>,
    /// Default 10 min: changes behind an address (a redeployed origin, a moved virtual IP) get
    /// traffic within that time, and one handshake in ten minutes costs nothing.
    pub max_lifetime: Option<Time>,
    /// Default 10000: bounds what an origin that leaks per connection can leak.
    pub max_requests: Option<u64>,
    /// Default 5 s: most clients give up soon after.
    pub queue_timeout: Option<Time>,
    /// Default 2 s: a lost SYN is sent again after 1 s; the second copy may still arrive.
    pub connect_timeout: Option<Time>,
    /// Default 8: keeps a cold start from flooding the origin's accept queue.
    pub max_dials: Option<usize>,
    /// Default 50 ms: a restart of an origin takes about that long at least.
    pub backoff_base: Option<Time>,
    /// Default 1 s: a recovered origin is found again within that time, and clients that come
    /// while no origin is reachable wait no longer for the next try.
    pub backoff_max: Option<Time>,
    /// Default 30 s / 10 s / 3: a silently dead peer is found within a minute, also through
    /// stateful firewalls that forget idle connections.
    pub keepalive: Option<Keepalive>,
}

/// `[service.limits]`: of all workers together.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Limits {
    /// Default 1024: Envoy's default; protects the origins.
    pub max_connections: Option<usize>,
    /// Default: only `max_connections` limits it.
    pub max_connections_per_origin: Option<usize>,
    /// Default false: the limit then holds to the last connection. (Envoy always does it.)
    pub one_connection_per_origin: Option<bool>,
    /// Default 1024: Envoy's default; a longer queue only hides an outage.
    pub max_pending: Option<usize>,
    /// Default 1024: Envoy's default.
    pub max_requests: Option<usize>,
    /// Intercepted services only. Default `response`: it says why.
    pub refuse: Option<String>,
    /// With `high` only. Default: the defaults, as Envoy has them for each priority.
    pub high: Option<Box<Limits>>,
}

/// `[service.retries]`: of all workers together.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_field_names, reason = "the keys are Envoy's")]
pub(super) struct Retries {
    /// Default `connect-failure`, `refused`, `reset-before-response` and `ejected`; an opaque service
    /// has only the first.
    pub retry_on: Option<Vec<String>>,
    /// http1 only. Default 3 sockets for one request.
    pub attempts: Option<usize>,
    /// Default: a part of what is under way instead.
    pub max_retries: Option<usize>,
    /// Default 50: half of the origins can go at once. (Envoy: 20.)
    pub budget_percent: Option<f64>,
    /// Default 32: a small service loses nothing. (Envoy: 3.)
    pub min_concurrency: Option<usize>,
}

/// `[service.timeouts]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Timeouts {
    /// Default 75 s: nginx's `keepalive_timeout`; clients that worked with it keep working.
    pub client_idle: Option<Time>,
    /// Default 30 s: a slow client may pause, but must not hold an origin socket for ever.
    pub client_stall: Option<Time>,
    /// Default 5 min: slow reports are legitimate; the client's own limit usually comes first.
    pub origin_stall: Option<Time>,
    /// Default 1 h: web sockets and database sessions idle for long; keepalive finds dead ones.
    pub tunnel_idle: Option<Time>,
}

/// `[service.outlier]`: names, units and defaults are Envoy's, so that settings can be carried over.
/// Ejecting is opt-in, as it is there: an origin that answers 500 to a few bad requests in a row is
/// no outlier to everybody. The last keys are not Envoy's.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Outlier {
    /// Default 10 s.
    pub interval: Option<Time>,
    /// Default 30 s, times the number of ejections in a row.
    pub base_ejection_time: Option<Time>,
    /// Default 300 s, or `base_ejection_time` if that is longer.
    pub max_ejection_time: Option<Time>,
    /// Default 0 s.
    pub max_ejection_time_jitter: Option<Time>,
    /// Default 10: of fewer than ten origins none is ejected.
    pub max_ejection_percent: Option<u8>,
    /// Default false.
    pub always_eject_one_host: Option<bool>,
    /// Default true.
    pub successful_active_health_check_uneject_host: Option<bool>,
    /// Default false.
    pub split_external_local_origin_errors: Option<bool>,
    /// Default 5; 0 turns it off.
    pub consecutive_5xx: Option<u32>,
    /// Default 100.
    pub enforcing_consecutive_5xx: Option<u8>,
    /// Default 5; 0 turns it off.
    pub consecutive_gateway_failure: Option<u32>,
    /// Default 0: `consecutive_5xx` counts these, too.
    pub enforcing_consecutive_gateway_failure: Option<u8>,
    /// Default 5; 0 turns it off.
    pub consecutive_local_origin_failure: Option<u32>,
    /// Default 100.
    pub enforcing_consecutive_local_origin_failure: Option<u8>,
    /// Default 5.
    pub success_rate_minimum_hosts: Option<u32>,
    /// Default 100.
    pub success_rate_request_volume: Option<u32>,
    /// Default 1900 thousandths: 3 % of a normal distribution are below.
    pub success_rate_stdev_factor: Option<u32>,
    /// Default 100.
    pub enforcing_success_rate: Option<u8>,
    /// Default 100.
    pub enforcing_local_origin_success_rate: Option<u8>,
    /// Default 85.
    pub failure_percentage_threshold: Option<u8>,
    /// Default 5.
    pub failure_percentage_minimum_hosts: Option<u32>,
    /// Default 50.
    pub failure_percentage_request_volume: Option<u32>,
    /// Default 0.
    pub enforcing_failure_percentage: Option<u8>,
    /// Default 0.
    pub enforcing_failure_percentage_local_origin: Option<u8>,
    /// Default 1 s: pauses of a garbage collector are shorter.
    pub stall_time: Option<Time>,
    /// Default 10: a host like its peers stays silent meanwhile once in 20,000 times.
    pub stall_request_volume: Option<u32>,
    /// Default 100: a host that answers nobody while others do is a sure sign.
    pub enforcing_stall: Option<u8>,
    /// Default 3000 thousandths.
    pub handshake_latency_factor: Option<u32>,
    /// Default 5 ms: within a site, a few round trips more are no reason to lose a host.
    pub handshake_latency_minimum: Option<Time>,
    /// Default 5.
    pub handshake_latency_minimum_hosts: Option<u32>,
    /// Default 5: pools make few handshakes.
    pub handshake_latency_volume: Option<u32>,
    /// Default `eject`.
    pub handshake_latency_action: Option<String>,
    /// Default 0: another zone may be farther away, and no worse for that.
    pub enforcing_handshake_latency: Option<u8>,
    /// Default 3000 thousandths.
    pub rtt_latency_factor: Option<u32>,
    /// Default 5 ms.
    pub rtt_latency_minimum: Option<Time>,
    /// Default 5.
    pub rtt_latency_minimum_hosts: Option<u32>,
    /// Default 20, of which each stands for some requests.
    pub rtt_latency_volume: Option<u32>,
    /// Default `eject`.
    pub rtt_latency_action: Option<String>,
    /// Default 0: an origin that thinks for long also acknowledges late.
    pub enforcing_rtt_latency: Option<u8>,
    /// Default 5.
    pub retransmission_percentage_threshold: Option<u8>,
    /// Default 5.
    pub retransmission_percentage_minimum_hosts: Option<u32>,
    /// Default 200: of these, ten are sent again at the threshold.
    pub retransmission_percentage_segment_volume: Option<u32>,
    /// Default 0: what is sent again has arrived in the end.
    pub enforcing_retransmission_percentage: Option<u8>,
}

/// `[service.panic]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Panic {
    /// Default 50, as in Envoy.
    pub threshold: Option<u8>,
    /// Default false: all origins at once are more likely overloaded than wrong.
    pub fail_on_panic: Option<bool>,
}

/// `keepalive = false`, `true` or a table.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Keepalive {
    Off,
    On(KeepaliveTable),
}

/// The table form; what is left out has its default.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeepaliveTable {
    pub idle: Option<Time>,
    pub interval: Option<Time>,
    pub count: Option<u32>,
}

// By hand, because serde's untagged enums answer every mistake with "matched no variant".
impl<'de> Deserialize<'de> for Keepalive {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BoolOrTable;

        impl<'de> Visitor<'de> for BoolOrTable {
            type Value = Keepalive;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`false` or { idle = \"30s\", interval = \"10s\", count = 3 }")
            }

            fn visit_bool<E>(self, on: bool) -> Result<Keepalive, E> {
                Ok(if on { Keepalive::On(KeepaliveTable::default()) } else { Keepalive::Off })
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Keepalive, M::Error> {
                KeepaliveTable::deserialize(MapAccessDeserializer::new(map)).map(Keepalive::On)
            }
        }

        deserializer.deserialize_any(BoolOrTable)
    }
}

// By hand, for the same reason.
impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberWordOrTable;

        impl<'de> Visitor<'de> for NumberWordOrTable {
            type Value = Index;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("7, \"hostname\", { file = \"/path\" } or { env = \"VARIABLE\" }")
            }

            fn visit_u64<E>(self, number: u64) -> Result<Index, E> {
                Ok(Index::Number(number))
            }

            fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Index, E> {
                let unexpected = || E::invalid_value(Unexpected::Signed(number), &self);
                number.try_into().map(Index::Number).map_err(|_negative| unexpected())
            }

            fn visit_str<E>(self, word: &str) -> Result<Index, E> {
                Ok(Index::Word(word.to_owned()))
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Index, M::Error> {
                IndexTable::deserialize(MapAccessDeserializer::new(map)).map(Index::Table)
            }
        }

        deserializer.deserialize_any(NumberWordOrTable)
    }
}
