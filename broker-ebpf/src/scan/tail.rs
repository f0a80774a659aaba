//! Words, compared without memory, and the classes of bytes.

/// A word that is being read: its last 24 bytes and its length.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tail {
    high: u64,
    middle: u64,
    low: u64,
    len: u32,
}

impl Tail {
    #[inline(always)]
    pub(super) const fn push(&mut self, byte: u8) {
        self.high = self.high << 8 | self.middle >> 56;
        self.middle = self.middle << 8 | self.low >> 56;
        self.low = self.low << 8 | byte as u64;
        self.len = self.len.wrapping_add(1);
    }

    /// Begins the next word. The bytes of the last one stay where they are, and are not compared.
    #[inline(always)]
    pub(super) const fn clear(&mut self) {
        self.len = 0;
    }

    #[inline(always)]
    pub(super) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the word is `known`, all of it; one branch.
    #[inline(always)]
    pub(super) const fn is(&self, known: &Known) -> bool {
        let Known { tail, mask } = known;
        ((self.high ^ tail.high) & mask[0])
            | ((self.middle ^ tail.middle) & mask[1])
            | ((self.low ^ tail.low) & mask[2])
            | (self.len ^ tail.len) as u64
            == 0
    }
}

/// A word to compare with, of at most 24 bytes.
pub(super) struct Known {
    tail: Tail,
    /// The bytes of `high`, `middle` and `low` that are the word's.
    mask: [u64; 3],
}

impl Known {
    pub(super) const fn new(word: &[u8]) -> Self {
        assert!(word.len() <= 24, "a part of it would not be compared");
        let mut tail = Tail { high: 0, middle: 0, low: 0, len: 0 };
        let mut mask = Tail { high: 0, middle: 0, low: 0, len: 0 };
        let mut i = 0;
        while i < word.len() {
            tail.push(word[i]);
            mask.push(0xff);
            i += 1;
        }
        Self { tail, mask: [mask.high, mask.middle, mask.low] }
    }
}

/// The bytes of tokens (RFC 9110 section 5.6.2), one bit each. A table would be looked up in
/// memory, and the verifier would ask for the bounds.
const TOKENS: [u64; 2] = {
    let symbols = b"!#$%&'*+-.^_`|~";
    let mut set = [0; 2];
    let mut i = 0;
    while i < symbols.len() {
        set[symbols[i] as usize / 64] |= 1 << (symbols[i] % 64);
        i += 1;
    }
    let mut byte = 0_u8;
    while byte < 128 {
        if byte.is_ascii_alphanumeric() {
            set[byte as usize / 64] |= 1 << (byte % 64);
        }
        byte += 1;
    }
    set
};

/// Whether `byte` may stand in a token.
#[inline(always)]
pub(super) const fn is_token(byte: u8) -> bool {
    let set = match byte {
        0..64 => TOKENS[0],
        64..128 => TOKENS[1],
        _ => 0,
    };
    set >> (byte & 63) & 1 != 0
}

/// Whether `byte` is visible ASCII.
#[inline(always)]
pub(super) const fn is_graphic(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~')
}

/// Whether `byte` may stand in a line: all but control bytes, HTAB excepted.
#[inline(always)]
pub(super) const fn is_clean(byte: u8) -> bool {
    (byte >= b' ' && byte != 0x7f) || byte == b'\t'
}

/// Whether `byte` is SP or HTAB.
#[inline(always)]
pub(super) const fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

#[cfg(test)]
mod tests {
    use super::{Known, Tail, is_token};

    #[test]
    fn only_whole_words_are_equal() {
        let word = b"abcdefghijklmnopqrstuvwx";
        let mut tail = Tail::default();
        let mut is = |bytes: &[u8], known: &Known| {
            tail.clear();
            for &byte in bytes {
                tail.push(byte);
            }
            tail.is(known)
        };
        for len in 0..=word.len() {
            let (word, after) = word.split_at(len);
            let known = Known::new(word);
            assert!(is(word, &known));
            // Longer at either end, by any number of bytes.
            for before in 1..60 {
                assert!(
                    !is(&[&vec![b'x'; before], word].concat(), &known),
                    "{before} before {len}"
                );
                assert!(!is(&[&vec![0; before], word].concat(), &known), "{before} before {len}");
            }
            assert!(after.is_empty() || !is(&[word, after].concat(), &known));
            for at in 0..len {
                let mut other = word.to_vec();
                other[at] ^= 1;
                assert!(!is(&other, &known), "{at} of {len}");
                assert!(!is(&[&word[..at], &word[at + 1..]].concat(), &known), "{at} of {len}");
                // What was there before does not fill in.
                assert!(is(word, &known));
                assert!(!is(&word[at + 1..], &known), "{at} of {len}");
            }
        }
    }

    #[test]
    fn tokens_by_the_book() {
        for byte in 0..=u8::MAX {
            let expected = byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
            assert_eq!(is_token(byte), expected, "{byte:#x}");
        }
    }
}
