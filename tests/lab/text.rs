//! Words, numbers and colours for people.

use std::io::IsTerminal as _;
use std::time::Duration;

/// The only way to standard output, which is for results.
#[expect(clippy::print_stdout, reason = "results are what this program is for")]
pub(crate) fn print(text: &str) {
    println!("{text}");
}

/// Whether results go to somebody who sees colours.
pub(crate) fn colours() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}

/// A judgement, shown as a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Good,
    Bad,
    Plain,
    Faint,
    Strong,
}

/// Wraps already padded text into a colour, if wanted.
pub(crate) fn paint(text: &str, tone: Tone, colours: bool) -> String {
    let code = match tone {
        Tone::Good => "32",
        Tone::Bad => "31",
        Tone::Faint => "2",
        Tone::Strong => "1",
        Tone::Plain => return text.to_owned(),
    };
    if colours { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

/// A whole number with thousands separators.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A time in the unit that suits it.
pub(crate) fn time(us: f64) -> String {
    match us {
        ..1_000.0 => format!("{us:.0} us"),
        ..10_000.0 => format!("{:.2} ms", us / 1e3),
        ..1_000_000.0 => format!("{:.1} ms", us / 1e3),
        _ => format!("{:.2} s", us / 1e6),
    }
}

/// Microseconds, for arithmetic.
pub(crate) fn us(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// A bar of `width` cells of which `share` (0 to 1) is filled, to an eighth of a cell.
pub(crate) fn bar(share: f64, width: usize) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let cells = width as f64 * share.clamp(0.0, 1.0);
    let (full, part) = (cells.floor(), cells.fract());
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to width")]
    let (full, part) = (full as usize, (part * 8.0).floor() as usize);
    // Something that is there is seen, however small.
    let part = if full == 0 && part == 0 && share > 0.0 { 1 } else { part };
    let filled = "█".repeat(full) + PARTS[part];
    let length = full + usize::from(part > 0);
    filled + &" ".repeat(width - length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_separated() {
        let shown = [0, 999, 1000, 1_234_567].map(count);
        assert_eq!(shown, ["0", "999", "1,000", "1,234,567"]);
    }

    #[test]
    fn bars_have_the_same_width_and_show_what_is_small() {
        for share in [0.0, 0.001, 0.33, 0.99, 1.0, 2.0] {
            assert_eq!(bar(share, 10).chars().count(), 10, "{share}");
        }
        assert_eq!(bar(0.0, 2), "  ");
        assert_eq!(bar(0.0001, 2), "▏ ");
        assert_eq!(bar(0.75, 2), "█▌");
    }
}
