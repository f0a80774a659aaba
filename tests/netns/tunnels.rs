//! Connections whose bytes have no boundary: upgrades, CONNECT, opaque services.

use std::time::Duration;

use harness::origin::scripted::Peer;
use harness::{Client, eventually};

use crate::support::{SOON, Service, Setup};

const UPGRADE: &str = "GET /chat HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\n\
                       Upgrade: websocket\r\n\r\n";
const SWITCHING: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
                         Upgrade: websocket\r\n\r\n";

/// Answers probes; everything else becomes an echo after `head`.
fn tunnel(peer: &mut Peer, head: &str) -> std::io::Result<()> {
    while let Some(request) = peer.head()? {
        if request.contains("/probe") {
            peer.respond(format!("{} /probe", peer.index()))?;
            continue;
        }
        peer.send(head)?;
        while let Some(bytes) = peer.read_some()? {
            peer.send(bytes)?;
        }
        // The client has half-closed: a last word, then the end.
        peer.send("bye")?;
        return Ok(());
    }
    Ok(())
}

#[track_caller]
fn check_tunnel(request: &str, head: &'static str) {
    let setup = Setup::http(move |peer| tunnel(peer, head));
    let mut client = setup.client();
    client.send(request).unwrap();
    assert_eq!(client.take(head.len()).unwrap(), head.as_bytes());
    // What looks like HTTP is just bytes now.
    for piece in ["GET /probe HTTP/1.1\r\n\r\n", "\0\u{1}\u{2}", "HTTP/1.1 200 OK\r\n\r\n"] {
        client.send(piece).unwrap();
        assert_eq!(client.take(piece.len()).unwrap(), piece.as_bytes());
    }
    client.half_close().unwrap();
    assert_eq!(client.to_end().unwrap(), b"bye");
    setup.settled();
    assert_eq!(setup.serving(), 1, "a tunnel's socket is never pooled");
}

#[test]
fn an_upgrade_is_a_tunnel() {
    check_tunnel(UPGRADE, SWITCHING);
}

#[test]
fn an_accepted_connect_is_a_tunnel() {
    check_tunnel(
        "CONNECT db:5432 HTTP/1.1\r\nHost: db:5432\r\n\r\n",
        "HTTP/1.1 200 Connection established\r\n\r\n",
    );
}

#[test]
fn a_refused_connect_is_an_ordinary_response() {
    let setup = Setup::http(|peer| {
        while let Some(request) = peer.request()? {
            if request.head.starts_with("CONNECT") {
                peer.send("HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")?;
            } else {
                peer.respond(format!("{} {}", peer.index(), request.target()))?;
            }
        }
        Ok(())
    });
    let mut client = setup.client();
    client.send("CONNECT db:5432 HTTP/1.1\r\nHost: db:5432\r\n\r\n").unwrap();
    let response = client.response().unwrap();
    assert_eq!((response.status, response.text().as_str()), (403, "no"));
    assert!(client.get("/next").unwrap().text().ends_with(" /next"));
}

#[test]
fn the_origin_may_half_close_a_tunnel_too() {
    let setup = Setup::http(|peer| {
        peer.head()?;
        peer.send(SWITCHING)?;
        peer.send("last words")?;
        peer.half_close()?;
        peer.wait_closed()
    });
    let mut client = setup.client();
    client.send(UPGRADE).unwrap();
    client.take(SWITCHING.len()).unwrap();
    assert_eq!(client.to_end().unwrap(), b"last words");
    client.send("still heard").unwrap();
    eventually(SOON, "the origin hears the client", || {
        setup.origin.received_count("still heard") == 1
    });
}

fn opaque(extra: &str, script: fn(&mut Peer) -> std::io::Result<()>) -> Setup {
    let keys = format!("protocol = \"opaque\"\n{extra}");
    Service { keys: &keys, pool: "prewarm = 1", ..Service::default() }.start(script)
}

/// Answers each line with the connection's number and the line.
fn lines(peer: &mut Peer) -> std::io::Result<()> {
    while let Some(line) = peer.read_some()? {
        let line = String::from_utf8_lossy(&line).into_owned();
        peer.send(format!("{} {line}", peer.index()))?;
    }
    Ok(())
}

#[track_caller]
fn ask(client: &mut Client, line: &str) -> String {
    client.send(line).unwrap();
    String::from_utf8(client.take_until(b"\n").unwrap()).unwrap()
}

#[test]
fn an_opaque_client_gets_a_warm_socket_that_nobody_had_before() {
    let setup = opaque("", lines);
    setup.idle(1);
    for turn in 0..3 {
        let before = setup.lab.origin_counters();
        let mut client = setup.client();
        assert_eq!(ask(&mut client, "hello\n"), format!("{turn} hello\n"));
        // The replacement is dialled beside the client's work, not before it.
        eventually(SOON, "a replacement was dialled", || {
            setup.lab.origin_counters().since(&before).passive_opens() == 1
        });
        drop(client);
        setup.idle(1);
    }
}

#[test]
fn an_opaque_server_may_speak_first() {
    let setup = opaque("", |peer| {
        peer.send("220 ready\n")?;
        lines(peer)
    });
    for _ in 0..2 {
        let mut client = setup.client();
        assert_eq!(client.take_until(b"\n").unwrap(), b"220 ready\n");
        assert!(ask(&mut client, "hello\n").ends_with(" hello\n"));
    }
}

#[test]
fn a_promise_of_quiet_lets_an_opaque_socket_be_reused() {
    let setup = opaque("reuse = \"quiet\"\nsettle_time = \"20ms\"", lines);
    for _ in 0..3 {
        let mut client = setup.client();
        assert_eq!(ask(&mut client, "hello\n"), "0 hello\n");
        drop(client);
        setup.idle(1);
    }
    assert_eq!(setup.origin.accepted(), 1);
}

#[test]
fn without_quiet_an_opaque_socket_is_closed() {
    // The last word is the client's; an answer that comes late; a reset.
    let late = |peer: &mut Peer| {
        while let Some(line) = peer.read_some()? {
            let line = String::from_utf8_lossy(&line).into_owned();
            if line.starts_with("mute") {
                continue;
            }
            peer.send(format!("{} {line}", peer.index()))?;
            if line.starts_with("late") {
                std::thread::sleep(Duration::from_millis(30));
                peer.send("unasked\n")?;
            }
        }
        Ok(())
    };
    for how in ["mute", "late", "reset"] {
        let setup = opaque("reuse = \"quiet\"\nsettle_time = \"200ms\"", late);
        let mut client = setup.client();
        assert_eq!(ask(&mut client, "hello\n"), "0 hello\n");
        match how {
            "mute" => client.send("mute\n").unwrap(),
            "late" => assert_eq!(ask(&mut client, "late\n"), "0 late\n"),
            _ => {}
        }
        if how == "reset" {
            client.reset().unwrap();
        } else {
            drop(client);
        }
        setup.idle(1);
        let mut next = setup.client();
        assert_eq!(ask(&mut next, "next\n"), "1 next\n", "{how}");
    }
}

#[test]
fn opaque_bytes_flow_in_both_directions_and_end_in_order() {
    let setup = opaque("", |peer| {
        let received = {
            let mut all = Vec::new();
            while let Some(bytes) = peer.read_some()? {
                all.extend(bytes);
            }
            all
        };
        peer.send(received)
    });
    let mut client = setup.client();
    let bytes: Vec<u8> = (0..5_000_000_u32).map(|i| (i % 251) as u8).collect();
    client.send(&bytes).unwrap();
    client.half_close().unwrap();
    assert_eq!(client.to_end().unwrap(), bytes);
}
