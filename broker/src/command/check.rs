//! `broker check`: whether a configuration is valid, what is odd about it, and what to expect of it.

use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;

use crate::config::gateway::Gateway;
use crate::config::subset::Subset;
use crate::config::{Config, Service, file};
use crate::membership::Member;
use crate::origin::subset::sizing::{self, Loss};
use crate::origin::subset::{self, Algorithm, Fleet};

/// One origin in so many is assumed to fail, where the operator's own figure is not known.
const FAILING_PART: usize = 20;

/// How probable it may be that any gateway of the fleet has too few origins then.
const RISK: f64 = 1e-3;

/// Checks a file, and writes what there is to say about it.
pub fn run(path: &Path, out: &mut impl Write) -> anyhow::Result<()> {
    let config = file::load(path)?;
    for warning in file::warnings(&config) {
        writeln!(out, "warning: {warning}")?;
    }
    let services = || config.services.iter().filter(|service| service.high_of.is_none());
    for service in services() {
        for line in about_subset(service, &config) {
            writeln!(out, "service {:?}: {line}", service.name)?;
        }
    }
    for high in config.services.iter().filter(|service| service.high_of.is_some()) {
        let limits = &high.limits;
        writeln!(
            out,
            "service {:?}: at most {} connections and {} waiting exchanges of its own",
            high.name, limits.max_connections, limits.max_pending
        )?;
        if let (true, Some(first)) = (high.by_cgroup, high.high_of.map(|i| &config.services[i])) {
            writeln!(
                out,
                "service {:?}: takes the processes below {:?} that dial what service {:?} intercepts",
                high.name, high.cgroups, first.name
            )?;
        }
    }
    let services = services().count();
    let plural = if services == 1 { "" } else { "s" };
    writeln!(out, "{}: valid, {services} service{plural}", path.display())?;
    Ok(())
}

/// What to expect of a service's subset.
fn about_subset(service: &Service, config: &Config) -> Vec<String> {
    let Some(subset) = service.subset else { return Vec::new() };
    let Gateway::Configured { count, .. } = &config.gateway else {
        let text =
            "subset: how many gateways there are is known at run time only; try `broker sim`";
        return vec![text.to_owned()];
    };
    if service.discovery.is_some() {
        let text = "subset: how many origins there are is known at run time only; try `broker sim`";
        return vec![text.to_owned()];
    }
    let members: Vec<_> = service.origins.iter().map(|&origin| Member::at(origin)).collect();
    let named: Vec<_> = members.iter().map(|m| subset::Member::new(&m.identity)).collect();
    expectations(subset, count.get(), &named)
}

fn expectations(subset: Subset, gateways: u32, members: &[subset::Member<'_>]) -> Vec<String> {
    let Subset { rules, size, min_healthy } = subset;
    if size >= members.len() {
        return vec![format!(
            "subset: size {size} is not smaller than the number of origins ({}): all are used",
            members.len()
        )];
    }
    let coverage = sizing::coverage(rules, &Fleet::uniform(gateways, size), members);
    let mut lines = vec![format!(
        "subset: {size} of {} origins, {gateways} gateways: each origin has {}..{} of them \
         (ideal {:.2})",
        members.len(),
        coverage.min,
        coverage.max,
        coverage.ideal
    )];
    let wide = coverage.max as f64 > 2.0 * coverage.ideal.max(1.0);
    if coverage.min == 0 || wide {
        let hint = match rules.algorithm {
            Algorithm::Kronecker { band: Some(_) } => "a larger subset.size",
            Algorithm::Kronecker { band: None } => "subset.band = \"10%\"",
            Algorithm::Ring | Algorithm::Off => "algorithm = \"kronecker\" with band = \"10%\"",
        };
        let what = if coverage.min == 0 { "some origins are nobody's" } else { "that is uneven" };
        lines.push(format!("subset: {what}; {hint} evens it out"));
    }
    let loss = Loss {
        origins: members.len(),
        lost: members.len().div_ceil(FAILING_PART),
        need: min_healthy as f64 / size as f64,
    };
    let short = (f64::from(gateways) * loss.short(size)).min(1.0);
    let mut risk = format!(
        "subset: if {} of the origins fail, the probability that any gateway has fewer than \
         {min_healthy} left is {short:.2e}",
        loss.lost
    );
    if short > RISK
        && let Some(enough) = loss.size(gateways, RISK)
    {
        // Writing to a String cannot fail.
        write!(risk, "; a size of {} makes it {RISK:.0e}", enough.steady).ok();
    }
    lines.push(risk);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> String {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("broker.toml");
        std::fs::write(&path, text).unwrap();
        let mut out = Vec::new();
        run(&path, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        text.replace(&*path.to_string_lossy(), "FILE")
    }

    fn subset(gateways: u32, origins: usize, keys: &str) -> String {
        let origins: Vec<_> = (1..=origins).map(|i| format!("10.0.0.{i}:80")).collect();
        check(&format!(
            "[gateway]\nindex = 0\ncount = {gateways}\n[[service]]\nname = \"web\"\n\
             protocol = \"http1\"\nlisten = [\"127.0.0.1:80\"]\norigins = {origins:?}\n\
             [service.subset]\n{keys}\n"
        ))
    }

    #[test]
    fn a_good_subset_is_described() {
        let text = subset(40, 20, "size = 10\nband = \"10%\"\nmin_healthy = 5");
        assert_eq!(
            text,
            "service \"web\": subset: 10 of 20 origins, 40 gateways: each origin has 18..22 of them \
             (ideal 20.00)\n\
             service \"web\": subset: if 1 of the origins fail, the probability that any gateway has \
             fewer than 5 left is 0.00e0\n\
             FILE: valid, 1 service\n"
        );
    }

    #[test]
    fn a_poor_one_is_told_how_to_mend() {
        let text = subset(2, 100, "size = 4\nalgorithm = \"ring\"\nmin_healthy = 4");
        assert!(text.contains("some origins are nobody's; algorithm = \"kronecker\""), "{text}");
        let text = subset(100, 100, "size = 4\nmin_healthy = 3");
        assert!(text.contains("a size of "), "{text}");
        let text = subset(4, 3, "size = 3");
        assert!(text.contains("all are used"), "{text}");
    }
}
