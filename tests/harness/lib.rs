//! The test network: namespaces, real servers, scripted peers, and the kernel's own counters.
//!
//! Everything here needs root. Nothing it makes outlives the process that made it: namespaces are
//! held by file descriptors only, children die with their parent, and cgroups (the one thing with
//! a name) are swept by the next run if a run was killed before it could tidy up.
//!
//! Modules stand in the order in which a test meets them.

pub mod sys;

pub mod leftovers;

pub mod cgroup;
pub mod lab;
pub mod netns;
pub mod process;

pub mod origin;
pub mod peer;

pub mod certificates;
pub mod client;
pub mod control_plane;
pub mod daemon;
pub mod etcd;
pub mod load;
pub mod torture;

pub mod counters;
pub mod detour;
pub mod wait;

pub use certificates::Authority;
pub use cgroup::Cgroup;
pub use client::Client;
pub use control_plane::ControlPlane;
pub use counters::Counters;
pub use daemon::Daemon;
pub use etcd::Etcd;
pub use lab::Lab;
pub use netns::Netns;
pub use process::{Launch, Process};
pub use wait::{eventually, within};
