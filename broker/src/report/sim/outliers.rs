//! `broker sim outliers` as text.

use std::fmt::Write as _;

use super::super::{Cell, Column, Paint, Style, Table, count, millis};
use crate::sim::outliers::{Report, Row, Setting};

/// The report as text.
#[must_use]
pub fn render(report: &Report, style: Style) -> String {
    let mut table = Table::new(vec![
        Column::left("INCIDENT", 0),
        Column::right("ORIGINS", 0),
        Column::left("SETTINGS", 0),
        Column::right("TIME TO EJECT", 0),
        Column::right("MISSED", 3),
        Column::right("TO BAD ONES", 0),
        Column::right("FAILED", 0),
        Column::right("P99.9", 5),
        Column::right("FALSE", 0),
        Column::right("GOOD ONES OUT", 2),
        Column::right("MOST OUT", 4),
        Column::right("PANIC", 6),
    ]);
    let mut before = None;
    for row in &report.rows {
        let new = before != Some((row.incident, row.origins));
        before = Some((row.incident, row.origins));
        table.row(cells(row, new));
    }
    let mut settings: Vec<Setting> = Vec::new();
    for row in &report.rows {
        if !settings.contains(&row.setting) {
            settings.push(row.setting);
        }
    }
    let mut notes = String::new();
    for setting in settings {
        // Writing to a String cannot fail.
        writeln!(notes, "{}: {}.", name(&setting), setting.describe()).ok();
    }
    let note = format!(
        "\
{} requests per second for each origin, of which {} % fail at any; two minutes, trouble from 15 s on.
TO BAD ONES: requests that an origin got while it was bad, and their share. FALSE: ejections of
origins that were good. GOOD ONES OUT: share of the time of all origins that good ones were ejected.
{notes}",
        report.rate,
        report.background * 100.0
    );
    format!("{}\n{}\n", table.render(style, ""), style.paint(Paint::Dim, note.trim_end()))
}

fn cells(row: &Row, new: bool) -> Vec<Cell> {
    let of_group = |text: String| if new { Cell::new(text, Paint::Bold) } else { Cell::default() };
    let eject = match row.eject_ms {
        Some(ms) => millis(ms).into(),
        None if row.turned_bad == 0 => Cell::new("-", Paint::Dim),
        None => Cell::new("never", Paint::Bad),
    };
    let percent = |n: f64| {
        let paint = if n >= 1.0 { Paint::Warn } else { Paint::Plain };
        if n > 0.0 { Cell::new(format!("{n:.1} %"), paint) } else { Cell::new("-", Paint::Dim) }
    };
    let tally = |n: u64, paint: Paint| Cell::new(count(n), paint.unless_zero(n));
    vec![
        of_group(name(&row.incident)),
        of_group(row.origins.to_string()),
        name(&row.setting).into(),
        eject,
        tally(row.missed, Paint::Plain),
        match row.to_bad {
            0 => Cell::new("-", Paint::Dim),
            n => format!("{} {:5.2} %", count(n), row.to_bad_percent).into(),
        },
        tally(row.failed, Paint::Plain),
        millis(row.p999_ms).into(),
        tally(row.false_ejections, Paint::Warn),
        percent(row.good_ejected_percent),
        row.ejected_max.to_string().into(),
        percent(row.panic_percent),
    ]
}

/// As the command line knows it.
fn name(value: &impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}
