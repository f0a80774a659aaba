//! Every kind of client against every kind of origin, with every byte checked.

use std::time::Duration;

use clap::ValueEnum as _;
use harness::Launch;
use harness::torture::Mode;

const LAB: &str = env!("CARGO_BIN_EXE_broker-lab");

/// The results of a run, which must be clean.
#[track_caller]
fn torture(arguments: &[&str]) -> serde_json::Value {
    let shown = Launch::new(LAB)
        .args(["torture", "--json"])
        .args(arguments)
        .output(Duration::from_mins(3))
        .unwrap()
        .success()
        .unwrap();
    serde_json::from_str(&shown).unwrap()
}

#[test]
fn no_byte_goes_astray() {
    assert_clean("relay");
}

#[test]
fn no_byte_goes_astray_where_nonblocking_clients_are_steered() {
    let results = assert_clean("auto");
    assert!(results["steered_percent"].as_f64() > Some(1.0), "{results}");
}

#[test]
fn no_byte_goes_astray_where_all_clients_are_steered() {
    let results = assert_clean("kernel");
    assert!(results["steered_percent"].as_f64() > Some(2.0), "{results}");
}

#[track_caller]
fn assert_clean(steer: &str) -> serde_json::Value {
    let results = torture(&["--exchanges", "30000", "--steer", steer]);
    let count = |name: &str| results[name].as_u64().unwrap_or_else(|| panic!("{name}: {results}"));
    for name in ["mismatches", "duplicated", "lost", "stuck", "kernel_warnings", "leases_left"] {
        assert_eq!(count(name), 0, "{name}");
    }
    // It was a torture: every mode had its turn, clients left, origins misbehaved.
    assert!(count("exchanges") >= 30_000);
    for mode in Mode::value_variants() {
        assert!(results["modes"][mode.name()]["exchanges"].as_u64() > Some(0), "{mode}: {results}");
    }
    for name in ["abandoned", "cancelled", "repeated", "client_errors_allowed"] {
        assert!(count(name) > 0, "{name}");
    }
    assert!(count("verified_bytes") > 30_000 * 1000);
    results
}

#[test]
fn where_origins_behave_no_client_sees_an_error() {
    let results = torture(&["--calm", "--exchanges", "8000", "--clients", "64"]);
    assert_eq!(results["client_errors_allowed"], 0, "{results}");
    for (mode, row) in results["modes"].as_object().unwrap() {
        assert_eq!(row["errors"], 0, "{mode}");
    }
}
