//! What the programs cost connections that the broker has nothing to do with.
//!
//! One thread, which stays on one processor, is client and server of short connections on loopback,
//! one after the other: whatever the kernel does for them it does on this processor, so that the
//! time that passes is the processor time of both ends. A daemon that brokers something else runs,
//! or does not, in turns.

use std::io::Read as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use broker::clock;
use clap::Args;
use harness::{Daemon, Lab};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde::Serialize;

use super::rules::{self, Rule};
use crate::interrupt;
use crate::progress::Progress;
use crate::text::{self, us};

/// Connections whose time is taken together.
const CHUNK: u32 = 200;
/// Chunks of a turn, so few that what is in TIME_WAIT of all turns stays below the kernel's limit.
const CHUNKS: usize = 25;

/// Options of `bench bystanders`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
    /// Turns with the daemon, and as many without.
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..=100))]
    turns: u32,
}

/// Microseconds for each connection.
#[derive(Clone, Debug, Serialize)]
#[expect(clippy::struct_field_names, reason = "names of metrics end in their unit")]
struct Cost {
    /// Median of the turns without a daemon.
    without_us: f64,
    /// Median of the turns with one.
    with_us: f64,
    /// Median of the differences of a turn with and the one just before, without.
    cost_us: f64,
}

/// Measures and shows.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let mut progress = Progress::new();
    let turns = u64::from(options.turns);
    progress.say(&format!("{turns} turns, each without and with a daemon"));
    let lab = Lab::new(1)?;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for turn in 0..turns {
        interrupt::check()?;
        progress.show("connections", turn, turns);
        without.push(one(&lab)?);
        let daemon = Daemon::start(&lab, &config(&lab))?;
        with.push(one(&lab)?);
        daemon.stop()?;
    }
    progress.clear();

    let differences = without.iter().zip(&with).map(|(without, with)| with - without).collect();
    let cost =
        Cost { without_us: median(without), with_us: median(with), cost_us: median(differences) };
    let rules = [Rule::time_us("a connection that is none of the broker's", cost.cost_us, 1.5)];
    if options.json {
        text::print(&serde_json::to_string_pretty(&cost)?);
        eprint!("{}", rules::render(&rules, false));
    } else {
        let Cost { without_us, with_us, .. } = cost;
        text::print(&format!(
            "Connect, accept and close at both ends: {without_us:.2} us without a daemon on this host, \
             {with_us:.2} us with one.\n"
        ));
        text::print(&rules::render(&rules, text::colours()));
    }
    Ok(rules.iter().all(Rule::allows_success))
}

/// A service that all hooks are attached for, at addresses that nobody here connects to.
fn config(lab: &Lab) -> String {
    format!(
        "[[service]]\nname = \"web\"\nprotocol = \"http1\"\nintercept = [\"{}\"]\norigins = [\"{}\"]\n",
        lab.vip(),
        lab.origin(0),
    )
}

/// A turn: the time of one connection in a quarter of the chunks is this or less. What disturbs the
/// machine only ever adds.
fn one(lab: &Lab) -> Result<f64> {
    let mut chunks = lab.host.run(|| -> Result<Vec<f64>> {
        stay()?;
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let address = listener.local_addr()?;
        (0..CHUNKS).map(|_| Ok(us(chunk(&listener, address)?) / f64::from(CHUNK))).collect()
    })?;
    chunks.sort_by(f64::total_cmp);
    Ok(chunks[chunks.len() / 4])
}

fn chunk(listener: &TcpListener, address: SocketAddr) -> Result<Duration> {
    let begun = clock::now();
    for _ in 0..CHUNK {
        let mut client = TcpStream::connect(address)?;
        // The server closes first, and keeps what is left in TIME_WAIT: the client's port is free.
        drop(listener.accept()?);
        ensure!(client.read(&mut [0])? == 0, "the server sends nothing");
    }
    Ok(clock::now() - begun)
}

/// Keeps this thread on one of the processors it may run on.
fn stay() -> Result<()> {
    let this = Pid::from_raw(0);
    let allowed = nix::sched::sched_getaffinity(this)?;
    let last = (0..CpuSet::count()).rev().find(|&cpu| allowed.is_set(cpu) == Ok(true));
    let mut only = CpuSet::new();
    only.set(last.context("no processor")?)?;
    Ok(sched_setaffinity(this, &only)?)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
