//! The origins of a simulation: names, zones, and newcomers.

use std::collections::HashSet;
use std::path::Path;

use crate::origin::subset::hash;
use crate::origin::subset::{Member, Roster};

/// How origins are called unless told otherwise: `10.0.0.0:8080` and so on.
pub const DEFAULT_NAMES: &str = "{ip}:8080";

/// How the origins are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Names {
    /// By a pattern in which `{}` is the number of the origin, from 0, and `{ip}` an address.
    Format(String),
    /// By the distinct lines of a file; `#` begins a remark.
    List(Vec<String>),
}

impl Names {
    /// A pattern if there is a place for the number in it, else a file.
    pub fn parse(text: &str) -> std::io::Result<Self> {
        if text.contains("{}") || text.contains("{ip}") {
            return Ok(Self::Format(text.to_owned()));
        }
        let file = std::fs::read_to_string(Path::new(text))?;
        let mut met = HashSet::new();
        let lines = file.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
        let names = lines.filter(|line| !line.is_empty() && met.insert(*line));
        Ok(Self::List(names.map(str::to_owned).collect()))
    }

    /// Name number `i`. Beyond the end of a list, made up.
    fn name(&self, i: usize) -> String {
        match self {
            Self::Format(format) => {
                let [_, a, b, c] = u32::try_from(i).unwrap_or(u32::MAX).to_be_bytes();
                format.replace("{ip}", &format!("10.{a}.{b}.{c}")).replace("{}", &i.to_string())
            }
            Self::List(list) => list.get(i).cloned().unwrap_or_else(|| format!("newcomer-{i}")),
        }
    }
}

/// All origins that there are in a simulation, by number: first those that are there from the
/// start, then those that come later.
#[derive(Debug)]
pub(super) struct World {
    pub(super) names: Vec<String>,
    pub(super) hashes: Vec<u64>,
    zone_of: Vec<usize>,
    zones: Vec<String>,
}

impl World {
    /// `origins` and `newcomers`, in zones of neighbours.
    pub(super) fn new(names: &Names, origins: usize, newcomers: usize, zones: usize) -> Self {
        let names: Vec<String> = (0..origins + newcomers).map(|i| names.name(i)).collect();
        let zone = |i: usize| if i < origins { i * zones / origins } else { i % zones };
        Self {
            hashes: names.iter().map(|name| hash::well_mixed(name)).collect(),
            zone_of: (0..names.len()).map(zone).collect(),
            zones: (0..zones).map(|zone| format!("zone-{zone}")).collect(),
            names,
        }
    }

    pub(super) fn members(&self, present: &[usize]) -> Vec<Member<'_>> {
        let member = |&o: &usize| Member::new(&self.names[o]).in_zone(&self.zones[self.zone_of[o]]);
        present.iter().map(member).collect()
    }

    /// The roster of the daemon.
    pub(super) fn roster(&self, present: &[usize]) -> Roster {
        Roster::new(&self.members(present))
    }

    /// The roster of the published figures.
    pub(super) fn reference_roster(&self, present: &[usize]) -> Roster {
        Roster::placed_by(&self.members(present), |name| {
            u64::from(hash::fnv1a_32(name.as_bytes())) << 32
        })
    }

    pub(super) fn zone_of(&self, origin: usize) -> usize {
        self.zone_of[origin]
    }

    pub(super) fn zones(&self) -> usize {
        self.zones.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_a_pattern_or_a_file() {
        let ip = Names::parse(DEFAULT_NAMES).unwrap();
        assert_eq!([ip.name(0), ip.name(999)], ["10.0.0.0:8080", "10.0.3.231:8080"]);
        assert_eq!(Names::parse("web-{}.local").unwrap().name(7), "web-7.local");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "# our origins\na:1\n\n b:1 # the old one\na:1\n").unwrap();
        let list = Names::parse(file.path().to_str().unwrap()).unwrap();
        assert_eq!(list, Names::List(vec!["a:1".to_owned(), "b:1".to_owned()]));
        assert_eq!(list.name(2), "newcomer-2");
        assert!(Names::parse("/nonexistent/names").is_err());
    }
}
