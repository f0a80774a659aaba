//! What is in the way of a valid configuration on this host, as far as it shows before anything has
//! started: `broker run` ends because of it, and `broker check` tells.

use std::fs::Metadata;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use super::descriptors;
use crate::admin;
use crate::chain;
use crate::config::Config;
use crate::config::file::Problem;
use crate::config::gateway::{Gateway, Index};
use crate::events::Target;
use crate::fleet;

/// Something that is in the way.
#[derive(Debug)]
pub struct Obstacle {
    /// What it is.
    pub problem: Problem,
    /// Whether it is in the daemon's way for sure. Who looks before it starts does not have its
    /// environment, nor the directories that a service manager makes for it.
    pub certain: bool,
}

/// All that is in the way.
#[must_use]
pub fn obstacles(config: &Config) -> Vec<Obstacle> {
    let all = [
        admin_socket(&config.admin_socket),
        event_log(&config.event_log),
        index(config),
        open_files(config),
    ];
    all.into_iter().flatten().collect()
}

fn obstacle(key: &str, value: String, rule: String, certain: bool) -> Obstacle {
    let problem = Problem { service: None, key: key.to_owned(), value, rule };
    Obstacle { problem, certain }
}

fn admin_socket(path: &Path) -> Option<Obstacle> {
    // A link is not followed, as when it is bound.
    let is_other = |file: Metadata| !file.file_type().is_socket();
    let (rule, certain) = if path.symlink_metadata().is_ok_and(is_other) {
        ("is not a socket, and the daemon does not replace it".to_owned(), true)
    } else {
        let directory = admin::missing_directory(path)?.display();
        let only = "the daemon only makes that of its default";
        (format!("the directory {directory} is not there, and {only}"), false)
    };
    Some(obstacle("admin_socket", quoted(path), rule, certain))
}

fn event_log(target: &Target) -> Option<Obstacle> {
    let Target::File(path) = target else { return None };
    let is_socket = |file: Metadata| file.file_type().is_socket();
    let (rule, certain) = match path.parent() {
        _ if path.metadata().is_ok_and(is_socket) => {
            ("is a socket, and must be a file".to_owned(), true)
        }
        _ if path.is_dir() => ("is a directory, and must be a file".to_owned(), true),
        Some(directory) if !directory.is_dir() => {
            (format!("the directory {} is not there", directory.display()), false)
        }
        _ => return None,
    };
    Some(obstacle("event_log", quoted(path), rule, certain))
}

/// An index that this host does not tell. One in a file may come later.
fn index(config: &Config) -> Option<Obstacle> {
    let Gateway::Configured { index, count, .. } = &config.gateway else { return None };
    let (value, certain) = match index {
        Index::Number(_) | Index::File(_) => return None,
        Index::Hostname => ("\"hostname\"".to_owned(), true),
        Index::Env(name) => (format!("{{ env = {name:?} }}"), std::env::var_os(name).is_some()),
    };
    let error = fleet::identity(index, *count).err()?;
    Some(obstacle("gateway.index", value, chain(error.as_ref()), certain))
}

fn open_files(config: &Config) -> Option<Obstacle> {
    let (limit, rule) = descriptors::obstacle(config)?;
    Some(obstacle(descriptors::KEY, limit.to_string(), rule, false))
}

fn quoted(path: &Path) -> String {
    format!("{:?}", path.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::parse;

    /// What is in the way of a daemon with these keys, and whether that is certain.
    fn found(keys: &str) -> Vec<(String, bool)> {
        let text = format!(
            "{keys}\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"127.0.0.1:1\"]\n\
             origins = [\"10.0.0.1:80\"]\n"
        );
        let config = parse(&text, "f").unwrap_or_else(|e| panic!("{e}"));
        let all = obstacles(&config).into_iter();
        all.map(|obstacle| (obstacle.problem.to_string(), obstacle.certain)).collect()
    }

    #[test]
    fn what_is_not_there() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        assert_eq!(found(""), [], "the default directory is made");
        let keys = format!("admin_socket = {:?}\nevent_log = {:?}", at("a.sock"), at("events"));
        assert_eq!(found(&keys), []);
        let keys = format!("admin_socket = {:?}\nevent_log = {:?}", at("x/a.sock"), at("x/events"));
        let [socket, log] = &found(&keys)[..] else { panic!("{:?}", found(&keys)) };
        let missing = format!("the directory {} is not there", at("x"));
        let start = format!("admin_socket = {:?}: {missing}", at("x/a.sock"));
        assert!(socket.0.starts_with(&start) && !socket.1, "{socket:?}");
        assert_eq!(*log, (format!("event_log = {:?}: {missing}", at("x/events")), false));

        let keys = format!("event_log = {:?}", at(""));
        let rule = "is a directory, and must be a file";
        assert_eq!(found(&keys), [(format!("event_log = {:?}: {rule}", at("")), true)]);
    }

    #[test]
    fn what_is_something_else() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        std::os::unix::fs::symlink(at("socket"), at("link")).unwrap();
        let keys = format!("admin_socket = {:?}\nevent_log = {:?}", at("socket"), at("file"));
        assert_eq!(found(&keys), []);

        let rule = "is not a socket, and the daemon does not replace it";
        for path in [at("file"), at("link"), at("")] {
            let key = format!("admin_socket = {path:?}");
            assert_eq!(found(&key), [(format!("{key}: {rule}"), true)]);
        }
        let key = format!("event_log = {:?}", at("socket"));
        assert_eq!(found(&key), [(format!("{key}: is a socket, and must be a file"), true)]);
    }

    #[test]
    fn an_index_that_the_host_does_not_tell() {
        let index = |index: &str| found(&format!("[gateway]\nindex = {index}\ncount = 1"));
        assert_eq!(index("0"), []);
        assert_eq!(index("{ file = \"/no/such/file\" }"), [], "it may come later");
        let unset = "{ env = \"BROKER_TEST_NO_SUCH_VARIABLE\" }";
        let rule = "the environment variable BROKER_TEST_NO_SUCH_VARIABLE is not set";
        assert_eq!(index(unset), [(format!("gateway.index = {unset}: {rule}"), false)]);
        let rule = "environment variable CARGO_PKG_NAME: \"broker\" is not an index, such as 7";
        let set = "{ env = \"CARGO_PKG_NAME\" }";
        assert_eq!(index(set), [(format!("gateway.index = {set}: {rule}"), true)]);
    }
}
