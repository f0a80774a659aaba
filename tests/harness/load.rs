//! A load generator that knows what it asked for.
//!
//! Unlike wrk or ab it gives every request an id that must come back, checks the length of every
//! body, and opens a connection for each request as the short-lived clients do that the broker is
//! for. One thread and epoll: the client must not be what is measured.
//!
//! To be in a cgroup of its own it runs in a process of its own: `broker-lab load`, started by
//! [`run`] with a [`Plan`] as its argument and answering with a [`Report`].

mod connection;
mod engine;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

pub use engine::generate;

use crate::lab::Lab;
use crate::process::{Launch, Process};

/// How clients use connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// One connection per request, announced by `Connection: close`; the server ends it.
    OneShot,
    /// One connection per request, and the client just closes it after the response.
    OneShotClientCloses,
    /// One connection per client.
    KeepAlive,
}

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Where connections go, in turn.
    pub targets: Vec<SocketAddr>,
    /// The request target.
    pub path: String,
    /// The length that every body must have; `None` for bodies made of the request's id.
    pub body: Option<u64>,
    /// How connections are used.
    pub mode: Mode,
    /// Clients that are active at once.
    pub clients: usize,
    /// Stop after so many requests...
    pub requests: Option<u64>,
    /// ...or after this time, whatever comes first; without both, when [`Running::stop`] says so.
    pub duration: Option<Duration>,
    /// A request that takes longer is an error.
    pub timeout: Duration,
    /// File into which the number of finished requests is written from time to time.
    pub progress: Option<PathBuf>,
}

impl Plan {
    /// One-shot requests for an echo of their id.
    #[must_use]
    pub fn echo(targets: Vec<SocketAddr>, clients: usize, requests: u64) -> Self {
        Self {
            targets,
            path: "/echo".into(),
            body: None,
            mode: Mode::OneShot,
            clients,
            requests: Some(requests),
            duration: None,
            timeout: Duration::from_secs(10),
            progress: None,
        }
    }

    /// Clients that come, ask once and close, until [`Running::stop`].
    #[must_use]
    pub fn steady(targets: Vec<SocketAddr>, clients: usize) -> Self {
        let mode = Mode::OneShotClientCloses;
        Self { mode, requests: None, ..Self::echo(targets, clients, 0) }
    }
}

/// What came of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Requests that were answered as they should be.
    pub requests: u64,
    /// Requests that were not, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Responses that belonged to another request: the worst kind of error.
    pub crosstalk: u64,
    /// From the first request to the last response.
    pub elapsed: Duration,
    /// Median time of a request, from before `connect()` (one-shot) to the last byte.
    pub p50_us: u64,
    /// 99th percentile.
    pub p99_us: u64,
    /// 999th of 1000.
    pub p999_us: u64,
    /// The slowest.
    pub max_us: u64,
    /// The longest time in which no request was answered as it should be, from the first such
    /// answer until no more requests are begun.
    pub pause_max: Duration,
}

impl Report {
    /// Requests per second.
    #[must_use]
    pub fn rps(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }

    /// Number of requests that failed.
    #[must_use]
    pub fn error_count(&self) -> u64 {
        self.errors.values().sum()
    }

    /// Number of those that failed by a response of 500 or above.
    #[must_use]
    pub fn server_error_count(&self) -> u64 {
        let kinds = self
            .errors
            .iter()
            .filter(|(kind, _)| connection::SERVER_ERRORS.contains(&kind.as_str()));
        kinds.map(|(_, count)| count).sum()
    }
}

/// A load generator at work.
#[derive(Debug)]
pub struct Running {
    process: Process,
    plan: Plan,
}

/// Starts the load generator as a client of `lab`.
pub fn start(lab: &Lab, plan: &Plan) -> Result<Running> {
    let process = Launch::new(crate::daemon::sibling("broker-lab")?)
        .arg("load")
        .arg(serde_json::to_string(plan)?)
        .netns(&lab.host)
        .cgroup(&lab.clients_cgroup)
        .spawn()?;
    Ok(Running { process, plan: plan.clone() })
}

/// Runs a plan as a client of `lab` to its end.
pub fn run(lab: &Lab, plan: &Plan) -> Result<Report> {
    start(lab, plan)?.finish()
}

impl Running {
    /// Whether the plan has not come to its end.
    pub fn is_running(&mut self) -> bool {
        self.process.is_running()
    }

    /// Waits for the plan's own end.
    pub fn finish(self) -> Result<Report> {
        // A plan with a number of requests has no natural limit of time.
        let limit = self.plan.duration.unwrap_or(Duration::from_mins(10));
        self.report(limit)
    }

    /// No more requests are begun: waits for those that are under way.
    pub fn stop(self) -> Result<Report> {
        self.process.signal(Signal::SIGTERM)?;
        self.report(Duration::ZERO)
    }

    fn report(mut self, limit: Duration) -> Result<Report> {
        let status = self.process.wait(limit + self.plan.timeout * 2)?;
        ensure!(status.success(), "load generator: {status}\n{}", self.process.stderr());
        serde_json::from_str(&self.process.stdout()).context("the load generator's report")
    }
}
