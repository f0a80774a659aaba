//! Members from a file that is replaced when they change.
//!
//! The directory is followed, not the file: editors and configuration tools write a new file and
//! rename it, and Kubernetes swaps a symbolic link beside it. Where nothing tells of changes (a
//! link that leads elsewhere, a network file system), a look now and then finds them.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use notify::{RecursiveMode, Watcher as _};
use std::sync::Arc;
use tokio::sync::Notify;

use super::{Feed, Membership, Source, document};

/// How often the file is looked at though nothing told of a change.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Largest file that is read.
const FILE_BYTES_MAX: u64 = 64 << 20;

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
            let tell = Arc::clone(&changed);
            let directory = match self.path.parent() {
                Some(parent) if parent != Path::new("") => parent.to_owned(),
                _ => PathBuf::from("."),
            };
            let mut watcher =
                notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
                    // Reading it is an event, too, and must not cause the next one.
                    if !event.is_ok_and(|event| event.kind.is_access()) {
                        tell.notify_one();
                    }
                });
            let mut follows = false;
            let mut seen = None;
            while !feed.is_closed() {
                if !follows && let Ok(watcher) = &mut watcher {
                    // The directory may come later.
                    follows = watcher.watch(&directory, RecursiveMode::NonRecursive).is_ok();
                }
                look(&self.path, &mut seen, &feed);
                tokio::time::timeout(LOOK_EVERY, changed.notified()).await.ok();
            }
        })
    }
}

/// What is in such a file now.
pub fn load(path: &Path) -> Result<Membership, String> {
    let content = read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    parse(path, &content).map_err(|reason| format!("{}: {reason}", path.display()))
}

/// Reads the file, if its content is not the one `seen`.
fn look(path: &Path, seen: &mut Option<Vec<u8>>, feed: &Feed) {
    let content = match read(path) {
        Ok(content) => content,
        Err(error) => {
            *seen = None;
            return feed.lost(format_args!("{}: {error}", path.display()));
        }
    };
    if seen.as_ref() == Some(&content) {
        return;
    }
    match parse(path, &content) {
        Ok(membership) => feed.accept(membership, ""),
        Err(reason) => feed.refuse(format_args!("{}: {reason}", path.display())),
    }
    *seen = Some(content);
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let size = std::fs::metadata(path)?.len();
    if size > FILE_BYTES_MAX {
        let rule = format!("{size} bytes; at most {FILE_BYTES_MAX} are read");
        return Err(std::io::Error::other(rule));
    }
    std::fs::read(path)
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
}
