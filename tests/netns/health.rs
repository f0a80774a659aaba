//! Health checks take origins out before a client meets them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};

use harness::load::{self, Plan};
use harness::origin::scripted::{Peer, Scripted};
use harness::{Daemon, Lab, eventually};

use crate::support::{SOON, addresses, listen};

/// An origin that answers its health checks as it is told, and everybody else always.
fn origin(lab: &Lab, index: u8, well: &Arc<AtomicBool>) -> Scripted {
    let well = Arc::clone(well);
    let script = move |peer: &mut Peer| -> io::Result<()> {
        while let Some(request) = peer.request()? {
            if request.target() == "/healthz" && !well.load(Acquire) {
                peer.send("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")?;
                continue;
            }
            peer.answer_with_id(&request, "200 OK")?;
        }
        Ok(())
    };
    Scripted::start(&lab.origins, lab.origin(index), script).unwrap()
}

#[test]
fn an_origin_that_is_not_well_gets_no_clients_until_it_is() {
    let lab = Lab::new(3).unwrap();
    let well: Vec<_> = (0..3).map(|_| Arc::new(AtomicBool::new(true))).collect();
    let _origins: Vec<_> = (0..).zip(&well).map(|(i, well)| origin(&lab, i, well)).collect();
    let config = format!(
        "workers = 2\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"{}\"]\n\
         origins = {}\n[service.health_check]\ntype = \"http\"\npath = \"/healthz\"\n\
         interval = \"100ms\"\ntimeout = \"100ms\"\n",
        listen(&lab),
        addresses(&lab.all_origins())
    );
    let daemon = Daemon::start(&lab, &config).unwrap();
    let membership = || daemon.service().unwrap().membership.unwrap();
    assert_eq!(membership().used, 3);
    well[1].store(false, Release);
    eventually(SOON, "it is left out", || membership().used == 2);
    let left_out = || {
        let origins = daemon.service().unwrap().origins;
        origins.into_iter().find(|origin| origin.address == lab.origin(1)).unwrap()
    };
    eventually(SOON, "it has no sockets any more", || left_out().idle == 0);
    let report = load::run(&lab, &Plan::echo(vec![listen(&lab)], 4, 200)).unwrap();
    assert_eq!((report.error_count(), report.crosstalk), (0, 0), "{report:?}");
    let check = membership().checks[&lab.origin(1).to_string()].clone();
    assert_eq!((&*check.state, check.passing), ("unhealthy", false), "{check:?}");
    well[1].store(true, Release);
    eventually(SOON, "it is back", || membership().used == 3);
    // That all are unwell is less likely than that the checks are.
    for well in &well {
        well.store(false, Release);
    }
    eventually(SOON, "none is healthy", || membership().healthy == 0);
    assert_eq!(membership().used, 3, "somebody is better than nobody");
}
