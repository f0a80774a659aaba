mod server;

use std::num::NonZeroU32;
use std::time::Duration;

use hyper::Method;
use hyper::header::HeaderValue;

pub(super) use self::server::{Answer, Server};
use super::*;
use crate::config::health::{Http, Kind};
use crate::datapath::Inert;

pub(super) fn tcp() -> Kind {
    Kind::Tcp
}

pub(super) fn http() -> Http {
    Http {
        method: Method::GET,
        path: "/healthz?deep=1".parse().expect("a path"),
        host: HeaderValue::from_static("web"),
        expected_statuses: vec![200..=200],
        retriable_statuses: Vec::new(),
        reuse_connection: true,
    }
}

/// Checks often, with more time for each than any machine needs.
pub(super) fn settings(kind: Kind) -> HealthCheck {
    HealthCheck {
        kind,
        interval: Duration::from_millis(5),
        interval_jitter_percent: 0,
        unhealthy_interval: Duration::from_millis(5),
        timeout: Duration::from_mins(1),
        unhealthy_threshold: NonZeroU32::new(3).expect("a threshold"),
        healthy_threshold: NonZeroU32::new(2).expect("a threshold"),
        initial: Initial::Healthy,
    }
}

/// An address that is taken, and where nobody listens.
pub(super) fn deaf() -> (socket2::Socket, SocketAddr) {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let socket = crate::net::bind(any, false, false).expect("a port");
    let address = socket.local_addr().ok().and_then(|a| a.as_socket()).expect("an address");
    (socket, address)
}

async fn wait(
    checks: &mut watch::Receiver<Arc<Checks>>,
    mut done: impl FnMut(&Checks) -> bool,
) -> Arc<Checks> {
    let minute = Duration::from_mins(1);
    if let Ok(found) = tokio::time::timeout(minute, checks.wait_for(|c| done(c))).await {
        return Arc::clone(&found.expect("the checks go on"));
    }
    panic!("still {:?}", checks.borrow());
}

async fn wait_for(checks: &mut watch::Receiver<Arc<Checks>>, origin: SocketAddr, state: State) {
    wait(checks, |checks| checks.get(&origin).is_some_and(|c| c.state == state)).await;
}

#[tokio::test]
async fn states_follow_the_answers() {
    let server = Server::start(Answer::ok()).await;
    let (_list, origins) = watch::channel(Arc::from([server.address]));
    let mut checks = start(&settings(Kind::Http(http())), origins, Arc::new(Inert));
    assert_eq!(checks.borrow()[&server.address].state, State::Unknown);
    wait_for(&mut checks, server.address, State::Healthy).await;
    server.answers(Answer::Send(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n".to_vec()));
    wait_for(&mut checks, server.address, State::Unhealthy).await;
    let error = checks.borrow()[&server.address].last_error.clone();
    assert_eq!(error.as_deref(), Some("status 500"));
    server.answers(Answer::ok());
    wait_for(&mut checks, server.address, State::Healthy).await;
    assert_eq!(server.accepted(), 1, "all of it on one connection");
}

#[tokio::test]
async fn origins_come_and_go() {
    let [one, two] = [Server::start(Answer::ok()).await, Server::start(Answer::ok()).await];
    let (_deaf, deaf) = deaf();
    let (list, origins) = watch::channel(Arc::from([one.address, deaf]));
    let mut checks = start(&settings(tcp()), origins, Arc::new(Inert));
    wait_for(&mut checks, one.address, State::Healthy).await;
    wait_for(&mut checks, deaf, State::Unhealthy).await;
    list.send_replace(Arc::from([two.address, deaf]));
    wait_for(&mut checks, two.address, State::Healthy).await;
    let now = checks.borrow().clone();
    assert!(!now.contains_key(&one.address));
    assert_eq!(now[&deaf].state, State::Unhealthy, "what is known of the others stays known");
}

#[test]
fn the_worse_of_two_opinions_counts() {
    let address = SocketAddr::from(([10, 0, 0, 1], 80));
    let member = |health| Member { health, ..Member::at(address) };
    let checked = |outcome: Option<Outcome>| {
        let now = crate::clock::now();
        let mut machine = Machine::new(&settings(tcp()), now);
        if let Some(outcome) = outcome {
            machine.on_result(&outcome, now);
        }
        Checks::from([(address, machine.checked().clone())])
    };
    let [passed, degraded, failed] =
        [Outcome::Passed, Outcome::Degraded, Outcome::TimedOut].map(|o| checked(Some(o)));
    let of = |health, checks: &Checks| of(&member(health), checks, Initial::Healthy);
    assert_eq!(of(Health::Healthy, &passed), Health::Healthy);
    assert_eq!(of(Health::Healthy, &degraded), Health::Degraded);
    assert_eq!(of(Health::Healthy, &failed), Health::Unhealthy);
    assert_eq!(of(Health::Unhealthy, &passed), Health::Unhealthy);
    assert_eq!(of(Health::Degraded, &passed), Health::Degraded);
    assert_eq!(of(Health::Draining, &failed), Health::Draining);

    for unknown in [checked(None), Checks::new()] {
        let of = |initial| super::of(&member(Health::Healthy), &unknown, initial);
        assert_eq!(of(Initial::Healthy), Health::Healthy);
        assert_eq!(of(Initial::Unhealthy), Health::Unhealthy);
    }
}
