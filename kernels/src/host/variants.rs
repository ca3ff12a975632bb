//! "Compiling" for the host: choosing among the row kernels that rustc compiled.

use statecopy_proto::PlanKind;

use super::rows::{RowKernel, byte_copy, fused};
use super::stores::STREAM_ROW_BYTES_MIN;
use crate::plan::{KernelClass, Variant};

/// The variants of one kernel class: four of a fused plan, one of a byte copy.
///
/// Of the class, the payload's size decides: rows of 16 KiB and more may go around the cache, smaller
/// ones are copied by a direct call. The alignment of the base decides nothing here. The page stride is a launch
/// argument, so no class knows where a row begins; every copy aligns its own destination, in constant time.
#[derive(Debug)]
pub struct HostVariants {
    kernels: [Option<RowKernel>; Variant::ALL.len()],
    streams: bool,
    payload_bytes: u64,
}

impl HostVariants {
    pub(super) fn compile(class: &KernelClass) -> Self {
        let streams = class.payload_bytes >= STREAM_ROW_BYTES_MIN;
        let mut kernels = [None; Variant::ALL.len()];
        for variant in Variant::of(class.kind) {
            kernels[variant.ordinal()] = Some(match variant {
                Variant::Fused(direction, width) => fused(*direction, *width, streams),
                Variant::ByteCopy => byte_copy(),
            });
        }
        Self { kernels, streams, payload_bytes: class.payload_bytes }
    }

    /// The kernel of a variant.
    ///
    /// # Panics
    /// When the plan has no such variant: the launch is not of the plan's kind.
    pub(super) fn kernel(&self, variant: Variant) -> RowKernel {
        let kernel = self.kernels[variant.ordinal()];
        assert!(kernel.is_some(), "The plan has no variant {}", variant.label());
        kernel.expect("asserted above")
    }

    /// Whether rows of this class may go around the cache.
    pub(super) fn streams(&self) -> bool {
        self.streams
    }

    /// Bytes of one row of the class.
    pub(super) fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The variants that were compiled.
    #[must_use]
    pub fn compiled(&self) -> Vec<Variant> {
        Variant::ALL.into_iter().filter(|it| self.kernels[it.ordinal()].is_some()).collect()
    }

    /// The plan kind that they serve.
    #[must_use]
    pub fn kind(&self) -> PlanKind {
        if self.kernels[Variant::ByteCopy.ordinal()].is_some() {
            PlanKind::ByteCopy
        } else {
            PlanKind::Fused
        }
    }
}
