//! Plain responses.

use super::WhyNot;
use super::head::{Head, Place, seen};
use super::tail::{is_clean, is_graphic};

/// What a plain response says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainResponse {
    /// Bytes of the whole response, head and body. More than these are nobody's.
    pub total: u32,
    /// Its status.
    pub status: u16,
    /// How long the origin says it keeps an idle connection, in seconds; 0 if it says nothing.
    pub origin_idle_s: u32,
}

/// Reads the start of a response; all zero is the initial state.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResponseScan {
    head: Head,
    status: u16,
    part: Part,
}

/// Where in the status line the next byte stands.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default)]
enum Part {
    #[default]
    Version = 0,
    Status,
    Reason,
}

impl ResponseScan {
    /// The next byte of the response.
    #[inline(always)]
    pub fn push(&mut self, byte: u8) {
        if self.is_over() {
            return;
        }
        self.head.len = self.head.len.wrapping_add(1);
        if self.head.place == Place::FirstLine {
            self.status_line(byte);
        } else {
            self.head.push(byte);
        }
    }

    /// Whether further bytes change nothing: the head has ended, or it is odd.
    #[must_use]
    #[inline(always)]
    pub fn is_over(&self) -> bool {
        self.head.is_over()
    }

    /// The judgement; `head_only` is that of the request ([`PlainRequest`](super::PlainRequest)),
    /// `limit` the most bytes a response may have.
    #[inline(always)]
    pub fn finish(&self, head_only: bool, limit: u32) -> Result<PlainResponse, WhyNot> {
        self.head.whole(WhyNot::SplitHead)?;
        if self.status < 200 {
            return Err(WhyNot::Informational);
        }
        if self.head.has(seen::CLOSE) {
            return Err(WhyNot::Close);
        }
        if self.head.has(seen::CODED) {
            return Err(WhyNot::Chunked);
        }
        let no_timeout = self.head.has(seen::KEEP_ALIVE) && self.head.idle_s == 0;
        if no_timeout || self.head.has(seen::FIELDS | seen::ODD_KEEP_ALIVE) {
            return Err(WhyNot::Fields);
        }
        let body = match self.status {
            204 if self.head.length != 0 => return Err(WhyNot::Odd),
            204 | 304 => 0,
            _ if head_only => 0,
            _ if self.head.has(seen::LENGTH) => self.head.length,
            _ => return Err(WhyNot::NoLength),
        };
        let total = u64::from(self.head.len) + body;
        if total > u64::from(limit) {
            return Err(WhyNot::Large);
        }
        Ok(PlainResponse {
            #[expect(clippy::cast_possible_truncation, reason = "at most the limit")]
            total: total as u32,
            status: self.status,
            origin_idle_s: self.head.idle_s,
        })
    }

    /// Version, three digits and a reason, which may be missing together with the space before it.
    #[inline(always)]
    fn status_line(&mut self, byte: u8) {
        match (self.part, byte) {
            (Part::Version, b' ') => {
                self.part = Part::Status;
                self.head.version();
            }
            (Part::Version, _) if is_graphic(byte) => self.head.word.push(byte),
            // A first digit is not 0: three digits are at least 100, and fewer are less.
            (Part::Status, b'0'..=b'9')
                if self.status < 100 && (self.status != 0 || byte != b'0') =>
            {
                self.status = self.status * 10 + u16::from(byte - b'0');
            }
            (Part::Status, b' ') if matches!(self.status, 100..600) => self.part = Part::Reason,
            (Part::Status, b'\r') if matches!(self.status, 100..600) => {
                self.head.place = Place::LineEnd;
            }
            (Part::Reason, b'\r') => self.head.place = Place::LineEnd,
            (Part::Reason, _) if is_clean(byte) => {}
            _ => self.head.odd(),
        }
    }
}

/// Whether the response that starts with `bytes` is plain; see [`ResponseScan::finish`].
pub fn scan_response(bytes: &[u8], head_only: bool, limit: u32) -> Result<PlainResponse, WhyNot> {
    let mut scan = ResponseScan::default();
    for &byte in bytes {
        scan.push(byte);
        if scan.is_over() {
            break;
        }
    }
    scan.finish(head_only, limit)
}
