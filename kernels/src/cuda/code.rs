//! Machine code on the device: one module for each class of kernels, shared by all variants of that class.

use std::ffi::CStr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use statecopy_proto::{Direction, IndexWidth, Refusal, RefusalCode};

use super::class::CudaClass;
use super::context::Context;
use super::driver::DriverError;
use super::kernel_graphs::{HeldGraph, KernelGraphs};
use super::sys::{Function, Module};
use crate::plan::Variant;

/// A module that is loaded, and unloaded with the last kernel of it.
#[derive(Debug)]
pub(super) struct Code {
    context: Arc<Context>,
    module: Module,
}

impl Code {
    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for Code {
    fn drop(&mut self) {
        // SAFETY: the module is ours, and nobody has a kernel of it any more.
        self.context.give_back(|current| unsafe { current.unload_module(self.module) });
    }
}

/// The kernels of one class: four of a fused plan, one of a byte copy.
#[derive(Debug)]
pub(super) struct Kernels {
    functions: [Option<Function>; Variant::ALL.len()],
    /// In the order of the functions.
    graphs: [KernelGraphs; Variant::ALL.len()],
    /// Last: its module has the functions.
    _code: Arc<Code>,
}

impl Kernels {
    /// Loads machine code that was compiled for the class and for this device's architecture. `without_graphs` is told why, where
    /// the driver makes no graphs of a kernel.
    fn load(
        context: &Arc<Context>,
        class: CudaClass,
        image: &[u8],
        without_graphs: fn(&str),
    ) -> Result<Self, Refusal> {
        let refused = |error: DriverError| {
            let what = "The compiled variants cannot be loaded on this device";
            error.refusal(RefusalCode::PrepareFailed, what)
        };
        let current = context.enter().map_err(refused)?;
        // SAFETY: the image is whole: the store, or the compiler, vouches for every byte.
        let module = unsafe { current.load_module(image) }.map_err(refused)?;
        let code = Arc::new(Code { context: Arc::clone(context), module });
        let mut kernels = Self {
            functions: [None; Variant::ALL.len()],
            graphs: Default::default(),
            _code: Arc::clone(&code),
        };
        for variant in Variant::of(class.kind()) {
            let place = variant.ordinal();
            // SAFETY: the module is loaded.
            let function = unsafe { current.function(module, entry_point(*variant)) };
            let function = function.map_err(refused)?;
            kernels.functions[place] = Some(function);
            // SAFETY: the function is of that code, and of a variant, which takes `Arguments`.
            match unsafe { KernelGraphs::make(&code, function) } {
                Ok(graphs) => kernels.graphs[place] = graphs,
                Err(error) if context.faulted() => return Err(refused(error)),
                Err(error) => without_graphs(&error.to_string()),
            }
        }
        Ok(kernels)
    }

    /// The kernel of a variant; `None` where the class has no such variant.
    pub(super) fn function(&self, variant: Variant) -> Option<Function> {
        self.functions[variant.ordinal()]
    }

    /// A graph of the kernel of a variant that nobody else launches meanwhile, where one is left.
    pub(super) fn hold_graph(&self, variant: Variant) -> Option<HeldGraph> {
        self.graphs[variant.ordinal()].hold()
    }
}

/// What is loaded on a device. It owns none of it. The class says which code it is: source and compiler are those of the process, and
/// what else a configuration knows of changes no code.
#[derive(Debug, Default)]
pub(super) struct Loaded(Mutex<Vec<(CudaClass, Weak<Kernels>)>>);

impl Loaded {
    /// The kernels of a class: those that somebody uses, or loaded from the image.
    ///
    /// # Errors
    /// PREPARE_FAILED, and what the image is refused with.
    pub(super) fn obtain(
        &self,
        context: &Arc<Context>,
        class: CudaClass,
        image: impl FnOnce() -> Result<Vec<u8>, Refusal>,
        without_graphs: fn(&str),
    ) -> Result<Arc<Kernels>, Refusal> {
        let mut loaded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.retain(|(_, kernels)| kernels.strong_count() > 0);
        let mut live = loaded.iter().filter(|(known, _)| *known == class);
        if let Some(kernels) = live.find_map(|(_, kernels)| kernels.upgrade()) {
            return Ok(kernels);
        }
        let kernels = Arc::new(Kernels::load(context, class, &image()?, without_graphs)?);
        loaded.push((class, Arc::downgrade(&kernels)));
        Ok(kernels)
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
