//! A kernel that faults, for tests of what a worker's fault does to others.

use super::driver::{DriverError, OpenError, select};
use super::export::CudaExporter;
use super::selector::CudaSelector;

/// Writes where nothing is ever mapped. The driver translates it for the device.
const KERNEL: &[u8] = b".version 7.0
.target sm_80
.address_size 64
.visible .entry fault(.param .u64 at)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [at];
    mov.u32 %r1, 7;
    st.global.u32 [%rd1], %r1;
    ret;
}
\0";

/// An address of the first page.
const NOWHERE: u64 = 16;

impl CudaExporter {
    /// Lets a kernel of this process fault, and gives what the driver says of it: the context is of no more use then.
    ///
    /// # Errors
    /// When the kernel cannot be launched.
    pub fn fault(&self, selector: CudaSelector) -> Result<DriverError, OpenError> {
        let device = select(&self.driver, selector)?;
        let failed = |error| OpenError::Device { device: device.label(), error };
        let context = self.context(device.device).map_err(failed)?;
        let current = context.enter().map_err(failed)?;
        let stream = current.create_stream().map_err(failed)?;
        // SAFETY: the image is text that ends with a zero.
        let module = unsafe { current.load_module(KERNEL) }.map_err(failed)?;
        // SAFETY: the module is loaded.
        let function = unsafe { current.function(module, c"fault") }.map_err(failed)?;
        // SAFETY: the kernel takes one address, and what it does with it is an error of the driver's.
        let launched = unsafe { current.launch(function, [1, 1], 1, stream, &NOWHERE) };
        launched.map_err(failed)?;
        loop {
            // SAFETY: the stream was created above, and lives as long as the context.
            if let Err(error) = unsafe { current.is_idle(stream) } {
                return Ok(error);
            }
        }
    }
}
