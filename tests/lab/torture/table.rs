//! The results for people.

use std::fmt::Write as _;

use harness::torture::Failure;

use super::Results;
use crate::text::{Tone, count, paint};

/// Most failures that are shown.
const FAILURES_MAX: usize = 5;

pub(super) fn render(results: &Results, colours: bool) -> String {
    let report = &results.report;
    let mut out = String::new();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate")]
    let title = format!(
        "{} exchanges in {:.1} s ({} per second), {} MB verified",
        count(report.exchanges),
        report.seconds,
        count(report.rate().round() as u64),
        count(report.verified_bytes / 1_000_000),
    );
    // Writing to a String cannot fail.
    writeln!(out, "\n{}\n", paint(&title, Tone::Strong, colours)).ok();
    for (name, n) in [
        ("mismatches", report.mismatches),
        ("duplicated", report.duplicated),
        ("lost", report.lost),
        ("stuck", report.stuck),
        ("end missing", report.eof_missing),
        ("kernel warnings", results.kernel_warnings as u64),
        ("leases left", results.leases_left),
    ] {
        let tone = if n == 0 { Tone::Good } else { Tone::Bad };
        writeln!(out, "{name:<24}{}", paint(&format!("{:>12}", count(n)), tone, colours)).ok();
    }
    for (name, n) in [
        ("errors by origins", report.client_errors_allowed),
        ("left by their client", report.abandoned),
        ("behind the last", report.cancelled),
        ("repeated by the broker", report.repeated),
        ("the kernel's own faults", results.known_kernel_warnings as u64),
    ] {
        writeln!(out, "{name:<24}{:>12}", count(n)).ok();
    }
    for (name, percent) in [
        ("steered by the kernel", results.steered_percent),
        ("... of what could be", results.plain_steered_percent),
    ] {
        if let Some(percent) = percent {
            writeln!(out, "{name:<24}{percent:>10.1} %").ok();
        }
    }
    for (why, n) in &results.not_steered {
        let line = format!("{:>12}  not steered: {why}", count(*n));
        writeln!(out, "{}", paint(&line, Tone::Faint, colours)).ok();
    }
    let heading = format!("\n{:<24}{:>12}{:>12}", "mode", "exchanges", "errors");
    writeln!(out, "{}", paint(&heading, Tone::Faint, colours)).ok();
    for (mode, row) in &report.modes {
        writeln!(out, "{mode:<24}{:>12}{:>12}", count(row.exchanges), count(row.errors)).ok();
    }
    for (cause, n) in &report.allowed {
        writeln!(out, "{}", paint(&format!("{:>12}  {cause}", count(*n)), Tone::Faint, colours))
            .ok();
    }
    for line in &results.kernel_log {
        writeln!(out, "{}", paint(line, Tone::Bad, colours)).ok();
    }
    for failure in report.failures.iter().take(FAILURES_MAX) {
        out.push_str(&show(failure, colours));
    }
    let again = format!("\nThe same draws again: --seed {}", report.seed);
    out.push_str(&paint(&again, Tone::Faint, colours));
    out
}

fn show(failure: &Failure, colours: bool) -> String {
    let Failure { client, seq, mode, seen_by, what, request, expected, got, .. } = failure;
    let kind = format!("{:?}", failure.kind).to_lowercase();
    let title = format!("{kind}: client {client}, request {seq}, {mode} ({seen_by}): {what}");
    let mut out = format!("\n{}\n  {request}\n", paint(&title, Tone::Bad, colours));
    if let Some(offset) = failure.offset {
        writeln!(out, "  first difference at byte {offset}\n  expected {expected}").ok();
    }
    if !got.is_empty() {
        writeln!(out, "  got      {got}").ok();
    }
    out
}
