//! Waiting for something to become true, with a deadline.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Ten times the longest bound on anything that a case waits for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
const STEP: Duration = Duration::from_millis(2);

/// Asks again until there is an answer.
///
/// # Errors
/// When asking fails, or there is none in time.
pub(crate) fn eventually<T>(what: &str, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask()? {
            return Ok(answer);
        }
        if Instant::now() > deadline {
            let sentence = format!("not within {} s: {what}", PATIENCE.as_secs());
            // Said at once: what is dropped on the way out may wait for the very thing that does not come.
            eprintln!("{sentence}");
            bail!(sentence);
        }
        thread::sleep(STEP);
    }
}
