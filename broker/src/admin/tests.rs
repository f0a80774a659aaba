use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use hyper::Method;

use super::client::request;
use super::*;
use crate::stats::{HostCounters, Process, Registry};

/// A daemon that does nothing but answer.
#[derive(Default)]
struct Daemon {
    draining: AtomicBool,
}

impl Source for Daemon {
    fn snapshot(&self) -> Snapshot {
        let process = Process { now_unix_ms: 1000, uptime_ms: 2500, workers: 2 };
        let host = HostCounters { active_opens: 42, ..HostCounters::default() };
        Snapshot::assemble(process, services(), Err("no kernel programs in this test"), host)
    }

    fn events(&self) -> String {
        String::new()
    }

    fn health(&self) -> Health {
        let draining = self.draining.load(SeqCst);
        Health { ready: !draining, draining }
    }

    fn drain(&self) {
        self.draining.store(true, SeqCst);
    }
}

fn services() -> Vec<crate::stats::ServiceSnapshot> {
    let config = crate::config::file::parse(
        "[[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"127.0.0.1:1\"]\n\
         origins = [\"10.0.0.1:80\"]",
        "f",
    );
    let registry = Registry::new(&config.unwrap_or_else(|e| panic!("{e}")));
    let worker = registry.register(0);
    let origin = worker.origin(([10, 0, 0, 1], 80).into());
    worker.metrics.queue_overflow.inc();
    origin.reused.add(99);
    origin.evict(crate::stats::EvictReason::IdleTtl);
    origin.handshake_us.record(100);
    let mut services = registry.services(&crate::datapath::steering::Carried::default());
    services[0].cgroups.insert("/system.slice/php.service".to_owned(), false);
    services
}

#[tokio::test]
async fn serves_and_cleans_up() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let listener = bind(&path).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, SOCKET_MODE);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(serve(listener, Arc::new(Daemon::default()), async {
        drop(stopped.await);
    }));

    let snapshot = fetch_snapshot(&path).await.unwrap();
    assert_eq!(snapshot.host.active_opens, 42);
    assert_eq!(snapshot.datapath.reason.as_deref(), Some("no kernel programs in this test"));
    assert_eq!(snapshot.services[0].origins[0].reused, 99);

    let (status, text) = request(&path, Method::GET, "/metrics").await.unwrap();
    assert_eq!(status, StatusCode::OK);
    assert!(text.starts_with(b"# HELP broker_info "));

    let health = async || {
        let (status, json) = request(&path, Method::GET, "/v1/health").await.unwrap();
        (status, serde_json::from_slice::<Health>(&json).unwrap())
    };
    assert_eq!(health().await, (StatusCode::OK, Health { ready: true, draining: false }));
    let drained = request(&path, Method::POST, "/v1/drain").await.unwrap();
    assert_eq!(drained.0, StatusCode::ACCEPTED);
    let expected = Health { ready: false, draining: true };
    assert_eq!(health().await, (StatusCode::SERVICE_UNAVAILABLE, expected));
    let (status, _) = request(&path, Method::GET, "/v1/drain").await.unwrap();
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);

    drop(stop);
    server.await.unwrap().unwrap();
    assert!(!path.exists());
    let error = fetch_snapshot(&path).await.unwrap_err().to_string();
    assert!(error.starts_with("no daemon at "), "{error}");
}

#[tokio::test]
async fn no_directory_is_made_for_a_socket_of_the_operators() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run/admin.sock");
    let error = bind(&path).unwrap_err().to_string();
    assert_eq!(error, format!("admin socket {}: its directory is not there", path.display()));
    assert!(!folder.path().join("run").exists());
    assert_eq!(missing_directory(Path::new(ADMIN_SOCKET)), None, "that of the default is made");
}

#[tokio::test]
async fn only_stale_sockets_are_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let error = fetch_snapshot(&path).await.unwrap_err().to_string();
    assert!(error.contains("it was killed"), "{error}");

    let first = bind(&path).unwrap();
    let error = bind(&path).unwrap_err().to_string();
    assert!(error.ends_with("another daemon is listening there"), "{error}");

    fs::remove_file(&path).unwrap();
    let second = bind(&path).unwrap();
    drop(first);
    assert!(path.exists(), "the first one must not take the second one's file along");
    drop(second);
    assert!(!path.exists());

    fs::write(&path, "precious").unwrap();
    let error = bind(&path).unwrap_err().to_string();
    assert!(error.contains("is not a socket"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"precious");
}

#[test]
fn exposition() {
    let text = metrics::render(&Daemon::default().snapshot());
    for line in [
        "broker_uptime_seconds 2.5",
        "broker_refusals_total{service=\"web\",reason=\"queue_overflow\"} 1",
        "broker_origin_connections_reused_total{service=\"web\",origin=\"10.0.0.1:80\"} 99",
        "broker_origin_connections_evicted_total{service=\"web\",origin=\"10.0.0.1:80\",reason=\"idle_ttl\"} 1",
        "broker_origin_handshake_seconds{service=\"web\",origin=\"10.0.0.1:80\",quantile=\"0.5\"} 0.000128",
        "broker_cgroup_present{service=\"web\",cgroup=\"/system.slice/php.service\"} 0",
        "broker_kernel_loaded 0",
        "# TYPE broker_host_tcp_active_opens_total counter",
        "broker_host_tcp_active_opens_total 42",
    ] {
        assert!(text.lines().any(|l| l == line), "no {line:?} in\n{text}");
    }
    let mut family = "";
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            family = name;
        } else if !line.starts_with('#') {
            assert!(line.starts_with(family), "{line} under {family}");
        }
    }
}

#[test]
fn alerts_use_metrics_that_exist() {
    let alerts = include_str!("../../../deploy/alerts.yml");
    let text = metrics::render(&Daemon::default().snapshot());
    let rules = alerts.lines().filter(|line| !line.trim_start().starts_with('#'));
    let names = rules
        .flat_map(|line| line.split(|c: char| !(c.is_ascii_lowercase() || c == '_')))
        .filter(|word| word.starts_with("broker_"));
    let mut used = 0;
    for name in names {
        assert!(text.contains(&format!("# TYPE {name} ")), "{name} is in alerts.yml only");
        used += 1;
    }
    assert!(used > 5);
}

#[test]
fn the_runbook_explains_every_reason() {
    let runbook = include_str!("../../../deploy/runbook.md");
    let evictions = crate::stats::EvictReason::ALL.map(|reason| format!("| `{}` |", reason.name()));
    let snapshot = metrics::render(&Daemon::default().snapshot());
    let refusals = snapshot
        .lines()
        .filter(|l| l.starts_with("broker_refusals_total") || l.starts_with("broker_exchange_fail"))
        .filter_map(|line| Some(line.split_once("reason=\"")?.1.split_once('"')?.0))
        .map(|reason| format!("| `{reason}` |"));
    for row in evictions.into_iter().chain(refusals) {
        assert!(runbook.contains(&row), "no {row} in the runbook");
    }
}
