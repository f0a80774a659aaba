//! Origins whose connections are counted, exactly: by those who accept them.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};

use super::scripted::{Peer, Scripted};
use crate::lab::Lab;

/// How long an answer takes: long enough for the requests of a burst to meet.
const ANSWER: Duration = Duration::from_millis(2);

/// All origins of a lab. They answer with the request's `X-Request-Id` and a new line.
#[derive(Debug)]
pub struct Census {
    _origins: Vec<Scripted>,
    count: Arc<Count>,
}

/// The connections of all origins together.
#[derive(Debug, Default)]
struct Count {
    streams: Mutex<Vec<TcpStream>>,
    peak: AtomicUsize,
}

impl Census {
    /// Starts them.
    pub fn start(lab: &Lab) -> Result<Self> {
        let count = Arc::<Count>::default();
        let origin = |address: SocketAddr| {
            let count = Arc::clone(&count);
            Scripted::start(&lab.origins, address, move |peer| {
                count.enter(peer.stream()?);
                answer(peer)
            })
        };
        let origins = lab.all_origins().into_iter().map(origin).collect::<Result<_>>()?;
        Ok(Self { _origins: origins, count })
    }

    /// The most connections that were open at once since this was asked last.
    #[must_use]
    pub fn take_peak(&self) -> usize {
        self.count.peak.swap(0, AcqRel)
    }
}

impl Count {
    /// Counts a new connection and all those that have not ended.
    fn enter(&self, stream: TcpStream) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        // The end of a connection comes before the beginning of one that was opened after it.
        streams.retain(is_open);
        streams.push(stream);
        self.peak.fetch_max(streams.len(), AcqRel);
    }
}

fn is_open(stream: &TcpStream) -> bool {
    let look = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    match recv(stream.as_raw_fd(), &mut [0], look) {
        Ok(bytes) => bytes > 0,
        Err(error) => error == Errno::EAGAIN,
    }
}

fn answer(peer: &mut Peer) -> io::Result<()> {
    while let Some(request) = peer.request()? {
        thread::sleep(ANSWER);
        peer.answer_with_id(&request, "200 OK")?;
    }
    Ok(())
}
