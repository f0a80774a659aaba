//! Who this gateway is among the gateways of its fleet: a small number that no other one has.
//!
//! Subsets are computed from it, on every gateway alone. What matters is therefore that an index is
//! *stable*: it survives restarts, network failures and the loss of whatever hands it out. Once it
//! is known it only changes if another gateway has it.
//!
//! An index is configured (a number, the host's name, a file, an environment variable) or claimed
//! in a registry in etcd, under a lease (see [`claim`]).

pub mod claim;
mod etcd;
mod registry;

use std::collections::BTreeMap;
use std::env::VarError;
use std::fs;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::claim::Want;
use self::registry::Registry;
use crate::chain;
use crate::clock;
use crate::config::gateway::{Etcd, Gateway, Index};
use crate::datapath::Datapath;
use crate::origin::subset::hash;

/// How often a file with an index is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How long giving an index back may take. If it fails, the index is free when its lease ends.
const LEAVE_LIMIT: Duration = Duration::from_secs(2);

/// Who this gateway is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Below `gateways`.
    pub index: u32,
    /// How many positions the fleet has. With a registry this is the highest index taken plus one,
    /// not the number of holders: positions are indices, and one that is free for a moment, because
    /// its gateway is being restarted, must not move the others.
    pub gateways: u32,
}

/// What is known about this gateway's place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// `None` until it is known; from then on the last one.
    pub identity: Option<Identity>,
    /// Where the index comes from, in the configuration's words: `number`, `hostname`, `file`,
    /// `env` or `etcd`.
    pub source: &'static str,
    /// Since when this index is held.
    pub since: Option<Instant>,
    /// What is wrong now, by what it concerns (`file`, `etcd`). The identity stays meanwhile.
    pub errors: BTreeMap<&'static str, String>,
    /// Who else has this index, as long as that is so.
    pub conflict: Option<String>,
    /// Times that another gateway was found to have this one's index.
    pub conflicts: u64,
}

impl Status {
    /// What is wrong now, as one text.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        let all: Vec<_> =
            self.errors.iter().map(|(part, text)| format!("{part}: {text}")).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}

/// The place of this gateway, kept up to date until it is dropped.
///
/// Dropping it gives nothing back, like a crash: that is [`Fleet::leave`]'s.
#[derive(Debug)]
pub struct Fleet {
    status: watch::Receiver<Status>,
    running: Option<Running>,
}

impl Fleet {
    /// What is known, now and later.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Gives the index back, so that another gateway can have it at once. Takes two seconds at
    /// most.
    pub async fn leave(self) {
        if let Some(running) = self.running {
            running.leave().await;
        }
    }
}

/// Finds out who this gateway is. Must be called within a runtime.
///
/// Fails if the host's name or the environment has no index: waiting does not change that.
/// Whatever may come later (a file, a registry) is waited for, see [`Status::errors`]. Sockets are
/// marked in `datapath` as the broker's own.
pub fn start(gateway: &Gateway, datapath: Arc<dyn Datapath>) -> anyhow::Result<Fleet> {
    let (status, shown) = watch::channel(Status::default());
    let place = Place(Arc::new(status));
    let running = match gateway {
        Gateway::Claimed(etcd) => {
            place.is_from("etcd");
            Some(Running::registry(etcd, Want::Lowest, place, datapath))
        }
        Gateway::Configured { index, count, registry } => {
            configured(index, *count, registry.as_ref(), place, datapath)?
        }
    };
    Ok(Fleet { status: shown, running })
}

fn configured(
    index: &Index,
    count: NonZeroU32,
    registry: Option<&Etcd>,
    place: Place,
    datapath: Arc<dyn Datapath>,
) -> anyhow::Result<Option<Running>> {
    let source = match index {
        Index::File(_) => {
            place.is_from("file");
            let file = File { index: index.clone(), count, registry: registry.cloned() };
            return Ok(Some(Running::start(|left| file.follow(place, datapath, left))));
        }
        Index::Hostname => "hostname",
        Index::Env(_) => "env",
        Index::Number(_) => "number",
    };
    place.is_from(source);
    let identity = identity(index, count)?;
    place.hold(identity);
    let want = Want::Index(identity.index);
    Ok(registry.map(|etcd| Running::registry(etcd, want, place, datapath)))
}

/// Who this gateway is, as a configured index tells now.
pub fn identity(index: &Index, count: NonZeroU32) -> anyhow::Result<Identity> {
    let index = match index {
        Index::Number(index) => *index,
        Index::Hostname => ordinal(&hostname()?)?,
        Index::Env(variable) => variable_number(variable)?,
        Index::File(path) => file_number(path)?,
    };
    Identity::new(index, count)
}

impl Identity {
    /// For a gateway that does not know yet which one it is, and has to choose all the same: an
    /// index of its own, beyond those of any fleet, so that nobody reckons with it.
    #[must_use]
    pub fn stand_in() -> Self {
        let name = hostname().unwrap_or_default();
        let hash = hash::well_mixed(&name) % (1 << 31);
        Self { index: u32::try_from(hash).unwrap_or_default() | 1 << 31, gateways: 1 }
    }

    fn new(index: u32, count: NonZeroU32) -> anyhow::Result<Self> {
        let gateways = count.get();
        anyhow::ensure!(index < gateways, "index {index} is not below gateway.count = {gateways}");
        Ok(Self { index, gateways })
    }
}

/// A task that ends with its handle, and can be asked to end in good order.
#[derive(Debug)]
struct Running {
    leave: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Running {
    fn start<F>(run: impl FnOnce(watch::Receiver<bool>) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (leave, left) = watch::channel(false);
        Self { leave, task: tokio::spawn(run(left)) }
    }

    fn registry(etcd: &Etcd, want: Want, place: Place, datapath: Arc<dyn Datapath>) -> Self {
        place.waits(registry::PART);
        Self::start(|left| Registry::new(etcd.clone(), want, place, datapath).run(left))
    }

    async fn leave(mut self) {
        self.leave.send_replace(true);
        if tokio::time::timeout(LEAVE_LIMIT, &mut self.task).await.is_err() {
            tracing::warn!("the gateway's index could not be given back; its lease has to end");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An index in a file.
#[derive(Debug)]
struct File {
    index: Index,
    count: NonZeroU32,
    registry: Option<Etcd>,
}

impl File {
    async fn follow(
        self,
        place: Place,
        datapath: Arc<dyn Datapath>,
        mut left: watch::Receiver<bool>,
    ) {
        let mut held = None;
        let mut entered: Option<Running> = None;
        loop {
            match identity(&self.index, self.count) {
                Ok(identity) if held == Some(identity) => place.works("file"),
                Ok(identity) => {
                    if let Some(entered) = entered.take() {
                        entered.leave().await;
                    }
                    held = Some(identity);
                    place.hold(identity);
                    place.works("file");
                    entered = self.registry.as_ref().map(|etcd| {
                        let want = Want::Index(identity.index);
                        Running::registry(etcd, want, place.clone(), Arc::clone(&datapath))
                    });
                }
                Err(error) => place.fails("file", chain(error.as_ref())),
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                Ok(_) = left.wait_for(|left| *left) => break,
            }
        }
        if let Some(entered) = entered {
            entered.leave().await;
        }
    }
}

/// Where what is found out is shown.
#[derive(Clone, Debug)]
struct Place(Arc<watch::Sender<Status>>);

impl Place {
    fn is_from(&self, source: &'static str) {
        self.0.send_modify(|status| status.source = source);
    }

    /// This is who we are from now on.
    fn hold(&self, identity: Identity) {
        self.0.send_if_modified(|status| {
            if status.identity == Some(identity) {
                return false;
            }
            if status.identity.map(|i| i.index) != Some(identity.index) {
                status.since = Some(clock::now());
            }
            status.identity = Some(identity);
            let Identity { index, gateways } = identity;
            tracing::info!(index, gateways, source = status.source, "gateway index");
            true
        });
    }

    fn identity(&self) -> Option<Identity> {
        self.0.borrow().identity
    }

    fn fails(&self, part: &'static str, text: String) {
        self.0.send_if_modified(|status| {
            if status.errors.get(part) == Some(&text) {
                return false;
            }
            let known = status.identity.map_or("none is known yet", |_| "keeping the last one");
            tracing::warn!(part, error = text, "gateway index: {known}");
            status.errors.insert(part, text);
            true
        });
    }

    /// Nothing is wrong yet, but nothing is known either.
    fn waits(&self, part: &'static str) {
        self.0.send_modify(|status| {
            status.errors.insert(part, "no answer yet".to_owned());
        });
    }

    fn works(&self, part: &'static str) {
        self.0.send_if_modified(|status| status.errors.remove(part).is_some());
    }

    /// Somebody else has our index.
    fn clashes(&self, text: String) {
        self.0.send_if_modified(|status| {
            if status.conflict.as_ref() == Some(&text) {
                return false;
            }
            tracing::error!(conflict = text, "two gateways with one index");
            status.conflicts += 1;
            status.conflict = Some(text);
            true
        });
    }

    /// Nobody else has our index (any more).
    fn is_ours(&self) {
        self.0.send_if_modified(|status| status.conflict.take().is_some());
    }
}

fn hostname() -> anyhow::Result<String> {
    let path = "/proc/sys/kernel/hostname";
    Ok(fs::read_to_string(path).context(path)?.trim_end().to_owned())
}

/// The number at the end of a name: `name-7` or `name-7.some.domain`.
fn ordinal(hostname: &str) -> anyhow::Result<u32> {
    let name = hostname.split('.').next().unwrap_or_default();
    let digits = name.rsplit_once('-').map(|(_, digits)| digits);
    digits.and_then(|digits| digits.parse().ok()).with_context(|| {
        format!("the host's name, {hostname:?}, has no number at its end, as name-7 has")
    })
}

fn variable_number(variable: &str) -> anyhow::Result<u32> {
    let what = || format!("environment variable {variable}");
    match std::env::var(variable) {
        Ok(text) => number(&text).with_context(what),
        Err(VarError::NotPresent) => anyhow::bail!("the {} is not set", what()),
        Err(VarError::NotUnicode(_)) => anyhow::bail!("{}: is not text", what()),
    }
}

fn file_number(path: &Path) -> anyhow::Result<u32> {
    let text = fs::read_to_string(path);
    text.map_err(anyhow::Error::new)
        .and_then(|text| number(&text))
        .with_context(|| path.display().to_string())
}

fn number(text: &str) -> anyhow::Result<u32> {
    let text = text.trim();
    text.parse().map_err(|_not_a_number| anyhow::anyhow!("{text:?} is not an index, such as 7"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::Inert;

    fn fleet(index: Index, count: u32) -> anyhow::Result<Fleet> {
        let count = NonZeroU32::new(count).expect("not zero");
        let gateway = Gateway::Configured { index, count, registry: None };
        start(&gateway, Arc::new(Inert))
    }

    #[test]
    fn ordinals() {
        assert_eq!(ordinal("gateway-7").ok(), Some(7));
        assert_eq!(ordinal("edge-gw-0012.edge.svc.cluster.local").ok(), Some(12));
        for bad in ["gateway", "gateway7", "gateway-", "gateway-7a", "", "web.example-7"] {
            let error = ordinal(bad).unwrap_err().to_string();
            assert!(error.contains("no number at its end"), "{bad}: {error}");
        }
    }

    #[test]
    fn what_is_configured_is_known_at_once() {
        let seven = fleet(Index::Number(7), 500).unwrap();
        let status = seven.status().borrow().clone();
        assert_eq!(status.identity, Some(Identity { index: 7, gateways: 500 }));
        assert_eq!((status.source, status.error()), ("number", None));
        let error = fleet(Index::Number(7), 7).unwrap_err().to_string();
        assert_eq!(error, "index 7 is not below gateway.count = 7");
        let unset = fleet(Index::Env("BROKER_TEST_NO_SUCH_VARIABLE".into()), 7).unwrap_err();
        assert!(format!("{unset:#}").contains("BROKER_TEST_NO_SUCH_VARIABLE"), "{unset:#}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_may_come_later_and_change() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("index");
        let fleet = fleet(Index::File(path.clone()), 10).unwrap();
        let mut status = fleet.status();
        let failed = status.wait_for(|s| s.error().is_some()).await.unwrap().clone();
        assert_eq!(failed.identity, None);
        assert!(failed.error().is_some_and(|e| e.contains("No such file")), "{failed:?}");

        fs::write(&path, "7\n").unwrap();
        let seven = Some(Identity { index: 7, gateways: 10 });
        status.wait_for(|s| s.identity == seven && s.error().is_none()).await.unwrap();
        fs::write(&path, "10").unwrap();
        let kept = status.wait_for(|s| s.error().is_some()).await.unwrap().clone();
        assert_eq!(kept.identity, seven, "what is known stays");
        fs::write(&path, "3").unwrap();
        status.wait_for(|s| s.identity.is_some_and(|i| i.index == 3)).await.unwrap();
    }
}
