//! Addresses as the file writes them. Errors are rules, to be completed by key and value.

use std::net::{IpAddr, SocketAddr};

use ipnet::{IpNet, Ipv4Net};

use crate::config::Intercept;

/// `10.0.0.1:80` or `[fd00::1]:80`, for a listener.
pub(super) fn listen(text: &str) -> Result<SocketAddr, String> {
    let address = socket_address(text)?;
    scoped(address)?;
    if address.ip().is_multicast() {
        return Err("a multicast address cannot be listened on".to_owned());
    }
    Ok(address)
}

/// `10.0.0.1:80` or `[fd00::1]:80`, to be dialled.
pub(super) fn origin(text: &str) -> Result<SocketAddr, String> {
    let address = socket_address(text)?;
    scoped(address)?;
    reachable(address.ip())?;
    Ok(address)
}

/// An origin that is listed in the file, where many expect that a name will do.
pub(super) fn configured_origin(text: &str) -> Result<SocketAddr, String> {
    origin(text).map_err(|rule| {
        let host = text.rsplit_once(':').map_or(text, |(host, _)| host);
        let in_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let name = host.chars().all(in_name) && host.contains(|c: char| c.is_ascii_alphabetic());
        if name { format!("{rule}; [service.discovery.dns] resolves names") } else { rule }
    })
}

/// `10.0.0.1:80`, `10.0.0.0/8:80`, `[fd00::1]:80` or `[fd00::/64]:80`.
pub(super) fn intercept(text: &str) -> Result<Intercept, String> {
    const FORM: &str = "must be ADDRESS:PORT or NET/LENGTH:PORT, such as 10.0.0.0/8:80 or \
                        [fd00::/64]:80, or the word \"origins\"";
    let (host, port) = text.rsplit_once(':').ok_or(FORM)?;
    let port = port.parse::<u16>().map_err(|_e| FORM)?;
    let bracketed = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let net = match (bracketed.unwrap_or(host)).parse::<IpNet>() {
        Ok(net) => net,
        Err(_) => {
            bracketed.unwrap_or(host).parse::<IpAddr>().map(IpNet::from).map_err(|_e| FORM)?
        }
    };
    if matches!(net, IpNet::V6(_)) != bracketed.is_some() {
        return Err("an IPv6 address is written in brackets and an IPv4 address is not: \
                    [fd00::/64]:80, 10.0.0.0/8:80"
            .to_owned());
    }
    if port == 0 {
        return Err(PORT_RULE.to_owned());
    }
    if net != net.trunc() {
        let corrected = Intercept { net: net.trunc(), port };
        return Err(format!("has bits set beyond its prefix length; did you mean {corrected}?"));
    }
    if net.prefix_len() == net.max_prefix_len() || net.addr().is_multicast() {
        reachable(net.addr())?;
    }
    if net.prefix_len() >= LINK_LOCAL_BITS && is_link_local(net.addr()) {
        return Err(
            "link-local destinations are left alone: another link has the same ones".to_owned()
        );
    }
    Ok(Intercept { net: canonical(net), port })
}

/// How a gRPC server is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    Http,
    Https,
}

/// `http://host:port` or `https://host:port`: a gRPC server.
pub(super) fn server(text: &str) -> Result<Scheme, String> {
    let uri = text.parse::<hyper::Uri>().ok();
    let plain = uri.filter(|uri| {
        // A URI with an authority has at least the path "/".
        let bare = uri.path_and_query().is_none_or(|path| path == "/") && !text.ends_with('/');
        let named = uri.host().is_some_and(|host| !host.is_empty());
        bare && named && uri.port_u16().is_some_and(|port| port != 0)
    });
    match plain.as_ref().and_then(hyper::Uri::scheme_str) {
        Some("http") => Ok(Scheme::Http),
        Some("https") => Ok(Scheme::Https),
        _ => Err("must be http://HOST:PORT or https://HOST:PORT, such as http://10.0.0.1:2379"
            .to_owned()),
    }
}

const PORT_RULE: &str = "the port must be 1..=65535";

/// An address as the rules compare it: IPv4-mapped IPv6 is IPv4.
fn socket_address(text: &str) -> Result<SocketAddr, String> {
    let mut address = text
        .parse::<SocketAddr>()
        .map_err(|_e| "must be ADDRESS:PORT, such as 10.0.0.1:80 or [fd00::1]:80")?;
    if address.port() == 0 {
        return Err(PORT_RULE.to_owned());
    }
    if address.is_ipv6() && address.ip().to_canonical().is_ipv4() {
        address.set_ip(address.ip().to_canonical());
    }
    Ok(address)
}

/// The length of the prefix `fe80::/10`.
const LINK_LOCAL_BITS: u8 = 10;

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// A link-local address means something on one link only.
fn scoped(address: SocketAddr) -> Result<(), String> {
    match address {
        SocketAddr::V6(v6) if is_link_local(address.ip()) && v6.scope_id() == 0 => Err(
            "a link-local address needs the number of its interface, as in [fe80::1%2]:80, or is \
                 nobody's; name another one of that host"
                .to_owned(),
        ),
        _ => Ok(()),
    }
}

fn reachable(ip: IpAddr) -> Result<(), String> {
    if ip.to_canonical().is_unspecified() {
        return Err("the unspecified address is nobody's; name the host's own".to_owned());
    }
    if ip.to_canonical().is_multicast() {
        return Err("TCP cannot connect to a multicast address".to_owned());
    }
    Ok(())
}

/// `::ffff:10.0.0.0/104` is `10.0.0.0/8`.
fn canonical(net: IpNet) -> IpNet {
    if let (IpNet::V6(v6), IpAddr::V4(v4)) = (net, net.addr().to_canonical())
        && let Some(length) = v6.prefix_len().checked_sub(96)
        && let Ok(mapped) = Ipv4Net::new(v4, length)
    {
        return IpNet::V4(mapped);
    }
    net
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> String {
        match intercept(text) {
            Ok(Intercept { net, port }) => format!("{net} {port}"),
            Err(rule) => rule,
        }
    }

    #[test]
    fn intercept_forms() {
        assert_eq!(shown("10.9.0.10:80"), "10.9.0.10/32 80");
        assert_eq!(shown("10.0.0.0/8:80"), "10.0.0.0/8 80");
        assert_eq!(shown("0.0.0.0/0:80"), "0.0.0.0/0 80");
        assert_eq!(shown("[fd00::/64]:80"), "fd00::/64 80");
        assert_eq!(shown("[::1]:80"), "::1/128 80");
        assert_eq!(shown("[::ffff:10.0.0.0/104]:80"), "10.0.0.0/8 80");
    }

    #[test]
    fn servers() {
        for good in ["http://127.0.0.1:2379", "http://etcd-0.etcd:2379", "http://[fd00::1]:80"] {
            assert_eq!(server(good), Ok(Scheme::Http), "{good}");
        }
        assert_eq!(server("https://etcd-0.etcd:2379"), Ok(Scheme::Https));
        for bad in ["", "127.0.0.1:2379", "http://a", "http://a:0", "http://a:1/x", "ftp://a:1"] {
            assert!(server(bad).is_err_and(|rule| rule.starts_with("must be")), "{bad}");
        }
    }

    #[test]
    fn link_local_addresses() {
        for text in ["[fe80::1]:80", "[febf::1%0]:80"] {
            for parse in [listen, origin] {
                assert!(parse(text).is_err_and(|rule| rule.contains("number of its interface")));
            }
        }
        assert!(origin("[fe80::1%2]:80").is_ok() && origin("[fec0::1]:80").is_ok());
        assert!(shown("[fe80::1]:80").starts_with("link-local destinations"));
        assert!(shown("[fe80::/10]:80").starts_with("link-local destinations"));
        assert_eq!(shown("[fe00::/7]:80"), "fe00::/7 80");
    }

    #[test]
    fn names_of_origins_are_told_from_other_mistakes() {
        let hint = |text: &str| configured_origin(text).unwrap_err().contains("discovery.dns");
        assert!(["localhost:80", "www.example.com:80", "a_b", "1a-b:http"].into_iter().all(hint));
        assert!(
            !["10.0.0.1", "10.0.0.1:http", "fd00::1:80", "", "[fe80::1]:80"].into_iter().any(hint)
        );
    }

    #[test]
    fn intercept_mistakes() {
        assert!(shown("10.0.0.1/8:80").ends_with("did you mean 10.0.0.0/8:80?"));
        assert!(shown("[fd00::1/64]:80").ends_with("did you mean [fd00::/64]:80?"));
        assert!(shown("10.0.0.1").starts_with("must be ADDRESS:PORT"));
        assert!(shown("10.0.0.1:http").starts_with("must be ADDRESS:PORT"));
        assert!(shown("10.0.0.0/33:80").starts_with("must be ADDRESS:PORT"));
        assert!(shown("fd00::1:80").starts_with("an IPv6 address is written in brackets"));
        assert!(shown("[10.0.0.1]:80").starts_with("an IPv6 address is written in brackets"));
        assert!(shown("0.0.0.0:80").starts_with("the unspecified address"));
        assert!(shown("224.0.0.0/4:80").contains("multicast"));
        assert_eq!(shown("10.0.0.1:0"), PORT_RULE);
    }
}
