//! Demo and benchmarks.
fn main() {}
