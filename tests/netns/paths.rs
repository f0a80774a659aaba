//! What TCP sees of the way to an origin: delay and loss, on a way that really has them.

use std::time::Duration;

use broker::stats::PathSnapshot;
use harness::detour::Detour;
use harness::load::{self, Plan};
use harness::origin::nginx;
use harness::{Daemon, Lab, Launch, daemon, eventually};

use crate::support::{SOON, addresses, way_in};

const ORIGINS: u8 = 6;

fn start(lab: &Lab, way: &str, outlier: &str) -> Daemon {
    let (_, clients) = way_in(lab, way);
    let config = format!(
        "workers = 2\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\n{clients}\norigins = {}\n\
         [service.outlier]\nmax_ejection_percent = 20\ninterval = \"1s\"\n{outlier}",
        addresses(&lab.all_origins())
    );
    Daemon::start(lab, &config).unwrap()
}

fn plan(lab: &Lab, way: &str) -> Plan {
    Plan::steady(vec![way_in(lab, way).0], 16)
}

fn paths(daemon: &Daemon) -> Vec<PathSnapshot> {
    let origins = daemon.service().unwrap().origins;
    origins.iter().map(|origin| origin.path.unwrap_or_default()).collect()
}

/// What `broker explain` says of ways.
fn explained(daemon: &Daemon) -> Vec<String> {
    let said = Launch::new(daemon::binary().unwrap())
        .args(["explain", "web", "--json", "--socket"])
        .arg(daemon.admin_socket())
        .output(Duration::from_secs(20));
    let findings: Vec<serde_json::Value> =
        serde_json::from_str(&said.unwrap().success().unwrap()).unwrap();
    let paths = findings.iter().filter(|finding| finding["layer"] == "path");
    paths.map(|finding| finding["evidence"].as_str().unwrap().to_owned()).collect()
}

fn is_ejected_by(daemon: &Daemon, lab: &Lab, detector: &str) -> bool {
    let events = daemon.request("GET", "/v1/events").unwrap();
    let (detector, origin) =
        (format!("\"detector\":\"{detector}\""), format!("\"origin\":\"{}\"", lab.origin(0)));
    let all = ["\"action\":\"eject\"", "\"enforced\":true", &*detector, &*origin];
    events.lines().any(|line| all.iter().all(|part| line.contains(part)))
}

#[test]
fn an_origin_that_is_far_away_is_noticed_and_ejected() {
    for way in ["relay", "kernel"] {
        let lab = Lab::new(ORIGINS).unwrap();
        let detour = Detour::new(&lab, 0).unwrap();
        let _origins: Vec<_> = (0..ORIGINS).map(|i| nginx::origin(&lab, i).unwrap()).collect();
        let daemon = start(&lab, way, "enforcing_rtt_latency = 100\nrtt_latency_volume = 5\n");
        let running = load::start(&lab, &plan(&lab, way)).unwrap();
        eventually(SOON, "all have been asked", || {
            paths(&daemon).iter().all(|path| path.segments > 100)
        });
        assert!(!is_ejected_by(&daemon, &lab, "rtt_latency"), "{:?}", paths(&daemon));
        detour.delay(Duration::from_millis(30));
        eventually(2 * SOON, "it is ejected", || is_ejected_by(&daemon, &lab, "rtt_latency"));
        let report = running.stop().unwrap();
        assert_eq!((report.error_count(), report.crosstalk), (0, 0), "{way}: {report:?}");
        let paths = paths(&daemon);
        assert!(paths[0].srtt_us >= 10_000, "{way}: {paths:?}");
        assert!(paths[1..].iter().all(|path| path.rtt_p50_us < 10_000), "{way}: {paths:?}");
        let metrics = daemon.request("GET", "/metrics").unwrap();
        let of = |name: &str| format!("{name}{{service=\"web\",origin=\"{}\"}} ", lab.origin(0));
        assert!(metrics.contains(&of("broker_origin_round_trip_seconds")), "{metrics}");
        assert!(metrics.contains(&of("broker_origin_segments_retransmitted_total")), "{metrics}");
    }
}

#[test]
fn a_way_that_is_long_from_the_start_is_explained() {
    let lab = Lab::new(3).unwrap();
    let detour = Detour::new(&lab, 0).unwrap();
    detour.delay(Duration::from_millis(30));
    let _origins: Vec<_> = (0..3).map(|i| nginx::origin(&lab, i).unwrap()).collect();
    let daemon = start(&lab, "relay", "");
    let running = load::start(&lab, &plan(&lab, "relay")).unwrap();
    eventually(2 * SOON, "all have been asked", || {
        paths(&daemon).iter().all(|path| path.segments > 50)
    });
    running.stop().unwrap();
    let said = explained(&daemon);
    let begins = format!("{}: a round trip takes ", lab.origin(0));
    assert!(said.len() == 1 && said[0].starts_with(&begins), "{said:?} {:?}", paths(&daemon));
    assert!(paths(&daemon)[0].rtt_p50_us >= 30_000, "{:?}", paths(&daemon));
    assert_eq!(daemon.service().unwrap().outliers.unwrap().ejected, 0, "nobody asked for that");
}

#[test]
fn an_origin_whose_segments_are_lost_is_noticed_and_ejected() {
    for way in ["relay", "kernel"] {
        let lab = Lab::new(ORIGINS).unwrap();
        let detour = Detour::new(&lab, 0).unwrap();
        let _origins: Vec<_> = (0..ORIGINS).map(|i| nginx::origin(&lab, i).unwrap()).collect();
        let before = lab.host_counters();
        let daemon = start(
            &lab,
            way,
            "enforcing_retransmission_percentage = 100\nenforcing_stall = 0\n\
             retransmission_percentage_segment_volume = 20\n",
        );
        let running = load::start(&lab, &plan(&lab, way)).unwrap();
        eventually(SOON, "all have been asked", || {
            paths(&daemon).iter().all(|path| path.segments > 100)
        });
        detour.lose_every(4);
        let detector = "retransmission_percentage";
        eventually(2 * SOON, "it is ejected", || is_ejected_by(&daemon, &lab, detector));
        let report = running.stop().unwrap();
        assert_eq!((report.error_count(), report.crosstalk), (0, 0), "{way}: {report:?}");
        let paths = paths(&daemon);
        // Not fewer than were lost on purpose while it was judged, and not more than the kernel knows of.
        let kernels = lab.host_counters().since(&before).get("Tcp.RetransSegs");
        let all: u64 = paths.iter().map(|path| path.retransmitted).sum();
        assert!(paths[0].retransmitted >= 2, "{way}: {paths:?}");
        assert!(i64::try_from(all).unwrap() <= kernels, "{way}: {kernels} {paths:?}");
        let others = paths[1..].iter().map(|path| path.retransmitted).max().unwrap();
        assert!(paths[0].retransmitted > others, "{way}: {paths:?}");
    }
}
