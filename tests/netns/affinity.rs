//! How long a keep-alive client holds its origin socket.

use harness::origin::scripted::Peer;

use crate::support::{Service, Setup};

fn bodies(setup: &Setup, clients: usize, turns: usize) -> Vec<Vec<String>> {
    let mut open: Vec<_> = (0..clients).map(|_| setup.client()).collect();
    (0..turns)
        .map(|_| open.iter_mut().map(|client| client.get("/").unwrap().text()).collect())
        .collect()
}

#[test]
fn by_exchange_idle_clients_share_one_socket() {
    let setup = Setup::http(Peer::serve);
    assert_eq!(bodies(&setup, 10, 3), vec![vec!["0 /"; 10]; 3]);
}

#[test]
fn by_connection_each_client_keeps_its_own() {
    let setup =
        Service { keys: "protocol = \"http1\"\naffinity = \"connection\"", ..Service::default() }
            .start(Peer::serve);
    let expected: Vec<_> = (0..4).map(|i| format!("{i} /")).collect();
    assert_eq!(bodies(&setup, 4, 3), vec![expected; 3]);
    // After the clients have gone, the sockets are anybody's.
    setup.idle(4);
    assert!(setup.serving() < 4);
}
