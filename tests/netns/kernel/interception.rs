//! Which connections are sent to the broker, and what their clients notice of it.

use std::io::Read as _;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use broker::clock;
use broker::config::{Intercept, Steer};
use broker::datapath::kernel::{self, InterceptOptions, Kernel, Options};
use broker::datapath::{Datapath as _, InterceptedService, ListenerSet, WorkerListeners};
use harness::origin::scripted::Scripted;
use harness::{Cgroup, Client, Lab, eventually};
use socket2::{Domain, Socket, Type};

use super::{greeter, greeting, load, mapped};

const WORKERS: usize = 2;

/// A host with an origin, and a stand-in for the broker.
struct Scene {
    lab: Lab,
    kernel: Kernel,
    _origins: [Scripted; 2],
    broker_v4: Scripted,
    broker_v6: Scripted,
}

impl Scene {
    fn new() -> Self {
        // Long enough that one heartbeat does for the whole test.
        Self::with_heartbeat_age_max(Duration::from_mins(1))
    }

    fn with_heartbeat_age_max(heartbeat_age_max: Duration) -> Self {
        let lab = Lab::new(1).unwrap();
        let intercept = InterceptOptions { workers: WORKERS, heartbeat_age_max, steer: None };
        let kernel = load(&lab, &Options { intercept: Some(intercept), ..Options::default() });
        let scene = Self {
            _origins: [
                greeter(&lab.origins, lab.origin(0), "origin"),
                greeter(&lab.origins, (lab.origin_ip6(0), 80), "origin"),
            ],
            broker_v4: greeter(&lab.host, (Ipv4Addr::LOCALHOST, 0), "broker"),
            broker_v6: greeter(&lab.host, (Ipv6Addr::LOCALHOST, 0), "broker"),
            kernel,
            lab,
        };
        scene.beat();
        scene
    }

    fn beat(&self) {
        for worker in 0..WORKERS {
            self.kernel.heartbeat(worker).unwrap();
        }
    }

    fn v6(&self) -> SocketAddr {
        (self.lab.origin_ip6(0), 80).into()
    }

    /// A service with both of the origin's addresses.
    fn service(&self) -> InterceptedService {
        let target = |ip: std::net::IpAddr| Intercept { net: ip.into(), port: 80 };
        let relayed = ListenerSet {
            loopback_v4: self.broker_v4.address().port(),
            loopback_v6: self.broker_v6.address().port(),
            netns: None,
        };
        let listeners = WorkerListeners { relayed, ..WorkerListeners::default() };
        InterceptedService {
            service: 0,
            targets: vec![target(self.lab.origin_ip(0)), target(self.lab.origin_ip6(0))],
            cgroups: None,
            high: None,
            keep_destination: true,
            steer: Steer::Relay,
            gate: None,
            listeners: vec![listeners; WORKERS],
        }
    }

    fn intercept(&self, services: &[InterceptedService]) {
        self.kernel.intercept(services).unwrap();
    }

    fn greeting(&self, address: SocketAddr) -> String {
        greeting(&self.lab.host, address)
    }
}

/// A service whose listener nobody has opened.
fn dead(service: InterceptedService) -> InterceptedService {
    let relayed = ListenerSet { loopback_v4: 1, loopback_v6: 1, netns: None };
    let listeners = WorkerListeners { relayed, ..WorkerListeners::default() };
    InterceptedService { listeners: vec![listeners; WORKERS], ..service }
}

#[test]
fn clients_reach_the_broker_and_see_what_they_dialled() {
    let scene = Scene::new();
    let v4 = scene.lab.origin(0);
    assert_eq!(scene.greeting(v4), "origin");
    scene.intercept(&[scene.service()]);
    for (dialled, listener) in [
        (v4, scene.broker_v4.address()),
        (mapped(v4), scene.broker_v4.address()),
        (scene.v6(), scene.broker_v6.address()),
    ] {
        let mut client = Client::connect(&scene.lab.host, dialled).unwrap();
        assert_eq!(client.to_end().unwrap(), b"broker", "{dialled}");
        assert_eq!(client.peer().unwrap(), dialled);
        // The broker may see the client's address in either form.
        let me = client.stream().local_addr().unwrap();
        let found = scene.kernel.original_destination(me, listener).unwrap().unwrap();
        assert_eq!(found.address.ip(), dialled.ip().to_canonical());
        assert_eq!(found.address.port(), 80);
        drop(client);
        eventually(Duration::from_secs(5), "the destination is forgotten", || {
            scene.kernel.original_destination(me, listener).unwrap().is_none()
        });
    }
    assert_eq!(scene.kernel.counters().unwrap().intercept.rewritten, 3);
    scene.intercept(&[]);
    assert_eq!(scene.greeting(v4), "origin");
}

#[test]
fn what_is_not_meant_is_left_alone() {
    let scene = Scene::new();
    scene.intercept(&[scene.service()]);
    let v4 = scene.lab.origin(0);

    let elsewhere = SocketAddr::new(v4.ip(), 81);
    let _other_port = greeter(&scene.lab.origins, elsewhere, "other port");
    assert_eq!(scene.greeting(elsewhere), "other port");

    let own = scene.lab.host.run(|| Socket::new(Domain::IPV4, Type::STREAM, None)).unwrap();
    scene.kernel.own(own.as_fd()).unwrap();
    own.connect(&v4.into()).unwrap();
    let mut greeting = String::new();
    (&own).read_to_string(&mut greeting).unwrap();
    assert_eq!(greeting, "origin", "the broker itself reaches its origins");

    let udp = scene.lab.host.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
    udp.connect(v4).unwrap();
    assert_eq!(udp.peer_addr().unwrap(), v4);

    let bound = scene.lab.host.run(|| Socket::new(Domain::IPV4, Type::STREAM, None)).unwrap();
    bound.bind_device(Some(b"origins")).unwrap();
    bound.connect(&v4.into()).unwrap();
    assert_eq!(scene.kernel.counters().unwrap().intercept.bound_to_device, 1);

    let mut no_v6 = scene.service();
    for listeners in &mut no_v6.listeners {
        listeners.relayed.loopback_v6 = 0;
    }
    scene.intercept(&[no_v6]);
    assert_eq!(scene.greeting(scene.v6()), "origin");
    assert_eq!(scene.greeting(v4), "broker");
    assert_eq!(scene.kernel.counters().unwrap().intercept.no_listener, 1);
}

#[test]
fn a_socket_may_fail_and_dial_again() {
    let scene = Scene::new();
    let v4 = scene.lab.origin(0);
    let read = |socket: &Socket| {
        let mut greeting = String::new();
        let mut reader = socket;
        reader.read_to_string(&mut greeting).unwrap();
        greeting
    };
    let failed = || {
        scene.intercept(&[dead(scene.service())]);
        let socket = scene.lab.host.run(|| Socket::new(Domain::IPV4, Type::STREAM, None)).unwrap();
        socket.connect(&v4.into()).unwrap_err();
        socket
    };

    let again = failed();
    scene.intercept(&[scene.service()]);
    again.connect(&v4.into()).unwrap();
    assert_eq!(read(&again), "broker");
    assert_eq!(again.peer_addr().unwrap().as_socket(), Some(v4));

    let direct = failed();
    scene.intercept(&[]);
    direct.connect(&v4.into()).unwrap();
    assert_eq!(read(&direct), "origin");
    assert_eq!(direct.peer_addr().unwrap().as_socket(), Some(v4));

    // What an earlier attempt has left behind must not colour this one.
    let listener = failed();
    listener.connect(&scene.broker_v4.address().into()).unwrap();
    assert_eq!(listener.peer_addr().unwrap().as_socket(), Some(scene.broker_v4.address()));
}

#[test]
fn a_service_can_be_limited_to_cgroups() {
    let scene = Scene::new();
    let lab = &scene.lab;
    let mount = kernel::mount_point().unwrap();
    let id =
        |cgroup: &Cgroup| kernel::cgroup_id(&mount, Path::new(cgroup.path())).unwrap().unwrap();
    let both = vec![id(&lab.origins_cgroup), id(&lab.clients_cgroup)];
    let deeper = lab.clients_cgroup.child("deeper").unwrap();
    scene.intercept(&[InterceptedService { cgroups: Some(both), ..scene.service() }]);

    let curl = |cgroup| {
        harness::Launch::new("curl")
            .args(["-sS", "--http0.9", "--max-time", "5", &format!("http://{}/", lab.origin(0))])
            .netns(&lab.host)
            .cgroup(cgroup)
            .output(Duration::from_secs(10))
            .unwrap()
            .success()
            .unwrap()
    };
    assert_eq!(curl(&lab.clients_cgroup), "broker");
    assert_eq!(curl(&deeper), "broker");
    assert_eq!(curl(&lab.proxy_cgroup), "origin");
    assert_eq!(scene.greeting(lab.origin(0)), "origin");
    assert_eq!(scene.kernel.counters().unwrap().intercept.other_cgroup, 2);

    scene.intercept(&[InterceptedService { cgroups: Some(Vec::new()), ..scene.service() }]);
    assert_eq!(curl(&lab.clients_cgroup), "origin", "none of them is there, so it is for nobody");
    scene.intercept(&[scene.service()]);
    assert_eq!(curl(&lab.proxy_cgroup), "broker");
}

#[test]
fn clients_in_other_namespaces_need_an_address_that_they_can_reach() {
    let scene = Scene::new();
    let v4 = scene.lab.origin(0);
    let container = scene.lab.container().unwrap();
    scene.intercept(&[scene.service()]);
    assert_eq!(greeting(&container.netns, v4), "origin");
    assert_eq!(scene.kernel.counters().unwrap().intercept.other_netns, 1);

    let reachable = greeter(&scene.lab.host, (container.host, 0), "broker");
    let mut service = scene.service();
    for listeners in &mut service.listeners {
        listeners.relayed.netns = Some(reachable.address());
    }
    scene.intercept(&[service]);
    for dialled in [v4, mapped(v4)] {
        let mut client = Client::connect(&container.netns, dialled).unwrap();
        assert_eq!(client.to_end().unwrap(), b"broker");
        assert_eq!(client.peer().unwrap(), dialled);
        let me = client.stream().local_addr().unwrap();
        let found = scene.kernel.original_destination(me, reachable.address()).unwrap();
        assert_eq!(found.map(|found| found.address), Some(v4));
    }
    assert_eq!(scene.greeting(v4), "broker");
}

#[test]
fn without_a_heartbeat_clients_go_direct() {
    let scene = Scene::with_heartbeat_age_max(Duration::from_millis(500));
    let v4 = scene.lab.origin(0);
    scene.intercept(&[scene.service()]);
    eventually(Duration::from_secs(5), "the heartbeats are stale", || {
        scene.greeting(v4) == "origin"
    });
    assert!(scene.kernel.counters().unwrap().intercept.stale_heartbeat >= 1);
    // One live worker takes them all, whatever CPU the client is on.
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                scene.kernel.heartbeat(1).unwrap();
                thread::sleep(Duration::from_millis(20));
            }
        });
        eventually(Duration::from_secs(5), "a worker is back", || scene.greeting(v4) == "broker");
        for _ in 0..20 {
            assert_eq!(scene.greeting(v4), "broker");
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn replacing_services_never_sends_a_client_astray() {
    let scene = Scene::new();
    let v4 = scene.lab.origin(0);
    // It takes the place that the other service has without it.
    let intruder = InterceptedService {
        targets: vec![Intercept { net: scene.lab.vip().ip().into(), port: 80 }],
        ..dead(scene.service())
    };
    scene.intercept(&[scene.service()]);
    let (stop, greeted) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(scene.greeting(v4), "broker");
                greeted.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut replaced = 0;
        let end = clock::now() + Duration::from_secs(20);
        while replaced < 200 || greeted.load(Ordering::Relaxed) < 20 && clock::now() < end {
            scene.intercept(&[intruder.clone(), scene.service()]);
            scene.intercept(&[scene.service()]);
            replaced += 1;
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(greeted.into_inner() >= 20);
}

#[test]
fn when_the_programs_go_clients_go_direct() {
    let scene = Scene::new();
    scene.intercept(&[scene.service()]);
    let v4 = scene.lab.origin(0);
    assert_eq!(scene.greeting(v4), "broker");
    let Scene { kernel, lab, _origins, broker_v4: _broker, .. } = scene;
    drop(kernel);
    // A child that another test is about to start may still hold copies of the descriptors.
    eventually(Duration::from_secs(5), "clients go direct", || greeting(&lab.host, v4) == "origin");
}
