//! An origin socket and its watch while idle.

use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Wake, Waker};

use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::budget::ConnectionPermit;
use super::idle::Life;
use super::stock::Attached;
use crate::net::{Queue, Stream};

/// How long the origin may take to end a connection that we have ended, and how many reads of what it
/// still sends it may cost.
const DRAIN_MAX: Duration = Duration::from_secs(1);
const DRAIN_READS_MAX: usize = 16;

/// An open origin socket.
pub(super) struct Connection {
    pub(super) stream: Stream,
    /// Its place among the sockets that the kernel can use. Declared after `stream`: the place is
    /// free once the socket is closed.
    pub(super) attached: Option<Attached>,
    /// Given back once the socket is closed.
    _permit: ConnectionPermit,
    /// Unique within the pool.
    pub(super) id: u64,
    pub(super) life: Life,
    /// Since when it is idle, if it is.
    pub(super) idle_since: Option<Instant>,
    waker: Waker,
}

impl Connection {
    /// `origin` is its place, `id` the connection's number within the pool.
    pub(super) fn new(
        stream: Stream,
        permit: ConnectionPermit,
        (origin, id): (usize, u64),
        life: Life,
        events: &Arc<IdleEvents>,
    ) -> Self {
        let waker = Waker::from(Arc::new(IdleWaker { origin, id, events: Arc::clone(events) }));
        Self { stream, attached: None, _permit: permit, id, life, idle_since: None, waker }
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
