//! What NVIDIA's management library says of a device's memory.
//!
//! The driver tells of free memory only from within a context, so what the context itself takes is seen from outside: memory
//! in use before it is made and after. Where the library is missing, or other processes allocate at that moment, the answer is
//! that much worse; nothing depends on it but a figure for people.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr;

use libloading::os::unix::Library;

use super::library;

use crate::signature::DeviceUuid;

/// The library, as the loader finds it.
pub const MANAGEMENT_LIBRARY: &str = "libnvidia-ml.so.1";

/// `NVML_SUCCESS`.
const SUCCESS: c_int = 0;
/// `NVML_ERROR_INSUFFICIENT_SIZE`: there is more than there was room for.
const INSUFFICIENT_SIZE: c_int = 7;
/// `NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE`.
const VERSION_BYTES: c_uint = 80;

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
type Version = unsafe extern "C" fn(*mut c_char, c_uint) -> c_int;
type MigMode = unsafe extern "C" fn(Device, *mut c_uint, *mut c_uint) -> c_int;
/// The list itself is never asked for, only how long it is.
type Processes = unsafe extern "C" fn(Device, *mut c_uint, *mut c_void) -> c_int;
type Look = unsafe extern "C" fn(Device, *mut Memory) -> c_int;

/// What the library says of a device, and of the driver. `None` is what it does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// The driver's release, as in 580.65.06.
    pub driver_release: Option<String>,
    /// Whether it is a slice of a device.
    pub is_slice: bool,
    /// Whether the device is one that is divided into slices (MIG).
    pub is_divided: Option<bool>,
    /// Processes that compute on it as clients of MPS.
    pub mps_clients: Option<u32>,
}

/// One device, seen from outside.
pub(super) struct Management {
    device: Device,
    is_slice: bool,
    look: Look,
    /// What keeps the function where it is. Never unloaded, as the driver.
    library: ManuallyDrop<Library>,
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
            (found == SUCCESS).then_some((device, kind == "MIG-"))
        });
        let (device, is_slice) = device?;
        Some(Self { device, is_slice, look, library })
    }

    /// Bytes of the device that are in use, by whomever.
    pub(super) fn used_bytes(&self) -> Option<u64> {
        let mut memory = Memory::default();
        // SAFETY: the handle is the library's; it writes one structure.
        let found = unsafe { (self.look)(self.device, &raw mut memory) };
        (found == SUCCESS).then_some(memory.used)
    }

    /// Everything else that it says.
    pub(super) fn see(&self) -> Seen {
        Seen {
            driver_release: self.driver_release(),
            is_slice: self.is_slice,
            is_divided: self.is_divided(),
            mps_clients: self.mps_clients(),
        }
    }

    fn driver_release(&self) -> Option<String> {
        // SAFETY: `nvml.h` gives the symbol that type.
        let ask = *unsafe { self.library.get::<Version>(b"nvmlSystemGetDriverVersion") }.ok()?;
        let mut text = [0_u8; VERSION_BYTES as usize];
        // SAFETY: the library writes at most as many bytes as it is told, a zero among them.
        let found = unsafe { ask(text.as_mut_ptr().cast(), VERSION_BYTES) };
        let text = CStr::from_bytes_until_nul(&text).ok()?;
        (found == SUCCESS).then(|| text.to_string_lossy().into_owned())
    }

    fn is_divided(&self) -> Option<bool> {
        // SAFETY: `nvml.h` gives the symbol that type.
        let ask = *unsafe { self.library.get::<MigMode>(b"nvmlDeviceGetMigMode") }.ok()?;
        let (mut now, mut pending) = (0, 0);
        // SAFETY: the handle is the library's; it writes two numbers.
        let found = unsafe { ask(self.device, &raw mut now, &raw mut pending) };
        (found == SUCCESS).then_some(now != 0)
    }

    fn mps_clients(&self) -> Option<u32> {
        let name = b"nvmlDeviceGetMPSComputeRunningProcesses_v3";
        // SAFETY: `nvml.h` gives the symbol that type.
        let ask = *unsafe { self.library.get::<Processes>(name) }.ok()?;
        let mut count = 0;
        // SAFETY: the handle is the library's; it writes one number, and nothing to a list that has no room.
        let found = unsafe { ask(self.device, &raw mut count, ptr::null_mut()) };
        matches!(found, SUCCESS | INSUFFICIENT_SIZE).then_some(count)
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
