//! Builds the kernel programs and hands the object to the daemon.
//!
//! Not aya-build: that overwrites the compiler flags, and the programs need `-Ctarget-cpu=v3`
//! (atomics that return a value). Stable Rust is enough, with either of two sources of `core`
//! for the BPF target: the `rust-src` component, or Debian's `rustc-web` with
//! `libstd-rust-web-dev-bpf`. `cargo xtask setup` installs what is missing.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version that `cargo xtask setup` installs into the user's cache.
const BPF_LINKER_VERSION: &str = "0.13.0";
const BPF_TARGET: &str = "bpfel-unknown-none";
const PROGRAMS: &str = "broker-programs";

fn main() {
    for variable in ["AYA_BUILD_SKIP", "BROKER_EBPF_OBJECT", "BPF_LINKER", "XDG_CACHE_HOME"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let object = out.join(PROGRAMS);

    if env::var_os("AYA_BUILD_SKIP").is_some_and(|v| v == "1") {
        // Loading refuses the empty object with a clear message.
        fs::write(&object, []).expect("OUT_DIR is writable");
        return;
    }
    let built = if let Some(prebuilt) = env::var_os("BROKER_EBPF_OBJECT").map(PathBuf::from) {
        println!("cargo:rerun-if-changed={}", prebuilt.display());
        prebuilt
    } else {
        match build_programs(&out) {
            Ok(object) => object,
            Err(message) => {
                println!("cargo::error={message}");
                return;
            }
        }
    };
    if let Err(e) = fs::copy(&built, &object) {
        println!("cargo::error=cannot read the kernel programs in {}: {e}", built.display());
    }
}

fn build_programs(out: &Path) -> Result<PathBuf, String> {
    let broker = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let workspace = broker.parent().expect("the package lies in the workspace");
    for input in ["broker-ebpf/src", "broker-ebpf/Cargo.toml", "Cargo.toml", "Cargo.lock"] {
        println!("cargo:rerun-if-changed={}", workspace.join(input).display());
    }

    let linker = find_linker()?;
    let core = CoreSource::find()?;
    let target_dir = bpf_target_dir(out);
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it");

    let mut cargo = Command::new(env::var_os("CARGO").expect("cargo sets it"));
    // What cargo and its caller set for the host's compiler must not reach the programs'.
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("RUSTC")
            || text.contains("RUSTFLAGS")
            || text.starts_with("CARGO_PROFILE_")
            || text == "CARGO_BUILD_TARGET"
        {
            cargo.env_remove(&name);
        }
    }
    let flags = [
        &format!("--cfg=bpf_target_arch=\"{arch}\""),
        "-Cdebuginfo=2",
        "-Ctarget-cpu=v3",
        "-Clink-arg=--btf",
    ];
    cargo
        .current_dir(workspace)
        .args(["build", "--quiet", "--release", "--package=broker-ebpf", "--features=programs"])
        .args(["--bin", PROGRAMS, "--target", BPF_TARGET, "--target-dir"])
        .arg(&target_dir)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", &linker)
        .env("CARGO_PROFILE_RELEASE_LTO", "false")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "2");
    core.apply(&mut cargo);

    let output = cargo.output().map_err(|e| format!("cannot run cargo: {e}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!(
            "the kernel programs did not build: {}",
            stderr.trim().replace('\n', "\ncargo::error=")
        ));
    }
    for line in stderr.lines() {
        println!("cargo::warning={line}");
    }
    Ok(target_dir.join(BPF_TARGET).join("release").join(PROGRAMS))
}

/// One folder for all profiles of the daemon, so that `core` is built once.
fn bpf_target_dir(out: &Path) -> PathBuf {
    let target = out.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists());
    target.unwrap_or(out).join("bpf")
}

fn find_linker() -> Result<PathBuf, String> {
    if let Some(linker) = env::var_os("BPF_LINKER").map(PathBuf::from) {
        return if linker.is_file() {
            Ok(linker)
        } else {
            Err(format!("BPF_LINKER names {}, which is not a file", linker.display()))
        };
    }
    let cache = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| env::home_dir().map(|home| home.join(".cache")));
    let cached =
        cache.map(|cache| cache.join(format!("broker-build/bpf-linker-{BPF_LINKER_VERSION}/bin")));
    let path = env::var_os("PATH").unwrap_or_default();
    cached
        .into_iter()
        .chain(env::split_paths(&path))
        .map(|dir| dir.join("bpf-linker"))
        .find(|linker| linker.is_file())
        .ok_or_else(|| {
            "bpf-linker not found, which links the kernel programs: run `cargo xtask setup`".into()
        })
}

/// Where `core` for the BPF target comes from.
enum CoreSource {
    /// Built from the `rust-src` component of cargo's own toolchain.
    Source,
    /// Shipped by this compiler (Debian's).
    Prebuilt(PathBuf),
}

impl CoreSource {
    fn find() -> Result<Self, String> {
        let own = PathBuf::from(env::var_os("RUSTC").expect("cargo sets RUSTC"));
        let own_libs = rustlib(&own);
        if own_libs.as_ref().is_some_and(|l| l.join("src/rust/library/core/Cargo.toml").exists()) {
            return Ok(Self::Source);
        }
        [own, PathBuf::from("/usr/bin/rustc")]
            .into_iter()
            .find(|rustc| rustlib(rustc).is_some_and(|libs| libs.join(BPF_TARGET).exists()))
            .map(Self::Prebuilt)
            .ok_or_else(|| {
                "no `core` for the BPF target, neither rust-src nor Debian's \
                 libstd-rust-web-dev-bpf: run `cargo xtask setup`"
                    .into()
            })
    }

    fn apply(&self, cargo: &mut Command) {
        match self {
            Self::Source => {
                cargo.arg("-Zbuild-std=core");
            }
            Self::Prebuilt(rustc) => {
                cargo.env("RUSTC", rustc);
            }
        }
    }
}

/// The folder of libraries and sources of a compiler.
fn rustlib(rustc: &Path) -> Option<PathBuf> {
    let output = Command::new(rustc).args(["--print", "sysroot"]).output().ok()?;
    let sysroot = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| Path::new(sysroot.trim()).join("lib/rustlib"))
}
