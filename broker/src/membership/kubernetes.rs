//! Members from a Kubernetes service: the endpoints in all of its `EndpointSlice`s
//! (`discovery.k8s.io/v1`).
//!
//! The slices are listed, and then watched from the version of that list on. Whatever goes wrong,
//! they are listed again: a list is what proves that the server is back, and it is one change
//! whatever happened in between. (`kube`'s own `watcher` resumes a watch silently, so that nobody
//! learns that it recovered, and without a pause if the server ends it at once.)
//!
//! - A slice holds some of the endpoints, for one family of addresses. While an endpoint moves
//!   between slices both may have it; the one that is ready counts ([`super::Membership::new`]).
//! - Endpoints carry the zone that they are in. *Hints* say which zones should use an endpoint. A
//!   gateway that is told its own zone goes by them, under the condition under which `kube-proxy`
//!   does: every ready endpoint has some, and one of them names the zone (Kubernetes, "Topology Aware
//!   Routing", safeguards). It takes its subset of what is left.
//! - An endpoint with a hostname (a pod of a `StatefulSet`) is called by it, because it outlives the
//!   pod's address.
//!
//! All of it happens in a thread of its own. Files and credential plug-ins that the kubeconfig names are
//! waited for by whoever reads or runs them, and a server may say more than can be listened to: none of
//! that is to hold up the control thread, nor the end of the daemon.
//!
//! The account needs the verbs `list` and `watch` on `endpointslices` in the namespace.

mod server;
mod slices;

use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, mpsc as blocking};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures_util::{Stream, StreamExt as _};
use hyper::StatusCode;
use tokio::runtime::{self, Runtime};
use tokio::sync::{Notify, mpsc};

use self::server::{Event, Kind, Server, Status};
use self::slices::{Listed, Slice, Slices};
use super::{Feed, Source};
use crate::chain;
use crate::clock;
use crate::config::discovery;
use crate::datapath::Datapath;

/// The server ends a watch after this time, and it is resumed. A server that has gone without a
/// word is noticed soon after.
const WATCH_SECONDS: u32 = 60;

/// How long the server may take to answer, or to end a watch after [`WATCH_SECONDS`].
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Watches begin no more often than this, whatever ends them.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// Changes are taken up no more often than this: each time all members are looked at.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// How often the thread says that nothing holds it up.
const BEAT: Duration = Duration::from_secs(1);

/// How long it may be silent before that is told: for as long as what the kubeconfig names is waited for.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// What is wrong then.
const SILENT: &str =
    "the kubeconfig, a file that it names, or its credential plug-in does not answer";

/// A service to watch.
pub struct Kubernetes {
    config: discovery::Kubernetes,
    datapath: Arc<dyn Datapath>,
    /// The list is to be told again: something else was told since.
    again: Notify,
}

impl Kubernetes {
    /// The service that the configuration says. Sockets are marked in `datapath` as the broker's own.
    #[must_use]
    pub fn new(config: discovery::Kubernetes, datapath: Arc<dyn Datapath>) -> Self {
        Self { config, datapath, again: Notify::new() }
    }

    /// Follows the slices in a thread until something goes wrong, which is told, or the receiver is
    /// dropped. It gets a beat now and then, and its channel is closed when the thread ends.
    fn start(self: &Arc<Self>, feed: &Feed) -> io::Result<mpsc::Receiver<()>> {
        let (beats, receiver) = mpsc::channel(1);
        let (source, feed) = (Arc::clone(self), feed.clone());
        let follow = move || {
            let runtime = match runtime() {
                Ok(runtime) => runtime,
                Err(error) => return source.lost(&feed, error),
            };
            runtime.block_on(async {
                tokio::select! {
                    Err(error) = source.follow(&feed) => source.lost(&feed, chain(error.as_ref())),
                    () = beat(&beats) => {}
                }
            });
            // Waits for a plug-in that still runs, before it is run once more.
            drop(runtime);
            drop(beats);
        };
        thread::Builder::new().name("origins-k8s".into()).spawn(follow)?;
        Ok(receiver)
    }

    /// Waits until the thread ends, and tells when it is held up.
    async fn attend(&self, mut beats: mpsc::Receiver<()>, feed: &Feed) {
        let mut silent = false;
        loop {
            match tokio::time::timeout(SILENCE_MAX, beats.recv()).await {
                Ok(Some(())) if silent => {
                    silent = false;
                    self.again.notify_one();
                }
                Ok(Some(())) => {}
                Ok(None) => return,
                Err(_elapsed) => {
                    silent = true;
                    self.lost(feed, SILENT);
                }
            }
        }
    }

    /// Lists and watches until something goes wrong.
    async fn follow(&self, feed: &Feed) -> anyhow::Result<Infallible> {
        let server = Server::find(&self.config, &self.datapath).await?;
        loop {
            let mut view = View::list(&server).await.context("cannot list the slices")?;
            self.tell(&mut view, feed);
            loop {
                let began = clock::now();
                let end = self.watch_on(&server, &mut view, feed).await;
                if view.due.is_some() {
                    self.tell(&mut view, feed);
                }
                let end = end.context("cannot watch the slices")?;
                tokio::time::sleep_until((began + WATCH_EVERY).into()).await;
                match end {
                    End::Time => {}
                    End::Gone => break,
                }
            }
        }
    }

    /// Takes up changes until the watch ends.
    async fn watch_on(&self, server: &Server, view: &mut View, feed: &Feed) -> anyhow::Result<End> {
        let started = server.watch(&view.version, WATCH_SECONDS);
        let Some(lines) = tokio::time::timeout(ANSWER_MAX, started).await?? else {
            return Ok(End::Gone);
        };
        let limit = Duration::from_secs(WATCH_SECONDS.into()) + ANSWER_MAX;
        tokio::time::timeout(limit, self.take_up(lines, view, feed)).await?
    }

    /// Takes up what the lines of a watch say, and tells of it once the last time is long enough ago.
    async fn take_up(
        &self,
        lines: impl Stream<Item = io::Result<String>>,
        view: &mut View,
        feed: &Feed,
    ) -> anyhow::Result<End> {
        let mut lines = pin!(lines);
        loop {
            let due = view.due.unwrap_or(view.told);
            tokio::select! {
                line = lines.next() => match line {
                    Some(Ok(line)) => {
                        if let Some(end) = view.take_up(&line)? {
                            return Ok(end);
                        }
                    }
                    Some(Err(error)) if !server::is_cut_off(&error) => return Err(error.into()),
                    Some(Err(_)) | None => return Ok(End::Time),
                },
                () = tokio::time::sleep_until(due.into()), if view.due.is_some() => {
                    self.tell(view, feed);
                }
                () = self.again.notified() => view.changed(),
            }
        }
    }

    fn tell(&self, view: &mut View, feed: &Feed) {
        match view.slices.members(&self.config) {
            Ok(list) => feed.accept(list, view.version.as_str()),
            Err(reason) => feed.refuse(format_args!("{}: {reason}", self.config.service)),
        }
        view.told = clock::now();
        view.due = None;
    }

    fn lost(&self, feed: &Feed, reason: impl std::fmt::Display) {
        feed.lost(format_args!("{}: {reason}", self.config.service));
    }
}

/// Ends when something has gone wrong: it is started again then.
impl Source for Kubernetes {
    fn watch(self: Box<Self>, feed: Feed) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let source = Arc::from(self);
            match Self::start(&source, &feed) {
                // One at a time: whatever it still waits for.
                Ok(beats) => source.attend(beats, &feed).await,
                Err(error) => source.lost(&feed, format_args!("a thread to ask with: {error}")),
            }
        })
    }
}

fn runtime() -> io::Result<Runtime> {
    runtime::Builder::new_current_thread().enable_all().build()
}

/// Says that nothing holds this thread up, for as long as somebody listens.
async fn beat(beats: &mpsc::Sender<()>) {
    while tokio::time::timeout(BEAT, beats.closed()).await.is_err() {
        // One that was not heard yet says as much.
        beats.try_send(()).ok();
    }
}

/// Whether it is written down on this host where the cluster is, for whoever asks this.
pub fn cluster_is_known(service: &discovery::Kubernetes) -> Result<(), String> {
    let (answer, answered) = blocking::channel();
    let service = service.clone();
    let look = move || {
        let cluster = |runtime: Runtime| runtime.block_on(server::cluster(&service));
        let found = runtime().map_err(anyhow::Error::from).and_then(cluster);
        answer.send(found.map(drop).map_err(|error| chain(error.as_ref()))).ok();
    };
    let started = thread::Builder::new().name("cluster".into()).spawn(look);
    started.map_err(|error| error.to_string())?;
    answered.recv_timeout(SILENCE_MAX).unwrap_or_else(|_| Err(SILENT.to_owned()))
}

/// Why a watch ended, if nothing is wrong.
enum End {
    /// The server ends each one after a while.
    Time,
    /// The version is too old, and the slices must be listed again.
    Gone,
}

/// The slices as they were at a version.
struct View {
    slices: Slices,
    version: String,
    /// When they were told last.
    told: Instant,
    /// When changes since are to be told.
    due: Option<Instant>,
}

impl View {
    async fn list(server: &Server) -> anyhow::Result<Self> {
        let Listed { metadata, items } = tokio::time::timeout(ANSWER_MAX, server.list()).await??;
        let version = metadata.resource_version;
        anyhow::ensure!(!version.is_empty(), "the list has no version");
        Ok(Self { slices: items, version, told: clock::now(), due: None })
    }

    /// Takes up what a line of a watch says. Answers whether that is its end.
    fn take_up(&mut self, line: &str) -> anyhow::Result<Option<End>> {
        let Event { kind, object } = match serde_json::from_str(line) {
            Ok(event) => event,
            // An empty line, or the last one, which was cut off.
            Err(error) if error.is_eof() => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if matches!(kind, Kind::Error) {
            let Status { message, code } = serde_json::from_str(object.get())?;
            anyhow::ensure!(code == StatusCode::GONE, "{message} ({code})");
            return Ok(Some(End::Gone));
        }
        let slice: Slice = serde_json::from_str(object.get())?;
        if !slice.metadata.resource_version.is_empty() {
            self.version.clone_from(&slice.metadata.resource_version);
        }
        match kind {
            Kind::Added | Kind::Modified => {
                self.slices.put(slice).map_err(anyhow::Error::msg)?;
                self.changed();
            }
            Kind::Deleted => {
                self.slices.remove(&slice);
                self.changed();
            }
            Kind::Bookmark | Kind::Error => {}
        }
        Ok(None)
    }

    /// What there is now is to be told.
    fn changed(&mut self) {
        self.due.get_or_insert(self.told + TELL_EVERY);
    }
}

#[cfg(test)]
mod tests;
