//! Follows who the origins of each service are, and tells the workers.
//!
//! One task per service on the control thread: what the source says, gathered; which of them this
//! gateway uses; and that list into a channel that every worker reads.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use crate::aside::aside;
use crate::clock;
use crate::config::discovery::{Discovery, OnEmpty};
use crate::config::health::HealthCheck;
use crate::config::subset::Subset;
use crate::config::{Config, Service};
use crate::datapath::Datapath;
use crate::events::{EventLog, ServiceEvent, What};
use crate::fleet;
use crate::health::{self, Checks};
use crate::membership::gather::Gather;
use crate::membership::{self, Feed, Health, Latest, Member, Membership};
use crate::net::Listening;
use crate::origin::Chosen;
use crate::origin::choice::{Choice, Ranking};
use crate::origin::panic::Eligible;
use crate::origin::watch::{Watch, unix_ms};
use crate::pool;
use crate::stats::{MembershipSnapshot, Registry};

/// How often the health of origins is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// Pause before a thread is asked for again that could not be had.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// How often limits are looked at.
const LOOK_AT_LIMITS: Duration = Duration::from_millis(100);

/// How long a service waits for the first list of its source. Envoy's `initial_fetch_timeout` is 15 s,
/// but clients wait for it; ours that are intercepted reach the origins directly meanwhile.
const FIRST_LIST: Duration = Duration::from_secs(5);

/// When people are told that it waits.
const FIRST_LIST_SLOW: Duration = Duration::from_millis(500);

/// How long a service with a subset waits for this gateway's index.
const FIRST_IDENTITY: Duration = Duration::from_secs(3);

/// What is wrong with a source before it has said anything.
const NOTHING_YET: &str = "nothing was said yet";

/// What is wrong with an empty list that is not to be used, where none was before.
const EMPTY: &str = "the list is empty and not used (on_empty = \"keep\")";

/// The origins of all services.
pub(super) struct Origins {
    services: Vec<Arc<Followed>>,
    /// Told of each list that a service takes up.
    taken_up: Arc<Notify>,
}

/// One service's.
struct Followed {
    name: String,
    position: usize,
    /// Whose origins it has; then nothing else is followed here but its limits.
    high_of: Option<usize>,
    source: &'static str,
    discovery: Option<Discovery>,
    subset: Option<Subset>,
    health_check: Option<HealthCheck>,
    /// Most idle sockets of all workers to one origin.
    idle_max: usize,
    /// What the health checks have found.
    checks: Arc<Mutex<Arc<Checks>>>,
    /// The members that the configuration names.
    configured: Arc<Membership>,
    /// What the source says.
    feed: Feed,
    latest: watch::Receiver<Latest>,
    /// Who is used; `None` while that is waited for.
    chosen: watch::Sender<Option<Arc<[Chosen]>>>,
    common: pool::Common,
    listening: Arc<Listening>,
    events: Arc<EventLog>,
    taken_up: Arc<Notify>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    choice: Choice,
    changes: u64,
    listed: Arc<Membership>,
    not_intercepted: usize,
    /// Members of the last list that lead back to this broker.
    own_listeners: usize,
}

impl Origins {
    pub(super) fn new(
        config: &Config,
        common: &[pool::Common],
        listening: &Arc<Listening>,
        events: &Arc<EventLog>,
    ) -> Self {
        let taken_up = Arc::default();
        let services = config.services.iter().zip(common).enumerate();
        let followed = |(position, (service, common))| {
            let workers = config.workers.get();
            let tell = (events, &taken_up);
            Arc::new(Followed::new(position, service, workers, common, listening, tell))
        };
        Self { services: services.map(followed).collect(), taken_up }
    }

    /// Where workers read which origins to use, in the order of the configuration.
    pub(super) fn subscribe(&self) -> Vec<watch::Receiver<Option<Arc<[Chosen]>>>> {
        let all = self.services.iter().enumerate();
        all.map(|(position, _)| self.source(position).chosen.subscribe()).collect()
    }

    /// Begins to follow all services. Each lets its clients in when it has its first list, or it has
    /// become clear that this may take long: they are refused then until it comes.
    pub(super) fn start(
        &self,
        datapath: &Arc<dyn Datapath>,
        registry: &Arc<Registry>,
        identity: &watch::Receiver<fleet::Status>,
    ) {
        for service in &self.services {
            tokio::spawn(Arc::clone(service).look_after(Arc::clone(datapath)));
            if service.high_of.is_some() {
                continue;
            }
            let gather = service.discovery.as_ref().map(|discovery| {
                let (source, datapath) = (discovery.source.clone(), Arc::clone(datapath));
                tokio::spawn(membership::follow(source, datapath, service.feed.clone()));
                let Discovery { debounce, debounce_max, on_empty, .. } = *discovery;
                Gather::new(service.latest.clone(), debounce, debounce_max, on_empty)
            });
            let checked = service
                .health_check
                .as_ref()
                .map(|settings| Checked::start(settings, Arc::clone(datapath), &service.checks));
            // What the configuration names, all of it, is what workers start with.
            if gather.is_none() && service.subset.is_none() && checked.is_none() {
                continue;
            }
            tokio::spawn(Arc::clone(service).await_first());
            let follow =
                Arc::clone(service).follow(gather, checked, identity.clone(), Arc::clone(registry));
            tokio::spawn(follow);
        }
    }

    /// The list that a service has taken up last, whether its members are used or not.
    pub(super) fn listed(&self, service: usize) -> Arc<Membership> {
        Arc::clone(&lock(&self.source(service).state).listed)
    }

    /// Completes when a service has taken up another list than before.
    pub(super) async fn lists_changed(&self) {
        self.taken_up.notified().await;
    }

    /// So many of a service's list are not intercepted.
    pub(super) fn not_intercepted(&self, service: usize, members: usize) {
        let source = self.source(service);
        if std::mem::replace(&mut lock(&source.state).not_intercepted, members) != members
            && members > 0
        {
            tracing::warn!(
                service = source.name,
                members,
                "clients of some members are left alone: others intercept them, or the kernel's \
                 table is full"
            );
        }
    }

    /// What the statistics say of a service.
    pub(super) fn snapshot(&self, service: usize) -> Option<MembershipSnapshot> {
        self.services.get(service)?;
        Some(self.source(service).snapshot())
    }

    /// Who follows the origins of a service.
    fn source(&self, service: usize) -> &Followed {
        &self.services[self.services[service].high_of.unwrap_or(service)]
    }
}

/// A panic elsewhere leaves what is shown as good as it was.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The health checks of a service.
struct Checked {
    settings: HealthCheck,
    origins: watch::Sender<Arc<[SocketAddr]>>,
    results: watch::Receiver<Arc<Checks>>,
    /// For the statistics.
    shown: Arc<Mutex<Arc<Checks>>>,
    /// When each origin's last check passed that the outlier detection has heard of.
    passed: HashMap<SocketAddr, Instant>,
}

impl Checked {
    fn start(
        settings: &HealthCheck,
        datapath: Arc<dyn Datapath>,
        shown: &Arc<Mutex<Arc<Checks>>>,
    ) -> Self {
        let (origins, list) = watch::channel(Arc::default());
        Self {
            settings: settings.clone(),
            origins,
            results: health::start(settings, list, datapath),
            shown: Arc::clone(shown),
            passed: HashMap::new(),
        }
    }

    /// Checks those that may be used, and passes on what was found.
    fn follow(&mut self, ranking: &Ranking, watch: Option<&Watch>) {
        let candidates: Arc<[SocketAddr]> = ranking.candidates().collect();
        self.origins.send_if_modified(|origins| {
            let changed = *origins != candidates;
            *origins = candidates;
            changed
        });
        let found = Arc::clone(&self.results.borrow_and_update());
        for (&origin, checked) in &*found {
            let Some(at) = checked.passed_at else { continue };
            if self.passed.insert(origin, at) != Some(at)
                && let Some(watch) = watch
                && let Some(host) = watch.host(origin)
            {
                watch.tell(host.health_check_succeeded(clock::now()).as_slice());
            }
        }
        self.passed.retain(|origin, _| found.contains_key(origin));
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = found;
    }

    fn health(&self, member: &Member) -> Health {
        health::of(member, &self.results.borrow(), self.settings.initial)
    }
}

/// The next results of health checks; never, if there are none.
async fn result(checked: &mut Option<Checked>) {
    if let Some(checked) = checked
        && checked.results.changed().await.is_ok()
    {
        return;
    }
    std::future::pending::<()>().await;
}

/// The next list of a source; never, if there is no source.
async fn next(gather: &mut Option<Gather>) -> Option<Arc<Membership>> {
    match gather {
        Some(gather) => gather.next().await,
        None => std::future::pending().await,
    }
}

/// The next change of who this gateway is; never, if that is fixed.
async fn change(identity: &mut watch::Receiver<fleet::Status>) {
    if identity.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

impl Followed {
    fn new(
        position: usize,
        config: &Service,
        workers: usize,
        common: &pool::Common,
        listening: &Arc<Listening>,
        (events, taken_up): (&Arc<EventLog>, &Arc<Notify>),
    ) -> Self {
        let (feed, latest) = Feed::new();
        let source = match &config.discovery {
            None => "static",
            Some(discovery) => discovery.source.name(),
        };
        let members = Membership::new(config.origins.iter().map(|&address| Member::at(address)));
        // In the order of the file, which is the order of the statistics.
        let all: Arc<[Chosen]> = config.origins.iter().map(|&o| Chosen::at(o)).collect();
        let known = config.discovery.is_none() && config.subset.is_none();
        let chosen = known.then_some(all);
        let state = State {
            choice: Choice {
                origins: chosen.as_deref().unwrap_or_default().to_vec(),
                members: members.members().len(),
                healthy: members.members().len(),
                ..Choice::default()
            },
            ..State::default()
        };
        let followed = Self {
            name: config.name.clone(),
            position,
            high_of: config.high_of,
            source,
            discovery: config.discovery.clone(),
            subset: config.subset,
            health_check: config.health_check.clone(),
            idle_max: config.pool.max_idle * workers,
            checks: Arc::default(),
            configured: Arc::new(members),
            feed,
            latest,
            chosen: watch::Sender::new(chosen),
            common: pool::Common {
                // One looks after it.
                watch: common.watch.clone().filter(|_| config.high_of.is_none()),
                ..common.clone()
            },
            listening: Arc::clone(listening),
            events: Arc::clone(events),
            taken_up: Arc::clone(taken_up),
            state: Mutex::new(state),
        };
        followed.watch_these(followed.chosen.borrow().as_deref().unwrap_or_default());
        followed
    }

    /// Waits for the first choice. If it takes too long, clients are let in, and refused.
    async fn await_first(self: Arc<Self>) {
        let mut chosen = self.chosen.subscribe();
        let first = chosen.wait_for(Option::is_some);
        let mut first = std::pin::pin!(first);
        if tokio::time::timeout(FIRST_LIST_SLOW, &mut first).await.is_ok() {
            return;
        }
        let service = &self.name;
        tracing::info!(
            service,
            error = self.what_is_missing(),
            "waiting for the first list of origins"
        );
        if tokio::time::timeout(FIRST_LIST.saturating_sub(FIRST_LIST_SLOW), first).await.is_err()
            && self.let_in()
        {
            tracing::warn!(
                service,
                error = self.what_is_missing(),
                "no list of origins; clients are refused until there is one"
            );
        }
    }

    /// Lets clients in though nobody is there to serve them. Answers whether they had to wait.
    fn let_in(&self) -> bool {
        self.chosen.send_if_modified(|chosen| {
            let waits = chosen.is_none();
            chosen.get_or_insert_default();
            waits
        })
    }

    /// Why there is no list.
    fn what_is_missing(&self) -> String {
        self.error(&self.latest.borrow()).unwrap_or_else(|| NOTHING_YET.to_owned())
    }

    /// What is wrong with the source or with its list, even if the last one still serves.
    fn trouble(&self) -> Option<String> {
        let latest = self.latest.borrow();
        latest.error.clone().or_else(|| self.is_kept_empty(&latest).then(|| EMPTY.to_owned()))
    }

    /// What is wrong with the source, or with using what it says.
    fn error(&self, latest: &Latest) -> Option<String> {
        self.discovery.as_ref()?;
        latest.error.clone().or_else(|| {
            if latest.membership.is_none() {
                return Some(NOTHING_YET.to_owned());
            }
            let used = self.chosen.borrow().as_ref().is_some_and(|all| !all.is_empty());
            // Else the last one goes on being used, as the operator wants.
            (self.is_kept_empty(latest) && !used).then(|| EMPTY.to_owned())
        })
    }

    /// Whether the list is empty, and the one before it is kept.
    fn is_kept_empty(&self, latest: &Latest) -> bool {
        let keeps = self.discovery.as_ref().is_some_and(|d| d.on_empty == OnEmpty::Keep);
        keeps && latest.membership.as_ref().is_some_and(|list| list.is_empty())
    }

    /// Waits until it is known which gateway this is: the sockets of another one's subset would be
    /// opened for nothing.
    async fn await_identity(&self, identity: &mut watch::Receiver<fleet::Status>) {
        let known = identity.wait_for(|status| status.identity.is_some());
        if tokio::time::timeout(FIRST_IDENTITY, known).await.is_err() {
            tracing::warn!(
                service = self.name,
                "this gateway's index is not known yet; until it is, the subset is that of a gateway \
                 that nobody reckons with"
            );
        }
    }

    /// Follows what changes the choice, for as long as the daemon runs.
    async fn follow(
        self: Arc<Self>,
        mut gather: Option<Gather>,
        mut checked: Option<Checked>,
        mut identity: watch::Receiver<fleet::Status>,
        registry: Arc<Registry>,
    ) {
        if self.subset.is_some() {
            self.await_identity(&mut identity).await;
        }
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut members = Arc::clone(&self.configured);
        let mut ranking = Ranking::default();
        loop {
            let place = identity.borrow_and_update().identity;
            if !ranking.is_of(&members, place) {
                let (subset, members) = (self.subset, Arc::clone(&members));
                let rank = move || Ranking::new(members, subset, place);
                ranking = done("rank", rank).await;
            }
            if let Some(checked) = &mut checked {
                checked.follow(&ranking, self.common.watch.as_deref());
            }
            let failing = registry.failing(self.position);
            let is_failing = |origin| failing.contains(&origin);
            self.set(ranking.choose(is_failing, |member| match &checked {
                Some(checked) => checked.health(member),
                None => member.health,
            }));
            self.take_up(&members);
            tokio::select! {
                Some(next) = next(&mut gather) => {
                    members = self.without_own(next).await;
                    // Nobody is sent here for want of whom they would be refused.
                    if members.is_empty() {
                        self.take_up(&members);
                        self.let_in();
                    }
                }
                () = change(&mut identity) => {}
                () = result(&mut checked) => {}
                _ = look.tick() => {}
            }
        }
    }

    /// Without members that would be served by dialling them again, and again.
    async fn without_own(&self, list: Arc<Membership>) -> Arc<Membership> {
        let (listening, all) = (Arc::clone(&self.listening), Arc::clone(&list));
        // The kernel may have to be asked for each.
        let look = move || all.without(|member| listening.takes(member.address));
        let others = done("listeners", look).await;
        let own = list.members().len() - others.as_ref().unwrap_or(&list).members().len();
        if std::mem::replace(&mut lock(&self.state).own_listeners, own) != own && own > 0 {
            tracing::warn!(
                service = self.name,
                members = own,
                "members that are listeners of this broker are left out: they would loop"
            );
        }
        others.map_or(list, Arc::new)
    }

    /// From now on clients of these may come.
    fn take_up(&self, members: &Arc<Membership>) {
        let listed = &mut lock(&self.state).listed;
        if !Arc::ptr_eq(listed, members) {
            *listed = Arc::clone(members);
            self.taken_up.notify_one();
        }
    }

    fn set(&self, choice: Choice) {
        let mut state = lock(&self.state);
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
            let latest = self.latest.borrow();
            self.tell(What::Membership {
                origins: choice.origins.len(),
                members: choice.members,
                healthy: choice.healthy,
                widened: choice.widened,
                version: &latest.version,
            });
            self.watch_these(&choice.origins);
            self.chosen.send_replace(Some(choice.origins.as_slice().into()));
        }
        state.choice = choice;
    }

    /// Looks after these from now on; before any worker hears of them.
    fn watch_these(&self, origins: &[Chosen]) {
        if let Some(watch) = &self.common.watch {
            let addresses: Vec<_> = origins.iter().map(|origin| origin.address).collect();
            watch.cluster().set_hosts(&addresses);
        }
    }

    fn tell(&self, what: What<'_>) {
        let event = ServiceEvent { time_unix_ms: unix_ms(), service: &self.name, what };
        self.events.write(&event);
    }

    /// Looks for what only time tells: outliers, limits that are reached, sources that fail.
    async fn look_after(self: Arc<Self>, datapath: Arc<dyn Datapath>) {
        let watch = self.common.watch.as_ref();
        let pace = watch.map_or(LOOK_AT_LIMITS, |watch| watch.cluster().pace().min(LOOK_AT_LIMITS));
        let mut rng = membership::rng();
        let mut look = tokio::time::interval(pace);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut full: HashMap<String, u64> = HashMap::new();
        let (mut panicking, mut error) = (false, None);
        loop {
            look.tick().await;
            if let Some(watch) = watch {
                let now = clock::now();
                watch.hear_paths(now, &*datapath);
                if watch.sweep(now, &mut rng) {
                    self.common.budget.call_all();
                }
                let on = watch.eligible() == Eligible::All;
                if std::mem::replace(&mut panicking, on) != on {
                    let (ejected, origins) = watch.ejected_of();
                    self.tell(What::Panic { on, ejected, origins });
                    self.common.budget.call_all();
                }
            }
            for (limit, now) in self.common.budget.snapshot() {
                let (max, reached) = (now.max, now.used >= now.max);
                if reached && !full.contains_key(&limit) {
                    self.tell(What::LimitReached { limit: &limit, max });
                    full.insert(limit, now.overflow);
                } else if !reached && let Some(before) = full.remove(&limit) {
                    let overflows = now.overflow - before;
                    self.tell(What::LimitLeft { limit: &limit, max, overflows });
                }
            }
            let now = self.trouble();
            if error != now {
                self.tell(What::Source { error: now.as_deref() });
            }
            match (&error, &now) {
                (None, Some(error)) => {
                    let service = &self.name;
                    tracing::warn!(
                        service,
                        error,
                        "the source has no list to use: the last one stays"
                    );
                }
                (Some(_), None) => {
                    tracing::info!(service = self.name, "the source is in order again");
                }
                _ => {}
            }
            error = now;
        }
    }

    fn snapshot(&self) -> MembershipSnapshot {
        let latest = self.latest.borrow();
        let state = lock(&self.state);
        MembershipSnapshot {
            source: self.source.to_owned(),
            version: latest.version.clone(),
            left_out: {
                let Choice { draining, in_reserve, .. } = state.choice;
                let chosen = [
                    ("draining", draining),
                    ("other_priority", in_reserve),
                    ("not_intercepted", state.not_intercepted),
                    ("own_listener", state.own_listeners),
                ];
                let chosen = chosen.map(|(reason, count)| (reason, count as u64));
                let listed = latest.left_out.iter().map(|(&reason, &count)| (reason, count));
                let all = listed.chain(chosen).filter(|(_, count)| *count > 0);
                all.map(|(reason, count)| (reason.to_owned(), count)).collect()
            },
            accepted: latest.accepted,
            refused: latest.refused,
            error: self.error(&latest),
            changes: state.changes,
            members: state.choice.members as u64,
            healthy: state.choice.healthy as u64,
            used: state.choice.origins.len() as u64,
            subset: self.subset.map(|subset| subset.size as u64),
            ring_position: state.choice.arc.map(|[begin, _]| turns(begin)),
            ring_end: state.choice.arc.map(|[_, end]| turns(end)),
            idle_max: (self.idle_max * state.choice.origins.len()) as u64,
            widened: state.choice.widened as u64,
            priority: state.choice.priority,
            checks: {
                let now = clock::now();
                let checks = self.checks.lock().unwrap_or_else(PoisonError::into_inner);
                checks.iter().map(|(origin, c)| (origin.to_string(), c.snapshot(now))).collect()
            },
        }
    }
}

/// A place on the ring in 0..1.
fn turns(place: u64) -> f64 {
    place as f64 / 2f64.powi(64)
}

/// What `work` comes to, however long it takes to get a thread for it: the origins stay as they are until
/// then.
async fn done<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Clone + Send + 'static,
) -> T {
    loop {
        match aside(what, work.clone()).await {
            Ok(result) => return result,
            Err(error) => tracing::warn!(%error, "the origins stay as they are"),
        }
        tokio::time::sleep(ASK_AGAIN_AFTER).await;
    }
}
