//! The driver's calls for streams, modules and launches, as methods of [`Current`].

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};

use super::context::Current;
use super::driver::DriverError;
use super::sys::{self, DevicePointer, Function, Module, Stream, status};

type Result<T> = std::result::Result<T, DriverError>;

/// Streams, modules and launches.
impl Current<'_> {
    /// A stream of the highest priority that has no order with the default stream.
    pub(super) fn create_stream(self) -> Result<Stream> {
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the driver writes two ints.
        let status = unsafe {
            (self.functions().ctx_get_stream_priority_range)(&raw mut least, &raw mut greatest)
        };
        self.check("cuCtxGetStreamPriorityRange", status)?;
        let mut stream = Stream(0);
        // SAFETY: the driver writes one handle.
        let status = unsafe {
            (self.functions().stream_create_with_priority)(
                &raw mut stream,
                sys::STREAM_NON_BLOCKING,
                greatest,
            )
        };
        self.check("cuStreamCreateWithPriority", status)?;
        Ok(stream)
    }

    /// # Safety
    /// The stream is from [`Current::create_stream`], and is used no more.
    pub(super) unsafe fn destroy_stream(self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().stream_destroy)(stream) };
        self.check("cuStreamDestroy", status)
    }

    /// Whether everything on the stream is done. A fault of the device comes as the error.
    ///
    /// # Safety
    /// The stream lives.
    pub(super) unsafe fn is_idle(self, stream: Stream) -> Result<bool> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().stream_query)(stream) };
        if status == status::NOT_READY {
            return Ok(false);
        }
        self.check("cuStreamQuery", status).map(|()| true)
    }

    /// Waits until everything on the stream is done.
    ///
    /// # Safety
    /// The stream lives.
    pub(super) unsafe fn synchronize(self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().stream_synchronize)(stream) };
        self.check("cuStreamSynchronize", status)
    }

    /// Whether work on the stream becomes part of a graph. A legacy default stream counts as captured while any stream that it
    /// would wait for is.
    ///
    /// # Safety
    /// The stream lives, or is 0.
    pub(super) unsafe fn is_capturing(self, stream: Stream) -> Result<bool> {
        let mut capture = 0;
        // SAFETY: the caller's own promise, and a live local.
        let status = unsafe { (self.functions().stream_is_capturing)(stream, &raw mut capture) };
        if status == status::STREAM_CAPTURE_IMPLICIT {
            return Ok(true);
        }
        self.check("cuStreamIsCapturing", status).map(|()| capture != 0)
    }

    /// Waits until everything on every stream of this process's context is done.
    pub(super) fn settle_context(self) -> Result<()> {
        // SAFETY: no condition.
        let status = unsafe { (self.functions().ctx_synchronize)() };
        self.check("cuCtxSynchronize", status)
    }

    /// Copies to the device once everything before it on the stream is done.
    ///
    /// # Safety
    /// The stream lives. The bytes lie in pinned memory that nobody writes until the copy is done, and so many device bytes
    /// lie in one allocation that lives until then.
    pub(super) unsafe fn copy_to_device(
        self,
        stream: Stream,
        to: DevicePointer,
        from: NonNull<u8>,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe {
            (self.functions().memcpy_htod_async)(to, from.as_ptr().cast(), bytes, stream)
        };
        self.check("cuMemcpyHtoDAsync", status)
    }

    /// Writes the word once everything before it on the stream is done and visible to all.
    ///
    /// # Safety
    /// The stream lives. The address is that of a word that lives until it is written.
    pub(super) unsafe fn write_word(
        self,
        stream: Stream,
        word: DevicePointer,
        value: u64,
    ) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe {
            (self.functions().stream_write_value_64)(
                stream,
                word,
                value,
                sys::STREAM_WRITE_VALUE_DEFAULT,
            )
        };
        self.check("cuStreamWriteValue64", status)
    }

    /// Loads machine code.
    ///
    /// # Safety
    /// The image is a whole one: the driver reads as far as its headers say.
    pub(super) unsafe fn load_module(self, image: &[u8]) -> Result<Module> {
        let mut module = Module(0);
        // SAFETY: the caller's own promise; the driver writes one handle.
        let status =
            unsafe { (self.functions().module_load_data)(&raw mut module, image.as_ptr().cast()) };
        self.check("cuModuleLoadData", status)?;
        Ok(module)
    }

    /// # Safety
    /// The module is from [`Current::load_module`]; no function of it runs or is used any more.
    pub(super) unsafe fn unload_module(self, module: Module) -> Result<()> {
        // SAFETY: the caller's own promise.
        let status = unsafe { (self.functions().module_unload)(module) };
        self.check("cuModuleUnload", status)
    }

    /// # Safety
    /// The module is loaded.
    pub(super) unsafe fn function(self, module: Module, name: &CStr) -> Result<Function> {
        let mut function = Function(0);
        // SAFETY: the caller's own promise; the driver reads the name and writes one handle.
        let status = unsafe {
            (self.functions().module_get_function)(&raw mut function, module, name.as_ptr())
        };
        self.check("cuModuleGetFunction", status)?;
        Ok(function)
    }

    /// Starts a kernel of one parameter.
    ///
    /// # Safety
    /// The function's module is loaded and the stream lives. The parameter is of the type that the kernel takes, and every
    /// address that the kernel makes of it stays mapped until the kernel is done.
    pub(super) unsafe fn launch<P>(
        self,
        function: Function,
        [columns, rows]: [u32; 2],
        threads: u32,
        stream: Stream,
        parameter: &P,
    ) -> Result<()> {
        let mut parameters = [ptr::from_ref(parameter).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's own promise. The driver copies the parameter before it returns and does not write it.
        let status = unsafe {
            (self.functions().launch_kernel)(
                function,
                columns,
                rows,
                1,
                threads,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.check("cuLaunchKernel", status)
    }
}
