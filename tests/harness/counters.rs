//! The kernel's own TCP counters, of one network namespace.
//!
//! An origin that lives alone in its namespace has its handshakes counted there by a party that
//! has no interest in the result.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context as _, Result};

use crate::netns::Netns;

/// A reading of `/proc/net/{snmp,netstat,sockstat}`, or the difference of two.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters(BTreeMap<String, i64>);

impl Counters {
    /// Reads the counters of a namespace.
    pub fn read(netns: &Netns) -> Result<Self> {
        netns.run(|| {
            let mut all = BTreeMap::new();
            for file in ["snmp", "netstat"] {
                let text = fs::read_to_string(format!("/proc/thread-self/net/{file}"))?;
                parse_columns(&text, &mut all).with_context(|| format!("/proc/net/{file}"))?;
            }
            parse_sockstat(&fs::read_to_string("/proc/thread-self/net/sockstat")?, &mut all);
            Ok(Self(all))
        })
    }

    /// What has happened since `earlier`. Of states (TIME_WAIT and the like) this is the change.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let change = |(name, now): (&String, &i64)| {
            (name.clone(), now - earlier.0.get(name).copied().unwrap_or(0))
        };
        Self(self.0.iter().map(change).collect())
    }

    /// A counter by its kernel name, e.g. `Tcp.ActiveOpens` or `TcpExt.ListenOverflows`.
    ///
    /// # Panics
    /// If the kernel has no such counter: a misspelt name must not read as 0.
    #[must_use]
    pub fn get(&self, name: &str) -> i64 {
        *self.0.get(name).unwrap_or_else(|| panic!("the kernel has no counter {name}"))
    }

    /// Handshakes begun from here.
    #[must_use]
    pub fn active_opens(&self) -> i64 {
        self.get("Tcp.ActiveOpens")
    }

    /// Handshakes completed by listeners here.
    #[must_use]
    pub fn passive_opens(&self) -> i64 {
        self.get("Tcp.PassiveOpens")
    }

    /// Handshakes that failed, both directions.
    #[must_use]
    pub fn attempt_fails(&self) -> i64 {
        self.get("Tcp.AttemptFails")
    }

    /// Established connections that ended by a reset.
    #[must_use]
    pub fn estab_resets(&self) -> i64 {
        self.get("Tcp.EstabResets")
    }

    /// Connections that are open at this moment.
    #[must_use]
    pub fn established(&self) -> i64 {
        self.get("Tcp.CurrEstab")
    }

    /// Sockets in TIME_WAIT at this moment.
    #[must_use]
    pub fn time_wait(&self) -> i64 {
        self.get("TCP.tw")
    }

    /// Connections dropped because an accept queue was full.
    #[must_use]
    pub fn listen_overflows(&self) -> i64 {
        self.get("TcpExt.ListenOverflows")
    }
}

/// Pairs of lines: `Tcp: NAME NAME ...` and `Tcp: 1 2 ...`.
fn parse_columns(text: &str, into: &mut BTreeMap<String, i64>) -> Result<()> {
    let mut lines = text.lines();
    while let (Some(names), Some(values)) = (lines.next(), lines.next()) {
        let (group, names) = names.split_once(": ").context("no group in the line of names")?;
        let (_, values) = values.split_once(": ").context("no group in the line of values")?;
        for (name, value) in names.split_whitespace().zip(values.split_whitespace()) {
            // A few counters are 64-bit unsigned and may be beyond i64; none that matter here.
            into.insert(format!("{group}.{name}"), value.parse().unwrap_or(0));
        }
    }
    Ok(())
}

/// Lines of `TCP: inuse 5 orphan 0 tw 3`.
fn parse_sockstat(text: &str, into: &mut BTreeMap<String, i64>) {
    for line in text.lines() {
        let Some((group, rest)) = line.split_once(": ") else { continue };
        let words: Vec<_> = rest.split_whitespace().collect();
        for pair in words.chunks_exact(2) {
            into.insert(format!("{group}.{}", pair[0]), pair[1].parse().unwrap_or(0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_and_pairs_are_named_by_group() {
        let mut all = BTreeMap::new();
        parse_columns("Tcp: A B\nTcp: 1 -1\nUdp: A\nUdp: 7\n", &mut all).unwrap();
        parse_sockstat("sockets: used 3\nTCP: inuse 5 tw 2\n", &mut all);
        let now = Counters(all);
        assert_eq!((now.get("Tcp.A"), now.get("Tcp.B"), now.get("Udp.A")), (1, -1, 7));
        assert_eq!(now.time_wait(), 2);
        assert_eq!(now.since(&now).get("TCP.inuse"), 0);
    }
}
