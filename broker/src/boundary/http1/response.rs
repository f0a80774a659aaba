//! The head of a response, read from a stream whose bytes are forwarded as they come.

use super::field::{Ambiguous, Fields};
use super::line::{Line, Lines};
use super::{Edit, HEAD_BYTES_MAX, Version};

/// Reads one response head; what it copies is bounded by [`HEAD_BYTES_MAX`] and is usually nothing.
#[derive(Debug, Default)]
pub(super) struct HeadReader {
    lines: Lines,
    /// Bytes of the lines read so far.
    read: usize,
    status_line: Option<(Version, u16)>,
    fields: Fields,
}

/// What a response head says.
#[derive(Debug)]
pub(super) struct ResponseHead {
    /// Its bytes, blank line included.
    len: usize,
    pub(super) version: Version,
    pub(super) status: u16,
    pub(super) fields: Fields,
}

impl ResponseHead {
    /// What to change in it to announce the end of the connection, which it does not do by itself
    /// (RFC 9112 section 9.6).
    pub(super) fn announcement(&self) -> Edit {
        let connection = &self.fields.connection;
        if connection.keep_alive {
            Edit { at: connection.keep_alive_at.clone(), with: b"close" }
        } else {
            Edit { at: self.len - 2..self.len - 2, with: b"Connection: close\r\n" }
        }
    }
}

impl HeadReader {
    /// Whether no byte of the head has come yet.
    pub(super) fn is_fresh(&self) -> bool {
        self.read == 0 && self.lines.partial().is_empty()
    }

    /// Reads on; says how many bytes belong to the head (all of them, unless it is complete). The
    /// reader is as new after a complete head.
    pub(super) fn read(
        &mut self,
        bytes: &[u8],
    ) -> Result<(usize, Option<ResponseHead>), Ambiguous> {
        let mut used = 0;
        while used < bytes.len() {
            let (n, line) = self.lines.next(&bytes[used..], HEAD_BYTES_MAX - self.read);
            used += n;
            let line = match line {
                Line::Bad => return Err(Ambiguous),
                Line::Incomplete => break,
                Line::Whole(line) => line,
            };
            let at = self.read;
            self.read += line.len() + 2;
            match self.status_line {
                None => self.status_line = Some(status_line(line)?),
                Some(_) if !line.is_empty() => self.fields.read(line, at)?,
                Some((version, status)) => {
                    let Self { read: len, fields, .. } = std::mem::take(self);
                    return Ok((used, Some(ResponseHead { len, version, status, fields })));
                }
            }
        }
        if self.status_line.is_none() && !may_be_status_line(self.lines.partial()) {
            return Err(Ambiguous);
        }
        Ok((used, None))
    }
}

/// Version, three digits and a reason (RFC 9112 section 4). Many origins leave out an empty reason
/// together with the space before it; that has only one reading.
fn status_line(line: &[u8]) -> Result<(Version, u16), Ambiguous> {
    let (version, rest) = match line {
        [b'H', b'T', b'T', b'P', b'/', b'1', b'.', b'1', b' ', rest @ ..] => {
            (Version::Http11, rest)
        }
        [b'H', b'T', b'T', b'P', b'/', b'1', b'.', b'0', b' ', rest @ ..] => {
            (Version::Http10, rest)
        }
        _ => return Err(Ambiguous),
    };
    match *rest {
        [a @ b'1'..=b'5', b @ b'0'..=b'9', c @ b'0'..=b'9']
        | [a @ b'1'..=b'5', b @ b'0'..=b'9', c @ b'0'..=b'9', b' ', ..] => {
            let digits = [a, b, c].map(|digit| u16::from(digit - b'0'));
            Ok((version, digits[0] * 100 + digits[1] * 10 + digits[2]))
        }
        _ => Err(Ambiguous),
    }
}

fn may_be_status_line(start: &[u8]) -> bool {
    start.iter().zip(b"HTTP/1.").all(|(a, b)| a == b)
}
