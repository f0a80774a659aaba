//! Rules of `[gateway]`.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use super::super::{address, raw};
use super::check::Checker;
use super::{absolute, quoted, quoted_list, tls};
use crate::config::gateway::{Etcd, GATEWAYS_MAX, Gateway, Index, Login};

/// etcd rounds shorter ones up.
const TTL_MIN: Duration = Duration::from_secs(2);

pub(super) fn gateway(check: &mut Checker, raw: raw::Gateway) -> Gateway {
    let etcd = raw.etcd.map(|raw| etcd(check, raw));
    let (index, etcd) = match (raw.index, etcd) {
        (None, Some(etcd)) => {
            let rule = "belongs to `index`; with etcd alone the registry knows";
            check.absent("gateway.count", raw.count, rule);
            return Gateway::Claimed(etcd);
        }
        (None, None) => {
            check.broken("gateway", "", "needs `index`, or `etcd` to claim one");
            return Gateway::default();
        }
        (Some(raw), etcd) => (index(check, raw), etcd),
    };
    if raw.count.is_none() {
        check.broken("gateway.count", "", "is needed: how many gateways there are");
    }
    let count = check.number("gateway.count", raw.count, GATEWAYS_MAX, 1..=GATEWAYS_MAX);
    if let Some(Index::Number(index)) = index
        && index >= count
    {
        let rule = format!("must be below gateway.count ({count}); the first one is 0");
        check.broken("gateway.index", index, rule);
    }
    Gateway::Configured {
        index: index.unwrap_or(Index::Number(0)),
        count: NonZeroU32::new(count).unwrap_or(NonZeroU32::MIN),
        registry: etcd,
    }
}

fn index(check: &mut Checker, raw: raw::Index) -> Option<Index> {
    let rule = match raw {
        raw::Index::Number(number) => match u32::try_from(number) {
            Ok(index) if index < GATEWAYS_MAX => return Some(Index::Number(index)),
            _ => {
                let rule = format!("must be 0..={}", GATEWAYS_MAX - 1);
                check.broken("gateway.index", number, rule);
                return None;
            }
        },
        raw::Index::Word(word) if word == "hostname" => return Some(Index::Hostname),
        raw::Index::Word(word) => {
            let rule =
                "must be a number, \"hostname\", { file = \"/path\" } or { env = \"VARIABLE\" }";
            check.broken("gateway.index", quoted(&word), rule);
            return None;
        }
        raw::Index::Table(raw::IndexTable { file: Some(path), env: None }) => {
            return absolute(check, "gateway.index.file", path).map(Index::File);
        }
        raw::Index::Table(raw::IndexTable { file: None, env: Some(name) }) => {
            if !name.is_empty() && !name.contains(['=', '\0']) {
                return Some(Index::Env(name));
            }
            "must be the name of an environment variable"
        }
        raw::Index::Table(_) => "needs either `file` or `env`",
    };
    check.broken("gateway.index", "", rule);
    None
}

fn etcd(check: &mut Checker, raw: raw::Etcd) -> Etcd {
    if raw.endpoints.is_empty() {
        check.broken("gateway.etcd.endpoints", "", "needs at least one");
    }
    let mut schemes = Vec::new();
    for text in &raw.endpoints {
        match address::server(text) {
            Ok(scheme) => schemes.push(scheme),
            Err(rule) => check.broken("gateway.etcd.endpoints", quoted(text), rule),
        }
    }
    let tls = tls::tls(check, "gateway.etcd.tls", raw.tls, &schemes);
    let login = login(check, raw.user, raw.password_file);
    if raw.endpoints.iter().any(|a| raw.endpoints.iter().filter(|b| *b == a).count() > 1) {
        check.broken("gateway.etcd.endpoints", quoted_list(&raw.endpoints), "one is given twice");
    }
    let plain = |c: char| c.is_ascii_graphic();
    if !raw.prefix.starts_with('/') || raw.prefix.ends_with('/') || !raw.prefix.chars().all(plain) {
        let rule = "must be like \"/broker/fleet-a\": what the keys of this fleet, and of no other, start with";
        check.broken("gateway.etcd.prefix", quoted(&raw.prefix), rule);
    }
    if raw.name.as_deref() == Some("") {
        check.broken("gateway.etcd.name", quoted(""), "must not be empty");
    }
    let ttl = check.duration_from(
        "gateway.etcd.ttl",
        raw.ttl.as_deref(),
        Duration::from_secs(10),
        TTL_MIN,
    );
    Etcd { endpoints: raw.endpoints, tls, login, prefix: raw.prefix, ttl, name: raw.name }
}

fn login(check: &mut Checker, user: Option<String>, file: Option<PathBuf>) -> Option<Login> {
    const USER: &str = "gateway.etcd.user";
    const FILE: &str = "gateway.etcd.password_file";
    let (user, file) = match (user, file) {
        (None, None) => return None,
        (Some(user), Some(file)) => (user, file),
        (Some(user), None) => {
            check.broken(USER, quoted(&user), "needs `password_file`");
            return None;
        }
        (None, Some(file)) => {
            check.broken(FILE, quoted(&file.to_string_lossy()), "needs `user`");
            return None;
        }
    };
    if user.is_empty() {
        check.broken(USER, quoted(&user), "must not be empty");
    }
    let login = Login { user, password_file: absolute(check, FILE, file)? };
    if let Err(why) = login.password() {
        check.broken(FILE, quoted(&login.password_file.to_string_lossy()), why);
    }
    Some(login)
}
