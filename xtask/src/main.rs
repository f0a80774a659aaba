//! Sets up, builds, tests and demonstrates the broker: `cargo xtask <command>`.
//!
//! Does not depend on the broker itself, whose build needs what `setup` installs.

#![expect(clippy::print_stdout, reason = "a command-line tool talks to people")]

mod bench;
mod check;
mod setup;
mod tools;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use self::setup::Need;
use self::tools::{Built, RELEASE};

#[derive(Parser)]
#[command(name = "cargo xtask", about, disable_help_subcommand = true)]
struct Args {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what the build, the tests and the demo need
    Setup {
        /// Only say what is missing
        #[arg(long)]
        dry_run: bool,
    },
    /// Build the daemon and the lab, optimised
    Build,
    /// Show what the broker does: origins' handshakes before and after
    #[command(disable_help_flag = true)]
    Demo(Rest),
    /// Compare direct connections, the broker and other proxies
    #[command(disable_help_flag = true)]
    Bench(Rest),
    /// Have clients and origins that check every byte misbehave in every way
    #[command(disable_help_flag = true)]
    Torture(Rest),
    /// Show the statistics of a running broker
    #[command(disable_help_flag = true)]
    Stats(Rest),
    /// Count this host's connections without changing any
    #[command(disable_help_flag = true)]
    Observe(Rest),
    /// Try out what the broker needs of this host
    #[command(disable_help_flag = true)]
    Doctor(Rest),
    /// Work out what subsets of origins would do
    #[command(disable_help_flag = true)]
    Sim(Rest),
    /// Run all checks and all tests (as root, for the end-to-end ones)
    Test,
    /// Check formatting, lints and documentation only
    Check,
}

#[derive(clap::Args)]
struct Rest {
    /// Passed on; try `--help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Task::Setup { dry_run } => setup::run(dry_run),
        Task::Build => Built::lab(RELEASE).map(drop),
        Task::Demo(rest) => {
            Built::lab(RELEASE).and_then(|b| b.exec("broker-lab", "demo", &rest.args))
        }
        Task::Bench(rest) => bench::run(&rest.args),
        Task::Torture(rest) => {
            Built::lab(RELEASE).and_then(|b| b.exec("broker-lab", "torture", &rest.args))
        }
        Task::Stats(rest) => {
            let mut args = rest.args;
            let plain =
                !args.iter().any(|arg| ["--json", "--watch"].iter().any(|a| arg.starts_with(a)));
            if plain {
                args.push("--explain".to_owned());
            }
            Built::daemon(RELEASE).and_then(|b| b.exec("broker", "stats", &args))
        }
        Task::Observe(rest) => {
            Built::daemon(RELEASE).and_then(|b| b.exec("broker", "observe", &rest.args))
        }
        Task::Doctor(rest) => {
            Built::daemon(RELEASE).and_then(|b| b.exec("broker", "doctor", &rest.args))
        }
        Task::Sim(rest) => Built::daemon(RELEASE).and_then(|b| b.exec("broker", "sim", &rest.args)),
        Task::Test => check::run(Need::Lab, check::all),
        Task::Check => check::run(Need::Build, check::checks),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}
