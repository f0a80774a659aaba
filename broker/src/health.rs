//! Active health checks, with Envoy's rules: origins are asked regularly whether they are well,
//! and those that are not get no clients.
//!
//! [`start`] checks the origins of a service on the control thread and says what it has found in a
//! channel. Nothing here decides which origins are used. Whoever does asks [`of`] for the health of
//! each member, and looks again when the channel has changed. The *order* in which a gateway prefers
//! members ([`Ranking`](crate::origin::choice::Ranking)) must not depend on it: checks are what only
//! this gateway has seen.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use broker::config::health::HealthCheck;
//! # use broker::datapath::Datapath;
//! # use broker::health;
//! # use broker::membership::{Health, Member, Membership};
//! # async fn follow(
//! #     settings: HealthCheck,
//! #     mut membership: tokio::sync::watch::Receiver<Arc<Membership>>,
//! #     datapath: Arc<dyn Datapath>,
//! # ) {
//! let (addresses, origins) = tokio::sync::watch::channel(Arc::default());
//! let mut checks = health::start(&settings, origins, datapath);
//! loop {
//!     let members = membership.borrow_and_update().clone();
//!     addresses.send_replace(members.members().iter().map(|m| m.address).collect());
//!     let found = checks.borrow_and_update().clone();
//!     let health = |member: &Member| health::of(member, &found, settings.initial);
//!     // Choose here, with `health(member)` in place of `member.health`.
//! #   drop(members.members().iter().map(health).collect::<Vec<Health>>());
//!     tokio::select! {
//!         changed = membership.changed() => if changed.is_err() { return },
//!         changed = checks.changed() => if changed.is_err() { return },
//!     }
//! }
//! # }
//! ```

mod machine;
mod probe;
mod schedule;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::watch;

pub use machine::{Checked, Machine, Outcome, State, Transition};

use self::probe::Prober;
use self::schedule::Schedule;
use crate::config::health::{HealthCheck, Initial};
use crate::datapath::Datapath;
use crate::membership::{self, Health, Member};

/// What the checks of all origins of a service have shown.
pub type Checks = BTreeMap<SocketAddr, Checked>;

/// Checks the origins of a service from now on, in a task of its own, which ends when nobody reads
/// the results any more.
///
/// Each new list of `origins` replaces the one before it: those that are new are checked at once,
/// those that are gone are forgotten, and a list that changes nothing is no change. A change of a
/// state is told within milliseconds, and what else the results say within a second.
///
/// # Panics
///
/// Outside a `tokio` runtime.
#[must_use]
pub fn start(
    settings: &HealthCheck,
    origins: watch::Receiver<Arc<[SocketAddr]>>,
    datapath: Arc<dyn Datapath>,
) -> watch::Receiver<Arc<Checks>> {
    let prober = Prober::new(settings, datapath);
    Schedule::start(settings.clone(), origins, prober, membership::rng())
}

/// The health of a member: what its source says, or what its checks say if that is worse. One that
/// was never checked counts as `initial`.
///
/// One that is about to leave stays that, whatever its checks say: it is out of the choice already.
#[must_use]
pub fn of(member: &Member, checks: &Checks, initial: Initial) -> Health {
    let state = checks.get(&member.address).map_or(State::Unknown, |checked| checked.state);
    match member.health {
        Health::Draining => Health::Draining,
        health => health.max(state.health(initial)),
    }
}

#[cfg(test)]
mod tests;
