//! Runs every variant once on a one-row scratch, so that a variant's fault stops the start and not the first request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use statecopy_kernels::device::{Device, Flags, Indices, Launch, Launcher, Moved, Slice};
use statecopy_kernels::layout::CacheLayout;
use statecopy_kernels::signature::{ALIGNMENT_BYTES, Signature};
use statecopy_proto::{Direction, IndexWidth, PlanKind, Refusal, RefusalCode};

/// How long one row of scratch may take before the device counts as broken.
const SCRATCH_RUN_MAX: Duration = Duration::from_secs(30);

/// What runs variants on scratch. Kept from one class to the next: to make it and to drop it, a GPU's driver keeps launches of
/// others waiting.
#[derive(Debug)]
pub(super) struct Trials<D: Device>(Option<D::Launcher>);

impl<D: Device> Default for Trials<D> {
    fn default() -> Self {
        Self(None)
    }
}

impl<D: Device> Trials<D> {
    /// Runs gather and scatter for both index widths: the four variants of a fused plan, or the one of a byte-copy plan four
    /// times. Scratch is O(payload), has the cache's alignment class, and is freed only after the device has answered, or
    /// counts as broken.
    ///
    /// # Errors
    /// PREPARE_FAILED naming the variant.
    pub(super) fn run_every_variant(
        &mut self,
        device: &D,
        kind: PlanKind,
        variants: &D::Variants,
        signature: &Signature,
    ) -> Result<(), Refusal> {
        let layout = one_row(signature.layout())?;
        let payload = layout.payload_bytes();
        let packed_at = (ALIGNMENT_BYTES + payload).next_multiple_of(ALIGNMENT_BYTES);
        let scratch = Arc::new(device.scratch(packed_at + payload)?);
        let placement = layout
            .place(u64::from(signature.base_mod_16()), packed_at)
            .map_err(|error| error.to_refusal("scratch"))?;
        let caches = device.bind(&[(Arc::clone(&scratch), placement)])?;
        for direction in Direction::ALL {
            for width in IndexWidth::ALL {
                let packed = Slice::new(&scratch, packed_at, payload)
                    .ok_or_else(|| failed("the scratch is too small"))?;
                let launch = Launch::<'_, D> {
                    kind,
                    variants,
                    caches: &caches,
                    direction,
                    selected: 1,
                    indices: Indices::first_row(width),
                    flags: match direction {
                        Direction::Gather => Flags::Inline(&[1]),
                        Direction::Scatter => Flags::None,
                    },
                    packed,
                    part: 0..1,
                };
                self.run(device, &launch)?;
            }
        }
        Ok(())
    }

    fn run(&mut self, device: &D, launch: &Launch<'_, D>) -> Result<(), Refusal> {
        let mut launcher = match self.0.take() {
            Some(launcher) => launcher,
            None => device.trial_launcher()?,
        };
        let variant = launch.variant().label();
        // A launcher whose launch was not answered is dropped, before the scratch.
        let moved =
            answer(&mut launcher, launch).map_err(|why| failed(&format!("{variant}: {why}")))?;
        self.0 = Some(launcher);
        if moved.copied == 1 { Ok(()) } else { Err(failed(&format!("{variant} moved no row"))) }
    }
}

/// What a launch moved. An error says why that is not known.
fn answer<D: Device>(launcher: &mut D::Launcher, launch: &Launch<'_, D>) -> Result<Moved, String> {
    let ticket = launcher.launch(launch).map_err(|fault| fault.to_string())?;
    let until = Instant::now() + SCRATCH_RUN_MAX;
    loop {
        match launcher.poll(ticket).map_err(|fault| fault.to_string())? {
            Some(moved) => return Ok(moved),
            None if Instant::now() > until => {
                return Err(format!("no end within {SCRATCH_RUN_MAX:?}"));
            }
            None => std::thread::yield_now(),
        }
    }
}

fn failed(why: &str) -> Refusal {
    Refusal::new(RefusalCode::PrepareFailed, format!("A run on scratch failed: {why}"))
}

/// The layout of a one-row cache with the payload of another layout.
fn one_row(layout: &CacheLayout) -> Result<CacheLayout, Refusal> {
    let [_, heads, values, keys] = *layout.shape();
    let elements = layout.payload_bytes() / layout.dtype().item_bytes();
    CacheLayout::with_page_stride(layout.dtype(), [1, heads, values, keys], elements)
        .map_err(|error| error.to_refusal("scratch"))
}
