//! A message as it is on the wire, made piece by piece to be sent or to be compared with.

use super::body::{Body, Direction, Key, differs};
use super::random::Random;
use super::spec::{Framing, Spec, Upload};

/// Most bytes of one chunk.
const CHUNK_MAX: u64 = 64 << 10;
/// Bytes of what was expected that a [`Difference`] shows.
const SHOWN: usize = 48;

/// A place in a message.
#[derive(Clone, Debug)]
pub(super) struct Wire {
    body: Body,
    /// Bytes that are not the body's and come next.
    text: Vec<u8>,
    text_at: usize,
    /// Bytes of the body so far.
    body_at: u64,
    size: u64,
    /// Bytes of the body before the next chunk line, or to the end.
    span: u64,
    /// Draws the sizes of chunks; without it there are none (any more).
    chunks: Option<Random>,
    position: u64,
}

/// Bytes that are not those of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    /// Where in the message.
    pub(super) position: u64,
    /// Where in the bytes that were compared.
    pub(super) at: usize,
    /// What should have come.
    pub(super) expected: Vec<u8>,
}

impl Wire {
    /// A request, head and body, as its client sends it.
    pub(super) fn request(key: Key, spec: &Spec) -> Self {
        let body = spec.upload.map(|upload| (upload.chunked, upload.size.into()));
        Self::new(key, spec, Direction::Request, spec.request_head(key), body)
    }

    /// Only the body of a request.
    pub(super) fn upload(key: Key, spec: &Spec) -> Option<Self> {
        let Upload { size, chunked } = spec.upload?;
        let body = Some((chunked, size.into()));
        Some(Self::new(key, spec, Direction::Request, Vec::new(), body))
    }

    /// A response with the interim ones before it.
    pub(super) fn response(key: Key, spec: &Spec) -> Self {
        let body = spec
            .response_has_body()
            .then(|| (spec.framing == Framing::Chunked, u64::from(spec.size)));
        Self::new(key, spec, Direction::Response, spec.response_head(key), body)
    }

    fn new(
        key: Key,
        spec: &Spec,
        direction: Direction,
        text: Vec<u8>,
        body: Option<(bool, u64)>,
    ) -> Self {
        let (chunked, size) = body.unwrap_or((false, 0));
        let parts = [spec.id.client.into(), spec.id.seq.into(), size, direction as u64];
        Self {
            body: key.body(direction, spec.id),
            text,
            text_at: 0,
            body_at: 0,
            size,
            span: if chunked { 0 } else { size },
            chunks: chunked.then(|| Random::new(0, &parts)),
            position: 0,
        }
    }

    /// Bytes so far.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Whether that was all.
    pub(super) fn is_done(&self) -> bool {
        self.text_at == self.text.len() && self.span == 0 && self.chunks.is_none()
    }

    /// Makes sure that there are bytes, unless this is the end.
    fn prepare(&mut self) {
        if self.text_at < self.text.len() || self.span > 0 {
            return;
        }
        let Some(chunks) = &mut self.chunks else { return };
        let left = self.size - self.body_at;
        // Every chunk but the first also ends the one before.
        let end = if self.body_at > 0 { "\r\n" } else { "" };
        self.text_at = 0;
        if left == 0 {
            self.text = format!("{end}0\r\n\r\n").into_bytes();
            self.chunks = None;
        } else {
            self.span = chunks.magnitude(1..=CHUNK_MAX).min(left);
            self.text = format!("{end}{:x}\r\n", self.span).into_bytes();
        }
    }

    /// Appends at most `limit` bytes to `out`; fewer only at the end.
    pub(super) fn fill(&mut self, out: &mut Vec<u8>, limit: usize) {
        let mut left = limit;
        while left > 0 && !self.is_done() {
            self.prepare();
            let n = if self.text_at < self.text.len() {
                let text = &self.text[self.text_at..];
                let n = text.len().min(left);
                out.extend_from_slice(&text[..n]);
                self.text_at += n;
                n
            } else {
                let n = self.body_span(left);
                let from = out.len();
                out.resize(from + n, 0);
                self.body.fill(self.body_at, &mut out[from..]);
                self.body_taken(n);
                n
            };
            left -= n;
            self.position += n as u64;
        }
    }

    /// Compares with bytes that have come; says how many of them belong to this message: fewer
    /// than all only at its end.
    pub(super) fn check(&mut self, bytes: &[u8]) -> Result<usize, Difference> {
        let mut used = 0;
        while used < bytes.len() && !self.is_done() {
            self.prepare();
            let rest = &bytes[used..];
            let (n, result) = if self.text_at < self.text.len() {
                let text = &self.text[self.text_at..];
                let n = text.len().min(rest.len());
                (n, differs(&rest[..n], &text[..n]))
            } else {
                let n = self.body_span(rest.len());
                (n, self.body.check(self.body_at, &rest[..n]))
            };
            let good = match result {
                Ok(()) => n,
                Err(good) => good,
            };
            if self.text_at < self.text.len() {
                self.text_at += good;
            } else {
                self.body_taken(good);
            }
            self.position += good as u64;
            used += good;
            if good < n {
                let mut expected = Vec::new();
                self.clone().fill(&mut expected, SHOWN);
                return Err(Difference { position: self.position, at: used, expected });
            }
        }
        Ok(used)
    }

    fn body_span(&self, limit: usize) -> usize {
        usize::try_from(self.span).unwrap_or(usize::MAX).min(limit)
    }

    fn body_taken(&mut self, n: usize) {
        self.body_at += n as u64;
        self.span -= n as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::super::spec::Id;
    use super::*;

    fn spec(framing: Framing, size: u32) -> Spec {
        Spec { size, framing, ..Spec::new(Id { client: 1, seq: 2 }) }
    }

    fn bytes(mut wire: Wire) -> Vec<u8> {
        let mut out = Vec::new();
        wire.fill(&mut out, usize::MAX);
        assert!(wire.is_done());
        assert_eq!(wire.position(), out.len() as u64);
        out
    }

    #[test]
    fn splits_do_not_matter() {
        let key = Key::new(1);
        for framing in [Framing::Length, Framing::Chunked, Framing::Close] {
            for size in [0, 1, 100, 100_000] {
                let wire = Wire::response(key, &spec(framing, size));
                let whole = bytes(wire.clone());
                for piece in [1, 7, 4096] {
                    let mut wire = wire.clone();
                    for part in whole.chunks(piece) {
                        assert_eq!(wire.check(part), Ok(part.len()));
                    }
                    assert!(wire.is_done());
                    assert_eq!(wire.check(b"more"), Ok(0));
                }
            }
        }
    }

    #[test]
    fn chunks_are_well_formed() {
        let whole = bytes(Wire::response(Key::new(1), &spec(Framing::Chunked, 5000)));
        let at = whole.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        let (mut rest, mut size) = (&whole[at + 4..], 0);
        loop {
            let line = rest.windows(2).position(|window| window == b"\r\n").unwrap();
            let text = std::str::from_utf8(&rest[..line]).unwrap();
            let n = usize::from_str_radix(text, 16).unwrap();
            assert_eq!(&rest[line + 2 + n..][..2], b"\r\n");
            rest = &rest[line + n + 4..];
            size += n;
            if n == 0 {
                break;
            }
        }
        assert_eq!((size, rest), (5000, &b""[..]));
    }

    #[test]
    fn every_changed_byte_is_found_where_it_is() {
        let wire = Wire::response(Key::new(1), &spec(Framing::Chunked, 300));
        let whole = bytes(wire.clone());
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 0x20;
            let difference = wire.clone().check(&changed).unwrap_err();
            assert_eq!((difference.position, difference.at), (at as u64, at));
            let shown = (whole.len() - at).min(SHOWN);
            assert_eq!(difference.expected, whole[at..at + shown]);
        }
    }

    #[test]
    fn a_lost_or_doubled_byte_is_found() {
        let wire = Wire::response(Key::new(1), &spec(Framing::Length, 300));
        let whole = bytes(wire.clone());
        for at in whole.len() - 300..whole.len() {
            let mut doubled = whole.clone();
            doubled.insert(at, doubled[at]);
            // The difference shows one byte later, or at the end as a byte too many.
            let outcome = wire.clone().check(&doubled);
            assert!(outcome.is_err() || outcome == Ok(whole.len()), "{at}");
            let mut lost = whole.clone();
            lost.remove(at);
            let mut wire = wire.clone();
            assert!(wire.check(&lost).is_err() || !wire.is_done(), "{at}");
        }
    }
}
