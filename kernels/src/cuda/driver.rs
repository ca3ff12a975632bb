//! The driver, opened: its errors, and the devices that this process sees.

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr;

use statecopy_proto::{Refusal, RefusalCode};

use super::selector::CudaSelector;
use super::sys::{
    self, DevicePointer, Functions, LoadError, Status, device_attribute, pointer_attribute, status,
};
use crate::signature::DeviceUuid;

/// The driver's library, as the loader finds it.
pub const DRIVER_LIBRARY: &str = "libcuda.so.1";

/// A call of the driver that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with {name} ({code})")]
pub struct DriverError {
    call: &'static str,
    code: c_int,
    name: String,
}

impl DriverError {
    fn status(&self) -> Status {
        Status(self.code)
    }

    /// The driver's number.
    #[must_use]
    pub fn code(&self) -> i32 {
        self.code
    }

    /// Whether the context is of no more use: every later call fails, and only another process helps.
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        // 700 to 721 are faults of kernels but for those that are about peers, registration and launch arguments. 999 is none
        // of them: drivers also give it for a descriptor that is not of device memory (driver 580).
        const STICKY: [Status; 18] = [
            status::DEINITIALIZED,
            status::ECC_UNCORRECTABLE,
            status::NVLINK_UNCORRECTABLE,
            status::CONTAINED,
            status::ILLEGAL_ADDRESS,
            status::LAUNCH_TIMEOUT,
            status::CONTEXT_IS_DESTROYED,
            status::ASSERT,
            status::HARDWARE_STACK_ERROR,
            status::ILLEGAL_INSTRUCTION,
            status::MISALIGNED_ADDRESS,
            status::INVALID_ADDRESS_SPACE,
            status::INVALID_PC,
            status::LAUNCH_FAILED,
            status::TENSOR_MEMORY_LEAK,
            status::MPS_RPC_FAILURE,
            status::MPS_CLIENT_TERMINATED,
            status::EXTERNAL_DEVICE,
        ];
        STICKY.contains(&self.status())
    }

    /// Whether the device has too little memory.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.status() == status::OUT_OF_MEMORY
    }

    /// Whether the driver says that an argument is none of the possible ones.
    pub(super) fn is_invalid_value(&self) -> bool {
        self.status() == status::INVALID_VALUE
    }

    /// Whether the MPS server cannot take a new client now: clients of an earlier fault are still there.
    #[must_use]
    pub fn is_mps_not_ready(&self) -> bool {
        self.status() == status::MPS_SERVER_NOT_READY
    }

    /// A refusal with that code, or DEVICE_LOST where the context is of no more use. `what` begins the sentence.
    pub(super) fn refusal(&self, code: RefusalCode, what: &str) -> Refusal {
        let code = if self.is_sticky() { RefusalCode::DeviceLost } else { code };
        Refusal::new(code, format!("{what}: {self}"))
    }
}

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The driver is not there, or too old.
    #[error("{0}")]
    Driver(String),
    /// The driver is there and refuses to work.
    #[error("The CUDA driver does not start: {0}")]
    Start(DriverError),
    /// No such device.
    #[error("{asked} is not among the devices that this process sees: {visible}")]
    NotVisible {
        /// What was asked for.
        asked: String,
        /// Ordinals, names and UUIDs, or that there is none.
        visible: String,
    },
    /// The device is there and refuses to work.
    #[error("{device} cannot be used: {error}")]
    Device {
        /// Its name.
        device: String,
        /// What it says.
        error: DriverError,
    },
    /// The device lacks what copies need.
    #[error("{device} cannot be used: it has no {lacks}")]
    Unsuitable {
        /// Its name.
        device: String,
        /// What it lacks.
        lacks: &'static str,
    },
    /// The device has too little memory left for a context. How much is free only a context could tell.
    #[error("{device} has no memory left for a context, which takes about half a GiB: {error}")]
    NoContext {
        /// Its name.
        device: String,
        /// What it says.
        error: DriverError,
    },
    /// The device has too little memory left.
    #[error(
        "{device} has no memory left for {what}: {asked} bytes were asked for, {free} of {total} are free"
    )]
    OutOfMemory {
        /// Its name.
        device: String,
        /// What it is for.
        what: &'static str,
        /// Bytes.
        asked: u64,
        /// Bytes.
        free: u64,
        /// Bytes.
        total: u64,
    },
}

impl OpenError {
    /// What the driver said, where it said something.
    #[must_use]
    pub fn driver_error(&self) -> Option<&DriverError> {
        match self {
            Self::Start(error) | Self::Device { error, .. } | Self::NoContext { error, .. } => {
                Some(error)
            }
            Self::Driver(_)
            | Self::NotVisible { .. }
            | Self::Unsuitable { .. }
            | Self::OutOfMemory { .. } => None,
        }
    }
}

impl From<OpenError> for Refusal {
    fn from(error: OpenError) -> Self {
        let remedy = match &error {
            OpenError::Driver(_) => {
                "Install NVIDIA's driver, version 515 or newer; in a container, let the NVIDIA container toolkit bring it in \
                 (NVIDIA_DRIVER_CAPABILITIES=compute,utility)."
            }
            OpenError::Start(error) | OpenError::Device { error, .. }
                if error.is_mps_not_ready() =>
            {
                "Wait until the processes that used the MPS server before its fault have ended, or end them."
            }
            OpenError::Start(_) => {
                "Let `nvidia-smi` show that the driver works, and give this process a device."
            }
            OpenError::NotVisible { .. } => {
                "Name a device of the list, or let this process see the other one (CUDA_VISIBLE_DEVICES, the container's devices)."
            }
            OpenError::Device { .. } => {
                "Let `nvidia-smi` show the state of the device; see the driver's log."
            }
            OpenError::Unsuitable { .. } => "Use a device and a driver that have it.",
            OpenError::NoContext { .. } | OpenError::OutOfMemory { .. } => {
                "Start the daemon before the workers, or leave it more memory (vLLM: a lower gpu_memory_utilization)."
            }
        };
        let code = match &error {
            OpenError::NotVisible { .. } | OpenError::Driver(_) | OpenError::Start(_) => {
                RefusalCode::DeviceNotVisible
            }
            OpenError::Unsuitable { .. }
            | OpenError::Device { .. }
            | OpenError::NoContext { .. }
            | OpenError::OutOfMemory { .. } => RefusalCode::PrepareFailed,
        };
        Self::new(code, error.to_string()).remedied_by(remedy)
    }
}

impl From<LoadError> for OpenError {
    fn from(error: LoadError) -> Self {
        Self::Driver(error.to_string())
    }
}

/// The driver of this machine.
#[derive(Debug)]
pub(super) struct Driver {
    functions: Functions,
    path: PathBuf,
    version: c_int,
}

/// A device that this process sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VisibleDevice {
    pub(super) device: sys::Device,
    pub(super) name: String,
    /// That of the slice, where it is one of MIG.
    pub(super) uuid: DeviceUuid,
}

impl VisibleDevice {
    /// As people and tools write it.
    pub(super) fn label(&self) -> String {
        format!("cuda:{} ({}, {})", self.device, self.name, self.uuid)
    }
}

impl Driver {
    /// Loads the driver and starts it.
    pub(super) fn open(library: &Path) -> Result<Self, OpenError> {
        let functions = Functions::load(library)?;
        let mut driver = Self { functions, path: library.to_owned(), version: 0 };
        // SAFETY: no condition.
        let started = unsafe { (driver.functions.init)(0) };
        if started == status::STUB_LIBRARY {
            let library = library.display();
            return Err(OpenError::Driver(format!(
                "The CUDA driver {library} is the stub that programs are linked with"
            )));
        }
        if started == status::NO_DEVICE {
            return Ok(driver);
        }
        driver.check("cuInit", started).map_err(OpenError::Start)?;
        let mut version = 0;
        // SAFETY: the driver writes one int.
        let status = unsafe { (driver.functions.driver_get_version)(&raw mut version) };
        driver.check("cuDriverGetVersion", status).map_err(OpenError::Start)?;
        driver.version = version;
        Ok(driver)
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// The library that was asked for.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The CUDA version that the driver speaks: 1000 times the major one plus 10 times the minor one.
    pub(super) fn version(&self) -> c_int {
        self.version
    }

    /// `Ok` where the call succeeded.
    pub(super) fn check(&self, call: &'static str, status: Status) -> Result<(), DriverError> {
        if status == status::SUCCESS { Ok(()) } else { Err(self.error(call, status)) }
    }

    /// The error that a status stands for.
    #[cold]
    pub(super) fn error(&self, call: &'static str, status: Status) -> DriverError {
        let mut name: *const c_char = ptr::null();
        // SAFETY: the driver writes one pointer, or null for a number that it does not know.
        let known = unsafe { (self.functions.get_error_name)(status, &raw mut name) };
        let name = if known == status::SUCCESS && !name.is_null() {
            // SAFETY: the name is a constant string of the driver, which is never unloaded.
            let name = unsafe { CStr::from_ptr(name) };
            name.to_string_lossy().into_owned()
        } else {
            "an error without a name".to_owned()
        };
        DriverError { call, code: status.0, name }
    }

    /// The devices that this process sees, in the order of their ordinals.
    pub(super) fn devices(&self) -> Result<Vec<VisibleDevice>, DriverError> {
        let mut count = 0;
        // SAFETY: the driver writes one int.
        let status = unsafe { (self.functions.device_get_count)(&raw mut count) };
        if matches!(status, status::NO_DEVICE | status::NOT_INITIALIZED) {
            return Ok(Vec::new());
        }
        self.check("cuDeviceGetCount", status)?;
        (0..count).map(|ordinal| self.visible(ordinal)).collect()
    }

    /// The device of that ordinal.
    pub(super) fn visible(&self, ordinal: c_int) -> Result<VisibleDevice, DriverError> {
        let mut device = 0;
        // SAFETY: the driver writes one int.
        let status = unsafe { (self.functions.device_get)(&raw mut device, ordinal) };
        self.check("cuDeviceGet", status)?;
        let mut uuid = [0; 16];
        // SAFETY: the driver writes 16 bytes.
        let status = unsafe { (self.functions.device_get_uuid)(&raw mut uuid, device) };
        self.check("cuDeviceGetUuid", status)?;
        Ok(VisibleDevice { device, name: self.device_name(device)?, uuid: DeviceUuid(uuid) })
    }

    fn device_name(&self, device: sys::Device) -> Result<String, DriverError> {
        const NAME_BYTES: c_int = 256;
        let mut name = [0_u8; NAME_BYTES as usize];
        // SAFETY: the driver writes at most as many bytes as it is told, a zero among them.
        let status = unsafe {
            (self.functions.device_get_name)(name.as_mut_ptr().cast(), NAME_BYTES, device)
        };
        self.check("cuDeviceGetName", status)?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    /// One of [`device_attribute`].
    pub(super) fn device_attribute(
        &self,
        device: sys::Device,
        attribute: c_int,
    ) -> Result<c_int, DriverError> {
        let mut value = 0;
        // SAFETY: the driver writes one int.
        let status =
            unsafe { (self.functions.device_get_attribute)(&raw mut value, attribute, device) };
        self.check("cuDeviceGetAttribute", status)?;
        Ok(value)
    }

    /// Major and minor.
    pub(super) fn compute_capability(
        &self,
        device: sys::Device,
    ) -> Result<(u32, u32), DriverError> {
        let number = |attribute| {
            self.device_attribute(device, attribute).map(|value| value.max(0).cast_unsigned())
        };
        Ok((
            number(device_attribute::COMPUTE_CAPABILITY_MAJOR)?,
            number(device_attribute::COMPUTE_CAPABILITY_MINOR)?,
        ))
    }

    /// The device that the memory at an address is of. Needs no current context.
    pub(super) fn device_at(&self, address: DevicePointer) -> Result<sys::Device, DriverError> {
        let word = self.pointer_attribute(pointer_attribute::DEVICE_ORDINAL, address)?;
        let [a, b, c, d, ..] = word.to_le_bytes();
        Ok(sys::Device::from_le_bytes([a, b, c, d]))
    }

    /// The number of the allocation at an address, which no other of this process ever has; 0 for memory that has none. Needs
    /// no current context.
    pub(super) fn buffer_at(&self, address: DevicePointer) -> Result<u64, DriverError> {
        self.known_or_zero(pointer_attribute::BUFFER_ID, address)
    }

    /// An attribute, or 0 where the driver knows none of that name, or of that kind of memory.
    pub(super) fn known_or_zero(
        &self,
        attribute: c_int,
        address: DevicePointer,
    ) -> Result<u64, DriverError> {
        match self.pointer_attribute(attribute, address) {
            Err(error) if error.is_invalid_value() => Ok(0),
            answer => answer,
        }
    }

    /// One of [`pointer_attribute`], of any width up to 64 bits: the driver writes the lower bytes of a word that was zero.
    pub(super) fn pointer_attribute(
        &self,
        attribute: c_int,
        address: DevicePointer,
    ) -> Result<u64, DriverError> {
        // In memory as little-endian machines have it, which the driver's all are.
        let mut value = 0_u64;
        // SAFETY: the driver writes 1, 4 or 8 bytes, as the attribute has it.
        let status = unsafe {
            (self.functions.pointer_get_attribute)((&raw mut value).cast(), attribute, address)
        };
        self.check("cuPointerGetAttribute", status)?;
        Ok(value)
    }
}

/// Finds the device among those that are visible.
pub(super) fn select(driver: &Driver, selector: CudaSelector) -> Result<VisibleDevice, OpenError> {
    let devices = driver.devices().map_err(OpenError::Start)?;
    let chosen = devices.iter().find(|device| match selector {
        CudaSelector::Ordinal(ordinal) => u32::try_from(device.device) == Ok(ordinal),
        CudaSelector::Uuid(uuid) => device.uuid == uuid,
    });
    chosen.cloned().ok_or_else(|| {
        let labels: Vec<String> = devices.iter().map(VisibleDevice::label).collect();
        let visible = if labels.is_empty() { "none".to_owned() } else { labels.join(", ") };
        OpenError::NotVisible { asked: selector.to_string(), visible }
    })
}
