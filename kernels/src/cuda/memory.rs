//! Device memory: of workers, mapped here, and our own.
//!
//! A region is one whole allocation behind a legacy handle, or pieces of VMM memory side by side. An import either ends in a
//! region or leaves nothing mapped; an owner's `Drop` undoes each step, the last one first.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use statecopy_proto::{HandleKind, Refusal, RefusalCode};

use super::context::{Context, Current};
use super::driver::{DriverError, OpenError};
use super::memory_calls::{AddressRange, Shareable};
use super::pieces::{MemoryHandle, PieceMapping};
use super::sys::{FabricHandle, IpcMemHandle};
use crate::device::{AllocationId, Announced, Import, Piece, PieceHandle, Region};
use crate::sync::{AtomicU64, Ordering};

/// Bytes of a legacy or fabric handle.
const HANDLE_BYTES: usize = 64;
/// `CUDA_ERROR_INVALID_CONTEXT`: what the driver says to a legacy handle of the own process, or of one of an equal number.
const SAME_PROCESS: i32 = 201;

/// Memory of the device that this process allocated.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    context: Arc<Context>,
    range: AddressRange,
}

impl DeviceMemory {
    /// Allocates that many bytes, which hold whatever was there.
    pub(super) fn uninitialised(context: &Arc<Context>, bytes: u64) -> Result<Self, DriverError> {
        let range = AddressRange { start: context.enter()?.allocate(bytes)?, bytes };
        Ok(Self { context: Arc::clone(context), range })
    }

    /// Allocates that many bytes, all zero.
    pub(super) fn zeroed(context: &Arc<Context>, bytes: u64) -> Result<Self, DriverError> {
        let memory = Self::uninitialised(context, bytes)?;
        // SAFETY: the range is what was allocated.
        unsafe { context.enter()?.clear(memory.range) }?;
        Ok(memory)
    }

    pub(super) fn range(&self) -> AddressRange {
        self.range
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.context.give_back(|current| current.free(self.range.start));
    }
}

/// Memory of the device that kernels of this process may read and write.
pub struct CudaRegion {
    context: Arc<Context>,
    range: AddressRange,
    allocation: AllocationId,
    /// Keeps the range mapped.
    _backing: Backing,
}

#[expect(dead_code, reason = "they are held for their drop")]
enum Backing {
    Ipc(Arc<IpcMapping>),
    Pieces(PieceMapping),
    Own(DeviceMemory),
}

/// The first word of an [`AllocationId`]: which numbers the second one is among.
mod numbers {
    /// Addresses of legacy mappings, one an allocation.
    pub(super) const IPC: u64 = 1;
    /// Imports of pieces. A worker's own numbers are claims, so two imports are never taken for the same memory.
    pub(super) const PIECES: u64 = 2;
    /// Addresses of our own memory.
    pub(super) const OWN: u64 = 3;
}

impl CudaRegion {
    /// Zeroed memory for prepare.
    pub(super) fn scratch(context: &Arc<Context>, bytes: u64) -> Result<Self, Refusal> {
        // The driver allocates nothing of nothing.
        let memory = DeviceMemory::zeroed(context, bytes.max(1)).map_err(|error| {
            let left = context.enter().and_then(Current::memory_left);
            let free = left.map_or_else(
                |_| "an unknown amount is".to_owned(),
                |left| format!("{} of {} are", left.free, left.total),
            );
            let what = format!("Scratch of {bytes} bytes, where {free} free, was refused");
            error.refusal(RefusalCode::PrepareFailed, &what)
        })?;
        Ok(Self {
            context: Arc::clone(context),
            range: AddressRange { bytes, ..memory.range },
            allocation: AllocationId(numbers::OWN, memory.range.start),
            _backing: Backing::Own(memory),
        })
    }

    /// Where it begins, for the device.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.range.start
    }

    /// Fills a part of it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the part is not of this region.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), DriverError> {
        let to = self.range.part(offset, bytes.len());
        // SAFETY: the part lies in the region, which is mapped.
        unsafe { self.context.enter()?.write(to, bytes) }
    }

    /// Reads a part of it.
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// When the part is not of this region.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), DriverError> {
        let from = self.range.part(offset, into.len());
        // SAFETY: the part lies in the region, which is mapped.
        unsafe { self.context.enter()?.read(from, into) }
    }
}

impl Region for CudaRegion {
    fn bytes(&self) -> u64 {
        self.range.bytes
    }

    fn allocation(&self) -> AllocationId {
        self.allocation
    }
}

impl fmt::Debug for CudaRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without addresses, which logs do not show.
        f.debug_struct("CudaRegion").field("bytes", &self.range.bytes).finish_non_exhaustive()
    }
}

/// A region on its way into this process.
#[derive(Debug)]
pub struct CudaImport {
    context: Arc<Context>,
    legacy: Arc<LegacyHandles>,
    announced: Announced,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    Legacy(Option<Arc<IpcMapping>>),
    Pieces(Shareable, PieceMapping),
}

impl CudaImport {
    pub(super) fn begin(
        context: &Arc<Context>,
        legacy: &Arc<LegacyHandles>,
        announced: Announced,
    ) -> Result<Self, Refusal> {
        let Announced { kind, bytes, pieces } = announced;
        if bytes == 0 || pieces == 0 {
            return Err(invalid("A region has at least one piece and one byte"));
        }
        let stage = match kind {
            HandleKind::Memfd => {
                let sentence = "The CUDA device takes device memory, not a memfd";
                return Err(Refusal::new(RefusalCode::HandleUnsupported, sentence).about("kind"));
            }
            HandleKind::CudaIpc if pieces != 1 => {
                return Err(invalid(format!("A legacy handle is one piece, not {pieces}")));
            }
            HandleKind::CudaIpc => Stage::Legacy(None),
            HandleKind::CudaVmm => Stage::Pieces(Shareable::Descriptor, reserve(context, bytes)?),
            HandleKind::CudaFabric => Stage::Pieces(Shareable::Fabric, reserve(context, bytes)?),
        };
        let (context, legacy) = (Arc::clone(context), Arc::clone(legacy));
        Ok(Self { context, legacy, announced, stage })
    }

    /// Opens the one legacy handle of a region.
    fn open_legacy(&self, piece: &Piece) -> Result<Arc<IpcMapping>, Refusal> {
        let Announced { bytes, .. } = self.announced;
        let PieceHandle::Value(handle) = &piece.handle else {
            return Err(another_kind());
        };
        if piece.bytes != bytes {
            let whole = format!("A legacy handle is the whole region of {bytes} bytes");
            return Err(invalid(format!("{whole}, not {} of them", piece.bytes)));
        }
        self.legacy.open(&self.context, IpcMemHandle(exact(handle)?), piece.buffer, bytes)
    }
}

/// Addresses for a region of virtual memory.
fn reserve(context: &Arc<Context>, bytes: u64) -> Result<PieceMapping, Refusal> {
    let refused = |error: DriverError| {
        let what = format!("No addresses could be reserved for {bytes} bytes of virtual memory");
        error.refusal(RefusalCode::HandleInvalid, &what)
    };
    let granularity = PieceMapping::granularity(context).map_err(refused)?;
    if !bytes.is_multiple_of(granularity) {
        return Err(invalid(format!(
            "Virtual memory comes in multiples of {granularity} bytes, and {bytes} are none"
        )));
    }
    PieceMapping::reserve(context, bytes).map_err(refused)
}

/// Maps the next piece of virtual memory. A descriptor is closed either way: the mapping lives without it.
fn map_piece(
    context: &Context,
    mapping: &mut PieceMapping,
    shareable: Shareable,
    piece: Piece,
) -> Result<(), Refusal> {
    let (at, bytes, left) = (mapping.pieces(), piece.bytes, mapping.left());
    if bytes == 0 || bytes > left {
        return Err(invalid(format!(
            "Piece {at} has {bytes} bytes, where {left} of the region are left"
        )));
    }
    let refused = |error: DriverError| {
        let what = format!("Piece {at}, announced with {bytes} bytes, cannot be mapped");
        error.refusal(RefusalCode::HandleInvalid, &what)
    };
    let memory = match (shareable, piece.handle) {
        (Shareable::Descriptor, PieceHandle::Descriptor(descriptor)) => {
            MemoryHandle::from_descriptor(context, descriptor.as_fd())
        }
        (Shareable::Fabric, PieceHandle::Value(value)) => {
            MemoryHandle::from_fabric(context, FabricHandle(exact(&value)?))
        }
        _ => return Err(another_kind()),
    };
    let memory = memory.map_err(refused)?;
    if !memory.is_of_this_device().map_err(refused)? {
        return Err(invalid(format!("Piece {at} is not memory of this device")));
    }
    mapping.map(bytes, &memory).map_err(refused)
}

impl Import for CudaImport {
    type Region = CudaRegion;

    fn add(&mut self, piece: Piece) -> Result<(), Refusal> {
        let opened = match &mut self.stage {
            Stage::Legacy(Some(_)) => return Err(invalid("A legacy handle is one piece")),
            Stage::Legacy(None) => self.open_legacy(&piece)?,
            Stage::Pieces(shareable, mapping) => {
                let (at, announced) = (mapping.pieces(), self.announced.pieces);
                if at == announced {
                    return Err(invalid(format!("{announced} pieces were announced, more came")));
                }
                let mapped = map_piece(&self.context, mapping, *shareable, piece);
                return mapped.map_err(|refusal| refusal.about(format!("piece {at}")));
            }
        };
        self.stage = Stage::Legacy(Some(opened));
        Ok(())
    }

    fn finish(self) -> Result<CudaRegion, Refusal> {
        let Announced { bytes, pieces, .. } = self.announced;
        let context = self.context;
        match self.stage {
            Stage::Legacy(None) => Err(invalid("The region's handle did not come")),
            Stage::Legacy(Some(mapping)) => Ok(CudaRegion {
                context,
                range: mapping.range,
                allocation: AllocationId(numbers::IPC, mapping.range.start),
                _backing: Backing::Ipc(mapping),
            }),
            Stage::Pieces(_, mapping) => {
                let (came, left) = (mapping.pieces(), mapping.left());
                if came != pieces || left > 0 {
                    return Err(invalid(format!(
                        "{pieces} pieces of {bytes} bytes were announced; {came} came, {left} bytes are left"
                    )));
                }
                mapping.open_access().map_err(|error| {
                    let what = "The device cannot access the mapped pieces";
                    error.refusal(RefusalCode::HandleInvalid, what)
                })?;
                Ok(CudaRegion {
                    context,
                    range: mapping.range(),
                    allocation: AllocationId(
                        numbers::PIECES,
                        IMPORTS.fetch_add(1, Ordering::Relaxed),
                    ),
                    _backing: Backing::Pieces(mapping),
                })
            }
        }
    }
}

/// Numbers of imports of pieces.
static IMPORTS: AtomicU64 = AtomicU64::new(0);

/// A whole allocation of another process, opened by its legacy handle.
#[derive(Debug)]
struct IpcMapping {
    context: Arc<Context>,
    range: AddressRange,
}

impl Drop for IpcMapping {
    fn drop(&mut self) {
        self.context.give_back(|current| current.close_ipc(self.range.start));
    }
}

/// The legacy handles that are open: one mapping an allocation, however many regions it holds.
///
/// The bytes of a handle come back for a new allocation at an old address. As long as the old one is mapped here, the driver
/// would answer with that mapping, so a handle is only taken again for the allocation that it was opened for.
#[derive(Debug, Default)]
pub(super) struct LegacyHandles {
    open: Mutex<HashMap<[u8; HANDLE_BYTES], OpenHandle>>,
}

#[derive(Debug)]
struct OpenHandle {
    buffer: u64,
    mapping: Weak<IpcMapping>,
}

impl LegacyHandles {
    fn open(
        &self,
        context: &Arc<Context>,
        handle: IpcMemHandle,
        buffer: u64,
        bytes: u64,
    ) -> Result<Arc<IpcMapping>, Refusal> {
        let mut open = self.lock();
        open.retain(|_, earlier| earlier.mapping.strong_count() > 0);
        let earlier = open
            .get(&handle.0)
            .and_then(|earlier| Some((earlier.buffer, earlier.mapping.upgrade()?)));
        if let Some((its_buffer, mapping)) = earlier {
            if (its_buffer, mapping.range.bytes) == (buffer, bytes) {
                return Ok(mapping);
            }
            return Err(invalid(format!(
                "The handle comes back for another allocation (buffer {buffer}, {bytes} bytes) while the earlier one \
                 (buffer {its_buffer}, {} bytes) is still mapped",
                mapping.range.bytes
            ))
            .remedied_by("Release the regions of the earlier allocation, then register the new one."));
        }
        let mapping = Arc::new(IpcMapping::open(context, handle)?);
        if mapping.range.bytes != bytes {
            return Err(invalid(format!(
                "The handle is that of an allocation of {} bytes, not of the {bytes} that were announced",
                mapping.range.bytes
            )));
        }
        open.insert(handle.0, OpenHandle { buffer, mapping: Arc::downgrade(&mapping) });
        Ok(mapping)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<[u8; HANDLE_BYTES], OpenHandle>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IpcMapping {
    fn open(context: &Arc<Context>, handle: IpcMemHandle) -> Result<Self, Refusal> {
        let refused = |error: DriverError| {
            let refusal =
                error.refusal(RefusalCode::HandleInvalid, "The legacy handle cannot be opened");
            if error.code() == SAME_PROCESS { same_process(&error) } else { refusal }
        };
        let current = context.enter().map_err(refused)?;
        let start = current.open_ipc(handle).map_err(refused)?;
        let mut mapping =
            Self { context: Arc::clone(context), range: AddressRange { start, bytes: 0 } };
        let range = current.allocation_at(start).map_err(refused)?;
        if range.start != start {
            return Err(invalid("The legacy handle leads into the middle of an allocation"));
        }
        mapping.range = range;
        Ok(mapping)
    }
}

/// A legacy handle cannot be opened in a process with the exporter's number, whatever their namespaces.
fn same_process(error: &DriverError) -> Refusal {
    let sentence = format!(
        "The legacy handle comes from a process of the same number as this one ({}): {error}",
        std::process::id()
    );
    invalid(sentence)
        .about(SAME_PROCESS_SUBJECT)
        .remedied_by("Restart the worker or the daemon, so that their process numbers differ.")
}

/// What a refusal is about when the exporter of a legacy handle has the number of this process in another namespace: a device
/// process that is started again has another number.
pub const SAME_PROCESS_SUBJECT: &str = "process number";

fn exact(value: &[u8]) -> Result<[u8; HANDLE_BYTES], Refusal> {
    value.try_into().map_err(|_| {
        invalid(format!("A handle has {HANDLE_BYTES} bytes, this one {}", value.len()))
    })
}

fn another_kind() -> Refusal {
    invalid("The handle is of another kind than the announced one")
}

fn invalid(sentence: impl Into<String>) -> Refusal {
    Refusal::new(RefusalCode::HandleInvalid, sentence)
}

/// What a device says that has too little memory for something of ours; another error as it is.
pub(super) fn out_of_memory(
    context: &Context,
    device: &str,
    what: &'static str,
    asked: u64,
    error: DriverError,
) -> OpenError {
    if error.is_out_of_memory()
        && let Ok(left) = context.enter().and_then(Current::memory_left)
    {
        let (free, total) = (left.free, left.total);
        return OpenError::OutOfMemory { device: device.to_owned(), what, asked, free, total };
    }
    OpenError::Device { device: device.to_owned(), error }
}
