//! Members from an xDS control plane: Envoy's Endpoint Discovery Service (v3) over gRPC.
//!
//! Each service has a stream of its own, also within the aggregated service (ADS): control planes
//! keep versions for each stream, and a list that one service refuses is then no other's concern.
//! The order of changes that ADS exists for concerns resources that refer to each other, and here
//! is only one.

mod message;
mod protocol;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use self::message::Node;
use self::protocol::{Delta, Form, News, Whole};
use super::{Feed, Source, rng};
use crate::clock;
use crate::config::discovery::{self, EdsApi};
use crate::datapath::Datapath;
use crate::grpc;
use crate::pool::backoff::Backoff;

/// How long a connection may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// How often a silent connection is tried out. Servers of gRPC's Go library, which most control
/// planes are, end connections of clients that do so more often, unless they were told otherwise.
const PING: Duration = Duration::from_secs(5 * 60 + 5);

/// Pauses between attempts to reach the server.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// Pauses before refusals that follow one another. Servers wait for them before they send what is good
/// again.
const REFUSALS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(2));

/// Requests that the server has not taken yet.
const REQUESTS_MAX: usize = 16;

/// A cluster's endpoints in a control plane.
pub struct Eds {
    config: discovery::Eds,
    datapath: Arc<dyn Datapath>,
}

impl Eds {
    /// The endpoints that `config` names. Sockets are marked in `datapath` as the broker's own.
    #[must_use]
    pub fn new(config: discovery::Eds, datapath: Arc<dyn Datapath>) -> Self {
        Self { config, datapath }
    }

    async fn follow<F: Form>(self, feed: Feed) {
        let mut form = F::new(self.config.cluster.clone());
        let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1);
        let mut rng = rng();
        while !feed.is_closed() {
            let error = match self.session(&mut form, &feed, &mut backoff).await {
                Ok(never) => match never {},
                Err(error) => error,
            };
            feed.lost(format_args!("{}: {error}", self.config.server));
            tokio::time::sleep(backoff.fail(clock::now(), &mut rng)).await;
        }
    }

    /// One stream, until it fails.
    async fn session<F: Form>(
        &self,
        form: &mut F,
        feed: &Feed,
        backoff: &mut Backoff,
    ) -> Result<Infallible, String> {
        let Self { config, datapath } = self;
        let discovery::Eds { server, tls, .. } = config;
        let datapath = Arc::clone(datapath);
        let client =
            grpc::Client::connect(server, tls, Some(PING), CONNECT_LIMIT, datapath).await?;
        let (requests, queue) = mpsc::channel(REQUESTS_MAX);
        requests.try_send(form.subscribe(self.node())).map_err(|error| error.to_string())?;
        let stream = client.stream(F::path(config.aggregated), ReceiverStream::new(queue));
        let mut stream = std::pin::pin!(stream);
        let mut answers: Option<tonic::Streaming<F::Response>> = None;
        let mut silence = std::pin::pin!(tokio::time::sleep(config.initial_fetch_timeout));
        let mut silent = true;
        let mut refusals = Refusals::new();
        loop {
            let answer = async {
                match &mut answers {
                    // Many servers begin to answer only when they have something to say.
                    None => {
                        answers = Some(stream.as_mut().await?);
                        Ok(None)
                    }
                    Some(answers) => match answers.message().await? {
                        Some(answer) => Ok(Some(answer)),
                        None => Err(tonic::Status::unavailable("the server has ended the stream")),
                    },
                }
            };
            tokio::select! {
                answer = answer => {
                    let answer = answer.map_err(|status| grpc::reason(&status))?;
                    let Some(answer) = answer else { continue };
                    silent = false;
                    backoff.succeed();
                    let (news, request) = form.take(answer);
                    let bad = matches!(news, News::Bad(_));
                    match news {
                        News::List(membership) => feed.accept(membership, form.version()),
                        News::Bad(reason) => {
                            feed.refuse(format_args!("{}: {reason}", config.cluster));
                        }
                        News::None => {}
                    }
                    let Some(request) = request else { continue };
                    if let Some(request) = refusals.pass(request, bad) {
                        // An error means that the stream has ended, and reading it says why.
                        requests.send(request).await.ok();
                    }
                }
                request = refusals.due() => {
                    requests.send(request).await.ok();
                }
                () = &mut silence, if silent => {
                    silent = false;
                    if form.version().is_empty() {
                        let limit = config.initial_fetch_timeout;
                        feed.lost(format_args!(
                            "{}: has said nothing of {:?} within {limit:?}",
                            config.server, config.cluster,
                        ));
                    } else {
                        // A server that knows the version in use need not say anything.
                        backoff.succeed();
                        feed.found();
                    }
                }
            }
        }
    }

    fn node(&self) -> Node {
        Node {
            id: self.config.node_id.clone(),
            cluster: self.config.node_cluster.clone(),
            user_agent_name: "broker".to_owned(),
            user_agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// Holds refusals back that follow one another. A server whose answer is refused may send it again at
/// once, as those do that compare versions only, and would do nothing else then.
struct Refusals<Q> {
    backoff: Backoff,
    rng: StdRng,
    in_a_row: bool,
    /// The last one, and when it is to be sent.
    held: Option<(Instant, Q)>,
}

impl<Q> Refusals<Q> {
    fn new() -> Self {
        let backoff = Backoff::new(REFUSALS.0, REFUSALS.1);
        Self { backoff, rng: rng(), in_a_row: false, held: None }
    }

    /// What is to be said at once after an answer, if anything: the first refusal, and whatever is none.
    /// It is about the last answer, so nobody waits for what was held back before.
    fn pass(&mut self, request: Q, refusal: bool) -> Option<Q> {
        self.held = None;
        if !refusal {
            self.backoff.succeed();
        } else if self.in_a_row {
            let at = Instant::now() + self.backoff.fail(clock::now(), &mut self.rng);
            self.held = Some((at, request));
            return None;
        }
        self.in_a_row = refusal;
        Some(request)
    }

    /// The refusal that was held back, once it is to be sent.
    async fn due(&mut self) -> Q {
        if let Some((at, _)) = self.held {
            tokio::time::sleep_until(at).await;
        }
        match self.held.take() {
            Some((_, request)) => request,
            None => std::future::pending().await,
        }
    }
}

impl Source for Eds {
    fn watch(self: Box<Self>, feed: Feed) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        match self.config.api {
            EdsApi::Whole => Box::pin(self.follow::<Whole>(feed)),
            EdsApi::Delta => Box::pin(self.follow::<Delta>(feed)),
        }
    }
}
