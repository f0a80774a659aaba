//! The ring and the coverage as a picture for a browser.

use std::f64::consts::{FRAC_PI_2, TAU};
use std::fmt::{self, Write};

use super::drawn;
use crate::sim::{Measured, Report};

const HEIGHT: f64 = 640.0;
/// The ring's circle, within a square of the height.
const RADIUS: f64 = 190.0;
const HISTOGRAM_WIDTH: f64 = 420.0;
const COLOURS: [&str; 3] = ["#4269d0", "#efb118", "#3ca951"];

/// The picture as a document.
#[must_use]
pub fn svg(report: &Report) -> String {
    let mut out = String::new();
    draw(report, &mut out).unwrap_or_else(|_| unreachable!("a String takes everything"));
    out
}

fn draw(report: &Report, out: &mut String) -> fmt::Result {
    let width = HEIGHT + HISTOGRAM_WIDTH;
    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"20\" y=\"28\" font-size=\"16\">{} gateways, {} origins, {} each</text>\n\
         <text x=\"20\" y=\"{}\">Outside: origins on the daemon's ring, as long as they have \
         gateways. Inside: gateways.</text>",
        report.gateways,
        report.origins,
        report.subset,
        HEIGHT - 16.0,
    )?;
    ring(report, out)?;
    let drawn = drawn(&report.contenders);
    let each = (HEIGHT - 80.0) / drawn.len().max(1) as f64;
    let max = drawn.iter().map(|c| c.coverage.max).max().unwrap_or(0);
    for (i, contender) in drawn.into_iter().enumerate() {
        let top = 60.0 + i as f64 * each;
        histogram(contender, COLOURS[i % COLOURS.len()], max, top, each - 40.0, out)?;
    }
    out.push_str("</svg>\n");
    Ok(())
}

fn ring(report: &Report, out: &mut String) -> fmt::Result {
    const CENTRE: f64 = HEIGHT / 2.0;
    let ideal = report.circle.origins.iter().map(|&(_, gateways)| gateways).sum::<usize>() as f64
        / report.circle.origins.len().max(1) as f64;
    let point = |turn: f64, radius: f64| {
        // From the top, clockwise.
        let (sin, cos) = (turn * TAU - FRAC_PI_2).sin_cos();
        (CENTRE + radius * cos, CENTRE + radius * sin)
    };
    let mut spokes = |turn: f64, from: f64, to: f64, colour: &str| {
        let ((x1, y1), (x2, y2)) = (point(turn, from), point(turn, to));
        writeln!(
            out,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
        )
    };
    for &turn in &report.circle.gateways {
        spokes(turn, RADIUS - 14.0, RADIUS, "#888")?;
    }
    for &(turn, gateways) in &report.circle.origins {
        let of_ideal = gateways as f64 / ideal.max(f64::MIN_POSITIVE);
        spokes(turn, RADIUS + 4.0, RADIUS + 4.0 + 40.0 * of_ideal.min(2.5), COLOURS[0])?;
    }
    for (radius, colour) in [(RADIUS, "#888"), (RADIUS + 44.0, "#d33")] {
        writeln!(
            out,
            "<circle cx=\"{CENTRE}\" cy=\"{CENTRE}\" r=\"{radius}\" fill=\"none\" stroke=\"{colour}\"/>"
        )?;
    }
    writeln!(
        out,
        "<text x=\"{CENTRE}\" y=\"{CENTRE}\" text-anchor=\"middle\">red: {ideal:.2} gateways, \
         the ideal</text>"
    )
}

fn histogram(
    contender: &Measured,
    colour: &str,
    max: usize,
    top: f64,
    height: f64,
    out: &mut String,
) -> fmt::Result {
    let left = HEIGHT + 20.0;
    let step = (HISTOGRAM_WIDTH - 40.0) / (max + 1) as f64;
    let most = contender.histogram.iter().copied().max().unwrap_or(0).max(1) as f64;
    let coverage = contender.coverage;
    writeln!(
        out,
        "<text x=\"{left}\" y=\"{top:.1}\">{}: {}..{} gateways, sd {:.2}</text>",
        contender.name, coverage.min, coverage.max, coverage.sd
    )?;
    let base = top + height;
    for (gateways, &origins) in contender.histogram.iter().enumerate() {
        let x = left + gateways as f64 * step;
        let tall = origins as f64 / most * (height - 30.0);
        writeln!(
            out,
            "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{tall:.1}\" fill=\"{colour}\">\
             <title>{origins} origins with {gateways} gateways</title></rect>",
            base - 16.0 - tall,
            step * 0.85,
        )?;
    }
    for gateways in [0, coverage.p50, max] {
        let x = left + (gateways as f64 + 0.4) * step;
        writeln!(
            out,
            "<text x=\"{x:.1}\" y=\"{base:.1}\" text-anchor=\"middle\" font-size=\"11\">{gateways}</text>"
        )?;
    }
    Ok(())
}
