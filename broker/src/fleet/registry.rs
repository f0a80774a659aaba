//! Keeps this gateway's key in a registry, whatever happens to either.
//!
//! The registry is a folder of keys in etcd, `PREFIX/index/N`, each bound to its holder's lease. Who
//! loses a race for one joins the queue in `PREFIX/waiting/`, so that a fleet that starts at once does
//! not go for one index after the other all together. The lease is renewed at a third of its time. If etcd is lost, the gateway keeps its index and says
//! so; once etcd is back it enters its index again, unless somebody else has it by then.
//!
//! Changes of the number of gateways are taken with a delay: growth shortly after it was seen, so
//! that a fleet which starts is one change; shrinking only after a lease's time, in which a
//! gateway that is being restarted comes back.

use std::cmp::Ordering;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::{StdRng, SysRng};
use rand::{RngExt, SeedableRng, TryRng as _};
use tokio::sync::watch;
use tokio::time::Instant;

use super::claim::{self, Entry, Holder, Holders, Step, Want};
use super::etcd::{Etcd, KeyValue, View, Write};
use super::{Identity, Place, hostname};
use crate::clock;
use crate::config::gateway::{self, GATEWAYS_MAX};
use crate::datapath::Datapath;
use crate::pool::backoff::Backoff;

/// What the registry is called in [`super::Status::errors`].
pub(super) const PART: &str = "etcd";

/// How long more gateways are waited for after one has come.
const SETTLE: Duration = Duration::from_millis(500);

/// Changes of the registry are read no more often: etcd gathers what waits, and one without an end is not to
/// keep the control thread busy.
const CHANGES_EVERY: Duration = Duration::from_millis(10);

/// Longest pause of one who waits in the queue and was overtaken all the same.
const LOST_PAUSE: Duration = Duration::from_millis(50);

/// Pauses between attempts to reach etcd.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// The gateway's side of a registry.
pub(super) struct Registry {
    config: gateway::Etcd,
    want: Want,
    place: Place,
    datapath: Arc<dyn Datapath>,
    rng: StdRng,
    me: Holder,
    /// The last connection, and the lease that was granted.
    etcd: Option<Etcd>,
    lease: Option<i64>,
    /// The index whose key was ours last.
    held: Option<u32>,
}

impl Registry {
    pub(super) fn new(
        config: gateway::Etcd,
        want: Want,
        place: Place,
        datapath: Arc<dyn Datapath>,
    ) -> Self {
        let name = config.name.clone().unwrap_or_else(default_name);
        // Without randomness of the system's, time still tells two runs of one gateway apart.
        let seed = SysRng.try_next_u64().unwrap_or_else(|_error| {
            let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or_default())
        });
        Self {
            config,
            want,
            place,
            datapath,
            rng: StdRng::seed_from_u64(seed),
            me: Holder { name, instance: format!("{seed:016x}") },
            etcd: None,
            lease: None,
            held: None,
        }
    }

    /// Runs until `left` says that the gateway leaves; then the index is given back.
    pub(super) async fn run(mut self, mut left: watch::Receiver<bool>) {
        tokio::select! {
            () = self.keep() => {}
            // Not if nobody can say so any more: that is a crash, which gives nothing back.
            Ok(_) = left.wait_for(|left| *left) => {}
        }
        if let Err(error) = self.give_back().await {
            tracing::warn!(error, "giving the gateway's index back; its lease has to end");
        }
    }

    async fn give_back(&mut self) -> Result<(), String> {
        let (Some(etcd), Some(lease)) = (self.etcd.take(), self.lease.take()) else {
            return Ok(());
        };
        etcd.revoke(lease).await?;
        if let Some(index) = self.held {
            tracing::info!(index, "gateway index given back");
        }
        Ok(())
    }

    /// Keeps the key, from one connection to the next. Does not end.
    async fn keep(&mut self) {
        let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1);
        for attempt in 0.. {
            let endpoint = attempt % self.config.endpoints.len();
            let error = match self.session(endpoint, &mut backoff).await {
                Ok(never) => match never {},
                Err(error) => error,
            };
            self.place.fails(PART, error);
            tokio::time::sleep(backoff.fail(clock::now(), &mut self.rng)).await;
        }
    }

    /// One connection, until it fails.
    async fn session(
        &mut self,
        endpoint: usize,
        backoff: &mut Backoff,
    ) -> Result<Infallible, String> {
        // Several answers fit into the lease's time.
        let limit = (self.config.ttl / 3).min(Duration::from_secs(5));
        let datapath = Arc::clone(&self.datapath);
        let etcd = Etcd::connect(&self.config, endpoint, limit, datapath).await?;
        self.etcd = Some(etcd.clone());
        loop {
            let lease = self.lease(&etcd).await?;
            let view = self.claim(&etcd, lease).await?;
            backoff.succeed();
            self.place.works(PART);
            self.follow(&etcd, lease, view).await?;
        }
    }

    /// The lease that we have, if it still exists, or a new one.
    async fn lease(&mut self, etcd: &Etcd) -> Result<i64, String> {
        if let Some(lease) = self.lease
            && etcd.renew(lease).await?
        {
            return Ok(lease);
        }
        let lease = etcd.grant(self.config.ttl).await?;
        self.lease = Some(lease);
        Ok(lease)
    }

    /// Makes a key ours, or finds that nobody can: what the registry is like after that.
    async fn claim(&mut self, etcd: &Etcd, lease: i64) -> Result<(i64, Holders), String> {
        let ticket = format!("{}/waiting/{}", self.config.prefix, self.me.instance);
        let value = serde_json::to_vec(&self.me).unwrap_or_default();
        let everything = format!("{}/", self.config.prefix);
        let mut view = etcd.read(&everything).await?;
        let mut renewed = Instant::now();
        loop {
            let (revision, holders) = self.holders(&view);
            if let Some(held) = self.held
                && holders.get(&held).is_some_and(|entry| entry.holder.as_ref() != Some(&self.me))
            {
                self.clashes(held, &holders);
            }
            let queue = self.queue(&view, &ticket);
            let ahead = queue.unwrap_or(0);
            let step = claim::step(self.want, &self.me, self.held, lease, &holders, ahead);
            let (index, expected) = match step {
                Step::Held(index) => {
                    self.holds(index, &holders);
                    return Ok((revision, holders));
                }
                Step::Blocked(index) => {
                    self.clashes(index, &holders);
                    return Ok((revision, holders));
                }
                Step::Full => return Err(format!("all {GATEWAYS_MAX} indices are taken")),
                Step::Create(index) => (index, 0),
                Step::Replace(index, revision) => (index, revision),
            };
            // In one transaction, or those behind us in the queue would count us twice.
            let write = Write {
                key: format!("{}{index}", self.folder()),
                revision: expected,
                value: value.clone(),
                lease,
                delete: Some(ticket.clone()),
            };
            let written = etcd.write(write, &everything).await?;
            view = written.view;
            if written.succeeded {
                continue;
            }
            // Somebody was faster.
            if renewed.elapsed() > self.config.ttl / 3 {
                renewed = Instant::now();
                etcd.renew(lease).await?;
            }
            // There is no queue for a certain index: who has it is enough to know.
            if queue.is_some() || self.want != Want::Lowest {
                tokio::time::sleep(LOST_PAUSE.mul_f64(self.rng.random())).await;
            } else {
                let (key, value) = (ticket.clone(), value.clone());
                let write = Write { key, revision: 0, value, lease, delete: None };
                view = etcd.write(write, &everything).await?.view;
            }
        }
    }

    /// How many wait before us; `None` if we do not.
    fn queue(&self, view: &View, ticket: &str) -> Option<usize> {
        let ours = view.keys.iter().find(|key| key.key == ticket.as_bytes())?.mod_revision;
        let waiting = format!("{}/waiting/", self.config.prefix);
        let ahead =
            |key: &&KeyValue| key.key.starts_with(waiting.as_bytes()) && key.mod_revision < ours;
        Some(view.keys.iter().filter(ahead).count())
    }

    /// The key of an index is ours.
    fn holds(&mut self, index: u32, holders: &Holders) {
        self.held = Some(index);
        self.place.is_ours();
        if self.want == Want::Lowest {
            // A first index, and one that had to be changed, is not waited for. The number of
            // gateways is, unless it has to grow with it.
            let gateways = match self.place.identity() {
                Some(known) if known.index == index => known.gateways,
                _ => claim::gateways(index, holders),
            };
            self.place.hold(Identity { index, gateways });
        }
    }

    /// Renews the lease and follows the registry until the key has to be claimed again.
    async fn follow(
        &mut self,
        etcd: &Etcd,
        lease: i64,
        (revision, mut holders): (i64, Holders),
    ) -> Result<(), String> {
        let folder = self.folder();
        let mut watch = etcd.watch(&folder, revision + 1).await?;
        let beat = self.config.ttl / 3;
        let mut next_beat = Instant::now() + beat;
        let mut change = self.change(&holders, None);
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(next_beat) => {
                    next_beat = Instant::now() + beat;
                    if !etcd.renew(lease).await? {
                        return Ok(());
                    }
                }
                events = watch.next() => {
                    for event in events? {
                        let Some((index, entry)) = self.entry(&event.key) else { continue };
                        if event.gone() {
                            holders.remove(&index);
                        } else {
                            holders.insert(index, entry);
                        }
                    }
                    match claim::step(self.want, &self.me, self.held, lease, &holders, 0) {
                        Step::Held(_) => {}
                        Step::Blocked(index) => self.clashes(index, &holders),
                        Step::Create(_) | Step::Replace(..) | Step::Full => return Ok(()),
                    }
                    change = self.change(&holders, change);
                    tokio::time::sleep(CHANGES_EVERY).await;
                }
                () = due(change) => {
                    change = None;
                    if let Some(index) = self.held {
                        let gateways = claim::gateways(index, &holders);
                        self.place.hold(Identity { index, gateways });
                    }
                }
            }
        }
    }

    /// When the number of gateways is to change, given the change that was under way.
    fn change(&self, holders: &Holders, under_way: Option<Change>) -> Option<Change> {
        if self.want != Want::Lowest {
            return None;
        }
        let known = self.place.identity()?;
        let growth = match claim::gateways(known.index, holders).cmp(&known.gateways) {
            Ordering::Equal => return None,
            Ordering::Greater => true,
            Ordering::Less => false,
        };
        let delay = if growth { SETTLE } else { self.config.ttl };
        let begun = under_way.filter(|change| change.growth == growth);
        begun.or_else(|| Some(Change { growth, at: Instant::now() + delay }))
    }

    fn clashes(&self, index: u32, holders: &Holders) {
        let holder = holders.get(&index).and_then(|entry| entry.holder.as_ref());
        let other = match holder {
            Some(holder) if holder.name == self.me.name => "another gateway with this one's name",
            Some(holder) => &holder.name,
            None => "somebody whose entry cannot be read",
        };
        self.place.clashes(format!("index {index} is held by {other}"));
    }

    fn folder(&self) -> String {
        format!("{}/index/", self.config.prefix)
    }

    /// The entries of the registry; keys that are none are nobody's business.
    fn holders(&self, view: &View) -> (i64, Holders) {
        (view.revision, view.keys.iter().filter_map(|key| self.entry(key)).collect())
    }

    fn entry(&self, key: &KeyValue) -> Option<(u32, Entry)> {
        let index = std::str::from_utf8(&key.key).ok()?.strip_prefix(&self.folder())?;
        let index = index.parse().ok().filter(|&index| index < GATEWAYS_MAX)?;
        let holder = serde_json::from_slice(&key.value).ok();
        Some((index, Entry { holder, lease: key.lease, revision: key.mod_revision }))
    }
}

/// A change of the number of gateways that is waited for.
#[derive(Clone, Copy, Debug)]
struct Change {
    growth: bool,
    at: Instant,
}

async fn due(change: Option<Change>) {
    match change {
        Some(change) => tokio::time::sleep_until(change.at).await,
        None => std::future::pending().await,
    }
}

/// A name that no other host has, as far as the host knows.
fn default_name() -> String {
    let host = hostname().unwrap_or_default();
    let machine = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    format!("{host}/{}", machine.trim_end())
}
