//! The configuration file: TOML in, a validated [`Config`] or *all* that is wrong with it out.
//!
//! Two steps, because one cannot do both well: serde sees the shape (unknown keys, wrong types,
//! with line and column) and stops at the first problem; `rules` sees meaning, and collects, so
//! that an operator fixes a file in one round.

mod address;
mod raw;
mod rules;
mod shape;
#[cfg(test)]
mod tests;
mod warnings;

use std::fmt;
use std::path::{Path, PathBuf};

pub use warnings::warnings;

use super::Config;

/// Reads, parses and validates a configuration file.
pub fn load(path: &Path) -> Result<Config, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    parse(&text, &path.display().to_string())
}

/// Parses and validates the text of a configuration file; `name` is what errors call it.
pub fn parse(text: &str, name: &str) -> Result<Config, ConfigError> {
    let raw: raw::File = toml::from_str(text).map_err(|e| ConfigError::Shape {
        name: name.to_owned(),
        problem: shape::explain(text, &e),
    })?;
    rules::validate(raw)
        .map_err(|problems| ConfigError::Invalid { name: name.to_owned(), problems })
}

/// Why there is no configuration.
#[derive(Debug)]
pub enum ConfigError {
    /// The file could not be read.
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not TOML, or not of the right shape: an unknown key, a missing one, a wrong type.
    Shape {
        /// The file.
        name: String,
        /// Where, and what.
        problem: String,
    },
    /// Well-formed, but it breaks rules.
    Invalid {
        /// The file.
        name: String,
        /// Every broken rule, in the order of the file. Never empty.
        problems: Vec<Problem>,
    },
}

impl ConfigError {
    /// An error, if there are any problems.
    pub fn if_any(path: &Path, problems: Vec<Problem>) -> Result<(), Self> {
        match problems[..] {
            [] => Ok(()),
            _ => Err(Self::Invalid { name: path.display().to_string(), problems }),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read { path, .. } => write!(f, "cannot read {}", path.display()),
            Self::Shape { name, problem } => write!(f, "{name}: {problem}"),
            Self::Invalid { name, problems } => {
                for (i, problem) in problems.iter().enumerate() {
                    let end_of_line = if i + 1 < problems.len() { "\n" } else { "" };
                    write!(f, "{name}: {problem}{end_of_line}")?;
                }
                Ok(())
            }
        }
    }
}

impl std::error::Error for ConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Read { source, .. } => Some(source),
            Self::Shape { .. } | Self::Invalid { .. } => None,
        }
    }
}

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The service, if the key is one of a service's: its quoted name, or `#3` without a usable one.
    pub service: Option<String>,
    /// Path of the key below that, such as `pool.idle_ttl`.
    pub key: String,
    /// The offending value as written; empty when the key is missing.
    pub value: String,
    /// What the value has to obey.
    pub rule: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(service) = &self.service {
            write!(f, "service {service}: ")?;
        }
        write!(f, "{}", self.key)?;
        if !self.value.is_empty() {
            write!(f, " = {}", self.value)?;
        }
        write!(f, ": {}", self.rule)
    }
}
