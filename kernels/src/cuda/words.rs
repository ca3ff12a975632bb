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
use crate::device::STREAMS;
use crate::sync::{AtomicU64, Ordering};

/// Launches that may be under way at once.
pub const TICKETS_MAX: usize = 64;
/// A done word has a line of its own, so that polling one does not slow the write of another.
const DONE_BYTES: usize = 128;
/// Every part begins at a multiple of it.
const ALIGNMENT: usize = 128;
/// An index and a flag.
const INPUT_BYTES: usize = 9;

/// What a launcher can do, which is what it takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// Selected rows whose indices and flags may have to be copied to the device before the launch.
    selected_max: u64,
    /// Rows that a launch has at most where the device tells which of them it copied.
    rows_max: u64,
    /// Streams for launches in an order.
    pub(super) orders: u32,
}

impl Extent {
    /// Serves requests of that many selected rows.
    pub(super) fn serving(selected_max: u64) -> Self {
        Self { selected_max, rows_max: ROWS_PER_LAUNCH_MAX, orders: STREAMS }
    }

    /// Runs kernels once, with inputs that travel with the launch, beside others that serve. To pin and to free the memory of a
    /// serving one keeps their launches waiting for 6 ms (H200): the driver makes one wait for the other.
    pub(super) const TRIAL: Self = Self { selected_max: 0, rows_max: 1, orders: 0 };

    /// Bytes that the words of one launcher take of the host's memory.
    pub(super) fn word_bytes(self) -> Option<usize> {
        let slot = DONE_BYTES.checked_add(self.state_bytes()?)?.checked_add(self.input_bytes()?)?;
        TICKETS_MAX.checked_mul(slot)
    }

    /// Bytes that they take of the device's.
    pub(super) fn staging_bytes(self) -> Option<u64> {
        u64::try_from(self.input_bytes()?.checked_mul(TICKETS_MAX)?).ok()
    }

    /// One byte a row of a launch.
    fn state_bytes(self) -> Option<usize> {
        usize::try_from(self.rows_max).ok()?.checked_next_multiple_of(ALIGNMENT)
    }

    fn input_bytes(self) -> Option<usize> {
        let selected = usize::try_from(self.selected_max).ok()?;
        selected.checked_mul(INPUT_BYTES)?.checked_next_multiple_of(ALIGNMENT)
    }
}

/// The words of one launcher.
#[derive(Debug)]
pub(super) struct Words {
    context: Arc<Context>,
    memory: NonNull<u8>,
    /// Where inputs are on the device, slot by slot.
    staging: ManuallyDrop<Option<DeviceMemory>>,
    state_bytes: usize,
    input_bytes: usize,
    /// Whether the device may still write them.
    abandoned: bool,
}

// SAFETY: the memory is reached through this owner alone; that the driver gave it binds it to no thread.
unsafe impl Send for Words {}

impl Words {
    /// Allocates them, no word done.
    pub(super) fn allocate(context: &Arc<Context>, extent: Extent) -> Result<Self, DriverError> {
        let bounded = "selected_max is a bounded setting";
        let bytes = extent.word_bytes().expect(bounded);
        let (state_bytes, input_bytes) =
            extent.state_bytes().zip(extent.input_bytes()).expect(bounded);
        let staging = Some(extent.staging_bytes().expect(bounded)).filter(|bytes| *bytes > 0);
        let staging = staging.map(|bytes| DeviceMemory::zeroed(context, bytes)).transpose()?;
        let memory = context.enter()?.allocate_host(bytes)?;
        // SAFETY: the done words lie at the start of the allocation, and nobody else knows of it yet. The rest is memory that
        // the driver made, which holds whatever it holds.
        unsafe { memory.as_ptr().write_bytes(0, TICKETS_MAX * DONE_BYTES) };
        Ok(Self {
            context: Arc::clone(context),
            memory,
            staging: ManuallyDrop::new(staging),
            state_bytes,
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

    fn states_at(&self, slot: usize) -> usize {
        TICKETS_MAX * DONE_BYTES + slot * self.state_bytes
    }

    /// Where the states of a launch of so many rows go.
    pub(super) fn states_address(&self, slot: usize, rows: u64) -> u64 {
        assert!(rows <= self.state_bytes as u64, "A row has a state");
        self.address(self.states_at(slot))
    }

    /// How many of the first `rows` states are 1. The launch of the slot is done.
    pub(super) fn copied(&self, slot: usize, rows: usize) -> u64 {
        assert!(slot < TICKETS_MAX && rows <= self.state_bytes, "A slot has a state for each row");
        // SAFETY: they lie in the allocation.
        let states = unsafe { self.memory.add(self.states_at(slot)) };
        // SAFETY: the bytes are initialised, and nobody writes them: the launch is done, the next one of the slot not begun.
        let states = unsafe { slice::from_raw_parts(states.as_ptr(), rows) };
        states.iter().map(|state| u64::from(*state)).sum()
    }

    fn inputs_at(&self, slot: usize) -> usize {
        TICKETS_MAX * (DONE_BYTES + self.state_bytes) + slot * self.input_bytes
    }

    /// Where the device reads the inputs of a slot, once they are copied there. Nowhere, where there is no room for any.
    pub(super) fn staged_address(&self, slot: usize) -> u64 {
        assert!(slot < TICKETS_MAX, "A slot has room for inputs");
        let start = self.staging.as_ref().map_or(0, |staging| staging.range().start);
        start + (slot * self.input_bytes) as u64
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
