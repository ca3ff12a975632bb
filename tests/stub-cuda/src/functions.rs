//! The functions that the stub exports, and what each needs.

/// What must be there before a function does its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// `cuInit`; still answers after a sticky error.
    Driver,
    /// A process without a sticky error.
    Process,
    /// A context that is current in the calling thread as well.
    Context,
}

macro_rules! functions {
    ($($name:ident: $needs:ident $(, $allocates:ident)?;)*) => {
        /// A function of the driver or of the compiler, by its exported name.
        #[expect(non_camel_case_types, reason = "the names are the driver's")]
        #[expect(missing_docs, reason = "named and described by cuda.h")]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Function {
            $($name,)*
        }

        impl Function {
            /// Every one, in the order of their numbers.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The exported name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            pub(crate) fn needs(self) -> Needs {
                match self {
                    $(Self::$name => Needs::$needs,)*
                }
            }

            /// Whether a capture of another thread forbids it, unless the calling thread's own mode is relaxed.
            pub(crate) fn disturbs_captures(self) -> bool {
                matches!(
                    self,
                    Self::cuMemAlloc_v2
                        | Self::cuMemFree_v2
                        | Self::cuMemHostAlloc
                        | Self::cuMemFreeHost
                        | Self::cuMemHostRegister_v2
                        | Self::cuMemHostUnregister
                        | Self::cuMemCreate
                        | Self::cuMemUnmap
                        | Self::cuEventQuery
                )
            }

            /// Whether it allocates memory, loads code or compiles: what no one may do between a seal and the next registration.
            #[must_use]
            pub fn allocates(self) -> bool {
                match self {
                    $(Self::$name => [$(stringify!($allocates),)? ""].contains(&"allocates"),)*
                }
            }
        }
    };
}

functions! {
    cuInit: Driver;
    cuDriverGetVersion: Driver;
    cuDeviceGetCount: Driver;
    cuDeviceGet: Driver;
    cuDeviceGetName: Driver;
    cuDeviceGetUuid: Driver;
    cuDeviceGetUuid_v2: Driver;
    cuDeviceTotalMem_v2: Driver;
    cuDeviceGetAttribute: Driver;
    cuDevicePrimaryCtxRetain: Process;
    cuDevicePrimaryCtxRelease_v2: Process;
    cuDevicePrimaryCtxSetFlags_v2: Process;
    cuCtxSetCurrent: Process;
    cuCtxGetCurrent: Driver;
    cuCtxPushCurrent_v2: Process;
    cuCtxPopCurrent_v2: Process;
    cuCtxGetDevice: Context;
    cuCtxSynchronize: Context;
    cuCtxGetStreamPriorityRange: Context;
    cuMemGetInfo_v2: Context;
    cuMemAlloc_v2: Context, allocates;
    cuMemFree_v2: Context;
    cuMemAllocAsync: Context, allocates;
    cuMemFreeAsync: Context;
    cuMemHostAlloc: Context, allocates;
    cuMemFreeHost: Context;
    cuMemHostGetDevicePointer_v2: Context;
    cuMemHostRegister_v2: Context;
    cuMemHostUnregister: Context;
    cuMemGetAddressRange_v2: Context;
    cuPointerGetAttribute: Process;
    cuMemcpyHtoD_v2: Context;
    cuMemcpyHtoDAsync_v2: Context;
    cuMemcpyDtoH_v2: Context;
    cuMemcpyDtoDAsync_v2: Context;
    cuMemsetD8_v2: Context;
    cuIpcGetMemHandle: Context;
    cuIpcOpenMemHandle_v2: Context;
    cuIpcCloseMemHandle: Context;
    cuMemGetAllocationGranularity: Process;
    cuMemAddressReserve: Process;
    cuMemAddressFree: Process;
    cuMemCreate: Process, allocates;
    cuMemRelease: Process;
    cuMemMap: Process;
    cuMemUnmap: Process;
    cuMemSetAccess: Process;
    cuMemExportToShareableHandle: Process;
    cuMemImportFromShareableHandle: Process;
    cuMemRetainAllocationHandle: Process;
    cuMemGetAllocationPropertiesFromHandle: Process;
    cuStreamCreateWithPriority: Context;
    cuStreamDestroy_v2: Context;
    cuStreamQuery: Context;
    cuStreamSynchronize: Context;
    cuStreamIsCapturing: Context;
    cuStreamWriteValue64_v2: Context;
    cuStreamWaitValue64_v2: Context;
    cuStreamBatchMemOp_v2: Context;
    cuStreamGetId: Context;
    cuStreamWaitEvent: Context;
    cuStreamBeginCapture_v2: Context;
    cuStreamEndCapture: Context;
    cuStreamGetCaptureInfo_v2: Context;
    cuThreadExchangeStreamCaptureMode: Process;
    cuEventCreate: Context;
    cuEventRecord: Context;
    cuEventQuery: Context;
    cuEventDestroy_v2: Context;
    cuUserObjectCreate: Process;
    cuUserObjectRelease: Process;
    cuGraphRetainUserObject: Process;
    cuGraphCreate: Process;
    cuGraphAddKernelNode_v2: Context;
    cuGraphInstantiateWithFlags: Context, allocates;
    cuGraphUpload: Context, allocates;
    cuGraphExecKernelNodeSetParams_v2: Context;
    cuGraphLaunch: Context;
    cuGraphDestroy: Process;
    cuGraphExecDestroy: Process;
    cuModuleLoadData: Context, allocates;
    cuModuleUnload: Context;
    cuModuleGetFunction: Context;
    cuLaunchKernel: Context;
    nvrtcCompileProgram: Driver, allocates;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_places_in_the_list() {
        for (place, function) in Function::ALL.iter().enumerate() {
            assert_eq!(*function as usize, place, "{}", function.name());
        }
    }

    #[test]
    fn what_allocates_is_told_apart() {
        assert!(Function::cuMemAlloc_v2.allocates());
        assert!(Function::cuModuleLoadData.allocates());
        assert!(Function::cuGraphUpload.allocates());
        assert!(!Function::cuLaunchKernel.allocates());
        assert!(!Function::cuGraphLaunch.allocates());
        assert!(!Function::cuMemMap.allocates());
    }
}
