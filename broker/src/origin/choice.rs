//! Which of a service's members get exchanges: priority, subset and health come together here.

use std::net::SocketAddr;
use std::sync::Arc;

use super::Chosen;
use super::subset::{self, Fleet};
use crate::config::subset::Subset;
use crate::fleet::Identity;
use crate::membership::{Health, Member, Membership};

/// The members of one priority level, in the order in which this gateway prefers them.
///
/// It depends on what the source says and on who this gateway is, and on nothing that only this
/// gateway knows: all gateways must see the same picture for their subsets to fit together.
#[derive(Clone, Debug, Default)]
pub struct Ranking {
    membership: Arc<Membership>,
    identity: Option<Identity>,
    /// Positions in the membership, best first.
    order: Vec<usize>,
    /// How many of them are used if all of those are healthy.
    size: usize,
    /// The next ones are used until so many are healthy.
    healthy_min: usize,
    level: Level,
    arc: Option<[u64; 2]>,
}

/// What was chosen, and out of what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// The origins to use.
    pub origins: Vec<Chosen>,
    /// Members of the priority level in use.
    pub members: usize,
    /// Those of them that are healthy.
    pub healthy: usize,
    /// The priority level in use.
    pub priority: u32,
    /// How many are chosen because others of the subset are not healthy.
    pub widened: usize,
    /// From where to where on the ring the subset lies; see [`subset::Order::arc`].
    pub arc: Option<[u64; 2]>,
    /// Members that are about to leave.
    pub draining: usize,
    /// Members of other priority levels.
    pub in_reserve: usize,
}

impl Ranking {
    /// Ranks the members. Takes a moment where a band has to be worked out: milliseconds, and in
    /// the largest fleets a second.
    #[must_use]
    pub fn new(
        membership: Arc<Membership>,
        subset: Option<Subset>,
        identity: Option<Identity>,
    ) -> Self {
        let members = membership.members();
        let (level, positions) = level(members);
        let mut arc = None;
        let (order, size, healthy_min) = match subset {
            None => (positions.clone(), positions.len(), 0),
            Some(subset) => {
                let named: Vec<_> = positions.iter().map(|&at| named(&members[at])).collect();
                let Identity { index, gateways } = identity.unwrap_or_else(Identity::stand_in);
                let fleet = Fleet::uniform(gateways, subset.size);
                let order = subset::order(subset.rules, &fleet, index, &named);
                arc = order.arc();
                let ranked = order.all().iter().map(|&at| positions[at]).collect();
                (ranked, order.subset().len(), subset.min_healthy)
            }
        };
        Self { membership, identity, order, size, healthy_min, level, arc }
    }

    /// Whether it was worked out from these.
    #[must_use]
    pub fn is_of(&self, membership: &Arc<Membership>, identity: Option<Identity>) -> bool {
        Arc::ptr_eq(&self.membership, membership) && self.identity == identity
    }

    /// Those that may be used: the subset, and as many again of those that may have to take the
    /// place of others.
    pub fn candidates(&self) -> impl Iterator<Item = SocketAddr> {
        let members = self.membership.members();
        self.order.iter().take(2 * self.size).map(|&at| members[at].address)
    }

    /// Chooses. `is_failing` tells those that cannot be connected to, `health` how a member is: what
    /// its source says, or whoever knows better.
    ///
    /// Unhealthy members are used only when there are no others at all: that an origin is down may
    /// be wrong, that nobody is served would be certain. Degraded ones are used when no healthy one
    /// is left.
    #[must_use]
    pub fn choose(
        &self,
        is_failing: impl Fn(SocketAddr) -> bool,
        health: impl Fn(&Member) -> Health,
    ) -> Choice {
        let members = self.membership.members();
        let in_order: Vec<&Member> = self.order.iter().map(|&at| &members[at]).collect();
        let connects = |m: &Member| !is_failing(m.address);
        // The best health that any of them has; what is worse is left out.
        let bar = in_order.iter().map(|m| health(m)).min().unwrap_or_default();
        let usable = |m: &&&Member| health(m) <= bar;
        let (first, rest) = in_order.split_at(self.size);
        // Those that cannot be connected to stay: they are tried again and again, and that is how
        // it is found out that they are back.
        let mut chosen: Vec<&Member> = first.iter().filter(usable).copied().collect();
        let live = chosen.iter().filter(|m| connects(m)).count();
        let missing = self.healthy_min.min(self.size).saturating_sub(live);
        let next = rest.iter().filter(usable).filter(|m| connects(m)).take(missing);
        let before = chosen.len();
        chosen.extend(next);
        Choice {
            members: in_order.len(),
            healthy: in_order.iter().filter(|m| health(m) == Health::Healthy).count(),
            priority: self.level.priority,
            arc: self.arc,
            draining: self.level.draining,
            in_reserve: self.level.in_reserve,
            widened: chosen.len() - before,
            origins: chosen
                .iter()
                .map(|m| Chosen { address: m.address, weight: m.weight })
                .collect(),
        }
    }
}

/// The members of the priority level in use, as subsets are computed from them.
#[must_use]
pub fn in_use(membership: &Membership) -> Vec<subset::Member<'_>> {
    let members = membership.members();
    level(members).1.into_iter().map(|at| named(&members[at])).collect()
}

/// The first priority level that has a healthy member, or the first one of all if none has; and the
/// positions of its members.
///
/// Those that are about to leave are not among them: what a subset is computed from should not
/// change twice for one departure.
fn level(members: &[Member]) -> (Level, Vec<usize>) {
    let stays = || members.iter().enumerate().filter(|(_, m)| m.health != Health::Draining);
    let serves = stays().filter(|(_, m)| m.health <= Health::Degraded);
    let first = serves.map(|(_, m)| m.priority).min();
    let priority = first.or_else(|| stays().map(|(_, m)| m.priority).min()).unwrap_or(0);
    let positions: Vec<_> =
        stays().filter(|(_, m)| m.priority == priority).map(|(at, _)| at).collect();
    let draining = members.len() - stays().count();
    let in_reserve = members.len() - draining - positions.len();
    (Level { priority, draining, in_reserve }, positions)
}

/// The priority level in use, and how many members are not of it.
#[derive(Clone, Copy, Debug, Default)]
struct Level {
    priority: u32,
    /// They are about to leave.
    draining: usize,
    /// They are of other levels.
    in_reserve: usize,
}

fn named(member: &Member) -> subset::Member<'_> {
    subset::Member {
        identity: &member.identity,
        weight: member.weight,
        zone: member.zone.as_deref(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::subset::{Algorithm, Rules};
    use super::*;

    fn address(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 80))
    }

    fn member(last: u8, health: Health) -> Member {
        Member { health, ..Member::at(address(last)) }
    }

    fn chosen(members: &[Member], subset: Option<Subset>, failing: &[u8]) -> (Vec<u8>, usize) {
        let membership = Arc::new(Membership::new(members.to_vec()));
        let ranking = Ranking::new(membership, subset, Some(Identity { index: 0, gateways: 4 }));
        let is_failing = |a| failing.iter().any(|&last| a == address(last));
        let choice = ranking.choose(is_failing, |member| member.health);
        let last = |chosen: &Chosen| match chosen.address {
            SocketAddr::V4(v4) => v4.ip().octets()[3],
            SocketAddr::V6(_) => 0,
        };
        (choice.origins.iter().map(last).collect(), choice.widened)
    }

    use Health::{Degraded, Draining, Healthy, Unhealthy};

    #[test]
    fn health_decides_who_is_used() {
        let use_of = |healths: &[Health]| {
            let members: Vec<_> = (0..).zip(healths).map(|(i, &h)| member(i, h)).collect();
            chosen(&members, None, &[]).0
        };
        assert_eq!(use_of(&[Healthy, Degraded, Draining, Unhealthy]), [0]);
        assert_eq!(use_of(&[Unhealthy, Degraded, Draining]), [1]);
        assert_eq!(use_of(&[Unhealthy, Draining, Unhealthy]), [0, 2], "better than nobody");
        assert!(use_of(&[Draining]).is_empty(), "it is about to be gone");
    }

    #[test]
    fn a_lower_priority_waits_until_no_healthy_one_is_left_before_it() {
        let mut members = [member(0, Healthy), member(1, Unhealthy), member(2, Healthy)];
        members[2].priority = 1;
        assert_eq!(chosen(&members, None, &[]).0, [0]);
        members[0].health = Unhealthy;
        assert_eq!(chosen(&members, None, &[]).0, [2]);
        members[2].health = Unhealthy;
        assert_eq!(chosen(&members, None, &[]).0, [0, 1]);
    }

    #[test]
    fn a_subset_is_widened_by_the_next_ones_and_comes_back() {
        let members: Vec<_> = (0..6).map(|i| member(i, Healthy)).collect();
        let rules = Rules { algorithm: Algorithm::Kronecker { band: None }, zone_max: None };
        let subset = |size, min_healthy| Some(Subset { rules, size, min_healthy });
        let (order, _) = chosen(&members, subset(6, 0), &[]);
        let expect = |used: usize, widened: usize| (order[..used].to_vec(), widened);
        let three = subset(3, 2);
        assert_eq!(chosen(&members, three, &[]), expect(3, 0));
        assert_eq!(chosen(&members, three, &order[..1]), expect(3, 0), "two are enough");
        assert_eq!(chosen(&members, three, &order[..2]), expect(4, 1));
        let (used, widened) = chosen(&members, three, &order[..4]);
        assert_eq!((&used[3..], widened), (&order[4..], 2), "the failing fourth is no help");
        let mut sick = members.clone();
        for &last in &order[..2] {
            sick[usize::from(last)].health = Unhealthy;
        }
        let (used, widened) = chosen(&sick, three, &[]);
        assert_eq!((&*used, widened), (&order[2..4], 1));
    }

    #[test]
    fn who_is_left_out_is_counted() {
        let mut members = [member(0, Healthy), member(1, Draining), member(2, Healthy)];
        members[2].priority = 1;
        let ranking = Ranking::new(Arc::new(Membership::new(members)), None, None);
        let choice = ranking.choose(|_| false, |member| member.health);
        assert_eq!((choice.members, choice.draining, choice.in_reserve), (1, 1, 1));
    }

    #[test]
    fn the_ranking_does_not_depend_on_health() {
        let rules = Rules { algorithm: Algorithm::Ring, zone_max: None };
        let subset = Some(Subset { rules, size: 2, min_healthy: 0 });
        let mut members: Vec<_> = (0..8).map(|i| member(i, Healthy)).collect();
        let (before, _) = chosen(&members, subset, &[]);
        let other = (0..8).find(|last| !before.contains(last)).unwrap();
        members[usize::from(other)].health = Unhealthy;
        assert_eq!(chosen(&members, subset, &[]).0, before);
    }
}
