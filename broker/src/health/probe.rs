//! One check: a connection, and a request on it if the settings have one.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{CONNECTION, HOST, HeaderValue, USER_AGENT};
use hyper::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use nix::errno::Errno;
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::AbortHandle;

use super::Outcome;
use super::schedule::{Ended, Probe};
use crate::config::health::{HealthCheck, Http, Kind};
use crate::datapath::Datapath;
use crate::net;

/// Longest head of an answer; hyper takes no less than 8 KB.
const HEAD_BYTES_MAX: usize = 16 * 1024;

/// Most of a body that is read. What is longer costs its connection, and nothing else: the answer
/// is in the head.
const BODY_BYTES_MAX: usize = 64 * 1024;

/// Makes the checks that the settings ask for.
pub(super) struct Prober {
    http: Option<Arc<Http>>,
    timeout: Duration,
    datapath: Arc<dyn Datapath>,
}

impl Prober {
    pub(super) fn new(settings: &HealthCheck, datapath: Arc<dyn Datapath>) -> Self {
        let http = match &settings.kind {
            Kind::Tcp => None,
            Kind::Http(http) => Some(Arc::new(http.clone())),
        };
        Self { http, timeout: settings.timeout, datapath }
    }
}

impl Probe for Prober {
    type Kept = Connection;

    fn check(
        &self,
        origin: SocketAddr,
        kept: Option<Connection>,
    ) -> impl Future<Output = Ended<Connection>> + Send + 'static {
        let Self { http, timeout, datapath } = self;
        let (http, timeout, datapath) = (http.clone(), *timeout, Arc::clone(datapath));
        async move {
            let check = async {
                match http {
                    None => dial(origin, &*datapath).await.map(|_stream| (Outcome::Passed, None)),
                    Some(http) => ask(&http, origin, kept, &*datapath).await,
                }
            };
            match tokio::time::timeout(timeout, check).await {
                Ok(ended) => ended.unwrap_or_else(|outcome| (outcome, None)),
                Err(_elapsed) => (Outcome::TimedOut, None),
            }
        }
    }
}

/// A connection for requests.
pub(super) struct Connection {
    requests: SendRequest<Empty<Bytes>>,
    /// The task that moves its bytes.
    driver: AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Asks once; twice if a connection that was kept has turned out to be of no use. Origins close
/// idle connections when they like, which says nothing of their health.
async fn ask(
    http: &Http,
    origin: SocketAddr,
    kept: Option<Connection>,
    datapath: &dyn Datapath,
) -> Result<Ended<Connection>, Outcome> {
    if let Some(kept) = kept.filter(|kept| !kept.requests.is_closed())
        && let Ok(answer) = ask_on(http, kept).await
    {
        return Ok(answer);
    }
    let stream = dial(origin, datapath).await?;
    let (requests, driver) = http1::Builder::new()
        .max_buf_size(HEAD_BYTES_MAX)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|e| broken(&e))?;
    // What goes wrong with the connection is told to whoever waits for the answer.
    let driver = tokio::spawn(async { driver.await.unwrap_or_default() }).abort_handle();
    ask_on(http, Connection { requests, driver }).await.map_err(|e| broken(&e))
}

/// One request and its answer; with the connection, if it can serve another one.
async fn ask_on(http: &Http, mut connection: Connection) -> hyper::Result<Ended<Connection>> {
    connection.requests.ready().await?;
    let response = connection.requests.send_request(request(http)).await?;
    let outcome = judge(http, &response);
    let complete = read_body(response.into_body()).await?;
    Ok((outcome, (complete && http.reuse_connection).then_some(connection)))
}

fn request(http: &Http) -> Request<Empty<Bytes>> {
    let mut request = Request::new(Empty::new());
    *request.method_mut() = http.method.clone();
    *request.uri_mut() = Uri::from(http.path.clone());
    let headers = request.headers_mut();
    headers.insert(HOST, http.host.clone());
    headers.insert(USER_AGENT, HeaderValue::from_static("broker-health-check"));
    if !http.reuse_connection {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    request
}

fn judge(http: &Http, response: &Response<Incoming>) -> Outcome {
    let status = response.status().as_u16();
    if !http.expected_statuses.iter().any(|range| range.contains(&status)) {
        let retriable = http.retriable_statuses.iter().any(|range| range.contains(&status));
        return Outcome::Status { status, retriable };
    }
    if response.headers().contains_key("x-envoy-degraded") {
        Outcome::Degraded
    } else {
        Outcome::Passed
    }
}

/// Reads a body to its end; `false` if it is too long for that.
async fn read_body(mut body: Incoming) -> hyper::Result<bool> {
    let mut left = BODY_BYTES_MAX;
    while let Some(frame) = body.frame().await {
        let length = frame?.data_ref().map_or(0, Bytes::len);
        match left.checked_sub(length) {
            Some(rest) => left = rest,
            None => return Ok(false),
        }
    }
    Ok(true)
}

/// The innermost reason says what happened; those around it say in which of hyper's layers.
fn broken(error: &hyper::Error) -> Outcome {
    let mut reason: &dyn std::error::Error = error;
    while let Some(source) = reason.source() {
        reason = source;
    }
    Outcome::Broken(reason.to_string())
}

async fn dial(origin: SocketAddr, datapath: &dyn Datapath) -> Result<TcpStream, Outcome> {
    // Without a socket, or one that may be intercepted, there is no check.
    let socket = net::own_socket(origin, datapath).map_err(|e| Outcome::NotMade(e.to_string()))?;
    let connected = TcpSocket::from_std_stream(socket.into()).connect(origin).await;
    connected
        .and_then(|stream| net::refuse_itself(stream.local_addr()?, origin).map(|()| stream))
        .map_err(|e| {
            let reason = e.to_string();
            if is_ours(&e) { Outcome::NotMade(reason) } else { Outcome::Broken(reason) }
        })
}

/// Whether a failure to connect is for want of something on this host: descriptors, memory, ports
/// (connect(2)).
fn is_ours(error: &io::Error) -> bool {
    let ours = [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM, Errno::ENOBUFS, Errno::EADDRNOTAVAIL];
    error.raw_os_error().is_some_and(|code| ours.contains(&Errno::from_raw(code)))
}

#[cfg(test)]
mod tests;
