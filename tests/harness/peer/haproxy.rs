//! `HAProxy`.

use std::fmt::Write as _;
use std::fs;

use anyhow::Result;

use super::{Job, Proxy};
use crate::origin::listening;
use crate::process::{Launch, Process};

/// Starts it with `http-reuse always`, which is as freely as it shares connections.
pub fn start(proxy: &Proxy<'_>) -> Result<Process> {
    let Proxy { lab, cgroup, listen, workers, .. } = *proxy;
    let (mut defaults, mut each) = (String::new(), String::new());
    match proxy.job {
        // By default it closes half of the unused connections every 5 s; a pool that shrinks
        // under its peers' eyes would be handed a disadvantage.
        Job::Throughput => each.push_str("pool-max-conn -1 pool-purge-delay 1h"),
        Job::Limit(_) => defaults.push_str("  timeout queue 30s\n"),
        // The health check's interval is a quarter of the default.
        Job::Faults => {
            defaults.push_str(
                "  option redispatch
  retries 3
  retry-on conn-failure empty-response
  option httpchk GET /echo
  timeout check 500ms
",
            );
            each.push_str(
                "check inter 500ms fall 2 rise 2 observe layer7 error-limit 5 on-error mark-down",
            );
        }
    }
    let mut servers = String::new();
    for (i, origin) in proxy.origins.iter().enumerate() {
        write!(servers, "  server s{i} {origin} {each}")?;
        if let Some(share) = proxy.share(i) {
            write!(servers, "maxconn {share}")?;
        }
        servers.push('\n');
    }
    let config = format!(
        "global
  nbthread {workers}
  maxconn 8192
  tune.idle-pool.shared on
defaults
  mode http
  option http-keep-alive
  http-reuse always
  balance leastconn
  timeout client 1h
  timeout server 1h
  timeout connect 5s
  timeout http-keep-alive 1h
{defaults}frontend f
  bind {listen} backlog 4096
  default_backend b
backend b
{servers}"
    );
    let file = lab.directory().join(format!("haproxy-{}.cfg", listen.port()));
    fs::write(&file, config)?;
    let mut server = Launch::new("haproxy")
        .arg("-db")
        .arg("-f")
        .arg(&file)
        .netns(&lab.host)
        .cgroup(cgroup)
        .spawn()?;
    listening(&lab.host, listen, &mut server)?;
    Ok(server)
}
