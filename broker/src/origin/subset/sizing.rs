//! How large a subset has to be, and what to expect of one.

use serde::Serialize;

use super::{Fleet, Member, Roster, Rules};

/// What a subset has to survive.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    /// Origins that there are.
    pub origins: usize,
    /// How many of them are dead.
    pub lost: usize,
    /// Share of its subset that a gateway needs alive, in 0..=1.
    pub need: f64,
}

/// The smallest subsets that are large enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Size {
    /// The smallest one.
    pub smallest: usize,
    /// The smallest one from which the next [`LOOK_AHEAD`] are large enough, too: what is needed is
    /// rounded up to whole origins, so one more can be worse.
    pub steady: usize,
}

/// How many sizes beyond a good one are looked at.
pub const LOOK_AHEAD: usize = 30;

impl Loss {
    /// How many origins a gateway with a subset of `size` needs alive.
    #[must_use]
    pub fn needed(self, size: usize) -> usize {
        // 0.7 * 10 is a little more than 7, and is 7.
        let needed = (size as f64 * self.need - 1e-9).ceil();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "clamped to 0..=size"
        )]
        let needed = needed.clamp(0.0, size as f64) as usize;
        needed
    }

    /// How many of a subset of `size` may die.
    #[must_use]
    pub fn spare(self, size: usize) -> usize {
        size - self.needed(size)
    }

    /// The probability that one gateway has too few left, if the dead are a random draw: the tail
    /// of a hypergeometric distribution.
    #[must_use]
    pub fn short(self, size: usize) -> f64 {
        let all = self.origins;
        let (f, k) = (self.lost.min(all), size.min(all));
        let (least, most) = ((f + k).saturating_sub(all), f.min(k));
        let spare = self.spare(k);
        if spare >= most {
            return 0.0;
        }
        if spare < least {
            return 1.0;
        }
        // From where the tail begins away from the bulk, each term by the one before, until they no
        // longer count. Of the other tail, if the bulk is in this one.
        let likely = (f + 1) * (k + 1) / (all + 2);
        let term =
            |x: usize| (ln_choose(f, x) + ln_choose(all - f, k - x) - ln_choose(all, k)).exp();
        // How many times as probable x + 1 dead are than x.
        let ratio = |x: usize| {
            ((f - x) as f64 * (k - x) as f64) / ((x + 1) as f64 * (all + x + 1 - f - k) as f64)
        };
        let sum = |first: f64, factors: &mut dyn Iterator<Item = f64>| {
            let (mut sum, mut term) = (first, first);
            for factor in factors {
                term *= factor;
                sum += term;
                if term < sum * f64::EPSILON {
                    break;
                }
            }
            sum
        };
        if spare >= likely {
            sum(term(spare + 1), &mut (spare + 1..most).map(ratio)).min(1.0)
        } else {
            1.0 - sum(term(spare), &mut (least..spare).rev().map(|x| 1.0 / ratio(x))).min(1.0)
        }
    }

    /// The sizes for which the expected number of gateways that are short, of `gateways`, is at most
    /// `risk`. None if even all origins are not enough.
    #[must_use]
    pub fn size(self, gateways: u32, risk: f64) -> Option<Size> {
        let enough = |&size: &usize| f64::from(gateways) * self.short(size) <= risk;
        let smallest = (1..=self.origins).find(enough)?;
        // Where the run begins that is long enough, or that ends with all origins.
        let mut steady = smallest;
        for size in smallest..=self.origins {
            if !enough(&size) {
                steady = size + 1;
            } else if size - steady >= LOOK_AHEAD {
                break;
            }
        }
        Some(Size { smallest, steady: steady.min(self.origins) })
    }

    /// The smallest subset that survives the loss of any `dead` of its own origins, whoever chooses
    /// them: `dead / (1 - need)`, rounded up. None if all are needed.
    ///
    /// With a quota of c origins per rack, `dead` is c for each rack that is lost.
    #[must_use]
    pub fn size_for_any(self, dead: usize) -> Option<usize> {
        if self.need >= 1.0 {
            return (dead == 0).then_some(1);
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "where it saturates, the answer is refused below"
        )]
        let near = (dead as f64 / (1.0 - self.need)) as usize;
        (near.max(2) - 1..near.saturating_add(3)).find(|&size| self.spare(size) >= dead)
    }
}

/// The logarithm of the number of ways to choose `k` of `n`.
fn ln_choose(n: usize, k: usize) -> f64 {
    ln_factorial(n) - ln_factorial(k) - ln_factorial(n - k)
}

/// Stirling's series; for small numbers, which it is no good for, the product.
fn ln_factorial(n: usize) -> f64 {
    if n < 32 {
        return (2..=n).map(|i| i as f64).product::<f64>().ln();
    }
    let x = n as f64;
    let series = (1.0 / 12.0 - (1.0 / 360.0 - 1.0 / 1260.0 / (x * x)) / (x * x)) / x;
    (x + 0.5) * x.ln() - x + 0.5 * std::f64::consts::TAU.ln() + series
}

/// How many gateways the origins of a fleet have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Coverage {
    /// Of the origin with the fewest.
    pub min: usize,
    /// Of the median one.
    pub p50: usize,
    /// Of the one with the most.
    pub max: usize,
    /// The mean.
    pub ideal: f64,
    /// Standard deviation.
    pub sd: f64,
}

impl Coverage {
    /// Sums up the number of gateways of each origin.
    #[must_use]
    pub fn of(counts: &[usize]) -> Self {
        let mut sorted = counts.to_vec();
        sorted.sort_unstable();
        let n = sorted.len().max(1) as f64;
        let ideal = sorted.iter().sum::<usize>() as f64 / n;
        let squares: f64 = sorted.iter().map(|&count| (count as f64 - ideal).powi(2)).sum();
        Self {
            min: sorted.first().copied().unwrap_or(0),
            p50: sorted.get(sorted.len() / 2).copied().unwrap_or(0),
            max: sorted.last().copied().unwrap_or(0),
            ideal,
            sd: (squares / n).sqrt(),
        }
    }
}

/// The coverage that a fleet would have, by working out every gateway's subset.
#[must_use]
pub fn coverage(rules: Rules, fleet: &Fleet, members: &[Member<'_>]) -> Coverage {
    let roster = Roster::new(members);
    let mut counts = vec![0; members.len()];
    for position in roster.fleet(rules, fleet).into_iter().flatten() {
        counts[position] += 1;
    }
    let counts: Vec<usize> = roster.origins.iter().map(|origin| counts[origin.position]).collect();
    Coverage::of(&counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_the_table() {
        let size = |lost, need| Loss { origins: 1000, lost, need }.size(500, 1e-3).unwrap();
        assert_eq!(size(50, 0.8), Size { smallest: 65, steady: 65 });
        assert_eq!(size(100, 0.5), Size { smallest: 18, steady: 20 });
        assert_eq!(size(200, 0.5), Size { smallest: 42, steady: 44 });
    }

    #[test]
    fn small_cases_by_hand() {
        let loss = Loss { origins: 4, lost: 2, need: 0.5 };
        // Both of two are dead in 1 of 6 draws; one of one in 2 of 4.
        assert!((loss.short(2) - 1.0 / 6.0).abs() < 1e-12);
        assert!((loss.short(1) - 0.5).abs() < 1e-12);
        assert!(loss.short(4).abs() < 1e-12);
        assert_eq!(Loss { origins: 4, lost: 3, need: 0.5 }.size(1, 0.1), None);
        // More than there are is all of them.
        assert!((Loss { origins: 4, lost: 9, need: 0.5 }.short(9) - 1.0).abs() < 1e-12);
        assert_eq!(Loss { origins: 4, lost: 0, need: 1.0 }.size(9, 0.0).unwrap().smallest, 1);
    }

    #[test]
    fn tails_are_sums_of_all_their_terms() {
        let ways = |n: usize, k: usize| ln_choose(n, k).exp();
        for (origins, lost, need) in [(30, 7, 0.8), (60, 30, 0.5), (25, 24, 0.1), (40, 3, 0.99)] {
            let loss = Loss { origins, lost, need };
            for size in 1..=origins {
                let terms = (loss.spare(size) + 1..=size.min(lost))
                    .filter(|dead| size - dead <= origins - lost)
                    .map(|dead| ways(lost, dead) * ways(origins - lost, size - dead));
                let expected = terms.sum::<f64>() / ways(origins, size);
                assert!((loss.short(size) - expected).abs() < 1e-9, "{loss:?} {size}");
            }
        }
    }

    #[test]
    fn what_is_needed_is_rounded_up_but_not_for_a_rounding_error() {
        let needed = |need, size| Loss { origins: 100, lost: 0, need }.needed(size);
        assert_eq!([needed(0.7, 10), needed(0.71, 10), needed(0.0, 5)], [7, 8, 0]);
        assert_eq!([needed(1.0, 5), needed(0.1, 30), needed(1.0 / 3.0, 3)], [5, 3, 1]);
    }

    #[test]
    fn any_loss() {
        let size = |need, dead| Loss { origins: 1000, lost: 0, need }.size_for_any(dead);
        assert_eq!(size(0.8, 50), Some(250));
        assert_eq!(size(0.5, 2), Some(4));
        assert_eq!(size(0.7, 2), Some(7));
        assert_eq!(size(0.0, 3), Some(3));
        assert_eq!(size(1.0, 1), None);
        assert_eq!(size(0.9, 0), Some(1));
    }

    #[test]
    fn factorials() {
        let mut sum = 0.0;
        for n in 1..2000usize {
            sum += (n as f64).ln();
            assert!((ln_factorial(n) - sum).abs() < 1e-9, "{n}");
        }
    }

    #[test]
    fn coverage_counts_each_origin_once() {
        let members = ["a", "b", "c", "a"].map(Member::new);
        let all = coverage(Rules::default(), &Fleet::uniform(5, 2), &members);
        assert_eq!((all.min, all.p50, all.max), (5, 5, 5));
        let none = coverage(Rules::default(), &Fleet::uniform(5, 2), &[]);
        assert_eq!((none.min, none.max), (0, 0));
    }
}
