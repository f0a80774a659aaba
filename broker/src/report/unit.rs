//! Values with their units.

/// `1234567` as `1,234,567`.
#[must_use]
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 origin`, `2,000 origins`: things whose plural is made with an s.
#[must_use]
pub fn plural(n: u64, thing: &str) -> String {
    format!("{} {thing}{}", count(n), if n == 1 { "" } else { "s" })
}

/// A number per second; small ones keep a decimal.
#[must_use]
pub fn rate(per_second: f64) -> String {
    if per_second == 0.0 {
        return "0".to_owned();
    }
    if per_second < 9.95 {
        return format!("{per_second:.1}");
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "rates are positive and far below 2^53"
    )]
    count(per_second.round() as u64)
}

/// A share of a whole; only a true whole is shown as 100 %.
#[must_use]
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_owned();
    }
    if part >= whole {
        return "100 %".to_owned();
    }
    let tenths = (u128::from(part) * 1000 / u128::from(whole)).to_string();
    let (units, tenth) = tenths.split_at(tenths.len() - 1);
    format!("{}.{tenth} %", if units.is_empty() { "0" } else { units })
}

/// Bytes with a decimal unit, as network people count.
#[must_use]
pub fn bytes(n: u64) -> String {
    scaled(n as f64, &[("B", 1e3), ("kB", 1e3), ("MB", 1e3), ("GB", 1e3), ("TB", f64::INFINITY)])
}

/// Microseconds as a time.
#[must_use]
pub fn micros(us: u64) -> String {
    if us >= 120_000_000 {
        return millis(us / 1000);
    }
    scaled(us as f64, &[("µs", 1e3), ("ms", 1e3), ("s", f64::INFINITY)])
}

/// Milliseconds as a time.
#[must_use]
pub fn millis(ms: u64) -> String {
    let seconds = ms / 1000;
    let (days, hours, minutes) = (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60);
    match seconds {
        0..120 => scaled(ms as f64, &[("ms", 1e3), ("s", f64::INFINITY)]),
        120..3600 => format!("{minutes} m {} s", seconds % 60),
        3600..86400 => format!("{hours} h {minutes} m"),
        _ => format!("{days} d {hours} h"),
    }
}

/// Goes to the next unit while the value reaches its step; three digits at least.
fn scaled(mut value: f64, units: &[(&str, f64)]) -> String {
    let mut whole = true;
    for (unit, step) in units {
        if value < *step {
            let decimals = usize::from(!whole && value < 99.95);
            return format!("{value:.decimals$} {unit}");
        }
        value /= step;
        whole = false;
    }
    unreachable!("the last unit has no end")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_rates() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0.0, 0.25, 9.94, 9.96, 1234.5].map(rate), ["0", "0.2", "9.9", "10", "1,235"]);
    }

    #[test]
    fn percentages_never_round_up_to_all() {
        let shown = [(0, 0), (0, 7), (1, 3), (99_999, 100_000), (7, 7), (1, 100_000)];
        assert_eq!(
            shown.map(|(part, whole)| percent(part, whole)),
            ["-", "0.0 %", "33.3 %", "99.9 %", "100 %", "0.0 %"]
        );
    }

    #[test]
    fn units() {
        assert_eq!([0, 999, 1500, 20_000_000].map(bytes), ["0 B", "999 B", "1.5 kB", "20.0 MB"]);
        assert_eq!([128, 2048, 150_000].map(micros), ["128 µs", "2.0 ms", "150 ms"]);
        assert_eq!(
            [5, 1500, 125_000, 7_300_000, 90_000_000].map(millis),
            ["5 ms", "1.5 s", "2 m 5 s", "2 h 1 m", "1 d 1 h"]
        );
    }
}
