//! `broker explain` points at the real cause, one incident of each kind.

use std::fs;
use std::time::Duration;

use harness::load::{self, Plan};
use harness::origin::nginx;
use harness::origin::scripted::{Peer, Scripted};
use harness::{Client, Daemon, Lab, Launch, daemon, eventually};
use serde_json::Value;

use crate::support::{SOON, addresses, listen};

fn start(lab: &Lab, keys: &str) -> Daemon {
    let config = format!(
        "workers = 2\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"{}\"]\n{keys}",
        listen(lab)
    );
    Daemon::start(lab, &config).unwrap()
}

/// What the command finds, while clients come all the time.
fn explain(lab: &Lab, daemon: &Daemon) -> Vec<(String, String, String)> {
    let clients = load::start(lab, &Plan::steady(vec![listen(lab)], 4)).unwrap();
    let before = daemon.service().unwrap().clients;
    eventually(SOON, "clients come", || daemon.service().unwrap().clients > before);
    let findings = ask(daemon);
    // That they fail is what this is about.
    clients.stop().unwrap();
    findings
}

/// Layer, weight and evidence of each finding.
fn ask(daemon: &Daemon) -> Vec<(String, String, String)> {
    let said = Launch::new(daemon::binary().unwrap())
        .args(["explain", "web", "--json", "--socket"])
        .arg(daemon.admin_socket())
        .output(Duration::from_secs(20))
        .unwrap()
        .success()
        .unwrap();
    let findings: Vec<Value> = serde_json::from_str(&said).unwrap();
    let text = |finding: &Value, name: &str| finding[name].as_str().unwrap().to_owned();
    let parts = |f: &Value| (text(f, "layer"), text(f, "weight"), text(f, "evidence"));
    findings.iter().map(parts).collect()
}

/// The first cause it names is this one.
#[track_caller]
fn blames(findings: &[(String, String, String)], layer: &str, evidence: &str) {
    let cause = findings.iter().find(|(_, weight, _)| weight == "cause");
    let right = cause.is_some_and(|(l, _, e)| l == layer && e.contains(evidence));
    assert!(right, "not {layer} {evidence:?} but {findings:#?}");
}

#[test]
fn nothing_is_wrong() {
    let lab = Lab::new(1).unwrap();
    let _origin = nginx::origin(&lab, 0).unwrap();
    let daemon = start(&lab, &format!("origins = {}\n", addresses(&lab.all_origins())));
    let findings = explain(&lab, &daemon);
    assert!(findings.iter().all(|(_, weight, _)| weight == "fine"), "{findings:#?}");
    let shown = Launch::new(daemon::binary().unwrap())
        .args(["stats", "--explain", "--socket"])
        .arg(daemon.admin_socket())
        .output(Duration::from_secs(20));
    let shown = shown.unwrap().success().unwrap();
    assert!(shown.ends_with("nothing here makes clients fail now\n"), "{shown}");
}

#[test]
fn nobody_comes() {
    let lab = Lab::new(1).unwrap();
    let _origin = nginx::origin(&lab, 0).unwrap();
    let daemon = start(&lab, &format!("origins = {}\n", addresses(&lab.all_origins())));
    let findings = ask(&daemon);
    let noted = |(layer, weight, evidence): &(String, String, String)| {
        layer == "clients" && weight == "notable" && evidence.starts_with("no client has come")
    };
    assert!(findings.iter().any(noted), "{findings:#?}");
    assert!(findings.iter().all(|(_, weight, _)| weight != "cause"), "{findings:#?}");
}

#[test]
fn a_limit_is_reached() {
    let lab = Lab::new(1).unwrap();
    let _origin = Scripted::start(&lab.origins, lab.origin(0), |peer: &mut Peer| {
        peer.request()?;
        peer.wait_closed()
    })
    .unwrap();
    let origins = addresses(&lab.all_origins());
    let limits = "[service.limits]\nmax_connections = 1\nmax_pending = 1\n";
    let daemon = start(&lab, &format!("origins = {origins}\n{limits}"));
    let mut stuck = Client::connect(&lab.host, listen(&lab)).unwrap();
    stuck.send("GET /stuck HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    eventually(SOON, "the one connection is taken", || {
        daemon.service().unwrap().origins[0].active == 1
    });
    let findings = explain(&lab, &daemon);
    blames(&findings, "limit", "too many were waiting");
    let reached = |(layer, _, evidence): &(String, String, String)| {
        layer == "limit" && evidence.starts_with("max_connections is reached: 1 of 1")
    };
    assert!(findings.iter().any(reached), "{findings:#?}");
}

#[test]
fn all_origins_are_ejected() {
    let lab = Lab::new(1).unwrap();
    let _origin = Scripted::start(&lab.origins, lab.origin(0), |peer: &mut Peer| {
        while peer.request()?.is_some() {
            peer.send("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")?;
        }
        Ok(())
    })
    .unwrap();
    let outlier = "[service.outlier]\nmax_ejection_percent = 100\n\
                   [service.panic]\nfail_on_panic = true\n";
    let daemon = start(&lab, &format!("origins = {}\n{outlier}", addresses(&lab.all_origins())));
    for _ in 0..5 {
        Client::get_once(&lab.host, listen(&lab), "/").unwrap();
    }
    eventually(SOON, "it is ejected", || daemon.service().unwrap().outliers.unwrap().ejected == 1);
    blames(&explain(&lab, &daemon), "outlier", "the only origin is ejected");
}

#[test]
fn the_source_names_nobody() {
    let lab = Lab::new(1).unwrap();
    let file = lab.directory().join("members.json");
    fs::write(&file, "{\"origins\": []}").unwrap();
    let discovery = format!(
        "[service.discovery.file]\npath = {file:?}\n[service.discovery]\non_empty = \"drop\"\n"
    );
    let daemon = start(&lab, &discovery);
    blames(&explain(&lab, &daemon), "membership", "no origin is in use");
}

#[test]
fn an_origin_refuses_connections() {
    let lab = Lab::new(1).unwrap();
    let daemon = start(&lab, &format!("origins = {}\n", addresses(&lab.all_origins())));
    let findings = explain(&lab, &daemon);
    blames(&findings, "origin", "found no origin to connect to");
    let refused = |(layer, weight, evidence): &(String, String, String)| {
        layer == "origin" && weight == "cause" && evidence.contains("connections refused by it: ")
    };
    assert!(findings.iter().any(refused), "{findings:#?}");
}

#[test]
fn an_origin_resets_in_the_middle() {
    let lab = Lab::new(1).unwrap();
    let _origin = Scripted::start(&lab.origins, lab.origin(0), |peer: &mut Peer| {
        peer.request()?;
        peer.send("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")?;
        peer.reset()
    })
    .unwrap();
    let daemon = start(&lab, &format!("origins = {}\n", addresses(&lab.all_origins())));
    blames(&explain(&lab, &daemon), "origin", "failed by their origin");
}
