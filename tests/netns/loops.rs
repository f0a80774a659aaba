//! Origins that lead back to the daemon: nobody is served by the broker through the broker.

use std::fs;
use std::net::SocketAddr;

use harness::origin::scripted::Scripted;
use harness::{Client, Daemon, Lab, eventually};

use crate::support::{SOON, addresses};

const PORT: u16 = 8101;

/// A listener on all addresses, one of which the origins name.
fn config(protocol: &str, origins: &str) -> String {
    format!(
        "workers = 2\n[[service]]\nname = \"web\"\nprotocol = \"{protocol}\"\n\
         listen = [\"0.0.0.0:{PORT}\"]\n{origins}\n"
    )
}

#[test]
fn a_member_that_is_a_listener_is_left_out() {
    let lab = Lab::new(1).unwrap();
    let _origin = Scripted::http(&lab.origins, lab.origin(0)).unwrap();
    let own = SocketAddr::new(lab.host_ip(), PORT);
    let file = lab.directory().join("origins.json");
    fs::write(&file, addresses(&[own, lab.origin(0)])).unwrap();
    let list = format!("[service.discovery.file]\npath = \"{}\"", file.display());
    let daemon = Daemon::start(&lab, &config("http1", &list)).unwrap();
    for _ in 0..20 {
        assert_eq!(Client::get_once(&lab.host, own, "/").unwrap().status, 200);
    }
    let service = daemon.service().unwrap();
    let membership = service.membership.unwrap();
    assert_eq!((membership.members, membership.left_out["own_listener"]), (1, 1));
    assert_eq!(service.clients, 20);
    assert!(daemon.log().contains("listeners of this broker are left out"), "{}", daemon.log());

    // On a list without others nobody is left.
    fs::write(&file, addresses(&[own])).unwrap();
    eventually(SOON, "nobody is left", || daemon.service().unwrap().membership.unwrap().used == 0);
    assert_eq!(Client::get_once(&lab.host, own, "/").unwrap().status, 503);
    assert_eq!(daemon.service().unwrap().clients, 21);
}

#[test]
fn an_origin_that_is_a_listener_is_not_dialled() {
    for protocol in ["http1", "opaque"] {
        let lab = Lab::new(1).unwrap();
        let own = SocketAddr::new(lab.host_ip(), PORT);
        let origins = format!("origins = [\"{own}\"]");
        let daemon = Daemon::start(&lab, &config(protocol, &origins)).unwrap();
        // Or a reset.
        if let Ok(response) = Client::get_once(&lab.host, own, "/") {
            assert_eq!(response.status, 503);
        }
        eventually(SOON, "dials have failed", || {
            daemon.service().unwrap().origins[0].dial_failed > 2
        });
        let service = daemon.service().unwrap();
        assert_eq!((service.clients, service.origins[0].created), (1, 0), "{protocol}");
        assert_eq!(daemon.log().matches("that would loop").count(), 1, "{}", daemon.log());
    }
}
