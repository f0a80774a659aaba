//! Slices as such, and against an API server on loopback that says what it is told to.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::super::document::{BYTES_MAX, MEMBERS_MAX};
use super::super::tests::wait;
use super::super::{Health, Latest, List, Member, Membership};
use super::slices::membership;
use super::*;
use crate::config::discovery::Port;
use crate::datapath::Inert;

/// A slice with TCP port `http` 8080 and these endpoints.
fn slice(name: &str, version: u64, endpoints: &Value) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": name, "resourceVersion": version.to_string(),
            "labels": {"kubernetes.io/service-name": "web"}},
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": endpoints,
    })
}

fn ready(ip: &str) -> Value {
    json!({"addresses": [ip], "conditions": {"ready": true}})
}

fn shown(membership: &Membership) -> String {
    let members = membership.members().iter().map(|member| {
        let Member { identity, address, zone, health, .. } = member;
        format!("{identity} {address} {} {health:?}", zone.as_deref().unwrap_or("-"))
    });
    members.collect::<Vec<_>>().join("\n")
}

fn members(slices: &[Value], port: &Port) -> String {
    members_in(None, slices, port)
}

/// What a gateway in a zone takes.
fn members_in(zone: Option<&str>, slices: &[Value], port: &Port) -> String {
    let slices: Vec<Slice> =
        slices.iter().map(|slice| serde_json::from_value(slice.clone()).unwrap()).collect();
    let config =
        discovery::Kubernetes { port: port.clone(), zone: zone.map(str::to_owned), ..web() };
    match membership(slices.iter(), &config) {
        Ok(List { membership, left_out }) if left_out.is_empty() => shown(&membership),
        Ok(List { membership, left_out }) => {
            format!("{}\nwithout {left_out:?}", shown(&membership))
        }
        Err(reason) => format!("refused: {reason}"),
    }
}

/// The service, wherever the cluster is.
fn web() -> discovery::Kubernetes {
    discovery::Kubernetes {
        service: "web".to_owned(),
        namespace: None,
        port: http(),
        kubeconfig: None,
        zone: None,
        context: None,
    }
}

fn http() -> Port {
    Port::Named("http".to_owned())
}

#[test]
fn conditions_become_health() {
    let cases = [
        (json!({}), Health::Healthy),
        (json!({"ready": true}), Health::Healthy),
        (json!({"ready": false}), Health::Unhealthy),
        (json!({"ready": false, "serving": true, "terminating": true}), Health::Draining),
        (json!({"ready": false, "serving": false, "terminating": true}), Health::Unhealthy),
        (json!({"ready": false, "terminating": true}), Health::Unhealthy),
        (json!({"serving": true, "terminating": false}), Health::Healthy),
    ];
    for (conditions, health) in cases {
        let endpoint = json!([{"addresses": ["10.0.0.1"], "conditions": conditions}]);
        let expected = format!("10.0.0.1:8080 10.0.0.1:8080 - {health:?}");
        assert_eq!(members(&[slice("a", 1, &endpoint)], &http()), expected, "{conditions}");
    }
}

#[test]
fn slices_are_merged_and_the_ready_endpoint_wins() {
    let leaving = json!({"addresses": ["10.0.0.1"], "zone": "old",
        "conditions": {"ready": false, "serving": true, "terminating": true}});
    let here = json!({"addresses": ["10.0.0.1", "10.9.9.9"], "zone": "new",
        "hints": {"forZones": [{"name": "elsewhere"}]}});
    let pod = json!({"addresses": ["fd00::1"], "hostname": "web-0"});
    let mut v6 = slice("c", 1, &json!([pod]));
    v6["addressType"] = "IPv6".into();
    let slices =
        [slice("a", 1, &json!([leaving, ready("10.0.0.2")])), slice("b", 1, &json!([here])), v6];
    let expected = "10.0.0.1:8080 10.0.0.1:8080 new Healthy\n\
                    10.0.0.2:8080 10.0.0.2:8080 - Healthy\n\
                    web-0:8080 [fd00::1]:8080 - Healthy";
    assert_eq!(members(&slices, &http()), expected);
    let mut turned = slices;
    turned.reverse();
    assert_eq!(members(&turned, &http()), expected);
}

#[test]
fn hints_are_gone_by_in_a_known_zone_if_all_have_some() {
    let hinted = |ip: &str, zones: &[&str]| {
        let zones: Vec<_> = zones.iter().map(|zone| json!({"name": zone})).collect();
        json!({"addresses": [ip], "hints": {"forZones": zones}})
    };
    let (one, two) = (hinted("10.0.0.1", &["a", "b"]), hinted("10.0.0.2", &["b"]));
    let both = "10.0.0.1:8080 10.0.0.1:8080 - Healthy\n10.0.0.2:8080 10.0.0.2:8080 - Healthy";
    let one_only = "10.0.0.1:8080 10.0.0.1:8080 - Healthy\nwithout {\"hinted_to_other_zones\": 1}";
    let slices = [slice("a", 1, &json!([one])), slice("b", 1, &json!([two]))];
    let found = |zone| members_in(zone, &slices, &http());
    assert_eq!(found(Some("a")), one_only);
    // Nobody has said where this is, all are for it, or nothing is.
    for zone in [None, Some("b"), Some("c")] {
        assert_eq!(found(zone), both, "{zone:?}");
    }
    // The cluster is just beginning, or ending, to give hints.
    let mut some = slices.to_vec();
    some.push(slice("c", 1, &json!([ready("10.0.0.3")])));
    let three = format!("{both}\n10.0.0.3:8080 10.0.0.3:8080 - Healthy");
    assert_eq!(members_in(Some("a"), &some, &http()), three);
    // What is not ready has none, and does not matter.
    some[2]["endpoints"][0]["conditions"]["ready"] = false.into();
    let expected = "10.0.0.1:8080 10.0.0.1:8080 - Healthy\n\
                    10.0.0.3:8080 10.0.0.3:8080 - Unhealthy\n\
                    without {\"hinted_to_other_zones\": 1}";
    assert_eq!(members_in(Some("a"), &some, &http()), expected);
    // Nor is a list taken that is wrong where it does not matter.
    some.push(slice("d", 1, &json!([hinted("10.0.0.300", &["b"])])));
    assert!(members_in(Some("a"), &some, &http()).starts_with("refused"));
}

#[test]
fn ports() {
    let with = |ports: Value| {
        let mut slice = slice("a", 1, &json!([ready("10.0.0.1")]));
        slice["ports"] = ports;
        slice
    };
    let found = |ports: Value, port: &Port| members(&[with(ports)], port);
    let at = |port: u16| format!("10.0.0.1:{port} 10.0.0.1:{port} - Healthy");
    let two = json!([{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "http", "port": 81}]);
    assert_eq!(found(two.clone(), &http()), at(81));
    assert_eq!(found(two.clone(), &Port::Number(81)), at(81));
    assert_eq!(
        found(two, &Port::Number(53)),
        "refused: no slice can be used: 1 have no TCP port 53 (but: \"dns\" 53, \"http\" 81)"
    );
    // No number stands for all.
    assert_eq!(found(json!([{"name": ""}]), &Port::Number(82)), at(82));
    assert!(found(json!([{"name": "http"}]), &http()).contains("no TCP port \"http\""));
    assert!(found(Value::Null, &http()).contains("no TCP port"));

    // The pods of one version have it, those of the other do not.
    let mixed = [with(json!([])), slice("b", 1, &json!([ready("10.0.0.2")]))];
    assert_eq!(
        members(&mixed, &http()),
        "10.0.0.2:8080 10.0.0.2:8080 - Healthy\nwithout {\"slices_without_port\": 1}"
    );
}

#[test]
fn what_cannot_be_used() {
    let mut names = slice("a", 1, &json!([ready("web.example.com")]));
    names["addressType"] = "FQDN".into();
    assert_eq!(
        members(std::slice::from_ref(&names), &http()),
        "refused: no slice can be used: 1 have names instead of addresses"
    );
    let good = slice("b", 1, &json!([ready("10.0.0.2")]));
    assert_eq!(
        members(&[names, good.clone()], &http()),
        "10.0.0.2:8080 10.0.0.2:8080 - Healthy\nwithout {\"slices_of_names\": 1}"
    );
    let bad = slice("c", 1, &json!([ready("10.0.0.300")]));
    let refused = "refused: \"10.0.0.300\": must be an IP address";
    assert_eq!(members(&[bad, good.clone()], &http()), refused);
    let mut foreign = slice("d", 1, &json!([ready("10.0.0.4")]));
    foreign["metadata"]["labels"] = json!({"kubernetes.io/service-name": "other"});
    let mut unlabelled = slice("e", 1, &json!([ready("10.0.0.5")]));
    unlabelled["metadata"]["labels"] = Value::Null;
    assert_eq!(
        members(&[foreign.clone(), good, unlabelled], &http()),
        "10.0.0.2:8080 10.0.0.2:8080 - Healthy\nwithout {\"slices_of_other_services\": 2}"
    );
    let refused = "refused: no slice can be used: 1 are not of the service";
    assert_eq!(members(&[foreign], &http()), refused);
    assert_eq!(members(&[slice("a", 1, &json!([]))], &http()), "");
    assert_eq!(members(&[], &http()), "");
}

/// What the server says to the next requests; each kind has a queue.
#[derive(Default)]
struct Script {
    /// What it lists, while nothing else is in the queue.
    slices: Vec<Value>,
    version: u64,
    lists: VecDeque<(StatusCode, Value)>,
    watches: VecDeque<(StatusCode, Value)>,
    /// The watch that is open.
    events: Option<mpsc::UnboundedSender<Result<Bytes, std::io::Error>>>,
    /// Requests that came: path and query.
    requests: Vec<String>,
}

type Shared = Arc<Mutex<Script>>;

struct Server {
    script: Shared,
    directory: tempfile::TempDir,
    kubeconfig: PathBuf,
    tasks: JoinSet<()>,
}

async fn handle(State(script): State<Shared>, uri: Uri) -> Response {
    let mut script = script.lock().unwrap();
    script.requests.push(uri.to_string());
    if !uri.query().is_some_and(|query| query.contains("watch=true")) {
        if let Some((status, body)) = script.lists.pop_front() {
            return (status, body.to_string()).into_response();
        }
        let list = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList",
            "metadata": {"resourceVersion": script.version.to_string()}, "items": script.slices});
        return list.to_string().into_response();
    }
    if let Some((status, body)) = script.watches.pop_front() {
        return (status, format!("{body}\n")).into_response();
    }
    let (sender, mut receiver) = mpsc::unbounded_channel();
    script.events = Some(sender);
    let events = futures_util::stream::poll_fn(move |context| receiver.poll_recv(context));
    Body::from_stream(events).into_response()
}

fn failure(code: StatusCode, message: &str) -> (StatusCode, Value) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": "Any", "code": code.as_u16()});
    (code, status)
}

impl Server {
    async fn start(slices: Vec<Value>) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let kubeconfig = directory.path().join("config");
        let text = json!({"apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [
                {"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "shop"}},
                {"name": "other", "context": {"cluster": "c", "user": "u"}}]});
        std::fs::write(&kubeconfig, text.to_string()).unwrap();
        let script = Arc::new(Mutex::new(Script { slices, version: 1, ..Script::default() }));
        let app = axum::Router::new().fallback(handle).with_state(Arc::clone(&script));
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { script, directory, kubeconfig, tasks }
    }

    fn config(&self) -> discovery::Kubernetes {
        discovery::Kubernetes { kubeconfig: Some(self.kubeconfig.clone()), ..web() }
    }

    fn watch(&mut self) -> watch::Receiver<Latest> {
        self.watch_as(self.config())
    }

    fn watch_as(&mut self, config: discovery::Kubernetes) -> watch::Receiver<Latest> {
        let (feed, latest) = Feed::new();
        let source = discovery::Source::Kubernetes(config);
        self.tasks.spawn(super::super::follow(source, Arc::new(Inert), feed));
        latest
    }

    fn script<T>(&self, act: impl FnOnce(&mut Script) -> T) -> T {
        act(&mut self.script.lock().unwrap())
    }

    /// Waits until `found` finds something.
    async fn until<T>(&self, mut found: impl FnMut(&mut Script) -> Option<T>) -> T {
        let poll = async {
            loop {
                if let Some(found) = self.script(&mut found) {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(1), poll).await.expect("in time")
    }

    /// The watch that is open, once one is.
    async fn events(&self) -> mpsc::UnboundedSender<Result<Bytes, std::io::Error>> {
        self.until(|script| script.events.clone().filter(|events| !events.is_closed())).await
    }

    async fn send(&self, kind: &str, object: &Value) {
        let line = format!("{}\n", json!({"type": kind, "object": object}));
        self.events().await.send(Ok(line.into())).unwrap();
    }
}

fn addresses(latest: &Latest) -> String {
    let members = latest.membership.iter().flat_map(|m| m.members());
    members.map(|m| m.address.ip().to_string()).collect::<Vec<_>>().join(" ")
}

fn is(expected: &str) -> impl FnMut(&Latest) -> bool + '_ {
    move |latest| addresses(latest) == expected && latest.error.is_none()
}

#[tokio::test]
async fn follows_the_slices_of_a_service() {
    let a = slice("web-a", 1, &json!([ready("10.0.0.1"), ready("10.0.0.2")]));
    let mut server = Server::start(vec![a]).await;
    let mut latest = server.watch();
    let first = wait(&mut latest, is("10.0.0.1 10.0.0.2")).await;
    assert_eq!((first.version.as_str(), first.accepted), ("1", 1));

    server.send("ADDED", &slice("web-b", 2, &json!([ready("10.0.0.2"), ready("10.0.0.3")]))).await;
    wait(&mut latest, is("10.0.0.1 10.0.0.2 10.0.0.3")).await;
    // An event that arrives in two pieces.
    let changed = slice("web-a", 3, &json!([ready("10.0.0.1")]));
    let line = format!("{}\n", json!({"type": "MODIFIED", "object": changed}));
    let (head, tail) = line.split_at(line.len() / 2);
    let events = server.events().await;
    events.send(Ok(head.to_owned().into())).unwrap();
    tokio::task::yield_now().await;
    events.send(Ok(tail.to_owned().into())).unwrap();
    wait(&mut latest, |l| l.version == "3").await;
    assert_eq!(addresses(&latest.borrow()), "10.0.0.1 10.0.0.2 10.0.0.3");
    server.send("DELETED", &slice("web-a", 4, &json!([]))).await;
    wait(&mut latest, is("10.0.0.2 10.0.0.3")).await;
    server.send("DELETED", &slice("web-b", 5, &json!([]))).await;
    let last = wait(&mut latest, is("")).await;
    assert_eq!(last.version, "5");

    let requests = server.script(|script| script.requests.clone());
    let path = "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices?";
    assert!(requests.iter().all(|r| r.starts_with(path)), "{requests:?}");
    let selector = "labelSelector=kubernetes.io%2Fservice-name%3Dweb";
    assert!(requests.iter().all(|r| r.contains(selector)), "{requests:?}");
    assert_eq!(requests.len(), 2, "one list and one watch: {requests:?}");
}

#[tokio::test]
async fn a_watch_that_ends_is_resumed_from_the_last_bookmark() {
    let a = slice("web-a", 1, &json!([ready("10.0.0.1")]));
    let mut server = Server::start(vec![a]).await;
    let mut latest = server.watch();
    wait(&mut latest, is("10.0.0.1")).await;
    let bookmark = json!({"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"resourceVersion": "77"}});
    server.send("BOOKMARK", &bookmark).await;
    // Ends with the sender.
    drop(server.events().await);
    server.script(|script| script.events = None);
    let resumed = |s: &mut Script| s.requests.iter().find(|r| r.contains("Version=77")).cloned();
    server.until(resumed).await;
    server.send("ADDED", &slice("web-b", 78, &json!([ready("10.0.0.2")]))).await;
    let found = wait(&mut latest, is("10.0.0.1 10.0.0.2")).await;
    assert_eq!((found.accepted, found.refused), (2, 0));
}

#[tokio::test]
async fn a_version_that_is_gone_makes_a_new_list_of_one_change() {
    let a = slice("web-a", 1, &json!([ready("10.0.0.1")]));
    let mut server = Server::start(vec![a]).await;
    let (_, gone) = failure(StatusCode::GONE, "too old resource version");
    let event = json!({"type": "ERROR", "object": gone});
    server.script(|script| {
        // In the stream, and as an answer.
        script.watches.push_back((StatusCode::OK, event));
        script.watches.push_back(failure(StatusCode::GONE, "too old resource version"));
    });
    let mut latest = server.watch();
    wait(&mut latest, is("10.0.0.1")).await;
    let lists = ["web-b", "web-c"].map(|name| {
        let endpoints = json!([ready("10.0.0.2"), ready("10.0.0.3")]);
        slice(name, 90, &endpoints)
    });
    server.script(|script| (script.slices, script.version) = (lists.into(), 90));
    let mut seen = Vec::new();
    wait(&mut latest, |l| {
        assert_eq!(l.error, None);
        seen.push(addresses(l));
        l.accepted == 3
    })
    .await;
    seen.dedup();
    assert_eq!(seen, ["10.0.0.1", "10.0.0.2 10.0.0.3"]);
}

#[tokio::test]
async fn a_server_that_fails_says_nothing_of_the_members() {
    let a = slice("web-a", 1, &json!([ready("10.0.0.1")]));
    let mut server = Server::start(vec![a]).await;
    let forbidden = failure(StatusCode::FORBIDDEN, "broker may not list endpointslices");
    server.script(|script| script.lists.push_back(forbidden));
    let mut latest = server.watch();
    let lost = wait(&mut latest, |l| l.error.is_some()).await;
    assert!(lost.error.as_ref().unwrap().contains("may not list"), "{lost:?}");
    assert!(lost.membership.is_none());
    wait(&mut latest, is("10.0.0.1")).await;
    let events = server.events().await;

    // The connection breaks, and the server is not well for a while.
    let unavailable = failure(StatusCode::SERVICE_UNAVAILABLE, "etcd has no leader");
    let html = (StatusCode::BAD_GATEWAY, json!("<html>"));
    server.script(|script| script.lists.extend([unavailable, html]));
    let cut = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
    let (_, refusal) = failure(StatusCode::INTERNAL_SERVER_ERROR, "no more watches");
    let refusal = json!({"type": "ERROR", "object": refusal});
    server.script(|script| script.watches.push_back((StatusCode::OK, refusal)));
    server.script(|script| script.events = None);
    events.send(Err(cut)).unwrap();
    for reason in ["no more watches", "no leader", "html"] {
        let told = |l: &Latest| l.error.as_ref().is_some_and(|e| e.contains(reason));
        let lost = wait(&mut latest, told).await;
        assert_eq!(addresses(&lost), "10.0.0.1");
    }
    let b = slice("web-a", 9, &json!([ready("10.0.0.9")]));
    server.script(|script| script.slices = vec![b]);
    wait(&mut latest, is("10.0.0.9")).await;
    server.events().await;
}

#[tokio::test]
async fn a_bad_list_keeps_the_last_good_one() {
    let a = slice("web-a", 1, &json!([ready("10.0.0.1")]));
    let mut server = Server::start(vec![a]).await;
    let mut latest = server.watch();
    wait(&mut latest, is("10.0.0.1")).await;
    server.send("MODIFIED", &slice("web-a", 2, &json!([ready("nonsense")]))).await;
    let refused = wait(&mut latest, |l| l.refused == 1).await;
    assert_eq!(addresses(&refused), "10.0.0.1");
    assert_eq!(refused.error.as_deref(), Some("web: \"nonsense\": must be an IP address"));
    server.send("MODIFIED", &slice("web-a", 3, &json!([ready("10.0.0.2")]))).await;
    wait(&mut latest, is("10.0.0.2")).await;
}

#[tokio::test]
async fn the_kubeconfig_is_read_until_it_is_good() {
    let a = slice("web-a", 1, &json!([ready("10.0.0.1")]));
    let mut server = Server::start(vec![a]).await;
    let late = server.directory.path().join("late");
    let mut latest = server.watch_as(discovery::Kubernetes {
        kubeconfig: Some(late.clone()),
        context: Some("other".to_owned()),
        ..server.config()
    });
    let told = |path: &Path, l: &Latest| {
        l.error.as_ref().is_some_and(|e| e.contains(&path.display().to_string()))
    };
    wait(&mut latest, |l| told(&late, l)).await;
    std::fs::write(&late, "{").unwrap();
    wait(&mut latest, |l| told(&late, l) && !l.error.as_ref().unwrap().contains("o such file"))
        .await;
    std::fs::copy(&server.kubeconfig, &late).unwrap();
    wait(&mut latest, is("10.0.0.1")).await;
    let request = server.script(|script| script.requests[0].clone());
    assert!(request.contains("/namespaces/default/"), "{request}");
}

#[tokio::test]
async fn speaks_tls() {
    let mut server = Server::start(Vec::new()).await;
    let text = std::fs::read_to_string(&server.kubeconfig).unwrap();
    std::fs::write(&server.kubeconfig, text.replace("http://", "https://")).unwrap();
    let mut latest = server.watch();
    // The server does not, and is told from one that is not there.
    let lost = wait(&mut latest, |l| l.error.is_some()).await;
    assert!(lost.error.as_ref().unwrap().contains("corrupt message"), "{lost:?}");
}

#[tokio::test]
async fn changes_that_come_at_once_are_told_at_once() {
    const CHANGES: u64 = 5_000;
    let a = slice("web-a", 1, &json!([ready("10.0.0.1")]));
    let mut server = Server::start(vec![a]).await;
    let mut latest = server.watch();
    wait(&mut latest, is("10.0.0.1")).await;
    let mut lines = String::new();
    for version in 2..=CHANGES {
        let object = slice("web-a", version, &json!([ready(&format!("10.0.0.{}", version % 200))]));
        writeln!(lines, "{}", json!({"type": "MODIFIED", "object": object})).unwrap();
    }
    // Neither empty lines nor what changes nothing costs anything.
    lines.push_str(&"\n".repeat(1 << 20));
    server.events().await.send(Ok(lines.into())).unwrap();
    let last = wait(&mut latest, |l| l.version == CHANGES.to_string()).await;
    assert_eq!(addresses(&last), format!("10.0.0.{}", CHANGES % 200));
    assert!(last.accepted < CHANGES / 10, "{}", last.accepted);
    assert_eq!((last.refused, last.error), (0, None));
}

#[tokio::test]
async fn so_many_slices_and_so_much_in_them_are_kept() {
    let mut server = Server::start(Vec::new()).await;
    let mut latest = server.watch();
    wait(&mut latest, |l| l.accepted == 1).await;
    let told = |what: &'static str| {
        move |l: &Latest| l.error.as_ref().is_some_and(|error| error.contains(what))
    };
    let empty = json!({"metadata": {"name": "s"}, "endpoints": vec![json!({}); MEMBERS_MAX + 1]});
    let list = json!({"metadata": {"resourceVersion": "9"}, "items": [empty]});
    server.script(|script| script.lists.push_back((StatusCode::OK, list)));
    // A few large ones: their names, which are kept twice, are a little too much with the last one.
    for index in 0..BYTES_MAX >> 21 {
        let name = format!("web-{index}-{}", "x".repeat(1 << 20));
        server.send("ADDED", &slice(&name, 2, &json!([]))).await;
    }
    wait(&mut latest, told("the slices take more than")).await;
    // What takes little in the answer, and more in memory: in a list, and in a slice.
    wait(&mut latest, told("a list of more than")).await;
    wait(&mut latest, is("")).await;
    server.send("ADDED", &empty).await;
    wait(&mut latest, told("a list of more than")).await;
}

#[tokio::test]
async fn a_reason_is_short_whatever_the_server_says() {
    let mut server = Server::start(Vec::new()).await;
    let long = "é".repeat(1 << 20);
    server.script(|script| {
        script.lists.push_back(failure(StatusCode::TOO_MANY_REQUESTS, &long));
        script.lists.push_back((StatusCode::BAD_GATEWAY, json!(long)));
        let event = json!({"type": long, "object": {}});
        script.watches.push_back((StatusCode::OK, event));
    });
    let mut latest = server.watch();
    for reason in ["429", "502", "unknown variant"] {
        let told = |l: &Latest| l.error.as_ref().is_some_and(|error| error.contains(reason));
        let error = wait(&mut latest, told).await.error.unwrap();
        assert!(error.len() < 2_000 && error.ends_with("é…"), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn silence_is_told_and_after_it_the_list_once_more() {
    let source = Arc::new(Kubernetes::new(web(), Arc::new(Inert)));
    let (feed, mut latest) = Feed::new();
    let (beats, receiver) = mpsc::channel(1);
    let attending = (Arc::clone(&source), feed.clone());
    let attends = tokio::spawn(async move { attending.0.attend(receiver, &attending.1).await });
    let silent = |l: &Latest| l.error.as_ref().is_some_and(|error| error.contains(SILENT));
    wait(&mut latest, silent).await;
    beats.send(()).await.unwrap();
    // A watch on which nothing happens.
    let (slices, version, told) = (Slices::default(), "1".to_owned(), clock::now());
    let mut view = View { slices, version, told, due: None };
    let lines = futures_util::stream::pending();
    tokio::select! {
        _ = source.take_up(lines, &mut view, &feed) => panic!("it goes on"),
        latest = wait(&mut latest, |l| l.error.is_none()) => assert_eq!(latest.accepted, 1),
    }
    drop(beats);
    attends.await.unwrap();
}
