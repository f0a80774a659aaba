//! The programs' counters against the kernel's own.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::time::Duration;

use broker::datapath::Datapath as _;
use broker::datapath::kernel::Options;
use harness::origin::scripted::Scripted;
use harness::{Client, Lab, Netns, eventually};
use socket2::{Domain, Socket, Type};

use super::{counters_of, greeter, greeting, load, mapped};

fn refused(netns: &Netns, address: SocketAddr) {
    let error = netns.run(|| TcpStream::connect(address)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
}

/// Begins to connect, and does not wait for the end.
fn begin(netns: &Netns, address: SocketAddr) -> Socket {
    netns.run(|| {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        // EINPROGRESS.
        socket.connect(&address.into()).unwrap_err();
        socket
    })
}

/// An address on the lab's network that swallows whatever is sent to it.
fn black_hole(lab: &Lab) -> SocketAddr {
    let address = lab.vip();
    lab.host.sysctl("ipv4.tcp_syn_retries", "1").unwrap();
    lab.host
        .ip(&[&format!("neigh add {} lladdr 02:00:00:00:00:99 dev origins", address.ip())])
        .unwrap();
    address
}

/// An address beyond the origins, who answer that it cannot be reached.
fn unreachable(lab: &Lab) -> SocketAddr {
    let IpAddr::V4(host) = lab.host_ip() else { unreachable!("the lab has IPv4") };
    let [a, b, c, _] = host.octets();
    let network = format!("{a}.{b}.{}.0/24", c + 2);
    lab.origins.sysctl("ipv4.ip_forward", "1").unwrap();
    lab.origins.ip(&[&format!("route add unreachable {network}")]).unwrap();
    lab.host.ip(&[&format!("route add {network} via {}", lab.origin_ip(0))]).unwrap();
    SocketAddr::from(([a, b, c + 2, 1], 80))
}

#[test]
fn every_outcome_is_counted_as_the_kernel_counts_it() {
    let lab = Lab::new(1).unwrap();
    let kernel = load(&lab, &Options::default());
    let before = lab.host_counters();
    let v6 = SocketAddr::new(lab.origin_ip6(0), 80);
    let with_port = |port| SocketAddr::new(lab.origin_ip(0), port);

    let _v4 = Scripted::echo(&lab.origins, lab.origin(0)).unwrap();
    let _v6 = Scripted::echo(&lab.origins, v6).unwrap();
    let _closing = greeter(&lab.origins, with_port(81), "bye");
    let _resetting = Scripted::start(&lab.origins, with_port(82), |peer| {
        peer.read_some()?;
        peer.reset()
    })
    .unwrap();

    let connect = |address| Client::connect(&lab.host, address).unwrap();
    let mut held: Vec<_> = (0..10).map(|_| connect(lab.origin(0))).collect();
    held.extend((0..7).map(|_| connect(v6)));
    held.extend((0..3).map(|_| connect(mapped(lab.origin(0)))));
    for _ in 0..9 {
        assert_eq!(greeting(&lab.host, with_port(81)), "bye");
    }
    for _ in 0..6 {
        let mut client = connect(with_port(82));
        client.send("x").unwrap();
        client.to_end().unwrap_err();
    }
    for _ in 0..5 {
        refused(&lab.host, with_port(83));
        refused(&lab.host, SocketAddr::new(v6.ip(), 83));
    }
    let hole = black_hole(&lab);
    let timing_out: Vec<_> = (0..4).map(|_| begin(&lab.host, hole)).collect();
    drop((0..3).map(|_| begin(&lab.host, hole)).collect::<Vec<_>>());
    let far = unreachable(&lab);
    let failing: Vec<_> = (0..2).map(|_| begin(&lab.host, far)).collect();

    eventually(Duration::from_secs(20), "all attempts have ended", || {
        let counters = counters_of(&kernel, &lab, false);
        counters.outcomes.timed_out == 4 && counters.outcomes.failed_other == 2
    });
    let counters = counters_of(&kernel, &lab, false);
    assert_eq!((counters.outcomes.attempted, counters.outcomes.established), (54, 35));
    assert_eq!((counters.outcomes.refused, counters.outcomes.abandoned), (10, 3));
    assert_eq!((counters.open, counters.outcomes.closed, counters.outcomes.reset), (20, 15, 6));
    let kernels = lab.host_counters().since(&before);
    assert_eq!(i64::try_from(counters.outcomes.attempted), Ok(kernels.active_opens()));
    // What an application gives up is no failure to the kernel.
    assert_eq!(
        i64::try_from(counters.outcomes.established + counters.outcomes.abandoned),
        Ok(kernels.active_opens() - kernels.attempt_fails())
    );

    drop((held, timing_out, failing));
    eventually(Duration::from_secs(5), "all connections are closed", || {
        let counters = counters_of(&kernel, &lab, false);
        (counters.open, counters.outcomes.closed, counters.outcomes.reset) == (0, 35, 6)
    });
    let counters = counters_of(&kernel, &lab, false);
    assert_eq!(counters.handshake_us.iter().sum::<u64>(), 35);
    assert_eq!(counters.lifetime_ms.iter().sum::<u64>(), 35);
    assert!(counters.open_peak >= 20 && counters.handshake_us_sum > 0, "{counters:?}");
}

#[test]
fn a_socket_may_fail_and_connect_again() {
    let lab = Lab::new(1).unwrap();
    let kernel = load(&lab, &Options::default());
    let _echo = Scripted::echo(&lab.origins, lab.origin(0)).unwrap();
    let socket = lab.host.run(|| Socket::new(Domain::IPV4, Type::STREAM, None)).unwrap();
    for _ in 0..3 {
        socket.connect(&SocketAddr::new(lab.origin_ip(0), 83).into()).unwrap_err();
    }
    socket.connect(&lab.origin(0).into()).unwrap();
    let counters = counters_of(&kernel, &lab, false);
    assert_eq!((counters.outcomes.attempted, counters.outcomes.refused, counters.open), (4, 3, 1));
}

#[test]
fn the_brokers_own_connections_are_told_apart() {
    let lab = Lab::new(1).unwrap();
    let kernel = load(&lab, &Options::default());
    let _echo = Scripted::echo(&lab.origins, lab.origin(0)).unwrap();
    let own = lab.host.run(|| Socket::new(Domain::IPV4, Type::STREAM, None)).unwrap();
    kernel.own(own.as_fd()).unwrap();
    own.connect(&lab.origin(0).into()).unwrap();
    let _other = Client::connect(&lab.host, lab.origin(0)).unwrap();
    for broker in [true, false] {
        let counters = counters_of(&kernel, &lab, broker);
        assert_eq!((counters.outcomes.attempted, counters.open), (1, 1), "broker: {broker}");
    }
    let total = kernel.counters().unwrap().totals_broker;
    assert_eq!((total.attempted, total.established, total.closed), (1, 1, 0));
    drop(own);
    eventually(Duration::from_secs(5), "it is closed", || {
        counters_of(&kernel, &lab, true).outcomes.closed == 1
    });
}

#[test]
fn ways_are_watched_for_the_brokers_own_connections_only() {
    let lab = Lab::new(2).unwrap();
    let kernel = load(&lab, &Options::default());
    let _echoes = [0, 1].map(|i| Scripted::echo(&lab.origins, lab.origin(i)).unwrap());
    let own = lab.host.run(|| Socket::new(Domain::IPV4, Type::STREAM, None)).unwrap();
    kernel.own(own.as_fd()).unwrap();
    own.connect(&lab.origin(0).into()).unwrap();
    let mut own: TcpStream = own.into();
    let mut other = Client::connect(&lab.host, lab.origin(1)).unwrap();
    for _ in 0..21 {
        own.write_all(b"x").unwrap();
        own.read_exact(&mut [0]).unwrap();
        other.send("x").unwrap();
        other.take(1).unwrap();
    }
    assert!(kernel.path(lab.origin(1)).is_none());
    let path = kernel.path(lab.origin(0)).unwrap();
    let (rtts, _) = broker::origin::outlier::median(&path.rtt_us);
    // The last one may be acknowledged with its answer, or later.
    assert!((16..=21).contains(&path.segments) && (4..=5).contains(&rtts), "{path:?}");
    assert_eq!(path.retransmitted, 0, "{path:?}");
    drop(own);
    eventually(Duration::from_secs(5), "the end brings the rest", || {
        kernel.path(lab.origin(0)).unwrap().segments == 21
    });
}

#[test]
fn two_agents_on_the_same_cgroup_both_count() {
    let lab = Lab::new(1).unwrap();
    let _greeter = greeter(&lab.origins, lab.origin(0), "hello");
    let first = load(&lab, &Options::default());
    let second = load(&lab, &Options::default());
    for _ in 0..20 {
        greeting(&lab.host, lab.origin(0));
    }
    refused(&lab.host, SocketAddr::new(lab.origin_ip(0), 83));
    for agent in [&first, &second] {
        eventually(Duration::from_secs(5), "all are counted", || {
            let counters = counters_of(agent, &lab, false);
            (counters.outcomes.attempted, counters.outcomes.closed, counters.outcomes.refused)
                == (21, 20, 1)
        });
    }
    // One leaves, the other stays.
    drop(first);
    greeting(&lab.host, lab.origin(0));
    assert_eq!(counters_of(&second, &lab, false).outcomes.established, 21);
}

#[test]
fn what_finds_no_place_is_told_and_counted_as_attempted() {
    let lab = Lab::new(1).unwrap();
    let kernel = load(&lab, &Options { connections_max: 2, ..Options::default() });
    let _echo = Scripted::echo(&lab.origins, lab.origin(0)).unwrap();
    let held: Vec<_> = (0..5).map(|_| Client::connect(&lab.host, lab.origin(0)).unwrap()).collect();
    // Other tests' connections may have the places.
    let counters = kernel.counters().unwrap();
    let here = counters_of(&kernel, &lab, false);
    assert!(here.outcomes.attempted <= 2 && counters.not_followed >= 3, "{counters:?}");
    assert_eq!(here.open, here.outcomes.established);
    assert!(counters.totals_others.attempted >= 5, "{counters:?}");
    drop(held);
    eventually(Duration::from_secs(5), "places are given back", || {
        let before = counters_of(&kernel, &lab, false).outcomes.established;
        drop(Client::connect(&lab.host, lab.origin(0)).unwrap());
        counters_of(&kernel, &lab, false).outcomes.established == before + 1
    });
}

#[test]
fn evicted_endpoints_are_told_and_nothing_goes_below_zero() {
    let lab = Lab::new(1).unwrap();
    let options = Options { endpoints_max: 64, ..Options::default() };
    let kernel = load(&lab, &options);
    let _echo = Scripted::echo(&lab.origins, lab.origin(0)).unwrap();
    let held: Vec<_> = (0..3).map(|_| Client::connect(&lab.host, lab.origin(0)).unwrap()).collect();
    for port in 2000..2500 {
        refused(&lab.host, SocketAddr::new(lab.origin_ip(0), port));
    }
    drop(held);
    let again = Client::connect(&lab.host, lab.origin(0)).unwrap();

    let counters = kernel.counters().unwrap();
    assert!(counters.endpoints.len() <= 64, "{}", counters.endpoints.len());
    assert!(counters.endpoints_evicted >= 501 - 64, "{}", counters.endpoints_evicted);
    assert!(counters.totals_others.attempted >= 504, "totals forget nothing");
    assert!(counters.totals_others.refused >= 500);
    for endpoint in counters.endpoints {
        let counters = endpoint.counters;
        assert!(
            counters.open <= counters.outcomes.established,
            "{}: {counters:?}",
            endpoint.remote
        );
        assert!(
            counters.outcomes.closed <= counters.outcomes.established,
            "{}: {counters:?}",
            endpoint.remote
        );
    }
    drop(again);
}
