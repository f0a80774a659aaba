//! The admin socket: statistics, health and drain over HTTP on a unix socket.
//!
//! A file on disk, because its permissions are the access control, and it cannot be reached from
//! another host by mistake. HTTP, because curl and Prometheus exporters speak it already.
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/snapshot` | the [`Snapshot`] as JSON |
//! | `GET /v1/events` | the last events, one JSON object per line |
//! | `GET /v1/health` | [`Health`] as JSON; 200 while ready, else 503 |
//! | `POST /v1/drain` | 202; leases may finish, then the daemon stops |
//! | `GET /metrics` | the snapshot as Prometheus text |
//!
//! Descriptors and memory are shared with the data path, so that there are limits: a connection is for one
//! request, which must come and be answered in time, and beyond `CONNECTIONS_MAX` of them the next ones
//! wait in the kernel's queue.

pub mod client;
pub mod metrics;

use std::future::Future;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, fs, io};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::{Deserialize, Serialize};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Mutex, Semaphore};

pub use client::{FetchError, fetch_snapshot};

use crate::aside::aside;
use crate::config::ADMIN_SOCKET;
use crate::stats::Snapshot;

/// Owner and group may connect: connecting needs write permission, and a drain is a write.
const SOCKET_MODE: u32 = 0o660;

/// How many connections are served at once.
const CONNECTIONS_MAX: usize = 32;

/// Within so long a request must have come.
const REQUEST_TIME: Duration = Duration::from_secs(5);

/// Within so long its answer must have been read.
const CONNECTION_TIME: Duration = Duration::from_secs(30);

/// Pause after a failed `accept`: out of descriptors or memory, which does not pass at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the admin socket asks the daemon for.
pub trait Source: Send + Sync + 'static {
    /// Takes a snapshot. May block for a moment; it is not called on an event loop.
    fn snapshot(&self) -> Snapshot;

    /// The last events, one JSON object per line, oldest first.
    fn events(&self) -> String;

    /// Whether clients should be sent here.
    fn health(&self) -> Health;

    /// Begins a graceful stop. Asking twice is no mistake.
    fn drain(&self);
}

/// Answer of `GET /v1/health`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// Every service lets its clients in, and no stop was asked for.
    pub ready: bool,
    /// A stop was asked for; leases are finishing.
    pub draining: bool,
}

/// The bound admin socket. Dropping it removes the file.
#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    file: SocketFile,
}

/// The directory of a socket, if it is not there and [`bind`] does not make it.
#[must_use]
pub fn missing_directory(socket: &Path) -> Option<&Path> {
    let other = socket != Path::new(ADMIN_SOCKET);
    socket.parent().filter(|directory| other && !directory.is_dir())
}

/// Binds the admin socket. Must be called inside a runtime.
///
/// The directory of the default one is made if it is not there: systemd may not have done it. That of
/// another one is more likely a mistake in its path.
///
/// A file left over by a daemon that was killed is replaced; one that somebody listens on, or that
/// is no socket at all, is not.
pub fn bind(path: &Path) -> Result<Listener, BindError> {
    let error = |doing: &'static str| {
        move |source| BindError { path: path.to_owned(), doing, source: Some(source) }
    };
    if missing_directory(path).is_some() {
        return Err(error("its directory is not there")(io::ErrorKind::NotFound.into()));
    }
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(error("cannot make its directory"))?;
    }
    remove_stale(path)?;
    let listener = UnixListener::bind(path).map_err(error("cannot bind"))?;
    let file = SocketFile::of(path).map_err(error("cannot inspect"))?;
    fs::set_permissions(path, fs::Permissions::from_mode(SOCKET_MODE))
        .map_err(error("cannot set its mode"))?;
    Ok(Listener { listener, file })
}

fn remove_stale(path: &Path) -> Result<(), BindError> {
    let error = |doing: &'static str, source| BindError { path: path.to_owned(), doing, source };
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(error("cannot inspect", Some(e))),
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(error("exists and is not a socket; it was left alone", None));
        }
        Ok(_) => {}
    }
    match connect_now(path) {
        Ok(()) => Err(error("another daemon is listening there", None)),
        // Its queue is full, as when it is stopped. It may stay so: nobody waits for that.
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
            Err(error("another daemon is listening there, and does not answer", None))
        }
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(|e| error("cannot remove the stale file", Some(e)))
        }
        Err(e) => Err(error("cannot tell whether somebody listens there", Some(e))),
    }
}

fn connect_now(path: &Path) -> io::Result<()> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)
}

/// Answers requests until `stop` completes.
pub async fn serve(
    listener: Listener,
    source: Arc<dyn Source>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let Listener { listener, file } = listener;
    let router = router(source);
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let accept = async {
        loop {
            // It is never closed.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let answered = answer(stream, router.clone());
                    tokio::spawn(async move {
                        answered.await;
                        drop(place);
                    });
                }
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            }
        }
    };
    tokio::select! {
        () = accept => {}
        () = stop => {}
    }
    drop((listener, file));
    // Those that are left are answered.
    let all = u32::try_from(CONNECTIONS_MAX).map_err(io::Error::other)?;
    places.acquire_many(all).await.map(drop).map_err(io::Error::other)
}

/// Serves one request. Who has asked and then ended its side (`nc -N`) is answered, too.
async fn answer(stream: UnixStream, router: Router) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIME)
        .keep_alive(false)
        .half_close(true)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match tokio::time::timeout(CONNECTION_TIME, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a connection to the admin socket"),
        Err(_elapsed) => tracing::debug!("an answer of the admin socket was not read in time"),
    }
}

/// What all requests share.
#[derive(Clone)]
struct Shared {
    source: Arc<dyn Source>,
    /// One snapshot is taken at a time, however many ask: each costs a thread and what it reads.
    turn: Arc<Mutex<()>>,
}

fn router(source: Arc<dyn Source>) -> Router {
    Router::new()
        .route("/v1/snapshot", get(snapshot))
        .route("/v1/events", get(events))
        .route("/v1/health", get(health))
        .route("/v1/drain", post(drain))
        .route("/metrics", get(prometheus))
        .with_state(Shared { source, turn: Arc::default() })
}

/// Reading the kernel's maps takes milliseconds: too long for the thread that does the rest.
async fn take(Shared { source, turn }: Shared) -> Result<Snapshot, StatusCode> {
    let turn = turn.lock_owned().await;
    let taken = aside("snapshot", move || {
        let snapshot = source.snapshot();
        // Not before, even if nobody waits for it any more.
        drop(turn);
        snapshot
    });
    taken.await.map_err(|error| {
        tracing::warn!(%error, "a snapshot for the admin socket");
        StatusCode::SERVICE_UNAVAILABLE
    })
}

async fn snapshot(State(shared): State<Shared>) -> Result<Json<Snapshot>, StatusCode> {
    take(shared).await.map(Json)
}

async fn prometheus(State(shared): State<Shared>) -> Result<Response, StatusCode> {
    let text = metrics::render(&take(shared).await?);
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

async fn events(State(Shared { source, .. }): State<Shared>) -> Response {
    ([(header::CONTENT_TYPE, "application/x-ndjson")], source.events()).into_response()
}

async fn health(State(Shared { source, .. }): State<Shared>) -> (StatusCode, Json<Health>) {
    let health = source.health();
    let status = if health.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(health))
}

async fn drain(State(Shared { source, .. }): State<Shared>) -> StatusCode {
    source.drain();
    StatusCode::ACCEPTED
}

/// Removes the socket's file when dropped, unless another daemon has put its own there.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    inode: (u64, u64),
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), inode: inode(path)? })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|now| now == self.inode)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the admin socket");
        }
    }
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

/// Why there is no admin socket.
#[derive(Debug)]
pub struct BindError {
    path: PathBuf,
    doing: &'static str,
    source: Option<io::Error>,
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "admin socket {}: {}", self.path.display(), self.doing)
    }
}

impl std::error::Error for BindError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}

#[cfg(test)]
mod tests;
