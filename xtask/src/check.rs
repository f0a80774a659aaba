//! `cargo xtask check` and `cargo xtask test`: everything that must hold, each step reported,
//! and all failures at the end.

use std::env::consts::ARCH;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::setup::{self, Need};
use crate::tools::{self, BPF_TARGET};

/// One thing to run.
pub(crate) struct Step {
    name: &'static str,
    command: Command,
}

/// What a step came to, in tests or, if it has none, as one.
struct Outcome {
    name: &'static str,
    passed: u32,
    failed: u32,
    took: Duration,
}

/// Formatting, lints and documentation.
pub(crate) fn checks() -> Vec<Step> {
    let mut documentation =
        cargo("documentation", &["doc", "--workspace", "--no-deps", "--document-private-items"]);
    documentation.command.env("RUSTDOCFLAGS", "-Dwarnings");
    let mut steps = vec![
        cargo("formatting", &["fmt", "--all", "--check"]),
        cargo("lints", &["clippy", "--workspace", "--all-targets", "--", "-Dwarnings"]),
        documentation,
    ];
    match tools::sysroot() {
        Ok(sysroot) if tools::has_rust_src(&sysroot) => steps.push(program_lints()),
        // Debian's compiler builds the programs then, but this toolchain's clippy cannot use it.
        Ok(_) => println!("NOT CHECKED: the lints of the programs, which need rust-src"),
        Err(e) => println!("NOT CHECKED: the lints of the programs: {e:#}"),
    }
    steps
}

/// The checks and all tests.
pub(crate) fn all() -> Vec<Step> {
    let mut steps = checks();
    steps.extend([
        cargo("unit and property tests", &["test", "--workspace", "--exclude=broker-tests"]),
        cargo("daemon", &["build", "--release", "--package=broker"]),
        cargo("end-to-end tests", &["test", "--release", "--package=broker-tests"]),
        steered_tests(),
    ]);
    steps
}

/// The tests of what clients see, once more: through interception and the kernel.
fn steered_tests() -> Step {
    const WHICH: [&str; 8] = [
        "affinity::",
        "clients::",
        "failure::",
        "framing::",
        "hostile::",
        "idle::",
        "sharing::real_clients",
        "tunnels::",
    ];
    // The first two are about `listen` and about the first connection of the host; the clients of the
    // others block, and are woken for nothing by a reset or their own half-close.
    const NOT: [&str; 4] = [
        "a_second_daemon_does_not_share_the_address_of_the_first",
        "a_daemon_that_still_warms_up_can_be_stopped",
        "a_response_that_a_stop_cuts_short_does_not_end_in_good_order",
        "an_upload_that_becomes_a_tunnel_arrives_once",
    ];
    let mut step = cargo(
        "end-to-end, steered",
        &["test", "--release", "--package=broker-tests", "--test=netns"],
    );
    step.command.arg("--").args(WHICH).env("BROKER_TEST_STEER", "kernel");
    for not in NOT {
        step.command.args(["--skip", not]);
    }
    step
}

/// Installs what is missing, then runs all steps, whatever becomes of those before.
pub(crate) fn run(need: Need, steps: impl FnOnce() -> Vec<Step>) -> anyhow::Result<()> {
    setup::ensure(need)?;
    let steps = steps();
    let mut total = Duration::ZERO;
    let mut outcomes = Vec::new();
    for mut step in steps {
        println!("==> {}", step.name);
        let outcome = step.run();
        total += outcome.took;
        outcomes.push(outcome);
    }
    println!();
    for outcome in &outcomes {
        let verdict = if outcome.failed == 0 { "ok" } else { "FAILED" };
        println!("{verdict:>6}  {:<24} {:>6.1} s", outcome.name, outcome.took.as_secs_f64());
    }
    println!("total time: {:.1} s", total.as_secs_f64());
    let passed: u32 = outcomes.iter().map(|outcome| outcome.passed).sum();
    let failed: u32 = outcomes.iter().map(|outcome| outcome.failed).sum();
    println!("{passed} passed, {failed} failed");
    ensure!(failed == 0, "something failed: see above");
    Ok(())
}

fn cargo(name: &'static str, args: &[&str]) -> Step {
    let mut command = tools::cargo();
    command.args(args);
    if args[0] == "test" {
        // All failures at once.
        command.arg("--no-fail-fast");
    }
    Step { name, command }
}

/// Lints of the kernel programs, which the workspace's leave out. The flags are those of
/// `broker/build.rs`, so that both share what they build.
fn program_lints() -> Step {
    let mut step = cargo(
        "lints of the programs",
        &["clippy", "--release", "--package=broker-ebpf", "--features=programs"],
    );
    let flags = [
        &format!("--cfg=bpf_target_arch=\"{ARCH}\""),
        "-Cdebuginfo=2",
        "-Ctarget-cpu=v3",
        "-Clink-arg=--btf",
    ];
    step.command
        .args(["--target", BPF_TARGET, "-Zbuild-std=core", "--target-dir"])
        .arg(tools::target_dir().join("bpf"))
        .args(["--", "-Dwarnings"])
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .env("CARGO_PROFILE_RELEASE_LTO", "false")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "2");
    step
}

impl Step {
    fn run(&mut self) -> Outcome {
        let begun = now();
        let (mut passed, mut failed) = (0, 0);
        let succeeded = self.stream(|line| {
            println!("{line}");
            if let Some((p, f)) = test_result(line) {
                passed += p;
                failed += f;
            }
        });
        match succeeded {
            Ok(true) if passed == 0 => passed = 1,
            Ok(true) => {}
            Ok(false) => failed = failed.max(1),
            Err(e) => {
                println!("{e}");
                failed = failed.max(1);
            }
        }
        Outcome { name: self.name, passed, failed, took: now() - begun }
    }

    /// Runs the command with a look at each line of its output; tells whether it succeeded.
    fn stream(&mut self, mut line: impl FnMut(&str)) -> std::io::Result<bool> {
        let mut child = self.command.stdout(Stdio::piped()).spawn()?;
        if let Some(stdout) = child.stdout.take() {
            for bytes in BufReader::new(stdout).split(b'\n') {
                line(&String::from_utf8_lossy(&bytes?));
            }
        }
        Ok(child.wait()?.success())
    }
}

#[expect(clippy::disallowed_methods, reason = "times what people wait for")]
fn now() -> Instant {
    Instant::now()
}

/// How many tests passed and failed, if this is the line that tells.
fn test_result(line: &str) -> Option<(u32, u32)> {
    let counts = line.trim_start().strip_prefix("test result: ")?;
    let count = |what: &str| {
        let (before, _) = counts.split_once(what)?;
        before.rsplit([' ', ';']).find(|word| !word.is_empty())?.parse().ok()
    };
    Some((count(" passed")?, count(" failed")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_from_the_test_harness() {
        let line =
            "test result: FAILED. 11 passed; 2 failed; 0 ignored; 0 measured; finished in 1s";
        assert_eq!(test_result(line), Some((11, 2)));
        assert_eq!(test_result("test result: ok. 3 passed; 0 failed"), Some((3, 0)));
        assert_eq!(test_result("running 3 tests"), None);
    }
}
