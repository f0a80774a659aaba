//! Against a DNS server on loopback that says what it is told to, over UDP and TCP.

use std::sync::Mutex;

use hickory_resolver::proto::op::{Message, OpCode};
use hickory_resolver::proto::rr::Record;
use hickory_resolver::proto::rr::rdata::{CNAME, NS, SOA, SRV};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::super::Latest;
use super::super::tests::wait;
use super::*;
use crate::datapath::Inert;

fn sockets() -> Sockets {
    Sockets { datapath: Arc::new(Inert), usual: TokioRuntimeProvider::new() }
}

/// What the server says to a question.
#[derive(Clone)]
enum Reply {
    /// These records, after the aliases that lead to them.
    Records(Vec<Record>),
    /// There are none, for as long as a SOA record says, if there is one.
    None(ResponseCode, Option<u32>),
    /// The server is to blame.
    Failure(ResponseCode),
    /// Others know.
    Referral,
    /// Nothing at all.
    Silence,
}

/// Questions that came, and whether by TCP.
type Asked = Vec<(Name, RecordType, bool)>;

#[derive(Default)]
struct Script {
    replies: HashMap<(Name, RecordType), Reply>,
    asked: Asked,
}

struct Server {
    script: Arc<Mutex<Script>>,
    address: SocketAddr,
    _tasks: JoinSet<()>,
}

fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

impl Server {
    async fn start() -> Self {
        let (udp, tcp) = loop {
            let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            if let Ok(tcp) = TcpListener::bind(udp.local_addr().unwrap()).await {
                break (udp, tcp);
            }
        };
        let address = udp.local_addr().unwrap();
        let script = Arc::new(Mutex::new(Script::default()));
        let mut tasks = JoinSet::new();
        let by_udp = Arc::clone(&script);
        tasks.spawn(async move {
            let mut buffer = [0; 4096];
            loop {
                let (length, from) = udp.recv_from(&mut buffer).await.unwrap();
                if let Some(answer) = answer(&by_udp, &buffer[..length], false) {
                    udp.send_to(&answer, from).await.unwrap();
                }
            }
        });
        let by_tcp = Arc::clone(&script);
        tasks.spawn(async move {
            loop {
                let (mut stream, _) = tcp.accept().await.unwrap();
                let script = Arc::clone(&by_tcp);
                tokio::spawn(async move {
                    while let Ok(length) = stream.read_u16().await {
                        let mut query = vec![0; length.into()];
                        stream.read_exact(&mut query).await.unwrap();
                        if let Some(answer) = answer(&script, &query, true) {
                            stream.write_u16(answer.len().try_into().unwrap()).await.unwrap();
                            stream.write_all(&answer).await.unwrap();
                        }
                    }
                });
            }
        });
        Self { script, address, _tasks: tasks }
    }

    fn say(&self, to: &str, kind: RecordType, reply: Reply) {
        self.script.lock().unwrap().replies.insert((name(to), kind), reply);
    }

    fn addresses(&self, of: &str, ttl: u32, ips: &[&str]) {
        for kind in [RecordType::A, RecordType::AAAA] {
            let records = ips.iter().map(|ip| RData::from(ip.parse::<IpAddr>().unwrap()));
            let records = records.filter(|data| data.record_type() == kind);
            let records = records.map(|data| Record::from_rdata(name(of), ttl, data)).collect();
            self.say(of, kind, Reply::Records(records));
        }
    }

    /// Priority, weight, port, target.
    fn srv(&self, of: &str, ttl: u32, records: &[(u16, u16, u16, &str)]) {
        let records = records.iter().map(|&(priority, weight, port, target)| {
            let srv = SRV::new(priority, weight, port, name(target));
            Record::from_rdata(name(of), ttl, RData::SRV(srv))
        });
        self.say(of, RecordType::SRV, Reply::Records(records.collect()));
    }

    fn times_asked(&self, of: &str, kind: RecordType) -> usize {
        let script = self.script.lock().unwrap();
        script.asked.iter().filter(|asked| (&asked.0, asked.1) == (&name(of), kind)).count()
    }

    /// To be asked for `of`, again as soon as a TTL permits.
    fn config(&self, of: &str, records: Records) -> discovery::Dns {
        discovery::Dns {
            name: of.to_owned(),
            records,
            resolvers: vec![self.address],
            refresh_min: Duration::from_millis(5),
            refresh_max: Duration::from_hours(1),
        }
    }

    fn watch(&self, of: &str, records: Records) -> (JoinSet<()>, watch::Receiver<Latest>) {
        let (feed, latest) = Feed::new();
        let mut task = JoinSet::new();
        task.spawn(Box::new(Dns::new(self.config(of, records), Arc::new(Inert))).watch(feed));
        (task, latest)
    }

    /// One look at `of`.
    async fn look(&self, of: &str, records: Records) -> Result<String, String> {
        let (members, _) = look(&self.config(of, records), &sockets(), &mut Known::default())
            .await
            .map_err(|error| format!("lost: {error}"))?;
        Ok(shown(members.map_err(|reason| format!("refused: {reason}"))?))
    }
}

/// The message for a query; none for a server that is silent.
fn answer(script: &Mutex<Script>, query: &[u8], tcp: bool) -> Option<Vec<u8>> {
    let query = Message::from_vec(query).unwrap();
    let question = query.queries[0].clone();
    let key = (question.name().to_lowercase(), question.query_type());
    let reply = {
        let mut script = script.lock().unwrap();
        script.asked.push((key.0.clone(), key.1, tcp));
        let none = Reply::None(ResponseCode::NXDomain, None);
        script.replies.get(&key).cloned().unwrap_or(none)
    };
    let mut message = Message::response(query.metadata.id, OpCode::Query);
    message.metadata.recursion_available = true;
    message.add_query(question);
    match reply {
        Reply::Records(records) => drop(message.add_answers(records)),
        Reply::None(code, minimum) => {
            message.metadata.response_code = code;
            if let Some(minimum) = minimum {
                let soa = SOA::new(name("ns.test."), name("admin.test."), 1, 1, 1, 1, minimum);
                let record = Record::from_rdata(name("test."), 3600, RData::SOA(soa));
                message.add_authority(record);
            }
        }
        Reply::Failure(code) => message.metadata.response_code = code,
        Reply::Referral => {
            let ns = RData::NS(NS(name("ns.elsewhere.test.")));
            message.add_authority(Record::from_rdata(name("test."), 3600, ns));
        }
        Reply::Silence => return None,
    }
    let bytes = message.to_vec().unwrap();
    if tcp || bytes.len() <= query.max_payload().into() {
        return Some(bytes);
    }
    Some(message.truncate().to_vec().unwrap())
}

fn shown(list: List) -> String {
    let members = list.membership.members().iter().map(|member| {
        let Member { identity, address, weight, priority, .. } = member;
        format!("{identity} {address} w{weight} p{priority}")
    });
    let left_out = list.left_out.into_iter().map(|(why, count)| format!("without {count} {why}"));
    members.chain(left_out).collect::<Vec<_>>().join("\n")
}

fn count(latest: &Latest) -> Option<usize> {
    latest.membership.as_ref().map(|m| m.members().len())
}

const BOTH: Records = Records::Addresses { port: 80, families: Families::Both };
const V4: Records = Records::Addresses { port: 80, families: Families::V4 };
const V6: Records = Records::Addresses { port: 80, families: Families::V6 };

#[tokio::test]
async fn addresses_of_the_families_asked_for() {
    let server = Server::start().await;
    server.addresses("web.test.", 60, &["10.0.0.2", "10.0.0.1", "fd00::1"]);
    let (v4, v6) = (
        "10.0.0.1:80 10.0.0.1:80 w1 p0\n10.0.0.2:80 10.0.0.2:80 w1 p0",
        "[fd00::1]:80 [fd00::1]:80 w1 p0",
    );
    assert_eq!(server.look("web.test", V4).await.unwrap(), v4);
    assert_eq!(server.look("web.test", V6).await.unwrap(), v6);
    assert_eq!(server.look("WEB.test", BOTH).await.unwrap(), format!("{v4}\n{v6}"));
    let before = server.times_asked("web.test.", RecordType::AAAA);
    server.look("web.test", V4).await.unwrap();
    assert_eq!(server.times_asked("web.test.", RecordType::AAAA), before);

    // An alias, with its target in the same answer and without.
    let alias = RData::CNAME(CNAME(name("web.test.")));
    let alias = Record::from_rdata(name("www.test."), 60, alias);
    let target =
        Record::from_rdata(name("web.test."), 60, "10.0.0.7".parse::<IpAddr>().unwrap().into());
    server.say("www.test.", RecordType::A, Reply::Records(vec![alias.clone(), target]));
    assert_eq!(server.look("www.test", V4).await.unwrap(), "10.0.0.7:80 10.0.0.7:80 w1 p0");
    server.say("www.test.", RecordType::A, Reply::Records(vec![alias]));
    assert_eq!(server.look("www.test", V4).await.unwrap(), v4);

    server.addresses("blocked.test.", 60, &["0.0.0.0"]);
    let refused = server.look("blocked.test", V4).await.unwrap_err();
    assert_eq!(refused, "refused: 0.0.0.0: nobody can be reached there");
}

#[tokio::test]
async fn an_answer_too_long_for_udp() {
    let server = Server::start().await;
    let ips: Vec<_> = (0..400).map(|n| format!("10.0.{}.{}", n / 256, n % 256)).collect();
    let ips: Vec<_> = ips.iter().map(String::as_str).collect();
    server.addresses("many.test.", 60, &ips);
    assert_eq!(server.look("many.test", V4).await.unwrap().lines().count(), 400);
    let asked = server.script.lock().unwrap().asked.clone();
    let ways: Vec<bool> = asked.into_iter().map(|(_, _, tcp)| tcp).collect();
    assert_eq!(ways, [false, true]);
}

#[tokio::test]
async fn answers_hold_as_long_as_they_say() {
    let server = Server::start().await;
    server.addresses("day.test.", 86_400, &["10.0.0.1"]);
    server.addresses("seven.test.", 7, &["10.0.0.1"]);
    server.addresses("zero.test.", 0, &["10.0.0.1"]);
    let none = |minimum| Reply::None(ResponseCode::NXDomain, minimum);
    server.say("none.test.", RecordType::A, none(Some(9)));
    server.say("none-ever.test.", RecordType::A, none(Some(86_400)));
    server.say("none-now.test.", RecordType::A, none(None));
    let empty = Reply::None(ResponseCode::NoError, Some(11));
    server.say("no-such-records.test.", RecordType::A, empty);
    let cases = [
        ("day.test", Duration::from_mins(1)),
        ("seven.test", Duration::from_secs(7)),
        ("zero.test", Duration::from_secs(2)),
        ("none.test", Duration::from_secs(9)),
        ("none-ever.test", Duration::from_mins(1)),
        ("none-now.test", Duration::from_secs(2)),
        ("no-such-records.test", Duration::from_secs(11)),
    ];
    for (name, expected) in cases {
        let config = discovery::Dns {
            refresh_min: Duration::from_secs(2),
            refresh_max: Duration::from_mins(1),
            ..server.config(name, V4)
        };
        let before = clock::now();
        let (members, until) = look(&config, &sockets(), &mut Known::default()).await.unwrap();
        members.unwrap();
        let after = clock::now();
        assert!(before + expected <= until && until <= after + expected, "{name}");
    }
}

#[tokio::test]
async fn only_what_has_expired_is_asked_again() {
    let server = Server::start().await;
    server.addresses("web.test.", 0, &["10.0.0.1"]);
    let long =
        Record::from_rdata(name("web.test."), 3600, "fd00::1".parse::<IpAddr>().unwrap().into());
    server.say("web.test.", RecordType::AAAA, Reply::Records(vec![long]));
    let (_task, mut latest) = server.watch("web.test", BOTH);
    wait(&mut latest, |l| l.accepted > 3).await;
    assert!(server.times_asked("web.test.", RecordType::A) > 3);
    assert_eq!(server.times_asked("web.test.", RecordType::AAAA), 1);
    server.addresses("web.test.", 0, &["10.0.0.1", "10.0.0.2"]);
    wait(&mut latest, |l| count(l) == Some(3)).await;
}

#[tokio::test]
async fn a_name_without_records_is_an_empty_list() {
    let server = Server::start().await;
    server.addresses("web.test.", 0, &["10.0.0.1"]);
    let (_task, mut latest) = server.watch("web.test", V4);
    for code in [ResponseCode::NXDomain, ResponseCode::NoError] {
        server.addresses("web.test.", 0, &["10.0.0.1"]);
        wait(&mut latest, |l| count(l) == Some(1)).await;
        server.say("web.test.", RecordType::A, Reply::None(code, Some(0)));
        let empty = wait(&mut latest, |l| count(l) == Some(0)).await;
        assert_eq!(empty.error, None);
    }
}

#[tokio::test]
async fn a_server_that_fails_says_nothing_of_the_members() {
    let server = Server::start().await;
    server.addresses("web.test.", 0, &["10.0.0.1"]);
    let (_task, mut latest) = server.watch("web.test", BOTH);
    let failures = [
        (Reply::Failure(ResponseCode::ServFail), "Server Failure"),
        (Reply::Failure(ResponseCode::Refused), "Query Refused"),
        (Reply::Referral, "only refers to others"),
    ];
    for (failure, reason) in failures {
        server.addresses("web.test.", 0, &["10.0.0.1"]);
        wait(&mut latest, |l| count(l) == Some(1) && l.error.is_none()).await;
        // One family is enough: half an answer is none.
        server.say("web.test.", RecordType::AAAA, failure);
        let lost = wait(&mut latest, |l| l.error.is_some()).await;
        assert!(lost.error.as_ref().unwrap().contains(reason), "{lost:?}");
        assert_eq!((count(&lost), lost.refused), (Some(1), 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_silent_or_gone() {
    let server = Server::start().await;
    server.say("web.test.", RecordType::A, Reply::Silence);
    let lost = server.look("web.test", V4).await.unwrap_err();
    assert!(lost.contains("timed out"), "{lost}");
    let address = server.address;
    drop(server);
    let config = discovery::Dns {
        name: "web.test".to_owned(),
        records: V4,
        resolvers: vec![address],
        refresh_min: Duration::from_secs(1),
        refresh_max: Duration::from_mins(1),
    };
    look(&config, &sockets(), &mut Known::default()).await.unwrap_err();
}

#[tokio::test]
async fn srv_records() {
    let server = Server::start().await;
    let of = "_http._tcp.web.test.";
    server.srv(
        of,
        60,
        &[
            (10, 0, 8080, "B.test."),
            (10, 5, 8080, "a.test."),
            (20, 1, 81, "two.test."),
            (0, 1, 80, "gone.test."),
            (0, 1, 80, "."),
        ],
    );
    server.addresses("a.test.", 60, &["10.0.0.1"]);
    server.addresses("b.test.", 60, &["fd00::b"]);
    server.addresses("two.test.", 60, &["10.0.0.2", "10.0.0.3"]);
    let expected = "a.test:8080 10.0.0.1:8080 w5 p10\n\
                    two.test:81/10.0.0.2:81 10.0.0.2:81 w1 p20\n\
                    two.test:81/10.0.0.3:81 10.0.0.3:81 w1 p20\n\
                    b.test:8080 [fd00::b]:8080 w1 p10\n\
                    without 1 targets_without_address";
    assert_eq!(server.look(of, Records::Srv).await.unwrap(), expected);

    // An alias in front of them, with the records in the same answer and without.
    let alias = RData::CNAME(CNAME(name(of)));
    let alias = Record::from_rdata(name("alias.test."), 60, alias);
    server.say("alias.test.", RecordType::CNAME, Reply::Records(vec![alias.clone()]));
    let srv = RData::SRV(SRV::new(0, 1, 80, name("a.test.")));
    let srv = Record::from_rdata(name(of), 60, srv);
    server.say("alias.test.", RecordType::SRV, Reply::Records(vec![alias.clone(), srv]));
    assert_eq!(server.look("alias.test", Records::Srv).await.unwrap(), expected);
    server.say("alias.test.", RecordType::SRV, Reply::Records(vec![alias]));
    assert_eq!(server.look("alias.test", Records::Srv).await.unwrap(), expected);

    server.srv("none.test.", 60, &[(0, 0, 0, ".")]);
    assert_eq!(server.look("none.test", Records::Srv).await.unwrap(), "");
    assert_eq!(server.look("nx.test", Records::Srv).await.unwrap(), "");
    server.srv("zero.test.", 60, &[(0, 0, 0, "a.test.")]);
    let refused = server.look("zero.test", Records::Srv).await.unwrap_err();
    assert_eq!(refused, "refused: a.test:0: 10.0.0.1: the port must be 1..=65535");

    server.say("two.test.", RecordType::AAAA, Reply::Failure(ResponseCode::ServFail));
    let lost = server.look(of, Records::Srv).await.unwrap_err();
    assert!(lost.starts_with("lost: "), "{lost}");
}

#[tokio::test]
async fn the_order_of_srv_records_does_not_matter() {
    let server = Server::start().await;
    server.addresses("a.test.", 60, &["10.0.0.1"]);
    server.addresses("b.test.", 60, &["10.0.0.1"]);
    let [a, b] = [(0, 1, 80, "a.test."), (0, 2, 80, "b.test.")];
    server.srv("web.test.", 60, &[a, b]);
    server.srv("turned.test.", 60, &[b, a]);
    let expected = "a.test:80 10.0.0.1:80 w1 p0";
    assert_eq!(server.look("web.test", Records::Srv).await.unwrap(), expected);
    assert_eq!(server.look("turned.test", Records::Srv).await.unwrap(), expected);
}
