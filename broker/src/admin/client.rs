//! The other end of the admin socket, for `broker stats` and for tests.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, io};

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use crate::stats::{Snapshot, SnapshotError};

/// A local daemon answers in milliseconds; one that needs longer hangs.
const TIME_LIMIT: Duration = Duration::from_secs(5);
/// Thousands of origins fit; a stranger's endless answer does not.
const ANSWER_LEN_MAX: usize = 64 << 20;

/// Takes a snapshot of the daemon behind `socket`.
pub async fn fetch_snapshot(socket: &Path) -> Result<Snapshot, FetchError> {
    let (status, body) = request(socket, Method::GET, "/v1/snapshot").await?;
    if status != StatusCode::OK {
        return Err(error(socket, Cause::Status(status)));
    }
    Snapshot::from_json(&body).map_err(|e| error(socket, Cause::Snapshot(e)))
}

/// Sends one request without a body, such as `POST /v1/drain`.
pub async fn request(
    socket: &Path,
    method: Method,
    path: &str,
) -> Result<(StatusCode, Bytes), FetchError> {
    match tokio::time::timeout(TIME_LIMIT, exchange(socket, method, path)).await {
        Ok(done) => done.map_err(|cause| error(socket, cause)),
        Err(_elapsed) => Err(error(socket, Cause::TimedOut)),
    }
}

async fn exchange(socket: &Path, method: Method, path: &str) -> Result<(StatusCode, Bytes), Cause> {
    let stream = UnixStream::connect(socket).await.map_err(Cause::Connect)?;
    let request = Request::builder()
        .method(method)
        .uri(path)
        // HTTP/1.1 wants one; over a unix socket it names nobody.
        .header(hyper::header::HOST, "broker")
        .body(Empty::<Bytes>::new())
        .map_err(|e| Cause::Http(e.into()))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|e| Cause::Http(e.into()))?;
    let driver = tokio::spawn(connection);
    let answer = async {
        let response = sender.send_request(request).await.map_err(|e| Cause::Http(e.into()))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_LEN_MAX).collect().await;
        Ok((status, body.map_err(Cause::Http)?.to_bytes()))
    }
    .await;
    driver.abort();
    answer
}

/// Why the daemon did not tell.
#[derive(Debug)]
pub struct FetchError {
    socket: PathBuf,
    cause: Cause,
}

#[derive(Debug)]
enum Cause {
    Connect(io::Error),
    Http(Box<dyn std::error::Error + Send + Sync>),
    Status(StatusCode),
    Snapshot(SnapshotError),
    TimedOut,
}

fn error(socket: &Path, cause: Cause) -> FetchError {
    FetchError { socket: socket.to_owned(), cause }
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let socket = self.socket.display();
        match &self.cause {
            Cause::Connect(e) => match e.kind() {
                io::ErrorKind::NotFound => write!(
                    f,
                    "no daemon at {socket}: is it running, and is this its `admin_socket`?"
                ),
                io::ErrorKind::ConnectionRefused => {
                    write!(f, "no daemon at {socket}: it was killed and left the socket behind")
                }
                io::ErrorKind::PermissionDenied => {
                    write!(f, "not allowed to use {socket}: be root, or in the socket's group")
                }
                _ => write!(f, "cannot connect to {socket}"),
            },
            Cause::Http(_) => write!(f, "the daemon at {socket} gave no proper answer"),
            Cause::Status(status) => write!(f, "the daemon at {socket} answered {status}"),
            Cause::Snapshot(_) => write!(f, "the daemon at {socket} sent something unreadable"),
            Cause::TimedOut => {
                write!(f, "the daemon at {socket} did not answer within {TIME_LIMIT:?}")
            }
        }
    }
}

impl std::error::Error for FetchError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.cause {
            Cause::Connect(e) => Some(e),
            Cause::Http(e) => Some(e.as_ref()),
            Cause::Snapshot(e) => Some(e),
            Cause::Status(_) | Cause::TimedOut => None,
        }
    }
}
