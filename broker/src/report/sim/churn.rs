//! `broker sim churn` as text.

use std::fmt::Write as _;
use std::time::Duration;

use crate::report::{Cell, Column, Paint, Style, Table, bar, count, micros, percent, plural, rate};
use crate::sim::churn::{Advice, Arrivals, Gap, Outcome, Report, Service, Shared, Spread};

/// Columns of the longest bar.
const BAR_WIDTH: usize = 20;

/// The simulation as text.
#[must_use]
pub fn render(report: &Report, style: Style) -> String {
    let workers = plural(report.workers as u64, "worker");
    let mut out = head(report);
    let mut part = |title: &str, table: &Table, says: &str| {
        let title = style.paint(Paint::Bold, title);
        let table = table.render(style, "  ");
        let says = style.paint(Paint::Dim, says);
        writeln!(out, "\n{title}\n{table}{says}")
            .unwrap_or_else(|_| unreachable!("a String takes everything"));
    };
    let pooling = outcomes(
        Column::right("MAX_IDLE", 0),
        report.pooling.iter().map(|row| (row.max_idle.to_string().into(), &row.outcome)),
    );
    part(&format!("without pools and with them ({workers})"), &pooling, &pooling_says(report));
    part(
        "idle_ttl against the gap between requests (one worker, one origin)",
        &gaps(&report.idle_ttl),
        &gaps_say(report),
    );
    part("one pool for all, or one for each worker", &shared(report), &shared_says(report));
    let max_idle = outcomes(
        Column::right("MAX_IDLE", 0),
        report.max_idle.iter().map(|row| (row.max_idle.to_string().into(), &row.outcome)),
    );
    part(
        &format!("most idle sockets of a worker to an origin ({workers})"),
        &max_idle,
        &max_idle_says(report),
    );
    let prewarm = outcomes(
        Column::right("PREWARM", 0),
        report.prewarm.iter().map(|row| (row.prewarm.to_string().into(), &row.outcome)),
    );
    part(
        &format!("sockets that a worker opens to an origin early ({workers})"),
        &prewarm,
        &prewarm_says(report),
    );
    out.push('\n');
    out.push_str(&advice(report, style));
    out
}

fn head(report: &Report) -> String {
    let setup = &report.setup;
    let traffic = &setup.traffic;
    let arrivals = match traffic.arrivals {
        Arrivals::Poisson => "at random",
        Arrivals::Regular => "at equal distances",
    };
    let service = match traffic.service {
        Service::Exponential => "on average",
        Service::Fixed => "each",
    };
    let as_given = humantime::format_duration;
    let origin_idle = setup.origin_idle.map_or(String::new(), |idle| {
        format!("; origins close what is idle for {}", as_given(idle))
    });
    let at_once = traffic.rate * traffic.service_time.as_secs_f64();
    format!(
        "\
{} requests in {}, {arrivals}, under way for {} {service}: {} at once
{}, {}: of one worker to one origin, a request every {}
idle_ttl {}, max_idle {}{origin_idle}
",
        count(report.pooling[0].outcome.requests),
        as_given(traffic.duration),
        as_given(traffic.service_time),
        rate(at_once).trim_end_matches(".0"),
        plural(setup.origins as u64, "origin"),
        plural(report.workers as u64, "worker"),
        time(report.gap),
        as_given(setup.idle_ttl),
        setup.max_idle,
    )
}

/// What all tables but one show of an outcome.
fn outcomes<'a>(first: Column, rows: impl Iterator<Item = (Cell, &'a Outcome)>) -> Table {
    let mut columns = vec![first];
    columns.extend(OUTCOME);
    columns.push(Column::left("CLOSED", 3));
    let mut table = Table::new(columns);
    for (first, outcome) in rows {
        let mut row = vec![first];
        row.extend(cells(outcome));
        row.push(Cell::new(closed(outcome), Paint::Dim));
        table.row(row);
    }
    table
}

const OUTCOME: [Column; 7] = [
    Column::right("CREATED", 0),
    Column::right("REUSED", 0),
    Column::right("WAITED", 1),
    Column::right("SAVED", 0),
    Column::right("OPEN", 2),
    Column::right("PEAK", 0),
    Column::right("IDLE", 2),
];

fn cells(outcome: &Outcome) -> [Cell; 7] {
    let saved = share(outcome.saved, outcome.requests);
    let paint = match outcome.saved as f64 / outcome.requests.max(1) as f64 {
        0.95.. => Paint::Good,
        0.5.. => Paint::Plain,
        0.0.. => Paint::Warn,
        _ => Paint::Bad,
    };
    [
        count(outcome.created).into(),
        count(outcome.reused).into(),
        count(outcome.waited).into(),
        Cell::new(saved, paint),
        rate(outcome.open_mean).into(),
        count(outcome.open_peak as u64).into(),
        rate(outcome.idle_mean).into(),
    ]
}

fn closed(outcome: &Outcome) -> String {
    let reasons = outcome.evicted.iter().map(|(reason, &n)| format!("{reason} {}", count(n)));
    reasons.collect::<Vec<_>>().join(", ")
}

fn pooling_says(report: &Report) -> String {
    let on = &report.pooling[1].outcome;
    format!(
        "Without a pool each request costs a handshake; with one {} do for {} requests.\n\
         WAITED: requests that found no idle socket. SAVED: handshakes, of one for each request.\n\
         OPEN, IDLE: connections on average, PEAK: most open at once, all workers together.",
        count(on.created),
        count(on.requests),
    )
}

fn gaps(rows: &[Gap]) -> Table {
    let mut table = Table::new(vec![
        Column::right("GAP / IDLE_TTL", 0),
        Column::right("IDLE_TTL", 0),
        Column::right("REUSED, EQUAL GAPS", 0),
        Column::right("REUSED, RANDOM GAPS", 0),
        Column::left("", 1),
    ]);
    for row in rows {
        let of = |outcome: &Outcome| percent(outcome.reused, outcome.requests);
        let random = row.poisson.reused as f64 / row.poisson.requests.max(1) as f64;
        table.row(vec![
            format!("{:.1}", row.gap_to_idle_ttl).into(),
            time(row.idle_ttl).into(),
            of(&row.regular).into(),
            of(&row.poisson).into(),
            bar(random, BAR_WIDTH).into(),
        ]);
    }
    table
}

fn gaps_say(report: &Report) -> String {
    let idle_ttl = report.setup.idle_ttl;
    // Whichever ends first.
    let (idle, whose) = match report.setup.origin_idle {
        Some(idle) if idle < idle_ttl => (idle, "the origins' timeout"),
        _ => (idle_ttl, "idle_ttl"),
    };
    let here = match report.gap.as_secs_f64() / idle.as_secs_f64() {
        ..0.01 => "less than 0.01".to_owned(),
        share => format!("{share:.2}"),
    };
    format!(
        "Equal gaps reuse up to idle_ttl and not beyond. Random ones fade: with an idle_ttl of one mean\n\
         gap 63 % are reused, with five all but 1 %. The gap of this load, {}, is {here} of {whose}.",
        time(report.gap),
    )
}

fn shared(report: &Report) -> Table {
    let mut columns = vec![Column::right("WORKERS", 0), Column::left("CLIENTS", 1)];
    columns.extend(OUTCOME);
    columns.push(Column::right("MAX_IDLE FOR AS MUCH", 0));
    let mut table = Table::new(columns);
    for row in &report.shared {
        let clients = match (row.workers, row.spread) {
            (1, _) => "",
            (_, Spread::Random) => "random",
            (_, Spread::RoundRobin) => "in turn",
        };
        let enough = match row.max_idle_for_as_much {
            Some(n) => {
                format!("{n} ({} in all)", count((n * row.workers * report.setup.origins) as u64))
            }
            None => "-".to_owned(),
        };
        let mut cells_of_row = vec![row.workers.to_string().into(), clients.into()];
        cells_of_row.extend(cells(&row.outcome));
        cells_of_row.push(enough.into());
        table.row(cells_of_row);
    }
    table
}

fn shared_says(report: &Report) -> String {
    let with = |workers: usize| report.shared.iter().find(|row| row.workers == workers);
    let fewest = report.shared.iter().min_by_key(|row| row.workers);
    let (Some(few), Some(many)) = (fewest, with(report.workers)) else { return String::new() };
    if few.workers == many.workers {
        return "One number of workers has nothing to be compared with; try --workers 1,8."
            .to_owned();
    }
    let times = |of: fn(&Outcome) -> f64| {
        let times = of(&many.outcome) / of(&few.outcome).max(f64::MIN_POSITIVE);
        format!("{times:.1}")
    };
    let Shared { workers, .. } = many;
    let than = match few.workers {
        1 => "one pool for all".to_owned(),
        n => format!("{n} pools"),
    };
    let as_much = match many.max_idle_for_as_much {
        Some(_) => "and reuse as much, within 1 % of the requests",
        None => "and reuse less even so",
    };
    format!(
        "{workers} pools hold {} times the idle sockets of {than} and open {} times as many,\n{as_much}: \
         each needs sockets of its own to each origin.\n\
         MAX_IDLE FOR AS MUCH: the least that reuses as much as one pool for all does, within 1 %.",
        times(|o| o.idle_mean),
        times(|o| o.created as f64),
    )
}

fn max_idle_says(report: &Report) -> String {
    let best = report.max_idle.iter().map(|row| row.outcome.reused).max().unwrap_or(0);
    let enough = report.max_idle.iter().find(|row| row.outcome.reuses(best));
    let enough = enough.map_or(0, |row| row.max_idle);
    format!("max_idle {enough} reuses as much as any, within 1 % of the requests.")
}

fn prewarm_says(report: &Report) -> String {
    let [Some(none), Some(most)] = [report.prewarm.first(), report.prewarm.last()] else {
        return String::new();
    };
    let seconds = report.setup.traffic.duration.as_secs_f64();
    let per_second = |outcome: &Outcome| rate(outcome.created as f64 / seconds);
    format!(
        "Early sockets spare waits, but those that no request needs expire and are opened again:\n\
         {} handshakes per second with {}, {} with none.",
        per_second(&most.outcome),
        most.prewarm,
        per_second(&none.outcome),
    )
}

fn advice(report: &Report, style: Style) -> String {
    let Advice { max_idle, idle_ttl, idle_ttl_needed, prewarm, outcome } = &report.advice;
    let five = format!("five gaps of one worker to one origin, {}", time(report.gap));
    let too_short = idle_ttl < idle_ttl_needed;
    let idle_ttl_why = if *idle_ttl < report.setup.idle_ttl || too_short {
        "below the origins' own timeout".to_owned()
    } else if *idle_ttl > report.setup.idle_ttl {
        five
    } else {
        format!("as it was; {} is enough, {five}", time(*idle_ttl_needed))
    };
    let lines = [
        ("[service.pool]".to_owned(), String::new()),
        (format!("max_idle = {max_idle}"), "hardly ever reached".to_owned()),
        (format!("idle_ttl = \"{}\"", humantime::format_duration(*idle_ttl)), idle_ttl_why),
        (
            format!("prewarm = {prewarm}"),
            "the most that spares a wait for each handshake that it costs".to_owned(),
        ),
    ];
    let width = lines.iter().map(|(line, _)| line.len()).max().unwrap_or(0);
    let mut out = format!("{}\n", style.paint(Paint::Bold, "what to configure"));
    for (line, why) in lines {
        let why = if why.is_empty() { why } else { format!("  # {why}") };
        let line = format!("  {line:width$}{}", style.paint(Paint::Dim, &why));
        out.push_str(line.trim_end());
        out.push('\n');
    }
    writeln!(
        out,
        "With {} this opens {} connections, {} at once on average; {} requests wait.",
        plural(report.workers as u64, "worker"),
        count(outcome.created),
        rate(outcome.open_mean),
        count(outcome.waited),
    )
    .unwrap_or_else(|_| unreachable!("a String takes everything"));
    if too_short {
        out.push_str(
            "Origins close too soon for gaps like these: let them keep idle connections for longer, or have\n\
             fewer workers or smaller subsets.\n",
        );
    }
    out
}

fn share(part: i64, whole: u64) -> String {
    match u64::try_from(part) {
        Ok(part) => percent(part, whole),
        Err(_) => format!("-{}", percent_above(part.unsigned_abs(), whole)),
    }
}

/// Like [`percent`], but more than all is possible.
fn percent_above(part: u64, whole: u64) -> String {
    format!("{:.1} %", part as f64 * 100.0 / whole.max(1) as f64)
}

fn time(time: Duration) -> String {
    let text = micros(time.as_micros().try_into().unwrap_or(u64::MAX));
    text.replace(".0 ", " ")
}
