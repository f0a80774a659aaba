//! The broker: steers short-lived client connections onto warm origin sockets.
//!
//! Modules stand in the order in which a connection meets them; `ARCHITECTURE.md` draws the map.

pub mod clock;
pub mod config;

pub mod datapath;

pub mod boundary;

pub mod stats;
