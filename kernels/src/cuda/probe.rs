//! What can be learned of the driver and its devices before anything depends on them.
//!
//! Any call may take for ever: the driver waits without a deadline for an MPS server that never answers. So this belongs into
//! a process that somebody watches, and that says what it is about to do before it does it.

use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use statecopy_descriptors::{Mapping, MemoryError, SealedMemory};

use super::context::{Context, Current, Scheduling};
use super::driver::{Driver, DriverError, OpenError, VisibleDevice, select};
use super::management::Management;
use super::memory_calls::MemoryLeft;
use super::sys::{self, DevicePointer, Stream, device_attribute};
use super::{CudaSelector, FUSED_SINCE, make_context};
use crate::signature::DeviceUuid;
use crate::sync::Ordering;

pub use super::management::Seen;

/// The memory of the words: a page, also where pages are large.
const PAGE_BYTES: u64 = 64 << 10;
/// The word that the stream writes.
const WRITTEN: u64 = 0;
/// The word that the stream waits for. It has a line of its own.
const AWAITED: u64 = 128;
/// How long a wait that must not end is looked at: long enough for a stream that waits for nothing, on a machine that is busy.
pub const HELD: Duration = Duration::from_millis(500);
/// Between two looks at a word.
const LOOK: Duration = Duration::from_micros(50);

/// A driver that was started to be looked at.
#[derive(Debug)]
pub struct Probe {
    driver: Arc<Driver>,
    management_library: PathBuf,
}

/// Who may have a context on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any process.
    Shared,
    /// One process at a time.
    Exclusive,
    /// Nobody.
    Prohibited,
    /// The driver does not say, or in a word that is not known.
    Unknown,
}

/// A device, as the driver describes it to whoever asks.
#[derive(Debug, Clone)]
pub struct ProbedDevice {
    /// Its place in the order of the driver.
    pub ordinal: u32,
    /// For people.
    pub name: String,
    /// That of the slice, where it is one of MIG.
    pub uuid: DeviceUuid,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Whether fused plans are made on it.
    pub fuses: bool,
    /// Whether device and host share one space of addresses, without which nothing is copied.
    pub unified_addressing: bool,
    /// Who may have a context.
    pub compute_mode: ComputeMode,
    /// Whether contexts made now share the device through MPS; `None` where the driver is too old to say.
    pub shared_by_mps: Option<bool>,
    device: VisibleDevice,
}

impl Probe {
    /// Loads the driver and starts it.
    ///
    /// # Errors
    /// When it is not there, too old, or refuses.
    pub fn open(driver_library: &Path, management_library: &Path) -> Result<Self, OpenError> {
        let driver = Arc::new(Driver::open(driver_library)?);
        Ok(Self { driver, management_library: management_library.to_owned() })
    }

    /// The CUDA version that the driver speaks: 1000 times the major one plus 10 times the minor one; 0 without a device.
    #[must_use]
    pub fn version(&self) -> i32 {
        self.driver.version()
    }

    /// The devices that this process sees, or the one named.
    ///
    /// # Errors
    /// When the driver refuses, or sees no such device.
    pub fn devices(&self, only: Option<CudaSelector>) -> Result<Vec<ProbedDevice>, OpenError> {
        let seen = match only {
            Some(selector) => vec![select(&self.driver, selector)?],
            None => self.driver.devices().map_err(OpenError::Start)?,
        };
        seen.into_iter().map(|device| self.describe(device)).collect()
    }

    fn describe(&self, device: VisibleDevice) -> Result<ProbedDevice, OpenError> {
        let failed = |error| OpenError::Device { device: device.label(), error };
        let asked = |attribute| self.driver.device_attribute(device.device, attribute);
        let capability = self.driver.compute_capability(device.device).map_err(failed)?;
        let unified = asked(device_attribute::UNIFIED_ADDRESSING).map_err(failed)? != 0;
        let compute_mode = match asked(device_attribute::COMPUTE_MODE) {
            Ok(sys::COMPUTE_MODE_DEFAULT) => ComputeMode::Shared,
            Ok(sys::COMPUTE_MODE_PROHIBITED) => ComputeMode::Prohibited,
            // 1 is the exclusive mode of drivers long gone.
            Ok(1 | sys::COMPUTE_MODE_EXCLUSIVE_PROCESS) => ComputeMode::Exclusive,
            Ok(_) | Err(_) => ComputeMode::Unknown,
        };
        Ok(ProbedDevice {
            ordinal: device.device.unsigned_abs(),
            name: device.name.clone(),
            uuid: device.uuid,
            capability,
            fuses: capability >= FUSED_SINCE,
            unified_addressing: unified,
            compute_mode,
            // Drivers before CUDA 12.2 call the number invalid.
            shared_by_mps: asked(device_attribute::MPS_ENABLED).ok().map(|value| value != 0),
            device,
        })
    }

    /// What NVIDIA's management library says of a device; `None` where the library is missing or does not know it.
    #[must_use]
    pub fn seen_from_outside(&self, device: &ProbedDevice) -> Option<Seen> {
        Management::open(&self.management_library, device.uuid).map(|outside| outside.see())
    }

    /// Makes a context on a device, as the daemon does.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enter(&self, device: &ProbedDevice) -> Result<ProbedContext, OpenError> {
        let outside = Management::open(&self.management_library, device.uuid);
        let (context, bytes) =
            make_context(&self.driver, &device.device, Scheduling::Sleep, outside.as_ref())?;
        Ok(ProbedContext { context: Arc::new(context), bytes })
    }
}

/// Why memory operations of a stream are not to be relied on.
#[derive(Debug, thiserror::Error)]
pub enum StreamOperationsError {
    /// There is no page to try them on.
    #[error("A page of shared memory cannot be made: {0}")]
    Page(#[from] MemoryError),
    /// The driver refuses.
    #[error("{0}")]
    Driver(#[from] DriverError),
    /// A write does not arrive.
    #[error("A stream's write of a word in host memory did not arrive within {0:?}")]
    NotWritten(Duration),
    /// A wait does not wait.
    #[error("A stream went past its wait before the word was there")]
    NotHeld,
    /// A wait does not end.
    #[error("A stream did not see the word that it waits for within {0:?}")]
    NotReleased(Duration),
}

/// A context that was made to be looked at.
#[derive(Debug)]
pub struct ProbedContext {
    context: Arc<Context>,
    bytes: Option<u64>,
}

impl ProbedContext {
    pub(super) fn of(context: &Arc<Context>, bytes: Option<u64>) -> Self {
        Self { context: Arc::clone(context), bytes }
    }

    /// Bytes of the device that the context takes; `None` where nobody can tell.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        self.bytes
    }

    /// How much memory of the device is left beside the context.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory_left(&self) -> Result<MemoryLeft, DriverError> {
        self.context.enter()?.memory_left()
    }

    /// Lets a stream write a 64-bit word of registered host memory, then wait for another one, and looks whether it does both.
    /// Each may take `patience`; a wait that must not end is looked at for `held`.
    ///
    /// # Errors
    /// Which of it does not work.
    pub fn try_stream_operations(
        &self,
        patience: Duration,
        held: Duration,
    ) -> Result<(), StreamOperationsError> {
        let page = SealedMemory::create("statecopy-probe", PAGE_BYTES)?.map()?;
        let current = self.context.enter()?;
        let stream = current.create_stream()?;
        // SAFETY: the page is unregistered below, or stays for ever.
        unsafe { current.register(page.base(), page.len()) }?;
        let tried = try_on(current, stream, &page, patience, held);
        // Whatever waits is let go, or the driver would keep stream and page for ever.
        store(&page, AWAITED, 1);
        // SAFETY: the stream was created above.
        let idle = within(patience, || unsafe { current.is_idle(stream) }.unwrap_or(false));
        if idle {
            // SAFETY: the stream was created above, is idle, and is used no more.
            unsafe { current.destroy_stream(stream) }?;
            current.unregister(page.base())?;
        } else {
            // The device may still write the page, and giving the context back could take for ever.
            mem::forget(page);
            mem::forget(Arc::clone(&self.context));
        }
        tried
    }
}

fn try_on(
    current: Current<'_>,
    stream: Stream,
    page: &Mapping,
    patience: Duration,
    held: Duration,
) -> Result<(), StreamOperationsError> {
    let start = current.device_address(page.base())?;
    let (written, awaited) = (start + WRITTEN, start + AWAITED);
    // SAFETY: the word lies in a page that is registered, and that stays until the stream is idle.
    unsafe { current.write_word(stream, written, 1) }?;
    if !within(patience, || load(page, WRITTEN) == 1) {
        return Err(StreamOperationsError::NotWritten(patience));
    }
    // SAFETY: as above.
    unsafe { current.await_word(stream, awaited, 1) }?;
    // SAFETY: as above.
    unsafe { current.write_word(stream, written, 2) }?;
    if within(held, || load(page, WRITTEN) == 2) {
        return Err(StreamOperationsError::NotHeld);
    }
    store(page, AWAITED, 1);
    if !within(patience, || load(page, WRITTEN) == 2) {
        return Err(StreamOperationsError::NotReleased(patience));
    }
    Ok(())
}

/// Whether something comes true in that time.
fn within(time: Duration, mut is_true: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + time;
    loop {
        if is_true() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(LOOK);
    }
}

fn load(page: &Mapping, word: u64) -> u64 {
    let word = page.atomic_u64(word).expect("the words lie in the page");
    // SYNC: with the stream's write of the word.
    word.load(Ordering::Acquire)
}

fn store(page: &Mapping, word: u64, value: u64) {
    let word = page.atomic_u64(word).expect("the words lie in the page");
    // SYNC: with the stream's wait for the word.
    word.store(value, Ordering::Release);
}

/// Waiting for a word.
impl Current<'_> {
    /// The stream goes on when the word has reached the value.
    ///
    /// # Safety
    /// The stream lives, and the word is one that the device may read until the stream is idle.
    unsafe fn await_word(
        self,
        stream: Stream,
        word: DevicePointer,
        value: u64,
    ) -> Result<(), DriverError> {
        // SAFETY: the caller's own promise.
        let status = unsafe {
            (self.functions().stream_wait_value_64)(stream, word, value, sys::STREAM_WAIT_VALUE_GEQ)
        };
        self.check("cuStreamWaitValue64", status)
    }
}
