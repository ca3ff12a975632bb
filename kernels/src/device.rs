//! What a device is to the rest of the system.
//!
//! A device process holds one [`Device`]. Its preparing thread calls [`Device`]; its executor thread owns the one
//! [`Launcher`] and calls nothing else. Regions and caches are shared between the two behind `Arc`.

use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use statecopy_descriptors::Mapping;
use statecopy_proto::{
    DataType, Direction, HandleKind, IndexWidth, PlanKind, Refusal, RefusalCode,
};

use crate::layout::{CacheLayout, Placement};
use crate::plan::{KernelClass, Variant};
use crate::signature::{ALIGNMENT_BYTES, DeviceUuid};

/// What a device says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceDescription {
    /// `host`, `cuda` or `ascend`.
    pub kind: &'static str,
    /// The identity in every signature.
    pub uuid: DeviceUuid,
    /// The name that a person reads.
    pub name: String,
    /// The family that decides the plan kind; `None` when unknown, and then nothing is fused.
    pub family: Option<String>,
    /// Types for which the device declares the fused capability.
    pub fused: Vec<DataType>,
}

/// What a worker says of a region of its memory before the handles come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announced {
    /// How the memory comes.
    pub kind: HandleKind,
    /// Bytes of the region: those of its pieces together.
    pub bytes: u64,
    /// How many pieces follow.
    pub pieces: usize,
}

/// One handle of a region's memory. Pieces lie side by side, in the order in which they come.
#[derive(Debug)]
pub struct Piece {
    /// Bytes behind the handle, as the worker announced them.
    pub bytes: u64,
    /// The allocation's number in the worker's process: another number means other memory, also where the handle's bytes
    /// are the same. 0 where the kind has none.
    pub buffer: u64,
    /// The handle.
    pub handle: PieceHandle,
}

/// What names the memory of a piece.
#[derive(Debug)]
pub enum PieceHandle {
    /// A file descriptor. It is closed once the piece is mapped.
    Descriptor(OwnedFd),
    /// Bytes of the driver's.
    Value(Box<[u8]>),
}

/// Which allocation lies behind a region: equal for two regions of the same memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AllocationId(pub u64, pub u64);

/// Memory of a device, mapped into this process.
pub trait Region: fmt::Debug + Send + Sync + 'static {
    /// Bytes of it. The start is a multiple of 16.
    fn bytes(&self) -> u64;
    /// The allocation behind it.
    fn allocation(&self) -> AllocationId;
}

/// A region on its way: piece by piece, so that nobody holds all its descriptors at once. Dropped before its end, it leaves
/// nothing mapped.
pub trait Import: fmt::Debug + Sized {
    /// What it becomes.
    type Region: Region;

    /// Maps the next piece behind those before it.
    ///
    /// # Errors
    /// HANDLE_INVALID or HANDLE_UNSUPPORTED naming the piece; the import is of no more use.
    fn add(&mut self, piece: Piece) -> Result<(), Refusal>;

    /// The region, once every piece came.
    ///
    /// # Errors
    /// HANDLE_INVALID when the pieces are not what was announced.
    fn finish(self) -> Result<Self::Region, Refusal>;

    /// All pieces at once.
    ///
    /// # Errors
    /// As [`Import::add`] and [`Import::finish`].
    fn of(mut self, pieces: impl IntoIterator<Item = Piece>) -> Result<Self::Region, Refusal> {
        for piece in pieces {
            self.add(piece)?;
        }
        self.finish()
    }
}

/// What a device process takes of its device for itself, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Footprint {
    /// The driver's context; 0 where there is none, or where nobody can tell.
    pub context: u64,
    /// Tables of base addresses, and room for indices and flags on their way.
    pub tables: u64,
    /// Words and buffers that device and executor share, in host memory.
    pub words: u64,
}

/// The compiler configuration (contract: Seal): what may not change between prepare and seal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Configuration {
    /// Name and value, sorted by name.
    pub entries: Vec<(String, String)>,
}

impl Configuration {
    /// The names whose values differ.
    #[must_use]
    pub fn drift(&self, now: &Self) -> Vec<String> {
        let mut names: Vec<String> = self
            .entries
            .iter()
            .filter(|entry| !now.entries.contains(entry))
            .chain(now.entries.iter().filter(|entry| !self.entries.contains(entry)))
            .map(|(name, _)| name.clone())
            .collect();
        names.sort();
        names.dedup();
        names
    }
}

/// A device: memory, kernels, and the means to launch them.
pub trait Device: fmt::Debug + Send + Sync + Sized + 'static {
    /// Memory that was imported or allocated.
    type Region: Region;
    /// Memory that is being imported.
    type Import: Import<Region = Self::Region> + Send;
    /// The compiled variants of one kernel class. Holds no pointer, stream or request buffer.
    type Variants: fmt::Debug + Send + Sync + 'static;
    /// Base addresses of the layers of one binding (one) or binding set (many), where the kernels read them.
    type Caches: fmt::Debug + Send + Sync + 'static;
    /// Words of shared memory that launches write when they are done. Kept until the tickets of those launches answered.
    type Words: fmt::Debug + Send + Sync + 'static;
    /// The executor's side.
    type Launcher: Launcher<Self>;

    /// What it says of itself.
    fn description(&self) -> &DeviceDescription;

    /// What it takes of the device, from its opening on.
    fn footprint(&self) -> Footprint;

    /// Rows that one launch may move at most. At least 1.
    fn rows_per_launch_max(&self) -> u64;

    /// Begins to map what a worker announced.
    ///
    /// # Errors
    /// HANDLE_INVALID, or HANDLE_UNSUPPORTED for a kind of memory that this device does not take.
    fn import(&self, announced: Announced) -> Result<Self::Import, Refusal>;

    /// Allocates zeroed scratch for prepare. Never called between a seal and the next registration.
    ///
    /// # Errors
    /// PREPARE_FAILED when there is no memory.
    fn scratch(&self, bytes: u64) -> Result<Self::Region, Refusal>;

    /// Compiles or loads the variants of a class. Never called between a seal and the next registration.
    ///
    /// # Errors
    /// PREPARE_FAILED with the compiler's message.
    fn compile(&self, class: &KernelClass) -> Result<Self::Variants, Refusal>;

    /// Binds layers of one signature. All placements have equal layouts and lie in their region; both are checked.
    ///
    /// # Errors
    /// SIGNATURE_MISMATCH or OUT_OF_REGION.
    fn bind(&self, layers: &[(Arc<Self::Region>, Placement)]) -> Result<Self::Caches, Refusal>;

    /// Lets launches write the words of a range of shared memory. Two ranges of one mapping share no page.
    ///
    /// # Errors
    /// PREPARE_FAILED when the range does not lie in the mapping, or the device cannot reach it.
    fn share_words(
        &self,
        mapping: &Arc<Mapping>,
        range: Range<u64>,
    ) -> Result<Self::Words, Refusal>;

    /// Reads the compiler configuration now. The only call that reads the environment.
    fn configuration(&self) -> Configuration;

    /// Looks for injected libraries and callbacks.
    ///
    /// # Errors
    /// HOOK_PRESENT naming what was found.
    fn check_hooks(&self) -> Result<(), Refusal>;

    /// The launching side. Each has its own streams or threads.
    ///
    /// # Errors
    /// PREPARE_FAILED when it cannot be made.
    fn launcher(&self) -> Result<Self::Launcher, Refusal>;

    /// The same for prepare, which launches one row at a time, in no order, with indices and flags in private memory. It takes
    /// little, because other workers are served meanwhile. Never called between a seal and the next registration.
    ///
    /// # Errors
    /// PREPARE_FAILED when it cannot be made.
    fn trial_launcher(&self) -> Result<Self::Launcher, Refusal>;
}

/// Checks that layers make a binding or a binding set: of one signature, each inside its region. Gives their layout.
///
/// # Errors
/// SIGNATURE_MISMATCH or OUT_OF_REGION naming the layer.
pub(crate) fn one_signature<R: Region>(
    layers: &[(Arc<R>, Placement)],
) -> Result<&CacheLayout, Refusal> {
    let mismatch = |sentence: String| Refusal::new(RefusalCode::SignatureMismatch, sentence);
    let Some((_, first)) = layers.first() else {
        return Err(mismatch("A binding set has at least one layer, this one has none".into()));
    };
    for (at, (region, placement)) in layers.iter().enumerate() {
        let alignments = [first, placement].map(|placed| placed.offset() % ALIGNMENT_BYTES);
        if placement.layout() != first.layout() || alignments[0] != alignments[1] {
            return Err(mismatch(format!(
                "Layer {at} of the binding set has another layout or base address mod 16 than layer 0"
            )));
        }
        if placement.end() > region.bytes() {
            return Err(Refusal::new(
                RefusalCode::OutOfRegion,
                format!(
                    "Layer {at} of the binding set ends at byte {} of a region of {} bytes",
                    placement.end(),
                    region.bytes()
                ),
            ));
        }
    }
    Ok(first.layout())
}

/// Checks a range of words against their mapping.
pub(crate) fn words_in(mapping: &Mapping, range: &Range<u64>) -> Result<(), Refusal> {
    if range.start < range.end && range.end <= mapping.len() as u64 {
        return Ok(());
    }
    let sentence = format!(
        "Words at {}..{} do not lie in a memory of {} bytes",
        range.start,
        range.end,
        mapping.len()
    );
    Err(Refusal::new(RefusalCode::PrepareFailed, sentence))
}

/// A range of a region that holds it whole.
#[derive(Debug)]
pub struct Slice<'a, R> {
    region: &'a Arc<R>,
    offset: u64,
    bytes: u64,
}

impl<R> Clone for Slice<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Slice<'_, R> {}

impl<'a, R: Region> Slice<'a, R> {
    /// `bytes` bytes at `offset`; `None` when they reach past the region.
    #[must_use]
    pub fn new(region: &'a Arc<R>, offset: u64, bytes: u64) -> Option<Self> {
        let end = offset.checked_add(bytes)?;
        (end <= region.bytes()).then_some(Self { region, offset, bytes })
    }

    /// The region.
    #[must_use]
    pub fn region(&self) -> &'a Arc<R> {
        self.region
    }

    /// Where it begins, in bytes from the region's start.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How long it is.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Where a request's indices are.
#[derive(Debug)]
pub enum Indices<'a, R> {
    /// Copied to private memory.
    Int32(&'a [i32]),
    /// Copied to private memory.
    Int64(&'a [i64]),
    /// In shared memory, `selected` of them; each is loaded once, volatile, and only that value is used.
    Shared(IndexWidth, Slice<'a, R>),
}

impl<R> Indices<'_, R> {
    /// Row 0 alone, in private memory.
    #[must_use]
    pub fn first_row(width: IndexWidth) -> Self {
        match width {
            IndexWidth::Int32 => Self::Int32(&[0]),
            IndexWidth::Int64 => Self::Int64(&[0]),
        }
    }

    /// How wide they are.
    #[must_use]
    pub fn width(&self) -> IndexWidth {
        match self {
            Self::Int32(_) => IndexWidth::Int32,
            Self::Int64(_) => IndexWidth::Int64,
            Self::Shared(width, _) => *width,
        }
    }
}

/// Where a request's initial-state flags are. One byte each; zero is false.
#[derive(Debug)]
pub enum Flags<'a, R> {
    /// Every valid row.
    None,
    /// Copied to private memory.
    Inline(&'a [u8]),
    /// In shared memory, `selected` of them; each is loaded once.
    Shared(Slice<'a, R>),
}

/// One launch: a part of one request. Everything in it was checked by the caller; a device asserts the sizes.
#[derive(Debug)]
pub struct Launch<'a, D: Device> {
    /// The sealed plan's kind.
    pub kind: PlanKind,
    /// Its compiled variants.
    pub variants: &'a D::Variants,
    /// The layers, in the order of the packed buffer.
    pub caches: &'a D::Caches,
    /// Which way.
    pub direction: Direction,
    /// Selected rows of each layer.
    pub selected: u64,
    /// One index a selected row; the same for every layer.
    pub indices: Indices<'a, D::Region>,
    /// Initial-state flags. A scatter ignores them.
    pub flags: Flags<'a, D::Region>,
    /// `[L, selected, H, V, K]`.
    pub packed: Slice<'a, D::Region>,
    /// The part of the `L * selected` rows that this launch moves.
    pub part: Range<u64>,
}

impl<D: Device> Launch<'_, D> {
    /// The variant that serves it.
    #[must_use]
    pub fn variant(&self) -> Variant {
        Variant::serving(self.kind, self.direction, self.indices.width())
    }

    /// Holds it against the sizes of what it names, as every device does before it hands out an address.
    ///
    /// # Panics
    /// When packed is not `[L, selected, H, V, K]`, or the part lies outside of it.
    pub fn assert_sizes(&self, layers: u64, payload_bytes: u64) {
        let rows = layers.checked_mul(self.selected);
        let packed_bytes = rows.and_then(|rows| rows.checked_mul(payload_bytes));
        assert_eq!(Some(self.packed.bytes()), packed_bytes, "Packed is [L, selected, H, V, K]");
        let part = &self.part;
        assert!(
            part.start <= part.end && Some(part.end) <= rows,
            "The part lies inside the request"
        );
    }
}

/// What a launch writes where the other side sees it, once everything that it moves is there.
#[derive(Debug)]
pub struct Signal<'a, D: Device> {
    /// The words.
    pub words: &'a D::Words,
    /// Which of them: bytes from the start of the mapping, a multiple of 8, in the range that is shared.
    pub offset: u64,
    /// What to write.
    pub value: u64,
}

impl<D: Device> Clone for Signal<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for Signal<'_, D> {}

/// Rows that a launch moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Rows whose payload was copied.
    pub copied: u64,
    /// Rows that were cleared (gather) or skipped (scatter).
    pub masked: u64,
}

/// The device failed; what was running is undefined.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("The device failed: {0}")]
pub struct DeviceFault(pub String);

/// One launch under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket(pub u64);

/// Orders that a launcher keeps apart: launches in one of them never wait for those in another.
pub const STREAMS: u32 = 32;

/// The executor's side of a device. Never blocks, allocates device memory, compiles or reads the environment.
pub trait Launcher<D: Device>: Send {
    /// Whether a foreign hook sits on the launch path: one load.
    fn hooked(&self) -> bool;

    /// Launches of one request that are worth having under way at once: 1 where a launch is done when it returns. More
    /// would keep the others waiting for longer.
    fn depth(&self) -> usize;

    /// Whether a launch can be started now. Otherwise poll first.
    fn has_room(&self) -> bool;

    /// Starts a launch.
    ///
    /// # Errors
    /// When the device failed.
    fn launch(&mut self, launch: &Launch<'_, D>) -> Result<Ticket, DeviceFault>;

    /// Starts a launch that comes after those of the same number, and has no order with others but for those whose number is
    /// the same modulo [`STREAMS`]. Done, it writes the signal, then its ticket answers; a launch of no rows does so as well.
    /// The answer counts every row as copied where only the device could tell: telling takes it time that a stream waits for.
    ///
    /// # Errors
    /// When the device failed.
    fn launch_in_order(
        &mut self,
        launch: &Launch<'_, D>,
        stream: u32,
        signal: Option<Signal<'_, D>>,
    ) -> Result<Ticket, DeviceFault>;

    /// A launch in order that may come, with its indices and flags in shared memory: what takes time and gives the device nothing is
    /// done beforehand, where there is room. What comes may be another one.
    ///
    /// # Errors
    /// When the device failed.
    fn expect(&mut self, launch: &Launch<'_, D>) -> Result<(), DeviceFault> {
        let _needs_nothing = launch;
        Ok(())
    }

    /// Lets go of what was expected, before what it named may go.
    fn expect_nothing(&mut self) {}

    /// The outcome of a launch, or `None` while it runs. A ticket is polled until it answers, and then no more.
    ///
    /// # Errors
    /// When the device failed.
    fn poll(&mut self, ticket: Ticket) -> Result<Option<Moved>, DeviceFault>;

    /// How often [`Launcher::check`] is worth asking while nothing runs; `None` for a device that does not fail by itself.
    fn check_every(&self) -> Option<Duration> {
        None
    }

    /// Whether the device lives, although nothing runs on it.
    ///
    /// # Errors
    /// When it failed meanwhile.
    fn check(&mut self) -> Result<(), DeviceFault> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Bytes(u64);

    impl Region for Bytes {
        fn bytes(&self) -> u64 {
            self.0
        }

        fn allocation(&self) -> AllocationId {
            AllocationId(0, 0)
        }
    }

    #[test]
    fn a_slice_lies_inside_its_region() {
        let region = Arc::new(Bytes(100));
        for (offset, bytes) in [(0, 0), (0, 100), (100, 0), (99, 1), (40, 60)] {
            let slice = Slice::new(&region, offset, bytes).unwrap();
            assert_eq!((slice.offset(), slice.bytes()), (offset, bytes));
        }
        for (offset, bytes) in [(0, 101), (101, 0), (99, 2), (u64::MAX, 1), (1, u64::MAX), (50, 51)]
        {
            assert!(Slice::new(&region, offset, bytes).is_none(), "{offset} {bytes}");
        }
    }
}
