//! The host device: caches in sealed memory files, copied by this machine's own cores.
//!
//! It needs no accelerator and no right but to map memory, and obeys the same contract as every other device. "Compiling"
//! chooses among row copies that rustc compiled; a launch runs in the launching thread and is done when it returns.
//! **Invariant.** Every address that a row copy uses lies in a mapping that its launch keeps alive: placements were checked
//! against their region when they were bound, slices when they were made, and an index when it was read.

mod caches;
mod crew;
mod identity;
mod launcher;
mod memory;
mod rows;
mod stores;
mod variants;

#[cfg(test)]
mod tests;

use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use statecopy_descriptors::Mapping;
use statecopy_proto::{DataType, HandleKind, Refusal, RefusalCode};

use self::crew::{Crew, Sharing};
use self::stores::Stores;
use crate::device::{
    Announced, Configuration, Device, DeviceDescription, Footprint, Import, Piece, PieceHandle,
    words_in,
};
use crate::environment::Environment;
use crate::guard::{Door, ServingGuard};
use crate::hooks;
use crate::layout::Placement;
use crate::plan::KernelClass;

pub use self::caches::HostCaches;
pub use self::identity::{cpus_allowed, host_uuid};
pub use self::launcher::{HostLauncher, TICKETS_MAX};
pub use self::memory::{HostImport, HostRegion, HostWords};
pub use self::variants::HostVariants;

/// Which row copies the host uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RowCopies {
    /// What wins on this machine.
    #[default]
    Native,
    /// The portable twin: what runs where the processor has no better.
    Portable,
}

/// How the host device is opened.
#[derive(Debug, Clone)]
pub struct HostOptions {
    /// Threads that copy, the launching one included. Where fewer than two CPUs may be used it copies alone.
    pub copy_threads: NonZeroUsize,
    /// The watch over compiler, environment and allocator.
    pub guard: Arc<ServingGuard>,
    /// File names of libraries that `LD_PRELOAD` and its like may inject.
    pub allowed_preloads: Vec<String>,
    /// Which row copies to use.
    pub row_copies: RowCopies,
}

impl HostOptions {
    /// One thread, no library that may be injected, the machine's own row copies.
    #[must_use]
    pub fn new(guard: Arc<ServingGuard>) -> Self {
        Self {
            copy_threads: NonZeroUsize::MIN,
            guard,
            allowed_preloads: Vec::new(),
            row_copies: RowCopies::Native,
        }
    }
}

/// This machine's memory and cores.
#[derive(Debug)]
pub struct HostDevice {
    description: DeviceDescription,
    options: HostOptions,
    streaming: Option<Stores>,
}

impl HostDevice {
    /// Opens the host.
    ///
    /// # Errors
    /// DEVICE_NOT_VISIBLE when the machine tells no identity.
    pub fn open(options: HostOptions) -> Result<Self, Refusal> {
        let description = DeviceDescription {
            kind: "host",
            uuid: host_uuid()?,
            name: identity::processor(),
            family: Some("host".to_owned()),
            fused: vec![DataType::Float32, DataType::BFloat16],
        };
        let streaming = match options.row_copies {
            RowCopies::Native => stores::streaming(),
            RowCopies::Portable => None,
        };
        Ok(Self { description, options, streaming })
    }

    /// Maps one memory file: an import of one piece.
    ///
    /// # Errors
    /// As [`Import::add`].
    pub fn adopt(&self, descriptor: OwnedFd, bytes: u64) -> Result<HostRegion, Refusal> {
        let import = self.import(Announced { kind: HandleKind::Memfd, bytes, pieces: 1 })?;
        import.of([Piece { bytes, buffer: 0, handle: PieceHandle::Descriptor(descriptor) }])
    }

    fn launcher_of(&self, helpers: usize) -> Result<HostLauncher, Refusal> {
        let crew = Crew::start(helpers, Sharing::MEASURED).map_err(|error| {
            let sentence = format!("A copying thread of the host device did not start: {error}");
            Refusal::new(RefusalCode::PrepareFailed, sentence)
        })?;
        Ok(HostLauncher::new(crew, self.streaming))
    }

    fn environment(&self) -> Environment {
        self.options.guard.enter(Door::Environment);
        Environment::read()
    }
}

impl Device for HostDevice {
    type Region = HostRegion;
    type Import = HostImport;
    type Variants = HostVariants;
    type Caches = HostCaches;
    type Words = HostWords;
    type Launcher = HostLauncher;

    fn description(&self) -> &DeviceDescription {
        &self.description
    }

    fn footprint(&self) -> Footprint {
        Footprint::default()
    }

    fn rows_per_launch_max(&self) -> u64 {
        u64::MAX
    }

    fn import(&self, announced: Announced) -> Result<HostImport, Refusal> {
        HostImport::begin(announced)
    }

    fn scratch(&self, bytes: u64) -> Result<HostRegion, Refusal> {
        self.options.guard.enter(Door::DeviceAllocator);
        HostRegion::scratch(bytes)
    }

    fn compile(&self, class: &KernelClass) -> Result<HostVariants, Refusal> {
        self.options.guard.enter(Door::Compiler);
        Ok(HostVariants::compile(class))
    }

    fn bind(&self, layers: &[(Arc<HostRegion>, Placement)]) -> Result<HostCaches, Refusal> {
        HostCaches::bind(layers)
    }

    fn share_words(&self, mapping: &Arc<Mapping>, range: Range<u64>) -> Result<HostWords, Refusal> {
        words_in(mapping, &range)?;
        Ok(HostWords::new(Arc::clone(mapping), range))
    }

    fn configuration(&self) -> Configuration {
        let stores = self.streaming.map_or(stores::ORDINARY.label, |streaming| streaming.label);
        self.environment().configuration([
            ("source", env!("STATECOPY_HOST_SOURCE").to_owned()),
            ("stores", stores.to_owned()),
        ])
    }

    fn check_hooks(&self) -> Result<(), Refusal> {
        hooks::check_launch_path()?;
        self.environment().check_injections(&self.options.allowed_preloads)
    }

    fn launcher(&self) -> Result<HostLauncher, Refusal> {
        // On one CPU a helper could only copy while the launching thread does not.
        let helpers = match cpus_allowed().get() {
            1 => 0,
            _ => self.options.copy_threads.get() - 1,
        };
        self.launcher_of(helpers)
    }

    fn trial_launcher(&self) -> Result<HostLauncher, Refusal> {
        self.launcher_of(0)
    }
}
