//! The command line: arguments, logging, exit codes. The work is the library's.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use broker::config::Config;
use broker::config::file::{self, ConfigError};
use clap::{Parser, Subcommand, ValueEnum};
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

/// `EX_CONFIG` is 78, but what is wrong is how the command was used: `EX_USAGE`. Supervisors can
/// tell it from a failure that a restart may cure.
const EXIT_CONFIG: u8 = 64;

#[derive(Parser)]
#[command(name = "broker", version, about, long_about = None)]
struct Args {
    /// How log lines look; the environment variable `BROKER_LOG` filters them (default: info).
    #[arg(long, global = true, value_enum, default_value_t = LogFormat::Text)]
    log: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

#[derive(Subcommand)]
enum Command {
    /// Broker the services of a configuration file until SIGTERM or SIGINT.
    Run {
        /// The configuration file.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Validate a configuration file and say everything that is wrong with it.
    Check {
        /// The configuration file.
        #[arg(value_name = "FILE")]
        config: PathBuf,
    },
}

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // Help and version come this way too, and those are no mistakes.
            let code = if error.use_stderr() { EXIT_CONFIG } else { 0 };
            return match error.print() {
                Ok(()) => ExitCode::from(code),
                Err(_) => ExitCode::FAILURE,
            };
        }
    };
    init_log(args.log);
    let done = match args.command {
        Command::Run { config } => run(&config),
        Command::Check { config } => check(&config),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // One line for each problem, each starting with the file: editors can jump there.
        Err(error) if error.is::<ConfigError>() => {
            eprintln!("{error:#}");
            ExitCode::from(EXIT_CONFIG)
        }
        Err(error) => {
            eprintln!("broker: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn init_log(format: LogFormat) {
    let filter = EnvFilter::try_from_env("BROKER_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none());
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
}

fn run(path: &Path) -> anyhow::Result<()> {
    let config = file::load(path)?;
    log_start(path, &config);
    broker::daemon::run(config)
}

/// What an incident's first question needs: which build, and what it was told to do.
fn log_start(path: &Path, config: &Config) {
    info!(version = env!("CARGO_PKG_VERSION"), config = %path.display(), "starting");
    info!(
        workers = config.workers,
        admin_socket = %config.admin_socket.display(),
        intercept_from_netns = ?config.intercept_from_netns,
        heartbeat_age_max = ?config.heartbeat_age_max,
        drain_timeout = ?config.drain_timeout,
        "effective settings"
    );
    for service in &config.services {
        info!(
            name = service.name,
            listen = ?service.listen,
            intercept = ?service.intercept.iter().map(ToString::to_string).collect::<Vec<_>>(),
            cgroups = ?service.cgroups,
            protocol = ?service.protocol,
            route = ?service.route,
            origins = ?service.origins,
            pool = ?service.pool,
            timeouts = ?service.timeouts,
            "service"
        );
    }
    for warning in file::warnings(config) {
        warn!("{warning}");
    }
}

#[expect(clippy::print_stdout, reason = "the answer of the command")]
fn check(path: &Path) -> anyhow::Result<()> {
    let config = file::load(path)?;
    for warning in file::warnings(&config) {
        println!("warning: {warning}");
    }
    let services = config.services.len();
    let plural = if services == 1 { "" } else { "s" };
    println!("{}: valid, {services} service{plural}", path.display());
    Ok(())
}
