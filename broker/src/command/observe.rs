//! `broker observe`: samples the counting programs and shows what they saw.

use std::io::Write;
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};

use super::{interval, time};
use crate::clock;
use crate::datapath::{Datapath, KernelCounters};
use crate::observe::{Observation, observe};
use crate::report::Screen;
use crate::report::observe::render;

/// Rows of a picture that nobody redraws, unless told otherwise.
const TOP: usize = 20;
/// Lines of the picture that are no rows.
const LINES_AROUND: usize = 6;

/// Arguments of `broker observe`.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Args {
    /// Print JSON: with --for one document at the end, else one line each interval.
    #[arg(long)]
    pub json: bool,
    /// Stop after this long (such as 30s, or 30: seconds) instead of at Ctrl-C.
    #[arg(long = "for", value_name = "TIME", value_parser = time)]
    pub duration: Option<Duration>,
    /// Time between two looks, and over which rates are taken.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    pub interval: Duration,
    /// Most origins to list, worst first. Default: as many as fit; with --json, all.
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,
}

impl Args {
    fn top(&self, screen: Screen) -> usize {
        let fitting = || screen.height.map_or(TOP, |height| height.saturating_sub(LINES_AROUND));
        self.top.unwrap_or_else(|| if self.json { usize::MAX } else { fitting().max(1) })
    }
}

/// Runs the command on programs that count and do nothing else.
pub async fn run(
    args: Args,
    programs: &dyn Datapath,
    screen: Screen,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let watcher = Watcher { args, top: args.top(screen), screen, start: clock::now() };
    let first = programs.counters()?;
    let mut before = (first.clone(), watcher.start);
    // Beyond what a clock can say is until Ctrl-C.
    let end = args.duration.and_then(|d| watcher.start.checked_add(d));
    loop {
        let pause = args.interval.min(end.map_or(Duration::MAX, |end| end - clock::now().min(end)));
        let stop = tokio::select! {
            () = tokio::time::sleep(pause) => end.is_some_and(|end| clock::now() >= end),
            _ = interrupt.recv() => true,
            _ = terminate.recv() => true,
        };
        let now = (programs.counters()?, clock::now());
        if stop {
            // Rates of the whole time: the last interval is of no special interest any more.
            let seen = watcher.compare(&(first, watcher.start), &now);
            return watcher.last(&seen, out);
        }
        watcher.show(&watcher.compare(&before, &now), out)?;
        before = now;
    }
}

struct Watcher {
    args: Args,
    top: usize,
    screen: Screen,
    start: Instant,
}

type Sample = (KernelCounters, Instant);

impl Watcher {
    fn compare(&self, before: &Sample, now: &Sample) -> Observation {
        let interval = now.1.saturating_duration_since(before.1);
        let elapsed = now.1.saturating_duration_since(self.start);
        observe(&before.0, &now.0, interval, elapsed, self.top)
    }

    fn show(&self, seen: &Observation, out: &mut impl Write) -> anyhow::Result<()> {
        // Somebody who said how long waits for the result, unless there is a screen to look at.
        let live = self.args.duration.is_none();
        if self.args.json && live {
            serde_json::to_writer(&mut *out, seen)?;
            writeln!(out)?;
        } else if !self.args.json && (live || self.screen.height.is_some()) {
            out.write_all(self.screen.frame(&render(seen, self.screen.style)).as_bytes())?;
        }
        Ok(out.flush()?)
    }

    fn last(&self, seen: &Observation, out: &mut impl Write) -> anyhow::Result<()> {
        if !self.args.json {
            let text = render(seen, self.screen.style);
            let on_terminal = self.screen.height.is_some();
            let text = if on_terminal { self.screen.frame(&text) } else { text };
            out.write_all(text.as_bytes())?;
        } else if self.args.duration.is_some() {
            serde_json::to_writer_pretty(&mut *out, seen)?;
            writeln!(out)?;
        }
        Ok(out.flush()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::Inert;
    use crate::report::Style;

    const PIPE: Screen = Screen { style: Style::PLAIN, height: None };

    async fn output(args: Args) -> String {
        let mut out = Vec::new();
        run(args, &Inert, PIPE, &mut out).await.unwrap_or_else(|e| panic!("{e:#}"));
        String::from_utf8(out).unwrap_or_default()
    }

    #[tokio::test(start_paused = true)]
    async fn for_a_time_gives_one_result() {
        let args = Args {
            json: false,
            duration: Some(Duration::from_secs(30)),
            interval: Duration::from_secs(1),
            top: None,
        };
        let text = output(args).await;
        assert!(text.starts_with("observed for 30.0 s · 0 handshakes"), "{text}");
        assert_eq!(text.matches("observed").count(), 1);
        let json = output(Args { json: true, ..args }).await;
        let seen: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(seen["elapsed_ms"], 30_000);
        assert_eq!(seen["version"], 1);
    }

    #[test]
    fn as_many_rows_as_fit() {
        let args =
            Args { json: false, duration: None, interval: Duration::from_secs(1), top: None };
        assert_eq!(args.top(PIPE), TOP);
        assert_eq!(args.top(Screen { height: Some(40), ..PIPE }), 34);
        assert_eq!(args.top(Screen { height: Some(3), ..PIPE }), 1);
        assert_eq!(Args { json: true, ..args }.top(PIPE), usize::MAX);
        assert_eq!(Args { top: Some(3), ..args }.top(PIPE), 3);
    }
}
