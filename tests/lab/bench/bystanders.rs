//! What the programs cost connections that the broker has nothing to do with.
//!
//! One thread, which stays on one processor, is client and server of short connections on loopback,
//! one after the other: whatever the kernel does for them it does on this processor, so that the
//! time that passes is the processor time of both ends. Its clients are in a cgroup that its server is
//! not in. In turns no daemon runs, one that brokers something else, and one for which that cgroup is all
//! there is: its programs see the clients' ends only, as if the servers were on other hosts.

use std::fs;
use std::io::Read as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use broker::clock;
use clap::Args;
use harness::process::Launch;
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

/// How long a turn may take.
const PATIENCE: Duration = Duration::from_mins(1);

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
    /// Median of the turns with one for the whole host.
    with_us: f64,
    /// Median of the differences of a turn in which the programs see the clients' ends, and the one
    /// before without a daemon.
    client_us: f64,
    /// The same if they see both.
    both_us: f64,
}

/// Measures and shows.
pub(crate) fn run(options: &Options) -> Result<bool> {
    let mut progress = Progress::new();
    let turns = u64::from(options.turns);
    progress.say(&format!("{turns} turns, each without and with a daemon"));
    let lab = Lab::new(1)?;
    let (mut without, mut client, mut both) = (Vec::new(), Vec::new(), Vec::new());
    for turn in 0..turns {
        interrupt::check()?;
        progress.show("connections", turn, turns);
        without.push(one(&lab)?);
        let daemon = Daemon::start_below(&lab, &lab.clients_cgroup, &config(&lab))?;
        client.push(one(&lab)?);
        daemon.stop()?;
        let daemon = Daemon::start(&lab, &config(&lab))?;
        both.push(one(&lab)?);
        daemon.stop()?;
    }
    progress.clear();

    let more = |with: &[f64]| median(without.iter().zip(with).map(|(a, b)| b - a).collect());
    let (client_us, both_us) = (more(&client), more(&both));
    let cost = Cost { without_us: median(without), with_us: median(both), client_us, both_us };
    let rules = [Rule::time_us("a connection to another host, for its client", client_us, 1.5)];
    if options.json {
        text::print(&serde_json::to_string_pretty(&cost)?);
        eprint!("{}", rules::render(&rules, false));
    } else {
        let Cost { without_us, with_us, .. } = cost;
        text::print(&format!(
            "Connect, accept and close: {without_us:.2} us without a daemon on this host, {with_us:.2} us \
             with one.\nThat is {client_us:.2} us more at the client's end, {both_us:.2} us at both.\n"
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

/// The time of one connection in a turn, which is a process of its own to be moved around.
fn one(lab: &Lab) -> Result<f64> {
    let turn = Launch::new(std::env::current_exe()?)
        .arg("bystanders")
        .arg(lab.clients_cgroup.directory())
        .netns(&lab.host);
    Ok(turn.output(PATIENCE)?.success()?.trim().parse()?)
}

/// A turn: the time of one connection in a quarter of the chunks is this or less. What disturbs the
/// machine only ever adds.
pub(crate) fn turn(clients: &Path) -> Result<f64> {
    stay()?;
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let address = listener.local_addr()?;
    // Sockets belong to the cgroup that they are made in; accepted ones, to their listener's.
    fs::write(clients.join("cgroup.procs"), "0")?;
    let mut chunks: Vec<_> = (0..CHUNKS)
        .map(|_| Ok(us(chunk(&listener, address)?) / f64::from(CHUNK)))
        .collect::<Result<_>>()?;
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
