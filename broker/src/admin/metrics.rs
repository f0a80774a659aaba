//! The snapshot as Prometheus text exposition.
//!
//! The kernel's endpoints are left out: which ones are among the busiest changes all the time, and
//! series that come and go are worse than none. `broker stats` and `broker observe` show them.

use std::fmt::{Display, Write};

use crate::stats::{
    LimitSnapshot, MembershipSnapshot, OriginTotals, PathSnapshot, ServiceSnapshot, Snapshot,
};

/// Of the text format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Renders every metric.
#[must_use]
pub fn render(snapshot: &Snapshot) -> String {
    let mut text = Text::default();
    process(&mut text, snapshot);
    services(&mut text, &snapshot.services);
    origins(&mut text, &snapshot.services);
    kernel(&mut text, snapshot);
    host(&mut text, snapshot);
    text.0
}

#[derive(Default)]
struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.push(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        self.push(format_args!("{name}"));
        for (i, (label, text)) in labels.iter().enumerate() {
            let open = if i == 0 { '{' } else { ',' };
            let escaped = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            self.push(format_args!("{open}{label}=\"{escaped}\""));
        }
        let close = if labels.is_empty() { "" } else { "}" };
        self.push(format_args!("{close} {value}\n"));
    }

    /// A family with one sample and no labels.
    fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }

    fn push(&mut self, text: std::fmt::Arguments<'_>) {
        self.0.write_fmt(text).unwrap_or_else(|_| unreachable!("a String takes everything"));
    }
}

fn seconds_of_us(us: u64) -> f64 {
    us as f64 / 1e6
}

fn process(text: &mut Text, snapshot: &Snapshot) {
    text.family("broker_info", "gauge", "Always 1; the label tells the daemon's version.");
    text.sample("broker_info", &[("version", &snapshot.broker_version)], 1);
    let uptime = snapshot.uptime_ms as f64 / 1e3;
    text.single("broker_uptime_seconds", "gauge", "Time since the daemon started.", uptime);
    text.single("broker_workers", "gauge", "Event loops.", snapshot.workers);
    text.single(
        "broker_events_lost_total",
        "counter",
        "Lines of the event log that could not be written.",
        snapshot.events_lost,
    );
    let Some(gateway) = &snapshot.gateway else { return };
    if let Some(index) = gateway.index {
        text.single("broker_gateway_index", "gauge", "This gateway's index in its fleet.", index);
        text.single("broker_gateways", "gauge", "Positions of the fleet.", gateway.gateways);
    }
    text.single(
        "broker_gateway_index_conflicts_total",
        "counter",
        "Times that another gateway was found to have this one's index.",
        gateway.conflicts,
    );
}

fn services(text: &mut Text, services: &[ServiceSnapshot]) {
    type Value = fn(&ServiceSnapshot) -> u64;
    type Reasons = &'static [(&'static str, Value)];
    let plain: [(&str, &str, &str, Value); 8] = [
        ("broker_clients_total", "counter", "Client connections accepted.", |s| s.clients),
        ("broker_clients_open", "gauge", "Client connections open.", |s| s.clients_open),
        ("broker_exchanges_total", "counter", "Exchanges finished (opaque: connections).", |s| {
            s.exchanges
        }),
        ("broker_exchanges_waiting", "gauge", "Exchanges waiting for a socket.", |s| s.waiting),
        (
            "broker_retries_total",
            "counter",
            "Further attempts at exchanges, at another connection or on another socket.",
            |s| s.retries,
        ),
        (
            "broker_connections_guaranteed_total",
            "counter",
            "Connections over the limit, to origins that had none.",
            |s| s.connections_guaranteed,
        ),
        ("broker_request_bytes_total", "counter", "Bytes from clients to origins.", |s| {
            s.request_bytes
        }),
        ("broker_response_bytes_total", "counter", "Bytes from origins to clients.", |s| {
            s.response_bytes
        }),
    ];
    for (name, kind, help, value) in plain {
        text.family(name, kind, help);
        for service in services {
            text.sample(name, &[("service", &service.name)], value(service));
        }
    }
    let name = "broker_exchanges_steered_total";
    text.family(name, "counter", "Exchanges that the kernel carried; part of all exchanges.");
    for service in services {
        text.sample(name, &[("service", &service.name)], service.steered);
    }
    let name = "broker_exchanges_not_steered_total";
    text.family(name, "counter", "Requests and responses that the kernel left to the daemon.");
    for service in services {
        for (reason, count) in &service.not_steered {
            text.sample(name, &[("service", &service.name), ("reason", reason)], count);
        }
    }
    let name = "broker_cgroup_present";
    text.family(name, "gauge", "1 while a cgroup that interception is restricted to is there.");
    for service in services {
        for (cgroup, present) in &service.cgroups {
            let labels = [("service", &*service.name), ("cgroup", cgroup)];
            text.sample(name, &labels, u8::from(*present));
        }
    }
    limits(text, services);
    outliers(text, services);
    members(text, services);
    let by_reason: [(&str, &str, Reasons); 2] = [
        (
            "broker_refusals_total",
            "Exchanges and clients that the broker could not serve.",
            &[
                ("queue_overflow", |s| s.queue_overflow),
                ("request_overflow", |s| s.request_overflow),
                ("retry_overflow", |s| s.retry_overflow),
                ("connect", |s| s.connects_refused),
                ("queue_timed_out", |s| s.queue_timed_out),
                ("unreachable", |s| s.unreachable),
                ("accept_failed", |s| s.accept_failed),
                ("destination_unknown", |s| s.destination_unknown),
            ],
        ),
        (
            "broker_exchange_failures_total",
            "Exchanges that began and did not end well, by who failed.",
            &[("origin", |s| s.origin_failed), ("client", |s| s.clients_gone)],
        ),
    ];
    for (name, help, reasons) in by_reason {
        text.family(name, "counter", help);
        for service in services {
            for (reason, value) in reasons {
                let labels = [("service", service.name.as_str()), ("reason", *reason)];
                text.sample(name, &labels, value(service));
            }
        }
    }
}

fn outliers(text: &mut Text, services: &[ServiceSnapshot]) {
    let all = || services.iter().filter_map(|s| Some((&*s.name, s.outliers.as_ref()?)));
    let name = "broker_origins_ejected";
    text.family(name, "gauge", "Origins that outlier detection has taken out.");
    for (service, outliers) in all() {
        text.sample(name, &[("service", service)], outliers.ejected);
    }
    let name = "broker_outliers_detected_total";
    text.family(name, "counter", "Outliers noticed, ejected or not.");
    for (service, outliers) in all() {
        for (detector, count) in &outliers.detected {
            text.sample(name, &[("service", service), ("detector", detector)], count);
        }
    }
    let name = "broker_ejections_total";
    text.family(name, "counter", "Outliers that were ejected, or demoted.");
    for (service, outliers) in all() {
        for (detector, count) in &outliers.enforced {
            text.sample(name, &[("service", service), ("detector", detector)], count);
        }
    }
    let name = "broker_ejections_overflow_total";
    text.family(name, "counter", "Outliers not ejected because as many as allowed were.");
    for (service, outliers) in all() {
        text.sample(name, &[("service", service)], outliers.overflow);
    }
}

fn limits(text: &mut Text, services: &[ServiceSnapshot]) {
    type Value = fn(&LimitSnapshot) -> u64;
    let plain: [(&str, &str, &str, Value); 4] = [
        ("broker_limit", "gauge", "What a service may have, all workers together.", |l| l.max),
        ("broker_limit_used", "gauge", "How much of it is used.", |l| l.used),
        ("broker_limit_remaining", "gauge", "How much of it is left.", |l| {
            l.max.saturating_sub(l.used)
        }),
        ("broker_limit_overflows_total", "counter", "How often it was in the way.", |l| l.overflow),
    ];
    for (name, kind, help, value) in plain {
        text.family(name, kind, help);
        for service in services {
            for (limit, snapshot) in &service.limits {
                let labels = [("service", &*service.name), ("limit", limit)];
                text.sample(name, &labels, value(snapshot));
            }
        }
    }
}

fn members(text: &mut Text, services: &[ServiceSnapshot]) {
    type Value = fn(&MembershipSnapshot) -> u64;
    let all = || {
        let known = |s: &'_ ServiceSnapshot| s.membership.clone().map(|m| (s.name.clone(), m));
        services.iter().filter_map(known).collect::<Vec<_>>()
    };
    let plain: [(&str, &str, &str, Value); 5] = [
        ("broker_members", "gauge", "Members of the priority level in use.", |m| m.members),
        ("broker_members_healthy", "gauge", "Members that their source says are healthy.", |m| {
            m.healthy
        }),
        ("broker_members_used", "gauge", "Members that this gateway uses.", |m| m.used),
        (
            "broker_members_widened",
            "gauge",
            "Members used because others of the subset are not healthy.",
            |m| m.widened,
        ),
        (
            "broker_membership_changes_total",
            "counter",
            "How often the members in use have changed.",
            |m| m.changes,
        ),
    ];
    for (name, kind, help, value) in plain {
        text.family(name, kind, help);
        for (service, membership) in all() {
            text.sample(name, &[("service", &service)], value(&membership));
        }
    }
    let name = "broker_members_left_out";
    text.family(
        name,
        "gauge",
        "What the list has beside the members of the priority level in use, by reason.",
    );
    for (service, membership) in all() {
        for (reason, count) in &membership.left_out {
            text.sample(name, &[("service", &*service), ("reason", reason)], *count);
        }
    }
    let name = "broker_membership_lists_total";
    text.family(name, "counter", "Lists that sources of members have sent.");
    for (service, membership) in all() {
        for (result, count) in [("accepted", membership.accepted), ("refused", membership.refused)]
        {
            let labels = [("service", &*service), ("result", result)];
            text.sample(name, &labels, count);
        }
    }
    let name = "broker_membership_source_up";
    text.family(name, "gauge", "1 while nothing is wrong with the source of members.");
    for (service, membership) in all() {
        text.sample(name, &[("service", &service)], u8::from(membership.error.is_none()));
    }
}

/// Series of an origin end when it is forgotten. What it has counted stays in those of its service, and
/// is in no other series of the same family, where it would look as if it had happened just then.
fn origins(text: &mut Text, services: &[ServiceSnapshot]) {
    let of_services: Vec<_> =
        services.iter().map(|s| (vec![("service", s.name.clone())], s.totals())).collect();
    totals(text, "broker_service", &of_services);
    let of_origins: Vec<_> = services
        .iter()
        .flat_map(|s| s.origins.iter().map(move |o| (s, o)))
        .map(|(s, o)| {
            let labels = vec![("service", s.name.clone()), ("origin", o.address.to_string())];
            (labels, o.totals())
        })
        .collect();
    totals(text, "broker_origin", &of_origins);
    origin_gauges(text, services);
}

/// The growing numbers of origins, or of all that a service has had.
fn totals(text: &mut Text, prefix: &str, of: &[(Vec<(&str, String)>, OriginTotals)]) {
    type Value = fn(&OriginTotals) -> u64;

    let plain: [(&str, &str, Value); 5] = [
        ("connections_created", "Handshakes paid.", |o| o.created),
        (
            "connections_reused",
            "Exchanges on a socket that had served one before: handshakes saved.",
            |o| o.reused,
        ),
        ("connections_returned", "Leases that went back to the pool.", |o| o.returned),
        ("retries", "Requests repeated because a reused socket was dead.", |o| o.retried),
        (
            "responses_5xx",
            "Responses with a status of 500 or above, whether they were passed on or not.",
            |o| o.responses_5xx,
        ),
    ];
    for (name, help, value) in plain {
        let name = format!("{prefix}_{name}_total");
        text.family(&name, "counter", help);
        for (labels, totals) in of {
            text.sample(&name, &with(labels, None), value(totals));
        }
    }
    let name = format!("{prefix}_connections_evicted_total");
    text.family(&name, "counter", "Sockets that the pool let go.");
    for (labels, totals) in of {
        for (reason, count) in &totals.evicted {
            text.sample(&name, &with(labels, Some(("reason", reason))), count);
        }
    }
    let name = format!("{prefix}_dial_failures_total");
    text.family(&name, "counter", "Handshakes that failed.");
    for (labels, o) in of {
        for (reason, count) in
            [("refused", o.dial_refused), ("timed_out", o.dial_timed_out), ("other", o.dial_failed)]
        {
            text.sample(&name, &with(labels, Some(("reason", reason))), count);
        }
    }
    let name = format!("{prefix}_steered_responses_total");
    text.family(&name, "counter", "Responses that the kernel carried, by class of their status.");
    for (labels, totals) in of {
        for (class, count) in &totals.steered_status {
            text.sample(&name, &with(labels, Some(("class", class))), count);
        }
    }
}

fn with<'a>(
    labels: &'a [(&'a str, String)],
    more: Option<(&'a str, &'a str)>,
) -> Vec<(&'a str, &'a str)> {
    labels.iter().map(|(label, value)| (*label, &**value)).chain(more).collect()
}

fn origin_gauges(text: &mut Text, services: &[ServiceSnapshot]) {
    type Value = fn(&PathSnapshot) -> u64;

    let listed = || services.iter().flat_map(|s| s.origins.iter().map(move |o| (s, o)));
    let name = "broker_origin_connections";
    text.family(name, "gauge", "Sockets, by what they do.");
    for (service, origin) in listed() {
        let address = origin.address.to_string();
        for (state, count) in
            [("idle", origin.idle), ("active", origin.active), ("dialling", origin.dialling)]
        {
            let labels = [("service", &*service.name), ("origin", &address), ("state", state)];
            text.sample(name, &labels, count);
        }
    }
    let name = "broker_origin_handshake_seconds";
    text.family(
        name,
        "gauge",
        "Handshake time since the start, upper edge of a power-of-two bucket.",
    );
    for (service, origin) in listed() {
        let address = origin.address.to_string();
        for (quantile, us) in [("0.5", origin.handshake_p50_us), ("0.99", origin.handshake_p99_us)]
        {
            let labels =
                [("service", &*service.name), ("origin", &address), ("quantile", quantile)];
            text.sample(name, &labels, seconds_of_us(us));
        }
    }
    let paths = || listed().filter_map(|(s, o)| Some((&*s.name, o.address.to_string(), o.path?)));
    let counts: [(&str, &str, Value); 2] = [
        (
            "broker_origin_segments_total",
            "Segments with data that the broker has sent to an origin.",
            |path| path.segments,
        ),
        ("broker_origin_segments_retransmitted_total", "Those of them sent again.", |path| {
            path.retransmitted
        }),
    ];
    for (name, help, value) in counts {
        text.family(name, "counter", help);
        for (service, origin, path) in paths() {
            text.sample(name, &[("service", service), ("origin", &origin)], value(&path));
        }
    }
    let name = "broker_origin_round_trip_seconds";
    text.family(name, "gauge", "Smoothed round-trip time of a connection used lately.");
    for (service, origin, path) in paths() {
        let labels = [("service", service), ("origin", &*origin)];
        text.sample(name, &labels, seconds_of_us(path.srtt_us));
    }
}

fn kernel(text: &mut Text, snapshot: &Snapshot) {
    let d = &snapshot.datapath;
    text.single(
        "broker_kernel_loaded",
        "gauge",
        "1 if the kernel programs are loaded.",
        u8::from(d.mode == "kernel"),
    );
    text.single(
        "broker_steering_enabled",
        "gauge",
        "1 if clients can be steered in the kernel.",
        u8::from(d.steering),
    );
    let name = "broker_steering_events_total";
    text.family(name, "counter", "Rare events of steering.");
    for (event, count) in &d.steering_events {
        text.sample(name, &[("event", event)], count);
    }
    text.single(
        "broker_kernel_connects_rewritten_total",
        "counter",
        "Connects sent to the broker.",
        d.rewritten,
    );
    let name = "broker_kernel_connects_left_total";
    text.family(name, "counter", "Connects to intercepted destinations that were left alone.");
    for (reason, count) in [
        ("stale_heartbeat", d.left_stale_heartbeat),
        ("other_netns", d.left_other_netns),
        ("other_cgroup", d.left_other_cgroup),
    ] {
        text.sample(name, &[("reason", reason)], count);
    }
    for (name, help, by) in [
        (
            "broker_kernel_connections_attempted_total",
            "Active TCP connections begun on this host.",
            [d.broker_attempted, d.others_attempted],
        ),
        (
            "broker_kernel_connections_established_total",
            "Active TCP connections established on this host.",
            [d.broker_established, d.others_established],
        ),
    ] {
        text.family(name, "counter", help);
        for (party, count) in ["broker", "others"].into_iter().zip(by) {
            text.sample(name, &[("party", party)], count);
        }
    }
    text.single(
        "broker_kernel_endpoints_evicted_total",
        "counter",
        "Endpoints pushed out of the bounded kernel map.",
        d.endpoints_evicted,
    );
    text.single(
        "broker_kernel_connections_not_followed_total",
        "counter",
        "Active TCP connections of which only the attempt was counted: the kernel map was full.",
        d.connections_not_followed,
    );
}

fn host(text: &mut Text, snapshot: &Snapshot) {
    let h = &snapshot.host;
    for (name, kind, help, value) in [
        ("broker_host_tcp_active_opens_total", "counter", "ActiveOpens.", h.active_opens),
        ("broker_host_tcp_passive_opens_total", "counter", "PassiveOpens.", h.passive_opens),
        ("broker_host_tcp_attempt_fails_total", "counter", "AttemptFails.", h.attempt_fails),
        ("broker_host_tcp_estab_resets_total", "counter", "EstabResets.", h.estab_resets),
        (
            "broker_host_tcp_listen_overflows_total",
            "counter",
            "ListenOverflows.",
            h.listen_overflows,
        ),
        ("broker_host_tcp_time_wait", "gauge", "Sockets in TIME_WAIT.", h.time_wait),
    ] {
        text.single(name, kind, help, value);
    }
}
