//! The connections that are followed, each in a place near the one that its socket's cookie names.
//!
//! Every connection of the host pays for this, and two other ways were dearer: storage with a socket
//! that has nothing else stored by 1.5 us, a hash map, which allocates, locks and scatters, by 0.8 us.
//! Cookies are handed out in sequence: connections made one after the other have places side by side.

use core::mem::offset_of;
use core::ptr;

use broker_ebpf::abi::{Connection, ConnectionPlace};

use crate::atomic;
use crate::maps::{CONNECTIONS, CONNECTIONS_MASK};

/// Places that a connection may have: of 1,000 connections 4 find none when half of all are taken.
const PROBES: u64 = 8;

/// Gives a socket a place with its connection; `None` if there is none left.
#[inline(always)]
pub fn follow<'a>(cookie: u64, connection: Connection) -> Option<&'a mut Connection> {
    for probe in 0..PROBES {
        let place = place(cookie + probe)?;
        // SAFETY: a value of the map. Who has put its cookie there is the only one to touch the
        // rest.
        unsafe {
            let owner = &raw mut (*place).cookie;
            // It may still be there from an earlier connection of the socket whose end nobody told.
            if owner.read_volatile() == cookie || atomic::swap(owner, 0, cookie) {
                (&raw mut (*place).connection).write(connection);
                return Some(&mut (*place).connection);
            }
        }
    }
    None
}

/// The connection of a socket, if it is followed. Only for programs that run for this socket,
/// which they do under its lock.
#[inline(always)]
pub fn followed<'a>(cookie: u64) -> Option<&'a mut Connection> {
    for probe in 0..PROBES {
        let place = place(cookie + probe)?;
        // SAFETY: a value of the map; an aligned word is read whole. With its cookie there the
        // rest is this socket's, for which no other program runs.
        unsafe {
            if (&raw const (*place).cookie).read_volatile() == cookie {
                return Some(&mut (*place).connection);
            }
        }
    }
    None
}

/// Gives the place of a followed connection back.
#[inline(always)]
pub fn forget(connection: &mut Connection) {
    let place = ptr::from_mut(connection).cast::<ConnectionPlace>();
    const { assert!(offset_of!(ConnectionPlace, connection) == 0) };
    // SAFETY: a place begins with its connection; an aligned word is written whole.
    unsafe { (&raw mut (*place).cookie).write_volatile(0) };
}

#[inline(always)]
fn place(near: u64) -> Option<*mut ConnectionPlace> {
    CONNECTIONS.get_ptr_mut((near & u64::from(CONNECTIONS_MASK.load())) as u32)
}
