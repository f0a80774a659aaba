//! Rules of `[service.discovery]`.

use std::time::Duration;

use super::super::raw;
use super::check::Checker;
use super::quoted;
use crate::config::discovery::{Discovery, File, OnEmpty, Source};

/// The table that says where members come from; `None` without one, or if it is broken.
pub(super) fn discovery(check: &mut Checker, raw: raw::Discovery) -> Option<Discovery> {
    let debounce = check.duration_from(
        "discovery.debounce",
        raw.debounce.as_deref(),
        Duration::from_millis(200),
        Duration::ZERO,
    );
    let debounce_max = check.duration_from(
        "discovery.debounce_max",
        raw.debounce_max.as_deref(),
        Duration::from_secs(2).max(debounce),
        Duration::ZERO,
    );
    if debounce > debounce_max {
        check.broken(
            "discovery.debounce",
            quoted(raw.debounce.as_deref().unwrap_or("200ms")),
            format!(
                "must not be longer than discovery.debounce_max ({})",
                humantime::format_duration(debounce_max)
            ),
        );
    }
    let on_empty = check.choice(
        "discovery.on_empty",
        raw.on_empty.as_deref(),
        &[("keep", OnEmpty::Keep), ("apply", OnEmpty::Apply)],
        Some(OnEmpty::default()),
    );
    let sources = [raw.file.map(|raw| file(check, raw))];
    let [source] = sources.into_iter().flatten().collect::<Vec<_>>().try_into().unwrap_or_else(
        |found: Vec<_>| {
            let rule = "needs exactly one of `file`";
            check.broken("discovery", format_args!("({} sources)", found.len()), rule);
            [None]
        },
    );
    Some(Discovery { source: source?, debounce, debounce_max, on_empty: on_empty? })
}

fn file(check: &mut Checker, raw: raw::DiscoveryFile) -> Option<Source> {
    if !raw.path.is_absolute() {
        let rule = "must be an absolute path: the daemon's working directory is nobody's";
        check.broken("discovery.file.path", quoted(&raw.path.to_string_lossy()), rule);
        return None;
    }
    Some(Source::File(File { path: raw.path }))
}
