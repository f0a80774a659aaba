//! What happens to a daemon that is still starting.

use std::fs;
use std::time::Duration;

use harness::daemon;
use harness::{Daemon, Lab, Launch, eventually};
use nix::sys::signal::Signal;

use crate::support::{SOON, addresses};

/// Interception, so that the kernel is tried out, which takes a while.
fn config(lab: &Lab) -> String {
    format!(
        "workers = 1\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nintercept = [\"{}\"]\n\
         origins = {}\n",
        lab.vip(),
        addresses(&lab.all_origins())
    )
}

/// A daemon that is about to load its kernel programs.
fn starting(lab: &Lab) -> Daemon {
    let daemon = Daemon::spawn(lab, &config(lab)).unwrap();
    eventually(SOON, "it starts", || daemon.log().contains("starting"));
    assert!(!daemon.log().contains(LOADED), "{}", daemon.log());
    daemon
}

/// The first thing that is logged when the programs are loaded.
const LOADED: &str = "gateway index";

#[test]
fn a_signal_while_the_kernel_is_tried_out_is_heard() {
    let lab = Lab::new(1).unwrap();
    let mut daemon = starting(&lab);
    daemon.process().signal(Signal::SIGHUP).unwrap();
    eventually(SOON, "it is ready all the same", || daemon.log().contains("ready"));
    assert!(daemon.log().contains("SIGHUP: "), "{}", daemon.log());
    daemon.stop().unwrap();

    let mut daemon = starting(&lab);
    eventually(SOON, "the socket is there", || daemon.admin_socket().exists());
    daemon.process().signal(Signal::SIGTERM).unwrap();
    let status = daemon.process().wait(SOON).unwrap();
    assert!(status.success(), "{status}\n{}", daemon.log());
    assert!(!daemon.log().contains(LOADED), "it waits for the kernel\n{}", daemon.log());
    assert!(!daemon.admin_socket().exists());
}

#[test]
fn a_second_daemon_hears_of_the_first_before_it_touches_the_kernel() {
    let lab = Lab::new(1).unwrap();
    let daemon = Daemon::start(&lab, &config(&lab)).unwrap();
    let file = lab.directory().join("second.toml");
    let socket = daemon.admin_socket();
    fs::write(&file, format!("admin_socket = {socket:?}\n{}", config(&lab))).unwrap();
    let second = Launch::new(daemon::binary().unwrap()).args(["run", "--config"]).arg(&file);
    let second = second.env("BROKER_LOG", "debug").netns(&lab.host);
    let second = second.output(Duration::from_secs(10)).unwrap();
    assert!(!second.status.success(), "{}", second.stderr);
    assert!(second.stderr.contains("another daemon is listening there"), "{}", second.stderr);
    assert!(!second.stderr.contains("tried steering out"), "{}", second.stderr);
    daemon.stop().unwrap();
}
