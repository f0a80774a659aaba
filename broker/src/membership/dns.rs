//! Members from DNS: the addresses of a name, or its SRV records.
//!
//! Answers are kept for as long as their TTL says, within bounds, and asked for again then. A name
//! that does not exist, or has no such records, is an empty list (RFC 2308 calls both negative
//! answers, and the zone's SOA says how long they hold). A server that fails says nothing about the
//! members; the last list stays. A list is made of complete answers only: if one of the names that
//! SRV records lead to cannot be resolved, the whole look failed.
//!
//! The name is taken as it stands. Neither search domains nor `/etc/hosts` apply: every gateway
//! must see the same list.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use hickory_resolver::Resolver;
use hickory_resolver::config::{
    ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts,
};
use hickory_resolver::net::runtime::iocompat::AsyncIoTokioAsStd;
use hickory_resolver::net::runtime::{RuntimeProvider, TokioRuntimeProvider};
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::op::ResponseCode;
use hickory_resolver::proto::rr::{Name, RData, RecordType};

use super::{Feed, LeftOut, List, Member, Source, document, rng};
use crate::clock;
use crate::config::discovery::{self, Families, Records};
use crate::datapath::Datapath;
use crate::outbound;
use crate::pool::backoff::Backoff;

/// Questions under way at once: SRV records may lead to hundreds of names.
const QUESTIONS_MAX: usize = 16;

/// How long a connection may take, if the resolver does not say.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Aliases that are followed one after the other.
const ALIASES_MAX: usize = 8;

/// A name to look up again and again.
pub struct Dns {
    config: discovery::Dns,
    datapath: Arc<dyn Datapath>,
}

impl Dns {
    /// The name that the configuration says, and how to ask for it. Sockets are marked in `datapath`
    /// as the broker's own.
    #[must_use]
    pub fn new(config: discovery::Dns, datapath: Arc<dyn Datapath>) -> Self {
        Self { config, datapath }
    }
}

impl Source for Dns {
    fn watch(self: Box<Self>, feed: Feed) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let Self { config, datapath } = *self;
            let sockets = Sockets { datapath, usual: TokioRuntimeProvider::new() };
            let mut known = Known::default();
            let mut backoff = Backoff::new(config.refresh_min, config.refresh_max);
            let mut rng = rng();
            while !feed.is_closed() {
                match look(&config, &sockets, &mut known).await {
                    Ok((members, until)) => {
                        backoff.succeed();
                        match members {
                            Ok(list) => feed.accept(list, ""),
                            Err(reason) => {
                                feed.refuse(format_args!("{}: {reason}", config.name));
                            }
                        }
                        tokio::time::sleep_until(until.into()).await;
                    }
                    Err(error) => {
                        feed.lost(format_args!("{}: {error}", config.name));
                        tokio::time::sleep(backoff.fail(clock::now(), &mut rng)).await;
                    }
                }
            }
        })
    }
}

/// What was asked.
type Question = (Name, RecordType);

/// Answers that still hold.
type Known = HashMap<Question, Answer>;

/// The records of one name and type; none if there are none.
#[derive(Clone, Debug)]
struct Answer {
    records: Vec<RData>,
    until: Instant,
}

/// The list as it is now, if it can be used, and until when it holds.
async fn look(
    config: &discovery::Dns,
    sockets: &Sockets,
    known: &mut Known,
) -> Result<(Result<List, String>, Instant), NetError> {
    // Made anew for each look: so it has no memory beside `known`, and follows resolv.conf.
    let asker = Asker { resolver: resolver(&config.resolvers, sockets.clone())?, config };
    let mut name = Name::from_ascii(&config.name)?;
    name.set_fqdn(true);
    let now = clock::now();
    known.retain(|_, answer| answer.until > now);

    let (port, families) = match config.records {
        Records::Addresses { port, families } => (port, families),
        Records::Srv => return look_srv(&asker, known, name).await,
    };
    let types: &[RecordType] = match families {
        Families::Both => &[RecordType::A, RecordType::AAAA],
        Families::V4 => &[RecordType::A],
        Families::V6 => &[RecordType::AAAA],
    };
    let until = asker.ask(known, types.iter().map(|&kind| (name.clone(), kind))).await?;
    let members = types
        .iter()
        .flat_map(|&kind| ips(known, &name, kind))
        .map(|ip| Ok(Member::at(document::address(ip, port.into())?)))
        .collect::<Result<_, String>>();
    Ok((members.and_then(document::membership).map(List::from), until))
}

/// Members from SRV records (RFC 2782) and the addresses that they lead to.
///
/// A member is called by the name and port of its record: the name of a machine outlives its
/// address, and subsets stay as they are when it gets another one. Where a name has several
/// addresses, [`super::Membership::new`] tells them apart by address.
async fn look_srv(
    asker: &Asker<'_>,
    known: &mut Known,
    name: Name,
) -> Result<(Result<List, String>, Instant), NetError> {
    let mut until = asker.ask(known, [(name.clone(), RecordType::SRV)]).await?;
    // In an order of its own, because servers like to turn theirs: where two records lead to one
    // address, every gateway must take the same one.
    let mut targets = BTreeSet::new();
    let mut left_out = LeftOut::new();
    for record in &known[&(name, RecordType::SRV)].records {
        // A target of "." says that the service is not to be had there.
        if let RData::SRV(srv) = record
            && !srv.target.is_root()
        {
            let target = srv.target.to_lowercase();
            targets.insert((srv.priority, target, srv.port, srv.weight));
        }
    }
    if !targets.is_empty() {
        let questions: BTreeSet<Question> = targets
            .iter()
            .flat_map(|(_, target, ..)| {
                [RecordType::A, RecordType::AAAA].map(|kind| (target.clone(), kind))
            })
            .collect();
        until = until.min(asker.ask(known, questions).await?);
    }
    let mut members = Vec::new();
    for (priority, target, port, weight) in targets {
        let text = target.to_ascii();
        let identity = format!("{}:{port}", text.trim_end_matches('.'));
        let before = members.len();
        for kind in [RecordType::A, RecordType::AAAA] {
            for ip in ips(known, &target, kind) {
                let address = match document::address(ip, port.into()) {
                    Ok(address) => address,
                    Err(reason) => return Ok((Err(format!("{identity}: {reason}")), until)),
                };
                members.push(Member {
                    identity: identity.clone(),
                    priority: priority.into(),
                    // 0 is for records that others should nearly always be preferred to.
                    weight: NonZeroU32::new(weight.into()).unwrap_or(NonZeroU32::MIN),
                    ..Member::at(address)
                });
            }
        }
        if members.len() == before {
            *left_out.entry("targets_without_address").or_default() += 1;
        }
    }
    Ok((document::membership(members).map(|membership| List { membership, left_out }), until))
}

fn ips(known: &Known, name: &Name, kind: RecordType) -> Vec<IpAddr> {
    let answer = known.get(&(name.clone(), kind));
    answer.iter().flat_map(|answer| &answer.records).filter_map(RData::ip_addr).collect()
}

struct Asker<'a> {
    resolver: Resolver<Sockets>,
    config: &'a discovery::Dns,
}

impl Asker<'_> {
    /// Asks what is not known, and says until when all the answers hold.
    async fn ask(
        &self,
        known: &mut Known,
        questions: impl IntoIterator<Item = Question>,
    ) -> Result<Instant, NetError> {
        let mut until = clock::now() + self.config.refresh_max;
        let mut unknown = Vec::new();
        for question in questions {
            match known.get(&question) {
                Some(answer) => until = until.min(answer.until),
                None => unknown.push(question),
            }
        }
        let answers: Vec<_> = stream::iter(unknown)
            .map(|(name, kind)| async move {
                let (records, ttl) = self.follow(name.clone(), kind).await?;
                let until = clock::now()
                    + Duration::from_secs(ttl.into())
                        .clamp(self.config.refresh_min, self.config.refresh_max);
                Ok::<_, NetError>(((name, kind), Answer { records, until }))
            })
            .buffer_unordered(QUESTIONS_MAX)
            .try_collect()
            .await?;
        for (question, answer) in answers {
            until = until.min(answer.until);
            known.insert(question, answer);
        }
        Ok(until)
    }

    /// Asks for records, and for those of the name's alias where the resolver does not follow it:
    /// it takes the target of a SRV record for one more alias, and loses the records of an aliased
    /// name on the way.
    async fn follow(
        &self,
        mut name: Name,
        kind: RecordType,
    ) -> Result<(Vec<RData>, u32), NetError> {
        let (mut records, mut ttl) = self.question(&name, kind).await?;
        let mut aliases_ttl = u32::MAX;
        for _ in 0..ALIASES_MAX {
            if kind != RecordType::SRV || !records.is_empty() {
                break;
            }
            let (alias, alias_ttl) = self.question(&name, RecordType::CNAME).await?;
            let Some(RData::CNAME(alias)) = alias.into_iter().next() else { break };
            name = alias.0;
            aliases_ttl = aliases_ttl.min(alias_ttl);
            (records, ttl) = self.question(&name, kind).await?;
        }
        Ok((records, ttl.min(aliases_ttl)))
    }

    /// One question: the records, and for how many seconds they, or their absence, hold.
    async fn question(&self, name: &Name, kind: RecordType) -> Result<(Vec<RData>, u32), NetError> {
        match self.resolver.lookup(name.clone(), kind).await {
            Ok(lookup) => {
                let ttl = lookup.answers().iter().map(|record| record.ttl).min().unwrap_or(0);
                let records = lookup.answers().iter().map(|record| &record.data);
                Ok((records.filter(|data| data.record_type() == kind).cloned().collect(), ttl))
            }
            Err(NetError::Dns(DnsError::NoRecordsFound(none))) => {
                // RFC 2308 section 2.2: a server that only names other servers knows nothing.
                let referral = none.soa.is_none() && none.ns.is_some();
                if none.response_code == ResponseCode::NoError && referral {
                    return Err(NetError::Msg(format!(
                        "the server only refers to others for {name}; it must resolve names itself"
                    )));
                }
                // Without a SOA record it must not be kept (RFC 2308 section 5).
                Ok((Vec::new(), none.negative_ttl.unwrap_or(0)))
            }
            Err(error) => Err(error),
        }
    }
}

fn resolver(servers: &[SocketAddr], sockets: Sockets) -> Result<Resolver<Sockets>, NetError> {
    let mut builder = if servers.is_empty() {
        Resolver::builder(sockets).map_err(|error| match error {
            NetError::Io(error) => {
                io::Error::new(error.kind(), format!("resolv.conf: {error}")).into()
            }
            error => error,
        })?
    } else {
        let servers = servers.iter().map(|server| {
            let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()].map(|mut c| {
                c.port = server.port();
                c
            });
            NameServerConfig::new(server.ip(), true, connections.into())
        });
        let config = ResolverConfig::from_name_servers(servers.collect());
        Resolver::builder_with_config(config, sockets).with_options(ResolverOpts::default())
    };
    builder.options_mut().use_hosts_file = ResolveHosts::Never;
    builder.build()
}

/// What the resolver asks through: tokio's sockets, those over TCP marked as the broker's own. Others
/// are neither intercepted nor counted.
#[derive(Clone)]
struct Sockets {
    datapath: Arc<dyn Datapath>,
    usual: TokioRuntimeProvider,
}

impl RuntimeProvider for Sockets {
    type Handle = <TokioRuntimeProvider as RuntimeProvider>::Handle;
    type Timer = <TokioRuntimeProvider as RuntimeProvider>::Timer;
    type Udp = <TokioRuntimeProvider as RuntimeProvider>::Udp;
    type Tcp = <TokioRuntimeProvider as RuntimeProvider>::Tcp;

    fn create_handle(&self) -> Self::Handle {
        self.usual.create_handle()
    }

    fn connect_tcp(
        &self,
        server: SocketAddr,
        from: Option<SocketAddr>,
        limit: Option<Duration>,
    ) -> Pin<Box<dyn Send + Future<Output = io::Result<Self::Tcp>>>> {
        let socket = outbound::socket(server, &*self.datapath);
        Box::pin(async move {
            let socket = socket?;
            if let Some(from) = from {
                socket.bind(from)?;
            }
            let connecting = socket.connect(server);
            let connected = tokio::time::timeout(limit.unwrap_or(CONNECT_LIMIT), connecting).await;
            Ok(AsyncIoTokioAsStd(connected??))
        })
    }

    fn bind_udp(
        &self,
        from: SocketAddr,
        server: SocketAddr,
    ) -> Pin<Box<dyn Send + Future<Output = io::Result<Self::Udp>>>> {
        self.usual.bind_udp(from, server)
    }
}

#[cfg(test)]
mod tests;
