//! Names that tell who made a thing, so that what a killed run has left can be told from what a
//! parallel run is using; and programs and maps that nobody uses any more.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use aya::maps::loaded_maps;
use aya::programs::loaded_programs;

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

/// A program or a map in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Object {
    /// A program's id.
    Program(u32),
    /// A map's id.
    Map(u32),
}

/// All programs and maps of the broker's that are in the kernel, whoever has put them there.
#[must_use]
pub fn objects() -> HashSet<Object> {
    let is_ours = |name: Option<&str>| name.is_some_and(|name| name.starts_with("broker_"));
    // What goes while we look is gone.
    let programs = loaded_programs().flatten().filter(|p| is_ours(p.name_as_str()));
    let maps = loaded_maps().flatten().filter(|m| is_ours(m.name_as_str()));
    programs.map(|p| Object::Program(p.id())).chain(maps.map(|m| Object::Map(m.id()))).collect()
}

/// The programs and maps that processes have open, by themselves or through a link.
#[must_use]
pub fn held() -> HashSet<Object> {
    let mut held = HashSet::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        for fd in fs::read_dir(process.path().join("fdinfo")).into_iter().flatten().flatten() {
            let info = fs::read_to_string(fd.path()).unwrap_or_default();
            for line in info.lines() {
                let Some((key, value)) = line.split_once(':') else { continue };
                match (key, value.trim().parse()) {
                    ("prog_id", Ok(id)) => held.insert(Object::Program(id)),
                    ("map_id", Ok(id)) => held.insert(Object::Map(id)),
                    _ => false,
                };
            }
        }
    }
    held
}
