//! `cargo xtask bench`: the lab's comparisons, with the peers that they are with.

use crate::setup;
use crate::tools::{Built, DIST};

/// Names Envoy's binary to the lab.
const ENVOY: &str = "ENVOY_BIN";

/// Builds what is measured and becomes the lab.
pub(crate) fn run(args: &[String]) -> anyhow::Result<()> {
    let mut variables = Vec::new();
    if wants_envoy(args) && std::env::var_os(ENVOY).is_none() {
        variables.push((ENVOY, setup::envoy()?));
    }
    Built::lab(DIST)?.exec_with("broker-lab", "bench", args, &variables)
}

/// Whether Envoy takes part: in `limits` and `faults`, unless `--peers` leaves it out. The lab
/// reads the arguments itself, and says what is wrong with them.
fn wants_envoy(args: &[String]) -> bool {
    let has = |words: &[&str]| args.iter().any(|arg| words.contains(&arg.as_str()));
    if !has(&["limits", "faults"]) || has(&["-h", "--help"]) {
        return false;
    }
    let mut peers = None;
    for (i, arg) in args.iter().enumerate() {
        let value = arg.strip_prefix("--peers=");
        let next = || args.get(i + 1).filter(|_| arg == "--peers").map(String::as_str);
        if let Some(value) = value.or_else(next) {
            peers = Some(peers == Some(true) || value.split(',').any(|peer| peer == "envoy"));
        }
    }
    peers.unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envoy_is_installed_only_where_it_takes_part() {
        let wants = |line: &str| {
            wants_envoy(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        };
        for line in [
            "limits",
            "faults --json",
            "faults --peers broker,envoy",
            "limits --peers=envoy --json",
            "limits --peers envoy --peers nginx",
        ] {
            assert!(wants(line), "{line}");
        }
        for line in [
            "",
            "--quick --peers direct",
            "faults --help",
            "faults --peers broker,nginx",
            "limits --peers=haproxy",
        ] {
            assert!(!wants(line), "{line}");
        }
    }
}
