//! The broker beside its peers: how much they carry, how exact their limits are, and what clients
//! notice of an origin that fails.

pub(crate) mod bystanders;
mod faults;
mod limits;
mod load;
mod peers;
mod rules;

use anyhow::Result;
use clap::{Args, Subcommand};

/// What to compare.
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    which: Option<Which>,
    #[command(flatten)]
    load: load::Options,
}

#[derive(Clone, Debug, Subcommand)]
enum Which {
    /// Connections that origins see of 200 clients who come at once, at a limit of 10.
    Limits(limits::Options),
    /// What clients notice when one of eight origins answers 500, is killed, or hangs.
    Faults(faults::Options),
    /// What a connection that is none of the broker's costs more while a daemon runs.
    Bystanders(bystanders::Options),
}

/// Measures and shows. Whether the broker did what it must.
pub(crate) fn run(options: &Options) -> Result<bool> {
    match &options.which {
        None => load::run(&options.load),
        Some(Which::Limits(options)) => limits::run(options),
        Some(Which::Faults(options)) => faults::run(options),
        Some(Which::Bystanders(options)) => bystanders::run(options),
    }
}
