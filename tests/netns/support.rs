//! What most tests start with: a lab, one scripted origin, and the daemon in front of it.

use std::env;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use harness::daemon::Totals;
use harness::origin::scripted::{Peer, Scripted};
use harness::wait::within;
use harness::{Client, Daemon, Lab, eventually};

/// How long things may take that should happen at once.
pub(crate) const SOON: Duration = Duration::from_secs(5);

/// A daemon with one service. Fields are dropped in this order.
pub(crate) struct Setup {
    pub(crate) daemon: Daemon,
    pub(crate) origin: Scripted,
    pub(crate) lab: Lab,
    pub(crate) listen: SocketAddr,
}

/// The configuration of one service called `web` that listens on the host: one worker and no
/// pre-warming unless told otherwise, so that a test knows which origin connection is used when.
pub(crate) struct Service<'a> {
    /// Keys of the daemon.
    pub(crate) daemon: &'a str,
    /// The service's own keys.
    pub(crate) keys: &'a str,
    /// Keys of its pool.
    pub(crate) pool: &'a str,
    /// Keys of its limits.
    pub(crate) limits: &'a str,
    /// Keys of its retries.
    pub(crate) retries: &'a str,
    /// Keys of its time limits.
    pub(crate) timeouts: &'a str,
    pub(crate) workers: usize,
}

impl Default for Service<'_> {
    fn default() -> Self {
        Self {
            daemon: "",
            keys: "protocol = \"http1\"",
            pool: "prewarm = 0",
            limits: "",
            retries: "",
            timeouts: "",
            workers: 1,
        }
    }
}

/// Names how the clients of services that can be steered are to be: the same tests then run
/// through interception and the kernel.
const STEER: &str = "BROKER_TEST_STEER";

impl Service<'_> {
    pub(crate) fn render(&self, lab: &Lab) -> String {
        let Self { daemon, keys, pool, limits, retries, timeouts, workers } = self;
        let steerable = keys.contains("http1") && !keys.contains("affinity");
        let clients = match env::var(STEER) {
            Ok(steer) if steerable => {
                format!("intercept = [\"{}\"]\nsteer = {steer:?}", listen(lab))
            }
            _ => format!("listen = [\"{}\"]", listen(lab)),
        };
        format!(
            "{daemon}\nworkers = {workers}\n[[service]]\nname = \"web\"\n{clients}\norigins = {}\n\
             {keys}\n[service.pool]\n{pool}\n[service.limits]\n{limits}\n[service.retries]\n{retries}\n\
             [service.timeouts]\n{timeouts}\n",
            addresses(&lab.all_origins())
        )
    }

    /// Starts it in front of one scripted origin.
    pub(crate) fn start(
        &self,
        script: impl Fn(&mut Peer) -> io::Result<()> + Send + Sync + 'static,
    ) -> Setup {
        let lab = Lab::new(1).unwrap();
        let origin = Scripted::start(&lab.origins, lab.origin(0), script).unwrap();
        let daemon = Daemon::start(&lab, &self.render(&lab)).unwrap();
        Setup { daemon, origin, listen: listen(&lab), lab }
    }
}

/// Where the service listens.
pub(crate) fn listen(lab: &Lab) -> SocketAddr {
    SocketAddr::new(lab.host_ip(), 8080)
}

/// Where clients come in that are to be served this way (`relay`, or a word for `steer`), and what a
/// service says for it.
pub(crate) fn way_in(lab: &Lab, way: &str) -> (SocketAddr, String) {
    match way {
        "relay" => (listen(lab), format!("listen = [\"{}\"]", listen(lab))),
        _ => (lab.vip(), format!("intercept = [\"{}\"]\nsteer = {way:?}", lab.vip())),
    }
}

/// Addresses as a TOML array.
pub(crate) fn addresses(addresses: &[SocketAddr]) -> String {
    format!("{:?}", addresses.iter().map(ToString::to_string).collect::<Vec<_>>())
}

impl Setup {
    /// An http1 service in front of a scripted origin.
    pub(crate) fn http(
        script: impl Fn(&mut Peer) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        Service::default().start(script)
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.lab.host, self.listen).unwrap()
    }

    /// A GET on a connection of its own: the body, which by custom begins with the number of the
    /// origin connection.
    #[track_caller]
    pub(crate) fn get(&self, target: &str) -> String {
        let response = Client::get_once(&self.lab.host, self.listen, target).unwrap();
        assert_eq!(response.status, 200, "{}", response.head);
        response.text()
    }

    /// The number of the origin connection that serves an innocent client now.
    #[track_caller]
    pub(crate) fn serving(&self) -> usize {
        let text = self.get("/probe");
        let (index, target) = text.split_once(' ').unwrap();
        assert_eq!(target, "/probe", "somebody else's response");
        index.parse().unwrap()
    }

    /// Waits until no origin socket is leased.
    #[track_caller]
    pub(crate) fn settled(&self) -> Totals {
        eventually(SOON, "all leases have ended", || {
            self.daemon.totals().is_ok_and(|totals| totals.active == 0)
        });
        self.daemon.totals().unwrap()
    }

    /// Waits until the pool holds `n` idle sockets and no lease.
    #[track_caller]
    pub(crate) fn idle(&self, n: u64) {
        let reached = within(SOON, || {
            self.daemon.totals().is_ok_and(|totals| totals.active == 0 && totals.idle == n)
        });
        assert!(reached, "{n} idle sockets: {:?}", self.daemon.totals());
    }
}
