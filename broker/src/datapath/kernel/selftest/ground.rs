//! A client, the daemon and an origin, all in this process.

use std::cell::{Cell, RefCell};
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use aya::maps::{Array, MapData, RingBuf, SkStorage};
use broker_ebpf::abi::{
    self, Event, EventKind, Interception, Offsets, Route, SERVICES_MAX, SocketState,
    UNKNOWN_OFFSET, Who,
};
use broker_ebpf::phase::Word;
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::sockets::{PATIENCE, eventually, readable, receive, response, silent};
use crate::datapath::kernel::map_index;
use crate::datapath::steering::{Lifetime, Steering};
use crate::rewind::rewind;
use crate::sys;

/// The worker whose queue is borrowed: none has started yet.
const WORKER: usize = 0;

/// The route that is borrowed: no client has been intercepted yet.
const ROUTE: u32 = 0;

/// What all steps share, and what is put back at the end.
pub(super) struct Ground<'a> {
    pub(super) steering: &'a Steering,
    sockets: RefCell<&'a mut SkStorage<MapData, SocketState>>,
    routes: RefCell<&'a mut Array<MapData, Route>>,
    queue: RefCell<Option<RingBuf<MapData>>>,
    offsets: Offsets,
    pub(super) slot: usize,
    /// Where its connections have gone to.
    dialled: RefCell<Vec<SocketAddr>>,
}

impl<'a> Ground<'a> {
    pub(super) fn new(
        steering: &'a Steering,
        sockets: &'a mut SkStorage<MapData, SocketState>,
        routes: &'a mut Array<MapData, Route>,
        offsets: Offsets,
    ) -> anyhow::Result<Self> {
        let queue = steering.take_queue(WORKER).context("the events' queue is in use")?;
        let layout = steering.layout();
        let ground = Self {
            steering,
            sockets: RefCell::new(sockets),
            routes: RefCell::new(routes),
            queue: RefCell::new(Some(queue)),
            offsets,
            slot: layout.spare_group() * layout.group_slots(),
            dialled: RefCell::default(),
        };
        ground.steer(abi::Steer::Kernel)?;
        Ok(ground)
    }

    /// Has clients steered to the slot's origin from now on.
    pub(super) fn steer(&self, steer: abi::Steer) -> anyhow::Result<()> {
        let route = Route {
            first_group: map_index(self.steering.layout().spare_group()),
            origins: 1,
            service: map_index(SERVICES_MAX),
            worker: map_index(WORKER),
            steer: steer as u32,
            ..Route::default()
        };
        self.routes.borrow_mut().set(ROUTE, route, 0).context("setting a route")
    }

    /// A client that the kernel may serve, and an idle origin socket for it.
    pub(super) fn parties(&self) -> anyhow::Result<Parties<'a>> {
        let (origin, server) = self.origin().context("an origin's connection")?;
        let (client, daemon) = self.client(None).context("a client's connection")?;
        Parties::new(self, client, daemon, origin, server)
    }

    /// A connection as the connect hook and `sock_ops` would have it, and the daemon's end of it.
    pub(super) fn client(
        &self,
        receive_buffer: Option<usize>,
    ) -> anyhow::Result<(TcpStream, TcpStream)> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
        if let Some(bytes) = receive_buffer {
            socket.set_recv_buffer_size(bytes)?;
        }
        let state = SocketState {
            dialled: address.into(),
            listener: address.into(),
            interception: Interception::Rewritten as u8,
            steering: abi::Steering::Chosen as u8,
            route: ROUTE,
            ..SocketState::default()
        };
        let ends = self.connect(&listener, socket, state)?;
        let cookie = sys::socket_cookie(ends.0.as_fd())?;
        ensure!(self.steering.client(cookie).is_some(), "sock_ops has not enrolled the client");
        Ok(ends)
    }

    /// A connection of the broker's, and the origin's end of it.
    pub(super) fn origin(&self) -> anyhow::Result<(TcpStream, TcpStream)> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
        let state = SocketState { who: Who::Broker as u8, ..SocketState::default() };
        self.connect(&listener, socket, state)
    }

    pub(super) fn connect(
        &self,
        listener: &TcpListener,
        socket: Socket,
        state: SocketState,
    ) -> anyhow::Result<(TcpStream, TcpStream)> {
        self.sockets.borrow_mut().insert(&socket, state, 0).context("a socket's storage")?;
        let address = listener.local_addr()?;
        self.dialled.borrow_mut().push(address);
        socket.connect_timeout(&address.into(), PATIENCE)?;
        let ours = TcpStream::from(socket);
        let local = ours.local_addr()?;
        // Anybody on this host may have connected in between.
        let theirs = loop {
            let (stream, peer) = listener.accept()?;
            if peer == local {
                break stream;
            }
        };
        for end in [&ours, &theirs] {
            end.set_nodelay(true)?;
            end.set_read_timeout(Some(PATIENCE))?;
            end.set_write_timeout(Some(PATIENCE))?;
        }
        // Nothing is to be left in TIME_WAIT. Whoever closes last finds a reset socket.
        SockRef::from(&ours).set_linger(Some(Duration::ZERO))?;
        SockRef::from(&theirs).set_linger(Some(Duration::ZERO))?;
        Ok((ours, theirs))
    }

    /// Waits for an event about a client, or about the slot if it is 0.
    pub(super) fn hears(&self, kind: EventKind, client: u64) -> anyhow::Result<()> {
        let told = eventually(|| {
            let mut queue = self.queue.borrow_mut();
            let Some(queue) = queue.as_mut() else { return false };
            while let Some(bytes) = queue.next() {
                let event = Event::from_bytes(&bytes);
                if event.is_some_and(|e| e.kind == kind as u32 && e.client == client) {
                    return true;
                }
            }
            false
        });
        ensure!(told, "no event {kind:?} came through the ring buffer");
        Ok(())
    }

    /// Where its connections have gone to.
    pub(super) fn dialled(&self) -> Vec<SocketAddr> {
        self.dialled.borrow().clone()
    }

    pub(super) fn knows(&self, offsets: &[fn(&Offsets) -> u32]) -> bool {
        offsets.iter().all(|offset| offset(&self.offsets) != UNKNOWN_OFFSET)
    }
}

impl Drop for Ground<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.routes.borrow_mut().set(ROUTE, Route::default(), 0) {
            tracing::warn!(%error, "taking the self-test's route back");
        }
        if let Some(mut queue) = self.queue.take() {
            while queue.next().is_some() {}
            self.steering.put_queue(WORKER, queue);
        }
        self.steering.forget_events();
    }
}

/// A client, the daemon and an origin.
pub(super) struct Parties<'a> {
    steering: &'a Steering,
    slot: usize,
    pub(super) client: TcpStream,
    /// The daemon's end of the client's connection.
    pub(super) daemon: TcpStream,
    /// The daemon's socket to the origin.
    pub(super) origin: TcpStream,
    /// The origin's end.
    pub(super) server: TcpStream,
    /// The client's.
    pub(super) cookie: u64,
    origin_cookie: u64,
    requests: Cell<u32>,
}

impl<'a> Parties<'a> {
    pub(super) fn new(
        ground: &Ground<'a>,
        client: TcpStream,
        daemon: TcpStream,
        origin: TcpStream,
        server: TcpStream,
    ) -> anyhow::Result<Self> {
        let cookie = sys::socket_cookie(client.as_fd())?;
        let origin_cookie = attach(ground, &origin)?;
        let Ground { steering, slot, .. } = *ground;
        let requests = Cell::new(0);
        let parties = Self {
            steering,
            slot,
            client,
            daemon,
            origin,
            server,
            cookie,
            origin_cookie,
            requests,
        };
        let offered = steering.swap(slot, parties.word(), Word::OFFERED);
        ensure!(offered && steering.publish(slot, Duration::ZERO), "a new socket has bytes");
        Ok(parties)
    }

    pub(super) fn word(&self) -> Word {
        self.steering.word(self.slot)
    }

    pub(super) fn becomes(&self, word: Word) -> anyhow::Result<()> {
        let became = eventually(|| self.word() == word);
        ensure!(became, "the origin socket is {:?}, not {:?}", self.word().phase(), word.phase());
        Ok(())
    }

    /// The client sends one more plain request.
    pub(super) fn request(&self) -> anyhow::Result<Vec<u8>> {
        self.requests.set(self.requests.get() + 1);
        let request = format!("GET /{} HTTP/1.1\r\nHost: broker\r\n\r\n", self.requests.get());
        self.send(request.into_bytes())
    }

    /// The client sends something that only the daemon may judge.
    pub(super) fn odd_request(&self) -> anyhow::Result<Vec<u8>> {
        self.send(b"BREW / HTTP/1.1\r\nHost: broker\r\n\r\n".to_vec())
    }

    pub(super) fn send(&self, message: Vec<u8>) -> anyhow::Result<Vec<u8>> {
        (&self.client).write_all(&message).context("the client's request")?;
        Ok(message)
    }

    /// A request came to the origin, and only there.
    pub(super) fn is_steered(&self, request: &[u8]) -> anyhow::Result<()> {
        receive(&self.server, request, "the origin")?;
        silent(&self.daemon, "the daemon")
    }

    /// A request came to the daemon, and only there.
    pub(super) fn is_relayed(&self, request: &[u8]) -> anyhow::Result<()> {
        receive(&self.daemon, request, "the daemon")?;
        silent(&self.server, "the origin")
    }

    /// The origin answers with so many bytes of body, and the client gets that without reading.
    pub(super) fn respond(&self, body: usize) -> anyhow::Result<Vec<u8>> {
        let response = response(body);
        (&self.server).write_all(&response).context("the origin's response")?;
        self.becomes(Word::IDLE)?;
        ensure!(readable(&self.client)?, "the client does not become readable");
        Ok(response)
    }

    /// The client reads this, and nothing more is there.
    pub(super) fn client_reads(&self, bytes: &[u8]) -> anyhow::Result<()> {
        receive(&self.client, bytes, "the client")?;
        silent(&self.client, "the client")
    }

    /// The origin's TCP begins with so many bytes that it has sent before.
    pub(super) fn rewind(&self, again: u16) -> anyhow::Result<()> {
        rewind(&self.server, again).context("having bytes sent again")
    }

    pub(super) fn has_not_settled(&self, because: &str) -> anyhow::Result<()> {
        let settled = self.steering.has_settled(self.cookie);
        ensure!(!settled, "the daemon may send, but {because}");
        Ok(())
    }

    pub(super) fn settles(&self) -> anyhow::Result<()> {
        let settles = eventually(|| self.steering.has_settled(self.cookie));
        ensure!(settles, "the daemon may not send, but the client has read everything");
        Ok(())
    }

    /// One whole exchange in the kernel.
    pub(super) fn exchange(&self, body: usize) -> anyhow::Result<()> {
        self.is_steered(&self.request()?)?;
        self.client_reads(&self.respond(body)?)?;
        silent(&self.origin, "the daemon's socket to the origin")
    }
}

impl Drop for Parties<'_> {
    fn drop(&mut self) {
        // A socket must be out of reach before its slot is free.
        self.steering.release(self.slot);
        self.steering.free(self.slot, self.origin_cookie);
    }
}

pub(super) fn attach(ground: &Ground<'_>, origin: &TcpStream) -> anyhow::Result<u64> {
    let life = Lifetime { exchanges: 0, uses_left: u64::MAX, origin_idle: None };
    ground
        .steering
        .attach(ground.slot, WORKER, origin.as_fd(), &life)
        .context("an origin socket does not go into its map")
}
