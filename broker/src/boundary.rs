//! Where an exchange ends, and whether the origin socket is known to be clean there.
//!
//! Everything below is pure: bytes in, decisions out. The session does the input and output, and
//! the kernel programs must never disagree with what is decided here.

pub mod http1;
pub mod opaque;

/// What to do with the origin socket once an exchange is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The socket is at a boundary and may serve anybody.
    Return,
    /// The socket must never serve another client.
    Close(CloseReason),
}

/// Why an origin socket is closed rather than reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CloseReason {
    /// The origin said that it closes: `Connection: close`, or HTTP/1.0 without keep-alive.
    OriginPersistence,
    /// The response body ends where the connection ends.
    BodyUntilClose,
    /// The connection became a tunnel: 101, or CONNECT with 2xx.
    Tunnel,
    /// The request's framing has more than one reading.
    AmbiguousRequest,
    /// The response's framing has more than one reading.
    AmbiguousResponse,
    /// The final response was complete before the request was.
    EarlyResponse,
    /// The origin ended the connection in the middle of a response.
    Truncated,
    /// Bytes after the end of the response, or with no request under way.
    Unsolicited,
    /// The origin has answered a request's body as if it were a request of its own, and may do so with this
    /// one's.
    UnreadBody,
    /// The client went away before the end.
    ClientGone,
    /// Authentication that belongs to the connection (NTLM, Negotiate).
    ConnectionAuth,
    /// The service's protocol gives no boundary (opaque), or its conditions were not met.
    NoBoundary,
    /// The origin may wait for more of the request, and would take the next client's for it: the client
    /// has sent urgent data, which most origins never read among the other bytes, or TCP has not taken
    /// all.
    IncompleteRequest,
    /// Reading from or writing to the origin failed.
    OriginError,
    /// A time limit was reached.
    Timeout,
}
