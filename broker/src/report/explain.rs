//! Why clients of a service fail, from two snapshots a moment apart, in the order of diagnosis.

mod paths;

use std::fmt::Write as _;

use serde::Serialize;

use super::unit::plural;
use super::{Paint, Style, quoted};
use crate::stats::{ServiceSnapshot, Snapshot};

/// How much a finding explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Weight {
    /// Clients fail, or wait, because of this, now.
    Cause,
    /// It may soon, or it made them fail before.
    Notable,
    /// It was looked at, and is in order.
    Fine,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Which: `limit`, `outlier`, `membership`, `subset`, `origin` or `clients`.
    pub layer: &'static str,
    /// How much it explains.
    pub weight: Weight,
    /// What was seen.
    pub evidence: String,
    /// The setting to look at, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub setting: Option<String>,
}

/// How a connection failed that nobody has answered.
const TIMED_OUT: &str = "that timed out";

/// One in so many exchanges that an origin answers with an error explains why clients fail.
const ERRORS_SHARE: u64 = 20;

/// Looks at a service in the order of diagnosis: is it reached, does a limit stop it, were origins
/// ejected, is there nobody left to ask, do the origins themselves fail? `None` if there is no such
/// service.
#[must_use]
pub fn explain(service: &str, before: &Snapshot, now: &Snapshot) -> Option<Vec<Finding>> {
    let find = |snapshot: &Snapshot| snapshot.services.iter().find(|s| s.name == service).cloned();
    let now_service = find(now)?;
    let before_service = find(before).unwrap_or_else(|| now_service.clone());
    let both = Both { before: &before_service, now: &now_service };
    let mut findings = Vec::new();
    clients(now, &both, &mut findings);
    limits(&both, &mut findings);
    outliers(&both, &mut findings);
    membership(&both, &mut findings);
    origins(&both, &mut findings);
    paths::paths(&both, &mut findings);
    Some(findings)
}

/// The same service, a moment apart.
struct Both<'a> {
    before: &'a ServiceSnapshot,
    now: &'a ServiceSnapshot,
}

impl Both<'_> {
    /// How much a counter has grown meanwhile.
    fn rise(&self, counter: impl Fn(&ServiceSnapshot) -> u64) -> u64 {
        counter(self.now).saturating_sub(counter(self.before))
    }
}

fn clients(now: &Snapshot, both: &Both<'_>, findings: &mut Vec<Finding>) {
    let datapath = &now.datapath;
    let left = datapath.left_stale_heartbeat;
    if both.now.clients == 0 {
        findings.push(Finding {
            layer: "clients",
            // Nobody fails who has not come.
            weight: Weight::Notable,
            evidence: format!(
                "no client has come since the start: of all services, {} sent to the broker, {} left \
                 alone for another cgroup, {} for another network namespace",
                plural(datapath.rewritten, "connection"),
                datapath.left_other_cgroup,
                datapath.left_other_netns
            ),
            setting: Some("listen, intercept, cgroups, intercept_from_netns".to_owned()),
        });
    } else {
        let evidence = format!(
            "{} since the start, {} open, {}",
            plural(both.now.clients, "client"),
            both.now.clients_open,
            plural(both.now.exchanges, "exchange")
        );
        findings.push(Finding { layer: "clients", weight: Weight::Fine, evidence, setting: None });
    }
    for (cgroup, _) in both.now.cgroups.iter().filter(|(_, present)| !**present) {
        findings.push(Finding {
            layer: "clients",
            weight: Weight::Notable,
            evidence: format!("the cgroup {cgroup} is not there: nobody in it is intercepted"),
            setting: Some("cgroups".to_owned()),
        });
    }
    if left > 0 {
        findings.push(Finding {
            layer: "clients",
            weight: Weight::Notable,
            evidence: format!(
                "{} went directly because no worker was alive, or had descriptors left",
                plural(left, "connection")
            ),
            setting: Some("heartbeat_age_max, LimitNOFILE".to_owned()),
        });
    }
    let unknown = both.rise(|s| s.destination_unknown);
    if unknown > 0 {
        findings.push(Finding {
            layer: "clients",
            weight: Weight::Cause,
            evidence: format!(
                "{} just now without a record of what was dialled",
                plural(unknown, "connection")
            ),
            setting: None,
        });
    }
}

fn limits(both: &Both<'_>, findings: &mut Vec<Finding>) {
    type Value = fn(&ServiceSnapshot) -> u64;
    let refused: [(&str, Value, &str); 5] = [
        ("max_pending", |s| s.queue_overflow, "exchanges refused because too many were waiting"),
        (
            "refuse",
            |s| s.connects_refused,
            "connect() refused because nothing was left and too many were waiting",
        ),
        (
            "max_requests",
            |s| s.request_overflow,
            "exchanges refused because too many were under way",
        ),
        (
            "max_retries",
            |s| s.retry_overflow,
            "exchanges failed because too many were being tried again",
        ),
        ("queue_timeout", |s| s.queue_timed_out, "exchanges refused because they waited too long"),
    ];
    let mut fine = true;
    for (name, counter, what) in refused {
        let (rise, total) = (both.rise(counter), counter(both.now));
        if total == 0 {
            continue;
        }
        fine = false;
        findings.push(Finding {
            layer: "limit",
            weight: if rise > 0 { Weight::Cause } else { Weight::Notable },
            evidence: format!("{what}: {}", counted(rise, total)),
            setting: Some(match name {
                "queue_timeout" => "pool.queue_timeout, limits.max_connections".to_owned(),
                "refuse" => "limits.max_connections, limits.max_pending".to_owned(),
                limit => setting(limit),
            }),
        });
    }
    for (name, limit) in &both.now.limits {
        let earlier = both.before.limits.get(name).map_or(0, |b| b.overflow);
        let overflows = limit.overflow.saturating_sub(earlier);
        // Who goes on waiting for a connection was counted when the wait began.
        let waiting = if name == "max_connections" { both.now.waiting } else { 0 };
        if limit.used >= limit.max {
            fine = false;
            // Idle sockets fill the limit of connections, and make room.
            let (weight, effect) = match (overflows, waiting) {
                (0, 0) => (Weight::Notable, "in nobody's way just now".to_owned()),
                (0, _) => (Weight::Cause, format!("{} waiting", plural(waiting, "exchange"))),
                _ => {
                    let often = plural(overflows, "time");
                    (Weight::Cause, format!("{often} in the way just now"))
                }
            };
            findings.push(Finding {
                layer: "limit",
                weight,
                evidence: format!("{name} is reached: {} of {}, {effect}", limit.used, limit.max),
                setting: Some(setting(name)),
            });
        }
    }
    if fine {
        let used = both.now.limits.iter().map(|(name, l)| format!("{name} {}/{}", l.used, l.max));
        let evidence = format!("no limit is reached: {}", used.collect::<Vec<_>>().join(", "));
        findings.push(Finding { layer: "limit", weight: Weight::Fine, evidence, setting: None });
    }
}

/// How often something has happened.
fn counted(rise: u64, total: u64) -> String {
    let when = if rise == 0 { "none just now".to_owned() } else { format!("{rise} just now") };
    format!("{when}, {total} since the start")
}

/// Where a limit is set.
fn setting(limit: &str) -> String {
    match limit {
        "max_retries" => "retries".to_owned(),
        limit => format!("limits.{limit}"),
    }
}

fn outliers(both: &Both<'_>, findings: &mut Vec<Finding>) {
    let Some(outliers) = &both.now.outliers else { return };
    let ejected: Vec<_> = outliers.origins.iter().filter(|o| o.ejected_for_ms.is_some()).collect();
    for origin in &ejected {
        findings.push(Finding {
            layer: "outlier",
            weight: Weight::Notable,
            evidence: format!(
                "{} is ejected for another {} s, for the {}. time",
                origin.address,
                origin.ejected_for_ms.unwrap_or(0).div_ceil(1000),
                origin.ejections
            ),
            setting: Some("outlier; `broker events` tells by which detector".to_owned()),
        });
    }
    let all = outliers.origins.len();
    if !ejected.is_empty() && ejected.len() == all {
        findings.push(Finding {
            layer: "outlier",
            weight: Weight::Cause,
            evidence: match all {
                1 => "the only origin is ejected".to_owned(),
                _ => format!("all {all} origins are ejected"),
            },
            setting: Some("outlier.max_ejection_percent, panic.threshold".to_owned()),
        });
    } else if ejected.is_empty() {
        let evidence = match all {
            0 => "no origin is known, so none is ejected".to_owned(),
            _ => format!("of {} none is ejected", plural(all as u64, "origin")),
        };
        findings.push(Finding { layer: "outlier", weight: Weight::Fine, evidence, setting: None });
    }
    if outliers.overflow > 0 {
        findings.push(Finding {
            layer: "outlier",
            weight: Weight::Notable,
            evidence: format!(
                "{} withheld since the start because as many as allowed were ejected already",
                plural(outliers.overflow, "ejection")
            ),
            setting: Some("outlier.max_ejection_percent".to_owned()),
        });
    }
}

fn membership(both: &Both<'_>, findings: &mut Vec<Finding>) {
    let Some(membership) = &both.now.membership else { return };
    if let Some(error) = &membership.error {
        findings.push(Finding {
            layer: "membership",
            weight: if membership.used == 0 { Weight::Cause } else { Weight::Notable },
            evidence: format!(
                "the source ({}) is not in order: {}",
                membership.source,
                quoted(error)
            ),
            setting: Some("discovery".to_owned()),
        });
    }
    // Only a service whose clients choose the origins by what they dial has none by its configuration.
    let dialled =
        membership.source == "static" && membership.members == 0 && membership.left_out.is_empty();
    if dialled {
        return;
    }
    if membership.used == 0 {
        findings.push(Finding {
            layer: "membership",
            weight: Weight::Cause,
            evidence: match membership.members {
                0 => "no origin is in use: the service has no members".to_owned(),
                members => format!("no origin is in use, of {}", plural(members, "member")),
            },
            setting: Some("discovery.on_empty, origins".to_owned()),
        });
        return;
    }
    for (origin, check) in membership.checks.iter().filter(|(_, check)| !check.passing) {
        let error = quoted(check.last_error.as_deref().unwrap_or("not checked yet"));
        findings.push(Finding {
            layer: "membership",
            weight: Weight::Notable,
            evidence: format!("{origin}: health check: {error} ({} in a row)", check.consecutive),
            setting: Some("health_check".to_owned()),
        });
    }
    let unhealthy = membership.healthy < membership.members;
    let evidence = format!(
        "{} of {} used, {} healthy, priority {}",
        membership.used,
        plural(membership.members, "member"),
        membership.healthy,
        membership.priority
    );
    let weight = if unhealthy { Weight::Notable } else { Weight::Fine };
    findings.push(Finding { layer: "membership", weight, evidence, setting: None });
    if membership.widened > 0 {
        findings.push(Finding {
            layer: "subset",
            weight: Weight::Notable,
            evidence: format!(
                "{} used in place of others of the subset",
                plural(membership.widened, "origin")
            ),
            setting: Some("subset.size, subset.min_healthy".to_owned()),
        });
    }
}

fn origins(both: &Both<'_>, findings: &mut Vec<Finding>) {
    let mut fine = true;
    let exchanges = both.rise(|s| s.exchanges);
    let unreachable = both.rise(|s| s.unreachable);
    if unreachable > 0 {
        fine = false;
        findings.push(Finding {
            layer: "origin",
            weight: Weight::Cause,
            evidence: format!(
                "{} just now found no origin to connect to",
                plural(unreachable, "exchange")
            ),
            setting: None,
        });
    }
    for origin in &both.now.origins {
        let before = both.before.origins.iter().find(|o| o.address == origin.address);
        let dials: [(&str, u64, u64); 3] = [
            ("refused by it", origin.dial_refused, before.map_or(0, |b| b.dial_refused)),
            (TIMED_OUT, origin.dial_timed_out, before.map_or(0, |b| b.dial_timed_out)),
            ("that failed", origin.dial_failed, before.map_or(0, |b| b.dial_failed)),
        ];
        for (how, total, earlier) in dials.into_iter().filter(|(_, total, _)| *total > 0) {
            fine = false;
            let rise = total.saturating_sub(earlier);
            findings.push(Finding {
                layer: "origin",
                weight: if rise > 0 { Weight::Cause } else { Weight::Notable },
                evidence: format!(
                    "{}: connections {how}: {}",
                    origin.address,
                    counted(rise, total)
                ),
                setting: (how == TIMED_OUT).then(|| "pool.connect_timeout".to_owned()),
            });
        }
        let errors = origin.responses_5xx;
        if errors > 0 {
            fine = false;
            let rise = errors.saturating_sub(before.map_or(0, |b| b.responses_5xx));
            let many = rise > 0 && rise.saturating_mul(ERRORS_SHARE) >= exchanges;
            findings.push(Finding {
                layer: "origin",
                weight: if many { Weight::Cause } else { Weight::Notable },
                evidence: format!(
                    "{}: responses with a status of 500 or above: {}; {} with all origins just now",
                    origin.address,
                    counted(rise, errors),
                    plural(exchanges, "exchange")
                ),
                setting: Some("outlier, retries.retry_on".to_owned()),
            });
        }
    }
    let failed = both.rise(|s| s.origin_failed);
    if both.now.origin_failed > 0 {
        fine = false;
        findings.push(Finding {
            layer: "origin",
            weight: if failed > 0 { Weight::Cause } else { Weight::Notable },
            evidence: format!(
                "exchanges failed by their origin (reset, ended or stalled) that could not be \
                 repeated: {}",
                counted(failed, both.now.origin_failed)
            ),
            setting: Some("timeouts.origin_stall".to_owned()),
        });
    }
    if fine {
        // Without any it was said above, or nobody has dialled one yet.
        let evidence = match both.now.origins.len() {
            0 => "no origin was dialled yet".to_owned(),
            1 => "the only origin answers".to_owned(),
            all => format!("all {all} origins answer"),
        };
        findings.push(Finding { layer: "origin", weight: Weight::Fine, evidence, setting: None });
    }
}

/// What is not in order in any service, from two snapshots a moment apart.
#[must_use]
pub fn render_all(before: &Snapshot, now: &Snapshot, style: Style) -> String {
    let mut out = String::from("\n");
    let mut causes = false;
    for service in &now.services {
        let mut findings = explain(&service.name, before, now).unwrap_or_default();
        findings.retain(|finding| finding.weight != Weight::Fine);
        causes |= is_explained(&findings);
        if !findings.is_empty() {
            out.push_str(&lines(&service.name, &findings, style));
        }
    }
    if !causes {
        out.push_str(NO_CAUSE);
    }
    out
}

const NO_CAUSE: &str = "  nothing here makes clients fail now\n";

fn is_explained(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.weight == Weight::Cause)
}

/// The findings as text.
#[must_use]
pub fn render(service: &str, findings: &[Finding], style: Style) -> String {
    let mut out = lines(service, findings, style);
    if !is_explained(findings) {
        out.push_str(NO_CAUSE);
    }
    out
}

fn lines(service: &str, findings: &[Finding], style: Style) -> String {
    let mut out = format!("{}\n", style.paint(Paint::Bold, service));
    for finding in findings {
        let (mark, paint) = match finding.weight {
            Weight::Cause => ("CAUSE", Paint::Bad),
            Weight::Notable => ("note", Paint::Warn),
            Weight::Fine => ("ok", Paint::Dim),
        };
        // Writing to a String cannot fail.
        write!(out, "  {:<6}{:<12}{}", style.paint(paint, mark), finding.layer, finding.evidence)
            .ok();
        if let Some(setting) = &finding.setting {
            write!(out, "  [{setting}]").ok();
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::parse;
    use crate::datapath::steering::Carried;
    use crate::origin::outlier::{HostSnapshot, Snapshot as Outliers};
    use crate::stats::{
        HostCounters, LimitSnapshot, MembershipSnapshot, OriginSnapshot, PathSnapshot, Process,
        Registry,
    };

    /// A daemon whose service is in order.
    fn snapshot() -> Snapshot {
        let config = parse(
            "[[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"127.0.0.1:1\"]\n\
             origins = [\"10.0.0.1:80\", \"10.0.0.2:80\"]",
            "f",
        );
        let registry = Registry::new(&config.unwrap_or_else(|e| panic!("{e}")));
        let process = Process { now_unix_ms: 0, uptime_ms: 1000, workers: 1 };
        let services = registry.services(&Carried::default());
        let mut snapshot =
            Snapshot::assemble(process, services, Err("test"), HostCounters::default());
        let service = &mut snapshot.services[0];
        service.clients = 7;
        let limit = LimitSnapshot { max: 10, used: 3, overflow: 0 };
        service.limits.insert("max_connections".to_owned(), limit);
        service.membership =
            Some(MembershipSnapshot { members: 2, healthy: 2, used: 2, ..Default::default() });
        snapshot
    }

    /// The layers that are causes, after something has happened to the service.
    fn causes(happens: impl Fn(&mut ServiceSnapshot)) -> Vec<(&'static str, String)> {
        let before = snapshot();
        let mut now = snapshot();
        happens(&mut now.services[0]);
        let findings = explain("web", &before, &now).unwrap();
        let causes = findings.into_iter().filter(|f| f.weight == Weight::Cause);
        causes.map(|f| (f.layer, f.evidence)).collect()
    }

    fn layers(happens: impl Fn(&mut ServiceSnapshot)) -> Vec<&'static str> {
        causes(happens).into_iter().map(|(layer, _)| layer).collect()
    }

    fn ejected(service: &mut ServiceSnapshot, count: usize) {
        let host = |last: usize| HostSnapshot {
            address: format!("10.0.0.{}:80", last + 1).parse().unwrap(),
            ejected_for_ms: (last < count).then_some(30_000),
            ejections: 1,
            multiplier: 1,
            share: 100,
            success_rate: None,
            owed: 0,
        };
        service.outliers =
            Some(Outliers { origins: (0..2).map(host).collect(), ..Outliers::default() });
    }

    #[test]
    fn each_incident_is_found_where_it_is() {
        assert!(layers(|_| {}).is_empty(), "all is well");
        assert!(layers(|s| s.clients = 0).is_empty(), "nobody came, nobody fails");
        assert_eq!(layers(|s| s.queue_overflow = 3), ["limit"]);
        assert_eq!(layers(|s| s.request_overflow = 3), ["limit"]);
        assert_eq!(layers(|s| s.retry_overflow = 3), ["limit"]);
        assert_eq!(layers(|s| s.connects_refused = 3), ["limit"]);
        assert_eq!(layers(|s| ejected(s, 2)), ["outlier"]);
        assert!(layers(|s| ejected(s, 1)).is_empty(), "the other one serves");
        assert_eq!(layers(|s| s.membership.as_mut().unwrap().used = 0), ["membership"]);
        let nobody = |source: &str| {
            Some(MembershipSnapshot { source: source.to_owned(), ..Default::default() })
        };
        assert!(layers(|s| s.membership = nobody("static")).is_empty(), "a dialled service");
        assert_eq!(layers(|s| s.membership = nobody("file")), ["membership"]);
        let left_out = |s: &mut ServiceSnapshot| {
            s.membership = nobody("static");
            let reasons = &mut s.membership.as_mut().unwrap().left_out;
            reasons.insert("own_listener".to_owned(), 1);
        };
        assert_eq!(layers(left_out), ["membership"]);
        assert_eq!(layers(|s| s.origins[1].dial_refused = 4), ["origin"]);
        assert_eq!(layers(|s| s.origin_failed = 4), ["origin"]);
        assert_eq!(layers(|s| s.unreachable = 4), ["origin"]);
        let fails =
            |errors| layers(move |s| (s.exchanges, s.origins[1].responses_5xx) = (100, errors));
        assert_eq!((fails(4).len(), fails(5)), (0, vec!["origin"]));
    }

    #[test]
    fn a_bad_way_is_named_and_no_cause() {
        let path = |rtt_p50_us, retransmitted| {
            Some(PathSnapshot { segments: 1000, retransmitted, srtt_us: rtt_p50_us, rtt_p50_us })
        };
        let evidence = |paths: &[Option<PathSnapshot>]| -> Vec<String> {
            let mut now = snapshot();
            let origins = &mut now.services[0].origins;
            origins.push(OriginSnapshot {
                address: "10.0.0.3:80".parse().unwrap(),
                ..origins[0].clone()
            });
            for (origin, path) in origins.iter_mut().zip(paths) {
                origin.path = *path;
            }
            let findings = explain("web", &snapshot(), &now).unwrap();
            let paths = findings.into_iter().filter(|f| f.layer == "path");
            paths.inspect(|f| assert_eq!(f.weight, Weight::Notable)).map(|f| f.evidence).collect()
        };
        assert!(evidence(&[path(100, 19), path(5000, 0), path(100, 0)]).is_empty());
        assert!(evidence(&[path(100, 0), path(90_000, 0), None]).is_empty(), "of two, which?");
        let all = evidence(&[path(100, 20), path(90_000, 0), path(100, 0)]);
        assert_eq!(
            all,
            [
                "10.0.0.1:80: segments that had to be sent again: 20 just now, 20 of 1000 since the start",
                "10.0.0.2:80: a round trip takes 90000 us, to its peers 100 us (medians)",
            ]
        );
    }

    #[test]
    fn a_cgroup_that_is_not_there_is_named() {
        let mut now = snapshot();
        now.services[0].cgroups = [("/a".to_owned(), true), ("/b".to_owned(), false)].into();
        let findings = explain("web", &now, &now).unwrap();
        let notes = findings.iter().filter(|finding| finding.weight == Weight::Notable);
        let notes: Vec<_> = notes.map(|finding| finding.evidence.as_str()).collect();
        assert_eq!(notes, ["the cgroup /b is not there: nobody in it is intercepted"]);
    }

    #[test]
    fn a_full_limit_is_a_cause_only_if_it_is_in_the_way() {
        let finding = |overflow: u64, waiting: u64| {
            let mut now = snapshot();
            let service = &mut now.services[0];
            service.waiting = waiting;
            let full = LimitSnapshot { max: 10, used: 10, overflow };
            service.limits.insert("max_connections".to_owned(), full);
            let all = explain("web", &snapshot(), &now).unwrap();
            let limit = all.into_iter().find(|f| f.layer == "limit").unwrap();
            let effect = limit.evidence.strip_prefix("max_connections is reached: 10 of 10, ");
            (limit.weight, effect.unwrap_or_default().to_owned())
        };
        let expect = |weight, effect: &str| (weight, effect.to_owned());
        assert_eq!(finding(0, 0), expect(Weight::Notable, "in nobody's way just now"));
        assert_eq!(finding(0, 1), expect(Weight::Cause, "1 exchange waiting"));
        assert_eq!(finding(2, 1), expect(Weight::Cause, "2 times in the way just now"));
    }

    #[test]
    fn what_is_over_is_no_cause() {
        let mut before = snapshot();
        before.services[0].queue_overflow = 3;
        let findings = explain("web", &before, &before).unwrap();
        let limit = findings.iter().find(|f| f.layer == "limit").unwrap();
        assert_eq!(limit.weight, Weight::Notable, "{limit:?}");
        assert!(explain("wbe", &before, &before).is_none());
    }

    #[test]
    fn numbers_are_sentences() {
        let evidence = |happens: fn(&mut ServiceSnapshot)| {
            let (mut before, mut now) = (snapshot(), snapshot());
            (before.services[0].queue_overflow, before.services[0].origins[1].dial_refused) =
                (3, 2);
            now.services[0] = before.services[0].clone();
            happens(&mut now.services[0]);
            let all = explain("web", &before, &now).unwrap();
            all.into_iter().map(|finding| finding.evidence).collect::<Vec<_>>().join("\n")
        };
        let quiet = evidence(|_| {});
        for text in [
            "exchanges refused because too many were waiting: none just now, 3 since the start",
            "10.0.0.2:80: connections refused by it: none just now, 2 since the start",
        ] {
            assert!(quiet.contains(text), "{quiet}");
        }
        let busy = evidence(|s| s.queue_overflow += 1);
        assert!(busy.contains("too many were waiting: 1 just now, 4 since the start"), "{busy}");
        let origins = |left: usize| {
            let mut now = snapshot();
            now.services[0].origins.truncate(left);
            let all = explain("web", &now, &now).unwrap();
            all.into_iter().find(|finding| finding.layer == "origin").unwrap().evidence
        };
        assert_eq!(
            [0, 1, 2].map(origins),
            ["no origin was dialled yet", "the only origin answers", "all 2 origins answer"]
        );
    }

    #[test]
    fn picture() {
        let mut now = snapshot();
        now.services[0].queue_overflow = 3;
        ejected(&mut now.services[0], 1);
        let findings = explain("web", &snapshot(), &now).unwrap();
        let text = render("web", &findings, Style::PLAIN);
        assert!(text.contains("CAUSE limit"), "{text}");
        assert!(text.contains("[limits.max_pending]"), "{text}");
        assert!(text.contains("10.0.0.1:80 is ejected for another 30 s"), "{text}");
    }
}
