//! Where the members of a service come from, if its configuration does not name them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::tls::Tls;

/// A source of members, and how its changes are taken.
#[derive(Clone, Debug)]
pub struct Discovery {
    /// The source.
    pub source: Source,
    /// A change is taken up when nothing has changed any more for this long.
    pub debounce: Duration,
    /// A change is taken up after this long at the latest.
    pub debounce_max: Duration,
    /// What an empty list means.
    pub on_empty: OnEmpty,
}

/// What an empty list means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnEmpty {
    /// More likely a mistake than the truth: the members before it stay.
    #[default]
    Keep,
    /// There are no origins; clients are refused.
    Drop,
}

/// Where members come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A file that is replaced when they change.
    File(File),
    /// A name.
    Dns(Dns),
    /// A service of a Kubernetes cluster.
    Kubernetes(Kubernetes),
    /// An xDS control plane.
    Eds(Eds),
}

impl Source {
    /// Its name in the configuration.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::Dns(_) => "dns",
            Self::Kubernetes(_) => "kubernetes",
            Self::Eds(_) => "eds",
        }
    }
}

/// A file with the members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its path. The content says by itself which form it has (see
    /// [`crate::membership::document`]).
    pub path: PathBuf,
}

/// A name with the members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dns {
    /// The name, in full: search domains do not apply to it.
    pub name: String,
    /// What is asked for.
    pub records: Records,
    /// Who is asked; if empty, who `/etc/resolv.conf` says.
    pub resolvers: Vec<SocketAddr>,
    /// Answers are kept for this long at least, whatever their TTL.
    pub refresh_min: Duration,
    /// Answers are kept for this long at most, whatever their TTL.
    pub refresh_max: Duration,
}

/// Records that a name has for its members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Records {
    /// Addresses; a port comes with none of them.
    Addresses {
        /// The port of all members.
        port: u16,
        /// Which addresses.
        families: Families,
    },
    /// Names, ports, weights and priorities (RFC 2782).
    Srv,
}

/// Kinds of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Families {
    /// A and AAAA.
    Both,
    /// A.
    V4,
    /// AAAA.
    V6,
}

/// A service of a Kubernetes cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kubernetes {
    /// Its name.
    pub service: String,
    /// Its namespace. `None`: the one that the credentials belong to.
    pub namespace: Option<String>,
    /// Which of the ports of its pods.
    pub port: Port,
    /// Where the cluster and the credentials are described. `None`: `$KUBECONFIG`,
    /// `~/.kube/config`, or the service account of the pod that the daemon runs in.
    pub kubeconfig: Option<PathBuf>,
    /// The zone that this gateway is in, to go by the hints of endpoints. `None`: they are not read.
    pub zone: Option<String>,
    /// Which of the contexts in there. `None`: the current one.
    pub context: Option<String>,
}

/// A port of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Port {
    /// By its name in the service; pods may have different numbers for it.
    Named(String),
    /// By its number in the pods, which is the service's `targetPort`.
    Number(u16),
}

/// The endpoints of a cluster, from an xDS control plane (`envoy.service.endpoint.v3`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Eds {
    /// `http://host:port` or `https://host:port` of the control plane.
    pub server: String,
    /// For `https`.
    pub tls: Tls,
    /// The cluster's name there.
    pub cluster: String,
    /// Who asks: control planes decide by it what they say.
    pub node_id: String,
    /// The group of those who ask alike.
    pub node_cluster: String,
    /// Whether it is asked through the aggregated service (ADS), or that of EDS alone.
    pub aggregated: bool,
    /// The form of the protocol.
    pub api: EdsApi,
    /// A server that has said nothing for so long is reported as lost; it is waited for.
    pub initial_fetch_timeout: Duration,
}

/// Forms of the xDS protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EdsApi {
    /// State of the world: every answer has whole resources.
    #[default]
    Whole,
    /// Incremental.
    Delta,
}
