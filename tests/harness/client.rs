//! A client that sends exactly the bytes it is told to, when it is told to.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use broker::clock;
use socket2::SockRef;

use crate::netns::Netns;
use crate::origin::scripted;

/// How long reads may take before a test is told that nothing came.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// One TCP connection.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// A response as a client reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// Status line and headers, with the empty line.
    pub head: String,
    /// The body, without chunk framing.
    pub body: Vec<u8>,
}

impl Response {
    /// The value of a header, in any case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        scripted::header(&self.head, name)
    }

    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

impl Client {
    /// Connects from inside a namespace.
    pub fn connect(netns: &Netns, address: SocketAddr) -> Result<Self> {
        let stream = netns
            .run(|| TcpStream::connect_timeout(&address, PATIENCE))
            .with_context(|| format!("connect to {address} in {:?}", netns.name()))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { stream, buffer: Vec::new() })
    }

    /// Connects, sends a GET on a connection of its own, reads the response and closes.
    pub fn get_once(netns: &Netns, address: SocketAddr, target: &str) -> Result<Response> {
        Self::connect(netns, address)?.get(target)
    }

    /// The socket, for whatever is not offered here.
    #[must_use]
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends bytes.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.stream.write_all(bytes.as_ref())
    }

    /// Sends bytes one by one, each in a segment of its own.
    pub fn dribble(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        for byte in bytes.as_ref() {
            self.send([*byte])?;
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Sends a GET and reads the response; the connection stays open.
    pub fn get(&mut self, target: &str) -> Result<Response> {
        self.send(format!("GET {target} HTTP/1.1\r\nHost: test\r\n\r\n"))?;
        self.response()
    }

    /// Reads one response to a request that allows a body.
    pub fn response(&mut self) -> Result<Response> {
        let mut response = self.head()?;
        response.body = match (response.header("transfer-encoding"), response.status) {
            (_, 100..200 | 204 | 304) => Vec::new(),
            (Some(_), _) => self.chunks()?,
            (None, _) => match response.header("content-length") {
                Some(length) => {
                    let length = length.parse().context("Content-Length")?;
                    self.take(length)?
                }
                None => self.to_end()?,
            },
        };
        Ok(response)
    }

    /// Reads the head of a response only.
    pub fn head(&mut self) -> Result<Response> {
        let head = self.take_until(b"\r\n\r\n").context("head of the response")?;
        let head = String::from_utf8_lossy(&head).into_owned();
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).context(head.clone())?;
        Ok(Response { status, head, body: Vec::new() })
    }

    fn chunks(&mut self) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let line = String::from_utf8(self.take_until(b"\r\n")?)?;
            let size = line.trim_end().split(';').next().unwrap_or("").trim().to_owned();
            let size = usize::from_str_radix(&size, 16).with_context(|| format!("chunk {line}"))?;
            if size == 0 {
                // Trailers end with an empty line.
                while self.take_until(b"\r\n")? != b"\r\n" {}
                return Ok(body);
            }
            body.extend(self.take(size)?);
            self.take(2)?;
        }
    }

    /// Exactly `length` bytes.
    pub fn take(&mut self, length: usize) -> Result<Vec<u8>> {
        while self.buffer.len() < length {
            if !self.fill()? {
                bail!("end of the connection after {} of {length} bytes", self.buffer.len());
            }
        }
        let rest = self.buffer.split_off(length);
        Ok(std::mem::replace(&mut self.buffer, rest))
    }

    /// Everything up to and including `end`.
    pub fn take_until(&mut self, end: &[u8]) -> Result<Vec<u8>> {
        loop {
            if let Some(at) = self.buffer.windows(end.len()).position(|window| window == end) {
                return self.take(at + end.len());
            }
            if !self.fill()? {
                let got = String::from_utf8_lossy(&self.buffer);
                bail!("end of the connection after {got:?}");
            }
        }
    }

    /// Everything until the other side ends the connection in good order.
    pub fn to_end(&mut self) -> Result<Vec<u8>> {
        while self.fill()? {}
        Ok(std::mem::take(&mut self.buffer))
    }

    /// Whether the other side has ended the connection, by FIN or RST, with nothing left to read.
    /// Waits for that.
    pub fn is_closed_within(&mut self, limit: Duration) -> Result<bool> {
        let end = clock::now() + limit;
        loop {
            let rest = end.saturating_duration_since(clock::now());
            if !self.buffer.is_empty() || rest.is_zero() {
                return Ok(false);
            }
            self.stream.set_read_timeout(Some(rest.max(Duration::from_millis(1))))?;
            let outcome = self.fill();
            self.stream.set_read_timeout(Some(PATIENCE))?;
            match outcome {
                Ok(true) => {}
                Ok(false) => return Ok(true),
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return Ok(true),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Whether not a single byte (and no end) arrives for `limit`: for proving absences.
    pub fn is_silent_for(&mut self, limit: Duration) -> Result<bool> {
        if !self.buffer.is_empty() {
            return Ok(false);
        }
        self.stream.set_read_timeout(Some(limit))?;
        let outcome = self.fill();
        self.stream.set_read_timeout(Some(PATIENCE))?;
        Ok(outcome.is_err_and(|e| matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)))
    }

    /// The address of the other side, as the kernel tells it to this client.
    pub fn peer(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// This client's own address, as whoever it is connected to sees it.
    pub fn local(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// Ends the sending direction.
    pub fn half_close(&self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }

    /// Disconnects the socket (`AF_UNSPEC`, connect(2)) and connects it anew.
    pub fn reconnect(&mut self, netns: &Netns, address: SocketAddr) -> io::Result<()> {
        crate::sys::reset(&self.stream)?;
        self.buffer.clear();
        netns.run(|| SockRef::from(&self.stream).connect(&address.into()))
    }

    /// Resets the connection.
    pub fn reset(self) -> io::Result<()> {
        SockRef::from(&self.stream).set_linger(Some(Duration::ZERO))
    }

    fn fill(&mut self) -> io::Result<bool> {
        let mut bytes = [0; 16 << 10];
        let n = self.stream.read(&mut bytes)?;
        self.buffer.extend_from_slice(&bytes[..n]);
        Ok(n > 0)
    }
}
