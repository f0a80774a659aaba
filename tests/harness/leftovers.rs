//! Names that tell who made a thing, so that what a killed run has left can be told from what a
//! parallel run is using.

use std::fs;
use std::path::Path;

const PREFIX: &str = "broker-lab-";

/// How the names of our folders and cgroups begin: with the maker's process id.
pub(crate) fn prefix() -> String {
    format!("{PREFIX}{}-", std::process::id())
}

/// Has `remove` remove the entries of `directory` whose makers are no more.
pub(crate) fn sweep(directory: &Path, remove: impl Fn(&Path)) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let maker = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX))
            .and_then(|rest| rest.split_once('-'))
            .and_then(|(pid, _)| pid.parse::<u32>().ok());
        if maker.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            remove(&entry.path());
        }
    }
}
