//! Plays byte streams as a session would and asserts what must hold for any bytes in any cut.
//! Shared by the property tests and the fuzz targets.

use broker_ebpf::scan::{scan_request, scan_response};

use super::{
    BodyStep, CloseReason, Exchange, Framing, HEAD_BYTES_MAX, Method, Progress, RequestHead,
    RequestReader, RequestStep, ResponseEnd, ResponseStep, Verdict,
};

/// What was found in a client's stream, with offsets into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Head { at: usize, head: RequestHead },
    End { at: usize },
    Tunnel { reason: CloseReason },
}

/// Cuts a client's stream into its requests. The stream arrives in pieces that end at `cuts` and at
/// its end; cuts may be in any order and beyond it.
pub(crate) fn requests(stream: &[u8], cuts: &[usize]) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut reader = RequestReader::default();
    let mut exchange: Option<Exchange> = None;
    let mut at = 0;
    for piece_end in ends(stream.len(), cuts) {
        loop {
            let bytes = &stream[at..piece_end];
            if let Some(open) = &mut exchange {
                let BodyStep { take, state } = open.request_body(bytes);
                assert!(take <= bytes.len(), "takes more than there is");
                at += take;
                assert_eq!(open.request_done(), state == Progress::Done);
                match state {
                    Progress::Done => parts.push(Part::End { at }),
                    Progress::More => {
                        assert_eq!(at, piece_end, "stops in the middle");
                        break;
                    }
                    Progress::Tunnel(reason) => {
                        assert_eq!(at, piece_end, "a tunnel takes all");
                        parts.push(Part::Tunnel { reason });
                        return parts;
                    }
                }
                exchange = None;
            }
            let bytes = &stream[at..piece_end];
            match reader.read(bytes) {
                RequestStep::Incomplete => {
                    assert!(bytes.len() <= HEAD_BYTES_MAX, "holds more than it may");
                    break;
                }
                RequestStep::Head(head) => {
                    assert!(bytes[..head.len].ends_with(b"\r\n\r\n"));
                    assert!(head.len <= HEAD_BYTES_MAX);
                    check_edit(bytes, &head);
                    exchange = Some(Exchange::new(&head));
                    parts.push(Part::Head { at, head: head.clone() });
                    at += head.len;
                }
                RequestStep::Tunnel(reason) => {
                    parts.push(Part::Tunnel { reason });
                    return parts;
                }
            }
        }
    }
    parts
}

/// An edited head is the same request, and persistent.
fn check_edit(bytes: &[u8], head: &RequestHead) {
    let Some(edit) = &head.edit else { return };
    let mut sent = bytes[..head.len].to_vec();
    sent.splice(edit.at.clone(), edit.with.iter().copied());
    // It may have outgrown the limit, which binds clients and not us.
    if sent.len() > HEAD_BYTES_MAX {
        return;
    }
    let RequestStep::Head(again) = RequestReader::default().read(&sent) else {
        panic!("the edited head is no head: {}", sent.escape_ascii());
    };
    assert!(again.client_persists && again.edit.is_none());
    let expected = RequestHead {
        len: sent.len(),
        client_persists: true,
        origin_persists: true,
        edit: None,
        ..head.clone()
    };
    assert_eq!(again, expected);
}

/// Everything that an exchange tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) taken: usize,
    pub(crate) forwarded: usize,
    pub(crate) verdict: Verdict,
    pub(crate) client_persists: bool,
    status: Option<u16>,
    flags: [bool; 4],
    idle_timeout: Option<std::time::Duration>,
}

/// An exchange under test, with what it let pass so far.
pub(crate) struct Play {
    exchange: Exchange,
    taken: usize,
    forwarded: usize,
    /// The response is complete: nothing may be forwarded from here on.
    complete: bool,
}

impl Play {
    pub(crate) fn new(head: &RequestHead) -> Self {
        let exchange = Exchange::new(head);
        Self { exchange, taken: 0, forwarded: 0, complete: false }
    }

    /// Bytes of the client, in pieces.
    pub(crate) fn client(&mut self, bytes: &[u8], cuts: &[usize]) {
        let mut start = 0;
        for end in ends(bytes.len(), cuts) {
            let piece = &bytes[start..end];
            start = end;
            let BodyStep { take, state } = self.exchange.request_body(piece);
            assert!(take == piece.len() || (take < piece.len() && state == Progress::Done));
            self.taken += take;
        }
        self.check();
    }

    /// Bytes of the origin, in pieces.
    pub(crate) fn origin(&mut self, bytes: &[u8], cuts: &[usize]) {
        let mut start = 0;
        for end in ends(bytes.len(), cuts) {
            let piece = &bytes[start..end];
            start = end;
            let ResponseStep { forward, state } = self.exchange.response(piece);
            assert!(forward == piece.len() || (forward < piece.len() && state == Progress::Done));
            assert!(!self.complete || forward == 0, "forwards after the end");
            self.complete |= state == Progress::Done;
            self.forwarded += forward;
        }
        self.check();
    }

    pub(crate) fn told(&self) -> Told {
        Told {
            taken: self.taken,
            forwarded: self.forwarded,
            verdict: self.exchange.verdict(),
            client_persists: self.exchange.client_persists(),
            status: self.exchange.status(),
            flags: [
                self.exchange.request_done(),
                self.exchange.response_started(),
                self.exchange.final_head_seen(),
                self.exchange.ties_to_client(),
            ],
            idle_timeout: self.exchange.origin_idle_timeout(),
        }
    }

    /// The origin's end of stream; never leaves a socket for reuse.
    pub(crate) fn eof(mut self) -> (ResponseEnd, Told) {
        let end = self.exchange.response_eof();
        assert!(matches!(self.exchange.verdict(), Verdict::Close(_)));
        (end, self.told())
    }

    fn check(&self) {
        if self.exchange.verdict() == Verdict::Return {
            assert!(self.complete && self.exchange.request_done());
            assert!(!self.exchange.ties_to_client());
        }
        if self.exchange.client_persists() {
            assert!(self.complete && self.exchange.request_done());
        }
        assert!(self.exchange.response_started() || !self.exchange.final_head_seen());
    }
}

/// A message that the kernel takes for a plain request is one here, and nothing of it is left over.
/// Its head, if it is plain.
pub(crate) fn plain_request(message: &[u8]) -> Option<RequestHead> {
    let plain = scan_request(message).ok()?;
    let RequestStep::Head(head) = RequestReader::default().read(message) else {
        panic!("no head: {}", message.escape_ascii());
    };
    let case = || format!("{head:?} of {}", message.escape_ascii());
    assert_eq!(head.len, plain.head_len as usize, "{}", case());
    let body = message.len() - head.len;
    assert!(
        head.framing == Framing::Length(body as u64)
            || (head.framing == Framing::None && body == 0),
        "{}",
        case()
    );
    assert!(head.edit.is_none() && head.client_persists && head.origin_persists, "{}", case());
    assert!(!head.doubtful && !head.connection_auth && !head.expects_continue, "{}", case());
    assert_eq!(head.method == Method::Head, plain.head_only, "{}", case());
    assert_eq!(head.method.is_idempotent(), plain.idempotent, "{}", case());
    Some(head)
}

/// A response that the kernel takes for plain ends here where it says, not a byte sooner, and
/// leaves the socket clean. `request` is a plain one, `head` its head; the response starts with
/// `start`, the rest is made up. How long it is, if it is plain.
pub(crate) fn plain_response(
    request: &[u8],
    head: &RequestHead,
    start: &[u8],
    limit: u32,
) -> Option<usize> {
    let plain = scan_response(start, head.method == Method::Head, limit).ok()?;
    assert!(plain.total <= limit);
    let total = plain.total as usize;
    let mut response = start.to_vec();
    response.resize(total, b'\n');
    let case = || format!("{plain:?}: {}", response.escape_ascii());
    for cut in [0, total - 1] {
        let mut exchange = Exchange::new(head);
        assert!(exchange.request_done() || !request[head.len..].is_empty());
        exchange.request_body(&request[head.len..]);
        let step = exchange.response(&response[..cut]);
        assert_eq!(step, ResponseStep { forward: cut, state: Progress::More }, "{}", case());
        let step = exchange.response(&response[cut..]);
        assert_eq!(
            step,
            ResponseStep { forward: total - cut, state: Progress::Done },
            "{}",
            case()
        );
        assert_eq!(exchange.verdict(), Verdict::Return, "{}", case());
        assert!(exchange.client_persists(), "{}", case());
        assert_eq!(exchange.status(), Some(plain.status), "{}", case());
        let idle_s = exchange.origin_idle_timeout().map_or(0, |timeout| timeout.as_secs());
        assert_eq!(idle_s, u64::from(plain.origin_idle_s), "{}", case());
        // What comes after it is nobody's.
        assert_eq!(exchange.response(b"H").forward, 0, "{}", case());
        assert_ne!(exchange.verdict(), Verdict::Return, "{}", case());
    }
    Some(total)
}

/// The ends of the pieces, in order, the last being `len`.
fn ends(len: usize, cuts: &[usize]) -> Vec<usize> {
    let mut ends: Vec<usize> = cuts.iter().copied().filter(|&cut| cut < len).collect();
    ends.sort_unstable();
    ends.push(len);
    ends
}
