//! Work that takes a while, beside the event loop.

use std::thread;

use anyhow::Context as _;
use tokio::sync::oneshot;

/// Does it in a thread of its own, which the end of the process does not wait for. An error means that
/// there is no thread to be had (`spawn_blocking` would panic then), or that the work has panicked.
pub(crate) async fn aside<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<T> {
    let (send, done) = oneshot::channel();
    thread::Builder::new()
        .name(what.to_owned())
        .spawn(move || send.send(work()).ok())
        .with_context(|| format!("starting a thread for {what:?}"))?;
    done.await.with_context(|| format!("the thread {what:?} has panicked"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_error() {
        assert_eq!(aside("sum", || 1 + 1).await.unwrap(), 2);
        let error = aside::<()>("bad", || panic!("on purpose")).await.unwrap_err();
        assert!(error.to_string().contains("the thread \"bad\" has panicked"), "{error}");
    }
}
