//! Who the origins of a service are: what a [`Source`] says, as one document at a time.
//!
//! A source watches something (a file, a name, a control plane) and hands each whole list that it
//! learns to its [`Feed`]. A list that cannot be used is refused whole; the last good one stays, and
//! the reason is shown in the statistics. Nothing in here decides which of the members a gateway
//! uses: that is [`crate::origin`]'s.

pub mod dns;
pub mod document;
pub mod eds;
pub mod file;
pub mod gather;
pub mod kubernetes;
mod thread;

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use rand::SeedableRng;
use rand::rngs::{StdRng, SysRng};
use tokio::sync::watch;

use crate::clock;
use crate::config::discovery;
use crate::datapath::Datapath;

/// Longest reason that is told why a list cannot be used, or had.
const REASON_LEN_MAX: usize = 1024;

/// One origin, as its source describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// What subsets are computed from: the same on every gateway. The address, unless the source
    /// has a name that outlives it.
    pub identity: String,
    /// Where it is dialled.
    pub address: SocketAddr,
    /// Its share of the traffic, relative to the others'.
    pub weight: NonZeroU32,
    /// 0 is preferred; others are used only while none before them is healthy (Envoy's priority
    /// levels).
    pub priority: u32,
    /// Zone or rack: what fails together.
    pub zone: Option<String>,
    /// What the source says of its health.
    pub health: Health,
}

impl Member {
    /// A healthy member of weight 1 that is named by its address.
    #[must_use]
    pub fn at(address: SocketAddr) -> Self {
        Self {
            identity: address.to_string(),
            address,
            weight: NonZeroU32::MIN,
            priority: 0,
            zone: None,
            health: Health::Healthy,
        }
    }
}

/// What a source says of a member, in Envoy's terms (`core.v3.HealthStatus`); better ones first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Health {
    /// Gets traffic. A source that says nothing means this.
    #[default]
    Healthy,
    /// Gets traffic only when there are too few healthy ones.
    Degraded,
    /// Is about to leave: what it has begun is finished, nothing new is begun.
    Draining,
    /// Gets no traffic.
    Unhealthy,
}

/// All members of a service at one time: sorted by address, each address and each identity once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Membership(Vec<Member>);

impl Membership {
    /// Takes the members in any order. Of several with one address the healthiest one counts: one
    /// view says that it can serve, and the other may be on its way out. Members with different
    /// addresses but one identity, such as the two addresses of a name, are told apart by address.
    #[must_use]
    pub fn new(members: impl IntoIterator<Item = Member>) -> Self {
        let mut by_address: BTreeMap<SocketAddr, Member> = BTreeMap::new();
        for member in members {
            match by_address.get(&member.address) {
                Some(known) if known.health <= member.health => {}
                _ => drop(by_address.insert(member.address, member)),
            }
        }
        let mut members: Vec<_> = by_address.into_values().collect();
        let mut seen = HashSet::new();
        let shared: HashSet<String> = members
            .iter()
            .filter(|member| !seen.insert(&member.identity))
            .map(|member| member.identity.clone())
            .collect();
        for member in members.iter_mut().filter(|member| shared.contains(&member.identity)) {
            member.identity = format!("{}/{}", member.identity, member.address);
        }
        Self(members)
    }

    /// What is left without these; `None` if all are.
    #[must_use]
    pub fn without(&self, left_out: impl Fn(&Member) -> bool) -> Option<Self> {
        let left: Vec<_> = self.0.iter().filter(|member| !left_out(member)).cloned().collect();
        (left.len() < self.0.len()).then_some(Self(left))
    }

    /// The members, by address.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.0
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A list as its source reads it: the members, and what was no member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List {
    /// The members.
    pub membership: Membership,
    /// How much of what it says was left out, by reason.
    pub left_out: LeftOut,
}

/// Counts by reason, in words that names of metrics are made of.
pub type LeftOut = BTreeMap<&'static str, u64>;

impl From<Membership> for List {
    fn from(membership: Membership) -> Self {
        Self { membership, left_out: LeftOut::new() }
    }
}

/// What a source has said so far.
#[derive(Clone, Debug, Default)]
pub struct Latest {
    /// The last good list; `None` until there is one.
    pub membership: Option<Arc<Membership>>,
    /// What was left out of that list.
    pub left_out: LeftOut,
    /// The source's own name for that list, such as a resource version; empty if it has none.
    pub version: String,
    /// When it came.
    pub at: Option<Instant>,
    /// Good lists so far, those that changed nothing included.
    pub accepted: u64,
    /// Lists that could not be used.
    pub refused: u64,
    /// What is wrong now: why the last list was refused, or why none can be had. `None` once a good
    /// one has come.
    pub error: Option<String>,
}

/// Where a source leaves what it learns.
#[derive(Clone, Debug)]
pub struct Feed(Arc<watch::Sender<Latest>>);

impl Feed {
    /// A feed, and where to read it.
    #[must_use]
    pub fn new() -> (Self, watch::Receiver<Latest>) {
        let (sender, receiver) = watch::channel(Latest::default());
        (Self(Arc::new(sender)), receiver)
    }

    /// A good list. It replaces the last one whole.
    pub fn accept(&self, list: impl Into<List>, version: impl Into<String>) {
        let List { membership, left_out } = list.into();
        self.0.send_modify(|latest| {
            latest.left_out = left_out;
            // The same list keeps its `Arc`, so that nobody computes anything anew.
            if latest.membership.as_deref() != Some(&membership) {
                latest.membership = Some(Arc::new(membership));
            }
            latest.version = version.into();
            latest.at = Some(clock::now());
            latest.accepted += 1;
            latest.error = None;
        });
    }

    /// A list that cannot be used; the last good one stays.
    pub fn refuse(&self, reason: impl fmt::Display) {
        self.0.send_modify(|latest| {
            latest.refused += 1;
            latest.error = Some(in_short(reason));
        });
    }

    /// The source itself cannot be reached; the last good list stays.
    pub fn lost(&self, reason: impl fmt::Display) {
        self.0.send_if_modified(|latest| {
            let reason = Some(in_short(reason));
            let changed = latest.error != reason;
            latest.error = reason;
            changed
        });
    }

    /// The source can be reached again, and has nothing to add to the last list.
    pub fn found(&self) {
        self.0.send_if_modified(|latest| latest.error.take().is_some());
    }

    /// Whether nobody reads any more: the source may end.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

/// A reason in so many bytes at most: what is wrong may be something of any length, or quote it.
fn in_short(reason: impl fmt::Display) -> String {
    let mut text = reason.to_string();
    if text.len() > REASON_LEN_MAX {
        text.truncate(text.floor_char_boundary(REASON_LEN_MAX));
        text.push('…');
    }
    text
}

/// Something that knows who the members are. Runs in a thread of its own, for as long as the daemon
/// does, and survives whatever it watches: it reports what is wrong, and tries again or ends, to be
/// started again.
pub trait Source: Send {
    /// Watches, and feeds each list as it comes. Dropping the future ends it.
    fn watch(self: Box<Self>, feed: Feed) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Has the source that a configuration names feed what it learns, for as long as somebody reads it. Its
/// sockets are marked in `datapath` as the broker's own.
pub async fn follow(config: discovery::Source, datapath: Arc<dyn Datapath>, feed: Feed) {
    let name = format!("origins-{}", config.name());
    thread::keep(&name, || source(&config, &datapath), feed).await;
}

fn source(config: &discovery::Source, datapath: &Arc<dyn Datapath>) -> Box<dyn Source> {
    let datapath = Arc::clone(datapath);
    match config.clone() {
        discovery::Source::File(file) => Box::new(file::File::new(file.path)),
        discovery::Source::Dns(dns) => Box::new(dns::Dns::new(dns, datapath)),
        discovery::Source::Kubernetes(service) => {
            Box::new(kubernetes::Kubernetes::new(service, datapath))
        }
        discovery::Source::Eds(eds) => Box::new(eds::Eds::new(eds, datapath)),
    }
}

/// For the jitter of retries, which needs no more than to differ between the gateways of a fleet.
pub(crate) fn rng() -> StdRng {
    StdRng::try_from_rng(&mut SysRng)
        .unwrap_or_else(|_| StdRng::seed_from_u64(std::process::id().into()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Waits until `done` holds of what a source has said.
    pub(super) async fn wait(
        latest: &mut watch::Receiver<Latest>,
        done: impl FnMut(&Latest) -> bool,
    ) -> Latest {
        if let Ok(found) = tokio::time::timeout(Duration::from_mins(1), latest.wait_for(done)).await
        {
            return found.expect("the source lives").clone();
        }
        panic!("still {:?}", latest.borrow());
    }

    fn address(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 80))
    }

    #[test]
    fn the_healthier_of_two_views_counts() {
        let healths = [Health::Draining, Health::Healthy, Health::Unhealthy];
        let views = healths.map(|health| Member { health, ..Member::at(address(1)) });
        for start in 0..3 {
            let mut views = views.to_vec();
            views.rotate_left(start);
            let membership = Membership::new(views);
            assert_eq!(membership.members(), [Member::at(address(1))]);
        }
    }

    #[test]
    fn members_of_one_name_are_told_apart() {
        let named =
            |last, name: &str| Member { identity: name.to_owned(), ..Member::at(address(last)) };
        let membership = Membership::new([named(2, "a"), named(1, "a"), named(3, "b")]);
        let identities: Vec<_> = membership.members().iter().map(|m| m.identity.as_str()).collect();
        assert_eq!(identities, ["a/10.0.0.1:80", "a/10.0.0.2:80", "b"]);
    }

    #[test]
    fn order_does_not_matter() {
        let [a, b] = [Member::at(address(1)), Member::at(address(2))];
        assert_eq!(Membership::new([a.clone(), b.clone()]), Membership::new([b, a]));
    }

    #[test]
    fn a_refused_list_keeps_the_last_good_one() {
        let (feed, mut latest) = Feed::new();
        feed.accept(Membership::new([Member::at(address(1))]), "1");
        feed.refuse("not JSON");
        let now = latest.borrow_and_update().clone();
        assert_eq!((now.accepted, now.refused), (1, 1));
        assert_eq!(now.error.as_deref(), Some("not JSON"));
        assert_eq!(now.membership.map(|m| m.members().len()), Some(1));
        feed.accept(Membership::new([Member::at(address(1))]), "2");
        assert_eq!(latest.borrow().error, None);
    }

    #[test]
    fn an_unchanged_list_is_the_same_one() {
        let (feed, latest) = Feed::new();
        feed.accept(Membership::new([Member::at(address(1))]), "1");
        let first = latest.borrow().membership.clone();
        feed.accept(Membership::new([Member::at(address(1))]), "2");
        assert!(Arc::ptr_eq(&first.unwrap(), latest.borrow().membership.as_ref().unwrap()));
    }
}
