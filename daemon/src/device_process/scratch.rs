//! Runs every variant once on a one-row scratch, so that a variant's fault stops the start and not the first request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use statecopy_kernels::device::{Device, Flags, Indices, Launch, Launcher, Slice};
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
    /// times. Scratch is O(payload), has the cache's alignment class, and is freed only after the device has answered.
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
        let mut launcher = match self.0.take() {
            Some(launcher) => launcher,
            None => device.trial_launcher()?,
        };
        run_every_variant(device, &mut launcher, (kind, variants), signature)?;
        // One that failed may have launches under way.
        self.0 = Some(launcher);
        Ok(())
    }
}

fn run_every_variant<D: Device>(
    device: &D,
    launcher: &mut D::Launcher,
    (kind, variants): (PlanKind, &D::Variants),
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
                indices: match width {
                    IndexWidth::Int32 => Indices::Int32(&[0]),
                    IndexWidth::Int64 => Indices::Int64(&[0]),
                },
                flags: match direction {
                    Direction::Gather => Flags::Inline(&[1]),
                    Direction::Scatter => Flags::None,
                },
                packed,
                part: 0..1,
            };
            run(launcher, &launch)?;
        }
    }
    Ok(())
}

fn run<D: Device>(launcher: &mut D::Launcher, launch: &Launch<'_, D>) -> Result<(), Refusal> {
    let variant = launch.variant().label();
    let ticket = launcher.launch(launch).map_err(|fault| failed(&format!("{variant}: {fault}")))?;
    let until = Instant::now() + SCRATCH_RUN_MAX;
    loop {
        match launcher.poll(ticket).map_err(|fault| failed(&format!("{variant}: {fault}")))? {
            Some(moved) if moved.copied == 1 => return Ok(()),
            Some(_) => return Err(failed(&format!("{variant} moved no row"))),
            None if Instant::now() > until => {
                return Err(failed(&format!("{variant} did not end within {SCRATCH_RUN_MAX:?}")));
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
