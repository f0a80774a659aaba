//! How the host is set up.

use std::fs;
use std::path::Path;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::{Check, Part, check};
use crate::datapath::kernel;

/// Descriptors that a busy broker may need: two for each client.
const OPEN_FILES: u64 = 65_536;

/// Connections of steered clients wait in the accept queue, most of them for all of their life.
const ACCEPT_QUEUE: u64 = 1024;

/// Local ports that connections to origins and to the broker's own listeners are made from.
const LOCAL_PORTS: u64 = 10_000;

/// The oldest kernel that the programs are written for.
const OLDEST: (u32, u32) = (5, 14);

pub(super) fn checks() -> Vec<Check> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let open_files = getrlimit(Resource::RLIMIT_NOFILE).map(|(_, hard)| hard).ok();
    vec![
        release(&read("/proc/sys/kernel/osrelease")),
        capabilities(&read("/proc/self/status")),
        cgroup2(kernel::mount_point()),
        lockdown(&read("/sys/kernel/security/lockdown")),
        files(open_files),
        accept_queue(&read("/proc/sys/net/core/somaxconn")),
        ports(&read("/proc/sys/net/ipv4/ip_local_port_range")),
        mptcp(Path::new("/proc/sys/net/mptcp").exists()),
    ]
}

fn release(text: &str) -> Check {
    let check = check(Part::Host, "kernel", "everything");
    let text = text.trim();
    let mut numbers = text.split(['.', '-']).map_while(|number| number.parse().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if (major, minor) < OLDEST => {
            check.remark(format!("{text}: older than {}.{}", OLDEST.0, OLDEST.1))
        }
        (Some(_), Some(_)) => check.is(text),
        _ => check.remark(format!("a version that cannot be read: {text:?}")),
    }
}

/// Each with those that stand for it.
const CAPABILITIES: [(&str, &[u32]); 3] =
    [("CAP_BPF", &[39, 21]), ("CAP_PERFMON", &[38, 21]), ("CAP_NET_ADMIN", &[12])];

/// The check without which nothing can be tried.
pub(super) const PRIVILEGES: &str = "privileges";

fn capabilities(status: &str) -> Check {
    let check = check(Part::Host, PRIVILEGES, "loading programs");
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0);
    let lacks = |(_, bits): &&(&str, &[u32])| !bits.iter().any(|bit| effective >> bit & 1 == 1);
    let missing: Vec<_> = CAPABILITIES.iter().filter(lacks).map(|(name, _)| *name).collect();
    if missing.is_empty() {
        check.is("sufficient")
    } else {
        check.failed(format!("run it as root, or with {}", missing.join(", ")))
    }
}

fn cgroup2(mount: Result<std::path::PathBuf, kernel::LoadError>) -> Check {
    let check = check(Part::Host, "cgroup v2", "attaching programs");
    match mount {
        Ok(path) => check.is(path.display().to_string()),
        Err(error) => check.failed(error.to_string()),
    }
}

/// The file holds all modes, with the current one in brackets; without it there is no lockdown.
fn lockdown(text: &str) -> Check {
    let check = check(Part::Host, "lockdown", "programs that read kernel memory");
    let mode = text.split(['[', ']']).nth(1).unwrap_or("none");
    if mode == "confidentiality" {
        check.failed(
            "confidentiality: nothing is steered, and failed connections are counted without \
             their cause",
        )
    } else {
        check.is(mode)
    }
}

fn files(limit: Option<u64>) -> Check {
    let check = check(Part::Host, "open files", "two for each client");
    match limit {
        Some(RLIM_INFINITY) => check.is("unlimited"),
        Some(n) if n >= OPEN_FILES => check.is(n.to_string()),
        Some(n) => check.remark(format!("{n}: raise the hard limit (LimitNOFILE=, ulimit -Hn)")),
        None => check.remark("the limit cannot be read"),
    }
}

fn accept_queue(text: &str) -> Check {
    let check = check(Part::Host, "net.core.somaxconn", "clients that wait to be accepted");
    match text.trim().parse::<u64>() {
        Ok(n) if n >= ACCEPT_QUEUE => check.is(n.to_string()),
        Ok(n) => check.remark(format!("{n}: bursts of more clients than that are delayed")),
        Err(_) => check.remark("cannot be read"),
    }
}

fn ports(text: &str) -> Check {
    let check = check(Part::Host, "ip_local_port_range", "connections to origins and listeners");
    let mut ends = text.split_whitespace().map_while(|port| port.parse::<u64>().ok());
    match (ends.next(), ends.next()) {
        (Some(first), Some(last)) => {
            let count = (last + 1).saturating_sub(first);
            let range = format!("{first}-{last}");
            if count >= LOCAL_PORTS {
                check.is(range)
            } else {
                check.remark(format!("{range}: {count} ports for each origin"))
            }
        }
        _ => check.remark("cannot be read"),
    }
}

/// Sockets of MPTCP are never intercepted: the connect hook asks for plain TCP, because putting
/// their subflows into a map of sockets has crashed kernels.
fn mptcp(present: bool) -> Check {
    let check = check(Part::Host, "mptcp", "nothing: its clients are left alone");
    check.is(if present { "present" } else { "absent" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Outcome::{self, Failed, Ok, Remark};

    #[track_caller]
    fn is(check: &Check, outcome: Outcome, found: &str) {
        assert_eq!(check.outcome, outcome, "{}", check.found);
        assert!(check.found.contains(found), "{}", check.found);
    }

    #[test]
    fn old_kernels_are_told() {
        is(&release("6.18.44-x #1\n"), Ok, "6.18.44");
        is(&release("5.14.0-70.el9\n"), Ok, "5.14");
        is(&release("5.10.1\n"), Remark, "older than 5.14");
        is(&release("4.18.0\n"), Remark, "older");
        is(&release(""), Remark, "cannot be read");
    }

    #[test]
    fn missing_capabilities_are_named() {
        is(&capabilities("Name:\tx\nCapEff:\t000001ffffffffff\n"), Ok, "");
        is(&capabilities("CapEff:\t000000c000001000\n"), Ok, "");
        is(&capabilities("CapEff:\t0000000000201000\n"), Ok, "");
        is(&capabilities("CapEff:\t0000008000001000\n"), Failed, "with CAP_PERFMON");
        is(&capabilities("CapEff:\t0000000000000000\n"), Failed, "CAP_BPF, CAP_PERFMON, CAP_NET");
        is(&capabilities(""), Failed, "as root");
    }

    #[test]
    fn confidentiality_ends_steering() {
        is(&lockdown(""), Ok, "none");
        is(&lockdown("none [integrity] confidentiality\n"), Ok, "integrity");
        is(&lockdown("none integrity [confidentiality]\n"), Failed, "nothing is steered");
    }

    #[test]
    fn low_limits_are_remarked() {
        is(&files(Some(RLIM_INFINITY)), Ok, "unlimited");
        is(&files(Some(1_048_576)), Ok, "1048576");
        is(&files(Some(4096)), Remark, "4096");
        is(&accept_queue("4096\n"), Ok, "4096");
        is(&accept_queue("128\n"), Remark, "128");
        is(&accept_queue(""), Remark, "cannot be read");
        is(&ports("32768\t60999\n"), Ok, "32768-60999");
        is(&ports("60000\t60999\n"), Remark, "1000 ports");
        is(&ports("x"), Remark, "cannot be read");
    }
}
