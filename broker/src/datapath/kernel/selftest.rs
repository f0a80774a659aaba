//! Tries steering out before anybody relies on it.
//!
//! Kernels differ in what they do with redirected bytes, and their versions do not tell:
//! distributions carry both mistakes and cures to older ones. So the daemon makes itself a client,
//! a listener and an origin on the loopback interface and has real exchanges between them, through
//! the programs and maps that are to serve everybody else. What it opens for that is left out of the
//! counters.

mod ground;
mod sockets;

use std::cell::Cell;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use aya::maps::{Array, MapData, SkStorage};
use broker_ebpf::abi::{self, EventKind, Offsets, Route, SocketState};
use broker_ebpf::phase::{Phase, Word};
use nix::errno::Errno;
use nix::fcntl::{SpliceFFlags, splice};
use nix::sys::epoll::EpollFlags;
use nix::sys::socket::{MsgFlags, recv, send};
use socket2::SockRef;

use self::ground::{Ground, Parties, attach};
use self::sockets::{
    PATIENCE, ends, eventually, readable, receive, response, silent, transfer, wakes, watch,
};
use crate::chain;
use crate::clock;
use crate::datapath::steering::Steering;
use crate::sys;

/// How often sockets leave their maps while somebody sends.
const RACES: u32 = 100;

/// One behaviour that steering depends on.
#[derive(Clone, Debug)]
pub struct Step {
    /// A stable name.
    pub name: &'static str,
    /// What it shows.
    pub shows: &'static str,
    /// How long it took.
    pub took: Duration,
    /// What came of it.
    pub outcome: Outcome,
}

impl Step {
    /// What clients may notice, if it is that.
    #[must_use]
    pub fn remark(&self) -> Option<&str> {
        match &self.outcome {
            Outcome::Remark(remark) => Some(remark),
            _ => None,
        }
    }
}

/// What came of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As it should be.
    Passed,
    /// Steering works, but clients might notice this, or not all of them profit.
    Remark(String),
    /// Steering would do harm here.
    Failed(String),
    /// Another step has failed before.
    NotTried,
}

type Try = fn(&Ground<'_>) -> anyhow::Result<Option<String>>;

/// What is tried, in this order. Most other steps mean little if an earlier one fails.
const STEPS: [(&str, &str, Try); 18] = [
    ("exchange", "requests reach an origin and responses their client, byte for byte", exchange),
    ("again", "bytes that an origin's TCP sends twice count once", again),
    ("wake_up", "poll, epoll and sleeping readers notice redirected bytes", wake_up),
    ("peek", "bytes that were peeked at can still be read", peek),
    ("end", "the end of a connection is read after the bytes before it", end),
    ("full_buffer", "a slow client loses nothing and gets nothing twice", full_buffer),
    ("silence", "bytes and ends on idle origin sockets are noticed", silence),
    ("urgent", "sockets with urgent data serve no other client", urgent),
    ("refused", "a request that TCP does not take is noticed", refused),
    ("order", "nothing is redirected past what the daemon has sent", order),
    ("unread", "the daemon sends nothing past what was redirected", unread),
    ("joined", "what the daemon sends lies behind what was redirected", joined),
    ("auto", "blocking clients are told from nonblocking ones", auto),
    ("release", "sockets that leave their maps go on as plain TCP", release),
    ("race", "nothing is lost if that happens while somebody sends", race),
    (FIONREAD, "FIONREAD tells how many bytes there are to be read", fionread),
    ("wait_all", "MSG_WAITALL waits for redirected bytes", wait_all),
    ("splice", "splice(2) moves redirected bytes", splice_out),
];

/// All steps, none of them tried.
#[must_use]
pub fn untried() -> Vec<Step> {
    STEPS.map(|(name, shows, _)| not_tried(name, shows)).into()
}

fn not_tried(name: &'static str, shows: &'static str) -> Step {
    Step { name, shows, took: Duration::ZERO, outcome: Outcome::NotTried }
}

/// Tries everything out, up to the first failure, and says where its connections have gone to. No
/// worker may be running and nothing may be intercepted yet: a route, a queue and the counters of
/// steering are borrowed for it.
pub(super) fn run(
    steering: &Steering,
    sockets: &mut SkStorage<MapData, SocketState>,
    routes: &mut Array<MapData, Route>,
    offsets: Offsets,
) -> (Vec<Step>, Vec<SocketAddr>) {
    let ground = match Ground::new(steering, sockets, routes, offsets) {
        Ok(ground) => ground,
        Err(error) => {
            let mut steps = untried();
            steps[0].outcome = Outcome::Failed(chain(error.as_ref()));
            return (steps, Vec::new());
        }
    };
    let mut failed = false;
    let step = |(name, shows, attempt): (_, _, Try)| {
        if failed {
            return not_tried(name, shows);
        }
        let start = clock::now();
        let outcome = match attempt(&ground) {
            Ok(None) => Outcome::Passed,
            Ok(Some(remark)) => Outcome::Remark(remark),
            Err(error) => Outcome::Failed(chain(error.as_ref())),
        };
        failed = matches!(outcome, Outcome::Failed(_));
        Step { name, shows, took: clock::now() - start, outcome }
    };
    let steps = STEPS.map(step).into();
    (steps, ground.dialled())
}

/// Why nothing may be steered, if so.
pub(super) fn verdict(steps: &[Step]) -> Result<(), String> {
    let failure = steps.iter().find_map(|step| match &step.outcome {
        Outcome::Failed(reason) => Some(format!("self-test {:?}: {reason}", step.name)),
        _ => None,
    });
    failure.map_or(Ok(()), Err)
}

/// Whether programs that know nothing of it may be steered: those that ask how much there is to be
/// read must get the right answer.
pub(super) fn auto_is_safe(steps: &[Step]) -> bool {
    steps.iter().any(|step| step.name == FIONREAD && step.outcome == Outcome::Passed)
}

const FIONREAD: &str = "fionread";

fn exchange(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let parties = ground.parties()?;
    parties.exchange(0)?;
    parties.exchange(1000)?;
    // A response in pieces, and a new one only after its last byte.
    parties.is_steered(&parties.request()?)?;
    let response = response(3000);
    for piece in response.chunks(1000) {
        ensure!(parties.word().owner() == parties.cookie, "the response has ended too early");
        (&parties.server).write_all(piece)?;
        receive(&parties.client, piece, "the client")?;
    }
    parties.becomes(Word::IDLE)?;
    silent(&parties.client, "the client")?;
    Ok(None)
}

fn again(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    const AGAIN: u16 = 500;
    let parties = ground.parties()?;
    parties.is_steered(&parties.request()?)?;
    let bytes = response(3000);
    let (first, rest) = bytes.split_at(2000);
    (&parties.server).write_all(first)?;
    receive(&parties.client, first, "the client")?;
    parties.rewind(AGAIN)?;
    (&parties.server).write_all(&bytes[first.len() - usize::from(AGAIN)..])?;
    receive(&parties.client, rest, "the client")?;
    parties.becomes(Word::IDLE)?;
    silent(&parties.client, "the client")?;

    // The daemon goes on with a response whose length does not come first.
    let request = parties.request()?;
    parties.is_steered(&request)?;
    let bytes = [b"HTTP/1.1 200 OK\r\n\r\n", &bytes[..]].concat();
    let (first, rest) = bytes.split_at(2000);
    (&parties.server).write_all(first)?;
    receive(&parties.origin, first, "the daemon")?;
    parties.rewind(AGAIN)?;
    (&parties.server).write_all(&bytes[first.len() - usize::from(AGAIN)..])?;
    receive(&parties.origin, rest, "the daemon")?;
    silent(&parties.origin, "the daemon")?;
    silent(&parties.client, "the client")?;
    Ok(None)
}

fn wake_up(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let parties = ground.parties()?;
    let client = &parties.client;
    let (by_level, by_edge) = (EpollFlags::EPOLLIN, EpollFlags::EPOLLIN | EpollFlags::EPOLLET);
    let (level, edge) = (watch(client, by_level)?, watch(client, by_edge)?);
    ensure!(
        !wakes(&level, Duration::ZERO)? && !wakes(&edge, Duration::ZERO)?,
        "epoll wakes a client without bytes"
    );
    for _ in 0..2 {
        parties.is_steered(&parties.request()?)?;
        let response = parties.respond(300)?;
        ensure!(wakes(&level, PATIENCE)?, "level-triggered epoll does not wake");
        ensure!(wakes(&edge, PATIENCE)?, "edge-triggered epoll does not wake");
        for flags in [by_level, by_edge] {
            let late = watch(client, flags)?;
            ensure!(
                wakes(&late, PATIENCE)?,
                "epoll does not see bytes that came before it ({flags:?})"
            );
        }
        parties.client_reads(&response)?;
        ensure!(!wakes(&level, Duration::ZERO)?, "epoll wakes a client that has read everything");
    }
    let answer = response(300);
    let read = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut read = vec![0; answer.len()];
            (&*client).read_exact(&mut read).map(|()| read)
        });
        parties.is_steered(&parties.request()?)?;
        (&parties.server).write_all(&answer)?;
        let read = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        read.context("a reader that sleeps")
    })?;
    ensure!(read == answer, "a reader that sleeps gets other bytes than were sent");
    Ok(None)
}

fn peek(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let parties = ground.parties()?;
    parties.is_steered(&parties.request()?)?;
    let response = parties.respond(300)?;
    for len in [10, response.len()] {
        let mut seen = vec![0; len];
        let n = parties.client.peek(&mut seen)?;
        ensure!(n == len && seen == response[..len], "a peek at {len} bytes sees {n}, or others");
    }
    parties.client_reads(&response)?;
    Ok(None)
}

fn end(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let parties = ground.parties()?;
    parties.is_steered(&parties.request()?)?;
    let response = parties.respond(300)?;
    parties.daemon.shutdown(Shutdown::Write)?;
    let ended = watch(&parties.client, EpollFlags::EPOLLRDHUP)?;
    ensure!(wakes(&ended, PATIENCE)?, "the client does not notice the end");
    receive(&parties.client, &response, "the client")?;
    let n = (&parties.client).read(&mut [0; 64]).context("reading the end")?;
    ensure!(n == 0, "{n} bytes instead of the end");
    Ok(None)
}

fn full_buffer(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let (origin, server) = ground.origin()?;
    let (client, daemon) = ground.client(Some(16_384))?;
    let parties = Parties::new(ground, client, daemon, origin, server)?;
    parties.is_steered(&parties.request()?)?;
    let response = response(60_000);
    for piece in response.chunks(4000) {
        (&parties.server).write_all(piece).context("the origin's response")?;
    }
    // The whole of it has been redirected before the client reads any of it.
    parties.becomes(Word::IDLE)?;
    let (most, last) = response.split_at(60_000);
    for piece in most.chunks(1000) {
        receive(&parties.client, piece, "the client")?;
        parties.has_not_settled("the rest of a long response is unread")?;
    }
    parties.client_reads(last)?;
    parties.settles()?;
    Ok(None)
}

fn silence(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let noticed = |disturb: fn(&TcpStream) -> std::io::Result<()>| {
        let parties = ground.parties()?;
        parties.exchange(10)?;
        disturb(&parties.server)?;
        parties.becomes(Word::new(Phase::Dirty, 0))?;
        ground.hears(EventKind::Slot, 0)?;
        parties.is_relayed(&parties.request()?)
    };
    noticed(|mut server| server.write_all(b"HTTP/1.1 408 Request Timeout\r\n\r\n"))
        .context("bytes on an idle socket")?;
    noticed(|server| server.shutdown(Shutdown::Write)).context("an end on an idle socket")?;
    Ok(None)
}

/// An origin never sees urgent data among the other bytes: with the last byte of a request urgent, it
/// would take the first of the next request for that.
fn urgent(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let parties = ground.parties()?;
    parties.exchange(10)?;
    let request = b"GET /urgent HTTP/1.1\r\nHost: broker\r\n\r\n";
    let n = send(parties.client.as_raw_fd(), request, MsgFlags::MSG_OOB)
        .context("the client's request")?;
    ensure!(n == request.len(), "only {n} bytes were sent");
    parties.is_steered(&request[..n - 1])?;
    let response = response(10);
    (&parties.server).write_all(&response)?;
    parties.client_reads(&response)?;
    parties.becomes(Word::new(Phase::Relay, 0))?;
    ensure!(ground.steering.is_spent(ground.slot), "urgent data is not noticed");
    Ok(None)
}

/// The program has judged the request by then, and only the client is told.
fn refused(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let parties = ground.parties()?;
    parties.exchange(10)?;
    let unsent = || ground.steering.noted(ground.slot).map_or(0, |noted| noted.unsent as usize);
    ensure!(unsent() == 0, "a request that was sent counts as unsent");
    let mut origin = &parties.origin;
    origin.set_nonblocking(true)?;
    SockRef::from(origin).set_send_buffer_size(1)?;
    let full = loop {
        if let Err(error) = origin.write(&[0; 4096]) {
            break error;
        }
    };
    ensure!(full.kind() == ErrorKind::WouldBlock, "filling a socket: {full}");
    parties.client.set_nonblocking(true)?;
    let request = b"GET /refused HTTP/1.1\r\nHost: broker\r\n\r\n";
    match (&parties.client).write(request) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
        sent => bail!("a full socket takes a request: {sent:?}"),
    }
    let word = parties.word();
    ensure!(word == Word::new(Phase::Head, parties.cookie), "the socket is {:?}", word.phase());
    ensure!(unsent() == request.len(), "{} bytes are unsent, not {}", unsent(), request.len());
    Ok(None)
}

/// Behind what the daemon has sent, nothing may be redirected before that is read.
fn order(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let parties = ground.parties()?;
    let (mut sent, mut received) = (0, 0);
    let mut relayed = |request: &[u8]| {
        parties.is_relayed(request)?;
        received += request.len() as u64;
        let answer = response(100);
        (&parties.daemon).write_all(&answer)?;
        sent += answer.len() as u64;
        ground.steering.set_free(parties.cookie, sent, received);
        anyhow::Ok(answer)
    };
    let first = relayed(&parties.odd_request()?)?;
    ensure!(readable(&parties.client)?, "the client does not become readable");
    let second = relayed(&parties.request()?).context("with bytes of the daemon's unread")?;
    parties.client_reads(&[first, second].concat())?;
    if ground.knows(&[
        |o| o.tcp_rcv_nxt,
        |o| o.tcp_copied_seq,
        |o| o.tcp_write_seq,
        |o| o.tcp_bytes_received,
    ]) {
        parties.exchange(100).context("after the daemon was done")?;
        Ok(None)
    } else {
        Ok(Some("a client stays with the daemon once that has served it".to_owned()))
    }
}

/// The daemon is told whether redirected bytes are unread or still to come, before it sends
/// anything that could overtake them.
fn unread(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let parties = ground.parties()?;
    parties.settles()?;
    parties.is_steered(&parties.request()?)?;
    parties.has_not_settled("nothing of the response has come")?;
    let bytes = response(100);
    let (first, rest) = bytes.split_at(80);
    (&parties.server).write_all(first)?;
    receive(&parties.client, first, "the client")?;
    parties.has_not_settled("some of the response is to come")?;
    (&parties.server).write_all(rest)?;
    parties.becomes(Word::IDLE)?;
    ensure!(readable(&parties.client)?, "the client does not become readable");
    parties.is_relayed(&parties.odd_request()?)?;
    parties.has_not_settled("some of the response is unread")?;
    parties.client_reads(rest)?;
    parties.settles()?;
    (&parties.daemon).write_all(&bytes)?;
    parties.client_reads(&bytes)?;
    Ok(None)
}

/// The daemon's bytes come on the way of redirected ones, whether those were read or not, and the
/// end of the connection comes after them.
fn joined(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let parties = ground.parties()?;
    ground.steering.join_ways(parties.cookie, parties.daemon.as_fd())?;
    parties.is_steered(&parties.request()?)?;
    let redirected = parties.respond(300)?;
    let sent = [response(50_000), response(1000)];
    for bytes in &sent {
        (&parties.daemon).write_all(bytes).context("the daemon's response")?;
    }
    parties.client_reads(&[&redirected[..], &sent[0], &sent[1]].concat())?;
    // Nothing of that came over the network.
    ground.steering.set_free(parties.cookie, 0, 0);
    parties.exchange(100).context("after the daemon was done")?;
    let ended = watch(&parties.client, EpollFlags::EPOLLRDHUP)?;
    (&parties.daemon).write_all(&sent[0])?;
    parties.daemon.shutdown(Shutdown::Write)?;
    ensure!(wakes(&ended, PATIENCE)?, "the client does not notice the end");
    receive(&parties.client, &sent[0], "the client")?;
    let n = (&parties.client).read(&mut [0; 64]).context("reading the end")?;
    ensure!(n == 0, "{n} bytes instead of the end");
    Ok(None)
}

fn auto(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    ground.steer(abi::Steer::Auto)?;
    let done = (|| {
        let parties = ground.parties()?;
        parties.is_relayed(&parties.request()?).context("a blocking client")?;
        ground.hears(EventKind::Blocking, parties.cookie)?;
        drop(parties);
        if !ground.knows(&[|o| o.sock_socket, |o| o.socket_file, |o| o.file_flags]) {
            return Ok(Some("`steer = \"auto\"` steers nobody".to_owned()));
        }
        let parties = ground.parties()?;
        parties.client.set_nonblocking(true)?;
        parties.is_steered(&parties.request()?).context("a nonblocking client")?;
        Ok(None)
    })();
    ground.steer(abi::Steer::Kernel)?;
    done
}

fn release(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let bytes = response(30_000);
    let parties = ground.parties()?;
    parties.exchange(100)?;
    ground.steering.release_client(parties.cookie);
    transfer(&parties.client, &parties.daemon, &bytes, "the daemon")
        .context("a client's socket")?;
    transfer(&parties.daemon, &parties.client, &bytes, "the client")
        .context("a client's socket")?;
    ends(&parties.daemon, &parties.client).context("a client's socket")?;

    ensure!(ground.steering.take_back(ground.slot), "an idle socket cannot be taken back");
    ground.steering.release(ground.slot);
    let (origin, server) = (&parties.origin, &parties.server);
    transfer(origin, server, &bytes, "the origin").context("an origin socket")?;
    transfer(server, origin, &bytes, "the daemon").context("an origin socket")?;
    ends(server, origin).context("an origin socket")?;
    Ok(None)
}

fn race(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let parties = ground.parties()?;
    let Parties { client, daemon, cookie, .. } = &parties;
    while_sending(
        client,
        |message| {
            ground.steering.release_client(*cookie);
            receive(daemon, &message, "the daemon")?;
            (&*daemon).write_all(&message)?;
            receive(client, &message, "the client")?;
            // A send that has not quite ended keeps the kernel's part of the socket busy.
            let enrolled = eventually(|| ground.steering.enrol(*cookie, client.as_fd()).is_ok());
            ensure!(enrolled, "a client does not get back into its map");
            Ok(())
        },
        || ground.steering.set_busy(*cookie),
    )
    .context("a client's socket")?;
    drop(parties);

    // Either the program has seen the bytes, and nobody may use the socket any more, or they are
    // there to be read. What comes just when the socket leaves, the kernel may drop without asking
    // the program; but it is counted, so that the daemon knows that the socket was not silent.
    let (origin, server) = ground.origin()?;
    let (steering, slot) = (ground.steering, ground.slot);
    let (cookie, received) = (Cell::new(0), Cell::new(0));
    while_sending(
        &server,
        |message| {
            steering.release(slot);
            received.set(received.get() + message.len() as u64);
            let received = Some(received.get());
            let counted = || sys::bytes_received(origin.as_fd()).ok();
            ensure!(eventually(|| counted() == received), "TCP does not count what it receives");
            if steering.word(slot).phase() == Phase::Dirty || silent(&origin, "").is_ok() {
                silent(&origin, "a socket whose bytes were dropped")?;
            } else {
                receive(&origin, &message, "the daemon")?;
            }
            steering.free(slot, cookie.get());
            Ok(())
        },
        || {
            if let Ok(attached) = attach(ground, &origin) {
                cookie.set(attached);
                let _offered = steering.swap(slot, steering.word(slot), Word::OFFERED);
            }
        },
    )
    .context("an origin socket")?;
    Ok(None)
}

/// Has somebody send, again and again, while `meanwhile` runs.
fn while_sending(
    from: &TcpStream,
    mut meanwhile: impl FnMut(Vec<u8>) -> anyhow::Result<()>,
    before: impl Fn(),
) -> anyhow::Result<()> {
    let (go, turns) = mpsc::sync_channel::<Vec<u8>>(0);
    thread::scope(|scope| {
        let sender =
            scope.spawn(move || turns.iter().try_for_each(|message| (&*from).write_all(&message)));
        let mut done = Ok(());
        for turn in 0..RACES {
            before();
            let message = format!("message {turn}").into_bytes();
            if go.send(message.clone()).is_err() {
                break;
            }
            done = meanwhile(message).with_context(|| format!("the {turn}th time"));
            if done.is_err() {
                break;
            }
        }
        drop(go);
        let sent = sender.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        done.and_then(|()| sent.context("sending"))
    })
}

fn fionread(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let parties = ground.parties()?;
    let mut wrong = Vec::new();
    let mut ask = |len: usize, what| {
        let mut told = sys::unread(parties.client.as_fd())?;
        // On a busy host bytes can be seen while they still pass from TCP's queue to the map's. A kernel
        // that answers wrong is waited for only once.
        if told != len && wrong.is_empty() {
            eventually(|| {
                told = sys::unread(parties.client.as_fd()).unwrap_or(told);
                told == len
            });
        }
        if told != len {
            wrong.push(format!("{told} for {len} bytes{what}"));
        }
        anyhow::Ok(())
    };
    parties.is_steered(&parties.request()?)?;
    let bytes = parties.respond(300)?;
    ask(bytes.len(), "")?;
    receive(&parties.client, &bytes[..100], "the client")?;
    ask(bytes.len() - 100, " of which some were read")?;
    parties.client_reads(&bytes[100..])?;
    ask(0, "")?;
    ground.steering.join_ways(parties.cookie, parties.daemon.as_fd())?;
    (&parties.daemon).write_all(&bytes)?;
    ensure!(readable(&parties.client)?, "the client does not become readable");
    ask(bytes.len(), " of the daemon's")?;
    parties.client_reads(&bytes)?;
    Ok((!wrong.is_empty()).then(|| {
        let wrong = wrong.join(", ");
        format!("FIONREAD answers {wrong}: `steer = \"auto\"` steers nobody")
    }))
}

fn wait_all(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    const LONG: Duration = Duration::from_millis(20);
    let parties = ground.parties()?;
    parties.is_steered(&parties.request()?)?;
    let response = response(300);
    let (first, rest) = response.split_at(200);
    (&parties.server).write_all(first)?;
    ensure!(readable(&parties.client)?, "the client does not become readable");
    parties.client.set_read_timeout(Some(LONG))?;
    let mut read = vec![0; response.len()];
    let start = clock::now();
    let n = recv(parties.client.as_raw_fd(), &mut read, MsgFlags::MSG_WAITALL)?;
    // Who waits for all waits until the time is over.
    let waited = clock::now() - start >= LONG;
    ensure!(read[..n] == *first, "a reader that waits for all gets other bytes than were sent");
    (&parties.server).write_all(rest)?;
    parties.client_reads(rest)?;
    Ok((!waited).then(|| "a read with MSG_WAITALL does not wait for all".to_owned()))
}

fn splice_out(ground: &Ground<'_>) -> anyhow::Result<Option<String>> {
    let parties = ground.parties()?;
    parties.is_steered(&parties.request()?)?;
    let response = parties.respond(300)?;
    parties.client.set_nonblocking(true)?;
    let (read, write) = nix::unistd::pipe()?;
    let flags = SpliceFFlags::SPLICE_F_NONBLOCK;
    match splice(&parties.client, None, &write, None, response.len(), flags) {
        Ok(n) => {
            let mut moved = vec![0; n];
            std::fs::File::from(read).read_exact(&mut moved)?;
            ensure!(moved == response[..n], "splice(2) moves other bytes");
            parties.client_reads(&response[n..])?;
            let len = response.len();
            Ok((n != len).then(|| format!("splice(2) moves {n} of {len} bytes")))
        }
        Err(Errno::EAGAIN) => {
            parties.client_reads(&response)?;
            Ok(Some("splice(2) does not see redirected bytes".to_owned()))
        }
        Err(error) => bail!("splice(2): {error}"),
    }
}
