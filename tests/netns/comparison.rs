//! The comparisons with other proxies: what they promise of the broker, and the form of what they tell.

use std::time::Duration;

use harness::Launch;
use serde_json::Value;

/// The rows of a comparison in which the broker keeps what it promises.
fn rows(args: &[&str]) -> Vec<Value> {
    let shown = Launch::new(env!("CARGO_BIN_EXE_broker-lab"))
        .arg("bench")
        .args(args)
        .arg("--json")
        .output(Duration::from_mins(3))
        .unwrap()
        .success()
        .unwrap();
    serde_json::from_str(&shown).unwrap()
}

#[test]
fn clients_of_the_broker_get_answers_while_an_origin_is_killed_or_stopped() {
    let rows = rows(&["faults", "--peers", "broker", "--faults", "killed,stopped"]);
    let of = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
    let runs: Vec<_> = rows.iter().map(|row| (of(row, "fault"), of(row, "data_path"))).collect();
    let expected =
        [("killed", "relay"), ("killed", "kernel"), ("stopped", "relay"), ("stopped", "kernel")];
    assert_eq!(runs, expected.map(|(fault, path)| (fault.to_owned(), path.to_owned())));
    for row in &rows {
        let count = |name: &str| row[name].as_u64().unwrap_or_else(|| panic!("{name}: {row}"));
        assert!(count("requests") > 100 && row["peer"] == "broker", "{row}");
        assert_eq!((count("errors"), count("leaked_5xx")), (0, 0), "{row}");
        let times = ["p50_us", "p99_us", "p999_us", "max_us"].map(count);
        assert!(times.is_sorted() && times[0] > 0, "{row}");
        assert!(row["max_pause_ms"].as_f64().unwrap() > 0.0, "{row}");
        assert_eq!(count("steered") > 0, row["data_path"] == "kernel", "{row}");
    }
}

#[test]
fn peaks_are_those_of_the_origins() {
    let rows = rows(&["limits", "--peers", "haproxy,nginx"]);
    assert_eq!(rows.len(), 2 * 3 * 3);
    for row in &rows {
        let count = |name: &str| row[name].as_u64().unwrap_or_else(|| panic!("{name}: {row}"));
        assert_eq!((count("limit"), count("burst"), count("prewarm")), (10, 200, 0), "{row}");
        // Nobody serves a request without a connection. nginx does not queue, HAProxy does.
        assert!(count("peak") > 0 && count("served") > 0, "{row}");
        if row["peer"] == "haproxy" {
            assert_eq!(count("served"), 200, "{row}");
        } else if count("workers") == 1 {
            assert!(count("peak") <= 10, "{row}");
        }
    }
}
