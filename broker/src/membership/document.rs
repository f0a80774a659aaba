//! Lists of members as files and servers write them.
//!
//! Two forms are read: the broker's own,
//!
//! ```json
//! { "origins": [ "10.0.0.1:80", { "address": "10.0.0.2:80", "weight": 2, "zone": "b" } ] }
//! ```
//!
//! and Envoy's `ClusterLoadAssignment` (`envoy.config.endpoint.v3`), alone or as the resource of a
//! `DiscoveryResponse`, as Envoy's own file-based discovery wants it. A document is good as a whole
//! or not at all.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor, value::MapAccessDeserializer};

use super::{Health, Member, Membership};

/// Most members of one list: more are a mistake, and would take the daemon's memory.
pub const MEMBERS_MAX: usize = 100_000;

/// Longest name of a locality: it is written once, and kept with each of its members.
const ZONE_BYTES_MAX: usize = 256;

/// Longest document that is read: a list of as many members has about this length.
pub const BYTES_MAX: usize = 64 << 20;

/// Reads a document in JSON.
pub fn from_json(text: &str) -> Result<Membership, String> {
    let value: serde_json::Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
    if value.get("endpoints").is_some() || value.get("cluster_name").is_some() {
        return read::<Assignment, _>(value)?.membership();
    }
    if value.get("resources").is_some() {
        let mut response: Response = read(value)?;
        return match (response.resources.pop(), response.resources.is_empty()) {
            (Some(assignment), true) => assignment.membership(),
            (resource, _) => {
                let found = response.resources.len() + usize::from(resource.is_some());
                Err(format!("resources: must be one ClusterLoadAssignment, found {found}"))
            }
        };
    }
    if value.is_array() {
        return List { origins: read(value)? }.membership();
    }
    read::<List, _>(value)?.membership()
}

/// Reads a document in TOML, which only the broker's own form has.
pub fn from_toml(text: &str) -> Result<Membership, String> {
    let list: List = toml::from_str(text).map_err(|e| e.to_string().trim_end().to_owned())?;
    list.membership()
}

fn read<'de, T: Deserialize<'de>, D: Deserializer<'de>>(value: D) -> Result<T, String>
where
    D::Error: fmt::Display,
{
    T::deserialize(value).map_err(|e| e.to_string())
}

/// Refuses lists that nobody can mean.
pub fn membership(members: Vec<Member>) -> Result<Membership, String> {
    if members.len() > MEMBERS_MAX {
        return Err(format!("{} members; at most {MEMBERS_MAX} are taken", members.len()));
    }
    Ok(Membership::new(members))
}

/// An address that a TCP connection can be made to.
pub fn address(ip: IpAddr, port: u32) -> Result<SocketAddr, String> {
    let ip = ip.to_canonical();
    let port = u16::try_from(port).ok().filter(|&port| port != 0);
    let port = port.ok_or_else(|| format!("{ip}: the port must be 1..=65535"))?;
    // A link-local one would need its interface, too.
    let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    if ip.is_unspecified() || ip.is_multicast() || link_local {
        return Err(format!("{ip}: nobody can be reached there"));
    }
    Ok(SocketAddr::new(ip, port))
}

/// The broker's own form.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    origins: Vec<Entry>,
}

struct Entry {
    address: SocketAddr,
    table: Table,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    address: String,
    name: Option<String>,
    weight: Option<NonZeroU32>,
    #[serde(default)]
    priority: u32,
    zone: Option<String>,
    #[serde(default)]
    health: Word,
}

/// A member's health in words.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    #[default]
    Healthy,
    Degraded,
    Draining,
    Unhealthy,
}

impl List {
    fn membership(self) -> Result<Membership, String> {
        membership(self.origins.into_iter().map(Entry::member).collect())
    }
}

impl Entry {
    fn member(self) -> Member {
        let Self { address, table } = self;
        Member {
            identity: table.name.unwrap_or_else(|| address.to_string()),
            weight: table.weight.unwrap_or(NonZeroU32::MIN),
            priority: table.priority,
            zone: table.zone,
            health: match table.health {
                Word::Healthy => Health::Healthy,
                Word::Degraded => Health::Degraded,
                Word::Draining => Health::Draining,
                Word::Unhealthy => Health::Unhealthy,
            },
            ..Member::at(address)
        }
    }
}

// By hand, because serde's untagged enums answer every mistake with "matched no variant".
impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrTable;

        impl<'de> Visitor<'de> for TextOrTable {
            type Value = Entry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"10.0.0.1:80\" or { address = \"10.0.0.1:80\", weight = 2 }")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Entry, E> {
                let parsed: SocketAddr = text.parse().map_err(|_e| {
                    let rule = "must be ADDRESS:PORT, such as 10.0.0.1:80 or [fd00::1]:80";
                    E::custom(format_args!("{text:?}: {rule}"))
                })?;
                let address = address(parsed.ip(), parsed.port().into()).map_err(E::custom)?;
                Ok(Entry { address, table: Table::default() })
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Entry, M::Error> {
                let table = Table::deserialize(MapAccessDeserializer::new(map))?;
                let Entry { address, .. } = self.visit_str(&table.address)?;
                if table.name.as_deref() == Some("") {
                    return Err(M::Error::custom(format_args!("{address}: the name is empty")));
                }
                Ok(Entry { address, table })
            }
        }

        deserializer.deserialize_any(TextOrTable)
    }
}

/// `envoy.service.discovery.v3.DiscoveryResponse`, as far as it matters here. Like all of Envoy's
/// messages in JSON it may be written in snake or camel case, and have fields that are not known.
#[derive(Deserialize)]
struct Response {
    resources: Vec<Assignment>,
}

/// `envoy.config.endpoint.v3.ClusterLoadAssignment`.
#[derive(Deserialize)]
struct Assignment {
    #[serde(default)]
    endpoints: Vec<LocalityEndpoints>,
}

#[derive(Deserialize)]
struct LocalityEndpoints {
    #[serde(default)]
    locality: Locality,
    #[serde(default)]
    priority: u32,
    #[serde(default, alias = "lbEndpoints")]
    lb_endpoints: Vec<LbEndpoint>,
}

#[derive(Default, Deserialize)]
struct Locality {
    #[serde(default)]
    region: String,
    #[serde(default)]
    zone: String,
    #[serde(default, alias = "subZone")]
    sub_zone: String,
}

#[derive(Deserialize)]
struct LbEndpoint {
    endpoint: Endpoint,
    #[serde(default, alias = "healthStatus")]
    health_status: HealthStatus,
    #[serde(alias = "loadBalancingWeight")]
    load_balancing_weight: Option<NonZeroU32>,
}

#[derive(Deserialize)]
struct Endpoint {
    address: Address,
}

#[derive(Deserialize)]
struct Address {
    #[serde(alias = "socketAddress")]
    socket_address: SocketAddress,
}

#[derive(Deserialize)]
struct SocketAddress {
    address: String,
    #[serde(alias = "portValue")]
    port_value: u32,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
enum HealthStatus {
    #[default]
    Unknown,
    Healthy,
    Unhealthy,
    Draining,
    Timeout,
    Degraded,
}

impl Assignment {
    fn membership(self) -> Result<Membership, String> {
        let mut members = Vec::new();
        for group in self.endpoints {
            let zone =
                zone(&group.locality.region, &group.locality.zone, &group.locality.sub_zone)?;
            for endpoint in group.lb_endpoints {
                let SocketAddress { address: text, port_value } =
                    endpoint.endpoint.address.socket_address;
                let ip = text
                    .parse()
                    .map_err(|_e| format!("{text:?}: must be an IP address, as EDS wants it"))?;
                members.push(Member {
                    weight: endpoint.load_balancing_weight.unwrap_or(NonZeroU32::MIN),
                    priority: group.priority,
                    zone: zone.clone(),
                    health: match endpoint.health_status {
                        HealthStatus::Unknown | HealthStatus::Healthy => Health::Healthy,
                        HealthStatus::Degraded => Health::Degraded,
                        HealthStatus::Draining => Health::Draining,
                        HealthStatus::Unhealthy | HealthStatus::Timeout => Health::Unhealthy,
                    },
                    ..Member::at(address(ip, port_value)?)
                });
            }
        }
        membership(members)
    }
}

/// A member's zone from Envoy's locality: the zone within the region, and the rack within it.
pub fn zone(region: &str, zone: &str, sub_zone: &str) -> Result<Option<String>, String> {
    let parts: Vec<_> = [region, zone, sub_zone].into_iter().filter(|p| !p.is_empty()).collect();
    let zone = parts.join("/");
    if zone.len() > ZONE_BYTES_MAX {
        return Err(format!(
            "a locality of {} bytes; at most {ZONE_BYTES_MAX} are taken",
            zone.len()
        ));
    }
    Ok((!zone.is_empty()).then_some(zone))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(result: Result<Membership, String>) -> String {
        match result {
            Err(reason) => format!("refused: {reason}"),
            Ok(membership) => {
                let shown = membership.members().iter().map(|m| {
                    let zone = m.zone.as_deref().unwrap_or("-");
                    let Member { identity, address, weight, priority, health, .. } = m;
                    format!("{identity} {address} w{weight} p{priority} {zone} {health:?}")
                });
                shown.collect::<Vec<_>>().join("\n")
            }
        }
    }

    #[test]
    fn the_own_form() {
        let json = r#"{"origins": ["10.0.0.2:80",
            {"address": "10.0.0.1:80", "name": "a", "weight": 3, "zone": "z", "priority": 1,
             "health": "degraded"}]}"#;
        let expected = "a 10.0.0.1:80 w3 p1 z Degraded\n10.0.0.2:80 10.0.0.2:80 w1 p0 - Healthy";
        assert_eq!(shown(from_json(json)), expected);
        let toml = "origins = [\"10.0.0.2:80\"]\n";
        assert_eq!(shown(from_toml(toml)), "10.0.0.2:80 10.0.0.2:80 w1 p0 - Healthy");
        assert_eq!(shown(from_json(r#"["[::ffff:10.0.0.2]:80"]"#)), shown(from_toml(toml)));
        let tables = "[[origins]]\naddress = \"[fd00::1]:80\"\n";
        assert_eq!(shown(from_toml(tables)), "[fd00::1]:80 [fd00::1]:80 w1 p0 - Healthy");
    }

    #[test]
    fn envoys_form() {
        let assignment = r#"{"cluster_name": "c", "policy": {}, "endpoints": [
            {"locality": {"region": "eu", "zone": "a", "sub_zone": "r1"}, "priority": 1,
             "lb_endpoints": [{"health_status": "DRAINING", "load_balancing_weight": 5,
              "endpoint": {"hostname": "h", "address": {"socket_address":
                {"address": "10.0.0.1", "port_value": 80}}}}]},
            {"lbEndpoints": [{"endpoint": {"address": {"socketAddress":
                {"address": "fd00::1", "portValue": 81, "protocol": "TCP"}}}}]}]}"#;
        let expected = "10.0.0.1:80 10.0.0.1:80 w5 p1 eu/a/r1 Draining\n[fd00::1]:81 [fd00::1]:81 w1 p0 - Healthy";
        assert_eq!(shown(from_json(assignment)), expected);
        let wrapped = format!(r#"{{"version_info": "1", "resources": [{assignment}]}}"#);
        assert_eq!(shown(from_json(&wrapped)), expected);
    }

    #[test]
    fn bad_documents_are_refused_whole() {
        let refused = |json: &str| {
            let shown = shown(from_json(json));
            shown.strip_prefix("refused: ").unwrap_or_else(|| panic!("taken: {shown}")).to_owned()
        };
        assert!(refused("").contains("EOF"));
        assert!(refused(r#"["10.0.0.1:80", "10.0.0.2"]"#).contains("must be ADDRESS:PORT"));
        assert!(refused(r#"["10.0.0.1:0"]"#).contains("port must be"));
        assert!(refused(r#"["0.0.0.0:80"]"#).contains("nobody can be reached"));
        assert!(refused(r#"["[fe80::1%2]:80"]"#).contains("nobody can be reached"));
        assert!(refused(r#"{"origins": [], "orgins": []}"#).contains("unknown field"));
        assert!(refused(r#"[{"address": "10.0.0.1:80", "weight": 0}]"#).contains("nonzero"));
        assert!(refused(r#"[{"address": "10.0.0.1:80", "name": ""}]"#).contains("name is empty"));
        assert!(refused(r#"{"resources": []}"#).contains("found 0"));
        let host = r#"{"endpoints": [{"lb_endpoints": [{"endpoint": {"address":
            {"socket_address": {"address": "web", "port_value": 80}}}}]}]}"#;
        assert!(refused(host).contains("must be an IP address"));
        assert!(from_toml("origins = [\"10.0.0.1\"]").is_err_and(|e| e.contains("ADDRESS:PORT")));
    }
}
