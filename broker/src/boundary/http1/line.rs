//! Lines that end in CRLF and hold nothing that could be taken for an end of line.

use memchr::memchr;

/// What a look for the end of a line found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Scan {
    /// A line of this length, CRLF not counted.
    Line(usize),
    /// No end yet; so many bytes need no second look.
    More(usize),
    /// A bare LF, a bare CR or another control byte.
    Bad,
}

/// Looks for the end of the line that starts `bytes`; the first `looked` of them are known to be
/// clean. Every byte is looked at as soon as it is there, so junk without a line end does not wait
/// for one.
pub(super) fn scan(bytes: &[u8], looked: usize) -> Scan {
    if let Some(n) = memchr(b'\n', &bytes[looked..]) {
        return match bytes[..looked + n].split_last() {
            Some((b'\r', line)) if is_clean(&line[looked.min(line.len())..]) => {
                Scan::Line(line.len())
            }
            _ => Scan::Bad,
        };
    }
    // A CR at the very end is looked at again, together with what follows it.
    let end = bytes.len() - usize::from(bytes.last() == Some(&b'\r'));
    if is_clean(&bytes[looked.min(end)..end]) { Scan::More(end) } else { Scan::Bad }
}

/// Whether there is no control byte but HTAB (RFC 9110 section 5.5). No early exit: this way it
/// compiles to vector instructions, and the common answer is yes.
fn is_clean(bytes: &[u8]) -> bool {
    let controls = bytes
        .iter()
        .map(|&b| u8::from((b < b' ' && b != b'\t') || b == 0x7f))
        .fold(0, |a, b| a | b);
    controls == 0
}

/// The next line of a stream that arrives in pieces.
#[derive(Debug)]
pub(super) enum Line<'a> {
    /// The input is used up without an end of line.
    Incomplete,
    /// A line, without its CRLF.
    Whole(&'a [u8]),
    /// Not a line that may be relied on, or too long.
    Bad,
}

/// Cuts a stream into lines; copies only a line that arrives in pieces.
#[derive(Debug, Default)]
pub(super) struct Lines {
    held: Vec<u8>,
    looked: usize,
    /// `held` was handed out as a whole line.
    spent: bool,
}

impl Lines {
    /// Takes what belongs to the current line, and says how much that was. A line of more than
    /// `bytes_max`, its CRLF included, is bad.
    pub(super) fn next<'a>(&'a mut self, input: &'a [u8], bytes_max: usize) -> (usize, Line<'a>) {
        if self.spent {
            self.held.clear();
            self.looked = 0;
            self.spent = false;
        }
        if self.held.is_empty() {
            return match scan(input, 0) {
                Scan::Line(n) if n + 2 <= bytes_max => (n + 2, Line::Whole(&input[..n])),
                Scan::More(looked) if input.len() <= bytes_max => {
                    self.held.extend_from_slice(input);
                    self.looked = looked;
                    (input.len(), Line::Incomplete)
                }
                _ => (0, Line::Bad),
            };
        }
        let n = memchr(b'\n', input).map_or(input.len(), |lf| lf + 1);
        if self.held.len() + n > bytes_max {
            return (0, Line::Bad);
        }
        self.held.extend_from_slice(&input[..n]);
        match scan(&self.held, self.looked) {
            Scan::Line(len) => {
                self.spent = true;
                (n, Line::Whole(&self.held[..len]))
            }
            Scan::More(looked) => {
                self.looked = looked;
                (n, Line::Incomplete)
            }
            Scan::Bad => (0, Line::Bad),
        }
    }

    /// What is held of a line whose end has not come.
    pub(super) fn partial(&self) -> &[u8] {
        if self.spent { &[] } else { &self.held }
    }
}

/// Whether `b` may stand in a token (RFC 9110 section 5.6.2).
pub(super) fn is_token_byte(b: u8) -> bool {
    TOKEN[usize::from(b)]
}

static TOKEN: [bool; 256] = {
    let mut table = [false; 256];
    let symbols = b"!#$%&'*+-.^_`|~";
    let mut i = 0;
    while i < symbols.len() {
        table[symbols[i] as usize] = true;
        i += 1;
    }
    let mut b = 0;
    while b < 256 {
        #[expect(clippy::cast_possible_truncation, reason = "the loop ends before 256")]
        if (b as u8).is_ascii_alphanumeric() {
            table[b] = true;
        }
        b += 1;
    }
    table
};

/// The token that starts `bytes`, and the rest. The token may be empty.
pub(super) fn split_token(bytes: &[u8]) -> (&[u8], &[u8]) {
    let n = bytes.iter().position(|&b| !is_token_byte(b)).unwrap_or(bytes.len());
    bytes.split_at(n)
}

/// Without SP and HTAB at its start.
pub(super) fn trim_start(mut bytes: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] = bytes {
        bytes = rest;
    }
    bytes
}

/// Without SP and HTAB at both ends.
pub(super) fn trim(bytes: &[u8]) -> &[u8] {
    let mut bytes = trim_start(bytes);
    while let [rest @ .., b' ' | b'\t'] = bytes {
        bytes = rest;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::{Scan, scan};

    /// The work stays linear however slowly a line arrives: but for a CR at the end, no byte is
    /// looked at twice.
    #[test]
    fn looks_once() {
        let line = b"Some-Field: with a value\r\n";
        let mut looked = 0;
        for len in 0..line.len() {
            let Scan::More(next) = scan(&line[..len], looked) else { panic!("after {len}") };
            assert!(next >= looked && next + 1 >= len, "{next} of {len}");
            looked = next;
        }
        assert_eq!(scan(line, looked), Scan::Line(line.len() - 2));
    }
}
