//! `broker observe`: the table.

use super::{Cell, Column, Paint, Style, Table, bar, count, micros, millis, percent, rate};
use crate::observe::{Observation, Row};

const BAR_WIDTH: usize = 12;

/// The picture as text.
#[must_use]
pub fn render(seen: &Observation, style: Style) -> String {
    let totals = &seen.totals;
    let mut out = format!(
        "{} for {} · {} handshakes ({}/s), {} failed · a pool would have saved {}\n",
        style.paint(Paint::Bold, "observed"),
        millis(seen.elapsed_ms),
        count(totals.established),
        rate(totals.handshakes_per_second),
        count(totals.failed),
        style.paint(
            Paint::Bold,
            &format!("{} ({})", count(totals.savable), percent(totals.savable, totals.established))
        ),
    );
    if seen.endpoints.is_empty() {
        out.push_str("no outgoing TCP connection so far\n");
        return out;
    }
    out.push('\n');
    out.push_str(&table(&seen.endpoints).render(style, ""));
    if seen.endpoints_omitted > 0 {
        let more = format!("and {} more endpoints", count(seen.endpoints_omitted as u64));
        out.push_str(&style.paint(Paint::Dim, &more));
        out.push('\n');
    }
    if seen.endpoints_evicted > 0 {
        let evicted = format!(
            "{} endpoints no longer fit the kernel's table and lost their rows; the sums above \
             hold all handshakes, but not what those could have saved",
            count(seen.endpoints_evicted)
        );
        out.push_str(&style.paint(Paint::Warn, &evicted));
        out.push('\n');
    }
    if seen.not_followed > 0 {
        let lost = format!(
            "{} connections were counted as attempted only: too many were under way at once",
            count(seen.not_followed)
        );
        out.push_str(&style.paint(Paint::Warn, &lost));
        out.push('\n');
    }
    out
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new(vec![
        Column::left("ORIGIN", 0),
        Column::right("HANDSHAKES/s", 0),
        Column::right("TOTAL", 0),
        Column::right("FAILED", 2),
        Column::right("HANDSHAKE mean", 3),
        Column::right("LIFETIME p50", 4),
        Column::right("PEAK", 1),
        Column::right("SAVABLE", 0),
        Column::left("", 5),
    ]);
    let worst = rows.iter().map(|row| row.savable).max().unwrap_or(0).max(1);
    for row in rows {
        let lifetime = match row.lifetime_p50_ms {
            0 => "-".to_owned(),
            ms => format!("≤ {}", millis(ms)),
        };
        let handshake = match row.established {
            0 => "-".to_owned(),
            _ => micros(row.handshake_mean_us),
        };
        let paint = if row.savable * 2 > row.established { Paint::Warn } else { Paint::Plain };
        table.row(vec![
            row.remote.to_string().into(),
            rate(row.handshakes_per_second).into(),
            count(row.established).into(),
            Cell::new(count(row.failed), Paint::Bad.unless_zero(row.failed)),
            handshake.into(),
            lifetime.into(),
            count(row.open_peak).into(),
            Cell::new(count(row.savable), paint.unless_zero(row.savable)),
            Cell::new(bar(row.savable as f64 / worst as f64, BAR_WIDTH), paint),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::{OBSERVATION_VERSION, Totals};

    fn seen() -> Observation {
        let row = |last: u8, established, savable| Row {
            remote: ([10, 0, 0, last], 80).into(),
            handshakes_per_second: 12.3,
            attempted: established,
            established,
            failed: 0,
            handshake_mean_us: 215,
            lifetime_p50_ms: 4,
            open: 0,
            open_peak: established - savable,
            savable,
        };
        Observation {
            version: OBSERVATION_VERSION,
            elapsed_ms: 30_000,
            totals: Totals {
                handshakes_per_second: 24.6,
                attempted: 1450,
                established: 1450,
                failed: 0,
                savable: 1418,
            },
            endpoints_evicted: 0,
            not_followed: 0,
            endpoints_omitted: 2,
            endpoints: vec![row(1, 1234, 1202), row(2, 216, 216)],
        }
    }

    #[test]
    fn picture() {
        let shown = render(&seen(), Style::PLAIN);
        let expected = "\
observed for 30.0 s · 1,450 handshakes (25/s), 0 failed · a pool would have saved 1,418 (97.7 %)

ORIGIN       HANDSHAKES/s  TOTAL  FAILED  HANDSHAKE mean  LIFETIME p50  PEAK  SAVABLE
10.0.0.1:80            12  1,234       0          215 µs        ≤ 4 ms    32    1,202  ████████████
10.0.0.2:80            12    216       0          215 µs        ≤ 4 ms     0      216  ██▏
and 2 more endpoints
";
        assert_eq!(shown, expected, "\n{shown}");
    }

    #[test]
    fn evictions_and_nothing_at_all_are_said() {
        let mut seen = seen();
        seen.endpoints_evicted = 7;
        assert!(render(&seen, Style::PLAIN).contains("7 endpoints no longer fit"));
        seen.not_followed = 5;
        assert!(
            render(&seen, Style::PLAIN).contains("5 connections were counted as attempted only")
        );
        seen.endpoints.clear();
        assert!(render(&seen, Style::PLAIN).ends_with("no outgoing TCP connection so far\n"));
    }
}
