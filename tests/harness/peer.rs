//! Proxies to compare the broker with. Each is set up as its own documentation recommends for the
//! job: keep-alive on both sides, origin connections shared between clients as freely as it can, no
//! access log, no limit on requests per connection (it would add handshakes that say nothing of the
//! proxy).

pub mod envoy;
pub mod haproxy;
pub mod nginx;

use std::net::SocketAddr;

use crate::cgroup::Cgroup;
use crate::lab::Lab;

/// What a proxy is to do well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// To carry as much as it can.
    Throughput,
    /// To open no more than so many connections to all its origins together, and to have exchanges
    /// wait if it can.
    Limit(usize),
    /// To spare clients the failures of an origin: requests are repeated elsewhere, and origins
    /// that fail are left out.
    Faults,
}

/// A proxy about to be started on the host.
#[derive(Clone, Copy, Debug)]
pub struct Proxy<'a> {
    /// Where it runs.
    pub lab: &'a Lab,
    /// Its cgroup.
    pub cgroup: &'a Cgroup,
    /// Where its clients connect to.
    pub listen: SocketAddr,
    /// Its origins.
    pub origins: &'a [SocketAddr],
    /// Threads or processes that serve.
    pub workers: usize,
    /// What it is set up for.
    pub job: Job,
}

impl Proxy<'_> {
    /// An origin's share of the limit, for proxies that can only limit each origin by itself: all
    /// shares together are the limit.
    fn share(&self, origin: usize) -> Option<usize> {
        let Job::Limit(limit) = self.job else { return None };
        let n = self.origins.len();
        Some(limit / n + usize::from(origin < limit % n))
    }
}
