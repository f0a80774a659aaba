//! A worse way to one origin: what the host sends there takes longer, or gets lost.
//!
//! Not every kernel has netem. Here packets leave the host through a TUN device and enter the origins'
//! namespace through another one; a thread carries them from the one to the other, and is as bad at it
//! as it is told to be. What the origin sends takes the usual way.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use broker::clock;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::lab::Lab;
use crate::sys;

/// How bad it is.
#[derive(Debug, Default)]
struct Settings {
    delay_us: AtomicU64,
    lost_every: AtomicU64,
    ends: AtomicBool,
}

/// The way to one origin of a lab. Drop it before the lab.
#[derive(Debug)]
pub struct Detour {
    settings: Arc<Settings>,
    carrier: Option<JoinHandle<()>>,
}

impl Detour {
    /// From now on packets to an origin's IPv4 address come this way.
    pub fn new(lab: &Lab, index: u8) -> Result<Self> {
        let (origin, name) = (lab.origin_ip(index), format!("detour{index}"));
        ensure!(origin.is_ipv4(), "the lab has IPv4");
        let open = || sys::tun(&name).with_context(|| format!("making the TUN device {name}"));
        let (from, to) = (lab.host.run(open)?, lab.origins.run(open)?);
        // Replies come by another interface than requests go.
        for (netns, ours) in [(&lab.host, "origins"), (&lab.origins, &*name)] {
            for interface in ["all", ours] {
                netns.sysctl(&format!("ipv4.conf.{interface}.rp_filter"), "0")?;
            }
            netns.ip(&[&format!("link set {name} up")])?;
        }
        lab.host.ip(&[&format!("route add {origin}/32 dev {name} src {}", lab.host_ip())])?;
        let settings = Arc::<Settings>::default();
        let told = Arc::clone(&settings);
        let carrier = thread::Builder::new().name(name).spawn(move || carry(from, to, &told))?;
        Ok(Self { settings, carrier: Some(carrier) })
    }

    /// Each packet takes so much longer.
    pub fn delay(&self, delay: Duration) {
        let us = u64::try_from(delay.as_micros()).unwrap_or(u64::MAX);
        self.settings.delay_us.store(us, Relaxed);
    }

    /// One in so many segments with data is lost; 0 for none.
    pub fn lose_every(&self, n: u64) {
        self.settings.lost_every.store(n, Relaxed);
    }
}

impl Drop for Detour {
    fn drop(&mut self) {
        self.settings.ends.store(true, Relaxed);
        if let Some(carrier) = self.carrier.take() {
            // It says itself what went wrong.
            carrier.join().ok();
        }
    }
}

fn carry(mut from: File, mut to: File, settings: &Settings) {
    let mut on_the_way: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let (mut packet, mut with_data) = ([0; 2048], 0_u64);
    while !settings.ends.load(Relaxed) {
        let now = clock::now();
        while on_the_way.front().is_some_and(|(due, _)| *due <= now) {
            let (_, packet) = on_the_way.pop_front().expect("it was just there");
            to.write_all(&packet).expect("the device takes packets");
        }
        // No longer than a tenth of a second, or it would not end when it is told to.
        let due = on_the_way.front().map_or(Duration::from_millis(100), |(due, _)| *due - now);
        let timeout =
            PollTimeout::try_from(due.min(Duration::from_millis(100))).unwrap_or(PollTimeout::ZERO);
        poll(&mut [PollFd::new(from.as_fd(), PollFlags::POLLIN)], timeout).ok();
        loop {
            let n = match from.read(&mut packet) {
                Ok(n) => n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => panic!("reading packets: {e}"),
            };
            if has_data(&packet[..n]) {
                with_data += 1;
                let lost_every = settings.lost_every.load(Relaxed);
                if lost_every > 0 && with_data.is_multiple_of(lost_every) {
                    continue;
                }
            }
            let delay = Duration::from_micros(settings.delay_us.load(Relaxed));
            on_the_way.push_back((clock::now() + delay, packet[..n].to_vec()));
        }
    }
}

/// Whether it is a TCP segment over IPv4 with data.
fn has_data(packet: &[u8]) -> bool {
    let [first, _, high, low, _, _, _, _, _, 6, ..] = packet else { return false };
    let (head, total) = (usize::from(first & 15) * 4, u16::from_be_bytes([*high, *low]));
    let tcp_head = packet.get(head + 12).map_or(0, |offset| usize::from(offset >> 4) * 4);
    first >> 4 == 4 && usize::from(total) > head + tcp_head
}
