//! The command line: arguments, logging, exit codes. The work is the library's.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{panic, thread};

use broker::chain;
use broker::command::{UsageError, check, doctor, events, explain, observe, sim, stats};
use broker::config::file::{self, ConfigError, Problem};
use broker::config::{Config, effective};
use broker::daemon;
use broker::datapath::kernel;
use broker::logging::Log;
use broker::report::{Screen, Style};
use clap::{Parser, Subcommand, ValueEnum};
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// `EX_CONFIG` is 78, but what is wrong is how the command was used: `EX_USAGE`. Supervisors can
/// tell it from a failure that a restart may cure.
const EXIT_CONFIG: u8 = 64;

/// The environment variable that says what is logged.
const LOG: &str = "BROKER_LOG";

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
    Check(check::Args),
    /// Count, without changing anything, which origins this host churns against.
    Observe(observe::Args),
    /// Show what a running daemon has done.
    Stats(stats::Args),
    /// Say why the clients of a service fail, though its routing is right.
    Explain(explain::Args),
    /// Show what happened to origins and limits, one JSON object per line.
    Events(events::Args),
    /// Try out what the broker needs of this host; exit code 1 if something does not work.
    Doctor(doctor::Args),
    /// Work out what subsets of origins and outlier detection would do, before anything depends on
    /// them.
    Sim(Box<sim::Args>),
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
    // A table is no place for news that nobody asked for.
    let level = match args.command {
        Command::Run { .. } => "info",
        // All that it could log is in its table.
        Command::Doctor(_) => "off",
        _ => "warn",
    };
    let log = std::env::var_os(LOG).unwrap_or_default();
    let filter = match log_filter(&log.to_string_lossy(), level) {
        Ok(filter) => filter,
        Err(problem) => {
            eprintln!("broker: {problem}");
            return ExitCode::from(EXIT_CONFIG);
        }
    };
    let log = match init_log(args.log, filter) {
        Ok(log) => log,
        Err(error) => {
            eprintln!("broker: starting the thread that logs: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = command(args.command, &log);
    log.flush();
    code
}

/// What goes wrong is said behind what was logged before.
fn command(command: Command, log: &Log) -> ExitCode {
    let done = match command {
        Command::Run { config } => daemon::run(move || configure(&config)).map(|()| true),
        Command::Check(args) => check::run(&args, &mut std::io::stdout().lock()).map(|()| true),
        Command::Observe(args) => observe(args).map(|()| true),
        Command::Stats(args) => stats(&args).map(|()| true),
        Command::Explain(args) => block_on(async {
            explain::run(&args, Style::of_stdout(), &mut std::io::stdout().lock()).await
        })
        .map(|()| true),
        Command::Events(args) => {
            block_on(async { events::run(&args, &mut std::io::stdout().lock()).await })
                .map(|()| true)
        }
        Command::Doctor(args) => {
            doctor::run(args, Style::of_stdout(), &mut std::io::stdout().lock())
        }
        Command::Sim(args) => {
            sim::run(&args, Style::of_stdout(), &mut std::io::stdout().lock()).map(|()| true)
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // One line for each problem, each starting with the file: editors can jump there.
        Err(error) if error.is::<ConfigError>() => {
            log.say(&chain(error.as_ref()));
            ExitCode::from(EXIT_CONFIG)
        }
        Err(error) if error.is::<UsageError>() => {
            log.say(&format!("broker: {}", chain(error.as_ref())));
            ExitCode::from(EXIT_CONFIG)
        }
        // The reader has seen enough (`broker stats | head`).
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            log.say(&format!("broker: {}", chain(error.as_ref())));
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |e: &std::io::Error| e.kind() == std::io::ErrorKind::BrokenPipe;
    error.chain().any(|cause| {
        cause.downcast_ref().is_some_and(broken)
            || cause
                .downcast_ref::<serde_json::Error>()
                .is_some_and(|e| e.io_error_kind() == Some(std::io::ErrorKind::BrokenPipe))
    })
}

/// What is logged: what the environment says, or else this level.
fn log_filter(text: &str, level: &str) -> Result<EnvFilter, Problem> {
    if text.trim().is_empty() {
        return Ok(EnvFilter::new(level));
    }
    // A word alone would be taken for the name of a module, and no other one would log anything.
    let is_typo = |word: &str| {
        let alone = !word.contains(['=', '[', ']', '{', '}']);
        alone && word.parse::<LevelFilter>().is_err() && !word.starts_with("broker")
    };
    let filter = EnvFilter::builder().parse(text);
    filter.ok().filter(|_| !text.split(',').any(|word| is_typo(word.trim()))).ok_or(Problem {
        service: None,
        key: LOG.to_owned(),
        value: format!("{text:?}"),
        rule: "must be a level (error, warn, info, debug, trace or off), or such as \
               \"info,broker::pool=debug\""
            .to_owned(),
    })
}

fn init_log(format: LogFormat, filter: EnvFilter) -> std::io::Result<Log> {
    let log = Log::to(std::io::stderr())?;
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || writer.clone())
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none());
    match format {
        LogFormat::Text => subscriber.init(),
        LogFormat::Json => subscriber.json().init(),
    }
    // The standard one waits for whoever reads.
    let last_words = log.clone();
    panic::set_hook(Box::new(move |panic| {
        let thread = thread::current();
        let backtrace = Backtrace::capture();
        last_words.say(&format!("thread {:?} {panic}", thread.name().unwrap_or("")));
        if backtrace.status() == BacktraceStatus::Captured {
            last_words.say(&backtrace.to_string());
        }
    }));
    Ok(log)
}

fn configure(path: &Path) -> anyhow::Result<Config> {
    let config = file::load(path)?;
    let obstacles = daemon::obstacles(&config).into_iter();
    ConfigError::if_any(path, obstacles.map(|obstacle| obstacle.problem).collect())?;
    log_start(path, &config);
    Ok(config)
}

/// What an incident's first question needs: which build, and what it was told to do.
fn log_start(path: &Path, config: &Config) {
    info!(version = env!("CARGO_PKG_VERSION"), config = %path.display(), "starting");
    info!("effective settings: {}", effective::daemon(config));
    for service in &config.services {
        info!("effective settings of a service: {}", effective::service(service));
    }
    for warning in file::warnings(config).into_iter().chain(daemon::shortage(config)) {
        warn!("{warning}");
    }
}

fn observe(args: observe::Args) -> anyhow::Result<()> {
    let programs = kernel::Kernel::load(&kernel::Options::default())?;
    let screen = Screen::of_stdout();
    block_on(observe::run(args, &programs, screen, &mut std::io::stdout().lock()))
}

fn stats(args: &stats::Args) -> anyhow::Result<()> {
    block_on(stats::run(args, Screen::of_stdout(), &mut std::io::stdout().lock()))
}

fn block_on(command: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_filter_that_is_none_is_a_mistake() {
        let shown = |text: &str| match log_filter(text, "info") {
            Ok(filter) => filter.to_string(),
            Err(problem) => problem.to_string(),
        };
        assert_eq!(["", " "].map(shown), ["info", "info"], "as if it were not set");
        assert_eq!(
            ["debug", "OFF", "broker::pool"].map(shown),
            ["debug", "off", "broker::pool=trace"]
        );
        assert_eq!(shown("warn,broker::pool=debug,hyper=info").matches('=').count(), 2);
        for wrong in ["inof", "broker=loud", "info,verbose", "info debug", "=", "\u{fffd}"] {
            let start = format!("BROKER_LOG = {wrong:?}: must be a level (error, warn,");
            assert!(shown(wrong).starts_with(&start), "{}", shown(wrong));
        }
    }
}
