//! The kernel side of the broker.
//!
//! This library holds all that can be told without a kernel: [`abi`], which programs and daemon
//! share, [`flow`], the programs' decisions as pure functions, [`scan`], which tells plain messages
//! from all others, and [`phase`], which says whose an origin socket is. It builds and is tested on the host. The programs themselves, one
//! hook kind per file, are the binary `broker-programs`, which builds for the BPF target only.

#![cfg_attr(target_arch = "bpf", no_std)]

pub mod abi;
pub mod flow;
pub mod phase;
pub mod scan;
