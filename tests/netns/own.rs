//! The daemon's own connections: nobody's clients, whatever the services intercept.

use std::io;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use harness::origin::scripted::Scripted;
use harness::{Client, Daemon, Lab, eventually};

use crate::kubernetes;
use crate::support::{SOON, listen};

/// Services that intercept whoever tells the daemon something, for everybody.
fn intercepting(server: SocketAddr, others: &str) -> String {
    format!(
        "workers = 1\n{others}[[service]]\nname = \"trap\"\nprotocol = \"http1\"\n\
         intercept = [\"{server}\"]\norigins = [\"127.0.0.1:9\"]\n"
    )
}

/// Connections to `server` that the kernel programs have counted: the broker's, everybody else's.
fn counted(daemon: &Daemon, server: SocketAddr) -> (u64, u64) {
    let endpoints = daemon.snapshot().unwrap().endpoints;
    let of = |broker| {
        let mine = endpoints.iter().filter(|e| e.remote == server && e.broker == broker);
        mine.map(|e| e.established).sum()
    };
    (of(true), of(false))
}

#[test]
fn what_the_self_test_opens_is_counted_nowhere() {
    let lab = Lab::new(1).unwrap();
    let config = format!(
        "workers = 1\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nintercept = [\"origins\"]\n\
         origins = [\"{}\"]\npool.prewarm = 0\n",
        lab.origin(0)
    );
    let daemon = Daemon::start(&lab, &config).unwrap();
    let snapshot = daemon.snapshot().unwrap();
    assert!(snapshot.datapath.steering, "it was tried out: {:?}", snapshot.datapath);
    let own = (snapshot.datapath.broker_attempted, snapshot.datapath.broker_established);
    let own_endpoints: Vec<_> = snapshot.endpoints.iter().filter(|e| e.broker).collect();
    assert_eq!((own, own_endpoints.len()), ((0, 0), 0), "{own_endpoints:?}");
}

#[test]
fn the_connection_to_an_api_server_is_not_intercepted() {
    let lab = Lab::new(2).unwrap();
    let (api, web) = (lab.origin(0), lab.origin(1));
    let server = Scripted::start(&lab.origins, api, kubernetes::api_server(web)).unwrap();
    let _origin = Scripted::http(&lab.origins, web).unwrap();
    let web = kubernetes::service(&lab, &kubernetes::kubeconfig(&lab, api, "{}"));
    let daemon = Daemon::start(&lab, &intercepting(api, &web)).unwrap();
    assert_eq!(Client::get_once(&lab.host, listen(&lab), "/").unwrap().status, 200);
    // Each watch needs a new connection: these are made while everybody else's are intercepted.
    let before = server.accepted();
    eventually(SOON, "more watches", || server.accepted() > before + 2);
    let service = daemon.service().unwrap();
    assert_eq!(service.membership.unwrap().error, None, "{}", daemon.log());
    let (own, others) = counted(&daemon, api);
    assert!(own > 2 && others == 0, "{own} own, {others} of others");
    assert_eq!(daemon.snapshot().unwrap().datapath.rewritten, 0);
}

/// A DNS server whose answers are too long for UDP: one address, and no others.
fn dns_server(lab: &Lab, at: SocketAddr, answer: [u8; 4]) -> Arc<AtomicU64> {
    let reply = move |question: &[u8], truncated: bool| {
        // Up to the end of the name, and its type and class.
        let name = question[12..].iter().position(|&byte| byte == 0).unwrap() + 13;
        let is_a = question[name..name + 2] == [0, 1];
        let answers = u8::from(is_a && !truncated);
        let mut reply = question[..2].to_vec();
        reply.extend([0x81 | u8::from(truncated) << 1, 0x80, 0, 1, 0, answers, 0, 0, 0, 0]);
        reply.extend(&question[12..name + 4]);
        if answers == 1 {
            reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
            reply.extend(answer);
        }
        reply
    };
    let (udp, tcp) = lab
        .origins
        .run(|| -> io::Result<_> { Ok((UdpSocket::bind(at)?, TcpListener::bind(at)?)) })
        .unwrap();
    thread::spawn(move || {
        let mut question = [0; 512];
        while let Ok((length, from)) = udp.recv_from(&mut question) {
            udp.send_to(&reply(&question[..length], true), from).ok();
        }
    });
    let asked = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&asked);
    thread::spawn(move || {
        while let Ok((mut stream, _)) = tcp.accept() {
            let count = Arc::clone(&count);
            thread::spawn(move || -> io::Result<()> {
                loop {
                    let mut length = [0; 2];
                    stream.read_exact(&mut length)?;
                    let mut question = vec![0; u16::from_be_bytes(length).into()];
                    stream.read_exact(&mut question)?;
                    count.fetch_add(1, Relaxed);
                    let reply = reply(&question, false);
                    let length = u16::try_from(reply.len()).expect("short");
                    stream.write_all(&[&length.to_be_bytes()[..], &reply].concat())?;
                }
            });
        }
    });
    asked
}

#[test]
fn the_connection_to_a_dns_server_is_not_intercepted() {
    let lab = Lab::new(2).unwrap();
    let (dns, web) = (SocketAddr::new(lab.origin_ip(0), 53), lab.origin(1));
    let std::net::IpAddr::V4(answer) = web.ip() else { unreachable!() };
    let asked = dns_server(&lab, dns, answer.octets());
    let _origin = Scripted::http(&lab.origins, web).unwrap();
    let web = format!(
        "[[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"{}\"]\n\
         [service.discovery.dns]\nname = \"web.test\"\nport = 80\nresolvers = [\"{dns}\"]\n\
         refresh_min = \"100ms\"\n",
        listen(&lab)
    );
    let daemon = Daemon::start(&lab, &intercepting(dns, &web)).unwrap();
    assert_eq!(Client::get_once(&lab.host, listen(&lab), "/").unwrap().status, 200);
    let before = asked.load(Relaxed);
    eventually(SOON, "more questions", || asked.load(Relaxed) > before + 4);
    let service = daemon.service().unwrap();
    assert_eq!(service.membership.unwrap().error, None, "{}", daemon.log());
    let (own, others) = counted(&daemon, dns);
    assert!(own > 2 && others == 0, "{own} own, {others} of others");
    assert_eq!(daemon.snapshot().unwrap().datapath.rewritten, 0);
}
