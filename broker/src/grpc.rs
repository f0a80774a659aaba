//! Calls to gRPC servers: etcd and xDS control planes.
//!
//! The messages are written by hand where they are used, with the few fields that matter there.
//! Generated ones would be some hundred thousand lines for a dozen messages, and what generates
//! them at build time needs `protoc`, which the machines that build this do not have. Fields that
//! are not known are skipped, as the protocol wants it.

use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use prost::Message;
use prost::bytes::{Buf as _, Bytes};
use tokio_stream::Stream;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic::codegen::http::Uri;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{self, Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;
use tower::service_fn;

use crate::chain;
use crate::config::tls::{Credentials, Tls};
use crate::datapath::Datapath;
use crate::outbound;

/// Largest message that is taken: 160 bytes for each of as many members as are taken. An address, its port,
/// a weight and a health are 30 to 60 of them, and the rest is for what control planes like to add.
const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// A header that goes with each call.
pub type Header = (&'static str, MetadataValue<Ascii>);

/// A connection to one server.
#[derive(Clone, Debug)]
pub struct Client {
    grpc: Grpc<Channel>,
    header: Option<Header>,
}

impl Client {
    /// Connects to `server` (`http://host:port`, or `https://host:port` with what `tls` says) within
    /// `limit`. The socket is marked in `datapath` as the broker's own.
    ///
    /// `ping` is how often an HTTP/2 ping is sent on a connection without traffic; servers may end
    /// connections of clients that do so too often. A peer that is gone without a word is found
    /// by TCP keepalive within a minute in any case.
    pub async fn connect(
        server: &str,
        tls: &Tls,
        ping: Option<Duration>,
        limit: Duration,
        datapath: Arc<dyn Datapath>,
    ) -> Result<Self, String> {
        let mut endpoint = endpoint(server, tls)?;
        if let Some(ping) = ping {
            endpoint = endpoint
                .http2_keep_alive_interval(ping)
                .keep_alive_timeout(limit)
                .keep_alive_while_idle(true);
        }
        let connector = service_fn(move |uri: Uri| {
            let datapath = Arc::clone(&datapath);
            async move { outbound::dial(&uri, &*datapath).await.map(TokioIo::new) }
        });
        // Tonic's own limit of time does not hold for connectors like this one.
        match tokio::time::timeout(limit, endpoint.connect_with_connector(connector)).await {
            Err(_elapsed) => Err(format!("no connection within {limit:?}")),
            Ok(Err(error)) => Err(chain(&error)),
            Ok(Ok(channel)) => {
                let grpc = Grpc::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
                Ok(Self { grpc, header: None })
            }
        }
    }

    /// Sends this with each call from now on.
    #[must_use]
    pub fn with_header(self, header: Header) -> Self {
        Self { header: Some(header), ..self }
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
            let response = grpc.unary(self.request(request), path, ProstCodec::default()).await?;
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
        self.stream_with(path, requests, ProstCodec::default()).await
    }

    /// The same with answers as they are sent: a message of nothing but two bytes for each field takes
    /// dozens of times its size once it is decoded, and whoever asked may want to look at it before.
    pub async fn stream_encoded<Q: Message + 'static>(
        &self,
        path: &'static str,
        requests: impl Stream<Item = Q> + Send + 'static,
    ) -> Result<Streaming<Bytes>, Status> {
        self.stream_with(path, requests, Encoded(ProstCodec::default())).await
    }

    async fn stream_with<C: Codec<Encode: Send + Sync, Decode: Send + Sync>>(
        &self,
        path: &'static str,
        requests: impl Stream<Item = C::Encode> + Send + 'static,
        codec: C,
    ) -> Result<Streaming<C::Decode>, Status> {
        let mut grpc = self.ready().await?;
        let path = PathAndQuery::from_static(path);
        Ok(grpc.streaming(self.request(requests), path, codec).await?.into_inner())
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some((name, value)) = &self.header {
            request.metadata_mut().insert(*name, value.clone());
        }
        request
    }

    async fn ready(&self) -> Result<Grpc<Channel>, Status> {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.map_err(|error| Status::unavailable(chain(&error)))?;
        Ok(grpc)
    }
}

/// Encodes what is sent, and leaves what comes as it is.
struct Encoded<Q>(ProstCodec<Q, ()>);

impl<Q: Message + 'static> Codec for Encoded<Q> {
    type Encode = Q;
    type Decode = Bytes;
    type Encoder = <ProstCodec<Q, ()> as Codec>::Encoder;
    type Decoder = AsItIs;

    fn encoder(&mut self) -> Self::Encoder {
        self.0.encoder()
    }

    fn decoder(&mut self) -> AsItIs {
        AsItIs
    }
}

struct AsItIs;

impl Decoder for AsItIs {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, message: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(message.copy_to_bytes(message.remaining())))
    }
}

/// What a failed call says, without the parts of a [`Status`] that only programs want.
#[must_use]
pub fn reason(status: &Status) -> String {
    let text = match status.message() {
        "" => format!("{:?}", status.code()),
        message => message.to_owned(),
    };
    match std::error::Error::source(status).map(chain) {
        Some(causes) if causes.starts_with(&text) => causes,
        Some(causes) => format!("{text}: {causes}"),
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

/// A server, and how it is spoken to. An error says that it cannot be, whether it is there or not.
pub fn endpoint(server: &str, tls: &Tls) -> Result<Endpoint, String> {
    let failed = |error: transport::Error| chain(&error);
    let endpoint = Endpoint::from_shared(server.to_owned()).map_err(failed)?;
    if endpoint.uri().scheme_str() != Some("https") {
        return Ok(endpoint);
    }
    let credentials = tls.read().map_err(|error| error.to_string())?;
    endpoint.tls_config(tls_config(tls, credentials)).map_err(failed)
}

fn tls_config(tls: &Tls, credentials: Credentials) -> ClientTlsConfig {
    let Credentials { ca, identity } = credentials;
    let mut config = match ca {
        Some(ca) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)),
        None => ClientTlsConfig::new().with_native_roots(),
    };
    if let Some((certificate, key)) = identity {
        config = config.identity(transport::Identity::from_pem(certificate, key));
    }
    if let Some(name) = &tls.server_name {
        config = config.domain_name(name);
    }
    config
}
