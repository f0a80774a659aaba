//! How exact a limit of connections is. The origins count.

mod table;

use anyhow::Result;
use clap::Args;
use harness::Lab;
use harness::load::{self, Mode, Plan};
use harness::origin::census::Census;
use harness::peer::Job;
use serde::Serialize;

use super::peers::{Party, Peer, Running, Setting};
use super::rules::{self, Rule};
use crate::interrupt;
use crate::progress::Progress;
use crate::text;

/// Clients that come at once, each with one request.
const BURST: usize = 200;
/// The most connections to all origins together.
const LIMIT: usize = 10;
/// Bursts one after the other; the first finds the proxy just started.
const ROUNDS: u64 = 3;
/// Event loops of the proxy, and origins: each with each.
const NUMBERS: [u8; 3] = [1, 2, 8];

/// Options of `bench limits`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
    /// Who takes part.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Peer::ALL)]
    peers: Vec<Peer>,
}

/// The worst of some bursts.
#[derive(Clone, Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    party: Party,
    workers: usize,
    origins: usize,
    /// Sockets for each worker and origin that were to be open before; the broker's only.
    prewarm: usize,
    limit: usize,
    burst: usize,
    /// The most connections that the origins had at once.
    peak: usize,
    /// Requests of a burst that were answered as they should be, at least.
    served: u64,
}

/// Measures and shows. Whether the broker kept the limit and served all.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let mut contests = Vec::new();
    for party in Party::all(&options.peers) {
        contests.push((party, 0));
        if party.is_broker() {
            contests.push((party, 2));
        }
    }
    let mut progress = Progress::new();
    let all = (NUMBERS.len() * NUMBERS.len() * contests.len()) as u64;
    progress.say(&format!("{BURST} clients at once, {all} times {ROUNDS}"));
    let mut rows = Vec::new();
    for (workers, origins) in NUMBERS.iter().flat_map(|&w| NUMBERS.map(|o| (w, o))) {
        let lab = Lab::new(origins)?;
        let census = Census::start(&lab)?;
        for &(party, prewarm) in &contests {
            progress.show(&party.name(), rows.len() as u64, all);
            let setting = Setting { job: Job::Limit(LIMIT), workers: workers.into(), prewarm };
            let running = Running::start(&lab, party, setting)?;
            let (peak, served) = bursts(&lab, &census, &running)?;
            rows.push(Row {
                party,
                workers: workers.into(),
                origins: origins.into(),
                prewarm,
                limit: LIMIT,
                burst: BURST,
                peak,
                served,
            });
        }
    }
    progress.clear();

    let rules = rules(&rows);
    if options.json {
        text::print(&serde_json::to_string_pretty(&rows)?);
        eprint!("{}", rules::render(&rules, false));
    } else {
        text::print(&table::render(&rows, text::colours()));
        text::print(&rules::render(&rules, text::colours()));
    }
    Ok(rules.iter().all(Rule::allows_success))
}

/// Peak and served requests of the worst.
fn bursts(lab: &Lab, census: &Census, running: &Running) -> Result<(usize, u64)> {
    let (mut peak, mut served) = (0, u64::MAX);
    for _ in 0..ROUNDS {
        interrupt::check()?;
        let plan = Plan {
            mode: Mode::OneShotClientCloses,
            ..Plan::echo(vec![running.target], BURST, BURST as u64)
        };
        let report = load::run(lab, &plan)?;
        peak = peak.max(census.take_peak());
        served = served.min(report.requests);
    }
    Ok((peak, served))
}

fn rules(rows: &[Row]) -> Vec<Rule> {
    let ours: Vec<_> = rows.iter().filter(|row| row.party.is_broker()).collect();
    let Some(peak) = ours.iter().map(|row| row.peak as u64).max() else { return Vec::new() };
    let unserved = ours.iter().map(|row| BURST as u64 - row.served).max().unwrap_or(0);
    vec![
        Rule::count("broker: connections that the origins saw", peak, LIMIT as u64),
        Rule::count("broker: clients of a burst that were not served", unserved, 0),
    ]
}
