//! What is done with sockets, and how long it may take.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{MsgFlags, recv};

use crate::clock;

/// How long anything may take that should happen at once. Only on a kernel that fails is it
/// waited for, and only once: nothing is tried after a failure.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// A response whose bytes are all different from those nearby.
pub(super) fn response(body: usize) -> Vec<u8> {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {body}\r\n\r\n");
    let body = (0_u32..).flat_map(u32::to_be_bytes).take(body);
    head.into_bytes().into_iter().chain(body).collect()
}

/// Reads exactly what is expected.
pub(super) fn receive(mut from: &TcpStream, expected: &[u8], who: &str) -> anyhow::Result<()> {
    let mut got = vec![0; expected.len()];
    let mut len = 0;
    while len < got.len() {
        // A nonblocking socket waits here, too.
        if !readable(from)? {
            bail!("{who} gets {len} of {} bytes", got.len());
        }
        match from.read(&mut got[len..]) {
            Ok(0) => bail!("{who} gets an end after {len} of {} bytes", got.len()),
            Ok(n) => len += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e).with_context(|| format!("{who} reads")),
        }
    }
    let other = got.iter().zip(expected).position(|(got, expected)| got != expected);
    if let Some(at) = other {
        bail!("{who} gets other bytes than were sent, from the {at}th of {} on", got.len());
    }
    Ok(())
}

/// Nothing is there to be read, and the connection is open.
pub(super) fn silent(socket: &TcpStream, who: &str) -> anyhow::Result<()> {
    match recv(socket.as_raw_fd(), &mut [0; 1], MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT) {
        Err(Errno::EAGAIN) => Ok(()),
        Ok(0) => bail!("{who} gets an end"),
        Ok(_) => bail!("{who} gets bytes that are not for it"),
        Err(error) => bail!("{who}: {error}"),
    }
}

/// Sends bytes and reads them at the other end.
pub(super) fn transfer(
    mut from: &TcpStream,
    to: &TcpStream,
    bytes: &[u8],
    who: &str,
) -> anyhow::Result<()> {
    thread::scope(|scope| {
        let sender = scope.spawn(|| from.write_all(bytes));
        let received = receive(to, bytes, who);
        let sent = sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        received.and_then(|()| sent.context("sending"))
    })
}

/// Ends one direction.
pub(super) fn ends(from: &TcpStream, mut to: &TcpStream) -> anyhow::Result<()> {
    from.shutdown(Shutdown::Write)?;
    let n = to.read(&mut [0; 64]).context("reading the end")?;
    ensure!(n == 0, "{n} bytes instead of the end");
    Ok(())
}

pub(super) fn readable(socket: &TcpStream) -> anyhow::Result<bool> {
    let mut sockets = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    Ok(poll(&mut sockets, PollTimeout::try_from(PATIENCE)?)? > 0)
}

pub(super) fn watch(socket: &TcpStream, flags: EpollFlags) -> anyhow::Result<Epoll> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    epoll.add(socket, EpollEvent::new(flags, 0))?;
    Ok(epoll)
}

pub(super) fn wakes(epoll: &Epoll, patience: Duration) -> anyhow::Result<bool> {
    Ok(epoll.wait(&mut [EpollEvent::empty()], EpollTimeout::try_from(patience)?)? > 0)
}

/// Looks until it is true, as long as there is patience.
pub(super) fn eventually(mut is_true: impl FnMut() -> bool) -> bool {
    let end = clock::now() + PATIENCE;
    loop {
        if is_true() {
            return true;
        }
        if clock::now() >= end {
            return false;
        }
        thread::sleep(Duration::from_micros(50));
    }
}
