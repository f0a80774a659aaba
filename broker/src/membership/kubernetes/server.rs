//! The API server: where it is, who asks there, and how much of its answers is read.
//!
//! `kube` knows kubeconfigs, credentials and paths. Its own `Api` reads answers and lines whatever their
//! length, so they are read here.

use std::error::Error as StdError;
use std::io::{self, ErrorKind};
use std::sync::Arc;

use anyhow::Context as _;
use futures_util::{Stream, TryStreamExt as _};
use http_body_util::BodyExt as _;
use hyper::{Response, StatusCode, Uri};
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{ListParams, Request, WatchParams};
use kube::client::{Body, ConfigExt as _};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config, Resource as _};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio_util::codec::{FramedRead, LinesCodec, LinesCodecError};
use tokio_util::io::StreamReader;
use tower::{BoxError, ServiceBuilder};

use super::super::document::BYTES_MAX;
use super::slices::Listed;
use crate::config::discovery;
use crate::datapath::Datapath;
use crate::outbound;

/// The slices of a service at an API server.
pub(super) struct Server {
    client: Client,
    slices: Request,
    selector: String,
}

/// A line of a watch: `object` is what its kind says.
#[derive(Deserialize)]
pub(super) struct Event<'a> {
    #[serde(rename = "type")]
    pub(super) kind: Kind,
    #[serde(borrow)]
    pub(super) object: &'a RawValue,
}

#[derive(Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum Kind {
    Added,
    Modified,
    Deleted,
    /// Nothing has changed up to the version of this slice, which is empty otherwise.
    Bookmark,
    /// The object is a [`Status`].
    Error,
}

/// What the server says is wrong.
#[derive(Deserialize)]
pub(super) struct Status {
    #[serde(default)]
    pub(super) message: String,
    #[serde(default)]
    pub(super) code: u16,
}

impl Server {
    /// Everything is read anew for each: certificates and tokens are replaced.
    pub(super) async fn find(
        service: &discovery::Kubernetes,
        datapath: &Arc<dyn Datapath>,
    ) -> anyhow::Result<Self> {
        let config = cluster(service).await?;
        let namespace = service.namespace.as_ref().unwrap_or(&config.default_namespace);
        Ok(Self {
            client: client(&config, datapath)?,
            slices: Request::new(EndpointSlice::url_path(&(), Some(namespace))),
            selector: format!("kubernetes.io/service-name={}", service.service),
        })
    }

    /// All slices.
    pub(super) async fn list(&self) -> anyhow::Result<Listed> {
        let request = self.slices.list(&ListParams::default().labels(&self.selector))?;
        let body = good(self.client.send(request.map(Body::from)).await?).await?;
        Ok(serde_json::from_slice(&read(body).await?)?)
    }

    /// The lines that tell of changes from a version on, for so many seconds; none, if the server has
    /// forgotten that version.
    pub(super) async fn watch(
        &self,
        version: &str,
        seconds: u32,
    ) -> anyhow::Result<Option<impl Stream<Item = io::Result<String>> + use<>>> {
        let params = WatchParams::default().labels(&self.selector).timeout(seconds);
        let request = self.slices.watch(&params, version)?;
        let response = self.client.send(request.map(Body::from)).await?;
        if response.status() == StatusCode::GONE {
            return Ok(None);
        }
        let bytes = good(response).await?.into_data_stream().map_err(io::Error::other);
        let lines = LinesCodec::new_with_max_length(BYTES_MAX);
        let lines = FramedRead::new(StreamReader::new(bytes), lines);
        Ok(Some(lines.map_err(|error| match error {
            LinesCodecError::Io(error) => error,
            LinesCodecError::MaxLineLengthExceeded => {
                io::Error::other(format!("a line of more than {BYTES_MAX} bytes"))
            }
        })))
    }
}

/// The body of an answer that is what was asked for.
async fn good(response: Response<Body>) -> anyhow::Result<Body> {
    let status = response.status();
    if status.is_success() {
        return Ok(response.into_body());
    }
    let body = read(response.into_body()).await?;
    let text = match serde_json::from_slice::<Status>(&body) {
        Ok(status) if !status.message.is_empty() => status.message,
        // Of something in between.
        _ => String::from_utf8_lossy(&body).trim().to_owned(),
    };
    anyhow::bail!("{status}: {text}")
}

async fn read(body: Body) -> anyhow::Result<Vec<u8>> {
    let mut pieces = body.into_data_stream();
    let mut all = Vec::new();
    while let Some(piece) = pieces.try_next().await? {
        all.extend_from_slice(&piece);
        anyhow::ensure!(all.len() <= BYTES_MAX, "an answer of more than {BYTES_MAX} bytes");
    }
    Ok(all)
}

/// Whether the stream has ended in the middle: a connection that was cut, or a proxy that has had enough.
pub(super) fn is_cut_off(error: &io::Error) -> bool {
    let mut next: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(error) = next {
        let io = error.downcast_ref::<io::Error>();
        if io.is_some_and(|io| io.kind() == ErrorKind::UnexpectedEof) {
            return true;
        }
        next = error.source();
    }
    false
}

/// As kube's own client, with sockets that are marked in `datapath`. It retries nothing: that is done
/// where it is told of.
fn client(config: &Config, datapath: &Arc<dyn Datapath>) -> anyhow::Result<Client> {
    let datapath = Arc::clone(datapath);
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

/// Where the cluster is, and who asks there, as it is written down now.
pub(super) async fn cluster(service: &discovery::Kubernetes) -> anyhow::Result<Config> {
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
