//! Waiting for something to become true, with a deadline.

use std::thread;
use std::time::{Duration, Instant};

/// How long a test waits for anything: ten times what a loaded machine of two cores needs.
pub const PATIENCE: Duration = Duration::from_secs(20);

const STEP: Duration = Duration::from_millis(5);

/// Asks again until there is an answer.
///
/// # Panics
/// When there is none within [`PATIENCE`].
pub fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        thread::sleep(STEP);
    }
}

/// Asks again until it is true.
///
/// # Panics
/// When it is not within [`PATIENCE`].
pub fn until(what: &str, mut ask: impl FnMut() -> bool) {
    eventually(what, || ask().then_some(()));
}
