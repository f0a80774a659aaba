//! TLS towards the servers that tell a gateway something: etcd, control planes.

use std::fs;
use std::path::{Path, PathBuf};

use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

/// Whom a client believes, and who it is. What is in the files is read anew for each connection:
/// certificates are replaced while the daemon runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// Authorities that vouch for the server. `None`: those that the system trusts.
    pub ca: Option<PathBuf>,
    /// Who this client is, for servers that want to know.
    pub identity: Option<Identity>,
    /// Whose certificate the server must have. `None`: that of the host in its URL.
    pub server_name: Option<String>,
}

/// A client's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The certificate, and those that lead from it to an authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// What was found in the files, in PEM.
#[derive(Debug, Default)]
pub struct Credentials {
    /// Authorities.
    pub ca: Option<Vec<u8>>,
    /// The client's certificate, and its key.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

/// A file that cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub struct Unusable {
    /// The key that names it.
    pub key: &'static str,
    /// Where it is.
    pub path: PathBuf,
    /// Why not.
    pub why: String,
}

impl Tls {
    /// Reads the files, and finds out whether they can be used, together.
    pub fn read(&self) -> Result<Credentials, Unusable> {
        let ca = self.ca.as_deref().map(|path| file("ca", path, authorities)).transpose()?;
        let identity = match &self.identity {
            None => None,
            Some(Identity { certificate, key }) => {
                let (text, chain) = file("certificate", certificate, certificates)?;
                let (secret, der) = file("key", key, private_key)?;
                // Checks that they belong together, too.
                CertifiedKey::from_der(chain, der, &ring::default_provider()).map_err(|error| {
                    let why = format!("does not go with {}: {error}", certificate.display());
                    Unusable { key: "key", path: key.clone(), why }
                })?;
                Some((text, secret))
            }
        };
        Ok(Credentials { ca: ca.map(|(text, ())| text), identity })
    }
}

impl std::fmt::Display for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tls.{} = {}: {}", self.key, self.path.display(), self.why)
    }
}

/// A file's content, and what `read` makes of it.
fn file<T>(
    key: &'static str,
    path: &Path,
    read: impl FnOnce(&[u8]) -> Result<T, String>,
) -> Result<(Vec<u8>, T), Unusable> {
    let unusable = |why| Unusable { key, path: path.to_owned(), why };
    let text = fs::read(path).map_err(|error| unusable(format!("cannot be read: {error}")))?;
    let found = read(&text).map_err(unusable)?;
    Ok((text, found))
}

fn authorities(text: &[u8]) -> Result<(), String> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(text)? {
        store
            .add(certificate)
            .map_err(|error| format!("has a certificate that is none: {error}"))?;
    }
    Ok(())
}

fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Vec<_> =
        CertificateDer::pem_slice_iter(text).collect::<Result<_, _>>().map_err(bad)?;
    if all.is_empty() {
        return Err("has no certificate in PEM (-----BEGIN CERTIFICATE-----)".to_owned());
    }
    Ok(all)
}

fn private_key(text: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(text).map_err(|error| match error {
        pem::Error::NoItemsFound => {
            "has no private key in PEM (-----BEGIN PRIVATE KEY-----) that is not encrypted"
                .to_owned()
        }
        error => bad(error),
    })
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn bad(error: pem::Error) -> String {
    format!("is not PEM: {error}")
}
