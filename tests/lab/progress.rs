//! Progress on standard error: in place on a terminal, otherwise a line now and then.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use broker::clock;

use crate::text;

/// Time between two lines where lines stay.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// Time between two updates where they are in place.
const REDRAW_EVERY: Duration = Duration::from_millis(100);

/// Shows how far something is.
#[derive(Debug)]
pub(crate) struct Progress {
    terminal: bool,
    shown_at: Option<Instant>,
    on_line: bool,
}

impl Progress {
    pub(crate) fn new() -> Self {
        Self { terminal: std::io::stderr().is_terminal(), shown_at: None, on_line: false }
    }

    /// Says what happens now.
    pub(crate) fn say(&mut self, what: &str) {
        self.clear();
        eprintln!("{what}");
        self.shown_at = Some(clock::now());
    }

    /// Shows `done` of `all`, if it is time to.
    pub(crate) fn show(&mut self, what: &str, done: u64, all: u64) {
        let now = clock::now();
        let every = if self.terminal { REDRAW_EVERY } else { LINE_EVERY };
        if self.shown_at.is_some_and(|at| now - at < every) {
            return;
        }
        self.shown_at = Some(now);
        if self.terminal {
            let bar = text::bar(done as f64 / all.max(1) as f64, 30);
            eprint!("\r\x1b[K{what}  ▕{bar}▏ {} of {}", text::count(done), text::count(all));
            std::io::stderr().flush().ok();
            self.on_line = true;
        } else {
            eprintln!("{what}: {} of {}", text::count(done), text::count(all));
        }
    }

    /// Leaves an empty line for what comes next.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.on_line) {
            eprint!("\r\x1b[K");
            std::io::stderr().flush().ok();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}
