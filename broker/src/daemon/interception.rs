//! What the kernel sends here: the destinations in the configuration, and the addresses on live lists
//! where the configuration says `"origins"` of one.
//!
//! Those on a list are intercepted for as long as they are on it, well or not, in the subset of this
//! gateway or not: clients of all of them are served. Whatever is not intercepted, because there is no
//! list yet, or no room for all of it, goes where its client wants.
//!
//! So do clients outside of the cgroups that a service is restricted to, which are looked up again and
//! again.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use broker_ebpf::abi;
use tokio::sync::watch;

use super::cgroups::Cgroups;
use super::origins::Origins;
use crate::chain;
use crate::config::{Config, Intercept, Route, Service, Steer};
use crate::datapath::gate::Gate;
use crate::datapath::{Datapath, InterceptedService, WorkerListeners};
use crate::membership::Member;
use crate::worker::Shared;

/// The kernel's table holds an old and a new set at the same time while one replaces the other.
const TARGETS_MAX: usize = abi::TARGETS_MAX / 2;

/// Until then all workers have heard of a list: who is intercepted because of a first one must not be
/// refused because there was none a moment ago.
const HEARD: Duration = Duration::from_millis(20);

/// How often cgroups are looked up. Clients of a service that has started again go directly for so
/// long.
const LOOK: Duration = Duration::from_millis(500);

/// The intercepted services.
pub(super) struct Interception {
    datapath: Arc<dyn Datapath>,
    config: Arc<Config>,
    /// With what the configuration names; lists and cgroups come on top of that.
    services: Vec<InterceptedService>,
    /// Those of them whose lists are followed, with their positions in the configuration.
    following: Vec<(usize, usize)>,
    /// What is intercepted because of lists, in the order of `following`.
    listed: Vec<Vec<Intercept>>,
    cgroups: Arc<Cgroups>,
    /// In how many workers each service of the configuration lets its clients in.
    open: watch::Receiver<Vec<usize>>,
    /// Whether the kernel has to be told even if lists are the same.
    stale: bool,
}

impl Interception {
    /// What is to be intercepted, once every worker has said where it listens.
    pub(super) fn new(
        shared: &Shared,
        cgroups: &Arc<Cgroups>,
        listeners: &[Vec<WorkerListeners>],
    ) -> anyhow::Result<Self> {
        let (mut services, mut following) = (Vec::new(), Vec::new());
        for (position, service) in shared.config.services.iter().enumerate() {
            if !service.intercepts() {
                continue;
            }
            // The service that intercepts them hands its clients over.
            if service.intercept_members && !service.by_cgroup {
                following.push((services.len(), position));
            }
            let listeners = listeners.iter().map(|worker| worker[position]).collect();
            services.push(intercepted(shared, position, service, listeners)?);
        }
        Ok(Self {
            datapath: Arc::clone(&shared.datapath),
            config: Arc::clone(&shared.config),
            services,
            following,
            listed: Vec::new(),
            cgroups: Arc::clone(cgroups),
            open: shared.open.subscribe(),
            stale: true,
        })
    }

    /// How many services are intercepted.
    pub(super) fn services(&self) -> usize {
        self.services.len()
    }

    /// Whether there are lists or cgroups to follow.
    pub(super) fn can_change(&self) -> bool {
        !self.following.is_empty() || !self.cgroups.is_empty()
    }

    /// Whether all services let their clients in.
    pub(super) fn is_complete(&self) -> bool {
        (0..self.config.services.len()).all(|position| self.is_open(position))
    }

    /// Whether a service lets its clients in, in all workers. So does that of those of high priority
    /// then: the kernel is told of both together.
    fn is_open(&self, position: usize) -> bool {
        let first = self.config.services[position].high_of.unwrap_or(position);
        let open = self.open.borrow();
        let mut both = self.config.services.iter().zip(&*open).enumerate();
        both.all(|(position, (service, &open))| {
            let other = position != first && service.high_of != Some(first);
            other || open == self.config.workers.get()
        })
    }

    /// Intercepts what there is now, for services that let their clients in.
    pub(super) fn apply(&mut self, origins: &Origins) -> anyhow::Result<()> {
        if self.services.is_empty() {
            return Ok(());
        }
        let listed = self.listed_now(origins);
        if !self.stale && self.listed == listed {
            return Ok(());
        }
        // Until it has worked.
        self.stale = true;
        let mut services = self.services.clone();
        for service in &mut services {
            service.cgroups = self.cgroups.of(&self.config.services[service.service as usize]);
        }
        for ((place, _), members) in self.following.iter().zip(&listed) {
            services[*place].targets.extend(members);
        }
        self.datapath.intercept(&without_closed(services, |position| self.is_open(position)))?;
        self.listed = listed;
        self.stale = false;
        Ok(())
    }

    /// What the lists want to be intercepted now, in the order of `following`.
    fn listed_now(&self, origins: &Origins) -> Vec<Vec<Intercept>> {
        let named = self.services.iter().flat_map(|service| &service.targets);
        let mut targets = Targets { taken: named.copied().collect() };
        let list = |&(_, position): &(usize, usize)| {
            let (taken, left_alone) = targets.take(origins.listed(position).members());
            origins.not_intercepted(position, left_alone);
            taken
        };
        self.following.iter().map(list).collect()
    }

    /// Whether something is to be intercepted that was not.
    fn grows(&self, origins: &Origins) -> bool {
        let before: HashSet<_> = self.listed.iter().flatten().collect();
        self.listed_now(origins).iter().flatten().any(|target| !before.contains(target))
    }

    /// Waits until something else may have to be intercepted: because of a list, a cgroup, or a service
    /// that lets its clients in.
    pub(super) async fn change(&mut self, origins: &Origins) {
        loop {
            let list_changed = tokio::select! {
                () = origins.lists_changed() => true,
                Ok(()) = self.open.changed() => {
                    self.stale = true;
                    false
                }
                () = tokio::time::sleep(LOOK), if !self.cgroups.is_empty() => false,
            };
            if list_changed && self.grows(origins) {
                tokio::time::sleep(HEARD).await;
            }
            self.stale |= self.cgroups.look();
            if list_changed || self.stale {
                return;
            }
        }
    }

    /// Follows what changes for as long as the daemon runs.
    pub(super) async fn follow(mut self, origins: &Origins) {
        let mut said = None;
        loop {
            self.change(origins).await;
            // The old ones stay then. Where there are cgroups it is soon tried again, and so the same
            // error is not told twice in a row.
            let failed = self.apply(origins).err().map(|error| chain(error.as_ref()));
            if let Some(error) = failed.as_ref().filter(|_| failed != said) {
                tracing::error!(error, "intercepting the addresses of a new list, or a new cgroup");
            }
            said = failed;
        }
    }
}

fn intercepted(
    shared: &Shared,
    position: usize,
    service: &Service,
    listeners: Vec<WorkerListeners>,
) -> anyhow::Result<InterceptedService> {
    let config = &shared.config;
    let is_high = |s: &Service| s.by_cgroup && s.high_of == Some(position);
    let high = config.services.iter().position(is_high);
    Ok(InterceptedService {
        service: u32::try_from(position)?,
        targets: if service.by_cgroup { Vec::new() } else { service.intercept.clone() },
        high: high.map(u32::try_from).transpose()?,
        cgroups: None,
        keep_destination: matches!(service.route, Route::Dialled { .. })
            || config.intercept_from_netns.is_some()
            || service.steer != Steer::Relay,
        steer: service.steer,
        gate: shared.common[position].budget.gate().map(Gate::index),
        listeners,
    })
}

/// Leaves out services that do not let their clients in yet, whose clients go where they want. So do
/// those of wider destinations, or they would get clients that are not theirs.
fn without_closed(
    services: Vec<InterceptedService>,
    is_open: impl Fn(usize) -> bool,
) -> Vec<InterceptedService> {
    let (mut open, mut closed): (Vec<_>, Vec<_>) =
        services.into_iter().partition(|service| is_open(service.service as usize));
    let covers = |service: &InterceptedService, closed: &[InterceptedService]| {
        let mut inner = closed.iter().flat_map(|service| &service.targets);
        let within = |inner: &Intercept, outer: &Intercept| {
            outer.port == inner.port && outer.net.contains(&inner.net)
        };
        inner.any(|inner| service.targets.iter().any(|outer| within(inner, outer)))
    };
    while let Some(place) = open.iter().position(|service| covers(service, &closed)) {
        closed.push(open.remove(place));
    }
    open
}

/// Destinations that somebody has.
struct Targets {
    taken: HashSet<Intercept>,
}

impl Targets {
    /// The addresses of members that nobody has yet, as long as there is room; and how many of them
    /// are left alone.
    fn take(&mut self, members: &[Member]) -> (Vec<Intercept>, usize) {
        let mut targets = Vec::new();
        for member in members {
            let target = Intercept::at(member.address);
            if self.taken.len() < TARGETS_MAX && self.taken.insert(target) {
                targets.push(target);
            }
        }
        let left_alone = members.len() - targets.len();
        (targets, left_alone)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    fn members(range: std::ops::Range<u32>) -> Vec<Member> {
        let address = |i: u32| SocketAddr::from(((0x0a00_0000 + i).to_be_bytes(), 80));
        range.map(|i| Member::at(address(i))).collect()
    }

    #[test]
    fn a_closed_service_loses_no_client_to_a_wider_one() {
        let service = |service, targets: &[&str]| {
            let target = |text: &&str| {
                let (net, port) = text.rsplit_once(':').unwrap();
                Intercept { net: net.parse().unwrap(), port: port.parse().unwrap() }
            };
            InterceptedService {
                service,
                targets: targets.iter().map(target).collect(),
                cgroups: None,
                high: None,
                keep_destination: false,
                steer: Steer::Relay,
                gate: None,
                listeners: Vec::new(),
            }
        };
        let services = [
            service(0, &["10.0.0.0/8:80", "fd00::/16:80"]),
            service(1, &["10.1.0.0/16:80", "10.2.0.0/16:80"]),
            service(2, &["10.1.2.3/32:80"]),
            service(3, &["0.0.0.0/0:81", "10.1.2.4/32:80"]),
            service(4, &["fd00::1/128:80"]),
        ];
        let open_without = |closed: &[usize]| -> Vec<u32> {
            let open = without_closed(services.to_vec(), |service| !closed.contains(&service));
            open.iter().map(|service| service.service).collect()
        };
        assert_eq!(open_without(&[]), [0, 1, 2, 3, 4]);
        assert_eq!(open_without(&[2]), [3, 4], "nor do those of the one around it");
        assert_eq!(open_without(&[0]), [1, 2, 3, 4]);
        assert_eq!(open_without(&[4]), [1, 2, 3]);
    }

    #[test]
    fn who_comes_first_has_an_address_and_what_has_no_room_is_left_alone() {
        let vip = Intercept::at(([10, 0, 0, 3], 80).into());
        let mut targets = Targets { taken: HashSet::from([vip]) };
        let (first, left_alone) = targets.take(&members(0..5));
        assert_eq!((first.len(), left_alone), (4, 1), "the configuration has one of them");
        let (second, left_alone) = targets.take(&members(4..7));
        assert_eq!((second.len(), left_alone), (2, 1), "the first list has one of them");
        let (rest, left_alone) = targets.take(&members(100..10_100));
        assert_eq!(rest.len(), TARGETS_MAX - 7);
        assert_eq!(left_alone, 10_000 - rest.len());
    }
}
