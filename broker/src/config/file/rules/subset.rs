//! Rules of `[service.subset]`.

use std::num::NonZeroUsize;

use super::super::raw;
use super::check::Checker;
use super::quoted;
use crate::config::subset::Subset;
use crate::membership::document::MEMBERS_MAX;
use crate::origin::subset::{Algorithm, Band, Rules};

/// What can be chosen.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Off,
    Ring,
    Kronecker,
}

/// The subset of a service; `None` if all members are used, or if the table is broken.
pub(super) fn subset(check: &mut Checker, raw: &raw::Subset) -> Option<Subset> {
    let kind = check.choice(
        "subset.algorithm",
        raw.algorithm.as_deref(),
        &[("kronecker", Kind::Kronecker), ("ring", Kind::Ring), ("off", Kind::Off)],
        Some(Kind::Kronecker),
    );
    if raw.size.is_none() && kind != Some(Kind::Off) {
        let rule = "is needed: how many origins each gateway uses (`broker sim size` helps)";
        check.broken("subset.size", "", rule);
    }
    let size = check.number("subset.size", raw.size, 1, 1..=MEMBERS_MAX);
    let min_healthy =
        check.number("subset.min_healthy", raw.min_healthy, size.div_ceil(2), 0..=size);
    let zone_max = check.number("subset.zone_max", raw.zone_max, size, 1..=size);
    let band = raw.band.as_deref().and_then(|text| match text.parse::<Band>() {
        Ok(band) => Some(band),
        Err(error) => {
            check.broken("subset.band", quoted(text), error);
            None
        }
    });
    if kind == Some(Kind::Ring) {
        let rule = "belongs to algorithm = \"kronecker\"; a ring has none";
        check.absent("subset.band", raw.band.as_deref().map(quoted), rule);
    }
    let algorithm = match kind? {
        Kind::Off => return None,
        Kind::Ring => Algorithm::Ring,
        Kind::Kronecker => Algorithm::Kronecker { band },
    };
    let zone_max = raw.zone_max.and(NonZeroUsize::new(zone_max));
    Some(Subset { rules: Rules { algorithm, zone_max }, size, min_healthy })
}
