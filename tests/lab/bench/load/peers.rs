//! Who is measured.
//!
//! All listen on an address of the host, as a separate proxy does, with two event loops for two
//! cores. Twice more the broker runs as it is meant to, intercepting, which the others cannot do:
//! once relaying everything, and once steering in the kernel.

use std::net::SocketAddr;

use anyhow::Result;
use clap::ValueEnum;
use harness::peer::{Job, Proxy, haproxy, nginx};
use harness::{Cgroup, Daemon, Lab, Process};
use serde::Serialize;

/// Who carries the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Peer {
    /// Nobody: clients connect to the origins.
    Direct,
    /// `HAProxy` with `http-reuse always`.
    Haproxy,
    /// nginx with upstream keep-alive.
    Nginx,
    /// The broker, listening.
    Broker,
    /// The broker, intercepting and relaying.
    Relay,
    /// The broker, intercepting and steering in the kernel.
    Kernel,
}

impl Peer {
    pub(super) const ALL: [Self; 6] =
        [Self::Direct, Self::Haproxy, Self::Nginx, Self::Broker, Self::Relay, Self::Kernel];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Haproxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Broker => "broker",
            Self::Relay => "relay",
            Self::Kernel => "kernel",
        }
    }

    fn port(self) -> u16 {
        8080 + self as u16
    }
}

/// The proxies that run.
#[derive(Debug)]
pub(super) struct Peers<'a> {
    running: Vec<Running>,
    lab: &'a Lab,
}

/// One proxy. Fields are dropped in this order: the program ends before its cgroup.
#[derive(Debug)]
struct Running {
    _program: Program,
    peer: Peer,
    cgroup: Cgroup,
}

#[derive(Debug)]
enum Program {
    Peer { _process: Process },
    Broker { _daemon: Box<Daemon> },
}

impl<'a> Peers<'a> {
    /// Starts those that are asked for.
    pub(super) fn start(lab: &'a Lab, peers: &[Peer]) -> Result<Self> {
        let mut running = Vec::new();
        for &peer in peers {
            let listen = SocketAddr::new(lab.host_ip(), peer.port());
            let origins = lab.all_origins();
            let cgroup = lab.party(peer.name())?;
            let proxy = Proxy {
                lab,
                cgroup: &cgroup,
                listen,
                origins: &origins,
                workers: 2,
                job: Job::Throughput,
            };
            let program = match peer {
                Peer::Direct => continue,
                Peer::Haproxy => Program::Peer { _process: haproxy::start(&proxy)? },
                Peer::Nginx => Program::Peer { _process: nginx::start(&proxy)? },
                Peer::Broker | Peer::Relay | Peer::Kernel => {
                    let config = broker_config(lab, peer, listen, &origins);
                    let daemon = Daemon::start_as(lab, &cgroup, &config)?;
                    Program::Broker { _daemon: Box::new(daemon) }
                }
            };
            running.push(Running { _program: program, peer, cgroup });
        }
        Ok(Self { running, lab })
    }

    /// Where clients connect to.
    pub(super) fn targets(&self, peer: Peer) -> Vec<SocketAddr> {
        match peer {
            Peer::Direct => self.lab.all_origins(),
            _ => vec![SocketAddr::new(self.lab.host_ip(), peer.port())],
        }
    }

    /// Whose processor time is the proxy's.
    pub(super) fn cgroup(&self, peer: Peer) -> Option<&Cgroup> {
        self.running.iter().find(|proxy| proxy.peer == peer).map(|proxy| &proxy.cgroup)
    }
}

/// An address of the host that nobody listens on does as a virtual one.
fn broker_config(lab: &Lab, peer: Peer, address: SocketAddr, origins: &[SocketAddr]) -> String {
    let clients = match peer {
        Peer::Relay | Peer::Kernel => format!(
            "intercept = [\"{address}\"]\ncgroups = [{:?}]\nsteer = {:?}",
            lab.clients_cgroup.path(),
            peer.name()
        ),
        _ => format!("listen = [\"{address}\"]"),
    };
    let origins: Vec<_> = origins.iter().map(ToString::to_string).collect();
    format!(
        r#"workers = 2

[[service]]
name = "web"
{clients}
protocol = "http1"
origins = {origins:?}

[service.pool]
max_requests = 1000000000
"#
    )
}
