//! The stub driver, opened and called as a driver is.

#![expect(clippy::unwrap_used, reason = "what a test did not ask for is a panic")]

mod calls;
mod device_memory;
mod launches;
mod virtual_memory;
