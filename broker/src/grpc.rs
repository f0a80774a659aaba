//! Calls to gRPC servers: etcd and xDS control planes.
//!
//! The messages are written by hand where they are used, with the few fields that matter there.
//! Generated ones would be some hundred thousand lines for a dozen messages, and what generates
//! them at build time needs `protoc`, which the machines that build this do not have. Fields that
//! are not known are skipped, as the protocol wants it.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpSocket, TcpStream};
use tokio_stream::Stream;
use tonic::client::Grpc;
use tonic::codegen::http::Uri;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;
use tower::service_fn;

use crate::datapath::Datapath;

/// Largest message that is taken: a list of as many members as are taken has about this size.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// A connection to one server.
#[derive(Clone, Debug)]
pub struct Client(Grpc<Channel>);

impl Client {
    /// Connects to `server` (`http://host:port`) within `limit`. The socket is marked in `datapath`
    /// as the broker's own.
    ///
    /// `ping` is how often an HTTP/2 ping is sent on a connection without traffic; servers may end
    /// connections of clients that do so too often. A peer that is gone without a word is found
    /// by TCP keepalive within a minute in any case.
    pub async fn connect(
        server: &str,
        ping: Option<Duration>,
        limit: Duration,
        datapath: Arc<dyn Datapath>,
    ) -> Result<Self, String> {
        let mut endpoint = Endpoint::from_shared(server.to_owned())
            .map_err(|error| format!("{server}: {}", chain(&error)))?;
        if let Some(ping) = ping {
            endpoint = endpoint
                .http2_keep_alive_interval(ping)
                .keep_alive_timeout(limit)
                .keep_alive_while_idle(true);
        }
        let connector = service_fn(move |uri: Uri| {
            let datapath = Arc::clone(&datapath);
            async move { dial(&uri, &*datapath).await.map(TokioIo::new) }
        });
        // Tonic's own limit of time does not hold for connectors like this one.
        match tokio::time::timeout(limit, endpoint.connect_with_connector(connector)).await {
            Err(_elapsed) => Err(format!("{server}: no connection within {limit:?}")),
            Ok(Err(error)) => Err(format!("{server}: {}", chain(&error))),
            Ok(Ok(channel)) => {
                Ok(Self(Grpc::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX)))
            }
        }
    }

    /// One request, one response, within `limit`.
    pub async fn call<Q, R>(
        &self,
        path: &'static str,
        request: Q,
        limit: Duration,
    ) -> Result<R, Status>
    where
        Q: Message + 'static,
        R: Message + Default + 'static,
    {
        within(limit, async {
            let mut grpc = self.ready().await?;
            let path = PathAndQuery::from_static(path);
            let response = grpc.unary(Request::new(request), path, ProstCodec::default()).await?;
            Ok(response.into_inner())
        })
        .await
    }

    /// Any number of messages in both directions. Completes with the head of the response, which
    /// some servers only send with their first message.
    pub async fn stream<Q, R>(
        &self,
        path: &'static str,
        requests: impl Stream<Item = Q> + Send + 'static,
    ) -> Result<Streaming<R>, Status>
    where
        Q: Message + 'static,
        R: Message + Default + 'static,
    {
        let mut grpc = self.ready().await?;
        let path = PathAndQuery::from_static(path);
        let codec = ProstCodec::default();
        Ok(grpc.streaming(Request::new(requests), path, codec).await?.into_inner())
    }

    async fn ready(&self) -> Result<Grpc<Channel>, Status> {
        let mut grpc = self.0.clone();
        grpc.ready().await.map_err(|error| Status::unavailable(chain(&error)))?;
        Ok(grpc)
    }
}

/// What a failed call says, without the parts of a [`Status`] that only programs want.
#[must_use]
pub fn reason(status: &Status) -> String {
    let text = match status.message() {
        "" => format!("{:?}", status.code()),
        message => message.to_owned(),
    };
    match std::error::Error::source(status) {
        Some(source) => format!("{text}: {}", chain(source)),
        None => text,
    }
}

/// Gives a call up after `limit`.
pub async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_elapsed| {
        Err(Status::deadline_exceeded(format!("no answer within {limit:?}")))
    })
}

/// Connects to the first of the host's addresses that answers.
async fn dial(uri: &Uri, datapath: &dyn Datapath) -> io::Result<TcpStream> {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let port = uri.port_u16().unwrap_or(80);
    let mut failed = io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"));
    for address in tokio::net::lookup_host((host, port)).await? {
        match connect(address, datapath).await {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = io::Error::new(error.kind(), format!("{address}: {error}")),
        }
    }
    Err(failed)
}

async fn connect(address: SocketAddr, datapath: &dyn Datapath) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    datapath.own(socket.as_fd())?;
    socket.set_nodelay(true)?;
    SockRef::from(&socket).set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(Duration::from_secs(30))
            .with_interval(Duration::from_secs(10))
            .with_retries(3),
    )?;
    socket.connect(address).await
}

/// An error with all of its causes; those that repeat what was said are left out.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
