//! Rules of the `tls` tables.

use rustls::pki_types::ServerName;

use super::super::address::Scheme;
use super::super::raw;
use super::check::Checker;
use super::{absolute, quoted};
use crate::config::tls::{Identity, Tls};

/// The table at `at`, next to servers that are spoken to in these ways.
pub(super) fn tls(check: &mut Checker, at: &str, raw: Option<raw::Tls>, schemes: &[Scheme]) -> Tls {
    let Some(raw) = raw else { return Tls::default() };
    if schemes.contains(&Scheme::Http) {
        check.broken(at, "", "belongs to https://, and there is an http:// next to it");
    }
    let key = |name: &str| format!("{at}.{name}");
    let mut path = |name: &str, path| absolute(check, &key(name), path);
    let ca = raw.ca.and_then(|ca| path("ca", ca));
    let certificate = raw.certificate.map(|certificate| path("certificate", certificate));
    let secret = raw.key.map(|secret| path("key", secret));
    let identity = match (certificate, secret) {
        (Some(Some(certificate)), Some(Some(key))) => Some(Identity { certificate, key }),
        (Some(_), None) => {
            check.broken(&key("certificate"), "", "needs its `key`, too");
            None
        }
        (None, Some(_)) => {
            check.broken(&key("key"), "", "needs its `certificate`, too");
            None
        }
        _ => None,
    };
    if let Some(name) = &raw.server_name
        && ServerName::try_from(name.as_str()).is_err()
    {
        check.broken(&key("server_name"), quoted(name), "must be a DNS name or an IP address");
    }
    let tls = Tls { ca, identity, server_name: raw.server_name };
    if let Err(unusable) = tls.read() {
        let path = quoted(&unusable.path.to_string_lossy());
        check.broken(&key(unusable.key), path, unusable.why);
    }
    tls
}
