//! Which of a service's members get exchanges: priority, subset and health come together here.

use std::net::SocketAddr;

use super::Chosen;
use crate::membership::{Health, Member, Membership};

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
}

/// How large a subset is, and when it is widened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// The size.
    pub origins: usize,
    /// The next ones are added until so many are healthy.
    pub healthy_min: usize,
}

/// The members of the first priority level that has a healthy one; of the first level of all if
/// none has.
///
/// Members that are about to leave are not among them: what a subset is computed from should not
/// change twice for one departure.
#[must_use]
pub fn level(membership: &Membership) -> Vec<&Member> {
    let stays = |m: &&Member| m.health != Health::Draining;
    let members = || membership.members().iter().filter(stays);
    let healthy = members().filter(|m| m.health <= Health::Degraded).map(|m| m.priority).min();
    let priority = healthy.or_else(|| members().map(|m| m.priority).min());
    members().filter(|m| Some(m.priority) == priority).collect()
}

/// Chooses among the members of one [`level`]. `order` has the positions of all of them, best
/// first; without a `size` all are used. `is_failing` tells those that cannot be connected to.
///
/// Unhealthy members are used only when there are no others at all: that an origin is down may be
/// wrong, that nobody is served would be certain. Degraded ones are used when no healthy one is left.
#[must_use]
pub fn choose(
    level: &[&Member],
    order: &[usize],
    size: Option<Size>,
    is_failing: impl Fn(SocketAddr) -> bool,
) -> Choice {
    let in_order: Vec<&Member> =
        order.iter().filter_map(|&position| level.get(position).copied()).collect();
    let connects = |m: &Member| !is_failing(m.address);
    let healthy = in_order.iter().filter(|m| m.health == Health::Healthy).count();
    // The best health that any of them has; what is worse is left out.
    let bar = in_order.iter().map(|m| m.health).min().unwrap_or_default();
    let usable = |m: &&&Member| m.health <= bar;
    let size = size.unwrap_or(Size { origins: in_order.len(), healthy_min: 0 });
    let (subset, rest) = in_order.split_at(size.origins.min(in_order.len()));
    let mut chosen: Vec<&Member> = subset.iter().filter(usable).copied().collect();
    let live = chosen.iter().filter(|m| connects(m)).count();
    // Those that cannot be connected to stay: they are tried again and again, and that is how it
    // is found out that they are back.
    let missing = size.healthy_min.min(size.origins).saturating_sub(live);
    let more = rest.iter().filter(usable).filter(|m| connects(m)).take(missing);
    let widened: Vec<&Member> = more.copied().collect();
    chosen.extend(&widened);
    Choice {
        origins: chosen.iter().map(|m| Chosen { address: m.address, weight: m.weight }).collect(),
        members: level.len(),
        healthy,
        priority: level.first().map_or(0, |m| m.priority),
        widened: widened.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 80))
    }

    fn member(last: u8, health: Health) -> Member {
        Member { health, ..Member::at(address(last)) }
    }

    fn chosen(members: &[Member], size: Option<Size>, failing: &[u8]) -> (Vec<u8>, usize) {
        let membership = Membership::new(members.to_vec());
        let level = level(&membership);
        let order: Vec<_> = (0..level.len()).collect();
        let is_failing = |a| failing.iter().any(|&last| a == address(last));
        let choice = choose(&level, &order, size, is_failing);
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
        let size = Some(Size { origins: 3, healthy_min: 2 });
        assert_eq!(chosen(&members, size, &[]), (vec![0, 1, 2], 0));
        assert_eq!(chosen(&members, size, &[1]), (vec![0, 1, 2], 0), "two are enough");
        assert_eq!(chosen(&members, size, &[1, 2]), (vec![0, 1, 2, 3], 1));
        assert_eq!(chosen(&members, size, &[0, 1, 2, 3]), (vec![0, 1, 2, 4, 5], 2));
        let mut sick = members.clone();
        sick[0].health = Unhealthy;
        sick[1].health = Unhealthy;
        assert_eq!(chosen(&sick, size, &[]), (vec![2, 3], 1));
    }
}
