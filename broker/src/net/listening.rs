//! Where this process listens, and which origins lead back there.
//!
//! An origin that is a listener of the broker's own would be served by dialling it once more, until
//! every limit is used up. The configuration is checked for that as far as a file can tell; lists come
//! later, and a listener on all addresses has those that the host happens to have. So lists are looked
//! through when they come, and each dial asks again: a host may get an address, and a worker a listener,
//! at any time.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::{PoisonError, RwLock};

use crate::clock;
use crate::config::{self, Config};
use crate::seldom::Seldom;

/// The addresses on which this process listens. The lock is taken for a dial, never for an exchange.
#[derive(Debug, Default)]
pub struct Listening {
    by_port: RwLock<HashMap<u16, Vec<IpAddr>>>,
    told: Seldom,
}

impl Listening {
    /// What the configuration names.
    #[must_use]
    pub fn configured(config: &Config) -> Self {
        let listening = Self::default();
        for &address in config.services.iter().flat_map(|service| &service.listen) {
            listening.add(address);
        }
        listening
    }

    /// One more.
    pub fn add(&self, listener: SocketAddr) {
        let mut by_port = self.by_port.write().unwrap_or_else(PoisonError::into_inner);
        by_port.entry(listener.port()).or_default().push(listener.ip());
    }

    /// Whether a connection to this address would come to a listener of this process. Costs system
    /// calls only where one listens on that port of all addresses.
    #[must_use]
    pub fn takes(&self, origin: SocketAddr) -> bool {
        let by_port = self.by_port.read().unwrap_or_else(PoisonError::into_inner);
        let Some(listeners) = by_port.get(&origin.port()) else { return false };
        let ip = origin.ip();
        listeners.contains(&ip)
            || listeners.iter().any(|&listener| config::covers(listener, ip)) && is_of_this_host(ip)
    }

    /// Refuses to dial such an origin, and says so now and then.
    pub fn refuse(&self, origin: SocketAddr) -> io::Result<()> {
        if !self.takes(origin) {
            return Ok(());
        }
        if self.told.say(clock::now()).is_some() {
            tracing::warn!(
                %origin,
                "an origin is a listener of this broker; it is not connected to, as that would loop"
            );
        }
        Err(io::Error::other("it is a listener of this broker"))
    }
}

/// Whether packets to this address stay on this host. The kernel says so by the address that they would
/// come from: their own, or one that never leaves the host. (Whether one can bind to it says less:
/// `ip_nonlocal_bind`.) Nothing is sent.
fn is_of_this_host(ip: IpAddr) -> bool {
    let any = match ip {
        IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
    };
    let source = || -> io::Result<IpAddr> {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect((ip, 9))?;
        Ok(socket.local_addr()?.ip())
    };
    // Without a way there nothing comes from there either.
    ip.is_loopback() || source().is_ok_and(|source| source == ip || source.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn takes(listener: &str, origin: &str) -> bool {
        let listening = Listening::default();
        listening.add(listener.parse().unwrap());
        listening.takes(origin.parse().unwrap())
    }

    #[test]
    fn a_listener_takes_what_is_sent_to_its_address() {
        assert!(takes("10.0.0.1:80", "10.0.0.1:80"));
        assert!(!takes("10.0.0.1:80", "10.0.0.1:81"));
        assert!(!takes("10.0.0.1:80", "10.0.0.2:80"));
        assert!(!takes("127.0.0.1:80", "127.0.0.2:80"));
    }

    #[test]
    fn a_listener_on_all_addresses_takes_those_of_this_host() {
        assert!(takes("0.0.0.0:80", "127.0.0.2:80"));
        assert!(takes("[::]:80", "127.0.0.2:80"));
        assert!(!takes("0.0.0.0:80", "[::1]:80"));
        // For documentation (RFC 5737): nobody has it.
        assert!(!takes("0.0.0.0:80", "203.0.113.77:80"));
    }

    #[test]
    fn what_leads_back_is_refused() {
        let listening = Listening::default();
        listening.add(([127, 0, 0, 1], 80).into());
        assert!(listening.refuse(([127, 0, 0, 1], 80).into()).is_err());
        assert!(listening.refuse(([127, 0, 0, 1], 81).into()).is_ok());
    }
}
