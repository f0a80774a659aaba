//! An origin that does as a test tells it, connection by connection, and remembers what it got.
//!
//! Each connection has a thread that runs the test's script from top to bottom; that reads better
//! than callbacks, and nothing here is measured.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::netns::Netns;
use crate::sys;

/// A listening scripted origin. Dropping it ends the listener and all its connections.
#[derive(Debug)]
pub struct Scripted {
    address: SocketAddr,
    listener: TcpListener,
    connections: Arc<Mutex<Vec<Arc<Connection>>>>,
}

/// What the origin knows of one connection.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    peer: SocketAddr,
    received: Mutex<Vec<u8>>,
}

impl Connection {
    /// All bytes that the script has read.
    #[must_use]
    pub fn received(&self) -> Vec<u8> {
        lock(&self.received).clone()
    }

    /// The same as text.
    #[must_use]
    pub fn received_text(&self) -> String {
        String::from_utf8_lossy(&self.received()).into_owned()
    }

    /// Ends it, whatever the script does.
    pub fn end(&self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Both)
    }

    /// Says something that the script does not.
    pub fn send(&self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        (&self.stream).write_all(bytes.as_ref())
    }
}

/// The script's side of one connection. It ends in good order when the script returns.
#[derive(Debug)]
pub struct Peer {
    index: usize,
    connection: Arc<Connection>,
    buffer: Vec<u8>,
}

/// A request as the scripted origin reads it.
#[derive(Clone, Debug)]
pub struct Request {
    /// Request line and headers, with the empty line.
    pub head: String,
    /// As many bytes as Content-Length says, or the still encoded chunks.
    pub body: Vec<u8>,
}

impl Request {
    /// The request target.
    #[must_use]
    pub fn target(&self) -> &str {
        self.head.split(' ').nth(1).unwrap_or("")
    }

    /// The value of a header, in any case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }
}

/// The value of a header within a head.
pub(crate) fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().skip(1).find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then_some(value.trim())
    })
}

impl Scripted {
    /// Listens at `address` inside `netns`; `script` runs once for each connection.
    pub fn start(
        netns: &Netns,
        address: SocketAddr,
        script: impl Fn(&mut Peer) -> io::Result<()> + Send + Sync + 'static,
    ) -> Result<Self> {
        let listener = netns
            .run(|| -> io::Result<TcpListener> {
                let domain = Domain::for_address(address);
                let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
                socket.set_reuse_address(true)?;
                socket.bind(&address.into())?;
                socket.listen(4096)?;
                Ok(socket.into())
            })
            .with_context(|| format!("scripted origin at {address}"))?;
        let address = listener.local_addr()?;
        let connections = Arc::new(Mutex::new(Vec::new()));
        let accepting = listener.try_clone()?;
        let (list, script) = (Arc::clone(&connections), Arc::new(script));
        thread::spawn(move || {
            // Ends when the listener is shut down.
            while let Ok((stream, peer)) = accepting.accept() {
                let received = Mutex::default();
                let connection = Arc::new(Connection { stream, peer, received });
                let index = {
                    let mut list = lock(&list);
                    list.push(Arc::clone(&connection));
                    list.len() - 1
                };
                let script = Arc::clone(&script);
                thread::spawn(move || {
                    connection.stream.set_nodelay(true).ok();
                    let mut peer = Peer { index, connection, buffer: Vec::new() };
                    // A broken connection is what many tests are about; they look at the other
                    // end and at the record.
                    script(&mut peer).ok();
                    peer.connection.stream.shutdown(Shutdown::Both).ok();
                });
            }
        });
        Ok(Self { address, listener, connections })
    }

    /// A server of small responses on persistent connections. The body tells the connection's
    /// number and the request's target, e.g. `0 /path`.
    pub fn http(netns: &Netns, address: SocketAddr) -> Result<Self> {
        Self::start(netns, address, Peer::serve)
    }

    /// A server that sends back whatever it gets.
    pub fn echo(netns: &Netns, address: SocketAddr) -> Result<Self> {
        Self::start(netns, address, Peer::echo)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections it has accepted.
    #[must_use]
    pub fn accepted(&self) -> usize {
        lock(&self.connections).len()
    }

    /// The record of a connection, in the order of acceptance.
    ///
    /// # Panics
    /// If there is none yet.
    #[must_use]
    pub fn connection(&self, index: usize) -> Arc<Connection> {
        Arc::clone(&lock(&self.connections)[index])
    }

    /// How often `needle` was received, over all connections: whether a request ran once.
    #[must_use]
    pub fn received_count(&self, needle: &str) -> usize {
        let all: Vec<_> = lock(&self.connections).clone();
        all.iter().map(|c| c.received_text().matches(needle).count()).sum()
    }

    /// Whether a connection from this very socket was accepted: whether its owner came directly.
    #[must_use]
    pub fn knows(&self, peer: SocketAddr) -> bool {
        lock(&self.connections).iter().any(|connection| connection.peer == peer)
    }

    /// Ends every connection that is open, as a restart of the origin does.
    pub fn drop_connections(&self) {
        for connection in lock(&self.connections).iter() {
            connection.stream.shutdown(Shutdown::Both).ok();
        }
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        // On Linux this wakes a thread that is in accept().
        SockRef::from(&self.listener).shutdown(Shutdown::Both).ok();
        self.drop_connections();
    }
}

impl Peer {
    /// The connection's number, in the order of acceptance.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// The connection itself, for a look at its state.
    pub fn stream(&self) -> io::Result<TcpStream> {
        self.connection.stream.try_clone()
    }

    /// The next bytes, or `None` at the end.
    pub fn read_some(&mut self) -> io::Result<Option<Vec<u8>>> {
        if !self.buffer.is_empty() {
            return Ok(Some(std::mem::take(&mut self.buffer)));
        }
        Ok(self.fill()?.then(|| std::mem::take(&mut self.buffer)))
    }

    /// Sends back whatever comes, until the end.
    pub fn echo(&mut self) -> io::Result<()> {
        while let Some(bytes) = self.read_some()? {
            self.send(&bytes)?;
        }
        Ok(())
    }

    /// The next request with its body, or `None` if the connection ends before one begins.
    pub fn request(&mut self) -> io::Result<Option<Request>> {
        let Some(head) = self.head()? else { return Ok(None) };
        let body = if let Some(length) = header(&head, "content-length") {
            let length = length.parse().map_err(io::Error::other)?;
            self.take(length)?
        } else if header(&head, "transfer-encoding").is_some() {
            self.take_until(b"0\r\n\r\n")?.ok_or(io::ErrorKind::UnexpectedEof)?
        } else {
            Vec::new()
        };
        Ok(Some(Request { head, body }))
    }

    /// The head of the next request, leaving its body for later.
    pub fn head(&mut self) -> io::Result<Option<String>> {
        let head = self.take_until(b"\r\n\r\n")?;
        Ok(head.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Exactly `length` bytes.
    pub fn take(&mut self, length: usize) -> io::Result<Vec<u8>> {
        while self.buffer.len() < length {
            if !self.fill()? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let rest = self.buffer.split_off(length);
        Ok(std::mem::replace(&mut self.buffer, rest))
    }

    fn take_until(&mut self, end: &[u8]) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(at) = self.buffer.windows(end.len()).position(|window| window == end) {
                return self.take(at + end.len()).map(Some);
            }
            if !self.fill()? {
                return if self.buffer.is_empty() {
                    Ok(None)
                } else {
                    Err(io::ErrorKind::UnexpectedEof.into())
                };
            }
        }
    }

    fn fill(&mut self) -> io::Result<bool> {
        let mut bytes = [0; 16 << 10];
        let n = (&self.connection.stream).read(&mut bytes)?;
        self.buffer.extend_from_slice(&bytes[..n]);
        lock(&self.connection.received).extend_from_slice(&bytes[..n]);
        Ok(n > 0)
    }

    /// Sends bytes.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        (&self.connection.stream).write_all(bytes.as_ref())
    }

    /// Has TCP begin with so many bytes that it has sent before; the next ones sent should be those.
    /// `netns` is where the origin is. Nothing sent to it may be unread.
    pub fn rewind(&self, netns: &Netns, again: u16) -> io::Result<()> {
        netns.run(|| broker::rewind::rewind(&self.connection.stream, again))
    }

    /// Sends bytes one by one, each in a segment of its own.
    pub fn dribble(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        for byte in bytes.as_ref() {
            self.send([*byte])?;
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Sends a 200 with a body.
    pub fn respond(&mut self, body: impl AsRef<[u8]>) -> io::Result<()> {
        let body = body.as_ref();
        let mut response = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        // One write, so that a test's response is not split by chance.
        response.push_str(&String::from_utf8_lossy(body));
        self.send(response)
    }

    /// Answers as the load generator wants it, with the request's own id.
    pub fn answer_with_id(&mut self, request: &Request, status: &str) -> io::Result<()> {
        let id = request.header("x-request-id").unwrap_or("-");
        self.send(format!(
            "HTTP/1.1 {status}\r\nX-Request-Id: {id}\r\nContent-Length: {}\r\n\r\n{id}\n",
            id.len() + 1
        ))
    }

    /// Answers requests until the connection, or the client's wish to keep it, ends.
    pub fn serve(&mut self) -> io::Result<()> {
        while let Some(request) = self.request()? {
            let body = format!("{} {}", self.index, request.target());
            let connection = request.header("connection").unwrap_or("").to_ascii_lowercase();
            let is_old = request.head.lines().next().unwrap_or("").ends_with("HTTP/1.0");
            if connection.contains("close") || (is_old && connection != "keep-alive") {
                return self.send(format!(
                    "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                ));
            }
            if is_old {
                // To such a client keeping the connection must be confirmed.
                self.send(format!(
                    "HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: {}\r\n\r\n\
                     {body}",
                    body.len()
                ))?;
            } else {
                self.respond(body)?;
            }
        }
        Ok(())
    }

    /// Ends the connection if no byte comes for so long.
    pub fn set_read_timeout(&self, limit: Duration) -> io::Result<()> {
        self.connection.stream.set_read_timeout(Some(limit))
    }

    /// Ends the sending direction.
    pub fn half_close(&self) -> io::Result<()> {
        self.connection.stream.shutdown(Shutdown::Write)
    }

    /// Waits until the other side has ended the connection, throwing bytes away.
    pub fn wait_closed(&mut self) -> io::Result<()> {
        while self.read_some()?.is_some() {}
        Ok(())
    }

    /// Resets the connection.
    pub fn reset(&self) -> io::Result<()> {
        sys::reset(&self.connection.stream)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
