//! How many origins a gateway needs.

use serde::Serialize;

use crate::origin::subset::sizing::{Loss, Size};

/// How large a subset must be, with the reasons.
#[derive(Clone, Debug, Serialize)]
pub struct Sizes {
    /// Origins that there are.
    pub origins: usize,
    /// How many die.
    pub lost: usize,
    /// Share that a gateway needs alive.
    pub need: f64,
    /// Gateways of the fleet.
    pub gateways: u32,
    /// How many may be short.
    pub eps: f64,
    /// The sizes that are large enough if those that die are a random draw.
    pub random: Option<Size>,
    /// Sizes around these: how many must be alive, and how probable it is that too few are.
    pub around: Vec<Around>,
    /// The size that is large enough whichever origins die.
    pub any: Option<usize>,
    /// The size that is large enough if racks die of which each subset has only so many origins.
    pub racks: Option<Racks>,
}

/// One size.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Around {
    /// Origins of a gateway.
    pub size: usize,
    /// How many of them must be alive.
    pub needed: usize,
    /// The probability that one gateway has fewer.
    pub short: f64,
    /// How many of all gateways have fewer, on average.
    pub short_gateways: f64,
}

/// The loss of racks.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Racks {
    /// Most origins of one rack in a subset.
    pub rack_max: usize,
    /// Racks that die.
    pub lost: usize,
    /// The size that is large enough; none if it is larger than all origins.
    pub size: Option<usize>,
}

impl Sizes {
    /// The answers for a loss, with `eps` of `gateways` short on average. `racks`: most origins of
    /// one rack in a subset, and how many racks die.
    #[must_use]
    pub fn of(loss: Loss, gateways: u32, eps: f64, racks: Option<(usize, usize)>) -> Self {
        let Loss { origins, lost, need } = loss;
        let around = |size: usize| {
            let short = loss.short(size);
            let short_gateways = f64::from(gateways) * short;
            Around { size, needed: loss.needed(size), short, short_gateways }
        };
        let random = loss.size(gateways, eps);
        let shown = random.map_or(0..0, |Size { smallest, steady }| {
            smallest.saturating_sub(2).max(1)..(steady + 2).min(origins) + 1
        });
        let possible = |dead| loss.size_for_any(dead).filter(|&size| size <= origins);
        Self {
            origins,
            lost,
            need,
            gateways,
            eps,
            random,
            around: shown.map(around).collect(),
            any: possible(lost),
            racks: racks.map(|(rack_max, lost)| Racks {
                rack_max,
                lost,
                size: possible(rack_max.saturating_mul(lost)),
            }),
        }
    }
}
