//! What serde says of a file's shape, in the words of whoever writes such files: key, value and rule, as
//! the other rules have it.

use toml::de::Error;

/// Why `text` does not have the right shape: where, a look at the line, and what it has to obey.
pub(super) fn explain(text: &str, error: &Error) -> String {
    let shown = error.to_string();
    let shown = shown.trim_end();
    let span = error.span().unwrap_or_default();
    let at = At {
        before: text.get(..span.start).unwrap_or_default(),
        value: text.get(span).unwrap_or_default(),
    };
    let Some((place, problem)) =
        shown.strip_suffix(error.message()).zip(at.problem(error.message()))
    else {
        return shown.to_owned();
    };
    format!("{}{problem}", place.strip_prefix("TOML parse error at ").unwrap_or(place))
}

/// Where it went wrong.
struct At<'a> {
    before: &'a str,
    value: &'a str,
}

const SERVICES: &str =
    "each service begins with [[service]], and its tables, such as [service.limits], follow it";

impl At<'_> {
    /// What is to be said instead of serde's message; `None` if that is good enough.
    fn problem(&self, message: &str) -> Option<String> {
        if self.is_service()
            && (message == "duplicate key" || message.starts_with("invalid type: map"))
        {
            return Some(format!("service: {SERVICES}"));
        }
        if message == "duplicate key" {
            return Some(format!("the key `{}` is given twice", self.value));
        }
        if let Some(rest) = message.strip_prefix("missing field ") {
            return Some(format!("the key {rest} is missing"));
        }
        if let Some(rest) = message.strip_prefix("unknown field ") {
            let (key, known) = rest.split_once(", expected ")?;
            let known = known.trim_start_matches("one of ");
            return Some(format!("unknown key {key}; the keys here are {known}"));
        }
        let wrong = ["invalid type: ", "invalid value: "];
        let wrong = wrong.iter().find_map(|start| message.strip_prefix(start))?;
        let (found, expected) = wrong.rsplit_once(", expected ")?;
        let rule = self.rule(expected);
        let value = self.value.lines().next().unwrap_or_default();
        // A table's value is all that follows.
        let value = Some(value).filter(|value| found != "map" && !value.is_empty());
        Some(match (self.key(), value) {
            (Some(key), Some(value)) => format!("{key} = {value}: {rule}"),
            (Some(key), None) => format!("{key}: {rule}"),
            (None, Some(value)) => format!("{value}: {rule}"),
            (None, None) => rule,
        })
    }

    fn is_service(&self) -> bool {
        let name = self.value.trim_start_matches('[');
        let name = name.strip_prefix("service").unwrap_or("x");
        !name.starts_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | '-'))
    }

    /// The key whose value it is, or that of the list that it is in.
    fn key(&self) -> Option<&str> {
        let (before, between) = self.before.rsplit_once('=')?;
        let between = between.trim_start();
        let before = before.trim_end();
        let part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '"');
        let key = &before[before.trim_end_matches(part).len()..];
        (!key.is_empty() && (between.is_empty() || between.starts_with('['))).then_some(key)
    }

    fn rule(&self, expected: &str) -> String {
        match expected {
            "usize" | "u64" | "u32" => "must be a whole number, and not below 0".to_owned(),
            // All of these are percentages.
            "u8" => "must be a whole number of 0..=100".to_owned(),
            "f64" => "must be a number".to_owned(),
            "a boolean" => "must be true or false".to_owned(),
            "a string" => "must be text in quotes".to_owned(),
            "path string" => "must be a path in quotes".to_owned(),
            "a sequence" if self.value.starts_with('"') => {
                format!("must be a list, such as [{}]", self.value)
            }
            "a sequence" => "must be a list, such as [\"a\", \"b\"]".to_owned(),
            table if table.starts_with("struct ") => {
                "must be a table, such as { KEY = VALUE }".to_owned()
            }
            other => format!("must be {other}"),
        }
    }
}
