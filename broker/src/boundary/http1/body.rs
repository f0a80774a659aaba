//! Message bodies: how many of the next bytes belong to one (RFC 9112 sections 6 and 7).

use super::field::{Ambiguous, trailer};
use super::line::{Line, Lines, split_token, trim_start};
use super::{Framing, HEAD_BYTES_MAX};

/// Longest line with a chunk's size and extensions. Signed uploads use about 90 bytes of it.
const CHUNK_LINE_BYTES_MAX: usize = 1024;

/// What is still to come of a body.
#[derive(Debug)]
pub(super) enum Body {
    Done,
    Length(u64),
    Chunked(Chunked),
    UntilClose,
}

/// The place in a chunked body.
#[derive(Debug, Default)]
pub(super) struct Chunked {
    lines: Lines,
    at: At,
}

#[derive(Clone, Copy, Debug, Default)]
enum At {
    #[default]
    Size,
    Data(u64),
    DataCr,
    DataLf,
    /// So many bytes of trailers were read.
    Trailers(usize),
}

impl Body {
    pub(super) fn new(framing: Framing) -> Self {
        match framing {
            Framing::None | Framing::Length(0) => Self::Done,
            Framing::Length(n) => Self::Length(n),
            Framing::Chunked => Self::Chunked(Chunked::default()),
        }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// How many of `bytes` belong to the body; fewer than all only if it ended.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<usize, Ambiguous> {
        match self {
            Self::Done => Ok(0),
            Self::UntilClose => Ok(bytes.len()),
            Self::Length(left) => {
                let n = take_counted(left, bytes);
                if *left == 0 {
                    *self = Self::Done;
                }
                Ok(n)
            }
            Self::Chunked(chunked) => {
                let (n, done) = chunked.take(bytes)?;
                if done {
                    *self = Self::Done;
                }
                Ok(n)
            }
        }
    }
}

impl Chunked {
    fn take(&mut self, bytes: &[u8]) -> Result<(usize, bool), Ambiguous> {
        let mut used = 0;
        while used < bytes.len() {
            let rest = &bytes[used..];
            match &mut self.at {
                At::Size => {
                    let (n, line) = self.lines.next(rest, CHUNK_LINE_BYTES_MAX);
                    used += n;
                    match line {
                        Line::Incomplete => {}
                        Line::Bad => return Err(Ambiguous),
                        Line::Whole(line) => {
                            self.at = match chunk_size(line).ok_or(Ambiguous)? {
                                0 => At::Trailers(0),
                                size => At::Data(size),
                            };
                        }
                    }
                }
                At::Data(left) => {
                    used += take_counted(left, rest);
                    if *left == 0 {
                        self.at = At::DataCr;
                    }
                }
                At::DataCr if rest[0] == b'\r' => {
                    used += 1;
                    self.at = At::DataLf;
                }
                At::DataLf if rest[0] == b'\n' => {
                    used += 1;
                    self.at = At::Size;
                }
                At::DataCr | At::DataLf => return Err(Ambiguous),
                At::Trailers(read) => {
                    let (n, line) = self.lines.next(rest, HEAD_BYTES_MAX - *read);
                    used += n;
                    match line {
                        Line::Incomplete => {}
                        Line::Bad => return Err(Ambiguous),
                        Line::Whole([]) => return Ok((used, true)),
                        Line::Whole(line) => {
                            trailer(line)?;
                            *read += line.len() + 2;
                        }
                    }
                }
            }
        }
        Ok((used, false))
    }
}

fn take_counted(left: &mut u64, bytes: &[u8]) -> usize {
    let n = usize::try_from(*left).map_or(bytes.len(), |left| left.min(bytes.len()));
    *left -= n as u64;
    n
}

/// The size of a chunk. Nobody sends chunks beyond 4 GiB, but readers with 32-bit numbers exist,
/// and so do readers that stop at some number of digits.
fn chunk_size(line: &[u8]) -> Option<u64> {
    let n = line.iter().position(|b| !b.is_ascii_hexdigit()).unwrap_or(line.len());
    let (digits, extensions) = line.split_at(n);
    if !(1..=16).contains(&n) || !are_extensions(extensions) {
        return None;
    }
    let size = u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    u32::try_from(size).is_ok().then_some(size)
}

/// The whole grammar (RFC 9112 section 7.1.1), because readers that skip to the line end by other
/// rules disagree on anything outside of it.
fn are_extensions(mut rest: &[u8]) -> bool {
    while !rest.is_empty() {
        let [b';', after @ ..] = trim_start(rest) else { return false };
        let (name, after) = split_token(trim_start(after));
        if name.is_empty() {
            return false;
        }
        rest = after;
        if let [b'=', value @ ..] = trim_start(after) {
            match skip_value(trim_start(value)) {
                Some(after) => rest = after,
                None => return false,
            }
        }
    }
    true
}

/// What follows the token or quoted string that starts `bytes`.
fn skip_value(bytes: &[u8]) -> Option<&[u8]> {
    let Some(mut rest) = bytes.strip_prefix(b"\"") else {
        let (token, rest) = split_token(bytes);
        return (!token.is_empty()).then_some(rest);
    };
    loop {
        rest = match rest {
            [b'"', after @ ..] => return Some(after),
            [b'\\'] | [] => return None,
            [b'\\', _, after @ ..] | [_, after @ ..] => after,
        };
    }
}
