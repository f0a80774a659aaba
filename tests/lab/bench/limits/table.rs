//! The peaks for people: a column for each party, a line for each size.

use std::fmt::Write as _;

use super::{BURST, LIMIT, Row};
use crate::text::{Tone, paint};

/// Width of the columns.
const WIDTH: usize = 16;

pub(super) fn render(rows: &[Row], colours: bool) -> String {
    let mut out = String::new();
    let sizes = rows.chunk_by(|a, b| (a.workers, a.origins) == (b.workers, b.origins));
    // Writing to a String cannot fail.
    for (i, line) in sizes.enumerate() {
        if i == 0 {
            let mut heading = format!("{:>7}{:>9}", "workers", "origins");
            for row in line {
                write!(heading, "{:>WIDTH$}", name(row)).ok();
            }
            writeln!(out, "\n{}", paint(&heading, Tone::Faint, colours)).ok();
        }
        write!(out, "{:>7}{:>9}", line[0].workers, line[0].origins).ok();
        for row in line {
            out.push_str(&cell(row, colours));
        }
        out.push('\n');
    }
    let note = format!(
        "\nThe most connections that the origins had at once, at a limit of {LIMIT}; in brackets the \
         clients of {BURST} that were served, if not all. The worst of a few bursts."
    );
    out + &paint(&note, Tone::Faint, colours)
}

fn name(row: &Row) -> String {
    if row.prewarm > 0 {
        return format!("{}, warm", row.party.data_path.name());
    }
    row.party.name()
}

fn cell(row: &Row, colours: bool) -> String {
    let all = row.served == BURST as u64;
    let served = if all { String::new() } else { format!(" ({})", row.served) };
    let tone = if row.peak <= row.limit && all { Tone::Plain } else { Tone::Bad };
    paint(&format!("{:>WIDTH$}", format!("{}{served}", row.peak)), tone, colours)
}
