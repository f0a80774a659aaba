//! A source in a thread of its own.
//!
//! What a source reads was written by others. It may be long, come without end, or meet a mistake in one of
//! the libraries that read it; neither the control thread nor another source is to notice anything of
//! that.

use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::oneshot;

use super::{Feed, Source, rng};
use crate::aside::aside;
use crate::chain;
use crate::clock;
use crate::pool::backoff::Backoff;

/// Pauses before a source that has ended is started again.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// Has a source watch for as long as somebody reads what it says, whatever ends it: a panic, or that there
/// was no thread. Dropping the future ends it as soon as it waits for something.
pub(super) async fn keep(name: &str, source: impl Fn() -> Box<dyn Source>, feed: Feed) {
    let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1);
    let mut rng = rng();
    while !feed.is_closed() {
        let began = clock::now();
        // One that ends by itself has told why.
        if let Err(error) = watch(name, source(), feed.clone()).await {
            feed.lost(chain(error.as_ref()));
        }
        let now = clock::now();
        // A list alone is no success: it may be that watching for the next one is not permitted.
        if now.saturating_duration_since(began) > BACKOFF.1 {
            backoff.succeed();
        }
        tokio::time::sleep(backoff.fail(now, &mut rng)).await;
    }
}

/// Until it ends.
async fn watch(name: &str, source: Box<dyn Source>, feed: Feed) -> anyhow::Result<()> {
    // Dropped with the future.
    let (_wanted, unwanted) = oneshot::channel::<Infallible>();
    let work = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            tokio::select! {
                () = source.watch(feed) => {}
                _ = unwanted => {}
            }
        });
        // Nobody waits for what else may be under way.
        runtime.shutdown_background();
        Ok(())
    };
    aside(name, work).await?
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::super::tests::wait;
    use super::super::{Latest, Member, Membership};
    use super::*;

    /// Panics, then ends, and after that watches until it is dropped.
    struct Fragile {
        time: usize,
        alive: Arc<()>,
    }

    impl Source for Fragile {
        fn watch(self: Box<Self>, feed: Feed) -> Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(async move {
                match self.time {
                    0 => panic!("on purpose"),
                    1 => feed.lost("it has ended"),
                    _ => {
                        let origin = Member::at(([10, 0, 0, 1], 80).into());
                        feed.accept(Membership::new([origin]), "");
                        std::future::pending::<()>().await;
                        drop(self.alive);
                    }
                }
            })
        }
    }

    #[tokio::test]
    async fn whatever_ends_it_is_told_and_it_is_started_again() {
        let (feed, mut latest) = Feed::new();
        let alive = Arc::new(());
        let starts = AtomicUsize::new(0);
        let token = Arc::clone(&alive);
        let source = move || -> Box<dyn Source> {
            let time = starts.fetch_add(1, SeqCst);
            Box::new(Fragile { time, alive: Arc::clone(&token) })
        };
        let keeping = tokio::spawn(keep("fragile", source, feed));
        let says = |text: &'static str| {
            move |latest: &Latest| latest.error.as_ref().is_some_and(|error| error.contains(text))
        };
        wait(&mut latest, says("the thread \"fragile\" has panicked")).await;
        wait(&mut latest, says("it has ended")).await;
        wait(&mut latest, |latest| latest.membership.is_some()).await;

        keeping.abort();
        // It ends with whoever wanted it.
        let ended = async {
            while Arc::strong_count(&alive) > 1 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(1), ended).await.unwrap();
    }
}
