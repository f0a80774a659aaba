//! The kernel side of the broker.

#![cfg_attr(target_arch = "bpf", no_std)]

pub mod abi;
