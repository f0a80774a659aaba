//! The kernel's own TCP counters: the judge that neither we nor our programs can talk to.

use std::path::Path;
use std::{fs, io};

use super::HostCounters;

/// Reads the counters of the network namespace that the calling thread is in.
pub fn read() -> io::Result<HostCounters> {
    read_under(Path::new("/proc/thread-self/net"))
}

fn read_under(net: &Path) -> io::Result<HostCounters> {
    let file = |name: &str| {
        let path = net.join(name);
        fs::read_to_string(&path)
            .map_err(|e| io::Error::new(e.kind(), format!("cannot read {}: {e}", path.display())))
    };
    Ok(parse(&file("snmp")?, &file("netstat")?, &file("sockstat")?))
}

/// Parses the texts of `/proc/net/{snmp,netstat,sockstat}`. Columns are found by their names, as
/// kernels add new ones; a counter that a kernel does not have is 0.
#[must_use]
pub fn parse(snmp: &str, netstat: &str, sockstat: &str) -> HostCounters {
    let tcp = |name| column(snmp, "Tcp:", name);
    HostCounters {
        active_opens: tcp("ActiveOpens"),
        passive_opens: tcp("PassiveOpens"),
        attempt_fails: tcp("AttemptFails"),
        estab_resets: tcp("EstabResets"),
        time_wait: pair(sockstat, "TCP:", "tw"),
        listen_overflows: column(netstat, "TcpExt:", "ListenOverflows"),
    }
}

/// A column of a table whose first line names the columns and whose second has the values.
fn column(text: &str, table: &str, name: &str) -> u64 {
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(table));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return 0 };
    names
        .split_whitespace()
        .zip(values.split_whitespace())
        .find(|(column, _)| *column == name)
        .and_then(|(_, value)| value.parse().ok())
        .unwrap_or(0)
}

/// A value of a line of `name value` pairs.
fn pair(text: &str, line: &str, name: &str) -> u64 {
    let Some(words) = text.lines().find_map(|l| l.strip_prefix(line)) else { return 0 };
    words
        .split_whitespace()
        .skip_while(|word| *word != name)
        .nth(1)
        .and_then(|value| value.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SNMP: &str = "\
Ip: Forwarding DefaultTTL InReceives
Ip: 1 64 2045
Tcp: RtoAlgorithm RtoMin RtoMax MaxConn ActiveOpens PassiveOpens AttemptFails EstabResets CurrEstab InSegs OutSegs RetransSegs InErrs OutRsts InCsumErrors
Tcp: 1 200 120000 -1 5521 4402 17 9 12 89131 92343 66 0 211 0
Udp: InDatagrams NoPorts
Udp: 12 0
";
    const NETSTAT: &str = "\
TcpExt: SyncookiesSent SyncookiesRecv ListenOverflows ListenDrops
TcpExt: 0 0 3 4
IpExt: InNoRoutes InTruncatedPkts
IpExt: 1 2
";
    const SOCKSTAT: &str = "\
sockets: used 250
TCP: inuse 11 orphan 0 tw 482 alloc 14 mem 2
UDP: inuse 1 mem 0
";

    #[test]
    fn columns_are_found_by_name() {
        let expected = HostCounters {
            active_opens: 5521,
            passive_opens: 4402,
            attempt_fails: 17,
            estab_resets: 9,
            time_wait: 482,
            listen_overflows: 3,
        };
        assert_eq!(parse(SNMP, NETSTAT, SOCKSTAT), expected);
    }

    #[test]
    fn what_a_kernel_lacks_is_zero() {
        assert_eq!(parse("", "Tcp", "TCP: tw"), HostCounters::default());
        assert_eq!(parse("Tcp: ActiveOpens\nTcp: x\n", "", ""), HostCounters::default());
    }

    #[test]
    fn this_host_has_them() {
        let counters = read().unwrap_or_else(|e| panic!("{e}"));
        assert!(counters.active_opens <= u64::MAX / 2);
    }
}
