//! A worker whose one cache is too large to keep a model of: rows are checked, and what lies around each.

use anyhow::{Context, Result, ensure};
use statecopy_client::blocking::{Client, Plan};
use statecopy_client::{Indices, Layer, Registration, Request, Slice, Strides};
use statecopy_kernels::cuda::{Allocator, CudaMemory};
use statecopy_kernels::layout::CacheLayout;

use crate::known::{compare, noise};
use crate::rig::MARGIN;
use crate::setup::Gpu;

/// See the module.
#[derive(Debug)]
pub(crate) struct Wide {
    // The session ends before its memory goes.
    plan: Plan,
    client: Client,
    packed_at: Slice,
    cache: CudaMemory,
    packed: CudaMemory,
    layout: CacheLayout,
}

impl Wide {
    /// Allocates, registers and publishes.
    pub(crate) fn new(
        client: Client,
        gpu: &Gpu,
        layout: CacheLayout,
        max_selected: u64,
        how: Allocator,
    ) -> Result<Self> {
        let cache = gpu.allocate(layout.span_bytes() + 2 * MARGIN, how)?;
        let bytes = layout.payload_bytes() * max_selected + 2 * MARGIN;
        let packed = gpu.allocate(bytes, Allocator::Default)?;
        let at = client.register_device_memory(cache.address() + MARGIN, layout.span_bytes())?;
        let packed_at = client.register_device_memory(packed.address(), packed.bytes())?;
        let registration = Registration::new().layer(Layer {
            name: "wide".to_owned(),
            dtype: layout.dtype(),
            shape: *layout.shape(),
            strides: Strides::Elements(*layout.strides()),
            region: at.region.clone(),
            offset_bytes: at.offset,
            max_selected,
            check_unique: false,
        });
        let plan = client.register(&registration, |_| {})?.layer("wide")?.clone();
        Ok(Self { client, plan, packed_at, cache, packed, layout })
    }

    /// The client.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Gathers rows and scatters them back changed, each between margins that must keep their bytes.
    pub(crate) fn check_rows(&mut self, rows: &[i32]) -> Result<()> {
        let payload = self.layout.payload_bytes();
        let mut states = Vec::new();
        for (seed, row) in rows.iter().enumerate() {
            let bytes = noise(seed as u64 + 10, payload + 2 * MARGIN)?;
            self.cache.write(self.around(*row)?, &bytes)?;
            states.push(bytes);
        }
        let margin = usize::try_from(MARGIN)?;
        let inner = margin..margin + usize::try_from(payload)?;
        let mut packed = noise(4, self.packed.bytes())?;
        self.packed.write(0, &packed)?;
        let request = || Request::new(Indices::Int32(rows), self.packed_place());
        let moved = self.plan.gather(request())?;
        ensure!(moved.copied == rows.len() as u64, "{moved:?}");
        for (at, state) in states.iter().enumerate() {
            let start = margin + at * inner.len();
            packed[start..start + inner.len()].copy_from_slice(&state[inner.clone()]);
        }
        let mut found = vec![0; packed.len()];
        self.packed.read(0, &mut found)?;
        compare(&found, &packed, "the packed buffer after a gather")?;

        packed = noise(5, self.packed.bytes())?;
        self.packed.write(0, &packed)?;
        self.plan.scatter(request())?;
        for (at, (row, state)) in rows.iter().zip(&mut states).enumerate() {
            let start = margin + at * inner.len();
            state[inner.clone()].copy_from_slice(&packed[start..start + inner.len()]);
            let mut found = vec![0; state.len()];
            self.cache.read(self.around(*row)?, &mut found)?;
            compare(&found, state, &format!("row {row} after a scatter"))?;
        }
        Ok(())
    }

    /// The plan.
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Where the packed rows begin.
    pub(crate) fn packed_place(&self) -> Slice {
        self.packed_at.region.at(self.packed_at.offset + MARGIN)
    }

    /// Gathers rows, and compares nothing.
    pub(crate) fn gather(&self, rows: &[i32]) -> Result<()> {
        self.plan.gather(Request::new(Indices::Int32(rows), self.packed_place()))?;
        Ok(())
    }

    /// Where the margin before a row begins.
    fn around(&self, row: i32) -> Result<u64> {
        let row = u64::try_from(row).context("a row")?;
        Ok(row * self.layout.page_stride_bytes())
    }
}
