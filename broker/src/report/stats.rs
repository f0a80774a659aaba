//! `broker stats`: what the daemon has done, per service and origin, and what the host says of it.

use std::fmt::Write;

use super::{
    Cell, Column, Paint, Style, Table, bar, bytes, count, micros, millis, percent, plural, quoted,
    rate,
};
use crate::stats::{
    DatapathSnapshot, GatewaySnapshot, HostCounters, LimitSnapshot, MembershipSnapshot,
    OriginSnapshot, OriginTotals, PathSnapshot, ServiceSnapshot, Snapshot, SteeredSnapshot,
};

const BAR_WIDTH: usize = 12;
const INDENT: &str = "  ";

/// What to show.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The newest snapshot.
    pub now: &'a Snapshot,
    /// Show the change since this one instead of totals.
    pub since: Option<&'a Snapshot>,
    /// Show rates per second since this one beside the counts.
    pub previous: Option<&'a Snapshot>,
}

/// The picture as text.
#[must_use]
pub fn render(view: View<'_>, style: Style) -> String {
    let shown = view.since.map_or_else(|| view.now.clone(), |before| view.now.since(before));
    let rates = view.previous.map(|previous| Rates {
        change: view.now.since(previous),
        seconds: (view.now.elapsed_ms(previous) as f64 / 1e3).max(1e-3),
    });
    let mut out = String::new();
    line(&mut out, &head(view, style));
    if let Some(text) = shown.gateway.as_ref().and_then(gateway) {
        line(&mut out, &style.paint(Paint::Dim, &text));
    }
    let trouble = shown.gateway.iter().flat_map(|g| [&g.conflict, &g.error]).flatten();
    for text in trouble {
        line(&mut out, &style.paint(Paint::Bad, &format!("gateway: {}", quoted(text))));
    }
    for service in &shown.services {
        out.push('\n');
        out.push_str(&service_block(service, rates.as_ref(), style));
    }
    out.push('\n');
    out.push_str(&kernel_line(&shown.datapath, style));
    out.push_str(&host_line(&shown.host, view.since.map(|before| before.host), style));
    out
}

/// What changed within the last interval.
struct Rates {
    change: Snapshot,
    seconds: f64,
}

impl Rates {
    fn service(&self, name: &str) -> Option<&ServiceSnapshot> {
        self.change.services.iter().find(|s| s.name == name)
    }

    fn per_second(&self, n: u64) -> String {
        rate(n as f64 / self.seconds)
    }
}

fn line(out: &mut String, text: &str) {
    out.push_str(text);
    out.push('\n');
}

fn head(view: View<'_>, style: Style) -> String {
    let now = view.now;
    let mut text = format!(
        "{} {} · up {} · {}",
        style.paint(Paint::Bold, "broker"),
        now.broker_version,
        millis(now.uptime_ms),
        plural(now.workers as u64, "worker"),
    );
    if let Some(before) = view.since {
        append(&mut text, format_args!(" · change within {}", millis(now.elapsed_ms(before))));
        if now.restarted_since(before) {
            text.push('\n');
            text.push_str(&style.paint(
                Paint::Warn,
                "the daemon was restarted in between: its own counts are those since its start",
            ));
        }
    }
    if now.events_lost > 0 {
        let lost = plural(now.events_lost, "line");
        text.push('\n');
        text.push_str(&style.paint(
            Paint::Warn,
            &format!("the event log has lost {lost}; the daemon's log says why"),
        ));
    }
    text
}

fn service_block(service: &ServiceSnapshot, rates: Option<&Rates>, style: Style) -> String {
    let change = rates.and_then(|r| Some((r, r.service(&service.name)?)));
    let mut exchanges = plural(service.exchanges, "exchange");
    if let Some((rates, change)) = change {
        append(&mut exchanges, format_args!(" ({}/s)", rates.per_second(change.exchanges)));
    }
    if service.steered > 0 {
        let share = percent(service.steered, service.exchanges);
        append(&mut exchanges, format_args!(", {share} in the kernel"));
    }
    let mut waiting = format!("{} waiting", count(service.waiting));
    if service.retries > 0 {
        append(&mut waiting, format_args!(", {} retries", count(service.retries)));
    }
    if service.connections_guaranteed > 0 {
        let over = plural(service.connections_guaranteed, "connection");
        append(&mut waiting, format_args!(", {over} over the limit"));
    }
    let name = style.paint(Paint::Bold, &service.name);
    let protocol = style.paint(Paint::Dim, &service.protocol);
    let mut out = style.flow(
        &format!("{name} {protocol}  "),
        &[
            format!("{}, {} open", plural(service.clients, "client"), count(service.clients_open)),
            exchanges,
            format!("{} in, {} out", bytes(service.request_bytes), bytes(service.response_bytes)),
            waiting,
        ],
    );
    let trouble = listed(&[
        ("refused: queue full", service.queue_overflow),
        ("refused: too many exchanges", service.request_overflow),
        ("refused: at connect()", service.connects_refused),
        ("refused: too many retries", service.retry_overflow),
        ("refused: waited too long", service.queue_timed_out),
        ("refused: no origin reachable", service.unreachable),
        ("refused: accept failed", service.accept_failed),
        ("refused: destination unknown", service.destination_unknown),
        ("failed by origins", service.origin_failed),
        ("abandoned by clients", service.clients_gone),
    ]);
    if !trouble.is_empty() {
        out.push_str(INDENT);
        line(&mut out, &style.paint(Paint::Bad, &trouble));
    }
    if let Some(text) = service.membership.as_ref().and_then(membership) {
        out.push_str(INDENT);
        line(&mut out, &style.paint(Paint::Dim, &text));
    }
    if let Some(error) = service.membership.as_ref().and_then(|m| m.error.as_deref()) {
        out.push_str(INDENT);
        line(&mut out, &style.paint(Paint::Bad, &format!("members: {}", quoted(error))));
    }
    let missing = |(cgroup, present): (&String, &bool)| (!present).then(|| cgroup.clone());
    let missing: Vec<_> = service.cgroups.iter().filter_map(missing).collect();
    if !missing.is_empty() {
        out.push_str(INDENT);
        let text = format!("cgroups that are not there: {}", missing.join(", "));
        line(&mut out, &style.paint(Paint::Warn, &text));
    }
    let full = |(name, limit): (&String, &LimitSnapshot)| {
        (limit.used >= limit.max).then(|| format!("{name} {} reached", count(limit.max)))
    };
    let full: Vec<_> = service.limits.iter().filter_map(full).collect();
    if !full.is_empty() {
        out.push_str(INDENT);
        line(&mut out, &style.paint(Paint::Bad, &full.join(", ")));
    }
    let ejected = service.outliers.iter().flat_map(|outliers| &outliers.origins);
    for origin in ejected {
        let Some(left) = origin.ejected_for_ms else { continue };
        out.push_str(INDENT);
        let text = format!("{} is ejected for another {}", origin.address, millis(left));
        line(&mut out, &style.paint(Paint::Bad, &text));
    }
    let not_steered: Vec<_> = service.not_steered.iter().map(|(why, n)| (&**why, *n)).collect();
    if !not_steered.is_empty() {
        out.push_str(INDENT);
        let text = format!("not steered: {}", listed(&not_steered));
        line(&mut out, &style.paint(Paint::Dim, &text));
    }
    if service.totals() == OriginTotals::default() && service.origins.is_empty() {
        out.push_str(INDENT);
        line(&mut out, &style.paint(Paint::Dim, "no origin was dialled yet"));
    } else {
        out.push_str(&origins(service, change).render(style, INDENT));
    }
    out
}

/// Which gateway this is; nothing where there is only one.
fn gateway(gateway: &GatewaySnapshot) -> Option<String> {
    let GatewaySnapshot { index, gateways, source, .. } = gateway;
    match index {
        Some(0) if *gateways == 1 => None,
        Some(index) => Some(format!("gateway {index} of {gateways} (from {source})")),
        None => Some(format!("gateway of a fleet, its index is not known yet (from {source})")),
    }
}

/// Who the origins are; nothing where the configuration says it.
fn membership(membership: &MembershipSnapshot) -> Option<String> {
    let MembershipSnapshot { source, members, healthy, used, widened, .. } = membership;
    // Health checks may fail of all of them, and all be used still.
    if source == "static" && used == members && healthy == members {
        return None;
    }
    let mut text = format!("{used} of {} used, {healthy} healthy", plural(*members, "member"));
    if let Some(size) = membership.subset {
        append(&mut text, format_args!(", subset of {size}"));
        if let (Some(begin), Some(end)) = (membership.ring_position, membership.ring_end) {
            append(&mut text, format_args!(" from {begin:.3} to {end:.3} of the ring"));
        }
        append(&mut text, format_args!(", at most {}", plural(membership.idle_max, "idle socket")));
    }
    if *widened > 0 {
        append(&mut text, format_args!(", {widened} in place of others"));
    }
    let left_out: Vec<_> = membership.left_out.iter().map(|(why, n)| (&**why, *n)).collect();
    if !left_out.is_empty() {
        append(&mut text, format_args!(", left out: {}", listed(&left_out)));
    }
    append(&mut text, format_args!(" (from {source}"));
    if !membership.version.is_empty() {
        append(&mut text, format_args!(", version {}", membership.version));
    }
    append(&mut text, format_args!(", {}", plural(membership.changes, "change")));
    if membership.refused > 0 {
        append(&mut text, format_args!(", {} refused", plural(membership.refused, "list")));
    }
    text.push(')');
    Some(text)
}

fn origins(service: &ServiceSnapshot, change: Option<(&Rates, &ServiceSnapshot)>) -> Table {
    let mut columns = vec![
        Column::left("ORIGIN", 0),
        Column::right("CREATED", 0),
        Column::right("REUSED", 0),
        Column::right("REUSE", 0),
        Column::left("", 8),
    ];
    if change.is_some() {
        columns.extend([Column::right("CREATED/s", 0), Column::right("REUSED/s", 0)]);
    }
    columns.extend([
        Column::right("IDLE", 2),
        Column::right("ACTIVE", 2),
        Column::right("RETURNED", 7),
        Column::right("EVICTED", 4),
        Column::right("FAILED", 1),
        Column::right("HANDSHAKE p50 / p99", 6),
    ]);
    let mut table = Table::new(columns);
    for origin in &service.origins {
        let rates = change.map(|(rates, before)| {
            let same = before.origins.iter().find(|o| o.address == origin.address);
            (rates, same.map(OriginSnapshot::totals).unwrap_or_default())
        });
        let live = Live {
            idle: origin.idle,
            active: origin.active,
            handshakes: Some((origin.handshake_p50_us, origin.handshake_p99_us)),
        };
        let address = Cell::from(origin.address.to_string());
        table.row(row(address, &origin.totals(), live, rates));
        let path = origin.path.as_ref().and_then(path);
        let notes = [note(&origin.totals()), steered(&origin.steered), path];
        for note in notes.into_iter().flatten() {
            table.note(note);
        }
    }
    let forgotten = &service.forgotten;
    let any_forgotten = *forgotten != OriginTotals::default();
    if any_forgotten {
        let live = Live { idle: 0, active: 0, handshakes: None };
        let rates = change.map(|(rates, before)| (rates, before.forgotten.clone()));
        table.row(row(Cell::new("forgotten", Paint::Dim), forgotten, live, rates));
    }
    if service.origins.len() + usize::from(any_forgotten) > 1 {
        let live = Live {
            idle: service.origins.iter().map(|o| o.idle).sum(),
            active: service.origins.iter().map(|o| o.active).sum(),
            handshakes: None,
        };
        let rates = change.map(|(rates, before)| (rates, before.totals()));
        let all = Cell::new("all", Paint::Bold);
        table.row(row(all, &service.totals(), live, rates));
    }
    table
}

/// The numbers of an origin that do not only grow.
#[derive(Clone, Copy)]
struct Live {
    idle: u64,
    active: u64,
    handshakes: Option<(u64, u64)>,
}

fn row(
    name: Cell,
    totals: &OriginTotals,
    live: Live,
    rates: Option<(&Rates, OriginTotals)>,
) -> Vec<Cell> {
    let served = totals.created + totals.reused;
    let share = totals.reused as f64 / served.max(1) as f64;
    let paint = match share {
        _ if served == 0 => Paint::Dim,
        0.9.. => Paint::Good,
        0.5.. => Paint::Warn,
        _ => Paint::Bad,
    };
    let evicted = totals.evicted.values().sum();
    let failed = failures(totals);
    let mut cells = vec![
        name,
        count(totals.created).into(),
        count(totals.reused).into(),
        Cell::new(percent(totals.reused, served), paint),
        Cell::new(bar(share, BAR_WIDTH), paint),
    ];
    if let Some((rates, change)) = rates {
        cells.extend([change.created, change.reused].map(|n| rates.per_second(n).into()));
    }
    cells.extend([
        Cell::new(count(live.idle), Paint::Plain.unless_zero(live.idle)),
        Cell::new(count(live.active), Paint::Plain.unless_zero(live.active)),
        Cell::new(count(totals.returned), Paint::Plain.unless_zero(totals.returned)),
        Cell::new(count(evicted), Paint::Plain.unless_zero(evicted)),
        Cell::new(count(failed), Paint::Bad.unless_zero(failed)),
    ]);
    if let Some((p50, p99)) = live.handshakes {
        // 0 means that no handshake was timed yet.
        cells.push(match p50 {
            0 => "-".into(),
            _ => format!("≤ {} / ≤ {}", micros(p50), micros(p99)).into(),
        });
    }
    cells
}

fn failures(totals: &OriginTotals) -> u64 {
    totals.dial_refused + totals.dial_timed_out + totals.dial_failed
}

/// Details that are worth a line only where there are any.
fn note(totals: &OriginTotals) -> Option<String> {
    let evicted: Vec<_> = totals.evicted.iter().map(|(reason, n)| (reason.as_str(), *n)).collect();
    let mut parts = Vec::new();
    if !evicted.is_empty() {
        parts.push(format!("evicted: {}", listed(&evicted)));
    }
    let failed = listed(&[
        ("refused", totals.dial_refused),
        ("timed out", totals.dial_timed_out),
        ("other", totals.dial_failed),
    ]);
    if !failed.is_empty() {
        parts.push(format!("dials failed: {failed}"));
    }
    if totals.retried > 0 {
        parts.push(format!("requests repeated: {}", count(totals.retried)));
    }
    if totals.responses_5xx > 0 {
        parts.push(format!("responses of 500 and above: {}", count(totals.responses_5xx)));
    }
    (!parts.is_empty()).then(|| format!("  └ {}", parts.join(" · ")))
}

/// What the kernel carried, if anything.
fn steered(steered: &SteeredSnapshot) -> Option<String> {
    if *steered == SteeredSnapshot::default() {
        return None;
    }
    let status: Vec<_> = steered.status.iter().map(|(class, n)| (&**class, *n)).collect();
    let mut parts =
        vec![format!("in the kernel: {} ({})", count(steered.exchanges), listed(&status))];
    if steered.latency_p50_us > 0 {
        let (p50, p99) = (micros(steered.latency_p50_us), micros(steered.latency_p99_us));
        parts.push(format!("first byte ≤ {p50} / ≤ {p99}"));
    }
    if steered.taken_over > 0 {
        parts.push(format!("taken over {}", count(steered.taken_over)));
    }
    Some(format!("  └ {}", parts.join(" · ")))
}

/// What TCP has seen of the way, if it has seen anything.
fn path(path: &PathSnapshot) -> Option<String> {
    if path.segments == 0 {
        return None;
    }
    let mut parts = Vec::new();
    if path.rtt_p50_us > 0 {
        let (p50, last) = (micros(path.rtt_p50_us), micros(path.srtt_us));
        parts.push(format!("round trip p50 ≤ {p50}, last {last}"));
    }
    let share = percent(path.retransmitted, path.segments);
    let (again, all) = (count(path.retransmitted), count(path.segments));
    parts.push(format!("segments sent again {again} of {all} ({share})"));
    Some(format!("  └ {}", parts.join(" · ")))
}

/// `name 1, other 2`, without zeros, most first.
fn listed(counts: &[(&str, u64)]) -> String {
    let mut counts: Vec<_> = counts.iter().filter(|(_, n)| *n > 0).collect();
    counts.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    let words: Vec<_> = counts.iter().map(|(name, n)| format!("{name} {}", count(*n))).collect();
    words.join(", ")
}

fn kernel_line(d: &DatapathSnapshot, style: Style) -> String {
    let name = format!("{}  ", style.paint(Paint::Bold, "kernel"));
    if let Some(reason) = &d.reason {
        let text = format!("no programs: {reason}");
        return style.flow(&name, &[style.paint(Paint::Warn, &text)]);
    }
    let mut parts = vec![
        format!(
            "handshakes by the broker {}, by others {}",
            count(d.broker_established),
            count(d.others_established)
        ),
        format!("{} rewritten", plural(d.rewritten, "connect")),
    ];
    let left = listed(&[
        ("stale heartbeat", d.left_stale_heartbeat),
        ("other network namespace", d.left_other_netns),
        ("other cgroup", d.left_other_cgroup),
    ]);
    if !left.is_empty() {
        parts.push(format!("left alone: {}", style.paint(Paint::Warn, &left)));
    }
    if let Some(reason) = &d.steering_reason {
        parts.push(style.paint(Paint::Warn, &format!("steering off: {reason}")));
    }
    let events: Vec<_> = d.steering_events.iter().map(|(name, n)| (&**name, *n)).collect();
    if !events.is_empty() {
        parts.push(format!("steering: {}", listed(&events)));
    }
    if d.endpoints_evicted > 0 {
        let evicted = format!("{} evicted", plural(d.endpoints_evicted, "endpoint"));
        parts.push(style.paint(Paint::Warn, &evicted));
    }
    if d.connections_not_followed > 0 {
        let lost = format!("{} not followed", plural(d.connections_not_followed, "connection"));
        parts.push(style.paint(Paint::Warn, &lost));
    }
    style.flow(&name, &parts)
}

fn host_line(h: &HostCounters, before: Option<HostCounters>, style: Style) -> String {
    let sign = if before.is_some() { "+" } else { "" };
    let grows = |name: &str, n: u64| format!("{name} {sign}{}", count(n));
    let time_wait = match before {
        Some(before) => format!("TIME_WAIT {} → {}", count(before.time_wait), count(h.time_wait)),
        None => format!("TIME_WAIT {}", count(h.time_wait)),
    };
    let overflows = if h.listen_overflows == 0 { Paint::Plain } else { Paint::Warn };
    let parts = [
        grows("ActiveOpens", h.active_opens),
        grows("PassiveOpens", h.passive_opens),
        grows("AttemptFails", h.attempt_fails),
        grows("EstabResets", h.estab_resets),
        time_wait,
        style.paint(overflows, &grows("ListenOverflows", h.listen_overflows)),
    ];
    style.flow(&format!("{}    ", style.paint(Paint::Bold, "host")), &parts)
}

fn append(out: &mut String, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).unwrap_or_else(|_| unreachable!("a String takes everything"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::parse;
    use crate::datapath::{InterceptCounters, KernelCounters, Outcomes};
    use crate::stats::{EvictReason, Process, Registry};

    fn registry() -> Registry {
        let config = parse(
            "[[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"127.0.0.1:1\"]\n\
             origins = [\"10.0.0.1:80\", \"[fd00::2]:8080\"]",
            "f",
        );
        let registry = Registry::new(&config.unwrap_or_else(|e| panic!("{e}")));
        let worker = registry.register(0);
        worker.metrics.clients.add(20_000);
        worker.metrics.exchanges.add(20_000);
        worker.metrics.request_bytes.add(2_100_000);
        worker.metrics.response_bytes.add(45_000_000);
        let busy = worker.origin(([10, 0, 0, 1], 80).into());
        busy.created.add(4);
        busy.reused.add(19_996);
        busy.returned.add(20_000);
        busy.idle.set(4);
        busy.evict(EvictReason::IdleTtl);
        busy.evict(EvictReason::IdleTtl);
        busy.evict(EvictReason::Lifetime);
        busy.handshake_us.record(100);
        registry
    }

    fn snapshot(registry: &Registry, uptime_ms: u64) -> Snapshot {
        let kernel = KernelCounters {
            totals_others: Outcomes { established: 20_123, ..Default::default() },
            intercept: InterceptCounters { rewritten: 20_000, ..Default::default() },
            ..KernelCounters::default()
        };
        let process = Process { now_unix_ms: uptime_ms, uptime_ms, workers: 2 };
        let host = HostCounters { active_opens: 40_123, time_wait: 482, ..Default::default() };
        Snapshot::assemble(
            process,
            registry.services(&crate::datapath::steering::Carried::default()),
            Ok(&kernel),
            host,
        )
    }

    #[test]
    fn totals() {
        let now = snapshot(&registry(), 7_300_000);
        let shown = render(View { now: &now, since: None, previous: None }, Style::PLAIN);
        let expected = concat!(
            "broker ",
            env!("CARGO_PKG_VERSION"),
            " · up 2 h 1 m · 2 workers\n",
            "\n",
            "web http1  20,000 clients, 0 open · 20,000 exchanges · 2.1 MB in, 45.0 MB out · 0 waiting\n",
            "  ORIGIN          CREATED  REUSED   REUSE                IDLE  ACTIVE  RETURNED  EVICTED  FAILED  HANDSHAKE p50 / p99\n",
            "  10.0.0.1:80           4  19,996  99.9 %  ████████████     4       0    20,000        3       0  ≤ 128 µs / ≤ 128 µs\n",
            "    └ evicted: idle_ttl 2, lifetime 1\n",
            "  [fd00::2]:8080        0       0       -                   0       0         0        0       0                    -\n",
            "  all                   4  19,996  99.9 %  ████████████     4       0    20,000        3       0\n",
            "\n",
            "kernel  handshakes by the broker 0, by others 20,123 · 20,000 connects rewritten\n",
            "host    ActiveOpens 40,123 · PassiveOpens 0 · AttemptFails 0 · EstabResets 0 · TIME_WAIT 482 · ListenOverflows 0\n",
        );
        assert_eq!(shown, expected, "\n{shown}");
    }

    #[test]
    fn cgroups_that_are_not_there() {
        let mut now = snapshot(&registry(), 1000);
        now.services[0].cgroups = [("/a".to_owned(), true), ("/b".to_owned(), false)].into();
        let shown = render(View { now: &now, since: None, previous: None }, Style::PLAIN);
        assert!(shown.contains("  cgroups that are not there: /b\n"), "{shown}");
    }

    #[test]
    fn static_origins_that_are_not_healthy_are_told() {
        let shown = |healthy| {
            let source = "static".to_owned();
            membership(&MembershipSnapshot {
                source,
                members: 2,
                healthy,
                used: 2,
                ..Default::default()
            })
        };
        assert_eq!(shown(2), None, "the configuration says it");
        let text = shown(0).unwrap();
        assert!(text.starts_with("2 of 2 members used, 0 healthy"), "{text}");
    }

    #[test]
    fn one_of_a_thing_is_singular() {
        let mut now = snapshot(&registry(), 1000);
        let service = &mut now.services[0];
        (service.clients, service.exchanges, service.connections_guaranteed) = (1, 1, 1);
        service.membership = Some(MembershipSnapshot {
            source: "file".to_owned(),
            members: 1,
            used: 1,
            refused: 1,
            changes: 1,
            ..Default::default()
        });
        now.datapath.rewritten = 1;
        let shown = render(View { now: &now, since: None, previous: None }, Style::PLAIN);
        for part in [
            "1 client, 0 open · 1 exchange · ",
            "1 connection over the limit",
            "1 of 1 member used, 0 healthy (from file, 1 change, 1 list refused)",
            "1 connect rewritten",
        ] {
            assert!(shown.contains(part), "no {part:?} in\n{shown}");
        }
    }

    #[test]
    fn changes_and_rates() {
        let registry = registry();
        let before = snapshot(&registry, 1000);
        registry.register(0).metrics.exchanges.add(30);
        registry.register(0).metrics.queue_overflow.add(2);
        let now = snapshot(&registry, 3000);
        let view = View { now: &now, since: Some(&before), previous: Some(&before) };
        let shown = render(view, Style { color: false, width: 80 });
        for part in [
            "change within 2.0 s",
            "30 exchanges (15/s)",
            "  refused: queue full 2\n",
            "CREATED/s  REUSED/s",
            "host    ActiveOpens +0",
            "EstabResets +0\n        TIME_WAIT 482 → 482 · ListenOverflows +0\n",
        ] {
            assert!(shown.contains(part), "no {part:?} in\n{shown}");
        }
        assert!(shown.lines().all(|l| l.chars().count() <= 80), "{shown}");
    }
}
