//! The torture: every kind of client against every kind of origin, with the broker in between and
//! every byte checked. What it does and how it judges is told in [`harness::torture`].

mod kernel_log;
mod table;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use broker::clock;
use clap::{Args, ValueEnum};
use harness::torture::{self, Mode, Plan, Report, Service};
use harness::wait::within;
use harness::{Daemon, Lab};
use serde::Serialize;
use serde_json::Value;

use self::kernel_log::KernelLog;
use crate::interrupt;
use crate::progress::Progress;
use crate::text;

/// Addresses of origins.
const ORIGINS: u8 = 6;
/// The service for requests that the kernel could carry, all of them, on sockets enough.
const PLAIN: &str = "plain";
/// Event loops of the daemon.
const WORKERS: u64 = 2;
/// How long leases may last after the last client and the last origin are gone.
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

/// Options of `torture`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Go on for so many minutes (default: 1).
    #[arg(long, conflicts_with_all = ["seconds", "exchanges"])]
    minutes: Option<u64>,
    /// Go on for so many seconds.
    #[arg(long, conflicts_with = "exchanges")]
    seconds: Option<u64>,
    /// Go on for so many exchanges.
    #[arg(long)]
    exchanges: Option<u64>,
    /// Clients that are active at once.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u16).range(1..=4096))]
    clients: u16,
    /// How the broker is to move bytes.
    #[arg(long, value_enum, default_value_t = Steer::Relay)]
    steer: Steer,
    /// Repeat the draws of another run.
    #[arg(long)]
    seed: Option<u64>,
    /// Only clients of these modes.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "MODE")]
    only: Vec<Mode>,
    /// Origins that always behave.
    #[arg(long)]
    calm: bool,
    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
}

/// Who moves the bytes of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Steer {
    /// The kernel.
    Kernel,
    /// The kernel where it can, the daemon where it cannot.
    Auto,
    /// The daemon.
    Relay,
}

/// What came of it.
#[derive(Debug, Serialize)]
struct Results {
    #[serde(flatten)]
    report: Report,
    steer: Steer,
    /// Exchanges whose bytes the kernel moved, of all; `None` if the daemon does not say.
    steered_percent: Option<f64>,
    /// The same, of those that it could carry, where there were sockets enough.
    plain_steered_percent: Option<f64>,
    /// Requests that were not steered, by the reason.
    not_steered: BTreeMap<String, u64>,
    /// Warnings of the kernel during the run.
    kernel_warnings: usize,
    /// Their lines.
    kernel_log: Vec<String>,
    /// Warnings of a fault that the kernel has without us.
    known_kernel_warnings: usize,
    /// Origin sockets still leased when nobody was left.
    leases_left: u64,
    /// Whether the daemon was alive to the end and stopped as it should.
    daemon_stopped: bool,
}

impl Results {
    fn is_clean(&self) -> bool {
        self.report.is_clean()
            && self.kernel_warnings == 0
            && self.leases_left == 0
            && self.daemon_stopped
    }
}

/// Runs it and shows the results. Whether nothing happened that must not.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let mut progress = Progress::new();
    let seed = match options.seed {
        Some(seed) => seed,
        // Short enough to be typed.
        None => SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.subsec_nanos().into(),
    };
    progress.say(&format!("Torture with --seed {seed}"));
    let lab = Lab::new(ORIGINS)?;
    let services = services(&lab);
    let daemon = Daemon::start(&lab, &config(&lab, &services, options.steer))?;
    let plan = plan(options, seed, &lab, services);
    let mut kernel_log = KernelLog::open()?;
    let before = snapshot(&daemon)?;
    let report = carry_out(&lab, &plan, &mut progress);
    let report = report.with_context(|| format!("the daemon's log:\n{}", daemon.log()))?;
    let settled = within(SETTLED_WITHIN, || leases(&daemon).is_ok_and(|n| n == 0));
    let leases_left = if settled { 0 } else { leases(&daemon).unwrap_or(u64::MAX) };
    let after = snapshot(&daemon).unwrap_or_default();
    let log = daemon.log();
    let stopped = daemon.stop();
    let complaints = kernel_log.complaints()?;
    progress.clear();
    if let Err(error) = &stopped {
        eprintln!("{error:#}");
    }
    let results = Results {
        report,
        steer: options.steer,
        steered_percent: steered(&before, &after, |_| true),
        plain_steered_percent: steered(&before, &after, |service| service == PLAIN),
        not_steered: not_steered(&after),
        kernel_warnings: complaints.unknown.len(),
        kernel_log: complaints.unknown,
        known_kernel_warnings: complaints.known.len(),
        leases_left,
        daemon_stopped: stopped.is_ok(),
    };
    if options.json {
        text::print(&serde_json::to_string_pretty(&results)?);
    } else {
        text::print(&table::render(&results, text::colours()));
    }
    if !results.is_clean() && !log.is_empty() {
        eprintln!("the daemon's log:\n{log}");
    }
    Ok(results.is_clean())
}

fn plan(options: &Options, seed: u64, lab: &Lab, services: Vec<Named>) -> Plan {
    let seconds = options.minutes.map(|n| n * 60).or(options.seconds);
    let seconds = seconds.or(options.exchanges.is_none().then_some(60));
    Plan {
        seed,
        clients: options.clients,
        exchanges: options.exchanges,
        duration: seconds.map(Duration::from_secs),
        only: options.only.clone(),
        calm: options.calm,
        services: services.into_iter().map(|named| named.service).collect(),
        origins_netns: lab.origins.path(),
        patience: Duration::from_secs(20),
        progress: Some(lab.directory().join("progress")),
    }
}

/// Starts clients and origins and waits for their end.
fn carry_out(lab: &Lab, plan: &Plan, progress: &mut Progress) -> Result<Report> {
    interrupt::check()?;
    let began = clock::now();
    let mut process = torture::start(lab, plan)?;
    while process.is_running() {
        interrupt::check()?;
        let told = plan.progress.as_ref().map(fs::read_to_string);
        let done = told.and_then(Result::ok).and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        match (plan.exchanges, plan.duration) {
            (Some(all), _) => progress.show("exchanges", done, all),
            (None, limit) => {
                let what = format!("{} exchanges, seconds", text::count(done));
                progress.show(&what, began.elapsed().as_secs(), limit.map_or(0, |d| d.as_secs()));
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    torture::finish(process)
}

/// A service and what the configuration says of it.
struct Named {
    name: &'static str,
    service: Service,
    /// Keys of its pool, and what follows them.
    pool: &'static str,
}

/// Few sockets for many clients; sockets for everybody; both over IPv6, for what has no body; and what the
/// kernel could carry.
fn services(lab: &Lab) -> Vec<Named> {
    let v4 = |range: std::ops::Range<u8>| range.map(|i| lab.origin(i)).collect::<Vec<_>>();
    let bodiless = Mode::value_variants().iter().copied().filter(|mode| !mode.uploads()).collect();
    let v6 = (0..2).map(|i| (lab.origin_ip6(i), 80).into()).collect();
    [
        (
            "tight",
            v4(0..2),
            vec![],
            "prewarm = 1\nqueue_timeout = \"15s\"\n[service.limits]\nmax_connections = 8",
        ),
        ("roomy", v4(2..4), vec![], "prewarm = 2"),
        (
            "six",
            v6,
            bodiless,
            "prewarm = 1\nqueue_timeout = \"15s\"\n[service.limits]\nmax_connections = 24",
        ),
        (PLAIN, v4(4..6), vec![Mode::Plain], "prewarm = 8"),
    ]
    .into_iter()
    .map(|(name, origins, modes, pool)| Named {
        name,
        pool,
        service: Service { targets: origins.clone(), origins, modes },
    })
    .collect()
}

fn config(lab: &Lab, services: &[Named], steer: Steer) -> String {
    let steer = match steer {
        Steer::Kernel => "steer = \"kernel\"\n",
        Steer::Auto => "steer = \"auto\"\n",
        // What a daemon does that knows of nothing else.
        Steer::Relay => "steer = \"relay\"\n",
    };
    let mut config = format!("workers = {WORKERS}\n");
    for Named { name, service, pool } in services {
        let origins: Vec<_> = service.origins.iter().map(ToString::to_string).collect();
        // Writing to a String cannot fail.
        write!(
            config,
            "\n[[service]]\nname = {name:?}\nintercept = [\"origins\"]\ncgroups = [{:?}]\n\
             protocol = \"http1\"\norigins = {origins:?}\n{steer}[service.pool]\n{pool}\n",
            lab.clients_cgroup.path(),
        )
        .ok();
    }
    config
}

/// The daemon's statistics, unread: fields come and go.
fn snapshot(daemon: &Daemon) -> Result<Value> {
    Ok(serde_json::from_str(&daemon.request("GET", "/v1/snapshot")?)?)
}

fn leases(daemon: &Daemon) -> Result<u64> {
    let snapshot = daemon.snapshot()?;
    Ok(snapshot.services.iter().flat_map(|s| &s.origins).map(|origin| origin.active).sum())
}

/// The share of some services' exchanges in between that the kernel has steered, if the daemon counts
/// them.
fn steered(before: &Value, after: &Value, of: impl Fn(&str) -> bool) -> Option<f64> {
    let sum = |snapshot: &Value, field: &str| -> Option<u64> {
        let services = snapshot["services"].as_array()?.iter();
        let meant = services.filter(|service| service["name"].as_str().is_some_and(&of));
        meant.map(|service| service[field].as_u64()).sum()
    };
    let since = |field| Some(sum(after, field)?.saturating_sub(sum(before, field)?));
    let (all, steered) = (since("exchanges")?, since("steered")?);
    (all > 0).then(|| steered as f64 * 100.0 / all as f64)
}

/// Why requests were not steered.
fn not_steered(snapshot: &Value) -> BTreeMap<String, u64> {
    let mut sum = BTreeMap::new();
    let services = snapshot["services"].as_array().into_iter().flatten();
    for (why, n) in services.filter_map(|s| s["not_steered"].as_object()).flatten() {
        *sum.entry(why.clone()).or_default() += n.as_u64().unwrap_or(0);
    }
    sum
}
