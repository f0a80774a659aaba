//! nginx, as a reverse proxy.

use std::fmt::Write as _;

use anyhow::Result;
use nix::sys::signal::Signal;

use super::{Job, Proxy};
use crate::origin::{listening, nginx};
use crate::process::Process;

/// Starts it with upstream keep-alive.
pub fn start(proxy: &Proxy<'_>) -> Result<Process> {
    let Proxy { lab, cgroup, listen, workers, .. } = *proxy;
    // What all workers must know of an origin is in a zone.
    let (shared, keepalive, each, retry) = match proxy.job {
        Job::Throughput => ("", 64, "", ""),
        // More idle connections for each worker than there may be at all would be no limit.
        Job::Limit(limit) => ("zone origins 256k;", limit, "", ""),
        Job::Faults => (
            "zone origins 256k; least_conn;",
            64,
            "max_fails=1 fail_timeout=10s",
            "proxy_next_upstream error timeout http_500 http_502 http_503 http_504;",
        ),
    };
    let mut servers = String::new();
    for (i, origin) in proxy.origins.iter().enumerate() {
        let limit = proxy.share(i).map(|share| format!("max_conns={share}")).unwrap_or_default();
        write!(servers, "server {origin} {each} {limit}; ")?;
    }
    let http = format!(
        "tcp_nodelay on; keepalive_requests 1000000000; keepalive_timeout 3600s; \
         upstream origins {{ {shared} {servers} keepalive {keepalive}; \
         keepalive_requests 1000000000; keepalive_timeout 3600s; }} \
         server {{ listen {listen} backlog=4096 reuseport; location / {{ \
         proxy_pass http://origins; proxy_http_version 1.1; proxy_set_header Connection \"\"; \
         {retry} }} }}"
    );
    let mut server = nginx::start(lab, &format!("worker_processes {workers};"), &http, |nginx| {
        // The master takes its workers along.
        nginx.netns(&lab.host).cgroup(cgroup).death_signal(Signal::SIGTERM)
    })?;
    listening(&lab.host, listen, &mut server)?;
    Ok(server)
}
