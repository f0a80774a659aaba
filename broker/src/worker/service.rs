//! One service in one worker: its pools, and what its clients get.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use broker_ebpf::abi::EventKind;

use super::crew::{Crew, Job};
use super::dialled::Dialled;
use super::room::{self, Room};
use super::{Common, Place};
use crate::boundary::{CloseReason, Verdict};
use crate::clock;
use crate::config::{self, OpaqueReuse, Protocol, Route};
use crate::datapath::Datapath;
use crate::datapath::steering::Steering;
use crate::net::{Backlog, Listener, Queue, Stream};
use crate::origin::Chosen;
use crate::pool::{self, Pool, Steer, Use};
use crate::session::{self, Context, Steered};
use crate::stats::ServiceRecords;

/// How a client came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Via {
    /// It dialled a listen address.
    Listen,
    /// The kernel rewrote its `connect()` to our loopback listener.
    Loopback,
    /// The same, from another network namespace to an address that others can reach too.
    OtherNetns,
}

pub(super) struct Service {
    name: String,
    protocol: Protocol,
    pools: Pools,
    records: Arc<ServiceRecords>,
    datapath: Arc<dyn Datapath>,
    context: Context,
    room: Rc<Room>,
    serving: Cell<usize>,
    crew: Rc<Crew<Client>>,
    place: Place,
    /// Set if the kernel serves some of the clients.
    steering: Option<Arc<Steering>>,
    backlogs: Vec<(Backlog, SocketAddr, Via)>,
    /// Accepted clients that the kernel may serve, by both ends of their connections.
    steered: RefCell<HashMap<Ends, Accepted>>,
    /// Hears what the programs have said meanwhile.
    hear: RefCell<Option<Rc<dyn Fn()>>>,
}

enum Pools {
    Balance(Rc<Pool>),
    Dialled(Dialled),
}

impl Service {
    pub(super) fn new(
        config: &config::Service,
        place: Place,
        records: Arc<ServiceRecords>,
        shared: &pool::Common,
        common: &Common,
        backlogs: Vec<(Backlog, Via)>,
    ) -> Self {
        let Common { environment, buffers, stop, ticks, room } = common;
        let datapath = Arc::clone(&environment.datapath);
        let steer = datapath.steering().and_then(|steering| {
            let first_group = steering.layout().first_group(place.service, place.worker)?;
            Some(Steer {
                steering: Arc::clone(steering),
                worker: place.worker,
                first_group,
                places: steering.layout().places(place.service),
                always: config.steer == config::Steer::Kernel,
            })
        });
        let steering = steer.as_ref().map(|steer| Arc::clone(&steer.steering));
        let usage = match config.protocol {
            Protocol::Http1 { .. } | Protocol::Opaque { reuse: OpaqueReuse::Quiet { .. } } => {
                Use::Reused
            }
            Protocol::Opaque { reuse: OpaqueReuse::Never } => Use::Once,
        };
        let new_pool = {
            let (settings, environment) = (config.pool.clone(), environment.clone());
            let records = Arc::clone(&records);
            let shared = shared.clone();
            move |origins: &[Chosen]| {
                let (settings, records) = (settings.clone(), Arc::clone(&records));
                let (environment, steer) = (environment.clone(), steer.clone());
                let shared = shared.clone();
                let pool = Pool::new(settings, usage, shared, records, environment, steer);
                pool.set_origins(origins);
                Rc::new(pool)
            }
        };
        let pools = match config.route {
            Route::Balance => Pools::Balance(new_pool(&[])),
            Route::Dialled { origins_max, origin_idle } => Pools::Dialled(Dialled::new(
                origins_max,
                origin_idle,
                Box::new(new_pool),
                Arc::clone(&records),
            )),
        };
        let context = Context {
            timeouts: config.timeouts,
            retries: config.retries,
            metrics: Arc::clone(&records.metrics),
            buffers: buffers.clone(),
            stop: Rc::clone(stop),
            ticks: Rc::clone(ticks),
        };
        Self {
            name: config.name.clone(),
            protocol: config.protocol,
            pools,
            records,
            datapath,
            context,
            room: Rc::clone(room),
            serving: Cell::new(0),
            crew: Rc::default(),
            place,
            steering,
            backlogs: backlogs
                .into_iter()
                .filter_map(|(backlog, via)| {
                    let address = backlog.local_addr().ok()?;
                    Some((backlog, address, via))
                })
                .collect(),
            steered: RefCell::default(),
            hear: RefCell::default(),
        }
    }

    /// Serves a client, in a task that serves nobody else meanwhile.
    pub(super) fn serve(self: &Rc<Self>, client: Stream, via: Via, listener: &Listener) {
        let metrics = &self.records.metrics;
        metrics.clients.inc();
        let Some(pool) = self.pool(&client, via, listener) else {
            // Nobody knows where it wanted to go: better a reset than the wrong origin.
            client.abort_on_close(true);
            metrics.destination_unknown.inc();
            return;
        };
        self.crew.take_on(Client { serving: Serving::enter(self), pool, stream: client });
    }

    /// Whether the kernel serves some of the clients.
    pub(super) fn is_steered(&self) -> bool {
        self.steering.is_some()
    }

    /// Position in the configuration.
    pub(super) fn position(&self) -> usize {
        self.place.service
    }

    /// Says how to hear what the programs have said meanwhile.
    pub(super) fn hear_with(&self, hear: Rc<dyn Fn()>) {
        *self.hear.borrow_mut() = Some(hear);
    }

    /// Takes the connections of clients that the kernel may serve. Most have ended already: their
    /// one exchange was steered.
    pub(super) fn accept_backlog(self: &Rc<Self>) {
        for (backlog, listener, via) in &self.backlogs {
            loop {
                match backlog.accept_queued() {
                    Ok(client) => self.serve_steered(client, *listener, *via),
                    Err(error) if room::is_passing(&error) => {}
                    Err(error) => {
                        if error.kind() != io::ErrorKind::WouldBlock {
                            self.accept_failed(&error);
                            self.turn_steered_away(backlog, *listener);
                        }
                        break;
                    }
                }
            }
        }
    }

    fn serve_steered(self: &Rc<Self>, client: Stream, listener: SocketAddr, via: Via) {
        let metrics = &self.records.metrics;
        metrics.clients.inc();
        // A reset connection has no address any more; nobody is there to be served.
        let Ok(peer) = client.peer_addr() else { return };
        let ends = (peer, listener);
        let destination =
            || self.datapath.original_destination(peer, listener).ok().flatten().is_some();
        match client.peek() {
            Queue::Failed => return,
            Queue::Ended if !destination() => return,
            // Strangers can reach that listener, too.
            _ if via == Via::OtherNetns && !destination() => {
                client.abort_on_close(true);
                metrics.destination_unknown.inc();
                return;
            }
            Queue::Ended | Queue::Empty | Queue::Bytes => {}
        }
        // Should the daemon end now, what the kernel has begun must not look complete.
        client.abort_on_close(true);
        let parked = Accepted::Parked(client, clock::now());
        self.steered.borrow_mut().insert(ends, parked);
    }

    /// Drops parked clients that have ended, and watches those that have been there for a while.
    fn look_at_parked(self: &Rc<Self>) {
        let now = clock::now();
        let mut waiting = Vec::new();
        self.steered.borrow_mut().retain(|ends, accepted| {
            let Accepted::Parked(client, since) = accepted else { return true };
            let queue = client.peek();
            if now.saturating_duration_since(*since) >= PARKED_MAX || queue == Queue::Bytes {
                waiting.push(*ends);
            }
            let gone = self.is_gone(queue, *ends);
            client.abort_on_close(!gone);
            !gone
        });
        for ends in waiting {
            self.session(ends);
        }
    }

    /// Whether a client that was never served has ended, and its socket is closed.
    fn is_gone(&self, queue: Queue, (peer, listener): Ends) -> bool {
        let dialled = || self.datapath.original_destination(peer, listener);
        queue == Queue::Failed || queue == Queue::Ended && !matches!(dialled(), Ok(Some(_)))
    }

    /// The session of the client with these ends, if it has been accepted.
    fn session(self: &Rc<Self>, ends: Ends) -> Option<Rc<Steered>> {
        let mut all = self.steered.borrow_mut();
        let client = match all.remove(&ends)? {
            Accepted::Session(steered) => {
                all.insert(ends, Accepted::Session(Rc::clone(&steered)));
                return Some(steered);
            }
            Accepted::Parked(client, _) => client,
        };
        let (Pools::Balance(pool), Some(steering), Some(hear), Protocol::Http1 { affinity }) =
            (&self.pools, &self.steering, self.hear.borrow().clone(), self.protocol)
        else {
            return None;
        };
        let steered =
            Rc::new(Steered::new(ends, Arc::clone(steering), Arc::clone(&self.datapath), hear));
        all.insert(ends, Accepted::Session(Rc::clone(&steered)));
        let session = Rc::clone(&steered);
        let (serving, pool) = (Serving::enter(self), Rc::clone(pool));
        tokio::task::spawn_local(Box::pin(async move {
            let service = &serving.0;
            session::http1(&service.context, &pool, client, affinity, Some(&steered)).await;
            let mut all = service.steered.borrow_mut();
            // Its port may have come back with another client meanwhile.
            let own = |a: &Accepted| matches!(a, Accepted::Session(s) if Rc::ptr_eq(s, &steered));
            if all.get(&ends).is_some_and(own) {
                all.remove(&ends);
            }
        }));
        Some(session)
    }

    /// From now on exchanges go to these origins.
    pub(super) fn set_origins(&self, origins: &[Chosen]) {
        if let Pools::Balance(pool) = &self.pools {
            pool.set_origins(origins);
        }
    }

    /// The programs have said something about a slot.
    pub(super) fn look_at_slot(self: &Rc<Self>, place: usize, slot: usize) {
        let Pools::Balance(pool) = &self.pools else { return };
        if let Some(steered) = pool.look_at_slot(place, slot) {
            self.deal_with(steered);
        }
    }

    /// Looks for what no event has told.
    pub(super) fn look_at_stock(self: &Rc<Self>) {
        self.look_at_parked();
        let Pools::Balance(pool) = &self.pools else { return };
        for steered in pool.look_at_stock(self.context.timeouts.origin_stall) {
            self.deal_with(steered);
        }
    }

    fn deal_with(self: &Rc<Self>, steered: pool::Steered) {
        match steered {
            pool::Steered::TakeOver(lease, exchange) => {
                if let Some(session) = self.session_of(exchange.client) {
                    session.take_over(lease, exchange);
                } else {
                    self.context.metrics.clients_gone.inc();
                    lease.settle(Verdict::Close(CloseReason::ClientGone), None);
                }
            }
            pool::Steered::Broken { client } => {
                self.context.metrics.origin_failed.inc();
                if let Some(session) = self.session_of(client) {
                    session.break_off();
                }
            }
        }
    }

    /// A client needs the daemon. `false` if it is none of this service.
    pub(super) fn client_called(self: &Rc<Self>, kind: EventKind, client: u64, ends: Ends) -> bool {
        if !self.backlogs.iter().any(|(_, address, _)| *address == ends.1) {
            return false;
        }
        self.accept_backlog();
        let Some(session) = self.session(ends) else { return false };
        session.is(client);
        if kind == EventKind::Blocking {
            session.release();
        }
        true
    }

    /// The session of the client with this cookie.
    fn session_of(self: &Rc<Self>, client: u64) -> Option<Rc<Steered>> {
        self.accept_backlog();
        // After the accept: while this client is known, no other can have the same ends, so a
        // session that has them is its own, or of a connection that has failed.
        let ends = self.steering.as_ref()?.client(client)?;
        self.session(ends)
    }

    /// The pool of the origin, or origins, that may serve this client.
    fn pool(&self, client: &Stream, via: Via, listener: &Listener) -> Option<Rc<Pool>> {
        match (&self.pools, via) {
            (Pools::Balance(pool), Via::Listen | Via::Loopback) => Some(Rc::clone(pool)),
            // Strangers can reach that listener too: only clients that the kernel sent are served.
            (Pools::Balance(pool), Via::OtherNetns) => {
                self.destination(client, listener).map(|_| Rc::clone(pool))
            }
            (Pools::Dialled(dialled), _) => {
                Some(dialled.pool(self.destination(client, listener)?, clock::now()))
            }
        }
    }

    fn destination(&self, client: &Stream, listener: &Listener) -> Option<SocketAddr> {
        let ask =
            || self.datapath.original_destination(client.peer_addr()?, listener.local_addr()?);
        let dialled = ask().unwrap_or_else(|error| {
            tracing::warn!(service = self.name, %error, "looking up what a client dialled");
            None
        });
        dialled.map(|dialled| dialled.address)
    }

    pub(super) fn tick(&self) {
        match &self.pools {
            Pools::Balance(pool) => pool.tick(),
            Pools::Dialled(dialled) => dialled.tick(clock::now()),
        }
    }

    pub(super) fn is_warm(&self) -> bool {
        match &self.pools {
            Pools::Balance(pool) => pool.is_warm(),
            Pools::Dialled(_) => true,
        }
    }

    pub(super) fn is_serving(&self) -> bool {
        self.serving.get() > 0 || !self.steered.borrow().is_empty()
    }

    /// Closes idle origin sockets, and the others as their exchanges end. Those who are being
    /// served may still need new ones.
    pub(super) fn drain(&self) {
        match &self.pools {
            Pools::Balance(pool) => pool.drain(),
            Pools::Dialled(dialled) => dialled.drain(),
        }
    }

    pub(super) fn accept_failed(&self, error: &io::Error) {
        self.records.metrics.accept_failed.inc();
        self.room.accept_failed(&self.name, error);
    }

    /// Resets those who wait in a listener's queue, if they would wait for long: they can dial again,
    /// and are left alone then.
    pub(super) fn turn_away(&self, listener: &Listener) {
        if self.room.is_closed() {
            let reset = |client: Stream| client.abort_on_close(true);
            let clients = self.room.empty(|| listener.try_accept(), reset);
            self.records.metrics.accept_failed.add(clients);
        }
    }

    /// The same for clients that the kernel may serve. Most that it has served have ended.
    fn turn_steered_away(&self, backlog: &Backlog, listener: SocketAddr) {
        if self.room.is_closed() {
            let end = |client: Stream| {
                let peer = client.peer_addr();
                let gone = peer.is_ok_and(|peer| self.is_gone(client.peek(), (peer, listener)));
                client.abort_on_close(!gone);
            };
            let clients = self.room.empty(|| backlog.accept_queued(), end);
            self.records.metrics.accept_failed.add(clients);
        }
    }
}

/// A client of the daemon alone.
struct Client {
    serving: Serving,
    pool: Rc<Pool>,
    stream: Stream,
}

impl Job for Client {
    async fn run(self) {
        let Self { serving, pool, stream } = self;
        let service = &serving.0;
        match service.protocol {
            Protocol::Http1 { affinity } => {
                session::http1(&service.context, &pool, stream, affinity, None).await;
            }
            Protocol::Opaque { reuse } => {
                session::opaque(&service.context, &pool, stream, reuse).await;
            }
        }
    }
}

/// Both ends of a client's connection: the client's, and the listener.
type Ends = (SocketAddr, SocketAddr);

/// A client that the kernel may serve.
enum Accepted {
    /// Nothing was heard of it: most end without needing the daemon, and cost no task.
    Parked(Stream, Instant),
    /// It is, or may soon be, served.
    Session(Rc<Steered>),
}

/// How long a client is parked before its connection is watched.
const PARKED_MAX: Duration = Duration::from_millis(100);

/// A client being served, for as long as this lives.
struct Serving(Rc<Service>);

impl Serving {
    fn enter(service: &Rc<Service>) -> Self {
        service.serving.set(service.serving.get() + 1);
        service.records.metrics.clients_open.set(service.serving.get());
        Self(Rc::clone(service))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.serving.set(self.0.serving.get() - 1);
        self.0.records.metrics.clients_open.set(self.0.serving.get());
    }
}
