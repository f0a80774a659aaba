//! System calls that no safe wrapper covers; nearly all of the daemon's `unsafe`.
#![expect(unsafe_code, reason = "the one place for raw system calls, each block with its reason")]

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, BorrowedFd};

use aya_log::EbpfLogger;
use log::Log;
use nix::errno::Errno;
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

/// What the kernel programs log, as aya reads it.
pub(crate) type ProgramsLog = EbpfLogger<&'static dyn Log>;

/// Puts the programs' log into the event loop.
pub(crate) fn watch_log(log: ProgramsLog) -> io::Result<AsyncFd<ProgramsLog>> {
    // SAFETY: the AsyncFd owns the log, which keeps its one map descriptor open until dropped.
    Ok(unsafe { AsyncFd::register_with_interest(log, Interest::READABLE) }?)
}

/// The cookie of the network namespace that a socket belongs to, as kernel programs see it
/// (`SO_NETNS_COOKIE`, Linux 5.14).
pub(crate) fn netns_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let mut cookie = 0_u64;
    let mut length: libc::socklen_t = 8;
    // SAFETY: the kernel writes at most `length` bytes to `cookie`, which is 8 bytes long, and
    // the real length to `length`; both live across the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    Errno::result(result)?;
    Ok(cookie)
}

/// How many sent bytes the peer has not acknowledged (`tcp(7)`, `SIOCOUTQ`).
pub(crate) fn unacknowledged(socket: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    let mut bytes = 0;
    // SAFETY: the kernel writes one c_int to `bytes`, which is one and lives across the call.
    Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpStream, UdpSocket};
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn sockets_of_one_namespace_share_its_cookie() {
        let cookie = || netns_cookie(UdpSocket::bind("127.0.0.1:0").unwrap().as_fd()).unwrap();
        assert_ne!(cookie(), 0);
        assert_eq!(cookie(), cookie());
    }

    #[test]
    fn what_nobody_has_read_is_unacknowledged_in_the_end() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _receiver = listener.accept().unwrap();
        assert_eq!(unacknowledged(sender.as_fd()).unwrap(), 0);
        sender.set_nonblocking(true).unwrap();
        while sender.write(&[0; 4096]).is_ok() {}
        assert!(unacknowledged(sender.as_fd()).unwrap() > 0);
    }
}
