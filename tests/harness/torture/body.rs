//! Bodies whose every word says whose it is.
//!
//! The word at each place of a body is its own name (direction, client, request, index), mixed by
//! a bijection under the seed. Two bodies differ everywhere, a body differs from itself shifted,
//! and of foreign bytes the mixing can be undone: they tell whose they are and where they belong.

use super::random::{Random, mix, unmix};
use super::spec::Id;

const INDEX_BITS: u32 = 20;
const SEQ_BITS: u32 = 24;
const CLIENT_BITS: u32 = 12;
/// Marks what was unmixed as a name and not by chance like one.
const MAGIC: u64 = 0x55;

/// Most clients that have names.
pub(super) const CLIENTS_MAX: u16 = 1 << CLIENT_BITS;
/// Most requests of one client.
pub(super) const SEQ_MAX: u32 = 1 << SEQ_BITS;
/// Longest body.
pub(super) const SIZE_MAX: u64 = 8 << INDEX_BITS;

/// Which way a body goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Request,
    Response,
}

/// The secret that turns names into words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key(u64);

/// Where a piece of a body belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) direction: Direction,
    pub(super) id: Id,
    /// Of the first of the bytes.
    pub(super) offset: u64,
}

/// One body.
#[derive(Clone, Copy, Debug)]
pub(super) struct Body {
    key: Key,
    name: u64,
}

impl Key {
    pub(super) fn new(seed: u64) -> Self {
        Self(Random::new(seed, &[0xb0d7]).next())
    }

    /// The body of one message.
    pub(super) fn body(self, direction: Direction, id: Id) -> Body {
        let name = MAGIC << 1 | u64::from(direction == Direction::Response);
        let name = name << CLIENT_BITS | u64::from(id.client);
        let name = name << SEQ_BITS | u64::from(id.seq);
        Body { key: self, name: name << INDEX_BITS }
    }

    /// Where some bytes of a body are from. At least 23 are needed to be sure: two whole words at
    /// whatever offset.
    pub(super) fn place(self, bytes: &[u8]) -> Option<Place> {
        (0..8).find_map(|shift| {
            let word =
                |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
            let first = unmix(word(shift)?) ^ self.0;
            let second = unmix(word(shift + 8)?) ^ self.0;
            (first >> 57 == MAGIC && second == first + 1).then(|| {
                let field = |at: u32, bits: u32| first >> at & ((1 << bits) - 1);
                Place {
                    direction: match field(56, 1) {
                        0 => Direction::Request,
                        _ => Direction::Response,
                    },
                    id: Id {
                        client: field(SEQ_BITS + INDEX_BITS, CLIENT_BITS).try_into().unwrap_or(0),
                        seq: field(INDEX_BITS, SEQ_BITS).try_into().unwrap_or(0),
                    },
                    offset: (field(0, INDEX_BITS) * 8).saturating_sub(shift as u64),
                }
            })
        })
    }
}

impl Body {
    fn word(self, index: u64) -> [u8; 8] {
        mix((self.name | index) ^ self.key.0).to_le_bytes()
    }

    /// Writes the bytes from `offset` on.
    pub(super) fn fill(self, offset: u64, out: &mut [u8]) {
        let mut index = offset / 8;
        let (head, rest) = out.split_at_mut(out.len().min(to_word(offset)));
        if !head.is_empty() {
            let from = 8 - to_word(offset);
            head.copy_from_slice(&self.word(index)[from..from + head.len()]);
            index += 1;
        }
        let (words, tail) = rest.as_chunks_mut::<8>();
        for word in words {
            *word = self.word(index);
            index += 1;
        }
        tail.copy_from_slice(&self.word(index)[..tail.len()]);
    }

    /// Compares with the bytes from `offset` on; where the first difference is.
    pub(super) fn check(self, offset: u64, bytes: &[u8]) -> Result<(), usize> {
        let mut index = offset / 8;
        let (head, rest) = bytes.split_at(bytes.len().min(to_word(offset)));
        let mut at = 0;
        if !head.is_empty() {
            let from = 8 - to_word(offset);
            differs(head, &self.word(index)[from..from + head.len()]).map_err(|n| at + n)?;
            index += 1;
            at = head.len();
        }
        let (words, tail) = rest.as_chunks::<8>();
        for word in words {
            let expected = self.word(index);
            if *word != expected {
                differs(word, &expected).map_err(|n| at + n)?;
            }
            index += 1;
            at += 8;
        }
        differs(tail, &self.word(index)[..tail.len()]).map_err(|n| at + n)
    }
}

/// Bytes before the next word begins.
fn to_word(offset: u64) -> usize {
    usize::try_from(offset.wrapping_neg() % 8).unwrap_or(0)
}

/// The first difference of two slices of the same length.
pub(super) fn differs(got: &[u8], expected: &[u8]) -> Result<(), usize> {
    match got.iter().zip(expected).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(at),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(client: u16, seq: u32) -> Id {
        Id { client, seq }
    }

    fn bytes(body: Body, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        body.fill(0, &mut bytes);
        bytes
    }

    #[test]
    fn pieces_are_the_same_as_the_whole() {
        let body = Key::new(1).body(Direction::Response, id(3, 4));
        let whole = bytes(body, 100);
        for from in 0..100 {
            for to in from..=100 {
                let mut piece = vec![0; to - from];
                body.fill(from as u64, &mut piece);
                assert_eq!(piece, whole[from..to], "{from}..{to}");
                assert_eq!(body.check(from as u64, &piece), Ok(()));
                if let Some(last) = piece.last_mut() {
                    *last ^= 1;
                    assert_eq!(body.check(from as u64, &piece), Err(to - from - 1));
                }
            }
        }
    }

    #[test]
    fn any_piece_tells_its_place() {
        let key = Key::new(2);
        let last = id(CLIENTS_MAX - 1, SEQ_MAX - 1);
        for direction in [Direction::Request, Direction::Response] {
            for id in [id(0, 0), id(7, 1_000_000), last] {
                let whole = bytes(key.body(direction, id), 4096);
                for offset in [0, 1, 7, 8, 9, 2001] {
                    let place = key.place(&whole[offset..offset + 23]);
                    assert_eq!(place, Some(Place { direction, id, offset: offset as u64 }));
                }
            }
        }
        assert_eq!(Key::new(3).place(&bytes(key.body(Direction::Request, last), 64)), None);
        assert_eq!(key.place(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"), None);
    }

    #[test]
    fn bodies_share_nothing() {
        let key = Key::new(4);
        let mine = bytes(key.body(Direction::Response, id(1, 1)), 64);
        for other in [
            key.body(Direction::Request, id(1, 1)),
            key.body(Direction::Response, id(1, 2)),
            key.body(Direction::Response, id(2, 1)),
        ] {
            let same = mine.iter().zip(bytes(other, 64)).filter(|(a, b)| **a == *b).count();
            assert!(same < 8, "{same} of 64 bytes");
        }
    }
}
