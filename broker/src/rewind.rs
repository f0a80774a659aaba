//! A connected socket that sends some of its bytes once more, for trying out what becomes of them.
//!
//! TCP sends segments again whenever an acknowledgement is late, and puts more bytes behind those
//! that it repeats. That cannot be provoked from outside; but a socket in repair mode (`TCP_REPAIR`,
//! which exists for moving processes between hosts) can be told with which number to go on.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::thread;
use std::time::Duration;

use nix::libc;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::sys::{self, set_tcp_option, tcp_option};

/// `linux/tcp.h`: the queues that repair mode knows, and how to leave it.
const TCP_RECV_QUEUE: u32 = 1;
const TCP_SEND_QUEUE: u32 = 2;
const ON: u32 = 1;
const OFF: u32 = 0;
const OFF_SILENTLY: u32 = u32::MAX;

/// `struct tcp_repair_window`.
const WINDOW_BYTES: usize = 20;

/// Kinds of TCP options (RFC 9293, 7323, 2018).
const MAXIMUM_SEGMENT_SIZE: u32 = 2;
const WINDOW_SCALE: u32 = 3;
const SACK_PERMITTED: u32 = 4;
const TIMESTAMPS: u32 = 8;

/// Flags of `struct tcp_info`, in its sixth byte; window scales are in the seventh.
const HAS_TIMESTAMPS: u8 = 1;
const HAS_SACK: u8 = 2;
const HAS_WINDOW_SCALE: u8 = 4;

/// Puts another socket with the same connection in the place of `stream`, once everything that was
/// sent is acknowledged: what it sends first gets the numbers of the last `again` bytes, and should
/// be the same bytes. They must be fewer than what comes at once, or the peer's acknowledgements name
/// bytes that are still to be sent, and are ignored. Nothing may be unread, and no other descriptor may refer to the old socket.
/// Needs `CAP_NET_ADMIN` in the connection's network namespace, where this must be called.
pub fn rewind(stream: &TcpStream, again: u16) -> io::Result<()> {
    const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(1);
    const CONNECTS: u32 = 1000;
    let (local, peer) = (stream.local_addr()?, stream.peer_addr()?);
    let socket = SockRef::from(stream);
    // The peer must take what comes: what it says meanwhile of its window is ignored as well.
    let window = loop {
        if sys::unacknowledged(stream.as_fd())? == 0 {
            set(&socket, libc::TCP_REPAIR, ON)?;
            let window: [u8; WINDOW_BYTES] = tcp_option(stream.as_fd(), libc::TCP_REPAIR_WINDOW)?;
            let [_, _, _, _, a, b, c, d, ..] = window;
            if u32::from_ne_bytes([a, b, c, d]) > 2 * u32::from(again) {
                break window;
            }
            set(&socket, libc::TCP_REPAIR, OFF_SILENTLY)?;
        }
        thread::sleep(LOOK_AGAIN_AFTER);
    };
    let sent = number(&socket, TCP_SEND_QUEUE)?;
    let received = number(&socket, TCP_RECV_QUEUE)?;
    let clock: [u8; 4] = tcp_option(stream.as_fd(), libc::TCP_TIMESTAMP)?;
    let segment: [u8; 4] = tcp_option(stream.as_fd(), libc::TCP_MAXSEG)?;
    let [.., flags, scales, _]: [u8; 8] = tcp_option(stream.as_fd(), libc::TCP_INFO)?;
    let other = Socket::new(Domain::for_address(peer), Type::STREAM, Some(Protocol::TCP))?;
    // The old one is closed with this, which in repair mode tells nobody.
    sys::put_in_place(stream.as_fd(), other.into())?;

    set(&socket, libc::TCP_REPAIR, ON)?;
    socket.bind(&local.into())?;
    set(&socket, libc::TCP_REPAIR_QUEUE, TCP_SEND_QUEUE)?;
    set(&socket, libc::TCP_QUEUE_SEQ, sent.wrapping_sub(again.into()))?;
    set(&socket, libc::TCP_REPAIR_QUEUE, TCP_RECV_QUEUE)?;
    set(&socket, libc::TCP_QUEUE_SEQ, received)?;
    // A child process that has not begun its own program yet may still have the old one.
    let mut tries = CONNECTS;
    loop {
        match socket.connect(&peer.into()) {
            Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable && tries > 0 => tries -= 1,
            connected => break connected?,
        }
        thread::sleep(LOOK_AGAIN_AFTER);
    }
    let (scale_sent, scale_received) = (u32::from(scales & 0xf), u32::from(scales >> 4));
    let options = [
        (true, MAXIMUM_SEGMENT_SIZE, u32::from_ne_bytes(segment)),
        (flags & HAS_WINDOW_SCALE != 0, WINDOW_SCALE, scale_sent | scale_received << 16),
        (flags & HAS_SACK != 0, SACK_PERMITTED, 0),
        (flags & HAS_TIMESTAMPS != 0, TIMESTAMPS, 0),
    ];
    for (_, kind, value) in options.into_iter().filter(|(is_used, ..)| *is_used) {
        let option = [kind.to_ne_bytes(), value.to_ne_bytes()].concat();
        set_tcp_option(socket.as_fd(), libc::TCP_REPAIR_OPTIONS, &option)?;
    }
    set_tcp_option(socket.as_fd(), libc::TCP_TIMESTAMP, &clock)?;
    set_tcp_option(socket.as_fd(), libc::TCP_REPAIR_WINDOW, &window)?;
    set(&socket, libc::TCP_REPAIR, OFF)
}

fn set(socket: &Socket, option: libc::c_int, value: u32) -> io::Result<()> {
    set_tcp_option(socket.as_fd(), option, &value.to_ne_bytes())
}

/// The number of a queue's next byte.
fn number(socket: &Socket, queue: u32) -> io::Result<u32> {
    set(socket, libc::TCP_REPAIR_QUEUE, queue)?;
    tcp_option(socket.as_fd(), libc::TCP_QUEUE_SEQ).map(u32::from_ne_bytes)
}
