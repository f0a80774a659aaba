//! The memory that the daemon shares with the programs that steer: origin sockets with their
//! words, clients, and what happened.
//!
//! A worker puts an origin socket into a [slot](abi::Slot) and offers it; from then on the slot's
//! [`Word`] says whose it is. Programs and daemon change words by compare-and-swap only, as
//! [`broker_ebpf::phase`] allows it. Reads and swaps cost no system call.

mod layout;
mod memory;

use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU8, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use aya::Ebpf;
use aya::maps::{
    ArrayOfMaps, HashMap, Map, MapData, MapError, RingBuf, SkStorage, SockHash, SockMap,
};
use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use aya_obj::generated::bpf_map_type;
use broker_ebpf::abi::{
    self, BUSY, Client, EVENTS_BYTES, REQUEST_BYTES_MAX, Settled, Stray, Tally, WHY_COUNT, name,
};
use broker_ebpf::phase::{Phase, Word};
use broker_ebpf::scan::WhyNot;
use nix::time::{ClockId, clock_gettime};

pub use self::layout::{Layout, Owner};
pub use self::memory::SteeredOrigin;
use self::memory::{Group, Slot};
use crate::sys::{self, Mapped, Shared};

/// What the daemon sets when it puts a socket into a slot.
#[derive(Clone, Copy, Debug)]
pub struct Lifetime {
    /// Exchanges that it has served.
    pub exchanges: u64,
    /// How many more it may serve.
    pub uses_left: u64,
    /// How long its origin keeps idle connections, if that is known.
    pub origin_idle: Option<Duration>,
}

/// What the programs have noted of a slot.
#[derive(Clone, Copy, Debug)]
pub struct Noted {
    /// When the current request was sent.
    pub started: Duration,
    /// When the socket became idle.
    pub idle_since: Duration,
    /// Exchanges that it has served.
    pub exchanges: u64,
    /// How long its origin keeps idle connections, if it has said so.
    pub origin_idle: Option<Duration>,
    /// Whether the origin has ended its side.
    pub ended: bool,
    /// While no response has begun: bytes of the request that the origin's socket has not got.
    pub unsent: u32,
    /// Whether what has come as a response is none: the origin sent it before it had any of the request.
    pub strayed: bool,
    /// Whether the client has sent urgent data, so that the origin waits for more of the request.
    pub urgent: bool,
    /// When the last request with a body was sent.
    pub body: Option<Duration>,
}

/// What the kernel carried so far.
#[derive(Clone, Debug, Default)]
pub struct Carried {
    /// By group.
    pub groups: Vec<SteeredOrigin>,
    /// Requests and responses that were not steered, by position of the service in the
    /// configuration, then by [`WhyNot::name`].
    pub not_steered: Vec<Vec<(&'static str, u64)>>,
}

/// The daemon's end of steering, for all workers.
pub struct Steering {
    layout: Layout,
    slots: Mapped<Slot>,
    requests: Mapped<[AtomicU8; REQUEST_BYTES_MAX]>,
    groups: Mapped<Group>,
    why: Mapped<AtomicU64>,
    tallies: Mapped<AtomicU64>,
    maps: Mutex<SocketMaps>,
    queues: Mutex<Vec<Option<RingBuf<MapData>>>>,
    programs: OnceLock<Weak<Mutex<Ebpf>>>,
    _events: ArrayOfMaps<MapData, RingBuf<MapData>>,
}

/// What is changed by system calls.
struct SocketMaps {
    clients: HashMap<MapData, u64, Client>,
    client_sockets: SockHash<MapData, u64>,
    relaying_sockets: SockHash<MapData, u64>,
    client_of: SkStorage<MapData, u64>,
    origin_sockets: SockMap<MapData>,
    origin_slots: HashMap<MapData, u64, u32>,
}

impl Steering {
    /// Takes the maps of the loaded programs.
    pub(super) fn new(layout: Layout, programs: &mut Ebpf) -> Result<Self, MapError> {
        let mut events: ArrayOfMaps<_, RingBuf<MapData>> = take(programs, name::EVENTS)?;
        let mut queues = Vec::new();
        for worker in 0..layout.workers() {
            let queue = new_queue()?;
            events.set(index(worker), &queue, 0)?;
            queues.push(Some(queue));
        }
        let steering = Self {
            slots: mapped(programs, name::SLOTS, layout.slots())?,
            requests: mapped(programs, name::REQUESTS, layout.slots())?,
            groups: mapped(programs, name::GROUPS, layout.groups())?,
            why: mapped(programs, name::WHY, abi::SERVICES_MAX * WHY_COUNT)?,
            tallies: mapped(programs, name::TALLIES, abi::TALLY_COUNT)?,
            maps: Mutex::new(SocketMaps {
                clients: take(programs, name::CLIENTS)?,
                client_sockets: take(programs, name::CLIENT_SOCKETS)?,
                relaying_sockets: take(programs, name::RELAYING_SOCKETS)?,
                client_of: take(programs, name::CLIENT_OF)?,
                origin_sockets: take(programs, name::ORIGIN_SOCKETS)?,
                origin_slots: take(programs, name::ORIGIN_SLOTS)?,
            }),
            queues: Mutex::new(queues),
            programs: OnceLock::new(),
            _events: events,
            layout,
        };
        for service in 0..steering.layout.services() {
            for group in steering.groups_of(service) {
                group.service.store(service as u64, Relaxed);
            }
        }
        if let Some(spare) = steering.groups.get(steering.layout.spare_group()) {
            spare.service.store(abi::SERVICES_MAX as u64, Relaxed);
            spare.eligible.store(1, Relaxed);
            spare.weight.store(1, Relaxed);
            spare.span.store(1, Relaxed);
        }
        Ok(steering)
    }

    /// Where the program is that answers questions.
    pub(super) fn run_with(&self, programs: &Arc<Mutex<Ebpf>>) {
        // Only the first call counts, and there is only one.
        self.programs.set(Arc::downgrade(programs)).ok();
    }

    /// How slots are shared out.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The queue of a worker's events; `None` if it was taken before.
    #[must_use]
    pub fn take_queue(&self, worker: usize) -> Option<RingBuf<MapData>> {
        lock(&self.queues).get_mut(worker)?.take()
    }

    /// Gives a queue back that was only borrowed.
    pub(super) fn put_queue(&self, worker: usize, queue: RingBuf<MapData>) {
        if let Some(place) = lock(&self.queues).get_mut(worker) {
            *place = Some(queue);
        }
    }

    /// Forgets the rare events of steering: nobody's clients have had any yet.
    pub(super) fn forget_events(&self) {
        for event in Tally::Enrolled as usize..abi::TALLY_COUNT {
            if let Some(count) = self.tallies.get(event) {
                count.store(0, Relaxed);
            }
        }
    }

    /// How many events found their queue full, ever.
    #[must_use]
    pub fn events_lost(&self) -> u64 {
        self.tallies.get(Tally::EventLost as usize).map_or(0, |lost| lost.load(Relaxed))
    }

    /// Puts a silent origin socket into a free slot, as the daemon's.
    pub fn attach(
        &self,
        slot: usize,
        worker: usize,
        socket: BorrowedFd<'_>,
        life: &Lifetime,
    ) -> io::Result<u64> {
        let place = self.slot(slot)?;
        let cookie = sys::socket_cookie(socket)?;
        place.cookie.store(cookie, Relaxed);
        place.set_life(life);
        place.worker.store(index(worker), Relaxed);
        place.ended.store(0, Relaxed);
        place.in_step.store(0, Relaxed);
        place.stray.store(Stray::None as u8, Relaxed);
        place.body_ns.store(0, Relaxed);
        place.word.store(Word::new(Phase::Relay, 0).0, Release);
        let mut maps = lock(&self.maps);
        maps.origin_slots.insert(cookie, index(slot), 0).map_err(map_error)?;
        if let Err(e) = maps.origin_sockets.set(index(slot), &socket.as_raw_fd(), 0) {
            maps.origin_slots.remove(&cookie).ok();
            place.word.store(Word::FREE.0, Release);
            return Err(map_error(e));
        }
        Ok(cookie)
    }

    /// Notes what a socket that is the daemon's has been through since it was last offered.
    pub fn set_life(&self, slot: usize, life: &Lifetime) {
        if let Some(place) = self.slots.get(slot) {
            place.set_life(life);
        }
    }

    /// Whether a socket may serve no other request, which would meet [`Stray`] bytes.
    #[must_use]
    pub fn is_spent(&self, slot: usize) -> bool {
        self.slots.get(slot).is_some_and(|place| place.stray.load(Acquire) != Stray::None as u8)
    }

    /// Takes an open socket that is the daemon's out of the programs' reach.
    pub fn release(&self, slot: usize) {
        if let Err(error) = lock(&self.maps).origin_sockets.clear_index(&index(slot)) {
            tracing::debug!(%error, "taking an origin socket out of its map");
        }
    }

    /// Frees the slot of a socket that was released or closed.
    pub fn free(&self, slot: usize, cookie: u64) {
        lock(&self.maps).origin_slots.remove(&cookie).ok();
        if let Some(place) = self.slots.get(slot) {
            place.word.store(Word::FREE.0, Release);
        }
    }

    /// The word of a slot.
    #[must_use]
    pub fn word(&self, slot: usize) -> Word {
        self.slots.get(slot).map_or(Word::FREE, |slot| Word(slot.word.load(Acquire)))
    }

    /// Puts `new` in the place of `old`; answers whether it did.
    #[must_use]
    pub fn swap(&self, slot: usize, old: Word, new: Word) -> bool {
        debug_assert!(broker_ebpf::phase::allowed(broker_ebpf::phase::Actor::Daemon, old, new));
        let swapped = self
            .slots
            .get(slot)
            .is_some_and(|slot| slot.word.compare_exchange(old.0, new.0, AcqRel, Relaxed).is_ok());
        if swapped
            && old.phase().is_steered()
            && let Some(group) = self.group_of(slot)
        {
            group.active.fetch_sub(1, Relaxed);
        }
        swapped
    }

    /// Makes an offered socket anybody's that is idle for so long. `false` if bytes came meanwhile.
    #[must_use]
    pub fn publish(&self, slot: usize, idle_for: Duration) -> bool {
        let Some(place) = self.slots.get(slot) else { return false };
        place.idle_since_ns.store(nanos(now().saturating_sub(idle_for)), Relaxed);
        let published = self.swap(slot, Word::OFFERED, Word::IDLE);
        if published && let Some(group) = self.group_of(slot) {
            group.idle.fetch_or(self.bit(slot), Release);
        }
        published
    }

    /// Takes an idle socket of a group back; the slot's number.
    #[must_use]
    pub fn take(&self, group: usize) -> Option<usize> {
        let shared = self.groups.get(group)?;
        loop {
            let idle = shared.idle.load(Acquire);
            if idle == 0 {
                return None;
            }
            let slot = group * self.layout.group_slots() + idle.trailing_zeros() as usize;
            if self.take_back(slot) {
                return Some(slot);
            }
        }
    }

    /// Takes this socket back, if it is idle.
    #[must_use]
    pub fn take_back(&self, slot: usize) -> bool {
        // Whoever clears the bit has the first try.
        if let Some(group) = self.group_of(slot) {
            group.idle.fetch_and(!self.bit(slot), AcqRel);
        }
        self.swap(slot, Word::IDLE, Word::new(Phase::Relay, 0))
    }

    /// How many sockets of a group look idle.
    #[must_use]
    pub fn idle(&self, group: usize) -> usize {
        self.groups.get(group).map_or(0, |g| g.idle.load(Acquire).count_ones() as usize)
    }

    /// Tells the programs how many sockets of an origin the daemon uses itself, and whether the
    /// origin may get new exchanges.
    pub fn set_load(&self, group: usize, relay_active: usize, eligible: bool) {
        if let Some(group) = self.groups.get(group) {
            group.relay_active.store(relay_active as u64, Relaxed);
            group.eligible.store(eligible.into(), Relaxed);
        }
    }

    /// Tells the programs whether the daemon waits for a socket of an origin.
    pub fn set_wanted(&self, group: usize, wanted: bool) {
        if let Some(group) = self.groups.get(group) {
            group.wanted.store(wanted.into(), Relaxed);
        }
    }

    /// Tells the programs an origin's share of the exchanges, relative to the others'.
    pub fn set_weight(&self, group: usize, weight: NonZeroU32) {
        if let Some(group) = self.groups.get(group) {
            group.weight.store(u64::from(weight.get()), Relaxed);
        }
    }

    /// Tells the programs how many groups to look at from the first one of a worker's service.
    pub fn set_span(&self, first_group: usize, span: usize) {
        if let Some(group) = self.groups.get(first_group) {
            group.span.store(span as u64, Relaxed);
        }
    }

    /// How many requests of a worker's service have found no idle socket.
    #[must_use]
    pub fn missed(&self, first_group: usize) -> u64 {
        self.groups.get(first_group).map_or(0, |group| group.missed.load(Relaxed))
    }

    /// Takes what was counted in a group that no origin has any more, for the next one to start at
    /// zero.
    pub fn take_carried(&self, group: usize) -> SteeredOrigin {
        let Some(group) = self.groups.get(group) else { return SteeredOrigin::default() };
        let carried = group.carried();
        group.forget();
        carried
    }

    /// How many requests a group's service had for the programs, served or not: grows as long as
    /// there is demand.
    #[must_use]
    pub fn demand(&self, group: usize) -> u64 {
        let Some(group) = self.groups.get(group) else { return 0 };
        let service = usize::try_from(group.service.load(Relaxed)).unwrap_or(usize::MAX);
        let no_idle = self.why(service, WhyNot::NoIdle);
        group.request_bytes.load(Relaxed).wrapping_add(no_idle)
    }

    /// How many exchanges the programs have completed in a group, and how many were under way before
    /// that: one that is being completed is counted in either, or in both, as the programs count it as
    /// completed before it is no longer under way.
    #[must_use]
    pub fn progress(&self, group: usize) -> (u64, u64) {
        let Some(group) = self.groups.get(group) else { return (0, 0) };
        let active = group.active.load(Acquire);
        (group.completed.load(Acquire), active)
    }

    /// What the programs have noted of a slot.
    #[must_use]
    pub fn noted(&self, slot: usize) -> Option<Noted> {
        let slot = self.slots.get(slot)?;
        let (idle, body) = (slot.origin_idle_s.load(Relaxed), slot.body_ns.load(Relaxed));
        let stray = slot.stray.load(Acquire);
        Some(Noted {
            started: Duration::from_nanos(slot.started_ns.load(Relaxed)),
            idle_since: Duration::from_nanos(slot.idle_since_ns.load(Relaxed)),
            exchanges: slot.exchanges.load(Relaxed).into(),
            origin_idle: (idle > 0).then(|| Duration::from_secs(idle.into())),
            ended: slot.ended.load(Relaxed) != 0,
            unsent: slot.remaining.load(Acquire),
            strayed: stray == Stray::Response as u8,
            urgent: stray == Stray::Urgent as u8,
            body: (body > 0).then(|| Duration::from_nanos(body)),
        })
    }

    /// The request that was sent on a slot's socket; empty if it was not kept.
    #[must_use]
    pub fn request(&self, slot: usize) -> Vec<u8> {
        let (Some(place), Some(bytes)) = (self.slots.get(slot), self.requests.get(slot)) else {
            return Vec::new();
        };
        let len = place.request_len.load(Relaxed) as usize;
        bytes.iter().take(len).map(|byte| byte.load(Relaxed)).collect()
    }

    /// Both ends of a client's connection; `None` if it is gone.
    #[must_use]
    pub fn client(&self, cookie: u64) -> Option<(SocketAddr, SocketAddr)> {
        let client = lock(&self.maps).clients.get(&cookie, 0).ok()?;
        Some((client.pair.client.into(), client.pair.listener.into()))
    }

    /// A client's requests are the daemon's from now on.
    pub fn set_busy(&self, cookie: u64) {
        self.set_relayed(cookie, [BUSY, BUSY]);
    }

    /// The daemon has nothing more to do for a client, after so many bytes sent to it and received
    /// from it: what it sends next may be steered, once it has read everything.
    pub fn set_free(&self, cookie: u64, sent: u64, received: u64) {
        self.set_relayed(cookie, [sent, received]);
    }

    fn set_relayed(&self, cookie: u64, relayed: [u64; 2]) {
        const BPF_EXIST: u64 = 2;
        let mut maps = lock(&self.maps);
        let Ok(client) = maps.clients.get(&cookie, 0) else { return };
        // It may have left meanwhile.
        maps.clients.insert(cookie, Client { relayed, ..client }, BPF_EXIST).ok();
    }

    /// Whether nothing that the kernel has sent, or is sending, to a client is unread. A client that
    /// is gone has read all it ever will.
    #[must_use]
    pub fn has_settled(&self, cookie: u64) -> bool {
        let Ok(client) = lock(&self.maps).clients.get(&cookie, 0) else { return true };
        let word = self.word(client.slot as usize);
        // Any word of its own: one that was handed over, or cut off, is yet to be dealt with.
        if word.owner() == cookie {
            return false;
        }
        let Some(programs) = self.programs.get().and_then(Weak::upgrade) else { return true };
        // The least that the kernel takes for a packet, see `bpf_prog_test_run_skb`.
        let mut question = [0; 64];
        question[..8].copy_from_slice(&cookie.to_ne_bytes());
        let mut programs = programs.lock().unwrap_or_else(PoisonError::into_inner);
        let program = programs.program_mut(name::SETTLED);
        let Some(Ok(program)) = program.map(<&mut SchedClassifier>::try_from) else { return false };
        let options = TestRunOptions { data_in: Some(&question), ..TestRunOptions::new() };
        program.test_run(options).is_ok_and(|answer| {
            let answer = answer.return_value.cast_signed();
            answer == Settled::Yes as i32 || answer == Settled::Gone as i32
        })
    }

    /// Puts a client's socket back within the programs' reach.
    pub(super) fn enrol(&self, cookie: u64, socket: BorrowedFd<'_>) -> io::Result<()> {
        let mut maps = lock(&self.maps);
        maps.client_sockets.insert(cookie, socket.as_raw_fd(), 0).map_err(map_error)
    }

    /// From now on what is sent on the daemon's end of a client's connection comes to the client on
    /// the way of what is redirected.
    pub fn join_ways(&self, cookie: u64, daemon: BorrowedFd<'_>) -> io::Result<()> {
        let mut maps = lock(&self.maps);
        maps.client_of.insert(&daemon, cookie, 0).map_err(map_error)?;
        maps.relaying_sockets.insert(cookie, daemon.as_raw_fd(), 0).map_err(map_error)
    }

    /// Takes a client's socket, and the daemon's end of its connection, out of the programs' reach.
    /// What was redirected to the client and not read is lost.
    pub fn release_client(&self, cookie: u64) {
        let mut maps = lock(&self.maps);
        // It may have left meanwhile, and the daemon's end may never have been there.
        maps.client_sockets.remove(&cookie).ok();
        maps.relaying_sockets.remove(&cookie).ok();
    }

    /// What the kernel carried so far.
    #[must_use]
    pub fn carried(&self) -> Carried {
        let group = |group: usize| self.groups.get(group).map(Group::carried).unwrap_or_default();
        let not_steered = |service: usize| {
            let why = |why: WhyNot| (why.name(), self.why(service, why));
            WhyNot::ALL.into_iter().map(why).filter(|(_, n)| *n > 0).collect()
        };
        Carried {
            groups: (0..self.layout.spare_group()).map(group).collect(),
            not_steered: (0..self.layout.services()).map(not_steered).collect(),
        }
    }

    fn why(&self, service: usize, why: WhyNot) -> u64 {
        self.why.get(service * WHY_COUNT + why as usize).map_or(0, |n| n.load(Relaxed))
    }

    fn groups_of(&self, service: usize) -> impl Iterator<Item = &Group> {
        self.layout.groups_of(service).filter_map(|group| self.groups.get(group))
    }

    fn slot(&self, slot: usize) -> io::Result<&Slot> {
        self.slots.get(slot).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn group_of(&self, slot: usize) -> Option<&Group> {
        self.groups.get(slot / self.layout.group_slots())
    }

    fn bit(&self, slot: usize) -> u64 {
        1 << (slot % self.layout.group_slots())
    }
}

/// The clock that the programs read.
#[must_use]
pub fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn index(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn take<M: TryFrom<Map, Error = MapError>>(programs: &mut Ebpf, name: &str) -> Result<M, MapError> {
    programs.take_map(name).ok_or_else(|| no_map(name)).and_then(M::try_from)
}

/// The values of an array map.
fn mapped<T: Shared>(programs: &Ebpf, name: &str, len: usize) -> Result<Mapped<T>, MapError> {
    let Some(Map::Array(data)) = programs.map(name) else { return Err(no_map(name)) };
    Mapped::new(data.fd().as_fd(), len).map_err(MapError::IoError)
}

fn no_map(name: &str) -> MapError {
    MapError::InvalidName { name: name.to_owned() }
}

fn new_queue() -> Result<RingBuf<MapData>, MapError> {
    let kind = bpf_map_type::BPF_MAP_TYPE_RINGBUF as u32;
    let map = aya_obj::Map::new_from_params(kind, 0, 0, index(EVENTS_BYTES), 0);
    RingBuf::try_from(Map::RingBuf(MapData::create(map, name::EVENTS, None)?))
}

fn map_error(error: MapError) -> io::Error {
    match error {
        MapError::SyscallError(e) => e.io_error,
        error => io::Error::other(error),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
