//! What this kernel has and which programs it takes, without attaching any.

use std::error::Error;

use aya::maps::MapType;
use aya::programs::{Program, ProgramError, ProgramType};
use aya::sys::{BpfHelper, is_helper_supported, is_map_supported};
use broker_ebpf::abi::name;

use super::{InterceptOptions, Known, LoadError, Options, chain, open, program};

/// Something that the kernel may have.
#[derive(Clone, Debug)]
pub struct Feature {
    /// Its name.
    pub name: &'static str,
    /// What needs it.
    pub needed_for: &'static str,
    /// Whether it is there, or why that cannot be told.
    pub found: Result<bool, String>,
}

/// Asks for all features that are not as old as BPF.
#[must_use]
pub fn features() -> Vec<Feature> {
    let maps = [
        (MapType::SkStorage, "socket storage", "counting, interception"),
        (MapType::RingBuf, "ring buffer", "the programs' log, events of steering"),
        (MapType::SockMap, "sockmap", "steering"),
        (MapType::SockHash, "sockhash", "steering"),
    ];
    let helpers = [
        (ProgramType::SkMsg, BpfHelper::BPF_FUNC_loop, "bpf_loop", "steering: reading heads"),
        (
            ProgramType::SkMsg,
            BpfHelper::BPF_FUNC_probe_read_kernel,
            "bpf_probe_read_kernel",
            "steering, causes of failed connections",
        ),
    ];
    let retval = Feature {
        name: "bpf_set_retval",
        needed_for: "limits.refuse = \"connect\": ECONNREFUSED; EPERM without it",
        found: can_set_retval().map_err(text),
    };
    let maps = maps.into_iter().map(|(kind, name, needed_for)| Feature {
        name,
        needed_for,
        found: is_map_supported(kind).map_err(text),
    });
    let helpers = helpers.into_iter().map(|(kind, helper, name, needed_for)| Feature {
        name,
        needed_for,
        found: is_helper_supported(kind, helper).map_err(text),
    });
    maps.chain(helpers).chain([retval]).collect()
}

/// Whether the connect hook can choose the error of a `connect()` that it refuses.
pub(super) fn can_set_retval() -> Result<bool, ProgramError> {
    is_helper_supported(ProgramType::CgroupSockAddr, BpfHelper::BPF_FUNC_set_retval)
}

/// A program of the broker's.
#[derive(Clone, Debug)]
pub struct Taken {
    /// Its name.
    pub name: &'static str,
    /// What needs it.
    pub needed_for: &'static str,
    /// Whether the kernel takes it, or what it says.
    pub loaded: Result<(), String>,
}

/// Loads each program by itself.
pub fn programs() -> Result<Vec<Taken>, LoadError> {
    let options = Options { intercept: Some(InterceptOptions::trial()), ..Options::default() };
    let mut programs = open(&options, &Known::look_up())?;
    let mut load = |name: &'static str, needed_for| {
        let loaded = program(&mut programs, name).and_then(|program| match program {
            Program::SockOps(program) => program.load(),
            Program::CgroupSockAddr(program) => program.load(),
            Program::SkMsg(program) => program.load(),
            Program::SkSkb(program) => program.load(),
            Program::SchedClassifier(program) => program.load(),
            _ => Err(ProgramError::UnexpectedProgramType),
        });
        Taken { name, needed_for, loaded: loaded.map_err(text) }
    };
    Ok(vec![
        load(name::SOCK_OPS, "counting, interception"),
        load(name::CONNECT[0], "interception"),
        load(name::CONNECT[1], "interception (IPv6)"),
        load(name::GETPEERNAME[0], "clients see the address that they dialled"),
        load(name::GETPEERNAME[1], "clients see the address that they dialled (IPv6)"),
        load(name::REQUEST, "steering: sends requests to origins"),
        load(name::RESPONSE, "steering: sends responses to clients"),
        load(name::RELAYED, "steering: keeps what the daemon sends in order"),
        load(name::SETTLED, "steering: tells what clients have read"),
    ])
}

fn text(error: impl Error) -> String {
    chain(&error)
}
