//! Atomic operations on map values, which all CPUs share.
//!
//! `core`'s atomics lack most operations on this target and its loads abort the linker;
//! the instructions themselves are plain.

use core::arch::asm;

/// Adds to a counter.
///
/// # Safety
///
/// `counter` must lie within a map value.
#[inline(always)]
pub unsafe fn add(counter: *mut u64, value: u64) {
    // SAFETY: the caller vouches for the pointer; the instruction touches nothing else.
    unsafe {
        asm!("lock *(u64 *)({counter} + 0) += {value}", counter = in(reg) counter, value = in(reg) value);
    }
}

/// Adds to a counter and returns what it was before.
///
/// # Safety
///
/// `counter` must lie within a map value.
#[inline(always)]
pub unsafe fn fetch_add(counter: *mut u64, value: u64) -> u64 {
    let mut before = value;
    // SAFETY: the caller vouches for the pointer; the instruction touches nothing else.
    unsafe {
        asm!(
            "{before} = atomic_fetch_add((u64 *)({counter} + 0), {before})",
            counter = in(reg) counter,
            before = inout(reg) before,
        );
    }
    before
}

/// Clears the bits that are not in `mask` and returns what was there before.
///
/// # Safety
///
/// `word` must lie within a map value.
#[inline(always)]
pub unsafe fn fetch_and(word: *mut u64, mask: u64) -> u64 {
    let mut before = mask;
    // SAFETY: the caller vouches for the pointer; the instruction touches nothing else.
    unsafe {
        asm!(
            "{before} = atomic_fetch_and((u64 *)({word} + 0), {before})",
            word = in(reg) word,
            before = inout(reg) before,
        );
    }
    before
}

/// Sets bits.
///
/// # Safety
///
/// `word` must lie within a map value.
#[inline(always)]
pub unsafe fn or(word: *mut u64, bits: u64) {
    // SAFETY: the caller vouches for the pointer; the instruction touches nothing else.
    unsafe {
        asm!("lock *(u64 *)({word} + 0) |= {bits}", word = in(reg) word, bits = in(reg) bits);
    }
}

/// Puts `new` in the place of `old`; answers whether it did.
///
/// # Safety
///
/// `word` must lie within a map value.
#[inline(always)]
pub unsafe fn swap(word: *mut u64, old: u64, new: u64) -> bool {
    let mut found = old;
    // SAFETY: the caller vouches for the pointer; the instruction compares with and answers in r0.
    unsafe {
        asm!(
            "r0 = cmpxchg_64({word} + 0, r0, {new})",
            word = in(reg) word,
            new = in(reg) new,
            inout("r0") found,
        );
    }
    found == old
}

/// Raises a counter to `value` unless it is higher already. Tries a few times only, as a program
/// must end: under heavy contention the others have raised it nearly as far.
///
/// # Safety
///
/// `counter` must lie within a map value.
#[inline(always)]
pub unsafe fn raise(counter: *mut u64, value: u64) {
    // SAFETY: the caller vouches for the pointer; an aligned read of a word is atomic.
    let mut seen = unsafe { counter.read_volatile() };
    for _ in 0..8 {
        if seen >= value {
            break;
        }
        // SAFETY: as above.
        if unsafe { swap(counter, seen, value) } {
            break;
        }
        // SAFETY: as above.
        seen = unsafe { counter.read_volatile() };
    }
}

/// Limits an index by an instruction that the compiler cannot see through: it would drop a mask
/// that it can prove needless, but the verifier has no such proof.
#[inline(always)]
pub fn masked<const MASK: usize>(mut index: usize) -> usize {
    // SAFETY: changes the one register.
    unsafe {
        asm!("{index} &= {mask}", index = inout(reg) index, mask = const MASK, options(nomem));
    }
    index
}
