//! Which gateway am I: indices claimed in a real etcd.

use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use broker::config::gateway::{self, Gateway, Index, Login};
use broker::config::tls::{Identity, Tls};
use broker::datapath::Inert;
use broker::fleet::{self, Fleet, Status};
use harness::etcd::{self, ENDPOINT, TLS_ENDPOINT};
use harness::origin::scripted::Scripted;
use harness::{Authority, Client, Daemon, Etcd, Lab, eventually};

use crate::support::{SOON, Service};

/// The shortest that there is.
const TTL: Duration = Duration::from_secs(2);

/// Longer than a lease that is not renewed lasts: etcd looks for expired ones twice a second, and
/// one that has restarted gives them their whole time again.
const LEASE_OVER: Duration = Duration::from_secs(15);

/// For whatever takes no lease's end, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

fn etcd(name: &str) -> gateway::Etcd {
    gateway::Etcd {
        endpoints: vec![ENDPOINT.into()],
        tls: Tls::default(),
        login: None,
        prefix: "/broker/fleet".into(),
        ttl: TTL,
        name: Some(name.into()),
    }
}

fn claimed(name: &str) -> Fleet {
    fleet::start(&Gateway::Claimed(etcd(name)), Arc::new(Inert)).unwrap()
}

fn configured(name: &str, index: u32) -> Fleet {
    let gateway = Gateway::Configured {
        index: Index::Number(index),
        count: 10.try_into().unwrap(),
        registry: Some(etcd(name)),
    };
    fleet::start(&gateway, Arc::new(Inert)).unwrap()
}

/// Waits until `done` holds of what a gateway knows.
async fn wait(fleet: &Fleet, what: &str, done: impl FnMut(&Status) -> bool) -> Status {
    let mut status = fleet.status();
    let waiting = tokio::time::timeout(PATIENCE, status.wait_for(done));
    let Ok(status) = waiting.await else {
        panic!("not in time: {what}; {:?}", fleet.status().borrow());
    };
    status.expect("it runs").clone()
}

async fn index(fleet: &Fleet) -> u32 {
    let status = wait(fleet, "an index", |s| s.identity.is_some()).await;
    status.identity.unwrap().index
}

async fn gateways(fleet: &Fleet, expected: u32) {
    wait(fleet, "the number of gateways", |s| s.identity.is_some_and(|i| i.gateways == expected))
        .await;
}

/// Runs a test on the lab's host, next to an etcd.
fn with_etcd(test: impl AsyncFnOnce(&mut Etcd) + Send) {
    let lab = Lab::new(1).unwrap();
    let mut etcd = Etcd::start(&lab).unwrap();
    lab.host.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test(&mut etcd));
    });
}

#[test]
fn those_who_start_at_once_get_different_indices() {
    // All of them are in one thread here: short leases would end before it comes round on a busy
    // machine.
    for (count, ttl) in [(5, TTL), (100, TTL * 30)] {
        with_etcd(async |_etcd| {
            let start = |i| {
                let etcd = gateway::Etcd { ttl, ..etcd(&format!("gateway-{i}")) };
                fleet::start(&Gateway::Claimed(etcd), Arc::new(Inert)).unwrap()
            };
            let fleets: Vec<_> = (0..count).map(start).collect();
            let mut indices = Vec::new();
            for fleet in &fleets {
                indices.push(index(fleet).await);
            }
            indices.sort_unstable();
            assert_eq!(indices, (0..count).collect::<Vec<_>>());
            for fleet in &fleets {
                gateways(fleet, count).await;
            }
        });
    }
}

#[test]
fn what_is_given_back_is_free_at_once() {
    with_etcd(async |_etcd| {
        let (first, second) = (claimed("a"), claimed("b"));
        let (taken, other) = (index(&first).await, index(&second).await);
        first.leave().await;
        let third = claimed("c");
        assert_eq!(index(&third).await, taken);
        assert_ne!(taken, other);
        // The highest index leaves: the fleet is smaller, but not before its lease's time.
        gateways(&second, 2).await;
    });
}

#[test]
fn who_vanishes_loses_the_index_with_the_lease() {
    with_etcd(async |_etcd| {
        let first = claimed("a");
        assert_eq!(index(&first).await, 0);
        let second = claimed("b");
        assert_eq!(index(&second).await, 1);
        gateways(&first, 2).await;
        // As `kill -9` does it: nothing is given back.
        drop(first);
        let third = claimed("c");
        assert_eq!(index(&third).await, 2, "the lease has not ended");
        third.leave().await;
        let mut fourth = claimed("d");
        let patience = tokio::time::Instant::now() + LEASE_OVER;
        while index(&fourth).await != 0 {
            assert!(tokio::time::Instant::now() < patience, "the lease does not end");
            fourth.leave().await;
            tokio::time::sleep(Duration::from_millis(100)).await;
            fourth = claimed("d");
        }
        // Nobody has 2 any more.
        gateways(&second, 2).await;
    });
}

#[test]
fn a_restarted_gateway_has_its_index_again() {
    with_etcd(async |_etcd| {
        let fleets = [claimed("a"), claimed("b")];
        let before = [index(&fleets[0]).await, index(&fleets[1]).await];
        drop(fleets);
        let fleets = [claimed("b"), claimed("a")];
        assert_eq!([index(&fleets[1]).await, index(&fleets[0]).await], before);
        // The old leases end, and the keys do not with them.
        tokio::time::sleep(TTL * 3).await;
        let third = claimed("c");
        assert_eq!(index(&third).await, 2);
    });
}

#[test]
fn losing_etcd_changes_nothing() {
    with_etcd(async |etcd| {
        let fleets = [claimed("a"), claimed("b"), claimed("c")];
        let mut before = Vec::new();
        for fleet in &fleets {
            gateways(fleet, 3).await;
            before.push(fleet.status().borrow().identity);
        }
        let unchanged = |when: &str| {
            let now: Vec<_> = fleets.iter().map(|f| f.status().borrow().identity).collect();
            assert_eq!(now, before, "{when}");
        };
        etcd.stop().unwrap();
        for fleet in &fleets {
            wait(fleet, "that etcd is lost", |s| s.error().is_some()).await;
        }
        // Longer than the leases.
        tokio::time::sleep(TTL * 2).await;
        unchanged("without etcd");
        etcd.resume().unwrap();
        for fleet in &fleets {
            wait(fleet, "that etcd is back", |s| s.error().is_none()).await;
        }
        unchanged("with etcd again");
        // Also if etcd has forgotten everything.
        etcd.stop().unwrap();
        etcd.forget().unwrap();
        for fleet in &fleets {
            wait(fleet, "that etcd is lost", |s| s.error().is_some()).await;
        }
        etcd.resume().unwrap();
        for fleet in &fleets {
            wait(fleet, "that etcd is back", |s| s.error().is_none()).await;
        }
        unchanged("with a new etcd");
        assert_eq!(index(&claimed("d")).await, 3);
        assert!(fleets.iter().all(|f| f.status().borrow().conflicts == 0));
    });
}

#[test]
fn an_etcd_that_hangs_is_noticed() {
    with_etcd(async |etcd| {
        let fleet = claimed("a");
        assert_eq!(index(&fleet).await, 0);
        etcd.freeze().unwrap();
        wait(&fleet, "that etcd hangs", |s| s.error().is_some()).await;
        assert_eq!(index(&fleet).await, 0);
        etcd.thaw().unwrap();
        wait(&fleet, "that etcd is back", |s| s.error().is_none()).await;
        assert_eq!(index(&fleet).await, 0);
        let start = tokio::time::Instant::now();
        etcd.freeze().unwrap();
        fleet.leave().await;
        assert!(start.elapsed() < SOON, "leaving waits for an etcd that hangs");
        etcd.thaw().unwrap();
    });
}

#[test]
fn an_index_that_was_taken_meanwhile_is_given_up() {
    with_etcd(async |etcd| {
        let first = claimed("a");
        assert_eq!(index(&first).await, 0);
        // The other one comes first after the outage, which has cost the registry its memory.
        etcd.stop().unwrap();
        wait(&first, "that etcd is lost", |s| s.error().is_some()).await;
        etcd.forget().unwrap();
        let second = configured("b", 0);
        etcd.resume().unwrap();
        tokio::select! {
            _ = wait(&first, "the conflict", |s| s.conflicts > 0) => {}
            _ = wait(&second, "the conflict", |s| s.conflicts > 0) => {}
        }
        for fleet in [&first, &second] {
            wait(fleet, "that etcd is back", |s| s.error().is_none()).await;
        }
        let (first, second) = (first.status().borrow().clone(), second.status().borrow().clone());
        // Who of them was faster does not matter: both know who they are, and one of them knows
        // that there were two.
        assert_eq!(first.conflicts + second.conflicts, 1, "{first:?} {second:?}");
        match first.conflicts {
            0 => assert!(second.conflict.is_some_and(|c| c.contains("held by a"))),
            _ => assert_eq!(first.identity.map(|i| i.index), Some(1)),
        }
    });
}

#[test]
fn two_with_one_configured_index_are_reported() {
    with_etcd(async |_etcd| {
        let (first, other) = (configured("a", 7), configured("x", 3));
        wait(&first, "its entry", |s| s.error().is_none()).await;
        let second = configured("b", 7);
        let status = wait(&second, "the conflict", |s| s.conflict.is_some()).await;
        assert_eq!(status.conflict.as_deref(), Some("index 7 is held by a"));
        assert_eq!(index(&second).await, 7, "what is configured holds");
        assert_eq!(first.status().borrow().conflicts + other.status().borrow().conflicts, 0);
        // The one leaves, the other moves in.
        first.leave().await;
        wait(&second, "the end of the conflict", |s| s.conflict.is_none()).await;
        // A second one of the same name takes the entry over; the first one says so.
        let twin = configured("b", 7);
        let status = wait(&second, "the twin", |s| s.conflict.is_some()).await;
        assert!(status.conflict.is_some_and(|c| c.contains("this one's name")));
        assert_eq!(twin.status().borrow().conflicts, 0);
    });
}

#[test]
fn over_tls_only_whom_the_authority_vouches_for() {
    let lab = Lab::new(1).unwrap();
    let (ours, other) = (Authority::new("ours").unwrap(), Authority::new("other").unwrap());
    let ca = lab.directory().join("ca.pem");
    fs::write(&ca, ours.pem()).unwrap();
    let issue = |names: &[&str], name| ours.issue(names).unwrap().write(lab.directory(), name);
    let tls =
        etcd::Tls { certificate: issue(&["127.0.0.1"], "etcd").unwrap(), clients: ca.clone() };
    let mut server = Etcd::start_with_tls(&lab, tls).unwrap();
    let [certificate, key] = issue(&["edge-17"], "client").unwrap();
    let trusted = lab.directory().join("trusted.pem");
    fs::write(&trusted, ours.pem()).unwrap();
    let tls = Tls {
        ca: Some(trusted.clone()),
        identity: Some(Identity { certificate, key }),
        server_name: None,
    };
    let start = |name: &str, tls: &Tls| {
        let endpoints = vec![TLS_ENDPOINT.into()];
        let etcd = gateway::Etcd { endpoints, tls: tls.clone(), ..etcd(name) };
        fleet::start(&Gateway::Claimed(etcd), Arc::new(Inert)).unwrap()
    };
    let says = |text: &'static str| {
        move |status: &Status| status.error().is_some_and(|error| error.contains(text))
    };
    let test = async {
        for (wrong, why) in [
            (Tls { ca: None, ..tls.clone() }, "invalid peer certificate"),
            (Tls { server_name: Some("etcd.test".into()), ..tls.clone() }, "not valid for name"),
        ] {
            let refused = start("refused", &wrong);
            let status = wait(&refused, why, says(why)).await;
            assert_eq!(status.identity, None);
        }
        // What the server says is lost sometimes: it closes the connection with it.
        let nobody = start("nobody", &Tls { identity: None, ..tls.clone() });
        let none_yet = says("no answer yet");
        let status = wait(&nobody, "the refusal", |s| s.error().is_some() && !none_yet(s)).await;
        assert_eq!(status.identity, None, "{:?}", status.error());
        let fleet = start("a", &tls);
        assert_eq!(index(&fleet).await, 0);
        // The authority is replaced by one that knows nothing of this server.
        fs::write(&trusted, other.pem()).unwrap();
        server.stop().unwrap();
        server.resume().unwrap();
        wait(&fleet, "the refusal", says("UnknownIssuer")).await;
        assert_eq!(index(&fleet).await, 0, "the last one is kept");
        fs::write(&trusted, ours.pem()).unwrap();
        wait(&fleet, "that etcd is believed", |s| s.error().is_none()).await;
    };
    lab.host.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test);
    });
}

#[test]
fn who_has_to_log_in_does() {
    let lab = Lab::new(1).unwrap();
    let etcd_server = Etcd::start(&lab).unwrap();
    for (call, body) in [
        ("user/add", r#"{"name": "root", "password": "secret"}"#),
        ("role/add", r#"{"name": "root"}"#),
        ("user/grant", r#"{"user": "root", "role": "root"}"#),
        ("enable", "{}"),
    ] {
        etcd_server.post(&format!("/v3/auth/{call}"), body).unwrap();
    }
    let password_file = lab.directory().join("password");
    fs::write(&password_file, "wrong\n").unwrap();
    let login = Login { user: "root".into(), password_file: password_file.clone() };
    lab.host.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let anonymous = claimed("anonymous");
            wait(&anonymous, "a refusal", |s| {
                s.error().is_some_and(|e| e.contains("user name is empty"))
            })
            .await;
            let etcd = gateway::Etcd { login: Some(login), ..etcd("a") };
            let fleet = fleet::start(&Gateway::Claimed(etcd), Arc::new(Inert)).unwrap();
            let says =
                |s: &Status| s.error().is_some_and(|e| e.contains("invalid user ID or password"));
            wait(&fleet, "a refusal", says).await;
            fs::write(&password_file, "secret\n").unwrap();
            assert_eq!(index(&fleet).await, 0);
            // Longer than a lease: it is renewed.
            tokio::time::sleep(TTL * 2).await;
            assert_eq!(fleet.status().borrow().error(), None);
        });
    });
}

/// Five daemons, as operators run them.
#[test]
fn daemons_claim_keep_and_give_back() {
    let lab = Lab::new(1).unwrap();
    let _origin = Scripted::http(&lab.origins, lab.origin(0)).unwrap();
    let mut etcd = Etcd::start(&lab).unwrap();
    let start = |name: &str, port: u16| {
        let service = Service::default().render(&lab).replace(":8080\"", &format!(":{port}\""));
        let gateway = format!(
            "[gateway.etcd]\nendpoints = [\"{ENDPOINT}\"]\nprefix = \"/broker/fleet\"\n\
             ttl = \"2s\"\nname = \"{name}\"\n"
        );
        Daemon::spawn(&lab, &format!("{service}\n{gateway}")).unwrap()
    };
    let mut daemons: Vec<_> = (0..5).map(|i| start(&format!("g{i}"), 9000 + i)).collect();
    let logged = |daemon: &Daemon| {
        let log = daemon.log();
        let (_, rest) = log.rsplit_once("gateway index index=")?;
        rest.split(' ').next()?.parse::<u32>().ok()
    };
    eventually(PATIENCE, "all have an index", || daemons.iter().all(|d| logged(d).is_some()));
    let mut indices: Vec<_> = daemons.iter().filter_map(logged).collect();
    let killed = daemons.pop().map(|mut d| d.process().kill().map(|()| logged(&d)));
    let freed = killed.unwrap().unwrap().unwrap();
    indices.sort_unstable();
    assert_eq!(indices, [0, 1, 2, 3, 4]);

    // Killed: free when the lease has ended.
    std::thread::sleep(LEASE_OVER / 2);
    let next = start("next", 9010);
    eventually(SOON, "the freed index", || logged(&next) == Some(freed));
    // Stopped: free at once.
    next.stop().unwrap();
    let last = start("last", 9011);
    eventually(SOON, "the index that was given back", || logged(&last) == Some(freed));

    etcd.stop().unwrap();
    eventually(LEASE_OVER, "they say so", || last.log().contains("keeping the last one"));
    assert_eq!(logged(&last), Some(freed));
    for _ in 0..20 {
        let clients = SocketAddr::new(lab.host_ip(), 9011);
        let response = Client::get_once(&lab.host, clients, "/").unwrap();
        assert_eq!(response.status, 200, "etcd is not needed to serve");
    }
    last.stop().unwrap();
}
