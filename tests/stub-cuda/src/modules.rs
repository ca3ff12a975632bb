//! Modules and their functions. What an image says is not looked at: the kernels are the stub's own.

use std::collections::BTreeMap;

use crate::abi::{CUdevice, CUresult, Opaque};
use crate::control::Knob;
use crate::kernels::Kernel;
use crate::process::{Answer, Process};
use crate::trace::Object;

/// What a process has loaded.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    modules: BTreeMap<Opaque, CUdevice>,
    /// Each with the module that it goes with.
    functions: BTreeMap<Opaque, (Opaque, Kernel)>,
}

impl Modules {
    /// Removes the modules of a device's context, and says how many these were.
    pub(crate) fn remove_of(&mut self, device: CUdevice) -> usize {
        let before = self.modules.len();
        self.modules.retain(|_, of| *of != device);
        let modules = &self.modules;
        self.functions.retain(|_, (module, _)| modules.contains_key(module));
        before - self.modules.len()
    }
}

impl Process {
    /// `cuModuleLoadData`, by the image's first byte and the chip that it says it is for.
    pub(crate) fn load_module(&self, first: u8, architecture: Option<u32>) -> Answer<Opaque> {
        let device = self.context()?;
        if first == 0 {
            return Err(CUresult::INVALID_IMAGE);
        }
        let (major, minor) = self.device(device)?.capability;
        // Machine code runs on chips of its major version, from its minor version on.
        let runs = |code: u32| code / 10 == major && code % 10 <= minor;
        if self.control.is_set(Knob::NoBinary) || !architecture.is_none_or(runs) {
            return Err(CUresult::NO_BINARY_FOR_GPU);
        }
        let module = self.control.number() << 4;
        self.objects().modules.modules.insert(module, device);
        self.trace.add(Object::Module);
        Ok(module)
    }

    /// `cuModuleUnload`: waits for the device first, so that no kernel loses its code.
    pub(crate) fn unload_module(&self, module: Opaque) -> Answer {
        self.synchronise()?;
        let modules = &mut self.objects().modules;
        modules.modules.remove(&module).ok_or(CUresult::INVALID_HANDLE)?;
        modules.functions.retain(|_, (of, _)| *of != module);
        self.trace.remove(Object::Module);
        Ok(())
    }

    /// `cuModuleGetFunction`.
    pub(crate) fn function_named(&self, module: Opaque, name: &[u8]) -> Answer<Opaque> {
        let kernel = Kernel::named(name);
        let modules = &mut self.objects().modules;
        if !modules.modules.contains_key(&module) {
            return Err(CUresult::INVALID_HANDLE);
        }
        let kernel = kernel.ok_or(CUresult::NOT_FOUND)?;
        let known = modules.functions.iter().find(|(_, each)| **each == (module, kernel));
        if let Some((function, _)) = known {
            return Ok(*function);
        }
        let function = self.control.number() << 4;
        modules.functions.insert(function, (module, kernel));
        Ok(function)
    }

    /// The kernel behind a function.
    pub(crate) fn kernel(&self, function: Opaque) -> Answer<Kernel> {
        let found = self.objects().modules.functions.get(&function).map(|(_, kernel)| *kernel);
        found.ok_or(CUresult::INVALID_HANDLE)
    }
}
