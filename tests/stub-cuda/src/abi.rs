//! The types of `cuda.h` that the driver's functions take, written down from NVIDIA's header.

use std::ffi::CStr;

/// What a driver call answers.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CUresult(pub i32);

macro_rules! results {
    ($($name:ident = $code:literal,)*) => {
        #[expect(missing_docs, reason = "named and described by cuda.h")]
        impl CUresult {
            $(pub const $name: Self = Self($code);)*

            /// The name in `cuda.h`, when the stub knows it.
            #[must_use]
            pub fn name(self) -> Option<&'static CStr> {
                match self {
                    Self(0) => Some(c"CUDA_SUCCESS"),
                    $(Self::$name => CStr::from_bytes_with_nul(
                        concat!("CUDA_ERROR_", stringify!($name), "\0").as_bytes(),
                    ).ok(),)*
                    Self(_) => None,
                }
            }
        }
    };
}

results! {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    MAP_FAILED = 205,
    ALREADY_MAPPED = 208,
    NO_BINARY_FOR_GPU = 209,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    MPS_SERVER_NOT_READY = 807,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    STREAM_CAPTURE_UNMATCHED = 903,
    STREAM_CAPTURE_ISOLATION = 905,
    STREAM_CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    STREAM_CAPTURE_WRONG_THREAD = 908,
    UNKNOWN = 999,
}

impl CUresult {
    /// Everything is well.
    pub const SUCCESS: Self = Self(0);
}

/// A device, by its ordinal in this process.
pub(crate) type CUdevice = i32;
/// An address that the device reads and writes.
pub(crate) type CUdeviceptr = u64;
/// A context, stream, module, function, event or pool: a number here, never an address that is followed.
pub(crate) type Opaque = u64;
/// Physical memory.
pub(crate) type CUmemGenericAllocationHandle = u64;

/// Bytes of an IPC handle and of a fabric handle.
pub(crate) const HANDLE_BYTES: usize = 64;

/// A legacy IPC handle.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct CUipcMemHandle(pub(crate) [u8; HANDLE_BYTES]);

/// An identity.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CUuuid(pub(crate) [u8; 16]);

/// Where memory is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CUmemLocation {
    /// [`LOCATION_DEVICE`] is the only one that the stub knows.
    pub(crate) kind: u32,
    /// A device's ordinal.
    pub(crate) id: i32,
}

/// What physical memory to create.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CUmemAllocationProp {
    /// [`ALLOCATION_PINNED`].
    pub(crate) kind: u32,
    /// Bits [`HANDLE_POSIX`] and [`HANDLE_FABRIC`].
    pub(crate) requested_handle_types: u32,
    /// The device.
    pub(crate) location: CUmemLocation,
    /// Zero.
    pub(crate) win32_handle_metadata: u64,
    /// Hints, of no meaning here.
    pub(crate) flags: [u8; 8],
}

/// Who may do what with mapped memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CUmemAccessDesc {
    /// The device.
    pub(crate) location: CUmemLocation,
    /// [`ACCESS_READ`] or [`ACCESS_READ_WRITE`] or none.
    pub(crate) flags: u32,
}

/// A wait or a write of a stream.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CUstreamBatchMemOpParams {
    /// [`OPERATION_WAIT_64`] or [`OPERATION_WRITE_64`].
    pub(crate) operation: u32,
    padding: u32,
    pub(crate) address: CUdeviceptr,
    pub(crate) value: u64,
    pub(crate) flags: u32,
    padding_of_flags: u32,
    alias: u64,
    rest: u64,
}

/// `CU_STREAM_MEM_OP_WAIT_VALUE_64`.
pub(crate) const OPERATION_WAIT_64: u32 = 4;
/// `CU_STREAM_MEM_OP_WRITE_VALUE_64`.
pub(crate) const OPERATION_WRITE_64: u32 = 5;

const _: () = assert!(size_of::<CUstreamBatchMemOpParams>() == 48);
const _: () = assert!(size_of::<CUmemAllocationProp>() == 32);
const _: () = assert!(size_of::<CUmemAccessDesc>() == 12);

/// `CUDA_KERNEL_NODE_PARAMS_v2`, for kernels with one parameter.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct KernelNodeParams<P> {
    pub(crate) function: Opaque,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) parameters: P,
    pub(crate) extra: u64,
    pub(crate) kernel: u64,
    pub(crate) context: u64,
}

const _: () = assert!(size_of::<KernelNodeParams<u64>>() == 72);

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(crate) const ALLOCATION_PINNED: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const HANDLE_POSIX: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub(crate) const HANDLE_FABRIC: u32 = 8;
/// `CU_MEM_ACCESS_FLAGS_PROT_READ`.
pub(crate) const ACCESS_READ: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(crate) const ACCESS_READ_WRITE: u32 = 3;
/// `CU_MEMORYTYPE_HOST`.
pub(crate) const MEMORY_HOST: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
pub(crate) const MEMORY_DEVICE: u32 = 2;

/// `CU_POINTER_ATTRIBUTE_*`.
pub(crate) mod pointer_attribute {
    pub(crate) const CONTEXT: u32 = 1;
    pub(crate) const MEMORY_TYPE: u32 = 2;
    pub(crate) const DEVICE_POINTER: u32 = 3;
    pub(crate) const HOST_POINTER: u32 = 4;
    pub(crate) const SYNC_MEMOPS: u32 = 6;
    pub(crate) const BUFFER_ID: u32 = 7;
    pub(crate) const IS_MANAGED: u32 = 8;
    pub(crate) const DEVICE_ORDINAL: u32 = 9;
    pub(crate) const IS_LEGACY_CUDA_IPC_CAPABLE: u32 = 10;
    pub(crate) const RANGE_START_ADDR: u32 = 11;
    pub(crate) const RANGE_SIZE: u32 = 12;
    pub(crate) const MAPPED: u32 = 13;
    pub(crate) const ALLOWED_HANDLE_TYPES: u32 = 14;
    pub(crate) const ACCESS_FLAGS: u32 = 16;
    pub(crate) const MEMPOOL_HANDLE: u32 = 17;
    pub(crate) const MAPPING_SIZE: u32 = 18;
    pub(crate) const MAPPING_BASE_ADDR: u32 = 19;
    pub(crate) const MEMORY_BLOCK_ID: u32 = 20;
}

/// `CU_STREAM_WAIT_VALUE_*`, and the flags of streams and registrations that the stub looks at.
pub(crate) mod flag {
    pub(crate) const WAIT_GEQ: u32 = 0;
    pub(crate) const WAIT_EQ: u32 = 1;
    pub(crate) const WAIT_AND: u32 = 2;
    pub(crate) const WAIT_FLUSH: u32 = 1 << 30;
}

/// `CU_STREAM_CAPTURE_STATUS_*`.
pub(crate) mod capture_status {
    pub(crate) const NONE: u32 = 0;
    pub(crate) const ACTIVE: u32 = 1;
    pub(crate) const INVALIDATED: u32 = 2;
}

/// `CU_GRAPH_USER_OBJECT_MOVE`.
pub(crate) const USER_OBJECT_MOVE: u32 = 1;
/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`.
pub(crate) const USER_OBJECT_NO_DESTRUCTOR_SYNC: u32 = 1;

/// `CUstreamCaptureMode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CaptureMode {
    Global,
    ThreadLocal,
    Relaxed,
}

impl CaptureMode {
    pub(crate) fn of(number: u32) -> Result<Self, CUresult> {
        match number {
            0 => Ok(Self::Global),
            1 => Ok(Self::ThreadLocal),
            2 => Ok(Self::Relaxed),
            _ => Err(CUresult::INVALID_VALUE),
        }
    }

    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Global => 0,
            Self::ThreadLocal => 1,
            Self::Relaxed => 2,
        }
    }
}
