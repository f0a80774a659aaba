//! Members from a file that is replaced when they change.
//!
//! The directory is followed, not the file: editors and configuration tools write a new file and
//! rename it, and Kubernetes swaps a symbolic link beside it. Where nothing tells of changes (a
//! link that leads elsewhere, a network file system), a look now and then finds them.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::{Notify, oneshot};

use super::document::{self, BYTES_MAX};
use super::{Feed, Membership, Source};
use crate::clock;

/// How often the file is looked at though nothing told of a change.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// A file to watch.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
}

impl File {
    /// The file at `path`, in one of the forms of [`document`]: TOML if it is called `….toml`, and
    /// JSON otherwise.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }
}

impl Source for File {
    fn watch(self: Box<Self>, feed: Feed) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let changed = Arc::new(Notify::new());
            let mut reader = match Reader::start(self.path.clone(), feed.clone(), &changed) {
                Ok(reader) => reader,
                Err(error) => return feed.lost(format_args!("a thread to read with: {error}")),
            };
            while !feed.is_closed() {
                while tokio::time::timeout(LOOK_EVERY, reader.look()).await.is_err() {
                    let path = self.path.display();
                    feed.lost(format_args!("{path}: its file system does not answer"));
                }
                tokio::time::timeout(LOOK_EVERY, changed.notified()).await.ok();
            }
        })
    }
}

/// Looks at the file, in a thread of its own: a network file system may take its time, or never answer,
/// and nobody else may wait for that. That includes the end of the daemon, which is why it is none of the
/// runtime's threads.
struct Reader {
    looks: mpsc::Sender<oneshot::Sender<()>>,
    /// Completes when the look that is under way has ended.
    looking: Option<oneshot::Receiver<()>>,
}

impl Reader {
    /// Starts the thread, which ends after the look in which the reader is dropped. Tells of each change.
    fn start(path: PathBuf, feed: Feed, changed: &Arc<Notify>) -> io::Result<Self> {
        let (looks, asked) = mpsc::channel::<oneshot::Sender<()>>();
        let tell = Arc::clone(changed);
        let look = move || {
            let directory = match path.parent() {
                Some(parent) if parent != Path::new("") => parent.to_owned(),
                _ => PathBuf::from("."),
            };
            let mut watcher = None;
            let mut follows = false;
            let mut seen = None;
            for done in asked {
                if watcher.is_none() {
                    watcher = watch(thread::Builder::new(), &tell).ok();
                }
                if !follows && let Some(watcher) = &mut watcher {
                    // The directory may come later.
                    follows = watcher.watch(&directory, RecursiveMode::NonRecursive).is_ok();
                }
                look(&path, &mut seen, &feed);
                done.send(()).ok();
            }
        };
        thread::Builder::new().name("origins-file".into()).spawn(look)?;
        Ok(Self { looks, looking: None })
    }

    /// Waits for the look that is under way, or for a new one. Dropping the future drops only the waiting.
    async fn look(&mut self) {
        let looks = &self.looks;
        let looking = self.looking.get_or_insert_with(|| {
            let (done, looking) = oneshot::channel();
            // An error means that the thread is gone, and is seen below.
            looks.send(done).ok();
            looking
        });
        looking.await.ok();
        self.looking = None;
    }
}

/// Tells of each change of what the watcher is to follow.
///
/// It does not say that it could not start its thread, and panics once it is used or dropped. One of ours,
/// which does nothing, is an error then, and the next look tries again.
fn watch(ours: thread::Builder, changed: &Arc<Notify>) -> notify::Result<RecommendedWatcher> {
    ours.spawn(|| ())?.join().ok();
    let tell = Arc::clone(changed);
    notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading it is an event, too, and must not cause the next one.
        if !event.is_ok_and(|event| event.kind.is_access()) {
            tell.notify_one();
        }
    })
}

/// What is in such a file now.
pub fn load(path: &Path) -> Result<Membership, String> {
    let content = read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    parse(path, &content).map_err(|reason| format!("{}: {reason}", path.display()))
}

/// Reads the file, if its content is not the one `seen`.
fn look(path: &Path, seen: &mut Option<Vec<u8>>, feed: &Feed) {
    let since = clock::now();
    let content = match read(path) {
        Ok(content) => content,
        Err(error) => {
            *seen = None;
            return feed.lost(format_args!("{}: {error}", path.display()));
        }
    };
    // After so long it was said that the file cannot be had, so that the same content is news.
    let slow = clock::now().saturating_duration_since(since) >= LOOK_EVERY;
    if seen.as_ref() == Some(&content) && !slow {
        return;
    }
    match parse(path, &content) {
        Ok(membership) => feed.accept(membership, ""),
        Err(reason) => feed.refuse(format_args!("{}: {reason}", path.display())),
    }
    *seen = Some(content);
}

/// Reads a regular file: pipes and devices may have no end, or nothing for as long as nobody writes.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    // A pipe is opened without waiting for somebody at its other end.
    let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("is no regular file"));
    }
    // It may grow meanwhile, and some file systems do not know the length.
    let mut content = Vec::new();
    file.take(BYTES_MAX as u64 + 1).read_to_end(&mut content)?;
    if content.len() > BYTES_MAX {
        return Err(io::Error::other(format!("more than {BYTES_MAX} bytes")));
    }
    Ok(content)
}

fn parse(path: &Path, content: &[u8]) -> Result<Membership, String> {
    let text = std::str::from_utf8(content).map_err(|e| e.to_string())?;
    if path.extension().is_some_and(|e| e == "toml") {
        document::from_toml(text)
    } else {
        document::from_json(text)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Latest;
    use super::super::tests::wait;
    use super::*;

    fn count(latest: &Latest) -> Option<usize> {
        latest.membership.as_ref().map(|m| m.members().len())
    }

    #[tokio::test]
    async fn follows_renames_rewrites_and_links() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("origins.json");
        let (feed, mut latest) = Feed::new();
        let source = tokio::spawn(Box::new(File::new(path.clone())).watch(feed));
        wait(&mut latest, |l| l.error.is_some()).await;

        std::fs::write(&path, r#"["10.0.0.1:80"]"#).unwrap();
        wait(&mut latest, |l| count(l) == Some(1)).await;

        let next = directory.path().join("next");
        std::fs::write(&next, r#"["10.0.0.1:80", "10.0.0.2:80"]"#).unwrap();
        std::fs::rename(&next, &path).unwrap();
        wait(&mut latest, |l| count(l) == Some(2)).await;

        // As Kubernetes does it: the file is a link through a link that is swapped.
        for (name, content) in [("v1", "[]"), ("v2", r#"["10.0.0.3:80"]"#)] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
            std::fs::write(directory.path().join(name).join("origins.json"), content).unwrap();
            let data = directory.path().join("data");
            let link = directory.path().join("link");
            std::os::unix::fs::symlink(name, &link).unwrap();
            std::fs::rename(&link, &data).unwrap();
            if name == "v1" {
                std::os::unix::fs::symlink("data/origins.json", &link).unwrap();
                std::fs::rename(&link, &path).unwrap();
            }
            let expected = usize::from(name == "v2");
            wait(&mut latest, |l| count(l) == Some(expected)).await;
        }
        source.abort();
    }

    #[tokio::test]
    async fn a_bad_or_lost_file_keeps_the_last_good_list() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("origins.toml");
        std::fs::write(&path, "origins = [\"10.0.0.1:80\"]").unwrap();
        let (feed, mut latest) = Feed::new();
        let source = tokio::spawn(Box::new(File::new(path.clone())).watch(feed));
        wait(&mut latest, |l| count(l) == Some(1)).await;

        std::fs::write(&path, "origins = [\"10.0.0.1\"]").unwrap();
        let refused = wait(&mut latest, |l| l.refused == 1).await;
        assert_eq!(count(&refused), Some(1));
        assert!(refused.error.is_some_and(|e| e.contains("ADDRESS:PORT")));

        std::fs::remove_file(&path).unwrap();
        let gone = |l: &Latest| l.error.as_ref().is_some_and(|e| e.contains("No such file"));
        assert_eq!(count(&wait(&mut latest, gone).await), Some(1));

        // The same content as before is news again, because it was gone.
        std::fs::write(&path, "origins = [\"10.0.0.1:80\"]").unwrap();
        wait(&mut latest, |l| l.error.is_none()).await;
        source.abort();
    }

    #[tokio::test]
    async fn what_has_no_end_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for path in [fifo.as_path(), Path::new("/dev/zero"), directory.path()] {
            let (feed, mut latest) = Feed::new();
            let source = tokio::spawn(Box::new(File::new(path.to_owned())).watch(feed));
            let told = wait(&mut latest, |l| l.error.is_some()).await;
            assert!(told.error.unwrap().ends_with("is no regular file"), "{}", path.display());
            source.abort();
        }
        let large = directory.path().join("large");
        std::fs::File::create(&large).unwrap().set_len(BYTES_MAX as u64 + 1).unwrap();
        assert!(load(&large).is_err_and(|e| e.contains("more than")));
    }

    #[test]
    fn no_thread_to_be_had_is_an_error() {
        let changed = Arc::new(Notify::new());
        // As if there were none: no memory is that large.
        let none = thread::Builder::new().stack_size(1 << 60);
        assert!(watch(none, &changed).is_err());
        assert!(watch(thread::Builder::new(), &changed).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_a_file_system_that_does_not_answer() {
        let (looks, asked) = mpsc::channel();
        let mut reader = Reader { looks, looking: None };
        assert!(tokio::time::timeout(LOOK_EVERY, reader.look()).await.is_err());
        assert!(tokio::time::timeout(LOOK_EVERY, reader.look()).await.is_err());
        let done: oneshot::Sender<()> = asked.try_recv().unwrap();
        assert!(asked.try_recv().is_err(), "one look at a time");
        done.send(()).unwrap();
        reader.look().await;
    }
}
