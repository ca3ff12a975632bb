//! The one place that names the standard atomics.

pub(crate) use std::sync::atomic::Ordering;

#[expect(clippy::disallowed_types, reason = "this is the module that the rule points to")]
pub(crate) type AtomicBool = std::sync::atomic::AtomicBool;
#[expect(clippy::disallowed_types, reason = "this is the module that the rule points to")]
pub(crate) type AtomicU64 = std::sync::atomic::AtomicU64;
