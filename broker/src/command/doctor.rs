//! `broker doctor`: tries out what the broker needs and shows it.

use std::io::Write;

use crate::doctor::examine;
use crate::report::Style;
use crate::report::doctor::render;

/// Arguments of `broker doctor`.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Args {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Runs the command; answers whether everything works.
pub fn run(args: Args, style: Style, out: &mut impl Write) -> anyhow::Result<bool> {
    let diagnosis = examine();
    super::show(args.json, &diagnosis, || render(&diagnosis, style), out)?;
    Ok(diagnosis.healthy)
}
