//! Pinned host memory that the executor and the device share: for each ticket a word that says done, one byte a row that says
//! what became of it, and room for indices and flags that do not fit the kernel's parameter.
//!
//! Those indices and flags are copied into device memory before the launch. Kernels that read pinned memory wait for the bus
//! in every block: 256 states of 0.75 MiB then took 0.3 ms on one H200 machine and 18 ms on another, in place of 0.1 ms.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use super::arguments::ROWS_PER_LAUNCH_MAX;
use super::context::{Context, Current};
use super::driver::DriverError;
use super::memory::DeviceMemory;
use super::sys::Stream;
use crate::sync::{AtomicU64, Ordering};

/// Launches that may be under way at once.
pub const TICKETS_MAX: usize = 64;
/// A done word has a line of its own, so that polling one does not slow the write of another.
const DONE_BYTES: usize = 128;
/// One byte a row of a launch.
#[expect(clippy::cast_possible_truncation, reason = "a constant that fits every word")]
const STATE_BYTES: usize = ROWS_PER_LAUNCH_MAX as usize;
/// Every part begins at a multiple of it.
const ALIGNMENT: usize = 128;
/// An index and a flag.
const INPUT_BYTES: usize = 9;

/// The words of one launcher.
#[derive(Debug)]
pub(super) struct Words {
    context: Arc<Context>,
    memory: NonNull<u8>,
    /// Where inputs are on the device, slot by slot.
    staging: ManuallyDrop<DeviceMemory>,
    input_bytes: usize,
    /// Whether the device may still write them.
    abandoned: bool,
}

// SAFETY: the memory is reached through this owner alone; that the driver gave it binds it to no thread.
unsafe impl Send for Words {}

impl Words {
    /// Bytes that the words of one launcher take of the host's memory.
    pub(super) fn bytes(selected_max: u64) -> Option<usize> {
        let inputs = Self::input_bytes(selected_max)?;
        TICKETS_MAX.checked_mul((DONE_BYTES + STATE_BYTES).checked_add(inputs)?)
    }

    /// Bytes that they take of the device's.
    pub(super) fn staging_bytes(selected_max: u64) -> Option<u64> {
        let bytes = Self::input_bytes(selected_max)?.checked_mul(TICKETS_MAX)?;
        u64::try_from(bytes.max(ALIGNMENT)).ok()
    }

    fn input_bytes(selected_max: u64) -> Option<usize> {
        let selected = usize::try_from(selected_max).ok()?;
        selected.checked_mul(INPUT_BYTES)?.checked_next_multiple_of(ALIGNMENT)
    }

    /// Allocates them, no word done, for requests of at most `selected_max` rows.
    pub(super) fn allocate(context: &Arc<Context>, selected_max: u64) -> Result<Self, DriverError> {
        let sizes = Self::input_bytes(selected_max).zip(Self::bytes(selected_max));
        let (input_bytes, bytes) = sizes.expect("selected_max is a bounded setting");
        let staging = Self::staging_bytes(selected_max).expect("selected_max is a bounded setting");
        let staging = DeviceMemory::zeroed(context, staging)?;
        let memory = context.enter()?.allocate_host(bytes)?;
        // SAFETY: the done words lie at the start of the allocation, and nobody else knows of it yet. The rest is memory that
        // the driver made, which holds whatever it holds.
        unsafe { memory.as_ptr().write_bytes(0, TICKETS_MAX * DONE_BYTES) };
        Ok(Self {
            context: Arc::clone(context),
            memory,
            staging: ManuallyDrop::new(staging),
            input_bytes,
            abandoned: false,
        })
    }

    /// Leaves the memory to the end of the process: the device may still write it.
    pub(super) fn abandon(&mut self) {
        self.abandoned = true;
    }

    /// The device's address of a place. Pinned memory has one address for all.
    fn address(&self, at: usize) -> u64 {
        (self.memory.addr().get() + at) as u64
    }

    pub(super) fn done_address(&self, slot: usize) -> u64 {
        self.address(slot * DONE_BYTES)
    }

    /// The done word of a slot. What the device wrote before it is visible then.
    pub(super) fn done(&self, slot: usize) -> u64 {
        assert!(slot < TICKETS_MAX, "A slot has a word");
        // SAFETY: it lies in the allocation.
        let word = unsafe { self.memory.add(slot * DONE_BYTES) }.cast::<u64>();
        // SAFETY: the word is aligned, lives as long as `self`, and is reached by atomics here and whole by the device.
        let word = unsafe { AtomicU64::from_ptr(word.as_ptr()) };
        // SYNC: with the stream's write of the word, which comes after all that the launch wrote.
        word.load(Ordering::Acquire)
    }

    fn states_at(slot: usize) -> usize {
        TICKETS_MAX * DONE_BYTES + slot * STATE_BYTES
    }

    pub(super) fn states_address(&self, slot: usize) -> u64 {
        self.address(Self::states_at(slot))
    }

    /// How many of the first `rows` states are 1. The launch of the slot is done.
    pub(super) fn copied(&self, slot: usize, rows: usize) -> u64 {
        assert!(slot < TICKETS_MAX && rows <= STATE_BYTES, "A slot has a state for each row");
        // SAFETY: they lie in the allocation.
        let states = unsafe { self.memory.add(Self::states_at(slot)) };
        // SAFETY: the bytes are initialised, and nobody writes them: the launch is done, the next one of the slot not begun.
        let states = unsafe { slice::from_raw_parts(states.as_ptr(), rows) };
        states.iter().map(|state| u64::from(*state)).sum()
    }

    fn inputs_at(&self, slot: usize) -> usize {
        TICKETS_MAX * (DONE_BYTES + STATE_BYTES) + slot * self.input_bytes
    }

    /// Where the device reads the inputs of a slot, once they are copied there.
    pub(super) fn staged_address(&self, slot: usize) -> u64 {
        assert!(slot < TICKETS_MAX, "A slot has room for inputs");
        self.staging.range().start + (slot * self.input_bytes) as u64
    }

    /// Copies the first inputs of a slot to the device, in the stream's order.
    ///
    /// # Safety
    /// The stream lives, and the slot's inputs are left alone until its launch is done.
    pub(super) unsafe fn stage(
        &self,
        current: Current<'_>,
        stream: Stream,
        slot: usize,
        bytes: usize,
    ) -> Result<(), DriverError> {
        assert!(bytes <= self.input_bytes, "The inputs fit their room");
        let to = self.staged_address(slot);
        // SAFETY: the room lies in the allocation.
        let from = unsafe { self.memory.add(self.inputs_at(slot)) };
        // SAFETY: both rooms have that many bytes, and are given back only when the stream is idle; the rest is the caller's
        // own promise.
        unsafe { current.copy_to_device(stream, to, from, bytes) }
    }

    /// The room for indices and flags of a slot that has no launch under way.
    pub(super) fn inputs(&mut self, slot: usize) -> &mut [u8] {
        assert!(slot < TICKETS_MAX, "A slot has room for inputs");
        // SAFETY: it lies in the allocation.
        let inputs = unsafe { self.memory.add(self.inputs_at(slot)) };
        // SAFETY: the bytes are initialised; the device reads them only in launches of the slot, of which there is none.
        unsafe { slice::from_raw_parts_mut(inputs.as_ptr(), self.input_bytes) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        if !self.abandoned {
            // SAFETY: it is dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.staging) };
            // SAFETY: the allocation is of this context; the launcher saw its stream idle, or would have abandoned it.
            self.context.give_back(|current| unsafe { current.free_host(self.memory) });
        }
    }
}
