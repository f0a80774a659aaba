//! The commands that ask and show, apart from where their output goes.
//!
//! In the library, because `cargo xtask` offers them too.

pub mod check;
pub mod doctor;
pub mod events;
pub mod explain;
pub mod observe;
pub mod sim;
pub mod stats;

use std::fmt;
use std::io::Write;
use std::time::Duration;

use serde::Serialize;

/// How a command was used is wrong, in a way that only shows when its arguments are seen together.
#[derive(Debug)]
pub struct UsageError(String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// Writes a result as JSON, or as text for people.
fn show(
    json: bool,
    result: &impl Serialize,
    text: impl FnOnce() -> String,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, result)?;
        writeln!(out)?;
    } else {
        out.write_all(text().as_bytes())?;
    }
    Ok(out.flush()?)
}

/// Parses a time such as `2`, `0.5` (seconds), `500ms` or `10m`.
fn time(text: &str) -> Result<Duration, &'static str> {
    let parsed = match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => humantime::parse_duration(text).ok(),
    };
    parsed.ok_or("must be a time: 30 or 0.5 (seconds), 500ms, 30s, 10m")
}

/// Parses a pause.
fn interval(text: &str) -> Result<Duration, &'static str> {
    // Below that, taking the sample would be most of the work.
    let allowed = Duration::from_millis(50)..=Duration::from_hours(24);
    let pause = time(text).ok().filter(|pause| allowed.contains(pause));
    pause.ok_or("must be 50ms to 24h, such as 2, 0.5 or 500ms")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(time("3"), Ok(Duration::from_secs(3)));
        assert_eq!(time("0.5"), time("500ms"));
        assert_eq!(time("1h 30m"), Ok(Duration::from_mins(90)));
        for wrong in ["", "-1", "nan", "inf", "soon", "3 x", "1e300"] {
            assert!(time(wrong).is_err_and(|rule| rule.contains("30 or 0.5 (seconds)")), "{wrong}");
        }
    }

    #[test]
    fn intervals() {
        assert_eq!(interval("2"), Ok(Duration::from_secs(2)));
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(interval("1m"), Ok(Duration::from_mins(1)));
        for wrong in ["", "0", "-1", "nan", "inf", "soon", "1ms", "1e300"] {
            assert!(interval(wrong).is_err(), "{wrong}");
        }
    }
}
