//! What the demonstration promises to whoever runs it.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use harness::{Launch, eventually};
use nix::sys::signal::Signal;

use crate::support::SOON;

const LAB: &str = env!("CARGO_BIN_EXE_broker-lab");

#[test]
fn it_shows_a_handful_of_handshakes_for_thousands_of_requests() {
    let shown = Launch::new(LAB)
        .args(["demo", "--requests", "3000", "--concurrency", "16", "--json"])
        .output(Duration::from_mins(2))
        .unwrap()
        .success()
        .unwrap();
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    for half in ["direct", "brokered"] {
        let field = |name: &str| &shown[half][name];
        let count = |name: &str| field(name).as_u64().unwrap_or_else(|| panic!("{name}: {shown}"));
        assert_eq!((count("requests"), count("errors"), count("crosstalk")), (3000, 0, 0));
        for name in ["rps", "p50_us", "p99_us", "cpu_us_per_request"] {
            assert!(field(name).as_f64().is_some_and(|value| value > 0.0), "{half}.{name}");
        }
        let handshakes = count("origin_handshakes");
        assert_eq!(handshakes, count("host_handshakes"), "both ends count the same");
        if half == "direct" {
            assert_eq!(handshakes, 3000);
            assert!(count("origin_time_wait") >= 2900);
        } else {
            assert!(handshakes <= 64, "{handshakes}");
            assert!(count("origin_time_wait") <= 64);
        }
    }
}

#[test]
fn interrupted_it_leaves_nothing() {
    let mut demo = Launch::new(LAB).args(["demo", "--requests", "100000000"]).spawn().unwrap();
    let traces = || -> Vec<PathBuf> {
        let prefix = format!("broker-lab-{}-", demo.pid());
        [harness::cgroup::mount_point().unwrap(), std::env::temp_dir()]
            .iter()
            .flat_map(|directory| fs::read_dir(directory).unwrap().flatten())
            .map(|entry| entry.path())
            .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(&prefix))
            .collect()
    };
    let clients = || {
        let cgroup = traces().into_iter().find(|path| path.join("clients").exists())?;
        fs::read_to_string(cgroup.join("clients/cgroup.procs")).ok()
    };
    eventually(SOON, "clients are at work", || clients().is_some_and(|pids| !pids.is_empty()));
    let traces_before = traces();
    assert_eq!(traces_before.len(), 2, "a folder and a cgroup: {traces_before:?}");
    let pids: Vec<String> = ["clients", "origins"]
        .iter()
        .flat_map(|party| {
            let of = traces_before.iter().find(|path| path.join(party).exists()).unwrap();
            let text = fs::read_to_string(of.join(party).join("cgroup.procs")).unwrap();
            text.lines().map(str::to_owned).collect::<Vec<_>>()
        })
        .collect();
    assert!(pids.len() >= 5, "four origins and the clients: {pids:?}");

    demo.signal(Signal::SIGINT).unwrap();
    let left = |pid: &String| PathBuf::from(format!("/proc/{pid}")).exists();
    eventually(SOON, "everything is gone", || traces().is_empty() && !pids.iter().any(left));
    let status = demo.wait(SOON).unwrap();
    assert_eq!(status.code(), Some(130), "{}", demo.stderr());
}
