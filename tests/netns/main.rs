//! End-to-end tests, as root, in network namespaces of their own.
//!
//! A missing prerequisite fails loudly: a skipped test looks like a passed one.

mod support;

mod network;

mod affinity;
mod clients;
mod comparison;
mod counting;
mod demonstration;
mod doctor;
mod eds;
mod endings;
mod exhaustion;
mod explain;
mod failure;
mod fleet;
mod framing;
mod health;
mod hostile;
mod idle;
mod intercept;
mod kernel;
mod kubernetes;
mod limits;
mod loops;
mod membership;
mod outliers;
mod own;
mod paths;
mod priorities;
mod programs;
mod refusal;
mod retries;
mod sharing;
mod starting;
mod steer;
mod strays;
mod subsets;
mod torture;
mod tunnels;
mod usage;
