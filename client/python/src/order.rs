//! Order among the tensor library's streams, for the buffers of the pool.
//!
//! The library keeps its streams for as long as anything lies in memory of theirs: torch never destroys one, and wants one of somebody
//! else's kept until its tensors are gone. So a stream that a buffer was taken for can be asked for a mark later on.

#![expect(unsafe_code, reason = "a stream is known by its raw handle")]

use std::sync::Arc;

use statecopy_client::sharing::StreamOrder;
use statecopy_kernels::cuda::{CudaGuest, GuestMemory, StreamMark};

/// The streams of a session's device.
#[derive(Debug)]
pub(crate) struct Order(CudaGuest);

impl Order {
    pub(crate) fn of(guest: &CudaGuest) -> Arc<dyn StreamOrder> {
        Arc::new(Self(guest.clone()))
    }

    /// Whether it is known not to be captured: what is asked then ends no capture.
    fn is_free(&self, stream: u64) -> bool {
        // SAFETY: a stream that a buffer was taken for, which its library keeps.
        let capture = unsafe { self.0.capture(stream) };
        capture == Ok(None)
    }
}

impl StreamOrder for Order {
    fn mark(&self, stream: u64) -> Option<StreamMark> {
        if !self.is_free(stream) {
            return None;
        }
        // SAFETY: as in `is_free`.
        unsafe { self.0.mark(stream) }.ok()
    }

    fn order_after(&self, stream: u64, mark: &StreamMark) -> bool {
        // SAFETY: as in `is_free`.
        self.is_free(stream) && unsafe { self.0.order_after_mark(stream, mark) }.is_ok()
    }

    fn give_back(&self, memory: GuestMemory) {
        // SAFETY: the pool's own promise: nothing reaches it. What belonged to a graph is never given back in this way.
        let _kept = unsafe { memory.give_back_unused() };
    }
}
