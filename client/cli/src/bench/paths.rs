//! The ways to have the same rows copied: in this process, or by the daemon.

use std::sync::Arc;

use anyhow::{Context, ensure};
use statecopy_client::blocking::{Client, InFlight, Plan};
use statecopy_client::{
    Address, ConnectOptions, DataType, Error, Flags, Indices, Layer, Moved, PlanKind, Registration,
    Request, Slice, Strides, Transport, Use,
};
use statecopy_kernels::cuda::WorkerStream;
use statecopy_kernels::cuda::arguments::INLINE_BYTES_MAX;
use statecopy_kernels::device::{self, Device, Launch, Region as _};
use statecopy_kernels::guard::{Door, ServingGuard};
use statecopy_kernels::layout::{CacheLayout, Placement};
use statecopy_kernels::plan::{KernelClass, choose};
use statecopy_kernels::signature::{ALIGNMENT_BYTES, DeviceUuid, Signature};
use statecopy_proto::Direction;

use super::memory::BenchMemory;
use super::plan::BATCH;
use super::target::{Cuda, LauncherOf, RegionOf, Target};
use crate::cli::connect_options;
use crate::failure::Failure;

/// `max_selected` of every layer: more than any case selects.
pub(super) const SELECTED_MAX: u64 = 256;

/// In process, indices and flags travel with the launch.
const _: () = assert!(SELECTED_MAX * 5 <= INLINE_BYTES_MAX as u64);

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

/// The daemon's kernel, called by the worker itself.
pub(super) struct InProcess<T: Target> {
    launcher: LauncherOf<T>,
    guard: Arc<ServingGuard>,
    plans: Vec<OwnPlan<T>>,
    packed: Arc<RegionOf<T>>,
    /// Flags as bytes, made anew in each call; its memory is kept.
    flags: Vec<u8>,
}

/// One cache: its layers are bound one by one, as a worker without a daemon has them.
struct OwnPlan<T: Target> {
    kind: PlanKind,
    layout: CacheLayout,
    variants: <T::Device as Device>::Variants,
    layers: Vec<<T::Device as Device>::Caches>,
    region: Arc<RegionOf<T>>,
}

impl<T: Target> InProcess<T> {
    /// Compiles and binds every cache. From then on the guard counts.
    pub(super) fn prepare(
        target: &T,
        guard: Arc<ServingGuard>,
        memory: &BenchMemory<T>,
    ) -> anyhow::Result<Self> {
        let refused = Error::from;
        let device = target.device();
        let mut plans = Vec::new();
        for (_, cache) in memory.caches() {
            let first = cache.layers.first().context("A cache has a layer")?;
            let description = device.description();
            let kind = choose(&description.fused, &cache.layout);
            let signature = Signature::new(description.uuid, cache.layout.clone(), first.offset());
            let region = &cache.shared.region;
            let bind = |layer: &Placement| device.bind(&[(Arc::clone(region), layer.clone())]);
            plans.push(OwnPlan {
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

    /// A production call: the request is held against the plan, flags become bytes, then the kernel is started for each layer.
    ///
    /// # Errors
    /// When the request does not fit the plan, or the device failed.
    pub(super) fn start(&mut self, call: &Call<'_>) -> anyhow::Result<Moved> {
        self.check(call)?;
        self.convert_flags(call.flags);
        self.launch(call, T::start)
    }

    /// The kernel alone. The flags of the last call that converted some are used.
    pub(super) fn start_unchecked(&mut self, call: &Call<'_>) -> anyhow::Result<Moved> {
        self.launch(call, T::start)
    }

    /// Waits for what was started.
    ///
    /// # Errors
    /// When the device failed.
    pub(super) fn wait(&mut self) -> anyhow::Result<()> {
        T::wait(&mut self.launcher)
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

    fn launch(
        &mut self,
        call: &Call<'_>,
        mut start: impl FnMut(&mut LauncherOf<T>, &Launch<'_, T::Device>) -> anyhow::Result<Moved>,
    ) -> anyhow::Result<Moved> {
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
                packed: device::Slice::new(&self.packed, offset, bytes)
                    .context("Packed leaves its region")?,
                part: 0..selected,
            };
            let started = start(&mut self.launcher, &launch)?;
            moved.copied += started.copied;
            moved.masked += started.masked;
            offset += bytes;
        }
        Ok(moved)
    }
}

impl InProcess<Cuda> {
    /// A production call whose kernels go on that stream.
    ///
    /// # Errors
    /// As [`InProcess::start`].
    pub(super) fn start_on(
        &mut self,
        stream: &mut WorkerStream,
        call: &Call<'_>,
    ) -> anyhow::Result<Moved> {
        self.check(call)?;
        self.convert_flags(call.flags);
        self.launch(call, |launcher, launch| Ok(stream.copy_rows(launcher, launch)?))
    }
}

/// The daemon, through one session of this worker.
#[derive(Debug)]
pub(super) struct Daemon {
    client: Client,
    packed: Slice,
    plans: Vec<Plan>,
}

impl Daemon {
    /// Opens a session on a device whose copies that transport carries, and registers every cache.
    ///
    /// # Errors
    /// When the daemon refuses, or does not serve that transport.
    pub(super) fn register<T: Target>(
        address: &Address,
        device: DeviceUuid,
        transport: Transport,
        memory: &BenchMemory<T>,
    ) -> anyhow::Result<Self> {
        let label = format!("bench {transport:?}").to_lowercase();
        let options =
            ConnectOptions { transport, ..connect_options(label, Some(device.to_string())) };
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
        let packed = T::register(&client, &memory.packed, Use::Packed)?;
        let mut registration = Registration::new();
        for (name, cache) in memory.caches() {
            let place = T::register(&client, &cache.shared, Use::Cache)?;
            for (at, layer) in cache.layers.iter().enumerate() {
                registration = registration.layer(Layer {
                    name: layer_name(name, at),
                    dtype: DataType::Float32,
                    shape: *cache.layout.shape(),
                    strides: Strides::Elements(*cache.layout.strides()),
                    region: place.region.clone(),
                    offset_bytes: place.offset + layer.offset(),
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

    /// The session.
    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// What a cache was published as.
    pub(super) fn plan(&self, cache: usize) -> &Plan {
        &self.plans[cache]
    }

    /// A packed buffer, by where it begins in its region.
    pub(super) fn packed_at(&self, offset: u64) -> Slice {
        self.packed.region.at(self.packed.offset + offset)
    }

    fn request<'a>(&self, call: &Call<'a>) -> Request<'a> {
        let request = Request::new(Indices::Int32(call.indices), self.packed_at(call.packed));
        match call.flags {
            Some(flags) => request.flags(Flags::Bools(flags)),
            None => request,
        }
    }
}

fn layer_name(cache: &str, at: usize) -> String {
    format!("{cache}.{at}")
}
