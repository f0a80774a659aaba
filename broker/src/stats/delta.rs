//! What happened between two snapshots.

use std::collections::BTreeMap;

use super::{
    HostCounters, OriginSnapshot, OriginTotals, PathSnapshot, ServiceSnapshot, Snapshot,
    SteeredSnapshot,
};

/// Start times this far apart may be those of one daemon: they are told by two clocks, and rounded.
const START_TOLERANCE_MS: u64 = 2000;

impl Snapshot {
    /// Time between two snapshots.
    #[must_use]
    pub fn elapsed_ms(&self, before: &Self) -> u64 {
        self.taken_unix_ms.saturating_sub(before.taken_unix_ms)
    }

    /// Whether the daemon was started anew in between, so that most counts began again.
    #[must_use]
    pub fn restarted_since(&self, before: &Self) -> bool {
        // The uptime alone says nothing of a snapshot that was taken soon after a start.
        let later = self.started_unix_ms().saturating_sub(before.started_unix_ms());
        // A clock that was set, or a host that slept, moves the start, but seldom to after `before`.
        let may_follow = self.started_unix_ms() + START_TOLERANCE_MS >= before.taken_unix_ms;
        self.uptime_ms < before.uptime_ms || (later > START_TOLERANCE_MS && may_follow)
    }

    fn started_unix_ms(&self) -> u64 {
        self.taken_unix_ms.saturating_sub(self.uptime_ms)
    }

    /// The same snapshot with every count reduced by what it was `before`. What goes up and down
    /// (open connections, TIME_WAIT) and quantiles stay as they are now.
    ///
    /// What was not there before counts from zero; after a restart of the daemon, so does
    /// everything but the host's counters.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut delta = self.clone();
        delta.host = host(&self.host, &before.host);
        if self.restarted_since(before) {
            return delta;
        }
        delta.events_lost = self.events_lost.saturating_sub(before.events_lost);
        let (d, b) = (&mut delta.datapath, &before.datapath);
        for (count, before) in [
            (&mut d.rewritten, b.rewritten),
            (&mut d.left_stale_heartbeat, b.left_stale_heartbeat),
            (&mut d.left_other_netns, b.left_other_netns),
            (&mut d.left_other_cgroup, b.left_other_cgroup),
            (&mut d.endpoints_evicted, b.endpoints_evicted),
            (&mut d.connections_not_followed, b.connections_not_followed),
            (&mut d.others_attempted, b.others_attempted),
            (&mut d.others_established, b.others_established),
            (&mut d.broker_attempted, b.broker_attempted),
            (&mut d.broker_established, b.broker_established),
        ] {
            *count = count.saturating_sub(before);
        }
        d.steering_events = named(&d.steering_events, &b.steering_events);
        for service in &mut delta.services {
            if let Some(before) = before.services.iter().find(|b| b.name == service.name) {
                subtract_service(service, before);
            }
        }
        for now in &mut delta.endpoints {
            let same = |b: &&_| same_endpoint(now, b);
            let Some(before) = before.endpoints.iter().find(same) else { continue };
            for (count, before) in [
                (&mut now.attempted, before.attempted),
                (&mut now.established, before.established),
                (&mut now.refused, before.refused),
                (&mut now.timed_out, before.timed_out),
                (&mut now.failed_other, before.failed_other),
                (&mut now.abandoned, before.abandoned),
                (&mut now.closed, before.closed),
                (&mut now.reset, before.reset),
            ] {
                *count = count.saturating_sub(before);
            }
        }
        delta
    }
}

fn same_endpoint(a: &super::EndpointSnapshot, b: &super::EndpointSnapshot) -> bool {
    a.remote == b.remote && a.broker == b.broker
}

fn host(now: &HostCounters, before: &HostCounters) -> HostCounters {
    HostCounters {
        active_opens: now.active_opens.saturating_sub(before.active_opens),
        passive_opens: now.passive_opens.saturating_sub(before.passive_opens),
        attempt_fails: now.attempt_fails.saturating_sub(before.attempt_fails),
        estab_resets: now.estab_resets.saturating_sub(before.estab_resets),
        time_wait: now.time_wait,
        listen_overflows: now.listen_overflows.saturating_sub(before.listen_overflows),
    }
}

fn subtract_service(now: &mut ServiceSnapshot, before: &ServiceSnapshot) {
    for (count, before) in [
        (&mut now.clients, before.clients),
        (&mut now.accept_failed, before.accept_failed),
        (&mut now.exchanges, before.exchanges),
        (&mut now.steered, before.steered),
        (&mut now.request_bytes, before.request_bytes),
        (&mut now.response_bytes, before.response_bytes),
        (&mut now.queue_overflow, before.queue_overflow),
        (&mut now.request_overflow, before.request_overflow),
        (&mut now.retry_overflow, before.retry_overflow),
        (&mut now.retries, before.retries),
        (&mut now.connections_guaranteed, before.connections_guaranteed),
        (&mut now.connects_refused, before.connects_refused),
        (&mut now.queue_timed_out, before.queue_timed_out),
        (&mut now.unreachable, before.unreachable),
        (&mut now.origin_failed, before.origin_failed),
        (&mut now.clients_gone, before.clients_gone),
        (&mut now.destination_unknown, before.destination_unknown),
    ] {
        *count = count.saturating_sub(before);
    }
    now.not_steered = named(&now.not_steered, &before.not_steered);
    // What an origin had counted when it was forgotten moved to `forgotten`: it is no news there.
    let mut forgotten_before = before.forgotten.clone();
    for gone in &before.origins {
        if !now.origins.iter().any(|o| o.address == gone.address) {
            forgotten_before.merge(&gone.totals());
        }
    }
    now.forgotten = totals(&now.forgotten, &forgotten_before);
    for origin in &mut now.origins {
        if let Some(before) = before.origins.iter().find(|b| b.address == origin.address) {
            let t = totals(&origin.totals(), &before.totals());
            *origin = OriginSnapshot {
                address: origin.address,
                created: t.created,
                reused: t.reused,
                returned: t.returned,
                evicted: t.evicted,
                dial_refused: t.dial_refused,
                dial_timed_out: t.dial_timed_out,
                dial_failed: t.dial_failed,
                retried: t.retried,
                responses_5xx: t.responses_5xx,
                steered: steered(&origin.steered, &before.steered),
                path: path(origin.path, before.path),
                ..origin.clone()
            };
        }
    }
}

fn path(now: Option<PathSnapshot>, before: Option<PathSnapshot>) -> Option<PathSnapshot> {
    let (now, before) = (now?, before.unwrap_or_default());
    Some(PathSnapshot {
        segments: now.segments.saturating_sub(before.segments),
        retransmitted: now.retransmitted.saturating_sub(before.retransmitted),
        ..now
    })
}

fn steered(now: &SteeredSnapshot, before: &SteeredSnapshot) -> SteeredSnapshot {
    SteeredSnapshot {
        exchanges: now.exchanges.saturating_sub(before.exchanges),
        taken_over: now.taken_over.saturating_sub(before.taken_over),
        clients_gone: now.clients_gone.saturating_sub(before.clients_gone),
        status: named(&now.status, &before.status),
        ..*now
    }
}

/// Counts by name; those that have not changed are left out.
fn named(now: &BTreeMap<String, u64>, before: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let changed = now.iter().filter_map(|(name, count)| {
        let before = before.get(name).copied().unwrap_or(0);
        Some((name.clone(), count.checked_sub(before).filter(|n| *n > 0)?))
    });
    changed.collect()
}

fn totals(now: &OriginTotals, before: &OriginTotals) -> OriginTotals {
    OriginTotals {
        created: now.created.saturating_sub(before.created),
        reused: now.reused.saturating_sub(before.reused),
        returned: now.returned.saturating_sub(before.returned),
        evicted: named(&now.evicted, &before.evicted),
        dial_refused: now.dial_refused.saturating_sub(before.dial_refused),
        dial_timed_out: now.dial_timed_out.saturating_sub(before.dial_timed_out),
        dial_failed: now.dial_failed.saturating_sub(before.dial_failed),
        retried: now.retried.saturating_sub(before.retried),
        responses_5xx: now.responses_5xx.saturating_sub(before.responses_5xx),
        steered_status: named(&now.steered_status, &before.steered_status),
    }
}

#[cfg(test)]
mod tests {
    use crate::config::file::parse;
    use crate::stats::{EvictReason, HostCounters, Process, Registry, Snapshot};

    fn snapshot(registry: &Registry, uptime_ms: u64, active_opens: u64) -> Snapshot {
        let process = Process { now_unix_ms: 1_000_000 + uptime_ms, uptime_ms, workers: 1 };
        let host = HostCounters { active_opens, time_wait: active_opens, ..Default::default() };
        Snapshot::assemble(
            process,
            registry.services(&crate::datapath::steering::Carried::default()),
            Err("test"),
            host,
        )
    }

    fn registry() -> Registry {
        let config = parse(
            "[[service]]\nname = \"s\"\nprotocol = \"http1\"\nroute = \"dialled\"\n\
             intercept = [\"10.0.0.0/8:80\"]",
            "f",
        );
        Registry::new(&config.unwrap_or_else(|e| panic!("{e}")))
    }

    #[test]
    fn counts_are_reduced_and_gauges_are_not() {
        let registry = registry();
        let worker = registry.register(0);
        let address = ([10, 0, 0, 1], 80).into();
        let origin = worker.origin(address);
        origin.created.add(5);
        origin.idle.set(5);
        origin.evict(EvictReason::IdleTtl);
        let before = snapshot(&registry, 1000, 100);
        origin.created.add(2);
        origin.evict(EvictReason::Lifetime);
        worker.metrics.exchanges.add(9);
        let now = snapshot(&registry, 3000, 150);

        let delta = now.since(&before);
        assert_eq!(now.elapsed_ms(&before), 2000);
        assert_eq!((delta.host.active_opens, delta.host.time_wait), (50, 150));
        assert_eq!(delta.services[0].exchanges, 9);
        let shown = &delta.services[0].origins[0];
        assert_eq!((shown.created, shown.idle), (2, 5));
        assert_eq!(shown.evicted.keys().collect::<Vec<_>>(), ["lifetime"]);

        origin.created.inc();
        drop(origin);
        worker.forget(address);
        let delta = snapshot(&registry, 4000, 150).since(&now);
        assert_eq!(delta.services[0].forgotten.created, 1, "only what happened since");
    }

    #[test]
    fn a_restart_begins_anew() {
        let old = registry();
        old.register(0).metrics.exchanges.add(100);
        let before = snapshot(&old, 9000, 10);
        let new = registry();
        new.register(0).metrics.exchanges.add(7);
        let now = snapshot(&new, 50, 30);
        assert!(now.restarted_since(&before));
        let delta = now.since(&before);
        assert_eq!((delta.services[0].exchanges, delta.host.active_opens), (7, 20));
    }

    #[test]
    fn a_restart_is_seen_after_an_early_snapshot() {
        let old = registry();
        old.register(0).metrics.exchanges.add(5);
        let before = snapshot(&old, 2, 10);
        let new = registry();
        new.register(0).metrics.exchanges.add(7);
        let mut now = snapshot(&new, 60_000, 30);
        now.taken_unix_ms += 10_000;
        assert!(now.restarted_since(&before), "up for longer, but started later");
        assert_eq!(now.since(&before).services[0].exchanges, 7);
    }

    #[test]
    fn a_clock_that_was_set_is_no_restart() {
        let registry = registry();
        let started_later = |by_ms: i64| {
            let before = snapshot(&registry, 60_000, 10);
            let mut now = snapshot(&registry, 120_000, 10);
            now.taken_unix_ms = now.taken_unix_ms.saturating_add_signed(by_ms);
            now.restarted_since(&before)
        };
        assert_eq!([-30_000, 0, 1500, 30_000].map(started_later), [false; 4]);
        let early = snapshot(&registry, 2, 10);
        let mut now = snapshot(&registry, 60_000, 10);
        now.taken_unix_ms += 1500;
        assert!(!now.restarted_since(&early), "that little is within the tolerance");
    }
}
