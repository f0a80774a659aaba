//! Plain requests.

use core::cmp::Ordering;

use super::WhyNot;
use super::head::{Head, Place, seen};
use super::tail::{Known, Tail, is_graphic, is_token};

const GET: Known = Known::new(b"GET");
const HEAD: Known = Known::new(b"HEAD");
const OPTIONS: Known = Known::new(b"OPTIONS");
const DELETE: Known = Known::new(b"DELETE");
const PUT: Known = Known::new(b"PUT");
const POST: Known = Known::new(b"POST");

/// What a plain request says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainRequest {
    /// Bytes of the head; the rest of the message is the body.
    pub head_len: u32,
    /// HEAD: the response has no body.
    pub head_only: bool,
    /// May be repeated.
    pub idempotent: bool,
}

/// Reads a request; all zero is the initial state.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestScan {
    head: Head,
    part: Part,
    method: Method,
}

/// Where in the request line the next byte stands.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default)]
enum Part {
    #[default]
    Method = 0,
    TargetStart,
    Target,
    Version,
}

#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Method {
    /// Not a plain one.
    #[default]
    Other = 0,
    /// GET, OPTIONS or DELETE: idempotent, and without a body.
    Bodiless,
    Head,
    Put,
    Post,
}

impl RequestScan {
    /// The next byte of the message.
    #[inline(always)]
    pub fn push(&mut self, byte: u8) {
        if self.is_over() {
            return;
        }
        self.head.len = self.head.len.wrapping_add(1);
        if self.head.place == Place::FirstLine {
            self.request_line(byte);
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

    /// The judgement, for a message of `message_len` bytes. All of its head must have been
    /// pushed; none of its body has to be.
    #[inline(always)]
    pub fn finish(&self, message_len: u32) -> Result<PlainRequest, WhyNot> {
        self.head.whole(WhyNot::Partial)?;
        let takes_body = matches!(self.method, Method::Put | Method::Post);
        if self.head.has(seen::CLOSE) {
            return Err(WhyNot::Close);
        }
        if self.method == Method::Other {
            return Err(WhyNot::Method);
        }
        if self.head.has(seen::FIELDS) {
            return Err(WhyNot::Fields);
        }
        // A length of 0 counts, too: origins are known that get it wrong where no body belongs.
        if self.head.has(seen::CODED) || self.head.has(seen::LENGTH) != takes_body {
            return Err(WhyNot::Body);
        }
        let end = u64::from(self.head.len) + self.head.length;
        match end.cmp(&u64::from(message_len)) {
            Ordering::Less => Err(WhyNot::Pipelined),
            Ordering::Greater => Err(WhyNot::Partial),
            Ordering::Equal => Ok(PlainRequest {
                head_len: self.head.len,
                head_only: self.method == Method::Head,
                idempotent: self.method != Method::Post,
            }),
        }
    }

    /// Method, target and version with one space between them.
    #[inline(always)]
    fn request_line(&mut self, byte: u8) {
        match (self.part, byte) {
            (Part::Method, b' ') if !self.head.word.is_empty() => {
                self.method = method(&self.head.word);
                self.part = Part::TargetStart;
            }
            // Origins that ignore case would see known methods in others with small letters.
            (Part::Method, _) if is_token(byte) && !byte.is_ascii_lowercase() => {
                self.head.word.push(byte);
            }
            (Part::Target, b' ') => {
                self.head.word.clear();
                self.part = Part::Version;
            }
            (Part::TargetStart | Part::Target, _) if is_graphic(byte) => self.part = Part::Target,
            (Part::Version, b'\r') => {
                self.head.place = Place::LineEnd;
                self.head.version();
            }
            (Part::Version, _) if is_graphic(byte) => self.head.word.push(byte),
            _ => self.head.odd(),
        }
    }
}

#[inline(always)]
fn method(word: &Tail) -> Method {
    if word.is(&GET) || word.is(&OPTIONS) || word.is(&DELETE) {
        Method::Bodiless
    } else if word.is(&HEAD) {
        Method::Head
    } else if word.is(&PUT) {
        Method::Put
    } else if word.is(&POST) {
        Method::Post
    } else {
        Method::Other
    }
}

/// Whether a message is exactly one plain request.
pub fn scan_request(message: &[u8]) -> Result<PlainRequest, WhyNot> {
    let Ok(len) = u32::try_from(message.len()) else { return Err(WhyNot::TooLong) };
    let mut scan = RequestScan::default();
    for &byte in message {
        scan.push(byte);
        if scan.is_over() {
            break;
        }
    }
    scan.finish(len)
}
