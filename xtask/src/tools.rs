//! Where things are, and how to run them.

use std::env;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::setup::{self, Need};

/// The target that kernel programs are built for.
pub(crate) const BPF_TARGET: &str = "bpfel-unknown-none";

/// The root of the workspace.
pub(crate) fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member of the workspace")
}

/// Where cargo puts what it builds.
pub(crate) fn target_dir() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

/// The cargo that runs this, in the workspace.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(workspace());
    cargo
}

/// The compiler that belongs to that cargo. Not rustup's stand-in, if it can be helped: that
/// looks for toolchains on every call.
fn rustc() -> PathBuf {
    env::var_os("CARGO")
        .map(|cargo| Path::new(&cargo).with_file_name("rustc"))
        .filter(|rustc| rustc.is_file())
        .unwrap_or_else(|| "rustc".into())
}

/// Where that compiler keeps its libraries.
pub(crate) fn sysroot() -> anyhow::Result<PathBuf> {
    Ok(output(Command::new(rustc()).args(["--print", "sysroot"]))?.into())
}

/// Whether `core` can be built for other targets.
pub(crate) fn has_rust_src(sysroot: &Path) -> bool {
    sysroot.join("lib/rustlib/src/rust/library/core/Cargo.toml").exists()
}

/// A program found along `PATH` and in the system's own folders, which `PATH` may lack.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|program| program.is_file())
}

/// What a command prints, without the last line's end.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
}

/// Runs a command that prints for itself, to standard error.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command
        .stdout(std::io::stderr())
        .status()
        .with_context(|| format!("cannot run {command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed ({status})");
    }
    Ok(())
}

/// How the daemon is built where it only has to work.
pub(crate) const RELEASE: &str = "release";

/// How packagers build it, and what is measured; takes longer.
pub(crate) const DIST: &str = "dist";

/// Programs that have been built.
pub(crate) struct Built {
    profile: &'static str,
}

impl Built {
    /// The daemon.
    pub(crate) fn daemon(profile: &'static str) -> anyhow::Result<Self> {
        setup::ensure(Need::Build)?;
        Self::packages(&["broker"], profile)
    }

    /// The lab and the daemon that it starts, with all that they run.
    pub(crate) fn lab(profile: &'static str) -> anyhow::Result<Self> {
        setup::ensure(Need::Lab)?;
        Self::packages(&["broker", "broker-tests"], profile)
    }

    fn packages(packages: &[&str], profile: &'static str) -> anyhow::Result<Self> {
        let mut build = cargo();
        build.args(["build", "--profile", profile]);
        for package in packages {
            build.args(["--package", package]);
        }
        run(&mut build)?;
        Ok(Self { profile })
    }

    /// Becomes one of the programs.
    pub(crate) fn exec(self, program: &str, command: &str, args: &[String]) -> anyhow::Result<()> {
        self.exec_with(program, command, args, &[])
    }

    /// The same with variables of the environment.
    pub(crate) fn exec_with(
        self,
        program: &str,
        command: &str,
        args: &[String],
        variables: &[(&str, PathBuf)],
    ) -> anyhow::Result<()> {
        let program = target_dir().join(self.profile).join(program);
        let variables = variables.iter().map(|(name, value)| (name, value));
        let error = Command::new(&program).arg(command).args(args).envs(variables).exec();
        Err(error).with_context(|| format!("cannot run {}", program.display()))
    }
}
