//! The programs' decisions, as pure functions that are tested on the host.
//!
//! Everything here is inlined into the programs: the verifier then sees the bounds of what it
//! checks, and no call has to pass more than five arguments.

#![expect(clippy::inline_always, reason = "see the module documentation")]

use crate::abi::{
    Address, BUCKETS, FINE_BUCKETS, Interception, ListenerSet, Outcome, Phase, Steer, Stray,
    Target, words,
};

/// The third word of every IPv4-mapped address; the first two are 0.
const MAPPED: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);

/// 127.0.0.1 and `::1`.
const LOOPBACK_V4: [u32; 4] = v4_mapped(u32::from_ne_bytes([127, 0, 0, 1]));
const LOOPBACK_V6: [u32; 4] = words([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);

/// `TCP_ESTABLISHED` of the kernel.
pub const TCP_ESTABLISHED: u32 = 1;
/// `TCP_FIN_WAIT1` of the kernel.
pub const TCP_FIN_WAIT1: u32 = 4;
/// `TCP_CLOSE` of the kernel.
pub const TCP_CLOSE: u32 = 7;

/// Error numbers are the same on all architectures that BPF programs run on.
const EPIPE: i32 = 32;
const ECONNABORTED: i32 = 103;
const ECONNRESET: i32 = 104;
const ETIMEDOUT: i32 = 110;
/// No connection was made.
pub const ECONNREFUSED: i32 = 111;

/// How many bytes at the front of a segment have come before. TCP receives a segment whole if any of
/// it is new, and cuts off the rest only when it is read (RFC 9293 section 3.10.7.4). `None` if
/// bytes before the segment are missing.
#[must_use]
#[inline(always)]
pub const fn came_before(next_seq: u32, seq: u32, len: u32) -> Option<u32> {
    let before = next_seq.wrapping_sub(seq);
    if before > i32::MAX as u32 {
        return None;
    }
    Some(if before < len { before } else { len })
}

/// What the first segment of a response is, by how much of its request the origin did not have when it
/// sent that: what our TCP has not got yet, and what was on its way. Every segment that follows what
/// the origin has read says that it has it (RFC 9293 section 3.10.7.4: the acknowledgement number is
/// that of the next byte expected).
#[must_use]
#[inline(always)]
pub const fn stray(request_len: u32, not_sent: u32, on_its_way: u32) -> Stray {
    let missing = not_sent.saturating_add(on_its_way);
    if missing >= request_len {
        Stray::Response
    } else if missing > 0 {
        // An answer to a part. The rest must not meet another client's.
        Stray::Request
    } else {
        Stray::None
    }
}

/// The IPv4-mapped form of an IPv4 address, both in network byte order.
#[must_use]
#[inline(always)]
pub const fn v4_mapped(ip: u32) -> [u32; 4] {
    [0, 0, MAPPED, ip]
}

/// Whether this is an IPv4 address in its mapped form.
#[must_use]
#[inline(always)]
pub const fn is_v4(ip: &[u32; 4]) -> bool {
    ip[0] == 0 && ip[1] == 0 && ip[2] == MAPPED
}

/// Whether this is an IPv6 address that means something on one interface only, which it does not name
/// (RFC 4291 section 2.5.6).
#[must_use]
#[inline(always)]
pub const fn is_link_local(ip: &[u32; 4]) -> bool {
    u32::from_be(ip[0]) >> 22 == 0xfe80 >> 6
}

/// A port in network byte order, from the whole word that `bpf_sock_ops.remote_port` has in
/// network byte order.
#[must_use]
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a port has 16 bits")]
pub const fn remote_port(word: u32) -> u16 {
    (u32::from_be(word) as u16).to_be()
}

/// A port in network byte order, from `bpf_sock_ops.local_port`, which is in host byte order.
#[must_use]
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a port has 16 bits")]
pub const fn local_port(word: u32) -> u16 {
    (word as u16).to_be()
}

/// A port in network byte order, from `bpf_sock_addr.user_port`, which holds one in its first
/// two bytes.
#[must_use]
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "a port has 16 bits")]
pub const fn user_port(word: u32) -> u16 {
    if cfg!(target_endian = "little") { word as u16 } else { (word >> 16) as u16 }
}

/// The histogram bucket of a value: bucket `i` holds 2^i <= value < 2^(i+1), the first also 0
/// and the last also everything beyond it.
#[must_use]
#[inline(always)]
pub const fn bucket(value: u64) -> usize {
    let value = if value == 0 { 1 } else { value };
    let bucket = value.ilog2() as usize;
    if bucket < BUCKETS { bucket } else { BUCKETS - 1 }
}

/// Buckets of a finer histogram for each doubling: an edge is 13 to 25 % above the one before.
const STEPS: usize = 4;

/// The bucket of a value in a finer histogram; the last also holds everything beyond it.
#[must_use]
#[inline(always)]
pub const fn fine_bucket(value: u64) -> usize {
    let value = if value == 0 { 1 } else { value };
    let octave = value.ilog2() as usize;
    if octave >= FINE_BUCKETS / STEPS {
        return FINE_BUCKETS - 1;
    }
    // The two bits below the highest one.
    octave * STEPS + ((value << 2 >> octave) & 3) as usize
}

/// The first value beyond a bucket of a finer histogram.
#[must_use]
pub const fn fine_edge(bucket: usize) -> u64 {
    let (octave, step) = (bucket / STEPS, bucket % STEPS);
    ((STEPS + step + 1) as u64) << octave >> 2
}

/// What a destination is matched against the intercepted prefixes as.
#[must_use]
#[inline(always)]
pub const fn target(destination: &Address) -> Target {
    Target {
        port: destination.port.to_ne_bytes(),
        family: if is_v4(&destination.ip) { 4 } else { 6 },
        zero: 0,
        ip: destination.ip,
    }
}

/// A change that the counters care about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// None.
    Nothing,
    /// The handshake was completed.
    Established,
    /// The attempt has failed.
    Failed,
    /// The connection is no longer established.
    Left,
    /// The connection is no longer established, and gone at once.
    LeftAndGone,
}

/// What it means that a socket in `phase` enters the TCP state `state`.
///
/// The previous TCP state is not asked for: in `bpf_sock_ops` it shares its place with the reply
/// of another program on the same cgroup.
#[must_use]
#[inline(always)]
pub const fn step(phase: u32, state: u32) -> Step {
    const CONNECTING: u32 = Phase::Connecting as u32;
    const OPEN: u32 = Phase::Open as u32;
    match (phase, state) {
        (CONNECTING, TCP_ESTABLISHED) => Step::Established,
        (CONNECTING, TCP_CLOSE) => Step::Failed,
        (OPEN, TCP_ESTABLISHED) => Step::Nothing,
        (OPEN, TCP_CLOSE) => Step::LeftAndGone,
        (OPEN, _) => Step::Left,
        _ => Step::Nothing,
    }
}

/// Why an attempt has failed, by the socket's error if that is known.
#[must_use]
#[inline(always)]
pub const fn failure(sk_err: Option<i32>) -> Outcome {
    match sk_err {
        Some(0) => Outcome::Abandoned,
        Some(ECONNREFUSED) => Outcome::Refused,
        Some(ETIMEDOUT) => Outcome::TimedOut,
        _ => Outcome::FailedOther,
    }
}

/// Whether a connection that is gone was ended by a RST or a time-out. An error that the
/// application has not fetched, of an ICMP message for example, is not one.
#[must_use]
#[inline(always)]
pub const fn was_reset(sk_err: Option<i32>) -> bool {
    matches!(sk_err, Some(EPIPE | ECONNABORTED | ECONNRESET | ETIMEDOUT))
}

/// Whether a sign of life is fresh. One that is newer than `now` is: both clocks were read on
/// different CPUs at nearly the same time. 0 means that there was none yet.
#[must_use]
#[inline(always)]
pub const fn is_fresh(beat_ns: u64, now_ns: u64, age_max_ns: u64) -> bool {
    beat_ns != 0 && now_ns.saturating_sub(beat_ns) <= age_max_ns
}

/// The listener that a client can reach for a destination, if there is one.
///
/// An IPv4 client socket cannot reach an IPv6 listener, and an IPv6 one might be `IPV6_V6ONLY`:
/// the address family of the destination is kept.
#[must_use]
#[inline(always)]
pub const fn listener(
    listeners: &ListenerSet,
    same_netns: bool,
    destination: &Address,
) -> Option<Address> {
    let v4 = is_v4(&destination.ip);
    let listener = match (same_netns, v4) {
        (true, true) => Address { ip: LOOPBACK_V4, port: listeners.loopback_v4, zero: 0 },
        (true, false) => Address { ip: LOOPBACK_V6, port: listeners.loopback_v6, zero: 0 },
        (false, _) if is_v4(&listeners.netns.ip) == v4 => listeners.netns,
        (false, _) => return None,
    };
    if listener.port == 0 { None } else { Some(listener) }
}

/// Whether a client is steered, by its service's setting and the flags of its socket's file, if
/// they are known.
///
/// A socket in a map of sockets answers a blocking `recv()` that is woken for nothing, by a
/// signal for example, with `EAGAIN`, which only a nonblocking caller expects.
#[must_use]
#[inline(always)]
pub const fn is_steered(steer: u32, file_flags: Option<u32>) -> bool {
    const O_NONBLOCK: u32 = 0o4000;
    match file_flags {
        _ if steer == Steer::Kernel as u32 => true,
        Some(flags) => steer == Steer::Auto as u32 && flags & O_NONBLOCK != 0,
        None => false,
    }
}

/// So many clients are "lately"; then both counts are halved.
pub const RECENT_MAX: u64 = 512;

/// Whether it pays to put one more client of a service among those that may be steered, by what
/// became of others lately, and a random number.
///
/// A client whose requests the kernel cannot carry, because they all say `Connection: close` for
/// example, costs the daemon more than one that it relays from the start. Where most are such, only
/// a sample goes on being tried.
#[must_use]
#[inline(always)]
pub const fn pays(recently_enrolled: u64, recently_steered: u64, random: u32) -> bool {
    const ENOUGH: u64 = 64;
    recently_enrolled < ENOUGH
        || recently_steered * 4 >= recently_enrolled
        || random.is_multiple_of(16)
}

/// What becomes of a socket's interception when TCP begins to connect it to `remote`: a mark
/// that an earlier `connect()` of the same socket left behind must not hold for this one.
#[must_use]
#[inline(always)]
pub fn interception_at_connect(
    interception: u8,
    listener: &Address,
    remote: &Address,
) -> Interception {
    if interception == Interception::Rewritten as u8 && listener == remote {
        Interception::Connected
    } else {
        Interception::None
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    fn address(text: &str) -> Address {
        text.parse::<SocketAddr>().unwrap().into()
    }

    #[test]
    fn ports_from_the_kernels_three_forms() {
        let port = 0x1234_u16.to_be();
        assert_eq!(remote_port(0x1234_u32.to_be()), port);
        assert_eq!(local_port(0x1234), port);
        let [a, b] = 0x1234_u16.to_be_bytes();
        assert_eq!(user_port(u32::from_ne_bytes([a, b, 0, 0])), port);
    }

    #[test]
    fn link_local_addresses_are_told() {
        for (text, expected) in [
            ("[fe80::1]:80", true),
            ("[febf:ffff::1]:80", true),
            ("[fec0::1]:80", false),
            ("[fe7f::1]:80", false),
            ("[2001:db8::1]:80", false),
            ("169.254.1.1:80", false),
        ] {
            assert_eq!(is_link_local(&address(text).ip), expected, "{text}");
        }
    }

    #[test]
    fn values_lie_below_their_fine_edge_and_not_far() {
        for value in (1..100_000).chain([1 << 20, (1 << 26) + 1, (1 << 32) - 1]) {
            let edge = fine_edge(fine_bucket(value));
            assert!(edge > value || value < 4, "{value} {edge}");
            assert!(edge as f64 <= value as f64 * 1.25 + 1.0, "{value} {edge}");
        }
        assert_eq!(fine_bucket(u64::MAX), FINE_BUCKETS - 1);
    }

    #[test]
    fn buckets_are_powers_of_two() {
        for (value, expected) in [
            (0, 0),
            (1, 0),
            (2, 1),
            (3, 1),
            (4, 2),
            (1023, 9),
            (1024, 10),
            (1 << 31, 31),
            (1 << 32, 31),
            (u64::MAX, 31),
        ] {
            assert_eq!(bucket(value), expected, "{value}");
        }
    }

    #[test]
    fn targets_tell_the_families_apart() {
        let v4 = target(&address("10.0.0.1:80"));
        assert_eq!((v4.port, v4.family), ([0, 80], 4));
        assert_eq!(target(&address("[::ffff:10.0.0.1]:80")), v4);
        assert_eq!(target(&address("[2001:db8::1]:80")).family, 6);
        assert_eq!(target(&address("[::]:80")).family, 6);
    }

    #[test]
    fn a_connection_is_counted_once_at_each_step() {
        use Step::{Established, Failed, Left, LeftAndGone};
        const SYN_RECV: u32 = 3;
        const FIN_WAIT1: u32 = 4;
        const FIN_WAIT2: u32 = 5;
        const CLOSE_WAIT: u32 = 8;
        const LAST_ACK: u32 = 9;
        let run = |states: &[u32]| {
            let mut phase = Phase::Connecting as u32;
            let mut steps = Vec::new();
            for &state in states {
                let step = step(phase, state);
                match step {
                    Step::Nothing => continue,
                    Step::Established => phase = Phase::Open as u32,
                    Step::Left => phase = Phase::Leaving as u32,
                    Step::Failed | Step::LeftAndGone => {}
                }
                steps.push(step);
            }
            steps
        };
        assert_eq!(run(&[1, FIN_WAIT1, FIN_WAIT2, 7]), [Established, Left]);
        assert_eq!(run(&[1, CLOSE_WAIT, LAST_ACK, 7]), [Established, Left]);
        assert_eq!(run(&[1, 7]), [Established, LeftAndGone]);
        assert_eq!(run(&[7]), [Failed]);
        // Simultaneous open, also when closed before it is complete.
        assert_eq!(run(&[SYN_RECV, 1, 7]), [Established, LeftAndGone]);
        assert_eq!(run(&[SYN_RECV, FIN_WAIT1, 7]), [Failed]);
        // Told twice.
        assert_eq!(run(&[1, 1, 7]), [Established, LeftAndGone]);
    }

    #[test]
    fn failures_are_told_apart() {
        const EHOSTUNREACH: i32 = 113;
        assert_eq!(failure(Some(0)), Outcome::Abandoned);
        assert_eq!(failure(Some(ECONNREFUSED)), Outcome::Refused);
        assert_eq!(failure(Some(ETIMEDOUT)), Outcome::TimedOut);
        assert_eq!(failure(Some(EHOSTUNREACH)), Outcome::FailedOther);
        assert_eq!(failure(None), Outcome::FailedOther);
        assert!([ECONNRESET, EPIPE, ETIMEDOUT].iter().all(|&e| was_reset(Some(e))));
        assert!(![Some(0), Some(EHOSTUNREACH), None].iter().any(|&e| was_reset(e)));
    }

    #[test]
    fn heartbeats_age() {
        assert!(is_fresh(100, 150, 50));
        assert!(!is_fresh(100, 151, 50));
        assert!(is_fresh(100, 99, 50), "beaten on another CPU after `now` was read");
        assert!(!is_fresh(0, 10, 50), "never");
    }

    #[test]
    fn bytes_that_have_come_before_are_counted() {
        assert_eq!(came_before(1000, 1000, 100), Some(0));
        assert_eq!(came_before(1000, 940, 100), Some(60));
        assert_eq!(came_before(1000, 800, 100), Some(100), "all of it");
        assert_eq!(came_before(1000, 1000, 0), Some(0), "an end");
        assert_eq!(came_before(1000, 1001, 100), None, "one is missing");
        assert_eq!(came_before(40, 0_u32.wrapping_sub(20), 100), Some(60), "numbers wrap");
        assert_eq!(came_before(0_u32.wrapping_sub(20), 40, 100), None);
    }

    #[test]
    fn an_answer_comes_after_its_request() {
        assert_eq!(stray(100, 0, 0), Stray::None);
        assert_eq!(stray(100, 0, 99), Stray::Request, "one byte is enough for some origins");
        assert_eq!(stray(100, 1, 0), Stray::Request);
        assert_eq!(stray(100, 0, 100), Stray::Response);
        assert_eq!(stray(100, 100, 100), Stray::Response, "TCP had got it, but sent nothing yet");
        assert_eq!(stray(100, 100, 0), Stray::Response);
        assert_eq!(stray(0, 0, 0), Stray::Response, "nobody knows what was asked");
    }

    #[test]
    fn clients_get_a_listener_that_they_can_reach() {
        let listeners = |v4: u16, v6: u16, netns: &str| ListenerSet {
            loopback_v4: v4.to_be(),
            loopback_v6: v6.to_be(),
            netns: address(netns),
        };
        let check = |listeners: &ListenerSet, same, destination: &str, expected: Option<&str>| {
            let got = listener(listeners, same, &address(destination)).map(SocketAddr::from);
            assert_eq!(got, expected.map(|e| e.parse().unwrap()), "{destination} {same}");
        };
        let all = listeners(1004, 1006, "192.0.2.1:1000");
        check(&all, true, "10.0.0.1:80", Some("127.0.0.1:1004"));
        check(&all, true, "[::ffff:10.0.0.1]:80", Some("127.0.0.1:1004"));
        check(&all, true, "[2001:db8::1]:80", Some("[::1]:1006"));
        check(&all, false, "10.0.0.1:80", Some("192.0.2.1:1000"));
        check(&all, false, "[2001:db8::1]:80", None);
        let no_v6 = listeners(1004, 0, "[2001:db8::2]:1000");
        check(&no_v6, true, "[2001:db8::1]:80", None);
        check(&no_v6, false, "[2001:db8::1]:80", Some("[2001:db8::2]:1000"));
        check(&no_v6, false, "10.0.0.1:80", None);
        let none = ListenerSet::default();
        check(&none, true, "10.0.0.1:80", None);
        check(&none, false, "10.0.0.1:80", None);
        check(&none, false, "[2001:db8::1]:80", None);
    }

    #[test]
    fn only_nonblocking_clients_are_steered_unless_all_are() {
        let (auto, kernel, relay) = (Steer::Auto as u32, Steer::Kernel as u32, Steer::Relay as u32);
        assert!(is_steered(auto, Some(0o4002)));
        assert!(!is_steered(auto, Some(0o2)));
        assert!(!is_steered(auto, None));
        assert!(is_steered(kernel, Some(0o2)) && is_steered(kernel, None));
        assert!(!is_steered(relay, Some(0o4002)) && !is_steered(relay, None));
    }

    #[test]
    fn a_service_whose_clients_cannot_be_steered_is_only_sampled() {
        assert!(pays(0, 0, 1) && pays(63, 0, 1), "too few to tell");
        assert!(!pays(64, 0, 1) && !pays(400, 99, 15));
        assert!(pays(400, 100, 1), "a quarter is worth it");
        assert!(pays(400, 0, 16), "a sample");
        assert!(pays(64, 10_000, 1), "keep-alive: many requests of one client");
    }

    #[test]
    fn a_mark_holds_for_one_connect() {
        let broker = address("127.0.0.1:1000");
        let at = |mark: Interception, remote| {
            interception_at_connect(mark as u8, &broker, &address(remote))
        };
        assert_eq!(at(Interception::Rewritten, "127.0.0.1:1000"), Interception::Connected);
        assert_eq!(at(Interception::Rewritten, "10.0.0.1:80"), Interception::None);
        assert_eq!(at(Interception::Connected, "127.0.0.1:1000"), Interception::None);
        assert_eq!(at(Interception::None, "127.0.0.1:1000"), Interception::None);
    }
}
