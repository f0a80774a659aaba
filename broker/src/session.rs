//! The flow: one client connection from its first byte to its last.
//!
//! `http1` leases an origin socket for each exchange and returns it at the boundary; `opaque`
//! leases one for the whole connection. Both own the client's socket and all its bytes: nothing of
//! one session is reachable from another but through a pool, and a pool takes only sockets that
//! stand at a boundary.

mod exchange;
mod opaque;
mod refusal;
mod request;
mod steered;

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

pub use opaque::opaque;
pub use steered::Steered;

use self::exchange::{After, Exchanging, Kept};
use self::request::Next;
use crate::buffers::{Buffers, Inbox};
use crate::config::retries::Retries;
use crate::config::{Affinity, Timeouts};
use crate::net::{Queue, Stream};
use crate::pool::budget::RetryPermit;
use crate::pool::{Lease, Pool, Refusal};
use crate::stats::ServiceMetrics;
use crate::ticks::Ticks;

/// How long a client without a request may send one after a stop was asked for.
pub const LAST_REQUEST: Duration = Duration::from_millis(200);

/// Longest time, and most bytes, a client may go on sending after its connection was ended.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: usize = 1 << 20;

/// What the sessions of one service in one worker have in common.
pub struct Context {
    /// The service's time limits.
    pub timeouts: Timeouts,
    /// When a request is tried on another socket.
    pub retries: Retries,
    /// The service's counters.
    pub metrics: Arc<ServiceMetrics>,
    /// The worker's buffers.
    pub buffers: Buffers,
    /// Raised when the daemon is stopping.
    pub stop: Rc<Stop>,
    /// What takes longer than that is worth more care: timers, and a registration of the client's
    /// socket to see whether it is still there.
    pub ticks: Rc<Ticks>,
}

/// A flag that sessions wait on while they have nothing to do.
#[derive(Default)]
pub struct Stop {
    raised: Cell<bool>,
    notify: Notify,
}

impl Stop {
    /// Ends every session: with the response to its current or next exchange, or soon if there is none.
    pub fn raise(&self) {
        self.raised.set(true);
        self.notify.notify_waiters();
    }

    /// Whether it was raised.
    pub fn is_raised(&self) -> bool {
        self.raised.get()
    }

    /// Waits until a client without a request is left. One whose next request is on its way just now
    /// is told with the response, which costs it nothing.
    async fn left(&self) {
        if !self.is_raised() {
            self.notify.notified().await;
        }
        tokio::time::sleep(LAST_REQUEST).await;
    }
}

/// Serves an http1 client: request after request, each with an origin socket of its own choice.
/// With `steered`, those that the kernel does not serve.
pub async fn http1(
    context: &Context,
    pool: &Pool,
    client: Stream,
    affinity: Affinity,
    steered: Option<&Steered>,
) {
    let mut inbox = Inbox::new(&context.buffers);
    let mut kept = Kept::default();
    let after = loop {
        // Whatever the kernel has begun for the client, the end of the daemon must not look like
        // the end of it.
        client.abort_on_close(steered.is_some());
        let next = request::next(context, &client, &mut inbox, steered).await;
        let exchanging = Exchanging { context, pool, client: &client, affinity, steered };
        // If the daemon ends in the middle, the client must not take a part for the whole.
        client.abort_on_close(!matches!(next, Next::Gone));
        let after = match next {
            Next::Head(head) => exchanging.run(&mut inbox, &head, &mut kept).await,
            Next::TakeOver(begun) => {
                let (lease, exchange) = *begun;
                Box::pin(exchanging.take_over(lease, &exchange, &mut kept)).await
            }
            Next::Broken => After::Abort,
            // Boxed here and below: what is rare must not make every session's task larger.
            Next::Tunnel(reason) => {
                Box::pin(exchanging.tunnel(&mut inbox, reason, &mut kept)).await
            }
            Next::Gone => After::Close,
        };
        client.abort_on_close(matches!(after, After::Abort));
        if !matches!(after, After::NextRequest) {
            break after;
        }
        if let Some(steered) = steered
            && inbox.is_empty()
            && kept.is_empty()
            && !context.stop.is_raised()
        {
            steered.done(&client);
        }
    };
    kept.end();
    let lingers = match after {
        After::Abort => false,
        After::Linger => true,
        After::NextRequest | After::Close => !inbox.is_empty() || client.peek() == Queue::Bytes,
    };
    if lingers {
        linger(&client, &mut inbox).await;
    }
}

/// Ends a connection on which the client may still be sending. Closing it with bytes unread would
/// reset it, and throw away what of the response is not sent yet (RFC 9112 section 9.6).
async fn linger(client: &Stream, inbox: &mut Inbox) {
    inbox.consume(inbox.bytes().len());
    client.shutdown();
    let drain = async {
        let mut drained = 0;
        while let Ok(n @ 1..) = client.recv(inbox.room()).await {
            drained += n;
            if drained >= LINGER_BYTES_MAX {
                break;
            }
        }
    };
    // Either way the socket is closed now.
    tokio::time::timeout(LINGER, drain).await.ok();
}

/// Why a session has no lease.
enum NoLease {
    Refused(Refusal),
    ClientGone,
}

/// Checks a socket out, unless the client gives up first.
async fn checkout(
    context: &Context,
    pool: &Pool,
    client: &Stream,
    avoid: Option<SocketAddr>,
    retry: Option<RetryPermit>,
) -> Result<Lease, NoLease> {
    let mut checkout = std::pin::pin!(pool.checkout(avoid, retry));
    if let Some(result) = context.ticks.outrun(&mut checkout).await {
        return result.map_err(NoLease::Refused);
    }
    tokio::select! {
        biased;
        result = checkout => result.map_err(NoLease::Refused),
        () = client.reset() => {
            context.metrics.clients_gone.inc();
            Err(NoLease::ClientGone)
        }
    }
}
