//! Where cgroup v2 is mounted, and how programs name its directories.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use super::LoadError;
use crate::datapath::CgroupId;

/// Where cgroup v2 is mounted; not always `/sys/fs/cgroup`, which may be version 1.
pub fn mount_point() -> Result<PathBuf, LoadError> {
    let mounts = fs::read("/proc/self/mountinfo").map_err(LoadError::MountInfo)?;
    find_cgroup2(&mounts).ok_or(LoadError::NoCgroup2)
}

/// How programs name the cgroup at `path` (`/system.slice/x`) below the [`mount_point`]; `None` if it
/// is not there.
pub fn cgroup_id(mount: &Path, path: &Path) -> Result<Option<CgroupId>, LoadError> {
    match id_below(mount, path) {
        Ok(id) => Ok(Some(id)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(LoadError::Cgroup { path: path.to_owned(), source }),
    }
}

fn id_below(root: &Path, path: &Path) -> io::Result<CgroupId> {
    let mut full = root.to_owned();
    let mut level = 0;
    for component in path.components() {
        match component {
            Component::Normal(name) => {
                full.push(name);
                level += 1;
            }
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "`..` in the path"));
            }
        }
    }
    let directory = fs::metadata(&full)?;
    if !directory.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(CgroupId { id: directory.ino(), level })
}

/// The mount point of a whole cgroup2 tree, or else of a part of one, as containers see it.
fn find_cgroup2(mountinfo: &[u8]) -> Option<PathBuf> {
    let mut part = None;
    for line in mountinfo.split(|&b| b == b'\n') {
        let mut fields = line.split(|&b| b == b' ');
        let (Some(root), Some(mount)) = (fields.nth(3), fields.next()) else { continue };
        // Optional fields end with a lone dash.
        if !fields.any(|field| field == b"-") || fields.next() != Some(b"cgroup2") {
            continue;
        }
        let mount = PathBuf::from(OsString::from_vec(unescape(mount)));
        if root == b"/" {
            return Some(mount);
        }
        part.get_or_insert(mount);
    }
    part
}

/// The kernel writes spaces, tabs, newlines and backslashes as `\` and three octal digits.
fn unescape(mut field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    while let Some((&first, rest)) = field.split_first() {
        field = rest;
        if first == b'\\'
            && let Some((digits, rest)) = field.split_at_checked(3)
            && let Some(byte) = octal(digits)
        {
            plain.push(byte);
            field = rest;
        } else {
            plain.push(first);
        }
    }
    plain
}

fn octal(digits: &[u8]) -> Option<u8> {
    u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(mountinfo: &str, expected: Option<&str>) {
        assert_eq!(find_cgroup2(mountinfo.as_bytes()), expected.map(PathBuf::from), "{mountinfo}");
    }

    #[test]
    fn cgroup2_is_found_wherever_it_is_mounted() {
        check("", None);
        check("24 1 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", Some("/sys/fs/cgroup"));
        check(
            "23 1 0:21 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu\n\
             24 1 0:22 / /sys/fs/cgroup/unified rw shared:10 master:1 - cgroup2 cgroup2 rw\n",
            Some("/sys/fs/cgroup/unified"),
        );
        check("23 1 0:21 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n", None);
        check(r"24 1 0:22 / /a\040b rw - cgroup2 none rw", Some("/a b"));
        check("garbage\n24 1 0:22 / /mnt", None);
    }

    #[test]
    fn the_whole_tree_is_preferred_to_a_part_of_it() {
        let part = "24 1 0:22 /some/part /part rw - cgroup2 cgroup2 rw\n";
        check(part, Some("/part"));
        check(&format!("{part}25 1 0:22 / /whole rw - cgroup2 cgroup2 rw\n"), Some("/whole"));
    }

    #[test]
    fn a_directory_is_named_by_inode_and_depth() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("a/b")).unwrap();
        let inode = |path: &str| fs::metadata(root.path().join(path)).unwrap().ino();
        for (path, same, level) in [("/", ".", 0), ("/a", "a", 1), ("a/./b/", "a/b", 2)] {
            let id = cgroup_id(root.path(), Path::new(path)).unwrap();
            assert_eq!(id, Some(CgroupId { id: inode(same), level }), "{path}");
        }
        fs::write(root.path().join("a/file"), "").unwrap();
        for mistake in ["/a/../a", "/a/file", "/a/file/b"] {
            assert!(cgroup_id(root.path(), Path::new(mistake)).is_err(), "{mistake}");
        }
        for missing in ["/missing", "/missing/b", "/a/c"] {
            assert_eq!(cgroup_id(root.path(), Path::new(missing)).unwrap(), None, "{missing}");
        }
    }
}
