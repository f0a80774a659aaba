//! `tls` tables and logins.

use std::fs;
use std::path::Path;

use super::*;
use crate::config::tls::Identity;

/// A certificate and its key in files; where they are.
fn certificate(directory: &Path, name: &str) -> [String; 2] {
    let issued = rcgen::generate_simple_self_signed(vec![name.to_owned()]).unwrap();
    let files = [("pem", issued.cert.pem()), ("key", issued.signing_key.serialize_pem())];
    files.map(|(kind, text)| {
        let path = directory.join(format!("{name}.{kind}"));
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    })
}

#[test]
fn tls_to_etcd_and_control_planes() {
    let directory = tempfile::tempdir().unwrap();
    let [ca, key] = certificate(directory.path(), "a");
    let [_, other_key] = certificate(directory.path(), "b");
    let password = directory.path().join("password");
    fs::write(&password, "secret\n").unwrap();
    let etcd = |endpoints: &str, keys: &str| {
        format!("[gateway.etcd]\nendpoints = {endpoints}\nprefix = \"/broker/a\"\n{keys}")
    };
    let https = r#"["https://a:2379", "https://b:2379"]"#;
    let all = format!(
        "user = \"edge\"\npassword_file = {password:?}\ntls = {{ ca = {ca:?}, \
         certificate = {ca:?}, key = {key:?}, server_name = \"etcd.test\" }}"
    );
    let parsed = parsed(&format!("{}\n{MINIMAL}", etcd(https, &all)));
    let Gateway::Claimed(found) = parsed.gateway else { panic!("{:?}", parsed.gateway) };
    let identity = Identity { certificate: (&ca).into(), key: (&key).into() };
    let expected = Tls {
        ca: Some((&ca).into()),
        identity: Some(identity),
        server_name: Some("etcd.test".into()),
    };
    assert_eq!(found.tls, expected);
    assert_eq!(
        found.login.map(|l| (l.user.clone(), l.password())),
        Some(("edge".into(), Ok("secret".into())))
    );

    let wrong = |endpoints: &str, keys: &str, expected: &[&str]| {
        check_gateway(&etcd(endpoints, keys), expected);
    };
    wrong(
        r#"["http://a:2379", "https://b:2379"]"#,
        &format!("tls = {{ ca = {ca:?} }}"),
        &["gateway.etcd.tls: belongs to https://, and there is an http:// next to it"],
    );
    let at = |name: &str, rule: &str| format!("gateway.etcd.tls.{name}: {rule}");
    let found =
        |name: &str, path: &str, rule: &str| format!("gateway.etcd.tls.{name} = {path:?}: {rule}");
    let none = directory.path().join("none").to_str().unwrap().to_owned();
    for (keys, expected) in [
        (
            format!("ca = {none:?}"),
            found("ca", &none, "cannot be read: No such file or directory (os error 2)"),
        ),
        (
            format!("ca = {key:?}"),
            found("ca", &key, "has no certificate in PEM (-----BEGIN CERTIFICATE-----)"),
        ),
        (
            "ca = \"ca.pem\"".into(),
            found(
                "ca",
                "ca.pem",
                "must be an absolute path: the daemon's working directory is nobody's",
            ),
        ),
        (format!("certificate = {ca:?}"), at("certificate", "needs its `key`, too")),
        (format!("key = {key:?}"), at("key", "needs its `certificate`, too")),
        (
            format!("certificate = {ca:?}, key = {ca:?}"),
            found(
                "key",
                &ca,
                "has no private key in PEM (-----BEGIN PRIVATE KEY-----) that is not encrypted",
            ),
        ),
        (
            format!("certificate = {ca:?}, key = {other_key:?}"),
            found(
                "key",
                &other_key,
                &format!("does not go with {ca}: keys may not be consistent: KeyMismatch"),
            ),
        ),
        (
            "server_name = \"a b\"".into(),
            found("server_name", "a b", "must be a DNS name or an IP address"),
        ),
    ] {
        wrong(https, &format!("tls = {{ {keys} }}"), &[&expected]);
    }
    wrong(https, "user = \"edge\"", &["gateway.etcd.user = \"edge\": needs `password_file`"]);
    wrong(
        https,
        &format!("user = \"edge\"\npassword_file = {none:?}"),
        &[&format!(
            "gateway.etcd.password_file = {none:?}: cannot be read: No such file or directory (os error 2)"
        )],
    );
    check(
        &discovering(&format!(
            "eds]\nserver = \"https://10.0.0.1:18000\"\nnode_id = \"a\"\ntls = {{ ca = {key:?} }}"
        )),
        &[&format!(
            "service \"d\": discovery.eds.tls.ca = {key:?}: has no certificate in PEM (-----BEGIN CERTIFICATE-----)"
        )],
    );
}
