//! `broker stats`: asks a running daemon, and shows, compares or keeps the answer.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;

use super::interval;
use crate::admin::fetch_snapshot;
use crate::config::ADMIN_SOCKET;
use crate::report::Screen;
use crate::report::explain::render_all;
use crate::report::stats::{View, render};
use crate::stats::Snapshot;

/// Arguments of `broker stats`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The daemon's admin socket.
    #[arg(long, value_name = "PATH", default_value = ADMIN_SOCKET)]
    pub socket: PathBuf,
    /// Print JSON: the snapshot, or with --since the change; with --watch one line each time.
    #[arg(long)]
    pub json: bool,
    /// Show it again and again, with rates.
    #[arg(long, value_name = "SECS", num_args = 0..=1, default_missing_value = "2",
          value_parser = interval)]
    pub watch: Option<Duration>,
    /// Keep the snapshot in a file, to compare with later.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["watch", "since"])]
    pub save: Option<PathBuf>,
    /// Show what has changed since the snapshot in a file.
    #[arg(long, value_name = "FILE")]
    pub since: Option<PathBuf>,
    /// Look for a second longer, and tell why clients of any service fail (see `explain`).
    #[arg(long, conflicts_with_all = ["watch", "json"])]
    pub explain: bool,
}

/// How long is looked for what is rising.
const LOOK: Duration = Duration::from_secs(1);

/// Runs the command.
pub async fn run(args: &Args, screen: Screen, out: &mut impl Write) -> anyhow::Result<()> {
    let since = args.since.as_deref().map(read).transpose()?;
    let mut previous: Option<Snapshot> = None;
    loop {
        let now = fetch_snapshot(&args.socket).await?;
        if let Some(path) = &args.save {
            save(path, &now)?;
        }
        if args.json {
            let shown = since.as_ref().map_or_else(|| now.clone(), |before| now.since(before));
            if args.watch.is_some() {
                serde_json::to_writer(&mut *out, &shown)?;
            } else {
                serde_json::to_writer_pretty(&mut *out, &shown)?;
            }
            writeln!(out)?;
        } else {
            let view = View { now: &now, since: since.as_ref(), previous: previous.as_ref() };
            let text = render(view, screen.style);
            let text = if args.watch.is_some() { screen.frame(&text) } else { text };
            out.write_all(text.as_bytes())?;
        }
        out.flush()?;
        if args.explain {
            tokio::time::sleep(LOOK).await;
            let later = fetch_snapshot(&args.socket).await?;
            out.write_all(render_all(&now, &later, screen.style).as_bytes())?;
        }
        let Some(pause) = args.watch else { return Ok(()) };
        previous = Some(now);
        tokio::time::sleep(pause).await;
    }
}

fn read(path: &Path) -> anyhow::Result<Snapshot> {
    let json = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Snapshot::from_json(&json).with_context(|| format!("{}", path.display()))
}

fn save(path: &Path, snapshot: &Snapshot) -> anyhow::Result<()> {
    let json = serde_json::to_vec_pretty(snapshot)?;
    fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::admin::{self, Health, Source};
    use crate::report::Style;
    use crate::stats::{HostCounters, Process};

    struct Daemon;

    impl Source for Daemon {
        fn snapshot(&self) -> Snapshot {
            let process = Process { now_unix_ms: 5000, uptime_ms: 4000, workers: 1 };
            Snapshot::assemble(process, Vec::new(), Err("test"), HostCounters::default())
        }

        fn events(&self) -> String {
            String::new()
        }

        fn health(&self) -> Health {
            Health { ready: true, draining: false }
        }

        fn drain(&self) {}
    }

    #[tokio::test]
    async fn saves_and_compares() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("a.sock");
        let file = folder.path().join("before.json");
        let listener = admin::bind(&socket).unwrap();
        let server = tokio::spawn(admin::serve(listener, Arc::new(Daemon), std::future::pending()));
        let args =
            Args { socket, json: false, watch: None, save: None, since: None, explain: false };
        let screen = Screen { style: Style::PLAIN, height: None };
        let show = async |args: Args| {
            let mut out = Vec::new();
            let done = run(&args, screen, &mut out).await;
            done.map(|()| String::from_utf8(out).unwrap_or_default())
        };

        let shown = show(Args { save: Some(file.clone()), ..args.clone() }).await.unwrap();
        assert!(shown.contains("no programs: test"), "{shown}");
        let shown = show(Args { explain: true, ..args.clone() }).await.unwrap();
        assert!(shown.ends_with("nothing here makes clients fail now\n"), "{shown}");
        let since = Args { since: Some(file.clone()), ..args.clone() };
        let shown = show(since.clone()).await.unwrap();
        assert!(shown.contains("change within 0 ms"), "{shown}");
        let json = show(Args { json: true, ..since.clone() }).await.unwrap();
        assert!(Snapshot::from_json(json.as_bytes()).is_ok(), "{json}");

        fs::write(&file, "{\"version\": 99}").unwrap();
        let error = format!("{:#}", show(since).await.unwrap_err());
        assert!(error.contains("before.json: a snapshot of layout version 99"), "{error}");
        server.abort();
    }
}
