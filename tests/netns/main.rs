//! End-to-end tests, as root, in network namespaces of their own.
//!
//! A missing prerequisite fails loudly: a skipped test looks like a passed one.

mod kernel;
mod network;
