//! Follows who the origins of each service are, and tells the workers.
//!
//! One task per service on the control thread: what the source says, gathered; which of them this
//! gateway uses; and that list into a channel that every worker reads.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::config::discovery::Discovery;
use crate::config::{Config, Service};
use crate::datapath::Datapath;
use crate::membership::gather::Gather;
use crate::membership::{self, Feed, Latest, Member, Membership};
use crate::origin::Chosen;
use crate::origin::choice::{Choice, choose, level};
use crate::stats::{MembershipSnapshot, Registry};

/// How often the health of origins is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// How long the start waits for the first list of a source. Envoy's `initial_fetch_timeout` is 15 s,
/// but its clients wait for it, and ours reach the origins directly meanwhile.
const FIRST_LIST: Duration = Duration::from_secs(5);

/// The origins of all services.
pub(super) struct Origins {
    services: Vec<Arc<Followed>>,
}

/// One service's.
struct Followed {
    name: String,
    position: usize,
    source: &'static str,
    discovery: Option<Discovery>,
    /// What the source says.
    feed: Feed,
    latest: watch::Receiver<Latest>,
    chosen: watch::Sender<Arc<[Chosen]>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    choice: Choice,
    changes: u64,
}

impl Origins {
    pub(super) fn new(config: &Config) -> Self {
        let services = config.services.iter().enumerate();
        Self { services: services.map(|(i, s)| Arc::new(Followed::new(i, s))).collect() }
    }

    /// Where workers read which origins to use, in the order of the configuration.
    pub(super) fn subscribe(&self) -> Vec<watch::Receiver<Arc<[Chosen]>>> {
        self.services.iter().map(|service| service.chosen.subscribe()).collect()
    }

    /// Begins to follow all services. Returns when each has its first list, or it has become clear
    /// that this may take long: clients are refused then until it comes.
    pub(super) async fn start(&self, registry: &Arc<Registry>, datapath: &Arc<dyn Datapath>) {
        for service in &self.services {
            if let Some(discovery) = &service.discovery {
                let source = membership::source(&discovery.source, datapath);
                tokio::spawn(source.watch(service.feed.clone()));
                tokio::spawn(Arc::clone(service).follow(discovery.clone(), Arc::clone(registry)));
            }
        }
        for service in self.services.iter().filter(|service| service.discovery.is_some()) {
            let mut latest = service.latest.clone();
            let first = latest.wait_for(|latest| latest.membership.is_some());
            if tokio::time::timeout(FIRST_LIST, first).await.is_err() {
                let error = service.latest.borrow().error.clone();
                tracing::warn!(
                    service = service.name,
                    error = error.as_deref().unwrap_or("nothing was said yet"),
                    "no list of origins; clients are refused until there is one"
                );
            }
            let mut chosen = service.chosen.subscribe();
            // Chosen by the task, which may not have run yet.
            let any = chosen.wait_for(|chosen| !chosen.is_empty());
            tokio::time::timeout(LOOK, any).await.map(drop).unwrap_or_default();
        }
    }

    /// What the statistics say of a service.
    pub(super) fn snapshot(&self, service: usize) -> Option<MembershipSnapshot> {
        self.services.get(service).map(|service| service.snapshot())
    }
}

impl Followed {
    fn new(position: usize, config: &Service) -> Self {
        let (feed, latest) = Feed::new();
        let source = match &config.discovery {
            None => "static",
            Some(discovery) => discovery.source.name(),
        };
        let members = Membership::new(config.origins.iter().map(|&address| Member::at(address)));
        // In the order of the file, which is the order of the statistics.
        let chosen: Arc<[Chosen]> = config.origins.iter().map(|&o| Chosen::at(o)).collect();
        let state = State {
            choice: Choice {
                origins: chosen.to_vec(),
                members: members.members().len(),
                healthy: members.members().len(),
                ..Choice::default()
            },
            changes: 0,
        };
        Self {
            name: config.name.clone(),
            position,
            source,
            discovery: config.discovery.clone(),
            feed,
            latest,
            chosen: watch::Sender::new(chosen),
            state: Mutex::new(state),
        }
    }

    async fn follow(self: Arc<Self>, discovery: Discovery, registry: Arc<Registry>) {
        let Discovery { debounce, debounce_max, on_empty, .. } = discovery;
        let mut gather = Gather::new(self.latest.clone(), debounce, debounce_max, on_empty);
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut membership = Arc::<Membership>::default();
        loop {
            tokio::select! {
                next = gather.next() => match next {
                    Some(next) => membership = next,
                    None => return,
                },
                _ = look.tick() => {}
            }
            let level = level(&membership);
            let order: Vec<_> = (0..level.len()).collect();
            let failing = registry.failing(self.position);
            self.set(choose(&level, &order, None, |origin| failing.contains(&origin)));
        }
    }

    fn set(&self, choice: Choice) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.choice.origins != choice.origins {
            state.changes += 1;
            tracing::info!(
                service = self.name,
                origins = choice.origins.len(),
                members = choice.members,
                healthy = choice.healthy,
                widened = choice.widened,
                "the origins have changed"
            );
            self.chosen.send_replace(choice.origins.as_slice().into());
        }
        state.choice = choice;
    }

    fn snapshot(&self) -> MembershipSnapshot {
        let latest = self.latest.borrow();
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        MembershipSnapshot {
            source: self.source.to_owned(),
            version: latest.version.clone(),
            accepted: latest.accepted,
            refused: latest.refused,
            error: latest.error.clone(),
            changes: state.changes,
            members: state.choice.members as u64,
            healthy: state.choice.healthy as u64,
            used: state.choice.origins.len() as u64,
            widened: state.choice.widened as u64,
            priority: state.choice.priority,
        }
    }
}
