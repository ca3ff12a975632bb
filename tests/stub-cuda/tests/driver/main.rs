//! The stub driver, opened and called as a driver is.

#![expect(clippy::unwrap_used, reason = "what a test did not ask for is a panic")]

use std::thread;
use std::time::{Duration, Instant};

mod calls;
mod compiler;
mod device_memory;
mod graphs;
mod launches;
mod peer;
mod processes;
mod virtual_memory;

/// Asks again until it is true.
fn until(what: &str, ask: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !ask() {
        assert!(Instant::now() < deadline, "not within 20 s: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}
