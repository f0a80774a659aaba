//! `broker sim`: the comparison and the sizes as text, and the ring as a picture.

pub mod churn;
pub mod outliers;
mod svg;

pub use svg::svg;

use super::{Cell, Column, Paint, Style, Table, bar, micros};
use crate::origin::subset::sizing::LOOK_AHEAD;
use crate::sim::{Measured, Moved, Racks, Reference, Report, Sizes};

/// Columns of the longest bar of a histogram.
const BAR_WIDTH: usize = 24;
/// Contenders whose histograms are drawn.
const DRAWN: usize = 3;
/// Rows of a histogram.
const ROWS_MAX: usize = 30;

/// The comparison as text.
#[must_use]
pub fn render(report: &Report, style: Style) -> String {
    let Report { gateways, origins, subset, zones, .. } = report;
    let Reference { connections_all, connections_subsets, coverage, .. } = &report.reference;
    let name = &report.first_name;
    let leaves = match report.reference.leaving {
        1 => format!("one origin leaves ({name})"),
        n => format!("{n} origins leave ({name} and so on)"),
    };
    let head = |text: &str| style.paint(Paint::Bold, text);
    let mut out = format!(
        "\
{gateways} gateways, {origins} origins ({name} and so on), {subset} for each gateway

{}
  {connections_all} / {connections_subsets} ({:.1}x fewer)
{}
  min={} p50={} max={} (ideal {:.2})
{}
  ring      {} / {gateways} gateways changed
  hash-mod  {} / {gateways} gateways changed

",
        head("connections, all to all / with subsets"),
        *connections_all as f64 / *connections_subsets as f64,
        head("coverage, gateways of each origin on the ring"),
        coverage.min,
        coverage.p50,
        coverage.max,
        coverage.ideal,
        head(&leaves),
        report.reference.ring_changed,
        report.reference.hash_mod_changed,
    );
    let mut remark = |text: &str| {
        out.push_str(&style.paint(Paint::Dim, text));
        out.push('\n');
    };
    remark(
        "The ring above places origins by 32-bit FNV-1a, as in published figures (ring-fnv32 below).",
    );
    remark(
        "The daemon's ring uses a well-mixed 64-bit hash instead: names that differ only at the end",
    );
    remark("clump with FNV-1a.");
    out.push('\n');
    out.push_str(&table(report, *subset).render(style, ""));
    let quota = match report.zone_max {
        None => String::new(),
        Some(max) => format!(", of which ring and kronecker take {max} at most"),
    };
    let note = format!(
        "\
REMOVE to GATEWAY: connections opened when one origin leaves, one comes, 5 % leave at once, origins
are replaced one by one, or one more gateway comes; 1.00 is as few as possible. ZONE: most origins
that a gateway loses when one of {zones} zones dies{quota}.
SHARED: origins that two gateways have in common, mean and most. FLEET: time to work out all subsets.
OWN: time until the daemon knows its own."
    );
    out.push_str(&style.paint(Paint::Dim, &note));
    out.push_str("\n\n");
    out.push_str(&head("origins by number of gateways"));
    out.push('\n');
    out.push_str(&histograms(&drawn(&report.contenders)).render(style, ""));
    out
}

fn table(report: &Report, subset: usize) -> Table {
    let mut table = Table::new(vec![
        Column::left("ALGORITHM", 0),
        Column::right("COVERAGE", 0),
        Column::right("SD", 5),
        Column::right("REMOVE", 0),
        Column::right("ADD", 0),
        Column::right("5 %", 4),
        Column::right("ROLLING", 3),
        Column::right("GATEWAY", 0),
        Column::right("ZONE", 2),
        Column::right("SHARED", 6),
        Column::right("FLEET", 7),
        Column::right("OWN", 7),
    ]);
    for contender in &report.contenders {
        let Measured { coverage, moves, overlap, .. } = contender;
        let name = if contender.in_daemon { Paint::Bold } else { Paint::Plain };
        table.row(vec![
            Cell::new(&contender.name, name),
            format!("{}..{}", coverage.min, coverage.max).into(),
            format!("{:.2}", coverage.sd).into(),
            factor(moves.remove_one),
            factor(moves.add_one),
            factor(moves.remove_many),
            factor(moves.rolling),
            factor(moves.add_gateway),
            format!("{} / {subset}", contender.zone_loss).into(),
            format!("{:.1} {}", overlap.mean, overlap.max).into(),
            micros(contender.fleet_us).into(),
            contender.own_us.map(micros).unwrap_or_default().into(),
        ]);
    }
    table
}

fn factor(moved: Moved) -> Cell {
    let paint = match moved.factor {
        ..1.005 => Paint::Good,
        ..2.0 => Paint::Plain,
        ..10.0 => Paint::Warn,
        _ => Paint::Bad,
    };
    match moved {
        Moved { needed: 0, opened: 0, .. } => Cell::new("-", Paint::Dim),
        Moved { factor, .. } if factor >= 99.5 => Cell::new(format!("{factor:.0}"), paint),
        Moved { factor, .. } => Cell::new(format!("{factor:.2}"), paint),
    }
}

/// The contenders to draw: the daemon's, one with a band among them; else the first ones.
fn drawn(contenders: &[Measured]) -> Vec<&Measured> {
    let mut daemons: Vec<&Measured> = contenders.iter().filter(|c| c.in_daemon).collect();
    // Of several bands the last one.
    while daemons.len() > DRAWN {
        daemons.remove(DRAWN - 1);
    }
    if daemons.is_empty() { contenders.iter().take(DRAWN).collect() } else { daemons }
}

fn histograms(drawn: &[&Measured]) -> Table {
    let min = drawn.iter().map(|c| c.coverage.min).min().unwrap_or(0);
    let max = drawn.iter().map(|c| c.coverage.max).max().unwrap_or(0);
    let step = (max + 1 - min).div_ceil(ROWS_MAX);
    let of = |contender: &Measured, from: usize| -> usize {
        contender.histogram.iter().skip(from).take(step).sum()
    };
    let rows: Vec<usize> = (min..=max).step_by(step).collect();
    let most = rows.iter().flat_map(|&from| drawn.iter().map(move |c| of(c, from))).max();
    let mut columns = vec![Column::right("", 0)];
    for _ in drawn {
        columns.extend([Column::right("", 0), Column::left("", 0)]);
    }
    let mut table = Table::new(columns);
    let names = drawn.iter().flat_map(|c| [Cell::default(), Cell::new(&c.name, Paint::Bold)]);
    table.row(std::iter::once(Cell::default()).chain(names).collect());
    for &from in &rows {
        let range =
            if step == 1 { from.to_string() } else { format!("{from}..{}", from + step - 1) };
        let mut row = vec![Cell::from(range)];
        for contender in drawn {
            let origins = of(contender, from);
            let bar = bar(origins as f64 / most.unwrap_or(0).max(1) as f64, BAR_WIDTH);
            row.push(if origins == 0 { Cell::default() } else { origins.to_string().into() });
            // As wide as it can get, so that columns of bars do not touch.
            let pad = BAR_WIDTH - bar.chars().count();
            row.push(format!("{bar}{}", " ".repeat(pad)).into());
        }
        table.row(row);
    }
    table
}

/// The answer of `broker sim size` as text.
#[must_use]
pub fn render_size(sizes: &Sizes, style: Style) -> String {
    let Sizes { origins, lost, need, gateways, eps, .. } = sizes;
    let answer = match sizes.random {
        None => "no subset is large enough".to_owned(),
        Some(size) if size.smallest == size.steady => format!("k = {}", size.steady),
        Some(size) => format!(
            "k = {} ({} is enough, too, but not all sizes between)",
            size.steady, size.smallest
        ),
    };
    let head = format!(
        "\
{}

{lost} of {origins} origins are dead, at random. A gateway is short if fewer than {need} of its
k origins are alive. On average {eps} of {gateways} gateways may be short:
",
        style.paint(Paint::Bold, &answer)
    );
    let mut table = Table::new(vec![
        Column::right("K", 0),
        Column::right("NEEDED", 0),
        Column::right("MAY DIE", 0),
        Column::right("P(SHORT)", 0),
        Column::right("GATEWAYS SHORT", 0),
    ]);
    for around in &sizes.around {
        let good = around.short_gateways <= *eps;
        table.row(vec![
            around.size.to_string().into(),
            around.needed.to_string().into(),
            (around.size - around.needed).to_string().into(),
            format!("{:.2e}", around.short).into(),
            Cell::new(
                format!("{:.2e}", around.short_gateways),
                if good { Paint::Good } else { Paint::Bad },
            ),
        ]);
    }
    let around = match sizes.around.len() {
        0 => String::new(),
        _ => format!(
            "\n{}\nWhat is needed is a whole number, so a larger k can be worse; the next {LOOK_AHEAD} \
             were looked at.\n",
            table.render(style, "  ")
        ),
    };
    let known = |size: Option<usize>| {
        size.map_or("no size is enough".to_owned(), |size| format!("k = {size}"))
    };
    let racks = sizes.racks.map(|Racks { rack_max, lost, size }| {
        let plural = if lost == 1 { "" } else { "s" };
        let size = known(size);
        format!(
            "{lost} whole rack{plural}, with {rack_max} of a rack in a subset at most: {size}.\n"
        )
    });
    format!(
        "{head}{around}If not at random, any {lost} origins: {}.\n{}",
        known(sizes.any),
        racks.unwrap_or_default()
    )
}
