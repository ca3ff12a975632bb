//! The statecopy daemon: one supervisor and one device process.
#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
pub mod counters;
pub mod device_process;
pub mod link;
pub mod machine;
pub mod record;
pub mod supervisor;
mod sync;
