//! Sockets: a stream that joins the event loop late, listeners, and dialling.

mod listening;

use std::cell::{Cell, OnceCell};
use std::future::poll_fn;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use nix::sys::socket::{SockFlag, accept4};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

pub use self::listening::Listening;

use crate::config::Keepalive;
use crate::datapath::Datapath;
use crate::sys;

/// Pending connections a listener may hold before the kernel drops handshakes. The kernel caps it
/// at `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// A connected, nonblocking TCP socket.
///
/// It is registered with the event loop only when it first has to wait: a one-shot client whose
/// request is already here and whose response fits the socket buffer never costs an `epoll_ctl`.
/// Every operation therefore tries first and waits second.
#[derive(Debug)]
pub struct Stream {
    // Declared before `socket`: it must leave the event loop before the descriptor is closed.
    registration: OnceCell<AsyncFd<RawFd>>,
    socket: TcpStream,
    abort: Cell<bool>,
    /// Whether the kernel resets the connection when the socket is closed, whoever closes it.
    resets: Cell<bool>,
    /// Bytes in each direction so far.
    sent: Cell<u64>,
    received: Cell<u64>,
}

impl Stream {
    /// Wraps a connected socket that is already nonblocking.
    #[must_use]
    pub fn new(socket: TcpStream) -> Self {
        Self {
            registration: OnceCell::new(),
            socket,
            abort: Cell::new(false),
            resets: Cell::new(false),
            sent: Cell::new(0),
            received: Cell::new(0),
        }
    }

    fn registration(&self) -> io::Result<&AsyncFd<RawFd>> {
        if let Some(registration) = self.registration.get() {
            return Ok(registration);
        }
        let interest = Interest::READABLE | Interest::WRITABLE;
        #[expect(unsafe_code, reason = "registering a descriptor that another field owns")]
        // SAFETY: `socket` owns the descriptor and is never replaced; `registration` is declared
        // before it, so the AsyncFd is dropped while the descriptor is still open.
        let registration =
            unsafe { AsyncFd::register_with_interest(self.socket.as_raw_fd(), interest) }?;
        Ok(self.registration.get_or_init(|| registration))
    }

    /// Leaves the event loop, until it has to wait again.
    pub fn leave_event_loop(&mut self) {
        self.registration.take();
    }

    /// Receives some bytes; 0 means that the peer has ended its side.
    pub async fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.registration.get().is_none() {
            match self.try_recv(buffer) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
        poll_fn(|cx| self.poll_recv(cx, buffer)).await
    }

    fn poll_recv(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        let registration = self.registration()?;
        loop {
            let mut guard = ready!(registration.poll_read_ready(cx))?;
            match self.try_recv(buffer) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => guard.clear_ready(),
                Ok(n) => {
                    // A short read has emptied the queue: the next one waits for an event instead
                    // of finding that out by a system call. An event that came meanwhile is kept.
                    if n > 0 && n < buffer.len() {
                        guard.clear_ready();
                    }
                    return Poll::Ready(Ok(n));
                }
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }

    /// Receives what is there already; `WouldBlock` if there is nothing.
    pub fn try_recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let received = retry_interrupted(|| (&self.socket).read(buffer))?;
        self.received.set(self.received.get() + received as u64);
        Ok(received)
    }

    /// Waits for something to receive, without holding a buffer meanwhile.
    pub async fn readable(&self) -> io::Result<()> {
        let registration = self.registration()?;
        loop {
            let mut guard = poll_fn(|cx| registration.poll_read_ready(cx)).await?;
            match self.peek() {
                Queue::Empty => guard.clear_ready(),
                // The look has consumed the error: a read would now report an orderly end.
                Queue::Failed => return Err(ErrorKind::ConnectionReset.into()),
                Queue::Bytes | Queue::Ended => return Ok(()),
            }
        }
    }

    /// Sends all bytes; gives up when the peer takes none of them for `stall`.
    pub async fn send_all(&self, mut bytes: &[u8], stall: Duration) -> io::Result<()> {
        while !bytes.is_empty() {
            let sent = self.send(bytes, stall).await?;
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Sends some of the bytes; gives up when the peer takes none of them for `stall`.
    pub async fn send(&self, bytes: &[u8], stall: Duration) -> io::Result<usize> {
        match self.try_send(bytes) {
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            result => return result,
        }
        let registration = self.registration()?;
        let mut writable = std::pin::pin!(async {
            loop {
                let mut guard = poll_fn(|cx| registration.poll_write_ready(cx)).await?;
                match self.try_send(bytes) {
                    Err(e) if e.kind() == ErrorKind::WouldBlock => guard.clear_ready(),
                    result => return result,
                }
            }
        });
        let mut left = sys::unacknowledged(self.as_fd())?;
        loop {
            if let Ok(result) = tokio::time::timeout(stall, &mut writable).await {
                return result;
            }
            // A socket is writable again once a third of its buffer is free, which may be more
            // than a slow peer takes in that time.
            let now_left = sys::unacknowledged(self.as_fd())?;
            if now_left >= left {
                return Err(ErrorKind::TimedOut.into());
            }
            left = now_left;
        }
    }

    fn try_send(&self, bytes: &[u8]) -> io::Result<usize> {
        match retry_interrupted(|| (&self.socket).write(bytes))? {
            0 => Err(ErrorKind::WriteZero.into()),
            sent => {
                self.sent.set(self.sent.get() + sent as u64);
                Ok(sent)
            }
        }
    }

    /// Sends the last bytes before the socket is closed or shut down, which must follow at once:
    /// the end of the stream then travels in the same segment as the bytes, and the peer is woken
    /// once instead of twice (`MSG_MORE`, send(2)).
    pub async fn send_last(&self, bytes: &[u8], stall: Duration) -> io::Result<()> {
        let flags = nix::libc::MSG_MORE | nix::libc::MSG_NOSIGNAL;
        match SockRef::from(&self.socket).send_with_flags(bytes, flags) {
            Ok(sent) => {
                self.sent.set(self.sent.get() + sent as u64);
                self.send_all(&bytes[sent..], stall).await
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                self.send_all(bytes, stall).await
            }
            Err(e) => Err(e),
        }
    }

    /// Waits until the connection is reset (or otherwise in error); an orderly end of the peer's
    /// side does not count.
    pub async fn reset(&self) {
        let Ok(registration) = self.registration() else { return };
        loop {
            match registration.ready(Interest::ERROR).await {
                Ok(guard) if !guard.ready().is_error() => {}
                Ok(_) | Err(_) => return,
            }
        }
    }

    /// Whether the event loop has seen the peer end its side or reset the connection. Costs no
    /// system call, and so knows nothing of a stream that never had to wait.
    #[must_use]
    pub fn peer_ended(&self) -> bool {
        let Some(registration) = self.registration.get() else { return false };
        let mut cx = Context::from_waker(std::task::Waker::noop());
        match registration.poll_read_ready(&mut cx) {
            Poll::Ready(Ok(guard)) => guard.ready().is_read_closed(),
            Poll::Ready(Err(_)) => true,
            Poll::Pending => false,
        }
    }

    /// What a look at the receive queue shows, without taking anything from it. `FIONREAD` would be
    /// quicker, but does not count what TCP has for a socket that is in a map.
    pub fn peek(&self) -> Queue {
        match retry_interrupted(|| self.socket.peek(&mut [0; 1])) {
            Ok(0) => Queue::Ended,
            Ok(_) => Queue::Bytes,
            Err(e) if e.kind() == ErrorKind::WouldBlock => Queue::Empty,
            Err(_) => Queue::Failed,
        }
    }

    /// Whether what is to be received begins with this; nothing of it is taken.
    pub fn begins_with(&self, bytes: &[u8]) -> bool {
        let mut found = [0; 16];
        let n = retry_interrupted(|| self.socket.peek(&mut found)).unwrap_or(0);
        found[..n].starts_with(bytes)
    }

    /// Has `cx` woken at the next event on the receive side; says what is there already.
    pub fn watch(&self, cx: &mut Context<'_>) -> Queue {
        let Ok(registration) = self.registration() else { return Queue::Failed };
        loop {
            match registration.poll_read_ready(cx) {
                Poll::Pending => return Queue::Empty,
                Poll::Ready(Err(_)) => return Queue::Failed,
                Poll::Ready(Ok(mut guard)) => match self.peek() {
                    Queue::Empty => guard.clear_ready(),
                    found => return found,
                },
            }
        }
    }

    /// Whether the peer's TCP has got any of the last `sent` bytes. If not, nothing that has come is an
    /// answer to them. Ours knows this no later than it knows of the answer.
    #[must_use]
    pub fn has_reached_peer(&self, sent: u64) -> bool {
        sys::unacknowledged(self.as_fd()).is_ok_and(|left| left < sent)
    }

    /// Sends what lies in the queue because more was announced (`MSG_MORE`, send(2)), if so many bytes
    /// do. Answers whether they did.
    pub fn push(&self, bytes: u64) -> bool {
        let held = sys::not_sent(self.as_fd()).is_ok_and(|held| held >= bytes);
        // Setting this option, even again, pushes (tcp(7), `TCP_NODELAY`).
        held && self.socket.set_nodelay(true).is_ok()
    }

    /// Bytes sent so far.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.sent.get()
    }

    /// Bytes received so far.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received.get()
    }

    /// Ends our side of the connection.
    pub fn shutdown(&self) {
        // The peer may have reset the connection; then there is nothing left to end.
        self.socket.shutdown(Shutdown::Write).ok();
    }

    /// Whether dropping the stream resets the connection, so that the peer cannot take what it has
    /// for all there is.
    pub fn abort_on_close(&self, abort: bool) {
        self.abort.set(abort);
    }

    /// See [`Self::abort_on_close`].
    pub fn aborts_on_close(&self) -> bool {
        self.abort.get()
    }

    /// Has the kernel reset the connection if this process is killed: for streams that end where their
    /// connection ends, which must not look complete then. Dropping the stream in order ends it in order
    /// all the same.
    pub fn reset_if_killed(&self) {
        if !self.resets.get() {
            let set = SockRef::from(&self.socket).set_linger(Some(Duration::ZERO));
            self.resets.set(set.is_ok());
        }
    }

    /// Acknowledges at once what arrives from now on.
    ///
    /// A long-lived connection has left quick-ack mode: the last, partial segment of a response
    /// then waits at the origin (Nagle or `TCP_CORK`) for an acknowledgement that we would delay
    /// by 40 ms. The kernel leaves quick-ack mode again by itself, so this is called before each
    /// wait for more of a response (tcp(7), `TCP_QUICKACK`).
    pub fn quick_ack(&self) {
        SockRef::from(&self.socket).set_tcp_quickack(true).ok();
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.socket.peer_addr()
    }

    /// Our own address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.abort.get() != self.resets.get() {
            let linger = self.abort.get().then_some(Duration::ZERO);
            SockRef::from(&self.socket).set_linger(linger).ok();
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The state of a receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// Nothing to read.
    Empty,
    /// Bytes are waiting.
    Bytes,
    /// The peer has ended its side, and all bytes were read.
    Ended,
    /// The connection is reset or otherwise broken.
    Failed,
}

fn retry_interrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Binds a nonblocking listener that does not listen yet. Accepted sockets inherit `TCP_NODELAY`.
///
/// With `shared`, several workers may bind the same address (`SO_REUSEPORT`) and the kernel spreads
/// the connections. With `wait_for_bytes`, connections are handed over once the client has sent
/// something (`TCP_DEFER_ACCEPT`), which saves a wake-up where the client always speaks first.
pub fn bind(address: SocketAddr, shared: bool, wait_for_bytes: bool) -> io::Result<Socket> {
    let socket = tcp_socket(address)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(shared)?;
    if address.is_ipv6() {
        // `[::]` means every address, whatever the host's default is.
        socket.set_only_v6(false)?;
    }
    socket.set_tcp_nodelay(true)?;
    if wait_for_bytes {
        sys::defer_accept(socket.as_fd(), 1)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

/// A listener in the event loop.
#[derive(Debug)]
pub struct Listener(AsyncFd<TcpListener>);

impl Listener {
    /// Starts to listen.
    pub fn start(bound: Socket) -> io::Result<Self> {
        bound.listen(BACKLOG)?;
        Ok(Self(sys::watch_listener(bound.into())?))
    }

    /// Waits for a connection.
    pub async fn accept(&self) -> io::Result<Stream> {
        loop {
            let mut guard = self.0.readable().await?;
            match self.accept_queued() {
                Ok(stream) => return Ok(stream),
                Err(e) => match e.kind() {
                    ErrorKind::WouldBlock => guard.clear_ready(),
                    // The client gave up while it was queued.
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    _ => return Err(e),
                },
            }
        }
    }

    /// Has clients on this host served on the processor that they run on, if there is one for each of
    /// so many listeners that share the address: what wakes whom then stays within it. From other hosts
    /// one processor may take all packets, so those connections are spread evenly.
    ///
    /// To be called once it listens: a socket that brings a program along does not join the others.
    pub fn keep_clients_on_their_processor(&self, listeners: NonZeroUsize) {
        let processors = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let count = u32::try_from(listeners.get()).ok().filter(|_| listeners <= processors);
        let Some(count) = count else { return };
        if let Err(error) = sys::choose_by_processor(self.0.get_ref().as_fd(), count) {
            tracing::debug!(%error, "connections of this host are spread like others");
        }
    }

    /// Takes a connection that is already queued.
    pub fn accept_queued(&self) -> io::Result<Stream> {
        accept_queued(self.0.get_ref())
    }

    /// The same for one that [`Listener::accept`] would find, which waits for the next one if there is
    /// none.
    pub fn try_accept(&self) -> io::Result<Stream> {
        self.0.try_io(Interest::READABLE, accept_queued)
    }

    /// The address it listens on.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.get_ref().local_addr()
    }
}

/// A listener that wakes nobody: its connections stay in the kernel's queue until somebody looks.
#[derive(Debug)]
pub struct Backlog(TcpListener);

impl Backlog {
    /// Starts to listen.
    pub fn start(bound: Socket) -> io::Result<Self> {
        bound.listen(BACKLOG)?;
        Ok(Self(bound.into()))
    }

    /// Takes a connection that is already queued.
    pub fn accept_queued(&self) -> io::Result<Stream> {
        accept_queued(&self.0)
    }

    /// The address it listens on.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

/// Nonblocking from the start: one system call where `std`'s `accept` needs two.
fn accept_queued(listener: &TcpListener) -> io::Result<Stream> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    Ok(Stream::new(accept4(listener, flags)?.into()))
}

fn tcp_socket(peer_or_local: SocketAddr) -> io::Result<Socket> {
    Socket::new(
        Domain::for_address(peer_or_local),
        Type::STREAM.nonblocking().cloexec(),
        Some(Protocol::TCP),
    )
}

/// A socket to connect to an origin with, marked as the broker's own in `datapath`.
pub fn own_socket(origin: SocketAddr, datapath: &dyn Datapath) -> io::Result<Socket> {
    let socket = tcp_socket(origin)?;
    datapath.own(socket.as_fd())?;
    socket.set_tcp_nodelay(true)?;
    Ok(socket)
}

/// Refuses a connection that has its own other end: to a dead origin of this host on an ephemeral
/// port, TCP's simultaneous open connects a socket to itself, and its client would read its own
/// request.
pub fn refuse_itself(local: SocketAddr, origin: SocketAddr) -> io::Result<()> {
    if local == origin { Err(ErrorKind::ConnectionRefused.into()) } else { Ok(()) }
}

/// Opens a connection to an origin, marked as the broker's own in `datapath`; to none that leads back to
/// one of our listeners.
pub async fn dial(
    origin: SocketAddr,
    keepalive: Option<Keepalive>,
    timeout: Duration,
    datapath: &dyn Datapath,
    listening: &Listening,
) -> io::Result<Stream> {
    listening.refuse(origin)?;
    let socket = own_socket(origin, datapath)?;
    if let Some(keepalive) = keepalive {
        socket.set_tcp_keepalive(
            &TcpKeepalive::new()
                .with_time(keepalive.idle)
                .with_interval(keepalive.interval)
                .with_retries(keepalive.count),
        )?;
    }
    match socket.connect(&origin.into()) {
        Err(e) if e.raw_os_error() != Some(nix::libc::EINPROGRESS) => return Err(e),
        _ => {}
    }
    let stream = Stream::new(socket.into());
    let registration = stream.registration()?;
    let connected = async {
        let guard = poll_fn(|cx| registration.poll_write_ready(cx)).await?;
        drop(guard);
        match stream.socket.take_error()? {
            Some(e) => Err(e),
            None => Ok(()),
        }
    };
    tokio::time::timeout(timeout, connected)
        .await
        .unwrap_or_else(|_elapsed| Err(ErrorKind::TimedOut.into()))?;
    refuse_itself(stream.local_addr()?, origin)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
    use nix::unistd::Pid;

    use super::*;

    #[test]
    fn clients_on_this_host_come_to_the_listener_of_their_processor() {
        let this_thread = Pid::from_raw(0);
        let here = sched_getaffinity(this_thread).unwrap();
        let all: Vec<_> = (0..CpuSet::count()).filter(|&cpu| here.is_set(cpu).unwrap()).collect();
        let count = NonZeroUsize::new(all.len().min(2)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _inside = runtime.enter();
        let mut address = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut listeners = Vec::new();
        for _ in 0..count.get() {
            let listener = Listener::start(bind(address, true, false).unwrap()).unwrap();
            listener.keep_clients_on_their_processor(count);
            address = listener.local_addr().unwrap();
            listeners.push(listener);
        }
        for cpu in all {
            let mut only = CpuSet::new();
            only.set(cpu).unwrap();
            sched_setaffinity(this_thread, &only).unwrap();
            for _ in 0..10 {
                let _client = TcpStream::connect(address).unwrap();
                assert!(listeners[cpu % count].accept_queued().is_ok(), "processor {cpu}");
            }
        }
    }
}
