//! Pooled buffers, as tensors.

use std::sync::Arc;

use statecopy_client::DataType;
use statecopy_client::sharing::Buffer;

use crate::export::Owner;
use crate::memory::{Device, Place, Tensor};

/// A dense tensor at the start of a pooled buffer, which goes back with the last reference to it.
pub(crate) fn tensor(buffer: Buffer, device: Device, dtype: DataType, shape: &[u64]) -> Tensor {
    let place = Place { device, address: buffer.address() };
    Tensor::dense(Owner::Pooled(Arc::new(buffer)), place, dtype, shape)
}
