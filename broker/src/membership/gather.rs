//! Gathers changes: what a source says in bursts is taken up once.
//!
//! A deployment replaces members one by one, and each list that differs would open and close
//! sockets. So a change is taken up when the list has rested for a while, or at the latest after a
//! longer while.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::{Latest, Membership};
use crate::config::discovery::OnEmpty;

/// Takes up what a source says, when it has come to rest.
#[derive(Debug)]
pub struct Gather {
    latest: watch::Receiver<Latest>,
    debounce: Duration,
    debounce_max: Duration,
    on_empty: OnEmpty,
    taken: Option<Arc<Membership>>,
}

impl Gather {
    /// Changes of `latest`, after `debounce` without another one, at the latest after
    /// `debounce_max`.
    #[must_use]
    pub fn new(
        latest: watch::Receiver<Latest>,
        debounce: Duration,
        debounce_max: Duration,
        on_empty: OnEmpty,
    ) -> Self {
        Self { latest, debounce, debounce_max, on_empty, taken: None }
    }

    /// Waits for the next list that differs from the last one. The first one does not have to rest.
    /// `None` when the source has ended.
    ///
    /// Dropping the future loses nothing but the time that was waited.
    pub async fn next(&mut self) -> Option<Arc<Membership>> {
        loop {
            if self.taken.is_some() && self.news().is_some() {
                self.rest().await?;
            }
            // It may have come back to what it was.
            if let Some(news) = self.news() {
                self.taken = Some(Arc::clone(&news));
                return Some(news);
            }
            self.latest.changed().await.ok()?;
        }
    }

    /// What there is to take up.
    fn news(&self) -> Option<Arc<Membership>> {
        let latest = self.latest.borrow();
        let membership = latest.membership.as_ref()?;
        let kept = membership.is_empty() && self.on_empty == OnEmpty::Keep;
        (!kept && self.taken.as_ref() != Some(membership)).then(|| Arc::clone(membership))
    }

    /// Waits until the list rests, or for as long as that may take.
    async fn rest(&mut self) -> Option<()> {
        let limit = Instant::now() + self.debounce_max;
        let mut seen = self.latest.borrow_and_update().membership.clone();
        let mut rested = Instant::now() + self.debounce;
        loop {
            tokio::select! {
                changed = self.latest.changed() => changed.ok()?,
                () = sleep_until(rested.min(limit)) => return Some(()),
            }
            let now = self.latest.borrow_and_update().membership.clone();
            if now != seen {
                rested = Instant::now() + self.debounce;
                seen = now;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::super::{Feed, Member};
    use super::*;

    const DEBOUNCE: Duration = Duration::from_millis(200);
    const MAX: Duration = Duration::from_secs(2);

    fn list(members: u8) -> Membership {
        let address = |last| SocketAddr::from(([10, 0, 0, last], 80));
        Membership::new((0..members).map(|last| Member::at(address(last))))
    }

    fn gather(on_empty: OnEmpty) -> (Feed, Gather) {
        let (feed, latest) = Feed::new();
        (feed, Gather::new(latest, DEBOUNCE, MAX, on_empty))
    }

    async fn next(gather: &mut Gather) -> (usize, Duration) {
        let since = Instant::now();
        let members = gather.next().await.expect("the source lives").members().len();
        (members, since.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_rests_first_but_the_first_list_does_not() {
        let (feed, mut gather) = gather(OnEmpty::Keep);
        feed.accept(list(1), "");
        assert_eq!(next(&mut gather).await, (1, Duration::ZERO));
        feed.accept(list(2), "");
        assert_eq!(next(&mut gather).await, (2, DEBOUNCE));
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_that_never_rests_is_taken_up_all_the_same() {
        let (feed, mut gather) = gather(OnEmpty::Keep);
        feed.accept(list(1), "");
        next(&mut gather).await;
        let flapping = tokio::spawn(async move {
            for members in (2..=8).cycle() {
                feed.accept(list(members), "");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        let started = Instant::now();
        for _ in 0..3 {
            next(&mut gather).await;
        }
        let took = started.elapsed();
        assert!(took >= 3 * MAX && took < 4 * MAX, "{took:?}");
        flapping.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_back_to_what_it_was_is_no_change() {
        let (feed, mut gather) = gather(OnEmpty::Keep);
        feed.accept(list(1), "");
        next(&mut gather).await;
        tokio::spawn(async move {
            feed.accept(list(2), "");
            tokio::time::sleep(DEBOUNCE / 2).await;
            feed.accept(list(1), "");
            tokio::time::sleep(3 * DEBOUNCE).await;
            feed.accept(list(3), "");
            // The source lives on.
            std::future::pending::<()>().await;
        });
        assert_eq!(next(&mut gather).await.0, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn an_empty_list_is_a_mistake_unless_told_otherwise() {
        let (feed, mut keeping) = gather(OnEmpty::Keep);
        feed.accept(list(1), "");
        next(&mut keeping).await;
        feed.accept(list(0), "");
        let waited = tokio::time::timeout(10 * MAX, keeping.next()).await;
        assert!(waited.is_err(), "nothing is taken up");

        let (feed, mut applying) = gather(OnEmpty::Drop);
        feed.accept(list(1), "");
        next(&mut applying).await;
        feed.accept(list(0), "");
        assert_eq!(next(&mut applying).await, (0, DEBOUNCE));
    }

    #[tokio::test(start_paused = true)]
    async fn ends_with_its_source() {
        let (feed, mut gather) = gather(OnEmpty::Keep);
        drop(feed);
        assert!(gather.next().await.is_none());
    }
}
