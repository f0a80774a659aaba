//! What the kernel programs and the daemon share: map names, keys and values.

/// Most workers a daemon can have.
pub const WORKERS_MAX: usize = 64;

/// Most cgroups a service can be restricted to.
pub const SERVICE_CGROUPS_MAX: usize = 8;
