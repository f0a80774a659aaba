//! When which origin is checked, and what is told of it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use tokio::sync::watch;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};

use super::{Checks, Machine, Outcome};
use crate::clock;
use crate::config::health::HealthCheck;

/// Most checks of a service under way at once. A thousand origins of which none answers need 167
/// to keep the default interval with the default time limit.
pub(super) const AT_ONCE_MAX: usize = 256;

/// Results that change a state wait this long for others, so that a thousand at once are told
/// together.
const TELL_STATES: Duration = Duration::from_millis(10);

/// Results that change nothing but counts.
const TELL_COUNTS: Duration = Duration::from_secs(1);

/// How a check ended, and what it leaves for the next one of its origin.
pub(super) type Ended<K> = (Outcome, Option<K>);

/// Makes checks.
pub(super) trait Probe: Send + 'static {
    /// What a check leaves for the next one of its origin.
    type Kept: Send + 'static;

    /// Checks an origin. Ends by itself, within the time limit.
    fn check(
        &self,
        origin: SocketAddr,
        kept: Option<Self::Kept>,
    ) -> impl Future<Output = Ended<Self::Kept>> + Send + 'static;
}

/// The origins of one service, and when each is checked next.
pub(super) struct Schedule<P: Probe> {
    settings: HealthCheck,
    probe: P,
    rng: StdRng,
    origins: BTreeMap<SocketAddr, Origin<P::Kept>>,
    /// Origins that are not being checked, by when they are to be.
    due: BTreeSet<(Instant, SocketAddr)>,
    checks: JoinSet<Ended<P::Kept>>,
    /// Which check is whose. Those of origins that are gone are no longer in here.
    running: HashMap<Id, SocketAddr>,
    results: watch::Sender<Arc<Checks>>,
    /// When what has changed is told.
    tell: Option<Instant>,
}

struct Origin<K> {
    machine: Machine,
    next: Next,
    kept: Option<K>,
}

/// What comes next for an origin.
enum Next {
    Due(Instant),
    Result(AbortHandle),
}

impl<P: Probe> Schedule<P> {
    /// Checks in a task of its own, until nobody reads the results.
    pub(super) fn start(
        settings: HealthCheck,
        mut list: watch::Receiver<Arc<[SocketAddr]>>,
        probe: P,
        rng: StdRng,
    ) -> watch::Receiver<Arc<Checks>> {
        let mut schedule = Self {
            settings,
            probe,
            rng,
            origins: BTreeMap::new(),
            due: BTreeSet::new(),
            checks: JoinSet::new(),
            running: HashMap::new(),
            results: watch::Sender::new(Arc::default()),
            tell: None,
        };
        schedule.follow(&list.borrow_and_update().clone());
        schedule.tell();
        let reader = schedule.results.subscribe();
        tokio::spawn(schedule.run(list));
        reader
    }

    async fn run(mut self, mut list: watch::Receiver<Arc<[SocketAddr]>>) {
        // Without its sender, the list is what it is.
        let mut may_change = true;
        loop {
            self.start_due();
            let wake = self.wake();
            tokio::select! {
                () = self.results.closed() => return,
                changed = list.changed(), if may_change => match changed {
                    Ok(()) => {
                        let origins = list.borrow_and_update().clone();
                        if self.follow(&origins) {
                            self.tell();
                        }
                    }
                    Err(_) => may_change = false,
                },
                Some(ended) = self.checks.join_next_with_id(), if !self.checks.is_empty() => {
                    self.ended(ended);
                    while let Some(ended) = self.checks.try_join_next_with_id() {
                        self.ended(ended);
                    }
                }
                () = until(wake) => {
                    if self.tell.is_some_and(|at| at <= clock::now()) {
                        self.tell();
                    }
                }
            }
        }
    }

    /// When there is something to do that nobody else says.
    fn wake(&self) -> Option<Instant> {
        let next = self.due.first().filter(|_| self.running.len() < AT_ONCE_MAX);
        let next = next.map(|(at, _)| *at);
        next.into_iter().chain(self.tell).min()
    }

    /// From now on, the origins are these. Says whether that changes anything.
    fn follow(&mut self, list: &[SocketAddr]) -> bool {
        let now = clock::now();
        let listed: BTreeSet<_> = list.iter().collect();
        let mut changes = false;
        for (address, gone) in self.origins.extract_if(.., |address, _| !listed.contains(address)) {
            changes = true;
            match gone.next {
                Next::Due(at) => drop(self.due.remove(&(at, address))),
                Next::Result(check) => {
                    self.running.remove(&check.id());
                    check.abort();
                }
            }
        }
        for &address in list {
            self.origins.entry(address).or_insert_with(|| {
                changes = true;
                self.due.insert((now, address));
                let machine = Machine::new(&self.settings, now);
                Origin { machine, next: Next::Due(now), kept: None }
            });
        }
        changes
    }

    fn start_due(&mut self) {
        let now = clock::now();
        while self.running.len() < AT_ONCE_MAX
            && let Some(&(at, address)) = self.due.first()
            && at <= now
        {
            self.due.pop_first();
            let Some(origin) = self.origins.get_mut(&address) else { continue };
            let check = self.checks.spawn(self.probe.check(address, origin.kept.take()));
            self.running.insert(check.id(), address);
            origin.next = Next::Result(check);
        }
    }

    fn ended(&mut self, ended: Result<(Id, Ended<P::Kept>), JoinError>) {
        let (id, (outcome, kept)) = match ended {
            Ok(ended) => ended,
            Err(error) => (error.id(), (Outcome::NotMade(error.to_string()), None)),
        };
        let Some(address) = self.running.remove(&id) else { return };
        let Some(origin) = self.origins.get_mut(&address) else { return };
        let now = clock::now();
        let transition = origin.machine.on_result(&outcome, now);
        if let Some(transition) = transition {
            tracing::info!(
                origin = %address,
                from = transition.from.name(),
                to = transition.to.name(),
                reason = %outcome,
                "the health of an origin has changed"
            );
        }
        let at = origin.machine.next_check(now, &mut self.rng);
        origin.kept = kept;
        origin.next = Next::Due(at);
        self.due.insert((at, address));
        let tell = now + if transition.is_some() { TELL_STATES } else { TELL_COUNTS };
        self.tell = Some(self.tell.map_or(tell, |at| at.min(tell)));
    }

    fn tell(&mut self) {
        self.tell = None;
        let all = self.origins.iter().map(|(&a, origin)| (a, origin.machine.checked().clone()));
        self.results.send_replace(Arc::new(all.collect()));
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => future::pending().await,
    }
}

#[cfg(test)]
mod tests;
