//! Collects problems, and the checks that many keys share.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::super::Problem;
use super::quoted;
use crate::config::Config;

/// Deadlines are sums of instants and these; beyond it they could overflow.
const DURATION_MAX: Duration = Duration::from_hours(365 * 24);

#[derive(Default)]
pub(super) struct Checker {
    service: Option<String>,
    problems: Vec<Problem>,
}

impl Checker {
    /// From now on, keys are those of this service.
    pub(super) fn enter_service(&mut self, index: usize, name: &str) {
        self.service = Some(if name.is_empty() { format!("#{}", index + 1) } else { quoted(name) });
    }

    pub(super) fn broken(&mut self, key: &str, value: impl Display, rule: impl Into<String>) {
        self.problems.push(Problem {
            service: self.service.clone(),
            key: key.to_owned(),
            value: value.to_string(),
            rule: rule.into(),
        });
    }

    /// Refuses a key that means nothing next to another key's value.
    pub(super) fn absent(&mut self, key: &str, value: Option<impl Display>, rule: &str) {
        if let Some(value) = value {
            self.broken(key, value, rule);
        }
    }

    pub(super) fn number<T: Copy + Display + PartialOrd>(
        &mut self,
        key: &str,
        value: Option<T>,
        default: T,
        allowed: RangeInclusive<T>,
    ) -> T {
        match value {
            Some(n) if !allowed.contains(&n) => {
                let rule = format!("must be {}..={}", allowed.start(), allowed.end());
                self.broken(key, n, rule);
                default
            }
            Some(n) => n,
            None => default,
        }
    }

    /// A duration for which zero makes no sense.
    pub(super) fn duration(
        &mut self,
        key: &str,
        text: Option<&str>,
        default: Duration,
    ) -> Duration {
        self.duration_from(key, text, default, Duration::from_nanos(1))
    }

    pub(super) fn duration_from(
        &mut self,
        key: &str,
        text: Option<&str>,
        default: Duration,
        min: Duration,
    ) -> Duration {
        let Some(text) = text else { return default };
        let rule = match humantime::parse_duration(text) {
            Err(_) => "must be a duration such as \"20ms\", \"30s\" or \"5m\"".to_owned(),
            Ok(d) if d.is_zero() && min > Duration::ZERO => "must be longer than zero".to_owned(),
            Ok(d) if d < min => format!("must be at least {}", humantime::format_duration(min)),
            Ok(d) if d > DURATION_MAX => "must be at most 365 days".to_owned(),
            Ok(d) => return d,
        };
        self.broken(key, quoted(text), rule);
        default
    }

    /// One of some words; `None` if it is none of them, or missing without a default.
    pub(super) fn choice<T: Copy>(
        &mut self,
        key: &str,
        text: Option<&str>,
        choices: &[(&str, T)],
        default: Option<T>,
    ) -> Option<T> {
        let found = match text {
            None => default,
            Some(text) => choices.iter().find(|(word, _)| *word == text).map(|(_, value)| *value),
        };
        if found.is_none() {
            let words: Vec<_> = choices.iter().map(|(word, _)| quoted(word)).collect();
            let rule = format!("must be {}", words.join(" or "));
            self.broken(key, text.map(quoted).unwrap_or_default(), rule);
        }
        found
    }

    pub(super) fn finish(self, config: Config) -> Result<Config, Vec<Problem>> {
        if self.problems.is_empty() { Ok(config) } else { Err(self.problems) }
    }
}
