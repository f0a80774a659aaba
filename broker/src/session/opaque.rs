//! An opaque client: one origin socket for the whole connection.

use std::cell::RefCell;

use super::{Context, NoLease, checkout};
use crate::boundary::opaque::Quiet;
use crate::boundary::{CloseReason, Verdict};
use crate::config::OpaqueReuse;
use crate::net::Stream;
use crate::pool::Pool;
use crate::relay::{Tunnel, TunnelEnd};

/// Serves an opaque client.
pub async fn opaque(context: &Context, pool: &Pool, client: Stream, reuse: OpaqueReuse) {
    let mut lease = match checkout(context, pool, &client, None, None).await {
        Ok(lease) => lease,
        Err(no_lease) => {
            // There are no words that every protocol understands: a reset is the clean error.
            client.abort_on_close(true);
            if let NoLease::Refused(refusal) = no_lease {
                tracing::debug!(?refusal, "opaque client refused");
            }
            return;
        }
    };
    // There is a connection: whatever failed before is over.
    drop(lease.take_retry());
    // Until both sides have ended in order, what the client has may be cut off.
    client.abort_on_close(true);
    let quiet = RefCell::new(Quiet::default());
    let expected = lease.is_reused().then_some(&[][..]);
    let end = Tunnel {
        client: &client,
        origin: lease.stream(),
        timeouts: &context.timeouts,
        buffers: &context.buffers,
        metrics: &context.metrics,
        quiet: match reuse {
            OpaqueReuse::Quiet { settle } => Some((&quiet, settle)),
            OpaqueReuse::Never => None,
        },
        ends_when_silent_for: None,
        expected,
    }
    .run(&[])
    .await;
    context.metrics.exchanges.inc();
    let verdict = match end {
        TunnelEnd::Quiet if lease.is_silent() => Verdict::Return,
        TunnelEnd::Quiet => Verdict::Close(CloseReason::Unsolicited),
        TunnelEnd::Closed | TunnelEnd::Silent => Verdict::Close(CloseReason::NoBoundary),
        TunnelEnd::Unexpected => {
            context.metrics.origin_failed.inc();
            Verdict::Close(CloseReason::Unsolicited)
        }
        TunnelEnd::ClientBroke => {
            context.metrics.clients_gone.inc();
            // Nor must the origin take a request that was cut off for a complete one.
            lease.stream().abort_on_close(true);
            Verdict::Close(CloseReason::ClientGone)
        }
        TunnelEnd::OriginBroke => {
            context.metrics.origin_failed.inc();
            Verdict::Close(CloseReason::OriginError)
        }
    };
    let whole = matches!(end, TunnelEnd::Closed | TunnelEnd::Quiet | TunnelEnd::Silent);
    client.abort_on_close(!whole);
    lease.settle(verdict, None);
}
