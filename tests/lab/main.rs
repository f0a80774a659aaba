//! The broker's demonstration, benchmark and torture, in network namespaces that it makes and removes.

mod bench;
mod demo;
mod interrupt;
mod measure;
mod progress;
mod text;
mod torture;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "broker-lab", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// One-shot requests to four nginx origins, first directly, then through the broker.
    Demo(demo::Options),
    /// The broker beside direct connections and other proxies.
    Bench(bench::Options),
    /// Clients and origins that check every byte, and misbehave in every way, for as long as asked.
    Torture(torture::Options),
    /// Carries out one plan of load; the other commands start this in the clients' namespace.
    #[command(hide = true)]
    Load {
        /// A plan, as JSON.
        plan: String,
    },
    /// Makes the connections of one turn of `bench bystanders`.
    #[command(hide = true)]
    Bystanders {
        /// The cgroup of the clients.
        cgroup: PathBuf,
    },
    /// Carries out one plan of torture.
    #[command(hide = true)]
    TortureRun {
        /// A plan, as JSON.
        plan: String,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // Whatever failed then failed because of it: Ctrl-C reaches our children as well.
        Err(_) if interrupt::happened() => {
            eprintln!("interrupted; everything that was started has been removed");
            ExitCode::from(130)
        }
        Err(error) => {
            eprintln!("broker-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all went as it must.
fn run(command: Command) -> Result<bool> {
    match command {
        Command::Demo(options) => {
            interrupt::watch()?;
            demo::run(&options)
        }
        Command::Bench(options) => {
            interrupt::watch()?;
            bench::run(&options)
        }
        Command::Torture(options) => {
            interrupt::watch()?;
            torture::run(&options)
        }
        Command::Bystanders { cgroup } => {
            text::print(&bench::bystanders::turn(&cgroup)?.to_string());
            Ok(true)
        }
        Command::TortureRun { plan } => {
            let report = harness::torture::run(&serde_json::from_str(&plan)?)?;
            text::print(&serde_json::to_string(&report)?);
            Ok(true)
        }
        Command::Load { plan } => {
            let report = harness::load::generate(&serde_json::from_str(&plan)?)?;
            text::print(&serde_json::to_string(&report)?);
            Ok(true)
        }
    }
}
