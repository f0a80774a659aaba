//! An opaque client: one origin socket for the whole connection.

use std::cell::RefCell;
use std::time::Duration;

use super::{Context, NoLease, checkout};
use crate::boundary::opaque::Quiet;
use crate::boundary::{CloseReason, Verdict};
use crate::config::OpaqueReuse;
use crate::net::{Queue, Stream};
use crate::pool::{Lease, Pool};
use crate::relay::{Tunnel, TunnelEnd};

/// Serves an opaque client.
pub async fn opaque(context: &Context, pool: &Pool, client: Stream, reuse: OpaqueReuse) {
    let mut lease = match checkout(context, pool, &client, None).await {
        Ok(lease) => lease,
        Err(no_lease) => {
            // There are no words that every protocol understands: a reset is the clean error.
            client.abort_on_close();
            if let NoLease::Refused(refusal) = no_lease {
                tracing::debug!(?refusal, "opaque client refused");
            }
            return;
        }
    };
    let quiet = RefCell::new(Quiet::default());
    let end = Tunnel {
        client: &client,
        origin: lease.stream(),
        timeouts: &context.timeouts,
        buffers: &context.buffers,
        metrics: &context.metrics,
    }
    .run(&[], matches!(reuse, OpaqueReuse::Quiet { .. }).then_some(&quiet))
    .await;
    context.metrics.exchanges.inc();
    match end {
        TunnelEnd::ClientBroke => context.metrics.clients_gone.inc(),
        TunnelEnd::OriginBroke => {
            // What the client has may be cut off; it must not look like an orderly end.
            client.abort_on_close();
            context.metrics.origin_failed.inc();
        }
        TunnelEnd::Quiet | TunnelEnd::Closed => {}
    }
    // The client is done; the settle time is not its concern.
    drop(client);
    let verdict = match (end, reuse) {
        (TunnelEnd::Quiet, OpaqueReuse::Quiet { settle }) => settled(&mut lease, settle).await,
        (TunnelEnd::ClientBroke, _) => Verdict::Close(CloseReason::ClientGone),
        (TunnelEnd::OriginBroke, _) => Verdict::Close(CloseReason::OriginError),
        (TunnelEnd::Quiet | TunnelEnd::Closed, _) => Verdict::Close(CloseReason::NoBoundary),
    };
    lease.settle(verdict, None);
}

/// Whether the socket stays silent for the settle time.
async fn settled(lease: &mut Lease, settle: Duration) -> Verdict {
    let origin = lease.stream();
    match tokio::time::timeout(settle, origin.readable()).await {
        Err(_elapsed) if origin.peek() == Queue::Empty => Verdict::Return,
        _ => Verdict::Close(CloseReason::Unsolicited),
    }
}
