//! What is done when few origins are left: whether it is still believed that the others are bad.

use crate::config::outlier::Panic;

/// The origins of a service by their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hosts {
    /// Neither of the below.
    pub healthy: usize,
    /// Say themselves that they are not at their best.
    pub degraded: usize,
    /// Ejected, or found unhealthy.
    pub ejected: usize,
}

/// Who gets exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eligible {
    /// Healthy ones, and degraded ones beside them.
    Available {
        /// Percent of the exchanges for the healthy ones; the others go to degraded ones.
        healthy: u8,
    },
    /// Panic: all of them, as if nothing were known. That all are bad is less likely than that what
    /// they were judged by is.
    All,
    /// Panic with `fail_on_panic`, or nobody is left: clients are refused.
    Nobody,
}

/// So many healthy origins of 100 can do the work of all, in percent of them (Envoy's
/// overprovisioning factor).
const OVERPROVISIONED: usize = 140;

/// Decides who gets exchanges.
#[must_use]
pub fn decide(hosts: Hosts, config: Panic) -> Eligible {
    let Hosts { healthy, degraded, ejected } = hosts;
    let (available, all) = (healthy + degraded, healthy + degraded + ejected);
    if available * 100 < usize::from(config.threshold) * all {
        return if config.fail_on_panic { Eligible::Nobody } else { Eligible::All };
    }
    if available == 0 {
        return Eligible::Nobody;
    }
    // Each group can take what it has hosts for; what is left over is shared in proportion.
    let capacity = |hosts: usize| (hosts * OVERPROVISIONED / all).min(100);
    let of_healthy = capacity(healthy);
    let of_degraded = capacity(degraded).min(100 - of_healthy);
    // Of few among many, nothing would be left by the rounding.
    let share = match of_healthy + of_degraded {
        0 => healthy * 100 / available,
        total => of_healthy * 100 / total,
    };
    Eligible::Available { healthy: u8::try_from(share).unwrap_or(100) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(healthy: usize, degraded: usize, ejected: usize, threshold: u8) -> Eligible {
        let config = Panic { threshold, fail_on_panic: false };
        let hosts = Hosts { healthy, degraded, ejected };
        let decided = decide(hosts, config);
        let failing = decide(hosts, Panic { fail_on_panic: true, ..config });
        let expected = if decided == Eligible::All { Eligible::Nobody } else { decided };
        assert_eq!(failing, expected);
        decided
    }

    #[test]
    fn panic_below_the_threshold() {
        let healthy = |healthy| Eligible::Available { healthy };
        assert_eq!(check(5, 0, 5, 50), healthy(100), "half is enough");
        assert_eq!(check(4, 0, 5, 50), Eligible::All);
        assert_eq!(check(4, 1, 5, 50), healthy(80), "degraded ones count");
        assert_eq!(check(0, 0, 3, 50), Eligible::All);
        assert_eq!(check(0, 0, 3, 0), Eligible::Nobody, "what is ejected stays so");
        assert_eq!(check(1, 0, 99, 0), healthy(100));
        assert_eq!(check(9, 0, 1, 100), Eligible::All);
        assert_eq!(check(0, 0, 0, 50), Eligible::Nobody);
    }

    #[test]
    fn degraded_ones_take_what_healthy_ones_cannot() {
        let healthy = |healthy| Eligible::Available { healthy };
        assert_eq!(check(10, 0, 0, 50), healthy(100));
        assert_eq!(check(8, 2, 0, 50), healthy(100), "112 %: they can do all");
        assert_eq!(check(5, 5, 0, 50), healthy(70));
        assert_eq!(check(1, 9, 0, 50), healthy(14));
        assert_eq!(check(0, 10, 0, 50), healthy(0));
    }

    proptest! {
        #[test]
        fn nobody_gets_exchanges_that_is_not_there(
            healthy in 0usize..1000, degraded in 0usize..1000, ejected in 0usize..1000,
            threshold in 0u8..=100,
        ) {
            match check(healthy, degraded, ejected, threshold) {
                Eligible::Available { healthy: share } => {
                    prop_assert!(share <= 100);
                    prop_assert!(healthy > 0 || share == 0);
                    prop_assert!(degraded > 0 || share == 100);
                }
                Eligible::All => prop_assert!(ejected > 0),
                Eligible::Nobody => prop_assert_eq!(healthy + degraded, 0),
            }
        }
    }
}
