//! `HAProxy`, a proxy to compare with.

use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;

use anyhow::Result;

use crate::cgroup::Cgroup;
use crate::lab::Lab;
use crate::origin::listening;
use crate::process::{Launch, Process};

/// Starts `HAProxy` in front of `origins`: origin connections are kept and shared between clients
/// as freely as it can (`http-reuse always`), two threads for two cores, no log.
pub fn proxy(
    lab: &Lab,
    cgroup: &Cgroup,
    listen: SocketAddr,
    origins: &[SocketAddr],
) -> Result<Process> {
    let mut servers = String::new();
    for (i, origin) in origins.iter().enumerate() {
        // By default it closes half of the unused connections every 5 s; a pool that shrinks
        // under its peers' eyes would be handed a disadvantage.
        writeln!(servers, "  server s{i} {origin} pool-max-conn -1 pool-purge-delay 1h")?;
    }
    let config = format!(
        "global
  nbthread 2
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
frontend f
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
