//! `EndpointSlice`s: what is kept of them, and which members they are.
//!
//! The types are the broker's own and hold what is used here: most of what a server says (who manages
//! which field, what an endpoint refers to) is skipped. What a server says may be without end, or mean
//! much in few bytes (`{},{},…`), so every list is refused before it takes the memory for it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;
use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};

use super::super::document::{self, BYTES_MAX, MEMBERS_MAX};
use super::super::{Health, List, Member};
use crate::config::discovery::{self, Port};

/// All slices at one time.
#[derive(Deserialize)]
pub(super) struct Listed {
    pub(super) metadata: Metadata,
    #[serde(deserialize_with = "limited")]
    pub(super) items: Slices,
}

/// Slices by name.
#[derive(Debug, Default)]
pub(super) struct Slices {
    by_name: BTreeMap<String, Slice>,
    bytes: usize,
}

impl Slices {
    /// Adds a slice, or replaces the one of its name, unless all of them take too much memory then.
    pub(super) fn put(&mut self, slice: Slice) -> Result<(), String> {
        self.remove(&slice);
        self.bytes += slice.bytes();
        if self.bytes > BYTES_MAX {
            return Err(format!("the slices take more than {BYTES_MAX} bytes"));
        }
        self.by_name.insert(slice.metadata.name.clone(), slice);
        Ok(())
    }

    /// Removes the slice of this one's name.
    pub(super) fn remove(&mut self, slice: &Slice) {
        if let Some(known) = self.by_name.remove(&slice.metadata.name) {
            self.bytes -= known.bytes();
        }
    }

    /// Who is in them, as the configuration wants it.
    pub(super) fn members(&self, config: &discovery::Kubernetes) -> Result<List, String> {
        membership(self.by_name.values(), config)
    }
}

/// A slice. Whatever is missing, or `null`, is empty.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Slice {
    pub(super) metadata: Metadata,
    address_type: String,
    #[serde(deserialize_with = "limited")]
    ports: Vec<SlicePort>,
    #[serde(deserialize_with = "limited")]
    endpoints: Vec<Endpoint>,
}

/// What is said of a slice, or of a list of them.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Metadata {
    name: String,
    pub(super) resource_version: String,
    labels: Option<Labels>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Labels {
    #[serde(rename = "kubernetes.io/service-name")]
    service: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SlicePort {
    name: Option<String>,
    port: Option<i32>,
    protocol: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Endpoint {
    #[serde(deserialize_with = "limited")]
    addresses: Vec<String>,
    conditions: Option<Conditions>,
    hostname: Option<String>,
    zone: Option<String>,
    hints: Option<Hints>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Conditions {
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Hints {
    #[serde(deserialize_with = "limited")]
    for_zones: Vec<Zone>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Zone {
    name: String,
}

impl Slice {
    fn service(&self) -> Option<&str> {
        self.metadata.labels.as_ref()?.service.as_deref()
    }

    /// About the memory that it takes, with its name as a key.
    fn bytes(&self) -> usize {
        let own = size_of::<String>() + size_of::<Self>() + 2 * self.metadata.name.len();
        let version = self.metadata.resource_version.len();
        let texts = self.service().map_or(0, str::len) + self.address_type.len();
        let ports = self.ports.iter().map(SlicePort::bytes).sum::<usize>();
        own + version + texts + ports + self.endpoints.iter().map(Endpoint::bytes).sum::<usize>()
    }
}

impl SlicePort {
    fn bytes(&self) -> usize {
        size_of::<Self>() + length(self.name.as_ref()) + length(self.protocol.as_ref())
    }
}

impl Endpoint {
    fn bytes(&self) -> usize {
        let all = self.addresses.iter().map(String::as_str).chain(self.zones());
        let texts = length(self.hostname.as_ref()) + length(self.zone.as_ref());
        size_of::<Self>() + texts + all.map(|text| size_of::<String>() + text.len()).sum::<usize>()
    }

    /// What is missing is to be taken so (the API's documentation of `conditions`).
    fn is_ready(&self) -> bool {
        self.conditions.unwrap_or_default().ready.unwrap_or(true)
    }

    /// The zones that should use it.
    fn zones(&self) -> impl Iterator<Item = &str> {
        let zones = self.hints.iter().flat_map(|hints| &hints.for_zones);
        zones.map(|zone| zone.name.as_str())
    }

    /// Whether it has hints, and none of them names the zone.
    fn is_for_others(&self, zone: &str) -> bool {
        self.zones().next().is_some() && !self.zones().any(|name| name == zone)
    }
}

fn length(text: Option<&String>) -> usize {
    text.map_or(0, String::len)
}

/// What the elements of a list go into, which says when there are too many.
trait Limited: Default {
    type Element;

    fn take(&mut self, element: Self::Element) -> Result<(), String>;
}

impl<T> Limited for Vec<T> {
    type Element = T;

    /// No list within a slice has as many elements as a list of members may have.
    fn take(&mut self, element: T) -> Result<(), String> {
        if self.len() == MEMBERS_MAX {
            return Err(format!("a list of more than {MEMBERS_MAX}"));
        }
        self.push(element);
        Ok(())
    }
}

impl Limited for Slices {
    type Element = Slice;

    fn take(&mut self, slice: Slice) -> Result<(), String> {
        self.put(slice)
    }
}

/// Reads a list, or none, for as long as it is not too long.
fn limited<'de, L, D>(deserializer: D) -> Result<L, D::Error>
where
    L: Limited,
    L::Element: Deserialize<'de>,
    D: Deserializer<'de>,
{
    struct Elements<L>(PhantomData<L>);

    impl<'de, L: Limited> Visitor<'de> for Elements<L>
    where
        L::Element: Deserialize<'de>,
    {
        type Value = L;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }

        fn visit_unit<E>(self) -> Result<L, E> {
            Ok(L::default())
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<L, A::Error> {
            let mut list = L::default();
            while let Some(element) = sequence.next_element()? {
                list.take(element).map_err(A::Error::custom)?;
            }
            Ok(list)
        }
    }

    deserializer.deserialize_any(Elements(PhantomData))
}

/// The members in the slices, and how many slices were passed over.
///
/// A slice that cannot be used (no such port, or names instead of addresses) is passed over as long
/// as there are others: pods of several versions may be behind one service. If no slice can be used,
/// or what a usable one says cannot be, the list is refused.
pub(super) fn membership<'a>(
    slices: impl Iterator<Item = &'a Slice>,
    config: &discovery::Kubernetes,
) -> Result<List, String> {
    let discovery::Kubernetes { service, port, zone, .. } = config;
    let mut endpoints = Vec::new();
    let (mut usable, mut others, mut named, mut portless) = (0, 0, 0, 0);
    let mut ports = BTreeSet::new();
    for slice in slices.filter(|slice| !slice.endpoints.is_empty()) {
        // The server was asked for those of the service only.
        if slice.service() != Some(service) {
            others += 1;
            continue;
        }
        if !matches!(slice.address_type.as_str(), "IPv4" | "IPv6") {
            named += 1;
            continue;
        }
        let Some(number) = number(slice, port) else {
            portless += 1;
            ports.extend(slice.ports.iter().map(|port| {
                let name = port.name.as_deref().unwrap_or_default();
                format!("{name:?} {}", port.port.unwrap_or_default())
            }));
            continue;
        };
        usable += 1;
        endpoints.extend(slice.endpoints.iter().map(|endpoint| (endpoint, number)));
    }
    if usable == 0 && others + named + portless > 0 {
        let mut reasons = Vec::new();
        if others > 0 {
            reasons.push(format!("{others} are not of the service"));
        }
        if portless > 0 {
            let ports = Vec::from_iter(ports).join(", ");
            reasons.push(format!("{portless} have no TCP port {} (but: {ports})", Shown(port)));
        }
        if named > 0 {
            reasons.push(format!("{named} have names instead of addresses"));
        }
        return Err(format!("no slice can be used: {}", reasons.join(", ")));
    }
    let zone = zone.as_deref();
    let zone =
        zone.filter(|zone| hints_hold(endpoints.iter().map(|(endpoint, _)| *endpoint), zone));
    let (mut members, mut elsewhere) = (Vec::new(), 0);
    for (endpoint, number) in endpoints {
        // Also of those that are left out: a list that is wrong anywhere is refused.
        let member = member(endpoint, number)?;
        if zone.is_some_and(|zone| endpoint.is_for_others(zone)) {
            elsewhere += 1;
        } else {
            members.push(member);
        }
    }
    let passed_over = [
        ("slices_of_other_services", others),
        ("slices_of_names", named),
        ("slices_without_port", portless),
        ("hinted_to_other_zones", elsewhere),
    ];
    Ok(List {
        membership: document::membership(members)?,
        left_out: passed_over.into_iter().filter(|(_, count)| *count > 0).collect(),
    })
}

/// Whether hints can be gone by in a zone: all that is ready has some, and some of it names the zone.
fn hints_hold<'a>(mut endpoints: impl Iterator<Item = &'a Endpoint>, zone: &str) -> bool {
    let mut named = false;
    endpoints.all(|endpoint| {
        let ready = endpoint.is_ready();
        let mut zones = endpoint.zones().peekable();
        let hinted = zones.peek().is_some();
        named |= ready && zones.any(|name| name == zone);
        hinted || !ready
    }) && named
}

/// The number of the port in the pods of a slice.
fn number(slice: &Slice, port: &Port) -> Option<u32> {
    let tcp = slice.ports.iter().filter(|p| p.protocol.as_deref().unwrap_or("TCP") == "TCP");
    let mut numbers = tcp.filter_map(|candidate| {
        // Without a number a port stands for all of them.
        let number = candidate.port.and_then(|number| u32::try_from(number).ok());
        match port {
            Port::Named(name) => number.filter(|_| candidate.name.as_ref() == Some(name)),
            Port::Number(wanted) => {
                let wanted = u32::from(*wanted);
                (number.unwrap_or(wanted) == wanted).then_some(wanted)
            }
        }
    });
    numbers.next()
}

fn member(endpoint: &Endpoint, port: u32) -> Result<Member, String> {
    // Those after the first have no meaning (the API's documentation of `addresses`).
    let text = endpoint.addresses.first().map(String::as_str).unwrap_or_default();
    let ip: IpAddr = text.parse().map_err(|_e| format!("{text:?}: must be an IP address"))?;
    let address: SocketAddr = document::address(ip, port)?;
    let conditions = endpoint.conditions.unwrap_or_default();
    let ready = endpoint.is_ready();
    let serving = conditions.serving.unwrap_or(ready);
    let terminating = conditions.terminating.unwrap_or(false);
    let mut member = Member {
        zone: endpoint.zone.clone(),
        health: if ready {
            Health::Healthy
        } else if serving && terminating {
            Health::Draining
        } else {
            Health::Unhealthy
        },
        ..Member::at(address)
    };
    if let Some(hostname) = endpoint.hostname.as_deref().filter(|name| !name.is_empty()) {
        member.identity = format!("{hostname}:{port}");
    }
    Ok(member)
}

/// A port as the configuration writes it.
struct Shown<'a>(&'a Port);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Port::Named(name) => write!(f, "{name:?}"),
            Port::Number(number) => write!(f, "{number}"),
        }
    }
}
