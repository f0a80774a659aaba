//! The head of a request.

use std::ops::Range;

use super::field::{Ambiguous, Fields};
use super::line::{Scan, scan};
use super::{CloseReason, Framing, HEAD_BYTES_MAX, Method, Version};

/// Longest method. Known ones have at most 17 letters; a bound lets other protocols be told apart
/// before they send an end of line.
const METHOD_BYTES_MAX: usize = 32;

/// Finds and reads a request head at the start of a growing buffer.
///
/// Each line is read once, when its end has come, so the work is linear in the bytes even if they
/// arrive one by one.
#[derive(Debug, Default)]
pub struct RequestReader {
    /// Where the first line that is not read yet starts.
    line_at: usize,
    /// Bytes of that line which need no second look.
    looked: usize,
    request_line: Option<(Method, Version)>,
    fields: Fields,
}

/// What [`RequestReader::read`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestStep {
    /// Read again once there are more bytes.
    Incomplete,
    /// A complete head.
    Head(RequestHead),
    /// Not plain HTTP/1.x, or framing with more than one reading, or a head of more than
    /// [`HEAD_BYTES_MAX`]: everything from here on passes through one socket, which is closed
    /// afterwards.
    Tunnel(CloseReason),
}

/// What a request head says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, not a state")]
pub struct RequestHead {
    /// Its bytes, blank line included.
    pub len: usize,
    /// The method.
    pub method: Method,
    /// The version of the request line.
    pub version: Version,
    /// Where the request body ends.
    pub framing: Framing,
    /// Whether the client wants its connection to stay open (RFC 9112 section 9.3).
    pub client_persists: bool,
    /// What to change before the head is forwarded; [`Exchange`](super::Exchange) relies on it
    /// being done.
    pub edit: Option<Edit>,
    /// Whether the origin, which sees the edited head, is asked to keep its connection open.
    pub origin_persists: bool,
    /// Asks for a 100 before it sends its body (RFC 9110 section 10.1.1).
    pub expects_continue: bool,
    /// The framing is plain, but origins are known that get it wrong: a body with a safe method or
    /// with DELETE (RFC 9110 sections 9.3.1 and 9.3.5 warn of it), or an unknown `Expect`. The request is forwarded like
    /// any other; its socket is not reused.
    pub doubtful: bool,
    /// Carries credentials that authenticate the connection instead of the request.
    pub connection_auth: bool,
}

/// The rewriting that the broker does. A request that asks the origin to close is made persistent,
/// because a client's `Connection: close` must not cost the origin socket; and the last response on a
/// connection that the broker is about to end says so, see
/// [`Exchange::end_connection`](super::Exchange::end_connection). A proxy's `Connection` field is its
/// own affair (RFC 9110 section 7.6.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// The bytes of the head to replace; empty for an insertion.
    pub at: Range<usize>,
    /// What to put there.
    pub with: &'static [u8],
}

impl Edit {
    /// Most bytes that it adds.
    pub const GROWTH_MAX: usize = 32;

    /// The same change behind `offset` other bytes.
    pub(super) fn moved(self, offset: usize) -> Self {
        Self { at: self.at.start + offset..self.at.end + offset, ..self }
    }

    /// Makes the change in the first `len` bytes of a buffer that has room for it. Answers how many they
    /// are then.
    #[must_use]
    pub fn apply(&self, buffer: &mut [u8], len: usize) -> usize {
        let (start, end) = (self.at.start, self.at.start + self.with.len());
        buffer.copy_within(self.at.end..len, end);
        buffer[start..end].copy_from_slice(self.with);
        len - self.at.len() + self.with.len()
    }
}

impl RequestReader {
    /// `buf` holds all bytes since the start of the request: the same ones on each call, then more.
    ///
    /// After [`RequestStep::Head`] or [`RequestStep::Tunnel`] the reader is as new, ready for the
    /// next request.
    pub fn read(&mut self, buf: &[u8]) -> RequestStep {
        let step = self.advance(buf).unwrap_or(RequestStep::Tunnel(CloseReason::AmbiguousRequest));
        if step != RequestStep::Incomplete {
            *self = Self::default();
        }
        step
    }

    fn advance(&mut self, buf: &[u8]) -> Result<RequestStep, Ambiguous> {
        loop {
            let line_at = self.line_at;
            match scan(&buf[line_at..], self.looked) {
                Scan::Bad => return Err(Ambiguous),
                Scan::More(_) if buf.len() > HEAD_BYTES_MAX => return Err(Ambiguous),
                Scan::More(looked) => {
                    self.looked = looked;
                    if self.request_line.is_none() && !may_be_request_line(buf) {
                        return Err(Ambiguous);
                    }
                    return Ok(RequestStep::Incomplete);
                }
                Scan::Line(n) => {
                    self.line_at = line_at + n + 2;
                    self.looked = 0;
                    if self.line_at > HEAD_BYTES_MAX {
                        return Err(Ambiguous);
                    }
                    let line = &buf[line_at..line_at + n];
                    match self.request_line {
                        None => self.request_line = Some(request_line(line)?),
                        Some((method, version)) if n == 0 => {
                            return Ok(RequestStep::Head(self.head(method, version)?));
                        }
                        Some(_) => self.fields.read(line, line_at)?,
                    }
                }
            }
        }
    }

    fn head(&mut self, method: Method, version: Version) -> Result<RequestHead, Ambiguous> {
        let framing = self.fields.framing(version)?.unwrap_or(Framing::None);
        let has_body = framing.has_body();
        // RFC 9110 section 9.3.6: the bytes after a CONNECT are the tunnel's.
        if method == Method::Connect && framing != Framing::None {
            return Err(Ambiguous);
        }
        let len = self.line_at;
        let connection = &self.fields.connection;
        let client_persists = connection.persists(version);
        let edit = match (connection.closes, connection.lines) {
            _ if client_persists || connection.odd || connection.keep_alive => None,
            (1, _) => Some(Edit { at: connection.close_at.clone(), with: b"keep-alive" }),
            (0, 0) => Some(Edit { at: len - 2..len - 2, with: b"Connection: keep-alive\r\n" }),
            _ => None,
        };
        Ok(RequestHead {
            len,
            method,
            version,
            framing,
            client_persists,
            origin_persists: client_persists || edit.is_some(),
            edit,
            expects_continue: self.fields.expects_continue && has_body,
            doubtful: ((method.is_safe() || method == Method::Delete) && has_body)
                || self.fields.odd_expect,
            connection_auth: self.fields.connection_auth,
        })
    }
}

/// Method, target and version with one space between them (RFC 9112 section 3). Lower-case letters
/// in a method are refused: origins that ignore case would see a HEAD or a CONNECT in it. Bytes
/// outside ASCII are refused in a target: some readers take a few of them for white space.
fn request_line(line: &[u8]) -> Result<(Method, Version), Ambiguous> {
    let mut parts = line.split(|&b| b == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(Ambiguous);
    };
    let version = match version {
        b"HTTP/1.1" => Version::Http11,
        b"HTTP/1.0" => Version::Http10,
        _ => return Err(Ambiguous),
    };
    let method_ok =
        (1..=METHOD_BYTES_MAX).contains(&method.len()) && method.iter().all(|&b| is_method_byte(b));
    if method_ok && !target.is_empty() && target.iter().all(u8::is_ascii_graphic) {
        Ok((Method::read(method), version))
    } else {
        Err(Ambiguous)
    }
}

/// Whether the start of a first line can become a request line. Without it a client of another
/// protocol would wait for an answer to bytes that are held back here.
fn may_be_request_line(start: &[u8]) -> bool {
    let probe = &start[..start.len().min(METHOD_BYTES_MAX + 1)];
    match probe.iter().position(|&b| !is_method_byte(b)) {
        Some(n) => n > 0 && probe[n] == b' ',
        None => probe.len() <= METHOD_BYTES_MAX,
    }
}

fn is_method_byte(b: u8) -> bool {
    super::line::is_token_byte(b) && !b.is_ascii_lowercase()
}
