//! Members from an xDS control plane: Envoy's Endpoint Discovery Service (v3) over gRPC.
//!
//! Each service has a stream of its own, also within the aggregated service (ADS): control planes
//! keep versions for each stream, and a list that one service refuses is then no other's concern.
//! The order of changes that ADS exists for concerns resources that refer to each other, and here
//! is only one.

mod bounds;
mod message;
mod protocol;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use prost::bytes::Bytes;
use rand::rngs::StdRng;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use self::message::Node;
use self::protocol::{Delta, Form, Whole};
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

/// Pauses after answers that are refused one after the other. Servers wait for the refusals before they send
/// what is good again.
const REFUSALS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(2));

/// How many times as long as an answer took this thread rests: a server that never stops gets a fifth of a
/// processor.
const REST: u32 = 4;

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
        let queue = ReceiverStream::new(queue);
        let stream = client.stream_encoded(F::path(config.aggregated), queue);
        let mut stream = std::pin::pin!(stream);
        let mut answers: Option<tonic::Streaming<Bytes>> = None;
        let mut silence = std::pin::pin!(tokio::time::sleep(config.initial_fetch_timeout));
        let mut silent = true;
        let mut pace = Pace::new();
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
                    let request = self.take(form, answer, feed, &mut pace).await?;
                    let Some(request) = request else { continue };
                    // Nothing is read meanwhile: what is said would not be heard.
                    let limit = config.initial_fetch_timeout;
                    match tokio::time::timeout(limit, requests.send(request)).await {
                        // An error means that the stream has ended, and reading it says why.
                        Ok(_sent) => {}
                        Err(_elapsed) => return Err(format!("has read nothing for {limit:?}")),
                    }
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

    /// Takes an answer, and waits until the next one may be read: HTTP/2 holds the server up meanwhile.
    async fn take<F: Form>(
        &self,
        form: &mut F,
        answer: Bytes,
        feed: &Feed,
        pace: &mut Pace,
    ) -> Result<Option<F::Request>, String> {
        let (news, request) = form.take(answer).map_err(|error| error.to_string())?;
        let refused = news.is_err();
        match news {
            Ok(Some(membership)) => feed.accept(membership, form.version()),
            Ok(None) => {}
            Err(reason) => feed.refuse(format_args!("{}: {reason}", self.config.cluster)),
        }
        pace.rest(refused).await;
        Ok(request)
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

/// How fast answers are read. A server whose answer is refused may send it again at once, as those do that
/// compare versions only, and others may have no end; either would keep a processor busy.
struct Pace {
    refusals: Backoff,
    rng: StdRng,
    /// Whether the last answer was refused.
    refused: bool,
    /// This thread's processor time when it had rested. All that it does is for this one server.
    spent: Duration,
}

impl Pace {
    fn new() -> Self {
        let refusals = Backoff::new(REFUSALS.0, REFUSALS.1);
        Self { refusals, rng: rng(), refused: false, spent: clock::spent() }
    }

    /// Rests after an answer. A first refusal is told at once.
    async fn rest(&mut self, refused: bool) {
        let again = std::mem::replace(&mut self.refused, refused) && refused;
        if !refused {
            self.refusals.succeed();
        }
        let rest = if again {
            self.refusals.fail(clock::now(), &mut self.rng)
        } else {
            clock::spent().saturating_sub(self.spent) * REST
        };
        tokio::time::sleep(rest).await;
        self.spent = clock::spent();
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

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    async fn rests(pace: &mut Pace, refused: bool) -> Duration {
        let began = Instant::now();
        pace.rest(refused).await;
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn who_sends_without_an_end_gets_a_fifth_of_a_processor() {
        let busy = Duration::from_millis(20);
        let mut pace = Pace::new();
        for refused in [false, true, false] {
            let end = clock::spent() + busy;
            while clock::spent() < end {}
            let rest = rests(&mut pace, refused).await;
            assert!(rest >= busy * REST, "{rest:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_in_a_row_rest_longer() {
        let mut pace = Pace::new();
        for refused in [true, false, true] {
            assert!(rests(&mut pace, refused).await < REFUSALS.0 / 2, "at once");
        }
        for _ in 0..3 {
            let rest = rests(&mut pace, true).await;
            assert!(rest >= REFUSALS.0 / 2 && rest < 2 * REFUSALS.1, "{rest:?}");
        }
    }
}
