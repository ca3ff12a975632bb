//! The driver's functions and types, as far as they are used.
//!
//! Written by hand from NVIDIA's `cuda.h`, equal in CUDA 12 and 13: symbols carry the suffix that the header's macros add.
//! Every symbol is resolved when the driver is opened; one that is missing is an error that names it, at once or, for what
//! older drivers lack, where it is needed. Names here are those
//! of the header without their prefix, so that its documentation is easily found.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::{ManuallyDrop, offset_of};
use std::path::{Path, PathBuf};

use libloading::os::unix::Library;

use super::library;

/// `CUresult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Status(pub(super) c_int);

/// `CUdevice`: an ordinal among the devices that this process sees.
pub(super) type Device = c_int;

/// `CUdeviceptr`.
pub(super) type DevicePointer = u64;

/// Declares handles: words that the driver gave and gets back. Their pointers are never followed, so they are words here.
macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            #[repr(transparent)]
            pub(super) struct $name(pub(super) usize);
        )*
    };
}

handles! {
    /// `CUcontext`.
    Context
    /// `CUmodule`.
    Module
    /// `CUfunction`.
    Function
    /// `CUstream`. Zero is the context's legacy default stream.
    Stream
    /// `CUevent`.
    Event
    /// `CUgraph`.
    Graph
    /// `CUgraphNode`.
    GraphNode
    /// `CUgraphExec`.
    GraphExec
    /// `CUuserObject`.
    UserObject
}

/// `CUmemGenericAllocationHandle`.
pub(super) type AllocationHandle = u64;

/// `CUuuid`.
pub(super) type Uuid = [u8; 16];

/// `CUipcMemHandle`, passed by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct IpcMemHandle(pub(super) [u8; 64]);

/// `CUmemFabricHandle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(super) struct FabricHandle(pub(super) [u8; 64]);

/// `CUmemLocation`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct MemLocation {
    pub(super) kind: c_int,
    pub(super) id: c_int,
}

/// `CUmemAllocationProp`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct MemAllocationProp {
    pub(super) kind: c_int,
    pub(super) requested_handle_types: c_int,
    pub(super) location: MemLocation,
    pub(super) win32_handle_meta_data: usize,
    pub(super) alloc_flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct MemAccessDesc {
    pub(super) location: MemLocation,
    pub(super) flags: c_int,
}

/// `CUstreamBatchMemOpParams`, as a wait or a write of 64 bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct StreamMemOp {
    /// [`STREAM_MEM_OP_WAIT_VALUE_64`] or [`STREAM_MEM_OP_WRITE_VALUE_64`].
    pub(super) operation: c_int,
    pub(super) padding: c_int,
    pub(super) address: DevicePointer,
    pub(super) value: u64,
    pub(super) flags: c_uint,
    pub(super) padding_of_flags: c_uint,
    /// For the driver's own use.
    pub(super) alias: DevicePointer,
    /// The header's union has room for more.
    pub(super) rest: u64,
}

/// `CUDA_KERNEL_NODE_PARAMS` of CUDA 12 and 13.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct KernelNodeParams {
    function: Function,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    /// One pointer a parameter.
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
    /// Where there is no function.
    kernel: usize,
    context: Context,
}

impl KernelNodeParams {
    /// A kernel with these parameters, which are read through it as long as it is used.
    pub(super) fn new(
        function: Function,
        ([columns, rows], threads): ([u32; 2], u32),
        parameters: &mut [*mut c_void],
    ) -> Self {
        Self {
            function,
            grid: [columns, rows, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
            parameters: parameters.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kernel: 0,
            context: Context(0),
        }
    }
}

const _: () = {
    assert!(size_of::<KernelNodeParams>() == 72 && align_of::<KernelNodeParams>() == 8);
    assert!(offset_of!(KernelNodeParams, grid) == 8);
    assert!(offset_of!(KernelNodeParams, shared_bytes) == 32);
    assert!(offset_of!(KernelNodeParams, parameters) == 40);
    assert!(offset_of!(KernelNodeParams, context) == 64);
    assert!(size_of::<StreamMemOp>() == 48 && align_of::<StreamMemOp>() == 8);
    assert!(offset_of!(StreamMemOp, address) == 8);
    assert!(offset_of!(StreamMemOp, value) == 16);
    assert!(offset_of!(StreamMemOp, flags) == 24);
    assert!(offset_of!(StreamMemOp, alias) == 32);
    assert!(size_of::<IpcMemHandle>() == 64);
    assert!(size_of::<FabricHandle>() == 64);
    assert!(size_of::<MemLocation>() == 8);
    assert!(size_of::<MemAllocationProp>() == 32 && align_of::<MemAllocationProp>() == 8);
    assert!(offset_of!(MemAllocationProp, requested_handle_types) == 4);
    assert!(offset_of!(MemAllocationProp, location) == 8);
    assert!(offset_of!(MemAllocationProp, win32_handle_meta_data) == 16);
    assert!(offset_of!(MemAllocationProp, alloc_flags) == 24);
    assert!(size_of::<MemAccessDesc>() == 12);
    assert!(offset_of!(MemAccessDesc, flags) == 8);
};

/// `CUhostFn`.
pub(super) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// `CUresult` values that are told apart. The rest have a name, which the driver tells.
pub(super) mod status {
    use super::Status;

    pub(crate) const SUCCESS: Status = Status(0);
    pub(crate) const INVALID_VALUE: Status = Status(1);
    pub(crate) const OUT_OF_MEMORY: Status = Status(2);
    pub(crate) const NOT_INITIALIZED: Status = Status(3);
    pub(crate) const DEINITIALIZED: Status = Status(4);
    pub(crate) const STUB_LIBRARY: Status = Status(34);
    pub(crate) const NO_DEVICE: Status = Status(100);
    pub(crate) const ECC_UNCORRECTABLE: Status = Status(214);
    pub(crate) const NVLINK_UNCORRECTABLE: Status = Status(220);
    pub(crate) const CONTAINED: Status = Status(226);
    pub(crate) const NOT_READY: Status = Status(600);
    pub(crate) const NOT_FOUND: Status = Status(500);
    pub(crate) const ILLEGAL_ADDRESS: Status = Status(700);
    pub(crate) const LAUNCH_TIMEOUT: Status = Status(702);
    pub(crate) const CONTEXT_IS_DESTROYED: Status = Status(709);
    pub(crate) const ASSERT: Status = Status(710);
    pub(crate) const HARDWARE_STACK_ERROR: Status = Status(714);
    pub(crate) const ILLEGAL_INSTRUCTION: Status = Status(715);
    pub(crate) const MISALIGNED_ADDRESS: Status = Status(716);
    pub(crate) const INVALID_ADDRESS_SPACE: Status = Status(717);
    pub(crate) const INVALID_PC: Status = Status(718);
    pub(crate) const LAUNCH_FAILED: Status = Status(719);
    pub(crate) const TENSOR_MEMORY_LEAK: Status = Status(721);
    pub(crate) const MPS_RPC_FAILURE: Status = Status(806);
    pub(crate) const MPS_SERVER_NOT_READY: Status = Status(807);
    pub(crate) const STREAM_CAPTURE_INVALIDATED: Status = Status(901);
    pub(crate) const STREAM_CAPTURE_IMPLICIT: Status = Status(906);
    pub(crate) const MPS_CLIENT_TERMINATED: Status = Status(810);
    pub(crate) const EXTERNAL_DEVICE: Status = Status(911);
}

/// `CUdevice_attribute` values.
pub(super) mod device_attribute {
    use std::ffi::c_int;

    /// One of [`super::COMPUTE_MODE_DEFAULT`] and others.
    pub(crate) const COMPUTE_MODE: c_int = 20;
    pub(crate) const UNIFIED_ADDRESSING: c_int = 41;
    pub(crate) const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    pub(crate) const COMPUTE_CAPABILITY_MINOR: c_int = 76;
    /// Since CUDA 12.2.
    pub(crate) const MPS_ENABLED: c_int = 133;
}

/// `CUpointer_attribute` values, each with the type that the driver writes.
pub(super) mod pointer_attribute {
    use std::ffi::c_int;

    /// `unsigned int`, one of [`super::MEMORYTYPE_DEVICE`] and others.
    pub(crate) const MEMORY_TYPE: c_int = 2;
    /// `unsigned long long`.
    pub(crate) const BUFFER_ID: c_int = 7;
    /// `unsigned int`.
    pub(crate) const IS_MANAGED: c_int = 8;
    /// `int`.
    pub(crate) const DEVICE_ORDINAL: c_int = 9;
    /// `int`, 0 or 1.
    pub(crate) const IS_LEGACY_CUDA_IPC_CAPABLE: c_int = 10;
    /// `unsigned long long`: `CUmemAllocationHandleType` bits.
    pub(crate) const ALLOWED_HANDLE_TYPES: c_int = 14;
    /// `CUmemoryPool`, null outside a pool.
    pub(crate) const MEMPOOL_HANDLE: c_int = 17;
    /// `size_t`.
    pub(crate) const MAPPING_SIZE: c_int = 18;
    /// `CUdeviceptr`.
    pub(crate) const MAPPING_BASE_ADDR: c_int = 19;
}

/// `CU_COMPUTEMODE_DEFAULT`.
pub(super) const COMPUTE_MODE_DEFAULT: c_int = 0;
/// `CU_COMPUTEMODE_PROHIBITED`.
pub(super) const COMPUTE_MODE_PROHIBITED: c_int = 2;
/// `CU_COMPUTEMODE_EXCLUSIVE_PROCESS`.
pub(super) const COMPUTE_MODE_EXCLUSIVE_PROCESS: c_int = 3;
/// `CU_MEMORYTYPE_DEVICE`.
pub(super) const MEMORYTYPE_DEVICE: u64 = 2;
/// `CU_CTX_SCHED_BLOCKING_SYNC`: a thread that waits for the device sleeps.
pub(super) const CTX_SCHED_BLOCKING_SYNC: c_uint = 4;
/// `CU_STREAM_NON_BLOCKING`: no order with the legacy default stream.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_WRITE_VALUE_DEFAULT`: the write comes after everything before it on the stream is visible.
pub(super) const STREAM_WRITE_VALUE_DEFAULT: c_uint = 0;
/// `CU_STREAM_WAIT_VALUE_GEQ`.
pub(super) const STREAM_WAIT_VALUE_GEQ: c_uint = 0;
/// `CU_STREAM_WAIT_VALUE_AND`: any of the bits.
pub(super) const STREAM_WAIT_VALUE_AND: c_uint = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
pub(super) const STREAM_CAPTURE_STATUS_NONE: c_int = 0;
/// `CU_STREAM_CAPTURE_STATUS_ACTIVE`.
pub(super) const STREAM_CAPTURE_STATUS_ACTIVE: c_int = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: this thread's calls are none of other captures' business.
pub(super) const STREAM_CAPTURE_MODE_RELAXED: c_int = 2;
/// `CU_EVENT_DISABLE_TIMING`.
pub(super) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, which is required.
pub(super) const USER_OBJECT_NO_DESTRUCTOR_SYNC: c_uint = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`: the caller's reference becomes the graph's.
pub(super) const GRAPH_USER_OBJECT_MOVE: c_uint = 1;
/// `CU_STREAM_MEM_OP_WAIT_VALUE_64`.
pub(super) const STREAM_MEM_OP_WAIT_VALUE_64: c_int = 4;
/// `CU_STREAM_MEM_OP_WRITE_VALUE_64`.
pub(super) const STREAM_MEM_OP_WRITE_VALUE_64: c_int = 5;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`.
pub(super) const MEMHOSTREGISTER_MAPPED: c_uint = 3;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
pub(super) const MEMHOSTALLOC_MAPPED: c_uint = 3;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag there is.
pub(super) const IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(super) const MEM_ALLOCATION_TYPE_PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(super) const MEM_LOCATION_TYPE_DEVICE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(super) const MEM_ACCESS_READ_WRITE: c_int = 3;
/// `CU_MEM_HANDLE_TYPE_NONE`.
pub(super) const MEM_HANDLE_TYPE_NONE: c_int = 0;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(super) const MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub(super) const MEM_HANDLE_TYPE_FABRIC: c_int = 8;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub(super) const MEM_ALLOC_GRANULARITY_MINIMUM: c_int = 0;

/// Why the driver could not be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoadError {
    /// The library is not there, or what it needs is not.
    #[error("The CUDA driver {} cannot be loaded: {reason}", library.display())]
    Library {
        /// What was looked for.
        library: PathBuf,
        /// What the loader says.
        reason: String,
    },
    /// The library is older than what is needed of it.
    #[error("The CUDA driver {} has no function {symbol}", library.display())]
    Symbol {
        /// Where it was looked for.
        library: PathBuf,
        /// The function.
        symbol: &'static str,
    },
}

/// Declares the table: one typed function a symbol. Those after `=> newer` may be missing.
macro_rules! functions {
    (
        $($field:ident = $symbol:literal($($argument:ident: $type:ty),* $(,)?);)*
        => newer
        $($newer:ident = $newer_symbol:literal($($newer_argument:ident: $newer_type:ty),* $(,)?);)*
    ) => {
        /// The driver's functions. All that every driver has are there, or the table is not.
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument: $type),*) -> Status,)*
            $(pub(super) $newer: Option<unsafe extern "C" fn($($newer_argument: $newer_type),*) -> Status>,)*
            /// What keeps the functions where they are. Never unloaded: the driver has threads and exit handlers of its own.
            _library: ManuallyDrop<Library>,
        }

        impl Functions {
            fn resolve(library: Library, path: &Path) -> Result<Self, LoadError> {
                $(
                    // SAFETY: `cuda.h` gives the symbol that type. The address is used only while the library is loaded.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($type),*) -> Status>($symbol.as_bytes())
                    };
                    let missing =
                        |_| LoadError::Symbol { library: path.to_owned(), symbol: $symbol };
                    let $field = *found.map_err(missing)?;
                )*
                $(
                    // SAFETY: as above.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($newer_type),*) -> Status>(
                            $newer_symbol.as_bytes(),
                        )
                    };
                    let $newer = found.ok().map(|found| *found);
                )*
                Ok(Self { $($field,)* $($newer,)* _library: ManuallyDrop::new(library) })
            }
        }
    };
}

functions! {
    init = "cuInit"(flags: c_uint);
    driver_get_version = "cuDriverGetVersion"(version: *mut c_int);
    get_error_name = "cuGetErrorName"(error: Status, name: *mut *const c_char);

    device_get = "cuDeviceGet"(device: *mut Device, ordinal: c_int);
    device_get_count = "cuDeviceGetCount"(count: *mut c_int);
    device_get_name = "cuDeviceGetName"(name: *mut c_char, bytes: c_int, device: Device);
    device_get_uuid = "cuDeviceGetUuid_v2"(uuid: *mut Uuid, device: Device);
    device_get_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: Device);

    device_primary_ctx_retain = "cuDevicePrimaryCtxRetain"(context: *mut Context, device: Device);
    device_primary_ctx_release = "cuDevicePrimaryCtxRelease_v2"(device: Device);
    device_primary_ctx_set_flags = "cuDevicePrimaryCtxSetFlags_v2"(device: Device, flags: c_uint);
    ctx_set_current = "cuCtxSetCurrent"(context: Context);
    ctx_get_current = "cuCtxGetCurrent"(context: *mut Context);
    ctx_push_current = "cuCtxPushCurrent_v2"(context: Context);
    ctx_pop_current = "cuCtxPopCurrent_v2"(context: *mut Context);
    ctx_synchronize = "cuCtxSynchronize"();
    ctx_get_stream_priority_range = "cuCtxGetStreamPriorityRange"(least: *mut c_int, greatest: *mut c_int);

    mem_get_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    mem_alloc = "cuMemAlloc_v2"(memory: *mut DevicePointer, bytes: usize);
    mem_free = "cuMemFree_v2"(memory: DevicePointer);
    mem_alloc_async = "cuMemAllocAsync"(memory: *mut DevicePointer, bytes: usize, stream: Stream);
    mem_free_async = "cuMemFreeAsync"(memory: DevicePointer, stream: Stream);
    mem_host_alloc = "cuMemHostAlloc"(memory: *mut *mut c_void, bytes: usize, flags: c_uint);
    mem_free_host = "cuMemFreeHost"(memory: *mut c_void);
    mem_host_register = "cuMemHostRegister_v2"(memory: *mut c_void, bytes: usize, flags: c_uint);
    mem_host_unregister = "cuMemHostUnregister"(memory: *mut c_void);
    mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2"(address: *mut DevicePointer, memory: *mut c_void, flags: c_uint);
    mem_get_address_range = "cuMemGetAddressRange_v2"(base: *mut DevicePointer, bytes: *mut usize, address: DevicePointer);
    pointer_get_attribute = "cuPointerGetAttribute"(value: *mut c_void, attribute: c_int, address: DevicePointer);
    memset_d8 = "cuMemsetD8_v2"(memory: DevicePointer, value: u8, bytes: usize);
    memcpy_htod = "cuMemcpyHtoD_v2"(to: DevicePointer, from: *const c_void, bytes: usize);
    memcpy_htod_async = "cuMemcpyHtoDAsync_v2"(to: DevicePointer, from: *const c_void, bytes: usize, stream: Stream);
    memcpy_dtoh = "cuMemcpyDtoH_v2"(to: *mut c_void, from: DevicePointer, bytes: usize);

    ipc_get_mem_handle = "cuIpcGetMemHandle"(handle: *mut IpcMemHandle, memory: DevicePointer);
    ipc_open_mem_handle = "cuIpcOpenMemHandle_v2"(memory: *mut DevicePointer, handle: IpcMemHandle, flags: c_uint);
    ipc_close_mem_handle = "cuIpcCloseMemHandle"(memory: DevicePointer);

    mem_address_reserve = "cuMemAddressReserve"(address: *mut DevicePointer, bytes: usize, alignment: usize, hint: DevicePointer, flags: u64);
    mem_address_free = "cuMemAddressFree"(address: DevicePointer, bytes: usize);
    mem_create = "cuMemCreate"(handle: *mut AllocationHandle, bytes: usize, properties: *const MemAllocationProp, flags: u64);
    mem_release = "cuMemRelease"(handle: AllocationHandle);
    mem_map = "cuMemMap"(address: DevicePointer, bytes: usize, offset: usize, handle: AllocationHandle, flags: u64);
    mem_unmap = "cuMemUnmap"(address: DevicePointer, bytes: usize);
    mem_set_access = "cuMemSetAccess"(address: DevicePointer, bytes: usize, access: *const MemAccessDesc, count: usize);
    mem_export_to_shareable_handle = "cuMemExportToShareableHandle"(shareable: *mut c_void, handle: AllocationHandle, kind: c_int, flags: u64);
    mem_import_from_shareable_handle = "cuMemImportFromShareableHandle"(handle: *mut AllocationHandle, shareable: *mut c_void, kind: c_int);
    mem_retain_allocation_handle = "cuMemRetainAllocationHandle"(handle: *mut AllocationHandle, address: *mut c_void);
    mem_get_allocation_granularity = "cuMemGetAllocationGranularity"(bytes: *mut usize, properties: *const MemAllocationProp, option: c_int);
    mem_get_allocation_properties = "cuMemGetAllocationPropertiesFromHandle"(properties: *mut MemAllocationProp, handle: AllocationHandle);

    stream_create_with_priority = "cuStreamCreateWithPriority"(stream: *mut Stream, flags: c_uint, priority: c_int);
    stream_destroy = "cuStreamDestroy_v2"(stream: Stream);
    stream_query = "cuStreamQuery"(stream: Stream);
    stream_synchronize = "cuStreamSynchronize"(stream: Stream);
    stream_is_capturing = "cuStreamIsCapturing"(stream: Stream, status: *mut c_int);
    stream_write_value_64 = "cuStreamWriteValue64_v2"(stream: Stream, address: DevicePointer, value: u64, flags: c_uint);
    stream_wait_value_64 = "cuStreamWaitValue64_v2"(stream: Stream, address: DevicePointer, value: u64, flags: c_uint);
    stream_batch_mem_op = "cuStreamBatchMemOp_v2"(stream: Stream, count: c_uint, operations: *mut StreamMemOp, flags: c_uint);
    stream_wait_event = "cuStreamWaitEvent"(stream: Stream, event: Event, flags: c_uint);
    stream_get_capture_info = "cuStreamGetCaptureInfo_v2"(
        stream: Stream,
        status: *mut c_int,
        id: *mut u64,
        graph: *mut Graph,
        dependencies: *mut *const c_void,
        count: *mut usize,
    );
    thread_exchange_stream_capture_mode = "cuThreadExchangeStreamCaptureMode"(mode: *mut c_int);
    event_create = "cuEventCreate"(event: *mut Event, flags: c_uint);
    event_record = "cuEventRecord"(event: Event, stream: Stream);
    event_query = "cuEventQuery"(event: Event);
    event_destroy = "cuEventDestroy_v2"(event: Event);
    user_object_create = "cuUserObjectCreate"(
        object: *mut UserObject,
        data: *mut c_void,
        destroy: HostFunction,
        references: c_uint,
        flags: c_uint,
    );
    user_object_release = "cuUserObjectRelease"(object: UserObject, references: c_uint);
    graph_create = "cuGraphCreate"(graph: *mut Graph, flags: c_uint);
    graph_destroy = "cuGraphDestroy"(graph: Graph);
    graph_instantiate = "cuGraphInstantiateWithFlags"(executable: *mut GraphExec, graph: Graph, flags: u64);
    graph_upload = "cuGraphUpload"(executable: GraphExec, stream: Stream);
    graph_launch = "cuGraphLaunch"(executable: GraphExec, stream: Stream);
    graph_exec_destroy = "cuGraphExecDestroy"(executable: GraphExec);
    graph_retain_user_object = "cuGraphRetainUserObject"(graph: Graph, object: UserObject, references: c_uint, flags: c_uint);

    module_load_data = "cuModuleLoadData"(module: *mut Module, image: *const c_void);
    module_unload = "cuModuleUnload"(module: Module);
    module_get_function = "cuModuleGetFunction"(function: *mut Function, module: Module, name: *const c_char);
    launch_kernel = "cuLaunchKernel"(
        function: Function,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: Stream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );

    => newer
    // Since CUDA 12.0.
    graph_add_kernel_node = "cuGraphAddKernelNode_v2"(
        node: *mut GraphNode,
        graph: Graph,
        dependencies: *const GraphNode,
        count: usize,
        kernel: *const KernelNodeParams,
    );
    graph_exec_kernel_node_set_params = "cuGraphExecKernelNodeSetParams_v2"(
        executable: GraphExec,
        node: GraphNode,
        kernel: *const KernelNodeParams,
    );
    stream_get_id = "cuStreamGetId"(stream: Stream, id: *mut u64);
}

impl Functions {
    /// Opens the library and resolves every function.
    ///
    /// # Errors
    /// When the library or one of its functions is missing.
    pub(super) fn load(path: &Path) -> Result<Self, LoadError> {
        // SAFETY: the library is the driver that the operator has installed, or names.
        let library = unsafe { library::open(path) };
        let failed = |reason| LoadError::Library { library: path.to_owned(), reason };
        Self::resolve(library.map_err(failed)?, path)
    }
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Functions").finish_non_exhaustive()
    }
}
