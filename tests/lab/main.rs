//! Demo and benchmarks.

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}
#[derive(Debug, Subcommand)]
enum Command {
    /// Carries out one plan of load.
    #[command(hide = true)]
    Load { plan: String },
}
#[expect(clippy::print_stdout, reason = "results are what this program is for")]
fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Load { plan } => {
            let report = harness::load::generate(&serde_json::from_str(&plan)?)?;
            println!("{}", serde_json::to_string(&report)?);
        }
    }
    Ok(())
}
