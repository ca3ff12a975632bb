//! The ways to have the same rows copied: in this process, or by the daemon.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::{Context, ensure};
use statecopy_client::blocking::{Client, InFlight, Plan};
use statecopy_client::{
    Address, ConnectOptions, DataType, Flags, Indices, Layer, Moved, PlanKind, Region,
    Registration, Request, Strides, Transport, Use,
};
use statecopy_kernels::device::{self, Device as _, Launch, Launcher as _, Region as _, Slice};
use statecopy_kernels::guard::{Door, ServingGuard};
use statecopy_kernels::host::{
    HostCaches, HostDevice, HostLauncher, HostOptions, HostRegion, HostVariants,
};
use statecopy_kernels::layout::CacheLayout;
use statecopy_kernels::plan::{KernelClass, choose};
use statecopy_kernels::signature::{ALIGNMENT_BYTES, Signature};
use statecopy_proto::Direction;

use super::memory::BenchMemory;
use crate::cli::connect_options;
use crate::failure::Failure;

/// The name of the binding set of the batch.
const BATCH: &str = "batch";
/// `max_selected` of every layer: more than any case selects.
const SELECTED_MAX: u64 = 256;

/// One copy, as the worker asks for it: the same for every path.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call<'a> {
    /// The cache's place in [`BenchMemory::caches`].
    pub(super) cache: usize,
    /// Which way.
    pub(super) direction: Direction,
    /// Rows.
    pub(super) indices: &'a [i32],
    /// Initial-state flags.
    pub(super) flags: Option<&'a [bool]>,
    /// Where packed begins.
    pub(super) packed: u64,
    /// How long packed is.
    pub(super) packed_bytes: u64,
}

impl Call<'_> {
    /// One that selects nothing.
    pub(super) fn empty(cache: usize, direction: Direction) -> Self {
        Self { cache, direction, indices: &[], flags: None, packed: 0, packed_bytes: 0 }
    }
}

/// The host kernel, called by the worker itself.
#[derive(Debug)]
pub(super) struct InProcess {
    launcher: HostLauncher,
    guard: Arc<ServingGuard>,
    plans: Vec<HostPlan>,
    packed: Arc<HostRegion>,
    /// Flags as bytes, made anew in each call; its memory is kept.
    flags: Vec<u8>,
}

/// One cache: its layers are bound one by one, as a worker without a daemon has them.
#[derive(Debug)]
struct HostPlan {
    kind: PlanKind,
    layout: CacheLayout,
    variants: HostVariants,
    layers: Vec<HostCaches>,
    region: Arc<HostRegion>,
}

impl InProcess {
    /// Opens the host with that many copying threads.
    pub(super) fn open_device(
        copy_threads: NonZeroUsize,
    ) -> anyhow::Result<(HostDevice, Arc<ServingGuard>)> {
        let guard = Arc::new(ServingGuard::new(false));
        let options = HostOptions { copy_threads, ..HostOptions::new(Arc::clone(&guard)) };
        Ok((HostDevice::open(options).map_err(statecopy_client::Error::from)?, guard))
    }

    /// Compiles and binds every cache.
    pub(super) fn prepare(
        device: &HostDevice,
        guard: Arc<ServingGuard>,
        memory: &BenchMemory,
    ) -> anyhow::Result<Self> {
        let refused = statecopy_client::Error::from;
        let mut plans = Vec::new();
        for (_, cache) in memory.caches() {
            let first = cache.layers.first().context("A cache has a layer")?;
            let description = device.description();
            let kind = choose(&description.fused, &cache.layout);
            let signature = Signature::new(description.uuid, cache.layout.clone(), first.offset());
            let region = &cache.shared.region;
            let bind = |layer: &statecopy_kernels::layout::Placement| {
                device.bind(&[(Arc::clone(region), layer.clone())])
            };
            plans.push(HostPlan {
                kind,
                layout: cache.layout.clone(),
                variants: device.compile(&KernelClass::of(kind, &signature)).map_err(refused)?,
                layers: cache.layers.iter().map(bind).collect::<Result<_, _>>().map_err(refused)?,
                region: Arc::clone(region),
            });
        }
        let launcher = device.launcher().map_err(refused)?;
        guard.shut();
        let packed = Arc::clone(&memory.packed.region);
        Ok(Self { launcher, guard, plans, packed, flags: Vec::new() })
    }

    /// A production call: the request is held against the plan, flags become bytes, then the kernel runs for each layer.
    ///
    /// # Errors
    /// When the request does not fit the plan.
    pub(super) fn copy(&mut self, call: &Call<'_>) -> anyhow::Result<Moved> {
        self.check(call)?;
        self.convert_flags(call.flags);
        self.launch(call)
    }

    /// The kernel alone. The flags of the last call that converted some are used.
    pub(super) fn copy_unchecked(&mut self, call: &Call<'_>) -> anyhow::Result<Moved> {
        self.launch(call)
    }

    /// Entries of the compiler since everything was bound.
    pub(super) fn compiler_entries(&self) -> u64 {
        self.guard.entries_while_serving(Door::Compiler)
    }

    /// Flags as the kernel reads them.
    pub(super) fn convert_flags(&mut self, flags: Option<&[bool]>) {
        self.flags.clear();
        self.flags.extend(flags.unwrap_or_default().iter().copied().map(u8::from));
    }

    /// What the daemon checks of each request (contract: Both).
    fn check(&self, call: &Call<'_>) -> anyhow::Result<()> {
        let plan = &self.plans[call.cache];
        let selected = call.indices.len() as u64;
        let bytes = plan.layout.payload_bytes() * plan.layers.len() as u64 * selected;
        let end = call.packed.checked_add(call.packed_bytes);
        ensure!(selected <= SELECTED_MAX, "More rows are selected than the plan allows");
        ensure!(
            call.flags.is_none_or(|flags| flags.len() as u64 == selected),
            "There is one flag a selected row"
        );
        ensure!(call.packed_bytes == bytes, "Packed has another size");
        ensure!(call.packed.is_multiple_of(ALIGNMENT_BYTES), "Packed is not aligned");
        ensure!(end.is_some_and(|end| end <= self.packed.bytes()), "Packed leaves its region");
        ensure!(plan.region.allocation() != self.packed.allocation(), "Packed is in the cache");
        Ok(())
    }

    fn launch(&mut self, call: &Call<'_>) -> anyhow::Result<Moved> {
        let mut moved = Moved::default();
        let selected = call.indices.len() as u64;
        if selected == 0 {
            return Ok(moved);
        }
        let plan = &self.plans[call.cache];
        let bytes = plan.layout.payload_bytes() * selected;
        let mut offset = call.packed;
        for caches in &plan.layers {
            let launch = Launch {
                kind: plan.kind,
                variants: &plan.variants,
                caches,
                direction: call.direction,
                selected,
                indices: device::Indices::Int32(call.indices),
                flags: match call.flags {
                    Some(_) => device::Flags::Inline(&self.flags),
                    None => device::Flags::None,
                },
                packed: Slice::new(&self.packed, offset, bytes)
                    .context("Packed leaves its region")?,
                part: 0..selected,
            };
            let ticket = self.launcher.launch(&launch)?;
            let done =
                self.launcher.poll(ticket)?.context("A launch on the host is done at once")?;
            moved.copied += done.copied;
            moved.masked += done.masked;
            offset += bytes;
        }
        Ok(moved)
    }
}

/// The daemon, through one session of this worker.
#[derive(Debug)]
pub(super) struct Daemon {
    client: Client,
    packed: Region,
    plans: Vec<Plan>,
}

impl Daemon {
    /// Opens a session whose copies that transport carries, and registers every cache.
    ///
    /// # Errors
    /// When the daemon refuses, or does not serve that transport.
    pub(super) fn register(
        address: &Address,
        transport: Transport,
        memory: &BenchMemory,
    ) -> anyhow::Result<Self> {
        let label = format!("bench {transport:?}").to_lowercase();
        let options = ConnectOptions { transport, ..connect_options(label) };
        let client = Client::connect(address.clone(), options)?;
        let carries = client.session().map(|session| session.transport);
        ensure!(
            carries == Some(transport),
            Failure::other(
                format!(
                    "The daemon does not serve {transport:?}: a path that cannot run is an error"
                ),
                "Use a daemon of this version.",
            )
        );
        let packed = client.register_region(&memory.packed.memory, Use::Packed)?;
        let mut registration = Registration::new();
        for (name, cache) in memory.caches() {
            let region = client.register_region(&cache.shared.memory, Use::Cache)?;
            for (at, layer) in cache.layers.iter().enumerate() {
                registration = registration.layer(Layer {
                    name: layer_name(name, at),
                    dtype: DataType::Float32,
                    shape: *cache.layout.shape(),
                    strides: Strides::Elements(*cache.layout.strides()),
                    region: region.clone(),
                    offset_bytes: layer.offset(),
                    max_selected: SELECTED_MAX,
                    check_unique: false,
                });
            }
            if name == BATCH {
                let layers = (0..cache.layers.len()).map(|at| layer_name(BATCH, at));
                registration = registration.set(BATCH, layers);
            }
        }
        let bindings = client.register(&registration, |_| {}).context("Registering the caches")?;
        let plans = memory.caches().map(|(name, _)| match name {
            BATCH => bindings.set(BATCH).cloned(),
            name => bindings.layer(&layer_name(name, 0)).cloned(),
        });
        Ok(Self { plans: plans.collect::<Result<_, _>>()?, client, packed })
    }

    /// A production call.
    ///
    /// # Errors
    /// When the daemon refuses, or its answer is unknown.
    pub(super) fn copy(&self, call: &Call<'_>) -> anyhow::Result<Moved> {
        Ok(self.plans[call.cache].copy(call.direction, self.request(call))?)
    }

    /// Submits, and returns when the caller may go on.
    ///
    /// # Errors
    /// When the daemon refuses at once.
    pub(super) fn submit(&self, call: &Call<'_>) -> anyhow::Result<InFlight> {
        Ok(self.plans[call.cache].submit(call.direction, self.request(call))?)
    }

    /// Gives everything back.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub(super) fn close(self) -> anyhow::Result<()> {
        Ok(self.client.close()?)
    }

    fn request<'a>(&self, call: &Call<'a>) -> Request<'a> {
        let request = Request::new(Indices::Int32(call.indices), self.packed.at(call.packed));
        match call.flags {
            Some(flags) => request.flags(Flags::Bools(flags)),
            None => request,
        }
    }
}

fn layer_name(cache: &str, at: usize) -> String {
    format!("{cache}.{at}")
}
