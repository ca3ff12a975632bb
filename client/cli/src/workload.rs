//! What a worker does to its caches, without a worker: random choices, states that can be told apart, latencies.
//!
//! Nothing here does IO; the seed comes in as an argument, and the same seed gives the same work.

pub(crate) mod arrangement;
pub(crate) mod latency;
pub(crate) mod pattern;
pub(crate) mod preset;
pub(crate) mod random;
pub(crate) mod selection;
