//! One exchange: who asks, for what, and what the origin does to it.
//!
//! Everything is in the request itself, most of it in its target, so that client and origin know
//! both messages to the byte, and whoever looks at a capture can read what was meant:
//! `/t/<client>/<seq>/<size>/<framing>/<flags>`.

use std::fmt::{self, Write as _};
use std::io::Write as _;

use super::body::{Body, Direction, Key};

/// A request: no two have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Id {
    pub(super) client: u16,
    pub(super) seq: u32,
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.client, self.seq)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    Get,
    Head,
    Post,
}

impl Method {
    /// Whether the broker may repeat it.
    pub(super) fn is_idempotent(self) -> bool {
        self != Self::Post
    }

    fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Head => "HEAD",
            Self::Post => "POST",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    Http10,
    Http11,
}

impl Version {
    fn name(self) -> &'static str {
        match self {
            Self::Http10 => "1.0",
            Self::Http11 => "1.1",
        }
    }
}

/// What the client says of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asks {
    Nothing,
    Close,
    KeepAlive,
}

/// A request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Upload {
    pub(super) size: u32,
    pub(super) chunked: bool,
}

/// How the end of a response body is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Length,
    Chunked,
    /// It ends with the connection.
    Close,
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    Fin,
    Rst,
}

/// What the origin does with the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It stays open.
    Keep,
    /// It closes after the response, which says so.
    Announced,
    /// It closes after the response without a word.
    Quiet,
    /// It ends after so many milliseconds without another request.
    Idle(How, u8),
    /// A complete response that nobody has asked for, in the same segment as the end of the one
    /// that was asked for.
    ///
    /// It has to be in the same segment. A byte that comes later may find the socket with another
    /// client's request already written on it, and is then that client's response by every rule of
    /// HTTP/1.1: no intermediary can tell.
    Poison,
    /// The same with bytes that are no response.
    Junk,
    /// Such bytes come when the next request is there already, whose ever it is, and instead of a
    /// response to it.
    Stray,
    /// It ends instead of the response, but only when the request runs for the first time.
    Before(How),
    /// It ends after so many bytes of the response.
    Mid(How, u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spec {
    pub(super) id: Id,
    pub(super) method: Method,
    pub(super) version: Version,
    pub(super) asks: Asks,
    pub(super) upload: Option<Upload>,
    /// The client waits for a 100 before it sends its body.
    pub(super) expects: bool,
    /// The response begins before the request body was read.
    pub(super) early: bool,
    pub(super) status: u16,
    pub(super) size: u32,
    pub(super) framing: Framing,
    /// An interim response before the final one.
    pub(super) interim: Option<u16>,
    /// Bytes that make the heads of both messages longer.
    pub(super) pad: u16,
    /// The origin sends the response head in pieces.
    pub(super) split: bool,
    /// The origin waits before its response.
    pub(super) delay_ms: u8,
    pub(super) end: End,
}

/// The interim response that lets a client go on.
pub(super) const CONTINUE: &str = "HTTP/1.1 100 Continue\r\n\r\n";

/// Bytes by which the response of nobody is recognised wherever it turns up.
pub(super) const POISON: &[u8] =
    b"HTTP/1.1 200 OK\r\nX-Torture: poison\r\nContent-Length: 18\r\n\r\npoison-not-for-you";

/// Bytes that are no response.
pub(super) const JUNK: &[u8] = b"\0junk-not-for-you\xff";

/// What both have in common.
pub(super) const NOT_FOR_YOU: &[u8] = b"not-for-you";

impl Spec {
    /// A plain GET of nothing.
    pub(super) fn new(id: Id) -> Self {
        Self {
            id,
            method: Method::Get,
            version: Version::Http11,
            asks: Asks::Nothing,
            upload: None,
            expects: false,
            early: false,
            status: 200,
            size: 0,
            framing: Framing::Length,
            interim: None,
            pad: 0,
            split: false,
            delay_ms: 0,
            end: End::Keep,
        }
    }

    pub(super) fn response_has_body(&self) -> bool {
        self.method != Method::Head && self.status == 200
    }

    /// Whether the response ends with the connection.
    pub(super) fn ends_by_close(&self) -> bool {
        self.framing == Framing::Close && self.response_has_body()
    }

    /// Whether the client's connection carries on after the response. It may or may not after an
    /// early one: that depends on how far the request had come.
    pub(super) fn persists(&self) -> bool {
        let asked = match self.version {
            Version::Http10 => self.asks == Asks::KeepAlive,
            Version::Http11 => self.asks != Asks::Close,
        };
        asked && self.end != End::Announced && !self.ends_by_close() && !self.early
    }

    pub(super) fn target(&self) -> String {
        let Id { client, seq } = self.id;
        let framing = match self.framing {
            Framing::Length => "length",
            Framing::Chunked => "chunked",
            Framing::Close => "close",
        };
        format!("/t/{client}/{seq}/{}/{framing}/{}", self.size, self.flags())
    }

    pub(super) fn request_line(&self) -> String {
        format!("{} {} HTTP/{}", self.method.name(), self.target(), self.version.name())
    }

    fn flags(&self) -> String {
        let mut out = String::new();
        let mut flag = |text: fmt::Arguments<'_>| {
            if !out.is_empty() {
                out.push('.');
            }
            out.write_fmt(text).ok();
        };
        match self.asks {
            Asks::Nothing => {}
            Asks::Close => flag(format_args!("ac")),
            Asks::KeepAlive => flag(format_args!("ak")),
        }
        match self.upload {
            None => {}
            Some(Upload { size, chunked: false }) => flag(format_args!("ul{size}")),
            Some(Upload { size, chunked: true }) => flag(format_args!("uc{size}")),
        }
        if self.expects {
            flag(format_args!("x"));
        }
        if self.early {
            flag(format_args!("e"));
        }
        if self.status != 200 {
            flag(format_args!("s{}", self.status));
        }
        if let Some(status) = self.interim {
            flag(format_args!("i{status}"));
        }
        if self.pad > 0 {
            flag(format_args!("p{}", self.pad));
        }
        if self.split {
            flag(format_args!("h"));
        }
        if self.delay_ms > 0 {
            flag(format_args!("d{}", self.delay_ms));
        }
        match self.end {
            End::Keep => {}
            End::Announced => flag(format_args!("za")),
            End::Quiet => flag(format_args!("zq")),
            End::Poison => flag(format_args!("zp")),
            End::Junk => flag(format_args!("zj")),
            End::Stray => flag(format_args!("zs")),
            End::Idle(How::Fin, ms) => flag(format_args!("zif{ms}")),
            End::Idle(How::Rst, ms) => flag(format_args!("zir{ms}")),
            End::Before(How::Fin) => flag(format_args!("zbf")),
            End::Before(How::Rst) => flag(format_args!("zbr")),
            End::Mid(How::Fin, at) => flag(format_args!("zmf{at}")),
            End::Mid(How::Rst, at) => flag(format_args!("zmr{at}")),
        }
        if out.is_empty() { "-".into() } else { out }
    }

    /// Reads the first line of a request.
    pub(super) fn read(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let (method, target, version) = (words.next()?, words.next()?, words.next()?);
        let mut parts = target.strip_prefix("/t/")?.split('/');
        let mut part = || parts.next();
        let id = Id { client: part()?.parse().ok()?, seq: part()?.parse().ok()? };
        let mut spec = Self {
            method: [Method::Get, Method::Head, Method::Post]
                .into_iter()
                .find(|known| known.name() == method)?,
            version: match version {
                "HTTP/1.0" => Version::Http10,
                "HTTP/1.1" => Version::Http11,
                _ => return None,
            },
            size: part()?.parse().ok()?,
            framing: match part()? {
                "length" => Framing::Length,
                "chunked" => Framing::Chunked,
                "close" => Framing::Close,
                _ => return None,
            },
            ..Self::new(id)
        };
        for flag in part()?.split('.').filter(|&flag| flag != "-") {
            spec.read_flag(flag)?;
        }
        Some(spec)
    }

    fn read_flag(&mut self, flag: &str) -> Option<()> {
        let number = flag.trim_start_matches(|c: char| !c.is_ascii_digit());
        let name = &flag[..flag.len() - number.len()];
        match name {
            "ac" => self.asks = Asks::Close,
            "ak" => self.asks = Asks::KeepAlive,
            "ul" | "uc" => {
                let size = number.parse().ok()?;
                self.upload = Some(Upload { size, chunked: name == "uc" });
            }
            "x" => self.expects = true,
            "e" => self.early = true,
            "s" => self.status = number.parse().ok()?,
            "i" => self.interim = Some(number.parse().ok()?),
            "p" => self.pad = number.parse().ok()?,
            "h" => self.split = true,
            "d" => self.delay_ms = number.parse().ok()?,
            "za" => self.end = End::Announced,
            "zq" => self.end = End::Quiet,
            "zp" => self.end = End::Poison,
            "zj" => self.end = End::Junk,
            "zs" => self.end = End::Stray,
            "zif" => self.end = End::Idle(How::Fin, number.parse().ok()?),
            "zir" => self.end = End::Idle(How::Rst, number.parse().ok()?),
            "zbf" => self.end = End::Before(How::Fin),
            "zbr" => self.end = End::Before(How::Rst),
            "zmf" => self.end = End::Mid(How::Fin, number.parse().ok()?),
            "zmr" => self.end = End::Mid(How::Rst, number.parse().ok()?),
            _ => return None,
        }
        Some(())
    }

    /// The request head as the client sends it.
    pub(super) fn request_head(&self, key: Key) -> Vec<u8> {
        self.request_head_with(key, self.asks)
    }

    /// The request head as the broker hands it on: whatever the client asks for, the origin is
    /// asked to go on.
    pub(super) fn forwarded_head(&self, key: Key) -> Vec<u8> {
        match (self.version, self.asks) {
            (_, Asks::Close) => self.request_head_with(key, Asks::KeepAlive),
            (Version::Http10, Asks::Nothing) => {
                // The field that was missing is put at the end.
                let mut head = self.request_head(key);
                head.truncate(head.len() - 2);
                head.extend_from_slice(b"Connection: keep-alive\r\n\r\n");
                head
            }
            _ => self.request_head(key),
        }
    }

    fn request_head_with(&self, key: Key, asks: Asks) -> Vec<u8> {
        let mut head = Vec::with_capacity(160 + usize::from(self.pad));
        // Writing to a Vec cannot fail.
        write!(head, "{}\r\nHost: torture\r\n", self.request_line()).ok();
        head.extend_from_slice(match asks {
            Asks::Nothing => b"",
            Asks::Close => b"Connection: close\r\n",
            Asks::KeepAlive => b"Connection: keep-alive\r\n",
        });
        if self.expects {
            head.extend_from_slice(b"Expect: 100-continue\r\n");
        }
        match self.upload {
            None => {}
            Some(Upload { chunked: true, .. }) => {
                head.extend_from_slice(b"Transfer-Encoding: chunked\r\n");
            }
            Some(Upload { size, .. }) => {
                write!(head, "Content-Length: {size}\r\n").ok();
            }
        }
        self.pad(&mut head, key.body(Direction::Request, self.id));
        head.extend_from_slice(b"\r\n");
        head
    }

    /// Interim responses and the final head.
    pub(super) fn response_head(&self, key: Key) -> Vec<u8> {
        let mut head = Vec::with_capacity(160 + usize::from(self.pad));
        if self.expects {
            head.extend_from_slice(CONTINUE.as_bytes());
        }
        head.extend_from_slice(match self.interim {
            None => b"",
            Some(100) => CONTINUE.as_bytes(),
            Some(102) => b"HTTP/1.1 102 Processing\r\n\r\n",
            Some(_) => b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n",
        });
        let reason = match self.status {
            204 => "No Content",
            304 => "Not Modified",
            _ => "OK",
        };
        write!(head, "HTTP/1.1 {} {reason}\r\nX-Torture: {}\r\n", self.status, self.id).ok();
        if self.end == End::Announced {
            head.extend_from_slice(b"Connection: close\r\n");
        } else if self.version == Version::Http10 && !self.ends_by_close() {
            head.extend_from_slice(b"Connection: keep-alive\r\n");
        }
        self.pad(&mut head, key.body(Direction::Response, self.id));
        match self.framing {
            // RFC 9112 section 6.1: a 204 has no framing.
            _ if self.status == 204 => {}
            Framing::Length => {
                write!(head, "Content-Length: {}\r\n", self.size).ok();
            }
            Framing::Chunked => head.extend_from_slice(b"Transfer-Encoding: chunked\r\n"),
            Framing::Close => {}
        }
        head.extend_from_slice(b"\r\n");
        head
    }

    /// A field as long as asked for and as particular as a body.
    fn pad(&self, head: &mut Vec<u8>, body: Body) {
        if self.pad == 0 {
            return;
        }
        head.extend_from_slice(b"X-Pad: ");
        let from = head.len();
        head.resize(from + usize::from(self.pad), 0);
        body.fill(0, &mut head[from..]);
        for byte in &mut head[from..] {
            *byte = b'a' + *byte % 26;
        }
        head.extend_from_slice(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_line_says_everything() {
        let all = Spec {
            method: Method::Post,
            version: Version::Http10,
            asks: Asks::Close,
            upload: Some(Upload { size: 17, chunked: true }),
            expects: true,
            early: true,
            status: 204,
            size: 4_194_304,
            framing: Framing::Close,
            interim: Some(103),
            pad: 99,
            split: true,
            delay_ms: 200,
            end: End::Mid(How::Rst, 5),
            ..Spec::new(Id { client: 4095, seq: 1 << 23 })
        };
        let fin = |end| Spec { end, ..all };
        for spec in [
            all,
            Spec::new(Id { client: 0, seq: 0 }),
            fin(End::Announced),
            fin(End::Quiet),
            fin(End::Poison),
            fin(End::Junk),
            fin(End::Stray),
            fin(End::Idle(How::Fin, 0)),
            fin(End::Before(How::Fin)),
        ] {
            let head = String::from_utf8(spec.request_head(Key::new(1))).unwrap();
            assert_eq!(Spec::read(head.lines().next().unwrap()), Some(spec), "{head}");
        }
        assert_eq!(Spec::read("GET /t/1/2/3/length/q HTTP/1.1"), None);
        assert_eq!(Spec::read("GET /t/1/2/3/length/- HTTP/2.0"), None);
    }

    #[test]
    fn what_the_broker_changes_is_known() {
        let key = Key::new(1);
        let text = |spec: Spec| {
            let forwarded = String::from_utf8(spec.forwarded_head(key)).unwrap();
            (forwarded, String::from_utf8(spec.request_head(key)).unwrap())
        };
        let plain = Spec::new(Id { client: 0, seq: 0 });
        let (forwarded, sent) = text(plain);
        assert_eq!(forwarded, sent);
        let (forwarded, sent) = text(Spec { asks: Asks::Close, ..plain });
        assert_eq!(forwarded, sent.replace("Connection: close", "Connection: keep-alive"));
        let (forwarded, sent) = text(Spec { version: Version::Http10, ..plain });
        assert_eq!(forwarded, sent.replace("\r\n\r\n", "\r\nConnection: keep-alive\r\n\r\n"));
    }
}
