//! `broker doctor`: the table.

use std::fmt::Write as _;

use super::{Cell, Column, Paint, Style, Table, micros};
use crate::doctor::{Check, Diagnosis, Outcome, Part};

/// Columns of a reason where nobody says how wide it may be.
const REASON_WIDTH: usize = 100;

/// The diagnosis as text.
#[must_use]
pub fn render(diagnosis: &Diagnosis, style: Style) -> String {
    let mut table = Table::new(vec![
        Column::left("", 0),
        Column::left("CHECK", 0),
        Column::left("", 0),
        Column::left("FOUND", 0),
        Column::right("TIME", 1),
        Column::left("NEEDED FOR", 2),
    ]);
    let mut part = None;
    for check in &diagnosis.checks {
        let (word, paint) = match check.outcome {
            Outcome::Ok => ("ok", Paint::Good),
            Outcome::Remark => ("note", Paint::Warn),
            Outcome::Failed => ("failed", Paint::Bad),
            Outcome::NotTried => ("not tried", Paint::Dim),
        };
        let title = if part == Some(check.part) { "" } else { title(check.part) };
        part = Some(check.part);
        table.row(vec![
            Cell::new(title, Paint::Bold),
            check.name.into(),
            Cell::new(word, paint),
            if check.outcome == Outcome::Ok { check.found.as_str() } else { "" }.into(),
            check.took_us.map(micros).unwrap_or_default().into(),
            Cell::new(check.needed_for, Paint::Dim),
        ]);
        if matches!(check.outcome, Outcome::Remark | Outcome::Failed) {
            // A reason can be long, and must not widen the column.
            for line in wrapped(&check.found, style.width.min(REASON_WIDTH)) {
                table.note(line);
            }
        }
    }
    let mut out = table.render(style, "");
    writeln!(out, "\n{}", summary(diagnosis, style))
        .unwrap_or_else(|_| unreachable!("a String takes everything"));
    out
}

fn title(part: Part) -> &'static str {
    match part {
        Part::Host => "host",
        Part::Kernel => "kernel",
        Part::Programs => "programs",
        Part::Steering => "steering",
    }
}

fn summary(diagnosis: &Diagnosis, style: Style) -> String {
    let failed: Vec<&Check> =
        diagnosis.checks.iter().filter(|check| check.outcome == Outcome::Failed).collect();
    let names = failed.iter().map(|check| check.name).collect::<Vec<_>>().join(", ");
    match (diagnosis.steering, diagnosis.healthy) {
        (true, true) => style.paint(Paint::Good, "everything works: clients can be steered"),
        (true, false) => {
            style.paint(Paint::Warn, &format!("clients can be steered, but look at: {names}"))
        }
        (false, _) => style.paint(Paint::Bad, &format!("nothing can be steered: {names}")),
    }
}

/// The lines of a reason, indented below its check.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    const INDENT: &str = "            ";
    let mut lines = vec![format!("{INDENT}└")];
    for word in text.split_whitespace() {
        let line = lines.last_mut().unwrap_or_else(|| unreachable!("there is a first line"));
        if line.trim_start().chars().count() > 1
            && line.chars().count() + 1 + word.chars().count() > width
        {
            lines.push(format!("{INDENT}  {word}"));
        } else {
            line.push(' ');
            line.push_str(word);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::DIAGNOSIS_VERSION;

    fn diagnosis() -> Diagnosis {
        let check = |part, name, outcome, found: &str, took_us| Check {
            part,
            name,
            outcome,
            found: found.to_owned(),
            needed_for: "something",
            took_us,
        };
        Diagnosis {
            version: DIAGNOSIS_VERSION,
            broker_version: "0.1.0".to_owned(),
            healthy: false,
            steering: false,
            checks: vec![
                check(Part::Host, "kernel", Outcome::Ok, "6.18.44", None),
                check(Part::Host, "open files", Outcome::Remark, "4096: raise it", None),
                check(Part::Steering, "peek", Outcome::Ok, "passed", Some(120)),
                check(Part::Steering, "end", Outcome::Failed, "an end after 7 bytes", Some(2100)),
                check(Part::Steering, "order", Outcome::NotTried, "see above", None),
            ],
        }
    }

    #[test]
    fn picture() {
        let shown = render(&diagnosis(), Style::PLAIN);
        let expected = "          CHECK                  FOUND      TIME  NEEDED FOR
host      kernel      ok         6.18.44          something
          open files  note                        something
            └ 4096: raise it
steering  peek        ok         passed   120 µs  something
          end         failed              2.1 ms  something
            └ an end after 7 bytes
          order       not tried                   something

nothing can be steered: end
";
        assert_eq!(shown, expected, "\n{shown}");
    }

    #[test]
    fn reasons_are_whole_on_any_terminal() {
        let mut diagnosis = diagnosis();
        diagnosis.checks[3].found = "word ".repeat(60);
        for width in [20, 40, 80, 200] {
            let shown = render(&diagnosis, Style { color: false, width });
            assert_eq!(shown.matches("word").count(), 60, "{shown}");
        }
    }

    #[test]
    fn summaries() {
        let summary = |steering, healthy| {
            summary(&Diagnosis { healthy, steering, ..diagnosis() }, Style::PLAIN)
        };
        assert!(summary(true, true).starts_with("everything works"));
        assert_eq!(summary(true, false), "clients can be steered, but look at: end");
    }
}
