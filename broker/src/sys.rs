//! System calls that no safe wrapper covers; nearly all of the daemon's `unsafe`.
#![expect(unsafe_code, reason = "the one place for raw system calls, each block with its reason")]

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::libc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Has a listener hand out connections only once they have bytes to read (`tcp(7)`,
/// `TCP_DEFER_ACCEPT`); a silent one comes through after about `seconds`.
pub(crate) fn defer_accept(listener: BorrowedFd<'_>, seconds: i32) -> io::Result<()> {
    const LENGTH: libc::socklen_t = 4;
    // SAFETY: the value points to a c_int that is 4 bytes long and lives across the call.
    let result = unsafe {
        libc::setsockopt(
            listener.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_DEFER_ACCEPT,
            (&raw const seconds).cast(),
            LENGTH,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Puts a listener into the event loop.
pub(crate) fn watch_listener(listener: TcpListener) -> io::Result<AsyncFd<TcpListener>> {
    // SAFETY: the AsyncFd owns the listener, which keeps its one descriptor open until dropped.
    Ok(unsafe { AsyncFd::register_with_interest(listener, Interest::READABLE) }?)
}
