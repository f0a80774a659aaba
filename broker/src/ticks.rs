//! A coarse clock for waits that are nearly always over before it ticks.

use std::cell::Cell;
use std::time::Duration;

use tokio::sync::Notify;

/// Time between two ticks.
const EVERY: Duration = Duration::from_millis(20);

/// Ticks of one worker, while anybody waits for them.
///
/// A timer of its own for each wait would be set and taken back for every request, and wake the event
/// loop whenever it is the earliest of all.
#[derive(Default)]
pub struct Ticks {
    tick: Notify,
    /// Somebody has begun to wait since the last tick.
    wanted: Cell<bool>,
    begin: Notify,
}

impl Ticks {
    /// The result of `future` if it comes before the tick after the next one, which is 20 to 40 ms away:
    /// the next one may be just about to come.
    pub async fn outrun<F: Future + Unpin>(&self, mut future: F) -> Option<F::Output> {
        let ticks = async {
            self.next().await;
            self.next().await;
        };
        tokio::select! {
            biased;
            output = &mut future => Some(output),
            () = ticks => None,
        }
    }

    async fn next(&self) {
        let tick = self.tick.notified();
        if !self.wanted.replace(true) {
            self.begin.notify_one();
        }
        tick.await;
    }

    /// Ticks for ever.
    pub async fn run(&self) {
        loop {
            self.begin.notified().await;
            while self.wanted.replace(false) {
                tokio::time::sleep(EVERY).await;
                self.tick.notify_waiters();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, poll_fn, ready};
    use std::pin::pin;
    use std::rc::Rc;

    use super::*;
    use crate::clock;

    /// Runs a test beside ticks, of which it is also told how often they have run.
    fn ticking(test: impl AsyncFnOnce(Rc<Ticks>, Rc<Cell<u32>>)) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, async {
            let (ticks, runs) = (Rc::<Ticks>::default(), Rc::<Cell<u32>>::default());
            let (running, counting) = (Rc::clone(&ticks), Rc::clone(&runs));
            tokio::task::spawn_local(async move {
                let mut run = pin!(running.run());
                poll_fn(|cx| {
                    counting.set(counting.get() + 1);
                    run.as_mut().poll(cx)
                })
                .await;
            });
            test(ticks, runs).await;
        });
    }

    #[test]
    fn what_is_ready_outruns_it() {
        ticking(async |ticks, _| {
            let start = clock::now();
            assert_eq!(ticks.outrun(ready(7)).await, Some(7));
            let sleep = pin!(tokio::time::sleep(EVERY / 2));
            assert_eq!(ticks.outrun(sleep).await, Some(()));
            assert_eq!(clock::now() - start, EVERY / 2);
        });
    }

    #[test]
    fn nobody_waits_for_less_than_a_tick_or_more_than_two() {
        ticking(async |ticks, _| {
            // From the first to the last moment between two ticks, and again after a rest.
            for after in [1, 5, 19, 20, 500, 3].map(Duration::from_millis) {
                let other = Rc::clone(&ticks);
                tokio::task::spawn_local(async move { other.outrun(pending::<()>()).await });
                tokio::time::sleep(after).await;
                let start = clock::now();
                assert_eq!(ticks.outrun(pending::<()>()).await, None);
                let took = clock::now() - start;
                assert!((EVERY..=2 * EVERY).contains(&took), "{after:?}: {took:?}");
            }
        });
    }

    #[test]
    fn while_nobody_waits_it_rests() {
        ticking(async |ticks, runs| {
            assert_eq!(ticks.outrun(pending::<()>()).await, None);
            tokio::time::sleep(3 * EVERY).await;
            let before = runs.get();
            tokio::time::sleep(Duration::from_mins(1)).await;
            assert_eq!(runs.get(), before);
            assert_eq!(ticks.outrun(pending::<()>()).await, None);
            assert!(runs.get() > before);
        });
    }
}
