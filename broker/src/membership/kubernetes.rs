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
//! The account needs the verbs `list` and `watch` on `endpointslices` in the namespace.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::StreamExt as _;
use hyper::Uri;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::client::ConfigExt as _;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Api, Client, Config};
use tower::{BoxError, ServiceBuilder};

use super::{Feed, Health, List, Member, Source, document, rng};
use crate::chain;
use crate::clock;
use crate::config::discovery::{self, Port};
use crate::datapath::Datapath;
use crate::outbound;
use crate::pool::backoff::Backoff;

/// The server ends a watch after this time, and it is resumed. A server that has gone without a
/// word is noticed soon after.
const WATCH_SECONDS: u32 = 60;

/// How long the server may take to answer, or to end a watch after [`WATCH_SECONDS`].
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Watches begin no more often than this, whatever ends them.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// After the first failure in a row, and after many.
const RETRY_MIN: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// A service to watch.
pub struct Kubernetes {
    config: discovery::Kubernetes,
    datapath: Arc<dyn Datapath>,
}

impl Kubernetes {
    /// The service that the configuration says. Sockets are marked in `datapath` as the broker's own.
    #[must_use]
    pub fn new(config: discovery::Kubernetes, datapath: Arc<dyn Datapath>) -> Self {
        Self { config, datapath }
    }

    /// Lists and watches until something goes wrong.
    async fn follow(&self, feed: &Feed) -> anyhow::Result<Infallible> {
        let api = self.api().await?;
        loop {
            let mut view = self.list(&api).await?;
            self.tell(&view, feed);
            loop {
                let began = clock::now();
                let end = self.watch_on(&api, &mut view, feed).await?;
                tokio::time::sleep_until((began + WATCH_EVERY).into()).await;
                match end {
                    End::Time => {}
                    End::Gone => break,
                }
            }
        }
    }

    /// Everything is read anew for each try: certificates and tokens are replaced.
    async fn api(&self) -> anyhow::Result<Api<EndpointSlice>> {
        let config = cluster(&self.config).await?;
        let namespace = self.config.namespace.as_ref().unwrap_or(&config.default_namespace).clone();
        Ok(Api::namespaced(self.client(&config)?, &namespace))
    }

    /// As kube's own client, with sockets that are marked. It retries nothing: that is done here, where
    /// it is told of.
    fn client(&self, config: &Config) -> anyhow::Result<Client> {
        let datapath = Arc::clone(&self.datapath);
        let connector = tower::service_fn(move |uri: Uri| {
            let datapath = Arc::clone(&datapath);
            async move { outbound::dial(&uri, &*datapath).await.map(TokioIo::new) }
        });
        let connector = config.rustls_https_connector_with_connector(connector)?;
        let service = ServiceBuilder::new()
            .layer(config.base_uri_layer())
            .option_layer(config.auth_layer()?)
            .layer(config.extra_headers_layer()?)
            .map_err(BoxError::from)
            .service(legacy::Client::builder(TokioExecutor::new()).build(connector));
        Ok(Client::new(service, config.default_namespace.clone()))
    }

    fn selector(&self) -> String {
        format!("kubernetes.io/service-name={}", self.config.service)
    }

    /// All slices at one time.
    async fn list(&self, api: &Api<EndpointSlice>) -> anyhow::Result<View> {
        let list = tokio::time::timeout(
            ANSWER_MAX,
            api.list(&ListParams::default().labels(&self.selector())),
        )
        .await
        .context("cannot list the slices")?
        .context("cannot list the slices")?;
        let version = list.metadata.resource_version.context("the list has no version")?;
        let named =
            list.items.into_iter().map(|s| (s.metadata.name.clone().unwrap_or_default(), s));
        Ok(View { slices: named.collect(), version })
    }

    /// Takes up changes until the watch ends.
    async fn watch_on(
        &self,
        api: &Api<EndpointSlice>,
        view: &mut View,
        feed: &Feed,
    ) -> anyhow::Result<End> {
        const WHAT: &str = "cannot watch the slices";
        let params = WatchParams::default().labels(&self.selector()).timeout(WATCH_SECONDS);
        let started = tokio::time::timeout(ANSWER_MAX, api.watch(&params, &view.version)).await;
        let mut events = match started.context(WHAT)? {
            Ok(events) => pin!(events),
            Err(kube::Error::Api(status)) if status.code == GONE => return Ok(End::Gone),
            Err(error) => return Err(error).context(WHAT),
        };
        let silence = Duration::from_secs(WATCH_SECONDS.into()) + ANSWER_MAX;
        while let Some(event) = tokio::time::timeout(silence, events.next()).await.context(WHAT)? {
            match event.context(WHAT)? {
                WatchEvent::Added(slice) | WatchEvent::Modified(slice) => {
                    view.version = slice.metadata.resource_version.clone().unwrap_or_default();
                    let name = slice.metadata.name.clone().unwrap_or_default();
                    view.slices.insert(name, slice);
                    self.tell(view, feed);
                }
                WatchEvent::Deleted(slice) => {
                    view.version = slice.metadata.resource_version.unwrap_or_default();
                    view.slices.remove(&slice.metadata.name.unwrap_or_default());
                    self.tell(view, feed);
                }
                WatchEvent::Bookmark(bookmark) => {
                    view.version = bookmark.metadata.resource_version;
                }
                WatchEvent::Error(status) if status.code == GONE => return Ok(End::Gone),
                WatchEvent::Error(status) => {
                    anyhow::bail!("{WHAT}: {} ({})", status.message, status.code);
                }
            }
        }
        Ok(End::Time)
    }

    fn tell(&self, view: &View, feed: &Feed) {
        match membership(view.slices.values(), &self.config.port, self.config.zone.as_deref()) {
            Ok(list) => feed.accept(list, view.version.as_str()),
            Err(reason) => feed.refuse(format_args!("{}: {reason}", self.config.service)),
        }
    }
}

impl Source for Kubernetes {
    fn watch(self: Box<Self>, feed: Feed) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let mut backoff = Backoff::new(RETRY_MIN, RETRY_MAX);
            let mut rng = rng();
            while !feed.is_closed() {
                let began = clock::now();
                let Err(error) = self.follow(&feed).await;
                let now = clock::now();
                // A list alone is no success: it may be that watching is what is not permitted.
                if now - began > RETRY_MAX {
                    backoff.succeed();
                }
                let error = chain(error.as_ref());
                feed.lost(format_args!("{}: {error}", self.config.service));
                tokio::time::sleep(backoff.fail(now, &mut rng)).await;
            }
        })
    }
}

/// Where the cluster is, and who asks there, as it is written down now.
async fn cluster(service: &discovery::Kubernetes) -> anyhow::Result<Config> {
    let discovery::Kubernetes { kubeconfig, context, .. } = service;
    let options = KubeConfigOptions { context: context.clone(), ..KubeConfigOptions::default() };
    let config = match (kubeconfig, context) {
        (Some(path), _) => {
            let what = || path.display().to_string();
            let file = Kubeconfig::read_from(path).map_err(|error| match error {
                // The path is said below.
                KubeconfigError::ReadConfig(source, _) => source.into(),
                error => anyhow::Error::new(error),
            });
            let file = file.with_context(what)?;
            Config::from_custom_kubeconfig(file, &options).await.with_context(what)?
        }
        (None, Some(_)) => Config::from_kubeconfig(&options).await?,
        (None, None) => Config::infer().await?,
    };
    if let Some(proxy) = &config.proxy_url {
        anyhow::bail!("the API server is behind a proxy, which is not supported: {proxy}");
    }
    Ok(config)
}

/// Whether it is written down on this host, for whoever asks this.
pub fn cluster_is_known(service: &discovery::Kubernetes) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    match runtime.block_on(cluster(service)) {
        Ok(_) => Ok(()),
        Err(error) => Err(chain(error.as_ref())),
    }
}

/// HTTP's status for a version that the server has forgotten: there is nothing to resume from.
const GONE: u16 = 410;

/// Why a watch ended, if nothing is wrong.
enum End {
    /// The server ends each one after a while.
    Time,
    /// The version is too old, and the slices must be listed again.
    Gone,
}

/// The slices, by name, as they were at a version.
struct View {
    slices: BTreeMap<String, EndpointSlice>,
    version: String,
}

/// The members in the slices, and how many slices were passed over.
///
/// A slice that cannot be used (no such port, or names instead of addresses) is passed over as long
/// as there are others: pods of several versions may be behind one service. If no slice can be used,
/// or what a usable one says cannot be, the list is refused.
fn membership<'a>(
    slices: impl Iterator<Item = &'a EndpointSlice>,
    port: &Port,
    zone: Option<&str>,
) -> Result<List, String> {
    let mut endpoints = Vec::new();
    let (mut usable, mut named, mut portless) = (0, 0, 0);
    let mut ports = BTreeSet::new();
    for slice in slices.filter(|slice| !slice.endpoints.is_empty()) {
        if !matches!(slice.address_type.as_str(), "IPv4" | "IPv6") {
            named += 1;
            continue;
        }
        let Some(number) = number(slice, port) else {
            portless += 1;
            ports.extend(slice.ports.iter().flatten().map(|port| {
                let name = port.name.as_deref().unwrap_or_default();
                format!("{name:?} {}", port.port.unwrap_or_default())
            }));
            continue;
        };
        usable += 1;
        endpoints.extend(slice.endpoints.iter().map(|endpoint| (endpoint, number)));
    }
    if usable == 0 && named + portless > 0 {
        let mut reasons = Vec::new();
        if portless > 0 {
            let ports = Vec::from_iter(ports).join(", ");
            reasons.push(format!("{portless} have no TCP port {} (but: {ports})", Shown(port)));
        }
        if named > 0 {
            reasons.push(format!("{named} have names instead of addresses"));
        }
        return Err(format!("no slice can be used: {}", reasons.join(", ")));
    }
    let zone =
        zone.filter(|zone| hints_hold(endpoints.iter().map(|(endpoint, _)| *endpoint), zone));
    let (mut members, mut elsewhere) = (Vec::new(), 0);
    for (endpoint, number) in endpoints {
        // Also of those that are left out: a list that is wrong anywhere is refused.
        let member = member(endpoint, number)?;
        if zone.is_some_and(|zone| is_for_others(endpoint, zone)) {
            elsewhere += 1;
        } else {
            members.push(member);
        }
    }
    let passed_over = [
        ("slices_of_names", named),
        ("slices_without_port", portless),
        ("hinted_to_other_zones", elsewhere),
    ];
    Ok(List {
        membership: document::membership(members)?,
        left_out: passed_over.into_iter().filter(|(_, count)| *count > 0).collect(),
    })
}

/// Whether hints can be gone by in a zone: all that is ready has some, and some of it names the zone.
fn hints_hold<'a>(mut endpoints: impl Iterator<Item = &'a Endpoint>, zone: &str) -> bool {
    let mut named = false;
    endpoints.all(|endpoint| {
        let ready = endpoint.conditions.as_ref().and_then(|c| c.ready).unwrap_or(true);
        let mut zones = zones_of(endpoint).peekable();
        let hinted = zones.peek().is_some();
        named |= ready && zones.any(|name| name == zone);
        hinted || !ready
    }) && named
}

/// Whether an endpoint has hints, and none of them names the zone.
fn is_for_others(endpoint: &Endpoint, zone: &str) -> bool {
    zones_of(endpoint).next().is_some() && !zones_of(endpoint).any(|name| name == zone)
}

/// The zones that should use an endpoint.
fn zones_of(endpoint: &Endpoint) -> impl Iterator<Item = &str> {
    let zones = endpoint.hints.as_ref().and_then(|hints| hints.for_zones.as_ref());
    zones.into_iter().flatten().map(|zone| zone.name.as_str())
}

/// The number of the port in the pods of a slice.
fn number(slice: &EndpointSlice, port: &Port) -> Option<u32> {
    let tcp =
        slice.ports.iter().flatten().filter(|p| p.protocol.as_deref().unwrap_or("TCP") == "TCP");
    let mut numbers = tcp.filter_map(|candidate| {
        // Without a number a port stands for all of them.
        let number = candidate.port.and_then(|number| u32::try_from(number).ok());
        match port {
            Port::Named(name) => number.filter(|_| candidate.name.as_ref() == Some(name)),
            Port::Number(wanted) => {
                let wanted = u32::from(*wanted);
                (number.unwrap_or(wanted) == wanted).then_some(wanted)
            }
        }
    });
    numbers.next()
}

fn member(endpoint: &Endpoint, port: u32) -> Result<Member, String> {
    // Those after the first have no meaning (the API's documentation of `addresses`).
    let text = endpoint.addresses.first().map(String::as_str).unwrap_or_default();
    let ip: IpAddr = text.parse().map_err(|_e| format!("{text:?}: must be an IP address"))?;
    let address: SocketAddr = document::address(ip, port)?;
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    // What is missing is to be taken so (the API's documentation of `conditions`).
    let ready = conditions.ready.unwrap_or(true);
    let serving = conditions.serving.unwrap_or(ready);
    let terminating = conditions.terminating.unwrap_or(false);
    let mut member = Member {
        zone: endpoint.zone.clone(),
        health: if ready {
            Health::Healthy
        } else if serving && terminating {
            Health::Draining
        } else {
            Health::Unhealthy
        },
        ..Member::at(address)
    };
    if let Some(hostname) = endpoint.hostname.as_deref().filter(|name| !name.is_empty()) {
        member.identity = format!("{hostname}:{port}");
    }
    Ok(member)
}

/// A port as the configuration writes it.
struct Shown<'a>(&'a Port);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Port::Named(name) => write!(f, "{name:?}"),
            Port::Number(number) => write!(f, "{number}"),
        }
    }
}

#[cfg(test)]
mod tests;
