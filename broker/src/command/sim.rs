//! `broker sim`: what subsets of origins, outlier detection, and pools would do.

pub mod churn;
pub mod outliers;

use std::fs;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Subcommand, ValueEnum};

use super::UsageError;
use crate::origin::subset::Band;
use crate::origin::subset::sizing::Loss;
use crate::report::Style;
use crate::report::sim::{render, render_size, svg};
use crate::sim::{DEFAULT_NAMES, Family, Names, Setup, Sizes, simulate};

/// More than that is a typing error, and would take for ever.
const FLEET_MAX: i64 = 100_000;

/// Arguments of `broker sim`.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    /// What to work out; without one, a comparison of ways to choose subsets.
    #[command(subcommand)]
    pub question: Option<Question>,
    /// The comparison.
    #[command(flatten)]
    pub compare: CompareArgs,
}

/// What else can be worked out.
#[derive(Clone, Debug, Subcommand)]
pub enum Question {
    /// How many origins a gateway needs, so that enough are left when some die.
    Size(SizeArgs),
    /// What outlier detection would do to a fleet in trouble.
    Outliers(outliers::Args),
    /// What idle pools save: the daemon's own, under a schedule of requests, in virtual time.
    Churn(churn::Args),
}

/// Arguments of the comparison.
#[derive(Clone, Debug, clap::Args)]
pub struct CompareArgs {
    /// Gateways of the fleet.
    #[arg(long, value_name = "N", default_value = "500",
          value_parser = clap::value_parser!(u32).range(1..=FLEET_MAX))]
    pub gateways: u32,
    /// Origins that they share. Default: 1000, or the lines of the file of --names.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=FLEET_MAX))]
    pub origins: Option<u32>,
    /// Origins of each gateway.
    #[arg(long, value_name = "N", default_value = "20",
          value_parser = clap::value_parser!(u32).range(1..=FLEET_MAX))]
    pub subset: u32,
    /// What to compare. Default: all.
    #[arg(long = "algorithm", value_name = "NAME", value_enum, value_delimiter = ',')]
    pub algorithms: Vec<Family>,
    /// How the origins are called: a pattern with `{}` (their number) or `{ip}`, or a file with a
    /// name on each line.
    #[arg(long, value_name = "FORMAT|FILE", default_value = DEFAULT_NAMES)]
    pub names: String,
    /// Bands of `kronecker` to try.
    #[arg(long = "band", value_name = "PERCENT", value_delimiter = ',', default_value = "20%,10%",
          value_parser = band)]
    pub bands: Vec<Band>,
    /// How many origins leave at once where the ring and hash-mod are compared.
    #[arg(long, value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u32).range(1..=FLEET_MAX))]
    pub remove: u32,
    /// Zones (or racks) of neighbours in the list, of which one dies. Default: one for 40 origins.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=FLEET_MAX))]
    pub zones: Option<u32>,
    /// Most origins of one zone in a subset of `ring` and `kronecker`.
    #[arg(long, value_name = "N")]
    pub zone_max: Option<NonZeroUsize>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Draw the ring and the coverage into a file.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Arguments of `broker sim size`.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct SizeArgs {
    /// Origins that there are.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=FLEET_MAX))]
    pub origins: u32,
    /// How many of them die.
    #[arg(long, value_name = "N")]
    pub lose: u32,
    /// Share of its subset that a gateway needs alive, such as 0.8 or 80%.
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub need: f64,
    /// Gateways of the fleet.
    #[arg(long, value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u32).range(1..=FLEET_MAX))]
    pub gateways: u32,
    /// How many gateways may be short, on average over such events.
    #[arg(long, value_name = "NUMBER", default_value = "1e-3", value_parser = eps)]
    pub eps: f64,
    /// Most origins of one rack in a subset.
    #[arg(long, value_name = "N")]
    pub rack_max: Option<NonZeroUsize>,
    /// Racks that die, with --rack-max.
    #[arg(long, value_name = "N", default_value = "1", requires = "rack_max")]
    pub racks_lost: NonZeroUsize,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

fn band(text: &str) -> Result<Band, &'static str> {
    text.parse()
}

fn share(text: &str) -> Result<f64, &'static str> {
    let parsed = match text.strip_suffix('%') {
        Some(percent) => percent.trim_end().parse::<f64>().map(|percent| percent / 100.0),
        None => text.parse(),
    };
    let share = parsed.ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or("must be a share from 0 to 1, such as 0.8 or 80%")
}

fn eps(text: &str) -> Result<f64, &'static str> {
    let eps = text.parse().ok().filter(|&eps: &f64| eps > 0.0 && eps.is_finite());
    eps.ok_or("must be more than 0, such as 1e-3")
}

/// Runs the command.
pub fn run(args: &Args, style: Style, out: &mut impl Write) -> anyhow::Result<()> {
    match &args.question {
        None => compare(&args.compare, style, out),
        Some(Question::Size(args)) => size(*args, style, out),
        Some(Question::Outliers(args)) => outliers::run(args, style, out),
        Some(Question::Churn(args)) => churn::run(args, style, out),
    }
}

fn compare(args: &CompareArgs, style: Style, out: &mut impl Write) -> anyhow::Result<()> {
    let report = simulate(&setup(args)?);
    if let Some(path) = &args.svg {
        fs::write(path, svg(&report))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    super::show(args.json, &report, || render(&report, style), out)
}

/// What the arguments mean together.
fn setup(args: &CompareArgs) -> Result<Setup, UsageError> {
    let names = Names::parse(&args.names).map_err(|e| {
        UsageError(format!(
            "--names {}: must be a pattern with {{}} or {{ip}}, or a file that can be read: {e}",
            args.names
        ))
    })?;
    let listed = match &names {
        Names::Format(_) => None,
        Names::List(list) => Some(list.len()),
    };
    let origins = args.origins.map_or(listed.unwrap_or(1000), |n| n as usize);
    let at_most = |flag: &str, value: u32, max: usize, what: &str| {
        if value as usize > max {
            let rule = format!("--{flag} {value}: must be at most {max}, {what}");
            return Err(UsageError(rule));
        }
        Ok(value as usize)
    };
    let what = format!("as there are lines in {}", args.names);
    at_most("origins", args.origins.unwrap_or(1), listed.unwrap_or(usize::MAX), &what)?;
    Ok(Setup {
        gateways: args.gateways,
        origins,
        subset: at_most("subset", args.subset, origins, "the number of origins")?,
        families: match &args.algorithms[..] {
            [] => Family::value_variants().to_vec(),
            some => some.to_vec(),
        },
        bands: args.bands.clone(),
        names,
        remove: at_most("remove", args.remove, origins - 1, "so that an origin is left")?,
        zones: match args.zones {
            None => origins.div_ceil(40),
            Some(zones) => at_most("zones", zones, origins, "the number of origins")?,
        },
        zone_max: args.zone_max,
    })
}

fn size(args: SizeArgs, style: Style, out: &mut impl Write) -> anyhow::Result<()> {
    let SizeArgs { origins, lose, .. } = args;
    if lose > origins {
        let rule = format!("--lose {lose}: must be at most {origins}, the number of origins");
        return Err(UsageError(rule).into());
    }
    let loss = Loss { origins: origins as usize, lost: lose as usize, need: args.need };
    let racks = args.rack_max.map(|max| (max.get(), args.racks_lost.get()));
    let sizes = Sizes::of(loss, args.gateways, args.eps, racks);
    super::show(args.json, &sizes, || render_size(&sizes, style), out)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn output(line: &str) -> Result<String, String> {
        let words = std::iter::once("sim").chain(line.split_whitespace());
        let cli = Cli::try_parse_from(words).map_err(|e| e.to_string())?;
        let mut out = Vec::new();
        run(&cli.args, Style::PLAIN, &mut out).map_err(|e| {
            assert!(e.is::<UsageError>(), "{e:#}");
            e.to_string()
        })?;
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn the_reference_figures_to_the_digit() {
        let shown = output("--algorithm hash-mod").unwrap();
        let expected = "\
500 gateways, 1000 origins (10.0.0.0:8080 and so on), 20 for each gateway

connections, all to all / with subsets
  500000 / 10000 (50.0x fewer)
coverage, gateways of each origin on the ring
  min=5 p50=10 max=15 (ideal 10.00)
one origin leaves (10.0.0.0:8080)
  ring      11 / 500 gateways changed
  hash-mod  259 / 500 gateways changed
";
        assert!(shown.starts_with(expected), "{shown}");
    }

    #[test]
    fn a_small_fleet_as_json() {
        let shown = output("--gateways 40 --origins 60 --subset 6 --remove 2 --band 10% --json");
        let json: serde_json::Value = serde_json::from_str(&shown.unwrap()).unwrap();
        assert_eq!(json["version"], 1);
        assert_eq!(json["reference"]["connections_subsets"], 240);
        assert_eq!(json["reference"]["leaving"], 2);
        let contenders = json["contenders"].as_array().unwrap();
        assert_eq!(contenders.len(), 12);
        for contender in contenders {
            let name = contender["name"].as_str().unwrap();
            let histogram = contender["histogram"].as_array().unwrap();
            let origins: u64 = histogram.iter().filter_map(serde_json::Value::as_u64).sum();
            assert_eq!(origins, 60, "{name}");
            for moves in ["remove_one", "add_one", "remove_many", "rolling", "add_gateway"] {
                let factor = contender["moves"][moves]["factor"].as_f64().unwrap();
                let optimal = matches!(name, "ring" | "ring-fnv32" | "hrw" | "kronecker");
                assert!(
                    (1.0..=if optimal { 1.0 } else { f64::MAX }).contains(&factor),
                    "{name} {moves} {factor}"
                );
            }
            assert_eq!(contender["own_us"].is_u64(), contender["in_daemon"].as_bool().unwrap());
        }
        let banded = &contenders[11]["coverage"];
        assert_eq!((&banded["min"], &banded["max"]), (&3.into(), &5.into()), "{banded}");
    }

    #[test]
    fn pictures() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ring.svg");
        let line = format!(
            "--gateways 8 --origins 12 --subset 3 --zones 3 --zone-max 1 --algorithm ring,kronecker --svg {}",
            file.display()
        );
        let shown = output(&line).unwrap();
        assert!(shown.contains("kronecker ±10%"), "{shown}");
        let svg = std::fs::read_to_string(file).unwrap();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"), "{svg}");
    }

    #[test]
    fn names_from_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "a\nb\nc\n").unwrap();
        let names = file.path().to_str().unwrap();
        let shown = output(&format!("--names {names} --gateways 2 --subset 2 --algorithm ring"));
        assert!(shown.unwrap().starts_with("2 gateways, 3 origins (a and so on), 2 for each"));
        let error = output(&format!("--names {names} --origins 4 --subset 2")).unwrap_err();
        assert!(error.starts_with("--origins 4: must be at most 3"), "{error}");
    }

    #[test]
    fn mistakes_name_flag_value_and_rule() {
        for (line, expected) in [
            ("--subset 9 --origins 8", "--subset 9: must be at most 8, the number of origins"),
            ("--remove 8 --origins 8 --subset 1", "--remove 8: must be at most 7"),
            ("--zones 9 --origins 8 --subset 1", "--zones 9: must be at most 8"),
            ("--names nowhere", "--names nowhere: must be a pattern with {} or {ip}, or a file"),
            ("--gateways 0", "'0' for '--gateways <N>': 0 is not in 1..=100000"),
            ("--band 200%", "'200%' for '--band <PERCENT>': must be 0% to 100%"),
            ("--algorithm best", "'best' for '--algorithm <NAME>'"),
            ("size --origins 5 --lose 6 --need 1", "--lose 6: must be at most 5"),
            ("size --origins 5 --lose 1 --need 2", "'2' for '--need <SHARE>': must be a share"),
            (
                "size --origins 5 --lose 1 --need 1 --eps 0",
                "'0' for '--eps <NUMBER>': must be more",
            ),
            (
                "churn --rate 0",
                "'0' for '--rate <NUMBER>': must be a number of requests per second",
            ),
            ("churn --idle-ttl soon", "'soon' for '--idle-ttl <TIME>': must be a time such as"),
            ("churn --origin-idle 0s", "'0s' for '--origin-idle <TIME>': must be a time such as"),
            ("churn --workers 1,0", "'0' for '--workers <N>': 0 is not in 1..=256"),
            ("churn --spread even", "'even' for '--spread <HOW>'"),
            (
                "churn --rate 1e6",
                "--rate 1000000: must give 1 to 1000000 requests in --duration 3m, not 180000000",
            ),
            ("churn --rate 0.001 --duration 1s", "--rate 0.001: must give 1 to 1000000 requests"),
            (
                "churn --workers 1,200 --origins 100",
                "--workers 200: must be at most 100, so that with --origins 100 there are at most 10000",
            ),
        ] {
            let error = output(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn outliers_as_text_and_json() {
        let line = "outliers --incident one-bad,hang --origins 5 --settings broker --rate 12";
        let shown = output(line).unwrap();
        let rows: Vec<&str> = shown.lines().filter(|line| line.contains("  5  broker")).collect();
        assert_eq!(rows.len(), 2, "{shown}");
        assert!(shown.contains("12 requests per second for each origin, of which 0.1 % fail"));
        let json: serde_json::Value =
            serde_json::from_str(&output(&format!("{line} --json")).unwrap()).unwrap();
        assert_eq!(json["rows"][1]["incident"], "hang");
        assert_eq!(json["rows"][0]["setting"], "broker");
        assert!(json["rows"][0]["eject_ms"].is_u64(), "{json}");
        let error = output("outliers --incident worse").unwrap_err();
        assert!(error.contains("'worse' for '--incident <NAME>'"), "{error}");
    }

    #[test]
    fn sizes_with_their_reasons() {
        let shown = output("size --origins 1000 --lose 50 --need 0.8 --gateways 500 --eps 1e-3");
        let shown = shown.unwrap();
        assert!(shown.starts_with("k = 65\n"), "{shown}");
        let shown = output("size --origins 1000 --lose 100 --need 50% --gateways 500").unwrap();
        assert!(
            shown.starts_with("k = 20 (18 is enough, too, but not all sizes between)\n"),
            "{shown}"
        );
        let json =
            output("size --origins 1000 --lose 200 --need 0.5 --gateways 500 --rack-max 2 --json");
        let json: serde_json::Value = serde_json::from_str(&json.unwrap()).unwrap();
        assert_eq!(json["random"], serde_json::json!({"smallest": 42, "steady": 44}));
        assert_eq!((&json["any"], &json["racks"]["size"]), (&400.into(), &4.into()));
        let shown = output("size --origins 10 --lose 9 --need 0.5").unwrap();
        assert!(shown.starts_with("no subset is large enough"), "{shown}");
    }

    #[test]
    fn churn_as_text_and_as_json() {
        let line = "churn --rate 20 --duration 1m --origins 3 --workers 1,4 --origin-idle 5s";
        let shown = output(line).unwrap();
        for part in [
            "at random, under way for 100ms on average: 2 at once",
            "\nwithout pools and with them (4 workers)\n",
            "\nidle_ttl against the gap between requests",
            "\none pool for all, or one for each worker\n",
            "\nwhat to configure\n  [service.pool]\n",
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert_eq!(output(line).unwrap(), shown, "the same seed gives the same output");
        let json: serde_json::Value =
            serde_json::from_str(&output(&format!("{line} --json")).unwrap()).unwrap();
        assert_eq!((&json["version"], &json["workers"]), (&1.into(), &4.into()));
        assert_eq!(json["setup"]["origin_idle_us"], 5_000_000);
        assert_eq!(json["setup"]["spreads"], serde_json::json!(["random", "round-robin"]));
        assert_eq!(json["gap_us"], 600_000);
        let off = &json["pooling"][0]["outcome"];
        assert_eq!(off["created"], off["requests"]);
        let closed = off["evicted"]["idle_overflow"].as_u64().unwrap();
        assert_eq!(closed + off["open_at_end"].as_u64().unwrap(), off["created"].as_u64().unwrap());
        for (table, rows, key) in [
            ("pooling", 2, "max_idle"),
            ("idle_ttl", 11, "gap_to_idle_ttl"),
            ("shared", 3, "max_idle_for_as_much"),
            ("prewarm", 5, "prewarm"),
        ] {
            let table = json[table].as_array().unwrap();
            assert_eq!(table.len(), rows, "{key}");
            assert!(table.iter().all(|row| row.get(key).is_some()), "{key}");
        }
        assert!(json["advice"]["idle_ttl_us"].is_u64());
    }

    #[test]
    fn churn_of_nearly_nothing() {
        for line in [
            "--rate 0.02 --seed 3",
            "--rate 5 --max-idle 0",
            "--rate 5 --max-requests 1",
            "--rate 5 --idle-ttl 1ms --max-lifetime 1ms",
            "--rate 5 --service-time 1h --service fixed --arrivals regular",
        ] {
            let shown =
                output(&format!("churn --duration 1m --origins 2 --workers 1,2 {line}")).unwrap();
            assert!(!shown.contains("NaN") && !shown.contains("inf"), "{line}: {shown}");
        }
    }
}
