//! Clients that dial an origin or a virtual address, unchanged, and meet the broker.

use std::net::SocketAddr;
use std::time::Duration;

use harness::load::{self, Mode, Plan};
use harness::origin::nginx;
use harness::origin::scripted::Scripted;
use harness::{Cgroup, Client, Daemon, Lab, Launch, eventually};
use nix::sys::signal::Signal;

use crate::support::{SOON, addresses};

/// A service without listeners of its own. All labs' daemons hook the same machine: each has
/// addresses of its own to intercept.
fn config(lab: &Lab, top: &str, keys: &str) -> String {
    format!(
        "workers = 2\n{top}\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\n{keys}\n\
         [service.pool]\nprewarm = 1\n",
    )
    .replace("ORIGINS", &addresses(&lab.all_origins()))
    .replace("VIP", &lab.vip().to_string())
    .replace("CIDR", &lab.origins_cidr())
}

fn scripted(lab: &Lab, n: u8) -> Vec<Scripted> {
    (0..n).map(|i| Scripted::http(&lab.origins, lab.origin(i)).unwrap()).collect()
}

#[test]
fn clients_that_dial_an_origin_share_warm_sockets() {
    let lab = Lab::new(4).unwrap();
    let _servers: Vec<_> = (0..4).map(|i| nginx::origin(&lab, i).unwrap()).collect();
    let keys = format!(
        "intercept = [\"origins\"]\ncgroups = [{:?}]\norigins = ORIGINS",
        lab.clients_cgroup.path()
    );
    let daemon = Daemon::start(&lab, &config(&lab, "", &keys)).unwrap();
    let before = lab.origin_counters();
    let report = load::run(&lab, &Plan::echo(lab.all_origins(), 8, 2000)).unwrap();
    assert_eq!((report.requests, report.error_count(), report.crosstalk), (2000, 0, 0));
    let handshakes = lab.origin_counters().since(&before).passive_opens();
    assert!(handshakes <= 64, "{handshakes} handshakes");
    let snapshot = daemon.snapshot().unwrap();
    assert_eq!(snapshot.datapath.mode, "kernel", "{:?}", snapshot.datapath.reason);
    assert_eq!(snapshot.datapath.rewritten, 2000);
    assert_eq!(snapshot.services[0].clients, 2000);
}

#[test]
fn other_cgroups_are_left_alone() {
    let lab = Lab::new(1).unwrap();
    let origins = scripted(&lab, 1);
    let keys = format!(
        "intercept = [\"origins\"]\ncgroups = [{:?}]\norigins = ORIGINS",
        lab.clients_cgroup.path()
    );
    let daemon = Daemon::start(&lab, &config(&lab, "", &keys)).unwrap();
    // This test's own process is in no cgroup of the lab.
    assert!(goes_directly(&lab, &origins[0]));
    let datapath = daemon.snapshot().unwrap().datapath;
    assert_eq!((datapath.rewritten, datapath.left_other_cgroup), (0, 1));
}

#[test]
fn a_cgroup_may_come_later_and_be_made_again() {
    let lab = Lab::new(1).unwrap();
    let origins = scripted(&lab, 1);
    let cgroup = lab.party("php").unwrap();
    let path = cgroup.path().to_owned();
    drop(cgroup);
    let keys = format!("intercept = [\"origins\"]\ncgroups = [{path:?}]\norigins = ORIGINS");
    let daemon = Daemon::start(&lab, &config(&lab, "", &keys)).unwrap();
    let rewritten = || daemon.snapshot().unwrap().datapath.rewritten;
    let said = |what: &str| daemon.log().matches(what).count();
    let present = |n: u8| {
        let sample = format!("broker_cgroup_present{{service=\"web\",cgroup={path:?}}} {n}");
        daemon.request("GET", "/metrics").unwrap().lines().any(|line| line == sample)
    };
    assert!(present(0), "{}", daemon.request("GET", "/metrics").unwrap());
    assert!(goes_directly(&lab, &origins[0]), "a cgroup that is not there is nobody");
    assert_eq!((rewritten(), said("there is no such cgroup")), (0, 1), "{}", daemon.log());
    let url = format!("http://{}/inside", lab.origin(0));
    let served = |cgroup: &Cgroup| {
        let before = rewritten();
        let curl = Launch::new("curl").args(["-sS", "--max-time", "5", &url]);
        let finished = curl.netns(&lab.host).cgroup(cgroup).output(SOON).unwrap();
        assert!(finished.success().unwrap().ends_with(" /inside"));
        rewritten() > before
    };
    for round in 1..=3 {
        let cgroup = lab.party("php").unwrap();
        eventually(SOON, "who is in the cgroup is served", || served(&cgroup));
        assert!(goes_directly(&lab, &origins[0]), "others are not");
        assert!(present(1));
        drop(cgroup);
        if round == 1 {
            eventually(SOON, "it is noticed", || said("the cgroup has been removed") > 0);
            assert!(goes_directly(&lab, &origins[0]), "still not everybody");
        }
    }
}

#[test]
fn a_daemon_that_sees_a_part_of_the_cgroups_serves_that_part() {
    let lab = Lab::new(1).unwrap();
    let origins = scripted(&lab, 1);
    let keys = "intercept = [\"origins\"]\norigins = ORIGINS";
    let daemon = Daemon::start_below(&lab, &lab.clients_cgroup, &config(&lab, "", keys)).unwrap();
    let seen = || daemon.snapshot().unwrap().datapath;
    let before = seen();
    assert!(goes_directly(&lab, &origins[0]), "this test is not in that part");
    assert_eq!(seen().others_attempted, before.others_attempted);
    let url = format!("http://{}/inside", lab.origin(0));
    let client = lab.client("curl").args(["-sS", &url]);
    let said = client.output(SOON).unwrap().success().unwrap();
    assert!(said.ends_with(" /inside"), "{said}");
    let after = seen();
    assert_eq!((after.rewritten, after.others_attempted), (1, before.others_attempted + 1));
}

#[test]
fn a_virtual_address_is_served_and_seen_as_the_peer() {
    let lab = Lab::new(2).unwrap();
    let _origins = scripted(&lab, 2);
    let keys = "intercept = [\"VIP\"]\norigins = ORIGINS";
    let _daemon = Daemon::start(&lab, &config(&lab, "", keys)).unwrap();
    for _ in 0..10 {
        let mut client = Client::connect(&lab.host, lab.vip()).unwrap();
        assert_eq!(client.peer().unwrap(), lab.vip(), "the client sees what it dialled");
        assert!(client.get("/vip").unwrap().text().ends_with(" /vip"));
    }
}

#[test]
fn an_ipv6_address_is_intercepted_too() {
    let lab = Lab::new(1).unwrap();
    let address = SocketAddr::new(lab.origin_ip6(0), 80);
    let origin = Scripted::http(&lab.origins, address).unwrap();
    let keys = format!("intercept = [\"origins\"]\norigins = [\"{address}\"]");
    let daemon = Daemon::start(&lab, &config(&lab, "", &keys)).unwrap();
    for _ in 0..5 {
        let mut client = Client::connect(&lab.host, address).unwrap();
        assert_eq!(client.peer().unwrap(), address);
        client.get("/six").unwrap();
        assert!(!origin.knows(client.local().unwrap()));
    }
    assert_eq!(daemon.snapshot().unwrap().datapath.rewritten, 5);
}

#[test]
fn a_whole_network_is_pooled_without_a_list_of_origins() {
    let lab = Lab::new(3).unwrap();
    let origins = scripted(&lab, 3);
    let keys = "intercept = [\"CIDR:80\"]\nroute = \"dialled\"";
    let text = config(&lab, "", keys).replace("prewarm = 1", "");
    let daemon = Daemon::start(&lab, &text).unwrap();
    for round in 0..10 {
        for (i, origin) in origins.iter().enumerate() {
            let target = format!("/{i}/{round}");
            let response = Client::get_once(&lab.host, origin.address(), &target).unwrap();
            assert!(response.text().ends_with(&target));
            assert_eq!(origin.received_count(&target), 1, "the address dialled is the one served");
        }
    }
    for origin in &origins {
        // One socket for each of the two workers at most.
        assert!(origin.accepted() <= 2, "{} handshakes", origin.accepted());
    }
    assert_eq!(daemon.service().unwrap().origins.len(), 3);
}

#[test]
fn the_brokers_own_connections_are_not_intercepted() {
    // If they were, every request would go round in circles until the queue is full.
    let lab = Lab::new(1).unwrap();
    let origins = scripted(&lab, 1);
    let keys = "intercept = [\"CIDR:80\", \"origins\"]\norigins = ORIGINS";
    let daemon = Daemon::start(&lab, &config(&lab, "", keys)).unwrap();
    Client::get_once(&lab.host, lab.origin(0), "/once").unwrap();
    assert_eq!(origins[0].received_count("/once"), 1);
    assert_eq!(daemon.snapshot().unwrap().datapath.rewritten, 1);
}

#[test]
fn containers_are_served_where_an_address_is_set_and_else_left_alone() {
    let lab = Lab::new(1).unwrap();
    let origins = scripted(&lab, 1);
    let container = lab.container().unwrap();
    let keys = "intercept = [\"origins\"]\norigins = ORIGINS";

    let daemon = Daemon::start(&lab, &config(&lab, "", keys)).unwrap();
    let mut client = Client::connect(&container.netns, lab.origin(0)).unwrap();
    client.get("/direct").unwrap();
    assert!(origins[0].knows(client.local().unwrap()));
    assert_eq!(daemon.snapshot().unwrap().datapath.left_other_netns, 1);
    daemon.stop().unwrap();

    let top = format!("intercept_from_netns = \"{}\"", container.host);
    let daemon = Daemon::start(&lab, &config(&lab, &top, keys)).unwrap();
    for i in 0..5 {
        let mut client = Client::connect(&container.netns, lab.origin(0)).unwrap();
        assert_eq!(client.peer().unwrap(), lab.origin(0));
        client.get(&format!("/brokered/{i}")).unwrap();
        assert_eq!(origins[0].received_count(&format!("/brokered/{i}")), 1);
        assert!(!origins[0].knows(client.local().unwrap()));
    }
    assert_eq!(daemon.snapshot().unwrap().datapath.rewritten, 5);
    // The host's own clients are still served, too.
    assert!(!goes_directly(&lab, &origins[0]));
}

#[test]
fn when_the_daemon_is_killed_new_connections_go_directly() {
    let lab = Lab::new(1).unwrap();
    let origins = scripted(&lab, 1);
    let keys = "intercept = [\"origins\"]\norigins = ORIGINS";
    let mut daemon = Daemon::start(&lab, &config(&lab, "", keys)).unwrap();
    assert!(!goes_directly(&lab, &origins[0]));
    let mut idle = Client::connect(&lab.host, lab.origin(0)).unwrap();
    idle.get("/idle").unwrap();
    let mut silent = Client::connect(&lab.host, lab.origin(0)).unwrap();

    daemon.process().kill().unwrap();
    eventually(Duration::from_secs(1), "a direct connection", || goes_directly(&lab, &origins[0]));
    // What was open gets an error; it does not hang.
    assert!(idle.is_closed_within(SOON).unwrap());
    silent.get("/late").unwrap_err();
    assert_eq!(origins[0].received_count("/late"), 0);
}

/// Whether a client's connection reaches the origin itself.
fn goes_directly(lab: &Lab, origin: &Scripted) -> bool {
    let Ok(mut client) = Client::connect(&lab.host, lab.origin(0)) else { return false };
    client.get("/").is_ok() && origin.knows(client.local().unwrap())
}

#[test]
fn when_the_daemon_hangs_new_connections_go_directly() {
    let lab = Lab::new(1).unwrap();
    let origins = scripted(&lab, 1);
    let keys = "intercept = [\"origins\"]\norigins = ORIGINS";
    let top = "heartbeat_age_max = \"500ms\"";
    let mut daemon = Daemon::start(&lab, &config(&lab, top, keys)).unwrap();
    assert!(!goes_directly(&lab, &origins[0]));

    daemon.process().signal(Signal::SIGSTOP).unwrap();
    std::thread::sleep(Duration::from_millis(600));
    assert!(goes_directly(&lab, &origins[0]));

    daemon.process().signal(Signal::SIGCONT).unwrap();
    eventually(SOON, "it serves again", || !goes_directly(&lab, &origins[0]));
    assert!(daemon.snapshot().unwrap().datapath.left_stale_heartbeat >= 1);
}

#[test]
fn two_daemons_on_one_machine_keep_out_of_each_others_way() {
    let labs = [Lab::new(1).unwrap(), Lab::new(1).unwrap()];
    let running: Vec<_> = labs
        .iter()
        .map(|lab| {
            let origins = scripted(lab, 1);
            let keys = "intercept = [\"origins\"]\norigins = ORIGINS";
            (Daemon::start(lab, &config(lab, "", keys)).unwrap(), origins)
        })
        .collect();
    for (lab, (daemon, origins)) in labs.iter().zip(&running) {
        for _ in 0..3 {
            assert!(!goes_directly(lab, &origins[0]));
        }
        assert_eq!(daemon.snapshot().unwrap().datapath.rewritten, 3);
    }
}

#[test]
fn one_daemon_before_another_leaves_its_sockets_to_that_one() {
    let lab = Lab::new(1).unwrap();
    let _origin = nginx::origin(&lab, 0).unwrap();
    let daemon = |clients: &str| {
        let keys = format!("intercept = [\"{clients}\"]\nsteer = \"kernel\"\norigins = ORIGINS");
        Daemon::start(&lab, &config(&lab, "", &keys)).unwrap()
    };
    let behind = daemon("origins");
    let before = daemon("VIP");
    let plan = Plan { mode: Mode::OneShotClientCloses, ..Plan::echo(vec![lab.vip()], 4, 40) };
    let report = load::run(&lab, &plan).unwrap();
    assert_eq!((report.requests, report.error_count(), report.crosstalk), (40, 0, 0));
    // Steered by both, nothing would come before the daemon has lost patience, after a second.
    assert!(report.p50_us < 900_000, "{report:?}");
    let [before, behind] = [before, behind].map(|daemon| daemon.service().unwrap());
    assert_eq!(before.steered, 0);
    assert_eq!(before.not_steered.keys().collect::<Vec<_>>(), ["no_idle"]);
    assert!(behind.steered > 0, "{:?}", behind.not_steered);
}
