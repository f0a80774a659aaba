//! The harness itself: if its counts are wrong, every other test's verdict is worthless.

use std::time::Duration;

use harness::load::{self, Mode, Plan};
use harness::origin::nginx;
use harness::origin::scripted::Scripted;
use harness::{Client, Lab, eventually};

#[test]
fn the_kernel_counts_one_handshake_per_curl_request() {
    let lab = Lab::new(1).unwrap();
    let _nginx = nginx::origin(&lab, 0).unwrap();
    let before = lab.origin_counters();
    for i in 0..5 {
        let body = lab
            .client("curl")
            .args(["-sS", "-H", &format!("X-Request-Id: id-{i}")])
            .arg(format!("http://{}/echo", lab.origin(0)))
            .output(Duration::from_secs(5))
            .unwrap()
            .success()
            .unwrap();
        assert_eq!(body, format!("id-{i}\n"));
    }
    assert_eq!(lab.origin_counters().since(&before).passive_opens(), 5);
}

#[test]
fn load_is_counted_exactly_and_checked() {
    let lab = Lab::new(2).unwrap();
    let _servers = [nginx::origin(&lab, 0).unwrap(), nginx::origin(&lab, 1).unwrap()];
    for mode in [Mode::OneShot, Mode::OneShotClientCloses] {
        let (origins, host) = (lab.origin_counters(), lab.host_counters());
        let plan = Plan { mode, ..Plan::echo(lab.all_origins(), 16, 1000) };
        let report = load::run(&lab, &plan).unwrap();
        assert_eq!((report.requests, report.error_count(), report.crosstalk), (1000, 0, 0));
        assert_eq!(lab.origin_counters().since(&origins).passive_opens(), 1000);
        assert_eq!(lab.host_counters().since(&host).active_opens(), 1000);
    }
    // The side that ends a connection first keeps its TIME_WAIT.
    assert!(lab.origin_counters().time_wait() >= 900, "{}", lab.origin_counters().time_wait());
    assert!(lab.host_counters().time_wait() >= 900, "{}", lab.host_counters().time_wait());

    let before = lab.origin_counters();
    for (path, length) in nginx::FILES {
        let plan = Plan {
            mode: Mode::KeepAlive,
            path: path.into(),
            body: Some(length),
            ..Plan::echo(lab.all_origins(), 8, 100)
        };
        let report = load::run(&lab, &plan).unwrap();
        assert_eq!((report.requests, report.error_count()), (100, 0), "{:?}", report.errors);
    }
    assert_eq!(lab.origin_counters().since(&before).passive_opens(), 3 * 8);
}

#[test]
fn a_response_to_another_request_is_noticed() {
    let lab = Lab::new(1).unwrap();
    let _origin = Scripted::start(&lab.origins, lab.origin(0), |peer| {
        while peer.request()?.is_some() {
            peer.send("HTTP/1.1 200 OK\r\nX-Request-Id: 1\r\nContent-Length: 0\r\n\r\n")?;
        }
        Ok(())
    })
    .unwrap();
    let plan = Plan { mode: Mode::OneShotClientCloses, ..Plan::echo(vec![lab.origin(0)], 2, 10) };
    let report = load::run(&lab, &plan).unwrap();
    assert_eq!((report.requests, report.error_count(), report.crosstalk), (0, 10, 10));
}

#[test]
fn containers_reach_host_and_origins_over_ipv4() {
    let lab = Lab::new(1).unwrap();
    let origin = Scripted::http(&lab.origins, lab.origin(0)).unwrap();
    let containers = [lab.container().unwrap(), lab.container().unwrap()];
    for container in &containers {
        let response = Client::get_once(&container.netns, lab.origin(0), "/x").unwrap();
        assert!(response.text().ends_with(" /x"));
    }
    assert_eq!(origin.accepted(), 2);
    let on_host = Scripted::http(&lab.host, (containers[1].host, 8080).into()).unwrap();
    Client::get_once(&containers[1].netns, on_host.address(), "/").unwrap();
}

#[test]
fn origins_answer_over_ipv6() {
    let lab = Lab::new(1).unwrap();
    let _nginx = nginx::origin(&lab, 0).unwrap();
    let address = (lab.origin_ip6(0), 80).into();
    let response = Client::get_once(&lab.host, address, "/128").unwrap();
    assert_eq!(response.body.len(), 128);
}

#[test]
fn a_scripted_reset_is_a_reset() {
    let lab = Lab::new(1).unwrap();
    let origin = Scripted::start(&lab.origins, lab.origin(0), |peer| {
        peer.request()?;
        peer.reset()
    })
    .unwrap();
    let before = lab.origin_counters();
    let mut client = Client::connect(&lab.host, lab.origin(0)).unwrap();
    let error = client.get("/").unwrap_err();
    assert!(format!("{error:#}").contains("reset"), "{error:#}");
    assert_eq!(origin.received_count("GET / "), 1);
    assert_eq!(lab.origin_counters().since(&before).estab_resets(), 1);
}

#[test]
fn nothing_is_left_of_a_lab() {
    let lab = Lab::new(1).unwrap();
    let mut sleeper = lab.client("sleep").arg("1000").spawn().unwrap();
    let directory = lab.directory().to_owned();
    let cgroup = harness::cgroup::mount_point().unwrap().join(&lab.clients_cgroup.path()[1..]);
    eventually(Duration::from_secs(5), "the sleeper is in its cgroup", || {
        std::fs::read_to_string(cgroup.join("cgroup.procs"))
            .is_ok_and(|pids| pids.trim() == sleeper.pid().to_string())
    });
    drop(lab);
    assert!(!directory.exists() && !cgroup.exists());
    sleeper.wait(Duration::from_secs(5)).unwrap();
}
