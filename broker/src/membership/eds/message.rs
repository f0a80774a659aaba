//! The messages of xDS that matter for EDS, with the fields that are read or written here.
//!
//! Field numbers are those of `envoy/service/discovery/v3/discovery.proto`,
//! `envoy/config/endpoint/v3/*.proto` and `envoy/config/core/v3/*.proto`; they are the protocol.

use std::collections::HashMap;
use std::num::NonZeroU32;

use prost::bytes::Bytes;

use super::super::{Health, Member, Membership, document};

/// What resources of EDS are called.
pub(super) const ASSIGNMENT: &str =
    "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";

/// A resource with its name and version around it.
pub(super) const RESOURCE: &str = "type.googleapis.com/envoy.service.discovery.v3.Resource";

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct DiscoveryRequest {
    #[prost(string, tag = "1")]
    pub(super) version_info: String,
    #[prost(message, optional, tag = "2")]
    pub(super) node: Option<Node>,
    #[prost(string, repeated, tag = "3")]
    pub(super) resource_names: Vec<String>,
    #[prost(string, tag = "4")]
    pub(super) type_url: String,
    #[prost(string, tag = "5")]
    pub(super) response_nonce: String,
    #[prost(message, optional, tag = "6")]
    pub(super) error_detail: Option<Status>,
}

/// What answers of both forms have, without what there may be much of.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Envelope {
    #[prost(string, tag = "4")]
    pub(super) type_url: String,
    #[prost(string, tag = "5")]
    pub(super) nonce: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct DiscoveryResponse {
    #[prost(string, tag = "1")]
    pub(super) version_info: String,
    #[prost(message, repeated, tag = "2")]
    pub(super) resources: Vec<Any>,
    #[prost(string, tag = "4")]
    pub(super) type_url: String,
    #[prost(string, tag = "5")]
    pub(super) nonce: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct DeltaDiscoveryRequest {
    #[prost(message, optional, tag = "1")]
    pub(super) node: Option<Node>,
    #[prost(string, tag = "2")]
    pub(super) type_url: String,
    #[prost(string, repeated, tag = "3")]
    pub(super) resource_names_subscribe: Vec<String>,
    #[prost(map = "string, string", tag = "5")]
    pub(super) initial_resource_versions: HashMap<String, String>,
    #[prost(string, tag = "6")]
    pub(super) response_nonce: String,
    #[prost(message, optional, tag = "7")]
    pub(super) error_detail: Option<Status>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct DeltaDiscoveryResponse {
    #[prost(message, repeated, tag = "2")]
    pub(super) resources: Vec<Resource>,
    #[prost(string, tag = "4")]
    pub(super) type_url: String,
    #[prost(string, tag = "5")]
    pub(super) nonce: String,
    #[prost(string, repeated, tag = "6")]
    pub(super) removed_resources: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Resource {
    #[prost(string, tag = "1")]
    pub(super) version: String,
    /// The field `resource`.
    #[prost(message, optional, tag = "2")]
    pub(super) body: Option<Any>,
    #[prost(string, tag = "3")]
    pub(super) name: String,
}

/// Who asks.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Node {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(string, tag = "2")]
    pub(super) cluster: String,
    #[prost(string, tag = "6")]
    pub(super) user_agent_name: String,
    #[prost(string, tag = "7")]
    pub(super) user_agent_version: String,
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Status {
    #[prost(int32, tag = "1")]
    pub(super) code: i32,
    #[prost(string, tag = "2")]
    pub(super) message: String,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Any {
    #[prost(string, tag = "1")]
    pub(super) type_url: String,
    #[prost(bytes = "bytes", tag = "2")]
    pub(super) value: Bytes,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ClusterLoadAssignment {
    #[prost(string, tag = "1")]
    pub(super) cluster_name: String,
    #[prost(message, repeated, tag = "2")]
    pub(super) endpoints: Vec<LocalityLbEndpoints>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LocalityLbEndpoints {
    #[prost(message, optional, tag = "1")]
    pub(super) locality: Option<Locality>,
    #[prost(message, repeated, tag = "2")]
    pub(super) lb_endpoints: Vec<LbEndpoint>,
    #[prost(uint32, tag = "5")]
    pub(super) priority: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Locality {
    #[prost(string, tag = "1")]
    pub(super) region: String,
    #[prost(string, tag = "2")]
    pub(super) zone: String,
    #[prost(string, tag = "3")]
    pub(super) sub_zone: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LbEndpoint {
    #[prost(message, optional, tag = "1")]
    pub(super) endpoint: Option<Endpoint>,
    #[prost(int32, tag = "2")]
    pub(super) health_status: i32,
    /// `google.protobuf.UInt32Value`.
    #[prost(message, optional, tag = "4")]
    pub(super) load_balancing_weight: Option<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Endpoint {
    #[prost(message, optional, tag = "1")]
    pub(super) address: Option<Address>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Address {
    #[prost(message, optional, tag = "1")]
    pub(super) socket_address: Option<SocketAddress>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SocketAddress {
    /// 0: TCP, 1: UDP.
    #[prost(int32, tag = "1")]
    pub(super) protocol: i32,
    #[prost(string, tag = "2")]
    pub(super) address: String,
    #[prost(uint32, tag = "3")]
    pub(super) port_value: u32,
}

impl ClusterLoadAssignment {
    /// Its members, or what is wrong with the first one that cannot be used.
    pub(super) fn membership(self) -> Result<Membership, String> {
        let mut members = Vec::new();
        for group in self.endpoints {
            let Locality { region, zone, sub_zone } = group.locality.unwrap_or_default();
            let zone = document::zone(&region, &zone, &sub_zone)?;
            for endpoint in group.lb_endpoints {
                let health = health(endpoint.health_status)?;
                let weight = endpoint.load_balancing_weight;
                let address = endpoint
                    .endpoint
                    .and_then(|endpoint| endpoint.address?.socket_address)
                    .ok_or("an endpoint has no socket_address, and no other kind is known")?;
                let text = address.address;
                if address.protocol != 0 {
                    return Err(format!("{text}: must be a TCP address"));
                }
                let ip = text
                    .parse()
                    .map_err(|_e| format!("{text:?}: must be an IP address, as EDS wants it"))?;
                let weight = NonZeroU32::new(weight.unwrap_or(1))
                    .ok_or_else(|| format!("{text}: the weight must be 1 or more"))?;
                members.push(Member {
                    weight,
                    priority: group.priority,
                    zone: zone.clone(),
                    health,
                    ..Member::at(document::address(ip, address.port_value)?)
                });
            }
        }
        document::membership(members)
    }
}

/// `envoy.config.core.v3.HealthStatus`.
fn health(status: i32) -> Result<Health, String> {
    match status {
        // UNKNOWN, HEALTHY.
        0 | 1 => Ok(Health::Healthy),
        // UNHEALTHY, TIMEOUT.
        2 | 4 => Ok(Health::Unhealthy),
        3 => Ok(Health::Draining),
        5 => Ok(Health::Degraded),
        other => Err(format!("health_status {other} is not known")),
    }
}
