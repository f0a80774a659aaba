//! Puts the parts together, runs them, and takes them apart in the right order.
//!
//! Start: admin socket, kernel programs, workers (which listen and warm up), and interception of each
//! service that is ready for its clients; nobody waits for another service's origins. Stop:
//! interception first, so that new connections go straight to the origins while those that are
//! here are served to their end. Once they are, this gateway's index is given back.

mod cgroups;
mod descriptors;
mod interception;
mod obstacles;
mod origins;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

pub use self::descriptors::shortage;
pub use self::obstacles::{Obstacle, obstacles};

use self::cgroups::Cgroups;
use self::interception::Interception;
use self::origins::Origins;
use crate::admin::{self, Health};
use crate::aside::aside;
use crate::chain;
use crate::clock;
use crate::config::{self, Config, Refuse};
use crate::datapath::gate::Gate;
use crate::datapath::kernel::{self, Kernel, KernelLog};
use crate::datapath::steering::{Carried, Layout};
use crate::datapath::{Datapath, Inert};
use crate::events::EventLog;
use crate::fleet;
use crate::net::{self, Listening};
use crate::origin::watch::Watch;
use crate::pool;
use crate::pool::budget::Budget;
use crate::stats::{HostCounters, PathSnapshot, Process, Registry, Snapshot, host};
use crate::worker::{Shared, Stage, Worker};

/// How often the control thread looks whether a worker has died.
const WATCH: Duration = Duration::from_millis(500);

/// How long answers on the admin socket may take once everything else has ended.
const ADMIN_GRACE: Duration = Duration::from_secs(1);
/// The same for workers, which need it only for lists of tens of thousands of origins.
const WORKER_GRACE: Duration = Duration::from_secs(5);

/// Runs the daemon until it is told to stop by SIGTERM, SIGINT or the admin socket.
pub fn run(
    configure: impl FnOnce() -> anyhow::Result<Config> + Send + 'static,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // First of all: until then a signal ends the process as it is.
        let mut signals = Signals::listen()?;
        let (control, admin) = tokio::select! {
            prepared = prepare(configure) => prepared?,
            () = signals.stop() => {
                tracing::info!("told to stop before it has started");
                return Ok(());
            }
        };
        control.run(admin, signals).await
    })
}

/// Everything that comes before the first worker.
async fn prepare(
    configure: impl FnOnce() -> anyhow::Result<Config> + Send + 'static,
) -> anyhow::Result<(Arc<Control>, admin::Listener)> {
    let config = Arc::new(aside("configure", configure).await??);
    descriptors::raise();
    // Before anything is loaded: nobody else may be serving this socket.
    let admin = admin::bind(&config.admin_socket)?;
    let for_datapath = Arc::clone(&config);
    let Loaded { datapath, log, no_kernel } =
        aside("load", move || load_datapath(&for_datapath)).await??;
    let events = Arc::new(EventLog::open(&config.event_log)?);
    let common = common(&config, &events, &*datapath);
    let listening = Arc::new(Listening::configured(&config));
    let origins = Origins::new(&config, &common, &listening, &events);
    let control = Control {
        shared: Shared {
            registry: Arc::new(Registry::new(&config)),
            origins: origins.subscribe(),
            open: watch::Sender::new(vec![0; config.services.len()]),
            common: Arc::clone(&common),
            config: Arc::clone(&config),
            datapath,
            listening,
        },
        origins,
        events,
        cgroups: Arc::new(Cgroups::find(&config.services)?),
        identity: OnceLock::new(),
        no_kernel,
        started: clock::now(),
        ready: AtomicBool::new(false),
        stage: watch::Sender::new(Stage::Run),
    };
    if let Some(log) = log {
        tokio::spawn(log.forward());
    }
    Ok((Arc::new(control), admin))
}

/// What signals tell the daemon.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    _file_size: Signal,
}

impl Signals {
    /// From now on none of them ends the process.
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            _file_size: survive_file_size_limit()?,
        })
    }

    /// Waits until the daemon is to stop.
    async fn stop(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => {
                    tracing::warn!("SIGHUP: the configuration is read at the start only; restart");
                }
            }
        }
    }
}

/// Makes a write beyond `RLIMIT_FSIZE` an error, which loses a line of a log, and not the daemon's end.
///
/// A handler that does nothing, because a process that is started would inherit that it is ignored.
fn survive_file_size_limit() -> std::io::Result<Signal> {
    signal(SignalKind::from_raw(nix::libc::SIGXFSZ))
}

/// The control thread's state; also what the admin socket asks.
struct Control {
    shared: Shared,
    origins: Origins,
    events: Arc<EventLog>,
    cgroups: Arc<Cgroups>,
    /// Which gateway this is, once that is being found out.
    identity: OnceLock<watch::Receiver<fleet::Status>>,
    /// Why there are no kernel programs.
    no_kernel: Option<String>,
    started: Instant,
    ready: AtomicBool,
    stage: watch::Sender<Stage>,
}

impl Control {
    async fn run(
        self: Arc<Self>,
        admin: admin::Listener,
        mut signals: Signals,
    ) -> anyhow::Result<()> {
        let config = &self.shared.config;
        refuse_taken_addresses(config)?;
        let fleet = fleet::start(&config.gateway, Arc::clone(&self.shared.datapath))?;
        let identity = fleet.status();
        self.origins.start(&self.shared.datapath, &self.shared.registry, &identity);
        self.identity.set(identity).ok();
        let mut workers = Vec::new();
        for index in 0..config.workers.get() {
            workers.push(Worker::start(index, self.shared.clone(), self.stage.subscribe())?);
        }
        let admin = tokio::spawn(admin::serve(
            admin,
            Arc::clone(&self) as Arc<dyn admin::Source>,
            self.reached(Stage::Quit),
        ));
        let mut drain = std::pin::pin!(self.reached(Stage::Drain));
        let mut following = None;
        tokio::select! {
            started = self.start(&mut workers) => {
                let interception = started?;
                let control = Arc::clone(&self);
                following = interception.can_change().then(|| {
                    tokio::spawn(async move { interception.follow(&control.origins).await })
                });
            }
            () = signals.stop() => self.drain_now(),
            () = &mut drain => {}
        }
        while *self.stage.borrow() == Stage::Run {
            tokio::select! {
                () = signals.stop() => self.drain_now(),
                () = &mut drain => {}
                () = tokio::time::sleep(WATCH) => {
                    if workers.iter().any(Worker::is_finished) {
                        tracing::error!("a worker has died; stopping");
                        self.drain_now();
                    }
                }
            }
        }

        self.ready.store(false, Relaxed);
        if let Some(following) = following {
            following.abort();
        }
        if let Err(error) = self.shared.datapath.intercept(&[]) {
            // The programs go with this process in any case.
            tracing::error!(%error, "ending interception");
        }
        tokio::select! {
            () = finished(&workers) => tracing::info!("drained"),
            () = tokio::time::sleep(config.drain_timeout) => {
                tracing::warn!("drain_timeout reached; ending the connections that are left");
            }
            () = signals.stop() => tracing::warn!("told to stop again; ending at once"),
        }
        self.stage.send_replace(Stage::Quit);
        // Not before: what is left was dialled in this gateway's place.
        fleet.leave().await;
        let joined = join(workers).await;
        // A request that somebody never finishes must not keep the daemon from ending.
        if let Ok(ended) = tokio::time::timeout(ADMIN_GRACE, admin).await {
            ended.context("admin server")??;
        }
        joined
    }

    async fn start(&self, workers: &mut Vec<Worker>) -> anyhow::Result<Interception> {
        let mut listeners = Vec::new();
        for worker in &mut *workers {
            // One that has ended instead is found below.
            listeners.extend(worker.ready().await);
        }
        if listeners.len() < workers.len() {
            return Err(ended(workers).await);
        }
        let mut interception = Interception::new(&self.shared, &self.cgroups, &listeners)?;
        loop {
            // Asked before: what opens meanwhile is intercepted the next time round.
            let complete = interception.is_complete();
            interception.apply(&self.origins).context("starting interception")?;
            if complete {
                break;
            }
            tokio::select! {
                () = interception.change(&self.origins) => {}
                error = ended(workers) => return Err(error),
            }
        }
        self.ready.store(true, Relaxed);
        tracing::info!(intercepted = interception.services(), "ready");
        Ok(interception)
    }

    fn drain_now(&self) {
        self.stage.send_if_modified(|stage| {
            let running = *stage == Stage::Run;
            if running {
                tracing::info!("stopping: finishing what is under way");
                *stage = Stage::Drain;
            }
            running
        });
    }

    /// Completes once the stop has come so far.
    fn reached(&self, wanted: Stage) -> impl Future<Output = ()> + Send + 'static {
        let mut stage = self.stage.subscribe();
        async move {
            // An error means that the sender is gone, and everything with it.
            stage.wait_for(|&stage| stage >= wanted).await.ok();
        }
    }
}

impl admin::Source for Control {
    fn snapshot(&self) -> Snapshot {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let process = Process {
            now_unix_ms: millis(since_epoch),
            uptime_ms: millis(clock::now() - self.started),
            workers: self.shared.config.workers.get(),
        };
        let (counters, mut services) = self.shared.registry.undisturbed(|| {
            let counters = match &self.no_kernel {
                None => self.shared.datapath.counters().map_err(|error| chain(error.as_ref())),
                Some(reason) => Err(reason.clone()),
            };
            let nothing = Carried::default();
            let carried = counters.as_ref().map_or(&nothing, |counters| &counters.carried);
            let services = self.shared.registry.services(carried);
            (counters, services)
        });
        let host = host::read().unwrap_or_else(|error| {
            tracing::warn!(%error, "reading the host's TCP counters");
            HostCounters::default()
        });
        let kernel = counters.as_ref().map_err(String::as_str);
        for (position, service) in services.iter_mut().enumerate() {
            service.membership = self.origins.snapshot(position);
            service.cgroups = self.cgroups.present(&self.shared.config.services[position]);
            let common = &self.shared.common[position];
            service.limits = common.budget.snapshot();
            service.connections_guaranteed = common.budget.guaranteed.get();
            service.connects_refused = common.budget.gate().map_or(0, Gate::refused);
            service.outliers = common.watch.as_ref().map(|watch| watch.snapshot());
            for origin in &mut service.origins {
                let path = self.shared.datapath.path(origin.address);
                origin.path = path.as_ref().map(PathSnapshot::from);
            }
        }
        let mut snapshot = Snapshot::assemble(process, services, kernel, host);
        snapshot.events_lost = self.events.lost.get();
        snapshot.gateway = self.identity.get().map(|status| (&*status.borrow()).into());
        snapshot
    }

    fn events(&self) -> String {
        self.events.recent()
    }

    fn health(&self) -> Health {
        Health { ready: self.ready.load(Relaxed), draining: *self.stage.borrow() != Stage::Run }
    }

    fn drain(&self) {
        self.drain_now();
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Waits until all workers have ended.
async fn finished(workers: &[Worker]) {
    while !workers.iter().all(Worker::is_finished) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits for workers that were told to end. One that is in the middle of something long does not keep the
/// process from it.
async fn join(mut workers: Vec<Worker>) -> anyhow::Result<()> {
    // Who has not by then is counted below.
    tokio::time::timeout(WORKER_GRACE, finished(&workers)).await.ok();
    let busy = workers.extract_if(.., |worker| !worker.is_finished()).count();
    workers.into_iter().try_for_each(Worker::join)?;
    anyhow::ensure!(busy == 0, "{busy} workers have not ended within {WORKER_GRACE:?}");
    Ok(())
}

/// Waits until a worker has ended that nobody has told to, and says why it has.
async fn ended(workers: &mut Vec<Worker>) -> anyhow::Error {
    loop {
        if let Some(index) = workers.iter().position(Worker::is_finished) {
            let result = workers.swap_remove(index).join();
            return result
                .err()
                .unwrap_or_else(|| anyhow::anyhow!("a worker ended while it started"));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Workers share their listen addresses (`SO_REUSEPORT`), and the kernel would let another daemon
/// of the same user join in and take a part of the clients. Nobody may be there before them.
fn refuse_taken_addresses(config: &Config) -> anyhow::Result<()> {
    for service in &config.services {
        for &address in &service.listen {
            net::bind(address, false, false)
                .with_context(|| format!("service {:?}: listening on {address}", service.name))?;
        }
    }
    Ok(())
}

/// What became of the kernel programs.
struct Loaded {
    datapath: Arc<dyn Datapath>,
    /// What the programs log.
    log: Option<KernelLog>,
    /// Why there are none.
    no_kernel: Option<String>,
}

/// Loads the kernel programs; does without them only if no service needs them.
fn load_datapath(config: &Config) -> anyhow::Result<Loaded> {
    let intercepting = config.services.iter().any(config::Service::intercepts);
    let options = kernel::Options {
        intercept: intercepting.then(|| kernel::InterceptOptions {
            workers: config.workers.get(),
            heartbeat_age_max: config.heartbeat_age_max,
            steer: Layout::new(config),
        }),
        ..kernel::Options::default()
    };
    if intercepting && kernel::has_neighbour() {
        tracing::warn!(
            "another broker intercepts connections on this host: if one dials what the other intercepts, \
             requests go round in a circle"
        );
    }
    match Kernel::load(&options) {
        Ok(mut kernel) => {
            let log = kernel.take_log();
            Ok(Loaded { datapath: Arc::new(kernel), log, no_kernel: None })
        }
        Err(error) if intercepting => {
            Err(anyhow::Error::new(error).context("interception needs the kernel programs"))
        }
        Err(error) => {
            let reason = chain(&error);
            tracing::warn!(reason, "no kernel programs: listening only, nothing is counted");
            Ok(Loaded { datapath: Arc::new(Inert), log: None, no_kernel: Some(reason) })
        }
    }
}

/// What the workers of each service have in common.
fn common(config: &Config, events: &Arc<EventLog>, datapath: &dyn Datapath) -> Arc<[pool::Common]> {
    let mut all: Vec<pool::Common> = Vec::new();
    for service in &config.services {
        let watch = match service.high_of {
            // What is known of an origin is known to both.
            Some(first) => all[first].watch.clone(),
            None => service.outlier.clone().map(|outlier| {
                let (name, events) = (service.name.clone(), Arc::clone(events));
                Arc::new(Watch::new(name, outlier, service.panic, events))
            }),
        };
        all.push(pool::Common {
            budget: budget(service, config.workers.get(), datapath),
            retries: service.retries,
            watch,
        });
    }
    all.into()
}

fn budget(service: &config::Service, workers: usize, datapath: &dyn Datapath) -> Arc<Budget> {
    let gate = match service.limits.refuse {
        Refuse::Response => None,
        Refuse::Connect => datapath.new_gate(),
    };
    let budget = Budget::new(&service.limits, service.retries.limit, workers);
    Arc::new(budget.with_gate(gate))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    use super::*;

    #[tokio::test]
    async fn a_file_that_may_not_grow_is_no_end() {
        let _survived = survive_file_size_limit().unwrap();
        let (before, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
        // Large enough for every other test.
        let limit = hard.min(1 << 40);
        setrlimit(Resource::RLIMIT_FSIZE, limit, hard).unwrap();
        let error = tempfile::tempfile().unwrap().write_at(b"x", limit).unwrap_err();
        setrlimit(Resource::RLIMIT_FSIZE, before, hard).unwrap();
        assert_eq!(error.kind(), std::io::ErrorKind::FileTooLarge);
    }
}
