//! A torture: clients and origins that know every byte the other may see.
//!
//! Each request names its client, its number within the client and the response that is wanted, and
//! the bodies of both are streams whose every word names its place (`body`). What a client reads and
//! what an origin reads is compared with what it has to be to the byte, so that a byte of somebody
//! else, or one that is lost, doubled or in the wrong order, is found and named.
//!
//! Clients do what clients do: [`Mode`] lists it. Origins do it too: they close connections with
//! and without a word, idle ones at the worst moment, send more than was asked for, and die in the
//! middle. Since both is drawn from one seed and told in the request, the outcome is known in
//! advance: a client may see an error only where its own origin has caused it (`session`).
//!
//! Clients and origins are threads of one process, for the sake of one account of what was asked
//! and what has run (`ledger`). It runs in the clients' namespace and cgroup; the origins' sockets
//! are made in theirs.

mod body;
mod clients;
mod judge;
mod ledger;
mod mode;
mod origins;
mod random;
mod report;
mod script;
mod session;
mod spec;
#[cfg(test)]
mod tests;
mod wire;

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use broker::clock;
use serde::{Deserialize, Serialize};

pub use mode::Mode;
pub use report::{Failure, Kind, Report, Row};

use self::body::Key;
use self::judge::Judge;
use self::ledger::Ledger;
use self::origins::Origins;
use crate::lab::Lab;
use crate::netns::Netns;
use crate::process::{Launch, Process};

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// All that is drawn follows from it.
    pub seed: u64,
    /// Clients at a time.
    pub clients: u16,
    /// Stop after so many exchanges...
    pub exchanges: Option<u64>,
    /// ...or after this time, whatever comes first.
    pub duration: Option<Duration>,
    /// Only these modes; empty means all.
    pub only: Vec<Mode>,
    /// Origins behave.
    pub calm: bool,
    /// What clients dial.
    pub services: Vec<Service>,
    /// A path to the origins' network namespace.
    pub origins_netns: PathBuf,
    /// A connection on which nothing moves for so long is stuck.
    pub patience: Duration,
    /// File into which the number of exchanges is written from time to time.
    pub progress: Option<PathBuf>,
}

/// A service of the broker, with origins of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Service {
    /// What clients dial, one of them at random.
    pub targets: Vec<SocketAddr>,
    /// Where its origins listen.
    pub origins: Vec<SocketAddr>,
    /// Only clients of these modes come here; empty means all.
    pub modes: Vec<Mode>,
}

impl Service {
    /// Whether some of its requests have a body.
    fn takes_uploads(&self) -> bool {
        self.modes.is_empty() || self.modes.iter().any(|mode| mode.uploads())
    }
}

/// What all threads of a run share.
#[derive(Debug)]
struct Shared {
    key: Key,
    ledger: Ledger,
    judge: Judge,
    patience: Duration,
    exchanges: Option<u64>,
    ends: Option<Instant>,
}

impl Shared {
    fn new(plan: &Plan, now: Instant) -> Self {
        Self {
            key: Key::new(plan.seed),
            ledger: Ledger::new(plan.clients.into(), plan.services.len()),
            judge: Judge::default(),
            patience: plan.patience,
            exchanges: plan.exchanges,
            ends: plan.duration.map(|duration| now + duration),
        }
    }

    /// Whether clients begin no more connections.
    fn is_over(&self, now: Instant) -> bool {
        self.ends.is_some_and(|at| now >= at)
            || self.exchanges.is_some_and(|most| self.judge.exchanges() >= most)
    }
}

/// Carries out a plan in this process, which must be where its clients are to be.
pub fn run(plan: &Plan) -> Result<Report> {
    ensure!(plan.clients > 0 && plan.clients <= body::CLIENTS_MAX, "1 to 4096 clients");
    ensure!(!plan.services.is_empty(), "no services");
    ensure!(plan.exchanges.is_some() || plan.duration.is_some(), "a plan without an end");
    let progress = plan.progress.as_ref().map(File::create).transpose()?;
    let began = clock::now();
    let shared = Shared::new(plan, began);
    let origins = Origins::listen(&Netns::open("origins", &plan.origins_netns)?, plan)?;
    thread::scope(|scope| -> Result<()> {
        let serving = origins.serve(scope, &shared)?;
        let clients = thread::Builder::new()
            .name("clients".into())
            .spawn_scoped(scope, || clients::run(&shared, plan))?;
        while !clients.is_finished() {
            if let Some(file) = &progress {
                file.write_at(format!("{:<20}", shared.judge.exchanges()).as_bytes(), 0)?;
            }
            thread::sleep(Duration::from_millis(20));
        }
        let result = clients.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // Late copies of requests are still noticed by the origins.
        serving.stop()?;
        result
    })?;
    let mut report = shared.judge.into_report();
    report.seed = plan.seed;
    report.seconds = began.elapsed().as_secs_f64();
    Ok(report)
}

/// Starts it in the clients' place of a lab.
pub fn start(lab: &Lab, plan: &Plan) -> Result<Process> {
    Launch::new(crate::daemon::sibling("broker-lab")?)
        .arg("torture-run")
        .arg(serde_json::to_string(plan)?)
        .netns(&lab.host)
        .cgroup(&lab.clients_cgroup)
        .spawn()
}

/// Waits for the end of a started run.
pub fn finish(mut process: Process) -> Result<Report> {
    let status = process.wait(Duration::from_secs(5))?;
    ensure!(status.success(), "clients and origins: {status}\n{}", process.stderr());
    serde_json::from_str(&process.stdout()).context("the report")
}
