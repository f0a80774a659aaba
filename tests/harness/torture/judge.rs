//! Keeps count, and finds words for what is wrong.

use std::fmt::Write as _;
use std::sync::Mutex;

use super::body::{Direction, Key};
use super::ledger::lock;
use super::mode::Mode;
use super::report::{Failure, Kind, Report};
use super::spec::{Id, NOT_FOR_YOU, Spec};
use super::wire::Difference;

/// Most failures of one kind that are kept with all particulars.
const FAILURES_MAX: usize = 4;
/// Most bytes of one that are shown.
const SHOWN: usize = 48;

/// How an exchange ended.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    /// Every byte came, and was right.
    Verified,
    /// The client left.
    Abandoned,
    /// An error, of which the origin is the cause.
    Allowed(&'static str),
    /// The connection had to end before it.
    Cancelled,
    /// This must not happen.
    Failed(Wrong),
}

/// What is wrong with an exchange.
#[derive(Clone, Debug)]
pub(super) struct Wrong {
    pub(super) kind: Kind,
    pub(super) what: String,
    pub(super) offset: Option<u64>,
    pub(super) expected: Vec<u8>,
    pub(super) got: Vec<u8>,
}

impl Wrong {
    pub(super) fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), offset: None, expected: Vec::new(), got: Vec::new() }
    }

    /// The difference between what should have come and what did. `got` begins with the first
    /// byte that differs; `before` are the bytes of the same message before it.
    pub(super) fn difference(
        key: Key,
        me: Id,
        difference: Difference,
        before: &[u8],
        got: &[u8],
    ) -> Self {
        let (kind, what) = explain(key, me, difference.position, before, got);
        Self {
            kind,
            what,
            offset: Some(difference.position),
            expected: difference.expected,
            got: got[..got.len().min(SHOWN)].to_vec(),
        }
    }

    /// Bytes where none should have come.
    pub(super) fn surplus(key: Key, me: Id, what: &str, got: &[u8]) -> Self {
        let (kind, whose) = explain(key, me, 0, b"", got);
        Self {
            kind,
            what: format!("{what}: {whose}"),
            offset: None,
            expected: Vec::new(),
            got: got[..got.len().min(SHOWN)].to_vec(),
        }
    }
}

/// The account of one run.
#[derive(Debug, Default)]
pub(super) struct Judge(Mutex<Report>);

impl Judge {
    /// An exchange has ended.
    pub(super) fn exchange(&self, mode: Mode, spec: &Spec, outcome: Outcome) {
        let report = &mut *lock(&self.0);
        if matches!(outcome, Outcome::Cancelled) {
            report.cancelled += 1;
            return;
        }
        report.exchanges += 1;
        let row = match report.modes.get_mut(mode.name()) {
            Some(row) => row,
            None => report.modes.entry(mode.name().to_owned()).or_default(),
        };
        row.exchanges += 1;
        row.errors += u64::from(matches!(outcome, Outcome::Allowed(_) | Outcome::Failed(_)));
        match outcome {
            Outcome::Verified | Outcome::Cancelled => {}
            Outcome::Abandoned => report.abandoned += 1,
            Outcome::Allowed(cause) => {
                report.client_errors_allowed += 1;
                *report.allowed.entry(cause.to_owned()).or_default() += 1;
            }
            Outcome::Failed(wrong) => fail(report, "client", mode.name(), spec, wrong),
        }
    }

    /// Something is wrong that is not the end of an exchange.
    pub(super) fn fail(&self, seen_by: &str, mode: &str, spec: &Spec, wrong: Wrong) {
        fail(&mut lock(&self.0), seen_by, mode, spec, wrong);
    }

    /// So many bytes were as they had to be.
    pub(super) fn verified(&self, bytes: u64) {
        lock(&self.0).verified_bytes += bytes;
    }

    /// Counts something in passing.
    pub(super) fn count(&self, what: impl FnOnce(&mut Report)) {
        what(&mut lock(&self.0));
    }

    /// Exchanges so far.
    pub(super) fn exchanges(&self) -> u64 {
        lock(&self.0).exchanges
    }

    pub(super) fn into_report(self) -> Report {
        self.0.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn fail(report: &mut Report, seen_by: &str, mode: &str, spec: &Spec, wrong: Wrong) {
    *match wrong.kind {
        Kind::Mismatch => &mut report.mismatches,
        Kind::Duplicated => &mut report.duplicated,
        Kind::Lost => &mut report.lost,
        Kind::Stuck => &mut report.stuck,
        Kind::EofMissing => &mut report.eof_missing,
    } += 1;
    let alike = |other: &&Failure| other.kind == wrong.kind && other.seen_by == seen_by;
    if report.failures.iter().filter(alike).count() < FAILURES_MAX {
        report.failures.push(Failure {
            kind: wrong.kind,
            seen_by: seen_by.to_owned(),
            client: spec.id.client,
            seq: spec.id.seq,
            mode: mode.to_owned(),
            what: wrong.what,
            request: spec.request_line(),
            offset: wrong.offset,
            expected: hex(&wrong.expected),
            got: hex(&wrong.got),
        });
    }
}

/// Whose bytes these are that `me` got.
fn explain(key: Key, me: Id, position: u64, before: &[u8], got: &[u8]) -> (Kind, String) {
    let mismatch = |what: String| (Kind::Mismatch, what);
    if holds(got, NOT_FOR_YOU) {
        return mismatch("bytes that an origin sent after somebody's response".into());
    }
    if let Some(place) = key.place(got) {
        let is_response = place.direction == Direction::Response;
        let of = if is_response { "response" } else { "request" };
        let offset = place.offset;
        return match place.id {
            id if id.client != me.client => {
                mismatch(format!("another client's {of} body, {id}, from {offset} on"))
            }
            id if id.seq < me.seq && is_response => {
                (Kind::Duplicated, format!("the response body of an earlier request, {id}, again"))
            }
            id if id.seq != me.seq => {
                mismatch(format!("the {of} body of another request of this client, {id}"))
            }
            _ => mismatch(format!(
                "this exchange's own {of} body, but from its byte {offset} on: bytes were lost, \
                 doubled or put in another order"
            )),
        };
    }
    // The head says whose it is; its beginning may be the same for everybody.
    let mut head = before.to_vec();
    head.extend_from_slice(got);
    match named(&head) {
        Some(id) if id.client != me.client => mismatch(format!("another client's response, {id}")),
        Some(id) if id.seq < me.seq => {
            (Kind::Duplicated, format!("the response to an earlier request, {id}, again"))
        }
        Some(id) if id.seq > me.seq => {
            mismatch(format!("the response to a later request of this client, {id}"))
        }
        _ => mismatch(match asked(got) {
            Some(id) => format!("the head of request {id}"),
            None => format!("unknown bytes at {position}"),
        }),
    }
}

/// The id in the target of a request head.
fn asked(head: &[u8]) -> Option<Id> {
    const TARGET: &[u8] = b" /t/";
    let at = head.windows(TARGET.len()).position(|window| window == TARGET)? + TARGET.len();
    let mut parts = head[at..].split(|&byte| byte == b'/');
    let mut number = || std::str::from_utf8(parts.next()?).ok();
    Some(Id { client: number()?.parse().ok()?, seq: number()?.parse().ok()? })
}

/// The id that a response head names.
fn named(head: &[u8]) -> Option<Id> {
    const FIELD: &[u8] = b"X-Torture: ";
    let at = head.windows(FIELD.len()).rposition(|window| window == FIELD)? + FIELD.len();
    let line = head[at..].split(|&byte| byte == b'\r').next()?;
    let (client, seq) = std::str::from_utf8(line).ok()?.split_once('-')?;
    Some(Id { client: client.parse().ok()?, seq: seq.parse().ok()? })
}

fn holds(bytes: &[u8], needle: &[u8]) -> bool {
    bytes.windows(needle.len()).any(|window| window == needle)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut out, byte| {
        write!(out, "{byte:02x}").ok();
        out
    })
}
