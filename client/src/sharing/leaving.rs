//! Buffers that are given up, until nothing reaches them any more.
//!
//! ```text
//!  given up ──its stream is marked──> leaving ──the mark is reached──> released, then freed
//!      └──its stream cannot be marked──> condemned ──somebody waits for the device──> released, then freed
//! ```
//!
//! A copy that was put on a stream names a buffer until its turn has come, and a kernel reads it after that: so neither the daemon's
//! region nor the memory goes before the stream is past both. A stream is marked when its buffer is given up, not when it came back:
//! that happens with the last reference to a result, in whatever thread, also while the stream is captured. Nobody waits for a mark.

use std::fmt::Debug;

use statecopy_kernels::cuda::{CudaGuest, GuestMemory, StreamMark};

use super::shelf::Taken;

/// Order among the streams of a program's device, by whoever knows that they live.
pub trait StreamOrder: Debug + Send + Sync {
    /// Marks what a stream was asked until now. `None` where it is captured, or cannot be marked; no capture ends.
    fn mark(&self, stream: u64) -> Option<StreamMark>;

    /// Lets a stream wait for what was marked. False where it is captured, or cannot wait; no capture ends.
    fn order_after(&self, stream: u64, mark: &StreamMark) -> bool;

    /// Gives back memory that nothing reaches any more. Waits for nothing.
    fn give_back(&self, memory: GuestMemory);
}

/// Buffers that leave the pool.
#[derive(Debug)]
pub(super) struct Leaving<T> {
    marked: Vec<(T, StreamMark)>,
    /// Those that are not known to be done with, until somebody may wait for the device.
    condemned: Vec<T>,
}

impl<T> Default for Leaving<T> {
    fn default() -> Self {
        Self { marked: Vec::new(), condemned: Vec::new() }
    }
}

impl<T> Leaving<T> {
    /// Takes what is given up. What nothing reaches comes out.
    pub(super) fn add(
        &mut self,
        given_up: Vec<Taken<T>>,
        order: Option<&dyn StreamOrder>,
    ) -> Vec<T> {
        let mut idle = Vec::new();
        for Taken { value, busy_on } in given_up {
            let Some(stream) = busy_on else {
                idle.push(value);
                continue;
            };
            match order.and_then(|order| order.mark(stream)) {
                Some(mark) => self.marked.push((value, mark)),
                None => self.condemned.push(value),
            }
        }
        idle
    }

    /// Those whose marks are reached by now.
    pub(super) fn reached(&mut self, guest: &CudaGuest) -> Vec<T> {
        let is_reached = |(_, mark): &mut (T, StreamMark)| guest.is_reached(mark) == Ok(true);
        self.marked.extract_if(.., is_reached).map(|(value, _)| value).collect()
    }

    /// One that may be written yet, by a copy that nobody knows the end of.
    pub(super) fn condemn(&mut self, value: T) {
        self.condemned.push(value);
    }

    /// All of them: whoever drops them waits for the device.
    pub(super) fn take(&mut self) -> Vec<T> {
        let marked = std::mem::take(&mut self.marked).into_iter().map(|(value, _)| value);
        marked.chain(std::mem::take(&mut self.condemned)).collect()
    }
}
