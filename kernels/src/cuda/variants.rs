//! Compiled variants, loaded on the device.

use std::sync::Arc;

use statecopy_proto::PlanKind;

use super::code::Kernels;
use super::kernel_graphs::HeldGraph;
use super::sys::Function;
use crate::plan::{KernelClass, Variant};

/// The variants of one kernel class: four of a fused plan, one of a byte copy.
#[derive(Debug)]
pub struct CudaVariants {
    kernels: Arc<Kernels>,
    kind: PlanKind,
    payload_bytes: u64,
}

impl CudaVariants {
    /// Variants of a class whose kernels are loaded.
    pub(super) fn of(kernels: Arc<Kernels>, class: &KernelClass) -> Self {
        Self { kernels, kind: class.kind, payload_bytes: class.payload_bytes }
    }

    /// The kernel of a variant.
    ///
    /// # Panics
    /// When the plan has no such variant: the launch is not of the plan's kind.
    pub(super) fn function(&self, variant: Variant) -> Function {
        let function = self.kernels.function(variant);
        assert!(function.is_some(), "The plan has no variant {}", variant.label());
        function.expect("asserted above")
    }

    /// A graph of the kernel of a variant that nobody else launches meanwhile, where one is left.
    pub(super) fn hold_graph(&self, variant: Variant) -> Option<HeldGraph> {
        self.kernels.hold_graph(variant)
    }

    /// Bytes of one row of the class.
    pub(super) fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The variants that were loaded.
    #[must_use]
    pub fn compiled(&self) -> Vec<Variant> {
        Variant::ALL.into_iter().filter(|it| self.kernels.function(*it).is_some()).collect()
    }

    /// The plan kind that they serve.
    #[must_use]
    pub fn kind(&self) -> PlanKind {
        self.kind
    }
}
