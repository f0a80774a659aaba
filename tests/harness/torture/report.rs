//! What came of a run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The result of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// The seed that all of it follows from.
    pub seed: u64,
    /// From the first connection to the last.
    pub seconds: f64,
    /// Exchanges that came to an end of whatever kind.
    pub exchanges: u64,
    /// Connections of clients.
    pub connections: u64,
    /// Bytes that were compared with what they had to be, and were: whole responses at the clients,
    /// request bodies at the origins.
    pub verified_bytes: u64,
    /// A byte that is not its reader's: in a response, after one, or in a request.
    pub mismatches: u64,
    /// A request ran twice that must not, or a response came twice.
    pub duplicated: u64,
    /// No response, or half of one, and the origin was not to blame.
    pub lost: u64,
    /// Nothing moved for [`Plan::patience`](super::Plan::patience).
    pub stuck: u64,
    /// A connection that should have ended after a complete response was reset instead.
    pub eof_missing: u64,
    /// Connections on which bytes came where the end should have been; also in `mismatches`.
    pub bytes_after_eof: u64,
    /// Errors that an origin has caused, by what it did.
    pub client_errors_allowed: u64,
    /// The same by cause.
    pub allowed: BTreeMap<String, u64>,
    /// Exchanges that their clients left.
    pub abandoned: u64,
    /// Requests behind one after which the connection had to end; they do not count as exchanges.
    pub cancelled: u64,
    /// Idempotent requests that ran more than once.
    pub repeated: u64,
    /// By mode.
    pub modes: BTreeMap<String, Row>,
    /// The first few failures of each kind.
    pub failures: Vec<Failure>,
}

/// The exchanges of one mode.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Row {
    /// All.
    pub exchanges: u64,
    /// Those that did not bring a complete response to a client that waited for it.
    pub errors: u64,
}

/// What must not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Counts as [`Report::mismatches`].
    Mismatch,
    /// Counts as [`Report::duplicated`].
    Duplicated,
    /// Counts as [`Report::lost`].
    Lost,
    /// Counts as [`Report::stuck`].
    Stuck,
    /// Counts as [`Report::eof_missing`].
    EofMissing,
}

/// One failure, with what is needed to understand it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// What kind.
    pub kind: Kind,
    /// Who has seen it: `client` or `origin`.
    pub seen_by: String,
    /// The client's number.
    pub client: u16,
    /// The request's number within the client.
    pub seq: u32,
    /// The client's mode.
    pub mode: String,
    /// What happened.
    pub what: String,
    /// The request's first line: it says all about the exchange.
    pub request: String,
    /// Where in the message the first differing byte is.
    pub offset: Option<u64>,
    /// What should have been there, in hexadecimal.
    pub expected: String,
    /// What was there instead.
    pub got: String,
}

impl Report {
    /// Whether nothing happened that must not.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        [self.mismatches, self.duplicated, self.lost, self.stuck] == [0; 4]
    }

    /// Exchanges per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.exchanges as f64 / self.seconds.max(1e-9)
    }
}
