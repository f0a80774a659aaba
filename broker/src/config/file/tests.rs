mod outlier;
mod tls;

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::config::discovery::{Dns, Eds, EdsApi, Families, Kubernetes, Port, Records, Source};
use crate::config::gateway::{Etcd, Gateway, Index};
use crate::config::health::{Initial, Kind};
use crate::config::outlier::{Outlier, Panic};
use crate::config::retries::{Condition, Retries, RetryLimit};
use crate::config::tls::Tls;
use crate::config::{Affinity, Keepalive, OpaqueReuse, Protocol, Refuse, Route};

const MINIMAL: &str = r#"
[[service]]
name = "web"
listen = ["127.0.0.1:8080"]
protocol = "http1"
origins = ["10.0.0.1:80"]
"#;

/// Compares the problems found in a file, without the file's name in front.
fn check(text: &str, expected: &[&str]) {
    let found = match parse(text, "f") {
        Ok(_) => Vec::new(),
        Err(ConfigError::Invalid { problems, .. }) => {
            problems.iter().map(ToString::to_string).collect()
        }
        Err(error) => vec![error.to_string()],
    };
    assert_eq!(found, expected, "in {text}");
}

/// The minimal service plus some keys of its own.
fn check_keys(keys: &str, expected: &[&str]) {
    check(&format!("{MINIMAL}{keys}"), expected);
}

/// An http1 service that intercepts.
fn intercepting(targets: &str, keys: &str) -> String {
    format!(
        "[[service]]\nname = \"i\"\nintercept = {targets}\nprotocol = \"http1\"\n\
         origins = [\"10.0.0.1:80\"]\n{keys}\n"
    )
}

fn parsed(text: &str) -> Config {
    parse(text, "f").unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn defaults() {
    let config = parsed(MINIMAL);
    assert_eq!(config.admin_socket, Path::new("/run/broker/admin.sock"));
    assert!(config.workers.get() <= broker_ebpf::abi::WORKERS_MAX);
    assert_eq!(config.heartbeat_age_max, Duration::from_secs(1));
    assert_eq!(config.drain_timeout, Duration::from_secs(30));
    let service = &config.services[0];
    assert_eq!(service.protocol, Protocol::Http1 { affinity: Affinity::Exchange });
    assert_eq!(service.route, Route::Balance);
    assert_eq!((service.pool.prewarm, service.pool.max_idle), (2, 64));
    assert_eq!(service.pool.keepalive.map(|k| k.count), Some(3));
    assert_eq!(service.timeouts.client_idle, Duration::from_secs(75));
    assert!(warnings(&config).is_empty());
}

#[test]
fn everything_set() {
    let config = parsed(
        r#"
        workers = 3
        admin_socket = "/tmp/admin.sock"
        intercept_from_netns = "10.1.0.1"
        heartbeat_age_max = "500ms"
        drain_timeout = "0s"
        [[service]]
        name = "web"
        intercept = ["10.9.0.10:80", "10.0.0.0/8:80", "[fd00::/64]:80", "[::1]:80", "origins"]
        cgroups = ["/system.slice/php.service"]
        protocol = "http1"
        affinity = "connection"
        route = "dialled"
        origins_max = 16
        origin_idle = "1m"
        origins = ["10.0.0.1:80", "[fd00::1]:80", "[::ffff:10.0.0.2]:80"]
        [service.pool]
        prewarm = 1
        max_requests = 5
        keepalive = { count = 5 }
        [service.timeouts]
        tunnel_idle = "2h"
        [[service]]
        name = "db"
        listen = ["[::1]:5432"]
        protocol = "opaque"
        reuse = "quiet"
        settle_time = "5ms"
        origins = ["10.0.0.9:5432"]
        pool = { keepalive = false, max_idle = 0 }
        "#,
    );
    let [web, db] = &config.services[..] else { panic!("{config:?}") };
    assert_eq!(web.intercept.len(), 7);
    assert_eq!(web.origins[2].to_string(), "10.0.0.2:80", "mapped addresses are IPv4");
    assert_eq!(
        web.pool.keepalive,
        Some(Keepalive {
            idle: Duration::from_secs(30),
            interval: Duration::from_secs(10),
            count: 5
        })
    );
    assert!(matches!(web.route, Route::Dialled { origins_max, .. } if origins_max.get() == 16));
    let reuse = OpaqueReuse::Quiet { settle: Duration::from_millis(5) };
    assert_eq!(db.protocol, Protocol::Opaque { reuse });
    assert_eq!(db.pool.keepalive, None);
    assert_eq!(db.pool.prewarm, 2, "max_idle does not limit an opaque service's warm sockets");
}

#[test]
fn shape_errors_have_lines() {
    let error = parse("workers = 2\nworker = 3\n", "f.toml").unwrap_err().to_string();
    assert!(error.starts_with("f.toml: line 2, column 1\n"), "{error}");
    assert!(error.contains("2 | worker = 3\n"), "{error}");
    assert!(error.contains("unknown key `worker`; the keys here are `workers`, "), "{error}");
    let error = parse(&format!("{MINIMAL}pool = {{ prewarm = -1 }}"), "f").unwrap_err();
    assert!(error.to_string().contains("line 7"), "{error}");
    let error = parse(&format!("{MINIMAL}pool = {{ keepalive = 3 }}"), "f").unwrap_err();
    assert!(error.to_string().contains("keepalive = 3: must be `false` or { idle ="), "{error}");
    let error = parse(&format!("{MINIMAL}[service.pool.keepalive]\nidel = \"1s\""), "f");
    assert!(error.unwrap_err().to_string().contains("unknown key `idel`"));
    let error = parse("workers =", "f").unwrap_err().to_string();
    assert!(error.starts_with("f: TOML parse error at line 1, column "), "{error}");
    let error = load(Path::new("/nonexistent/b.toml")).unwrap_err();
    assert_eq!(error.to_string(), "cannot read /nonexistent/b.toml");
}

#[test]
fn shape_errors_are_in_the_words_of_the_file() {
    let last = |text: &str| {
        let error = parse(text, "f").unwrap_err().to_string();
        error.lines().last().unwrap_or_default().to_owned()
    };
    let keys = |keys: &str| last(&format!("{MINIMAL}{keys}"));
    let number = "must be a whole number, and not below 0";
    assert_eq!(last("workers = \"two\""), format!("workers = \"two\": {number}"));
    assert_eq!(keys("pool = { prewarm = -1 }"), format!("prewarm = -1: {number}"));
    assert_eq!(keys("[service.pool]\nmax_idle = 2.5"), format!("max_idle = 2.5: {number}"));
    let duration = "must be a duration such as \"20ms\", \"30s\" or \"5m\"";
    assert_eq!(keys("pool.idle_ttl = 30"), format!("pool.idle_ttl = 30: {duration}"));
    assert_eq!(last("drain_timeout = 30"), format!("drain_timeout = 30: {duration}"));
    assert_eq!(
        keys("outlier.max_ejection_percent = 300"),
        "outlier.max_ejection_percent = 300: must be a whole number of 0..=100"
    );
    assert_eq!(
        keys("retries = { attempts = 1, budget_percent = \"x\" }"),
        "budget_percent = \"x\": must be a number"
    );
    assert_eq!(
        keys("limits.one_connection_per_origin = \"yes\""),
        "limits.one_connection_per_origin = \"yes\": must be true or false"
    );
    assert_eq!(keys("route = 3"), "route = 3: must be text in quotes");
    assert_eq!(
        keys("discovery.file.path = false"),
        "discovery.file.path = false: must be a path in quotes"
    );
    assert_eq!(keys("pool = 3"), "pool = 3: must be a table, such as { KEY = VALUE }");
    assert_eq!(
        keys("intercept = \"10.0.0.1:80\""),
        "intercept = \"10.0.0.1:80\": must be a list, such as [\"10.0.0.1:80\"]"
    );
    assert_eq!(keys("intercept = [\"a\", 80]"), "intercept = 80: must be text in quotes");
    assert_eq!(last("[[service]]\nlisten = []"), "the key `name` is missing");
    assert_eq!(
        last("gateway.index = -3"),
        "gateway.index = -3: must be 7, \"hostname\", { file = \"/path\" } or { env = \"VARIABLE\" }"
    );
    let services = "service: each service begins with [[service]], and its tables, such as \
                    [service.limits], follow it";
    for wrong in [
        "[service.limits]\nmax_pending = 3",
        "[service]\nname = \"web\"",
        "[service.limits]\nmax_pending = 3\n[[service]]\nname = \"web\"",
    ] {
        assert_eq!(last(wrong), services, "{wrong}");
    }
    assert_eq!(keys("name = \"x\""), "the key `name` is given twice");
}

#[test]
fn every_problem_is_reported_with_its_place() {
    let text = r#"
        workers = 0
        heartbeat_age_max = "1ms"
        [[service]]
        name = "web"
        listen = ["127.0.0.1:0"]
        protocol = "http2"
        pool = { prewarm = 9, max_idle = 8, idle_ttl = "soon" }
        [[service]]
        name = "web"
        protocol = "opaque"
        affinity = "exchange"
        origins = ["10.0.0.1:80"]
    "#;
    check(
        text,
        &[
            "workers = 0: must be 1..=64",
            "heartbeat_age_max = \"1ms\": must be at least 100ms",
            "service \"web\": listen = \"127.0.0.1:0\": the port must be 1..=65535",
            "service \"web\": protocol = \"http2\": must be \"http1\" or \"opaque\"",
            "service \"web\": origins: route = \"balance\" needs at least one, or `discovery`",
            "service \"web\": pool.prewarm = 9: must not be larger than pool.max_idle (8)",
            "service \"web\": pool.idle_ttl = \"soon\": must be a duration such as \"20ms\", \"30s\" or \"5m\"",
            "service \"web\": affinity = \"exchange\": belongs to protocol = \"http1\"; opaque always keeps one socket for each client",
            "service \"web\": listen: a service needs `listen` or `intercept`, or clients never meet it",
            "service \"web\": name = \"web\": is also the name of service #1",
        ],
    );
    let shown = parse(text, "f").unwrap_err().to_string();
    assert!(shown.lines().all(|line| line.starts_with("f: ")), "{shown}");
}

#[test]
fn top_level_rules() {
    check("", &["service: at least one [[service]] is needed"]);
    let with = |keys: &str| format!("{keys}\n{MINIMAL}");
    check(&with("workers = 65"), &["workers = 65: must be 1..=64"]);
    check(
        &with("admin_socket = \"a.sock\""),
        &["admin_socket = \"a.sock\": must be an absolute path of at most 107 bytes"],
    );
    check(
        &with("intercept_from_netns = \"::1\""),
        &[
            "intercept_from_netns = \"::1\": must not be a loopback address: other network namespaces have a loopback of their own",
        ],
    );
    check(
        &with("intercept_from_netns = \"0.0.0.0\""),
        &[
            "intercept_from_netns = \"0.0.0.0\": must be one address that clients in other network namespaces can reach",
        ],
    );
    check(
        &with("intercept_from_netns = \"10.0.0.1:80\""),
        &[
            "intercept_from_netns = \"10.0.0.1:80\": must be an IP address of this host, without a port",
        ],
    );
    check(
        &with("heartbeat_age_max = \"0s\""),
        &["heartbeat_age_max = \"0s\": must be longer than zero"],
    );
}

#[test]
fn names() {
    let named = |name: &str| MINIMAL.replace("\"web\"", name);
    check(&named("\"\""), &["service #1: name = \"\": must be 1..=64 of A-Z a-z 0-9 - _ ."]);
    check(
        &named("\"a b\""),
        &["service \"a b\": name = \"a b\": must be 1..=64 of A-Z a-z 0-9 - _ ."],
    );
}

#[test]
fn listeners_clash() {
    let second = |listen: &str| {
        format!(
            "{MINIMAL}\n[[service]]\nname = \"two\"\nlisten = [{listen}]\nprotocol = \"http1\"\n\
             origins = [\"10.0.0.1:80\"]\n"
        )
    };
    check(
        &second("\"127.0.0.1:8080\""),
        &["service \"two\": listen = \"127.0.0.1:8080\": service \"web\" listens there already"],
    );
    for wildcard in ["0.0.0.0:8080", "[::]:8080"] {
        check(
            &second(&format!("{wildcard:?}")),
            &[&format!(
                "service \"two\": listen = \"{wildcard}\": clashes with \"127.0.0.1:8080\" of service \
             \"web\": 0.0.0.0 takes every IPv4 address, and [::] every address"
            )],
        );
    }
    check(&second("\"[::1]:8080\", \"127.0.0.2:8080\""), &[]);
    check(
        &second("\"10.0.0.7:1\", \"10.0.0.7:1\""),
        &["service \"two\": listen = \"10.0.0.7:1\": is given twice"],
    );
}

#[test]
fn intercept_targets() {
    check(
        &intercepting("[\"10.0.0.1/8:80\"]", ""),
        &[
            "service \"i\": intercept = \"10.0.0.1/8:80\": has bits set beyond its prefix length; did you mean 10.0.0.0/8:80?",
        ],
    );
    let nested = intercepting("[\"10.0.0.0/8:80\"]", "")
        + &intercepting("[\"10.1.0.0/16:80\", \"10.0.0.0/8:81\"]", "").replace("\"i\"", "\"j\"");
    check(&nested, &[]);
    let same = intercepting("[\"origins\"]", "")
        + &intercepting("[\"10.0.0.1/32:80\"]", "").replace("\"i\"", "\"j\"");
    check(
        &same,
        &["service \"j\": intercept = \"10.0.0.1:80\": is intercepted by service \"i\" already"],
    );
    check(&intercepting("[\"10.0.0.1:80\", \"origins\"]", ""), &[]);
    let none = intercepting("[\"origins\"]", "route = \"dialled\"")
        .replace("origins = [\"10.0.0.1:80\"]", "origins = []");
    check(
        &none,
        &[
            "service \"i\": intercept = \"origins\": stands for the addresses in `origins`, and there are none",
        ],
    );
    // Those of a live list are not known yet.
    let live = |high: &str| {
        let list = "[service.discovery.file]\npath = \"/origins.json\"";
        let service = intercepting("[\"10.9.0.1:80\", \"origins\"]", &format!("{high}\n{list}"));
        service.replace("origins = [\"10.0.0.1:80\"]", "")
    };
    let [first, high] = &parsed(&live("high = { cgroups = [\"/checkout\"] }")).services[..] else {
        panic!("two services")
    };
    assert_eq!((first.intercept.len(), first.intercept_members), (1, true));
    assert_eq!((high.intercept.len(), high.intercept_members, high.by_cgroup), (1, true, true));
    check(
        &live("high = { intercept = [\"origins\"] }"),
        &[
            "service \"i\": high.intercept = \"origins\": stands for the addresses in `origins`; those that are discovered can be intercepted by the service itself, and `cgroups` tell who is of high priority there",
        ],
    );
}

#[test]
fn no_more_than_the_kernel_has_room_for() {
    let service =
        |i: usize, targets: &str| intercepting(targets, "").replace("\"i\"", &format!("\"i{i}\""));
    let services: String = (0..129).map(|i| service(i, &format!("[\"10.1.0.{i}:80\"]"))).collect();
    check(&services, &["service = (129 with `intercept`): at most 128 can intercept"]);
    let targets: Vec<_> = (1..=4097).map(|port| format!("10.1.0.1:{port}")).collect();
    check(
        &service(0, &format!("{targets:?}")),
        &["intercept = (4097 destinations): at most 4096 destinations, over all services"],
    );
}

#[test]
fn origin_rules() {
    let origins = |list: &str| MINIMAL.replace("[\"10.0.0.1:80\"]", list);
    check(
        &origins("[\"10.0.0.1:80\", \"10.0.0.1:80\"]"),
        &["service \"web\": origins = \"10.0.0.1:80\": is given twice"],
    );
    check(
        &origins("[\"0.0.0.0:80\", \"[ff02::1]:80\", \"example.com:80\"]"),
        &[
            "service \"web\": origins = \"0.0.0.0:80\": the unspecified address is nobody's; name the host's own",
            "service \"web\": origins = \"[ff02::1]:80\": TCP cannot connect to a multicast address",
            "service \"web\": origins = \"example.com:80\": must be ADDRESS:PORT, such as 10.0.0.1:80 or [fd00::1]:80; [service.discovery.dns] resolves names",
        ],
    );
    check(
        &origins("[\"127.0.0.1:8080\"]"),
        &[
            "service \"web\": origins = \"127.0.0.1:8080\": would loop: service \"web\" listens on \"127.0.0.1:8080\"",
        ],
    );
    check(
        &origins("[\"127.0.0.9:8080\"]").replace("127.0.0.1:8080", "[::]:8080"),
        &[
            "service \"web\": origins = \"127.0.0.9:8080\": would loop: service \"web\" listens on \"[::]:8080\"",
        ],
    );
}

#[test]
fn keys_belong_together() {
    check_keys(
        "reuse = \"never\"",
        &[
            "service \"web\": reuse = \"never\": belongs to protocol = \"opaque\"; http1 knows by itself when a socket is clean",
        ],
    );
    let opaque = MINIMAL.replace("http1", "opaque");
    check(
        &format!("{opaque}settle_time = \"1s\""),
        &[
            "service \"web\": settle_time = \"1s\": belongs to protocol = \"opaque\" with reuse = \"quiet\"",
        ],
    );
    check(
        &format!("{opaque}reuse = \"quiet\"\nsettle_time = \"0s\""),
        &["service \"web\": settle_time = \"0s\": must be longer than zero"],
    );
    check_keys(
        "origins_max = 9\norigin_idle = \"1s\"",
        &[
            "service \"web\": origins_max = 9: belongs to route = \"dialled\"",
            "service \"web\": origin_idle = \"1s\": belongs to route = \"dialled\"",
        ],
    );
    check_keys(
        "route = \"dialled\"",
        &[
            "service \"web\": listen = [\"127.0.0.1:8080\"]: route = \"dialled\" goes where the client dialled, and that would be this very listener; use `intercept`",
            "service \"web\": intercept: route = \"dialled\" needs it: only intercepted connections have an address that the client dialled",
        ],
    );
    check_keys(
        "cgroups = [\"/a\"]",
        &["service \"web\": cgroups = [\"/a\"]: restricts `intercept`, and there is none"],
    );
    check(
        &MINIMAL.replace("protocol = \"http1\"\n", ""),
        &["service \"web\": protocol: must be \"http1\" or \"opaque\""],
    );
}

#[test]
fn cgroup_paths() {
    let cgroups = |list: &str| intercepting("[\"origins\"]", &format!("cgroups = {list}"));
    check(&cgroups("[\"/\", \"/system.slice/php.service\"]"), &[]);
    check(
        &cgroups("[\"a\", \"/a/../b\", \"/sys/fs/cgroup/a\", \"/c\", \"/c/\"]"),
        &[
            "service \"i\": cgroups = \"a\": must be an absolute path without `..`",
            "service \"i\": cgroups = \"/a/../b\": must be an absolute path without `..`",
            "service \"i\": cgroups = \"/sys/fs/cgroup/a\": starts at the cgroup2 mount, as in /proc/PID/cgroup: /system.slice/php.service",
            "service \"i\": cgroups = \"/c/\": is given twice",
        ],
    );
    check(
        &cgroups("[]"),
        &[
            "service \"i\": cgroups = []: must name at least one; leave the key out to intercept every process",
        ],
    );
    let nine: Vec<_> = (0..9).map(|i| format!("/{i}")).collect();
    let error = parse(&cgroups(&format!("{nine:?}")), "f").unwrap_err().to_string();
    assert!(error.ends_with("at most 8 paths"), "{error}");
}

#[test]
fn pool_rules() {
    let pool = |keys: &str| format!("[service.pool]\n{keys}");
    check_keys(
        &format!("{}\n[service.limits]\nmax_connections = 8", pool("prewarm = 9")),
        &["service \"web\": pool.prewarm = 9: must not be larger than limits.max_connections (8)"],
    );
    check_keys(&pool("max_idle = 0"), &[]);
    check_keys(
        &pool("max_dials = 0\nmax_requests = 0"),
        &[
            "service \"web\": pool.max_requests = 0: must be 1..=18446744073709551615",
            "service \"web\": pool.max_dials = 0: must be 1..=1048576",
        ],
    );
    check_keys(
        &pool("backoff_base = \"2s\"\nbackoff_max = \"1s\""),
        &[
            "service \"web\": pool.backoff_base = \"2s\": must not be longer than pool.backoff_max (1s)",
        ],
    );
    check_keys(
        &pool("backoff_max = \"1ms\""),
        &[
            "service \"web\": pool.backoff_base = \"50ms\": must not be longer than pool.backoff_max (1ms)",
        ],
    );
    check_keys(&pool("backoff_base = \"9s\""), &[]);
    check_keys(
        &pool("idle_ttl = \"0s\"\nmax_lifetime = \"1000years\""),
        &[
            "service \"web\": pool.idle_ttl = \"0s\": must be longer than zero",
            "service \"web\": pool.max_lifetime = \"1000years\": must be at most 365 days",
        ],
    );
    check_keys(
        &pool("keepalive = { idle = \"1500ms\", count = 128 }"),
        &[
            "service \"web\": pool.keepalive.idle = \"1500ms\": must be whole seconds, at most 32767",
            "service \"web\": pool.keepalive.count = 128: must be 1..=127",
        ],
    );
    check_keys(
        "[service.timeouts]\nclient_idle = \"0s\"",
        &["service \"web\": timeouts.client_idle = \"0s\": must be longer than zero"],
    );
}

#[test]
fn refusing_at_connect_needs_clients_that_are_intercepted_and_a_queue() {
    let refuse = "[service.limits]\nrefuse = \"connect\"";
    let config = parsed(&intercepting("[\"origins\"]", refuse));
    assert_eq!(config.services[0].limits.refuse, Refuse::Connect);
    assert_eq!(parsed(MINIMAL).services[0].limits.refuse, Refuse::Response);
    check_keys(
        &format!("{refuse}\nmax_pending = 0"),
        &[
            "service \"web\": limits.refuse = \"connect\": belongs to `intercept`: other clients are connected before the broker sees them",
            "service \"web\": limits.refuse = \"connect\": needs max_pending of at least 1: who waits shows that nothing is left",
        ],
    );
    check_keys(
        "[service.limits]\nrefuse = \"reset\"",
        &["service \"web\": limits.refuse = \"reset\": must be \"response\" or \"connect\""],
    );
}

#[test]
fn high_priority() {
    let text = intercepting(
        "[\"origins\"]",
        "cgroups = [\"/all\"]\nsteer = \"kernel\"\n\
         high = { listen = [\"127.0.0.1:8081\"], intercept = [\"10.9.0.1:80\"] }\n\
         [service.limits]\nmax_connections = 10\nrefuse = \"connect\"\n\
         [service.limits.high]\nmax_connections = 1\nmax_pending = 7",
    );
    // The positions of the others stay what they are in the file.
    let config = parsed(&format!("{text}{MINIMAL}"));
    let names: Vec<_> = config.services.iter().map(|s| (&*s.name, s.high_of)).collect();
    assert_eq!(names, [("i", None), ("web", None), ("i.high", Some(0))]);
    let [first, _, high] = &config.services[..] else { panic!("{names:?}") };
    assert_eq!((&high.origins, high.steer), (&first.origins, first.steer));
    assert_eq!(high.cgroups, first.cgroups, "unless it has its own");
    assert_eq!((high.listen.len(), high.intercept[0].to_string()), (1, "10.9.0.1:80".to_owned()));
    let numbers = |s: &crate::config::Service| {
        (s.limits.max_connections, s.limits.max_pending, s.pool.prewarm)
    };
    assert_eq!((numbers(first), numbers(high)), ((10, 1024, 2), (1, 7, 1)));
    assert_eq!((first.limits.refuse, high.limits.refuse), (Refuse::Connect, Refuse::Response));
    let own = "high = { intercept = [\"10.9.0.1:80\"], cgroups = [\"/own\"] }";
    assert_eq!(
        parsed(&intercepting("[\"origins\"]", own)).services[1].cgroups,
        [Path::new("/own")]
    );
    // Without addresses of their own they are told by their cgroup, at those of the service.
    let by_cgroup = "steer = \"kernel\"\ncgroups = [\"/all\"]\nhigh = { cgroups = [\"/own\"] }\n\
                     [service.limits.high]\nrefuse = \"connect\"";
    let config = parsed(&intercepting("[\"origins\"]", by_cgroup));
    let [first, high] = &config.services[..] else { panic!("{config:?}") };
    assert_eq!((first.by_cgroup, high.by_cgroup, high.steer), (false, true, first.steer));
    assert_eq!(
        (&high.intercept, &*high.cgroups),
        (&first.intercept, &[std::path::PathBuf::from("/own")][..])
    );
    assert_eq!((high.limits.refuse, high.listen.len()), (Refuse::Connect, 0));
    let both = "high = { listen = [\"127.0.0.1:8081\"], cgroups = [\"/own\"] }";
    let config = parsed(&intercepting("[\"10.9.0.2:80\"]", both));
    assert!(config.services[1].by_cgroup && config.services[1].listen.len() == 1);
    // Only those of high priority are intercepted, and so only they can be steered.
    let steered = "steer = \"kernel\"\nhigh = { intercept = [\"10.9.0.1:80\"] }\n";
    let config = parsed(&format!("{MINIMAL}{steered}"));
    assert_eq!(
        config.services.iter().map(|s| s.steer).collect::<Vec<_>>(),
        [crate::config::Steer::Relay, crate::config::Steer::Kernel]
    );
}

#[test]
fn high_priority_rules() {
    check_keys(
        "[service.limits.high]\nmax_pending = 1",
        &["service \"web\": limits.high: belongs to `high`, which says whom it is for"],
    );
    check_keys(
        "high = { cgroups = [\"/a\"] }\n[service.limits.high]\nmax_connections = 0\nrefuse = \"connect\"\n\
         [service.limits.high.high]",
        &[
            "service \"web\": high.cgroups = [\"/a\"]: is about connections that are intercepted, and there is neither `intercept` nor `high.intercept`",
            "service \"web\": limits.high.high: there are two priorities only",
            "service \"web\": limits.high.max_connections = 0: must be 1..=1048576",
            "service \"web\": limits.high.refuse = \"connect\": belongs to `intercept`: other clients are connected before the broker sees them",
        ],
    );
    check_keys(
        "high = { }",
        &[
            "service \"web\": high: needs `listen`, `intercept` or `cgroups`, or nobody is of high priority",
        ],
    );
    check(
        &intercepting("[\"10.9.0.2:80\"]", "high = { cgroups = [\"/sys/fs/cgroup/a\"] }"),
        &[
            "service \"i\": high.cgroups = \"/sys/fs/cgroup/a\": starts at the cgroup2 mount, as in /proc/PID/cgroup: /system.slice/php.service",
        ],
    );
    for other in ["", "intercept = [\"10.9.0.1:80\"], "] {
        check(
            &intercepting("[\"10.9.0.2:80\"]", &format!("high = {{ {other}cgroups = [] }}")),
            &[
                "service \"i\": high.cgroups = []: must name at least one; leave the key out for those of the service",
            ],
        );
    }
    check_keys(
        "high = { listen = [\"127.0.0.1:8080\"], intercept = [\"10.0.0.1\"] }",
        &[
            "service \"web\": high.intercept = \"10.0.0.1\": must be ADDRESS:PORT or NET/LENGTH:PORT, such as 10.0.0.0/8:80 or [fd00::/64]:80, or the word \"origins\"",
            "service \"web.high\": listen = \"127.0.0.1:8080\": service \"web\" listens there already",
        ],
    );
    check(
        &intercepting(
            "[\"10.0.0.0/8:80\"]",
            "route = \"dialled\"\nhigh = { intercept = [\"10.9.0.1:80\"] }",
        ),
        &["service \"i\": high: belongs to route = \"balance\""],
    );
}

#[test]
fn retry_rules() {
    let retries = |keys: &str| format!("[service.retries]\n{keys}");
    let of = |keys: &str| parsed(&format!("{MINIMAL}{}", retries(keys))).services[0].retries;
    assert_eq!(of(""), Retries::default());
    assert_eq!(of("max_retries = 3").limit, RetryLimit::Fixed(3));
    let percent = |percent| RetryLimit::Budget { percent, min_concurrency: 32 };
    assert_eq!(of("budget_percent = 20.0").limit, percent(20.0));
    assert_eq!(of("budget_percent = 12.5").limit, percent(12.5));
    assert!(Condition::ALL.iter().all(|(_, c)| !of("retry_on = []").on.contains(*c)));
    let on = of("retry_on = [\"gateway-error\"]\nattempts = 1").on;
    assert!(on.contains(Condition::GatewayError) && !on.contains(Condition::Refused));
    check_keys(
        &retries("retry_on = [\"5xx\", \"refused\", \"refused\"]\nattempts = 0"),
        &[
            "service \"web\": retries.retry_on = \"5xx\": must be \"connect-failure\" or \"refused\" or \"reset-before-response\" or \"gateway-error\" or \"ejected\"",
            "service \"web\": retries.retry_on = \"refused\": is given twice",
            "service \"web\": retries.attempts = 0: must be 1..=16",
        ],
    );
    check_keys(
        &retries("budget_percent = 120.0\nmin_concurrency = 0"),
        &[
            "service \"web\": retries.min_concurrency = 0: must be 1..=1048576",
            "service \"web\": retries.budget_percent = 120: must be 0..=100",
        ],
    );
    check_keys(
        &retries("budget_percent = nan"),
        &["service \"web\": retries.budget_percent = NaN: must be 0..=100"],
    );
    check_keys(
        &retries("max_retries = 3\nbudget_percent = 20.0"),
        &[
            "service \"web\": retries.budget_percent = 20: cannot be given together with `max_retries`, which is a fixed number",
        ],
    );
    let opaque = MINIMAL.replace("http1", "opaque");
    check(
        &format!(
            "{opaque}{}",
            retries("retry_on = [\"connect-failure\", \"refused\"]\nattempts = 2")
        ),
        &[
            "service \"web\": retries.attempts = 2: belongs to protocol = \"http1\": an opaque client's bytes are sent on one socket only",
            "service \"web\": retries.retry_on = \"refused\": belongs to protocol = \"http1\"; opaque bytes cannot be sent twice",
        ],
    );
}

#[test]
fn advice_about_limits() {
    let advice = |keys: &str| {
        let text = format!("workers = 4\n{MINIMAL}{keys}").replace(
            "\"10.0.0.1:80\"",
            "\"10.0.0.1:80\", \"10.0.0.2:80\", \"10.0.0.3:80\", \"10.0.0.4:80\"",
        );
        warnings(&parsed(&text)).join("\n").replace("service \"web\": ", "")
    };
    assert_eq!(advice("[service.limits]\nmax_connections = 32"), "");
    assert_eq!(
        advice("[service.limits]\nmax_connections = 31\nmax_connections_per_origin = 7"),
        "limits.max_connections_per_origin = 7: less than what 4 workers with pool.prewarm = 2 would open early\n\
         limits.max_connections = 31: less than what 4 workers with pool.prewarm = 2 would open early to 4 origins"
    );
    assert_eq!(
        advice("[service.retries]\nattempts = 1"),
        "retries.attempts = 1: no request is sent twice, and the budget (50 %, at least 32) is for connections that fail only"
    );
    assert_eq!(
        advice("[service.retries]\nattempts = 1\nmax_retries = 9\nretry_on = [\"refused\"]"),
        "retries.attempts = 1: no request is sent twice, and max_retries = 9 has no effect"
    );
    let outlier = |percent: u8| {
        advice(&format!(
            "[service.subset]\nsize = 4\nmin_healthy = 3\n[service.outlier]\nmax_ejection_percent = {percent}"
        ))
    };
    assert_eq!(outlier(25), "");
    assert_eq!(
        outlier(50),
        "outlier.max_ejection_percent = 50: of the subset's 4 origins only 1 can be lost before fewer than subset.min_healthy (3) are left"
    );
}

#[test]
fn advice() {
    let config = parsed(&format!(
        "{MINIMAL}[service.pool]\nmax_idle = 0\nidle_ttl = \"1h\"\nqueue_timeout = \"1s\""
    ));
    assert_eq!(
        warnings(&config),
        [
            "service \"web\": pool.max_idle = 0: nothing is ever reused; every exchange costs a handshake",
            "service \"web\": pool.prewarm = 0: the first exchange of each worker and origin waits for a handshake",
            "service \"web\": pool.idle_ttl is longer than pool.max_lifetime, which always comes first",
            "service \"web\": pool.queue_timeout is shorter than pool.connect_timeout: exchanges are refused while their socket is still being dialled",
        ]
    );
    let config = parsed(&intercepting("[\"10.2.0.0/16:80\"]", "route = \"dialled\""));
    assert_eq!(
        warnings(&config),
        [
            "service \"i\": origins: 10.0.0.1:80 is not among the intercepted addresses, so nobody is ever routed to it",
        ]
    );
    let with_vip = |vip: &str| {
        let text = format!(
            "{}{}",
            MINIMAL.replace("10.0.0.1:80", vip),
            intercepting("[\"10.9.9.9:80\"]", "")
        );
        warnings(&parsed(&text))
    };
    assert_eq!(
        with_vip("10.9.9.9:80"),
        [
            "service \"web\": origins: 10.9.9.9:80 is what service \"i\" intercepts, but not for the broker itself, which needs a server there",
        ]
    );
    assert!(with_vip("10.9.9.9:81").is_empty());
}

proptest! {
    #[test]
    fn never_panics_on_text(text in "\\PC{0,200}") {
        drop(parse(&text, "f"));
    }

    /// Valid shape, arbitrary values: gets past serde and into the rules.
    #[test]
    fn never_panics_on_values(
        words in prop::collection::vec("[0-9a-z\\[\\]:./ -]{0,24}", 9),
        numbers in prop::collection::vec(0..3_000_000_usize, 4),
        duration in "[0-9]{1,20}(ns|ms|s|m|h|days|years)?",
    ) {
        let text = format!(
            "admin_socket = {:?}\nintercept_from_netns = {:?}\ndrain_timeout = {duration:?}\n\
             [[service]]\nname = {:?}\nlisten = [{:?}]\nintercept = [{:?}, \"origins\"]\n\
             cgroups = [{:?}]\nprotocol = \"http1\"\nroute = {:?}\norigins = [{:?}]\n\
             origins_max = {}\n[service.pool]\nprewarm = {}\nmax_idle = {}\nmax_dials = {}\n\
             idle_ttl = {duration:?}\nbackoff_base = {duration:?}\n\
             keepalive = {{ idle = {duration:?} }}\n",
            words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7],
            numbers[0], numbers[1], numbers[2], numbers[3],
        );
        match parse(&text, "f") {
            Ok(config) => drop(warnings(&config)),
            Err(ConfigError::Shape { problem, .. }) => panic!("{problem}"),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

/// The example is the reference of all keys: it must be valid, and right about the defaults.
#[test]
fn the_example_is_valid_and_tells_the_defaults() {
    let text = include_str!("../../../../deploy/broker.toml");
    let example = parsed(text);
    assert!(warnings(&example).is_empty(), "{:?}", warnings(&example));
    let default = parsed(MINIMAL);
    let settings = |config: &Config| {
        let web = &config.services[0];
        format!(
            "{:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?} {:?}",
            config.admin_socket,
            config.heartbeat_age_max,
            config.drain_timeout,
            web.protocol,
            web.route,
            web.pool,
            web.limits,
            web.retries,
            web.timeouts
        )
    };
    assert_eq!(settings(&example), settings(&default));
    let web = &example.services[0];
    let of_two = Outlier { always_eject_one_host: true, ..Outlier::default() };
    assert_eq!((&web.outlier, web.panic), (&Some(of_two), Panic::default()));
    let dialled = parsed(&intercepting("[\"origins\"]", "route = \"dialled\""));
    assert_eq!(example.services[1].route, dialled.services[0].route);
    let health =
        |config: &Config, service: usize| format!("{:?}", config.services[service].health_check);
    let table = "[service.health_check]\ntype = \"http\"\npath = \"/healthz\"";
    let default = parsed(&format!("{MINIMAL}{table}").replace("web", "discovered"));
    assert_eq!(health(&example, 3), health(&default, 0));
    let netns = text.replace("# intercept_from_netns", "intercept_from_netns");
    assert!(parsed(&netns).intercept_from_netns.is_some());
}

#[test]
fn discovery() {
    let service = "[[service]]\nname = \"d\"\nlisten = [\"127.0.0.1:80\"]\nprotocol = \"http1\"\n";
    let file = "[service.discovery.file]\npath = \"/etc/broker/origins.json\"\n";
    check(&format!("{service}{file}"), &[]);
    check(&format!("{service}[service.discovery]\ndebounce = \"3s\"\n{file}"), &[]);
    check(
        &format!("{service}[service.discovery]\ndebounce = \"3s\"\ndebounce_max = \"1s\"\n{file}"),
        &[
            "service \"d\": discovery.debounce = \"3s\": must not be longer than discovery.debounce_max (1s)",
        ],
    );
    check(
        &format!("{service}[service.discovery]\non_empty = \"panic\""),
        &[
            "service \"d\": discovery.on_empty = \"panic\": must be \"keep\" or \"drop\"",
            "service \"d\": discovery = (0 sources): needs exactly one of `file`, `dns`, `kubernetes`, `eds`",
        ],
    );
    check(
        &format!("{service}origins = [\"10.0.0.1:80\"]\n[service.discovery.file]\npath = \"x\""),
        &[
            "service \"d\": origins = [\"10.0.0.1:80\"]: cannot be given together with `discovery`",
            "service \"d\": discovery.file.path = \"x\": must be an absolute path: the daemon's working directory is nobody's",
        ],
    );
}

/// A service with this source.
fn discovering(source: &str) -> String {
    format!(
        "[[service]]\nname = \"d\"\nlisten = [\"127.0.0.1:80\"]\nprotocol = \"http1\"\n\
         [service.discovery.{source}"
    )
}

fn discovered(source: &str) -> Source {
    parsed(&discovering(source)).services.remove(0).discovery.expect("a source").source
}

#[test]
fn discovery_by_dns() {
    let expected = Dns {
        name: "web.example.com".to_owned(),
        records: Records::Addresses { port: 80, families: Families::Both },
        resolvers: Vec::new(),
        refresh_min: Duration::from_secs(1),
        refresh_max: Duration::from_mins(1),
    };
    let found = discovered("dns]\nname = \"web.example.com.\"\nport = 80");
    assert!(matches!(found, Source::Dns(dns) if dns == expected));
    let found = discovered(
        "dns]\nname = \"_http._tcp.web\"\nrecord = \"srv\"\nresolvers = [\"127.0.0.53:53\"]",
    );
    let Source::Dns(dns) = found else { panic!("{found:?}") };
    assert_eq!((dns.records, dns.resolvers.len()), (Records::Srv, 1));

    let check =
        |keys: &str, expected: &[&str]| check(&discovering(&format!("dns]\n{keys}")), expected);
    let long = format!("{}.com", "a".repeat(64));
    for name in ["10.0.0.1", "", "a..b", "-a.com", "a b.com", "web.example.com:80", &long] {
        let rule = "must be a full DNS name, such as origins.example.com";
        let problem = format!("service \"d\": discovery.dns.name = {name:?}: {rule}");
        check(&format!("name = {name:?}\nport = 80"), &[&problem]);
    }
    check(
        "name = \"a\"\nrecord = \"aaaa\"",
        &[
            "service \"d\": discovery.dns.port: is needed: only `record = \"srv\"` brings ports of its own",
        ],
    );
    check(
        "name = \"a\"\nport = 65536\nresolvers = [\"127.0.0.53\"]",
        &[
            "service \"d\": discovery.dns.port = 65536: must be 1..=65535",
            "service \"d\": discovery.dns.resolvers = \"127.0.0.53\": must be ADDRESS:PORT, such as 10.0.0.1:80 or [fd00::1]:80",
        ],
    );
    check(
        "name = \"a\"\nrecord = \"srv\"\nport = 80",
        &[
            "service \"d\": discovery.dns.port = 80: belongs to addresses; SRV records bring ports of their own",
        ],
    );
    check(
        "name = \"a\"\nrecord = \"mx\"\nport = 80",
        &[
            "service \"d\": discovery.dns.record = \"mx\": must be \"address\" or \"a\" or \"aaaa\" or \"srv\"",
        ],
    );
    check(
        "name = \"a\"\nport = 80\nrefresh_min = \"10ms\"\nrefresh_max = \"500ms\"",
        &[
            "service \"d\": discovery.dns.refresh_min = \"10ms\": must be at least 100ms",
            "service \"d\": discovery.dns.refresh_min = \"10ms\": must not be longer than discovery.dns.refresh_max (500ms)",
        ],
    );
}

#[test]
fn discovery_by_kubernetes() {
    let expected = Kubernetes {
        service: "web".to_owned(),
        namespace: Some("shop".to_owned()),
        port: Port::Number(8080),
        kubeconfig: None,
        zone: Some("a".to_owned()),
        context: None,
    };
    let found = discovered(
        "kubernetes]\nservice = \"web\"\nnamespace = \"shop\"\nport = 8080\nzone = \"a\"",
    );
    assert!(matches!(found, Source::Kubernetes(kubernetes) if kubernetes == expected));
    let found = discovered("kubernetes]\nservice = \"web\"\nport = \"http\"");
    let Source::Kubernetes(kubernetes) = found else { panic!("{found:?}") };
    assert_eq!(kubernetes.port, Port::Named("http".to_owned()));

    let check = |keys: &str, expected: &[&str]| {
        check(&discovering(&format!("kubernetes]\n{keys}")), expected);
    };
    check(
        "service = \"web,tier=x\"\nnamespace = \"\"\nport = 0\nkubeconfig = \"config\"",
        &[
            "service \"d\": discovery.kubernetes.service = \"web,tier=x\": must be 1..=63 of a-z 0-9 -, as Kubernetes wants it",
            "service \"d\": discovery.kubernetes.namespace = \"\": must be 1..=63 of a-z 0-9 -, as Kubernetes wants it",
            "service \"d\": discovery.kubernetes.port = 0: must be 1..=65535",
            "service \"d\": discovery.kubernetes.kubeconfig = \"config\": must be an absolute path: the daemon's working directory is nobody's",
        ],
    );
    let two = "file]\npath = \"/o\"\n[service.discovery.kubernetes]\nservice = \"a\"\nport = 1";
    super::tests::check(
        &discovering(two),
        &[
            "service \"d\": discovery = (2 sources): needs exactly one of `file`, `dns`, `kubernetes`, `eds`",
        ],
    );
}

#[test]
fn discovery_by_eds() {
    let found = |keys: &str| match discovered(&format!("eds]\n{keys}")) {
        Source::Eds(eds) => eds,
        other => panic!("{other:?}"),
    };
    let expected = Eds {
        server: "http://10.0.0.1:18000".to_owned(),
        tls: Tls::default(),
        cluster: "d".to_owned(),
        node_id: "gateway-7".to_owned(),
        node_cluster: "broker".to_owned(),
        aggregated: true,
        api: EdsApi::Whole,
        initial_fetch_timeout: Duration::from_secs(15),
    };
    let keys = "server = \"http://10.0.0.1:18000\"\nnode_id = \"gateway-7\"\n";
    assert_eq!(found(keys), expected);
    let all = "cluster = \"web\"\nnode_cluster = \"edge\"\nads = false\napi = \"delta\"\n\
               initial_fetch_timeout = \"1s\"\n";
    let expected = Eds {
        cluster: "web".to_owned(),
        node_cluster: "edge".to_owned(),
        aggregated: false,
        api: EdsApi::Delta,
        initial_fetch_timeout: Duration::from_secs(1),
        ..expected
    };
    assert_eq!(found(&format!("{keys}{all}")), expected);
    check(
        &discovering(
            "eds]\nserver = \"grpc://10.0.0.1:18000\"\nnode_id = \"\"\napi = \"rest\"\n\
             initial_fetch_timeout = \"0s\"",
        ),
        &[
            "service \"d\": discovery.eds.server = \"grpc://10.0.0.1:18000\": must be http://HOST:PORT or https://HOST:PORT, such as http://10.0.0.1:2379",
            "service \"d\": discovery.eds.node_id = \"\": must not be empty",
            "service \"d\": discovery.eds.api = \"rest\": must be \"sotw\" or \"delta\"",
            "service \"d\": discovery.eds.initial_fetch_timeout = \"0s\": must be longer than zero",
        ],
    );
}

/// The minimal service, after some tables.
fn check_gateway(gateway: &str, expected: &[&str]) {
    check(&format!("{gateway}\n{MINIMAL}"), expected);
}

#[test]
fn gateway_forms() {
    let gateway = |text: &str| parsed(&format!("{text}\n{MINIMAL}")).gateway;
    assert_eq!(gateway(""), Gateway::default());
    let configured = |index| Gateway::Configured {
        index,
        count: 500.try_into().expect("not zero"),
        registry: None,
    };
    let with = |index: &str| gateway(&format!("[gateway]\nindex = {index}\ncount = 500"));
    assert_eq!(with("7"), configured(Index::Number(7)));
    assert_eq!(with("\"hostname\""), configured(Index::Hostname));
    assert_eq!(
        with("{ file = \"/etc/podinfo/index\" }"),
        configured(Index::File("/etc/podinfo/index".into()))
    );
    assert_eq!(with("{ env = \"POD_INDEX\" }"), configured(Index::Env("POD_INDEX".into())));

    let registry =
        "[gateway.etcd]\nendpoints = [\"http://127.0.0.1:2379\"]\nprefix = \"/broker/a\"";
    let etcd = Etcd {
        endpoints: vec!["http://127.0.0.1:2379".into()],
        tls: Tls::default(),
        login: None,
        prefix: "/broker/a".into(),
        ttl: Duration::from_secs(10),
        name: None,
    };
    assert_eq!(gateway(registry), Gateway::Claimed(etcd.clone()));
    let entered = gateway(&format!("[gateway]\nindex = 7\ncount = 500\n{registry}"));
    let Gateway::Configured { index: Index::Number(7), registry, .. } = entered else {
        panic!("{entered:?}")
    };
    assert_eq!(registry, Some(etcd));
}

#[test]
fn gateway_rules() {
    check_gateway("[gateway]", &["gateway: needs `index`, or `etcd` to claim one"]);
    check_gateway(
        "[gateway]\nindex = 7",
        &["gateway.count: is needed: how many gateways there are"],
    );
    check_gateway(
        "[gateway]\nindex = 7\ncount = 7",
        &["gateway.index = 7: must be below gateway.count (7); the first one is 0"],
    );
    check_gateway(
        "[gateway]\nindex = 70000\ncount = 0",
        &["gateway.index = 70000: must be 0..=65535", "gateway.count = 0: must be 1..=65536"],
    );
    check_gateway(
        "[gateway]\nindex = \"host\"\ncount = 2",
        &[
            "gateway.index = \"host\": must be a number, \"hostname\", { file = \"/path\" } or { env = \"VARIABLE\" }",
        ],
    );
    check_gateway(
        "[gateway]\nindex = { file = \"index\" }\ncount = 2",
        &[
            "gateway.index.file = \"index\": must be an absolute path: the daemon's working directory is nobody's",
        ],
    );
    check_gateway(
        "[gateway]\nindex = { file = \"/i\", env = \"I\" }\ncount = 2",
        &["gateway.index: needs either `file` or `env`"],
    );
    check_gateway(
        "[gateway]\ncount = 3\n[gateway.etcd]\nendpoints = [\"10.0.0.1:2379\"]\nprefix = \"fleet/\"\nttl = \"1s\"\nname = \"\"",
        &[
            "gateway.etcd.endpoints = \"10.0.0.1:2379\": must be http://HOST:PORT or https://HOST:PORT, such as http://10.0.0.1:2379",
            "gateway.etcd.prefix = \"fleet/\": must be like \"/broker/fleet-a\": what the keys of this fleet, and of no other, start with",
            "gateway.etcd.name = \"\": must not be empty",
            "gateway.etcd.ttl = \"1s\": must be at least 2s",
            "gateway.count = 3: belongs to `index`; with etcd alone the registry knows",
        ],
    );
    for (bad, why) in [
        ("index = -1\ncount = 2", "index = -1: must be 7, \"hostname\""),
        ("index = 1.5\ncount = 2", "index = 1.5: must be 7, \"hostname\""),
        (
            "index = { etcd = {} }\ncount = 2",
            "unknown key `etcd`; the keys here are `file` or `env`",
        ),
        ("size = 2", "unknown key `size`; the keys here are `index`, `count`, `etcd`"),
    ] {
        let error = parse(&format!("[gateway]\n{bad}\n{MINIMAL}"), "f").unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn subset() {
    let subset = |keys: &str| format!("[service.subset]\n{keys}");
    check_keys(&subset("size = 3"), &[]);
    check_keys(&subset("algorithm = \"off\""), &[]);
    check_keys(
        &subset("band = \"10%\""),
        &[
            "service \"web\": subset.size: is needed: how many origins each gateway uses (`broker sim size` helps)",
        ],
    );
    check_keys(
        &subset("algorithm = \"ring\"\nsize = 3\nband = \"10%\"\nmin_healthy = 4\nzone_max = 0"),
        &[
            "service \"web\": subset.min_healthy = 4: must be 0..=3",
            "service \"web\": subset.zone_max = 0: must be 1..=3",
            "service \"web\": subset.band = \"10%\": belongs to algorithm = \"kronecker\"; a ring has none",
        ],
    );
    check_keys(
        &subset("algorithm = \"maglev\"\nsize = 3"),
        &[
            "service \"web\": subset.algorithm = \"maglev\": must be \"kronecker\" or \"ring\" or \"off\"",
        ],
    );
}

#[test]
fn health_checks() {
    let checked = |keys: &str| {
        let text = format!("{MINIMAL}[service.health_check]\n{keys}");
        parsed(&text).services.remove(0).health_check.expect("a health check")
    };
    let found = checked("type = \"tcp\"");
    assert!(matches!(found.kind, Kind::Tcp));
    assert_eq!((found.unhealthy_threshold.get(), found.healthy_threshold.get()), (3, 2));
    assert_eq!((found.interval, found.timeout), (Duration::from_secs(5), Duration::from_secs(1)));
    assert_eq!((found.unhealthy_interval, found.initial), (found.interval, Initial::Healthy));

    let found = checked(
        "type = \"http\"\npath = \"/up?full\"\nmethod = \"HEAD\"\nhost = \"a.example:80\"\n\
         expected_statuses = [\"200-299\", \"404\"]\nretriable_statuses = [\"503\"]\n\
         reuse_connection = false\ninterval = \"500ms\"\nunhealthy_interval = \"1m\"\n\
         interval_jitter_percent = 0\ninitial = \"unhealthy\"\nhealthy_threshold = 1",
    );
    assert_eq!(found.timeout, found.interval, "lowering the interval alone is no mistake");
    assert_eq!((found.healthy_threshold.get(), found.initial), (1, Initial::Unhealthy));
    let Kind::Http(http) = found.kind else { panic!("{found:?}") };
    assert_eq!((http.method.as_str(), http.path.as_str()), ("HEAD", "/up?full"));
    assert_eq!((http.host.as_bytes(), http.reuse_connection), (&b"a.example:80"[..], false));
    assert_eq!(http.expected_statuses, [200..=299, 404..=404]);
    assert_eq!(http.retriable_statuses, [503..=503]);
}

#[test]
fn health_check_rules() {
    let check_keys = |keys: &str, expected: &[&str]| {
        check_keys(&format!("[service.health_check]\n{keys}"), expected);
    };
    check_keys("", &["service \"web\": health_check.type: must be \"tcp\" or \"http\""]);
    check_keys(
        "type = \"http\"",
        &[
            "service \"web\": health_check.path: is needed: a path such as \"/healthz\", as it stands in a request",
        ],
    );
    for path in ["", "healthz", "/a b", "/a#b", "/\u{e4}", "http://a/b"] {
        let rule = "must be a path such as \"/healthz\", as it stands in a request";
        let problem = format!("service \"web\": health_check.path = {path:?}: {rule}");
        check_keys(&format!("type = \"http\"\npath = {path:?}"), &[&problem]);
    }
    check_keys(
        "type = \"http\"\npath = \"/\"\nhost = \"a b\"\nmethod = \"POST\"\nexpected_statuses = []",
        &[
            "service \"web\": health_check.method = \"POST\": must be \"GET\" or \"HEAD\"",
            "service \"web\": health_check.host = \"a b\": must be a host as in a request, such as \"www.example.com\"",
            "service \"web\": health_check.expected_statuses = []: must not be empty: no answer would ever do",
        ],
    );
    for status in ["20x", "199", "600", "299-200", "200-", "-", "100-299"] {
        let rule =
            "must be a status or a range of them, such as \"204\" or \"200-299\", within 200-599";
        for key in ["expected_statuses", "retriable_statuses"] {
            let problem = format!("service \"web\": health_check.{key} = {status:?}: {rule}");
            check_keys(
                &format!("type = \"http\"\npath = \"/\"\n{key} = [\"200\", {status:?}]"),
                &[&problem],
            );
        }
    }
    check_keys(
        "type = \"tcp\"\npath = \"/\"\nreuse_connection = true",
        &[
            "service \"web\": health_check.path = \"/\": belongs to type = \"http\"",
            "service \"web\": health_check.reuse_connection = true: belongs to type = \"http\"",
        ],
    );
    check_keys(
        "type = \"tcp\"\ntimeout = \"6s\"\nunhealthy_interval = \"1ms\"\nunhealthy_threshold = 0\n\
         interval_jitter_percent = 101\ninitial = \"degraded\"",
        &[
            "service \"web\": health_check.timeout = \"6s\": must not be longer than health_check.interval (5s)",
            "service \"web\": health_check.unhealthy_interval = \"1ms\": must be at least 100ms",
            "service \"web\": health_check.unhealthy_threshold = 0: must be 1..=4294967295",
            "service \"web\": health_check.interval_jitter_percent = 101: must be 0..=100",
            "service \"web\": health_check.initial = \"degraded\": must be \"healthy\" or \"unhealthy\"",
        ],
    );
    let dialled = intercepting(
        "[\"origins\"]",
        "route = \"dialled\"\n[service.health_check]\ntype = \"tcp\"",
    );
    check(
        &dialled,
        &[
            "service \"i\": health_check: belongs to route = \"balance\"; a dialled origin has no other in its place",
        ],
    );
}
