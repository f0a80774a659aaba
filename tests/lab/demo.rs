//! The demonstration: the same clients, unchanged, before and after.

mod table;

use anyhow::Result;
use clap::Args;
use harness::load::Plan;
use harness::origin::nginx;
use harness::{Daemon, Lab};
use serde_json::json;

use crate::measure::{self, Run};
use crate::progress::Progress;
use crate::text;

/// How many nginx origins there are.
const ORIGINS: u8 = 4;
/// Event loops of the daemon.
const WORKERS: u64 = 2;
/// Most sockets to one origin.
const SOCKETS_MAX: u64 = 16;

/// Options of `demo`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Requests, each on a connection of its own.
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..))]
    requests: u64,
    /// Clients that are active at once.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    concurrency: u16,
    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
}

/// Runs both halves and shows the results. Whether every request was answered rightly.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let mut progress = Progress::new();
    let direct = direct(options, &mut progress)?;
    let brokered = brokered(options, &mut progress)?;
    progress.clear();
    if options.json {
        let all = json!({ "direct": to_json(&direct), "brokered": to_json(&brokered) });
        text::print(&serde_json::to_string_pretty(&all)?);
    } else {
        text::print(&table::render(options, &direct, &brokered, text::colours()));
    }
    Ok([&direct, &brokered]
        .iter()
        .all(|half| half.run.report.error_count() == 0 && half.run.report.crosstalk == 0))
}

/// One half of the demonstration.
#[derive(Debug)]
struct Half {
    run: Run,
    /// Handshakes of this host towards the origins.
    host_handshakes: u64,
    /// Who has counted them.
    counted_by: &'static str,
    /// Handshakes that the origins saw before the first request: pre-warming.
    prewarmed: u64,
}

fn direct(options: &Options, progress: &mut Progress) -> Result<Half> {
    progress.say("Direct: namespaces with 4 nginx origins, no broker.");
    // A network of its own for each half: no TIME_WAIT and no counter is left over from the other.
    let lab = Lab::new(ORIGINS)?;
    let _servers = (0..ORIGINS).map(|i| nginx::origin(&lab, i)).collect::<Result<Vec<_>>>()?;
    let plan = plan(options, &lab);
    let run = measure::run(&lab, None, &plan, |done| {
        progress.show("direct  ", done, options.requests);
        Ok(())
    })?;
    let host_handshakes = run.host_active_opens;
    Ok(Half { run, host_handshakes, counted_by: "ActiveOpens", prewarmed: 0 })
}

fn brokered(options: &Options, progress: &mut Progress) -> Result<Half> {
    progress.say("Brokered: the same, with the daemon intercepting connections to the origins.");
    let lab = Lab::new(ORIGINS)?;
    let _servers = (0..ORIGINS).map(|i| nginx::origin(&lab, i)).collect::<Result<Vec<_>>>()?;
    let before = lab.origin_counters();
    let daemon = Daemon::start(&lab, &config(&lab))?;
    // Warming up costs the origins handshakes too: they belong to the broker's bill.
    let prewarmed = lab.origin_counters().since(&before).passive_opens().try_into()?;
    let plan = plan(options, &lab);
    let mut run = measure::run(&lab, Some(&lab.proxy_cgroup), &plan, |done| {
        progress.show("brokered", done, options.requests);
        Ok(())
    })?;
    run.origin_handshakes = lab.origin_counters().since(&before).passive_opens().try_into()?;
    let endpoints = daemon.snapshot()?.endpoints;
    let origins = lab.all_origins();
    let host_handshakes = endpoints
        .iter()
        .filter(|endpoint| origins.contains(&endpoint.remote))
        .map(|endpoint| endpoint.established)
        .sum();
    daemon.stop()?;
    Ok(Half { run, host_handshakes, counted_by: "sock_ops", prewarmed })
}

fn plan(options: &Options, lab: &Lab) -> Plan {
    Plan::echo(lab.all_origins(), options.concurrency.into(), options.requests)
}

/// What an operator would write for this host.
fn config(lab: &Lab) -> String {
    format!(
        r#"workers = {WORKERS}

[[service]]
name = "web"
intercept = ["origins"]
cgroups = [{:?}]
protocol = "http1"
origins = {:?}

[service.pool]
prewarm = 2

[service.limits]
max_connections_per_origin = {SOCKETS_MAX}
"#,
        lab.clients_cgroup.path(),
        lab.all_origins().iter().map(ToString::to_string).collect::<Vec<_>>(),
    )
}

fn to_json(half: &Half) -> serde_json::Value {
    let Half { run, host_handshakes, counted_by, prewarmed } = half;
    json!({
        "requests": run.report.requests,
        "errors": run.report.error_count(),
        "errors_by_kind": run.report.errors,
        "crosstalk": run.report.crosstalk,
        "origin_handshakes": run.origin_handshakes,
        "origin_handshakes_prewarm": prewarmed,
        "origin_time_wait": run.origin_time_wait,
        "host_handshakes": host_handshakes,
        "host_handshakes_counted_by": counted_by,
        "rps": run.report.rps(),
        "p50_us": run.report.p50_us,
        "p99_us": run.report.p99_us,
        "cpu_us_per_request": run.per_request(run.cpu.total()),
        "cpu_us_per_request_by": {
            "clients": run.per_request(run.cpu.clients),
            "broker": run.per_request(run.cpu.proxy),
            "origins": run.per_request(run.cpu.origins),
        },
        "cpu_others_s": run.cpu.others.as_secs_f64(),
    })
}
