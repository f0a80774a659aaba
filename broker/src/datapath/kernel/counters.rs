//! Turns the programs' counters into the daemon's.

use std::array;
use std::collections::HashMap as StdHashMap;
use std::net::SocketAddr;

use anyhow::Context as _;
use aya::maps::{Array, HashMap, MapData, MapError, PerCpuArray};
use broker_ebpf::abi::{
    self, Address, BUCKETS, Counters, EndpointCounters, EndpointKey, OUTCOME_COUNT, Outcome, Path,
    Tally, WHO_COUNT, Who,
};

use crate::datapath::{
    ConnectionCounters, Endpoint, InterceptCounters, KernelCounters, Outcomes, SteeringCounters,
};
use crate::stats::histogram;

const _: () = assert!(BUCKETS == histogram::BUCKETS);
const _: () = assert!(WHO_COUNT == 2);

/// The maps that the programs count in.
pub(super) struct CounterMaps {
    pub(super) endpoints: HashMap<MapData, EndpointKey, EndpointCounters>,
    pub(super) endpoints_max: usize,
    pub(super) paths: HashMap<MapData, Address, Path>,
    pub(super) totals: PerCpuArray<MapData, abi::Outcomes>,
    pub(super) tallies: Array<MapData, u64>,
    pub(super) own_test: OwnTest,
}

/// What the self-test has added to the counters.
#[derive(Debug, Default)]
pub(super) struct OwnTest {
    totals: [[u64; OUTCOME_COUNT]; WHO_COUNT],
    endpoints: u64,
}

impl CounterMaps {
    /// Leaves all connections out that have gone to these addresses, at which nobody else has anything.
    pub(super) fn leave_out(&mut self, remotes: &[SocketAddr]) -> anyhow::Result<()> {
        for remote in remotes.iter().map(|&remote| Address::from(remote)) {
            for (who, totals) in
                [Who::Others, Who::Broker].into_iter().zip(&mut self.own_test.totals)
            {
                let key = EndpointKey { remote, who: who as u32 };
                let counted = match self.endpoints.get(&key, 0) {
                    Err(MapError::KeyNotFound) => continue,
                    counted => counted.context("the self-test's endpoints")?.counters.outcomes,
                };
                self.endpoints.remove(&key).context("the self-test's endpoints")?;
                self.own_test.endpoints += 1;
                totals.iter_mut().zip(counted).for_each(|(total, count)| *total += count);
            }
        }
        Ok(())
    }

    pub(super) fn read(&self) -> anyhow::Result<KernelCounters> {
        let tally =
            |event: Tally| self.tallies.get(&(event as u32), 0).context("the programs' tallies");
        // Before the entries: those added in the meantime must not look evicted.
        let added = tally(Tally::EndpointAdded)?;
        let endpoints = self.endpoints()?;
        let total = |who: Who| {
            let by_cpu = self.totals.get(&(who as u32), 0).context("the programs' totals")?;
            let sums = by_cpu.iter().fold([0; OUTCOME_COUNT], |sums: abi::Outcomes, cpu| {
                array::from_fn(|outcome| sums[outcome] + cpu[outcome])
            });
            let own = &self.own_test.totals[who as usize];
            anyhow::Ok(outcomes(&array::from_fn(|i| sums[i].saturating_sub(own[i]))))
        };
        Ok(KernelCounters {
            endpoints_evicted: added
                .saturating_sub(self.own_test.endpoints)
                .saturating_sub(endpoints.len() as u64),
            endpoints,
            totals_others: total(Who::Others)?,
            totals_broker: total(Who::Broker)?,
            not_followed: tally(Tally::NotFollowed)?,
            intercept: InterceptCounters {
                rewritten: tally(Tally::Rewritten)?,
                stale_heartbeat: tally(Tally::StaleHeartbeat)?,
                other_netns: tally(Tally::OtherNetns)?,
                other_cgroup: tally(Tally::OtherCgroup)?,
                no_listener: tally(Tally::NoListener)?,
                bound_to_device: tally(Tally::BoundToDevice)?,
            },
            carried: super::super::Carried::default(),
            steering: SteeringCounters {
                on: false,
                off_because: None,
                enrolled: tally(Tally::Enrolled)?,
                not_enrolled: tally(Tally::NotEnrolled)?,
                events_lost: tally(Tally::EventLost)?,
                unsolicited: tally(Tally::Unsolicited)?,
                surplus: tally(Tally::Surplus)?,
                repeated: tally(Tally::Repeated)?,
                out_of_step: tally(Tally::OutOfStep)?,
            },
        })
    }

    /// The way to an origin; `None` if nothing was sent there lately, or it cannot be told.
    pub(super) fn path(&self, origin: SocketAddr) -> Option<Path> {
        let found = self.paths.get(&origin.into(), 0);
        found
            .inspect_err(|error| {
                if !matches!(error, MapError::KeyNotFound) {
                    tracing::debug!(%error, %origin, "reading what is known of a path");
                }
            })
            .ok()
    }

    fn endpoints(&self) -> anyhow::Result<Vec<Endpoint>> {
        // If the entry that the walk stands at is evicted, the walk begins anew: entries may
        // come twice, and a walk through a map under heavy eviction would never end.
        let mut entries = StdHashMap::new();
        for entry in self.endpoints.iter().take(4 * self.endpoints_max) {
            let (key, value) = entry.context("the programs' endpoints")?;
            entries.insert(key, value);
        }
        Ok(entries
            .into_iter()
            .map(|(key, value)| Endpoint {
                remote: key.remote.into(),
                broker: key.who == Who::Broker as u32,
                counters: connection_counters(&value.counters),
            })
            .collect())
    }
}

fn outcomes(counts: &abi::Outcomes) -> Outcomes {
    let count = |outcome: Outcome| counts[outcome as usize];
    Outcomes {
        attempted: count(Outcome::Attempted),
        established: count(Outcome::Established),
        refused: count(Outcome::Refused),
        timed_out: count(Outcome::TimedOut),
        failed_other: count(Outcome::FailedOther),
        abandoned: count(Outcome::Abandoned),
        closed: count(Outcome::Closed),
        reset: count(Outcome::Reset),
    }
}

fn connection_counters(counters: &Counters) -> ConnectionCounters {
    ConnectionCounters {
        outcomes: outcomes(&counters.outcomes),
        open: counters.open,
        open_peak: counters.open_peak,
        handshake_us: counters.handshake_us.to_vec(),
        lifetime_ms: counters.lifetime_ms.to_vec(),
        handshake_us_sum: counters.handshake_us_sum,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_daemon_agree_on_buckets() {
        for value in (0..64).map(|i| 1 << i).flat_map(|v: u64| [v - 1, v, v + 1]) {
            assert_eq!(broker_ebpf::flow::bucket(value), histogram::bucket(value), "{value}");
        }
    }
}
