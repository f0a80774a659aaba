//! One event loop: listeners, sessions, pools and a random generator of its own.
//!
//! A worker shares nothing on the request path with another one. The control thread talks to it
//! through two channels: it says when its pools are warm, and is told when to stop.

mod crew;
mod dialled;
mod events;
mod room;
mod service;

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use broker_ebpf::abi::{Event, EventKind};
use rand::SeedableRng;
use rand::rngs::{StdRng, SysRng};
use socket2::Socket;
use tokio::sync::{oneshot, watch};

use self::events::Events;
use self::room::Room;
use self::service::{Service, Via};
use crate::buffers::Buffers;
use crate::clock;
use crate::config::{self, Config, Steer};
use crate::datapath::{Datapath, ListenerSet, WorkerListeners, steering};
use crate::net::{self, Backlog, Listener, Listening};
use crate::origin::Chosen;
use crate::pool::{self, Environment};
use crate::session::{LAST_REQUEST, Stop};
use crate::stats::Registry;
use crate::ticks::Ticks;

/// How often pools are looked after and the heartbeat is sent.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// Pause after a failed `accept`: out of descriptors or memory, which does not pass at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How often a worker that is stopping looks whether it is done.
const STOPPING_TICK: Duration = Duration::from_millis(10);

/// What all workers are made of.
#[derive(Clone)]
pub struct Shared {
    /// The configuration.
    pub config: Arc<Config>,
    /// The kernel's side.
    pub datapath: Arc<dyn Datapath>,
    /// Where this process listens.
    pub listening: Arc<Listening>,
    /// Where metrics are left.
    pub registry: Arc<Registry>,
    /// What the workers of each service have in common, in the order of the configuration.
    pub common: Arc<[pool::Common]>,
    /// The origins of each service, in the order of the configuration; `None` while they are waited
    /// for.
    pub origins: Vec<watch::Receiver<Option<Arc<[Chosen]>>>>,
    /// In how many workers each service lets its clients in, in the same order.
    pub open: watch::Sender<Vec<usize>>,
}

/// How far a stop has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Serving.
    Run,
    /// Serving those who are here, and whoever is still queued.
    Drain,
    /// Ending at once.
    Quit,
}

/// A running worker.
pub struct Worker {
    thread: JoinHandle<anyhow::Result<()>>,
    ready: oneshot::Receiver<Vec<WorkerListeners>>,
}

impl Worker {
    /// Starts a worker's thread.
    pub fn start(
        index: usize,
        shared: Shared,
        stage: watch::Receiver<Stage>,
    ) -> anyhow::Result<Self> {
        let (report, ready) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name(format!("worker-{index}"))
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build_local(tokio::runtime::LocalOptions::default())?;
                runtime.block_on(run(index, shared, stage, report))
            })
            .context("starting a worker thread")?;
        Ok(Self { thread, ready })
    }

    /// Waits until the worker listens; each service lets its clients in when its pool is warm, see
    /// [`Shared::open`]. Gives the listeners for intercepted connections, one entry per service;
    /// `None` if the worker has ended instead.
    pub async fn ready(&mut self) -> Option<Vec<WorkerListeners>> {
        (&mut self.ready).await.ok()
    }

    /// Whether the thread has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// The thread's result.
    pub fn join(self) -> anyhow::Result<()> {
        self.thread.join().unwrap_or_else(|_| anyhow::bail!("a worker panicked"))
    }
}

async fn run(
    index: usize,
    shared: Shared,
    mut stage: watch::Receiver<Stage>,
    report: oneshot::Sender<Vec<WorkerListeners>>,
) -> anyhow::Result<()> {
    let common = Common {
        environment: Environment {
            datapath: Arc::clone(&shared.datapath),
            listening: Arc::clone(&shared.listening),
            rng: Rc::new(RefCell::new(StdRng::try_from_rng(&mut SysRng)?)),
            worker: index,
        },
        buffers: Buffers::default(),
        stop: Rc::default(),
        ticks: Rc::default(),
        room: Rc::new(
            Room::new(index, Arc::clone(&shared.datapath)).context("a descriptor in reserve")?,
        ),
    };
    let ticks = Rc::clone(&common.ticks);
    tokio::task::spawn_local(async move { ticks.run().await });
    let mut services = Vec::new();
    let mut accepting = Vec::new();
    let mut reports = Vec::new();
    for (position, service) in shared.config.services.iter().enumerate() {
        let records = shared.registry.register(position);
        let bound = Bound::new(service, &shared.config, &shared.listening)
            .with_context(|| format!("service {:?}", service.name))?;
        let built = Rc::new(Service::new(
            service,
            Place { service: position, worker: index },
            records,
            &shared.common[position],
            &common,
            bound.steered,
        ));
        reports.push(bound.report);
        let (door, opened) = watch::channel(false);
        let door = Door { here: door, everywhere: shared.open.clone() };
        let origins = shared.origins[position].clone();
        tokio::task::spawn_local(follow(Rc::clone(&built), origins, door));
        for (listener, via) in bound.listeners {
            let (service, listener) = (Rc::clone(&built), Rc::new(listener));
            let accepted = accept(service.clone(), listener.clone(), via, opened.clone());
            accepting.push((service, listener, via, tokio::task::spawn_local(accepted)));
        }
        services.push(built);
    }
    let steering = Steering::start(index, &shared, &services);
    common.room.tick().context("first heartbeat")?;
    report.send(reports).ok();

    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while *stage.borrow_and_update() == Stage::Run {
        tokio::select! {
            _ = tick.tick() => {
                if let Err(error) = common.room.tick() {
                    tracing::error!(%error, "heartbeat failed: clients will reach origins directly");
                }
                for service in &services {
                    service.tick();
                }
                steering.tick();
            }
            changed = stage.changed() => if changed.is_err() { break },
        }
    }

    // Intercepted clients go to the origins by now. Who has connected and sent nothing is not in the queue
    // yet (`TCP_DEFER_ACCEPT`), and has as long for its request as those that are being served.
    steering.tick();
    common.stop.raise();
    for service in &services {
        service.drain();
    }
    let closes = clock::now() + LAST_REQUEST;
    let quits = || *stage.borrow() == Stage::Quit;
    while !quits() && clock::now() < closes {
        tokio::time::sleep(STOPPING_TICK).await;
        steering.tick();
    }
    for (service, listener, via, task) in accepting {
        task.abort();
        while let Ok(client) = listener.accept_queued() {
            service.serve(client, via, &listener);
        }
    }
    while !quits() && services.iter().any(|s| s.is_serving()) {
        tokio::time::sleep(STOPPING_TICK).await;
        steering.tick();
    }
    Ok(())
}

/// What the services of a worker have in common.
struct Common {
    environment: Environment,
    buffers: Buffers,
    stop: Rc<Stop>,
    ticks: Rc<Ticks>,
    room: Rc<Room>,
}

/// Where a service's part in a worker stands in the whole.
#[derive(Clone, Copy, Debug)]
struct Place {
    service: usize,
    worker: usize,
}

/// What the worker does for clients that the kernel serves.
struct Steering {
    services: Vec<Rc<Service>>,
    hear: Option<Rc<dyn Fn()>>,
}

impl Steering {
    fn start(index: usize, shared: &Shared, services: &[Rc<Service>]) -> Self {
        let services: Vec<_> = services.iter().filter(|s| s.is_steered()).cloned().collect();
        let queue = shared.datapath.steering().and_then(|steering| {
            steering.take_queue(index).map(|queue| (Arc::clone(steering), queue))
        });
        let Some((steering, queue)) = queue.filter(|_| !services.is_empty()) else {
            return Self { services: Vec::new(), hear: None };
        };
        let events = Rc::new(Events::new(queue));
        let lost = Cell::new(steering.events_lost());
        let by_position: Vec<_> = services.iter().map(Rc::downgrade).collect();
        let hear = {
            let events = Rc::clone(&events);
            move || {
                let services = || by_position.iter().filter_map(Weak::upgrade);
                for event in events.take() {
                    tell(&event, &steering, services);
                }
                let lost_now = steering.events_lost();
                if lost.replace(lost_now) != lost_now {
                    services().for_each(|service| service.look_at_stock());
                }
            }
        };
        let hear: Rc<dyn Fn()> = Rc::new(hear);
        for service in &services {
            service.hear_with(Rc::clone(&hear));
        }
        let forward = Rc::clone(&hear);
        tokio::task::spawn_local(async move {
            if let Err(error) = events.forward(forward).await {
                tracing::error!(%error, "the kernel programs' events are heard with a delay");
            }
        });
        Self { services, hear: Some(hear) }
    }

    /// Housekeeping, and a look at what no event may have told.
    fn tick(&self) {
        if let Some(hear) = &self.hear {
            hear();
        }
        for service in &self.services {
            service.accept_backlog();
            service.look_at_stock();
        }
    }
}

/// Brings an event to the service that it concerns.
fn tell<I: Iterator<Item = Rc<Service>>>(
    event: &Event,
    steering: &steering::Steering,
    services: impl Fn() -> I,
) {
    match events::kind(event) {
        Some(EventKind::Slot) => {
            let slot = event.slot as usize;
            let owner = steering.layout().owner(slot);
            let service =
                owner.and_then(|owner| services().find(|s| s.position() == owner.service));
            if let (Some(owner), Some(service)) = (owner, service) {
                service.look_at_slot(owner.place, slot);
            }
        }
        Some(EventKind::Accept) => services().for_each(|service| service.accept_backlog()),
        Some(kind) => {
            let Some(ends) = steering.client(event.client) else { return };
            let found = services().any(|service| service.client_called(kind, event.client, ends));
            if !found {
                tracing::debug!(client = %ends.0, "a client has left before it was accepted");
            }
        }
        None => {}
    }
}

/// Whether a service lets its clients in.
struct Door {
    here: watch::Sender<bool>,
    everywhere: watch::Sender<Vec<usize>>,
}

impl Door {
    fn is_open(&self) -> bool {
        *self.here.borrow()
    }

    fn open(&self, service: usize) {
        self.here.send_replace(true);
        self.everywhere.send_modify(|open| open[service] += 1);
    }
}

/// Follows who the origins of a service are, and opens its door when their sockets are warm. Who comes
/// before that waits in the kernel's queue: the first one served finds warm sockets.
async fn follow(
    service: Rc<Service>,
    mut origins: watch::Receiver<Option<Arc<[Chosen]>>>,
    door: Door,
) {
    loop {
        let now = origins.borrow_and_update().clone();
        if let Some(now) = &now {
            service.set_origins(now);
        }
        tokio::select! {
            changed = origins.changed() => if changed.is_err() { return },
            () = warm_up(&service, &door), if now.is_some() && !door.is_open() => {
                if origins.changed().await.is_err() { return }
            }
        }
    }
}

async fn warm_up(service: &Service, door: &Door) {
    loop {
        service.tick();
        if service.is_warm() {
            return door.open(service.position());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Accepts connections, once the door is open, until aborted.
async fn accept(
    service: Rc<Service>,
    listener: Rc<Listener>,
    via: Via,
    mut opened: watch::Receiver<bool>,
) {
    // An error means that nobody follows the origins any more, and the worker ends.
    opened.wait_for(|open| *open).await.ok();
    loop {
        match listener.accept().await {
            Ok(client) => service.serve(client, via, &listener),
            Err(error) => {
                service.accept_failed(&error);
                if via != Via::Listen {
                    service.turn_away(&listener);
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The listeners of one service in one worker.
struct Bound {
    listeners: Vec<(Listener, Via)>,
    steered: Vec<(Backlog, Via)>,
    report: WorkerListeners,
}

impl Bound {
    fn new(
        service: &config::Service,
        config: &Config,
        listening: &Listening,
    ) -> anyhow::Result<Self> {
        let netns = config.intercept_from_netns;
        // An http1 client always speaks first; others may wait for a greeting.
        let speaks_first = matches!(service.protocol, config::Protocol::Http1 { .. });
        let listen = |address: SocketAddr| -> io::Result<Listener> {
            let listener = Listener::start(net::bind(address, true, speaks_first)?)?;
            listener.keep_clients_on_their_processor(config.workers);
            Ok(listener)
        };
        let mut listeners = Vec::new();
        for &address in &service.listen {
            let listener = listen(address).with_context(|| format!("listening on {address}"))?;
            listeners.push((listener, Via::Listen));
        }
        let mut report = WorkerListeners::default();
        if !service.intercepts() {
            return Ok(Self { listeners, steered: Vec::new(), report });
        }
        // Each worker has loopback listeners of its own: the kernel's connect hook chooses the
        // worker, not SO_REUSEPORT.
        let at = |wait_for_bytes| Inner { netns, wait_for_bytes, listening };
        report.relayed = intercepting(service, &at(speaks_first), &mut |socket, via| {
            listeners.push((Listener::start(socket)?, via));
            Ok(())
        })?;
        let mut steered = Vec::new();
        if service.steer != Steer::Relay {
            // Their connections come through at once, request or not: if the daemon dies, those in
            // the queue are reset, and no client waits for ever.
            report.steered = intercepting(service, &at(false), &mut |socket, via| {
                steered.push((Backlog::start(socket)?, via));
                Ok(())
            })?;
        }
        Ok(Self { listeners, steered, report })
    }
}

/// How listeners for intercepted clients are bound.
struct Inner<'a> {
    netns: Option<IpAddr>,
    wait_for_bytes: bool,
    listening: &'a Listening,
}

/// Binds one listener for each kind of intercepted client and hands it to `add`.
fn intercepting(
    service: &config::Service,
    inner: &Inner<'_>,
    add: &mut dyn FnMut(Socket, Via) -> io::Result<()>,
) -> anyhow::Result<ListenerSet> {
    let mut set = ListenerSet::default();
    let mut listen = |address: SocketAddr, via| -> io::Result<SocketAddr> {
        let socket = net::bind(address, false, inner.wait_for_bytes)?;
        let address = socket.local_addr()?.as_socket().ok_or(io::ErrorKind::InvalidData)?;
        inner.listening.add(address);
        add(socket, via)?;
        Ok(address)
    };
    let v4 = listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), Via::Loopback);
    set.loopback_v4 = v4.context("listening on 127.0.0.1")?.port();
    match listen(SocketAddr::from((Ipv6Addr::LOCALHOST, 0)), Via::Loopback) {
        Ok(v6) => set.loopback_v6 = v6.port(),
        Err(error) => tracing::warn!(
            service = service.name, %error,
            "no listener on ::1: IPv6 clients reach their origins directly"
        ),
    }
    if let Some(address) = inner.netns {
        let bound = listen(SocketAddr::new(address, 0), Via::OtherNetns)
            .with_context(|| format!("intercept_from_netns: listening on {address}"))?;
        set.netns = Some(bound);
    }
    Ok(set)
}
