//! Which origins a service uses ([`choice`]), and which of them an exchange goes to ([`pick`]).
//!
//! Power of two choices: of two origins drawn at random, the one with fewer leases out. It is
//! within a constant of the best possible load, needs no shared state between workers, and does
//! not herd the way "least loaded of all" does when many pickers see the same stale picture
//! (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).

pub mod choice;
pub mod outlier;
pub mod panic;
pub mod subset;
pub mod watch;

use std::net::SocketAddr;
use std::num::NonZeroU32;

use rand::{Rng, RngExt};

/// An origin that exchanges may go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Where it is dialled.
    pub address: SocketAddr,
    /// Its share of the exchanges, relative to the others'.
    pub weight: NonZeroU32,
}

impl Chosen {
    /// An origin of weight 1.
    #[must_use]
    pub fn at(address: SocketAddr) -> Self {
        Self { address, weight: NonZeroU32::MIN }
    }
}

/// What a pick needs to know of one origin.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Leases out, and sockets being dialled for waiting exchanges.
    pub active: usize,
    /// See [`Chosen::weight`].
    pub weight: NonZeroU32,
    /// Whether it can serve at all right now (what that means is the caller's question: having an
    /// idle socket, or being allowed to dial).
    pub eligible: bool,
}

/// Picks one of `count` origins by the `load` that each reports; `None` if none is eligible.
pub fn pick(count: usize, load: impl Fn(usize) -> Load, rng: &mut impl Rng) -> Option<usize> {
    if count == 0 {
        return None;
    }
    let first = draw(count, &load, rng.random_range(0..count))?;
    let second = draw(count, &load, rng.random_range(0..count))?;
    Some(if load(second).is_less_than(&load(first)) { second } else { first })
}

impl Load {
    /// Compares what each would have with one more, by its weight.
    fn is_less_than(&self, other: &Self) -> bool {
        let with_one_more = |load: &Self| load.active as u128 + 1;
        with_one_more(self) * u128::from(other.weight.get())
            < with_one_more(other) * u128::from(self.weight.get())
    }
}

/// The first eligible origin at or after `start`, around the ring.
fn draw(count: usize, load: impl Fn(usize) -> Load, start: usize) -> Option<usize> {
    (start..count).chain(0..start).find(|&origin| load(origin).eligible)
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    fn load(active: usize, eligible: bool) -> Load {
        Load { active, weight: NonZeroU32::MIN, eligible }
    }

    #[test]
    fn only_eligible_origins_are_picked() {
        let mut rng = StdRng::seed_from_u64(1);
        let loads = [load(0, false), load(9, true), load(0, false)];
        for _ in 0..100 {
            assert_eq!(pick(3, |i| loads[i], &mut rng), Some(1));
        }
        assert_eq!(pick(3, |_| load(0, false), &mut rng), None);
        assert_eq!(pick(0, |_| load(0, true), &mut rng), None);
    }

    #[test]
    fn load_spreads_evenly() {
        let mut rng = StdRng::seed_from_u64(2);
        let mut active = [0usize; 10];
        for _ in 0..1000 {
            let origin = pick(10, |i| load(active[i], true), &mut rng).unwrap();
            active[origin] += 1;
        }
        let (least, most) = (active.iter().min().unwrap(), active.iter().max().unwrap());
        assert!(most - least <= 4, "two choices keep the spread tiny: {active:?}");
    }

    #[test]
    fn the_busier_of_two_is_avoided() {
        let mut rng = StdRng::seed_from_u64(3);
        let loads = [load(5, true), load(1, true)];
        let second = (0..1000).filter(|_| pick(2, |i| loads[i], &mut rng) == Some(1)).count();
        // Both draws hit the busy one in a quarter of all picks.
        assert!((700..800).contains(&second), "{second}");
    }
}
