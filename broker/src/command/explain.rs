//! `broker explain`: why do the clients of a service fail, though its routing is right?

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;

use crate::admin::fetch_snapshot;
use crate::config::ADMIN_SOCKET;
use crate::report::Style;
use crate::report::explain::{explain, render};

/// Arguments of `broker explain`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The service.
    pub service: String,
    /// The daemon's admin socket.
    #[arg(long, value_name = "PATH", default_value = ADMIN_SOCKET)]
    pub socket: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// How long to look for what is rising.
    #[arg(long, value_name = "SECS", default_value = "1", value_parser = super::interval)]
    pub over: Duration,
}

/// Runs the command.
pub async fn run(args: &Args, style: Style, out: &mut impl Write) -> anyhow::Result<()> {
    let before = fetch_snapshot(&args.socket).await?;
    tokio::time::sleep(args.over).await;
    let now = fetch_snapshot(&args.socket).await?;
    let Some(findings) = explain(&args.service, &before, &now) else {
        let known: Vec<_> = now.services.iter().map(|s| s.name.as_str()).collect();
        bail!("there is no service {:?}; there are {}", args.service, known.join(", "));
    };
    super::show(args.json, &findings, || render(&args.service, &findings, style), out)
}
