//! One exchange, from its request head to the end of its final response.

use std::time::Duration;

use super::body::Body;
use super::field::Ambiguous;
use super::response::{HeadReader, ResponseHead};
use super::{CloseReason, Edit, Framing, Method, Progress, RequestHead, Version};
use crate::boundary::Verdict;

/// What [`Exchange::request_body`] made of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyStep {
    /// How many of them belong to this request and are forwarded; the rest is the next request.
    pub take: usize,
    /// How far the request is.
    pub state: Progress,
}

/// What [`Exchange::response`] made of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseStep {
    /// How many of them go to the client; the rest is nobody's and must be dropped.
    pub forward: usize,
    /// How far the response is.
    pub state: Progress,
}

/// How the end of the origin's stream leaves the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseEnd {
    /// It is complete, or it is a tunnel's direction that has ended.
    Done,
    /// A part of it, or all of it, is missing.
    Truncated,
}

/// One exchange after its request head is known: fed with the bytes of both sides in the order in
/// which they came, in any split, it finds both ends and judges the origin socket.
///
/// It counts bytes, it does not move them. "Done" means that the last byte was *seen*; the session
/// has to make sure that what it took was also written before it returns a socket.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts, not a state")]
pub struct Exchange {
    method: Method,
    version: Version,
    client_asked: bool,
    origin_asked: bool,
    request_doubtful: bool,
    ties_to_client: bool,
    /// The client asked for a 100, and none has come yet.
    awaits_continue: bool,
    /// The final response came instead of that 100. The origin may have left the body unread, and
    /// take it for the next request if it was sent nevertheless (RFC 9110 section 10.1.1).
    unconfirmed: bool,
    request: Body,
    response: Phase,
    head: HeadReader,
    started: bool,
    /// The request was not complete when the current response head began.
    early: bool,
    /// A response head, interim or final, says what it must not say.
    response_doubtful: bool,
    unsolicited: bool,
    /// The origin closed its sending side.
    ended: bool,
    answer: Option<Answer>,
    /// What would announce the end of the client's connection in the bytes that were read last.
    announcement: Option<Edit>,
    /// That is done.
    announced: bool,
}

#[derive(Debug)]
enum Phase {
    Head,
    Body(Body),
    Done,
    Truncated,
    Tunnel(CloseReason),
}

/// What remains of the final response head.
#[derive(Debug)]
struct Answer {
    status: u16,
    persists: bool,
    keep_alive: bool,
    until_close: bool,
    idle_timeout: Option<Duration>,
}

impl Exchange {
    /// Begins the exchange of a request whose head, with its edit, is being forwarded.
    #[must_use]
    pub fn new(head: &RequestHead) -> Self {
        Self {
            method: head.method,
            version: head.version,
            client_asked: head.client_persists,
            origin_asked: head.origin_persists,
            request_doubtful: head.doubtful,
            ties_to_client: head.connection_auth,
            awaits_continue: head.expects_continue,
            unconfirmed: false,
            request: Body::new(head.framing),
            response: Phase::Head,
            head: HeadReader::default(),
            started: false,
            early: false,
            response_doubtful: false,
            unsolicited: false,
            ended: false,
            answer: None,
            announcement: None,
            announced: false,
        }
    }

    /// Reads client bytes that follow the head. In a tunnel all bytes are taken.
    pub fn request_body(&mut self, bytes: &[u8]) -> BodyStep {
        if let Phase::Tunnel(reason) = self.response {
            return BodyStep { take: bytes.len(), state: Progress::Tunnel(reason) };
        }
        match self.request.take(bytes) {
            Ok(take) if self.request.is_done() => BodyStep { take, state: Progress::Done },
            Ok(take) => BodyStep { take, state: Progress::More },
            Err(Ambiguous) => {
                self.request = Body::UntilClose;
                let state = match self.response {
                    // Too late for a tunnel: what the client is owed, it has.
                    Phase::Done | Phase::Truncated => Progress::More,
                    Phase::Head | Phase::Body(_) | Phase::Tunnel(_) => {
                        let reason = CloseReason::AmbiguousRequest;
                        self.response = Phase::Tunnel(reason);
                        Progress::Tunnel(reason)
                    }
                };
                BodyStep { take: bytes.len(), state }
            }
        }
    }

    /// Whether the last byte of the request was seen.
    #[must_use]
    pub fn request_done(&self) -> bool {
        self.request.is_done()
    }

    /// Whether the client may be waiting for a 100 before it sends the rest of its request.
    #[must_use]
    pub fn awaits_continue(&self) -> bool {
        self.awaits_continue
    }

    /// Reads bytes from the origin.
    pub fn response(&mut self, bytes: &[u8]) -> ResponseStep {
        self.started |= !bytes.is_empty();
        self.announcement = None;
        let mut used = 0;
        loop {
            let rest = &bytes[used..];
            let read = match &mut self.response {
                Phase::Tunnel(reason) => {
                    let state = Progress::Tunnel(*reason);
                    return ResponseStep { forward: bytes.len(), state };
                }
                Phase::Done | Phase::Truncated => {
                    self.unsolicited |= !rest.is_empty();
                    return ResponseStep { forward: used, state: Progress::Done };
                }
                _ if rest.is_empty() => {
                    return ResponseStep { forward: used, state: Progress::More };
                }
                Phase::Body(body) => body.take(rest),
                Phase::Head => self.read_head(rest, used),
            };
            match read {
                Ok(n) => used += n,
                Err(Ambiguous) => self.response = Phase::Tunnel(CloseReason::AmbiguousResponse),
            }
            if let Phase::Body(Body::Done) = self.response {
                self.response = Phase::Done;
            }
        }
    }

    /// The origin closed its sending side.
    pub fn response_eof(&mut self) -> ResponseEnd {
        self.ended = true;
        match self.response {
            Phase::Done | Phase::Tunnel(_) => ResponseEnd::Done,
            Phase::Body(Body::UntilClose) => {
                self.response = Phase::Done;
                ResponseEnd::Done
            }
            Phase::Head | Phase::Body(_) | Phase::Truncated => {
                self.response = Phase::Truncated;
                ResponseEnd::Truncated
            }
        }
    }

    /// Whether any byte of the response was seen: from then on the request is never repeated.
    #[must_use]
    pub fn response_started(&self) -> bool {
        self.started
    }

    /// Whether the head of the final response was seen.
    #[must_use]
    pub fn final_head_seen(&self) -> bool {
        self.answer.is_some()
    }

    /// How many more bytes the response has, if that is known.
    #[must_use]
    pub fn response_left(&self) -> Option<u64> {
        match &self.response {
            Phase::Done => Some(0),
            Phase::Body(Body::Length(left)) => Some(*left),
            _ => None,
        }
    }

    /// The status of the final response.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        self.answer.as_ref().map(|answer| answer.status)
    }

    /// Whether the response ends where its connection ends.
    #[must_use]
    pub fn ends_with_connection(&self) -> bool {
        self.answer.as_ref().is_some_and(|answer| answer.until_close)
    }

    /// What to do with the origin socket if the exchange ended now.
    ///
    /// [`CloseReason::ConnectionAuth`] means that nothing else is wrong with it: its client may go
    /// on using it. Before the end the verdict is [`CloseReason::NoBoundary`], for want of a
    /// better reason that only the session knows.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match self.fault() {
            Some(reason) => Verdict::Close(reason),
            None => Verdict::Return,
        }
    }

    fn fault(&self) -> Option<CloseReason> {
        let answer = match (&self.response, &self.answer) {
            (Phase::Tunnel(reason), _) => return Some(*reason),
            (Phase::Truncated, _) => return Some(CloseReason::Truncated),
            (Phase::Done, Some(answer)) => answer,
            _ => return Some(CloseReason::NoBoundary),
        };
        let origin_persists = self.origin_asked
            && answer.persists
            // RFC 9112 section 9.3 leaves open what a 1.1 response to a 1.0 request means.
            && (self.version == Version::Http11 || answer.keep_alive)
            && !self.ended;
        [
            (self.unsolicited, CloseReason::Unsolicited),
            (self.early || self.unconfirmed || !self.request_done(), CloseReason::EarlyResponse),
            (self.response_doubtful, CloseReason::AmbiguousResponse),
            (answer.until_close, CloseReason::BodyUntilClose),
            (self.request_doubtful, CloseReason::AmbiguousRequest),
            (!origin_persists, CloseReason::OriginPersistence),
            (self.ties_to_client, CloseReason::ConnectionAuth),
        ]
        .into_iter()
        .find_map(|(holds, reason)| holds.then_some(reason))
    }

    /// Whether the client's connection may carry another exchange: asked for by the request, not
    /// denied by the response that the client has read, and both completely exchanged.
    ///
    /// An HTTP/1.0 client knows that it may go on only from a keep-alive in the response.
    #[must_use]
    pub fn client_persists(&self) -> bool {
        matches!(self.response, Phase::Done)
            && self.client_may_persist()
            && !self.announced
            && !self.early
            && self.request_done()
    }

    /// As far as the heads of both messages say.
    fn client_may_persist(&self) -> bool {
        let Some(answer) = &self.answer else { return false };
        self.client_asked
            && answer.persists
            && (self.version == Version::Http11 || answer.keep_alive)
            && !answer.until_close
            && !self.response_doubtful
    }

    /// Ends the client's connection with this exchange, if the response can still say so: its head must
    /// be among the bytes that were read last, in which the change is to be made. `None` if it is not, or
    /// if the connection ends in any case.
    pub fn end_connection(&mut self) -> Option<Edit> {
        let announcement = self.announcement.take()?;
        self.announced = self.client_may_persist();
        self.announced.then_some(announcement)
    }

    /// Whether the client meant to use its connection again. It may have sent more by the time it
    /// learns that there is no again.
    #[must_use]
    pub fn client_asked_to_persist(&self) -> bool {
        self.client_asked
    }

    /// How long the origin says it keeps an idle connection (`Keep-Alive: timeout=`, RFC 2068
    /// section 19.7.1).
    #[must_use]
    pub fn origin_idle_timeout(&self) -> Option<Duration> {
        self.answer.as_ref().and_then(|answer| answer.idle_timeout)
    }

    /// Whether the origin socket is, or is about to be, authenticated as this client (NTLM,
    /// Negotiate; RFC 4559 section 6): it may serve this client only, for the rest of its life.
    #[must_use]
    pub fn ties_to_client(&self) -> bool {
        self.ties_to_client
    }

    /// `at` is the position of these bytes in those that were read last.
    fn read_head(&mut self, bytes: &[u8], at: usize) -> Result<usize, Ambiguous> {
        let fresh = self.head.is_fresh();
        if fresh {
            self.early = !self.request_done();
        }
        let (n, head) = self.head.read(bytes)?;
        if let Some(head) = head {
            self.response = self.after(&head)?;
            let ends = fresh && matches!(self.response, Phase::Body(_) | Phase::Done);
            self.announcement = ends.then(|| head.announcement().moved(at));
        }
        Ok(n)
    }

    /// What follows a response head (RFC 9112 section 6.3).
    ///
    /// Framing fields that contradict each other are ambiguous even where no body may follow: an
    /// origin that is unsure of its framing is not to be trusted with the next exchange. A length
    /// or chunking where there must be none (1xx, 204) is forwarded and ends the reuse.
    fn after(&mut self, head: &ResponseHead) -> Result<Phase, Ambiguous> {
        let framing = head.fields.framing(head.version)?;
        let has_body = framing.is_some_and(Framing::has_body);
        self.ties_to_client |= head.fields.connection_auth;
        if let 100..=199 = head.status {
            let known = matches!(head.status, 100 | 102 | 103);
            self.response_doubtful |= !known || has_body;
            self.awaits_continue &= head.status != 100;
            let tunnel = head.status == 101;
            return Ok(if tunnel { Phase::Tunnel(CloseReason::Tunnel) } else { Phase::Head });
        }
        self.unconfirmed = std::mem::take(&mut self.awaits_continue);
        let mut answer = Answer {
            status: head.status,
            persists: head.fields.connection.persists(head.version),
            keep_alive: head.fields.connection.keep_alive,
            until_close: false,
            idle_timeout: head.fields.idle_timeout,
        };
        let phase = match framing {
            _ if self.method == Method::Connect && matches!(head.status, 200..=299) => {
                Phase::Tunnel(CloseReason::Tunnel)
            }
            _ if self.method == Method::Head || matches!(head.status, 204 | 304) => {
                self.response_doubtful |= head.status == 204 && has_body;
                Phase::Done
            }
            Some(framing) => match Body::new(framing) {
                Body::Done => Phase::Done,
                body => Phase::Body(body),
            },
            None => {
                answer.until_close = true;
                Phase::Body(Body::UntilClose)
            }
        };
        // RFC 9112 section 6.1: chunking must not answer HTTP/1.0. Such a client needs the close.
        let chunked = framing == Some(Framing::Chunked);
        self.response_doubtful |= chunked && self.version == Version::Http10;
        self.answer = Some(answer);
        Ok(phase)
    }
}
