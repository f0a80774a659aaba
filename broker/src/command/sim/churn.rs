//! `broker sim churn`: what idle pools save.

use std::io::Write;
use std::time::Duration;

use crate::command::{self, UsageError, show};
use crate::report::Style;
use crate::report::sim::churn::render;
use crate::sim::churn::{Arrivals, Service, Setup, Spread, Traffic, simulate};

/// More than that takes too long, all tables together.
const REQUESTS_MAX: f64 = 1_000_000.0;
/// Idle lists: one for each worker and origin.
const LISTS_MAX: u32 = 10_000;
const WORKERS_MAX: i64 = 256;
const ORIGINS_MAX: i64 = 1_000;
const SOCKETS_MAX: i64 = 100_000;

/// Arguments of `broker sim churn`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Requests per second.
    #[arg(long, value_name = "NUMBER", default_value = "200", value_parser = rate)]
    pub rate: f64,
    /// For how long they come, in virtual time.
    #[arg(long, value_name = "TIME", default_value = "3m", value_parser = time)]
    pub duration: Duration,
    /// How they follow each other.
    #[arg(long, value_name = "HOW", value_enum, default_value = "poisson")]
    pub arrivals: Arrivals,
    /// How long a request is under way, on average.
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = time)]
    pub service_time: Duration,
    /// How that varies.
    #[arg(long, value_name = "HOW", value_enum, default_value = "exponential")]
    pub service: Service,
    /// Origins of the service.
    #[arg(long, value_name = "N", default_value = "4",
          value_parser = clap::value_parser!(u32).range(1..=ORIGINS_MAX))]
    pub origins: u32,
    /// Numbers of workers to compare. The other tables have the largest.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,4,8",
          value_parser = clap::value_parser!(u32).range(1..=WORKERS_MAX))]
    pub workers: Vec<u32>,
    /// How clients come to workers. The other tables have the first.
    #[arg(
        long,
        value_name = "HOW",
        value_enum,
        value_delimiter = ',',
        default_value = "random,round-robin"
    )]
    pub spread: Vec<Spread>,
    /// `pool.idle_ttl`: an idle socket older than this is closed.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    pub idle_ttl: Duration,
    /// `pool.max_idle`: most idle sockets of a worker to an origin.
    #[arg(long, value_name = "N", default_value = "64",
          value_parser = clap::value_parser!(u32).range(0..=SOCKETS_MAX))]
    pub max_idle: u32,
    /// `pool.max_lifetime`: a socket older than this is not used again.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = time)]
    pub max_lifetime: Duration,
    /// `pool.max_requests`: a socket that served this many requests is not used again.
    #[arg(long, value_name = "N", default_value = "10000",
          value_parser = clap::value_parser!(u64).range(1..))]
    pub max_requests: u64,
    /// Origins close connections that are idle for this long. Default: they do not.
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub origin_idle: Option<Duration>,
    /// What the random numbers start from; the same one gives the same output.
    #[arg(long, value_name = "N", default_value = "1")]
    pub seed: u64,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

fn rate(text: &str) -> Result<f64, &'static str> {
    let rate = text.parse().ok().filter(|rate| (0.001..=1e6).contains(rate));
    rate.ok_or("must be a number of requests per second, from 0.001 to 1000000")
}

fn time(text: &str) -> Result<Duration, &'static str> {
    let allowed = Duration::from_millis(1)..=Duration::from_hours(365 * 24);
    let time = command::time(text).ok().filter(|time| allowed.contains(time));
    time.ok_or("must be a time such as 40ms, 30s or 10m, from 1ms to 365 days")
}

/// Runs the command.
pub fn run(args: &Args, style: Style, out: &mut impl Write) -> anyhow::Result<()> {
    let report = simulate(&setup(args)?);
    show(args.json, &report, || render(&report, style), out)
}

/// What the arguments mean together.
fn setup(args: &Args) -> Result<Setup, UsageError> {
    let duration = humantime::format_duration(args.duration);
    let requests = args.rate * args.duration.as_secs_f64();
    if !(1.0..=REQUESTS_MAX).contains(&requests) {
        return Err(UsageError(format!(
            "--rate {}: must give 1 to {REQUESTS_MAX} requests in --duration {duration}, not {requests:.1}",
            args.rate
        )));
    }
    let workers = args.workers.iter().copied().max().unwrap_or(1);
    if workers * args.origins > LISTS_MAX {
        return Err(UsageError(format!(
            "--workers {workers}: must be at most {}, so that with --origins {} there are at most \
             {LISTS_MAX} pools",
            LISTS_MAX / args.origins,
            args.origins,
        )));
    }
    Ok(Setup {
        traffic: Traffic {
            arrivals: args.arrivals,
            rate: args.rate,
            duration: args.duration,
            service: args.service,
            service_time: args.service_time,
            seed: args.seed,
        },
        origins: args.origins as usize,
        workers: args.workers.iter().map(|&n| n as usize).collect(),
        spreads: args.spread.clone(),
        max_idle: args.max_idle as usize,
        idle_ttl: args.idle_ttl,
        max_lifetime: args.max_lifetime,
        max_requests: args.max_requests,
        origin_idle: args.origin_idle,
    })
}
