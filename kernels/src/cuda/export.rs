//! The worker's side of shared device memory.
//!
//! A worker has an address, from whatever allocator. The driver knows how the memory there can be shared: by a legacy handle
//! (the default allocators), by a descriptor or fabric handle a piece (virtual memory: PyTorch's expandable segments, vLLM's
//! sleep mode), or not at all (stream-ordered pools). What is shared is whole allocations or pieces, so the region begins at
//! or before the address: [`Export::offset`] says where in it the address lies.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use statecopy_proto::{HandleKind, Refusal, RefusalCode};

use super::allocation::{Allocator, CudaMemory};
use super::context::{Context, Current, Scheduling};
use super::driver::{Driver, DriverError, OpenError, select};
use super::guest::CudaGuest;
use super::memory::out_of_memory;
use super::memory_calls::{AddressRange, MemoryLeft, PointerFacts, Shareable};
use super::selector::CudaSelector;
use super::sys::{self, MEMORYTYPE_DEVICE};
use crate::device::{Announced, Piece, PieceHandle};
use crate::signature::DeviceUuid;

/// Asks the driver of this process how its memory can be shared.
#[derive(Debug)]
pub struct CudaExporter {
    pub(super) driver: Arc<Driver>,
    /// One a device, retained when memory of that device is first shared.
    contexts: Mutex<Vec<Arc<Context>>>,
}

/// Memory that can be shared. Its handles are taken batch by batch, so that a worker never holds many descriptors.
#[derive(Debug)]
pub struct Export {
    context: Arc<Context>,
    device: DeviceUuid,
    region: AddressRange,
    offset: u64,
    buffers: Vec<Buffer>,
    how: How,
    /// Pieces that were given already.
    given: usize,
}

/// An allocation of this process: where it begins, and its number, which no other ever has. Another one at the same address
/// is other memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Its first byte, for the device.
    pub address: u64,
    /// 0 for memory that has no number.
    pub number: u64,
}

#[derive(Debug)]
enum How {
    Legacy,
    Pieces(Shareable, Vec<AddressRange>),
}

/// Why memory is not shared, while a call of the driver may still fail.
struct Refused(Refusal);

impl From<DriverError> for Refused {
    fn from(error: DriverError) -> Self {
        Self(error.refusal(RefusalCode::HandleInvalid, "The driver does not share the memory"))
    }
}

impl CudaExporter {
    /// Opens the driver that this process uses: [`super::DRIVER_LIBRARY`], unless a test has its own.
    ///
    /// # Errors
    /// When there is none.
    pub fn open(driver_library: &Path) -> Result<Self, OpenError> {
        let driver = Arc::new(Driver::open(driver_library)?);
        Ok(Self { driver, contexts: Mutex::default() })
    }

    /// Finds out how the `bytes` bytes at a device address can be shared. Touches no byte of them, and leaves the thread's
    /// current context as it is.
    ///
    /// # Errors
    /// HANDLE_INVALID when there is no such device memory; HANDLE_UNSUPPORTED when it cannot be shared, naming the allocator
    /// and the remedy.
    pub fn export(&self, address: u64, bytes: u64) -> Result<Export, Refusal> {
        let end = address.checked_add(bytes).filter(|end| *end > address);
        if end.is_none() {
            return Err(invalid("Memory has at least one byte, and its end an address"));
        }
        let wanted = AddressRange { start: address, bytes };
        let refused = |Refused(refusal)| refusal;
        let nowhere = |error: DriverError| {
            error.refusal(RefusalCode::HandleInvalid, "There is no device memory at that address")
        };
        let ordinal = self.driver.device_at(address).map_err(nowhere)?;
        let device = self.driver.visible(ordinal).map_err(nowhere)?;
        let context = self.context(ordinal).map_err(nowhere)?;
        // Memory may be seen for the first time while some stream is captured.
        let found = context.visit(|current| {
            current.relaxed(|current| {
                let (region, how) = find(current, wanted)?;
                Ok((region, buffers(current, region, &how)?, how))
            })
        });
        let (region, buffers, how) = found.map_err(refused)?;
        let offset = address - region.start;
        Ok(Export { context, device: device.uuid, region, offset, buffers, how, given: 0 })
    }

    /// Allocates device memory of this process, all of whose calls then go to that device.
    ///
    /// # Errors
    /// When there is no such device, or no memory.
    pub fn allocate(
        &self,
        selector: CudaSelector,
        bytes: u64,
        allocator: Allocator,
    ) -> Result<CudaMemory, OpenError> {
        let device = select(&self.driver, selector)?;
        let failed = |error| OpenError::Device { device: device.label(), error };
        let context = self.context(device.device).map_err(failed)?;
        CudaMemory::allocate(Arc::clone(&context), bytes, allocator).map_err(|error| {
            out_of_memory(&context, &device.label(), "a worker's memory", bytes, error)
        })
    }

    /// A device, for a process in which others use it too.
    ///
    /// # Errors
    /// When there is no such device, or no memory for a context of it.
    pub fn guest(&self, selector: CudaSelector) -> Result<CudaGuest, OpenError> {
        let device = select(&self.driver, selector)?;
        let failed = |error| OpenError::Device { device: device.label(), error };
        let context = self.context(device.device).map_err(failed)?;
        Ok(CudaGuest::new(context, device))
    }

    /// The number of the allocation at a device address, which no other of this process ever has; 0 for memory that has none.
    /// Waits for nothing.
    ///
    /// # Errors
    /// When there is no memory at the address.
    pub fn buffer_at(&self, address: u64) -> Result<u64, DriverError> {
        self.driver.buffer_at(address)
    }

    /// How much memory of a device is free, for all processes together.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn memory_left(&self, selector: CudaSelector) -> Result<MemoryLeft, OpenError> {
        let device = select(&self.driver, selector)?;
        let failed = |error| OpenError::Device { device: device.label(), error };
        let context = self.context(device.device).map_err(failed)?;
        context.visit(|current| current.memory_left()).map_err(failed)
    }

    pub(super) fn context(&self, device: sys::Device) -> Result<Arc<Context>, DriverError> {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = contexts.iter().find(|context| context.device() == device) {
            return Ok(Arc::clone(context));
        }
        let driver = Arc::clone(&self.driver);
        let context = Arc::new(Context::retain(driver, device, Scheduling::Unchanged)?);
        contexts.push(Arc::clone(&context));
        Ok(context)
    }
}

impl Export {
    /// What to announce before the pieces.
    #[must_use]
    pub fn announced(&self) -> Announced {
        let (kind, pieces) = match &self.how {
            How::Legacy => (HandleKind::CudaIpc, 1),
            How::Pieces(Shareable::Descriptor, pieces) => (HandleKind::CudaVmm, pieces.len()),
            How::Pieces(Shareable::Fabric, pieces) => (HandleKind::CudaFabric, pieces.len()),
        };
        Announced { kind, bytes: self.region.bytes, pieces }
    }

    /// The device that the memory is of.
    #[must_use]
    pub fn device(&self) -> DeviceUuid {
        self.device
    }

    /// Where the exported address lies, in bytes from the start of the region.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The allocations that the region consists of, in the order of their addresses: one, or one a piece.
    #[must_use]
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// The next pieces, at most that many; none after the last.
    ///
    /// # Errors
    /// HANDLE_INVALID when the memory is no longer what it was.
    pub fn next_pieces(&mut self, pieces_max: usize) -> Result<Vec<Piece>, Refusal> {
        let (how, region, given) = (&self.how, self.region, self.given);
        let buffer = self.buffers.first().map_or(0, |buffer| buffer.number);
        let taken = self.context.visit(|current| {
            current.relaxed(|current| match how {
                How::Legacy if given > 0 || pieces_max == 0 => Ok(Vec::new()),
                How::Legacy => Ok(vec![legacy(current, region, buffer)?]),
                How::Pieces(shareable, pieces) => pieces
                    .iter()
                    .skip(given)
                    .take(pieces_max)
                    .map(|piece| take(current, *piece, *shareable))
                    .collect(),
            })
        });
        let taken = taken.map_err(|Refused(refusal)| refusal)?;
        self.given += taken.len();
        Ok(taken)
    }
}

/// The region that holds the wanted range, and how it is shared.
fn find(current: Current<'_>, wanted: AddressRange) -> Result<(AddressRange, How), Refused> {
    let facts = current.pointer_facts(wanted.start)?;
    check_allocator(facts)?;
    if !facts.legacy_ipc {
        let (shareable, pieces) = pieces(current, wanted)?;
        let start = pieces.first().map_or(wanted.start, |first| first.start);
        let end = pieces.last().map_or(wanted.end(), |last| last.end());
        return Ok((AddressRange { start, bytes: end - start }, How::Pieces(shareable, pieces)));
    }
    let region = current.allocation_at(wanted.start)?;
    if region.end() < wanted.end() {
        return Err(Refused(invalid(format!(
            "The {} bytes reach past their allocation of {} bytes",
            wanted.bytes, region.bytes
        ))));
    }
    Ok((region, How::Legacy))
}

/// What the region consists of.
fn buffers(
    current: Current<'_>,
    region: AddressRange,
    how: &How,
) -> Result<Vec<Buffer>, DriverError> {
    let numbered =
        |address| current.driver().buffer_at(address).map(|number| Buffer { address, number });
    match how {
        How::Legacy => Ok(vec![numbered(region.start)?]),
        How::Pieces(_, pieces) => pieces.iter().map(|piece| numbered(piece.start)).collect(),
    }
}

/// Memory of allocators that share nothing.
fn check_allocator(facts: PointerFacts) -> Result<(), Refused> {
    let (what, remedy) = if facts.managed {
        ("Managed memory (cudaMallocManaged)", "Allocate the memory with cudaMalloc.")
    } else if facts.memory_type != MEMORYTYPE_DEVICE {
        ("Host memory", "Register host memory by memfd with a daemon that serves the host device.")
    } else if facts.pool {
        (
            "Memory of a stream-ordered pool (cudaMallocAsync)",
            "Allocate the memory with the default allocator (PyTorch: PYTORCH_CUDA_ALLOC_CONF without \
             backend:cudaMallocAsync).",
        )
    } else {
        return Ok(());
    };
    Err(Refused(unsupported(what, remedy)))
}

/// The pieces of virtual memory that hold the wanted range, all of which can be shared in one way.
fn pieces(
    current: Current<'_>,
    wanted: AddressRange,
) -> Result<(Shareable, Vec<AddressRange>), Refused> {
    let shareable = if current.can_share(wanted.start, Shareable::Descriptor)? {
        Shareable::Descriptor
    } else {
        Shareable::Fabric
    };
    let mut pieces: Vec<AddressRange> = Vec::new();
    let mut at = wanted.start;
    while at < wanted.end() {
        let piece = current.mapping_at(at)?;
        let follows = pieces.last().is_none_or(|last| last.end() == piece.start);
        if !follows || piece.end() <= at {
            return Err(Refused(invalid("The memory is not mapped in one run")));
        }
        if !current.can_share(at, shareable)? {
            return Err(Refused(unsupported(
                "Virtual memory that was created without a handle type that all of its pieces have",
                "Create it for a POSIX file descriptor (CUmemAllocationProp::requestedHandleTypes).",
            )));
        }
        at = piece.end();
        pieces.push(piece);
    }
    Ok((shareable, pieces))
}

fn legacy(current: Current<'_>, region: AddressRange, buffer: u64) -> Result<Piece, Refused> {
    let handle = current.ipc_handle(region.start)?;
    Ok(Piece { bytes: region.bytes, buffer, handle: PieceHandle::Value(Box::new(handle.0)) })
}

/// The handle of one piece.
fn take(current: Current<'_>, piece: AddressRange, shareable: Shareable) -> Result<Piece, Refused> {
    let allocation = current.retain(piece.start)?;
    let shared = match shareable {
        Shareable::Descriptor => current.export_descriptor(allocation).map(PieceHandle::Descriptor),
        Shareable::Fabric => {
            current.export_fabric(allocation).map(|handle| PieceHandle::Value(Box::new(handle.0)))
        }
    };
    current.release(allocation)?;
    let buffer = current.driver().buffer_at(piece.start)?;
    Ok(Piece { bytes: piece.bytes, buffer, handle: shared? })
}

fn invalid(sentence: impl Into<String>) -> Refusal {
    Refusal::new(RefusalCode::HandleInvalid, sentence)
}

fn unsupported(what: &str, remedy: &str) -> Refusal {
    let sentence = format!("{what} cannot be shared with another process");
    Refusal::new(RefusalCode::HandleUnsupported, sentence).remedied_by(remedy)
}
