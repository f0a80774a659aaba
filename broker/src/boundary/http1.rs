//! HTTP/1.x framing: where a request ends, where its response ends, and whether anything about
//! either has a second reading.
//!
//! The broker forwards bytes unchanged and only *reads* framing, so nothing here needs to
//! understand a message; it has to be right about its end. A proxy that is lenient, as a server may
//! be, joins two requests where the origin sees one, or the reverse, and then a response reaches
//! the wrong client. Therefore this reader is strict: what is not plain HTTP/1.x is not repaired or
//! refused, it becomes a tunnel on one socket that is closed afterwards. The cost of being too
//! strict is one handshake; the cost of being too lenient is somebody else's data.
//!
//! The same reasoning decides against a general HTTP parser: those accept bare LF, folded lines or
//! spaces where some origins read something else, and hide that they did.
//!
//! * [`RequestReader`] finds a request head in the bytes held for a client.
//! * [`Exchange`] then follows one request and its response to their ends and gives the verdict.
//!
//! All state depends on the bytes and their order only, never on how reads happened to cut them.

mod body;
mod exchange;
mod field;
mod line;
mod request;
mod response;
#[cfg(test)]
mod tests;

use super::CloseReason;

pub use exchange::{BodyStep, Exchange, ResponseEnd, ResponseStep};
pub use request::{Edit, RequestHead, RequestReader, RequestStep};

/// Longest head of a request or response, its blank line included; also bounds trailers.
pub const HEAD_BYTES_MAX: usize = 64 * 1024;

/// The two versions that are read; all else is a tunnel (RFC 9112 section 2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// HTTP/1.0: a connection ends with its exchange unless both sides say keep-alive.
    Http10,
    /// HTTP/1.1: a connection persists unless a side says close.
    Http11,
}

/// A request method, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// GET.
    Get,
    /// HEAD: the response has no body.
    Head,
    /// OPTIONS.
    Options,
    /// TRACE.
    Trace,
    /// PUT.
    Put,
    /// DELETE.
    Delete,
    /// POST.
    Post,
    /// CONNECT: a 2xx response makes a tunnel.
    Connect,
    /// Any other method, with nothing known about it.
    Other,
}

impl Method {
    fn read(token: &[u8]) -> Self {
        match token {
            b"GET" => Self::Get,
            b"HEAD" => Self::Head,
            b"OPTIONS" => Self::Options,
            b"TRACE" => Self::Trace,
            b"PUT" => Self::Put,
            b"DELETE" => Self::Delete,
            b"POST" => Self::Post,
            b"CONNECT" => Self::Connect,
            _ => Self::Other,
        }
    }

    /// Whether doing it twice is as good as doing it once (RFC 9110 section 9.2.2): only such a
    /// request may be repeated after some of it was sent.
    #[must_use]
    pub fn is_idempotent(self) -> bool {
        self.is_safe() || matches!(self, Self::Put | Self::Delete)
    }

    /// Whether it asks for nothing but an answer (RFC 9110 section 9.2.1).
    #[must_use]
    pub fn is_safe(self) -> bool {
        matches!(self, Self::Get | Self::Head | Self::Options | Self::Trace)
    }
}

/// How the end of a request body is found (RFC 9112 section 6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// There is no body.
    None,
    /// The body has this many bytes.
    Length(u64),
    /// The body ends with its last chunk and trailers.
    Chunked,
}

impl Framing {
    /// Whether a body may follow the head.
    #[must_use]
    pub fn has_body(self) -> bool {
        !matches!(self, Self::None | Self::Length(0))
    }
}

/// How far one direction of an exchange has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It goes on.
    More,
    /// It is complete.
    Done,
    /// The end can no longer be known: from here on all bytes pass in both directions until both
    /// sides have closed.
    Tunnel(CloseReason),
}
