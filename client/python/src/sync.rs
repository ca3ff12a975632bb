//! The atomics of this crate.

#![expect(clippy::disallowed_types, reason = "this is the module that names them")]

pub(crate) use std::sync::atomic::Ordering;

pub(crate) type AtomicBool = std::sync::atomic::AtomicBool;
pub(crate) type AtomicU32 = std::sync::atomic::AtomicU32;
pub(crate) type AtomicU64 = std::sync::atomic::AtomicU64;
