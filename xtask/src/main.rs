//! Sets up, builds, tests and demonstrates the broker.

fn main() {}
