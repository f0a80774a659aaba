//! The benchmark's results for people, and whether the broker keeps what it promises.

use std::fmt::Write as _;

use serde::Serialize;

use super::Row;
use super::cells::{Mode, Size};
use super::peers::Peer;
use crate::text::{Tone, bar, count, paint, time};

/// Width of the bars.
const BAR: usize = 12;

/// A promise, as a ratio of two medians.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Target {
    what: &'static str,
    ratio: f64,
    rule: String,
    met: bool,
}

/// The promises that can be judged with these rows.
pub(super) fn targets(rows: &[Row]) -> Vec<Target> {
    let find = |peer, (mode, size, clients)| {
        rows.iter().find(|row| {
            let cell = row.cell;
            row.peer == peer && (cell.mode, cell.size, cell.clients) == (mode, size, clients)
        })
    };
    let mut targets = Vec::new();
    let mut judge = |what, cell, of: fn(&Row) -> f64, peer, against, limit: f64, at_least: bool| {
        let (Some(broker), Some(other)) = (find(peer, cell), find(against, cell)) else { return };
        let ratio = of(broker) / of(other);
        let (met, sign) = if at_least { (ratio >= limit, ">=") } else { (ratio <= limit, "<=") };
        targets.push(Target { what, ratio, rule: format!("{sign} {limit}"), met });
    };
    let cpu: fn(&Row) -> f64 = |row| row.proxy_cpu_us_per_request;
    let p99: fn(&Row) -> f64 = |row| row.p99_us;
    let p50: fn(&Row) -> f64 = |row| row.p50_us;
    let rps: fn(&Row) -> f64 = |row| row.rps;
    let (one_shot, brief, keep_alive) = (Mode::OneShot, Mode::Brief, Mode::KeepAlive);
    let (small, medium, large) = (Size::Small, Size::Medium, Size::Large);
    let (broker, relay, kernel) = (Peer::Broker, Peer::Relay, Peer::Kernel);
    let (direct, nginx, haproxy) = (Peer::Direct, Peer::Nginx, Peer::Haproxy);
    for (what, cell, of, peer, against, limit, at_least) in [
        (
            "proxy CPU, one-shot 128 B: broker/nginx",
            (one_shot, small, 32),
            cpu,
            broker,
            nginx,
            0.7,
            false,
        ),
        (
            "p99, one-shot 64 KB: broker/direct",
            (one_shot, medium, 32),
            p99,
            broker,
            direct,
            1.5,
            false,
        ),
        (
            "p99, keep-alive 64 KB: broker/direct",
            (keep_alive, medium, 32),
            p99,
            broker,
            direct,
            1.5,
            false,
        ),
        (
            "throughput, one-shot 1 MB: broker/haproxy",
            (one_shot, large, 32),
            rps,
            broker,
            haproxy,
            1.0,
            true,
        ),
        (
            "throughput, keep-alive 1 MB: broker/haproxy",
            (keep_alive, large, 32),
            rps,
            broker,
            haproxy,
            1.0,
            true,
        ),
        (
            "proxy CPU, brief 128 B: kernel/relay",
            (brief, small, 32),
            cpu,
            kernel,
            relay,
            0.4,
            false,
        ),
        (
            "p50, brief 128 B, 1 client: kernel/direct",
            (brief, small, 1),
            p50,
            kernel,
            direct,
            1.35,
            false,
        ),
        (
            "req/s, keep-alive 128 B: kernel/direct",
            (keep_alive, small, 32),
            rps,
            kernel,
            direct,
            0.85,
            true,
        ),
    ] {
        judge(what, cell, of, peer, against, limit, at_least);
    }
    targets
}

pub(super) fn render(rows: &[Row], targets: &[Target], runs: u32, colours: bool) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let heading = format!(
        "{:<20}{:<9}{:>9}  {:<BAR$}{:>9}{:>10}{:>10}{:>11}{:>11}{:>12}{:>8}",
        "", "", "req/s", "", "MB/s", "p50", "p99", "CPU proxy", "CPU all", "handshakes", "errors"
    );
    writeln!(out, "\n{}", paint(&heading, Tone::Faint, colours)).ok();
    for cell in rows.chunk_by(|a, b| a.cell == b.cell) {
        let best = cell.iter().map(|row| row.rps).fold(0.0, f64::max);
        for (i, row) in cell.iter().enumerate() {
            let name = if i == 0 { row.cell.name() } else { String::new() };
            out.push_str(&line(&name, row, best, colours));
        }
        out.push('\n');
    }
    for target in targets {
        let (mark, tone) = if target.met { ("met", Tone::Good) } else { ("missed", Tone::Bad) };
        let text = format!("{:<46}{:>7.2}   {:<7} {mark}", target.what, target.ratio, target.rule);
        writeln!(out, "{}", paint(&text, tone, colours)).ok();
    }
    let note = format!(
        "\nMedians of {runs} interleaved runs; CPU per request; handshakes at the origins per run; \
         errors of all runs."
    );
    out + &paint(&note, Tone::Faint, colours)
}

fn line(name: &str, row: &Row, best: f64, colours: bool) -> String {
    let proxy = match row.peer {
        Peer::Direct => String::new(),
        _ => time(row.proxy_cpu_us_per_request),
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts")]
    let (rps, handshakes) =
        (count(row.rps.round() as u64), count(row.origin_handshakes.round() as u64));
    let errors = row.errors + row.crosstalk;
    let peer = format!("{:<9}", row.peer.name());
    let ours = matches!(row.peer, Peer::Broker | Peer::Relay | Peer::Kernel);
    let peer_tone = if ours { Tone::Strong } else { Tone::Plain };
    let error_tone = if errors == 0 { Tone::Faint } else { Tone::Bad };
    format!(
        "{name:<20}{}{rps:>9}  {}{:>9.1}{:>10}{:>10}{proxy:>11}{:>11}{handshakes:>12}{}\n",
        paint(&peer, peer_tone, colours),
        paint(&bar(row.rps / best.max(1e-9), BAR), peer_tone, colours),
        row.mb_per_s,
        time(row.p50_us),
        time(row.p99_us),
        time(row.cpu_us_per_request),
        paint(&format!("{:>8}", count(errors)), error_tone, colours),
    )
}
