//! The test network.
//!
//! ```text
//!   container 0 ──┐
//!   container 1 ──┤ host ───────── origins
//!                 │ clients,       N addresses,
//!                 │ the daemon     one namespace
//! ```
//!
//! Origins share one namespace with nobody else in it, so that its PassiveOpens is the number of
//! handshakes that the origins have paid for. Every lab has addresses of its own: several labs may
//! run at once, and a daemon in one must not mistake another's clients for its own.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs};

use anyhow::{Result, ensure};

use crate::cgroup::Cgroup;
use crate::counters::Counters;
use crate::leftovers;
use crate::netns::{Interface, Netns};
use crate::process::Launch;

/// Most origins, and most containers, of one lab.
const MEMBERS_MAX: u8 = 60;

/// A host, its origins and, if asked for, containers on the host.
#[derive(Debug)]
pub struct Lab {
    /// Where clients and the daemon run.
    pub host: Netns,
    /// Where the origins run.
    pub origins: Netns,
    /// The cgroup of clients.
    pub clients_cgroup: Cgroup,
    /// The cgroup of the daemon, or whatever proxy is tried.
    pub proxy_cgroup: Cgroup,
    /// The cgroup of origins.
    pub origins_cgroup: Cgroup,
    // Declared after its children: fields are dropped in this order.
    cgroup: Cgroup,
    directory: tempfile::TempDir,
    network: Network,
    origins_len: u8,
    containers: AtomicU32,
}

/// A container-like network namespace on the host.
#[derive(Debug)]
pub struct Container {
    /// Its namespace.
    pub netns: Netns,
    /// The host's address as seen from inside.
    pub host: IpAddr,
    /// Its own address.
    pub ip: IpAddr,
}

impl Lab {
    /// Makes the network, with `origins` origin addresses.
    pub fn new(origins: u8) -> Result<Self> {
        ensure!(origins <= MEMBERS_MAX, "at most {MEMBERS_MAX} origins");
        let network = Network::unique();
        let host = Netns::new("host")?;
        let inside = Netns::new("origins")?;
        let cgroup = Cgroup::new()?;
        let lab = Self {
            clients_cgroup: cgroup.child("clients")?,
            proxy_cgroup: cgroup.child("proxy")?,
            origins_cgroup: cgroup.child("origins")?,
            cgroup,
            host,
            origins: inside,
            directory: folder()?,
            network,
            origins_len: origins,
            containers: AtomicU32::new(0),
        };
        let theirs: Vec<_> = (0..origins)
            .flat_map(|i| [format!("{}/24", lab.origin_ip(i)), format!("{}/64", lab.origin_ip6(i))])
            .collect();
        lab.host.veth(
            &Interface {
                name: "origins",
                addresses: &[format!("{}/24", lab.host_ip()), format!("{}/64", lab.host_ip6())],
            },
            &lab.origins,
            &Interface { name: "host", addresses: &theirs },
        )?;
        // Containers reach origins through the host.
        lab.origins.ip(&[
            &format!("route add default via {}", lab.host_ip()),
            &format!("route add default via {}", lab.host_ip6()),
        ])?;
        lab.host.sysctl("ipv4.ip_forward", "1")?;
        lab.host.sysctl("ipv6.conf.all.forwarding", "1")?;
        // One client machine stands for many here: let it have more ports than one has.
        lab.host.sysctl("ipv4.ip_local_port_range", "2048 65000")?;
        lab.host.sysctl("ipv4.tcp_tw_reuse", "1")?;
        Ok(lab)
    }

    /// The host's address on the origins' network.
    #[must_use]
    pub fn host_ip(&self) -> IpAddr {
        self.network.v4(0, 1)
    }

    /// The host's IPv6 address on the origins' network.
    #[must_use]
    pub fn host_ip6(&self) -> IpAddr {
        self.network.v6(0, 1)
    }

    /// Address of an origin.
    ///
    /// # Panics
    /// If the lab has fewer.
    #[must_use]
    pub fn origin_ip(&self, index: u8) -> IpAddr {
        assert!(index < self.origins_len, "the lab has {} origins", self.origins_len);
        self.network.v4(0, 10 + index)
    }

    /// IPv6 address of an origin.
    ///
    /// # Panics
    /// If the lab has fewer.
    #[must_use]
    pub fn origin_ip6(&self, index: u8) -> IpAddr {
        assert!(index < self.origins_len, "the lab has {} origins", self.origins_len);
        self.network.v6(0, 10 + index)
    }

    /// Where an origin's server listens.
    #[must_use]
    pub fn origin(&self, index: u8) -> SocketAddr {
        SocketAddr::new(self.origin_ip(index), 80)
    }

    /// Where all the origins' servers listen.
    #[must_use]
    pub fn all_origins(&self) -> Vec<SocketAddr> {
        (0..self.origins_len).map(|i| self.origin(i)).collect()
    }

    /// An address that nobody has, on the origins' network: to be intercepted, or unreachable.
    #[must_use]
    pub fn vip(&self) -> SocketAddr {
        SocketAddr::new(self.network.v4(0, 200), 80)
    }

    /// The IPv4 network in which all the origins are, in CIDR notation.
    #[must_use]
    pub fn origins_cidr(&self) -> String {
        format!("{}/24", self.network.v4(0, 0))
    }

    /// Makes a container-like namespace that reaches the host and, through it, the origins.
    pub fn container(&self) -> Result<Container> {
        let number = self.containers.fetch_add(1, Ordering::Relaxed);
        let number = u8::try_from(number).unwrap_or(u8::MAX);
        ensure!(number < MEMBERS_MAX, "at most {MEMBERS_MAX} containers");
        let (host, inside) =
            (self.network.v4(1, number * 4 + 1), self.network.v4(1, number * 4 + 2));
        let netns = Netns::new("container")?;
        self.host.veth(
            &Interface { name: &format!("c{number}"), addresses: &[format!("{host}/30")] },
            &netns,
            &Interface { name: "eth0", addresses: &[format!("{inside}/30")] },
        )?;
        netns.ip(&[&format!("route add default via {host}")])?;
        Ok(Container { netns, host, ip: inside })
    }

    /// Makes one more cgroup, for a party whose processor time is to be told apart. It must be
    /// dropped before the lab.
    pub fn party(&self, name: &str) -> Result<Cgroup> {
        self.cgroup.child(name)
    }

    /// A folder for configuration files; removed with the lab.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A program in the host's namespace and the clients' cgroup.
    pub fn client(&self, program: &str) -> Launch {
        Launch::new(program).netns(&self.host).cgroup(&self.clients_cgroup)
    }

    /// The kernel's counters of the origins' namespace.
    ///
    /// # Panics
    /// If they cannot be read.
    #[must_use]
    pub fn origin_counters(&self) -> Counters {
        Counters::read(&self.origins).expect("the origins' counters are readable")
    }

    /// The kernel's counters of the host's namespace.
    ///
    /// # Panics
    /// If they cannot be read.
    #[must_use]
    pub fn host_counters(&self) -> Counters {
        Counters::read(&self.host).expect("the host's counters are readable")
    }
}

/// A temporary folder; the first of a process also removes what killed runs have left.
fn folder() -> Result<tempfile::TempDir> {
    static SWEEP: Once = Once::new();
    SWEEP.call_once(|| {
        // Best effort: what cannot be removed now is tried again by the next run.
        leftovers::sweep(&env::temp_dir(), |path| drop(fs::remove_dir_all(path)));
    });
    Ok(tempfile::Builder::new().prefix(&leftovers::prefix()).tempdir()?)
}

/// The four /24 of one lab: `10.x.y.0/22`.
#[derive(Clone, Copy, Debug)]
struct Network {
    x: u8,
    y: u8,
}

impl Network {
    fn unique() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // Neighbouring process ids are far apart, so that labs of parallel runs rarely meet; and
        // if they do, they still are in namespaces of their own.
        let id = std::process::id().wrapping_mul(61).wrapping_add(number);
        let [y, x, ..] = (id << 2).to_le_bytes();
        Self { x, y }
    }

    fn v4(self, subnet: u8, host: u8) -> IpAddr {
        Ipv4Addr::new(10, self.x, self.y + subnet, host).into()
    }

    fn v6(self, subnet: u8, host: u8) -> IpAddr {
        let (x, y) = (u16::from(self.x), u16::from(self.y + subnet));
        Ipv6Addr::new(0xfd00, x, y, 0, 0, 0, 0, u16::from(host)).into()
    }
}
