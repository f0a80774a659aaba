//! A worker's byte buffers, shared by its sessions.
//!
//! A connection that waits for its peer holds no buffer, so thousands of idle clients cost next
//! to nothing.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use crate::boundary::http1::HEAD_BYTES_MAX;

/// Enough for nearly every request with its head.
const SMALL: usize = 16 * 1024;

/// Holds any head that is accepted, and moves bodies in few system calls.
const LARGE: usize = 2 * HEAD_BYTES_MAX;

/// Spare buffers kept for the next session; more are freed.
const SPARE_MAX: usize = 32;

/// The buffers of one worker; clones share them.
#[derive(Clone, Default)]
pub struct Buffers(Rc<Spare>);

#[derive(Default)]
struct Spare {
    small: RefCell<Vec<Box<[u8]>>>,
    large: RefCell<Vec<Box<[u8]>>>,
}

impl Buffers {
    /// A buffer for a request. Its contents are unspecified.
    #[must_use]
    pub fn small(&self) -> Buffer {
        self.take(SMALL)
    }

    /// A buffer for bodies and responses. Its contents are unspecified.
    #[must_use]
    pub fn large(&self) -> Buffer {
        self.take(LARGE)
    }

    fn take(&self, size: usize) -> Buffer {
        let spare = self.0.of_size(size).borrow_mut().pop();
        let bytes = spare.unwrap_or_else(|| vec![0; size].into_boxed_slice());
        Buffer { bytes, home: self.clone() }
    }
}

impl Spare {
    fn of_size(&self, size: usize) -> &RefCell<Vec<Box<[u8]>>> {
        if size == SMALL { &self.small } else { &self.large }
    }
}

/// A borrowed buffer; goes back when dropped.
pub struct Buffer {
    bytes: Box<[u8]>,
    home: Buffers,
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut spare = self.home.0.of_size(bytes.len()).borrow_mut();
        if spare.len() < SPARE_MAX {
            spare.push(bytes);
        }
    }
}

/// Bytes received from a client and not used yet.
pub struct Inbox {
    buffers: Buffers,
    buffer: Option<Buffer>,
    start: usize,
    end: usize,
}

impl Inbox {
    /// An empty inbox; it borrows a buffer when it needs one.
    #[must_use]
    pub fn new(buffers: &Buffers) -> Self {
        Self { buffers: buffers.clone(), buffer: None, start: 0, end: 0 }
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |b| &b[self.start..self.end])
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Forgets the first `n` bytes.
    pub fn consume(&mut self, n: usize) {
        debug_assert!(n <= self.end - self.start, "only what is there can be consumed");
        self.start += n;
        if self.is_empty() {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Gives the buffer back if nothing is in it.
    pub fn release(&mut self) {
        if self.is_empty() {
            self.buffer = None;
        }
    }

    /// Room for more bytes; empty only if a full large buffer is in use.
    pub fn room(&mut self) -> &mut [u8] {
        let length = self.end - self.start;
        let full = self.buffer.as_ref().is_some_and(|b| length == b.len());
        if full && length < LARGE {
            let mut larger = self.buffers.large();
            larger[..length].copy_from_slice(self.bytes());
            self.buffer = Some(larger);
            (self.start, self.end) = (0, length);
        }
        let buffer = self.buffer.get_or_insert_with(|| self.buffers.small());
        if self.end == buffer.len() && self.start > 0 {
            buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, length);
        }
        &mut buffer[self.end..]
    }

    /// Puts bytes in, of which there are no more than [`Inbox::room`] has.
    pub fn fill(&mut self, bytes: &[u8]) {
        self.room()[..bytes.len()].copy_from_slice(bytes);
        self.filled(bytes.len());
    }

    /// Notes that `n` bytes were written to the start of [`Inbox::room`].
    pub fn filled(&mut self, n: usize) {
        self.end += n;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(inbox: &mut Inbox, bytes: &[u8]) {
        for &byte in bytes {
            inbox.room()[0] = byte;
            inbox.filled(1);
        }
    }

    #[test]
    fn an_inbox_keeps_order_while_it_grows_and_shrinks() {
        let mut inbox = Inbox::new(&Buffers::default());
        let bytes: Vec<u8> = (0..=255).cycle().take(SMALL + 1000).collect();
        put(&mut inbox, &bytes);
        assert_eq!(inbox.bytes(), bytes);
        inbox.consume(SMALL);
        put(&mut inbox, b"next");
        assert_eq!(inbox.bytes(), [&bytes[SMALL..], b"next"].concat());
        inbox.consume(inbox.bytes().len());
        inbox.release();
        assert!(inbox.is_empty() && inbox.buffer.is_none());
    }

    #[test]
    fn a_full_inbox_has_no_room() {
        let mut inbox = Inbox::new(&Buffers::default());
        put(&mut inbox, &vec![7; LARGE]);
        assert!(inbox.room().is_empty());
        inbox.consume(1);
        assert_eq!(inbox.room().len(), 1);
    }

    #[test]
    fn buffers_are_used_again() {
        let buffers = Buffers::default();
        let first = buffers.small();
        let address = first.as_ptr();
        drop(first);
        assert_eq!(buffers.small().as_ptr(), address);
    }
}
