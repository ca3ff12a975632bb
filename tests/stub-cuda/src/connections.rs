//! Connections of a process to a device. Streams share them, as soon as there are more of these: whatever they were asked for
//! goes to the device one after the other, so that a stream that waits for a word holds up the others of its connection.

use std::sync::Arc;
use std::thread;

use crate::control::{Control, Knob};
use crate::process::{Process, STEP, variable};
use crate::sync::{AtomicU64, Ordering};

/// How many of them a process wants.
const WANTED: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// How many it gets otherwise, and as a client of MPS.
const USUAL: u64 = 8;
const OF_MPS: u64 = 2;

/// How many connections a process has; `None` where each stream is to have its own.
fn count(control: &Control) -> Option<u64> {
    let wanted = variable(WANTED).and_then(|wanted| wanted.to_str()?.parse().ok());
    let usual = if control.is_set(Knob::Mps) { OF_MPS } else { USUAL };
    control.is_set(Knob::SharedConnections).then(|| wanted.unwrap_or(usual).clamp(1, 32))
}

/// A connection: what was asked of its streams has numbers, and begins in their order.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    asked: AtomicU64,
    begun: AtomicU64,
}

impl Connection {
    /// The number of what is asked for next.
    pub(crate) fn ask(&self) -> u64 {
        self.asked.fetch_add(1, Ordering::SeqCst)
    }

    /// Waits until everything before it has begun, or until nothing is done any more.
    pub(crate) fn wait(&self, number: u64, process: &Process) {
        while self.begun.load(Ordering::SeqCst) < number && process.sticky().is_ok() {
            thread::sleep(STEP);
        }
    }

    /// What comes after it may begin.
    pub(crate) fn pass(&self, number: u64) {
        self.begun.fetch_max(number + 1, Ordering::SeqCst);
    }
}

/// The connections of a process.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    shared: Vec<Arc<Connection>>,
    given: AtomicU64,
}

impl Connections {
    pub(crate) fn new(control: &Control) -> Self {
        let shared = (0..count(control).unwrap_or(0)).map(|_| Arc::default()).collect();
        Self { shared, given: AtomicU64::default() }
    }

    /// That of a new stream: each in turn.
    pub(crate) fn next(&self) -> Arc<Connection> {
        let turn = usize::try_from(self.given.fetch_add(1, Ordering::SeqCst)).unwrap_or(0);
        match self.shared.len() {
            0 => Arc::default(),
            count => Arc::clone(&self.shared[turn % count]),
        }
    }
}
