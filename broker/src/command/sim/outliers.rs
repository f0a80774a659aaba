//! `broker sim outliers`: what outlier detection would do to a fleet in trouble.

use std::io::Write;

use clap::ValueEnum;

use crate::command::show;
use crate::report::Style;
use crate::report::sim::outliers::render;
use crate::sim::outliers::{Incident, Setting, Setup, simulate};

/// Arguments of `broker sim outliers`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// What goes wrong. Default: everything, in turn.
    #[arg(long = "incident", value_name = "NAME", value_enum, value_delimiter = ',')]
    pub incidents: Vec<Incident>,
    /// Sizes of fleets. Default: 20; one-bad with 5, 20 and 1000.
    #[arg(long, value_name = "N", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub origins: Vec<u32>,
    /// Settings to compare. Default: all.
    #[arg(long = "settings", value_name = "NAME", value_enum, value_delimiter = ',')]
    pub settings: Vec<Setting>,
    /// Requests per second for each origin.
    #[arg(long, value_name = "N", default_value = "20",
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rate: u32,
    /// Share of requests that fail at any origin, such as 0.001 or 0.1%.
    #[arg(long, value_name = "SHARE", default_value = "0.1%", value_parser = super::share)]
    pub background: f64,
    /// Another seed is another run of the same luck.
    #[arg(long, value_name = "N", default_value = "1")]
    pub seed: u64,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: &Args, style: Style, out: &mut impl Write) -> anyhow::Result<()> {
    let report = simulate(&Setup {
        incidents: or_all(&args.incidents),
        origins: args.origins.iter().map(|&n| n as usize).collect(),
        settings: or_all(&args.settings),
        rate: args.rate.into(),
        background: args.background,
        seed: args.seed,
    });
    show(args.json, &report, || render(&report, style), out)
}

fn or_all<T: ValueEnum + Clone>(asked_for: &[T]) -> Vec<T> {
    if asked_for.is_empty() { T::value_variants().to_vec() } else { asked_for.to_vec() }
}
