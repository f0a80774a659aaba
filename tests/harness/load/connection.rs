//! One client connection of the load generator: what was asked, and how much of the answer is
//! still to come.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::SocketAddr;
use std::time::Instant;

use socket2::{Domain, Protocol, Socket, Type};

use super::Mode;

/// Longest response head that is accepted.
const HEAD_MAX: usize = 4096;

/// What became of a connection after it was given a chance to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing more to do until the socket is readable.
    WaitRead,
    /// Nothing more to do until the socket is writable.
    WaitWrite,
    /// The response is complete; the server still has to end the connection.
    Answered,
    /// The response is complete and the connection is free.
    Done,
    /// The request has failed, for this reason.
    Failed(&'static str),
}

/// A connection with a request under way.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Socket,
    pub(super) started: Instant,
    request: Vec<u8>,
    sent: usize,
    id: [u8; 16],
    expected: Option<u64>,
    ends: bool,
    head: Vec<u8>,
    head_done: bool,
    body_left: u64,
    /// The first bytes of a body that must repeat the id.
    body: Vec<u8>,
    answered: bool,
}

impl Connection {
    /// Begins to connect.
    pub(super) fn open(to: SocketAddr, mode: Mode, now: Instant) -> io::Result<Self> {
        let kind = Type::STREAM.nonblocking().cloexec();
        let socket = Socket::new(Domain::for_address(to), kind, Some(Protocol::TCP))?;
        socket.set_tcp_nodelay(true)?;
        match socket.connect(&to.into()) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(nix::libc::EINPROGRESS) => {}
            Err(e) => return Err(e),
        }
        Ok(Self {
            socket,
            started: now,
            request: Vec::with_capacity(256),
            sent: 0,
            id: [0; 16],
            expected: None,
            ends: mode == Mode::OneShot,
            head: Vec::with_capacity(512),
            head_done: false,
            body_left: 0,
            body: Vec::with_capacity(32),
            answered: false,
        })
    }

    /// Puts a new request on the connection.
    pub(super) fn ask(&mut self, id: u64, path: &str, expected: Option<u64>, now: Instant) {
        self.started = now;
        self.sent = 0;
        self.expected = expected;
        self.head.clear();
        self.body.clear();
        self.head_done = false;
        self.answered = false;
        let text = format!("{id:016x}");
        self.id.copy_from_slice(text.as_bytes());
        self.request.clear();
        let close = if self.ends { "Connection: close\r\n" } else { "" };
        // Writing to a Vec cannot fail.
        write!(
            self.request,
            "GET {path} HTTP/1.1\r\nHost: lab\r\nX-Request-Id: {text}\r\n{close}\r\n"
        )
        .ok();
    }

    /// Does what can be done without waiting.
    pub(super) fn advance(&mut self, buffer: &mut [u8]) -> Step {
        while self.sent < self.request.len() {
            match (&self.socket).write(&self.request[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Step::WaitWrite,
                Err(e) => return Step::Failed(kind(&e, "send")),
            }
            if self.sent == self.request.len() {
                // The answer cannot be here yet: one fruitless read less.
                return Step::WaitRead;
            }
        }
        loop {
            let n = match (&self.socket).read(buffer) {
                Ok(0) if self.answered => return Step::Done,
                Ok(0) => return Step::Failed("early end"),
                Ok(n) => n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    return if self.answered { Step::Answered } else { Step::WaitRead };
                }
                Err(e) => return Step::Failed(kind(&e, "receive")),
            };
            if self.answered {
                return Step::Failed("bytes after the response");
            }
            if let Err(why) = self.take(&buffer[..n]) {
                return Step::Failed(why);
            }
            if self.answered && !self.ends {
                return Step::Done;
            }
            // A buffer that was not filled means an empty queue: one fruitless read less.
            if n < buffer.len() && !self.answered {
                return Step::WaitRead;
            }
        }
    }

    /// Takes in a piece of the response.
    fn take(&mut self, mut bytes: &[u8]) -> Result<(), &'static str> {
        if !self.head_done {
            let before = self.head.len();
            self.head.extend_from_slice(bytes);
            let from = before.saturating_sub(3);
            let Some(at) = self.head[from..].windows(4).position(|w| w == b"\r\n\r\n") else {
                return if self.head.len() > HEAD_MAX { Err("head too long") } else { Ok(()) };
            };
            let end = from + at + 4;
            bytes = &bytes[end - before..];
            self.head.truncate(end);
            self.body_left = self.check_head()?;
            self.head_done = true;
        }
        let length = bytes.len() as u64;
        if length > self.body_left {
            return Err("bytes after the response");
        }
        if self.expected.is_none() {
            self.body.extend_from_slice(bytes);
        }
        self.body_left -= length;
        if self.body_left == 0 {
            if self.expected.is_none() && self.body.get(..16) != Some(&self.id[..]) {
                return Err(CROSSTALK);
            }
            self.answered = true;
        }
        Ok(())
    }

    /// Checks status and id; the length of the body.
    fn check_head(&self) -> Result<u64, &'static str> {
        let head = std::str::from_utf8(&self.head).unwrap_or("");
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).unwrap_or("");
        let (mut length, mut id) = (None, None);
        for line in lines {
            let Some((name, value)) = line.split_once(':') else { continue };
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse::<u64>().ok();
            } else if name.eq_ignore_ascii_case("x-request-id") {
                id = Some(value.trim().as_bytes());
            }
        }
        // A refusal carries no id; it is an error, but not somebody else's response.
        match status {
            "200" => {}
            "500" => return Err(SERVER_ERRORS[0]),
            "502" => return Err(SERVER_ERRORS[1]),
            "503" => return Err(SERVER_ERRORS[2]),
            "504" => return Err(SERVER_ERRORS[3]),
            other if other.len() == 3 && other >= "500" => return Err(SERVER_ERRORS[4]),
            _ => return Err("other status"),
        }
        if id != Some(&self.id[..]) {
            return Err(CROSSTALK);
        }
        match (length, self.expected) {
            (Some(length), Some(expected)) if length == expected => Ok(length),
            (Some(length), None) => Ok(length),
            _ => Err("wrong length"),
        }
    }
}

/// Failures that are responses of 500 or above.
pub(super) const SERVER_ERRORS: [&str; 5] =
    ["status 500", "status 502", "status 503", "status 504", "another status above 500"];

/// The failure that is counted apart.
pub(super) const CROSSTALK: &str = "crosstalk";

/// A short name for an error.
pub(super) fn kind(error: &io::Error, otherwise: &'static str) -> &'static str {
    match error.kind() {
        ErrorKind::ConnectionRefused => "refused",
        ErrorKind::ConnectionReset => "reset",
        ErrorKind::BrokenPipe => "broken pipe",
        ErrorKind::TimedOut => "timed out",
        ErrorKind::AddrNotAvailable => "no free port",
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => "unreachable",
        _ => otherwise,
    }
}
