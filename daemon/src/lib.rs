//! The statecopy daemon: one supervisor and one device process.
#![forbid(unsafe_code)]

pub mod counters;
pub mod record;
pub mod supervisor;
