//! The tables of the connect hook: which destinations go to which listeners.
//!
//! Programs read the tables while they change. A new set of services is therefore written to
//! slots that nothing refers to, the destinations are moved there one by one (each in one atomic
//! step), and only then those that are no longer intercepted are removed: at any time each
//! destination leads to its old or to its new service, and never to another one.

use std::collections::HashMap;

use anyhow::{Context as _, ensure};
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, MapData, MapError};
use broker_ebpf::abi::{
    self, Address, Cgroup, Listeners, Route, SERVICE_CGROUPS_MAX, SERVICES_MAX, Service,
    TARGET_BITS_BEFORE_IP, TARGETS_MAX, Target, WORKERS_MAX, words,
};
use ipnet::IpNet;

use super::map_index;
use crate::config::{Intercept, Steer};
use crate::datapath::steering::Layout;
use crate::datapath::{InterceptedService, ListenerSet, WorkerListeners};

/// The tables and what they hold.
pub(super) struct ServiceMaps {
    targets: LpmTrie<MapData, Target, u32>,
    services: Array<MapData, Service>,
    listeners: Array<MapData, Listeners>,
    routes: Array<MapData, Route>,
    workers: usize,
    /// Where the slots of steered services are; `None` if nothing can be steered.
    layout: Option<Layout>,
    /// Whether clients of a service that does not ask for it by name may be steered.
    auto: bool,
    /// Every prefix in `targets` with its slot.
    active: HashMap<Prefix, u32>,
    /// The first slot of the half that `active` does not refer to.
    free: usize,
}

/// What `targets` is keyed by, in a form that can be compared.
type Prefix = (u32, [u8; 2], u8, [u32; 4]);

impl ServiceMaps {
    pub(super) fn new(
        targets: LpmTrie<MapData, Target, u32>,
        services: Array<MapData, Service>,
        listeners: Array<MapData, Listeners>,
        routes: Array<MapData, Route>,
        workers: usize,
        (layout, auto): (Option<Layout>, bool),
    ) -> Self {
        let active = HashMap::new();
        Self { targets, services, listeners, routes, workers, layout, auto, active, free: 0 }
    }

    /// Makes these the intercepted services. If that fails, the old ones stay.
    pub(super) fn replace(&mut self, services: &[InterceptedService]) -> anyhow::Result<()> {
        ensure!(
            services.len() <= SERVICES_MAX,
            "{} services are intercepted, at most {SERVICES_MAX} can be",
            services.len()
        );
        let mut wanted = HashMap::new();
        for (slot, service) in (self.free..).zip(services) {
            let high = service.high.map(|high| self.slot_of(high, services)).transpose()?;
            self.write_service(slot, service, high)
                .with_context(|| format!("service {}", service.service))?;
            wanted.extend(service.targets.iter().map(|t| (prefix(t), map_index(slot))));
        }
        ensure!(
            wanted.len() + self.active.len() <= TARGETS_MAX,
            "{} destinations are to replace {}, the kernel's table holds {TARGETS_MAX}",
            wanted.len(),
            self.active.len()
        );

        for (target, &slot) in &wanted {
            if let Err(e) = self.targets.insert(&key(target), slot, 0) {
                self.roll_back(&wanted);
                return Err(e).context("intercepting a destination");
            }
        }
        let replaced = std::mem::replace(&mut self.active, wanted);
        self.free = if self.free == 0 { SERVICES_MAX } else { 0 };
        for target in replaced.keys().filter(|target| !self.active.contains_key(*target)) {
            remove(&mut self.targets, target)
                .context("ending the interception of a destination")?;
        }
        Ok(())
    }

    /// Where one of the new services will be.
    fn slot_of(&self, high: u32, services: &[InterceptedService]) -> anyhow::Result<usize> {
        let place = services.iter().position(|s| s.service == high && s.cgroups.is_some());
        let place =
            place.with_context(|| format!("no service {high} that is restricted to cgroups"))?;
        Ok(self.free + place)
    }

    fn write_service(
        &mut self,
        slot: usize,
        service: &InterceptedService,
        high: Option<usize>,
    ) -> anyhow::Result<()> {
        ensure!(
            service.listeners.len() == self.workers,
            "listeners of {} workers were given, the programs know of {}",
            service.listeners.len(),
            self.workers
        );
        let mut value = service_value(service)?;
        value.high = high.map_or(0, |slot| map_index(slot + 1));
        if service.steer == Steer::Auto && !self.auto {
            value.steer = abi::Steer::Relay as u32;
        }
        let position = service.service as usize;
        for (worker, listeners) in service.listeners.iter().enumerate() {
            let index = map_index(slot * WORKERS_MAX + worker);
            self.listeners.set(index, listeners_value(listeners), 0)?;
            let layout = self.layout.as_ref();
            let first_group = layout.and_then(|layout| layout.first_group(position, worker));
            let steers = value.steer != abi::Steer::Relay as u32;
            let route = if let (Some(layout), Some(first), true) = (layout, first_group, steers) {
                Route {
                    first_group: map_index(first),
                    origins: map_index(layout.places(position)),
                    service: service.service,
                    worker: map_index(worker),
                    steer: value.steer,
                    ..Route::default()
                }
            } else {
                value.steer = abi::Steer::Relay as u32;
                Route::default()
            };
            self.routes.set(index, route, 0)?;
        }
        self.services.set(map_index(slot), value, 0)?;
        Ok(())
    }

    fn roll_back(&mut self, wanted: &HashMap<Prefix, u32>) {
        for target in wanted.keys() {
            let result = match self.active.get(target) {
                Some(&slot) => self.targets.insert(&key(target), slot, 0),
                None => remove(&mut self.targets, target),
            };
            if let Err(e) = result {
                tracing::error!(error = %e, "the old interception could not be restored");
            }
        }
    }
}

fn remove(targets: &mut LpmTrie<MapData, Target, u32>, target: &Prefix) -> Result<(), MapError> {
    match targets.remove(&key(target)) {
        Err(MapError::SyscallError(e)) if e.io_error.kind() == std::io::ErrorKind::NotFound => {
            Ok(())
        }
        result => result,
    }
}

fn service_value(service: &InterceptedService) -> anyhow::Result<Service> {
    let cgroups = service.cgroups.as_deref().unwrap_or_default();
    ensure!(
        cgroups.len() <= SERVICE_CGROUPS_MAX,
        "{} cgroups, at most {SERVICE_CGROUPS_MAX} are possible",
        cgroups.len()
    );
    let mut value = Service {
        restricted: service.cgroups.is_some().into(),
        cgroup_count: map_index(cgroups.len()),
        keep_destination: service.keep_destination.into(),
        steer: match service.steer {
            Steer::Relay => abi::Steer::Relay,
            Steer::Auto => abi::Steer::Auto,
            Steer::Kernel => abi::Steer::Kernel,
        } as u32,
        gate: service.gate.map_or(0, |gate| map_index(gate + 1)),
        ..Service::default()
    };
    for (place, cgroup) in value.cgroups.iter_mut().zip(cgroups) {
        *place = Cgroup { id: cgroup.id, level: cgroup.level, zero: 0 };
    }
    Ok(value)
}

fn listeners_value(listeners: &WorkerListeners) -> Listeners {
    Listeners { relayed: set_value(&listeners.relayed), steered: set_value(&listeners.steered) }
}

fn set_value(listeners: &ListenerSet) -> abi::ListenerSet {
    abi::ListenerSet {
        loopback_v4: listeners.loopback_v4.to_be(),
        loopback_v6: listeners.loopback_v6.to_be(),
        netns: listeners.netns.map_or_else(Address::default, Address::from),
    }
}

/// An IPv6 prefix of IPv4-mapped addresses is the IPv4 prefix: the program sees no difference.
fn prefix(target: &Intercept) -> Prefix {
    let (octets, len, v4) = match target.net.trunc() {
        IpNet::V4(net) => (net.addr().to_ipv6_mapped().octets(), 96 + net.prefix_len(), true),
        IpNet::V6(net) => {
            let mapped = net.prefix_len() >= 96 && net.addr().to_ipv4_mapped().is_some();
            (net.addr().octets(), net.prefix_len(), mapped)
        }
    };
    let bits = TARGET_BITS_BEFORE_IP + u32::from(len);
    (bits, target.port.to_be_bytes(), if v4 { 4 } else { 6 }, words(octets))
}

fn key(&(bits, port, family, ip): &Prefix) -> Key<Target> {
    Key::new(bits, Target { port, family, zero: 0, ip })
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use broker_ebpf::flow;

    use super::*;

    /// Whether the kernel's longest-prefix match would find `net` for `destination`.
    fn matches(net: &str, destination: &str) -> bool {
        let destination: SocketAddr = destination.parse().unwrap();
        let (bits, port, family, ip) = prefix(&Intercept { net: net.parse().unwrap(), port: 80 });
        let bytes = |port: [u8; 2], family, ip: [u32; 4]| {
            let mut bytes = vec![port[0], port[1], family, 0];
            bytes.extend(ip.iter().flat_map(|word| word.to_ne_bytes()));
            bytes
        };
        let target = flow::target(&destination.into());
        let (a, b) = (bytes(port, family, ip), bytes(target.port, target.family, target.ip));
        let bit = |bytes: &[u8], i: usize| bytes[i / 8] >> (7 - i % 8) & 1;
        (0..bits as usize).all(|i| bit(&a, i) == bit(&b, i))
    }

    #[test]
    fn prefixes_contain_what_they_should() {
        for (net, destination, expected) in [
            ("10.0.0.0/8", "10.1.2.3:80", true),
            ("10.0.0.0/8", "[::ffff:10.1.2.3]:80", true),
            ("10.0.0.0/8", "10.1.2.3:81", false),
            ("10.0.0.0/8", "11.1.2.3:80", false),
            ("10.1.2.3/32", "10.1.2.3:80", true),
            ("10.1.2.3/32", "10.1.2.2:80", false),
            ("10.9.9.9/8", "10.1.2.3:80", true),
            ("0.0.0.0/0", "1.2.3.4:80", true),
            ("0.0.0.0/0", "[2001:db8::1]:80", false),
            ("::/0", "[2001:db8::1]:80", true),
            ("::/0", "1.2.3.4:80", false),
            ("2001:db8::/32", "[2001:db8:1::1]:80", true),
            ("2001:db8::/32", "[2001:db9::1]:80", false),
            ("::ffff:10.0.0.0/104", "10.1.2.3:80", true),
            ("::ffff:10.0.0.1/128", "[::ffff:10.0.0.1]:80", true),
        ] {
            assert_eq!(matches(net, destination), expected, "{net} {destination}");
        }
    }
}
