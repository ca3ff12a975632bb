//! Compiled variants, loaded on the device.

use std::ffi::CStr;
use std::sync::Arc;

use statecopy_proto::{Direction, IndexWidth, PlanKind, Refusal, RefusalCode};

use super::context::Context;
use super::driver::DriverError;
use super::kernel_graphs::{HeldGraph, KernelGraphs};
use super::sys::{Function, Module};
use crate::plan::{KernelClass, Variant};

/// The variants of one kernel class: four of a fused plan, one of a byte copy, in one module of machine code.
#[derive(Debug)]
pub struct CudaVariants {
    context: Arc<Context>,
    module: Module,
    functions: [Option<Function>; Variant::ALL.len()],
    /// In the order of the functions. Dropped before the module, whose kernels are in them.
    graphs: [KernelGraphs; Variant::ALL.len()],
    kind: PlanKind,
    payload_bytes: u64,
}

impl CudaVariants {
    /// Loads machine code that was compiled for the class and for this device's architecture.
    pub(super) fn load(
        context: &Arc<Context>,
        class: &KernelClass,
        image: &[u8],
    ) -> Result<Self, Refusal> {
        let refused = |error: DriverError| {
            let what = "The compiled variants cannot be loaded on this device";
            error.refusal(RefusalCode::PrepareFailed, what)
        };
        let current = context.enter().map_err(refused)?;
        // SAFETY: the image is whole: the store, or the compiler, vouches for every byte.
        let module = unsafe { current.load_module(image) }.map_err(refused)?;
        let mut variants = Self {
            context: Arc::clone(context),
            module,
            functions: [None; Variant::ALL.len()],
            graphs: Default::default(),
            kind: class.kind,
            payload_bytes: class.payload_bytes,
        };
        for variant in Variant::of(class.kind) {
            // SAFETY: the module is loaded.
            let function = unsafe { current.function(module, entry_point(*variant)) };
            let function = function.map_err(refused)?;
            variants.functions[variant.ordinal()] = Some(function);
            // SAFETY: the function is of a variant, which takes `Arguments`; the module goes after the graphs.
            variants.graphs[variant.ordinal()] = unsafe { KernelGraphs::make(context, function) };
        }
        Ok(variants)
    }

    /// The kernel of a variant.
    ///
    /// # Panics
    /// When the plan has no such variant: the launch is not of the plan's kind.
    pub(super) fn function(&self, variant: Variant) -> Function {
        let function = self.functions[variant.ordinal()];
        assert!(function.is_some(), "The plan has no variant {}", variant.label());
        function.expect("asserted above")
    }

    /// A graph of the kernel of a variant that nobody else launches meanwhile, where one is left.
    pub(super) fn hold_graph(&self, variant: Variant) -> Option<HeldGraph> {
        self.graphs[variant.ordinal()].hold()
    }

    /// Bytes of one row of the class.
    pub(super) fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// The variants that were loaded.
    #[must_use]
    pub fn compiled(&self) -> Vec<Variant> {
        Variant::ALL.into_iter().filter(|it| self.functions[it.ordinal()].is_some()).collect()
    }

    /// The plan kind that they serve.
    #[must_use]
    pub fn kind(&self) -> PlanKind {
        self.kind
    }
}

impl Drop for CudaVariants {
    fn drop(&mut self) {
        self.graphs = Default::default();
        // SAFETY: the module is ours; whoever launches holds the variants until the launch is done.
        self.context.give_back(|current| unsafe { current.unload_module(self.module) });
    }
}

/// The name of a variant's kernel in the source.
fn entry_point(variant: Variant) -> &'static CStr {
    match variant {
        Variant::Fused(Direction::Gather, IndexWidth::Int32) => c"gather_int32",
        Variant::Fused(Direction::Gather, IndexWidth::Int64) => c"gather_int64",
        Variant::Fused(Direction::Scatter, IndexWidth::Int32) => c"scatter_int32",
        Variant::Fused(Direction::Scatter, IndexWidth::Int64) => c"scatter_int64",
        Variant::ByteCopy => c"byte_copy",
    }
}
