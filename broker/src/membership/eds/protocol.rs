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

use prost::Message as _;

use super::super::Membership;
use super::message::{
    ASSIGNMENT, Any, ClusterLoadAssignment, DeltaDiscoveryRequest, DeltaDiscoveryResponse,
    DiscoveryRequest, DiscoveryResponse, Node, RESOURCE, Resource, Status,
};

/// `google.rpc.Code.INVALID_ARGUMENT`.
const INVALID_ARGUMENT: i32 = 3;

/// What an answer says of the one resource that is subscribed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// It is this now.
    List(Membership),
    /// It cannot be used.
    Bad(String),
    /// Nothing.
    None,
}

/// One of the two forms.
pub(super) trait Form: Send {
    type Request: prost::Message + Default + 'static;
    type Response: prost::Message + Default + 'static;

    /// The call; within the aggregated service, or within that of EDS alone.
    fn path(aggregated: bool) -> &'static str;

    /// For the resource of this name.
    fn new(cluster: String) -> Self;

    /// The first request of a stream.
    fn subscribe(&self, node: Node) -> Self::Request;

    /// Takes an answer; what it says, and what the server is to hear.
    fn take(&mut self, response: Self::Response) -> (News, Option<Self::Request>);

    /// The version in use; empty if there is none.
    fn version(&self) -> &str;
}

/// State of the world.
#[derive(Debug)]
pub(super) struct Whole {
    cluster: String,
    version: String,
}

impl Form for Whole {
    type Request = DiscoveryRequest;
    type Response = DiscoveryResponse;

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

    fn take(&mut self, response: DiscoveryResponse) -> (News, Option<DiscoveryRequest>) {
        if response.type_url != ASSIGNMENT {
            // Nobody has asked for it, so nobody says anything about it.
            return (News::None, None);
        }
        let mut found = Vec::new();
        for any in response.resources {
            match assignment(any) {
                Ok(assignment) if assignment.cluster_name != self.cluster => {}
                Ok(assignment) => found.push(assignment.membership()),
                Err(reason) => found.push(Err(reason)),
            }
        }
        let news = news(found);
        if !matches!(news, News::Bad(_)) {
            self.version = response.version_info;
        }
        let request = DiscoveryRequest {
            response_nonce: response.nonce,
            error_detail: error_detail(&news),
            ..self.request()
        };
        (news, Some(request))
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
    type Response = DeltaDiscoveryResponse;

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

    fn take(&mut self, response: DeltaDiscoveryResponse) -> (News, Option<DeltaDiscoveryRequest>) {
        if response.type_url != ASSIGNMENT {
            return (News::None, None);
        }
        let mut version = None;
        let mut found = Vec::new();
        for resource in response.resources.into_iter().filter(|r| r.name == self.cluster) {
            version = Some(resource.version);
            let any = resource.body.ok_or_else(|| "the resource is empty".to_owned());
            found.push(any.and_then(assignment).and_then(ClusterLoadAssignment::membership));
        }
        if response.removed_resources.contains(&self.cluster) && found.is_empty() {
            // The next one is news, whatever its version.
            version = Some(String::new());
            found.push(Ok(Membership::default()));
        }
        let news = news(found);
        if let (News::List(_), Some(version)) = (&news, version) {
            self.version = version;
        }
        let request = DeltaDiscoveryRequest {
            type_url: ASSIGNMENT.to_owned(),
            response_nonce: response.nonce,
            error_detail: error_detail(&news),
            ..DeltaDiscoveryRequest::default()
        };
        (news, Some(request))
    }

    fn version(&self) -> &str {
        &self.version
    }
}

/// Unpacks a resource, with or without its name around it.
fn assignment(mut any: Any) -> Result<ClusterLoadAssignment, String> {
    if any.type_url == RESOURCE {
        let resource = Resource::decode(&*any.value).map_err(|error| error.to_string())?;
        any = resource.body.ok_or("the resource is empty")?;
    }
    if any.type_url != ASSIGNMENT {
        return Err(format!("{:?} is not a ClusterLoadAssignment", any.type_url));
    }
    ClusterLoadAssignment::decode(&*any.value).map_err(|error| error.to_string())
}

/// Of all that an answer has: anything bad makes it bad as a whole.
fn news(mut found: Vec<Result<Membership, String>>) -> News {
    if let Some(bad) = found.iter().position(Result::is_err)
        && let Err(reason) = found.swap_remove(bad)
    {
        return News::Bad(reason);
    }
    match (found.len(), found.pop()) {
        (1, Some(Ok(membership))) => News::List(membership),
        (0, _) => News::None,
        (several, _) => News::Bad(format!("the resource comes {several} times")),
    }
}

fn error_detail(news: &News) -> Option<Status> {
    match news {
        News::Bad(reason) => Some(Status { code: INVALID_ARGUMENT, message: reason.clone() }),
        News::List(_) | News::None => None,
    }
}

#[cfg(test)]
mod tests {
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
        Any { type_url: ASSIGNMENT.into(), value: assignment.encode_to_vec() }
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
    fn shown(news: &News, request: Option<DiscoveryRequest>) -> String {
        let news = match news {
            News::List(membership) => format!("{} members", membership.members().len()),
            News::Bad(_) => "bad".to_owned(),
            News::None => "nothing".to_owned(),
        };
        match request {
            None => format!("{news}; silence"),
            Some(DiscoveryRequest { version_info, response_nonce, error_detail, .. }) => {
                let error = error_detail.map(|e| format!(" {}: {}", e.code, e.message));
                format!("{news}; {version_info} {response_nonce}{}", error.unwrap_or_default())
            }
        }
    }

    #[test]
    fn versions_and_nonces() {
        let mut eds = Whole::new("web".into());
        let mut check = |response: DiscoveryResponse, expected: &str| {
            let (news, request) = eds.take(response);
            assert_eq!(shown(&news, request), expected);
        };
        let good = || packed("web", vec![endpoint("10.0.0.1", 80), endpoint("10.0.0.2", 80)]);
        let bad = || packed("web", vec![endpoint("10.0.0.1", 80), endpoint("web-1", 80)]);
        let rule = "3: \"web-1\": must be an IP address, as EDS wants it";
        check(response("1", "a", vec![bad()]), &format!("bad;  a {rule}"));
        check(response("2", "b", vec![good()]), "2 members; 2 b");
        check(response("3", "c", vec![bad()]), &format!("bad; 2 c {rule}"));
        check(response("4", "d", vec![good(), bad()]), &format!("bad; 2 d {rule}"));
        check(response("5", "e", vec![good(), good()]), "bad; 2 e 3: the resource comes 2 times");
        // What is left out has not changed; what belongs to others is theirs, bad or not.
        check(response("6", "f", vec![]), "nothing; 6 f");
        let other = packed("api", vec![endpoint("api-1", 80)]);
        check(response("7", "g", vec![other, good()]), "2 members; 7 g");
        check(response("8", "h", vec![packed("web", vec![])]), "0 members; 8 h");
        let cut = Any { value: vec![0x0a, 0xff], ..good() };
        let (news, _) = eds.take(response("9", "i", vec![cut]));
        assert!(matches!(news, News::Bad(_)), "{news:?}");
        let cluster = Any { type_url: "type.googleapis.com/x.Cluster".into(), ..good() };
        let (news, request) = eds.take(response("9", "j", vec![cluster]));
        assert!(shown(&news, request).ends_with("is not a ClusterLoadAssignment"));
        assert_eq!(eds.version(), "8");
        // The next stream begins with the version, without a nonce.
        let first = eds.subscribe(Node { id: "n".into(), ..Node::default() });
        assert_eq!((&*first.version_info, &*first.response_nonce), ("8", ""));
        assert_eq!(first.node.map(|n| n.id).as_deref(), Some("n"));
        assert_eq!(first.resource_names, ["web"]);
    }

    #[test]
    fn other_types_are_left_alone() {
        let mut eds = Whole::new("web".into());
        let clusters =
            DiscoveryResponse { type_url: "x.Cluster".into(), ..response("1", "a", vec![]) };
        let (news, request) = eds.take(clusters);
        assert_eq!(shown(&news, request), "nothing; silence");
    }

    #[test]
    fn a_resource_may_be_wrapped() {
        let resource = packed("web", vec![endpoint("10.0.0.1", 80)]);
        let resource = Resource { body: Some(resource), ..Resource::default() };
        let any = Any { type_url: RESOURCE.into(), value: resource.encode_to_vec() };
        let (news, _) = Whole::new("web".into()).take(response("1", "a", vec![any]));
        assert!(matches!(news, News::List(_)), "{news:?}");
    }

    #[test]
    fn incremental() {
        let mut eds = Delta::new("web".into());
        let node = || Node { id: "n".into(), ..Node::default() };
        assert!(eds.subscribe(node()).initial_resource_versions.is_empty());
        let (news, request) = eds.take(delta("1", "a", packed("web", vec![endpoint("::1", 80)])));
        assert!(matches!(news, News::List(m) if m.members().len() == 1));
        let request = request.expect("an acknowledgement");
        assert_eq!((&*request.response_nonce, request.error_detail), ("a", None));
        assert!(request.resource_names_subscribe.is_empty());

        let (news, request) = eds.take(delta("2", "b", packed("web", vec![endpoint("::1", 0)])));
        assert!(matches!(news, News::Bad(_)));
        let request = request.expect("a refusal");
        assert_eq!((&*request.response_nonce, request.error_detail.is_some()), ("b", true));
        let again = eds.subscribe(node()).initial_resource_versions;
        assert_eq!(again, HashMap::from([("web".into(), "1".into())]));

        let gone = DeltaDiscoveryResponse {
            resources: Vec::new(),
            removed_resources: vec!["web".into()],
            ..delta("", "c", Any::default())
        };
        let (news, request) = eds.take(gone);
        assert_eq!(news, News::List(Membership::default()));
        assert_eq!(request.expect("an acknowledgement").response_nonce, "c");
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
        let refused = |endpoint: LbEndpoint| {
            let (news, _) = Whole::new("web".into()).take(response(
                "1",
                "a",
                vec![packed("web", vec![endpoint])],
            ));
            let News::Bad(reason) = news else { panic!("{news:?}") };
            reason
        };
        let good = || endpoint("10.0.0.1", 80);
        assert!(refused(LbEndpoint::default()).contains("has no socket_address"));
        assert!(refused(endpoint("10.0.0.1", 65_536)).contains("port must be"));
        assert!(refused(endpoint("0.0.0.0", 80)).contains("nobody can be reached"));
        let weightless = LbEndpoint { load_balancing_weight: Some(0), ..good() };
        assert!(refused(weightless).contains("weight must be 1 or more"));
        assert!(refused(LbEndpoint { health_status: 6, ..good() }).contains("health_status 6"));
    }
}
