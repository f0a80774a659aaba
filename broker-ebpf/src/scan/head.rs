//! What requests and responses have in common: the lines after the first.

use super::tail::{Known, Tail, is_blank, is_clean, is_token};
use super::{HEAD_BYTES_MAX, WhyNot};

pub(super) const HTTP_11: Known = Known::new(b"HTTP/1.1");
pub(super) const HTTP_10: Known = Known::new(b"HTTP/1.0");

const CONTENT_LENGTH: Known = Known::new(b"content-length");
const TRANSFER_ENCODING: Known = Known::new(b"transfer-encoding");
const CONNECTION: Known = Known::new(b"connection");
const KEEP_ALIVE: Known = Known::new(b"keep-alive");
const EXPECT: Known = Known::new(b"expect");
const UPGRADE: Known = Known::new(b"upgrade");
const AUTHORIZATION: Known = Known::new(b"authorization");
const PROXY_AUTHORIZATION: Known = Known::new(b"proxy-authorization");
const WWW_AUTHENTICATE: Known = Known::new(b"www-authenticate");
const PROXY_AUTHENTICATE: Known = Known::new(b"proxy-authenticate");

const CLOSE: Known = Known::new(b"close");
const TIMEOUT: Known = Known::new(b"timeout=");
const BASIC: Known = Known::new(b"basic");
const BEARER: Known = Known::new(b"bearer");
const DIGEST: Known = Known::new(b"digest");
const NTLM: Known = Known::new(b"ntlm");
const NEGOTIATE: Known = Known::new(b"negotiate");

/// Lengths from here on get no further digit: this leaves room in 64 bits, and 18 digits fit the
/// signed numbers of others.
const LENGTH_MAX: u64 = 100_000_000_000_000_000;

/// The same for the seconds of a `Keep-Alive`.
const IDLE_MAX: u32 = 100_000_000;

/// Facts of a head, as bits.
pub(super) mod seen {
    /// `Connection: close`, or HTTP/1.0.
    pub(in super::super) const CLOSE: u32 = 1;
    /// A field that is never plain.
    pub(in super::super) const FIELDS: u32 = 2;
    /// Transfer-Encoding.
    pub(in super::super) const CODED: u32 = 4;
    /// Content-Length.
    pub(in super::super) const LENGTH: u32 = 8;
    /// Keep-Alive.
    pub(in super::super) const KEEP_ALIVE: u32 = 16;
    /// A Keep-Alive that does not tell one timeout.
    pub(in super::super) const ODD_KEEP_ALIVE: u32 = 32;
    /// The current line's name has a `_`.
    pub(in super::super) const UNDERSCORE: u32 = 64;
}

/// Where in the head the next byte stands.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd)]
pub(super) enum Place {
    /// In the first line, which the two kinds of messages read on their own.
    #[default]
    FirstLine = 0,
    /// In the name of a field, or at its start.
    Name,
    /// After the colon of a field.
    Value,
    /// After the CR of a line.
    LineEnd,
    /// After the CR of the blank line.
    HeadEnd,
    /// After the head. From here on nothing changes.
    After,
    /// After something that cannot be read.
    Odd,
}

/// The fields whose values are read.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default)]
enum Field {
    #[default]
    Other = 0,
    ContentLength,
    Connection,
    KeepAlive,
    Authorization,
    Authenticate,
}

/// How far a value is.
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Part {
    #[default]
    Start = 0,
    Inside,
    After,
    Rest,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Head {
    /// The word that is being read.
    pub(super) word: Tail,
    /// What Content-Length says.
    pub(super) length: u64,
    /// Bytes so far.
    pub(super) len: u32,
    /// What Keep-Alive says, in seconds.
    pub(super) idle_s: u32,
    /// Bits of [`seen`].
    pub(super) seen: u32,
    pub(super) place: Place,
    field: Field,
    part: Part,
}

impl Head {
    /// Whether the head has ended, or cannot be read any further.
    #[inline(always)]
    pub(super) fn is_over(&self) -> bool {
        self.place >= Place::After
    }

    /// `Ok` after a whole head; `unfinished` if there is more to come.
    #[inline(always)]
    pub(super) fn whole(&self, unfinished: WhyNot) -> Result<(), WhyNot> {
        match self.place {
            Place::Odd => Err(WhyNot::Odd),
            _ if self.len > HEAD_BYTES_MAX => Err(WhyNot::TooLong),
            Place::After => Ok(()),
            _ => Err(unfinished),
        }
    }

    #[inline(always)]
    pub(super) fn has(&self, seen: u32) -> bool {
        self.seen & seen != 0
    }

    /// Cannot be read any further.
    #[inline(always)]
    pub(super) fn odd(&mut self) {
        self.place = Place::Odd;
    }

    /// The CR of the first line, whose version is the current word.
    #[inline(always)]
    pub(super) fn version(&mut self) {
        if self.word.is(&HTTP_10) {
            self.seen |= seen::CLOSE;
        } else if !self.word.is(&HTTP_11) {
            self.odd();
        }
    }

    /// A byte after the first line.
    #[inline(always)]
    pub(super) fn push(&mut self, byte: u8) {
        match self.place {
            Place::Name => self.name(byte),
            Place::Value if byte == b'\r' => {
                self.value(byte);
                // A value that cannot be read has no end.
                if self.place == Place::Value {
                    self.place = Place::LineEnd;
                }
            }
            Place::Value if is_clean(byte) => self.value(byte),
            Place::LineEnd if byte == b'\n' => {
                self.word.clear();
                self.seen &= !seen::UNDERSCORE;
                self.place = Place::Name;
            }
            Place::HeadEnd if byte == b'\n' => self.place = Place::After,
            _ => self.odd(),
        }
    }

    /// A folded line, an empty name and a space before the colon all fail here.
    #[inline(always)]
    fn name(&mut self, byte: u8) {
        if is_token(byte) {
            // Many origins take `_` for `-`.
            if byte == b'_' {
                self.seen |= seen::UNDERSCORE;
                self.word.push(b'-');
            } else {
                self.word.push(byte.to_ascii_lowercase());
            }
        } else if byte == b':' && !self.word.is_empty() {
            self.place = Place::Value;
            self.part = Part::Start;
            self.named();
            self.word.clear();
        } else if byte == b'\r' && self.word.is_empty() {
            self.place = Place::HeadEnd;
        } else {
            self.odd();
        }
    }

    /// The name of a field is complete.
    #[inline(always)]
    fn named(&mut self) {
        let name = self.word;
        self.field = Field::Other;
        if name.is(&CONTENT_LENGTH) {
            self.field = Field::ContentLength;
            // Equal ones are refused as well, as in user space.
            if self.has(seen::LENGTH) {
                self.odd();
            }
            self.seen |= seen::LENGTH;
        } else if name.is(&CONNECTION) {
            self.field = Field::Connection;
        } else if name.is(&KEEP_ALIVE) {
            self.field = Field::KeepAlive;
            // The shorter of two timeouts would count.
            if self.has(seen::KEEP_ALIVE) {
                self.seen |= seen::ODD_KEEP_ALIVE;
            }
            self.seen |= seen::KEEP_ALIVE;
        } else if name.is(&AUTHORIZATION) || name.is(&PROXY_AUTHORIZATION) {
            self.field = Field::Authorization;
        } else if name.is(&WWW_AUTHENTICATE) || name.is(&PROXY_AUTHENTICATE) {
            self.field = Field::Authenticate;
        } else if name.is(&TRANSFER_ENCODING) {
            self.seen |= seen::CODED;
        } else if name.is(&EXPECT) || name.is(&UPGRADE) {
            self.seen |= seen::FIELDS;
        } else {
            return;
        }
        // Not the field, unless to an origin that takes it for the field.
        if self.has(seen::UNDERSCORE) {
            self.odd();
        }
    }

    /// A byte of a value, or the CR that ends it.
    #[inline(always)]
    fn value(&mut self, byte: u8) {
        match self.field {
            Field::Other => {}
            Field::ContentLength => self.content_length(byte),
            Field::Connection => self.connection(byte),
            Field::KeepAlive => self.keep_alive(byte),
            Field::Authorization => self.authentication(byte, false),
            Field::Authenticate => self.authentication(byte, true),
        }
    }

    /// Digits without a leading zero, with spaces around them.
    #[inline(always)]
    fn content_length(&mut self, byte: u8) {
        match (self.part, byte) {
            (Part::Start | Part::After, b' ') | (Part::Inside | Part::After, b'\r') => {}
            (Part::Inside, b' ') => self.part = Part::After,
            (Part::Start, b'0'..=b'9') => {
                self.part = Part::Inside;
                self.length = u64::from(byte - b'0');
            }
            (Part::Inside, b'0'..=b'9') if self.length != 0 && self.length < LENGTH_MAX => {
                self.length = self.length * 10 + u64::from(byte - b'0');
            }
            _ => self.odd(),
        }
    }

    /// One option, and it is `keep-alive`. Others are read on for a `close`, to tell the reason.
    #[inline(always)]
    fn connection(&mut self, byte: u8) {
        if byte == b',' || byte == b'\r' {
            if self.word.is(&CLOSE) {
                self.seen |= seen::CLOSE;
            } else if byte == b',' || !self.word.is(&KEEP_ALIVE) {
                self.seen |= seen::FIELDS;
            }
            self.word.clear();
            self.part = Part::Start;
        } else if !is_blank(byte) {
            if self.part == Part::After {
                // Two words: keeps this from being any.
                self.word.push(b' ');
            }
            self.part = Part::Inside;
            self.word.push(byte.to_ascii_lowercase());
        } else if self.part == Part::Inside {
            self.part = Part::After;
        }
    }

    /// `timeout=`, seconds, and anything that cannot be another timeout. No seconds, or 0 of them,
    /// leave [`idle_s`](Self::idle_s) 0, which tells enough.
    #[inline(always)]
    fn keep_alive(&mut self, byte: u8) {
        match (self.part, byte) {
            (_, b'\r') => {}
            (Part::Start, b' ' | b'\t') if self.word.is_empty() => {}
            (Part::Start, _) => {
                self.word.push(byte.to_ascii_lowercase());
                if self.word.is(&TIMEOUT) {
                    self.part = Part::Inside;
                }
            }
            (Part::Inside, b'0'..=b'9') if self.idle_s < IDLE_MAX => {
                self.idle_s = self.idle_s * 10 + u32::from(byte - b'0');
            }
            (Part::Inside | Part::After, b' ' | b'\t') => self.part = Part::After,
            (Part::Inside | Part::After, b',') => self.part = Part::Rest,
            (Part::Rest, b't' | b'T') | (Part::Inside | Part::After, _) => {
                self.seen |= seen::ODD_KEEP_ALIVE;
            }
            (Part::Rest, _) => {}
        }
    }

    /// Begins with a scheme that is known to authenticate requests only, and names none that
    /// authenticates connections anywhere.
    #[inline(always)]
    fn authentication(&mut self, byte: u8, challenges: bool) {
        if is_token(byte) {
            self.word.push(byte.to_ascii_lowercase());
            return;
        }
        if self.word.is_empty() && is_blank(byte) {
            return;
        }
        let word = self.word;
        let plain = if self.part == Part::Start {
            word.is(&BASIC) || word.is(&BEARER) || (challenges && word.is(&DIGEST))
        } else {
            !word.is(&NTLM) && !word.is(&NEGOTIATE)
        };
        if !plain {
            self.seen |= seen::FIELDS;
        }
        self.part = Part::Inside;
        self.word.clear();
    }
}
