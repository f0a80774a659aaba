//! Ctrl-C, SIGTERM and a closed terminal: noted, and looked at wherever we wait, so that every
//! guard is dropped on the way out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Result, bail};
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};

static HAPPENED: AtomicBool = AtomicBool::new(false);

/// From now on those signals no longer end the process by themselves.
pub(crate) fn watch() -> Result<()> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut interrupt, mut terminate, mut hang_up) = {
        let _inside = runtime.enter();
        (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        )
    };
    thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hang_up.recv() => {}
            }
            HAPPENED.store(true, Ordering::Relaxed);
            // Later signals find the tidying under way.
            std::future::pending::<()>().await;
        });
    });
    Ok(())
}

/// Whether one has come.
pub(crate) fn happened() -> bool {
    HAPPENED.load(Ordering::Relaxed)
}

/// Fails if one has come.
pub(crate) fn check() -> Result<()> {
    if happened() {
        bail!("interrupted");
    }
    Ok(())
}
