//! A real etcd, as a registry of gateways.

use std::io::{self, Write as _};
use std::net::{SocketAddr, TcpStream};
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

/// How long a start and a stop may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A single member of its own cluster on the lab's host. What it knows outlives a stop.
#[derive(Debug)]
pub struct Etcd {
    netns: Netns,
    data: PathBuf,
    process: Option<Process>,
}

impl Etcd {
    /// Starts it, knowing nothing.
    pub fn start(lab: &Lab) -> Result<Self> {
        let data = tempfile::Builder::new().prefix("etcd-").tempdir_in(lab.directory())?.keep();
        let mut etcd = Self { netns: lab.host.clone(), data, process: None };
        etcd.resume()?;
        Ok(etcd)
    }

    /// Starts it again, with what it knew.
    pub fn resume(&mut self) -> Result<()> {
        let address = SocketAddr::from(([127, 0, 0, 1], 2379));
        let peers = "http://127.0.0.1:2380";
        let mut process = Launch::new("etcd")
            .args(["--name", "it", "--data-dir"])
            .arg(&self.data)
            .args(["--listen-client-urls", ENDPOINT, "--advertise-client-urls", ENDPOINT])
            .args(["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers])
            .args(["--initial-cluster", &format!("it={peers}")])
            .netns(&self.netns)
            .spawn()?;
        listening(&self.netns, address, &mut process)?;
        // It listens before it has elected itself, and answers nothing until then.
        ensure!(within(PATIENCE, || healthy(&self.netns, address)), process.stderr());
        self.process = Some(process);
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

fn healthy(netns: &Netns, address: SocketAddr) -> bool {
    let ask = || {
        let mut socket = TcpStream::connect(address)?;
        socket.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
        io::read_to_string(socket)
    };
    netns.run(ask).is_ok_and(|answer| answer.contains(r#""health":"true""#))
}
