//! What the product's kernels do, row by row, over mapped memory; and what that of a native worker does.
//!
//! Every address is looked up first: one that the device may not touch is CUDA_ERROR_ILLEGAL_ADDRESS, as on a device, and
//! no crash.

use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use statecopy_kernels::cuda::Production;
use statecopy_kernels::cuda::arguments::{
    Arguments, CHUNK_BYTES, DIRECTION_GATHER, SHAPE_BATCH, SHAPE_FLAGS_ADDRESS, SHAPE_FLAGS_INLINE,
    SHAPE_INDICES_INLINE, SHAPE_ROW_STATES,
};

use crate::abi::CUresult;
use crate::mapping::{self, Address};
use crate::memory::Memory;
use crate::process::{Answer, Process, STEP};

/// A kernel that has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// Of the product.
    Copy(CopyKernel),
    /// Of a native worker.
    Produce,
}

impl Kernel {
    /// By the name of its entry point.
    pub(crate) fn named(name: &[u8]) -> Option<Self> {
        if name == b"produce" {
            return Some(Self::Produce);
        }
        CopyKernel::named(name).map(Self::Copy)
    }
}

/// A kernel of the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyKernel {
    Gather { width: u64 },
    Scatter { width: u64 },
    ByteCopy,
}

impl CopyKernel {
    fn named(name: &[u8]) -> Option<Self> {
        Some(match name {
            b"gather_int32" => Self::Gather { width: 4 },
            b"gather_int64" => Self::Gather { width: 8 },
            b"scatter_int32" => Self::Scatter { width: 4 },
            b"scatter_int64" => Self::Scatter { width: 8 },
            b"byte_copy" => Self::ByteCopy,
            _ => return None,
        })
    }

    /// Whether it gathers, and how wide its indices are.
    fn facts(self, arguments: &Arguments) -> (bool, u64) {
        match self {
            Self::Gather { width } => (true, width),
            Self::Scatter { width } => (false, width),
            Self::ByteCopy => {
                (arguments.direction == DIRECTION_GATHER, u64::from(arguments.index_width))
            }
        }
    }
}

/// A kernel on its way.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub(crate) kernel: CopyKernel,
    pub(crate) arguments: Arguments,
    /// Chunks of a row that the grid has.
    pub(crate) chunks: u64,
    /// Rows of the grid.
    pub(crate) rows: u64,
}

/// Runs a kernel to its end. An error is sticky.
pub(crate) fn run(process: &Arc<Process>, launch: &Launch) -> Answer {
    run_held(process, || {
        for row in 0..launch.rows {
            // Held for a row at a time, so that memory can be unmapped meanwhile, as on a device.
            move_row(&process.memory(), launch, row)?;
        }
        Ok(())
    })
}

/// Runs a worker's kernel to its end.
pub(crate) fn produce(process: &Arc<Process>, production: &Production) -> Answer {
    run_held(process, || {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_nanos(production.nanoseconds) {
            process.sticky()?;
            thread::sleep(STEP);
        }
        let Production { at: first, words, value, .. } = *production;
        let memory = process.memory();
        let bytes = value.to_le_bytes();
        may(&memory, first, words.saturating_mul(8), true)?;
        for place in 0..words.saturating_mul(8) {
            store(&memory, at(first, place, 1), bytes[mapping::size(place % 8)])?;
        }
        Ok(())
    })
}

fn run_held(process: &Process, kernel: impl FnOnce() -> Answer) -> Answer {
    process.trace.begin_kernel();
    let ended = hold(process).and_then(|()| kernel());
    process.trace.end_kernel();
    ended
}

/// Waits as long as a test holds kernels, and faults where it asks for that.
fn hold(process: &Process) -> Answer {
    while process.control.holds_kernels() {
        process.sticky()?;
        thread::sleep(STEP);
    }
    if process.control.takes_kernel_fault() { Err(CUresult::ILLEGAL_ADDRESS) } else { Ok(()) }
}

/// Addresses wrap around, as on a device; what comes of it is looked up.
fn move_row(memory: &Memory, launch: &Launch, row: u64) -> Answer {
    let arguments = &launch.arguments;
    let (gathers, width) = launch.kernel.facts(arguments);
    let number = u64::from(arguments.first_row).wrapping_add(row);
    let (layer, place) = match (arguments.shape & SHAPE_BATCH, u64::from(arguments.selected)) {
        (0, _) => (0, number),
        (_, 0) => return Err(CUresult::LAUNCH_FAILED),
        (_, selected) => (number / selected, number % selected),
    };
    let index = index(memory, arguments, place, width)?;
    let wanted = !gathers || flag(memory, arguments, place)?;
    let packed = at(arguments.packed, number, arguments.payload);
    // A grid that is too narrow leaves the rest of each row alone.
    let bytes = arguments.payload.min(launch.chunks.saturating_mul(CHUNK_BYTES));
    let page = u64::try_from(index).ok().filter(|index| *index < arguments.rows && wanted);
    match page {
        Some(page) => {
            let base = base(memory, arguments, layer)?;
            let state = at(base, page, arguments.page_stride);
            let (from, to) = if gathers { (state, packed) } else { (packed, state) };
            copy(memory, from, to, bytes)?;
        }
        None if gathers => clear(memory, packed, bytes)?,
        None => {}
    }
    if arguments.shape & SHAPE_ROW_STATES != 0 {
        store(memory, at(arguments.row_states, row, 1), u8::from(page.is_some()))?;
    }
    Ok(())
}

/// The address of an element.
fn at(first: Address, place: u64, stride: u64) -> Address {
    first.wrapping_add(place.wrapping_mul(stride))
}

/// Row 0 of a layer.
fn base(memory: &Memory, arguments: &Arguments, layer: u64) -> Answer<Address> {
    if arguments.shape & SHAPE_BATCH == 0 {
        Ok(arguments.base)
    } else {
        load(memory, at(arguments.bases, layer, 8))
    }
}

fn index(memory: &Memory, arguments: &Arguments, place: u64, width: u64) -> Answer<i64> {
    if arguments.shape & SHAPE_INDICES_INLINE != 0 {
        let from = mapping::size(at(0, place, width));
        let bytes = arguments.inline_bytes.get(from..from.saturating_add(mapping::size(width)));
        let bytes = bytes.ok_or(CUresult::LAUNCH_FAILED)?;
        return match (bytes.try_into(), bytes.try_into()) {
            (Ok(narrow), _) => Ok(i32::from_le_bytes(narrow).into()),
            (_, Ok(wide)) => Ok(i64::from_le_bytes(wide)),
            _ => Err(CUresult::LAUNCH_FAILED),
        };
    }
    let from = at(arguments.indices_address(), place, width);
    match width {
        4 => load::<i32>(memory, from).map(i64::from),
        8 => load::<i64>(memory, from),
        _ => Err(CUresult::LAUNCH_FAILED),
    }
}

fn flag(memory: &Memory, arguments: &Arguments, place: u64) -> Answer<bool> {
    if arguments.shape & SHAPE_FLAGS_INLINE != 0 {
        let from = mapping::size(at(u64::from(arguments.inline_flags_at), place, 1));
        let flag = arguments.inline_bytes.get(from).ok_or(CUresult::LAUNCH_FAILED)?;
        return Ok(*flag != 0);
    }
    if arguments.shape & SHAPE_FLAGS_ADDRESS != 0 {
        return Ok(load::<u8>(memory, at(arguments.flags, place, 1))? != 0);
    }
    Ok(true)
}

fn may(memory: &Memory, at: Address, bytes: u64, write: bool) -> Answer {
    if memory.allows(at, bytes, write) { Ok(()) } else { Err(CUresult::ILLEGAL_ADDRESS) }
}

/// Types of which every pattern of bits is a value.
trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for u64 {}

fn load<T: Plain>(memory: &Memory, at: Address) -> Answer<T> {
    may(memory, at, size_of::<T>() as u64, false)?;
    let pointer: *const T = mapping::pointer(at);
    if !pointer.is_aligned() {
        return Err(CUresult::MISALIGNED_ADDRESS);
    }
    // SAFETY: the bytes are mapped while the map is held, the pointer is aligned, and any bits are a value. Other processes
    // may write meanwhile, as on a device: the value is taken once.
    Ok(unsafe { pointer.read_volatile() })
}

fn store(memory: &Memory, at: Address, value: u8) -> Answer {
    may(memory, at, 1, true)?;
    // SAFETY: the byte is mapped to be written while the map is held.
    unsafe { mapping::pointer::<u8>(at).write_volatile(value) };
    Ok(())
}

/// Copies bytes, whether or not they overlap.
pub(crate) fn copy(memory: &Memory, from: Address, to: Address, bytes: u64) -> Answer {
    may(memory, from, bytes, false)?;
    may(memory, to, bytes, true)?;
    // SAFETY: both ranges are mapped while the map is held. Two rows that touch the same bytes are the caller's to order,
    // as on a device; `copy` allows an overlap.
    unsafe { ptr::copy(mapping::pointer::<u8>(from), mapping::pointer(to), mapping::size(bytes)) };
    Ok(())
}

fn clear(memory: &Memory, at: Address, bytes: u64) -> Answer {
    may(memory, at, bytes, true)?;
    // SAFETY: the range is mapped to be written while the map is held.
    unsafe { ptr::write_bytes(mapping::pointer::<u8>(at), 0, mapping::size(bytes)) };
    Ok(())
}
