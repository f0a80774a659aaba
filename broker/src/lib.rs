//! The broker: steers short-lived client connections onto warm origin sockets.
//!
#![doc = include_str!("../ARCHITECTURE.md")]

mod aside;
mod chain;
pub mod clock;
pub mod config;
mod seldom;
mod sys;

pub use self::chain::chain;

pub mod daemon;
pub mod datapath;
pub mod grpc;
pub mod logging;
pub mod net;
pub mod outbound;
pub mod rewind;
pub mod ticks;
pub mod worker;

pub mod buffers;
pub mod relay;
pub mod session;

pub mod boundary;
pub mod fleet;
pub mod health;
pub mod membership;
pub mod origin;
pub mod pool;

pub mod events;
pub mod stats;

pub mod admin;
pub mod command;
pub mod doctor;
pub mod observe;
pub mod report;
pub mod sim;
