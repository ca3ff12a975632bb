//! The completing thread: it waits for the answers of tasks, which must not wait themselves.

use std::sync::PoisonError;
use std::time::Instant;

use crate::lock::lock;
use crate::socket::Silence;

use super::{Ring, SLICE};

/// Runs until the ring's owner goes away.
pub(super) fn run(ring: &Ring) {
    let mut asked_at = Instant::now();
    loop {
        let mut state = lock(&ring.state);
        while !state.has_tasks() && !state.ending {
            state = ring.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.ending {
            state.fail_tasks(&Silence::DaemonGone);
            return;
        }
        // In the same critical section as the look: a copy that is submitted after it is answered after the wake word was
        // loaded, and then this thread does not fall asleep.
        let seen = state.submitter.prepare_sleep();
        let freed = state.complete_tasks();
        if freed {
            ring.tell_freed(&mut state);
        }
        if freed || !state.has_tasks() {
            state.submitter.cancel_sleep();
            continue;
        }
        drop(state);
        let slept = ring.watch.sleep(seen, SLICE);
        lock(&ring.state).submitter.cancel_sleep();
        if slept.is_err() {
            lock(&ring.state).fail_tasks(&Silence::DaemonGone);
        } else if asked_at.elapsed() >= SLICE {
            asked_at = Instant::now();
            if let Some(silence) = ring.socket.silence() {
                lock(&ring.state).fail_tasks(&silence);
            }
        }
    }
}
