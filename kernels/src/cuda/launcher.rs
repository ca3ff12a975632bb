//! The executor's side of the device: a launch, then a word that its stream writes.
//!
//! Neither [`Launcher::launch`] nor [`Launcher::poll`] allocates, locks, logs or waits. A done word is loaded at each poll; the
//! driver is asked now and then, because a faulted device writes no word.

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use statecopy_proto::{Direction, IndexWidth};

use super::CudaDevice;
use super::arguments::{
    Arguments, INDICES_ADDRESS_BYTES, INLINE_BYTES_MAX, ROWS_PER_LAUNCH_MAX, SHAPE_BATCH,
    SHAPE_FLAGS_ADDRESS, SHAPE_FLAGS_INLINE, SHAPE_INDICES_INLINE, SHAPE_ROW_STATES, THREADS,
    direction_number, grid,
};
use super::context::Context;
use super::driver::DriverError;
use super::expected::{Expected, Prepared, Shape};
use super::kernel_graphs::HeldGraph;
use super::known_rows::known_copied;
use super::memory::CudaRegion;
use super::streams::Streams;
use super::sys::{self, Stream, StreamMemOp};
use super::words::{Extent, TICKETS_MAX, Words};
use crate::device::{
    DeviceFault, Flags, Indices, Launch, Launcher, Moved, Region as _, Signal, Slice, Ticket,
};
use crate::hooks;
use crate::signature::ALIGNMENT_BYTES;

/// Parts of one request under way at once: the next is launched while one runs. More would only keep others waiting.
const DEPTH: usize = 2;
/// How long a launch may be silent before the driver is asked whether the device lives.
const QUERY_INTERVAL: Duration = Duration::from_micros(100);

/// How often the driver is asked while nothing runs. Another client of the same MPS server can end this context.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

impl From<DriverError> for DeviceFault {
    fn from(error: DriverError) -> Self {
        Self(error.to_string())
    }
}

/// Launches copies on streams of its own: one for those without an order, and one for each order that is kept apart.
#[derive(Debug)]
pub struct CudaLauncher {
    context: Arc<Context>,
    streams: Streams,
    words: Words,
    arguments: Box<Arguments>,
    expected: Expected,
    slots: Box<[Option<UnderWay>]>,
    issued: u64,
}

/// A launch that was not answered yet.
#[derive(Debug)]
struct UnderWay {
    ticket: Ticket,
    /// Where it runs, until its word says that it is done; `None` where there was nothing to do.
    stream: Option<Stream>,
    rows: u64,
    /// How many of them are copied, where the host can tell; otherwise the device does.
    copied: Option<u64>,
    /// When the driver was asked last, or the first poll met no word.
    asked: Option<Instant>,
    /// What it was started by: for nobody else before it is done.
    graph: Option<HeldGraph>,
}

impl CudaLauncher {
    pub(super) fn create(context: &Arc<Context>, extent: Extent) -> Result<Self, DriverError> {
        let words = Words::allocate(context, extent)?;
        let streams = Streams::create(context, extent.orders)?;
        Ok(Self {
            context: Arc::clone(context),
            streams,
            words,
            arguments: Box::new(Arguments::zeroed()),
            expected: Expected::none(),
            slots: (0..TICKETS_MAX).map(|_| None).collect(),
            issued: 0,
        })
    }

    /// Checks the launch against its own sizes, and fills in the kernel's parameter. The slot has no launch under way, or nothing of
    /// this launch is in private memory. Gives back how many bytes of the slot's inputs are to be copied to the device first.
    fn fill(&mut self, slot: usize, launch: &Launch<'_, CudaDevice>) -> usize {
        let layout = launch.caches.layout();
        let payload = layout.payload_bytes();
        assert_eq!(launch.variants.payload_bytes(), payload, "The variants are of another class");
        launch.assert_sizes(launch.caches.layers(), payload);
        let part = &launch.part;
        assert!(part.end - part.start <= ROWS_PER_LAUNCH_MAX, "The part is one launch");
        let packed = address(&launch.packed);
        assert!(packed.is_multiple_of(ALIGNMENT_BYTES), "Packed is aligned");

        let arguments = &mut *self.arguments;
        (arguments.bases, arguments.base) = launch.caches.addresses();
        arguments.shape = if arguments.bases == 0 { 0 } else { SHAPE_BATCH };
        arguments.packed = packed;
        arguments.rows = layout.rows();
        arguments.page_stride = layout.page_stride_bytes();
        arguments.payload = payload;
        arguments.selected = number(launch.selected);
        arguments.first_row = number(part.start);
        arguments.direction = direction_number(launch.direction);
        arguments.index_width = match launch.indices.width() {
            IndexWidth::Int32 => 4,
            IndexWidth::Int64 => 8,
        };
        self.fill_inputs(slot, launch)
    }

    /// Indices and flags: where they are, and those in private memory themselves. Gives back how many bytes of the slot's
    /// inputs are to be copied to the device first.
    fn fill_inputs(&mut self, slot: usize, launch: &Launch<'_, CudaDevice>) -> usize {
        let flags = match launch.direction {
            Direction::Gather => &launch.flags,
            Direction::Scatter => &Flags::None,
        };
        check_count(launch);
        let index_bytes = private_bytes(&launch.indices);
        let flag_bytes = match flags {
            Flags::Inline(private) => private.len(),
            Flags::None | Flags::Shared(_) => 0,
        };
        let arguments = &mut *self.arguments;
        let inline_flags_at = index_bytes.max(INDICES_ADDRESS_BYTES);
        let inline = inline_flags_at + flag_bytes <= arguments.inline_bytes.len();
        let (room, flags_at) = if inline {
            (&mut arguments.inline_bytes[..], inline_flags_at)
        } else {
            (self.words.inputs(slot), index_bytes)
        };
        copy_indices(&launch.indices, &mut room[..index_bytes]);
        if let Flags::Inline(private) = flags {
            room[flags_at..flags_at + flag_bytes].copy_from_slice(private);
        }
        let staged = self.words.staged_address(slot);
        let indices = match &launch.indices {
            Indices::Shared(_, shared) => Some(address(shared)),
            Indices::Int32(_) | Indices::Int64(_) if inline => None,
            Indices::Int32(_) | Indices::Int64(_) => Some(staged),
        };
        let (flag_shape, flags) = match flags {
            Flags::None => (0, 0),
            Flags::Shared(shared) => (SHAPE_FLAGS_ADDRESS, address(shared)),
            Flags::Inline(_) if inline => (SHAPE_FLAGS_INLINE, 0),
            Flags::Inline(_) => (SHAPE_FLAGS_ADDRESS, staged + index_bytes as u64),
        };
        match indices {
            Some(address) => arguments.set_indices_address(address),
            None => arguments.shape |= SHAPE_INDICES_INLINE,
        }
        arguments.shape |= flag_shape;
        arguments.flags = flags;
        arguments.inline_flags_at = u32::try_from(inline_flags_at).unwrap_or(u32::MAX);
        if inline { 0 } else { index_bytes + flag_bytes }
    }

    /// Fills the parameter in and starts the kernel, by a graph where it may. Nothing tells yet when it is done. Gives the rows of
    /// the part, and the graph where it was started by one: to be kept until it is done.
    fn start(
        &mut self,
        slot: usize,
        launch: &Launch<'_, CudaDevice>,
        stream: Stream,
        (copied, by_graph): (Option<u64>, bool),
    ) -> Result<(u64, Option<HeldGraph>), DeviceFault> {
        let variant = launch.variant();
        let staged = self.fill(slot, launch);
        hooks::at_launch(variant);
        let rows = launch.part.end - launch.part.start;
        if copied.is_none() {
            self.arguments.shape |= SHAPE_ROW_STATES;
            self.arguments.row_states = self.words.states_address(slot, rows);
        }
        if rows == 0 {
            return Ok((0, None));
        }
        let current = self.context.enter()?;
        if staged > 0 {
            // SAFETY: the stream is ours, and the slot is free until this launch is answered.
            unsafe { self.words.stage(current, stream, slot, staged) }?;
        }
        let shape = shape(launch, &self.arguments);
        let free = || launch.variants.hold_graph(variant);
        let graph = by_graph.then(|| self.expected.take(shape, free)).flatten();
        // SAFETY: the function is of a variant that takes `Arguments`, whose code the caller's variants keep loaded. `fill` checked
        // that packed, indices and flags hold what the launch says and that the part lies inside it; binding checked the layers
        // against their regions. The caller keeps all of it until it knows of the end.
        let graph = unsafe { give(&self.context, shape, stream, graph) }?;
        Ok((rows, graph))
    }

    /// Starts a launch as a worker without a daemon does: no word tells of its end, [`CudaLauncher::synchronize`] waits for it.
    /// Gives what it moves. The caller keeps what the launch names until then.
    ///
    /// # Errors
    /// When the device failed.
    ///
    /// # Panics
    /// When indices and flags do not all travel with the launch.
    pub fn enqueue(&mut self, launch: &Launch<'_, CudaDevice>) -> Result<Moved, DeviceFault> {
        self.enqueue_on(launch, self.streams.unordered())
    }

    /// The same on a stream that lives, which is waited for by whoever has it.
    pub(super) fn enqueue_on(
        &mut self,
        launch: &Launch<'_, CudaDevice>,
        stream: Stream,
    ) -> Result<Moved, DeviceFault> {
        let flags = match &launch.flags {
            Flags::Inline(private) => private.len(),
            Flags::None | Flags::Shared(_) => 0,
        };
        let bytes = private_bytes(&launch.indices) + flags;
        let copied = known_copied(launch).filter(|_| bytes <= INLINE_BYTES_MAX);
        let copied = copied.expect("indices and flags travel with the launch");
        // So nothing of the slot is used.
        let (rows, _) = self.start(slot_of(self.issued), launch, stream, (Some(copied), false))?;
        Ok(Moved { copied, masked: rows - copied })
    }

    /// Waits in the driver until everything that was started is done.
    ///
    /// # Errors
    /// When the device failed.
    pub fn synchronize(&mut self) -> Result<(), DeviceFault> {
        // SAFETY: the stream is ours.
        Ok(unsafe { self.context.enter()?.synchronize(self.streams.unordered()) }?)
    }

    /// Starts a launch on one of the streams, which then writes the signal and the ticket's done word.
    fn begin(
        &mut self,
        launch: &Launch<'_, CudaDevice>,
        stream: Stream,
        (copied, signal): (Option<u64>, Option<Signal<'_, CudaDevice>>),
    ) -> Result<Ticket, DeviceFault> {
        let (ticket, slot) = (Ticket(self.issued), slot_of(self.issued));
        assert!(self.slots[slot].is_none(), "At most {TICKETS_MAX} launches await their poll");
        let (rows, graph) = self.start(slot, launch, stream, (copied, true))?;
        self.issued += 1;
        let runs_on = (rows > 0 || signal.is_some()).then_some(stream);
        // Before the words are asked for: if that fails, the kernel may run and its graph stays taken.
        self.slots[slot] =
            Some(UnderWay { ticket, stream: runs_on, rows, copied, asked: None, graph });
        let (done, value) = (self.words.done_address(slot), Self::done_value(ticket));
        let current = self.context.enter()?;
        match signal {
            Some(Signal { words, offset, value: told }) => {
                let mut writes = [(words.address(offset), told), (done, value)].map(write);
                // SAFETY: the stream is ours. The caller keeps its words until the ticket answered; ours are freed only when
                // the streams are idle.
                unsafe { current.operate(stream, &mut writes) }?;
            }
            // SAFETY: as above.
            None if rows > 0 => unsafe { current.write_word(stream, done, value) }?,
            None => {}
        }
        Ok(ticket)
    }

    /// The done word's value for a ticket. The words begin as 0.
    fn done_value(ticket: Ticket) -> u64 {
        ticket.0 + 1
    }
}

impl Launcher<CudaDevice> for CudaLauncher {
    fn hooked(&self) -> bool {
        hooks::launch_hook_present()
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn has_room(&self) -> bool {
        self.slots[slot_of(self.issued)].is_none()
    }

    fn launch(&mut self, launch: &Launch<'_, CudaDevice>) -> Result<Ticket, DeviceFault> {
        self.begin(launch, self.streams.unordered(), (known_copied(launch), None))
    }

    fn launch_in_order(
        &mut self,
        launch: &Launch<'_, CudaDevice>,
        stream: u32,
        signal: Option<Signal<'_, CudaDevice>>,
    ) -> Result<Ticket, DeviceFault> {
        let copied = known_copied(launch).unwrap_or(launch.part.end - launch.part.start);
        self.begin(launch, self.streams.of(stream), (Some(copied), signal))
    }

    fn expect(&mut self, launch: &Launch<'_, CudaDevice>) -> Result<(), DeviceFault> {
        let inline = matches!(launch.flags, Flags::Inline(_)) || private_bytes(&launch.indices) > 0;
        if inline || launch.part.is_empty() {
            return Ok(());
        }
        // Of no slot: nothing is in private memory.
        let staged = self.fill(0, launch);
        debug_assert_eq!(staged, 0, "indices and flags lie in memory");
        let free = || launch.variants.hold_graph(launch.variant());
        let current = self.context.enter()?;
        match self.expected.add(current, shape(launch, &self.arguments), free) {
            Err(error) if self.context.faulted() => Err(error.into()),
            // Its launch does without.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn expect_nothing(&mut self) {
        self.expected.clear();
    }

    fn poll(&mut self, ticket: Ticket) -> Result<Option<Moved>, DeviceFault> {
        let slot = slot_of(ticket.0);
        let under_way = self.slots[slot].as_mut().filter(|under_way| under_way.ticket == ticket);
        let under_way = under_way.expect("a ticket of this launcher is polled until it answers");
        let is_done = |words: &Words| words.done(slot) == Self::done_value(ticket);
        if let Some(stream) = under_way.stream
            && !is_done(&self.words)
        {
            let now = Instant::now();
            let asked = *under_way.asked.get_or_insert(now);
            if now.duration_since(asked) < QUERY_INTERVAL {
                return Ok(None);
            }
            under_way.asked = Some(now);
            // SAFETY: the stream is ours.
            let idle = unsafe { self.context.enter()?.is_idle(stream) }?;
            if !idle || !is_done(&self.words) {
                return Ok(None);
            }
        }
        let (rows, copied) = (under_way.rows, under_way.copied);
        self.slots[slot] = None;
        let states = usize::try_from(rows).expect("rows of one launch");
        let copied = copied.unwrap_or_else(|| self.words.copied(slot, states));
        Ok(Some(Moved { copied, masked: rows - copied }))
    }

    fn check_every(&self) -> Option<Duration> {
        Some(CHECK_INTERVAL)
    }

    fn check(&mut self) -> Result<(), DeviceFault> {
        // SAFETY: the stream is ours.
        unsafe { self.context.enter()?.is_idle(self.streams.unordered()) }?;
        Ok(())
    }
}

impl Drop for CudaLauncher {
    fn drop(&mut self) {
        let all_idle = || {
            let current = self.context.enter()?;
            self.streams.all().iter().try_fold(true, |idle, stream| {
                // SAFETY: the stream is ours.
                Ok(idle && unsafe { current.is_idle(*stream) }?)
            })
        };
        if self.context.faulted() || all_idle() != Ok::<bool, DriverError>(true) {
            self.words.abandon();
            // What may still run stays taken, and its code loaded.
            let slots = self.slots.iter_mut().filter_map(Option::take);
            slots.filter_map(|under_way| under_way.graph).for_each(mem::forget);
            return;
        }
        for stream in self.streams.all() {
            // SAFETY: the stream is ours, and this is its end.
            self.context.give_back(|current| unsafe { current.destroy_stream(*stream) });
        }
    }
}

/// What a launch gives the device, with the parameter that was filled in for it.
fn shape<'a>(launch: &Launch<'_, CudaDevice>, arguments: &'a Arguments) -> Shape<'a> {
    let grid = grid(arguments.payload, launch.part.end - launch.part.start);
    let grid = grid.expect("a class that was compiled and a part of one launch have a grid");
    Shape { function: launch.variants.function(launch.variant()), grid, arguments }
}

/// Starts a kernel, by a graph of it where one is given. Gives that back where it was started by it.
///
/// # Safety
/// As [`Current::launch`]; and what the graph is set to is this launch.
unsafe fn give(
    context: &Context,
    Shape { function, grid, arguments }: Shape<'_>,
    stream: Stream,
    graph: Option<Prepared>,
) -> Result<Option<HeldGraph>, DriverError> {
    let current = context.enter()?;
    if let Some(Prepared { mut graph, is_set }) = graph {
        let set = match is_set {
            true => Ok(()),
            // SAFETY: it was not launched since it is held.
            false => unsafe { graph.set(current, grid, arguments) },
        };
        // SAFETY: as above, and by the caller's own promise; it is kept where this succeeds.
        match set.and_then(|()| unsafe { graph.launch(current, stream) }) {
            Ok(()) => return Ok(Some(graph)),
            Err(error) if context.faulted() => return Err(error),
            // Nothing was started, and the usual way asks less of the driver.
            Err(_) => {}
        }
    }
    // SAFETY: the caller's own promise.
    unsafe { current.launch(function, grid, THREADS, stream, arguments) }?;
    Ok(None)
}

/// A stream's write of a word.
fn write((address, value): (u64, u64)) -> StreamMemOp {
    let operation = sys::STREAM_MEM_OP_WRITE_VALUE_64;
    StreamMemOp { operation, address, value, ..StreamMemOp::default() }
}

fn slot_of(ticket: u64) -> usize {
    usize::try_from(ticket % TICKETS_MAX as u64).expect("a small number")
}

/// A count of rows. A request of more than 32 bits of them would move at least 4 GiB of packed bytes past any bound that the
/// daemon sets on layers and selected rows.
fn number(rows: u64) -> u32 {
    u32::try_from(rows).expect("layers and selected rows are bounded settings")
}

/// The first byte of a slice, which lies in its region.
fn address(slice: &Slice<'_, CudaRegion>) -> u64 {
    debug_assert!(slice.offset() + slice.bytes() <= slice.region().bytes(), "checked when made");
    slice.region().address() + slice.offset()
}

/// One index and one flag a selected row.
fn check_count(launch: &Launch<'_, CudaDevice>) {
    let indices = match &launch.indices {
        Indices::Int32(private) => private.len() as u64,
        Indices::Int64(private) => private.len() as u64,
        Indices::Shared(width, shared) => {
            assert!(address(shared).is_multiple_of(width.bytes()), "Indices are aligned");
            shared.bytes() / width.bytes()
        }
    };
    assert_eq!(indices, launch.selected, "One index a selected row");
    let flags = match &launch.flags {
        Flags::None => launch.selected,
        Flags::Inline(private) => private.len() as u64,
        Flags::Shared(shared) => shared.bytes(),
    };
    assert_eq!(flags, launch.selected, "One flag a selected row");
}

/// Bytes of indices in private memory.
fn private_bytes<R>(indices: &Indices<'_, R>) -> usize {
    match indices {
        Indices::Int32(private) => size_of_val(*private),
        Indices::Int64(private) => size_of_val(*private),
        Indices::Shared(..) => 0,
    }
}

/// Copies indices in private memory, as the device reads them.
fn copy_indices<R>(indices: &Indices<'_, R>, into: &mut [u8]) {
    match indices {
        Indices::Int32(private) => {
            for (bytes, index) in into.chunks_exact_mut(4).zip(*private) {
                bytes.copy_from_slice(&index.to_ne_bytes());
            }
        }
        Indices::Int64(private) => {
            for (bytes, index) in into.chunks_exact_mut(8).zip(*private) {
                bytes.copy_from_slice(&index.to_ne_bytes());
            }
        }
        Indices::Shared(..) => {}
    }
}
