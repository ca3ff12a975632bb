//! The driver as a test calls it: symbols of the opened library, with the types of `cuda.h`.

use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::ptr;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use statecopy_kernels::cuda::arguments::Arguments;
use statecopy_stub_cuda::{CUresult, Entered, Stub};

/// What a call gives.
pub(crate) type Answer<T = ()> = Result<T, CUresult>;

/// A handle of 64 bytes, passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle(pub(crate) [u8; 64]);

/// `CUmemAllocationProp` with what tests set of it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Properties {
    pub(crate) kind: u32,
    pub(crate) handle_types: u32,
    pub(crate) location: [i32; 2],
    pub(crate) rest: [u64; 2],
}

impl Properties {
    /// Memory of device 0.
    pub(crate) fn of(handle_types: u32) -> Self {
        Self { kind: 1, handle_types, location: [1, 0], rest: [0; 2] }
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub(crate) location: [i32; 2],
    pub(crate) flags: u32,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct KernelNode {
    pub(crate) function: u64,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) parameters: *mut *mut c_void,
    pub(crate) extra: u64,
    pub(crate) kernel: u64,
    pub(crate) context: u64,
}

/// The driver in this process.
pub(crate) struct Driver {
    library: Library,
    /// What makes the driver use the test's folder; nothing where the environment does.
    _entered: Option<Entered>,
}

macro_rules! calls {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        #[expect(non_snake_case, reason = "the names are the driver's")]
        #[expect(clippy::too_many_arguments, reason = "as many as the driver's functions have")]
        impl Driver {
            $(
                pub(crate) fn $name(&self, $($argument: $type),*) -> Answer {
                    type Function = unsafe extern "C" fn($($type),*) -> CUresult;
                    // SAFETY: cuda.h gives the symbol this type.
                    let function = unsafe {
                        self.library.get::<Function>(stringify!($name).as_bytes())
                    };
                    let function = function.unwrap();
                    // SAFETY: each pointer that a test gives points to what the function reads or writes.
                    match unsafe { function($($argument),*) } {
                        CUresult::SUCCESS => Ok(()),
                        error => Err(error),
                    }
                }
            )*
        }
    };
}

calls! {
    cuInit(flags: u32);
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32);
    cuDeviceGetName(name: *mut c_char, room: i32, device: i32);
    cuDeviceGetCount(count: *mut i32);
    cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: i32);
    cuDevicePrimaryCtxRetain(context: *mut u64, device: i32);
    cuDevicePrimaryCtxRelease_v2(device: i32);
    cuCtxSetCurrent(context: u64);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemAlloc_v2(memory: *mut u64, bytes: usize);
    cuMemAllocAsync(memory: *mut u64, bytes: usize, stream: u64);
    cuMemFree_v2(memory: u64);
    cuMemHostAlloc(memory: *mut u64, bytes: usize, flags: u32);
    cuMemFreeHost(memory: u64);
    cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    cuMemsetD8_v2(memory: u64, value: u8, bytes: usize);
    cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64);
    cuPointerGetAttribute(value: *mut c_void, attribute: u32, address: u64);
    cuIpcGetMemHandle(handle: *mut Handle, memory: u64);
    cuIpcOpenMemHandle_v2(memory: *mut u64, handle: Handle, flags: u32);
    cuIpcCloseMemHandle(memory: u64);
    cuMemAddressReserve(at: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64);
    cuMemAddressFree(at: u64, bytes: usize);
    cuMemCreate(handle: *mut u64, bytes: usize, properties: *const Properties, flags: u64);
    cuMemRelease(handle: u64);
    cuMemMap(at: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    cuMemUnmap(at: u64, bytes: usize);
    cuMemSetAccess(at: u64, bytes: usize, access: *const Access, count: usize);
    cuMemExportToShareableHandle(to: *mut c_void, handle: u64, kind: u32, flags: u64);
    cuMemImportFromShareableHandle(handle: *mut u64, from: *mut c_void, kind: u32);
    cuMemRetainAllocationHandle(handle: *mut u64, at: u64);
    cuStreamCreateWithPriority(stream: *mut u64, flags: u32, priority: i32);
    cuStreamDestroy_v2(stream: u64);
    cuStreamQuery(stream: u64);
    cuStreamSynchronize(stream: u64);
    cuStreamWriteValue64_v2(stream: u64, at: u64, value: u64, flags: u32);
    cuStreamWaitValue64_v2(stream: u64, at: u64, value: u64, flags: u32);
    cuCtxSynchronize();
    cuMemHostRegister_v2(memory: u64, bytes: usize, flags: u32);
    cuMemHostUnregister(memory: u64);
    cuStreamBatchMemOp_v2(stream: u64, count: u32, operations: *mut [u64; 6], flags: u32);
    cuStreamGetId(stream: u64, id: *mut u64);
    cuStreamIsCapturing(stream: u64, status: *mut u32);
    cuStreamBeginCapture_v2(stream: u64, mode: u32);
    cuStreamEndCapture(stream: u64, graph: *mut u64);
    cuStreamGetCaptureInfo_v2(
        stream: u64, status: *mut u32, id: *mut u64, graph: *mut u64, dependencies: *mut c_void, count: *mut usize
    );
    cuThreadExchangeStreamCaptureMode(mode: *mut u32);
    cuEventCreate(event: *mut u64, flags: u32);
    cuEventRecord(event: u64, stream: u64);
    cuEventQuery(event: u64);
    cuEventDestroy_v2(event: u64);
    cuStreamWaitEvent(stream: u64, event: u64, flags: u32);
    cuUserObjectCreate(object: *mut u64, data: *mut c_void, destroy: HostFunction, references: u32, flags: u32);
    cuUserObjectRelease(object: u64, references: u32);
    cuGraphRetainUserObject(graph: u64, object: u64, references: u32, flags: u32);
    cuGraphCreate(graph: *mut u64, flags: u32);
    cuGraphAddKernelNode_v2(
        node: *mut u64, graph: u64, dependencies: *const u64, count: usize, kernel: *const KernelNode
    );
    cuGraphExecKernelNodeSetParams_v2(executable: u64, node: u64, kernel: *const KernelNode);
    cuGraphUpload(executable: u64, stream: u64);
    cuGraphInstantiateWithFlags(executable: *mut u64, graph: u64, flags: u64);
    cuGraphLaunch(executable: u64, stream: u64);
    cuGraphDestroy(graph: u64);
    cuGraphExecDestroy(executable: u64);
    cuModuleLoadData(module: *mut u64, image: *const c_void);
    cuModuleUnload(module: u64);
    cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char);
    cuLaunchKernel(
        function: u64, x: u32, y: u32, z: u32, block_x: u32, block_y: u32, block_z: u32, shared: u32, stream: u64,
        parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
}

/// `CUhostFn`.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// What a call writes through its first pointer.
pub(crate) fn out<T: Default>(call: impl FnOnce(*mut T) -> Answer) -> Answer<T> {
    let mut value = T::default();
    call(&raw mut value)?;
    Ok(value)
}

impl Driver {
    /// Loaded, and not yet initialised.
    pub(crate) fn load(stub: &Stub) -> Self {
        Self { _entered: Some(stub.enter()), ..Self::named(&stub.library()) }
    }

    /// As a program loads it that knows only its name or path.
    pub(crate) fn named(name: &Path) -> Self {
        // SAFETY: the stub's initialisers ask nothing of the caller.
        let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.unwrap();
        Self { library, _entered: None }
    }

    /// Initialised, with the context of device 0 current.
    pub(crate) fn open(stub: &Stub) -> Self {
        let driver = Self::load(stub);
        driver.start().unwrap();
        driver
    }

    /// Initialises, and makes the context of device 0 current.
    pub(crate) fn start(&self) -> Answer {
        self.cuInit(0)?;
        let context = out(|at| self.cuDevicePrimaryCtxRetain(at, 0))?;
        self.cuCtxSetCurrent(context)
    }

    /// Gives the context back, so that a leak check sees what else is held.
    pub(crate) fn close(self) {
        self.cuCtxSetCurrent(0).unwrap();
        self.cuDevicePrimaryCtxRelease_v2(0).unwrap();
    }

    pub(crate) fn allocate(&self, bytes: usize) -> Answer<u64> {
        out(|at| self.cuMemAlloc_v2(at, bytes))
    }

    /// Memory of the device that holds these bytes.
    pub(crate) fn holding(&self, bytes: &[u8]) -> u64 {
        let memory = self.allocate(bytes.len()).unwrap();
        self.cuMemcpyHtoD_v2(memory, bytes.as_ptr().cast(), bytes.len()).unwrap();
        memory
    }

    pub(crate) fn read(&self, from: u64, bytes: usize) -> Answer<Vec<u8>> {
        let mut read = vec![0; bytes];
        self.cuMemcpyDtoH_v2(read.as_mut_ptr().cast(), from, bytes)?;
        Ok(read)
    }

    /// The legacy handle of the allocation at an address.
    pub(crate) fn export(&self, memory: u64) -> Answer<Handle> {
        let mut handle = Handle([0; 64]);
        self.cuIpcGetMemHandle(&raw mut handle, memory)?;
        Ok(handle)
    }

    pub(crate) fn open_handle(&self, handle: Handle) -> Answer<u64> {
        out(|at| self.cuIpcOpenMemHandle_v2(at, handle, 1))
    }

    pub(crate) fn attribute<T: Default>(&self, attribute: u32, address: u64) -> Answer<T> {
        out(|at: *mut T| self.cuPointerGetAttribute(at.cast(), attribute, address))
    }

    pub(crate) fn create(&self, bytes: usize, handle_types: u32) -> Answer<u64> {
        let properties = Properties::of(handle_types);
        out(|at| self.cuMemCreate(at, bytes, &raw const properties, 0))
    }

    pub(crate) fn reserve(&self, bytes: usize) -> Answer<u64> {
        out(|at| self.cuMemAddressReserve(at, bytes, 0, 0, 0))
    }

    /// Device 0 may do with a range what the flags say: 1 read, 3 write too.
    pub(crate) fn allow(&self, at: u64, bytes: usize, flags: u32) -> Answer {
        let access = Access { location: [1, 0], flags };
        self.cuMemSetAccess(at, bytes, &raw const access, 1)
    }

    pub(crate) fn export_descriptor(&self, handle: u64) -> Answer<i32> {
        out(|at: *mut i32| self.cuMemExportToShareableHandle(at.cast(), handle, 1, 0))
    }

    pub(crate) fn import_descriptor(&self, descriptor: i32) -> Answer<u64> {
        let value = ptr::without_provenance_mut(descriptor.cast_unsigned() as usize);
        out(|at| self.cuMemImportFromShareableHandle(at, value, 1))
    }

    pub(crate) fn stream(&self) -> Answer<u64> {
        out(|at| self.cuStreamCreateWithPriority(at, 1, 0))
    }

    pub(crate) fn load_module(&self) -> Answer<u64> {
        let image = *b"\x7fELF";
        out(|at| self.cuModuleLoadData(at, image.as_ptr().cast()))
    }

    pub(crate) fn function(&self, module: u64, name: &str) -> Answer<u64> {
        let name = CString::new(name).unwrap();
        out(|at| self.cuModuleGetFunction(at, module, name.as_ptr()))
    }

    /// Launches over so many rows.
    pub(crate) fn launch(
        &self,
        function: u64,
        stream: u64,
        arguments: &Arguments,
        rows: u32,
    ) -> Answer {
        let mut arguments = arguments.clone();
        let mut parameters = [(&raw mut arguments).cast::<c_void>()];
        let (pointers, none) = (parameters.as_mut_ptr(), ptr::null_mut());
        self.cuLaunchKernel(function, 1, rows, 1, 256, 1, 1, 0, stream, pointers, none)
    }
}
