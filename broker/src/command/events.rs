//! `broker events`: what happened to origins and limits, from a running daemon.

use std::io::Write;
use std::path::PathBuf;

use anyhow::ensure;
use hyper::{Method, StatusCode};

use crate::admin::client::request;
use crate::config::ADMIN_SOCKET;

/// Arguments of `broker events`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The daemon's admin socket.
    #[arg(long, value_name = "PATH", default_value = ADMIN_SOCKET)]
    pub socket: PathBuf,
}

/// Writes the last events, one JSON object per line, oldest first.
pub async fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<()> {
    let (status, lines) = request(&args.socket, Method::GET, "/v1/events").await?;
    ensure!(status == StatusCode::OK, "the daemon answered {status}");
    out.write_all(&lines)?;
    Ok(())
}
