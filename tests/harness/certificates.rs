//! Certificates of a test's own.

use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::Result;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};

/// An authority that signs whatever it is asked to.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
#[derive(Clone, Debug)]
pub struct Issued {
    /// The certificate.
    pub certificate: String,
    /// The private key.
    pub key: String,
}

impl Authority {
    /// An authority that is like no other.
    pub fn new(name: &str) -> Result<Self> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Ok(Self(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?))
    }

    /// Its own certificate, in PEM.
    #[must_use]
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A certificate for these names and addresses, good for servers and clients.
    pub fn issue(&self, names: &[&str]) -> Result<Issued> {
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(names)?;
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.0)?.pem();
        Ok(Issued { certificate, key: key.serialize_pem() })
    }
}

impl Issued {
    /// Writes both to files whose names begin so; where they are.
    pub fn write(&self, directory: &Path, name: &str) -> io::Result<[PathBuf; 2]> {
        let files = ["pem", "key"].map(|kind| directory.join(format!("{name}.{kind}")));
        fs::write(&files[0], &self.certificate)?;
        fs::write(&files[1], &self.key)?;
        Ok(files)
    }
}
