//! Which gateway of its fleet this daemon is: `[gateway]`.

use std::fs;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use super::tls::Tls;

/// Most gateways of a fleet.
pub const GATEWAYS_MAX: u32 = 65_536;

/// Where this gateway's index and the number of gateways come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gateway {
    /// The operator hands indices out.
    Configured {
        /// Where the index is written.
        index: Index,
        /// How many gateways there are; indices are below it.
        count: NonZeroU32,
        /// Where the index is entered, so that a second gateway with the same one is noticed.
        registry: Option<Etcd>,
    },
    /// The lowest index that is free in a registry; the number of gateways comes from there, too.
    Claimed(Etcd),
}

impl Default for Gateway {
    /// The only one.
    fn default() -> Self {
        Self::Configured { index: Index::Number(0), count: NonZeroU32::MIN, registry: None }
    }
}

/// Where a configured index is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Index {
    /// In the configuration file.
    Number(u32),
    /// At the end of the host's name, as a `StatefulSet` names its pods: `gateway-7`.
    Hostname,
    /// In a file that has nothing else in it. It may come later, and change.
    File(PathBuf),
    /// In an environment variable.
    Env(String),
}

/// A registry in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Etcd {
    /// `http://host:port` or `https://host:port` of its members, at least one. The next one is tried
    /// when one fails.
    pub endpoints: Vec<String>,
    /// For `https`.
    pub tls: Tls,
    /// Who logs in there, if that is asked for.
    pub login: Option<Login>,
    /// What the keys of this fleet start with, without a slash at the end.
    pub prefix: String,
    /// How long an index stays taken after its holder has vanished. At least 2 s.
    pub ttl: Duration,
    /// What this gateway is called in the registry; a restarted one gets its index back by it. By
    /// default the host's name and machine id.
    pub name: Option<String>,
}

/// A user of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Login {
    /// Its name.
    pub user: String,
    /// Where its password is, and nothing else. Read anew for each connection.
    pub password_file: PathBuf,
}

impl Login {
    /// The password; without the end of the line that it is in.
    pub fn password(&self) -> Result<String, String> {
        let text = fs::read_to_string(&self.password_file)
            .map_err(|error| format!("cannot be read: {error}"))?;
        let password = text.trim_end_matches(['\r', '\n']);
        if password.is_empty() {
            return Err("is empty".to_owned());
        }
        Ok(password.to_owned())
    }
}
