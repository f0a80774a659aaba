//! The kernel programs by themselves, without a daemon around them.
//!
//! They are attached to the root of the cgroup tree and so meet every connection of the machine,
//! those of other tests included: each test looks only at the addresses of its own lab.

mod counting;
mod interception;

use std::net::{IpAddr, SocketAddr};

use broker::datapath::kernel::{Kernel, Options};
use broker::datapath::{ConnectionCounters, Datapath as _};
use harness::origin::scripted::Scripted;
use harness::{Client, Lab, Netns};

/// Loads the programs as a daemon on the lab's host would.
fn load(lab: &Lab, options: &Options) -> Kernel {
    lab.host.run(|| Kernel::load(options)).unwrap()
}

/// A server that greets each connection with its name, and closes it.
fn greeter(netns: &Netns, address: impl Into<SocketAddr>, name: &'static str) -> Scripted {
    Scripted::start(netns, address.into(), move |peer| peer.send(name)).unwrap()
}

/// Who answers at an address.
fn greeting(netns: &Netns, address: SocketAddr) -> String {
    let bytes = Client::connect(netns, address).unwrap().to_end().unwrap();
    String::from_utf8(bytes).unwrap()
}

/// The same address on an IPv6 socket.
fn mapped(address: SocketAddr) -> SocketAddr {
    let IpAddr::V4(ip) = address.ip() else { panic!("{address} is not an IPv4 address") };
    SocketAddr::new(ip.to_ipv6_mapped().into(), address.port())
}

/// The sum of the counters of remote addresses in the lab's network.
fn counters_of(kernel: &Kernel, lab: &Lab, broker: bool) -> ConnectionCounters {
    let ours = |ip: IpAddr| match (ip, lab.host_ip(), lab.host_ip6()) {
        (IpAddr::V4(ip), IpAddr::V4(host), _) => {
            let network = |ip: std::net::Ipv4Addr| u32::from(ip) >> 10;
            network(ip) == network(host)
        }
        (IpAddr::V6(ip), _, IpAddr::V6(host)) => ip.segments()[..3] == host.segments()[..3],
        _ => false,
    };
    let mut sum = ConnectionCounters::default();
    for endpoint in kernel.counters().unwrap().endpoints {
        if endpoint.broker != broker || !ours(endpoint.remote.ip()) {
            continue;
        }
        let counters = endpoint.counters;
        let (all, these) = (&mut sum.outcomes, counters.outcomes);
        all.attempted += these.attempted;
        all.established += these.established;
        all.refused += these.refused;
        all.timed_out += these.timed_out;
        all.failed_other += these.failed_other;
        all.abandoned += these.abandoned;
        all.closed += these.closed;
        all.reset += these.reset;
        sum.open += counters.open;
        sum.open_peak += counters.open_peak;
        sum.handshake_us_sum += counters.handshake_us_sum;
        sum.handshake_us.extend(counters.handshake_us);
        sum.lifetime_ms.extend(counters.lifetime_ms);
    }
    sum
}
