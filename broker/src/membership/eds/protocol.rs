//! What is sent and how answers are taken: pure, both forms of the protocol.
//!
//! In the first form ("state of the world") an answer has whole resources, and a resource that is
//! left out of it has not changed: EDS, unlike listeners and clusters, knows no removal there. In
//! the incremental form the server says what is gone.
//!
//! Either way each answer is acknowledged by its nonce, with the version that is in use from then
//! on; one that cannot be used with the last good version and the reason. Nonces belong to one
//! stream, versions outlive it.

use std::collections::HashMap;

use prost::bytes::Bytes;
use prost::{DecodeError, Message};

use super::super::Membership;
use super::bounds;
use super::message::{
    ASSIGNMENT, Any, ClusterLoadAssignment, DeltaDiscoveryRequest, DeltaDiscoveryResponse,
    DiscoveryRequest, DiscoveryResponse, Envelope, Node, RESOURCE, Resource, Status,
};

/// `google.rpc.Code.INVALID_ARGUMENT`.
const INVALID_ARGUMENT: i32 = 3;

/// What is wrong with a resource that is none.
const EMPTY: &str = "the resource is empty";

/// Longest reason that is told: it may quote what was sent.
const REASON_CHARS_MAX: usize = 300;

/// What an answer says of the one resource that is subscribed: that it is this now, that it cannot be used
/// and why, or nothing.
pub(super) type News = Result<Option<Membership>, String>;

/// One of the two forms.
pub(super) trait Form: Send {
    type Request: Message + Default + 'static;

    /// The call; within the aggregated service, or within that of EDS alone.
    fn path(aggregated: bool) -> &'static str;

    /// For the resource of this name.
    fn new(cluster: String) -> Self;

    /// The first request of a stream.
    fn subscribe(&self, node: Node) -> Self::Request;

    /// What an answer of the right type and of bounded size says, which is in use from then on.
    fn read(&mut self, answer: Bytes) -> News;

    /// What the server is to hear of the answer with this nonce: that it is in use, or why it is not.
    fn reply(&self, nonce: String, error: Option<Status>) -> Self::Request;

    /// The version in use; empty if there is none.
    fn version(&self) -> &str;

    /// Takes an answer; what it says, and what the server is to hear. One that is no answer at all is an
    /// error.
    fn take(&mut self, answer: Bytes) -> Result<(News, Option<Self::Request>), DecodeError> {
        let Envelope { type_url, nonce } = Envelope::decode(answer.clone())?;
        if type_url != ASSIGNMENT {
            // Nobody has asked for it. As in Envoy nothing is replied, for there is nothing that a reply
            // could be about; and it is told.
            return Ok((Err(short(format!("{type_url:?} was not asked for"))), None));
        }
        let news = bounds::answer(&answer).and_then(|()| self.read(answer)).map_err(short);
        let error = news.as_ref().err();
        let error = error.map(|reason| Status { code: INVALID_ARGUMENT, message: reason.clone() });
        let reply = self.reply(nonce, error);
        Ok((news, Some(reply)))
    }
}

/// The beginning of a reason.
fn short(mut reason: String) -> String {
    if let Some((end, _)) = reason.char_indices().nth(REASON_CHARS_MAX) {
        reason.truncate(end);
        reason.push('…');
    }
    reason
}

/// State of the world.
#[derive(Debug)]
pub(super) struct Whole {
    cluster: String,
    version: String,
}

impl Form for Whole {
    type Request = DiscoveryRequest;

    fn path(aggregated: bool) -> &'static str {
        if aggregated {
            "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
        } else {
            "/envoy.service.endpoint.v3.EndpointDiscoveryService/StreamEndpoints"
        }
    }

    fn new(cluster: String) -> Self {
        Self { cluster, version: String::new() }
    }

    fn subscribe(&self, node: Node) -> DiscoveryRequest {
        DiscoveryRequest { node: Some(node), ..self.request() }
    }

    fn read(&mut self, answer: Bytes) -> News {
        let answer = DiscoveryResponse::decode(answer).map_err(|error| error.to_string())?;
        let mut found = None;
        for any in answer.resources {
            let assignment = assignment(any)?;
            if assignment.cluster_name == self.cluster {
                once(&mut found, assignment)?;
            }
        }
        self.version = answer.version_info;
        Ok(found)
    }

    fn reply(&self, response_nonce: String, error_detail: Option<Status>) -> DiscoveryRequest {
        DiscoveryRequest { response_nonce, error_detail, ..self.request() }
    }

    fn version(&self) -> &str {
        &self.version
    }
}

impl Whole {
    fn request(&self) -> DiscoveryRequest {
        DiscoveryRequest {
            version_info: self.version.clone(),
            resource_names: vec![self.cluster.clone()],
            type_url: ASSIGNMENT.to_owned(),
            ..DiscoveryRequest::default()
        }
    }
}

/// Incremental.
#[derive(Debug)]
pub(super) struct Delta {
    cluster: String,
    version: String,
}

impl Form for Delta {
    type Request = DeltaDiscoveryRequest;

    fn path(aggregated: bool) -> &'static str {
        if aggregated {
            "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"
        } else {
            "/envoy.service.endpoint.v3.EndpointDiscoveryService/DeltaEndpoints"
        }
    }

    fn new(cluster: String) -> Self {
        Self { cluster, version: String::new() }
    }

    fn subscribe(&self, node: Node) -> DeltaDiscoveryRequest {
        let known = (self.cluster.clone(), self.version.clone());
        let known = (!self.version.is_empty()).then_some(known);
        DeltaDiscoveryRequest {
            node: Some(node),
            type_url: ASSIGNMENT.to_owned(),
            resource_names_subscribe: vec![self.cluster.clone()],
            initial_resource_versions: known.into_iter().collect::<HashMap<_, _>>(),
            ..DeltaDiscoveryRequest::default()
        }
    }

    fn read(&mut self, answer: Bytes) -> News {
        let answer = DeltaDiscoveryResponse::decode(answer).map_err(|error| error.to_string())?;
        let mut version = None;
        let mut found = None;
        for resource in answer.resources.into_iter().filter(|r| r.name == self.cluster) {
            version = Some(resource.version);
            once(&mut found, assignment(resource.body.ok_or(EMPTY)?)?)?;
        }
        if answer.removed_resources.contains(&self.cluster) && found.is_none() {
            // The next one is news, whatever its version.
            version = Some(String::new());
            found = Some(Membership::default());
        }
        if let Some(version) = version {
            self.version = version;
        }
        Ok(found)
    }

    fn reply(&self, response_nonce: String, error_detail: Option<Status>) -> DeltaDiscoveryRequest {
        DeltaDiscoveryRequest {
            type_url: ASSIGNMENT.to_owned(),
            response_nonce,
            error_detail,
            ..DeltaDiscoveryRequest::default()
        }
    }

    fn version(&self) -> &str {
        &self.version
    }
}

/// Unpacks a resource, with or without its name around it.
fn assignment(mut any: Any) -> Result<ClusterLoadAssignment, String> {
    if any.type_url == RESOURCE {
        let resource = Resource::decode(any.value).map_err(|error| error.to_string())?;
        any = resource.body.ok_or(EMPTY)?;
    }
    if any.type_url != ASSIGNMENT {
        return Err(format!("{:?} is not a ClusterLoadAssignment", any.type_url));
    }
    bounds::assignment(&any.value)?;
    ClusterLoadAssignment::decode(any.value).map_err(|error| error.to_string())
}

/// Takes the one assignment that an answer may have.
fn once(found: &mut Option<Membership>, assignment: ClusterLoadAssignment) -> Result<(), String> {
    if found.is_some() {
        return Err("the resource comes more than once".to_owned());
    }
    *found = Some(assignment.membership()?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::super::document;
    use super::super::message::{
        Address, Endpoint, LbEndpoint, Locality, LocalityLbEndpoints, SocketAddress,
    };
    use super::*;

    fn endpoint(address: &str, port: u32) -> LbEndpoint {
        let socket_address =
            SocketAddress { protocol: 0, address: address.into(), port_value: port };
        let address = Some(Address { socket_address: Some(socket_address) });
        LbEndpoint { endpoint: Some(Endpoint { address }), ..LbEndpoint::default() }
    }

    fn packed(cluster: &str, lb_endpoints: Vec<LbEndpoint>) -> Any {
        let group = LocalityLbEndpoints { lb_endpoints, ..LocalityLbEndpoints::default() };
        let cluster_name = cluster.to_owned();
        let assignment = ClusterLoadAssignment { cluster_name, endpoints: vec![group] };
        Any { type_url: ASSIGNMENT.into(), value: assignment.encode_to_vec().into() }
    }

    fn response(version: &str, nonce: &str, resources: Vec<Any>) -> DiscoveryResponse {
        DiscoveryResponse {
            version_info: version.into(),
            resources,
            type_url: ASSIGNMENT.into(),
            nonce: nonce.into(),
        }
    }

    fn delta(version: &str, nonce: &str, resource: Any) -> DeltaDiscoveryResponse {
        let resource =
            Resource { version: version.into(), body: Some(resource), name: "web".into() };
        DeltaDiscoveryResponse {
            resources: vec![resource],
            type_url: ASSIGNMENT.into(),
            nonce: nonce.into(),
            removed_resources: Vec::new(),
        }
    }

    /// The news in short, and version, nonce and error of what the server hears.
    fn shown(eds: &mut Whole, answer: &DiscoveryResponse) -> String {
        let (news, request) = eds.take(answer.encode_to_vec().into()).unwrap();
        let news = match news {
            Ok(Some(membership)) => format!("{} members", membership.members().len()),
            Ok(None) => "nothing".to_owned(),
            Err(_) => "bad".to_owned(),
        };
        match request {
            None => format!("{news}; silence"),
            Some(DiscoveryRequest { version_info, response_nonce, error_detail, .. }) => {
                let error = error_detail.map(|e| format!(" {}: {}", e.code, e.message));
                format!("{news}; {version_info} {response_nonce}{}", error.unwrap_or_default())
            }
        }
    }

    /// Why an assignment is refused.
    fn refused(resource: Any) -> String {
        let answer = response("1", "a", vec![resource]).encode_to_vec();
        let (news, request) = Whole::new("web".into()).take(answer.into()).unwrap();
        let reason = news.unwrap_err();
        assert_eq!(request.unwrap().error_detail.unwrap().message, reason);
        reason
    }

    #[test]
    fn versions_and_nonces() {
        let mut eds = Whole::new("web".into());
        let mut check = |response: DiscoveryResponse, expected: &str| {
            assert_eq!(shown(&mut eds, &response), expected);
        };
        let good = || packed("web", vec![endpoint("10.0.0.1", 80), endpoint("10.0.0.2", 80)]);
        let bad = || packed("web", vec![endpoint("10.0.0.1", 80), endpoint("web-1", 80)]);
        let rule = "3: \"web-1\": must be an IP address, as EDS wants it";
        check(response("1", "a", vec![bad()]), &format!("bad;  a {rule}"));
        check(response("2", "b", vec![good()]), "2 members; 2 b");
        check(response("3", "c", vec![bad()]), &format!("bad; 2 c {rule}"));
        check(
            response("4", "d", vec![good(), bad()]),
            "bad; 2 d 3: the resource comes more than once",
        );
        check(
            response("5", "e", vec![good(), good()]),
            "bad; 2 e 3: the resource comes more than once",
        );
        // What is left out has not changed; what belongs to others is theirs, bad or not.
        check(response("6", "f", vec![]), "nothing; 6 f");
        let other = packed("api", vec![endpoint("api-1", 80)]);
        check(response("7", "g", vec![other, good()]), "2 members; 7 g");
        check(response("8", "h", vec![packed("web", vec![])]), "0 members; 8 h");
        let cut = Any { value: vec![0x0a, 0xff].into(), ..good() };
        assert!(shown(&mut eds, &response("9", "i", vec![cut])).starts_with("bad; 8 i 3: "));
        let cluster = Any { type_url: "type.googleapis.com/x.Cluster".into(), ..good() };
        let shown = shown(&mut eds, &response("9", "j", vec![cluster]));
        assert!(shown.ends_with("is not a ClusterLoadAssignment"), "{shown}");
        assert_eq!(eds.version(), "8");
        // The next stream begins with the version, without a nonce.
        let first = eds.subscribe(Node { id: "n".into(), ..Node::default() });
        assert_eq!((&*first.version_info, &*first.response_nonce), ("8", ""));
        assert_eq!(first.node.map(|n| n.id).as_deref(), Some("n"));
        assert_eq!(first.resource_names, ["web"]);
        assert!(eds.take(vec![0xff].into()).is_err(), "no answer at all");
    }

    #[test]
    fn other_types_are_told_and_not_replied_to() {
        let mut eds = Whole::new("web".into());
        let clusters =
            DiscoveryResponse { type_url: "x.Cluster".into(), ..response("1", "a", vec![]) };
        assert_eq!(shown(&mut eds, &clusters), "bad; silence");
        let (news, _) = eds.take(clusters.encode_to_vec().into()).unwrap();
        assert_eq!(news.unwrap_err(), "\"x.Cluster\" was not asked for");
    }

    /// Empty messages are two bytes each, and dozens in memory.
    #[test]
    fn what_there_is_too_much_of_is_not_decoded() {
        fn empty(field: u8, count: usize) -> Vec<u8> {
            [field << 3 | 2, 0].repeat(count)
        }
        let assignment = |name: &str, rest: &[u8]| {
            let name = ClusterLoadAssignment { cluster_name: name.into(), endpoints: Vec::new() };
            let value = [&name.encode_to_vec()[..], rest].concat();
            Any { type_url: ASSIGNMENT.into(), value: value.into() }
        };
        let at_most = document::MEMBERS_MAX;
        // Localities without endpoints are an empty list.
        let good = response("1", "a", vec![assignment("web", &empty(2, at_most))]);
        assert_eq!(shown(&mut Whole::new("web".into()), &good), "0 members; 1 a");
        let too_many = assignment("web", &empty(2, at_most + 1));
        assert_eq!(refused(too_many), "more than 100000 localities");
        // In two localities together.
        let [half, rest] = [at_most / 2, at_most / 2 + 1].map(|count| {
            let locality = empty(2, count);
            let mut encoded = vec![2 << 3 | 2];
            prost::encode_length_delimiter(locality.len(), &mut encoded).unwrap();
            encoded.extend(locality);
            encoded
        });
        let too_many = assignment("web", &[half, rest].concat());
        assert_eq!(refused(too_many), "more than 100000 endpoints");

        let answer = |field, count| {
            let head = response("1", "a", vec![]).encode_to_vec();
            Bytes::from([head, empty(field, count)].concat())
        };
        let (news, request) = Whole::new("web".into()).take(answer(2, at_most + 1)).unwrap();
        assert_eq!(news.unwrap_err(), "more than 100000 resources");
        assert_eq!(request.unwrap().response_nonce, "a");
        let mut eds = Delta::new("web".into());
        let (news, _) = eds.take(answer(6, at_most + 1)).unwrap();
        assert_eq!(news.unwrap_err(), "more than 100000 removed resources");
        assert_eq!(eds.take(answer(6, at_most)).unwrap().0, Ok(None));
    }

    #[test]
    fn what_is_sent_once_is_not_kept_many_times() {
        let reason = refused(packed("web", vec![endpoint(&"x".repeat(1 << 20), 80)]));
        assert!(reason.starts_with("\"xxx") && reason.len() < 400, "{} bytes", reason.len());
        let locality = |length| {
            let locality = Some(Locality { region: "r".repeat(length), ..Locality::default() });
            let lb_endpoints = vec![endpoint("10.0.0.1", 80)];
            let group = LocalityLbEndpoints { locality, lb_endpoints, priority: 0 };
            ClusterLoadAssignment { cluster_name: "web".into(), endpoints: vec![group] }
        };
        assert!(locality(256).membership().is_ok());
        let reason = locality(257).membership().unwrap_err();
        assert_eq!(reason, "a locality of 257 bytes; at most 256 are taken");
    }

    #[test]
    fn a_resource_may_be_wrapped() {
        let resource = packed("web", vec![endpoint("10.0.0.1", 80)]);
        let resource = Resource { body: Some(resource), ..Resource::default() };
        let any = Any { type_url: RESOURCE.into(), value: resource.encode_to_vec().into() };
        let answer = response("1", "a", vec![any]);
        assert_eq!(shown(&mut Whole::new("web".into()), &answer), "1 members; 1 a");
    }

    #[test]
    fn incremental() {
        let mut eds = Delta::new("web".into());
        let node = || Node { id: "n".into(), ..Node::default() };
        let take = |eds: &mut Delta, answer: DeltaDiscoveryResponse| {
            let (news, request) = eds.take(answer.encode_to_vec().into()).unwrap();
            let request = request.expect("a reply");
            assert!(request.resource_names_subscribe.is_empty());
            (news, request.response_nonce, request.error_detail.is_some())
        };
        assert!(eds.subscribe(node()).initial_resource_versions.is_empty());
        let good = delta("1", "a", packed("web", vec![endpoint("::1", 80)]));
        let (news, nonce, bad) = take(&mut eds, good);
        assert!(matches!(news, Ok(Some(m)) if m.members().len() == 1));
        assert_eq!((&*nonce, bad), ("a", false));

        let refused = delta("2", "b", packed("web", vec![endpoint("::1", 0)]));
        let (news, nonce, bad) = take(&mut eds, refused);
        assert!(news.is_err());
        assert_eq!((&*nonce, bad), ("b", true));
        let again = eds.subscribe(node()).initial_resource_versions;
        assert_eq!(again, HashMap::from([("web".into(), "1".into())]));

        let gone = DeltaDiscoveryResponse {
            resources: Vec::new(),
            removed_resources: vec!["web".into()],
            ..delta("", "c", Any::default())
        };
        let gone = take(&mut eds, gone);
        assert_eq!(gone, (Ok(Some(Membership::default())), "c".into(), false));
        assert!(eds.subscribe(node()).initial_resource_versions.is_empty());
    }

    #[test]
    fn all_fields_are_carried_through() {
        let weighted = LbEndpoint {
            health_status: 5,
            load_balancing_weight: Some(7),
            ..endpoint("10.0.0.1", 80)
        };
        let locality =
            Some(Locality { region: "eu".into(), zone: "a".into(), sub_zone: "r1".into() });
        let group = LocalityLbEndpoints { locality, lb_endpoints: vec![weighted], priority: 2 };
        let assignment =
            ClusterLoadAssignment { cluster_name: "web".into(), endpoints: vec![group] };
        let membership = assignment.membership().unwrap();
        let json = r#"{"cluster_name": "web", "endpoints": [
            {"locality": {"region": "eu", "zone": "a", "sub_zone": "r1"}, "priority": 2,
             "lb_endpoints": [{"health_status": "DEGRADED", "load_balancing_weight": 7,
              "endpoint": {"address": {"socket_address":
                {"address": "10.0.0.1", "port_value": 80}}}}]}]}"#;
        assert_eq!(membership, super::super::super::document::from_json(json).unwrap());
    }

    #[test]
    fn endpoints_that_cannot_be_used() {
        let refused = |endpoint: LbEndpoint| refused(packed("web", vec![endpoint]));
        let good = || endpoint("10.0.0.1", 80);
        assert!(refused(LbEndpoint::default()).contains("has no socket_address"));
        assert!(refused(endpoint("10.0.0.1", 65_536)).contains("port must be"));
        assert!(refused(endpoint("0.0.0.0", 80)).contains("nobody can be reached"));
        let weightless = LbEndpoint { load_balancing_weight: Some(0), ..good() };
        assert!(refused(weightless).contains("weight must be 1 or more"));
        assert!(refused(LbEndpoint { health_status: 6, ..good() }).contains("health_status 6"));
    }
}
