//! What the broker promises, held against what was measured.

use std::fmt::Write as _;

use crate::text::{Tone, paint};

/// A promise: a number that must not be greater than another.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rule {
    what: String,
    measured: f64,
    most: f64,
    unit: &'static str,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Holds on every machine.
    Count,
    /// Is said of a machine that has nothing else to do.
    Time,
}

impl Rule {
    /// At most so many.
    pub(super) fn count(what: impl Into<String>, measured: u64, most: u64) -> Self {
        let (measured, most) = (measured as f64, most as f64);
        Self { what: what.into(), measured, most, unit: "", kind: Kind::Count }
    }

    /// At most so many milliseconds.
    pub(super) fn time_ms(what: impl Into<String>, measured: f64, most: f64) -> Self {
        Self { what: what.into(), measured, most, unit: " ms", kind: Kind::Time }
    }

    /// At most so many microseconds.
    pub(super) fn time_us(what: impl Into<String>, measured: f64, most: f64) -> Self {
        Self { what: what.into(), measured, most, unit: " us", kind: Kind::Time }
    }

    fn is_met(&self) -> bool {
        self.measured <= self.most
    }

    /// Whether the whole run is in order as far as this is concerned.
    pub(super) fn allows_success(&self) -> bool {
        self.is_met() || self.kind == Kind::Time
    }
}

/// A line for each rule.
pub(super) fn render(rules: &[Rule], colours: bool) -> String {
    let mut out = String::new();
    for rule in rules {
        let Rule { what, measured, most, unit, .. } = rule;
        let (mark, tone) = if rule.is_met() { ("met", Tone::Good) } else { ("missed", Tone::Bad) };
        let decimals = usize::from(rule.kind == Kind::Time);
        let text =
            format!("{what:<52}{measured:>9.decimals$}{unit}  <= {most:.decimals$}{unit}  {mark}");
        // Writing to a String cannot fail.
        writeln!(out, "{}", paint(&text, tone, colours)).ok();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_counts_decide_whether_a_run_is_in_order() {
        let [bad, good] = [6, 5].map(|leaked| Rule::count("leaked", leaked, 5));
        assert!(!bad.allows_success() && good.allows_success());
        let slow = Rule::time_ms("pause", 100.1, 100.0);
        assert!(slow.allows_success());
        let text = render(&[bad, good, slow], false);
        let marks: Vec<_> = text.lines().map(|line| line.rsplit(' ').next().unwrap()).collect();
        assert_eq!(marks, ["missed", "met", "missed"], "{text}");
    }
}
