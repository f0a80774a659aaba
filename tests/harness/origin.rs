//! Servers for the broker to talk to: real ones, and one that does as it is told.

pub mod census;
pub mod nginx;
pub mod scripted;

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Result, bail};

use crate::netns::Netns;
use crate::process::Process;
use crate::wait::within;

/// Waits until something accepts connections at `address`. Costs the listener one handshake.
pub(crate) fn listening(netns: &Netns, address: SocketAddr, server: &mut Process) -> Result<()> {
    let up = within(Duration::from_secs(10), || {
        !server.is_running()
            || netns.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok())
    });
    if up && server.is_running() {
        return Ok(());
    }
    bail!("nothing listens at {address}\n{}", server.stderr())
}
