//! What clients notice of an origin that fails: the same faults, one proxy after the other.

mod fault;
mod table;

use std::time::Duration;

use anyhow::Result;
use broker::clock;
use clap::Args;
use harness::Lab;
use harness::load::{Mode, Plan};
use harness::peer::Job;
use serde::Serialize;

use self::fault::{Fault, Origins};
use super::peers::{Party, Peer, Running, Setting};
use super::rules::{self, Rule};
use crate::measure;
use crate::progress::Progress;
use crate::text;

/// nginx processes; the first one fails.
const ORIGINS: u8 = 8;
/// Clients, each of which begins a request when its last one has ended.
const CLIENTS: usize = 32;
/// When the fault begins.
const BEFORE: Duration = Duration::from_secs(1);
/// Length of a run.
const LENGTH: Duration = Duration::from_secs(5);
/// After so long the broker leaves an origin out that owes answers while the others give some.
const STALL_TIME_MS: f64 = 200.0;

/// Options of `bench faults`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
    /// Who takes part.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Peer::ALL)]
    peers: Vec<Peer>,
    /// What happens.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Fault::ALL)]
    faults: Vec<Fault>,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    party: Party,
    fault: Fault,
    /// Answered as they should be.
    requests: u64,
    /// Neither that nor leaked.
    errors: u64,
    /// Responses of 500 and above that clients got, from whomever.
    leaked_5xx: u64,
    p50_us: u64,
    p99_us: u64,
    p999_us: u64,
    max_us: u64,
    /// The longest time in which nobody's request was answered as it should be.
    max_pause_ms: f64,
    /// Requests that the kernel carried; the broker's only.
    #[serde(skip_serializing_if = "Option::is_none")]
    steered: Option<u64>,
}

/// Measures and shows. Whether the broker did what it must, as far as that is not about speed.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let parties = Party::all(&options.peers);
    let mut progress = Progress::new();
    let all = (parties.len() * options.faults.len()) as u64;
    progress.say(&format!("{all} runs of {} s", LENGTH.as_secs()));
    let lab = Lab::new(ORIGINS)?;
    let mut origins = Origins::start(&lab)?;
    let (mut rows, mut others) = (Vec::new(), Duration::ZERO);
    for &fault in &options.faults {
        for &party in &parties {
            let done = rows.len() as u64;
            let what = format!("{:<12} {:<13}", fault.name(), party.name());
            let (row, cpu) = one(&lab, &mut origins, party, fault, |_| {
                progress.show(&what, done, all);
            })?;
            rows.push(row);
            others += cpu;
        }
    }
    progress.clear();

    let rules = rules(&rows);
    let busy = others.as_secs_f64() / (LENGTH.as_secs_f64() * all as f64);
    let note = format!("Meanwhile other programs used {busy:.2} of this machine's processors.");
    if options.json {
        text::print(&serde_json::to_string_pretty(&rows)?);
        eprintln!("{}{note}", rules::render(&rules, false));
    } else {
        text::print(&table::render(&rows, text::colours()));
        text::print(&rules::render(&rules, text::colours()));
        text::print(&note);
    }
    Ok(rules.iter().all(Rule::allows_success))
}

/// One run of a proxy that has just been started, and the processor time that others used.
fn one(
    lab: &Lab,
    origins: &mut Origins<'_>,
    party: Party,
    fault: Fault,
    mut progress: impl FnMut(u64),
) -> Result<(Row, Duration)> {
    let setting = Setting { job: Job::Faults, workers: 2, prewarm: 2 };
    let running = Running::start(lab, party, setting)?;
    let plan = Plan {
        mode: Mode::OneShotClientCloses,
        requests: None,
        duration: Some(LENGTH),
        ..Plan::echo(vec![running.target], CLIENTS, 0)
    };
    let begun = clock::now();
    // What happens next, and when.
    let mut next = Some((BEFORE, true));
    let run = measure::run(lab, Some(&running.cgroup), &plan, |done| {
        progress(done);
        match next {
            Some((at, true)) if clock::now() - begun >= at => {
                origins.strike(fault)?;
                next = Some((at + fault.lasts(), false));
            }
            Some((at, false)) if clock::now() - begun >= at => {
                origins.heal(fault)?;
                next = None;
            }
            _ => {}
        }
        Ok(())
    })?;
    let report = run.report;
    let leaked_5xx = report.server_error_count();
    let row = Row {
        party,
        fault,
        requests: report.requests,
        errors: report.error_count() - leaked_5xx,
        leaked_5xx,
        p50_us: report.p50_us,
        p99_us: report.p99_us,
        p999_us: report.p999_us,
        max_us: report.max_us,
        max_pause_ms: report.pause_max.as_micros() as f64 / 1e3,
        steered: running.steered()?,
    };
    Ok((row, run.cpu.others))
}

fn rules(rows: &[Row]) -> Vec<Rule> {
    let mut rules = Vec::new();
    for row in rows.iter().filter(|row| row.party.is_broker()) {
        let what = |of: &str| format!("{}, {}: {of}", row.party.name(), row.fault.name());
        match row.fault {
            Fault::None => {
                rules.push(Rule::count(what("failed"), row.errors + row.leaked_5xx, 0));
            }
            Fault::Answers500 => {
                rules.push(Rule::count(what("responses of 500"), row.leaked_5xx, 5));
                rules.push(Rule::count(what("other errors"), row.errors, 0));
            }
            Fault::Killed => {
                rules.push(Rule::count(what("failed"), row.errors + row.leaked_5xx, 0));
                rules.push(Rule::time_ms(what("pause"), row.max_pause_ms, 100.0));
            }
            Fault::Stopped => {
                // Each client may have had one request at the origin when it stopped.
                let failed = row.errors + row.leaked_5xx;
                rules.push(Rule::count(what("failed"), failed, CLIENTS as u64));
                let calm = rows
                    .iter()
                    .find(|other| other.party == row.party && other.fault == Fault::None);
                if let Some(calm) = calm {
                    let most = 2.0 * STALL_TIME_MS + calm.p999_us as f64 / 1e3;
                    rules.push(Rule::time_ms(what("p99.9"), row.p999_us as f64 / 1e3, most));
                }
            }
        }
    }
    rules
}
