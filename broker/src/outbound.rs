//! Connections to those that tell the daemon who the origins are and which gateway this is.
//!
//! All of them are marked as the broker's own, also those that libraries ask for: a service that
//! intercepts the address of an API server must not take the daemon's connection to it, which would
//! wait for itself, and what other processes open is counted without them.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::os::fd::AsFd as _;
use std::time::Duration;

use hyper::Uri;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpSocket, TcpStream};

use crate::aside::aside;
use crate::chain;
use crate::datapath::Datapath;

/// Connects to the first of the host's addresses that answers. The socket is marked in `datapath` as
/// the broker's own.
pub async fn dial(uri: &Uri, datapath: &dyn Datapath) -> io::Result<TcpStream> {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
    let mut failed = io::Error::new(io::ErrorKind::NotFound, format!("{host} has no address"));
    for address in lookup(host, port).await? {
        match connect(address, datapath).await {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = io::Error::new(error.kind(), format!("{address}: {error}")),
        }
    }
    Err(failed)
}

/// The addresses of a host, as the system knows it.
async fn lookup(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let name = (host.to_owned(), port);
    let found = aside("lookup", move || name.to_socket_addrs().map(Vec::from_iter)).await;
    found.map_err(|error| io::Error::other(chain(error.as_ref())))?
}

/// A socket for such a connection, marked before anybody connects it.
pub fn socket(address: SocketAddr, datapath: &dyn Datapath) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    datapath.own(socket.as_fd())?;
    socket.set_nodelay(true)?;
    Ok(socket)
}

async fn connect(address: SocketAddr, datapath: &dyn Datapath) -> io::Result<TcpStream> {
    let socket = socket(address, datapath)?;
    SockRef::from(&socket).set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(Duration::from_secs(30))
            .with_interval(Duration::from_secs(10))
            .with_retries(3),
    )?;
    socket.connect(address).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::Inert;

    #[tokio::test]
    async fn hosts_are_addresses_or_names() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["127.0.0.1", "localhost"] {
            let uri = format!("http://{host}:{port}").parse().unwrap();
            dial(&uri, &Inert).await.unwrap();
        }
        assert_eq!(
            lookup("::1", 80).await.unwrap(),
            [SocketAddr::from(([0_u16, 0, 0, 0, 0, 0, 0, 1], 80))]
        );
    }
}
