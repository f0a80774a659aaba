//! The results for people.

use std::fmt::Write as _;

use super::Row;
use crate::text::{Tone, count, paint, time};

pub(super) fn render(rows: &[Row], colours: bool) -> String {
    let heading = format!(
        "{:<13}{:<15}{:>10}{:>8}{:>8}{:>11}{:>11}{:>11}{:>11}{:>11}",
        "", "", "answered", "5xx", "errors", "p50", "p99", "p99.9", "slowest", "pause"
    );
    // Writing to a String cannot fail.
    let mut out = format!("\n{}\n", paint(&heading, Tone::Faint, colours));
    for fault in rows.chunk_by(|a, b| a.fault == b.fault) {
        for (i, row) in fault.iter().enumerate() {
            let name = if i == 0 { row.fault.name() } else { "" };
            writeln!(out, "{name:<13}{}", line(row, colours)).ok();
        }
        out.push('\n');
    }
    let note = "Each line is a run of its own, of a proxy just started. 5xx: responses of 500 and \
                above that clients got. Pause: the longest time without a right answer for anybody.";
    out + &paint(note, Tone::Faint, colours)
}

fn line(row: &Row, colours: bool) -> String {
    let tone = |n| if n == 0 { Tone::Faint } else { Tone::Bad };
    let ours = if row.party.is_broker() { Tone::Strong } else { Tone::Plain };
    format!(
        "{}{:>10}{}{}{:>11}{:>11}{:>11}{:>11}{:>11}",
        paint(&format!("{:<15}", row.party.name()), ours, colours),
        count(row.requests),
        paint(&format!("{:>8}", count(row.leaked_5xx)), tone(row.leaked_5xx), colours),
        paint(&format!("{:>8}", count(row.errors)), tone(row.errors), colours),
        time(row.p50_us as f64),
        time(row.p99_us as f64),
        time(row.p999_us as f64),
        time(row.max_us as f64),
        time(row.max_pause_ms * 1e3),
    )
}
