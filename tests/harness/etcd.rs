//! A real etcd, as a registry of gateways.

use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;

use crate::lab::Lab;
use crate::netns::Netns;
use crate::origin::listening;
use crate::process::{Launch, Process};
use crate::wait::within;

/// Where clients of the lab's host reach it.
pub const ENDPOINT: &str = "http://127.0.0.1:2379";

/// The same, if it speaks TLS.
pub const TLS_ENDPOINT: &str = "https://127.0.0.1:2379";

/// Where it answers how it is, in the clear in any case.
const HEALTH: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 2381);

/// How long a start and a stop may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A single member of its own cluster on the lab's host. What it knows outlives a stop.
#[derive(Debug)]
pub struct Etcd {
    netns: Netns,
    data: PathBuf,
    tls: Option<Tls>,
    process: Option<Process>,
}

/// How clients are spoken to.
#[derive(Clone, Debug)]
pub struct Tls {
    /// Files with the server's certificate and its key.
    pub certificate: [PathBuf; 2],
    /// A file with the authority of clients' certificates.
    pub clients: PathBuf,
}

impl Etcd {
    /// Starts it, knowing nothing.
    pub fn start(lab: &Lab) -> Result<Self> {
        Self::start_with(lab, None)
    }

    /// Starts one that talks to nobody but clients with a certificate.
    pub fn start_with_tls(lab: &Lab, tls: Tls) -> Result<Self> {
        Self::start_with(lab, Some(tls))
    }

    fn start_with(lab: &Lab, tls: Option<Tls>) -> Result<Self> {
        let data = tempfile::Builder::new().prefix("etcd-").tempdir_in(lab.directory())?.keep();
        let mut etcd = Self { netns: lab.host.clone(), data, tls, process: None };
        etcd.resume()?;
        Ok(etcd)
    }

    /// Starts it again, with what it knew.
    pub fn resume(&mut self) -> Result<()> {
        let address = SocketAddr::from(([127, 0, 0, 1], 2379));
        let peers = "http://127.0.0.1:2380";
        let endpoint = if self.tls.is_some() { TLS_ENDPOINT } else { ENDPOINT };
        let mut launch = Launch::new("etcd")
            .args(["--name", "it", "--data-dir"])
            .arg(&self.data)
            .args(["--listen-client-urls", endpoint, "--advertise-client-urls", endpoint])
            .args(["--listen-metrics-urls", &format!("http://{HEALTH}")])
            .args(["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers])
            .args(["--initial-cluster", &format!("it={peers}")]);
        if let Some(Tls { certificate: [certificate, key], clients }) = &self.tls {
            launch = launch.args(["--client-cert-auth", "--trusted-ca-file"]).arg(clients);
            launch = launch.arg("--cert-file").arg(certificate).arg("--key-file").arg(key);
        }
        let mut process = launch.netns(&self.netns).spawn()?;
        listening(&self.netns, address, &mut process)?;
        // It listens before it has elected itself, and answers nothing until then.
        ensure!(within(PATIENCE, || healthy(&self.netns)), process.stderr());
        self.process = Some(process);
        Ok(())
    }

    /// Asks its gateway from JSON to gRPC; an error is what it says if that is not good.
    pub fn post(&self, path: &str, body: &str) -> Result<()> {
        let request = format!(
            "POST {path} HTTP/1.0\r\nhost: etcd\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = self.netns.run(|| {
            let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, 2379))?;
            socket.write_all(request.as_bytes())?;
            io::read_to_string(socket)
        })?;
        ensure!(answer.starts_with("HTTP/1.0 200"), "{path}: {answer}");
        Ok(())
    }

    /// Ends it.
    pub fn stop(&mut self) -> Result<()> {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        process.signal(Signal::SIGTERM)?;
        process.wait(PATIENCE).map(drop)
    }

    /// Makes it hang: connections stay open, and nothing answers.
    pub fn freeze(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    /// Ends that.
    pub fn thaw(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    /// Forgets everything: the next start is that of a new cluster.
    pub fn forget(&mut self) -> Result<()> {
        ensure!(self.process.is_none(), "it is running");
        std::fs::remove_dir_all(&self.data)?;
        Ok(std::fs::create_dir(&self.data)?)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        self.process.as_ref().map_or(Ok(()), |process| process.signal(signal))
    }
}

fn healthy(netns: &Netns) -> bool {
    let ask = || {
        let mut socket = TcpStream::connect(HEALTH)?;
        socket.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
        io::read_to_string(socket)
    };
    netns.run(ask).is_ok_and(|answer| answer.contains(r#""health":"true""#))
}
