//! What both ends know of the requests: which were asked for, how often each has run, and which
//! origin connections ended when a request might have been on its way.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::body::SEQ_MAX;
use super::spec::{Id, Method};

/// How long the end of an origin connection may go unnoticed on a crowded machine.
const NOTICED_WITHIN: Duration = Duration::from_secs(1);
/// How long ends are remembered: longer than any exchange lasts.
const REMEMBERED: Duration = Duration::from_mins(1);

/// One for each run.
#[derive(Debug)]
pub(super) struct Ledger {
    clients: Vec<Mutex<Vec<Record>>>,
    /// By service.
    ends: Vec<Mutex<VecDeque<Instant>>>,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    runs: u8,
    idempotent: bool,
}

/// How a request that has come to an origin stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Run {
    /// It runs for the nth time, as it may.
    Nth(u8),
    /// It has run before and must not run again.
    Forbidden,
    /// Nobody has asked for it.
    Unknown,
}

impl Ledger {
    pub(super) fn new(clients: usize, services: usize) -> Self {
        Self {
            clients: (0..clients).map(|_| Mutex::default()).collect(),
            ends: (0..services).map(|_| Mutex::default()).collect(),
        }
    }

    /// The id of a client's next request; `None` when it has no more ids.
    pub(super) fn ask(&self, client: u16) -> Option<Id> {
        let mut records = lock(self.clients.get(usize::from(client))?);
        let seq = u32::try_from(records.len()).ok().filter(|seq| *seq < SEQ_MAX)?;
        records.push(Record { runs: 0, idempotent: true });
        Some(Id { client, seq })
    }

    /// Says what the request is, before it is sent.
    pub(super) fn is_a(&self, id: Id, method: Method) {
        self.with(id, |record| record.idempotent = method.is_idempotent());
    }

    /// A request has come to an origin.
    pub(super) fn run(&self, id: Id) -> Run {
        self.with(id, |record| {
            record.runs = record.runs.saturating_add(1);
            if record.runs > 1 && !record.idempotent {
                Run::Forbidden
            } else {
                Run::Nth(record.runs)
            }
        })
        .unwrap_or(Run::Unknown)
    }

    /// How often it has run.
    pub(super) fn runs(&self, id: Id) -> u8 {
        self.with(id, |record| record.runs).unwrap_or(0)
    }

    fn with<T>(&self, id: Id, f: impl FnOnce(&mut Record) -> T) -> Option<T> {
        let mut records = lock(self.clients.get(usize::from(id.client))?);
        records.get_mut(usize::try_from(id.seq).ok()?).map(f)
    }

    /// An origin of `service` ends a connection on which nothing was under way, as far as it knows.
    pub(super) fn end(&self, service: usize, now: Instant) {
        let mut ends = lock(&self.ends[service]);
        while ends.front().is_some_and(|&at| now.saturating_duration_since(at) > REMEMBERED) {
            ends.pop_front();
        }
        ends.push_back(now);
    }

    /// How many such connections an exchange that began then can have met.
    pub(super) fn ends_since(&self, service: usize, began: Instant) -> usize {
        let ends = lock(&self.ends[service]);
        ends.iter().rev().take_while(|&&at| at + NOTICED_WITHIN >= began).count()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use broker::clock;

    use super::*;

    #[test]
    fn a_post_runs_once_and_a_get_as_often_as_need_be() {
        let ledger = Ledger::new(1, 1);
        let (get, post) = (ledger.ask(0).unwrap(), ledger.ask(0).unwrap());
        ledger.is_a(post, Method::Post);
        let runs = |id| [ledger.run(id), ledger.run(id)];
        assert_eq!(runs(get), [Run::Nth(1), Run::Nth(2)]);
        assert_eq!(runs(post), [Run::Nth(1), Run::Forbidden]);
        assert_eq!(ledger.run(Id { client: 0, seq: 2 }), Run::Unknown);
        assert_eq!(ledger.run(Id { client: 1, seq: 0 }), Run::Unknown);
        assert_eq!(ledger.ask(1), None);
    }

    #[test]
    fn ends_before_an_exchange_are_no_excuse() {
        let ledger = Ledger::new(0, 2);
        let now = clock::now();
        ledger.end(0, now);
        ledger.end(0, now + NOTICED_WITHIN * 3);
        assert_eq!(ledger.ends_since(0, now), 2);
        assert_eq!(ledger.ends_since(0, now + NOTICED_WITHIN * 2), 1);
        assert_eq!(ledger.ends_since(1, now), 0);
    }
}
