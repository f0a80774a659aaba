//! `broker check`: whether a configuration is valid, what is odd about it, and what to expect of it.

mod here;

use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;

use crate::config::discovery::Source;
use crate::config::file::{self, ConfigError};
use crate::config::gateway::{GATEWAYS_MAX, Gateway};
use crate::config::subset::Subset;
use crate::config::{Config, Service};
use crate::daemon::obstacles;
use crate::membership::document::MEMBERS_MAX;
use crate::membership::{self, Member, Membership};
use crate::origin::choice;
use crate::origin::subset::sizing::{self, Loss};
use crate::origin::subset::{self, Algorithm, Fleet};
use crate::report::plural;

/// One origin in so many is assumed to fail, where the operator's own figure is not known.
const FAILING_PART: usize = 20;

/// How probable it may be that any gateway of the fleet has too few origins then.
const RISK: f64 = 1e-3;

/// What to check, and what to assume where only run time tells.
#[derive(Debug, Default, clap::Args)]
pub struct Args {
    /// The configuration file.
    #[arg(value_name = "FILE")]
    config: PathBuf,
    /// What to expect of subsets with so many origins, where a source names them at run time only.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MEMBERS_MAX as u64))]
    origins: Option<u64>,
    /// What to expect of subsets in a fleet of so many gateways, where etcd knows them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(GATEWAYS_MAX)))]
    gateways: Option<u32>,
}

/// Checks a file, and writes what there is to say about it.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<()> {
    let path = &args.config;
    let config = file::load(path)?;
    let (certain, uncertain): (Vec<_>, Vec<_>) =
        obstacles(&config).into_iter().partition(|obstacle| obstacle.certain);
    ConfigError::if_any(path, certain.into_iter().map(|obstacle| obstacle.problem).collect())?;
    let uncertain = uncertain
        .into_iter()
        .map(|obstacle| format!("{}; `broker run` ends if it finds that, too", obstacle.problem));
    let warnings = file::warnings(&config).into_iter().chain(uncertain);
    for warning in warnings.chain(here::missing(&config)) {
        writeln!(out, "warning: {warning}")?;
    }
    let services = || config.services.iter().filter(|service| service.high_of.is_none());
    for service in services() {
        for line in about_subset(service, &config, args) {
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
    let unknown = here::unknown(&config);
    if !unknown.is_empty() {
        let what = unknown.join(", ");
        writeln!(out, "not looked at, as that needs the network: {what}")?;
    }
    let services = plural(services().count() as u64, "service");
    writeln!(out, "{}: valid, {services}", path.display())?;
    Ok(())
}

/// What to expect of a service's subset; or what is not known for that.
fn about_subset(service: &Service, config: &Config, args: &Args) -> Vec<String> {
    let Some(subset) = service.subset else { return Vec::new() };
    let unknown =
        |what: &str| vec![format!("subset: coverage and risk were not worked out: {what}")];
    let gateways = match &config.gateway {
        Gateway::Configured { count, .. } => count.get(),
        Gateway::Claimed(_) => match args.gateways {
            Some(gateways) => gateways,
            None => {
                return unknown(
                    "only etcd knows how many gateways there are; assume some with --gateways N",
                );
            }
        },
    };
    let membership = match members(service, args) {
        Ok(membership) => membership,
        Err(why) => return unknown(&why),
    };
    if membership.is_empty() {
        return unknown("the list of origins is empty now");
    }
    expectations(subset, gateways, &choice::in_use(&membership))
}

/// The members as far as they are known before anything runs.
fn members(service: &Service, args: &Args) -> Result<Membership, String> {
    let Some(discovery) = &service.discovery else {
        return Ok(Membership::new(service.origins.iter().map(|&origin| Member::at(origin))));
    };
    if let Source::File(file) = &discovery.source {
        return membership::file::load(&file.path);
    }
    match args.origins {
        Some(count) => Ok(Membership::new((0..count).map(assumed))),
        None => Err(format!(
            "who the origins are is known at run time only (from {}); assume some with --origins N",
            discovery.source.name()
        )),
    }
}

/// One of many that there may be.
fn assumed(number: u64) -> Member {
    let [.., a, b, c] = number.to_be_bytes();
    Member::at(([10, a, b, c], 80).into())
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
        "subset: {size} of {}, {}: each origin has {}..{} of them (ideal {:.2})",
        plural(members.len() as u64, "origin"),
        plural(gateways.into(), "gateway"),
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
    let failing = plural(loss.lost as u64, "origin");
    let mut risk = match short {
        0.0 => {
            format!("subset: if {failing} of all fail, each gateway has {min_healthy} or more left")
        }
        _ => format!(
            "subset: if {failing} of all fail, the probability that any gateway has fewer than \
             {min_healthy} left is {}",
            probability(short)
        ),
    };
    if short > RISK
        && let Some(enough) = loss.size(gateways, RISK)
    {
        // Writing to a String cannot fail.
        write!(risk, "; a size of {} makes it {}", enough.steady, probability(RISK)).ok();
    }
    lines.push(risk);
    lines
}

/// Small ones by their size alone.
fn probability(p: f64) -> String {
    if p < 1e-3 { format!("{p:.0e}") } else { format!("{:.1} %", p * 100.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::kernel;

    fn check(text: &str) -> String {
        check_with(text, &Args::default())
    }

    fn check_with(text: &str, args: &Args) -> String {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("broker.toml");
        std::fs::write(&path, text).unwrap();
        let mut out = Vec::new();
        run(&Args { config: path.clone(), ..*args }, &mut out).unwrap();
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
             service \"web\": subset: if 1 origin of all fail, each gateway has 5 or more left\n\
             FILE: valid, 1 service\n"
        );
    }

    #[test]
    fn risks_are_numbers_that_people_read() {
        assert_eq!(
            [1.0, 0.0123, 1e-3, 4.2e-7].map(probability),
            ["100.0 %", "1.2 %", "0.1 %", "4e-7"]
        );
        let text = subset(1, 2, "size = 1\nmin_healthy = 1");
        assert!(text.contains("1 of 2 origins, 1 gateway: "), "{text}");
        assert!(
            text.contains("if 1 origin of all fail, the probability that any gateway"),
            "{text}"
        );
    }

    #[test]
    fn what_this_host_does_not_have_is_warned_of() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        let service = |name: &str, source: &str| {
            format!(
                "[[service]]\nname = {name:?}\nprotocol = \"http1\"\nlisten = [\"127.0.0.1:{}\"]\n\
                 discovery.{source}\n",
                name.len()
            )
        };
        let file = |name: &str| service("file", &format!("file.path = {:?}", at(name)));
        let kubernetes =
            format!("kubernetes = {{ service = \"s\", port = 80, kubeconfig = {:?} }}", at("k"));
        let text = check(&format!(
            "intercept_from_netns = \"192.0.2.1\"\ngateway.count = 3\ngateway.index.file = {:?}\n{}{}{}",
            at("index"),
            file("o.json"),
            service("cluster", &kubernetes),
            service("dns", "dns = { name = \"a.test\", port = 80 }"),
        ));
        let none = "No such file or directory (os error 2)";
        for line in [
            format!("warning: gateway.index: {}: {none}; the gateway has none until it is there", at("index")),
            "warning: intercept_from_netns: 192.0.2.1 is no address of this host now; `broker run` ends \
             without it".to_owned(),
            format!(
                "warning: service \"file\": discovery: {}: {none}; clients are refused until there is a list",
                at("o.json")
            ),
            "not looked at, as that needs the network: discovery.kubernetes of service \"cluster\", \
             discovery.dns of service \"dns\"".to_owned(),
        ] {
            assert!(text.lines().any(|found| found == line), "no {line}\n{text}");
        }
        let cluster = text.lines().find(|line| line.contains("\"cluster\": discovery: ")).unwrap();
        assert_eq!(
            (cluster.matches(&at("k")).count(), cluster.matches(none).count()),
            (1, 1),
            "{cluster}"
        );

        std::fs::write(directory.path().join("o.json"), "[\"10.0.0.1\"]").unwrap();
        assert!(
            check(&file("o.json")).contains("must be ADDRESS:PORT"),
            "{}",
            check(&file("o.json"))
        );
        std::fs::write(directory.path().join("o.json"), "[\"10.0.0.1:80\"]").unwrap();
        assert_eq!(check(&file("o.json")), "FILE: valid, 1 service\n");
    }

    #[test]
    fn what_ends_the_daemon_is_a_mistake_and_what_may_do_so_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("broker.toml");
        let outcome = |keys: &str| {
            let service = "[[service]]\nname = \"web\"\nprotocol = \"http1\"\n\
                           listen = [\"127.0.0.1:1\"]\norigins = [\"10.0.0.1:80\"]\n";
            std::fs::write(&path, format!("{keys}\n{service}")).unwrap();
            let mut out = Vec::new();
            run(&Args { config: path.clone(), ..Args::default() }, &mut out)
                .map(|()| String::from_utf8(out).unwrap())
        };
        let error = outcome(&format!("event_log = {:?}", directory.path())).unwrap_err();
        assert!(
            error.is::<ConfigError>() && error.to_string().ends_with("must be a file"),
            "{error}"
        );
        let unset = "gateway.count = 1\ngateway.index.env = \"BROKER_TEST_NO_SUCH_VARIABLE\"";
        let told = outcome(unset).unwrap();
        let end = "is not set; `broker run` ends if it finds that, too\n";
        assert!(told.starts_with("warning: gateway.index = ") && told.contains(end), "{told}");
    }

    #[test]
    fn a_cgroup_that_is_not_there_is_no_mistake() {
        let text = check(
            "[[service]]\nname = \"web\"\nprotocol = \"http1\"\nintercept = [\"origins\"]\n\
             origins = [\"10.0.0.1:80\"]\ncgroups = [\"/\", \"/no/such.service\"]\n\
             high = { intercept = [\"10.0.0.2:80\"] }\n",
        );
        let warning = "warning: service \"web\": cgroups: \"/no/such.service\" is not there now; nobody in \
                       it is intercepted until it is\n";
        let cgroups = kernel::mount_point().is_ok();
        assert_eq!(text.matches("cgroups: ").count(), usize::from(cgroups), "{text}");
        assert_eq!(text.contains(warning), cgroups, "{text}");
        assert!(text.ends_with("FILE: valid, 1 service\n"), "{text}");
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

    #[test]
    fn live_lists_are_read_or_assumed() {
        let service = |source: &str| {
            format!(
                "[[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"127.0.0.1:80\"]\n\
                 [service.subset]\nsize = 2\n[service.discovery.{source}\n"
            )
        };
        let gateway = "[gateway]\nindex = 0\ncount = 40\n";
        let directory = tempfile::tempdir().unwrap();
        let list = directory.path().join("origins.json");
        let file = format!("{gateway}{}", service(&format!("file]\npath = {list:?}")));
        assert!(check(&file).contains("not worked out: ") && check(&file).contains("No such file"));
        std::fs::write(
            &list,
            r#"["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80",
            {"address": "10.0.0.9:80", "priority": 1}]"#,
        )
        .unwrap();
        assert!(check(&file).contains("subset: 2 of 4 origins, 40 gateways"), "{}", check(&file));
        std::fs::write(&list, "[]").unwrap();
        assert!(check(&file).contains("the list of origins is empty now"));

        let claimed = "[gateway.etcd]\nendpoints = [\"http://127.0.0.1:2379\"]\nprefix = \"/a\"\n";
        let dns = service("dns]\nname = \"web.test\"\nport = 80");
        let text = check(&format!("{gateway}{dns}"));
        assert!(
            text.contains("known at run time only (from dns); assume some with --origins N"),
            "{text}"
        );
        let text = check(&format!("{claimed}{dns}"));
        assert!(text.contains("only etcd knows how many gateways"), "{text}");
        let assumed = Args { origins: Some(1000), gateways: Some(500), ..Args::default() };
        let text = check_with(&format!("{claimed}{dns}"), &assumed);
        assert!(text.contains("subset: 2 of 1,000 origins, 500 gateways"), "{text}");
    }
}
