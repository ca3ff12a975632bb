//! What a worker holds while it copies: memory that it shares, and somebody who copies for it.

pub(crate) mod available;
pub(crate) mod copier;
pub(crate) mod cycle;
pub(crate) mod memory;
#[cfg(test)]
pub(crate) mod stand_in;
