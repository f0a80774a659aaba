//! System calls that no safe wrapper covers; nearly all of the daemon's `unsafe`.
#![expect(unsafe_code, reason = "the one place for raw system calls, each block with its reason")]

use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64};

use aya_log::EbpfLogger;
use log::Log;
use nix::errno::Errno;
use nix::libc;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Has a listener hand out connections only once they have bytes to read (`tcp(7)`,
/// `TCP_DEFER_ACCEPT`); a silent one comes through after about `seconds`.
pub(crate) fn defer_accept(listener: BorrowedFd<'_>, seconds: i32) -> io::Result<()> {
    set_tcp_option(listener, libc::TCP_DEFER_ACCEPT, &seconds.to_ne_bytes())
}

/// Has the kernel choose among listeners that share an address (`SO_REUSEPORT`): connections over the
/// loopback interface go to the listener whose place is the processor's that the client runs on, all
/// others where a hash of their ends says (`socket(7)`, `SO_ATTACH_REUSEPORT_CBPF`).
pub(crate) fn choose_by_processor(listener: BorrowedFd<'_>, listeners: u32) -> io::Result<()> {
    /// It is the first interface of every network namespace.
    const LOOPBACK: u32 = 1;
    /// An answer that is no place has the kernel choose by hash.
    const NO_PLACE: u32 = u32::MAX;
    let ancillary = |what: libc::c_int| (libc::SKF_AD_OFF + what).cast_unsigned();
    #[expect(clippy::cast_possible_truncation, reason = "codes of 16 bits")]
    let step = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let is_loopback = step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, LOOPBACK);
    let mut program = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, ancillary(libc::SKF_AD_IFINDEX)),
        libc::sock_filter { jt: 1, ..is_loopback },
        step(libc::BPF_RET | libc::BPF_K, NO_PLACE),
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, ancillary(libc::SKF_AD_CPU)),
        step(libc::BPF_ALU | libc::BPF_MOD | libc::BPF_K, listeners),
        step(libc::BPF_RET | libc::BPF_A, 0),
    ];
    let len = u16::try_from(program.len()).map_err(io::Error::other)?;
    let program = libc::sock_fprog { len, filter: program.as_mut_ptr() };
    let length =
        libc::socklen_t::try_from(size_of::<libc::sock_fprog>()).map_err(io::Error::other)?;
    // SAFETY: the kernel reads the program, which lives across the call, and checks it.
    let result = unsafe {
        libc::setsockopt(
            listener.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const program).cast(),
            length,
        )
    };
    Errno::result(result)?;
    Ok(())
}

/// Sets an option of a TCP socket to the value with these bytes.
pub(crate) fn set_tcp_option(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
    value: &[u8],
) -> io::Result<()> {
    let length = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    // SAFETY: the kernel reads at most `length` bytes of the value, which lives across the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            value.as_ptr().cast(),
            length,
        )
    };
    Errno::result(result)?;
    Ok(())
}

/// The value of an option of a TCP socket; bytes that the kernel does not know stay 0.
pub(crate) fn tcp_option<const N: usize>(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
) -> io::Result<[u8; N]> {
    let mut value = [0; N];
    let mut length = libc::socklen_t::try_from(N).map_err(io::Error::other)?;
    // SAFETY: the kernel writes at most `length` bytes to the value, which is that long, and the
    // real length to `length`; both live across the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            value.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    Errno::result(result)?;
    Ok(value)
}

/// Has a descriptor refer to another socket from now on; the one that it referred to is closed.
pub(crate) fn put_in_place(of: BorrowedFd<'_>, socket: OwnedFd) -> io::Result<()> {
    // SAFETY: both descriptors are open. Whoever owns `of` still owns an open socket afterwards.
    let result = unsafe { libc::dup3(socket.as_raw_fd(), of.as_raw_fd(), libc::O_CLOEXEC) };
    drop(socket);
    Errno::result(result)?;
    Ok(())
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
    number_option(socket, SO_NETNS_COOKIE)
}

fn number_option(socket: BorrowedFd<'_>, option: libc::c_int) -> io::Result<u64> {
    let mut number = 0_u64;
    let mut length: libc::socklen_t = 8;
    // SAFETY: the kernel writes at most `length` bytes to `number`, which is 8 bytes long, and
    // the real length to `length`; both live across the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw mut number).cast(),
            &raw mut length,
        )
    };
    Errno::result(result)?;
    Ok(number)
}

/// The cookie of a socket, as kernel programs see it (socket(7), `SO_COOKIE`).
pub(crate) fn socket_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    number_option(socket, libc::SO_COOKIE)
}

/// How many bytes TCP has received on a socket, ever, whatever became of them (`tcp_info`,
/// Linux 4.1).
pub(crate) fn bytes_received(socket: BorrowedFd<'_>) -> io::Result<u64> {
    /// Where `tcpi_bytes_received` lies, in words of 8 bytes.
    const WORD: usize = 16;
    let mut info = [0_u64; WORD + 1];
    let mut length = libc::socklen_t::try_from(size_of_val(&info)).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes to `info`, which is that long, and the real
    // length to `length`; both live across the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    Errno::result(result)?;
    if (length as usize) < size_of_val(&info) {
        return Err(ErrorKind::Unsupported.into());
    }
    Ok(info[WORD])
}

/// How many bytes a socket says can be read (`FIONREAD`, `ioctl(2)`).
pub(crate) fn unread(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let bytes = bytes_in_queue(socket, libc::FIONREAD)?;
    Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// How many sent bytes the peer has not acknowledged (`tcp(7)`, `SIOCOUTQ`).
pub(crate) fn unacknowledged(socket: BorrowedFd<'_>) -> io::Result<u64> {
    bytes_in_queue(socket, libc::TIOCOUTQ)
}

/// How many bytes lie in a socket's queue that were never sent (`SIOCOUTQNSD`, linux/sockios.h).
pub(crate) fn not_sent(socket: BorrowedFd<'_>) -> io::Result<u64> {
    bytes_in_queue(socket, 0x894b)
}

fn bytes_in_queue(socket: BorrowedFd<'_>, which: libc::c_ulong) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: each of these makes the kernel write one c_int to `bytes`, which is one and lives across the
    // call.
    Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), which, &raw mut bytes) })?;
    Ok(u64::try_from(bytes).unwrap_or(0))
}

/// Puts a descriptor of its own into the event loop.
pub(crate) fn watch_readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the AsyncFd owns the descriptor and keeps it open until dropped.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}

/// Types that several parties may change at a time.
///
/// # Safety
///
/// Consists of atomics and padding only, so that every bit pattern is valid and every access is
/// atomic.
pub(crate) unsafe trait Shared: Sync {}

// SAFETY: one atomic.
unsafe impl Shared for AtomicU64 {}
// SAFETY: atomics only.
unsafe impl<const N: usize> Shared for [AtomicU8; N] {}
// SAFETY: atomics only.
unsafe impl<const N: usize> Shared for [AtomicU64; N] {}

/// The values of an array map of kernel programs, in this process's memory.
pub(crate) struct Mapped<T> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: it owns the mapping, and its values may be used by any thread.
unsafe impl<T: Shared> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Shared> Sync for Mapped<T> {}

impl<T: Shared> Mapped<T> {
    /// Maps an array of `len` values of this type, made with `BPF_F_MMAPABLE`.
    pub(crate) fn new(map: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        // The kernel lays array values out at multiples of 8 bytes.
        const { assert!(size_of::<T>().is_multiple_of(8) && align_of::<T>() <= 8) };
        let bytes = NonZeroUsize::new(len * size_of::<T>()).ok_or(ErrorKind::InvalidInput)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe { mmap(None, bytes, protection, MapFlags::MAP_SHARED, map, 0) }?;
        Ok(Self { start: start.cast(), len })
    }

    /// A value; `None` beyond the end.
    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        // SAFETY: the mapping holds `len` values, lives as long as `self`, and any bits are valid.
        (index < self.len).then(|| unsafe { self.start.add(index).as_ref() })
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and references to it have ended with `self`.
        let result = unsafe { munmap(self.start.cast(), self.len * size_of::<T>()) };
        debug_assert!(result.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpStream, UdpSocket};
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn received_bytes_are_counted_whether_read_or_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        assert_eq!(bytes_received(ours.as_fd()).unwrap(), 0);
        theirs.write_all(&[0; 10]).unwrap();
        ours.read_exact(&mut [0; 10]).unwrap();
        theirs.write_all(&[0; 7]).unwrap();
        ours.peek(&mut [0; 1]).unwrap();
        assert_eq!(bytes_received(ours.as_fd()).unwrap(), 17);
        assert_eq!(unread(ours.as_fd()).unwrap(), 7);
        assert_eq!(bytes_received(theirs.as_fd()).unwrap(), 0);
    }

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
