//! One service in one worker: its pools, and what its clients get.

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use super::dialled::Dialled;
use crate::buffers::Buffers;
use crate::clock;
use crate::config::{self, OpaqueReuse, Protocol, Route};
use crate::datapath::Datapath;
use crate::net::{Listener, Stream};
use crate::pool::{Environment, Pool, Use};
use crate::session::{self, Context, Stop};
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
    serving: Cell<usize>,
}

enum Pools {
    Balance(Rc<Pool>),
    Dialled(Dialled),
}

impl Service {
    pub(super) fn new(
        config: &config::Service,
        records: Arc<ServiceRecords>,
        environment: &Environment,
        buffers: &Buffers,
        stop: Rc<Stop>,
        datapath: Arc<dyn Datapath>,
    ) -> Self {
        let usage = match config.protocol {
            Protocol::Http1 { .. } | Protocol::Opaque { reuse: OpaqueReuse::Quiet { .. } } => {
                Use::Reused
            }
            Protocol::Opaque { reuse: OpaqueReuse::Never } => Use::Once,
        };
        let new_pool = {
            let (settings, environment) = (config.pool.clone(), environment.clone());
            let records = Arc::clone(&records);
            move |origins: &[SocketAddr]| {
                let origins = origins.iter().map(|&o| (o, records.origin(o))).collect();
                let metrics = Arc::clone(&records.metrics);
                Rc::new(Pool::new(settings.clone(), usage, origins, metrics, environment.clone()))
            }
        };
        let pools = match config.route {
            Route::Balance => Pools::Balance(new_pool(&config.origins)),
            Route::Dialled { origins_max, origin_idle } => Pools::Dialled(Dialled::new(
                origins_max,
                origin_idle,
                Box::new(new_pool),
                Arc::clone(&records),
            )),
        };
        let context = Context {
            timeouts: config.timeouts,
            metrics: Arc::clone(&records.metrics),
            buffers: buffers.clone(),
            stop,
        };
        Self {
            name: config.name.clone(),
            protocol: config.protocol,
            pools,
            records,
            datapath,
            context,
            serving: Cell::new(0),
        }
    }

    /// Serves a client in a task of its own.
    pub(super) fn serve(self: &Rc<Self>, client: Stream, via: Via, listener: &Listener) {
        let metrics = &self.records.metrics;
        metrics.clients.inc();
        let Some(pool) = self.pool(&client, via, listener) else {
            // Nobody knows where it wanted to go: better a reset than the wrong origin.
            client.abort_on_close(true);
            metrics.destination_unknown.inc();
            return;
        };
        let serving = Serving::enter(self);
        // Boxed, so that the runtime moves a pointer and not the whole session.
        tokio::task::spawn_local(Box::pin(async move {
            let service = &serving.0;
            match service.protocol {
                Protocol::Http1 { affinity } => {
                    session::http1(&service.context, &pool, client, affinity).await;
                }
                Protocol::Opaque { reuse } => {
                    session::opaque(&service.context, &pool, client, reuse).await;
                }
            }
        }));
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
        ask().unwrap_or_else(|error| {
            tracing::warn!(service = self.name, %error, "looking up what a client dialled");
            None
        })
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
        self.serving.get() > 0
    }

    /// Closes idle origin sockets, and the others as their exchanges end. Those who are being
    /// served may still need new ones.
    pub(super) fn drain(&self) {
        match &self.pools {
            Pools::Balance(pool) => pool.drain(),
            Pools::Dialled(dialled) => dialled.drain(),
        }
    }

    pub(super) fn count_accept_error(&self, error: &io::Error) {
        self.records.metrics.accept_failed.inc();
        tracing::warn!(service = self.name, %error, "accept failed; pausing");
    }
}

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
