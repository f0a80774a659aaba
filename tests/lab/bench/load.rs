//! How much is carried, in one run and interleaved, so that whatever else the machine does
//! hits all of them alike.
//!
//! What is compared: CPU time per request holds up on a noisy machine, requests per second much
//! less so. All proxies run at once, each in a cgroup of its own; those that are not measured at
//! the moment only keep idle connections.

mod cells;
mod peers;
mod table;

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use harness::Lab;
use harness::load::Plan;
use harness::origin::nginx;

use self::cells::Cell;
use self::peers::{Peer, Peers};
use crate::measure::{self, Run};
use crate::progress::Progress;
use crate::text;

/// How many nginx origins there are.
const ORIGINS: u8 = 4;

/// Options of `bench` itself.
#[derive(Clone, Debug, Args)]
// Of the same name as what it is part of.
#[group(skip)]
pub(crate) struct Options {
    /// A subset in under two minutes: 32 clients only, medians of 3.
    #[arg(long)]
    quick: bool,
    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
    /// Only rows whose name (e.g. `one-shot/64k/32`) contains this; repeatable.
    #[arg(long, value_name = "PART")]
    only: Vec<String>,
    /// Who takes part.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Peer::ALL)]
    peers: Vec<Peer>,
    /// Runs of each row and peer, of which the median is shown (default: 5, quick: 3).
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    runs: Option<u32>,
    /// Length of one run (default: 1500, quick: 900).
    #[arg(long, value_parser = clap::value_parser!(u64).range(50..))]
    run_ms: Option<u64>,
}

/// Medians of one peer in one cell.
#[derive(Clone, Debug, serde::Serialize)]
struct Row {
    #[serde(flatten)]
    cell: Cell,
    peer: Peer,
    rps: f64,
    mb_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    proxy_cpu_us_per_request: f64,
    cpu_us_per_request: f64,
    origin_handshakes: f64,
    origin_handshakes_per_request: f64,
    /// Of all runs, not a median.
    errors: u64,
    /// Of all runs.
    crosstalk: u64,
}

/// Measures and shows. Whether no client saw an error.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let cells: Vec<Cell> = Cell::all(options.quick)
        .filter(|cell| {
            let name = cell.name();
            options.only.is_empty() || options.only.iter().any(|part| name.contains(part))
        })
        .collect();
    ensure!(!cells.is_empty(), "no row's name contains {:?}", options.only);
    let runs = options.runs.unwrap_or(if options.quick { 3 } else { 5 });
    let length = options.run_ms.unwrap_or(if options.quick { 900 } else { 1500 });

    let mut progress = Progress::new();
    let lab = Lab::new(ORIGINS)?;
    let _servers = (0..ORIGINS).map(|i| nginx::origin(&lab, i)).collect::<Result<Vec<_>>>()?;
    let peers = Peers::start(&lab, &options.peers)?;
    let all = cells.len() as u64 * u64::from(runs) * options.peers.len() as u64;
    progress.say(&format!("{all} runs of {length} ms, {} rows", cells.len()));

    let mut rows = Vec::new();
    let (mut done, mut others) = (0, Duration::ZERO);
    for cell in &cells {
        let mut measured: HashMap<Peer, Vec<Run>> = HashMap::new();
        for _ in 0..runs {
            for &peer in &options.peers {
                let plan = Plan {
                    mode: cell.mode.into(),
                    path: cell.size.path().into(),
                    body: Some(cell.size.bytes()),
                    clients: cell.clients,
                    requests: None,
                    duration: Some(Duration::from_millis(length)),
                    ..Plan::echo(peers.targets(peer), 0, 0)
                };
                let run = measure::run(&lab, peers.cgroup(peer), &plan, |_| {
                    progress.show(&format!("{:<16} {:<8}", cell.name(), peer.name()), done, all);
                    Ok(())
                })?;
                done += 1;
                others += run.cpu.others;
                measured.entry(peer).or_default().push(run);
            }
        }
        for &peer in &options.peers {
            rows.push(Row::of(*cell, peer, &measured[&peer]));
        }
    }
    progress.clear();

    let targets = table::targets(&rows);
    if options.json {
        let all = serde_json::json!({
            "runs": runs, "run_ms": length, "rows": rows, "targets": targets,
            "cpu_others_s": others.as_secs_f64(),
        });
        text::print(&serde_json::to_string_pretty(&all)?);
    } else {
        text::print(&table::render(&rows, &targets, runs, text::colours()));
        let measured = Duration::from_millis(length * all);
        text::print(&format!(
            "Meanwhile other programs used {:.2} of this machine's processors.",
            others.as_secs_f64() / measured.as_secs_f64()
        ));
    }
    Ok(rows.iter().all(|row| row.errors == 0 && row.crosstalk == 0))
}

impl Row {
    fn of(cell: Cell, peer: Peer, runs: &[Run]) -> Self {
        let median = |value: &dyn Fn(&Run) -> f64| {
            let mut values: Vec<f64> = runs.iter().map(value).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        Self {
            cell,
            peer,
            rps: median(&|run| run.report.rps()),
            mb_per_s: median(&|run| run.report.rps() * cell.size.bytes() as f64 / 1e6),
            p50_us: median(&|run| run.report.p50_us as f64),
            p99_us: median(&|run| run.report.p99_us as f64),
            proxy_cpu_us_per_request: median(&|run| run.per_request(run.cpu.proxy)),
            cpu_us_per_request: median(&|run| run.per_request(run.cpu.total())),
            origin_handshakes: median(&|run| run.origin_handshakes as f64),
            origin_handshakes_per_request: median(&|run| {
                run.origin_handshakes as f64 / run.report.requests.max(1) as f64
            }),
            errors: runs.iter().map(|run| run.report.error_count()).sum(),
            crosstalk: runs.iter().map(|run| run.report.crosstalk).sum(),
        }
    }
}
