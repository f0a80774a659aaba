//! An origin socket and its watch while idle.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Wake, Waker};

use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::budget::ConnectionPermit;
use super::idle::Life;
use super::origin::Origin;
use super::stock::Attached;
use crate::net::{Queue, Stream};

/// How long the origin may take to end a connection that we have ended, and how many reads of what it
/// still sends it may cost.
const DRAIN_MAX: Duration = Duration::from_secs(1);
const DRAIN_READS_MAX: usize = 16;

/// An open origin socket. A pointer, because it changes hands a dozen times for each exchange.
pub(super) struct Connection(Box<Open>);

pub(super) struct Open {
    pub(super) stream: Stream,
    /// Its place among the sockets that the kernel can use. Declared after `stream`: the place is
    /// free once the socket is closed.
    pub(super) attached: Option<Attached>,
    /// Given back once the socket is closed.
    _permit: ConnectionPermit,
    /// Unique within the pool.
    pub(super) id: u64,
    pub(super) life: Life,
    /// Somebody else, such as another broker, has rewritten where it goes, and may steer it: it cannot be
    /// in two hands.
    pub(super) rewritten: bool,
    /// When it has last taken a request that had a body.
    pub(super) body_taken: Option<Instant>,
    /// Since when it is idle, if it is.
    pub(super) idle_since: Option<Instant>,
    waker: Waker,
}

impl Connection {
    /// `id` is the connection's number within the pool.
    pub(super) fn new(
        stream: Stream,
        permit: ConnectionPermit,
        (origin, id): (&Origin, u64),
        life: Life,
        events: &Arc<IdleEvents>,
    ) -> Self {
        let events = Arc::clone(events);
        let waker = Waker::from(Arc::new(IdleWaker { origin: origin.place, id, events }));
        // Its peer's address would be what we have dialled.
        let is_local = stream.local_addr().is_ok_and(|own| own.ip().to_canonical().is_loopback());
        let rewritten = is_local && !origin.address.ip().to_canonical().is_loopback();
        let (attached, idle_since, body_taken) = (None, None, None);
        Self(Box::new(Open {
            stream,
            attached,
            _permit: permit,
            id,
            life,
            rewritten,
            body_taken,
            idle_since,
            waker,
        }))
    }

    /// Ends the connection, and keeps its permit until the origin has ended it, too.
    ///
    /// It keeps its place among the kernel's sockets as well: what the programs have passed on and
    /// nobody has read would be lost with that, and TCP complains of a gap.
    pub(super) async fn drain(self) {
        self.stream.shutdown();
        let ended = async {
            // What the origin still sends is nobody's.
            for _ in 0..DRAIN_READS_MAX {
                if !matches!(self.stream.recv(&mut [0; 4096]).await, Ok(1..)) {
                    return;
                }
            }
        };
        tokio::time::timeout(DRAIN_MAX, ended).await.ok();
    }

    /// Looks at the receive queue, and has the pool woken when anything comes.
    pub(super) fn watch(&self) -> Queue {
        self.stream.watch(&mut Context::from_waker(&self.waker))
    }
}

impl Deref for Connection {
    type Target = Open;

    fn deref(&self) -> &Open {
        &self.0
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut Open {
        &mut self.0
    }
}

/// Idle sockets on which something happened. A waker must be `Send`, hence the mutex; it is only
/// ever taken by the worker's own thread.
#[derive(Default)]
pub(super) struct IdleEvents {
    happened: Mutex<Vec<(usize, u64)>>,
    notify: Notify,
}

impl IdleEvents {
    pub(super) async fn wait(&self) {
        self.notify.notified().await;
    }

    /// Origin index and connection id of each event so far.
    pub(super) fn take(&self) -> Vec<(usize, u64)> {
        std::mem::take(&mut *self.happened.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Made once for each socket, so that going idle allocates nothing.
struct IdleWaker {
    origin: usize,
    id: u64,
    events: Arc<IdleEvents>,
}

impl Wake for IdleWaker {
    fn wake(self: Arc<Self>) {
        let mut happened = self.events.happened.lock().unwrap_or_else(PoisonError::into_inner);
        happened.push((self.origin, self.id));
        drop(happened);
        self.events.notify.notify_one();
    }
}
