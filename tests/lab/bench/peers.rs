//! Who takes part in `limits` and `faults`: the broker on each of its data paths, and its peers.

use std::net::SocketAddr;

use anyhow::Result;
use clap::ValueEnum;
use harness::peer::{Job, Proxy, envoy, haproxy, nginx};
use harness::{Cgroup, Daemon, Lab, Process};
use serde::Serialize;

/// A proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Peer {
    Broker,
    Haproxy,
    Nginx,
    Envoy,
}

impl Peer {
    pub(super) const ALL: [Self; 4] = [Self::Broker, Self::Haproxy, Self::Nginx, Self::Envoy];

    fn name(self) -> &'static str {
        match self {
            Self::Broker => "broker",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Envoy => "envoy",
        }
    }
}

/// Who moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum DataPath {
    /// The proxy's process.
    Relay,
    /// The kernel, for what it can.
    Kernel,
}

impl DataPath {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Relay => "relay",
            Self::Kernel => "kernel",
        }
    }
}

/// A proxy on one of its data paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Party {
    pub(super) peer: Peer,
    pub(super) data_path: DataPath,
}

impl Party {
    /// All data paths of `peers`.
    pub(super) fn all(peers: &[Peer]) -> Vec<Self> {
        let paths = |&peer: &Peer| {
            let paths: &[DataPath] = match peer {
                Peer::Broker => &[DataPath::Relay, DataPath::Kernel],
                _ => &[DataPath::Relay],
            };
            paths.iter().map(move |&data_path| Self { peer, data_path })
        };
        peers.iter().flat_map(paths).collect()
    }

    pub(super) fn is_broker(self) -> bool {
        self.peer == Peer::Broker
    }

    /// For people.
    pub(super) fn name(self) -> String {
        match self.peer {
            Peer::Broker => format!("broker {}", self.data_path.name()),
            _ => self.peer.name().to_owned(),
        }
    }
}

/// How a party is to run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    pub(super) job: Job,
    pub(super) workers: usize,
    /// Sockets that each worker of the broker opens to each origin before any request.
    pub(super) prewarm: usize,
}

/// A party that runs. Fields are dropped in this order: the program ends before its cgroup.
#[derive(Debug)]
pub(super) struct Running {
    program: Program,
    pub(super) cgroup: Cgroup,
    /// Where clients connect to.
    pub(super) target: SocketAddr,
}

#[derive(Debug)]
enum Program {
    Peer { _process: Process },
    Broker { daemon: Box<Daemon> },
}

impl Running {
    pub(super) fn start(lab: &Lab, party: Party, setting: Setting) -> Result<Self> {
        let cgroup = lab.party(party.peer.name())?;
        let target = SocketAddr::new(lab.host_ip(), 8080);
        let Setting { job, workers, .. } = setting;
        let origins = lab.all_origins();
        let proxy = Proxy { lab, cgroup: &cgroup, listen: target, origins: &origins, workers, job };
        let program = match party.peer {
            Peer::Broker => {
                let config = broker_config(&proxy, party.data_path, setting.prewarm);
                let daemon = Daemon::start_as(lab, &cgroup, &config)?;
                Program::Broker { daemon: Box::new(daemon) }
            }
            Peer::Haproxy => Program::Peer { _process: haproxy::start(&proxy)? },
            Peer::Nginx => Program::Peer { _process: nginx::start(&proxy)? },
            Peer::Envoy => Program::Peer { _process: envoy::start(&proxy)? },
        };
        Ok(Self { program, cgroup, target })
    }

    /// Requests that the kernel carried, if this is the broker.
    pub(super) fn steered(&self) -> Result<Option<u64>> {
        match &self.program {
            Program::Peer { .. } => Ok(None),
            Program::Broker { daemon } => Ok(Some(daemon.service()?.steered)),
        }
    }
}

/// An address of the host that nobody listens on does as a virtual one.
fn broker_config(proxy: &Proxy<'_>, data_path: DataPath, prewarm: usize) -> String {
    let job = match proxy.job {
        Job::Throughput => String::new(),
        Job::Limit(limit) => format!("[service.limits]\nmax_connections = {limit}\n"),
        // One of eight may be left out; the default of 10 % would leave nobody out. What is said of
        // rates is what the README recommends for a fleet of equals.
        Job::Faults => "[service.outlier]
max_ejection_percent = 20
stall_time = \"200ms\"
enforcing_success_rate = 0
failure_percentage_threshold = 10
enforcing_failure_percentage = 100
"
        .to_owned(),
    };
    format!(
        r#"workers = {workers}

[[service]]
name = "web"
protocol = "http1"
intercept = ["{address}"]
cgroups = [{clients:?}]
steer = "{data_path}"
origins = {origins:?}

[service.pool]
max_requests = 1000000000
prewarm = {prewarm}
queue_timeout = "30s"

{job}"#,
        workers = proxy.workers,
        address = proxy.listen,
        clients = proxy.lab.clients_cgroup.path(),
        data_path = data_path.name(),
        origins = proxy.origins.iter().map(ToString::to_string).collect::<Vec<_>>(),
    )
}
