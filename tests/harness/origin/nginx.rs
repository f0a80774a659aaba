//! nginx, as an origin.

use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;

use anyhow::Result;

use crate::lab::Lab;
use crate::origin::listening;
use crate::process::{Launch, Process};

/// Files that every origin serves: path and length. Responses also carry the request's
/// `X-Request-Id` back.
pub const FILES: [(&str, u64); 3] = [("/128", 128), ("/64k", 64 << 10), ("/1m", 1 << 20)];

/// Starts an nginx origin that answers
/// - `/echo` with the request's `X-Request-Id` and a new line, made in memory,
/// - [`FILES`] from the file system, by `sendfile` with `tcp_nopush` as most installations do.
pub fn origin(lab: &Lab, index: u8) -> Result<Process> {
    origin_at(lab, &[lab.origin(index), SocketAddr::new(lab.origin_ip6(index), 80)], "")
}

/// Starts an nginx origin with listeners of the caller's choice and additional directives for its
/// `server` block.
pub fn origin_at(lab: &Lab, listen: &[SocketAddr], directives: &str) -> Result<Process> {
    let root = lab.directory().join("files");
    fs::create_dir_all(&root)?;
    for (path, length) in FILES {
        let file = root.join(&path[1..]);
        if !file.exists() {
            let length = usize::try_from(length)?;
            fs::write(file, b"0123456789abcdef".repeat(length / 16))?;
        }
    }
    let mut listeners = String::new();
    for address in listen {
        write!(listeners, "listen {address} backlog=4096; ")?;
    }
    // One process and no master: killing it ends the origin at once, as a power failure would.
    // The limits on requests and time per connection are off, for they would add handshakes that
    // are the origin's choice, not the client's.
    let http = format!(
        "sendfile on; tcp_nopush on; tcp_nodelay on; \
         keepalive_requests 1000000000; keepalive_timeout 3600s; keepalive_time 24h; \
         server {{ {listeners} root {root}; {directives} \
         add_header X-Request-Id $http_x_request_id always; \
         location = /echo {{ return 200 \"$http_x_request_id\\n\"; }} \
         }}",
        root = root.display()
    );
    let mut server = start(lab, "master_process off;", &http, |nginx| {
        nginx.netns(&lab.origins).cgroup(&lab.origins_cgroup)
    })?;
    listening(&lab.origins, listen[0], &mut server)?;
    Ok(server)
}

/// Starts nginx with directives for its processes and its `http` block.
pub(crate) fn start(
    lab: &Lab,
    processes: &str,
    http: &str,
    place: impl FnOnce(Launch) -> Launch,
) -> Result<Process> {
    let directory = tempfile::Builder::new().prefix("nginx-").tempdir_in(lab.directory())?.keep();
    let here = directory.display();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|kind| format!("{kind}_temp_path {here}/{kind};"))
        .concat();
    let config = format!(
        "user root; daemon off; {processes} pid {here}/pid; error_log stderr warn; \
         worker_rlimit_nofile 16384; events {{ worker_connections 8192; }} \
         http {{ access_log off; server_tokens off; {temporary} {http} }}\n"
    );
    let file = directory.join("nginx.conf");
    fs::write(&file, config)?;
    let nginx =
        Launch::new("nginx").arg("-p").arg(&directory).arg("-e").arg("stderr").arg("-c").arg(&file);
    place(nginx).spawn()
}
