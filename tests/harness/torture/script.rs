//! What one client connection does, drawn from the client's generator.

use std::time::Duration;

use super::body::{Key, SIZE_MAX};
use super::mode::Mode;
use super::random::Random;
use super::spec::{Asks, CONTINUE, End, Framing, How, Id, Method, Spec, Upload, Version};

/// One connection of a client.
#[derive(Clone, Debug)]
pub(super) struct Script {
    pub(super) mode: Mode,
    pub(super) requests: Vec<Spec>,
    pub(super) sending: Sending,
    pub(super) leaving: Option<Leaving>,
    /// Ends its side once everything is sent.
    pub(super) half_close: bool,
    pub(super) reading: Reading,
}

/// What the origins of a service are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manners {
    /// They behave.
    Calm,
    /// Each exchange may end badly.
    Odd {
        /// Some of their requests have a body: an origin that answers unasked after one of these is not
        /// trusted with others, nor with what is steered. So none does.
        uploads: bool,
    },
}

/// How requests are sent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sending {
    /// Before the responses to those before them have come.
    pub(super) ahead: bool,
    /// Several of them in one write.
    pub(super) together: bool,
    /// The body in a write of its own, after a pause.
    pub(super) body_apart: Option<Duration>,
    /// At most so many bytes at a time, with a pause.
    pub(super) pieces: Option<(usize, Duration)>,
    /// Pause between a response and the next request.
    pub(super) think: Duration,
}

/// When and how a client leaves early.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaving {
    pub(super) when: When,
    pub(super) how: How,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum When {
    /// So many bytes are sent, and a pause is over.
    Sent(u64, Duration),
    /// So many bytes have come.
    Received(u64),
}

/// How responses are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    /// Most bytes of one read.
    pub(super) size: usize,
    /// Looks with `MSG_PEEK` first, at so many bytes.
    pub(super) peek: Option<usize>,
    /// Pause between reads.
    pub(super) pause: Option<Duration>,
    /// Size of the socket's receive buffer, if not the default.
    pub(super) receive_buffer: Option<usize>,
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

impl Script {
    /// Draws a connection; `ask` gives the ids of its requests. `None` when there are no more.
    pub(super) fn draw(
        mode: Mode,
        random: &mut Random,
        manners: Manners,
        mut ask: impl FnMut() -> Option<Id>,
    ) -> Option<Self> {
        let length = match mode {
            Mode::KeepAlive | Mode::Plain => random.magnitude(2..=40),
            Mode::Pipeline | Mode::PipelineWrites => random.within(2..=8),
            Mode::Http10 | Mode::Head | Mode::Bodiless | Mode::Post | Mode::PostChunked => {
                random.weighted(&[(1, 3), (2, 1), (4, 1)])
            }
            _ => 1,
        };
        let requests: Option<Vec<Spec>> =
            (0..length).map(|_| ask().map(|id| spec(mode, random, manners, id))).collect();
        let requests = requests?;
        let sending = sending(mode, random);
        let leaving = leaving(mode, random, &requests[0]);
        let largest = requests.iter().map(|spec| spec.size).max().unwrap_or(0);
        Some(Self {
            mode,
            requests,
            sending,
            leaving,
            half_close: mode == Mode::HalfClose,
            reading: reading(mode, random, largest),
        })
    }
}

/// The exchange of a mode.
fn spec(mode: Mode, random: &mut Random, manners: Manners, id: Id) -> Spec {
    let mut spec = Spec {
        size: response_size(mode, random),
        framing: random.weighted(&[
            (Framing::Length, 60),
            (Framing::Chunked, 34),
            (Framing::Close, 6),
        ]),
        interim: random.chance(50).then(|| random.pick(&[100, 102, 103])),
        pad: pad(random),
        split: random.chance(40),
        delay_ms: if random.chance(15) { small(random.magnitude(1..=200)) } else { 0 },
        ..Spec::new(id)
    };
    match mode {
        Mode::Plain => {
            spec.framing = Framing::Length;
            spec.size = spec.size.min(48 << 10);
            spec.interim = None;
            spec.pad = 0;
            spec.split = false;
        }
        Mode::Close => spec.asks = Asks::Close,
        Mode::Http10 => {
            spec.version = Version::Http10;
            spec.asks = random.pick(&[Asks::Nothing, Asks::KeepAlive, Asks::Close]);
        }
        Mode::KeepAlive | Mode::Pipeline | Mode::PipelineWrites => {
            spec.method =
                random.weighted(&[(Method::Get, 8), (Method::Head, 1), (Method::Post, 1)]);
            if spec.method == Method::Post {
                spec.upload = Some(upload(random, 2048));
            }
            if random.chance(20) {
                spec.asks = random.pick(&[Asks::Close, Asks::KeepAlive]);
            }
        }
        Mode::Abandon | Mode::Reset if random.chance(300) => post(&mut spec, random, 64 << 10),
        Mode::HalfClose | Mode::Dribble if random.chance(300) => post(&mut spec, random, 4096),
        Mode::Post | Mode::PostSecondWrite => {
            post(&mut spec, random, 4096);
            if random.chance(200) {
                spec.asks = Asks::Close;
            }
        }
        Mode::PostLarge => post(&mut spec, random, 512 << 10),
        Mode::PostChunked => {
            post(&mut spec, random, 16 << 10);
            spec.upload = spec.upload.map(|upload| Upload { chunked: true, ..upload });
        }
        Mode::PostExpect => {
            post(&mut spec, random, 16 << 10);
            spec.expects = true;
        }
        Mode::PostEarly => {
            post(&mut spec, random, 256 << 10);
            spec.early = true;
        }
        Mode::Head => spec.method = Method::Head,
        Mode::Bodiless => spec.status = random.pick(&[204, 304]),
        _ => {}
    }
    if spec.version == Version::Http10 {
        spec.interim = None;
        if spec.framing == Framing::Chunked {
            spec.framing = Framing::Length;
        }
    }
    if let Manners::Odd { uploads } = manners {
        misbehave(&mut spec, random, uploads);
    }
    spec
}

fn post(spec: &mut Spec, random: &mut Random, size_max: u64) {
    spec.method = Method::Post;
    spec.upload = Some(upload(random, size_max));
}

fn upload(random: &mut Random, size_max: u64) -> Upload {
    Upload { size: small(random.magnitude(1..=size_max)), chunked: random.chance(200) }
}

/// What the origin does to it.
fn misbehave(spec: &mut Spec, random: &mut Random, uploads: bool) {
    let how = random.pick(&[How::Fin, How::Rst]);
    let idle_ms = small(random.below(20));
    spec.end = random.weighted(&[
        (End::Keep, 912),
        (End::Announced, 15),
        (End::Quiet, 12),
        (End::Idle(how, idle_ms), 20),
        (End::Poison, 9),
        (End::Junk, 4),
        (End::Stray, 8),
        (End::Before(how), 7),
        (End::Mid(how, 0), 13),
    ]);
    match spec.end {
        // The rest of the request is read in peace.
        _ if spec.early => spec.end = End::Keep,
        // A 100 is a response already: then there is nothing before it.
        End::Before(_) if spec.expects => spec.end = End::Keep,
        End::Stray if uploads => spec.end = End::Keep,
        End::Poison | End::Junk if spec.ends_by_close() => spec.end = End::Keep,
        // A reset takes back what has not been sent yet; so much always has.
        End::Idle(How::Rst, _) => {
            spec.size = spec.size.min(1024);
            spec.pad = spec.pad.min(1000);
        }
        End::Poison | End::Junk => {
            // It has to share a segment. Chunks of a single byte make a body six times as long.
            spec.size = spec.size.min(if spec.framing == Framing::Chunked { 40 } else { 300 });
            spec.pad = spec.pad.min(200);
            spec.split = false;
        }
        End::Mid(how, _) => {
            let body = if spec.response_has_body() { spec.size } else { 0 };
            let length = response_head_len(spec) + u64::from(body);
            let from = if spec.expects { CONTINUE.len() as u64 + 1 } else { 1 };
            // An orderly end in the middle of such a body is its end.
            let how = if spec.ends_by_close() { How::Rst } else { how };
            spec.end = End::Mid(how, small(random.within(from..=length - 1)));
        }
        _ => {}
    }
}

fn response_head_len(spec: &Spec) -> u64 {
    spec.response_head(Key::new(0)).len() as u64
}

fn response_size(mode: Mode, random: &mut Random) -> u32 {
    let range = match mode {
        Mode::Large => (256 << 10)..=(SIZE_MAX / 2),
        Mode::SlowReader => 1..=(96 << 10),
        Mode::AbandonMid | Mode::ResetMid => 1..=(256 << 10),
        _ => match random.below(1000) {
            0..60 => 0..=0,
            60..940 => 1..=4096,
            940..994 => 4096..=(64 << 10),
            _ => (64 << 10)..=(512 << 10),
        },
    };
    if *range.end() == 0 { 0 } else { small(random.magnitude(range)) }
}

fn pad(random: &mut Random) -> u16 {
    if random.chance(100) { small(random.magnitude(1..=6000)) } else { 0 }
}

fn sending(mode: Mode, random: &mut Random) -> Sending {
    let plain = Sending::default();
    match mode {
        Mode::KeepAlive => Sending { think: ms(random.pick(&[0, 0, 0, 0, 1, 10])), ..plain },
        Mode::Pipeline => Sending { ahead: true, together: true, ..plain },
        Mode::PipelineWrites => Sending { ahead: true, ..plain },
        Mode::PostSecondWrite | Mode::PostEarly => {
            Sending { body_apart: Some(ms(random.pick(&[0, 0, 1, 3, 25]))), ..plain }
        }
        Mode::PostLarge | Mode::PostChunked if random.chance(300) => {
            Sending { body_apart: Some(ms(random.pick(&[0, 2]))), ..plain }
        }
        Mode::Dribble => {
            let pieces = (to_size(random.magnitude(1..=300)), ms(random.pick(&[0, 1, 1, 2])));
            Sending { pieces: Some(pieces), ..plain }
        }
        _ => plain,
    }
}

fn leaving(mode: Mode, random: &mut Random, first: &Spec) -> Option<Leaving> {
    let how = match mode {
        Mode::Abandon | Mode::AbandonMid => How::Fin,
        Mode::Reset | Mode::ResetMid => How::Rst,
        _ => return None,
    };
    let when = match mode {
        Mode::Abandon | Mode::Reset => {
            // A chunked body is longer than its size: then this is somewhere in its middle.
            let request = first.request_head(Key::new(0)).len() as u64;
            let request = request + first.upload.map_or(0, |upload| u64::from(upload.size));
            let sent = if random.chance(300) { random.within(0..=request) } else { request };
            let pause = random.weighted(&[(0, 4), (1, 2), (5, 1), (40, 1)]);
            When::Sent(sent, ms(pause))
        }
        _ => {
            let all = response_head_len(first) + u64::from(first.size);
            When::Received(random.magnitude(1..=all))
        }
    };
    Some(Leaving { when, how })
}

fn reading(mode: Mode, random: &mut Random, largest: u32) -> Reading {
    let size = match mode {
        Mode::SlowReader => random.magnitude(256..=8192),
        // Fewer at a time would make an event of every few bytes.
        _ if largest > 16 << 10 => random.pick(&[64 << 10, 4096]),
        _ => random.weighted(&[(64 << 10, 12), (4096, 4), (1000, 2), (200, 1), (37, 1)]),
    };
    let peek = random.chance(120).then(|| to_size(random.pick(&[1, 9, size])));
    Reading {
        size: to_size(size),
        peek,
        pause: (mode == Mode::SlowReader).then(|| ms(random.pick(&[1, 2, 5]))),
        // Where the window is smaller than a segment, a window's worth takes 200 ms.
        receive_buffer: match mode {
            Mode::SlowReader => Some(to_size(random.magnitude(16384..=65536))),
            _ if largest <= 8192 && random.chance(20) => {
                Some(to_size(random.magnitude(2048..=65536)))
            }
            _ => None,
        },
    }
}

fn to_size(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// A draw is never larger than what it is drawn for.
fn small<T: TryFrom<u64> + Default>(n: u64) -> T {
    T::try_from(n).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::spec::POISON;
    use super::super::wire::Wire;
    use super::*;

    /// Longest response that shares a segment with what an origin puts behind it.
    const SHARES_SEGMENT: usize = 900;

    #[test]
    fn draws_are_such_that_the_outcome_is_known() {
        let mut random = Random::new(1, &[]);
        let mut seq = 0;
        for _ in 0..200 {
            for (mode, _) in Mode::WEIGHTS {
                let manners = Manners::Odd { uploads: mode.uploads() };
                let script = Script::draw(mode, &mut random, manners, || {
                    seq += 1;
                    Some(Id { client: 1, seq })
                });
                for spec in script.unwrap().requests {
                    assert!(mode.uploads() || spec.upload.is_none(), "{mode}: {spec:?}");
                    check(&spec);
                }
            }
        }
    }

    fn check(spec: &Spec) {
        assert_eq!(Spec::read(&spec.request_line()), Some(*spec));
        let mut response = Vec::new();
        Wire::response(Key::new(1), spec).fill(&mut response, usize::MAX);
        match spec.end {
            End::Mid(how, at) => {
                assert!(at > 0 && usize::try_from(at).unwrap() < response.len(), "{spec:?}");
                assert!(how == How::Rst || !spec.ends_by_close());
            }
            End::Poison | End::Junk => {
                assert!(response.len() <= SHARES_SEGMENT, "{} bytes", response.len());
                assert!(!spec.ends_by_close() && !spec.early && !spec.split);
            }
            End::Before(_) => assert!(!spec.expects && !spec.early),
            _ => {}
        }
        if spec.version == Version::Http10 {
            assert!(spec.interim.is_none() && spec.framing != Framing::Chunked);
            assert!(!spec.upload.is_some_and(|upload| upload.chunked));
        }
    }

    #[test]
    fn what_shares_a_segment_fits_into_one() {
        // IPv6 over Ethernet, with time stamps.
        assert!(SHARES_SEGMENT + POISON.len() < 1500 - 40 - 32);
    }
}
