//! What moves bytes: cache layouts and their signatures, the reference copy, and one folder a device.
//!
//! Pure parts (`layout`, `signature`, `plan`, `reference`) do no IO and serve clients too. Everything unsafe about a
//! device lives in its folder. The invariant: a device is only ever handed ranges that were checked against the region
//! that they lie in, so that no safe call of this crate reads or writes past one.
#![deny(unsafe_code)]

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
#[expect(unsafe_code, reason = "the CUDA device calls the driver")]
pub mod cuda;
pub mod device;
mod environment;
pub mod findings;
pub mod guard;
#[expect(unsafe_code, reason = "a callback is kept in an atomic word")]
pub mod hooks;
#[expect(unsafe_code, reason = "the host device moves bytes of memory that other processes share")]
pub mod host;
pub mod layout;
pub mod plan;
pub mod reference;
pub mod signature;
mod sync;
