//! Memory of a program that does not arrange it beforehand.
//!
//! A worker that allocates its caches and buffers once needs none of this. One whose buffers come and go as its framework
//! likes has a [`Pool`], whose buffers are registered already, for what it receives, and [`Regions`], which registers what it
//! is shown at first sight, for what it sends. Both are bounded, and both forget by themselves.
//!
//! Nothing here moves bytes or waits for a copy.

mod leaving;
mod pool;
mod ranges;
mod regions;
mod shelf;

pub use leaving::StreamOrder;
pub use pool::{Buffer, Pool, PoolCounters};
pub use regions::{RegionCounters, Regions};
