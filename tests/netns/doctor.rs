//! `broker doctor`, and with it the self-test of steering, on the kernel that runs this.

use std::collections::BTreeMap;
use std::time::Duration;

use broker::datapath::kernel::{Kernel, Options};
use harness::process::Finished;
use harness::{Lab, Launch, daemon, eventually, leftovers};
use serde_json::Value;

use crate::support::SOON;

/// How long everything may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

fn doctor(lab: &Lab, launch: Launch) -> (Finished, Value) {
    let finished = launch.netns(&lab.host).output(PATIENCE).unwrap();
    let told = serde_json::from_str(&finished.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}{}", finished.stdout, finished.stderr));
    (finished, told)
}

/// Outcomes of one part by name.
fn outcomes(told: &Value, part: &str) -> BTreeMap<String, String> {
    let text = |check: &Value, key: &str| check[key].as_str().unwrap().to_owned();
    let checks = told["checks"].as_array().unwrap().iter();
    checks
        .filter(|check| check["part"] == part)
        .map(|check| (text(check, "name"), text(check, "outcome")))
        .collect()
}

#[test]
fn everything_works_here_and_nothing_is_left() {
    let lab = Lab::new(1).unwrap();
    let before = leftovers::objects();
    let launch = Launch::new(daemon::binary().unwrap()).args(["doctor", "--json"]);
    let (finished, told) = doctor(&lab, launch);
    assert!(finished.status.success(), "{}", finished.stdout);
    assert_eq!((&told["healthy"], &told["steering"]), (&true.into(), &true.into()));

    let steps = outcomes(&told, "steering");
    for step in [
        "exchange",
        "again",
        "wake_up",
        "peek",
        "end",
        "full_buffer",
        "silence",
        "order",
        "unread",
        "joined",
        "auto",
        "release",
        "race",
    ] {
        assert_eq!(steps.get(step).map(String::as_str), Some("ok"), "{step}: {}", finished.stdout);
    }
    // Kernels may differ in these without harm.
    for step in ["fionread", "wait_all", "splice"] {
        assert!(matches!(steps[step].as_str(), "ok" | "remark"), "{step}: {}", finished.stdout);
    }
    assert_eq!(steps.len(), 18);
    let programs = outcomes(&told, "programs");
    assert_eq!(programs.len(), 10, "{programs:?}");

    // Daemons of other tests come and go, but theirs are held by them.
    eventually(SOON, "all programs and maps that are new have a living owner", || {
        let objects = leftovers::objects();
        let held = leftovers::held();
        objects.difference(&before).all(|object| held.contains(object))
    });
    // That look does see what is there.
    let before = leftovers::objects();
    let kernel = lab.host.run(|| Kernel::load(&Options::default())).unwrap();
    let held = leftovers::held();
    assert!(leftovers::objects().difference(&before).any(|object| held.contains(object)));
    drop(kernel);
}

#[test]
fn without_privileges_it_says_what_is_missing() {
    let lab = Lab::new(1).unwrap();
    let launch = Launch::new("setpriv").arg("--bounding-set=-all").arg(daemon::binary().unwrap());
    let (finished, told) = doctor(&lab, launch.args(["doctor", "--json"]));
    assert_eq!(finished.status.code(), Some(1));
    assert_eq!((&told["healthy"], &told["steering"]), (&false.into(), &false.into()));
    assert_eq!(outcomes(&told, "host")["privileges"], "failed");
    assert!(finished.stdout.contains("run it as root"), "{}", finished.stdout);
    assert!(outcomes(&told, "steering").values().all(|outcome| outcome == "not_tried"));
    assert!(outcomes(&told, "host").values().any(|outcome| outcome == "ok"));
}

#[test]
fn a_network_without_loopback_ends_steering_only() {
    let lab = Lab::new(1).unwrap();
    lab.host.ip(&["link set lo down"]).unwrap();
    let launch = Launch::new(daemon::binary().unwrap()).args(["doctor", "--json"]);
    let (finished, told) = doctor(&lab, launch);
    assert_eq!(finished.status.code(), Some(1), "{}", finished.stdout);
    let steps = outcomes(&told, "steering");
    assert_eq!(steps["exchange"], "failed");
    assert_eq!(steps.values().filter(|outcome| *outcome == "not_tried").count(), 17);
    assert!(outcomes(&told, "programs").values().all(|outcome| outcome == "ok"));
}
