//! What NVIDIA's management library says of a device's memory.
//!
//! The driver tells of free memory only from within a context, so what the context itself takes is seen from outside: memory
//! in use before it is made and after. Where the library is missing, or other processes allocate at that moment, the answer is
//! that much worse; nothing depends on it but a figure for people.

use std::ffi::{CString, c_char, c_int};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;

use libloading::os::unix::Library;

use super::library;

use crate::signature::DeviceUuid;

/// The library, as the loader finds it.
pub const MANAGEMENT_LIBRARY: &str = "libnvidia-ml.so.1";

/// `NVML_SUCCESS`.
const SUCCESS: c_int = 0;

/// `nvmlDevice_t`: a word that the library gave and gets back.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
struct Device(usize);

/// `nvmlMemory_t`, in bytes.
#[derive(Debug, Default)]
#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

type Init = unsafe extern "C" fn() -> c_int;
type Find = unsafe extern "C" fn(*const c_char, *mut Device) -> c_int;
type Look = unsafe extern "C" fn(Device, *mut Memory) -> c_int;

/// One device, seen from outside.
pub(super) struct Management {
    device: Device,
    look: Look,
    /// What keeps the function where it is. Never unloaded, as the driver.
    _library: ManuallyDrop<Library>,
}

impl Management {
    /// Opens the library and finds a device, or a slice of one, by its UUID. `None` where either is missing.
    pub(super) fn open(library: &Path, uuid: DeviceUuid) -> Option<Self> {
        // SAFETY: the library belongs to the driver that the operator has installed, or names.
        let library = unsafe { library::open(library) }.ok()?;
        let library = ManuallyDrop::new(library);
        // SAFETY: `nvml.h` gives the symbol that type. It is used only while the library is loaded.
        let init = *unsafe { library.get::<Init>(b"nvmlInit_v2") }.ok()?;
        // SAFETY: as above.
        let find = *unsafe { library.get::<Find>(b"nvmlDeviceGetHandleByUUID") }.ok()?;
        // SAFETY: as above.
        let look = *unsafe { library.get::<Look>(b"nvmlDeviceGetMemoryInfo") }.ok()?;
        // SAFETY: no condition.
        if unsafe { init() } != SUCCESS {
            return None;
        }
        // The driver does not say which of the two it is.
        let device = ["GPU-", "MIG-"].into_iter().find_map(|kind| {
            let name = CString::new(format!("{kind}{uuid}")).ok()?;
            let mut device = Device(0);
            // SAFETY: the library reads the name and writes one handle.
            let found = unsafe { find(name.as_ptr(), &raw mut device) };
            (found == SUCCESS).then_some(device)
        })?;
        Some(Self { device, look, _library: library })
    }

    /// Bytes of the device that are in use, by whomever.
    pub(super) fn used_bytes(&self) -> Option<u64> {
        let mut memory = Memory::default();
        // SAFETY: the handle is the library's; it writes one structure.
        let found = unsafe { (self.look)(self.device, &raw mut memory) };
        (found == SUCCESS).then_some(memory.used)
    }
}

impl fmt::Debug for Management {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Management").field("device", &self.device).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_library_tells_nothing() {
        let uuid = DeviceUuid([1; 16]);
        assert!(Management::open(Path::new("/nowhere/libnvidia-ml.so.1"), uuid).is_none());
        // A library that is another.
        assert!(Management::open(Path::new("libc.so.6"), uuid).is_none());
    }
}
