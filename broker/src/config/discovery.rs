//! Where the members of a service come from, if its configuration does not name them.

use std::path::PathBuf;
use std::time::Duration;

/// A source of members, and how its changes are taken.
#[derive(Clone, Debug)]
pub struct Discovery {
    /// The source.
    pub source: Source,
    /// A change is taken up when nothing has changed any more for this long.
    pub debounce: Duration,
    /// A change is taken up after this long at the latest.
    pub debounce_max: Duration,
    /// What an empty list means.
    pub on_empty: OnEmpty,
}

/// What an empty list means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnEmpty {
    /// More likely a mistake than the truth: the members before it stay.
    #[default]
    Keep,
    /// There are no origins; clients are refused.
    Apply,
}

/// Where members come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A file that is replaced when they change.
    File(File),
}

impl Source {
    /// Its name in the configuration.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
        }
    }
}

/// A file with the members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its path. The content says by itself which form it has (see
    /// [`crate::membership::document`]).
    pub path: PathBuf,
}
