//! The few calls of etcd's API (v3) that a registry needs.
//!
//! Field numbers are those of `etcdserverpb/rpc.proto` and `mvccpb/kv.proto`; they are the protocol.

use std::sync::Arc;
use std::time::Duration;

use tokio_stream::StreamExt as _;
use tonic::Streaming;

use crate::config::gateway::{self, Login};
use crate::datapath::Datapath;
use crate::grpc;

/// A connection to a member of an etcd cluster.
#[derive(Clone, Debug)]
pub(super) struct Etcd {
    client: grpc::Client,
    /// How long an answer may take.
    limit: Duration,
}

impl Etcd {
    /// Connects to one of the members, and logs in if the configuration says so.
    pub(super) async fn connect(
        config: &gateway::Etcd,
        member: usize,
        limit: Duration,
        datapath: Arc<dyn Datapath>,
    ) -> Result<Self, String> {
        let endpoint = &config.endpoints[member];
        let connected = async {
            let client =
                grpc::Client::connect(endpoint, &config.tls, None, limit, datapath).await?;
            let etcd = Self { client, limit };
            match &config.login {
                Some(login) => etcd.log_in(login).await,
                None => Ok(etcd),
            }
        };
        connected.await.map_err(|error| format!("{endpoint}: {error}"))
    }

    async fn log_in(self, login: &Login) -> Result<Self, String> {
        let file = login.password_file.display();
        let password = login.password().map_err(|why| format!("{file}: {why}"))?;
        let request = AuthenticateRequest { name: login.user.clone(), password };
        let AuthenticateResponse { token } =
            self.call("/etcdserverpb.Auth/Authenticate", request).await?;
        let token = token.parse().map_err(|_e| "the server's token is none".to_owned())?;
        Ok(Self { client: self.client.with_header((TOKEN, token)), limit: self.limit })
    }

    async fn call<Q, R>(&self, path: &'static str, request: Q) -> Result<R, String>
    where
        Q: prost::Message + 'static,
        R: prost::Message + Default + 'static,
    {
        self.client.call(path, request, self.limit).await.map_err(|status| grpc::reason(&status))
    }

    /// A new lease that ends `ttl` (whole seconds) after its last renewal.
    pub(super) async fn grant(&self, ttl: Duration) -> Result<i64, String> {
        let request = LeaseGrantRequest { ttl: ttl.as_secs().try_into().unwrap_or(i64::MAX) };
        let granted: LeaseGrantResponse =
            self.call("/etcdserverpb.Lease/LeaseGrant", request).await?;
        Ok(granted.id)
    }

    /// Renews a lease; false if it is gone.
    ///
    /// The call is one for many renewals, but used for one only: it then fails like any other.
    pub(super) async fn renew(&self, id: i64) -> Result<bool, String> {
        let renewal = grpc::within(self.limit, async {
            let requests = tokio_stream::once(LeaseKeepAliveRequest { id });
            let path = "/etcdserverpb.Lease/LeaseKeepAlive";
            let mut answers: Streaming<LeaseKeepAliveResponse> =
                self.client.stream(path, requests).await?;
            answers.message().await
        });
        match renewal.await {
            Err(status) => Err(grpc::reason(&status)),
            Ok(None) => Err("the server has ended the call".into()),
            Ok(Some(answer)) => Ok(answer.ttl > 0),
        }
    }

    /// Ends a lease, and with it the keys that hang on it.
    pub(super) async fn revoke(&self, id: i64) -> Result<(), String> {
        let LeaseRevokeResponse {} =
            self.call("/etcdserverpb.Lease/LeaseRevoke", LeaseRevokeRequest { id }).await?;
        Ok(())
    }

    /// All keys with a prefix.
    pub(super) async fn read(&self, prefix: &str) -> Result<View, String> {
        Ok(self.transact(None, prefix).await?.view)
    }

    /// Writes a key, if it is at the revision that is expected (0: does not exist), and reads all
    /// keys with a prefix as they are after that.
    pub(super) async fn write(&self, write: Write, prefix: &str) -> Result<Written, String> {
        self.transact(Some(write), prefix).await
    }

    async fn transact(&self, write: Option<Write>, prefix: &str) -> Result<Written, String> {
        let read = || RequestOp {
            request: Some(request_op::Request::Range(RangeRequest {
                key: prefix.into(),
                range_end: after(prefix),
            })),
        };
        let mut request =
            TxnRequest { compare: Vec::new(), success: vec![read()], failure: vec![read()] };
        if let Some(Write { key, revision, value, lease, delete }) = write {
            request.compare.push(Compare {
                result: COMPARE_EQUAL,
                target: COMPARE_MOD_REVISION,
                key: key.clone().into(),
                mod_revision: Some(revision),
            });
            let put = PutRequest { key: key.into(), value, lease };
            let put = RequestOp { request: Some(request_op::Request::Put(put)) };
            let delete = delete.map(|key| DeleteRangeRequest { key: key.into() });
            let delete = delete.map(request_op::Request::DeleteRange);
            let delete = delete.map(|request| RequestOp { request: Some(request) });
            // What is read comes after it.
            request.success.splice(0..0, [put].into_iter().chain(delete));
        }
        let answer: TxnResponse = self.call("/etcdserverpb.KV/Txn", request).await?;
        let revision = answer.header.map(|header| header.revision);
        let keys = answer.responses.into_iter().find_map(|response| response.range);
        let (Some(revision), Some(RangeResponse { keys })) = (revision, keys) else {
            return Err("the server's answer is incomplete".into());
        };
        Ok(Written { succeeded: answer.succeeded, view: View { revision, keys } })
    }

    /// What becomes of the keys with a prefix from a revision on.
    pub(super) async fn watch(&self, prefix: &str, revision: i64) -> Result<Watch, String> {
        let create = WatchCreateRequest {
            key: prefix.into(),
            range_end: after(prefix),
            start_revision: revision,
        };
        // The call lasts for as long as requests may come.
        let requests = tokio_stream::once(WatchRequest { create: Some(create) })
            .chain(tokio_stream::pending());
        let answers = self.client.stream("/etcdserverpb.Watch/Watch", requests);
        let answers = grpc::within(self.limit, answers).await;
        Ok(Watch(answers.map_err(|status| grpc::reason(&status))?))
    }
}

/// A key to be written.
#[derive(Clone, Debug)]
pub(super) struct Write {
    pub(super) key: String,
    /// The revision that it is expected at; 0 if it should not exist.
    pub(super) revision: i64,
    pub(super) value: Vec<u8>,
    pub(super) lease: i64,
    /// Another key, which is to be gone with that.
    pub(super) delete: Option<String>,
}

/// What a write has led to.
#[derive(Clone, Debug)]
pub(super) struct Written {
    pub(super) succeeded: bool,
    /// The keys after that.
    pub(super) view: View,
}

/// Keys at one time.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) revision: i64,
    pub(super) keys: Vec<KeyValue>,
}

/// Changes of keys as they come.
#[derive(Debug)]
pub(super) struct Watch(Streaming<WatchResponse>);

impl Watch {
    /// The next changes, in their order. Can be dropped at any time without losing any.
    pub(super) async fn next(&mut self) -> Result<Vec<Event>, String> {
        match self.0.message().await {
            Err(status) => Err(grpc::reason(&status)),
            Ok(None) => Err("the server has ended the watch".into()),
            Ok(Some(answer)) if answer.canceled => {
                Err(format!("the server has ended the watch: {}", answer.cancel_reason))
            }
            Ok(Some(answer)) => Ok(answer.events),
        }
    }
}

/// The end of the range of keys with a prefix: the prefix with its last byte increased.
fn after(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        // A byte of UTF-8 is never 0xff.
        *last += 1;
    }
    end
}

/// The header that says who calls.
const TOKEN: &str = "token";

const COMPARE_EQUAL: i32 = 0;
const COMPARE_MOD_REVISION: i32 = 2;
const EVENT_DELETE: i32 = 1;

#[derive(Clone, PartialEq, prost::Message)]
struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    password: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    token: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    ttl: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LeaseKeepAliveRequest {
    #[prost(int64, tag = "1")]
    id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LeaseKeepAliveResponse {
    /// Seconds; 0 if the lease is gone.
    #[prost(int64, tag = "3")]
    ttl: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LeaseRevokeRequest {
    #[prost(int64, tag = "1")]
    id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LeaseRevokeResponse {}

#[derive(Clone, PartialEq, prost::Message)]
struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    keys: Vec<KeyValue>,
}

/// A key and what is known of it.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(super) mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(super) value: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub(super) lease: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
    #[prost(int64, tag = "3")]
    lease: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Compare {
    #[prost(int32, tag = "1")]
    result: i32,
    #[prost(int32, tag = "2")]
    target: i32,
    #[prost(bytes = "vec", tag = "3")]
    key: Vec<u8>,
    /// One of a choice: it must be there, even if it is 0.
    #[prost(int64, optional, tag = "6")]
    mod_revision: Option<i64>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    success: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    failure: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    header: Option<ResponseHeader>,
    #[prost(bool, tag = "2")]
    succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    responses: Vec<ResponseOp>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ResponseHeader {
    #[prost(int64, tag = "3")]
    revision: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RequestOp {
    #[prost(oneof = "request_op::Request", tags = "1, 2, 3")]
    request: Option<request_op::Request>,
}

mod request_op {
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(super) enum Request {
        #[prost(message, tag = "1")]
        Range(super::RangeRequest),
        #[prost(message, tag = "2")]
        Put(super::PutRequest),
        #[prost(message, tag = "3")]
        DeleteRange(super::DeleteRangeRequest),
    }
}

#[derive(Clone, PartialEq, prost::Message)]
struct ResponseOp {
    #[prost(message, optional, tag = "1")]
    range: Option<RangeResponse>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    create: Option<WatchCreateRequest>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WatchCreateRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    start_revision: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WatchResponse {
    #[prost(bool, tag = "4")]
    canceled: bool,
    #[prost(string, tag = "6")]
    cancel_reason: String,
    #[prost(message, repeated, tag = "11")]
    events: Vec<Event>,
}

/// A change of a key.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Event {
    /// 0: written, 1: gone.
    #[prost(int32, tag = "1")]
    kind: i32,
    /// As it is now; of one that is gone only its name.
    #[prost(message, required, tag = "2")]
    pub(super) key: KeyValue,
}

impl Event {
    pub(super) fn gone(&self) -> bool {
        self.kind == EVENT_DELETE
    }
}
