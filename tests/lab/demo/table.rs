//! The demonstration's results as a table.

use std::fmt::Write as _;

use super::{Half, Options, WORKERS};
use crate::text::{Tone, bar, count, paint, time};

/// Width of the bars.
const BAR: usize = 24;

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Better {
    Less,
    More,
}

/// One line: what it is, both values as numbers and as text.
struct Row {
    name: &'static str,
    values: [f64; 2],
    shown: [String; 2],
    better: Better,
}

pub(super) fn render(options: &Options, direct: &Half, brokered: &Half, colours: bool) -> String {
    let mut out = String::new();
    let title = format!(
        "{} one-shot requests, {} at a time, to 4 nginx origins",
        count(options.requests),
        options.concurrency
    );
    // Writing to a String cannot fail.
    writeln!(out, "\n{}\n", paint(&title, Tone::Strong, colours)).ok();
    let heading = format!(
        "{:<30}{:>12}{:>12}   {:<BAR$}  {}",
        "", "direct", "brokered", "brokered / direct", "change"
    );
    writeln!(out, "{}", paint(&heading, Tone::Faint, colours)).ok();
    for group in groups(direct, brokered) {
        for row in group {
            out.push_str(&line(&row, colours));
        }
        out.push('\n');
    }
    out.push_str(&verdict(direct, brokered, colours));
    out
}

fn groups(direct: &Half, brokered: &Half) -> [Vec<Row>; 3] {
    let halves = [direct, brokered];
    let counted = |name, value: fn(&Half) -> u64| {
        let values = halves.map(value);
        Row {
            name,
            shown: values.map(count),
            values: values.map(|v| v as f64),
            better: Better::Less,
        }
    };
    let timed = |name, value: fn(&Half) -> f64| {
        let values = halves.map(value);
        Row { name, shown: values.map(time), values, better: Better::Less }
    };
    let rates = halves.map(|half| half.run.report.rps());
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate")]
    let shown = rates.map(|rate| count(rate.round() as u64));
    [
        vec![
            counted("Handshakes at the origins", |half| half.run.origin_handshakes),
            counted("  seen from this host", |half| half.host_handshakes),
            counted("TIME_WAIT at the origins", |half| half.run.origin_time_wait),
        ],
        vec![
            Row { name: "Requests per second", values: rates, shown, better: Better::More },
            timed("Latency p50", |half| half.run.report.p50_us as f64),
            timed("Latency p99", |half| half.run.report.p99_us as f64),
        ],
        vec![
            timed("CPU per request", |half| half.run.per_request(half.run.cpu.total())),
            timed("  clients", |half| half.run.per_request(half.run.cpu.clients)),
            timed("  origins", |half| half.run.per_request(half.run.cpu.origins)),
            timed("  broker", |half| half.run.per_request(half.run.cpu.proxy)),
        ],
    ]
}

fn line(row: &Row, colours: bool) -> String {
    let [direct, brokered] = row.values;
    let names = format!("{:<30}{:>12}{:>12}   ", row.name, row.shown[0], row.shown[1]);
    if direct <= 0.0 {
        return names.trim_end().to_owned() + "\n";
    }
    let ratio = brokered / direct;
    let tone = match (row.better, ratio) {
        (_, 0.95..1.05) => Tone::Plain,
        (Better::Less, ..1.0) | (Better::More, 1.0..) => Tone::Good,
        _ => Tone::Bad,
    };
    let bar = paint(&bar(ratio, BAR), tone, colours);
    let change = match ratio {
        0.0 => "none left".to_owned(),
        ..0.1 => format!("1/{:.0}", 1.0 / ratio),
        0.995..1.005 => "same".to_owned(),
        ..2.0 => format!("{:+.0} %", (ratio - 1.0) * 100.0),
        _ => format!("x {ratio:.1}"),
    };
    format!("{names}{bar}  {}\n", paint(&change, tone, colours))
}

/// What could not be a number in a row.
fn verdict(direct: &Half, brokered: &Half, colours: bool) -> String {
    let mut out = String::new();
    for (name, half) in [("direct", direct), ("brokered", brokered)] {
        let report = &half.run.report;
        let clean = report.error_count() == 0 && report.crosstalk == 0;
        let text = format!(
            "{name:<9} {} answered with their own id, {} errors, {} mixed up",
            count(report.requests),
            count(report.error_count()),
            count(report.crosstalk)
        );
        let tone = if clean { Tone::Good } else { Tone::Bad };
        writeln!(out, "{}", paint(&text, tone, colours)).ok();
        for (kind, n) in &report.errors {
            writeln!(out, "          {kind}: {}", count(*n)).ok();
        }
    }
    let notes = format!(
        "\nHandshakes at the origins: PassiveOpens in their own network namespace; {} of the \
         broker's were\nmade before the first request ({WORKERS} workers). Seen from this host: {} \
         without the broker,\nwhat {} has counted to the origins with it.",
        brokered.prewarmed, direct.counted_by, brokered.counted_by
    );
    writeln!(out, "{}", paint(&notes, Tone::Faint, colours)).ok();
    out.trim_end().to_owned()
}
