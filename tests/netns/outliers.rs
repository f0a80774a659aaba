//! Origins that fail are left out at once, for all workers, relayed or steered.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool, AtomicUsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Release,
};

use harness::load::{self, Plan};
use harness::origin::nginx;
use harness::origin::scripted::{Peer, Scripted};
use harness::{Daemon, Lab, eventually};
use nix::sys::signal::Signal;

use crate::support::{SOON, addresses, listen, way_in};

const ORIGINS: u8 = 8;

/// One of eight; Envoy's default of 10 % would leave nobody out.
const OUTLIER: &str = "[service.outlier]\nmax_ejection_percent = 20\n";

fn daemon(lab: &Lab, way: &str, outlier: &str) -> Daemon {
    let (_, clients) = way_in(lab, way);
    let config = format!(
        "workers = 2\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\n{clients}\norigins = {}\n\
         [service.pool]\nprewarm = 2\n{outlier}",
        addresses(&lab.all_origins())
    );
    Daemon::start(lab, &config).unwrap()
}

/// What a scripted origin is told, and tells.
#[derive(Default)]
struct Sick {
    fails: AtomicBool,
    failures: AtomicUsize,
}

/// An origin that answers 500 while it is sick.
fn sick(lab: &Lab, index: u8, sick: &Arc<Sick>) -> Scripted {
    let sick = Arc::clone(sick);
    let script = move |peer: &mut Peer| -> io::Result<()> {
        while let Some(request) = peer.request()? {
            let fails = sick.fails.load(Acquire);
            let status = if fails { "500 Internal Server Error" } else { "200 OK" };
            sick.failures.fetch_add(usize::from(fails), AcqRel);
            peer.answer_with_id(&request, status)?;
        }
        Ok(())
    };
    Scripted::start(&lab.origins, lab.origin(index), script).unwrap()
}

#[test]
fn clients_see_no_more_failures_than_it_takes_to_eject() {
    for way in ["relay", "kernel"] {
        let lab = Lab::new(ORIGINS).unwrap();
        let _others: Vec<_> = (1..ORIGINS).map(|i| nginx::origin(&lab, i).unwrap()).collect();
        let state = Arc::<Sick>::default();
        let _origin = sick(&lab, 0, &state);
        let daemon = daemon(&lab, way, OUTLIER);
        let running = load::start(&lab, &Plan::steady(vec![way_in(&lab, way).0], 16)).unwrap();
        eventually(SOON, "the load runs", || daemon.service().unwrap().exchanges > 500);
        state.fails.store(true, Release);
        let ejected = || daemon.service().unwrap().outliers.unwrap().ejected;
        eventually(SOON, "it is ejected", || ejected() == 1);
        let before = daemon.service().unwrap().exchanges;
        eventually(SOON, "the others serve", || {
            daemon.service().unwrap().exchanges > before + 1000
        });
        let report = running.stop().unwrap();
        // Those that ran into it after that were sent elsewhere.
        let failures = state.failures.load(Acquire);
        // Good responses that were under way when it began to fail do not begin the count anew.
        assert!(report.error_count() <= 5, "{way}: {report:?}, of {failures}");
        assert!(failures >= 5, "{way}: {failures}");
        assert_eq!(report.crosstalk, 0);
        let events = daemon.request("GET", "/v1/events").unwrap();
        assert!(
            events.lines().any(|l| l.contains("\"action\":\"eject\"") && l.contains("\"5xx\"")),
            "{events}"
        );
        if way == "kernel" {
            let service = daemon.service().unwrap();
            assert!(service.steered > 0, "{:?}", service.not_steered);
        }
    }
}

#[test]
fn an_origin_that_hangs_is_left_out_and_comes_back() {
    for way in ["relay", "kernel"] {
        let lab = Lab::new(ORIGINS).unwrap();
        let origins: Vec<_> = (0..ORIGINS).map(|i| nginx::origin(&lab, i).unwrap()).collect();
        // Longer than the load: that an origin is silent shows only while others answer.
        let outlier = format!("{OUTLIER}stall_time = \"200ms\"\nbase_ejection_time = \"6s\"\n");
        let daemon = daemon(&lab, way, &outlier);
        let running = load::start(&lab, &Plan::steady(vec![way_in(&lab, way).0], 16)).unwrap();
        eventually(SOON, "the load runs", || daemon.service().unwrap().exchanges > 500);
        origins[0].signal(Signal::SIGSTOP).unwrap();
        let outliers = || daemon.service().unwrap().outliers.unwrap();
        eventually(SOON, "it is ejected", || outliers().ejected == 1);
        let before = daemon.service().unwrap().exchanges;
        eventually(SOON, "the others serve", || daemon.service().unwrap().exchanges > before + 500);
        // It hangs for as long as anybody asks: what waited there has been asked of others.
        let report = running.stop().unwrap();
        assert_eq!((report.error_count(), report.crosstalk), (0, 0), "{way}: {report:?}");
        assert!(daemon.totals().unwrap().retried > 0, "{way}");
        origins[0].signal(Signal::SIGCONT).unwrap();
        eventually(3 * SOON, "it is back", || outliers().ejected == 0);
        let events = daemon.request("GET", "/v1/events").unwrap();
        assert!(events.contains("\"uneject\""), "{events}");
    }
}

#[test]
fn when_most_are_ejected_all_are_used_again_unless_told_otherwise() {
    for (panic, status) in [("", "status 500"), ("fail_on_panic = true", "status 503")] {
        let lab = Lab::new(2).unwrap();
        let state = Arc::<Sick>::default();
        let _origins = [sick(&lab, 0, &state), sick(&lab, 1, &state)];
        let outlier =
            format!("[service.outlier]\nmax_ejection_percent = 100\n[service.panic]\n{panic}\n");
        let daemon = daemon(&lab, "relay", &outlier);
        state.fails.store(true, Release);
        let plan = Plan::echo(vec![listen(&lab)], 2, 20);
        load::run(&lab, &plan).unwrap();
        let outliers = daemon.service().unwrap().outliers.unwrap();
        assert!(outliers.ejected >= 1, "{outliers:?}");
        eventually(SOON, "both are ejected", || {
            load::run(&lab, &plan).unwrap();
            daemon.service().unwrap().outliers.unwrap().ejected == 2
        });
        let report = load::run(&lab, &plan).unwrap();
        let service = daemon.service().unwrap();
        assert_eq!(report.errors.get(status), Some(&20), "{report:?} {service:?}");
        assert_eq!(service.outliers.as_ref().unwrap().ejected, 2);
        assert_eq!(service.queue_timed_out, 0, "{report:?} {service:?}");
    }
}
