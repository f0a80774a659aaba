//! Numbers as people read them: tables, bars, units.
//!
//! Everything here turns values into text; who prints it, and whether to a terminal, is decided by
//! the caller in a [`Style`].

pub mod doctor;
pub mod explain;
pub mod observe;
pub mod sim;
pub mod stats;
mod table;
mod unit;

pub use table::{Align, Cell, Column, Paint, Table};
pub use unit::{bytes, count, micros, millis, percent, plural, rate};

use std::io::IsTerminal;

/// How wide and how colourful the output may be.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// ANSI colours.
    pub color: bool,
    /// Columns of the terminal; the least important ones of a table are left out to fit.
    pub width: usize,
}

impl Style {
    /// No colours, and as wide as it gets: for files, pipes and tests.
    pub const PLAIN: Self = Self { color: false, width: usize::MAX };

    /// What standard output can show. `NO_COLOR` is respected (<https://no-color.org>).
    #[must_use]
    pub fn of_stdout() -> Self {
        let stdout = std::io::stdout();
        if !stdout.is_terminal() {
            return Self::PLAIN;
        }
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let width = terminal_size::terminal_size_of(&stdout);
        Self { color: !no_color, width: width.map_or(80, |(width, _)| usize::from(width.0)) }
    }

    /// Wraps `text` in a colour.
    #[must_use]
    pub fn paint(self, paint: Paint, text: &str) -> String {
        match paint.code() {
            Some(code) if self.color && !text.is_empty() => format!("\x1b[{code}m{text}\x1b[0m"),
            _ => text.to_owned(),
        }
    }

    /// `head` and then `parts`, broken between parts and aligned below the first one where the
    /// width ends; ends with a newline.
    #[must_use]
    pub fn flow(self, head: &str, parts: &[String]) -> String {
        let indent = columns_of(head);
        let mut out = head.to_owned();
        let mut column = indent;
        for (i, part) in parts.iter().enumerate() {
            let width = columns_of(part);
            if i > 0 && column + 3 + width > self.width {
                out.push('\n');
                out.push_str(&" ".repeat(indent));
                column = indent;
            } else if i > 0 {
                out.push_str(" · ");
                column += 3;
            }
            out.push_str(part);
            column += width;
        }
        out.push('\n');
        out
    }
}

/// Where the output goes.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    /// How it may look.
    pub style: Style,
    /// Lines of the terminal; `None` if it is none.
    pub height: Option<usize>,
}

impl Screen {
    /// Standard output.
    #[must_use]
    pub fn of_stdout() -> Self {
        let stdout = std::io::stdout();
        let size = terminal_size::terminal_size_of(&stdout);
        let height = size.map_or(24, |(_, height)| usize::from(height.0));
        Self { style: Style::of_stdout(), height: stdout.is_terminal().then_some(height) }
    }

    /// A picture that takes the place of the one before. On a terminal it is drawn over it (no
    /// flicker) and cut to fit; elsewhere pictures follow each other.
    #[must_use]
    pub fn frame(self, text: &str) -> String {
        let Some(height) = self.height else { return format!("{text}\n") };
        let mut out = String::from("\x1b[H");
        for line in text.lines().take(height.saturating_sub(1)) {
            out.push_str(line);
            out.push_str("\x1b[K\n");
        }
        out.push_str("\x1b[J");
        out
    }
}

/// Columns that a text takes. All characters in use here are one column wide; colours take none.
fn columns_of(text: &str) -> usize {
    let mut in_escape = false;
    text.chars()
        .filter(|&c| {
            let was_in_escape = in_escape;
            in_escape = if was_in_escape { c != 'm' } else { c == '\x1b' };
            !was_in_escape && !in_escape
        })
        .count()
}

/// A bar of `width` columns, filled to `fraction` in steps of an eighth column.
#[must_use]
pub fn bar(fraction: f64, width: usize) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped to 0..=8 * width"
    )]
    let filled = (fraction.clamp(0.0, 1.0) * 8.0 * width as f64).round() as usize;
    // Something is never drawn as nothing.
    let filled = if fraction > 0.0 { filled.max(1) } else { filled };
    format!("{}{}", "█".repeat(filled / 8), EIGHTHS[filled % 8])
}

/// What a server, a file or a peer has said, as one line without anything that a terminal obeys.
#[must_use]
pub fn quoted(text: &str) -> String {
    let harmless = |c: char| match c {
        '\n' | '\r' | '\t' => ' ',
        _ if c.is_control() => char::REPLACEMENT_CHARACTER,
        _ => c,
    };
    text.chars().map(harmless).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars() {
        assert_eq!(bar(0.0, 4), "");
        assert_eq!(bar(0.0001, 4), "▏");
        assert_eq!(bar(0.5, 4), "██");
        assert_eq!(bar(0.55, 4), "██▎");
        assert_eq!(bar(2.0, 4), "████");
        assert_eq!(bar(f64::NAN, 4), "");
    }

    #[test]
    fn flowing_text_breaks_between_parts() {
        let parts = ["one 1", "two 2", "\x1b[33mthree 3\x1b[0m"].map(str::to_owned);
        let flow = |width| Style { color: false, width }.flow("head  ", &parts);
        assert_eq!(columns_of(&parts[2]), 7);
        assert_eq!(flow(80), "head  one 1 · two 2 · \x1b[33mthree 3\x1b[0m\n");
        assert_eq!(flow(28), "head  one 1 · two 2\n      \x1b[33mthree 3\x1b[0m\n");
        assert_eq!(flow(3).lines().count(), 3);
    }

    #[test]
    fn frames_are_drawn_over_each_other_on_terminals_only() {
        let file = Screen { style: Style::PLAIN, height: None };
        assert_eq!(file.frame("a\nb\n"), "a\nb\n\n");
        let terminal = Screen { style: Style::PLAIN, height: Some(2) };
        assert_eq!(terminal.frame("a\nb\n"), "\x1b[Ha\x1b[K\n\x1b[J");
    }

    #[test]
    fn what_others_say_does_nothing_to_the_terminal() {
        assert_eq!(quoted("no such\r\n\thost: “ö”"), "no such   host: “ö”");
        assert_eq!(quoted("\x1b]0;title\x07\u{9b}2J"), "\u{fffd}]0;title\u{fffd}\u{fffd}2J");
    }

    #[test]
    fn paint_only_where_wanted() {
        assert_eq!(Style::PLAIN.paint(Paint::Bad, "x"), "x");
        let style = Style { color: true, width: 80 };
        assert_eq!(style.paint(Paint::Bad, "x"), "\x1b[31mx\x1b[0m");
        assert_eq!(style.paint(Paint::Plain, "x"), "x");
    }
}
