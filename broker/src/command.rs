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

/// Parses a pause such as `2`, `0.5` (seconds) or `500ms`.
fn interval(text: &str) -> Result<Duration, String> {
    let parsed = match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => humantime::parse_duration(text).ok(),
    };
    // Below that, taking the sample would be most of the work.
    parsed
        .filter(|d| (Duration::from_millis(50)..=Duration::from_hours(24)).contains(d))
        .ok_or_else(|| "must be 50ms to 24h, such as 2, 0.5 or 500ms".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

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
