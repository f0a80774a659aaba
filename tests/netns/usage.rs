//! What whoever makes a mistake is told, by the daemon as by `broker check`.

use std::fs;
use std::path::Path;

use harness::daemon;
use harness::process::{Finished, Launch};

use crate::support::SOON;

/// Exit code of whatever a change of the configuration has to cure.
const USAGE: Option<i32> = Some(64);

const SERVICE: &str = "[[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"127.0.0.1:1\"]\n\
                       origins = [\"10.0.0.1:80\"]\n";

fn broker(args: &[&str]) -> Finished {
    Launch::new(daemon::binary().unwrap()).args(args).output(SOON).unwrap()
}

/// What the daemon, and `broker check`, say of a configuration.
fn tell(directory: &Path, keys: &str) -> [Finished; 2] {
    let config = directory.join("broker.toml");
    fs::write(&config, format!("{keys}\n{SERVICE}")).unwrap();
    let config = config.to_str().unwrap();
    [broker(&["run", "--config", config]), broker(&["check", config])]
}

#[test]
fn daemon_and_check_agree_on_mistakes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    for keys in ["workers = \"two\"", "workers = 0", &format!("event_log = {path:?}")] {
        let [run, check] = tell(directory.path(), keys);
        assert_eq!((run.status.code(), check.status.code()), (USAGE, USAGE), "{run:?} {check:?}");
        assert_eq!(run.stderr, check.stderr);
        assert!(run.stderr.starts_with(&format!("{path}/broker.toml: ")), "{}", run.stderr);
    }
}

/// What only the daemon knows for sure is a mistake for the daemon, and a warning before.
#[test]
fn what_ends_the_daemon_is_warned_of() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("none/admin.sock");
    let unset = "gateway.index.env = \"BROKER_TEST_NO_SUCH_VARIABLE\"\ngateway.count = 2";
    for keys in [format!("admin_socket = {socket:?}"), unset.to_owned()] {
        let [run, check] = tell(directory.path(), &keys);
        assert_eq!((run.status.code(), check.status.code()), (USAGE, Some(0)), "{run:?} {check:?}");
        let (_, why) = run.stderr.trim_end().split_once("broker.toml: ").unwrap();
        assert!(check.stdout.starts_with(&format!("warning: {why}; ")), "{run:?} {check:?}");
    }
    assert!(!directory.path().join("none").exists());
}

/// Nobody has to guess which limit "too many open files" means.
#[test]
fn too_few_descriptors_end_the_daemon_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("broker.toml");
    let socket = directory.path().join("admin.sock");
    fs::write(&config, format!("admin_socket = {socket:?}\nworkers = 2\n{SERVICE}")).unwrap();
    let broker = |command: &[&str]| {
        let limited = Launch::new("prlimit").arg("--nofile=64:64").arg(daemon::binary().unwrap());
        limited.args(command).arg(&config).output(SOON).unwrap()
    };
    let (run, check) = (broker(&["run", "--config"]), broker(&["check"]));
    assert_eq!((run.status.code(), check.status.code()), (USAGE, Some(0)), "{run:?} {check:?}");
    let start = "limit of open files = 64: must be at least ";
    for (text, end) in [(run.stderr, "ulimit -Hn)\n"), (check.stdout, ", too\n")] {
        let (_, rule) = text.split_once(start).unwrap_or_else(|| panic!("{text}"));
        assert!(rule.split_inclusive('\n').next().unwrap().ends_with(end), "{text}");
    }
}

/// Authorities that the system does not have are one of the few things about TLS that no file shows.
#[test]
fn servers_that_nobody_vouches_for_are_warned_of() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("broker.toml");
    let eds = "[[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"127.0.0.1:1\"]\n\
               discovery.eds = { server = \"https://127.0.0.1:9\", node_id = \"n\" }\n";
    fs::write(&config, eds).unwrap();
    let none = directory.path().join("none");
    let check = |roots: &Path| {
        let launch = Launch::new(daemon::binary().unwrap()).arg("check").arg(&config);
        let launch = launch.env("SSL_CERT_FILE", roots).env("SSL_CERT_DIR", roots);
        launch.output(SOON).unwrap().success().unwrap()
    };
    let warning = "warning: service \"web\": discovery: https://127.0.0.1:9: ";
    assert!(check(&none).starts_with(warning), "{}", check(&none));
    let authority = rcgen::generate_simple_self_signed(["a.test".to_owned()]).unwrap();
    fs::write(directory.path().join("ca.pem"), authority.cert.pem()).unwrap();
    let fine = check(&directory.path().join("ca.pem"));
    assert!(fine.starts_with("not looked at, as that needs the network: discovery.eds"), "{fine}");
}

#[test]
fn a_log_filter_with_a_typo_is_not_passed_over() {
    let launch = Launch::new(daemon::binary().unwrap()).env("BROKER_LOG", "inof");
    let finished = launch.args(["check", "/dev/null"]).output(SOON).unwrap();
    assert_eq!(finished.status.code(), USAGE);
    let start = "broker: BROKER_LOG = \"inof\": must be a level (error, ";
    assert!(finished.stderr.starts_with(start), "{}", finished.stderr);
}

#[test]
fn times_on_the_command_line_are_seconds_or_have_a_unit() {
    let observed = broker(&["observe", "--json", "--for", "0.2"]).success().unwrap();
    let observed: serde_json::Value = serde_json::from_str(&observed).unwrap();
    assert!(observed["elapsed_ms"].as_u64().is_some_and(|ms| ms >= 200), "{observed}");
    let wrong = broker(&["observe", "--for", "3 x"]);
    assert_eq!(wrong.status.code(), USAGE);
    assert!(
        wrong.stderr.contains("must be a time: 30 or 0.5 (seconds), 500ms"),
        "{}",
        wrong.stderr
    );
}
