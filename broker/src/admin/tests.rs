use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use hyper::Method;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::client::request;
use super::*;
use crate::stats::{HostCounters, Process, Registry};

/// A daemon that does nothing but answer.
#[derive(Default)]
struct Daemon {
    draining: AtomicBool,
    /// Snapshots being taken, and the most at once.
    snapshots: AtomicUsize,
    snapshots_max: AtomicUsize,
    /// How long one takes.
    takes: Duration,
}

impl Source for Daemon {
    fn snapshot(&self) -> Snapshot {
        let now = self.snapshots.fetch_add(1, SeqCst) + 1;
        self.snapshots_max.fetch_max(now, SeqCst);
        std::thread::sleep(self.takes);
        self.snapshots.fetch_sub(1, SeqCst);
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
    let gone = ([10, 0, 0, 2], 80).into();
    worker.origin(gone).reused.inc();
    worker.forget(gone);
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

/// A server that runs until the test ends, and a way to it.
fn server(daemon: Arc<Daemon>, path: PathBuf) -> impl AsyncFn() -> UnixStream {
    tokio::spawn(serve(bind(&path).unwrap(), daemon, std::future::pending()));
    async move || UnixStream::connect(&path).await.unwrap()
}

#[tokio::test]
async fn who_asks_and_ends_its_side_is_answered() {
    let folder = tempfile::tempdir().unwrap();
    let daemon = Daemon { takes: Duration::from_millis(50), ..Daemon::default() };
    let connect = server(Arc::new(daemon), folder.path().join("admin.sock"));
    let mut client = connect().await;
    client.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    client.shutdown().await.unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with('\n'), "{answer}");
}

#[tokio::test]
async fn snapshots_are_taken_one_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let daemon = Arc::new(Daemon { takes: Duration::from_millis(5), ..Daemon::default() });
    let connect = server(Arc::clone(&daemon), path.clone());
    for _ in 0..10 {
        // Who leaves takes no turn from those who stay.
        let mut hasty = connect().await;
        hasty.write_all(b"GET /v1/snapshot HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    }
    let all = (0..10).map(|_| fetch_snapshot(&path));
    assert!(futures_util::future::join_all(all).await.iter().all(Result::is_ok));
    assert_eq!(daemon.snapshots_max.load(SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn half_a_request_has_its_time() {
    let folder = tempfile::tempdir().unwrap();
    let connect = server(Arc::default(), folder.path().join("admin.sock"));
    let mut half = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        let mut client = connect().await;
        client.write_all(b"GET /metrics HT").await.unwrap();
        half.push(client);
    }
    let start = tokio::time::Instant::now();
    let mut next = connect().await;
    next.write_all(b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    next.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(start.elapsed() >= REQUEST_TIME, "{:?}: not after the others", start.elapsed());
    for mut client in half {
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.unwrap();
        assert!(!rest.starts_with(b"HTTP/1.1 200"));
    }
    assert!(start.elapsed() < REQUEST_TIME * 2, "{:?}", start.elapsed());
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

#[tokio::test]
async fn a_daemon_that_is_stopped_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.sock");
    let address = SockAddr::unix(&path).unwrap();
    let other = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    other.bind(&address).unwrap();
    other.listen(0).unwrap();
    let waiting = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    waiting.connect(&address).unwrap();
    let error = bind(&path).unwrap_err().to_string();
    assert!(error.ends_with("listening there, and does not answer"), "{error}");
}

#[test]
fn exposition() {
    let text = metrics::render(&Daemon::default().snapshot());
    for line in [
        "broker_uptime_seconds 2.5",
        "broker_refusals_total{service=\"web\",reason=\"queue_overflow\"} 1",
        "broker_origin_connections_reused_total{service=\"web\",origin=\"10.0.0.1:80\"} 99",
        "broker_service_connections_reused_total{service=\"web\"} 100",
        "broker_origin_connections_evicted_total{service=\"web\",origin=\"10.0.0.1:80\",reason=\"idle_ttl\"} 1",
        "broker_origin_handshake_seconds{service=\"web\",origin=\"10.0.0.1:80\",quantile=\"0.5\"} 0.000128",
        "broker_cgroup_present{service=\"web\",cgroup=\"/system.slice/php.service\"} 0",
        "broker_kernel_loaded 0",
        "# TYPE broker_host_tcp_active_opens_total counter",
        "broker_host_tcp_active_opens_total 42",
    ] {
        assert!(text.lines().any(|l| l == line), "no {line:?} in\n{text}");
    }
    // It would grow by all that the one that has left had counted long ago.
    assert!(!text.contains("forgotten"), "{text}");
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
