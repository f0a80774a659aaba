//! The cgroups that interception is restricted to, as the kernel knows them now.
//!
//! A service manager removes the cgroup of a service that ends, and makes another one for its next
//! start: the path in the configuration is the same, and the kernel's id is not. A cgroup that is not
//! there is nobody until it is.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Context as _;

use crate::config::Service;
use crate::datapath::{CgroupId, kernel};

/// What is known of them.
#[derive(Default)]
pub(super) struct Cgroups {
    /// Where the paths start.
    mount: PathBuf,
    ids: Mutex<Ids>,
}

/// Those that the configuration names; `None` is one that is not there.
type Ids = BTreeMap<PathBuf, Option<CgroupId>>;

impl Cgroups {
    /// Those of the services that intercept.
    pub(super) fn find(services: &[Service]) -> anyhow::Result<Self> {
        let restricted = |s: &&Service| s.intercepts() && !s.cgroups.is_empty();
        let (mut mount, mut ids) = (PathBuf::new(), Ids::new());
        for service in services.iter().filter(restricted) {
            if ids.is_empty() {
                mount = kernel::mount_point()?;
            }
            for path in &service.cgroups {
                let id = kernel::cgroup_id(&mount, path)
                    .with_context(|| format!("service {:?}", service.name))?;
                let known = ids.insert(path.clone(), id);
                if id.is_none() && known.is_none() {
                    tracing::warn!(
                        cgroup = %path.display(),
                        service = service.name,
                        "there is no such cgroup: nobody in it is intercepted until there is"
                    );
                }
            }
        }
        Ok(Self { mount, ids: Mutex::new(ids) })
    }

    /// Whether no service is restricted.
    pub(super) fn is_empty(&self) -> bool {
        self.ids().is_empty()
    }

    /// Those of a service that are there; `None` if it is not restricted.
    pub(super) fn of(&self, service: &Service) -> Option<Vec<CgroupId>> {
        let ids = self.ids();
        let id = |path| ids.get(path).copied().flatten();
        (!service.cgroups.is_empty()).then(|| service.cgroups.iter().filter_map(id).collect())
    }

    /// Which of a service's are there, for the statistics.
    pub(super) fn present(&self, service: &Service) -> BTreeMap<String, bool> {
        let ids = self.ids();
        let present =
            |path: &PathBuf| Some((path.to_string_lossy().into_owned(), ids.get(path)?.is_some()));
        service.cgroups.iter().filter_map(present).collect()
    }

    /// A panic elsewhere leaves what was found as good as it was.
    fn ids(&self) -> MutexGuard<'_, Ids> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks again. Answers whether something has changed.
    pub(super) fn look(&self) -> bool {
        let mut changed = false;
        for (path, known) in self.ids().iter_mut() {
            // Any other error says nothing of whether it is there.
            let Ok(now) = kernel::cgroup_id(&self.mount, path) else { continue };
            if now == *known {
                continue;
            }
            let cgroup = path.display();
            match (*known, now) {
                (_, None) => tracing::warn!(
                    %cgroup,
                    "the cgroup has been removed: nobody in it is intercepted until it is there again"
                ),
                (None, _) => {
                    tracing::info!(%cgroup, "the cgroup is there; who is in it is intercepted");
                }
                (Some(_), _) => {
                    tracing::info!(%cgroup, "the cgroup is another one now; who is in it is intercepted");
                }
            }
            *known = now;
            changed = true;
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::config::file;

    #[test]
    fn a_cgroup_that_comes_and_goes_is_noticed() {
        let mount = tempfile::tempdir().unwrap();
        let text = "[[service]]\nname = \"web\"\nprotocol = \"http1\"\nintercept = [\"origins\"]\n\
                    origins = [\"10.0.0.1:80\"]\ncgroups = [\"/a\", \"/b\"]\n";
        let config = mount.path().join("broker.toml");
        fs::write(&config, text).unwrap();
        let mut service = file::load(&config).unwrap().services.remove(0);
        let ids = service.cgroups.iter().map(|path| (path.clone(), None)).collect();
        let cgroups = Cgroups { mount: mount.path().to_owned(), ids: Mutex::new(ids) };
        let id = |path| kernel::cgroup_id(mount.path(), Path::new(path)).unwrap().unwrap();
        assert!(!cgroups.look());
        assert_eq!(cgroups.of(&service), Some(Vec::new()), "nobody, and not everybody");

        fs::create_dir(mount.path().join("b")).unwrap();
        assert!(cgroups.look() && !cgroups.look());
        assert_eq!(cgroups.of(&service), Some(vec![id("/b")]));
        let present = [("/a".to_owned(), false), ("/b".to_owned(), true)];
        assert_eq!(cgroups.present(&service), BTreeMap::from(present));

        // Another one is there before the first is gone, or it might have the same number.
        fs::create_dir(mount.path().join("new")).unwrap();
        fs::rename(mount.path().join("new"), mount.path().join("b")).unwrap();
        fs::create_dir(mount.path().join("a")).unwrap();
        assert!(cgroups.look() && !cgroups.look());
        assert_eq!(cgroups.of(&service), Some(vec![id("/a"), id("/b")]));

        fs::remove_dir(mount.path().join("a")).unwrap();
        fs::remove_dir(mount.path().join("b")).unwrap();
        assert!(cgroups.look() && !cgroups.look());
        assert_eq!(cgroups.of(&service), Some(Vec::new()));
        service.cgroups.clear();
        assert_eq!(cgroups.of(&service), None);
    }
}
