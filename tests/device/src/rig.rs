//! A worker with caches in device memory, whose every byte is compared with the reference after every copy.

use anyhow::{Context, Result, ensure};
use statecopy_client::blocking::{Bindings, Client, Plan};
use statecopy_client::{
    Direction, Flags, IndexWidth, Indices as WireIndices, Layer, Moved, PlanKind, Registration,
    Request, Slice, Strides,
};
use statecopy_kernels::cuda::Allocator;
use statecopy_kernels::layout::{CacheLayout, Placement};
use statecopy_kernels::reference;
use statecopy_tests::Indices;

use crate::known::{Known, noise};
use crate::lanes::Queue;
use crate::setup::Gpu;

/// Bytes before and behind what a case uses of its memory: nothing may ever change them.
pub(crate) const MARGIN: u64 = 256;
/// The name of the set of all layers.
const ALL: &str = "all";

/// What a copy is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Layer(usize),
    /// The set of all layers.
    All,
}

/// Where a request's indices and flags are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Inputs {
    Inline,
    Device,
}

impl Inputs {
    pub(crate) const ALL: [Self; 2] = [Self::Inline, Self::Device];
}

/// What a rig is made of.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    /// Each layer, and where it begins behind the margin.
    pub(crate) layers: Vec<(CacheLayout, u64)>,
    pub(crate) max_selected: u64,
    /// How all memory is allocated.
    pub(crate) allocator: Allocator,
    /// Whether allocations may be smaller than the driver's blocks.
    pub(crate) exactly: bool,
}

impl Spec {
    /// One layer, in memory of the default allocator.
    pub(crate) fn of(layout: CacheLayout, max_selected: u64) -> Self {
        Self::of_layers(vec![(layout, 0)], max_selected)
    }

    /// Layers of one signature, in one allocation of the default allocator.
    pub(crate) fn of_layers(layers: Vec<(CacheLayout, u64)>, max_selected: u64) -> Self {
        Self { layers, max_selected, allocator: Allocator::Default, exactly: false }
    }

    /// With memory of that allocator.
    pub(crate) fn allocated(self, allocator: Allocator) -> Self {
        Self { allocator, ..self }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Rig {
    // The session ends before its memory goes.
    bindings: Bindings,
    pub(crate) client: Client,
    pub(crate) cache: Known,
    packed: Known,
    inputs: Known,
    /// Where the memory of the caches was registered.
    cache_at: Slice,
    /// Where each layer was.
    layers: Vec<Slice>,
    packed_at: Slice,
    inputs_at: Slice,
    flags_offset: u64,
    placements: Vec<Placement>,
    spec: Spec,
}

impl Rig {
    /// Allocates, registers and publishes.
    pub(crate) fn new(client: Client, gpu: &Gpu, spec: &Spec) -> Result<Self> {
        let end = spec.layers.iter().map(|(layout, offset)| offset + layout.span_bytes()).max();
        let bytes = end.context("a layer")? + 2 * MARGIN;
        let rows: u64 = spec.layers.iter().map(|(layout, _)| layout.payload_bytes()).sum();
        let packed_bytes = rows * spec.max_selected + 2 * MARGIN;
        let flags_offset = MARGIN + (8 * spec.max_selected).next_multiple_of(MARGIN) + MARGIN;
        let inputs_bytes = flags_offset + spec.max_selected.next_multiple_of(MARGIN) + MARGIN;
        let known = |bytes, seed| {
            let memory = if spec.exactly {
                gpu.allocate_exactly(bytes, spec.allocator)
            } else {
                gpu.allocate(bytes, spec.allocator)
            };
            Known::fill(memory?, bytes, seed)
        };
        let (cache, packed) = (known(bytes, 1)?, known(packed_bytes, 2)?);
        let inputs = known(inputs_bytes, 3)?;
        let placements: Vec<Placement> = spec
            .layers
            .iter()
            .map(|(layout, offset)| layout.place(MARGIN + offset, bytes))
            .collect::<Result<_, _>>()?;
        let (cache_at, layers) = register_layers(&client, &cache, &placements)?;
        let whole = |known: &Known| client.register_device_memory(known.address(), known.bytes());
        let (packed_at, inputs_at) = (whole(&packed)?, whole(&inputs)?);
        let bindings = client.register(&registration(spec, &layers), |_| {})?;
        Ok(Self {
            client,
            cache,
            packed,
            inputs,
            cache_at,
            layers,
            packed_at,
            inputs_at,
            flags_offset,
            placements,
            bindings,
            spec: spec.clone(),
        })
    }

    /// The plan behind a target.
    pub(crate) fn plan(&self, target: Target) -> Result<&Plan> {
        Ok(match target {
            Target::Layer(at) => self.bindings.layer(&layer_name(at))?,
            Target::All => self.bindings.set(ALL)?,
        })
    }

    /// Checks which kind of plan the daemon chose.
    pub(crate) fn expect_kind(&self, kind: PlanKind) -> Result<()> {
        let chosen = self.plan(Target::Layer(0))?.as_async().kind();
        ensure!(chosen == Some(kind), "the plan is {chosen:?}, not {kind:?}");
        Ok(())
    }

    /// Copies, and compares every byte of all memory and both counts with the reference.
    pub(crate) fn copy(
        &mut self,
        direction: Direction,
        target: Target,
        indices: &Indices,
        flags: Option<&[u8]>,
        inputs: Inputs,
    ) -> Result<()> {
        let what = || {
            let (label, selected) = (direction.label(), indices.selected());
            format!("{label} of {selected} rows, {target:?}, {inputs:?}")
        };
        let moved = self.start(direction, target, indices, flags, inputs).with_context(what)?;
        let expected = self.expect(direction, target, indices, flags)?;
        ensure!(moved == expected, "{}: {moved:?} in place of {expected:?}", what());
        self.check(&what())
    }

    /// As [`Rig::copy`], in the order of a stream, with indices and flags in device memory.
    pub(crate) fn copy_in_stream(
        &mut self,
        queue: &mut Queue,
        direction: Direction,
        target: Target,
        indices: &Indices,
        flags: Option<&[u8]>,
    ) -> Result<()> {
        let (label, selected) = (direction.label(), indices.selected());
        let what = format!("{label} of {selected} rows, {target:?}, in a stream");
        self.write_inputs(indices, flags)?;
        let request = self.request(indices, flags, Inputs::Device);
        queue.order(self.plan(target)?, direction, &request).with_context(|| what.clone())?;
        queue.finish().with_context(|| what.clone())?;
        self.expect(direction, target, indices, flags)?;
        self.check(&what)
    }

    /// Copies, and compares nothing.
    pub(crate) fn start(
        &mut self,
        direction: Direction,
        target: Target,
        indices: &Indices,
        flags: Option<&[u8]>,
        inputs: Inputs,
    ) -> Result<Moved> {
        if inputs == Inputs::Device {
            self.write_inputs(indices, flags)?;
        }
        let request = self.request(indices, flags, inputs);
        Ok(self.plan(target)?.copy(direction, request)?)
    }

    /// Writes indices and flags where requests with [`Inputs::Device`] name them.
    pub(crate) fn write_inputs(&mut self, indices: &Indices, flags: Option<&[u8]>) -> Result<()> {
        self.inputs.write(MARGIN, &bytes_of(indices))?;
        self.inputs.write(self.flags_offset, flags.unwrap_or_default())
    }

    /// A request of the packed buffer's start. Of inputs in device memory only the width and the count are looked at.
    pub(crate) fn request<'a>(
        &self,
        indices: &'a Indices,
        flags: Option<&'a [u8]>,
        inputs: Inputs,
    ) -> Request<'a> {
        let packed = self.place(&self.packed_at, MARGIN);
        let shared = inputs == Inputs::Device;
        let wire = match indices {
            indices if shared => WireIndices::Shared {
                width: match indices {
                    Indices::Int32(_) => IndexWidth::Int32,
                    Indices::Int64(_) => IndexWidth::Int64,
                },
                at: self.place(&self.inputs_at, MARGIN),
                selected: indices.selected() as u64,
            },
            Indices::Int32(values) => WireIndices::Int32(values),
            Indices::Int64(values) => WireIndices::Int64(values),
        };
        let request = Request::new(wire, packed);
        match flags {
            None => request,
            Some(_) if shared => {
                request.flags(Flags::Shared(self.place(&self.inputs_at, self.flags_offset)))
            }
            Some(flags) => request.flags(Flags::Bytes(flags)),
        }
    }

    fn place(&self, of: &Slice, offset: u64) -> Slice {
        of.region.at(of.offset + offset)
    }

    /// Applies a copy to the models only, by the reference.
    pub(crate) fn expect(
        &mut self,
        direction: Direction,
        target: Target,
        indices: &Indices,
        flags: Option<&[u8]>,
    ) -> Result<Moved> {
        let placements = match target {
            Target::Layer(at) => &self.placements[at..=at],
            Target::All => &self.placements[..],
        };
        let rows: u64 = placements.iter().map(|at| at.layout().payload_bytes()).sum();
        let start = usize::try_from(MARGIN)?;
        let end = start + usize::try_from(rows)? * indices.selected();
        let packed = &mut self.packed.model[start..end];
        let (cache, indices) = (&mut self.cache.model, indices.widened());
        Ok(match direction {
            Direction::Gather => reference::gather(cache, placements, &indices, flags, packed),
            Direction::Scatter => reference::scatter(cache, placements, &indices, packed),
        })
    }

    /// Compares every byte of all memory.
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        self.cache.check(&format!("the caches after a {what}"))?;
        self.packed.check(&format!("the packed buffer after a {what}"))?;
        self.inputs.check(&format!("indices and flags after a {what}"))
    }

    /// Writes new noise over the packed buffer, as the chunk maths of a worker would.
    pub(crate) fn compute(&mut self, seed: u64) -> Result<()> {
        let bytes = self.packed.bytes() - 2 * MARGIN;
        self.packed.write(MARGIN, &noise(seed, bytes)?)
    }

    /// Both directions of one layer and of all, with an invalid index among the others.
    pub(crate) fn serves(&mut self, seed: u64) -> Result<()> {
        for direction in Direction::ALL {
            self.compute(seed)?;
            let indices = Indices::Int64(vec![3, 0, -1, 1]);
            self.copy(direction, Target::Layer(0), &indices, None, Inputs::Inline)?;
            let indices = Indices::Int32(vec![2, i32::MAX, 0]);
            self.copy(direction, Target::All, &indices, None, Inputs::Device)?;
        }
        Ok(())
    }

    /// Registers the same layers once more.
    pub(crate) fn register_again(&mut self) -> Result<()> {
        self.bindings = self.client.register(&registration(&self.spec, &self.layers), |_| {})?;
        Ok(())
    }

    /// Gives the caches' memory back, as before sleep.
    pub(crate) fn release_caches(&mut self) -> Result<()> {
        for layer in self.layers.drain(..) {
            self.client.release_region(layer.region)?;
        }
        Ok(self.client.release_region(self.cache_at.region.clone())?)
    }

    /// Registers new memory for the caches, and binds the layers to it.
    pub(crate) fn bind_again(&mut self, cache: Known) -> Result<()> {
        (self.cache_at, self.layers) = register_layers(&self.client, &cache, &self.placements)?;
        self.cache = cache;
        let moves: Vec<_> = self
            .layers
            .iter()
            .enumerate()
            .map(|(at, slice)| statecopy_client::Rebind {
                layer: layer_name(at),
                region: slice.region.clone(),
                offset_bytes: slice.offset,
            })
            .collect();
        Ok(self.client.rebind(&moves)?)
    }
}

/// Each layer by its own address, as a worker registers tensors. The memory as a whole comes first, so that virtual memory is
/// one region too.
fn register_layers(
    client: &Client,
    cache: &Known,
    placements: &[Placement],
) -> Result<(Slice, Vec<Slice>)> {
    let whole = client.register_device_memory(cache.address(), cache.bytes())?;
    let slices = placements.iter().map(|placement| {
        let address = cache.address() + placement.offset();
        client.register_device_memory(address, placement.layout().span_bytes())
    });
    Ok((whole, slices.collect::<Result<_, _>>()?))
}

fn registration(spec: &Spec, layers: &[Slice]) -> Registration {
    let mut registration = Registration::new();
    for (at, ((layout, _), slice)) in spec.layers.iter().zip(layers).enumerate() {
        registration = registration.layer(Layer {
            name: layer_name(at),
            dtype: layout.dtype(),
            shape: *layout.shape(),
            strides: Strides::Elements(*layout.strides()),
            region: slice.region.clone(),
            offset_bytes: slice.offset,
            max_selected: spec.max_selected,
            check_unique: false,
        });
    }
    let alike = |(layout, offset): &(CacheLayout, u64)| {
        *layout == spec.layers[0].0 && offset % 16 == spec.layers[0].1 % 16
    };
    if spec.layers.iter().all(alike) {
        registration = registration.set(ALL, (0..layers.len()).map(layer_name));
    }
    registration
}

fn layer_name(at: usize) -> String {
    format!("layers.{at}")
}

fn bytes_of(indices: &Indices) -> Vec<u8> {
    match indices {
        Indices::Int32(values) => values.iter().flat_map(|it| it.to_ne_bytes()).collect(),
        Indices::Int64(values) => values.iter().flat_map(|it| it.to_ne_bytes()).collect(),
    }
}
