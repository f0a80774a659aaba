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
        let mut found = seen;
        // SAFETY: as above; the instruction compares with and answers in r0.
        unsafe {
            asm!(
                "r0 = cmpxchg_64({counter} + 0, r0, {value})",
                counter = in(reg) counter,
                value = in(reg) value,
                inout("r0") found,
            );
        }
        if found == seen {
            break;
        }
        seen = found;
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
