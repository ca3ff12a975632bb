//! The CUDA device: device memory that workers share, copied by kernels of this process.
//!
//! The driver is found when the device is opened; a program that has this device in it runs on a machine without one. What
//! a device process needs of the device for itself (its context, tables, words) it takes when the device is opened and when
//! its launcher is made. [`CudaExporter`] is the worker's side: it finds out how memory can be shared.
//! **Invariant.** Every address that a kernel uses lies in memory that its launch keeps mapped: placements were checked
//! against their region when they were bound, slices when they were made, and the kernel checks each index that it loads.
//! Once the driver reports that the context is of no more use, nothing is given back to it: the device may still write what
//! it was writing, until the process ends.

mod allocation;
mod arena;
pub mod arguments;
mod caches;
pub mod class;
mod code;
pub mod compile;
mod context;
mod driver;
mod expected;
mod export;
#[cfg(feature = "worker")]
mod fault;
mod graph_calls;
mod guest;
mod kernel_graphs;
mod known_rows;
mod launcher;
mod library;
mod management;
mod memory;
mod memory_calls;
mod order;
mod pieces;
pub mod probe;
mod registered;
mod selector;
pub mod store;
mod stream_calls;
mod streams;
mod sys;
mod variants;
mod words;
#[cfg(feature = "worker")]
mod worker;

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use statecopy_descriptors::Mapping;
use statecopy_proto::{DataType, Refusal, RefusalCode};

use self::arena::{ARENA_BYTES, Arena};
use self::class::CudaClass;
use self::code::Loaded;
use self::compile::Arch;
use self::context::Context;
use self::driver::{Driver, VisibleDevice, select};
use self::management::Management;
use self::memory::LegacyHandles;
use self::probe::ProbedContext;
use self::store::{Artifacts, StoreError};
use self::sys::device_attribute;
use self::words::Extent;
use crate::device::{Announced, Configuration, Device, DeviceDescription, Footprint, words_in};
use crate::environment::{self, Environment};
use crate::guard::{Door, ServingGuard};
use crate::hooks;
use crate::layout::Placement;
use crate::plan::KernelClass;

pub use self::allocation::{Allocator, CudaMemory};
pub use self::caches::CudaCaches;
pub use self::context::Scheduling;
pub use self::driver::{DRIVER_LIBRARY, DriverError, OpenError};
pub use self::export::{Buffer, CudaExporter, Export};
pub use self::guest::{CudaGuest, GuestMemory};
pub use self::launcher::CudaLauncher;
pub use self::management::MANAGEMENT_LIBRARY;
pub use self::memory::{CudaImport, CudaRegion, SAME_PROCESS_SUBJECT};
pub use self::memory_calls::MemoryLeft;
pub use self::order::{Capture, GuestWords, StreamLook, StreamMark, StreamOp};
pub use self::registered::CudaWords;
pub use self::selector::{CudaSelector, SelectorError};
pub use self::variants::CudaVariants;
pub use self::words::TICKETS_MAX;
#[cfg(feature = "worker")]
pub use self::worker::{CudaWorker, Place, Production, WordOp, WorkerGraph, WorkerStream};

/// The first compute capability for which fused plans are made.
const FUSED_SINCE: (u32, u32) = (8, 0);

/// How a CUDA device is opened.
#[derive(Debug, Clone)]
pub struct CudaOptions {
    /// Which device.
    pub selector: CudaSelector,
    /// The driver: a name that the loader searches for, or a path.
    pub driver_library: PathBuf,
    /// NVIDIA's management library, which tells what the context takes: a name that the loader searches for, or a path.
    pub management_library: PathBuf,
    /// Where compiled variants come from.
    pub artifacts: Arc<Artifacts>,
    /// The most rows that a request selects.
    pub selected_max: u64,
    /// The watch over compiler, environment and allocator.
    pub guard: Arc<ServingGuard>,
    /// File names of libraries that `LD_PRELOAD` and its like may inject.
    pub allowed_preloads: Vec<String>,
    /// How threads wait in the driver.
    pub scheduling: Scheduling,
    /// Told of each problem of a store that an artifact was found, or compiled, in spite of.
    pub passed_over: fn(&StoreError),
    /// Told why, where the driver makes no graphs of a kernel: each launch of it takes some 2 us more.
    pub without_graphs: fn(&str),
}

impl CudaOptions {
    /// The driver of this machine, requests of at most `selected_max` rows, no library that may be injected.
    #[must_use]
    pub fn new(
        selector: CudaSelector,
        artifacts: Arc<Artifacts>,
        selected_max: u64,
        guard: Arc<ServingGuard>,
    ) -> Self {
        Self {
            selector,
            driver_library: DRIVER_LIBRARY.into(),
            management_library: MANAGEMENT_LIBRARY.into(),
            artifacts,
            selected_max,
            guard,
            allowed_preloads: Vec::new(),
            scheduling: Scheduling::Sleep,
            passed_over: |_| (),
            without_graphs: |_| (),
        }
    }
}

/// One GPU, or one MIG slice of it.
#[derive(Debug)]
pub struct CudaDevice {
    description: DeviceDescription,
    capability: (u32, u32),
    options: CudaOptions,
    legacy: Arc<LegacyHandles>,
    arena: Arc<Arena>,
    loaded: Loaded,
    footprint: Footprint,
    // The context goes last.
    context: Arc<Context>,
}

impl CudaDevice {
    /// Opens a device and takes what it needs for itself.
    ///
    /// # Errors
    /// When there is no driver or no such device, when the device lacks what copies need, or memory.
    pub fn open(options: CudaOptions) -> Result<Self, OpenError> {
        let driver = Arc::new(Driver::open(&options.driver_library)?);
        let device = select(&driver, options.selector)?;
        let failed = |error| OpenError::Device { device: device.label(), error };
        let has = |attribute| driver.device_attribute(device.device, attribute).map_err(failed);
        if has(device_attribute::UNIFIED_ADDRESSING)? == 0 {
            let lacks = "unified addressing";
            return Err(OpenError::Unsuitable { device: device.label(), lacks });
        }
        let capability = driver.compute_capability(device.device).map_err(failed)?;
        let outside = Management::open(&options.management_library, device.uuid);
        let made = make_context(&driver, &device, options.scheduling, outside.as_ref())?;
        let (context, context_bytes) = (Arc::new(made.0), made.1);
        let arena = Arena::allocate(&context).map_err(|error| {
            let what = "tables of base addresses";
            memory::out_of_memory(&context, &device.label(), what, ARENA_BYTES, error)
        })?;
        let own = own_memory(options.selected_max).ok_or_else(|| {
            let lacks = "memory for requests of so many rows";
            OpenError::Unsuitable { device: device.label(), lacks }
        })?;
        Ok(Self {
            description: describe(&device, capability),
            capability,
            options,
            legacy: Arc::default(),
            arena: Arc::new(arena),
            loaded: Loaded::default(),
            footprint: Footprint { context: context_bytes.unwrap_or(0), ..own },
            context,
        })
    }

    /// Its context, to be looked at.
    #[must_use]
    pub fn probed(&self) -> ProbedContext {
        let taken = self.footprint.context;
        ProbedContext::of(&self.context, (taken > 0).then_some(taken))
    }

    fn architecture(&self) -> Arch {
        Arch::of_capability(self.capability.0, self.capability.1)
    }

    fn make_launcher(&self, extent: Extent) -> Result<CudaLauncher, DriverError> {
        self.options.guard.enter(Door::DeviceAllocator);
        CudaLauncher::create(&self.context, extent)
    }

    fn environment(&self) -> Environment {
        self.options.guard.enter(Door::Environment);
        Environment::read()
    }
}

/// What a device process takes of a device beside the context, for requests of at most `selected_max` rows; `None` where no
/// machine has so much.
#[must_use]
pub fn own_memory(selected_max: u64) -> Option<Footprint> {
    let extent = Extent::serving(selected_max);
    let tables = ARENA_BYTES.checked_add(extent.staging_bytes()?)?;
    let words = u64::try_from(extent.word_bytes()?).ok()?;
    Some(Footprint { context: 0, tables, words })
}

/// Makes the context of a device, and says what it takes, where somebody outside can tell.
fn make_context(
    driver: &Arc<Driver>,
    device: &VisibleDevice,
    scheduling: Scheduling,
    outside: Option<&Management>,
) -> Result<(Context, Option<u64>), OpenError> {
    let used = || outside.and_then(Management::used_bytes);
    let used_before = used();
    let context = Context::retain(Arc::clone(driver), device.device, scheduling);
    let context = context.map_err(|error| match error.is_out_of_memory() {
        true => OpenError::NoContext { device: device.label(), error },
        false => OpenError::Device { device: device.label(), error },
    })?;
    let bytes = used().zip(used_before).map(|(now, before)| now.saturating_sub(before));
    Ok((context, bytes))
}

fn describe(device: &VisibleDevice, (major, minor): (u32, u32)) -> DeviceDescription {
    let fused = if (major, minor) >= FUSED_SINCE {
        vec![DataType::Float32, DataType::BFloat16]
    } else {
        Vec::new()
    };
    DeviceDescription {
        kind: "cuda",
        uuid: device.uuid,
        name: device.name.clone(),
        family: Some(Arch::of_capability(major, minor).to_string()),
        fused,
    }
}

impl Device for CudaDevice {
    type Region = CudaRegion;
    type Import = CudaImport;
    type Variants = CudaVariants;
    type Caches = CudaCaches;
    type Words = CudaWords;
    type Launcher = CudaLauncher;

    fn description(&self) -> &DeviceDescription {
        &self.description
    }

    fn footprint(&self) -> Footprint {
        self.footprint
    }

    fn rows_per_launch_max(&self) -> u64 {
        arguments::ROWS_PER_LAUNCH_MAX
    }

    fn import(&self, announced: Announced) -> Result<CudaImport, Refusal> {
        CudaImport::begin(&self.context, &self.legacy, announced)
    }

    fn scratch(&self, bytes: u64) -> Result<CudaRegion, Refusal> {
        self.options.guard.enter(Door::DeviceAllocator);
        CudaRegion::scratch(&self.context, bytes)
    }

    fn compile(&self, class: &KernelClass) -> Result<CudaVariants, Refusal> {
        self.options.guard.enter(Door::Compiler);
        let (architecture, cuda_class) = (self.architecture(), CudaClass::of(class));
        let image = || {
            let artifact = self.options.artifacts.obtain(architecture, cuda_class)?;
            artifact.problems.iter().for_each(self.options.passed_over);
            Ok(artifact.code)
        };
        let without_graphs = self.options.without_graphs;
        let kernels = self.loaded.obtain(&self.context, cuda_class, image, without_graphs)?;
        Ok(CudaVariants::of(kernels, class))
    }

    fn bind(&self, layers: &[(Arc<CudaRegion>, Placement)]) -> Result<CudaCaches, Refusal> {
        CudaCaches::bind(&self.arena, layers)
    }

    fn share_words(&self, mapping: &Arc<Mapping>, range: Range<u64>) -> Result<CudaWords, Refusal> {
        words_in(mapping, &range)?;
        CudaWords::share(&self.context, mapping, range).map_err(|error| {
            let what = "Words of the session's memory were not registered with the driver";
            error.refusal(RefusalCode::PrepareFailed, what)
        })
    }

    fn configuration(&self) -> Configuration {
        let driver = self.context.driver();
        let library = environment::mapped_library("libcuda")
            .unwrap_or_else(|| driver.path().display().to_string());
        let none = || "none".to_owned();
        let compiler = self.options.artifacts.compiler();
        self.environment().configuration([
            ("architecture", self.architecture().to_string()),
            ("cuda driver", driver.version().to_string()),
            ("cuda driver library", library),
            ("compiler", compiler.map_or_else(|_| none(), |it| it.version().to_string())),
            ("compiler library", environment::mapped_library("libnvrtc").unwrap_or_else(none)),
            ("source", compile::source_hash()),
        ])
    }

    fn check_hooks(&self) -> Result<(), Refusal> {
        hooks::check_launch_path()?;
        environment::check_absent("libcupti")?;
        self.environment().check_injections(&self.options.allowed_preloads)
    }

    fn launcher(&self) -> Result<CudaLauncher, Refusal> {
        self.make_launcher(Extent::serving(self.options.selected_max)).map_err(|error| {
            let what = format!(
                "The launcher's streams and its memory ({} bytes pinned, {} of the device with the tables) were not made",
                self.footprint.words, self.footprint.tables
            );
            error.refusal(RefusalCode::PrepareFailed, &what)
        })
    }

    fn trial_launcher(&self) -> Result<CudaLauncher, Refusal> {
        self.make_launcher(Extent::TRIAL).map_err(|error| {
            let what = "What runs the variants once was not made";
            error.refusal(RefusalCode::PrepareFailed, what)
        })
    }
}
