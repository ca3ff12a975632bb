//! A device in somebody else's process: a worker's own library has contexts and streams there, and is not disturbed.
//!
//! Every call, and every drop, leaves the thread's current context as it is.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::allocation::{Allocator, CudaMemory};
use super::context::{Context, Current};
use super::driver::{DriverError, OpenError, VisibleDevice};
use super::memory::out_of_memory;
use super::memory_calls::MemoryLeft;
use super::order::Marks;
use super::sys::Stream;

/// A device of a worker's process.
#[derive(Debug, Clone)]
pub struct CudaGuest {
    pub(super) context: Arc<Context>,
    pub(super) marks: Arc<Marks>,
    device: VisibleDevice,
}

impl CudaGuest {
    pub(super) fn new(context: Arc<Context>, device: VisibleDevice) -> Self {
        let marks = Arc::new(Marks::new(Arc::clone(&context)));
        Self { context, marks, device }
    }

    /// Its place in the order of this process's driver.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        // The driver counts from 0.
        self.device.device.unsigned_abs()
    }

    /// Allocates memory that can be shared: one piece of virtual memory.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn allocate(&self, bytes: u64) -> Result<GuestMemory, OpenError> {
        let allocator = Allocator::Virtual { piece_bytes: bytes, shared: true };
        let label = self.device.label();
        let allocate = |_: Current<'_>| {
            let allocated = CudaMemory::allocate(Arc::clone(&self.context), bytes, allocator);
            let lacking = "a worker's buffer";
            Ok(allocated
                .map_err(|error| out_of_memory(&self.context, &label, lacking, bytes, error)))
        };
        let allocated = self.context.visit(|current| current.relaxed(allocate));
        let memory = allocated.map_err(|error| OpenError::Device { device: label, error })??;
        Ok(GuestMemory { memory: ManuallyDrop::new(memory), context: Arc::clone(&self.context) })
    }

    /// How much memory of the device is free, for all processes together.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory_left(&self) -> Result<MemoryLeft, DriverError> {
        self.context.visit(|current| current.memory_left())
    }

    /// Waits until everything is done that this process has asked of the device, on whatever stream.
    ///
    /// # Errors
    /// What the driver says, for example that a stream is being captured.
    pub fn settle(&self) -> Result<(), DriverError> {
        self.context.visit(|current| current.settle_context())
    }

    /// Whether one stream is being captured into a graph; 0 is the legacy default stream.
    ///
    /// # Safety
    /// As [`CudaGuest::synchronize`].
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn is_capturing(&self, stream: u64) -> Result<bool, DriverError> {
        let stream = stream_of(stream);
        self.context.visit(|current| {
            // SAFETY: the caller's own promise.
            unsafe { current.is_capturing(stream) }
        })
    }

    /// Waits until everything is done that was asked on one stream; 0 is the legacy default stream.
    ///
    /// # Safety
    /// The stream is 0, or a `CUstream` of this process that is not destroyed before the call returns.
    ///
    /// # Errors
    /// What the driver says, for example that the stream is being captured.
    pub unsafe fn synchronize(&self, stream: u64) -> Result<(), DriverError> {
        let stream = stream_of(stream);
        self.context.visit(|current| {
            // SAFETY: the caller's own promise.
            unsafe { current.synchronize(stream) }
        })
    }
}

/// A handle, as the worker's library has it.
pub(super) fn stream_of(handle: u64) -> Stream {
    Stream(usize::try_from(handle).unwrap_or(usize::MAX))
}

/// Device memory of a worker's process, which can be shared. Its start is a multiple of 256.
///
/// The drop waits until everything is done that the process has asked of the device; where that cannot be known (a stream is
/// being captured, the device is lost) the memory stays until the process ends.
#[derive(Debug)]
pub struct GuestMemory {
    memory: ManuallyDrop<CudaMemory>,
    context: Arc<Context>,
}

impl GuestMemory {
    /// Where it begins, for the device.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    /// How many bytes were asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// Gives it back without a wait, which disturbs no capture.
    ///
    /// # Safety
    /// Everything is done that the device was asked to do with it, and no graph has it.
    ///
    /// # Errors
    /// When the device is lost; then the memory stays until the process ends.
    pub unsafe fn give_back_unused(self) -> Result<(), DriverError> {
        let mut own = ManuallyDrop::new(self);
        let Self { memory, context } = &mut *own;
        let given_back = context.visit(|current| {
            current.check_alive()?;
            current.relaxed(|_| {
                // SAFETY: this is the only drop: the rest of `self` is not dropped as a whole.
                unsafe { ManuallyDrop::drop(memory) };
                Ok(())
            })
        });
        // SAFETY: this is the only drop.
        unsafe { std::ptr::drop_in_place(context) };
        given_back
    }
}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        let memory = &mut self.memory;
        let _kept: Result<(), DriverError> = self.context.visit(|current| {
            current.settle_context()?;
            // SAFETY: this is the only drop, and nothing reaches the memory after it.
            unsafe { ManuallyDrop::drop(memory) };
            Ok(())
        });
    }
}
