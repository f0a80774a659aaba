//! `broker observe`: which origins this host churns against, and what a pool would have saved.
//!
//! Pure: two samples of the kernel's counters in, rows out. Nothing is configured, nothing is
//! intercepted; loading the counting programs is all that happens to the host.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;

use crate::datapath::{Endpoint, KernelCounters, Outcomes};
use crate::stats::histogram::quantile;

/// Version of the JSON that `broker observe --json` prints.
pub const OBSERVATION_VERSION: u32 = 1;

/// What was seen so far.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Observation {
    /// [`OBSERVATION_VERSION`].
    pub version: u32,
    /// Time since counting began.
    pub elapsed_ms: u64,
    /// Over all endpoints, exact even if some were evicted.
    pub totals: Totals,
    /// Endpoints pushed out of the bounded kernel map: the list is incomplete if there are any.
    pub endpoints_evicted: u64,
    /// Connections of which only the attempt was counted: the map of those under way was full.
    pub not_followed: u64,
    /// Endpoints that are left out of `endpoints` because only the worst were asked for.
    pub endpoints_omitted: usize,
    /// Worst first: by what a pool would have saved.
    pub endpoints: Vec<Row>,
}

/// Sums over all active connections of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    /// See [`Row`].
    pub handshakes_per_second: f64,
    /// See [`Row`].
    pub attempted: u64,
    /// See [`Row`].
    pub established: u64,
    /// See [`Row`].
    pub failed: u64,
    /// See [`Row`].
    pub savable: u64,
}

/// One remote endpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Its address.
    pub remote: SocketAddr,
    /// Handshakes completed per second, within the last interval.
    pub handshakes_per_second: f64,
    /// Handshakes begun.
    pub attempted: u64,
    /// Handshakes completed.
    pub established: u64,
    /// Handshakes refused, timed out, or failed otherwise.
    pub failed: u64,
    /// Mean handshake time.
    pub handshake_mean_us: u64,
    /// Median of the time that connections stayed open (upper edge of a power-of-two bucket); 0 if
    /// none has ended yet.
    pub lifetime_p50_ms: u64,
    /// Connections open now.
    pub open: u64,
    /// Most connections that were open at once.
    pub open_peak: u64,
    /// Handshakes that a pool of `open_peak` sockets would have saved.
    pub savable: u64,
}

/// Compares a sample with the one before (`interval` ago) and sums up since the programs were
/// loaded (`elapsed` ago). At most `top` endpoints are listed.
///
/// The broker's own connections are left out: they are what is left after pooling.
#[must_use]
pub fn observe(
    before: &KernelCounters,
    now: &KernelCounters,
    interval: Duration,
    elapsed: Duration,
    top: usize,
) -> Observation {
    let earlier: BTreeMap<SocketAddr, u64> =
        others(before).map(|e| (e.remote, e.counters.outcomes.established)).collect();
    let mut endpoints: Vec<Row> = others(now)
        .map(|e| row(e, earlier.get(&e.remote).copied().unwrap_or(0), interval))
        .collect();
    let savable = endpoints.iter().map(|row| row.savable).sum();
    endpoints.sort_by_key(|row| (Reverse(row.savable), Reverse(row.established), row.remote));
    let endpoints_omitted = endpoints.len().saturating_sub(top);
    endpoints.truncate(top);
    let all = &now.totals_others;
    Observation {
        version: OBSERVATION_VERSION,
        elapsed_ms: u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX),
        totals: Totals {
            handshakes_per_second: per_second(
                all.established,
                before.totals_others.established,
                interval,
            ),
            attempted: all.attempted,
            established: all.established,
            failed: failed(all),
            savable,
        },
        endpoints_evicted: now.endpoints_evicted,
        not_followed: now.not_followed,
        endpoints_omitted,
        endpoints,
    }
}

fn others(counters: &KernelCounters) -> impl Iterator<Item = &Endpoint> {
    counters.endpoints.iter().filter(|endpoint| !endpoint.broker)
}

fn row(endpoint: &Endpoint, established_before: u64, interval: Duration) -> Row {
    let c = &endpoint.counters;
    Row {
        remote: endpoint.remote,
        handshakes_per_second: per_second(c.outcomes.established, established_before, interval),
        attempted: c.outcomes.attempted,
        established: c.outcomes.established,
        failed: failed(&c.outcomes),
        handshake_mean_us: c.handshake_us_sum.checked_div(c.outcomes.established).unwrap_or(0),
        lifetime_p50_ms: quantile(&c.lifetime_ms, 0.5),
        open: c.open,
        open_peak: c.open_peak,
        savable: c.outcomes.established.saturating_sub(c.open_peak),
    }
}

fn failed(c: &Outcomes) -> u64 {
    c.refused + c.timed_out + c.failed_other
}

fn per_second(now: u64, before: u64, interval: Duration) -> f64 {
    // An endpoint that was evicted and seen again has less than before.
    now.saturating_sub(before) as f64 / interval.as_secs_f64().max(1e-3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::ConnectionCounters;

    fn endpoint(last: u8, established: u64, open_peak: u64) -> Endpoint {
        Endpoint {
            remote: ([10, 0, 0, last], 80).into(),
            broker: false,
            counters: ConnectionCounters {
                outcomes: Outcomes {
                    attempted: established + 3,
                    established,
                    refused: 2,
                    timed_out: 1,
                    ..Outcomes::default()
                },
                open_peak,
                handshake_us_sum: established * 150,
                lifetime_ms: vec![0, 0, established],
                ..ConnectionCounters::default()
            },
        }
    }

    fn sample(endpoints: Vec<Endpoint>) -> KernelCounters {
        let others = endpoints.iter().filter(|e| !e.broker);
        let established = others.map(|e| e.counters.outcomes.established).sum();
        KernelCounters {
            endpoints,
            totals_others: Outcomes { established, ..Outcomes::default() },
            ..KernelCounters::default()
        }
    }

    #[test]
    fn worst_first_with_rates() {
        let before = sample(vec![endpoint(1, 100, 4)]);
        let broker = Endpoint { broker: true, ..endpoint(3, 9999, 1) };
        let now = sample(vec![endpoint(1, 150, 4), endpoint(2, 900, 30), broker]);
        let half = Duration::from_millis(500);
        let seen = observe(&before, &now, half, Duration::from_secs(3), 10);

        let [worst, other] = &seen.endpoints[..] else { panic!("{seen:?}") };
        assert_eq!((worst.remote.to_string().as_str(), worst.savable), ("10.0.0.2:80", 870));
        assert!((worst.handshakes_per_second - 1800.0).abs() < 1e-9, "new since the last sample");
        assert!((other.handshakes_per_second - 100.0).abs() < 1e-9);
        assert_eq!((other.failed, other.handshake_mean_us, other.lifetime_p50_ms), (3, 150, 8));
        assert_eq!(
            (seen.elapsed_ms, seen.totals.established, seen.totals.savable),
            (3000, 1050, 1016)
        );
    }

    #[test]
    fn only_the_top_is_listed_but_all_is_summed() {
        let now = sample((1..=9).map(|i| endpoint(i, 10, 1)).collect());
        let second = Duration::from_secs(1);
        let seen = observe(&KernelCounters::default(), &now, second, second, 4);
        assert_eq!((seen.endpoints.len(), seen.endpoints_omitted), (4, 5));
        assert_eq!(seen.totals.savable, 81);
    }

    #[test]
    fn one_connection_held_open_saves_nothing() {
        let now = sample(vec![endpoint(1, 1, 1), endpoint(2, 0, 0)]);
        let second = Duration::from_secs(1);
        let seen = observe(&now.clone(), &now, second, second, 10);
        assert!(seen.endpoints.iter().all(|row| row.savable == 0));
        assert!(seen.totals.handshakes_per_second.abs() < 1e-9);
    }
}
