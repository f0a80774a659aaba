//! Waiting for a client's next request.

use std::io::{self, ErrorKind};
use std::pin::pin;

use super::Context;
use super::steered::{Call, Steered};
use crate::boundary::CloseReason;
use crate::boundary::http1::{RequestHead, RequestReader, RequestStep};
use crate::buffers::Inbox;
use crate::net::Stream;
use crate::pool::{Lease, TakenOver};

/// What came.
pub(super) enum Next {
    /// A complete head, at the start of the inbox.
    Head(RequestHead),
    /// Bytes that cannot be read with certainty, at the start of the inbox.
    Tunnel(CloseReason),
    /// An exchange that the kernel has begun.
    TakeOver(Box<(Lease, TakenOver)>),
    /// The kernel could not complete an exchange.
    Broken,
    /// Nothing: the client has left or was idle for too long, or the daemon is stopping.
    Gone,
}

/// Reads on until the inbox begins with a complete request head.
pub(super) async fn next(
    context: &Context,
    client: &Stream,
    inbox: &mut Inbox,
    steered: Option<&Steered>,
) -> Next {
    let mut reader = RequestReader::default();
    let mut begun = false;
    loop {
        // An empty line before a request is some old client's habit (RFC 9112 section 2.2).
        while !begun && inbox.bytes().starts_with(b"\r\n") {
            inbox.consume(2);
        }
        begun |= !matches!(inbox.bytes(), b"" | b"\r");
        if begun {
            match reader.read(inbox.bytes()) {
                RequestStep::Head(head) => return Next::Head(head),
                RequestStep::Tunnel(reason) => return Next::Tunnel(reason),
                RequestStep::Incomplete if inbox.room().is_empty() => {
                    return Next::Tunnel(CloseReason::AmbiguousRequest);
                }
                RequestStep::Incomplete => {}
            }
        }
        let received = match steered {
            None => receive(context, client, inbox).await,
            // Boxed: the commoner clients' tasks must not be larger for these.
            Some(steered) => {
                match Box::pin(receive_or_hear(context, client, inbox, steered)).await {
                    Ok(received) => received,
                    Err(Call::TakeOver(exchange)) => return Next::TakeOver(exchange),
                    Err(Call::Broken) => return Next::Broken,
                }
            }
        };
        match received {
            Ok(1..) => {}
            // A head that is cut off is nobody's request.
            Ok(0) | Err(_) => return Next::Gone,
        }
    }
}

/// Receives some bytes, unless the kernel hands something over before.
async fn receive_or_hear(
    context: &Context,
    client: &Stream,
    inbox: &mut Inbox,
    steered: &Steered,
) -> Result<io::Result<usize>, Call> {
    let received = loop {
        match client.try_recv(inbox.room()) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            received => break received,
        }
        inbox.release();
        let idle = inbox.is_empty();
        // Whatever the reason, an end must not overtake what the kernel has sent.
        let ending = async {
            tokio::select! {
                () = context.stop.left() => {}
                () = tokio::time::sleep(context.timeouts.client_idle) => {}
            }
            steered.may_end().await;
        };
        tokio::select! {
            biased;
            call = steered.called() => return Err(call),
            readable = client.readable() => {
                if let Err(error) = readable {
                    break Err(error);
                }
            }
            () = ending, if idle => return Ok(Ok(0)),
            () = tokio::time::sleep(context.timeouts.client_stall), if !idle => {
                break Err(ErrorKind::TimedOut.into());
            }
        }
    };
    if let Ok(n) = received {
        inbox.filled(n);
    }
    // Whatever came, it is later than what the programs have said before.
    match steered.hear() {
        Some(call) => Err(call),
        None if matches!(received, Ok(0)) && !steered.is_gone() => {
            // It still reads.
            tokio::select! {
                biased;
                call = steered.called() => Err(call),
                () = steered.may_end() => Ok(received),
            }
        }
        None => {
            steered.relayed();
            Ok(received)
        }
    }
}

/// Receives some bytes into the inbox, which holds no buffer while there is nothing to put in it.
async fn receive(context: &Context, client: &Stream, inbox: &mut Inbox) -> io::Result<usize> {
    loop {
        match client.try_recv(inbox.room()) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Ok(n) => {
                inbox.filled(n);
                return Ok(n);
            }
            Err(e) => return Err(e),
        }
        inbox.release();
        let mut readable = pin!(client.readable());
        if let Some(readable) = context.ticks.outrun(&mut readable).await {
            readable?;
            continue;
        }
        let idle = inbox.is_empty();
        let limit = if idle { context.timeouts.client_idle } else { context.timeouts.client_stall };
        tokio::select! {
            biased;
            readable = readable => readable?,
            () = context.stop.left(), if idle => return Ok(0),
            () = tokio::time::sleep(limit) => return Err(ErrorKind::TimedOut.into()),
        }
    }
}
