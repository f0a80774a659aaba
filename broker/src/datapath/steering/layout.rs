//! Which slots and groups are whose.

use std::ops::Range;

use broker_ebpf::abi::GROUP_SLOTS_MAX;

use crate::config::{Affinity, Config, Protocol, Route, Service, Steer};

/// Slots of all workers and origins together; the programs' memory grows with them (3 KB each).
const SLOTS_MAX: usize = 16_384;

/// How many origins of a service can be steered to at a time if discovery says which there are.
/// Those beyond are the daemon's alone.
const DISCOVERED_MAX: usize = 64;

/// How slots are shared out: to groups, one for each worker and place of a steered service, and a
/// spare one to try steering out. A place is an origin's for as long as it has sockets there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    services: Vec<Option<ServiceGroups>>,
    workers: usize,
    groups: usize,
    group_slots: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ServiceGroups {
    first: usize,
    places: usize,
}

/// Whose a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Position of the service in the configuration.
    pub service: usize,
    /// The worker.
    pub worker: usize,
    /// The place of the origin among the worker's.
    pub place: usize,
}

impl Layout {
    /// The layout for a configuration; `None` if nothing in it can be steered.
    #[must_use]
    pub fn new(config: &Config) -> Option<Self> {
        let workers = config.workers.get();
        let mut groups = 0;
        let services = config.services.iter().map(|service| {
            is_steerable(service).then(|| {
                let places = if service.discovery.is_some() {
                    DISCOVERED_MAX
                } else {
                    service.origins.len()
                };
                let first = groups;
                groups += workers * places;
                ServiceGroups { first, places }
            })
        });
        let services: Vec<_> = services.collect();
        // With very many origins each gets few slots, or none: such a fleet wants subsets.
        let group_slots = (SLOTS_MAX / (groups + 1)).min(GROUP_SLOTS_MAX);
        (groups > 0 && group_slots > 0).then_some(Self { services, workers, groups, group_slots })
    }

    /// The layout to try steering out, for no service at all.
    #[must_use]
    pub fn trial() -> Self {
        Self { services: Vec::new(), workers: 1, groups: 0, group_slots: 1 }
    }

    /// The group of a service's first place in a worker; the others follow.
    #[must_use]
    pub fn first_group(&self, service: usize, worker: usize) -> Option<usize> {
        let groups = (*self.services.get(service)?)?;
        Some(groups.first + worker * groups.places)
    }

    /// How many origins of a service can be steered to.
    #[must_use]
    pub fn places(&self, service: usize) -> usize {
        self.services.get(service).copied().flatten().map_or(0, |groups| groups.places)
    }

    /// Whose a slot is.
    #[must_use]
    pub fn owner(&self, slot: usize) -> Option<Owner> {
        let group = slot / self.group_slots;
        self.services.iter().enumerate().find_map(|(service, groups)| {
            let groups = (*groups)?;
            let at = group.checked_sub(groups.first)?;
            let (worker, place) = (at / groups.places, at % groups.places);
            (worker < self.workers).then_some(Owner { service, worker, place })
        })
    }

    /// The groups of a service, of all workers.
    pub(super) fn groups_of(&self, service: usize) -> Range<usize> {
        let groups = self.services.get(service).copied().flatten();
        groups.map_or(0..0, |g| g.first..g.first + self.workers * g.places)
    }

    /// How many workers share them.
    pub(super) fn workers(&self) -> usize {
        self.workers
    }

    /// How many services there are, steered or not.
    pub(super) fn services(&self) -> usize {
        self.services.len()
    }

    /// The group that no service has.
    #[must_use]
    pub fn spare_group(&self) -> usize {
        self.groups
    }

    /// How many groups there are.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.groups + 1
    }

    /// Slots of each group.
    #[must_use]
    pub fn group_slots(&self) -> usize {
        self.group_slots
    }

    /// How many slots there are.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.groups() * self.group_slots
    }
}

/// Whether any client of a service may be steered.
fn is_steerable(service: &Service) -> bool {
    service.steer != Steer::Relay
        && service.intercepts()
        && service.protocol == (Protocol::Http1 { affinity: Affinity::Exchange })
        && service.route == Route::Balance
}
