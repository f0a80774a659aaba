//! Which of a service's members this gateway uses: `[service.subset]`.

use crate::origin::subset::Rules;

/// A subset of the members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subset {
    /// How it is chosen.
    pub rules: Rules,
    /// How many members it has.
    pub size: usize,
    /// While fewer of them are healthy, the next ones are used as well.
    pub min_healthy: usize,
}
