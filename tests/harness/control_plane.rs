//! An xDS control plane that says what a test wants, when it wants it.
//!
//! Its messages are those that Envoy's own definitions were compiled to, not the daemon's.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use envoy_types::pb::envoy::service::endpoint::v3::endpoint_discovery_service_server::{
    EndpointDiscoveryService, EndpointDiscoveryServiceServer,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

/// How long what should come may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running control plane. Dropping it ends it and its streams.
#[derive(Debug)]
pub struct ControlPlane {
    address: SocketAddr,
    scheme: &'static str,
    whole: Receiver<Dialogue<DiscoveryRequest, DiscoveryResponse>>,
    delta: Receiver<Dialogue<DeltaDiscoveryRequest, DeltaDiscoveryResponse>>,
    reads: watch::Sender<bool>,
    _stop: oneshot::Sender<()>,
}

impl ControlPlane {
    /// Serves on a listener, of whatever network namespace that may be.
    pub fn start(listener: TcpListener) -> io::Result<Self> {
        Self::start_with(listener, None)
    }

    /// The same over TLS, for clients with a certificate only.
    pub fn start_with_tls(listener: TcpListener, tls: ServerTlsConfig) -> io::Result<Self> {
        Self::start_with(listener, Some(tls))
    }

    fn start_with(listener: TcpListener, tls: Option<ServerTlsConfig>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (whole_sender, whole) = channel();
        let (delta_sender, delta) = channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let (reads, reading) = watch::channel(true);
        let service = Service { whole: whole_sender, delta: delta_sender, reading };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let scheme = if tls.is_some() { "https" } else { "http" };
        let mut builder = Server::builder();
        if let Some(tls) = tls {
            builder = builder.tls_config(tls).map_err(io::Error::other)?;
        }
        thread::spawn(move || {
            runtime.block_on(async {
                let serving = builder
                    .add_service(AggregatedDiscoveryServiceServer::new(service.clone()))
                    .add_service(EndpointDiscoveryServiceServer::new(service))
                    .serve_with_incoming(TcpIncoming::from(listener));
                tokio::select! {
                    // Whoever cannot reach it says so.
                    served = serving => served.unwrap_or_default(),
                    _ = stopped => {}
                }
            });
        });
        Ok(Self { address, scheme, whole, delta, reads, _stop: stop })
    }

    /// Where it is, as the configuration wants it.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    /// Whether requests on streams that are opened from now on are read at once, or when this is said
    /// again.
    pub fn read(&self, reads: bool) {
        self.reads.send_replace(reads);
    }

    /// The next stream that a client opens, in the state-of-the-world form.
    ///
    /// # Panics
    /// If none does.
    #[must_use]
    pub fn stream(&self) -> Dialogue<DiscoveryRequest, DiscoveryResponse> {
        self.whole.recv_timeout(PATIENCE).expect("a stream")
    }

    /// The next stream that a client opens, in the incremental form.
    ///
    /// # Panics
    /// If none does.
    #[must_use]
    pub fn delta_stream(&self) -> Dialogue<DeltaDiscoveryRequest, DeltaDiscoveryResponse> {
        self.delta.recv_timeout(PATIENCE).expect("a stream")
    }
}

/// One stream. Dropping it ends the stream in good order.
#[derive(Debug)]
pub struct Dialogue<Q, R> {
    /// The call it came by.
    pub method: &'static str,
    asked: Receiver<Q>,
    say: mpsc::UnboundedSender<Result<R, Status>>,
}

impl<Q, R> Dialogue<Q, R> {
    /// The client's next request.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn asked(&self) -> Q {
        self.asked.recv_timeout(PATIENCE).expect("a request")
    }

    /// Whether the client says nothing for a while.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.asked.recv_timeout(Duration::from_millis(300)).is_err()
    }

    /// Sends something. Nobody may be there any more.
    pub fn say(&self, response: R) {
        self.say.send(Ok(response)).ok();
    }

    /// Ends the stream with an error.
    pub fn fail(self, status: Status) {
        self.say.send(Err(status)).ok();
    }
}

#[derive(Clone)]
struct Service {
    whole: Sender<Dialogue<DiscoveryRequest, DiscoveryResponse>>,
    delta: Sender<Dialogue<DeltaDiscoveryRequest, DeltaDiscoveryResponse>>,
    reading: watch::Receiver<bool>,
}

type Answers<R> = Pin<Box<dyn Stream<Item = Result<R, Status>> + Send>>;

/// Hands a stream to the test. Like servers in Go, it sends nothing, not even the response's head,
/// before there is something to say.
async fn open<Q: Send + 'static, R: Send + 'static>(
    method: &'static str,
    dialogues: &Sender<Dialogue<Q, R>>,
    mut reading: watch::Receiver<bool>,
    request: Request<Streaming<Q>>,
) -> Result<Response<Answers<R>>, Status> {
    let mut requests = request.into_inner();
    let (asked_sender, asked) = channel();
    let (say, mut said) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        reading.wait_for(|reads| *reads).await.ok();
        while let Ok(Some(request)) = requests.message().await {
            if asked_sender.send(request).is_err() {
                break;
            }
        }
    });
    let gone = || Status::unavailable("nobody listens");
    dialogues.send(Dialogue { method, asked, say }).map_err(|_unsent| gone())?;
    let first = said.recv().await.ok_or_else(gone)??;
    let answers = tokio_stream::once(Ok(first)).chain(UnboundedReceiverStream::new(said));
    Ok(Response::new(Box::pin(answers)))
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Service {
    type StreamAggregatedResourcesStream = Answers<DiscoveryResponse>;
    type DeltaAggregatedResourcesStream = Answers<DeltaDiscoveryResponse>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        open("ADS", &self.whole, self.reading.clone(), request).await
    }

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        open("ADS", &self.delta, self.reading.clone(), request).await
    }
}

#[tonic::async_trait]
impl EndpointDiscoveryService for Service {
    type StreamEndpointsStream = Answers<DiscoveryResponse>;
    type DeltaEndpointsStream = Answers<DeltaDiscoveryResponse>;

    async fn stream_endpoints(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamEndpointsStream>, Status> {
        open("EDS", &self.whole, self.reading.clone(), request).await
    }

    async fn delta_endpoints(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaEndpointsStream>, Status> {
        open("EDS", &self.delta, self.reading.clone(), request).await
    }

    async fn fetch_endpoints(
        &self,
        _request: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        Err(Status::unimplemented("polling"))
    }
}
