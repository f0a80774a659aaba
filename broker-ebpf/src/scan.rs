//! Tells a plain HTTP/1.1 message from all others, byte by byte.
//!
//! A plain request is one that is complete, alone in its message and leaves nothing behind on the
//! connection; a plain response is one whose end is known from its head. Only these may pass
//! without the daemon, so the law here is: *not plain* may be said of any message, but of a plain
//! one everything that is said must be what `broker::boundary::http1`, which reads the same bytes
//! in user space, finds. The property tests beside that reader hold the two together.
//!
//! A scanner is a few integers that a program feeds from a `bpf_loop()` callback. All zero is its
//! initial state, so it can live in a map value, and should: the verifier expects anything there.
//! On the stack it follows known values from call to call, which nearly uses up what it is willing
//! to look at. Much of what a byte costs is the call, so a callback should push several. No byte
//! makes a scanner look outside of itself, and words are compared whole, never by hash.

#![expect(clippy::inline_always, reason = "the verifier follows bounds within a function only")]

mod head;
mod request;
mod response;
mod tail;
#[cfg(test)]
mod tests;

pub use request::{PlainRequest, RequestScan, scan_request};
pub use response::{PlainResponse, ResponseScan, scan_response};

/// Longest head that is read, its blank line included; the same as in user space.
pub const HEAD_BYTES_MAX: u32 = 64 * 1024;

/// Why a message is not plain, or does not pass without the daemon although it is.
///
/// Of several reasons the one is told that an operator can do most about: what cannot be read,
/// then what is not there yet, then that the connection was to be closed, then the rest.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WhyNot {
    /// Not clean HTTP/1.1: bad lines, malformed or repeated lengths, another protocol.
    Odd = 0,
    /// The head is longer than is looked at.
    TooLong = 1,
    /// `Connection: close`, or HTTP/1.0.
    Close = 2,
    /// Fields that mean more than this exchange: upgrades, `Expect`, connection options,
    /// credentials that may belong to the connection.
    Fields = 3,
    /// Request: its end is not in the message.
    Partial = 4,
    /// Request: a method other than GET, HEAD, OPTIONS, DELETE, POST and PUT.
    Method = 5,
    /// Request: a transfer coding, a length where no body is expected, or none where one is.
    Body = 6,
    /// Request: more bytes follow it in the message.
    Pipelined = 7,
    /// Response: its head is not in one piece.
    SplitHead = 8,
    /// Response: an interim one.
    Informational = 9,
    /// Response: a transfer coding.
    Chunked = 10,
    /// Response: no length, so the end of its connection is its end.
    NoLength = 11,
    /// Response: longer than may pass this way.
    Large = 12,
    /// Response: more bytes than it has came with it.
    Surplus = 13,
    /// The client's socket has become a blocking one.
    Blocking = 14,
    /// No origin socket was idle.
    NoIdle = 15,
    /// Response: the origin says that it has failed. The daemon decides what follows from that.
    Failed = 16,
    /// The client does not read what it gets.
    Unread = 17,
}

impl WhyNot {
    /// All reasons, each at the index that is its number.
    pub const ALL: [Self; 18] = [
        Self::Odd,
        Self::TooLong,
        Self::Close,
        Self::Fields,
        Self::Partial,
        Self::Method,
        Self::Body,
        Self::Pipelined,
        Self::SplitHead,
        Self::Informational,
        Self::Chunked,
        Self::NoLength,
        Self::Large,
        Self::Surplus,
        Self::Blocking,
        Self::NoIdle,
        Self::Failed,
        Self::Unread,
    ];

    /// A stable name, for metrics and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Odd => "odd",
            Self::TooLong => "too_long",
            Self::Close => "close",
            Self::Fields => "fields",
            Self::Partial => "partial",
            Self::Method => "method",
            Self::Body => "body",
            Self::Pipelined => "pipelined",
            Self::SplitHead => "split_head",
            Self::Informational => "informational",
            Self::Chunked => "chunked",
            Self::NoLength => "no_length",
            Self::Large => "large",
            Self::Surplus => "surplus",
            Self::Blocking => "blocking",
            Self::NoIdle => "no_idle",
            Self::Failed => "failed",
            Self::Unread => "unread",
        }
    }
}
