//! Header fields: reads the few that frame a message or say what becomes of the connection.

use std::ops::Range;
use std::time::Duration;

use super::line::{split_token, trim};
use super::{Framing, Version};

/// The field line, or the fields together, have more than one reading.
#[derive(Debug)]
pub(super) struct Ambiguous;

/// What the fields of one head say.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, not a state")]
pub(super) struct Fields {
    content_length: Option<u64>,
    chunked: bool,
    pub(super) connection: Connection,
    /// Names an authentication that belongs to the connection (NTLM, Negotiate).
    pub(super) connection_auth: bool,
    /// `Expect: 100-continue`.
    pub(super) expects_continue: bool,
    /// `Expect` with something else.
    pub(super) odd_expect: bool,
    /// `Keep-Alive: timeout=`, the shortest if there are several.
    pub(super) idle_timeout: Option<Duration>,
}

/// The options of all `Connection` fields together (RFC 9110 section 7.6.1).
#[derive(Debug, Default)]
pub(super) struct Connection {
    pub(super) lines: usize,
    pub(super) closes: usize,
    pub(super) keep_alive: bool,
    /// Not a list of tokens.
    pub(super) odd: bool,
    /// Where in the head the last `close` and the last `keep-alive` stand.
    pub(super) close_at: Range<usize>,
    pub(super) keep_alive_at: Range<usize>,
}

impl Connection {
    /// Whether the sender keeps the connection (RFC 9112 section 9.3).
    pub(super) fn persists(&self, version: Version) -> bool {
        self.closes == 0 && !self.odd && (version == Version::Http11 || self.keep_alive)
    }

    /// `at` is the position of `value` in the head.
    fn read(&mut self, value: &[u8], at: usize) -> Result<(), Ambiguous> {
        self.lines += 1;
        let mut start = at;
        for part in value.split(|&b| b == b',') {
            let option = trim(part);
            let lead = part.len() - super::line::trim_start(part).len();
            let at = start + lead..start + lead + option.len();
            match split_token(option) {
                ([], []) => {}
                (token, []) if token.eq_ignore_ascii_case(b"close") => {
                    self.closes += 1;
                    self.close_at = at;
                }
                (token, []) if token.eq_ignore_ascii_case(b"keep-alive") => {
                    self.keep_alive = true;
                    self.keep_alive_at = at;
                }
                // An origin that is itself an intermediary would drop the field, and with it the
                // framing.
                (token, []) if frames(token) => return Err(Ambiguous),
                (_, []) => {}
                _ => self.odd = true,
            }
            start += part.len() + 1;
        }
        Ok(())
    }
}

impl Fields {
    /// Reads one line of a head; `at` is its position there.
    pub(super) fn read(&mut self, line: &[u8], at: usize) -> Result<(), Ambiguous> {
        let (name, raw) = split(line)?;
        let value = trim(raw);
        let is = |lower: &str| name.eq_ignore_ascii_case(lower.as_bytes());
        match name.len() {
            6 if is("expect") => {
                let expects_continue = value.eq_ignore_ascii_case(b"100-continue");
                self.expects_continue |= expects_continue;
                self.odd_expect |= !expects_continue;
            }
            10 if is("connection") => self.connection.read(raw, at + name.len() + 1)?,
            10 if is("keep-alive") => self.keep_alive(value),
            13 if is("authorization") => self.connection_auth |= is_connection_auth(value),
            19 if is("proxy-authorization") => self.connection_auth |= is_connection_auth(value),
            // A list of challenges; a parameter that happens to be such a word costs a socket.
            16 if is("www-authenticate") => self.connection_auth |= offers_connection_auth(value),
            18 if is("proxy-authenticate") => self.connection_auth |= offers_connection_auth(value),
            14 if is("content-length") => {
                let length = content_length(raw).ok_or(Ambiguous)?;
                // Equal ones are ambiguous as well: which of them a recipient reads is its choice.
                if self.content_length.replace(length).is_some() {
                    return Err(Ambiguous);
                }
            }
            17 if is("transfer-encoding") => {
                let once = !std::mem::replace(&mut self.chunked, true);
                if !(once && trim_spaces(raw).eq_ignore_ascii_case(b"chunked")) {
                    return Err(Ambiguous);
                }
            }
            14 | 17 if frames(name) => return Err(Ambiguous),
            _ => {}
        }
        Ok(())
    }

    /// The framing, once all lines are read; `None` if no field says anything of it.
    pub(super) fn framing(&self, version: Version) -> Result<Option<Framing>, Ambiguous> {
        match (self.content_length, self.chunked) {
            // RFC 9112 section 6.1: both together ought to be handled as an error, and
            // Transfer-Encoding in HTTP/1.0 as faulty framing.
            (Some(_), true) => Err(Ambiguous),
            (None, true) if version == Version::Http10 => Err(Ambiguous),
            (None, true) => Ok(Some(Framing::Chunked)),
            (Some(length), false) => Ok(Some(Framing::Length(length))),
            (None, false) => Ok(None),
        }
    }

    fn keep_alive(&mut self, value: &[u8]) {
        for parameter in value.split(|&b| b == b',') {
            let Some((key, seconds)) = trim(parameter).split_at_checked(8) else { continue };
            if !key.eq_ignore_ascii_case(b"timeout=") {
                continue;
            }
            let seconds = std::str::from_utf8(seconds).ok().and_then(|s| s.parse::<u32>().ok());
            if let Some(timeout) = seconds.map(|s| Duration::from_secs(s.into())) {
                self.idle_timeout = Some(self.idle_timeout.map_or(timeout, |t| t.min(timeout)));
            }
        }
    }
}

/// Checks a line of a trailer section. Framing has no place there (RFC 9110 section 6.5.1), and
/// recipients that merge trailers into the head would read the message anew.
pub(super) fn trailer(line: &[u8]) -> Result<(), Ambiguous> {
    let (name, _) = split(line)?;
    if frames(name) { Err(Ambiguous) } else { Ok(()) }
}

/// Name and value of a field line (RFC 9112 section 5). A folded line, an empty name and a space
/// before the colon all fail to start with a token and a colon.
fn split(line: &[u8]) -> Result<(&[u8], &[u8]), Ambiguous> {
    match split_token(line) {
        (name, [b':', value @ ..]) if !name.is_empty() => Ok((name, value)),
        _ => Err(Ambiguous),
    }
}

/// Whether a name frames a message, or would once an origin has turned `_` into `-` as CGI and its
/// heirs do.
fn frames(name: &[u8]) -> bool {
    let like = |lower: &[u8]| {
        name.len() == lower.len()
            && name
                .iter()
                .zip(lower)
                .all(|(&b, &l)| b.to_ascii_lowercase() == l || (b, l) == (b'_', b'-'))
    };
    like(b"content-length") || like(b"transfer-encoding")
}

/// Digits and nothing else. HTAB around them, a sign, a list, a leading zero (which some read as
/// octal) and what does not fit a signed 64-bit number are refused.
fn content_length(raw: &[u8]) -> Option<u64> {
    let digits = trim_spaces(raw);
    if matches!(digits, [] | [b'0', _, ..]) || digits.len() > 19 {
        return None;
    }
    let length = digits.iter().try_fold(0_u64, |sum, &b| {
        let digit = b.is_ascii_digit().then(|| u64::from(b - b'0'))?;
        sum.checked_mul(10)?.checked_add(digit)
    })?;
    i64::try_from(length).is_ok().then_some(length)
}

fn trim_spaces(mut value: &[u8]) -> &[u8] {
    while let [b' ', rest @ ..] | [rest @ .., b' '] = value {
        value = rest;
    }
    value
}

fn is_connection_auth(credentials: &[u8]) -> bool {
    let (scheme, _) = split_token(credentials);
    scheme.eq_ignore_ascii_case(b"ntlm") || scheme.eq_ignore_ascii_case(b"negotiate")
}

fn offers_connection_auth(challenges: &[u8]) -> bool {
    challenges.split(|&b| !super::line::is_token_byte(b)).any(is_connection_auth)
}
