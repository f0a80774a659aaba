//! Members from an xDS control plane, in the messages of Envoy's own definitions.

use std::fs;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use broker::clock;
use broker::config::discovery::{self, EdsApi};
use broker::config::tls::{Identity, Tls};
use broker::datapath::Inert;
use broker::membership::{self, Feed, Health, Latest};
use broker::stats::MembershipSnapshot;
use envoy_types::pb::envoy::config::core::v3::address::Address as AddressKind;
use envoy_types::pb::envoy::config::core::v3::socket_address::PortSpecifier;
use envoy_types::pb::envoy::config::core::v3::{Address, HealthStatus, Locality, SocketAddress};
use envoy_types::pb::envoy::config::endpoint::v3::lb_endpoint::HostIdentifier;
use envoy_types::pb::envoy::config::endpoint::v3::{
    ClusterLoadAssignment, Endpoint, LbEndpoint, LocalityLbEndpoints,
};
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::{Any, UInt32Value};
use harness::cgroup::ThreadLimit;
use harness::control_plane::Dialogue;
use harness::load::{self, Plan};
use harness::origin::nginx;
use harness::{Authority, ControlPlane, Daemon, Lab, eventually};
use tokio::sync::{oneshot, watch};
use tonic::transport::{self, Certificate, ServerTlsConfig};

use crate::support::{Service, listen};

const ASSIGNMENT: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// Longer than the pause before a client comes back.
const RETRY: Duration = Duration::from_secs(10);

fn endpoint(address: &str, port: u32) -> LbEndpoint {
    let socket_address = SocketAddress {
        address: address.into(),
        port_specifier: Some(PortSpecifier::PortValue(port)),
        ..SocketAddress::default()
    };
    let address = Address { address: Some(AddressKind::SocketAddress(socket_address)) };
    let endpoint = Endpoint { address: Some(address), ..Endpoint::default() };
    let host_identifier = Some(HostIdentifier::Endpoint(endpoint));
    LbEndpoint { host_identifier, ..LbEndpoint::default() }
}

fn packed(endpoints: Vec<LocalityLbEndpoints>) -> Any {
    let assignment = ClusterLoadAssignment {
        cluster_name: "web".into(),
        endpoints,
        ..ClusterLoadAssignment::default()
    };
    Any { type_url: ASSIGNMENT.into(), value: prost::Message::encode_to_vec(&assignment) }
}

fn group(lb_endpoints: Vec<LbEndpoint>) -> LocalityLbEndpoints {
    LocalityLbEndpoints { lb_endpoints, ..LocalityLbEndpoints::default() }
}

/// An assignment with origins at 10.0.0.1 and so on.
fn members(count: u8) -> Any {
    packed(vec![group((1..=count).map(|i| endpoint(&format!("10.0.0.{i}"), 80)).collect())])
}

/// One that cannot be used.
fn bad() -> Any {
    packed(vec![group(vec![endpoint("10.0.0.9", 80), endpoint("no-address", 80)])])
}

fn whole(version: &str, nonce: &str, resource: Any) -> DiscoveryResponse {
    DiscoveryResponse {
        version_info: version.into(),
        resources: vec![resource],
        type_url: ASSIGNMENT.into(),
        nonce: nonce.into(),
        ..DiscoveryResponse::default()
    }
}

fn delta(version: &str, nonce: &str, resource: Any) -> DeltaDiscoveryResponse {
    let resource = Resource {
        name: "web".into(),
        version: version.into(),
        resource: Some(resource),
        ..Resource::default()
    };
    DeltaDiscoveryResponse {
        resources: vec![resource],
        type_url: ASSIGNMENT.into(),
        nonce: nonce.into(),
        ..DeltaDiscoveryResponse::default()
    }
}

/// Version, nonce and whether something is wrong.
fn heard(request: &DiscoveryRequest) -> (&str, &str, bool) {
    (&request.version_info, &request.response_nonce, request.error_detail.is_some())
}

/// A source that follows a control plane until it is dropped.
struct Follower {
    latest: watch::Receiver<Latest>,
    _stop: oneshot::Sender<()>,
}

impl Follower {
    fn start(plane: &ControlPlane, api: EdsApi, aggregated: bool) -> Self {
        Self::start_with(plane, Tls::default(), api, aggregated)
    }

    fn start_with(plane: &ControlPlane, tls: Tls, api: EdsApi, aggregated: bool) -> Self {
        let eds = discovery::Eds {
            server: plane.url(),
            tls,
            cluster: "web".into(),
            node_id: "gateway-7".into(),
            node_cluster: "edge".into(),
            aggregated,
            api,
            initial_fetch_timeout: Duration::from_secs(1),
        };
        let source = membership::eds::Eds::new(eds, Arc::new(Inert));
        let (feed, latest) = Feed::new();
        let (stop, stopped) = oneshot::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = membership::Source::watch(Box::new(source), feed) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { latest, _stop: stop }
    }

    fn now(&self) -> Latest {
        self.latest.borrow().clone()
    }

    fn wait(&self, what: &str, done: impl Fn(&Latest) -> bool) {
        eventually(RETRY, what, || done(&self.latest.borrow()));
    }

    /// Waits until there are so many members, of this version.
    fn has(&self, members: usize, version: &str) {
        self.wait(&format!("{members} members, version {version}"), |latest| {
            latest.membership.as_ref().is_some_and(|m| m.members().len() == members)
                && latest.version == version
                && latest.error.is_none()
        });
    }
}

fn control_plane() -> ControlPlane {
    ControlPlane::start(TcpListener::bind("127.0.0.1:0").unwrap()).unwrap()
}

#[test]
fn good_and_bad_answers_are_told_apart() {
    for aggregated in [true, false] {
        let plane = control_plane();
        let follower = Follower::start(&plane, EdsApi::Whole, aggregated);
        let stream = plane.stream();
        assert_eq!(stream.method, if aggregated { "ADS" } else { "EDS" });
        let first = stream.asked();
        assert_eq!(heard(&first), ("", "", false));
        assert_eq!(
            (&*first.type_url, &*first.resource_names),
            (ASSIGNMENT, &["web".to_owned()][..])
        );
        let node = first.node.expect("the first request says who asks");
        assert_eq!((&*node.id, &*node.cluster), ("gateway-7", "edge"));

        stream.say(whole("1", "a", members(2)));
        assert_eq!(heard(&stream.asked()), ("1", "a", false));
        follower.has(2, "1");
        stream.say(whole("2", "b", bad()));
        let refusal = stream.asked();
        assert_eq!(heard(&refusal), ("1", "b", true));
        assert!(refusal.error_detail.unwrap().message.contains("\"no-address\": must be an IP"));
        let now = follower.now();
        assert_eq!((now.refused, &*now.version), (1, "1"));
        assert!(now.error.unwrap().contains("no-address"));
        assert_eq!(now.membership.unwrap().members().len(), 2, "the last good one stays");
        stream.say(whole("3", "c", members(3)));
        assert_eq!(heard(&stream.asked()), ("3", "c", false));
        follower.has(3, "3");
        // An empty list is one, too: what it means is decided elsewhere.
        stream.say(whole("4", "d", members(0)));
        assert_eq!(heard(&stream.asked()), ("4", "d", false));
        follower.has(0, "4");
        assert!(stream.is_silent());
    }
}

/// A server that answers each refusal with what was refused.
#[test]
fn refusals_in_a_row_are_no_storm() {
    let plane = control_plane();
    let follower = Follower::start(&plane, EdsApi::Whole, true);
    let stream = plane.stream();
    assert_eq!(heard(&stream.asked()), ("", "", false));
    stream.say(whole("1", "a", bad()));
    assert_eq!(heard(&stream.asked()), ("", "a", true), "at once");
    stream.say(whole("1", "b", bad()));
    assert!(stream.is_silent(), "not at once");
    assert_eq!(heard(&stream.asked()), ("", "b", true), "but it is said");
    stream.say(whole("1", "c", bad()));
    stream.say(whole("2", "d", members(2)));
    assert_eq!(heard(&stream.asked()), ("", "c", true));
    assert_eq!(heard(&stream.asked()), ("2", "d", false));
    follower.has(2, "2");
    stream.say(whole("3", "e", bad()));
    assert_eq!(heard(&stream.asked()), ("2", "e", true), "at once again");
}

/// HTTP/2 holds up who does not wait for them.
#[test]
fn no_more_is_read_than_is_refused() {
    let plane = control_plane();
    let follower = Follower::start(&plane, EdsApi::Whole, true);
    let stream = plane.stream();
    assert_eq!(heard(&stream.asked()), ("", "", false));
    for nonce in 1..=1000 {
        stream.say(whole("1", &nonce.to_string(), bad()));
    }
    for nonce in 1..=4 {
        assert_eq!(heard(&stream.asked()), ("", &*nonce.to_string(), true));
        let refused = follower.now().refused;
        assert!(refused <= nonce + 1, "{refused} were read");
    }
}

/// Nobody has asked for it, so nothing is replied; but it is told, and no storm either.
#[test]
fn answers_of_other_types_are_told() {
    let plane = control_plane();
    let follower = Follower::start(&plane, EdsApi::Whole, true);
    let stream = plane.stream();
    assert_eq!(heard(&stream.asked()), ("", "", false));
    let began = clock::now();
    for nonce in ["a", "b", "c"] {
        stream.say(DiscoveryResponse {
            type_url: "type.googleapis.com/envoy.config.cluster.v3.Cluster".into(),
            ..whole("1", nonce, members(1))
        });
    }
    follower.wait("the reason", |l| {
        l.refused == 3 && l.error.as_ref().is_some_and(|e| e.contains("was not asked for"))
    });
    let took = clock::now() - began;
    assert!(took >= Duration::from_millis(500), "{took:?}");
    assert!(stream.is_silent());
    stream.say(whole("1", "d", members(1)));
    assert_eq!(heard(&stream.asked()), ("1", "d", false));
    follower.has(1, "1");
}

/// It would never hear that a list was refused, and nothing that it sends would be read.
#[test]
fn a_server_that_reads_nothing_is_lost() {
    let plane = control_plane();
    plane.read(false);
    let follower = Follower::start(&plane, EdsApi::Whole, true);
    let stream = plane.stream();
    // More than fits into the queues and windows in between.
    for version in 1..=100 {
        stream.say(whole(&version.to_string(), &"n".repeat(100_000), members(1)));
    }
    follower.wait("the loss", |l| {
        l.error.as_ref().is_some_and(|e| e.contains("has read nothing for 1s"))
    });
    plane.read(true);
    let stream = plane.stream();
    stream.say(whole("101", "a", members(2)));
    follower.has(2, "101");
}

#[test]
fn all_fields_arrive() {
    let plane = control_plane();
    let follower = Follower::start(&plane, EdsApi::Whole, true);
    let locality = Locality { region: "eu".into(), zone: "a".into(), sub_zone: "rack-1".into() };
    let draining = LbEndpoint {
        health_status: HealthStatus::Draining.into(),
        load_balancing_weight: Some(UInt32Value { value: 5 }),
        ..endpoint("fd00::1", 8080)
    };
    let endpoints =
        LocalityLbEndpoints { locality: Some(locality), priority: 1, ..group(vec![draining]) };
    plane.stream().say(whole("1", "a", packed(vec![endpoints])));
    // The stream has ended with that, and the list stays.
    follower.wait("a list", |latest| latest.membership.is_some());
    let membership = follower.now().membership.unwrap();
    let [member] = membership.members() else { panic!("{membership:?}") };
    assert_eq!(member.address.to_string(), "[fd00::1]:8080");
    assert_eq!(member.zone.as_deref(), Some("eu/a/rack-1"));
    assert_eq!((member.weight.get(), member.priority, member.health), (5, 1, Health::Draining));
}

#[test]
fn a_new_stream_begins_with_the_last_version() {
    let plane = control_plane();
    let follower = Follower::start(&plane, EdsApi::Whole, true);
    let stream = plane.stream();
    stream.say(whole("1", "a", members(2)));
    follower.has(2, "1");
    stream.fail(tonic::Status::unavailable("on its way out"));
    follower.wait("the loss", |l| l.error.as_ref().is_some_and(|e| e.contains("on its way out")));

    let stream = plane.stream();
    let first = stream.asked();
    assert_eq!(heard(&first), ("1", "", false), "nonces belong to one stream");
    assert!(first.node.is_some());
    // The server has nothing new, and says so by saying nothing.
    follower.has(2, "1");
    stream.say(whole("2", "x", members(1)));
    assert_eq!(heard(&stream.asked()), ("2", "x", false));
    follower.has(1, "2");
    drop(stream);
    follower.wait("the loss", |l| l.error.as_ref().is_some_and(|e| e.contains("ended the stream")));
    assert_eq!(heard(&plane.stream().asked()), ("2", "", false));
}

#[test]
fn a_server_that_says_nothing_is_lost() {
    let plane = control_plane();
    let follower = Follower::start(&plane, EdsApi::Whole, true);
    let stream = plane.stream();
    follower.wait("the loss", |l| {
        l.error.as_ref().is_some_and(|e| e.contains("has said nothing of \"web\" within 1s"))
    });
    // It is waited for.
    stream.say(whole("1", "a", members(2)));
    follower.has(2, "1");
    // So is one that is gone.
    drop((plane, stream));
    follower.wait("the loss", |l| l.error.as_ref().is_some_and(|e| e.contains("refused")));
    assert_eq!(follower.now().version, "1");
}

#[test]
fn incremental() {
    let plane = control_plane();
    let follower = Follower::start(&plane, EdsApi::Delta, true);
    let stream = plane.delta_stream();
    let first = stream.asked();
    assert_eq!(first.resource_names_subscribe, ["web"]);
    assert!(first.initial_resource_versions.is_empty() && first.node.is_some());
    let heard = |request: DeltaDiscoveryRequest| {
        assert!(request.resource_names_subscribe.is_empty(), "{request:?}");
        (request.response_nonce, request.error_detail.is_some())
    };
    stream.say(delta("1", "a", members(2)));
    assert_eq!(heard(stream.asked()), ("a".into(), false));
    follower.has(2, "1");
    stream.say(delta("2", "b", bad()));
    assert_eq!(heard(stream.asked()), ("b".into(), true));
    assert_eq!(follower.now().refused, 1);
    drop(stream);

    let stream = plane.delta_stream();
    let known = stream.asked().initial_resource_versions;
    assert_eq!(known.get("web").map(String::as_str), Some("1"));
    stream.say(delta("3", "a", members(3)));
    assert_eq!(heard(stream.asked()), ("a".into(), false));
    follower.has(3, "3");
    stream.say(DeltaDiscoveryResponse {
        type_url: ASSIGNMENT.into(),
        nonce: "b".into(),
        removed_resources: vec!["web".into()],
        ..DeltaDiscoveryResponse::default()
    });
    assert_eq!(heard(stream.asked()), ("b".into(), false));
    follower.has(0, "");
}

/// Who is believed is looked up for each connection: authorities are replaced while the daemon runs.
#[test]
fn over_tls_only_whom_the_authority_vouches_for() {
    let directory = tempfile::tempdir().unwrap();
    let (ours, other) = (Authority::new("ours").unwrap(), Authority::new("other").unwrap());
    let server = ours.issue(&["plane.test"]).unwrap();
    let [certificate, key] =
        ours.issue(&["gateway-7"]).unwrap().write(directory.path(), "client").unwrap();
    let ca = directory.path().join("ca.pem");
    fs::write(&ca, ours.pem()).unwrap();
    let plane = ControlPlane::start_with_tls(
        TcpListener::bind("127.0.0.1:0").unwrap(),
        ServerTlsConfig::new()
            .identity(transport::Identity::from_pem(server.certificate, server.key))
            .client_ca_root(Certificate::from_pem(ours.pem())),
    )
    .unwrap();
    let tls = Tls {
        ca: Some(ca.clone()),
        identity: Some(Identity { certificate, key }),
        server_name: Some("plane.test".into()),
    };
    let refused = |tls: Tls, reason: &str| {
        let follower = Follower::start_with(&plane, tls, EdsApi::Whole, true);
        follower.wait(reason, |l| l.error.as_ref().is_some_and(|e| e.contains(reason)));
    };
    refused(Tls { server_name: None, ..tls.clone() }, "certificate not valid for name");
    refused(Tls { ca: None, ..tls.clone() }, "invalid peer certificate");
    // What the server says is lost sometimes: it closes the connection with it.
    refused(Tls { identity: None, ..tls.clone() }, "transport error");

    let follower = Follower::start_with(&plane, tls, EdsApi::Whole, true);
    let stream = plane.stream();
    stream.say(whole("1", "a", members(2)));
    follower.has(2, "1");
    fs::write(&ca, other.pem()).unwrap();
    drop(stream);
    follower.wait("the refusal", |l| l.error.as_ref().is_some_and(|e| e.contains("UnknownIssuer")));
    let now = follower.now();
    assert_eq!((now.membership.unwrap().members().len(), &*now.version), (2, "1"));
    fs::write(&ca, "no certificate").unwrap();
    follower.wait("the reason", |l| {
        l.error.as_ref().is_some_and(|e| e.contains("tls.ca = ") && e.contains("no certificate"))
    });
    fs::write(&ca, ours.pem()).unwrap();
    plane.stream().say(whole("2", "a", members(3)));
    follower.wait("the new list", |l| l.version == "2");
}

#[test]
fn a_storm_of_updates_ends_with_the_last_one() {
    let plane = control_plane();
    let follower = Follower::start(&plane, EdsApi::Whole, true);
    let stream = plane.stream();
    for version in 1..=2000_u32 {
        let count = u8::try_from(version % 50).unwrap();
        stream.say(whole(&version.to_string(), &format!("n{version}"), members(count)));
    }
    follower.has(0, "2000");
    assert_eq!(heard(&stream.asked()), ("", "", false));
    for version in 1..=2000_u32 {
        let expected = (version.to_string(), format!("n{version}"));
        let request = stream.asked();
        assert_eq!((request.version_info, request.response_nonce), expected);
    }
}

/// A daemon that follows a control plane at this URL in the host's namespace, where there is one.
fn start_daemon(lab: &Lab, daemon: &str, server: &str, discovery: &str) -> Daemon {
    let service = Service { daemon, ..Service::default() }.render(lab);
    let origins = service.lines().find(|line| line.starts_with("origins")).unwrap().to_owned();
    let config = service.replace(&origins, "")
        + "[service.discovery]\n"
        + discovery
        + &format!("[service.discovery.eds]\nserver = {server:?}\nnode_id = \"it\"\n");
    Daemon::start(lab, &config).unwrap()
}

fn plane_of(lab: &Lab) -> ControlPlane {
    let listener = lab.host.run(|| TcpListener::bind("127.0.0.1:18000")).unwrap();
    ControlPlane::start(listener).unwrap()
}

/// What the control plane says while the daemon starts is its first list.
fn first_list(lab: &Lab, daemon: &str, server: &str, plane: &ControlPlane) -> (Daemon, Stream) {
    thread::scope(|scope| {
        let starting = scope.spawn(|| start_daemon(lab, daemon, server, ""));
        let stream = plane.stream();
        stream.say(whole("0", "0", members(1)));
        (starting.join().unwrap(), stream)
    })
}

type Stream = Dialogue<DiscoveryRequest, DiscoveryResponse>;

fn source(daemon: &Daemon) -> MembershipSnapshot {
    daemon.service().unwrap().membership.unwrap()
}

/// The thread that a list is ranked in, or the one that a name is looked up in, may be one too many.
#[test]
fn a_thread_that_is_not_to_be_had_is_tried_again() {
    let lab = Lab::new(1).unwrap();
    let plane = plane_of(&lab);
    let events = lab.directory().join("events");
    let event_log = format!("event_log = {events:?}");
    let (mut daemon, stream) = first_list(&lab, &event_log, "http://localhost:18000", &plane);
    let limit = ThreadLimit::of(daemon.process()).unwrap();
    limit.no_more().unwrap();
    stream.say(whole("1", "a", members(2)));
    eventually(RETRY, "the list waits", || daemon.log().contains("the origins stay as they are"));
    limit.lift().unwrap();
    eventually(RETRY, "the list", || source(&daemon).members == 2);

    limit.no_more().unwrap();
    drop((stream, plane));
    eventually(RETRY, "the lookup fails", || {
        fs::read_to_string(&events).is_ok_and(|all| all.contains("a thread for \\\"lookup\\\""))
    });
    limit.lift().unwrap();
    let plane = plane_of(&lab);
    let stream = plane.stream();
    stream.say(whole("2", "b", members(3)));
    eventually(RETRY, "the new list", || source(&daemon).members == 3);
    assert_eq!(source(&daemon).error, None);
    daemon.stop().unwrap();
    drop(limit);
}

/// Two bytes for each, and dozens of bytes in memory.
#[test]
fn a_message_of_nothing_takes_no_memory() {
    let lab = Lab::new(1).unwrap();
    let plane = plane_of(&lab);
    let (mut daemon, stream) = first_list(&lab, "", "http://127.0.0.1:18000", &plane);
    assert_eq!(heard(&stream.asked()), ("", "", false));
    assert_eq!(heard(&stream.asked()), ("0", "0", false));
    let before = daemon.process().rss_peak().unwrap();
    let localities = Any { type_url: ASSIGNMENT.into(), value: [2 << 3 | 2, 0].repeat(7 << 20) };
    stream.say(whole("1", "1", localities));
    let refusal = stream.asked();
    assert_eq!(heard(&refusal), ("0", "1", true));
    let reason = refusal.error_detail.unwrap().message;
    assert_eq!(reason, "more than 100000 localities");
    let taken = daemon.process().rss_peak().unwrap() - before;
    assert!(taken < 128 << 20, "{taken} bytes");

    // What is larger than any list is not even read.
    let localities = Any { type_url: ASSIGNMENT.into(), value: [2 << 3 | 2, 0].repeat(9 << 20) };
    stream.say(whole("2", "2", localities));
    eventually(RETRY, "the reason", || {
        source(&daemon).error.is_some_and(|error| error.contains("message length too large"))
    });
    assert_eq!(source(&daemon).members, 1);
    daemon.stop().unwrap();
}

#[test]
fn clients_notice_nothing_of_updates() {
    let lab = Lab::new(3).unwrap();
    let _servers: Vec<_> = (0..3).map(|i| nginx::origin(&lab, i).unwrap()).collect();
    let plane = plane_of(&lab);
    let daemon = thread::scope(|scope| {
        let server = "http://127.0.0.1:18000";
        let starting = scope.spawn(|| start_daemon(&lab, "", server, "debounce = \"20ms\"\n"));
        let stream = plane.stream();
        let list = |indices: &[u8]| {
            let origins = indices.iter().map(|&i| lab.origin(i));
            packed(vec![group(
                origins.map(|o| endpoint(&o.ip().to_string(), o.port().into())).collect(),
            )])
        };
        stream.say(whole("0", "0", list(&[0, 1, 2])));
        let daemon = starting.join().unwrap();
        let running = load::start(&lab, &Plan::steady(vec![listen(&lab)], 16)).unwrap();
        let lists: [&[u8]; 4] = [&[0], &[1, 2], &[2, 0], &[0, 1, 2]];
        for version in 1..=20 {
            let text = version.to_string();
            let resource = match version % 5 {
                0 => bad(),
                n => list(lists[n - 1]),
            };
            stream.say(whole(&text, &text, resource));
            thread::sleep(Duration::from_millis(50));
        }
        let report = running.stop().unwrap();
        assert!(report.requests > 0);
        assert_eq!(
            (report.error_count(), report.crosstalk),
            (0, 0),
            "{:?}\n{}",
            report.errors,
            daemon.log()
        );
        daemon
    });
    daemon.stop().unwrap();
}
