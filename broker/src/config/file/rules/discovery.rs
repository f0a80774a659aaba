//! Rules of `[service.discovery]`.

use std::time::Duration;

use super::super::{address, raw};
use super::check::Checker;
use super::{absolute, addresses, quoted, tls};
use crate::config::discovery::{
    Discovery, Dns, Eds, EdsApi, Families, File, Kubernetes, OnEmpty, Port, Records, Source,
};

/// A server that is asked more often than this has reason to complain.
const REFRESH_MIN: Duration = Duration::from_millis(100);
/// A name of 255 bytes on the wire (RFC 1035 section 3.1), written with dots and without the last.
const DNS_NAME_LEN_MAX: usize = 253;
/// RFC 1035 section 2.3.4.
const LABEL_LEN_MAX: usize = 63;

/// The table that says where members come from; `None` without one, or if it is broken.
pub(super) fn discovery(
    check: &mut Checker,
    service: &str,
    raw: raw::Discovery,
) -> Option<Discovery> {
    let debounce = check.duration_from(
        "discovery.debounce",
        raw.debounce.as_deref(),
        Duration::from_millis(200),
        Duration::ZERO,
    );
    let debounce_max = check.duration_from(
        "discovery.debounce_max",
        raw.debounce_max.as_deref(),
        Duration::from_secs(2).max(debounce),
        Duration::ZERO,
    );
    if debounce > debounce_max {
        check.broken(
            "discovery.debounce",
            quoted(raw.debounce.as_deref().unwrap_or("200ms")),
            format!(
                "must not be longer than discovery.debounce_max ({})",
                humantime::format_duration(debounce_max)
            ),
        );
    }
    let on_empty = check.choice(
        "discovery.on_empty",
        raw.on_empty.as_deref(),
        &[("keep", OnEmpty::Keep), ("drop", OnEmpty::Drop)],
        Some(OnEmpty::default()),
    );
    let sources = [
        raw.file.map(|raw| file(check, raw)),
        raw.dns.map(|raw| dns(check, &raw)),
        raw.kubernetes.map(|raw| kubernetes(check, raw)),
        raw.eds.map(|raw| eds(check, service, raw)),
    ];
    let [source] = sources.into_iter().flatten().collect::<Vec<_>>().try_into().unwrap_or_else(
        |found: Vec<_>| {
            let rule = "needs exactly one of `file`, `dns`, `kubernetes`, `eds`";
            check.broken("discovery", format_args!("({} sources)", found.len()), rule);
            [None]
        },
    );
    Some(Discovery { source: source?, debounce, debounce_max, on_empty: on_empty? })
}

fn file(check: &mut Checker, raw: raw::DiscoveryFile) -> Option<Source> {
    let path = absolute(check, "discovery.file.path", raw.path)?;
    Some(Source::File(File { path }))
}

fn dns(check: &mut Checker, raw: &raw::DiscoveryDns) -> Option<Source> {
    let usable = |label: &str| is_label(label, |c| c.is_ascii_alphanumeric() || c == '_');
    let relative = raw.name.strip_suffix('.').unwrap_or(&raw.name);
    // The last label of an IPv4 address is a number, and that of a name is not (RFC 1123 2.1).
    let number = relative.rsplit('.').next().is_some_and(|l| l.bytes().all(|b| b.is_ascii_digit()));
    if relative.len() > DNS_NAME_LEN_MAX || number || !relative.split('.').all(usable) {
        let rule = "must be a full DNS name, such as origins.example.com";
        check.broken("discovery.dns.name", quoted(&raw.name), rule);
    }
    let families = check.choice(
        "discovery.dns.record",
        raw.record.as_deref(),
        &[
            ("address", Some(Families::Both)),
            ("a", Some(Families::V4)),
            ("aaaa", Some(Families::V6)),
            ("srv", None),
        ],
        Some(Some(Families::Both)),
    );
    let records = if let Some(Some(families)) = families {
        if raw.port.is_none() {
            let rule = "is needed: only `record = \"srv\"` brings ports of its own";
            check.broken("discovery.dns.port", "", rule);
        }
        let port = check.number("discovery.dns.port", raw.port, 1, 1..=u16::MAX.into());
        Records::Addresses { port: port.try_into().ok()?, families }
    } else {
        let rule = "belongs to addresses; SRV records bring ports of their own";
        check.absent("discovery.dns.port", raw.port.filter(|_| families.is_some()), rule);
        Records::Srv
    };
    let resolvers = addresses(check, "discovery.dns.resolvers", &raw.resolvers, address::origin);
    let refresh_min = check.duration_from(
        "discovery.dns.refresh_min",
        raw.refresh_min.as_deref(),
        Duration::from_secs(1),
        REFRESH_MIN,
    );
    let refresh_max = check.duration_from(
        "discovery.dns.refresh_max",
        raw.refresh_max.as_deref(),
        Duration::from_mins(1).max(refresh_min),
        REFRESH_MIN,
    );
    if refresh_min > refresh_max {
        check.broken(
            "discovery.dns.refresh_min",
            quoted(raw.refresh_min.as_deref().unwrap_or("1s")),
            format!(
                "must not be longer than discovery.dns.refresh_max ({})",
                humantime::format_duration(refresh_max)
            ),
        );
    }
    Some(Source::Dns(Dns {
        name: relative.to_owned(),
        records,
        resolvers,
        refresh_min,
        refresh_max,
    }))
}

fn kubernetes(check: &mut Checker, raw: raw::DiscoveryKubernetes) -> Option<Source> {
    let mut name = |key: &str, name: String| {
        if !is_label(&name, |c| c.is_ascii_lowercase() || c.is_ascii_digit()) {
            let rule = format!("must be 1..={LABEL_LEN_MAX} of a-z 0-9 -, as Kubernetes wants it");
            check.broken(key, quoted(&name), rule);
        }
        name
    };
    let service = name("discovery.kubernetes.service", raw.service);
    let namespace = raw.namespace.map(|text| name("discovery.kubernetes.namespace", text));
    let port = match raw.port {
        raw::PortOrName::Name(text) => Port::Named(name("discovery.kubernetes.port", text)),
        raw::PortOrName::Number(number) => {
            let allowed = 1..=u16::MAX.into();
            let number = check.number("discovery.kubernetes.port", Some(number), 1, allowed);
            Port::Number(number.try_into().ok()?)
        }
    };
    let kubeconfig = match raw.kubeconfig {
        Some(path) => Some(absolute(check, "discovery.kubernetes.kubeconfig", path)?),
        None => None,
    };
    if raw.zone.as_deref() == Some("") {
        check.broken("discovery.kubernetes.zone", quoted(""), "must not be empty");
    }
    let (context, zone) = (raw.context, raw.zone);
    Some(Source::Kubernetes(Kubernetes { service, namespace, port, kubeconfig, zone, context }))
}

/// A part of a name: of these characters and hyphens, which are neither the first nor the last.
fn is_label(text: &str, usable: impl Fn(char) -> bool) -> bool {
    (1..=LABEL_LEN_MAX).contains(&text.len())
        && text.chars().all(|c| usable(c) || c == '-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn eds(check: &mut Checker, service: &str, raw: raw::DiscoveryEds) -> Option<Source> {
    let scheme = address::server(&raw.server);
    if let Err(rule) = &scheme {
        check.broken("discovery.eds.server", quoted(&raw.server), rule);
    }
    let tls = tls::tls(
        check,
        "discovery.eds.tls",
        raw.tls,
        scheme.as_ref().map_or(&[], std::slice::from_ref),
    );
    let mut name = |key: &str, name: String| {
        if name.is_empty() {
            check.broken(key, quoted(&name), "must not be empty");
        }
        name
    };
    let cluster = name("discovery.eds.cluster", raw.cluster.unwrap_or_else(|| service.to_owned()));
    let node_id = name("discovery.eds.node_id", raw.node_id);
    let node_cluster = raw.node_cluster.unwrap_or_else(|| "broker".to_owned());
    let api = check.choice(
        "discovery.eds.api",
        raw.api.as_deref(),
        &[("sotw", EdsApi::Whole), ("delta", EdsApi::Delta)],
        Some(EdsApi::default()),
    );
    let initial_fetch_timeout = check.duration(
        "discovery.eds.initial_fetch_timeout",
        raw.initial_fetch_timeout.as_deref(),
        Duration::from_secs(15),
    );
    Some(Source::Eds(Eds {
        server: raw.server,
        tls,
        cluster,
        node_id,
        node_cluster,
        aggregated: raw.ads.unwrap_or(true),
        api: api?,
        initial_fetch_timeout,
    }))
}
