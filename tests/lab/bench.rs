//! The broker beside its peers: how much they carry, and how exact their limits are.

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
}

/// Measures and shows. Whether the broker did what it must.
pub(crate) fn run(options: &Options) -> Result<bool> {
    match &options.which {
        None => load::run(&options.load),
        Some(Which::Limits(options)) => limits::run(options),
    }
}
