//! A client that the kernel may serve, seen from the daemon.
//!
//! Its connection is here as any other, but bytes come on it only for what the kernel does not
//! carry. Two ways have no common order, so the kernel and the daemon never serve such a client at
//! the same time: the daemon takes over exactly what the programs hand to it, and says when it is
//! done.

use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use crate::datapath::Datapath;
use crate::datapath::steering::Steering;
use crate::net::Stream;
use crate::pool::{Lease, TakenOver};

/// What the kernel sends to a client and what the daemon sends travel on different ways, and so does
/// the end of the connection. The daemon therefore sends nothing before the client has read all
/// that came from the kernel; it asks for that first so soon, and then less and less often.
const ASK_AFTER: Duration = Duration::from_micros(200);
const ASK_AFTER_MAX: Duration = Duration::from_millis(20);

/// A program that has just completed a response may still be handing over its last bytes. An end
/// that nothing else has delayed is sent only if two answers, so far apart, agree.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(5);

/// After so many exchanges in a row that the daemon had to take over from the kernel, it keeps
/// the client: more of the same would only cost both.
const TAKE_OVERS_MAX: u32 = 4;

/// One such client.
pub struct Steered {
    /// Both ends of its connection.
    ends: (SocketAddr, SocketAddr),
    /// Cookie of its socket, once an event has told it.
    cookie: Cell<Option<u64>>,
    steering: Arc<Steering>,
    datapath: Arc<dyn Datapath>,
    /// Hears what the programs have said meanwhile.
    listen: Rc<dyn Fn()>,
    taken_over: RefCell<Option<Box<(Lease, TakenOver)>>>,
    broken: Cell<bool>,
    /// The kernel has sent nothing since the daemon last made sure that all was read.
    way_is_clear: Cell<bool>,
    take_overs: Cell<u32>,
    way: Cell<Way>,
    call: Notify,
}

/// How what the daemon sends comes to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Nothing was sent yet.
    Undecided,
    /// With what the kernel sends; so many bytes came over the network before.
    Joined(u64),
    /// Over the network: the kernel serves this client no more.
    Plain,
}

/// Longer responses go over the network, which has back-pressure: what the daemon sends on the
/// kernel's way lies in memory until the client reads it.
const JOINED_MAX: u64 = 256 << 10;

/// What the programs have for a client's session.
pub(super) enum Call {
    /// The exchange to go on with.
    TakeOver(Box<(Lease, TakenOver)>),
    /// The client does not get its whole response.
    Broken,
}

impl Steered {
    /// A client with these two ends; `listen` hears what the programs have said meanwhile.
    #[must_use]
    pub fn new(
        ends: (SocketAddr, SocketAddr),
        steering: Arc<Steering>,
        datapath: Arc<dyn Datapath>,
        listen: Rc<dyn Fn()>,
    ) -> Self {
        Self {
            ends,
            cookie: Cell::new(None),
            steering,
            datapath,
            listen,
            taken_over: RefCell::default(),
            broken: Cell::new(false),
            way_is_clear: Cell::new(false),
            take_overs: Cell::new(0),
            way: Cell::new(Way::Undecided),
            call: Notify::new(),
        }
    }

    /// The client's requests come to the daemon.
    pub fn is(&self, cookie: u64) {
        self.cookie.set(Some(cookie));
    }

    /// Has the session go on with an exchange.
    pub fn take_over(&self, lease: Lease, exchange: TakenOver) {
        self.cookie.set(Some(exchange.client));
        *self.taken_over.borrow_mut() = Some(Box::new((lease, exchange)));
        self.call.notify_one();
    }

    /// Has the session reset its client.
    pub fn break_off(&self) {
        self.broken.set(true);
        self.call.notify_one();
    }

    /// What there is to do, after hearing what the programs have said meanwhile: a request that
    /// has come may be later than an exchange that they have handed over.
    pub(super) fn hear(&self) -> Option<Call> {
        (self.listen)();
        self.next_call()
    }

    fn next_call(&self) -> Option<Call> {
        if self.broken.get() {
            return Some(Call::Broken);
        }
        let exchange = self.taken_over.borrow_mut().take()?;
        self.take_overs.set(self.take_overs.get() + 1);
        Some(Call::TakeOver(exchange))
    }

    /// Waits for something to do.
    pub(super) async fn called(&self) -> Call {
        loop {
            if let Some(call) = self.next_call() {
                return call;
            }
            self.call.notified().await;
        }
    }

    /// Whether the client's socket is gone, and not only its sending side.
    pub(super) fn is_gone(&self) -> bool {
        self.look_up().is_none()
    }

    /// The cookie of the client with these ends, while its socket lives.
    fn look_up(&self) -> Option<u64> {
        let (client, listener) = self.ends;
        let dialled = self.datapath.original_destination(client, listener).ok().flatten()?;
        Some(dialled.client)
    }

    /// The kernel serves this client no more. Nothing that it has sent may be unread.
    pub fn release(&self) {
        if let Some(cookie) = self.known_cookie() {
            self.steering.release_client(cookie);
        }
        self.way.set(Way::Plain);
    }

    /// Makes sure that what the daemon sends next cannot overtake what the kernel has sent, and
    /// comes on a way on which the client can tell how much there is to be read; `left` is how much
    /// is to come, if that is known. Fails if the client takes longer than `stall` to read what it
    /// has, or if it does not get all of it.
    pub(super) async fn clear_way(
        &self,
        client: &Stream,
        left: Option<u64>,
        stall: Duration,
    ) -> io::Result<()> {
        if !self.way_is_clear.get() {
            self.all_is_read(stall).await?;
            self.way_is_clear.set(true);
        }
        let short = left.is_some_and(|left| left <= JOINED_MAX);
        match self.way.get() {
            Way::Plain => {}
            Way::Joined(_) if short => {}
            Way::Undecided if short && self.join_ways(client) => {}
            way => {
                if way != Way::Undecided {
                    // The client would lose what it has not read.
                    self.all_is_read(stall).await?;
                }
                self.release();
            }
        }
        Ok(())
    }

    fn join_ways(&self, client: &Stream) -> bool {
        // Without a cookie, the client is gone.
        let Some(cookie) = self.known_cookie() else { return true };
        if let Err(error) = self.steering.join_ways(cookie, client.as_fd()) {
            tracing::debug!(%error, "a client is served by the daemon only");
            return false;
        }
        self.way.set(Way::Joined(client.sent()));
        true
    }

    /// Its cookie, looked up if no event has told which client this is.
    fn known_cookie(&self) -> Option<u64> {
        if self.cookie.get().is_none() {
            self.cookie.set(self.look_up());
        }
        self.cookie.get()
    }

    async fn all_is_read(&self, stall: Duration) -> io::Result<()> {
        tokio::time::timeout(stall, self.settled())
            .await
            .unwrap_or_else(|_elapsed| Err(ErrorKind::TimedOut.into()))
    }

    async fn settled(&self) -> io::Result<()> {
        let mut pause = ASK_AFTER;
        loop {
            if self.broken.get() {
                return Err(ErrorKind::ConnectionAborted.into());
            }
            let Some(cookie) = self.cookie.get() else { return Ok(()) };
            if self.steering.has_settled(cookie) {
                return Ok(());
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(ASK_AFTER_MAX);
        }
    }

    /// Waits until the end of the connection cannot overtake what the kernel has sent.
    pub(super) async fn may_end(&self) {
        // Nothing but the daemon's own bytes is on its way.
        if self.way_is_clear.get() {
            return;
        }
        let _maybe_gone = self.known_cookie();
        loop {
            // A client that does not get all is reset.
            if self.settled().await.is_err() {
                return;
            }
            tokio::time::sleep(ASK_AGAIN_AFTER).await;
            if self.cookie.get().is_none_or(|cookie| self.steering.has_settled(cookie)) {
                return;
            }
        }
    }

    /// A request came on the daemon's way.
    pub(super) fn relayed(&self) {
        self.take_overs.set(0);
    }

    /// All that came on the daemon's way is answered: the kernel may serve what comes next.
    pub(super) fn done(&self, client: &Stream) {
        if let Some(cookie) = self.cookie.get()
            && self.take_overs.get() < TAKE_OVERS_MAX
            && let Way::Joined(sent) = self.way.get()
        {
            self.way_is_clear.set(false);
            self.steering.set_free(cookie, sent, client.received());
        }
    }
}
